"""The kernels' arithmetic against float64, in units of the last place of the float32 that is nearest to the truth."""

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
def expm1_kernel(x, found, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    tl.store(found + places, maths.expm1(tl.load(x + places)))


@triton.jit
def log1p_kernel(x, found, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    tl.store(found + places, maths.log1p(tl.load(x + places)))


@triton.jit
def activate_kernel(z, x, slope, logit_scale, softcap, SCALED: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    bent, steepness = maths.activate(tl.load(z + places), logit_scale, softcap, SCALED, CAPPED)
    tl.store(x + places, bent)
    tl.store(slope + places, steepness)


@triton.jit
def norm_kernel(blocks, peak, total, count, BLOCK: tl.constexpr, LANES: tl.constexpr, ALIGNED: tl.constexpr):
    """Carry lanes over `count` blocks and join them."""
    peaks = tl.full([LANES], -float("inf"), tl.float32)
    totals = tl.zeros([LANES], tl.float32)
    for first in range(count):
        x = tl.load(blocks + first * BLOCK + tl.arange(0, BLOCK))
        peaks, totals = maths.add_exponentials(peaks, totals, maths.in_lanes(x, LANES, ALIGNED))
    largest, rest = maths.join_lanes(peaks, totals)
    tl.store(peak, largest)
    tl.store(total, rest)


def spread(least: float, most: float, *edges: float) -> np.ndarray:
    """Return `BLOCK` float32 in [least, most]: evenly spaced, evenly spaced in size, and edges."""
    even = np.linspace(least, most, BLOCK // 2)
    size = max(abs(least), abs(most))
    small = np.geomspace(1e-30, size, BLOCK)
    small = np.concatenate([-small, small])
    small = small[(small >= least) & (small <= most)]
    values = np.concatenate([edges, even, small[:: -(-len(small) // (BLOCK // 2 - len(edges)))]]).astype(np.float32)
    return np.resize(values, BLOCK)


def units_off(found: np.ndarray, truth: np.ndarray, floor: float = TINY) -> float:
    """Return the largest error in units of the last place of the truth, or of `floor` where that is larger."""
    finite = np.isfinite(truth)
    np.testing.assert_array_equal(found[~finite], truth[~finite])
    unit = np.spacing(np.maximum(np.abs(truth[finite]), floor).astype(np.float32)).astype(np.float64)
    return float((np.abs(found[finite] - truth[finite]) / unit).max())


UNARY: dict[str, tuple[Any, Callable[..., Any], np.ndarray, float]] = {
    "tanh": (tanh_kernel, np.tanh, spread(-30, 30, -INF, INF, 0.0, 0.625, -0.625, TINY, HUGE, -HUGE, np.nan), 3),
    "expm1": (expm1_kernel, np.expm1, spread(-110, 0, -INF, 0.0, -TINY, -1e-8, -1e-7, -0.6931472, -HUGE), 3),
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


@pytest.mark.parametrize("logit_scale", [1.0, 0.5, -0.7, 3.3])
@pytest.mark.parametrize("softcap", [None, 4.0, 30.0])
def test_activation_and_its_slope(target: Target, logit_scale: float, softcap: float | None) -> None:
    values = spread(-200, 200, -INF, INF, 0.0, TINY, -TINY)
    z = torch.from_numpy(values).to(target.device)
    x, slope = torch.empty_like(z), torch.empty_like(z)
    static = {"SCALED": logit_scale != 1, "CAPPED": softcap is not None}
    activate_kernel[(1,)](z, x, slope, logit_scale, softcap or 0.0, **static, BLOCK=BLOCK)
    s, k = (float(np.float32(number or 0)) for number in (logit_scale, softcap))
    wide = s * values.astype(np.float64)
    expected, expected_slope = wide, np.full(BLOCK, s)
    if softcap is not None:
        bent = np.tanh(wide / k)
        expected, expected_slope = k * bent, s * (1 - bent * bent)
    # z / softcap of the smallest numbers has few bits.
    assert units_off(x.cpu().double().numpy(), expected, floor=1e-35) <= 6
    # Where x comes near the cap the slope goes to 0, by way of 1 - tanh^2: as exact as numbers near 1 are.
    assert units_off(slope.cpu().double().numpy(), expected_slope, floor=abs(s)) <= 8


def norm(target: Target, values: np.ndarray, lanes: int, aligned: bool = True) -> tuple[float, float]:
    blocks = torch.from_numpy(values.astype(np.float32)).to(target.device)
    peak, total = (torch.full((), torch.nan, device=target.device) for _ in range(2))
    norm_kernel[(1,)](blocks, peak, total, values.shape[0], BLOCK=values.shape[1], LANES=lanes, ALIGNED=aligned)
    return float(peak), float(total)


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("lanes", [1, 8, 64])
@pytest.mark.parametrize("size", [1e-6, 1.0, 30.0, 1e4, 1e30])
def test_norm(target: Target, lanes: int, size: float, aligned: bool) -> None:
    values = (np.random.default_rng(0).normal(size=(5, 64)) * size).astype(np.float32)
    peak, total = norm(target, values, lanes, aligned)
    assert peak == values.max()
    truth = np.exp(values.astype(np.float64) - values.max()).sum()
    assert total == pytest.approx(truth, rel=16 * 2.0**-24 * max(1, np.log2(1 + min(size, 100))))


@pytest.mark.parametrize("lanes", [1, 8])
@pytest.mark.parametrize("masked", [1, 63, 64, 100, 319])
def test_norm_after_minus_infinity(target: Target, lanes: int, masked: int) -> None:
    values = np.random.default_rng(1).normal(size=(5, 64)).astype(np.float32)
    values.reshape(-1)[:masked] = -INF
    peak, total = norm(target, values, lanes)
    assert peak == values.max()
    assert total == pytest.approx(np.exp(values.astype(np.float64) - values.max()).sum(), rel=1e-6)


@pytest.mark.parametrize("lanes", [1, 8])
def test_norm_of_nothing(target: Target, lanes: int) -> None:
    assert norm(target, np.full((3, 64), -INF), lanes) == (-INF, 0.0)
