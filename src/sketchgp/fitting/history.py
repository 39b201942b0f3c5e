"""What a fit did."""

from __future__ import annotations

from dataclasses import dataclass, field

SETTLED = "the loss has settled"


@dataclass(repr=False)
class FitHistory:
    """What a fit did.  ``losses`` are negative log marginal likelihoods divided by n (by n t for t outputs), one a
    step; ``gradients`` the norms of their gradients, by Adam in the unconstrained parameters, by L-BFGS in the
    logarithms of what is positive; ``seconds`` since the fit began, what came before the first step included.

    ``best_step`` is the step whose parameters the model was left with; ``reason`` says why the fit ended.
    ``optimizer`` is ``"lbfgs"`` or ``"adam"``; ``objective`` says how losses were computed: ``"exact"`` (one
    factorization in float64 each), ``"probes"`` (log determinants estimated with fixed probe vectors),
    ``"samples"`` (gradients by samples that a solver of the user's choice solves for, losses right but for a constant),
    ``"bound"`` (of an inducing-point model) or ``"given"`` (whatever the ``mll`` does).
    ``evaluations`` counts losses with gradient, those of a line search included.  ``subset`` is the history of the fit
    on a random subset that this one started from, with ``rows`` rows; None where it started from the model's
    parameters.
    """

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    best_step: int = 0
    reason: str = ""
    gradients: list[float] = field(default_factory=list)
    evaluations: int = 0
    optimizer: str = ""
    objective: str = ""
    rows: int = 0
    subset: FitHistory | None = None

    @property
    def best_loss(self) -> float:
        """The smallest loss."""
        return self.losses[self.best_step]

    @property
    def converged(self) -> bool:
        """Whether further steps promise nothing."""
        return self.reason == SETTLED

    def __str__(self) -> str:
        if not self.losses:
            return f"fit: no step, {self.reason}"
        before = ""
        if self.subset is not None and self.subset.losses:
            before = f", started from {self.subset.rows} rows ({len(self.subset.losses)} steps)"
        return (
            f"fit by {self.optimizer} ({self.objective}): loss {self.losses[0]:.4f} to {self.best_loss:.4f} in "
            f"{len(self.losses)} steps, {self.evaluations} evaluations, {self.seconds[-1]:.1f} s{before}; {self.reason}"
        )

    def __repr__(self) -> str:
        return f"<FitHistory: {self}>"
