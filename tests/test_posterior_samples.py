"""Functions drawn from posteriors, against dense float64 algebra and finite differences."""

from __future__ import annotations

import copy
import io
import math
import pickle

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import LinearKernel, PolynomialKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from gpytorch.means import ConstantMean, LinearMean

from cases import each
from gp_models import Deep, Multitask, Plain, iterative
from problems import normal, points, relative
from sketchgp import (
    ASkotch,
    Cholesky,
    ConjugateGradients,
    ConvergenceWarning,
    FullProblem,
    InducingPointGP,
    InputError,
    PosteriorSamples,
    RPCholesky,
    accelerate,
    record_solves,
    sample_posterior,
)
from sketchgp.models.accelerated.sample_solve import SampleSolve
from sketchgp.operators.random_features import PriorPaths
from test_pathwise_variance import KERNELS, _kernel

S, D = 5000, 3
TEST = points(6, seed=4)


def _model(kernel="matern32-ard", n=40, dtype=torch.float64, noise=0.1, x=None, mean=None, likelihood=None, **choices):
    x = points(n) if x is None else x
    y = torch.sin(3 * x[:, 0]) + 0.3 * normal(len(x), seed=3)
    if likelihood is None:
        likelihood = GaussianLikelihood()
        likelihood.noise = noise
    mean = ConstantMean() if mean is None else mean
    with torch.no_grad():
        for parameter in mean.parameters():
            parameter.fill_(0.7)
    kernel = _kernel(kernel) if isinstance(kernel, str) else kernel
    return accelerate(Plain(x, y, likelihood, kernel, mean).to(dtype), **choices).eval()


def _dense(model, test=TEST):
    """Mean and covariance of the exact posterior in float64, by another route."""
    kernel, mean, likelihood = (
        copy.deepcopy(part).double() for part in (model.covar_module, model.mean_module, model.likelihood)
    )
    x, y, test = model.train_inputs[0].double(), model.train_targets.double(), test.double()
    with torch.no_grad():
        noise = likelihood._shaped_noise_covar(torch.Size([len(x)]), x).diagonal(dim1=-1, dim2=-2).double()
        cross, full = kernel(x, test).to_dense(), kernel(x).to_dense() + noise.diag()
        right = torch.linalg.solve(full, torch.cat([(y - mean(x)).unsqueeze(1), cross], dim=1))
        return mean(test) + cross.mT @ right[:, 0], kernel(test).to_dense() - cross.mT @ right[:, 1:]


def _agree(values, mean, covariance, off=0.0):
    """Within what the samples ``(S, p)`` allow, 5 standard errors of each number, and ``off`` posterior deviations (of
    a mean) or variances beside."""
    sd = covariance.diagonal().sqrt()
    scaled, count = (values.detach().double() - mean) / sd, len(values)
    products = scaled.unsqueeze(1) * scaled.unsqueeze(2)
    for found, wanted in ((scaled, 0 * mean), (products, covariance / sd.outer(sd))):
        assert bool(((found.mean(dim=0) - wanted).abs() < 5 * found.std(dim=0) / math.sqrt(count) + off).all())
    assert float((products.mean(dim=0).diagonal() - 1).abs().max()) < 10 / math.sqrt(count) + off


# --- means and covariances ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KERNELS)
def test_posterior_of_full_models(name):
    model = _model(name)
    samples = sample_posterior(model, S, frequencies=2)
    values = samples(TEST)
    assert values.shape == (S, 6) and values.dtype == torch.float64
    _agree(values, *_dense(model))


