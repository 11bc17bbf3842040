"""The kernels' arithmetic against float64, in units in the last place of the exact result in float32."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.targets import Target
from xent.backends.triton import maths

INF = float("inf")
TINY = np.finfo(np.float32).tiny
HUGE = np.finfo(np.float32).max
BLOCK = 4096


@triton.jit
def tanh_kernel(x, found, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    tl.store(found + places, maths.tanh(tl.load(x + places)))


@triton.jit
def log1p_kernel(x, found, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    tl.store(found + places, maths.log1p(tl.load(x + places)))


@triton.jit
def exp_kernel(x, found, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    tl.store(found + places, maths.exp(tl.load(x + places)))


@triton.jit
def activate_kernel(
    z, x, logit_scale, softcap, SCALED: tl.constexpr, CAPPED: tl.constexpr, QUICK: tl.constexpr, BLOCK: tl.constexpr
):
    places = tl.arange(0, BLOCK)
    tl.store(x + places, maths.activate(tl.load(z + places), logit_scale, softcap, SCALED, CAPPED, QUICK))


@triton.jit
def exponent_kernel(x, reference, found, EXACT: tl.constexpr, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    m = tl.load(reference)
    tl.store(found + places, maths.exponent(tl.load(x + places), m, maths.is_exact(m, EXACT)))


@triton.jit
def merge_kernel(peaks, totals, others, other_totals, BLOCK: tl.constexpr):
    """Merge pairs into the first ones."""
    places = tl.arange(0, BLOCK)
    peak, total = maths.merge(
        tl.load(peaks + places), tl.load(totals + places), tl.load(others + places), tl.load(other_totals + places)
    )
    tl.store(peaks + places, peak)
    tl.store(totals + places, total)


@triton.jit
def order_kernel(z, found, logit_scale, SCALED: tl.constexpr, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    tl.store(found + places, maths.order(tl.load(z + places), places < BLOCK - 1, logit_scale, SCALED))


def spread(least: float, most: float, *edges: float) -> np.ndarray:
    """Return `BLOCK` float32 numbers in [least, most]: linearly spaced, logarithmically spaced, and `edges`."""
    even = np.linspace(least, most, BLOCK // 2)
    size = max(abs(least), abs(most))
    small = np.geomspace(1e-30, size, BLOCK)
    small = np.concatenate([-small, small])
    small = small[(small >= least) & (small <= most)]
    values = np.concatenate([edges, even, small[:: -(-len(small) // (BLOCK // 2 - len(edges)))]]).astype(np.float32)
    return np.resize(values, BLOCK)


def units_off(found: np.ndarray, truth: np.ndarray, floor: float = TINY) -> float:
    """Return the largest error in units in the last place of the truth, or of `floor` if that is larger."""
    finite = np.isfinite(truth)
    np.testing.assert_array_equal(found[~finite], truth[~finite])
    unit = np.spacing(np.maximum(np.abs(truth[finite]), floor).astype(np.float32)).astype(np.float64)
    return float((np.abs(found[finite] - truth[finite]) / unit).max())


UNARY: dict[str, tuple[Any, Callable[..., Any], np.ndarray, float]] = {
    "tanh": (tanh_kernel, np.tanh, spread(-30, 30, -INF, INF, 0.0, 0.625, -0.625, TINY, HUGE, -HUGE, np.nan), 3),
    # x log2(e) is rounded before 2^x is computed: half a unit of it is 64 units of e^x at -87.
    "exp": (exp_kernel, np.exp, spread(-87, 0, -INF, 0.0, -TINY, -1e-8, -1e-7, -0.6931472, -HUGE), 66),
    "log1p": (log1p_kernel, np.log1p, spread(0, 200_000, 0.0, TINY, 1e-8, 6e-8, 1.0, 0.99999994, 1e38, INF), 3),
}


@pytest.mark.parametrize("name", UNARY)
def test_functions_of_one_number(target: Target, name: str) -> None:
    kernel, exact, values, units = UNARY[name]
    x = torch.from_numpy(values).to(target.device)
    found = torch.empty_like(x)
    kernel[(1,)](x, found, BLOCK=BLOCK)
    with np.errstate(all="ignore"):
        truth = exact(values.astype(np.float64))
    assert units_off(found.cpu().double().numpy(), truth) <= units


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("logit_scale", [1.0, 0.5, -0.7, 3.3])
@pytest.mark.parametrize("softcap", [None, 4.0, 30.0])
def test_activation(target: Target, logit_scale: float, softcap: float | None, quick: bool) -> None:
    values = spread(-200, 200, -INF, INF, 0.0, TINY, -TINY)
    z = torch.from_numpy(values).to(target.device)
    x = torch.empty_like(z)
    constants = {"SCALED": logit_scale != 1, "CAPPED": softcap is not None, "QUICK": quick}
    activate_kernel[(1,)](z, x, logit_scale, softcap or 0.0, **constants, BLOCK=BLOCK)
    s, k = (float(np.float32(number or 0)) for number in (logit_scale, softcap))
    expected = s * values.astype(np.float64)
    if softcap is not None:
        expected = k * np.tanh(expected / k)
    # For the smallest numbers z / softcap has few bits; QUICK promises only an error relative to the softcap.
    floor = k if quick and softcap is not None else 1e-35
    assert units_off(x.cpu().double().numpy(), expected, floor=floor) <= 6


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("reference", [0.0, 1.7, -250.0, 255.9, 256.1, -3e4, 1e30])
def test_exponent(target: Target, reference: float, exact: bool) -> None:
    """Exact up to the rounding of the reference's exponent, which all terms of a row share; exact if far from 0."""
    m = torch.tensor(reference, device=target.device)
    x = (float(m) + torch.linspace(-30, 10, BLOCK, dtype=torch.float64)).float()
    x[0] = -INF
    found = torch.empty(BLOCK, device=target.device)
    exponent_kernel[(1,)](x.to(target.device), m, found, EXACT=exact, BLOCK=BLOCK)
    expected = (x.double() - m.cpu().double()) * np.log2(np.e)
    unit = 1e-6 * 44 if exact or abs(reference) >= 256 else 3e-7 * max(abs(reference), 44)
    torch.testing.assert_close(
        found.cpu().double(), expected, rtol=0, atol=max(unit, float(expected[1:].abs().max()) * 2e-7)
    )


