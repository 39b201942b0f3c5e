"""What ``accelerate`` leaves as it was: state, copies, other models, GPyTorch's settings, memory."""

from __future__ import annotations

import copy
import gc
import io
import logging
import pickle
import warnings
import weakref
from typing import Any

import gpytorch
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import sketchgp
from cases import each
from gp_models import (
    SOLVED,
    TORCH_WARNINGS,
    Plain,
    data,
    dense,
    gradient_error,
    iterative,
    marginal,
    posterior,
    relative,
    scaled,
)
from sketchgp.operators import KernelMatrix

pytestmark = TORCH_WARNINGS

RBF, BATCH, FIXED = SOLVED["scale-rbf-ard"], SOLVED["batch"], SOLVED["fixed-noise"]


def accelerated(dtype: torch.dtype = torch.float64, **choices: Any) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """The plainest model, accelerated, and its test inputs."""
    model, test = RBF.build(dtype)
    return sketchgp.accelerate(model, **choices), test


def step(model: Any, optimizer: Any) -> None:
    """One step of training."""
    optimizer.zero_grad()
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    (-mll(model(*model.train_inputs), model.train_targets)).backward()
    optimizer.step()


# --- what the model looks like ----------------------------------------------------------------------------------


@each("name", ["scale-rbf-ard", "fixed-noise", "batch", "hadamard", "lcm", "deep"])
def test_class_and_state_stay(name: str) -> None:
    model, _ = SOLVED[name].build()
    kind, likelihood_kind, before = type(model), type(model.likelihood), copy.deepcopy(model.state_dict())
    parameters = dict(model.named_parameters())
    returned = sketchgp.accelerate(model)
    assert returned is model
    assert isinstance(model, kind)
    assert isinstance(model.likelihood, likelihood_kind)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert all(p is parameters[n] for n, p in model.named_parameters())
    assert list(dict(model.named_parameters())) == list(parameters)


def test_state_dict_loads_both_ways() -> None:
    model, test = accelerated()
    plain, _ = RBF.build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3)
    assert plain.load_state_dict(model.state_dict()).missing_keys == []
    with dense():
        mean, variance = posterior(plain, test)
    other, _ = accelerated()
    assert other.load_state_dict(plain.state_dict()).unexpected_keys == []
    with iterative():
        found_mean, found_variance = posterior(other, test)
    assert relative(found_mean, mean) < 1e-6
    assert relative(found_variance, variance) < 1e-5


def test_train_and_eval_take_turns() -> None:
    model, test = accelerated()
    with iterative():
        first = posterior(model, test)[0]
        value = marginal(model)[0]
        assert model.training
        assert model.likelihood.training
        second = posterior(model, test)[0]
        assert not model.training
        again = marginal(model)[0]
    assert relative(second, first) < 1e-7
    assert float((again - value).abs()) < 1e-2


# --- copies -----------------------------------------------------------------------------------------------------


def through_pickle(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def through_torch(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    ("name", "used", "copier"),
    [
        ("scale-rbf-ard", False, copy.deepcopy),
        ("fixed-noise", True, copy.deepcopy),
        ("batch", False, through_pickle),
        ("lcm", True, through_pickle),
        ("hadamard", False, through_torch),
        ("batch", True, through_torch),
    ],
)
def test_copies_are_accelerated_and_independent(name: str, copier: Any, used: bool) -> None:
    model, test = SOLVED[name].build()
    choice = sketchgp.RPCholesky(rank=40, seed=3)
    sketchgp.accelerate(model, preconditioner=choice, solver=sketchgp.ConjugateGradients(tol=1e-9), matmul="tiled")
    with iterative():
        if used:
            posterior(model, test)
            marginal(model)
        twin = copier(model)
        assert type(twin) is type(model)
        assert type(twin.likelihood) is type(model.likelihood)
        assert list(twin.state_dict()) == list(model.state_dict())
        mine, theirs = model._sketchgp, twin._sketchgp
        assert theirs is twin.likelihood._sketchgp[0]
        assert theirs is not mine
        assert (theirs.preconditioner, theirs.solver, theirs.matmul) == (mine.preconditioner, mine.solver, mine.matmul)
        assert theirs.cache is not mine.cache
        assert theirs.cache.builds == 0
        mean = posterior(model, test)[0]
        with sketchgp.record_solves() as solves:
            assert relative(posterior(twin, test)[0], mean) < 1e-7
        assert solves
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.add_(0.5)
        twin.train()
        assert relative(posterior(twin, test)[0], mean) > 1e-3
        model.train()
        assert relative(posterior(model, test)[0], mean) < 1e-7


def test_a_copy_of_a_copy_restores() -> None:
    model, test = accelerated()
    twin = sketchgp.restore(through_pickle(copy.deepcopy(model)))
    plain, _ = RBF.build()
    assert type(twin) is type(plain)
    with dense():
        assert torch.equal(posterior(twin, test)[0], posterior(plain, test)[0])


# --- dtype and device -------------------------------------------------------------------------------------------


def test_double_after_float() -> None:
    plain, test = RBF.build(torch.float32)
    with dense():
        mean, variance = posterior(plain.double(), tuple(t.double() for t in test))
    model, _ = accelerated(torch.float32)
    with iterative(tol=1e-4):
        posterior(model, test)  # leaves float32 caches, which must not survive
    model.double()
    with iterative():
        found_mean, found_variance = posterior(model, tuple(t.double() for t in test))
        assert found_mean.dtype == torch.float64
        assert relative(found_mean, mean) < 1e-6
        assert relative(found_variance, variance) < 1e-5
        marginal(model)
    with iterative(tol=1e-4):
        back = posterior(model.float(), test)[0]
    assert back.dtype == torch.float32
    assert relative(back, mean) < 1e-3


def test_to_cpu() -> None:
    model, test = accelerated()
    with iterative():
        mean, _ = posterior(model, test)
        assert model.to("cpu") is model
        assert relative(posterior(model, test)[0], mean) < 1e-7


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["scale-rbf-ard", "additive-kernel", "batch", "fixed-noise", "hadamard", "periodic"])
def test_to_cuda_and_back(name: str) -> None:
    plain, test = SOLVED[name].build()
    with dense():
        mean, variance = posterior(plain, test)
        value, gradient = marginal(plain)
    model, test = SOLVED[name].build()
    sketchgp.accelerate(model)
    with iterative(probes=60):
        posterior(model, test)
        model.to("cuda")
        there = tuple(t.cuda() for t in test)
        found_mean, found_variance = posterior(model, there)
        assert found_mean.device.type == "cuda"
        assert relative(found_mean.cpu(), mean) < 1e-6
        assert relative(found_variance.cpu(), variance) < 1e-5
        found, found_gradient = marginal(model)
        assert float((found.cpu() - value).abs().max()) < 5e-3
        assert gradient_error({k: g.cpu() for k, g in found_gradient.items()}, gradient) < 3e-2
        back = posterior(model.to("cpu"), test)[0]
    assert relative(back, mean) < 1e-6


