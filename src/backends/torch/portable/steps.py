"""`PortableSteps`: the steps of a call's rows in PyTorch's own operations, in blocks that fit into CPU caches.

Sums are packed for the ranks and backward passes that need them. Those of ranks are added in rank order, so that all
ranks get the same bits.

With the sums of `xent.backends.torch.contract` relative to `peak`, the row's gradient factor r, and upstream gradients
u, n, v of lse, nll and entropy H, `finish` computes losses, statistics and coefficients of the gradient::

    own = e^(x_y - peak)      total = rest + own      lse = peak + log total      nll = log(1 + rest / own)
    H   = (rest log total - mixed + own nll) / total
    gamma  = r w'_y + n             excess = r sum_{c != y} w'_c + 2 r zeta lse + u - v H         beta = -v / total
    alpha = (gamma + excess + v log total) / total
    at_target = (own excess - rest gamma - v own log p_y) / total

w'_c is the share of a class in the loss, for class indices w_c ((1-e) [c==y] + e/V). For class probabilities q, gamma
is 0, excess has n sum_c q_c too, and every class is one of the others.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.contract import STEPS, Block, Coefficients, Loaded, Part, Setting, Steps, partitioned, smooths
from xent.backends.torch.devices import looks_at_targets
from xent.backends.torch.memory import block_rows, logit_blocks
from xent.backends.torch.portable.divergence import SECOND, TeacherRows, finish_divergence
from xent.backends.torch.portable.facts import Facts, Index, at, index_of, masked
from xent.backends.torch.portable.rows import LogitRows, activate, times
from xent.backends.torch.shards.checks import range_check, row_checks
from xent.core.call import Dense, TopK
from xent.core.spec import Scalar

__all__ = ["PortableSteps", "finish", "is_largest", "merge", "pack"]

_ARRAYS = 6  # of a block's size, which exist at one time in a divergence
_OF_SUPPORT = 8  # the same of a block of supports
_NONE: Any = None
_SMALLEST_OWN = 1e-19  # rest / own is finite above: rest is below 2^60
_INTEGERS = ("place", "truth", "check", "range")
_MOVED = {"below": "weights", "cost": "mass", "surprise": "given", "deficit": "counted"}
"""The sums of peak - x with weights, and the sums of these weights: a new peak changes each by their product."""
_EMPTY = {"entropy": 0, "log_sum_sq_probs": -torch.inf, "mean_logit": 0}
"""The statistics of a row without any class in its support."""


class PortableSteps(Steps):
    """See `xent.backends.torch.contract.Steps`."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.facts, self.recorded = setting, Facts(setting), dict[str, Tensor]()
        self.deferred = self.facts.deferred
        self.fuses = setting.call.shards is None
        self.saves = not isinstance(setting.call.target, (Dense, TopK))
        self._kind: Any = LogitRows if self.saves else TeacherRows
        self.first_sums: dict[str, Tensor] = {}
        """The merged sums of the first of two folds; empty before it has ended."""
        if setting.call.shards is not None and (setting.upstream is None or not self.saves):
            self.facts.check = row_checks(setting.call, setting.count)

    def partition(self) -> tuple[Tensor, Tensor] | None:
        """Return the partition of rows. With statistics every row with a target is computed."""
        facts, all_rows = self.facts, self.setting.call.options.stats and self.setting.upstream is None
        skippable = facts.ignored if all_rows else facts.excluded
        return None if skippable is None else partitioned(skippable)

    def select(self, source: Any, part: Part) -> Loaded:
        """Gather the hidden states of a part, and the logits of its targets if the compute dtype is 16-bit."""
        facts, setting, hidden, target_logits = self.facts.rows(part.indices), self.setting, source.select(part), None
        trained = hidden if facts.excluded is None else hidden.masked_fill(facts.excluded[:, None], 0)
        if facts.target is not None and source.compute.itemsize == 2 and setting.width and source.weight is not None:
            local = facts.target - setting.first
            place = local.clamp(0, setting.width - 1)
            target_logits = (hidden.float() * source.weight[place].float()).sum(-1)
            target_logits = target_logits if source.bias is None else target_logits + source.bias[place]
            target_logits = target_logits.masked_fill(local != place, 0)
        return Loaded(part, hidden, trained, target_logits)

    def whole_rows(self, block: Block, part: Part, saved: Tensor | None) -> None:
        """Fold and finish rows, and write their gradients from the exponentials of the fold."""
        for piece, _, facts in self._pieces(block, part):
            rows = self._kind(facts, piece)
            sums = rows.fold()
            if isinstance(self.setting.call.target, Dense):
                sums |= rows.refold(sums)
            coefficients = self._finish(facts, sums, piece.grad is not None, saved)
            if piece.grad is not None:
                rows.gradient(coefficients)

    def fold(self, block: Block, part: Part, sums: Tensor, adds: bool) -> None:
        """Write the sums (K, R) of a block."""
        compares = not self.first_sums and self.setting.call.shards is not None
        names = (
            SECOND if self.first_sums else tuple([name for name in self.facts.names if name not in ("check", "range")])
        )
        for piece, rows, facts in self._pieces(block._replace(grad=None), part):
            if piece.logits.shape[1]:
                logit_rows = self._kind(facts, piece)
                named_sums: Any = (
                    logit_rows.refold(_of(self.first_sums, rows, part)) if self.first_sums else logit_rows.fold()
                )
            else:
                least, like = torch.finfo(sums.dtype).min, sums[0, : len(piece.logits)]
                named_sums = {name: torch.full_like(like, least if is_largest(name) else 0) for name in names}
            sums[: len(names), rows.start - block.start : rows.stop - block.start] = pack(names, named_sums)
        if compares:
            self.write_checks(block, part, sums)

    def write_checks(self, block: Block, part: Part, sums: Tensor) -> None:
        """Write the sums of a block that ranks compare."""
        assert self.facts.check is not None
        names, first, bits = self.facts.names, self.setting.first, sums.view(_integers_of(sums))
        rows = index_of(part, block.start, block.start + sums.shape[1])
        bits[names.index("check")].copy_(self.facts.check[rows])
        bits[names.index("range")].fill_(range_check(first, first + self.setting.width))

    def invalidate(self, index: Index, wrong: Tensor) -> None:
        """Make loss and gradient NaN in those of some rows of the call that are `wrong`, (R,) bool."""
        self.facts.invalidate(index, wrong)

    def begin_second_fold(self, sums: Tensor, part: Part) -> None:
        """Merge both normalizers of the rows of a part."""
        self.first_sums = self._merged(sums, part)

    def finish(self, sums: Tensor, part: Part, needs_gradient: bool, saved: Tensor | None) -> Coefficients:
        """Merge the sums of all ranks (ranks, K, R), and record results."""
        merged = merge(SECOND, sums) | self.first_sums if self.first_sums else self._merged(sums, part)
        self.first_sums = {}
        return self._finish(self.facts.rows(part.indices), merged, needs_gradient, saved)

    def _merged(self, packed: Tensor, part: Part) -> dict[str, Tensor]:
        """Merge the sums of a part, and compare what must be equal on all ranks.

        Where ranks differ, raise an error if values may be read, or make the rows NaN.
        """
        merged, setting = merge(self.facts.names, packed), self.setting
        if "range" not in merged:
            return merged
        wrong = (merged["range"] - range_check(0, setting.vocabulary)) % 2**32 != 0
        if not looks_at_targets(wrong.device):
            self.invalidate(part.indices, wrong)
            for name, sums in merged.items():
                merged[name] = sums.masked_fill(wrong, torch.nan) if sums.is_floating_point() else sums
        elif bool(wrong.any()):
            from xent.backends.torch.shards.ranges import refuse_different  # needs torch.distributed

            refuse_different(setting.call, setting.count, setting.needs)
        return merged

    def gradient(self, block: Block, part: Part, coefficients: Coefficients) -> None:
        """Write the gradient of a block's logits."""
        for piece, rows, facts in self._pieces(block, part):
            if piece.grad is not None and piece.logits.shape[1]:
                self._kind(facts, piece).gradient(_of(coefficients, rows, part))

    def results(self) -> list[Tensor]:
        """Return the loss and the statistics."""
        return [self._result(name) for name in ("loss", *self.setting.call.options.stats)]

    def record(self, results: dict[str, Tensor], index: Index) -> None:
        """Record the results (R,) of some rows; those of rows that are never recorded are 0."""
        if isinstance(index, slice) and len(results["loss"]) == self.setting.count:
            self.recorded |= results
            return
        for name, per_row in results.items():
            self.recorded.setdefault(name, per_row.new_zeros(self.setting.count))[index] = per_row

    def _finish(
        self, facts: Facts, sums: dict[str, Tensor], needs_gradient: bool, saved: Tensor | None
    ) -> Coefficients:
        """Record the results of rows in a forward pass, save their sums, and return the gradient's coefficients."""
        results, coefficients = (finish if self.saves else finish_divergence)(facts, sums, needs_gradient)
        if self.setting.upstream is None:
            self.record(results, facts.index)
        if saved is not None:
            saved[:, facts.index] = pack(self.facts.names, sums)
        return coefficients

    def _result(self, name: str) -> Any:
        """Return the loss or a statistic; those per row as (N,)."""
        facts, options, count, recorded = self.facts, self.setting.call.options, self.setting.count, self.recorded
        if name == "count":
            return (
                torch.full((), count, device=facts.weight.device) if facts.ignored is None else (~facts.ignored).sum()
            )
        if name == "accuracy":
            correct = self._result("predictions") == (self._result("truth") if facts.target is None else facts.target)
            correct = masked(correct, facts.invalid, False)
            if options.is_log_probs:
                return correct.to(facts.dtype)
            return correct.sum().to(facts.dtype) / self._result("count").clamp(min=1)
        if name not in recorded:
            kind = torch.int64 if name in ("predictions", "truth") else facts.dtype
            recorded[name] = torch.zeros(count, dtype=kind, device=facts.weight.device)
        per_row, summed = recorded[name], name in ("loss", "z_loss")
        if name == "nll":
            per_row = masked(per_row, facts.invalid, torch.nan)
        absent = facts.excluded if summed else facts.ignored
        if absent is not None:
            per_row = per_row.masked_fill(absent, -1 if name == "predictions" else 0)
        if not summed or options.reduction == "none":
            return per_row
        return per_row.mean() if facts.divisor is count else per_row.sum() / facts.divisor

    def row_blocks(self, block: Block) -> Iterator[Block]:
        """Yield a block in blocks (R, C) with contiguous classes."""
        logits, grad = block.logits, block.grad
        if logits.dim() == 2 and logits.is_contiguous() and (grad is None or grad.is_contiguous()):
            yield block
            return
        for first, rows, place in logit_blocks(logits, grad):
            cut = slice(first, first + len(rows))
            parts = block.target_logits, block.teacher
            yield Block(rows, block.start + first, 0, place, *[at(each, cut) for each in parts])

    def _pieces(self, block: Block, part: Part) -> Iterator[tuple[Block, slice, Facts]]:
        """Yield a block in pieces (R, C) that fit into the caches, their rows relative to the part, and their facts."""
        for rows in self.row_blocks(block):
            yield from self._cut(rows, part)

    def _cut(self, block: Block, part: Part) -> Iterator[tuple[Block, slice, Facts]]:
        (count, width), start = block.logits.shape, block.start
        width = max(width + _OF_SUPPORT * self.facts.longest, 1) * (1 if self.saves else _ARRAYS)
        step = block_rows(block.logits, self.facts.dtype, width)
        for first in range(0, max(count, 1), step):
            index, piece = slice(first, min(first + step, count)), block
            if step < count:
                parts = block.grad, block.target_logits, block.teacher
                piece = Block(block.logits[index], start + first, 0, *[at(field, index) for field in parts])
            rows = slice(start + index.start, start + index.stop)
            alone = part.rows is None and step >= count == self.setting.count
            yield piece, rows, self.facts if alone else self.facts.rows(index_of(part, rows.start, rows.stop))


