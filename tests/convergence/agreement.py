"""Compare two training runs: each loss, each gradient of the logits and each parameter, up to rounding."""

from typing import Any

import numpy as np

from tests.convergence.training import Run

__all__ = ["disagreements"]

UNITS = {"float32": 2.0**-23, "bfloat16": 2.0**-8}
GROWTH = 64
"""The allowed difference in float32 over all steps, in units in the last place."""


def disagreements(ours: Run, plain: Run, exact: Run, dtype: str, has_logits: bool) -> list[str]:
    """Return what differs, by how much, and what is allowed.

    In float32 a run is compared with the plain one. In lower precision both are compared with `exact`, the plain run in
    float32: the error of xent's run may be 1.5 times that of the plain run, plus one unit in the last place.
    """
    pairs = [("losses", *(np.array(run.losses) for run in (ours, plain, exact)))]
    if has_logits:
        for number in range(len(plain.steps)):
            step = [run.steps[number].logits for run in (ours, plain, exact)]
            pairs.append((f"gradient of the logits, step {number}", *step))
    for name, *values in zip(
        ("embedding", "layer", "classifier", "bias"), *(_changes(run) for run in (ours, plain, exact)), strict=True
    ):
        pairs.append((f"change of the {name}", *values))
    found = []
    for name, mine, theirs, truth in pairs:
        size = np.linalg.norm(truth)
        if dtype == "float32":
            error, allowed = np.linalg.norm(mine - theirs) / size, GROWTH * UNITS[dtype]
        else:
            error = np.linalg.norm(mine - truth) / size
            allowed = 1.5 * np.linalg.norm(theirs - truth) / size + UNITS[dtype]
        if not error <= allowed:
            found.append(f"{name}: {error:.2e}, allowed {allowed:.2e}")
    return found


def _changes(run: Run) -> list[Any]:
    return [after - before for after, before in zip(run.after, run.before, strict=True)]
