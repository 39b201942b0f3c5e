"""Nystrom PCG against dense float64 algebra, and what "converged" means of solvers that judge predictions."""

from __future__ import annotations

import math

import pytest
import torch
from gpytorch.kernels import MaternKernel, PolynomialKernel, RBFKernel, RQKernel, ScaleKernel

from problems import Largest, normal, points, relative
from sketchgp import KRILL, QR, Falkon, NystromPCG, SketchySAGA
from sketchgp.errors import ConvergenceWarning, InputError
from sketchgp.report import Reason, record_solves
from sketchgp.solvers import InducingPointProblem
from sketchgp.solvers.energy import RemainingEnergy, remaining_change


def make(kernel=None, n=600, m=60, noise=1e-4, columns=None, dtype=torch.float64, heavy=False):
    """Smooth targets with noise; ``heavy``: inputs with outliers, few of which a low-rank preconditioner sees."""
    kernel = ScaleKernel(kernel or RBFKernel()).to(dtype).requires_grad_(False)
    kernel.outputscale, kernel.base_kernel.lengthscale = 1.5, 0.8
    x = points(n, 3)
    if heavy:
        x = x * (1 + (normal(n, 1, seed=5).abs() > 2) * 4 * normal(n, 1, seed=6).abs())
    y = torch.sin(6 * x[:, 0]) + x[:, 1] * x[:, 2]
    if columns:
        y = torch.stack([y * (j + 1) + x[:, j % 3] for j in range(columns)], dim=1)
    y = y + 0.01 * normal(*y.shape, seed=3)
    return InducingPointProblem(kernel, x.to(dtype), y.to(dtype), noise, x[:: n // m][:m].to(dtype).clone())


def furthest(problem, value):
    """The largest distance of predictions from the exact ones in deviations of DTC's posterior, over all of space.

    That is the norm of the error in M = Kzx D^-1 Kxz + Kzz, by a QR factorization of its root.
    """
    kernel, x, z = problem.kernel.double(), problem.x.double(), problem.inducing_points.double()
    weights = torch.ones(len(x), dtype=torch.float64) if problem.weights is None else problem.weights
    tall = kernel(x, z).to_dense() * (weights / problem.level**0.5).unsqueeze(1)
    values, vectors = torch.linalg.eigh(kernel(z, z).to_dense())
    root = values.clamp(min=1e-15 * float(values[-1])).sqrt().unsqueeze(1) * vectors.mT
    stacked = torch.cat([tall, root])
    y = problem.y.reshape(len(x), -1).double() * (weights / problem.level**0.5).unsqueeze(1)
    q, r = torch.linalg.qr(stacked)
    target = q.mT @ torch.cat([y, torch.zeros(len(z), y.shape[1], dtype=torch.float64)])
    return (r @ value.reshape(len(z), -1) - target).norm(dim=0)


@pytest.mark.parametrize(
    ("problem", "solver"),
    [
        (lambda: make(noise=1e-2), NystromPCG(rank=30)),
        (lambda: make(MaternKernel(nu=0.5), columns=3, noise=1e-2), NystromPCG(rank=15, tol=1e-3)),
        (lambda: make(heavy=True, m=100), NystromPCG()),
        (lambda: make(noise=torch.linspace(1e-3, 1e-1, 600)), NystromPCG(rank=40)),
        (lambda: make(noise=1e-2, dtype=torch.float32), NystromPCG(rank=40)),
    ],
    ids=["smooth", "rough", "full rank", "noises", "float32"],
)
def test_what_is_called_converged_predicts(problem, solver):
    one = problem()
    solution = solver.solve(one)
    report = solution.report
    assert report.converged and report.judged == "predictions" and report.max_deviations <= solver.tol == report.tol
    assert bool((furthest(one, solution.value) <= solver.tol).all())
    z, x = one.inducing_points.double(), one.x.double()
    matrix, tall = one.kernel.double()(z, z).to_dense(), one.kernel.double()(x, z).to_dense()
    tall = tall if one.weights is None else tall * one.weights.unsqueeze(1)
    y = one.y.double() if one.weights is None else one.y.double() * one.weights
    rhs = tall.mT @ y.reshape(len(x), -1)
    residual = tall.mT @ (tall @ solution.value.reshape(len(z), -1)) + one.level * matrix @ solution.value.reshape(
        len(z), -1
    )
    residual = (residual - rhs).norm(dim=0) / rhs.norm(dim=0)
    assert torch.allclose(report.residual, residual, rtol=0.1, atol=1e-7 if one.x.dtype == torch.float32 else 1e-9)


@pytest.mark.parametrize("solver", [QR(), KRILL()], ids=["QR", "KRILL"])
def test_where_rounding_of_the_kernel_matrix_moves_predictions(solver):
    """One far row, of a kernel with a heavy tail, looks at eigenvalues of Kzz below roundoff."""
    kernel = ScaleKernel(RQKernel()).double().requires_grad_(False)
    kernel.outputscale, kernel.base_kernel.lengthscale = 1.0, 10.0
    x = points(60, 1)
    y = torch.sin(4 * x[:, 0]) + 0.1 * normal(60, seed=3)
    near = solver.solve(InducingPointProblem(kernel, x, y, 0.01, x[:12].clone())).report
    assert near.converged
    x[-1], y[-1] = -30, 10
    with pytest.warns(ConvergenceWarning, match="rounding of the kernel matrix moves predictions by up to"):
        far = solver.solve(InducingPointProblem(kernel, x, y, 0.01, x[:12].clone())).report
    assert far.reason is Reason.SINGULAR and not far.converged and 0.1 < far.max_deviations < math.inf
    rougher = ScaleKernel(MaternKernel(nu=0.5)).double().requires_grad_(False)
    assert solver.solve(InducingPointProblem(rougher, x, y, 0.01, x[:12].clone())).report.converged


@pytest.mark.parametrize("rank", [None, 20, 5])
def test_kernels_singular_to_working_precision(rank):
    """A few eigenvalues are all that a sketch can see, and others still matter where a prediction extrapolates."""
    for seed in range(6):
        x = points(150, 1, seed=seed)
        kernel = ScaleKernel(RBFKernel()).double().requires_grad_(False)
        kernel.outputscale, kernel.base_kernel.lengthscale = 1.0, 10.0
        y = 6 * (torch.sin(4 * x[:, 0]) + 0.1 * normal(150, seed=seed))
        one = InducingPointProblem(kernel, x, y, 0.01, x[:50].clone())
        solution = NystromPCG(rank=rank).solve(one)
        assert solution.report.converged and solution.report.iterations < 20
        assert bool((furthest(one, solution.value) <= 0.3).all())


@pytest.mark.parametrize("heavy", [False, True])
def test_a_small_residual_is_not_called_converged(heavy):
    """The residual is at its tolerance while predictions are far off."""
    one = make(heavy=heavy, m=100, noise=1e-6)
    solver = SketchySAGA(tol=1e-2, max_epochs=40, rank=10)
    with pytest.warns(ConvergenceWarning, match="error of predictions"):
        solution = solver.solve(one)
    report = solution.report
    assert report.max_residual <= 1e-2 and not report.converged
    assert float(furthest(one, solution.value)) > 100 * solver.deviations
    assert report.max_deviations > solver.deviations
    by_residual = SketchySAGA(tol=1e-2, max_epochs=40, rank=10, deviations=math.inf).solve(one).report
    assert by_residual.converged  # which is what it used to say


def test_conjugate_gradients_by_residual_estimate_predictions_too():
    one = make(noise=1e-3)
    for solver in (KRILL(tol=1e-10), Falkon(tol=1e-6)):
        solution = solver.solve(one)
        report = solution.report
        assert report.converged and report.judged == "residual" and report.tol == solver.tol and report.rank == 0
        assert float(furthest(one, solution.value)) < 3 * report.max_deviations < 10
        assert "posterior deviations" in str(report)


def test_what_remains_of_known_sequences():
    """Errors that fall by a constant factor, or as a power: never far below the truth, and not far above."""
    for error in (lambda k: 0.7**k, lambda k: k**-1.0, lambda k: k**-0.4):
        remaining, estimate = RemainingEnergy(), None
        for k in range(1, 61):
            estimate = float(remaining.add(torch.tensor([error(k) - error(k + 1)], dtype=torch.float64)))
            if 6 <= k < 50:
                assert 0.8 * error(k + 1) < estimate
        assert estimate < 5 * error(61) or error(61) < 1e-8
    times = [4 * 1.5**j for j in range(6)]
    changes = [torch.tensor([a**-0.5 - b**-0.5]) for a, b in zip(times, times[1:], strict=False)]
    assert float(remaining_change(changes)) == pytest.approx(times[-1] ** -0.5, rel=1e-4)
    assert remaining_change(changes[:2]) is None
    assert float(remaining_change([torch.ones(1)] * 3)) > 50  # what does not fall is not over


def test_starts_ends_and_columns():
    one = make(columns=2, noise=1e-2)
    one.y[:, 1] = 0
    first = NystromPCG(rank=50, tol=1e-3).solve(one)
    assert first.report.converged and not first.value[:, 1].any()
    assert relative(first.value, QR().solve(one).value) < 1e-2
    again = NystromPCG(rank=50, seed=1).solve(one, initial=0.99 * first.value)
    assert again.report.converged and float(again.report.history[0].max()) < 0.011
    with record_solves() as solves, pytest.warns(ConvergenceWarning, match=r"predictions unknown .* rank \(now 15\)"):
        short = NystromPCG(rank=15, max_iterations=3).solve(one)
    assert solves == [short.report] and not short.report.converged and "unknown" in str(short.report)
    seen = []
    with pytest.warns(ConvergenceWarning, match="was stopped by the callback"):
        NystromPCG(rank=15).solve(one, callback=lambda iterate: seen.append(iterate.iteration) or len(seen) == 4)
    assert seen == [1, 2, 3, 4]


def test_no_matrix_of_all_points_is_made(many_tiles, monkeypatch):
    monkeypatch.setattr("sketchgp.operators.tall._CPU_ENTRIES", 2000)
    monkeypatch.setattr("sketchgp.preconditioners.row_nystrom._COLUMNS", 8000)
    one = make(n=600, m=200)
    with Largest() as largest, pytest.warns(ConvergenceWarning):
        NystromPCG(rank=10, max_iterations=2).solve(one)
    assert largest.entries <= 12_000  # m^2 = 40,000; n m = 120,000


def test_choices_that_do_not_fit():
    for choices, message in (
        ({"tol": 0}, "tol expects a positive number"),
        ({"rank": 0}, "rank expects a positive integer"),
        ({"max_iterations": True}, "max_iterations expects"),
        ({"seed": "a"}, "seed expects"),
    ):
        with pytest.raises(InputError, match=message):
            NystromPCG(**choices)
    assert "rank 61 was asked for; 60 inducing points have 60" in NystromPCG(rank=61).solve(make()).report.notes
    with pytest.raises(InputError, match="noise above 0"):
        NystromPCG().solve(make(noise=0.0))


@pytest.mark.parametrize("solver", [NystromPCG(rank=20), NystromPCG(), SketchySAGA(max_epochs=20)], ids=repr)
@pytest.mark.filterwarnings("ignore::sketchgp.errors.ConvergenceWarning")
def test_directions_below_the_roundoff_of_the_matrix(solver):
    """The least directions of a kernel of very many times the noise hardly show in the residual."""
    for seed in range(3):
        x = 10 + points(160, 4, seed=seed)
        kernel = ScaleKernel(PolynomialKernel(power=2)).double().requires_grad_(False)
        kernel.outputscale, kernel.base_kernel.offset = 1e5, 0.01
        y = torch.sin(4 * x[:, 0]) + 0.3 * normal(160, seed=seed)
        one = InducingPointProblem(kernel, x, y, 0.1, x[:50].clone())
        solution = solver.solve(one)
        off = float(furthest(one, solution.value))
        assert off <= 0.3 if isinstance(solver, NystromPCG) else not solution.report.converged


@pytest.mark.filterwarnings("ignore::sketchgp.errors.ConvergenceWarning")
def test_directions_in_which_little_has_changed_yet_are_seen():
    """The changes between sweeps alone once said a tenth of the distance."""
    for seed in range(2):
        x = points(600, 3, seed=seed)
        kernel = ScaleKernel(RBFKernel()).double().requires_grad_(False)
        kernel.base_kernel.lengthscale = 0.5
        y = torch.sin(6 * x[:, 0]) * torch.cos(3 * x[:, 1]) + 0.1 * normal(600, seed=seed)
        one = InducingPointProblem(kernel, x, y, 0.01, x[:60].clone())
        solution = SketchySAGA(max_epochs=10).solve(one)
        assert float(solution.report.deviations) >= 0.7 * float(furthest(one, solution.value))
