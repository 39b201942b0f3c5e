"""Choosing inducing points: uniform, k-means, RPCholesky pivots."""

from __future__ import annotations

import sys

import gpytorch
import pytest
import torch

import sketchgp
from cases import each
from problems import normal, points, relative, squared_distances
from sketchgp import QR, InducingPointProblem, InputError
from sketchgp.inducing_points import InducingPoints, choose_inducing_points

METHODS = ("uniform", "k-means", "rpcholesky")


def rbf(lengthscale=0.5, dtype=torch.float64):
    kernel = gpytorch.kernels.RBFKernel().to(dtype)
    kernel.lengthscale = lengthscale
    return kernel


@pytest.fixture(autouse=True)
def _needs_scikit_learn(request):
    if "k-means" in request.node.name:
        pytest.importorskip("sklearn")


def choose(method, x, m, kernel=None, seed=0):
    return choose_inducing_points(kernel or rbf(dtype=x.dtype), x, m, method, seed=seed)


def clustered(n=400):
    """Nine tenths of the points in one small cluster, the rest spread out far away."""
    dense = 0.01 * normal(n * 9 // 10, 2)
    return torch.cat([dense, 5 + 3 * normal(n - len(dense), 2, seed=1)])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shapes_dtypes_and_determinism(method, dtype):
    x = points(120, dtype=dtype)
    first, again, other = choose(method, x, 15), choose(method, x, 15), choose(method, x, 15, seed=1)
    assert isinstance(first, InducingPoints) and first.method == method
    assert first.points.shape == (15, 3) and first.points.dtype == dtype and first.points.device == x.device
    assert torch.equal(first.points, again.points)
    assert not torch.equal(first.points, other.points)
    if method == "k-means":
        assert first.indices is None
    else:
        assert len(first.indices.unique()) == 15
        assert torch.equal(first.points, x[first.indices])
    if method == "rpcholesky":
        assert first.counts is None
    else:
        assert first.counts.shape == (15,) and first.counts.dtype == torch.float64 and bool((first.counts >= 1).all())
        assert abs(float(first.counts.sum()) - 120) < 60


@pytest.mark.parametrize("method", METHODS)
def test_the_points_are_a_copy(method):
    x = points(30)
    before = x.clone()
    choose(method, x, 30).points.zero_()
    assert torch.equal(x, before)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("n", "m"), [(1, 1), (2, 1), (2, 2), (25, 25)])
def test_few_points_and_all_points(method, n, m):
    x = points(n)
    chosen = choose(method, x, m)
    assert chosen.points.shape == (m, 3)
    if chosen.indices is not None and n == m:
        assert chosen.indices.sort().values.tolist() == list(range(n))
        if chosen.counts is not None:
            assert relative(chosen.counts, torch.ones(n, dtype=torch.float64)) < 1e-12
    if method == "k-means" and n == m:
        assert float(squared_distances(x, chosen.points).min(dim=1).values.max()) < 1e-20


@pytest.mark.parametrize("method", METHODS)
def test_duplicated_rows(method):
    x = points(5).repeat(12, 1)
    chosen = choose(method, x, 9)
    assert chosen.points.shape == (9, 3) and bool(torch.isfinite(chosen.points).all())
    assert float(squared_distances(chosen.points, x).min(dim=1).values.max()) < 1e-12
    distinct = squared_distances(chosen.points, points(5)).argmin(dim=1).unique()
    if method in ("k-means", "rpcholesky"):
        assert len(distinct) == 5 and chosen.notes
    if chosen.indices is not None:
        assert len(chosen.indices.unique()) == 9
    problem = InducingPointProblem(rbf(), x, normal(60), 0.1, chosen.points)
    assert sketchgp.KRILL().solve(problem).report.converged


def test_uniform_is_uniform():
    x = torch.arange(10, dtype=torch.float64).unsqueeze(1)
    found = torch.cat([choose("uniform", x, 3, seed=seed).indices for seed in range(400)])
    assert float((torch.bincount(found, minlength=10) - 120).abs().max()) < 45
    assert choose("uniform", x, 4).counts.tolist() == [2.5] * 4


def test_k_means_counts_are_the_sizes_of_the_clusters():
    centres = torch.tensor([[0.0, 0], [10, 0], [0, 10]], dtype=torch.float64)
    x = torch.cat(
        [centre + 0.01 * normal(size, 2, seed=size) for centre, size in zip(centres, (50, 20, 5), strict=True)]
    )
    chosen = choose("k-means", x, 3)
    order = squared_distances(centres, chosen.points).argmin(dim=1)
    assert chosen.counts[order].tolist() == [50, 20, 5]
    means = torch.stack([part.mean(dim=0) for part in x.split([50, 20, 5])])
    assert relative(chosen.points[order], means) < 1e-12