def pack(names: tuple[str, ...], sums: dict[str, Tensor]) -> Tensor:
    """Return the sums (R,) by name as (K, R). Integers are stored bit by bit as floats."""
    dtype, kind = sums[names[0]].dtype, _integers_of(sums[names[0]])
    return torch.stack([sums[name].to(kind).view(dtype) if name in _INTEGERS else sums[name] for name in names])


def _integers_of(sums: Tensor) -> torch.dtype:
    """Return the dtype of the integers whose bits are stored in sums."""
    return torch.int64 if sums.dtype == torch.float64 else torch.int32


def is_largest(name: str) -> bool:
    """Return whether a sum is the largest value of a row."""
    return name.endswith("peak") or name.startswith("known") or name in ("key", "likely")


def merge(names: tuple[str, ...], packed: Tensor) -> dict[str, Tensor]:
    """Return the sums (R,) by name of all ranks' sums (ranks, K, R). `range` is off by one where `check` differs."""
    kind, by_rank = _integers_of(packed), dict(zip(names, packed.unbind(1), strict=True))
    by_rank |= {name: by_rank[name].view(kind).to(torch.int64, copy=True) for name in _INTEGERS if name in by_rank}
    if len(packed) == 1:
        return {name: sums[0] for name, sums in by_rank.items()}
    merged = {name: sums.amax(0) for name, sums in by_rank.items() if is_largest(name)}
    for side in ("", "teacher_", "others_"):
        if side + "peak" not in by_rank:
            continue
        # Sums relative to the peak of a rank become sums relative to the peak of all.
        growth = merged[side + "peak"] - by_rank[side + "peak"]
        factors, rest = (-growth).exp(), by_rank[side + "rest"]
        by_rank[side + "rest"] = rest * factors
        if side:
            continue
        if "mixed" in by_rank:
            by_rank["mixed"] = factors * (by_rank["mixed"] - growth * rest)
        if "squares" in by_rank:
            by_rank["squares"] = factors.square() * by_rank["squares"]
        for name, count in _MOVED.items():
            if name in by_rank:
                by_rank[name] = by_rank[name] + (by_rank[count] * growth).masked_fill(by_rank[count] == 0, 0)
    for key, place in (("key", "place"), ("likely", "truth")):
        if key in by_rank:
            # The lowest class with the largest key; NaN counts as the largest.
            wins = (by_rank[key] == merged[key]) | (by_rank[key].isnan() & merged[key].isnan())
            merged[place] = torch.where(wins, by_rank[place], torch.iinfo(torch.int64).max).amin(0)
    if "teacher_top" in by_rank:
        merged["teacher_top"] = by_rank["teacher_top"].gather(0, by_rank["peak"].argmax(0, keepdim=True))[0]
    if "check" in by_rank:
        merged["check"] = by_rank["check"][0]
        merged["range"] = by_rank["range"].sum(0) + (by_rank["check"] != merged["check"]).any(0)
    for name, (total, *others) in by_rank.items():
        if name not in merged:
            for other in others:  # in rank order
                total = total + other
            merged[name] = total
    return merged


