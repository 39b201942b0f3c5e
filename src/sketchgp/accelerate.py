"""``accelerate(model)``: an existing GPyTorch model, made to converge, in place; ``restore(model)`` undoes it.

``ExactGP`` is the base class of models that are accelerated from their construction.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import torch
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from gpytorch.models import ExactGP as _ExactGP
from torch import Tensor

from .checks import count, found, instance, seed, word
from .errors import InputError
from .models.accelerated.acceleration import ATTRIBUTE, Acceleration
from .models.accelerated.mixins import (
    AcceleratedModel,
    accelerated_class,
    acceleration_of,
    check_likelihood,
    is_accelerated,
    join,
    leave,
    plain_class,
)
from .models.accelerated.posterior import clear_cache
from .models.accelerated.targets import check_noise, check_targets
from .operators.engines import ENGINES, Matmul, check_choice, check_present
from .preconditioners import AutomaticPreconditioner, Preconditioner
from .settings import VARIANCES, Variance
from .solvers import FULL_SOLVERS, BlockSolver, FullProblem, Solver
from .solvers.solver import check_solver

__all__ = ["ExactGP", "accelerate", "acceleration_of", "restore"]
Model = TypeVar("Model", bound=_ExactGP)
_MATMULS = (*ENGINES, "gpytorch")


def accelerate(
    model: Model,
    preconditioner: Preconditioner | Literal["auto"] | None = "auto",
    solver: Solver[FullProblem] | Literal["auto"] = "auto",
    matmul: Matmul | Literal["gpytorch"] = "auto",
    matmul_precision: Literal["float32", "tf32"] = "float32",
    variance: Variance = "auto",
    variance_samples: int = 128,
    probe_seed: int | None = 0,
) -> Model:
    """Give a GPyTorch model sketchgp's preconditioner, solver and kernel products, in place.

    The model stays what it was: same object, same parameters and state_dict, same calls; training by any marginal
    likelihood, prediction, fantasies, pickling, copying and moving between devices work as before.  Nothing outside
    this model and its likelihood changes.  Models whose covariance GPyTorch inverts by structure (Kronecker
    multitask, linear kernels, inducing points) keep GPyTorch's way while no target is missing.  Up to 800 points
    (2,000 where BoTorch is imported), or what a ``max_cholesky_size`` block says, the matrix is factorized, in
    float64 where the model is accelerated.  Training on missing targets takes :class:`ExactMarginalLogLikelihood`.
    Calling it again replaces the earlier choices.

    :param model: any ``gpytorch.models.ExactGP`` (BoTorch's ``SingleTaskGP`` is one).
    :param preconditioner: :class:`RPCholesky`, :class:`Nystrom`, :class:`NystromEigenPro`, :class:`FullScale`, None for
        none, or ``"auto"``: :class:`RPCholesky`, or from 5,000 rows with up to three features :class:`FullScale` where
        the pivots leave much.
    :param solver: of the posterior mean: :class:`ConjugateGradients`, :class:`Cholesky`, :class:`ASkotch`,
        :class:`Skotch`, :class:`EigenPro2`, one of your own (:class:`sketchgp.solvers.Solver`), or ``"auto"``:
        conjugate gradients while a good preconditioner fits in memory, ASkotch beyond (the report of the solve says
        which, and why).  The marginal likelihood, variances, fantasies and gradients, which have other right-hand sides
        for each call, are always left to conjugate gradients (``Cholesky`` solves everything but the marginal
        likelihood); but :func:`fit` has the gradients of the marginal likelihood from samples that ASkotch, Skotch,
        EigenPro 2 or your own solves for, with no factor of a preconditioner.
    :param matmul: how the kernel matrix is multiplied, in training and prediction.  ``"dense"`` stores it for each
        solve, and ``"tiled"`` never does.  ``"fused"`` takes one pass on a CPU (with numba), ``"triton"`` on CUDA.
        ``"lattice"`` takes fast Fourier transforms for inputs on a regular lattice, with gaps, and tiles for other
        inputs; ``"near_and_far"`` takes non-uniform ones for one to three features, to a tolerance.  ``"auto"`` takes
        transforms where they are faster (of float64 inputs on a lattice alone), else ``"fused"`` where that is, else
        stores the matrix where it fits the memory budget, else takes the fastest that applies.  ``"gpytorch"`` leaves
        the products to GPyTorch.
        (An elementwise product of two covariances made in ``forward`` is stored wherever it fits.)
    :param matmul_precision: of the products with ``matmul="triton"``: ``"float32"`` or ``"tf32"``.
        Whatever it is, residuals are checked in float64 arithmetic.
    :param variance: how ``model(x).variance`` is computed: ``"auto"``, ``"exact"``, ``"low_rank"`` or ``"samples"``, as
        :class:`sketchgp.settings.variance` describes them.  Covariance matrices and draws are exact in any case.
    :param variance_samples: of ``"samples"``, whose relative standard error is below ``sqrt(2 / variance_samples)``.
    :param probe_seed: of the probe vectors that log determinants are estimated with.  They are the same at every
        evaluation, so that a loss is one function of the hyperparameters: a line search (BoTorch's
        ``fit_gpytorch_mll``) ends early with others, without a word.  None draws fresh ones each time, as GPyTorch
        does.
    :returns: the model.
    :raises InputError: if an argument is not one of these, or the training data do not fit the model (targets
        ``(n, 1)`` of a model of one output, NaN among the inputs); the model is then as it was.
    """
    return _install(model, preconditioner, solver, matmul, matmul_precision, variance, variance_samples, probe_seed)


def _install(model: Model, *choices: Any, built: bool = True) -> Model:
    """Do what :func:`accelerate` says.

    :param choices: its arguments after the model, in their order.
    :param built: False inside a constructor: the model has no kernel yet, and its dtype may still be changed.
    """
    preconditioner, solver, matmul, matmul_precision, variance, variance_samples, probe_seed = choices
    if not isinstance(model, _ExactGP):
        raise InputError(
            f"accelerate: model expects a gpytorch.models.ExactGP, got {found(model)}"
            + ("; accelerate each model of its .models." if hasattr(model, "models") else ".")
        )
    if hasattr(model, "_left_out"):  # an InducingPointGP
        raise InputError(
            "accelerate: model expects one whose n x n systems are solved; an InducingPointGP has none, and takes its "
            "choices itself: InducingPointGP(..., solver=KRILL()). fit and predict take it as it is."
        )
    owner, likelihood = "accelerate" if built else type(model).__name__, model.likelihood
    check_likelihood(owner, likelihood)
    if isinstance(preconditioner, str) and preconditioner == "auto":
        preconditioner = AutomaticPreconditioner()
    if preconditioner is not None and not isinstance(preconditioner, Preconditioner):
        raise InputError(
            f"{owner}: preconditioner expects a choice such as RPCholesky(), None or 'auto', got "
            f"{found(preconditioner)}."
        )
    check_solver(owner, solver, FULL_SOLVERS)
    word(owner, "matmul", matmul, _MATMULS)
    word(owner, "variance", variance, VARIANCES)
    variance_samples = count(owner, "variance_samples", variance_samples, least=2)
    probe_seed = None if probe_seed is None else seed(owner, "probe_seed", probe_seed)
    check_choice(owner, "auto" if matmul == "gpytorch" else matmul, matmul_precision)
    _check_data(model, preconditioner, solver, built)
    if model.train_inputs is not None:
        check_present(matmul, model.train_inputs[0].device, model.train_inputs[0].dtype)

    acceleration = Acceleration(
        preconditioner, solver, matmul, matmul_precision, variance, variance_samples, probe_seed
    )
    if not is_accelerated(model):  # the class is unchanged where type(model)(...) made the model
        model.__class__ = accelerated_class(type(model), AcceleratedModel)
    before, owners = model.__dict__.get(ATTRIBUTE), likelihood.__dict__.get(ATTRIBUTE, [])
    owners[:] = [owner for owner in owners if owner is not before]
    join(likelihood, acceleration)
    model.__dict__[ATTRIBUTE] = acceleration
    clear_cache(model)
    return model


def restore(model: Model) -> Model:
    """Make an accelerated model an ordinary GPyTorch model again, in place; its parameters stay as they are.

    :returns: the model.
    :raises InputError: if the model is not accelerated.
    """
    if not is_accelerated(model):
        raise InputError(f"restore: model expects one that accelerate was called on, got {found(model)}.")
    acceleration = model.__dict__.pop(ATTRIBUTE)
    model.__class__ = plain_class(type(model))
    leave(model.likelihood, acceleration)
    clear_cache(model)
    return model


def _check_data(model: _ExactGP, preconditioner: Preconditioner | None, solver: Any, built: bool) -> None:
    inputs = model.train_inputs
    if inputs is None or model.train_targets is None:
        return
    if any(x.shape[-2] == 0 for x in inputs):
        raise InputError("accelerate expects a model with at least one training point.")
    for number, x in enumerate(inputs):
        if x.layout != torch.strided or x.is_complex():
            raise InputError(
                f"The model's training inputs (number {number}) are expected to be dense and real, got {x.dtype}, "
                f"{x.layout}."
            )
    if bool(torch.isinf(model.train_targets).any()):
        raise InputError("The model's training targets hold infinity.")
    dtype, targets = inputs[0].dtype, model.train_targets
    if built and inputs[0].is_floating_point():
        wrong = [name for name, p in model.named_parameters() if p.is_floating_point() and p.dtype != dtype]
        if wrong or targets.dtype != dtype:
            what = f"parameter {wrong[0]}" if wrong else "training targets"
            raise InputError(
                f"The model's training inputs are {dtype} and its {what} are not; convert all of it: "
                "model.double() or model.float()."
            )
    check_targets(model, built)
    check_noise(model.likelihood, targets)
    if inputs[0].device != targets.device:
        raise InputError(f"Training inputs are on {inputs[0].device} and targets on {targets.device}; use one device.")
    noise = getattr(model.likelihood, "noise", None)
    if torch.is_tensor(noise) and not bool((torch.isfinite(noise) & (noise > 0)).all()):
        raise InputError(
            f"The likelihood's noise must be positive and finite; the least is {float(noise.detach().min())}."
        )
    if preconditioner is not None:
        preconditioner.validate(inputs[0].shape[-2])
    if isinstance(solver, BlockSolver):
        solver.check_size(inputs[0].shape[-2])


class ExactGP(_ExactGP):
    """Base class for new models: ``gpytorch.models.ExactGP`` followed by :func:`sketchgp.accelerate`.

    Define ``mean_module``, ``covar_module`` and ``forward(x)`` as for GPyTorch's class; everything that takes one of
    its models takes this one.

    :param train_x: training inputs ``(..., n, d)``, or a tuple of tensors.
    :param train_y: training targets ``(..., n)``.
    :param likelihood: a Gaussian likelihood.
    :param solver: as for :func:`sketchgp.accelerate`, like the parameters after it.
    :raises InputError: for arguments that :func:`sketchgp.accelerate` refuses.
    """

    def __init__(
        self,
        train_x: Tensor | tuple[Tensor, ...],
        train_y: Tensor,
        likelihood: Any,
        solver: Solver[FullProblem] | Literal["auto"] = "auto",
        preconditioner: Preconditioner | Literal["auto"] | None = "auto",
        matmul: Matmul | Literal["gpytorch"] = "auto",
        matmul_precision: Literal["float32", "tf32"] = "float32",
        variance: Variance = "auto",
        variance_samples: int = 128,
        probe_seed: int | None = 0,
    ) -> None:
        owner = type(self).__name__
        parts = train_x if isinstance(train_x, tuple | list) else [train_x]
        if train_x is not None or train_y is not None:
            for name, value in [("train_x", part) for part in parts] + [("train_y", train_y)]:
                instance(owner, name, value, torch.Tensor, "a tensor" + (", or a tuple of them" * (name == "train_x")))
        instance(owner, "likelihood", likelihood, _GaussianLikelihoodBase, "a Gaussian likelihood")
        super().__init__(train_x, train_y, likelihood)
        _install(
            self, preconditioner, solver, matmul, matmul_precision, variance, variance_samples, probe_seed, built=False
        )
