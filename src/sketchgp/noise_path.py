"""``noise_path(model, noises)``: leave-one-out errors and marginal likelihoods along a grid of noises."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from gpytorch.models import ExactGP
from torch import Tensor
from tqdm.auto import tqdm

from . import checks
from .accelerate import acceleration_of
from .cards import shows_progress
from .errors import InputError
from .inference.noise_path import AtNoise, SolvedPath, exact_path
from .memory import require_memory
from .models.accelerated.conditioned import TrainingData
from .report import SolveReport
from .settings import memory_budget

_EXACT_WORK = {"cpu": 1e10, "cuda": 1e13}  # n^3 up to which the eigendecomposition is the default
_EXACT_BYTES = 48  # bytes of an eigendecomposition over n^2
_CRITERIA = ("mean_squared_error", "mean_log_density", "log_marginal_likelihood")


@dataclass(repr=False)
class NoisePath:
    """Results of a model at each of some noises; tensors are ``(k,)`` float64, in the order of ``noises``.

    ``mean_squared_error`` and ``mean_log_density`` are of leave-one-out predictions
    (:func:`sketchgp.leave_one_out`); ``log_marginal_likelihood`` is divided by n, and lies between ``lower`` and
    ``upper`` (infinite where there is no bound).  Standard errors are those of probes, 0 where ``exact``, and for a
    marginal likelihood that is the middle of its bounds; the probes are the same at each noise, so that differences
    between noises are surer than they say.  ``best`` has the noise that is best by each of the three, by name.
    ``iterations`` and ``products`` with the kernel matrix were needed for each noise; ``reports`` are those of its
    solves.

    After BoTorch's ``Standardize`` errors and densities are those of the data as they were before it, the marginal
    likelihood too; ``noises`` are those of the model's likelihood, which sees the standardized targets.
    """

    noises: Tensor
    mean_squared_error: Tensor
    mean_squared_error_standard_error: Tensor
    mean_log_density: Tensor
    mean_log_density_standard_error: Tensor
    log_marginal_likelihood: Tensor
    log_marginal_likelihood_standard_error: Tensor
    lower: Tensor
    upper: Tensor
    best: dict[str, float]
    exact: bool
    iterations: Tensor
    products: Tensor
    reports: list[list[SolveReport]]

    def __repr__(self) -> str:
        best = ", ".join(f"{name} {noise:.3g}" for name, noise in self.best.items())
        return f"<NoisePath of {len(self.noises)} noises{', exact' if self.exact else ''}; best by {best}>"

    def __str__(self) -> str:
        """Return a table with a line for each noise; ``*`` marks the best of each column."""
        lines = [f"{'noise':>10}  {'mean squared error':>24}  {'log density':>24}  {'log marginal / n':>24}  products"]
        for i, noise in enumerate(self.noises.tolist()):
            cells = []
            for name in _CRITERIA:
                value, error = (float(getattr(self, name + end)[i]) for end in ("", "_standard_error"))
                text = f"{value:.6g}" + ("" if error == 0 else f" +- {error:.1g}")
                cells.append(f"{text + (' *' if noise == self.best[name] else '  '):>24}")
            lines.append("  ".join([f"{noise:>10.3g}", *cells, f"{int(self.products[i]):>8}"]))
        return "\n".join(lines)


def noise_path(
    model: ExactGP,
    noises: Tensor | Iterable[float],
    exact: bool | None = None,
    num_probes: int = 16,
    seed: int = 0,
    progress: bool | None = None,
) -> NoisePath:
    """Return leave-one-out error and marginal likelihood of a model for each of some noises, its kernel as it is.

    One low-rank factor serves every noise, and the solutions of larger noises start those of smaller ones.  The
    marginal likelihood comes from bounds where these are near each other, else from probes.  The model is left as it
    was; ``model.likelihood.noise = path.best["mean_log_density"]`` takes one.

    :param model: one that :func:`accelerate` was called on, with one output, no batch and one noise for all points; it
        is put into eval mode.
    :param noises: variances, positive, at least one; in the units of ``model.likelihood.noise``.
    :param exact: whether to decompose the kernel matrix (``9 n^3`` operations and ``48 n^2`` bytes for all noises);
        None does so while ``n^3`` is at most 1e10 (CUDA: 1e13) and it fits the memory budget.
    :param num_probes: at least 2.
    :param seed: of the probes.
    :param progress: show a progress bar (default: in a terminal or notebook).
    :raises InputError: for a model that is not one of these, and what :func:`leave_one_out` refuses.

    A solve that does not reach its tolerance warns.
    """
    owner = "noise_path"
    if hasattr(model, "_left_out"):
        raise InputError(
            f"{owner}: model expects one that accelerate was called on; an InducingPointGP has a closed form, "
            "leave_one_out, for each noise."
        )
    acceleration_of(model, owner)
    grid = checks.numbers(owner, "noises", noises, above=0, finite=True)
    exact = checks.flag(owner, "exact", exact, optional=True)
    num_probes = checks.count(owner, "num_probes", num_probes, least=2)
    seed = checks.seed(owner, "seed", seed)
    show = checks.flag(owner, "progress", progress, optional=True)
    data = TrainingData.of(owner, model)
    system = data.training.system
    noise = system.noise
    if bool((noise != noise[0]).any()):
        raise InputError(f"{owner}: model expects one noise for all points, got one that differs between them.")
    with torch.no_grad():
        n = system.n
        if exact is None:
            fits = _EXACT_BYTES * n * n <= memory_budget.value(noise.device)
            exact = fits and n**3 <= _EXACT_WORK.get(noise.device.type, 1e10)
        if exact:
            require_memory(_EXACT_BYTES * n * n, noise.device, f"{owner}(exact=True) for n = {n}", "use exact=False.")
            return _result(exact_path(system, data.residual, data.scale, grid), True)
        acceleration, least = data.training.acceleration, torch.full_like(data.residual, min(grid))
        built = acceleration.build(system.operator, least, differentiable=False)
        solver = acceleration.column_gradients(evaluation=True)
        path = SolvedPath(data, least, acceleration.preconditioner, built, solver, num_probes, seed)
        results: dict[float, AtNoise] = {}
        falling, hidden = sorted(set(grid), reverse=True), not shows_progress(show)
        for value in tqdm(falling, desc="noise path", disable=hidden, leave=False):
            results[value] = path.at(value)
        return _result([results[value] for value in grid], False)


def _result(points: list[AtNoise], exact: bool) -> NoisePath:
    best = {
        "mean_squared_error": min(points, key=lambda one: one.error[0]).noise,
        "mean_log_density": max(points, key=lambda one: one.density[0]).noise,
        "log_marginal_likelihood": max(points, key=lambda one: one.likelihood[0]).noise,
    }

    def work(name: str) -> Tensor:
        return torch.tensor([int(sum(r.work.get(name, 0) for r in one.reports)) for one in points])

    def of(values: Iterable[float]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.float64)

    return NoisePath(
        noises=of(one.noise for one in points),
        mean_squared_error=of(one.error[0] for one in points),
        mean_squared_error_standard_error=of(one.error[1] for one in points),
        mean_log_density=of(one.density[0] for one in points),
        mean_log_density_standard_error=of(one.density[1] for one in points),
        log_marginal_likelihood=of(one.likelihood[0] for one in points),
        log_marginal_likelihood_standard_error=of(one.likelihood[1] for one in points),
        lower=of(one.lower for one in points),
        upper=of(one.upper for one in points),
        best=best,
        exact=exact,
        iterations=work("iterations"),
        products=work("products"),
        reports=[one.reports for one in points],
    )
