"""All measurements of the demo, and the comparisons that table and plot show."""

import statistics
from dataclasses import dataclass

from demo.losses import PYTORCH, XENT
from demo.train import Run
from demo.truth import Errors

__all__ = ["MIB", "Results"]

MIB = 2**20

STEPS_BEFORE_DRIFT = 10
"""The steps in which the losses must agree. Later, rounding alone makes two runs diverge."""

LARGEST_DIFFERENCE = 1e-4

LARGEST_ERROR = (1.5, 1e-6)
"""The largest allowed error of a gradient, in multiples of PyTorch's own error, plus a few units in the last place."""


@dataclass(frozen=True)
class Results:
    """The results of both runs. The keys of dictionaries are names of losses."""

    runs: dict[str, Run]
    errors: dict[str, Errors]
    memory: dict[int, dict[str, int | None]]
    """Number of tokens of a call -> {loss: peak bytes}."""
    tokens_per_step: int
    vocabulary: int
    backend: str
    device: str

    @property
    def differences(self) -> list[float]:
        """Return the relative difference of the two training losses at each step."""
        pairs = zip(self.runs[PYTORCH].losses, self.runs[XENT].losses, strict=True)
        return [abs(xent - pytorch) / abs(pytorch) for pytorch, xent in pairs]

    def ratio(self, seconds: str) -> float:
        """Return the median over all rounds of xent's time over PyTorch's; `seconds` is the field of the runs."""
        pairs = zip(getattr(self.runs[XENT], seconds), getattr(self.runs[PYTORCH], seconds), strict=True)
        return statistics.median(xent / pytorch for xent, pytorch in pairs)

    def tokens_per_second(self, name: str) -> float:
        """Return the tokens per second of the named run."""
        return self.tokens_per_step / self.runs[name].step_time

    @property
    def complaints(self) -> list[str]:
        """Return what went wrong, one sentence each; empty if nothing did."""
        found = []
        for name, run in self.runs.items():
            if not run.losses[-1] < run.losses[0]:
                found.append(f"The loss of the run with {name} did not fall.")
        if not all(difference < LARGEST_DIFFERENCE for difference in self.differences[:STEPS_BEFORE_DRIFT]):
            found.append(f"The losses differ by more than {LARGEST_DIFFERENCE} within {STEPS_BEFORE_DRIFT} steps.")
        times, more = LARGEST_ERROR
        pytorch, xent = self.errors[PYTORCH], self.errors[XENT]
        for label, own, allowed in (
            ("hidden states", xent.hidden_gradient, times * pytorch.hidden_gradient + more),
            ("classifier", xent.weight_gradient, times * pytorch.weight_gradient + more),
        ):
            if not own <= allowed:
                found.append(f"The gradient of the {label} is {own:.1e} away from float64; {allowed:.1e} is allowed.")
        return found
