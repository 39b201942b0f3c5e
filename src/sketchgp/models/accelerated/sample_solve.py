"""The solve behind samples of a posterior: as many columns as there are samples, whose targets no data hold."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from linear_operator import settings
from torch import Tensor

from ...operators.tiles import logger
from ...report import SolveReport
from ...solvers import Budgeted, Cholesky, ConjugateGradients, System
from ...solvers.solver import solve_system
from .acceleration import Acceleration
from .added_diag import AcceleratedAddedDiagLinearOperator
from .mean_solve import evaluating
from .threshold import why_iterative


@torch.no_grad()
def solve_for_samples(
    noisy: AcceleratedAddedDiagLinearOperator, targets: Tensor, index: tuple[int, ...] = ()
) -> tuple[Tensor, SolveReport]:
    """``(K + noise)^-1 targets``, float64, by the solver of the model's mean, to its tolerance.

    With a residual of 1e-3, the default, the error is some percent of a posterior deviation: what matters of a sample
    is its spread.  Checkpoints are the mean's alone.  What GPyTorch would factorize is factorized in float64.

    :param noisy: the training covariance with noise, evaluated, ``(..., n, n)``.
    :param targets: ``(n, S)``, float64.
    :param index: which one of a batch.
    """
    acceleration = noisy.acceleration
    assert acceleration is not None
    system = System(noisy._linear_op, noisy._noise_vector())
    if system.batch_shape:
        system = system.element(index, system.batch_shape)
    if noisy._factorized(settings.fast_computations.solves):
        return Cholesky().run(system, targets)[:2]
    with evaluating():
        solver, why = _solver(acceleration, system)
        if isinstance(solver, ConjugateGradients):
            built = acceleration.build(system.operator, system.noise, differentiable=False)
            seconds = 0.0 if acceleration.cache is None else acceleration.cache.take_seconds()
            name = "none" if built is None else acceleration.preconditioner_name
            value, report, _ = solver.run(system, targets, built, name=name, setup_seconds=seconds)
        else:
            value, report = solve_system(solver, system, targets)
    for note in filter(None, (why, why_iterative(system.n))):
        report.notes.append(note)
        logger.info(note)
    return value, report


def _solver(acceleration: Acceleration, system: System) -> tuple[Any, str]:
    solver, why = acceleration.mean_solver(system.n, system.noise.device)
    if isinstance(solver, Budgeted):
        solver = dataclasses.replace(solver, checkpoint=None)
    return solver, why