# --- restore, twice, beside others ------------------------------------------------------------------------------


def test_restore_gives_back_class_and_numbers() -> None:
    plain, test = RBF.build()
    model, _ = RBF.build()
    keys, likelihood_keys = set(model.__dict__), set(model.likelihood.__dict__)
    sketchgp.accelerate(model)
    with iterative():
        posterior(model, test)
        marginal(model)
    assert sketchgp.restore(model) is model
    assert type(model) is type(plain)
    assert type(model.likelihood) is type(plain.likelihood)
    assert set(model.__dict__) == keys
    assert set(model.likelihood.__dict__) == likelihood_keys
    for settings in (dense, iterative):
        plain.train(), model.train()
        with settings(), sketchgp.record_solves() as solves, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            expected = (*posterior(plain, test), *marginal(plain))
            torch.manual_seed(0)
            found = (*posterior(model, test), *marginal(model))
        assert not solves
        for a, b in zip(found[:3], expected[:3], strict=True):
            assert torch.equal(a, b)
        assert all(torch.equal(found[3][key], expected[3][key]) for key in expected[3])


@pytest.mark.parametrize("name", ["a plain model", "restored before"])
def test_restore_refuses_what_is_not_accelerated(name: str) -> None:
    model, _ = RBF.build()
    if name == "restored before":
        sketchgp.restore(sketchgp.accelerate(model))
    with pytest.raises(sketchgp.InputError):
        sketchgp.restore(model)


def test_backward_of_a_loss_made_before_accelerate_and_after_restore() -> None:
    plain, _ = RBF.build()
    with dense():
        _, gradient = marginal(plain)
        mll = gpytorch.mlls.ExactMarginalLogLikelihood(plain.likelihood, plain)
        loss = mll(plain(*plain.train_inputs), plain.train_targets)
    sketchgp.accelerate(plain)
    with dense():
        loss.backward()
        assert gradient_error({n: p.grad for n, p in plain.named_parameters()}, gradient) < 1e-12
    plain.zero_grad()
    with iterative(probes=60):
        loss = mll(plain(*plain.train_inputs), plain.train_targets)
        sketchgp.restore(plain)
        loss.backward()
    assert gradient_error({n: p.grad for n, p in plain.named_parameters()}, gradient) < 3e-2


def test_gradients_reach_hyperparameters_that_are_no_parameters() -> None:
    """Pyro's samplers put tensors in their place."""
    model, _ = RBF.build()
    gradients = []
    for setting in (dense, iterative):
        if setting is iterative:
            sketchgp.accelerate(model)
        drawn = model.to_random_module()
        values = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
        for name, value in values.items():
            path, _, key = name.rpartition(".")
            drawn.get_submodule(path).initialize(**{key: value})
        with setting():
            density = drawn.likelihood(drawn(*drawn.train_inputs)).log_prob(drawn.train_targets)
        gradients.append(dict(zip(values, torch.autograd.grad(density, list(values.values())), strict=True)))
    assert gradient_error(gradients[1], gradients[0]) < 3e-2


def test_backward_of_a_mean_after_restore() -> None:
    gradients = []
    for restored in (False, True):
        model, test = accelerated()
        model.eval()
        x = test[0].clone().requires_grad_()
        with iterative():
            mean = model(x).mean.sum()
            if restored:
                sketchgp.restore(model)
            mean.backward()
        gradients.append(x.grad)
    assert relative(gradients[1], gradients[0]) < 1e-6


