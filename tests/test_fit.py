"""``fit``: paths with exact marginal likelihoods, followed closely; ends well however it ends."""

from __future__ import annotations

import math
import warnings
from typing import Any

import gpytorch
import pytest
import torch

import sketchgp
from gp_models import SOLVED, TORCH_WARNINGS, N, dense, iterative, posterior, relative, small_subsets
from sketchgp.fitting import run as fit_run

pytestmark = TORCH_WARNINGS

NEVER = -math.inf  # a tolerance at which no loss has settled


def build(name: str = "scale-rbf-ard", dtype: torch.dtype = torch.float64, **choices: Any) -> tuple[Any, Any]:
    """An accelerated model and its test inputs."""
    model, test = SOLVED[name].build(dtype)
    return sketchgp.accelerate(model, **choices), test


def dense_adam(name: str, iterations: int, learning_rate: float) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of Adam on the exact marginal likelihood, and the parameters after each step."""
    model, _ = SOLVED[name].build()
    model.train()
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    losses, steps = [], []
    with dense():
        for _ in range(iterations):
            optimizer.zero_grad()
            steps.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
            loss = -mll(model(*model.train_inputs), model.train_targets).sum()
            loss.backward()
            losses.append(float(loss.detach()))
            optimizer.step()
    return losses, steps


def parameters(model: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("name", ["scale-rbf-ard", "additive-kernel", "batch", "lcm"])
def test_follows_dense_adam(name: str) -> None:
    losses, steps = dense_adam(name, 5, 0.1)
    model, _ = build(name)
    with iterative(tol=1e-6):
        history = sketchgp.fit(model, iterations=5, learning_rate=0.1, objective="probes", num_probes=40, tol=NEVER)
    assert len(history.losses) == 5
    assert history.reason == "ran all iterations before the loss had settled"
    assert max(abs(a - b) for a, b in zip(history.losses, losses, strict=True)) < 1e-2
    expected = steps[history.best_step]
    assert float((parameters(model) - expected).abs().max()) < 0.1 * float((expected - steps[0]).abs().max())


def test_float32_with_the_default_tolerance() -> None:
    losses, _ = dense_adam("scale-rbf-ard", 12, 0.1)
    model, _ = build(dtype=torch.float32)
    with gpytorch.settings.max_cholesky_size(20):
        history = sketchgp.fit(model, optimizer="adam", iterations=12, tol=NEVER)
    assert max(abs(a - b) for a, b in zip(history.losses, losses, strict=True)) < 2e-2


@pytest.mark.parametrize("optimizer", ["lbfgs", "adam"])
def test_the_loss_is_the_same_function_at_every_step(optimizer: str) -> None:
    """With the probes fixed, two runs agree to the bit and a step back gives the loss back."""
    runs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed + len(runs))  # the global generator plays no part
        model, _ = build(preconditioner=sketchgp.RPCholesky(rank=15))
        with iterative(tol=1e-6):
            runs.append(
                sketchgp.fit(
                    model, optimizer=optimizer, iterations=2, objective="probes", num_probes=5, seed=seed
                ).losses
            )
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_best_parameters_are_kept() -> None:
    """Steps far too long: the last step is not the best one."""
    model, test = build()
    seen: list[torch.Tensor] = []

    def remember(step: int, loss: float) -> None:
        assert step == len(seen)
        seen.append(parameters(model))

    with iterative(tol=1e-6):
        history = sketchgp.fit(model, iterations=9, learning_rate=1.5, callback=remember, tol=NEVER, objective="probes")
    assert history.best_step == min(range(9), key=history.losses.__getitem__)
    assert history.best_loss == min(history.losses)
    assert 0 < history.best_step < 8, "the data must make the test meaningful"
    assert torch.equal(parameters(model), seen[history.best_step])
    plain, _ = SOLVED["scale-rbf-ard"].build()
    plain.load_state_dict(model.state_dict())
    with dense():
        expected = posterior(plain, test)[0]
    with iterative():
        assert relative(posterior(model, test)[0], expected) < 1e-6


@pytest.mark.parametrize("optimizer", ["lbfgs", "adam"])
def test_leaves_the_model_ready_to_predict(optimizer: str) -> None:
    model, _ = build()
    trainer = model._sketchgp
    with iterative(tol=1e-4):
        history = sketchgp.fit(model, optimizer=optimizer, iterations=3)
    assert not model.training
    assert not model.likelihood.training
    assert model.prediction_strategy is None
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    assert trainer is model._sketchgp
    assert trainer.probe_seed == 0
    assert len(history.seconds) == len(history.losses) == 3
    assert all(0 < a <= b for a, b in zip(history.seconds, history.seconds[1:], strict=False))


def test_one_build_a_step() -> None:
    (model, test), seen = build(), []
    with iterative(tol=1e-4):
        options = {"optimizer": "adam", "objective": "probes", "iterations": 5, "tol": NEVER}
        sketchgp.fit(model, **options, callback=lambda *_: seen.append(model._sketchgp.cache.builds))
        assert seen == [1, 2, 3, 4, 5]
        posterior(model, test)
    assert model._sketchgp.cache.builds <= 2  # anew for the probes at the end, and for the prediction


@pytest.mark.parametrize("optimizer", ["lbfgs", "adam"])
def test_parameters_without_gradient_stay(optimizer: str) -> None:
    model, _ = build()
    fixed = model.covar_module.raw_outputscale.requires_grad_(False)
    before, moving = fixed.clone(), model.likelihood.noise_covar.raw_noise.detach().clone()
    with iterative(tol=1e-4):
        sketchgp.fit(model, optimizer=optimizer, iterations=3)
    assert torch.equal(fixed, before)
    assert not torch.equal(model.likelihood.noise_covar.raw_noise, moving)


def test_a_marginal_likelihood_of_ones_own() -> None:
    """Priors enter through the given mll."""
    losses = []
    for own in (False, True):
        model, _ = build()
        mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model) if own else None
        with iterative(tol=1e-6):
            losses.append(sketchgp.fit(model, mll, iterations=3).losses)
    assert losses[0] == losses[1]
    model, _ = build()
    model.covar_module.register_prior("outputscale_prior", gpytorch.priors.GammaPrior(2.0, 0.15), "outputscale")
    with iterative(tol=1e-6):
        assert sketchgp.fit(model, iterations=3).losses != losses[0]


@pytest.mark.parametrize("optimizer", ["lbfgs", "adam"])
def test_missing_targets(optimizer: str) -> None:
    model, test = build()
    targets = model.train_targets.clone()
    targets[::7] = torch.nan
    model.set_train_data(targets=targets)
    with iterative(tol=1e-6), gpytorch.settings.observation_nan_policy("mask"):
        history = sketchgp.fit(model, optimizer=optimizer, iterations=6, tol=NEVER)
        assert history.losses[-1] < history.losses[0]
        assert torch.isfinite(posterior(model, test)[0]).all()


# --- ways to end ------------------------------------------------------------------------------------------------


def test_stops_when_the_loss_has_settled() -> None:
    model, _ = build()
    with iterative(tol=1e-4):
        history = sketchgp.fit(model, iterations=60, learning_rate=0.3, tol=5e-3)
    assert history.reason == "the loss has settled"
    assert 10 <= len(history.losses) < 60


@pytest.mark.parametrize("optimizer", ["lbfgs", "adam"])
def test_a_callback_can_stop_it(optimizer: str) -> None:
    model, _ = build()
    calls: list[tuple[int, float]] = []

    def stop(step: int, loss: float) -> bool:
        calls.append((step, loss))
        return step == 2

    with iterative(tol=1e-4):
        history = sketchgp.fit(model, optimizer=optimizer, iterations=9, callback=stop)
    assert history.reason == "stopped by the callback"
    assert calls == list(enumerate(history.losses))
    assert len(calls) == 3


def test_ctrl_c_keeps_the_best() -> None:
    model, _ = build()
    seen: list[torch.Tensor] = []

    def interrupt(step: int, loss: float) -> None:
        seen.append(parameters(model))
        if step == 5:
            raise KeyboardInterrupt

    with iterative(tol=1e-6), pytest.warns(UserWarning, match="interrupted after 6 steps"):
        history = sketchgp.fit(model, iterations=9, learning_rate=1.5, callback=interrupt, tol=NEVER)
    assert history.reason == "interrupted"
    assert len(history.losses) == 6
    assert history.best_step == min(range(6), key=history.losses.__getitem__)
    assert torch.equal(parameters(model), seen[history.best_step])
    assert not model.training
    assert model._sketchgp.probe_seed == 0


@pytest.mark.parametrize("optimizer", ["lbfgs", "adam"])
def test_ctrl_c_inside_a_solve_keeps_the_best(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """During the fourth step, in the middle of a product."""
    from sketchgp.solvers import System

    model, _ = build()
    best = {}

    def remember(step: int, loss: float) -> None:
        best[step] = parameters(model)
        if step == 2:

            def interrupted(*args: Any) -> None:
                raise KeyboardInterrupt

            monkeypatch.setattr(System, "product", interrupted)

    with iterative(tol=1e-6), pytest.warns(UserWarning, match="interrupted after 3 steps"):
        history = sketchgp.fit(model, optimizer=optimizer, iterations=9, callback=remember)
    assert torch.equal(parameters(model), best[history.best_step])


@pytest.mark.parametrize("optimizer", ["lbfgs", "adam"])
def test_ctrl_c_before_the_first_loss_is_passed_on(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from sketchgp.solvers import System

    model, _ = build()
    before = parameters(model)

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(System, "product", interrupted)
    with iterative(tol=1e-6), pytest.raises(KeyboardInterrupt):
        sketchgp.fit(model, optimizer=optimizer, iterations=9)
    assert torch.equal(parameters(model), before)
    assert model.training  # as it was


def test_ctrl_c_between_a_subset_and_all_rows_keeps_the_subsets(monkeypatch: pytest.MonkeyPatch) -> None:
    from sketchgp.solvers import System

    model, _ = build()
    before = parameters(model)

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    small_subsets(monkeypatch)
    monkeypatch.setattr(System, "product", interrupted)
    with iterative(tol=1e-6), pytest.warns(UserWarning, match="interrupted before its last stage"):
        history = sketchgp.fit(model, start="subset", objective="probes")
    assert history.reason == "interrupted" and not history.losses and "no step" in str(history)
    assert history.subset is not None and history.subset.subset is not None  # the first is of 20 rows, by products
    assert not history.subset.losses and history.subset.subset.losses
    assert not torch.equal(parameters(model), before) and not model.training


@pytest.mark.parametrize("optimizer", ["lbfgs", "adam"])
def test_an_error_in_the_callback_keeps_the_best_and_is_passed_on(optimizer: str) -> None:
    model, _ = build()
    seen = []

    def fail(step: int, loss: float) -> None:
        seen.append(parameters(model))
        if step == 3:
            raise ZeroDivisionError

    with iterative(tol=1e-4), pytest.raises(ZeroDivisionError):
        sketchgp.fit(model, optimizer=optimizer, iterations=9, callback=fail)
    assert any(torch.equal(parameters(model), kept) for kept in seen)
    assert model._sketchgp.probe_seed == 0


@pytest.mark.parametrize(
    "solved_by",
    [
        pytest.param(iterative, id="sketchgp"),
        pytest.param(dense, id="gpytorch"),
    ],
)
def test_a_loss_that_is_not_finite_ends_it_with_the_best_kept(solved_by: Any) -> None:
    """Later than the first step; here a callback spoils a parameter, as a long step may."""
    model, _ = build()
    seen = []

    def spoil(step: int, loss: float) -> None:
        seen.append(parameters(model))
        if step == 3:
            model.covar_module.base_kernel.raw_lengthscale.data.fill_(torch.nan)

    with solved_by():
        history = sketchgp.fit(model, optimizer="adam", iterations=9, callback=spoil)
    assert "not finite" in history.reason
    assert len(history.losses) == 4
    assert all(map(math.isfinite, history.losses))
    assert torch.equal(parameters(model), seen[history.best_step])


@pytest.mark.parametrize("mode", [False, True])
def test_a_refused_fit_leaves_the_model_as_it_was(mode: bool) -> None:
    model, _ = build()
    targets = model.train_targets.clone()
    targets[0] = torch.inf
    model.set_train_data(targets=targets)
    model.train(mode).likelihood.train(not mode)
    gradients = []
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
        gradients.append(parameter.grad)
    before, modes = parameters(model), [part.training for part in model.modules()]

    def broken(*args: Any) -> None:
        raise RuntimeError("no likelihood")

    refusals: list[tuple[Any, type[Exception]]] = [(None, sketchgp.NumericalError), (broken, RuntimeError)]
    for mll, error in refusals:
        with iterative(tol=1e-4), pytest.raises(error):
            sketchgp.fit(model, mll=mll, iterations=3)
        assert torch.equal(parameters(model), before)
        assert [part.training for part in model.modules()] == modes
        assert all(p.grad is g and bool((g == 1).all()) for p, g in zip(model.parameters(), gradients, strict=True))
        assert (model._sketchgp.probe_seed, model._sketchgp.probe_count) == (0, None)


def test_solves_that_do_not_converge_warn() -> None:
    model, _ = build(preconditioner=None, solver=sketchgp.ConjugateGradients(max_iterations=2))
    with (
        gpytorch.settings.max_cholesky_size(20),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        sketchgp.fit(model, iterations=3)
    assert any(issubclass(w.category, sketchgp.ConvergenceWarning) for w in caught)


def test_warning_filters_are_the_users() -> None:
    model, _ = build(preconditioner=None, solver=sketchgp.ConjugateGradients(max_iterations=2))
    with gpytorch.settings.max_cholesky_size(20), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", sketchgp.ConvergenceWarning)
        with pytest.raises(sketchgp.ConvergenceWarning):
            sketchgp.fit(model, iterations=3)


@pytest.mark.parametrize("optimizer", ["lbfgs", "adam"])
def test_the_progress_bar_shows_the_loss_of_the_step(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []

    class Bar(fit_run.tqdm):  # type: ignore[misc,name-defined]
        def update(self, n: float = 1) -> None:
            shown.append(self.postfix)
            super().update(n)

    monkeypatch.setattr(fit_run, "tqdm", Bar)
    model, _ = build()
    with iterative(tol=1e-4):
        history = sketchgp.fit(model, optimizer=optimizer, objective="probes", iterations=4, progress=True)
    columns = (history.losses, history.standard_errors, history.gradients, history.residuals, history.iterations)
    assert shown == [
        f"loss {loss:.4f} +- {error:.4f}, gradient {gradient:.1e}, residual {residual:.1e}, {count} iterations"
        for loss, error, gradient, residual, count in zip(*columns, strict=True)
    ]


def test_probes_are_no_numbers_of_the_users() -> None:
    """Inputs that a user drew by seed 0 are not the probe vectors of seed 0."""
    model, _ = SOLVED["scale-rbf-ard"].build()
    x = torch.randn(N, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model.set_train_data(x, strict=False)
    model.covar_module.base_kernel.raw_lengthscale.data = torch.full((1, 1), 2.0, dtype=torch.float64)
    model.covar_module.base_kernel.ard_num_dims = None
    sketchgp.accelerate(model, preconditioner=None)
    seen = []
    plain = sketchgp.ConjugateGradients.tridiagonalize

    def watch(self: Any, system: Any, rhs: torch.Tensor, *args: Any, **options: Any) -> Any:
        seen.append(rhs)
        return plain(self, system, rhs, *args, **options)

    with iterative(tol=1e-4), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sketchgp.ConjugateGradients, "tridiagonalize", watch)
        sketchgp.fit(model, iterations=1, objective="probes", num_probes=10)
    unit = x / x.norm(dim=0)
    overlap = unit.mT @ (seen[0] / seen[0].norm(dim=0))
    assert float(overlap.abs().max()) < 0.5


# --- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"iterations": 0},
        {"iterations": -3},
        {"iterations": 2.5},
        {"num_probes": 0},
        {"num_probes": 1.0},
        {"learning_rate": 0},
        {"learning_rate": -0.1},
        {"learning_rate": math.nan},
        {"learning_rate": "fast"},
        {"learning_rate": 0.1, "optimizer": "lbfgs"},
        {"optimizer": "sgd"},
        {"start": "here"},
        {"start": None},
        {"objective": "best"},
        {"objective": None},
        {"seed": "one"},
        {"tol": "small"},
        {"callback": 3},
        {"mll": "exact"},
    ],
    ids=str,
)
def test_wrong_arguments_are_refused_and_change_nothing(wrong: dict[str, Any]) -> None:
    model, test = build()
    with iterative():
        posterior(model, test)
    before, strategy = parameters(model), model.prediction_strategy
    with iterative(), pytest.raises(sketchgp.InputError, match=f"fit: {next(iter(wrong))}"):
        sketchgp.fit(model, **{"iterations": 2, **wrong})
    assert torch.equal(parameters(model), before)
    assert model.prediction_strategy is strategy
    assert not model.training


def test_a_plain_model_is_refused() -> None:
    model, _ = SOLVED["scale-rbf-ard"].build()
    with pytest.raises(sketchgp.InputError, match="accelerate"):
        sketchgp.fit(model)
    assert model.training


def test_a_model_without_data_or_parameters_is_refused() -> None:
    model, _ = build()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(sketchgp.InputError, match="parameter"):
        sketchgp.fit(model)
    model, _ = build()
    model.train_inputs = model.train_targets = None
    with pytest.raises(sketchgp.InputError, match="data"):
        sketchgp.fit(model)
