"""BoTorch's models are GPyTorch's: accelerated, they fit, predict, fantasize and optimise as before."""

from __future__ import annotations

import copy
import math
import sys
import warnings
from typing import Any

import gpytorch
import linear_operator
import pytest
import torch
from torch import Tensor

import sketchgp
from gp_models import TORCH_WARNINGS, data, dense, gradient_error, iterative, marginal, relative

pytest.importorskip("botorch")

from botorch.acquisition import LogExpectedImprovement, LogNoisyExpectedImprovement, qUpperConfidenceBound
from botorch.exceptions import OptimizationWarning
from botorch.fit import fit_gpytorch_mll
from botorch.models import MixedSingleTaskGP, ModelListGP, MultiTaskGP, SingleTaskGP, SingleTaskMultiFidelityGP
from botorch.models.kernels.linear_truncated_fidelity import LinearTruncatedFidelityKernel
from botorch.models.transforms import Log, Normalize, Power, Standardize
from botorch.models.transforms.input import InputPerturbation
from botorch.sampling import SobolQMCNormalSampler

pytestmark = [
    *TORCH_WARNINGS,
    pytest.mark.filterwarnings("ignore::botorch.exceptions.warnings.InputDataWarning"),
    # botorch calls conditioning on observations with one batch dimension more inside ``fantasize``
    pytest.mark.filterwarnings("ignore::botorch.exceptions.warnings.BotorchWarning"),
]

N = 120


