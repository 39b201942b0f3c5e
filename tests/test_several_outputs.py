"""Several outputs of an inducing-point model: the bound, a likelihood's noise, ``fit``; against dense algebra."""

from __future__ import annotations

import warnings

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from gpytorch.means import ConstantMean, LinearMean, ZeroMean
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.utils.warnings import GPInputWarning
from linear_operator.operators import DiagLinearOperator

from problems import normal, points, relative, set_scales
from sketchgp import InducingPointGP, InputError, OneHot, fit, predict
from sketchgp.models.inducing_covariance import IndependentOutputs

N, M, T = 60, 9, 3
TEST = points(7, seed=4)


def _targets(columns=T):
    return (points(N) @ normal(3, columns, seed=2) * 3).sin() + 0.1 * normal(N, columns, seed=3) + 0.5


def _model(y=None, dtype=torch.float64, likelihood=None, mean=None, x=None, z=None, **choices):
    if likelihood is None:
        likelihood = GaussianLikelihood()
        likelihood.noise = 0.05
    kernel = set_scales(ScaleKernel(MaternKernel(nu=1.5, ard_num_dims=3)), 1.3, 0.6)
    x, z = points(N) if x is None else x, points(M, seed=9) if z is None else z
    y = _targets() if y is None else y
    model = InducingPointGP(
        x.to(dtype), y.to(dtype), likelihood, mean or ConstantMean(), kernel, z.to(dtype), **choices
    )
    return model.to(dtype)


def _noises():
    return torch.linspace(0.02, 1.0, N, dtype=torch.float64)


def _bound(model, y=None, *inputs):
    y = model.train_targets if y is None else y
    return ExactMarginalLogLikelihood(model.likelihood, model)(model.train()(model.train_inputs[0]), y, *inputs)


def _dense_bound(model, noise):
    """Of the sum over outputs, by n t."""
    k, z, x = model.covar_module, model.inducing_points, model.train_inputs[0]
    kxz = k(x, z).to_dense()
    q = kxz @ torch.linalg.solve(k(z).to_dense(), kxz.mT)
    density = torch.distributions.MultivariateNormal(model.mean_module(x), q + noise.diag())
    gap = ((k(x).to_dense() - q).diagonal() / noise).sum()
    y = model.train_targets.reshape(len(x), -1)
    return sum(density.log_prob(column) - 0.5 * gap for column in y.mT) / y.numel()


# --- the bound ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [1, T])
@pytest.mark.parametrize("mean", [ZeroMean, ConstantMean, lambda: LinearMean(3)])
def test_the_bound_and_its_gradient(mean, columns):
    model = _model(_targets(columns), mean=mean())
    model.inducing_points.requires_grad_()
    parameters = [p for p in model.parameters() if p.requires_grad]
    value = _bound(model)
    assert value.shape == ()
    found = torch.autograd.grad(value, parameters)
    wanted = _dense_bound(model, model.likelihood.noise.expand(N))
    assert abs(float((value - wanted).detach())) < 1e-9
    by_hand = torch.autograd.grad(wanted, parameters)
    singles = []
    for column in _targets(columns).mT:
        model.set_train_data(points(N), column, strict=False)
        singles.append(_bound(model))
    mean_of_singles = torch.stack(singles).mean()
    assert abs(float((value - mean_of_singles).detach())) < 1e-12
    alone = torch.autograd.grad(mean_of_singles, parameters)
    for one, dense, sum_of_one in zip(found, by_hand, alone, strict=True):
        assert relative(one, dense) < 1e-6
        assert relative(one, sum_of_one) < 1e-9


def test_in_float32():
    assert abs(float((_bound(_model(dtype=torch.float32)) - _bound(_model())).detach())) < 1e-4


def test_as_many_outputs_as_points():
    """Where shapes alone would not tell points from outputs."""
    x, y = points(4), normal(4, 4)
    model = _model(y, x=x, z=x[:2])
    assert abs(float((_bound(model) - _dense_bound(model, model.likelihood.noise.expand(4))).detach())) < 1e-9
    noise = torch.tensor([0.1, 0.2, 0.3, 0.4]).double()
    model = _model(y, x=x, z=x[:2], likelihood=FixedNoiseGaussianLikelihood(noise))
    assert abs(float((_bound(model, None, x) - _dense_bound(model, noise)).detach())) < 1e-9
    one = _model(normal(1, 1), x=x[:1], z=x[:1])
    assert abs(float((_bound(one) - _dense_bound(one, one.likelihood.noise.expand(1))).detach())) < 1e-9


@pytest.mark.parametrize("learned", [False, True])
def test_a_noise_for_each_point(learned):
    likelihood = FixedNoiseGaussianLikelihood(_noises(), learn_additional_noise=learned).double()
    model = _model(likelihood=likelihood)
    value, wanted = _bound(model, None, points(N)), _dense_bound(model, likelihood.noise)
    assert abs(float((value - wanted).detach())) < 1e-9
    parameters = [p for p in model.parameters() if p.requires_grad]
    for one, other in zip(torch.autograd.grad(value, parameters), torch.autograd.grad(wanted, parameters), strict=True):
        assert relative(one, other) < 1e-6
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GPInputWarning)
        with pytest.raises(InputError, match=r"mll\(model\(x\), y, x\)"):
            _bound(model)  # GPyTorch takes the outputs for the points then


