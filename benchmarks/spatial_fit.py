"""Fits on all 105,000 rows of two spatial fields, on two cores, in less than 8 GB.

Land surface temperatures seen by MODIS (the data of the competition of Heaton et al. 2019: a grid of 500 x 300 cells,
105,569 of them given, 42,740 held out in large patches, as clouds would), and heights of a forest's canopy (105,504
places given, 83,213 held out, with the tree cover seen by Landsat as third input).  One Gaussian process on all given
places: constant mean, Matern-3/2 with a lengthscale for each input, noise; float32.  The hyperparameters are found by
``sketchgp.fit``: on 2,000 random rows by exact arithmetic first, then on all rows by Vecchia's approximation, and by
the exact likelihood until the loss has settled or the given time is over; predictions by ``sketchgp.predict``, with
low-rank variances calibrated by exact ones at points that are left out.

GPBoost, where it is installed (``pip install gpboost``): the same model by Vecchia's approximation alone, with its own
20 neighbours, optimiser and predictions; float64.  The exact loss of what it finds is estimated by sketchgp's probes.

The places held out by both sets lie in patches and lines of their own, most of them farther from all given ones than
the field reaches.  So 5,000 random given places are predicted, too, from all others, with the same hyperparameters.

Recorded: loss and seconds of each step, the work of each solve, the hyperparameters; at the held-out places root mean
square and mean absolute error, negative log density, continuous ranked probability score and coverage of 95%
intervals; seconds, peak memory.  Beside it the same from 2,000 random rows alone.  A map shows mean and deviation.

    python benchmarks/spatial_fit.py --data DIRECTORY --only bcef      # half an hour on two cores
    python benchmarks/spatial_fit.py --data DIRECTORY                  # both fields, an hour; each task resumes
    python benchmarks/spatial_fit.py --data DIRECTORY --minutes 30     # on all rows no step begins after so long
    python benchmarks/spatial_fit.py --data DIRECTORY --exponential    # that kernel on the temperatures, too: slower
    python benchmarks/spatial_fit.py --data DIRECTORY --quick          # 3,000 rows, a minute
    python benchmarks/spatial_fit.py --report                          # table and map again, nothing measured
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import math
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpytorch
import numpy as np
import torch
from gpytorch.kernels import MaternKernel, ScaleKernel
from torch import Tensor

import sketchgp
from common import describe, load_arrays, number, scores, standardise, table
from measure import high_water_mb
from runner import Benchmark, Group

SETS = {"modis_temps_heaton": "°C", "bcef_canopy": "m"}  # and the unit of the targets
KERNELS = {"Matern-3/2": 1.5, "exponential": 0.5}
FULL = {"rows": None, "subset": 2000, "iterations": 30, "memory": 8.0, "budget": 5.0, "seed": 0}
QUICK = FULL | {"rows": 3000, "subset": 1000, "iterations": 3}
INSIDE = 5000  # places among the given ones that are predicted, too: at most a tenth of them
CELLS = 150  # of a map, along its longer side
# Root mean square errors on the same held-out cells, from table 3 of Heaton et al. (Journal of Agricultural, Biological
# and Environmental Statistics 24, 2019), as retold at russellgoebel.com/posts/kriging-competition.
LITERATURE = {"SPDE": 1.53, "LatticeKrig": 1.68, "periodic embedding": 1.79, "Gapfill": 1.86, "laGP": 2.08}


class Field(gpytorch.models.ExactGP):
    """Constant mean, one kernel."""

    def __init__(self, x: Tensor, y: Tensor, nu: float) -> None:
        super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = ScaleKernel(MaternKernel(nu=nu, ard_num_dims=x.shape[1]))

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def with_found(model: Field, found: dict[str, Any]) -> Field:
    """The model with hyperparameters that a fit has found."""
    model.covar_module.base_kernel.lengthscale = torch.tensor(found["lengthscales"])
    model.covar_module.outputscale, model.likelihood.noise = found["outputscale"], found["noise"]
    model.mean_module.initialize(constant=found["mean"])
    return model


class Places:
    """Given and held-out ones, float32, standardised by the given ones.

    :param rows: at most so many of each, drawn at random; None for all.
    """

    def __init__(self, directory: Path, name: str, rows: int | None) -> None:
        arrays = load_arrays(directory, name)
        self.raw, self.measured, self.given = arrays["X"], arrays["y"].astype(np.float64), arrays["is_test"] == 0
        self.shift, self.scale = self.measured[self.given].mean(), self.measured[self.given].std()
        parts = [np.flatnonzero(self.given), np.flatnonzero(~self.given)]
        if rows is not None:
            parts = [np.sort(np.random.RandomState(0).permutation(part)[:rows]) for part in parts]
        self.whole = rows is None
        x, test_x = standardise(*(arrays["X"][part] for part in parts))
        y, test_y = ((self.measured[part] - self.shift) / self.scale for part in parts)
        self.x, self.y, self.test_x, self.test_y = (torch.as_tensor(part).float() for part in (x, y, test_x, test_y))


def field_scores(mean: Tensor, variance: Tensor, y: Tensor, scale: float) -> dict[str, float]:
    """Of predicted observations, errors and CRPS in degrees; the density of a target in its own deviations.

    CRPS of a Gaussian: Gneiting and Raftery (Journal of the American Statistical Association 102, 2007), equation 21's
    negative.
    """
    found = scores(mean, variance, y)
    mean, y, deviation = mean.double(), y.double(), variance.double().sqrt()
    z = (y - mean) / deviation
    normal = torch.distributions.Normal(0.0, 1.0)
    crps = deviation * (z * (2 * normal.cdf(z) - 1) + 2 * normal.log_prob(z).exp() - 1 / math.sqrt(math.pi))
    errors = {"rmse": found["rmse"], "mae": float((y - mean).abs().mean()), "crps": float(crps.mean())}
    return {**found, **{name: scale * error for name, error in errors.items()}}


def work(solves: list[Any]) -> list[dict[str, Any]]:
    """What each solve did."""
    return [
        {"n": s.n, "columns": s.columns, "iterations": s.work.get("iterations"), "rank": s.rank,
         "seconds": s.seconds, "setup_seconds": s.setup_seconds, "converged": s.converged}
        for s in solves
    ]  # fmt: skip


def rows_of(places: Places, sizes: dict[str, Any], everything: bool) -> Tensor:
    """Which of the given places a fit has: all, or so many random ones."""
    order = np.random.RandomState(sizes["seed"]).permutation(len(places.x))
    return torch.as_tensor(np.sort(order if everything else order[: sizes["subset"]]))


def inside(places: Places, nu: float, sizes: dict[str, Any], everything: bool, found: dict[str, Any]) -> dict[str, Any]:
    """Scores at some of the given places, predicted from the others that a fit had.

    :param found: its hyperparameters.
    """
    order = np.random.RandomState(sizes["seed"] + 1).permutation(len(places.x))
    hidden = torch.as_tensor(order[: min(INSIDE, len(order) // 10)])
    chosen = rows_of(places, sizes, everything)
    chosen = chosen[~torch.isin(chosen, hidden)]
    model = with_found(Field(places.x[chosen], places.y[chosen], nu), found)
    began = time.perf_counter()
    sketchgp.accelerate(model, variance="low_rank")
    predicted = sketchgp.predict(model, places.x[hidden], progress=False)
    assert predicted.observation_variance is not None and predicted.report is not None
    return {
        "rows": len(chosen), "test": len(hidden), "seconds": time.perf_counter() - began,
        "converged": predicted.report.converged,
        **field_scores(predicted.mean, predicted.observation_variance, places.y[hidden], places.scale),
    }  # fmt: skip


def fitted(places: Places, nu: float, sizes: dict[str, Any], everything: bool, minutes: float) -> dict[str, Any]:
    """Fit on all rows, or on so many random ones alone; predict; score."""
    chosen = rows_of(places, sizes, everything)
    model = sketchgp.accelerate(Field(places.x[chosen], places.y[chosen], nu), variance="low_rank")
    began, processor = time.perf_counter(), time.process_time()

    def late(step: int, loss: float) -> bool:
        return time.perf_counter() - began > 60 * minutes

    with sketchgp.record_solves() as solves:
        history = sketchgp.fit(
            model,
            start="subset" if everything else "model",
            iterations=sizes["iterations"] if everything else None,
            seed=sizes["seed"],
            callback=late if everything else None,
            progress=False,
        )
    fit_seconds, fit_cpu, of_fit = time.perf_counter() - began, time.process_time() - processor, work(solves)
    began = time.perf_counter()
    with sketchgp.record_solves() as solves:
        found = sketchgp.predict(model, places.test_x, progress=False)
    assert found.observation_variance is not None
    error = found.variance_standard_error
    result = {
        "rows": len(model.train_targets), "test": len(places.test_x), "history": str(history),
        "reason": history.reason, "objective": history.objective, "losses": history.losses,
        "step_seconds": history.seconds, "gradients": history.gradients, "evaluations": history.evaluations,
        "fit_seconds": fit_seconds, "fit_cpu_seconds": fit_cpu, "fit_solves": of_fit,
        "predict_seconds": time.perf_counter() - began,
        "predict_solves": work(solves), "cpu_seconds": time.process_time() - processor,
        "variance": found.variance_method, "variance_check": found.variance_check,
        "variance_standard_error": error if error is None else float(error.median()),
        "lengthscales": model.covar_module.base_kernel.lengthscale.reshape(-1).tolist(),
        "outputscale": model.covar_module.outputscale.item(), "noise": model.likelihood.noise.item(),
        "mean": model.mean_module.constant.item(), "scale": places.scale,
        **field_scores(found.mean, found.observation_variance, places.test_y, places.scale),
    }  # fmt: skip
    if everything:
        result["loss"], result["loss_error"] = history.by_other_probes or (history.best_loss, 0.0)
    if everything and places.whole:
        result["map"] = cells(places, found)
    return result


def by_gpboost(places: Places, nu: float) -> dict[str, Any]:
    """Fit on all rows, and predict, by GPBoost; its loss by sketchgp's probes."""
    import gpboost

    x, y, test_x = (part.double().numpy() for part in (places.x, places.y, places.test_x))
    began, processor = time.perf_counter(), time.process_time()
    rival = gpboost.GPModel(
        gp_coords=x, cov_function="matern_ard", cov_fct_shape=nu, likelihood="gaussian", gp_approx="vecchia", seed=0,
        num_parallel_threads=torch.get_num_threads(),
    )  # fmt: skip
    rival.fit(y=y, X=np.ones((len(y), 1)), params={"trace": False})
    fit_seconds, fit_cpu = time.perf_counter() - began, time.process_time() - processor
    began = time.perf_counter()
    predicted = rival.predict(gp_coords_pred=test_x, X_pred=np.ones((len(test_x), 1)), predict_var=True)
    predict_seconds = time.perf_counter() - began
    noise, outputscale, *lengthscales = map(float, np.asarray(rival.get_cov_pars()).reshape(-1))
    mean = float(np.asarray(rival.get_coef()).reshape(-1)[0])
    found = {"lengthscales": lengthscales, "outputscale": outputscale, "noise": noise, "mean": mean}
    model = with_found(Field(places.x, places.y, nu), found)
    history = sketchgp.fit(sketchgp.accelerate(model), start="model", objective="probes", iterations=1, progress=False)
    return {
        "rows": len(y), "test": len(test_x), "version": gpboost.__version__, "fit_seconds": fit_seconds,
        "fit_cpu_seconds": fit_cpu, "predict_seconds": predict_seconds, "own_loss":
        float(rival.get_current_neg_log_likelihood()) / len(y), "loss": history.losses[0],
        "loss_error": history.standard_errors[0], **found,
        **field_scores(*(torch.as_tensor(predicted[part]) for part in ("mu", "var")), places.test_y, places.scale),
    }  # fmt: skip


