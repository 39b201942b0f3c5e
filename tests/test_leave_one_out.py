"""``leave_one_out``: the numbers of models that never saw the row, exactly, or as near as the standard errors say."""

from __future__ import annotations

from typing import Any

import gpytorch
import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ConstantMean
from torch import Tensor

import sketchgp
from cases import each
from gp_models import LEFT_ALONE, SOLVED, TORCH_WARNINGS, Plain, dense, iterative, relative
from problems import identity, normal, points
from sketchgp.inference.leave_one_out import fitted, probed_diagonal, signs
from sketchgp.operators import KernelMatrix
from sketchgp.preconditioners.full_scale import FullScaleFactor
from sketchgp.solvers import System

pytestmark = TORCH_WARNINGS


def build(name: str = "scale-rbf-ard", dtype: torch.dtype = torch.float64, **choices: Any) -> Any:
    return sketchgp.accelerate(SOLVED[name].build(dtype)[0], **choices)


def training_side(name: str) -> tuple[Tensor, Tensor, Tensor]:
    """``K + noise``, targets and prior means, dense float64."""
    model, _ = SOLVED[name].build()
    with dense(), torch.no_grad():
        marginal = model.likelihood(model.train()(*model.train_inputs), *model.train_inputs)
        matrix, mean = marginal.covariance_matrix, marginal.mean
    return matrix.detach(), model.train_targets, mean.detach()


def brute_force(name: str) -> tuple[Tensor, Tensor]:
    """Means and variances of each row from a system without it, solved anew."""
    matrix, y, mean = training_side(name)
    means, variances = torch.empty_like(y), torch.empty_like(y)
    for i in range(len(y)):
        rest = torch.arange(len(y)) != i
        cross = matrix[rest, i]
        weights = torch.linalg.solve(matrix[rest][:, rest], torch.stack([(y - mean)[rest], cross], dim=1))
        means[i], variances[i] = mean[i] + cross @ weights[:, 0], matrix[i, i] - cross @ weights[:, 1]
    return means, variances


EXACT = ["scale-rbf-ard", "fixed-noise", "additive-kernel", "additive-forward", "product-forward", "deep", "ski"]


@pytest.mark.parametrize("name", EXACT)
def test_exact_is_brute_force(name: str) -> None:
    model, (mean, variance) = build(name), brute_force(name)
    found = sketchgp.leave_one_out(model)
    assert found.exact and found.num_probes == 0 and found.report.reason == "was solved directly"
    assert not model.training and found.mean_report is None
    y = model.train_targets
    assert relative(found.mean, mean) < 1e-6
    assert relative(found.variance, variance) < 1e-6
    assert torch.allclose(found.residual, y - found.mean)
    each = torch.distributions.Normal(mean, variance.sqrt()).log_prob(y)
    assert relative(found.log_density, each) < 1e-5
    assert found.mean_log_density == pytest.approx(float(each.mean()), rel=1e-5)
    assert found.mean_squared_error == pytest.approx(float((y - mean).square().mean()), rel=1e-5)
    assert not found.variance_standard_error.any() and not found.residual_standard_error.any()
    assert found.mean_squared_error_standard_error == found.mean_log_density_standard_error == 0


def test_exact_in_float32_is_as_good_as_its_dtype() -> None:
    found, (mean, variance) = sketchgp.leave_one_out(build(dtype=torch.float32)), brute_force("scale-rbf-ard")
    assert found.mean.dtype == found.variance.dtype == torch.float32
    assert relative(found.mean, mean) < 1e-4 and relative(found.variance, variance) < 1e-4


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("scale-rbf-ard", {}),
        ("scale-rbf-ard", {"preconditioner": None}),
        ("bare-matern", {"preconditioner": sketchgp.RPCholesky(rank=20)}),
        ("fixed-noise", {"preconditioner": sketchgp.Nystrom(rank=30)}),
        ("additive-forward", {}),
        ("ski", {}),
    ],
)
def test_probes_are_as_near_as_they_say(name: str, choices: dict[str, Any]) -> None:
    model, (mean, variance) = build(name, **choices), brute_force(name)
    with iterative():
        found = sketchgp.leave_one_out(model, exact=False, num_probes=64)
    assert not found.exact and found.num_probes == found.report.columns == 64
    scaled = (found.variance - variance) / found.variance_standard_error
    assert 0.2 < float(scaled.square().mean().sqrt()) < 1.7
    assert float((found.variance / variance).median()) == pytest.approx(1, abs=0.03)
    assert float((found.variance_standard_error / variance).median()) < 0.1
    y = model.train_targets
    assert relative(found.residual, y - mean) < 0.2
    error, density = (y - mean).square().mean(), torch.distributions.Normal(mean, variance.sqrt()).log_prob(y).mean()
    assert abs(found.mean_squared_error - error) < 3.5 * found.mean_squared_error_standard_error < 0.2 * error
    assert abs(found.mean_log_density - density) < 3.5 * found.mean_log_density_standard_error < 0.1


