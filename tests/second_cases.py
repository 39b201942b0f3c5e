"""Random problems for ``test_second_properties.py``: how they are drawn, what is asked, what counts as right.

A case is a number: ``python tests/second_cases.py SEED NUMBER`` runs one and prints what was drawn, and
``python tests/second_cases.py SEED FIRST LAST`` runs many and sums up.  An answer has to be within the tolerance that
the documentation gives, or warned of, or refused by an error of sketchgp's where the problem is hard; anything else is
a :class:`Fault`.
"""

from __future__ import annotations

import contextlib
import copy
import io
import math
import os
import pickle
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import gpytorch
import linear_operator
import numpy as np
import torch
from linear_operator.utils.errors import NotPSDError

import second_reference as exact
import sketchgp
from second_calls import WRONG
from second_reference import LONG, Dense, Sparse, Truth, number, rows

KERNELS = gpytorch.kernels
WAVES = {"periodic", "cosine", "spectral"}
HARD = 1e11  # condition numbers from which an error or a warning is no surprise in float64


class Fault(AssertionError):
    """An answer that is neither right nor warned of nor refused."""


class Model(gpytorch.models.ExactGP):
    """An ordinary exact model, with or without a network before the kernel."""

    def __init__(self, x, y, likelihood, mean, kernel, net=None):
        super().__init__(x, y, likelihood)
        self.mean_module, self.covar_module, self.net = mean, kernel, net

    def forward(self, x):
        seen = x if self.net is None else self.net(x)
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(seen))


class Case:
    """The random numbers of one case, what it drew, and how its answers came out."""

    def __init__(self, seed: int, index: int):
        self.rng = np.random.default_rng([seed, index])
        self.later = np.random.default_rng([seed, index, 1])  # for choices that came later and renumber no case
        self.told: dict[str, Any] = {}
        self.steps: list[str] = []
        self.outcomes: Counter[str] = Counter()
        self.warned: list[str] = []
        self.limits: list[str] = []
        torch.manual_seed(int(self.rng.integers(2**31)))

    def pick(self, *choices: Any) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def log(self, low: float, high: float) -> float:
        return float(10 ** self.rng.uniform(low, high))

    def note(self, **drawn: Any) -> None:
        self.told.update(drawn)

    def ask(self, name: str, call: Callable[[], Any], hard: bool = False, refusal: str | None = None) -> Any:
        """Return what a call answers, or None where it refuses for a reason that counts.

        :param hard: whether rounding is a reason to refuse.
        :param refusal: a word of the error that the documentation announces for this call.
        """
        self.steps.append(name)
        self.warned = []
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            try:
                found = call()
            except (sketchgp.SketchGPError, NotPSDError) as error:
                words = "tol='certified'|FullScale expects" + ("" if refusal is None else f"|{refusal}")
                announced = any(word in str(error) for word in words.split("|"))
                if announced and isinstance(error, sketchgp.InputError):
                    self.outcomes["refused"] += 1
                    return None
                if hard and isinstance(error, (sketchgp.NumericalError, NotPSDError)):
                    self.outcomes["refused"] += 1
                    return None
                raise Fault(f"{name}: refused: {type(error).__name__}: {error}") from error
            except Exception as error:
                raise Fault(f"{name}: {type(error).__name__}: {error}") from error
        for each in seen:
            if issubclass(each.category, (DeprecationWarning, FutureWarning, PendingDeprecationWarning)):
                continue
            if "Sparse invariant" in str(each.message) or "match the stored training data" in str(each.message):
                continue
            self.warned.append(f"{each.category.__name__}: {each.message}")
        return found

    def close(self, name: str, found: Any, truth: Any, allowed: Any, rounding: Any = 0.0) -> None:
        """Compare numbers; more than ``allowed`` needs a warning, ``rounding`` is what float64 cannot help."""
        found = exact.number(found) if isinstance(found, torch.Tensor) else np.asarray(found, LONG)
        truth = np.asarray(truth, LONG)
        if found.shape != truth.shape:
            raise Fault(f"{name}: shape {found.shape}, expected {truth.shape}")
        if (np.abs(truth) > 1e37).any():  # beyond float32
            keep = np.abs(truth) <= 1e37
            allowed, rounding = (np.broadcast_to(part, truth.shape)[keep] for part in (allowed, rounding))
            found, truth = found[keep], truth[keep]
        if not np.isfinite(found).all():
            raise Fault(f"{name}: not finite: {found.astype(float)}; truth {truth.astype(float)}")
        off = np.abs(found - truth)
        allowed = np.broadcast_to(np.asarray(allowed, LONG), truth.shape)
        if (off <= allowed).all():
            self.outcomes["right"] += 1
            if self.warned:
                self.outcomes["warned though right"] += 1
            return
        if self.warned:
            self.outcomes["warned"] += 1
            return
        if (off <= allowed + rounding).all():
            self.outcomes["within rounding"] += 1
            self.limits.append(f"{name}: off by {float((off / allowed).max()):.3g} of what is allowed")
            return
        worst = np.unravel_index(np.argmax(off / (allowed + rounding)), truth.shape)
        raise Fault(
            f"{name}: off by {float(off[worst]):.3g} at {worst}, allowed {float(allowed[worst]):.3g} and rounding "
            f"{float(np.broadcast_to(rounding, truth.shape)[worst]):.3g}; found {float(found[worst])!r}, truth "
            f"{float(truth[worst])!r}"
        )

    def below(self, name: str, off: Any, bound: Any) -> None:
        """Hold a certain bound against the true error, warned or not."""
        off, bound = np.asarray(off, LONG), np.asarray(bound, LONG)
        if not (off <= bound).all():
            worst = np.unravel_index(np.argmax(off - bound), off.shape)
            raise Fault(f"{name}: error {float(off[worst]):.3g} above the bound {float(bound[worst]):.3g}")
        self.outcomes["bounds kept"] += 1


# ----- what is drawn -----


