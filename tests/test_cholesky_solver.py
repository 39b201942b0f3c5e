"""The direct solver, and what a ``FullProblem`` refuses."""

from __future__ import annotations

import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from linear_operator.operators import DenseLinearOperator

from cases import each
from problems import GENERIC, RADIAL, dense, identity, normal, points, relative, set_scales, with_spectrum
from sketchgp import (
    Cholesky,
    ConjugateGradients,
    ConvergenceWarning,
    FullProblem,
    InputError,
    NumericalError,
    record_solves,
)
from sketchgp.operators import KernelMatrix
from sketchgp.solvers import System


def _kernel(dtype=torch.float64):
    return set_scales(ScaleKernel(RBFKernel()), lengthscale=0.5).to(dtype)


def _arguments(n=20, dtype=torch.float64, **changes):
    return {"kernel": _kernel(dtype), "x": points(n, dtype=dtype), "y": normal(n, dtype=dtype), "noise": 0.1, **changes}


@each("columns", [None, 4])
@each("dtype", [torch.float32, torch.float64])
@each("name", ["rbf-ard", "matern12", "matern52-ard", "rational-quadratic", "sum"])
def test_against_a_dense_solve(name, dtype, columns):
    kernel = set_scales({**RADIAL, **GENERIC}[name]()).to(dtype)
    shape = (100,) if columns is None else (100, columns)
    problem = FullProblem(kernel, points(100, dtype=dtype), normal(*shape, dtype=dtype), 1e-2)
    with record_solves() as solves:
        solution = Cholesky().solve(problem)
    matrix = dense(kernel.double(), problem.x.double()) + 1e-2 * identity(100)
    assert solution.value.dtype == dtype
    assert solution.value.shape == problem.y.shape
    assert relative(solution.value, torch.linalg.solve(matrix, problem.y.double())) < (
        1e-9 if dtype == torch.float64 else 1e-6
    )
    report = solution.report
    assert solves == [report]
    assert (report.solver, report.iterations, report.converged) == ("Cholesky", 0, True)
    y = problem.y.double().reshape(100, -1)
    true = (y - matrix @ solution.value.double().reshape(100, -1)).norm(dim=0) / y.norm(dim=0)
    assert torch.allclose(report.residual, true, rtol=1e-3, atol=1e-11)


def test_matern12_with_little_noise_agrees_with_conjugate_gradients():
    """Both solve one system: what the direct solver factors is the matrix that the iteration multiplies by."""
    problem = FullProblem(set_scales(MaternKernel(nu=0.5).double(), lengthscale=0.5), points(60), normal(60), 1e-9)
    direct = Cholesky().solve(problem)
    system = problem.system()
    residual = problem.y - system.accurate_product(direct.value.unsqueeze(-1))[:, 0]
    assert float(residual.detach().norm() / problem.y.norm()) < 1e-11
    assert direct.report.max_residual < 1e-9


def test_batches():
    x = torch.stack([points(20, seed=s) for s in range(2)])
    noise = torch.full((2, 20), 0.1, dtype=torch.float64)
    value, report = Cholesky().run(System(KernelMatrix.of(_kernel(), x), noise), normal(2, 20, 3))
    matrix = _kernel()(x).to_dense().detach() + 0.1 * identity(20)
    assert relative(value, torch.linalg.solve(matrix, normal(2, 20, 3))) < 1e-10
    assert report.columns == 6


def test_zero_right_hand_side():
    solution = Cholesky().solve(FullProblem(**_arguments(y=torch.zeros(20, dtype=torch.float64))))
    assert torch.equal(solution.value, torch.zeros(20, dtype=torch.float64))
    assert solution.report.converged


@pytest.mark.parametrize("n", [1, 2])
def test_few_points(n):
    problem = FullProblem(**_arguments(n))
    matrix = dense(_kernel(), problem.x) + 0.1 * identity(n)
    assert relative(Cholesky().solve(problem).value, torch.linalg.solve(matrix, problem.y)) < 1e-13


def test_rounding_of_the_answer_is_reported():
    kernel = set_scales(RBFKernel(), lengthscale=1.0)
    problem = FullProblem(kernel, points(200, dtype=torch.float32), normal(200, dtype=torch.float32), 1e-9)
    with pytest.warns(ConvergenceWarning, match=r"residual \d.*float32 cannot hold the solution.*float64"):
        report = Cholesky().solve(problem).report
    assert not report.converged


def test_indefinite_matrix():
    matrix = with_spectrum(torch.tensor([-1.0, 1.0, 2.0]))
    system = System(DenseLinearOperator(matrix), torch.full((3,), 0.1, dtype=torch.float64))
    with pytest.raises(NumericalError, match="not positive definite in float64"):
        Cholesky().run(system, normal(3, 1))

    rounded = System(DenseLinearOperator(matrix.float()), torch.full((3,), 0.1))
    with pytest.raises(NumericalError, match="entries were rounded to float32; use a float64 model"):
        Cholesky().run(rounded, normal(3, 1).float())


