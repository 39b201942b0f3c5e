"""What the public names do with arguments that make no sense: an :class:`InputError` that names the argument, at once.

The tables hold wrong values by kind of argument, not by function.  The arguments themselves are found by looking at the
signatures, so a new one is tested as soon as it is there, and fails until its kind is in the tables.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Callable
from typing import Any

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ConstantMean

import sketchgp
from cases import each
from problems import normal, points
from sketchgp import datasets
from sketchgp.checks import found
from sketchgp.operators import KernelMatrix

N, M, D = 30, 6, 2


def _kernel() -> ScaleKernel:
    return ScaleKernel(RBFKernel(ard_num_dims=D)).double()


def _full() -> sketchgp.FullProblem:
    return sketchgp.FullProblem(_kernel(), points(N, D), normal(N), 0.1)


def _inducing() -> sketchgp.InducingPointProblem:
    return sketchgp.InducingPointProblem(_kernel(), points(N, D), normal(N), 0.1, points(M, D, seed=1))


class _Model(gpytorch.models.ExactGP):
    def __init__(self, x: Any, y: Any, likelihood: Any) -> None:
        super().__init__(x, y, likelihood)
        self.mean_module, self.covar_module = ConstantMean(), ScaleKernel(RBFKernel())

    def forward(self, x: Any) -> Any:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def _plain() -> _Model:
    return _Model(points(N, D), normal(N), GaussianLikelihood()).double()


def _accelerated() -> _Model:
    return sketchgp.accelerate(_plain())


# --- wrong values, by kind ------------------------------------------------------------------------------------

NOT_COUNTS = ["a", 1.5, True, np.True_, [2], 2j, -1, math.nan, np.float64(2), torch.tensor(1.5), torch.ones(2), b"2"]
NOT_NUMBERS = ["a", True, np.True_, [0.5], 0.5j, math.nan, -1.0, torch.ones(2), np.ones(2), torch.tensor(0.5j), dict]
NOT_WORDS = ["nonsense", 3, True, b"auto", ["auto"], np.array(["auto", "dense"]), torch.ones(2), str]
NOT_FLAGS = ["no", 1, 0.0, [True], torch.ones(2), np.array([True, False])]
NOT_FUNCTIONS = ["a", 3, [print], torch.ones(2)]
NOT_SEEDS = ["a", 1.5, True, [0], 2**63, math.nan, torch.ones(2)]
NOT_PATHS = [3, "", b"file", True, ["file"]]
POINTS = points(N, D)
NOT_POINTS = [
    "a",
    None,
    3.0,
    POINTS.numpy(),
    POINTS.tolist(),
    POINTS[:, 0, None, None],
    POINTS.long(),
    POINTS.to(torch.complex128),
    POINTS.to_sparse(),
    POINTS[:0],
    POINTS[:, :0],
    POINTS * math.nan,
]
OF_OTHERS = {  # what is right but for its size, dtype or number of features
    "points": [points(N, D + 1), points(N, D, dtype=torch.float32)],
    "targets": [normal(N + 1), normal(N, dtype=torch.float32)],
}

NOT_CONVERTIBLE = [  # where numbers are converted to the training inputs' dtype
    *(v for v in NOT_POINTS if getattr(v, "dtype", None) != torch.int64 and not isinstance(v, np.ndarray)),
    OF_OTHERS["points"][0],
    np.array([["a"] * D]),
]

# --- by parameter, and by annotation where the name does not decide; None is added where it is no choice --------

BY_NAME: dict[str, list[Any]] = {
    "tol": ["a", True, 0, 1, 1.5, *NOT_NUMBERS],
    "cooldown": [1.5, *NOT_NUMBERS],
    "seed": NOT_SEEDS,
    "probe_seed": NOT_SEEDS,
    "version": [0, 3, *NOT_COUNTS],
    "kernel": ["RBF", 3, None, RBFKernel, POINTS, GaussianLikelihood()],
    "x": [*NOT_POINTS, *OF_OTHERS["points"]],
    "inducing_points": [*NOT_POINTS, *OF_OTHERS["points"], POINTS[:, 0]],
    "y": [*(v for v in NOT_POINTS if getattr(v, "shape", None) != (N, 0)), *OF_OTHERS["targets"], normal(N, 2, 2)],
    "noise": ["a", None, True, 0.5j, -0.1, math.nan, math.inf, [0.1, 0.2], torch.ones(N + 1), torch.ones(2, 2), dict],
    "problem": ["a", None, 3, POINTS, _full],
    "initial": ["nonsense", 3.0, [0.0], normal(N + 1), normal(N, 2), normal(3, 3, 3), normal(N) * math.nan],
    "held_out": ["a", 3, (POINTS,), (POINTS, normal(N - 1)), (points(N, D + 1), normal(N)), (None, None), ["x", "y"]],
    "preconditioner": ["a", 3, True, sketchgp.RPCholesky, sketchgp.KRILL()],
    "model": ["a", None, 3, _Model, GaussianLikelihood()],
    "likelihood": ["a", None, 3, GaussianLikelihood, gpytorch.likelihoods.BernoulliLikelihood()],
    "mean": ["a", None, 3.0, ConstantMean],
    "noises": ["a", 3, None, [], [0.1, -1.0], [0.1, "a"], [math.nan], [math.inf], [True], torch.ones(2, 2)],
    "mll": ["a", 3, gpytorch.mlls.ExactMarginalLogLikelihood(GaussianLikelihood(), _plain())],
    "labels": ["a", None, 3, [1.0, 2.0], [1, "b"], [], torch.ones(3), torch.tensor([]).long(), np.ones(3)],
    "scores": ["a", None, torch.ones(3, 7), torch.tensor(1.0), np.ones((3, 2)), [[0.0, 0.0, 1.0]]],
    "dtype": ["float64", None, torch.int64, float],
    "counts": ["a", 3, [1.0], torch.ones(2, 2), torch.tensor([1.0, -1.0]), torch.tensor([math.nan]), torch.ones(2) > 0],
    "curves": ["a", None, 3, [], ["a"]],
    "title": [None, 3],
    "tolerances": ["a", None, {"tol": "a"}, {"tol": -1.0}, {"tol": math.nan}],
    "ard_num_dims": [0, *NOT_COUNTS],
    "batch_shape": ["a", 3, [0.5], [-1]],
    "active_dims": ["a", 3, [0.5], [-1]],
    "lengthscale_prior": ["a", 3, gpytorch.priors.GammaPrior],
    "lengthscale_constraint": ["a", 3, gpytorch.constraints.Positive],
    "x1": [*NOT_POINTS[:5], *NOT_POINTS[6:10], POINTS[:, 0]],
    "x2": [3.0, "a", *OF_OTHERS["points"], POINTS[:0]],
    "train_x": ["a", 3, ["a"], (POINTS, "a")],
    "train_y": ["a", 3, [1.0]],
    "residuals": ["a", 3, ["a"], [None]],
    "seconds": ["a", 3, ["a"], [1.0, 2.0]],
    "note": ["a", 3, (1, 2), ("a", "b"), (-1, "b")],
    "label": [None, 3],
    "color": [],
    "caption": [3, [1]],
    "style": [None, 3],
    "start": NOT_COUNTS,
    "true_residual": ["a", [1.0], 1j],
    "budget": ["a", None, 0, -1, math.nan, math.inf, True, [2**30]],
}
BY_KIND: dict[str, list[Any]] = {
    "int": NOT_COUNTS,
    "float": NOT_NUMBERS,
    "str": NOT_WORDS,
    "Literal": NOT_WORDS,
    "Matmul": NOT_WORDS,
    "Variance": NOT_WORDS,
    "bool": NOT_FLAGS,
    "Callable": NOT_FUNCTIONS,
    "str | os.PathLike[str]": NOT_PATHS,
    "str | Path": NOT_PATHS,
}
OF_ONE_CALL: dict[tuple[str, str], list[Any]] = {  # where a name means something else
    ("fit", "tol"): ["a", True, math.nan, [0.1]],
    ("InducingPointGP", "solver"): ["KRILL", 3, None, sketchgp.KRILL, sketchgp.ASkotch()],
    ("accelerate", "solver"): ["cg", 3, None, sketchgp.ASkotch, sketchgp.KRILL()],
    ("ExactGP", "solver"): ["cg", 3, None, sketchgp.ASkotch, sketchgp.KRILL()],
    ("InducingPointGP", "train_x"): [*(v for v in NOT_POINTS if v is not None), *OF_OTHERS["points"]],
    ("InducingPointGP", "train_y"): [*NOT_POINTS[:4], *OF_OTHERS["targets"]],
    ("choose_inducing_points", "x"): NOT_POINTS,
    ("InducingPointGP.__call__", "x"): [
        *(v for v in NOT_POINTS[:11] if not torch.is_tensor(v) or v.dim() < 3),
        *OF_OTHERS["points"],
    ],
    **{
        (f"PosteriorSamples.{name}", "x"): [
            *(v for v in NOT_POINTS[:11] if not torch.is_tensor(v) or v.dim() < 3),
            *(points(N, d, dtype=t).reshape(2, -1, d) for d, t in ((D + 1, torch.float64), (D, torch.float32))),
        ]
        for name in ("__call__", "each")
    },
    **{(name, "x"): NOT_CONVERTIBLE for name in ("predict", "predict with inducing points")},
    ("choose_inducing_points", "noise"): NOT_NUMBERS,
    **{(f"{name}", "preconditioner"): NOT_WORDS for name in ("EigenPro3", "EigenPro4")},
}


def _wrong(owner: str, parameter: inspect.Parameter) -> list[Any]:
    """Values that an argument must refuse."""
    annotation = str(parameter.annotation).removesuffix(" | None")
    if (owner, parameter.name) in OF_ONE_CALL:
        return OF_ONE_CALL[owner, parameter.name]
    if parameter.name in BY_NAME:
        return BY_NAME[parameter.name]
    kind = re.sub(r"(Callable|Literal)\[.*", r"\1", annotation).removesuffix(" | Literal")
    assert kind in BY_KIND, f"{owner}: {parameter} has no wrong values in the tables of this file"
    return BY_KIND[kind] if str(parameter.annotation).endswith("None") else [None, *BY_KIND[kind]]


def _refuses(owner: str, call: Callable[..., Any], name: str, value: Any, right: dict[str, Any]) -> str:
    """Why a call with a wrong value is no good; nothing where it is refused as it should be."""
    said = f"{owner}({name}={found(value)})"
    try:
        call(**{**right, name: value})
    except sketchgp.InputError as error:
        return "" if name in str(error) else f"{said} does not name the argument: {error}"
    except Exception as error:
        return f"{said} ends in {type(error).__name__}: {error}"
    return f"{said} is taken"


def _complaints(owner: str, call: Callable[..., Any], right: dict[str, Any]) -> list[str]:
    """Of every argument with every wrong value, what is not refused, or not well."""
    complaints = []
    for name, parameter in inspect.signature(call).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            complaints.append(f"{owner} swallows keywords")
            continue
        complaints += [_refuses(owner, call, name, value, right) for value in _wrong(owner, parameter)]
    try:
        call(**right, no_such_argument=1)
        complaints.append(f"{owner} takes a keyword that there is not")
    except TypeError as error:
        complaints.append("" if "no_such_argument" in str(error) else f"{owner} with an unknown keyword: {error}")
    return [complaint for complaint in complaints if complaint]


# --- constructors ---------------------------------------------------------------------------------------------

CHOICES = [
    sketchgp.RPCholesky,
    sketchgp.Nystrom,
    sketchgp.NystromEigenPro,
    sketchgp.FullScale,
    sketchgp.ConjugateGradients,
    sketchgp.Cholesky,
    sketchgp.ASkotch,
    sketchgp.Skotch,
    sketchgp.EigenPro2,
    sketchgp.EigenPro3,
    sketchgp.EigenPro4,
    sketchgp.QR,
    sketchgp.KRILL,
    sketchgp.Falkon,
    sketchgp.SketchySAGA,
]
X, Y, Z = points(N, D), normal(N), points(M, D, seed=1)
CONSTRUCTORS: dict[str, tuple[Any, dict[str, Any]]] = {
    **{choice.__name__: (choice, {}) for choice in CHOICES},
    "LaplaceKernel": (sketchgp.LaplaceKernel, {}),
    "FullProblem": (sketchgp.FullProblem, {"kernel": _kernel(), "x": X, "y": Y, "noise": 0.1}),
    "InducingPointProblem": (
        sketchgp.InducingPointProblem,
        {"kernel": _kernel(), "x": X, "y": Y, "noise": 0.1, "inducing_points": Z},
    ),
    "ExactGP": (sketchgp.ExactGP, {"train_x": X, "train_y": Y, "likelihood": GaussianLikelihood()}),
    "InducingPointGP": (
        sketchgp.InducingPointGP,
        {
            "train_x": X,
            "train_y": Y,
            "likelihood": GaussianLikelihood(),
            "mean": ConstantMean(),
            "kernel": _kernel(),
            "inducing_points": Z,
        },
    ),
    "OneHot": (sketchgp.OneHot, {"labels": torch.arange(3)}),
    "memory_budget": (sketchgp.settings.memory_budget, {"budget": 2**30}),
}


@each("name", CONSTRUCTORS)
def test_constructors_refuse_what_makes_no_sense(name):
    call, right = CONSTRUCTORS[name]
    call(**right)
    complaints = _complaints(name, call, right)
    assert not complaints, "\n".join(complaints)


@each("choice", CHOICES)
def test_numbers_of_numpy_and_torch_are_taken_as_python_s(choice):
    values = {
        "int": (np.int64(2), np.uint8(2), torch.tensor(2)),
        "float": (np.float32(0.5), np.float64(0.5), torch.tensor(0.5)),
    }
    for name, parameter in inspect.signature(choice).parameters.items():
        kind = str(parameter.annotation).removesuffix(" | None")
        for value in values.get(kind, ()):
            kept = getattr(choice(**{name: value}), name)
            assert type(kept).__name__ == kind and kept == value, (name, value, kept)
            assert choice(**{name: value}) == choice(**{name: kept})


# --- calls ----------------------------------------------------------------------------------------------------

SOLVERS_OF_ALL = ["ConjugateGradients", "Cholesky", "ASkotch", "Skotch", "EigenPro2"]
SOLVERS_OF_SOME = ["QR", "KRILL", "Falkon", "SketchySAGA", "EigenPro3", "EigenPro4"]


@each("name", SOLVERS_OF_ALL + SOLVERS_OF_SOME)
def test_solvers_refuse_what_makes_no_sense(name):
    full = name in SOLVERS_OF_ALL
    right = {"problem": _full() if full else _inducing()}
    solve = getattr(sketchgp, name)().solve
    complaints = _complaints(f"{name}.solve", solve, right)
    other = _refuses(f"{name}.solve", solve, "problem", _inducing() if full else _full(), {})
    assert not complaints and not other, "\n".join([*complaints, other])


@each("name", SOLVERS_OF_ALL)
def test_run_swallows_no_keywords(name):
    solver, problem = getattr(sketchgp, name)(), _full()
    options = {"preconditioner": None} if name == "ConjugateGradients" else {}
    with pytest.raises(TypeError, match="max_iteration"):
        solver.run(problem.system(), problem.y[:, None], **options, max_iteration=3)


def _sparse() -> sketchgp.InducingPointGP:
    return sketchgp.InducingPointGP(X, Y, GaussianLikelihood(), ConstantMean(), _kernel(), Z).double().eval()


def test_a_model_on_inducing_points_is_not_accelerated() -> None:
    """Nothing would change, whatever the choices."""
    with pytest.raises(sketchgp.InputError, match=r"InducingPointGP\(\.\.\., solver="):
        sketchgp.accelerate(_sparse(), solver=sketchgp.ASkotch())


def _samples() -> sketchgp.PosteriorSamples:
    return sketchgp.sample_posterior(_accelerated(), 2)


CALLS: dict[str, tuple[Callable[[], Callable[..., Any]], Callable[[], dict[str, Any]]]] = {
    "accelerate": (lambda: sketchgp.accelerate, lambda: {"model": _plain()}),
    "restore": (lambda: sketchgp.restore, lambda: {"model": _accelerated()}),
    "fit": (lambda: sketchgp.fit, lambda: {"model": _accelerated(), "iterations": 1}),
    "predict": (lambda: sketchgp.predict, lambda: {"model": _accelerated(), "x": points(3, D)}),
    "predict with inducing points": (lambda: sketchgp.predict, lambda: {"model": _sparse(), "x": points(3, D)}),
    "sample_posterior": (lambda: sketchgp.sample_posterior, lambda: {"model": _accelerated(), "num_samples": 2}),
    "sample_posterior with inducing points": (
        lambda: sketchgp.sample_posterior,
        lambda: {"model": _sparse(), "num_samples": 2},
    ),
    "PosteriorSamples.__call__": (lambda: _samples().__call__, lambda: {"x": points(3, D)}),
    "PosteriorSamples.each": (lambda: _samples().each, lambda: {"x": points(4, D).reshape(2, 2, D)}),
    "leave_one_out": (lambda: sketchgp.leave_one_out, lambda: {"model": _accelerated()}),
    "leave_one_out with inducing points": (lambda: sketchgp.leave_one_out, lambda: {"model": _sparse()}),
    "noise_path": (lambda: sketchgp.noise_path, lambda: {"model": _accelerated(), "noises": [0.1]}),
    "InducingPointGP.__call__": (lambda: _sparse().__call__, lambda: {"x": points(3, D)}),
    "choose_inducing_points": (lambda: sketchgp.choose_inducing_points, lambda: {"kernel": _kernel(), "x": X, "m": 3}),
    "OneHot.encode": (lambda: sketchgp.OneHot(torch.arange(3)).encode, lambda: {"labels": torch.arange(3)}),
    "OneHot.decode": (lambda: sketchgp.OneHot(torch.arange(3)).decode, lambda: {"scores": torch.ones(2, 3)}),
    "KernelMatrix.of": (lambda: KernelMatrix.of, lambda: {"kernel": _kernel(), "x1": X}),
    "FullProblem.system": (lambda: _full().system, dict),
    "load_diamonds": (lambda: datasets.load_diamonds, dict),
}


def _state(model: Any) -> list[Any]:
    """What a refused call must leave alone."""
    return [
        type(model),
        type(model.likelihood),
        [module.training for module in model.modules()],
        [p.requires_grad for p in model.parameters()],
        [None if p.grad is None else p.grad.tolist() for p in model.parameters()],
        {name: value.tolist() for name, value in model.state_dict().items()},
        copy.copy(model.likelihood.__dict__.get("_sketchgp")),
        model.__dict__.get("_sketchgp"),
    ]


@each("name", CALLS)
def test_calls_refuse_what_makes_no_sense(name):
    call, right = CALLS[name][0](), CALLS[name][1]()
    before = _state(right["model"]) if "model" in right else None
    complaints = _complaints(name, call, right)
    assert not complaints, "\n".join(complaints)
    if before is not None:
        assert _state(right["model"]) == before


def test_a_block_of_more_proposals_than_points_is_refused_not_run_for_ever():
    solve = sketchgp.ConjugateGradients().solve
    with pytest.raises(sketchgp.InputError, match=r"block_size=1000000000\) exceeds the 30"):
        solve(_full(), sketchgp.RPCholesky(block_size=10**9))
    solution = solve(_full(), sketchgp.RPCholesky(rank=5, block_size=30))
    assert solution.report.converged and solution.report.rank <= 5
