"""The engine ``"fused"``: its products against dense float64 ones, what it takes, and what happens without numba."""

from __future__ import annotations

import copy
import logging
import math
import sys
import threading
import warnings

import pytest
import torch
from gpytorch.kernels import CosineKernel, MaternKernel, PeriodicKernel, RBFKernel, RQKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood

import sketchgp
from cases import each
from forks import CAN_FORK, ended, fork, one_thread, run_script
from gp_models import Plain
from problems import normal, points, relative
from sketchgp import InputError
from sketchgp.operators import KernelMatrix, nearby, products
from sketchgp.operators.access import Access, accurate_terms
from sketchgp.operators.engines import DENSE, FUSED, NEAR_AND_FAR, TILED, choose, self_check
from sketchgp.operators.engines import fused as module
from sketchgp.operators.engines.base import say_missing
from sketchgp.preconditioners.rank import Costs
from test_far_rows import KERNELS as WITH_FAR_ROWS
from test_far_rows import exactly, sides
from test_fast_tiles import make, reference

pytest.importorskip("numba")

SINGLE = ["rbf", "matern12", "matern32", "matern52", "rq", "laplace"]
GROWTH = 3  # times the error of tiles, which is of a few roundings, that one of few roundings may have


ENTRIES = {torch.float32: 1e-6, torch.float64: 1e-14}  # errors of entries, over the largest


