"""By which kernel a product is computed: what an entry costs, in multiply-adds that the device could do instead.

Counted from the instruction throughputs of compute capabilities 8.0 and 9.0 (CUDA C++ programming guide): an
exponential or a root takes the time of 8 multiply-adds, and a multiply-add of tensor cores an 8th, in tf32, or a 16th,
in bfloat16.  A byte to memory and back takes that of some 6.  Nothing is taken to overlap.

======================================  ============================================================================
an entry of one atom, ``E``             its function, and the products of its features: 3 for each with two parts
a column one by one, ``U``              2: a multiply-add, and loads of the vector and sums over rows
all columns by a matrix product, ``U``  16 products for each 16 columns, and splitting the entry into parts
a pair, every entry for itself          ``2 (E + U)``
a pair, evaluated once                  ``E + 2 U``, and for a column 8 bytes for each row of a tile of 64 columns
======================================  ============================================================================

Columns are multiplied one by one where that costs less, but never more than 8; pairs are evaluated once where all are
and that costs at most 3/4, for up to 2 columns: the sums of more have no room in the registers of four warps, and
those of eight would have to be exchanged for every tile.  Nothing here depends on numbers of points, so that the block
by which an engine checks itself takes the kernel that the product will.
"""

from __future__ import annotations

from .plan import AtomPlan, Plan

MOST_SINGLE = 8  # right-hand sides that are multiplied one by one at most
MOST_HALVES = 2
_FUNCTION, _AROUND = 8.0, 4.0  # an exponential, a root or a logarithm; norms and factors
_COLUMN, _SLAB = 2.0, 0.75  # of one column: a multiply-add and around it; what is stored of a half
_PAYS = 0.75
_PRODUCTS = {1: 1, 2: 3, 3: 6}  # of parts
_SPLIT = {"float32": 0.0, "tf32": 4.0, "split tf32": 4.0, "bfloat16": 2.0}  # of an entry, for each part


def singly(width: int, arithmetic: tuple[int, str, str]) -> bool:
    """Whether so many right-hand sides, a power of 2, are multiplied one by one and not by a matrix product."""
    parts, product, mode = arithmetic
    whole = 16 * _PRODUCTS[parts] / _speed(product, mode) + parts * _SPLIT[mode]
    return width <= MOST_SINGLE and width * _COLUMN <= max(whole, _COLUMN)


def halves_pay(plan: Plan) -> bool:
    """Whether a product with a symmetric matrix evaluates each pair once."""
    if plan.dot or plan.width > MOST_HALVES:
        return False
    entry = sum(_entry(atom, plan.arithmetic) for atom in plan.atoms)
    used = plan.width * _COLUMN
    return entry + 2 * used + plan.width * _SLAB <= _PAYS * 2 * (entry + used)


def _entry(atom: AtomPlan, arithmetic: tuple[int, str, str]) -> float:
    """Of an atom that is looped: with two chunks, the least that it has."""
    parts, product, mode = arithmetic
    features = atom.k * (2 if atom.looped else 1)
    each = _PRODUCTS[parts] / _speed(product, mode) if atom.dot else 2.0
    functions = {"gauss": 1, "laplace": 1, "rational_quadratic": 3}.get(atom.profile, 2)
    return features * each + functions * _FUNCTION + _AROUND


def _speed(product: str, mode: str) -> int:
    """Multiply-adds of tensor cores in the time of one."""
    return 1 if product == "ieee" else 16 if mode == "bfloat16" else 8
