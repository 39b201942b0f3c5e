"""Arrays as people have them: what numpy, pandas and torch make of the same numbers is the same to every entry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gpytorch
import numpy as np
import pandas
import pytest
import scipy.sparse
import torch
from torch import Tensor

import sketchgp
from cases import each, pairwise
from gp_models import TORCH_WARNINGS, Plain
from sketchgp.sklearn import GaussianProcessRegressor, KernelClassifier, KernelRidge

N = 30
X = np.random.RandomState(0).uniform(size=(N, 2)).round(3)  # thousandths, so that integers can say the same
Y = np.sin(6 * X[:, 0])
FRAME = pandas.DataFrame(X, columns=["a", "b"])


def read_only(values: Any) -> Any:
    values = values.copy()
    values.setflags(write=False)
    return values


ALIKE: dict[str, Any] = {
    "negative strides": X[::-1].copy()[::-1],
    "flipped": np.fliplr(np.fliplr(X).copy()),
    "columns chosen": FRAME[["b", "a"]][["a", "b"]],
    "big-endian": X.astype(">f8"),
    "read-only": read_only(X),
    "long double": X.astype(np.longdouble),
    "objects": X.astype(object),
    "column-major": np.asfortranarray(X),
    "every other": np.repeat(X, 2, axis=1)[:, ::2],
    "nothing masked": np.ma.masked_array(X),
    "nullable": FRAME.astype("Float64"),
    "pandas": FRAME,
    "tensor": torch.tensor(X),
    "transposed tensor": torch.tensor(X.T.copy()).T,
    "with gradients": torch.tensor(X, requires_grad=True),
}
MASKED = np.ma.masked_less(X, X.min() + 1e-9)
BAD: dict[str, tuple[Any, str]] = {
    "masked": (MASKED, "masked"),
    "sparse tensor": (torch.tensor(X).to_sparse(), "to_dense"),
    "sparse": (scipy.sparse.csr_matrix(X), "toarray"),
    "missing": (FRAME.astype("Float64").mask(FRAME > 0.9), "NaN"),
}


INPUTS, TARGETS = torch.tensor(X), torch.tensor(Y)


def gp(x: Tensor = INPUTS, y: Tensor = TARGETS, kernel: Any = gpytorch.kernels.RBFKernel) -> Any:
    return Plain(x, y, gpytorch.likelihoods.GaussianLikelihood(), kernel()).to(y.dtype)


def ridge() -> Any:
    problem = sketchgp.FullProblem(gpytorch.kernels.RBFKernel().double(), torch.tensor(X), torch.tensor(Y), 0.1)
    return sketchgp.Cholesky().solve(problem)


def fitted(estimator: Any) -> Callable[[Any], Any]:
    return lambda values: estimator.fit(values, Y > 0).predict(X)


def predicting(estimator: Any) -> Callable[[Any], Any]:
    return lambda values: estimator.fit(X, Y > 0).predict(values)


ENTRIES: dict[str, Callable[[Any], Any]] = {
    "predict": lambda values: sketchgp.predict(sketchgp.accelerate(gp()), values).mean.numpy(),
    "Solution.predict": lambda values: ridge().predict(values).numpy(),
    "OneHot.decode": lambda values: sketchgp.OneHot([0, 1]).decode(values),
    "GaussianProcessRegressor": fitted(GaussianProcessRegressor(alpha=0.1, optimizer=None)),
    "KernelRidge": fitted(KernelRidge()),
    "KernelClassifier": fitted(KernelClassifier()),
    "predictions of GaussianProcessRegressor": predicting(GaussianProcessRegressor(alpha=0.1, optimizer=None)),
    "predictions of KernelRidge": predicting(KernelRidge()),
    "predictions of KernelClassifier": predicting(KernelClassifier()),
}


@pytest.mark.filterwarnings("ignore:X (has|does not have valid) feature names")
@pytest.mark.parametrize("entry", ENTRIES)
def test_what_holds_the_same_numbers_gives_the_same(entry: str) -> None:
    compute = ENTRIES[entry]
    expected = compute(X)
    for values in ALIKE.values():
        np.testing.assert_allclose(compute(values), expected, atol=1e-9)


@pytest.mark.filterwarnings("ignore:X (has|does not have valid) feature names")
@each("entry", [name for name in ENTRIES if name != "OneHot.decode"])
@each("kind", BAD)
def test_what_hides_numbers_or_lacks_them_is_refused(entry: str, kind: str) -> None:
    values, advice = BAD[kind]
    with pytest.raises((ValueError, TypeError), match=advice):  # scikit-learn's own error, for a sparse matrix
        ENTRIES[entry](values)


@pytest.mark.parametrize("estimator", [GaussianProcessRegressor(alpha=0.1, optimizer=None), KernelRidge()], ids=str)
def test_targets_too(estimator: Any) -> None:
    expected = estimator.fit(X, Y).predict(X)
    for values in (Y[::-1].copy()[::-1], Y.astype(">f8"), torch.tensor(Y, requires_grad=True), Y.astype(np.longdouble)):
        np.testing.assert_allclose(estimator.fit(X, values).predict(X), expected, atol=1e-9)
    with pytest.raises(sketchgp.InputError, match="y expects no masked values, got 1"):
        estimator.fit(X, np.ma.masked_array(Y, np.arange(N) == 3))
    with pytest.raises(sketchgp.InputError, match="y expects numbers, got datetime64"):
        estimator.fit(X, np.arange(N).astype("datetime64[D]"))


def test_labels_and_weights_and_rows_on_disk_too() -> None:
    labels, weights = Y > 0, np.linspace(1, 2, N)
    for values in (labels[::-1].copy()[::-1], torch.tensor(labels)):
        assert (KernelClassifier().fit(X, values).predict(X) == KernelClassifier().fit(X, labels).predict(X)).all()
    expected = KernelRidge().fit(X, Y, weights).predict(X)
    np.testing.assert_allclose(KernelRidge().fit(X, Y, weights[::-1].copy()[::-1]).predict(X), expected, atol=1e-9)
    masked = np.ma.masked_array(labels, np.arange(N) == 3)
    for refused in (
        lambda: KernelClassifier().fit(X, masked),
        lambda: KernelRidge().fit(X, Y, np.ma.masked_array(weights, np.arange(N) == 3)),
        lambda: sketchgp.OneHot(masked),
        lambda: sketchgp.RowSource(MASKED),
    ):
        with pytest.raises(sketchgp.InputError, match="expects no masked values"):
            refused()
    for name in ("negative strides", "big-endian", "every other", "long double"):
        np.testing.assert_array_equal(sketchgp.RowSource(ALIKE[name])[:].numpy(), X)
    with pytest.raises(sketchgp.InputError, match="a table of shape"):
        sketchgp.RowSource(scipy.sparse.csr_matrix(X))


# --- integers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "dtype", "n"),
    pairwise(
        [gpytorch.kernels.RBFKernel, gpytorch.kernels.PiecewisePolynomialKernel],
        [torch.float32, torch.float64],
        [40, 900],
    ),
)
def test_integer_training_inputs_are_numbers(kernel: Any, dtype: torch.dtype, n: int) -> None:
    integers = torch.randperm(4 * n)[:n, None]
    y = torch.sin(integers[:, 0] / 20).to(dtype)
    answers = []
    for x in (integers, integers.to(dtype)):
        model = sketchgp.accelerate(gp(x, y, kernel))
        model.covar_module.lengthscale = 10.0
        found = sketchgp.predict(model, x[:5] + 1)
        with torch.no_grad():
            called = model(x[:5] + 1)
            answers.append([found.mean, found.variance, called.mean, called.variance])
        answers[-1].append(torch.tensor(sketchgp.fit(model, iterations=1, start="model").losses[:1]))
    for one, other in zip(*answers, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    model_of_integers = sketchgp.accelerate(gp(integers, y, kernel))
    with pytest.raises(sketchgp.InputError, match=r"expects integers of shape \(m, 1\).*floating-point"):
        sketchgp.predict(model_of_integers, y[:5])


@pytest.mark.parametrize("dtype", [pytest.param(kind, marks=TORCH_WARNINGS) for kind in (torch.float32, torch.float64)])
def test_integers_that_are_indices_stay_so(dtype: torch.dtype) -> None:
    """The mean is in the dtype of the targets: rounded to that of such inputs, it would be whole."""
    tasks = torch.arange(60)[:, None] % 6
    y = torch.sin(tasks[:, 0] / 2).to(dtype)
    model = Plain(
        tasks,
        y,
        gpytorch.likelihoods.GaussianLikelihood(),
        gpytorch.kernels.IndexKernel(num_tasks=6, rank=2),
        gpytorch.means.ZeroMean(),
    )
    model.to(dtype).eval()
    test = torch.arange(6)[:, None]
    with torch.no_grad():
        expected = model(test)
        mean, variance = expected.mean, expected.variance
        sketchgp.accelerate(model)
        called, found = model(test), sketchgp.predict(model, test.numpy())
    for answer in (called, found):
        torch.testing.assert_close(answer.mean, mean, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(answer.variance, variance, rtol=1e-3, atol=1e-4)


def test_training_inputs_without_meaning_are_refused() -> None:
    for x in (torch.tensor(X).to_sparse(), torch.tensor(X) + 0j):
        with pytest.raises(sketchgp.InputError, match="expected to be dense and real"):
            sketchgp.accelerate(Plain(x, torch.tensor(Y), gpytorch.likelihoods.GaussianLikelihood(), None))
    model = sketchgp.accelerate(gp())
    model.set_train_data(torch.tensor(X).half(), strict=False)
    with pytest.raises(sketchgp.InputError, match=r"training inputs are torch.float16.*model.float\(\)"):
        sketchgp.predict(model, X)
