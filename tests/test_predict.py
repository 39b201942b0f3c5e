"""``predict``: the numbers of ``model(x)``, by chunks, and what its low-rank variances promise."""

from __future__ import annotations

import math
import warnings
from typing import Any

import gpytorch
import numpy as np
import pandas
import pytest
import torch
from gpytorch import kernels

import sketchgp
from gp_models import LEFT_ALONE, SOLVED, TORCH_WARNINGS, Plain, data, dense, iterative, relative
from sketchgp.models.accelerated import approximate

pytestmark = TORCH_WARNINGS
PLAIN = ["scale-rbf-ard", "bare-matern", "fixed-noise", "additive-kernel", "deep", "periodic", "active-dims"]
STRUCTURED = ["ski", "additive-forward", "product-forward"]


def build(name: str = "scale-rbf-ard", dtype: torch.dtype = torch.float64, **choices: Any) -> tuple[Any, torch.Tensor]:
    """An accelerated model and 40 test inputs."""
    model, test = SOLVED[name].build(dtype)
    return sketchgp.accelerate(model, **choices), data(d=test[0].shape[-1], m=40, dtype=dtype)[2]


def reference(name: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and latent variance by Cholesky in float64."""
    model, _ = SOLVED[name].build()
    model.eval()
    with dense(), torch.no_grad():
        found = model(x.double())
        return found.mean, found.variance


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_deviations_and_regions_are_those_of_gpytorch(dtype: torch.dtype) -> None:
    model, x = build(dtype=dtype)
    found, without = sketchgp.predict(model, x), sketchgp.predict(model, x, variance=None)
    with torch.no_grad():
        expected = model(x)
    torch.testing.assert_close(found.stddev, expected.stddev, rtol=1e-4, atol=1e-6)
    for end, other in zip(found.confidence_region(), expected.confidence_region(), strict=True):
        torch.testing.assert_close(end, other, rtol=1e-4, atol=1e-5)
    for ask in (lambda: without.stddev, without.confidence_region):
        with pytest.raises(sketchgp.InputError, match="stddev expects variances, got variance=None"):
            ask()


@pytest.mark.parametrize(
    ("name", "variance"),
    [(n, ["exact", "auto", None][i % 3]) for i, n in enumerate(n for n in PLAIN + STRUCTURED if n != "fixed-noise")],
)
def test_gives_the_posterior(name: str, variance: str | None) -> None:
    model, x = build(name)
    mean, latent = reference(name, x)
    with iterative():
        found = sketchgp.predict(model, x, variance=variance)
    assert not model.training
    assert relative(found.mean, mean) < 1e-6
    assert found.variance_check is None
    if variance is None:
        assert found.variance is None
        assert found.observation_variance is None
        assert found.variance_method == "none"
        return
    assert found.variance_method == "exact"
    assert relative(found.variance, latent) < 1e-5
    noise = model.likelihood.noise.detach()
    assert torch.allclose(found.observation_variance, found.variance + noise)


@pytest.mark.parametrize("name", [n for n in PLAIN if n != "fixed-noise"])
def test_low_rank_variances(name: str) -> None:
    model, x = build(name)
    mean, latent = reference(name, x)
    with iterative():
        found = sketchgp.predict(model, x, variance="low_rank")
    assert found.variance_method == "low_rank"
    assert relative(found.mean, mean) < 1e-6
    ratio, error = found.variance / latent, found.variance_standard_error
    assert error.shape == latent.shape and 0 < float(error.min()) <= float(error.median()) < 0.3
    assert float((ratio.log() / (0.01 + 2 * error)).square().mean()) < 1
    check = found.variance_check
    assert check["points"] == 4
    assert float(ratio.min()) - 1e-4 <= check["median_ratio"] <= check["max_ratio"] <= float(ratio.max()) + 1e-4
    assert torch.allclose(found.observation_variance, found.variance + model.likelihood.noise.detach())
    assert found.report.columns == 1


@pytest.mark.parametrize("choice", [None, sketchgp.Nystrom(rank=60), sketchgp.NystromEigenPro(rank=20)], ids=str)
def test_low_rank_variances_of_every_preconditioner(choice: Any) -> None:
    """They are made of pivots of their own."""
    model, x = build(preconditioner=choice)
    _, latent = reference("scale-rbf-ard", x)
    with iterative():
        found = sketchgp.predict(model, x, variance="low_rank")
    ratio = found.variance / latent
    assert float(ratio.min()) > 0.95
    assert float(ratio.max()) < 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("matmul", ["dense", "tiled", "gpytorch"])
def test_every_matmul(matmul: str, dtype: torch.dtype) -> None:
    model, x = build(dtype=dtype, matmul=matmul)
    mean, latent = reference("scale-rbf-ard", x)
    with iterative(tol=1e-4 if dtype == torch.float32 else 1e-8):
        exact = sketchgp.predict(model, x, variance="exact")
        model.train()
        low_rank = sketchgp.predict(model, x, variance="low_rank")
    assert exact.mean.dtype == exact.variance.dtype == low_rank.variance.dtype == dtype
    tolerance = 1e-3 if dtype == torch.float32 else 1e-6
    assert relative(exact.mean, mean) < tolerance
    assert relative(low_rank.mean, mean) < tolerance
    assert relative(exact.variance, latent) < 10 * tolerance
    assert relative(low_rank.variance, latent) < 0.3


@pytest.mark.parametrize(("variance", "batch_size"), [("exact", 39), ("low_rank", 7), (None, 1), ("exact", 1000)])
def test_chunks_equal_the_whole(variance: str | None, batch_size: int) -> None:
    model, x = build()
    with iterative():
        whole = sketchgp.predict(model, x, variance=variance)
        model.train()
        parts = sketchgp.predict(model, x, variance=variance, batch_size=batch_size)
    assert parts.mean.shape == (40,)
    assert relative(parts.mean, whole.mean) < 1e-6
    if variance is not None:
        assert relative(parts.variance, whole.variance) < 1e-5


def test_chunks_of_a_structured_kernel_equal_the_whole() -> None:
    model, x = build("ski")
    mean, latent = reference("ski", x)
    with iterative():
        parts = sketchgp.predict(model, x, batch_size=9)
    assert relative(parts.mean, mean) < 1e-6
    assert relative(parts.variance, latent) < 1e-5


def test_one_test_point() -> None:
    model, x = build()
    mean, latent = reference("scale-rbf-ard", x[:1])
    with iterative():
        for variance in ("exact", "low_rank"):
            found = sketchgp.predict(model, x[:1], variance=variance)
            assert found.mean.shape == found.variance.shape == (1,)
            assert relative(found.mean, mean) < 1e-6
            assert relative(found.variance, latent) < (1e-5 if variance == "exact" else 0.3)


def test_the_report_is_of_the_solve_behind_the_mean() -> None:
    model, x = build()
    with iterative():
        first = sketchgp.predict(model, x, variance=None)
        again = sketchgp.predict(model, x, variance=None)
    assert isinstance(first.report, sketchgp.SolveReport)
    assert first.report.columns == 1
    assert first.report.converged
    assert again.report is first.report, "nothing was solved again"
    assert torch.equal(first.mean, again.mean)


def test_a_mean_that_did_not_converge_says_so_every_time() -> None:
    model, x = build(preconditioner=None, solver=sketchgp.ConjugateGradients(tol=1e-8, max_iterations=2))
    for _ in range(2):
        with iterative(), pytest.warns(sketchgp.ConvergenceWarning, match="iterations") as caught:
            found = sketchgp.predict(model, x, variance=None)
        assert found.report is not None
        assert not found.report.converged
        assert len(caught) == 1


@pytest.mark.parametrize("change", ["nu", "power", "data", "targets", "iterations"])
def test_what_the_mean_depends_on_may_change(change: str) -> None:
    """Settings of kernels and means, and large data that are changed in place where sums over them are not."""
    x, y, z = data(n=400, d=12)
    kernel = kernels.ScaleKernel(kernels.MaternKernel(nu=0.5))
    mean = Power()
    model = sketchgp.accelerate(Plain(x, y, gpytorch.likelihoods.GaussianLikelihood(), kernel, mean).double())
    limit = 1 if change == "iterations" else 1000
    with iterative(), gpytorch.settings.max_cg_iterations(limit), warnings.catch_warnings():
        warnings.simplefilter("ignore", sketchgp.ConvergenceWarning)
        before = sketchgp.predict(model, z, variance=None).mean
    if change == "nu":
        kernel.base_kernel.nu = 2.5
    elif change == "power":
        mean.power = 2
    elif change == "data":
        model.train_inputs[0].data[:, 1] = model.train_inputs[0].data[:, 1].flip(0)
    elif change == "targets":
        model.train_targets.data.copy_(model.train_targets.flip(0))
    with iterative():
        after = sketchgp.predict(model, z, variance=None).mean
    fresh = Plain(x, y, gpytorch.likelihoods.GaussianLikelihood(), kernel, mean).double().eval()
    with dense(), torch.no_grad():
        expected = fresh(z).mean
    assert relative(after, expected) < 1e-6
    assert relative(before, expected) > 1e-3


class Doubled(Plain):
    """A model that computes something of its own when it is called."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        found = super().__call__(*args, **options)
        return type(found)(2 * found.mean, found.lazy_covariance_matrix) if not self.training else found


def test_a_model_with_a_call_of_its_own() -> None:
    x, y, z = data(n=60)
    model = sketchgp.accelerate(Doubled(x, y, gpytorch.likelihoods.GaussianLikelihood(), kernels.RBFKernel()).double())
    with iterative(), torch.no_grad():
        found = sketchgp.predict(model, z, variance=None)
        assert torch.equal(found.mean, model(z).mean)
        with pytest.raises(sketchgp.InputError, match="__call__"):
            sketchgp.predict(model, z)


class Power(gpytorch.means.Mean):
    """A mean with a plain setting."""

    def __init__(self) -> None:
        super().__init__()
        self.power = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[..., 0] ** self.power


@pytest.mark.parametrize("variance", ["exact", "low_rank", None])
def test_inputs_in_the_form_of_gpytorchs_tutorial(variance: str | None) -> None:
    x, y, z = data(n=60, d=1)
    model = sketchgp.accelerate(
        Plain(x[:, 0], y, gpytorch.likelihoods.GaussianLikelihood(), kernels.RBFKernel()).double()
    )
    with iterative():
        flat, columns = (sketchgp.predict(model, points, variance=variance) for points in (z[:, 0], z))
    assert torch.equal(flat.mean, columns.mean)
    assert flat.mean.shape == (len(z),)
    if variance is not None:
        assert torch.allclose(flat.variance, columns.variance)


def test_a_new_model_is_not_predicted_with_old_weights() -> None:
    """fit, load_state_dict, set_train_data between two predictions."""
    model, x = build()
    with iterative():
        before = sketchgp.predict(model, x, variance="low_rank")
        model.set_train_data(targets=model.train_targets.flip(0))
        after = sketchgp.predict(model, x, variance="low_rank")
        plain, _ = SOLVED["scale-rbf-ard"].build()
        plain.set_train_data(targets=plain.train_targets.flip(0))
        plain.eval()
        with dense(), torch.no_grad():
            expected = plain(x).mean
        assert relative(after.mean, expected) < 1e-6
        assert relative(before.mean, expected) > 1e-2
        model.train()
        model.covar_module.base_kernel.lengthscale = 0.9
        later = sketchgp.predict(model, x, variance="low_rank")
        plain.train()
        plain.covar_module.base_kernel.lengthscale = 0.9
        plain.eval()
        with dense(), torch.no_grad():
            found = plain(x)
    assert relative(later.mean, found.mean) < 1e-6
    assert relative(later.variance, found.variance) < 0.3


def test_predict_and_the_model_share_their_solve() -> None:
    model, x = build()
    with iterative():
        found = sketchgp.predict(model, x, variance="low_rank")
        with sketchgp.record_solves() as solves, torch.no_grad(), gpytorch.settings.skip_posterior_variances():
            mean = model(x).mean
    assert not solves
    assert relative(mean, found.mean) < 1e-12


def test_auto_takes_low_rank_where_exact_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(approximate, "_EXACT_WORK", {"cpu": 1e5})  # n^2 m is 1.3e6
    monkeypatch.setattr(approximate, "_FEW", 8)
    with iterative():
        model, x = build()
        found = sketchgp.predict(model, x)
        assert found.variance_method == "low_rank" and float(found.variance_standard_error.median()) < 0.1
        model, x = build("ski")
        mean, latent = reference("ski", x)
        found = sketchgp.predict(model, x)
    assert found.variance_method == "exact", "a structured kernel falls back"
    assert found.variance_standard_error is None
    assert relative(found.mean, mean) < 1e-6
    assert relative(found.variance, latent) < 1e-5


@pytest.mark.parametrize(("work", "expected"), [(2e12, "exact"), (1e8, "low_rank")])
def test_auto_takes_a_factorization_where_it_is_cheap(
    monkeypatch: pytest.MonkeyPatch, work: float, expected: str
) -> None:
    """Of n^3 / 3 operations, here 2e8, with GPyTorch's settings as they are."""
    monkeypatch.setattr(approximate, "_EXACT_WORK", {"cpu": 1e3})
    monkeypatch.setattr(approximate, "_FEW", 8)
    monkeypatch.setattr(approximate, "_FACTOR_WORK", {"cpu": work})
    monkeypatch.setattr(approximate, "_WORTH", 0)
    x, y, z = data(n=850, m=12)
    model = sketchgp.accelerate(Plain(x, y, gpytorch.likelihoods.GaussianLikelihood(), kernels.RBFKernel()).double())
    assert sketchgp.predict(model, z).variance_method == expected


@pytest.mark.parametrize("name", list(LEFT_ALONE))
def test_models_left_alone_are_predicted_too(name: str) -> None:
    model, test = LEFT_ALONE[name].build()
    sketchgp.accelerate(model)
    plain, _ = LEFT_ALONE[name].build()
    plain.eval()
    with iterative():
        with torch.no_grad():
            expected = plain(*test)
        found = sketchgp.predict(model, test[0], batch_size=5)
    assert relative(found.mean, expected.mean) < 1e-3
    assert relative(found.variance, expected.variance) < 1e-2


def test_fixed_noise_gives_the_latent_posterior() -> None:
    """New points have no noise of their own in this likelihood (but a learned one)."""
    model, x = build("fixed-noise")
    mean, latent = reference("fixed-noise", x)
    with iterative():
        found = sketchgp.predict(model, x, variance=None)
        assert relative(found.mean, mean) < 1e-6
        model.eval()
        with torch.no_grad():
            assert relative(model(x).variance, latent) < 1e-5


def test_fixed_noise_of_the_training_points_is_not_that_of_new_ones() -> None:
    """As many new points as training points: GPyTorch would hand out the training noise, point by point."""
    model, _ = build("fixed-noise")
    new = data(n=180, m=180)[2]
    with iterative(tol=1e-4):
        try:
            found = sketchgp.predict(model, new)
        except sketchgp.InputError:
            return
    noise = found.observation_variance - found.variance
    assert float(noise.max() - noise.min()) < 1e-6, "noise of unrelated points"


@pytest.mark.parametrize("variance", ["exact", "low_rank"])
def test_fixed_noise_and_an_observation_variance(variance: str) -> None:
    """Either the learned noise is added (the noise of new points is not known) or it is refused, never a guess."""
    model, x = build("fixed-noise")
    _, latent = reference("fixed-noise", x)
    with iterative():
        try:
            found = sketchgp.predict(model, x, variance=variance)
        except sketchgp.InputError:
            return
    assert relative(found.variance, latent) < 0.3
    noise = found.observation_variance - found.variance
    assert torch.allclose(noise, model.likelihood.second_noise.detach().expand_as(noise))


def test_missing_targets() -> None:
    """The mean is that of the observed points; a variance that counts missing points as seen is never given."""
    model, x = build()
    targets = model.train_targets.clone()
    missing = torch.arange(180) % 3 == 0
    plain, _ = SOLVED["scale-rbf-ard"].build()
    plain.set_train_data(plain.train_inputs[0][~missing], targets[~missing], strict=False)
    plain.eval()
    with dense(), torch.no_grad():
        expected = plain(x)
        mean, latent = expected.mean, expected.variance
    targets[missing] = torch.nan
    model.set_train_data(targets=targets)
    with iterative(), gpytorch.settings.observation_nan_policy("mask"):
        assert relative(sketchgp.predict(model, x, variance=None).mean, mean) < 1e-6
        try:
            found = sketchgp.predict(model, x)
        except sketchgp.InputError:
            return
    assert relative(found.variance, latent) < 1e-4


def test_a_batch_model() -> None:
    model, test = SOLVED["batch"].build()
    sketchgp.accelerate(model)
    plain, _ = SOLVED["batch"].build()
    plain.eval()
    with dense(), torch.no_grad():
        expected = plain(*test)
    with iterative():
        try:
            found = sketchgp.predict(model, test[0][0], batch_size=5)
        except sketchgp.InputError:
            return
    assert relative(found.mean, expected.mean) < 1e-6
    assert relative(found.variance, expected.variance) < 1e-5


# --- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"variance": "fast"}, "variance"),
        ({"variance": True}, "variance"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": -1}, "batch_size"),
        ({"batch_size": 2.0}, "batch_size"),
    ],
    ids=str,
)
def test_wrong_options(options: dict[str, Any], match: str) -> None:
    model, x = build()
    with pytest.raises(sketchgp.InputError, match=match):
        sketchgp.predict(model, x, **options)
    assert model.training, "a refusal changes nothing"


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: x[:, 0],
        lambda x: x[:, :1],
        lambda x: x.unsqueeze(0),
        lambda x: x[:0],
        lambda x: x.to(torch.complex128),
        lambda x: torch.where(x > 0.5, math.nan, x),
        lambda x: x / 0,
        lambda x: x.tolist(),
        lambda x: np.array([["a", "b"]]),
        lambda x: x.numpy().astype(int).astype("datetime64[s]"),
        lambda x: (x, x),
        lambda x: None,
    ],
    ids=["(m,)", "(m, d-1)", "(1, m, d)", "empty", "complex", "nan", "inf", "list", "texts", "dates", "two", "None"],
)
def test_wrong_inputs(wrong: Any) -> None:
    model, x = build()
    with pytest.raises(sketchgp.InputError, match="x "):
        sketchgp.predict(model, wrong(x))
    assert model.training


