"""``python -m sketchgp fit`` without options, on all rows of a table, beside scikit-learn on 1,000 of them.

The test rows are those that the command holds out (seed 0, a tenth).  Inputs and target are standardised by the
command's training rows, for all; RMSE and NLL are in these units, of the observations.

- scikit-learn: ``GaussianProcessRegressor``, scaled Matern-5/2 with a lengthscale for each input, and noise; its L-BFGS
  from the same start as the command (lengthscales sqrt(d), scale 1, noise 0.1), on 1,000 random training rows.
- fit: ``sketchgp.fit`` without options on the same 1,000 rows, the command's model.
- command: all training rows, in a process of its own; its processor seconds are those of the whole process, reading and
  predicting included, those of the other two of fit and prediction; and for scikit-learn also those of a process that
  reads these 1,000 rows, and does nothing else.  Seconds are medians of three runs, but for ``fit`` and the CSV file.
- a CSV file of 12,500 rows of the bundled diamonds: the command trains on 10,000 of them, which it reads from the
  file, scikit-learn's regressor, with the same kernel and start, on the first 3,000 of these; both predict the prices
  of the 2,500 rows that are held out.  The command draws docs/figures/held-out.png.

    python benchmarks/command_line.py --data DIRECTORY            # half an hour on one core; resumes
    python benchmarks/command_line.py --data DIRECTORY --quick    # 200 rows of one set, without the command
    python benchmarks/command_line.py --report                    # the table again, nothing measured
"""

from __future__ import annotations

import csv
import re
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import sketchgp
from common import describe, load_arrays, median, number, scores, table
from measure import high_water_mb
from runner import Benchmark, Group
from sketchgp.cli.regression import Regression, Scaling, split_rows
from sketchgp.datasets import load_diamonds

SETS = ("uci_parkinsons", "kin8nm", "cpu_small")
METHODS = ("scikit-learn", "fit", "command")
ROWS = 1000
REPEATS = 3
CSV_ROWS, CSV_FRACTION, RIVAL_ROWS = 12_500, 0.2, 3000
PICTURE = Path(__file__).resolve().parents[1] / "docs" / "figures" / "held-out.png"


