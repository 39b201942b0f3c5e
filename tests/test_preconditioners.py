"""Preconditioners ``P = F F^T + diag(d)``: against dense algebra, their automatic rank, gradients and cache."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle

import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from linear_operator.operators import DenseLinearOperator

from cases import each
from problems import dense, identity, log_determinant, normal, points, relative, set_scales
from sketchgp import (
    ConjugateGradients,
    FullProblem,
    InputError,
    NumericalError,
    Nystrom,
    NystromEigenPro,
    RPCholesky,
    random_streams,
    settings,
)
from sketchgp.operators import KernelMatrix, LowRankPlusDiagonal
from sketchgp.operators.access import Access
from sketchgp.preconditioners import LowRank, Preconditioner, PreconditionerCache, nystrom_factor
from sketchgp.preconditioners.rank import Costs
from sketchgp.solvers import System

N = 90
CHOICES = {
    "rpcholesky": RPCholesky(15),
    "rpcholesky-block": RPCholesky(15, method="block", block_size=4),
    "gaussian": Nystrom(15),
    "uniform": Nystrom(15, sketch="uniform"),
    "eigenpro": NystromEigenPro(10, subsample_size=40),
}
AUTOMATIC = {
    "rpcholesky": RPCholesky(),
    "rpcholesky-block": RPCholesky(method="block"),
    "gaussian": Nystrom(),
    "uniform": Nystrom(sketch="uniform"),
    "eigenpro": NystromEigenPro(),
}


def _kernel(dtype=torch.float64, lengthscale=0.4):
    return set_scales(ScaleKernel(RBFKernel(ard_num_dims=3)), lengthscale=lengthscale).to(dtype)


def _operator(dtype=torch.float64, n=N, **options):
    return KernelMatrix.of(_kernel(dtype, **options), points(n, dtype=dtype))


def _noise(kind, n=N, dtype=torch.float64):
    if kind == "per-point":
        return torch.linspace(0.01, 0.5, n, dtype=dtype)
    return torch.full((n,), 0.05, dtype=dtype)


@pytest.mark.parametrize("noise", ["constant", "per-point"])
@pytest.mark.parametrize("name", CHOICES)
def test_against_dense(name, noise):
    """Solve, determinant and samples of P, and that P resembles ``K + noise``."""
    choice, variances = CHOICES[name], _noise(noise)
    built = choice.build(_operator(), variances)
    matrix = built.to_dense()
    assert built.rank == choice.rank
    rhs = normal(N, 3)
    assert relative(built.apply_inverse(rhs), torch.linalg.solve(matrix, rhs)) < 1e-10
    assert relative(built.log_determinant(), torch.linalg.slogdet(matrix).logabsdet) < 1e-10
    system = dense(_kernel(), points(N)) + torch.diag(variances)
    values = torch.linalg.eigvals(torch.linalg.solve(matrix, system)).real
    plain = torch.linalg.eigvalsh(system)
    assert float(values.max() / values.min()) < 0.5 * float(plain[-1] / plain[0])
    if name != "eigenpro":  # F F^T <= K, so P is at most K + noise; EigenPro adds lambda
        residual = dense(_kernel(), points(N)).diagonal() - built.factor.square().sum(1)
        assert float(values.min()) > 1 - 1e-9
        assert float(values.max()) < 1 + float((residual / variances).sum()) + 1e-9  # arXiv:2304.12465


@pytest.mark.parametrize("name", CHOICES)
def test_samples(name):
    built = CHOICES[name].build(_operator(), _noise("per-point"))
    count = 20_000
    samples = built.sample(normal(built.rank, count, seed=1), normal(N, count, seed=2))
    assert relative(samples @ samples.mT / count, built.to_dense()) < 0.06


@pytest.mark.parametrize("name", CHOICES)
def test_float32_callers_get_a_float64_preconditioner(name):
    cache = PreconditionerCache(CHOICES[name])
    built = cache.get(_operator(torch.float32), _noise("constant", dtype=torch.float32))
    twin = CHOICES[name].build(_operator(), _noise("constant"))
    assert built.dtype == torch.float32
    assert built.factor.dtype == torch.float64
    assert relative(built.to_dense(), twin.to_dense()) < 1e-4
    assert built.apply_inverse(normal(N, 2, dtype=torch.float32)).dtype == torch.float32


@pytest.mark.parametrize("stored", [True, False], ids=["dense", "kernel-matrix"])
@pytest.mark.parametrize("name", CHOICES)
def test_batches(name, stored):
    kernel = set_scales(ScaleKernel(RBFKernel()).double(), lengthscale=0.4)
    x = torch.stack([points(N, seed=1), 3 * points(N, seed=2)])
    matrices = kernel(x).to_dense().detach()
    operator = DenseLinearOperator(matrices) if stored else KernelMatrix.of(kernel, x)
    noise = torch.stack([_noise("constant"), _noise("per-point")])
    built = CHOICES[name].build(operator, noise)
    assert built.batch_shape == (2,)
    for index in range(2):
        single = CHOICES[name].build(DenseLinearOperator(matrices[index]), noise[index])
        assert relative(built.to_dense()[index], single.to_dense()) < 1e-8
    rhs = normal(2, N, 3)
    assert relative(built.apply_inverse(rhs), torch.linalg.solve(built.to_dense(), rhs)) < 1e-10


@pytest.mark.parametrize("name", [*CHOICES, *(f"auto-{name}" for name in AUTOMATIC)])
def test_batch_of_kernels_of_different_rank(name):
    """One kernel has numerical rank 1, so its factor is padded; gradients must still pass."""
    shape = torch.Size([2])
    kernel = ScaleKernel(RBFKernel(batch_shape=shape), batch_shape=shape).double()
    kernel.base_kernel.lengthscale = torch.tensor([[[1e9]], [[0.5]]])
    choice = AUTOMATIC[name.removeprefix("auto-")] if name.startswith("auto-") else CHOICES[name]
    operator = KernelMatrix.of(kernel, points(40))
    noise = torch.full((2, 40), 0.1, dtype=torch.float64)
    built = choice.build(operator, noise)
    rhs = normal(2, 40, 1)
    assert relative(built.apply_inverse(rhs), torch.linalg.solve(built.to_dense(), rhs)) < 1e-9
    live = PreconditionerCache(choice).get(operator, noise, differentiable=True)
    log_determinant(live).sum().backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in kernel.parameters())


@pytest.mark.parametrize("name", CHOICES)
def test_ill_conditioned_noise(name):
    noise = torch.full((N,), 1e-10, dtype=torch.float64)
    built = CHOICES[name].build(_operator(lengthscale=2.0), noise)
    rhs = normal(N, 2)
    # the residual of a solve with P: cond(P) eps is about 1e-4 here
    assert relative(built.factor @ (built.factor.mT @ built.apply_inverse(rhs))
                    + built.diagonal_part.unsqueeze(-1) * built.apply_inverse(rhs), rhs) < 1e-3  # fmt: skip
    values = torch.linalg.svdvals(built.factor).square()
    shift = built.diagonal_part[0]
    expected = (values + shift).log().sum() + (N - built.rank) * shift.log()
    assert relative(built.log_determinant(), expected) < 1e-6


def test_eigenpro_flattens_the_spectrum():
    """On the whole set P has K's top q eigenvalues, and the next one in all other directions; noise is added."""
    matrix = dense(_kernel(), points(N))
    values = torch.linalg.eigvalsh(matrix).flip(0)
    built = NystromEigenPro(10, subsample_size=N).build(_operator(), _noise("constant"))
    expected = torch.cat([values[:10], values[10].expand(N - 10)]) + 0.05
    assert relative(torch.linalg.eigvalsh(built.to_dense()).flip(0), expected) < 1e-9
    half = NystromEigenPro(10, subsample_size=N // 2)
    selection = half.select(Access(_operator().detach()), _noise("constant"))
    chosen = torch.linalg.eigvalsh(matrix[selection.pivots][:, selection.pivots]).flip(0)
    assert selection.shift == pytest.approx(2 * float(chosen[10]), rel=1e-9)


# --- rank -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in AUTOMATIC if name != "eigenpro"])
def test_automatic_rank_stops_where_the_trace_is_small(name):
    n = 400
    operator = KernelMatrix.of(_kernel(lengthscale=2.0), points(n))
    noise = torch.full((n,), 0.1, dtype=torch.float64)
    built = AUTOMATIC[name].build(operator, noise)
    left = operator.diagonal().detach() - built.factor.square().sum(1)
    assert float((left / noise).sum()) <= 1.0 + 1e-9
    assert built.rank < 100
    matrix = dense(_kernel(lengthscale=2.0), points(n)) + 0.1 * identity(n)
    values = torch.linalg.eigvals(torch.linalg.solve(built.to_dense(), matrix)).real
    assert float(values.max() / values.min()) <= 2.0


@pytest.mark.parametrize("name", AUTOMATIC)
def test_automatic_rank_is_bounded(name):
    n = 400
    operator = KernelMatrix.of(_kernel(lengthscale=0.05), points(n))
    noise = torch.full((n,), 1e-6, dtype=torch.float64)
    bound = math.ceil(10 * math.sqrt(n)) if name in ("gaussian", "uniform", "eigenpro") else n // 2 + 100
    assert 7 < AUTOMATIC[name].build(operator, noise).rank <= bound
    with settings.memory_budget(16 * n * 7):
        assert AUTOMATIC[name].build(operator, noise).rank == 7
    with settings.memory_budget(1):
        assert AUTOMATIC[name].build(operator, noise).rank == 1


BY_COST = ("rpcholesky", "rpcholesky-block")


def _rank(name, lengthscale, noise, n=1000, dtype=torch.float64, **options):
    kernel = _kernel(dtype, lengthscale=lengthscale)
    operator = KernelMatrix.of(kernel, points(n, dtype=dtype), **options)
    return AUTOMATIC[name].build(operator, torch.full((n,), noise, dtype=dtype)).rank


@pytest.mark.parametrize("name", BY_COST)
def test_easy_problems_get_few_columns_and_hard_ones_many(name):
    bound = 10 * math.sqrt(1000)
    problems = (1.0, 1.0), (0.5, 1e-2), (0.15, 1e-4)
    easy, middle, hard = (_rank(name, *problem) for problem in problems)
    assert easy < 0.15 * bound
    assert easy < 0.5 * middle
    assert middle < 0.5 * hard
    assert hard > bound
    assert _rank(name, *problems[1]) == middle  # nothing is timed


@pytest.mark.parametrize("name", BY_COST)
def test_columns_that_save_nothing_are_not_taken(name):
    """Points of many dimensions: K is near a multiple of the identity beside a few directions, and soon solved."""
    n = 900
    kernel = set_scales(MaternKernel(nu=1.5), lengthscale=14.0).double()
    noise = torch.full((n,), 1e-4, dtype=torch.float64)
    assert AUTOMATIC[name].build(KernelMatrix.of(kernel, normal(n, 200)), noise).rank < 130
    assert AUTOMATIC[name].build(DenseLinearOperator(identity(n)), noise).rank < 25


def test_columns_are_worth_more_where_products_cost_more():
    stored, tiled = (_rank("rpcholesky", 0.15, 1e-2, engine=engine) for engine in ("dense", "tiled"))
    assert 1.05 * stored < tiled


@pytest.mark.parametrize(("lengthscale", "level"), [(0.5, 1e-2), (0.2, 1e-3)])
def test_the_automatic_rank_is_near_the_cheapest(lengthscale, level):
    """By the rule's own prices, with the iterations that there are."""
    n = 600
    operator = KernelMatrix.of(_kernel(lengthscale=lengthscale), points(n), engine="dense")
    noise, costs, spent = torch.full((n,), level, dtype=torch.float64), Costs(Access(operator)), {}
    for rank in (None, 15, 60, 240):
        built = RPCholesky(rank).build(operator, noise)
        run = ConjugateGradients(tol=1e-3).run(System(operator, noise), normal(n, 1), built)
        columns = sum(costs.column(r) for r in range(built.rank))
        spent[rank] = columns + run[1].iterations * costs.iteration(built.rank)
    assert spent.pop(None) < 1.3 * min(spent.values())


@each("n", [1, 2, 3])
@each("name", AUTOMATIC)
def test_few_points(name, n):
    built = AUTOMATIC[name].build(_operator(n=n), _noise("constant", n))
    assert relative(built.apply_inverse(normal(n, 1)), torch.linalg.solve(built.to_dense(), normal(n, 1))) < 1e-12


@pytest.mark.parametrize("name", AUTOMATIC)
def test_rank_deficient_and_constant_matrices(name):
    for root in (normal(40, 3), torch.ones(40, 1, dtype=torch.float64)):
        built = AUTOMATIC[name].build(DenseLinearOperator(root @ root.mT), _noise("constant", 40))
        matrix = root @ root.mT + 0.05 * identity(40)
        values = torch.linalg.eigvals(torch.linalg.solve(built.to_dense(), matrix)).real
        assert float(values.max() / values.min()) < 1.1


# --- noise that differs between points ------------------------------------------------------------------------


def _some_quiet(n, every=8, quiet=1e-4):
    return torch.where(torch.arange(n) % every == 0, quiet, 0.5).double()


def _condition(built, operator, noise):
    values = torch.linalg.eigvals(
        torch.linalg.solve(built.to_dense(), operator.to_dense().detach() + noise.diag())
    ).real
    return float(values.max() / values.min())


@pytest.mark.parametrize("name", [name for name in CHOICES if name != "uniform"])
def test_quiet_points_come_first(name):
    """What is approximated is ``D^-1/2 K D^-1/2``: better conditioned than pivots for the mean of the noise."""
    n, choice = 240, dataclasses.replace(CHOICES[name], rank=30)
    operator, noise = KernelMatrix.of(_kernel(), points(n)), _some_quiet(n)
    by_mean = choice.select(Access(operator.detach()), noise.mean().expand(n))
    blind = LowRankPlusDiagonal(by_mean.factor, noise + by_mean.shift)
    assert _condition(choice.build(operator, noise), operator, noise) < 0.6 * _condition(blind, operator, noise)


@pytest.mark.parametrize("name", ["rpcholesky", "rpcholesky-block", "gaussian"])
def test_automatic_rank_follows_the_noise_of_each_point(name):
    n = 300
    operator, noise = KernelMatrix.of(_kernel(lengthscale=0.8), points(n)), _some_quiet(n, every=30)
    built = AUTOMATIC[name].build(operator, noise)
    assert _condition(built, operator, noise) <= 2.0
    assert built.rank < 0.75 * AUTOMATIC[name].build(operator, torch.full_like(noise, 1e-4)).rank


@pytest.mark.parametrize("name", ["rpcholesky", "gaussian", "uniform"])
def test_one_matrix_and_several_noises(name):
    """A matrix that several systems share serves them all."""
    n = 200
    operator = KernelMatrix.of(_kernel(lengthscale=2.0), points(n))
    noise = torch.stack([_some_quiet(n, 8), _some_quiet(n, 8).flip(0), torch.full((n,), 0.1, dtype=torch.float64)])
    built = AUTOMATIC[name].build(operator, noise)
    assert built.batch_shape == (3,)
    for index in range(3):
        single = LowRankPlusDiagonal(built.factor, noise[index])
        assert _condition(single, operator, noise[index]) <= 2.0


@each("name", CHOICES)
def test_refuses_noise_of_zero(name):
    with pytest.raises(NumericalError, match="noise"):
        CHOICES[name].build(_operator(), _noise("per-point") * (torch.arange(N) > 0)).capacitance_root()


# --- errors ---------------------------------------------------------------------------------------------------


@each("value", [0, -1, True, 2.0, "10"])
@each("choice", [RPCholesky, Nystrom, NystromEigenPro])
def test_refuses_ranks_that_are_not_positive_integers(choice, value):
    with pytest.raises(InputError, match="rank expects a positive integer"):
        choice(rank=value)


@each(
    ("make", "message"),
    [
        (lambda: RPCholesky(method="greedy"), "method expects"),
        (lambda: RPCholesky(block_size=0), "block_size expects"),
        (lambda: Nystrom(sketch="sparse"), "sketch expects"),
        (lambda: NystromEigenPro(subsample_size=-3), "subsample_size expects"),
    ],
)
def test_refuses_unknown_options(make, message):
    with pytest.raises(InputError, match=message):
        make()


@pytest.mark.parametrize("choice", [RPCholesky(11), Nystrom(11), NystromEigenPro(11)])
def test_more_columns_than_points_are_as_many(choice):
    problem = FullProblem(_kernel(), points(10), normal(10), 0.1)
    report = ConjugateGradients().solve(problem, preconditioner=choice).report
    assert report.rank <= 10 and report.converged
    assert "rank 11 was asked for; 10 points have 10" in report.notes
    as_many = dataclasses.replace(choice, rank=10)
    assert ConjugateGradients().solve(problem, preconditioner=as_many).report.notes == []


# --- gradients ------------------------------------------------------------------------------------------------


def _dense_preconditioner(name, choice, selection, kernel, x, noise):
    """P from the dense kernel matrix by the textbook formulas, with what was selected held fixed."""
    matrix = kernel(x).to_dense()
    if name == "eigenpro":
        root = matrix[:, selection.pivots] @ selection.coefficients
        return root @ root.mT + torch.diag(noise + selection.shift)
    if name == "gaussian":
        generator = random_streams.generator(choice.seed, "Nystrom preconditioner")
        test = torch.linalg.qr(torch.randn(N, choice.rank, dtype=torch.float64, generator=generator)).Q
        test = test / noise.detach().sqrt().unsqueeze(1)
    else:
        test = identity(N)[:, selection.pivots]
    sketch = matrix @ test
    return sketch @ torch.linalg.solve(test.mT @ sketch, sketch.mT) + torch.diag(noise)


@pytest.mark.parametrize("noise", ["constant", "per-point"])
@pytest.mark.parametrize("name", CHOICES)
def test_gradient_of_the_determinant(name, noise):
    """With respect to hyperparameters and noise, the pivots held fixed, against dense autograd."""
    kernel, x = set_scales(ScaleKernel(MaternKernel(nu=1.5)).double(), lengthscale=0.5), points(N)
    variances = _noise(noise).requires_grad_(True)
    inputs = [*kernel.parameters(), variances]
    operator, cache = KernelMatrix.of(kernel, x), PreconditionerCache(CHOICES[name])
    built = cache.get(operator, variances, differentiable=True)
    found = torch.autograd.grad(log_determinant(built), inputs)
    matrix = _dense_preconditioner(name, CHOICES[name], cache._selection, kernel, x, variances)
    assert relative(built.to_dense(), matrix) < 1e-9
    expected = torch.autograd.grad(torch.logdet(matrix), inputs)
    for a, b in zip(found, expected, strict=True):
        assert relative(a, b) < 1e-6


def test_gradient_reaches_float32_parameters():
    kernel = _kernel(torch.float32)
    noise = _noise("constant", dtype=torch.float32).requires_grad_(True)
    operator = KernelMatrix.of(kernel, points(N, dtype=torch.float32))
    log_determinant(PreconditionerCache(RPCholesky(15)).get(operator, noise, differentiable=True)).backward()
    assert noise.grad.dtype == torch.float32
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in kernel.parameters())