@pytest.mark.parametrize("name", ["additive-forward", "product-forward"])
def test_sums_and_products_in_forward_are_known_beside_the_probes(name: str) -> None:
    """By the near approximation: probes alone are off by 6 to 7%."""
    variance = brute_force(name)[1]
    with iterative():
        found = sketchgp.leave_one_out(build(name), exact=False)
    assert float((found.variance / variance - 1).square().mean().sqrt()) < 0.01


def test_standard_errors_of_totals_are_those_of_many_seeds() -> None:
    model, (mean, variance) = build(), brute_force("scale-rbf-ard")
    y = model.train_targets
    error, density = (y - mean).square().mean(), torch.distributions.Normal(mean, variance.sqrt()).log_prob(y).mean()
    with iterative(tol=1e-3):
        all_of = [sketchgp.leave_one_out(model, exact=False, num_probes=16, seed=seed) for seed in range(24)]
    for name, right in (("mean_squared_error", error), ("mean_log_density", density)):
        found = torch.tensor([[getattr(one, name), getattr(one, name + "_standard_error")] for one in all_of])
        assert len(set(found[:, 0].tolist())) == 24
        spread, said = found[:, 0].std(), found[:, 1].square().mean().sqrt()
        assert 0.6 < float(said / spread) < 1.7, name
        assert abs(float(found[:, 0].mean() - right)) < 4 * float(spread) / 24**0.5, name


def test_probes_take_the_weights_that_the_model_has() -> None:
    model = build()
    with iterative():
        sketchgp.predict(model, model.train_inputs[0][:3], variance=None)
        with sketchgp.record_solves() as solves:
            first = sketchgp.leave_one_out(model, exact=False)
            again = sketchgp.leave_one_out(model, exact=False)
    assert [one.columns for one in solves] == [16, 16]
    assert first.mean_report is not None and first.mean_report.columns == 1
    assert torch.equal(first.variance, again.variance) and "probes" in repr(first)


def test_parameters_that_changed_since_a_prediction_count() -> None:
    model, fresh = build("bare-matern"), build("bare-matern")
    with iterative():
        sketchgp.predict(model, model.train_inputs[0][:3], variance=None)
        for one in (model, fresh):
            one.mean_module.constant, one.covar_module.lengthscale, one.likelihood.noise = 0.7, 0.5, 0.02
        for exact in (True, False):
            found, right = (sketchgp.leave_one_out(one, exact=exact) for one in (model, fresh))
            assert relative(found.mean, right.mean) < 1e-6 and relative(found.variance, right.variance) < 1e-6


def test_a_cholesky_model_is_exact_at_any_size() -> None:
    with iterative():
        assert sketchgp.leave_one_out(build(solver=sketchgp.Cholesky())).exact


def test_rows_without_a_target_are_left_out() -> None:
    model = build("bare-matern")
    y = model.train_targets.clone()
    y[[3, 50, 51]] = torch.nan
    seen = ~y.isnan()
    other = build("bare-matern")
    other.set_train_data(other.train_inputs[0][seen], y[seen], strict=False)
    model.set_train_data(targets=y)
    with pytest.raises(sketchgp.InputError, match="observation_nan_policy"):
        sketchgp.leave_one_out(model)
    for exact in (True, False):
        with iterative(), gpytorch.settings.observation_nan_policy("mask"):
            found = sketchgp.leave_one_out(model, exact=exact)
            right = sketchgp.leave_one_out(other, exact=exact)
        assert bool((found.mean.isnan() == ~seen).all() and (found.variance.isnan() == ~seen).all())
        assert relative(found.mean[seen], right.mean) < (1e-9 if exact else 1e-5)
        assert found.mean_squared_error == pytest.approx(right.mean_squared_error, rel=1e-5)


