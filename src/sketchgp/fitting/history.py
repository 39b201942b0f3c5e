"""The history of a fit, and its picture."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from .. import checks
from ..cards import Card, Shown, seconds, several
from ..errors import InputError
from ..style import COLORS, RING, axes_for, finish

SETTLED = "the loss has settled"
FLAT = "the loss is flat where the fit began: its lengthscales are not of the size of the data"
UNSURE = "not sure"  # the first words of a note that doubts where a fit ended
STOPPED = "stopped by the callback"
AGED = "neighbours are to be chosen anew"
DEAR = "solves take longer than a factorization"
LOST = "float32 has lost a log determinant to rounding"
_LOSS, _GRADIENT = COLORS[0], "0.55"


@dataclass(repr=False)
class FitHistory(Shown):
    """The course of a fit, step by step, and how it ended.

    ``print(history)`` shows the notes that begin with "not sure", those of ``subset`` included.

    :ivar losses: negative log marginal likelihoods divided by n (by n t for t outputs), one a step.  By L-BFGS they
        never rise between ``restarts``.
    :ivar seconds: seconds since the fit began, the time before the first step included.
    :ivar best_step: the step whose parameters the model was left with.
    :ivar reason: why the fit ended.
    :ivar gradients: norms of the gradients, by Adam in the unconstrained parameters, by L-BFGS in the logarithms of
        positive ones.
    :ivar standard_errors: standard errors of the losses, by the spread of the probes: 0 where log determinants are not
        estimated (that of a leave-one-out pseudo-likelihood is not known), infinite with one probe.  As all losses have
        the same probes, their differences are far more certain.
    :ivar residuals: the largest true relative residual of the linear solves of a step, 0 without solves.
    :ivar iterations: iterations of conjugate gradients in all evaluations of a step.
    :ivar products: products with the kernel matrix in all evaluations of a step.
    :ivar evaluations: number of losses with gradient, those of a line search included, but not those of a fit from
        another start.
    :ivar optimizer: ``"lbfgs"`` or ``"adam"``.
    :ivar objective: how losses were computed: ``"exact"`` (one factorization in float64 each), ``"probes"`` (log
        determinants estimated with fixed probe vectors), ``"samples"`` (gradients by samples that a solver of the
        user's choice solves for; losses are right up to a constant, of which no standard error is known), ``"bound"``
        (Titsias's, of an inducing-point model), ``"vecchia"`` (Vecchia's approximation, for a fit that one to all rows
        of a map starts from) or ``"given"`` (whatever the ``mll`` does).
    :ivar rows: number of rows.
    :ivar subset: the history of the fit that this one started from, to a random subset or by Vecchia's approximation,
        which may have one of its own; None where it started from the model's parameters.
    :ivar restarts: steps at which the optimiser began anew: with another function (new neighbours, float64 products,
        or the exact loss instead of probes), or at the lower end of a fit from another start.
    :ivar notes: what was decided on the way.  A note that begins with "not sure" doubts that there is no lower loss:
        only one of the starts came to this one.
    :ivar bracket: two numbers between which the exact loss at the final parameters certainly is, by one more solve,
        rounding included; with exact losses that number twice, as float64 rounds it; None where nothing is certain,
        or where it would be wide.
    :ivar by_other_probes: the loss at the final parameters by as many probes that no step has seen, and its standard
        error; None where the fit did not end with probes.  A fit of many parameters follows the errors of its own
        probes, and ends with a loss that is too low.
    :ivar at_limits: hyperparameters that ended where their constraint does, or at L-BFGS's own bounds, by name, and the
        limit: the least noise that a likelihood allows, say.  The marginal likelihood may be larger beyond it.
    :ivar hyperparameters: hyperparameters of each step by name (``"covar_module.base_kernel.lengthscale"``), as the
        model has them, without those of more than 100 numbers.
    """

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    best_step: int = 0
    reason: str = ""
    gradients: list[float] = field(default_factory=list)
    standard_errors: list[float] = field(default_factory=list)
    residuals: list[float] = field(default_factory=list)
    iterations: list[int] = field(default_factory=list)
    products: list[float] = field(default_factory=list)
    evaluations: int = 0
    optimizer: str = ""
    objective: str = ""
    rows: int = 0
    subset: FitHistory | None = None
    restarts: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    bracket: tuple[float, float] | None = None
    by_other_probes: tuple[float, float] | None = None
    at_limits: dict[str, float] = field(default_factory=dict)
    hyperparameters: dict[str, list[tuple[float, ...]]] = field(default_factory=dict)

    @property
    def best_loss(self) -> float:
        """The smallest loss."""
        return self.losses[self.best_step]

    @property
    def converged(self) -> bool:
        """True if the loss has settled."""
        return self.reason == SETTLED

    def plot(self, ax: Any = None, by: Literal["steps", "seconds"] = "steps") -> Any:
        """Draw the loss, a band of one standard error about it, and on an axis of its own the norm of the gradient.

        :param ax: matplotlib axes to draw into; None makes a figure, without pyplot: ``history.plot().figure`` has
            ``savefig``, and a notebook shows it.
        :param by: ``"steps"`` or ``"seconds"``.
        :returns: the axes of the loss.
        :raises InputError: before there is a step.
        """
        return _draw(self, ax, checks.word("FitHistory.plot", "by", by, ("steps", "seconds")))

    def latest(self) -> str:
        """Describe the latest step in a few words."""
        error = f" +- {self.standard_errors[-1]:.4f}" if self.standard_errors[-1] else ""
        text = f"loss {self.losses[-1]:.4f}{error}, gradient {self.gradients[-1]:.1e}"
        if self.iterations[-1]:
            text += f", residual {self.residuals[-1]:.1e}, {self.iterations[-1]} iterations"
        return text

    def _worth(self) -> str:
        """Describe what the last loss is worth."""
        words = ""
        if self.by_other_probes is not None:
            words = ", by other probes {:.4f} +- {:.4f}".format(*self.by_other_probes)
        if self.bracket is not None:
            lower, upper = (f"{end:.4f}" for end in self.bracket)
            words += f", exactly {upper}" if lower == upper else f", exactly between {lower} and {upper}"
        return words

    def __str__(self) -> str:
        if not self.losses:
            return f"fit: no step, {self.reason}"
        rows = self._card().rows
        told = [f"{label} {text}" for label, text in rows if label in ("loss", "steps", "started from", "time")]
        told += [text for label, text in rows if label == "at limits"]
        return f"fit by {self.optimizer} ({self.objective}): {'; '.join([*told, *_doubts(self)])}"

    def _card(self) -> Card:
        if not self.losses:
            return Card.of("FitHistory: no step", ended=self.reason)
        loss = f"{self.losses[0]:.4f} to {self.best_loss:.4f} for each row"
        if self.objective == "samples":
            loss += ", but for a constant"
        loss += self._worth()
        before = None
        if self.subset is not None and self.subset.losses:
            how = " by Vecchia's approximation" if self.subset.objective == "vecchia" else ""
            before = f"a fit to {self.subset.rows:,} rows{how}, {several(len(self.subset.losses), 'step')}"
        return Card.of(
            f"FitHistory: {self.rows:,} rows, by {self.optimizer}, objective {self.objective}",
            loss=loss,
            gradient=f"{self.gradients[0]:.1e} to {self.gradients[self.best_step]:.1e}" if self.gradients else None,
            steps=f"{len(self.losses):,}, {several(self.evaluations, 'evaluation')}; {self.reason}",
            started_from=before,
            time=seconds(self.seconds[-1]),
            at_limits=", ".join(f"{name} at its limit {limit:g}" for name, limit in self.at_limits.items()),
            notes="; ".join(self.notes),
        )


def _draw(history: FitHistory, ax: Any, by: str) -> Any:
    """Draw the course of a fit, as :meth:`FitHistory.plot` describes it."""
    if not history.losses:
        raise InputError("FitHistory.plot expects a fit with at least one step.")
    ax = axes_for("FitHistory.plot", ax)
    x = history.seconds if by == "seconds" else list(range(len(history.losses)))
    other = ax.twinx()
    norms = [norm if norm > 0 else math.nan for norm in history.gradients]
    other.plot(x, norms, color=_GRADIENT, linewidth=1.2, linestyle="--", marker=".", markersize=4)
    other.set_yscale("log" if any(norm > 0 for norm in history.gradients) else "linear")
    other.set_ylabel("norm of the gradient (dashed)", color="0.35")
    other.spines["top"].set_visible(False)
    errors = history.standard_errors
    if any(errors) and all(map(math.isfinite, errors)):
        lower, upper = ([v + side * e for v, e in zip(history.losses, errors, strict=True)] for side in (-1, 1))
        ax.fill_between(x, lower, upper, color=_LOSS, alpha=0.15, linewidth=0, label="one standard error")
    ax.plot(x, history.losses, color=_LOSS, linewidth=2, marker=".", markersize=7, label="loss")
    best = history.best_step
    ax.plot([x[best]], [history.losses[best]], color=_LOSS, label="parameters kept", **RING)
    time, loss = "seconds since the fit began", "loss: negative log marginal likelihood per row"
    title = f"{history.optimizer}, {history.objective}; {history.reason}"
    finish(ax, title, time if by == "seconds" else "step", loss, grid="y")
    ax.spines["right"].set_visible(True)  # the axis of the gradient
    ax.set_zorder(other.get_zorder() + 1)
    ax.patch.set_visible(False)
    return ax


def _doubts(history: FitHistory | None) -> list[str]:
    """Return the notes that doubt the end of a fit, those of fits to some of the rows included."""
    return [] if history is None else [*_doubts(history.subset), *(n for n in history.notes if n.startswith(UNSURE))]
