"""``sample_posterior(model, num_samples)``: functions drawn from a posterior, to be evaluated anywhere later."""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

import torch
from gpytorch.models import ExactGP
from torch import Tensor

from .accelerate import acceleration_of
from .checks import count, points_among
from .checks import seed as checked_seed
from .errors import InputError
from .inference.pathwise import OF_PREDICTOR, Deviations, expansion
from .models.accelerated.acceleration import ATTRIBUTE
from .models.accelerated.conditioned import Conditioned, check_inputs
from .models.accelerated.mixins import plain_class
from .models.accelerated.posterior import solution_report
from .models.accelerated.sample_solve import SampleSolve
from .models.accelerated.targets import refuse_missing
from .models.transforms import Transforms
from .operators import KernelMatrix
from .operators.expression import recognise_waves
from .operators.generic_tiles import of_all_dims
from .operators.random_features import PriorPaths
from .random_streams import salted
from .report import SolveReport, merged

_OWNER = "sample_posterior"
_ADVICE = " model(x).rsample() draws values at given points."
# attributes without which a copy holds no data
_DATA = (
    "train_inputs",
    "_train_targets",
    "prediction_strategy",
    "_original_train_inputs",
    "_kept",
    ATTRIBUTE,
)


def sample_posterior(
    model: ExactGP, num_samples: int, seed: int = 0, frequencies: int | None = None
) -> PosteriorSamples:
    """Draw functions ``f_s`` from the posterior of a model, to be evaluated anywhere, at any number of points.

    A prior function, a sum of waves with random frequencies of the kernel's spectral density, is corrected by one
    solve (Matheron's rule)::

        f_s(x) = mean(x) + p_s(x) - k(x, X) (K + D)^-1 (p_s(X) + D^(1/2) xi_s)

    with X the training inputs, D the noises and xi normal.  Means and covariances of such functions are those of the
    posterior, whatever the number of frequencies, and for what the solve leaves out; they are normal as frequencies
    grow.  The solve has ``num_samples`` columns and is by the solver of the model's mean, to its tolerance; where that
    was left open, until samples are some percent of a posterior deviation off at the most, in the root mean square
    over training points.  p(X) takes ``n num_samples frequencies`` cosines a term of the kernel.

    :param model: one that :func:`accelerate` was called on, whose covariance is one plain kernel (of several outputs of
        BoTorch's too: a kernel each), or an :class:`InducingPointGP`, whose samples spread as its variances by samples
        do: ``mean(x) + p_s(x) - k(x, z) W_s`` with W the solver's weights for p(X) and noises.  It is put into eval
        mode.  The samples keep copies of what they need: what becomes of the model later does not matter to them.
    :param num_samples: S, how many.
    :param seed: of functions and noises; the same functions for the same seed, model and software.
    :param frequencies: of each function; None is 1024.
    :returns: the functions; ``samples(x)`` is ``(S, ..., p)`` for x ``(..., p, d)``.
    :raises InputError: for a model that is not accelerated, has no data or missing targets, a batch of models, several
        tasks, and for kernels without random features.  Those are known of RBF, Matern, rational quadratic, periodic,
        Laplace, spectral mixture, cosine and constant kernels, scaled, added and multiplied.

    Wilson, Borovitskiy, Terenin, Mostowsky, Deisenroth, "Efficiently sampling functions from Gaussian process
    posteriors" (ICML 2020).
    """
    sparse = hasattr(type(model), "variance_solution")  # an InducingPointGP, which solves for samples itself
    if not sparse:
        acceleration_of(model, _OWNER)
    num_samples = count(_OWNER, "num_samples", num_samples)
    seed = checked_seed(_OWNER, "seed", seed)
    frequencies = count(_OWNER, "frequencies", frequencies, optional=True)
    check_inputs(_OWNER, model)
    refuse_missing(_OWNER, model.train_targets)
    model.eval()
    make = _of_inducing_points if sparse else _of_accelerated
    with torch.inference_mode(False), torch.no_grad():
        return make(model, num_samples, seed, frequencies)