# --- cache ----------------------------------------------------------------------------------------------------


def test_cache_hits_and_misses():
    cache, noise = PreconditionerCache(RPCholesky(15)), _noise("constant")
    first = cache.get(_operator(), noise)
    assert cache.builds == 1
    again = cache.get(_operator(), noise.clone())  # another object, the same content
    assert cache.builds == 1
    assert again.factor.data_ptr() == first.factor.data_ptr()
    other_noise = cache.get(_operator(), 2 * noise)
    assert cache.builds == 2
    assert other_noise.factor.data_ptr() == first.factor.data_ptr()
    assert relative(other_noise.diagonal_part, 2 * noise) < 1e-15
    other_kernel = cache.get(_operator(lengthscale=0.41), noise)
    assert cache.builds == 3
    assert other_kernel.factor.data_ptr() != first.factor.data_ptr()
    moved = cache.get(KernelMatrix.of(_kernel(), points(N) + 1e-9 * points(N, seed=5)), noise)
    assert cache.builds == 4
    assert moved.factor.data_ptr() != other_kernel.factor.data_ptr()


def test_cache_tells_kernels_with_equal_parameters_apart():
    cache, noise, built = PreconditionerCache(RPCholesky(15)), _noise("constant"), []
    for base in (RBFKernel(), MaternKernel(nu=0.5), MaternKernel(nu=2.5)):
        kernel = set_scales(ScaleKernel(base).double())
        built.append(cache.get(KernelMatrix.of(kernel, points(N)), noise))
    assert cache.builds == 3
    assert relative(built[1].to_dense(), built[0].to_dense()) > 1e-3
    assert relative(built[2].to_dense(), built[1].to_dense()) > 1e-3


