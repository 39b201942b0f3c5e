"""``InducingPointGP`` against dense float64 algebra and GPyTorch's own SGPR."""

from __future__ import annotations

import copy
import math
import pickle
import warnings

import gpytorch
import numpy as np
import pandas
import pytest
import torch
from gpytorch.constraints import Positive
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.kernels import InducingPointKernel, MaternKernel, PolynomialKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood, MultitaskGaussianLikelihood
from gpytorch.means import ConstantMean, LinearMean, ZeroMean
from gpytorch.mlls import ExactMarginalLogLikelihood

from cases import pairwise
from problems import normal, points, relative, set_scales
from sketchgp import (
    KRILL,
    QR,
    ArcCosineKernel,
    ConvergenceWarning,
    EigenPro3,
    EigenPro4,
    Falkon,
    InducingPointGP,
    InducingPointProblem,
    InputError,
    NumericalError,
    OneHot,
    SketchySAGA,
    fit,
    predict,
    record_solves,
)
from sketchgp.inference.collapsed import Collapsed

N, M = 200, 25
KERNELS = {
    "rbf-ard": lambda: ScaleKernel(RBFKernel(ard_num_dims=3)),
    "matern32": lambda: ScaleKernel(MaternKernel(nu=1.5)),
    "sum": lambda: ScaleKernel(RBFKernel()) + MaternKernel(nu=2.5),
}


def _data(dtype=torch.float64, columns=None):
    x = points(N)
    y = (x @ normal(3, columns or 1, seed=2) * 3).sin() + 0.1 * normal(N, columns or 1, seed=3) + 0.5
    return x.to(dtype), (y if columns else y.squeeze(1)).to(dtype)


def _model(dtype=torch.float64, kernel="matern32", solver="auto", columns=None, noise=0.05, mean=None, z=None):
    x, y = _data(dtype, columns)
    likelihood = GaussianLikelihood()
    likelihood.noise = noise
    mean = ConstantMean() if mean is None else mean
    with torch.no_grad():
        for parameter in mean.parameters():
            parameter.fill_(0.3)
    covar = set_scales(KERNELS[kernel](), 1.3, 0.6)
    z = points(M, seed=9) if z is None else z
    return InducingPointGP(x, y, likelihood, mean, covar, z.to(dtype), solver=solver).to(dtype), x, y


def _reference(model, test):
    """Mean and DTC covariance at ``test``, in float64, densely."""
    model = copy.deepcopy(model).double()
    kernel, z = model.covar_module, model.inducing_points
    x, y = model.train_inputs[0].double(), model.train_targets.double().reshape(N, -1)
    test = test.double()
    with torch.no_grad():
        noise = model.noise().double()
        kzz, kxz, ktz = kernel(z).to_dense(), kernel(x, z).to_dense(), kernel(test, z).to_dense()
        inner = kzz + kxz.mT @ (kxz / noise.unsqueeze(1))
        weights = torch.linalg.solve(inner, kxz.mT @ ((y - model.mean_module(x).unsqueeze(1)) / noise.unsqueeze(1)))
        mean = model.mean_module(test).unsqueeze(1) + ktz @ weights
        covariance = (
            kernel(test).to_dense() - ktz @ torch.linalg.solve(kzz, ktz.mT) + ktz @ torch.linalg.solve(inner, ktz.mT)
        )
    return mean, covariance


TEST = points(11, seed=4)


@pytest.mark.parametrize(
    ("kernel", "dtype", "solver"),
    pairwise(KERNELS, [torch.float32, torch.float64], ["auto", QR(), KRILL(tol=1e-9), Falkon(tol=1e-9)]),
)
def test_predictions(kernel, dtype, solver):
    model, _, _ = _model(dtype, kernel, solver)
    model.eval()
    test = TEST.to(dtype)
    mean, covariance = _reference(model, test)
    tight = 1e-5 if dtype == torch.float32 else 1e-6
    with torch.no_grad(), record_solves() as solves:
        found = model(test)
        assert isinstance(found, MultivariateNormal)
        assert found.mean.dtype == dtype
        assert relative(found.mean, mean.squeeze(1)) < tight
        assert relative(found.variance, covariance.diagonal()) < 10 * tight
        assert relative(found.covariance_matrix, covariance) < 10 * tight
        ones = torch.ones(11, 2, dtype=dtype)
        assert relative(found.lazy_covariance_matrix @ ones, covariance @ ones.double()) < 10 * tight
        noisy = model.likelihood(found)
        assert relative(noisy.variance, covariance.diagonal() + 0.05) < 10 * tight
        assert relative(model(test[3:5]).mean, mean[3:5, 0]) < tight
    assert len(solves) == 1  # kept
    assert found.rsample(torch.Size([3])).shape == (3, 11)


@pytest.mark.parametrize("mean", [ZeroMean(), LinearMean(3)])
def test_prior_means(mean):
    model, _, _ = _model(mean=mean)
    assert relative(model.eval()(TEST).mean, _reference(model, TEST)[0].squeeze(1)) < 1e-8


