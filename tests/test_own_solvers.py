"""Solvers of the user's own: what keeps ``sketchgp.solvers.Solver`` can be given to models."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import gpytorch
import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ConstantMean

import sketchgp
from cases import each
from gp_models import SOLVED, Plain, data, dense, iterative, posterior
from problems import normal, points, relative
from sketchgp import FullProblem, InducingPointProblem, InputError, Solution
from sketchgp.solvers import FULL_SOLVERS, INDUCING_POINT_SOLVERS, BlockMethod, BlockSolver, Solver, SystemSolver


@dataclass(frozen=True)
class Dense:
    """Solves any full problem by torch."""

    times: float = 1.0
    problem_type: ClassVar[type[FullProblem]] = FullProblem
    name: ClassVar[str] = "Dense"

    def validate(self, problem: FullProblem) -> None:
        if len(problem.x) > 500:
            raise InputError("Dense takes 500 points.")

    def solve(self, problem: FullProblem) -> Solution:
        self.validate(problem)
        matrix = problem.kernel(problem.x).to_dense().detach() + problem.noise_vector.diag()
        value = torch.linalg.solve(matrix, problem.y) * self.times
        return Solution(value, _report(self.name, sketchgp.Cholesky().solve(problem).report))


class WithRun(Dense):
    """Solves any system too."""

    def run(self, system: Any, rhs: torch.Tensor) -> Any:
        value, report = sketchgp.Cholesky().run(system, rhs)
        return value, _report("WithRun", report)


@dataclass(frozen=True)
class Normal:
    """Solves the normal equations by torch."""

    shape: tuple[int, ...] | None = None
    times: Any = 1.0
    problem_type: ClassVar[type[InducingPointProblem]] = InducingPointProblem
    name: ClassVar[str] = "Normal"

    def validate(self, problem: InducingPointProblem) -> None:
        problem.tensors("Normal()")

    def solve(self, problem: InducingPointProblem) -> Solution:
        self.validate(problem)
        tall = problem.kernel(problem.x, problem.inducing_points).to_dense().detach().double()
        square = problem.kernel(problem.inducing_points).to_dense().detach().double()
        value = torch.linalg.solve(tall.mT @ tall + problem.level * square, tall.mT @ problem.y.double()) * self.times
        value = value if self.shape is None else torch.zeros(self.shape)
        return Solution(value, _report(self.name, sketchgp.QR().solve(problem).report))


@dataclass(frozen=True, kw_only=True)
class GaussSeidel(BlockSolver):
    """Random block Gauss-Seidel: each step solves exactly for the weights of some rows."""

    def method(self, system: Any, block_size: int) -> BlockMethod:
        return _GaussSeidel(self, system, block_size)


class _GaussSeidel(BlockMethod):
    def step(self, r: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.randperm(self.system.n, generator=generator)[: self.block_size]
        g = self.system.residual(rows, self.value, r)  # ((K + noise) w - r)[rows]
        block = self.system.block(rows, rows) + self.system.noise[rows].diag()
        self.value[rows] -= torch.linalg.solve(block, g)
        return rows, g


def test_a_blockwise_solver_of_ones_own(tmp_path):
    """Two classes of the package are all that it takes: checkpoints, budgets and reports come with them."""
    x, y, _ = data()
    problem = FullProblem(ScaleKernel(RBFKernel()).double(), x, y, 5.0)
    solver = GaussSeidel(block_size=len(x) // 4, tol=1e-6)
    solution = solver.solve(problem)
    matrix = problem.kernel(x).to_dense().detach() + 5.0 * torch.eye(len(x), dtype=x.dtype)
    assert solution.report.converged and solution.report.solver == "GaussSeidel"
    assert relative(solution.value, torch.linalg.solve(matrix, y)) < 1e-5
    kept = dataclasses.replace(solver, checkpoint=tmp_path / "solve", every=1e-9)
    with pytest.warns(sketchgp.ConvergenceWarning):
        dataclasses.replace(kept, max_passes=solution.report.passes / 2).solve(problem)
    assert torch.equal(kept.solve(problem).value, solution.value)


def _report(name: str, report: Any) -> Any:
    return dataclasses.replace(report, solver=name)


def _model(kernel: Any = None) -> tuple[Any, torch.Tensor]:
    x, y, test = data()
    likelihood = GaussianLikelihood()
    model = Plain(x, y, likelihood, ScaleKernel(RBFKernel()) if kernel is None else kernel).double()
    likelihood.noise = 0.05
    return model, test


def _sparse(solver: Any, columns: int | None = None, variance: str = "auto") -> sketchgp.InducingPointGP:
    x = points(60)
    y = x.sum(dim=1).sin() + 0.1 * normal(60)
    y = y if columns is None else torch.stack([y] * columns, dim=1)
    kernel = ScaleKernel(MaternKernel(nu=1.5))
    z = points(8, seed=3)
    return (
        sketchgp.InducingPointGP(x, y, GaussianLikelihood(), ConstantMean(), kernel, z, solver, variance)
        .double()
        .eval()
    )


@pytest.mark.parametrize(
    "kernel",
    [None, ScaleKernel(MaternKernel(nu=2.5, active_dims=[1])), RBFKernel(active_dims=[0]) + RBFKernel()],
    ids=["plain", "of one dimension", "a sum"],
)
def test_a_model_s_mean_is_its_solver_s(kernel):
    model, test = _model(kernel)
    with dense():
        wanted, wanted_variance = posterior(model, (test,))
    sketchgp.accelerate(model, solver=Dense())
    with iterative(), sketchgp.record_solves() as solves:
        mean, variance = posterior(model, (test,))
    assert "Dense" in {report.solver for report in solves}
    assert {report.solver for report in solves} <= {"Dense", "Cholesky", "ConjugateGradients"}
    assert relative(mean, wanted) < 1e-6 and relative(variance, wanted_variance) < 1e-5
    model.train().eval()
    with iterative():
        found = sketchgp.predict(sketchgp.accelerate(model, solver=Dense(times=2.0)), test, variance=None)
    assert found.report.solver in ("Cholesky", "Dense")
    constant = model.mean_module(test).detach()
    assert relative(found.mean - constant, 2 * (wanted - constant)) < 1e-6


def test_reports_that_a_solver_does_not_record_are_recorded_once():
    class Silent(Dense):
        def solve(self, problem: FullProblem) -> Solution:
            with sketchgp.record_solves():
                solution = super().solve(problem)
            return Solution(solution.value, dataclasses.replace(solution.report, converged=False, solver="Silent"))

    model, test = _model()
    sketchgp.accelerate(model, solver=Silent())
    with iterative(), pytest.warns(sketchgp.ConvergenceWarning), sketchgp.record_solves() as solves:
        sketchgp.predict(model, test, variance=None)
    assert [report.solver for report in solves].count("Silent") == 1


def test_other_covariances_take_a_solver_of_systems():
    case = SOLVED["batch"]
    model, test = case.build()
    with dense():
        wanted, _ = posterior(model, test)
    with iterative(), pytest.raises(InputError, match=r"Dense solves problems of one plain kernel.*SystemSolver"):
        sketchgp.accelerate(model, solver=Dense()).eval()(*test)
    sketchgp.accelerate(model, solver=WithRun())
    with iterative(), sketchgp.record_solves() as solves:
        mean = model.eval()(*test).mean
    assert "WithRun" in {report.solver for report in solves} or solves
    assert relative(mean, wanted) < 1e-8


def test_a_kernel_of_other_parameters_is_not_solved_for():
    """The covariance of the model's prediction strategy is of the old ones; a solver is given the kernel.

    The next call makes a new strategy, and one that is asked by itself is an error.
    """
    model, test = _model()
    sketchgp.accelerate(model, solver=Dense()).eval()
    with iterative(), gpytorch.settings.detach_test_caches(False):
        model(test).mean.sum().backward()  # which has GPyTorch forget the solution
        strategy = model.prediction_strategy
        model.covar_module.raw_outputscale = torch.nn.Parameter(model.covar_module.raw_outputscale.detach() + 1)
        with pytest.raises(InputError, match="parameters changed since its matrix was made"):
            strategy.weights  # noqa: B018
        mean = model(test).mean
        model._clear_cache()
        assert torch.allclose(mean, model(test).mean)


def test_validate_is_the_solver_s_own():
    model, test = _model()
    x, y, _ = data(n=501)
    model.set_train_data(x, y, strict=False)
    with iterative(), pytest.raises(InputError, match="Dense takes 500 points"):
        sketchgp.accelerate(model, solver=Dense()).eval()(test)


@pytest.mark.parametrize("columns", [None, 2])
def test_inducing_point_models_take_one(columns):
    found, wanted = (_sparse(solver, columns) for solver in (Normal(), sketchgp.QR()))
    test = points(5, seed=9)
    assert relative(found(test).mean, wanted(test).mean) < 1e-6
    assert found.solution.report.solver == "Normal"
    twice = _sparse(Normal(times=2.0), columns)
    assert relative(twice(test).mean, 2 * wanted(test).mean) < 1e-6


def test_float32_solutions_are_taken():
    assert bool((_sparse(Normal(shape=(8, 1)))(points(5, seed=9)).mean == 0).all())


def test_pathwise_variances_take_one():
    found, wanted = (_sparse(solver, variance="samples") for solver in (Normal(), sketchgp.QR()))
    test = points(5, seed=9)
    assert relative(found(test).variance, wanted(test).variance) < 1e-5


@each(
    ("solver", "message"),
    [
        (Normal(shape=(7, 1)), r"value of shape \(8, 1\)"),
        (Normal(shape=(8,)), r"value of shape \(8, 1\)"),
        (Normal(times=torch.tensor([[1.0]] * 7 + [[math.nan]])), "NaN or infinity"),
        (Normal(times=torch.tensor([[1.0]] * 7 + [[math.inf]])), "NaN or infinity"),
    ],
    ids=["rows", "columns", "NaN", "infinity"],
)
def test_solutions_that_are_none_are_refused(solver, message):
    with pytest.raises(InputError, match=rf"Normal\.solve.*{message}"):
        _sparse(solver)(points(5, seed=9))


def test_what_is_no_solution_is_refused():
    class Bare(Normal):
        def solve(self, problem: InducingPointProblem) -> Any:
            return super().solve(problem).value

    with pytest.raises(InputError, match=r"Normal\.solve expects to return a Solution"):
        _sparse(Bare())(points(5, seed=9))


class Nameless:
    problem_type = FullProblem

    def solve(self, problem: FullProblem) -> Any: ...


@each(
    ("solver", "message"),
    [
        (Nameless(), "ConjugateGradients.*ASkotch.*has no name and no validate"),
        (Normal(), r"ConjugateGradients\(\).*got.*which is for another problem"),
        (sketchgp.KRILL(), "which is for another problem"),
        (Dense, "solver expects 'auto'"),
        (sketchgp.RPCholesky(), "solver expects 'auto', one of ConjugateGradients"),
    ],
)
def test_what_does_not_keep_the_protocol_is_refused(solver, message):
    model, _ = _model()
    before = type(model)
    with pytest.raises(InputError, match=message):
        sketchgp.accelerate(model, solver=solver)
    assert type(model) is before


def test_inducing_point_models_refuse_the_others():
    with pytest.raises(InputError, match=r"one of QR\(\), KRILL\(\).*got.*which is for another problem"):
        _sparse(Dense())


@pytest.mark.parametrize("kind", [*FULL_SOLVERS, *INDUCING_POINT_SOLVERS], ids=lambda kind: kind.__name__)
def test_all_solvers_keep_the_protocol(kind):
    solver: Solver[Any] = kind()
    x, y = points(30), normal(30)
    kernel = RBFKernel().double()
    full, inducing = FullProblem(kernel, x, y, 0.1), InducingPointProblem(kernel, x, y, 0.1, x[:6])
    right, wrong = (full, inducing) if kind in FULL_SOLVERS else (inducing, full)
    assert solver.problem_type is type(right) and solver.name == kind.__name__
    assert kind.validate.__doc__ and ":raises InputError:" in kind.validate.__doc__
    solver.validate(right)
    with pytest.raises(InputError, match="problem expects"):
        solver.validate(wrong)
    assert isinstance(solver, SystemSolver) == (kind in FULL_SOLVERS)


@each(
    ("solver", "problem"),
    [
        (sketchgp.ASkotch(block_size=31), "full"),
        (sketchgp.KRILL(sketch_size=5), "inducing"),
        (sketchgp.Falkon(counts=torch.ones(5)), "inducing"),
        (sketchgp.NystromPCG(), "stream"),
        (sketchgp.SketchySAGA(block_size=31), "inducing"),
        (sketchgp.QR(), "stream"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_validate_refuses_choices_that_do_not_fit(solver, problem):
    x, y = points(30), normal(30)
    kernel = RBFKernel().double()
    made = {
        "full": FullProblem(kernel, x, y, 0.1),
        "inducing": InducingPointProblem(kernel, x, y, 0.1, x[:6]),
        "stream": InducingPointProblem(kernel, [(x, y)], None, 0.1, x[:6]),
    }[problem]
    with pytest.raises(InputError, match=solver.name) as validated:
        solver.validate(made)
    with pytest.raises(InputError) as solved:
        solver.solve(made)
    assert str(validated.value) == str(solved.value)
