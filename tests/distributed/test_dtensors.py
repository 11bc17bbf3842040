"""DTensors: they are recognised by their placements, and gradients have matching ones. FSDP2 on a 2-D mesh."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import xent
from tests.distributed.fsdp import averages, whole
from tests.distributed.planted import replace_collective
from tests.distributed.pool import GPUS, PROCESSES, Pool, device

CLASSES, WIDTH = 11, 8

pytestmark = pytest.mark.skipif(PROCESSES < 4, reason="a mesh of two dimensions takes four processes")


def run(name: str) -> None:
    """Run one of the checks in this process."""
    torch.manual_seed(0)
    CHECKS[name]()


def tensors() -> dict[str, Tensor]:
    """Return the whole arrays of a call, the same in all processes."""
    generator = torch.Generator().manual_seed(0)
    drawn = {
        "logits": torch.randn(4, 6, CLASSES, generator=generator),
        "input": torch.randn(4, 6, WIDTH, generator=generator),
        "linear_weight": torch.randn(CLASSES, WIDTH, generator=generator),
        "linear_bias": torch.randn(CLASSES, generator=generator),
        "weight": torch.rand(CLASSES, generator=generator),
        "sample_weight": torch.rand(4, 6, generator=generator),
        "probabilities": torch.rand(4, 6, CLASSES, generator=generator).softmax(-1),
        "target": torch.randint(CLASSES, (4, 6), generator=generator),
    }
    drawn["target"][0, :2] = -100
    return {name: value.to(device()) for name, value in drawn.items()}


def flat() -> DeviceMesh:
    return init_device_mesh(device().type, (4,), mesh_dim_names=("tp",))


def square() -> DeviceMesh:
    return init_device_mesh(device().type, (2, 2), mesh_dim_names=("dp", "tp"))


def put(value: Tensor, mesh: DeviceMesh, *placements: Any) -> DTensor:
    return distribute_tensor(value.detach().clone(), mesh, placements).requires_grad_(value.is_floating_point())


def close(found: Sequence[Any], expected: Sequence[Any]) -> None:
    """Compare tensors, of which some may be DTensors."""
    torch.testing.assert_close([*map(whole, found)], [*map(whole, expected)], rtol=1e-5, atol=1e-6)


def placements_of_gradients(leaf: DTensor) -> Any:
    """Return the placements that autograd gives the gradient of a leaf: PyTorch 2.8 replicates uneven shards."""
    leaf = leaf.detach().requires_grad_()
    leaf.to_local().sum().backward()
    return leaf.grad.placements


def _logits() -> None:
    """Logits with sharded classes. The target is plain or a DTensor."""
    given, mesh = tensors(), flat()
    for reduction in ("mean", "none"):
        for name in ("target", "probabilities"):
            options = {"reduction": reduction, "label_smoothing": 0.1, "stats": ("lse", "accuracy", "count")}
            logits = given["logits"].clone().requires_grad_()
            more = {"weight": given["weight"]}
            if name == "target":
                more["sample_weight"] = given["sample_weight"]
            expected, stats = xent.cross_entropy(logits, given[name], **options, **more)
            upstream = torch.rand_like(expected)
            expected.backward(upstream)
            for placed in (False, True):
                parts = put(given["logits"], mesh, Shard(2))
                target = given[name]
                if placed:
                    target = put(target, mesh, Shard(2) if name == "probabilities" else Replicate()).detach()
                found, seen = xent.cross_entropy(parts, target, **options, **more)
                assert isinstance(found, DTensor) == isinstance(seen.lse, DTensor) == placed
                close([found, seen.lse, seen.accuracy], [expected, stats.lse, stats.accuracy])
                found.backward(put(upstream, mesh, Replicate()).detach() if placed else upstream)
                assert parts.grad.placements == placements_of_gradients(parts)
                close([parts.grad], [logits.grad])


def _divergences() -> None:
    """Student and teacher with sharded classes: logits, hidden states and top-k classes."""
    given, mesh = tensors(), flat()
    generator = torch.Generator().manual_seed(1)
    taught, head = torch.randn(4, 6, 5, generator=generator), torch.randn(CLASSES, 5, generator=generator)
    ids = torch.stack([torch.randperm(CLASSES, generator=generator)[:3] for _ in range(24)]).view(4, 6, 3)
    log_probs = torch.full((4, 6, 3), -1.5)
    taught, head, ids, log_probs = (one.to(device()) for one in (taught, head, ids, log_probs))
    z, kinds = taught @ head.t(), {"kind": "tv", "stats": ("entropy",)}
    plain: dict[str, Any] = {
        "logits": z,
        "linear": xent.LinearTeacher(taught, head),
        "top k": xent.TopKTeacher(ids, log_probs),
    }
    cut: dict[str, Any] = {
        "logits": put(z, mesh, Shard(2)).detach(),
        "linear": xent.LinearTeacher(taught, put(head, mesh, Shard(0))),
        "top k": xent.TopKTeacher(ids, log_probs),
    }
    for name, teacher in cut.items():
        leaves = [given[one].clone().requires_grad_() for one in ("input", "linear_weight", "linear_bias")]
        expected, stats = xent.linear_divergence(*leaves[:2], plain[name], linear_bias=leaves[2], **kinds)
        expected.backward()
        weight, bias = (put(given[one], mesh, Shard(0)) for one in ("linear_weight", "linear_bias"))
        hidden = given["input"].clone().requires_grad_()
        found, seen = xent.linear_divergence(hidden, weight, teacher, linear_bias=bias, **kinds)
        assert isinstance(found, DTensor) == (name == "logits")
        close([found, seen.entropy], [expected, stats.entropy])
        found.backward()
        close([one.grad for one in (hidden, weight, bias)], [leaf.grad for leaf in leaves])
        logits = put(given["logits"], mesh, Shard(2))
        expected = xent.divergence(given["logits"], plain[name])
        close([xent.divergence(logits, teacher)], [expected])
    with pytest.raises(ValueError, match=r"weight of the teacher must be cut like the student, .* got torch array"):
        xent.divergence(logits, plain["linear"])
    with pytest.raises(ValueError, match=r"weight of the teacher must be cut like the student, .* got placements"):
        xent.divergence(logits, xent.LinearTeacher(taught, put(head, mesh, Replicate())))
    with pytest.raises(ValueError, match=r"a xent.Subset does not go with vocab_parallel"):
        xent.divergence(logits, xent.Subset(z, torch.arange(CLASSES, device=device())))


def _divergence_of_rows_in_shards() -> None:
    given, mesh = tensors(), square()
    z = given["logits"].flip(0)
    for reduction in ("sum", "none"):
        expected = xent.divergence(given["logits"], z, reduction=reduction)
        logits = put(given["logits"], mesh, Shard(0), Shard(2))
        found = xent.divergence(logits, put(z, mesh, Shard(0), Shard(2)).detach(), reduction=reduction)
        close([found], [expected])
    with pytest.raises(ValueError, match="a mean over rows in shards needs normalizer="):
        xent.divergence(logits, put(z, mesh, Shard(0), Shard(2)).detach())


def _padded_logits() -> None:
    given, mesh = tensors(), flat()
    size = CLASSES - 2
    target = given["target"].clamp(max=size - 1)
    logits = given["logits"][..., :size].clone().requires_grad_()
    expected = xent.cross_entropy(logits, target)
    expected.backward()
    parts = put(given["logits"], mesh, Shard(2))
    found = xent.cross_entropy(parts, target, vocab_parallel=xent.VocabParallel(mesh, size=size))
    found.backward()
    close([found], [expected])
    close([whole(parts.grad)[..., :size]], [logits.grad])
    assert not whole(parts.grad)[..., size:].any()


def _rows_too() -> None:
    """Rows sharded over one dimension of the mesh, classes over the other."""
    given, mesh = tensors(), square()
    for reduction, normalizer in (("sum", None), ("mean", 7.0), ("none", None)):
        options = {"reduction": reduction, "normalizer": normalizer, "z_loss": 0.1, "stats": ("nll", "z_loss", "count")}
        logits = given["logits"].clone().requires_grad_()
        expected, stats = xent.cross_entropy(logits, given["target"], **options)
        upstream = torch.rand_like(expected)
        expected.backward(upstream)
        parts = put(given["logits"], mesh, Shard(0), Shard(2))
        target = put(given["target"], mesh, Shard(0), Replicate())
        found, seen = xent.cross_entropy(parts, target, **options)
        each = reduction == "none"
        assert found.placements == (Shard(0) if each else Partial(), Replicate())
        close([found, seen.nll, seen.z_loss], [expected, stats.nll, stats.z_loss])
        assert whole(seen.count) == stats.count
        found.backward(put(upstream, mesh, Shard(0) if each else Replicate(), Replicate()).detach())
        assert parts.grad.placements == placements_of_gradients(parts)
        close([parts.grad], [logits.grad])


def _classifiers() -> None:
    """Run calls with a classifier with sharded rows, and hidden states that are plain, replicated or sharded."""
    given, mesh = tensors(), flat()
    leaves = [given[name].clone().requires_grad_() for name in ("input", "linear_weight", "linear_bias")]
    for reduction in ("mean", "none"):
        options = {"weight": given["weight"], "shift": 1, "reduction": reduction}
        expected = xent.linear_cross_entropy(*leaves[:2], given["target"], linear_bias=leaves[2], **options)
        upstream = torch.rand_like(expected)
        wanted = torch.autograd.grad(expected, leaves, upstream)
        for how in (None, Replicate(), Shard(0), Shard(1)):
            source = leaves[0] if how is None else put(given["input"], mesh, how)
            head = [put(given[name], mesh, Shard(0)) for name in ("linear_weight", "linear_bias")]
            found = xent.linear_cross_entropy(source, head[0], given["target"], linear_bias=head[1], **options)
            assert not isinstance(found, DTensor)
            close([found], [expected])
            made = torch.autograd.grad(found, (source, *head), upstream)
            if how is not None:
                assert made[0].placements == (Partial() if how == Replicate() else how,)
            assert made[1].placements == made[2].placements == (Shard(0),)
            close(made, wanted)


def _log_probs() -> None:
    given, mesh = tensors(), flat()
    source, head = given["input"].clone().requires_grad_(), given["linear_weight"].clone().requires_grad_()
    options = {"temperature": given["sample_weight"] + 0.5, "entropy": True}
    expected = xent.linear_log_probs(source, head, given["target"], **options)
    wanted = torch.autograd.grad(sum(part.square().sum() for part in expected), (source, head))
    parts = put(given["input"], mesh, Shard(1)), put(given["linear_weight"], mesh, Shard(0))
    found = xent.linear_log_probs(*parts, given["target"], **options)
    made = torch.autograd.grad(sum(part.square().sum() for part in found), parts)
    close((*found, *made), (*expected, *wanted))
    logits = put(given["logits"], mesh, Shard(2))
    close([xent.log_probs(logits, given["target"])], [xent.log_probs(given["logits"], given["target"])])


def _rows_of_hidden_states() -> None:
    """Hidden states with rows sharded over one dimension; a classifier sharded over the other, where it is Partial."""
    given, mesh = tensors(), square()
    leaves = [given[name].clone().requires_grad_() for name in ("input", "linear_weight")]
    expected = xent.linear_cross_entropy(*leaves, given["target"], reduction="sum")
    wanted = torch.autograd.grad(expected, leaves)
    for how in (Replicate(), Shard(1)):
        parts = put(given["input"], mesh, Shard(0), how), put(given["linear_weight"], mesh, Replicate(), Shard(0))
        target = put(given["target"], mesh, Shard(0), Replicate())
        found = xent.linear_cross_entropy(*parts, target, reduction="sum")
        close([found], [expected])
        made = torch.autograd.grad(
            found, parts, put(torch.ones_like(expected), mesh, Replicate(), Replicate()).detach()
        )
        assert made[0].placements == (Shard(0), Partial() if how == Replicate() else how)
        assert made[1].placements == (Partial(), Shard(0))
        close(made, wanted)


def _compiled() -> None:
    given, mesh = tensors(), flat()
    source, head = put(given["input"], mesh, Replicate()), put(given["linear_weight"], mesh, Shard(0))
    expected = xent.linear_cross_entropy(source, head, given["target"])
    wanted = torch.autograd.grad(expected, (source, head))
    compiled = torch.compile(xent.linear_cross_entropy, fullgraph=True, backend="aot_eager")
    found = compiled(source, head, given["target"])
    made = torch.autograd.grad(found, (source, head))
    for one, other in zip((found, *made), (expected, *wanted), strict=True):
        torch.testing.assert_close(whole(one), whole(other), rtol=0, atol=0)


def _refusals() -> None:
    given, mesh, two = tensors(), flat(), square()
    logits, head = put(given["logits"], mesh, Shard(2)), put(given["linear_weight"], mesh, Shard(0))
    rows = put(given["logits"], two, Shard(0), Shard(2))
    placed = put(given["target"], two, Shard(0), Replicate())
    target, hidden = given["target"], given["input"]
    bad: list[tuple[Any, str]] = [
        (
            lambda: xent.cross_entropy(put(given["logits"], mesh, Replicate()), target),
            "must be a plain tensor, got a DTen",
        ),
        (
            lambda: xent.cross_entropy(put(given["logits"], two, Shard(2), Shard(2)), target),
            "on several dimensions of its",
        ),
        (
            lambda: xent.cross_entropy(rows, target),
            "target must be a DTensor like .* on the dimension 'dp' of the mesh",
        ),
        (lambda: xent.cross_entropy(rows, placed), "a mean over rows in shards needs normalizer="),
        (
            lambda: xent.cross_entropy(rows, placed, reduction="sum", stats=("accuracy",)),
            "accuracy is a mean over rows",
        ),
        (
            lambda: xent.cross_entropy(logits, target, weight=given["weight"][:3]),
            "weight must have all 11 classes where",
        ),
        (lambda: xent.cross_entropy(logits, target, vocab_parallel=two["tp"]), "say themselves where their shards are"),
        (
            lambda: xent.linear_cross_entropy(hidden, head, target, linear_bias=given["linear_bias"]),
            "linear_bias must have",
        ),
        (
            lambda: xent.linear_cross_entropy(hidden, put(given["linear_weight"], two, Replicate(), Shard(0)), target),
            "input must be a DTensor on the mesh of linear_weight, whose dimension 'dp' may have other rows",
        ),
        (
            lambda: xent.linear_cross_entropy(hidden, put(given["linear_weight"], two, Shard(1), Shard(0)), target),
            "dimension 'tp' of its mesh has the classes in shards, and dimension 'dp' must have it whole",
        ),
        (
            lambda: xent.linear_cross_entropy(put(hidden, mesh, Shard(2)), head, target),
            "input must have its last axis whole",
        ),
        (
            lambda: xent.linear_cross_entropy(
                put(hidden, two, Shard(1), Replicate()),
                put(given["linear_weight"], two, Replicate(), Shard(0)),
                put(target, two, Shard(1), Replicate()),
                reduction="sum",
                shift=1,
            ),
            "shift=1 needs the last axis of the rows whole",
        ),
    ]
    for call, message in bad:
        with pytest.raises((ValueError, TypeError), match=message):
            call()


class Model(nn.Module):
    """An embedding, a layer with a norm, and a classifier, which returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.layer = nn.LayerNorm(WIDTH)
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, tokens: Tensor, normalizer: Tensor) -> Tensor:
        hidden = self.norm(torch.tanh(self.layer(self.embedding(tokens))))
        loss: Tensor = xent.linear_cross_entropy(hidden, self.head.weight, tokens, shift=1, normalizer=normalizer)
        return loss


