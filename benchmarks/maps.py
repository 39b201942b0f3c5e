"""Fits and predictions of spatial data: sketchgp beside GPBoost and GPyTorch's KISS-GP, the same model for all.

- ``argo2016_temp100``: temperatures of the sea at longitude, latitude and day; 0.64 of the rows train, all others test.
- ``modis_temps_heaton``: land surface temperatures (the competition of Heaton et al. 2019), a lattice of 500 x 300
  cells, 105,569 given, 42,740 held out in large patches, as clouds would.  The mean is linear in both coordinates.
- ``bcef_canopy``: heights of a forest's canopy at 105,504 places, 83,213 held out on lines of flight of their own, most
  of them farther from all given ones than the field reaches.  Coordinates alone, as in the literature on spatial data:
  the tree cover, the third input, is left out.  With the same hyperparameters 5,000 random given places are predicted,
  too, from all others.

- ``lattice``, ``scattered``, ``series``: draws from the model with known hyperparameters (Matern-3/2, noise 0.09),
  which are predicted alone: up to a million cells of a map with square gaps, as many random places, 30 years of hours
  with days left out.  20,000 places that are not given are predicted.

One kernel (exponential or Matern-3/2) with a lengthscale for each input, an output scale, noise of at least 1e-6 (that
of GPBoost has no limit); inputs and targets standardised by the given rows.

- sketchgp: ``accelerate(variance="low_rank")``, ``fit`` and ``predict`` without options; float32.
- GPBoost (``pip install gpboost``): Vecchia's approximation with so many neighbours, its own optimiser and predictions
  otherwise (those have twice the neighbours); float64.
- KISS-GP: GPyTorch's ``GridInterpolationKernel`` with as many grid points as rows (``choose_grid_size``), 50 steps of
  Adam at 0.1, stopped after 300 processor seconds, variances by ``fast_pred_var``; float32.

A run that takes more than 1,200 processor seconds, or 10 GB, has failed.  Left out are GPyTorch's ``GridKernel``, which
needs all cells of a grid and so applies to none of these data, and pyINLA: version 0.1.13 installs, and at its first
call downloads INLA's programme from a site of its own, which the machine of these results did not reach.

Recorded: processor and wall seconds of fit and prediction, peak memory of both together, hyperparameters; root mean
square and mean absolute error, continuous ranked probability score, negative log density, coverage of 95% intervals.
The loss of each method's hyperparameters is by sketchgp's probes, the same for all, that no fit has seen.

    python benchmarks/maps.py --data DIRECTORY              # two hours on one core; each task resumes
    python benchmarks/maps.py --data DIRECTORY --only argo  # six minutes
    python benchmarks/maps.py --data DIRECTORY --quick      # 1,500 rows
    python benchmarks/maps.py --report                      # tables and maps again, nothing measured
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpytorch
import numpy as np
import torch
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import GridInterpolationKernel, MaternKernel, ScaleKernel
from torch import Tensor

import sketchgp
from common import describe, load_arrays, number, scores, standardise, table
from hyperparameters_rivals import adam
from measure import high_water_mb, limit_process
from runner import Benchmark, Group
from sketchgp.fitting.history import FitHistory


@dataclass(frozen=True)
class Field:
    """A data set and its model.

    :ivar inputs: so many of the columns; :ivar trend: whether the mean is linear in them, or constant.
    :ivar neighbors: those of GPBoost's runs; :ivar inside: whether given places are predicted from others, too.
    """

    unit: str
    kernel: str
    inputs: int
    trend: bool
    neighbors: tuple[int, ...]
    inside: bool = False


FIELDS = {
    "argo2016_temp100": Field("°C", "Matern-3/2", 3, False, (30,)),
    "modis_temps_heaton": Field("°C", "exponential", 2, True, (20, 40)),
    "bcef_canopy": Field("m", "Matern-3/2", 2, False, (20,), inside=True),
}


@dataclass(frozen=True)
class Drawn:
    """A field drawn from its prior: cells of a lattice with gaps, or as many random places.

    :ivar sides: of the lattices that are measured, in cells; :ivar lengthscale: in cells, too.
    :ivar gap: cells along a gap; 0 for random places.
    """

    dimensions: int
    sides: tuple[int, ...]
    lengthscale: float
    gap: int


DRAWN = {
    "series": Drawn(1, (262_980,), 12, 24),
    "lattice": Drawn(2, (316, 1000), 50, 10),
    "scattered": Drawn(2, (316, 1000), 50, 0),
}
NOISE, GIVEN, FEATURES, HELD = 0.09, 0.8, 1000, 20_000  # of what is drawn: of cosines whose sum is the field
KERNELS = {"Matern-3/2": 1.5, "exponential": 0.5}
FRACTION = 0.64  # of the rows train, where the data set does not say which
FULL = {"rows": None, "inside": 5000, "budget": 5.0, "seed": 0}
QUICK = FULL | {"rows": 1500, "inside": 150}
LEAST = 1e-6  # noise of sketchgp's models: GPyTorch's own limit, 1e-4, is above what the temperatures have
CELLS = 150  # of a map, along its longer side
OURS, KISS = "sketchgp", "KISS-GP"
STEPS, FITTING, LIMIT, MEMORY = 50, 300, 1200, 10  # of KISS-GP's fit; processor seconds and gigabytes of a run
SCORES = ("rmse", "mae", "crps", "nll", "coverage")
# Root mean square errors on the same held-out cells, from table 3 of Heaton et al. (Journal of Agricultural, Biological
# and Environmental Statistics 24, 2019), as retold at russellgoebel.com/posts/kriging-competition.
LITERATURE = {"SPDE": 1.53, "LatticeKrig": 1.68, "periodic embedding": 1.79, "Gapfill": 1.86, "laGP": 2.08}


class Model(gpytorch.models.ExactGP):
    """One kernel, interpolated from so many points along each side of a grid or not; a constant or a linear mean."""

    def __init__(self, x: Tensor, y: Tensor, field: Field, grid_size: int | None = None) -> None:
        super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood(noise_constraint=GreaterThan(LEAST)))
        torch.manual_seed(0)  # a linear mean begins with random weights
        self.mean_module = gpytorch.means.LinearMean(x.shape[1]) if field.trend else gpytorch.means.ConstantMean()
        kernel: Any = MaternKernel(nu=KERNELS[field.kernel], ard_num_dims=x.shape[1])
        if grid_size is not None:
            kernel = GridInterpolationKernel(kernel, grid_size=grid_size, num_dims=x.shape[1])
        self.covar_module = ScaleKernel(kernel)

    @property
    def matern(self) -> MaternKernel:
        kernel = self.covar_module.base_kernel
        return kernel if isinstance(kernel, MaternKernel) else kernel.base_kernel

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    def found(self) -> dict[str, Any]:
        """Return the hyperparameters; ``mean`` has the constant first, then the weights."""
        mean = [part.reshape(-1) for part in self.mean_module.parameters()]
        return {
            "noise": self.likelihood.noise.item(), "outputscale": self.covar_module.outputscale.item(),
            "lengthscales": self.matern.lengthscale.reshape(-1).tolist(),
            "mean": torch.cat(mean[::-1]).tolist(),
        }  # fmt: skip

    def take(self, found: dict[str, Any]) -> Model:
        """Set the hyperparameters, and return the model."""
        self.matern.lengthscale = torch.tensor(found["lengthscales"])
        self.covar_module.outputscale, self.likelihood.noise = found["outputscale"], found["noise"]
        constant, *weights = found["mean"]
        if weights:
            self.mean_module.initialize(weights=torch.tensor(weights)[:, None], bias=torch.tensor([constant]))
        else:
            self.mean_module.initialize(constant=constant)
        return self


class Places:
    """Given and held-out places, float32, standardised by the given ones.

    :param rows: at most so many of each, drawn at random; None for all.
    """

    def __init__(self, directory: Path, name: str, rows: int | None) -> None:
        arrays, self.field = load_arrays(directory, name), FIELDS[name]
        self.raw, self.measured = arrays["X"][:, : self.field.inputs], arrays["y"].astype(np.float64)
        if "is_test" in arrays:
            parts = [np.flatnonzero(arrays["is_test"] == 0), np.flatnonzero(arrays["is_test"])]
        else:
            order = np.random.RandomState(0).permutation(len(self.raw))
            parts = np.split(order, [int(FRACTION * len(order))])
        self.whole = rows is None
        if rows is not None:
            parts = [np.sort(np.random.RandomState(0).permutation(part)[:rows]) for part in parts]
        self.given, self.held = parts
        self.shift, self.scale = self.measured[self.given].mean(), self.measured[self.given].std()
        x, test_x = standardise(*(self.raw[part] for part in parts))
        y, test_y = ((self.measured[part] - self.shift) / self.scale for part in parts)
        self.x, self.y, self.test_x, self.test_y = (torch.as_tensor(part).float() for part in (x, y, test_x, test_y))

    def inside(self, count: int) -> None:
        """Hold out random ones of the given places, at most a tenth, in place of those that are held out."""
        order = torch.as_tensor(np.random.RandomState(1).permutation(len(self.x)))
        hidden, kept = order.split([(size := min(count, len(order) // 10)), len(order) - size])
        kept = kept.sort().values
        self.test_x, self.test_y, self.x, self.y = self.x[hidden], self.y[hidden], self.x[kept], self.y[kept]


class DrawnPlaces:
    """Given and held-out places of a field drawn from its prior by random features; units are cells, and deviations."""

    whole, scale = False, 1.0

    def __init__(self, name: str, side: int) -> None:
        drawn, stream = DRAWN[name], torch.Generator().manual_seed(0)
        d = drawn.dimensions
        self.field = Field("deviations", "Matern-3/2", d, False, ())
        if drawn.gap:
            places = torch.cartesian_prod(*[torch.arange(side)] * d).reshape(-1, d)
            gaps = torch.rand([side // drawn.gap + 1] * d, generator=stream) > GIVEN
            held = gaps[tuple((places // drawn.gap).T)]
        else:
            places = side * torch.rand(side**d, d, generator=stream)
            held = torch.rand(side**d, generator=stream) > GIVEN
        test = held.nonzero().squeeze(1)
        test = test[torch.randperm(len(test), generator=stream)[:HELD]]
        rows = torch.cat([(~held).nonzero().squeeze(1), test])
        x = places[rows].float()
        normal = torch.randn(FEATURES, d + 3, dtype=torch.float64, generator=stream)
        frequencies = normal[:, :d] / normal[:, d:].square().mean(dim=1, keepdim=True).sqrt() / drawn.lengthscale
        phases = 2 * math.pi * torch.rand(FEATURES, dtype=torch.float64, generator=stream)
        values = [(part.double() @ frequencies.T + phases).cos().sum(dim=1) for part in x.split(10_000)]
        y = math.sqrt(2 / FEATURES) * torch.cat(values)
        y = (y + math.sqrt(NOISE) * torch.randn(len(y), dtype=torch.float64, generator=stream)).float()
        given = len(rows) - len(test)
        self.x, self.test_x, self.y, self.test_y = x[:given], x[given:], y[:given], y[given:]
        self.found = {"noise": NOISE, "outputscale": 1.0, "lengthscales": [drawn.lengthscale] * d, "mean": [0.0]}


class Clock:
    """Processor and wall seconds since the last look."""

    def __init__(self) -> None:
        self.times = time.process_time(), time.perf_counter()

    def look(self, what: str) -> dict[str, float]:
        (cpu, wall), self.times = self.times, (time.process_time(), time.perf_counter())
        return {f"{what}_cpu": self.times[0] - cpu, f"{what}_wall": self.times[1] - wall}


def field_scores(mean: Tensor, variance: Tensor, y: Tensor, scale: float) -> dict[str, float]:
    """Return scores of predicted observations: errors and CRPS in units of the data, the density in deviations.

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


