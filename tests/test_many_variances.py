"""Variances of many points, low-rank and by samples, against dense float64."""

from __future__ import annotations

import copy
import math
import warnings

import gpytorch
import pytest
import torch
from gpytorch.kernels import MaternKernel, PiecewisePolynomialKernel, RBFKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from gpytorch.means import ZeroMean

import sketchgp
from cases import pairwise
from gp_models import Combined, Plain, dense, scaled
from problems import normal, points, relative, with_spectrum
from sketchgp.inference import calibrated
from sketchgp.inference.calibrated import Calibrated
from sketchgp.models.accelerated import approximate
from sketchgp.operators import KernelMatrix
from sketchgp.solvers.energy import JoinedGoals, LeaveOneOutGoal, RadauBound, SampleGoal, VarianceGoal
from sketchgp.solvers.recurrence import descend, turn

N, TEST = 400, points(150, d=3, seed=5)
KERNELS = {"matern": lambda: MaternKernel(nu=1.5), "rbf": RBFKernel, "compact": lambda: PiecewisePolynomialKernel(q=1)}


@pytest.fixture(autouse=True)
def local(monkeypatch):
    """Few neighbours and pivots, so that some hundred points are many; and GPyTorch leaves them to sketchgp."""
    monkeypatch.setattr(calibrated, "_RANK", 20)
    monkeypatch.setattr(calibrated, "_NEIGHBOURS", 30)
    monkeypatch.setattr("sketchgp.operators.random_features._FREQUENCIES", 32)
    with gpytorch.settings.max_cholesky_size(20):
        yield


def build(kernel="matern", noise=0.01, dtype=torch.float64, lengthscale=0.5, outputscale=1.3, n=N, **choices):
    x = points(n, d=3)
    likelihood = GaussianLikelihood(noise_constraint=gpytorch.constraints.GreaterThan(1e-9))
    likelihood.noise = noise
    model = Plain(
        x.to(dtype),
        normal(n, seed=3).to(dtype),
        likelihood,
        scaled(KERNELS[kernel](), lengthscale, outputscale),
        ZeroMean(),
    )
    return sketchgp.accelerate(model.to(dtype).eval(), **choices)


def exact(model, test=TEST):
    plain = sketchgp.restore(copy.deepcopy(model)).double().eval()
    with dense(), torch.no_grad():
        return plain(test.double()).variance


# --- what they are made of --------------------------------------------------------------------------------------


def test_calibration():
    """Mean and deviation of the ratios to exact variances at points that are left out."""
    model = build()
    with torch.no_grad():
        matrix = KernelMatrix.of(model.covar_module, model.train_inputs[0])
        noise = torch.linspace(0.01, 0.1, N, dtype=torch.float64)
        inverse = torch.linalg.inv(matrix.to_dense() + noise.diag()).diagonal()
        seen = []

        def leave_out(indices):
            seen.append(indices)
            return 1 / inverse[indices] - noise[indices]

        made = Calibrated(matrix, noise, leave_out)
        (which,) = seen
        floor = 0.02 * noise.median()
        wanted = ((1 / inverse - noise)[which] + floor).log() - (made.low_rank.left_out(which) + floor).log()
        assert made.factor == pytest.approx(math.exp(float(wanted.mean())))
        spread = max(float(wanted.std()), float((wanted - wanted.mean()).abs().max()) / 2.5)
        assert made.scatter == pytest.approx(math.hypot(spread * math.sqrt(1 + 1 / 60), 0.01))
        variance = torch.tensor([1.0, 0.1, 1e-9]).double()
        share = made.spread * (variance + floor) / variance
        assert relative(made.error(variance), torch.hypot(share, torch.tensor(0.01).double())) < 1e-12
        assert 0.8 < made.factor < 1 and 0.001 < made.scatter < 0.1
        low, prior = made.low_rank(TEST), made.matrix.entries(TEST, None)
        assert relative(made(TEST), made.factor ** (1 - low / prior) * low) < 1e-12
        rest = [torch.arange(N) != i for i in which[:3].tolist()]
        x = model.train_inputs[0]
        direct = [exact_of(model, x[some], noise[some], x[~some]) for some in rest]
        assert relative(leave_out(which[:3]), torch.cat(direct)) < 1e-8


