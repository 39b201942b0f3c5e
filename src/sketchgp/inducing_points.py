"""Choosing inducing points: uniformly, by k-means, by RPCholesky pivots, by ridge leverage scores."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from . import checks
from .errors import InputError, NumericalError
from .memory import available_memory
from .operators import KernelMatrix
from .operators.access import Access
from .operators.marks import operator_marks
from .operators.tall import TallMatrix
from .preconditioners import rpcholesky, shifted_cholesky
from .random_streams import generator, salted
from .solvers.inducing.problem import InducingPoints
from .solvers.loop import compare_ranks
from .solvers.problem import check_fits, check_kernel
from .space import Space

_METHODS = ("uniform", "k-means", "rpcholesky", "leverage")
_FULL_KMEANS = 20_000  # points up to which k-means looks at all of them every round
_KMEANS_ROWS = 256  # points an inducing point, at least 100,000, that k-means is shown where there are more
_UNSEEN = 1e4  # times the extent of x, lengthscales of features that the kernel does not look at
_KMEANS_LEAST = 100_000
_PILOTS = 4  # points of the leverage scores' subsample for every inducing point; at most _MOST_PILOTS
_MOST_PILOTS = 4000


@torch.no_grad()
def choose_inducing_points(
    kernel: Any,
    x: Tensor,
    m: int,
    method: Literal["uniform", "k-means", "rpcholesky", "leverage"] = "uniform",
    *,
    noise: float | None = None,
    seed: int = 0,
) -> InducingPoints:
    """m inducing points for the inputs x.

    * ``"uniform"``: rows of x without replacement.  Free, and right where nothing is known.  ``counts`` are n / m.
    * ``"k-means"``: centres of clusters, in the distance that the kernel's lengthscales give where it has one for each
      input.  Better than uniform for small m.  ``n m d`` operations a round by scikit-learn; of more than
      ``max(100,000, 256 m)`` points a subsample of that size.  ``counts`` are the sizes of the clusters, at least 1.
    * ``"rpcholesky"``: pivots of randomly pivoted Cholesky: rows that differ from each other by the kernel's measure.
      The best approximation of K, though not always of the targets; ``n m^2`` operations and n m float64 numbers.
      Where K has fewer than m independent columns to working precision the rest are drawn uniformly, with a note.
    * ``"leverage"``: rows drawn without replacement by ridge leverage scores ``(K (K + noise)^-1)_ii``, which needs the
      noise: those that the posterior mean depends on.  The scores are those of the Nystrom approximation from 4m, at
      most 4,000, uniform rows; ``n m`` to ``4 n m`` kernel evaluations.  ``counts`` are inverse inclusion
      probabilities.

    Inside ``sharded()`` the last two are shared out by rows.

    References: arXiv:2304.12465, section 3.1 (RPCholesky); Rudi, Calandriello, Carratino, Rosasco, "On fast leverage
    score sampling and optimal learning" (arXiv:1810.13258); Musco, Musco (arXiv:1605.07583).

    :param kernel: a GPyTorch kernel, its output scale included.
    :param x: ``(n, d)``, float32 or float64.  Rows may repeat.
    :param noise: variance, for ``"leverage"``.
    :param seed: of every random choice.
    :raises InputError: for arguments that do not fit, or where scikit-learn is missing for ``"k-means"``.
    """
    owner = "choose_inducing_points"
    check_kernel(owner, kernel)
    checks.tensor(owner, "x", x, (2,))
    check_fits(owner, kernel, x, "x")
    m = checks.count(owner, "m", m)
    if m > len(x):
        raise InputError(f"{owner}: m expects at most as many inducing points as rows of x: {m} of {len(x)}.")
    method = checks.word(owner, "method", method, _METHODS)
    noise = checks.number(owner, "noise", noise, above=0, finite=True, optional=True)
    seed = checks.seed(owner, "seed", seed)
    stream = generator(seed, f"inducing points: {method}")
    if method == "uniform":
        return _rows(x, torch.randperm(len(x), generator=stream)[:m], len(x) / m, method)
    if method == "k-means":
        return _k_means(kernel, x, m, stream, salted(seed, "clusters") % 2**32)
    if method == "rpcholesky":
        return _rpcholesky(kernel, x, m, stream)
    if noise is None:
        raise InputError(f"{owner}: noise expects a positive number for method='leverage', got None.")
    return _leverage(kernel, x, m, float(noise), stream)


def _rows(x: Tensor, indices: Tensor, counts: float | Tensor | None, method: str, *notes: str) -> InducingPoints:
    indices = indices.to(x.device)
    if isinstance(counts, float):
        counts = torch.full((len(indices),), counts, dtype=torch.float64, device=x.device)
    return InducingPoints(x[indices].clone(), indices, counts, method, list(notes))


def _k_means(kernel: Any, x: Tensor, m: int, stream: torch.Generator, randomness: int) -> InducingPoints:
    try:
        import numpy as np
        from sklearn.cluster import KMeans, MiniBatchKMeans
        from threadpoolctl import threadpool_limits
    except ImportError as error:
        raise InputError(
            "method='k-means' needs scikit-learn: python -m pip install scikit-learn (or the extra sketchgp[sklearn]); "
            "method='rpcholesky' and 'leverage' do without."
        ) from error
    n = len(x)
    scale = _lengthscales(kernel, x)
    most = max(_KMEANS_LEAST, _KMEANS_ROWS * m)
    rows = torch.randperm(n, generator=stream)[:most].sort().values.to(x.device) if n > most else None
    shown = ((x if rows is None else x[rows]) / scale).cpu().numpy()
    clusters = min(m, len(np.unique(shown, axis=0)))
    if len(shown) <= _FULL_KMEANS:
        model = KMeans(clusters, n_init=1, max_iter=50, random_state=randomness)
    else:
        model = MiniBatchKMeans(clusters, n_init=1, batch_size=max(4096, m), max_iter=20, random_state=randomness)
    with threadpool_limits(torch.get_num_threads()):
        labels = torch.as_tensor(model.fit(shown).labels_, dtype=torch.long)
    sizes = torch.bincount(labels, minlength=m)
    points = x.new_zeros(m, x.shape[1])
    points[:clusters] = torch.as_tensor(model.cluster_centers_).to(x) * scale
    empty = (sizes == 0).nonzero().squeeze(1)
    notes = [] if rows is None else [f"k-means saw {len(shown)} of {n} points"]
    if len(empty):
        points[empty.to(x.device)] = x[torch.randperm(n, generator=stream)[: len(empty)].to(x.device)]
        notes.append(f"{len(empty)} empty clusters; rows drawn uniformly stand for them")
    counts = (sizes.to(torch.float64) * (n / len(shown))).clamp(min=1.0).to(x.device)
    return InducingPoints(points, None, counts, "k-means", notes)


def _lengthscales(kernel: Any, x: Tensor) -> Tensor:
    """``(d,)`` what to divide x by: the kernel's lengthscales, or ones; features it does not look at count nothing."""
    dims = _seen(kernel, x.shape[1])
    while not getattr(kernel, "has_lengthscale", False) and hasattr(kernel, "base_kernel"):
        kernel = kernel.base_kernel
    scale = kernel.lengthscale if getattr(kernel, "has_lengthscale", False) else None
    scale = x.new_ones(1) if scale is None or scale.numel() not in (1, len(dims)) else scale.detach().reshape(-1).to(x)
    extent = (x.amax(dim=0) - x.amin(dim=0)).max().clamp(min=1.0)
    scales = torch.full_like(x[0], _UNSEEN * float(scale.max() * extent))
    scales[torch.tensor(dims, device=x.device)] = scale.expand(len(dims))
    return scales