def stages(history: FitHistory | None) -> list[dict[str, Any]]:
    """Return the fits within a fit, first to last: rows, how losses are computed, steps, seconds since the begin."""
    if history is None:
        return []
    found = {"rows": history.rows, "objective": history.objective, "steps": len(history.losses),
             "evaluations": history.evaluations, "iterations": sum(history.iterations),
             "loss": history.best_loss, "until": history.seconds[-1]}  # fmt: skip
    return [*stages(history.subset), found]


def by_sketchgp(places: Places | DrawnPlaces, found: dict[str, Any] | None) -> tuple[dict[str, Any], Tensor, Tensor]:
    """Fit and predict; with ``found`` predict alone.  Return the record, means and variances of observations."""
    model, clock, run = Model(places.x, places.y, places.field), Clock(), {}
    sketchgp.accelerate(model, variance="low_rank")
    if found is None:
        history = sketchgp.fit(model, progress=False)
        run = {**clock.look("fit"), "stages": stages(history), "reason": history.reason, "notes": history.notes,
               "at_limits": history.at_limits}  # fmt: skip
    else:
        model.take(found)
    predicted = sketchgp.predict(model, places.test_x, progress=False)
    assert predicted.observation_variance is not None
    run |= {**clock.look("predict"), "variance_check": predicted.variance_check, **model.found()}
    return run, predicted.mean, predicted.observation_variance


