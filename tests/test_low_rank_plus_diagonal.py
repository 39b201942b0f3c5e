"""Matrices plus a diagonal: linear_operator's own cases on the accelerated ``K + noise``, then solves, determinants and
samples of ``LowRankPlusDiagonal`` against dense ones."""

from __future__ import annotations

import unittest

import linear_operator
import pytest
import torch
from linear_operator.operators import DenseLinearOperator, DiagLinearOperator
from linear_operator.test.linear_operator_test_case import LinearOperatorTestCase

from cases import each
from problems import log_determinant, normal, relative
from sketchgp import ConjugateGradients, NumericalError, RPCholesky
from sketchgp.models.accelerated.acceleration import Acceleration
from sketchgp.models.accelerated.added_diag import AcceleratedAddedDiagLinearOperator
from sketchgp.operators import KernelMatrix, LowRankPlusDiagonal
from test_kernel_matrix import check_bilinear_derivative, evaluate, fast, generic, pytestmark, separate  # noqa: F401


class _Accelerated(LinearOperatorTestCase):
    seed = 0
    should_test_sample = True
    should_call_cg = False  # sketchgp's own conjugate gradients, not linear_operator's
    preconditioner = RPCholesky(3)
    kernel = staticmethod(fast)

    def added(self, operator, diagonal):
        choices = Acceleration(self.preconditioner, ConjugateGradients(tol=1e-5), "tiled")
        return AcceleratedAddedDiagLinearOperator(operator, DiagLinearOperator(diagonal), acceleration=choices)

    def create_linear_op(self):
        return self.added(KernelMatrix.of(self.kernel(), separate(6), engine="tiled"), torch.rand(6) + 0.2)

    def evaluate_linear_op(self, linear_op):
        base = linear_op._linear_op
        matrix = base.tensor if isinstance(base, DenseLinearOperator) else evaluate(base)
        return matrix + torch.diag_embed(linear_op._diag_tensor._diag)

    def test_bilinear_derivative(self):
        # as for KernelMatrix: the reference of linear_operator's case is autograd through _matmul
        check_bilinear_derivative(self, self.create_linear_op())

    def test_sqrt_inv_matmul(self):
        # With a preconditioner linear_operator's contour quadrature returns another inverse root than the symmetric
        # one that its case expects: R with R^T A R = I (its own AddedDiagLinearOperator does so too).  Check that.
        operator = self.create_linear_op()
        if operator.batch_shape:
            return
        with linear_operator.settings.max_cg_iterations(200):
            root = linear_operator.sqrt_inv_matmul(operator, torch.eye(operator.size(-1)))
        self.assertAllClose(root.mT @ self.evaluate_linear_op(operator) @ root, torch.eye(operator.size(-1)), atol=1e-3)

    def test_sqrt_inv_matmul_no_lhs(self):
        pass  # see test_sqrt_inv_matmul


class TestAccelerated(_Accelerated, unittest.TestCase):
    pass


class TestAcceleratedBatch(_Accelerated, unittest.TestCase):
    def create_linear_op(self):
        x = separate(5)
        return self.added(KernelMatrix.of(fast(), torch.stack([x, 1.3 * x]), engine="tiled"), torch.rand(2, 5) + 0.2)


# --- LowRankPlusDiagonal against dense matrices ---------------------------------------------------------------


def _make(batch=(), n=60, r=7, noise="vector", dtype=torch.float64):
    factor = normal(*batch, n, r, seed=1)
    diagonal = normal(*batch, n, seed=2).abs() + 0.1 if noise == "vector" else torch.full((*batch, n), 0.3).double()
    operator = LowRankPlusDiagonal(factor, diagonal, out_dtype=dtype)
    return operator, factor @ factor.mT + torch.diag_embed(diagonal)


@each("batch", [(), (3,), (2, 3)])
@each("noise", ["vector", "constant"])
@each("r", [0, 1, 7, 60])
def test_solve_and_determinant(r, noise, batch):
    operator, matrix = _make(batch, r=r, noise=noise)
    rhs = normal(*batch, 60, 4, seed=3)
    assert relative(operator.apply_inverse(rhs), torch.linalg.solve(matrix, rhs)) < 1e-12
    assert relative(operator.log_determinant(), torch.linalg.slogdet(matrix).logabsdet) < 1e-12
    assert relative(operator.to_dense(), matrix) < 1e-13


