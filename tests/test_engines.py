"""Which engine computes, what it says when it cannot, and what happens without memory."""

from __future__ import annotations

import copy
import logging

import gpytorch
import pytest
import torch
from gpytorch.kernels import (
    ConstantKernel,
    CosineKernel,
    MaternKernel,
    PeriodicKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import sketchgp
from cases import each, pairwise
from gp_models import Plain, data, dense, gradient_error, marginal, posterior, rbf
from problems import normal, points, relative
from sketchgp import InputError, LaplaceKernel, NumericalError, settings
from sketchgp.models.accelerated.mixins import is_accelerated
from sketchgp.operators import KernelMatrix, tiles
from sketchgp.operators.access import AccurateProduct
from sketchgp.operators.engines import DENSE, ENGINES, NAMED, TILED, TRITON, choose
from sketchgp.operators.engines import tiled as tiled_module
from sketchgp.operators.tall import TallMatrix
from test_fast_tiles import make, reference, spread

# --- which engine -----------------------------------------------------------------------------------------------


def test_auto_stores_a_square_matrix_that_fits():
    kernel, x = make("sum"), points(50)
    square, right = KernelMatrix.of(kernel, x), KernelMatrix.of(kernel, x, x.clone())
    with settings.memory_budget(50 * 50 * 8):
        assert choose(square.pairs) is DENSE
        assert choose(KernelMatrix.of(make("sum").float(), points(70, dtype=torch.float32)).pairs) is DENSE
        assert choose(right.pairs) is TILED  # each of its products is the only one
    with settings.memory_budget(50 * 50 * 8 - 1):
        assert choose(square.pairs) is TILED
        assert choose(KernelMatrix.of(kernel, x.expand(2, 50, 3)).pairs) is TILED
    assert choose(KernelMatrix.from_lazy(kernel(x, x.clone())).pairs) is DENSE  # equal inputs are the same points


def test_a_stored_matrix_stays_in_use(monkeypatch):
    """It takes free memory itself, which must not make the next product fall back to tiles."""
    operator = KernelMatrix.of(make("rbf"), points(50)).detach()
    monkeypatch.setattr(settings, "available_memory", lambda device: 4 * 50 * 50 * 8)
    operator._matmul(normal(50, 1))
    monkeypatch.setattr(settings, "available_memory", lambda device: 3 * 50 * 50 * 8)
    assert choose(operator.pairs) is DENSE
    assert choose(KernelMatrix.of(make("rbf"), points(50)).pairs) is TILED


def test_named_engines_are_taken():
    x = points(10)
    assert choose(KernelMatrix.of(make("rbf"), x, engine="dense").pairs) is DENSE
    assert choose(KernelMatrix.of(make("rbf"), x, x.clone(), engine="dense").pairs) is DENSE
    with settings.memory_budget(1):
        assert choose(KernelMatrix.of(make("rbf"), x, engine="dense").pairs) is DENSE
    assert choose(KernelMatrix.of(make("rbf"), x, engine="tiled").pairs) is TILED


def test_a_variant_that_a_named_engine_cannot_take_goes_by_tiles():
    """Whatever the products are made with, residuals are computed in float64."""
    kernel, x = make("multiplied-out").float(), points(40, dtype=torch.float32)
    options = {"kernel": kernel, "names": tuple(n for n, _ in kernel.named_parameters()), "same": True}
    wanted = reference(copy.deepcopy(kernel).double(), x, x)
    assert set(ENGINES) == {"auto", *NAMED}
    for engine in ENGINES:
        operator = KernelMatrix(x, x, *kernel.parameters(), engine=engine, **options).detach()
        assert relative(AccurateProduct(operator)(normal(40, 2)), wanted @ normal(40, 2)) < 1e-12
    triton = KernelMatrix(x, x, *kernel.parameters(), engine="triton", **options)
    assert TRITON.missing(triton.type(torch.float64).pairs) is not None
    assert choose(triton.type(torch.float64).pairs) is TILED


def test_stored_and_tiled_agree_for_every_kernel():
    for name in ("sum", "product", "laplace-ard", "constant", "periodic", "rq-squared"):
        kernel, x = make(name), points(60)
        for right in (None, points(30, seed=9)):
            rhs = normal(60 if right is None else 30, 3)
            stored, tiled = (KernelMatrix.of(kernel, x, right, engine=e).detach() for e in ("dense", "tiled"))
            assert relative(stored._matmul(rhs), tiled._matmul(rhs)) < 1e-13


def test_a_stored_matrix_follows_its_parameters():
    kernel, x = make("sum"), points(20)
    operator = KernelMatrix.of(kernel, x, engine="dense")
    operator._matmul(normal(20, 1))
    with torch.no_grad():
        for change in (lambda: kernel.kernels[0].raw_outputscale.add_(1.0), lambda: x.mul_(2.0)):
            change()
            wanted = reference(kernel, x, x)
            assert relative(operator._matmul(normal(20, 1)), wanted @ normal(20, 1)) < 1e-13
            assert relative(operator.columns(torch.arange(3)), wanted[:, :3]) < 1e-13


# --- what is refused --------------------------------------------------------------------------------------------


@each(
    ("options", "message"),
    [
        (
            {"engine": "sparse"},
            "one of 'auto', 'dense', 'fused', 'lattice', 'near_and_far', 'tiled', 'triton', got 'sparse'",
        ),
        ({"precision": "half"}, "precision expects 'float32' or 'tf32', got 'half'"),
        ({"precision": "tf32"}, "precision='tf32' needs engine='triton'; engine='auto' has 'float32' only"),
        ({"engine": "dense", "precision": "tf32"}, "needs engine='triton'; engine='dense'"),
    ],
)
def test_unknown_choices(options, message):
    with pytest.raises(InputError, match=message):
        KernelMatrix.of(RBFKernel(), points(3, dtype=torch.float32), **options)
    model = rbf()[0].double()
    classes = type(model), type(model.likelihood)
    renamed = {{"engine": "matmul", "precision": "matmul_precision"}[key]: value for key, value in options.items()}
    with pytest.raises(InputError, match=r"matmul|precision"):
        sketchgp.accelerate(model, **renamed)
    assert (type(model), type(model.likelihood)) == classes
    assert not any(name.startswith("_sketchgp") for name in (*model.__dict__, *model.likelihood.__dict__))


def test_an_engine_that_cannot_be_used_says_why():
    with pytest.raises(InputError, match=r"matmul='triton' cannot be used here: .+\. Use matmul='auto'\."):
        KernelMatrix.of(RBFKernel().double(), points(3), engine="triton")


def test_a_model_whose_engine_cannot_be_used_can_be_given_another(monkeypatch):
    monkeypatch.setattr(type(TRITON), "absent", lambda self, device, dtype: None)
    x, y, _ = data(60)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = Plain(x, y, likelihood, ScaleKernel(CosineKernel())).double()
    sketchgp.accelerate(model, matmul="triton")
    with (
        gpytorch.settings.max_cholesky_size(20),
        pytest.raises(InputError, match="matmul='triton' cannot be used"),
    ):
        model(x)
    assert is_accelerated(sketchgp.accelerate(model, matmul="tiled"))
    with gpytorch.settings.max_cholesky_size(20):
        assert isinstance(model(x).lazy_covariance_matrix, KernelMatrix)


@pytest.mark.parametrize("name", ["rbf", "sum", "cosine"])
def test_right_hand_sides_that_do_not_fit(name):
    kernel = CosineKernel() if name == "cosine" else make(name).float()
    for engine in ("tiled", "dense"):
        operator = KernelMatrix.of(kernel, points(10, dtype=torch.float32), engine=engine)
        for wrong in (normal(10, 2), torch.ones(10, 2, dtype=torch.long), torch.ones(10, 2, dtype=torch.bfloat16)):
            with pytest.raises(InputError, match=rf"float32 on cpu is multiplied by {wrong.dtype}.*convert one"):
                operator @ wrong
        with pytest.raises(InputError, match="on meta; convert one"):
            operator @ torch.ones(10, 2, device="meta")
        for wrong in (normal(9, 2, dtype=torch.float32), normal(11, dtype=torch.float32)):
            for recorded in (True, False):
                with torch.set_grad_enabled(recorded), pytest.raises(RuntimeError, match="Incompatible dimensions"):
                    operator @ wrong
            with pytest.raises(InputError, match="rows"):
                operator._matmul(wrong)


def test_inputs_that_do_not_fit():
    x = points(10, dtype=torch.float32)
    with pytest.raises(InputError, match="at least one point"):
        KernelMatrix.of(RBFKernel(), x[:0])
    with pytest.raises(InputError, match="at least one point"):
        KernelMatrix.of(RBFKernel(), x, x[:0])
    for kernel in (RBFKernel(ard_num_dims=2), LaplaceKernel(ard_num_dims=2), RQKernel(ard_num_dims=4)):
        with pytest.raises(InputError, match=f"expects inputs with {kernel.ard_num_dims} columns"):
            KernelMatrix.of(kernel, x)
    with pytest.raises(InputError, match="x1 and x2 expect one dtype, device and number of features"):
        KernelMatrix.of(RBFKernel(), x, points(4, 2, dtype=torch.float32))


def test_a_nan_in_training_inputs_is_refused():
    x, y, _ = data(60)
    x[3, 1] = float("nan")
    with pytest.raises(InputError, match="NaN"):
        sketchgp.accelerate(
            Plain(x, y, gpytorch.likelihoods.GaussianLikelihood(), ScaleKernel(LaplaceKernel())).double()
        )


@pytest.mark.parametrize("matmul", ["tiled", "dense"])
def test_a_nan_in_a_test_input_is_a_nan_in_its_prediction_alone(matmul):
    model, (xt,) = rbf()
    model = sketchgp.accelerate(model.double(), matmul=matmul)
    bad = xt.clone()
    bad[2, 0] = float("nan")
    model.eval()
    with torch.no_grad(), gpytorch.settings.max_cholesky_size(20):
        with gpytorch.settings.skip_posterior_variances(True):
            wanted, found = model(xt).mean, model(bad).mean
        with pytest.raises(NumericalError, match="NaN"):  # variances are solves
            model(bad).variance  # noqa: B018
    assert found.isnan().nonzero().flatten().tolist() == [2]
    keep = [i for i in range(len(xt)) if i != 2]
    assert relative(found[keep], wanted[keep]) < 1e-10


# --- half precision ---------------------------------------------------------------------------------------------

HALF = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize(
    ("name", "dtype", "engine"),
    pairwise(
        ["rbf-ard", "matern12", "rq", "periodic", "laplace-ard", "multiplied-out", "cosine"], HALF, ["dense", "tiled"]
    ),
)
def test_inputs_in_half_precision(name, dtype, engine):
    """They are stored so; everything is computed in float32, the dtype of the parameters."""
    kernel = ScaleKernel(CosineKernel()) if name == "cosine" else make(name).float()
    x, z, left = points(60, dtype=dtype), points(30, seed=9, dtype=dtype), normal(60, 2, dtype=torch.float32)
    for right in (None, z):
        operator = KernelMatrix.of(kernel, x, right, engine=engine)
        exact = KernelMatrix.of(kernel, x.float(), None if right is None else right.float(), engine=engine)
        rhs = normal(60 if right is None else 30, 2, dtype=torch.float32)
        assert operator.dtype == operator.to_dense().dtype == (operator @ rhs).dtype == torch.float32
        assert operator.x1.dtype == dtype
        assert relative(operator @ rhs, exact @ rhs) < 1e-6
        assert relative(operator.columns(torch.arange(3)), exact.columns(torch.arange(3))) < 1e-6
        found, wanted = (
            torch.autograd.grad((left * (o @ rhs)).sum(), list(kernel.parameters())) for o in (operator, exact)
        )
        for a, b in zip(found, wanted, strict=True):
            assert a.dtype == torch.float32
            assert relative(a, b) < 1e-5
    x.requires_grad_(True)
    (gradient,) = torch.autograd.grad((left * (KernelMatrix.of(kernel, x, engine=engine) @ left)).sum(), x)
    assert gradient.dtype == dtype
    full = x.detach().float().requires_grad_(True)
    (wanted,) = torch.autograd.grad((left * (KernelMatrix.of(kernel, full, engine=engine) @ left)).sum(), full)
    assert relative(gradient, wanted) < torch.finfo(dtype).eps


@each("engine", ["auto", "dense", "tiled"])
@each("name", ["rbf-ard", "matern12", "rq", "laplace", "sum", "cosine"])
def test_a_whole_operator_in_half_precision(name, engine):
    """Inputs and parameters are rounded, the arithmetic is still float32."""
    kernel = ScaleKernel(CosineKernel()) if name == "cosine" else make(name).float()
    x = points(60, dtype=torch.float32)
    for dtype in HALF:
        operator = KernelMatrix.of(kernel, x, engine=engine).to(dtype)
        rhs = normal(60, 2, dtype=dtype)
        product = operator @ rhs
        assert operator.dtype == product.dtype == operator.to_dense().dtype == dtype
        rounded = copy.deepcopy(kernel)
        for parameter in rounded.parameters():
            parameter.data = parameter.data.to(dtype).float()
        exact = KernelMatrix.of(rounded, x.to(dtype).float(), engine="tiled") @ rhs.float()
        assert relative(product, exact) < torch.finfo(dtype).eps  # of the result
        everything = KernelMatrix.of(rounded, x.to(dtype).float(), engine="tiled").to_dense()
        assert relative(TILED.dense(operator.pairs), everything) < 1e-6  # before it is rounded
    half = KernelMatrix.of(kernel, x, engine=engine).half()
    assert half.dtype == torch.float16
    assert relative(half @ normal(60, 2, dtype=torch.float16), operator.float() @ normal(60, 2).float()) < 0.05
    assert all(parameter.dtype == torch.float32 for parameter in kernel.parameters())


# --- models -----------------------------------------------------------------------------------------------------

MODELS = {
    "laplace": lambda: ScaleKernel(LaplaceKernel(ard_num_dims=2)),
    "rational-quadratic": lambda: ScaleKernel(RQKernel()),
    "sum": lambda: ScaleKernel(RBFKernel(ard_num_dims=2)) + ScaleKernel(MaternKernel(nu=0.5)) + ConstantKernel(),
    "product": lambda: ScaleKernel(RBFKernel(active_dims=(1,)) * PeriodicKernel(active_dims=(0,))),
}


def _model(name: str, n: int) -> tuple[Plain, torch.Tensor]:
    x, y, xt = data(n)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    likelihood.noise = 0.1
    return Plain(x, y, likelihood, spread(MODELS[name]())).double(), xt


@pytest.mark.parametrize(("name", "matmul"), [*((name, "tiled") for name in MODELS), (next(iter(MODELS)), "dense")])
def test_prediction_and_training_with_more_points_than_gpytorch_factorizes(name, matmul):
    model, xt = _model(name, 850)
    with dense():
        mean, variance = posterior(model, (xt,))
        value, gradient = marginal(_model(name, 850)[0])
    model = sketchgp.accelerate(_model(name, 850)[0], matmul=matmul)
    solver = sketchgp.ConjugateGradients(tol=1e-8)
    predicting = sketchgp.accelerate(_model(name, 850)[0], matmul=matmul, solver=solver)
    found_mean, found_variance = posterior(predicting, (xt,))
    assert relative(found_mean, mean) < 1e-6
    assert relative(found_variance, variance) < 1e-3
    torch.manual_seed(0)
    with gpytorch.settings.num_trace_samples(20):
        found, found_gradient = marginal(model)
    assert abs(float(found - value)) < 0.02
    assert gradient_error(found_gradient, gradient) < 0.1  # an estimate


# --- without memory ---------------------------------------------------------------------------------------------

ERRORS = {
    "cuda": lambda: torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "cpu": lambda: RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"),
    "windows": lambda: RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 9"),
    "python": lambda: MemoryError(),
}


class Limited(TorchDispatchMode):
    """Every new tensor of more than ``entries`` fails to be allocated.

    :param matrices: whether one of two dimensions made by ``torch.empty``, a result, may be larger.
    """

    def __init__(self, entries: int, error=ERRORS["cpu"], matrices: bool = True) -> None:
        super().__init__()
        self.entries, self.error, self.matrices, self.refused = entries, error, matrices, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        before = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if torch.is_tensor(t)}
        for t in tree_leaves(result):
            if not torch.is_tensor(t) or t.untyped_storage().data_ptr() in before or t.numel() <= self.entries:
                continue
            if self.matrices and function is torch.ops.aten.empty.memory_format and t.dim() == 2:
                continue
            self.refused += 1
            raise self.error()
        return result


