"""What is certain of an answer: compared with solutions in extended precision, which share no code with the library."""

from __future__ import annotations

import copy
import dataclasses
import warnings

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.kernels import Kernel, MaternKernel, RBFKernel, RQKernel, ScaleKernel
from linear_operator.operators import DenseLinearOperator

import sketchgp
from cases import each
from problems import identity, normal, points
from sketchgp.report import merged
from sketchgp.solvers import System
from sketchgp.solvers.full.prediction_tolerance import FollowedPoints

WIDE = np.longdouble
KINDS = ("rbf", "matern 1/2", "matern 3/2", "matern 5/2", "rational quadratic")


def made(kind: str, lengthscale: float, scale: float) -> ScaleKernel:
    base: Kernel = RBFKernel() if kind == "rbf" else RQKernel()
    if kind.startswith("matern"):
        base = MaternKernel(nu={"1/2": 0.5, "3/2": 1.5, "5/2": 2.5}[kind.split()[1]])
    kernel = ScaleKernel(base).double()
    base.lengthscale, kernel.outputscale = lengthscale, scale
    if kind == "rational quadratic":
        base.alpha = 1.0
    return kernel


def evaluated(kind: str, kernel: ScaleKernel, a: torch.Tensor, b: torch.Tensor) -> np.ndarray:
    """``k(a, b)`` in extended precision, from the formulas."""
    left, right = (side.numpy().astype(WIDE) / WIDE(kernel.base_kernel.lengthscale.item()) for side in (a, b))
    squares = ((left[:, None] - right[None]) ** 2).sum(axis=-1)
    distances = np.sqrt(squares)
    if kind == "rbf":
        values = np.exp(-squares / 2)
    elif kind == "rational quadratic":
        values = 1 / (1 + squares / 2)
    else:
        nu = {"1/2": 1, "3/2": 3, "5/2": 5}[kind.split()[1]]
        s = np.sqrt(WIDE(nu)) * distances
        values = {1: 1, 3: 1 + s, 5: 1 + s + s**2 / 3}[nu] * np.exp(-s)
    return WIDE(kernel.outputscale.item()) * values


def solved(matrix: np.ndarray, b: np.ndarray) -> np.ndarray:
    """By Cholesky factorization, in the precision of its arguments."""
    n = len(matrix)
    root = np.zeros_like(matrix)
    for j in range(n):
        column = matrix[j:, j] - root[j:, :j] @ root[j, :j]
        root[j:, j] = column / np.sqrt(column[0])
    z, w = np.zeros_like(b), np.zeros_like(b)
    for j in range(n):
        z[j] = (b[j] - root[j, :j] @ z[:j]) / root[j, j]
    for j in reversed(range(n)):
        w[j] = (z[j] - root[j + 1 :, j] @ w[j + 1 :]) / root[j, j]
    return w


