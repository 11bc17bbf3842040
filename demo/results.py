"""Everything that the demo measured, and the comparisons that the table and the picture both show."""

from dataclasses import dataclass

from demo.losses import PYTORCH, XENT
from demo.train import Run
from demo.truth import Errors

__all__ = ["MIB", "Results"]

MIB = 2**20

STEPS_BEFORE_DRIFT = 10
"""Two runs drift apart by rounding alone, but not this early."""

LARGEST_DIFFERENCE = 1e-4

LARGEST_ERROR = (1.5, 1e-6)
"""How exact a gradient must be: at most so many times PyTorch's own error, plus a few units in the last place."""


@dataclass(frozen=True)
class Results:
    """Both runs; each dictionary is keyed by the name of the loss."""

    runs: dict[str, Run]
    errors: dict[str, Errors]
    memory: dict[int, dict[str, int | None]]
    """Tokens of one call to the peak bytes of each loss."""
    tokens_per_step: int
    vocabulary: int
    backend: str
    device: str

    @property
    def differences(self) -> list[float]:
        """Relative difference of the two training losses at each step."""
        pairs = zip(self.runs[PYTORCH].losses, self.runs[XENT].losses, strict=True)
        return [abs(xent - pytorch) / abs(pytorch) for pytorch, xent in pairs]

    def tokens_per_second(self, name: str) -> float:
        """Tokens that the named run learned from in a second."""
        return self.tokens_per_step / self.runs[name].step_time

    @property
    def complaints(self) -> list[str]:
        """What a demo that went wrong has to say; empty when all is well."""
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
