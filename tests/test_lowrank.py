"""Low-rank approximations ``K ~ F F^T`` against the matrices themselves."""

from __future__ import annotations

import itertools

import pytest
import torch
from gpytorch.kernels import RBFKernel

from cases import each
from problems import as_access, dense, identity, matrices, normal, points, relative, set_scales, smile, with_spectrum
from sketchgp import NumericalError
from sketchgp.preconditioners import (
    gaussian_nystrom,
    gaussian_test_matrix,
    nystrom_factor,
    rpcholesky,
    top_eigensystem,
    uniform_nystrom,
)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


METHODS = {
    "accelerated": lambda a, r, seed=0: rpcholesky(a, r, generator=seeded(seed)),
    "accelerated-wide": lambda a, r, seed=0: rpcholesky(a, r, generator=seeded(seed), block_size=2 * r),
    "block": lambda a, r, seed=0: rpcholesky(a, r, generator=seeded(seed), method="block", block_size=5),
    "uniform": lambda a, r, seed=0: uniform_nystrom(a, r, generator=seeded(seed)),
    "gaussian": lambda a, r, seed=0: gaussian_nystrom(a, r, generator=seeded(seed)),
}
PIVOTED = ["accelerated", "accelerated-wide", "block", "uniform"]
CHOLESKY = ["accelerated", "accelerated-wide", "block"]


# every method on every matrix
CASES = [pytest.param(name, method) for name in matrices() for method in METHODS]


@each("share", [0.3, 1.0])
@each(("name", "method"), CASES)
def test_invariants(name, method, share):
    """F F^T lies below K, its residual diagonal is reported, its pivots are distinct."""
    matrix, _ = matrices()[name]
    n, trace = len(matrix), float(matrix.trace())
    rank = max(1, int(share * n))
    low_rank = METHODS[method](as_access(matrix), rank)
    factor = low_rank.factor
    assert factor.dtype == torch.float64
    assert factor.shape[0] == n
    assert factor.shape[1] <= rank
    left = matrix - factor @ factor.mT
    slack = 1e-12 * max(trace, 1e-300)
    assert float(torch.linalg.eigvalsh(left).min()) >= -slack
    assert float((low_rank.residual - left.diagonal()).abs().max()) <= slack
    assert bool((low_rank.residual >= 0).all())
    assert low_rank.trace == pytest.approx(float(left.trace()), abs=slack)
    if method == "gaussian":
        assert low_rank.pivots is None
    else:
        pivots = low_rank.pivots.tolist()
        assert len(pivots) == factor.shape[1]
        assert len(set(pivots)) == len(pivots)
        if method in CHOLESKY:
            assert float(low_rank.residual[low_rank.pivots].abs().sum()) <= slack


@each(("name", "method"), CASES)
def test_exact_at_full_rank(name, method):
    matrix, _ = matrices()[name]
    low_rank = METHODS[method](as_access(matrix), len(matrix))
    scale = float(matrix.norm()) or 1.0
    assert float((low_rank.factor @ low_rank.factor.mT - matrix).norm()) < 1e-7 * scale


@each("method", ["accelerated", "accelerated-wide"])  # whole blocks waste columns
@each("name", ["rank-deficient", "duplicated", "constant", "one-by-one", "two-by-two", "zero"])
def test_stops_at_the_rank_of_the_matrix(name, method):
    matrix, rank = matrices()[name]
    low_rank = METHODS[method](as_access(matrix), len(matrix))
    assert low_rank.factor.shape[1] == rank
    assert low_rank.trace <= 1e-13 * float(matrix.trace())


@each("method", ["accelerated", "block", "gaussian"])
def test_close_to_the_best_approximation(method):
    values = 0.7 ** torch.arange(80, dtype=torch.float64)
    matrix = with_spectrum(values)
    traces = [METHODS[method](as_access(matrix), 20, seed).trace for seed in range(5)]
    best = float(values[20:].sum())
    assert best * (1 - 1e-9) <= min(traces)
    # Theorem 5.1 of arXiv:2207.06503 promises twice the best rank-r' trace for a somewhat larger rank
    assert sum(traces) / 5 < 20 * best


@each("method", ["accelerated", "block", "uniform", "gaussian"])
def test_deterministic(method):
    access = as_access(matrices()["smooth"][0])
    a, b = METHODS[method](access, 9, 3), METHODS[method](access, 9, 3)
    assert torch.equal(a.factor, b.factor)


@each("method", ["accelerated", "block", "uniform", "gaussian"])
def test_the_seed_matters(method):
    access = as_access(matrices()["smooth"][0])
    assert not torch.equal(METHODS[method](access, 9, 1).factor, METHODS[method](access, 9, 2).factor)