def test_a_plain_model_is_refused() -> None:
    model, _ = SOLVED["scale-rbf-ard"].build()
    with pytest.raises(sketchgp.InputError, match="accelerate"):
        sketchgp.predict(model, data()[2])


def test_a_model_without_data_is_refused() -> None:
    model, x = build()
    model.train_inputs = model.train_targets = None
    with pytest.raises(sketchgp.InputError, match="data"):
        sketchgp.predict(model, x)


@pytest.mark.parametrize("double", [True, False])
def test_takes_data_as_people_have_them(double: bool) -> None:
    """numpy, pandas, and other dtypes are converted to the model's, whatever it is."""
    model, x = build()
    if not double:
        model, x = model.float(), x.float()
    expected = sketchgp.predict(model, x).mean
    frame = pandas.DataFrame(x.double().numpy())
    for given in (x.double(), x.double().numpy(), x.numpy(), frame, frame.astype(object)):
        found = sketchgp.predict(model, given).mean
        assert found.dtype == x.dtype and torch.equal(found, expected)
    whole = (10 * x).round()
    assert torch.equal(sketchgp.predict(model, whole.int()).mean, sketchgp.predict(model, whole).mean)


def test_several_inputs() -> None:
    """A Hadamard model takes task numbers beside x."""
    case = SOLVED["hadamard"]
    model, test = case.build()
    sketchgp.accelerate(model).eval()
    with iterative(), torch.no_grad():
        found = sketchgp.predict(model, (test[0].numpy(), test[1][:, 0]), batch_size=7)
        posterior = model(*test)
        assert relative(found.mean, posterior.mean) < 1e-9 and found.variance is not None
        assert relative(found.variance, posterior.variance) < 1e-2
        assert found.observation_variance is not None
        assert relative(found.observation_variance, model.likelihood(posterior, *test).variance) < 1e-2
        for wrong in (test[0], test[:1], (test[0], test[1][:-1]), (test[0], test[1].double())):
            with pytest.raises(sketchgp.InputError, match="predict: x"):
                sketchgp.predict(model, wrong)


