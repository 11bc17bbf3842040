"""The arithmetic of the divergence kernels, against long doubles."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.targets import Target
from xent.backends.triton.divergence_maths import gap, mixture

BLOCK = 1024
SIZES = np.geomspace(1e-6, 100, BLOCK // 2 - 8)
APART = np.concatenate([SIZES, -SIZES, [0.0, 0.5, -0.5, 4.0, -4.0, 16.0, -16.0, 128.0, -128.0], np.zeros(7)])
INFINITE = np.array([np.inf, -np.inf, np.nan, 1000.0, -1000.0])


@triton.jit
def mixture_kernel(apart, cost, from_p, v, alpha, beta, FROM_P: tl.constexpr, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    found, is_from_p, log = mixture(tl.load(apart + places), alpha, beta, FROM_P)
    tl.store(cost + places, found)
    tl.store(from_p + places, tl.where(is_from_p, 1.0, 0.0))
    tl.store(v + places, log)


@triton.jit
def gap_kernel(w, o, u, found, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    tl.store(found + places, gap(tl.load(w + places), tl.load(o + places), tl.load(u + places)))


def mixed(target: Target, apart: np.ndarray, beta: float) -> tuple[np.ndarray, ...]:
    given = torch.tensor(apart, dtype=torch.float32, device=target.device)
    results = [torch.empty_like(given) for _ in range(3)]
    # As in the kernels for float32 logits.
    mixture_kernel[(1,)](given, *results, 1 - beta, beta, FROM_P=beta <= 0.5, BLOCK=len(apart), enable_fp_fusion=False)
    cost, from_p, v = (result.cpu().double().numpy() for result in results)
    return cost, from_p == 1, v


@pytest.mark.parametrize("beta", [1e-4, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 0.9999])
def test_mixture(target: Target, beta: float) -> None:
    """With p = 1 and q = e^apart, or relative to q."""
    cost, from_p, v = mixed(target, APART, beta)
    apart = APART.astype(np.float32).astype(np.longdouble)
    small = np.longdouble(np.float32(min(beta, 1 - beta)))  # the kernel gets both shares in float32
    share = small if beta <= 0.5 else 1 - small
    alpha = 1 - share
    log_m = np.log1p(share * np.expm1(apart))
    right = share * np.exp(apart) * (apart - log_m) - alpha * log_m
    found = cost * np.where(from_p, 1, np.exp(apart))
    np.testing.assert_allclose(found.astype(float), right.astype(float), rtol=2e-5)
    # Far apart, v may be the difference of two numbers of the size of `apart`.
    allowed = 2e-6 * np.abs(log_m) + np.where(np.abs(apart) > 4, 1e-7 * np.minimum(np.abs(apart), 16), 0)
    assert (np.abs(v - log_m) <= allowed).all()


def test_mixture_is_finite_for_classes_that_one_side_lacks(target: Target) -> None:
    padded = np.concatenate([INFINITE, np.zeros(3)])
    for beta in (0.1, 0.5, 0.9):
        for values in mixed(target, padded, beta):
            assert np.isfinite(values).all()


def test_gap(target: Target) -> None:
    w = np.full(BLOCK, 0.25)
    u = np.clip(APART, -80, 80).astype(np.float32).astype(np.float64)
    w[-7:] = 0
    given = [torch.tensor(values, dtype=torch.float32, device=target.device) for values in (w, w * np.exp(u), u)]
    given[1][-7:] = 0.125
    found = torch.empty_like(given[0])
    gap_kernel[(1,)](*given, found, BLOCK=BLOCK)
    exact = u.astype(np.longdouble)
    right = (np.expm1(exact) - exact) * 0.25
    np.testing.assert_allclose(found.cpu().double().numpy()[:-7], right[:-7].astype(float), rtol=3e-6, atol=1e-38)
    assert (found[-7:] == 0.125).all()
