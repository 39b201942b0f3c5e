"""The full-scale preconditioner: against dense algebra, its derivatives, its neighbours, and in models."""

from __future__ import annotations

import gpytorch
import pytest
import torch
from gpytorch.kernels import CosineKernel, Kernel, MaternKernel, PeriodicKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from linear_operator.operators import DenseLinearOperator, ToeplitzLinearOperator
from torch import Tensor

import sketchgp
from cases import each
from gp_models import SOLVED, Plain, dense, gradient_error, iterative, marginal, posterior
from problems import dense as dense_kernel
from problems import identity, log_determinant, normal, points, relative, set_scales
from sketchgp import ConjugateGradients, FullProblem, FullScale, InputError, NumericalError, RPCholesky
from sketchgp.density import Exact, Vecchia
from sketchgp.fitting.objective import Objective
from sketchgp.operators import KernelMatrix
from sketchgp.operators.access import Access
from sketchgp.preconditioners import PreconditionerCache
from sketchgp.preconditioners.full_scale import FullScaleFactor, neighbors_of

N = 120
KERNELS = {
    "matern": lambda: set_scales(ScaleKernel(MaternKernel(nu=1.5)), 1.7, 0.3),
    "sum": lambda: set_scales(ScaleKernel(MaternKernel(nu=2.5)), 1.0, 0.3) + ScaleKernel(RBFKernel()),
    "periodic": lambda: ScaleKernel(PeriodicKernel()) * MaternKernel(nu=0.5),
}


def _matrices(name: str = "matern", n: int = N, d: int = 2) -> tuple[KernelMatrix, Tensor, Tensor]:
    """Return K, the noise of each point, and ``K + D`` as a dense matrix."""
    kernel, x = KERNELS[name]().double(), points(n, d)
    noise = torch.linspace(0.02, 0.1, n, dtype=torch.float64)
    return KernelMatrix.of(kernel, x), noise, dense_kernel(kernel, x).detach() + torch.diag(noise)


@pytest.mark.parametrize("rank", [0, 15])
@pytest.mark.parametrize("name", KERNELS)
def test_against_dense(name, rank):
    """Inverse, determinant and samples are of one matrix, which resembles ``K + D``."""
    operator, noise, matrix = _matrices(name)
    built = FullScale(rank=rank, neighbors=8).build(operator, noise)
    inverse = built.apply_inverse(identity(N))
    assert relative(inverse, inverse.mT) < 1e-10
    assert relative(built.log_determinant(), -torch.logdet(inverse)) < 1e-9
    assert relative(built.inverse_diagonal(), inverse.diagonal()) < 1e-10
    low = torch.cat([identity(rank), torch.zeros(rank, N, dtype=torch.float64)], dim=1)
    root = built.sample(low, torch.cat([torch.zeros(N, rank, dtype=torch.float64), identity(N)], dim=1))
    assert relative(torch.linalg.inv(root @ root.mT), inverse) < 1e-8
    values = torch.linalg.eigvals(inverse @ matrix).real
    assert float(values.max() / values.min()) < 12
    if not rank:
        assert float(values.mean()) == pytest.approx(1)
        assert float(built.log_determinant()) > float(torch.logdet(matrix))


def test_float32_vectors_and_all_neighbours():
    """With every row before it as a neighbour P is the matrix; with float32 vectors the answer is theirs."""
    operator, noise, matrix = _matrices(n=40)
    built = FullScale(rank=0, neighbors=100).build(operator, noise)
    rhs = normal(40, 3)
    assert relative(built.apply_inverse(rhs), torch.linalg.solve(matrix, rhs)) < 1e-9
    found = built.apply_inverse(rhs.float())
    assert found.dtype == torch.float32 and relative(found, torch.linalg.solve(matrix, rhs)) < 1e-5


def test_samples_of_numbers_that_are_none_end():
    operator, noise, _ = _matrices(n=40)
    built, numbers = FullScale(rank=0, neighbors=4).build(operator, noise), normal(40, 2)
    numbers[3, 0] = torch.nan
    found = built.sample(torch.zeros(0, 2).double(), numbers)
    assert bool(found[:, 0].isnan().any()) and bool(found[:, 1].isfinite().all())


