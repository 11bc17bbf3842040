"""A chunk keeps to its workspace, covers all rows, and leaves no crumb."""

import pytest

from xent.core.chunks import classes_per_slice, rows_in_gradient, rows_per_block, rows_per_chunk, tile_shape

MIB = 2**20


@pytest.mark.parametrize("rows", [0, 1, 7, 100, 4096, 100_003])
@pytest.mark.parametrize("vocabulary", [1, 1000, 128_256, 10**7])
@pytest.mark.parametrize("workspace", [1, 10**6, 10**9])
def test_chunk_keeps_to_its_workspace(rows: int, vocabulary: int, workspace: int) -> None:
    chunk = rows_per_chunk(rows, vocabulary, 2, workspace, "cpu")
    assert chunk >= 1
    assert chunk == 1 or chunk * vocabulary * 2 <= workspace
    chunks = -(-rows // chunk)
    assert chunks <= -(-rows // max(workspace // (vocabulary * 2), 1)) + 1


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps", "metal", "mlx-cuda"])
def test_default_does_not_grow_with_tokens(device: str) -> None:
    sizes = {rows_per_chunk(rows, 128_256, 4, None, device) for rows in (2**13, 2**15, 2**17, 2**20)}
    assert max(sizes) <= 1.1 * min(sizes)
    summed = {rows_per_chunk(rows, 128_256, 2, None, device, sums=True) for rows in (2**13, 2**15, 2**17, 2**20)}
    assert max(summed) <= 2.2 * min(summed)


@pytest.mark.parametrize("device", ["cpu", "cuda", "metal", "mlx-cuda"])
def test_default_has_hundreds_of_rows_however_many_classes(device: str) -> None:
    assert rows_per_chunk(1024, 10**7, 2, None, device) == 256


def test_chunk_on_an_accelerator_is_all_of_a_small_batch_and_a_quarter_of_a_larger_one() -> None:
    expected = {1024: 1024, 2048: 2048, 4096: 1024, 6144: 1536, 8192: 2048, 12288: 3072, 16384: 4096, 2**20: 4096}
    assert {rows: rows_per_chunk(rows, 128_256, 2, None, "cuda", sums=True) for rows in expected} == expected
    fixed = {rows: min(chunk, 2048) for rows, chunk in expected.items()}
    assert {rows: rows_per_chunk(rows, 128_256, 2, None, "cuda") for rows in expected} == fixed


def test_chunk_of_a_large_vocabulary_grows_as_others_do() -> None:
    sizes = [rows_per_chunk(rows, 256_000, 2, None, "cuda", sums=True) for rows in (8192, 16384, 65536)]
    assert sizes == [1664, 3328, 3328]


@pytest.mark.parametrize(
    ("rows", "vocabulary", "itemsize", "chunk"),
    [
        (8192, 128_256, 2, 4096),
        (8192, 128_256, 4, 2048),
        (8192, 256_000, 2, 2048),
        (32768, 256_000, 2, 4096),  # 8 sums, where 16 would be in float32
        (2**17, 256_000, 2, 4096),
        (8192, 32_000, 2, 8192),
    ],
)
def test_chunks_of_mlx_on_nvidia_are_few(rows: int, vocabulary: int, itemsize: int, chunk: int) -> None:
    assert rows_per_chunk(rows, vocabulary, itemsize, None, "mlx-cuda", sums=True) == chunk
    assert rows_per_chunk(rows, vocabulary, itemsize, None, "mlx-cuda") <= chunk


def test_chunks_are_even() -> None:
    assert rows_per_chunk(1025, 1000, 4, 1024 * 4000, "cpu") == 513


@pytest.mark.parametrize(
    ("rows", "chunk", "classes"),
    [
        (8192, 523, None),  # 16 sums
        (8192, 261, 3840),
        (65536, 1024, None),  # larger chunks than sums take long for
        (65536, 523, None),  # the input's sum would be no smaller
        (10**6, 261, None),  # too few classes for a product
    ],
)
def test_slices_of_classes_take_the_place_of_small_chunks(rows: int, chunk: int, classes: int | None) -> None:
    assert classes_per_slice(rows, 128_256, chunk) == classes


@pytest.mark.parametrize(
    ("rows", "columns", "chunk", "workspace", "expected"),
    [
        (4096, 4096, 1024, None, (4096, 8192)),
        (4000, 7168, 1024, None, (4000, 16384)),
        (2880, 2880, 1024, None, (2880, 8192)),  # all of them, no multiple of 128
        (2048, 4096, 2048, None, (0, 0)),  # one chunk, no sum
        (8192, 4096, 2048, None, (0, 0)),  # sums are left, of chunks that are large enough
        (8192, 4096, 512, 128 * MIB, (4096, 8192)),
        (8192, 7168, 512, 128 * MIB, (2304, 8192)),  # of more the input's gradient would outgrow the workspace
        (4096, 4096, 128, 8 * MIB, (0, 0)),  # so few are not worth it
        (5000, 0, 512, MIB, (0, 0)),
        (5000, 4096, 512, 1, (0, 0)),
    ],
)
def test_rows_whose_logits_lie_in_the_gradient(
    rows: int, columns: int, chunk: int, workspace: int | None, expected: tuple[int, int]
) -> None:
    assert rows_in_gradient(rows, columns, 128_256, 2, chunk, workspace) == expected


@pytest.mark.parametrize("workspace", [64 * MIB, 128 * MIB, 500 * MIB])
@pytest.mark.parametrize("columns", [512, 2304, 4096])
def test_rows_in_the_gradient_keep_to_the_workspace(columns: int, workspace: int) -> None:
    rows, classes = rows_in_gradient(columns, columns, 128_256, 2, 100, workspace)
    assert rows
    assert rows * classes * 2 + rows * columns * 4 <= workspace


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("vocabulary", [1000, 32_000, 50_257, 128_256, 262_144])
@pytest.mark.parametrize("columns", [2048, 4096, 8192, 12_288, 16_384])
def test_rows_in_the_gradient_take_no_more_than_a_chunk(columns: int, vocabulary: int, itemsize: int) -> None:
    for rows in (columns // 2, columns):
        chunk = rows_per_chunk(rows, vocabulary, itemsize, None, "cuda", sums=itemsize == 2)
        first, classes = rows_in_gradient(rows, columns, vocabulary, itemsize, chunk, None)
        assert first * classes * itemsize + first * columns * 4 <= chunk * vocabulary * itemsize
        assert classes < vocabulary


def test_block_is_at_least_a_row() -> None:
    assert rows_per_block(10**9, 4, "cpu", 1) == 1
    assert rows_per_block(1000, 4, "cpu", 2) > 100
    assert rows_per_block(1000, 4, "cpu", 64) == rows_per_block(1000, 4, "cpu", 4)


@pytest.mark.parametrize(
    ("workspace", "shape"), [(None, (8192, 2048)), (2**20, (2048, 256)), (100, (1, 50)), (1, (1, 1))]
)
def test_tile_keeps_to_its_workspace(workspace: int | None, shape: tuple[int, int]) -> None:
    assert tile_shape(10**5, 10**5, 2, workspace) == shape