def exact_of(model, x, noise, z):
    kernel = model.covar_module
    c = kernel(x, z).to_dense()
    return kernel(z).to_dense().diagonal() - (c * torch.linalg.solve(kernel(x).to_dense() + noise.diag(), c)).sum(dim=0)


@pytest.mark.parametrize("noise", [0.1, 1e-4])
def test_points_left_out_are_solved_for_as_far_as_needed(noise):
    """Latent variances right to some hundredths, and points to check beside them; a residual takes longer."""
    model = build(noise=noise, preconditioner=sketchgp.RPCholesky(rank=40))
    with torch.no_grad(), sketchgp.record_solves() as solves:
        side = model(TEST).lazy_covariance_matrix.formula.training
        made = side.approximate
        made.prepare(TEST)
        which = torch.arange(0, N, 40)
        found = made._left_out(which)
        inverse = torch.linalg.inv(side.noisy.to_dense()).diagonal()[which]
        assert float((found / (1 / inverse - noise) - 1).abs().max()) < 0.04
        some = made._some(TEST)
        assert float((made._exact / exact(model)[some] - 1).abs().max()) < 0.04
        columns = solves[-1].columns
        with sketchgp.settings.memory_budget(columns * 80 * N):  # half of the columns at once
            parts = made._left_out(which)
        assert float((parts / found - 1).abs().max()) < 0.04
        assert float((made._exact / exact(model)[some] - 1).abs().max()) < 0.04
        assert max(solve.columns for solve in solves[-3:]) <= columns // 2
        tight = sketchgp.ConjugateGradients(tol=1e-6).run(
            side.system, torch.eye(N).double()[:, which], side.preconditioner
        )
        made.prepare(TEST)
        drawn, side.remembered.deviations = made.deviations.weights, None
        with sketchgp.settings.memory_budget(drawn.shape[1] * 80 * N):
            halves = made.deviations.weights
        assert solves[-1].columns == drawn.shape[1] // 2
        assert float((halves - drawn).norm() / drawn.norm()) < 0.05
    assert columns == len(which) + 4
    assert solves[1].work["iterations"] < 0.7 * tight[1].work["iterations"]


@pytest.mark.parametrize(
    ("method", "n", "lengthscale", "scale", "rank", "most"),
    [
        ("low_rank", 400, 10, 1000, 60, 85),
        ("samples", 200, 3, 300, 40, 1000),
        ("exact", 200, 3, 300, 40, 1000),
    ],
)
def test_float32_that_has_lost_the_matrix(method, n, lengthscale, scale, rank, most):
    """Of noises far below the scale.  Conjugate gradients with float32 products are with another matrix, by its
    eigenvalues, or take as long again with every cycle; variances are right within few iterations all the same.

    :param most: iterations, of solves for variances.
    """
    choices = {"preconditioner": sketchgp.RPCholesky(rank=rank), "variance": method}
    model = build("matern", 1e-4, torch.float32, float(lengthscale), float(scale), n, **choices)
    with torch.no_grad(), sketchgp.record_solves() as solves:
        found = model(TEST.float()).variance.double()
    assert all(solve.converged for solve in solves)
    assert max(solve.work["iterations"] for solve in solves if solve.columns > 1) <= most
    logs = ((found + 2e-6) / (exact(model) + 2e-6)).log()
    assert float(logs.abs().max()) < (0.05 if method == "exact" else 0.4)
    assert float(logs.mean().abs()) < 0.05