def draw_rows(case: Case, n: int, d: int, size: float, centre: np.ndarray, layout: str) -> np.ndarray:
    rng = case.rng
    x = rng.uniform(-1, 1, (n, d))
    if layout == "uneven":
        dense = rng.random(n) < 0.7
        x[dense] = 0.02 * rng.standard_normal((int(dense.sum()), d)) + rng.uniform(-1, 1, d)
    elif layout == "normal":
        x = rng.standard_normal((n, d)) / 2
    elif layout == "grid":
        x = np.round(4 * x) / 4
    elif layout == "duplicates":
        x = x[rng.integers(max(1, n // 2), size=n)]
    elif layout == "line":
        x = np.outer(np.linspace(-1, 1, n), rng.standard_normal(d) / np.sqrt(d))
    x = size * x + centre
    if layout == "far":
        count = int(rng.integers(1, max(2, n // 8) + 1))
        x[rng.integers(n, size=count)] += size * case.log(3, 9) * rng.choice([-1, 1], (count, d))
    return x


def draw_leaf(case: Case, dims: list[int], size: float, shift: float) -> Any:
    rng = case.rng
    d = len(dims)
    ard = d if d > 1 and case.chance(0.4) else None
    lengthscale = torch.tensor(size * 10 ** rng.uniform(-1, 1, ard or 1))
    some: dict[str, Any] = {"active_dims": dims}
    name = case.pick(
        *["rbf", "matern12", "matern32", "matern52", "rq"] * 3,
        *["periodic", "cosine", "linear", "linear", "polynomial", "piecewise", "piecewise"],
        *["spectral", "arccosine", "laplace", "constant"],
    )
    case.told.setdefault("kernels", []).append(name)
    if name in ("linear", "polynomial", "arccosine"):
        reach = size + shift  # so that the diagonal is of size one
        if name == "linear":
            kernel = KERNELS.LinearKernel(**some)
            kernel.variance = 1 / reach**2
            return kernel
        if name == "arccosine":
            order = case.pick(0, 1, 2)
            kernel = KERNELS.ScaleKernel(sketchgp.ArcCosineKernel(order, active_dims=dims))
            kernel.outputscale = reach ** (-2 * order)
            return kernel
        power = case.pick(2, 3)
        kernel = KERNELS.ScaleKernel(KERNELS.PolynomialKernel(power, **some))
        kernel.base_kernel.offset = reach**2 * case.log(-1, 1)
        kernel.outputscale = reach ** (-2 * power)
        return kernel
    if name == "constant":
        kernel = KERNELS.ConstantKernel(**some)
        kernel.constant = torch.tensor(case.log(-1, 1))
        return kernel
    if name == "cosine":
        if d > 1:  # the cosine of a distance is no covariance beyond one dimension
            some["active_dims"] = dims[:1]
        kernel = KERNELS.CosineKernel(**some)
        kernel.period_length = size * case.log(-0.5, 1)
        return kernel
    if name == "spectral":
        kernel = KERNELS.SpectralMixtureKernel(num_mixtures=2, ard_num_dims=d, **some)
        kernel.mixture_weights = torch.tensor(rng.uniform(0.2, 1, 2))
        kernel.mixture_scales = torch.tensor(rng.uniform(0.05, 0.5, (2, 1, d)) / size)
        kernel.mixture_means = torch.tensor(rng.uniform(0.05, 1, (2, 1, d)) / size)
        return kernel
    if name == "periodic":
        kernel = KERNELS.PeriodicKernel(**({"ard_num_dims": ard} if ard else {}), **some)
        kernel.lengthscale = torch.tensor(10 ** rng.uniform(-1, 1, ard or 1))
        kernel.period_length = torch.tensor(size * 10 ** rng.uniform(-0.5, 1, ard or 1))
        return kernel
    if name == "piecewise":
        kernel = KERNELS.PiecewisePolynomialKernel(q=case.pick(0, 1, 3), ard_num_dims=ard, **some)
        lengthscale = 3 * lengthscale
    elif name == "laplace":
        kernel = sketchgp.LaplaceKernel(ard_num_dims=ard, active_dims=dims)
    elif name == "rbf":
        kernel = KERNELS.RBFKernel(ard_num_dims=ard, **some)
    elif name == "rq":
        kernel = KERNELS.RQKernel(ard_num_dims=ard, **some)
        kernel.alpha = case.log(-1, 1.5)
    else:
        kernel = KERNELS.MaternKernel({"12": 0.5, "32": 1.5, "52": 2.5}[name[6:]], ard_num_dims=ard, **some)
    kernel.lengthscale = lengthscale
    return kernel


def draw_kernel(case: Case, d: int, size: float, shift: float, plain: bool = False, scale: float | None = None) -> Any:
    """Return a kernel: a leaf, a sum or a product of leaves, scaled any number of times."""

    def scaled(kernel: Any, by: float) -> Any:
        found = KERNELS.ScaleKernel(kernel)
        found.outputscale = by
        return found

    def some_dims() -> list[int]:
        if d > 1 and case.chance(0.5):
            return sorted(case.rng.choice(d, int(case.rng.integers(1, d)), replace=False).tolist())
        return list(range(d))

    form = "leaf" if plain else case.pick("leaf", "leaf", "leaf", "sum", "product", "product of three", "mixed")
    outer = scale if scale is not None else (case.log(-3, 3) ** 2 if case.chance(0.3) else case.log(-1, 1))
    case.note(form=form, outputscale=outer)
    if form == "leaf":
        kernel = draw_leaf(case, list(range(d)), size, shift)
    else:
        parts = [draw_leaf(case, some_dims(), size, shift) for _ in range(2 if form in ("sum", "product") else 3)]
        if case.chance(0.3):
            parts[0] = scaled(parts[0], case.log(-1, 1))
        if form == "sum":
            kernel = parts[0] + parts[1]
        elif form == "product":
            kernel = parts[0] * parts[1]
        elif form == "product of three":
            kernel = parts[0] * parts[1] * parts[2]
        else:
            kernel = parts[0] * parts[1] + parts[2]
    kernel = scaled(kernel, outer)
    if case.chance(0.2):
        case.note(nested=True)
        kernel = scaled(kernel, case.log(-1, 1))
    return kernel


def draw_mean(case: Case, d: int, size: float, level: float, spread: float) -> Any:
    name = case.pick("zero", "constant", "constant", "linear")
    case.note(mean=name)
    if name == "zero":
        return gpytorch.means.ZeroMean()
    if name == "constant":
        mean = gpytorch.means.ConstantMean()
        mean.initialize(constant=level + spread * case.rng.standard_normal())
        return mean
    mean = gpytorch.means.LinearMean(d)
    mean.initialize(weights=torch.tensor(spread / size * case.rng.standard_normal((d, 1))))
    mean.initialize(bias=torch.tensor([level]))
    return mean


def network(case: Case, d: int) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(d, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))


class Problem:
    """A model, its test rows, and the exact answers for whatever state the model is in."""

    def __init__(self, case: Case, plain: bool = False, easy: bool = False, most: int = 120, **fixed: Any):
        rng = case.rng
        self.case = case
        n = fixed.get("n") or int(case.pick(1, 2, *[int(rng.integers(5, most + 1)) for _ in range(14)]))
        d = fixed.get("d") or int(rng.integers(1, 5))
        dtype = fixed.get("dtype") or case.pick(torch.float64, torch.float64, torch.float32)
        size = 1.0 if easy or case.chance(0.5) else case.log(-3, 3)
        offset = 0.0 if easy or case.chance(0.6) else case.log(0, 3)
        layout = (
            "uniform"
            if easy
            else case.pick("uniform", "uniform", "uneven", "normal", "grid", "duplicates", "far", "line")
        )
        centre = size * offset * rng.choice([-1, 1], d)
        scale = None if not easy else case.log(-0.5, 0.5)
        ratio = case.log(-3, 0) if easy else case.log(-10, 0)
        self.deep = not plain and not easy and layout != "far" and case.chance(0.1)
        case.note(
            n=n, d=d, dtype=str(dtype), size=size, offset=offset, layout=layout, noise_ratio=ratio, deep=self.deep
        )
        train = draw_rows(case, n, d, size, centre, layout)
        if self.deep:
            self.net = network(case, d)
            with torch.no_grad():
                self.net[0].weight.div_(size)
                self.net[0].bias.sub_(self.net[0].weight @ torch.tensor(centre, dtype=torch.float32))
            kernel = draw_kernel(case, 2, 1.0, 0.0, plain, scale)
        else:
            self.net = None
            kernel = draw_kernel(case, d, size, size * offset, plain, scale)
        kernel = kernel.to(dtype)
        self.net = None if self.net is None else self.net.to(dtype)
        x = torch.tensor(train, dtype=dtype)
        height = float(np.sqrt(max(float(np.median(np.diagonal(self._prior(kernel, x)))), 1e-30)))
        if not np.isfinite(height) or height > 1e15:
            height = 1.0
        level = 0.0 if easy or case.chance(0.6) else height * case.log(0, 3) * case.pick(-1, 1)
        waves = np.sin(((train - centre) / size) @ rng.standard_normal((d, 3)) * 2) @ rng.standard_normal(3)
        y = level + height * (waves + math.sqrt(ratio) * rng.standard_normal(n))
        mean = draw_mean(case, d, size * (1 + offset), level, height).to(dtype)
        self.size, self.centre, self.layout, self.height, self.level, self.d = size, centre, layout, height, level, d
        self.noise = ratio * height**2
        likelihood = self.draw_likelihood(n, dtype)
        case.note(level=level, height=height, noise=self.noise)
        self.model = Model(x, torch.tensor(y, dtype=dtype), likelihood.to(dtype), mean, kernel, self.net)
        m = int(rng.integers(1, 9))
        where = "far" if layout == "far" and case.chance(0.5) else "uniform"
        if not easy and not self.deep and case.chance(0.15):
            where = "far"
        points = 1.1 * (draw_rows(case, m, d, size, centre, where) - centre) + centre
        if case.chance(0.4):
            points[0] = train[0]
        self.points = torch.tensor(points, dtype=dtype)
        case.note(test_rows=m, test_layout=where)

    def _prior(self, kernel: Any, x: torch.Tensor) -> np.ndarray:
        seen = rows(x if self.net is None else self.net(x))
        with np.errstate(over="ignore", invalid="ignore"):
            return exact.covariance(kernel, seen, seen)

    def draw_likelihood(self, n: int, dtype: Any) -> Any:
        case = self.case
        kind = case.pick("one", "one", "one", "fixed", "fixed and learned")
        case.note(likelihood=kind)
        free = gpytorch.constraints.Positive()
        if kind == "one":
            likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=free)
            likelihood.noise = self.noise
            return likelihood.to(dtype)
        each = torch.tensor(self.noise * 10 ** case.rng.uniform(0, case.pick(1, 4), n), dtype=dtype)
        each = each.clamp(
            min=1e-4 if dtype == torch.float32 else 1e-6
        )  # GPyTorch rounds smaller ones up, with a warning
        likelihood = gpytorch.likelihoods.FixedNoiseGaussianLikelihood(each, learn_additional_noise=kind != "fixed")
        if kind != "fixed":
            likelihood.second_noise_covar.register_constraint("raw_noise", free)
            likelihood.second_noise = self.noise
        return likelihood.to(dtype)

    # ----- the exact answers for the model as it is -----

    @property
    def dtype(self) -> torch.dtype:
        return self.model.train_inputs[0].dtype

    def noises(self, model: Any = None) -> np.ndarray:
        model = self.model if model is None else model
        likelihood = model.likelihood
        if isinstance(likelihood, gpytorch.likelihoods.FixedNoiseGaussianLikelihood):
            added = number(likelihood.second_noise).reshape(()) if likelihood.second_noise_covar is not None else 0
            return number(likelihood.noise_covar.noise) + added
        return np.full(len(model.train_targets), number(likelihood.noise).reshape(())[()], LONG)

    def new_noise(self) -> Any:
        likelihood = self.model.likelihood
        if isinstance(likelihood, gpytorch.likelihoods.FixedNoiseGaussianLikelihood):
            if likelihood.second_noise_covar is None:
                return None
            return number(likelihood.second_noise).reshape(())
        return number(likelihood.noise).reshape(())

    def see(self, x: np.ndarray) -> np.ndarray:
        if self.model.net is None:
            return x
        net = self.model.net
        with torch.no_grad():
            return rows(net(torch.tensor(x.astype(float), dtype=next(net.parameters()).dtype)))

    @property
    def unit(self) -> float:
        """The rounding of entries, all of which are in the dtype of the model where GPyTorch computes them."""
        gpytorchs = "'gpytorch'" in self.case.told.get("options", "")
        return 4 * torch.finfo(self.dtype).eps if gpytorchs else exact.EPS

    def dense(self, model: Any = None, x: np.ndarray | None = None) -> Dense:
        model = self.model if model is None else model
        mean, x = model.mean_module, rows(model.train_inputs[0]) if x is None else x
        # what is inexact before the kernel's formula: a network's outputs, phases of far waves, angles of few degrees
        entries = self.unit if model.net is None else 4 * torch.finfo(self.dtype).eps
        kinds = self.case.told.get("kernels", ())
        if model.net is None and WAVES & set(kinds):
            entries = entries * (1 + 6 * float(np.abs(x - np.median(x, 0)).max()) / self.size)
        if "arccosine" in kinds:
            entries = max(entries, 1e-8)
        return Dense(model.covar_module, mean, x, number(model.train_targets), self.noises(model), entries, self.see)

    def moved(self) -> Dense:
        """Return the same for hyperparameters that a constraint makes of raw ones in float64, not in float32.

        A float32 model may take either: it knows its hyperparameters no better than that.
        """
        parts = torch.nn.ModuleList([self.model.covar_module, self.model.mean_module, self.model.likelihood])
        kernel, mean, likelihood = copy.deepcopy(parts).double()
        return self.dense(
            Model(*self.model.train_inputs, self.model.train_targets, likelihood, mean, kernel, self.model.net)
        )

    def truth(self, points: torch.Tensor | None = None) -> Truth:
        self.reference = self.dense()
        where = rows(self.points if points is None else points)
        waves = self.model.net is None and WAVES & set(self.case.told.get("kernels", ()))
        turns = np.abs(where - np.median(self.reference.x, 0)).max(1) / self.size
        found = self.reference.at(where, self.new_noise(), 6 * self.unit * turns if waves else 0.0)
        if self.dtype == torch.float32:
            others = [self.moved().at(where)]
            if self.model.net is not None:  # it rounds training rows and points each by themselves
                steps = (sign * LONG(torch.finfo(torch.float32).eps) for sign in (2, -2))
                others += [self.reference.at(where * (1 + step), self.new_noise()) for step in steps]
            for moved in others:
                found.mean_drift = np.maximum(found.mean_drift, 4 * np.abs(moved.mean - found.mean))
                found.variance_drift = np.maximum(found.variance_drift, 4 * np.abs(moved.variance - found.variance))
                off = 4 * np.abs(moved.covariance - found.covariance)
                found.covariance_drift = np.maximum(found.covariance_drift, off)
            found.mean_rounding = found.mean_rounding + found.mean_drift
        # means are evaluated in the dtype of the model: what that may do to targets less mean, and to the mean
        mean = self.model.mean_module
        eps = torch.finfo(self.dtype).eps
        if isinstance(mean, gpytorch.means.LinearMean):
            weights = np.abs(number(mean.weights).reshape(-1))
            at_rows = 4 * eps * (np.abs(self.reference.x) @ weights).max()
            at_points = 4 * eps * (np.abs(where) @ weights)
            cross = exact.covariance(self.model.covar_module, self.see(self.reference.x), self.see(where))
            found.mean_rounding = found.mean_rounding + at_points + at_rows * np.abs(self.reference.solve(cross)).sum(0)
        self.lost = bool((found.mean_by_float64 > self.mean_allowed(found)).any())
        return found

    lost = False  # whether targets are so large beside the noise that a factorization in float64 is not right either

    @property
    def hard(self) -> bool:
        # float32 models are solved by conjugate gradients or a factorization in float64, but by ASkotch as they are
        blocks = "ASkotch" in self.case.told.get("options", "") and self.dtype == torch.float32
        limit = 1 / torch.finfo(torch.float32).eps if blocks else HARD
        return self.lost or self.reference.condition > min(limit, HARD * exact.EPS / min(self.reference.entries, 1e-2))

    @property
    def residual(self) -> float:
        """The relative residual of the mean's weights, where nothing else is known of them."""
        return 1e-3 if "ASkotch" in self.case.told.get("options", "") else 0.0

    def mean_allowed(self, truth: Truth) -> np.ndarray:
        own = np.median(self.noises()) if truth.noise is None else truth.noise
        eps = torch.finfo(self.dtype).eps
        deviation = np.sqrt(np.maximum(truth.variance, 0) + own)
        return 0.05 * deviation + self.residual * truth.mean_by_residual + 4 * eps * np.abs(truth.mean)

    def variance_allowed(self, truth: Truth, noisy: bool = False) -> np.ndarray:
        """A hundredth of the variance, twice, and what float32 can show."""
        eps = torch.finfo(self.dtype).eps
        own = np.median(self.noises()) if truth.noise is None else truth.noise
        variance = np.maximum(truth.variance, 0) + (own if noisy else 0)
        return 0.02 * variance + 1e-3 * own + 4 * eps * variance


def threshold(case: Case, n: int) -> Any:
    """Return the context that decides who factorizes: GPyTorch up to 800 rows, or sketchgp from few rows on."""
    size = case.pick(0, 0, 0, n - 1, n, 800, 800)
    case.note(max_cholesky_size=size)
    return linear_operator.settings.max_cholesky_size(size)


def options(case: Case) -> dict[str, Any]:
    """Return arguments for ``accelerate``; most cases take the defaults."""
    case.told.pop("options", None)
    if case.chance(0.6):
        return {}
    found = {
        "preconditioner": case.pick(
            "auto",
            None,
            sketchgp.RPCholesky(rank=case.pick(1, 5, 50)),
            sketchgp.Nystrom(),
            sketchgp.RPCholesky(seed=1),
            sketchgp.NystromEigenPro(),
        ),
        "solver": case.pick(
            "auto",
            "auto",
            sketchgp.Cholesky(),
            sketchgp.ConjugateGradients(tol="posterior"),
            sketchgp.ConjugateGradients(tol="certified"),
            sketchgp.ASkotch(),
        ),
        "matmul": case.pick("auto", "dense", "tiled", "gpytorch"),
    }
    if case.later.random() < 1 / 6:
        ranks, neighbors = (None, None, 0, 5), (None, None, 1, 8)
        found["preconditioner"] = sketchgp.FullScale(*(case.later.choice(of) for of in (ranks, neighbors)))
    case.note(options=str(found))
    return found


# ----- what is asked -----


def compare(problem: Problem, which: str, truth: Truth, points: torch.Tensor | None = None) -> None:
    """Ask one question of an accelerated model in eval mode, and hold the answer against the truth."""
    case, model = problem.case, problem.model
    points = problem.points if points is None else points
    own = "'gpytorch'" in case.told.get("options", "") or {"polynomial", "arccosine"} & set(case.told["kernels"])
    if own and model.net is None:
        # formulas of large numbers overflow far away in float32; GPyTorch's product of one point and its copy fails
        with torch.no_grad(), warnings.catch_warnings(), contextlib.suppress(IndexError):
            warnings.simplefilter("ignore")  # of jitter
            inputs = torch.cat([points, *model.train_inputs])
            if not model.covar_module(inputs).to_dense().isfinite().all():
                case.outcomes["overflow in float32"] += 1
                return
    hard = problem.hard
    if which == "call mean":
        found = case.ask(which, lambda: model(points).mean.detach(), hard)
        if found is not None:
            case.close(which, found, truth.mean, problem.mean_allowed(truth), truth.mean_rounding)
    elif which == "call variance":
        found = case.ask(which, lambda: model(points).variance.detach(), hard)
        if found is not None:
            case.close(which, found, truth.variance, problem.variance_allowed(truth), truth.variance_rounding)
    elif which == "call both":
        found = case.ask(which, lambda: _both(model(points)), hard)
        if found is not None:
            case.close(which, found[0], truth.mean, problem.mean_allowed(truth), truth.mean_rounding)
            case.close(which, found[1], truth.variance, problem.variance_allowed(truth), truth.variance_rounding)
    elif which == "covariance":
        found = case.ask(which, lambda: model(points).covariance_matrix.detach(), hard)
        if found is not None:
            allowed = problem.variance_allowed(truth)
            allowed = np.sqrt(allowed[:, None] * allowed[None, :]) + 0.01 * np.sqrt(
                np.abs(truth.variance[:, None] * truth.variance[None, :])
            )
            rounding = truth.covariance_rounding + truth.covariance_drift
            case.close(which, found, truth.covariance, allowed, rounding)
    elif which == "observation":
        if truth.noise is None:
            return
        extra = {} if not isinstance(model.likelihood, gpytorch.likelihoods.FixedNoiseGaussianLikelihood) else None
        if extra is None:
            return
        found = case.ask(which, lambda: _both(model.likelihood(model(points))), hard)
        if found is not None:
            allowed = problem.variance_allowed(truth, noisy=True)
            case.close(which, found[0], truth.mean, problem.mean_allowed(truth), truth.mean_rounding)
            case.close(which, found[1], truth.variance + truth.noise, allowed, truth.variance_rounding)
    else:
        _, variance, *rest = which.split()
        how = None if variance == "none" else variance
        batch = int(rest[0]) if rest else None
        refusal = "variance|mask" if how in ("low_rank", "samples") else "mask"
        call = lambda: sketchgp.predict(model, points, variance=how, batch_size=batch, progress=False)  # noqa: E731
        found = case.ask(which, call, hard, refusal)
        if found is not None:
            judge(problem, which, found, truth)


QUESTIONS = (
    *["call mean", "call variance", "call both", "covariance", "observation"],
    *["predict none", "predict exact", "predict auto", "predict exact 3", "predict low_rank", "predict samples"],
)


def _both(found: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return found.mean.detach(), found.variance.detach()


def judge(problem: Problem, which: str, found: Any, truth: Truth) -> None:
    """Hold a :class:`sketchgp.Prediction` against the truth, its certain bounds too."""
    case = problem.case
    case.close(which + ".mean", found.mean, truth.mean, problem.mean_allowed(truth), truth.mean_rounding)
    eps = torch.finfo(problem.dtype).eps
    if found.mean_error_bound is not None:
        off = np.abs(number(found.mean) - truth.mean)
        case.below(
            which + ".mean_error_bound",
            off,
            number(found.mean_error_bound) + 2 * eps * np.abs(truth.mean) + truth.mean_drift,
        )
    if found.variance is None:
        return
    own = np.median(problem.noises()) if truth.noise is None else truth.noise
    if found.variance_error_bound is not None:
        off = np.abs(number(found.variance) - truth.variance)
        case.below(
            which + ".variance_error_bound",
            off,
            number(found.variance_error_bound) + 2 * eps * truth.variance + truth.variance_drift,
        )
    if found.variance_method == "exact":
        allowed = problem.variance_allowed(truth)
    else:
        doubt = found.variance_standard_error  # one for each point
        doubt = number(doubt) if isinstance(doubt, torch.Tensor) else LONG(doubt)
        allowed = 0.02 * truth.variance + 1e-3 * own + 6 * doubt * np.abs(truth.variance)
    case.close(which + ".variance", found.variance, truth.variance, allowed, truth.variance_rounding)
    if truth.noise is not None:
        case.close(
            which + ".observation_variance",
            found.observation_variance,
            truth.variance + truth.noise,
            allowed + 4 * eps * (truth.noise + truth.variance),
            truth.variance_rounding,
        )


def answers(case: Case) -> None:
    """Ask one model several questions in any order."""
    problem = Problem(case, most=case.pick(30, 60, 120))
    model = problem.model
    with threshold(case, len(model.train_targets)):
        arguments = options(case)
        try:
            truth = problem.truth()
        except np.linalg.LinAlgError:
            case.outcomes["no truth"] += 1
            return
        case.note(condition=problem.reference.condition)
        if case.ask("accelerate", lambda: sketchgp.accelerate(model, **arguments)) is None:
            return
        model.eval()
        for which in case.rng.permutation(QUESTIONS)[:4]:
            compare(problem, str(which), truth)


def life(case: Case) -> None:
    """Change a model again and again, and ask it after every change."""
    problem = Problem(case, most=case.pick(20, 40), easy=case.chance(0.7))
    rng = case.rng
    with threshold(case, len(problem.model.train_targets)):
        case.ask("accelerate", lambda: sketchgp.accelerate(problem.model, **options(case)))
        problem.model.eval()
        for _ in range(int(rng.integers(3, 8))):
            try:
                truth = problem.truth()
            except np.linalg.LinAlgError:
                case.outcomes["no truth"] += 1
                return
            for which in rng.permutation(QUESTIONS)[: int(rng.integers(1, 3))]:
                compare(problem, str(which), truth)
            change = case.pick(*CHANGES)
            case.steps.append(change.__name__)
            try:
                change(problem)
            except Fault:
                raise
            except Exception as error:
                raise Fault(f"{change.__name__}: {type(error).__name__}: {error}") from error
        compare(problem, "call both", problem.truth())


def change_modes(problem: Problem) -> None:
    problem.model.train().eval()


def change_and_train(problem: Problem) -> None:
    model, case = problem.model, problem.case
    model.train()
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    loss = case.ask("loss", lambda: -mll(model(*model.train_inputs), model.train_targets), problem.hard)
    if loss is not None:
        case.ask("backward", loss.backward, problem.hard)
        model.zero_grad()
    model.eval()


def change_rows(problem: Problem) -> None:
    model, case = problem.model, problem.case
    n = int(case.rng.integers(2, 40))
    x = draw_rows(case, n, problem.d, problem.size, problem.centre, "uniform")
    y = problem.level + problem.height * case.rng.standard_normal(n)
    if isinstance(model.likelihood, gpytorch.likelihoods.FixedNoiseGaussianLikelihood):
        model.likelihood.noise = torch.full((n,), problem.noise + 1e-3 * problem.height**2, dtype=problem.dtype)
    model.set_train_data(torch.tensor(x, dtype=problem.dtype), torch.tensor(y, dtype=problem.dtype), strict=False)


def change_targets(problem: Problem) -> None:
    model = problem.model
    if problem.case.chance(0.5):
        model.set_train_data(targets=2 * model.train_targets + problem.height)
    else:
        with torch.no_grad():
            model.train_targets.mul_(-1)


def change_inputs_in_place(problem: Problem) -> None:
    with torch.no_grad():
        problem.model.train_inputs[0].add_(0.1 * problem.size * torch.randn_like(problem.model.train_inputs[0]))


def change_hyperparameters(problem: Problem) -> None:
    model, case = problem.model, problem.case
    parameters = [p for name, p in model.named_parameters() if "net" not in name]
    parameter = case.pick(*parameters)
    way = case.pick("no_grad", "data", "noise", "scale")
    likelihood = model.likelihood
    plain = not isinstance(likelihood, gpytorch.likelihoods.FixedNoiseGaussianLikelihood)
    if way == "noise" and plain:
        likelihood.noise = likelihood.noise.item() * 2
    elif way == "scale" and hasattr(model.covar_module, "outputscale"):
        model.covar_module.outputscale = model.covar_module.outputscale.item() * 3
    elif way == "data":
        parameter.data = parameter.data + 0.2 * parameter.data.abs().clamp(min=1e-3)
    else:
        with torch.no_grad():
            parameter.add_(0.2 * parameter.abs())


def change_likelihood(problem: Problem) -> None:
    likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=gpytorch.constraints.Positive())
    likelihood = likelihood.to(problem.dtype)
    likelihood.noise = problem.noise * 3 + 1e-6 * problem.height**2
    problem.model.likelihood = likelihood
    problem.model.eval()


def change_kernel(problem: Problem) -> None:
    if problem.model.net is None:
        kernel = KERNELS.ScaleKernel(KERNELS.MaternKernel(1.5)).to(problem.dtype)
        kernel.base_kernel.lengthscale, kernel.outputscale = problem.size, problem.height**2
        problem.model.covar_module = kernel


def change_mean(problem: Problem) -> None:
    mean = gpytorch.means.ConstantMean().to(problem.dtype)
    mean.initialize(constant=problem.level)
    problem.model.mean_module = mean


def change_copy(problem: Problem) -> None:
    problem.model = copy.deepcopy(problem.model)


def change_pickle(problem: Problem) -> None:
    problem.model = pickle.loads(pickle.dumps(problem.model))


def change_saved(problem: Problem) -> None:
    file = io.BytesIO()
    torch.save(problem.model, file)
    file.seek(0)
    problem.model = torch.load(file, weights_only=False)


def change_state(problem: Problem) -> None:
    state = {key: value.clone() for key, value in problem.model.state_dict().items()}
    other = copy.deepcopy(problem.model)
    if problem.case.chance(0.5):
        sketchgp.restore(other)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.5)
    if problem.case.chance(0.5):
        sketchgp.accelerate(other).eval()
        problem.case.ask("before the state", lambda: other(problem.points).mean, problem.hard)
    other.load_state_dict(state)
    problem.model = sketchgp.accelerate(other).eval()


def change_back(problem: Problem) -> None:
    sketchgp.restore(problem.model)
    if type(problem.model) is not Model:
        raise Fault("restore left another class")
    if problem.case.chance(0.5):
        problem.case.ask("plain", lambda: problem.model.eval()(problem.points).mean, True)
    sketchgp.accelerate(problem.model, **options(problem.case)).eval()


def change_options(problem: Problem) -> None:
    sketchgp.accelerate(problem.model, **options(problem.case)).eval()


def change_dtype(problem: Problem) -> None:
    other = torch.float32 if problem.dtype == torch.float64 else torch.float64
    problem.model.to(other)
    problem.points = problem.points.to(other)


def change_fantasy(problem: Problem) -> None:
    model, case = problem.model, problem.case
    if isinstance(model.likelihood, gpytorch.likelihoods.FixedNoiseGaussianLikelihood):
        return
    k = int(case.rng.integers(1, 4))
    x = torch.tensor(draw_rows(case, k, problem.d, problem.size, problem.centre, "uniform"), dtype=problem.dtype)
    y = torch.tensor(problem.level + problem.height * case.rng.standard_normal(k), dtype=problem.dtype)
    model.eval()
    case.ask("before the fantasy", lambda: model(problem.points).mean, problem.hard)
    found = case.ask("fantasy", lambda: model.get_fantasy_model(x, y), problem.hard)
    if found is not None:
        problem.model = found


def change_fit(problem: Problem) -> None:
    case = problem.case
    if len(problem.model.train_targets) > 2:
        case.ask("fit", lambda: sketchgp.fit(problem.model, iterations=2, progress=False), True)


CHANGES = (
    *[change_modes, change_and_train, change_rows, change_targets, change_inputs_in_place, change_hyperparameters],
    *[change_hyperparameters, change_hyperparameters, change_likelihood, change_kernel, change_mean, change_copy],
    *[change_pickle, change_saved, change_state, change_back, change_options, change_dtype, change_fantasy, change_fit],
)


def losses(case: Case) -> None:
    """Compare marginal likelihoods and their gradients with differences of the dense ones."""
    problem = Problem(case, most=40, easy=case.chance(0.5))
    model = problem.model
    n = len(model.train_targets)
    tight = case.chance(0.6)  # solves to 1e-3 leave gradients with errors of their own
    count = 300 if tight else 10
    tolerance = gpytorch.settings.cg_tolerance(1e-8 if tight else 1.0)
    held = gpytorch.settings.deterministic_probes(tight)  # pivots, without which differences are of several functions
    with threshold(case, n), tolerance, held, gpytorch.settings.num_trace_samples(count):
        arguments = options(case)  # before the truth, whose rounding hangs on them
        try:
            value = problem.dense().log_density()
            problem.truth()
        except np.linalg.LinAlgError:
            return
        case.note(condition=problem.reference.condition)
        case.ask("accelerate", lambda: sketchgp.accelerate(model, **arguments))
        model.train()
        mll = case.pick(gpytorch.mlls.ExactMarginalLogLikelihood, sketchgp.ExactMarginalLogLikelihood)(
            model.likelihood, model
        )
        if isinstance(model.likelihood, gpytorch.likelihoods.FixedNoiseGaussianLikelihood) and case.chance(0.5):
            found = case.ask(
                "mll", lambda: mll(model(*model.train_inputs), model.train_targets, *model.train_inputs), problem.hard
            )
        else:
            found = case.ask("mll", lambda: mll(model(*model.train_inputs), model.train_targets), problem.hard)
        if found is None:
            return
        reference = problem.reference
        quadratic = float(reference.residual @ reference.weights) / n
        few = case.told["max_cholesky_size"] < n
        # float32 models factorize in float32 or solve to 1e-3: shares of the terms
        share = 1e-3 if problem.dtype == torch.float64 else 1e-2
        # up to the threshold GPyTorch factorizes, in the dtype of the model
        unit = max(reference.entries, 0.0 if few else torch.finfo(problem.dtype).eps / 2)
        backward = 8 * unit * np.sqrt((reference.matrix**2).sum()) * float((reference.weights**2).sum()) / n
        probes = of_probes(reference.matrix, reference.noise, count) / n if few else 0.0
        drift = 4 * abs(problem.moved().log_density() - value) if problem.dtype == torch.float32 else 0.0
        allowed = 0.01 + share * (1 + abs(value) + quadratic) + probes + drift
        case.close("mll", found.detach().double().item(), value, allowed, backward)
        if problem.dtype == torch.float32 or model.net is not None or case.warned or (few and not tight):
            return
        if problem.layout == "far" and WAVES & set(case.told["kernels"]):  # a step is many periods there
            return
        # solves to 1e-8 leave as much of a value open
        solved = 1e-8 * np.sqrt((reference.residual**2).sum() * (reference.weights**2).sum()) / 2 / n if few else 0.0
        if case.ask("backward", lambda: (found.backward(), 1)[1], problem.hard) is None:
            return
        for name, parameter in model.named_parameters():
            flat = parameter.data.view(-1)
            slot = int(case.rng.integers(len(flat)))
            step = (1e-3 if few else 1e-5) * max(1e-3, abs(flat[slot].item()))
            old = flat[slot].item()
            ends = []
            try:
                for sign in (1, -1):
                    flat[slot] = old + sign * step
                    if few:  # the estimate is one function, whose derivative the gradient is
                        with warnings.catch_warnings():
                            warnings.simplefilter("ignore")
                            ends.append(
                                (flat[slot].item(), mll(model(*model.train_inputs), model.train_targets).item())
                            )
                    else:
                        ends.append((flat[slot].item(), problem.dense().log_density()))
            except np.linalg.LinAlgError:
                continue
            finally:
                flat[slot] = old
            slope = (ends[0][1] - ends[1][1]) / (ends[0][0] - ends[1][0])
            gradient = 0.0 if parameter.grad is None else parameter.grad.view(-1)[slot].item()
            doubt = 1e-11 if few else 1e-13  # of the loss
            rounding = max(1e3, 1 / step if few else 0.0) * backward
            rounding = rounding + (float(solved) + doubt * (abs(value) + quadratic)) / step
            case.close(f"gradient of {name}", gradient, slope, 0.05 + 0.15 * abs(slope), rounding)


def of_probes(matrix: np.ndarray, noise: np.ndarray, count: int = 10) -> float:
    """Return how far the log density of a matrix may be off where probes estimate its log determinant.

    They see the spread of the eigenvalues of P^-1 A, without P those of A.  A P of some directions, which takes the
    others for noise, leaves eigenvalues from 1 to the ratio of the largest to the noise, half at either end.
    """
    logs = np.log(np.linalg.eigvalsh(matrix.astype(float)).clip(1e-300))
    spread = 6 * math.sqrt(float(((logs - logs.mean()) ** 2).sum()))
    worst = 4 * math.sqrt(len(logs)) / 2 * float(logs.max() - np.log(noise.min()))
    return math.sqrt(2 / count) * max(spread, worst) / 2


def left_out(case: Case) -> None:
    """Compare leave-one-out predictions and the noise path."""
    problem = Problem(case, plain=case.chance(0.5), most=60, easy=case.chance(0.4))
    model = problem.model
    with threshold(case, len(model.train_targets)):
        arguments = options(case)  # before the truth, whose rounding hangs on them
        try:
            problem.truth()
            mean, variance = problem.reference.left_out()
            truth, moved = problem.reference.left_out_density(), [problem.moved()]
            moved += [problem.dense(x=x) for x in exact.shaken(problem.reference.x)]
        except np.linalg.LinAlgError:
            return
        case.note(condition=problem.reference.condition)
        case.ask("accelerate", lambda: sketchgp.accelerate(model, **arguments))
        exactly = case.pick(None, None, True, False)
        if len(model.train_targets) < 2 and exactly is False:
            exactly = None
        found = case.ask(
            f"leave_one_out({exactly})",
            lambda: sketchgp.leave_one_out(model, exact=exactly, progress=False),
            problem.hard,
            "structure",
        )
        if found is None:
            return
        eps = torch.finfo(problem.dtype).eps
        reference = problem.reference
        grow = reference.entries * reference.condition * 16
        of_mean, of_variance = 4 * np.max([np.abs(np.subtract(each.left_out(), (mean, variance))) for each in moved], 0)
        of_density = 4 * np.max([np.abs(each.left_out_density() - truth) for each in moved], 0)
        sd = np.sqrt(variance)
        doubt = 0 if found.exact else 6 * number(found.variance_standard_error)
        # those of the probes do not count what the mean's weights leave
        of_weights = problem.residual * variance * reference.weights_by_residual
        wide = 0 if found.exact else 6 * number(found.residual_standard_error) + of_weights
        slack = 0.05 if not found.exact else 0.02
        size = np.abs(reference.residual).max()
        case.close(
            "loo mean",
            found.mean,
            mean,
            slack * sd + wide + 8 * eps * (np.abs(mean) + np.abs(problem.reference.y)),
            grow * (sd + size) + of_mean,
        )
        case.close("loo variance", found.variance, variance, slack * variance + doubt, grow * variance + of_variance)
        # a density of a target that is z deviations off moves with the square
        if found.exact and not problem.hard:
            z = (reference.y - mean) / sd
            allowed = slack * (1 + np.abs(z) + z**2) + 8 * eps * np.abs(reference.y).max() / sd * (1 + np.abs(z))
            case.close("loo density", found.log_density, truth, allowed, grow * (1 + z**2) + of_density)


PI_ = LONG(math.pi)


def noise_paths(case: Case) -> None:
    """Compare marginal likelihoods and leave-one-out errors along a grid of noises."""
    problem = Problem(case, plain=case.chance(0.5), most=40, easy=True)
    model = problem.model
    if isinstance(model.likelihood, gpytorch.likelihoods.FixedNoiseGaussianLikelihood):
        return
    with threshold(case, len(model.train_targets)):
        case.ask("accelerate", lambda: sketchgp.accelerate(model, **options(case)))
        noises = [problem.noise * 10**power for power in (0.5, 0, -0.5)]
        exactly = case.pick(None, True, False)
        if len(model.train_targets) < 2:
            exactly = None
        before = model.likelihood.noise.item()
        path = case.ask(
            "noise_path", lambda: sketchgp.noise_path(model, noises, exact=exactly, progress=False), False, "structure"
        )
        if path is None:
            return
        if model.likelihood.noise.item() != before:
            raise Fault("noise_path changed the noise")
        for index, noise in enumerate(noises):
            reference = Dense(
                model.covar_module,
                model.mean_module,
                rows(model.train_inputs[0]),
                number(model.train_targets),
                LONG(noise),
                see=problem.see,
            )
            value = reference.log_density()
            doubt = 6 * float(path.log_marginal_likelihood_standard_error[index])
            found = float(path.log_marginal_likelihood[index])
            case.close(f"path likelihood {index}", found, value, 0.01 + 0.001 * abs(value) + doubt)
            slack = 1e-6 * (1 + abs(value))
            case.below(f"lower end {index}", float(path.lower[index]), value + slack)
            case.below(f"upper end {index}", value, float(path.upper[index]) + slack)
            mean, _ = reference.left_out()
            error = float(((reference.y - mean) ** 2).mean())
            doubt = 6 * float(path.mean_squared_error_standard_error[index])
            # two or three rows tell little of their own standard error
            share = 0.02 if path.exact else (0.1 if len(mean) > 10 else 1.0)
            allowed = share * error + doubt + 1e-5 * float(reference.y.std() ** 2)
            case.close(f"path error {index}", float(path.mean_squared_error[index]), error, allowed)


def draws(case: Case) -> None:
    """Compare moments of posterior samples."""
    problem = Problem(case, plain=case.chance(0.7), most=40, easy=case.chance(0.6))
    model = problem.model
    with threshold(case, len(model.train_targets)):
        arguments = options(case)  # before the truth, whose rounding hangs on them
        try:
            truth = problem.truth()
        except np.linalg.LinAlgError:
            return
        case.note(condition=problem.reference.condition)
        case.ask("accelerate", lambda: sketchgp.accelerate(model, **arguments))
        model.eval()
        count = 200
        way = case.pick("sample_posterior", "sample_posterior", "rsample", "dispersed")
        case.note(way=way)
        if way == "rsample":
            found = case.ask(
                "rsample", lambda: model(problem.points).rsample(torch.Size([count])).detach(), problem.hard
            )
        else:
            samples = case.ask(
                "sample_posterior",
                lambda: sketchgp.sample_posterior(model, count, seed=int(case.rng.integers(99)), frequencies=256),
                problem.hard,
                "plain kernel|random features",
            )
            if samples is None:
                return
            warned = list(case.warned)
            found = case.ask("samples", lambda: samples(problem.points).detach())
            case.warned += warned
            if found is not None and case.chance(0.5):
                part = samples[2:5](problem.points).detach()
                case.close(
                    "part of the samples",
                    part,
                    number(found[2:5]),
                    1e-4 * (np.sqrt(np.abs(truth.variance)) + np.abs(truth.mean)) + truth.mean_rounding,
                )
        if found is None:
            return
        found = number(found)
        if found.shape != (count, len(problem.points)):
            raise Fault(f"samples of shape {found.shape}")
        sd = np.sqrt(np.maximum(truth.variance, 0))
        own = float(np.median(problem.noises()))
        floor = 0.05 * np.sqrt(truth.variance + own) + 8 * torch.finfo(problem.dtype).eps * (
            np.abs(truth.mean) + np.sqrt(np.abs(truth.covariance).max())
        )
        floor = floor + 2 * problem.residual * truth.mean_by_residual  # of the mean, and of every sample's own solve
        factor = 0.0
        if way == "rsample":  # GPyTorch's factor of the covariance, with its jitter, rounded in the largest variance
            rounding = torch.finfo(problem.dtype).eps * float(truth.variance.max())
            factor = 3 * math.sqrt((1e-6 if problem.dtype == torch.float32 else 1e-8) + rounding)
        doubt = 6 * (sd + factor) / math.sqrt(count) + floor
        case.close("mean of samples", found.mean(0), truth.mean, doubt, truth.mean_rounding)
        spread = found.std(0, ddof=1)
        root = np.sqrt(truth.variance_rounding) + factor + (sd if way == "rsample" else 0.0)
        prior = np.diagonal(exact.covariance(model.covar_module, *[problem.see(rows(problem.points))] * 2))
        share = truth.variance / np.maximum(prior, 1e-300)
        case.close(
            "spread of samples",
            spread,
            sd,
            # Where few waves are short enough to tell a point from its neighbours, deviations scatter widely:
            # those of a spectral density with a heavy tail have no variance.
            sd * np.select([share < 1e-4, share < 0.02], [3, 1], 0.4) + 0.15 * np.sqrt(own) + floor,
            root + truth.mean_rounding,
        )


def sparse(case: Case) -> None:
    """Compare an inducing-point model with the dense formulas, its bound too."""
    problem = Problem(case, most=60, easy=case.chance(0.6))
    if problem.deep:
        return
    old = problem.model
    dtype, x, y = problem.dtype, old.train_inputs[0], old.train_targets
    m = int(case.rng.integers(1, min(20, len(y)) + 1))
    solvers = {
        "auto": "auto",
        "QR": sketchgp.QR(),
        "KRILL": sketchgp.KRILL(),
        "Falkon": sketchgp.Falkon(),
        "NystromPCG": sketchgp.NystromPCG(),
        "SketchySAGA": sketchgp.SketchySAGA(),
        "EigenPro3": sketchgp.EigenPro3(),
        "EigenPro4": sketchgp.EigenPro4(),
    }
    name = case.pick(*solvers, "auto", "QR", "KRILL")
    method = case.pick("uniform", "k-means", "rpcholesky", "own")
    case.note(solver=name, m=m, method=method)
    if method == "own":
        points = problem.model.train_inputs[0][:m].clone() + 0.01 * problem.size * torch.randn(
            m, x.shape[-1], dtype=dtype
        )
    else:
        chosen = case.ask(
            "choose_inducing_points",
            lambda: sketchgp.choose_inducing_points(old.covar_module, x, m, method=method),
            refusal="structure",
        )
        if chosen is None:
            return
        points = chosen.points
    variance = case.pick("auto", "dtc")
    if isinstance(old.likelihood, gpytorch.likelihoods.FixedNoiseGaussianLikelihood) and name in (
        "Falkon",
        "EigenPro3",
        "EigenPro4",
        "SketchySAGA",
    ):
        return
    call = lambda: sketchgp.InducingPointGP(  # noqa: E731
        x, y, old.likelihood, old.mean_module, old.covar_module, points, solver=solvers[name], variance=variance
    )
    model = case.ask("InducingPointGP", call, refusal="structure")
    if model is None:
        return
    ask_sparse(problem, model, name)
    for _ in range(int(case.rng.integers(0, 3))):
        change = case.pick("targets", "noise", "kernel", "points", "copy", "rows")
        case.steps.append(change)
        with torch.no_grad():
            if change == "targets":
                model.train_targets.mul_(-2)
            elif change == "kernel":
                model.covar_module.raw_outputscale.add_(0.3)
            elif change == "points":
                model.inducing_points.add_(0.05 * problem.size)
            elif change == "copy":
                model = pickle.loads(pickle.dumps(copy.deepcopy(model)))
            elif change == "rows" and isinstance(model.likelihood, gpytorch.likelihoods.GaussianLikelihood):
                model.set_train_data(x[: max(m, 3)], y[: max(m, 3)], strict=False)
            elif change == "noise" and isinstance(model.likelihood, gpytorch.likelihoods.GaussianLikelihood):
                model.likelihood.noise = model.likelihood.noise.item() * 4
        ask_sparse(problem, model, name)


def ask_sparse(problem: Problem, model: Any, name: str) -> None:
    """Ask an inducing-point model for predictions and its bound, as it is now."""
    case, dtype = problem.case, problem.dtype
    x, y, points = model.train_inputs[0], model.train_targets, model.inducing_points
    noises = problem.noises(model)
    rows_of = (rows(x), number(y), noises, rows(points))
    kernel, center = model.covar_module, model.mean_module
    try:
        truth = Sparse(kernel, center, *rows_of, shift=exact.EPS)
        # hyperparameters are known to the dtype of the model
        kernel, center = copy.deepcopy(kernel).double(), copy.deepcopy(center).double()
        # of a wave each distance is rounded by itself, as much as far points are far
        waves = WAVES & set(case.told["kernels"])
        phase = 6 * exact.EPS * problem.height**2 / problem.size if waves else 0.0
        angle = 1e-8 if "arccosine" in case.told["kernels"] else 0.0
        moved = Sparse(kernel, center, *rows_of, shift=4 * exact.EPS, phase=phase, angle=angle)
    except np.linalg.LinAlgError:
        return
    mean, variances = truth.at(rows(problem.points))
    other, others = moved.at(rows(problem.points))
    own = float(np.median(noises))
    hard = bool((np.abs(mean - other) > 0.02 * np.sqrt(own)).any())
    eps = torch.finfo(dtype).eps
    # they say so where epochs end before they have come to the small eigenvalues, and a mean is then refused; and where
    # steps diverge, whose length is estimated from the inducing points alone
    short = hard or name in ("SketchySAGA", "EigenPro3", "EigenPro4")
    # normal equations lose what their right-hand side rounds away: the first two go on to a tenth of a deviation
    enough = {"Falkon": 0.1, "KRILL": 0.1, "NystromPCG": sketchgp.NystromPCG().tol}
    short = short or truth.by_rounding > enough.get(name, math.inf)
    model.eval()
    if case.chance(0.5):
        call = lambda: sketchgp.predict(model, problem.points, progress=False)  # noqa: E731
        found = case.ask(f"sparse predict {name}", call, short)
        pair = None if found is None else (found.mean, found.variance)
    else:
        pair = case.ask(f"sparse call {name}", lambda: _both(model(problem.points)), short)
    if pair is not None:
        sd = np.sqrt(np.maximum(variances, 0) + own)
        if name not in ("EigenPro3", "EigenPro4"):
            loose = 0.35 if name in ("NystromPCG", "SketchySAGA") else 0.1
            case.close("sparse mean", pair[0], mean, loose * sd + 4 * eps * np.abs(mean), 10 * np.abs(mean - other))
        allowed = 0.02 * variances + 2e-3 * own + 4 * eps * variances
        case.close("sparse variance", pair[1], variances, allowed, 10 * np.abs(variances - others))
    model.train()
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    lost = hard or truth.condition > HARD
    bound = case.ask("bound", lambda: mll(model(x), y, x).detach().double().item(), lost)
    if bound is not None:
        allowed = 0.01 + 1e-3 * abs(truth.bound)
        case.close("bound", bound, truth.bound, allowed, 10 * abs(truth.bound - moved.bound))


def full(case: Case) -> None:
    """Solve a problem without a model, by every solver, with what the report says of it."""
    problem = Problem(case, most=60, easy=case.chance(0.5))
    if problem.deep:
        return
    model = problem.model
    x, n = model.train_inputs[0], len(model.train_targets)
    columns = case.pick(0, 0, 1, 3)
    y = model.train_targets if not columns else torch.randn(n, columns, dtype=problem.dtype) * problem.height
    noise = torch.tensor(problem.noises().astype(float), dtype=problem.dtype)
    solvers = {
        "Cholesky": sketchgp.Cholesky(),
        "CG": sketchgp.ConjugateGradients(),
        "CG tight": sketchgp.ConjugateGradients(tol=1e-8),
        "CG posterior": sketchgp.ConjugateGradients(tol="posterior"),
        "CG certified": sketchgp.ConjugateGradients(tol="certified"),
        "ASkotch": sketchgp.ASkotch(tol=1e-4),
        "Skotch": sketchgp.Skotch(tol=1e-4),
        "EigenPro2": sketchgp.EigenPro2(tol=1e-3),
    }
    name = case.pick(*solvers)
    case.note(solver=name, columns=columns)
    whole = case.ask("FullProblem", lambda: sketchgp.FullProblem(model.covar_module, x, y, noise), refusal="structure")
    if whole is None:
        return
    try:
        reference = Dense(model.covar_module, gpytorch.means.ZeroMean(), rows(x), np.zeros(n, LONG), number(noise))
    except np.linalg.LinAlgError:
        return
    # hyperparameters of a float32 kernel are known to float32
    kernel = copy.deepcopy(model.covar_module).double()
    moved = exact.covariance(kernel, rows(x), rows(x)) - reference.prior
    stored = np.zeros_like(moved)
    for shaken in exact.shaken(rows(x)):
        change = exact.covariance(model.covar_module, shaken, shaken) - reference.prior
        stored = np.maximum(stored, np.abs(change))
    problem.reference = problem.dense()
    hard = problem.hard or np.abs(reference.prior).max() > torch.finfo(problem.dtype).max  # entries that overflow
    case.note(condition=reference.condition)
    with sketchgp.record_solves():
        solution = case.ask(f"solve {name}", lambda: solvers[name].solve(whole), hard)
    if solution is None:
        return
    warned = list(case.warned)
    report = solution.report
    right = number(y).reshape(n, -1)
    value = number(solution.value).reshape(n, -1)
    if solution.value.shape != y.shape:
        raise Fault(f"value of shape {tuple(solution.value.shape)}")
    residual = right - reference.matrix @ value
    length = np.sqrt((right**2).sum(0))
    relative = np.sqrt((residual**2).sum(0)) / np.where(length > 0, length, 1)
    size = np.sqrt((reference.matrix**2).sum())
    doubt = (
        8
        * problem.reference.entries
        * size
        * np.sqrt((value**2).sum(0))
        / np.where(length > 0, length, 1)
        * math.sqrt(n)
    )
    drift = 2 * np.sqrt(((moved @ value) ** 2).sum(0))
    doubt = doubt + (drift + 2 * np.sqrt(((stored @ np.abs(value)) ** 2).sum(0))) / np.where(length > 0, length, 1)
    case.warned = []
    if report.residual_rows is None:
        case.close(
            "residual",
            report.residual,
            relative,
            0.05 * relative + (1e-12 if problem.dtype == torch.float64 else 1e-7),
            doubt,
        )
    truth = reference.solve(right)
    off = value - truth
    energy = np.sqrt(np.maximum((off * (reference.matrix @ off)).sum(0), 0))
    if report.error_bound is not None:
        drift = drift / np.sqrt(float(number(noise).min()))
        case.below("error_bound", energy, number(report.error_bound) * (1 + 1e-6) + drift)
    if not report.converged and not warned:
        raise Fault(f"not converged, and no warning: {report}")
    if (
        report.converged
        and report.judged == "residual"
        and np.isfinite(report.tol)
        and (relative > 1.05 * report.tol + doubt).any()
    ):
        raise Fault(f"converged at {relative.astype(float)}: {report}")
    cross = exact.covariance(model.covar_module, rows(x), rows(problem.points))
    exactly = (cross.T @ truth).reshape((-1, *y.shape[1:]))
    own = reference.at(rows(problem.points), LONG(np.median(number(noise))))
    predicted = case.ask("solution.predict", lambda: solution.predict(problem.points))
    case.warned += warned
    if predicted is not None:
        sd = np.sqrt(np.maximum(own.variance, 0) + own.noise)[:, None]
        eps = torch.finfo(problem.dtype).eps
        allowed = (
            0.05 * sd
            + np.sqrt(
                np.abs(np.diagonal(exact.covariance(model.covar_module, rows(problem.points), rows(problem.points))))
            )[:, None]
            * energy[None, :]
            * 1.01
        )
        allowed = allowed + 4 * eps * np.abs(cross.T @ truth)
        rounding = 8 * exact.EPS * (np.abs(cross).T @ np.abs(truth))
        if problem.dtype == torch.float32:
            rounding = rounding + 8 * eps * (np.abs(cross).T @ np.abs(truth))
            rounding = rounding + 2 * np.abs(
                (exact.covariance(kernel, rows(x), rows(problem.points)) - cross).T @ truth
            )
        case.close(
            "prediction of a solution",
            predicted,
            exactly,
            allowed.reshape(exactly.shape),
            rounding.reshape(exactly.shape),
        )


def fits(case: Case) -> None:
    """Check that the dense loss does not fall from the end of a fit, and compare it with SciPy's end."""
    from scipy.optimize import minimize

    problem = Problem(
        case, most=case.pick(20, 40), dtype=torch.float64, n=int(case.rng.integers(8, 40)), easy=case.chance(0.4)
    )
    model = problem.model
    case.ask("accelerate", lambda: sketchgp.accelerate(model))
    plain = copy.deepcopy(model)
    sketchgp.restore(plain)
    history = case.ask("fit", lambda: sketchgp.fit(model, progress=False), True)
    if history is None:
        return
    warned = list(case.warned)
    try:
        mine = -problem.dense().log_density()
        condition = problem.reference.condition if hasattr(problem, "reference") else problem.dense().condition
    except np.linalg.LinAlgError:
        case.outcomes["no truth"] += 1
        return
    case.note(reason=history.reason, notes=history.notes, condition=condition)
    if condition < 1e13:
        case.close("end of the fit", min(history.losses), mine, 0.01 + 0.01 * abs(mine))
    if not (min(history.losses) <= history.losses[0] + 1e-9):
        raise Fault("the fit made it worse")
    parameters = [p for p in plain.parameters() if p.requires_grad]
    likelihood, x, y = plain.likelihood, plain.train_inputs[0], plain.train_targets

    def dense_loss(flat: np.ndarray) -> tuple[float, np.ndarray]:
        at = 0
        for p in parameters:
            p.data = torch.tensor(flat[at : at + p.numel()]).view_as(p)
            p.grad = None
            at += p.numel()
        try:
            prior = plain.forward(x)
            noise = likelihood.noise
            if isinstance(likelihood, gpytorch.likelihoods.FixedNoiseGaussianLikelihood):
                noise = likelihood.noise_covar.noise
                if likelihood.second_noise_covar is not None:
                    noise = noise + likelihood.second_noise
            matrix = prior.lazy_covariance_matrix.to_dense() + torch.diag(noise.expand(len(y)))
            factor = torch.linalg.cholesky(matrix)
            residual = y - prior.mean
            solved = torch.cholesky_solve(residual[:, None], factor)[:, 0]
            loss = (residual @ solved / 2 + factor.diagonal().log().sum()) / len(y) + math.log(2 * math.pi) / 2
            loss.backward()
        except (torch.linalg.LinAlgError, NotPSDError):
            return 1e10, np.zeros_like(flat)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat_grad = torch.cat([g.reshape(-1) for g in grads]).numpy()
        if not math.isfinite(loss.item()) or not np.isfinite(flat_grad).all():
            return 1e10, np.zeros_like(flat)
        return loss.item(), flat_grad

    start = torch.cat([p.detach().reshape(-1) for p in parameters]).numpy()
    end = torch.cat([p.detach().reshape(-1) for p in model.parameters() if p.requires_grad]).numpy()
    # a fit ends where ten steps bring less than its tolerance, and a network's loss may fall beyond such a plateau
    steps = 30 if problem.deep else 300
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        further = minimize(dense_loss, end, jac=True, method="L-BFGS-B", options={"maxiter": steps})
        theirs = minimize(dense_loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 300})
        dense_loss(theirs.x)
    problem.model = plain
    try:
        reference = problem.dense()
    except np.linalg.LinAlgError:
        return
    if reference.condition > 1e12 or not math.isfinite(theirs.fun) or theirs.fun > 1e9:
        case.outcomes["no truth"] += 1
        return
    case.warned = warned + [note for note in history.notes if "sure" in note or "start" in note]
    if not history.converged:
        case.warned.append(history.reason)
    if history.at_limits:
        case.warned.append(str(history.at_limits))
    best = -reference.log_density()
    if further.fun < mine - 0.01:
        case.close("loss of the fit, which goes on falling from its end", mine, further.fun, 0.01)
    elif mine > best + 0.01:
        case.outcomes["another optimum"] += 1
    else:
        case.outcomes["right"] += 1


def estimators(case: Case) -> None:
    """Compare the scikit-learn estimators with the dense formulas, for arrays of any kind."""
    import pandas as pd

    from sketchgp.sklearn import GaussianProcessRegressor, KernelClassifier, KernelRidge

    rng = case.rng
    n, d = int(case.pick(2, 3, rng.integers(5, 100), rng.integers(5, 100))), int(rng.integers(1, 4))
    size, offset = (1.0, 0.0) if case.chance(0.5) else (case.log(-3, 3), case.log(-1, 3))
    X = draw_rows(case, n, d, size, size * offset * np.ones(d), case.pick("uniform", "uneven", "duplicates", "line"))
    Z = draw_rows(case, int(rng.integers(1, 8)), d, size, size * offset * np.ones(d), "uniform")
    level, height = (0.0, 1.0) if case.chance(0.5) else (case.log(0, 3), case.log(-3, 3))
    y = height * (level + np.sin(3 * (X - size * offset).sum(1) / size) + 0.1 * rng.standard_normal(n))
    form = case.pick("plain", "float32", "fortran", "reversed", "big-endian", "pandas", "list", "strided", "integers")
    case.note(n=n, d=d, size=size, offset=offset, level=level, height=height, form=form)
    if form == "integers":
        X, Z = np.round(10 * X / size), np.round(10 * Z / size)
    forms: dict[str, Callable[[np.ndarray], Any]] = {
        "plain": lambda a: a,
        "float32": lambda a: a.astype(np.float32),
        "fortran": np.asfortranarray,
        "reversed": lambda a: a[::-1].copy()[::-1],
        "big-endian": lambda a: a.astype(">f8"),
        "pandas": lambda a: pd.DataFrame(a, columns=[f"c{i}" for i in range(d)]),
        "list": lambda a: a.tolist(),
        "strided": lambda a: np.repeat(a, 2, axis=0)[::2],
        "integers": lambda a: a.astype(int),
    }
    given, asked = forms[form](X), forms[form](Z)
    if form == "float32":
        X, Z = X.astype(np.float32).astype(float), Z.astype(np.float32).astype(float)
    which = case.pick("gp", "gp", "gp", "ridge", "classifier")
    case.note(estimator=which)
    if which == "gp":
        names = ("matern52", "matern32", "matern12", "rbf", "rational_quadratic", "laplacian")
        kernel = case.pick(*names) if case.chance(0.6) else draw_kernel(case, d, float(X.std()) + 1e-9, size * offset)
        alpha = case.pick(None, height**2 * case.log(-6, 0), height**2 * 10 ** rng.uniform(-6, 0, n))
        optimizer = None if case.chance(0.6) else "auto"
        case.note(kernel=str(kernel) if isinstance(kernel, str) else "own", alpha=alpha, optimizer=optimizer)
        gp = GaussianProcessRegressor(
            kernel, alpha=alpha, optimizer=optimizer, normalize_y=case.chance(0.7), random_state=0
        )
        fitted = case.ask("fit of the estimator", lambda: gp.fit(given, y), optimizer is not None)
        if fitted is None:
            return
        warned = list(case.warned)
        found = case.ask("predict", lambda: gp.predict(asked, return_std=True), True)
        if found is None:
            return
        case.warned += warned
        noise = np.broadcast_to(np.asarray(gp.noise_, float), (n,))
        model = gp.model_
        # normalised targets, read off the model: an affine map that least squares finds
        inner = number(model.train_targets)
        if n > 1 and inner.std() > 0 and np.ptp(y) > 0:
            factor = LONG((y - y.mean()).std() / float(inner.std()))
            shift = y.mean() - factor * inner.mean()
        else:
            return
        x_model = rows(model.train_inputs[0])
        points = Z.astype(LONG)
        if np.abs(x_model - X).max() > 1e-6 * (np.abs(X).max() + 1e-300):
            return  # inputs in units of the model's own
        try:
            reference = Dense(model.covar_module, model.mean_module, X.astype(LONG), inner, noise / factor**2)
            truth = reference.at(points, LONG(np.median(noise)) / factor**2)
        except np.linalg.LinAlgError:
            return
        eps = torch.finfo(model.train_inputs[0].dtype).eps
        mean = shift + factor * truth.mean
        sd = factor * np.sqrt(np.maximum(truth.variance, 0) + truth.noise)
        case.close(
            "estimator mean",
            found[0],
            mean,
            0.05 * sd + 8 * eps * (np.abs(mean) + abs(shift)),
            factor * truth.mean_rounding,
        )
        variance = factor**2 * truth.variance
        allowed = 0.03 * variance + 2e-3 * factor**2 * truth.noise
        case.close("estimator variance", found[1] ** 2, variance, allowed, factor**2 * truth.variance_rounding)
        if case.chance(0.4):
            whole = case.ask("predict cov", lambda: gp.predict(asked, return_cov=True)[1], True)
            if whole is not None:
                case.close(
                    "estimator covariance", np.diag(whole), variance, allowed, factor**2 * truth.variance_rounding
                )
        return
    alpha = case.log(-4, 1)
    kernel = case.pick("rbf", "laplacian", "matern12", "matern32", "matern52", "rational_quadratic")
    gamma = case.log(-1, 1) / size**2 if kernel != "laplacian" else case.log(-1, 1) / size
    shapes = {
        "rbf": KERNELS.RBFKernel,
        "laplacian": sketchgp.LaplaceKernel,
        "matern12": lambda: KERNELS.MaternKernel(0.5),
        "matern32": lambda: KERNELS.MaternKernel(1.5),
        "matern52": lambda: KERNELS.MaternKernel(2.5),
        "rational_quadratic": KERNELS.RQKernel,
    }
    dense = shapes[kernel]().double()
    dense.lengthscale = 1 / gamma if kernel == "laplacian" else (2 * gamma) ** -0.5
    if kernel == "rational_quadratic":
        dense.alpha = 1.0
    case.note(kernel=kernel, gamma=gamma, alpha=alpha)
    gram = exact.covariance(dense, X.astype(LONG), X.astype(LONG))
    cross = exact.covariance(dense, X.astype(LONG), Z.astype(LONG))
    if kernel == "rational_quadratic":
        return
    if which == "ridge":
        targets = y if case.chance(0.6) else np.stack([y, y**2, rng.standard_normal(n)], 1)
        weights = None if case.chance(0.6) else rng.uniform(0.2, 3, n)
        ridge = KernelRidge(alpha, kernel=kernel, gamma=gamma)
        found = case.ask("KernelRidge", lambda: ridge.fit(given, targets, weights).predict(asked))
        diagonal = np.full(n, LONG(alpha)) if weights is None else alpha / weights.astype(LONG)
        truth = cross.T @ np.linalg.solve((gram + np.diag(diagonal)).astype(float), targets)
        size_y = np.abs(targets).max(0)
        eps = 1e-6 if form == "float32" else 1e-9
        case.close("ridge", found, truth, (1e-3 + eps / alpha) * size_y * np.ones_like(np.asarray(truth, float)))
        return
    labels = np.digitize(y, np.quantile(y, [0.4, 0.7]))
    if len(np.unique(labels)) < 2:
        return
    names = np.array(["a", "b", "c"])[labels]
    classifier = KernelClassifier(alpha, kernel=kernel, gamma=gamma)
    fitted = case.ask("KernelClassifier", lambda: classifier.fit(given, names))
    found = case.ask("decision_function", lambda: classifier.decision_function(asked))
    classes = np.unique(names)
    hot = (names[:, None] == classes).astype(float)
    share = hot.mean(0)
    truth = share + np.asarray(cross, float).T @ np.linalg.solve(gram.astype(float) + alpha * np.eye(n), hot - share)
    predicted = case.ask("labels", lambda: fitted.predict(asked))
    if len(classes) > 2:
        case.close("decisions", found, truth, 2e-3 + (1e-6 if form == "float32" else 1e-9) / alpha)
    order = np.sort(truth, 1)
    clear = order[:, -1] - order[:, -2] > 0.01
    if (predicted[clear] != classes[truth.argmax(1)][clear]).any():
        raise Fault("labels of the classifier")
    shares = case.ask("predict_proba", lambda: classifier.predict_proba(asked))
    if np.abs(shares.sum(1) - 1).max() > 1e-6 or shares.min() < 0:
        raise Fault("probabilities of the classifier")


class Tasks(gpytorch.models.ExactGP):
    """Several outputs: ``kind`` says whether tasks are inputs, Kronecker factors, or a batch."""

    def __init__(self, x, y, likelihood, kind, kernel, tasks):
        super().__init__(x, y, likelihood)
        self.kind, self.tasks = kind, tasks
        if kind == "hadamard":
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module, self.task_module = kernel, KERNELS.IndexKernel(num_tasks=tasks, rank=1)
        elif kind == "kronecker":
            self.mean_module = gpytorch.means.MultitaskMean(gpytorch.means.ConstantMean(), num_tasks=tasks)
            self.covar_module = KERNELS.MultitaskKernel(kernel, num_tasks=tasks, rank=1)
        else:
            self.mean_module = gpytorch.means.ConstantMean(batch_shape=torch.Size([tasks]))
            self.covar_module = kernel

    def forward(self, x, i=None):
        if self.kind == "hadamard":
            covariance = self.covar_module(x).mul(self.task_module(i))
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), covariance)
        if self.kind == "kronecker":
            return gpytorch.distributions.MultitaskMultivariateNormal(self.mean_module(x), self.covar_module(x))
        found = gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
        if self.kind == "independent":
            return gpytorch.distributions.MultitaskMultivariateNormal.from_batch_mvn(found)
        return found