def load(directory: Path, name: str, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``rows`` training rows, and the test rows of the command, standardised, float32."""
    arrays = load_arrays(directory, name)
    x, y = torch.from_numpy(arrays["X"]).double(), torch.from_numpy(arrays["y"]).double()
    train, test = split_rows(len(y), 0.1, 0)
    varies = (x[train] != x[train[0]]).any(0)
    scaling = Scaling.of(x[train][:, varies], y[train], "y")
    x, y = scaling.scale_x(x[:, varies], torch.float32), scaling.scale_y(y, torch.float32)
    return x[train[:rows]], y[train[:rows]], x[test], y[test]


# what a user of scikit-learn would run: no PyTorch to load
_ALONE = """
import sys
import numpy as np
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel
data = np.load(sys.argv[1])
d = data["x"].shape[1]
kernel = ConstantKernel(1.0) * Matern([d**0.5] * d, nu=2.5) + WhiteKernel(0.1)
GaussianProcessRegressor(kernel).fit(data["x"], data["y"]).predict(data["test_x"], return_std=True)
"""


def processor_seconds(command: list[str], directory: Path | None = None) -> tuple[float, str]:
    """Of a process of its own; and what it printed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True, cwd=directory
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, done.stdout


def process_of_scikit_learn(x: Tensor, y: Tensor, test_x: Tensor) -> float:
    """Processor seconds of one that does what :func:`by_scikit_learn` does."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.npz"
        np.savez(path, x=x.double().numpy(), y=y.double().numpy(), test_x=test_x.double().numpy())
        return processor_seconds([sys.executable, "-c", _ALONE, str(path)])[0]


def by_scikit_learn(x: Tensor, y: Tensor, test_x: Tensor, test_y: Tensor) -> dict[str, Any]:
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

    d = x.shape[1]
    kernel = ConstantKernel(1.0) * Matern([d**0.5] * d, nu=2.5) + WhiteKernel(0.1)
    began = time.process_time()
    model = GaussianProcessRegressor(kernel).fit(x.double().numpy(), y.double().numpy())
    fitted = time.process_time() - began
    mean, deviation = model.predict(test_x.double().numpy(), return_std=True)
    loss = -model.log_marginal_likelihood_value_ / len(y)
    return {"loss": float(loss), "cpu_seconds": time.process_time() - began, "fit_cpu_seconds": fitted,
            **scores(torch.from_numpy(mean), torch.from_numpy(deviation).square(), test_y)}  # fmt: skip


def by_fit(x: Tensor, y: Tensor, test_x: Tensor, test_y: Tensor) -> dict[str, Any]:
    began = time.process_time()
    model = sketchgp.accelerate(Regression(x, y))
    history = sketchgp.fit(model, progress=False)
    fitted = time.process_time() - began
    posterior = sketchgp.predict(model, test_x, progress=False)
    assert posterior.observation_variance is not None
    return {"loss": history.best_loss, "cpu_seconds": time.process_time() - began, "fit_cpu_seconds": fitted,
            "steps": len(history.losses), "reason": history.reason,
            **scores(posterior.mean, posterior.observation_variance, test_y)}  # fmt: skip


def diamonds() -> tuple[list[str], Tensor, Tensor]:
    """Names of the columns, and the rows of the CSV file: inputs ``(n, 9)`` and prices, float64."""
    data = load_diamonds()
    rows = torch.randperm(len(data.y), generator=torch.Generator().manual_seed(0))[:CSV_ROWS]
    return [*data.feature_names, "price"], data.x[rows].double(), data.y[rows].double()


def rows_of_csv() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The rival's training rows, and the test rows of the command, standardised by the command's training rows."""
    _, x, y = diamonds()
    train, test = split_rows(len(y), CSV_FRACTION, 0)
    scaling = Scaling.of(x[train], y[train], "price")
    x, y = scaling.scale_x(x, torch.float32), scaling.scale_y(y, torch.float32)
    return x[train[:RIVAL_ROWS]], y[train[:RIVAL_ROWS]], x[test], y[test]


def by_command_on_csv() -> dict[str, Any]:
    names, x, y = diamonds()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "diamonds.csv"
        with open(path, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(names)
            writer.writerows(
                [f"{value:.7g}" for value in (*row, price)] for row, price in zip(x.tolist(), y.tolist(), strict=True)
            )
        found = by_command(path, "price", "--test-fraction", str(CSV_FRACTION), "--picture", str(PICTURE), "--force")
    return {**found, "train": round(CSV_ROWS * (1 - CSV_FRACTION)), "test": round(CSV_ROWS * CSV_FRACTION)}


def by_command(path: Path, target: str = "y", *options: str) -> dict[str, Any]:
    """What the command prints, and the time that its process took."""
    seconds, said = processor_seconds(
        [sys.executable, "-m", "sketchgp", "fit", path.name, "--target", target, *options], path.parent
    )
    row = next(line for line in said.split("\n") if line.startswith("sketchgp, "))
    header = next(line for line in said.split("\n") if "RMSE" in line and "NLL" in line)
    found = dict(zip(re.split(r"\s{2,}", header.strip()), re.split(r"\s{2,}", row.strip()), strict=True))
    loss = re.search(r"-> (-?[\d.]+) per row", said)
    assert loss is not None
    return {"loss": float(loss[1]), "rmse": float(found["RMSE"]), "nll": float(found["NLL"]),
            "cpu_seconds": seconds, "process_seconds": seconds,
            "said": said.strip().replace(str(PICTURE), PICTURE.name).split("\n")}  # fmt: skip


def as_parquet(path: Path, folder: Path) -> Path:
    """The arrays X and y of an NPZ archive as a table that the command reads."""
    import pandas

    with np.load(path) as arrays:
        frame = pandas.DataFrame(arrays["X"], columns=[f"x{column}" for column in range(arrays["X"].shape[1])])
        frame = frame.assign(y=arrays["y"])
    frame.to_parquet(folder / f"{path.stem}.parquet")
    return folder / f"{path.stem}.parquet"


def repeated(once: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The first of some runs, with the medians of their seconds, and those of all of them."""
    runs = [once() for _ in range(REPEATS)]
    timed = {key: [run[key] for run in runs] for key in runs[0] if key.endswith("_seconds")}
    medians = {key: median(values) for key, values in timed.items()}
    return {**runs[0], **medians, "each_process_seconds": timed["process_seconds"]}


def perform(task: dict[str, Any], directory: Path) -> dict[str, Any]:
    """One cell, in a process of its own."""
    found: dict[str, Any] = {"threads": torch.get_num_threads()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if task["name"] == "diamonds.csv":
            if task["method"] == "command":
                found |= by_command_on_csv()
            else:
                data = rows_of_csv()
                found |= {"train": len(data[0]), "test": len(data[2]), "inputs": data[0].shape[1]}
                found |= by_scikit_learn(*data)
        elif task["method"] == "command":
            with tempfile.TemporaryDirectory() as folder:
                path = as_parquet(directory / f"{task['name']}.npz", Path(folder))
                found |= repeated(lambda: by_command(path))
        else:
            data = load(directory, task["name"], task["rows"])
            found |= {"train": len(data[0]), "test": len(data[2]), "inputs": data[0].shape[1]}
            if task["method"] == "fit":
                found |= by_fit(*data)
            else:
                found |= repeated(
                    lambda: {**by_scikit_learn(*data), "process_seconds": process_of_scikit_learn(*data[:3])}
                )
    return {**found, "warnings": sorted({str(one.message).split("\n")[0][:200] for one in caught}),
            "peak_memory_mb": high_water_mb()}  # fmt: skip


def report(results: dict[str, Any]) -> str:
    rows = []
    for label, run in results["runs"].items():
        name, method = label.split(", ")
        digits = [f"{run[key]:.4f}" for key in ("loss", "rmse", "nll")]
        said = next((line.strip() for line in run.get("said", []) if "tuned on" in line), run.get("reason", ""))
        process = number(run["process_seconds"]) if "process_seconds" in run else ""
        rows.append([name, method, *digits, number(run["cpu_seconds"]), process, said])
    return "\n".join([
        "# The command line beside scikit-learn", "", describe(results["machine"]), "",
        f"scikit-learn and `sketchgp.fit` on {results['problem']['rows']:,} rows, the command on all of them; the same "
        "test rows, standardised. Losses are negative log marginal likelihoods a row of the rows fitted.", "",
        table(["set", "", "loss", "RMSE", "NLL", "CPU s", "of the process", "what it said"], rows), "",
        *_csv(results.get("csv", {})),
    ])  # fmt: skip


def _csv(runs: dict[str, Any]) -> list[str]:
    if not runs:
        return []
    cells = [
        [name, f"{run['train']:,}", f"{run['rmse']:.4f}", f"{run['nll']:.4f}", number(run["cpu_seconds"])]
        for name, run in runs.items()
    ]
    return [
        f"A CSV file of {CSV_ROWS:,} diamonds: `fit diamonds.csv --target price --test-fraction {CSV_FRACTION}`, "
        f"beside scikit-learn on {RIVAL_ROWS:,} of its training rows; the same held-out rows, standardised.", "",
        table(["", "training rows", "RMSE", "NLL", "CPU s"], cells), "",
    ]  # fmt: skip


def problem(options: Any) -> dict[str, Any]:
    return {"rows": 200 if options.quick else ROWS, "kernel": "ScaleKernel(Matern-5/2, ARD)", "dtype": "float32"}


def groups(options: Any, directory: Path, results: dict[str, Any]) -> Iterator[Group]:
    for name in SETS[: 1 if options.quick else None]:
        tasks = [(f"{name}, {method}", {"name": name, "method": method, **problem(options)}) for method in METHODS]
        yield Group(("runs",), tasks[: 2 if options.quick else None], needs=(name,))
    if not options.quick:
        tasks = [(method, {"name": "diamonds.csv", "method": method}) for method in ("command", "scikit-learn")]
        yield Group(("csv",), tasks)


BENCHMARK = Benchmark(
    doc=__doc__,
    name="command_line",
    quick="200 rows of one set, without the command",
    problem=problem,
    groups=groups,
    perform=perform,
    report=report,
    say=lambda run: f"loss {run['loss']:.4f}, RMSE {run['rmse']:.4f}, {run['cpu_seconds']:.0f} CPU s",
    alone=Path(__file__).resolve(),
    versions=("scikit-learn", "scipy"),
)


if __name__ == "__main__":
    BENCHMARK.main()
