"""Ways to use a kernel matrix that are easily forgotten: GPyTorch's setters, frozen parts, settings, empty batches."""

from __future__ import annotations

import gpytorch
import pytest
import torch
from gpytorch.kernels import Kernel, MaternKernel, RBFKernel, ScaleKernel

import sketchgp
from cases import each
from problems import log_determinant, normal, points, relative
from sketchgp import Nystrom, RPCholesky
from sketchgp.operators import KernelMatrix, MovingPlusDiagonal
from sketchgp.operators.tiles import thin_product
from sketchgp.preconditioners import PreconditionerCache

N = 60


def _kernel(dtype: torch.dtype = torch.float64) -> ScaleKernel:
    return ScaleKernel(RBFKernel()).to(dtype)


@pytest.mark.parametrize("engine", ["dense", "tiled"])
def test_a_parameter_set_by_gpytorch_is_seen(engine):
    """GPyTorch's setters write through ``.data``, which leaves the version of the parameter as it was."""
    kernel, x, v = _kernel(), points(N), normal(N, 2)
    matrix = KernelMatrix.of(kernel, x, engine=engine)
    before = matrix.detach() @ v
    kept = matrix @ v
    kernel.base_kernel.lengthscale = 0.1
    after = matrix @ v
    assert relative(before, kept) < 1e-14
    assert relative(after, kernel(x).to_dense() @ v) < 1e-12


def test_a_stored_matrix_is_made_once():
    """By products that nobody differentiates; where somebody does, the answer is the same."""
    calls = []

    class Counted(Kernel):
        def forward(self, x1, x2, diag=False, **options):
            calls.append(len(x1))
            return RBFKernel().to(x1.dtype)(x1, x2, diag=diag).to_dense()

    x, v = points(N), normal(N, 2)
    matrix = KernelMatrix.of(Counted(), x, engine="dense")
    first, made = matrix @ v, len(calls)
    assert relative(matrix @ v, first) < 1e-14
    assert len(calls) == made
    assert relative(matrix @ v.clone().requires_grad_(), first) < 1e-14


@each("dtype", [torch.float32, torch.float64])
@each("rows", [1, 512, 1300])
def test_thin_products(rows, dtype):
    """Of matrices by rows, by columns and of every second column, with few columns and with many."""
    by_rows, by_columns = normal(rows, 90).to(dtype), normal(90, rows).to(dtype).mT
    for matrix in (by_rows, by_columns, normal(rows, 180).to(dtype)[:, ::2]):
        for t in (1, 2, 5, 64, 65):
            vectors = normal(90, t, seed=t).to(dtype)
            for one in (vectors, vectors.mT.contiguous().mT):
                found = thin_product(matrix, one)
                assert relative(found.double(), matrix.double() @ one.double()) < 100 * torch.finfo(dtype).eps
                assert found.dtype == dtype


@pytest.mark.parametrize("engine", ["dense", "tiled"])
def test_inference_mode(engine):
    kernel, x, v = _kernel(), points(N), normal(N, 2)
    expected = kernel(x).to_dense() @ v
    with torch.inference_mode():
        matrix = KernelMatrix.of(kernel, x.clone(), engine=engine)
        assert relative(matrix @ v, expected) < 1e-12


def test_prediction_in_inference_mode():
    x = points(900)
    model = _Model(x, torch.sin(3 * x.sum(dim=1)))
    sketchgp.accelerate(model.eval(), matmul="tiled")
    test = points(20, seed=5)
    with torch.no_grad():
        expected = model(test).mean
    with torch.inference_mode():
        assert relative(model(test).mean, expected) < 1e-8


@each("precision", ["high", "medium"])
@each("d", [3, 8])
def test_distances_do_not_follow_torchs_reduced_precision(precision, d):
    kernel, x, z = _kernel(torch.float32), points(300, d, dtype=torch.float32), points(200, d, 1, dtype=torch.float32)
    expected = KernelMatrix.of(kernel, x, z, engine="tiled").detach().to_dense()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        found = KernelMatrix.of(kernel, x, z, engine="tiled").detach().to_dense()
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)
    assert relative(found, expected) < 1e-7


class Private(Kernel):
    """Depends on a tensor that is no parameter."""

    def __init__(self, slope):
        super().__init__()
        self._slope = slope

    def forward(self, x1, x2, diag=False, **params):
        value = self._slope * x1 @ x2.mT
        return value.diagonal(dim1=-2, dim2=-1) if diag else value


def test_gradients_reach_private_tensors_of_a_kernel():
    x, v, slope = points(N), normal(N), torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    matrix = KernelMatrix.of(Private(slope), x, engine="tiled")
    (gradient,) = torch.autograd.grad((v * (matrix @ v)).sum(), slope)
    assert relative(gradient, (x.mT @ v).square().sum()) < 1e-12


class Stubborn(Kernel):
    """Ignores ``diag``, as kernels of users do."""

    is_stationary = False

    def forward(self, x1, x2, diag=False, **params):
        return 1 + x1 @ x2.mT


