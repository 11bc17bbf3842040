"""Calls that are repeated from a recording: the same bits as calls that are not, whatever differs between the calls."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import xent
from tests.calls import as_on_cuda
from tests.targets import Target
from tests.triton.noted import note_launches
from xent.backends.torch import devices, facts, options, replay
from xent.backends.torch.divergence import facts as divergence_facts
from xent.backends.torch.host_number import HostNumber
from xent.backends.torch.recorder import Recording
from xent.backends.triton.job import TritonJob

N, V, D = 6, 72, 16
LOSSES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "options": {"softcap": 5.0, "z_loss": 0.1, "label_smoothing": 0.2, "logit_scale": 0.7},
    "weights": {"weight": V, "sample_weight": N, "normalizer": ()},
    "statistics": {"stats": ("lse", "accuracy", "entropy", "count")},
    "none, statistics": {"reduction": "none", "stats": ("nll", "entropy", "predictions")},
}


@pytest.fixture(autouse=True)
def recordings(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """Return the kinds of calls. The host looks neither at targets nor at the number of rows, as on a GPU."""
    for module in (facts, options, divergence_facts, replay):
        monkeypatch.setattr(module, "looks_at_targets", lambda device: False)
    partition = TritonJob.partition

    def as_on_a_gpu(self: TritonJob, several: bool) -> Any:
        return partition(self, several) if several else (None, self.count)

    monkeypatch.setattr(TritonJob, "partition", as_on_a_gpu)
    return replay._kinds


def recorded(kinds: dict[Any, Any]) -> int:
    return sum(isinstance(found, Recording) for found in kinds.values())


def draw(target: Target, seed: int, wanted: dict[str, Any], rows: int = N, vocabulary: int = V) -> tuple[Any, ...]:
    """Return logits, target and options with tensors in the place of shapes."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=generator).to(target.device)
    classes = torch.randint(vocabulary, (rows,), generator=generator).to(target.device)
    classes[seed % rows] = -100
    made: dict[str, Any] = {}
    for name, value in wanted.items():
        is_shape = name in ("weight", "sample_weight", "normalizer", "temperature")
        shape = (value,) if isinstance(value, int) else value
        made[name] = (torch.rand(shape, generator=generator) + 0.5).to(target.device) if is_shape else value
    return logits, classes, made


def results_of(function: Callable[..., Any], given: Tensor, *arguments: Any, **named: Any) -> list[Tensor]:
    """Return all results of a call, and the gradient of what is differentiable of them."""
    leaf = given.detach().requires_grad_()
    made = function(leaf, *arguments, **named)
    loss, stats = made if isinstance(made, tuple) else (made, xent.Stats())
    found = [loss, *(value for value in vars(stats).values() if isinstance(value, Tensor))]
    carried = [value for value in found if value.requires_grad]
    torch.autograd.backward(
        carried, [torch.linspace(1, 2, value.numel()).view(value.shape).to(value) for value in carried]
    )
    assert leaf.grad is not None
    return [value.detach() for value in found] + [leaf.grad]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    """Whether all values, dtypes, shapes and strides are the same, NaN counting as NaN and zeros by their signs."""
    for one, other in zip(found, expected, strict=True):
        if (one.dtype, one.shape, one.stride()) != (other.dtype, other.shape, other.stride()):
            return False
        if not torch.equal(torch.signbit(one) & (one == 0), torch.signbit(other) & (other == 0)):
            return False
        if not torch.equal(one.nan_to_num(1234.5), other.nan_to_num(1234.5)):
            return False
    return True


def alone(call: Callable[[], list[Tensor]]) -> list[Tensor]:
    """Return the results of a call that is not repeated, and leave the recordings as they were."""
    kept = dict(replay._kinds)
    replay.forget()
    found = call()
    replay._kinds.clear()
    replay._kinds.update(kept)
    return found


CALLS = [(name, torch.float32) for name in LOSSES] + [
    (name, dtype) for name in ("plain", "none") for dtype in (torch.bfloat16, torch.float16)
]


