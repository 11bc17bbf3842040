"""The rows of one call on Triton: a `xent.backends.torch.job.Job` whose steps are kernel launches.

Kernels find what is known of a row (target, weight, factor of the gradient) in the caller's own tensors, each for
itself; only the divisor of a mean takes a launch beforehand.
"""

from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.facts import check_targets, divisor_of
from xent.backends.torch.job import STARTERS, Taken, Upstream
from xent.backends.torch.linear_call import Linear
from xent.backends.torch.options import Options
from xent.backends.torch.rows import is_dense, logit_blocks
from xent.backends.torch.schedule import Part
from xent.backends.triton.facts_kernels import divisor_kernel, partition_kernel
from xent.backends.triton.geometry import geometry, rows_of, sizes
from xent.backends.triton.gradient_kernel import gradient_kernel
from xent.backends.triton.launch import cdiv, launch, next_power_of_2
from xent.backends.triton.linear_kernels import scale_kernel, sums_kernel, take_kernel
from xent.backends.triton.machine import multiprocessors
from xent.backends.triton.probabilities_kernel import probabilities_kernel
from xent.backends.triton.rows_kernel import rows_kernel
from xent.backends.triton.tile_kernels import finish_kernel
from xent.backends.triton.tiles import Sums, fold

__all__ = ["TritonJob", "scale"]

_MANY = 1024
_LARGEST_SOFTCAP = 256
_LARGEST_COUNT = 2**24  # programs that a float32 can count