class PosteriorSamples:
    """Functions drawn from a posterior by :func:`sample_posterior`.

    ``samples(x)`` is differentiable in x, once: differentiating the gradient again is an error.  Each evaluation takes
    ``p S frequencies`` cosines a term of the kernel and one product with ``k(x, X)``, in tiles.  ``samples[2:5]`` are
    some of the functions, and ``samples[3]`` is ``samples[3:4]``.  They can be pickled where the model's class can be.

    :ivar report: the :class:`SolveReport` of the solve behind them, whose columns are the functions.
    :ivar several: whether values have a dimension for outputs.
    """

    def __init__(
        self, prior: FrozenPrior, outputs: list[_Output], several: bool, report: SolveReport, name: str
    ) -> None:
        self._prior, self._outputs, self._name = prior, outputs, name
        self.several, self.report = several, report

    @property
    def outputs(self) -> int:
        """Number of outputs."""
        return len(self._outputs)

    def __call__(self, x: Tensor) -> Tensor:
        """Return every function at x ``(..., p, d)``: ``(S, ..., p)`` or ``(S, ..., p, t)`` of t outputs, in x's dtype.

        :raises InputError: for points that do not fit the training inputs.
        """
        x = points_among("samples", x, self._prior.seen)
        mean, features = self._prior(x.reshape(-1, x.shape[-1]), self.outputs)
        values = torch.stack([out(z).mT for out, z in zip(self._outputs, features, strict=True)], dim=-1)  # (S, p, t)
        values = (values + mean).to(x.dtype)
        return self._finished(values.reshape(len(self), *x.shape[:-1], values.shape[-1]))

    def each(self, x: Tensor) -> Tensor:
        """Return every function at points of its own, x ``(S, ..., p, d)``: ``(S, ..., p)``, or ``(S, ..., p, t)``.

        :raises InputError: for points that do not fit the training inputs, or are not as many sets as functions.
        """
        x = points_among("samples", x, self._prior.seen, sets=True)
        if len(x) != len(self):
            raise InputError(f"each: x expects points for each of {len(self)} functions, got {len(x)} sets.")
        mean, features = self._prior(x.reshape(-1, x.shape[-1]), self.outputs)
        each = [out.each(z.unflatten(0, (len(x), -1))) for out, z in zip(self._outputs, features, strict=True)]
        values = (torch.stack(each, dim=-1).flatten(0, 1) + mean).to(x.dtype)  # (S p, t)
        return self._finished(values.reshape(*x.shape[:-1], values.shape[-1]))

    def _finished(self, values: Tensor) -> Tensor:
        """:param values: ``(..., p, t)``."""
        values = self._prior.untransformed(values)
        return values if self.several else values.squeeze(-1)

    def __len__(self) -> int:
        return self._outputs[0].prior.samples

    def __getitem__(self, index: int | slice) -> PosteriorSamples:
        chosen = range(len(self))[index]
        chosen = range(chosen, chosen + 1) if isinstance(chosen, int) else chosen
        if chosen.step != 1 or not chosen:
            raise InputError(f"samples[...] expects a slice without step, of at least one of {len(self)}; got {index}.")
        outputs = [out.part(slice(chosen.start, chosen.stop)) for out in self._outputs]
        return PosteriorSamples(self._prior, outputs, self.several, self.report, self._name)

    def __repr__(self) -> str:
        first = self._outputs[0]
        outputs = f" of {len(self._outputs)} outputs" if self.several else ""
        return (
            f"<PosteriorSamples: {len(self)} functions{outputs} of the {self._name}, {first.prior.frequencies} "
            f"frequencies each; solved by {self.report}>"
        )


@dataclass(frozen=True)
class _Output:
    """Functions of one output, less the prior mean: ``prior(z) + k(z, points) weights``.

    :ivar points: ``(n, d)``; :ivar weights: ``(n, S)`` float64.
    """

    prior: PriorPaths
    kernel: Any
    points: Tensor
    weights: Tensor

    def __call__(self, z: Tensor) -> Tensor:
        """Return the functions at z ``(p, d)``: ``(p, S)``, float64."""
        return self.prior(z) + expansion(self.kernel, z, self.points, self.weights)

    def each(self, z: Tensor) -> Tensor:
        """Return each function at its own z ``(S, p, d)``: ``(S, p)``, float64."""
        all_of_them = expansion(self.kernel, z.flatten(0, 1), self.points, self.weights).unflatten(0, z.shape[:2])
        return self.prior.each(z) + all_of_them.diagonal(dim1=0, dim2=2).mT

    def part(self, which: slice) -> _Output:
        """Return some of the functions."""
        return replace(self, prior=self.prior.part(which), weights=self.weights[:, which])


