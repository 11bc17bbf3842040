"""The loop of a divergence over chunks of rows: compute the logits of both sides, then the gradient in their place."""

import torch
from torch import Tensor

from xent.backends.torch.divergence.call import Divergence
from xent.backends.torch.divergence.facts import RowFacts, TopK, gather_facts, gather_top_k
from xent.backends.torch.divergence.steps import OVERLAYS, STEPS
from xent.backends.torch.facts import accumulation_dtype
from xent.backends.torch.gradients import Gradients
from xent.backends.torch.linear_call import Linear
from xent.backends.torch.product_sum import rounds_sums
from xent.backends.torch.rows import Rows
from xent.backends.torch.schedule import Part, Schedule
from xent.core.chunks import rows_per_block, rows_per_chunk

__all__ = ["backward", "empty_gradients", "forward", "linear_of"]

_WORKSPACE, _WORKSPACE_TOP_K = 1280 * 2**20, 800 * 2**20  # bytes, on an accelerator
_WORKSPACE_CPU = 128 * 2**20
_FEWEST_ROWS = 256


def forward(call: Divergence) -> tuple[Tensor, Tensor | None, list[Tensor], Tensor | None]:
    """Return the loss, the deferred factor of gradients, the gradients of a reduced loss, and the entropy (N,).

    Gradients and entropy are computed only if they are needed.
    """
    run = _Run(call, None)
    gradients = run.chunks(call.makes_gradient_first and any(call.needs))
    loss = run.loss
    if call.reduction != "none":
        loss = loss.sum()
        if run.divisor is not None:
            loss = torch.where(run.divisor == 0, 0, loss / run.divisor)
    return loss, run.deferred, gradients, run.entropy


def backward(upstream: Tensor, call: Divergence) -> list[Tensor]:
    """Return the gradients for `upstream`, the gradient of the rows' losses or of the reduced loss."""
    return _Run(call, upstream).chunks(True)


def empty_gradients(call: Divergence) -> list[Tensor]:
    """Return three empty tensors, for the gradients of student, weight and bias."""
    like = call.student if call.weight is None else call.weight
    return [call.student.new_empty(0), like.new_empty(0), (like if call.bias is None else call.bias).new_empty(0)]


class _Run:
    """The computation of the rows of one call. For its schedule it is the job."""

    def __init__(self, call: Divergence, upstream: Tensor | None) -> None:
        self.call = call
        self.top_k = gather_top_k(call)
        self.facts, self.divisor, self.deferred = gather_facts(call, upstream, self.top_k)
        self.count = call.rows.numel()
        self.loss = torch.zeros(self.count, dtype=call.accumulation, device=call.student.device)
        self.entropy = torch.zeros_like(self.loss) if call.entropy and upstream is None else None

    def partition(self, several: bool) -> tuple[Tensor | None, int | Tensor]:
        """Move the rows to compute to the front: see `xent.backends.torch.job.Job.partition`."""
        idle = self.facts.idle
        if idle is None:
            return None, self.count
        if idle.device.type == "cpu":
            return idle.argsort(stable=True), int((~idle).sum())
        linear = self.call.weight is not None or (self.call.teacher_weight is not None and not self.call.tail)
        if not several or not linear or idle.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return None, self.count
        return idle.argsort(stable=True), (~idle).sum()

    def learn(self, number: int) -> None:
        """Do nothing: each part contains its row indices."""

    def chunks(self, wanted: bool) -> list[Tensor]:
        """Compute all rows, and if `wanted` the gradients that are needed."""
        call, device = self.call, self.call.student.device
        student = _Stored(call.student, call.vocabulary) if call.weight is None else _Classifier(linear_of(call))
        teacher = self._teacher()
        schedule = Schedule(self, self._step(student, teacher, wanted))
        rows = max(min(schedule.step, schedule.count), 0)
        student.make_room(rows)
        if not isinstance(teacher, TopK):
            teacher.make_room(rows)
        place: _GradientOfLogits | _GradientOfClassifier | None = None
        if wanted and call.weight is None:
            place = _GradientOfLogits(call)
        elif wanted:
            assert isinstance(student, _Classifier)
            place = _GradientOfClassifier(call, linear_of(call).padded, schedule, student.room)
        steps = STEPS[call.kernel]
        for part in schedule:
            facts = self.facts.of(part.indices)
            z = student.block(part)
            known = teacher.of(part.indices) if isinstance(teacher, TopK) else teacher.block(part)
            loss = torch.empty(part.stop - part.start, dtype=call.accumulation, device=device)
            grad = None if place is None else place.memory(part, z)
            entropy = None if self.entropy is None else torch.empty_like(loss)
            steps(call, z, known, facts, loss, grad, entropy)
            part.put(loss, self.loss)
            if self.entropy is not None and entropy is not None:
                part.put(entropy, self.entropy)
            if place is not None:
                place.add(part, student, facts)
        return empty_gradients(call) if place is None else place.result()

    def _teacher(self) -> "_Stored | _Classifier | TopK":
        call = self.call
        if self.top_k is not None:
            return self.top_k
        if call.teacher_weight is None:
            return _Stored(call.teacher, call.vocabulary)
        arrays = (call.teacher.detach(), call.teacher_weight.detach(), call.teacher_bias)
        return _Classifier(Linear(*arrays, 0, None, call.teacher_weight.dtype, (False, False, False)))

    def _step(self, student: "_Stored | _Classifier", teacher: "_Stored | _Classifier | TopK", wanted: bool) -> int:
        """Return the number of rows of a chunk."""
        call, device = self.call, self.call.student.device.type
        size = student.bytes_per_row + (0 if isinstance(teacher, TopK) else teacher.bytes_per_row)
        if call.weight is not None and wanted and call.compute.itemsize == 2 and not _overlays(call):
            size += call.vocabulary * 2
        if not size:  # all logits are in memory already
            most = rows_per_block(call.vocabulary, call.accumulation.itemsize, device, torch.get_num_threads())
            return (
                most if device == "cpu" or student.copies or getattr(teacher, "copies", False) else max(self.count, 1)
            )
        accelerator = _WORKSPACE_TOP_K if isinstance(teacher, TopK) else _WORKSPACE
        default = max(_WORKSPACE_CPU if device == "cpu" else accelerator, _FEWEST_ROWS * size)
        workspace = call.workspace or default
        sums = (
            call.needs[1]
            and call.weight is not None
            and rounds_sums(call.compute, call.weight.dtype, call.weight.device)
        )
        return rows_per_chunk(self.count, size, 1, workspace, device, sums)