@pytest.fixture
def tiles_restored():
    tiles._shrunk.clear()
    yield
    tiles._shrunk.clear()


N = 200
GOES_ON = ["rbf-ard", "matern12-ard", "multiplied-out", "laplace", "cosine"]


def _operator(name: str, engine: str = "tiled", right: bool = False) -> KernelMatrix:
    kernel = ScaleKernel(CosineKernel()).double() if name == "cosine" else make(name)
    return KernelMatrix.of(kernel, points(N), points(N + 1, seed=9) if right else None, engine=engine)


@pytest.mark.parametrize(("name", "error"), [("multiplied-out", "cpu"), *(("rbf-ard", e) for e in ERRORS)])
def test_tiles_shrink_until_they_fit(name, error, tiles_restored, caplog):
    results = {
        "product": lambda o: o._matmul(normal(o.shape[-1], 2)),
        "dense": lambda o: o.to_dense().detach(),
        "columns": lambda o: o.columns(torch.arange(150)).detach(),
        "derivative": lambda o: torch.cat(
            [g.flatten() for g in o._bilinear_derivative(normal(N, 2), normal(o.shape[-1], 2)) if g is not None]
        ),
    }
    for (what, compute), right in zip(results.items(), (False, True, True, False), strict=True):
        wanted = compute(_operator(name, right=right))
        tiles._shrunk.clear()
        caplog.clear()
        with caplog.at_level(logging.WARNING, "sketchgp"), Limited(5000, ERRORS[error]) as limited:
            found = compute(_operator(name, right=right))
            again = compute(_operator(name, right=right))
        assert limited.refused, what
        assert relative(found, wanted) < 1e-12, what
        assert relative(again, wanted) < 1e-12, what
        assert len(caplog.records) == limited.refused  # the second one starts where the first one ended
        assert all("Out of memory with tiles of" in record.getMessage() for record in caplog.records)
        assert all(record.name == "sketchgp" for record in caplog.records)
        assert next(iter(tiles._shrunk.values())) == 2 * limited.refused


