"""Exponentials of logits in place of gradients: whether they are served, their launches, and what is made of them.

With x and r as in `xent.backends.triton.rows_kernel`, y a row's target, and a reference c that a row is given before
anything is known of its other classes::

    E_v = e^(x_v - c) dx/dz,  0 for v = y
    g_v = s E_v,  s = r (1 + 2 zeta lse) e^(c - lse)          the gradient of logit z_v, for v != y

So a product that knows no norm yet can store E, and all that a gradient still lacks is a number for each row: s, and
that of its target, g_y. Of the products that follow, s scales the rows of one and the factor of the other::

    dl/d hidden = s (E @ classifier) + g_y classifier_y
    dl/d classifier = E^T @ (s hidden), and g_y hidden added to row y

The last term is added when the sum over chunks is complete, so that a row which is most of a class's gradient is
rounded once, and not as s hidden either. But where a class is the target of many rows its two terms cancel, as they
must once a model knows how frequent the class is; they belong into one float32 sum, where the roundings of many s
hidden average out besides. There g_y / s is written to the target's place among the exponentials. The first sum is
rounded once, when its target is in it: what all rows of the classifier share cancels there.

A bfloat16 has the exponents of a float32, so that E is as precise as a gradient would be. c is a little more than the
target's x, which is known: e^(x - c) then adds up to about the exponential of the row's loss. A row whose largest x is
far above that might overflow, or s vanish, if r is tiny. Its chunk is made once more, relative to the largest x; the
kernel finds that on the device, so that nobody waits to know.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.kernels import Factors, Piece
from xent.backends.triton.exponential_steps import (
    add_targets_kernel,
    factors_kernel,
    finish_input_kernel,
    link_targets_kernel,
    scale_rows_kernel,
    settle_kernel,
    start_kernel,
)
from xent.backends.triton.hopper import can_be_copied, copyable, descriptor, hopper_multiprocessors
from xent.backends.triton.launch import cdiv, launch, next_power_of_2
from xent.backends.triton.product import BAND, CLASSES, DEPTH, ENTRY_REGISTERS, REGISTERS, WARPS, can_be_summed
from xent.backends.triton.tiles import TilePass

__all__ = ["RELEASES", "Exponentials", "start"]

RELEASES = ((3, 6), (3, 7))
_SLOTS = 4
_BANDS = 16  # side by side
_ROWS = 32  # that a program of the steps has
_SETTLED_ROWS = 16
_LINKED_ROWS = 512
_COLUMNS = 1024


def start(classifier: Tensor, facts: Any) -> "Exponentials | None":
    """Return what makes the exponentials of a call, from its classifier (V, D) and the facts of all its rows.

    None where they cannot take the place of the gradients of logits.
    """
    if classifier.device.type != "cuda" or not hopper_multiprocessors(classifier.device.index, RELEASES):
        return None
    return Exponentials(classifier, facts) if _fits(classifier, facts) else None


class Exponentials:
    """A `xent.backends.torch.kernels.Exponentials`."""

    def __init__(self, classifier: Tensor, facts: Any) -> None:
        self._classifier, self._facts = classifier, facts

    @cached_property
    def _links(self) -> tuple[Tensor, Tensor]:
        """(V,) and (N,) int32: which rows with a gradient have one class for target, see `link_targets_kernel`."""
        target, count = self._facts.target, len(self._facts.target)
        newest = torch.full((len(self._classifier),), -1, dtype=torch.int32, device=target.device)
        older = newest.new_empty(count)
        launch(
            link_targets_kernel,
            (cdiv(count, _LINKED_ROWS),),
            target,
            _dead(self._facts),
            newest,
            older,
            count,
            BLOCK=_LINKED_ROWS,
            num_warps=4,
        )
        return newest, older

    def make(self, hidden: Tensor, pieces: Sequence[Piece], facts: Any, results: Any, target_logits: Tensor) -> Factors:
        """See `xent.backends.torch.kernels.Exponentials.make`. Returns s, and g_y where it is not among them."""
        hidden = copyable(hidden)
        rows, spec = len(hidden), facts.spec
        norm, references = target_logits.new_empty(2, 2, rows)
        peaks = norm[0]
        products = [_Product(hidden, piece) for piece in pieces]
        tiles_of = [cdiv(len(product.classifier), CLASSES) for product in products]
        tile_sums = norm.new_empty(2, sum(tiles_of), rows).unbind()
        todo = norm.new_empty(2, dtype=torch.int32)
        tiles = TilePass(facts, replace(results, norm=norm), target_logits)
        launch(
            start_kernel,
            (cdiv(rows, _ROWS),),
            target_logits,
            references,
            todo,
            rows,
            spec.softcap or 0.0,
            spec.logit_scale,
            CAPPED=spec.softcap is not None,
            SCALED=spec.logit_scale != 1,
            BLOCK=_ROWS,
            num_warps=1,
        )
        for attempt, (reference, has_work) in enumerate(zip(references.unbind(), todo.unbind(), strict=True)):
            for product, first_tile in zip(products, accumulate(tiles_of, initial=0), strict=False):
                _launch(product, facts, reference, has_work, tile_sums, first_tile)
            launch(
                settle_kernel,
                (cdiv(rows, _SETTLED_ROWS),),
                *tile_sums,
                references,
                todo,
                peaks,
                tiles.totals,
                facts.idle,
                facts.scale,
                rows,
                sum(tiles_of),
                LAST=attempt == 1,
                BLOCK=_SETTLED_ROWS,
                num_warps=8,
            )
        tiles.finish()
        return _factors(pieces, references, todo, norm, facts, target_logits, self._links)

    def make_again(
        self, hidden: Tensor, pieces: Sequence[Piece], facts: Any, norm: Tensor, target_logits: Tensor
    ) -> Factors:
        """Do the same relative to the rows' lse, from their norm (2, R)."""
        hidden = copyable(hidden)
        reference = norm.sum(0)
        for piece in pieces:
            _launch(_Product(hidden, piece), facts, reference)
        return _factors(pieces, reference, None, norm, facts, target_logits, self._links)

    def scale_rows(self, hidden: Tensor, factors: Factors, out: Tensor) -> None:
        """Write s hidden (R, D) to `out`, which may be `hidden`."""
        rows, width = hidden.shape
        launch(
            scale_rows_kernel,
            (rows,),
            hidden,
            *hidden.stride(),
            factors.scale,
            out,
            *out.stride(),
            width,
            BLOCK=_COLUMNS,
            num_warps=4,
        )

    def finish_input(
        self, product: Tensor, factors: Factors, target: Tensor, columns: slice, grad: Tensor, rows: Tensor | None
    ) -> None:
        """Write s product + g_y classifier_y to some columns of the gradient, rounding once."""
        classifier, grad = self._classifier[:, columns], grad[:, columns]
        count, width = product.shape
        launch(
            finish_input_kernel,
            (count,),
            product,
            product.stride(0),
            factors.scale,
            factors.at_target,
            target,
            classifier,
            classifier.stride(0),
            grad,
            grad.stride(0),
            rows,
            width,
            BLOCK=_COLUMNS,
            num_warps=4,
        )

    def add_targets(self, total: Tensor, hidden: Tensor, at_target: Tensor) -> None:
        """Add g_y hidden of each of N rows to its target's row of the classifier's gradient (V, D), rounding once.

        Rows of one target are added up in a fixed order.
        """
        count, width = hidden.shape
        block = min(next_power_of_2(width), _COLUMNS)
        launch(
            add_targets_kernel,
            (count, cdiv(width, block)),
            total,
            total.stride(0),
            hidden,
            *hidden.stride(),
            self._facts.target,
            *self._links,
            at_target,
            width,
            BLOCK=block,
            num_warps=4,
        )