def test_goals():
    noise, least = torch.tensor([0.1, 0.5]), torch.tensor([0.1])
    taken, remaining = torch.tensor([2.0, 1.0]), torch.tensor([0.5, 0.1])
    q = taken + remaining  # latent variances 1 / q - noise are 0.3 and 0.409, that is 0.75 and 0.45 of 1 / q
    goal = LeaveOneOutGoal(noise, least)
    assert torch.allclose(goal.error(taken, remaining), remaining / q / torch.tensor([0.75, 0.45]))
    assert float(goal.error(torch.tensor([9.99]), torch.tensor([0.01]))[0]) == pytest.approx(0.001 / 0.02)
    energy = SampleGoal(torch.tensor(4.0), least)
    assert torch.allclose(energy.error(taken, remaining), remaining / 4)
    explaining = VarianceGoal(torch.tensor([3.0]), least, share=0.5)
    both = JoinedGoals(least, 1, LeaveOneOutGoal(noise[:1], least), explaining)
    parts = goal.error(taken, remaining)[:1] / 0.02, explaining.error(taken[1:], remaining[1:]) / 0.5
    assert torch.allclose(both.error(taken, remaining), torch.cat(parts))


# --- variances --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "kernel", "noise", "dtype"),
    pairwise(["low_rank", "samples"], ["matern", "rbf"], [0.1, 1e-4], [torch.float64, torch.float32]),
)
def test_variances(method, kernel, noise, dtype):
    model = build(kernel, noise, dtype, variance=method)
    with torch.no_grad():
        found = model(TEST.to(dtype)).variance
        side = model(TEST.to(dtype)).lazy_covariance_matrix.formula.training
        error = float(side.approximate.error(method, found.double()).median())
    ratio = ((found.double() + noise) / (exact(model) + noise)).log()
    assert found.dtype == dtype and found.shape == (150,)
    assert error < (0.125 if method == "samples" else 0.6)
    assert float(ratio.square().mean().sqrt()) < 1.6 * error + 0.02
    assert float(ratio.mean().abs()) < 0.5 * error + 0.03


def test_samples_have_no_bias():
    """Of the deviations alone; with all that is spread evenly the mean over points says more than one of them."""
    model = build("rbf", 1e-3, variance="samples", variance_samples=400)
    with torch.no_grad():
        side = model(TEST).lazy_covariance_matrix.formula.training
        side.approximate.prepare(TEST)
        d = side.approximate.deviations(TEST)
        wanted = exact(model)
        ratio = d.square().mean(dim=-1) / wanted
        weighed = side.approximate(TEST, "samples")
        low_rank, errors = (
            side.remembered.low_rank(TEST),
            side.remembered.low_rank.error(side.remembered.low_rank(TEST)),
        )
    assert d.shape == (150, 400)
    each = (d.square() / wanted.unsqueeze(1)).mean(dim=0)  # of one sample, over the points
    assert float(ratio.mean() - 1) == pytest.approx(0, abs=2 * float(each.std()) / 20)
    assert float((ratio - 1).square().mean().sqrt()) == pytest.approx(math.sqrt(2 / 400), rel=0.5)
    assert relative(weighed, (200 * ratio * wanted + low_rank / errors**2) / (200 + errors**-2)) < 1e-12
    errors = side.remembered.low_rank.error(weighed)
    assert relative(side.approximate.error("samples", weighed), (200 + errors**-2) ** -0.5) < 1e-12


@pytest.mark.parametrize("solver", [sketchgp.ASkotch(seed=1), sketchgp.Cholesky()], ids=lambda solver: solver.name)
def test_every_solver_of_the_mean(solver):
    model = build(noise=0.1, variance="samples", solver=solver)
    with torch.no_grad(), sketchgp.record_solves() as solves:
        found = model(TEST).variance
    assert [(solve.solver, solve.columns) for solve in solves] == [(solver.name, columns) for columns in (1, 64, 128)]
    assert float((found / exact(model)).log().abs().max()) < 0.5