@pytest.mark.parametrize("name", STRUCTURED)
def test_low_rank_variances_of_a_structured_kernel_are_refused(name: str) -> None:
    model, x = build(name)
    with iterative(), pytest.raises(sketchgp.InputError, match="exact"):
        sketchgp.predict(model, x, variance="low_rank")


# --- memory -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variance", [None, "low_rank"])
def test_never_makes_a_test_by_train_matrix(monkeypatch: pytest.MonkeyPatch, variance: str | None) -> None:
    from test_accelerate_lifecycle import Largest

    monkeypatch.setattr("sketchgp.operators.tiles._CPU_BYTES", 2**17)
    for part in ("inference.predictive_variance", "preconditioners.full_scale"):
        monkeypatch.setattr(f"sketchgp.{part}._ENTRIES", 2**14)
    for name, few in (("_RANK", 20), ("_NEIGHBOURS", 30)):
        monkeypatch.setattr(f"sketchgp.inference.calibrated.{name}", few)
    model, _ = build(preconditioner=sketchgp.RPCholesky(rank=20), matmul="tiled")
    x = data(m=400)[2]
    with iterative(tol=9e-4), Largest() as largest:  # to a residual: following predictions takes blocks of 256 points
        found = sketchgp.predict(model, x, variance=variance)
    assert found.mean.shape == (400,)
    assert largest.entries < 180 * 400 / 3
    assert largest.entries < 180 * 180


