"""Pictures: what they draw is what was found, on axes that are given or made."""

from __future__ import annotations

from typing import Any

import gpytorch
import numpy as np
import pandas
import pytest
import torch
from matplotlib.figure import Figure

import sketchgp
from problems import normal, points
from sketchgp import plotting


def solved() -> list[sketchgp.Solution]:
    kernel = gpytorch.kernels.RBFKernel().double()
    kernel.lengthscale = torch.tensor(0.5, dtype=torch.float64)
    problem = sketchgp.FullProblem(kernel, points(60), normal(60, 2), noise=0.1)
    gradients = sketchgp.ConjugateGradients(tol=1e-8)
    return [
        gradients.solve(problem, preconditioner=sketchgp.RPCholesky(rank=9)),
        gradients.solve(problem, preconditioner=None),
        sketchgp.Cholesky().solve(problem),
    ]


def line_model(n: int = 40) -> Any:
    x = torch.linspace(0, 4, n, dtype=torch.float64).unsqueeze(-1)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()

    class Line(sketchgp.ExactGP):
        def __init__(self) -> None:
            super().__init__(x, torch.sin(3 * x[:, 0]) + 0.1 * normal(n), likelihood)
            self.mean_module, self.covar_module = gpytorch.means.ConstantMean(), gpytorch.kernels.RBFKernel()

        def forward(self, x: Any) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    return Line().double()


def rendered(ax: Any) -> Any:
    """The axes, drawn once, so that nothing is left for the moment of saving."""
    ax.figure.canvas.draw()
    return ax


def test_convergence_and_solvers() -> None:
    solutions = solved()
    ax = rendered(plotting.convergence(solutions))
    curves = [line for line in ax.get_lines() if len(line.get_xdata()) > 1 and line.get_marker() != "None"]
    for curve, solution in zip(curves, solutions, strict=False):
        np.testing.assert_allclose(curve.get_ydata(), solution.report.history.amax(dim=1))
        assert curve.get_xdata()[-1] == solution.report.iterations
    rings = [line.get_ydata()[0] for line in ax.get_lines() if line.get_marker() == "o"]
    assert rings == [solution.report.max_residual for solution in solutions]
    assert ax.get_yscale() == "log" and "tolerance 1e-08" in [text.get_text() for text in ax.texts]
    ax = rendered(plotting.convergence(solutions, by="seconds"))
    for curve, solution in zip(ax.get_lines(), solutions[:1], strict=False):
        report = solution.report
        ends = curve.get_xdata()[0], curve.get_xdata()[-1]
        assert ends == pytest.approx((report.setup_seconds, report.setup_seconds + report.seconds))
    ax = rendered(plotting.solvers([solution.report for solution in solutions]))
    widths = [bar.get_width() for bar in ax.patches]
    reports = [solution.report for solution in solutions]
    assert widths == [report.setup_seconds for report in reports] + [report.seconds for report in reports]
    assert f"{reports[0].iterations} iterations" in ax.texts[0].get_text()
    with sketchgp.record_solves() as solves:
        solved()
    assert plotting.convergence(solves).get_title(loc="left").startswith("n = 60")


def test_spectrum() -> None:
    solution = solved()[0]
    exact = torch.linalg.eigvalsh(solution.problem.kernel(solution.problem.x).to_dense().detach()).flip(0)
    ax = rendered(plotting.spectrum(solution))
    values = np.asarray(ax.get_lines()[0].get_ydata())
    np.testing.assert_allclose(values[:30], exact[:30], rtol=1e-6)
    assert ax.get_lines()[-1].get_xdata()[0] == 9 and "noise 0.1" in ax.texts[0].get_text()
    few = np.asarray(plotting.spectrum(solution.problem, rank=5, rows=30).get_lines()[0].get_ydata())
    assert len(few) <= 30 and few.sum() == pytest.approx(float(exact.sum()), rel=1e-6)  # the trace is that of all rows
    model = line_model()
    np.testing.assert_allclose(
        plotting.spectrum(model).get_lines()[0].get_ydata()[0],
        float(torch.linalg.eigvalsh(model.covar_module(model.train_inputs[0]).to_dense().detach())[-1]),
        rtol=1e-6,
    )


