"""The memory layout of rows: every row is found, and vectors are used only if all accesses are aligned."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from xent.backends.torch import devices
from xent.backends.torch.rows import gradient_like
from xent.backends.triton.geometry import geometry, rows_of, sizes

SIZE = {torch.float32: 4, torch.bfloat16: 8}  # elements of a vector of 16 bytes

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "two axes": lambda t: t.flatten(0, 1),
    "one row": lambda t: t[1, 2],
    "one row of a matrix": lambda t: t.flatten(0, 1)[4:5],
    "axes of one": lambda t: t[1:2, 2:3],
    "all but the last token": lambda t: t[:, :-1],
    "all but the first token": lambda t: t[:, 1:],
    "last token": lambda t: t[:, -1:],
    "every other token": lambda t: t[:, ::2],
    "leading axes swapped": lambda t: t.transpose(0, 1),
    "fewer classes": lambda t: t[..., :-3],
    "later classes": lambda t: t[..., 3:],
    "expanded": lambda t: t[:1].expand(5, -1, -1),
    "expanded tokens": lambda t: t[:, :1].expand(-1, 5, -1),
    "a token of a wide batch": lambda t: t.view(1, 3, 4, -1)[:, :, 1],
    "four axes": lambda t: t.view(3, 2, 2, -1)[:, :, :1],
}


def places(tensor: Tensor, rows: tuple[int, int, int]) -> list[int]:
    """Return the offset of each row as kernels compute it."""
    inner, outer, step = rows
    count = tensor.shape[:-1].numel()
    return [tensor.storage_offset() + row // inner * outer + row % inner * step for row in range(count)]


def begins(tensor: Tensor) -> list[int]:
    """Return the same offsets from the strides of all axes."""
    indices = itertools.product(*map(range, tensor.shape[:-1]))
    return [tensor.storage_offset() + sum(map(int.__mul__, at, tensor.stride()[:-1])) for at in indices]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_row_is_found(layout: str) -> None:
    tensor = LAYOUTS[layout](torch.empty(3, 4, 37))
    rows = rows_of(tensor)
    assert rows is not None
    assert places(tensor, rows) == begins(tensor)


def test_groups_of_groups_are_not_supported() -> None:
    tensor = torch.empty(3, 5, 4, 37)[:, :3, :2]
    assert rows_of(tensor) is None
    assert geometry(tensor, None) is None


@pytest.mark.parametrize("shape", [(0, 7), (0, 3, 7), (3, 0, 7), (3, 0, 2, 7)])
def test_no_rows(shape: tuple[int, ...]) -> None:
    tensor = torch.empty(shape)
    rows = rows_of(tensor)
    assert rows is not None
    assert places(tensor, rows) == []
    assert geometry(tensor, torch.empty(shape)) is not None


@pytest.mark.parametrize("vocabulary", [37, 40])
def test_strided_classes_are_not_supported(vocabulary: int) -> None:
    apart, beside = torch.empty(vocabulary, 6).t(), torch.empty(6, vocabulary)
    assert geometry(apart, None) is None
    assert geometry(beside, apart) is None
    assert geometry(torch.empty(1, 6).t(), None) is not None  # with one class the stride does not matter


def check(logits: Tensor, grad: Tensor | None) -> int:
    """Compare the result of `geometry` with the addresses of all rows. Return the vector size."""
    place = geometry(logits, grad)
    assert place is not None
    kinds = [(logits, place.logits)] + ([] if grad is None else [(grad, place.grad)])
    starts = []
    for tensor, rows in kinds:
        found = places(tensor, rows)
        assert found == begins(tensor)
        if not place.grouped:
            assert found == [tensor.storage_offset() + row * rows[2] for row in range(len(found))]
        base = tensor.data_ptr() // tensor.itemsize - tensor.storage_offset()
        starts.append([base + at for at in found])
    if place.vector == 1:
        assert (place.skew, place.skewed) == (0, False)
        return 1
    assert place.vector == 16 // logits.itemsize
    offsets = [at % place.vector for at in starts[0]]
    assert place.skewed or not any(offsets)
    assert place.ragged or not (any(offsets) or logits.shape[-1] % place.vector)
    for row, off in enumerate(offsets):
        inner, outer, step = place.logits
        assert off == (place.skew + row // inner * outer + row % inner * step) % place.vector
        if grad is not None:
            assert (starts[1][row] - off) * grad.itemsize % 16 == 0
    return place.vector


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", SIZE)
@pytest.mark.parametrize("vocabulary", [40, 37, 36])
@pytest.mark.parametrize("start", [0, 4, 3])
def test_vectors_begin_on_boundaries(layout: str, dtype: torch.dtype, vocabulary: int, start: int) -> None:
    memory = torch.empty(512, dtype=dtype)
    logits = LAYOUTS[layout](memory[start : start + 3 * 4 * vocabulary].view(3, 4, vocabulary))
    assert check(logits, None) == SIZE[dtype]
    assert check(logits, logits) == SIZE[dtype]
    others = [gradient_like(logits), torch.empty(logits.shape, dtype=dtype)]
    others.append(torch.empty(1 + logits.numel(), dtype=dtype)[1:].view(logits.shape))
    if logits.numel() * logits.itemsize % 16 == 0:
        others.append(torch.empty(logits.shape, dtype=torch.float32))
    for grad in others:
        check(logits, grad)


@pytest.mark.parametrize(
    ("change", "vector"),
    [
        (lambda t: t[:, :-1], 8),  # a contiguous gradient would have another layout
        (lambda t: t.flatten(0, 1), 8),
        (lambda t: t.transpose(0, 1), 8),
    ],
)
def test_gradients_have_the_layout_of_logits(change: Callable[[Tensor], Tensor], vector: int) -> None:
    for vocabulary in (40, 37):
        logits = change(torch.empty(4, 38, vocabulary, dtype=torch.bfloat16))
        assert check(logits, gradient_like(logits)) == vector


def test_gradient_with_another_alignment_is_written_element_by_element() -> None:
    logits = torch.empty(3, 37, dtype=torch.bfloat16)
    padded = torch.empty(3, 40, dtype=torch.bfloat16)[:, :37]
    assert check(logits, padded) == 1
    assert check(padded, logits) == 1
    assert check(padded, padded) == 8
    assert check(logits, torch.empty(120, dtype=torch.bfloat16)[1:112].view(3, 37)) == 1


def test_gradient_of_another_dtype_must_be_aligned_itself() -> None:
    """Rows of 12 float32 elements begin at multiples of 16 bytes, rows of 12 bfloat16 elements do not."""
    for vocabulary, vector in ((16, 4), (12, 1)):
        logits = torch.empty(4, vocabulary)
        assert check(logits, torch.empty(4, vocabulary, dtype=torch.bfloat16)) == vector


def test_last_vector_is_not_read_beyond_the_memory() -> None:
    """CPU memory ends with the tensor. So does GPU memory if PyTorch's cache is off."""
    exact = torch.empty(3, 37, dtype=torch.bfloat16)
    assert exact.untyped_storage().nbytes() % 16
    assert check(exact, None) == 1
    assert check(torch.empty(8, 37, dtype=torch.bfloat16), None) == 8
    assert check(torch.empty(40, dtype=torch.bfloat16)[:37].view(1, 37), None) == 8


