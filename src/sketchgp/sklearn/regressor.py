"""``GaussianProcessRegressor``: fit and predict in scikit-learn's words."""

from __future__ import annotations

import copy
import math
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import gpytorch
import numpy as np
import torch
from gpytorch.constraints import GreaterThan
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from linear_operator.utils.cholesky import psd_safe_cholesky
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from .. import checks
from ..accelerate import accelerate
from ..errors import InputError, NumericalError, warn
from ..fit import FitHistory, fit
from ..inducing_point_gp import InducingPointGP
from ..kernels import MEANS, mean_by_name
from ..leave_one_out import leave_one_out
from ..models.accelerated.marginal_likelihoods import ExactMarginalLogLikelihood
from ..plotting.models import within
from ..posterior_samples import sample_posterior
from ..predict import predict
from ..random_streams import generator
from ..solvers import FULL_SOLVERS, INDUCING_POINT_SOLVERS, Cholesky
from ..solvers.solver import check_solver
from .choices import (
    DIRECT,
    TYPES,
    Estimator,
    choose,
    device_of,
    inducing_points,
    numbers,
    seed_of,
    tuned_kernel,
)

_OWNER = "GaussianProcessRegressor"
_LEAST_NOISE = 1e-5  # over the variance of the targets, as scikit-learn's WhiteKernel has it
_NOISE = 0.1  # the same, to begin with
_ROUNDING = 4 * np.finfo(np.float64).eps  # deviation over the largest target, up to which targets are constant
_JOINT = 1000  # points up to which samples are drawn from their joint distribution
_UNSEEN = 200  # rows not tuned on, from which on intervals are checked
_CHECKED = 5000  # rows at most that are predicted from each other for that, by a factorization


class _Exact(gpytorch.models.ExactGP):
    """A constant mean and a kernel."""

    def __init__(self, x: Tensor, y: Tensor, likelihood: Any, mean: Any, kernel: Any) -> None:
        super().__init__(x, y, likelihood)
        self.mean_module, self.covar_module = mean, kernel

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def _coverage(model: Any, unseen: int) -> float | None:
    """Return the share of the last rows of a model that 95% intervals from all others cover; warn if it is small."""
    try:
        found = leave_one_out(model, progress=False)
    except NumericalError:  # which predictions raise, too
        return None
    residual, std = (part[-unseen:].double() for part in (found.residual, found.variance.sqrt()))
    share = float(within(torch.zeros_like(residual), std, residual, residual.new_tensor([0.95])))
    if share < 0.95 - max(0.05, 4 * math.sqrt(0.95 * 0.05 / unseen)):  # four standard errors
        warn(
            f"{_OWNER}: 95% intervals cover {100 * share:.1f}% of {unseen:,} rows that were not tuned on, so "
            "deviations are too small. Tune on more rows (tuning_rows), raise alpha if it is given, or try another "
            "kernel.",
            see="coverage",
        )
    return share


