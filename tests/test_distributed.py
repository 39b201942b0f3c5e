"""Ranks of a process group: the answers of one rank, a rank that fails, ranks that differ.

All cases are run once, by 2 and by 3 gloo processes on the CPU; the tests look at what each rank found.
"""

from __future__ import annotations

import gc
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gpytorch
import pytest
import torch
import torch.distributed as dist
from gpytorch.kernels import Kernel, MaternKernel, PolynomialKernel, RBFKernel, ScaleKernel
from torch import Tensor

import sketchgp
from cases import each
from forks import CAN_FORK, one_thread, run_script
from gp_models import iterative
from problems import normal, points, quiet, relative, set_scales
from ranks import COUNTS, LAST, OUTSIDE, start
from sketchgp import (
    KRILL,
    QR,
    ASkotch,
    Cholesky,
    ConjugateGradients,
    DoublyStochastic,
    EigenPro2,
    EigenPro3,
    EigenPro4,
    Falkon,
    FullProblem,
    FullScale,
    InducingPointProblem,
    Nystrom,
    NystromEigenPro,
    NystromPCG,
    RandomFeatureGP,
    RandomFeatureProblem,
    RPCholesky,
    SketchySAGA,
    Skotch,
    choose_inducing_points,
)
from sketchgp.density import Vecchia
from sketchgp.distributed import RankError, in_force, sharded
from sketchgp.errors import InputError
from sketchgp.fitting.objective import Objective
from sketchgp.operators import KernelMatrix, LowRankPlusDiagonal
from sketchgp.preconditioners import Preconditioner, PreconditionerCache
from sketchgp.report import Reason, SolveReport
from sketchgp.solvers.full.blocks import InvertedBlocks
from sketchgp.space import ShardedRows

N = 101  # no multiple of 2 or 3
Values = Mapping[str, Any]  # of tensors, and of functions that give one after the block
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CAN_FORK and dist.is_available() and dist.is_gloo_available()), reason="no gloo, no fork"),
]


# --- cases ----------------------------------------------------------------------------------------------------


def _kernel(dtype: torch.dtype = torch.float64) -> Kernel:
    return set_scales(ScaleKernel(MaternKernel(nu=2.5, ard_num_dims=3)), 1.3, 0.6).to(dtype)


def _product(engine: str, kernel: Callable[[], Kernel], dtype: torch.dtype, n: int = N, d: int = 3) -> Values:
    """Products with K, with wide and tall parts of it, and all gradients."""
    chosen, x, z = kernel().to(dtype), points(n, d).to(dtype).requires_grad_(), points(5, d, seed=3).to(dtype)
    square = KernelMatrix.of(chosen, x, engine=engine)
    tall, wide = KernelMatrix.of(chosen, x, z, engine=engine), KernelMatrix.of(chosen, z, x, engine=engine)
    v, u = normal(n, 2, seed=1).to(dtype), normal(5, 2, seed=2).to(dtype)
    found = {"square": square @ v, "tall": tall @ u, "wide": wide @ v}
    sum((value * value.detach().cos()).sum() for value in found.values()).backward()
    named = {name: p.grad for name, p in chosen.named_parameters() if p.grad is not None}
    assert named and x.grad is not None
    return {**{name: value.detach() for name, value in found.items()}, "of x": x.grad, **named}


def _batch() -> Values:
    x = torch.stack([points(N, seed=seed) for seed in (0, 1)]).requires_grad_()
    kernel = ScaleKernel(RBFKernel(batch_shape=torch.Size([2])), batch_shape=torch.Size([2])).to(torch.float64)
    value = KernelMatrix.of(kernel, x, engine="tiled") @ normal(2, N, 3, seed=1)
    (value * value.detach().cos()).sum().backward()
    assert x.grad is not None
    return {"value": value.detach(), "of x": x.grad}


def _polynomial() -> Kernel:
    return ScaleKernel(PolynomialKernel(power=2))


def _targets(n: int = N, dtype: torch.dtype = torch.float64) -> Tensor:
    x = points(n)
    return ((x @ (3 * normal(3, 2, seed=2))).sin() + 0.2 * normal(n, 2, seed=1)).to(dtype)


def _chosen() -> Values:
    """Inducing points."""
    return {"rpcholesky": choose_inducing_points(_kernel(), points(N), 12, "rpcholesky").points}


