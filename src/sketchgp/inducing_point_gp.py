"""``sketchgp.InducingPointGP``: a GPyTorch model on inducing points whose mean comes from the solvers here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from torch import Tensor

from .cards import Card, choice, several, shape, tensor_kind
from .checks import count, inputs, instance, points_like, same_points, tensor, word
from .errors import ConvergenceWarning, InputError, warn
from .fingerprint import Held, data_key, module_key, tensor_key
from .inference.collapsed import Collapsed
from .inference.pathwise import OF_PREDICTOR, Deviations, expansion
from .memory import in_words, require_memory
from .models.accelerated.targets import check_training_data
from .models.inducing_covariance import (
    IndependentOutputs,
    PathwiseFormula,
    SparseFormula,
    SparseMarginal,
    SparseMultitaskMarginal,
    SparsePrior,
    TraceTerm,
    independent,
)
from .models.lazy_covariance import LazyCovariance
from .models.prediction import Prediction, check_choice, of_posterior
from .operators import KernelMatrix
from .operators.access import Access
from .operators.expression import recognise
from .operators.generic_tiles import parameters_as
from .operators.lazies import KERNELS, parameters_of
from .operators.tiles import spans
from .report import own_solves, require_answer
from .row_sources import RowSource, whole_or_source, whole_targets
from .settings import free_memory, memory_budget
from .solvers import INDUCING_POINT_SOLVERS, InducingPointProblem, Solution, Solver
from .solvers.automatic import automatic_inducing_solver
from .solvers.inducing.problem import InducingPoints, plain_points
from .solvers.problem import check_data, check_kernel
from .solvers.solver import check_solver, solve_checked

_ROWS = 8192  # points that are predicted at once
_LEFT_OUT = 4096  # points that are left out at once
_STATISTICS_BYTES = 56  # times m^2
_ROUNDED = 0.01  # of the least noise: what rounding may add to a variance without a warning
_VARIANCES = ("auto", "dtc", "samples")


class InducingPointGP(gpytorch.models.ExactGP):
    """Gaussian-process regression through m inducing points z: the mean ``k(., z) W`` of the subset of regressors.

    Training data and inducing points are given, mean and kernel are GPyTorch modules; use it as a
    ``gpytorch.models.ExactGP``: ``model.train()`` and ``ExactMarginalLogLikelihood`` tune hyperparameters (and z, after
    ``model.inducing_points.requires_grad_()``) by Titsias's collapsed bound, ``model.eval()(x)`` predicts.

    - The mean is found by ``solver`` (:class:`sketchgp.InducingPointProblem`), once, and kept until a parameter or the
      data change.  (Of more than a MiB of data, which would take longer to look through than a prediction takes, rows
      that were rewritten past PyTorch, by ``.data`` or through numpy, may go unseen: ``model.train().eval()`` has
      everything found anew.)  Its weights are float64 whatever the dtype of the data.
    - Variances are computed when they are first asked for, by ``variance``:

      - ``"dtc"``: ``k(x, x) - q(x, x) + k(x, z) (Kzz + Kzx D^-1 Kxz)^-1 k(z, x)``, from one sweep over the data
        (``n m^2`` operations, ``O(m^2)`` memory).
      - ``"samples"``: the mean squared error of the predictor ``k(., z) W`` under the prior, an average over
        ``variance_samples`` functions drawn from the prior that the solver is given in place of the data, with no
        m x m matrix (:class:`sketchgp.inference.pathwise.Deviations`).  It has no bias, a relative standard deviation
        of ``sqrt(2 / variance_samples)``, and lies above the variance of the exact posterior but for that.  It is not
        the formula of DTC, which takes the data for drawn from q: where q differs from k the two differ, and DTC's is
        often the larger.  It knows kernels with random features: RBF, Matern, rational quadratic, periodic, Laplace,
        spectral mixture, cosine and constant kernels, their sums and products.
      - ``"auto"``: DTC while its matrices fit into the free memory, and samples beyond.
    - Nothing n x m is ever stored, and k(test, train) is never formed.
    - Several outputs: targets ``(n, t)`` share kernel, noise and inducing points; predictions are then a
      ``MultitaskMultivariateNormal`` of independent outputs, and the bound is the sum of theirs.

    :param train_x: ``(n, d)``, a tensor or rows on disk (:class:`sketchgp.RowSource`) that fit the memory budget.
    :param train_y: ``(n,)`` or ``(n, t)``.
    :param likelihood: a ``GaussianLikelihood`` or ``FixedNoiseGaussianLikelihood``.
    :param mean: a GPyTorch mean, :param kernel: a GPyTorch kernel, both without batch.
    :param inducing_points: ``(m, d)``, or what :func:`sketchgp.choose_inducing_points` returns; a parameter that is not
        trained unless asked for.
    :param solver: ``QR()``, ``KRILL(...)``, ``Falkon(...)``, ``NystromPCG(...)``, ``EigenPro3(...)``,
        ``EigenPro4(...)``, or one of your own (:class:`sketchgp.solvers.Solver`), or ``"auto"``: QR up to 1,000 points,
        KRILL while its matrices fit into half of the free memory, Nystrom PCG beyond.  EigenPro has no tolerance: its
        mean is as near as its epochs take it.
    :param variance: ``"auto"``, ``"dtc"`` or ``"samples"``.
    :param variance_samples: functions that variances by samples are an average over.
    :raises InputError: for wrong shapes, dtypes or devices, NaN, an unknown solver or variance.
    """

    def __init__(
        self,
        train_x: Tensor,
        train_y: Tensor,
        likelihood: Any,
        mean: Any,
        kernel: Any,
        inducing_points: Tensor | InducingPoints,
        solver: Solver[InducingPointProblem] | Literal["auto"] = "auto",
        variance: Literal["auto", "dtc", "samples"] = "auto",
        variance_samples: int = 64,
    ) -> None:
        owner = type(self).__name__
        check_solver(owner, solver, INDUCING_POINT_SOLVERS)
        variance_samples = _check_variance(variance, variance_samples)
        instance(owner, "mean", mean, torch.nn.Module, "a gpytorch mean")
        if type(self).forward is not InducingPointGP.forward:
            raise InputError(
                "InducingPointGP takes mean and kernel as arguments; a forward of your own would do nothing."
            )
        if not isinstance(likelihood, GaussianLikelihood | FixedNoiseGaussianLikelihood):
            raise InputError(
                f"{owner}: likelihood expects a GaussianLikelihood or FixedNoiseGaussianLikelihood, which several "
                f"outputs share; got {type(likelihood).__name__}."
            )
        z = plain_points(inducing_points)
        train_x, train_y = whole_or_source(train_x, z), whole_targets(train_y, z)
        if isinstance(train_x, RowSource):
            raise InputError(
                f"{owner}: train_x takes {in_words(train_x.nbytes)}, more than the memory budget of "
                f"{in_words(memory_budget.value(train_x.device))}; tune on some of the rows, and solve an "
                "InducingPointProblem, which reads them as they are needed, for the mean."
            )
        train_x, z = (t.unsqueeze(-1) if torch.is_tensor(t) and t.dim() == 1 else t for t in (train_x, z))
        check_kernel(owner, kernel)
        check_data(owner, kernel, train_x, train_y, ("train_x", "train_y"))
        same_points(owner, train_x, tensor(owner, "inducing_points", z, (2,)), "train_x", "inducing_points")
        InducingPointProblem(kernel, train_x, train_y, 1.0, z)  # refuses what does not fit
        super().__init__(train_x, train_y, likelihood)
        self.mean_module, self.covar_module, self.solver = mean, kernel, solver
        self.variance, self.variance_samples = variance, variance_samples
        self.register_parameter("inducing_points", torch.nn.Parameter(z.detach().clone(), requires_grad=False))
        self.register_added_loss_term("trace")
        self._kept: dict[str, Any] = {}
        self._lock = threading.RLock()  # what is kept is computed once, whichever thread asks

    # --- the solution and what it depends on ----------------------------------------------------------------

    @property
    def _x(self) -> Tensor:
        return self.train_inputs[0]

    def noise(self) -> Tensor:
        """The likelihood's noise variances of the training points, ``(n,)``.

        :raises InputError: where the likelihood has not one for each of them.
        """
        n, noise = len(self._x), None
        fixed = isinstance(self.likelihood, FixedNoiseGaussianLikelihood)
        if not fixed or self.likelihood.noise.shape == (n,):
            noise = self.likelihood._shaped_noise_covar(torch.Size([n]), self._x).diagonal(dim1=-1, dim2=-2)
        if noise is None or noise.shape != (n,) or not bool((noise.detach() > 0).all()):
            raise InputError(
                f"{type(self.likelihood).__name__} expects to have one positive noise for each of {n} training points; "
                "use a GaussianLikelihood without batch, or a FixedNoiseGaussianLikelihood of as many."
            )
        return noise

    def _prior_mean(self, x: Tensor, live: bool = False) -> Tensor:
        """Return prior means ``(..., p)``, in float64 where the mean can be evaluated so.

        In float32 the terms of points far from the origin cancel, and what is left may be off by more than the noise.

        :param live: whether the mean's parameters have gradients.
        """
        named = parameters_of(self.mean_module)
        values = [(value if live else value.detach()).double() for value in named.values()]
        try:
            with parameters_as(self.mean_module, list(named), values):
                mean = self.mean_module(x.double())
        except RuntimeError:  # of float32 tensors that are no parameters
            mean = self.mean_module(x)
        if mean.shape != x.shape[:-1]:
            raise InputError(f"mean expects to give one value a point, {tuple(x.shape[:-1])}, got {tuple(mean.shape)}.")
        return mean

    def _residual(self) -> Tensor:
        """Return targets less prior means, ``(n, t)``, in the dtype of the means."""
        return self.train_targets.reshape(len(self._x), -1) - self._prior_mean(self._x).unsqueeze(-1)

    @property
    def solution(self) -> Solution:
        """The :class:`sketchgp.Solution` behind the mean: weights ``(m, t)`` and the report of how they were found."""
        return self._remember("solution", lambda: self._solve(self._problem()))

    def _remember(self, name: str, make: Callable[[], Any], asked: Any = None) -> Any:
        """Return what is kept under a name, made anew where parameters or data changed.

        :param asked: the state of a prediction, whose variance is asked for now; None for the present one.
        :raises InputError: where parameters or data changed since that prediction.
        """
        with self._lock, torch.inference_mode(False), torch.no_grad():
            self._forget_if_changed()
            if asked is not None and asked != self._kept["state"]:
                raise InputError("The model or its data changed after this prediction; call the model again.")
            if name not in self._kept:
                self._kept[name] = make()
            return self._kept[name]

    def _problem(self) -> InducingPointProblem:
        noise, z = self.noise().to(torch.float64), self.inducing_points.detach()
        problem = InducingPointProblem(self.covar_module, self._x, self.train_targets, noise, z)
        problem.y = self._residual()  # in float32 one of a far point would be off by more than the noise
        return problem

    def _solve(self, problem: InducingPointProblem) -> Solution:
        shape = torch.Size((problem.m, *problem.target_shape))
        solver = automatic_inducing_solver(problem) if isinstance(self.solver, str) else self.solver
        solution = solve_checked(solver, problem, shape, torch.float64, problem.device)
        require_answer(solution.report, solver)
        return solution

    @property
    def variance_method(self) -> str:
        """Method of variances for the present parameters and data: ``"dtc"`` or ``"samples"``."""
        with self._lock, torch.inference_mode(False), torch.no_grad():
            self._forget_if_changed()
        return self._variance_method()

    def _variance_method(self) -> str:
        """Return :attr:`variance_method` without looking again whether anything changed, which copies parameters."""
        _check_variance(self.variance, self.variance_samples)
        if self.variance != "auto":
            return self.variance
        if "method" not in self._kept:  # decided once, as the memory that is free differs from call to call
            fits = _STATISTICS_BYTES * len(self.inducing_points) ** 2 <= free_memory(self._x.device)
            features = recognise(self.covar_module, waves=True) is not None
            self._kept["method"] = "samples" if features and not fits else "dtc"
        return self._kept["method"]

    @property
    def variance_solution(self) -> Solution:
        """The :class:`sketchgp.Solution` behind variances by samples: weights ``(m, variance_samples)`` and the report.

        :raises InputError: for a kernel without random features.
        """
        return self._remember("errors", self._drawn).solution

    def _drawn(self) -> Deviations:
        z, samples = self.inducing_points.detach(), self.variance_samples
        return self._solve_errors(Deviations(self.covar_module, z, samples, purpose=OF_PREDICTOR), self._x)

    def _solve_errors(self, errors: Deviations, x: Tensor) -> Deviations:
        """Return errors with their weights, from targets at training inputs x as the kernel sees them."""
        noise = self.noise().to(torch.float64)
        targets = errors.targets(x, noise).to(x.dtype)
        errors.solution = self._solve(InducingPointProblem(errors.kernel, x, targets, noise, errors.points))
        errors.weights = errors.solution.value
        return errors

    def _swept(self) -> Collapsed:
        """Return the statistics for variances of DTC.

        :raises InputError: where they do not fit the memory.
        """
        m = len(self.inducing_points)
        advice = "variance='samples' does without, and the mean is there: predict(model, x, variance=None)."
        require_memory(_STATISTICS_BYTES * m**2, self._x.device, f"The variance of DTC for m = {m}", advice)
        statistics = self._collapse(self.noise().double(), self._residual())
        if statistics.shift > _ROUNDED * (least := float(statistics.noise.amin())):
            warn(
                "Variances of DTC met the limits of float64: rounding of the kernel matrix of the inducing points may "
                f"raise them by {statistics.shift:.1e}, where the noise is {least:.1e}. Scale the inputs down, use "
                "fewer inducing points, or raise the noise.",
                ConvergenceWarning,
                see="limits-of-float64",
            )
        return statistics

    def _collapse(self, noise: Tensor, residual: Tensor) -> Collapsed:
        return Collapsed(self.covar_module, self._x, self.inducing_points, noise, residual)

    def _forget_if_changed(self) -> None:
        """Forget all that is kept where a parameter, the noise, the data or a setting has another value."""
        parts = (self.covar_module, self.mean_module, self.likelihood)
        with KERNELS:  # no kernel computes with other parameters than its own meanwhile
            modules = [module_key(part) for part in parts]
        state = (
            *(Held(part) for part in (*parts, *self.parameters(), self.solver)),
            *modules,
            *(tensor_key(values) for values in (self.inducing_points, self.noise())),
            *(data_key(data) for data in (self._x, self.train_targets)),
            *(self.variance, self.variance_samples),
        )
        if self._kept.get("state") != state:
            self._kept = {"state": state}

    def _clear_cache(self) -> None:
        super()._clear_cache()
        self.update_added_loss_term("trace", TraceTerm())  # which holds the matrices of the last training step
        with self._lock:
            self._kept = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": {}, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_lock": threading.RLock()})

    def get_fantasy_model(self, *args: Any, **kwargs: Any) -> Any:
        """Not offered.

        :raises InputError: always.
        """
        raise InputError("InducingPointGP has no fantasies; give it the data with set_train_data, or use ExactGP.")

    def extra_repr(self) -> str:
        x, z, y = self._x, self.inducing_points, self.train_targets
        outputs = "" if y.dim() == 1 else f", {several(y.shape[1], 'output')}"
        rows = Card.of(
            "",
            training_data=f"{shape(x)}, {tensor_kind(x)}{outputs}",
            inducing_points=f"{len(z):,}{', tuned' if z.requires_grad else ''}",
            solver=choice(self.solver),
            variance=self.variance,
        )
        return rows.text().lstrip("\n")

    # --- predictions ----------------------------------------------------------------------------------------

    def forward(self, x: Tensor) -> MultivariateNormal:
        """The prior at x, as GPyTorch's models have it."""
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))

    def __call__(self, x: Tensor) -> Any:  # type: ignore[override]
        """The posterior at x ``(p, d)`` or ``(..., p, d)`` in eval mode, the prior of the bound in training mode.

        :raises InputError: for points that do not fit the training inputs.
        """
        owner, x = type(self).__name__, x.unsqueeze(-1) if torch.is_tensor(x) and x.dim() == 1 else x
        same_points(owner, inputs(owner, "x", x), self._x)
        if self.training:
            return self._prior(x)
        if gpytorch.settings.prior_mode.on():
            prior = self.forward(x)
            mean = self._for_each_output(prior.mean)
            return independent(mean, prior.lazy_covariance_matrix, self.train_targets.dim() > 1)
        if gpytorch.settings.detach_test_caches.off():
            raise InputError("InducingPointGP has no gradients of predictions with respect to hyperparameters.")
        mean = self._mean(x)
        state = self._kept["state"]
        if self._variance_method() == "samples":
            covariance = LazyCovariance(PathwiseFormula(x, partial(self._remember, "errors", self._drawn, state)))
        else:
            swept = partial(self._remember, "statistics", self._swept, state)
            covariance = LazyCovariance(SparseFormula(x, self.covar_module, swept))
        return independent(mean, covariance, self.train_targets.dim() > 1)

    def _predicted(self, x: Any, variance: str | None, batch_size: int | None, show: bool) -> Prediction:
        """Return the :class:`Prediction` at x; see :func:`sketchgp.predict`."""
        check_training_data("predict", self)
        x = points_like("predict", "x", x, self._x)
        with self._lock:  # a change of mode drops the solution, which another thread may look for
            self.eval()
        check_choice("an InducingPointGP", "that of DTC or by samples, as the model was told", variance)
        with own_solves() as solves:
            report = self.solution.report
        if not report.converged and not solves:
            warn(report.advice(), ConvergenceWarning)
        method = "none" if variance is None else self.variance_method
        return of_posterior(self, x, method, report, batch_size or _ROWS, show)

    def _left_out(self) -> tuple[Tensor, Tensor]:
        """Return residuals and variances ``(n,)`` float64 of training points that are left out, by the formula of DTC.

        With ``A = Q + D`` the inverse has ``1 / d_i - |B^-1/2 L^-1 k(z, x_i)|^2 / d_i^2`` on its diagonal.  The
        variance of a prediction is ``k - q`` larger than that of a model with the covariance Q.
        """
        statistics, x = self._remember("statistics", self._swept), self._x
        prior = Access(KernelMatrix.of(self.covar_module, x, engine="tiled")).diagonal()
        noise = statistics.noise
        diagonal, weights, beyond = (torch.empty_like(noise) for _ in range(3))
        for rows in spans(len(x), _LEFT_OUT):
            half, inner = statistics.half(x[rows])
            diagonal[rows] = (1 - inner.square().sum(dim=0) / noise[rows]) / noise[rows]
            weights[rows] = (statistics.residual[rows, 0] - inner.mT @ statistics.projected[:, 0]) / noise[rows]
            beyond[rows] = (prior[rows] - half.square().sum(dim=0)).clamp(min=0)
        return weights / diagonal, 1 / diagonal + beyond

    def _for_each_output(self, mean: Tensor) -> Tensor:
        """Return prior means ``(..., p)`` of each output, ``(..., p, t)``."""
        t = 1 if self.train_targets.dim() == 1 else self.train_targets.shape[1]
        return mean.unsqueeze(-1).expand(*mean.shape, t)

    def _prior(self, x: Tensor) -> MultivariateNormal:
        if not torch.equal(x, self._x):
            raise RuntimeError("You must train on the training inputs!")
        term, mean = TraceTerm(), self._prior_mean(x, live=True).to(x.dtype)
        self.update_added_loss_term("trace", term)
        differ = isinstance(self.likelihood, FixedNoiseGaussianLikelihood)
        prior = SparsePrior(x, collapse=self._collapse, term=term, noises_differ=differ)
        if self.train_targets.dim() == 1:
            return SparseMarginal(mean, prior)
        mean = self._for_each_output(mean)
        return SparseMultitaskMarginal(mean, IndependentOutputs.of(prior, mean.shape[1]))

    def _mean(self, x: Tensor) -> Tensor:
        """``(..., p, t)``, differentiable in x."""
        weights = self.solution.value.reshape(len(self.inducing_points), -1)
        mean = expansion(self.covar_module, x, self.inducing_points.detach(), weights)
        return (mean + self._prior_mean(x).unsqueeze(-1)).to(x.dtype)


def _check_variance(variance: Any, samples: Any) -> int:
    word("InducingPointGP", "variance", variance, _VARIANCES)
    return count("InducingPointGP", "variance_samples", samples)