class _Plain(ConstantMean):
    """A mean with a tensor that is neither a parameter nor a buffer."""

    def __init__(self):
        super().__init__()
        self.slopes = torch.tensor([0.3, -0.2, 0.1])

    def forward(self, x):
        return x @ self.slopes


def test_prior_means_of_float32_models():
    """Terms of a linear mean that are large cancel, at the data and at the points."""
    mean, far = LinearMean(3), torch.tensor([1e6, -1e6, 2e6], dtype=torch.float64)
    model, _, _ = _model(torch.float32, mean=mean)
    with torch.no_grad():
        mean.weights.copy_(torch.tensor([[1.2], [1.2], [0.0]]))
        mean.bias.zero_()
    # near enough for float32 to tell all inducing points apart
    x, z, test = (part.detach().double() + far / 10 for part in (model.train_inputs[0], model.inducing_points, TEST))
    x, z, test = x.float(), z.float(), test.float()
    y = model.train_targets + (x.double() @ mean.weights.detach().double()).squeeze(1).float()
    model = InducingPointGP(x, y, model.likelihood, mean, model.covar_module, z).eval()
    expected = _reference(model, test)[0].squeeze(1)
    assert float((model(test).mean.double() - expected).abs().max()) < 1e-5
    one, y = far.float().unsqueeze(0), torch.tensor([1203.0])  # a residual of 1.7e6
    with torch.no_grad():
        mean.weights.copy_(torch.tensor([[1.2345], [-0.4321], [0.0]]))
    prior = float(far @ mean.weights.detach().double().squeeze(1))
    model.likelihood.noise = 2e-4
    scale, noise = model.covar_module.outputscale.item(), model.likelihood.noise.item()
    for solver in (QR(), KRILL(), Falkon()):
        model = InducingPointGP(one, y, model.likelihood, mean, model.covar_module, one, solver=solver).eval()
        assert model(one).mean.item() == pytest.approx(prior + (1203.0 - prior) * scale / (scale + noise), rel=1e-6)
    plain, like = (_model(torch.float32, mean=mean)[0].eval() for mean in (_Plain(), LinearMean(3, bias=False)))
    with torch.no_grad():
        like.mean_module.weights.copy_(plain.mean_module.slopes.unsqueeze(1))
    assert relative(plain(TEST.float()).mean, like(TEST.float()).mean) < 1e-5


def test_fixed_noise():
    x, y = _data()
    noise = torch.linspace(0.01, 1.0, N, dtype=torch.float64)
    model = InducingPointGP(x, y, FixedNoiseGaussianLikelihood(noise), ZeroMean(), RBFKernel(), points(M, seed=9))
    model = model.double().eval()
    mean, covariance = _reference(model, TEST)
    assert relative(model(TEST).mean, mean.squeeze(1)) < 1e-6
    assert relative(model(TEST).variance, covariance.diagonal()) < 1e-6


@pytest.mark.parametrize("solver", [QR(), KRILL(tol=1e-9)], ids=repr)
def test_several_outputs(solver):
    """Each is what it would be alone; the covariance is the same for all, and there is none between them."""
    model, _, _ = _model(columns=3, solver=solver)
    found = model.eval()(TEST)
    mean, covariance = _reference(model, TEST)
    assert isinstance(found, MultitaskMultivariateNormal)
    assert found.mean.shape == found.variance.shape == (11, 3)
    assert relative(found.mean, mean) < 1e-7
    assert relative(found.variance, covariance.diagonal().unsqueeze(1).expand(11, 3)) < 1e-6
    full = found.covariance_matrix.reshape(11, 3, 11, 3)
    assert float(full[:, 0, :, 1].detach().abs().max()) == 0
    assert relative(full[:, 1, :, 1], covariance) < 1e-6


def test_batches_of_test_points_and_gradients():
    """As BoTorch asks: leading dimensions, and derivatives with respect to the points."""
    model, _, _ = _model()
    model.eval()
    batch = points(12, seed=4).reshape(2, 2, 3, 3)
    found = model(batch)
    assert found.mean.shape == (2, 2, 3)
    for index in ((0, 0), (1, 0)):
        alone = model(batch[index])
        assert relative(found.mean[index], alone.mean) < 1e-12
        assert relative(found.covariance_matrix[index], alone.covariance_matrix) < 1e-9
    point = TEST[:2].clone().requires_grad_()
    out = model(point)
    (by_mean,) = torch.autograd.grad(out.mean.sum(), point)
    (by_variance,) = torch.autograd.grad(out.variance.sum(), point)
    step = 1e-5 * torch.tensor([[0.0, 1.0, 0.0]], dtype=torch.float64)
    with torch.no_grad():
        up, down = model(TEST[:2] + step), model(TEST[:2] - step)
        assert relative(by_mean[:, 1], (up.mean - down.mean) / 2e-5) < 1e-5
        assert relative(by_variance[:, 1], (up.variance - down.variance) / 2e-5) < 1e-4


