"""Tables of 2,500 to 50,000 rows without options: sketchgp's estimator beside other Gaussian processes and trees.

Fourteen regression sets, four fifths of the rows train, all others test; inputs and targets standardised by the
training rows, float32, one thread.  Nothing is tuned by hand.

- sketchgp: ``sketchgp.sklearn.GaussianProcessRegressor()``.  On some sets ``method="exact"``, where the estimator
  takes inducing points by itself, and ``tuning_rows=None``, where 2,000 rows tell too little of the noise.
- scikit-learn GP: ``GaussianProcessRegressor`` with the same kernel (Matern-5/2 with a lengthscale for each input,
  output scale, noise), which has to be given to it; up to 3,500 training rows.
- SVGP 512: GPyTorch's, Matern-3/2, as in ``hyperparameters_rivals.py``: batches of 1,024, Adam at 0.01, 100 epochs and
  at least 2,000 steps, stopped after 100 processor seconds.
- trees: ``HistGradientBoostingRegressor``, LightGBM and CatBoost with their defaults: one fit for the mean, and fits
  for quantiles, twelve by the first two, one of CatBoost's loss for all twelve.
- xRFM: its defaults, a fifth of the training rows to stop early; it predicts means alone.

Recorded, of standardised targets: root mean square error; the continuous ranked probability score, for all methods as
twice the mean of the pinball losses of the quantiles 0.05, 0.15, ..., 0.95; how many targets lie between the quantiles
0.025 and 0.975; negative log density, of Gaussian processes alone; processor seconds.  A cell that takes more than 300
of them, or 8 GB, has failed.

    python benchmarks/tables.py --data DIRECTORY            # three hours on one core; each cell resumes
    python benchmarks/tables.py --data DIRECTORY --quick    # 300 training rows of two sets
    python benchmarks/tables.py --report                    # the tables again, nothing measured
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from common import describe, load_arrays, median, number, scores, standardise, table
from hyperparameters_rivals import Data, svgp
from measure import high_water_mb, limit_process
from runner import Benchmark, Group

SETS = ("space_ga", "uci_gas", "uci_skillcraft", "uci_sml", "uci_parkinsons", "cpu_small", "bank32nh", "puma32H",
        "ailerons", "uci_pol", "california_housing", "kc_housing", "uci_kin40k", "uci_keggdirected")  # fmt: skip
SHARE = 0.8  # of the rows train
LIMIT, TRAINING, MEMORY = 300, 100, 8  # processor seconds of a cell, those of SVGP's training, gigabytes
SEED = 0
LEVELS = (*np.arange(0.05, 1, 0.1).round(2).tolist(), 0.025, 0.975)  # of quantiles: ten for CRPS, two for coverage
POINTS = 512  # of SVGP
ROWS = {"scikit-learn GP": 3500}  # training rows up to which a method is tried
EXACT, TUNED = "sketchgp, exact", "sketchgp, tuned on all rows"
SOME = {EXACT: ("uci_kin40k", "uci_keggdirected"), TUNED: ("bank32nh", "uci_skillcraft")}  # sets of a method


class Predicted(NamedTuple):
    """Means ``(m,)``; quantiles ``(m, 12)``, or variances of observations ``(m,)``, or neither; notes."""

    mean: np.ndarray
    quantiles: np.ndarray | None = None
    variance: np.ndarray | None = None
    about: dict[str, Any] = {}  # noqa: RUF012


class Clock:
    """Processor seconds, by what they were spent on."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last = time.process_time()

    def look(self, what: str) -> None:
        now = time.process_time()
        self.seconds[what] = self.seconds.get(what, 0.0) + now - self.last
        self.last = now