def preconditioners(n: int) -> list[sketchgp.preconditioners.Preconditioner | None]:
    return [
        None,
        sketchgp.RPCholesky(),
        sketchgp.RPCholesky(rank=max(1, n // 4)),
        sketchgp.Nystrom(rank=max(1, n // 5)),
        sketchgp.Nystrom(rank=max(1, n // 2), sketch="uniform"),
        sketchgp.NystromEigenPro(rank=max(1, n // 8)),
    ]


def random_problem(seed: int) -> tuple[str, ScaleKernel, sketchgp.FullProblem, np.random.Generator]:
    """Of 2 to 80 points, some of them repeated, some far from the origin; noise of 1e-8 to 10 times the scale."""
    stream = np.random.default_rng(seed)
    n, d = int(np.exp(stream.uniform(np.log(2), np.log(80)))), int(stream.integers(1, 9))
    x = torch.tensor(stream.normal(size=(n, d)))
    if stream.random() < 0.2:
        x = x + 100 * torch.tensor(stream.normal(size=d))
    if stream.random() < 0.2:
        x = x[stream.integers(0, n, n)]
    kind, scale = str(stream.choice(KINDS)), float(np.exp(stream.uniform(-4, 4)))
    kernel = made(kind, float(np.exp(stream.uniform(-1.5, 2))), scale)
    noise = torch.full((n,), scale * 10 ** stream.uniform(-8, 1), dtype=torch.float64)
    if stream.random() < 0.3:
        noise = noise * torch.tensor(np.exp(stream.normal(size=n)))
    y = torch.tensor(stream.normal(size=n)) if stream.random() < 0.5 else 10 * torch.sin(x.sum(dim=1))
    return kind, kernel, sketchgp.FullProblem(kernel, x, y, noise), stream


@each("seed", range(25))
def test_the_bound_holds_at_every_point(seed):
    kind, kernel, problem, stream = random_problem(seed)
    n, which = len(problem.x), stream.random()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sketchgp.ConvergenceWarning)
        if which < 0.1:
            solution = sketchgp.Cholesky().solve(problem)
        elif which < 0.2:
            solution = sketchgp.ASkotch(max_passes=float(stream.integers(1, 30))).solve(problem)
        else:
            solver = sketchgp.ConjugateGradients(
                tol=10 ** stream.uniform(-13, -0.5), max_iterations=int(stream.integers(1, 60))
            )
            choices = preconditioners(n)
            solution = solver.solve(problem, preconditioner=choices[stream.integers(0, len(choices))])
    bound = float(solution.report.error_bound)
    matrix = evaluated(kind, kernel, problem.x, problem.x) + np.diag(problem.noise_vector.numpy().astype(WIDE))
    error = solution.value.numpy().astype(WIDE) - solved(matrix, problem.y.numpy().astype(WIDE))
    assert np.sqrt(error @ (matrix @ error)) <= bound
    lower, upper = solution.report.quadratic_bounds[:, 0].tolist()
    assert lower <= problem.y.numpy() @ solved(matrix, problem.y.numpy().astype(WIDE)) <= upper
    assert upper - lower >= bound**2
    x = torch.cat([problem.x, torch.tensor(stream.normal(size=(30, problem.x.shape[1])))])
    off = np.abs(evaluated(kind, kernel, x, problem.x) @ error)
    assert (off <= kernel.outputscale.item() ** 0.5 * bound).all()


def stopped(preconditioner, dtype=torch.float64, noise=1e-2, iterations=4):
    """A solve that ends early, its bound and its true error in the norm of the matrix."""
    x, y = points(150, 3, dtype=dtype), normal(150, dtype=dtype)
    kernel = made("rbf", 0.3, 2.0).to(dtype)
    problem = sketchgp.FullProblem(kernel, x, y, noise)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sketchgp.ConvergenceWarning)
        solution = sketchgp.ConjugateGradients(tol=1e-9, max_iterations=iterations).solve(problem, preconditioner)
    matrix = kernel.double()(x.double()).to_dense().detach() + noise * identity(150)
    error = solution.value.double() - torch.linalg.solve(matrix, y.double())
    return float(solution.report.error_bound), float((error @ matrix @ error).sqrt()), solution.report


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_factor_makes_the_bound_sharp(dtype):
    bound, true, _ = stopped(sketchgp.RPCholesky(rank=120), dtype)
    assert true <= bound <= 3 * true
    loose, true, _ = stopped(sketchgp.NystromEigenPro(rank=30), dtype)
    assert true <= loose


def test_what_lies_above_the_matrix_is_not_taken_for_a_bound():
    """EigenPro's preconditioner has more than the noise on its diagonal: its norm of the residual is too small."""
    x, y = points(150, 3), normal(150)
    kernel = made("rbf", 0.3, 2.0)
    problem = sketchgp.FullProblem(kernel, x, y, 1e-2)
    choice = sketchgp.NystromEigenPro(rank=5)
    with pytest.warns(sketchgp.ConvergenceWarning):
        solution = sketchgp.ConjugateGradients(tol=1e-9, max_iterations=2).solve(problem, choice)
    r = y - kernel(x).to_dense().detach() @ solution.value - 1e-2 * solution.value
    built = choice.build(problem.system().operator, problem.noise_vector)
    wrong = float((r * built.apply_inverse(r[:, None])[:, 0]).sum().sqrt())
    assert float(solution.report.error_bound) >= float((r.square() / 1e-2).sum().sqrt()) > 1.5 * wrong

    class Boastful(sketchgp.NystromEigenPro):
        @property
        def below(self) -> bool:
            return True

    with pytest.warns(sketchgp.ConvergenceWarning):
        boasted = sketchgp.ConjugateGradients(tol=1e-9, max_iterations=2).solve(problem, Boastful(rank=5))
    assert torch.equal(boasted.report.error_bound, solution.report.error_bound)
    assert sketchgp.RPCholesky().below and sketchgp.Nystrom().below
    assert not choice.below


def test_nothing_is_certain_of_a_matrix_that_was_rounded_to_float32():
    x = points(60)
    matrix = (-(x[:, None] - x).square().sum(dim=-1)).exp().float()
    rhs = normal(60, 2, dtype=torch.float32)
    solver = sketchgp.ConjugateGradients(tol=1e-3)
    _, report = solver.run(System(DenseLinearOperator(matrix), torch.full((60,), 0.1)), rhs, None)
    assert report.error_bound is None
    noise = torch.full((60,), 0.1, dtype=torch.float64)
    _, report = solver.run(System(DenseLinearOperator(matrix.double()), noise), rhs.double(), None)
    assert report.error_bound.shape == (2,)
    _, report = solver.run(System(DenseLinearOperator(matrix.double()), 1e-15 * noise), 0 * rhs.double(), None)
    assert report.error_bound is None  # the roundoff of the matrix is as large as the noise


def test_reports_together():
    _, _, report = stopped(sketchgp.RPCholesky(rank=50))
    both = merged([report, report])
    assert torch.equal(both.error_bound, torch.cat([report.error_bound, report.error_bound]))
    report.variance_error = torch.tensor([0.5])
    assert torch.equal(merged([report, report]).variance_error, torch.tensor([0.5, 0.5]))
    _, _, other = stopped(None)
    other.error_bound = None
    assert merged([report, other]).error_bound is None
    assert merged([report, other]).variance_error is None


def test_a_solution_in_float32_is_bounded_as_it_is_returned():
    x, y = points(120, 3, dtype=torch.float32), normal(120, dtype=torch.float32)
    problem = sketchgp.FullProblem(made("rbf", 0.5, 2.0).float(), x, y, 1e-4)
    with pytest.warns(sketchgp.ConvergenceWarning, match="was rounded"):
        solution = sketchgp.ConjugateGradients(tol=1e-5).solve(problem, sketchgp.RPCholesky(rank=120))
    exact = sketchgp.Cholesky().solve(sketchgp.FullProblem(problem.kernel.double(), x.double(), y.double(), 1e-4))
    error = solution.value.double() - exact.value
    matrix = problem.kernel(x.double()).to_dense().detach() + 1e-4 * identity(120)
    size, found = (float((v @ matrix @ v).sqrt()) for v in (exact.value, error))
    assert found <= float(solution.report.error_bound) <= 0.01 * size


def model_of(dtype, noise=1e-3, n=200):
    x, y = points(n, 3, dtype=dtype), normal(n, dtype=dtype)

    class Model(gpytorch.models.ExactGP):
        def __init__(self):
            super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
            self.mean_module, self.covar_module = gpytorch.means.ConstantMean(), made("matern 5/2", 0.4, 3.0)

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    model = Model().to(dtype)
    model.likelihood.noise, model.mean_module.constant = noise, 0.7
    return model.eval()


def exact_mean(model, x):
    """In float64, by a dense solve."""
    model = copy.deepcopy(sketchgp.restore(model)).double()
    (train,), y, x = model.train_inputs, model.train_targets, x.double()
    with torch.no_grad():
        matrix = model.covar_module(train).to_dense() + model.likelihood.noise * identity(len(train))
        rest = torch.linalg.solve(matrix, y - model.mean_module.constant)
        return model.covar_module(x, train).to_dense() @ rest + model.mean_module.constant


def exact_variance(model, x):
    """By a factorization in float64, of the model as it is."""
    with torch.no_grad():
        model = copy.deepcopy(model).double().eval()
        train, x = model.train_inputs[0].double(), x.double()
        matrix = model.covar_module(train).to_dense() + model.likelihood.noise * identity(len(train))
        cross = model.covar_module(train, x).to_dense()
        return model.covar_module(x, diag=True) - (cross * torch.linalg.solve(matrix, cross)).sum(0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("tol", [1e-1, 1e-6])
def test_the_bound_of_a_mean(dtype, tol):
    model, x = model_of(dtype), points(40, 3, seed=1, dtype=dtype) * 1.5
    choices = {"solver": sketchgp.ConjugateGradients(tol=tol), "preconditioner": sketchgp.RPCholesky(rank=60)}
    sketchgp.accelerate(model, **choices)
    with gpytorch.settings.max_cholesky_size(20):
        found = sketchgp.predict(model, x, variance="exact")
        alone = sketchgp.predict(model, x, variance=None)
    bound = found.mean_error_bound
    assert bound.shape == (40,) and bound.dtype == torch.float64
    assert torch.equal(alone.mean_error_bound, bound) and alone.mean_error_bound_deviations is None
    off = (found.mean.double() - exact_mean(model, x)).abs()
    assert bool((off <= bound).all())
    if tol < 1e-3:
        assert float(bound.max()) < 1e-3
    relative = bound / found.observation_variance.double().sqrt()
    assert torch.allclose(found.mean_error_bound_deviations, relative)


@pytest.mark.parametrize(
    ("solver", "dtype"),
    [("auto", torch.float32), (sketchgp.ConjugateGradients(), torch.float64), (sketchgp.Cholesky(), torch.float32)],
)
def test_the_bound_of_variances(dtype, solver):
    model, x = model_of(dtype), points(40, 3, seed=1, dtype=dtype) * 1.5
    exact = exact_variance(model, x)
    sketchgp.accelerate(model, solver=solver, preconditioner=sketchgp.RPCholesky(rank=30))
    with gpytorch.settings.max_cholesky_size(20):
        found = sketchgp.predict(model, x, variance="exact")
    off, bound = (found.variance.double() - exact).abs(), found.variance_error_bound
    assert bound.shape == (40,) and bound.dtype == torch.float64 and bool((off <= bound).all())
    iterates = not isinstance(solver, sketchgp.Cholesky)
    assert float(bound.max()) < (0.01 if iterates else 1e-9 if dtype == torch.float64 else 1e-6)
    if iterates:
        assert float(off.max()) > 1e-9  # so that there is something to bound
    assert sketchgp.predict(model, x, variance=None).variance_error_bound is None


def test_a_mean_whose_rounding_is_all_that_is_wrong_with_it():
    """Of a model in float32 with a large mean: what the weights lack is nothing beside the last step."""
    model, x = model_of(torch.float32, noise=0.5), points(40, 3, seed=1, dtype=torch.float32)
    model.mean_module.constant = 3e4
    model.train_targets.add_(3e4)
    sketchgp.accelerate(model, solver=sketchgp.ConjugateGradients(tol=1e-9))
    with gpytorch.settings.max_cholesky_size(20):
        found = sketchgp.predict(model, x, variance=None)
    off = (found.mean.double() - exact_mean(model, x)).abs()
    assert float(off.max()) > 1e-4 and bool((off <= found.mean_error_bound).all())
    assert float(found.mean_error_bound.max()) < 0.01


@pytest.mark.parametrize("what", ["called kernel", "linear mean", "computed inputs", "one of more features"])
def test_no_bound_where_rounding_is_not_known(what):
    """Of means a linear one in float32 loses any number of digits, as do kernels that are called, far from 0."""
    model, x = model_of(torch.float32), points(5, 3, seed=1, dtype=torch.float32)
    if what == "called kernel":
        kernel = gpytorch.kernels.PiecewisePolynomialKernel(q=1)
        model.covar_module = gpytorch.kernels.ScaleKernel(kernel)
    elif what == "linear mean":
        model.mean_module = gpytorch.means.LinearMean(3)
        model.mean_module.weights.data.fill_(1e8)
    else:
        plain, kernel = type(model), model.covar_module
        if what == "one of more features":
            kernel.active_dims = torch.tensor([1, 5])

        class Model(plain):
            def forward(self, x):
                return gpytorch.distributions.MultivariateNormal(self.mean_module(x), kernel(torch.cat([x, x / 3], -1)))

        model.__class__ = Model
    sketchgp.accelerate(model, solver=sketchgp.ConjugateGradients())
    with gpytorch.settings.max_cholesky_size(20):
        found = sketchgp.predict(model, x, variance="exact")
    assert found.mean_error_bound is None and found.mean_error_bound_deviations is None
    assert (found.variance_error_bound is None) == (what != "linear mean")
    assert (found.report.error_bound is None) == (what == "called kernel")


def test_no_bound_of_a_called_kernel_whose_matrix_gpytorch_multiplies():
    """The matrix is then a plain one to the solver, of which it certifies its solution; k(X, x) is not."""
    model, x = model_of(torch.float64), points(5, 3, seed=1)
    model.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.PiecewisePolynomialKernel(q=1)).double()
    sketchgp.accelerate(model, matmul="gpytorch")
    with gpytorch.settings.max_cholesky_size(20):
        found = sketchgp.predict(model, x, variance="exact")
    assert found.mean_error_bound is None and found.variance_error_bound is None
    mean, variance = found.mean, found.variance
    again = sketchgp.predict(sketchgp.accelerate(model), x, variance="exact")  # by a factorization
    assert torch.allclose(mean, again.mean, atol=1e-2) and torch.allclose(variance, again.variance, rtol=2e-2)


def test_no_bound_where_nothing_is_known():
    model, x = model_of(torch.float64), points(5, 3, seed=1)
    sketchgp.accelerate(model)
    assert sketchgp.predict(model, x).mean_error_bound is None  # GPyTorch factorizes a matrix of this size


# --- solving until predictions are right ----------------------------------------------------------------------


def error_in_deviations(problem, value, x):
    """The largest error of the mean at x over the posterior deviation of an observation, by a dense solve."""
    kernel = copy.deepcopy(problem.kernel).double()
    train, x = problem.x.double(), x.double()
    with torch.no_grad():
        c = kernel(train, x).to_dense()
        root = torch.linalg.cholesky(kernel(train).to_dense() + problem.noise_vector.diag())
        exact = torch.cholesky_solve(problem.y.double().unsqueeze(1), root).squeeze(1)
        explained = torch.linalg.solve_triangular(root, c, upper=False).square().sum(dim=0)
        prior = kernel(x).to_dense().diagonal()
        deviation = (prior - explained + problem.noise_vector.min()).sqrt()
        return float(((c.mT @ (value.double() - exact)).abs() / deviation).max())


def hard(dtype=torch.float64, noise=1e-4, n=400):
    """A problem whose mean is far off at a residual of 1e-3: targets are a smooth function and a little noise."""
    x = points(n, 4, dtype=dtype)
    y = (torch.sin(7 * x[:, 0]) * x[:, 1] + 0.01 * normal(n)).to(dtype)
    return sketchgp.FullProblem(made("rbf", 0.5, 1.0).to(dtype), x, y, noise)


@pytest.mark.parametrize(("dtype", "noise"), [(torch.float64, 1e-1), (torch.float32, 1e-2), (torch.float64, 1e-4)])
def test_the_estimate_of_the_error_of_predictions(dtype, noise):
    problem, x = hard(dtype, noise), points(300, 4, seed=5, dtype=dtype)
    choice = sketchgp.RPCholesky(rank=40)
    system, columns = problem.system(), problem.y.double().unsqueeze(1)  # weights in float64, as a model has them
    built = choice.build(system.operator, problem.noise_vector)
    value, report = sketchgp.ConjugateGradients(tol="posterior").run(system, columns, built, below=True)
    assert report.converged and report.judged == "predictions" and report.tol == 0.01
    found = error_in_deviations(problem, value[:, 0], x)
    assert report.max_deviations <= 0.01 and found <= 0.02
    assert found <= 2 * report.max_deviations <= 60 * found  # it is sharp
    assert float(report.certain_deviations) >= found
    assert "predictions within about" in str(report)
    assert ("certainly within" in report.table()) == (report.certainty < 1)


def test_a_residual_does_not_say_so():
    problem, x = hard(noise=1e-5, n=250), points(300, 4, seed=5)
    choice = sketchgp.RPCholesky(rank=60)
    plain = sketchgp.ConjugateGradients(tol=1e-3).solve(problem, choice)
    found = sketchgp.ConjugateGradients(tol="posterior").solve(problem, choice)
    assert error_in_deviations(problem, plain.value, x) > 0.05
    assert error_in_deviations(problem, found.value, x) < 0.02
    assert plain.report.deviations is None and plain.report.judged == "residual"


def test_a_bound_is_met():
    problem, x = hard(noise=1e-3), points(300, 4, seed=5)
    solution = sketchgp.ConjugateGradients(tol="certified").solve(problem, sketchgp.RPCholesky(rank=100))
    report = solution.report
    assert report.converged and report.judged == "bound" and report.max_certain <= 0.01
    assert error_in_deviations(problem, solution.value, x) <= report.max_certain
    loose = sketchgp.ConjugateGradients(tol="posterior").solve(problem, sketchgp.RPCholesky(rank=100)).report
    assert loose.iterations < report.iterations and loose.max_certain > 0.01


@pytest.mark.parametrize(
    ("tol", "said"), [("posterior", "predictions .* tolerance 1e-02"), ("certified", "certain to")]
)
def test_a_solve_that_ends_short_says_what_was_not_met(tol, said):
    solver = sketchgp.ConjugateGradients(tol=tol, max_iterations=8)
    with pytest.warns(sketchgp.ConvergenceWarning, match=said):
        report = solver.solve(hard(), sketchgp.RPCholesky(rank=20)).report
    assert not report.converged and report.reason == "ran out of iterations"


def test_a_bound_that_rounding_does_not_allow():
    with pytest.warns(sketchgp.ConvergenceWarning, match="certain to .* tol='posterior'"):
        report = (
            sketchgp.ConjugateGradients(tol="certified").solve(hard(noise=1e-9), sketchgp.RPCholesky(rank=300)).report
        )
    assert not report.converged


@pytest.mark.parametrize(("dtype", "noise"), [(torch.float32, 1e-5), (torch.float64, 1e-6)])
def test_a_residual_at_its_target_with_a_bound_that_is_not(dtype, noise):
    """Where rounding leaves the bound too wide, whatever the residual is: the solve ends, and says so."""
    kernel = ScaleKernel(RBFKernel()).to(dtype)
    kernel.base_kernel.lengthscale = 0.5
    problem = sketchgp.FullProblem(kernel, points(60, dtype=dtype), normal(60, dtype=dtype), noise)
    with pytest.warns(sketchgp.ConvergenceWarning, match="certain to"):
        solution = sketchgp.ConjugateGradients(tol="certified").solve(problem, sketchgp.RPCholesky(rank=20))
    assert not solution.report.converged
    assert solution.report.max_residual < 1e-2


@pytest.mark.parametrize("tol", ["posterior", "certified"])
def test_columns_and_starts(tol):
    """Each column has its own tolerance; a start that is right takes no iteration; nothing is asked of zeros."""
    problem = hard(noise=1e-2)
    y = torch.stack([problem.y, torch.zeros_like(problem.y), 30 * normal(len(problem.y))], dim=1)
    problem = sketchgp.FullProblem(problem.kernel, problem.x, y, 1e-2)
    solution = sketchgp.ConjugateGradients(tol=tol).solve(problem)
    assert solution.report.converged and bool((solution.value[:, 1] == 0).all())
    again = sketchgp.ConjugateGradients(tol="certified").solve(
        problem, initial=sketchgp.Cholesky().solve(problem).value
    )
    assert again.report.converged and again.report.iterations == 0


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("tol", ["posterior", "certified"])
def test_very_few_points(n, tol):
    problem = sketchgp.FullProblem(made("rbf", 0.5, 1.0), points(n, 2), normal(n), 0.1)
    for preconditioner in ("auto", None):
        solution = sketchgp.ConjugateGradients(tol=tol).solve(problem, preconditioner)
        assert solution.report.converged
        exact = sketchgp.Cholesky().solve(problem).value
        assert torch.allclose(solution.value, exact, atol=0.02)


@pytest.mark.parametrize("tol", ["posterior", "certified"])
def test_a_solve_that_was_interrupted_goes_on_to_the_same_bits(tol, tmp_path):
    problem, choice = hard(noise=1e-3), sketchgp.RPCholesky(rank=20)
    whole = sketchgp.ConjugateGradients(tol=tol).solve(problem, choice)
    solver = sketchgp.ConjugateGradients(tol=tol, checkpoint=tmp_path / "solve", every=1e-9, max_iterations=9)
    with pytest.warns(sketchgp.ConvergenceWarning):
        solver.solve(problem, choice)
    rest = dataclasses.replace(solver, max_iterations=None).solve(problem, choice)
    assert torch.equal(rest.value, whole.value) and rest.report.iterations == whole.report.iterations
    assert rest.report.max_deviations == whole.report.max_deviations


def test_batches_are_followed_one_by_one():
    x, scales = points(2 * 120, 3).reshape(2, 120, 3), (1.0, 9.0)
    kernels = [made("rbf", 0.4, scale) for scale in scales]
    matrix = torch.stack([kernel(part).to_dense().detach() for kernel, part in zip(kernels, x, strict=True)])
    noise = torch.tensor([[1e-2], [1.0]], dtype=torch.float64).expand(2, 120)
    rhs = normal(2, 120, 1)
    solver, system = sketchgp.ConjugateGradients(tol="posterior"), System(DenseLinearOperator(matrix), noise)
    value, report = solver.run(system, rhs, None)
    assert report.converged and report.deviations.shape == (2,)
    for i, kernel in enumerate(kernels):
        problem = sketchgp.FullProblem(kernel, x[i], rhs[i, :, 0], float(noise[i, 0]))
        found = error_in_deviations(problem, value[i, :, 0], points(200, 3, seed=3))
        assert found <= 0.02 and found <= 2 * float(report.deviations[i]) <= 60 * found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_model_solves_for_its_mean_until_it_is_right(dtype):
    model, x = model_of(dtype, noise=1e-2, n=300), points(60, 3, seed=1, dtype=dtype)
    solver = sketchgp.ConjugateGradients(tol="posterior")
    sketchgp.accelerate(model, solver=solver, preconditioner=sketchgp.RPCholesky(rank=30))
    with gpytorch.settings.max_cholesky_size(20), sketchgp.record_solves() as solves:
        found = sketchgp.predict(model, x, variance=None)
        assert found.report.judged == "predictions" and found.report.converged
        model._clear_cache()
        called = model(x).mean
        assert [solve.judged for solve in solves] == ["predictions", "predictions"]
        assert torch.equal(called, found.mean)
        _ = model(x[:3]).variance  # other solves go to a residual
        model.train()
        loss = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
        loss(model(*model.train_inputs), model.train_targets).backward()
    assert {solve.judged for solve in solves[2:]} == {"residual"}
    assert float((found.mean.double() - exact_mean(model, x)).abs().max()) < 5e-3 * float(found.mean.std())


def test_how_sure_a_model_is_where_it_is_followed():
    """Of fewer points than are taken for neighbours the deviations are exact; a training point counts as if new."""
    kernel, x, other = made("matern 3/2", 0.6, 2.0), points(200, 3), points(16, 3, seed=1)
    noise = 0.01 + 0.05 * points(200, 1, seed=2)[:, 0]
    system = sketchgp.FullProblem(kernel, x, normal(200), noise).system()
    with torch.no_grad():
        matrix, c = kernel(x).to_dense() + noise.diag(), kernel(x, other).to_dense()
    followed = FollowedPoints.choose(system, (c, torch.full((16,), 2.0, dtype=torch.float64)))
    assert followed.covariances.shape == (200, 32) and len(followed.rows) == 16
    found = followed.deviations(system)
    inverse = torch.linalg.inv(matrix)
    assert torch.allclose(found[16:], inverse.diagonal()[followed.rows].rsqrt(), rtol=1e-8)
    nearest = noise[c.argmax(dim=0)]
    exact = (2.0 - (c * (inverse @ c)).sum(dim=0) + nearest).sqrt()
    assert torch.allclose(found[:16], exact, rtol=1e-3)  # the farthest of all points is left out
    assert len(FollowedPoints.choose(system).rows) == 32


def test_deviations_from_neighbours_are_near_the_exact_ones():
    kernel, x, other = made("rbf", 0.5, 1.0), points(1200, 3), points(16, 3, seed=1)
    system = sketchgp.FullProblem(kernel, x, normal(1200), 1e-2).system()
    with torch.no_grad():
        matrix, c = kernel(x).to_dense() + 1e-2 * identity(1200), kernel(x, other).to_dense()
    found = FollowedPoints.choose(system, (c, torch.ones(16, dtype=torch.float64))).deviations(system)[:16]
    exact = (1.01 - (c * torch.linalg.solve(matrix, c)).sum(dim=0)).sqrt()
    assert bool((found >= 0.1).all()) and bool((found / exact > 0.8).all()) and bool((found / exact < 1.2).all())


def test_points_alone_are_right_too() -> None:
    """Few points that are followed are among them; what is predicted there hangs on one row of the residual."""
    generator = torch.Generator().manual_seed(0)

    def normals(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    n, alone, noise = 400, 12, 1e-4
    x = 0.3 * normals(n, 2)
    x[:alone] = 30 * normals(alone, 2)
    y = torch.sin(3 * x[:, 0]) + 0.01 * normals(n)
    y[:alone] += normals(alone)
    kernel = ScaleKernel(MaternKernel(nu=1.5)).double()
    kernel.outputscale, kernel.base_kernel.lengthscale = 1.0, 0.3
    problem = sketchgp.FullProblem(kernel, x, y, noise=noise)
    solution = sketchgp.ConjugateGradients(tol="posterior").solve(problem, preconditioner=sketchgp.RPCholesky(rank=100))
    matrix = kernel(x).to_dense().detach()
    exact = torch.linalg.solve(matrix + noise * torch.eye(n, dtype=torch.float64), y)
    off = (matrix @ (solution.value - exact)).abs() / noise**0.5
    assert solution.report.converged
    assert float(off.max()) < 0.02
