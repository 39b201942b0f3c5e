"""``fit`` without options in other units, beside SciPy's L-BFGS on the dense loss.

200 random problems of 60 to 120 rows.  Each has a kernel, a mean (zero, constant or linear; fixed or free), targets
with or without noise, centred or shifted by up to 1,000 times their size, inputs shifted likewise, and in some the
inputs pass through a standardisation, a batch normalisation or a small network before the kernel.  Each is fitted in
two units: as drawn, and with inputs and targets multiplied by random factors between 1e-3 and 1e3.  The loss does not
depend on the units but for a known constant, so all fits should end at one loss.

- fit: ``accelerate`` and ``fit`` without options, from GPyTorch's start in each unit.
- SciPy: L-BFGS on the loss by a Cholesky factorization, in the units as drawn, in the logarithms of what is positive;
  the best of three starts: the model's own, and long and short lengthscales with little noise.

A fit agrees where it ends within 0.01 a row of the lowest fit of its problem, and at most 0.01 above SciPy.  One that
does not agree should say that it is not sure.

    python benchmarks/fit_units.py                # fifteen minutes on one core; resumes
    python benchmarks/fit_units.py --quick        # 6 problems
    python benchmarks/fit_units.py --report       # the table again, nothing measured
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpytorch
import numpy as np
import torch
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import MaternKernel, RBFKernel, RQKernel, ScaleKernel
from scipy.optimize import minimize
from torch import Tensor

import sketchgp
from common import describe, median, number, table
from runner import Benchmark, Group

PROBLEMS, QUICK = 200, 6
SEED = 0
LEAST = 1e-4  # noise, of the targets' squared unit
LARGEST = 1e5  # exponent of a rational quadratic kernel
CLOSE = 0.01  # a row
UNSURE = "not sure"  # the first words of a note of a fit that doubts its end
STARTS = ((None, None), (3.0, 1e-2), (0.3, 1e-3))  # lengthscales over the inputs' size, noise over the variance


def _matern(nu: float) -> Callable[[int], Any]:
    return lambda d: ScaleKernel(MaternKernel(nu=nu, ard_num_dims=d))


KERNELS: dict[str, Callable[[int], Any]] = {
    "RBF": lambda d: ScaleKernel(RBFKernel(ard_num_dims=d)),
    "RBF, one lengthscale": lambda d: ScaleKernel(RBFKernel()),
    "Matern-1/2": _matern(0.5),
    "Matern-3/2": _matern(1.5),
    "Matern-5/2": _matern(2.5),
    "rational quadratic": lambda d: ScaleKernel(RQKernel(ard_num_dims=d)),
    "scaled twice": lambda d: ScaleKernel(ScaleKernel(RBFKernel(ard_num_dims=d))),
    "sum": lambda d: ScaleKernel(RBFKernel(ard_num_dims=d)) + ScaleKernel(MaternKernel(nu=1.5)),
    "product": lambda d: ScaleKernel(RBFKernel(ard_num_dims=d) * MaternKernel(nu=1.5)),
}
MEANS = ("zero", "zero", "zero", "constant", "constant", "fixed constant", "linear")
TRANSFORMS = ("none", "none", "none", "standardised", "batch norm", "network")


@dataclass(frozen=True)
class Problem:
    """One random problem in the units as drawn.

    :ivar units: factors of inputs and targets for each fit.
    """

    x: Tensor
    y: Tensor
    kernel: str
    mean: str
    transform: str
    dtype: str
    units: tuple[tuple[float, float], ...]
    facts: dict[str, Any]


class Model(gpytorch.models.ExactGP):
    """A mean, a transformation of the inputs, and a kernel."""

    def __init__(self, problem: Problem, inputs: float, targets: float) -> None:
        x, y = inputs * problem.x, targets * problem.y
        dtype = getattr(torch, problem.dtype)
        constraint = GreaterThan(LEAST * targets**2)
        super().__init__(x.to(dtype), y.to(dtype), gpytorch.likelihoods.GaussianLikelihood(noise_constraint=constraint))
        features = 2 if problem.transform == "network" else x.shape[1]
        self.mean_module: Any = gpytorch.means.ZeroMean()
        if problem.mean == "linear":
            self.mean_module = gpytorch.means.LinearMean(x.shape[1])
            for parameter in self.mean_module.parameters():
                torch.nn.init.zeros_(parameter)
        elif problem.mean != "zero":
            self.mean_module = gpytorch.means.ConstantMean()
            if problem.mean == "fixed constant":
                self.mean_module.raw_constant.requires_grad_(False).fill_(float(y.median()))
        self.covar_module = KERNELS[problem.kernel](features)
        self.register_buffer("centre", x.mean(dim=0))
        self.register_buffer("size", x.std(dim=0))
        self.network: Any = None
        if problem.transform == "batch norm":
            self.network = torch.nn.BatchNorm1d(x.shape[1], affine=False)
        elif problem.transform == "network":
            generator = torch.Generator().manual_seed(int(problem.facts["seed"]))
            self.network = torch.nn.Sequential(
                torch.nn.Linear(x.shape[1], 8), torch.nn.Tanh(), torch.nn.Linear(8, features)
            )
            for parameter in self.network.parameters():
                parameter.requires_grad_(False).copy_(torch.randn(parameter.shape, generator=generator))
        self.standardised = problem.transform in ("standardised", "network")
        self.to(dtype)

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        z = (x - self.centre) / self.size if self.standardised else x
        z = z if self.network is None else self.network(z)
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(z))


def problem_of(seed: int) -> Problem:
    """The problem with this seed."""
    draw = np.random.RandomState(seed)
    rows, d = int(draw.randint(60, 121)), int(draw.choice([1, 2, 3, 5]))
    kernel, mean, transform = (str(draw.choice(names)) for names in (list(KERNELS), list(MEANS), list(TRANSFORMS)))
    shape = str(draw.choice(["uniform", "normal", "grid"]))
    x = {"uniform": draw.rand, "normal": draw.randn, "grid": lambda *size: draw.randint(0, 40, size) / 40}[shape](
        rows, d
    )
    weights, phases = draw.randn(4, d) * 10 ** draw.uniform(-0.5, 0.7), 2 * math.pi * draw.rand(4)
    signal = (np.sin(x @ weights.T + phases) * draw.randn(4)).sum(axis=1)
    signal = (signal - signal.mean()) / signal.std()
    noise = float(draw.choice([0.0, 0.01, 0.1, 0.5, 2.0]))
    y = signal + noise * draw.randn(rows)
    y = (y - y.mean()) / y.std()
    x_shift, y_shift = (float(draw.choice([0.0, s * 10 ** draw.uniform(0, 3)])) for s in draw.choice([-1, 1], 2))
    units = ((1.0, 1.0), *((float(10 ** draw.uniform(-3, 3)), float(10 ** draw.uniform(-3, 3))) for _ in range(1)))
    dtype = str(draw.choice(["float64", "float64", "float32"]))
    facts = {"seed": seed, "rows": rows, "inputs": d, "kernel": kernel, "mean": mean, "transform": transform,
             "noise": noise, "x_shift": x_shift, "y_shift": y_shift, "dtype": dtype, "points": shape}  # fmt: skip
    shifted = torch.from_numpy(x + x_shift * x.std()), torch.from_numpy(y + y_shift)
    return Problem(*shifted, kernel, mean, transform, dtype, units, facts)


def by_fit(problem: Problem) -> list[dict[str, Any]]:
    """The fits of a problem, one for each of its units; losses are those in the units as drawn."""
    found = []
    for inputs, targets in problem.units:
        model = sketchgp.accelerate(Model(problem, inputs, targets))
        began = time.process_time()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            history = sketchgp.fit(model, progress=False)
        took = time.process_time() - began
        found.append({
            "units": [inputs, targets], "loss": history.best_loss - math.log(targets), "cpu_seconds": took,
            "steps": len(history.losses), "gradient": history.gradients[history.best_step], "reason": history.reason,
            "notes": history.notes, "at_limits": history.at_limits,
            "warnings": [str(one.message).split("\n")[0][:120] for one in caught],
        })  # fmt: skip
    return found


class Dense:
    """The loss by a Cholesky factorization, in the logarithms of what is positive."""

    def __init__(self, problem: Problem) -> None:
        self.model = Model(problem, 1.0, 1.0).double().train()
        known = {id(p): constraint for _, p, constraint in self.model.named_parameters_and_constraints()}
        free = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self.names, self.parameters = [name for name, _ in free], [p for _, p in free]
        self.constraints = [known.get(id(p)) for p in self.parameters]

    def values(self) -> np.ndarray:
        """The variables."""
        parts = []
        for parameter, constraint in zip(self.parameters, self.constraints, strict=True):
            value = parameter.detach()
            parts.append((value if constraint is None else constraint.transform(value).log()).reshape(-1))
        return torch.cat(parts).numpy()

    def bounds(self) -> list[tuple[float | None, float | None]]:
        """The least noise, and the largest exponent, beyond which rounding makes the matrix; other variables have none,
        so that the first step is of length 1."""
        found: list[tuple[float | None, float | None]] = []
        for name, parameter, constraint in zip(self.names, self.parameters, self.constraints, strict=True):
            least = 0.0 if constraint is None else float(constraint.lower_bound)
            lower = math.log(least * (1 + 1e-6)) if least > 0 else None
            found += [(lower, math.log(LARGEST) if name.endswith("raw_alpha") else None)] * parameter.numel()
        return found

    def __call__(self, vector: np.ndarray) -> tuple[float, np.ndarray]:
        """Loss and gradient; a high loss where there is none."""
        variables = torch.from_numpy(vector).clone().requires_grad_()
        parts, loss = variables.split([p.numel() for p in self.parameters]), math.nan
        raws = []
        for part, parameter, constraint in zip(parts, self.parameters, self.constraints, strict=True):
            value = part.reshape(parameter.shape)
            raws.append(value if constraint is None else constraint.inverse_transform(value.exp()))
            parameter.data.copy_(raws[-1].detach())
            parameter.grad = None
        try:
            prior = self.model.forward(*self.model.train_inputs)
            matrix = prior.lazy_covariance_matrix.to_dense()
            matrix = matrix + self.model.likelihood.noise * torch.eye(len(matrix), dtype=matrix.dtype)
            root = torch.linalg.cholesky(matrix)
            residual = (self.model.train_targets - prior.mean).unsqueeze(1)
            weights = torch.linalg.solve_triangular(root, residual, upper=False)
            value = 0.5 * weights.square().mean() + root.diagonal().log().mean() + 0.5 * math.log(2 * math.pi)
            value.backward()
            loss = float(value.detach())
        except torch.linalg.LinAlgError:
            pass
        total = sum((raw * p.grad).sum() for raw, p in zip(raws, self.parameters, strict=True) if p.grad is not None)
        if not math.isfinite(loss) or not torch.is_tensor(total):
            return 1e6, np.zeros_like(vector)
        (gradient,) = torch.autograd.grad(total, variables)
        gradient = gradient.numpy()
        return (loss, gradient) if np.isfinite(gradient).all() else (1e6, np.zeros_like(vector))

    def start(self, times: float, share: float) -> None:
        """Lengthscales of so many times the size of what the kernel sees, and a noise of such a share."""
        model, seen = self.model, self.model.train_inputs[0]
        seen = (seen - model.centre) / model.size if model.standardised else seen
        seen = seen if model.network is None else model.network(seen)
        size, variance = seen.std(dim=0).detach(), float(model.train_targets.var())
        for kernel in model.covar_module.modules():
            if getattr(kernel, "has_lengthscale", False):
                kernel.lengthscale = times * (size.norm() if kernel.ard_num_dims is None else size * len(size) ** 0.5)
            if isinstance(kernel, ScaleKernel):
                double = isinstance(kernel.base_kernel, ScaleKernel) or model.covar_module is not kernel
                kernel.outputscale = variance ** (0.5 if double else 1.0)
        model.likelihood.noise = max(share * variance, 10 * LEAST)


def by_scipy(problem: Problem) -> dict[str, Any]:
    """The ends from each start."""
    began, ends = time.process_time(), []
    for times, share in STARTS:
        dense = Dense(problem)
        if times is not None:
            dense.start(times, share)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result: Any = minimize(dense, dense.values(), jac=True, method="L-BFGS-B", bounds=dense.bounds(),
                                   options={"maxiter": 500, "maxcor": 20})  # fmt: skip
        ends.append(float(result.fun))
    return {"losses": ends, "loss": min(ends), "cpu_seconds": time.process_time() - began}


def perform(problem: Problem, task: str) -> dict[str, Any]:
    return {**problem.facts, "fits": by_fit(problem), "scipy": by_scipy(problem)}


def groups(options: Any, directory: Path, results: dict[str, Any]) -> Iterator[Group]:
    for seed in range(SEED, SEED + (QUICK if options.quick else PROBLEMS)):
        yield Group(("runs",), [(str(seed), "all")], load=lambda seed=seed: problem_of(seed))


def verdicts(run: dict[str, Any]) -> list[tuple[float, bool]]:
    """How far each fit of a problem is above the lowest one and SciPy, and whether it said that it is not sure."""
    least = min(run["scipy"]["loss"], *(one["loss"] for one in run["fits"]))
    said = [
        not one["reason"].endswith("settled") or any(UNSURE in note for note in one["notes"]) for one in run["fits"]
    ]
    return [(one["loss"] - least, doubt) for one, doubt in zip(run["fits"], said, strict=True)]


def say(run: dict[str, Any]) -> str:
    fits = ", ".join(f"{one['loss']:.4f}" for one in run["fits"])
    return f"{run['kernel']}, {run['mean']}, {run['transform']}: fits {fits}; SciPy {run['scipy']['loss']:.4f}"


def report(results: dict[str, Any]) -> str:
    runs = list(results["runs"].values())
    found = [verdicts(run) for run in runs]
    fits = [one for each in found for one in each]
    agreeing = sum(all(gap <= CLOSE for gap, _ in each) for each in found)
    silent = sum(gap > CLOSE and not doubt for gap, doubt in fits)
    doubted = sum(gap <= CLOSE and doubt for gap, doubt in fits)
    lower = sum(run["scipy"]["loss"] > CLOSE + min(one["loss"] for one in run["fits"]) for run in runs)
    seconds = [median([part["cpu_seconds"] for part in parts]) for parts in
               ([one for run in runs for one in run["fits"]], [run["scipy"] for run in runs])]  # fmt: skip
    rows = [
        [run["seed"], run["rows"], run["inputs"], run["kernel"], run["mean"], run["transform"], number(run["noise"]),
         number(run["y_shift"]), *(f"{one['loss']:.4f}{'?' if doubt else ''}" for one, (_, doubt)
                                   in zip(run["fits"], each, strict=True)), f"{run['scipy']['loss']:.4f}"]
        for run, each in zip(runs, found, strict=True) if any(gap > CLOSE for gap, _ in each)
    ]  # fmt: skip
    head = ["seed", "rows", "inputs", "kernel", "mean", "transform", "noise", "shift of targets", "fit", "other unit",
            "SciPy"]  # fmt: skip
    return "\n".join([
        "# Fits in other units", "", describe(results["machine"]), "",
        f"{len(runs)} of the {results['problem']['problems']} problems are measured.", "",
        f"- Of {len(runs)} problems, {agreeing} ({100 * agreeing / len(runs):.1f}%) end in both units within "
        f"{CLOSE:g} a row of each other and of the best of SciPy's three ends.",
        f"- Of {len(fits)} fits, {sum(gap > CLOSE for gap, _ in fits)} end higher than that; {silent} of these do not "
        f"say that they are not sure. Of the others {doubted} say so.",
        f"- On {lower} problems the lowest fit ends more than {CLOSE:g} a row below SciPy.",
        f"- Processor seconds in the median: {number(seconds[0])} a fit, {number(seconds[1])} for SciPy's three.",
        *(["", "Losses are negative log marginal likelihoods a row, in the units as drawn. Problems whose fits do not "
           "agree (a question mark: the fit says that it is not sure):", "", table(head, rows)] if rows else []),
    ])  # fmt: skip


BENCHMARK = Benchmark(
    doc=__doc__,
    name="fit_units",
    quick=f"{QUICK} problems",
    problem=lambda options: {"problems": QUICK if options.quick else PROBLEMS, "seed": SEED, "least_noise": LEAST},
    groups=groups,
    perform=perform,
    report=report,
    say=say,
    versions=("scipy",),
    reads_data=lambda options: False,
)


if __name__ == "__main__":
    BENCHMARK.main()