class FrozenPrior:
    """Mean and features of a model at any points, from a copy of the model that holds no data.

    :param model: in eval mode.
    """

    def __init__(self, model: Any) -> None:
        train = model.train_inputs[0]
        shell: Any = object.__new__(plain_class(type(model)))
        kept = {name: value for name, value in model.__dict__.items() if name not in _DATA}
        modules = OrderedDict((k, v) for k, v in model._modules.items() if k != "likelihood")
        shell.__dict__.update(kept, _modules=modules, train_inputs=None, _train_targets=None, prediction_strategy=None)
        self.model = copy.deepcopy(shell).requires_grad_(False)
        for module in self.model.modules():  # priors of parameters hold functions that cannot be pickled
            module.__dict__.update({"_priors": OrderedDict()} if "_priors" in module.__dict__ else {})
        self.seen = Transforms(_OWNER, model).raw[..., :0, :].detach().clone()
        self.batch = train.shape[:-2]
        self.transformed = getattr(model, "input_transform", None) is not None

    def matrix(self, x: Tensor) -> tuple[Tensor, KernelMatrix]:
        """Return the prior mean and covariance at x ``(p, d)``, after any transform of inputs."""
        prior = self.model.forward(x.expand(*self.batch, *x.shape[-2:]))
        matrix = KernelMatrix.from_lazy(prior.lazy_covariance_matrix, "tiled")
        assert matrix is not None
        return prior.mean, matrix

    def __call__(self, x: Tensor, outputs: int) -> tuple[Tensor, list[Tensor]]:
        """Return means ``(p, t)`` or ``(p, 1)`` in float64, and each output's points ``(p, d')`` for its kernel."""
        z = x
        if self.transformed:
            z = self.model.transform_inputs(x)
            if z.shape[:-1] != x.shape[:-1]:
                raise InputError("An input_transform that makes other points is not known to posterior samples.")
        mean, matrix = self.matrix(z)
        if not self.batch:
            return mean.to(torch.float64).unsqueeze(-1), [matrix.x1] * outputs
        mean, points = (t.expand(*self.batch, *t.shape[1:]) for t in (mean, matrix.x1))
        return mean.to(torch.float64).mT, list(points.unbind())

    def untransformed(self, values: Tensor) -> Tensor:
        """Return values ``(..., p, t)`` in units of the data, which BoTorch's models standardize."""
        transform = getattr(self.model, "outcome_transform", None)
        return values if transform is None else transform.untransform(values)[0]


def _of_accelerated(model: Any, samples: int, seed: int, frequencies: int | None) -> PosteriorSamples:
    training = Conditioned.of(_OWNER, model).training
    training = training if training is not None and training.ours else None
    batch = () if training is None else tuple(training.noisy.batch_shape)
    several = getattr(model, "num_outputs", 1) > 1 and batch == (model.num_outputs,)
    if training is None or not isinstance(training.matrix, KernelMatrix) or (batch and not several):
        raise InputError(
            f"{_OWNER}: model expects one plain kernel and no batch (or independent outputs of BoTorch's), which "
            f"{_name(model)} has not. Draw from a model of each output, or by model(x).rsample() at given points."
        )
    prior, outputs, reports = FrozenPrior(model), [], []
    _, matrix = prior.matrix(model.train_inputs[0])
    indices = [(number,) for number in range(batch[0])] if batch else [()]
    parts = [matrix.element(index) if batch else matrix for index in indices]
    for part in parts:
        recognise_waves(part.kernel, _ADVICE, _OWNER)
    solution_report(model)
    of_mean = model.prediction_strategy.weights.detach().to(torch.float64)
    for index, part in zip(indices, parts, strict=True):
        own_seed = salted(seed, f"functions of output {index[0]}") if index else seed
        deviations = Deviations(of_all_dims(part.kernel), part.x1.clone(), samples, own_seed, frequencies)
        solve = SampleSolve(training, index, seed if frequencies is None else None)
        weights, report = solve(deviations, training.noise.expand(*batch, -1)[index])
        weights = of_mean[index].unsqueeze(1) - weights
        outputs.append(_Output(deviations.prior, deviations.kernel, deviations.points, weights))
        reports.append(report)
    return PosteriorSamples(prior, outputs, several, merged(reports), _name(model))


def _name(model: Any) -> str:
    """Return the name of the model's class, as the user knows it."""
    return plain_class(type(model)).__name__


def _of_inducing_points(model: Any, samples: int, seed: int, frequencies: int | None) -> PosteriorSamples:
    prior = FrozenPrior(model)
    (_, x), (_, z) = (prior.matrix(points) for points in (model.train_inputs[0], model.inducing_points))
    kernel, several = of_all_dims(z.kernel), model.train_targets.dim() > 1
    recognise_waves(kernel, _ADVICE, _OWNER)
    mean_weights = model.solution.value.reshape(len(z.x1), -1)
    columns = samples * mean_weights.shape[1]
    errors = model._solve_errors(Deviations(kernel, z.x1.clone(), columns, seed, frequencies, OF_PREDICTOR), x.x1)
    outputs = []
    for number, column in enumerate(mean_weights.unbind(1)):
        which = slice(number * samples, (number + 1) * samples)
        weights = column.unsqueeze(1) - errors.weights[:, which]
        outputs.append(_Output(errors.prior.part(which), kernel, errors.points, weights))
    return PosteriorSamples(prior, outputs, several, errors.solution.report, _name(model))
