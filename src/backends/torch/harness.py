"""The harness of the gradient checks for PyTorch: conversion of arrays, gradients, and the unfused computation."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from xent.backends.torch.devices import devices

__all__ = ["TorchHarness"]


class TorchHarness:
    """A `xent.backends.protocol.Harness` for one device."""

    processes, seconds = 1, 0.03

    def __init__(self, device: str | None = None) -> None:
        self.device = device or devices()[0]
        # Metal has no float64.
        self.dtypes = ("float64", "float32", "bfloat16", "float16")[self.device.startswith("mps") :]
        self.kernels: tuple[str, ...] = ("PyTorch's own operations",)

    def watched(self) -> AbstractContextManager[set[str]]:
        """Report PyTorch's own operations, which compute the rows here."""
        return nullcontext(set(self.kernels))

    def sizes(self, dtype: str) -> dict[str, int]:
        """Return a size with several blocks of rows."""
        return {"several blocks": 100_003}

    def passed(self) -> None:
        """Do nothing: "auto" uses this backend without a check."""

    def array(self, values: Any, dtype: str | None = None) -> Tensor:
        """Return a NumPy array as a tensor on the device."""
        tensor = torch.from_numpy(np.array(values))
        return tensor.to(self.device, getattr(torch, dtype) if dtype else tensor.dtype)

    def numpy(self, array: Any) -> Any:
        """Return a tensor as a NumPy array, floats as float64."""
        tensor = array.detach().cpu()
        return (tensor.double() if tensor.is_floating_point() else tensor).numpy()

    def gradients(
        self, function: Callable[..., Any], inputs: tuple[Tensor, ...], upstream: Any
    ) -> tuple[Any, list[Tensor]]:
        """Return `function(*inputs)` and its gradients."""
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        results = function(*leaves)
        if not isinstance(results, tuple):
            return results.detach(), list(torch.autograd.grad(results, leaves, upstream))
        given = [(result, grad) for result, grad in zip(results, upstream, strict=True) if grad is not None]
        outputs, grads = zip(*given, strict=True)
        return tuple(result.detach() for result in results), list(torch.autograd.grad(outputs, leaves, grads))

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the logits of the unfused computation."""
        return F.linear(input, weight, bias)

    def unfused_divergence(
        self,
        logits: Tensor,
        *,
        teacher: Tensor | None = None,
        ids: Tensor | None = None,
        log_probs: Tensor | None = None,
        tail: str = "",
        kind: str = "kl",
        beta: float = 0.0,
        temperature: float = 1.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        teacher_softcap: float | None = None,
        teacher_scale: float = 1.0,
        reduction: str = "mean",
        sample_weight: Tensor | None = None,
        normalizer: Any = None,
    ) -> Tensor:
        """Compute a divergence in float32 (float64 for float64), directly by its formula."""
        log_p = _log_probs(logits, softcap, logit_scale, temperature)
        if teacher is not None:
            rows = _between(log_p, _log_probs(teacher, teacher_softcap, teacher_scale, temperature), kind, beta)
        else:
            assert ids is not None
            assert log_probs is not None
            rows = _from_top_k(log_p, ids.long(), log_probs.to(log_p.dtype), tail, kind)
        a = torch.ones_like(rows) if sample_weight is None else sample_weight.to(rows.dtype)
        return _reduced(rows, a, a, reduction, normalizer)

    def unfused_loss(
        self,
        logits: Tensor,
        target: Tensor,
        *,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        sample_weight: Tensor | None = None,
        normalizer: Any = None,
    ) -> Tensor:
        """Compute the loss in float32 (float64 for float64), as careful training scripts do."""
        x = _activated(logits, softcap, logit_scale)
        x = x.reshape(-1, x.shape[-1])
        if target.is_floating_point():
            flat = target.reshape(x.shape).to(x.dtype)
            ignored = torch.zeros(len(x), dtype=torch.bool, device=x.device)
            row_weight = torch.ones_like(x[:, 0])
        else:
            flat = target.flatten().long()
            ignored = flat == ignore_index
            row_weight = x.new_ones(x.shape[-1]) if weight is None else weight.to(x.dtype)
            row_weight = row_weight[flat.masked_fill(ignored, 0)]
        rows = F.cross_entropy(
            x,
            flat,
            weight=None if weight is None else weight.to(x.dtype),
            ignore_index=ignore_index,
            reduction="none",
            label_smoothing=label_smoothing,
        )
        rows = rows + z_loss * torch.logsumexp(x, -1).square()
        a = torch.ones_like(row_weight) if sample_weight is None else sample_weight.flatten().to(x.dtype)
        a = a.masked_fill(ignored, 0)
        found = _reduced(rows, a, a * row_weight, reduction, normalizer)
        return found.view(logits.shape[:-1]) if reduction == "none" else found

    def unfused_rows(
        self,
        logits: Tensor,
        target: Tensor,
        ignored: Tensor,
        *,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        temperature: Tensor | None = None,
        allowed: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Compute lse, nll and entropy in float32 (float64 for float64), as trainers do."""
        x = _activated(logits, softcap, logit_scale)
        if temperature is not None:
            x = x / temperature[..., None]
        if allowed is not None:
            x = x.masked_fill(~allowed, -torch.inf)
        log_p = F.log_softmax(x, -1)
        finite = log_p.masked_fill(log_p == -torch.inf, 0)
        if target.is_floating_point():
            nll = -(target * finite).sum(-1)
        else:
            nll = -log_p.gather(-1, target[..., None])[..., 0]
            nll = torch.where(nll == torch.inf, torch.inf, nll)  # a constant: no gradient
        rows = {"lse": torch.logsumexp(x, -1), "nll": nll, "entropy": -(log_p.exp() * finite).sum(-1)}
        return {name: torch.where(ignored, 0, row) for name, row in rows.items()}