def test_accelerating_again_replaces_the_choices() -> None:
    model, test = accelerated()
    kind = type(model)
    with iterative(), sketchgp.record_solves() as solves:
        posterior(model, test)
        sketchgp.accelerate(model, preconditioner=sketchgp.Nystrom(rank=12), matmul="tiled")
        assert type(model) is kind
        posterior(model, test)
        sketchgp.accelerate(model, preconditioner=None, solver=sketchgp.Cholesky())
        posterior(model, test)
    assert type(model) is kind
    assert [report.preconditioner for report in solves if report.columns == 1] == [
        "RPCholesky",
        "Nystrom[gaussian]",
        "none",
    ]
    assert [report.solver for report in solves][-1] == "Cholesky"
    assert len(model.likelihood._sketchgp) == 1, "the earlier choices are let go"
    assert model.likelihood._sketchgp[0] is model._sketchgp
    sketchgp.restore(model)
    assert type(model) is Plain


def test_an_untouched_model_gives_the_same_bits() -> None:
    plain, test = RBF.build()

    def answers() -> list[torch.Tensor]:
        plain.train()
        torch.manual_seed(0)
        with gpytorch.settings.max_cholesky_size(20), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value, gradient = marginal(plain)
            return [*posterior(plain, test), value, *gradient.values()]

    before = answers()
    kept = {kind: dict(vars(kind)) for kind in (type(plain), type(plain.likelihood), gpytorch.models.ExactGP)}
    model, _ = accelerated()
    with sketchgp.record_solves() as solves:
        with iterative():
            marginal(model)
            posterior(model, test)
        count = len(solves)
        assert count
        beside = answers()
        assert len(solves) == count
        with iterative():
            marginal(model)
    after = answers()
    for expected, *found in zip(before, beside, after, strict=True):
        assert all(torch.equal(value, expected) for value in found)
    assert all(dict(vars(kind)) == content for kind, content in kept.items())


def test_two_accelerated_models_do_not_disturb_each_other() -> None:
    one, test = accelerated(preconditioner=sketchgp.RPCholesky(rank=30))
    two, other_test = FIXED.build()
    sketchgp.accelerate(two, preconditioner=sketchgp.Nystrom(rank=50), solver=sketchgp.ConjugateGradients(tol=1e-9))
    with dense():
        expected_one, expected_two = posterior(RBF.build()[0], test)[0], posterior(FIXED.build()[0], other_test)[0]
    with iterative(), sketchgp.record_solves() as solves:
        for _ in range(2):
            one.train(), two.train()
            found_one, found_two = posterior(one, test)[0], posterior(two, other_test)[0]
    assert relative(found_one, expected_one) < 1e-6
    assert relative(found_two, expected_two) < 1e-6
    assert {(report.preconditioner, report.rank) for report in solves} == {
        ("RPCholesky", 30),
        ("Nystrom[gaussian]", 50),
    }
    assert one._sketchgp.cache.builds == two._sketchgp.cache.builds == 1
    sketchgp.restore(one)
    with iterative():
        two.train()
        assert relative(posterior(two, other_test)[0], expected_two) < 1e-6


def test_one_likelihood_in_two_models() -> None:
    """The models keep their own choices apart although they share a likelihood."""
    one, test = accelerated(preconditioner=sketchgp.RPCholesky(rank=33))
    x, y, _ = data()
    two = Plain(x.flip(0), y.flip(0), one.likelihood, scaled(gpytorch.kernels.MaternKernel(nu=1.5))).double()
    with dense():
        expected = posterior(two, test)[0]
    sketchgp.accelerate(two)
    with iterative():
        assert relative(posterior(two, test)[0], expected) < 1e-6
        with dense():
            plain = posterior(RBF.build()[0], test)[0]
        one.train()
        with sketchgp.record_solves() as solves:
            assert relative(posterior(one, test)[0], plain) < 1e-6
        assert {report.rank for report in solves} == {33}
    sketchgp.restore(two)
    with iterative():
        one.train()
        assert relative(posterior(one, test)[0], plain) < 1e-6
    sketchgp.restore(one)
    assert type(one.likelihood) is gpytorch.likelihoods.GaussianLikelihood


def test_a_new_likelihood_is_solved_for_by_the_choices_of_the_model() -> None:
    model, test = accelerated(preconditioner=sketchgp.RPCholesky(rank=33))
    old, new = model.likelihood, gpytorch.likelihoods.GaussianLikelihood().double()
    new.noise = 0.3
    with iterative():
        before = posterior(model, test)[0]  # what is cached is of the old noise
        with pytest.raises(sketchgp.InputError, match="Gaussian"):
            model.likelihood = gpytorch.likelihoods.StudentTLikelihood()
        assert torch.equal(posterior(model, test)[0], before)
        model.likelihood = new
        with sketchgp.record_solves() as solves:
            found = posterior(model, test)[0]
    assert {report.rank for report in solves} == {33}
    plain, _ = RBF.build()
    plain.likelihood.noise = 0.3
    with dense():
        assert relative(found, posterior(plain, test)[0]) < 1e-6
    assert type(old) is gpytorch.likelihoods.GaussianLikelihood
    sketchgp.restore(model)
    assert type(new) is gpytorch.likelihoods.GaussianLikelihood


# --- refusals ---------------------------------------------------------------------------------------------------