class _Fixed:
    """A covariance that is looked up, with what ``Dense`` needs of a kernel."""

    active_dims = None


def several(case: Case) -> None:
    """Compare models of several tasks, and batches, with and without missing targets."""
    rng = case.rng
    kind = case.pick("hadamard", "kronecker", "batch", "independent", "missing")
    n, d, tasks = int(rng.integers(2, 25)), int(rng.integers(1, 3)), int(rng.integers(2, 4))
    dtype = case.pick(torch.float64, torch.float64, torch.float32)
    size = 1.0 if case.chance(0.6) else case.log(-3, 3)
    shift = 0.0 if case.chance(0.7) else case.log(0, 3)
    ratio = case.log(-5, 0)
    case.note(kind=kind, n=n, d=d, tasks=tasks, dtype=str(dtype), size=size, shift=shift, ratio=ratio)
    if kind == "missing":
        return missing(case)
    x = torch.tensor(
        draw_rows(case, n, d, size, size * shift * np.ones(d), case.pick("uniform", "uneven", "duplicates")),
        dtype=dtype,
    )
    z = torch.tensor(draw_rows(case, 4, d, size, size * shift * np.ones(d), "uniform"), dtype=dtype)
    batch = torch.Size([tasks]) if kind in ("batch", "independent") else torch.Size()
    base = case.pick(
        KERNELS.RBFKernel,
        KERNELS.RQKernel,
        lambda **k: KERNELS.MaternKernel(1.5, **k),
        lambda **k: KERNELS.MaternKernel(2.5, **k),
    )
    kernel = KERNELS.ScaleKernel(base(batch_shape=batch), batch_shape=batch)
    height = 1.0 if case.chance(0.6) else case.log(-2, 2)
    kernel.outputscale = torch.tensor(height**2 * rng.uniform(0.5, 2, batch or ()))
    kernel.base_kernel.lengthscale = torch.tensor(size * rng.uniform(0.3, 2, (*batch, 1, 1)))
    wave = np.sin(3 * (x.double().numpy() / size - shift).sum(1))
    free = gpytorch.constraints.Positive()
    if kind == "hadamard":
        i = torch.tensor(rng.integers(tasks, size=(n, 1)))
        y = torch.tensor(height * (wave + i[:, 0].numpy() + 0.1 * rng.standard_normal(n)), dtype=dtype)
        likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=free)
        inputs: Any = (x, i)
        j = torch.tensor(rng.integers(tasks, size=(4, 1)))
        asked: Any = (z, j)
    elif kind == "kronecker" or kind == "independent":
        y = torch.tensor(
            height * (wave[:, None] + np.arange(tasks) + 0.1 * rng.standard_normal((n, tasks))), dtype=dtype
        )
        likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=tasks, noise_constraint=free)
        inputs, asked = x, (z,)
    else:
        y = torch.tensor(
            height * (wave + np.arange(tasks)[:, None] + 0.1 * rng.standard_normal((tasks, n))), dtype=dtype
        )
        likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=free, batch_shape=batch)
        inputs, asked = x.expand(tasks, n, d), (z.expand(tasks, 4, d),)
    likelihood.noise = torch.tensor(height**2 * ratio)
    if hasattr(likelihood, "task_noises"):
        likelihood.task_noises = torch.tensor(height**2 * ratio * rng.uniform(0.5, 2, tasks))
    model = Tasks(inputs, y, likelihood, kind, kernel, tasks).to(dtype)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, gpytorch.means.ConstantMean):
                module.initialize(constant=torch.full(module.raw_constant.shape, 0.3 * height))
    # one dense problem, or one for each element of the batch
    a, b, target = rows(x), rows(z), number(y)
    jobs: list[tuple[np.ndarray, ...]] = []
    centre = LONG(0.3 * height) if dtype == torch.float64 else LONG(np.float32(0.3 * height))
    if kind == "hadamard":
        table = number(model.task_module.covar_factor) @ number(model.task_module.covar_factor).T + np.diag(
            number(model.task_module.var)
        )
        first, second = i[:, 0].numpy(), j[:, 0].numpy()
        k = [exact.covariance(kernel, u, v) for u, v in ((a, a), (a, b), (b, b))]
        k = [
            k[0] * table[np.ix_(first, first)],
            k[1] * table[np.ix_(first, second)],
            k[2] * table[np.ix_(second, second)],
        ]
        jobs.append((*k, np.full(n, number(likelihood.noise).reshape(())), target))
    elif kind == "kronecker":
        index = model.covar_module.task_covar_module
        table = number(index.covar_factor) @ number(index.covar_factor).T + np.diag(number(index.var))
        k = [np.kron(exact.covariance(kernel, u, v), table) for u, v in ((a, a), (a, b), (b, b))]
        noise = number(likelihood.task_noises) + number(likelihood.noise).reshape(())
        jobs.append((*k, np.tile(noise, n), target.reshape(-1)))
    else:
        for t in range(tasks):
            one = copy.deepcopy(kernel)
            single = KERNELS.ScaleKernel(
                type(one.base_kernel)(*([one.base_kernel.nu] if hasattr(one.base_kernel, "nu") else []))
            ).to(dtype)
            k = []
            for u, v in ((a, a), (a, b), (b, b)):
                single.outputscale, single.base_kernel.lengthscale = 1.0, 1.0
                scale = number(kernel.base_kernel.lengthscale)[t].reshape(())
                k.append(number(kernel.outputscale)[t] * _unit(single.base_kernel, u / scale, v / scale, kernel, t))
            if kind == "independent":
                noise = number(likelihood.task_noises)[t] + number(likelihood.noise).reshape(())
                jobs.append((*k, np.full(n, noise), target[:, t]))
            else:
                jobs.append((*k, np.full(n, number(likelihood.noise)[t].reshape(())), target[t]))
    means, variances, deviations, roundings, spreads, value, probes, hard = [], [], [], [], [], 0.0, 0.0, False
    for gram, cross, own, noise, right in jobs:
        matrix = gram + np.diag(noise)
        factor = exact.cholesky(matrix)
        solved = exact.backwards(factor, exact.forwards(factor, right - centre))
        half = exact.forwards(factor, cross)
        back = exact.backwards(factor, half)
        grow = 8 * exact.EPS * math.sqrt(len(right)) * np.sqrt((matrix**2).sum())
        means.append(centre + cross.T @ solved)
        variances.append(np.diagonal(own) - (half**2).sum(0))
        deviations.append(np.sqrt(variances[-1] + np.median(noise)))
        if kind in ("kronecker", "hadamard"):  # GPyTorch multiplies what it has evaluated in the dtype of the model
            grow = grow * (torch.finfo(dtype).eps / 2 / exact.EPS)
        roundings.append(grow * np.sqrt((back**2).sum(0)) * np.sqrt((solved**2).sum()))
        spreads.append(grow * (back**2).sum(0) + 8 * exact.EPS * np.diagonal(own))
        value += float(
            -((right - centre) @ solved) / 2 - np.log(np.diagonal(factor)).sum() - len(right) * np.log(2 * PI_) / 2
        )
        probes = math.hypot(probes, of_probes(matrix, noise))
        hard = hard or float(np.trace(matrix) / noise.min()) > HARD

    def shaped(parts: list[np.ndarray]) -> np.ndarray:
        if kind == "kronecker":
            return parts[0].reshape(-1, tasks)
        return np.stack(parts, -1) if kind == "independent" else (parts[0] if kind == "hadamard" else np.stack(parts))

    eps = torch.finfo(dtype).eps
    allowed = 0.05 * shaped(deviations) + 4 * eps * np.abs(shaped(means))
    own = np.median(jobs[0][3])
    wide = 0.02 * np.abs(shaped(variances)) + 1e-3 * own + 4 * eps * np.abs(shaped(variances))
    with threshold(case, n):
        case.ask("accelerate", lambda: sketchgp.accelerate(model))
        model.eval()
        for which in case.rng.permutation(["call", "call", "likelihood", "predict", "loss"])[:3]:
            if which == "loss":
                model.train()
                mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
                found = case.ask(
                    "several loss",
                    lambda mll=mll: mll(model(*model.train_inputs), model.train_targets).sum().detach().double().item(),
                    hard,
                )
                if found is not None:
                    count = n * (tasks if kind in ("kronecker", "independent") else 1)
                    share = 1e-3 if dtype == torch.float64 else 1e-2
                    case.close(
                        "several loss",
                        found,
                        value / count,
                        0.01 + share * 5 * (1 + abs(value / count)) + probes / count,
                        8 * exact.EPS * HARD,
                    )
                model.eval()
                continue
            if which == "predict":
                point = asked if len(asked) > 1 else z
                found = case.ask(
                    "several predict",
                    lambda point=point: sketchgp.predict(model, point, progress=False),
                    hard,
                    "batch" if kind == "batch" else None,
                )
                if found is None:
                    continue
                pair = (found.mean, found.variance)
            elif which == "likelihood":
                noises = np.stack([job[3][0] * np.ones(len(means[k])) for k, job in enumerate(jobs)], 0)
                found = case.ask("several likelihood", lambda: _both(model.likelihood(model(*asked))), hard)
                if found is None or kind in ("kronecker", "hadamard"):
                    continue
                noises = noises.T if kind == "independent" else noises
                case.close(
                    "several observation", found[1], shaped(variances) + noises, wide + 0.01 * noises, shaped(spreads)
                )
                continue
            else:
                pair = case.ask("several call", lambda: _both(model(*asked)), hard)
                if pair is None:
                    continue
            case.close(f"several {which} mean", pair[0], shaped(means), allowed, shaped(roundings))
            case.close(f"several {which} variance", pair[1], shaped(variances), wide, shaped(spreads))