def _full(solver: Any, dtype: torch.dtype = torch.float64, n: int = N, **options: Any) -> Values:
    noise = torch.linspace(0.04, 0.06, n, dtype=dtype)
    problem = FullProblem(_kernel(dtype), points(n).to(dtype), _targets(n, dtype), noise)
    if not isinstance(solver, Cholesky):
        options["held_out"] = (points(10, seed=5).to(dtype), _targets(10, dtype))
    with quiet():  # a solve that ends early has come as far as that of one rank
        solution = solver.solve(problem, **options)
    errors = [
        one.error for one in solution.report.held_out
    ]  # those before the last are of iterates that rounding moves
    return {"value": solution.value, **({"held out": errors[-1]} if errors else {})}


def _preconditioned(choice: Preconditioner) -> Values:
    """A few iterations, whose iterate is another with another preconditioner."""
    return _full(ConjugateGradients(tol=1e-12, max_iterations=4), preconditioner=choice)


def _near_and_far(n: int, d: int) -> Values:
    """All that is made of a full-scale preconditioner, and its gradients."""
    kernel, x = set_scales(MaternKernel(nu=1.5), None, 0.6).double(), points(n, d).requires_grad_()
    matrix, noise = KernelMatrix.of(kernel, x, engine="tiled"), torch.linspace(0.04, 0.06, n, dtype=torch.float64)
    choice = FullScale(rank=min(n, 20), neighbors=6)
    built: Any = PreconditionerCache(choice).get(matrix, noise.requires_grad_(), differentiable=True)
    normals = normal(built.rank, 3, seed=3), normal(n, 3, seed=4)
    vectors = normal(n, 4), normal(1, 4, seed=1), normal(n, 3, seed=2), *normals, torch.tensor(0.7)
    result = built.sampled_derivative(built.tensors, *vectors)
    live = [(tensor, g) for tensor, g in zip(built.tensors, result, strict=True) if g is not None]
    wanted = {"of x": x, "of noise": noise, **dict(kernel.named_parameters())}
    gradients = torch.autograd.grad([t for t, _ in live], list(wanted.values()), [g for _, g in live])
    found = {"inverse": built.apply_inverse(vectors[0]), "samples": built.sample(*normals)}
    found |= {"determinant": built.log_determinant(), "diagonal": built.inverse_diagonal()}
    return {**found, **dict(zip(wanted, gradients, strict=True))}


def _inducing(solver: Any, dtype: torch.dtype = torch.float64, noise: float = 0.05) -> Values:
    x = points(N).to(dtype)
    problem = InducingPointProblem(_kernel(dtype), x, _targets(N, dtype), noise, x[:20])
    options = {} if isinstance(solver, QR) else {"held_out": (points(10, seed=5).to(dtype), _targets(10, dtype))}
    with quiet():
        return {"value": solver.solve(problem, **options).value}


def _learner(**options: Any) -> DoublyStochastic:
    options = {"num_features": 64, "block_size": 16, "batch_size": 20, "epochs": 2, **options}
    if options.pop("streamed", False):
        del options["batch_size"]
    return DoublyStochastic(**options)


def _features(solver: DoublyStochastic) -> Values:
    held_out = points(10, seed=5), _targets(10)
    solution = solver.solve(RandomFeatureProblem(_kernel(), points(N), _targets(), 0.05), held_out=held_out)
    work = torch.tensor(list(solution.report.work.values()), dtype=torch.float64)
    return {"value": solution.value, "history": solution.report.history, "work": work}


def _labels() -> Values:
    """Of two classes, a stream whose last batch has fewer rows than there are ranks."""
    x, y = points(N), (_targets()[:, 0] > 0).long()
    stream = [(x[part], y[part]) for part in (slice(0, 50), slice(50, 100), slice(100, N))]
    problem = RandomFeatureProblem(_kernel(), stream, None, 0.05, "logistic", rows=N)
    return {"value": _learner(streamed=True, epochs=1).solve(problem).value}


