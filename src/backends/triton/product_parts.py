"""What the product and the sum kernel share, in Gluon: their ring of slots, and how the tensor cores go through it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

__all__ = ["last_product", "multiply", "next_slot"]


@gluon.jit
def next_slot(slot, phase, SLOTS: gl.constexpr):
    """Return the slot after this one, and the phase of its barrier."""
    slot += 1
    wrapped = slot == SLOTS
    return gl.where(wrapped, 0, slot), phase ^ wrapped.to(gl.int32)


@gluon.jit
def _before(slot, SLOTS: gl.constexpr):
    """Return the slot before this one: found anew where a loop needs it, for Triton 3.6 loses a variable with it."""
    return gl.where(slot == 0, SLOTS - 1, slot - 1)


@gluon.jit
def multiply(z, halves, columns, full, empty, slot, phase, steps, SLOTS: gl.constexpr, TRANSPOSED: gl.constexpr):
    """Add the products of so many slots to z, the last of them still in flight; return z, the next slot and its phase.

    Slots hold halves (rows, depth) and columns (columns, depth), or TRANSPOSED (depth, rows) and (depth, columns).
    """
    for step in range(steps):
        mbarrier.wait(full.index(slot), phase)
        if TRANSPOSED:
            z = warpgroup_mma(halves.index(slot).permute([1, 0]), columns.index(slot), z, is_async=True)
        else:
            z = warpgroup_mma(halves.index(slot), columns.index(slot).permute([1, 0]), z, is_async=True)
        z = warpgroup_mma_wait(1, deps=[z])  # for the one before, whose slot nobody reads any more
        mbarrier.arrive(empty.index(_before(slot, SLOTS)), pred=step > 0)
        slot, phase = next_slot(slot, phase, SLOTS)
    return z, slot, phase


@gluon.jit
def last_product(z, empty, slot, SLOTS: gl.constexpr):
    """Return z when the product in flight is there, whose slot is the one before."""
    z = warpgroup_mma_wait(0, deps=[z])
    mbarrier.arrive(empty.index(_before(slot, SLOTS)))
    return z
