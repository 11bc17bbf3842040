"""Every message of docs/errors.md is raised by a public call, here or in the test that `ELSEWHERE` names."""

import re
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import xent
from tests.divergence.test_errors import BOTH as OF_DIVERGENCES
from tests.divergence.test_errors import VALUES as TEACHERS
from tests.divergence.test_subset import ERRORS as SUBSETS
from tests.packaging.test_errors_page import QUOTES
from tests.packaging.tree import ROOT
from tests.test_errors import CLASSES, CLASSIFIER, HIDDEN, LOGITS, OF_FUNCTION
from tests.test_heads import WRONG as HEADS
from xent.backends import TABLE
from xent.backends.torch import planned

dispatch = sys.modules[xent.backends.__module__]
"""The module that selects a backend."""

_PLACE = re.compile(r"\.\.\.|\b[A-Z]+\b(?:-1)?|-?\d+")
"""A placeholder of a value, or a number."""

Z, Y = torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.int64)
X, W = torch.zeros(2, 3, 4), torch.zeros(5, 4)


def loss(logits: Any = Z, target: Any = Y, **options: Any) -> Any:
    return xent.cross_entropy(logits, target, **options)


def linear(input: Any = X, weight: Any = W, target: Any = Y, **options: Any) -> Any:
    return xent.linear_cross_entropy(input, weight, target, **options)


def log_p(**options: Any) -> Any:
    return xent.log_probs(Z, Y, **options)


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

    name, framework, native_to, missing = "unready", "torch", ("cpu",), "the moon is full"


def passed_over() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "TABLE", {("unready", "torch"): Unready} | TABLE)
        patch.setattr(dispatch, "_warned", set())
        return first_loss()


def unserved() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "TABLE", {("unready", "torch"): Unready})
        return first_loss()


def first_loss() -> Any:
    """Call the loss as if for the first time: a later call with the same signature keeps its backend."""
    planned.clear()
    try:
        return loss()
    finally:
        planned.clear()