def train(model: nn.Module, mine: slice, processes: int) -> dict[str, Tensor]:
    """Return the weights after a few steps on some rows of each batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        tokens = torch.randint(CLASSES, (4, 8), generator=generator).to(device())
        (model(tokens[mine], torch.tensor(28.0, device=device())) * processes).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: whole(value).detach() for name, value in model.state_dict().items()}


def _training(tokens_in_shards: bool) -> None:
    torch.manual_seed(0)
    expected = train(Model().to(device()), slice(None), 1)
    torch.manual_seed(0)
    model, mesh = Model().to(device()), square()
    plan: dict[str, Any] = {"head": ColwiseParallel()}
    if tokens_in_shards:
        plan["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        plan |= {"layer": SequenceParallel(use_local_output=True), "norm": SequenceParallel()}
    parallelize_module(model, mesh["tp"], plan)
    for part in (model.layer, model):
        fully_shard(part, mesh=mesh["dp"])
    with pytest.raises(ValueError, match="where FSDP2 has it in pieces, make the call in the forward of"):
        xent.linear_cross_entropy(torch.zeros(4, WIDTH), model.head.weight, torch.zeros(4, dtype=torch.int64))
    rank = mesh.get_local_rank("dp")
    found = train(model, slice(2 * rank, 2 * rank + 2), 2 if averages(mesh["dp"]) else 1)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


class Headless(nn.Module):
    """A model whose loss is computed by its caller."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.lm_head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(x))