def test_training_beside_botorch():
    model = _model()
    wanted = _bound(model)
    with gpytorch.settings.fast_computations(log_prob=False):
        assert float((_bound(model) - wanted).detach()) == 0


def test_the_prior_is_for_its_log_density():
    model = _model()
    prior = model.train()(points(N))
    assert isinstance(prior, MultitaskMultivariateNormal)
    assert prior.mean.shape == (N, T)
    with pytest.raises(InputError, match=r"call model\.eval\(\)"):
        prior.covariance_matrix  # noqa: B018
    with pytest.raises(RuntimeError, match="training inputs"):
        model(points(N) + 1)


# --- fit ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fit(dtype):
    model = _model(dtype=dtype)
    model.inducing_points.requires_grad_()
    before, points_before = float(_bound(model).detach()), model.inducing_points.detach().clone()
    history = fit(model, iterations=12)
    assert not model.training
    assert history.best_loss < -before - 0.05
    assert not torch.equal(points_before, model.inducing_points)
    assert abs(float(_bound(model).detach()) + history.best_loss) < 1e-5
    model.eval()
    assert float((model(points(N).to(dtype)).mean - model.train_targets).detach().square().mean()) < 0.3


def test_fit_with_a_noise_for_each_point():
    model = _model(likelihood=FixedNoiseGaussianLikelihood(_noises()))
    before = float(_dense_bound(model, _noises()).detach())
    assert fit(model, iterations=8).best_loss < -before - 0.01


def test_fit_of_classes():
    x = points(150)
    labels = (3 * x[:, 0]).long()
    classes = OneHot(labels)
    model = InducingPointGP(x, classes.encode(labels, torch.float64), GaussianLikelihood(), ConstantMean(),
                            ScaleKernel(RBFKernel()), x[::10])  # fmt: skip
    history = fit(model.double(), iterations=20)
    assert history.losses[-1] < history.losses[0] - 0.3
    new = points(100, seed=5)
    assert float((classes.decode(model(new).mean) == (3 * new[:, 0]).long()).double().mean()) > 0.85


def test_fit_of_one_column():
    """As of a vector."""
    both = [_model(y) for y in (_targets(1), _targets(1).squeeze(1))]
    first, second = (fit(model, iterations=5).losses for model in both)
    assert first == pytest.approx(second, abs=1e-10)
    assert both[0](TEST).mean.shape == (7, 1)


# --- the likelihood -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variance", ["dtc", "samples"])
@pytest.mark.parametrize("columns", [1, T])
def test_noisy_predictions(columns, variance):
    model = _model(_targets(columns), variance=variance).eval()
    with torch.no_grad():
        latent, noisy = model(TEST), model.likelihood(model(TEST))
        assert isinstance(noisy, MultitaskMultivariateNormal)
        assert noisy.mean.shape == noisy.variance.shape == (7, columns)
        assert torch.equal(noisy.mean, latent.mean)
        assert relative(noisy.variance, latent.variance + 0.05) < 1e-6
        one = latent.covariance_matrix.reshape(7, columns, 7, columns)[:, 0, :, 0]
        full = torch.kron(one + 0.05 * torch.eye(7), torch.eye(columns).double())
        assert relative(noisy.covariance_matrix, full) < 1e-6
        value = normal(7, columns, seed=8)
        dense = torch.distributions.MultivariateNormal(noisy.mean.reshape(-1), full)
        assert abs(float(noisy.log_prob(value) - dense.log_prob(value.reshape(-1)))) < 1e-5
        with gpytorch.settings.fast_computations(log_prob=False):
            assert abs(float(noisy.log_prob(value) - dense.log_prob(value.reshape(-1)))) < 1e-5
        drawn = noisy.rsample(torch.Size([20_000]))
        assert drawn.shape == (20_000, 7, columns)
        centred = (drawn - noisy.mean).reshape(len(drawn), -1)
        assert relative(centred.mT @ centred / len(drawn), full) < 0.05
        assert relative(noisy.variance, predict(model, TEST).observation_variance) < 1e-6


def test_noisy_predictions_at_batches_of_points():
    model = _model().eval()
    batch = points(10, seed=4).reshape(2, 5, 3)
    with torch.no_grad():
        noisy = model.likelihood(model(batch))
        assert noisy.mean.shape == noisy.variance.shape == (2, 5, T)
        alone = model.likelihood(model(batch[1]))
        assert relative(noisy.covariance_matrix[1], alone.covariance_matrix) < 1e-9
        assert relative(noisy.log_prob(normal(2, 5, T))[1], alone.log_prob(normal(2, 5, T)[1])) < 1e-9