def test_a_matrix_that_cannot_be_stored_is_computed_by_tiles(tiles_restored, caplog):
    wanted = _operator("sum")._matmul(normal(N, 2))
    operator = _operator("sum", "dense").detach()
    before = tiles.tile_shape(N, N, torch.float64, torch.device("cpu"))
    with caplog.at_level(logging.WARNING, "sketchgp"), Limited(N * N - 1, matrices=False):
        tiles._shrunk[torch.device("cpu")] = 4  # so that a tile does fit
        found = [operator._matmul(normal(N, 2)) for _ in range(3)]
    assert all(relative(value, wanted) < 1e-12 for value in found)
    assert [record.getMessage() for record in caplog.records] == [
        "No memory for the kernel matrix (0.0 GiB) on cpu; going on by tiles"
    ]  # once, and it is not tried again
    assert tiles._shrunk == {torch.device("cpu"): 4}  # that a matrix does not fit says nothing about tiles
    tiles._shrunk.clear()
    assert tiles.tile_shape(N, N, torch.float64, torch.device("cpu")) == before


def test_a_result_that_does_not_fit_is_an_error(tiles_restored):
    """Smaller tiles would not help, and the next product must not be left with tiles of one entry."""
    operator = _operator("rbf-ard")
    with Limited(N * N - 1, matrices=False), pytest.raises(RuntimeError, match="can't allocate memory"):
        operator.to_dense()
    assert not tiles._shrunk
    with Limited(20), pytest.raises(RuntimeError, match="can't allocate memory"):  # not even one column fits
        operator._matmul(normal(N, 1))
    assert tiles._shrunk.get(torch.device("cpu"), 0) == 0


