"""What ``device.py`` measures: one function for each kind of item, ``(what, device, directory) -> results``.

Every function runs on a CPU too, where sizes are small, and nothing in them asks for more than ``sketchgp``, GPyTorch
and torch; Triton and KeOps are used where they are.
"""

from __future__ import annotations

import concurrent.futures.process
import contextlib
import copy
import functools
import math
import multiprocessing
import re
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gpytorch
import torch
from torch import Tensor

import matvec_limit
import sketchgp
from common import Model
from kin40k import build, split
from matvec import clock, reason_of, rows_at_most
from matvec_cells import Cell, Contestant, Problem, gradient_of, plain_torch, product_of
from measure import counted_gpytorch_cg, true_residual
from sketchgp.operators import KernelMatrix

ROOT = Path(__file__).resolve().parent.parent
Results = dict[str, Any]
Kernel = gpytorch.kernels.Kernel
LONGEST = 4.0  # seconds of one call of what is measured; where it would take longer, it gets fewer rows
REPEATS = 5


# ---------------------------------------------------------------------------------------------- the device
def limits(what: Results, device: torch.device, directory: Path) -> Results:
    """Rates of matrix products by dtype, of exponentials, roots and logarithms, and of copies."""
    found: Results = {"rates": {}, "products": {}}
    size = 512 if what["small"] else 8192
    for dtype in (torch.float32, torch.float64):
        found["rates"][str(dtype).removeprefix("torch.")] = matvec_limit.measure(dtype, device, what["small"])
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        seconds = matvec_limit.seconds_a_call(matvec_limit.product_call(size, dtype, device), device, 5)
        found["products"][str(dtype).removeprefix("torch.")] = 2 * size**3 / seconds
    if "product_tf32" in found["rates"]["float32"]:
        found["products"]["tf32"] = found["rates"]["float32"]["product_tf32"]
    source = torch.rand(2**20 if what["small"] else 2**30, device=device)
    target = torch.empty_like(source)
    seconds = matvec_limit.seconds_a_call(lambda: target.copy_(source), device, 5)
    found["copied_bytes_per_second"] = 2 * source.numel() * 4 / seconds
    if device.type == "cuda":
        known = torch.cuda.get_device_properties(device)
        found |= {
            "name": known.name,
            "multiprocessors": known.multi_processor_count,
            "memory_gb": known.total_memory / 1e9,
        }
    return found


def tests(what: Results, device: torch.device, directory: Path) -> Results:
    """The tests marked ``cuda``, of the files that have any."""
    marked = [p for p in sorted((ROOT / "tests").glob("test_*.py")) if "mark.cuda" in p.read_text(encoding="utf-8")]
    if device.type != "cuda":
        return {"left_out": "they need a CUDA device", "files": [p.name for p in marked]}
    workers = str(what["processes"])
    command = [sys.executable, "-m", "pytest", "-q", "-m", "cuda", "-n", workers, "--maxprocesses", workers]
    command += ["-p", "no:cacheprovider", *map(str, marked)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    counts = {
        word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)", done.stdout[-300:])
    }
    failures = re.findall(r"^(?:FAILED|ERROR) (.{1,300})", done.stdout, flags=re.MULTILINE)
    found = {**counts, "failures": failures, "exit": done.returncode}
    return found if counts else {**found, "output": (done.stdout + done.stderr)[-1500:]}


# ------------------------------------------------------------------------------------------------ products
def products(what: Results, device: torch.device, directory: Path) -> Results:
    """Products and gradients by every engine, and how far they are from float64; with ``what["rates"]``, as fractions
    of the limit that these allow."""
    d, n, most, rates = what["d"], what["n"], max(what["columns"]), what.get("rates")
    if what["processes"] and device.type == "cuda":
        _compile(what)
    whole = Problem(Cell("rbf", d, most, "float32", n), device, 0)
    found: Results = {"runs": []}
    for t in what["columns"]:
        problem = copy.copy(whole)
        problem.cell = Cell("rbf", d, t, "float32", n)
        problem.v, problem.left = whole.v[:, :t].contiguous(), whole.left[:, :t].contiguous()
        problem._exact, problem._gradients = {}, {}
        for contestant in _contestants(problem, what["engines"], what["gradients"]):
            run = {"engine": contestant.engine, "measure": contestant.measure, "wrt": contestant.wrt, "d": d, "t": t}
            run |= timed(contestant, problem, device)
            if rates is not None and "pairs_per_second" in run and contestant.measure == "product":
                limit = matvec_limit.limits(problem.family.work, d, t, matvec_limit.rates_of(rates))
                run |= matvec_limit.fractions(run["pairs_per_second"], limit, contestant.case == "square")
            found["runs"].append(run)
            if (reason := _lost(device)) is not None:
                return found | {"stopped": reason}
    return found