def _reduced(rows: Tensor, a: Tensor, parts: Tensor, reduction: str, normalizer: Any) -> Tensor:
    """Reduce rows with weights `a`. Without a normalizer, the mean divides by the sum of `parts`."""
    rows = torch.where(a == 0, 0, a * rows)
    if reduction == "none":
        return rows
    if reduction == "sum":
        return rows.sum()
    divisor = parts.sum() if normalizer is None else normalizer
    return rows.sum() / divisor if float(divisor) else rows.sum() * 0


def _activated(z: Tensor, softcap: float | None, scale: float) -> Tensor:
    x = z.to(torch.promote_types(z.dtype, torch.float32)) * scale
    return x if softcap is None else softcap * torch.tanh(x / softcap)


def _log_probs(z: Tensor, softcap: float | None, scale: float, temperature: float) -> Tensor:
    return torch.log_softmax(_activated(z, softcap, scale) / temperature, -1)


def _between(log_p: Tensor, log_q: Tensor, kind: str, beta: float) -> Tensor:
    if kind == "tv":
        return (log_p.exp() - log_q.exp()).abs().sum(-1) / 2
    if beta == 0:
        return (log_q.exp() * (log_q - log_p)).sum(-1)
    if beta == 1:
        return (log_p.exp() * (log_p - log_q)).sum(-1)
    log_m = torch.logaddexp(log_p + math.log1p(-beta), log_q + math.log(beta))
    forward = (log_q.exp() * (log_q - log_m)).sum(-1)
    return beta * forward + (1 - beta) * (log_p.exp() * (log_p - log_m)).sum(-1)


def _from_top_k(log_p: Tensor, ids: Tensor, log_q: Tensor, tail: str, kind: str) -> Tensor:
    known = log_q != -torch.inf
    if tail == "renormalize":
        log_q = log_q - log_q.logsumexp(-1, keepdim=True)
    q = log_q.exp()
    safe = torch.where(known, log_q, 0)
    rows = (q * (safe - log_p.gather(-1, ids))).sum(-1)
    if tail != "bucket" and kind == "kl":
        return rows
    # Sum over the other classes directly: 1 minus the sum of the K classes could round to 0 or below.
    counts = torch.zeros_like(log_p).scatter_add(-1, ids, known.to(log_p.dtype))
    p_left = torch.where(counts > 0, 0, log_p.exp()).sum(-1)
    mass = (1 - q.sum(-1)).clamp(min=0)
    if kind == "tv":
        apart = torch.where(known, log_p.gather(-1, ids).exp(), 0) - q
        return (apart.abs().sum(-1) + (p_left - (mass if tail == "bucket" else 0)).abs()) / 2
    some = (mass > 0) & (p_left > 0)
    return rows + torch.where(some, mass * (mass.clamp(min=1e-30).log() - torch.where(some, p_left, 1).log()), 0)