@pytest.mark.parametrize("what", ["product", "dense", "derivative"])
def test_there_is_an_end_to_shrinking(what, tiles_restored, monkeypatch):
    tried = []

    def fail(*args, **options):
        tried.append(1)
        raise MemoryError

    monkeypatch.setattr(tiled_module, f"_{'gradient' if what == 'derivative' else what}", fail)
    operator = _operator("rbf-ard")
    compute = {
        "product": lambda: operator._matmul(normal(N, 1)),
        "dense": lambda: operator.to_dense(),
        "derivative": lambda: operator._bilinear_derivative(normal(N, 1), normal(N, 1)),
    }
    with pytest.raises(MemoryError):
        compute[what]()
    assert 5 < len(tried) < 20
    assert tiles._shrunk.get(torch.device("cpu"), 0) == 0


@each("engine", ["tiled", "dense"])
@each("error", [RuntimeError("some other error"), ValueError("can't allocate memory"), KeyError(1)])
def test_other_errors_are_not_swallowed(error, engine, tiles_restored, monkeypatch):
    def fail(*args, **options):
        raise error

    monkeypatch.setattr("sketchgp.operators.fast_tiles.FastTiles.tile", fail)
    operator = _operator("rbf-ard", engine)
    with pytest.raises(type(error)):
        operator._matmul(normal(N, 1))
    assert not tiles._shrunk


