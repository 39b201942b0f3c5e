"""Settings as context managers, in GPyTorch's style: ``with sketchgp.settings.memory_budget(2**30): ...``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar, Literal, get_args

import torch

from .checks import number, word
from .memory import available_memory

_SHARE = 4  # of the free memory, one stored matrix may take one part in so many
Variance = Literal["auto", "exact", "samples", "low_rank"]
VARIANCES: tuple[str, ...] = get_args(Variance)
Agreement = Callable[[int, bool, torch.device], int]
_agreement: ContextVar[Agreement | None] = ContextVar("sketchgp_agreed_budgets", default=None)


class _Setting(AbstractContextManager):
    """Base class of settings: blocks whose value holds for the thread that opened them, the innermost first.

    :cvar values: of the blocks that are open.
    """

    values: ClassVar[ContextVar[tuple[Any, ...]]]

    def __init__(self, value: Any) -> None:
        self._value = value

    def __enter__(self) -> _Setting:
        self.values.set((*self.values.get(), self._value))
        return self

    def __exit__(self, *error: object) -> None:
        self.values.set(self.values.get()[:-1])


class memory_budget(_Setting):
    """Bytes that one stored matrix (a dense kernel matrix, or a low-rank factor) may take.

    Without it, each may take a quarter of the memory that is free on its device.  It decides whether
    ``matmul="auto"`` stores the kernel matrix and whether rows on disk are read whole (:class:`sketchgp.RowSource`),
    and bounds the automatic rank.  It holds for the thread that opened it
    (a context variable); a thread that is started inside the block has none, unless it is run in a copy of the context.

    :param budget: bytes, a number of at least 1.
    :raises InputError: for anything else.
    """

    values = ContextVar("sketchgp_memory_budgets", default=())

    def __init__(self, budget: int) -> None:
        super().__init__(int(number("memory_budget", "budget", budget, least=1, finite=True)))

    @classmethod
    def value(cls, device: torch.device | str = "cpu") -> int:
        """Return the budget in force, in bytes."""
        budgets, agreement = cls.values.get(), _agreement.get()
        budget = budgets[-1] if budgets else available_memory(device) // _SHARE
        return budget if agreement is None else agreement(budget, not budgets, torch.device(device))


def free_memory(device: torch.device | str) -> int:
    """Return the bytes that are free, on which several processes that work together agree.

    What is decided by them is then decided alike.
    """
    free, agreement = available_memory(device), _agreement.get()
    return free if agreement is None else agreement(free, True, torch.device(device))


@contextmanager
def agreeing_on_budgets(agreement: Agreement) -> Iterator[None]:
    """Let memory budgets inside the block be what several processes agree on.

    :param agreement: from the budget of this one, whether it was measured, and the device, to that of all.
    """
    token = _agreement.set(agreement)
    try:
        yield
    finally:
        _agreement.reset(token)


class variance(_Setting):
    """Compute variances of accelerated models inside the block by one method, whatever ``accelerate`` was told.

    It holds for the thread that opened it, and for what is read later of a prediction that was made inside.  Covariance
    matrices and draws are exact in any case.  The methods are:

    - ``"exact"``: a linear solve for each test point, or one factorization for all where that is cheaper and fits.
    - ``"low_rank"``: conditioned on the 128 nearest training points (64 on maps) and 100 inducing points, times a
      factor that makes exact variances of 60 training points that are left out right on the average; one solve with 64
      columns for any number of test points.  Their scatter there is the standard error.
    - ``"samples"``: the mean square of ``variance_samples`` draws of the posterior about its mean
      (:class:`sketchgp.inference.pathwise.Deviations`), averaged with the low-rank variance by the inverse of
      their squared standard errors; one solve with as many columns more.  For kernels with random features: RBF,
      Matern, rational quadratic, periodic, Laplace and constant kernels, their sums and products.
    - ``"auto"``: exact while that takes at most three times as long; else low-rank where its standard error is at most
      a tenth, and samples where it is not.  It compares 4 test points with exact variances once, and warns where it is
      off by more than the standard errors say.  Where gradients may be asked for, and for all but one plain kernel
      without batch, it is exact.

    :param method: one of these.
    :raises InputError: for anything else.
    """

    values = ContextVar("sketchgp_variances", default=())

    def __init__(self, method: Variance) -> None:
        super().__init__(word("variance", "method", method, VARIANCES))

    @classmethod
    def value(cls, otherwise: str) -> str:
        """Return the method in force.

        :param otherwise: that of a model, where there is none.
        """
        methods = cls.values.get()
        return methods[-1] if methods else otherwise
