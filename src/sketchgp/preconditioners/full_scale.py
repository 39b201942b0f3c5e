"""Near and far in one preconditioner: a low-rank factor, and Vecchia's approximation of what it leaves.

With ``F F^T`` a low-rank part of K, the rest ``T = K - F F^T + D`` is short-ranged.  In a random order each row i is
regressed on m earlier rows N(i) of it,

    b_i = T_NN^-1 T_Ni,    v_i = T_ii - T_iN b_i,    G = V^-1/2 (I - B),    T^-1 ~ M = G^T G.

Then P is near ``A = K + D`` in both ranges, and with ``C = I + F^T M F``

    P = F F^T + M^-1,    P^-1 = M - M F C^-1 F^T M,    log det P = log det C + sum log v_i.

Without F, ``log det P >= log det A`` and ``tr(P^-1 A) = n``: a variance falls with what it is conditioned on.

The gradient of a function of P, of samples ``z = F u + G^-1 u'`` and of log det P, given as ``Y diag(w) Y^T`` for P, g
for the samples and h for the determinant, is that of F alone, ``2 Y diag(w) Y^T F + g u^T + 2 h P^-1 F``, and of

    h (sum log v_i + |G E|^2) - sum_j c_j^T G a_j,    E E^T = F C^-1 F^T,
    a = (M^-1 Y, G^-1 u'),    c = (2 w G^-T Y, G^-T g),

with E, a and c held fixed, which is taken by blocks of rows.

References: Vecchia, "Estimation and model identification for continuous spatial processes" (1988); Gyger, Furrer,
Sigrist, "Iterative methods for full-scale Gaussian process approximations for large spatial data" (arXiv:2405.14492).
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor

from ..checks import count, settle
from ..checks import seed as seed_check
from ..errors import InputError, NumericalError
from ..operators import KernelMatrix
from ..operators.access import Access, block, element, evaluated_accurately, has_entries, index_within, terms
from ..operators.substitution import cholesky_solve
from ..operators.tiles import spans, thin_product
from ..random_streams import generator
from ..space import Factor, ShardedRows, Space, held_rows, space_of, square_norms, whole
from .base import Preconditioner, Selection, noise_of_each
from .low_rank import LowRank, pivoted_factor, shifted_cholesky
from .rank import Costs, RankByCost
from .rpcholesky import rpcholesky

_ENTRIES = 2**22  # entries of blocks of neighbours held at once
_NEIGHBORS = 32
_COLUMNS = 16  # of F that M is applied to at once
_FEATURES = 6  # dimension up to which a k-d tree finds neighbours
_MORE, _LEAST = 2.5, 10  # candidates of a tree for each neighbour, and more: of a row's, half or more come before it
_LOOKED_AT, _STILL = 128, 0.8  # rows whose neighbours are compared with the best ones, and the share they must have


@dataclass(frozen=True)
class Neighbors:
    """Rows that are conditioned on, held fixed while hyperparameters move.

    :ivar order: ``(n,)``; :ivar near: ``(n, m)`` places in the order, each before that of its row, or equal to it where
        a row has fewer neighbours.
    """

    order: Tensor
    near: Tensor

    def blocks(self, rank: int, within: slice) -> list[slice]:
        """Return spans of some rows whose blocks of neighbours are held at once."""
        m = self.near.shape[1] + 1
        return list(spans(within.stop, max(1, _ENTRIES // (m * max(rank, m))), within.start))

    def rows(self, span: slice) -> tuple[Tensor, Tensor]:
        """Return indices ``(b, m + 1)`` of some rows and of their neighbours, and which exist."""
        own = torch.arange(span.start, span.stop, device=self.near.device).unsqueeze(1)
        known = torch.cat([torch.ones_like(own, dtype=torch.bool), self.near[span] < own], dim=1)
        return self.order[torch.cat([own, self.near[span]], dim=1)], known

    def matrix(self, values: Tensor, transposed: bool) -> Tensor:
        """Return the sparse matrix ``(n, n)`` with ``values`` ``(n, m)`` in the columns of neighbours."""
        n, m = self.near.shape
        kind = torch.int32 if n * m < 2**31 else torch.int64  # the former is what MKL and cuSPARSE are fast with
        index, ends = self.near.flatten().to(kind), torch.arange(n + 1, device=values.device) * m
        if transposed:
            index, places = index.sort(stable=True)
            ends = torch.searchsorted(index, torch.arange(n + 1, device=values.device, dtype=kind))
            index, values = places // max(m, 1), values.flatten()[places]
        parts = ends.to(kind), index.to(kind), values.flatten()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
            return torch.sparse_csr_tensor(*parts, (n, n), check_invariants=False)


class FullScaleFactor:
    """P of one matrix in float64: its inverse, determinant, samples and their derivatives.

    Set-up costs ``n m^2 (m + r)`` operations; memory ``3 n m`` numbers beside F and M F.  Ranks that share out F share
    out M F and the regressions, too, and each holds all of B.

    :param operator: K, a sum of kernel matrices and dense ones in float64, ``(n, n)`` or a batch of them.
    :param noise: ``(n,)`` float64, D, or a batch to which that of K is broadcast.
    :param factor: F, ``(n, r)`` with ``F F^T <= K``; r may be 0.
    :param neighbors: order and N.
    :param pivots: ``(r,)``, which F is made of; None where no derivative is wanted.
    :param out_dtype: dtype of determinants and samples.
    :param index: which matrix of the batch.
    :raises NumericalError: where P is not positive definite in float64.

    :ivar root: the lower Cholesky factor of C, ``(r, r)``.
    :ivar variances: v, ``(n,)``, in the order.
    :ivar weighted_features: ``M F``, ``(n, r)``.
    :ivar tensors: what P is differentiated in: the tensors of K, and the noise.
    """

    def __init__(
        self,
        operator: Any,
        noise: Tensor,
        factor: Factor,
        neighbors: Neighbors,
        pivots: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        index: tuple[int, ...] = (),
    ) -> None:
        self.factor, self.neighbors, self.pivots, self.rank = factor, neighbors, pivots, factor.shape[-1]
        self.index, self.batch_shape = index, torch.Size()
        self._begin(operator, noise, out_dtype)
        self._compute()

    @classmethod
    def of(cls, operator: Any, noise: Tensor, factor: Tensor, neighbors: int = 16, seed: int = 0) -> FullScaleFactor:
        """Return P of a kernel matrix with its nearest neighbours, without gradients.

        :param neighbors: m; :param seed: of the order.
        """
        noise, factor = noise.detach().to(torch.float64), factor.detach().contiguous()  # whose rows are read
        matrix = evaluated_accurately(operator.detach())
        return cls(matrix, noise, factor, neighbors_of(Access(operator), factor, noise, neighbors, seed))

    def _begin(self, operator: Any, noise: Tensor, out_dtype: torch.dtype | None) -> None:
        self.operator, self.dtype = operator, out_dtype or noise.dtype
        self.tensors: tuple[Tensor, ...] = (*operator.representation(), noise)
        self.diagonal_part = noise[self.index]

    def detached(self, out_dtype: torch.dtype | None) -> FullScaleFactor:
        """Return the same without gradients, shown as ``out_dtype``."""
        copy = object.__new__(FullScaleFactor)
        copy.__dict__.update(self.__dict__)
        copy._begin(self.operator.detach(), self.tensors[-1].detach(), out_dtype)
        return copy

    def _made_of(self, tensors: Sequence[Tensor]) -> tuple[Any, Tensor]:
        """Return K and D, each of one matrix, from those of the batch."""
        return element(self.operator.representation_tree()(*tensors[:-1]), self.index), tensors[-1][self.index]

    def _regressions(
        self, tensors: Sequence[Tensor], factor: Tensor, rows: slice
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the regressions of some rows on their neighbours, differentiable where autograd is on.

        :param tensors: those of the batch.
        :returns: indices ``(b, m + 1)`` of rows and neighbours, F there, weights ``(b, m)`` and variances ``(b,)``.
        """
        matrix, noise = self._made_of(tensors)
        index, known = self.neighbors.rows(rows)
        part = factor[index].requires_grad_(torch.is_grad_enabled())
        weights, variances = regression(block(matrix, index, index), part, noise[index], known)
        return index, part, weights, torch.maximum(variances, noise[index[:, 0]])

    @torch.no_grad()
    def _compute(self) -> None:
        space, factor, tensors = space_of(self.factor), whole(self.factor), [t.detach() for t in self.tensors]
        inner = factor.new_zeros(self.rank, self.rank)
        made = factor.new_empty(len(factor), self.neighbors.near.shape[1] + 1)
        for rows in self.neighbors.blocks(self.rank, space.span):
            _, part, weights, variances = self._regressions(tensors, factor, rows)
            half = left_of(part, weights) / variances.sqrt().unsqueeze(1)
            inner += half.mT @ half
            made[rows] = torch.cat([variances.unsqueeze(1), weights], dim=1)
        values = space.whole(space.own(made))
        self.variances = values[:, 0].clone()
        self._regress, self._turned = (self.neighbors.matrix(values[:, 1:], turned) for turned in (False, True))
        self._scale = self.variances.rsqrt().unsqueeze(1)
        self.weighted_features: Any = space.factor(space.own(self._by_columns(self._local_inverse, factor)))
        inner = space.total(inner)
        inner.diagonal().add_(1)
        self.root, failed = torch.linalg.cholesky_ex(inner)
        if int(failed) or not bool(torch.isfinite(self._scale).all() & torch.isfinite(self.root).all()):
            raise NumericalError(
                "The full-scale preconditioner is not positive definite in float64; check the noise (it must be "
                "positive) and the inputs for NaN.",
                see="not-definite",
            )

    # --- G, its inverse and what they make up -----------------------------------------------------------------

    def _by_columns(self, of: Callable[[Tensor], Tensor], vectors: Tensor) -> Tensor:
        """Return a function of vectors ``(n, t)``, of which each rank that has a part of F computes some columns."""
        if not isinstance(self.factor, ShardedRows):
            return torch.cat([of(part) for part in vectors.split(_COLUMNS, dim=1)], dim=1)
        shards, t = self.factor.shards, vectors.shape[1]
        return shards.gather(of(vectors[:, shards.span(t)]), t, dim=-1)

    def _whitened(self, vectors: Tensor) -> Tensor:
        """Return ``G v``, in the order, for v ``(n, t)``."""
        rest = vectors[self.neighbors.order]
        return rest.sub_(self._regress @ rest).mul_(self._scale)

    def _spread(self, ordered: Tensor) -> Tensor:
        return torch.empty_like(ordered).index_copy_(0, self.neighbors.order, ordered)

    def _local_inverse(self, vectors: Tensor) -> Tensor:
        """Return ``M v``."""
        scaled = self._whitened(vectors).mul_(self._scale)
        return self._spread(scaled.sub_(self._turned @ scaled))

    def _coloured(self, ordered: Tensor) -> Tensor:
        """Return ``G^-1 u`` for u in the order."""
        return self._spread(_nilpotent(self._regress, ordered / self._scale))

    def _coloured_back(self, vectors: Tensor) -> Tensor:
        """Return ``G^-T v``, in the order."""
        return _nilpotent(self._turned, vectors[self.neighbors.order]) / self._scale

    def apply_inverse(self, rhs: Tensor) -> Tensor:
        """Return ``P^-1 rhs`` for rhs ``(..., n, t)``, computed in float64, in the dtype of rhs."""
        return self.apply_inverse_to_rows(rhs, Space(rhs.shape[-2]))

    @torch.no_grad()
    def apply_inverse_to_rows(self, own: Tensor, space: Space) -> Tensor:
        """Return the rows of ``P^-1 rhs`` that a rank holds, from those of rhs, ``(..., h, t)``; gathers rhs."""
        rows = own.movedim(-2, 0).to(torch.float64)  # those of a batch stand side by side
        columns = rows.flatten(1)
        local = space.own(self._local_inverse(space.whole(columns)))
        if self.rank:
            features = held_rows(self.weighted_features) if space.shared else self.weighted_features
            inner = cholesky_solve(space.total(thin_product(features.mT, columns)), self.root)
            local = local - thin_product(features, inner)
        return local.reshape(rows.shape).movedim(0, -2).to(own.dtype)

    @cached_property
    def local_diagonal(self) -> Tensor:
        """The diagonal of M, ``(n,)``."""
        squares = self._scale.squeeze(1).square()
        held = self._turned.crow_indices(), self._turned.col_indices(), self._turned.values().square()
        turned = torch.sparse_csr_tensor(*held, self._turned.shape, check_invariants=False)
        return self._spread(squares + (turned @ squares.unsqueeze(1)).squeeze(1))

    @torch.no_grad()
    def inverse_diagonal(self) -> Tensor:
        """Return the diagonal of P^-1, ``(n,)``, positive."""
        near, features = self.local_diagonal, held_rows(self.weighted_features).mT
        half = torch.linalg.solve_triangular(self.root, features, upper=False).mT
        known = square_norms(space_of(self.factor).factor(half))
        return (near - known).clamp(min=torch.finfo(near.dtype).eps * near)

    def log_determinant(self) -> Tensor:
        """Return ``log det P``; :meth:`sampled_derivative` has its gradient."""
        return (2 * self.root.diagonal().log().sum() + self.variances.log().sum()).to(self.dtype)

    def unexplained(self, prior: Tensor) -> Tensor:
        """Return what F and the neighbours leave of prior variances ``(n,)``, at least zero."""
        return (self._spread(self.variances).to(prior.dtype) - self.diagonal_part).clamp(min=0)

    @torch.no_grad()
    def sample(self, low_rank_noise: Tensor, full_noise: Tensor) -> Tensor:
        """Return N(0, P) samples ``(n, s)`` from normal numbers ``(r, s)`` and ``(n, s)``."""
        return (self.factor @ low_rank_noise + self._by_columns(self._coloured, full_noise)).to(self.dtype)

    # --- derivatives ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def sampled_derivative(self, tensors: tuple[Tensor, ...], *values: Tensor) -> tuple[Tensor | None, ...]:
        """Return gradients for :attr:`tensors`; see :meth:`.LowRankPlusDiagonal.sampled_derivative`."""
        live = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
        wanted = [t for t in live if t.requires_grad]
        if not wanted:
            return (None,) * len(live)
        for one in wanted:  # of a rank without rows, too
            one.grad = torch.zeros_like(one)
        y, w, g, low_rank_noise, full_noise, h = (v.to(torch.float64) for v in values)
        space, factor = space_of(self.factor), whole(self.factor)
        own, of_factor = space.span, torch.zeros_like(factor)
        of_factor[own] = 2 * (y * w)[own] @ (y.mT @ factor) + g[own] @ low_rank_noise.mT
        # P^-1 F = M F C^-1
        of_factor[own] += 2 * h * cholesky_solve(held_rows(self.weighted_features).mT, self.root).mT
        back = self._by_columns(self._coloured_back, torch.cat([y, g], dim=1))
        count, t = y.shape[1], back.shape[1]
        a = self._by_columns(self._coloured, torch.cat([back[:, :count], full_noise], dim=1))
        e = torch.linalg.solve_triangular(self.root, factor.mT, upper=False).mT
        c, vectors = torch.cat([2 * w * back[:, :count], back[:, count:]], dim=1), torch.cat([a, e], dim=1)
        with torch.enable_grad():
            for rows in self.neighbors.blocks(self.rank, own):
                index, part, b, v = self._regressions(live, factor, rows)
                white = left_of(vectors[index], b) / v.sqrt().unsqueeze(1)
                value = h * (v.log().sum() + white[:, t:].square().sum()) - (c[rows] * white[:, :t]).sum()
                value.backward(inputs=[part, *wanted])
                assert part.grad is not None
                of_factor.index_add_(0, index.flatten(), part.grad.flatten(0, 1))
            if self.rank:
                self._of_pivots(live, wanted, space.total(of_factor), own)
        return tuple(None if t.grad is None else space.total(t.grad) for t in live)

    def _of_pivots(self, live: list[Tensor], wanted: list[Tensor], of_factor: Tensor, own: slice) -> None:
        """Add what F is made of, ``F = K(:, S) L^-T`` with ``L L^T = K_SS``, by blocks of rows, from its gradient.

        :param own: rows of F, of which that is added.
        """
        pivots = self.pivots
        assert pivots is not None
        block = Access(self._made_of(live)[0]).block(pivots, pivots)
        live_root = shifted_cholesky(block, torch.finfo(block.dtype).eps)
        root = live_root.detach().requires_grad_()
        root.grad = torch.zeros_like(root)
        everything = torch.arange(len(of_factor), device=of_factor.device)
        for rows in spans(own.stop, max(1, _ENTRIES // len(pivots)), own.start):
            part = Access(self._made_of(live)[0]).block(everything[rows], pivots)
            factor = torch.linalg.solve_triangular(root, part.mT, upper=False)
            (factor * of_factor[rows].mT).sum().backward(inputs=[root, *wanted])
        live_root.backward(root.grad, inputs=wanted)


class FullScaleBatch:
    """P of each matrix of a batch, by :class:`FullScaleFactor`.

    Vectors have the dimensions of the batch, to which others are broadcast, and may have more in front.

    :param parts: of all matrices, in order; :param batch_shape: of the batch.
    """

    def __init__(self, parts: list[FullScaleFactor], batch_shape: torch.Size) -> None:
        self.parts, self.batch_shape = parts, batch_shape
        self.rank, self.dtype, self.tensors = parts[0].rank, parts[0].dtype, parts[0].tensors
        self.diagonal_part = self.tensors[-1]

    def detached(self, out_dtype: torch.dtype | None) -> FullScaleBatch:
        """Return the same without gradients, shown as ``out_dtype``."""
        return FullScaleBatch([part.detached(out_dtype) for part in self.parts], self.batch_shape)

    def _each(self, of: Callable[..., Tensor], *vectors: Tensor, dims: int = 2) -> Tensor:
        """Return the batch of a function's values.

        :param of: function of a part and its vectors; :param dims: how many dimensions these have.
        """
        batch = torch.broadcast_shapes(self.batch_shape, *(v.shape[:-dims] for v in vectors))
        front = len(batch) - len(self.batch_shape)
        vectors = tuple(v.expand(*batch, *v.shape[-dims:]) for v in vectors)
        values = [of(part, *(v[(slice(None),) * front + part.index] for v in vectors)) for part in self.parts]
        return torch.stack(values, dim=front).reshape(*batch, *values[0].shape[front:])

    def apply_inverse(self, rhs: Tensor) -> Tensor:
        """Return ``P^-1 rhs`` for rhs ``(..., n, t)``."""
        return self._each(FullScaleFactor.apply_inverse, rhs)

    def apply_inverse_to_rows(self, own: Tensor, space: Space) -> Tensor:
        """Return the rows of ``P^-1 rhs`` that a rank holds, from those of rhs, ``(..., h, t)``."""
        return space.own(self.apply_inverse(space.whole(own)))

    def log_determinant(self) -> Tensor:
        """Return ``log det P`` of each matrix."""
        return self._each(FullScaleFactor.log_determinant)

    def unexplained(self, prior: Tensor) -> Tensor:
        """Return what F and the neighbours leave of prior variances ``(..., n)``, at least zero."""
        return self._each(FullScaleFactor.unexplained, prior, dims=1)

    def sample(self, low_rank_noise: Tensor, full_noise: Tensor) -> Tensor:
        """Return N(0, P) samples ``(..., n, s)`` from normal numbers ``(..., r, s)`` and ``(..., n, s)``."""
        return self._each(FullScaleFactor.sample, low_rank_noise, full_noise)

    def sampled_derivative(self, tensors: tuple[Tensor, ...], *values: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of all matrices, added up; see :meth:`.LowRankPlusDiagonal.sampled_derivative`."""
        each = (part.sampled_derivative(tensors, *(v[part.index] for v in values)) for part in self.parts)
        return tuple(None if one[0] is None else reduce(torch.add, one) for one in zip(*each, strict=True))


def left_of(rows: Tensor, weights: Tensor) -> Tensor:
    """Return the first rows ``(b, k)`` of blocks ``(b, m + 1, k)`` less their regression on the others."""
    return rows[:, 0] - (weights.unsqueeze(1) @ rows[:, 1:]).squeeze(1)


def regression(block: Tensor, part: Tensor, noise: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """Regress the first row of each block on the others: weights ``(b, m)`` and variances ``(b,)``; differentiable.

    :param block: of K, ``(b, m + 1, m + 1)``; :param part: rows of F, ``(b, m + 1, r)``.
    :param noise: ``(b, m + 1)``; :param known: which rows count.
    """
    rest = torch.baddbmm(block.to(part.dtype), part, part.mT, alpha=-1)  # of some kernels it is in float32
    rest.diagonal(dim1=1, dim2=2).add_(noise)
    if not bool(known.all()):
        rest = torch.where(known.unsqueeze(1) & known.unsqueeze(2), rest, torch.diag_embed((~known).to(rest.dtype)))
    root, failed = torch.linalg.cholesky_ex(rest[:, 1:, 1:])
    if bool(failed.any()):  # rounding has made some blocks indefinite: their rows are taken without neighbours
        alone = torch.diag_embed(rest.diagonal(dim1=1, dim2=2).clamp(min=noise))
        rest = torch.where((failed == 0)[:, None, None], rest, alone)
        root = torch.linalg.cholesky(rest[:, 1:, 1:])
    cross = rest[:, 1:, :1]
    weights = cholesky_solve(cross, root)
    return weights.squeeze(2), rest[:, 0, 0] - (weights * cross).sum(dim=(1, 2))


def _nilpotent(matrix: Tensor, rhs: Tensor) -> Tensor:
    """Return ``(I - B)^-1 rhs`` for a strictly triangular B.

    ``x <- rhs + B x`` is constant after as many steps as the longest chain of neighbours has rows.
    """
    x = rhs
    while not torch.allclose(following := rhs + matrix @ x, x, rtol=0, atol=0, equal_nan=True):
        x = following
    return x


def _of_batch(values: Any, index: tuple[int, ...]) -> Any:
    """Return an element of a batch, or the argument where there is no batch."""
    return values[index] if index else values


# --- neighbours -----------------------------------------------------------------------------------------------


def features_of(operator: Any, most: int = _FEATURES) -> Tensor | None:
    """Return inputs ``(n, p)`` whose distances order the entries of K, or None where there are none of few dimensions.

    They are the inputs over their lengthscales, of all the kernels that K is a sum or product of.  There are none, too,
    where a squared distance may be no number.
    """
    found: list[Tensor] = []
    for _, part in terms(operator):
        if not isinstance(part, KernelMatrix) or part.expression is None or part.pairs.sources:
            return None
        prepared = part.pairs.prepared().features
        if not prepared or any(f.weight is None for f in prepared):
            return None
        found += [f.left for f in prepared]
    if sum(x.shape[-1] for x in found) > most or not all(bool((x.abs() < 1e150).all()) for x in found):
        return None
    return torch.cat(found, dim=-1)


class Tree:
    """A k-d tree of points ``(n, p)`` of few dimensions p."""

    def __init__(self, points: Tensor) -> None:
        from scipy.spatial import cKDTree  # a tenth of the time of importing the package

        self._tree = cKDTree(points.double().cpu().numpy(), balanced_tree=False)

    def nearest(self, points: Tensor, count: int) -> Tensor:
        """Return indices ``(m, count)`` of the nearest points of the tree, in order, of each of some ``(m, p)``."""
        wanted, threads = [*range(1, count + 1)], torch.get_num_threads()
        found = self._tree.query(points.double().cpu().numpy(), k=wanted, workers=threads)[1]
        return torch.from_numpy(found).to(points.device)


@torch.no_grad()
def neighbors_of(matrix: Access, factor: Factor, noise: Tensor, count: int, seed: int = 0) -> Neighbors:
    """Return a random order, and the rows before each one that matter most to it.

    In few dimensions these are the nearest by distance over lengthscales, by a k-d tree.  Elsewhere they have the
    largest correlation in ``K - F F^T + D``, of all rows before; ranks that share out F share out the search.

    :param factor: F, ``(n, r)``; :param noise: ``(n,)``; :param count: m.
    :param seed: of the order.
    """
    k = matrix.n
    order = torch.randperm(k, generator=generator(seed, "order of a full-scale approximation")).to(matrix.device)
    count = min(count, k - 1)
    near = torch.arange(k, device=order.device).unsqueeze(1).repeat(1, count)
    if not count:
        return Neighbors(order, near)
    features = features_of(matrix.source)
    if features is not None:
        points, start, stop = features[order], 0, min(k, 4 * count)
        while start < k:
            wanted = min(stop, int(_MORE * count) + _LEAST if start else stop)
            _keep(near, Tree(points[:stop]).nearest(points[start:stop], wanted), start)
            start, stop = stop, min(k, 2 * stop)
        return Neighbors(order, near)
    correlations, space = _Correlations(matrix, factor, noise, order), space_of(factor)
    for rows in spans(space.span.stop, max(1, _ENTRIES // k), space.span.start):
        tile = correlations(torch.arange(rows.start, rows.stop, device=order.device), rows.stop)
        _keep(near, tile.topk(min(count, rows.stop), dim=1).indices, rows.start)
    return Neighbors(order, space.whole(near[space.span]))


class _Correlations:
    """Sizes of the correlations of rows with earlier ones in ``K - F F^T + D``, up to a factor for each row."""

    def __init__(self, matrix: Access, factor: Factor, noise: Tensor, order: Tensor) -> None:
        rest = (matrix.diagonal() - square_norms(factor)).clamp(min=0) + noise
        self.matrix, self.order, self.scale = matrix, order, rest.rsqrt().to(matrix.source.dtype)[order]
        self.part = whole(factor)[order].to(self.scale.dtype)

    def __call__(self, rows: Tensor, stop: int) -> Tensor:
        """Return those ``(b, stop)`` of the rows at places ``(b,)`` in the order; -1 for rows that are no earlier."""
        tile = self.matrix.block(self.order[rows], self.order[:stop]).to(self.scale.dtype)
        tile.addmm_(self.part[rows], self.part[:stop].mT, alpha=-1).abs_().mul_(self.scale[:stop])
        return tile.masked_fill_(torch.arange(stop, device=rows.device) >= rows.unsqueeze(1), -1)


def _keep(near: Tensor, candidates: Tensor, start: int) -> None:
    """Keep the first candidates ``(b, c)`` that come before their row, of which the first is ``start``."""
    rows = torch.arange(start, start + len(candidates), device=near.device).unsqueeze(1)
    earlier = candidates < rows
    first = (~earlier).to(torch.int8).argsort(dim=1, stable=True)[:, : near.shape[1]]
    chosen = torch.where(earlier.gather(1, first), candidates.gather(1, first), rows)
    near[start : start + len(candidates), : chosen.shape[1]] = chosen


# --- the choice -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FullScale(Preconditioner):
    """Pivots of RPCholesky, and regressions of each row on its neighbours: near and far in one preconditioner.

    A low-rank factor does not help where the kernel is short-ranged: maps, rough kernels, short lengthscales.
    Regressions on neighbours do.  Set-up costs ``n m^2 (m + r)`` operations and the search for neighbours, which takes
    a k-d tree for up to six features, and half a product with K and ``n^2 r`` operations elsewhere.  A solve costs
    ``n (2 m + 2 r)`` operations an iteration.  Memory: ``n (3 m + 2 r)`` float64 numbers.

    Reference: :mod:`sketchgp.preconditioners.full_scale`.

    :param rank: r, pivots; 0 is Vecchia's approximation alone; None chooses it by cost, as :class:`RPCholesky` does.
    :param neighbors: m, earlier rows that each row is regressed on; None is 32.
    :param seed: seed of pivots and order.
    """

    neighbors: int | None = None
    seed: int = 0
    pivoted = True
    lean = False
    below = False

    def __post_init__(self) -> None:
        settle(self, count, "rank", least=0, optional=True)
        settle(self, count, "neighbors", optional=True)
        settle(self, seed_check, "seed")

    def stopping_rule(self, matrix: Access) -> RankByCost | None:
        """Return the rule of :class:`RPCholesky`, with the price of a column in all regressions."""
        return RankByCost(Costs(matrix, neighbors=self.neighbors or _NEIGHBORS)) if self.rank is None else None

    def approximate(self, matrix: Access, noise: Tensor) -> LowRank:
        rank, rule = self.rank_for(matrix.n, matrix.device), self.stopping_rule(matrix)
        random = generator(self.seed, "pivots of a full-scale preconditioner")
        space = Space.of(matrix.n)
        return rpcholesky(matrix, rank, generator=random, weights=1 / noise, enough=rule, space=space)

    def rows_stored(self, n: int) -> int:
        """Return n: every rank has all rows of F at times, since neighbours of its own rows are anywhere."""
        return n

    def select(self, matrix: Access, noise: Tensor) -> Selection:
        """Choose pivots, order and neighbours of each matrix of the batch.

        :raises InputError: for matrices that are not evaluated by entries.
        """
        if not has_entries(matrix.source):
            raise InputError(
                "FullScale expects a covariance which a kernel evaluates at pairs of inputs; use RPCholesky() for "
                "matrices with a structure of their own."
            )
        chosen, noise, m = super().select(matrix, noise), noise_of_each(matrix, noise), self.neighbors or _NEIGHBORS
        chosen.neighbors = {
            index: neighbors_of(one, _of_batch(chosen.factor, index), noise[index], m, self.seed)
            for index, one in matrix.elements()
        }
        return chosen

    @torch.no_grad()
    def serves(self, selection: Selection, matrix: Access, factor: Any, noise: Tensor) -> bool:
        """Return whether pivots and neighbours are good enough for the present K and noise.

        Of some rows the neighbours must have most of the correlations that the best ones now have.
        """
        if not super().serves(selection, matrix, factor, noise):
            return False
        noise = noise_of_each(matrix, noise)
        for index, one in matrix.elements():
            order, near = selection.neighbors[index].order, selection.neighbors[index].near
            if not near.numel():
                continue
            rows = torch.arange(len(order) - 1, 0, -max(1, len(order) // _LOOKED_AT), device=order.device)
            tile = _Correlations(one, _of_batch(factor, index), noise[index], order)(rows, len(order))
            held, best = tile.gather(1, near[rows]).clamp(min=0), tile.topk(near.shape[1], dim=1).values.clamp(min=0)
            if not held.sum() >= _STILL * best.sum():
                return False
        return True

    @torch.no_grad()
    def factor(self, matrix: Access, selection: Selection) -> Any:
        """Return F of the present K, without gradients: P is differentiated in what K is made of."""
        assert selection.pivots is not None
        batch = bool(matrix.batch_shape)
        return super().factor(matrix, selection) if batch else pivoted_factor(matrix, selection.pivots).factor

    def assemble(
        self, matrix: Access, diagonal: Tensor, selection: Selection, factor: Any, moving: Any, live: bool
    ) -> tuple[Any, Any]:
        operator, dtype = evaluated_accurately(matrix.source), matrix.source.dtype
        batch = torch.broadcast_shapes(matrix.batch_shape, diagonal.shape[:-1])
        diagonal = diagonal.expand(*batch, matrix.n)
        parts = []
        for index in itertools.product(*map(range, batch)):
            own = index_within(index, matrix.batch_shape)
            chosen = _of_batch(factor.detach(), own), selection.neighbors[own], _of_batch(selection.pivots, own)
            parts.append(FullScaleFactor(operator, diagonal, *chosen, dtype, index))
        built = FullScaleBatch(parts, batch) if batch else parts[0]
        kept = built.detached(None)
        return kept, built if live else kept.detached(dtype)