def _unit(kernel: Any, a: np.ndarray, b: np.ndarray, batched: Any, t: int) -> np.ndarray:
    if isinstance(kernel, KERNELS.RQKernel):
        alpha = number(batched.base_kernel.alpha).reshape(-1)[t]
        square = ((a[:, None, :] - b[None, :, :]) ** 2).sum(-1)
        return (1 + square / (2 * alpha)) ** -alpha
    # the lengthscale of one is rounded by its transform: divide it out
    scale = number(kernel.lengthscale).reshape(())
    return exact.covariance(kernel, a * scale, b * scale)


def missing(case: Case) -> None:
    """Leave out targets that are missing."""
    problem = Problem(case, most=40, easy=True, n=int(case.rng.integers(4, 40)))
    model = problem.model
    n = len(model.train_targets)
    gone = case.rng.random(n) < 0.3
    gone[0] = True
    gone[-1] = False
    y = model.train_targets.clone()
    y[torch.tensor(gone)] = math.nan
    model.set_train_data(targets=y, strict=False)
    keep = ~gone
    reference = Dense(
        *(
            model.covar_module,
            model.mean_module,
            rows(model.train_inputs[0])[keep],
            number(y)[keep],
            problem.noises()[keep],
        )
    )
    truth = reference.at(rows(problem.points), problem.new_noise())
    policy = case.pick("mask", "mask", "fill")
    case.note(policy=policy)
    problem.reference = reference
    with threshold(case, n), gpytorch.settings.observation_nan_policy(policy):
        case.ask("accelerate", lambda: sketchgp.accelerate(model))
        model.eval()
        for which in case.rng.permutation(QUESTIONS)[:3]:
            if "low" in which or "samples" in which:
                continue
            compare(problem, str(which), truth)
        if policy == "mask":
            model.train()
            mll = sketchgp.ExactMarginalLogLikelihood(model.likelihood, model)
            found = case.ask("masked loss", lambda: mll(model(*model.train_inputs), y).detach().double().item())
            value = reference.log_density()
            if found is not None:
                # GPyTorch divides by all rows or by those observed
                ways = np.array([value, value * keep.sum() / n])
                nearest = ways[np.abs(ways - found).argmin()]
                probes = of_probes(reference.matrix, reference.noise) / keep.sum()
                case.close("masked loss", found, nearest, 0.02 + 0.01 * abs(value) + probes)