def _seen(kernel: Any, d: int) -> list[int]:
    """The features that a kernel looks at, in the order of its lengthscales; the outermost choice counts."""
    if kernel.active_dims is not None:
        return kernel.active_dims.tolist()
    if hasattr(kernel, "base_kernel"):
        return _seen(kernel.base_kernel, d)
    if hasattr(kernel, "kernels"):
        return sorted({dim for part in kernel.kernels for dim in _seen(part, d)})
    return list(range(d))


def _rpcholesky(kernel: Any, x: Tensor, m: int, stream: torch.Generator) -> InducingPoints:
    n, space = len(x), Space.of(len(x))
    needed, free = 8 * m * space.most_rows, available_memory(x.device)
    if needed > free:
        raise InputError(
            f"method='rpcholesky' needs {needed / 2**30:.1f} GiB for n = {n}, m = {m} and {free / 2**30:.1f} GiB are "
            "free; choose from a subsample of the rows, or take 'leverage' or 'k-means'."
        )
    matrix = _matrix(kernel, x)
    pivots = rpcholesky(matrix, m, generator=stream, space=space).pivots
    assert pivots is not None
    missing = m - len(pivots)
    if not missing:
        return _rows(x, pivots, None, "rpcholesky")
    left = torch.ones(n, dtype=torch.bool, device=x.device)
    left[pivots] = False
    others = left.nonzero().squeeze(1)
    more = others[torch.randperm(len(others), generator=stream)[:missing].to(x.device)]
    note = f"K has rank {len(pivots)} to working precision; {missing} more rows drawn uniformly"
    return _rows(x, torch.cat([pivots, more]), None, "rpcholesky", note)