@pytest.mark.parametrize(("n", "dtype"), zip([1, 2, 40, 200], [torch.float32, torch.float64] * 2, strict=True))
def test_sizes_and_dtypes(n, dtype):
    model = _model("rbf-ard", n, dtype)
    samples = sample_posterior(model, S, frequencies=2)
    values = samples(TEST.to(dtype))
    assert values.dtype == dtype
    _agree(values, *_dense(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_points_that_are_there_twice(dtype):
    x = torch.cat([points(30), points(30), points(1).expand(5, -1)])
    model = _model("rbf", x=x, dtype=dtype, noise=1e-2)
    _agree(sample_posterior(model, S, frequencies=2)(TEST.to(dtype)), *_dense(model))


SOLVERS = ["auto", "conjugate gradients", "ASkotch", "Cholesky"]


@pytest.mark.parametrize(
    ("solver", "dtype"),
    [
        ("auto", torch.float32),
        (ConjugateGradients(tol=1e-6), torch.float64),
        (ASkotch(tol=1e-4), torch.float32),
        (Cholesky(), torch.float64),
    ],
    ids=SOLVERS,
)
def test_solvers(solver, dtype):
    model = _model(n=180, dtype=dtype, solver=solver)
    with iterative(tol=1e-5), record_solves() as solves:
        samples = sample_posterior(model, 2000, frequencies=8)
    assert any(report is samples.report for report in solves)
    assert samples.report.converged and samples.report.columns == 2000
    assert samples.report.solver == ("ConjugateGradients" if isinstance(solver, str) else solver.name)
    _agree(samples(TEST.to(dtype)), *_dense(model), off=2e-3)


@pytest.mark.parametrize(
    ("solver", "noise"), [("auto", 1e-1), ("auto", 2e-4), (ASkotch(block_size=256), 2e-4)], ids=str
)
def test_the_default_tolerance_is_worth_some_percent_of_a_deviation(solver, noise):
    """Of the same functions and noises, less the error of the mean."""
    exact, model = (_model("rbf", n=300, noise=noise, solver=s) for s in ("auto", solver))
    with gpytorch.settings.max_cholesky_size(20):
        samples, mean = sample_posterior(model, 30), model(TEST).mean.detach()
    report = samples.report
    assert report.converged and report.max_residual <= report.tol <= 1e-3
    off = (samples(TEST) - mean) - (sample_posterior(exact, 30)(TEST) - exact(TEST).mean.detach())
    off = off / _dense(model)[1].diagonal().sqrt()
    assert 1e-5 < float(off.square().mean().sqrt()) < 0.06
    assert float(off.abs().max()) < 0.4
    if report.tol < 1e-3:
        assert any("some percent of a deviation" in note for note in report.notes)


def test_the_residual_is_that_of_all_solves(monkeypatch):
    model = _model("rbf", n=300, noise=1e-4)
    accelerate(model, preconditioner=RPCholesky(rank=40))
    seen = {}

    class Watched(SampleSolve):
        def __call__(self, deviations, noise):
            seen["weights"], report = super().__call__(deviations, noise)
            return seen["weights"], report

        def _solve(self, solver, targets, before=None):
            seen.setdefault("targets", targets)
            return super()._solve(solver, targets, before)

    monkeypatch.setattr("sketchgp.posterior_samples.SampleSolve", Watched)
    with gpytorch.settings.max_cholesky_size(20):
        report = sample_posterior(model, 5).report
    kernel = model.covar_module(model.train_inputs[0]).to_dense().detach()
    left = seen["targets"] - kernel @ seen["weights"] - 1e-4 * seen["weights"]
    assert report.tol < 1e-3 and relative(report.residual, left.norm(dim=0) / seen["targets"].norm(dim=0)) < 1e-3


def test_a_tolerance_that_was_chosen_is_kept():
    with gpytorch.settings.max_cholesky_size(20):
        model = _model("rbf", n=300, noise=1e-4, solver=ConjugateGradients(tol=1e-2))
        report = sample_posterior(model, 5).report
    assert report.tol == 1e-2 and 1e-4 < report.max_residual < 1e-2


class _OwnSolver:
    """Keeps the protocol, and no more."""

    problem_type = FullProblem
    name = "my own"

    def validate(self, problem):
        pass

    def solve(self, problem):
        solution = Cholesky().solve(problem)
        solution.report.solver = self.name
        return solution


@pytest.mark.parametrize("kernel", ["matern52-active-dims", "spectral-mixture"])
def test_a_solver_of_ones_own(kernel):
    model = _model(kernel, n=60, solver=_OwnSolver())
    with iterative():
        samples = sample_posterior(model, 2000, frequencies=8)
    assert samples.report.solver == "my own" and samples.report.columns == 2000
    _agree(samples(TEST), *_dense(model))


def test_a_noise_for_each_point():
    x = points(40)[points(40)[:, 0].argsort()]  # half of the space is noisy
    noise = torch.cat([torch.full((20,), 0.01), torch.full((20,), 2.0)]).double()
    model = _model(x=x, likelihood=FixedNoiseGaussianLikelihood(noise), mean=LinearMean(D))
    _agree(sample_posterior(model, S, frequencies=2)(TEST), *_dense(model))


def test_features_of_a_network():
    """What a forward does to the inputs is done to those of the samples."""
    x = points(60)[:, :2]
    torch.manual_seed(3)
    model = accelerate(Deep(x, x[:, 0].sin(), GaussianLikelihood()).double()).eval()
    with torch.no_grad():
        wanted = model(TEST[:, :2])
        _agree(sample_posterior(model, S, frequencies=2)(TEST[:, :2]), wanted.mean, wanted.covariance_matrix)


def test_samples_go_through_the_data_where_the_noise_is_small():
    model = _model("matern12", noise=1e-4)
    values = sample_posterior(model, 20)(model.train_inputs[0])
    assert float((values - model.train_targets).square().mean().sqrt()) < 0.03
    assert float(sample_posterior(model, 20)(TEST + 5).std(dim=0).min()) > 0.5


def test_inducing_points():
    model = _sparse()
    samples = sample_posterior(model, 800, frequencies=8)
    with torch.no_grad():
        _agree(samples(TEST), model(TEST).mean, _predictor(model))
    assert samples.report.columns == 800 and samples.report.size == 8


def test_several_outputs_of_inducing_points_are_independent():
    model = _sparse(columns=2)
    values = sample_posterior(model, 500, frequencies=8)(TEST)
    assert values.shape == (500, 6, 2)
    with torch.no_grad():
        mean, covariance = model(TEST).mean, _predictor(model)
    _agree(values.movedim(2, 1).flatten(1), mean.mT.flatten(), torch.block_diag(covariance, covariance))


def _sparse(columns=None, dtype=torch.float64, n=40):
    likelihood = GaussianLikelihood()
    likelihood.noise = 0.1
    y = normal(n, columns, seed=3) if columns else normal(n, seed=3)
    kernel = _kernel("matern52-active-dims", 1.0)
    return InducingPointGP(points(n).to(dtype), y.to(dtype), likelihood.to(dtype), LinearMean(D).to(dtype),
                           kernel.to(dtype), points(8, seed=9).to(dtype)).eval()  # fmt: skip


def _predictor(model):
    """The error covariance of an inducing-point model's predictor, dense."""
    kernel, z, x = model.covar_module, model.inducing_points, model.train_inputs[0]
    kzx, noise = kernel(z, x).to_dense(), model.noise()
    a = torch.linalg.solve((kzx / noise) @ kzx.mT + kernel(z).to_dense(), kzx / noise)
    g = kernel(TEST, z).to_dense() @ a
    kxt = kernel(x, TEST).to_dense()
    return kernel(TEST).to_dense() - g @ kxt - (g @ kxt).mT + g @ (kernel(x).to_dense() + noise.diag()) @ g.mT


# --- functions ------------------------------------------------------------------------------------------------


def _both():
    return {"full": _model("sum"), "inducing points": _sparse(), "two outputs": _sparse(columns=2)}


@pytest.mark.parametrize("kind", _both())
def test_gradients(kind):
    samples = sample_posterior(_both()[kind], 5, frequencies=32)
    step = 1e-5 * torch.tensor([0.3, 1.0, -0.4], dtype=torch.float64)
    x = TEST.clone().requires_grad_()
    pick = normal(*samples(TEST).shape, seed=1)
    (found,) = torch.autograd.grad((samples(x) * pick).sum(), x)
    wanted = ((samples(TEST + step) - samples(TEST - step)) * pick).sum() / 2
    assert abs(float((found * step).sum() - wanted)) < 1e-6 * float(wanted.abs())
    own = points(10, seed=6).reshape(5, 2, D)
    (found,) = torch.autograd.grad((samples.each(own.requires_grad_()) * pick[:, :2]).sum(), own)
    one = own[3].detach().clone().requires_grad_()
    (wanted,) = torch.autograd.grad((samples[3](one)[0] * pick[3, :2]).sum(), one)
    assert relative(found[3], wanted) < 1e-10


def test_second_derivatives_are_refused():
    samples, x = sample_posterior(_model(), 2), TEST.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(samples(x).sum(), x, create_graph=True)
    with pytest.raises((NotImplementedError, RuntimeError), match=r"[Ss]econd derivatives|once_differentiable"):
        gradient.square().sum().backward()


@pytest.mark.parametrize("kind", _both())
def test_there_are_as_many_frequencies_as_were_asked_for(kind):
    assert "32 frequencies each" in repr(sample_posterior(_both()[kind], 3, frequencies=32))


@pytest.mark.parametrize("kind", _both())
def test_the_same_function_wherever_it_is_evaluated(kind, monkeypatch):
    samples = sample_posterior(_both()[kind], 4, frequencies=32)
    x = points(24, seed=6)
    values = samples(x)
    outputs = values.shape[2:]
    assert relative(samples(x.reshape(2, 3, 4, D)), values.reshape(4, 2, 3, 4, *outputs)) < 1e-12
    assert relative(torch.cat([samples(x[:5]), samples(x[5:])], dim=1), values) < 1e-12
    own = torch.stack([samples[s](x[6 * s : 6 * s + 6])[0] for s in range(4)])
    assert relative(samples.each(x.reshape(4, 6, D)), own) < 1e-12
    assert relative(samples.each(x.reshape(4, 2, 3, D)), own.reshape(4, 2, 3, *outputs)) < 1e-12
    assert len(samples) == 4 and len(samples[1:3]) == 2 and len(samples[-1]) == 1
    assert relative(samples[1:3](x), values[1:3]) < 1e-12 and relative(samples[-1](x), values[3:]) < 1e-12
    monkeypatch.setattr("sketchgp.operators.random_features._ROWS", 3)
    monkeypatch.setattr("sketchgp.operators.random_features._INPUTS", 30)
    assert relative(samples(x), values) < 1e-12
    assert relative(samples.each(x.reshape(4, 6, D)), own) < 1e-12


@pytest.mark.parametrize("name", ["constant", "periodic", "twice"])
def test_parts_of_prior_functions(name):
    paths = PriorPaths(_kernel(name), points(1), 4, torch.Generator().manual_seed(5), frequencies=16)
    x = points(12, seed=6)
    whole = paths(x)
    assert relative(paths.part(slice(1, 3))(x), whole[:, 1:3]) < 1e-12
    own = torch.stack([whole[3 * s : 3 * s + 3, s] for s in range(4)])
    assert relative(paths.each(x.reshape(4, 3, D)), own) < 1e-12


def test_seeds():
    model = _model()
    torch.manual_seed(1)
    first = sample_posterior(model, 3)(TEST)
    torch.manual_seed(2)
    assert torch.equal(sample_posterior(model, 3)(TEST), first)
    assert torch.equal(sample_posterior(model, 3, seed=0)(TEST), first)
    other = sample_posterior(model, 3, seed=1)(TEST)
    assert float((other - first).abs().min(dim=1).values.max()) > 1e-3
    assert float(torch.corrcoef(torch.stack([(a - a.mean()).flatten() for a in (first, other)]))[0, 1].abs()) < 0.9


@pytest.mark.parametrize("kind", _both())
def test_what_becomes_of_the_model_does_not_matter(kind):
    model = _both()[kind]
    samples = sample_posterior(model, 3, frequencies=16)
    before, x = samples(TEST), TEST.clone()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5)
        model.train_inputs[0].mul_(2)
        model.train_targets.add_(1)
    model.train()
    assert torch.equal(samples(x), before)
    model.eval()
    assert relative(sample_posterior(model, 3, frequencies=16)(x), before) > 1e-2


def test_parameters_that_change_are_seen():
    """By a second call, although GPyTorch keeps its old solution."""
    model = _model()
    sample_posterior(model, 2)
    model.covar_module.lengthscale = 2.0
    _agree(sample_posterior(model, S, frequencies=2)(TEST), *_dense(model))


@pytest.mark.parametrize("kind", _both())
def test_they_are_saved(kind):
    samples = sample_posterior(_both()[kind], 3)
    again = pickle.loads(pickle.dumps(samples))
    assert torch.equal(again(TEST), samples(TEST)) and again.report.solver == samples.report.solver
    file = io.BytesIO()
    torch.save(samples, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(TEST), samples(TEST))


def test_they_hold_no_graph_of_the_models_parameters():
    model = _model()
    assert not sample_posterior(model, 2)(TEST).requires_grad
    with torch.inference_mode():
        samples = sample_posterior(model, 2)
    x = TEST.clone().requires_grad_()
    samples(x).sum().backward()
    assert x.grad is not None and all(parameter.grad is None for parameter in model.parameters())


def test_a_solve_that_falls_short_warns():
    model = _model(n=200, noise=1e-3, solver=ConjugateGradients(max_iterations=1), preconditioner=None)
    with iterative(), pytest.warns(ConvergenceWarning, match="ran out of iterations"):
        samples = sample_posterior(model, 2)
    assert not samples.report.converged


def test_checkpoints_are_the_means(tmp_path):
    path = tmp_path / "mean.pt"
    model = _model(n=200, solver=ASkotch(checkpoint=path, every=1e-9))
    with iterative(tol=1e-4):
        model(TEST).mean  # noqa: B018
        kept = path.read_bytes()
        sample_posterior(model, 2)
    assert path.read_bytes() == kept


def test_one_dimension():
    x = points(20)[:, :1]
    model = accelerate(Plain(x[:, 0], x[:, 0].sin(), GaussianLikelihood(), RBFKernel()).double()).eval()
    samples = sample_posterior(model, 3)
    assert samples(x[:5, 0]).shape == (3, 5)
    assert torch.equal(samples(x[:5, 0]), samples(x[:5]))
    assert relative(samples.each(x[:6, 0].reshape(3, 2)), samples.each(x[:6].reshape(3, 2, 1))) < 1e-15


def test_repr():
    samples = sample_posterior(_model(), 3)
    assert isinstance(samples, PosteriorSamples)
    assert repr(samples).startswith(
        "<PosteriorSamples: 3 functions of the Plain, 1024 frequencies each; solved by Chol"
    )
    assert "3 functions of 2 outputs of the InducingPointGP" in repr(sample_posterior(_sparse(columns=2), 3))


# --- what is refused ------------------------------------------------------------------------------------------


class _Own(RBFKernel):
    """Could be anything."""


def _several_tasks():
    x, y = points(30), normal(30, 2)
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=2)
    kernel = gpytorch.kernels.MultitaskKernel(RBFKernel(), num_tasks=2)
    return accelerate(Multitask(x, y, likelihood, kernel).double())


