"""Engines check themselves: one that computes something else never reaches a user's result."""

from __future__ import annotations

import copy
import logging
import warnings

import pytest
import torch
from gpytorch.kernels import MaternKernel, PeriodicKernel, RBFKernel, RQKernel, ScaleKernel

import sketchgp
from problems import normal, points, relative
from sketchgp import InputError, LaplaceKernel
from sketchgp.operators import KernelMatrix, engines, products
from sketchgp.operators.access import RowProduct
from sketchgp.operators.engines import TILED, Engine, self_check, triton

GIB = 2**30


class Tampered(Engine):
    """Tiles, with a flaw; counts what it is asked for.

    :param flaw: what it does to a product ``(n, t)``; :param slope: to a gradient.
    """

    name = "tampered"

    def __init__(self, flaw=lambda out: out, slope=lambda g: g) -> None:
        self.flaw, self.slope, self.rows = flaw, slope, []

    def resolution(self, matrix):
        return 2.0**-20

    def product(self, matrix, rhs):
        self.rows.append(matrix.shape[-2])
        return self.flaw(TILED.product(matrix, rhs))

    def derivative(self, matrix, left, right):
        self.rows.append(matrix.shape[-2])
        return tuple(None if g is None else self.slope(g) for g in TILED.derivative(matrix, left, right))


def _raises(out):
    raise RuntimeError("ptxas fatal: unknown architecture\nand more")


def _one_entry(out):
    out = out.clone()
    out[..., 3, :] += 0.01
    return out


FLAWS = {
    "a factor": lambda out: 1.01 * out,
    "one row": _one_entry,
    "not a number": lambda out: out.clone().fill_(float("nan")),
    "zeros": torch.zeros_like,
    "another shape": lambda out: out[..., :1, :],
    "raises": _raises,
}
GRADIENTS = {
    "a factor": lambda g: 1.01 * g,
    "a sign": lambda g: -g,
    "not a number": lambda g: g * float("nan"),
    "raises": _raises,
}
N = 40


@pytest.fixture(autouse=True)
def _unchecked(monkeypatch):
    monkeypatch.setattr(self_check, "_VERDICTS", {})
    monkeypatch.setattr(self_check, "_WARNED", set())


@pytest.fixture
def use(monkeypatch):
    """``use(engine)``: what ``"auto"`` takes from here on, and what is called by its name."""

    def put(engine: Engine) -> Engine:
        monkeypatch.setattr(products, "choose", lambda matrix, columns=1: TILED if matrix.engine == "tiled" else engine)
        return engine

    return put


def _kernel(dtype=torch.float32):
    kernel = ScaleKernel(MaternKernel(nu=1.5, ard_num_dims=3))
    kernel.base_kernel.lengthscale = torch.tensor([0.5, 1.0, 2.0])
    return kernel.to(dtype)


def _auto(**options) -> KernelMatrix:
    return KernelMatrix.of(_kernel(), points(N, dtype=torch.float32), **options)


def _exact(t: int) -> torch.Tensor:
    return KernelMatrix.of(_kernel(torch.float64), points(N, dtype=torch.float32).double(), engine="tiled") @ normal(
        N, t
    )


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_wrong_engine_gives_way_to_tiles_with_one_warning(use, flaw):
    engine = use(Tampered(FLAWS[flaw]))
    with pytest.warns(
        UserWarning, match=r"'tampered' is left out on cpu, tiles are used: a product.*small block"
    ) as seen:
        found = _auto() @ normal(N, 2, dtype=torch.float32)
    assert len(seen) == 1
    assert seen[0].filename == __file__
    assert relative(found, _exact(2)) < 1e-5
    assert engine.rows == [150]  # nothing of the user's
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert relative(_auto() @ normal(N, 2, dtype=torch.float32), _exact(2)) < 1e-5
    assert engine.rows == [150]


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_wrong_engine_that_was_named_is_an_error(use, flaw):
    engine = use(Tampered(FLAWS[flaw]))
    for _ in range(2):
        with pytest.raises(
            InputError, match=r"matmul='tampered' cannot be used here: a product .*Use matmul='tiled'"
        ) as e:
            KernelMatrix(*_auto().pairs.tensors, **{**_auto().pairs.options, "asked": True}) @ normal(
                N, 2, dtype=torch.float32
            )
    assert ("ptxas fatal" in str(e.value)) == (flaw == "raises")
    assert engine.rows == [150]