def _reference(built: FullScaleFactor, pivots: Tensor, matrix: Tensor, noise: Tensor, *normals: Tensor) -> tuple:
    """Return P and its samples, dense and differentiable."""
    n, order, near = len(noise), built.neighbors.order, built.neighbors.near
    root = torch.linalg.cholesky(matrix[pivots][:, pivots])
    factor = torch.linalg.solve_triangular(root, matrix[pivots], upper=False).mT
    rest = (matrix - factor @ factor.mT + torch.diag(noise))[order][:, order]
    rows = []
    for i in range(n):
        some = near[i][near[i] < i]
        weights = torch.linalg.solve(rest[some][:, some], rest[some, i])
        row = identity(n)[i].index_put((some,), -weights)
        rows.append(row / (rest[i, i] - rest[i, some] @ weights).sqrt())
    local = torch.zeros_like(matrix).index_put((order,), torch.linalg.inv(torch.stack(rows)))
    return factor @ factor.mT + local @ local.mT, factor @ normals[0] + local @ normals[1]


@each(("name", "rank"), [("matern", 10), ("matern", 0), ("sum", 10), ("periodic", 10), ("dense", 10)])
def test_derivatives(name, rank):
    n, x = 60, points(60, 2).requires_grad_()
    kernel = KERNELS["matern" if name == "dense" else name]().double()
    noise = torch.linspace(0.02, 0.1, n, dtype=torch.float64).requires_grad_()
    operator = KernelMatrix.of(kernel, x)
    if name == "dense":
        operator = DenseLinearOperator(operator.to_dense())
    cache = PreconditionerCache(FullScale(rank=rank, neighbors=6))
    built = cache.get(operator, noise, differentiable=True)
    columns, weights, of_samples = normal(n, 4), normal(1, 4, seed=1), normal(n, 3, seed=2)
    normals, h = (normal(rank, 3, seed=3), normal(n, 3, seed=4)), torch.tensor(0.7, dtype=torch.float64)
    result = built.sampled_derivative(built.tensors, columns, weights, of_samples, *normals, h)
    live = [(a, g) for a, g in zip(built.tensors, result, strict=True) if a.requires_grad]
    wanted = [x, noise, *kernel.parameters()]
    found = torch.autograd.grad([a for a, _ in live], wanted, [g for _, g in live])
    matrix, samples = _reference(built, built.pivots, kernel(x).to_dense(), noise, *normals)
    value = (columns * weights * (matrix @ columns)).sum() + (of_samples * samples).sum() + h * torch.logdet(matrix)
    assert relative(built.log_determinant(), torch.logdet(matrix)) < 1e-7
    for a, b in zip(found, torch.autograd.grad(value, wanted), strict=True):
        assert relative(a, b) < 1e-6
    of_determinant = torch.autograd.grad(log_determinant(built), noise)[0]
    assert relative(of_determinant, built.inverse_diagonal()) < 1 and of_determinant.shape == (n,)


BATCH = torch.Size([2])


def _batch(name: str, n: int) -> tuple[Kernel, Tensor]:
    """Return a batch of kernels, or one, and inputs."""
    shape = torch.Size() if name == "noise" else BATCH
    base = MaternKernel(nu=1.5, batch_shape=shape)
    base.lengthscale = 0.3 if name == "noise" else torch.tensor([0.2, 0.5]).reshape(2, 1, 1)
    if name == "called":
        base = base * CosineKernel(active_dims=(0,), batch_shape=shape)
    kernel = ScaleKernel(base, batch_shape=shape).double()
    return kernel, torch.stack([points(n, 2), points(n, 2, seed=5)]) if name == "inputs" else points(n, 2)


