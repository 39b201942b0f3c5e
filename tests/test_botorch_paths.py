"""Samples of accelerated BoTorch models, as deterministic models and for Thompson sampling."""

from __future__ import annotations

import copy
import importlib
import pickle
import sys

import pytest
import torch
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ConstantMean

import sketchgp
from gp_models import TORCH_WARNINGS, dense, iterative, relative

pytest.importorskip("botorch")

from botorch.acquisition import qSimpleRegret
from botorch.acquisition.objective import LinearMCObjective
from botorch.models import ModelListGP, SingleTaskGP
from botorch.models.deterministic import MatheronPathModel
from botorch.models.transforms import Log, Normalize, Standardize
from botorch.models.transforms.input import InputPerturbation
from botorch.optim import optimize_acqf
from botorch.utils.sampling import optimize_posterior_samples

from sketchgp.botorch import PathwiseThompsonSampling, PosteriorPathModel
from test_botorch import KINDS, multitask, problem, single

pytestmark = [
    *TORCH_WARNINGS,
    pytest.mark.filterwarnings("ignore::botorch.exceptions.warnings.InputDataWarning"),
    pytest.mark.filterwarnings("ignore::botorch.exceptions.warnings.BotorchWarning"),
    pytest.mark.filterwarnings("ignore::linear_operator.utils.warnings.NumericalWarning"),
]
BOUNDS = torch.tensor([[0.0, -5.0], [10.0, 5.0]], dtype=torch.float64)
S = 4000


def accelerated(kind="default"):
    model, x = single(kind)
    return sketchgp.accelerate(model), x


@pytest.mark.parametrize("kind", KINDS)
def test_posterior(kind):
    """In units of the data, by iterations."""
    model, x = accelerated(kind)
    with dense(), torch.no_grad():
        plain = sketchgp.restore(copy.deepcopy(model)).eval().posterior(x)
        mean, covariance = plain.mean, plain.distribution.covariance_matrix
    with iterative():
        samples = sketchgp.sample_posterior(model, S, frequencies=8)
    values = samples(x)
    assert samples.report.solver == "ConjugateGradients"
    assert values.shape == ((S, 8, 2) if kind == "two outputs" else (S, 8))
    scaled = (values.reshape(S, *mean.shape) - mean) / plain.variance.sqrt()
    scaled = (scaled if getattr(plain.distribution, "_interleaved", True) else scaled.mT).flatten(1)
    sd = covariance.diagonal().sqrt()
    wanted = covariance / sd.outer(sd)
    assert float(scaled.mean(dim=0).abs().max()) < 5 / S**0.5
    products = scaled.unsqueeze(1) * scaled.unsqueeze(2)
    assert bool(((products.mean(dim=0) - wanted).abs() < 5 * products.std(dim=0) / S**0.5).all())


def test_an_outcome_that_is_no_linear_function_of_the_process():
    x, y, xt = problem()
    model = SingleTaskGP(x, y, outcome_transform=Log(), input_transform=Normalize(d=2))
    plain = SingleTaskGP(x, y.log(), outcome_transform=None, input_transform=Normalize(d=2))
    values, logs = (sketchgp.sample_posterior(sketchgp.accelerate(m), 3)(xt) for m in (model, plain))
    assert relative(values, logs.exp()) < 1e-10


SHAPES = [(), (3,), (3, 2)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["default", "two outputs", "list"])
def test_shapes_are_those_of_botorchs_path_models(kind, shape):
    if kind == "list":
        model = ModelListGP(*(accelerated()[0] for _ in range(2)))
        x = single("default")[1]
    else:
        model, x = accelerated(kind)
    paths, theirs = PosteriorPathModel(model, torch.Size(shape)), MatheronPathModel(model, torch.Size(shape))
    assert paths.batch_shape == torch.Size(shape) and paths.num_outputs == theirs.num_outputs
    assert paths._is_ensemble == theirs._is_ensemble
    one = paths(x)
    for batch in ((), shape, (5, *shape), (5, *([1] * len(shape)))):
        values = paths(x.expand(*batch, 8, 2))
        assert values.shape == theirs(x.expand(*batch, 8, 2)).shape
        assert relative(values, one.expand_as(values)) < 1e-10  # the same function, each at its own points or not
        found = paths.posterior(x.expand(*batch, 8, 2))
        assert found.mean.shape == theirs.posterior(x.expand(*batch, 8, 2)).mean.shape
        assert relative(found.mean, values) < 1e-10


def test_each_function_at_its_own_points():
    model, x = accelerated()
    paths = PosteriorPathModel(model, (2, 4))
    values = paths(x)[..., 0]  # (2, 4, 8)
    own = paths(x.reshape(4, 2, 2))
    assert own.shape == (2, 4, 2, 1)
    wanted = torch.stack([values[:, s, 2 * s : 2 * s + 2] for s in range(4)], dim=1)
    assert relative(own[..., 0], wanted) < 1e-10


def test_models_of_a_list_are_independent():
    model = accelerated()[0]
    paths = PosteriorPathModel(ModelListGP(model, model), (3,))
    values = paths(single("default")[1])
    assert float((values[..., 0] - values[..., 1]).abs().max()) > 1e-2


def test_given_samples():
    model, x = accelerated()
    samples = sketchgp.sample_posterior(model, 3, seed=7)
    paths = PosteriorPathModel(samples, (3,))
    assert torch.equal(paths(x).squeeze(-1), samples(x))
    assert torch.equal(PosteriorPathModel(model, (3,), seed=7)(x), paths(x))
    assert torch.equal(pickle.loads(pickle.dumps(paths))(x), paths(x))