def test_k_means_measures_distance_by_the_lengthscales():
    x = torch.cat([points(100, 1), 10 * points(100, 1, seed=1)], dim=1)
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=2)).double()
    kernel.base_kernel.lengthscale = torch.tensor([0.01, 1000.0])
    chosen = choose_inducing_points(kernel, x, 10, "k-means")
    assert float(chosen.points[:, 0].std()) > 0.25  # along the first input, which matters
    assert float(chosen.points[:, 1].std()) < 2


@pytest.mark.parametrize("wrapped", [False, True, "sum"])
def test_k_means_does_not_see_features_that_the_kernel_does_not(wrapped):
    """Three values of the two features that count, swamped by a third; the centres are means in all three."""
    group = torch.arange(90) % 3
    x = torch.stack([torch.linspace(-500, 500, 90), group * 1.0, -group * 0.5], dim=1).double()
    kernel = gpytorch.kernels.RBFKernel(active_dims=[2, 1], ard_num_dims=2).double()
    kernel.lengthscale = torch.tensor([0.2, 0.5])
    if wrapped == "sum":
        kernel = kernel + gpytorch.kernels.RBFKernel(active_dims=[1]).double()
    if wrapped:
        kernel = gpytorch.kernels.ScaleKernel(kernel).double()
    found = choose_inducing_points(kernel, x, 3, "k-means").points
    assert found[:, 1].sort().values.tolist() == pytest.approx([0, 1, 2], abs=1e-6)
    wanted = torch.stack([x[group == round(float(p))].mean(dim=0) for p in found[:, 1]])
    assert relative(found, wanted) < 1e-6


def test_k_means_of_a_subsample_says_so(monkeypatch):
    monkeypatch.setattr("sketchgp.inducing_points._KMEANS_LEAST", 50)
    monkeypatch.setattr("sketchgp.inducing_points._KMEANS_ROWS", 10)
    chosen = choose("k-means", points(500), 5)
    assert "50 of 500" in chosen.notes[0]
    assert float(chosen.counts.sum()) == pytest.approx(500)
    monkeypatch.setattr("sketchgp.inducing_points._FULL_KMEANS", 10)
    assert choose("k-means", points(500), 5).points.shape == (5, 3)  # mini-batches


def test_k_means_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.cluster", None)
    with pytest.raises(InputError, match="scikit-learn"):
        choose("k-means", points(20), 3)


def test_rpcholesky_finds_the_few_that_differ():
    x = clustered()
    far = (choose("rpcholesky", x, 30).indices >= 360).sum()
    assert far >= 20 > (choose("uniform", x, 30).indices >= 360).sum()


@pytest.mark.parametrize("method", ["rpcholesky", "k-means"])
def test_better_than_uniform_where_points_cluster(method):
    """By what the Nystrom approximation from the points leaves of the trace of K."""
    x = clustered()

    def error(chosen):
        cross, inner = (rbf(1.0)(a, chosen.points).to_dense().detach() for a in (x, chosen.points))
        inverse = torch.linalg.pinv(inner, rtol=1e-10, hermitian=True)
        return 400 - float(((cross @ inverse) * cross).sum())

    uniform = min(error(choose("uniform", x, 20, rbf(1.0), seed)) for seed in range(3))
    assert error(choose(method, x, 20, rbf(1.0))) < 0.8 * uniform


def test_falkon_takes_the_counts():
    pytest.importorskip("sklearn")
    x, y = clustered(), normal(400)
    chosen = choose("k-means", x, 40)
    problem = InducingPointProblem(rbf(), x, y, 0.1, chosen.points)
    assert sketchgp.Falkon(counts=chosen.counts).solve(problem).report.converged


@each(
    ("change", "message"),
    [
        ({"m": 21}, "at most as many inducing points as rows of x: 21 of 20"),
        ({"m": 0}, "m expects a positive integer, got 0"),
        ({"m": 2.0}, "m expects a positive integer"),
        ({"m": True}, "m expects a positive integer"),
        ({"method": "kmeans"}, "'uniform', 'k-means', 'rpcholesky', got 'kmeans'"),
        ({"seed": 0.5}, "seed expects an integer"),
        ({"x": torch.full((20, 3), float("nan"))}, "x holds NaN or infinity, first in row 0"),
        ({"x": torch.zeros(20)}, "x expects shape"),
        ({"kernel": "RBF"}, "kernel expects a gpytorch kernel"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    arguments = {"kernel": rbf(), "x": points(20), "m": 3, **change}
    with pytest.raises(InputError) as error:
        choose_inducing_points(**arguments)
    assert message in str(error.value)


@pytest.mark.cuda
@pytest.mark.parametrize("method", METHODS)
def test_on_a_device(method):
    chosen = choose(method, points(100).cuda(), 10, rbf().cuda())
    assert chosen.points.is_cuda


def test_problems_take_what_was_chosen():
    x = points(50)
    chosen = choose("rpcholesky", x, 12)
    plain, taken = (InducingPointProblem(rbf(), x, x[:, 0], 0.1, z) for z in (chosen.points, chosen))
    assert torch.equal(taken.inducing_points, chosen.points) and taken.m == 12
    assert torch.equal(QR().solve(taken).value, QR().solve(plain).value)