def _random_feature_model() -> Values:
    """Learning by samples and by a batch more; its posterior, which every rank computes by itself."""
    parts = gpytorch.likelihoods.GaussianLikelihood().double(), gpytorch.means.ZeroMean(), _kernel()
    model = RandomFeatureGP(*parts, _learner(), variance="samples", variance_samples=8)
    model.learn(points(N), _targets()[:, 0])
    model.partial_fit(points(N, seed=3), _targets()[:, 0])
    posterior = model.eval()(points(10, seed=5))
    return {"mean": posterior.mean.detach(), "variance": posterior.variance.detach()}


class _Model(gpytorch.models.ExactGP):
    def __init__(self, x: Tensor, y: Tensor, sums: bool = False) -> None:
        super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
        self.mean_module, self.covar_module = gpytorch.means.ConstantMean(), _kernel()
        if sums:
            self.covar_module += ScaleKernel(RBFKernel())
        self.double()
        self.likelihood.noise = 0.05

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def _model(sums: bool = False, **options: Any) -> _Model:
    return sketchgp.accelerate(_Model(points(N), _targets()[:, 0], sums), **options)


def _density(**options: Any) -> Values:
    """The marginal likelihood by probes and a solve, and all of its gradients."""
    model = _model(**options).train()
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    with iterative(tol=1e-12):
        loss = -mll(model(points(N)), _targets()[:, 0])
        loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


def _vecchia() -> Values:
    """Vecchia's density, and its gradients; that of the mean is zero, which each loss finds."""
    model = _model().train()
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    value = Objective(model, mll, Vecchia(FullScale(rank=0, neighbors=5))).evaluate().value
    gradients = {name: p.grad for name, p in model.named_parameters() if "mean" not in name}
    return {"value": torch.tensor(value, dtype=torch.float64), **gradients}


def _posterior(variance: str, **options: Any) -> Values:
    model = _model(variance=variance, **options).eval()
    with iterative(tol=1e-12), torch.no_grad(), quiet():
        posterior = model(points(10, seed=5))
        return {"mean": posterior.mean, "variance": posterior.variance}


def _read_later(variance: str) -> Values:
    """A posterior that is looked at when the block has ended, and a gradient."""
    model = _model(variance=variance).eval()
    with iterative(tol=1e-12):
        posterior = model(points(10, seed=5))

    def read() -> Tensor:
        with iterative(tol=1e-12), quiet():
            return posterior.variance.detach()

    return {"mean": posterior.mean.detach(), "variance": read, "again": lambda: _posterior(variance)["variance"]}


def _fit(**options: Any) -> Values:
    model = _model()
    with iterative(tol=1e-12, probes=5), quiet():
        history = sketchgp.fit(model, iterations=2, progress=False, **options)
    return {"losses": torch.tensor(history.losses), **{name: p.detach() for name, p in model.named_parameters()}}


def _noise_path() -> Values:
    model = _model(preconditioner=RPCholesky(rank=70)).eval()
    with iterative(tol=1e-12), quiet():
        path = sketchgp.noise_path(model, [0.1, 0.05], exact=False, num_probes=4, progress=False)
        one = sketchgp.leave_one_out(model, exact=False, num_probes=4, progress=False)
    return {"density": path.mean_log_density, "likelihood": path.log_marginal_likelihood, "mean": one.mean}


def _inducing_model() -> Values:
    """A fit, and a posterior."""
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    x, y = points(N), _targets()[:, 0]
    options = {"inducing_points": x[:15].clone(), "solver": KRILL(tol=1e-11)}
    model = sketchgp.InducingPointGP(x, y, likelihood, gpytorch.means.ConstantMean(), _kernel(), **options).double()
    with quiet():
        history = sketchgp.fit(model, iterations=2, progress=False)
    posterior = model.eval()(points(10, seed=5))
    named = {name: p.detach() for name, p in model.named_parameters()}
    mean, variance = posterior.mean.detach(), posterior.variance.detach()
    return {"losses": torch.tensor(history.losses), "mean": mean, "variance": variance, **named}


def _rank() -> int:
    """0 outside of a block."""
    shards = in_force()
    return 0 if shards is None else shards.rank


