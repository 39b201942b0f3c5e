"""``KernelClassifier``: classes by kernel ridge regression, or by logistic and hinge losses in random features."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data
from torch import Tensor

from .. import checks
from ..errors import InputError
from ..one_hot import OneHot
from ..random_feature_classifier import RandomFeatureClassifier
from ..solvers import DoublyStochastic
from ..solvers.streams.problem import CLASSIFICATION
from .choices import TYPES, device_of, numbers, ridge_kernel, seed_of
from .ridge import Ridge

_OWNER = "KernelClassifier"
_LOSSES = ("squared", *CLASSIFICATION)


def _has_probabilities(estimator: Any) -> bool:
    if estimator.loss == "hinge":
        raise AttributeError("The hinge loss has no probabilities; take loss='squared', 'multinomial' or 'logistic'.")
    return True


@dataclass(eq=False, repr=False)
class KernelClassifier(Ridge, ClassifierMixin, BaseEstimator):
    """Classification by a function a class, whose largest value is the label.

    - ``loss="squared"``: kernel ridge regression on one column a class, less its share of the rows
      (:class:`sketchgp.OneHot`, :class:`KernelRidge`): one solve, exact or on inducing points.  The squared error of
      such columns is Brier's score, so that the functions estimate probabilities, which ``predict_proba`` makes sum
      to 1 without negative ones.
    - ``"multinomial"`` (classes together), ``"logistic"`` and ``"hinge"`` (each against the rest): regularised by
      ``alpha / 2 ||f||^2``, in random features (:class:`sketchgp.RandomFeatureClassifier`), for kernels that have them.
      The first two have probabilities of their own.

    :param alpha: the ridge, positive.
    :param loss: one of these.
    :param kernel: as :class:`KernelRidge` has it, :param gamma: too.
    :param method: of the squared loss, :param n_inducing: of it, and :param solver: of it, as :class:`KernelRidge` has
        them; of the other losses ``"auto"``, None, and ``"auto"`` or a :class:`sketchgp.DoublyStochastic`.
    :param device: where to compute, such as ``"cuda"``; None is the CPU.
    :param random_state: of inducing points and random features: an integer, a ``RandomState``, or None.
    :param verbose: print ``choice_``, and show progress.

    :ivar classes_: ``(c,)`` the labels, ascending.
    :ivar method_: ``"exact"``, ``"inducing"`` or ``"features"``; :ivar choice_: a sentence on it.
    """

    _: KW_ONLY
    loss: Literal["squared", "multinomial", "logistic", "hinge"] = "squared"

    def fit(self, X: Any, y: Any) -> KernelClassifier:
        """Learn from labels.

        :param X: ``(n, d)``, an array or a pandas table; float32 stays float32.
        :param y: ``(n,)`` labels of at least two classes.
        :returns: the estimator.
        :raises InputError: a ``ValueError``, for what does not fit.
        """
        self._check_common()
        checks.word(_OWNER, "loss", self.loss, _LOSSES)
        X, y = validate_data(self, numbers(_OWNER, X), checks.unmasked(_OWNER, "y", y), dtype=TYPES)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise InputError(f"{_OWNER}: y expects labels of at least two classes, got one class, {self.classes_[0]}.")
        x = checks.copied(X, device_of(_OWNER, self.device))
        self._codes = OneHot(torch.arange(len(self.classes_), device=x.device))
        return (self._fit_squares if self.loss == "squared" else self._fit_features)(x, checks.copied(labels, x.device))

    def _fit_squares(self, x: Tensor, labels: Tensor) -> KernelClassifier:
        targets = self._codes.encode(labels, x.dtype)
        self._shares = targets.mean(dim=0)
        self._solve(x, targets - self._shares)
        return self

    def _fit_features(self, x: Tensor, labels: Tensor) -> KernelClassifier:
        assert self.loss != "squared"
        checks.word(_OWNER, "method", self.method, ("auto",))
        checks.instance(_OWNER, "n_inducing", self.n_inducing, type(None), f"None with loss={self.loss!r}")
        alpha = checks.number(_OWNER, "alpha", self.alpha, above=0, finite=True)
        kernel = ridge_kernel(_OWNER, self.kernel, self.gamma, x)
        solver = self.solver
        if isinstance(solver, str) and checks.word(_OWNER, "solver", solver, ("auto",)):
            solver = DoublyStochastic(seed=seed_of(self.random_state))
        self.model_ = RandomFeatureClassifier(kernel, self.loss, alpha, range(len(self.classes_)), solver)
        self.method_, self.choice_ = "features", f"random features: loss={self.loss!r}"
        if self.verbose:
            print(f"{_OWNER}: {self.choice_}")
        self.model_.learn(x, labels, progress=None if self.verbose else False)
        return self

    def _scores(self, X: Any, kind: str = "scores") -> Tensor:
        """Return scores ``(m, c)``, or of a model of random features what its method ``kind`` says."""
        X = self._new_rows(X)
        if self.loss == "squared":
            return self.solution_.predict(X) + self._shares
        parameter = next(self.model_.covar_module.parameters())
        with torch.no_grad():
            return getattr(self.model_, kind)(checks.copied(X, parameter.device, parameter.dtype))

    def decision_function(self, X: Any) -> Any:
        """The functions at X: ``(m, c)``, or of two classes ``(m,)``, that of the second less that of the first."""
        scores = self._scores(X).double().cpu().numpy()
        return scores[:, 1] - scores[:, 0] if scores.shape[1] == 2 else scores

    def predict(self, X: Any) -> Any:
        """Labels ``(m,)`` of X ``(m, d)``: the class of the largest function."""
        best = self._scores(X).argmax(dim=-1).cpu().numpy()
        return self.classes_[best]

    @available_if(_has_probabilities)
    def predict_proba(self, X: Any) -> Any:
        """Probabilities ``(m, c)`` of the classes, in the order of ``classes_``; not of the hinge loss."""
        raw = self._scores(X, "probabilities").double()
        return (self._codes.probabilities(raw) if self.loss == "squared" else raw / raw.sum(1, True)).cpu().numpy()