class _Stored:
    """Logits (..., V) in memory."""

    bytes_per_row = 0

    def __init__(self, logits: Tensor, vocabulary: int) -> None:
        self._rows = Rows(logits)
        self.copies = vocabulary > 1 and logits.stride(-1) != 1
        """Whether a block is a copy, because the classes of a row are not contiguous."""

    def make_room(self, rows: int) -> None:
        """Do nothing: no memory is needed."""

    def block(self, part: Part) -> Tensor:
        found = self._rows.block(part.start, part.stop) if part.rows is None else self._rows.take(part.rows)
        return found.contiguous() if self.copies else found


class _Classifier:
    """Logits (R, V) of hidden states and a classifier, float32 or float64. Each chunk overwrites the one before."""

    copies = False

    def __init__(self, linear: Linear) -> None:
        self._linear, self._padded = linear, linear.padded
        self._vocabulary, self._wide = len(linear.weight), accumulation_dtype(linear.compute)
        self.bytes_per_row = linear.columns * self._wide.itemsize

    def make_room(self, rows: int) -> None:
        """Allocate memory for `rows` rows."""
        linear = self._linear
        self.room = torch.empty(rows, linear.columns, dtype=self._wide, device=linear.weight.device)

    def hidden(self, part: Part) -> Tensor:
        """Return the hidden states (R, D) of a part in the compute dtype."""
        return self._linear.hidden[part.indices].to(self._linear.compute)

    def block(self, part: Part) -> Tensor:
        """Return the logits (R, V) of a part; the next part overwrites them."""
        hidden, out = self.hidden(part), self.room[: part.stop - part.start]
        self._padded.write_logits(hidden, out)
        return out[:, : self._vocabulary]


class _GradientOfLogits:
    """The gradient of logits in memory."""

    def __init__(self, call: Divergence) -> None:
        self._call = call
        shape = (call.rows.numel(), call.vocabulary)
        self._all = torch.empty(shape, dtype=call.student.dtype, device=call.student.device)
        self._seen = 0

    def memory(self, part: Part, z: Tensor) -> Tensor:
        if part.rows is None:
            return self._all[part.start : part.stop]
        if not self._seen:
            self._all.zero_()
        self._block = torch.empty(z.shape, dtype=self._all.dtype, device=z.device)
        return self._block

    def add(self, part: Part, student: "_Stored | _Classifier", facts: RowFacts) -> None:
        self._seen += part.stop - part.start
        if part.rows is not None:
            part.put(self._block, self._all)

    def result(self) -> list[Tensor]:
        if not self._seen:
            self._all.zero_()
        made = empty_gradients(self._call)
        made[0] = self._all.view(self._call.student.shape)
        return made


class _GradientOfClassifier:
    """The gradients of hidden states, classifier and bias, accumulated over chunks.

    The gradient of a chunk's logits is in their memory if the backend can write it there.
    """

    def __init__(self, call: Divergence, padded: Linear, schedule: Schedule, room: Tensor) -> None:
        """`room` (R, columns) is the memory of the student's logits."""
        self._call = call
        self._gradients = Gradients(padded, schedule)
        self._memory = room  # (R, columns), of the gradient
        self._overlays = False
        if call.compute == room.dtype:
            return
        self._overlays = _overlays(call)
        if self._overlays:
            self._memory = room.view(call.compute)[:, padded.columns :]
        else:
            self._memory = torch.empty(room.shape, dtype=call.compute, device=room.device)
            self._memory[:, call.vocabulary :] = 0

    def memory(self, part: Part, z: Tensor) -> Tensor:
        return self._memory[: len(z), : self._call.vocabulary]

    def add(self, part: Part, student: "_Stored | _Classifier", facts: RowFacts) -> None:
        assert isinstance(student, _Classifier)
        grad, vocabulary = self._memory[: part.stop - part.start], self._call.vocabulary
        hidden = student.hidden(part)
        if facts.dead is not None:
            hidden = hidden.masked_fill(facts.dead[:, None], 0)  # dead rows may hold NaN
        if grad.shape[1] > vocabulary and (self._overlays or facts.dead is not None):
            grad[:, vocabulary:] = 0
        self._gradients.add(part, hidden, grad)

    def result(self) -> list[Tensor]:
        return self._gradients.result(self._call.vocabulary)


def _overlays(call: Divergence) -> bool:
    """Return whether a chunk's 16-bit gradient is written over the float32 logits.

    Not on CPUs: oneDNN's product of odd rows in bfloat16 multiplies what follows a row by 0, which is NaN for NaN.
    """
    return call.kernel in OVERLAYS and call.student.is_cuda


def linear_of(call: Divergence) -> Linear:
    """Return hidden states and classifier of the student."""
    assert call.weight is not None
    return Linear(call.student, call.weight, call.bias, 0, call.workspace, call.compute, call.needs)
