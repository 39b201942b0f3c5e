"""``sketchgp.RandomFeatureGP``: a GPyTorch model in random features that learns from tensors, streams and batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from torch import Tensor

from .checks import array, count, instance, points_like, tensor, word
from .errors import InputError
from .models.inducing_covariance import PathwiseFormula, independent
from .models.lazy_covariance import LazyCovariance
from .models.prediction import Prediction, check_choice, of_posterior
from .models.streamed import Streamed
from .operators.expression import recognise_waves
from .operators.random_features import PriorPaths
from .operators.spectrum import Philox
from .random_streams import generator
from .solvers.problem import check_kernel
from .solvers.streams.doubly_stochastic import DoublyStochastic
from .solvers.streams.learner import Learner
from .solvers.streams.problem import Targets

_VARIANCES = ("samples", "none")
_ROWS = 1024  # points that are predicted at once
_FREQUENCIES = 64  # of a function from the prior


class RandomFeatureGP(Streamed, gpytorch.models.GP):
    """Gaussian-process regression in N random features, learned by doubly stochastic gradients.

    .. code-block:: python

        model = sketchgp.RandomFeatureGP(likelihood, mean, kernel)
        model.learn(train_x, train_y)  # or learn(loader), partial_fit(x, y)
        posterior = model.eval()(test_x)  # a MultivariateNormal

    Hyperparameters are given, and are not changed by learning: tune them before, on some of the data, by
    :func:`sketchgp.fit` and one of the other models.  The mean is ``m(x) + sum_l phi_l(x) a_l``; features are made anew
    wherever they are needed, so that memory is O(N t) for t outputs, whatever n and d are, beside that of variances.

    Variances are, by ``variance``:

    - ``"samples"``: the mean square of the errors that the learner itself makes with ``variance_samples`` functions
      that are drawn from the exact prior, in place of the data: as many further outputs, which are learned in the same
      steps (O(N S) memory).  No bias, a relative deviation of ``(2 / S)^1/2``; features that are too few, and a
      function that is not learned to the end, make them larger, as they should.
    - ``"none"``, where only the mean matters, at about half the cost.

    ``state_dict()`` holds all that was learned: saved and loaded into a model that was made alike, it predicts and goes
    on learning as if nothing had happened.

    :param likelihood: a ``GaussianLikelihood`` without batch.
    :param mean: a GPyTorch mean without batch.
    :param kernel: a GPyTorch kernel without batch: RBF, Matern, rational quadratic, periodic, Laplace, spectral
        mixture, cosine and constant kernels, their sums and products.
    :param solver: :class:`sketchgp.DoublyStochastic`; None for its defaults.
    :param variance: as above.
    :param variance_samples: S, how many functions.
    :raises InputError: for arguments of other kinds.
    """

    _targets: Targets

    def __init__(
        self,
        likelihood: Any,
        mean: Any,
        kernel: Any,
        solver: DoublyStochastic | None = None,
        variance: Literal["samples", "none"] = "samples",
        variance_samples: int = 64,
    ) -> None:
        super().__init__()
        owner = type(self).__name__
        instance(owner, "mean", mean, torch.nn.Module, "a gpytorch mean")
        check_kernel(owner, kernel)
        if type(likelihood) is not GaussianLikelihood or likelihood.noise.numel() != 1:
            kind = type(likelihood).__name__
            more = " A noise for each point" if isinstance(likelihood, FixedNoiseGaussianLikelihood) else " Another one"
            raise InputError(
                f"{owner}: likelihood expects a GaussianLikelihood without batch, got {kind}.{more} needs an "
                "InducingPointGP or an accelerated model."
            )
        self.variance = word(owner, "variance", variance, _VARIANCES)
        self.variance_samples = count(owner, "variance_samples", variance_samples)
        recognise_waves(kernel)
        self.likelihood, self.mean_module, self.covar_module = likelihood, mean, kernel
        self._begin(solver)
        self._noises = Philox(self.solver.seed, "noises of functions that a learner's errors are seen with")

    def _parts(self) -> tuple[Any, ...]:
        return self.covar_module, self.mean_module, self.likelihood

    # --- learning -------------------------------------------------------------------------------------------

    def _new_targets(self) -> Targets:
        self._paths: PriorPaths | None = None
        return Targets(self._prior_mean)

    def _prior_mean(self, x: Tensor) -> Tensor:
        return self.mean_module(x)

    def _ridge(self) -> float:
        return float(self.likelihood.noise.detach())

    def _attach(self, learner: Learner, new: bool) -> None:
        if self.variance == "samples":
            stream = generator(self.solver.seed, "functions that a learner's errors are seen with")
            self._paths = PriorPaths(
                self.covar_module, learner.features.origin, self.variance_samples, stream, _FREQUENCIES
            )
            learner.more = self._samples
            if new:
                learner.grow(columns=learner.columns + self.variance_samples)

    def _samples(self, x: Tensor, numbers: Tensor) -> Tensor:
        """Return noisy values of the functions from the prior, ``(b, S)``; a row's number decides its noise."""
        assert self._paths is not None
        unit = torch.special.ndtri(self._noises(numbers, self.variance_samples))
        return self._paths(x) + unit * self._ridge() ** 0.5

    # --- predictions ----------------------------------------------------------------------------------------

    @property
    def variance_method(self) -> str:
        """Method of variances: ``"samples"`` or ``"none"``; empty before anything was learned."""
        return "" if self._known() is None else self._own_state()["method"]

    def __call__(self, x: Tensor) -> Any:  # type: ignore[override]
        """The posterior at x ``(..., p, d)``, differentiable in x; variances are computed when they are read.

        :raises InputError: before anything was learned, in training mode, and for points that do not fit.
        """
        owner = type(self).__name__
        if self.training:
            raise InputError(f"{owner} has no marginal likelihood to be trained by; call model.eval() for predictions.")
        learner, x = self._points(owner, x)
        with torch.set_grad_enabled(torch.is_grad_enabled() and x.requires_grad):
            prior = self.mean_module(x)
            mean = self._values(learner, x, slice(0, self._targets.columns)).to(x.dtype) + prior.unsqueeze(-1)
        steps = learner.steps
        covariance = LazyCovariance(PathwiseFormula(x, lambda: self.deviations(steps)))
        return independent(mean, covariance, self._targets.several)

    def _predicted(self, x: Any, variance: str | None, batch_size: int | None, show: bool) -> Prediction:
        """Return the :class:`Prediction` at x; see :func:`sketchgp.predict`."""
        self.eval()
        learner = self._known()
        x = array("predict", "x", x) if learner is None else points_like("predict", "x", x, learner.features.origin)
        x = tensor("predict", "x", x.unsqueeze(-1) if x.dim() == 1 else x, (2,))
        check_choice("a RandomFeatureGP", "what the model was told", variance)
        method = "none" if variance is None else self.variance_method
        return of_posterior(self, x, method, self.report, batch_size or _ROWS, show)

    def deviations(self, steps: int | None = None) -> Callable[[Tensor], Tensor]:
        """Return functions whose mean squares are the variances, from points ``(..., p, d)`` to ``(..., p, S)``.

        :param steps: that had been done when a prediction was made, whose variance is asked for.
        :raises InputError: where there are none, or more was learned since that prediction.
        """
        learner = self._known()
        paths, columns = self._paths, slice(self._targets.columns, None)
        if learner is None or paths is None:
            raise InputError("This model was told variance='none'; make one with 'samples', and learn.")
        if steps is not None and steps != learner.steps:
            raise InputError("The model has learned more since this prediction was made; call it again.")

        def values(x: Tensor) -> Tensor:
            drawn = paths(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], paths.samples)
            return drawn - self._values(learner, x, columns)

        return values

    # --- saving ---------------------------------------------------------------------------------------------

    def _own_state(self) -> dict[str, Any]:
        method = "none" if self._paths is None else "samples"
        return {"outputs": self._targets.columns, "several": self._targets.several, "method": method}

    def _set_own_state(self, own: dict[str, Any]) -> None:
        if self.variance != own["method"]:
            raise InputError(f"What was loaded has variance={own['method']!r}, and this model {self.variance!r}.")
        self._targets.columns, self._targets.several = own["outputs"], own["several"]

    def forward(self, x: Tensor) -> MultivariateNormal:
        """The prior at x, as GPyTorch's models have it."""
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))
