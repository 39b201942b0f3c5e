"""``Pairs``: two sets of points and a kernel, from which engines compute ``k(x1, x2)``."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from ..distributed import Shards, in_force
from ..row_sources import RowSource
from .centre import Centre
from .expression import Expression, Known, Prepared, recognise
from .generic_tiles import evaluate, parameters_as, real
from .unchanged import Memory

T = TypeVar("T")
_HALF = (torch.bfloat16, torch.float16)
_OPTIONS = ("kernel", "names", "engine", "same", "precision", "centre", "shards", "asked")


class Pairs:
    """All pairs of rows of x1 ``(..., n, d)`` and x2 ``(..., m, d)``, and the kernel that is evaluated on them.

    :class:`.KernelMatrix` gives it the interface of a linear operator.

    :param parameters: the kernel's parameters, in the order of ``names``: they are what is differentiated.
    :param kernel: the GPyTorch kernel (one output per input).
    :param names: the names of ``parameters`` in ``kernel.named_parameters()``.
    :param engine: how products are computed (:mod:`sketchgp.operators.engines`).  ``"dense"`` stores the matrix at the
        first product, until torch knows of a change in inputs or parameters (memory shared with numpy is not seen).
        ``"tiled"`` computes it by tiles, ``"keops"`` and ``"triton"`` by the fused kernels of those packages.
        ``"auto"`` stores it where x1 is x2 and it fits the memory budget (``settings.memory_budget``), and otherwise
        takes ``"triton"`` on CUDA and ``"tiled"`` where that does not apply.
    :param same: whether x1 and x2 hold the same points.
    :param precision: precision of distances on tensor cores: ``"float32"``, or ``"tf32"`` with ``engine="triton"``.
    :param centre: origin of the inputs; None for the median of x2, which in a model are the training points.
    :param shards: ranks that products are shared out to (:mod:`.products`); None for those of the present block.
    :param asked: whether the user chose the engine, which must then not be replaced; None unless it is ``"auto"``.
    :ivar expression: the kernel as a sum of products of profiles; None where it is called as it is.
    :ivar coincident: ``(2, p)`` rows and columns of pairs that are one point, where x1 is not x2; None where unknown.
    :ivar whole: for some rows and columns of other pairs, those pairs and the rows, ``(r,)``; None for all rows.
    :ivar known: which rows and columns are far from the centre, where it was found for other pairs; else None.
    :ivar layout: which tiles can be left out (:mod:`.nearby`); None for none.
    :ivar stores: whether the matrix may be stored; False once memory ran out.
    :ivar compared: the ranks that were found to hold the same pairs.
    """

    def __init__(
        self,
        x1: Tensor,
        x2: Tensor,
        parameters: Sequence[Tensor],
        *,
        kernel: Kernel,
        names: tuple[str, ...],
        engine: str = "auto",
        same: bool = False,
        precision: str = "float32",
        centre: Centre | None = None,
        shards: Shards | None = None,
        asked: bool | None = None,
    ) -> None:
        self.x1, self.x2, self.parameters = x1, x2, tuple(parameters)
        self.kernel, self.names, self.engine, self.same, self.precision = kernel, names, engine, same, precision
        self.centre, self.shards = Centre(x2) if centre is None else centre, in_force() if shards is None else shards
        self.asked = engine != "auto" if asked is None else asked
        self.expression: Expression | None = recognise(kernel)
        self.coincident: Tensor | None = None
        self.whole: tuple[Pairs, Tensor | None] | None = None
        self.known: Known | None = None
        self.layout: Any = None
        self.stores = True
        self.compared: Shards | None = None
        self.dtype = x1.dtype
        for parameter in self.parameters:
            self.dtype = torch.promote_types(self.dtype, parameter.dtype)
        batch = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2], kernel.batch_shape)
        self.shape = torch.Size((*batch, x1.shape[-2], x2.shape[-2]))
        self._memory = Memory()

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments that make these pairs, beside the tensors."""
        return {name: getattr(self, name) for name in _OPTIONS}

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """x1, x2 and the parameters."""
        return (self.x1, self.x2, *self.parameters)

    @property
    def sources(self) -> list[RowSource]:
        """Sides that are read as they are needed; none where x1 and x2 are tensors."""
        sides: tuple[Any, ...] = (self.x1, self.x2)
        return [x for x in sides if isinstance(x, RowSource)]

    @property
    def device(self) -> torch.device:
        return self.x1.device

    @property
    def batch_shape(self) -> torch.Size:
        return self.shape[:-2]

    @property
    def flat_batch(self) -> torch.Size:
        """``()``, or the number of matrices in the batch ``(B,)``."""
        return torch.Size((self.batch_shape.numel(),)) if len(self.batch_shape) else torch.Size()

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of the arithmetic: float32 for half-precision inputs and parameters."""
        return torch.float32 if self.dtype in _HALF else self.dtype

    def ranks(self) -> Shards | None:
        """Return the ranks that products are shared out to now; None for this process alone."""
        return self.shards if self.shards is not None and self.shards.open else in_force()

    # --- other points, other options ------------------------------------------------------------------------

    def at(self, x1: Tensor, x2: Tensor, same: bool, centre: Centre | None = None) -> Pairs:
        """Return pairs of other points with the same kernel, whose active dimensions were selected."""
        return Pairs(x1, x2, self.parameters, **{**self.options, "same": same, "centre": centre})

    def of(self, tensors: Sequence[Tensor], **options: Any) -> Pairs:
        """Return these pairs with other tensors (x1, x2, parameters) and options."""
        return Pairs(tensors[0], tensors[1], tensors[2:], **{**self.options, **options})

    # --- what engines compute from --------------------------------------------------------------------------

    def evaluator(self, parameters: Sequence[Tensor]) -> Callable[..., Tensor]:
        """Return the kernel as a function of two blocks of rows, with copies of ``parameters`` in place of its own."""
        values = [real(p) for p in parameters]

        def call(x1: Tensor, x2: Tensor, **options: Any) -> Tensor:
            with parameters_as(self.kernel, self.names, [value.clone() for value in values]):
                return evaluate(self.kernel, x1, x2, self.centre, **options)

        return call

    def prepare(self, tensors: Sequence[Tensor], same: bool, known: Known | None = None) -> Prepared:
        """Return features and coefficients of the recognised kernel, for other values of :attr:`tensors`."""
        assert self.expression is not None
        with parameters_as(self.kernel, self.names, [real(t) for t in tensors[2:]]):
            known = self.known if known is None else known
            options = (same, self.batch_shape, self.compute_dtype, self.centre.value(), known)
            return self.expression.prepare(tensors[0], tensors[1], *options)

    @torch.no_grad()
    def prepared(self) -> Prepared:
        """Return the same from the own tensors, remembered, without autograd."""
        return self.remember("prepared", lambda: self.prepare([t.detach() for t in self.tensors], self.same))

    def remember(self, name: Hashable, make: Callable[[], T]) -> T:
        """Return ``make()``, or what it returned before while none of the tensors has changed."""
        return self._memory.remember(name, make, (self.x1, self.x2), self.parameters)

    def remembers(self, name: Hashable) -> bool:
        """Return whether a value of that name is there, which may be outdated."""
        return name in self._memory