@each("n", [1, 2, 3, 700])
def test_diagonal_of_a_kernel_that_gives_none(n):
    x = points(n)
    matrix = KernelMatrix.of(Stubborn(), x, engine="tiled")
    assert relative(matrix.diagonal(), 1 + x.square().sum(dim=1)) < 1e-14


def test_diagonal_of_a_batch_of_two_kernels():
    kernel = ScaleKernel(RBFKernel(batch_shape=torch.Size([2])), batch_shape=torch.Size([2])).double()
    kernel.outputscale = torch.tensor([0.5, 2.0], dtype=torch.float64)
    diagonal = KernelMatrix.of(kernel, points(2), engine="tiled").diagonal(dim1=-2, dim2=-1)
    assert torch.allclose(diagonal, torch.tensor([[0.5, 0.5], [2.0, 2.0]], dtype=torch.float64))


@pytest.mark.parametrize(("n", "d"), [(0, 3), (5, 0)])
def test_empty_batches(n, d):
    kernel = ScaleKernel(RBFKernel(batch_shape=torch.Size([2])), batch_shape=torch.Size([2])).double()
    x, z = torch.zeros(2, n, d, dtype=torch.float64), torch.zeros(2, 4, d, dtype=torch.float64)
    matrix = KernelMatrix(
        x, z, *kernel.parameters(), kernel=kernel, names=tuple(n for n, _ in kernel.named_parameters())
    )
    assert (matrix.detach() @ torch.ones(2, 4, 3, dtype=torch.float64)).shape == (2, n, 3)
    assert matrix.detach().to_dense().shape == (2, n, 4)


def test_a_row_of_nan_spoils_no_other_row():
    kernel = MaternKernel(nu=0.5).double()
    x = points(80, d=5).repeat(2, 1)
    expected = KernelMatrix.of(kernel, x, engine="tiled").detach().to_dense()
    x[7] = float("nan")
    found = KernelMatrix.of(kernel, x, engine="tiled").detach().to_dense()
    keep = torch.arange(160) != 7
    assert relative(found[keep][:, keep], expected[keep][:, keep]) < 1e-12
    assert bool(found[7, keep].isnan().all())


def test_gradient_of_a_repeated_batch():
    """Inputs expanded without copies: one matrix, differentiated once."""
    kernel, x = _kernel(), points(N).requires_grad_(True)
    left, right = normal(4, N, 2), normal(4, N, 2, seed=1)
    (left * (KernelMatrix.of(kernel, x.expand(4, N, 3), engine="tiled") @ right)).sum().backward()
    found = [x.grad, *(p.grad for p in kernel.parameters())]
    other, z = _kernel(), points(N).requires_grad_(True)
    (left * (other(z).to_dense() @ right)).sum().backward()
    for a, b in zip(found, [z.grad, *(p.grad for p in other.parameters())], strict=True):
        assert relative(a, b) < 1e-10


@pytest.mark.parametrize("choice", [RPCholesky(8), Nystrom(8)])
def test_gradient_of_the_noise_under_a_frozen_kernel(choice):
    kernel, x = _kernel().requires_grad_(False), points(N)
    noise = torch.linspace(0.1, 0.3, N, dtype=torch.float64).requires_grad_(True)
    built = PreconditionerCache(choice).get(KernelMatrix.of(kernel, x), noise, differentiable=True)
    log_determinant(built).backward()
    assert relative(noise.grad, torch.linalg.inv(built.to_dense()).diagonal()) < 1e-10


def test_gradient_of_the_noise_at_rank_zero():
    """Noise beside which the kernel is nothing: the automatic rank is 0."""
    kernel, x = _kernel(), points(N)
    kernel.outputscale = 1e-3
    noise = torch.full((N,), 10.0, dtype=torch.float64).requires_grad_(True)
    built = PreconditionerCache(RPCholesky()).get(KernelMatrix.of(kernel, x), noise, differentiable=True)
    assert built.rank == 0
    log_determinant(built).backward()
    assert relative(noise.grad, 1 / noise) < 1e-14


def test_a_batch_of_noises_over_one_matrix():
    kernel, x = _kernel(), points(N)
    noise = torch.stack([torch.full((N,), 0.1), torch.full((N,), 0.4)]).double().requires_grad_(True)
    built = PreconditionerCache(RPCholesky(8)).get(KernelMatrix.of(kernel, x), noise, differentiable=True)
    assert not isinstance(built, MovingPlusDiagonal)
    log_determinant(built).sum().backward()
    expected = torch.linalg.inv(built.to_dense().detach()).diagonal(dim1=-2, dim2=-1)
    assert relative(noise.grad, expected) < 1e-10


class _Model(gpytorch.models.ExactGP):
    def __init__(self, x, y):
        super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = _kernel()
        self.likelihood.noise = 0.05
        self.double()

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
