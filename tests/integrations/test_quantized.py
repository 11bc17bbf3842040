"""Heads of bitsandbytes and torchao give the loss of the same head dequantized, and are dequantized in pieces."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import xent
from xent.backends.torch import products
from xent.integrations.torch import classifier

WIDTH, V = 128, 101
device = "cuda" if torch.cuda.is_available() else "cpu"


def layer() -> nn.Linear:
    """Return the head before it is quantized."""
    torch.manual_seed(0)
    made = nn.Linear(WIDTH, V).requires_grad_(False)
    nn.init.normal_(made.weight, std=0.3)
    return made


def bitsandbytes(kind: str, **options: Any) -> Any:
    """Return a head of bitsandbytes."""
    library = pytest.importorskip("bitsandbytes")
    made = getattr(library.nn, kind)(WIDTH, V, **options)
    made.load_state_dict(layer().state_dict())
    return made.to(device).requires_grad_(False)


def of_4_bits(**options: Any) -> tuple[Any, Tensor]:
    """Return a 4-bit head and its weight in full."""
    made = bitsandbytes("Linear4bit", quant_type="nf4", **options)
    return made, pytest.importorskip("bitsandbytes").functional.dequantize_4bit(made.weight, made.weight.quant_state)


def of_8_bits(called: bool) -> tuple[Any, Tensor]:
    """Return an 8-bit head, before or after its first call, and its weight in full."""
    made = bitsandbytes("Linear8bitLt", has_fp16_weights=False)
    full = made.weight.data.float() * made.weight.SCB[:, None] / 127
    if called:
        made(torch.randn(2, WIDTH, device=device, dtype=torch.float16 if device == "cuda" else torch.float32))
    return made, full


def torchao(config: str) -> tuple[Any, Tensor]:
    """Return a head of torchao and its weight in full."""
    library = pytest.importorskip("torchao.quantization")
    made = nn.Sequential(layer().to(device))
    library.quantize_(made, getattr(library, config)())
    return made[0], made[0].weight.dequantize()


HEADS: dict[str, Any] = {
    "bitsandbytes, 4 bits": lambda: of_4_bits(compress_statistics=False),
    "bitsandbytes, 4 bits with quantized scales": lambda: of_4_bits(compress_statistics=True),
    "bitsandbytes, 8 bits": lambda: of_8_bits(False),
    "bitsandbytes, 8 bits after a call": lambda: of_8_bits(True),
    "torchao, int8": lambda: torchao("Int8WeightOnlyConfig"),
    "torchao, float8": lambda: torchao("Float8WeightOnlyConfig"),
    "torchao, intx": lambda: torchao("IntxWeightOnlyConfig"),
}


@pytest.mark.filterwarnings("ignore")  # of the libraries, when they are imported
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", HEADS)
def test_equals_the_dequantized_head(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_PIECE_BYTES", 30 * WIDTH * dtype.itemsize)  # four pieces
    head, full = HEADS[name]()
    weight, bias = classifier(head)
    assert isinstance(weight, xent.QuantizedRows)
    bias = bias.detach().to(dtype)
    dense = full.detach().to(device, dtype)
    hidden, labels = torch.randn(2, 6, WIDTH, device=device, dtype=dtype), torch.randint(V, (2, 6), device=device)
    hidden.requires_grad_()
    results = []
    for each in (weight, dense):
        teacher = xent.LinearTeacher(hidden.detach(), each, bias)
        loss = xent.linear_cross_entropy(hidden, each, labels, linear_bias=bias, shift=1)
        log_probs = xent.linear_log_probs(hidden, each, labels, linear_bias=bias)
        divergence = xent.linear_divergence(hidden * 0.5, dense, teacher)
        gradient = torch.autograd.grad(loss + log_probs.sum() + divergence, hidden)
        results.append((loss, log_probs, divergence, *gradient))
    exact = dtype == torch.float32
    torch.testing.assert_close(*results, rtol=1e-4 if exact else 2e-2, atol=1e-4 if exact else 2e-2)


@pytest.mark.filterwarnings("ignore")
def test_errors() -> None:
    head, _ = of_4_bits()
    hidden, labels = torch.randn(2, WIDTH), torch.tensor([1, 2])
    with pytest.raises(TypeError, match=r"pass what xent\.integrations\.torch\.classifier\(module\) returns"):
        xent.linear_cross_entropy(hidden, head, labels)
    library = pytest.importorskip("bitsandbytes")
    with pytest.raises(ValueError, match="the weight of this Linear4bit is not quantized yet"):
        classifier(library.nn.Linear4bit(WIDTH, V))
    narrow = library.nn.Linear4bit(96, V, bias=False).to("cpu")
    with pytest.raises(ValueError, match="must consist of whole blocks of 64 elements, got 96"):
        classifier(narrow)
    quantized, _ = torchao("Int8WeightOnlyConfig")
    with pytest.raises(TypeError, match=r"got a Int8Tensor: .*xent\.integrations\.torch\.classifier\(module\) returns"):
        xent.linear_cross_entropy(hidden, quantized.weight, labels)
