"""The interface of a device's row kernel in the MLX driver, and `finish`, the one step that handles options.

A row kernel is a module with two functions of an (R, V) block of raw logits with R, V >= 1, of any strides:

- ``forward(logits, facts, requested)`` computes the results that `requested` names: "loss" and others. If the call has
  statistics, those of excluded rows are needed too.
- ``backward(logits, facts, norm)`` computes the gradient (R, V) of a block from the result norm (R, 2), for the present
  `scale` of the facts.

MLX arrays are immutable: a kernel returns its results, and "in place" means that the gradient may reuse the memory of
logits that nothing else refers to. The driver slices the facts to the rows of a block, never passes an empty block,
makes each block depend on the one before, and computes losses and statistics from the results of a kernel. A kernel
does not evaluate arrays.

`finish` and `coefficients` compute losses, statistics and gradient coefficients from the sums over whole rows. Sums
have the names of `xent.backends.torch.contract`.

With x, e, w, a as in `xent.cross_entropy`, m the largest x, log_sum = log sum_c exp(x_c - m), and the share w'_c of a
class in the loss, w_c ((1-e) q_c + e/V) for class probabilities q, and w_c e/V for class indices, where the target has
its own term::

    cost  = sum_c w'_c (m - x_c)      mass = sum_c w'_c      surprise = sum_c q_c (m - x_c)      given = sum_c q_c
    lse   = m + log_sum               nll  = lse - x_y, or surprise + given log_sum
    l     = a [ (1-e) w_y nll  +  cost + mass log_sum  +  zeta lse^2 ]       the first term for class indices only
    dL/dx = p_c (alpha + beta log p_c) - gamma [c==y] - r w'_c - n q_c

where r, u, n and v are the upstream gradients of l / a, lse, nll and entropy H; n q_c is for class probabilities, and::

    gamma = r (1-e) w_y + n, or 0     excess = r mass + n given + 2 r zeta lse + u - v H     beta = -v
    alpha = gamma + excess
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from xent.backends.mlx.devices import product
from xent.core.call import Call
from xent.core.spec import Scalar

__all__ = [
    "Coefficients",
    "Facts",
    "Results",
    "RowKernel",
    "Sums",
    "activate",
    "coefficients",
    "finish",
    "joined",
    "ordered",
    "requested_results",
]

_NUMBERS = ("label_smoothing", "z_loss", "softcap", "logit_scale", "spread", "total_weight")
_WHOLE = ("numbers", "class_weight", "deferred", "divisor")


@dataclass(frozen=True, eq=False)
class Facts:
    """What is known of R rows of V raw logits before the logits. Floats are float32, or float64 for float64 logits."""

    call: Call
    """The call, with a target in the form of `xent.backends.mlx.facts.gather_facts`."""
    numbers: mx.array
    """(8,) label_smoothing e, z_loss, softcap k, logit_scale s, "spread" e / V, "total_weight" sum_c w_c (V without
    class weights), 0, 0.

    There are eight because MLX passes smaller arrays to a Metal kernel in another address space. They are an array
    because a compiled function would be traced again for each new value of a Python number.
    """
    weight: mx.array
    """(R,) a_i; NaN if the row is invalid, so that its loss is NaN."""
    scale: mx.array
    """(R,) gradient factor: a_i, divided by the divisor for "mean", times the upstream gradient if it is known."""
    excluded: mx.array
    """(R,) bool: rows whose loss and gradient are exactly 0, even if their logits are NaN."""
    ignored: mx.array
    """(R,) bool: rows without a target; of a divergence, rows with weight 0."""
    invalid: mx.array | None = None
    """(R,) bool: rows with a target outside [0, V), a temperature that is not > 0, or invalid values of a teacher.
    Their loss and gradient are NaN."""
    deferred: mx.array | None = None
    """0-d factor that the driver multiplies into float16 gradients later, so that they do not underflow."""
    divisor: mx.array | None = None
    """0-d, the divisor of "mean"; None for the other reductions."""
    target: mx.array | None = None
    """(R,) int32 in [0, V); ignored and invalid rows have some valid class. None if targets are not class indices."""
    probabilities: mx.array | None = None
    """(R, V) in the caller's float dtype, without class weights and smoothing; with `order` they have other rows."""
    order: mx.array | None = None
    """(R,) the row of `probabilities` of each row, -1 for none. None if row i has row i, and in a kernel."""
    class_weight: mx.array | None = None
    """(V,)"""
    sets: mx.array | None = None
    """(R, 2) int32: where the support of each row begins and ends in the classes of the call's target; -1 in invalid
    rows."""
    teacher: mx.array | None = None
    """(R, V): the raw logits of a dense teacher."""
    ids: mx.array | None = None
    """(R, K) the classes of a top-k teacher, V outside of [0, V); or of the supports of a block, whose logits are then
    of these classes, and whose targets are positions in K. Padding entries are negative."""
    log_q: mx.array | None = None
    """(R, K): its log-probabilities."""
    target_logits: mx.array | None = None
    """(R,) raw logits of the targets, which replace those in the block, because these were rounded to its dtype."""
    excluded_are_finite: bool = False
    """Whether the logits of excluded rows are known to be finite: then a factor of 0 makes their gradient 0."""
    whole_call: bool = False
    """Whether the block is the whole call. Its gradient should then be the only array of its size."""
    upstream: Mapping[str, mx.array] = field(default_factory=dict)
    """In backward passes: (R,) upstream gradients of "lse", "nll" and "entropy", and with the latter "H", the entropy
    itself. `scale` includes the upstream gradient of the loss."""
    row_activation: mx.array | None = None
    """(R, 2): logit_scale and softcap of each row, which replace those in `numbers` if rows have temperatures. The sign
    of the scale is that in `numbers`. NaN if the temperature is not > 0."""

    @property
    def count(self) -> int:
        """R."""
        return int(self.weight.size)

    @property
    def smooths(self) -> bool:
        """Whether there is label smoothing. An option that is an array has an effect, whatever its value is."""
        return _differs(self.call.options.label_smoothing, 0)

    @property
    def squares(self) -> bool:
        """Whether there is a z-loss."""
        return _differs(self.call.options.z_loss, 0)

    @property
    def caps(self) -> bool:
        """Whether there is a softcap."""
        return self.call.activation.softcap is not None

    @property
    def scales(self) -> bool:
        """Whether logits have a scale other than 1, or one whose value is unknown, or one per row."""
        return self.row_activation is not None or _differs(self.call.activation.logit_scale, 1)

    @property
    def skippable(self) -> mx.array:
        """(R,) bool: rows of which nothing is computed. Every row with a target has statistics, even with weight 0."""
        return self.ignored if self.call.options.stats else self.excluded

    def number(self, name: str) -> mx.array:
        """Return the value of an option, 0-d."""
        return self.numbers[_NUMBERS.index(name)]

    def of_rows(self) -> tuple[mx.array, mx.array]:
        """Return logit_scale and softcap: (R,) if rows have their own, otherwise 0-d."""
        if self.row_activation is None:
            return self.number("logit_scale"), self.number("softcap")
        return self.row_activation[:, 0], self.row_activation[:, 1]

    def activate(self, z: mx.array) -> tuple[mx.array, mx.array | None]:
        """Return `activate` of logits (R, V) in the dtype of `weight`."""
        scale, cap = (value[:, None] if value.ndim else value for value in self.of_rows())
        return activate(z.astype(self.weight.dtype), scale if self.scales else 1, cap if self.caps else None)

    def part(self, rows: slice | mx.array) -> "Facts":
        """Return the facts of some rows."""
        if isinstance(rows, slice) and self.order is None and rows.stop - rows.start == self.count:
            return self
        named = {name: value for name, value in vars(self).items() if isinstance(value, mx.array)}
        cut: dict[str, Any] = {name: value[rows] for name, value in named.items() if name not in _WHOLE}
        if self.order is not None and self.probabilities is not None:
            cut |= {"probabilities": self.probabilities[mx.maximum(self.order[rows], 0)], "order": None}
        return replace(self, **cut, upstream={name: value[rows] for name, value in self.upstream.items()})