@pytest.mark.parametrize("error", ["cuda", "cpu"])
def test_tiles_of_whole_rows_shrink_too(error, caplog):
    """Those that inducing points are multiplied by."""
    kernel, x, v = ScaleKernel(MaternKernel(nu=1.5)).double(), points(300, 3), normal(40, 2)
    expected = kernel(x, x[:40]).to_dense().detach() @ v
    tall = TallMatrix(kernel, x, x[:40])
    with Limited(6000, ERRORS[error], matrices=False) as limited, caplog.at_level("WARNING", logger="sketchgp"):
        found = tall.matmul(v)
    assert limited.refused == 1 and "going on with 75" in caplog.text
    assert relative(found, expected) < 1e-12 and tall.evaluated.entries == 300 * 40
    with Limited(100, ERRORS[error], matrices=False), pytest.raises((RuntimeError, MemoryError)):
        TallMatrix(kernel, x, x[:40]).matmul(v)


def test_shrunk_tiles_cover_the_matrix(tiles_restored):
    for shrunk in range(0, 24, 2):
        tiles._shrunk[torch.device("cpu")] = shrunk
        for n, m, batch in ((50, 50, 1), (3, 1000, 1), (1000, 3, 1), (50, 50, 7), (1, 1, 1)):
            shape = tiles.tile_shape(n, m, torch.float32, torch.device("cpu"), batch, 2)
            assert 1 <= shape[0] <= n
            assert 1 <= shape[1] <= m
            for half in (False, True) if n == m else (False,):
                seen = torch.zeros(n, m)
                for rows, columns, mirror in tiles.pieces(n, m, shape, half):
                    assert (rows.stop - rows.start) * (columns.stop - columns.start) <= shape[0] * shape[1]
                    seen[rows, columns] += 1
                    if mirror:
                        seen[columns, rows] += 1
                assert (seen == 1).all()
            if shrunk >= 14 and n == 50:
                break  # thousands of tiles