def test_refuses_what_memory_cannot_hold(monkeypatch):
    monkeypatch.setattr("sketchgp.memory.available_memory", lambda device: 1000)
    with pytest.raises(InputError, match=r"Cholesky\(\) for n = \d+ needs .*ConjugateGradients\(\)"):
        Cholesky().solve(FullProblem(**_arguments()))


# --- FullProblem ----------------------------------------------------------------------------------------------


def _with(tensor, value):
    tensor = tensor.clone()
    tensor[3] = value
    return tensor


REFUSED = {
    "x-with-nan": ({"x": _with(points(20), float("nan"))}, "x holds NaN or infinity, first in row 3"),
    "x-with-infinity": ({"x": _with(points(20), float("inf"))}, "x holds NaN or infinity, first in row 3"),
    "y-with-nan": ({"y": _with(normal(20), float("nan"))}, "y holds NaN or infinity, first in row 3"),
    "x-vector": ({"x": normal(20)}, r"x expects shape \(n, d\), got \(20,\)"),
    "x-array": ({"x": points(20).numpy()}, "x expects a tensor of shape"),
    "y-list": ({"y": [1.0] * 20}, r"y expects a tensor of shape \(n,\) or \(n, d\)"),
    "y-three-dimensional": ({"y": normal(20, 2, 2)}, "y expects shape"),
    "y-too-short": ({"y": normal(19)}, r"y expects one row per row of x \(20\), got 19"),
    "y-float32": ({"y": normal(20).float()}, "one dtype and device"),
    "x-integers": ({"x": torch.ones(20, 3, dtype=torch.long)}, "x expects float32 or float64"),
    "x-half": ({"x": points(20).half(), "y": normal(20).half()}, "x expects float32 or float64"),
    "no-points": ({"x": points(0), "y": normal(0)}, "x expects at least one row"),
    "noise-zero": ({"noise": 0.0}, "noise expects positive"),
    "noise-negative": ({"noise": -0.1}, "noise expects positive"),
    "noise-nan": ({"noise": float("nan")}, "noise expects positive"),
    "noise-infinite": ({"noise": float("inf")}, "noise expects positive"),
    "noise-zero-somewhere": ({"noise": _with(torch.ones(20), 0.0)}, "noise expects positive"),
    "noise-length": ({"noise": torch.ones(19)}, r"noise expects a number or a tensor of shape \(20,\)"),
    "noise-matrix": ({"noise": torch.ones(20, 1)}, "noise expects a number or a tensor"),
    "kernel-function": ({"kernel": torch.dot}, "kernel expects a gpytorch kernel"),
}


@each("name", REFUSED)
def test_refuses(name):
    changes, message = REFUSED[name]
    with pytest.raises(InputError, match=message):
        FullProblem(**_arguments(**changes))


def test_refuses_an_unknown_matmul():
    problem = FullProblem(**_arguments())
    names = "'auto', 'dense', 'fused', 'lattice', 'near_and_far', 'tiled', 'triton'"
    with pytest.raises(InputError, match=f"matmul expects one of {names}, got 'sparse'"):
        problem.system("sparse")
    with pytest.raises(InputError, match="matmul expects"):
        ConjugateGradients().solve(problem, matmul="sparse")


def test_accepts_every_form_of_noise():
    expected = Cholesky().solve(FullProblem(**_arguments())).value
    for noise in (0.1, torch.tensor(0.1).double(), torch.tensor([0.1]).double(), torch.full((20,), 0.1).double()):
        problem = FullProblem(**_arguments(noise=noise))
        assert problem.noise_vector.shape == (20,)
        assert problem.noise_vector.dtype == torch.float64
        assert relative(Cholesky().solve(problem).value, expected) < 1e-7


_PAIRS = [(torch.float32, torch.float32), (torch.float64, torch.float32), (torch.float64, torch.float64)]


@pytest.mark.parametrize(
    ("solver", "dtype", "kernel_dtype"),
    [
        *((solver, *pair) for pair in _PAIRS for solver in (ConjugateGradients(tol=1e-5), Cholesky())),
        (Cholesky(), torch.float32, torch.float64),
        pytest.param(ConjugateGradients(tol=1e-5), torch.float32, torch.float64),
    ],
    ids=str,
)
def test_kernel_of_another_dtype_than_the_data(solver, dtype, kernel_dtype):
    """Solved in the dtype of the data, or refused by name; never an error from inside a product."""
    try:
        problem = FullProblem(_kernel(kernel_dtype), points(20, dtype=dtype), normal(20, dtype=dtype), 0.1)
        solution = solver.solve(problem)
    except InputError as error:
        assert "kernel" in str(error) and "dtype" in str(error)
        assert kernel_dtype != dtype
        return
    assert solution.value.dtype == dtype
    matrix = dense(_kernel(), points(20, dtype=dtype).double()) + 0.1 * identity(20)
    assert relative(solution.value, torch.linalg.solve(matrix, normal(20, dtype=dtype).double())) < 1e-3