Results = dict[str, mx.array]
"""The results of a forward pass for R rows by name, in the dtype of `Facts.weight`:

- loss: (R,) l_i, including the z-loss.
- grad: (R, V), the logits' dtype: the gradient with respect to the raw logits, with factor `scale` instead of a_i.
- norm: (R, 2): the largest x, and log sum_c exp(x_c - largest). Their sum, lse, would be rounded.
- nll: (R,) lse - x_y; for class probabilities q, without smoothing, sum_c q_c (lse - x_c).
- entropy: (R,) -sum_c p_c log p_c.
- predictions: (R,) int32: the class of the largest logit_scale * z, before the softcap; among equals the lowest.
- rank: (R,) int32: the number of classes whose logit is larger than the target's.
- log_sum_sq_probs: (R,) log sum_c p_c^2.
- mean_logit: (R,) the mean of x_c over classes.

Only loss and grad must be 0 in excluded rows; the driver masks the others.
"""


class RowKernel(Protocol):
    """The module of a row kernel; `norm` is None for a divergence."""

    def forward(self, logits: mx.array, facts: Facts, requested: Collection[str]) -> Results:
        """Compute the results of a block."""

    def backward(self, logits: mx.array, facts: Facts, norm: Any) -> mx.array:
        """Compute the gradient of a block."""