class NotExact(gpytorch.models.ApproximateGP):
    def __init__(self) -> None:
        points = torch.rand(4, 2)
        distribution = gpytorch.variational.CholeskyVariationalDistribution(4)
        super().__init__(gpytorch.variational.VariationalStrategy(self, points, distribution))


@each(
    "thing",
    [None, 3, "model", torch.nn.Linear(2, 1), gpytorch.likelihoods.GaussianLikelihood(), NotExact()],
    ids=lambda thing: type(thing).__name__,
)
def test_only_exact_gps(thing: Any) -> None:
    kind = type(thing)
    with pytest.raises(sketchgp.InputError, match=r"ExactGP"):
        sketchgp.accelerate(thing)
    assert type(thing) is kind


def test_a_list_of_models_is_pointed_to_its_members() -> None:
    models = gpytorch.models.IndependentModelList(RBF.build()[0], FIXED.build()[0])
    with pytest.raises(sketchgp.InputError, match=r"\.models"):
        sketchgp.accelerate(models)
    for model in models.models:
        sketchgp.accelerate(model)


WRONG_CHOICES = {
    "preconditioner string": {"preconditioner": "rpcholesky"},
    "preconditioner number": {"preconditioner": 15},
    "preconditioner class": {"preconditioner": sketchgp.RPCholesky},
    "preconditioner solver": {"preconditioner": sketchgp.ConjugateGradients()},
    "block above n": {"preconditioner": sketchgp.RPCholesky(block_size=181)},
    "solver string": {"solver": "cg"},
    "solver None": {"solver": None},
    "solver class": {"solver": sketchgp.ConjugateGradients},
    "solver preconditioner": {"solver": sketchgp.RPCholesky()},
    "matmul string": {"matmul": "sparse"},
    "precision string": {"matmul": "triton", "matmul_precision": "fp8"},
    "precision without triton": {"matmul_precision": "tf32"},
    "matmul None": {"matmul": None},
    "matmul list": {"matmul": ["dense"]},
    "two at once": {"matmul": "tiled", "solver": "direct"},
}


def snapshot(model: Any) -> tuple[Any, ...]:
    """Everything that a refusal must leave alone."""
    return (
        type(model),
        type(model.likelihood),
        set(model.__dict__),
        set(model.likelihood.__dict__),
        id(model.prediction_strategy),
        model.__dict__.get("_sketchgp"),
        list(model.likelihood.__dict__.get("_sketchgp", [])),
        model.training,
        [id(p) for p in model.parameters()],
        [p.detach().clone().tolist() for p in model.parameters()],
    )


@pytest.mark.parametrize("before", ["plain", "accelerated"])
def test_wrong_choices_are_refused_and_change_nothing(before: str) -> None:
    model, test = RBF.build()
    if before == "accelerated":
        sketchgp.accelerate(model, matmul="tiled")
    with dense() if before == "plain" else iterative():
        mean, _ = posterior(model, test)
    assert model.prediction_strategy is not None
    kept = snapshot(model)
    for wrong, choices in WRONG_CHOICES.items():
        with pytest.raises(sketchgp.InputError) as caught:
            sketchgp.accelerate(model, **choices)
        assert isinstance(caught.value, ValueError), wrong
        assert snapshot(model) == kept, wrong
    with dense() if before == "plain" else iterative():
        assert torch.equal(posterior(model, test)[0], mean)


def nan_inputs(model: Any) -> None:
    model.train_inputs[0][5, 1] = torch.nan


def infinite_inputs(model: Any) -> None:
    model.train_inputs[0][0, 0] = -torch.inf


def infinite_targets(model: Any) -> None:
    model.train_targets[7] = torch.inf


def parameters_of_another_dtype(model: Any) -> None:
    inputs, targets = model.train_inputs, model.train_targets
    model.float()
    model.set_train_data(inputs, targets, strict=False)


def likelihood_of_another_dtype(model: Any) -> None:
    model.likelihood.float()


def kernel_of_another_dtype(model: Any) -> None:
    model.covar_module.float()


def targets_of_another_dtype(model: Any) -> None:
    model.train_targets = model.train_targets.float()


def zero_noise(model: Any) -> None:
    constraint = gpytorch.constraints.GreaterThan(-1.0)
    model.likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=constraint).double()
    model.likelihood.noise = 0.0


def negative_noise(model: Any) -> None:
    zero_noise(model)
    model.likelihood.noise = -0.5


def nan_noise(model: Any) -> None:
    model.likelihood.noise_covar.raw_noise.data.fill_(torch.nan)


def no_points(model: Any) -> None:
    model.set_train_data(model.train_inputs[0][:0], model.train_targets[:0], strict=False)


def not_gaussian(model: Any) -> None:
    model.likelihood = gpytorch.likelihoods.BernoulliLikelihood()


DAMAGES = [
    nan_inputs,
    infinite_inputs,
    infinite_targets,
    parameters_of_another_dtype,
    likelihood_of_another_dtype,
    kernel_of_another_dtype,
    targets_of_another_dtype,
    zero_noise,
    negative_noise,
    nan_noise,
    no_points,
    not_gaussian,
]