@each(("name", "rank"), [("kernels", 6), ("kernels", 0), ("inputs", 6), ("called", 6), ("sum", 6), ("noise", 6)])
def test_batches(name, rank):
    """Inverses, determinants, samples and derivatives are those of each matrix, dense."""
    n, (kernel, x) = 40, _batch(name, 40)
    x, noise = x.requires_grad_(), torch.linspace(0.02, 0.2, 80, dtype=torch.float64).reshape(2, n)
    noise = (noise[0] if name == "inputs" else noise).clone().requires_grad_()
    operator = KernelMatrix.of(kernel, x)
    if name == "sum":
        operator = operator + KernelMatrix.of(RBFKernel().double().requires_grad_(False), x) * 0.5
    built = PreconditionerCache(FullScale(rank=rank, neighbors=5)).get(operator, noise, differentiable=True)
    assert built.batch_shape == BATCH and built.rank == rank
    columns, weights, of_samples = normal(2, n, 4), normal(2, 1, 4, seed=1), normal(2, n, 3, seed=2)
    normals, h = (normal(2, rank, 3, seed=3), normal(2, n, 3, seed=4)), normal(2, seed=5)
    result = built.sampled_derivative(built.tensors, columns, weights, of_samples, *normals, h)
    live = [(a, g) for a, g in zip(built.tensors, result, strict=True) if a.requires_grad]
    wanted = [x, noise, *kernel.parameters()]
    found = torch.autograd.grad([a for a, _ in live], wanted, [g for _, g in live])
    covariances, noises = operator.to_dense().expand(2, n, n), noise.expand(2, n)
    both = [
        _reference(part, part.pivots, covariances[i], noises[i], *(v[i] for v in normals))
        for i, part in enumerate(built.parts)
    ]
    matrix, samples = (torch.stack(values) for values in zip(*both, strict=True))
    value = (columns * weights * (matrix @ columns)).sum() + (of_samples * samples).sum()
    value = value + (h * torch.logdet(matrix)).sum()
    assert relative(built.log_determinant(), torch.logdet(matrix)) < 1e-7
    assert relative(built.sample(*normals), samples) < 1e-7
    rhs = normal(3, 2, n, 2, seed=6)
    assert relative(built.apply_inverse(rhs), torch.linalg.solve(matrix, rhs)) < 1e-7
    for a, b in zip(found, torch.autograd.grad(value, wanted), strict=True):
        assert relative(a, b) < 1e-6


@each("name", ["batch", "batch-matern", "batch-targets"])
@each("dtype", [torch.float64, torch.float32])
def test_models_of_several_outputs(name, dtype):
    model, test = SOLVED[name].build()
    with dense():
        value, gradient = marginal(model)
        mean, variance = posterior(model, test)
    model, test = SOLVED[name].build(dtype)
    tol = 1e-8 if dtype == torch.float64 else 1e-5
    sketchgp.accelerate(model, preconditioner=FullScale(rank=10, neighbors=16))
    with iterative(probes=60, tol=tol), sketchgp.record_solves() as solves:
        found, found_gradient = marginal(model)
        found_mean, found_variance = posterior(model, test)
    assert solves and all(report.preconditioner == "FullScale" for report in solves)
    assert float((found - value).abs().max()) < 5e-3 and gradient_error(found_gradient, gradient) < 3e-2
    assert relative(found_mean, mean) < 1e-4 and relative(found_variance, variance) < 1e-3


def test_the_cache_holds_neighbours_while_hyperparameters_move():
    kernel, x, noise = KERNELS["matern"]().double(), points(N, 2), torch.full((N,), 0.05, dtype=torch.float64)
    cache = PreconditionerCache(FullScale(rank=10, neighbors=8))
    first = cache.get(KernelMatrix.of(kernel, x), noise, differentiable=True)
    kernel.base_kernel.lengthscale = 0.31
    second = cache.get(KernelMatrix.of(kernel, x), noise, differentiable=True)
    assert cache.selections == 1 and second.neighbors is first.neighbors
    fresh = FullScale(rank=10, neighbors=8).build(KernelMatrix.of(kernel, x), noise)
    assert relative(second.log_determinant(), fresh.log_determinant()) < 0.02
    assert not torch.equal(first.variances, second.variances)