def requested_results(stats: Collection[str], grad: bool) -> set[str]:
    """Return the names of the results that these statistics and the gradient need.

    The norm is for statistics, and for gradients that are computed later.
    """
    return {"loss", "norm", *stats, *["predictions"] * ("accuracy" in stats), *["grad"] * grad}


def joined(parts: Sequence[Results]) -> Results:
    """Concatenate the results of blocks."""
    if len(parts) == 1:
        return parts[0]
    return {name: mx.concatenate([part[name] for part in parts]) for name in parts[0]}


def ordered(z: mx.array, scale: mx.array) -> mx.array:
    """Return raw logits in the order of scale * z. A softcap is not applied, because rounding could make ties."""
    return mx.sign(scale).astype(z.dtype) * z


def activate(z: mx.array, scale: Scalar, softcap: Scalar) -> tuple[mx.array, mx.array | None]:
    """Return x = k tanh(s z / k), or s z without softcap k, and the softcap's slope, None without softcap.

    The slope does not include the factor s. It is not computed as 1 - tanh^2, which would cancel. `scale` and `softcap`
    are numbers, or arrays that are broadcast with z.
    """
    x = z * scale if _differs(scale, 1) else z
    if softcap is None:
        return x, None
    inside = x / softcap
    return softcap * mx.tanh(inside), 1 / mx.square(mx.cosh(inside))


def _differs(value: Scalar, neutral: float) -> bool:
    """Whether an option has an effect. One that is in an array is included for every value."""
    return isinstance(value, mx.array) or value != neutral


class Sums(NamedTuple):
    """What `finish` needs of R rows, (R,) each. Sums of differences to the largest x keep their precision."""

    peak: mx.array
    """The largest x."""
    log_sum: mx.array
    nll: mx.array
    cost: mx.array | None
    """None without label smoothing and class probabilities, like the mass."""
    mass: Scalar
    """Or 0-d."""
    statistics: dict[str, mx.array]
    """The statistics that the caller asked for, but for the lse."""


class Coefficients(NamedTuple):
    """The coefficients (R,) of the gradient with respect to raw logits. They include the factor s of dx/dz."""

    alpha: mx.array
    gamma: Scalar
    beta: mx.array | None
    excess: mx.array | None
    """alpha - gamma, computed before rounding: if p_y is near 1, the difference would cancel."""
    share: mx.array
    """r"""
    given: mx.array | None
    """n of class probabilities."""


def finish(sums: Sums, facts: Facts) -> Results:
    """Return the results of whole rows, without gradients."""
    terms = list[mx.array]()
    if facts.target is not None:
        weight = _target_weight(facts)
        terms.append(sums.nll if weight is None else product(weight, sums.nll))
    if sums.cost is not None:
        terms.append(sums.cost + sums.mass * sums.log_sum)
    if facts.squares:
        terms.append(facts.number("z_loss") * mx.square(sums.peak + sums.log_sum))
    loss = mx.where(facts.excluded, 0, facts.weight * sum(terms[1:], terms[0]))
    return {"loss": loss, "norm": mx.stack([sums.peak, sums.log_sum], axis=-1), **sums.statistics}


def coefficients(facts: Facts, lse: mx.array | None, mass: Scalar, given: Scalar) -> Coefficients:
    """Return the coefficients for the upstream gradients in the facts. `lse` (R,) is needed only for the z-loss."""

    def scaled(factor: mx.array) -> mx.array:
        return factor * facts.of_rows()[0] if facts.scales else factor

    share, upstream, terms = scaled(facts.scale), facts.upstream, list[mx.array]()
    gamma: Scalar = 0
    beta = of_nll = None
    if mass is not None:
        terms.append(share * mass)
    if facts.squares and lse is not None:
        terms.append(2 * facts.number("z_loss") * share * lse)
    if "nll" in upstream:
        of_nll = scaled(upstream["nll"])
    if facts.target is not None:
        weight = _target_weight(facts)
        gamma = share if weight is None else share * weight
        if of_nll is not None:
            gamma, of_nll = gamma + of_nll, None
    elif of_nll is not None:
        terms.append(of_nll * given)
    if "lse" in upstream:
        terms.append(scaled(upstream["lse"]))
    if "entropy" in upstream:
        beta = -scaled(upstream["entropy"])
        terms.append(beta * upstream["H"])
    excess = sum(terms[1:], terms[0]) if terms else None
    return Coefficients(gamma if excess is None else gamma + excess, gamma, beta, excess, share, of_nll)


def _target_weight(facts: Facts) -> mx.array | None:
    """Return (1-e) w_y of class indices, (R,) or 0-d; None for 1."""
    keep = 1 - facts.number("label_smoothing") if facts.smooths else None
    if facts.class_weight is None:
        return keep
    weight = facts.class_weight[facts.target]
    return weight if keep is None else keep * weight
