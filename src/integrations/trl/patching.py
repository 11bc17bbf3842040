"""patch and unpatch: install xent's functions in the modules in which TRL's trainers look up their kernels.

TRL's modules import the kernels by name, so that a trainer calls the object that its module has under that name. For a
version of TRL without that name, or with other parameters, `patch` raises an error: such a version would silently
continue to use its own kernels.
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from xent.integrations.patch import Patch
from xent.integrations.trl.functions import (
    ChunkedDivergenceFunction,
    ChunkedLogProbFunction,
    selective_log_softmax_and_entropy,
)

__all__ = ["patch", "unpatch"]


@dataclass(frozen=True)
class _Place:
    """A name in a module of TRL, and xent's function for it."""

    module: str
    name: str
    function: Any
    needs_triton: bool = False
    """Whether TRL defines the name only if Triton is installed."""


_PLACES = (
    _Place("trl.trainer.utils", "_ChunkedLogProbFunction", ChunkedLogProbFunction),
    _Place("trl.trainer.distillation_trainer", "ChunkedDivergenceFunction", ChunkedDivergenceFunction),
    _Place("trl.trainer.utils", "_fused_logprob_entropy", selective_log_softmax_and_entropy, needs_triton=True),
)

_replaced: dict[_Place, Any] = {}
"""TRL's original object of each place."""


def patch() -> Patch:
    """Make TRL's trainers compute log-probabilities, entropies and divergences with xent.

    The trainers for SFT, DPO, KTO, GRPO, asynchronous GRPO and RLOO compute log-probabilities from hidden states with
    one function of TRL, on every device; `xent.linear_log_probs` replaces it. `xent.linear_divergence` replaces the
    divergence of the distillation trainer. `xent.log_probs` replaces the function for logits on GPUs. The patch applies
    to existing trainers and to those that are created later.

    Returns
    -------
    Patch
        A context manager that undoes the patch. It may be ignored.

    Raises
    ------
    ImportError
        This version of TRL has the functions in other modules, or with other parameters. Nothing is changed.

    Examples
    --------
    >>> from xent.integrations.trl import patch, unpatch
    >>> _ = patch()  # doctest: +SKIP
    >>> trl.GRPOTrainer(model, reward_funcs=reward, train_dataset=prompts).train()  # doctest: +SKIP
    >>> unpatch()
    """
    found = {place: _find(place) for place in _PLACES if not place.needs_triton or _has_triton()}
    changed = not _replaced
    for place, theirs in found.items():
        if theirs is not place.function:
            _replaced[place] = theirs
            setattr(importlib.import_module(place.module), place.name, place.function)
    return Patch(unpatch if changed else None)


def unpatch() -> None:
    """Undo `patch`: restore TRL's functions. Without a patch it does nothing."""
    for place, theirs in _replaced.items():
        module = importlib.import_module(place.module)
        if getattr(module, place.name) is place.function:  # otherwise something else has replaced it since
            setattr(module, place.name, theirs)
    _replaced.clear()


def _find(place: _Place) -> Any:
    """Return TRL's object of a place; raise ImportError if it does not exist or has other parameters."""
    try:
        module = importlib.import_module(place.module)
    except ModuleNotFoundError as error:
        raise ImportError(_words(place, f"there is no {error.name}")) from error
    theirs = getattr(module, place.name, None)
    if theirs is None:
        raise ImportError(_words(place, "it has no such name"))
    if theirs is place.function:
        return theirs
    expected, actual = _parameters(place.function), _parameters(theirs)
    if actual != expected:
        raise ImportError(
            _words(place, f"it takes ({', '.join(actual)}) there, where xent takes ({', '.join(expected)})")
        )
    return theirs


def _parameters(function: Any) -> list[str]:
    """Return the names of the parameters of a function, or of the `apply` of an autograd function."""
    call: Callable[..., Any] = getattr(function, "forward", None) or getattr(function, "apply", function)
    return [name for name in inspect.signature(call).parameters if name != "ctx"]


def _words(place: _Place, what: str) -> str:
    return (
        f"xent.integrations.trl looked for {place.name} in {place.module} of TRL {_version()}, and {what}. It is "
        "written for TRL 1.16: install that with pip install 'trl==1.16.0', or call xent.linear_log_probs and "
        "xent.linear_divergence in a loss of your own. TRL was left as it was"
    )


def _version() -> str:
    try:
        return str(importlib.import_module("trl").__version__)
    except ImportError:
        return "(not installed)"


def _has_triton() -> bool:
    """Whether TRL found Triton. Without Triton it has no kernel for logits to replace."""
    return bool(importlib.import_module("transformers.utils").is_triton_available())