def by_kiss(places: Places | DrawnPlaces, found: dict[str, Any] | None) -> tuple[dict[str, Any], Tensor, Tensor]:
    """Do the same by GPyTorch's KISS-GP."""
    grid_size, run = gpytorch.utils.grid.choose_grid_size(places.x, 1.0), {}
    model, clock = Model(places.x, places.y, places.field, grid_size), Clock()
    if found is None:
        mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
        adam(model, mll, FITTING, run, STEPS)
        run = {**clock.look("fit"), "steps": run["steps"], "own_loss": run["loss"]}
    else:
        model.take(found)
    model.eval()
    means, variances = [], []
    with torch.no_grad(), gpytorch.settings.fast_pred_var():
        for part in places.test_x.split(2000):
            posterior = model.likelihood(model(part))
            means.append(posterior.mean)
            variances.append(posterior.variance)
    run |= {**clock.look("predict"), "grid_size": grid_size, **model.found()}
    return run, torch.cat(means), torch.cat(variances)


def by_gpboost(
    places: Places | DrawnPlaces, found: dict[str, Any] | None, neighbors: int
) -> tuple[dict[str, Any], Tensor, Tensor]:
    """Do the same by GPBoost."""
    import gpboost

    x, y, test_x = (part.double().numpy() for part in (places.x, places.y, places.test_x))
    clock = Clock()
    rival = gpboost.GPModel(
        gp_coords=x, cov_function="matern_ard", cov_fct_shape=KERNELS[places.field.kernel], likelihood="gaussian",
        gp_approx="vecchia", num_neighbors=neighbors, seed=0, num_parallel_threads=torch.get_num_threads(),
    )  # fmt: skip
    if found is not None:  # its predictions with covariates need a fit: the mean is taken off
        assert not places.field.trend
        parameters = np.array([found["noise"], found["outputscale"], *found["lengthscales"]])
        predicted = rival.predict(y=y - found["mean"][0], gp_coords_pred=test_x, cov_pars=parameters, predict_var=True)
        run = {**clock.look("predict"), **found}
        return run, torch.as_tensor(predicted["mu"]) + found["mean"][0], torch.as_tensor(predicted["var"])

    def covariates(at: np.ndarray) -> np.ndarray:
        return np.column_stack([np.ones(len(at)), *(at.T if places.field.trend else ())])

    rival.fit(y=y, X=covariates(x), params={"trace": False})
    run = clock.look("fit")
    predicted = rival.predict(gp_coords_pred=test_x, X_pred=covariates(test_x), predict_var=True)
    noise, outputscale, *lengthscales = map(float, np.asarray(rival.get_cov_pars()).reshape(-1))
    run |= {
        **clock.look("predict"), "package": gpboost.__version__, "noise": noise, "outputscale": outputscale,
        "own_loss": float(rival.get_current_neg_log_likelihood()) / len(y), "lengthscales": lengthscales,
        "mean": list(map(float, np.asarray(rival.get_coef()).reshape(-1))),
    }  # fmt: skip
    return run, torch.as_tensor(predicted["mu"]), torch.as_tensor(predicted["var"])


