"""The benchmark's search for the longest sequence, with peaks that are known for each length."""

from collections.abc import Callable

import pytest

from benchmarks.training import longest

LIMIT = 10_000


def search(
    peak: Callable[[int], int | None], first: int = 1024, seconds: float = 1e9
) -> tuple[int | None, bool, list[int]]:
    """Search with steps whose seconds are the square of their length in thousands. Return the result and the trials."""

    def trial(length: int) -> tuple[int | None, float]:
        return peak(length), (length / 1000) ** 2

    trials = {first: trial(first)}
    return *longest(trial, trials, LIMIT, 64, seconds), list(trials)


@pytest.mark.parametrize("first", [256, 1024, 4096, 8192, 65536])
@pytest.mark.parametrize(
    "peak",
    [
        lambda length: 1000 + 2 * length,
        lambda length: max(3000 + length, 2 * length),
        lambda length: max(9000, 5 * length),
        lambda length: 1000 + length // 10,
    ],
    ids=["linear", "two slopes", "constant first", "long"],
)
def test_result_fits_and_is_nearly_the_longest(peak: Callable[[int], int], first: int) -> None:
    length, at_least, _ = search(peak, first)
    assert length is not None
    assert peak(length) <= LIMIT < peak(int(length * 1.04) + 128)
    assert not at_least


def test_steps_without_enough_memory_of_the_device_are_too_long() -> None:
    length, _, _ = search(lambda length: None if length > 3000 else 1000 + length)
    assert length is not None
    assert 2700 < length <= 3000


def test_steps_that_take_too_long_are_not_tried() -> None:
    length, at_least, trials = search(lambda length: 1000 + 2 * length, seconds=9.1)
    assert max(trials) == length == 3008
    assert at_least
