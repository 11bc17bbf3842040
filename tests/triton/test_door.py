"""The conditions for the Hopper kernels: GPU, release of Triton, and XENT_PORTABLE."""

import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import xent
from tests.targets import Target
from xent.backends.triton import tiles
from xent.backends.triton.hopper import door, product
from xent.backends.triton.hopper.door import can_be_copied, copyable, fast_path, hopper_multiprocessors
from xent.backends.triton.hopper.product import LARGEST_SOFTCAP, fold_product, serves
from xent.core.spec import LossSpec

HOPPER = SimpleNamespace(major=9, multi_processor_count=132)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Simulate a Hopper GPU with a supported release of Triton. Its properties may be changed."""
    gpu = SimpleNamespace(**vars(HOPPER))
    monkeypatch.delenv("XENT_PORTABLE", raising=False)
    monkeypatch.setattr(door, "DEVICES", ("cuda",))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(door, "release", lambda: door.RELEASES[0])
    hopper_multiprocessors.cache_clear()
    yield gpu
    hopper_multiprocessors.cache_clear()


def test_open(hopper: SimpleNamespace) -> None:
    assert hopper_multiprocessors(0) == 132
    assert fast_path() == "Hopper kernels: on"


CLOSED: dict[str, tuple[Any, ...]] = {
    "the GPU is no Hopper": (lambda gpu, patch: setattr(gpu, "major", 10),),
    "XENT_PORTABLE=1": (lambda gpu, patch: patch.setenv("XENT_PORTABLE", "1"),),
    "Triton compiles for no NVIDIA GPU here": (lambda gpu, patch: patch.setattr(torch.version, "hip", "6.4"),),
}


@pytest.mark.parametrize("reason", CLOSED)
def test_closed_without_warning(hopper: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    CLOSED[reason][0](hopper, monkeypatch)
    assert hopper_multiprocessors(0) == 0
    assert fast_path() == f"Hopper kernels: off, {reason}"


def test_portable_is_1_and_nothing_else(hopper: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XENT_PORTABLE", "0")
    assert hopper_multiprocessors(0) == 132


@pytest.mark.parametrize("number", [(3, 5), (3, 8), (4, 0)])
def test_other_releases_of_triton_warn_once(
    hopper: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, number: tuple[int, int]
) -> None:
    monkeypatch.setattr(door, "release", lambda: number)
    said = f"they were tried on Triton 3.6 and 3.7, and this is release {number[0]}.{number[1]}"
    with pytest.warns(RuntimeWarning, match=f"xent uses its portable kernels on this Hopper GPU: {said}"):
        assert hopper_multiprocessors(0) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert hopper_multiprocessors(0) == 0
    assert fast_path() == f"Hopper kernels: off, {said}"


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "DEVICES", ("cpu",))
    assert fast_path() == "Hopper kernels: off, no GPU"


COPIED: list[tuple[Any, bool]] = [
    (lambda: torch.empty(4, 64, dtype=torch.bfloat16), True),
    (lambda: torch.empty(4, 64, dtype=torch.float16), True),
    (lambda: torch.empty(4, 64), False),
    (lambda: torch.empty(4, 60, dtype=torch.bfloat16), False),
    (lambda: torch.empty(4, 72, dtype=torch.bfloat16)[:, 8:], True),
    (lambda: torch.empty(4, 72, dtype=torch.bfloat16)[:, 1:65], False),
    (lambda: torch.empty(64, 4, dtype=torch.bfloat16).t(), False),
    (lambda: torch.empty(1, 64, dtype=torch.bfloat16).expand(4, -1), False),
    (lambda: torch.empty(4, 0, dtype=torch.bfloat16), False),
]


@pytest.mark.parametrize(("make", "taken"), COPIED)
def test_matrices_that_the_copy_engine_supports(make: Any, taken: bool) -> None:
    matrix = make()
    assert can_be_copied(matrix) == taken
    found = copyable(matrix)
    assert (found is matrix) == taken
    if matrix.itemsize == 2 and matrix.shape[1] % 8 == 0 and matrix.shape[1]:
        assert can_be_copied(found)


class Cuda(Tensor):
    """A CPU tensor that claims to be on a GPU."""

    device = SimpleNamespace(type="cuda", index=0)  # type: ignore[assignment]


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "float32": ({"dtype": torch.float32}, {}),
    "few classes": ({"classes": 255}, {}),
    "odd width": ({"width": 60}, {}),
    "a softcap that hardly bends": ({}, {"softcap": LARGEST_SOFTCAP + 1.0}),
    "a classifier apart": ({"apart": True}, {}),
    "odd width between even pitches": ({"width": 60, "pitch": 64}, {}),
}


@pytest.mark.parametrize("name", ["", *REFUSED])
def test_calls_that_the_product_kernel_serves(
    hopper: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    launched: list[int] = []
    monkeypatch.setattr(product, "_fold", lambda hidden, *_: launched.append(len(hidden)))
    shape, options = REFUSED.get(name, ({}, {}))
    dtype, width, classes = shape.get("dtype", torch.bfloat16), shape.get("width", 64), shape.get("classes", 300)
    pitch = shape.get("pitch", width)
    hidden = torch.empty(1700, pitch, dtype=dtype)[:, :width].as_subclass(Cuda)
    weight = torch.empty(classes, width + 1 if "apart" in shape else pitch, dtype=dtype)[:, :width].as_subclass(Cuda)
    assert serves(weight, LossSpec(**options)) == (name == "")
    if not name:
        target, sums = torch.zeros(1700, dtype=torch.int32), torch.empty(2, 1700)
        fold_product(hidden, weight, LossSpec(), target, *sums, None, 1)
        assert sum(launched) == 1700
        assert max(launched) == 12 * 128  # the smallest number of rows of a launch, whatever the workspace


@pytest.mark.parametrize("vocabulary", [256, 257, 32_000, 128_256, 151_936, 256_000, 2**20])
@pytest.mark.parametrize("rows", [1, 128, 129, 8192])
def test_chunks_depend_on_the_vocabulary_only(rows: int, vocabulary: int) -> None:
    units, _, chunks, of_chunk, tiles, _ = product._walk(rows, torch.empty(vocabulary, 0))
    assert (chunks, of_chunk) == product._walk(1, torch.empty(vocabulary, 0))[2:4]
    assert (chunks - 1) * of_chunk < tiles <= chunks * of_chunk
    assert tiles == -(-vocabulary // 256)
    assert units == -(-rows // 128) * chunks
    assert chunks <= 320


WATCHED: list[dict[str, Any]] = [{"label_smoothing": 0.1}, {"linear_bias": True}]


@pytest.mark.parametrize("options", [{}, {"z_loss": 0.1}, {"stats": ("lse", "nll", "entropy")}, *WATCHED], ids=str)
def test_calls_that_ask_for_the_hopper_kernels(
    target: Target, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Calls without label smoothing and without a bias."""
    asked: list[bool] = []
    real = tiles.serves
    monkeypatch.setattr(tiles, "serves", lambda *given: asked.append(True) or real(*given))
    hidden, weight = (torch.randn(size, 8, device=target.device) for size in (3, 17))
    given = options | ({"linear_bias": torch.zeros(17, device=target.device)} if "linear_bias" in options else {})
    xent.linear_cross_entropy(hidden, weight, torch.arange(3, device=target.device), backend=target.name, **given)
    assert bool(asked) == (options not in WATCHED)