def test_maxima_of_samples():
    """By BoTorch's optimiser of paths, and by Thompson sampling; each is where its own function is largest."""
    model, _ = accelerated("standardize")
    paths = PosteriorPathModel(model, (3,))
    torch.manual_seed(1)
    best, values = optimize_posterior_samples(paths, BOUNDS, raw_samples=64, num_restarts=4)
    grid = torch.cartesian_prod(*(torch.linspace(*BOUNDS[:, d].tolist(), 41, dtype=torch.float64) for d in range(2)))
    on_grid = paths(grid)[..., 0].amax(dim=1)
    assert best.shape == (3, 2) and bool((values.flatten() > on_grid - 1e-3).all())
    assert bool((values.flatten() < on_grid + 1.0).all())
    acquisition = PathwiseThompsonSampling(model)
    candidates, value = optimize_acqf(acquisition, BOUNDS, q=2, num_restarts=3, raw_samples=64)
    own = [PosteriorPathModel(model, (2,))(candidates)[s, s, 0] for s in range(2)]
    assert abs(float(sum(own) - value)) < 1e-6
    assert bool((value > paths.samples[0][:2](grid).amax(dim=1).sum() - 5.0).all())
    assert candidates.shape == (2, 2)


def test_redrawn_functions_differ():
    model, x = accelerated()
    acquisition = PathwiseThompsonSampling(model, seed=3)
    values = []
    for _ in range(2):
        acquisition.redraw(1)
        acquisition.batch_size = 1
        values.append(acquisition(x.unsqueeze(1)))
    assert torch.equal(values[0], PosteriorPathModel(model, (1,), seed=3)(x)[0, :, 0])
    assert torch.equal(values[1], PosteriorPathModel(model, (1,), seed=4)(x)[0, :, 0])
    with torch.no_grad():
        assert float((values[0] - values[1]).abs().max()) > 1e-3


def test_an_objective_of_several_outputs():
    model, x = accelerated("two outputs")
    acquisition = PathwiseThompsonSampling(model, objective=LinearMCObjective(torch.tensor([1.0, -2.0]).double()))
    values = acquisition(x.unsqueeze(1))
    path = PosteriorPathModel(model, (1,))(x)[0]
    assert relative(values, path[:, 0] - 2 * path[:, 1]) < 1e-10


def test_an_acquisition_function_takes_the_paths_for_a_model():
    model, x = accelerated()
    paths = PosteriorPathModel(model)
    point = x[:3].unsqueeze(1).clone().requires_grad_()
    value = qSimpleRegret(paths)(point)
    assert relative(value, paths(x[:3])[:, 0]) < 1e-10
    value.sum().backward()
    assert point.grad is not None and float(point.grad.abs().min()) > 0


def test_models_on_inducing_points():
    x, y, xt = problem()
    kernel = sketchgp.LaplaceKernel()
    kernel.lengthscale = 5.0
    model = sketchgp.InducingPointGP(
        x, y.squeeze(-1), GaussianLikelihood(), ConstantMean(), kernel, inducing_points=x[::10]
    ).double()
    assert PosteriorPathModel(model.eval(), (3,))(xt).shape == (3, 8, 1)


# --- what is refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sample_shape": 3}, "sample_shape expects"),
        ({"sample_shape": (0,)}, "sample_shape expects"),
        ({"sample_shape": (2.0,)}, "sample_shape expects"),
        ({"seed": "a"}, "seed expects"),
        ({"frequencies": 0}, "frequencies expects"),
        ({"model": None}, "model expects"),
        ({"model": "plain"}, "accelerate"),
        ({"model": "samples", "sample_shape": (2,)}, "expects 2 functions, got 3"),
    ],
)
def test_what_is_refused(options, message):
    model = accelerated()[0]
    given = {
        None: None,
        "plain": sketchgp.restore(copy.deepcopy(model)),
        "samples": sketchgp.sample_posterior(model, 3),
    }
    model = given[options["model"]] if "model" in options else model
    with pytest.raises(sketchgp.InputError, match=message):
        PosteriorPathModel(**{**options, "model": model})


def test_points_that_are_refused():
    paths = PosteriorPathModel(accelerated()[0], (3,))
    with pytest.raises(sketchgp.InputError, match="broadcasts with sample_shape"):
        paths(torch.ones(2, 8, 2, dtype=torch.float64))
    for x in (None, torch.ones(2).double(), torch.ones(8, 2)):
        with pytest.raises(sketchgp.InputError, match=r"X expects|x expects"):
            paths(x)


def test_other_models_are_refused():
    model, _ = multitask()
    with pytest.raises(sketchgp.InputError, match="sample_posterior"):
        PosteriorPathModel(sketchgp.accelerate(model))
    x, y, xt = problem()
    noisy = SingleTaskGP(x, y, input_transform=InputPerturbation(torch.zeros(2, 2).double()))
    with pytest.raises(sketchgp.InputError, match="makes other points"):
        sketchgp.sample_posterior(sketchgp.accelerate(noisy), 2)(xt)
    plain = SingleTaskGP(x, y, outcome_transform=Standardize(m=1))
    with pytest.raises(sketchgp.InputError, match="accelerate"):
        PathwiseThompsonSampling(plain)(xt.unsqueeze(1))


def test_without_botorch(monkeypatch):
    monkeypatch.setitem(sys.modules, "botorch.acquisition.thompson_sampling", None)
    module = sys.modules.pop("sketchgp.botorch")
    try:
        with pytest.raises(ImportError, match=r"pip install 'sketchgp\[botorch\]'"):
            importlib.import_module("sketchgp.botorch")
    finally:
        sys.modules["sketchgp.botorch"] = module