def test_weights_stop_early():
    matrix, _ = matrices()["smooth"]
    weights = torch.full((40,), 10.0, dtype=torch.float64)
    enough = lambda _, left: left <= 1  # noqa: E731
    low_rank = rpcholesky(as_access(matrix), 40, generator=seeded(), weights=weights, enough=enough)
    assert 0 < low_rank.factor.shape[1] < 40
    assert float((weights * low_rank.residual).sum()) <= 1.0


@each("moved", [False, True], ids=["as on CPUs", "as on other devices"])
def test_a_factor_that_grows(moved, monkeypatch):
    """Of no certain rank: it ends where it is told to, with columns like those of one that was made at once."""
    if moved:
        monkeypatch.setattr("sketchgp.preconditioners.low_rank._PAGES", "")
        monkeypatch.setattr("sketchgp.preconditioners.low_rank._BEGIN", 64)
    matrix = dense(set_scales(RBFKernel(), lengthscale=0.05), points(400))
    asked: list[tuple[int, float]] = []

    def enough(rank: int, left: float) -> bool:
        asked.append((rank, left))
        return rank >= 300

    low_rank = rpcholesky(as_access(matrix), 400, enough=enough, generator=seeded())
    rank = low_rank.factor.shape[1]
    assert 300 <= rank < 400
    assert asked[-1][0] == rank
    assert asked[-1][1] == pytest.approx(low_rank.trace)
    assert low_rank.factor.untyped_storage().nbytes() == 8 * 400 * rank
    part = low_rank.factor @ low_rank.factor.mT
    assert relative(part[:, low_rank.pivots], matrix[:, low_rank.pivots]) < 1e-8
    assert relative(matrix.diagonal() - part.diagonal(), low_rank.residual) < 1e-8


WEIGHTED = {
    "accelerated": lambda a, r, **options: rpcholesky(a, r, generator=seeded(), **options),
    "block": lambda a, r, **options: rpcholesky(a, r, generator=seeded(), method="block", block_size=3, **options),
}


@pytest.mark.parametrize("method", WEIGHTED)
def test_weights(method):
    """Pivots of ``W^1/2 K W^1/2``, F of K; equal weights change nothing; points of no weight are never chosen."""
    matrix = dense(set_scales(RBFKernel(), lengthscale=0.2), points(80))
    plain = WEIGHTED[method](as_access(matrix), 20)
    equal = WEIGHTED[method](as_access(matrix), 20, weights=torch.full((80,), 0.3, dtype=torch.float64))
    assert torch.equal(plain.factor, equal.factor)
    weights = torch.where(torch.arange(80) % 4 == 0, 1e3, 1e-2).double()
    found = WEIGHTED[method](as_access(matrix), 20, weights=weights)
    twin = WEIGHTED[method](as_access(matrix * weights.outer(weights).sqrt()), 20)
    assert torch.equal(found.pivots, twin.pivots)
    assert relative(found.factor * weights.sqrt().unsqueeze(1), twin.factor) < 1e-6
    none = torch.where(torch.arange(80) < 10, 1.0, 0.0).double()
    assert sorted(WEIGHTED[method](as_access(matrix), 20, weights=none).pivots.tolist()) == list(range(10))


# --- randomly pivoted Cholesky --------------------------------------------------------------------------------


def _law_of_two_pivots(matrix):
    """Probability of each ordered pair of the first two pivots, drawn one at a time."""
    diagonal, pairs = matrix.diagonal(), {}
    for i in range(len(matrix)):
        left = diagonal - matrix[:, i].square() / matrix[i, i]
        for j in range(len(matrix)):
            pairs[i, j] = float(diagonal[i] / diagonal.sum() * left[j] / left.sum())
    return pairs


@pytest.mark.parametrize(("block_size", "weighted"), [(6, False), (3, True)])
def test_law_of_the_accelerated_method(block_size, weighted):
    """Rejection leaves the law of pivots drawn one by one, whatever the block: joint frequencies of two pivots."""
    root = torch.tensor([[2.0, 0, 0], [1.9, 0.3, 0], [0.2, 1.0, 0.1], [0.5, 0.4, 0.9]], dtype=torch.float64)
    matrix = root @ root.mT
    access, draws = as_access(matrix), 1000
    weights = torch.tensor([1.0, 4.0, 30.0, 9.0], dtype=torch.float64) if weighted else torch.ones(4).double()
    counts = dict.fromkeys(itertools.product(range(4), repeat=2), 0)
    generator = seeded(7)
    for _ in range(draws):
        pivots = rpcholesky(access, 2, generator=generator, block_size=block_size, weights=weights).pivots
        counts[tuple(pivots.tolist())] += 1
    statistic = 0.0
    for pair, chance in _law_of_two_pivots(matrix * weights.outer(weights).sqrt()).items():
        if chance < 1e-12:
            assert counts[pair] == 0
        else:
            statistic += (counts[pair] - draws * chance) ** 2 / (draws * chance)
    assert statistic < 35  # chi-squared with 11 degrees of freedom exceeds it with probability 2.5e-4


