"""One matrix of a batch of kernel matrices: what solvers and preconditioners that take one system at a time see."""

from __future__ import annotations

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import (
    ConstantKernel,
    CosineKernel,
    Kernel,
    MaternKernel,
    PeriodicKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
)
from linear_operator import to_dense

import sketchgp
from cases import each
from gp_models import dense, iterative
from problems import normal, points, relative
from sketchgp.errors import InputError, NumericalError
from sketchgp.operators import KernelMatrix
from sketchgp.operators.access import Access, block, element
from sketchgp.operators.generic_tiles import BatchElement

N = 70
BATCH = torch.Size([2])


class Calling(Kernel):
    """A user's kernel, that calls a batch of kernels on some of the features."""

    def __init__(self, batch_shape=BATCH):
        super().__init__(batch_shape=batch_shape)
        self.base = RBFKernel(active_dims=(0, 2), batch_shape=batch_shape)

    def forward(self, x1, x2, diag=False, **params):
        value = self.base(x1, x2, diag=diag, **params)
        return value if diag else to_dense(value)


class Hiding(Kernel):
    """A batch of kernels that does not say so."""

    def __init__(self):
        super().__init__()
        self.register_parameter("weight", torch.nn.Parameter(torch.tensor([0.5, 1.5]).reshape(2, 1, 1)))

    def forward(self, x1, x2, diag=False, **params):
        value = (self.weight * x1) @ x2.mT + 1
        return value.diagonal(dim1=-2, dim2=-1) if diag else value


class Mixing(RBFKernel):
    """Matrices that depend on one another, so that none can be had alone."""

    def forward(self, x1, x2, diag=False, **params):
        mean = x2.mean(dim=0) if x2.dim() > 2 else x2
        return super().forward(x1, x2 - mean.mean(dim=-2), diag=diag, **params)


class Unbatched(RBFKernel):
    """A batch of kernels that gives one matrix too many."""

    def forward(self, x1, x2, diag=False, **params):
        value = super().forward(x1, x2, diag=diag, **params)
        return torch.cat([value, value[:1]])


def scaled(kernel: Kernel, batch: torch.Size = BATCH) -> Kernel:
    """A batch with an output scale, and every parameter drawn at random."""
    kernel = ScaleKernel(kernel, batch_shape=batch).double()
    with torch.no_grad():
        for number, parameter in enumerate(kernel.parameters()):
            parameter.add_(0.5 * normal(*parameter.shape, seed=number))
    return kernel


def some(*dims: int, batch: torch.Size = BATCH) -> dict:
    return {"active_dims": dims, "batch_shape": batch}


KERNELS = {
    "recognised sum": lambda: scaled(RBFKernel(**some(0, 2)) + MaternKernel(**some(1))),
    "recognised, one part without batch": lambda: scaled(
        RQKernel(**some(0, 2)) * PeriodicKernel(active_dims=(1,)) + ConstantKernel(batch_shape=BATCH)
    ),
    "product": lambda: scaled(RBFKernel(**some(0, 2)) * CosineKernel(**some(1))),
    "user's": lambda: scaled(Calling()),
    "batch of batches": lambda: scaled(Calling(torch.Size([3, 2])), torch.Size([3, 2])),
    "batch of inputs alone": lambda: ScaleKernel(Calling(torch.Size())).double(),
    "not said": lambda: Hiding().double(),
}


@each("dtype", [torch.float32, torch.float64])
@each("name", KERNELS)
def test_an_element_is_the_batchs(name, dtype):
    kernel = KERNELS[name]().to(dtype)
    x = points(2 * N, dtype=dtype).reshape(2, N, 3) if name != "recognised sum" else points(N, dtype=dtype)
    x = torch.cat([x, x[..., :2, :]], dim=-2)  # duplicates
    matrix = KernelMatrix.of(kernel, x, engine="tiled")
    whole = to_dense(kernel.double()(x.double()))
    assert matrix.batch_shape == whole.shape[:-2]
    kernel.to(dtype)
    rows, v = torch.tensor([3, 0, N]), normal(N + 2, 2, dtype=dtype)
    for index in torch.ones(matrix.batch_shape).nonzero().tolist():
        part, expected = matrix.element(tuple(index)), whole[tuple(index)]
        tolerance = 1e-12 if dtype == torch.float64 else 3e-6
        assert relative(part.to_dense(), expected) < tolerance
        assert relative(part @ v, expected @ v.double()) < tolerance
        assert relative(part.diagonal(), expected.diagonal()) < tolerance
        assert relative(part.rows(rows) @ v, expected[rows] @ v.double()) < tolerance
        assert relative(part.mT.columns(rows), expected[:, rows]) < tolerance
        exact = Access(element(matrix, tuple(index))) if dtype == torch.float32 else Access(part)
        assert relative(exact.block(rows, rows), expected[rows][:, rows]) < 1e-6