@each("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_models_that_cannot_be_solved_are_refused(damage: Any) -> None:
    model, _ = RBF.build()
    damage(model)
    kept = snapshot(model)
    with pytest.raises(sketchgp.InputError) as caught:
        sketchgp.accelerate(model)
    assert isinstance(caught.value, sketchgp.SketchGPError)
    assert str(snapshot(model)) == str(kept)


@each("columns", [1, 4])
@each("kernel", [gpytorch.kernels.PeriodicKernel, gpytorch.kernels.PiecewisePolynomialKernel])
def test_lengthscales_that_are_not_one_a_column_are_told(kernel: Any, columns: int) -> None:
    """Of a kernel that is recognised, where a single column would be taken for all, and of one that is called."""
    model, test = RBF.build()
    model.covar_module = gpytorch.kernels.ScaleKernel(kernel(ard_num_dims=columns)).to(test[0])
    sketchgp.accelerate(model)
    with pytest.raises(sketchgp.InputError, match=rf"expects inputs with {columns} columns.* have 2"):
        sketchgp.predict(model, *test)


def test_rank_is_cut_to_the_points_of_a_batch() -> None:
    model, test = BATCH.build()
    sketchgp.accelerate(model, preconditioner=sketchgp.RPCholesky(rank=200)).eval()
    with iterative(), sketchgp.record_solves() as solves, torch.no_grad():
        _ = model(*test).mean
    assert solves and all("rank 200 was asked for; 180 points have 180" in report.notes for report in solves)


def test_nan_targets_without_the_mask_policy_are_an_error() -> None:
    model, test = accelerated()
    targets = model.train_targets.clone()
    targets[3] = torch.nan
    model.set_train_data(targets=targets)
    with iterative(), pytest.raises(sketchgp.SketchGPError, match="NaN"):
        posterior(model, test)


def test_a_model_without_data_can_be_accelerated_first() -> None:
    model = Plain(None, None, gpytorch.likelihoods.GaussianLikelihood(), scaled(gpytorch.kernels.RBFKernel()))
    sketchgp.accelerate(model)
    x, y, xt = data(dtype=torch.float32)
    model.set_train_data(x, y, strict=False)
    with iterative(tol=1e-4):
        found = posterior(model, (xt,))[0]
    with dense():
        assert relative(found, posterior(sketchgp.restore(model), (xt,))[0]) < 1e-3


# --- one preconditioner a matrix --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "matmul"),
    [
        ("scale-rbf-ard", "gpytorch"),
        ("additive-forward", "tiled"),
        ("batch", "dense"),
        ("lcm", "gpytorch"),
    ],
)
def test_one_build_a_training_step_and_one_for_prediction(name: str, matmul: str) -> None:
    model, test = SOLVED[name].build()
    sketchgp.accelerate(model, matmul=matmul)
    cache = model._sketchgp.cache
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    model.train()
    with iterative(tol=1e-4):
        for count in range(1, 4):
            optimizer.zero_grad()
            (-mll(model(*model.train_inputs), model.train_targets).sum()).backward()
            optimizer.step()
            assert cache.builds == count
        model.eval()
        with torch.no_grad():
            prediction = model(*test)
            assert prediction.mean is not None
            assert prediction.variance is not None
            assert cache.builds == 4
            for _ in range(2):
                assert model(*(t[..., :5, :] for t in test)).variance is not None
            assert model(*test).covariance_matrix is not None
    assert cache.builds == 4


def test_no_new_build_for_unchanged_parameters() -> None:
    model, test = accelerated()
    cache = model._sketchgp.cache
    with iterative():
        marginal(model)
        assert cache.builds == 1
        posterior(model, test)
        assert cache.builds == 1
        model.train()
        posterior(model, test)
    assert cache.builds == 1


# --- nothing stale ----------------------------------------------------------------------------------------------


def by_initialize(model: Any) -> None:
    model.initialize(**{"covar_module.base_kernel.lengthscale": 0.7, "likelihood.noise": 0.2})


def by_setter(model: Any) -> None:
    model.covar_module.outputscale = 4.0


def by_data(model: Any) -> None:
    model.covar_module.base_kernel.raw_lengthscale.data.add_(0.8)


def by_no_grad(model: Any) -> None:
    with torch.no_grad():
        model.likelihood.noise_covar.raw_noise.sub_(1.5)


def by_optimizer(model: Any) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.4)
    model.train()
    for _ in range(2):
        step(model, optimizer)


def by_state_dict(model: Any) -> None:
    other, _ = RBF.build()
    by_initialize(other)
    model.load_state_dict(other.state_dict())


def by_targets(model: Any) -> None:
    model.set_train_data(targets=model.train_targets.flip(0))


def by_inputs(model: Any) -> None:
    model.set_train_data(model.train_inputs[0].flip(0))


def by_fewer_points(model: Any) -> None:
    model.set_train_data(model.train_inputs[0][:90], model.train_targets[:90], strict=False)


def by_one_moved_point(model: Any) -> None:
    x = model.train_inputs[0].clone()
    x[17] += 0.6
    model.set_train_data(x)


def by_inputs_in_place(model: Any) -> None:
    model.train_inputs[0][40:80].mul_(0.5)


CHANGES = [
    by_initialize,
    by_setter,
    by_data,
    by_no_grad,
    by_optimizer,
    by_state_dict,
    by_targets,
    by_inputs,
    by_fewer_points,
    by_one_moved_point,
    by_inputs_in_place,
]