def test_gradient_of_noisy_predictions():
    model = _model().eval()
    point = TEST.clone().requires_grad_()
    value = model.likelihood(model(point)).log_prob(normal(7, T))
    (found,) = torch.autograd.grad(value, point)
    step = torch.zeros(7, 3, dtype=torch.float64)
    step[2, 1] = 1e-6
    with torch.no_grad():
        up, down = (model.likelihood(model(TEST + s)).log_prob(normal(7, T)) for s in (step, -step))
    assert abs(float(found[2, 1] - (up - down) / 2e-6)) < 1e-4 * abs(float(found[2, 1]))


@pytest.mark.parametrize("p", [7, T, N])
def test_given_noises(p):
    """Of points, and of their outputs; also of as many points as outputs or training points."""
    model = _model(likelihood=FixedNoiseGaussianLikelihood(_noises())).eval()
    test = points(p, seed=4)
    with torch.no_grad():
        latent, likelihood = model(test), model.likelihood
        of_points, of_outputs = points(p, 1, seed=5).squeeze(1) + 0.1, points(p, T, seed=6) + 0.1
        noisy = likelihood(model(test), noise=of_points)
        assert relative(noisy.variance, latent.variance + of_points.unsqueeze(1)) < 1e-6
        differing = likelihood(model(test), noise=of_outputs)
        assert relative(differing.variance, latent.variance + of_outputs) < 1e-6
        value = normal(p, T, seed=8)
        for found in (noisy, differing):
            full = latent.covariance_matrix + (found.variance - latent.variance).reshape(-1).diag()
            dense = torch.distributions.MultivariateNormal(latent.mean.reshape(-1), full)
            assert relative(found.covariance_matrix, full) < 1e-6
            assert abs(float(found.log_prob(value) - dense.log_prob(value.reshape(-1)))) < 1e-4
        if p == N:
            noisy = likelihood(model(test), test)
            assert relative(noisy.variance, latent.variance + _noises().unsqueeze(1)) < 1e-6


def test_noises_that_are_not_known():
    """GPyTorch adds nothing to one output then, and says so."""
    model = _model(likelihood=FixedNoiseGaussianLikelihood(_noises())).eval()
    with pytest.warns(GPInputWarning), pytest.raises(InputError, match=r"knows no noise .* noise=\.\.\."):
        model.likelihood(model(TEST))
    with pytest.raises(InputError, match=r"7 points of 3 outputs expect a noise for each point"):
        model.likelihood(model(TEST), noise=torch.ones(5).double())
    of_outputs = FixedNoiseGaussianLikelihood(torch.ones(T).double())  # what has the size of the outputs is not theirs
    with pytest.raises(InputError, match="expect a noise for each point"):
        of_outputs(model(TEST))


def test_a_learned_noise_beside_fixed_ones():
    """It is that of new points."""
    likelihood = FixedNoiseGaussianLikelihood(_noises(), learn_additional_noise=True).double()
    likelihood.second_noise = 0.3
    model = _model(likelihood=likelihood).eval()
    with torch.no_grad():
        for noisy in (likelihood(model(TEST)), likelihood(model(TEST), TEST)):
            assert relative(noisy.variance, model(TEST).variance + 0.3) < 1e-6


# --- the operator ---------------------------------------------------------------------------------------------


def test_the_operator():
    root = normal(4, 4)
    covariance, t = root @ root.mT + torch.eye(4), 3
    operator = IndependentOutputs.of(DiagLinearOperator(torch.zeros(4).double()) + covariance, t)
    full = torch.kron(covariance, torch.eye(t).double())
    assert relative(operator.to_dense(), full) < 1e-12
    whole = points(12, 1).squeeze(1)
    assert relative((operator + DiagLinearOperator(whole)).to_dense(), full + whole.diag()) < 1e-12
    assert relative((operator + full).to_dense(), 2 * full) < 1e-12
    assert relative(operator.add_jitter(0.5).to_dense(), full + 0.5 * torch.eye(12)) < 1e-12
    rhs = normal(12, 2)
    quadratic = (rhs * torch.linalg.solve(full, rhs)).sum(dim=0)
    for reduce in (True, False):
        found, logdet = operator.inv_quad_logdet(rhs, logdet=True, reduce_inv_quad=reduce)
        assert relative(found, quadratic.sum() if reduce else quadratic) < 1e-9
        assert relative(logdet, torch.logdet(full)) < 1e-9
    lower = operator.root_decomposition().root.to_dense()
    assert relative(lower @ lower.mT, full) < 1e-9


def test_noises_of_training_points_are_not_those_of_outputs():
    """As many training points as outputs, and one test point: GPyTorch would add one's noises to the other."""
    likelihood = FixedNoiseGaussianLikelihood(_noises()[:4])
    model = _model(_targets(4)[:4], likelihood=likelihood, x=points(4), z=points(3)).eval()
    with pytest.raises(InputError, match="noise"):
        likelihood(model(TEST[:1]))
    found = likelihood(model(TEST[:1]), noise=torch.full((1,), 0.3).double()).variance
    assert relative(found, model(TEST[:1]).variance + 0.3) < 1e-7
