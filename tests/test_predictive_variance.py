"""Low-rank variances with neighbours, against their formula and against exact variances."""

from __future__ import annotations

import pytest
import torch
from gpytorch.kernels import CosineKernel, MaternKernel, RBFKernel, ScaleKernel

from problems import dense, points, relative, set_scales
from sketchgp.inference import LowRankVariance, predictive_variance
from sketchgp.operators import KernelMatrix


def _kernel(name="rbf"):
    base = RBFKernel(ard_num_dims=3) if name == "rbf" else MaternKernel(nu=1.5)
    return set_scales(ScaleKernel(base), lengthscale=0.5).double()


def _exact(kernel, x, noise, z):
    cross = dense(kernel, x, z)
    system = dense(kernel, x) + torch.diag(noise)
    return dense(kernel, z).diagonal() - (cross * torch.linalg.solve(system, cross)).sum(0)


def _low_rank(kernel, x, noise, inducing, count):
    return LowRankVariance(KernelMatrix.of(kernel, x).detach(), noise, inducing, count)


@pytest.mark.parametrize("name", ["rbf", "matern32"])
def test_exact_where_every_point_is_a_neighbour(name):
    kernel, x, z = _kernel(name), points(50, seed=1), points(20, seed=2)
    noise = torch.linspace(0.01, 0.3, 50, dtype=torch.float64)
    found = _low_rank(kernel, x, noise, x[::6], 50)(z)
    assert relative(found, _exact(kernel, x, noise, z)) < 1e-6


@pytest.mark.parametrize("distance", [1e3, 1e300])
def test_far_from_the_data_it_is_the_prior(distance):
    kernel, x = _kernel(), points(30)
    found = _low_rank(kernel, x, torch.full((30,), 0.1).double(), x[:10], 7)(points(4) + distance)
    assert relative(found, torch.full((4,), 1.7, dtype=torch.float64)) < 1e-6


def test_little_noise_at_the_training_points():
    kernel, x = set_scales(MaternKernel(nu=1.5).double(), lengthscale=0.5), points(30)
    noise = torch.full((30,), 1e-8, dtype=torch.float64)
    found = _low_rank(kernel, x, noise, x[:10], 30)(x)
    assert float((found - 1e-8).abs().max()) < 1e-9


@pytest.mark.parametrize("count", [10, 40])
def test_rounded_entries_of_far_points_cancel(count):
    """Entries with a far point are off by 1e-8: more than a matrix of rank two and little noise forgives in parts."""
    kernel, x, noise = CosineKernel().double(), points(40, 1), torch.full((40,), 1e-8, dtype=torch.float64)
    kernel.period_length = 5.0
    far = torch.tensor([[1e8]], dtype=torch.float64)
    found = _low_rank(kernel, x, noise, x[:10], count)(torch.cat([x[:5], far]))
    assert float(found.max()) < 1e-8 and relative(found[:5], _exact(kernel, x, noise, x[:5])) < 1e-4


def test_duplicated_inducing_points():
    kernel, x, z = _kernel(), points(30), points(10, seed=2)
    noise = torch.full((30,), 0.1, dtype=torch.float64)
    twice = torch.cat([x[:10], x[:10]])
    found = _low_rank(kernel, x, noise, twice, 7)(z)
    assert relative(found, _low_rank(kernel, x, noise, x[:10], 7)(z)) < 1e-6


def test_neighbours_of_a_tree_are_those_of_the_largest_covariance():
    """With more than six inputs, here constant ones, covariances are compared, by training points what is left of
    them."""
    kernel, x, z = set_scales(MaternKernel(nu=1.5).double(), lengthscale=0.3), points(200), points(30, seed=2)
    x[100:110] = x[:10]  # each of which may not be its own neighbour
    noise, left = torch.full((200,), 0.1, dtype=torch.float64), torch.arange(95, 115)
    by_tree, compared = (
        _low_rank(kernel, torch.nn.functional.pad(x, (0, more)), noise, torch.nn.functional.pad(x[:9], (0, more)), 7)
        for more in (0, 4)
    )
    assert relative(compared(torch.nn.functional.pad(z, (0, 4))), by_tree(z)) < 2e-3
    assert relative(compared.left_out(left), by_tree.left_out(left)) < 2e-2


@pytest.mark.parametrize("n", [1, 2])
def test_few_points(n):
    kernel, x, z = _kernel(), points(n), points(3, seed=2)
    noise = torch.full((n,), 0.1, dtype=torch.float64)
    assert relative(_low_rank(kernel, x, noise, x[:1], 128)(z), _exact(kernel, x, noise, z)) < 1e-10
    assert _low_rank(kernel, x, noise, x[:1], 128)(points(0)).shape == (0,)


def _with_neighbours(kernel, x, noise, inducing, z, count):
    """The formula of the module, one test point at a time, with dense inverses."""
    core = torch.linalg.inv(dense(kernel, inducing))

    def low_rank(a, b):
        return dense(kernel, a, inducing) @ core @ dense(kernel, inducing, b)

    remainder = dense(kernel, x) - low_rank(x, x) + noise.diag()
    features = dense(kernel, inducing, x)
    learned = torch.linalg.inv(dense(kernel, inducing) + features @ torch.linalg.solve(remainder, features.mT))
    found = []
    for point in z.split(1):
        near = dense(kernel, point, x)[0].topk(count).indices
        some = x[near]
        between = dense(kernel, some) - low_rank(some, some) + noise[near].diag()
        b = torch.linalg.solve(between, dense(kernel, some, point) - low_rank(some, point))
        rest = dense(kernel, point) - low_rank(point, point)
        rest = rest - (dense(kernel, some, point) - low_rank(some, point)).mT @ b
        g = dense(kernel, inducing, point) - dense(kernel, inducing, some) @ b
        found.append(rest + g.mT @ learned @ g)
    return torch.cat(found).squeeze(1)


@pytest.mark.parametrize("entries", [2**8, 2**22])
@pytest.mark.parametrize("name", ["rbf", "matern32"])
def test_neighbours_against_the_formula(name, entries, monkeypatch):
    monkeypatch.setattr(predictive_variance, "_ENTRIES", entries)
    monkeypatch.setattr(predictive_variance, "_EARLIER", 60)  # all of them, which is exact
    kernel, x, z = _kernel(name), points(60, seed=1), points(13, seed=2) * 1.5
    noise = torch.linspace(0.01, 1, 60, dtype=torch.float64)
    found = _low_rank(kernel, x, noise, x[::10], 7)(z)
    assert relative(found, _with_neighbours(kernel, x, noise, x[::10], z, 7)) < 1e-7
    exact = _exact(kernel, x, noise, z)
    most = _low_rank(kernel, x, noise, x[::10], 99)(z)
    assert relative(most, _with_neighbours(kernel, x, noise, x[::10], z, 60)) < 1e-7
    assert float((found - exact).abs().sum()) < 0.2 * float(exact.sum())


def test_points_that_are_left_out(monkeypatch):
    """As if the data were without them: the low-rank part too."""
    monkeypatch.setattr(predictive_variance, "_EARLIER", 60)
    kernel, x = _kernel("matern32"), points(60, seed=1)
    noise = torch.linspace(0.01, 1, 60, dtype=torch.float64)
    low_rank = _low_rank(kernel, x, noise, x[::10], 7)
    which = torch.tensor([3, 17, 58])
    expected = []
    for i in which.tolist():
        rest = torch.arange(60) != i
        expected.append(_with_neighbours(kernel, x[rest], noise[rest], x[::10], x[i : i + 1], 7))
    assert relative(low_rank.left_out(which), torch.cat(expected)) < 1e-7
