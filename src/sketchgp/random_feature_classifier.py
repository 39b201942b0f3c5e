"""``sketchgp.RandomFeatureClassifier``: classes from functions in random features, by logistic and hinge losses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import gpytorch
import numpy as np
import torch
from torch import Tensor

from .checks import number, refusal, word
from .errors import InputError
from .models.streamed import Streamed
from .solvers.problem import check_kernel
from .solvers.streams.doubly_stochastic import DoublyStochastic
from .solvers.streams.problem import CLASSIFICATION, Labels


class RandomFeatureClassifier(Streamed, gpytorch.Module):
    """Classification in N random features, learned by doubly stochastic gradients: a function a class, whose largest
    value is the label.

    .. code-block:: python

        model = sketchgp.RandomFeatureClassifier(kernel)
        model.learn(train_x, train_labels)  # or learn(loader), partial_fit(x, labels)
        model.predict(test_x), model.probabilities(test_x)

    ``sum_i l(f(x_i), y_i) + noise / 2 ||f||^2`` is minimised.  With noise 1 and a logistic loss f is the mode of the
    posterior of a Gaussian process with this kernel: what its scale is, ``1 / noise`` is.  Features are made anew
    wherever they are needed: memory is O(N c) for c classes, whatever n and d are.  ``state_dict()`` holds all that was
    learned.

    :param kernel: a GPyTorch kernel without batch that has random features (:class:`sketchgp.RandomFeatureGP`).
    :param loss: ``"multinomial"``, classes together; ``"logistic"``, each against the rest; ``"hinge"``, the same with
        the loss of support vector machines, which has no probabilities.
    :param noise: of the ridge.
    :param classes: the labels that there are; None for those that turn up.  One that first turns up late begins at 0,
        when steps are small already: give all of them, where they are known.
    :param solver: :class:`sketchgp.DoublyStochastic`; None for its defaults.
    :raises InputError: for arguments of other kinds.
    """

    _targets: Labels

    def __init__(
        self,
        kernel: Any,
        loss: Literal["multinomial", "logistic", "hinge"] = "multinomial",
        noise: float = 1.0,
        classes: Tensor | Iterable[int] | Iterable[str] | None = None,
        solver: DoublyStochastic | None = None,
    ) -> None:
        super().__init__()
        owner = type(self).__name__
        check_kernel(owner, kernel)
        self.covar_module = kernel
        self.loss = word(owner, "loss", loss, tuple(CLASSIFICATION))
        self.noise = number(owner, "noise", noise, least=0, finite=True)
        if isinstance(classes, str) or not (classes is None or isinstance(classes, Iterable)):
            raise refusal(owner, "classes", "integers or texts", classes, optional=True)
        self._given = classes if classes is None or torch.is_tensor(classes) else list(classes)
        self._begin(solver)

    def _new_targets(self) -> Labels:
        labels = Labels(CLASSIFICATION[self.loss].rest)
        if self._given is not None:
            cpu = torch.device("cpu")
            labels.classes = labels.codes(type(self).__name__, "classes", self._given, cpu).unique().tolist()
        return labels

    def _ridge(self) -> float:
        return self.noise

    def _mark(self) -> str:
        return f"{super()._mark()} {self.loss} {self.noise}"

    @property
    def classes(self) -> Any:
        """``(c,)`` the labels that are known, in the order of the columns of scores: an int64 tensor, or a numpy array
        of texts."""
        self._known()
        labels = self._targets
        if labels.names:
            return np.array([labels.names[code] for code in labels.classes])
        return torch.tensor(labels.classes, dtype=torch.int64)

    # --- predictions ----------------------------------------------------------------------------------------

    def scores(self, x: Tensor) -> Tensor:
        """The functions at x ``(..., p, d)``: ``(..., p, c)``, differentiable in x.

        :raises InputError: before anything was learned, and for points that do not fit.
        """
        learner, x = self._points(f"{type(self).__name__}.scores", x)
        return self._values(learner, x).to(x.dtype)

    forward = scores

    def probabilities(self, x: Tensor) -> Tensor:
        """Return the probability of each class at x ``(..., p, d)``, shape ``(..., p, c)``.

        :raises InputError: for the hinge loss, besides.
        """
        if self.loss == "hinge":
            raise InputError("The hinge loss has no probabilities; learn with loss='multinomial' or 'logistic'.")
        scores = self.scores(x)
        if self.loss == "multinomial":
            return scores.softmax(dim=-1)
        logs = torch.nn.functional.logsigmoid(scores)
        return logs.softmax(dim=-1)  # each class against the rest, and then one of them

    def predict(self, x: Tensor) -> Any:
        """Labels ``(..., p)`` at x ``(..., p, d)``: an int64 tensor, or a numpy array of texts."""
        with torch.no_grad():
            best, classes = self.scores(x).argmax(dim=-1), self.classes
            return classes.to(x.device)[best] if torch.is_tensor(classes) else classes[best.cpu().numpy()]

    # --- saving ---------------------------------------------------------------------------------------------

    def _own_state(self) -> dict[str, Any]:
        return {"classes": list(self._targets.classes), "names": list(self._targets.names)}

    def _set_own_state(self, own: dict[str, Any]) -> None:
        self._targets.classes, self._targets.names = list(own["classes"]), list(own.get("names", []))