# --- the marginal likelihood ----------------------------------------------------------------------------------


class _SGPR(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood, mean, kernel, z):
        super().__init__(x, y, likelihood)
        self.mean_module, self.covar_module = mean, InducingPointKernel(kernel, z, likelihood)

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def test_the_bound_is_gpytorchs():
    model, x, y = _model()
    plain = _SGPR(x, y, model.likelihood, model.mean_module, model.covar_module, model.inducing_points.detach())
    plain = plain.double().train()
    found = ExactMarginalLogLikelihood(model.likelihood, model)(model.train()(x), y)
    wanted = ExactMarginalLogLikelihood(plain.likelihood, plain)(plain(x), y)
    assert float((found - wanted).detach().abs()) < 1e-4  # jitter, in GPyTorch


@pytest.mark.parametrize("kernel", KERNELS)
def test_its_gradient(kernel, monkeypatch):
    """With respect to everything: kernel, mean, noise, inducing points; by tiles, against dense autograd."""
    monkeypatch.setattr("sketchgp.inference.collapsed._ENTRIES", 30 * M)
    model, x, y = _model(kernel=kernel)
    model.inducing_points.requires_grad_()
    value = ExactMarginalLogLikelihood(model.likelihood, model)(model.train()(x), y)
    found = torch.autograd.grad(value, list(model.parameters()))
    k, z, noise = model.covar_module, model.inducing_points, model.likelihood.noise
    kzz, kxz = k(z).to_dense(), k(x, z).to_dense()
    q = kxz @ torch.linalg.solve(kzz, kxz.mT)
    eye = torch.eye(N, dtype=torch.float64)
    density = torch.distributions.MultivariateNormal(model.mean_module(x), q + noise * eye).log_prob(y)
    wanted = (density - 0.5 * ((k(x).to_dense() - q).diagonal() / noise).sum()) / N
    assert float((value - wanted).detach().abs()) < 1e-9
    for one, other in zip(found, torch.autograd.grad(wanted, list(model.parameters())), strict=True):
        assert relative(one, other) < 1e-6


