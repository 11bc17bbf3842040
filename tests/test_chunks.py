"""Chunks do not exceed the workspace, cover all rows, and have nearly equal sizes."""

import pytest

from xent.core.chunks import rows_per_chunk, tile_shape


@pytest.mark.parametrize("rows", [0, 1, 7, 100, 4096, 100_003])
@pytest.mark.parametrize("vocabulary", [1, 1000, 128_256, 10**7])
@pytest.mark.parametrize("workspace", [1, 10**6, 10**9])
def test_chunk_fits_in_its_workspace(rows: int, vocabulary: int, workspace: int) -> None:
    chunk = rows_per_chunk(rows, vocabulary, 2, workspace, "cpu")
    assert chunk >= 1
    assert chunk == 1 or chunk * vocabulary * 2 <= workspace
    chunks = -(-rows // chunk)
    assert chunks <= -(-rows // max(workspace // (vocabulary * 2), 1)) + 1


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps", "metal", "mlx-cpu", "mlx-cuda"])
def test_default_does_not_grow_with_tokens(device: str) -> None:
    sizes = {rows_per_chunk(rows, 128_256, 4, None, device) for rows in (2**13, 2**15, 2**17, 2**20)}
    assert max(sizes) <= 1.1 * min(sizes)
    summed = {rows_per_chunk(rows, 128_256, 2, None, device, sums=True) for rows in (2**13, 2**15, 2**17, 2**20)}
    assert max(summed) <= 2.2 * min(summed)


@pytest.mark.parametrize(
    ("device", "rows"), [("cpu", 256), ("cuda", 256), ("metal", 256), ("mlx-cuda", 256), ("mlx-cpu", 64)]
)
def test_default_has_enough_rows_however_many_classes(device: str, rows: int) -> None:
    assert rows_per_chunk(1024, 10**7, 2, None, device) == rows


def test_default_chunk_on_an_accelerator() -> None:
    expected = {1024: 1024, 2048: 2048, 4096: 1024, 6144: 1536, 8192: 2048, 12288: 3072, 16384: 4096, 2**20: 4096}
    assert {rows: rows_per_chunk(rows, 128_256, 2, None, "cuda", sums=True) for rows in expected} == expected
    fixed = {rows: min(chunk, 2048) for rows, chunk in expected.items()}
    assert {rows: rows_per_chunk(rows, 128_256, 2, None, "cuda") for rows in expected} == fixed


def test_chunk_of_a_large_vocabulary_grows_like_others() -> None:
    sizes = [rows_per_chunk(rows, 256_000, 2, None, "cuda", sums=True) for rows in (8192, 16384, 65536)]
    assert sizes == [2048, 3328, 3328]


@pytest.mark.parametrize(
    ("rows", "vocabulary", "chunk"),
    [(8192, 32_000, 4096), (8192, 50_304, 4096), (4096, 50_304, 4096), (16384, 50_304, 4096), (8192, 53_761, 2048)],
)
def test_chunk_of_a_small_vocabulary_has_4096_rows_if_they_fit(rows: int, vocabulary: int, chunk: int) -> None:
    assert rows_per_chunk(rows, vocabulary, 2, None, "cuda", sums=True) == chunk


def test_chunk_is_a_multiple_of_the_rows_of_a_tile() -> None:
    wide = 3 * 151_936  # float32 logits and 16-bit gradients
    assert rows_per_chunk(8192, wide, 6, None, "cuda", sums=True) == 1280  # 7 chunks; 1177 rows fit
    assert rows_per_chunk(8192, 1000, 2, 966 * 2000, "cuda") == 911  # a workspace is never exceeded
    assert rows_per_chunk(8192, 1000, 2, 1100 * 2000, "cuda") == 1024
    assert rows_per_chunk(8192, 1000, 2, 1460 * 2000, "cuda") == 1408
    assert rows_per_chunk(8192, 128_256, 2, None, "mlx-cuda") == 1664  # as measured with MLX; 1700 rows fit


@pytest.mark.parametrize(
    ("rows", "vocabulary", "itemsize", "chunk"),
    [
        (8192, 128_256, 2, 4096),
        (8192, 128_256, 4, 2048),
        (8192, 256_000, 2, 2048),
        (32768, 256_000, 2, 4096),  # 8 chunks; 16 would be summed in float32
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
    ("workspace", "shape"), [(None, (8192, 2048)), (2**20, (2048, 256)), (100, (1, 50)), (1, (1, 1))]
)
def test_tile_fits_in_its_workspace(workspace: int | None, shape: tuple[int, int]) -> None:
    assert tile_shape(10**5, 10**5, 2, workspace) == shape