@pytest.mark.parametrize(
    ("change", "matmul"),
    [*zip(CHANGES, ["auto", "auto", "gpytorch"] * 4, strict=False)],
    ids=lambda one: one if isinstance(one, str) else one.__name__,
)
def test_changes_leave_nothing_stale(change: Any, matmul: str) -> None:
    model, test = accelerated(matmul=matmul)
    with iterative(probes=60):
        marginal(model)
        old = posterior(model, test)[0]
        model.train()
        change(model)
        with sketchgp.record_solves() as solves:
            found = (*posterior(model, test), *marginal(model))
        fresh = Plain(*model.train_inputs, model.train_targets, *_copied(model)).double()
        fresh.mean_module = copy.deepcopy(model.mean_module)
        with dense():
            expected = (*posterior(fresh, test), *marginal(fresh))
        sketchgp.accelerate(fresh, matmul=matmul)
        fresh.train()
        with sketchgp.record_solves() as again:
            posterior(fresh, test)
    assert relative(found[0], old) > 1e-4, "the change must change the answer"
    assert relative(found[0], expected[0]) < 1e-6
    assert relative(found[1], expected[1]) < 1e-5
    assert float((found[2] - expected[2]).abs()) < 5e-3
    assert gradient_error(found[3], expected[3]) < 3e-2
    assert solves[0].iterations <= again[0].iterations + 2, "the preconditioner is of the old matrix"


def _copied(model: Any) -> tuple[Any, Any]:
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    likelihood.load_state_dict(model.likelihood.state_dict())
    return likelihood, copy.deepcopy(model.covar_module)


@pytest.mark.parametrize("change", [by_data, by_no_grad, by_setter], ids=lambda change: change.__name__)
def test_a_step_back_finds_its_own_preconditioner(change: Any) -> None:
    """There and back again: keys are values, not versions or identities."""
    model, test = accelerated()
    state = copy.deepcopy(model.state_dict())
    with iterative():
        old = posterior(model, test)
        model.train()
        change(model)
        posterior(model, test)
        model.train()
        model.load_state_dict(state)
        new = posterior(model, test)
    assert relative(new[0], old[0]) < 1e-6
    assert relative(new[1], old[1]) < 1e-5


def test_a_graph_outlives_a_later_build() -> None:
    """Two losses at two parameter values, backward in the order of their making."""
    model, _ = accelerated()
    with dense():
        gradients = []
        for lengthscale in (0.3, 0.6):
            plain, _ = RBF.build()
            plain.covar_module.base_kernel.lengthscale = lengthscale
            gradients.append(marginal(plain)[1])
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    twin = copy.deepcopy(model)
    twin._sketchgp = model._sketchgp
    twin.likelihood._sketchgp = [model._sketchgp]  # one cache for both
    with iterative(probes=60):
        losses = []
        for one, lengthscale in ((model, 0.3), (twin, 0.6)):
            one.covar_module.base_kernel.lengthscale = lengthscale
            one.train()
            mll = gpytorch.mlls.ExactMarginalLogLikelihood(one.likelihood, one)
            losses.append(mll(one(*one.train_inputs), one.train_targets))
        for loss, one, gradient in zip(losses, (model, twin), gradients, strict=True):
            loss.backward()
            assert gradient_error({n: p.grad for n, p in one.named_parameters()}, gradient) < 3e-2


# --- memory -----------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The most entries that one tensor made inside the block had."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if torch.is_tensor(tensor) and tensor.layout == torch.strided:
                self.entries = max(self.entries, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


def largest_tensor(monkeypatch: pytest.MonkeyPatch, name: str, matmul: str, dtype: torch.dtype) -> tuple[int, int]:
    """Entries of the largest tensor made by a training step and a prediction, and n."""
    monkeypatch.setattr("sketchgp.operators.tiles._CPU_BYTES", 2**14)
    model, test = SOLVED[name].build(dtype)
    sketchgp.accelerate(model, preconditioner=sketchgp.RPCholesky(rank=30), matmul=matmul)
    with iterative(probes=4, tol=9e-4), Largest() as largest:
        marginal(model)
        posterior(model, test)
    return largest.entries, model.train_inputs[0].shape[-2]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("scale-rbf-ard", torch.float32),
        ("additive-kernel", torch.float64),
        ("additive-forward", torch.float32),
        ("fixed-noise", torch.float64),
        ("periodic", torch.float64),
    ],
)
def test_tiled_products_never_make_the_matrix(monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype) -> None:
    entries, n = largest_tensor(monkeypatch, name, "tiled", dtype)
    assert entries < n * n / 2


