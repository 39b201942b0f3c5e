"""Tiles that are nought to rounding are left out: the products stay what they are, and less is evaluated."""

from __future__ import annotations

import pytest
import torch
from gpytorch.kernels import ConstantKernel, Kernel, MaternKernel, RBFKernel, RQKernel, ScaleKernel

from problems import relative
from sketchgp.operators import KernelMatrix
from sketchgp.operators.fast_tiles import FastTiles

N, M = 3000, 2800  # no multiples of anything


@pytest.fixture(autouse=True)
def _from_fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sketchgp.operators.nearby._LEAST", 2048)


def places(n: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Of a map with a third input, in no order: some copies, a cluster, one far from all others."""
    x = torch.rand(n, 3, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    x[: n // 10] = x[n // 10 : 2 * (n // 10)]
    x[-200:] = 0.5 + 1e-3 * x[-200:]
    x[7] = 9.0
    return x


def short(kernel: Kernel, scale: float) -> Kernel:
    """The kernel with lengthscales of a map, and a long one of the third input."""
    kernel.lengthscale = scale * torch.tensor([1.0, 1.2, 200.0])
    return kernel


def matern(nu: float = 1.5, scale: float = 0.004) -> Kernel:
    return short(MaternKernel(nu=nu, ard_num_dims=3), scale)


def rbf() -> Kernel:
    return short(RBFKernel(ard_num_dims=3), 0.01)


KERNELS = {
    "matern12": lambda: ScaleKernel(matern(0.5)),
    "matern32": lambda: ScaleKernel(matern()),
    "matern52": lambda: ScaleKernel(matern(2.5)),
    "rbf": rbf,
    "sum": lambda: ScaleKernel(matern()) + ScaleKernel(rbf()),
    "product": lambda: ScaleKernel(rbf() * RQKernel()),  # the second one alone never comes to nought
}


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many each tile has."""
    found: list[int] = []
    plain = FastTiles.distance

    def distance(self: FastTiles, atom: int, rows: slice, columns: slice) -> torch.Tensor:
        if atom == 0:
            found.append((rows.stop - rows.start) * (columns.stop - columns.start))
        return plain(self, atom, rows, columns)

    monkeypatch.setattr(FastTiles, "distance", distance)
    return found


def test_products_and_gradients_by_the_tiles_that_matter(entries: list[int]) -> None:
    """Against the whole matrix in float64, of one set of points and of two."""
    for number, (name, make) in enumerate(KERNELS.items()):
        dtype, square = (torch.float32, torch.float64)[number % 2], number % 3 > 0
        x, z = places(N, dtype=dtype), places(M, 1, dtype)
        weights = [torch.randn(n, 3, dtype=dtype) for n in (N if square else M, N)]
        found = []
        for exact in (False, True):
            left, right, a, b = (t.double() if exact else t for t in (*weights, x, z))
            a, b = a.requires_grad_(), b.requires_grad_()
            kernel = make().to(a.dtype)
            matrix = KernelMatrix.of(kernel, a, engine="tiled") if square else KernelMatrix.of(kernel, b, a)
            entries.clear()
            product = (matrix.to_dense() if exact else matrix) @ right
            if not exact:
                assert sum(entries) < 0.7 * (0.5 if square else 1) * len(left) * N, name
            tensors = [a, *([] if square else [b]), *kernel.parameters()]
            found.append([product, *torch.autograd.grad((left * product).sum(), tensors)])
        tolerance = 1e-5 if dtype == torch.float32 else 1e-11
        for one, other in zip(*found, strict=True):
            assert relative(one.detach().double(), other.detach()) < tolerance, name
            tolerance = 5e-4 if dtype == torch.float32 else 1e-9


@pytest.mark.parametrize("change", ["lengthscale", "inputs"])
def test_what_changes_in_place_is_noticed(entries: list[int], change: str) -> None:
    x, right = places(N), torch.randn(N, 2, dtype=torch.float64)
    kernel = matern().double()
    matrix = KernelMatrix.of(kernel, x, engine="tiled")
    matrix._matmul(right)  # of one operator, which `@` would make anew
    with torch.no_grad():
        if change == "lengthscale":
            kernel.lengthscale = 100 * kernel.lengthscale
        else:
            x *= 0.01
    entries.clear()
    found = matrix._matmul(right)
    assert sum(entries) >= N * N / 2
    assert relative(found, matrix.to_dense() @ right) < 1e-12


@pytest.mark.parametrize("inference", [False, True])
def test_inputs_may_want_gradients_after_a_product(inference: bool) -> None:
    x, right = places(N), torch.randn(N, 1, dtype=torch.float64)
    matrix = KernelMatrix.of(matern().double(), x, engine="tiled")
    with torch.inference_mode(inference), torch.no_grad():
        matrix @ right
    x.requires_grad_()
    found, expected = (torch.autograd.grad((m @ right).square().sum(), x)[0] for m in (matrix, matrix.to_dense()))
    assert relative(found, expected) < 1e-9


@pytest.mark.parametrize(
    "kernel", [RQKernel(), matern(scale=0.5), matern() + ConstantKernel()], ids=["rq", "long", "sum"]
)
def test_where_nothing_is_nought_nothing_is_left_out(entries: list[int], kernel: Kernel) -> None:
    x, right = places(N), torch.randn(N, 2, dtype=torch.float64)
    kernel = kernel.double()
    KernelMatrix.of(kernel, x, engine="tiled") @ right
    assert sum(entries) >= N * N / 2


def test_tiles_smaller_than_what_lies_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after running out of memory."""
    x, right = places(N), torch.randn(N, 2, dtype=torch.float64)
    matrix = KernelMatrix.of(matern(scale=0.002).double(), x, engine="tiled")
    whole = matrix @ right
    monkeypatch.setattr("sketchgp.operators.tiles._shrunk", {x.device: 5})
    small = KernelMatrix.of(matern(scale=0.002).double(), x, engine="tiled") @ right
    assert relative(small, whole) < 1e-11


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_row_is_not_left_out(value: float) -> None:
    x, right = places(N), torch.randn(N, 1, dtype=torch.float64)
    x[5, 0] = value
    found = KernelMatrix.of(matern().double(), x, engine="tiled") @ right
    assert not torch.isfinite(found[5]).all()
