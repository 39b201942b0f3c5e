"""What ``model(x)`` of an accelerated model returns: a mean of float64 weights, and a covariance that is solved for
when somebody looks at it."""

from __future__ import annotations

import copy
import pickle
import warnings

import gpytorch
import pytest
import torch
from gpytorch.kernels import CosineKernel, LinearKernel, MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from gpytorch.means import ZeroMean

import sketchgp
from cases import each
from gp_models import SOLVED, TORCH_WARNINGS, Plain, data, dense, iterative, scaled
from sketchgp import Cholesky, InputError

pytestmark = TORCH_WARNINGS


def make(noise=1e-2, dtype=torch.float64, kernel=None, solver="auto", **options):
    x, y, test = data(dtype=dtype)
    likelihood = GaussianLikelihood(noise_constraint=gpytorch.constraints.GreaterThan(1e-9))
    model = Plain(x, y, likelihood, kernel or scaled(RBFKernel(), 0.8), ZeroMean())
    likelihood.noise = noise
    model = model.to(dtype).eval()
    return sketchgp.accelerate(model, solver=solver, **options), test


def reference(model, x):
    """Mean ``(m,)`` and covariance ``(m, m)`` by dense float64 algebra."""
    kernel, train = copy.deepcopy(model.covar_module).double(), model.train_inputs[0].double()
    with torch.no_grad():
        noise = copy.deepcopy(model.likelihood).double().noise
        a = kernel(train, train).to_dense() + noise.expand(len(train)).diag()
        c = kernel(train, x.double()).to_dense()
        w = torch.linalg.solve(a, torch.cat([model.train_targets.double().unsqueeze(1), c], dim=1))
        return c.mT @ w[:, 0], kernel(x.double(), x.double()).to_dense() - c.mT @ w[:, 1:]


def test_nothing_is_solved_for_that_nobody_looks_at():
    model, test = make()
    with iterative(tol=1e-3), torch.no_grad(), sketchgp.record_solves() as solves:
        posterior = model(test)
        observed = model.likelihood(posterior)
        assert [solve.columns for solve in solves] == [1]
        assert torch.isfinite(observed.mean).all() and len(solves) == 1
        variance = posterior.variance
        assert [solve.columns for solve in solves] == [1, len(test)]
        assert torch.allclose(observed.variance, variance + model.likelihood.noise)
        assert torch.equal(posterior.stddev, variance.sqrt()) and len(posterior.confidence_region()) == 2
        assert len(solves) == 2
        assert posterior.covariance_matrix.shape == (len(test), len(test)) and len(solves) == 3
        assert posterior.rsample(torch.Size([3])).shape == (3, len(test)) and len(solves) == 3
    mean, covariance = reference(model, test)
    assert torch.allclose(variance, covariance.diagonal(), rtol=0.01)
    assert torch.allclose(posterior.mean, mean, atol=1e-2)


@pytest.mark.parametrize(
    ("noise", "dtype", "preconditioner"),
    [
        (1e-1, torch.float32, None),
        (1e-4, torch.float32, sketchgp.RPCholesky(rank=30)),
        (1e-4, torch.float64, sketchgp.NystromEigenPro(rank=10)),
    ],
)
def test_variances_with_default_tolerances(noise, dtype, preconditioner):
    model, test = make(noise, dtype, scaled(MaternKernel(nu=1.5)), preconditioner=preconditioner)
    with (
        gpytorch.settings.max_cg_iterations(3000),
        gpytorch.settings.max_cholesky_size(20),
        torch.no_grad(),
        sketchgp.record_solves() as solves,
    ):
        variance, covariance = model(test).variance, model(test).covariance_matrix
    _, expected = reference(model, test)
    floor = 1e-4 * noise
    slack = 0 if dtype == torch.float64 else 2e-6
    assert bool(((variance.double() - expected.diagonal()).abs() <= 0.02 * expected.diagonal() + floor + slack).all())
    assert float((covariance.double() - expected).abs().max()) < 0.02 * noise + slack
    assert all(solve.converged and solve.variance_error.max() <= 0.01 for solve in solves if solve.columns > 1)