def _fsdp_alone() -> None:
    """Refuse a classifier in an FSDP2 group where tokens differ; `unshard()` of it or of the model helps."""
    mesh, rank = flat(), flat().get_local_rank()
    torch.manual_seed(0)
    plain, head = Headless().to(device()), torch.randn(CLASSES, 5)
    model = Headless().to(device())
    model.load_state_dict(plain.state_dict())
    fully_shard(model.lm_head, mesh=mesh)
    fully_shard(model, mesh=mesh)
    x, others = torch.randn(PROCESSES, 6, WIDTH).to(device()), torch.randn(PROCESSES, 6, 5).to(device())
    ids = torch.stack([torch.randperm(CLASSES)[:3] for _ in range(6 * PROCESSES)]).view(PROCESSES, 6, 3).to(device())
    log_probs, logits = torch.full((6, 3), -1.5, device=device()), torch.randn(PROCESSES, 6, CLASSES).to(device())
    taught = put(head.to(device()), mesh, Shard(0)).detach()
    calls: dict[str, Any] = {
        "target": lambda h, w: xent.linear_cross_entropy(h, w, ids[rank, :, 0]),
        "probabilities": lambda h, w: xent.linear_cross_entropy(h, w, logits[rank].softmax(-1)),
        "teacher's logits": lambda h, w: xent.linear_divergence(h, w, logits[rank]),
        "linear teacher": lambda h, w: xent.linear_divergence(h, w, xent.LinearTeacher(others[rank], taught)),
        "top k": lambda h, w: xent.linear_divergence(h, w, xent.TopKTeacher(ids[rank], log_probs)),
        "log probs": lambda h, w: xent.linear_log_probs(h, w, ids[rank, :, 0]),
    }
    message = r"rank \d: input of rank 1, 2, 3 differs from that of rank 0, first in row 0.*model\.lm_head\.unshard\(\)"
    for call in calls.values():
        with pytest.raises(ValueError, match=message):
            call(model(x[rank]), model.lm_head.weight)
    some = slice(6 - rank)
    with pytest.raises(ValueError, match=r"it is 6 on rank 0, 5 on rank 1, 4 on rank 2, 3 on rank 3\. With data"):
        xent.linear_cross_entropy(model(x[rank, some]), model.lm_head.weight, ids[rank, some, 0])
    factor, targets = 4 if averages(mesh) else 1, ids[..., 0]
    sum(xent.linear_cross_entropy(plain(x[r]), plain.lm_head.weight, targets[r]) for r in range(4)).backward()
    for gathered in ("head", "model"):
        model = Headless().to(device())
        model.load_state_dict(plain.state_dict())
        if gathered == "head":
            fully_shard(model.lm_head, mesh=mesh)
        fully_shard(model, mesh=mesh)
        hidden = model(x[rank])
        (model.lm_head if gathered == "head" else model).unshard()
        loss = xent.linear_cross_entropy(hidden, model.lm_head.weight, targets[rank])
        close([loss], [xent.linear_cross_entropy(plain(x[rank]), plain.lm_head.weight, targets[rank])])
        loss.backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            close([one.grad * factor], [other.grad])


