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


DEFAULTS = {
    ("cpu", 1024, 10**7, 2): 256,  # enough rows however many classes
    ("metal", 1024, 10**7, 2): 256,
    ("mlx-cpu", 1024, 10**7, 2): 64,
    ("cuda", 1024, 10**7, 2): 256,
    ("cuda", 2048, 128_256, 2): 2048,
    ("cuda", 6144, 128_256, 2): 1536,
    ("cuda", 2**20, 128_256, 2): 4096,
    ("cuda", 8192, 256_000, 2): 2048,
    ("cuda", 65536, 256_000, 2): 3328,
    ("cuda", 8192, 50_304, 2): 4096,  # a small vocabulary
    ("cuda", 8192, 53_761, 2): 2048,
    ("cuda", 8192, 3 * 151_936, 6): 1280,  # a multiple of the rows of a tile: 7 chunks; 1177 rows fit
    ("mlx-cuda", 8192, 128_256, 2): 4096,
    ("mlx-cuda", 8192, 128_256, 4): 2048,
    ("mlx-cuda", 32768, 256_000, 2): 4096,  # 8 chunks; 16 would be summed in float32
    ("mlx-cuda", 8192, 32_000, 2): 8192,
}
"""(device, rows, classes, bytes of a number) -> rows of a chunk whose products are summed, as measured to be fast."""


@pytest.mark.parametrize(("call", "rows"), DEFAULTS.items(), ids=str)
def test_default_chunk(call: tuple[str, int, int, int], rows: int) -> None:
    device, *sizes = call
    assert rows_per_chunk(*sizes, None, device, sums=True) == rows
    assert rows_per_chunk(*sizes, None, device) <= rows


@pytest.mark.parametrize(("workspace", "rows"), [(966 * 2000, 911), (1100 * 2000, 1024), (1460 * 2000, 1408)])
def test_a_workspace_is_never_exceeded(workspace: int, rows: int) -> None:
    assert rows_per_chunk(8192, 1000, 2, workspace, "cuda") == rows


def test_chunks_are_even() -> None:
    assert rows_per_chunk(1025, 1000, 4, 1024 * 4000, "cpu") == 513


@pytest.mark.parametrize(
    ("workspace", "shape"), [(None, (8192, 2048)), (2**20, (2048, 256)), (100, (1, 50)), (1, (1, 1))]
)
def test_tile_fits_in_its_workspace(workspace: int | None, shape: tuple[int, int]) -> None:
    assert tile_shape(10**5, 10**5, 2, workspace) == shape