@dataclass(eq=False, repr=False)
class GaussianProcessRegressor(Estimator, RegressorMixin, BaseEstimator):
    """Gaussian process regression with the interface of scikit-learn's class of this name.

    Hyperparameters maximise the marginal likelihood (:func:`sketchgp.fit`), on all rows or on random ones; the
    posterior is then that of all rows: exact, by :func:`sketchgp.accelerate`, or on inducing points, by
    :class:`sketchgp.InducingPointGP`.  ``choice_`` says which, and why.  What differs from scikit-learn: the noise is
    learned unless ``alpha`` is given, targets are normalised unless told otherwise, the prior mean is learned,
    and kernels are GPyTorch's.

    :param kernel: ``"matern52"``, ``"matern32"``, ``"matern12"`` or ``"exponential"``, ``"rbf"``,
        ``"rational_quadratic"`` or ``"laplacian"`` (of the l1 distance): with an output scale and a lengthscale for
        each feature, which start at the size of the data, so that features need not be standardised.  Or a GPyTorch
        kernel, output scale included, which is copied and starts with its own parameters.
    :param mean: the prior mean that is learned: ``"constant"``, or ``"linear"`` in the features.
    :param alpha: variance of the noise in units of y squared, a number or one for each row ``(n,)``; it is then fixed.
        None learns it.
    :param optimizer: ``"auto"`` or ``"lbfgs"``, ``"adam"``, or None to keep the hyperparameters as they start.
    :param normalize_y: take the mean off the targets and divide them by their deviation.
    :param method: ``"exact"``, ``"inducing"``, or ``"auto"``: exact up to 20,000 rows (CUDA: 100,000) while a
        preconditioner fits in memory.
    :param n_inducing: how many inducing points, by k-means; None is ``10 n^1/2``, from 500 to 5,000, as memory allows.
        A number makes ``method="auto"`` take them.
    :param solver: of the mean, as :func:`sketchgp.accelerate` or :class:`sketchgp.InducingPointGP` takes it; ``"auto"``
        factorizes up to 2,000 rows.
    :param tuning_rows: how many random rows hyperparameters are tuned on, where there are more; None tunes on all.
    :param device: where to compute, such as ``"cuda"``; None is the CPU.
    :param random_state: of rows, inducing points and probes: an integer, a ``RandomState``, or None.
    :param verbose: print ``choice_`` and show progress.

    :ivar model_: the GPyTorch model, accelerated or an :class:`sketchgp.InducingPointGP`, of normalised targets.
    :ivar kernel_: its kernel with the hyperparameters found; lengthscales are in units of X, its output scale in those
        of normalised targets.
    :ivar noise_: variance of the noise in units of y squared: a number, or ``(n,)`` where ``alpha`` was.
    :ivar history_: :class:`sketchgp.FitHistory`; None with ``optimizer=None``, and where all targets
        are the same, of which nothing can be learned.
    :ivar method_: ``"exact"`` or ``"inducing"``.
    :ivar choice_: a sentence on the method and the rows tuned on.
    :ivar coverage_: share of rows not tuned on that 95% intervals cover, each row predicted from all others of up to
        5,000 random ones; None where fewer than 200 rows were not tuned on.  Less than 0.9 (0.888 of 200) warns.
    :ivar n_features_in_: d; ``feature_names_in_``: names of a pandas table's columns.
    """

    kernel: Any = "matern52"
    _: KW_ONLY
    mean: Literal["constant", "linear"] = "constant"
    alpha: Any = None
    optimizer: Literal["auto", "lbfgs", "adam"] | None = "auto"
    normalize_y: bool = True
    tuning_rows: int | None = 2000

    # --- fitting --------------------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any) -> GaussianProcessRegressor:
        """Tune the hyperparameters and condition on all rows.

        :param X: ``(n, d)``, an array or a pandas table; float32 stays float32.
        :param y: ``(n,)``.
        :returns: the estimator.
        :raises InputError: a ``ValueError``, for what does not fit.
        """
        self._check_common()
        checks.word(_OWNER, "mean", self.mean, MEANS)
        checks.word(_OWNER, "optimizer", self.optimizer, ("auto", "lbfgs", "adam"), optional=True)
        checks.flag(_OWNER, "normalize_y", self.normalize_y)
        most = checks.count(_OWNER, "tuning_rows", self.tuning_rows, optional=True)
        X, y = validate_data(self, numbers(_OWNER, X), numbers(_OWNER, y, "y"), dtype=TYPES, y_numeric=True)
        x = checks.copied(X, device_of(_OWNER, self.device))
        targets = self._normalised(np.asarray(y, dtype=np.float64), x)
        seed = seed_of(self.random_state)
        chosen = choose(_OWNER, self.method, self.n_inducing, len(x), x.device)
        check_solver(_OWNER, self.solver, FULL_SOLVERS if chosen.method == "exact" else INDUCING_POINT_SOLVERS)
        size = 1.0 if self.normalize_y else float(targets.double().square().mean()) or 1.0
        kernel, mean = tuned_kernel(_OWNER, self.kernel, x, size), mean_by_name(self.mean, x.shape[1]).to(x)
        tuned = self.optimizer is not None and not self._constant
        if self.optimizer is not None and self._constant:
            list(mean.parameters())[-1].data.fill_(float(targets.double().mean()))  # its constant
            warn(
                f"{_OWNER}: all targets are {y[0]:g}, which says nothing about the hyperparameters. They stay as they "
                "start, and deviations are of the size of the targets: look at y, or choose kernel and alpha with "
                "optimizer=None.",
                see="constant-targets",
            )
        self.history_, self.coverage_, self.method_, self.choice_ = None, None, chosen.method, chosen.why
        noise = self._given_noise(len(x))
        subset = most if tuned and most is not None and len(x) > most else None
        if subset is not None:
            self.choice_ += f"; hyperparameters tuned on {subset:,} random rows"
        if self.verbose:
            print(f"{_OWNER}: {self.choice_}")
        likelihood = self._likelihood(noise, x, size)

        def of(rows: Tensor) -> Any:
            some = likelihood if noise is None or noise.ndim == 0 else self._likelihood(noise[rows.cpu()], x, size)
            return accelerate(_Exact(x[rows], targets[rows], some, mean, kernel))

        if subset is not None:
            order = torch.randperm(len(x), generator=generator(seed, "rows of an estimator")).to(x.device)
            self.history_ = self._tuned(of(order[:subset]), seed)
            if len(x) - subset >= _UNSEEN:
                self.coverage_ = _coverage(of(order[-_CHECKED:]), min(len(x) - subset, _CHECKED))
        model: Any
        if chosen.method == "exact":
            solver = Cholesky() if self.solver == "auto" and len(x) <= DIRECT else self.solver
            model = accelerate(_Exact(x, targets, likelihood, mean, kernel), solver=solver)
        else:
            points = inducing_points(kernel, x, chosen.points, seed)
            model = InducingPointGP(x, targets, likelihood, mean, kernel, points, solver=self.solver)
        if subset is None and tuned:
            self.history_ = self._tuned(model, seed)
        self.model_, self.kernel_ = model.eval(), model.covar_module
        self.noise_ = self._noise(likelihood)
        return self

    def _normalised(self, y: Any, x: Tensor) -> Tensor:
        self._y_mean, self._y_std = 0.0, 1.0
        deviation, largest = float(y.std()), float(np.abs(y).max())
        self._constant = deviation <= _ROUNDING * largest
        if self.normalize_y:
            self._y_mean, self._y_std = float(y.mean()), (largest if self._constant else deviation) or 1.0
        return checks.copied((y - self._y_mean) / self._y_std, x.device, x.dtype)

    def _given_noise(self, n: int) -> Any:
        """Return the noise of normalised targets: None, a number or an array ``(n,)``."""
        if self.alpha is None:
            return None
        noise = np.asarray(self.alpha)
        if noise.dtype.kind not in "fiu":  # of the entries of an array; a number has been looked at
            raise checks.refusal(_OWNER, "alpha", "numbers", self.alpha, optional=True)
        noise = noise.astype(np.float64)
        if noise.ndim > 1 or (noise.ndim == 1 and len(noise) != n) or not (np.isfinite(noise) & (noise > 0)).all():
            raise InputError(f"{_OWNER}: alpha expects a positive number, {n} of them, one for each row, or None.")
        return noise / self._y_std**2

    def _likelihood(self, noise: Any, x: Tensor, size: float) -> Any:
        if noise is not None and noise.ndim:
            return FixedNoiseGaussianLikelihood(checks.copied(noise, x.device, x.dtype)).to(x)
        value = _NOISE * size if noise is None else float(noise)
        least = _LEAST_NOISE * size if noise is None else value / 2
        likelihood = GaussianLikelihood(noise_constraint=GreaterThan(least)).to(x)
        likelihood.noise = x.new_tensor(value)  # a number would be rounded to float32
        likelihood.raw_noise.requires_grad_(noise is None)
        return likelihood

    def _noise(self, likelihood: Any) -> Any:
        noise = likelihood.noise.detach().double().cpu().numpy() * self._y_std**2
        return noise if isinstance(likelihood, FixedNoiseGaussianLikelihood) else float(noise.item())

    def _tuned(self, model: Any, seed: int) -> FitHistory:
        optimizer: Any = self.optimizer
        return fit(model, optimizer=optimizer, seed=seed, progress=None if self.verbose else False)

    @property
    def log_marginal_likelihood_value_(self) -> float:
        """Log marginal likelihood of all rows at the fitted hyperparameters, for normalised targets.

        It is computed when it is read, unless the fit has it: exactly up to 800 rows, by random probes beyond. With
        inducing points it is the lower bound of Titsias.
        """
        check_is_fitted(self)
        history, n = self.history_, len(self.model_.train_targets)
        if history is not None and history.rows == n and history.objective == "exact":
            return -history.best_loss * n
        model = copy.deepcopy(self.model_).train()  # which keeps the solution of this one
        mll = ExactMarginalLogLikelihood(model.likelihood, model)
        with torch.no_grad():
            return float(mll(model(*model.train_inputs), model.train_targets)) * n

    # --- predictions ----------------------------------------------------------------------------------------

    def predict(self, X: Any, return_std: bool = False, return_cov: bool = False, include_noise: bool = False) -> Any:
        """The posterior mean at X, and how far the function may be from it.

        :param X: ``(m, d)``.
        :param return_std: return deviations ``(m,)``, too; :param return_cov: the covariance ``(m, m)``, too.
        :param include_noise: of new observations instead of the function without noise, which is the default.
        :returns: mean ``(m,)``, or the mean and one of the two; float64, in the units of y.
        :raises InputError: for both at once, or the noise of new rows where ``alpha`` is that of each training row.
        """
        if return_std and return_cov:
            raise InputError(f"{_OWNER}.predict: return_std and return_cov expect to be asked for one at a time.")
        x = self._points(X)
        if return_cov:
            return self._joint(x, include_noise)
        found = predict(
            self.model_, x, variance="auto" if return_std else None, progress=None if self.verbose else False
        )
        mean = self._numpy(found.mean) * self._y_std + self._y_mean
        if not return_std:
            return mean
        variance = found.observation_variance if include_noise else found.variance
        if variance is None:
            raise self._unknown()
        return mean, np.sqrt(np.maximum(self._numpy(variance), 0)) * self._y_std

    def _joint(self, x: Tensor, include_noise: bool) -> Any:
        """Mean and covariance of the function, or of observations."""
        if include_noise and not isinstance(self.noise_, float):
            raise self._unknown()
        with torch.no_grad():
            posterior = self.model_(x)
            covariance = self._numpy(posterior.covariance_matrix) * self._y_std**2
        if include_noise:
            covariance[np.diag_indices_from(covariance)] += self.noise_
        return self._numpy(posterior.mean) * self._y_std + self._y_mean, covariance

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> Any:
        """Functions drawn from the posterior, at X: without noise.

        From the joint distribution of up to 1,000 points; of more, and where variances are by samples, functions by
        :func:`sketchgp.sample_posterior`, which needs a kernel with random features.

        :param X: ``(m, d)``.
        :param n_samples: how many.
        :param random_state: of the draws: an integer, a ``RandomState``, or None.
        :returns: ``(m, n_samples)``, float64, in the units of y.
        """
        count, x = checks.count(_OWNER + ".sample_y", "n_samples", n_samples), self._points(X)
        seed = seed_of(random_state)
        joint = getattr(self.model_, "variance_method", "exact") != "samples"
        if len(x) > _JOINT or not joint:
            with torch.no_grad():
                draws = self._numpy(sample_posterior(self.model_, count, seed=seed)(x)).T
            return draws * self._y_std + self._y_mean
        mean, covariance = self._joint(x, include_noise=False)
        root = psd_safe_cholesky(torch.from_numpy(covariance)).numpy()
        return mean[:, None] + root @ np.random.RandomState(seed).standard_normal((len(mean), count))

    def _points(self, X: Any) -> Tensor:
        X = self._new_rows(X)
        train = self.model_.train_inputs[0]
        return checks.copied(X, train.device, train.dtype)

    @staticmethod
    def _numpy(values: Tensor) -> Any:
        return values.detach().to("cpu", torch.float64).numpy()

    @staticmethod
    def _unknown() -> InputError:
        return InputError(
            f"{_OWNER}.predict: include_noise expects to know the noise of new rows, and alpha is that of each "
            "training row; add it to the squared deviation yourself."
        )
