"""Every message of docs/errors.md is raised by a public call, here or in the test that `ELSEWHERE` names."""

import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import xent
from tests.packaging.test_errors_page import QUOTES
from tests.packaging.tree import ROOT
from xent.backends import TABLE

dispatch = sys.modules[xent.backends.__module__]
"""The module that selects a backend."""

_PLACE = re.compile(r"\.\.\.|\b[A-Z]+\b(?:-1)?|-?\d+")
"""A placeholder of a value, or a number."""

Z, Y = torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.int64)
X, W = torch.zeros(2, 3, 4), torch.zeros(5, 4)
HEADS = torch.zeros(2, 2, 3, 4)
TOP_K_ARRAYS = torch.zeros(2, 3, 1, dtype=torch.int64), torch.zeros(2, 3, 1)
TOP_K = xent.TopKTeacher(*TOP_K_ARRAYS)


def loss(logits: Any = Z, target: Any = Y, **options: Any) -> Any:
    return xent.cross_entropy(logits, target, **options)


def linear(input: Any = X, weight: Any = W, target: Any = Y, **options: Any) -> Any:
    return xent.linear_cross_entropy(input, weight, target, **options)


def log_p(**options: Any) -> Any:
    return xent.log_probs(Z, Y, **options)


def support(ids: list[int], offsets: list[int]) -> Any:
    return log_p(support=xent.Support(torch.tensor(ids), torch.tensor(offsets)))


def top_k(ids: list[int], log_probs: list[float]) -> Any:
    shape = (2, 3, len(ids))
    teacher = xent.TopKTeacher(torch.tensor(ids).expand(shape), torch.tensor(log_probs).expand(shape))
    return xent.divergence(Z, teacher)


def subset(ids: list[int]) -> Any:
    return xent.divergence(Z, xent.Subset(torch.zeros(2, 3, 9), torch.tensor(ids)))


def leaf() -> Tensor:
    return torch.randn(2, 3, 5, requires_grad=True)


def second_derivative() -> Any:
    z = leaf()
    (gradient,) = torch.autograd.grad(loss(z), z, create_graph=True)
    return torch.autograd.grad(gradient.sum(), z)


def traced() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(loss, (Z, Y))


class Unready:
    """A backend that is native to CPUs and cannot run."""

    name, framework, native_to = "unready", "torch", ("cpu",)

    def missing(self) -> str:
        return "the moon is full"


def passed_over() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "TABLE", {"unready": Unready} | TABLE)
        patch.setattr(dispatch, "_warned", set())
        return loss()


def unserved() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "TABLE", {"unready": Unready})
        return loss()


