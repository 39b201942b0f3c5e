"""``sketchgp.sklearn``: scikit-learn's own checks, and its own estimators' numbers."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import gpytorch
import numpy as np
import pandas
import pytest
import sklearn.gaussian_process as theirs
import sklearn.kernel_ridge
import torch
from sklearn.base import clone
from sklearn.exceptions import SkipTestWarning
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Matern, WhiteKernel
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

import sketchgp
from cases import each
from sketchgp.fitting import run
from sketchgp.sklearn import GaussianProcessRegressor, KernelClassifier, KernelRidge, choices

FEW_STEPS = sketchgp.DoublyStochastic(num_features=256, epochs=20)
FEWER_STEPS = sketchgp.DoublyStochastic(num_features=128, epochs=5)
slow = pytest.mark.slow


def data(n: int = 60, d: int = 2, seed: int = 0) -> tuple[Any, Any]:
    stream = np.random.RandomState(seed)
    x = stream.uniform(-2, 2, (n, d))
    return x, np.sin(2 * x[:, 0]) + 0.5 * x[:, -1] + 0.1 * stream.standard_normal(n) + 3.0


def rbf(lengthscale: float = 0.7, scale: float = 1.5) -> Any:
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()).double()
    kernel.base_kernel.lengthscale, kernel.outputscale = torch.tensor([lengthscale, scale], dtype=torch.float64)
    return kernel


@pytest.mark.parametrize(
    "estimator",
    [
        KernelRidge(),
        KernelClassifier(),
        pytest.param(GaussianProcessRegressor(), marks=slow),
        pytest.param(KernelClassifier(loss="multinomial", solver=FEWER_STEPS), marks=slow),
    ],
    ids=lambda estimator: repr(estimator)[:60],
)
def test_keeps_the_rules(estimator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(run._ITERATIONS, "lbfgs", 1)  # the rules hold for hyperparameters of any worth
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SkipTestWarning)
        check_estimator(estimator, on_skip=None)


# --- GaussianProcessRegressor ----------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.02, np.linspace(0.01, 0.2, 60)], ids=["one", "each"])
def test_posterior_is_that_of_scikit_learn(alpha: Any) -> None:
    x, y = data()
    test = data(20, seed=1)[0]
    ours = GaussianProcessRegressor(rbf(), alpha=alpha, optimizer=None, normalize_y=False).fit(x, y)
    other = theirs.GaussianProcessRegressor(ConstantKernel(1.5) * RBF(0.7), alpha=alpha, optimizer=None).fit(x, y)
    mean, std = ours.predict(test, return_std=True)
    expected, expected_std = other.predict(test, return_std=True)
    assert mean.dtype == std.dtype == np.float64
    np.testing.assert_allclose(mean, expected, atol=1e-7)
    np.testing.assert_allclose(std, expected_std, atol=1e-7)
    np.testing.assert_allclose(
        ours.predict(test, return_cov=True)[1], other.predict(test, return_cov=True)[1], atol=1e-7
    )
    assert ours.log_marginal_likelihood_value_ == pytest.approx(other.log_marginal_likelihood_value_, abs=1e-6)
    draws = ours.sample_y(test, 4000)
    assert draws.shape == (20, 4000)
    np.testing.assert_allclose(draws.mean(axis=1), mean, atol=5 * std.max() / 60)
    np.testing.assert_allclose(draws.std(axis=1), std, rtol=0.1)
    np.testing.assert_allclose(np.asarray(ours.noise_), alpha, rtol=1e-9)


def test_functions_of_many_points(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = data()
    model = GaussianProcessRegressor(rbf(), alpha=0.02, optimizer=None).fit(x, y)
    assert model.noise_ == pytest.approx(0.02)
    test = data(30, seed=1)[0]
    mean, std = model.predict(test, return_std=True)
    monkeypatch.setattr("sketchgp.sklearn.regressor._JOINT", 10)
    draws = model.sample_y(test, 500, random_state=3)
    np.testing.assert_allclose(draws.mean(axis=1), mean, atol=5 * std.max() / 22)
    np.testing.assert_allclose(draws.std(axis=1), std, rtol=0.2)


def test_tunes_at_least_as_well_as_scikit_learn() -> None:
    """The units of the data do not matter: not those of x, nor of y."""
    x, y = data()
    ours = GaussianProcessRegressor().fit(x * [1.0, 1e4], y * 1e-3)
    kernel = ConstantKernel() * Matern([1.0, 1.0], nu=2.5) + WhiteKernel(0.1)
    other = theirs.GaussianProcessRegressor(kernel, normalize_y=True).fit(x, y)
    assert ours.log_marginal_likelihood_value_ >= other.log_marginal_likelihood_value_ - 0.05
    assert ours.history_.converged and ours.method_ == "exact" and "60 rows" in ours.choice_
    test, truth = data(200, seed=1)
    mean, std = ours.predict(test * [1.0, 1e4], return_std=True, include_noise=True)
    score = (truth * 1e-3 - mean) / std
    assert 0.7 < np.sqrt(np.mean(score**2)) < 1.4
    assert std == pytest.approx(
        np.sqrt(ours.predict(test * [1.0, 1e4], return_std=True)[1] ** 2 + ours.noise_), rel=1e-6
    )


@pytest.mark.parametrize("method", ["exact", "inducing"])
def test_a_linear_mean_goes_on_beyond_the_data(method: Any) -> None:
    x, y = data()
    slopes = np.array([3.0, -2.0])
    gp = GaussianProcessRegressor("exponential", mean="linear", method=method).fit(x, y + 100 * x @ slopes)
    far = np.array([[1e3, 0.0], [0.0, 1e3]])
    assert gp.predict(far) / 1e5 == pytest.approx(slopes, abs=0.1)
    assert gp.kernel_.base_kernel.nu == 0.5


def test_without_normalising_units_do_not_matter_either() -> None:
    x, y = data()
    fits = [GaussianProcessRegressor(normalize_y=False).fit(x, unit * y) for unit in (1.0, 1e-6)]
    small = [fit.predict(x, return_std=True) for fit in fits]
    for one, other in zip(*small, strict=True):
        np.testing.assert_allclose(other, 1e-6 * one, rtol=1e-3)


def test_inducing_points_and_rows_to_tune_on(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    x, y = data(120)
    monkeypatch.setitem(choices._EXACT, "cpu", 100)
    monkeypatch.setitem(run._ITERATIONS, "lbfgs", 10)
    many = GaussianProcessRegressor(tuning_rows=50, random_state=0, verbose=True).fit(x, y)
    assert many.method_ == "inducing" and isinstance(many.model_, sketchgp.InducingPointGP)
    assert many.choice_ == (
        "120 inducing points: 120 rows, more than the 100 that are solved for exactly by default; "
        "hyperparameters tuned on 50 random rows"
    )
    assert f"GaussianProcessRegressor: {many.choice_}\n" in capsys.readouterr().out
    assert many.history_.rows == 50 and len(many.model_.train_targets) == 120
    few = GaussianProcessRegressor(n_inducing=40, tuning_rows=None, random_state=0).fit(x, y)
    assert len(few.model_.inducing_points) == 40 and few.history_.objective == "bound"
    assert few.log_marginal_likelihood_value_ == pytest.approx(-few.history_.best_loss * 120, rel=1e-3)
    test, truth = data(100, seed=1)
    for fitted in (few, many):
        assert fitted.score(test, truth) > 0.95
        again = GaussianProcessRegressor(**fitted.get_params()).set_params(verbose=False).fit(x, y)
        np.testing.assert_array_equal(again.predict(test), fitted.predict(test))


COMMON = [
    {"kernel": "gauss"},
    {"kernel": RBF()},
    {"kernel": None},
    {"method": "sparse"},
    {"method": None},
    {"n_inducing": 0},
    {"n_inducing": 1.5},
    {"n_inducing": True},
    {"solver": "cg"},
    {"solver": None},
    {"solver": sketchgp.Cholesky},
    {"solver": sketchgp.KRILL(), "method": "exact"},
    {"device": "moon"},
    {"device": 1.5},
    {"random_state": "a"},
    {"random_state": 1.5},
    {"random_state": -1},
    {"verbose": "x"},
    {"alpha": -1.0},
    {"alpha": 0},
    {"alpha": "a"},
    {"alpha": np.nan},
    {"alpha": np.inf},
    {"alpha": True},
    {"alpha": np.ones(3)},
]
OF_REGRESSOR = [
    {"mean": "zero"},
    {"optimizer": "fmin"},
    {"optimizer": True},
    {"tuning_rows": 1.5},
    {"tuning_rows": 0},
    {"tuning_rows": True},
    {"normalize_y": "x"},
    {"normalize_y": None},
    {"alpha": ["a"] * 60},
]
OF_RIDGE = [{"alpha": None}, {"gamma": 0}, {"gamma": "x"}, {"gamma": True}]


@each(
    ("kind", "options"),
    [
        *((GaussianProcessRegressor, options) for options in (*COMMON, *OF_REGRESSOR)),
        *((KernelRidge, options) for options in (*COMMON, *OF_RIDGE)),
        *((KernelClassifier, options) for options in (*COMMON, *OF_RIDGE, {"loss": "zero-one"}, {"loss": None})),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value),
)
def test_arguments_that_do_not_fit(kind: Any, options: dict[str, Any]) -> None:
    """Each is refused at ``fit``, by its name, and nothing is computed."""
    x, y = data()
    name = next(iter(options))
    with pytest.raises(sketchgp.InputError, match=rf"{name} expects"):
        kind(**options).fit(x, y > 3 if kind is KernelClassifier else y)


def test_intervals_are_compared_with_rows_not_tuned_on() -> None:
    """A noise given a hundred times too small warns; one that is learned, or right in each row, does not."""
    x, y = data(900)
    kernel = rbf().requires_grad_(False)  # which could explain noise by a short lengthscale
    some = {"tuning_rows": 100, "random_state": 0}
    for alpha in (None, 0.01, np.full(900, 0.01)):
        assert 0.92 < GaussianProcessRegressor(kernel, alpha=alpha, **some).fit(x, y).coverage_ < 0.98
    for alpha in (1e-4, np.full(900, 1e-4)):
        with pytest.warns(UserWarning, match=r"95% intervals cover .* of 800 rows .*troubleshooting: coverage"):
            model = GaussianProcessRegressor(kernel, alpha=alpha, **some).fit(x, y)
        assert model.coverage_ < 0.8
    for rows in (800, None):  # too few others, and none
        model = GaussianProcessRegressor(kernel, alpha=1e-4, tuning_rows=rows, random_state=0).fit(x, y)
        assert model.coverage_ is None


@pytest.mark.filterwarnings("ignore:GaussianProcessRegressor. all targets")
@pytest.mark.parametrize("value", [3.0, 0.0, 0.1, -1e-9, 1e9])
@pytest.mark.parametrize("n", [1, 60])
def test_targets_that_are_all_the_same(n: int, value: float) -> None:
    """The likelihood has no maximum: what is predicted is of the size of the targets, whatever their unit."""
    x, size = data(n)[0], abs(value) or 1.0
    far = x[:1] + 1e3
    for normalize in (True, False):
        model = GaussianProcessRegressor(normalize_y=normalize).fit(x, np.full(n, value))
        mean, std = model.predict(np.concatenate([x, far]), return_std=True)
        np.testing.assert_allclose(mean, value, rtol=1e-7)
        assert 0.05 * size < std[0] < size and std[-1] == pytest.approx(size, rel=1e-6)
        assert model.history_ is None and 0.05 * size**2 < model.noise_ < size**2
    with pytest.warns(UserWarning, match="constant-targets"):
        GaussianProcessRegressor().fit(x, np.full(n, value))
    GaussianProcessRegressor(optimizer=None).fit(x, np.full(n, value))  # nothing is said: nothing was to be tuned


@pytest.mark.parametrize("estimator", [GaussianProcessRegressor(optimizer=None), KernelRidge(), KernelClassifier()])
def test_dates_and_devices_that_are_not_there_are_refused(estimator: Any) -> None:
    """scikit-learn takes dates for numbers in whatever unit they are stored, which may be another to predict with."""
    x, _ = data()
    days = np.arange(60).astype("datetime64[D]")
    labels = x[:, 0] > 0
    for dates in (days[:, None], pandas.DataFrame({"when": days, "x": x[:, 0]})):
        with pytest.raises(sketchgp.InputError, match="X expects numbers, got datetime64"):
            estimator.fit(dates, labels)
    estimator.fit(np.arange(60.0)[:, None], labels)
    with pytest.raises(sketchgp.InputError, match="X expects numbers, got datetime64"):
        estimator.predict(days[:, None])
    with pytest.raises(sketchgp.InputError, match="device expects"):
        clone(estimator).set_params(device="cuda:99").fit(x, labels)


def test_predictions_that_cannot_be() -> None:
    x, y = data()
    model = GaussianProcessRegressor(alpha=np.full(60, 0.1), optimizer=None).fit(x, y)
    with pytest.raises(ValueError, match="one at a time"):
        model.predict(x, return_std=True, return_cov=True)
    for asked in ({"return_std": True}, {"return_cov": True}):
        with pytest.raises(ValueError, match="noise of new rows"):
            model.predict(x, include_noise=True, **asked)


# --- KernelRidge -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["rbf", "laplacian"])
def test_ridge_is_that_of_scikit_learn(kernel: str) -> None:
    x, y = data()
    test = data(20, seed=1)[0]
    several, weights = np.column_stack([y, x[:, 0]]), np.arange(60) % 3
    for options in ({}, {"gamma": 0.3}):
        ours, other = (
            KernelRidge(0.2, kernel=kernel, **options),
            sklearn.kernel_ridge.KernelRidge(alpha=0.2, kernel=kernel),
        )
        other.set_params(**options)
        for targets, weighted in ((y, None), (several, None), (y, weights)):
            expected = other.fit(x, targets, weighted).predict(test)
            found = ours.fit(x, targets, weighted).predict(test)
            assert found.shape == expected.shape
            np.testing.assert_allclose(found, expected, atol=1e-7)


def test_ridge_on_inducing_points_and_by_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = data(80)
    exact = KernelRidge(0.05).fit(x, y)
    all_rows = KernelRidge(0.05, n_inducing=80, random_state=0).fit(x, y)
    assert all_rows.method_ == "inducing" and all_rows.dual_coef_.shape == (80,)
    np.testing.assert_allclose(all_rows.predict(x), exact.predict(x), atol=1e-5)
    assert KernelRidge(0.05, n_inducing=30, random_state=0).fit(x, y).score(x, y) > 0.9
    monkeypatch.setattr("sketchgp.sklearn.ridge.DIRECT", 10)
    iterated = KernelRidge(0.05).fit(x, y)
    assert iterated.solution_.report.solver == "ConjugateGradients"
    np.testing.assert_allclose(iterated.predict(x), exact.predict(x), atol=0.02)
    with pytest.raises(ValueError, match="gamma is of kernels by name"):
        KernelRidge(kernel=rbf(), gamma=1.0).fit(x, y)


# --- KernelClassifier ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "dtype"),
    [
        ("squared", "f8"),
        ("multinomial", "f8"),
        ("multinomial", "f4"),
        ("logistic", "f8"),
        ("logistic", "f4"),
        ("hinge", "f8"),
    ],
)
def test_classes(loss: str, dtype: str) -> None:
    x, y = data(150)
    x = x.astype(dtype)
    labels = np.array(["low", "middle", "high"])[np.digitize(y, [2.6, 3.4])]
    model = KernelClassifier(
        0.1, loss=loss, gamma=1.0, solver="auto" if loss == "squared" else FEW_STEPS, random_state=0
    )
    model.fit(x[:100], labels[:100])
    assert model.classes_.tolist() == ["high", "low", "middle"] and model.score(x[100:], labels[100:]) > 0.8
    assert hasattr(model, "predict_proba") == (loss != "hinge")
    if loss != "hinge":
        shares = model.predict_proba(x[100:])
        np.testing.assert_allclose(shares.sum(axis=1), 1.0, atol=1e-9)
        assert shares.min() >= 0 and (model.classes_[shares.argmax(axis=1)] == model.predict(x[100:])).all()
        right = (labels[100:, None] == model.classes_).astype(float)
        guess = np.mean(labels[:100, None] == model.classes_, axis=0)
        assert np.square(shares - right).mean() < 0.6 * np.square(guess - right).mean()


def test_far_from_all_rows_probabilities_are_shares() -> None:
    x, y = data()
    labels = y > np.quantile(y, 0.75)
    far = KernelClassifier().fit(x, labels).predict_proba(np.full((1, 2), 1e3))
    np.testing.assert_allclose(far, [[1 - labels.mean(), labels.mean()]], atol=1e-9)


# --- as people use them ----------------------------------------------------------------------------------------


def test_pipelines_searches_tables_and_pickles() -> None:
    x, y = data()
    table, column = pandas.DataFrame(x, columns=["width", "height"]), pandas.Series(y)
    for estimator, grid in (
        (KernelRidge(), {"alpha": [1e-2, 10.0]}),
        (GaussianProcessRegressor(optimizer=None), {"kernel": ["rbf", rbf(1e-3)]}),
    ):
        steps = make_pipeline(StandardScaler().set_output(transform="pandas"), estimator)
        name = type(estimator).__name__.lower()
        search = GridSearchCV(steps, {f"{name}__{key}": values for key, values in grid.items()}, cv=3).fit(
            table, column
        )
        assert search.best_params_[f"{name}__{next(iter(grid))}"] == next(iter(grid.values()))[0]
        fitted = search.best_estimator_[-1]
        assert fitted.feature_names_in_.tolist() == ["width", "height"]
        found = search.predict(table)
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(search)).predict(table), found)
        with pytest.raises(ValueError, match="feature names"):
            search.predict(table.rename(columns={"width": "depth"}))
        assert not hasattr(clone(fitted), "n_features_in_")


def test_single_precision_stays() -> None:
    x, y = data()
    model = GaussianProcessRegressor(rbf(), alpha=0.02, optimizer=None).fit(x.astype(np.float32), y)
    assert model.model_.train_inputs[0].dtype == torch.float32 and model.predict(x).dtype == np.float64
    whole = GaussianProcessRegressor(rbf(), alpha=0.02, optimizer=None).fit(x, y)
    np.testing.assert_allclose(model.predict(x), whole.predict(x), atol=1e-3)