def test_pairs_merge(target: Target) -> None:
    """Any pairs, including empty ones."""
    tops = torch.tensor([-INF, -3e38, -1e4, -5.0, 0.0, 7.5, 1e4, 3e38])
    pairs = torch.cartesian_prod(tops, tops)
    values = [pairs[:, 0], pairs[:, 1]]
    totals = [torch.where(value == -INF, 0.0, 2.5 + i) for i, value in enumerate(values)]
    peaks, sums, others, rest = (
        tensor.clone(memory_format=torch.contiguous_format).to(target.device)
        for tensor in (values[0], totals[0], values[1], totals[1])
    )
    merge_kernel[(1,)](peaks, sums, others, rest, BLOCK=64)
    assert torch.equal(peaks.cpu(), pairs.amax(1))
    top = pairs.amax(1, keepdim=True).clamp(min=-3.4e38).double()
    expected = ((pairs.double() - top).exp() * torch.stack(totals, 1)).sum(1)
    torch.testing.assert_close(sums.cpu().double(), expected, rtol=1e-6, atol=1e-37)


@pytest.mark.parametrize(("logit_scale", "scaled"), [(1.0, False), (1.0, True), (0.0, True), (-2.0, True)])
def test_order_is_that_of_the_activations(target: Target, logit_scale: float, scaled: bool) -> None:
    values = torch.tensor([3.0, -INF, np.nan, -2.0, INF, 0.0, 1e30, 5.0])
    found = torch.empty(8, device=target.device)
    order_kernel[(1,)](values.to(target.device), found, logit_scale, SCALED=scaled, BLOCK=8)
    expected = torch.where(values.isnan(), INF, values * logit_scale if logit_scale else torch.zeros(8))
    expected[7] = -INF  # outside the row
    assert torch.equal(found.cpu().argsort(stable=True), expected.argsort(stable=True))