def loss(places: Places, found: dict[str, Any]) -> dict[str, float]:
    """Return the loss a row by probes that no fit has seen, and its standard error; nothing below the least noise."""
    if found["noise"] <= LEAST:
        return {}
    model = sketchgp.accelerate(Model(places.x, places.y, places.field).take(found))
    history = sketchgp.fit(model, start="model", objective="probes", iterations=1, seed=1, progress=False)
    return {"loss": history.losses[0], "loss_error": history.standard_errors[0]}


def cells(places: Places, mean: Tensor, variance: Tensor) -> dict[str, Any]:
    """Return averages over squares of the field, from the south on, from the west on, None where there is none.

    They are of what was measured, of the same with predictions in place of what was held out, and of the deviation of
    these predictions.
    """
    low, side = places.raw.min(axis=0), np.ptp(places.raw, axis=0)
    columns, rows = ((places.raw - low) / side.max() * (CELLS * (1 - 1e-9))).astype(int).T
    means, deviation = places.measured.copy(), np.full(len(places.measured), np.nan)
    means[places.held] = places.shift + places.scale * mean.double().numpy()
    deviation[places.held] = places.scale * variance.double().sqrt().numpy()
    shape = (rows.max() + 1, columns.max() + 1)
    averages = {}
    for name, values in {"measured": places.measured, "mean": means, "deviation": deviation}.items():
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
    sizes, found, method = task["sizes"], task["found"], task["method"]
    limit_process(LIMIT, MEMORY)
    places: Places | DrawnPlaces
    if task["set"] in DRAWN:
        places = DrawnPlaces(task["set"], task["side"])
        found = places.found
    else:
        places = Places(directory, task["set"], sizes["rows"])
        if found is not None:
            places.inside(sizes["inside"])
    with warnings.catch_warnings(record=True) as caught, sketchgp.settings.memory_budget(sizes["budget"] * 2**30):
        warnings.simplefilter("always")
        if method in (OURS, KISS):
            run, mean, variance = (by_sketchgp if method == OURS else by_kiss)(places, found)
        else:
            run, mean, variance = by_gpboost(places, found, int(method.split()[1]))
        run |= {"peak_memory_mb": high_water_mb(), "threads": torch.get_num_threads(), "rows": len(places.x),
                "test": len(places.test_x), **field_scores(mean, variance, places.test_y, places.scale)}  # fmt: skip
        if isinstance(places, Places) and found is None:
            run |= loss(places, run)
            if method == OURS and places.whole and places.field.inputs == 2:
                run["map"] = cells(places, mean, variance)
    return {"set": task["set"], "method": method, "version": sketchgp.__version__, **run,
            "warnings": sorted({str(w.message).split("\n")[0][:300] for w in caught})}  # fmt: skip


