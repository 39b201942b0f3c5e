"""Doubly stochastic functional gradients beside their rivals, in equal time: the figures of Dai and others (2014), as
far as data are at hand.

Adult (a9a) and two classes of covtype by the hinge loss, MNIST 8 against 6 and all digits by logistic losses (all
digits also from a stream of shifted images), QM7 and formation energies by ridge regression. RBF kernels (Laplace for
QM7) whose lengthscale is a multiple of the median distance of training points. Beside ``DoublyStochastic``: Algorithm 1
of the paper, the exact ridge regression on the same features, functional gradients whose centres are the data (NORMA),
EigenPro 4 and KRILL on inducing points (least squares on one column a class), scikit-learn's SGD on RBFSampler, and a
linear model. Each is stopped after the same seconds, where it has not ended before; the stream of shifted images has
10 minutes, as has EigenPro 4 there, which learns from the images as they are.

    python benchmarks/doubly_stochastic.py --data DIRECTORY           # a minute for each run, an hour in all; resumes
    python benchmarks/doubly_stochastic.py --data DIRECTORY --quick   # 1,500 rows, three seconds each
    python benchmarks/doubly_stochastic.py --report                   # the table again, nothing measured
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpytorch
import numpy as np
import torch
from torch import Tensor

import sketchgp
from common import describe, load_arrays, number, standardise, table
from runner import Benchmark, Group
from sketchgp.operators.feature_map import RandomFeatures
from sketchgp.operators.tall import TallMatrix


@dataclass(frozen=True)
class Task:
    """A data set, and what is learned on it.

    :ivar distance: lengthscale over the median distance; :ivar scale: of the kernel, :ivar noise: of the ridge.
    :ivar seconds: of a run, in place of ``--seconds``.
    """

    words: str
    data: str
    loss: str
    distance: float
    scale: float
    noise: float
    shifts: bool = False
    seconds: float | None = None


TASKS = {
    "adult": Task("Adult (a9a)", "a9a", "hinge", 2.0, 1.0, 1.0),
    "covtype": Task("Covtype, one class against the rest", "covtype_40k", "hinge", 0.4, 10.0, 1.0),
    "mnist86": Task("MNIST, 8 against 6", "mnist", "logistic", 0.6, 30.0, 1.0),
    "mnist": Task("MNIST, all digits", "mnist", "multinomial", 0.6, 30.0, 1.0),
    "mnist_shifts": Task(
        "MNIST, all digits, shifted at random", "mnist", "multinomial", 0.6, 30.0, 1.0, shifts=True, seconds=600.0
    ),
    "qm7": Task("QM7", "qm7_atomization_cm", "squared", 4.0, 1.0, 1e-4),
    "energies": Task("Formation energies of crystals", "mp_formation_energy", "squared", 1.0, 1.0, 0.05),
}
METHODS = ("doubly", "algorithm1", "fixed", "norma", "eigenpro4", "krill", "sgd", "linear")
WORDS = {
    "doubly": "doubly stochastic", "algorithm1": "Algorithm 1", "fixed": "ridge on the same features",
    "norma": "functional gradients", "eigenpro4": "EigenPro 4", "krill": "KRILL", "sgd": "scikit-learn SGD",
    "linear": "linear model",
}  # fmt: skip
FEATURES = 16384
POINTS = 5000  # inducing
SECONDS = 60.0
BATCH = 1000  # of rivals


@dataclass
class Data:
    """Standardised inputs, labels or standardised targets; errors are ``unit`` times mean absolute ones."""

    task: Task
    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    kernel: Any
    unit: float

    @property
    def classes(self) -> bool:
        return self.task.loss != "squared"

    @property
    def columns(self) -> Tensor:
        """Targets of least squares."""
        return sketchgp.OneHot(self.y).encode(self.y) if self.classes else self.y.unsqueeze(1)

    def error(self, values: Tensor) -> float:
        """Share of wrong labels, or mean absolute error, of values ``(p, c)``."""
        if self.classes:
            return float((values.argmax(dim=1) != self.test_y).double().mean())
        return self.unit * float((values.reshape(-1) - self.test_y).abs().mean())


def load(directory: Path, name: str, rows: int) -> Data:
    task, arrays = TASKS[name], load_arrays(directory, TASKS[name].data)
    x, y = arrays["X"].reshape(len(arrays["X"]), -1).astype(np.float32), arrays["y"]
    shuffled = np.random.RandomState(0).permutation(len(x))
    test = (
        arrays["is_test"].astype(bool) if "is_test" in arrays else np.isin(np.arange(len(x)), shuffled[: len(x) // 5])
    )
    if name == "mnist86":
        kept = (y == 8) | (y == 6)
        x, y, test = x[kept], (y[kept] == 8).astype(int), test[kept]
    if name == "covtype":
        y = (y == 1).astype(int)
    order = np.random.RandomState(1).permutation(np.flatnonzero(~test))[:rows]
    train_x, train_y, test_x, test_y = x[order], y[order], x[test][:10_000], y[test][:10_000]
    if task.data == "mnist":
        train_x, test_x = train_x / 255, test_x / 255
    else:
        train_x, test_x = standardise(train_x, test_x)
    tensors = [torch.as_tensor(t, dtype=torch.float32) for t in (train_x, test_x)]
    unit = 1.0
    if task.loss == "squared":
        mean, unit = float(train_y.mean()), float(train_y.std())
        labels = [torch.as_tensor((t - mean) / unit, dtype=torch.float32) for t in (train_y, test_y)]
    else:
        labels = [torch.as_tensor(t, dtype=torch.int64) for t in (train_y, test_y)]
    base = sketchgp.LaplaceKernel() if name == "qm7" else gpytorch.kernels.RBFKernel()
    kernel = gpytorch.kernels.ScaleKernel(base)
    some = tensors[0][:1000]
    base.lengthscale = task.distance * float(torch.cdist(some, some, p=1 if name == "qm7" else 2).median())
    kernel.outputscale = task.scale
    return Data(task, tensors[0], labels[0], tensors[1], labels[1], kernel.requires_grad_(False), unit)


# --------------------------------------------------------------------------------------------------- contestants
class Shifted:
    """Images moved by up to two pixels, anew at each pass, without end."""

    def __init__(self, x: Tensor, y: Tensor, seed: int) -> None:
        self.x, self.y, self.generator = x.reshape(-1, 28, 28), y, torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            for rows in torch.randperm(len(self.x), generator=self.generator).split(4096):
                padded = torch.nn.functional.pad(self.x[rows], (2, 2, 2, 2))
                down, right = torch.randint(5, (2, len(rows), 1), generator=self.generator)
                along = torch.arange(28)
                moved = padded[torch.arange(len(rows)).reshape(-1, 1, 1), (along + down).unsqueeze(2),
                               (along + right).unsqueeze(1)]  # fmt: skip
                yield moved.flatten(1), self.y[rows]


def doubly(data: Data, seconds: float, features: int, preconditioned: bool) -> dict[str, Any]:
    """``DoublyStochastic``; errors on the test points are looked at between its steps, outside of its time."""
    solver = sketchgp.DoublyStochastic(
        num_features=features if preconditioned else None, preconditioned=preconditioned, max_seconds=seconds,
        epochs=10**6, batch_size=None if data.task.shifts or preconditioned else BATCH,
    )  # fmt: skip
    if data.classes:
        model: Any = sketchgp.RandomFeatureClassifier(data.kernel, data.task.loss, data.task.noise,
                                                      classes=data.y.unique(), solver=solver)  # fmt: skip
    else:
        likelihood = gpytorch.likelihoods.GaussianLikelihood()
        likelihood.noise = data.task.noise
        model = sketchgp.RandomFeatureGP(likelihood, gpytorch.means.ZeroMean(), data.kernel, solver, variance="none")
    path: dict[str, list[float]] = {"rows": [], "seconds": [], "error": []}
    looked = [0.0, 0.0]  # seconds spent here, and the time of the last look

    def look(progress: Any) -> None:
        own = progress.seconds - looked[0]
        if own < 1.3 * looked[1]:
            return
        began, looked[1] = time.perf_counter(), own
        values = predicted(model, data)
        path["rows"].append(model._learner.taken)
        path["seconds"].append(own)
        path["error"].append(data.error(values))
        looked[0] += time.perf_counter() - began

    stream = (Shifted(data.x, data.y, 0),) if data.task.shifts else (data.x, data.y)
    report = model.learn(*stream, callback=look, progress=False)
    path["rows"].append(model._learner.taken)
    path["seconds"].append(report.seconds + report.setup_seconds - looked[0])
    path["error"].append(data.error(predicted(model, data)))
    return {"path": path, "features": model.num_features, "iterations": report.iterations}


def predicted(model: Any, data: Data) -> Tensor:
    with torch.no_grad():
        if data.classes:
            return model.scores(data.test_x)
        return model.eval()(data.test_x).mean


def fixed(data: Data, seconds: float, features: int) -> dict[str, Any]:
    """Ridge regression on the features of seed 0, by normal equations."""
    made = RandomFeatures(data.kernel, data.x[:1000].mean(dim=0, keepdim=True), 0)
    gram, right = torch.zeros(features, features), torch.zeros(features, data.columns.shape[1])
    for rows in torch.arange(len(data.x)).split(1024):
        phi = made(data.x[rows], 0, features // 2)
        gram.addmm_(phi.mT, phi)
        right += phi.mT @ data.columns[rows]
    gram = gram.double()
    gram.diagonal().add_(features * max(data.task.noise, 1e-6))
    weights = torch.cholesky_solve(right.double(), torch.linalg.cholesky(gram)).float()
    parts = [made(part, 0, features // 2) @ weights for part in data.test_x.split(1024)]
    return {"error": data.error(torch.cat(parts)), "features": features}


def norma(data: Data, seconds: float) -> dict[str, Any]:
    """Stochastic functional gradients of the least-squares objective, whose centres are all points seen; the step is
    ``1 / (1 + t / 20)`` over the largest eigenvalue of a batch."""
    order, began = torch.randperm(len(data.x), generator=torch.Generator().manual_seed(0)), time.perf_counter()
    weights, decay = torch.zeros(len(data.x), data.columns.shape[1], dtype=torch.float64), 1.0
    largest, seen = 0.0, torch.zeros(0, dtype=torch.int64)
    for t, rows in enumerate(order.split(BATCH)):
        x = data.x[rows]
        largest = largest or float(torch.linalg.eigvalsh(data.kernel(x).to_dense())[-1]) / len(rows)
        f = TallMatrix(data.kernel, x, data.x[seen]).matmul(weights[seen]) * decay if len(seen) else 0
        step = 1 / largest / (1 + t / 20)
        decay *= 1 - step * data.task.noise / len(data.x)
        weights[rows] = -step * (f - data.columns[rows].double()) / len(rows) / decay
        seen = torch.cat([seen, rows])
        if time.perf_counter() - began > seconds:
            break
    values = TallMatrix(data.kernel, data.test_x, data.x[seen]).matmul(weights[seen] * decay)
    return {"error": data.error(values), "centres": len(seen)}


def inducing(data: Data, seconds: float, points: int, name: str) -> dict[str, Any]:
    z = data.x[torch.randperm(len(data.x), generator=torch.Generator().manual_seed(0))[:points]].clone()
    noise = max(data.task.noise, 1e-6)
    problem = sketchgp.InducingPointProblem(data.kernel, data.x, data.columns, noise, z)
    solver: Any = sketchgp.KRILL(tol=1e-4, max_seconds=seconds)
    if name == "eigenpro4":
        solver = sketchgp.EigenPro4(max_seconds=seconds, epochs=100)
    solution = solver.solve(problem, progress=False)
    values = TallMatrix(data.kernel, data.test_x, z).matmul(solution.value)
    return {"error": data.error(values), "points": points, "reason": str(solution.report.reason)}


def scikit(data: Data, seconds: float, features: int, sampler: bool) -> dict[str, Any]:
    """SGD with an adaptive rate, batch by batch, on RBFSampler's features (times 20, as its default step expects inputs
    of size one) or on the inputs."""
    from sklearn.kernel_approximation import RBFSampler
    from sklearn.linear_model import Ridge, SGDClassifier, SGDRegressor

    x, test_x, began = data.x.numpy(), data.test_x.numpy(), time.perf_counter()
    loss = {"hinge": "hinge", "logistic": "log_loss", "multinomial": "log_loss"}.get(data.task.loss)
    alpha = max(data.task.noise, 1e-6) / len(x)
    model: Any = SGDClassifier(loss=loss, alpha=alpha, random_state=0) if loss else SGDRegressor(alpha=alpha)
    if not (loss or sampler):  # where the steps of SGDRegressor diverge
        found = Ridge(alpha=1.0).fit(x, data.y.numpy()).predict(test_x)
        return {"error": data.error(torch.as_tensor(found).unsqueeze(1))}
    transform: Callable[[Any], Any] = lambda part: part  # noqa: E731
    if sampler:
        width = float(data.kernel.base_kernel.lengthscale)
        made = RBFSampler(gamma=0.5 / width**2, n_components=features, random_state=0).fit(x[:1])
        transform = lambda part: 20 * made.transform(part)  # noqa: E731
    generator, epochs = np.random.RandomState(0), 0
    while time.perf_counter() - began < seconds and epochs < (100 if sampler else 20):
        for rows in np.array_split(generator.permutation(len(x)), max(1, len(x) // BATCH)):
            options = {"classes": np.unique(data.y.numpy())} if loss else {}
            model.partial_fit(transform(x[rows]), data.y.numpy()[rows], **options)
            if time.perf_counter() - began > seconds:
                break
        epochs += 1
    found = np.concatenate([model.predict(transform(part)) for part in np.array_split(test_x, 10)])
    found_, wanted = torch.as_tensor(found), data.test_y
    error = (found_ != wanted).double().mean() if loss else data.unit * (found_ - wanted).abs().mean()
    return {"error": float(error), "epochs": epochs}


def perform(data: Data, what: tuple[str, float, int, int]) -> dict[str, Any]:
    name, seconds, features, points = what
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sketchgp.ConvergenceWarning)  # that there was no more time
        if name in ("doubly", "algorithm1"):
            run = doubly(data, seconds, features, name == "doubly")
            run["error"] = run["path"]["error"][-1]
        elif name == "fixed":
            run = fixed(data, seconds, min(features, 8192))
        elif name == "norma":
            run = norma(data, seconds)
        elif name in ("eigenpro4", "krill"):
            run = inducing(data, seconds, points, name)
        else:
            run = scikit(data, seconds, features, name == "sgd")
    return {**run, "seconds": time.perf_counter() - began}


# --------------------------------------------------------------------------------------------------------- report
def shown(data: str, error: float | None) -> str:
    if error is None:
        return "-"
    return f"{100 * error:.2f}%" if TASKS[data].loss != "squared" else number(error)


def report(results: dict[str, Any]) -> str:
    p, rows = results["problem"], []
    for name, task in TASKS.items():
        runs = results["runs"].get(name, {})
        cells = [f"{shown(name, runs[m]['error'])} ({runs[m]['seconds']:.0f} s)" if m in runs else "-" for m in METHODS]
        rows.append([task.words, task.loss, *cells])
    return "\n".join([
        "# Doubly stochastic functional gradients and their rivals", "", describe(results["machine"]), "",
        "Test error: wrong labels, or mean absolute error in the units of the targets (QM7: kcal/mol; formation "
        f"energies: eV an atom). {p['features']:,} features ({min(p['features'], 8192):,} for the exact ridge "
        f"regression), {p['points']:,} inducing points; at most {p['seconds']:g} seconds of learning each where a cell "
        f"does not say more, at most {p['rows']:,} rows. EigenPro 4 has no shifted images. scikit-learn's features are "
        "those of an RBF kernel, also on QM7.", "",
        table(["set", "loss", *(WORDS[m] for m in METHODS)], rows), "",
    ])  # fmt: skip


def picture(results: dict[str, Any], path: Path) -> None:
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullFormatter

    names = [name for name in TASKS if name in results["runs"]]
    figure, axes = plt.subplots(len(names), 2, figsize=(10, 2.6 * len(names)), squeeze=False, layout="constrained")
    colors = {method: f"C{place}" for place, method in enumerate(METHODS)}
    for (by_rows, by_time), name in zip(axes, names, strict=True):
        for method, run in results["runs"][name].items():
            if "path" in run:
                for axis, along in ((by_rows, "rows"), (by_time, "seconds")):
                    axis.loglog(run["path"][along], run["path"]["error"], color=colors[method])
            else:
                by_time.loglog([run["seconds"]], [run["error"]], "o", color=colors[method])
        by_rows.set(title=TASKS[name].words, xlabel="rows seen", ylabel="test error")
        by_time.set(xlabel="seconds")
        for axis in (by_rows.xaxis, by_time.xaxis):
            axis.set_minor_formatter(NullFormatter())
    lines = [plt.Line2D([], [], color=colors[method], label=WORDS[method]) for method in METHODS]
    figure.legend(handles=lines, loc="outside upper center", ncols=4, fontsize=8)
    figure.savefig(path.with_suffix(".png"), dpi=110)
    plt.close(figure)


def problem(options: Any) -> dict[str, Any]:
    if options.quick:
        return {"rows": 1500, "seconds": 3.0, "features": 1024, "points": 300, "dtype": "float32"}
    return {"rows": 10**6, "seconds": options.seconds, "features": FEATURES, "points": POINTS, "dtype": "float32"}


def groups(options: Any, directory: Path, results: dict[str, Any]) -> Iterator[Group]:
    p = problem(options)
    for name, task in TASKS.items():
        methods = ("doubly", "eigenpro4") if task.shifts else METHODS
        seconds = p["seconds"] if options.quick else task.seconds or p["seconds"]
        tasks = [(method, (method, seconds, p["features"], p["points"])) for method in methods]
        yield Group(("runs", name), tasks, needs=(task.data,), load=lambda name=name: load(directory, name, p["rows"]))


BENCHMARK = Benchmark(
    doc=__doc__,
    name="doubly_stochastic",
    quick="1,500 rows, three seconds each",
    problem=problem,
    groups=groups,
    perform=perform,
    report=report,
    picture=picture,
    say=lambda run: f"{run['error']:.4g}, {run['seconds']:.0f} s",
    versions=("scikit-learn",),
    options=lambda parser: parser.add_argument("--seconds", type=float, default=SECONDS, help="of each run"),
)


if __name__ == "__main__":
    BENCHMARK.main()