@pytest.mark.parametrize(("name", "dtype"), CALLS, ids=str)
def test_repeated_calls_have_the_same_bits(
    target: Target, name: str, dtype: torch.dtype, recordings: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = note_launches(monkeypatch)
    for seed in range(4):
        logits, classes, more = draw(target, seed, LOSSES[name])

        def call() -> list[Tensor]:
            return results_of(xent.cross_entropy, logits.to(dtype), classes, backend="triton", **more)  # noqa: B023

        expected = alone(call)
        launches.clear()
        assert same(call(), expected), seed
        # The scaling of a reduced loss's gradient is not recorded.
        once = "reduction" not in more or more["reduction"] == "sum"
        if seed > 1:
            assert len(launches) == (once and dtype != torch.float16)
    assert recorded(recordings) == 1 + (not once or dtype == torch.float16)


def test_a_validated_call_and_the_next_are_of_one_kind(target: Target, recordings: dict[Any, Any]) -> None:
    for seed in range(2):
        logits, classes, _ = draw(target, seed, {})
        xent.cross_entropy(logits, classes, z_loss=1e-3, backend="triton")
    assert [type(made) for made in recordings.values()] == [Recording]


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("temperature", [0.7, N], ids=["one temperature", "a temperature for each row"])
def test_log_probabilities(target: Target, entropy: bool, temperature: Any, recordings: dict[Any, Any]) -> None:
    for seed in range(4):
        logits, classes, more = draw(target, seed, {"temperature": temperature} if temperature == N else {})
        more.setdefault("temperature", temperature)

        def call() -> list[Tensor]:
            return results_of(xent.log_probs, logits, classes, backend="triton", entropy=entropy, **more)  # noqa: B023

        assert same(call(), alone(call)), seed
    assert recorded(recordings) == 2


@pytest.mark.parametrize("name", ["probabilities", "scale", "support", "in place", "no rows"])
def test_other_calls(target: Target, name: str, recordings: dict[Any, Any]) -> None:
    for seed in range(4):
        logits, classes, _ = draw(target, seed, {})
        more: dict[str, Any] = {"reduction": "none"}
        if name == "probabilities":
            classes = draw(target, seed + 10, {})[0].softmax(-1)
        if name == "scale":
            more = {"logit_scale": torch.tensor(0.5 + seed, device=target.device)}
        if name == "in place":
            more["inplace"] = True
        if name == "no rows":
            logits, classes = logits[:0], classes[:0]
        function = xent.cross_entropy
        if name == "support":
            classes.clamp_(min=0)
            ids = torch.stack([classes, (classes + 1 + seed) % V], 1).flatten()
            offsets = torch.arange(0, 2 * N + 1, 2, device=target.device)
            function, more = xent.log_probs, {"support": xent.Support(ids, offsets)}

        def call() -> list[Tensor]:
            return results_of(function, logits.clone(), classes, backend="triton", **more)  # noqa: B023

        assert same(call(), alone(call)), seed
    assert recorded(recordings) >= 1


@pytest.mark.parametrize(
    "more",
    [{}, {"reduction": "none"}, {"stats": ("lse", "accuracy", "entropy")}, {"workspace": 4 * V}, {"bias": True}],
    ids=str,
)
def test_linear(target: Target, more: dict[str, Any], recordings: dict[Any, Any]) -> None:
    """With several chunks and ignored rows, the host waits for the number of rows, and nothing is recorded."""
    for seed in range(4):
        _, classes, _ = draw(target, seed, {})
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(V, D, generator=generator).to(target.device).requires_grad_()
        hidden = torch.randn(N, D, generator=generator).to(target.device)
        options = dict(more)
        if options.pop("bias", False):
            options["linear_bias"] = torch.randn(V, generator=generator).to(target.device)

        def call() -> list[Tensor]:
            weight.grad = None  # noqa: B023
            found = results_of(xent.linear_cross_entropy, hidden, weight, classes, backend="triton", **options)  # noqa: B023
            return [*found, weight.grad.clone()]  # noqa: B023

        assert same(call(), alone(call)), seed
    assert recorded(recordings) == (0 if "workspace" in more else 1 + (more.get("reduction") == "none"))


def test_chunks_are_repeated_while_all_rows_are_computed(
    target: Target, recordings: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if target.device == "cpu":
        let_numbers_arrive(monkeypatch)
    launches = note_launches(monkeypatch)
    for seed in range(6):
        _, classes, _ = draw(target, seed, {})
        classes.clamp_(min=0)
        if seed == 4:
            classes[2] = -100
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(V, D, generator=generator).to(target.device).requires_grad_()
        hidden = torch.randn(N, D, generator=generator).to(target.device)

        def call() -> list[Tensor]:
            weight.grad = None  # noqa: B023
            found = results_of(xent.linear_cross_entropy, hidden, weight, classes, workspace=8 * V, backend="triton")  # noqa: B023
            return [*found, weight.grad.clone()]  # noqa: B023

        expected = alone(call)
        launches.clear()
        assert same(call(), expected), seed
        # What a recording starts is not noted.
        assert ("rows_kernel" in [name for name, *_ in launches]) == (seed not in (2, 3))
        assert recorded(recordings) == (0 < seed < 4)


def let_numbers_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let jobs partition rows as on a GPU, where the host has to wait for their number."""

    def start(self: HostNumber, number: Tensor) -> None:
        self._on_host, self._event = number.clone(), SimpleNamespace(synchronize=lambda: None)

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(TritonJob, "_empty", lambda self, shape, dtype=torch.float32: torch.empty(shape, dtype=dtype))
    monkeypatch.setattr(TritonJob, "partition", as_on_cuda(TritonJob.partition))
    monkeypatch.setattr(HostNumber, "_start", start)


CHANGES: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor, dict[str, Any]]]] = {
    "rows": lambda logits, classes: (logits[1:], classes[1:], {}),
    "classes": lambda logits, classes: (logits[:, 8:].contiguous(), classes.clamp(max=V - 9), {}),
    "stride": lambda logits, classes: (torch.cat([logits, logits], 1)[:, :V], classes, {}),
    "classes first": lambda logits, classes: (logits.t().contiguous().t(), classes, {}),
    "alignment": lambda logits, classes: (
        torch.cat([logits.flatten()[:1], logits.flatten(), logits.flatten()[:3]])[1:-3].view(N, V),
        classes,
        {},
    ),
    "dtype": lambda logits, classes: (logits.bfloat16(), classes, {}),
    "dtype of targets": lambda logits, classes: (logits, classes.int(), {}),
    "stride of targets": lambda logits, classes: (logits, torch.stack([classes, classes], 1)[:, 0], {}),
    "z_loss": lambda logits, classes: (logits, classes, {"z_loss": 0.3}),
    "softcap": lambda logits, classes: (logits, classes, {"softcap": 2.0}),
    "normalizer": lambda logits, classes: (logits, classes, {"normalizer": 3.0}),
    "ignore_index": lambda logits, classes: (logits, classes, {"ignore_index": int(classes[3])}),
    "statistics": lambda logits, classes: (logits, classes, {"stats": ("lse",)}),
    "reduction": lambda logits, classes: (logits, classes, {"reduction": "sum"}),
    "inplace": lambda logits, classes: (logits.clone(), classes, {"inplace": True}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_kind_of_call_is_not_repeated(target: Target, name: str) -> None:
    for seed in range(3):
        logits, classes, _ = draw(target, seed, {})
        results_of(xent.cross_entropy, logits, classes, backend="triton")
    for seed in range(4):
        logits, classes, more = CHANGES[name](*draw(target, seed, {})[:2])

        def call() -> list[Tensor]:
            given = logits.clone(memory_format=torch.preserve_format) if "inplace" in more else logits  # noqa: B023
            if "inplace" not in more:  # noqa: B023
                return results_of(xent.cross_entropy, given, classes, backend="triton", **more)  # noqa: B023
            leaf = given.requires_grad_()
            loss = xent.cross_entropy(leaf * 1, classes, backend="triton", **more)  # noqa: B023
            loss.backward()
            assert leaf.grad is not None
            return [loss.detach(), leaf.grad]

        assert same(call(), alone(call)), seed


def test_targets_are_looked_at_as_soon_as_it_is_asked(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(3):
        logits, classes, _ = draw(target, seed, {})
        results_of(xent.cross_entropy, logits, classes, backend="triton")
    for module in (facts, options, replay):
        monkeypatch.setattr(module, "looks_at_targets", lambda device: True)
    classes[2] = V
    with pytest.raises(IndexError, match=r"target\[2\] is 72"):
        results_of(xent.cross_entropy, logits, classes, backend="triton")


def test_calls_that_look_at_few_targets_are_not_repeated(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (facts, options, replay):
        monkeypatch.setattr(module, "looks_at_targets", lambda device: True)
    for seed in range(4):
        logits, classes, _ = draw(target, seed, {})
        results_of(xent.cross_entropy, logits, classes, backend="triton")
    classes[2] = V
    with pytest.raises(IndexError, match=r"target\[2\] is 72"):
        results_of(xent.cross_entropy, logits, classes, backend="triton")


def test_memory_that_ends_with_the_logits_is_another_kind(
    target: Target, recordings: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last vector of 16 bytes must not be read as a whole there. PyTorch's CUDA allocator leaves room."""
    monkeypatch.setattr(devices, "_ROUNDS_UP", False)
    logits, classes, _ = draw(target, 0, {}, vocabulary=V - 1)
    roomy = torch.zeros(N * V, device=target.device)[: logits.numel()].view(logits.shape)
    for _ in range(3):
        xent.cross_entropy(roomy, classes, backend="triton")
    assert recorded(recordings) == 1
    exact = logits.clone()
    assert exact.untyped_storage().nbytes() % 16
    launches = note_launches(monkeypatch)
    xent.cross_entropy(exact, classes, backend="triton")
    assert "rows_kernel" in [name for name, *_ in launches]
