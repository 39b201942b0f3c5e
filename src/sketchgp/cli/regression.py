"""The regression of the commands, an ordinary ExactGP: scaling, tuning, predictions, and a table of its scores."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import gpytorch
import torch
from torch import Tensor

from ..accelerate import accelerate
from ..errors import InputError
from ..fit import fit
from ..kernels import BY_NAME, mean_by_name
from ..plotting.models import negative_log_density, rmse, within
from ..predict import predict
from ..random_streams import generator
from ..report import SolveReport, record_solves
from ..settings import Variance

_LEVELS = (0.5, 0.9, 0.95)  # of the intervals whose calibration is printed
_ROWS = 256  # of the kernel matrix formed at a time


class Regression(gpytorch.models.ExactGP):
    """Constant or linear mean, scaled kernel with one lengthscale a feature (ARD), learned noise.

    Nothing in it knows of sketchgp: it is the model a GPyTorch user would write.

    :param x: training features, ``(n, d)``, standardised.
    :param y: training targets, ``(n,)``, standardised.
    :param kernel: a key of :data:`sketchgp.kernels.BY_NAME`.
    :param lengthscale: to start from; None is the square root of d.
    :param mean: one of :data:`sketchgp.kernels.MEANS`.
    """

    def __init__(
        self, x: Tensor, y: Tensor, kernel: str = "matern52", lengthscale: float | None = None, mean: str = "constant"
    ):
        # Targets without noise want less than GPyTorch's least one, 1e-4; this is scikit-learn's.
        least = gpytorch.constraints.GreaterThan(1e-5)
        super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood(noise_constraint=least))
        self.mean_module = mean_by_name(mean, x.shape[-1])
        self.covar_module = gpytorch.kernels.ScaleKernel(BY_NAME[kernel](ard_num_dims=x.shape[-1]))
        # Standardised rows are about sqrt(2 d) apart: start with lengthscales of that order.
        self.covar_module.base_kernel.lengthscale = lengthscale or math.sqrt(x.shape[-1])
        self.covar_module.outputscale = 1.0
        self.likelihood.noise = 0.1
        self.to(x)

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def copy_hyperparameters(model: Regression, x: Tensor, y: Tensor, kernel: str) -> Regression:
    """Return a new model, in eval mode, with the hyperparameters of ``model`` and other training data."""
    other = Regression(x, y, kernel)
    other.load_state_dict(model.state_dict())
    return other.eval()


@dataclass(frozen=True)
class Scaling:
    """Means and deviations of the training rows, in float64; ``x_mean`` and ``x_std`` are ``(d,)``."""

    x_mean: Tensor
    x_std: Tensor
    y_mean: float
    y_std: float

    @classmethod
    def of(cls, x: Tensor, y: Tensor, target: str) -> Scaling:
        """Return the scaling of training data ``x`` ``(n, d)`` and ``y`` ``(n,)``.

        :param target: name of the target, for messages.
        :raises InputError: fewer than two rows, a target that is constant (there is nothing to learn), or
            values so large that their deviation overflows.
        """
        if x.shape[0] < 2:
            raise InputError(f"{x.shape[0]} training row(s); at least 2 are needed")
        if bool((y == y[0]).all()):
            raise InputError(f"column {target!r}: the target has one value ({y[0].item():g}) in all training rows")
        scaling = cls(x.mean(0), x.std(0), y.mean().item(), y.std().item())
        if not (torch.isfinite(scaling.x_std).all() and math.isfinite(scaling.y_std)):
            raise InputError("values above about 1e150 overflow the standard deviation; rescale the columns")
        return scaling

    def scale_x(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Scale features ``(n, d)`` to mean 0 and deviation 1 over the training rows."""
        return ((x.double() - self.x_mean) / self.x_std).to(dtype)

    def scale_y(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """Scale targets ``(n,)`` to mean 0 and deviation 1 over the training rows."""
        return ((y.double() - self.y_mean) / self.y_std).to(dtype)

    def unscale_mean(self, mean: Tensor) -> Tensor:
        """Return a standardised mean ``(m,)`` in the units of the target, float64."""
        return mean.double() * self.y_std + self.y_mean

    def unscale_std(self, variance: Tensor) -> Tensor:
        """Return a standardised variance ``(m,)`` as a deviation in the units of the target, float64."""
        return variance.double().clamp_min(0).sqrt() * self.y_std


def calibration(mean: Tensor, std: Tensor, y: Tensor) -> str:
    """Return the shares of rows ``(m,)`` inside the intervals of a few levels, as a line.

    :param std: of an observation, ``(m,)``.
    """
    shares = within(mean, std, y, torch.tensor(_LEVELS, dtype=torch.float64)).tolist()
    parts = [f"{share:.1%} in the {level:.0%} intervals" for share, level in zip(shares, _LEVELS, strict=True)]
    return f"Calibration: of {len(y):,} rows, {', '.join(parts)}."


@torch.no_grad()
def true_residual(model: gpytorch.models.ExactGP, weights: Tensor, rows: Tensor | None = None) -> float:
    """``||(K + noise I) weights - (y - mean)|| / ||y - mean||`` in float64, from GPyTorch's kernel alone.

    :param model: a GP with constant noise, one output and training data ``(n, d)``.
    :param weights: ``(n,)``.
    :param rows: if given, both norms are over these rows only (a check by sample, for large n).
    """
    kernel = copy.deepcopy(model.covar_module).double()
    x = model.train_inputs[0].double()
    target = (model.train_targets - model.mean_module(model.train_inputs[0])).double()
    solution = weights.double()
    rows = torch.arange(x.shape[0]) if rows is None else rows
    noise = model.likelihood.noise.item()
    error = torch.zeros((), dtype=torch.float64)
    for part in rows.split(_ROWS):
        product = kernel(x[part], x).to_dense() @ solution + noise * solution[part]
        error += (product - target[part]).square().sum()
    return float(error.sqrt() / target[rows].norm())


@dataclass(frozen=True)
class Row:
    """One line of the table of results; None is shown as ``-``.

    ``mean_seconds`` is the time to the mean of all test rows (with the preconditioner's set-up),
    ``variance_seconds`` the time their variances take on top.
    """

    what: str
    n: int
    iterations: int | None = None
    residual: float | None = None
    mean_seconds: float | None = None
    variance_seconds: float | None = None
    rmse: float | None = None
    nll: float | None = None


_HEADINGS = ("what", "n", "iterations", "true residual", "mean s", "var. s", "RMSE", "NLL")  # of the fields of a row
_SHOWN = ("{}", "{:,}", "{}", "{:.1e}", "{:.1f}", "{:.1f}", "{:.4f}", "{:.3f}")


def format_table(rows: Sequence[Row]) -> str:
    """Return the rows as aligned text under a header."""
    lines = [[*_HEADINGS]]
    for row in rows:
        values = zip(_SHOWN, astuple(row), strict=True)
        lines.append(["-" if value is None else shown.format(value) for shown, value in values])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines)