def test_wrong_for_wide_right_hand_sides_alone(use):
    engine = use(Tampered(lambda out: 2 * out if out.shape[-1] > 16 else out))
    assert relative(_auto() @ normal(N, 3, dtype=torch.float32), _exact(3)) < 1e-5
    assert relative(_auto() @ normal(N, 16, dtype=torch.float32), _exact(16)) < 1e-5
    with pytest.warns(UserWarning, match="a product with 17 columns"):
        found = _auto() @ normal(N, 17, dtype=torch.float32)
    assert relative(found, _exact(17)) < 1e-5
    assert engine.rows == [150, N, 150, N, 150]  # a check for each class; the sound ones go on
    _auto() @ normal(N, 4, dtype=torch.float32)
    assert engine.rows[-1] == N


@pytest.mark.parametrize("inputs", [False, True])
@pytest.mark.parametrize("slope", GRADIENTS)
def test_wrong_in_gradients_alone(use, slope, inputs):
    engine = use(Tampered(slope=GRADIENTS[slope]))
    matrix, exact = (
        KernelMatrix.of(_kernel(dtype), points(N, dtype=torch.float32).to(dtype).requires_grad_(inputs), engine=name)
        for dtype, name in ((torch.float32, "auto"), (torch.float64, "tiled"))
    )
    v = normal(N, 2, dtype=torch.float32)
    product = matrix @ v
    with pytest.warns(UserWarning, match=r"a gradient with 2 columns") as seen:
        product.square().sum().backward()
    (exact @ v.double()).square().sum().backward()
    assert len(seen) == 1
    assert engine.rows == [150, N, 150]
    for a, b in zip(matrix._args[0 if inputs else 2 :], exact._args[0 if inputs else 2 :], strict=True):
        assert relative(a.grad, b.grad) < 1e-4


def test_wrong_in_the_gradient_of_one_parameter(use):
    """The others hide it if they are summed up: a scale, beside three lengthscales."""
    use(Tampered(slope=lambda g: -g if g.numel() == 1 else g))
    with pytest.warns(UserWarning, match="a gradient"):
        (_auto() @ normal(N, 1, dtype=torch.float32)).sum().backward()


def test_further_faults_are_said_in_the_log(use, caplog):
    use(Tampered(FLAWS["a factor"], GRADIENTS["a factor"]))
    with pytest.warns(UserWarning, match="tampered"):
        product = _auto() @ normal(N, 2, dtype=torch.float32)
    with caplog.at_level(logging.INFO, "sketchgp"):
        product.sum().backward()
    assert "a gradient with 2 columns" in caplog.text


KERNELS = {
    "short": lambda: ScaleKernel(RBFKernel()).initialize(**{"base_kernel.lengthscale": 1e-4}),
    "long": lambda: ScaleKernel(RBFKernel()).initialize(**{"base_kernel.lengthscale": 1e4}),
    "sum of both": lambda: KERNELS["short"]() + KERNELS["long"](),
    "kinks": lambda: MaternKernel(nu=0.5) * LaplaceKernel(),
    "turns": lambda: PeriodicKernel().initialize(period_length=1e-3) + RQKernel(),
}
DATA = {
    "plain": lambda x: x,
    "all the same": torch.ones_like,
    "one row": lambda x: x[:1],
    "far rows and gaps": lambda x: x.index_fill(0, torch.tensor([0, 7]), 1e12).index_fill(
        0, torch.tensor([3]), float("nan")
    ),
    "far away": lambda x: x + 1e5,
    "a batch": lambda x: torch.stack([x, 2 * x]),
    "half": lambda x: x.bfloat16(),
}


CASES = [
    *((name, "plain") for name in KERNELS),
    *((name, data) for data, name in zip(DATA, 2 * [*KERNELS], strict=False)),
]


