"""Which calls the ring kernel serves, asked of tensors that are not there: no GPU takes part."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from tests.triton.gpu import calls
from tests.triton.sanitize import VOCABULARIES
from xent.backends.triton import hopper, ring
from xent.core.spec import LossSpec

BF16, FP32 = torch.bfloat16, torch.float32
LONG = 65_536
RESULTS: dict[str, Any] = dict.fromkeys(("norm", "lse", "nll", "entropy", "predictions", "z_term"))


@pytest.fixture(autouse=True)
def chip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have 132 multiprocessors."""
    monkeypatch.setattr(ring, "hopper_multiprocessors", lambda *_: 132)


def block(vocabulary: int, dtype: torch.dtype = BF16, stride: int | None = None, address: int = 4096) -> Any:
    """Stand for (R, V) logits on a GPU."""
    strides = vocabulary if stride is None else stride, 1
    return SimpleNamespace(
        device=torch.device("cuda", 0),
        itemsize=dtype.itemsize,
        shape=(64, vocabulary),
        stride=strides.__getitem__,
        data_ptr=lambda: address,
    )


def asked(logits: Any, grad: Any = None, results: dict[str, Any] | None = None, **options: Any) -> int | None:
    facts = SimpleNamespace(target=0, class_weight=options.pop("class_weight", None))
    facts.spec = replace(LossSpec(), **options)
    return ring.programs_a_row(logits, grad or logits, facts, SimpleNamespace(**(RESULTS | (results or {}))))


@pytest.mark.parametrize(
    ("major", "version", "devices", "count"),
    [
        (9, "3.6.0", ("cuda",), 132),
        (9, "3.6.0+git1234", ("cuda",), 132),
        (9, "3.5.1", ("cuda",), 0),
        (9, "3.7.1", ("cuda",), 132),
        (9, "3.8.0", ("cuda",), 0),
        (8, "3.6.0", ("cuda",), 0),
        (10, "3.6.0", ("cuda",), 0),
        (9, "3.6.0", ("cuda", "cpu"), 0),
    ],
)
def test_machines(
    major: int, version: str, devices: tuple[str, ...], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = SimpleNamespace(major=major, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(triton, "__version__", version)
    monkeypatch.setattr(hopper, "DEVICES", devices)
    assert hopper.hopper_multiprocessors.__wrapped__(0, ring.RELEASES) == count


@pytest.mark.parametrize(
    ("vocabulary", "dtype", "programs"),
    [
        (43_000, BF16, None),
        (43_520, BF16, 1),
        (43_520, FP32, 1),
        (90_112, BF16, 1),
        (90_120, BF16, 2),
        (128_256, BF16, 2),
        (262_144, BF16, 3),
        (262_144, FP32, 6),
        (50_257, BF16, None),
        (132 * 90_112, BF16, 132),
        (132 * 90_112 + 8, BF16, None),
    ],
)
def test_lengths(vocabulary: int, dtype: torch.dtype, programs: int | None) -> None:
    assert asked(block(vocabulary, dtype)) == programs


def test_lengths_that_gpu_tests_name() -> None:
    assert asked(block(calls.ONE_PROGRAM)) == 1
    assert asked(block(calls.SEVERAL_PROGRAMS)) == 2
    assert asked(block(calls.SHORT)) is asked(block(calls.SHIFTED)) is None
    assert {1, 2, None} == {asked(block(vocabulary)) for vocabulary in VOCABULARIES}


@pytest.mark.parametrize("place", [{"stride": LONG + 4}, {"address": 4098}], ids=str)
def test_rows_off_the_boundaries_of_16_bytes(place: dict[str, int]) -> None:
    assert asked(block(LONG, stride=LONG + 8)) == 1
    assert asked(block(LONG, **place)) is None
    assert asked(block(LONG), grad=block(LONG, **place)) is None


@pytest.mark.parametrize("stride", [0, 8, LONG - 8])
def test_rows_that_share_memory(stride: int) -> None:
    assert asked(block(LONG, stride=stride)) is None


def test_precision_of_its_activation() -> None:
    assert asked(block(LONG), softcap=30.0, label_smoothing=0.1) == 1
    assert asked(block(LONG), softcap=1e4) is None
    assert asked(block(LONG, FP32), z_loss=0.1, logit_scale=0.5) == 2
    assert asked(block(LONG, FP32), softcap=30.0) is None
    assert asked(block(LONG, FP32), label_smoothing=0.1) is None


def test_what_it_does_not_find() -> None:
    assert asked(block(LONG), results={"lse": 0, "nll": 0, "z_term": 0}) == 1
    for name in ("norm", "entropy", "predictions"):
        assert asked(block(LONG), results={name: 0}) is None
    assert asked(block(LONG), class_weight=0) is None
