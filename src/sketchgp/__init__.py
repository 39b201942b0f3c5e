"""sketchgp: randomized preconditioners and solvers for GPyTorch models on many points.

``sketchgp.accelerate(model)`` makes an existing model converge; see the README for the rest.
"""

from typing import TYPE_CHECKING, Any

from . import keops_import, settings  # noqa: F401  # the first before GPyTorch
from .accelerate import ExactGP, accelerate, restore
from .errors import ConvergenceWarning, InputError, NumericalError, SketchGPError
from .fit import FitHistory, fit
from .inducing_point_gp import InducingPointGP
from .inducing_points import InducingPoints, choose_inducing_points
from .kernels import ArcCosineKernel, LaplaceKernel
from .leave_one_out import LeaveOneOut, leave_one_out
from .models.accelerated.marginal_likelihoods import ExactMarginalLogLikelihood, LeaveOneOutPseudoLikelihood
from .noise_path import NoisePath, noise_path
from .one_hot import OneHot
from .posterior_samples import PosteriorSamples, sample_posterior
from .preconditioners import FullScale, Nystrom, NystromEigenPro, RPCholesky
from .predict import Prediction, predict
from .random_feature_classifier import RandomFeatureClassifier
from .random_feature_gp import RandomFeatureGP
from .report import SolveReport, record_solves
from .row_sources import RowSource
from .solvers import (
    KRILL,
    QR,
    ASkotch,
    Cholesky,
    ConjugateGradients,
    DoublyStochastic,
    EigenPro2,
    EigenPro3,
    EigenPro4,
    Falkon,
    FullProblem,
    InducingPointProblem,
    NystromPCG,
    RandomFeatureProblem,
    SketchySAGA,
    Skotch,
    Solution,
)

if TYPE_CHECKING:
    from .saved_model import load_model

__version__ = "0.3.0"

__all__ = [
    "KRILL",
    "QR",
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
    "LaplaceKernel",
    "LeaveOneOut",
    "LeaveOneOutPseudoLikelihood",
    "NoisePath",
    "NumericalError",
    "Nystrom",
    "NystromEigenPro",
    "NystromPCG",
    "OneHot",
    "PosteriorSamples",
    "Prediction",
    "RPCholesky",
    "RandomFeatureClassifier",
    "RandomFeatureGP",
    "RandomFeatureProblem",
    "RowSource",
    "SketchGPError",
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
]


def __getattr__(name: str) -> Any:
    """Import ``load_model`` when it is first asked for, as it needs the modules of the command line."""
    if name != "load_model":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .saved_model import load_model

    return load_model
