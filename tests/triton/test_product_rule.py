"""Which forward passes the product kernel serves, and how rows are dealt out, asked of tensors that are not there."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from xent.backends.triton import product
from xent.core.spec import LossSpec


@pytest.fixture(autouse=True)
def chip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have 132 multiprocessors."""
    monkeypatch.setattr(product, "hopper_multiprocessors", lambda *_: 132)


class Factor(SimpleNamespace):
    """Stands for a matrix on a GPU."""

    def __init__(self, rows: int, width: int, stride: tuple[int, int] | None = None, **given: Any) -> None:
        super().__init__(**({"dtype": torch.bfloat16, "address": 4096, "kind": "cuda"} | given))
        self.shape, self.strides = (rows, width), stride or (width, 1)
        self.device, self.itemsize = torch.device(self.kind, 0), self.dtype.itemsize

    def __len__(self) -> int:
        return int(self.shape[0])

    def stride(self, axis: int) -> int:
        return int(self.strides[axis])

    def data_ptr(self) -> int:
        return int(self.address)


def asked(hidden: Any = None, classifier: Any = None, weight: Any = None, **options: Any) -> bool:
    facts = SimpleNamespace(target=0, class_weight=weight, spec=replace(LossSpec(), **options))
    return product.serves(hidden or Factor(300, 64), classifier or Factor(1000, 64), facts)


def test_what_it_finds() -> None:
    assert asked()
    assert asked(stats=("count", "lse", "nll", "z_loss"), z_loss=0.1, softcap=30.0, logit_scale=-2.0)
    assert not asked(stats=("lse", "entropy"))
    assert not asked(stats=("predictions",))
    assert not asked(stats=("accuracy",))
    assert not asked(weight=0)
    assert not asked(label_smoothing=0.1)
    assert not asked(softcap=1e4)


def test_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not asked(hidden=Factor(300, 64, kind="cpu"))
    monkeypatch.setattr(product, "hopper_multiprocessors", lambda *_: 0)
    assert not asked()


@pytest.mark.parametrize(
    ("factor", "served"),
    [
        (Factor(1000, 64, dtype=torch.float16), True),
        (Factor(1000, 64, dtype=torch.float32), False),
        (Factor(1000, 64, (72, 1)), True),
        (Factor(1000, 64, (68, 1)), False),
        (Factor(1000, 64, (0, 1)), False),
        (Factor(1000, 64, (8, 1)), False),
        (Factor(1000, 64, (1, 1000)), False),
        (Factor(1000, 60), False),
        (Factor(1000, 0), False),
        (Factor(1000, 64, address=4098), False),
    ],
    ids=str,
)
def test_what_the_copy_engine_takes(factor: Any, served: bool) -> None:
    assert asked(classifier=factor) == asked(hidden=factor) == served


def test_fewest_classes() -> None:
    assert asked(classifier=Factor(256, 64))
    assert not asked(classifier=Factor(255, 64))


@pytest.mark.parametrize("programs", [16, 78, 114, 132, 131])
@pytest.mark.parametrize("bands", [1, 2, 5, 12, 13, 64, 65, 1000])
def test_bands_are_dealt_out(bands: int, programs: int) -> None:
    groups = product._groups(bands, programs)
    assert sum(count for count, _ in groups) == bands
    assert all(count % group == 0 and programs % group == 0 for count, group in groups)
    assert len(groups) <= 5 or programs == 131


def test_bands_of_an_h100() -> None:
    assert product._groups(64, 132) == [(60, 12), (4, 4)]