def test_dense_products_do_make_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measure of the test before sees it."""
    entries, n = largest_tensor(monkeypatch, "scale-rbf-ard", "dense", torch.float64)
    assert entries >= n * n


@pytest.mark.parametrize("matmul", ["dense", "tiled"])
def test_operators_are_freed(monkeypatch: pytest.MonkeyPatch, matmul: str) -> None:
    alive: weakref.WeakSet[KernelMatrix] = weakref.WeakSet()
    plain = KernelMatrix.__init__

    def counted(self: KernelMatrix, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        alive.add(self)

    monkeypatch.setattr(KernelMatrix, "__init__", counted)
    model, test = accelerated(matmul=matmul)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    counts = []
    with iterative(tol=1e-4):
        for _ in range(3):
            model.train()
            step(model, optimizer)
            posterior(model, test)
            gc.collect()
            counts.append(len(alive))
    assert counts[0] > 0, "the prediction strategy holds the training matrix"
    assert counts[1] == counts[0]
    assert counts[2] == counts[0]
    model.train()
    optimizer.zero_grad()
    gc.collect()
    assert len(alive) == 0


def test_a_model_is_freed() -> None:
    model, test = accelerated()
    with iterative(tol=1e-4):
        marginal(model)
        posterior(model, test)
    dead = weakref.ref(model)
    del model
    gc.collect()
    assert dead() is None


# --- GPyTorch's settings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("training", "prediction", "expected"),
    [(1.0, 1e-2, (1e-3, 1e-2)), (1e-5, 1e-6, (1e-5, 1e-6)), (0.1, 1e-5, (1e-3, 1e-5))],
)
def test_tolerances_of_gpytorch(training: float, prediction: float, expected: tuple[float, float]) -> None:
    model, test = accelerated()
    settings = gpytorch.settings
    with settings.max_cholesky_size(20), settings.cg_tolerance(training), settings.eval_cg_tolerance(prediction):
        with sketchgp.record_solves() as solves:
            marginal(model)
        assert {report.tol for report in solves} == {expected[0]}
        with sketchgp.record_solves() as solves:
            posterior(model, test)
        assert solves[0].tol == expected[1]
        assert solves[0].judged == ("predictions" if prediction == 1e-2 else "residual")
    assert all(report.max_residual <= report.tol for report in solves)


def test_a_tolerance_of_the_solver_wins() -> None:
    model, test = accelerated(solver=sketchgp.ConjugateGradients(tol=1e-5))
    with iterative(tol=1e-9), sketchgp.record_solves() as solves:
        posterior(model, test)
        marginal(model)
    assert {report.tol for report in solves} == {1e-5}


@pytest.mark.parametrize(("own", "expected"), [(None, 3), (5, 5)])
def test_max_cg_iterations(own: int | None, expected: int) -> None:
    model, test = accelerated(preconditioner=None, solver=sketchgp.ConjugateGradients(max_iterations=own))
    with (
        iterative(),
        gpytorch.settings.max_cg_iterations(3),
        sketchgp.record_solves() as solves,
        pytest.warns(sketchgp.ConvergenceWarning, match="residual"),
    ):
        posterior(model, test)
    assert solves[0].iterations == expected
    assert not solves[0].converged


def test_max_preconditioner_size_of_nought_means_none() -> None:
    model, test = accelerated()
    with iterative(), gpytorch.settings.max_preconditioner_size(0), sketchgp.record_solves() as solves:
        posterior(model, test)
        marginal(model)
    assert {(report.preconditioner, report.rank) for report in solves} == {("none", 0)}
    assert model._sketchgp.cache.builds == 0


@pytest.mark.parametrize("probes", [1, 7])
def test_num_trace_samples(probes: int) -> None:
    model, _ = accelerated()
    with iterative(probes=probes), sketchgp.record_solves() as solves:
        marginal(model)
    assert solves[0].columns == probes + 1


def test_skip_posterior_variances() -> None:
    model, test = accelerated()
    with iterative(), gpytorch.settings.skip_posterior_variances(), sketchgp.record_solves() as solves:
        model.eval()
        with torch.no_grad():
            found = model(*test)
            mean = found.mean
            assert not found.lazy_covariance_matrix.diagonal().any()
    assert [report.columns for report in solves] == [1]
    with iterative():
        assert relative(mean, posterior(model, test)[0]) < 1e-7


def test_skip_logdet_forward() -> None:
    plain, _ = RBF.build()
    with dense():
        _, gradient = marginal(plain)
    model, _ = accelerated()
    with iterative(probes=60), gpytorch.settings.skip_logdet_forward():
        _, found = marginal(model)
    assert gradient_error(found, gradient) < 3e-2


def test_detached_test_caches() -> None:
    """Off: the mean carries a gradient to the noise."""
    gradients = []
    for accelerate, settings in ((False, dense()), (True, iterative(tol=1e-10))):
        model, test = RBF.build()
        if accelerate:
            sketchgp.accelerate(model)
        model.eval()
        with settings, gpytorch.settings.detach_test_caches(False):
            model(*test).mean.sum().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    assert float(gradients[0]["likelihood.noise_covar.raw_noise"].abs()) > 0
    assert gradient_error(gradients[1], gradients[0]) < 1e-5


def test_verbose_linalg(caplog: pytest.LogCaptureFixture) -> None:
    model, test = accelerated()
    logger = gpytorch.settings.verbose_linalg.logger
    with iterative(tol=1e-4), gpytorch.settings.verbose_linalg(True), caplog.at_level(logging.DEBUG, logger.name):
        logger.addHandler(caplog.handler)
        try:
            posterior(model, test)
        finally:
            logger.removeHandler(caplog.handler)
    assert any("ConjugateGradients (RPCholesky, rank" in record.getMessage() for record in caplog.records)
    caplog.clear()
    model.train()
    with iterative(tol=1e-4):
        posterior(model, test)
    assert not caplog.records


def test_a_memory_budget_makes_products_tiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sketchgp.operators.tiles._CPU_BYTES", 2**14)
    largest = []
    for budget in (2**40, 180 * 100 * 8):
        model, test = accelerated(preconditioner=sketchgp.RPCholesky(rank=20))
        with sketchgp.settings.memory_budget(budget), iterative(tol=1e-4), Largest() as measure:
            posterior(model, test)
        largest.append(measure.entries)
    assert largest[0] >= 180 * 180 > 2 * largest[1]


@pytest.mark.parametrize("threads", [2])
def test_models_in_threads(threads: int) -> None:
    """Two models trained at once give what each gives alone."""
    from concurrent.futures import ThreadPoolExecutor

    cases = [RBF, FIXED]
    with dense():
        expected = [posterior(*case.build())[0] for case in cases]
    models = [case.build() for case in cases]
    for model, _ in models:
        sketchgp.accelerate(model)
    with iterative(), ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(lambda pair: posterior(*pair)[0], models))
    for a, b in zip(found, expected, strict=True):
        assert relative(a, b) < 1e-6


@each("how", ["assigned", "registered", "of a loss"])
def test_a_plain_likelihood_is_solved_by_the_library(how):
    x, y, test = data()
    model = sketchgp.accelerate(
        Plain(x, y, gpytorch.likelihoods.GaussianLikelihood(), scaled(gpytorch.kernels.RBFKernel(), 0.8)).double()
    )
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    if how == "assigned":
        model.likelihood = likelihood
    elif how == "registered":
        model.add_module("likelihood", likelihood)
    with iterative(), sketchgp.record_solves() as solves:
        loss = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)(model(x), y)
        assert len(solves) == 1 and loss.requires_grad
        if how != "of a loss":
            posterior = model.eval()(test)
            assert torch.isfinite(posterior.variance).all() and len(solves) == 3


# --- what is kept with other settings, or before a change ----------------------------------------------------------


def _little(dtype: torch.dtype = torch.float64) -> Any:
    x = torch.rand(50, 2, dtype=dtype, generator=torch.Generator().manual_seed(3))
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = Plain(x, torch.sin(6 * x[:, 0]), likelihood, scaled(gpytorch.kernels.MaternKernel())).to(dtype)
    likelihood.noise = 1e-4
    return sketchgp.accelerate(model).eval()


def _exact(model: Any, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the dense posterior mean and variance, differentiable."""
    prior, x = model.covar_module, model.train_inputs[0]
    matrix = prior(x).to_dense() + model.likelihood.noise * torch.eye(len(x), dtype=x.dtype)
    cross = prior(z, x).to_dense()
    solved = torch.linalg.solve(matrix, cross.mT)
    mean = model.mean_module(z) + (model.train_targets - model.mean_module(x)) @ solved
    return mean, prior(z).to_dense().diagonal() - (cross * solved.mT).sum(dim=-1)


