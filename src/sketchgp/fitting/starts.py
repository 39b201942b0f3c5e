"""Where a fit starts: lengthscales, noise and output scale of the size of the data.

With lengthscales far below the distances of neighbours every point is alone, with ones far above all points are alike;
a marginal likelihood does not change with them there, and no gradient leads away.  Few rows may be fitted best with
hardly any noise, which a fit to more rows then does not leave.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from gpytorch.kernels import Kernel, SpectralMixtureKernel
from gpytorch.lazy import LazyEvaluatedKernelTensor
from gpytorch.means import ConstantMean
from linear_operator.operators import LinearOperator
from torch import Tensor

from ..operators import KernelMatrix
from ..operators.lazies import parts_of
from ..random_streams import generator
from .objective import Objective

_POINTS = 128  # points whose nearest neighbours are looked at
_ALONE = 1e-6  # correlation of neighbours below which the loss does not change with lengthscales
_FEW = 0.05  # share of the points that may be near another one by chance and leave nothing to learn from
_ALIKE = 1e-5  # distance of all correlations from 1 below which the loss does not change with lengthscales
_FAR = 1e3  # ratio of a lengthscale that nobody set and the size of its input
_LITTLE = 10.0  # ratio of a lengthscale and the size of its input at which it matters a little
_APART = 0.1  # ratio of a lengthscale and the least distance of two values at which all of them are uncorrelated
_SOME = 32  # points whose prior variance is looked at
_ABOUT = 1.01  # ratio of the prior variance and its target that is near enough
_ROOTS = 8  # trials of a factor of output scales
_NONE = 1e-3  # share of the targets' variance below which there is hardly any noise
_TRIED = (1e-3, 1e-2)  # shares of it, tried one after the other while the loss falls
_OTHER_UNIT = 10.0  # ratio of prior variance and mean square of the targets that tells of different units
_NAMES = ("raw_noise", "raw_task_noises")
_ABOVE = 9.0  # distance of a noise to its limit at the start, in limits: next to it no gradient leads away;
_WITHIN = 0.1  # but no more than this share of the targets' variance
ALONE = "every point is alone"
ALIKE = "all points are alike"


@torch.no_grad()
def flatness(model: Any, seed: int) -> str:
    """Return why the loss does not change with lengthscales: :data:`ALONE`, :data:`ALIKE`, or "" where it does.

    Correlations of some rows and their nearest neighbours are looked at; "" for models of which no rows can be taken.
    """
    inputs = [part for part in model.train_inputs if part.is_floating_point()]
    if len(inputs) != 1 or inputs[0].dim() != 2 or model.train_targets.dim() != 1 or len(inputs[0]) < 3:
        return ""
    x = inputs[0].detach().double().cpu()
    chosen = _neighbours(x, seed)
    covariance = _told(model, lambda prior: prior.covariance_matrix.double(), chosen)
    if covariance is None or covariance.shape != (len(chosen), len(chosen)):
        return ""
    deviation = covariance.diagonal().sqrt()
    correlation = covariance / deviation.unsqueeze(1) / deviation
    apart = (x[chosen].unsqueeze(1) != x[chosen]).any(dim=-1)
    if not bool(apart.any()) or not bool(torch.isfinite(correlation).all()):
        return ""
    nearest = (correlation.abs() * apart).amax(dim=1)
    if float((nearest >= _ALONE).double().mean()) < _FEW:
        return ALONE
    return ALIKE if float(correlation[apart].min()) > 1 - _ALIKE else ""


@torch.no_grad()
def rescale(model: Any, seed: int) -> str:
    """Give the kernels lengthscales of the size of their inputs where the loss is flat; return what was wrong, or "".

    Those with ``requires_grad=False`` stay, and all do where that does not help.  An input that is a thousand times
    smaller than a lengthscale that all inputs share, as they do before a fit, is given one of its own.
    """
    why = flatness(model, seed)
    before, seen = [(p, p.detach().clone()) for p in model.parameters()], inputs_seen(model)
    moved = [_moved(part, seen.get(id(part)), bool(why)) for part in _scaled(model)]
    if not any(moved):
        return ""
    if flatness(model, seed):
        for parameter, value in before:
            parameter.copy_(value)
        return ""
    return why or "some inputs are far smaller"


@torch.no_grad()
def spread(model: Any, times: float) -> bool:
    """Give the kernels lengthscales of so many times the size of their inputs; return whether any changed.

    The size is multiplied by the root of the number of inputs: at that of one input alone all points are far from each
    other where there are many.  Lengthscales of periodic kernels are in other units, and stay, as all do with
    ``requires_grad=False``.
    """
    before, seen = [p.detach().clone() for p in model.parameters()], inputs_seen(model)
    for part in _scaled(model):
        if not hasattr(part, "period_length"):
            _moved(part, seen.get(id(part)), True, times)
    for part in model.modules():
        if isinstance(part, SpectralMixtureKernel):
            _stretch(part, seen.get(id(part)), times)
    return any(not torch.allclose(p, kept, rtol=0.1) for p, kept in zip(model.parameters(), before, strict=True))


@torch.no_grad()
def set_scale(model: Any, variance: float, apart: float = 1.0) -> bool:
    """Give the prior variance about this value by the output scales; return whether that could be done.

    All scales are multiplied by one factor, a root of the ratio where they are nested.  Those with
    ``requires_grad=False`` stay, and all do where that is not enough.

    :param apart: nothing is done where the ratio of the variances is below this factor.
    """
    scaled = [
        part for part in model.modules() if hasattr(part, "raw_outputscale") and part.raw_outputscale.requires_grad
    ]
    prior = prior_variance(model) if scaled else 0.0
    if prior == 0 or variance == 0 or 1 / apart <= variance / prior <= apart:
        return False
    before = [(part.raw_outputscale, part.raw_outputscale.detach().clone()) for part in scaled]
    power = 1.0
    for _ in range(_ROOTS):
        ratio = variance / prior
        for part in scaled:
            factor = ratio ** (1 / power)
            part.outputscale = inside(factor * part.outputscale.detach(), part.raw_outputscale_constraint)
        now = prior_variance(model)
        if 1 / _ABOUT <= now / variance <= _ABOUT:
            return True
        if not 0 < now < math.inf or now == prior:
            break
        power, prior = max(power * math.log(now / prior) / math.log(ratio), 1.0), now
    for parameter, kept in before:
        parameter.copy_(kept)
    return False


def prior_variance(model: Any) -> float:
    """Return the mean prior variance of a few training points; 0 where it is not known."""
    # ``prior.variance`` warns of small ones
    variances = _told(model, lambda prior: prior.lazy_covariance_matrix.diagonal(dim1=-2, dim2=-1), slice(_SOME))
    return 0.0 if variances is None else float(variances.double().mean())


@torch.no_grad()
def _told(model: Any, read: Callable[[Any], Any], rows: Any = slice(None)) -> Any:
    """Return what ``read`` gives of the prior at some training rows; None where the model's forward does not tell.

    It may know of all rows, or evaluate the covariance itself.  The buffers that a pass in training mode changes are
    put back.
    """
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        return read(model.forward(*(part[rows] for part in model.train_inputs)))
    except (RuntimeError, ValueError, IndexError, TypeError, AttributeError):
        return None
    finally:
        for buffer, value in kept:
            buffer.copy_(value)


@dataclass(frozen=True)
class Revived:
    """Lengthscales of one kernel that were made such that the loss depends on them.

    :ivar before: their values before, ``(..., d)``.
    :ivar huge: which of them were huge.
    """

    kernel: Any
    before: Tensor
    huge: Tensor

    @torch.no_grad()
    def judge(self, wrong: bool = False) -> None:
        """Put back those that were huge where the gradient, now present, points there again; all where it is wrong."""
        raw = self.kernel.raw_lengthscale
        back = torch.zeros_like(self.huge, device=raw.device) | wrong
        if raw.grad is not None and bool(torch.isfinite(raw.grad).all()):
            back |= self.huge.to(raw.device) & (raw.grad < 0)
        self.kernel.lengthscale = torch.where(back, self.before.to(raw), self.kernel.lengthscale)


@torch.no_grad()
def revive(model: Any) -> list[Revived]:
    """Move single lengthscales on which the loss hardly depends to where it depends on them a little.

    Few rows may take an input for irrelevant, or for a mere label.  Its lengthscale is then huge or tiny, and no
    gradient would tell more rows better.  One evaluation can then :meth:`Revived.judge` them.
    """
    revived, seen = [], inputs_seen(model)
    for kernel in _scaled(model):
        x = seen.get(id(kernel)) if kernel.raw_lengthscale.requires_grad else None
        if x is None or len(x) < 2 or kernel.ard_num_dims is None or kernel.lengthscale.shape[-1] != x.shape[1]:
            continue
        before, size = kernel.lengthscale.detach().clone(), x.std(dim=0) * x.shape[1] ** 0.5
        now = before.double().cpu()
        gaps = x.sort(dim=0).values.diff(dim=0)
        least = gaps.where(gaps > 0, torch.inf).amin(dim=0)
        tiny, huge = (now < _APART * least) & (size > 0), (now > _LITTLE * size) & (size > 0)
        if bool((tiny | huge).any()):
            chosen = torch.where(tiny, size, torch.where(huge, _LITTLE * size, now)).to(kernel.raw_lengthscale)
            kernel.lengthscale = inside(chosen, kernel.raw_lengthscale_constraint)
            revived.append(Revived(kernel, before, huge))
    return revived


def _scaled(model: Any) -> list[Any]:
    """Return the kernels that have lengthscales."""
    return [part for part in model.modules() if getattr(part, "has_lengthscale", False)]


def inputs_seen(model: Any) -> dict[int, Tensor]:
    """Return the inputs that each kernel sees, ``(n, d)`` float64 on the CPU, by the kernel's id.

    ``forward`` may standardise the training inputs, or pass them through a network.  Kernels of a batch, of several
    different inputs or of integers are left out.

    :param model: in training mode.
    """

    def read(prior: Any) -> dict[int, Tensor]:
        seen: dict[int, Tensor] = {}
        parts = [prior.lazy_covariance_matrix]
        while parts:
            part = parts.pop()
            if isinstance(part, LazyEvaluatedKernelTensor | KernelMatrix):
                _descend(part.kernel, part.x1, seen)
            elif isinstance(part, LinearOperator):
                parts.extend(parts_of(part))
        return seen

    seen = _told(model, read) or {}
    each = {id(x): x.double().cpu() for x in seen.values() if x.dim() == 2 and x.is_floating_point()}  # one for many
    return {key: each[id(x)] for key, x in seen.items() if id(x) in each}


def _descend(kernel: Any, x: Tensor, seen: dict[int, Tensor]) -> None:
    """Add a kernel and those inside it; ``x`` are its inputs, its own ``active_dims`` selected."""
    seen[id(kernel)] = x
    for child in kernel.children():
        for part in child if isinstance(child, torch.nn.ModuleList) else (child,):
            if isinstance(part, Kernel):
                dims = part.active_dims
                _descend(part, x if dims is None else x.index_select(-1, dims), seen)


def _moved(kernel: Any, x: Tensor | None, all_of_it: bool, times: float = 1.0) -> bool:
    """Give a kernel lengthscales of the size of its inputs x, which may be unknown; return whether they changed.

    :param all_of_it: whether to do so for all inputs, not only for those that are far smaller.
    """
    raw = kernel.raw_lengthscale
    if x is None or len(x) < 2 or not raw.requires_grad:
        return False
    sizes, now = times * x.std(dim=0), kernel.lengthscale.detach().double().cpu()
    if kernel.ard_num_dims is None:
        wanted = sizes.norm().expand(now.shape)
    elif now.shape[-1] == x.shape[1]:
        wanted = (sizes * x.shape[1] ** 0.5).expand(now.shape)
    else:
        return False
    own = kernel.ard_num_dims is None or hasattr(kernel, "period_length") or bool((now != now.flatten()[0]).any())
    if own and not all_of_it:
        return False
    far = (wanted > 0) & ((now > _FAR * wanted) | all_of_it)
    if not bool(far.any()):
        return False
    chosen = torch.where(far, wanted, now).to(raw)
    kernel.lengthscale = inside(chosen, kernel.raw_lengthscale_constraint)
    return True


def _stretch(kernel: SpectralMixtureKernel, x: Tensor | None, times: float) -> None:
    """Stretch a spectral mixture to its inputs x, which may be unknown: lengthscales are ``1 / (2 pi scale)``."""
    if x is None or len(x) < 2:
        return
    sizes = times * (x.std(dim=0) * x.shape[1] ** 0.5).to(kernel.mixture_scales)
    factors = 1 / (2 * math.pi * sizes * kernel.mixture_scales.log().mean(dim=-3, keepdim=True).exp())
    factors = factors.where(factors.isfinite(), 1)
    for name, raw, constraint in kernel.named_parameters_and_constraints():
        if raw.requires_grad and name != "raw_mixture_weights":
            raw.copy_(constraint.inverse_transform(inside(factors * constraint.transform(raw), constraint)))


def inside(values: Tensor, constraint: Any) -> Tensor:
    """Return values moved inside the bounds; on them a transform would give infinity."""
    lower, upper = (float(bound.max()) for bound in (constraint.lower_bound, constraint.upper_bound))
    room = 1e-3 * (upper - lower) if upper < float("inf") else 1e-3 * abs(lower)
    return values.clamp(lower + room, upper - room)


def _neighbours(x: Tensor, seed: int) -> Tensor:
    """Return some rows, and the nearest other point of each by standardised inputs."""
    unit = x / x.std(dim=0).where(x.std(dim=0) > 0, 1)
    some = torch.randperm(len(x), generator=generator(seed, "rows whose neighbours tell a flat start"))[:_POINTS]
    distance = torch.cdist(unit[some], unit, compute_mode="donot_use_mm_for_euclid_dist")
    distance[distance == 0] = torch.inf
    return torch.cat([some, distance.argmin(dim=1)]).unique()


# --- noise and output scale ------------------------------------------------------------------------------------------


@torch.no_grad()
def raise_noise(objective: Objective) -> str:
    """Raise the noise of a model that a fit to fewer rows left with hardly any, where that lowers the loss.

    A posterior mean without noise that passes through few rows may miss those between them, and next to the limit of
    the noise the gradient does not tell.  This takes up to three losses without gradient.

    :returns: what was done, in words; "" for nothing.
    """
    model = objective.model
    variance, noises = targets_variance(model), _noises(model)
    if not variance or not noises or any(bool((c.transform(p) >= _NONE * variance).any()) for p, c in noises):
        return ""
    first = least = _loss(objective)
    best, note, rows = objective.state(), "", len(model.train_targets)
    for share in _TRIED:
        set_noise(model, share)
        loss = _loss(objective)
        if not loss < least:
            break
        least, best = loss, objective.state()
        of_what = f"the noise was raised to {share:g} of the targets' variance"
        note = f"{of_what}: with {rows} rows the loss was {first:.4f}, and {loss:.4f} then"
    objective.restore(best)
    return note


@torch.no_grad()
def set_noise(model: Any, share: float) -> bool:
    """Set the noises that a fit may change to a share of the targets' variance, or more next to their limit.

    :returns: whether there are any.
    """
    variance = targets_variance(model)
    noises = _noises(model) if variance else []
    for parameter, constraint in noises:
        limit = max(float(constraint.lower_bound.max()), 0.0)
        wanted = max(share * variance, limit + min(_ABOVE * limit, _WITHIN * variance))
        parameter.copy_(constraint.inverse_transform(inside(torch.full_like(parameter, wanted), constraint)))
    return bool(noises)


def targets_variance(model: Any) -> float:
    """Return the variance of the targets; 0 where there are fewer than two."""
    targets = model.train_targets.detach().double()
    targets = targets[~torch.isnan(targets)]
    return float(targets.var()) if len(targets) > 1 else 0.0


@torch.no_grad()
def mean_square(model: Any) -> float:
    """Return the mean square of the targets about the mean of the model; 0 where that is not known."""
    residual = _residual(model)
    return 0.0 if residual is None else float(residual.square().mean())


@torch.no_grad()
def centre_mean(objective: Objective) -> None:
    """Move a trend of the mean to least squares, or else a constant of it to where the targets are about zero."""
    if objective.trend is not None:
        objective.trend.put(torch.zeros_like(objective.trend.coordinates))
        return
    model, residual = objective.model, _residual(objective.model)
    constants = [
        m.raw_constant
        for m in model.modules()
        if isinstance(m, ConstantMean) and m.constraint_for_parameter_name("raw_constant") is None
    ]
    constants = [p for p in constants if p.requires_grad and p.numel() == 1]
    if constants and residual is not None and model.train_targets.dim() == 1:
        constants[0].add_(residual.mean())


def _residual(model: Any) -> Tensor | None:
    """Return targets less the prior mean, float64, without missing ones; None where ``forward`` does not tell."""
    mean = _told(model, lambda prior: prior.mean)
    if mean is None or mean.shape != model.train_targets.shape:
        return None
    residual = (model.train_targets - mean).double()
    residual = residual[~torch.isnan(residual)]
    return residual if len(residual) else None


def loss_of_noise(model: Any) -> float:
    """Return the loss a row of independent noise about the mean of the targets; infinity where it is not known."""
    known = model.train_targets.dim() == 1 and _noises(model) and not any(True for _ in model.named_priors())
    variance = targets_variance(model) if known else 0.0
    return 0.5 * math.log(2 * math.pi * math.e * variance) if variance > 0 else math.inf


@torch.no_grad()
def to_unit(objective: Objective) -> str:
    """Give output scale and noise the unit of the targets where the prior variance is of another, if the loss falls.

    :returns: what was done, in words; "" for nothing.
    """
    model, before, prior = objective.model, objective.state(), prior_variance(objective.model)
    level = mean_square(model) > _OTHER_UNIT * targets_variance(model) > 0
    if level:
        centre_mean(objective)
    scaled = set_scale(model, mean_square(model), _OTHER_UNIT)
    if not (level or scaled):
        return ""
    if scaled:
        noise = max((float(c.transform(p).max()) for p, c in _noises(model)), default=0.0)
        set_noise(model, min(max(noise / prior, _NONE), 1.0))
    moved, loss = objective.state(), _loss(objective)
    objective.restore(before)
    first = _loss(objective)
    if not loss < first:
        return ""
    objective.restore(moved)
    what = " and ".join(["the constant of the mean"] * level + ["the output scale and the noise"] * scaled)
    return f"{what} got the targets' unit: the loss was {first:.4g}, and {loss:.4g} then"


def _noises(model: Any) -> list[tuple[Any, Any]]:
    """Return the noises that a fit may change, and their constraints."""
    named = model.likelihood.named_parameters_and_constraints()
    return [(p, c) for name, p, c in named if name.rpartition(".")[-1] in _NAMES and c is not None and p.requires_grad]


def _loss(objective: Objective) -> float:
    """Return the loss; infinity where it cannot be computed."""
    value = objective.evaluate(gradient=False).value
    return value if math.isfinite(value) else math.inf
