"""The benchmark's search for the longest sequence, with peaks that are known for each length."""

from collections.abc import Callable

import pytest

from benchmarks.training.longest import Search, Trial

LIMIT = 10_000


def search(
    peak: Callable[[int], int | None], first: int = 1024, hint: int | None = None, seconds: float = 1e9
) -> Search:
    """Search with steps whose seconds are the square of their length in thousands."""

    def trial(length: int) -> Trial:
        return Trial(length, peak(length), (length / 1000) ** 2)

    result = Search(LIMIT, 64, trial(first), None if hint is None else trial(hint))
    result.run(trial, lambda: seconds)
    return result


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
    found = search(peak, first)
    length = found.longest.length
    assert length is not None
    assert peak(length) <= LIMIT < peak(int(length * 1.04) + 128)
    assert not found.longest.at_least


def test_linear_peaks_need_two_more_steps() -> None:
    assert [trial.length for trial in search(lambda length: 1000 + 2 * length).trials] == [1024, 2048, 4480]


def test_hint_saves_the_step_at_twice_the_length() -> None:
    found = search(lambda length: 1000 + 2 * length, hint=4480)
    assert [trial.length for trial in found.trials] == [1024, 4480]
    found = search(lambda length: 1000 + 2 * length, hint=1088)
    assert [trial.length for trial in found.trials] == [1024, 1088, 4480]


def test_without_enough_memory_for_any_length() -> None:
    found = search(lambda length: LIMIT + length)
    assert found.longest.length is None
    assert not found.longest.at_least


def test_steps_without_enough_memory_of_the_device_are_too_long() -> None:
    found = search(lambda length: None if length > 3000 else 1000 + length)
    assert found.longest.length is not None
    assert 2700 < found.longest.length <= 3000


def test_steps_that_take_too_long_are_not_tried() -> None:
    found = search(lambda length: 1000 + 2 * length, seconds=9.1)
    assert max(trial.length for trial in found.trials) == 3008 == found.longest.length
    assert found.longest.at_least


def test_steps_as_long_as_the_hint_are_affordable() -> None:
    found = search(lambda length: 1000 + 2 * length, hint=4480, seconds=20.1)
    assert [trial.length for trial in found.trials] == [1024, 4480]


def test_no_time_means_no_step() -> None:
    found = search(lambda length: 1000 + 2 * length, seconds=-1.0)
    assert (len(found.trials), found.longest.length, found.longest.at_least) == (1, 1024, True)
