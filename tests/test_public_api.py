"""The public names: exactly these, each documented, each on the signature that the README shows."""

from __future__ import annotations

import dataclasses
import inspect
import re
from importlib import resources

import pytest

import sketchgp
from cases import each

NAMES = {
    "ASkotch",
    "ArcCosineKernel",
    "Cholesky",
    "ConjugateGradients",
    "ConvergenceWarning",
    "DoublyStochastic",
    "EigenPro2",
    "EigenPro3",
    "EigenPro4",
    "ExactGP",
    "ExactMarginalLogLikelihood",
    "Falkon",
    "FitHistory",
    "FullProblem",
    "FullScale",
    "InducingPointGP",
    "InducingPointProblem",
    "InducingPoints",
    "InputError",
    "KRILL",
    "LaplaceKernel",
    "LeaveOneOut",
    "LeaveOneOutPseudoLikelihood",
    "NumericalError",
    "NoisePath",
    "Nystrom",
    "NystromEigenPro",
    "OneHot",
    "PosteriorSamples",
    "Prediction",
    "QR",
    "RPCholesky",
    "RandomFeatureClassifier",
    "RandomFeatureGP",
    "RandomFeatureProblem",
    "RowSource",
    "SketchGPError",
    "NystromPCG",
    "SketchySAGA",
    "Skotch",
    "Solution",
    "SolveReport",
    "accelerate",
    "choose_inducing_points",
    "fit",
    "leave_one_out",
    "load_model",
    "noise_path",
    "predict",
    "record_solves",
    "restore",
    "sample_posterior",
    "settings",
}