ALIKE: dict[str, Callable[[], Values]] = {  # what gives the same on any number of ranks
    "tiled": lambda: _product("tiled", _kernel, torch.float64),
    "dense": lambda: _product("dense", _kernel, torch.float64),
    "generic": lambda: _product("tiled", _polynomial, torch.float64),
    "one row": lambda: _product("tiled", _kernel, torch.float64, n=1),
    "batch": _batch,
    "gradients": lambda: _full(ConjugateGradients(tol=1e-12)),
    "gradients-float32": lambda: _full(ConjugateGradients(tol=1e-4), torch.float32, preconditioner=RPCholesky(rank=20)),
    "posterior": lambda: _full(ConjugateGradients(tol="posterior"), preconditioner=RPCholesky(rank=20)),
    "posterior-two rows": lambda: _full(ConjugateGradients(tol="posterior"), n=2, preconditioner=RPCholesky(rank=1)),
    "block": lambda: _preconditioned(RPCholesky(rank=30, method="block")),
    "nystrom": lambda: _preconditioned(Nystrom(rank=20)),
    "full scale": lambda: _preconditioned(FullScale(rank=20, neighbors=5)),
    "full scale-parts": lambda: _near_and_far(N, 3),
    "full scale-many features": lambda: _near_and_far(N, 8),
    "full scale-two rows": lambda: _near_and_far(2, 3),
    "askotch": lambda: _full(ASkotch(block_size=25, max_passes=3)),
    "askotch-float32": lambda: _full(ASkotch(block_size=25, max_passes=3), torch.float32),
    "skotch": lambda: _full(Skotch(block_size=25, max_passes=3)),
    "eigenpro2": lambda: _full(EigenPro2(block_size=25, subsample_size=50, max_passes=3)),
    "cholesky": lambda: _full(Cholesky()),
    "inducing points": _chosen,
    "krill": lambda: _inducing(KRILL(tol=1e-11)),
    "falkon": lambda: _inducing(Falkon(tol=1e-11)),
    "qr": lambda: _inducing(QR()),
    "nystrom pcg": lambda: _inducing(NystromPCG(tol=1e-11)),
    "sketchysaga": lambda: _inducing(SketchySAGA(max_epochs=3)),
    "eigenpro3": lambda: _inducing(EigenPro3(epochs=2), noise=0.0),
    "eigenpro4": lambda: _inducing(EigenPro4(epochs=2)),
    "doubly stochastic": lambda: _features(_learner()),
    "doubly stochastic-labels": _labels,
    "random feature model": _random_feature_model,
    "density": _density,
    "density-sum": lambda: _density(sums=True),
    "density-gaussian": lambda: _density(preconditioner=Nystrom(rank=60)),
    "vecchia": _vecchia,
    "density-full scale": lambda: _density(preconditioner=FullScale(rank=20, neighbors=5)),
    "exact": lambda: _posterior("exact"),
    "exact-full scale": lambda: _posterior("exact", preconditioner=FullScale(rank=20, neighbors=5)),
    "low rank": lambda: _posterior("low_rank"),
    "samples": lambda: _posterior("samples", variance_samples=8),
    "read later": lambda: _read_later("exact"),
    "mean by askotch": lambda: _posterior("exact", solver=ASkotch(block_size=50, max_passes=3)),
    "noise path": _noise_path,
    "inducing model": _inducing_model,
    "fit": _fit,
}


IN_THREE = (  # of these, what 3 ranks are asked for; 2 are asked for the others, and for those of IN_BOTH
    "tiled", "dense", "one row", "gradients", "posterior-two rows", "askotch", "askotch-float32", "krill", "eigenpro3",
    "doubly stochastic", "doubly stochastic-labels", "density", "low rank", "full scale-parts", "full scale-two rows",
    "density-full scale",
)  # fmt: skip
IN_BOTH = ("tiled",)
ASKED = {2: tuple(name for name in ALIKE if name not in IN_THREE or name in IN_BOTH), 3: IN_THREE}
CASES = [(name, count) for count, names in ASKED.items() for name in names]
ALONE = ("cholesky",)  # what every rank computes by itself


def _of_others(data: float = 0.0, lengthscale: float = 0.6, dtype: torch.dtype = torch.float64, n: int = N) -> Values:
    """A product on rank 0, and with something else on the others."""
    if _rank() == 0:
        data, lengthscale, dtype, n = 0.0, 0.6, torch.float64, N
    x = points(n)
    x[3, 1] += data
    kernel = set_scales(RBFKernel(), None, lengthscale).to(dtype)
    return {"value": KernelMatrix.of(kernel, x.to(dtype), engine="tiled") @ normal(n, 1).to(dtype)}