def test_statistics_of_several_columns_and_noises():
    """Gradients with respect to noises and residuals of each row; two columns are two problems."""
    x, z = points(60), points(12, seed=1)
    kernel = set_scales(KERNELS["rbf-ard"](), 1.3, 0.6).double()
    raw, residual = normal(60, seed=3).requires_grad_(), normal(60, 2, seed=4).requires_grad_()
    both = Collapsed(kernel, x, z, raw.exp(), residual)
    one = [Collapsed(kernel, x, z, raw.exp(), residual[:, [i]]) for i in range(2)]
    assert abs(float((both.inv_quad() - one[0].inv_quad() - one[1].inv_quad()).detach())) < 1e-9
    q = kernel(x, z).to_dense() @ torch.linalg.solve(kernel(z).to_dense(), kernel(z, x).to_dense())
    full = q + raw.exp().diag()
    wanted = (residual * torch.linalg.solve(full, residual)).sum() + torch.logdet(full)
    found = both.inv_quad() + both.logdet()
    assert abs(float((found - wanted).detach())) < 1e-7
    variables = [raw, residual, *kernel.parameters()]
    for mine, other in zip(torch.autograd.grad(found, variables), torch.autograd.grad(wanted, variables), strict=True):
        assert relative(mine, other) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_training(dtype):
    model, x, y = _model(dtype)
    model.inducing_points.requires_grad_()
    model.train()
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.05), []
    before = model.inducing_points.detach().clone()
    for _ in range(25):
        optimizer.zero_grad()
        loss = -mll(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.1
    assert not torch.equal(before, model.inducing_points)
    mean, _ = _reference(model, TEST)
    assert relative(model.eval()(TEST.to(dtype)).mean, mean.squeeze(1)) < 1e-4  # nothing stale is kept


def test_training_only_on_the_training_inputs():
    model, x, _ = _model()
    with pytest.raises(RuntimeError, match="training inputs"):
        model.train()(x + 1)
    with pytest.raises(InputError, match=r"call model\.eval\(\)"):
        model(x).covariance_matrix  # noqa: B018


# --- what is kept, copied, refused ----------------------------------------------------------------------------


def test_a_change_is_noticed():
    model, x, y = _model()
    model.eval()
    with torch.no_grad():
        changes = {
            "noise": lambda: setattr(model.likelihood, "noise", 0.5),
            "data": lambda: model.likelihood.raw_noise.data.add_(0.3),
            "kernel": lambda: setattr(model.covar_module, "outputscale", 0.7),
            "mean": lambda: model.mean_module.raw_constant.fill_(-1.0),
            "points": lambda: model.inducing_points.mul_(0.9),
            "targets": lambda: model.set_train_data(x, y + 1, strict=False),
            "in place": lambda: model.train_targets.mul_(2),
            "in place, unseen by PyTorch": lambda: model.train_targets.data.mul_(2),
            "through numpy": lambda: np.add(model.train_inputs[0].numpy(), 0.1, out=model.train_inputs[0].numpy()),
            "one row": lambda: model.train_inputs[0].data[7].add_(0.3),
            "state": lambda: model.load_state_dict(_model(noise=0.2)[0].state_dict()),
        }
        last = model(TEST).mean
        for change in changes.values():
            change()
            mean, covariance = _reference(model, TEST)
            assert not torch.equal(model(TEST).mean, last)
            last = model(TEST).mean
            assert relative(last, mean.squeeze(1)) < 1e-7
            assert relative(model(TEST).variance, covariance.diagonal()) < 1e-6


def test_changes_that_are_no_parameters():
    """Noises given for each point, another kernel with the same raw values, a setting of a kernel, another solver."""
    x, y = _data()
    likelihood = FixedNoiseGaussianLikelihood(torch.full((N,), 0.05, dtype=torch.float64))
    model = InducingPointGP(x, y, likelihood, ZeroMean(), MaternKernel(nu=1.5), points(M, seed=9)).double().eval()

    def right():
        mean, covariance = _reference(model, TEST)
        return (
            relative(model(TEST).mean, mean.squeeze(1)) + relative(model(TEST).variance, covariance.diagonal()) < 1e-6
        )

    assert right()
    likelihood.noise = torch.full((N,), 5.0, dtype=torch.float64)
    assert right()
    model.covar_module.nu = 0.5
    assert right()
    model.covar_module = MaternKernel(nu=2.5).double()
    assert right()
    assert model.solution.report.solver == "QR"
    model.solver = KRILL()
    assert model.solution.report.solver == "KRILL"
    model.set_train_data(x[:50], y[:50], strict=False)
    with pytest.raises(InputError, match="one positive noise for each of 50"):
        model(TEST)


def test_a_prediction_is_of_the_moment_it_was_made():
    model, _, _ = _model()
    model.eval()
    first = model(TEST)
    model.train().eval()
    assert relative(first.variance, _reference(model, TEST)[1].diagonal()) < 1e-6
    second = model(TEST)
    model.likelihood.noise = 2.0
    with pytest.raises(InputError, match="changed after this prediction"):
        second.variance  # noqa: B018


@pytest.mark.parametrize("solver", [QR(), KRILL(), Falkon()], ids=repr)
def test_smooth_kernels_with_little_noise(solver):
    """Kzz is singular to working precision and its weights cancel: float32 data must not lose what float64 has."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(2000, 2, generator=generator, dtype=torch.float64)
    y = (5 * x[:, 0]).sin() + x[:, 1] ** 2 + 0.01 * normal(2000, seed=1)
    truth = (5 * TEST[:, 0]).sin() + TEST[:, 1] ** 2
    for dtype in (torch.float32, torch.float64):
        likelihood = GaussianLikelihood(noise_constraint=gpytorch.constraints.GreaterThan(1e-9))
        likelihood.noise = 1e-4
        model = InducingPointGP(
            x.to(dtype),
            y.to(dtype),
            likelihood,
            ZeroMean(),
            set_scales(RBFKernel(), 1.0, 0.5),
            x[:300].to(dtype),
            solver,
        )
        model.to(dtype).eval()
        assert model.solution.report.converged
        error = (model(TEST[:, :2].to(dtype)).mean.double() - truth).square().mean().sqrt()
        assert float(error.detach()) < 4e-3


def test_training_beside_botorch():
    """BoTorch turns fast log densities off for everyone."""
    model, x, y = _model()
    with gpytorch.settings.fast_computations(log_prob=False):
        found = ExactMarginalLogLikelihood(model.likelihood, model)(model.train()(x), y)
    wanted = ExactMarginalLogLikelihood(model.likelihood, model)(model(x), y)
    assert float((found - wanted).detach()) == 0


def test_gradients_that_there_are_not():
    """Of predictions with respect to hyperparameters, of the bound with respect to the data: rather none than wrong."""
    model, x, y = _model()
    model.eval()
    out = model(TEST[:3].clone().requires_grad_())
    (out.mean.sum() + out.variance.sum()).backward()
    assert all(p.grad is None for p in model.parameters())
    with gpytorch.settings.detach_test_caches(False), pytest.raises(InputError, match="no gradients of predictions"):
        model(TEST)
    live = x.clone().requires_grad_()
    model.set_train_data(live, y, strict=False)
    with pytest.raises(InputError, match="no gradient with respect to the training inputs"):
        ExactMarginalLogLikelihood(model.likelihood, model)(model.train()(live), y)


def test_the_mean_of_several_outputs_needs_no_statistics(monkeypatch):
    model, _, _ = _model(columns=3)
    monkeypatch.setattr(InducingPointGP, "_swept", None)
    assert predict(model, TEST, variance=None).mean.shape == (11, 3)
    monkeypatch.undo()
    twice = MultitaskMultivariateNormal.from_independent_mvns([_model()[0].eval()(TEST), _model()[0].eval()(TEST)])
    assert twice.covariance_matrix.shape == (22, 22)


def test_inference_mode():
    model, _, _ = _model()
    model.eval()
    with torch.inference_mode():
        model(TEST).variance  # noqa: B018
    point = TEST.clone().requires_grad_()
    (model(point).mean.sum() + model(point).variance.sum()).backward()
    assert point.grad is not None


def test_copies_pickles_and_states():
    model, x, y = _model(solver=KRILL(tol=1e-9))
    ExactMarginalLogLikelihood(model.likelihood, model)(model.train()(x), y).backward()
    model.eval()
    mean = model(TEST).mean
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert relative(other(TEST).mean, mean) < 1e-12
        assert other.solver == model.solver
    fresh = _model(noise=0.7)[0]
    fresh.load_state_dict(model.state_dict())
    assert relative(fresh.eval()(TEST).mean, mean) < 1e-7
    single = copy.deepcopy(model).float()
    assert relative(single(TEST.float()).mean, mean) < 1e-5


def test_solution():
    model, _, _ = _model(solver=KRILL(tol=1e-6))
    model.eval()
    assert model.solution.report.solver == "KRILL"
    assert model.solution.value.shape == (M, 1)
    assert model.solution is model.solution


def test_one_dimension():
    x = torch.linspace(0, 1, 50).double()
    model = InducingPointGP(x, x.sin(), GaussianLikelihood(), ZeroMean(), RBFKernel(), x[::10]).double().eval()
    assert model(x[:4]).mean.shape == (4,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"solver": "krill"}, r"'auto', one of QR\(\), KRILL\(\)"),
        ({"solver": KRILL}, "solver expects"),
        ({"x": points(9)}, "one row per row"),
        ({"z": points(4).float()}, "3 features, torch.float32 on cpu, as inducing_points; got"),
        ({"z": points(4)[:, :2]}, "2 features, torch.float64 on cpu, as inducing_points; got"),
        ({"y": normal(N) / 0}, "NaN"),
        ({"kernel": RBFKernel(batch_shape=torch.Size([2]))}, "batch_shape"),
        ({"kernel": gpytorch.kernels.LinearKernel()}, "structure of its own"),
        ({"x": [points(4)]}, "train_x expects a tensor"),
        ({"likelihood": MultitaskGaussianLikelihood(num_tasks=2)}, "got MultitaskGaussianLikelihood"),
    ],
)
def test_what_is_refused(changes, message):
    x, y = _data()
    given = {"x": x, "y": y, "z": points(4), "kernel": RBFKernel(), "solver": "auto"} | changes
    given.setdefault("likelihood", GaussianLikelihood())
    with pytest.raises(InputError, match=message):
        InducingPointGP(given["x"], given["y"], given["likelihood"], ZeroMean(), given["kernel"].double(), given["z"],
                        solver=given["solver"])  # fmt: skip


def test_test_points_that_do_not_fit():
    model, _, _ = _model()
    model.eval()
    for wrong in (TEST[:0], TEST[:0].reshape(0, 4, 3)):
        with pytest.raises(InputError, match="at least one point"):
            model(wrong)
    for wrong in (TEST[:, :2], TEST.float()):
        with pytest.raises(InputError, match=r"expects 3 features, torch\.float64"):
            model(wrong)


def test_prior_mode():
    model, _, _ = _model()
    with gpytorch.settings.prior_mode(True):
        assert relative(model.eval()(TEST).covariance_matrix, model.covar_module(TEST).to_dense()) < 1e-12
        several = _model(columns=2)[0].eval()
        prior = several(TEST)
        assert isinstance(prior, MultitaskMultivariateNormal) and prior.mean.shape == (len(TEST), 2)
        assert (
            relative(prior.variance, several.covar_module(TEST).to_dense().diagonal().unsqueeze(1).expand(-1, 2))
            < 1e-12
        )


@pytest.mark.parametrize("variance", ["dtc", "samples"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_conversions_leave_the_model_alone(variance, dtype):
    model = _model(dtype)[0].eval()
    model.variance, model.variance_samples = variance, 20
    posterior = model(TEST.to(dtype))
    wanted, before = posterior.covariance_matrix, copy.deepcopy(model.state_dict())
    for operator in (posterior.lazy_covariance_matrix, model.likelihood(posterior).lazy_covariance_matrix):
        noise = operator is not posterior.lazy_covariance_matrix
        for other in (torch.float32, torch.float64):
            for converted in (operator.to(other), operator.to(dtype=other), operator.type(other)):
                assert converted.dtype == converted.to_dense().dtype == other
                dense = wanted + noise * model.likelihood.noise * torch.eye(len(wanted), dtype=dtype)
                assert relative(converted.to_dense(), dense) < 1e-6
    assert posterior.lazy_covariance_matrix.to(dtype) is posterior.lazy_covariance_matrix
    assert posterior.lazy_covariance_matrix.cpu() is posterior.lazy_covariance_matrix
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert next(model.covar_module.parameters()).dtype == dtype
    assert torch.isfinite(posterior.variance).all()  # the model is still that of the prediction


@pytest.mark.parametrize("columns", [None, 2])
@pytest.mark.parametrize("variance", ["dtc", "samples"])
def test_noisy_samples_at_many_points(variance, columns):
    """More than GPyTorch factorizes: its Lanczos root would leave a fifth of the noise out."""
    model = _model(noise=0.5, columns=columns)[0].eval()
    model.variance, model.variance_samples = variance, 30
    many = points(900, seed=11)
    with torch.no_grad():
        noisy = model.likelihood(model(many))
        drawn = noisy.rsample(torch.Size([2000]))
    assert drawn.shape == (2000, *noisy.mean.shape)
    assert float((drawn.var(dim=0) / noisy.variance).mean()) == pytest.approx(1.0, abs=0.01)
    assert relative(noisy.lazy_covariance_matrix.to_dense().diagonal(), noisy.variance.flatten()) < 1e-6


def test_auto_where_memory_is_short(monkeypatch):
    """The mean is found in memory O(m) then; the variance of DTC says what it needs."""
    monkeypatch.setattr("sketchgp.solvers.automatic._DIRECT", 0)
    for where in ("inducing_point_gp", "solvers.automatic"):
        monkeypatch.setattr(f"sketchgp.{where}.free_memory", lambda device: 50 * M**2)
    model = _model(noise=0.5)[0].eval()
    assert model.solution.report.solver == "NystromPCG"
    assert relative(predict(model, TEST, variance=None).mean, _reference(model, TEST)[0].squeeze(1)) < 0.1
    model.variance = "dtc"
    monkeypatch.setattr("sketchgp.inducing_point_gp._STATISTICS_BYTES", 2**60)
    with pytest.raises(InputError, match=r"The variance of DTC for .* predict\(model, x, variance=None\)"):
        model(TEST).variance  # noqa: B018
    x, y = _data()
    noises = FixedNoiseGaussianLikelihood(torch.linspace(0.1, 1.0, N, dtype=torch.float64))
    own = InducingPointGP(x, y, noises, ZeroMean(), RBFKernel(), points(M, seed=9)).double().eval()
    assert own.solution.report.solver == "NystromPCG"


@pytest.mark.parametrize("solver", [SketchySAGA(tol=1e-3), EigenPro3(epochs=20), EigenPro4(epochs=20)], ids=repr)
def test_stochastic_solvers(solver):
    model = _model(solver=solver, noise=0.5)[0].eval()
    assert relative(model(TEST).mean, _reference(model, TEST)[0].squeeze(1)) < 0.1
    assert model.solution.report.solver == type(solver).__name__


@pytest.mark.parametrize("shares", [1.0, 1.9, 2.1, 8.0])
def test_auto_takes_a_solver_that_fits(shares, monkeypatch):
    """Whatever is free: KRILL does not refuse once it is taken."""
    monkeypatch.setattr("sketchgp.solvers.automatic._DIRECT", 0)
    model = _model(noise=0.5, columns=3)[0].eval()
    problem = InducingPointProblem(model.covar_module, *_data(columns=3), 0.5, model.inducing_points)
    free = shares * KRILL(sketch_size=2 * M).bytes_needed(problem)
    for where in ("inducing_point_gp", "solvers.automatic", "solvers.inducing.krill"):
        monkeypatch.setattr(f"sketchgp.{where}.free_memory", lambda device: free)
    monkeypatch.setattr("sketchgp.memory.available_memory", lambda device: free)
    assert model.solution.report.solver == ("KRILL" if shares > 2 else "NystromPCG")


def test_auto_by_size(monkeypatch):
    monkeypatch.setattr("sketchgp.solvers.automatic._DIRECT", M - 1)
    assert _model()[0].eval().solution.report.solver == "KRILL"
    monkeypatch.setattr("sketchgp.solvers.automatic._DIRECT", M)
    with warnings.catch_warnings():
        assert _model()[0].eval().solution.report.solver == "QR"


# --- fit, predict, classes ------------------------------------------------------------------------------------


def test_fit():
    model, x, y = _model()
    before = -float(ExactMarginalLogLikelihood(model.likelihood, model)(model.train()(x), y).detach())
    history = fit(model, iterations=12)
    assert not model.training
    assert history.best_loss < before - 0.05
    again = -float(ExactMarginalLogLikelihood(model.likelihood, model)(model.train()(x), y).detach())
    assert abs(again - history.best_loss) < 1e-9


@pytest.mark.parametrize("columns", [None, 2])
def test_predict(columns):
    model, _, _ = _model(columns=columns)
    found = predict(model, TEST, batch_size=4)
    mean, covariance = _reference(model, TEST)
    wanted = covariance.diagonal().unsqueeze(1).expand(11, columns or 1)
    shape = (11, columns) if columns else (11,)
    assert found.mean.shape == found.variance.shape == shape
    assert relative(found.mean.reshape(11, -1), mean) < 1e-7
    assert relative(found.variance.reshape(11, -1), wanted) < 1e-6
    assert relative(found.observation_variance.reshape(11, -1), wanted + 0.05) < 1e-6
    assert (found.variance_method, found.report.solver) == ("dtc", "QR")
    alone = predict(model, TEST, variance=None)
    assert (alone.variance, alone.variance_method) == (None, "none")
    assert alone.report is found.report is model.solution.report
    with pytest.raises(InputError, match="that of DTC"):
        predict(model, TEST, variance="exact")


def test_classes():
    x = points(300)
    labels = (3 * x[:, 0]).long() + 5
    classes = OneHot(labels)
    targets = classes.encode(labels, torch.float64)
    assert classes.classes.tolist() == [5, 6, 7]
    assert torch.equal(targets.argmax(dim=1) + 5, labels)
    assert torch.equal(targets.sum(dim=1), torch.ones(300).double())
    model = InducingPointGP(x, targets, GaussianLikelihood(), ZeroMean(), RBFKernel(), x[::6]).double().eval()
    assert float((classes.decode(model(x).mean) == labels).double().mean()) > 0.9
    with pytest.raises(InputError, match=r"one of \[5, 6, 7\], got 9"):
        classes.encode(torch.tensor([5, 9]))
    with pytest.raises(InputError, match="3 columns"):
        classes.decode(x[:, :2])
    for wrong in (x, torch.tensor([], dtype=torch.long), [1.0, 2.0], [1, "a"], [None, "a"]):
        with pytest.raises(InputError, match="labels expects"):
            OneHot(wrong)


@pytest.mark.parametrize("keep", [list, np.array, pandas.Series, lambda v: pandas.Series(v, dtype="category")])
def test_classes_as_people_have_them(keep):
    words = ["cat", "ant", "bee", "ant"]
    classes = OneHot(keep(words))
    targets = classes.encode(keep(words[1:]))
    assert classes.classes.tolist() == ["ant", "bee", "cat"]
    assert targets.tolist() == [[1, 0, 0], [0, 1, 0], [1, 0, 0]]
    assert classes.decode(targets).tolist() == words[1:]
    for wrong in (["dog"], [1]):
        with pytest.raises(InputError, match="labels expects one of"):
            classes.encode(wrong)
    assert OneHot(np.array([4, 2])).encode(torch.tensor([2, 4])).tolist() == [[1, 0], [0, 1]]
    assert OneHot(torch.tensor([4, 2])).encode([True + 1, 4]).tolist() == [[1, 0], [0, 1]]


def test_probabilities_of_classes():
    """The nearest ones: no other point of the simplex is nearer, and the order stays."""
    classes = OneHot(torch.arange(4))
    scores = 0.7 * normal(50, 4) + 0.25
    shares = classes.probabilities(scores)
    assert float((shares.sum(dim=1) - 1).abs().max()) < 1e-12 and float(shares.min()) >= 0
    assert torch.equal(classes.decode(shares), classes.decode(scores))
    others = torch.distributions.Dirichlet(torch.ones(4, dtype=torch.float64)).sample((20,))
    towards = ((scores - shares).unsqueeze(1) * (others - shares.unsqueeze(1))).sum(dim=-1)
    assert float(towards.max()) < 1e-12  # what a projection on a convex set is
    right = torch.tensor([[0.1, 0.2, 0.3, 0.4]])
    torch.testing.assert_close(classes.probabilities(right), right)
    for ask in (classes.probabilities, classes.decode):
        for wrong in (math.nan, math.inf):
            with pytest.raises(InputError, match="expects finite numbers, got NaN or infinity"):
                ask(torch.cat([scores, torch.full((1, 4), wrong)]))


@pytest.mark.parametrize("far", [1e6, 2e8, 1e10])
def test_a_bound_that_rounding_hides_is_refused_for_that(far):
    """One row has a prior variance up to 1e40: the others are lost, and it was 1e16 or spoke of NaN, which is none."""
    x = torch.cat([torch.full((1, 1), far, dtype=torch.float64), points(6, 1)])
    likelihood, kernel = GaussianLikelihood().double(), ScaleKernel(ArcCosineKernel(2) + ArcCosineKernel(2)).double()
    model = InducingPointGP(x, x[:, 0].sin(), likelihood, ZeroMean(), kernel, x[[0, 0, 2, 3, 6]])
    with pytest.raises(NumericalError, match="lost to rounding: drop far rows"):
        ExactMarginalLogLikelihood(likelihood, model)(model(x), model.train_targets, x)


def test_a_bound_of_a_far_row_that_nothing_explains():
    """It is what that row's variance leaves, far below zero and known to many digits."""
    x = torch.cat([torch.full((1, 1), 1e6, dtype=torch.float64), points(6, 1)])
    likelihood, kernel = GaussianLikelihood().double(), ScaleKernel(ArcCosineKernel(2) * RBFKernel()).double()
    model = InducingPointGP(x, x[:, 0].sin(), likelihood, ZeroMean(), kernel, x[[2, 3, 6]])
    value = ExactMarginalLogLikelihood(likelihood, model)(model(x), model.train_targets, x)
    right = -0.5 * kernel(x[:1]).to_dense() / likelihood.noise / len(x)
    assert float(value.detach()) == pytest.approx(float(right.detach()), rel=1e-3)


def test_a_part_of_a_kernel_in_place_of_one_that_has_changed_since():
    """Its values are those that variances were prepared with; the old part's are not."""
    likelihood, kernels = GaussianLikelihood().double(), [ScaleKernel(MaternKernel(nu=1.5)).double() for _ in range(2)]
    x = points(N)
    model = InducingPointGP(x, x.sum(dim=1).sin(), likelihood, ZeroMean(), kernels[0], x[:9], variance="samples").eval()
    with torch.no_grad():
        before, old = model(TEST).variance, model.covar_module.base_kernel
        model.covar_module.base_kernel = kernels[1].base_kernel
        old.lengthscale = 0.1
        assert torch.allclose(model(TEST).variance, before, rtol=1e-8)


def test_a_forward_of_ones_own():
    class Own(InducingPointGP):
        def forward(self, x):
            return super().forward(x)

    with pytest.raises(InputError, match="would do nothing"):
        Own(*_data(), GaussianLikelihood(), ZeroMean(), RBFKernel().double(), points(4))


def test_fantasies_are_refused():
    with pytest.raises(InputError, match="no fantasies"):
        _model()[0].eval().get_fantasy_model(TEST, TEST[:, 0])


POLYNOMIALS = {
    "quadratic": lambda: PolynomialKernel(2),
    "linear": lambda: PolynomialKernel(1),
    "quadratic and RBF": lambda: PolynomialKernel(2) + RBFKernel(),
    "cubic by RBF": lambda: PolynomialKernel(3) * RBFKernel(),
}


@pytest.mark.parametrize("size", [1.0, 10.0, 100.0])
@pytest.mark.parametrize("kernel", POLYNOMIALS)
def test_float32_is_only_the_dtype_of_the_data(kernel, size):
    """Terms of the bound, of its gradient and of variances cancel: 1e9 in k(x, x), against a noise of 0.01."""
    x, z, test = (size * (points(n, 2, seed=seed) - 0.5).float() for n, seed in ((120, 0), (12, 1), (9, 2)))
    y = (4 * x.sum(dim=1) / size).sin() + 0.1 * normal(120, seed=3).float()
    found = []
    for dtype in (torch.float32, torch.float64):
        likelihood, covar = GaussianLikelihood(), ScaleKernel(POLYNOMIALS[kernel]())
        likelihood.noise = 0.01
        model = InducingPointGP(*(t.to(dtype) for t in (x, y)), likelihood.to(dtype), ZeroMean(), covar.to(dtype),
                                z.to(dtype))  # fmt: skip
        model.inducing_points.requires_grad_()
        model.train()
        bound = ExactMarginalLogLikelihood(likelihood, model)(model(*model.train_inputs), model.train_targets)
        bound.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        prediction = predict(model, test.to(dtype))
        found.append((bound, prediction.mean, prediction.variance, *gradients))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-5, check_dtype=False)