@pytest.mark.parametrize("method", ["low_rank", "samples"])
def test_standard_errors_where_density_is_uneven(method, monkeypatch):
    """A cluster that no inducing point resolves: taken for independent, its points would say too much of each other."""
    for name, usual in (("_RANK", 100), ("_NEIGHBOURS", 128)):
        monkeypatch.setattr(calibrated, name, usual)
    x = normal(600, 2, seed=1) * 10 ** (-3 * points(600, 1, seed=2)) + torch.arange(600).remainder(3).unsqueeze(1)
    noise = 1e-3 * 10 ** (3 * points(600, 1, seed=3).squeeze(1) - 1.5)
    x, test, noise = x[:400], x[400:], noise[:400].clamp_min(1e-4)
    model = Plain(x, normal(400), FixedNoiseGaussianLikelihood(noise), scaled(MaternKernel(nu=1.5), 1.0), ZeroMean())
    model = sketchgp.accelerate(model.double().eval())
    with torch.no_grad():
        found, wanted = sketchgp.predict(model, test, variance=method), exact_of(model, x, noise, test)
    assert found.variance_standard_error.shape == (200,)
    beyond = (found.variance - wanted).abs() > 3 * found.variance_standard_error * found.variance
    assert float(beyond.double().mean()) <= 0.03


def test_noises_of_their_own():
    x, noise = points(N, d=3), torch.linspace(0.01, 1.0, N, dtype=torch.float64)
    model = Plain(x, normal(N), FixedNoiseGaussianLikelihood(noise), scaled(MaternKernel(nu=1.5), 0.5), ZeroMean())
    model = sketchgp.accelerate(model.double().eval(), variance="low_rank")
    with torch.no_grad():
        found, wanted = model(TEST).variance, exact_of(model, x, noise, TEST)
    assert float((found / wanted).log().square().mean().sqrt()) < 0.1


@pytest.mark.parametrize("method", ["exact", "low_rank", "samples"])
def test_intervals_cover(method):
    """95% intervals of new observations, of functions and data that are drawn from the model."""
    noise, draws = 0.02, 60
    model = build("rbf", noise, variance=method, lengthscale=0.35)
    x = torch.cat([model.train_inputs[0], TEST])
    with torch.no_grad():
        root = torch.linalg.cholesky(model.covar_module(x).to_dense() + noise * torch.eye(len(x)).double())
        y = root @ normal(len(x), draws, seed=8)
        matrix = model.covar_module(x[:N]).to_dense() + noise * torch.eye(N).double()
        mean = model.covar_module(TEST, x[:N]).to_dense() @ torch.linalg.solve(matrix, y[:N])
        deviation = (model(TEST).variance + noise).sqrt().unsqueeze(1)
        covered = ((y[N:] - mean).abs() < 1.96 * deviation).double().mean()
    assert 0.93 < float(covered) < 0.97


# --- their use --------------------------------------------------------------------------------------------------


def test_what_was_found_is_kept():
    """Two block solves for all test points; new ones once a hyperparameter changes; alike in predict."""
    method = "samples"
    model = build(variance=method)
    with torch.no_grad(), sketchgp.record_solves() as solves:
        found = sketchgp.predict(model, TEST)
        first = model(TEST).variance
        few = model(TEST[:3]).variance
    wanted = [1, 64, 128]
    assert [solve.columns for solve in solves] == wanted
    assert relative(few, first[:3]) < 1e-12
    assert found.variance_method == method and relative(found.variance, first) < 1e-12
    assert found.variance_check["points"] == 4
    assert found.variance_check["median_ratio"] == pytest.approx(
        1, abs=3 * float(found.variance_standard_error.median())
    )
    with torch.no_grad(), sketchgp.record_solves() as solves:
        assert relative(build(variance=method)(TEST).variance, first) < 1e-12
        assert relative(copy.deepcopy(model)(TEST).variance, first) < 1e-12
        model.covar_module.outputscale = 3.0
        assert relative(model(TEST).variance, first) > 0.1
    assert [solve.columns for solve in solves if solve.columns > 1] == 3 * wanted[1:]


@pytest.mark.parametrize("method", ["low_rank", "samples"])
def test_gradients_in_the_points(method):
    model, x = build(variance=method), TEST[:4].clone().requires_grad_()
    variance = model(x.reshape(2, 2, 3)).variance
    assert variance.shape == (2, 2)
    (found,) = torch.autograd.grad(variance.sum(), x)
    step, direction = 1e-5, normal(4, 3)
    with torch.no_grad():
        moved = [model(x + sign * step * direction).variance.sum() for sign in (1, -1)]
    assert float((found * direction).sum()) == pytest.approx(float(moved[0] - moved[1]) / (2 * step), rel=1e-5)