def test_a_float32_model_is_as_good_as_its_solve():
    """Its weights cancel: rounded to float32, or multiplied by float32 entries, they would be off by more."""
    tight = sketchgp.ConjugateGradients(tol=1e-7, max_iterations=3000)
    model, test = make(1e-5, torch.float32, solver=tight)
    with gpytorch.settings.max_cholesky_size(20), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        mean = model(test).mean
        alone = sketchgp.predict(model, test, variance=None, progress=False).mean
    expected, _ = reference(model, test)
    assert mean.dtype == torch.float32 and torch.equal(mean, alone)
    assert float((mean.double() - expected).abs().max() / expected.std()) < 3e-6


@pytest.mark.filterwarnings("ignore:A not p.d.")
@pytest.mark.parametrize("name", SOLVED)
def test_every_form_of_model(name):
    """Variances, covariances and samples as dense algebra has them, asked for in either order."""
    plain, test = SOLVED[name].build()
    accelerated, _ = SOLVED[name].build()
    sketchgp.accelerate(accelerated)
    with dense(), torch.no_grad():
        expected = plain.eval()(*test)
        variance, covariance = expected.variance, expected.covariance_matrix
    with iterative(), torch.no_grad():
        accelerated.eval()
        assert torch.allclose(accelerated(*test).variance, variance, rtol=0.02, atol=1e-5)
        posterior = accelerated(*test)
        assert torch.allclose(posterior.covariance_matrix, covariance, rtol=0.02, atol=1e-4)
        assert torch.allclose(posterior.variance, variance, rtol=0.02, atol=1e-5)
        assert accelerated(*test).rsample(torch.Size([2])).shape == (2, *variance.shape)


def test_gradients_in_the_test_points():
    """They take no solve beyond the value's."""
    model, test = make()
    model.requires_grad_(False)

    def exact(x):
        train, kernel = model.train_inputs[0], model.covar_module
        with dense():
            a = kernel(train).to_dense() + model.likelihood.noise * torch.eye(len(train), dtype=torch.float64)
            c = kernel(train, x).to_dense()
            return kernel(x).to_dense() - c.mT @ torch.linalg.solve(a, c)

    weights = torch.linspace(-1, 1, len(test) ** 2, dtype=torch.float64).reshape(len(test), -1)
    for ours, theirs in (
        (lambda x: model(x).variance.sum(), lambda x: exact(x).diagonal().sum()),
        (lambda x: (weights * model(x).covariance_matrix).sum(), lambda x: (weights * exact(x)).sum()),
    ):
        found, expected = (test.clone().requires_grad_() for _ in range(2))
        with iterative(), sketchgp.record_solves() as solves:
            value = ours(found)
            count = len(solves)
            (first,) = torch.autograd.grad(value, found)
            assert len(solves) == count
        (first_,) = torch.autograd.grad(theirs(expected), expected)
        assert torch.allclose(first, first_, rtol=1e-4, atol=1e-6)


def test_gradients_in_hyperparameters():
    gradients = []
    for accelerated in (False, True):
        x, y, test = data()
        model = Plain(x, y, GaussianLikelihood(), scaled(RBFKernel(), 0.8)).double().eval()
        if accelerated:
            sketchgp.accelerate(model)
        caches = gpytorch.settings.detach_test_caches(False)
        with iterative() if accelerated else dense(), caches:
            posterior = model(test)
            (posterior.variance.sum() + posterior.covariance_matrix.sum()).backward()
        gradients.append(torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]))
    assert torch.allclose(*gradients, rtol=1e-4, atol=1e-6)


def test_the_density_of_targets_by_a_float32_posterior():
    x, y, z = data(n=40, m=6)
    model = Plain(x.float(), y.float(), GaussianLikelihood(), scaled(RBFKernel()), ZeroMean()).float()
    model.likelihood.noise = 0.1
    expected = copy.deepcopy(model).double().eval()
    expected.set_train_data(x, y)
    wanted = expected.likelihood(expected(z)).log_prob(torch.sin(z[:, 0]))
    model = sketchgp.accelerate(model).eval()
    found = model.likelihood(model(z.float())).log_prob(torch.sin(z[:, 0]).float())
    assert abs(float((found - wanted).detach())) < 1e-3


def test_settings_are_those_of_the_call():
    model, test = make()
    with iterative(), torch.no_grad(), sketchgp.record_solves() as solves:
        posterior = model(test)
    with gpytorch.settings.max_cholesky_size(10**6), sketchgp.record_solves() as later:
        variance = posterior.variance
    assert not variance.requires_grad and [solve.columns for solve in later] == [len(test)]
    assert later[0].tol == solves[0].tol == 1e-8
    with iterative(), torch.inference_mode():
        posterior = model(test)
    assert torch.allclose(posterior.variance, variance)