# ----- wrong calls -----


def wrong(case: Case) -> None:
    """Make one wrong call, of a small model of any kind."""
    from sketchgp.sklearn import GaussianProcessRegressor, KernelClassifier, KernelRidge

    rng = case.rng
    n = int(case.pick(6, 12))
    x = torch.tensor(rng.standard_normal((n, 2)))
    y = torch.tensor(rng.standard_normal(n))
    k = KERNELS.ScaleKernel(KERNELS.RBFKernel()).double()

    def make() -> Model:
        return Model(
            x.clone(),
            y.clone(),
            gpytorch.likelihoods.GaussianLikelihood().double(),
            gpytorch.means.ZeroMean(),
            copy.deepcopy(k),
        )

    plain, other = make(), make()
    text = case.pick(*WRONG)
    case.note(call=text)
    gp = lambda kernel="matern52", **rest: GaussianProcessRegressor(kernel, **{"optimizer": None, **rest})  # noqa: E731
    X, Y = x.numpy(), y.numpy()
    with ExitStack() as stack:
        stack.enter_context(threshold(case, n))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        model = sketchgp.accelerate(make())
        if case.chance(0.5):
            model.eval()(x).mean  # noqa: B018 - a model that has its solution
        names = {
            **{"S": sketchgp, "nan": math.nan, "Model": Model},
            **{"m": model, "plain": plain, "x": x, "y": y, "z": torch.rand(5, 2, dtype=torch.float64), "k": k},
            **{
                "torch": torch,
                "np": np,
                "gpytorch": gpytorch,
                "lik": model.likelihood,
                "mean": gpytorch.means.ZeroMean(),
            },
            "other_mll": gpytorch.mlls.ExactMarginalLogLikelihood(other.likelihood, other),
            "whole": sketchgp.FullProblem(k, x, y, 0.1),
            "sparse": sketchgp.InducingPointProblem(k, x, y, 0.1, x[:3]),
            **{"X": X, "Y": Y, "L": np.where(np.median(Y) < Y, "a", "b"), "gp": gp},
            **{"ridge": KernelRidge, "classifier": KernelClassifier},
        }
        if "drawn" in text:
            names["drawn"] = sketchgp.sample_posterior(model, 3)
        if "fitted" in text:
            names["fitted"] = gp().fit(X, Y)
        try:
            found = eval(text, names)
        except (sketchgp.SketchGPError, NotImplementedError):
            case.outcomes["refused"] += 1
        except (ValueError, TypeError) as error:
            # scikit-learn's checks speak for themselves; elsewhere an error has to come from a check
            frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
            named = any(word in text for word in ("gp(", "fitted", "ridge(", "classifier("))
            clear = "sklearn" in frames[-1] or os.sep + "sketchgp" + os.sep in frames[-1]
            if not (named and clear):
                raise Fault(f"{text}: obscure {type(error).__name__}: {error}") from error
            case.outcomes["refused"] += 1
        except Exception as error:
            if type(error).__name__ == "NotFittedError":
                return
            raise Fault(f"{text}: obscure {type(error).__name__}: {error}") from error
        else:
            raise Fault(f"{text}: accepted, and answered {str(found)[:200]!r}")