def test_allocator_rounds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cuda(Tensor):
        is_cuda = True

    tensor = torch.empty(3, 37, dtype=torch.bfloat16).as_subclass(Cuda)
    monkeypatch.setattr(devices, "_ROUNDS_UP", True)
    assert devices.is_padded(tensor)
    monkeypatch.setattr(devices, "_ROUNDS_UP", False)
    assert not devices.is_padded(tensor)


@pytest.mark.parametrize(
    "vocabulary", [1, 7, 8, 9, 1024, 4096, 4097, 16_384, 32_000, 43_520, 50_257, 81_920, 128_256, 10**6]
)
@pytest.mark.parametrize("dtype", SIZE)
@pytest.mark.parametrize("predicts", [False, True])
@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize("writes", [False, True])
def test_blocks_cover_a_row(vocabulary: int, dtype: torch.dtype, predicts: bool, capped: bool, writes: bool) -> None:
    base = torch.empty(2 * vocabulary + 16, dtype=dtype)
    for start in (0, 1):
        place = geometry(base[start : start + vocabulary], None)
        assert place is not None
        size = sizes(vocabulary, dtype.itemsize, place, writes, predicts, capped, True)
        assert size.block & (size.block - 1) == 0
        assert size.lanes & (size.lanes - 1) == 0
        assert size.block >= 2 * place.vector
        assert size.block % size.lanes == 0
        assert size.lanes == (size.block if place.skewed or place.vector == 1 else size.block // place.vector)
        assert size.blocks & (size.blocks - 1) == 0
        assert size.share <= size.blocks * size.block < 2 * max(size.share, size.block) + size.block
        assert size.whole == (vocabulary % size.share == size.share % size.block == 0 and not place.skewed)
        assert (size.parts - 1) * size.share < vocabulary <= size.parts * size.share
        assert size.block * dtype.itemsize <= 64 * 1024
        assert 1 <= size.options["num_warps"] <= 32
        assert (
            32 * size.options["num_warps"] * size.options.get("maxnreg", 0) <= 65_536
        )  # registers of a multiprocessor
        # The same bits of a loss with and without predictions, if no gradient is written.
        assert writes or size == sizes(vocabulary, dtype.itemsize, place, writes, not predicts, capped, True)