def by_sketchgp(data: Data, clock: Clock, **options: Any) -> Predicted:
    from sketchgp.sklearn import GaussianProcessRegressor

    model = GaussianProcessRegressor(random_state=SEED, **options).fit(data.x.numpy(), data.y.numpy())
    clock.look("fit")
    mean, deviation = model.predict(data.test_x.numpy(), return_std=True, include_noise=True)
    clock.look("predict")
    about = {"choice": model.choice_, "noise": model.noise_, "reason": model.history_.reason,
             "at_limits": model.history_.at_limits, "notes": model.history_.notes,
             "coverage_after_tuning": model.coverage_}  # fmt: skip
    return Predicted(mean, variance=deviation**2, about=about)


def by_scikit_learn(data: Data, clock: Clock) -> Predicted:
    from sklearn.gaussian_process import GaussianProcessRegressor, kernels

    kernel = kernels.ConstantKernel() * kernels.Matern(np.ones(data.x.shape[1]), nu=2.5) + kernels.WhiteKernel(0.1)
    model = GaussianProcessRegressor(kernel).fit(data.x.double().numpy(), data.y.double().numpy())
    clock.look("fit")
    mean, deviation = model.predict(data.test_x.double().numpy(), return_std=True)
    clock.look("predict")
    return Predicted(mean, variance=deviation**2)


def by_svgp(data: Data, clock: Clock) -> Predicted:
    found: dict[str, Any] = {}
    mean, variance = svgp(data, TRAINING, found, POINTS)
    clock.seconds = {"fit": found["cpu_seconds"], "predict": found["predict_cpu_seconds"]}
    return Predicted(mean.numpy(), variance=variance.numpy(),
                     about={key: found[key] for key in ("steps", "epochs", "complete")})  # fmt: skip


def by_trees(data: Data, clock: Clock, make: Callable[[float | None], Any]) -> Predicted:
    """Fit one regressor for the mean and one for each quantile; ``make`` takes its level, or None."""
    columns = []
    for level in (None, *LEVELS):
        model = make(level).fit(data.x.numpy(), data.y.numpy())
        clock.look("fit" if level is None else "fit_quantiles")
        columns.append(model.predict(data.test_x.numpy()))
        clock.look("predict")
    return Predicted(columns[0], np.sort(np.column_stack(columns[1:]), axis=1)[:, _ranks()])


def _ranks() -> np.ndarray:
    """Return the place of each level among all: quantiles that cross are sorted."""
    return np.argsort(np.argsort(LEVELS))


def hist_gradient_boosting(level: float | None) -> Any:
    from sklearn.ensemble import HistGradientBoostingRegressor

    loss = {} if level is None else {"loss": "quantile", "quantile": level}
    return HistGradientBoostingRegressor(random_state=SEED, **loss)


def lightgbm(level: float | None) -> Any:
    from lightgbm import LGBMRegressor

    loss = {} if level is None else {"objective": "quantile", "alpha": level}
    return LGBMRegressor(random_state=SEED, n_jobs=1, verbose=-1, **loss)


def by_catboost(data: Data, clock: Clock) -> Predicted:
    from catboost import CatBoostRegressor

    found = []
    for loss in ("RMSE", f"MultiQuantile:alpha={','.join(map(str, sorted(LEVELS)))}"):
        model = CatBoostRegressor(loss_function=loss, random_seed=SEED, thread_count=1, verbose=0,
                                  allow_writing_files=False).fit(data.x.numpy(), data.y.numpy())  # fmt: skip
        clock.look("fit" if loss == "RMSE" else "fit_quantiles")
        found.append(model.predict(data.test_x.numpy()))
        clock.look("predict")
    return Predicted(found[0], np.sort(found[1], axis=1)[:, _ranks()])


def by_xrfm(data: Data, clock: Clock) -> Predicted:
    from xrfm import xRFM

    kept = len(data.x) - len(data.x) // 5
    model = xRFM(device=torch.device("cpu"), tuning_metric="mse", n_threads=1, random_state=SEED, verbose=False)
    y = data.y.unsqueeze(1)
    model.fit(data.x[:kept], y[:kept], data.x[kept:], y[kept:])
    clock.look("fit")
    mean = np.asarray(model.predict(data.test_x)).reshape(-1)
    clock.look("predict")
    return Predicted(mean)