def _exchanges() -> None:
    """Compare the tokens of a call with a classifier over ranks, unless the caller says that they are the same."""
    given, mesh = tensors(), flat()
    head, hidden, step = put(given["linear_weight"], mesh, Shard(0)), given["input"], -(-CLASSES // 4)
    expected = xent.linear_cross_entropy(hidden, given["linear_weight"], given["target"])
    first = min(step * mesh.get_local_rank(), CLASSES)
    for size, compares in ((None, True), (CLASSES, False)):
        sent: list[torch.dtype] = []

        def make(function: Any, sent: list[torch.dtype] = sent) -> Any:
            def gather(out: Tensor, values: Tensor, **more: Any) -> Any:
                sent.append(values.dtype)
                return function(out, values, **more)

            return gather

        shards = xent.VocabParallel(mesh, first=first, size=size)
        with pytest.MonkeyPatch.context() as patch:
            replace_collective(patch, "gather", make)
            found = xent.linear_cross_entropy(hidden, head, given["target"], vocab_parallel=shards)
        close([found], [expected])
        assert sent == [torch.int64] * (compares + (not GPUS)) + [torch.float32]  # on CPUs the rows to compute too
    shards = xent.VocabParallel(mesh, first=first + 1)
    with pytest.raises(ValueError, match=f"or with first={first} too if the tokens are known to be the same"):
        xent.linear_cross_entropy(hidden, head, given["target"], vocab_parallel=shards)


def _fsdp() -> None:
    _training(False)


def _fsdp_with_tokens_in_shards() -> None:
    _training(True)


CHECKS = {
    check.__name__.strip("_"): check
    for check in (
        _logits,
        _divergences,
        _divergence_of_rows_in_shards,
        _padded_logits,
        _rows_too,
        _classifiers,
        _log_probs,
        _rows_of_hidden_states,
        _compiled,
        _refusals,
        _exchanges,
        _fsdp_alone,
        _fsdp,
        _fsdp_with_tokens_in_shards,
    )
}


@pytest.mark.parametrize("name", CHECKS)
def test_dtensors(pool: Pool, name: str) -> None:
    pool.run(run, name)
