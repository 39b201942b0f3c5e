"""What the commands measure and draw: residuals, scores, GPyTorch's own solves, the picture."""

import math

import gpytorch
import pytest
import torch

from sketchgp.cli.demo import evaluate_defaults, watch_linear_cg
from sketchgp.cli.regression import (
    Regression,
    Row,
    Scaling,
    calibration,
    copy_hyperparameters,
    format_table,
    true_residual,
)
from sketchgp.errors import InputError
from sketchgp.kernels import BY_NAME
from sketchgp.plotting.models import negative_log_density, rmse, within


def make(n=60, d=2, kernel="matern52", dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    y = x.sum(-1).sin() + 0.1 * torch.randn(n, generator=generator, dtype=torch.float64)
    return Regression(x.to(dtype), y.to(dtype), kernel).eval()


def test_true_residual_is_that_of_dense_float64(monkeypatch):
    monkeypatch.setattr("sketchgp.cli.regression._ROWS", 7)
    model = make()
    model.mean_module.constant = 0.3
    x, y = model.train_inputs[0], model.train_targets
    with torch.no_grad():
        system = model.covar_module(x).to_dense() + model.likelihood.noise * torch.eye(60)
        exact = torch.linalg.solve(system, y - 0.3)
    assert true_residual(model, exact) < 1e-7  # GPyTorch rounds squared distances of zero to 1e-15
    wrong = exact * 1.01  # the residual of 1.01 times the solution is 0.01 of the right-hand side
    assert true_residual(model, wrong) == pytest.approx(0.01, rel=1e-5)
    assert true_residual(model, wrong, rows=torch.arange(0, 60, 3)) == pytest.approx(0.01, rel=1e-5)


def test_true_residual_leaves_the_model_as_it_is():
    model = make(dtype=torch.float32)
    assert true_residual(model, torch.zeros(60)) == pytest.approx(1.0)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_table_is_aligned_and_shows_what_is_missing():
    text = format_table([Row("a long name", 48_546, 12, 9.1e-4, 3.14, 2.0, 0.1, -0.8), Row("b", 7)])
    lines = text.splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[2].split() == [
        "a",
        "long",
        "name",
        "48,546",
        "12",
        "9.1e-04",
        "3.1",
        "2.0",
        "0.1000",
        "-0.800",
    ]
    assert lines[3].split() == ["b", "7"] + ["-"] * 6


def test_scores():
    mean, variance, y = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 4.0]), torch.tensor([1.0, -1.0])
    assert rmse(mean, y) == pytest.approx(math.sqrt(2.5))
    expected = -torch.distributions.Normal(mean, variance.sqrt()).log_prob(y).mean().item()
    assert negative_log_density(mean, variance, y) == pytest.approx(expected)


def test_scaling_and_back():
    x = torch.randn(50, 2, dtype=torch.float64) * torch.tensor([1e-6, 1e6]) + torch.tensor([1e3, 0.0])
    y = torch.randn(50, dtype=torch.float64) * 30 + 1e6
    scaling = Scaling.of(x, y, "y")
    scaled = scaling.scale_x(x, torch.float32)
    assert scaled.dtype == torch.float32
    torch.testing.assert_close(scaled.mean(0), torch.zeros(2), atol=1e-5, rtol=0)
    torch.testing.assert_close(scaled.std(0), torch.ones(2), atol=1e-5, rtol=0)
    torch.testing.assert_close(scaling.unscale_mean(scaling.scale_y(y, torch.float64)), y)
    torch.testing.assert_close(scaling.unscale_std(torch.tensor([4.0, -1e-9])), torch.tensor([2, 0]).double() * y.std())


