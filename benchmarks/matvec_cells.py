"""What is measured in one cell of the benchmark: kernels, inputs, contestants, and the check of their results."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import gpytorch
import torch
from torch import Tensor

from matvec_limit import Work

OURS = ("tiled", "fused", "dense", "triton")
RIVALS = ("torch-dense", "keops-lazy")
OUTPUTSCALE = 1.3
CHECKED_ROWS = 200
Kernel = gpytorch.kernels.Kernel
Call = Callable[[], Any]


# -------------------------------------------------------------------------------------------------- kernels
def _spread_out(d: int, typical: float) -> Tensor:
    """ARD lengthscales around ``typical``, all different."""
    return typical * torch.logspace(-0.1, 0.1, d)


def _scaled(base: Kernel, d: int, typical: float) -> Kernel:
    base.lengthscale = _spread_out(d, typical)
    kernel = gpytorch.kernels.ScaleKernel(base)
    kernel.outputscale = OUTPUTSCALE
    return kernel


def _rbf(d: int) -> Kernel:
    return _scaled(gpytorch.kernels.RBFKernel(ard_num_dims=d), d, math.sqrt(d))


def _matern(nu: float, d: int) -> Kernel:
    return _scaled(gpytorch.kernels.MaternKernel(nu=nu, ard_num_dims=d), d, math.sqrt(d))


def _periodic_base(d: int) -> Kernel:
    base = gpytorch.kernels.PeriodicKernel(ard_num_dims=d)
    base.period_length = _spread_out(d, 3.0)
    base.lengthscale = _spread_out(d, float(d))
    return base


def _laplace(d: int) -> Kernel:
    from sketchgp.kernels import LaplaceKernel

    return _scaled(LaplaceKernel(ard_num_dims=d), d, float(d))


def _rq(d: int) -> Kernel:
    kernel = _scaled(gpytorch.kernels.RQKernel(ard_num_dims=d), d, math.sqrt(d))
    kernel.base_kernel.alpha = 1.5
    return kernel


def _product(d: int) -> Kernel:
    rbf = gpytorch.kernels.RBFKernel(ard_num_dims=d)
    rbf.lengthscale = _spread_out(d, math.sqrt(d))
    kernel = gpytorch.kernels.ScaleKernel(rbf * _periodic_base(d))
    kernel.outputscale = OUTPUTSCALE
    return kernel


@dataclass(frozen=True)
class Family:
    """A kernel of the benchmark; lengthscales are such that typical entries are neither 0 nor 1.

    :ivar work: the least work for an entry, :ivar how: how that is counted, :ivar main: measured for every d.
    :ivar gradient_rows: rows at which gradients are checked against dense float64 autograd.
    """

    label: str
    build: Callable[[int], Kernel]
    work: Work
    how: str
    main: bool = False
    gradient_rows: int = 2100


FAMILIES = {
    "rbf": Family("RBF", _rbf, Work(), "one distance, one exponential", main=True),
    "matern52": Family("Matern-5/2", functools.partial(_matern, 2.5), Work(roots=1),
                       "one distance, one exponential, one root", main=True),
    "matern32": Family("Matern-3/2", functools.partial(_matern, 1.5), Work(roots=1),
                       "one distance, one exponential, one root"),
    "laplace": Family("l1 Laplace", _laplace, Work(flops=4),
                      "two vector instructions an input (4 flops of the matrix product's rate), one exponential",
                      gradient_rows=600),
    "rq": Family("rational quadratic", _rq, Work(logarithms=1), "one distance, one exponential, one logarithm"),
    "periodic": Family("periodic", lambda d: _scaled_only(_periodic_base(d)), Work(flops=4),
                       "one distance of 2 d features (cosines and sines), one exponential", gradient_rows=400),
    "sum": Family("RBF + Matern-5/2", lambda d: _rbf(d) + _matern(2.5, d), Work(flops=4, exponentials=2, roots=1),
                  "two distances, two exponentials, one root"),
    "product": Family("RBF x periodic", _product, Work(flops=6),
                      "one distance of 3 d features, one exponential", gradient_rows=400),
}  # fmt: skip


def _scaled_only(base: Kernel) -> Kernel:
    kernel = gpytorch.kernels.ScaleKernel(base)
    kernel.outputscale = OUTPUTSCALE
    return kernel


@dataclass(frozen=True)
class Cell:
    kernel: str
    d: int
    t: int
    dtype: str
    n: int

    @property
    def key(self) -> str:
        return f"{self.kernel} d={self.d} t={self.t} {self.dtype} n={self.n}"

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


# ------------------------------------------------------------------------------------------------- problem
class Problem:
    """Inputs x, z (n, d), right-hand side v (n, t), left side of the derivative (n, t), and the kernel.

    Everything is standard normal, drawn on the CPU from one seed.
    """

    def __init__(self, cell: Cell, device: torch.device, seed: int) -> None:
        self.cell, self.device = cell, device
        self.family = FAMILIES[cell.kernel]
        generator = torch.Generator().manual_seed(seed)

        def draw(columns: int) -> Tensor:
            return torch.randn(cell.n, columns, generator=generator).to(device, cell.torch_dtype)

        self.x, self.z, self.v, self.left = draw(cell.d), draw(cell.d), draw(cell.t), draw(cell.t)
        self.kernel = self.family.build(cell.d).to(device, cell.torch_dtype)
        self._exact: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
        self._gradients: dict[str, dict[str, Tensor]] = {}

    def inputs(self, n: int, case: str) -> tuple[Tensor, Tensor]:
        return self.x[:n], (self.x if case == "square" else self.z)[:n]

    def operator(self, engine: str, n: int, case: str, inputs: bool = False) -> Any:
        """A fresh ``KernelMatrix``; ``engine`` may carry a precision: ``triton/tf32``."""
        from sketchgp.operators import KernelMatrix

        name, _, precision = engine.partition("/")
        x = self.x[:n].clone().requires_grad_(inputs)
        z = None if case == "square" else self.z[:n].clone().requires_grad_(inputs)
        options = {"precision": precision} if precision else {}
        return KernelMatrix.of(self.kernel, x, z, engine=name, **options)

    # --- checks -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def error(self, result: Tensor, n: int, case: str) -> float:
        """Relative 2-norm error of some rows of a product, against GPyTorch's kernel in float64."""
        if (n, case) not in self._exact:
            step = max(1, n // CHECKED_ROWS)
            rows = torch.arange(0, n, step, device=self.device)[:CHECKED_ROWS]
            exact = copy.deepcopy(self.kernel).double()
            x, z = (side.double() for side in self.inputs(n, case))
            chunk = max(1, int(2e7 // (n * self.cell.d)))  # some kernels of GPyTorch make a (rows, n, d) tensor
            v = self.v[:n].double()
            parts = [exact(x[part], z).to_dense() @ v for part in rows.split(chunk)]
            self._exact[n, case] = rows, torch.cat(parts)
        rows, reference = self._exact[n, case]
        return float((result[rows].double() - reference).norm() / reference.norm())

    def gradient_error(self, engine: str, case: str, inputs: bool) -> float:
        """Relative error of the bilinear derivative at fewer rows, against dense float64 autograd.

        All parameters together, or all inputs together where the inputs are differentiated.
        """
        n = min(self.cell.n, self.family.gradient_rows)
        if case not in self._gradients:
            exact = copy.deepcopy(self.kernel).double()
            x = self.x[:n].double().requires_grad_()
            z = x if case == "square" else self.z[:n].double().requires_grad_()
            value = (self.left[:n].double() * (exact(x, z).to_dense() @ self.v[:n].double())).sum()
            parameters = list(exact.parameters())
            sides = [x] if case == "square" else [x, z]
            found = torch.autograd.grad(value, [*parameters, *sides])
            count = len(parameters)
            self._gradients[case] = {"parameters": _one_vector(found[:count]), "inputs": _one_vector(found[count:])}
        operator = self.operator(engine, n, case, inputs)
        found = operator._bilinear_derivative(self.left[:n], self.v[:n])
        if inputs:
            sides = (found[0] + found[1],) if case == "square" else (found[0], found[1])
            result = _one_vector(sides)
        else:
            result = _one_vector(found[2:])
        reference = self._gradients[case]["inputs" if inputs else "parameters"]
        return float((result - reference).norm() / reference.norm())


def _one_vector(tensors: Any) -> Tensor:
    return torch.cat([tensor.detach().double().reshape(-1) for tensor in tensors if tensor is not None])


# ---------------------------------------------------------------------------------------------- contestants
@dataclass(frozen=True)
class Contestant:
    """One thing to time: ``prepare(n)`` returns, outside the clock, the call to be timed.

    :ivar engine: of ours, or one of the rivals.
    :ivar measure: ``product``; ``first product`` and ``stored product`` of the stored matrix; ``gradient``.
    :ivar case: ``square``, k(x, x), or ``rectangular``, k(x, z).
    :ivar wrt: ``parameters`` or ``inputs`` (and parameters) for gradients.
    """

    engine: str
    measure: str
    case: str
    prepare: Callable[[int], Call]
    wrt: str = ""

    @property
    def key(self) -> str:
        return " ".join(filter(None, (self.engine, self.measure, self.case, self.wrt)))


def contestants(problem: Problem, engines: list[str], gradients: bool = True) -> Iterator[Contestant]:
    """All that is timed in a cell, in the order of one round."""
    main = problem.family.main
    few = problem.cell.d in (8, 90)
    for engine in engines:
        if engine == "dense":
            if main:
                yield from _dense(problem)
        elif engine == "torch-dense":
            if main:
                yield Contestant(engine, "product", "rectangular", functools.partial(plain_torch, problem))
        elif engine == "keops-lazy":
            if main:
                yield Contestant(engine, "product", "rectangular", functools.partial(_lazy, problem))
                if few and gradients:
                    yield Contestant(engine, "gradient", "rectangular",
                                     functools.partial(_lazy_gradient, problem), "parameters")  # fmt: skip
        else:
            for case in ("square", "rectangular"):
                yield Contestant(engine, "product", case, functools.partial(product_of, problem, engine, case))
            if gradients and engine != "fused":  # whose gradients go by tiles
                kinds = [("square", "parameters"), ("square", "inputs")]
                if main and few:
                    kinds.append(("rectangular", "parameters"))
                for case, wrt in kinds:
                    prepare = functools.partial(gradient_of, problem, engine, case, wrt == "inputs")
                    yield Contestant(engine, "gradient", case, prepare, wrt)


def product_of(problem: Problem, engine: str, case: str, n: int) -> Call:
    operator = problem.operator(engine, n, case).detach()
    return functools.partial(operator._matmul, problem.v[:n])


def gradient_of(problem: Problem, engine: str, case: str, inputs: bool, n: int) -> Call:
    operator = problem.operator(engine, n, case, inputs)
    return functools.partial(operator._bilinear_derivative, problem.left[:n], problem.v[:n])


def _dense(problem: Problem) -> Iterator[Contestant]:
    """The stored matrix: its first product, which builds it, and another product by the same operator."""
    kept: dict[int, Any] = {}

    def first(n: int) -> Call:
        kept.clear()
        kept[n] = problem.operator("dense", n, "square").detach()
        return functools.partial(kept[n]._matmul, problem.v[:n])

    def again(n: int) -> Call:
        if n not in kept:
            first(n)()
        return functools.partial(kept.pop(n)._matmul, problem.v[:n])

    yield Contestant("dense", "first product", "square", first)
    yield Contestant("dense", "stored product", "square", again)


def plain_torch(problem: Problem, n: int) -> Call:
    """What a user would write: distances by the matrix-product formula, the kernel, the product; nothing tiled."""
    x, z, outputscale = (t.detach() for t in _scaled_inputs(problem, n))
    v, rbf = problem.v[:n], problem.cell.kernel == "rbf"

    @torch.no_grad()
    def call() -> Tensor:
        q = torch.addmm(z.square().sum(1), x, z.mT, alpha=-2).add_(x.square().sum(1, keepdim=True)).clamp_(min=0)
        if rbf:
            return outputscale * (q.mul_(-0.5).exp_() @ v)
        s = q.sqrt()
        return outputscale * (q.div_(3).add_(s).add_(1).mul_(s.neg_().exp_()) @ v)

    return call


def _scaled_inputs(problem: Problem, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """x and z divided by the lengthscales (for Matern times sqrt(5)), the outputscale; all differentiable."""
    sharpness = math.sqrt(5) if problem.cell.kernel == "matern52" else 1.0
    weight = sharpness / problem.kernel.base_kernel.lengthscale
    return problem.x[:n] * weight, problem.z[:n] * weight, problem.kernel.outputscale


def lazy_product(x: Tensor, z: Tensor, v: Tensor, rbf: bool) -> Tensor:
    """``K v`` by a KeOps LazyTensor on scaled inputs, in the form that GPyTorch's KeOps kernels use."""
    from pykeops.torch import LazyTensor

    q = ((LazyTensor(x[:, None, :]) - LazyTensor(z[None, :, :])) ** 2).sum(-1)
    if rbf:
        return (-q / 2).exp() @ v
    s = q.sqrt()
    return ((1 + s + q / 3) * (-s).exp()) @ v


def _lazy(problem: Problem, n: int) -> Call:
    x, z, outputscale = (t.detach().contiguous() for t in _scaled_inputs(problem, n))
    v, rbf = problem.v[:n].contiguous(), problem.cell.kernel == "rbf"
    return lambda: outputscale * lazy_product(x, z, v, rbf)


def _lazy_gradient(problem: Problem, n: int) -> Call:
    """The backward pass alone: the graph is made outside the clock."""
    x, z, outputscale = _scaled_inputs(problem, n)
    v, rbf = problem.v[:n].contiguous(), problem.cell.kernel == "rbf"
    value = (problem.left[:n] * (outputscale * lazy_product(x, z, v, rbf))).sum()
    return functools.partial(torch.autograd.grad, value, list(problem.kernel.parameters()))