def _fits(classifier: Tensor, facts: Any) -> bool:
    """Whether the kernel is for this call; float16 has not the range for exponentials."""
    if facts.target is None or not can_be_summed(facts):
        return False
    vocabulary, width = classifier.shape
    aligned = width * classifier.itemsize % 16 == 0 and can_be_copied(classifier)
    return vocabulary >= CLASSES and classifier.dtype == torch.bfloat16 and aligned


def _factors(
    pieces: Sequence[Piece],
    references: Tensor,
    todo: Tensor | None,
    norm: Tensor,
    facts: Any,
    target_logits: Tensor,
    links: tuple[Tensor, Tensor],
) -> Factors:
    """Place the targets that are not rare, and return the factors."""
    rows, spec = len(target_logits), facts.spec
    factors = Factors(*norm.new_empty(2, rows))
    peaks, log_sums = norm
    dead = _dead(facts)
    for first, classifier, out in pieces:
        launch(
            factors_kernel,
            (cdiv(rows, _ROWS),),
            out,
            out.stride(0),
            references,
            todo,
            peaks,
            log_sums,
            target_logits,
            facts.scale,
            dead,
            facts.target,
            *links,
            factors.scale,
            factors.at_target,
            rows,
            first,
            len(classifier),
            spec.z_loss,
            spec.softcap or 0.0,
            spec.logit_scale,
            CAPPED=spec.softcap is not None,
            SCALED=spec.logit_scale != 1,
            Z_LOSS=spec.z_loss != 0,
            BLOCK=_ROWS,
            num_warps=1,
        )
    return factors


class _Product:
    """The factors of one product, hidden states (R, D) and a piece's classes, and the memory for its exponentials."""

    def __init__(self, hidden: Tensor, piece: Piece) -> None:
        self.hidden, (self.first, self.classifier, self.out) = hidden, piece

    @cached_property
    def descriptors(self) -> list[Any]:
        """The three as the copy engine takes them."""
        blocks = [BAND // 2, DEPTH], [CLASSES, DEPTH], [BAND // 2, CLASSES // 2]
        return [descriptor(*each) for each in zip((self.hidden, self.classifier, self.out), blocks, strict=True)]


def _launch(
    product: _Product,
    facts: Any,
    reference: Tensor,
    todo: Tensor | None = None,
    tile_sums: Sequence[Tensor] | None = None,
    first_tile: int = 0,
) -> None:
    from xent.backends.triton.exponentials_kernel import exponentials_kernel

    spec = facts.spec
    (rows, width), vocabulary = product.hidden.shape, len(product.classifier)
    bands, class_tiles = cdiv(rows, BAND), cdiv(vocabulary, CLASSES)
    programs = min(hopper_multiprocessors(reference.device.index, RELEASES), bands * class_tiles)
    launch(
        exponentials_kernel,
        (programs,),
        *product.descriptors,
        facts.target,
        reference,
        _dead(facts),
        reference if todo is None else todo,
        *((reference, reference) if tile_sums is None else tile_sums),
        rows,
        vocabulary,
        product.first,
        first_tile,
        bands * class_tiles,
        _BANDS,
        class_tiles,
        cdiv(width, DEPTH),
        spec.softcap or 0.0,
        spec.logit_scale,
        SLOTS=_SLOTS,
        SUMMED=tile_sums is not None,
        SCALED=spec.logit_scale != 1,
        CAPPED=spec.softcap is not None,
        REGISTERS=REGISTERS,
        num_warps=WARPS,
        maxnreg=ENTRY_REGISTERS,
    )


def _dead(facts: Any) -> Tensor:
    return torch.zeros_like(facts.ignored) if facts.dead is None else facts.dead