def test_scaling_refuses_what_cannot_be_scaled():
    x = torch.randn(3, 1)
    with pytest.raises(InputError, match="at least 2"):
        Scaling.of(x[:1], torch.ones(1), "price")
    with pytest.raises(InputError, match=r"'price'.*one value \(7\)"):
        Scaling.of(x, torch.full((3,), 7.0), "price")
    with pytest.raises(InputError, match="overflow"):
        Scaling.of(torch.tensor([[1e300], [-1e300]]).double(), torch.tensor([0.0, 1.0]).double(), "price")


@pytest.mark.parametrize("kernel", list(BY_NAME))
def test_copy_keeps_hyperparameters_and_takes_other_rows(kernel):
    model = make(kernel=kernel)
    model.covar_module.outputscale = 2.5
    copy = copy_hyperparameters(model, model.train_inputs[0][:9], model.train_targets[:9], kernel)
    assert copy.covar_module.outputscale.item() == pytest.approx(2.5)
    assert copy.train_targets.shape == (9,)
    assert copy.covar_module.base_kernel.lengthscale.shape == (1, 2)
    assert not copy.training


def test_watching_gpytorch_changes_nothing_and_sees_all():
    x_test = torch.randn(5, 2).double()
    with torch.no_grad(), gpytorch.settings.max_cholesky_size(1):
        expected = make()(x_test).mean
        with watch_linear_cg() as solves, gpytorch.settings.skip_posterior_variances():
            mean = make()(x_test).mean
    (solve,) = solves
    torch.testing.assert_close(mean, expected, atol=1e-7, rtol=0)
    seconds, residuals = zip(*solve, strict=True)
    assert len(solve) >= 12  # linear_cg runs at least 11 iterations
    assert residuals[0] == pytest.approx(1.0)
    assert residuals[-1] < gpytorch.settings.eval_cg_tolerance.value()
    assert seconds == tuple(sorted(seconds))


def test_watching_keeps_gpytorchs_preconditioner():
    x_test = torch.randn(5, 2).double()

    def iterations(size):
        with (
            torch.no_grad(),
            gpytorch.settings.max_cholesky_size(1),
            gpytorch.settings.min_preconditioning_size(1),
            gpytorch.settings.max_preconditioner_size(size),
            gpytorch.settings.eval_cg_tolerance(1e-4),
            gpytorch.settings.skip_posterior_variances(),
            watch_linear_cg() as solves,
        ):
            assert make()(x_test).mean.isfinite().all()
            return len(solves[0])

    assert iterations(40) < iterations(0)


def test_watch_ends_with_its_block():
    import linear_operator

    original = linear_operator.utils.linear_cg
    with watch_linear_cg():
        assert linear_operator.utils.linear_cg is not original
    assert linear_operator.utils.linear_cg is original


def test_row_of_gpytorchs_defaults():
    model = make(kernel="rbf")
    x, y = torch.randn(8, 2).double(), torch.randn(8).double()
    with torch.no_grad():
        exact = make(kernel="rbf")
        marginal = exact.likelihood(exact(x))
    row, steps = evaluate_defaults(model, x, y, rows_for_nll=3)
    assert not steps  # n is below max_cholesky_size
    assert row.iterations == 0
    assert row.residual < 1e-8
    assert row.rmse == pytest.approx(rmse(marginal.mean, y))
    assert row.nll == pytest.approx(negative_log_density(marginal.mean[:3], marginal.variance[:3], y[:3]))


def test_calibration_counts_rows_inside_intervals():
    """Against intervals by torch's normal quantiles, each made and looked into."""
    mean, std = torch.randn(500).double(), 0.5 + 1.5 * torch.rand(500).double()
    y = mean + 1.3 * std * torch.randn(500).double()
    levels = torch.tensor([0.0, 0.3, 0.9, 1.0]).double()
    ends = torch.distributions.Normal(0.0, 1.0).icdf((1 + levels) / 2)
    expected = [float(((mean - end * std <= y) & (y <= mean + end * std)).double().mean()) for end in ends]
    torch.testing.assert_close(within(mean, std, y, levels), torch.tensor(expected).double())
    assert "in the 90% intervals" in calibration(mean, std, y)
