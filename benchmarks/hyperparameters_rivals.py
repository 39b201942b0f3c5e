"""What ``fit`` is compared with: GPyTorch's exact model, SGPR and SVGP, and a dense L-BFGS."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import gpytorch
import numpy as np
import torch
from gpytorch.kernels import InducingPointKernel, MaternKernel, ScaleKernel
from scipy.optimize import minimize
from torch import Tensor

from common import Model, scores
from measure import counted_gpytorch_cg

STEPS, EPOCHS = 100, 100  # of Adam for exact models and SGPR; of SVGP
BATCH, LEAST = 1024, 2000  # rows of a step of SVGP, and the fewest steps, however few the rows
DENSE = 8000  # training rows up to which the dense fit is tried


class Data(NamedTuple):
    """Training and test part."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


def parameters(model: Any) -> dict[str, Any]:
    """The hyperparameters of an exact model."""
    values = {"lengthscales": model.covar_module.base_kernel.lengthscale.reshape(-1),
              "outputscale": model.covar_module.outputscale, "noise": model.likelihood.noise.squeeze()}  # fmt: skip
    return {name: value.tolist() for name, value in values.items()}


def matern(scaled: Tensor, outputscale: Tensor) -> Tensor:
    """``(n, n)`` of inputs divided by their lengthscales, with distances whose gradient at 0 is 0."""
    norms = scaled.square().sum(-1)
    squares = (norms.unsqueeze(1) + norms - 2 * scaled @ scaled.mT) * (1 - torch.eye(len(scaled), dtype=scaled.dtype))
    away = squares > 0
    distance = torch.where(away, squares, 1).sqrt() * away * math.sqrt(3)
    return outputscale * (1 + distance) * (-distance).exp()


def true_loss(parameters: dict[str, Any], data: Data) -> float:
    """Negative log marginal likelihood a row, by a float64 factorization."""
    with torch.no_grad():
        lengthscales = torch.tensor(parameters["lengthscales"], dtype=torch.float64)
        matrix = matern(data.x.double() / lengthscales, torch.tensor(parameters["outputscale"], dtype=torch.float64))
        matrix.diagonal().add_(parameters["noise"])
        root = torch.linalg.cholesky(matrix)
        y = data.y.double().unsqueeze(-1)
        half = torch.linalg.solve_triangular(root, y, upper=False)
        total = half.square().sum() / 2 + root.diagonal().log().sum() + len(y) / 2 * math.log(2 * math.pi)
    return float(total / len(y))


def refuse_many(data: Data) -> None:
    """:raises ValueError: beyond what a dense fit is tried with."""
    if len(data.x) > DENSE:
        raise ValueError(f"n > {DENSE:,}")