def scored(what: str, n: int, y: Tensor, mean: Tensor, variance: Tensor, times: Sequence[float]) -> Row:
    """Return the row of the table for predictions of test rows, without the iterations and the residual.

    :param n: number of training rows; :param y: test targets ``(m,)``; :param mean: of all of them.
    :param variance: with the noise, of the first ``(p,)`` rows, which the NLL is of.
    :param times: when the prediction began, when the mean was there, and when the variances were.
    """
    p = len(variance)
    return Row(
        what,
        n,
        mean_seconds=times[1] - times[0],
        variance_seconds=times[2] - times[1],
        rmse=rmse(mean, y),
        nll=negative_log_density(mean[:p], variance, y[:p]),
    )


def split_rows(n: int, test_fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return random disjoint row numbers ``(train, test)``; the test part has ``round(n * test_fraction)`` rows."""
    order = torch.randperm(n, generator=generator(seed, "training and test rows"))
    size = round(n * test_fraction)
    return order[size:], order[:size]


def tune(
    x: Tensor,
    y: Tensor,
    kernel: str,
    subset: int,
    iterations: int,
    seed: int,
    lengthscale: float | None = None,
    mean: str = "constant",
) -> Regression:
    """Return a regression on all rows, its hyperparameters tuned on a random subset of them.

    :param x: ``(n, d)``, standardised.
    :param y: ``(n,)``, standardised.
    :param kernel: a key of :data:`sketchgp.kernels.BY_NAME`.
    :param subset: number of rows to tune on; all when n is not larger.
    :param iterations: the most steps of L-BFGS.
    :param seed: of the subset and of the probes.
    :param lengthscale: to start from, as of :class:`Regression`; ``mean`` likewise.
    :returns: the model, accelerated, in eval mode and conditioned on all rows.
    """
    n = x.shape[0]
    rows = torch.randperm(n, generator=generator(seed, "rows to tune on"))[:subset]
    model = Regression(x[rows], y[rows], kernel, lengthscale, mean)
    accelerate(model)
    which = f"a random subset of {len(rows):,} of the {n:,} training rows" if n > subset else f"all {n:,} training rows"
    print(f"tuning the hyperparameters by marginal likelihood on {which} ...")
    start = time.perf_counter()
    history = fit(model, iterations=iterations, seed=seed)
    print(
        f"  tuned on {which}: {len(history.losses)} steps ({history.reason}), loss {history.losses[0]:.3f} -> "
        f"{history.best_loss:.3f} per row, {time.perf_counter() - start:.0f} s"
    )
    for limit in (value for name, value in history.at_limits.items() if name.endswith("noise")):
        print(f"  the noise ended at its limit, {limit:g} of the target's variance: error bars may be too wide")
    model.set_train_data(x, y, strict=False)
    return model.eval()


@dataclass(frozen=True)
class Outcome:
    """Predictions of test rows, ``mean`` and ``variance`` (noise included), both ``(m,)``, and their row.

    ``solve`` is the report of the mean's solve, None where GPyTorch factorised a small matrix; ``variance_check``
    compares low-rank variances with exact ones, as :class:`~sketchgp.Prediction` does.
    """

    mean: Tensor
    variance: Tensor
    row: Row
    solve: SolveReport | None
    variance_check: dict[str, Any] | None

    def __str__(self) -> str:
        """Return indented lines on the solve and on the variances."""
        lines = [f"  {self.solve or 'solved by a Cholesky factorisation of GPyTorch, as it does for few rows'}"]
        if (check := self.variance_check) is not None:
            smallest, median, largest = (check[f"observation_{name}_ratio"] for name in ("min", "median", "max"))
            lines.append(
                "  variances: low-rank; predictive variance over that of exact solves at "
                f"{check['points']} test rows: median {median:.2f}, from {smallest:.2f} to {largest:.2f}"
            )
        return "\n".join(lines)


def evaluate(
    model: Regression,
    x: Tensor,
    y: Tensor,
    what: str,
    variance: Variance = "auto",
    rows_for_nll: int | None = None,
) -> Outcome:
    """Predict test rows by an accelerated model, and return the row of the table with the predictions.

    :param model: accelerated, in eval mode.
    :param x: test features ``(m, d)``.
    :param y: test targets ``(m,)``.
    :param what: name of the row.
    :param variance: as in ``sketchgp.predict``; low-rank variances are compared with exact ones at a few rows.
    :param rows_for_nll: use only the first so many test rows for the NLL (for a comparison on the same rows).
    """
    times = [time.perf_counter()]
    with record_solves() as solves:
        for wanted in (None, variance):
            found = predict(model, x, variance=wanted)
            times.append(time.perf_counter())
    assert found.observation_variance is not None
    few = found.observation_variance[:rows_for_nll]
    row = scored(what, model.train_targets.shape[0], y, found.mean, few, times)
    solve = solves[0] if solves else None
    if solve is not None:
        row = replace(row, iterations=solve.iterations, residual=solve.max_residual)
    return Outcome(found.mean, found.observation_variance, row, solve, found.variance_check)