def _batch():
    x = points(30).expand(2, -1, -1)
    return accelerate(Plain(x, normal(2, 30), GaussianLikelihood(), RBFKernel()).double())


def _missing():
    model = _model()
    model.train_targets[3] = torch.nan
    return model


class _Sum(Plain):
    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x) + self.covar_module(2 * x))


def _covariances_added():
    return accelerate(_Sum(points(30), normal(30), GaussianLikelihood(), RBFKernel()).double())


REFUSED = {
    "not accelerated": (lambda: Plain(TEST, TEST[:, 0], GaussianLikelihood(), RBFKernel()), "accelerate"),
    "no model": (lambda: None, "model expects"),
    "several tasks": (_several_tasks, "one plain kernel and no batch"),
    "batch": (_batch, "one plain kernel and no batch"),
    "missing targets": (_missing, "targets without NaN"),
    "covariances added": (_covariances_added, "one plain kernel and no batch"),
    "linear kernel": (lambda: _model(LinearKernel().double()), "one plain kernel"),
    "polynomial": (lambda: _model(PolynomialKernel(power=2).double()), "known of RBF, Matern"),
    "own kernel": (lambda: _model(ScaleKernel(_Own()).double()), "known of RBF, Matern"),
}


@each("kind", REFUSED)
@pytest.mark.filterwarnings("ignore:.*Sparse invariant checks")
def test_models_that_are_refused(kind):
    make, message = REFUSED[kind]
    with pytest.raises(InputError, match=f"sample_posterior.*{message}"):
        sample_posterior(make(), 2)


