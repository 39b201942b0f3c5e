"""``KernelRidge``: kernel ridge regression by the solvers, in scikit-learn's words."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, MultiOutputMixin, RegressorMixin
from sklearn.utils.validation import _check_sample_weight, validate_data
from torch import Tensor

from .. import checks
from ..errors import InputError
from ..preconditioners import RPCholesky
from ..report import require_answer
from ..solvers import FULL_SOLVERS, INDUCING_POINT_SOLVERS, Cholesky, FullProblem, InducingPointProblem
from ..solvers.automatic import automatic_inducing_solver, automatic_solver
from ..solvers.solver import check_solver
from .choices import (
    DIRECT,
    TYPES,
    Estimator,
    choose,
    device_of,
    inducing_points,
    numbers,
    ridge_kernel,
    seed_of,
)


@dataclass(eq=False, repr=False)
class Ridge(Estimator):
    """A base class of the estimators that solve a ridge regression, with its parameters."""

    alpha: float = 1.0
    _: KW_ONLY
    kernel: Any = "rbf"
    gamma: float | None = None

    def _solve(self, x: Tensor, targets: Tensor, weights: Tensor | None = None) -> None:
        """Solve a ridge regression, for ``solution_``.

        :param weights: ``(n,)`` positive, or None for ones.
        """
        owner, solver, auto = type(self).__name__, self.solver, isinstance(self.solver, str)
        alpha = checks.number(owner, "alpha", self.alpha, above=0, finite=True)
        kernel = ridge_kernel(owner, self.kernel, self.gamma, x)
        chosen = choose(owner, self.method, self.n_inducing, len(x), x.device)
        noise = alpha if weights is None else alpha / weights
        if self.verbose:
            print(f"{owner}: {chosen.why}")
        check_solver(owner, solver, FULL_SOLVERS if chosen.method == "exact" else INDUCING_POINT_SOLVERS)
        if chosen.method == "exact":
            problem = FullProblem(kernel, x, targets, noise)
            if auto:
                solver = Cholesky() if len(x) <= DIRECT else automatic_solver(len(x), x.device, RPCholesky())[0]
            solution = solver.solve(problem)
            require_answer(solution.report, solver)
        else:
            points = inducing_points(kernel, x, chosen.points, seed_of(self.random_state))
            few = InducingPointProblem(kernel, x, targets, noise, points)
            solution = (automatic_inducing_solver(few) if auto else solver).solve(few)
        self.solution_, self.method_, self.choice_ = solution, chosen.method, chosen.why


class KernelRidge(Ridge, MultiOutputMixin, RegressorMixin, BaseEstimator):
    """Kernel ridge regression: ``f = sum_i w_i k(., x_i)`` with ``(K + alpha) w = y``, as scikit-learn's class.

    The system is solved by a factorization up to 2,000 rows, and beyond by conjugate gradients, or ASkotch where no
    preconditioner fits in memory; on inducing points ``f = k(., z) w`` minimises
    ``sum_i (f(x_i) - y_i)^2 + alpha ||f||^2``.  ``choice_`` says which, and why.

    :param alpha: the ridge, positive.
    :param kernel: ``"rbf"``, ``"laplacian"`` (of the l1 distance), ``"matern12"``, ``"matern32"``, ``"matern52"`` or
        ``"rational_quadratic"``, without an output scale; or a GPyTorch kernel, which is used as it is.
    :param gamma: of kernels by name: ``exp(-gamma |x - z|^2)``, ``exp(-gamma |x - z|_1)`` for ``"laplacian"``; the
        others have the lengthscale ``(2 gamma)^-1/2`` that the first has.  None is 1 / d.
    :param method: ``"exact"``, ``"inducing"``, or ``"auto"``: exact up to 20,000 rows (CUDA: 100,000) while a
        preconditioner fits in memory.
    :param n_inducing: how many inducing points, by k-means; None is ``10 n^1/2``, from 500 to 5,000, as memory allows.
        A number makes ``method="auto"`` take them.
    :param solver: ``"auto"``, or a solver of :class:`sketchgp.FullProblem` or :class:`sketchgp.InducingPointProblem`.
    :param device: where to compute, such as ``"cuda"``; None is the CPU.
    :param random_state: of the inducing points: an integer, a ``RandomState``, or None.
    :param verbose: print ``choice_``.

    :ivar dual_coef_: ``(n,)`` or ``(n, t)``, or of as many rows as there are inducing points.
    :ivar solution_: the :class:`sketchgp.Solution`, with the report of the solve.
    :ivar method_: ``"exact"`` or ``"inducing"``; :ivar choice_: a sentence on it.
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> KernelRidge:
        """Solve for the coefficients.

        :param X: ``(n, d)``, an array or a pandas table; float32 stays float32.
        :param y: ``(n,)`` or ``(n, t)``.
        :param sample_weight: ``(n,)`` factors of the squared errors; None for ones.  Rows of weight 0 are left out.
        :returns: the estimator.
        :raises InputError: a ``ValueError``, for what does not fit.
        """
        self._check_common()
        y = numbers("KernelRidge", y, "y")
        X, y = validate_data(self, numbers("KernelRidge", X), y, dtype=TYPES, y_numeric=True, multi_output=True)
        x = checks.copied(X, device_of("KernelRidge", self.device))
        targets, weights = checks.copied(y, x.device, x.dtype), None
        if sample_weight is not None:
            given = numbers("KernelRidge", sample_weight, "sample_weight")
            checked = _check_sample_weight(given, X, dtype=np.float64, ensure_non_negative=True)
            weights = checks.copied(checked, x.device)
            kept = weights > 0
            if not bool(kept.any()):
                raise InputError("KernelRidge: sample_weight expects at least one that is positive.")
            x, targets, weights = x[kept], targets[kept], weights[kept]
        self._solve(x, targets, weights)
        self.dual_coef_ = self.solution_.value.cpu().numpy()
        return self

    def predict(self, X: Any) -> Any:
        """``f(X)``: ``(m,)`` or ``(m, t)`` for X ``(m, d)``, float64."""
        X = self._new_rows(X)
        return self.solution_.predict(X).double().cpu().numpy()