@pytest.mark.parametrize("what", ["parameter", "data of a parameter", "training inputs"])
def test_a_change_after_the_call_is_noticed(what):
    model, test = make()
    with iterative(), torch.no_grad():
        posterior, known = model(test), model(test)
        variance = known.variance.clone()
        if what == "parameter":
            model.covar_module.base_kernel.raw_lengthscale.add_(0.1)
        elif what == "data of a parameter":
            model.covar_module.base_kernel.raw_lengthscale.data.add_(0.1)
        else:
            model.train_inputs[0].mul_(1.1)
        with pytest.raises(InputError, match="changed after this prediction"):
            posterior.variance  # noqa: B018
        assert torch.equal(known.variance, variance)


def test_copies_slices_and_files():
    model, test = make()
    with iterative(), torch.no_grad():
        variance, covariance = model(test).variance, model(test).covariance_matrix
        part = model(test)[2:5]
        assert torch.allclose(part.variance, variance[2:5], rtol=1e-3)
        assert torch.allclose(part.covariance_matrix, covariance[2:5, 2:5], atol=1e-8)
        between = model(test).lazy_covariance_matrix[2:5, :4]
        assert torch.allclose(between.to_dense(), covariance[2:5, :4], atol=1e-8)
        posterior = model(test)
        for other in (copy.deepcopy(posterior), pickle.loads(pickle.dumps(posterior))):
            assert torch.allclose(other.covariance_matrix, covariance)
        assert torch.allclose(posterior.expand(torch.Size([2])).variance, variance.expand(2, -1), rtol=1e-3)
        assert torch.allclose((posterior * 2.0).variance, 4 * variance, rtol=1e-3)