@pytest.mark.parametrize("d", [2, 9])
def test_neighbours_are_earlier_and_near(d):
    """By a tree in few dimensions, and by what the factor leaves elsewhere: the best of all rows before, nearly."""
    operator, noise, matrix = _matrices(n=400, d=d)
    access, none = Access(operator), torch.zeros(400, 0, dtype=torch.float64)
    found = neighbors_of(access, none, noise, 5)
    ordered = matrix[found.order][:, found.order]
    near = found.near
    assert float((near[5:] < torch.arange(5, 400).unsqueeze(1)).double().mean()) > 0.999
    best = torch.stack([ordered[i, :i].topk(5).values.sum() for i in range(5, 400)])
    taken = ordered.gather(1, near)[5:].sum(dim=1)
    assert float((taken / best).mean()) > 0.999


CASES = {
    "one row": points(1, 2),
    "two rows": points(2, 2),
    "duplicates": points(20, 2).repeat(3, 1),
    "constant columns": torch.cat([points(50, 1), torch.ones(50, 3, dtype=torch.float64)], dim=1),
    "one far row": torch.cat([points(50, 2), torch.full((1, 2), 1e7, dtype=torch.float64)]),
    "many inputs": points(60, 12),
}


@each("what", CASES)
@each("dtype", [torch.float64, torch.float32])
def test_unusual_rows(what, dtype):
    x = CASES[what].to(dtype)
    kernel, y = KERNELS["matern"]().to(dtype), normal(len(x), seed=1).to(dtype)
    for choice in (FullScale(), FullScale(rank=0, neighbors=3), FullScale(rank=5, neighbors=4)):
        tol = 1e-4 if dtype == torch.float64 else 1e-3  # float32 rounds solutions by a residual of 1e-4
        solution = ConjugateGradients(tol=tol).solve(FullProblem(kernel, x, y, 1e-2), preconditioner=choice)
        exact = dense_kernel(kernel.double(), x.double()).detach() + 1e-2 * identity(len(x))
        kernel.to(dtype)
        residual = y.double() - exact @ solution.value.double()
        assert solution.report.converged and float(residual.norm() / y.double().norm()) < 2 * tol, choice


def test_fewer_iterations_on_a_map_at_equal_memory():
    """A fifth of those of a low-rank factor of as many numbers a row."""
    x, kernel = points(3000, 2), set_scales(ScaleKernel(MaternKernel(nu=1.5)), 1.0, 0.05).double()
    problem, solver = FullProblem(kernel, x, normal(3000, seed=1), 0.01), ConjugateGradients(tol=1e-3)
    low_rank = solver.solve(problem, preconditioner=RPCholesky(rank=116)).report
    found = solver.solve(problem, preconditioner=FullScale(rank=20, neighbors=32)).report
    assert found.converged and low_rank.converged and 5 * found.iterations <= low_rank.iterations
    assert found.preconditioner == "FullScale" and found.rank == 20


def test_what_it_refuses():
    kernel, x = KERNELS["matern"]().double(), points(30, 2)
    with pytest.raises(InputError, match="evaluates at pairs of inputs"):
        FullScale().build(ToeplitzLinearOperator(torch.linspace(1, 0, 30)), torch.ones(30))
    with pytest.raises(InputError, match="rank"):
        FullScale(rank=-1)
    with pytest.raises(InputError, match="neighbors"):
        FullScale(neighbors=0)
    with pytest.raises(NumericalError, match="not positive definite"):
        FullScale(rank=0).build(KernelMatrix.of(kernel, x), -torch.ones(30, dtype=torch.float64))


@each("dtype", [torch.float64, torch.float32])
@each("fixed", [False, True])
def test_models(dtype, fixed):
    """Loss, gradient, mean and variance are the dense ones."""
    x, test = points(N, 2), points(10, 2, seed=1)
    y = torch.sin(6 * x[:, 0]) + 0.1 * normal(N, seed=2)
    noise = torch.linspace(0.02, 0.1, N, dtype=torch.float64)
    likelihood = FixedNoiseGaussianLikelihood(noise) if fixed else GaussianLikelihood()
    model = Plain(x, y, likelihood, KERNELS["matern"](), gpytorch.means.ConstantMean()).double()
    with dense():
        value, gradient = marginal(model)
        mean, variance = posterior(model, (test,))
    model = model.to(dtype)
    sketchgp.accelerate(model, preconditioner=FullScale(rank=10, neighbors=16))
    tol = 1e-8 if dtype == torch.float64 else 1e-5
    with iterative(probes=20, tol=tol), sketchgp.record_solves() as solves:
        found, found_gradient = marginal(model)
        found_mean, found_variance = posterior(model, (test.to(dtype),))
    assert solves and all(report.preconditioner == "FullScale" for report in solves)
    assert float((found - value).abs()) < 5e-3 and gradient_error(found_gradient, gradient) < 3e-2
    assert relative(found_mean, mean) < 1e-4 and relative(found_variance, variance) < 1e-3