def test_an_inducing_point_model_is_that_without_the_row() -> None:
    x, y, z = points(60, 2), normal(60), points(9, 2, seed=1)
    kernel = ScaleKernel(MaternKernel(nu=1.5)).double()

    def model(rows: Tensor) -> Any:
        likelihood = GaussianLikelihood().double()
        likelihood.noise = 0.1
        mean = ConstantMean().double()
        mean.constant = 0.3
        return sketchgp.InducingPointGP(x[rows], y[rows], likelihood, mean, kernel, z, variance="dtc").eval()

    everything = torch.arange(60)
    found = sketchgp.leave_one_out(model(everything))
    assert found.exact
    for i in (0, 17, 59):
        other = model(everything[everything != i])
        with torch.no_grad():
            right = other.likelihood(other(x[i : i + 1]))
            density = torch.distributions.Normal(right.mean, right.stddev).log_prob(y[i])
        assert float(found.mean[i]) == pytest.approx(float(right.mean), rel=1e-6)
        assert float(found.variance[i]) == pytest.approx(float(right.variance), rel=1e-6)
        assert float(found.log_density[i]) == pytest.approx(float(density), rel=1e-6)
    with pytest.raises(sketchgp.InputError, match="exact expects True or None"):
        sketchgp.leave_one_out(model(everything), exact=False)


@each("name", ["batch", "batch-targets", "lcm", "hadamard"])
def test_batches_and_several_outputs_are_refused(name: str) -> None:
    with pytest.raises(sketchgp.InputError, match=r"one output and no batch|one tensor of inputs"):
        sketchgp.leave_one_out(build(name))


@pytest.mark.parametrize("name", ["sgpr", "linear"])
def test_what_is_inverted_by_structure_is_refused(name: str) -> None:
    model = sketchgp.accelerate(LEFT_ALONE[name].build()[0])
    with pytest.raises(sketchgp.InputError, match="inverted by its structure"):
        sketchgp.leave_one_out(model)


# --- the pieces -------------------------------------------------------------------------------------------------


def matrix_and_noise(n: int = 90) -> tuple[KernelMatrix, Tensor, Tensor]:
    kernel = ScaleKernel(MaternKernel(nu=1.5)).double()
    kernel.base_kernel.lengthscale = 0.4
    matrix, noise = KernelMatrix.of(kernel, points(n, 2)), 0.01 + 0.1 * points(n, 1, seed=3)[:, 0]
    return matrix, noise, matrix.to_dense().detach() + torch.diag(noise)


@pytest.mark.parametrize("rank", [0, 12])
def test_a_full_scale_approximation_by_all_neighbours_is_exact(rank: int) -> None:
    matrix, noise, dense_matrix = matrix_and_noise()
    factor = sketchgp.RPCholesky(rank=max(rank, 1)).build(matrix, noise).factor[:, :rank]
    inverse = torch.linalg.inv(dense_matrix)
    whole = FullScaleFactor.of(matrix, noise, factor, neighbors=90)
    assert relative(whole.apply_inverse(identity(90)), inverse) < 1e-9
    assert relative(whole.inverse_diagonal(), inverse.diagonal()) < 1e-9
    part = FullScaleFactor.of(matrix, noise, factor, neighbors=4)
    found = part.apply_inverse(identity(90))
    assert relative(found, found.mT) < 1e-12 and float(torch.linalg.eigvalsh(found)[0]) > 0
    assert relative(part.inverse_diagonal(), found.diagonal()) < 1e-10
    assert relative(found, inverse) < 0.25


def test_a_residual_of_one_row_is_solved_for() -> None:
    """Probes whose solutions leave a tenth of one row, always with its sign: its value is not a tenth off."""
    matrix, noise, dense_matrix = matrix_and_noise()
    z, system = signs(90, 16, 0, noise.device), System(matrix, noise)
    left = torch.zeros_like(z)
    left[7] = 0.1 * z[7]
    exact, found = (
        probed_diagonal(system, z, torch.linalg.solve(dense_matrix, z - rest), rest.norm(dim=0), z[:, :0], False, 0)
        for rest in (0 * left, left)
    )
    moved = (found.mean - exact.mean) / torch.linalg.inv(dense_matrix).diagonal()
    assert float(moved.abs().max()) < 0.01


def test_a_fit_finds_what_noise_hides() -> None:
    feature = points(4000, 1)[:, 0] + 0.1
    right = 3 * feature**1.7
    values = right * (1 + 1.5 * normal(4000, seed=1))  # many below zero
    found = fitted(values, feature)
    assert float((found / right - 1).abs().max()) < 0.15
    assert relative(fitted(right, feature), right) < 1e-6


# --- the pseudo-likelihood --------------------------------------------------------------------------------------


def value_and_gradients(model: Any, mll: Any) -> tuple[Tensor, Tensor]:
    model.train()
    model.zero_grad()
    value = mll(model(*model.train_inputs), model.train_targets)
    value.sum().backward()
    return value.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("name", ["fixed-noise", "additive-forward", "batch"])
