"""Whether the standard errors of low-rank and sample variances are honest where density and noise are uneven.

Random problems (seeds from 0): 1,000 training and 300 test rows of 1 to 4 features; clusters of different widths over
a uniform background, powers of uniform numbers, heavy tails, or a curve in a uniform cloud; RBF or Matern kernels of
random lengthscale; noise that is the same for all rows, differs by up to 1,000 from row to row, varies with the inputs,
or is 30 times as large in a fifth of the rows.  Float64; the exact latent variances are by a dense factorization.  What
is counted is the share of test points whose latent variance is off by more than three of its stated standard errors:
0.3% if errors were normal and the standard errors exact.

    python benchmarks/variance_errors.py             # ten minutes on one core; resumes
    python benchmarks/variance_errors.py --quick     # four problems
    python benchmarks/variance_errors.py --report    # the table again, nothing measured
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood
from torch import Tensor

import sketchgp
from common import Model, describe, median, table
from runner import Benchmark, Group

ROWS, TESTS, PROBLEMS = 1000, 300, 32
LAYOUTS = ("clusters", "powers", "heavy tails", "curve")
NOISES = ("constant", "by row", "by place", "two levels")
KERNELS = ("RBF", "Matern-1/2", "Matern-3/2", "Matern-5/2")
METHODS = ("low_rank", "samples")


class Draws:
    """Random numbers of one problem, float64."""

    def __init__(self, seed: int) -> None:
        self.stream = torch.Generator().manual_seed(seed)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.stream, dtype=torch.float64)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.stream, dtype=torch.float64)

    def integer(self, low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=self.stream))


def points(draws: Draws, layout: str, n: int, d: int) -> Tensor:
    """Points ``(n, d)`` of an uneven density."""
    if layout == "clusters":
        count = draws.integer(1, 7)
        centres, widths = draws.uniform(count, d), 10 ** (2 * draws.uniform(count) - 2.5)
        which = torch.multinomial(10 ** (2 * draws.uniform(count)), n, True, generator=draws.stream)
        x, background = centres[which] + widths[which, None] * draws.normal(n, d), 0.1
    elif layout == "powers":
        x, background = draws.uniform(n, d) ** (1 + 5 * draws.uniform(d)), 0.0
    elif layout == "heavy tails":
        x, background = 0.3 * draws.normal(n, d) / (draws.uniform(n, 1) ** 0.7 + 0.05), 0.0
    else:
        turns = draws.uniform(n, 1).square() * torch.arange(3, 3 * d + 1, 3) + torch.arange(d)
        x, background = (1 + turns.sin()) / 2 + 0.03 * draws.normal(n, d), 0.3
    return torch.where(draws.uniform(n, 1) < background, 1.4 * draws.uniform(n, d) - 0.2, x)


def build(seed: int) -> tuple[Model, Tensor, dict[str, Any]]:
    """A model, its test points, and what it is."""
    draws, layout, noises = Draws(seed), LAYOUTS[seed % 4], NOISES[seed // 4 % 4]
    d, name = draws.integer(1, 5), KERNELS[draws.integer(0, 4)]
    x = points(draws, layout, ROWS + TESTS, d)
    kernel = ScaleKernel(RBFKernel() if name == "RBF" else MaternKernel(nu=float(name[-3]) / 2)).double()
    kernel.base_kernel.lengthscale = float(10 ** (1.3 * draws.uniform(1) - 1.3)) * math.sqrt(d)
    kernel.outputscale = scale = float(10 ** (2 * draws.uniform(1) - 1))
    x, test = x[:ROWS], x[ROWS:]
    level = scale * 10 ** (3.5 * draws.uniform(1) - 4)
    factors = {
        "constant": torch.ones(ROWS, dtype=torch.float64),
        "by row": 10 ** (3 * draws.uniform(ROWS) - 1.5),
        "by place": 10 ** (1.5 * (4 * x[:, 0]).sin()),
        "two levels": torch.where(draws.uniform(ROWS) < 0.2, 30.0, 1.0).double(),
    }
    model = Model(
        x, draws.normal(ROWS), FixedNoiseGaussianLikelihood((level * factors[noises]).clamp_min(1e-4)), kernel
    )
    about = {"layout": layout, "noise": noises, "kernel": name, "d": d}
    return model.double().eval(), test, about


@torch.no_grad()
def exact(model: Model, test: Tensor) -> Tensor:
    kernel, x = model.covar_module, model.train_inputs[0]
    root = torch.linalg.cholesky(kernel(x).to_dense() + model.likelihood.noise.diag())
    half = torch.linalg.solve_triangular(root, kernel(x, test).to_dense(), upper=False)
    return kernel(test, diag=True) - half.square().sum(dim=0)


def perform(loaded: None, seed: int) -> dict[str, Any]:
    model, test, found = build(seed)
    variance = exact(model, test)
    sketchgp.accelerate(model)
    for method in METHODS:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            prediction = sketchgp.predict(model, test, variance=method, progress=False)  # type: ignore[arg-type]
        off, error = prediction.variance / variance - 1, prediction.variance_standard_error
        assert error is not None
        beyond = (off.abs() * variance > 3 * error * prediction.variance).double().mean()
        found[method] = {
            "stated_median": error.median(), "stated_largest": error.max(), "off_rms": off.square().mean().sqrt(),
            "off_largest": off.abs().max(), "beyond_three": beyond,
            "warned": any(issubclass(one.category, sketchgp.ConvergenceWarning) for one in said),
        }  # fmt: skip
    return {"seed": seed, **found}


def report(results: dict[str, Any]) -> str:
    runs = list(results["runs"].values())
    rows, totals = [], []
    for run in runs:
        cells = []
        for found in (run[method] for method in METHODS):
            cells += [f"{found[key]:.1%}" for key in ("stated_median", "off_rms", "beyond_three")]
            cells[-1] += " *" * found["warned"]
        rows.append([run["seed"], run["layout"], run["noise"], run["kernel"], run["d"], *cells])
    for method in METHODS:
        shares = [run[method]["beyond_three"] for run in runs]
        totals.append(
            f"`{method}`: {sum(shares) / len(shares):.2%} of all points beyond three standard errors; "
            f"{median(shares):.2%} in the median problem, {max(shares):.1%} in the worst; "
            f"{sum(share > 0.05 for share in shares)} problems above 5%, "
            f"{sum(run[method]['warned'] for run in runs)} warned."
        )
    heads = [f"{method}: {what}" for method in METHODS for what in ("stated", "off (rms)", "beyond three")]
    return "\n".join([
        "# Standard errors of approximate variances, where density and noise are uneven", "",
        describe(results["machine"]), "",
        f"{len(runs)} random problems of {results['problem']['rows']:,} training and {results['problem']['tests']} "
        "test points, float64. Latent variances beside exact ones: the median of the stated relative standard errors, "
        "the root mean square of the relative errors, and the share of points that are off by more than three standard "
        "errors. A star: `predict` warned.", "",
        *(f"- {line}" for line in totals), "",
        table(["seed", "layout", "noise", "kernel", "d", *heads], rows), "",
    ])  # fmt: skip


def problem(options: Any) -> dict[str, Any]:
    return {"rows": ROWS, "tests": TESTS, "dtype": "float64"}


def groups(options: Any, directory: Path, results: dict[str, Any]) -> Iterator[Group]:
    yield Group(("runs",), [(f"{seed}", seed) for seed in range(4 if options.quick else PROBLEMS)])


BENCHMARK = Benchmark(
    doc=__doc__,
    name="variance_errors",
    quick="four problems",
    problem=problem,
    groups=groups,
    perform=perform,
    report=report,
    reads_data=lambda options: False,
)


if __name__ == "__main__":
    BENCHMARK.main()