def test_gradients_in_hyperparameters_are_refused():
    model = build(variance="low_rank")
    variance = model(TEST).variance
    with pytest.raises(sketchgp.InputError, match="no gradients"):
        variance.sum().backward()


@pytest.mark.parametrize("method", ["low_rank", "samples"])
def test_covariance_matrices_stay_exact(method):
    model = build(variance=method)
    with torch.no_grad():
        found = model(TEST[:9])
        noisy = model.likelihood(model(TEST[:9]))
        assert relative(noisy.variance, found.variance + 0.01) < 1e-6
        assert relative(noisy.stddev, noisy.variance.sqrt()) < 1e-12
        assert relative(found.variance, found.stddev.square()) < 1e-12
        assert relative(found.variance, exact(model, TEST[:9])) > 1e-4
        assert relative(found.covariance_matrix.diagonal(), exact(model, TEST[:9])) < 1e-3


@pytest.mark.parametrize("method", ["low_rank", "samples"])
def test_models_that_have_none(method):
    x, y = points(60, d=3), normal(60)
    model = Combined(x, y, GaussianLikelihood(), scaled(RBFKernel()), scaled(MaternKernel()), False)
    model = sketchgp.accelerate(model.double().eval(), variance=method)
    for ask in (lambda: model(TEST).variance, lambda: sketchgp.predict(model, TEST)):
        with torch.no_grad(), pytest.raises(sketchgp.InputError, match="plain kernel"):
            ask()


def test_kernels_without_random_features():
    with torch.no_grad(), pytest.raises(sketchgp.InputError, match="no random features"):
        build("compact", variance="samples")(TEST).variance  # noqa: B018
    model = build("compact", variance="low_rank", lengthscale=1.0)
    with torch.no_grad():
        ratio = model(TEST).variance / exact(model)
    assert float(ratio.log().square().mean().sqrt()) < 0.1


def test_the_setting():
    """It goes before what the model was told, and is that of the call."""
    model = build(variance="low_rank")
    with torch.no_grad():
        with sketchgp.settings.variance("exact"):
            inside = model(TEST)
            found = sketchgp.predict(model, TEST)
            with sketchgp.settings.variance("auto"):
                assert relative(model(TEST).variance, exact(model)) < 1e-3
        assert found.variance_method == "exact"
        assert relative(inside.variance, exact(model)) < 1e-3
        outside = model(TEST).variance
        assert relative(outside, exact(model)) > 1e-3
        with sketchgp.settings.variance("exact"):
            assert relative(sketchgp.predict(model, TEST, variance="low_rank").variance, outside) < 1e-12
    with pytest.raises(sketchgp.InputError, match="method"):
        sketchgp.settings.variance("fast")


# --- auto -------------------------------------------------------------------------------------------------------


@pytest.fixture
def many(monkeypatch):
    monkeypatch.setattr(approximate.Approximate, "exact_is_cheap", lambda self, m: m <= 32)


def _method(model, x=TEST):
    with torch.no_grad(), sketchgp.record_solves() as solves, warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x).variance  # noqa: B018
    return [solve.columns for solve in solves if solve.columns > 1]


def test_auto(many):
    assert _method(build()) == [64], "4 points to check beside 60 that are left out"
    assert _method(build("rbf", 1e-4)) == [64, 128], "scatters too much: samples"
    assert _method(build("compact", 1e-4)) == [64], "has no random features"
    assert _method(build(), TEST[:32]) == [32], "few points, exact"
    model, x = build(), TEST.clone().requires_grad_()
    with sketchgp.record_solves() as solves:
        model(x).variance.sum().backward()
    assert [solve.columns for solve in solves if solve.columns > 1] == [150], "gradients may be asked for"


def test_few_training_points_are_exact():
    x, y = points(25, d=3), normal(25)
    model = Plain(x, y, GaussianLikelihood(), scaled(RBFKernel(), 0.5), ZeroMean()).double().eval()
    with torch.no_grad():
        found = sketchgp.predict(sketchgp.accelerate(model, variance="low_rank"), TEST)
    assert not found.variance_standard_error.any()
    assert relative(found.variance, exact(model)) < 1e-8


