"""The TRL integration: functions with the signatures of TRL's kernels, and `patch`, which installs them in TRL.

TRL's modules import the kernels by name, so that a trainer calls the object that its module has under that name. For a
version of TRL without that name, or with other parameters, `patch` raises an error: such a version would silently
continue to use its own kernels.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

import xent
from xent.integrations.patch import Patch, replace, restore

__all__ = [
    "COMPUTES",
    "WITHOUT_PATCH",
    "ChunkedDivergenceFunction",
    "ChunkedLogProbFunction",
    "Patch",
    "computes_with",
    "entropy_from_logits",
    "patch",
    "row_entropy",
    "selective_log_softmax_and_entropy",
    "unpatch",
]

_OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
"""The optional outputs beside log-probabilities, in TRL's order."""

_STATS = {"log_sum_sq_probs": "log_sum_sq_probs", "mean_logits": "mean_logit", "is_top1": "accuracy"}
"""TRL's name -> the name in `xent.Stats`."""

_IGNORED = -100


class ChunkedLogProbFunction:
    """Log-probabilities from hidden states, with the signature of `trl.kernels.ChunkedLogProbFunction`.

    This class is not an autograd function: `apply` calls `xent.linear_log_probs`.
    """

    @staticmethod
    def apply(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: Collection[str] = _OUTPUTS,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Compute the log-probability of each target, and the values that `outputs` names.

        Parameters
        ----------
        hidden : tensor (N, D), float
            Hidden states.
        weight : tensor (V, D), float
            The classifier. Outside of autocast it is converted to the dtype of `hidden`.
        bias : tensor (V,), float, or None
            Its bias.
        targets : integer tensor (N,)
            Classes in [0, V). A row with -100 has zeros everywhere, and no gradient.
        temperature : float > 0
            Divides the logits, after scale and softcap.
        chunk_size : int
            The width of TRL's tiles. Ignored: xent chooses its own.
        final_logit_softcapping : float > 0, optional
            The softcap, applied after the scale.
        logit_scale : float
            Multiplies the logits.
        outputs : collection of str
            Names among "entropy", "log_sum_sq_probs", "mean_logits" and "is_top1". Others are ignored, as in TRL.

        Returns
        -------
        log_probs, entropy : tensor (N,), float32
            Both differentiable.
        log_sum_sq_probs : tensor (N,), float32
            log sum_c p_c^2. No gradient.
        mean_logits : tensor (N,), float32
            The mean over classes of the logits after scale, softcap and temperature. No gradient.
        is_top1 : tensor (N,), bool
            Whether the target has the largest logit; among equal logits the first counts.

            Each but the first is None if `outputs` does not name it.

        Raises
        ------
        TypeError, ValueError, IndexError
            As in `xent.linear_log_probs`.

        Examples
        --------
        >>> import torch
        >>> from xent.integrations.trl import ChunkedLogProbFunction
        >>> hidden, weight = torch.eye(4), 2 * torch.eye(4)
        >>> log_probs, entropy, *others = ChunkedLogProbFunction.apply(
        ...     hidden, weight, None, torch.tensor([0, 1, 2, 2]), 1.0, 32768, None, 1.0, ("entropy",))
        >>> log_probs, others
        (tensor([-0.3408, -0.3408, -0.3408, -2.3408]), [None, None, None])
        """
        stats = tuple(stat for name, stat in _STATS.items() if name in outputs)
        returned: Any = xent.linear_log_probs(
            hidden,
            _usable(weight, hidden),
            targets,
            linear_bias=_usable(bias, hidden),
            temperature=temperature,
            softcap=final_logit_softcapping,
            logit_scale=logit_scale,
            ignore_index=_IGNORED,
            entropy="entropy" in outputs,
            stats=stats,
        )
        results = list(returned) if isinstance(returned, tuple) else [returned]
        of_rows = results.pop() if stats else xent.Stats()
        log_probs, entropy = (*results, None)[:2]
        correct = None if of_rows.accuracy is None else of_rows.accuracy.bool()
        return _float(log_probs), _float(entropy), _float(of_rows.log_sum_sq_probs), _float(of_rows.mean_logit), correct


def selective_log_softmax_and_entropy(
    logits: Tensor, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities and entropy from logits, with the signature of the function in `trl.kernels`.

    Parameters
    ----------
    logits : tensor (..., V), float
        Unnormalised scores.
    index : integer tensor (...)
        Classes in [0, V). A row with -100 has zeros, and no gradient.
    temperature : float > 0
        Divides the logits.
    row_mask : tensor (...), bool or integer, optional
        Rows with 0 are skipped: they have zeros, and no gradient.

    Returns
    -------
    log_probs, entropy : tensor (...), float32
        Both differentiable.

    Raises
    ------
    TypeError, ValueError, IndexError
        As in `xent.log_probs`.

    Examples
    --------
    >>> import torch
    >>> from xent.integrations.trl import selective_log_softmax_and_entropy
    >>> selective_log_softmax_and_entropy(torch.zeros(2, 4), torch.tensor([0, 3]), row_mask=torch.tensor([1, 0]))
    (tensor([-1.3863,  0.0000]), tensor([1.3863, 0.0000]))
    """
    if row_mask is not None:
        index = index.long().masked_fill(row_mask == 0, _IGNORED)  # not every integer dtype has -100
    log_probs, entropy = xent.log_probs(logits, index, temperature=temperature, ignore_index=_IGNORED, entropy=True)
    return log_probs.float(), entropy.float()


def entropy_from_logits(logits: Tensor, chunk_size: int = 128) -> Tensor:
    """Compute the entropy of each row of logits, with the signature of the function in `trl.trainer.utils`.

    The logits of a model that `xent.integrations.transformers.patch` has patched are not stored for it.

    Parameters
    ----------
    logits : tensor (..., V), float
        Unnormalised scores.
    chunk_size : int
        The rows of TRL's chunks. Ignored: xent chooses its own.

    Returns
    -------
    entropy : tensor (...), float32 (float64 for float64 logits)
        In nats. Differentiable.

    Raises
    ------
    TypeError, ValueError
        As in `xent.log_probs`.

    Examples
    --------
    >>> import torch
    >>> from xent.integrations.trl import entropy_from_logits
    >>> entropy_from_logits(torch.zeros(2, 4))
    tensor([1.3863, 1.3863])
    """
    return row_entropy(logits, -1)


def row_entropy(logits: Tensor, dim: int) -> Tensor:
    """Return the entropy of each row. A tensor with `__torch_function__`, such as deferred logits, computes its own."""
    if has_torch_function((logits,)):
        return handle_torch_function(row_entropy, (logits,), logits, dim)
    classes = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    return xent.log_probs(logits, classes, entropy=True)[1]


class ChunkedDivergenceFunction:
    """The divergence of a student from a teacher, with the signature of TRL's function for its distillation trainer.

    This class is not an autograd function: `apply` calls `xent.linear_divergence`.
    """

    @staticmethod
    def apply(
        student_hidden: Tensor,
        student_weight: Tensor,
        student_bias: Tensor | None,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        teacher_bias: Tensor | None,
        beta: float,
        temperature: float = 1.0,
        student_logit_scale: float = 1.0,
        student_final_logit_softcapping: float | None = None,
        teacher_logit_scale: float = 1.0,
        teacher_final_logit_softcapping: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute the divergence at each position, and the student's entropy.

        Every row counts, and none is shifted: TRL passes the positions that predict the tokens of completions.

        Parameters
        ----------
        student_hidden, student_weight, student_bias : tensors (N, D), (V, D) and (V,), or None for no bias
            The student's hidden states and classifier.
        teacher_hidden, teacher_weight, teacher_bias : tensors (N, D'), (V, D') and (V,), or None for no bias
            The teacher's hidden states and classifier, which get no gradient.
        beta : float in [0, 1]
            0 for KL(teacher || student), 1 for KL(student || teacher), between for the generalised Jensen-Shannon
            divergence.
        temperature : float > 0
            Divides the logits of both sides, after scale and softcap.
        student_logit_scale, teacher_logit_scale : float
            Multiply the logits.
        student_final_logit_softcapping, teacher_final_logit_softcapping : float > 0, optional
            Softcaps, applied after the scale.

        Returns
        -------
        divergence : tensor (N,), float32
            Differentiable with respect to the student.
        entropy : tensor (N,), float32
            The entropy of the student's distribution. No gradient.

        Raises
        ------
        TypeError, ValueError
            As in `xent.linear_divergence`.

        Examples
        --------
        >>> import torch
        >>> from xent.integrations.trl import ChunkedDivergenceFunction
        >>> student, teacher = (torch.eye(4), 2 * torch.eye(4), None), (torch.eye(4), 2 * torch.eye(4), None)
        >>> ChunkedDivergenceFunction.apply(*student, *teacher, 0.5)
        (tensor([0., 0., 0., 0.]), tensor([0.9183, 0.9183, 0.9183, 0.9183]))
        """
        returned: Any = xent.linear_divergence(
            student_hidden,
            _usable(student_weight, student_hidden),
            xent.LinearTeacher(
                teacher_hidden.detach(),
                _usable(teacher_weight.detach(), teacher_hidden),
                _usable(None if teacher_bias is None else teacher_bias.detach(), teacher_hidden),
                softcap=teacher_final_logit_softcapping,
                logit_scale=teacher_logit_scale,
            ),
            linear_bias=_usable(student_bias, student_hidden),
            beta=beta,
            temperature=temperature,
            softcap=student_final_logit_softcapping,
            logit_scale=student_logit_scale,
            reduction="none",
            stats=("entropy",),
        )
        divergence, stats = returned
        return divergence.float(), stats.entropy.float()


def _float(tensor: Any) -> Any:
    return None if tensor is None else tensor.float()


def _usable(weight: Any, hidden: Tensor) -> Any:
    """Return a weight in the dtype of the product, as a tensor that the backward pass can still read; None for None.

    Outside of autocast a product has the dtype of the hidden states, as in TRL: with cast_lm_head_to_fp32 these are
    float32, and the weight is not. DeepSpeed's ZeRO-3 gathers a parameter only for the call and replaces its memory by
    an empty tensor afterwards; a view keeps the gathered memory alive.
    """
    if weight is None:
        return None
    if not torch.is_autocast_enabled(hidden.device.type):
        weight = weight.to(hidden.dtype)
    return weight.view_as(weight) if hasattr(weight, "ds_id") else weight


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
    _Place("trl.trainer.utils", "entropy_from_logits", entropy_from_logits),
    _Place("trl.trainer.utils", "_fused_logprob_entropy", selective_log_softmax_and_entropy, needs_triton=True),
)


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
    triton = importlib.import_module("transformers.utils").is_triton_available()  # without it TRL has no such kernel
    modules = [(_find(place), place) for place in _PLACES if triton or not place.needs_triton]
    changed = [replace(module, place.name, place.function) for module, place in modules]
    return Patch(unpatch if any(changed) else None)


def unpatch() -> None:
    """Undo `patch`: restore TRL's functions. Without a patch it does nothing."""
    for place in _PLACES:
        if place.module in sys.modules:
            restore(sys.modules[place.module], place.name)


def computes_with(model: nn.Module) -> str:
    """Return which library computes the log-probabilities in TRL's forward of a model: "xent" or "trl".

    TRL's `add_fused_lm_head` replaces the forward of a model by one that computes log-probabilities from hidden states
    and does not call the head. It looks its kernel up in its own module, where `xent.integrations.trl.patch` installs
    xent's. Return "" if the model's forward is not TRL's.
    """
    for forward in [vars(module).get("forward") for module in model.modules()]:
        while forward is not None:
            names = getattr(forward, "__globals__", {})
            if names.get("__name__") == "trl.trainer.utils":
                module = getattr(names.get("_ChunkedLogProbFunction"), "__module__", "")
                return "xent" if module.startswith("xent.") else "trl"
            forward = getattr(forward, "__wrapped__", None)
    return ""


COMPUTES = {
    "xent": "Its forward is TRL's: where TRL's trainers call it with fused_lm_head=True, xent computes "
    "log-probabilities from hidden states, without logits.",
    "trl": "Its forward is TRL's: where TRL's trainers call it with fused_lm_head=True, kernels of TRL's compute "
    "log-probabilities from hidden states, until you call xent.integrations.trl.patch().",
}
"""Texts for a model whose forward TRL replaced, by the library that computes its log-probabilities."""
WITHOUT_PATCH = (
    "its forward is TRL's, which computes log-probabilities with TRL's kernels until you call "
    "xent.integrations.trl.patch()"
)


def _find(place: _Place) -> Any:
    """Return the module of a place; raise ImportError if it does not have the object, or one with other parameters."""
    try:
        module = importlib.import_module(place.module)
    except ModuleNotFoundError as error:
        raise ImportError(_words(place, f"there is no {error.name}")) from error
    theirs = getattr(module, place.name, None)
    if theirs is None:
        raise ImportError(_words(place, "it has no such name"))
    expected, actual = _parameters(place.function), _parameters(theirs)
    if actual != expected:
        raise ImportError(
            _words(place, f"it takes ({', '.join(actual)}) there, where xent takes ({', '.join(expected)})")
        )
    return module


def _parameters(function: Any) -> list[str]:
    """Return the names of the parameters of a function, or of the `apply` of an autograd function."""
    call: Callable[..., Any] = getattr(function, "forward", None) or getattr(function, "apply", function)
    return [name for name in inspect.signature(call).parameters if name != "ctx"]


def _words(place: _Place, what: str) -> str:
    version = getattr(sys.modules.get("trl"), "__version__", "(not installed)")
    return (
        f"xent.integrations.trl looked for {place.name} in {place.module} of TRL {version}, and {what}. It is "
        "written for TRL 1.16: install that with pip install 'trl==1.16.0', or call xent.linear_log_probs and "
        "xent.linear_divergence in a loss of your own. TRL was left as it was"
    )