def test_cache_of_large_inputs_sees_changes():
    x = points(3000)  # 9000 entries: compared by sums
    cache, noise = PreconditionerCache(RPCholesky(5)), _noise("constant", 3000)
    cache.get(KernelMatrix.of(_kernel(), x), noise)
    cache.get(KernelMatrix.of(_kernel(), x.clone()), noise)
    assert cache.builds == 1
    moved = x.clone()
    moved[[10, 20]] = moved[[20, 10]]
    cache.get(KernelMatrix.of(_kernel(), moved), noise)
    assert cache.builds == 2


def test_cache_of_stored_matrices():
    matrix = dense(_kernel(), points(N))
    cache, noise = PreconditionerCache(RPCholesky(15)), _noise("constant")
    cache.get(DenseLinearOperator(matrix), noise)
    cache.get(DenseLinearOperator(matrix.clone()), noise)
    assert cache.builds == 1
    cache.get(DenseLinearOperator(1.001 * matrix), noise)
    assert cache.builds == 2


def test_training_steps_reuse_the_pivots_until_they_drift():
    kernel = set_scales(ScaleKernel(RBFKernel()).double(), lengthscale=0.3)
    cache, noise, x = PreconditionerCache(RPCholesky(15)), _noise("constant"), points(N)

    def step(lengthscale):
        kernel.base_kernel.lengthscale = lengthscale
        cache.get(KernelMatrix.of(kernel, x), noise, differentiable=True)
        return cache._selection.pivots

    first = step(0.3)
    assert step(0.301) is first
    assert step(0.3005) is first
    assert step(0.05) is not first  # leaves far more of the trace