def test_the_mean_alone_is_trained():
    """Where no tensor of the preconditioner needs a gradient, its derivative is none."""
    x = points(N, 2)
    model = Plain(x, torch.sin(6 * x[:, 0]), GaussianLikelihood(), KERNELS["matern"](), gpytorch.means.ConstantMean())
    model.double().requires_grad_(False)
    model.mean_module.requires_grad_(True)
    with dense():
        _, gradient = marginal(model)
    sketchgp.accelerate(model, preconditioner=FullScale(rank=5, neighbors=6))
    with iterative(tol=1e-8):
        _, found = marginal(model)
    assert gradient_error(found, gradient) < 1e-6


def test_the_gradient_is_that_of_the_estimate():
    """Of a loss with few neighbours, so that the probes count: by differences."""
    x = points(N, 2)
    model = Plain(x, torch.sin(6 * x[:, 0]), GaussianLikelihood(), KERNELS["matern"]()).double()
    sketchgp.accelerate(model, preconditioner=FullScale(rank=3, neighbors=2))
    mll = sketchgp.ExactMarginalLogLikelihood(model.likelihood, model.train())
    with iterative(probes=3, tol=1e-10), gpytorch.settings.deterministic_probes(True):
        loss = lambda: mll(model(x), model.train_targets)  # noqa: E731
        loss().backward()
        for parameter in model.parameters():
            ends = []
            for step in (1e-5, -2e-5, 1e-5):
                parameter.data += step
                ends.append(loss().item())
            assert (ends[0] - ends[1]) / 2e-5 == pytest.approx(parameter.grad.item(), rel=1e-4, abs=1e-6)


@each(("lengthscale", "smooth", "d", "expected"), [(0.05, False, 2, "FullScale"), (1.0, True, 2, "RPCholesky"),
                                                   (0.05, False, 4, "RPCholesky")])  # fmt: skip
def test_what_is_taken_automatically(lengthscale, smooth, d, expected):
    """Neighbours on maps whose kernel is rough, and pivots alone elsewhere; in a model and without one."""
    kernel = set_scales(ScaleKernel(RBFKernel() if smooth else MaternKernel(nu=1.5)), 1.0, lengthscale)
    x, y = points(5000, d, dtype=torch.float32), normal(5000, seed=1).float()
    solver = ConjugateGradients(tol=1e-2)
    assert solver.solve(FullProblem(kernel, x, y, 0.1)).report.preconditioner == expected
    few = FullProblem(kernel, x[:1000], y[:1000], 0.1)
    assert solver.solve(few).report.preconditioner == "RPCholesky"
    model = Plain(x, y, GaussianLikelihood(), kernel)
    model.likelihood.noise = 0.1
    sketchgp.accelerate(model, solver=solver)
    prediction = sketchgp.predict(model, x[:2], variance=None)
    assert prediction.report.preconditioner == expected


def test_batches_of_right_hand_sides():
    operator, noise, _ = _matrices(n=50)
    built, rhs = FullScale(rank=5, neighbors=6).build(operator, noise), normal(2, 3, 50, 4)
    found = built.apply_inverse(rhs)
    assert found.shape == rhs.shape and relative(found[1, 2], built.apply_inverse(rhs[1, 2])) < 1e-12
    x, test = points(N, 2), points(6, 2, seed=1).reshape(2, 3, 2)
    model = Plain(x, torch.sin(6 * x[:, 0]), GaussianLikelihood(), KERNELS["matern"]()).double()
    with dense():
        mean, variance = posterior(model, (test,))
    sketchgp.accelerate(model, preconditioner=FullScale(rank=5, neighbors=6))
    with iterative():
        found_mean, found_variance = posterior(model, (test,))
    assert relative(found_mean, mean) < 1e-6 and relative(found_variance, variance) < 1e-5