def cells(places: Places, found: Any) -> dict[str, Any]:
    """Averages over squares of the field, from the south on, from the west on: of what was measured, of the same with
    predictions in place of what was held out, and of the deviation of these predictions; None where there is none."""
    low, side = places.raw[:, :2].min(axis=0), np.ptp(places.raw[:, :2], axis=0)
    columns, rows = ((places.raw[:, :2] - low) / side.max() * (CELLS * (1 - 1e-9))).astype(int).T
    held = ~places.given
    mean, deviation = places.measured.copy(), np.full(len(held), np.nan)
    mean[held] = places.shift + places.scale * found.mean.double().numpy()
    assert found.observation_variance is not None
    deviation[held] = places.scale * found.observation_variance.double().sqrt().numpy()
    shape = (rows.max() + 1, columns.max() + 1)
    averages = {}
    for name, values in {"measured": places.measured, "mean": mean, "deviation": deviation}.items():
        known = ~np.isnan(values)
        total, count = np.zeros(shape), np.zeros(shape)
        np.add.at(total, (rows[known], columns[known]), values[known])
        np.add.at(count, (rows[known], columns[known]), 1)
        with np.errstate(invalid="ignore"):
            averages[name] = total / count
    return {
        name: [[None if math.isnan(v) else round(float(v), 2) for v in line] for line in grid]
        for name, grid in averages.items()
    }