def _raises() -> Values:
    matrix = KernelMatrix.of(_kernel(), points(N), engine="tiled")
    matrix @ normal(N, 1)
    if _rank() == 1:
        raise ZeroDivisionError("one over nought")
    return {"value": matrix @ normal(N, 1)}


def _raises_in_a_step() -> Values:
    """Where a block's inverse is applied, of which the others hear no word before they wait for what it gives."""

    def raises(*_: Any) -> Tensor:
        raise ZeroDivisionError("one over nought")

    with pytest.MonkeyPatch.context() as patched:
        if _rank() == 1:
            patched.setattr("sketchgp.solvers.full.blocks.cholesky_solve", raises)
        return {"value": ASkotch(block_size=20).solve(FullProblem(_kernel(), points(N), _targets(), 0.05)).value}


def _elsewhere() -> Values:
    matrix = KernelMatrix.of(_kernel(), points(N), engine="tiled")
    return {"value": matrix @ normal(N, 1 if _rank() == 0 else 2)}


def _iterations(report: SolveReport) -> Values:
    return {"iterations": torch.tensor(report.iterations), "reason": torch.tensor(list(Reason).index(report.reason))}


def _callbacks() -> Values:
    """Rank 0 asks for an end after three iterations, the others at once."""
    problem = FullProblem(_kernel(), points(N), _targets(), 0.05)
    solver = ConjugateGradients(tol=1e-12, max_seconds=1e4)
    with quiet():
        solution = solver.solve(problem, None, callback=lambda now: _rank() == 1 or now.iteration == 3)
    return {"value": solution.value, **_iterations(solution.report)}


def _between_windows() -> Values:
    """Rank 1 is interrupted in a step that closes no window, of the four that a pass has."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    drawn, steps = InvertedBlocks.draw, [0]

    def draw(self: InvertedBlocks, generator: torch.Generator) -> Any:
        steps[0] += 1
        if _rank() == 1 and steps[0] == 6:
            os.kill(os.getpid(), signal.SIGINT)
        return drawn(self, generator)

    with quiet(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(InvertedBlocks, "draw", draw)
        solution = ASkotch(block_size=26).solve(FullProblem(_kernel(), points(N), _targets(), 0.05))
    return {"value": solution.value, **_iterations(solution.report)}


def _interrupts() -> Values:
    """Rank 1 is interrupted."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    solver = ConjugateGradients(tol=1e-12, max_seconds=1e4)
    kill = lambda now: os.kill(os.getpid(), signal.SIGINT) if _rank() == 1 and now.iteration == 3 else None  # noqa: E731
    with quiet():
        solution = solver.solve(FullProblem(_kernel(), points(N), _targets(), 0.05), None, callback=kill)
    return {"value": solution.value, **_iterations(solution.report)}


def _other_targets() -> Values:
    problem = FullProblem(_kernel(), points(N), _targets() + 1e-12 * _rank(), 0.05)
    return {"value": ConjugateGradients().solve(problem).value}


def _other_streams() -> Values:
    """Batches that come in another order on rank 1, but for the first."""
    x, y = points(N), _targets()
    parts = [slice(0, 20), *(slice(20, 60), slice(60, N))[:: -1 if _rank() == 1 else 1]]
    stream = [(x[part], y[part]) for part in parts]
    return {"value": _learner(streamed=True).solve(RandomFeatureProblem(_kernel(), stream, None, 0.05, rows=N)).value}


def _other_batches() -> Values:
    model = RandomFeatureGP(gpytorch.likelihoods.GaussianLikelihood(), gpytorch.means.ZeroMean(), _kernel(), _learner())
    model.partial_fit(points(N), _targets()[:, 0])
    model.partial_fit(points(N, seed=_rank()), _targets()[:, 0])
    return {}


def _other_fits() -> Values:
    """Of so few rows each rank factorizes by itself."""
    model = _model()
    model.mean_module.constant.data += 1e-12 * _rank()
    sketchgp.fit(model, iterations=2, progress=False)
    return {}


def _leaves() -> Values:
    """Rank 1 has nothing more to do, and the others have."""
    return {} if _rank() == 1 else {"value": KernelMatrix.of(_kernel(), points(N), engine="tiled") @ normal(N, 1)}


