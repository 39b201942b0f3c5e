"""BoTorch: samples of a posterior as a deterministic model, and Thompson sampling with them.

``import sketchgp`` does without BoTorch, which is imported here, and by ``predict`` for a model of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .checks import found
from .checks import seed as checked_seed
from .errors import InputError
from .posterior_samples import PosteriorSamples, sample_posterior
from .random_streams import salted

try:
    from botorch.acquisition.thompson_sampling import PathwiseThompsonSampling as _BoTorchs
    from botorch.models.deterministic import DeterministicModel
except ImportError as error:
    raise ImportError("sketchgp.botorch needs BoTorch: python -m pip install 'sketchgp[botorch]'") from error

__all__ = ["PathwiseThompsonSampling", "PosteriorPathModel"]


class PosteriorPathModel(DeterministicModel):
    """Functions drawn from a model's posterior by :func:`sketchgp.sample_posterior`, as a model of BoTorch's.

    It is what BoTorch's ``MatheronPathModel`` is, with its shapes, without an n x n matrix: what takes a deterministic
    model takes this one (``optimize_posterior_samples``, ``optimize_acqf``, ``.posterior(X)``).  Transforms of inputs
    and outcomes are those of the model: X and values are in units of the data.

    :param model: an accelerated model of BoTorch's, a ``ModelListGP`` of such (accelerate each of its ``.models``),
        whose samples are independent, an :class:`sketchgp.InducingPointGP`, or :class:`sketchgp.PosteriorSamples`.
    :param sample_shape: of the functions; the batch shape of this model.  Empty for one function.
    :param seed: as for :func:`sketchgp.sample_posterior`, like ``frequencies``.
    :raises InputError: for what :func:`sketchgp.sample_posterior` refuses, and samples of another number.

    :ivar samples: the :class:`sketchgp.PosteriorSamples`, one for each model.
    """

    def __init__(
        self,
        model: Any,
        sample_shape: torch.Size | tuple[int, ...] = (),
        seed: int = 0,
        frequencies: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(sample_shape, tuple) or not all(type(size) is int and size > 0 for size in sample_shape):
            raise InputError(
                f"PosteriorPathModel: sample_shape expects a torch.Size of positive numbers, got {found(sample_shape)}."
            )
        self.sample_shape = torch.Size(sample_shape)
        seed, functions = checked_seed("PosteriorPathModel", "seed", seed), self.sample_shape.numel()
        if isinstance(model, PosteriorSamples):
            if len(model) != functions:
                raise InputError(
                    f"PosteriorPathModel: sample_shape {tuple(sample_shape)} expects {functions} functions, got "
                    f"{len(model)}."
                )
            self.samples = [model]
        else:
            models = list(model.models) if hasattr(model, "models") else [model]
            seeds = [seed, *(salted(seed, f"functions of model {number}") for number in range(1, len(models)))]
            self.samples = [sample_posterior(m, functions, s, frequencies) for m, s in zip(models, seeds, strict=True)]
        self._is_ensemble = len(self.sample_shape) > 0

    @property
    def num_outputs(self) -> int:
        """Number of outputs of all models."""
        return sum(samples.outputs for samples in self.samples)

    @property
    def batch_shape(self) -> torch.Size:
        """Batch shape of the functions."""
        return self.sample_shape

    def forward(self, X: Tensor) -> Tensor:
        """Return the functions at X ``(..., q, d)``: ``(..., q, m)``; X's batch and ``sample_shape`` are broadcast.

        Every function at the same points where X lacks the dimensions of ``sample_shape`` or has 1 in their place;
        each at its own where it has them.
        """
        if not torch.is_tensor(X) or X.dim() < 2:
            raise InputError(f"PosteriorPathModel: X expects a tensor (..., q, d), got {found(X)}.")
        try:
            batch = torch.broadcast_shapes(X.shape[:-2], self.sample_shape)
        except RuntimeError:
            raise InputError(
                f"PosteriorPathModel: X expects a batch shape that broadcasts with sample_shape "
                f"{tuple(self.sample_shape)}, got X of shape {tuple(X.shape)}."
            ) from None
        first = len(batch) - len(self.sample_shape)  # the batch of X, then the functions
        X = X.expand(*(1,) * (len(batch) + 2 - X.dim()), *X.shape)
        shared = X.shape[first:-2].numel() == 1
        X = X.reshape(*X.shape[:first], *X.shape[-2:]) if shared else X.expand(*batch, *X.shape[-2:])
        if not shared:
            X = X.reshape(*batch[:first], -1, *X.shape[-2:]).movedim(first, 0)
        values = torch.cat([self._values(samples, X, shared) for samples in self.samples], dim=-1)
        return values.movedim(0, first).reshape(*batch, *values.shape[-2:])

    @staticmethod
    def _values(samples: PosteriorSamples, X: Tensor, shared: bool) -> Tensor:
        """``(S, ..., q, m)``."""
        values = samples(X) if shared else samples.each(X)
        return values if samples.several else values.unsqueeze(-1)


class PathwiseThompsonSampling(_BoTorchs):
    """BoTorch's acquisition function of this name, with functions drawn by :class:`PosteriorPathModel`.

    Its value at X ``(..., q, d)`` is the sum of q functions, each at its own point: a maximum is a Thompson sample.

    :param model: an accelerated model of BoTorch's; ``objective`` and ``posterior_transform`` are BoTorch's.
    :param seed: of the first functions; :meth:`redraw` counts it up.
    :param frequencies: as for :func:`sketchgp.sample_posterior`.
    """

    def __init__(
        self,
        model: Any,
        objective: Any = None,
        posterior_transform: Any = None,
        seed: int = 0,
        frequencies: int | None = None,
    ) -> None:
        super().__init__(model, objective=objective, posterior_transform=posterior_transform)
        self._next_seed = checked_seed("PathwiseThompsonSampling", "seed", seed)
        self._frequencies = frequencies

    def redraw(self, batch_size: int) -> None:
        """Draw as many new functions."""
        self.samples: Any = PosteriorPathModel(self.model, (batch_size,), self._next_seed, self._frequencies)
        self._next_seed += 1