def test_noises_of_their_own_and_many_points():
    """More test points than are solved for at once; and samples of what is observed have the noise."""
    x, y, _ = data()
    noise = torch.linspace(0.01, 0.3, len(x), dtype=torch.float64)
    kernel = scaled(RBFKernel(), 0.8) + LinearKernel()  # prior variances differ
    model = Plain(x, y, FixedNoiseGaussianLikelihood(noise), kernel, ZeroMean()).double().eval()
    sketchgp.accelerate(model)
    test = torch.rand(600, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    with iterative(), torch.no_grad(), sketchgp.record_solves() as solves:
        variance = model(test).variance
        assert sum(solve.columns for solve in solves) == 1 + len(test) and len(solves) > 2
        a = model.covar_module(x).to_dense() + noise.diag()
        c = model.covar_module(x, test).to_dense()
        expected = model.covar_module(test, diag=True) - (c * torch.linalg.solve(a, c)).sum(0)
        assert torch.allclose(variance, expected, rtol=0.01)
        torch.manual_seed(0)
        samples = model.likelihood(model(test), noise=torch.full((600,), 0.5, dtype=torch.float64)).sample(
            torch.Size([2000])
        )
    assert torch.allclose(samples.var(dim=0), expected + 0.5, rtol=0.2)


def many(n=850, noise=1e-3, dtype=torch.float32, solver="auto", shift=0.0):
    x, y, _ = data(n, dtype=dtype)
    likelihood = GaussianLikelihood(noise_constraint=gpytorch.constraints.GreaterThan(1e-9))
    likelihood.noise = noise
    model = Plain(x, y, likelihood, scaled(MaternKernel(nu=2.5), 0.5 + shift), ZeroMean()).to(dtype).eval()
    return sketchgp.accelerate(model, solver=solver)


def test_many_variances_are_by_one_factorization():
    """Once there are so many that it is cheaper than iterations; it is kept with the model's solution."""
    model = many()
    test = torch.rand(300, 2, generator=torch.Generator().manual_seed(2))
    with torch.no_grad(), sketchgp.record_solves() as solves:
        first = model(test[:5]).variance
        several = model(test).variance
        again = model(test).covariance_matrix
    assert [solve.solver for solve in solves] == ["ConjugateGradients", "ConjugateGradients", "Cholesky"]
    expected = reference(model, test)[1]
    assert torch.allclose(first.double(), expected.diagonal()[:5], rtol=0.02)
    assert torch.allclose(several.double(), expected.diagonal(), rtol=1e-3)
    assert torch.allclose(again.double(), expected, atol=2e-6)
    with torch.no_grad(), sketchgp.record_solves() as solves:
        model.covar_module.outputscale = 2.0
        changed = sketchgp.predict(model, test, progress=False)
    assert [solve.solver for solve in solves] == ["ConjugateGradients", "Cholesky"]
    assert torch.allclose(changed.variance.double(), reference(model, test)[1].diagonal(), rtol=1e-3)
    copied = copy.deepcopy(model)
    with torch.no_grad(), sketchgp.record_solves() as solves:
        assert torch.allclose(copied(test).variance, changed.variance, rtol=1e-4)
        assert torch.allclose(model(test).variance, changed.variance, rtol=1e-4)
    assert [solve.solver for solve in solves].count("Cholesky") == 1


def test_a_factor_is_of_the_hyperparameters_that_it_was_made_of():
    """Also where they change in place, and the model keeps its prediction strategy; and files are without it."""
    model = many()
    test = torch.rand(300, 2, generator=torch.Generator().manual_seed(2))
    with torch.no_grad(), sketchgp.record_solves() as solves:
        before = model(test).variance
        assert len(pickle.dumps(model)) < 10**6, "the factor alone is 6 MB"
        model.covar_module.raw_outputscale.add_(1.0)
        after = model(test).variance
    assert [solve.solver for solve in solves].count("Cholesky") == 2
    assert torch.allclose(after.double(), reference(model, test)[1].diagonal(), rtol=1e-3)
    assert not torch.allclose(after, before, rtol=0.01)


@pytest.mark.parametrize(
    ("what", "expected"),
    [("a solver", "ConjugateGradients"), ("a threshold", "ConjugateGradients"), ("no memory", "ConjugateGradients")],
)
def test_no_factorization_where_the_user_decided_otherwise(what, expected):
    solver = sketchgp.ConjugateGradients() if what == "a solver" else "auto"
    model = many(solver=solver)
    test = torch.rand(100, 2, generator=torch.Generator().manual_seed(2))
    threshold = gpytorch.settings.max_cholesky_size(700 if what == "a threshold" else 800)
    memory = sketchgp.settings.memory_budget(10**7 if what == "no memory" else 10**9)
    with torch.no_grad(), threshold, memory, sketchgp.record_solves() as solves:
        variance = model(test).variance
    assert {solve.solver for solve in solves} == {expected}
    assert torch.allclose(variance.double(), reference(model, test)[1].diagonal(), rtol=0.02)


def test_fast_variances_are_exact():
    """GPyTorch's ``fast_pred_var``, which BoTorch's posteriors switch on, is a root of rank 100."""
    model = many(noise=1e-4)
    test = torch.rand(60, 2, generator=torch.Generator().manual_seed(2))
    with torch.no_grad(), gpytorch.settings.fast_pred_var():
        variance = model(test).variance
    assert torch.allclose(variance.double(), reference(model, test)[1].diagonal(), rtol=0.02)


def test_batches_of_test_points_of_one_model():
    """As acquisition functions ask for them: all are columns of one system, by iterations and by a factorization."""
    model = many()
    test = torch.rand(40, 3, 2, generator=torch.Generator().manual_seed(2)).requires_grad_()
    found = []
    for _ in range(2):
        with sketchgp.record_solves() as solves:
            covariance = model(test).covariance_matrix
            (gradient,) = torch.autograd.grad(covariance.sum(), test)
        found.append((covariance.detach(), gradient))
    assert [solve.solver for solve in solves] == []  # the factor was made for the first ones
    for part in (0, 17):
        assert torch.allclose(found[0][0][part].double(), reference(model, test[part].detach())[1], atol=2e-6)
    assert torch.equal(found[0][0], found[1][0]) and torch.isfinite(found[0][1]).all()
    with sketchgp.record_solves() as solves:
        by_iterations = many(solver=sketchgp.ConjugateGradients())(test).variance
    assert torch.allclose(by_iterations, found[0][0].diagonal(dim1=-1, dim2=-2), rtol=0.02, atol=1e-6)
    assert {solve.solver for solve in solves} == {"ConjugateGradients"}


def test_a_factor_of_other_hyperparameters_is_not_used():
    """Two posteriors of one model, before and after its noises were replaced, each by its own system."""
    x, y, _ = data(850)
    likelihood = FixedNoiseGaussianLikelihood(torch.full((850,), 1e-2, dtype=torch.float64))
    model = Plain(x, y, likelihood, scaled(MaternKernel(nu=2.5), 0.5), ZeroMean()).double().eval()
    sketchgp.accelerate(model)
    test = torch.rand(50, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        before = model(test)
        variance = before.variance
        likelihood.noise = torch.full((850,), 1.0, dtype=torch.float64)
        assert not torch.allclose(model(test).variance, variance, rtol=0.1)
        assert torch.allclose(before.covariance_matrix.diagonal(), variance, rtol=1e-6)


@pytest.mark.parametrize("what", ["mean", "variance", "covariance_matrix"])
def test_second_derivatives_are_refused(what):
    """They would be nought."""
    model, test = make()
    model.requires_grad_(False)
    x = test.clone().requires_grad_()
    with iterative():
        (gradient,) = torch.autograd.grad(getattr(model(x), what).sum(), x, create_graph=True)
        with pytest.raises(NotImplementedError, match="Second derivatives"):
            torch.autograd.grad(gradient.square().sum(), x)


def test_what_is_returned_may_be_changed_in_place():
    model, test = make()
    with iterative(), torch.no_grad():
        for _ in range(2):  # before and after the whole covariance is there
            posterior = model(test)
            known = posterior.variance.clone()
            changed = posterior.variance
            changed *= 4
            assert torch.equal(posterior.variance, known)
            posterior.covariance_matrix  # noqa: B018


@each("size", [1e5, 1e8])
def test_variances_that_rounding_makes_negative(size):
    """Of a wave at a point so far away that its covariances with the others are rounded to more than its variance."""
    x = torch.rand(30, 1, dtype=torch.float64)
    likelihood = GaussianLikelihood(noise_constraint=gpytorch.constraints.GreaterThan(1e-9))
    model = Plain(x, (6 * x).sin()[:, 0], likelihood, ScaleKernel(CosineKernel())).double()
    model.initialize(**{"likelihood.noise": 4e-7, "covar_module.outputscale": 65.0})
    model.covar_module.base_kernel.period_length = 0.7
    points = torch.tensor([[0.2], [0.5], [size]], dtype=torch.float64, requires_grad=True)
    with gpytorch.settings.max_cholesky_size(0):
        posterior = sketchgp.accelerate(model).eval()(points)
        samples = posterior.rsample(torch.Size([4000])).detach()
    assert (posterior.variance > 0).all() and (model.likelihood(posterior).variance > 3.9e-7).all()
    assert torch.allclose(samples.var(dim=0)[:2], posterior.variance.detach()[:2], rtol=0.3)
    (gradient,) = torch.autograd.grad(posterior.stddev.sum(), points)
    assert gradient.isfinite().all()


def test_elements_of_a_batch_are_of_one_solve():
    """As BoTorch takes outputs apart: nothing before a variance is read, and then all of them at once."""
    model, test = SOLVED["batch"].build()
    sketchgp.accelerate(model.eval())
    with iterative(), torch.no_grad(), sketchgp.record_solves() as solves:
        posterior = model(*test)
        parts = [posterior.lazy_covariance_matrix[i] for i in range(2)]
        count = len(solves)
        variances = [part.diagonal(dim1=-1, dim2=-2) for part in parts]
        assert len(solves) == count + 1
        assert torch.equal(torch.stack(variances), posterior.lazy_covariance_matrix.diagonal(dim1=-1, dim2=-2))
        assert parts[1].to_dense().shape == parts[1].shape
        assert torch.equal(parts[1].to_dense(), posterior.covariance_matrix[1])


@pytest.mark.parametrize("shape", [(0, 2), (0, 3, 2), (2, 0, 2)])
def test_no_test_points(shape):
    model = many()
    with torch.no_grad():
        posterior = model(torch.zeros(shape))
        assert posterior.mean.shape == posterior.variance.shape == shape[:-1]


def test_predictions_go_on_from_what_a_call_has_solved():
    """And the other way round: one solution of the mean, one factor."""
    model = many()
    test = torch.rand(300, 2, generator=torch.Generator().manual_seed(2))
    with torch.no_grad(), sketchgp.record_solves() as solves:
        called = model(test)
        mean, variance = called.mean, called.variance
        before = len(solves)
        found = sketchgp.predict(model, test)
    assert len(solves) == before
    assert found.report is solves[0]
    assert torch.allclose(found.mean, mean)
    assert torch.allclose(found.variance, variance, rtol=1e-4)


@pytest.mark.parametrize("noise", ["one", "fixed"])
def test_few_points_in_float32_are_as_right_as_many(noise):
    """The noise lies seven digits below the kernel's scale: a factor in float32 does not exist."""
    x, y, test = (part.float() for part in data(n=200, m=30))
    likelihood = GaussianLikelihood(noise_constraint=gpytorch.constraints.GreaterThan(1e-6))
    likelihood.noise = 1e-4
    if noise == "fixed":
        likelihood = FixedNoiseGaussianLikelihood(torch.full((200,), 1e-4))
    kernel = gpytorch.kernels.ScaleKernel(MaternKernel(nu=2.5))
    kernel.outputscale = 800.0
    model = Plain(x, y, likelihood, kernel).eval()
    exact = copy.deepcopy(model).double()
    sketchgp.accelerate(model)
    test.requires_grad_()
    found = model(test)
    spread = float(y.std())
    with dense():
        twin = test.detach().double().requires_grad_()
        expected = exact(twin)
        assert float((found.mean - expected.mean).detach().abs().max()) < 1e-5 * spread
        assert torch.allclose(found.variance.double(), expected.variance, rtol=2e-3, atol=1e-7)
        covariances = found.covariance_matrix.double(), expected.covariance_matrix
        assert torch.allclose(*covariances, rtol=2e-3, atol=1e-6)
        (of_found,) = torch.autograd.grad(found.variance.sum(), test)
        (of_expected,) = torch.autograd.grad(expected.variance.sum(), twin)
        assert float((of_found - of_expected).norm()) < 1e-2 * float(of_expected.norm())
    with sketchgp.record_solves() as solves:
        predicted = sketchgp.predict(model, test.detach())
    assert torch.allclose(predicted.variance, found.variance.detach(), rtol=2e-3, atol=1e-7)
    assert all(solve.columns > 1 for solve in solves), "the mean is not solved again"


def test_gradients_to_hyperparameters_are_the_same_in_float32():
    """Of the variance of few points, with GPyTorch's default of caches that are detached."""
    found = []
    for dtype in (torch.float64, torch.float32):
        x, y, test = (part.to(dtype) for part in data(n=150, m=10))
        kernel = gpytorch.kernels.ScaleKernel(RBFKernel())
        model = sketchgp.accelerate(Plain(x, y, GaussianLikelihood(), kernel).to(dtype).eval())
        gradients = torch.autograd.grad(model(test).variance.sum(), list(kernel.parameters()))
        found.append(torch.cat([part.double().reshape(-1) for part in gradients]))
    assert float((found[1] - found[0]).norm()) < 1e-3 * float(found[0].norm())


@pytest.mark.parametrize("factorized", [20, 800])
@pytest.mark.parametrize(
    "what", ["parameter", "data of a parameter", "targets", "fixed noise", "mean", "setting of kernel"]
)
def test_a_change_in_eval_mode_is_seen_by_the_next_call(what, factorized):
    x, y, test = data(100)
    fixed = FixedNoiseGaussianLikelihood(torch.full((100,), 1e-2, dtype=torch.float64))
    likelihood = fixed if what == "fixed noise" else GaussianLikelihood()
    model = sketchgp.accelerate(Plain(x, y, likelihood, scaled(MaternKernel(nu=2.5), 0.8)).double()).eval()
    with torch.no_grad(), gpytorch.settings.max_cholesky_size(factorized):
        before = model(test).mean
        if what == "parameter":
            model.covar_module.base_kernel.raw_lengthscale.add_(0.5)
        elif what == "data of a parameter":
            model.covar_module.base_kernel.lengthscale = 0.3
        elif what == "targets":
            model.train_targets.mul_(2)
        elif what == "fixed noise":
            likelihood.noise = torch.linspace(0.01, 1, 100, dtype=torch.float64)
        elif what == "mean":
            model.mean_module.constant = 3.0
        else:
            model.covar_module.base_kernel.nu = 0.5
        after = model(test).mean
        model._clear_cache()
        assert torch.allclose(after, model(test).mean, atol=1e-6)
    assert not torch.allclose(after, before, atol=1e-4)


@pytest.mark.parametrize("factorized", [20, 800])
def test_a_kernel_in_place_of_one_that_has_changed_since(factorized):
    """Its values are those that the mean was solved with; the old kernel's are not."""
    model, test = make()
    with gpytorch.settings.max_cholesky_size(factorized), torch.no_grad():
        model(test).mean  # noqa: B018
        old, model.covar_module = model.covar_module, scaled(RBFKernel(), 0.8).double()
        for parameter in old.parameters():
            parameter.add_(1)
        after = model(test)
        model._clear_cache()
        anew = model(test)
        assert torch.allclose(after.variance, anew.variance, rtol=1e-6)
        assert torch.allclose(after.mean, anew.mean, rtol=1e-6)


def test_fantasies_keep_what_they_were_made_of():
    model, test = make()
    model(test).mean  # noqa: B018
    fantasies = model.get_fantasy_model(test[:2], torch.zeros(2, dtype=torch.float64))
    strategy = fantasies.prediction_strategy
    mean = fantasies(test).mean
    assert fantasies.prediction_strategy is strategy
    with torch.no_grad():
        fantasies.covar_module.base_kernel.lengthscale = 0.2
        assert not torch.allclose(fantasies(test).mean, mean, atol=1e-4)
        fantasies._clear_cache()


@pytest.mark.parametrize("factorized", [20, 800])
def test_what_is_made_without_gradients_has_none(factorized):
    x, y, test = data(100)
    model = Plain(x, y, GaussianLikelihood(), scaled(RBFKernel(), 0.8)).double().eval()
    sketchgp.accelerate(model)
    with torch.no_grad(), gpytorch.settings.max_cholesky_size(factorized):
        posterior = model(test)
        observed = model.likelihood(posterior)
    for one in (observed.stddev, posterior.variance, posterior.covariance_matrix, posterior.rsample()):
        assert not one.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("matmul", ["auto", "gpytorch"])
def test_few_points_are_in_float64_and_variances_as_small_as_they_are(dtype, matmul):
    model, test = make(noise=1e-7, dtype=dtype, matmul=matmul)
    mean, covariance = reference(model, test)
    with torch.no_grad():
        posterior = model(test)
        eps = torch.finfo(dtype).eps
        assert torch.allclose(posterior.mean.double(), mean, atol=10 * eps, rtol=1e-5)
        assert torch.allclose(posterior.variance.double(), covariance.diagonal(), rtol=1e-3, atol=1e-13)
        assert float(posterior.variance.min()) < 1e-6
        with gpytorch.settings.min_variance(1e-3, 1e-3), pytest.warns(gpytorch.utils.warnings.NumericalWarning):
            assert float(posterior.variance.min()) == pytest.approx(1e-3)


def test_a_factorization_is_in_float64_whoever_multiplies():
    """The noise lies below the rounding of float32 entries."""
    model, test = make(noise=5e-9, dtype=torch.float32, matmul="gpytorch", solver=Cholesky())
    with gpytorch.settings.max_cholesky_size(0):
        predicted = sketchgp.predict(model, test, variance="exact")
    mean, covariance = reference(model, test)
    assert torch.allclose(predicted.mean.double(), mean, atol=1e-5, rtol=1e-4)
    assert torch.allclose(predicted.variance.double(), covariance.diagonal(), rtol=0.05, atol=1e-10)


def test_variances_of_sums_with_low_rank_kernels_in_float32():
    """A variance of a hundredth of the noise is right to a share of itself."""
    model, test = make(noise=1e-4, dtype=torch.float32, kernel=LinearKernel() + scaled(RBFKernel(), 0.8))
    _, covariance = reference(model, test)
    with torch.no_grad():
        assert torch.allclose(model(test).variance.double(), covariance.diagonal(), rtol=1e-4, atol=1e-12)


def test_small_variances_of_a_linear_kernel_are_predicted_as_small():
    """GPyTorch raises those in float32 to 1e-6."""
    model, test = make(noise=1e-6, dtype=torch.float32, kernel=LinearKernel())
    _, covariance = reference(model, test)
    found = sketchgp.predict(model, test, variance="exact").variance
    assert float(found.max()) < 1e-6
    assert torch.allclose(found.double(), covariance.diagonal(), rtol=0.05, atol=1e-10)


def test_a_linear_kernel_of_rows_that_are_alike_in_float32():
    """Normal equations square the condition number: variances were 1% off at this noise."""
    model, test = make(noise=0.1, dtype=torch.float32, kernel=LinearKernel())
    x = model.train_inputs[0]
    model.set_train_data(30 * x[:1] + 1e-6 * x, strict=False)
    mean, covariance = reference(model, test)
    with torch.no_grad():
        assert torch.allclose(model(test).variance.double(), covariance.diagonal(), rtol=1e-4)
        assert torch.allclose(model(test).mean.double(), mean, atol=1e-4)


def test_a_linear_kernel_of_rows_on_a_line_in_float32():
    """Rounded features lie beside the line, by as much as tells of the other direction: half a deviation there."""
    model, test = make(noise=1e-6, dtype=torch.float32, kernel=LinearKernel())
    steps = torch.linspace(-1, 1, 30).unsqueeze(1)
    x = torch.tensor([[50.0, -80.0]]) + steps * torch.tensor([[0.7, 0.4]])
    model.set_train_data(x, (3 * steps[:, 0]).sin(), strict=False)
    z = test + torch.tensor([[50.0, -80.0]])
    with torch.no_grad():
        mean, covariance = reference(model, z)
        found, noise = sketchgp.predict(model, z, variance=None).mean, float(model.likelihood.noise)
    assert float(((found.double() - mean) / (covariance.diagonal() + noise).sqrt()).abs().max()) < 0.03


def test_means_of_sums_of_linear_kernels_in_float32():
    """Entries that are rounded to float32 cost the mean 0.01 at this noise; products of features are not."""
    model, test = make(noise=1e-6, dtype=torch.float32, kernel=LinearKernel() + LinearKernel())
    x, z = model.train_inputs[0].double(), test.double()
    with torch.no_grad():
        v, noise, level = (part.double() for part in (
            2 * model.covar_module.kernels[0].variance.squeeze(), model.likelihood.noise, model.mean_module(x[:1])
        ))  # fmt: skip
        weights = torch.linalg.solve(v * x @ x.mT + noise * torch.eye(len(x)), model.train_targets.double() - level)
        found = sketchgp.predict(model, test, variance=None).mean
    assert torch.allclose(found.double(), level + v * z @ (x.mT @ weights), rtol=0, atol=1e-5)


def test_variances_of_nested_linear_kernels_in_float32():
    """A scale was rounded otherwise between different points: variances were twice too large, at 1% of the noise."""
    first, second = ScaleKernel(LinearKernel()), LinearKernel()
    model, test = make(noise=1e-6, dtype=torch.float32, kernel=ScaleKernel(first + second))
    first.outputscale, model.covar_module.outputscale = 5.2, 0.285
    x, z = model.train_inputs[0].double(), test.double()
    with torch.no_grad():
        both = (part.variance.double().squeeze() for part in (first.base_kernel, second))
        v = model.covar_module.outputscale.double() * (first.outputscale.double() * next(both) + next(both))
        weights = torch.linalg.inv(x.mT @ x / model.likelihood.noise.double() + torch.eye(x.shape[1]) / v)
        found = model(test).variance
    assert torch.allclose(found.double(), (z @ weights * z).sum(dim=1), rtol=1e-4, atol=1e-9)


def test_sums_of_low_rank_kernels():
    """GPyTorch adds them by Lanczos, which fails in one dimension."""
    model, test = make(noise=0.1, kernel=LinearKernel() + LinearKernel())
    model.set_train_data(model.train_inputs[0][:, :1], model.train_targets, strict=False)
    test = test[:, :1]
    with torch.no_grad(), gpytorch.settings.max_cholesky_size(0):
        posterior = model(test)
        model.covar_module = LinearKernel(variance_constraint=gpytorch.constraints.Positive()).double()
        model.covar_module.variance = 2 * 0.6931471805599453
        mean, covariance = reference(model, test)
        assert torch.allclose(posterior.mean, mean, rtol=1e-4)
        assert torch.allclose(posterior.variance, covariance.diagonal(), rtol=1e-3)


def test_second_derivatives_of_few_points_in_float64():
    """As GPyTorch has them."""
    model, test = make()
    plain = copy.deepcopy(sketchgp.restore(model))
    sketchgp.accelerate(model)
    found = []
    for one in (plain, model):
        x = test[:2].clone().requires_grad_()
        posterior = one(x)
        value = posterior.mean.sum() + posterior.variance.sum()
        (gradient,) = torch.autograd.grad(value, x, create_graph=True)
        found.append(torch.autograd.grad(gradient.square().sum(), x)[0])
    assert torch.allclose(*found, rtol=1e-5, atol=1e-8)


def test_a_covariance_that_does_not_fit_says_so(monkeypatch):
    model, test = make()
    posterior = model(test)
    monkeypatch.setattr("sketchgp.memory.available_memory", lambda device="cpu": 10)
    with pytest.raises(InputError, match=r"A covariance of .* needs .* are free; predict fewer points"):
        posterior.covariance_matrix  # noqa: B018