@pytest.mark.parametrize("differentiable", [True, False])
@pytest.mark.parametrize("name", ["rpcholesky", "gaussian", "eigenpro"])
def test_selections_are_kept_until_the_noise_asks_for_others(name, differentiable):
    """The scale of the noise does not matter to a given rank; which points are quiet does."""
    n, kernel = 240, _kernel()
    choice, x, noise = dataclasses.replace(CHOICES[name], rank=30), points(n), _some_quiet(n)
    operator, cache = KernelMatrix.of(kernel, x), PreconditionerCache(choice)

    def get(noise):
        built = cache.get(operator, noise.clone().requires_grad_(differentiable), differentiable=differentiable)
        return LowRankPlusDiagonal(built.factor.detach(), built.diagonal_part.detach())

    first = get(noise)
    selected = cache._selection.left
    assert relative(get(3 * noise).factor, first.factor) < 1e-9
    assert cache._selection.left is selected
    other = noise.roll(1)  # other points are quiet now
    fresh = choice.build(operator, other)
    assert _condition(get(other), operator, other) < 1.5 * _condition(fresh, operator, other)


@pytest.mark.parametrize("name", ["rpcholesky", "gaussian", "eigenpro"])
def test_a_growing_output_scale_is_noticed(name):
    """EigenPro's coefficients are for one scale, an automatic rank for one ratio of scale to noise."""
    x, noise = points(N), _noise("per-point").requires_grad_(True)
    choice = CHOICES[name] if name == "eigenpro" else AUTOMATIC[name]
    kernel = _kernel(lengthscale=2.0)
    cache = PreconditionerCache(choice)
    for scale in (0.1, 1.0, 30.0):
        kernel.outputscale = scale
        operator = KernelMatrix.of(kernel, x)
        live = cache.get(operator, noise, differentiable=True)
        live = LowRankPlusDiagonal(live.factor.detach(), live.diagonal_part.detach())
        fresh = choice.build(operator, noise.detach())
        assert _condition(live, operator, noise.detach()) < 1.6 * _condition(fresh, operator, noise.detach())