def _primitives() -> Values:
    """What each rank gets is the same; what they give depends on the rank."""
    shards = in_force()
    assert shards is not None
    own = points(N)[shards.span(N)]
    return {
        "gathered": shards.gather(own, N),
        "vector": shards.gather(own[:, 0], N, dim=-1),
        "nothing": shards.gather(own[:0, :0], 0),
        "sum": shards.sum(torch.tensor([1.0, float(shards.rank)])),
        "rows": shards.rows(own, torch.tensor([100, 3, 50, 3]), N),
        "least": torch.tensor(shards.agree(shards.rank + 0.1, min)),
        "first": torch.tensor(shards.agree(shards.rank + 0.1)),
        "same": shards.same(torch.tensor([float(shards.rank)])),
    }


FACTORS = {
    "RPCholesky": RPCholesky(rank=20),
    "Nystrom": Nystrom(rank=20),
    "uniform": Nystrom(rank=20, sketch="uniform"),
    "NystromEigenPro": NystromEigenPro(rank=20),
}


def _factor(choice: Preconditioner) -> LowRankPlusDiagonal:
    matrix = KernelMatrix.of(_kernel(), points(N), engine="tiled")
    return choice.build(matrix, torch.linspace(0.03, 0.05, N, dtype=torch.float64))


def _live_factor(choice: Preconditioner) -> LowRankPlusDiagonal:
    matrix = KernelMatrix.of(_kernel(), points(N), engine="tiled")
    return PreconditionerCache(choice).get(matrix, torch.full((N,), 0.04, dtype=torch.float64), differentiable=True)


def _shares() -> Values:
    """How many rows of each F a rank holds, where it is to be differentiated, too, and whether F F^T is that of one
    rank."""
    found = {}
    for name, choice in FACTORS.items():
        built, live = _factor(choice), _live_factor(choice)
        for one in (built.factor, live.factor):
            assert isinstance(one, ShardedRows)
            assert len(one.own) == one.span.stop - one.span.start
        found |= {f"{name} own": torch.tensor(len(built.factor.own)), name: built.to_dense()}
    near: Any = _live_factor(FullScale(rank=20))
    assert all(isinstance(one, ShardedRows) for one in (near.factor, near.weighted_features))
    return found