def problem(options: argparse.Namespace) -> dict[str, Any]:
    fields = {name: {**vars(field), "neighbors": list(field.neighbors)} for name, field in FIELDS.items()}
    drawn = {name: vars(one) for name, one in DRAWN.items()}
    return {**(QUICK if options.quick else FULL), "fraction": FRACTION, "least_noise": LEAST, "fields": fields,
            "drawn": {**drawn, "noise": NOISE, "given": GIVEN, "features": FEATURES, "held": HELD}}  # fmt: skip


def groups(options: argparse.Namespace, directory: Path, results: dict[str, Any]) -> Iterator[Group]:
    sizes = QUICK if options.quick else FULL
    gpboost = importlib.util.find_spec("gpboost") is not None
    for name, field in FIELDS.items():
        for method in (OURS, *(f"GPBoost {neighbors}" for neighbors in field.neighbors if gpboost), KISS):
            label = f"{name}, {method}"
            task = {"set": name, "method": method, "sizes": sizes, "found": None}
            yield Group(("runs",), [(label, task)], needs=(name,))
            run = results.get("runs", {}).get(label, {})
            if field.inside and "lengthscales" in run:
                found = {key: run[key] for key in ("lengthscales", "outputscale", "noise", "mean")}
                yield Group(("inside",), [(label, {**task, "found": found})], needs=(name,))
    for name, drawn in DRAWN.items():
        for side in (40 * drawn.gap or 40,) if options.quick else drawn.sides:
            for method in (OURS, *(["GPBoost 20"] if gpboost else []), KISS):
                task = {"set": name, "method": method, "sizes": sizes, "found": None, "side": side}
                yield Group(("drawn",), [(f"{name} {side}, {method}", task)])


def _row(run: dict[str, Any]) -> list[Any]:
    """Return a row of the table; a run inside has no fit and no loss."""
    fitted = f"{run['loss']:.5f} ± {run['loss_error']:.5f}" if "loss" in run else None
    return [
        run["method"], fitted, *(f"{run[key]:.3f}" for key in SCORES),
        *(number(run.get(f"{what}_{kind}")) for what in ("fit", "predict") for kind in ("cpu", "wall")),
        number(run["peak_memory_mb"] / 1000),
    ]  # fmt: skip


def _details(run: dict[str, Any]) -> str:
    lengthscales, mean = (", ".join(map(number, run[name])) for name in ("lengthscales", "mean"))
    parts = [f"lengthscales {lengthscales}", f"output scale {number(run['outputscale'])}",
             f"noise {number(run['noise'])}", f"mean {mean}"]  # fmt: skip
    if "stages" in run:
        fits = "; ".join(
            f"{one['rows']:,} rows by {one['objective']}, {one['steps']} steps, {one['evaluations']} evaluations, "
            f"until {number(one['until'])} s"
            for one in run["stages"]
        )
        parts += [f"fits: {fits}", run["reason"], *(f"{name} at its limit" for name in run["at_limits"])]
    if "own_loss" in run:
        parts.append(f"its own loss {run['own_loss']:.5f}")
    return f"- {run['method']}: {'. '.join(part[0].upper() + part[1:] for part in parts)}."


