"""``sketchgp.InducingPointGP``: a GPyTorch model on inducing points whose mean comes from the solvers here."""

from __future__ import annotations

from typing import Any

import gpytorch
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from linear_operator.operators import DenseLinearOperator
from torch import Tensor

from .errors import InputError
from .inference.collapsed import Collapsed
from .models.sparse_covariance import SparsePosterior, SparsePrior, TraceTerm
from .operators import KernelMatrix
from .operators.tiles import spans
from .settings import available_memory
from .solvers import INDUCING_POINT_SOLVERS, KRILL, QR, EigenPro4, InducingPointProblem, SketchySAGA, Solution

_DIRECT = 1000  # inducing points up to which the direct solve is the fastest
_KRILL_BYTES = 64  # times m^2
_STATISTICS_BYTES = 56  # times m^2
_ENTRIES = 2**22  # of k(x, z) held at once


class InducingPointGP(gpytorch.models.ExactGP):
    """Gaussian-process regression through m inducing points z: the mean ``k(., z) W`` of the subset of regressors.

    Training data and inducing points are given, mean and kernel are GPyTorch modules; use it as a
    ``gpytorch.models.ExactGP``: ``model.train()`` and ``ExactMarginalLogLikelihood`` tune hyperparameters (and z, after
    ``model.inducing_points.requires_grad_()``) by Titsias's collapsed bound, ``model.eval()(x)`` predicts.

    - The mean is found by ``solver`` (:class:`sketchgp.InducingPointProblem`), once, and kept until a parameter or the
      data change.  Its weights are float64 whatever the dtype of the data.
    - Variances are those of DTC: ``k(x, x) - q(x, x) + k(x, z) (Kzz + Kzx D^-1 Kxz)^-1 k(z, x)``, computed when they
      are first asked for, from one sweep over the data (``n m^2`` operations, ``O(m^2)`` memory).
    - Nothing n x m is ever stored, and k(test, train) is never formed.
    - Several outputs: targets ``(n, t)`` share kernel, noise and inducing points; predictions are then a
      ``MultitaskMultivariateNormal`` of independent outputs.

    :param train_x: ``(n, d)``.
    :param train_y: ``(n,)`` or ``(n, t)``.
    :param likelihood: a ``GaussianLikelihood`` or ``FixedNoiseGaussianLikelihood``.
    :param mean: a GPyTorch mean, :param kernel: a GPyTorch kernel, both without batch.
    :param inducing_points: ``(m, d)``; a parameter that is not trained unless asked for.
    :param solver: ``QR()``, ``KRILL(...)``, ``Falkon(...)``, ``SketchySAGA(...)``, ``EigenPro3(...)``,
        ``EigenPro4(...)``, or ``"auto"``: QR up to 1,000 points, KRILL while its matrices fit into half of the free
        memory, EigenPro 4 beyond (SketchySAGA where each point has a noise of its own).
    :raises InputError: for wrong shapes, dtypes or devices, NaN, an unknown solver.
    """

    def __init__(
        self,
        train_x: Tensor,
        train_y: Tensor,
        likelihood: Any,
        mean: Any,
        kernel: Any,
        inducing_points: Tensor,
        solver: Any = "auto",
    ) -> None:
        if solver != "auto" and not isinstance(solver, INDUCING_POINT_SOLVERS):
            names = ", ".join(f"{known.__name__}()" for known in INDUCING_POINT_SOLVERS)
            raise InputError(f"solver expects 'auto' or one of {names}, got {solver!r}.")
        if torch.is_tensor(train_x) and train_x.dim() == 1:
            train_x = train_x.unsqueeze(-1)
        if torch.is_tensor(inducing_points) and inducing_points.dim() == 1:
            inducing_points = inducing_points.unsqueeze(-1)
        InducingPointProblem(kernel, train_x, train_y, 1.0, inducing_points)  # refuses what does not fit
        super().__init__(train_x, train_y, likelihood)
        self.mean_module, self.covar_module, self.solver = mean, kernel, solver
        points = inducing_points.detach().clone()
        self.register_parameter("inducing_points", torch.nn.Parameter(points, requires_grad=False))
        self.register_added_loss_term("trace")
        self._kept: dict[str, Any] = {}

    # --- the solution and what it depends on ----------------------------------------------------------------

    @property
    def _x(self) -> Tensor:
        return self.train_inputs[0]

    def noise(self) -> Tensor:
        """The likelihood's noise variances of the training points, ``(n,)``."""
        return self.likelihood._shaped_noise_covar(torch.Size([len(self._x)]), self._x).diagonal(dim1=-1, dim2=-2)

    def _residual(self) -> Tensor:
        """Targets less prior means, ``(n, t)``."""
        return self.train_targets.reshape(len(self._x), -1) - self.mean_module(self._x).unsqueeze(-1)

    @property
    def solution(self) -> Solution:
        """The :class:`sketchgp.Solution` behind the mean: weights ``(m, t)`` and the report of how they were found."""
        with torch.no_grad():
            self._forget_if_changed()
            if "solution" not in self._kept:
                problem = InducingPointProblem(
                    self.covar_module,
                    self._x,
                    self._residual(),
                    self.noise().to(torch.float64),
                    self.inducing_points.detach(),
                )
                self._kept["solution"] = self._solver(problem).solve(problem)
            return self._kept["solution"]

    def _solver(self, problem: InducingPointProblem) -> Any:
        if self.solver != "auto":
            return self.solver
        if problem.m <= _DIRECT:
            return QR()
        if _KRILL_BYTES * problem.m**2 <= available_memory(problem.device) // 2:
            return KRILL()
        return EigenPro4() if problem.weights is None else SketchySAGA()

    def _statistics(self) -> Collapsed:
        with torch.no_grad():
            self._forget_if_changed()
            if "statistics" not in self._kept:
                m, free = len(self.inducing_points), available_memory(self._x.device)
                if _STATISTICS_BYTES * m**2 > free:
                    raise InputError(
                        f"Variances take {_STATISTICS_BYTES * m**2 / 2**30:.1f} GiB for {m} inducing points and "
                        f"{free / 2**30:.1f} GiB are free; the mean is there: predict(model, x, variance=None)."
                    )
                noise = self.noise().to(torch.float64)
                self._kept["statistics"] = self._collapse(noise, self._residual())
            return self._kept["statistics"]

    def _collapse(self, noise: Tensor, residual: Tensor) -> Collapsed:
        return Collapsed(self.covar_module, self._x, self.inducing_points, noise, residual)

    def _forget_if_changed(self) -> None:
        """Parameters may be set in ways that leave no trace but their values."""
        state = [p.detach().clone() for p in self.parameters()]
        data = [(t, t._version) for t in (self._x, self.train_targets)]
        kept = self._kept.get("state")
        if kept is not None and len(kept[0]) == len(state) and all(map(_equal, kept[0], state)):
            unchanged = all(old[0] is new[0] and old[1] == new[1] for old, new in zip(kept[1], data, strict=True))
        else:
            unchanged = False
        if not unchanged:
            self._kept = {"state": (state, data)}

    def _clear_cache(self) -> None:
        super()._clear_cache()
        self._kept = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": {}}

    # --- predictions ----------------------------------------------------------------------------------------

    def forward(self, x: Tensor) -> MultivariateNormal:
        """The prior at x, as GPyTorch's models have it."""
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))

    def __call__(self, *args: Tensor, **kwargs: Any) -> Any:
        (x,) = args
        x = x.unsqueeze(-1) if x.dim() == 1 else x
        if self.training:
            return self._prior(x)
        if gpytorch.settings.prior_mode.on():
            return self.forward(x)
        if x.shape[-1] != self._x.shape[-1]:
            raise InputError(f"x expects {self._x.shape[-1]} features, got {x.shape[-1]}.")
        if x.dtype != self._x.dtype or x.device != self._x.device:
            raise InputError(f"x expects {self._x.dtype} on {self._x.device}, got {x.dtype} on {x.device}.")
        mean = self._mean(x)
        if x.dim() > 2:
            flat = [SparsePosterior(part, kernel=self.covar_module, collapsed=self._statistics).to_dense()
                    for part in x.reshape(-1, *x.shape[-2:])]  # fmt: skip
            covariance: Any = DenseLinearOperator(torch.stack(flat).reshape(*x.shape[:-1], x.shape[-2]))
        else:
            covariance = SparsePosterior(x, kernel=self.covar_module, collapsed=self._statistics)
        if self.train_targets.dim() == 1:
            return MultivariateNormal(mean.squeeze(-1), covariance)
        dense = covariance.to_dense().unsqueeze(-3)
        batch = DenseLinearOperator(dense.expand(*x.shape[:-2], mean.shape[-1], x.shape[-2], x.shape[-2]))
        return MultitaskMultivariateNormal.from_batch_mvn(MultivariateNormal(mean.mT, batch), task_dim=-1)

    def _prior(self, x: Tensor) -> MultivariateNormal:
        if not torch.equal(x, self._x):
            raise RuntimeError("You must train on the training inputs!")
        if self.train_targets.dim() > 1:
            raise InputError("Training by marginal likelihood expects targets (n,); use one output to tune with.")
        term = TraceTerm()
        self.update_added_loss_term("trace", term)
        return MultivariateNormal(self.mean_module(x), SparsePrior(x, collapse=self._collapse, term=term))

    def _mean(self, x: Tensor) -> Tensor:
        """``(..., p, t)``, differentiable in x."""
        weights = self.solution.value.reshape(len(self.inducing_points), -1)
        z, parts = self.inducing_points.detach(), []
        for span in spans(x.shape[-2], max(1, _ENTRIES // len(z))):
            block = KernelMatrix.of(self.covar_module, x[..., span, :], z, engine="tiled").double().to_dense()
            parts.append((block @ weights).to(x.dtype))
        return torch.cat(parts, dim=-2) + self.mean_module(x).unsqueeze(-1)


def _equal(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and first.device == second.device and torch.equal(first, second)