BLOCKWISE = {
    "tol": None,
    "max_passes": 200.0,
    "max_seconds": None,
    "block_size": None,
    "seed": 0,
    "checkpoint": None,
    "every": 60.0,
}
EIGENPRO = {
    "max_seconds": None,
    "checkpoint": None,
    "every": 60.0,
    "epochs": 10,
    "block_size": None,
    "rank": None,
    "subsample_size": None,
    "projection": "auto",
    "preconditioner": "projected",
    "step_scale": 1.0,
    "averaging": True,
    "cooldown": 0.5,
    "patience": 3,
    "seed": 0,
}
NORMAL = {"tol": 1e-4, "max_iterations": 200}
# name -> parameters in order, with their defaults (... for a required one)
SIGNATURES = {
    "accelerate": {
        "model": ...,
        "preconditioner": "auto",
        "solver": "auto",
        "matmul": "auto",
        "matmul_precision": "float32",
    },
    "restore": {"model": ...},
    "RPCholesky": {"rank": None, "method": "accelerated", "block_size": None, "seed": 0},
    "Nystrom": {"rank": None, "sketch": "gaussian", "seed": 0},
    "NystromEigenPro": {"rank": None, "subsample_size": None, "seed": 0},
    "FullScale": {"rank": None, "neighbors": None, "seed": 0},
    "ConjugateGradients": {"tol": None, "max_iterations": None, "precision": "auto"},
    "Cholesky": {},
    "ASkotch": {**BLOCKWISE, "rank": None, "version": 2, "mu": None, "sampling": "shuffled"},
    "Skotch": {**BLOCKWISE, "rank": None, "version": 2, "sampling": "shuffled"},
    "EigenPro2": {**BLOCKWISE, "rank": None, "subsample_size": None},
    "ExactGP": {
        "train_x": ...,
        "train_y": ...,
        "likelihood": ...,
        "solver": "auto",
        "preconditioner": "auto",
        "matmul": "auto",
        "matmul_precision": "float32",
    },
    "FullProblem": {"kernel": ..., "x": ..., "y": ..., "noise": ...},
    "InducingPointProblem": {"kernel": ..., "x": ..., "y": ..., "noise": ..., "inducing_points": ...},
    "InducingPointGP": {
        "train_x": ...,
        "train_y": ...,
        "likelihood": ...,
        "mean": ...,
        "kernel": ...,
        "inducing_points": ...,
        "solver": "auto",
        "variance": "auto",
        "variance_samples": 64,
    },
    "KRILL": {**NORMAL, "sketch_size": None, "nonzeros": 8, "seed": 0},
    "Falkon": {**NORMAL, "counts": None},
    "QR": {},
    "EigenPro3": EIGENPRO,
    "EigenPro4": {**EIGENPRO, "delay": None},
    "NystromPCG": {**NORMAL, "tol": 0.3, "rank": None, "seed": 0},
    "SketchySAGA": {
        "max_seconds": None,
        "checkpoint": None,
        "every": 60.0,
        "tol": 1e-4,
        "deviations": 0.3,
        "max_epochs": 200.0,
        "block_size": None,
        "rank": None,
        "rho": None,
        "seed": 0,
    },
    "DoublyStochastic": {
        "max_seconds": None,
        "checkpoint": None,
        "every": 60.0,
        "num_features": "auto",
        "block_size": None,
        "batch_size": None,
        "preconditioned": True,
        "epochs": None,
        "max_iterations": None,
        "step_scale": 1.0,
        "seed": 0,
    },
    "RandomFeatureProblem": {"kernel": ..., "x": ..., "y": ..., "noise": ..., "loss": "squared", "rows": None},
    "RandomFeatureGP": {
        "likelihood": ...,
        "mean": ...,
        "kernel": ...,
        "solver": None,
        "variance": "samples",
        "variance_samples": 64,
    },
    "RandomFeatureClassifier": {
        "kernel": ...,
        "loss": "multinomial",
        "noise": 1.0,
        "classes": None,
        "solver": None,
    },
    "choose_inducing_points": {"kernel": ..., "x": ..., "m": ..., "method": "uniform", "seed": 0},
    "OneHot": {"labels": ...},
    "record_solves": {},
    "fit": {
        "model": ...,
        "mll": None,
        "optimizer": "auto",
        "start": "auto",
        "iterations": None,
        "learning_rate": None,
        "num_probes": 10,
        "seed": 0,
        "progress": None,
        "callback": None,
    },
    "predict": {"model": ..., "x": ..., "variance": "auto", "batch_size": None, "progress": None},
    "sample_posterior": {"model": ..., "num_samples": ..., "seed": 0, "frequencies": None},
}
REPORT_FIELDS = {
    "solver",
    "preconditioner",
    "size",
    "n",
    "work",
    "residual",
    "history",
    "tol",
    "converged",
    "reason",
    "seconds",
    "setup_seconds",
    "rank",
    "dtype",
    "device",
    "peak_memory",
    "details",
    "held_out",
}


def test_names_are_exactly_these():
    assert set(sketchgp.__all__) - {"__version__"} == NAMES
    assert len(sketchgp.__all__) == len(set(sketchgp.__all__))
    for name in sketchgp.__all__:
        assert hasattr(sketchgp, name)


def test_package_data_is_installed():
    package = resources.files("sketchgp")
    assert package.joinpath("py.typed").is_file()
    assert any(entry.name.endswith(".npz") for entry in package.joinpath("data").iterdir())


@each("name", sorted(NAMES))
def test_documented(name):
    thing = getattr(sketchgp, name)
    text = inspect.getdoc(thing) or ""
    assert thing.__doc__, f"sketchgp.{name} has no docstring of its own"
    assert len(text) >= 20
    # what dataclasses write by themselves, "Name(field: type, ...)", explains nothing
    assert not text.startswith(f"{name}(")


@each("name", sorted(NAMES))
def test_public_methods_documented(name):
    thing = getattr(sketchgp, name)
    if not inspect.isclass(thing):
        return
    bare = [
        member
        for member, value in vars(thing).items()
        if not member.startswith("_")
        and (inspect.isfunction(value) or isinstance(value, (property, staticmethod, classmethod)))
        and not inspect.getdoc(getattr(thing, member))
    ]
    assert not bare, f"no docstring: {', '.join(f'{name}.{member}' for member in bare)}"


