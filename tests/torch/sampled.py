"""Log-probability problems: the same inputs for xent, for plain PyTorch in any dtype, and for the float64 reference."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import xent
from xent.backends.reference import cross_entropy_gradient, linear_cross_entropy_gradients
from xent.core.call import Activation, Allowed, Call, Classes, Given, Options, Product

__all__ = ["OUTPUTS", "Problem", "all_none"]

OUTPUTS = ("log_probs", "entropy", "lse")
"""The outputs that have gradients."""


@dataclass(frozen=True)
class Problem:
    """The description of a problem. Values are drawn in float64 and rounded to `dtype`."""

    linear: bool = False
    rows: tuple[int, ...] = (3, 5)
    classes: int = 23
    dtype: str = "float32"
    axis: int = -1
    bias: bool = False
    shift: int = 0
    temperature: Any = 1.0
    """A number, or "rows" for one per row."""
    softcap: float | None = None
    logit_scale: float = 1.0
    support: Any = None
    """None, or the largest number of classes in a support. Every fourth row has none; some lack their target."""
    ignored: float = 0.3
    infinite: bool = False
    """Whether some logits are -inf, in rows whose support has no target."""
    upstream: tuple[bool, bool, bool] = (True, True, True)
    """The `OUTPUTS` that have upstream gradients."""
    seed: int = 0
    more: dict[str, Any] = field(default_factory=dict, hash=False)
    """Further arguments of xent's function."""

    def __str__(self) -> str:
        default = Problem()
        given = [
            f"{name}={getattr(self, name)}"
            for name in self.__dataclass_fields__
            if getattr(self, name) != getattr(default, name)
        ]
        return " ".join(given).replace("=True", "") or "plain"

    def draw(self) -> "Drawn":
        generator = np.random.default_rng([self.seed, self.classes, *self.rows])
        count = int(np.prod(self.rows))
        width = 8
        if self.linear:
            values = [generator.normal(0, 1, (*self.rows, width)), generator.normal(0, 1, (self.classes, width))]
            values += [generator.normal(0, 1, self.classes)] if self.bias else []
        else:
            logits = generator.normal(0, 3, (*self.rows, self.classes))
            if self.infinite:
                logits[..., :: max(self.classes // 4, 2)] = -np.inf
            values = [np.moveaxis(logits, -1, self.axis)]
        target = generator.integers(0, self.classes, self.rows)
        if self.infinite:
            target = np.where(target % max(self.classes // 4, 2) == 0, min(1, self.classes - 1), target)
        target = np.where(generator.random(self.rows) < self.ignored, -100, target)
        temperature = generator.uniform(0.4, 2.5, self.rows) if self.temperature == "rows" else self.temperature
        support = None
        if self.support:
            sizes = generator.integers(1, min(self.support, self.classes) + 1, count)
            sizes[3::4] = 0
            chosen = [generator.permutation(self.classes)[:size] for size in sizes]
            for row, (classes, wanted) in enumerate(zip(chosen, target.reshape(-1), strict=True)):
                if row % 3 and len(classes) and wanted >= 0 and wanted not in classes:
                    classes[0] = wanted
            support = np.concatenate([*chosen, np.zeros(0, np.int64)]), np.cumsum([0, *sizes])
        return Drawn(self, values, target, temperature, support, generator.normal(0, 1, (3, *self.rows)))

    @property
    def options(self) -> dict[str, Any]:
        where = {"shift": self.shift} if self.linear else {"axis": self.axis}
        return {"softcap": self.softcap, "logit_scale": self.logit_scale} | where


@dataclass(frozen=True)
class Drawn:
    problem: Problem
    values: list[Any]
    target: Any
    temperature: Any
    support: Any
    weights: Any

    def leaves(self, device: str, wide: str | None = None) -> list[Tensor]:
        """Return the differentiable arrays, rounded to the problem's dtype, then converted to `wide` if given."""
        dtype = getattr(torch, self.problem.dtype)
        rounded = [torch.from_numpy(np.array(value)).to(dtype) for value in self.values]
        return [one.to(device, getattr(torch, wide or self.problem.dtype)).requires_grad_() for one in rounded]

    def ours(self, device: str, **more: Any) -> tuple[list[Tensor], list[Tensor], Any]:
        """Return outputs, gradients and statistics."""
        leaves = self.leaves(device)
        function = xent.linear_log_probs if self.problem.linear else xent.log_probs
        arguments = self.arguments(device) | {"entropy": True, "stats": ("lse",)} | self.problem.more | more
        names = ("input", "linear_weight", "linear_bias") if self.problem.linear else ("logits",)
        made = function(**dict(zip(names, leaves, strict=False)), **arguments)
        outputs = [made[0], made[1] if arguments["entropy"] else None, made[-1].lse]
        return outputs, self.gradients(outputs, leaves), made[-1]

    def arguments(self, device: str) -> dict[str, Any]:
        """Return the arguments that are not differentiated."""
        found: dict[str, Any] = {"target": torch.from_numpy(np.array(self.target)).to(device)} | self.problem.options
        found["temperature"] = self.temperature
        if not isinstance(self.temperature, float):
            found["temperature"] = torch.from_numpy(np.array(self.temperature)).to(device)
        if self.support is not None:
            ids, offsets = self.support
            found["support"] = xent.Support(*(torch.from_numpy(np.array(one)).to(device) for one in (ids, offsets)))
        return found

    def gradients(self, outputs: list[Any], leaves: list[Tensor]) -> list[Tensor]:
        """Return the gradients of the leaves, for the upstream gradients `weights` of those outputs that have one."""
        used = [
            (output, torch.from_numpy(np.array(weight)).to(output))
            for output, weight, wanted in zip(outputs, self.weights, self.problem.upstream, strict=True)
            if wanted
        ]
        return list(torch.autograd.grad([one for one, _ in used], leaves, [weight for _, weight in used]))

    def plain(self, wide: str | None = None, exact: bool = False) -> tuple[list[Tensor], list[Tensor]]:
        """Return outputs and gradients of plain operations on logits in `wide`; `exact`: the product is wide too."""
        problem = self.problem
        leaves = self.leaves("cpu", wide if exact else None)
        if problem.linear:
            z = F.linear(leaves[0], leaves[1], leaves[2] if problem.bias else None)
        else:
            z = leaves[0].movedim(problem.axis, -1)
        wide = wide or ("float64" if problem.dtype == "float64" else "float32")
        x = z.to(getattr(torch, wide)).reshape(-1, problem.classes) * problem.logit_scale
        if problem.softcap is not None:
            x = problem.softcap * torch.tanh(x / problem.softcap)
        target, temperature, order = self.moved()
        x = x / torch.from_numpy(np.array(temperature)).to(x)[:, None]
        inside = torch.ones(x.shape, dtype=torch.bool)
        if self.support is not None:
            inside = ~self.outside(order)
        counted = torch.from_numpy(target != -100)
        classes = torch.from_numpy(np.where(target == -100, 0, target))
        reached = inside.gather(1, classes[:, None])[:, 0]
        # Rows with an empty support have no gradient.
        blank = inside.any(-1)
        x = torch.where(inside, x, -torch.inf)
        x = torch.where(blank[:, None], x, 0)
        log_p = x.log_softmax(-1)
        chosen = log_p.gather(1, classes[:, None])[:, 0]
        p = log_p.exp()
        entropy = -torch.where(p > 0, p * log_p.masked_fill(p == 0, 0), 0).sum(-1)
        lse = torch.where(blank, torch.where(blank[:, None], x, 0).logsumexp(-1), -torch.inf)
        outputs = [
            torch.where(counted, torch.where(reached, chosen, -torch.inf), 0),
            torch.where(counted & blank, entropy, 0),
            torch.where(counted, lse, 0),
        ]
        shaped = [output.view(problem.rows) for output in outputs]
        return shaped, self.gradients(shaped, leaves)

    def moved(self) -> tuple[Any, Any, Any]:
        """Return target, temperature and position of the support of each row after the shift, (N,) each."""
        shift, rows = self.problem.shift, self.problem.rows
        target, order = np.array(self.target), np.arange(int(np.prod(rows))).reshape(rows)
        temperature = np.broadcast_to(np.asarray(self.temperature, np.float64), rows)
        if shift:
            target, order, temperature = (np.roll(values, -shift, -1) for values in (target, order, temperature))
            target[..., max(rows[-1] - shift, 0) :] = -100
        return target.reshape(-1), np.ascontiguousarray(temperature).reshape(-1), order.reshape(-1)

    def outside(self, order: Any) -> Tensor:
        ids, offsets = self.support
        outside = torch.ones(len(order), self.problem.classes, dtype=torch.bool)
        for row, source in enumerate(order):
            outside[row, ids[offsets[source] : offsets[source + 1]]] = False
        return outside

    def reference(self) -> list[Any]:
        """Return the gradients of the float64 reference."""
        problem = self.problem
        cap = problem.softcap
        is_number = isinstance(self.temperature, float)
        divisor = self.temperature if is_number else 1.0
        each = None if is_number else np.asarray(self.temperature)
        target: Any = Classes(self.target)
        if self.support is not None:
            ids, offsets = self.support
            target = Allowed(self.target, ids, offsets[:-1], offsets[1:])
        activation = Activation(problem.logit_scale / divisor, None if cap is None else cap / divisor, each)
        options = Options("none", shift=problem.shift)
        used = [weight * wanted for weight, wanted in zip(self.weights, problem.upstream, strict=True)]
        arrays = [leaf.detach().numpy() for leaf in self.leaves("cpu", "float64")]
        upstream = {"upstream": -used[0], "entropy": used[1], "lse": used[2]}
        if not problem.linear:
            axis = problem.axis % (len(problem.rows) + 1)
            return [cross_entropy_gradient(Call(Given(arrays[0], axis), target, activation, options), **upstream)]
        source = Product(arrays[0], arrays[1], arrays[2] if problem.bias else None)
        found = linear_cross_entropy_gradients(Call(source, target, activation, options), **upstream)
        return list(found)[: len(arrays)]


def all_none(problem: Problem) -> Problem:
    """Return the same problem with every target ignored."""
    return replace(problem, ignored=1.1)
