"""Estimators with the interface of scikit-learn: ``GaussianProcessRegressor``, ``KernelRidge``, ``KernelClassifier``.

They put ``accelerate``, ``fit``, ``predict``, ``InducingPointGP`` and the solvers behind ``fit(X, y)`` and
``predict(X)``, so that pipelines, grid searches, cross-validation, pandas tables and pickles work as they do there.
Import this module by its name; ``import sketchgp`` alone does not need scikit-learn.
"""

try:
    from sklearn.utils.validation import validate_data as _validate_data  # noqa: F401  # of 1.6
except ImportError as error:
    raise ImportError(
        "sketchgp.sklearn needs scikit-learn 1.6 or newer: python -m pip install 'scikit-learn>=1.6' (or the extra "
        "sketchgp[sklearn])."
    ) from error

from .classifier import KernelClassifier
from .regressor import GaussianProcessRegressor
from .ridge import KernelRidge

__all__ = ["GaussianProcessRegressor", "KernelClassifier", "KernelRidge"]
