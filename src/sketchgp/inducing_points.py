"""Choosing inducing points: uniformly, by k-means, by RPCholesky pivots."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from . import checks
from .errors import InputError
from .memory import require_memory
from .operators import KernelMatrix
from .operators.access import Access
from .operators.marks import operator_marks
from .preconditioners.rpcholesky import rpcholesky
from .random_streams import generator, rows_beside, salted
from .solvers.inducing.problem import InducingPoints
from .solvers.loop import compare_ranks
from .solvers.problem import check_fits, check_kernel
from .space import Space

_METHODS = ("uniform", "k-means", "rpcholesky")
_FULL_KMEANS = 20_000  # points up to which k-means looks at all of them every round
_KMEANS_ROWS = 256  # points an inducing point, at least 100,000, that k-means is shown where there are more
_UNSEEN = 1e4  # times the extent of x, lengthscales of features that the kernel does not look at
_KMEANS_LEAST = 100_000


@torch.no_grad()
def choose_inducing_points(
    kernel: Any,
    x: Tensor,
    m: int,
    method: Literal["uniform", "k-means", "rpcholesky"] = "uniform",
    *,
    seed: int = 0,
) -> InducingPoints:
    """Choose m inducing points for the inputs x.

    * ``"uniform"``: rows of x without replacement.  Free, and right where nothing is known.  ``counts`` are n / m.
    * ``"k-means"``: centres of clusters, in the distance that the kernel's lengthscales give where it has one for each
      input.  Better than uniform for small m.  ``n m d`` operations a round by scikit-learn; of more than
      ``max(100,000, 256 m)`` points a subsample of that size.  ``counts`` are the sizes of the clusters, at least 1.
    * ``"rpcholesky"``: pivots of randomly pivoted Cholesky: rows that differ from each other by the kernel's measure.
      The best approximation of K, though not always of the targets; ``n m^2`` operations and n m float64 numbers.
      Where K has fewer than m independent columns to working precision the rest are drawn uniformly, with a note.

    Inside ``sharded()`` the last one is shared out by rows.

    Reference: arXiv:2304.12465, section 3.1 (RPCholesky).

    :param kernel: a GPyTorch kernel, its output scale included.
    :param x: ``(n, d)``, float32 or float64.  Rows may repeat.
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
    seed = checks.seed(owner, "seed", seed)
    stream = generator(seed, f"inducing points: {method}")
    if method == "uniform":
        return _rows(x, torch.randperm(len(x), generator=stream)[:m], len(x) / m, method)
    if method == "k-means":
        return _k_means(kernel, x, m, stream, salted(seed, "clusters") % 2**32)
    return _rpcholesky(kernel, x, m, stream)


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
            "method='rpcholesky' does without."
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
    advice = "choose from a subsample of the rows, or take 'k-means'."
    require_memory(8 * m * space.most_rows, x.device, f"method='rpcholesky' for n = {n}, m = {m}", advice)
    matrix = KernelMatrix.of(kernel, x, engine="tiled").detach()
    compare_ranks("choose_inducing_points", lambda: operator_marks(matrix))
    pivots = rpcholesky(Access(matrix), m, generator=stream, space=space).pivots
    assert pivots is not None
    missing = m - len(pivots)
    if not missing:
        return _rows(x, pivots, None, "rpcholesky")
    more = rows_beside(pivots, n, missing, stream)
    note = f"K has rank {len(pivots)} to working precision; {missing} more rows drawn uniformly"
    return _rows(x, torch.cat([pivots, more]), None, "rpcholesky", note)
