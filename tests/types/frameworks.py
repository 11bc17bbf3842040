"""Calls with tensors and arrays of the frameworks. A type checker must refuse the lines that are marked."""

import mlx.core as mx
import numpy as np
import torch

import xent

logits, target = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)
loss: torch.Tensor = xent.cross_entropy(logits, target, z_loss=torch.tensor(0.1))
loss, stats = xent.linear_cross_entropy(logits, torch.nn.Parameter(logits), target, stats=("lse",))
lp, entropy = xent.log_probs(logits, target, temperature=torch.ones(2), entropy=True)
lp.sum().backward()

of_mlx: mx.array = xent.cross_entropy(mx.zeros((2, 3)), mx.zeros((2,), mx.int32))
packed = xent.QuantizedWeight(*mx.quantize(mx.zeros((64, 64))))
of_mlx = xent.linear_cross_entropy(mx.zeros((2, 64)), packed, mx.zeros((2,), mx.int32), logit_scale=mx.array(0.5))

of_numpy = xent.cross_entropy(np.zeros((2, 3)), np.zeros(2, int), normalizer=np.float32(3))
rounded = of_numpy.round(4)

xent.cross_entropy(logits, target, weight="balanced")  # error
xent.cross_entropy([[0.5, 0.5]], target)  # error
xent.cross_entropy(mx.zeros((2, 3)), None)  # error
wrong: mx.array = xent.cross_entropy(logits, target)  # error
