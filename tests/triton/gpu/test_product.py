"""The product kernels store no logits and round none."""

import pytest
import torch

import xent
from tests.targets import backend_of
from tests.triton.gpu.test_memory import MIB, peak


def is_on() -> bool:
    """Whether Hopper's kernels run here."""
    return "Hopper kernels: on" in str(backend_of("triton").info())


@pytest.mark.parametrize("options", [{}, {"softcap": 20.0}, {"z_loss": 1e-3, "logit_scale": 0.7}], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_come_from_unrounded_logits(dtype: torch.dtype, options: dict[str, float]) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(1000, 2000, device="cuda").to(dtype)
    weight = (3 * torch.randn(50_000, 2000, device="cuda") / 2000**0.5).to(dtype)
    target = torch.randint(50_000, (1000,), device="cuda")
    kinds = {"reduction": "none", "stats": ("lse", "nll"), **options}
    loss, stats = xent.linear_cross_entropy(hidden, weight, target, backend="triton", **kinds)
    exact = hidden.double() @ weight.double().t()
    expected, expected_stats = xent.cross_entropy(exact, target, backend="torch", **kinds)
    close = 1e-4 if is_on() else 2e-2
    for found, right in ((loss, expected), (stats.lse, expected_stats.lse), (stats.nll, expected_stats.nll)):
        torch.testing.assert_close(found.double(), right, rtol=0, atol=close)


def test_same_bits_each_time() -> None:
    """More bands than run at one time, and an incomplete last band."""
    torch.manual_seed(0)
    hidden = torch.randn(1700, 512, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(40_009, 512, device="cuda", dtype=torch.bfloat16)
    target = torch.randint(40_009, (1700,), device="cuda")
    first, *others = (
        xent.linear_cross_entropy(hidden, weight, target, reduction="none", backend="triton") for _ in range(5)
    )
    assert first.isfinite().all()
    assert all(torch.equal(first, other) for other in others)


def test_memory() -> None:
    """Sums of 250 parts of the vocabulary, 16 MiB, instead of logits, 1000 MiB."""
    hidden = torch.randn(8192, 256, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(64_000, 256, device="cuda", dtype=torch.bfloat16)
    target = torch.randint(64_000, (8192,), device="cuda")
    most = 18 if is_on() else 36
    assert peak(lambda: xent.linear_cross_entropy(hidden, weight, target, backend="triton")) <= most * MIB


def test_rows_beyond_int32() -> None:
    """No logits of that size are stored, but their number of elements exceeds int32."""
    hidden = torch.randn(70_000, 64, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(40_000, 64, device="cuda", dtype=torch.bfloat16)
    target = torch.randint(40_000, (70_000,), device="cuda")
    loss = xent.linear_cross_entropy(hidden, weight, target, reduction="none", backend="triton")
    logits = hidden[-100:].float() @ weight.float().t()
    expected = torch.nn.functional.cross_entropy(logits, target[-100:], reduction="none")
    torch.testing.assert_close(loss[-100:], expected, rtol=1e-3, atol=1e-3 if is_on() else 5e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_come_from_unrounded_logits(dtype: torch.dtype) -> None:
    """If logits of up to 80 were rounded to bfloat16, they would be off by 0.25, and their exponentials by a fifth."""
    torch.manual_seed(0)
    hidden = torch.randn(300, 520, device="cuda").to(dtype).requires_grad_()
    weight = (20 * torch.randn(5003, 520, device="cuda") / 520**0.5).to(dtype).requires_grad_()
    target = torch.randint(5003, (300,), device="cuda")
    target[7] = -100

    upstream = torch.linspace(-1, 1, 300, device="cuda")
    logps, entropy = xent.linear_log_probs(hidden, weight, target, temperature=0.7, entropy=True)
    found = torch.autograd.grad((logps, entropy), (hidden, weight), (upstream, upstream.flip(0)))
    wide = [value.detach().double().requires_grad_() for value in (hidden, weight)]
    of_all = (wide[0] @ wide[1].t() / 0.7).log_softmax(-1)
    chosen = of_all.gather(1, target.clamp(min=0)[:, None])[:, 0]
    total = upstream * chosen - upstream.flip(0) * (of_all.exp() * of_all).sum(-1)
    expected = torch.autograd.grad(total[target >= 0].sum(), wide)
    for one, right in zip(found, expected, strict=True):
        assert float((one.double() - right).norm() / right.norm()) < 2 * torch.finfo(dtype).eps