METHODS: dict[str, Callable[[Data, Clock], Predicted]] = {
    "sketchgp": by_sketchgp,
    "HistGradientBoosting": partial(by_trees, make=hist_gradient_boosting),
    "LightGBM": partial(by_trees, make=lightgbm),
    "CatBoost": by_catboost,
    "xRFM": by_xrfm,
    "scikit-learn GP": by_scikit_learn,
    "SVGP 512": by_svgp,
    EXACT: partial(by_sketchgp, method="exact"),
    TUNED: partial(by_sketchgp, tuning_rows=None),
}


def load(directory: Path, name: str, rows: int | None) -> Data:
    """Return both parts in random order, of at most so many training rows and as many test rows."""
    arrays = load_arrays(directory, name)
    order = np.random.RandomState(SEED).permutation(len(arrays["X"]))
    train, test = (part[:rows] for part in np.split(order, [int(SHARE * len(order))]))
    x, test_x = standardise(*(arrays["X"][part] for part in (train, test)))
    y, test_y = standardise(*(arrays["y"][part] for part in (train, test)))
    return Data(*(torch.as_tensor(part).float() for part in (x, y, test_x, test_y)))


def pinball(quantiles: np.ndarray, y: np.ndarray) -> float:
    """Return the CRPS of the ten quantiles in between."""
    levels, error = np.array(LEVELS[:-2]), y[:, None] - quantiles[:, :-2]
    return float(2 * np.maximum(levels * error, (levels - 1) * error).mean())


def judged(predicted: Predicted, y: torch.Tensor) -> dict[str, Any]:
    mean, target = np.asarray(predicted.mean, dtype=np.float64), y.double().numpy()
    found = {"rmse": math.sqrt(np.square(mean - target).mean())}
    quantiles = predicted.quantiles
    if predicted.variance is not None:
        variance = np.asarray(predicted.variance, dtype=np.float64)
        found["nll"] = scores(torch.as_tensor(mean), torch.as_tensor(variance), y)["nll"]
        normal = torch.special.ndtri(torch.tensor(LEVELS, dtype=torch.float64)).numpy()
        quantiles = mean[:, None] + np.sqrt(variance)[:, None] * normal
    if quantiles is not None:
        found["crps"] = pinball(quantiles, target)
        found["coverage"] = float(((quantiles[:, -2] <= target) & (target <= quantiles[:, -1])).mean())
    return found


