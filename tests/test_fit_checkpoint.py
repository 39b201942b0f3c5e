"""``fit(checkpoint=...)``: a fit that was killed goes on and ends at the same bits; of another fit it is refused."""

from __future__ import annotations

import copy
import functools
import warnings
from pathlib import Path
from typing import Any

import gpytorch
import pytest
import torch
from gpytorch import kernels

import sketchgp
from gp_models import SOLVED, TORCH_WARNINGS, Plain, data, iterative, nearly_constant, small_subsets
from sketchgp.fitting.objective import Objective
from sketchgp.fitting.record import Record

pytestmark = TORCH_WARNINGS


def parameters(model: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def build(name: str = "scale-rbf-ard", **choices: Any) -> Any:
    return sketchgp.accelerate(SOLVED[name].build()[0], **{"preconditioner": sketchgp.RPCholesky(rank=15), **choices})


class Killed(Exception):
    """As if the process had ended."""


def killed_at(evaluation: int, model: Any, **options: Any) -> None:
    """A fit that ends in an evaluation (counted from 1) and comes to nothing more, not even to its last words."""
    with pytest.MonkeyPatch.context() as patch:
        _kill(evaluation, patch)
        save = Record.save
        patch.setattr(Record, "save", lambda self, rarely=False: save(self, rarely) if rarely else None)
        with pytest.raises(Killed):
            sketchgp.fit(model, **options)


def _kill(evaluation: int, patch: pytest.MonkeyPatch) -> None:
    plain, seen = Objective._computed, [0]

    def computed(self: Any, gradient: bool = True) -> Any:
        seen[0] += gradient
        if gradient and seen[0] == evaluation:
            raise Killed
        return plain(self, gradient)

    patch.setattr(Objective, "_computed", computed)


def counted(patch: pytest.MonkeyPatch) -> list[int]:
    plain, seen = Objective._computed, [0]

    def computed(self: Any, gradient: bool = True) -> Any:
        seen[0] += gradient
        return plain(self, gradient)

    patch.setattr(Objective, "_computed", computed)
    return seen


OPTIONS: dict[str, Any] = {"iterations": 6, "tol": 0, "num_probes": 5}
CASES: dict[str, dict[str, Any]] = {
    "lbfgs": {"objective": "probes"},
    "adam": {"optimizer": "adam", "learning_rate": 0.5, "objective": "probes"},
    "subsets": {"start": "subset", "objective": "probes", "tol": 1e-3},
    "exact": {},
}


@functools.cache
def whole_fit(case: str) -> tuple[Any, sketchgp.FitHistory]:
    """The model and the history of a fit that nothing ends."""
    model = build()
    return model, sketchgp.fit(model, **OPTIONS | CASES[case])


@pytest.mark.parametrize(("case", "where"), [("lbfgs", 4), ("lbfgs", 1), ("adam", 4), ("subsets", 9), ("exact", 4)])
def test_a_killed_fit_ends_at_the_same_bits(
    case: str, where: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case == "subsets":
        small_subsets(monkeypatch)
    options = OPTIONS | CASES[case]
    settings = iterative(tol=1e-3) if case != "exact" else gpytorch.settings.max_cholesky_size(800)
    with settings:
        whole, expected = whole_fit(case)
        path = tmp_path / "fit.pt"
        killed_at(where, build(), **options, checkpoint=path, every=1e-6)
        model = build()
        with pytest.MonkeyPatch.context() as patch:
            seen = counted(patch)
            history = sketchgp.fit(model, **options, checkpoint=path)
    computed, before = expected.evaluations, expected.subset
    while before is not None:
        computed, before = computed + before.evaluations, before.subset
    assert seen[0] <= computed - (where - 1) + (0 if case == "exact" else 2)
    assert torch.equal(parameters(model), parameters(whole))
    names = "losses", "gradients", "standard_errors", "residuals", "iterations", "products", "reason"
    for name in (*names, "restarts", "notes", "bracket", "by_other_probes"):
        assert getattr(history, name) == getattr(expected, name), name
    assert history.evaluations == expected.evaluations
    assert history.seconds == sorted(history.seconds)
    assert history.seconds[0] > 0


def test_float32_that_has_lost_the_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes after the kill is in float64 at once, as in the fit that was not killed."""
    options: dict[str, Any] = {"iterations": 4, "tol": 0, "num_probes": 5, "objective": "probes"}
    with iterative(tol=1e-3), warnings.catch_warnings():
        warnings.simplefilter("ignore", sketchgp.ConvergenceWarning)
        whole, model = (nearly_constant(torch.float32, 60, preconditioner=None, matmul="tiled") for _ in range(2))
        expected = sketchgp.fit(whole, **options)
        killed_at(4, copy.deepcopy(model), **options, checkpoint=tmp_path / "fit.pt", every=1e-6)
        history = sketchgp.fit(model, **options, checkpoint=tmp_path / "fit.pt")
    assert any("float64 products" in note for note in expected.notes)
    for name in ("losses", "iterations", "notes"):
        assert getattr(history, name) == getattr(expected, name), name
    assert torch.equal(parameters(model), parameters(whole))


def test_pivots_that_were_chosen_anew_on_the_way(tmp_path: Path) -> None:
    """Adam's steps change them where they no longer serve; the kernel has become another one here."""
    options: dict[str, Any] = {
        "optimizer": "adam", "objective": "probes", "learning_rate": 1.0, "iterations": 8, "tol": 0,
    }  # fmt: skip

    def starting() -> Any:
        model = build()
        model.covar_module.base_kernel.lengthscale = 5.0
        return model

    with iterative(tol=1e-3):
        whole = starting()
        sketchgp.fit(whole, **options)
        assert whole._sketchgp.cache.selections > 1, "the data must make the test meaningful"
        path = tmp_path / "fit.pt"
        killed_at(8, starting(), **options, checkpoint=path, every=1e-6)
        model = starting()
        sketchgp.fit(model, **options, checkpoint=path)
    assert torch.equal(parameters(model), parameters(whole))


def test_ctrl_c_and_on_with_the_same_model(tmp_path: Path) -> None:
    """The model has the best parameters then; the fit goes on from those it began with."""
    whole, model = build(), build()

    def stop(step: int, loss: float) -> None:
        if step == 3:
            raise KeyboardInterrupt

    with iterative(tol=1e-3):
        expected = sketchgp.fit(whole, iterations=8)
        with pytest.warns(UserWarning, match="interrupted"):
            sketchgp.fit(model, iterations=8, callback=stop, checkpoint=tmp_path / "fit.pt")
        history = sketchgp.fit(model, iterations=8, checkpoint=tmp_path / "fit.pt")
    assert history.losses == expected.losses
    assert torch.equal(parameters(model), parameters(whole))


def test_more_steps_than_before(tmp_path: Path) -> None:
    whole, model = build(), build()
    with iterative(tol=1e-3):
        sketchgp.fit(whole, iterations=7, tol=0)
        sketchgp.fit(model, iterations=3, tol=0, checkpoint=tmp_path / "fit.pt")
        sketchgp.fit(model, iterations=7, tol=0, checkpoint=tmp_path / "fit.pt")
    assert torch.equal(parameters(model), parameters(whole))


@pytest.mark.parametrize("optimizer", ["lbfgs", "adam"])
def test_a_fit_that_had_ended_says_the_same_again(optimizer: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"objective": "probes", "optimizer": optimizer, "iterations": 6, "tol": 0}
    with iterative(tol=1e-3):
        first = sketchgp.fit(build(), **options, checkpoint=tmp_path / "fit.pt")
        again = sketchgp.fit(build(), **options, checkpoint=tmp_path / "fit.pt")
    assert again.losses == first.losses
    assert again.bracket == first.bracket


def test_running_means_are_kept(tmp_path: Path) -> None:
    class Deep(Plain):
        def __init__(self, *parts: Any) -> None:
            super().__init__(*parts)
            self.net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))

        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(self.net(x))

    def deep() -> Any:
        torch.manual_seed(0)
        x, y, _ = data(60)
        return sketchgp.accelerate(Deep(x, y, gpytorch.likelihoods.GaussianLikelihood(), kernels.RBFKernel()).double())

    whole, path = deep(), tmp_path / "fit.pt"
    sketchgp.fit(whole, optimizer="adam", iterations=6, tol=0)
    killed_at(4, deep(), optimizer="adam", iterations=6, tol=0, checkpoint=path, every=1e-6)
    model = deep()
    sketchgp.fit(model, optimizer="adam", iterations=6, tol=0, checkpoint=path)
    assert torch.equal(model.net[1].running_mean, whole.net[1].running_mean)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ("data", "the training inputs"),
        ("targets", "the targets"),
        ("kernel", "the model"),
        ("fixed", "the model"),
        ("seed", "the choices of the fit"),
        ("preconditioner", "the choices of the fit"),
        ("noise", "the noise"),
    ],
)
def test_of_another_fit_it_is_refused(changed: str, named: str, tmp_path: Path) -> None:
    name, path = "fixed-noise" if changed == "noise" else "scale-rbf-ard", tmp_path / "fit.pt"
    seed = 0
    with iterative(tol=1e-3):
        sketchgp.fit(build(name), iterations=2, checkpoint=path)
        model = build(name)
        if changed == "data":
            model.set_train_data(model.train_inputs[0] + 1e-9)
        elif changed == "targets":
            model.set_train_data(targets=model.train_targets * 2)
        elif changed == "kernel":
            model.covar_module.base_kernel = kernels.MaternKernel(nu=1.5, ard_num_dims=2).double()
        elif changed == "fixed":
            model.covar_module.raw_outputscale.requires_grad_(False)
        elif changed == "preconditioner":
            sketchgp.accelerate(model, preconditioner=sketchgp.RPCholesky(rank=16))
        elif changed == "noise":
            model.likelihood.noise_covar.noise = model.likelihood.noise_covar.noise * 2
        else:
            seed = 1
        before, written = parameters(model), path.read_bytes()
        with pytest.raises(sketchgp.InputError, match=f"of another problem: .*{named}"):
            sketchgp.fit(model, iterations=2, seed=seed, checkpoint=path)
    assert torch.equal(parameters(model), before)
    assert path.read_bytes() == written


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "fit.pt"
    path.write_bytes(b"something else")
    with iterative(), pytest.raises(sketchgp.InputError, match="no checkpoint"):
        sketchgp.fit(build(), iterations=2, checkpoint=path)
    assert path.read_bytes() == b"something else"


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    model = build()
    before = parameters(model)
    with iterative(tol=1e-3), pytest.raises(sketchgp.InputError, match="cannot be written"):
        sketchgp.fit(model, iterations=2, checkpoint=tmp_path / "missing" / "fit.pt")
    assert torch.equal(parameters(model), before)
    assert model.training
