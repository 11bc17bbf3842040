"""Launch kernels with small shapes, for NVIDIA's compute-sanitizer; some targets are far out of range.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m tests.triton.sanitize

Without PyTorch's cache every tensor is a separate allocation, so that accesses beyond its end are detected. The results
are checked too: rows with an invalid target are NaN, all others are finite. Numbers on the command line are
vocabularies to run instead of all. `tests.triton.watch` runs this program under the tool and evaluates its report.
"""

import sys
from typing import Any

import torch

import xent
from xent.core.spec import STAT_NAMES

__all__ = ["main"]

WRONG = {1: 10**9, 2: -7, 4: 2**40}
# One block, several blocks, rows that begin off 16-byte boundaries, and blocks of each size.
VOCABULARIES = (67, 9_001, 16_384, 16_391, 43_520, 131_072)
VARIANTS: list[tuple[torch.dtype, dict[str, Any]]] = [
    (torch.bfloat16, {}),
    (torch.bfloat16, {"label_smoothing": 0.1, "softcap": 5.0}),
    (torch.float32, {"z_loss": 1e-3, "logit_scale": 0.5}),
    (torch.float16, {"label_smoothing": 0.1, "weight": True, "sample_weight": True, "stats": STAT_NAMES}),
]


def main(*vocabularies: int) -> None:
    """Run everything once; AssertionError for wrong results."""
    for vocabulary in vocabularies or VOCABULARIES:
        for dtype, options in VARIANTS:
            for reduction in ("mean", "none"):
                calls(vocabulary, dtype, reduction, options)
    torch.cuda.synchronize()


def calls(vocabulary: int, dtype: torch.dtype, reduction: str, options: dict[str, Any]) -> None:
    """Make each kind of call, with classes and with probabilities, and check which rows are NaN."""
    torch.manual_seed(0)
    rows, width = 7, 16
    options = options | {"reduction": reduction, "backend": "triton"}
    if options.pop("weight", False):
        options["weight"] = torch.rand(vocabulary, device="cuda")
    if options.pop("sample_weight", False):
        options["sample_weight"] = torch.rand(rows, device="cuda") + 0.1
    hidden = torch.randn(rows, width, device="cuda").to(dtype)
    weight = torch.randn(vocabulary, width, device="cuda").to(dtype)
    target = torch.randint(vocabulary, (rows,), device="cuda")
    target[0] = -100
    for row, wrong in WRONG.items():
        target[row] = wrong
    for inplace in (False, True):
        logits = (hidden @ weight.t()).requires_grad_()
        judge(xent.cross_entropy(logits * 1, target, inplace=inplace, **options), logits)
    for cut in (slice(1, None), slice(None, -1)):  # rows apart, and off boundaries
        fewer = options | ({"weight": options["weight"][cut]} if "weight" in options else {})
        judge(xent.cross_entropy(logits[:, cut], target.clamp(max=vocabulary - 2), **fewer), logits, wrong=(2,))
    probabilities = torch.rand(rows, vocabulary, device="cuda")
    judge(xent.cross_entropy(logits * 1, probabilities, **options), logits, wrong=())
    for workspace in (None, 2 * vocabulary * weight.itemsize):
        leaf = hidden.clone().requires_grad_()
        judge(xent.linear_cross_entropy(leaf, weight, target, workspace=workspace, **options), leaf)
        with torch.no_grad():
            result = xent.linear_cross_entropy(leaf, weight, target, workspace=workspace, **options)
        judge_rows(result, WRONG)


def judge(result: Any, leaf: torch.Tensor, wrong: Any = WRONG) -> None:
    """Run the backward pass. Rows of the gradient with an invalid target must be NaN, and no others."""
    loss = judge_rows(result, wrong)
    (grad,) = torch.autograd.grad(loss, leaf, torch.full_like(loss, 0.5))
    assert grad.isnan().any(-1).nonzero()[:, 0].tolist() == sorted(wrong)


def judge_rows(result: Any, wrong: Any) -> torch.Tensor:
    """Return the loss after checking that it is NaN for rows with an invalid target, and for no others."""
    loss = result[0] if isinstance(result, tuple) else result
    assert bool(loss.isnan().any()) == bool(wrong)
    assert not loss.ndim or loss.isnan().nonzero()[:, 0].tolist() == sorted(wrong)
    return loss


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