def test_few_training_points_are_compared(monkeypatch):
    """Nothing is approximated there, but rounding may do harm."""
    monkeypatch.setattr(Calibrated, "__call__", lambda self, x: 3 * self.low_rank(x))
    with pytest.warns(sketchgp.ConvergenceWarning, match="Variances by 'low_rank' are off"):
        sketchgp.predict(build(n=25), TEST, variance="low_rank")


def test_auto_looks_for_itself(many, monkeypatch):
    """Once, and it warns where it is off by more than the standard errors say."""
    monkeypatch.setattr(Calibrated, "__call__", lambda self, x: 3 * self.low_rank(x))
    model = build()
    with torch.no_grad():
        with pytest.warns(sketchgp.ConvergenceWarning, match="low_rank"):
            model(TEST).variance  # noqa: B018
        model(TEST + 0.1).variance  # noqa: B018
        model = build()
        with pytest.warns(sketchgp.ConvergenceWarning, match="low_rank"):
            assert sketchgp.predict(model, TEST).variance_check["median_ratio"] > 2
        assert sketchgp.predict(model, TEST).variance_check is None
        with pytest.warns(sketchgp.ConvergenceWarning, match="low_rank"):
            sketchgp.predict(model, TEST, variance="low_rank")


@pytest.mark.parametrize(
    ("n", "m", "there", "expected"),
    [
        (36_000, 32, False, True),
        (2_000, 2_000, False, True),
        (36_000, 4_000, False, False),
        (36_000, 4_000, True, False),
        (6_000, 1_000, False, True),
        (12_000, 4_000, False, False),
        (12_000, 200, False, True),
        (12_000, 40_000, False, False),
        (3_000, 20_000, False, True),
        (36_000, 60, True, True),
    ],
)
def test_exact_by_cost(n, m, there, expected):
    """Where a factorization fits."""

    class Remembered:
        low_rank = None

    class Side:
        remembered = Remembered()

        def factorizes(self, columns):
            return there or n <= 90 * columns

    Remembered.root = torch.empty(0) if there else None
    made = object.__new__(approximate.Approximate)
    made.training, made.noise, made.matrix = Side(), torch.ones(1), torch.empty(n, n, device="meta")
    assert made.exact_is_cheap(m) is expected


@pytest.mark.parametrize("method", ["low_rank", "samples"])
def test_no_variance_is_above_the_prior_and_far_ones_are_it(many, method):
    model = build(variance=method)
    with torch.no_grad():
        far = model(TEST[:40] + 50).variance
    prior = model.covar_module(TEST[:1]).to_dense().detach().squeeze()
    assert bool((far <= prior * (1 + 1e-12)).all())
    assert relative(far, prior.expand_as(far)) < (1e-6 if method == "low_rank" else 0.1)


def test_a_bound_of_the_energy_is_above_it_and_below_the_residuals():
    """The error of every iterate of conjugate gradients, in the norm of the matrix."""
    matrix, b = with_spectrum(torch.logspace(-3, 1, 40, dtype=torch.float64)), normal(40, 3)
    exact, everything = torch.linalg.solve(matrix, b), torch.arange(3)
    least = torch.tensor([1e-3, 9e-4, 0.0], dtype=torch.float64)
    bound = RadauBound(least)
    value, r, p = torch.zeros_like(b), b.clone(), b.clone()
    energy, active = r.square().sum(dim=0), torch.ones(3, dtype=torch.bool)
    for _ in range(30):
        product = matrix @ p
        alpha, usable, _ = descend(value, r, p, product, (p * product).sum(dim=0), energy, active)
        following = r.square().sum(dim=0)
        beta = turn(p, r, following, energy, usable)
        at_most, energy = bound.add(alpha, beta, following, everything), following
        error = value - exact
        left = (error * (matrix @ error)).sum(dim=0)
        assert bool((at_most[:2] >= left[:2] * (1 - 1e-6)).all()) and float(at_most[2]) == 0
        assert bool((at_most[:2] <= following[:2] / least[:2] * (1 + 1e-9)).all())
