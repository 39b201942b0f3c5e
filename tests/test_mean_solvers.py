"""Posterior means of models by solvers that only serve means, and the automatic choice of a solver."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import warnings
from typing import Any

import gpytorch
import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel

import sketchgp
from gp_models import SOLVED, TORCH_WARNINGS, Case, Plain, data, dense, iterative, marginal, posterior, relative
from sketchgp.solvers.automatic import automatic_solver

pytestmark = TORCH_WARNINGS
TIGHT: dict[str, Any] = {"tol": 1e-7, "max_passes": 20_000.0}
SOLVERS: dict[str, Any] = {
    "askotch": sketchgp.ASkotch(block_size=40, **TIGHT),
    "askotch-nystrom": sketchgp.ASkotch(block_size=60, rank=30, **TIGHT),
    "skotch": sketchgp.Skotch(block_size=60, **TIGHT),
    "eigenpro2": sketchgp.EigenPro2(block_size=60, **TIGHT),
}
RBF = SOLVED["scale-rbf-ard"]


def model_of(n: int = 180, dtype: torch.dtype = torch.float64) -> tuple[Any, torch.Tensor]:
    x, y, test = data(n=n, dtype=dtype)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = Plain(x, y, likelihood, ScaleKernel(RBFKernel())).to(dtype)
    model.covar_module.base_kernel.lengthscale, likelihood.noise = 0.3, 0.05
    return model, test


def reference(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    model, test = case.build()
    with dense():
        return posterior(model, test)


PLAIN = {  # one kernel matrix each, whose rows are those of the others, too
    "nested-scale", "batch-matern", "periodic", "product-kernel", "additive-kernel", "rational-quadratic",
    "active-dims", "active-dims-scale", "bare-matern",
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in SOLVED if name not in PLAIN])
def test_mean_and_variance_are_the_dense_ones(name):
    """Every kind of model; batches are solved one by one."""
    wanted_mean, wanted_variance = reference(SOLVED[name])
    model, test = SOLVED[name].build()
    sketchgp.accelerate(model, solver=SOLVERS["askotch"])
    with iterative(), sketchgp.record_solves() as solves:
        mean, variance = posterior(model, test)
    assert relative(mean, wanted_mean) < 1e-5
    assert relative(variance, wanted_variance) < 1e-4
    assert {report.solver for report in solves} <= {"ASkotch", "ConjugateGradients"}


@pytest.mark.parametrize("solver", SOLVERS)
def test_the_mean_is_its_and_the_rest_is_conjugate_gradients(solver):
    wanted_mean, wanted_variance = reference(RBF)
    model, test = RBF.build()
    sketchgp.accelerate(model, solver=SOLVERS[solver])
    model.eval()
    with iterative(), sketchgp.record_solves() as solves:
        with gpytorch.settings.skip_posterior_variances():
            mean = model(*test).mean.detach()
        names = [report.solver for report in solves]
        assert names == [type(SOLVERS[solver]).__name__]
        variance = model(*test).variance.detach()
        assert {report.solver for report in solves[1:]} == {"ConjugateGradients"}
        before = len(solves)
        marginal(model)
        assert {report.solver for report in solves[before:]} == {"ConjugateGradients"}
    assert relative(mean, wanted_mean) < 1e-6
    assert relative(variance, wanted_variance) < 1e-5


def test_gradients_of_the_mean():
    """The backward pass through a prediction is another system, solved by conjugate gradients."""
    gradients = []
    for accelerated in (False, True):
        model, test = RBF.build()
        if accelerated:
            sketchgp.accelerate(model, solver=SOLVERS["askotch"])
        model.eval()
        caches = gpytorch.settings.detach_test_caches(False)
        with iterative() if accelerated else dense(), caches, sketchgp.record_solves() as solves:
            model(*test).mean.square().sum().backward()
        gradients.append(torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]))
        if accelerated:
            assert [report.solver for report in solves].count("ASkotch") == 1
            assert solves[-1].solver == "ConjugateGradients"
    assert relative(gradients[1], gradients[0]) < 1e-5


def test_masked_observations():
    model, test = model_of()
    model.train_targets[3:20] = math.nan
    plain = copy.deepcopy(model)
    sketchgp.accelerate(model, solver=SOLVERS["askotch"])
    with gpytorch.settings.observation_nan_policy("mask"):
        with dense():
            wanted = plain.eval()(test).mean.detach()
        with iterative(), sketchgp.record_solves() as solves:
            mean = model.eval()(test).mean.detach()
    assert relative(mean, wanted) < 1e-6
    assert solves[0].solver == "ASkotch"
    assert solves[0].n == 163


def test_fantasies_copies_and_pickles():
    model, test = model_of()
    sketchgp.accelerate(model, solver=SOLVERS["askotch"])
    model.eval()
    with iterative():
        mean = model(test).mean
        assert torch.equal(pickle.loads(pickle.dumps(model))(test).mean, mean)
        with sketchgp.record_solves() as solves:
            assert torch.equal(copy.deepcopy(model)(test).mean, mean)
        assert solves[0].solver == "ASkotch"
        with sketchgp.record_solves() as solves:
            fantasy = model.get_fantasy_model(test[:3], torch.zeros(3, dtype=test.dtype))
            found = fantasy(test).mean
        assert {report.solver for report in solves} <= {"ConjugateGradients"}  # as the docs say
    plain = model_of()[0].eval()
    with dense():
        plain(test)
        wanted = plain.get_fantasy_model(test[:3], torch.zeros(3, dtype=test.dtype))(test).mean
    assert relative(found, wanted) < 1e-4


@pytest.mark.parametrize(("dtype", "preconditioner"), [(torch.float64, None), (torch.float32, "auto")])
def test_fantasies_are_as_exact_as_means(dtype, preconditioner):
    """By the deviations of observations, also where the noise is small; not to the residual of other solves."""
    model, test = model_of()
    model = model.to(dtype).eval()
    model.set_train_data(model.train_inputs[0].to(dtype), model.train_targets.to(dtype), strict=False)
    model.likelihood.noise_covar.register_constraint("raw_noise", gpytorch.constraints.GreaterThan(1e-6))
    model.likelihood.noise, test = 1e-5, test.to(dtype)
    new = test[:3], torch.zeros(3, dtype=dtype)
    plain = copy.deepcopy(model).double()
    plain.set_train_data(
        torch.cat([model.train_inputs[0], new[0]]).double(), torch.cat([model.train_targets, new[1]]).double(), False
    )
    with dense(), torch.no_grad():
        wanted = plain(test.double())
        deviation = (wanted.variance + 1e-5).sqrt()
    sketchgp.accelerate(model, preconditioner=preconditioner)
    with iterative(tol=1e-3), torch.no_grad():
        model(test)
        found = model.get_fantasy_model(*new)(test).mean
    assert float(((found - wanted.mean) / deviation).abs().max()) < 0.02


def test_fantasies_beside_a_checkpoint(tmp_path):
    """They are of another problem than the file's, and do not touch it."""
    model, test = model_of()
    solver = dataclasses.replace(SOLVERS["askotch"], checkpoint=tmp_path / "solve.pt")
    sketchgp.accelerate(model, solver=solver).eval()
    with iterative():
        model(test)
        before = (tmp_path / "solve.pt").read_bytes()
        fantasy = model.get_fantasy_model(test[:3], torch.zeros(3, dtype=test.dtype))
        assert bool(torch.isfinite(fantasy(test).mean).all())
    assert (tmp_path / "solve.pt").read_bytes() == before