@pytest.mark.parametrize("rank", [0, 5])
def test_neighbours_are_chosen_anew_where_others_matter(rank):
    """The long and the short lengthscale change places."""
    kernel, x = MaternKernel(nu=1.5, ard_num_dims=2).double(), points(400, 2)
    noise, cache = torch.full((400,), 0.05, dtype=torch.float64), PreconditionerCache(FullScale(rank, neighbors=8))
    for short, long in ((0.02, 0.5), (0.021, 0.45), (0.5, 0.02)):
        kernel.lengthscale = torch.tensor([[long, short]], dtype=torch.float64)
        built = cache.get(KernelMatrix.of(kernel, x), noise, differentiable=True)
    fresh = FullScale(rank, neighbors=8).build(KernelMatrix.of(kernel, x), noise)
    assert cache.selections == 2
    assert relative(built.log_determinant(), fresh.log_determinant()) < 1e-9


def _losses(**choices) -> tuple[Objective, Objective]:
    """Return the losses of one model by Vecchia's approximation and by a factorization."""
    x = points(60, 2)
    model = Plain(x, torch.sin(5 * x[:, 0]), GaussianLikelihood(), ScaleKernel(MaternKernel(nu=1.5, ard_num_dims=2)))
    model = sketchgp.accelerate(model.double()).train()
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    return Objective(model, mll, Vecchia(FullScale(**choices))), Objective(model, mll, Exact())


def test_vecchia_s_density_of_all_neighbours_is_exact():
    approximate, exact = _losses(rank=0, neighbors=100)
    value = approximate.evaluate().value
    found = [p.grad.clone() for p in approximate.parameters]
    assert value == pytest.approx(exact.evaluate().value, rel=1e-10)
    for a, p in zip(found, exact.parameters, strict=True):
        assert torch.allclose(a, p.grad, rtol=1e-7, atol=1e-15)  # that of the constant is zero


@pytest.mark.parametrize("rank", [0, 8])
def test_gradient_of_vecchia_s_density(rank):
    """The gradient is that of the value, neighbours and pivots held."""
    objective, exact = _losses(rank=rank, neighbors=4)
    value, step = objective.evaluate().value, 1e-5
    assert 1e-6 < abs(value - exact.evaluate().value) < 0.5
    objective.evaluate()
    gradients = [p.grad.clone() for p in objective.parameters]
    for parameter, gradient in zip(objective.parameters, gradients, strict=True):
        for entry in range(parameter.numel()):
            ends = []
            for move in (step, -2 * step):
                with torch.no_grad():
                    parameter.view(-1)[entry] += move
                ends.append(objective.evaluate(gradient=False).value)
            with torch.no_grad():
                parameter.view(-1)[entry] += step
            assert float(gradient.view(-1)[entry]) == pytest.approx(
                (ends[0] - ends[1]) / (2 * step), rel=1e-4, abs=1e-8
            )


def test_a_float32_kernel_of_inner_products() -> None:
    """Its entries are had in float32 alone, and P is in float64."""
    x = torch.rand(60, 2, generator=torch.Generator().manual_seed(0))
    model = Plain(
        x,
        torch.sin(6 * x[:, 0]),
        GaussianLikelihood(),
        gpytorch.kernels.LinearKernel() + ScaleKernel(MaternKernel(nu=2.5)),
    )
    sketchgp.accelerate(model, preconditioner=FullScale(rank=5), matmul="gpytorch")
    with gpytorch.settings.max_cholesky_size(0):
        found = sketchgp.predict(model, x[:3], variance="exact", progress=False)
    with torch.no_grad():
        wide, test = x.double(), x[:3].double()
        kernel = model.covar_module.double()
        noisy = kernel(wide).to_dense() + model.likelihood.noise.double() * torch.eye(60)
        expected = kernel(test, wide).to_dense() @ torch.linalg.solve(noisy, model.train_targets.double())
    assert torch.allclose(found.mean.double(), expected, atol=1e-3)