@pytest.mark.parametrize("points", [0, 800])  # that are factorized
@pytest.mark.parametrize(("mean", "missing"), [("constant", False), ("linear", False), ("linear", True)])
def test_trends_are_as_uncertain_as_in_universal_kriging(mean: str, missing: bool, points: int) -> None:
    x, y, test = data(d=2, m=40, dtype=torch.float64)
    y = y + 3 * x[:, 0]
    if missing:
        y[::5] = math.nan
    prior = gpytorch.means.LinearMean(2) if mean == "linear" else gpytorch.means.ConstantMean()
    model = Plain(
        x, y, gpytorch.likelihoods.GaussianLikelihood(), kernels.ScaleKernel(kernels.MaternKernel(1.5)), prior
    )
    sketchgp.accelerate(model.double())
    seen = ~torch.isnan(y)
    given, far = x[seen], torch.cat([test, 3 * test])
    ones = torch.ones(len(given) + len(far), 1, dtype=torch.float64)
    both = torch.cat([given, far])
    design = ones if mean == "constant" else torch.cat([both, ones], dim=1)
    with torch.no_grad():
        full = model.covar_module(both).to_dense()
        noisy = full[: len(given), : len(given)] + model.likelihood.noise * torch.eye(len(given)).double()
        cross = full[: len(given), len(given) :]
        h, q = (
            design[: len(given)],
            design[len(given) :].mT - design[: len(given)].mT @ torch.linalg.solve(noisy, cross),
        )
        added = (q * torch.linalg.solve(h.mT @ torch.linalg.solve(noisy, h), q)).sum(dim=0)
    with gpytorch.settings.observation_nan_policy("mask"), gpytorch.settings.max_cholesky_size(points):
        known = sketchgp.predict(model, far, variance="exact", progress=False)
        found = sketchgp.predict(model, far, variance="exact", progress=False, trend=True, batch_size=33)
    assert known.variance is not None and found.variance is not None
    assert relative(found.variance - known.variance, added) < 1e-3
    assert relative(found.mean, known.mean) < 1e-9 and found.variance_error_bound is None
    assert found.observation_variance is not None
    torch.testing.assert_close(
        found.observation_variance - found.variance, torch.full_like(added, model.likelihood.noise.item())
    )


class Positive(gpytorch.means.ConstantMean):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).clamp(min=0)


def test_trends_that_are_none_are_refused() -> None:
    model, test = build("scale-rbf-ard")
    model.mean_module = gpytorch.means.ZeroMean()
    for options in ({}, {"variance": None}):
        with pytest.raises(sketchgp.InputError, match="trend=True expects"):
            sketchgp.predict(model, test, trend=True, **options)
    model.mean_module = gpytorch.means.ConstantMean(constant_prior=gpytorch.priors.NormalPrior(0, 1)).double()
    with pytest.raises(sketchgp.InputError, match="neither prior nor constraint"):
        sketchgp.predict(model, test, trend=True)
    model.mean_module = Positive().double()
    with pytest.raises(sketchgp.InputError, match="linear in its coefficients"):
        sketchgp.predict(model, test, trend=True)