def test_auto_where_gpytorch_wants_no_preconditioner(caplog):
    model, test = model_of()
    sketchgp.accelerate(model)
    no_variances = gpytorch.settings.skip_posterior_variances()
    with iterative(), no_variances, gpytorch.settings.max_preconditioner_size(0), caplog.at_level("INFO", "sketchgp"):
        model.eval()(test)
    assert any("no preconditioner was asked for" in message for message in caplog.messages)


def test_restore_and_other_solvers_afterwards():
    model, test = model_of()
    strategy = gpytorch.models.exact_prediction_strategies.DefaultPredictionStrategy
    with iterative(), sketchgp.record_solves() as solves:
        sketchgp.accelerate(model, solver=SOLVERS["askotch"]).eval()(test)
        sketchgp.accelerate(model, solver=sketchgp.ConjugateGradients())(test)
        assert [report.solver for report in solves].count("ASkotch") == 1
    with dense():
        sketchgp.restore(model)(test)
    assert type(model.prediction_strategy) is strategy


def test_predict_uses_it():
    model, test = model_of()
    sketchgp.accelerate(model, solver=SOLVERS["askotch"])
    with iterative():
        prediction = sketchgp.predict(model, test)
    plain = model_of()[0].eval()
    with dense():
        wanted = plain(test)
    assert prediction.report is not None
    assert prediction.report.solver == "ASkotch"
    assert relative(prediction.mean, wanted.mean) < 1e-6
    assert relative(prediction.variance, wanted.variance) < 1e-3