# ------------------------------------------------------------------------------------------ dense L-BFGS
def dense(data: Data, limit: float, found: dict[str, Any]) -> None:
    """Float64: the loss by a factorization, its gradient by the inverse, SciPy's L-BFGS-B in GPyTorch's raw parameters
    (softplus's arguments)."""
    refuse_many(data)
    x, y = data.x.double(), data.y.double().unsqueeze(-1)
    n, d = x.shape
    began, wall, evaluations = time.process_time(), time.perf_counter(), 0
    best: dict[str, Any] = {"loss": math.inf}

    def unpack(raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        positive = torch.nn.functional.softplus(raw)
        return positive[:d], positive[d], positive[d + 1] + 1e-4

    def loss(vector: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal evaluations
        evaluations += 1
        if time.process_time() - began > limit:
            raise StopIteration
        raw = torch.from_numpy(vector).clone().requires_grad_()
        lengthscales, outputscale, noise = unpack(raw)
        matrix = matern(x / lengthscales, outputscale)
        with torch.no_grad():
            root, info = torch.linalg.cholesky_ex(matrix + noise * torch.eye(n, dtype=torch.float64))
            if info:  # of a step that went too far
                return best["loss"] + 1e3, np.zeros_like(vector)
            inverse = torch.cholesky_inverse(root)
            weights = inverse @ y
            value = float((y * weights).sum() / 2 + root.diagonal().log().sum() + n / 2 * math.log(2 * math.pi)) / n
            del root
            inverse -= weights @ weights.mT
        ((matrix * inverse).sum() + noise * inverse.diagonal().sum()).div(2 * n).backward()
        if value < best["loss"]:
            best.update(loss=value, vector=vector.copy())
        return value, raw.grad.numpy()

    start = np.zeros(d + 2)  # softplus(0) = ln 2, as GPyTorch begins
    options = {"maxiter": 500, "maxcor": 20, "ftol": 1e-10, "gtol": 1e-6}
    complete = True
    try:
        result: Any = minimize(loss, start, jac=True, method="L-BFGS-B", options=options)
        found["reason"], found["steps"] = str(result.message), int(result.nit)
    except StopIteration:
        complete = False
    lengthscales, outputscale, noise = unpack(torch.from_numpy(best["vector"]))
    found |= {"cpu_seconds": time.process_time() - began, "seconds": time.perf_counter() - wall,
              "evaluations": evaluations, "loss": best["loss"], "complete": complete, "objective": "exact",
              "lengthscales": lengthscales.tolist(), "outputscale": float(outputscale),
              "noise": float(noise)}  # fmt: skip
    began = time.process_time()
    test = data.test_x.double() / lengthscales
    matrix = matern(x / lengthscales, outputscale)
    matrix.diagonal().add_(noise)
    root = torch.linalg.cholesky(matrix)
    del matrix
    weights = torch.cholesky_solve(y, root)
    means, variances = [], []
    for rows in range(0, len(test), 2000):
        distance = torch.cdist(test[rows : rows + 2000], x / lengthscales) * math.sqrt(3)
        cross = outputscale * (1 + distance) * (-distance).exp()
        half = torch.linalg.solve_triangular(root, cross.mT, upper=False)
        means.append((cross @ weights).squeeze(-1))
        variances.append(outputscale + noise - half.square().sum(0))
    found |= scores(torch.cat(means), torch.cat(variances), data.test_y)
    found["predict_cpu_seconds"] = time.process_time() - began


# --------------------------------------------------------------------------------------------- GPyTorch
def kernel_of(x: Tensor) -> ScaleKernel:
    return ScaleKernel(MaternKernel(nu=1.5, ard_num_dims=x.shape[1]))


def adam(model: Any, mll: Any, limit: float, found: dict[str, Any], most: int = STEPS) -> None:
    """GPyTorch's usual loop: so many steps at 0.1, or until the limit."""
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    began, wall, steps = time.process_time(), time.perf_counter(), 0
    while steps < most and time.process_time() - began <= limit:
        optimizer.zero_grad()
        loss = -mll(model(model.train_inputs[0]), model.train_targets)
        loss.backward()
        optimizer.step()
        steps, found["loss"] = steps + 1, loss.item()
        del loss
    found |= {"cpu_seconds": time.process_time() - began, "seconds": time.perf_counter() - wall, "steps": steps,
              "evaluations": steps, "complete": steps == most}  # fmt: skip
    optimizer.zero_grad()
    model.eval()


@contextlib.contextmanager
def tighter(tolerance: float | None, rank: int | None) -> Iterator[None]:
    """GPyTorch's settings."""
    with contextlib.ExitStack() as stack:
        if tolerance is not None:
            stack.enter_context(gpytorch.settings.cg_tolerance(tolerance))
            stack.enter_context(gpytorch.settings.eval_cg_tolerance(tolerance))
        if rank is not None:
            stack.enter_context(gpytorch.settings.max_preconditioner_size(rank))
        yield


def exact(
    data: Data,
    limit: float,
    found: dict[str, Any],
    tolerance: float | None = None,
    rank: int | None = None,
    steps: int = STEPS,
) -> None:
    """GPyTorch's exact model; variances of test points for a third of the limit."""
    model = Model(data.x, data.y, gpytorch.likelihoods.GaussianLikelihood(), kernel_of(data.x))
    torch.manual_seed(0)
    with tighter(tolerance, rank):
        with counted_gpytorch_cg() as solves:
            adam(model, gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model), limit, found, steps)
        found |= {"products": sum(solve.products for solve in solves), "objective": "probes", **parameters(model)}
        began, means, variances = time.process_time(), [], []
        with torch.no_grad():
            with gpytorch.settings.skip_posterior_variances():
                for part in data.test_x.split(2000):
                    means.append(model(part).mean)
            mean = torch.cat(means)
            found["rmse"] = float((mean - data.test_y).double().square().mean().sqrt())
            for part in data.test_x.split(200):
                variances.append(model.likelihood(model(part)).variance)
                if time.process_time() - began > limit / 3:
                    break
    seen = sum(len(part) for part in variances)
    of_seen = scores(mean[:seen], torch.cat(variances), data.test_y[:seen])
    found |= {"nll": of_seen["nll"], "coverage": of_seen["coverage"], "scored": seen,
              "predict_cpu_seconds": time.process_time() - began}  # fmt: skip


def inducing_rows(data: Data, points: int) -> Tensor:
    order = np.random.RandomState(0).permutation(len(data.x))
    return data.x[order[:points]].clone()


def predict_in_parts(model: Any, data: Data, found: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return means and variances of the test observations."""
    began, means, variances = time.process_time(), [], []
    with torch.no_grad():
        for part in data.test_x.split(2000):
            posterior = model.likelihood(model(part))
            means.append(posterior.mean)
            variances.append(posterior.variance)
    mean, variance = torch.cat(means), torch.cat(variances)
    found |= scores(mean, variance, data.test_y)
    found["predict_cpu_seconds"] = time.process_time() - began
    return mean, variance


def sgpr(data: Data, limit: float, found: dict[str, Any], points: int) -> None:
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    kernel = InducingPointKernel(kernel_of(data.x), inducing_points=inducing_rows(data, points), likelihood=likelihood)
    model = Model(data.x, data.y, likelihood, kernel)
    adam(model, gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model), limit, found)
    predict_in_parts(model, data, found)


class Variational(gpytorch.models.ApproximateGP):
    """GPyTorch's SVGP, zero mean."""

    def __init__(self, data: Data, points: int) -> None:
        z = inducing_rows(data, points)
        distribution = gpytorch.variational.CholeskyVariationalDistribution(len(z))
        super().__init__(gpytorch.variational.VariationalStrategy(self, z, distribution, learn_inducing_locations=True))
        self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), kernel_of(data.x)
        self.likelihood = gpytorch.likelihoods.GaussianLikelihood()

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def svgp(data: Data, limit: float, found: dict[str, Any], points: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    model = Variational(data, points)
    mll = gpytorch.mlls.VariationalELBO(model.likelihood, model, num_data=len(data.x))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model.train()
    began, wall, steps, epochs = time.process_time(), time.perf_counter(), 0, 0
    late = False
    while (epochs < EPOCHS or steps < LEAST) and not late:
        for rows in torch.randperm(len(data.x)).split(BATCH):
            optimizer.zero_grad()
            loss = -mll(model(data.x[rows]), data.y[rows])
            loss.backward()
            optimizer.step()
            steps += 1
            if late := time.process_time() - began > limit:
                break
        epochs += not late
    found |= {"cpu_seconds": time.process_time() - began, "seconds": time.perf_counter() - wall, "steps": steps,
              "epochs": epochs, "complete": not late}  # fmt: skip
    model.eval()
    return predict_in_parts(model, data, found)


RIVALS: dict[str, Callable[[Data, float, dict[str, Any]], Any]] = {
    "GPyTorch": exact,
    "GPyTorch 50": partial(exact, steps=50),
    "GPyTorch 0.01": partial(exact, tolerance=0.01, rank=100),
    "SGPR 512": partial(sgpr, points=512),
    "SGPR 1024": partial(sgpr, points=1024),
    "SVGP 512": partial(svgp, points=512),
    "SVGP 1024": partial(svgp, points=1024),
    "dense": dense,
}
