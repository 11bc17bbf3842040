"""The matrix product for Hopper GPUs: the calls that it serves, and its launches. It never stores logits.

It serves target classes without label smoothing, without bias, temperatures per row, and options that are tensors.

Gluon, Triton's lower-level language, is not stable. The kernel is on where it compiles and agrees with PyTorch in a
small loss, which is computed once per process and variant, before the first call that the variant serves. This never
happens while a CUDA graph is captured: if nothing ran before, the variant stays off, so that the results of a process
do not change.
"""

import os
from functools import cache
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.contract import STEPS, Loaded, Part, Upstream, wide
from xent.backends.torch.plan import Asked, Plan
from xent.backends.torch.products import Classifier
from xent.backends.torch.signature import slot_of
from xent.backends.torch.sources import fold_tiles
from xent.backends.triton.kernels.sums import join_kernel
from xent.backends.triton.launches import cdiv, launch
from xent.backends.triton.machine import DEVICES, multiprocessors
from xent.core.call import Activation, Call, Classes, Options, Product
from xent.core.signature import binder

__all__ = ["fold_product", "gradient_product", "off", "product"]

_BAND = 128  # rows of a tile
_CLASSES = 256  # classes of a tile
_DEPTH = 64  # width of a slice of both factors: 128 bytes, which the copy engine can swizzle
_GROUP = 12  # bands, see `product_kernel`
_MOST_CHUNKS = 320  # chunks of the vocabulary, each with its own sums
_LARGEST_SOFTCAP = 256  # the kernel computes k tanh(v / k) with an error of about k / 10^7, too much if k is large
_SUMS_BYTES = 32 * 2**20  # bytes of the sums of all chunks in a launch
_JOINED = 32  # rows of a program of `join_kernel`
_HOPPER = 9
Variant = tuple[bool, bool, bool]
"""Whether there is a logit scale, a softcap, and an entropy: each variant is another kernel."""
_reasons: dict[Variant, str | None] = {}  # why a variant is off, None if it is on; empty before its probe