def test_training_step_then_prediction_builds_once_more_at_most():
    kernel, noise = _kernel(), _noise("constant")
    cache = PreconditionerCache(RPCholesky(15))
    operator = KernelMatrix.of(kernel, points(N))
    live = cache.get(operator, noise, differentiable=True)
    assert any(t.requires_grad for t in live.tensors)
    plain = cache.get(operator, noise)
    assert cache.builds == 1
    assert not any(t.requires_grad for t in plain.tensors)
    assert relative(plain.to_dense(), live.to_dense()) < 1e-14


def test_copies_and_pickles_start_empty():
    cache = PreconditionerCache(RPCholesky(15, seed=3))
    cache.get(_operator(), _noise("constant"))
    assert cache.take_seconds() > 0
    assert cache.take_seconds() == 0
    assert len(pickle.dumps(cache)) < 1000  # the choice alone, not the n x r factor
    for other in (pickle.loads(pickle.dumps(cache)), copy.deepcopy(cache)):
        assert other.choice == cache.choice
        assert other.builds == 0
        assert other._built is None
        assert relative(other.get(_operator(), _noise("constant")).to_dense(), cache._built.to_dense()) == 0


def test_names_and_equality():
    assert RPCholesky(5).name == "RPCholesky"
    assert Nystrom().name == "Nystrom[gaussian]"
    assert RPCholesky(5) == RPCholesky(5) != RPCholesky(6)
    access = Access(_operator().detach())
    assert RPCholesky(5).select(access, _noise("constant")).pivots.shape == (5,)