def _matrix(kernel: Any, x: Tensor) -> Access:
    """K(x, x), the same on all ranks, where several work together."""
    matrix = KernelMatrix.of(kernel, x, engine="tiled").detach()
    compare_ranks("choose_inducing_points", lambda: operator_marks(matrix))
    return Access(matrix)


def _leverage(kernel: Any, x: Tensor, m: int, noise: float, stream: torch.Generator) -> InducingPoints:
    scores = leverage_scores(kernel, x, noise, min(len(x), _PILOTS * m, _MOST_PILOTS), stream)
    probabilities = _inclusion(scores, m)
    indices = _systematic(probabilities, m, stream)
    return _rows(x, indices, 1 / probabilities[indices], "leverage")


@torch.no_grad()
def leverage_scores(kernel: Any, x: Tensor, noise: float, pilots: int, stream: torch.Generator) -> Tensor:
    """Approximate ridge leverage scores ``(K (K + noise)^-1)_ii`` ``(n,)``, float64, in (0, 1).

    With p uniform rows Z and ``K ~ Kxz Kzz^-1 Kzx =: N`` it is ``(N (N + noise)^-1)_ii`` plus what N lacks of the
    diagonal of K over itself plus the noise; exact for p = n, and no row that N misses is thought unimportant.
    ``n p`` kernel evaluations twice, O(p^2) memory.
    """
    n, whole = len(x), _matrix(kernel, x)
    z = x[torch.randperm(n, generator=stream)[:pilots].to(x.device)]
    tall = TallMatrix(kernel, x, z, accurate=True)
    matrix = KernelMatrix.of(kernel, z, engine="tiled").detach().double().to_dense()
    eps = torch.finfo(torch.float64).eps
    root = shifted_cholesky(matrix, eps).mT
    inner, height = torch.zeros_like(matrix), max(16, min(n, 2**22 // pilots))
    for _, tile in tall.own_tiles(height):
        half = torch.linalg.solve_triangular(root, tile, upper=True, left=False)  # rows of N^1/2
        inner.addmm_(half.mT, half)
    inner = tall.total(inner)
    inner.diagonal().add_(noise)
    second = shifted_cholesky(inner, eps).mT
    diagonal = whole.diagonal()
    scores = torch.empty(n, dtype=torch.float64, device=x.device)
    for span, tile in tall.own_tiles(height):
        half = torch.linalg.solve_triangular(root, tile, upper=True, left=False)
        within = torch.linalg.solve_triangular(second, half, upper=True, left=False).square().sum(dim=1)
        lacking = (diagonal[span] - half.square().sum(dim=1)).clamp(min=0)
        scores[span] = within + (1 - within).clamp(min=0) * lacking / (lacking + noise)
    scores = tall.completed(scores.unsqueeze(1)).squeeze(1)
    if not bool(torch.isfinite(scores).all()):
        raise NumericalError("The leverage scores hold NaN or infinity; check inputs and kernel.", see="nan")
    return scores.clamp(min=torch.finfo(torch.float64).tiny, max=1.0)


def _inclusion(scores: Tensor, m: int) -> Tensor:
    """Probabilities proportional to the scores, at most 1, that sum to m."""
    n = len(scores)
    scores = scores + 1e-3 * scores.mean()  # no row without a chance, no count beyond all bounds
    sure = torch.zeros(n, dtype=torch.bool, device=scores.device)
    while True:
        left = m - int(sure.sum())
        if left <= 0 or bool(sure.all()):
            return torch.where(sure, 1.0, scores / scores.sum()).clamp(max=1.0)
        scaled = scores * (left / scores[~sure].sum())
        over = ~sure & (scaled >= 1)
        if not bool(over.any()):
            return torch.where(sure, torch.ones_like(scaled), scaled)
        sure |= over


def _systematic(probabilities: Tensor, m: int, stream: torch.Generator) -> Tensor:
    """m distinct rows, row i with exactly its probability: systematic sampling in a random order."""
    n = len(probabilities)
    order = torch.randperm(n, generator=stream).to(probabilities.device)
    sums = probabilities[order].cumsum(0)
    sums = sums * (m / sums[-1])
    ticks = torch.arange(m, dtype=torch.float64, device=sums.device)
    ticks = ticks + torch.rand(1, dtype=torch.float64, generator=stream).to(sums.device)
    chosen = torch.searchsorted(sums, ticks, right=True).clamp(max=n - 1).unique()
    if len(chosen) < m:  # rounding put two ticks into one row
        left = torch.ones(n, dtype=torch.bool, device=sums.device)
        left[chosen] = False
        chosen = torch.cat([chosen, left.nonzero().squeeze(1)[: m - len(chosen)]])
    return order[chosen]