@pytest.mark.parametrize(("name", "data"), [*dict.fromkeys(CASES), ("kinks", "half"), ("turns", "far away")])
def test_a_sound_engine_passes_and_a_wrong_one_does_not(name, data, use):
    """Whatever the user's data and lengthscales are: the block is never all 0 or all 1."""
    x = DATA[data](points(N, dtype=torch.float32))
    kernel = KERNELS[name]()
    matrix = KernelMatrix.of(kernel, x)
    columns = normal(x.shape[-2], 2, dtype=torch.float32)
    engine = use(Tampered())
    matrix @ columns
    x.requires_grad_()
    product = KernelMatrix.of(kernel, x) @ columns
    torch.autograd.grad(product.nan_to_num().sum(), [x, *kernel.parameters()])
    assert engine.rows == [engine.rows[0], x.shape[-2], x.shape[-2], engine.rows[0], x.shape[-2]]
    # another function of the distance, as near 1 at 0 and as near 0 far away
    self_check._VERDICTS.clear()
    self_check._WARNED.clear()

    class Wrong(Tampered):
        def product(self, matrix, rhs):
            other = copy.deepcopy(matrix.kernel)
            for key, value in other.named_parameters():
                if "lengthscale" in key:
                    value.data += 0.01 * (1 + value.data.abs())
            values = [v.detach() for v in other.parameters()]
            changed = matrix.of([matrix.x1, matrix.x2, *values], kernel=other)
            return TILED.product(changed, rhs)

    use(Wrong())
    with pytest.warns(UserWarning, match="stated error"):
        matrix @ columns


def test_values_that_are_no_numbers_decide_nothing(use):
    kernel = _kernel()
    kernel.raw_outputscale.data.fill_(float("nan"))
    engine = use(Tampered())
    matrix = KernelMatrix.of(kernel, points(N, dtype=torch.float32))
    assert (matrix @ normal(N, 1, dtype=torch.float32)).isnan().all()
    kernel.raw_outputscale.data.fill_(0.0)
    engine.flaw = FLAWS["a factor"]
    with pytest.warns(UserWarning, match="tampered"):
        KernelMatrix.of(kernel, points(N, dtype=torch.float32)) @ normal(N, 1, dtype=torch.float32)


def test_engines_of_torch_operations_are_not_checked(monkeypatch):
    monkeypatch.setattr(self_check, "_fault", None)
    for engine in ("tiled", "dense"):
        KernelMatrix.of(_kernel(), points(N, dtype=torch.float32), engine=engine) @ normal(N, 1, dtype=torch.float32)


def test_rows_that_the_library_gave_an_engine_may_get_another(use, monkeypatch):
    """Block solvers name the engine that was chosen for them, which does not make it the user's."""
    use(Tampered(FLAWS["a factor"]))
    from sketchgp.operators import access

    monkeypatch.setattr(access, "choose", lambda matrix: engines.TRITON)
    indices = torch.arange(5)
    product = RowProduct(_auto().detach())
    assert product.engines == ["triton"] and product.asked == [False]
    with pytest.warns(UserWarning, match="tampered"):
        assert relative(product(indices, normal(N, 2)), _exact(2)[:5]) < 1e-5


# --- what auto takes ----------------------------------------------------------------------------------------------


def test_auto_takes_triton_on_a_device_where_the_matrix_is_not_stored(monkeypatch):
    """Matrices that are on no device, but say so."""
    for name in ("installed", "_recent"):
        monkeypatch.setattr(triton, name, lambda *_: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    other = RQKernel() * sketchgp.ArcCosineKernel()
    cases = [
        (_kernel(), torch.float32, GIB, engines.DENSE),
        (_kernel(), torch.float32, 1, engines.TRITON),
        (_kernel(torch.float64), torch.float64, 1, TILED),
        (other, torch.float32, 1, TILED),
    ]
    for kernel, dtype, budget, engine in cases:
        pairs = KernelMatrix.of(kernel, points(N, dtype=dtype)).pairs
        pairs.device = torch.device("cuda")
        with sketchgp.settings.memory_budget(budget):
            assert engines.choose(pairs) is engine