def test_hyperparameters_and_posteriors() -> None:
    model = line_model()
    history = sketchgp.fit(model, iterations=6)
    assert set(history.hyperparameters) == {
        "likelihood.noise_covar.noise",
        "mean_module.constant",
        "covar_module.lengthscale",
    }
    course = [values[0] for values in history.hyperparameters["covar_module.lengthscale"]]
    assert len(course) == len(history.losses) == 6
    assert course[history.best_step] == pytest.approx(float(model.covar_module.lengthscale.detach()), rel=1e-9)
    ax = rendered(plotting.hyperparameters(history, names="lengthscale"))
    np.testing.assert_allclose(ax.get_lines()[0].get_ydata(), course)
    own = Figure().subplots()
    assert rendered(plotting.hyperparameters(history, ax=own, by="seconds")) is own
    assert sorted(text.get_text() for text in own.get_legend().get_texts()) == ["constant", "lengthscale", "noise"]

    x = np.linspace(-1, 5, 7)
    ax = rendered(plotting.posterior(model, x=x))
    prediction = sketchgp.predict(model, x)
    np.testing.assert_allclose(ax.get_lines()[0].get_ydata(), prediction.mean)
    top = ax.collections[0].get_paths()[0].vertices[:, 1].max()
    assert top == pytest.approx(float((prediction.mean + 2 * prediction.observation_variance.sqrt()).max()))  # type: ignore[union-attr]
    z = sketchgp.choose_inducing_points(model.covar_module, model.train_inputs[0], 5)
    parts = (model.likelihood, model.mean_module, model.covar_module)
    sparse = sketchgp.InducingPointGP(model.train_inputs[0], model.train_targets, *parts, inducing_points=z)
    assert torch.equal(sparse.inducing_points, z.points)
    assert "5 inducing points" in [text.get_text() for text in rendered(plotting.posterior(sparse)).get_legend().texts]


def test_calibration() -> None:
    """Deviations that are right lie on the diagonal; half as large ones, far below."""
    mean, y = torch.zeros(2000, dtype=torch.float64), normal(2000)
    for factor, share in ((1.0, 0.5), (0.5, 0.264)):  # of a normal within 0.6745 times the factor
        variance = torch.full_like(mean, factor**2)
        prediction = sketchgp.Prediction(mean, variance, variance, "exact", None, None)
        ax = rendered(plotting.calibration(prediction, pandas.Series(y.numpy())))
        line = ax.get_lines()[1]
        assert line.get_ydata()[49] == pytest.approx(share, abs=0.04) and line.get_xdata()[49] == 0.5
        assert f"RMSE {float(y.square().mean().sqrt()):.4g}" in ax.get_title(loc="left")


@pytest.mark.parametrize(
    ("draw", "match"),
    [
        (lambda: plotting.convergence([]), "reports expects"),
        (lambda: plotting.convergence(solved(), by="passes"), "by expects"),
        (lambda: plotting.solvers("all"), "reports expects"),
        (lambda: plotting.spectrum(3), "source expects"),
        (lambda: plotting.hyperparameters(None), "history expects"),
        (lambda: plotting.hyperparameters(sketchgp.FitHistory()), "at least one step"),
        (lambda: plotting.posterior(3), "model expects"),
        (lambda: plotting.calibration(3, None), "prediction expects"),
        (lambda: plotting.convergence(solved(), ax="axes"), "ax expects"),
    ],
)
def test_what_cannot_be_drawn(draw: Any, match: str) -> None:
    with pytest.raises(sketchgp.InputError, match=match):
        draw()