Z = torch.rand(4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


@each("first", [0, 800])
def test_the_threshold_of_a_factor_changes_between_predictions(first: int) -> None:
    model, z = _little(torch.float32), Z.float()
    model.covar_module.base_kernel.lengthscale = 2.0
    with torch.no_grad(), gpytorch.settings.max_cholesky_size(first):
        assert model(z).mean.isfinite().all()
    with torch.no_grad(), gpytorch.settings.max_cholesky_size(800):
        found = model(z).variance
    assert relative(found.double(), _exact(copy.deepcopy(model).double(), z.double())[1].detach()) < 1e-6


@each("what", ["mean", "variance"])
def test_gradients_after_a_prediction_without(what: str) -> None:
    """A kept factor or solution without a graph does not serve predictions with one."""
    model = _little()
    assert model(Z).mean.isfinite().all() and model(Z).variance.isfinite().all()
    parameters = dict(model.named_parameters())
    with gpytorch.settings.detach_test_caches(False):
        found = torch.autograd.grad(getattr(model(Z), what).sum(), list(parameters.values()), allow_unused=True)
    exact = torch.autograd.grad(
        _exact(model, Z)[what == "variance"].sum(), list(parameters.values()), allow_unused=True
    )
    for name, one, other in zip(parameters, found, exact, strict=True):
        one, other = (torch.zeros_like(parameters[name]) if g is None else g for g in (one, other))
        assert relative(one, other) < 1e-6 or float(other.abs().max()) < 1e-12, name


@each("size", [0, 800])
def test_fantasies_that_change_before_they_predict(size: int) -> None:
    model = _little()
    with gpytorch.settings.max_cholesky_size(size), gpytorch.settings.eval_cg_tolerance(1e-8):
        assert model(Z).mean.isfinite().all()
        fantasies = model.get_fantasy_model(Z[:2] + 0.1, torch.tensor([3.0, -3.0], dtype=torch.float64))
        fantasies.covar_module.base_kernel.lengthscale = 0.6
        found = fantasies(Z)
        mean, variance = _exact(fantasies, Z)
        assert relative(found.mean.detach(), mean.detach()) < 1e-5
        assert relative(found.variance.detach(), variance.detach()) < 1e-2


def test_a_parameter_that_is_exchanged_before_a_variance_is_read() -> None:
    model = _little()
    with gpytorch.settings.max_cholesky_size(0):
        posterior = model(Z)
        raw = model.covar_module.base_kernel.raw_lengthscale
        raw.data = raw.data + 2
        with pytest.raises(sketchgp.SketchGPError, match="changed"):
            posterior.variance  # noqa: B018