def test_the_pseudo_likelihood_is_gpytorch_s(name: str) -> None:
    model, _ = SOLVED[name].build()
    with dense():
        right = value_and_gradients(model, gpytorch.mlls.LeaveOneOutPseudoLikelihood(model.likelihood, model))
    model = build(name)
    mll = sketchgp.LeaveOneOutPseudoLikelihood(model.likelihood, model)
    with iterative(probes=1000), gpytorch.settings.deterministic_probes(True):
        found = value_and_gradients(model, mll)
        again = value_and_gradients(model, mll)
    assert torch.equal(found[0], again[0]) and torch.equal(found[1], again[1])
    assert bool(((found[0] - right[0]).abs() < 3e-3 * right[0].abs().clamp(min=1)).all())
    assert relative(found[1], right[1]) < 0.03


def test_the_gradient_is_that_of_the_estimate() -> None:
    """Few probes, whose estimate is far from the exact value: its derivative is found by differences."""
    model = build("bare-matern")
    mll = sketchgp.LeaveOneOutPseudoLikelihood(model.likelihood, model)
    noise = model.likelihood.noise_covar.raw_noise
    with iterative(probes=6, tol=1e-10), gpytorch.settings.deterministic_probes(True):
        value_and_gradients(model, mll)
        found, values = float(noise.grad), []
        for step in (1e-3, -1e-3):
            noise.data += step
            values.append(float(value_and_gradients(model, mll)[0]))
            noise.data -= step
    assert found == pytest.approx((values[0] - values[1]) / 2e-3, rel=0.02)


def test_probes_stay_unless_they_are_to_be_fresh() -> None:
    for seed in (0, None):
        model = sketchgp.accelerate(sketchgp.restore(build()), probe_seed=seed).train()
        mll = sketchgp.LeaveOneOutPseudoLikelihood(model.likelihood, model)
        with iterative(probes=5):
            first, second = (value_and_gradients(model, mll)[0] for _ in range(2))
        assert torch.equal(first, second) == (seed is not None)


def test_few_points_are_gpytorch_s_own() -> None:
    model = build()
    ours, theirs = (
        value_and_gradients(model, kind(model.likelihood, model))
        for kind in (sketchgp.LeaveOneOutPseudoLikelihood, gpytorch.mlls.LeaveOneOutPseudoLikelihood)
    )
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


def test_fit_takes_gpytorch_s_class_and_solves_for_it() -> None:
    losses = []
    for kind in (gpytorch.mlls.LeaveOneOutPseudoLikelihood, sketchgp.LeaveOneOutPseudoLikelihood):
        model = build()
        with iterative(tol=1e-4), sketchgp.record_solves() as solves:
            history = sketchgp.fit(model, mll=kind(model.likelihood, model), iterations=4, num_probes=20)
        assert {one.columns for one in solves} == {21}
        losses.append(history.losses)
    assert losses[0] == losses[1] and losses[0][-1] < losses[0][0]


def test_the_pseudo_likelihood_refuses_what_it_cannot_do() -> None:
    model = build()
    mll = sketchgp.LeaveOneOutPseudoLikelihood(model.likelihood, model)
    with iterative(probes=1), pytest.raises(sketchgp.InputError, match="at least two probes"):
        value_and_gradients(model, mll)
    targets = model.train_targets.clone()
    targets[0] = torch.nan
    with iterative(), pytest.raises(sketchgp.InputError, match="without NaN"):
        mll(model.train()(*model.train_inputs), targets)
    several = build("lcm")
    mll = sketchgp.LeaveOneOutPseudoLikelihood(several.likelihood, several)
    with iterative(), pytest.raises(sketchgp.InputError, match="one output"):
        value_and_gradients(several, mll)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kernel", [RBFKernel, MaternKernel])
def test_rows_of_which_probes_know_little_have_large_standard_errors(kernel, seed):
    """With little noise rows far from others have values a millionth of those in a cluster, where probes are noisy."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(43, 3, generator=generator, dtype=torch.float64)
    x[:25] = 0.5 + 0.02 * x[:25]
    y = torch.sin(3 * x.sum(dim=1)) + 0.001 * torch.randn(43, generator=generator, dtype=torch.float64)
    model = Plain(x, y, GaussianLikelihood(), kernel()).double()
    model.covar_module.lengthscale = 0.4
    model.likelihood.noise_covar.register_constraint("raw_noise", gpytorch.constraints.GreaterThan(1e-9))
    model.likelihood.noise = 1e-6
    sketchgp.accelerate(model, preconditioner=None, solver=sketchgp.Cholesky())
    with gpytorch.settings.max_cholesky_size(0):
        expected, found = (sketchgp.leave_one_out(model, exact=exact, progress=False) for exact in (True, False))
    assert bool(((found.mean - expected.mean).abs() <= 6 * found.residual_standard_error).all())
    assert bool(((found.variance - expected.variance).abs() <= 6 * found.variance_standard_error).all())