KINDS: dict[str, tuple[Callable[[Case], None], int]] = {
    "answers": (answers, 30),
    "life": (life, 15),
    "losses": (losses, 8),
    "left_out": (left_out, 6),
    "noise_paths": (noise_paths, 2),
    "draws": (draws, 6),
    "sparse": (sparse, 8),
    "full": (full, 7),
    "fits": (fits, 2),
    "estimators": (estimators, 7),
    "several": (several, 7),
    "wrong": (wrong, 6),
}


def run(seed: int, index: int, only: str | None = None) -> Case:
    """Run a case.

    :raises Fault: with what was drawn, and the command that runs it again.
    """
    case = Case(seed, index)
    names = list(KINDS) if only is None else [only]
    weights = np.array([KINDS[name][1] for name in names], float)
    name = str(case.rng.choice(names, p=weights / weights.sum()))
    case.note(kind_of_case=name)
    try:
        KINDS[name][0](case)
    except Fault as fault:
        again = f"python tests/second_cases.py {seed} {index} --only {name}"
        told = ", ".join(f"{key}={str(value)[:120]}" for key, value in case.told.items())
        raise Fault(f"{fault}\n  again: {again}\n  drawn: {told}\n  steps: {' > '.join(case.steps)}") from fault
    return case


def main(arguments: list[str]) -> int:
    only = arguments[arguments.index("--only") + 1] if "--only" in arguments else None
    numbers = [int(word) for word in arguments if word.isdigit()]
    if len(numbers) == 2:
        try:
            case = run(*numbers, only=only)
        except Fault as fault:
            if fault.__cause__ is not None and fault.__cause__.__cause__ is not None:
                traceback.print_exception(fault.__cause__.__cause__)
            print(fault)
            return 1
        print(case.told, case.steps, dict(case.outcomes), sep="\n")
        return 0
    seed, first, last = numbers
    outcomes: Counter[str] = Counter()
    faults = 0
    for index in range(first, last):
        try:
            case = run(seed, index, only)
            outcomes.update(case.outcomes)
            if case.limits:
                print(
                    f"--- {index}: limits of float64: {case.limits}; condition {case.told.get('condition')}", flush=True
                )
        except Fault as fault:
            faults += 1
            print(f"--- {index}: {fault}", flush=True)
        except Exception as error:
            faults += 1
            where = [f"{frame.name}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)][2:]
            print(f"--- {index}: the test itself: {type(error).__name__}: {error} ({where})", flush=True)
    print(f"{last - first} cases, {faults} faults; {dict(outcomes)}")
    return faults > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