def test_variances_beyond_float64_are_warned_of():
    x, y = 1e4 * points(60, 2), normal(60)
    likelihood = GaussianLikelihood().double()
    likelihood.noise = 0.01
    model = InducingPointGP(x, y, likelihood, ZeroMean(), PolynomialKernel(2).double(), x[:12])
    with pytest.warns(ConvergenceWarning, match="met the limits of float64") as seen:
        assert bool((model.eval()(x).variance > 0).all())
    assert "inducing points may raise them by" in str(seen[-1].message)


@pytest.mark.parametrize("columns", [None, 2])
def test_small_variances_are_not_raised(columns):
    """GPyTorch's distributions give none below 1e-6 in float32."""
    x, y = _data(torch.float32, columns)
    likelihood, kernel = GaussianLikelihood(noise_constraint=Positive()), set_scales(KERNELS["rbf-ard"](), 1e-4, 0.6)
    likelihood.noise = 1e-8
    model = InducingPointGP(x, 0.01 * y, likelihood, ConstantMean(), kernel, x[:M])
    expected = _reference(model, TEST)[1].diagonal()
    found = predict(model, TEST.float()).variance
    assert float(expected.median()) < 1e-7
    assert all(relative(one, expected) < 1e-3 for one in found.reshape(11, -1).unbind(dim=1))