def perform(task: dict[str, Any], directory: Path) -> dict[str, Any]:
    sizes = task["sizes"]
    with contextlib.suppress(ImportError, ValueError):  # what the claim is
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (int(sizes["memory"] * 2**30), resource.RLIM_INFINITY))
    with warnings.catch_warnings(record=True) as caught, sketchgp.settings.memory_budget(sizes["budget"] * 2**30):
        warnings.simplefilter("always")
        places = Places(directory, task["set"], sizes["rows"])
        nu, everything = KERNELS[task["kernel"]], task["everything"]
        if task["found"] == "GPBoost":
            found = by_gpboost(places, nu)
        elif task["found"] is None:
            found = fitted(places, nu, sizes, everything, task["minutes"])
        else:
            found = inside(places, nu, sizes, everything, task["found"])
    said = sorted({str(w.message).split("\n")[0][:300] for w in caught})
    return {"set": task["set"], "kernel": task["kernel"], "version": sketchgp.__version__, **found, "warnings": said,
            "peak_memory_mb": high_water_mb(), "threads": torch.get_num_threads(), "minutes": task["minutes"],
            "budget": sizes["budget"]}  # fmt: skip


def problem(options: argparse.Namespace) -> dict[str, Any]:
    return {**(QUICK if options.quick else FULL), "kernels": KERNELS}