def _vectors(solver: Any, **options: Any) -> Values:
    """The rows of all vectors, of 7 columns as the targets, that are in memory between two windows."""
    seen: list[Any] = []

    def look(now: sketchgp.Progress) -> None:
        if len(seen) != 1:  # the second time only
            return seen.append(None)
        sizes = held()
        for _ in range(5):  # a thread of gloo may not have let go of the last message yet
            time.sleep(0.01)
            sizes &= held()
        seen.append(torch.tensor(sorted(rows for _, rows in sizes)))

    def held() -> set[tuple[int, int]]:
        like = [t for t in gc.get_objects() if type(t) is Tensor and t.shape[1:] == (7,) and len(t) >= N // max(COUNTS)]
        return {(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes() // (8 * 7)) for t in like}

    gc.freeze()  # what there is already is not looked through
    problem = FullProblem(_kernel(), points(N), normal(N, 7, seed=4), 0.05)
    with quiet():
        solver.solve(problem, callback=look, **options)
    gc.unfreeze()
    return {"rows": seen[1]}


def _nested() -> Values:
    with sharded():
        return {}


def _used_up() -> Values:
    """A loss whose preconditioner is shared out has its gradient inside of the block."""
    model = _model().train()
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    with iterative(tol=1e-12):
        loss = -mll(model(points(N)), _targets()[:, 0])
    return {"loss": lambda: loss.backward()}


def _some() -> Values:
    """Blocks of all ranks but rank 1, one after the other; it works by itself."""
    members = [rank for rank in range(dist.get_world_size()) if rank != 1]
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return _product("tiled", _kernel, torch.float64)
    for _ in range(2):
        with sharded(group) as shards:
            found = dict(_product("tiled", _kernel, torch.float64))
    return {**found, "count": torch.tensor(shards.count)}


def _dies() -> Values:
    if _rank() == 1:
        os._exit(0)
    return {"value": KernelMatrix.of(_kernel(), points(N), engine="tiled") @ normal(N, 1)}


APART: dict[str, Callable[[], Values]] = {
    "primitives": _primitives,
    "data": lambda: _of_others(data=1e-12),
    "hyperparameters": lambda: _of_others(lengthscale=0.6000001),
    "dtypes": lambda: _of_others(dtype=torch.float32),
    "sizes": lambda: _of_others(n=N - 1),
    "targets": _other_targets,
    "raises": _raises,
    "raises in a step": _raises_in_a_step,
    "callbacks": _callbacks,
    "interrupts": _interrupts,
    "between windows": _between_windows,
    "streams": _other_streams,
    "batches": _other_batches,
    "fits": _other_fits,
    "nested": _nested,
    "used up": _used_up,
    "elsewhere": _elsewhere,
    "leaves": _leaves,
    "after": lambda: _product("tiled", _kernel, torch.float64),  # once more, after all of that
}
IN_TWO = (  # of these, what 2 ranks alone are asked for
    "hyperparameters", "dtypes", "sizes", "targets", "interrupts", "between windows", "streams", "batches", "fits",
    "nested", "used up",
)  # fmt: skip
SHARES: dict[str, Callable[[], Values]] = {  # asked of 3 ranks
    "shares": _shares,
    "vectors": lambda: _vectors(ConjugateGradients(tol=1e-8), preconditioner=RPCholesky(rank=20)),
    "vectors-askotch": lambda: _vectors(ASkotch(block_size=20, max_passes=3)),
    "vectors-eigenpro2": lambda: _vectors(EigenPro2(block_size=20, subsample_size=50, max_passes=6)),
}


# --- tests ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each case gave: ``found[count][rank][case]``."""
    directory = tmp_path_factory.mktemp("ranks")
    run_script(__file__, directory, limit=300)
    return {count: [torch.load(directory / f"{count}-{rank}.pt") for rank in range(count)] for count in COUNTS}


every_count = pytest.mark.parametrize("count", COUNTS)


def groups(found, case):
    """What each group of ranks gave, of those that were asked for a case."""
    return [found[count] for count in COUNTS if count == 2 or case not in IN_TWO]


@pytest.mark.parametrize(("case", "count"), CASES)
def test_the_answer_is_that_of_one_rank(found, case, count):
    expected = {name: value if torch.is_tensor(value) else value() for name, value in ALIKE[case]().items()}
    for rank, cases in enumerate(found[count]):
        result = cases[case]
        assert "error" not in result, result["trace"]
        assert result["values"].keys() == expected.keys()
        assert (result["sent"] > 0) == (case not in ALONE)
        for name, value in result["values"].items():
            close = 1e-4 if "float32" in case else 1e-10
            assert relative(value, expected[name]) < close, name
            assert torch.equal(value, found[count][0][case]["values"][name]), f"rank {rank} has other bits of {name}"


@every_count
def test_primitives(found, count):
    for cases in found[count]:
        assert "error" not in cases["primitives"], cases["primitives"]["trace"]
        values = cases["primitives"]["values"]
        assert torch.equal(values["gathered"], points(N))
        assert torch.equal(values["vector"], points(N)[:, 0])
        assert values["nothing"].shape == (0, 0)
        assert values["sum"].tolist() == [count, count * (count - 1) / 2]
        assert torch.equal(values["rows"], points(N)[[100, 3, 50, 3]])
        assert values["least"] == pytest.approx(0.1)
        assert values["first"] == pytest.approx(0.1)
        assert values["same"] == 0.0


@each(
    ("case", "what"),
    [
        ("data", "the inputs"),
        ("targets", "the targets"),
        ("streams", "batch 1 of epoch 0 of the stream"),
        ("batches", "the batch"),
        ("fits", "the parameters"),
        ("hyperparameters", "the kernel and its hyperparameters"),
        ("dtypes", "its dtype (torch.float32 and torch.float64)"),
        ("sizes", f"the shape of the kernel matrix (({N - 1}, {N - 1}), with itself"),
    ],
)
def test_ranks_that_differ_are_refused_everywhere(found, case, what):
    for cases in itertools.chain(*groups(found, case)):
        assert cases[case]["kind"] == "InputError"
        assert f"rank 1 differs from rank 0 in {what}" in cases[case]["error"]


@every_count
@each("case", ["raises", "raises in a step"])
def test_a_rank_that_raises_makes_all_raise(found, case, count):
    for rank, cases in enumerate(found[count]):
        result = cases[case]
        assert result["kind"] == ("ZeroDivisionError" if rank == 1 else "RankError")
        assert "one over nought" in result["error"]
        assert result["seconds"] < 10


@each(
    ("case", "reason", "steps"),
    [
        ("callbacks", Reason.CALLBACK, 3),
        ("interrupts", Reason.INTERRUPTED, 3),
        ("between windows", Reason.INTERRUPTED, 7),
    ],
)
def test_all_ranks_end_together(found, case, reason, steps):
    for first, cases in [(group[0], cases) for group in groups(found, case) for cases in group]:
        assert "error" not in cases[case], cases[case]["trace"]
        values = cases[case]["values"]
        assert values["iterations"] == steps
        assert list(Reason)[values["reason"]] == reason
        assert torch.equal(values["value"], first[case]["values"]["value"])


def test_a_rank_holds_its_share_of_a_factor(found):
    expected = {name: _factor(choice).to_dense() for name, choice in FACTORS.items()}
    for rank, cases in enumerate(found[3]):
        assert "error" not in cases["shares"], cases["shares"]["trace"]
        for name, dense in expected.items():
            assert cases["shares"]["values"][f"{name} own"] == N // 3 + (rank < N % 3)
            assert relative(cases["shares"]["values"][name], dense) < 1e-10, name


@each(("case", "least"), [("vectors", 5), ("vectors-askotch", 4), ("vectors-eigenpro2", 3)])
def test_a_rank_holds_its_share_of_vectors(found, case, least):
    for rank, cases in enumerate(found[3]):
        assert "error" not in cases[case], cases[case]["trace"]
        *own, targets = cases[case]["values"]["rows"].tolist()
        assert targets == N
        assert len(own) >= least
        assert set(own) == {N // 3 + (rank < N % 3)}


@each(
    ("case", "kind", "words"),
    [("nested", "InputError", "inside of another one"), ("used up", "RankError", "their block has ended")],
)
def test_misuse_of_the_block_is_told(found, case, kind, words):
    for cases in itertools.chain(*groups(found, case)):
        assert cases[case]["kind"] == kind
        assert words in cases[case]["error"]


@every_count
def test_a_block_of_some_ranks(found, count):
    expected = _product("tiled", _kernel, torch.float64)
    for rank, cases in enumerate(found[count]):
        values = cases[OUTSIDE]
        assert rank == 1 or values["count"] == count - 1
        assert all(relative(values[name], value) < 1e-10 for name, value in expected.items())


@every_count
@each(("case", "place"), [("elsewhere", "a sum of"), ("leaves", "the end of sharded()")])
def test_ranks_at_different_places_are_told(found, case, place, count):
    for cases in found[count]:
        assert cases[case]["kind"] == "RankError"
        assert "rank 1 at" in cases[case]["error"]
        assert place in cases[case]["error"]


@every_count
def test_the_next_block_is_as_if_nothing_had_happened(found, count):
    for cases in found[count]:
        assert torch.equal(cases["after"]["values"]["square"], cases["tiled"]["values"]["square"])


@every_count
def test_a_rank_that_dies_makes_the_others_raise(found, count):
    for rank in range(count):
        if rank != 1:
            result = found[count][rank][LAST]
            assert result["kind"] == "RankError"
            assert "gone" in result["error"]
            assert result["seconds"] < 10


def test_one_process_is_left_as_it_is():
    expected = _product("tiled", _kernel, torch.float64)
    with sharded() as shards:
        assert (shards.rank, shards.count, in_force()) == (0, 1, None)
        result = _product("tiled", _kernel, torch.float64)
    assert all(torch.equal(result[name], value) for name, value in expected.items())


def test_other_processes_without_a_group_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="WORLD_SIZE is 2"), sharded():
        pass


def test_a_rank_error_is_one_of_ours():
    assert issubclass(RankError, RuntimeError)


if __name__ == "__main__":
    alike = {count: {name: ALIKE[name] for name in names} for count, names in ASKED.items()}
    one_thread()
    for warm in (_density, _fit):  # children inherit what is imported by it
        warm()
    of_all = {name: case for name, case in APART.items() if name not in IN_TWO}
    start({2: {**alike[2], **APART}, 3: {**alike[3], **of_all, **SHARES}}, _some, _dies, Path(sys.argv[1]))