def check(kernel, x, z=None, columns=1, dtype=torch.float32) -> None:
    """Products, and some entries, against the formulas in float64, with errors of a few roundings as those of tiles.

    :param columns: of each right-hand side; one is compiled for itself, and others go in groups.
    """
    exact = reference(copy.deepcopy(kernel).double(), x, x if z is None else z).detach()
    kernel = copy.deepcopy(kernel).to(dtype)
    found, tiled = (KernelMatrix.of(kernel, x, z, engine=engine).detach() for engine in ("fused", "tiled"))
    assert choose(found.pairs) is FUSED
    m, allowed = exact.shape[-1], ENTRIES[dtype]
    rhs = normal(m, columns)
    ours, theirs = (relative(matrix @ rhs.to(dtype), exact @ rhs) for matrix in (found, tiled))
    assert ours < GROWTH * max(theirs, allowed / 10)
    for j in range(0, m, max(1, m // 20)):
        chosen = torch.arange(j, j + columns) % m
        entries = found @ torch.eye(m, dtype=dtype)[:, chosen]
        assert float((entries - exact[:, chosen]).abs().max()) < allowed * float(exact.abs().max())


@pytest.mark.parametrize("name", [*SINGLE, "periodic", "multiplied-out", "constant"])
def test_products(name):
    x, z = points(700, dtype=torch.float32), points(530, seed=9, dtype=torch.float32)
    check(make(name), x)
    check(make(name), x, z)
    check(make(name), points(700), z.double(), dtype=torch.float64)


@each(
    ("d", "columns", "dtype"),
    [(1, 9, torch.float32), (20, 1, torch.float32), (8, 35, torch.float32), (2, 3, torch.float64)],
)
@each("n", [1, 2, 1100])
def test_sizes(n, d, columns, dtype):
    kernel = ScaleKernel(MaternKernel(nu=1.5, ard_num_dims=d))
    kernel.base_kernel.lengthscale = torch.linspace(0.5, 1.5, d) * d**0.5
    x, z = points(n, d, dtype=dtype), points(3, d, seed=1, dtype=dtype)
    for pair in ((x, None), (x, z), (z, x)):
        check(kernel, *pair, columns, dtype)


@each("columns", [1, 6])
def test_mirrored_blocks_whose_rows_do_not_divide(columns, monkeypatch):
    """Points that are near each other only: blocks of 387 rows, and what they add to the columns."""
    monkeypatch.setattr(nearby, "_LEAF", 129)
    kernel, x = RBFKernel().requires_grad_(False), torch.rand(4500, 2, generator=torch.Generator().manual_seed(0))
    kernel.lengthscale = 0.005
    v = normal(len(x), columns).float()
    found, tiled = (KernelMatrix.of(kernel, x, engine=engine).detach() @ v for engine in ("fused", "tiled"))
    assert relative(found, tiled) < 1e-5


@each("columns", [1, 6])
def test_infinities_stay_in_their_column(columns):
    x, v = points(515, dtype=torch.float32), normal(515, columns).float()
    v[5, 0] = torch.inf
    found, tiled = (KernelMatrix.of(make("rbf").float(), x, engine=e).detach() @ v for e in ("fused", "tiled"))
    torch.testing.assert_close(found, tiled, rtol=1e-5, atol=1e-4)


def test_sums_of_many_threads_fit_the_memory_budget(monkeypatch):
    widths, summed = [], module._summed

    def noted(plan, arrays, *rest):
        widths.append(len(arrays[2]))
        return summed(plan, arrays, *rest)

    monkeypatch.setattr(module, "_summed", noted)
    matrix = KernelMatrix.of(make("rbf").float(), points(300, dtype=torch.float32), engine="fused").detach()
    v = normal(300, 20).float()
    whole = matrix @ v
    with sketchgp.settings.memory_budget(8 * 16 * 300 * torch.get_num_threads()):
        assert torch.equal(matrix @ v, whole)
    assert widths[-4:] == [20, 8, 8, 4]
    assert matrix.rows(torch.arange(0)).product(v).shape == (0, 20)


@each("name", SINGLE)
def test_duplicates_and_points_beside_each_other(name):
    """Where distances are differences of nearly equal numbers: values at 0 are exact."""
    x = 100 + points(60, dtype=torch.float32)
    x[20:40] = x[:20]
    x[40:] = x[:20] + 1e-5
    check(make(name), x)
    kernel = make(name).float()
    matrix = KernelMatrix.of(kernel, x[:20], x[20:40].clone(), engine="fused").detach()
    for i in range(20):
        torch.testing.assert_close((matrix @ torch.eye(20)[i])[i], kernel(x[:1]).diagonal()[0], rtol=1e-6, atol=0)


@each(("lengthscale", "dtype"), [(0.1, torch.float32), (2.0, torch.float64)])
def test_periodic_kernels_beside_others(lengthscale, dtype):
    """Columns out of order, several leaves in one atom, and points some turns apart, or one beside the other."""
    periodic = PeriodicKernel(active_dims=(2, 0), ard_num_dims=2)
    periodic.lengthscale, periodic.period_length = lengthscale, 0.7
    kernel = RBFKernel(active_dims=(1,)) * periodic * PeriodicKernel() + MaternKernel(nu=1.5)
    x = points(60, dtype=dtype)
    x[30:] = x[:30] + torch.tensor([0.7, 1e-4, 2.1], dtype=dtype)
    check(kernel, x, dtype=dtype)
    check(kernel, x[:40], x[20:].clone(), dtype=dtype)


def test_large_shape_parameters():
    """Rational quadratic kernels near their limit, the Gaussian: powers of numbers that round to 1."""
    kernel = RQKernel()
    kernel.alpha = 1e5
    check(kernel, points(200, dtype=torch.float32))


@each("where", ["test", "two of three", "test, one feature", "training"])
@each("name", WITH_FAR_ROWS)
def test_far_rows(name, where):
    z, x, tests, training = sides(where)
    kernel, exact = WITH_FAR_ROWS[name](), WITH_FAR_ROWS[name]().double()
    matrix = KernelMatrix.of(kernel, z, x, engine="fused").detach()
    whole = exactly(name, exact, z.double(), x.double()).detach()
    u, v = normal(len(z), 1), normal(len(x), 1)
    assert relative((matrix @ v.float())[tests], (whole @ v)[tests]) < 2e-6
    assert relative((matrix.mT @ u.float())[training], (whole.mT @ u)[training]) < 2e-6


@each("name", SINGLE)
def test_values_that_are_tiny_or_no_numbers(name):
    x = points(40, dtype=torch.float32)
    x[0], x[1], x[2] = 1e30, torch.inf, torch.nan
    x[3] = torch.tensor(0x7FC00123, dtype=torch.int32).view(torch.float32)  # a NaN with other bits than torch's
    found = KernelMatrix.of(make(name).float(), x[:20], x[20:], engine="fused") @ torch.ones(20, 1)
    assert found[2:4].isnan().all() and found[4:].isfinite().all()
    assert 0 <= found[0] < 1e-6 or name == "rq"


def test_vectors_and_inputs_that_lie_otherwise_in_memory():
    x, rhs = points(300, 6, dtype=torch.float32), normal(600, 4).float()
    matrix = KernelMatrix.of(make("rbf-ard").float(), x[:, ::2], engine="fused").detach()
    plain = KernelMatrix.of(make("rbf-ard").float(), x[:, ::2].clone(), engine="fused").detach()
    for vectors in (rhs[::2, 1:2], rhs.mT.contiguous()[0, :300], rhs[:300, 0]):
        assert torch.equal(matrix @ vectors, plain @ vectors.clone())


def test_batches_and_gradients():
    x, v = points(60, dtype=torch.float32).expand(2, 60, 3), normal(60, 2)
    kernel = make("sum", batch=torch.Size([2]))
    exact = reference(kernel, x, x)
    kernel = kernel.float()
    found = KernelMatrix.of(kernel, x, engine="fused") @ v.float()
    assert relative(found, exact @ v) < 1e-6
    found.square().sum().backward()
    mine = [p.grad.clone() for p in kernel.parameters()]
    kernel.zero_grad()
    (KernelMatrix.of(kernel, x, engine="tiled") @ v.float()).square().sum().backward()
    for ours, theirs in zip(mine, kernel.parameters(), strict=True):
        assert relative(ours, theirs.grad) < 1e-5


def test_tiles_that_are_zero_are_say_missing(monkeypatch):
    x = torch.rand(5000, 2, generator=torch.Generator().manual_seed(0))
    kernel = RBFKernel()
    kernel.lengthscale = 0.005
    seen = []
    monkeypatch.setattr(module, "_entries", lambda piece: seen.append(original(piece)) or seen[-1])
    v = normal(5000, 1)
    found, tiled = (KernelMatrix.of(kernel, x, engine=e).detach() @ v.float() for e in ("fused", "tiled"))
    assert relative(found, tiled) < 1e-6
    assert sum(seen) < 5000**2 / 4  # of half of all


original = module._entries


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_share_a_product(threads):
    """The same call gives the same result; two products at once give what they give alone."""
    x, v = points(4000, 2, dtype=torch.float32), normal(4000, 1).float()
    matrix, before = KernelMatrix.of(make("rbf").float(), x, engine="fused").detach(), torch.get_num_threads()
    alone = matrix @ v
    results = []
    torch.set_num_threads(threads)
    try:
        others = [threading.Thread(target=lambda: results.append(matrix @ v)) for _ in range(2)]
        for other in others:
            other.start()
        results.append(matrix @ v)
        for other in others:
            other.join()
    finally:
        torch.set_num_threads(before)
    assert all(relative(result, alone) < 1e-6 for result in results)
    assert torch.equal(results[0], results[1]) or threads > 1  # other threads of torch's have numbers of their own


def test_ctrl_c_ends_a_product_between_blocks(monkeypatch):
    calls = []

    def interrupted(*_):
        calls.append(1)
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        threading.Event().wait(0.01)

    x, before = points(20_000, 2, dtype=torch.float32), torch.get_num_threads()
    matrix = KernelMatrix.of(make("rbf").float(), x, engine="fused").detach()
    matrix.rows(torch.arange(5)) @ normal(20_000, 1).float()  # the check
    monkeypatch.setattr(module, "compiled", lambda plan: interrupted)
    torch.set_num_threads(2)
    try:
        with pytest.raises(KeyboardInterrupt):
            FUSED.product(matrix.pairs, normal(20_000, 1).float())
    finally:
        torch.set_num_threads(before)
    assert len(calls) < 20  # of 110


# --- what it takes ------------------------------------------------------------------------------------------------


def test_what_it_cannot_take():
    x = points(5, 40, dtype=torch.float32)
    for kernel, inputs, message in (
        (CosineKernel(), x, "CosineKernel is none of the kernels"),
        (RBFKernel(), x, "it takes up to 32 features, and the kernel has 40"),
    ):
        with pytest.raises(InputError, match=f"matmul='fused' cannot be used here: {message}"):
            KernelMatrix.of(kernel, inputs, engine="fused")


def large(kernel, d: int, **options) -> KernelMatrix:
    x = torch.rand(12_000, d, dtype=next(kernel.parameters()).dtype)
    return KernelMatrix.of(kernel, x, **options).detach()


def test_auto_takes_it_where_it_is_faster(monkeypatch, caplog):
    """By measured costs, wherever points lie."""
    monkeypatch.setattr(type(NEAR_AND_FAR), "serves", lambda *_: False)
    other = torch.rand(12_000, 2)
    cases = [
        (large(RBFKernel(), 2), 1, FUSED),
        (large(RBFKernel(), 2), 33, DENSE),
        (large(RBFKernel(), 8), 1, DENSE),
        (large(MaternKernel(), 8), 2, FUSED),
        (large(MaternKernel(), 9), 2, DENSE),
        (large(RQKernel(), 2), 2, DENSE),
        (large(RQKernel(), 2, x2=other), 1, FUSED),
        (large(CosineKernel(), 2, x2=other), 1, TILED),
        (large(RBFKernel().double(), 2), 1, FUSED),
        (large(MaternKernel().double(), 2), 1, DENSE),
        (large(MaternKernel().double(), 2), 2, FUSED),
        (large(MaternKernel().double(), 8, x2=torch.rand(12_000, 8).double()), 4, FUSED),
        (KernelMatrix.of(RBFKernel(), torch.rand(500, 2), other), 1, TILED),
    ]
    for matrix, columns, engine in cases:
        assert choose(matrix.pairs, columns) is engine
    with sketchgp.settings.memory_budget(1):
        assert choose(large(RBFKernel(), 12).pairs, 32) is FUSED
        assert choose(large(RBFKernel(), 12).pairs, 33) is TILED
        wide = [KernelMatrix.of(RBFKernel(), torch.rand(n, 20)) for n in (12_000, 47_000)]
        assert [choose(matrix.pairs, 32) for matrix in wide] == [TILED, FUSED]
        assert choose(wide[1].pairs, 33) is choose(KernelMatrix.of(RBFKernel(), torch.rand(47_000, 21)).pairs) is TILED
    named = large(RBFKernel(), 8).by("fused")  # by the library, which may replace it
    assert choose(named.pairs, 4) is FUSED
    assert choose(large(RBFKernel(), 8, engine="tiled").pairs, 4) is TILED
    for count, engine in ((100, TILED), (1000, FUSED)):  # by the size of all rows, which follow one another
        assert choose(named.rows(torch.arange(count)).pairs, 4) is engine
    ((_, accurate),) = accurate_terms(large(RBFKernel(), 8))  # for a check, which is one product
    assert accurate.dtype == torch.float64
    assert choose(accurate.pairs) is TILED
    monkeypatch.setattr(module, "_ONCE", 1)
    assert choose(accurate.pairs) is FUSED
    monkeypatch.setattr(module, "installed", lambda package: False)
    say_missing.cache_clear()
    caplog.set_level(logging.INFO, "sketchgp")
    assert choose(named.pairs, 4) is choose(accurate.pairs) is TILED
    assert [choose(matrix.pairs, columns) for matrix, columns, _ in cases[:1] + cases[6:7]] == [DENSE, TILED]
    assert [record.message for record in caplog.records if "'fused'" in record.message] == [
        "Tiles take the place of the engine 'fused': numba is not installed (python -m pip install numba)"
    ]
    with pytest.raises(InputError, match=r"numba is not installed \(python -m pip install numba\)"):
        KernelMatrix.of(RBFKernel(), other, engine="fused")


def test_a_product_counts_less_where_a_rank_is_chosen():
    x = points(50, dtype=torch.float32)
    fused, tiled = (
        Costs(Access(KernelMatrix.of(make("rbf").float(), x, engine=e))).product for e in ("fused", "tiled")
    )
    assert 0.2 * tiled < fused < 0.5 * tiled


def test_a_compiler_that_fails_gives_way_to_tiles_with_one_warning(monkeypatch):
    monkeypatch.setattr(self_check, "_VERDICTS", {})
    monkeypatch.setattr(self_check, "_WARNED", set())
    x, v, kernel = points(40, dtype=torch.float32), normal(40, 1).float(), make("rbf").float()
    tiled = KernelMatrix.of(kernel, x, engine="tiled") @ v

    def fails(plan):
        raise RuntimeError("LLVM ERROR")

    monkeypatch.setattr(module, "compiled", fails)
    monkeypatch.setattr(products, "choose", lambda pairs, columns=1: FUSED)
    with pytest.warns(UserWarning, match=r"'fused' is left out on cpu, tiles are used: .*LLVM ERROR"):
        found = KernelMatrix.of(kernel, x) @ v
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        KernelMatrix.of(kernel, x) @ v
    assert torch.equal(found, tiled)


@each("name", ["rbf", "matern12", "rq"])
def test_the_check_of_an_engine_finds_a_wrong_one(name, monkeypatch):
    monkeypatch.setattr(self_check, "_VERDICTS", {})
    matrix = KernelMatrix.of(make(name).float(), points(50, dtype=torch.float32), engine="fused").detach()
    matrix @ normal(50, 1).float()
    assert list(self_check._VERDICTS.values()) == [None]
    monkeypatch.setattr(self_check, "_VERDICTS", {})
    matrix, unit = KernelMatrix.of(make(name).float(), points(50, dtype=torch.float32), engine="fused"), module.unit
    with monkeypatch.context() as patched:
        patched.setattr(module, "unit", lambda profile: 1.02 * unit(profile))
        with pytest.raises(InputError, match="times as far from float64"):
            matrix @ normal(50, 1).float()


def test_a_model():
    x = points(900, 2, dtype=torch.float32)
    y = torch.sin(5 * x.sum(dim=1))
    means = []
    for matmul in ("fused", "tiled"):
        model = Plain(x, y, GaussianLikelihood(), ScaleKernel(MaternKernel(nu=1.5))).eval()
        sketchgp.accelerate(model, matmul=matmul)
        means.append(sketchgp.predict(model, points(20, 2, seed=3, dtype=torch.float32)).mean)
    assert float((means[0] - means[1]).abs().max()) < 2e-3
    assert math.isfinite(float(means[0].sum()))


# --- processes that are forked ------------------------------------------------------------------------------------


@pytest.mark.skipif(not CAN_FORK, reason="processes cannot be forked")
def test_forked_processes():
    run_script(__file__)


def _multiply() -> None:
    torch.set_num_threads(2)
    x, v = points(3000, 2, dtype=torch.float32), normal(3000, 1).float()
    for name in ("rbf", "matern12"):  # the second is compiled by the child
        found, tiled = (KernelMatrix.of(make(name).float(), x, engine=e).detach() @ v for e in ("fused", "tiled"))
        assert relative(found, tiled) < 1e-5


if __name__ == "__main__":
    one_thread()
    KernelMatrix.of(make("rbf").float(), points(50, 2, dtype=torch.float32), engine="fused") @ torch.ones(50, 1)
    sys.exit(ended(fork(_multiply)))