def _contestants(problem: Problem, engines: list[str], gradients: list[str]) -> Iterator[Contestant]:
    """:param gradients: the engines of which they are wanted too."""
    for engine in engines:
        if engine == "torch-dense":
            yield Contestant(engine, "product", "rectangular", functools.partial(plain_torch, problem))
            continue
        yield Contestant(engine, "product", "square", functools.partial(product_of, problem, engine, "square"))
        both = (False, True) if problem.cell.t == 1 and problem.cell.d in (8, 90) else (False,)
        for inputs in both if engine in gradients else ():
            prepare = functools.partial(gradient_of, problem, engine, "square", inputs)
            yield Contestant(engine, "gradient", "square", prepare, "inputs" if inputs else "parameters")


def timed(contestant: Contestant, problem: Problem, device: torch.device) -> Results:
    """The median of some calls, the error of the result, and the memory that a call takes."""
    run: Results = {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # that another engine took over is no measurement
            run["first_call_seconds"], _, _ = clock(contestant.prepare(min(300, problem.cell.n)), device)
            n = run["n"] = rows_at_most(contestant, problem.cell, device, LONGEST)
            call, before = contestant.prepare(n), _allocated(device)
            _reset(device)
            seconds, _, result = clock(call, device)
            run["added_gb"] = (_peak(device) - before) / 1e9 if device.type == "cuda" else None
            times, started = [seconds], time.perf_counter()
            while len(times) < REPEATS and time.perf_counter() - started < LONGEST / 2:
                times.append(clock(call, device)[0])
            run |= {"seconds": times, "median_seconds": statistics.median(times)}
            run["pairs_per_second"] = n * n / run["median_seconds"]
            if contestant.measure == "product":
                run["error"] = problem.error(result, n, contestant.case)
            else:
                run["error"] = problem.gradient_error(contestant.engine, contestant.case, contestant.wrt == "inputs")
    except Exception as error:
        run["failed"] = reason_of(error)
    return run


def _lost(device: torch.device) -> str | None:
    """Why the device is of no use to this process any more, as after an access to memory that is not there."""
    try:
        matvec_limit.synchronise(device)
    except Exception as error:
        return reason_of(error)
    return None


def _compile(what: Results) -> None:
    """Have the kernels compiled by several processes, which leave them in Triton's cache on the disk."""
    engines = [engine for engine in what["engines"] if engine.startswith("triton")]
    jobs = [(what["d"], t, engine, gradient) for t in what["columns"] for engine in engines
            for gradient in ((False, True) if engine in what["gradients"] else (False,))]  # fmt: skip
    compiled_by_processes(_compile_one, jobs, what["processes"])


def compiled_by_processes(one: Callable[[Any], None], jobs: list[Any], processes: int) -> None:
    """``one`` of every job, which has a kernel compiled."""
    context = multiprocessing.get_context("spawn")
    with (
        contextlib.suppress(concurrent.futures.process.BrokenProcessPool),  # what is measured afterwards says why
        concurrent.futures.ProcessPoolExecutor(processes, context) as pool,
    ):
        list(pool.map(one, jobs))


def _compile_one(job: tuple[int, int, str, bool]) -> None:
    d, t, engine, gradient = job
    try:
        problem = Problem(Cell("rbf", d, t, "float32", 300), torch.device("cuda"), 0)
        if gradient:
            gradient_of(problem, engine, "square", False, 300)()
        else:
            product_of(problem, engine, "square", 300)()
    except Exception:  # what is measured afterwards says why
        return


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


_peaks: list[int] = []  # before every reset of an item


def _reset(device: torch.device) -> None:
    if device.type == "cuda":
        _peaks.append(_peak(device))
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def forget_peaks(device: torch.device) -> None:
    """What follows is another item."""
    _reset(device)
    _peaks.clear()


def highest_peak(device: torch.device) -> int:
    """Bytes, of all that an item has measured."""
    return max(*_peaks, _peak(device), 0)


# ------------------------------------------------------------------------------------------------- kin40k
def kin40k(what: Results, device: torch.device, directory: Path) -> Results:
    """kin40k with 20,000 rows, noise 1e-2 and 1e-4: the solvers of one group, or GPyTorch by itself and with KeOps."""
    x, y, test_x, test_y = split(directory, what["rows"])
    data = [part.float().to(device) for part in (x, y, test_x)]
    found: Results = {"runs": []}
    for noise in what["noises"]:
        if what["group"] == "gpytorch":
            candidates = _gpytorch(data, noise, device)
        else:
            candidates = _solvers(what, data, noise)
        for name, compute in candidates:
            if name not in (what.get("solvers") or [name]):
                continue
            run = {"name": name, "noise": noise, **_attempt(compute, device)}
            if "mean" in run:
                run["rmse"] = float((run.pop("mean").double().cpu().reshape(-1) - test_y).square().mean().sqrt())
            found["runs"].append(run)
    return found


def _attempt(compute: Callable[[], Results], device: torch.device) -> Results:
    """What it returns, with seconds and peak memory; or why it failed.  It may give seconds of its own."""
    _reset(device)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            seconds, _, found = clock(compute, device)
    except Exception as error:
        return {"failed": reason_of(error)}
    said = [one for one in caught if issubclass(one.category, UserWarning)]  # such as that an engine was left out
    found = {"seconds": seconds, **found, "warnings": sorted({str(one.message).split("\n")[0][:300] for one in said})}
    return found | ({"peak_memory_gb": _peak(device) / 1e9} if device.type == "cuda" else {})


def _solvers(what: Results, data: list[Tensor], noise: float) -> Iterator[tuple[str, Callable[[], Results]]]:
    x, y, test_x = data
    kernel = build(x[:2].cpu(), y[:2].cpu(), noise).covar_module.to(x.device).requires_grad_(False)
    limit = what["seconds"]
    if what["group"] == "full":
        full = sketchgp.FullProblem(kernel, x, y, noise)
        for name in ("ConjugateGradients", "ASkotch", "Skotch", "EigenPro2", "Cholesky"):
            kind = getattr(sketchgp, name)
            solver = kind() if kind is sketchgp.Cholesky else kind(tol=1e-3, max_seconds=limit)
            yield name, functools.partial(_solve, solver, full, test_x, x)
        return
    z = sketchgp.choose_inducing_points(kernel, x, what["m"]).points
    few = sketchgp.InducingPointProblem(kernel, x, y, noise, z)
    for name in ("KRILL", "Falkon", "QR", "NystromPCG", "SketchySAGA", "EigenPro3", "EigenPro4"):
        kind = getattr(sketchgp, name)
        solver = kind() if kind is sketchgp.QR else kind(max_seconds=limit)
        yield name, functools.partial(_solve, solver, few, test_x, z)
    yield (
        "DoublyStochastic",
        functools.partial(_learn, sketchgp.DoublyStochastic(max_seconds=limit), kernel, data, noise),
    )


def _solve(solver: Any, problem: Any, test_x: Tensor, centres: Tensor) -> Results:
    started = time.perf_counter()
    quiet = {"progress": False} if hasattr(solver, "max_seconds") else {}  # direct solvers have no bar
    solution = solver.solve(problem, **quiet)
    matvec_limit.synchronise(test_x.device)
    seconds = time.perf_counter() - started
    weights = solution.value.reshape(len(centres), -1).to(test_x)
    mean = KernelMatrix.of(problem.kernel, test_x, centres).detach() @ weights
    return {"seconds": seconds, "mean": mean, **_told(solution.report)}


def _learn(solver: Any, kernel: Kernel, data: list[Tensor], noise: float) -> Results:
    """By a solver whose solution is coefficients of random features."""
    x, y, test_x = data
    problem = sketchgp.RandomFeatureProblem(kernel, x, y, noise)
    started = time.perf_counter()
    solution = solver.solve(problem, progress=False)
    matvec_limit.synchronise(x.device)
    seconds = time.perf_counter() - started
    learner = solver.learner(problem)
    mean = learner.evaluate(learner.features.prepare(test_x), solution.value.reshape(-1, 2, y[0].numel()))
    return {"seconds": seconds, "mean": mean, **_told(solution.report)}


def _told(report: Any) -> Results:
    return {
        "iterations": report.iterations,
        "residual": report.max_residual,
        "residual_rows": report.residual_rows,
        "reason": str(report.reason),
        "rank": report.rank,
        "setup_seconds": report.setup_seconds,
    }


def _gpytorch(data: list[Tensor], noise: float, device: torch.device) -> Iterator[tuple[str, Callable[[], Results]]]:
    x, y, test_x = data

    def predict(keops: bool, accelerated: bool) -> Results:
        model = build(x.cpu(), y.cpu(), noise).to(device)
        if keops:
            import pykeops.torch  # noqa: F401  GPyTorch's kernel goes on without, and says nothing

            kernel = gpytorch.kernels.keops.RBFKernel().to(device)
            kernel.lengthscale = model.covar_module.base_kernel.lengthscale.detach()
            model.covar_module.base_kernel = kernel
        if accelerated:
            sketchgp.accelerate(model)
        with torch.no_grad(), gpytorch.settings.skip_posterior_variances(), counted_gpytorch_cg() as solves:
            seconds, _, mean = clock(lambda: model(test_x).mean, device)
            weights = model.prediction_strategy.mean_cache.detach().reshape(-1)
        plain = build(x[:2].cpu(), y[:2].cpu(), noise).covar_module.to(device)
        return {"seconds": seconds, "mean": mean, "residual": true_residual(plain, x, y, noise, weights),
                "iterations": None if accelerated else sum(solve.iterations for solve in solves)}  # fmt: skip

    for name, keops, accelerated in (
        ("sketchgp.accelerate", False, True),
        ("GPyTorch's defaults", False, False),
        ("GPyTorch with KeOps", True, False),
    ):
        yield name, functools.partial(predict, keops, accelerated)


# --------------------------------------------------------------------------------- means, inducing points, training
def synthetic(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """``(n, 8)`` normal inputs and a smooth function of them with noise of deviation 0.1, float32."""
    stream = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=stream)
    y = (x[:, :3].sum(dim=1)).sin() + 0.5 * (x[:, 3] * x[:, 4]) + 0.3 * (2 * x[:, 5]).cos()
    return x, _standard(y + 0.1 * torch.randn(n, generator=stream))


def taxi_like(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """``(n, 8)`` made-up trips: places in a few crowded quarters (so that many rows nearly coincide), hour, weekday,
    passengers, distance; and the logarithm of how long they take, with noise that no input explains.  Standardised."""
    stream = torch.Generator().manual_seed(seed)
    quarters = 0.2 * torch.randn(12, 2, generator=stream)
    crowd = torch.distributions.Categorical(logits=-0.4 * torch.arange(12.0))
    chosen = torch.multinomial(crowd.probs, 2 * n, replacement=True, generator=stream).reshape(2, n)
    spread = torch.tensor([0.01, 0.05])[torch.randint(2, (2, n, 1), generator=stream)]
    start, end = quarters[chosen] + spread * torch.randn(2, n, 2, generator=stream)
    hour, day = 24 * torch.rand(n, generator=stream), torch.randint(7, (n,), generator=stream).float()
    riders = 1 + torch.poisson(torch.full((n,), 0.6), generator=stream)
    distance = (start - end).abs().sum(dim=1) + 0.01
    speed = 1 + 0.5 * ((hour - 4) * math.pi / 12).cos() + 0.2 * (day > 4)
    y = (distance / speed).log() + 0.3 * torch.randn(n, generator=stream)
    x = torch.stack([*start.T, *end.T, hour, day, riders, distance.log()], dim=1)
    return (x - x.mean(dim=0)) / x.std(dim=0), _standard(y)


def _standard(y: Tensor) -> Tensor:
    return (y - y.mean()) / y.std()


def mean(what: Results, device: torch.device, directory: Path) -> Results:
    """A posterior mean to a residual of 1e-2, Matern-3/2, noise 0.1."""
    make = {"synthetic": synthetic, "taxi-like": taxi_like}[what["data"]]
    x, y = make(what["n"] + 2000, 0)
    held, x, y = (x[-2000:].to(device), y[-2000:]), x[:-2000].to(device), y[:-2000].to(device)
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=1.5)).to(device).requires_grad_(False)
    kernel.base_kernel.lengthscale, kernel.outputscale = 2.0, 1.0
    solver = getattr(sketchgp, what["solver"])(tol=1e-2, max_seconds=what["seconds"])
    problem = sketchgp.FullProblem(kernel, x, y, 0.1)
    run = _attempt(functools.partial(_solve, solver, problem, held[0], x), device)
    if "mean" in run:
        run["rmse"] = float((run.pop("mean").cpu().reshape(-1) - held[1]).square().mean().sqrt())
    return {"n": what["n"], "tol": 1e-2, "noise": 0.1, "lengthscale": 2.0, **run}