def test_tolerance_of_the_settings():
    model, test = model_of()
    sketchgp.accelerate(model, solver=sketchgp.ASkotch(block_size=40))
    for tol, expected in ((0.01, 1e-3), (1e-5, 1e-5)):
        model.train().eval()
        with iterative(tol=tol), sketchgp.record_solves() as solves:
            model(test)
        assert solves[0].tol == expected
        assert solves[0].max_residual <= expected
        assert solves[0].converged


def test_interrupt_inside_a_model_raises(monkeypatch):
    """A half-done solution must not reach the model's caches."""
    model, test = model_of()
    sketchgp.accelerate(model, solver=SOLVERS["askotch"])
    model.eval()
    from sketchgp.solvers.full.refinement import Refinement

    def interrupted(self: Any) -> None:
        raise KeyboardInterrupt

    with iterative():
        with monkeypatch.context() as patched:
            patched.setattr(Refinement, "step", interrupted)
            with pytest.raises(KeyboardInterrupt):
                model(test)
        mean = model(test).mean
    with dense():
        wanted = model_of()[0].eval()(test).mean
    assert relative(mean, wanted) < 1e-6


@pytest.mark.parametrize(
    ("little", "enough"),
    [
        (sketchgp.ASkotch(block_size=40, max_passes=3.0), sketchgp.ASkotch(block_size=40, max_passes=5000.0)),
        (sketchgp.ConjugateGradients(max_iterations=3), sketchgp.ConjugateGradients()),
    ],
)
def test_checkpoint_of_a_model(tmp_path, little, enough):
    """Of its mean; the other solves, here of the variances, leave the file alone."""
    path, choices = tmp_path / "mean.pt", {"preconditioner": sketchgp.RPCholesky(rank=5)}
    model, test = model_of()
    with iterative(tol=1e-6):
        sketchgp.accelerate(model, solver=dataclasses.replace(little, checkpoint=path), **choices)
        with pytest.warns(sketchgp.ConvergenceWarning, match="ran out of"):
            model.eval()(test)
        sketchgp.accelerate(model, solver=dataclasses.replace(enough, checkpoint=path), **choices)
        with sketchgp.record_solves() as solves:
            mean = model(test).mean
        assert any("resumed" in note for note in solves[0].notes)
        alone = model_of()[0]
        sketchgp.accelerate(alone, solver=enough, **choices)
        assert torch.equal(alone.eval()(test).mean, mean)
        model.covar_module.base_kernel.lengthscale = 0.31
        model.train().eval()
        with pytest.raises(sketchgp.InputError, match=r"the kernel.* changed"):
            model(test)


@pytest.mark.parametrize("kind", [sketchgp.ASkotch, sketchgp.ConjugateGradients])
def test_checkpoint_refuses_a_batch(tmp_path, kind):
    model, test = SOLVED["batch"].build()
    sketchgp.accelerate(model, solver=kind(checkpoint=tmp_path / "x.pt"))
    with iterative(), pytest.raises(sketchgp.InputError, match="one by one"):
        model.eval()(*test)


def test_block_size_beyond_the_data_is_refused():
    model, _ = model_of()
    before = type(model)
    with pytest.raises(sketchgp.InputError, match="block_size=181"):
        sketchgp.accelerate(model, solver=sketchgp.ASkotch(block_size=181))
    assert type(model) is before


@pytest.mark.parametrize("solver", ["askotch", sketchgp.RPCholesky(), None, 3, sketchgp.ASkotch])
def test_unknown_solvers_are_refused(solver):
    model, _ = model_of()
    before = type(model)
    with pytest.raises(sketchgp.InputError, match="solver expects"):
        sketchgp.accelerate(model, solver=solver)
    assert type(model) is before


# --- the automatic choice ---------------------------------------------------------------------------------------


def test_automatic_is_conjugate_gradients_while_a_preconditioner_fits():
    model, test = model_of()
    sketchgp.accelerate(model)
    with iterative(), sketchgp.record_solves() as solves:
        model.eval()(test)
    assert solves[0].solver == "ConjugateGradients"
    assert any("solver='auto' chose ConjugateGradients" in note for note in solves[0].notes)