@each(
    ("x", "message"),
    [
        (None, "expects a tensor of shape"),
        (TEST[0], "expects a dense floating-point tensor of shape"),
        (TEST[:, :2], "expects 3 features"),
        (TEST[:0], "at least one point"),
        (TEST.float(), "expects 3 features, torch.float64"),
        (TEST.where(TEST[2, 1] != TEST, torch.nan), r"x holds NaN or infinity, first in x\[(0, )?2\]"),
    ],
)
def test_points_that_are_refused(x, message):
    samples = sample_posterior(_model(), 2)
    with pytest.raises(InputError, match=message):
        samples(x)
    with pytest.raises(InputError, match=message):
        samples.each(x if x is None else x.expand(2, *x.shape))


def test_parts_that_are_refused():
    samples = sample_posterior(_model(), 3)
    with pytest.raises(InputError, match="points for each of 3 functions, got 2"):
        samples.each(TEST.reshape(2, 3, D))
    for index in (slice(0, 3, 2), slice(2, 2)):
        with pytest.raises(InputError, match="slice without step"):
            samples[index]
    with pytest.raises(IndexError):
        samples[3]
    with pytest.raises(TypeError):
        samples["a"]


def test_a_kernel_is_looked_at_before_any_solve():
    with record_solves() as solves, pytest.raises(InputError), iterative():
        sample_posterior(_model(ScaleKernel(_Own()).double(), n=100), 2)
    assert not solves
