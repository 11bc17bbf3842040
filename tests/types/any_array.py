"""Calls with an array of no framework. A type checker must refuse the lines that are marked, and no others."""

from typing import Any

import xent


class Array:
    shape: tuple[int, ...]
    dtype: Any


x, y = Array(), Array()

loss: Array = xent.cross_entropy(x, y)
loss = xent.cross_entropy(x, y, weight=x, softcap=3, label_smoothing=x, normalizer=y, axis=1, inplace=True)
loss = xent.linear_cross_entropy(x, x, y, shift=1, workspace=2**20, reduction="sum")
loss = xent.linear_cross_entropy(input=x, linear_weight=x, target=y, shift=(1, 2), head_weight=(1.0, 0.5))
reported: tuple[Array, xent.Stats] = xent.cross_entropy(x, y, stats=("lse", "accuracy"))
reported = xent.linear_cross_entropy(x, xent.QuantizedWeight(x, x), y, stats=["lse"])
lp: Array = xent.log_probs(x, y, temperature=x, support=xent.Support(y, y))
both: tuple[Array, Array] = xent.linear_log_probs(x, x, y, shift=1, entropy=True)
three: tuple[Array, Array, xent.Stats] = xent.log_probs(x, y, entropy=True, stats={"lse"})
reported = xent.linear_log_probs(x, x, y, stats=("lse",))
loss = xent.divergence(x, xent.TopKTeacher(y, x), axis=0)
reported = xent.linear_divergence(x, x, xent.LinearTeacher(x, x), beta=0.5, stats=("entropy",))

xent.linear_cross_entropy("x", 3, None)  # error
xent.cross_entropy(1.0, y)  # error
xent.cross_entropy(x, [0, 1])  # error
xent.cross_entropy(x, y, weight=2.0)  # error
xent.cross_entropy(x, y, reduction=None)  # error
xent.cross_entropy(x, y, ignore_index=-100.0)  # error
xent.cross_entropy(x, y, softcup=3.0)  # error
xent.cross_entropy(x, y, workspace=1)  # error
xent.linear_cross_entropy(x, x, y, workspace="1GB")  # error
xent.linear_cross_entropy(x, x, y, shift=1.0)  # error
xent.linear_log_probs(x, x, y, shift=(1, 2))  # error
xent.log_probs(x, y, reduction="none")  # error
xent.divergence(x, "teacher")  # error
loss = xent.cross_entropy(x, y, stats=("lse",))  # error
lp = xent.log_probs(x, y, entropy=True)  # error