def test_a_misspelt_word_fails_a_type_check():
    """An argument whose default is a word has a type that says which words there are."""
    results = {"SolveReport", "FitHistory"}
    given = {name: getattr(sketchgp, name) for name in NAMES - results if "Warning" not in name}
    given |= {f"{name}.solve": thing.solve for name, thing in given.items() if hasattr(thing, "solve")}
    loose = [
        f"{name}({key}: {p.annotation})"
        for name, call in given.items()
        if callable(call)
        for key, p in inspect.signature(call).parameters.items()
        if isinstance(p.default, str)
        and p.default
        and not re.search("Literal|Matmul|Variance|device", str(p.annotation))
    ]
    assert not loose


@each("name", sorted(SIGNATURES))
def test_signature(name):
    parameters = inspect.signature(getattr(sketchgp, name)).parameters
    # further parameters are allowed when they have a default
    actual = {key: ... if p.default is p.empty else p.default for key, p in parameters.items()}
    expected = SIGNATURES[name]
    by_place = [key for key, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD and key in expected]
    assert by_place == [key for key in expected if key in by_place]
    assert {key: actual[key] for key in expected} == expected
    assert all(value is not ... for key, value in actual.items() if key not in expected)


@each(
    "name",
    [
        "ConjugateGradients",
        "Cholesky",
        "ASkotch",
        "Skotch",
        "EigenPro2",
        "KRILL",
        "Falkon",
        "QR",
        "EigenPro3",
        "EigenPro4",
        "NystromPCG",
        "SketchySAGA",
        "DoublyStochastic",
    ],
)
def test_solvers_solve_problems(name):
    assert list(inspect.signature(getattr(sketchgp, name).solve).parameters)[:2] == ["self", "problem"]


def test_solve_signature():
    parameters = inspect.signature(sketchgp.ConjugateGradients.solve).parameters
    assert {key: p.default for key, p in list(parameters.items())[2:]} == {
        "preconditioner": "auto",
        "matmul": "auto",
        "initial": None,
        "callback": None,
        "held_out": None,
        "progress": None,
    }


@pytest.mark.parametrize("name", ["ASkotch", "Skotch", "EigenPro2"])
def test_blockwise_solve_signature(name):
    parameters = inspect.signature(getattr(sketchgp, name).solve).parameters
    assert {key: p.default for key, p in list(parameters.items())[2:]} == {
        "matmul": "auto",
        "initial": None,
        "callback": None,
        "held_out": None,
        "progress": None,
    }


@each(
    "choice",
    [
        *("RPCholesky", "Nystrom", "NystromEigenPro", "FullScale"),
        *("ConjugateGradients", "Cholesky", "ASkotch", "Skotch", "EigenPro2"),
        *("KRILL", "Falkon", "QR", "EigenPro3", "EigenPro4", "NystromPCG", "SketchySAGA", "DoublyStochastic"),
    ],
)
def test_choices_are_frozen_and_comparable(choice):
    make = getattr(sketchgp, choice)
    assert make() == make()
    assert choice in repr(make())
    with pytest.raises((dataclasses.FrozenInstanceError, AttributeError)):
        make().rank = 3


def test_result_fields():
    assert {field.name for field in dataclasses.fields(sketchgp.SolveReport)} >= REPORT_FIELDS
    names = {field.name for field in dataclasses.fields(sketchgp.Prediction)}
    assert names >= {"mean", "variance", "observation_variance", "variance_method", "variance_check", "report"}
    names = {field.name for field in dataclasses.fields(sketchgp.FitHistory)}
    assert names >= {"losses", "seconds", "reason"}
    assert isinstance(sketchgp.SolveReport.max_residual, property)


def test_errors_have_one_base():
    assert issubclass(sketchgp.InputError, sketchgp.SketchGPError)
    assert issubclass(sketchgp.InputError, ValueError)
    assert issubclass(sketchgp.ConvergenceWarning, UserWarning)
