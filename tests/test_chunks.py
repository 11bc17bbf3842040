"""A chunk keeps to its workspace, covers all rows, and leaves no crumb."""

import pytest

from xent.core.chunks import rows_per_block, rows_per_chunk


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


def test_chunks_are_even() -> None:
    assert rows_per_chunk(1025, 1000, 4, 1024 * 4000, "cpu") == 513


def test_block_is_at_least_a_row() -> None:
    assert rows_per_block(10**9, 4, "cpu", 1) == 1
    assert rows_per_block(1000, 4, "cpu", 2) > 100