@dataclasses.dataclass(frozen=True)
class EvenlySpaced(Preconditioner):
    """``P = F F^T + noise`` with F from columns that are evenly spaced in the order of the rows."""

    pivoted = True

    def approximate(self, matrix, noise):
        pivots = torch.linspace(0, matrix.n - 1, self.rank_for(matrix.n, matrix.device)).long()
        factor = nystrom_factor(matrix.columns(pivots), matrix.block(pivots, pivots), matrix.resolution)
        return LowRank(factor, pivots, matrix.diagonal() - factor.square().sum(dim=1))


def test_a_new_preconditioner():
    """All that a new method needs is a factor; solves, bounds and gradients follow."""
    x = points(300, 3)
    y = torch.sin(4 * x.sum(dim=1))
    problem = FullProblem(_kernel().requires_grad_(False), x, y, 1e-2)
    plain = ConjugateGradients(tol=1e-8).solve(problem, preconditioner=None)
    found = ConjugateGradients(tol=1e-8).solve(problem, preconditioner=EvenlySpaced(60))
    assert relative(found.value, plain.value) < 1e-5
    assert found.report.iterations < plain.report.iterations / 2
    assert found.report.error_bound is not None
    operator, noise = _operator(), _noise("constant").requires_grad_()
    built = PreconditionerCache(EvenlySpaced(30)).get(operator, noise, differentiable=True)
    log_determinant(built).backward()
    core = operator.block(torch.linspace(0, N - 1, 30).long(), torch.linspace(0, N - 1, 30).long())
    columns = operator.columns(torch.linspace(0, N - 1, 30).long())
    parameter = operator.kernel.base_kernel.raw_lengthscale
    exact = torch.logdet(columns @ torch.linalg.solve(core, columns.mT) + noise.detach().diag())
    (gradient,) = torch.autograd.grad(exact, parameter)
    assert relative(parameter.grad, gradient) < 1e-4


@dataclasses.dataclass(frozen=True)
class Sampled(EvenlySpaced):
    """The same factor, whose pivots nobody is told."""

    pivoted = False

    def approximate(self, matrix, noise):
        return dataclasses.replace(super().approximate(matrix, noise), pivots=None)


def test_a_new_preconditioner_without_pivots():
    """It serves solves, and an error says what training lacks."""
    operator, noise = _operator(), _noise("constant")
    built = PreconditionerCache(Sampled(30)).get(operator, noise)
    expected = PreconditionerCache(EvenlySpaced(30)).get(operator, noise)
    v = normal(N, 1)
    assert relative(built.apply_inverse(v), expected.apply_inverse(v)) < 1e-10
    with pytest.raises(NotImplementedError, match=r"Sampled: training expects pivots .* factor\(matrix, selection\)"):
        PreconditionerCache(Sampled(30)).get(operator, noise.requires_grad_(), differentiable=True)
    with pytest.raises(NotImplementedError, match="expects a method approximate"):
        PreconditionerCache(Preconditioner(30)).get(operator, noise.detach())