def groups(options: argparse.Namespace, directory: Path, results: dict[str, Any]) -> Iterator[Group]:
    sizes = QUICK if options.quick else FULL
    wanted = [(name, "Matern-3/2", everything) for name in SETS for everything in (True, False)]
    if options.exponential:
        wanted += [("modis_temps_heaton", "exponential", everything) for everything in (True, False)]
    for name, kernel, everything in wanted:
        label = f"{name}, {kernel}, {'all' if everything else 'random'} rows"
        task = {"set": name, "kernel": kernel, "everything": everything, "sizes": sizes, "minutes": options.minutes}
        yield Group(("runs",), [(label, {**task, "found": None})], needs=(name,))
        if everything and importlib.util.find_spec("gpboost"):
            yield Group(("rivals",), [(label, {**task, "found": "GPBoost"})], needs=(name,))
        if (run := results.get("runs", {}).get(label)) is not None:
            found = {key: run[key] for key in ("lengthscales", "outputscale", "noise", "mean")}
            yield Group(("inside",), [(label, {**task, "found": found})], needs=(name,))


def _row(run: dict[str, Any]) -> list[Any]:
    loss = f"{run['loss']:.4f} ± {run['loss_error']:.4f}" if "loss" in run else "-"
    cpu = number(run["fit_cpu_seconds"] / 60) if "fit_cpu_seconds" in run else "-"  # of earlier versions
    return [
        f"{run.get('method', 'sketchgp')}, {run['kernel']}, {run['rows']:,} rows", loss, *_scores(run),
        number(run["fit_seconds"] / 60), cpu, number(run["predict_seconds"] / 60),
        number(run["peak_memory_mb"] / 1000),
    ]  # fmt: skip


def _scores(run: dict[str, Any]) -> list[str]:
    return [f"{run[key]:.3f}" for key in ("rmse", "mae", "crps", "nll", "coverage")]


def _details(run: dict[str, Any]) -> str:
    losses = ", ".join(f"{loss:.4f}" for loss in run["losses"])
    counts = ", ".join(f"{solve['iterations']:.0f}" for solve in run["fit_solves"] if solve["iterations"])
    check = run["variance_check"]
    made = f" By sketchgp {run['version']}." if "version" in run else ""
    compared = f", median ratio to exact ones {check['median_ratio']:.3f}" if check else ""
    return (
        f"- {run['kernel']}, {run['rows']:,} rows: {run['history']}. Losses: {losses}. Lengthscales "
        f"{', '.join(map(number, run['lengthscales']))}, output scale {number(run['outputscale'])}, noise "
        f"{number(run['noise'])}. Iterations of the solves: {counts or 'none, factorized'}. Variances: "
        f"{run['variance']}{compared}, relative standard error {number(run['variance_standard_error'])}.{made}"
    )