def test_more_columns_than_are_made_at_once():
    factor, diagonal = normal(560, 530) / 20, normal(560).abs() + 0.5
    operator, rhs = LowRankPlusDiagonal(factor, diagonal), normal(560, 2)
    matrix = factor @ factor.mT + diagonal.diag()
    assert relative(operator.apply_inverse(rhs), torch.linalg.solve(matrix, rhs)) < 1e-10
    assert relative(operator.log_determinant(), torch.logdet(matrix)) < 1e-12


def test_float32_caller_gets_float64_accuracy():
    operator, matrix = _make(dtype=torch.float32)
    assert operator.dtype == torch.float32
    assert operator.log_determinant().dtype == torch.float32
    rhs = normal(60, 2, dtype=torch.float32)
    found = operator.apply_inverse(rhs)
    assert found.dtype == torch.float32
    assert relative(found, torch.linalg.solve(matrix, rhs.double())) < 1e-7


@pytest.mark.parametrize("noise", [1e-10, 1e10])
def test_extreme_noise(noise):
    factor = normal(50, 5, seed=1)
    operator = LowRankPlusDiagonal(factor, torch.full((50,), noise, dtype=torch.float64))
    rhs = normal(50, 2)
    matrix = factor @ factor.mT + noise * torch.eye(50, dtype=torch.float64)
    back = matrix @ operator.apply_inverse(rhs)
    assert relative(back, rhs) < 1e-4  # cond 1e12 times eps
    expected = (torch.linalg.svdvals(factor).square() + noise).log().sum() + 45 * torch.tensor(noise).double().log()
    assert relative(operator.log_determinant(), expected) < 1e-9


def test_samples_have_the_right_covariance():
    operator, matrix = _make(n=6, r=2)
    count = 400_000
    samples = operator.sample(normal(2, count, seed=5), normal(6, count, seed=6))
    assert samples.shape == (6, count)
    assert relative(samples @ samples.mT / count, matrix) < 0.01
    batch, matrices = _make((2,), n=6, r=2)
    draws = batch.sample(normal(2, 2, 100_000, seed=5), normal(2, 6, 100_000, seed=6))
    assert relative(draws @ draws.mT / 100_000, matrices) < 0.03


@pytest.mark.parametrize("batch", [(), (2,)])
def test_gradient_of_the_determinant(batch):
    _, matrix = _make(batch, n=8, r=3)
    factor = normal(*batch, 8, 3, seed=1).requires_grad_(True)
    diagonal = (normal(*batch, 8, seed=2).abs() + 0.1).requires_grad_(True)
    weights = torch.arange(1.0, 1 + matrix.shape[:-2].numel(), dtype=torch.float64).reshape(batch)
    found = torch.autograd.grad((weights * log_determinant(LowRankPlusDiagonal(factor, diagonal))).sum(),
                                [factor, diagonal])  # fmt: skip
    dense_logdet = torch.logdet(factor @ factor.mT + torch.diag_embed(diagonal))
    expected = torch.autograd.grad((weights * dense_logdet).sum(), [factor, diagonal])
    for a, b in zip(found, expected, strict=True):
        assert relative(a, b) < 1e-11


@pytest.mark.parametrize("diagonal", [float("nan"), -5.0])
def test_not_positive_definite(diagonal):
    values = torch.ones(5, dtype=torch.float64)
    values[2] = diagonal
    factor = 10 * torch.ones(5, 2, dtype=torch.float64)
    with pytest.raises(NumericalError, match="not positive definite"):
        LowRankPlusDiagonal(factor, values).capacitance_root()


def test_inverse_of_any_number_of_columns_in_any_order_in_memory():
    """Products with few columns go another way than others."""
    factor, noise = normal(70, 9), normal(70, seed=1).square() + 0.1
    for rows in (factor, factor.mT.contiguous().mT):
        operator = LowRankPlusDiagonal(rows, noise)
        for count in (1, 2, 3, 4, 11, 65):
            for vectors in (normal(70, count, seed=2), normal(count, 70, seed=3).mT):
                expected = torch.linalg.solve(operator.to_dense(), vectors)
                assert relative(operator.apply_inverse(vectors), expected) < 1e-12
