"""The rows of a divergence from a teacher, which is dense or known at K classes of each row.

A dense teacher takes two folds: first the normalizers of both distributions, then the divergence and `pull`, the sum of
its gradient. If the classes are on several ranks, each fold has one gather of its sums. A top-k teacher takes one fold.
`xent.backends.divergence_terms` has the terms of these sums.

With a top-k teacher a row has K + 1 cells: the K classes, and all others as one cell. The probability of the other
classes is summed directly, because 1 minus the probability of the K classes would cancel.
"""

from typing import Any, cast

import torch
from torch import Tensor

from xent.backends.divergence_terms import divergence_terms, teacher_cells
from xent.backends.torch.contract import Block, Coefficients
from xent.backends.torch.portable.facts import Facts
from xent.backends.torch.portable.rows import activate, times
from xent.core.call import Dense, Options, TopK
from xent.core.validate import outside

__all__ = ["SECOND", "TeacherRows", "finish_divergence"]

SECOND = ("divergence", "pull")
"""The sums of the second fold."""


class TeacherRows:
    """R rows of a divergence: logits (R, C) of the student, and what the teacher knows of them."""

    _terms: Any = None
    """The terms of the second fold, for the gradient."""

    def __init__(self, facts: Facts, block: Block) -> None:
        self._facts, self._grad = facts, block.grad
        target, x = facts.setting.call.target, block.logits.to(facts.dtype, copy=True)
        self._slope = activate(x, facts.activation, block.grad is not None)
        self._x, self._e = {"": x}, dict[str, Tensor]()
        """The x of the student, or of the side beside it, less the peak once `_relative` has set its exponentials."""
        if isinstance(target, Dense):
            assert block.teacher is not None
            self._x["teacher_"] = block.teacher.to(facts.dtype, copy=True)
            activate(self._x["teacher_"], target.activation)
            return
        assert facts.ids is not None
        ids = facts.ids.to(torch.int64) - facts.setting.first
        self._away = (facts.log_probs == -torch.inf) | outside(ids, x.shape[1])
        self._ids = ids.masked_fill(self._away, 0)
        # Entries that are away have +inf, which does not change the class that they point to.
        least = torch.where(self._away, torch.inf, -torch.inf).to(x.dtype)
        self._x["others_"] = x.scatter_reduce(1, self._ids, least, "amin")

    def _relative(self, side: str, peak: Tensor) -> tuple[Tensor, Tensor]:
        """Return x - peak of a side, in the memory of x, and its exponentials."""
        if side not in self._e:
            self._e[side] = self._x[side].sub_(peak[:, None]).exp()
        return self._x[side], self._e[side]

    def fold(self) -> dict[str, Tensor]:
        """Return the sums (R,) of the first fold by name."""
        x, names, options = self._x[""], self._facts.names, self._facts.setting.call.options
        sums = dict[str, Tensor]()
        if "teacher_" not in self._x:
            of_ids = x.gather(1, self._ids).masked_fill(self._away, -torch.inf)
            sums = {f"known_{k}": known_x for k, known_x in enumerate(of_ids.unbind(1))}
        elif options.kind == "tv" or options.beta != 0:
            sums["teacher_top"] = self._x["teacher_"].gather(1, x.argmax(-1, keepdim=True))[:, 0]
        else:
            sums["teacher_top"] = x.new_zeros(len(x))
        for side, side_x in self._x.items():
            if side + "peak" in names:
                peak = sums[side + "peak"] = side_x.amax(-1).clamp(min=torch.finfo(x.dtype).min)
                away, e = self._relative(side, peak)
                sums[side + "rest"] = e.sum(-1)
                if not side and "mixed" in names:
                    sums["mixed"] = times(e, away).sum(-1)
        return sums

    def refold(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the sums of the second fold, from those of the first one over all classes.

        `pull` is the sum of p v, relative to the v of the most probable class: if that class has nearly all
        probability, its v differs from the mean by much less than either is, and the difference would cancel.
        """
        rest, peak_q, rest_q = (sums[name][:, None] for name in ("rest", "teacher_peak", "teacher_rest"))
        (away, p), (away_q, q) = self._relative("", sums["peak"]), self._relative("teacher_", sums["teacher_peak"])
        norms = rest_q.log() - rest.log()
        p.div_(rest)
        q.div_(rest_q)
        options = self._facts.setting.call.options
        cost, v, factor = divergence_terms(torch, options, p, q, away, away_q.sub_(norms))
        pull = torch.zeros_like(sums["rest"])
        if v is not None:
            of_top = sums["teacher_top"][:, None] - peak_q
            v = v - divergence_terms(torch, options, 1 / rest, of_top.exp() / rest_q, 0, of_top - norms)[1]
            pull = times(p, v).sum(-1)
        self._terms = p, q, v, factor
        return {"divergence": cost.sum(-1), "pull": pull}

    def gradient(self, coefficients: dict[str, Tensor]) -> None:
        """Write the gradient of raw logits from the coefficients of `finish_divergence`."""
        facts, grad = self._facts, self._grad
        assert grad is not None
        if "teacher_" in self._x:
            if self._terms is None:
                self.refold(coefficients)
            p, q, v, factor = cast(Any, self._terms)
            derivative = p - q if v is None else times(p, coefficients["pull"][:, None] - v) * factor
        else:
            derivative = self._relative("others_", coefficients["others_peak"])[1].mul_(coefficients["others"][:, None])
            derivative.scatter_add_(1, self._ids, coefficients["of_ids"].masked_fill(self._away, 0))
        derivative *= (facts.scale * facts.activation.logit_scale)[:, None]
        if self._slope is not None:
            derivative *= self._slope
        if facts.excluded is not None:
            derivative.masked_fill_(facts.excluded[:, None], 0)
        grad.copy_(derivative)


def finish_divergence(facts: Facts, sums: dict[str, Tensor], _: bool) -> tuple[dict[str, Tensor], Coefficients]:
    """Return the results of rows with these sums, and the coefficients of the gradient."""
    target = facts.setting.call.target
    if isinstance(target, TopK):
        sums = sums | _cells(facts.setting.call.options, target, facts.log_probs, sums)
    results = {"loss": sums["divergence"] * facts.weight}
    if "mixed" in sums:
        results["entropy"] = sums["rest"].log() - sums["mixed"] / sums["rest"]
    return results, sums


def _cells(options: Options, target: TopK, log_probs: Any, sums: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the divergence from a top-k teacher, and dl/dx of the other classes and (R, K) of the K classes.

    dl/dx_c is others e^(x_c - others_peak) for the other classes.
    """
    peak, rest = sums["others_peak"][:, None], sums["others_rest"][:, None]
    x_k = torch.stack([column for name, column in sums.items() if name.startswith("known")], 1)
    top = torch.maximum(peak, x_k.amax(-1, keepdim=True))
    log_p = torch.cat((x_k - top, rest.log() + (peak - top)), 1).log_softmax(-1)
    p, log_q = log_p.exp(), log_probs.to(peak.dtype)
    if target.tail == "renormalize":
        log_q = log_q - log_q.logsumexp(-1, keepdim=True)
    q = log_q.exp()
    q, log_q, whole = teacher_cells(torch, target, q, log_q, q.sum(-1, keepdim=True), rest == 0)
    cost, v, factor = divergence_terms(torch, options, p, q, log_p, log_q)
    drops = target.tail == "drop"
    loss = (times(q, log_q - log_p) if drops else cost).sum(-1)
    if v is None:
        pulled = whole * p - q
        loss = loss if drops else loss + (whole[:, 0] - 1)
    else:
        v = v - v.gather(1, p.argmax(-1, keepdim=True))
        pulled = times(p, times(p, v).sum(-1, keepdim=True) - v) * factor
    others = (pulled[:, -1:] / rest).masked_fill(rest == 0, 0)[:, 0]
    return {"divergence": loss, "others": others, "of_ids": pulled[:, :-1]}