def test_the_accelerated_method_is_safe_on_the_smile():
    """Where points cluster, whole blocks of pivots waste their columns on near-duplicates; rejection does not."""
    matrix = dense(set_scales(RBFKernel(), lengthscale=0.7), smile(1000))
    blocks, safe = [], []
    for seed in range(3):
        for method, traces in (("block", blocks), ("accelerated", safe)):
            low_rank = rpcholesky(as_access(matrix), 100, generator=seeded(seed), method=method, block_size=50)
            traces.append(low_rank.trace / 1000)
    assert max(safe) < 1e-7
    assert max(safe) < min(blocks)


def test_block_pivots_in_exact_duplicates():
    x = points(10).repeat(20, 1)
    matrix = dense(RBFKernel(), x)
    low_rank = rpcholesky(as_access(matrix), 50, generator=seeded(), method="block", block_size=40)
    assert bool(torch.isfinite(low_rank.factor).all())
    assert low_rank.trace < 1e-8


def test_float32_matrix_stops_at_its_rounding():
    matrix = dense(set_scales(RBFKernel(), lengthscale=2.0), points(60)).float()  # numerical rank far below 60
    for method in CHOLESKY:
        low_rank = METHODS[method](as_access(matrix), 60)
        assert bool(torch.isfinite(low_rank.factor).all())
        assert relative(low_rank.factor @ low_rank.factor.mT, matrix) < 1e-5


# --- eigenvalues and the shared formula -----------------------------------------------------------------------


def test_top_eigensystem_of_everything():
    matrix = with_spectrum(0.5 ** torch.arange(30, dtype=torch.float64))
    top = top_eigensystem(as_access(matrix), 6, 30, generator=seeded())
    assert torch.equal(top.indices, torch.arange(30))
    assert relative(top.values, 0.5 ** torch.arange(6, dtype=torch.float64)) < 1e-12
    assert top.tail == pytest.approx(0.5**6, rel=1e-12)
    assert relative(matrix @ top.vectors, top.vectors * top.values) < 1e-12
    assert relative(top.vectors.mT @ top.vectors, identity(6)) < 1e-12


def test_top_eigensystem_of_a_subsample():
    matrix, _ = matrices()["smooth"]
    top = top_eigensystem(as_access(matrix), 5, 20, generator=seeded())
    assert len(top.indices.unique()) == 20
    values = torch.linalg.eigvalsh(matrix[top.indices][:, top.indices]).flip(0)
    assert relative(top.values, values[:5]) < 1e-12
    assert top.tail == pytest.approx(float(values[5]), rel=1e-10)


@each(("name", "rank"), [("constant", 1), ("rank-deficient", 4), ("zero", 0), ("one-by-one", 1)])
def test_top_eigensystem_leaves_rounding_out(name, rank):
    matrix, _ = matrices()[name]
    top = top_eigensystem(as_access(matrix), 10, len(matrix), generator=seeded())
    assert len(top.values) == rank
    assert top.tail == 0.0


def test_gaussian_test_matrix_is_orthonormal():
    test = gaussian_test_matrix(30, 8, seeded(), torch.device("cpu"))
    assert relative(test.mT @ test, identity(8)) < 1e-14


def test_nystrom_factor_formula():
    matrix, _ = matrices()["smooth"]
    test = normal(40, 6)
    sketch = matrix @ test
    factor = nystrom_factor(sketch, test.mT @ sketch, 1e-16)
    assert relative(factor @ factor.mT, sketch @ torch.linalg.solve(test.mT @ sketch, sketch.mT)) < 1e-9


def test_nystrom_factor_derivative():
    root, test = normal(7, 7, seed=1), normal(7, 3, seed=2)

    def product(root):
        matrix = root @ root.mT
        factor = nystrom_factor(matrix @ test, test.mT @ matrix @ test, 1e-16)
        return factor @ factor.mT

    assert torch.autograd.gradcheck(product, [root.requires_grad_(True)])


def test_nystrom_factor_of_an_indefinite_core():
    with pytest.raises(NumericalError, match="not positive semidefinite"):
        nystrom_factor(torch.ones(3, 2, dtype=torch.float64), torch.diag(torch.tensor([1.0, -1.0])).double(), 1e-16)
    with pytest.raises(NumericalError, match="NaN"):
        nystrom_factor(torch.ones(3, 2, dtype=torch.float64), torch.full((2, 2), float("nan")).double(), 1e-16)


def test_nystrom_factor_without_columns():
    empty = torch.zeros(5, 0, dtype=torch.float64)
    assert nystrom_factor(empty, empty[:0], 1e-16).shape == (5, 0)