def problem(n: int = N) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs in [0, 10] x [-5, 5], targets around 40 (n, 1), and test inputs: what transforms are for."""
    x, y, xt = data(n=n, m=8)
    scale, shift = torch.tensor([10.0, 10.0]), torch.tensor([0.0, -5.0])
    return x * scale + shift, 40 + 7 * y.unsqueeze(-1), xt * scale + shift


def single(kind: str = "default", n: int = N) -> tuple[Any, Tensor]:
    """A SingleTaskGP of some kind, and test inputs."""
    x, y, xt = problem(n)
    options: dict[str, Any] = {"input_transform": Normalize(d=2)}
    if kind == "no transforms":
        x, xt = (z / 10 + torch.tensor([0.0, 0.5]) for z in (x, xt))
        y, options = (y - 40) / 7, {"outcome_transform": None}
    if kind == "standardize":
        options["outcome_transform"] = Standardize(m=1)
    if kind == "known noise":
        options["train_Yvar"] = torch.linspace(0.2, 3.0, n, dtype=x.dtype).unsqueeze(-1)
    if kind == "two outputs":
        y = torch.cat([y, 100 - y.square() / 50], dim=-1)
    model = SingleTaskGP(x, y, **options)
    return model, xt


KINDS = ["default", "no transforms", "standardize", "known noise", "two outputs"]


def multitask() -> tuple[Any, Tensor]:
    x, y, xt = problem()
    tasks = torch.arange(N, dtype=x.dtype).unsqueeze(-1) % 2
    targets = torch.where(tasks == 0, y, 0.5 * y + 3)
    torch.manual_seed(4)  # the task covariance starts at random
    transform = Normalize(d=3, indices=[0, 1])
    model = MultiTaskGP(torch.cat([x, tasks], dim=-1), targets, task_feature=-1, input_transform=transform)
    with torch.no_grad():
        model.likelihood.noise_covar.raw_noise.copy_(torch.tensor([0.05, 0.1]))
    return model, xt


def posterior(model: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    model.eval()
    with torch.no_grad():
        found = model.posterior(x)
        return found.mean, found.variance


@pytest.mark.parametrize("kind", KINDS)
def test_posterior(kind: str) -> None:
    model, x = single(kind)
    with dense():
        mean, variance = posterior(copy.deepcopy(model), x)
    sketchgp.accelerate(model)
    # BoTorch asks for fast_pred_var, GPyTorch's Lanczos variances, exact only if they may have rank n
    with iterative(), gpytorch.settings.max_root_decomposition_size(400), sketchgp.record_solves() as solves:
        found_mean, found_variance = posterior(model, x)
    assert solves
    assert relative(found_mean, mean) < 1e-7
    assert relative(found_variance, variance) < 1e-5


@pytest.mark.parametrize("solver", ["auto", sketchgp.ASkotch(tol=1e-8)], ids=["default", "ASkotch"])
@pytest.mark.parametrize("kind", ["mixed", "fidelities"])
def test_two_outputs_of_kernels_that_gpytorch_cannot_index(kind: str, solver: Any) -> None:
    x, y, _ = problem()
    x = torch.cat([(x + torch.tensor([0.0, 5.0])) / 10, torch.arange(N).unsqueeze(-1) % 3], dim=-1)
    y = torch.cat([y - 40, x[:, 1:].sum(dim=-1, keepdim=True)], dim=-1)
    if kind == "mixed":
        model = MixedSingleTaskGP(x, y, cat_dims=[2])
    else:
        kernel = LinearTruncatedFidelityKernel(fidelity_dims=[1], dimension=3, batch_shape=torch.Size([2]))
        model = SingleTaskGP(x, y, covar_module=kernel)
    test = x[::20] + torch.tensor([0.03, 0.02, 0.0])
    with dense():
        mean, _ = posterior(copy.deepcopy(model), test)
    sketchgp.accelerate(model, solver=solver)
    with iterative(), sketchgp.record_solves() as solves:
        found, _ = posterior(model, test)
    assert solves and all(report.converged for report in solves)
    assert relative(found, mean) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_marginal_likelihood_and_gradient(kind: str) -> None:
    model, _ = single(kind)
    with dense():
        value, gradient = marginal(copy.deepcopy(model))
    sketchgp.accelerate(model)
    with iterative(probes=60):
        found, found_gradient = marginal(model)
    assert float((found - value).abs().max()) < 5e-3
    assert gradient_error(found_gradient, gradient) < 3e-2


@pytest.mark.parametrize("observation_noise", [False, True])
@pytest.mark.parametrize("kind", ["default", "two outputs"])
def test_posterior_gradient_in_x(kind: str, observation_noise: bool) -> None:
    gradients = []
    for accelerated in (False, True):
        model, x = single(kind)
        model.eval()
        if accelerated:
            sketchgp.accelerate(model)
        x = x.clone().requires_grad_()
        with iterative() if accelerated else dense():
            found = model.posterior(x, observation_noise=observation_noise)
            (found.mean.sum() + found.variance.sum()).backward()
        gradients.append(x.grad)
    assert relative(gradients[1], gradients[0]) < 1e-5


def test_two_fidelities_of_two_outputs() -> None:
    """A batch of scaled products that are not stored at once."""
    x, y, xt = data(n=60, d=4, m=5)
    model = SingleTaskMultiFidelityGP(x, torch.stack([y, -y], dim=-1), data_fidelities=[0, 1], linear_truncated=True)
    xt = xt.expand(2, -1, -1)
    with dense(), torch.no_grad():
        mean = copy.deepcopy(model).eval()(xt).mean
    with iterative(), torch.no_grad():
        assert relative(sketchgp.accelerate(model).eval()(xt).mean, mean) < 1e-6


def test_batches_of_candidates() -> None:
    """(b, q, d) inputs, as acquisition functions ask for them."""
    model, x = single()
    candidates = x.reshape(4, 2, 2)
    with dense():
        mean, variance = posterior(copy.deepcopy(model), candidates)
    sketchgp.accelerate(model)
    with iterative():
        found_mean, found_variance = posterior(model, candidates)
    assert relative(found_mean, mean) < 1e-7
    assert relative(found_variance, variance) < 1e-5


def test_botorchs_own_defaults_do_not_switch_it_off_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    """``import botorch`` turns GPyTorch's iterative solves off, at every n, for the whole process.

    An accelerated model either solves iteratively all the same, or a warning names the setting.
    """
    for name in ("_fast_log_prob", "_fast_solves", "_fast_covar_root_decomposition"):
        monkeypatch.setattr(getattr(linear_operator.settings, name), "_default", False)
    model, x = single()
    with (
        gpytorch.settings.max_cholesky_size(20),
        warnings.catch_warnings(record=True) as caught,
        sketchgp.record_solves() as solves,
    ):
        warnings.simplefilter("always")
        sketchgp.accelerate(model)
        marginal(model)
        trained = len(solves)
        posterior(model, x)
    warned = any("fast_computations" in str(warning.message) for warning in caught)
    assert warned or len(solves) > trained > 0


def test_botorchs_threshold_is_not_an_accelerated_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """``import botorch`` leaves 4,096 points to Cholesky, an accelerated model fewer; a user's block is honoured."""
    monkeypatch.setattr(linear_operator.settings.max_cholesky_size, "_global_value", 4096)
    monkeypatch.setattr("sketchgp.models.accelerated.threshold._IN_PLACE_OF_BOTORCHS", 809)
    x, y, xt = data(n=810, m=4)
    model = sketchgp.accelerate(SingleTaskGP(x, y.unsqueeze(-1)))

    def reports() -> list[sketchgp.SolveReport]:
        model.train()
        with sketchgp.record_solves() as solves, gpytorch.settings.skip_posterior_variances(), torch.no_grad():
            assert model.eval()(xt).mean is not None
        return solves

    (report,) = reports()
    assert "4096" in report.table()
    for size, solved in ((800, True), (809, True), (810, False), (5000, False)):
        with gpytorch.settings.max_cholesky_size(size):
            found = reports()
        assert bool(found) == solved
        assert not any("4096" in report.table() for report in found)
    monkeypatch.delitem(sys.modules, "botorch")
    assert not reports(), "without BoTorch 4096 can only be the user's"