def test_automatic_is_askotch_where_none_fits(caplog):
    model, test = model_of()
    sketchgp.accelerate(model)
    with (
        iterative(),
        sketchgp.record_solves() as solves,
        sketchgp.settings.memory_budget(10_000),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", sketchgp.ConvergenceWarning)
        with caplog.at_level("INFO", logger="sketchgp"), gpytorch.settings.skip_posterior_variances():
            model.eval()(test)
    assert [report.solver for report in solves] == ["ASkotch"]
    assert any("solver='auto' chose ASkotch" in note for note in solves[0].notes)
    assert any("chose ASkotch" in message for message in caplog.messages)


@pytest.mark.parametrize(
    ("n", "preconditioner", "budget", "expected"),
    [
        (10_000, sketchgp.RPCholesky(), 2**30, sketchgp.ConjugateGradients),
        (1_000_000, sketchgp.RPCholesky(), 2**30, sketchgp.ASkotch),
        (1_000_000, sketchgp.RPCholesky(rank=50), 2**30, sketchgp.ConjugateGradients),
        (1_000_000, sketchgp.RPCholesky(rank=100), 2**30, sketchgp.ASkotch),
        (1_000_000, None, 2**30, sketchgp.ConjugateGradients),
        (1, sketchgp.RPCholesky(), 16, sketchgp.ConjugateGradients),
    ],
)
def test_automatic_rule(n, preconditioner, budget, expected):
    with sketchgp.settings.memory_budget(budget):
        chosen, why = automatic_solver(n, torch.device("cpu"), preconditioner)
    assert type(chosen) is expected
    assert expected.__name__ in why


# --- ExactGP ----------------------------------------------------------------------------------------------------


class Own(sketchgp.ExactGP):
    def __init__(self, x: Any, y: Any, likelihood: Any, **choices: Any) -> None:
        super().__init__(x, y, likelihood, **choices)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = ScaleKernel(MaternKernel(nu=1.5))

    def forward(self, x: torch.Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def test_exact_gp_is_an_accelerated_model():
    x, y, test = data()
    model = Own(x, y, gpytorch.likelihoods.GaussianLikelihood(), solver=SOLVERS["askotch"], matmul="tiled").double()
    assert isinstance(model, Own)
    assert isinstance(model, gpytorch.models.ExactGP)
    plain = Plain(x, y, gpytorch.likelihoods.GaussianLikelihood(), ScaleKernel(MaternKernel(nu=1.5))).double()
    assert set(model.state_dict()) == set(plain.state_dict())
    with dense():
        wanted = plain.eval()(test).mean
    with iterative(), sketchgp.record_solves() as solves:
        assert relative(model.eval()(test).mean, wanted) < 1e-6
        other = pickle.loads(pickle.dumps(model))
        assert torch.equal(other(test).mean, model(test).mean)
        other.load_state_dict(model.state_dict())
    assert solves[0].solver == "ASkotch"
    history = sketchgp.fit(model, iterations=2)
    assert len(history.losses) == 2
    sketchgp.restore(model)
    assert type(model) is Own


def test_exact_gp_refuses_bad_choices():
    x, y, _ = data()
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    before = type(likelihood)
    for choices in (
        {"solver": "fast"},
        {"preconditioner": 3},
        {"matmul": "quick"},
        {"solver": sketchgp.Skotch(block_size=999)},
    ):
        with pytest.raises(sketchgp.InputError, match=r"expects|exceeds"):
            Own(x, y, likelihood, **choices)
    assert type(likelihood) is before


@pytest.mark.cuda
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_on_cuda(solver, dtype, tmp_path):
    """The mean on a device, interrupted and resumed, against the dense one on the CPU."""
    model, test = model_of(dtype=dtype)
    plain = copy.deepcopy(model).double()
    plain.set_train_data(plain.train_inputs[0].double(), plain.train_targets.double(), strict=False)
    with dense():
        wanted = plain.eval()(test.double()).mean
    tol = 1e-8 if dtype == torch.float64 else 1e-4
    path = tmp_path / "mean.pt"
    model, test = model.cuda(), test.cuda()
    model.set_train_data(model.train_inputs[0].cuda(), model.train_targets.cuda(), strict=False)
    with iterative(tol=tol):
        for passes in (4.0, 20_000.0):
            choice = dataclasses.replace(SOLVERS[solver], tol=tol, max_passes=passes, checkpoint=path)
            sketchgp.accelerate(model, solver=choice)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", sketchgp.ConvergenceWarning)
                mean = model.eval()(test).mean
    assert mean.device.type == "cuda"
    assert relative(mean.cpu(), wanted) < 100 * tol