def perform(task: dict[str, Any], directory: Path) -> dict[str, Any]:
    limit_process(LIMIT, MEMORY)
    data = load(directory, task["set"], task["rows"])
    if len(data.x) > ROWS.get(task["method"], math.inf):
        return {"failed": f"not tried: more than {ROWS[task['method']]:,} rows"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        predicted = METHODS[task["method"]](data, clock := Clock())
    return {"rows": len(data.x), "inputs": data.x.shape[1], "test": len(data.test_x), **judged(predicted, data.test_y),
            "cpu": clock.seconds, "peak_memory_mb": high_water_mb(), **predicted.about,
            "warnings": sorted({str(one.message).split("\n")[0][:300] for one in caught})}  # fmt: skip


def problem(options: argparse.Namespace) -> dict[str, Any]:
    return {"rows": 300 if options.quick else None, "share": SHARE, "seed": SEED, "limit": LIMIT, "memory": MEMORY,
            "svgp": {"points": POINTS, "training": TRAINING}, "levels": LEVELS}  # fmt: skip


def groups(options: argparse.Namespace, directory: Path, results: dict[str, Any]) -> Iterator[Group]:
    rows = problem(options)["rows"]
    for method in METHODS:
        for name in SETS[:2] if options.quick else SOME.get(method, SETS):
            task = {"set": name, "method": method, "rows": rows}
            yield Group(("runs", name), [(method, task)], needs=(name,))


def _total(run: dict[str, Any]) -> float:
    return sum(run["cpu"].values())


SHOWN: dict[str, tuple[str, Callable[[dict[str, Any]], float | None], Callable[[float | None], str]]] = {
    "Root mean square error": ("rmse", lambda run: run.get("rmse"), number),
    "CRPS": ("crps", lambda run: run.get("crps"), number),
    "Of 95% intervals, covered": ("coverage", lambda run: run.get("coverage"), number),
    "Negative log density": ("nll", lambda run: run.get("nll"), number),
    "Processor seconds, fits and predictions": ("cpu", _total, number),
}


def _summary(runs: dict[str, dict[str, Any]], methods: list[str]) -> str:
    """Return a row a method, over the sets that it did: errors over the least of all methods, coverage, seconds."""
    rows = []
    for method in methods:
        done = {name: by[method] for name, by in runs.items() if "rmse" in by.get(method, {})}
        cells: list[Any] = [method, f"{len(done)} of {len(runs)}"]
        for key in ("rmse", "crps"):
            least = {name: min(one[key] for one in runs[name].values() if key in one) for name in done}
            ratios = [run[key] / least[name] for name, run in done.items() if key in run]
            cells += [sum(one == 1 for one in ratios), number(median(ratios))] if ratios else [None, None]
        covered = [run["coverage"] for run in done.values() if "coverage" in run]
        cells += [f"{min(covered):.3f} to {max(covered):.3f}" if covered else None]
        cells += [number(median([run["cpu"]["fit"] for run in done.values()])),
                  number(median([_total(run) for run in done.values()]))]  # fmt: skip
        rows.append(cells)
    return table(["method", "sets", "least RMSE", "RMSE over the least", "least CRPS", "CRPS over the least",
                  "95% covers", "fit of the mean, CPU s", "all, CPU s"], rows)  # fmt: skip


def report(results: dict[str, Any]) -> str:
    runs = {name: results["runs"][name] for name in SETS if name in results["runs"]}
    methods = [method for method in METHODS if any("rmse" in by.get(method, {}) for by in runs.values())]
    lines = ["# Tables without options", "", describe(results["machine"]), "",
             "Medians over the sets that a method did, of errors over the least error of all methods on the set:", "",
             _summary(runs, methods), ""]  # fmt: skip
    for title, (_, value, shown) in SHOWN.items():
        rows = []
        for name, by in runs.items():
            about = next(run for run in by.values() if "rows" in run)
            cells = [shown(value(run)) if "rmse" in (run := by.get(method, {})) else None for method in methods]
            rows.append([name, f"{about['rows']:,}", about["inputs"], *cells])
        lines += [f"## {title}", "", table(["set", "rows", "inputs", *methods], rows), ""]
    said = [(f"{name}, {method}", by[method]) for name, by in runs.items() for method in METHODS if method in by]
    lines += ["## Failed", "", *[f"- {label}: {run['failed']}" for label, run in said if "failed" in run], ""]
    lines += ["## Warnings", ""]
    lines += [f"- {label}: {' / '.join(run['warnings'])}" for label, run in said if run.get("warnings")]
    return "\n".join(lines) + "\n"


BENCHMARK = Benchmark(
    doc=__doc__,
    name="tables",
    quick="300 training rows of two sets",
    problem=problem,
    groups=groups,
    perform=perform,
    report=report,
    say=lambda run: f"RMSE {run['rmse']:.3f}, {_total(run):.0f} CPU s",
    alone=Path(__file__).resolve(),
    failures=True,
    rival=lambda task: not task["method"].startswith("sketchgp"),
    versions=("scikit-learn", "lightgbm", "catboost", "xrfm", "numba"),
)


if __name__ == "__main__":
    BENCHMARK.main()