def one_rank(call: Callable[[Any], Any]) -> Any:
    """Call a function with a group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return call(dist.group.WORLD)
    finally:
        dist.destroy_process_group()


RAISED: dict[str, tuple[Callable[[], Any], ...]] = {
    "NAME must be a torch, MLX or NumPy array, got ...": (lambda: loss([1.0]), lambda: loss(target=None)),
    "all arrays of a call must be of one framework: ...": (lambda: loss(target=np.zeros((2, 3), int)),),
    "all tensors of a call must be on one device: ...": (lambda: loss(target=Y.to("meta")),),
    "NAME must be a dense tensor, ...": (lambda: loss(Z.to_sparse()),),
    "NAME must be a plain array, got a ..., whose mask would be ignored": (
        lambda: xent.cross_entropy(np.ma.masked_array(np.zeros((2, 5))), np.zeros(2, int)),
    ),
    "NAME must have one of the dtypes ...": (lambda: loss(Z.long()), lambda: linear(X.long())),
    "NAME must have the dtype of ..., outside of torch.autocast": (lambda: linear(weight=W.double()),),
    "target must hold class indices (...) or class probabilities (...), got dtype ...": (
        lambda: loss(target=Y.bool()),
    ),
    "NAME requires a gradient, which xent does not compute: pass NAME.detach()": (
        lambda: loss(weight=torch.ones(5, requires_grad=True)),
        lambda: loss(sample_weight=torch.ones(2, 3, requires_grad=True)),
        lambda: loss(softcap=torch.tensor(3.0, requires_grad=True)),
        lambda: log_p(temperature=torch.ones(2, 3, requires_grad=True)),
    ),
    "target of class indices must have shape ...; if the classes are on axis 1, pass axis=1": (
        lambda: loss(target=torch.zeros(2, 5, dtype=torch.int64)),
    ),
    "target of class probabilities (dtype ...) must have shape ...; class indices need an integer dtype": (
        lambda: loss(target=torch.zeros(2, 3)),
    ),
    "... must have shape (V, D) with D = ...": (
        lambda: linear(weight=W.t()),
        lambda: xent.linear_divergence(X, W, xent.LinearTeacher(X, W.t())),
    ),
    "... must have shape (V,), the rows of ...": (
        lambda: linear(linear_bias=torch.zeros(4)),
        lambda: xent.linear_divergence(X, W, xent.LinearTeacher(X, W, torch.zeros(4))),
    ),
    "weight must have shape (V,), one per class": (lambda: loss(weight=torch.ones(4)),),
    "sample_weight must have shape ..., one per row": (lambda: loss(sample_weight=torch.ones(3, 2)),),
    "shift=K needs a sequence axis": (lambda: linear(torch.zeros(4), W, torch.tensor(0), shift=1),),
    "shift=(...) needs input of shape (H, ..., T, D)": (
        lambda: linear(torch.zeros(4), W, torch.tensor(0), shift=(1, 2)),
    ),
    "there must be at least one class, got 0": (lambda: loss(Z[..., :0]),),
    "OPTION must be ..., got ...": (
        lambda: loss(label_smoothing=1.5),
        lambda: loss(z_loss=-1.0),
        lambda: loss(softcap=0.0),
        lambda: loss(logit_scale=float("nan")),
        lambda: loss(reduction="avg"),
        lambda: log_p(temperature=0.0),
        lambda: xent.divergence(Z, Z, beta=2.0),
    ),
    "normalizer would be ignored with reduction=...": (lambda: loss(normalizer=3, reduction="sum"),),
    "head_weight needs a tuple as shift": (lambda: linear(head_weight=(1.0,)),),
    "head_weight would be ignored with reduction='none'": (
        lambda: linear(HEADS, shift=(0, 1), head_weight=(1.0, 0.5), reduction="none"),
    ),
    "stats must be names from ...": (lambda: loss(stats=("perplexity",)), lambda: log_p(stats=("entropy",))),
    "inplace=True needs logits whose elements do not share memory": (
        lambda: loss(torch.zeros(1, 1, 5).expand(2, 3, 5).requires_grad_(), inplace=True),
    ),
    "inplace=True cannot be used under torch.func transforms": (
        lambda: torch.func.grad(lambda z: loss(z, inplace=True))(Z),
    ),
    "beta must be 0 with kind='tv'": (lambda: xent.divergence(Z, Z, kind="tv", beta=0.5),),
    "teacher.tail must be 'bucket' or 'renormalize' with kind='tv'": (
        lambda: xent.divergence(Z, xent.TopKTeacher(*TOP_K_ARRAYS, tail="drop"), kind="tv"),
    ),
    "beta must be 0 with a TopKTeacher": (lambda: xent.divergence(Z, TOP_K, beta=0.5),),
    "vocab_parallel needs PyTorch tensors": (
        lambda: one_rank(lambda group: xent.cross_entropy(np.zeros((2, 5)), np.zeros(2, int), vocab_parallel=group)),
    ),
    "vocab_parallel must be ...": (lambda: loss(vocab_parallel=3),),
    "the shards leave a gap: ...": (
        lambda: one_rank(lambda group: linear(vocab_parallel=xent.VocabParallel(group, size=6))),
    ),
    "target[I] is N; classes are 0 to V-1, or ignore_index=-100": (
        lambda: loss(target=Y + 7),
        lambda: linear(target=Y - 3),
    ),
    "temperature must be > 0 in every row, got T at I": (lambda: log_p(temperature=torch.zeros(2, 3)),),
    "support.offsets must be non-decreasing from 0 to M, the number of ids; got ...": (
        lambda: support([0] * 6, [0, 2, 1, 3, 4, 5, 6]),
    ),
    "support.ids[I] is N; classes are 0 to V-1": (lambda: support([0, 1, 9, 0, 0, 0], list(range(7))),),
    "support.ids must hold a class at most once in a row": (
        lambda: support([1, 1, 0, 0, 0, 0], [0, 2, 3, 4, 5, 6, 6]),
    ),
    "teacher.ids of a xent.Subset must have shape (V,)": (lambda: subset([0, 1]),),
    "a xent.Subset of a TopKTeacher is not possible": (lambda: xent.divergence(Z, xent.Subset(TOP_K, Y)),),
    "teacher.ids[I] is N; the teacher's classes are 0 to V-1": (lambda: subset([0, 1, 2, 3, 9]),),
    "teacher.ids of a xent.Subset must hold a class at most once": (lambda: subset([0, 1, 2, 3, 0]),),
    "teacher.ids ... holds a class more than once": (lambda: top_k([1, 1], [-2.0, -2.0]),),
    "teacher.log_probs ... have a mass of ..., more than 1 by more than rounding": (lambda: top_k([1, 2], [0.0, 0.0]),),
    "unknown ...: it must be 'auto' or one of ...": (lambda: loss(backend="cuda"),),
    "backend 'NAME' takes ... arrays and got ... arrays: use backend ...": (lambda: loss(backend="numpy"),),
    "backend 'NAME' cannot serve this call: REASON": (
        lambda: xent.cross_entropy(np.zeros((2, 5)), np.zeros(2, int), inplace=True, backend="numpy"),
    ),
    "no backend can serve this call on ... arrays: ...": (unserved,),
    "xent computes no second derivatives: ...": (second_derivative,),
    "NAME carries a tangent, and xent computes no forward-mode derivatives": (
        lambda: torch.func.jvp(loss, (Z,), (Z,)),
        lambda: torch.func.jvp(lambda z: xent.divergence(z, Z), (Z,), (Z,)),
    ),
    "NAME is batched by torch.vmap, ...": (lambda: torch.vmap(lambda z, y: loss(z, y))(Z, Y),),
    "NAME is traced by torch.func.functionalize, ...": (lambda: torch.func.functionalize(loss)(leaf()),),
    "torch.jit.trace cannot record xent's functions": (traced,),
    "another backend computes this call, since xent does not use its ... backend, the fastest on ...: REASON": (
        passed_over,
    ),
}
ELSEWHERE = {
    "NAME must be a plain tensor, got a ...": ("distributed/test_dtensors.py", "must be a plain tensor, got a DTen"),
    "all ranks must make the same call: ...": ("distributed/test_agreement.py", "all ranks must make the same call"),
    "a xent.Subset does not go with vocab_parallel": (
        "distributed/test_divergences.py",
        "a xent.Subset does not go with vocab_parallel",
    ),
    "... student and teacher must be cut alike": (
        "distributed/test_divergences.py",
        "student and teacher must be cut alike",
    ),
    "NAME of the teacher must be cut like the student": (
        "distributed/test_dtensors.py",
        "weight of the teacher must be cut like the student",
    ),
    "mx.vmap cannot vectorise xent ...": ("mlx/test_transforms.py", "mx.vmap cannot vectorise xent"),
    "the head of MODEL cannot be patched: ...": ("integrations/test_patching.py", "cannot be patched: "),
    "model must be a transformers model with a language-model head, ...": (
        "integrations/test_patching.py",
        "got Sequential, which has no get_output_embeddings",
    ),
    "these logits were never computed, and cannot be computed now: ...": (
        "integrations/test_stale.py",
        "never computed, and cannot be computed now: ",
    ),
    "labels must hold one class for each of the ... rows of logits, ...": (
        "integrations/test_models.py",
        "each of the 24 rows of logits, got shape",
    ),
    "xent.integrations.transformers needs transformers 5, found ...": (
        "integrations/test_patching.py",
        "needs transformers 5, found",
    ),
    "xent.integrations.trl looked for ... of TRL ..., and ...": (
        "integrations/test_trl.py",
        "looked for _ChunkedLogProbFunction in",
    ),
    "dist_process_group must be None, or a group of one process, ...": (
        "integrations/test_verl.py",
        "dist_process_group must be None",
    ),
    "LoRA wraps ...": ("mlx/test_mlx_lm.py", "LoRA wraps"),
    "... does more to its logits than a scale and a softcap": (
        "mlx/test_mlx_lm.py",
        "does more to its logits than",
    ),
    "training this MODEL takes the memory of its logits, as without xent: REASON": (
        "integrations/test_explain.py",
        "takes the memory of its logits, as without xent: ",
    ),
    "this compiled training step takes the memory of its logits, as without xent: REASON": (
        "integrations/test_explain.py",
        "this compiled training step takes the memory",
    ),
    "a Metal kernel of xent does not run on this GPU, and ... operations take its place: ...": (
        "metal/test_limits.py",
        "a Metal kernel of xent does not run on this GPU",
    ),
    "the check has passed, but this cannot be remembered ...": ("metal/test_tensors.py", "this cannot be remembered"),
}
"""Messages that need another framework, library or device -> (a test that expects them, words of it)."""

NOWHERE = {
    "the logits of a patched model reached an operation that xent cannot follow, ...",
}
"""Messages that no test raises yet."""


def matches(quote: str, text: str) -> bool:
    """Whether a message has all words of a quote, in its order."""
    pattern = ".*".join(re.escape(part) for part in _PLACE.split(quote))
    return re.search(pattern, " ".join(text.split()), re.DOTALL) is not None


def messages(call: Callable[[], Any]) -> str:
    """Return the error or the warnings of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call()
        except Exception as error:
            return str(error)
    return "\n".join(str(one.message) for one in caught)


@pytest.mark.parametrize(
    ("quote", "call"),
    [pytest.param(q, call, id=f"{q} {n}") for q, calls in RAISED.items() for n, call in enumerate(calls)],
)
def test_message_is_raised_by_a_public_call(quote: str, call: Callable[[], Any]) -> None:
    text = messages(call)
    assert matches(quote, text), text


@pytest.mark.parametrize("quote", ELSEWHERE)
def test_message_is_expected_by_another_test(quote: str) -> None:
    file, words = ELSEWHERE[quote]
    assert words in (ROOT / "tests" / file).read_text(encoding="utf-8").replace("\\", "")


def test_no_message_is_left_out() -> None:
    covered = {*RAISED, *ELSEWHERE, *NOWHERE}
    assert sorted({quote for quote in QUOTES if " " in quote} - covered) == []
    assert sorted(covered - {*QUOTES}) == []