def report(results: dict[str, Any]) -> str:
    lines = ["# Spatial data", "", describe(results["machine"]), "",
             "Seconds of processor time are the figures to compare: other processes ran beside. NLL and losses are of "
             "targets in deviations of the given ones; losses a row, by the same probes for all.", ""]  # fmt: skip
    done = {part: [run for run in results.get(part, {}).values() if "failed" not in run]
            for part in ("runs", "inside", "drawn")}  # fmt: skip
    for name, field in FIELDS.items():
        runs = [run for run in done["runs"] if run["set"] == name]
        if not runs:
            continue
        header = ["method", "loss by probes", f"RMSE, {field.unit}", f"MAE, {field.unit}", f"CRPS, {field.unit}", "NLL",
                  "95% covers", "fit, CPU s", "wall s", "prediction, CPU s", "wall s", "peak memory, GB"]  # fmt: skip
        mean = "linear" if field.trend else "constant"
        about = (
            f"{field.kernel} kernel, {field.inputs} inputs, {mean} mean; {runs[0]['rows']:,} rows, {runs[0]['test']:,} "
            "held out."
        )
        rows = [_row(run) for run in runs]
        if name == "modis_temps_heaton":
            rows += [[f"*literature: {one}*", None, f"*{rmse:.2f}*", *[None] * 9] for one, rmse in LITERATURE.items()]
            about += (
                " The literature's figures are of other methods on the same held-out cells (Heaton et al. 2019); they "
                "were not measured here."
            )
        lines += [f"## {name}", "", about, "", table(header, rows), ""]
        beside = [run for run in done["inside"] if run["set"] == name]
        if beside:
            lines += [f"{beside[0]['test']:,} of the given places, from the {beside[0]['rows']:,} others:", "",
                      table(header, [_row(run) for run in beside]), ""]  # fmt: skip
        lines += [*map(_details, runs), ""]
    rows = [
        [run["set"], f"{run['rows']:,}", run["method"], *(f"{run[key]:.3f}" for key in SCORES),
         *(number(run[f"predict_{kind}"]) for kind in ("cpu", "wall")), number(run["peak_memory_mb"] / 1000)]
        for run in sorted(done["drawn"], key=lambda run: (list(DRAWN).index(run["set"]), run["rows"] // 10_000))
    ]  # fmt: skip
    if rows:
        header = ["field", "rows", "method", "RMSE", "MAE", "CRPS", "NLL", "95% covers", "prediction, CPU s", "wall s",
                  "peak memory, GB"]  # fmt: skip
        lines += ["## Fields drawn from the model, with known hyperparameters", "",
                  f"Matern-3/2, noise {NOISE}, zero mean; 20,000 places that are not given. An error of "
                  f"{math.sqrt(NOISE):.3f} is that of the noise alone.", "", table(header, rows), ""]  # fmt: skip
    warned = [run for run in (*done["runs"], *done["drawn"]) if run["warnings"]]
    said = {f"{run['set']}, {run['rows']:,} rows, {run['method']}": run["warnings"] for run in warned}
    unsolved = [label for label, texts in said.items() if any(text.startswith("CG terminated") for text in texts)]
    if unsolved:
        lines += [f"Conjugate gradients warned of not being at their tolerance: {'; '.join(unsolved)}.", ""]
    failed = [
        (label, run["failed"]) for part in done for label, run in results.get(part, {}).items() if "failed" in run
    ]
    if failed:
        lines += ["Failed:", "", *[f"- {label}: {why}" for label, why in failed], ""]
    return "\n".join(lines)


def pictures(results: dict[str, Any], path: Path) -> None:
    """Draw each field as given, with what was predicted, as measured, and the deviation of predictions."""
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
        figure.colorbar(drawn, ax=axis, label=FIELDS[run["set"]].unit)
    figure.savefig(path, dpi=110)
    plt.close(figure)


BENCHMARK = Benchmark(
    doc=__doc__,
    name="maps",
    quick="1,500 rows",
    problem=problem,
    groups=groups,
    perform=perform,
    report=report,
    picture=pictures,
    say=lambda run: f"RMSE {run['rmse']:.3f}, NLL {run['nll']:.3f}, {run['predict_cpu']:.0f} CPU s of predictions",
    alone=Path(__file__).resolve(),
    failures=True,
    rival=lambda task: task["method"] != OURS,
    versions=("gpboost",),
)


if __name__ == "__main__":
    BENCHMARK.main()