def report(results: dict[str, Any]) -> str:
    lines = ["# Spatial fields of 105,000 rows", "", describe(results["machine"]), ""]
    for name, unit in SETS.items():
        runs = [run for run in results["runs"].values() if run["set"] == name]
        if not runs:
            continue
        header = ["model", "loss a row, by probes", f"RMSE, {unit}", f"MAE, {unit}", f"CRPS, {unit}", "NLL",
                  "95% covers", "fit, minutes", "fit, CPU minutes", "prediction, minutes",
                  "peak memory, GB"]  # fmt: skip
        rivals = [run for run in results.get("rivals", {}).values() if run["set"] == name]
        rows = [_row(run) for run in (*runs, *({**run, "method": f"GPBoost {run['version']}"} for run in rivals))]
        about = f"{runs[0]['test']:,} places are held out. NLL is of targets in deviations of the given ones."
        if name == "modis_temps_heaton":
            rows += [
                [f"*literature: {method}*", "-", f"*{rmse:.2f}*", *["-"] * 8] for method, rmse in LITERATURE.items()
            ]
            about += (
                " The literature's figures are of other methods on the same held-out cells (Heaton et al. 2019); they "
                "were not measured here."
            )
        lines += [f"## {name}", "", about, "", table(header, rows), ""]
        beside = [run for run in results.get("inside", {}).values() if run["set"] == name]
        if beside:
            head = ["model", "rows", *header[2:7], "prediction, minutes"]
            rows = [[run["kernel"], f"{run['rows']:,}", *_scores(run), number(run["seconds"] / 60)] for run in beside]
            lines += [f"{beside[0]['test']:,} of the given places, from all others that the fit had:", "",
                      table(head, rows), ""]  # fmt: skip
        lines += [*map(_details, runs), ""]
    return "\n".join(lines)


def pictures(results: dict[str, Any], path: Path) -> None:
    """Of each field as given, with what was predicted, and the deviation of predictions."""
    for run in results["runs"].values():
        if run.get("map"):
            picture(run, path.with_name(f"{path.stem}_{run['set']}.png"))


def picture(run: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    grids = {name: np.array(grid, dtype=float) for name, grid in run["map"].items()}
    held = ~np.isnan(grids["deviation"])
    given = np.where(held, np.nan, grids["measured"])
    low, high = np.nanpercentile(grids["measured"], [1, 99])
    height, width = given.shape
    figure, axes = plt.subplots(2, 2, figsize=(11, 1.2 + 11 * height / width), constrained_layout=True)
    panels = [
        ("given", given, "inferno", low, high),
        ("given and predicted", grids["mean"], "inferno", low, high),
        ("measured", grids["measured"], "inferno", low, high),
        ("deviation of a prediction", grids["deviation"], "viridis", 0, np.nanmax(grids["deviation"])),
    ]
    for axis, (title, grid, colours, low, high) in zip(axes.flat, panels, strict=True):
        drawn = axis.imshow(grid, origin="lower", cmap=colours, vmin=low, vmax=high, interpolation="nearest")
        axis.set_title(title)
        axis.set_xticks([])
        axis.set_yticks([])
        figure.colorbar(drawn, ax=axis, label=SETS[run["set"]])
    figure.savefig(path, dpi=110)
    plt.close(figure)


def more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--exponential", action="store_true", help="that kernel on the temperatures, too")
    parser.add_argument("--minutes", type=float, default=90.0, help="after which no step on all rows begins (90)")


BENCHMARK = Benchmark(
    doc=__doc__,
    name="spatial_fit",
    quick="3,000 rows, a minute",
    problem=problem,
    groups=groups,
    perform=perform,
    report=report,
    picture=pictures,
    say=lambda run: f"RMSE {run['rmse']:.3f}, NLL {run['nll']:.3f}, {run.get('fit_seconds', run.get('seconds')):.0f} s",
    alone=Path(__file__).resolve(),
    options=more,
)


if __name__ == "__main__":
    BENCHMARK.main()
