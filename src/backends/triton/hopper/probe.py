"""Whether the kernels for Hopper GPUs are used, determined once per process by a small computation.

Gluon, Triton's lower-level language, is not stable. The kernels are on where they compile and agree with PyTorch. The
probe runs when the first steps start on a Hopper GPU. It never runs while a CUDA graph is captured: if nothing ran
before, the kernels stay off, so that the results of a process do not change.
"""

import math
import os
from functools import cache

import torch
from torch import Tensor

from xent.backends.triton.hopper.launches import fold_chunks, write_gradient
from xent.backends.triton.machine import DEVICES

__all__ = ["is_on", "note"]

_HOPPER = 9
_result: list[str | None] = []  # the reason why the kernels are off, None if they are on; empty before the probe
_ROWS, _CLASSES, _WIDTH = 200, 600, 136  # partial tiles of rows, classes and width
_SOFTCAP, _SCALE = 4.0, 0.7


def is_on(device: torch.device) -> bool:
    """Return whether the kernels are used on a device."""
    return _is_hopper(device) and _closed() is None


@cache
def _is_hopper(device: torch.device) -> bool:
    if device.type != "cuda" or DEVICES != ("cuda",) or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_properties(device).major == _HOPPER


def note() -> str:
    """Return a sentence for `python -m xent`: whether the Hopper kernels are used on the current GPU."""
    reason: str | None
    if DEVICES != ("cuda",):
        reason = "no GPU"
    elif not _is_hopper(torch.device("cuda", torch.cuda.current_device())):
        reason = "the GPU is no Hopper"
    else:
        reason = _closed()
    return "Hopper kernels: on" if reason is None else f"Hopper kernels: off, {reason}"


def _closed() -> str | None:
    """Return the reason why the kernels are off, after the probe; None if they are on."""
    if not _result:
        if os.environ.get("XENT_PORTABLE") == "1":
            _result.append("XENT_PORTABLE=1")
        elif torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
            _result.append("the first call of the process was captured in a CUDA graph")
        else:
            try:
                _result.append(_probe())
            except Exception as error:  # Triton raises many kinds
                _result.append(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
    return _result[0]


def _probe() -> str | None:
    """Return None if both kernels agree with PyTorch."""
    device = torch.device("cuda", torch.cuda.current_device())
    numbers = torch.arange(_CLASSES * _WIDTH, device=device, dtype=torch.float32)
    weight = torch.sin(numbers).view(_CLASSES, _WIDTH).to(torch.bfloat16)
    hidden = torch.cos(0.3 * numbers[: _ROWS * _WIDTH]).view(_ROWS, _WIDTH).to(torch.bfloat16)
    classes = torch.arange(_ROWS, device=device, dtype=torch.int32) * 3
    classes[-1] = -2
    targets = classes[:-1, None].long()
    bend = _SCALE, _SOFTCAP
    x = torch.tanh(hidden.double() @ weight.double().t() * (_SCALE / _SOFTCAP)) * _SOFTCAP

    peaks, totals, mixed = fold_chunks(hidden, weight, classes, bend, True).double()
    e = x.exp()
    e[:-1].scatter_(1, targets, 0.0)
    rest, moment = peaks.exp() * totals, peaks.exp() * (mixed * math.log(2) + peaks * totals)
    if not (_agree(rest.sum(0), e.sum(1), 1e-4) and _agree(moment.sum(0), (e * x).sum(1), 1e-4)):
        return "their sums differ from PyTorch's"

    zero = torch.zeros(_ROWS, device=device)
    grad = torch.full((_ROWS, _CLASSES + 8), torch.nan, device=device, dtype=torch.bfloat16)
    coefficients = torch.stack((zero, zero + 0.5, zero - 1, zero + 0.1))
    write_gradient(hidden, weight, classes, coefficients, grad, bend, True)
    expected = x.exp() * (0.5 + 0.1 / math.log(2) * x) * _SCALE * (1 - (x / _SOFTCAP).square())
    expected[:-1].scatter_(1, targets, -1.0)
    expected[-1] = 0
    same = _agree(grad[:, :_CLASSES].double(), expected, 1e-2) and not bool(grad[:, _CLASSES:].any())
    return None if same else "their gradients differ from PyTorch's"


def _agree(values: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Return whether values are within a tolerance of those expected, relative to the largest."""
    return bool(((values - expected).abs() <= tolerance * expected.abs().max()).all())
