"""What a Triton kernel of this package is: all that its source text depends on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AtomPlan:
    """How one atom is computed.

    :ivar profile: its name, as of the functions in ``kernels``.
    :ivar dot: whether distances come from a matrix product, else from differences feature by feature.
    :ivar l1: whether absolute differences are summed.
    :ivar k: features in a chunk.
    :ivar looped: whether there may be more than one chunk.
    :ivar alpha: whether there is a shape parameter.
    """

    profile: str
    dot: bool
    l1: bool
    k: int
    looped: bool
    alpha: bool


@dataclass(frozen=True)
class Plan:
    """What the source depends on.

    :ivar terms: the factors of each term, as of an ``Expression``.
    :ivar arithmetic: parts of a number (1 or 2), ``input_precision`` of the products, the mode of ``high``.
    :ivar same: whether pairs on the diagonal are at distance 0.
    :ivar width: right-hand sides in a block.
    :ivar dot: whether they are multiplied by a matrix product, else one by one.
    :ivar looped: in a gradient, whether there may be more chunks of them than one.
    :ivar targets: in a gradient, atoms whose features get one, with the number of features in a block.
    :ivar sums: in a gradient, whether to compute those of coefficients and shape parameters.
    """

    atoms: tuple[AtomPlan, ...]
    terms: tuple[tuple[int, ...], ...]
    arithmetic: tuple[int, str, str]
    same: bool
    width: int
    dot: bool
    looped: bool = False
    targets: tuple[tuple[int, int], ...] = ()
    sums: bool = False

    @property
    def parts(self) -> int:
        return self.arithmetic[0]

    @property
    def shapes(self) -> list[int]:
        """Atoms with a shape parameter."""
        return [a for a, atom in enumerate(self.atoms) if atom.alpha]

    @property
    def more(self) -> list[str]:
        """Suffix of the name of the low part, where there is one."""
        return ["l"][: self.parts - 1]

    def both(self, name: str) -> str:
        """Return the two arguments that hold the parts of ``name``; a single part is passed twice."""
        return f"{name}, {name}{'l' if self.parts > 1 else ''}"

    def loads(self, name: str, load: str) -> list[str]:
        """Statements that load the parts.

        :param load: the expression, with ``{}`` where the pointer's name ends.
        """
        return [f"{name}{end} = {load.format(end)}" for end in ["", *self.more]]
