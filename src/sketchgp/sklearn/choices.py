"""Parameters, kernels and choices by the number of rows and the memory, which all estimators share."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from gpytorch.kernels import Kernel, ScaleKernel
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from .. import checks
from ..errors import InputError
from ..inducing_points import choose_inducing_points
from ..kernels import BY_NAME
from ..memory import available_memory
from ..preconditioners import RPCholesky
from ..solvers import ConjugateGradients
from ..solvers.automatic import automatic_solver

METHODS = ("auto", "exact", "inducing")
TYPES = [np.float64, np.float32]  # of inputs; others are converted to the first
DIRECT = 2000  # rows up to which a factorization is the fastest
_EXACT = {"cpu": 20_000, "cuda": 100_000}  # rows that are solved for exactly by default
_LEAST, _MOST = 500, 5000  # inducing points by default: 10 n^1/2 between these, and what memory holds
_BYTES = 100  # times m^2
_KIND = f"a gpytorch kernel or one of {', '.join(map(repr, BY_NAME))}"


@dataclass(eq=False, repr=False, kw_only=True)
class Estimator:
    """A base class of the estimators, with the parameters that all have."""

    method: Literal["auto", "exact", "inducing"] = "auto"
    n_inducing: int | None = None
    solver: Any = "auto"
    device: Any = None
    random_state: Any = None
    verbose: bool = False

    def _check_common(self) -> None:
        """Check parameters that some fits do not use.

        :raises InputError: for one that does not fit.
        """
        owner = type(self).__name__
        checks.flag(owner, "verbose", self.verbose)
        try:
            check_random_state(self.random_state)
        except ValueError:
            kind = "a seed from 0 to 2^32 - 1, a RandomState"
            raise checks.refusal(owner, "random_state", kind, self.random_state, optional=True) from None

    def _new_rows(self, X: Any) -> Any:
        """Return rows to predict as an array.

        :raises InputError: for rows that are not like those of the fit.
        """
        check_is_fitted(self)
        return validate_data(self, numbers(type(self).__name__, X), dtype=TYPES, reset=False)


@dataclass(frozen=True)
class Chosen:
    """``"exact"``, or ``"inducing"`` with so many points; and why, as a sentence."""

    method: str
    points: int
    why: str


def choose(owner: str, method: Any, n_inducing: Any, n: int, device: torch.device) -> Chosen:
    """:raises InputError: for arguments that do not fit."""
    checks.word(owner, "method", method, METHODS)
    asked = checks.count(owner, "n_inducing", n_inducing, optional=True)
    most = _EXACT.get(device.type, _EXACT["cuda"])
    why = f"{n:,} rows, of at most {most:,} that are solved for exactly by default"
    if method != "auto":
        why = f"{n:,} rows, as method={method!r} says"
    elif asked is not None:
        method, why = "inducing", f"{n:,} rows, as n_inducing={asked} says"
    elif n > most:
        method, why = "inducing", f"{n:,} rows, more than the {most:,} that are solved for exactly by default"
    else:
        solver, of_memory = automatic_solver(n, device, RPCholesky())
        method = "exact" if isinstance(solver, ConjugateGradients) else "inducing"
        why = why if method == "exact" else of_memory.partition(": ")[2]
    if method == "exact":
        return Chosen(method, 0, f"exact: {why}")
    points = asked
    if points is None:
        fits = math.isqrt(available_memory(device) // 2 // _BYTES)
        points = max(1, min(max(_LEAST, min(_MOST, math.ceil(10 * math.sqrt(n)))), fits))
    points = min(points, n)
    return Chosen(method, points, f"{points:,} inducing points: {why}")


def inducing_points(kernel: Any, x: Tensor, count: int, seed: int) -> Tensor:
    """``(count, d)``: all rows, or centres of k-means."""
    return x if count == len(x) else choose_inducing_points(kernel, x, count, "k-means", seed=seed).points


def device_of(owner: str, device: Any) -> torch.device:
    """Where an estimator computes; None is the CPU.

    :raises InputError: for what is no device.
    """
    try:
        return torch.empty(0, device="cpu" if device is None else device).device
    except (TypeError, RuntimeError, AssertionError):  # the last where torch is built without CUDA
        raise checks.refusal(owner, "device", "'cpu', 'cuda' where torch finds one", device, optional=True) from None


def seed_of(random_state: Any) -> int:
    """A seed of ours from what scikit-learn takes: an integer, a ``RandomState``, or None."""
    return int(check_random_state(random_state).randint(2**31 - 1))


def numbers(owner: str, values: Any, name: str = "X") -> Any:
    """The values as scikit-learn's validation takes them: a tensor detached and on the CPU.

    :raises InputError: for dates and times, whose numbers depend on the unit that they are stored in, for masked
        values, and for sparse tensors.
    """
    if torch.is_tensor(values):
        return checks.array(owner, name, values).detach().cpu()
    dtypes = values.dtypes if hasattr(values, "dtypes") else [getattr(values, "dtype", None)]
    for dtype in dtypes if hasattr(dtypes, "__iter__") else [dtypes]:
        if getattr(dtype, "kind", "") in ("M", "m"):
            raise InputError(
                f"{owner}: {name} expects numbers, got {dtype}; days since the first one, say, are numbers."
            )
    return checks.unmasked(owner, name, values)


def tuned_kernel(owner: str, kernel: Any, x: Tensor, size: float) -> Kernel:
    """A kernel to begin tuning with: of a name, with an output scale, and a lengthscale for each feature that is
    its deviation times d^1/2, the distance of rows; or a copy of what the user gave.

    :param x: ``(n, d)``; :param size: of the targets, squared.
    :raises InputError: for what is neither.
    """
    if isinstance(kernel, str):
        d = x.shape[1]
        made = ScaleKernel(_named(owner, kernel)(ard_num_dims=d)).to(x)
        spread = x.to(torch.float64).std(dim=0, correction=0)
        spread = torch.where(spread > 0, spread, 1.0) * math.sqrt(d)
        made.base_kernel.lengthscale = spread.to(x)
        made.outputscale = x.new_tensor(size)  # a number would be rounded to float32
        return made
    return own_kernel(owner, kernel, x)


def ridge_kernel(owner: str, kernel: Any, gamma: float | None, x: Tensor) -> Kernel:
    """The kernel of a ridge regression.

    :param kernel: a name or a kernel; :param gamma: scikit-learn's, of names: ``exp(-gamma |x - z|^2)`` for RBF,
        ``exp(-gamma |x - z|_1)`` for laplacian; the others have RBF's lengthscale ``(2 gamma)^-1/2``. None is 1 / d.
    :raises InputError: for what does not fit.
    """
    if not isinstance(kernel, str):
        if gamma is not None:
            raise InputError(f"{owner}: gamma is of kernels by name; a kernel of your own has its lengthscale.")
        return own_kernel(owner, kernel, x)
    made = _named(owner, kernel)().to(x)
    gamma = checks.number(owner, "gamma", gamma, above=0, finite=True, optional=True) or 1 / x.shape[1]
    made.lengthscale = x.new_tensor(1 / gamma if kernel == "laplacian" else (2 * gamma) ** -0.5)
    return made


def own_kernel(owner: str, kernel: Any, x: Tensor) -> Kernel:
    """A copy of a user's kernel, of x's dtype and device."""
    checks.instance(owner, "kernel", kernel, Kernel, _KIND)
    return copy.deepcopy(kernel).to(x)


def _named(owner: str, name: str) -> Callable[..., Kernel]:
    if name not in BY_NAME:
        raise checks.refusal(owner, "kernel", _KIND, name)
    return BY_NAME[name]