def images(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """``(n, 784)`` in [0, 1], smooth random images of ten classes, shifted and noisy; labels."""
    stream = torch.Generator().manual_seed(seed)
    seeds = torch.randn(10, 8, 7, 7, generator=stream)
    models = torch.nn.functional.interpolate(seeds, size=(28, 28), mode="bicubic").clamp(0, 2) / 2
    labels, style = (torch.randint(size, (n,), generator=stream) for size in (10, 8))
    x = torch.empty(n, 28, 28)
    for label in range(10):
        for kind in range(8):
            rows = ((labels == label) & (style == kind)).nonzero()[:, 0]
            shifts = torch.randint(-2, 3, (len(rows), 2), generator=stream)
            for down in range(-2, 3):
                for right in range(-2, 3):
                    some = rows[(shifts == torch.tensor([down, right])).all(dim=1)]
                    x[some] = models[label, kind].roll((down, right), (0, 1))
    return x.reshape(n, 784).add_(0.15 * torch.randn(n, 784, generator=stream)).clamp_(0, 1), labels


def eigenpro(what: Results, device: torch.device, directory: Path) -> Results:
    """EigenPro 4 on made-up images of ten classes, Matern-1/2, inducing points drawn from the rows."""
    held_out = min(5000, what["n"] // 3)
    x, labels = images(what["n"] + held_out, 0)
    classes = sketchgp.OneHot(labels)
    x, y = x.to(device), classes.encode(labels).to(device)
    z, test_x = x[: what["m"]].clone(), x[what["n"] :]
    kernel = gpytorch.kernels.MaternKernel(nu=0.5).to(device).requires_grad_(False)
    kernel.lengthscale = 20.0
    problem = sketchgp.InducingPointProblem(kernel, x[: what["n"]], y[: what["n"]], 0.0, z)
    solver = sketchgp.EigenPro4(epochs=what.get("epochs", 1), patience=None, max_seconds=what["seconds"])
    run = _attempt(functools.partial(_solve, solver, problem, test_x, z), device)
    if "mean" in run:
        given = run.pop("mean").cpu()
        run["accuracy"] = float((classes.decode(given) == labels[what["n"] :]).double().mean())
    return {"n": what["n"], "m": what["m"], **run}


def training(what: Results, device: torch.device, directory: Path) -> Results:
    """Steps of the marginal likelihood, loss and gradient, Matern-3/2 with ARD, 8 inputs."""
    x, y = (part.to(device) for part in synthetic(what["n"], 0))
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=1.5, ard_num_dims=8))
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = Model(x, y, likelihood, kernel).to(device)
    kernel.base_kernel.lengthscale, likelihood.noise = 2.0, 0.1
    sketchgp.accelerate(model)
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    model.train()

    def step() -> Results:
        model.zero_grad()
        with sketchgp.record_solves() as solves:
            loss = -mll(model(x), y)
            loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        return {
            "loss": float(loss.detach()),
            "gradient_norm": float(gradient.norm()),
            "solves": [_told(s) for s in solves],
        }

    return {"n": what["n"], "runs": [_attempt(step, device) for _ in range(what.get("steps", 1))]}


ITEMS: dict[str, Callable[[Results, torch.device, Path], Results]] = {
    "limits": limits,
    "tests": tests,
    "products": products,
    "kin40k": kin40k,
    "mean": mean,
    "eigenpro": eigenpro,
    "training": training,
}