def loss(model: Any) -> float:
    """Exact marginal likelihood of the model's present parameters (with priors)."""
    plain = copy.deepcopy(model)
    if hasattr(plain, "_sketchgp"):
        sketchgp.restore(plain)
    plain.train()
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(plain.likelihood, plain)
    with dense(), torch.no_grad():
        return float(mll(plain(*plain.train_inputs), plain.train_targets).sum())


@pytest.mark.parametrize("kind", ["default", "known noise"])
def test_fit_gpytorch_mll(kind: str) -> None:
    """L-BFGS sees one function: the probes stay the same by themselves."""
    reached = []
    for accelerated in (False, True):
        model, _ = single(kind)
        start = loss(model)
        if accelerated:
            sketchgp.accelerate(model)
        mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
        with (
            iterative(probes=40, tol=1e-6) if accelerated else dense(),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore", OptimizationWarning)
            assert fit_gpytorch_mll(mll, optimizer_kwargs={"options": {"maxiter": 8}}) is mll
        assert not model.training
        reached.append(loss(model))
        assert reached[-1] > start + 0.01
    assert abs(reached[1] - reached[0]) < 0.03


def test_sketchgp_fit() -> None:
    model, x = single()
    start = loss(model)
    sketchgp.accelerate(model)
    with iterative(tol=1e-5):
        history = sketchgp.fit(model, iterations=15, learning_rate=0.01)
        mean, _ = posterior(model, x)
    assert loss(model) > start + 0.01
    assert len(history.losses) >= 10
    with dense():
        assert relative(mean, posterior(sketchgp.restore(model), x)[0]) < 1e-5


def test_sketchgp_fit_stays_inside_the_bounds() -> None:
    """BoTorch's constraints transform nothing: its optimisers keep to the bounds, and so must Adam's steps."""
    model, _ = single()
    model.likelihood.noise = 0.05
    sketchgp.accelerate(model)
    with iterative(tol=1e-5):
        history = sketchgp.fit(model, iterations=12)  # the first step of 0.1 leaves the bound of the noise, 1e-4
    assert len(history.losses) >= 10
    for name, parameter, constraint in model.named_parameters_and_constraints():
        assert constraint is None or constraint.check(constraint.transform(parameter)), name


@pytest.mark.parametrize("kind", ["default", "no transforms", "known noise", "two outputs"])
def test_condition_on_observations(kind: str) -> None:
    found = []
    for accelerated in (False, True):
        model, x = single(kind)
        if accelerated:
            sketchgp.accelerate(model)
        model.eval()
        new_x = x[:3] + 0.1
        new_y = torch.tensor([[0.5], [0.1], [-0.4]], dtype=x.dtype).expand(3, 2 if kind == "two outputs" else 1)
        noise = {"noise": torch.full_like(new_y, 0.3)} if kind == "known noise" else {}
        with iterative() if accelerated else dense(), gpytorch.settings.max_root_decomposition_size(400):
            posterior(model, x)
            with torch.no_grad():
                conditioned = model.condition_on_observations(new_x, new_y, **noise)
            found.append(posterior(conditioned, x))
    assert relative(found[1][0], found[0][0]) < 1e-4
    assert relative(found[1][1], found[0][1]) < 2e-2


@pytest.mark.parametrize("kind", ["default", "two outputs"])
def test_fantasize(kind: str) -> None:
    found = []
    for accelerated in (False, True):
        model, x = single(kind)
        if accelerated:
            sketchgp.accelerate(model)
        model.eval()
        sampler = SobolQMCNormalSampler(sample_shape=torch.Size([3]), seed=0)
        with iterative() if accelerated else dense(), gpytorch.settings.max_root_decomposition_size(400):
            posterior(model, x)
            with torch.no_grad():
                fantasies = model.fantasize(x[:2] + 0.1, sampler)
            found.append(posterior(fantasies, x))
    assert relative(found[1][0], found[0][0]) < 1e-4
    assert relative(found[1][1], found[0][1]) < 2e-2


@pytest.mark.parametrize("kind", ["LogEI", "qUCB"])
def test_acquisition_functions(kind: str) -> None:
    values, gradients = [], []
    for accelerated in (False, True):
        model, x = single("standardize")
        if accelerated:
            sketchgp.accelerate(model)
        model.eval()
        candidates = x.reshape(4, 2, 2)[:, :1] if kind == "LogEI" else x.reshape(4, 2, 2)
        candidates = candidates.clone().requires_grad_()
        with iterative() if accelerated else dense():
            if kind == "LogEI":
                acquisition = LogExpectedImprovement(model, best_f=50.0)
            else:
                sampler = SobolQMCNormalSampler(sample_shape=torch.Size([16]), seed=0)
                acquisition = qUpperConfidenceBound(model, beta=2.0, sampler=sampler)
            value = acquisition(candidates)
            value.sum().backward()
        values.append(value.detach())
        gradients.append(candidates.grad)
    assert relative(values[1], values[0]) < 1e-4
    assert relative(gradients[1], gradients[0]) < 1e-3


def test_an_acquisition_function_solves_once() -> None:
    """BoTorch's call ``model.to(X)`` at each evaluation, which moves nothing."""
    model, x = single()
    sketchgp.accelerate(model).eval()
    acquisition = LogExpectedImprovement(model, best_f=0.0)
    with iterative():
        values = [acquisition(x[:, None]).detach()]
        with sketchgp.record_solves() as solves:
            values.append(acquisition(x[:, None]).detach())
            model.to(x).double().cpu()
            sketchgp.predict(model, x, variance=None)
        assert all(report.columns == len(x) for report in solves)  # variances alone, and no mean
        assert torch.allclose(*values, rtol=1e-6)
        mean = sketchgp.predict(model, x, variance=None).mean
        with sketchgp.record_solves() as solves:
            model.float()
            found = sketchgp.predict(model, x.float(), variance=None).mean
        assert len(solves) == 1 and relative(found.double(), mean) < 1e-3
        with sketchgp.record_solves() as solves, torch.no_grad():
            model._apply(lambda tensor: tensor.mul_(1.1) if tensor.is_floating_point() else tensor)
            sketchgp.predict(model, x.float(), variance=None)
        assert len(solves) == 1


def task_marginal(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """As BoTorch does it: the likelihood is given the inputs, which name the tasks."""
    model.train()
    model.zero_grad()
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    inputs = [model.transform_inputs(x) for x in model.train_inputs]
    value = mll(model(*model.train_inputs), model.train_targets, *inputs)
    value.backward()
    return value.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_multi_task_gp() -> None:
    model, x = multitask()
    with dense():
        plain = copy.deepcopy(model)
        mean, variance = posterior(plain, x)
        value, gradient = task_marginal(plain)
    sketchgp.accelerate(model)
    with iterative(probes=60), gpytorch.settings.max_root_decomposition_size(400), sketchgp.record_solves() as solves:
        found_mean, found_variance = posterior(model, x)
        found, found_gradient = task_marginal(model)
    assert solves
    assert all(report.converged for report in solves)
    assert found_mean.shape == (8, 2)
    assert relative(found_mean, mean) < 1e-6
    assert relative(found_variance, variance) < 1e-5
    assert float((found - value).abs()) < 5e-3
    assert gradient_error(found_gradient, gradient) < 3e-2


def test_sketchgp_fit_of_a_multi_task_gp() -> None:
    """The marginal likelihood needs the inputs: they name the tasks, and with them the noise."""
    model, _ = multitask()
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.002), []
    with dense():
        for _ in range(3):
            value, gradient = task_marginal(model)
            losses.append(-float(value))
            for name, parameter in model.named_parameters():
                parameter.grad = -gradient[name]
            optimizer.step()
    model, _ = multitask()
    sketchgp.accelerate(model)
    with iterative(tol=1e-6):
        history = sketchgp.fit(model, iterations=3, learning_rate=0.002, objective="probes", num_probes=40)
    assert max(abs(a - b) for a, b in zip(history.losses, losses, strict=True)) < 1e-2


def test_fit_gpytorch_mll_of_a_multi_task_gp() -> None:
    model, _ = multitask()
    sketchgp.accelerate(model)
    start = float(task_marginal(model)[0])
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    with iterative(tol=1e-6), warnings.catch_warnings():
        warnings.simplefilter("ignore", OptimizationWarning)
        fit_gpytorch_mll(mll, optimizer_kwargs={"options": {"maxiter": 2}})
        assert float(task_marginal(model)[0]) > start


def test_a_list_of_models_is_accelerated_member_by_member() -> None:
    x, y, xt = problem()
    models = ModelListGP(*(SingleTaskGP(x, target, input_transform=Normalize(d=2)) for target in (y, y.sin())))
    with dense():
        mean, variance = posterior(copy.deepcopy(models), xt)
    for model in models.models:
        sketchgp.accelerate(model)
    with iterative(), sketchgp.record_solves() as solves:
        found_mean, found_variance = posterior(models, xt)
    assert solves
    assert relative(found_mean, mean) < 1e-6
    assert relative(found_variance, variance) < 1e-5


def test_training_inputs_stay_transformed_as_botorch_does_it() -> None:
    """BoTorch swaps transformed and raw training inputs at ``eval`` and ``train``."""
    model, x = single()
    raw = model.train_inputs[0].clone()
    sketchgp.accelerate(model)
    with iterative():
        mean, _ = posterior(model, x)
        assert float(model.train_inputs[0].max()) <= 1
        model.train()
        assert torch.equal(model.train_inputs[0], raw)
        assert relative(posterior(model, x)[0], mean) < 1e-9
    keys = list(model.state_dict())
    twin = copy.deepcopy(model)
    assert list(twin.state_dict()) == keys
    with iterative():
        assert relative(posterior(twin, x)[0], mean) < 1e-9
        with dense():
            assert relative(posterior(sketchgp.restore(model), x)[0], mean) < 1e-6


@pytest.mark.parametrize("variance", ["exact", "low_rank", None])
@pytest.mark.parametrize("kind", KINDS)
def test_predict_is_in_units_of_the_data(kind: str, variance: str | None) -> None:
    """What the model's own posterior says, whatever the transforms, and bounds that hold."""
    model, x = single(kind)
    several, known = kind == "two outputs", kind == "known noise"
    with dense():
        mean, latent = posterior(copy.deepcopy(model), x)
        with torch.no_grad():
            observed = copy.deepcopy(model).posterior(x, observation_noise=True).variance
    if not several:
        mean, latent, observed = (values.squeeze(-1) for values in (mean, latent, observed))
    sketchgp.accelerate(model)
    if several and variance == "low_rank":
        with iterative(), pytest.raises(sketchgp.InputError, match="low_rank"):
            sketchgp.predict(model, x, variance=variance)
        return
    with iterative(tol=1e-6):
        found = sketchgp.predict(model, x.numpy(), variance=variance)
    assert found.mean.shape == mean.shape and relative(found.mean, mean) < 1e-5
    if variance is None:
        assert found.variance is None and found.observation_variance is None
        return
    near = 1e-4 if variance == "exact" else 0.3
    assert found.variance.shape == mean.shape and relative(found.variance, latent) < near
    assert (found.observation_variance is None) == known
    if not known:
        assert relative(found.observation_variance, observed) < near
    if not several:
        assert bool(((found.mean - mean).abs() <= found.mean_error_bound).all())
        assert float(found.mean_error_bound.max()) < 0.1 * float(latent.sqrt().max())
    if variance == "exact" and not several:
        assert bool(((found.variance - latent).abs() <= found.variance_error_bound).all())


def test_bounds_of_predictions_are_in_units_of_the_data() -> None:
    """A loose solve's error, and its bound, of outcomes a thousand times as large are a thousand times as large."""
    x, y, xt = problem()
    plain, scaled = (
        sketchgp.accelerate(SingleTaskGP(x, 1000**power * y, input_transform=Normalize(d=2))) for power in (0, 1)
    )
    with iterative(tol=0.05):
        one, other = (sketchgp.predict(model, xt, variance="exact") for model in (plain, scaled))
    for name, power in (("mean_error_bound", 1), ("variance_error_bound", 2), ("mean_error_bound_deviations", 0)):
        assert relative(getattr(other, name), 1000**power * getattr(one, name)) < 1e-3, name
    with dense():
        mean, _ = posterior(sketchgp.restore(scaled), xt)
    assert bool(((other.mean - mean.squeeze(-1)).abs() <= other.mean_error_bound).all())


def test_predictions_of_logarithms_are_log_normal() -> None:
    x, y, xt = problem()
    model = SingleTaskGP(x, (y / 40).exp(), outcome_transform=Log(), input_transform=Normalize(d=2))
    with dense():
        mean, variance = posterior(copy.deepcopy(model), xt)
    sketchgp.accelerate(model)
    with iterative(tol=1e-6):
        found = sketchgp.predict(model, xt, variance="exact")
        with pytest.raises(sketchgp.InputError, match="Log, whose mean depends on it; got None"):
            sketchgp.predict(model, xt, variance=None)
    assert relative(found.mean, mean[:, 0]) < 1e-4 and relative(found.variance, variance[:, 0]) < 1e-3
    assert found.mean_error_bound is None and found.variance_error_bound is None


def test_predict_of_a_multi_task_gp_names_tasks_in_x() -> None:
    model, x = multitask()
    with dense():
        mean, variance = posterior(copy.deepcopy(model), x)
    sketchgp.accelerate(model)
    for task in (0, 1):
        with iterative(tol=1e-6):
            found = sketchgp.predict(model, torch.cat([x, torch.full_like(x[:, :1], task)], dim=-1))
        assert relative(found.mean, mean[:, task]) < 1e-4 and relative(found.variance, variance[:, task]) < 1e-3


def test_predict_refuses_transforms_without_a_mean() -> None:
    x, y, xt = problem()
    cases = [
        ({"outcome_transform": Power(0.5)}, "outcome_transform expects .* got Power; draw from"),
        ({"input_transform": InputPerturbation(torch.zeros(2, 2).double())}, "one point of each"),
    ]
    for options, message in cases:
        model = sketchgp.accelerate(SingleTaskGP(x, y, **options))
        with iterative(), pytest.raises(sketchgp.InputError, match=message):
            sketchgp.predict(model, xt)


@pytest.mark.parametrize("kind", ["default", "known noise"])
def test_leave_one_out_is_in_units_of_the_data(kind: str) -> None:
    """What BoTorch's posterior says of each row, the row left out and the transforms as they are."""
    model, _ = single(kind, n=40)
    (x, y, _), model = problem(40), model.eval()
    everything, means, variances = torch.arange(40), torch.empty(40).double(), torch.empty(40).double()
    for i in range(40):
        plain, rest = copy.deepcopy(model), everything != i
        plain.set_train_data(plain.train_inputs[0][rest], plain.train_targets[rest], strict=False)
        noise = plain.likelihood.noise_covar.noise.detach()
        if kind == "known noise":
            plain.likelihood.noise_covar.noise = noise[rest]
        with dense(), torch.no_grad():
            found = plain.posterior(x[i : i + 1])
        scale = float(model.outcome_transform.stdvs) ** 2
        means[i] = found.mean
        variances[i] = found.variance + scale * (noise[i] if kind == "known noise" else noise)
    each = torch.distributions.Normal(means, variances.sqrt()).log_prob(y[:, 0])
    sketchgp.accelerate(model)
    with iterative(tol=1e-6):
        exact = sketchgp.leave_one_out(model)
        probed = sketchgp.leave_one_out(model.train(), exact=False, num_probes=64)
    assert relative(exact.mean, means) < 1e-8 and relative(exact.variance, variances) < 1e-8
    assert relative(exact.residual, y[:, 0] - means) < 1e-6 and relative(exact.log_density, each) < 1e-6
    error, density = float((y[:, 0] - means).square().mean()), float(each.mean())
    assert exact.mean_squared_error == pytest.approx(error) and exact.mean_log_density == pytest.approx(density)
    assert relative(probed.mean, means) < 0.05 and relative(probed.variance, variances) < 0.2
    assert 0.2 < float(((probed.variance - variances) / probed.variance_standard_error).square().mean().sqrt()) < 1.7
    assert abs(probed.mean_squared_error - error) < 4 * probed.mean_squared_error_standard_error < 0.4 * error
    assert abs(probed.mean_log_density - density) < 4 * probed.mean_log_density_standard_error < 0.2
    if kind == "known noise":
        return
    values = [exact.mean_squared_error, exact.mean_log_density]
    with dense(), torch.no_grad():
        joint = model.likelihood(model.train()(*model.train_inputs)).log_prob(model.train_targets)
    likelihood = float(joint) / 40 - math.log(float(model.outcome_transform.stdvs))
    with iterative(tol=1e-6):
        path = sketchgp.noise_path(model, model.likelihood.noise.detach())
        rough = sketchgp.noise_path(model, model.likelihood.noise.detach(), exact=False, num_probes=64)
    assert [float(path.mean_squared_error), float(path.mean_log_density)] == pytest.approx(values)
    assert float(path.log_marginal_likelihood) == pytest.approx(likelihood)
    assert abs(float(rough.mean_squared_error) - values[0]) < 4 * float(rough.mean_squared_error_standard_error)
    assert abs(float(rough.mean_log_density) - values[1]) < 4 * float(rough.mean_log_density_standard_error)
    assert float(rough.lower) <= likelihood + 1e-9 and likelihood <= float(rough.upper) + 1e-9
    assert float(rough.log_marginal_likelihood) == pytest.approx(likelihood, abs=0.1)


@pytest.mark.parametrize("call", [sketchgp.leave_one_out, lambda model: sketchgp.noise_path(model, [0.1])])
def test_transforms_that_training_points_cannot_go_back_through_are_refused(call: Any) -> None:
    x, y, _ = problem(20)
    uneven = Normalize(d=2, bounds=torch.tensor([[0.0, -5.0], [10.0, 5.0]]).double(), transform_on_train=False)
    cases = [
        ({"outcome_transform": Log()}, "outcome_transform expects to shift and scale .* got Log"),
        ({"input_transform": uneven}, "same in training and in predictions"),
        ({"input_transform": InputPerturbation(torch.zeros(2, 2).double())}, "one point of each"),
    ]
    for options, message in cases:
        model = sketchgp.accelerate(SingleTaskGP(x, y, **options))
        with pytest.raises(sketchgp.InputError, match=message):
            call(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_acquisition_functions_are_differentiated_again_and_again(dtype):
    """Conversions to the dtype that a model has, which acquisition functions make at each call, keep its solution."""
    x = torch.rand(20, 2, dtype=dtype)
    y = torch.sin(6 * x[:, :1])
    model = sketchgp.accelerate(SingleTaskGP(x, y, torch.full_like(y, 0.01))).eval()
    acquisition = LogNoisyExpectedImprovement(model, x)
    at = torch.rand(4, 1, 2, dtype=dtype, requires_grad=True)
    gradients = [torch.autograd.grad(acquisition(at).sum(), at)[0] for _ in range(2)]
    assert torch.allclose(*gradients) and torch.isfinite(gradients[0]).all()
    model(at.detach())
    strategy = model.prediction_strategy
    model.to(at)
    assert model.prediction_strategy is strategy
    assert model.double().prediction_strategy is (strategy if dtype == torch.float64 else None)