@each("name", KERNELS)
def test_an_element_has_the_gradients_of_the_batch(name):
    """Of several of its blocks at once."""
    kernel = KERNELS[name]()
    x = points(2 * N).reshape(2, N, 3) if name != "recognised sum" else points(N)
    x.requires_grad_()
    matrix, index = KernelMatrix.of(kernel, x, engine="tiled"), torch.tensor([[3, 0, 7], [1, 4, 2]])
    whole, weights = to_dense(kernel(x)), normal(2, 3, 3)
    for place in torch.ones(matrix.batch_shape).nonzero().tolist():
        own = tuple(place)
        found = block(element(matrix, own), index, index)
        expected = whole[own][index.unsqueeze(-1), index.unsqueeze(-2)]
        assert relative(found, expected) < 1e-12
        wanted = [x, *kernel.parameters()]
        pair = ((value * weights).sum() for value in (found, expected))
        gradients = (torch.autograd.grad(value, wanted, retain_graph=True, allow_unused=True) for value in pair)
        for a, b in zip(*gradients, strict=True):
            assert (b is None and a is None) or relative(a, b) < 1e-9


def test_an_element_follows_the_operators_tensors():
    """Not the kernel's own, which the operator may have in another dtype."""
    kernel = KERNELS["user's"]()
    matrix = KernelMatrix.of(kernel, points(N), engine="tiled")
    before = matrix.to_dense()[1]
    with torch.no_grad():
        copies = [p.clone() for p in matrix.parameters]
        copy = matrix.with_parameters(copies)
        kernel.outputscale = 7.0
    assert relative(copy.element((1,)).to_dense(), before) < 1e-14


def test_what_cannot_be_taken_apart_is_refused():
    x = points(2 * N).reshape(2, N, 3)
    kernel = Mixing(batch_shape=BATCH).double()
    kernel.lengthscale = 0.3
    with pytest.raises(NumericalError, match=r"Matrix \(1,\) of a batch of \(2,\) differs.+Mixing depend on one ano"):
        KernelMatrix.of(kernel, x + torch.tensor([0.0, 3.0]).reshape(2, 1, 1), engine="tiled").element((1,))
    with pytest.raises(InputError, match=r"Unbatched gives shape \(3, \d, \d\) where \(2, \d, \d\) is expected"):
        KernelMatrix.of(Unbatched(batch_shape=BATCH).double(), x, engine="tiled").element((1,)).to_dense()


def test_a_wrong_element_is_noticed(monkeypatch):
    """A solve and the check of its residual share the element: it is itself checked against the batch."""
    matrix = KernelMatrix.of(KERNELS["recognised sum"](), points(N), engine="tiled")
    own = BatchElement.own
    monkeypatch.setattr(BatchElement, "own", lambda self, value, trailing: own(self, value.flip(0), trailing))
    with pytest.raises(NumericalError, match="differs, taken by itself"):
        matrix.element((1,))


class Batch(gpytorch.models.ExactGP):
    """Two outputs; the covariance is one kernel's, or the sum of two's."""

    def __init__(self, kernels):
        x, y = points(N), torch.stack([torch.sin(6 * points(N)[:, 0]), points(N)[:, 1:].prod(dim=-1)])
        likelihood = gpytorch.likelihoods.GaussianLikelihood(batch_shape=BATCH).double()
        super().__init__(x.expand(2, N, 3), y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=BATCH).double()
        self.covariances = torch.nn.ModuleList(kernels)
        likelihood.noise = torch.tensor([[0.01], [0.02]])

    def forward(self, x):
        first, *others = (k(x) for k in self.covariances)
        return MultivariateNormal(self.mean_module(x), sum(others, first))


@pytest.mark.parametrize("solver", ["auto", sketchgp.ASkotch(tol=1e-8)], ids=["default", "ASkotch"])
@pytest.mark.parametrize("names", [["user's"], ["recognised sum"], ["product"], ["user's", "recognised sum"]], ids=str)
def test_prediction(names, solver):
    model = Batch([KERNELS[name]() for name in names]).eval()
    test = points(5, seed=3).expand(2, 5, 3)
    with dense(), torch.no_grad():
        expected = model(test)
        mean, variance = expected.mean, expected.variance
    sketchgp.accelerate(model, solver=solver)
    with iterative(), torch.no_grad(), sketchgp.record_solves() as solves:
        found = model(test)
        assert relative(found.mean, mean) < 1e-6
        assert relative(found.variance, variance) < 1e-5
    assert all(report.converged for report in solves)


@each("name", ["user's", "recognised sum", "product"])
def test_one_output_of_a_small_model(name):
    """Up to 800 points the covariance is GPyTorch's, which would index the kernel."""
    model = Batch([KERNELS[name]()])
    with torch.no_grad():
        expected = model(*model.train_inputs).covariance_matrix[1]
        sketchgp.accelerate(model)
        prior = model(*model.train_inputs)
        assert relative(prior[1].covariance_matrix, expected) < 1e-12
        noise = model.likelihood.noise[1] * torch.eye(N)
        assert relative(model.likelihood(prior)[1].covariance_matrix, expected + noise) < 1e-12