def one_rank(call: Callable[[Any], Any]) -> Any:
    """Call a function with a group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return call(dist.group.WORLD)
    finally:
        dist.destroy_process_group()


RAISED: dict[str, tuple[Callable[[], Any], ...]] = {
    "all arrays of a call must be of one framework: ...": (lambda: loss(target=np.zeros((2, 3), int)),),
    "all tensors of a call must be on one device: ...": (lambda: loss(target=Y.to("meta")),),
    "NAME must be a dense tensor, ...": (lambda: loss(Z.to_sparse()),),
    "NAME must have the dtype of ..., outside of torch.autocast": (lambda: linear(weight=W.double()),),
    "NAME requires a gradient, which xent does not compute: pass NAME.detach()": (
        lambda: loss(weight=torch.ones(5, requires_grad=True)),
        lambda: loss(sample_weight=torch.ones(2, 3, requires_grad=True)),
        lambda: loss(normalizer=torch.tensor(3.0, requires_grad=True)),
        lambda: loss(z_loss=torch.tensor(0.1, requires_grad=True)),
        lambda: linear(X.expand(2, 2, 3, 4), sample_weight=torch.ones(2, 3, requires_grad=True), shift=(1, 2)),
        lambda: loss(softcap=torch.tensor(3.0, requires_grad=True)),
        lambda: log_p(temperature=torch.ones(2, 3, requires_grad=True)),
    ),
    "inplace=True needs logits whose elements do not share memory": (
        lambda: loss(torch.zeros(1, 1, 5).expand(2, 3, 5).requires_grad_(), inplace=True),
    ),
    "inplace=True cannot be used under torch.func transforms": (
        lambda: torch.func.grad(lambda z: loss(z, inplace=True))(Z),
    ),
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
    "... requires a gradient, which a quantized classifier does not get": (
        "torch/test_quantized.py",
        "linear_weight requires a gradient, which a quantized classifier",
    ),
    "a QuantizedRows does not go through torch.compile, torch.export, transforms and modes": (
        "torch/test_quantized.py",
        "a QuantizedRows does not go through torch.compile",
    ),
    "the teacher of a xent.Subset must have a classifier whose rows can be selected, got a QuantizedRows": (
        "torch/test_quantized.py",
        "classifier whose rows can be selected, got a QuantizedRows",
    ),
    "vocab_parallel must be None for a QuantizedRows": (
        "torch/test_quantized.py",
        "vocab_parallel must be None for a QuantizedRows",
    ),
    "the rows of a 4-bit classifier must consist of whole blocks of N elements, got N elements": (
        "integrations/test_quantized.py",
        "must consist of whole blocks of 64 elements, got 96",
    ),
    "the weight of this ... is not quantized yet: ...": (
        "integrations/test_quantized.py",
        "the weight of this Linear4bit is not quantized yet",
    ),
    "module must compute a sum of products of hidden states with weights, and ... does not: ...": (
        "integrations/test_peft.py",
        "module must compute a sum of products",
    ),
    "training this MODEL ...: REASON Its head is a ...": ("integrations/test_peft.py", "Its head"),
    "teacher.ids[I] is N; the teacher's classes are 0 to V-1": (
        "divergence/test_subset.py",
        "the teacher's classes are",
    ),
    "teacher.ids of a xent.Subset must hold a class at most once": (
        "divergence/test_subset.py",
        "teacher.ids of a xent.Subset must hold a class at most once",
    ),
    "NAME must be a plain tensor, got a ...": ("distributed/test_dtensors.py", "must be a plain tensor, got a DTen"),
    "all ranks must make the same call: ...": ("distributed/test_agreement.py", "all ranks must make the same call"),
    "NAME of rank I differs from that of rank 0, first in row I": (
        "distributed/test_ranks.py",
        "differs from that of rank 0, first in row",
    ),
    "the number of tokens differs between ranks: it is ...": (
        "distributed/test_agreement.py",
        "the number of tokens differs between ranks: it is 5 on rank 0",
    ),
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
    "the logits of a patched model reached an operation that xent cannot follow, ...": (
        "integrations/test_deferred.py",
        "a patched model reached an operation that xent cannot follow",
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
    "xent.integrations.trl looked for ... The model was patched": (
        "integrations/test_axolotl.py",
        "The model was patched",
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
    "this compiled training step": ("integrations/test_explain.py", "this compiled training step takes the memory"),
    "takes the memory of its logits, as without xent: REASON": (
        "integrations/test_explain.py",
        "takes the memory of its logits, as without xent: ",
    ),
    "a Metal kernel of xent does not run on this GPU: ...": (
        "metal/test_limits.py",
        "a Metal kernel of xent does not run on this GPU",
    ),
    "the check has passed, but this cannot be remembered ...": ("metal/test_tensors.py", "this cannot be remembered"),
}
"""Messages that need another framework, library or device -> (a test that expects them, words of it)."""


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


def of_tables() -> list[str]:
    """Return the messages of the calls that tests of all frameworks expect to raise an error."""
    sources = {"input": HIDDEN, "linear_weight": CLASSIFIER}
    calls = []
    for function, every in OF_FUNCTION.items():
        arrays = (sources if "linear" in function else {"logits": LOGITS}) | {"target": CLASSES}
        calls += [partial(getattr(xent, function), **(arrays | bad)) for bad, _, _ in every]
    given = {"logits": LOGITS, "teacher": LOGITS}
    calls += [partial(xent.divergence, **(given | bad)) for bad, _, _ in OF_DIVERGENCES]
    calls += [partial(xent.divergence, LOGITS, teacher) for teacher, _, _ in TEACHERS]
    calls += [partial(xent.divergence, np.zeros((2, 3, 4)), subset) for subset, _, _ in SUBSETS.values()]
    heads = sources | {"input": np.zeros((2, 2, 3, 4)), "target": CLASSES, "shift": (1, 2)}
    calls += [partial(xent.linear_cross_entropy, **(heads | bad)) for bad, _, _ in HEADS]
    return list(map(messages, calls))


def test_no_message_is_left_out() -> None:
    covered, texts = {*RAISED, *ELSEWHERE}, of_tables()
    left = sorted({quote for quote in QUOTES if " " in quote} - covered)
    assert [quote for quote in left if not any(matches(quote, text) for text in texts)] == []
    assert sorted(covered - {*QUOTES}) == []