class TritonJob:
    """See `xent.backends.torch.job.Job`."""

    def __init__(
        self, options: Options, vocabulary: int, dtype: torch.dtype, shift: int, upstream: Upstream | None, narrow: bool
    ) -> None:
        self.spec = spec = options.spec
        self.vocabulary, self.shift, self.options = vocabulary, shift, options
        target = options.target
        self.device = target.device
        self._given = target.is_floating_point()
        if not self._given:
            check_targets(options, vocabulary, shift)
        shape = target.shape[:-1] if self._given else target.shape
        self.count = shape.numel()
        self.length = shape[-1] if shape else 1
        self.target = None if self._given else target if target.is_contiguous() else target.contiguous()
        weight = options.sample_weight
        self.sample_weight = None if weight is None else weight.contiguous()
        self.class_weight = None if options.weight is None else options.weight.float().contiguous()
        self._total_weight = None if self.class_weight is None else self.class_weight.sum()
        self._upstream = None if upstream is None or upstream.loss is None else upstream.loss.reshape(-1)
        self._mean = spec.reduction == "mean" or narrow
        self._order: Tensor | None = None
        names = spec.stats
        self._all_rows = bool(names)
        self._counted = self._empty((), torch.int64) if "count" in names or "accuracy" in names else None
        needed = spec.reduction != "none" or narrow or self._counted is not None
        self.scratch = self._divisor(narrow) if needed else None
        self.deferred = self.scratch[2] if narrow and self.scratch is not None else None
        self._results: dict[str, Tensor | None] = {}

    def _empty(self, shape: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    @property
    def _rows(self) -> tuple[int, ...]:
        """What kernels are told of the rows."""
        return self.count, self.length, self.shift, self.spec.ignore_index, self.vocabulary

    @property
    def _numbers(self) -> tuple[float, ...]:
        spec = self.spec
        smoothing = spec.label_smoothing
        return 1 - smoothing, smoothing / self.vocabulary, spec.z_loss, spec.softcap or 0.0, spec.logit_scale

    @property
    def _bend(self) -> dict[str, bool]:
        return {"CAPPED": self.spec.softcap is not None, "SCALED": self.spec.logit_scale != 1}

    def _divisor(self, narrow: bool) -> Tensor:
        """Return D, 1 / D, what a narrow gradient lacks, and how many programs are done."""
        scratch = self._empty(4)
        number, normalizer = divisor_of(self.options)
        mean = self.spec.reduction == "mean"
        launch(
            divisor_kernel,
            1,
            (
                self.target,
                self.sample_weight,
                self.class_weight,
                normalizer if mean else None,
                scratch,
                self._counted,
                0.0 if number is None else float(number),
                *self._rows,
            ),
            {
                "SHIFTED": self.shift > 0,
                "MEAN": mean,
                "NUMBER": mean and number is not None,
                "NARROW": narrow,
                "PROBABILITIES": self._given,
                "BLOCK": min(next_power_of_2(max(self.count, 16)), 4096),
            },
            num_warps=4 if self.count <= 1024 else 16,
        )
        return scratch

    def partition(self, several: bool) -> tuple[Tensor | None, int | Tensor]:
        """Put the rows to compute first."""
        on_host = self.device.type == "cpu"
        if not self.count or not (on_host or (several and not torch.cuda.is_current_stream_capturing())):
            return None, self.count
        order, number = self._empty(self.count, torch.int64), self._empty((), torch.int64)
        launch(
            partition_kernel,
            max(min(cdiv(self.count, 1024), 64), 1),
            (
                self.target,
                self.sample_weight,
                self.class_weight,
                order,
                number,
                *self._rows,
            ),
            {"SHIFTED": self.shift > 0, "ALL_ROWS": self._all_rows, "COUNTED": 8192, "BLOCK": 1024},
            num_warps=8,
        )
        if on_host and int(number) == self.count:
            return None, self.count
        self._order = order
        return order, int(number) if on_host else number

    def learn(self, number: int) -> None:
        """Take rows as they come where all are computed."""
        if number == self.count:
            self._order = None

    def _result(self, name: str, wanted: bool, dtype: torch.dtype = torch.float32) -> Tensor | None:
        """Return memory for one result of each row; zeros where rows may be left out."""
        if name not in self._results:
            made = None
            if wanted:
                zeros = self._order is not None
                made = (
                    torch.zeros(self.count, dtype=dtype, device=self.device)
                    if zeros
                    else self._empty(self.count, dtype)
                )
                if zeros and name == "predictions":
                    made.fill_(-1)
            self._results[name] = made
        return self._results[name]

    def _per_row(self) -> tuple[Tensor | None, ...]:
        names = self.spec.stats
        return (
            self._result("lse", "lse" in names),
            self._result("nll", "nll" in names),
            self._result("entropy", "entropy" in names),
            self._result("predictions", "predictions" in names, torch.int64),
            self._result("hits", "accuracy" in names),
            self._result("z_term", "z_loss" in names),
        )

    def logits(self, logits: Tensor, grad: Tensor | None, norm: Tensor | None) -> None:
        """Take all rows of (..., V) logits."""
        place = geometry(logits, grad)
        if place is not None:
            self._launch_rows(logits, grad, place, self.count, 0, None, norm, alone=True)
            return
        for start, block, out in logit_blocks(logits, grad):
            found = geometry(block, out)
            assert found is not None
            self._launch_rows(block, out, found, len(block), start, None, norm, alone=False)

    def chunk(self, logits: Tensor, part: Part, grad: Tensor | None, target_logits: Tensor | None) -> None:
        """Take the rows of a part."""
        place = geometry(logits, grad)
        assert place is not None
        self._launch_rows(logits, grad, place, len(logits), part.start, target_logits, None, alone=False)

    def _launch_rows(
        self,
        logits: Tensor,
        grad: Tensor | None,
        place: Any,
        programs: int,
        start: int,
        target_logits: Tensor | None,
        norm: Tensor | None,
        alone: bool,
    ) -> None:
        spec, upstream = self.spec, self._upstream
        loss = self._result("loss", True)
        lse, nll, entropy, predictions, hits, z_term = self._per_row()
        if self._given:
            self._launch_probabilities(logits, grad, place, programs, start)
            return
        reduced = alone and spec.reduction != "none" and 0 < programs < _LARGEST_COUNT and upstream is None
        total = self._results.setdefault("total", self._empty(())) if reduced else None
        if not programs:
            return
        half = logits.itemsize == 2
        size = sizes(self.vocabulary, logits.itemsize, place, predictions is not None or hits is not None)
        smoothed, capped, scaled = spec.label_smoothing != 0, spec.softcap is not None, spec.logit_scale != 1
        launch(
            rows_kernel,
            programs,
            (
                logits,
                *place.logits,
                place.skew,
                grad,
                *place.grad,
                None if not self._is_ordered(alone) else self._order,
                start,
                self.target,
                self.sample_weight,
                self.class_weight,
                self._total_weight if smoothed else None,
                target_logits,
                upstream,
                0 if upstream is None or upstream.numel() == 1 else upstream.stride(0),
                self.scratch,
                loss,
                norm,
                lse,
                nll,
                entropy,
                predictions,
                hits,
                z_term,
                total,
                *self._rows,
                *self._numbers,
            ),
            {
                "SHIFTED": self.shift > 0,
                "MEAN": self._mean,
                "REDUCED": reduced,
                "ALL_ROWS": self._all_rows,
                **place.constants(),
                "EXACT": not half,
                "QUICK": self._is_quick(half),
                "FOLDS": half and not capped and not scaled,
                "SMOOTHED": smoothed,
                "Z_LOSS": spec.z_loss != 0,
                "CAPPED": capped,
                "SCALED": scaled,
                **size.constants(),
            },
            **size.options,
        )

    def _is_quick(self, half: bool) -> bool:
        """Whether the softcap may be off by its 10^7th part: among many classes, and where it bends."""
        cap = self.spec.softcap
        return half and self.vocabulary >= _MANY and (cap is None or cap <= _LARGEST_SOFTCAP)

    def _is_ordered(self, alone: bool) -> bool:
        return not alone and self._order is not None

    def _launch_probabilities(self, logits: Tensor, grad: Tensor | None, place: Any, programs: int, start: int) -> None:
        given = self.options.target
        rows = rows_of(given)
        if rows is None:
            given = given.contiguous()
            rows = rows_of(given)
        assert rows is not None
        upstream, (_, length, shift, _, vocabulary) = self._upstream, self._rows
        lse, nll, entropy, predictions, hits, z_term = self._per_row()
        if programs:
            launch(
                probabilities_kernel,
                programs,
                (
                    logits,
                    *place.logits,
                    grad,
                    *place.grad,
                    self._order,
                    start,
                    given,
                    *rows,
                    given.stride(-1),
                    self.sample_weight,
                    self.class_weight,
                    upstream,
                    0 if upstream is None or upstream.numel() == 1 else upstream.stride(0),
                    self.scratch,
                    self._result("loss", True),
                    lse,
                    nll,
                    entropy,
                    predictions,
                    hits,
                    z_term,
                    self.count,
                    length,
                    shift,
                    vocabulary,
                    *self._numbers,
                ),
                {
                    "SHIFTED": shift > 0,
                    "GROUPED": place.grouped or rows[0] < self.count,
                    "MEAN": self._mean,
                    "ALL_ROWS": self._all_rows,
                    **self._bend,
                    "BLOCK": min(next_power_of_2(self.vocabulary), 1024),
                },
                num_warps=4,
            )

    def gradient(self, logits: Tensor, grad: Tensor, norm: Tensor | None, entropy: Tensor | None) -> None:
        """Write the gradient of all rows of (..., V) logits, from their norm where there is one."""
        if self._given or norm is None:
            self.logits(logits, grad, None)
            return
        place = geometry(logits, grad)
        blocks: Any = [(0, logits, grad)] if place is not None else logit_blocks(logits, grad)
        for start, block, out in blocks:
            found = place or geometry(block, out)
            assert found is not None
            rows = block.shape[:-1].numel()
            if rows:
                self._launch_gradient(block, out, found, rows, start, norm)

    def _launch_gradient(self, logits: Tensor, grad: Tensor, place: Any, rows: int, start: int, norm: Tensor) -> None:
        spec, upstream, half = self.spec, self._upstream, logits.itemsize == 2
        assert upstream is not None
        block = max(min(next_power_of_2(self.vocabulary), 16384 // logits.itemsize), 2 * place.vector)
        spare = place.vector - 1 if place.skewed else 0
        launch(
            gradient_kernel,
            rows * cdiv(self.vocabulary + spare, block),
            (
                logits,
                *place.logits,
                place.skew,
                grad,
                *place.grad,
                start,
                self.target,
                self.sample_weight,
                self.class_weight,
                self._total_weight if spec.label_smoothing else None,
                upstream,
                0 if upstream.numel() == 1 else upstream.stride(0),
                self.scratch,
                norm,
                *self._rows,
                *self._numbers,
            ),
            {
                "SHIFTED": self.shift > 0,
                "MEAN": self._mean,
                **place.constants(),
                "EXACT": not half,
                "QUICK": self._is_quick(half),
                "SMOOTHED": spec.label_smoothing != 0,
                "Z_LOSS": spec.z_loss != 0,
                **self._bend,
                "BLOCK": block,
            },
            num_warps=max(min(block * logits.itemsize // 2048, 8), 1),
        )

    def take(self, linear: Linear, part: Part) -> Taken:
        """Return the hidden states of a part, and its target logits."""
        rows, width = part.stop - part.start, linear.hidden.shape[1]
        target_logits = None if self._given else self._empty(rows)
        trained = torch.empty(rows, width, dtype=linear.compute, device=self.device)
        if not self._all_rows or (self.sample_weight is None and not self._mean):
            self._launch_take(linear, part, target_logits, trained)
            return Taken(trained, trained, target_logits)
        # Rows without a gradient have statistics.
        if linear.needs[1]:
            self._launch_take(linear, part, None, trained)
        if target_logits is not None:
            self._launch_take(linear, part, target_logits, None)
        taken = linear.hidden[part.start : part.stop] if part.rows is None else linear.hidden[part.rows]
        return Taken(taken.to(linear.compute), trained, target_logits)

    def _launch_take(
        self,
        linear: Linear,
        part: Part,
        target_logits: Tensor | None,
        taken: Tensor | None,
        classes: Tensor | None = None,
    ) -> None:
        rows, (hidden, weight, bias) = (
            part.stop - part.start,
            (linear.hidden, linear.classifier, linear.classifier_bias),
        )
        if not rows:
            return
        launch(
            take_kernel,
            rows,
            (
                hidden,
                *hidden.stride(),
                weight,
                *weight.stride(),
                bias,
                0 if bias is None else bias.stride(0),
                taken,
                target_logits,
                classes,
                self._order,
                part.start,
                self.target,
                self.sample_weight,
                self.class_weight,
                self.scratch,
                *self._rows,
                hidden.shape[1],
            ),
            {
                "SHIFTED": self.shift > 0,
                "MEAN": self._mean,
                "BLOCK": min(next_power_of_2(max(hidden.shape[1], 1)), 2048),
            },
            num_warps=4,
        )

    def tiles(self, linear: Linear) -> bool:
        """Find the results of all rows without storing their logits; False for class probabilities."""
        if self._given:
            return False
        self._result("loss", True)
        self._per_row()
        if self.count:
            target_logits, classes = self._empty(self.count), self._empty(self.count, torch.int32)
            self._launch_take(linear, Part(0, self.count, None, True), target_logits, None, classes)
            sums = fold(linear, self.spec, classes, self.class_weight)
            self._launch_finish(sums, target_logits)
        return True

    def _launch_finish(self, sums: Sums, target_logits: Tensor) -> None:
        spec = self.spec
        launch(
            finish_kernel,
            cdiv(self.count, 256),
            (
                *sums,
                target_logits,
                self.target,
                self.sample_weight,
                self.class_weight,
                self.scratch,
                self._result("loss", True),
                *self._per_row(),
                *self._rows,
                *self._numbers,
            ),
            {"SHIFTED": self.shift > 0, "MEAN": self._mean, **self._bend, "Z_LOSS": spec.z_loss != 0, "BLOCK": 256},
            num_warps=4,
        )

    def finish(self) -> tuple[Tensor, list[Tensor]]:
        """Return the loss and the statistics."""
        spec, results = self.spec, self._results
        loss = self._result("loss", True)
        assert loss is not None
        self._per_row()
        each_row = spec.reduction == "none"
        total = loss if each_row else results.get("total")
        missing = total is None
        names = spec.stats
        total_z = self._empty(()) if "z_loss" in names and not each_row else None
        accuracy = self._empty(()) if "accuracy" in names else None
        if total is None:
            total = self._empty(())
        if missing or total_z is not None or accuracy is not None:
            launch(
                sums_kernel,
                1,
                (
                    loss,
                    results.get("z_term"),
                    results.get("hits"),
                    self.scratch if spec.reduction == "mean" else None,
                    self._counted,
                    total if missing else None,
                    total_z,
                    accuracy,
                    self.count,
                ),
                {"BLOCK": 4096},
                num_warps=16,
            )
        found: dict[str, Any] = {
            **results,
            "z_loss": results.get("z_term") if each_row else total_z,
            "accuracy": accuracy,
            "count": self._counted,
        }
        return total, [found[name] for name in names]


def scale(grad: Tensor, upstream: Tensor, deferred: Tensor | None, inplace: bool) -> Tensor:
    """Return a gradient times 0-d factors, rounded once; with `inplace` in its own memory."""
    if not is_dense(grad):
        factor = upstream if deferred is None else upstream * deferred
        product = (grad.float() * factor).to(grad.dtype)
        return grad.copy_(product) if inplace else product
    out = grad if inplace else torch.empty_like(grad)
    count = grad.numel()
    if count:
        launch(
            scale_kernel,
            max(min(cdiv(count, 4096), 4 * multiprocessors(grad.device)), 1),
            (grad, out, upstream, deferred, count),
            {"INPLACE": inplace, "BLOCK": 4096},
            num_warps=8,
        )
    return out


STARTERS["triton"] = TritonJob, scale