def product(
    inputs: Any, hidden: Tensor, weight: Tensor, classes: Tensor, coefficients: Tensor | None, out: Tensor, more: bool
) -> None:
    """Write sums, or with `coefficients` the gradient of the logits, of hidden states (R, D) to `out`.

    See `product_kernel`. `classes` (R,) int32.
    """
    from xent.backends.triton.hopper.product_kernel import product_kernel

    hidden = hidden if _can_be_copied(hidden) else hidden.clone(memory_format=torch.contiguous_format)
    factors = _descriptor(hidden, _BAND // 2), _descriptor(weight, _CLASSES)
    given = out if coefficients is None else coefficients
    sizes = len(hidden), len(weight), _chunks(len(weight)), out.stride(0) // 8, cdiv(weight.shape[1], _DEPTH)
    launch(
        product_kernel,
        multiprocessors(hidden.device),
        (*factors, classes, given, out, *sizes, inputs.numbers.logit_scale, inputs.numbers.softcap),
        {"SCALED": inputs.way.scaled, "CAPPED": inputs.way.capped, "WRITES": coefficients is not None, "MORE": more},
        num_warps=4,
        maxnreg=168,  # at entry, for three groups of four warps, before the registers are redistributed
    )


def _chunks(vocabulary: int) -> int:
    tiles = cdiv(vocabulary, _CLASSES)
    return cdiv(tiles, cdiv(tiles, _MOST_CHUNKS))


def _can_be_copied(matrix: Tensor) -> bool:
    """Return whether the copy engine supports a matrix: 16-bit elements, rows at multiples of 16 bytes, no overlap."""
    if matrix.dtype not in (torch.bfloat16, torch.float16):
        return False
    pitch, width = matrix.stride(0), matrix.shape[1]
    aligned = matrix.stride(1) == 1 and pitch * matrix.itemsize % 16 == 0 and matrix.data_ptr() % 16 == 0
    return aligned and 0 < width <= pitch


def _descriptor(matrix: Tensor, rows: int) -> Any:
    """Return the copy engine's descriptor of a matrix. Rows of a block are swizzled by 128 bytes in shared memory."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(matrix, list(matrix.shape), [matrix.stride(0), 1], [rows, _DEPTH], layout)


def _serves(inputs: Any, source: Classifier) -> bool:
    """Return whether the kernel serves a call, with hidden states of any strides."""
    weight, rows = source.weight, inputs.rows
    if not isinstance(inputs.setting.call.target, Classes) or inputs.way.smoothed or source.bias is not None:
        return False
    if rows.numbers is not None or rows.temperature is not None or inputs.numbers.softcap > _LARGEST_SOFTCAP:
        return False
    # Hidden states may be copied to contiguous memory. Then their rows are D elements apart.
    fits = len(weight) >= _CLASSES and _can_be_copied(weight) and weight.shape[1] * weight.itemsize % 16 == 0
    way, in_forward = inputs.way, inputs.setting.upstream is None
    variant = way.scaled, way.capped, inputs.columns.mixed >= 0 if in_forward else way.of_entropy
    return fits and off(weight.device, variant) is None


def fold_product(steps: Any, source: Classifier, loaded: Loaded, sums: Tensor) -> bool:
    """See `xent.backends.torch.contract.Steps.fold_product`. A row's bits do not depend on the other rows.

    An exact call has the same bits whatever statistics it returns: sums that the product lacks take a second pass over
    tiles. Other calls then take all sums from tiles. `steps` are `xent.backends.triton.steps.TritonSteps`.
    """
    inputs, setting, weight, part = steps.inputs, steps.setting, source.weight, loaded.part
    columns, of_targets = inputs.columns, loaded.target_logits
    lacks = max(columns.squares, columns.deficit, columns.key) >= 0
    if not _serves(inputs, source) or of_targets is None or (lacks and not setting.call.options.exact):
        return False
    workspace = setting.call.source.workspace
    if lacks:
        fold_tiles(steps, source, loaded, sums, wide(source.compute), workspace)
    hidden, classes = loaded.hidden, (inputs.rows.target[part.indices] - setting.first).to(torch.int32)
    kinds, chunks = 3 if columns.mixed >= 0 else 2, _chunks(len(weight))
    bytes_of_row = 4 * kinds * chunks
    step = max(min(workspace or _SUMS_BYTES, _SUMS_BYTES) // bytes_of_row // _BAND, _GROUP) * _BAND
    for start in range(0, len(hidden), step):
        some = slice(start, start + step)
        count = len(classes[some])
        made = hidden.new_empty(kinds, chunks, count, dtype=torch.float32)
        product(inputs, hidden[some], weight, classes[some], None, made, kinds == 3)
        rows, first, _ = inputs.rows_of(part, start)
        launch(
            join_kernel,
            cdiv(count, _JOINED),
            (
                *(made, chunks, count, sums[:, some], sums.stride(0), of_targets[some], rows, first),
                *(inputs.ignore_index, setting.first, setting.width, setting.vocabulary),
            ),
            {"columns": columns, "BLOCK": _JOINED, "PARTS": 32},
            num_warps=4,
        )
        del made  # before the memory of the next sums is allocated
    return True


def gradient_product(steps: Any, source: Classifier, loaded: Loaded, coefficients: Tensor, grad: Tensor) -> bool:
    """See `xent.backends.torch.contract.Steps.gradient_product`. `coefficients` (6, R) are those of `finish_kernel`."""
    inputs = steps.inputs
    if not _serves(inputs, source) or grad.dtype != source.compute or grad.data_ptr() % 16 or grad.stride(0) % 8:
        return False
    classes = coefficients[5].view(torch.int32)
    product(inputs, loaded.hidden, source.weight, classes, coefficients, grad, inputs.way.of_entropy)
    return True


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == _HOPPER


def off(device: torch.device, variant: Variant = (False, False, False)) -> str | None:
    """Return the reason why a variant of the kernel is not used on a device; None if it is."""
    if device.type != "cuda" or DEVICES != ("cuda",):
        return "no GPU"
    if not _is_hopper(device):
        return "the GPU is no Hopper"
    if os.environ.get("XENT_PORTABLE") == "1":
        return "XENT_PORTABLE=1"
    if variant not in _reasons:
        if torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
            _reasons[variant] = "the first call of the process was captured in a CUDA graph"
        else:
            _reasons[variant] = None  # on in the probe
            try:
                _reasons[variant] = _probe(device, *variant)
            except Exception as error:  # Triton raises many kinds
                _reasons[variant] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return _reasons[variant]


def _probe(device: torch.device, scaled: bool, capped: bool, with_entropy: bool) -> str | None:
    """Return None if a loss, its entropy and their gradient, from the products, are those of PyTorch's operations."""
    numbers = torch.arange(603 * 136, device=device, dtype=torch.float32)
    weight = numbers.sin().view(603, 136).bfloat16()  # partial tiles
    hidden = (0.3 * numbers).cos().view(603, 136)[:200].bfloat16()
    ids = torch.arange(200, device=device) * 3
    ids[-1] = -100
    tensors, counts, part = [hidden, weight, ids], (ids >= 0).float(), Part(0, 200)
    slots = [slot_of(place, tensor) for place, tensor in enumerate(tensors)]
    scale, cap = 0.7 if scaled else 1.0, 4.0 if capped else None
    options = Options("none", stats=("entropy",) if with_entropy else ())
    form = Call(Product(slots[0], slots[1], None, None, "bfloat16"), Classes(slots[2]), Activation(scale, cap), options)
    plan, call = Plan(form, Asked((True, False, False), False, False), "triton", skips=False), binder(form)(tensors)
    sums = torch.empty(len(plan.columns), 200, device=device)
    saved, of_loss = torch.empty_like(sums), torch.full_like(counts, 1 / 16)
    of_entropy = torch.ones_like(counts) if with_entropy else None
    forward = plan.setting(call)
    steps, classifier = STEPS["triton"](forward), Classifier(call.source, forward.width, forward.needs)
    runs = steps.fold_product(classifier, steps.select(classifier, part), sums)
    steps.finish(sums.unsqueeze(0), part, False, saved)
    results = steps.results()
    steps = STEPS["triton"](plan.setting(call, Upstream(of_loss, None, None, of_entropy)))
    grad = torch.empty(200, classifier.columns, dtype=torch.bfloat16, device=device)
    coefficients = steps.finish(saved.unsqueeze(0), part, True, None)
    runs = runs and steps.gradient_product(classifier, steps.select(classifier, part), coefficients, grad)
    x, slope = scale * (hidden.float() @ weight.float().t()), torch.full((), scale, device=device)
    if cap is not None:
        x = cap * (x / cap).tanh()
        slope = scale * (1 - (x / cap).square())
    log_p = torch.log_softmax(x, -1)
    p, target = log_p.exp(), torch.nn.functional.one_hot(ids.clamp(min=0), 603)
    entropy = -(p * log_p).sum(-1)
    of_x = (p - target) / 16
    if with_entropy:
        of_x = of_x - p * (log_p + entropy[:, None])
    expected = [-(log_p * target).sum(-1), *([entropy] if with_entropy else [])]
    pairs = [(result, plain * counts, 1e-4) for result, plain in zip(results, expected, strict=True)]
    of_z = of_x * slope * counts[:, None]
    for classes in (target, 1 - target):  # gradients of targets are much larger than those of other classes
        pairs.append((grad[:, :603] * classes, of_z * classes, 1e-2))
    agree = all(bool(((own - plain).abs() <= close * plain.abs().max()).all()) for own, plain, close in pairs)
    return None if runs and agree else "its results differ from PyTorch's"