def finish(facts: Facts, sums: dict[str, Tensor], needs_gradient: bool) -> tuple[dict[str, Tensor], Coefficients]:
    """Return the results of R rows with merged sums, and the coefficients of a gradient; all (R,), by name.

    The results are losses, and what the statistics need. The coefficients use the upstream gradients in the facts; they
    are None for 0. `zero`: (R,) bool, rows whose gradient is exactly 0, whatever their logits are.
    """
    options, activation, stats, zero = (
        facts.setting.call.options,
        facts.activation,
        facts.setting.call.options.stats,
        facts.excluded,
    )
    peak, rest, smoothing, z_loss = sums["peak"], sums["rest"], options.label_smoothing, options.z_loss
    spread, is_class, has_z_loss = smoothing / facts.setting.vocabulary, "target" in sums, smooths(z_loss)
    nll = mass = lse = entropy = beta = beyond = _NONE
    own: Scalar = 0
    loss: Scalar = 0
    w_y: Scalar = 0
    if is_class:
        x_y = sums["target"]
        if not facts.x_is_z:
            activate(x_y := x_y.clone(), activation)
        distance = x_y - peak
        own = distance.exp()
        if facts.begin is not None:
            beyond = sums["target"] == -torch.inf  # rows whose target is outside the support
            own.masked_fill_(beyond, 0)
        total = rest + own
        log_sum = total.log()
        nll = torch.where(own > _SMALLEST_OWN, (rest / own).log1p(), log_sum - distance)
        if beyond is not None:
            nll = nll.masked_fill(beyond, torch.inf)
        w_y = sums.get("row_weight", 1) * (1 - smoothing + spread)
        loss = times(w_y, nll)
    else:
        total, log_sum = rest, rest.log()
        if "surprise" in sums:
            nll = sums["surprise"] + times(sums["given"], log_sum)
    # What the shares in the sums, which are those of the classes but the target, have to be multiplied by.
    share = 1 if "cost" in sums else spread if "below" in sums else None
    if share is not None:
        cost, mass = (share * sums[name] for name in (("below", "weights") if is_class else ("cost", "mass")))
        loss = loss + cost + times(mass, log_sum)
    results = {name: sums[key] for name, key in (("predictions", "place"), ("truth", "truth")) if key in sums}
    results["loss"] = facts.weight * loss
    if stats or has_z_loss:
        lse = results["lse"] = peak + log_sum
    if has_z_loss or "z_loss" in stats:
        results["z_loss"] = z_term = facts.weight * times(z_loss, lse.square())
        results["loss"] = results["loss"] + z_term
    if "nll" in stats:
        results["nll"] = nll
    if "mixed" in sums:
        entropy = rest * log_sum - sums["mixed"]
        entropy = results["entropy"] = (entropy + times(own, nll) if is_class else entropy) / total
    if "squares" in sums:
        results["log_sum_sq_probs"] = (sums["squares"] + own**2).log() - 2 * log_sum
    if "deficit" in sums:
        results["mean_logit"] = peak - sums["deficit"] / sums["counted"].clamp(min=1)
    r: Any
    r, (_, of_lse, of_nll, of_entropy) = facts.scale, facts.upstream
    if beyond is not None:
        empty = total == 0
        results |= {name: results[name].masked_fill(empty, _EMPTY[name]) for name in results.keys() & _EMPTY}
        zero = empty if zero is None else zero | empty
        r, of_nll = r.masked_fill(beyond, 0), None if of_nll is None else of_nll.masked_fill(beyond, 0)
    if not needs_gradient:
        return results, {}
    if not facts.x_is_z:
        linear = activation.logit_scale
        linear = linear if activation.temperature is None else linear / activation.temperature
        factors = (r, of_lse, of_nll, of_entropy)
        r, of_lse, of_nll, of_entropy = [None if factor is None else times(linear, factor) for factor in factors]
    gamma, terms = times(w_y, r), [] if of_lse is None else [of_lse]
    if share is not None:
        terms.append(r * mass)
    if has_z_loss:
        terms.append(2 * z_loss * r * lse)
    if of_nll is not None and is_class:
        gamma = gamma + of_nll
    elif of_nll is not None:
        terms.append(of_nll * sums["given"])
    if of_entropy is not None:
        terms.append(-of_entropy * entropy)
    alpha = gamma = gamma / total
    at_target = -rest * gamma
    if terms:
        excess = sum(terms) / total
        alpha, at_target = gamma + excess, at_target + own * excess
    if of_entropy is not None:
        beta = -of_entropy / total
        alpha = alpha - beta * log_sum
        if is_class:
            at_target = at_target - times(own, beta * nll)
    return results, {
        "peak": peak,
        "alpha": alpha,
        "beta": beta,
        "at_target": at_target if is_class else None,
        "zero": zero,
        "share": None if share is None else r * share,
        "of_q": None if is_class else of_nll,
    }


def _of(sums: dict[str, Any], rows: slice, part: Part) -> dict[str, Any]:
    """Return values of a part's rows for some of them."""
    if rows == slice(0, part.stop - part.start):
        return sums
    return {name: None if per_row is None else per_row[rows] for name, per_row in sums.items()}


STEPS["torch"] = PortableSteps
