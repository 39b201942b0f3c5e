"""``Pairs``: two sets of points and a kernel, from which engines compute ``k(x1, x2)``, and parts of them.

Far rows are looked for once for all parts of a matrix, since a device is waited for.  Rows, columns and masks of them
are on the CPU, where tiles are cut; the CPU asks for the values of indices that are on a device only
(:func:`sketchgp.devices.here`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from ..devices import here
from ..distributed import Shards, in_force
from ..fingerprint import Memory
from ..row_sources import RowSource
from .centre import Centre
from .expression import Expression, Known, Prepared, far_points, recognise
from .generic_tiles import evaluate, parameters_as, real
from .tiles import spans

T = TypeVar("T")
_HALF = (torch.bfloat16, torch.float16)
_NUMBERS = 2**24  # of inputs whose distances from the centre are computed at once
_OPTIONS = ("kernel", "names", "engine", "same", "precision", "centre", "shards", "asked", "form")


class Pairs:
    """All pairs of rows of x1 ``(..., n, d)`` and x2 ``(..., m, d)``, and the kernel that is evaluated on them.

    :class:`.KernelMatrix` gives it the interface of a linear operator.

    :param parameters: the kernel's parameters, in the order of ``names``: they are what is differentiated.
    :param kernel: the GPyTorch kernel (one output per input).
    :param names: the names of ``parameters`` in ``kernel.named_parameters()``.
    :param engine: how products are computed (:mod:`sketchgp.operators.engines`).  ``"dense"`` stores the matrix at the
        first product, until torch knows of a change in inputs or parameters (memory shared with numpy is not seen).
        ``"tiled"`` computes it by tiles, ``"fused"`` in one pass on CPUs, ``"triton"`` by fused kernels on CUDA,
        ``"lattice"`` by fast Fourier transforms, ``"near_and_far"`` by non-uniform ones.
        ``"auto"`` takes ``"lattice"`` where the points lie on one and that is faster, and ``"near_and_far"`` where that
        is faster and float32 is the dtype, else ``"fused"`` where numba is installed and that is.  Else it stores the
        matrix where x1 is x2 and it fits the memory budget (``settings.memory_budget``), and otherwise takes
        ``"triton"`` on CUDA and ``"tiled"`` where that does not apply.
    :param same: whether x1 and x2 hold the same points.
    :param precision: precision of distances on tensor cores: ``"float32"``, or ``"tf32"`` with ``engine="triton"``.
    :param centre: origin of the inputs; None for the median of x2, which in a model are the training points.
    :param shards: ranks that products are shared out to (:mod:`.products`); None for those of the present block.
    :param asked: whether the user chose the engine, which must then not be replaced; None unless it is ``"auto"``.
    :param form: expression and batch shape of the kernel where other pairs have found them; None to look at it.
    :ivar tensors: x1, x2 and the parameters.
    :ivar flat_batch: ``()``, or the number of matrices in the batch ``(B,)``.
    :ivar compute_dtype: of the arithmetic: float32 for half-precision inputs and parameters.
    :ivar expression: the kernel as a sum of products of profiles; None where it is called as it is.
    :ivar coincident: ``(2, p)`` rows and columns of pairs that are one point, where x1 is not x2; None where unknown.
    :ivar whole: for some rows and columns of other pairs, those pairs and the rows, ``(r,)``; None for all rows.
    :ivar known: which rows and columns are far from the centre, where it was found for other pairs; else None.
    :ivar layout: which tiles can be left out (:mod:`.nearby`); None for none.
    :ivar memory: values that are remembered until a tensor changes.
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
        form: tuple[Expression | None, torch.Size] | None = None,
    ) -> None:
        self.x1, self.x2, self.parameters = x1, x2, tuple(parameters)
        self.kernel, self.names, self.engine, self.same, self.precision = kernel, names, engine, same, precision
        self.centre = Centre(x2, x1) if centre is None else centre
        self.shards = in_force() if shards is None else shards
        self.asked = engine != "auto" if asked is None else asked
        self.form = (recognise(kernel), kernel.batch_shape) if form is None else form
        self.expression: Expression | None = self.form[0]
        self.coincident: Tensor | None = None
        self.whole: tuple[Pairs, Tensor | None] | None = None
        self.known: Known | None = None
        self.layout: Any = None
        self.stores = True
        self.compared: Shards | None = None
        self.tensors, self.device, self.dtype = (x1, x2, *self.parameters), x1.device, x1.dtype
        for parameter in self.parameters:
            self.dtype = torch.promote_types(self.dtype, parameter.dtype)
        self.compute_dtype = torch.float32 if self.dtype in _HALF else self.dtype
        batches = {*filter(len, (x1.shape[:-2], x2.shape[:-2], self.form[1]))}  # broadcasting takes as long as a tile
        batch = torch.broadcast_shapes(*batches) if batches else ()
        self.batch_shape, self.shape = torch.Size(batch), torch.Size((*batch, x1.shape[-2], x2.shape[-2]))
        self.flat_batch = torch.Size((self.batch_shape.numel(),) if batch else ())
        self.memory = Memory()

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments that make these pairs, beside the tensors."""
        return {name: getattr(self, name) for name in _OPTIONS}

    @property
    def sources(self) -> list[RowSource]:
        """Sides that are read as they are needed; none where x1 and x2 are tensors."""
        sides: tuple[Any, ...] = (self.x1, self.x2)
        return [x for x in sides if isinstance(x, RowSource)]

    def ranks(self) -> Shards | None:
        """Return the ranks that products are shared out to now; None for this process alone."""
        return self.shards if self.shards is not None and self.shards.open else in_force()

    # --- other points, other options ------------------------------------------------------------------------

    def at(self, x1: Tensor, x2: Tensor, same: bool, centre: Centre | None = None) -> Pairs:
        """Return pairs of other points with the same kernel, whose active dimensions were selected."""
        return Pairs(x1, x2, self.parameters, **{**self.options, "same": same, "centre": centre})

    def of(self, tensors: Sequence[Tensor], **options: Any) -> Pairs:
        """Return these pairs with other tensors (x1, x2, parameters) and options."""
        form = None if "kernel" in options else self.form
        return Pairs(tensors[0], tensors[1], tensors[2:], **{**self.options, "form": form, **options})

    # --- what engines compute from --------------------------------------------------------------------------

    def evaluator(self, parameters: Sequence[Tensor]) -> Callable[..., Tensor]:
        """Return the kernel as a function of two blocks of rows, with copies of ``parameters`` in place of its own."""
        values = [real(p) for p in parameters]

        def call(x1: Tensor, x2: Tensor, **options: Any) -> Tensor:
            with parameters_as(self.kernel, self.names, [value.clone() for value in values]):
                return evaluate(self.kernel, x1, x2, self.centre, **options)

        return call

    def prepare(self, tensors: Sequence[Tensor], same: bool) -> Prepared:
        """Return features and coefficients of the recognised kernel, for other values of :attr:`tensors`."""
        assert self.expression is not None
        with parameters_as(self.kernel, self.names, [real(t) for t in tensors[2:]]):
            options = (same, self.batch_shape, self.compute_dtype, self.centre.value, self.known)
            return self.expression.prepare(tensors[0], tensors[1], *options)

    @torch.no_grad()
    def prepared(self) -> Prepared:
        """Return the same from the own tensors, remembered, without autograd."""
        return self.remember("prepared", lambda: self.prepare([t.detach() for t in self.tensors], self.same))

    def remember(self, name: Hashable, make: Callable[[], T]) -> T:
        """Return ``make()``, or what it returned before while none of the tensors has changed."""
        return self.memory.remember(name, make, (self.x1, self.x2), self.parameters)


# --- parts of pairs, and which rows lie far from the centre ---------------------------------------------------------


def far_rows(pairs: Pairs) -> Tensor:
    """Return a mask ``(n,)`` of the rows of x1 that are far for a kernel that is called."""
    return pairs.remember("far rows", lambda: _far_rows(pairs))


def _far_rows(pairs: Pairs) -> Tensor:
    whole, rows = pairs.whole or (None, None)
    if pairs.known is not None:
        first = pairs.known[0]
        return torch.zeros(pairs.shape[-2], dtype=torch.bool) if first is None else first[0]
    if whole is None or whole.sources or (rows is not None and rows.dim() > 1):
        step = max(1, _NUMBERS * pairs.shape[-2] // max(1, pairs.x1.numel()))
        result = [pairs.centre.far(real(pairs.x1[..., some, :])) for some in spans(pairs.shape[-2], step)]
        return torch.cat(result).cpu() if result else torch.zeros(0, dtype=torch.bool)
    mask = far_rows(whole)
    if rows is None:
        return mask
    return mask[here(rows)] if bool(mask.any()) else mask.new_zeros(len(rows))


@torch.no_grad()
def far_sides(pairs: Pairs, *sides: Tensor) -> list[list[Tensor]]:
    """Return masks ``(n,)`` of the far rows of each side ``(n, d)``, for each factor of the kernel.

    A kernel that is called has one mask.  A device is waited for once.
    """
    parameters = [p.detach() for p in pairs.parameters]
    result: list[Tensor] = []
    for x in sides:
        for some in spans(len(x), max(1, _NUMBERS // max(1, x.shape[-1]))):
            rows = x[some]
            if pairs.expression is None:
                result.append(pairs.centre.far(real(rows)).unsqueeze(0))
                continue
            prepared = pairs.at(rows, rows, True, pairs.centre).prepare([rows, rows, *parameters], True)
            masks = [far_points(f.left.square().sum(dim=-1)) for f in prepared.features]
            result.append(torch.stack(masks) if masks else torch.zeros(0, len(rows), dtype=torch.bool, device=x.device))
    both = torch.cat(result, dim=1).cpu()
    return [list(part) for part in both.split([len(x) for x in sides], dim=1)]


def known_of(pairs: Pairs, left: Sequence[Tensor], right: Sequence[Tensor]) -> Known:
    """Return the argument ``known`` of :meth:`.Expression.prepare` from masks of far rows and far columns.

    Far rows of a kernel that is called matter whatever the columns are.
    """
    if pairs.expression is None:
        return list(zip(left, right, strict=True))
    return [(i, j) if bool(i.any()) and bool(j.any()) else None for i, j in zip(left, right, strict=True)]


def part(pairs: Pairs, rows: Tensor | None, columns: Tensor | None) -> Pairs:
    """Return the pairs of x1[rows] and x2[columns].

    :param rows: indices ``(r,)`` or ``(..., r)``; None for all; :param columns: the same of x2.
    """
    x1, x2 = (x if i is None else take(x, i, -2) for x, i in ((pairs.x1, rows), (pairs.x2, columns)))
    result = pairs.at(x1, x2, pairs.same and rows is columns, pairs.centre)
    result.whole = (pairs, rows)
    one_set = all(i is None or i.dim() == 1 for i in (rows, columns))
    if one_set and pairs.expression is not None and not pairs.sources:
        result.remember("prepared", lambda: pairs.prepared().part(rows, columns))
    return result


def take(x: Tensor, indices: Tensor, dim: int) -> Tensor:
    """Return rows (``dim`` is -2) or columns (-1) of matrices ``(..., n, m)``.

    :param indices: ``(r,)``, or ``(..., r)``, one set for each matrix.
    """
    if indices.dim() == 1:
        return x.index_select(dim, indices)
    batch = torch.broadcast_shapes(x.shape[:-2], indices.shape[:-1])
    x, index = x.expand(*batch, *x.shape[-2:]), indices.unsqueeze(-3 - dim)
    size = (indices.shape[-1], x.shape[-1]) if dim == -2 else (x.shape[-2], indices.shape[-1])
    return x.gather(dim, index.expand(*batch, *size))
