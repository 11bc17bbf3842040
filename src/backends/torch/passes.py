"""The two passes of a prepared call, with the gradients of class probabilities and of a trained logit scale.

Plain calls and custom operations both run these: `function` for autograd, `operations` for compilers.

The loss depends on raw logits z and their scale s only through the product s z, also with a softcap. With g = dL/dz::

    dL/ds = (1/s) sum_ic g_ic z_ic

For logits z = h W^T + b the sum is sum(dL/dh * h) + sum(dL/db * b), or the same with W instead of h. These gradients
are computed anyway, or for this sum only.

The loss is linear in class probabilities q. With w, e and a as in `xent.cross_entropy`, the divisor D of the reduction,
and upstream gradients u of the loss and n of the statistic nll::

    dL/dq_ic = (u a_i / D (1-e) w_c + n_i) (-log p_ic)      exactly 0 if the first factor is 0

The z-loss and the divisor of "mean" do not depend on q. The steps do not compute this gradient. The backward pass of
such a call computes log p here, from the given logits, or from float32 logits of the hidden states.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch import private
from xent.backends.torch.contract import Upstream, wide
from xent.backends.torch.loop import run, setting_of
from xent.backends.torch.memory import Rows
from xent.backends.torch.prepare import compute_of
from xent.backends.torch.products import Classifier
from xent.core.call import Call, Given, Probabilities, array_of
from xent.core.chunks import rows_per_block, rows_per_chunk

__all__ = [
    "PLAIN_TYPES",
    "SCALES",
    "Asked",
    "asked_of",
    "backward",
    "forward",
    "is_plain",
    "leaves_of",
    "scale",
    "undisturbed",
]

PLAIN_TYPES = (Tensor, torch.nn.Parameter)

Asked = tuple[bool, ...]
"""Which gradients are asked for: those of the leaves (logits; or input, weight, bias), of class probabilities, and of
the logit scale."""


def leaves_of(call: Call) -> tuple[Any, ...]:
    """Return the values to which `Asked` refers."""
    source = call.source
    leaves = (source.logits,) if isinstance(source, Given) else (source.input, source.weight, source.bias)
    values = call.target.values if isinstance(call.target, Probabilities) else None
    return (*leaves, values, call.activation.logit_scale)


def asked_of(leaves: tuple[Any, ...]) -> Asked:
    """Return which gradients are asked for."""
    enabled = torch.is_grad_enabled()
    return tuple([enabled and isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves])


def is_plain(tensors: Any) -> bool:
    """Return whether the tensors have memory and nothing is traced, so that no custom operation is needed.

    Batched tensors and those of ended transforms are of type Tensor, but have no memory.
    """
    if torch.compiler.is_dynamo_compiling() or private.dispatch_modes() or private.transforms_active():
        return False
    try:
        for tensor in tensors:
            if type(tensor) not in PLAIN_TYPES or tensor.is_meta or tensor.is_neg():
                return False
            tensor.data_ptr()
    except RuntimeError:
        return False
    return private.forward_level() < 0 and not torch.jit.is_tracing()  # type: ignore[attr-defined]


def forward(call: Call, asked: Asked, kernel: str, skips: bool, reuse: bool = False) -> list[Tensor]:
    """Compute a prepared call. Return the loss, the statistics, and then what the backward pass needs.

    These are the gradients, if they are made first, and in float16 a factor they still have; otherwise the saved sums.
    """
    setting = setting_of(call, _with_scale(call, asked))
    steps, source, saved = run(setting, kernel, skips, reuse)
    made = steps.results()
    if setting.made_first:
        gradients = source.gradients()
        made += [one for one, wanted in zip(gradients, asked, strict=False) if wanted and one is not None]
        if asked[-1]:
            made.append(_scale_gradient(call, gradients))
        if setting.compute == torch.float16:
            made.append(made[0].new_ones(()) if steps.deferred is None else steps.deferred.clone())
    elif saved is not None:
        made.append(saved)
    return made


def backward(
    call: Call, asked: Asked, kernel: str, saved: Tensor | None, upstream: Upstream, skips: bool, reuse: bool = False
) -> list[Tensor | None]:
    """Return the gradients that are asked for, and None for the others."""
    needs = _with_scale(call, asked)
    made: list[Tensor | None] = [None] * len(needs)
    if any(needs):
        made = run(setting_of(call, needs, upstream), kernel, skips, reuse, saved)[1].gradients()
    of_scale = _scale_gradient(call, made) if asked[-1] else None
    made = [one if wanted else None for one, wanted in zip(made, asked, strict=False)]
    return [*made, _probability_gradient(call, upstream) if asked[-2] else None, of_scale]


def undisturbed(device: torch.device, function: Callable[..., Any], *args: Any) -> Any:
    """Call `function` without gradients and autocast, on that device as the current one, on which Triton launches."""
    kind = device.type
    if kind == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return undisturbed(device, function, *args)
    with torch.no_grad():
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            with torch.autocast(kind, enabled=False):
                return function(*args)
        return function(*args)


def scale(grads: list[Tensor], upstream: Tensor, deferred: Tensor | None, inplace: bool) -> list[Tensor]:
    """Return gradients times 0-d factors of the dtype of sums, rounded once; with `inplace` overwrite them."""
    factor = upstream if deferred is None else upstream * deferred
    if factor.is_cpu and inplace and float(factor) == 1:
        return grads
    return [_product(grad, factor, inplace) for grad in grads]


def _product(grad: Tensor, factor: Tensor, inplace: bool) -> Tensor:
    if not factor.is_cpu and grad.dim():
        factor = factor.reshape(1)  # a 0-d factor would be rounded to the gradient's dtype first
    return torch.mul(grad, factor, out=grad if inplace else torch.empty_like(grad))


Scale = Callable[[list[Tensor], Tensor, Tensor | None, bool], list[Tensor]]

SCALES: dict[str, Scale] = {}
"""Backend -> its function instead of `scale`."""


def _with_scale(call: Call, asked: Asked) -> Asked:
    """Return which gradients of the leaves are needed, also for that of the scale."""
    if not asked[-1]:
        return asked[:-2]
    if isinstance(call.source, Given):
        return (True,)
    return asked[0] or not asked[1], asked[1], call.source.bias is not None


def _scale_gradient(call: Call, gradients: list[Tensor | None]) -> Tensor:
    """Return the gradient of the scale, 0-d, in the dtype of sums.

    An element whose gradient is 0 adds 0, even if its value is infinite or NaN.
    """
    leaves = list(leaves_of(call)[:-2])
    if len(leaves) == 3 and gradients[0] is not None:
        leaves[1] = None
    total: Any = 0.0
    for gradient, values in zip(gradients, leaves, strict=True):
        if gradient is None or values is None or not gradient.numel():
            continue
        dtype, rows = wide(values.dtype), Rows(values)
        for start, block in Rows(gradient).blocks(_block_rows(gradient, dtype)):
            product = block.to(dtype) * rows.block(start, start + len(block)).to(dtype)
            total = total + product.masked_fill_(block == 0, 0).sum()
    if not isinstance(total, Tensor):
        total = torch.zeros((), dtype=wide(compute_of(call.source)), device=array_of(call).device)
    found: Tensor = total / call.activation.logit_scale
    return found


def _probability_gradient(call: Call, upstream: Upstream) -> Tensor:
    """Return the gradient of the target of a prepared call, contiguous, in the target's dtype."""
    assert isinstance(call.target, Probabilities)
    options, (given, order) = call.options, call.target
    scale, cap, temperature = call.activation
    acc, row_weight, factor = wide(compute_of(call.source)), options.sample_weight, None
    grad = torch.zeros(given.shape, dtype=given.dtype, device=given.device)
    flat = grad.view(-1, given.shape[-1])
    if row_weight is None:
        row_weight = torch.ones(len(flat) if order is None else len(order), dtype=acc, device=given.device)
    if order is not None:
        row_weight = row_weight.masked_fill(order < 0, 0)
    factor = torch.zeros_like(row_weight)
    if upstream.loss is not None:
        if options.reduction == "mean":
            divisor = row_weight.sum() if options.normalizer is None else row_weight.new_zeros(()) + options.normalizer
            row_weight = torch.where(divisor == 0, 0, row_weight / divisor)
        factor = (row_weight * upstream.loss.to(acc).reshape(-1)).masked_fill(row_weight == 0, 0)
    class_weight = 1.0 if options.weight is None else options.weight.to(acc)
    for start, z in _logits(call, acc):
        rows = slice(start, start + len(z))
        scales = factor[rows, None] * (1 - options.label_smoothing) * class_weight
        if upstream.nll is not None:
            scales = scales + upstream.nll.to(acc)[rows, None]
        if order is not None:
            scales = scales.masked_fill((order[rows] < 0)[:, None], 0)
        x = z.mul_(scale)
        if cap is not None:
            x = x.div_(cap).tanh_().mul_(cap)
        if temperature is not None:
            x = x.div_(temperature[rows, None])
        found = torch.log_softmax(x, -1).mul_(-scales).masked_fill_(scales == 0, 0).to(grad.dtype)
        if order is None:
            flat[rows] = found
        else:
            flat.index_add_(0, order[rows].clamp(min=0), found)
    return grad


def _logits(call: Call, acc: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    """Yield (first row, new logits (R, V) in `acc`) of all rows."""
    source = call.source
    if isinstance(source, Given):
        for start, block in Rows(source.logits).blocks(_block_rows(source.logits, acc)):
            yield start, block.to(acc, copy=True)
        return
    made = Classifier(source, len(source.weight))
    count, device = len(made.hidden), source.weight.device
    step = max(rows_per_chunk(count, made.columns, acc.itemsize, source.workspace, device.type, False), 1)
    for start in range(0, count, step):
        hidden = made.hidden[start : start + step].to(made.compute)
        logits = torch.empty(len(hidden), made.columns, dtype=acc, device=device)
        made.write_logits(hidden, logits)
        yield start, logits[:, : made.classes]


def _block_rows(tensor: Tensor, dtype: torch.dtype) -> int:
    """Return the rows of a block of a tensor (..., V) that is converted to `dtype`."""
    return rows_per_block(max(tensor.shape[-1], 1), dtype.itemsize, tensor.device.type, torch.get_num_threads())
