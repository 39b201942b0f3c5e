"""Doubly stochastic gradients: fixed points, rates, streams, what is saved, and the two models that learn by them."""

from __future__ import annotations

import copy
import dataclasses
import io
import itertools
import math
import pickle

import pandas
import pytest
import torch
from gpytorch.kernels import ConstantKernel, LinearKernel, MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from gpytorch.means import ConstantMean, LinearMean
from torch.utils.data import DataLoader, TensorDataset

from problems import Crash, Largest, normal, points, quiet, relative, set_scales
from sketchgp import (
    ConvergenceWarning,
    DoublyStochastic,
    InputError,
    NumericalError,
    RandomFeatureClassifier,
    RandomFeatureGP,
    RandomFeatureProblem,
    predict,
    record_solves,
)
from sketchgp.report import Reason

N = 120
X = points(N, 2)
Y = torch.sin(5 * X[:, 0]) + X[:, 1] + 0.3 * normal(N, seed=1)
TEST = points(15, 2, seed=7)
SMALL = DoublyStochastic(num_features=256, block_size=64)
BATCHES = dataclasses.replace(SMALL, batch_size=40)


def a_kernel(dtype=torch.float64, scale=1.3):
    return set_scales(ScaleKernel(RBFKernel()), scale, 0.4).to(dtype).requires_grad_(False)


def gp(solver=SMALL, noise=0.2, dtype=torch.float64, kernel=None, **choices):
    likelihood, mean = GaussianLikelihood(), ConstantMean()
    likelihood.noise, mean.constant = noise, torch.tensor(0.4)
    choices = {"variance": "none"} | choices
    kernel = a_kernel(dtype) if kernel is None else kernel
    return RandomFeatureGP(likelihood.to(dtype), mean.to(dtype), kernel, solver, **choices).to(dtype).eval()


def all_features(learner, x):
    """``(p, N)``, pair by pair."""
    return torch.stack(learner.features.pairs(learner.features.prepare(x), 0, learner.total), dim=2).flatten(1)


def ridge(learner, kernel_noise, x, y):
    """Coefficients ``(N, t)`` of the ridge regression on the learner's features, pair by pair."""
    phi = all_features(learner, x)
    matrix = phi.mT @ phi + kernel_noise * phi.shape[1] * torch.eye(phi.shape[1], dtype=phi.dtype)
    return torch.linalg.solve(matrix, phi.mT @ y.reshape(len(y), -1))


def values(learner, coefficients, x):
    return all_features(learner, x) @ coefficients


# --- what is converged to, and how fast ---------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [None, 2])
def test_the_fixed_point_is_the_ridge_regression(columns):
    """With the noise as it is: a step there changes nothing, and steps from 0 get there, on small batches nearly."""
    y = Y if columns is None else torch.stack([Y, Y.square()], dim=1)
    problem = RandomFeatureProblem(a_kernel(), X, y, 0.2)
    for batch, tol in ((N, 0.03), (40, 0.08)):
        solver = dataclasses.replace(SMALL, batch_size=batch, epochs=60)
        learner = solver.learner(problem)
        value, report = solver.learn(learner, problem)
        wanted = ridge(learner, 0.2, X, y)
        assert value.shape == (256, columns or 1) and value.dtype == torch.float64
        assert relative(values(learner, value, TEST), values(learner, wanted, TEST)) < tol
        assert report.reason is Reason.FINISHED and not report.converged and report.residual.shape == (columns or 1,)
        assert report.work["epochs"] == 60 and report.n == N and report.size == 256
    learner.coefficients = wanted.unflatten(0, (-1, 2)).clone()
    for _ in range(5):
        learner.step(X, y.reshape(N, -1), 0.2 / N, whole=True)
    assert relative(learner.coefficients.flatten(0, 1), wanted) < 1e-9


def test_steps_without_preconditioner_have_the_same_fixed_point():
    problem = RandomFeatureProblem(a_kernel(), X, Y, 6.0)
    solver = dataclasses.replace(SMALL, preconditioned=False, epochs=300, batch_size=60)
    learner = solver.learner(problem)
    value, _ = solver.learn(learner, problem)
    assert relative(values(learner, value, TEST), values(learner, ridge(learner, 6.0, X, Y), TEST)) < 0.03


def test_the_error_falls_like_one_over_the_steps():
    """New features at every step: the mean squared error to the exact function, mean over seeds, on log-log axes."""
    kernel, noise, x, y = a_kernel(scale=1.0), 8.0, X[:40], Y[:40]
    covariance = kernel(x).to_dense()
    exact = covariance @ torch.linalg.solve(covariance + noise * torch.eye(40, dtype=torch.float64), y)
    steps, seeds = [25, 50, 100, 200], 8
    errors = torch.zeros(len(steps), dtype=torch.float64)
    for seed in range(seeds):
        solver = DoublyStochastic(num_features=None, preconditioned=False, block_size=16, seed=seed)
        learner, generator = solver.learner(RandomFeatureProblem(kernel, x, y, noise)), torch.Generator()
        generator.manual_seed(seed)
        for step in range(1, steps[-1] + 1):
            rows = torch.randint(40, (10,), generator=generator)
            learner.step(x[rows], y[rows].unsqueeze(1), noise / 40)
            if step in steps:
                f = learner.evaluate(learner.features.prepare(x), learner.average)[:, 0]
                errors[steps.index(step)] += (f - exact).square().mean() / seeds
        assert len(learner.coefficients) == 8 * steps[-1]  # all of them new
    t = torch.tensor(steps, dtype=torch.float64).log()
    slope = float(((t - t.mean()) * errors.log()).sum() / (t - t.mean()).square().sum())
    assert -1.2 < slope < -0.8, (slope, errors)
    assert float(errors[-1]) < 3e-3 * float(exact.square().mean())


@pytest.mark.parametrize("loss", ["hinge", "logistic"])
def test_steps_without_preconditioner_do_not_stop_at_the_majority(loss):
    """Where the kernel's largest eigenvalue is that of a constant, and the ridge is small."""
    x = points(600, 2, seed=5)
    labels = ((x - 0.5).norm(dim=1) < 0.28).long()  # a quarter
    kernel = set_scales(ScaleKernel(RBFKernel()), 1.0, 0.5).double().requires_grad_(False)
    solver = DoublyStochastic(num_features=None, preconditioned=False, block_size=64, batch_size=150, epochs=15)
    model = RandomFeatureClassifier(kernel, loss, 0.1, solver=solver)
    model.learn(x, labels)
    assert float((model.predict(x) != labels).double().mean()) < 0.06


def test_steps_are_those_of_the_paper():
    """Algorithm 1, written for functions; its steps are theta / (i + i_0)."""
    solver = DoublyStochastic(num_features=None, preconditioned=False, block_size=8)
    problem = RandomFeatureProblem(a_kernel(), X, Y, 24.0)
    learner, f = solver.learner(problem), torch.zeros(15, dtype=torch.float64)
    made, at = (learner.features.prepare(x) for x in (X, TEST))
    on_data, weight = torch.zeros(N, dtype=torch.float64), 24.0 / N
    for i in range(6):
        losses = learner.step(X, Y.unsqueeze(1), weight)
        assert relative(torch.cat(losses), torch.stack([(on_data - Y).square().sum(), Y.square().sum()]) / 2) < 1e-12
        step = learner.first_step / (1 + i / learner.settles)
        phi, there = (torch.cat(learner.features.pairs(one, 4 * i, 4 * i + 4), dim=1) for one in (made, at))
        slope = phi.mT @ (on_data - Y) / N / 8
        on_data, f = ((1 - step * weight) * old - step * values @ slope for old, values in ((on_data, phi), (f, there)))
        assert relative(learner.evaluate(at, learner.coefficients)[:, 0], f) < 1e-12
    phi = torch.cat(learner.features.pairs(made, 0, 4), dim=1)
    largest = torch.linalg.matrix_norm(phi, 2) ** 2 / phi.numel()
    assert learner.first_step == pytest.approx(1 / float(largest + weight))
    assert learner.first_step * learner.settles <= 2 / weight * (1 + 1e-9)  # theta


@pytest.mark.parametrize("loss", ["logistic", "multinomial"])
def test_logistic_losses_end_at_their_minimum(loss):
    """Where the gradient on the features is 0: ``sum l' phi + noise N a = 0``."""
    labels = (Y > 0.8).long() + (Y > 1.3).long()
    problem = RandomFeatureProblem(a_kernel(), X, labels, 1.0, loss)
    solver = dataclasses.replace(SMALL, batch_size=N, epochs=150)
    learner = solver.learner(problem)
    a, _ = solver.learn(learner, problem)
    phi = all_features(learner, X)
    hot = (labels.unsqueeze(1) == torch.tensor(problem.targets.classes)).double()
    share = torch.sigmoid(phi @ a) if loss == "logistic" else (phi @ a).softmax(dim=1)
    slope, shrink = phi.mT @ (share - hot), 1.0 * 256 * a
    assert float((slope + shrink).norm() / shrink.norm()) < 0.02


def test_support_vectors():
    """The hinge loss, against a minimum found by many small steps of another kind."""
    labels = (Y > 0.9).long()
    problem = RandomFeatureProblem(a_kernel(), X, labels, 1.0, "hinge")
    solver = dataclasses.replace(SMALL, batch_size=N, epochs=400)
    learner = solver.learner(problem)
    a, _ = solver.learn(learner, problem)
    phi, sign = all_features(learner, X), 2 * labels.double() - 1

    def objective(w):
        return (1 - sign * (phi @ w)).clamp_min(0).sum() + 128 * w.square().sum()

    # dual coordinate ascent: w = sum_i u_i y_i phi_i / 256 with 0 <= u <= 1
    gram, u = (phi @ phi.mT) * sign.unsqueeze(1) * sign / 256, torch.zeros(N, dtype=torch.float64)
    for _ in range(100):
        for i in range(N):
            u[i] = (u[i] + (1 - gram[i] @ u) / gram[i, i]).clamp(0, 1)
    least = objective(phi.mT @ (u * sign) / 256)
    found = objective(a[:, 1] if problem.targets.classes == [0, 1] else a[:, 0])
    assert float(least) <= float(found) < 1.02 * float(least)


# --- streams ------------------------------------------------------------------------------------------------------


def stream(sizes, x=X, y=Y):
    ends = list(itertools.accumulate(sizes))
    return [(x[b - a : b], y[b - a : b]) for a, b in zip(sizes, ends, strict=True)]


def test_a_stream_is_what_it_holds():
    """The same batches as tensors, a list, a loader: the same function; batches of one row and of all of them."""
    loader = DataLoader(TensorDataset(X, Y), batch_size=40)
    first, second = gp(), gp()
    first.learn(stream([40, 40, 40]))
    second.learn(loader)
    assert torch.equal(first(TEST).mean, second(TEST).mean)
    uneven = gp()
    report = uneven.learn(stream([1, 40, 0, 7, 72]), rows=N)
    assert report.work["iterations"] == 4 and report.n == N
    assert bool(torch.isfinite(uneven(TEST).mean).all())
    with pytest.raises(InputError, match="at least one batch"):
        gp().learn([])


@pytest.mark.parametrize("size", [1, 4, 30])
def test_small_batches_learn(size):
    """In one pass, as well as large ones: what a few rows say of other points is not taken at its word."""
    x = points(300, 2, seed=3)
    y = torch.sin(5 * x[:, 0]) + x[:, 1] - 0.4 + 0.3 * normal(300, seed=4)
    model, truth = gp(DoublyStochastic(num_features=1024), 0.1), torch.sin(5 * TEST[:, 0]) + TEST[:, 1] - 0.4
    model.learn(stream([size] * (300 // size), x, y))
    assert float((model(TEST).mean - truth).square().mean() / (truth - 0.4).square().mean()) < 0.05


def test_endless_streams_end_when_they_are_told():
    def endless():
        for i in itertools.count():
            x = points(48, 2, seed=i)
            yield x, torch.sin(5 * x[:, 0]) + x[:, 1]

    model = gp(dataclasses.replace(SMALL, max_iterations=40))
    report = model.learn(endless())
    assert report.iterations == 40 and report.reason is Reason.FINISHED
    wanted = torch.sin(5 * TEST[:, 0]) + TEST[:, 1]
    before = float((model(TEST).mean - wanted).square().mean().sqrt())
    assert before < 0.15
    with pytest.warns(ConvergenceWarning, match="stopped by the callback"):
        report = model.learn(endless(), callback=lambda progress: progress.iteration >= 30)
    assert report.iterations == 32  # a window
    assert float((model(TEST).mean - wanted).square().mean().sqrt()) < before
    timed = gp(dataclasses.replace(SMALL, max_seconds=0.05))
    with pytest.warns(ConvergenceWarning, match="ran out of time"):
        timed.learn(endless())


def test_batches_are_smaller_where_memory_is_short(monkeypatch):
    once = dataclasses.replace(SMALL, epochs=1)
    assert gp(once).learn(X, Y).iterations == 1
    monkeypatch.setattr("sketchgp.solvers.streams.doubly_stochastic.free_memory", lambda device: 2**17)
    assert gp(dataclasses.replace(once, num_features=128)).learn(X, Y).iterations == 2


def test_a_generator_has_one_epoch(tmp_path):
    """Of which no batch is lost."""
    whole, model = gp(), gp()
    whole.learn(stream([0, 60, 60]))
    report = model.learn(batch for batch in stream([0, 60, 60]))
    assert report.iterations == 2 and torch.equal(model(TEST).mean, whole(TEST).mean)
    with pytest.raises(InputError, match="cannot be gone through twice"):
        gp(dataclasses.replace(SMALL, checkpoint=tmp_path / "c.pt")).learn(iter(stream([60, 60])))
    model = gp(dataclasses.replace(SMALL, epochs=2))
    with pytest.raises(InputError, match="a generator does not"):
        model.learn(iter(stream([60, 60])))
    assert model.num_features == 0  # before anything was learned


def test_what_holds_a_generator_is_one():
    """No batch of it is lost by looking whether there is one."""

    class Source:
        def __init__(self):
            self.feed = iter(stream([60, 60]))

        def __iter__(self):
            return self.feed

    model = gp()
    assert model.learn(Source()).iterations == 2 and model._learner.rows == N
    with pytest.raises(InputError, match="expects a stream that starts anew"):
        gp(dataclasses.replace(SMALL, epochs=2)).learn(Source())


def test_bad_batches_are_refused_and_what_was_learned_is_kept():
    model, other = gp(), gp()
    bad = stream([40, 40, 40])
    bad[1] = bad[1][0].clone(), bad[1][1]
    bad[1][0][3, 1] = float("nan")
    with pytest.raises(InputError, match=r"batch 1 of the stream: x holds NaN or infinity, first in row 3"):
        model.learn(bad)
    other.learn(bad[:1])
    assert torch.equal(model(TEST).mean, other(TEST).mean)
    for wrong, said in (
        ((X[:5], Y[:4]), "expects 5 rows"),
        ((X[:5, :1], Y[:5]), "expects 2 features"),
        ((X[:5].float(), Y[:5]), "float64"),
        ((X[:5], Y[:5] * float("inf")), "holds NaN or infinity"),
        ((X[:5], torch.stack([Y, Y], dim=1)[:5]), r"expects shape \(b,\), as before"),
        (X[:5], r"expects a pair \(x, y\)"),
    ):
        with pytest.raises(InputError, match=said):
            model.learn([wrong])
        if isinstance(wrong, tuple):
            with pytest.raises(InputError, match=said):
                model.partial_fit(*wrong)
    assert torch.equal(model(TEST).mean, other(TEST).mean)


def test_partial_fit_is_a_step_of_learn():
    one, other = gp(), gp()
    batches = stream([40, 50, 30])
    one.learn(batches)
    for x, y in batches:
        other.partial_fit(x, y)
    assert relative(other(TEST).mean, one(TEST).mean) < 1e-6  # phases are counted from the same first batch
    assert other.num_features == one.num_features


def test_labels_that_appear_late():
    labels = (Y > 0.8).long() * 7
    late = torch.cat([labels, torch.full((N,), 3)])
    x = torch.cat([X, X + 2])
    model = RandomFeatureClassifier(a_kernel(), solver=dataclasses.replace(SMALL, epochs=15))
    model.learn(stream([60, 60, 60, 60], x, late))
    assert model.classes.tolist() == [0, 7, 3]
    assert float((model.predict(x) == late).double().mean()) > 0.85
    declared = RandomFeatureClassifier(a_kernel(), classes=[3, 0, 7], solver=SMALL)
    declared.partial_fit(X, labels)
    assert declared.classes.tolist() == [0, 3, 7]
    assert declared.probabilities(TEST).shape == (15, 3)


@pytest.mark.parametrize("loss", ["multinomial", "logistic", "hinge"])
def test_classifiers(loss):
    labels = (Y > 0.8).long() + (Y > 1.3).long()
    model = RandomFeatureClassifier(a_kernel(), loss, solver=dataclasses.replace(SMALL, epochs=40))
    report = model.learn(X, labels, held_out=(X, labels))
    wrong = float((model.predict(X) != labels).double().mean())
    assert wrong < 0.3 and float(report.held_out[-1].error) == pytest.approx(wrong)
    assert model.scores(TEST).shape == (15, 3)
    if loss == "hinge":
        with pytest.raises(InputError, match="no probabilities"):
            model.probabilities(TEST)
    else:
        chance = model.probabilities(TEST)
        torch.testing.assert_close(chance.sum(dim=1), torch.ones(15, dtype=torch.float64))
        assert torch.equal(model.classes[chance.argmax(dim=1)], model.predict(TEST))
    with pytest.raises(InputError, match=r"y expects a tensor of integers, got torch\.float64"):
        model.learn(X, Y)


@pytest.mark.parametrize("loss", ["multinomial", "logistic", "hinge"])
def test_one_class_only(loss):
    model = RandomFeatureClassifier(a_kernel(), loss, solver=SMALL)
    model.learn(X, torch.full((N,), 4))
    assert model.predict(TEST).tolist() == [4] * 15
    if loss != "hinge":
        assert bool((model.probabilities(TEST) == 1).all())


def test_two_classes_against_each_other_mirror():
    """One column each, and the same as one column for both."""
    model = RandomFeatureClassifier(a_kernel(), "logistic", solver=SMALL)
    model.learn(X, (Y > 0.9).long())
    scores = model.scores(TEST)
    torch.testing.assert_close(scores[:, 0], -scores[:, 1])
    torch.testing.assert_close(model.probabilities(TEST)[:, 1], torch.sigmoid(scores[:, 1]))


# --- the same whatever happens ------------------------------------------------------------------------------------


def test_the_same_seed_is_the_same_function(monkeypatch):
    """Evaluated by other tiles, with frequencies kept or not, from a copy; another seed is another one."""
    model = gp()
    model.learn(X, Y)
    wanted = model(TEST).mean
    assert torch.equal(copy.deepcopy(model)(TEST).mean, wanted)
    monkeypatch.setattr("sketchgp.solvers.streams.learner._ENTRIES", 1)
    monkeypatch.setattr("sketchgp.operators.feature_map._KEPT", 0)
    monkeypatch.setattr("sketchgp.models.streamed._ROWS", 4)
    assert relative(pickle.loads(pickle.dumps(model))(TEST).mean, wanted) < 1e-10
    again = gp()
    again.learn(X, Y)
    assert relative(again(TEST).mean, wanted) < 1e-6
    other = gp(dataclasses.replace(SMALL, seed=1))
    other.learn(X, Y)
    assert 1e-4 < relative(other(TEST).mean, wanted) < 0.3


@pytest.mark.parametrize("variance", ["none", "samples"])
def test_saved_and_loaded(variance):
    """Predictions, and what is learned afterwards."""
    model, loaded = gp(variance=variance), gp(variance=variance)
    assert loaded.load_state_dict(model.state_dict()) is not None and loaded.num_features == 0
    model.learn(X, Y)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    for _ in range(2):
        found, wanted = loaded(TEST), model(TEST)
        assert torch.equal(found.mean, wanted.mean)
        if variance != "none":
            assert torch.equal(found.variance, wanted.variance)
        for one in (model, loaded):
            one.partial_fit(X[:30], Y[:30])
    other = gp(dataclasses.replace(SMALL, seed=5), variance=variance)
    other.load_state_dict(model.state_dict())
    with pytest.raises(InputError, match="learned with another kernel, mean, likelihood or solver"):
        other(TEST)


def test_a_state_of_version_0_2_is_read():
    """Its coefficients are to be multiplied by a decay."""
    solver = dataclasses.replace(SMALL, preconditioned=False)
    model, loaded, old = gp(solver), gp(solver), gp(solver)
    model.learn(X, Y)
    loaded.set_extra_state(model.get_extra_state())
    state = model.get_extra_state()
    state["tensors"]["coefficients"] *= 2
    state["numbers"]["decay"] = 0.5
    old.set_extra_state(state)
    for one in (loaded, old):
        one.partial_fit(X[:30], Y[:30])
    assert torch.equal(loaded(TEST).mean, old(TEST).mean)


DAMAGED = {
    "nothing": lambda state: None,
    "a text": lambda state: "text",
    "no mark": lambda state: {"tensors": {}},
    "no tensors": lambda state: {**state, "tensors": None},
    "a mark alone": lambda state: {"learned": "x"},
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_state_is_refused(kind):
    model, loaded = gp(), gp()
    model.learn(X, Y)
    state = {**model.state_dict(), "_extra_state": DAMAGED[kind](model.get_extra_state())}

    def used():
        loaded.load_state_dict(state)
        return loaded(TEST)

    with pytest.raises(
        InputError, match=r"^RandomFeatureGP: the extra state expects what get_extra_state\(\) returned"
    ):
        used()


LABELS = (Y > 0.8).long()
KINDS = {  # the same labels as people have them, and the classes then
    "list": (lambda some: some.tolist(), [0, 1]),
    "numpy": (lambda some: some.int().numpy(), [0, 1]),
    "texts": (lambda some: ["no" if one == 0 else "yes" for one in some.tolist()], ["no", "yes"]),
    "column": (lambda some: pandas.Series(["no" if one == 0 else "yes" for one in some.tolist()]), ["no", "yes"]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_labels_as_people_have_them(kind, tmp_path):
    """From tensors, in batches, held out, saved and loaded: as with a tensor of integers."""
    made, classes = KINDS[kind]
    model, plain, later = (RandomFeatureClassifier(a_kernel(), solver=SMALL) for _ in range(3))
    report = model.learn(X, made(LABELS), held_out=(X, made(LABELS)))
    assert report.held_out[-1].error == plain.learn(X, LABELS, held_out=(X, LABELS)).held_out[-1].error
    assert torch.equal(model.scores(TEST), plain.scores(TEST)) and model.classes.tolist() == classes
    assert list(model.predict(TEST)) == [classes[one] for one in plain.predict(TEST)]
    torch.save(model.state_dict(), tmp_path / "state")
    later.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    for one, change in ((later, made), (plain, lambda some: some)):
        one.partial_fit(X[:40], change(LABELS[:40]))
        one.learn([(X[:30], change(LABELS[:30])), (X[30:], change(LABELS[30:]))])
    assert torch.equal(later.scores(TEST), plain.scores(TEST)) and later.classes.tolist() == classes
    declared = RandomFeatureClassifier(a_kernel(), classes=["perhaps", *made(LABELS[:9])] if kind == "texts" else
                                       made(LABELS), solver=SMALL)  # fmt: skip
    assert declared.classes.tolist() == ["no", "perhaps", "yes"] if kind == "texts" else classes
    mixed = LABELS if isinstance(classes[0], str) else KINDS["texts"][0](LABELS)
    with pytest.raises(InputError, match=r"RandomFeatureClassifier\.learn: y expects (texts|integers), as before"):
        model.learn(X, mixed)


def test_errors_name_what_was_called():
    for model in (RandomFeatureClassifier(a_kernel(), solver=SMALL), gp()):
        for name in ("learn", "partial_fit"):
            with pytest.raises(InputError, match=rf"^{type(model).__name__}\.{name}: y expects"):
                getattr(model, name)(X, [0.5] * N)


def test_saved_and_loaded_classifiers():
    labels = (Y > 0.8).long() * 5
    model, loaded = (RandomFeatureClassifier(a_kernel(), solver=SMALL) for _ in range(2))
    model.learn(X, labels)
    loaded.load_state_dict(model.state_dict())
    assert torch.equal(loaded.probabilities(TEST), model.probabilities(TEST))
    assert loaded.classes.tolist() == [0, 5]
    for one in (model, loaded):
        one.partial_fit(X[:30], torch.full((30,), 2))
    assert torch.equal(loaded.probabilities(TEST), model.probabilities(TEST)) and loaded.classes.tolist() == [0, 5, 2]


def test_what_was_learned_moves_with_the_model():
    model = gp(variance="samples")
    model.learn(X, Y)
    wanted = model(TEST)
    assert torch.equal(model.to("cpu")(TEST).mean, wanted.mean) and torch.equal(model(TEST).variance, wanted.variance)
    with pytest.raises(InputError, match="or in another dtype"):
        model.float()(TEST.float())


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("choices", [{}, {"preconditioned": False, "num_features": None}], ids=["newton", "plain"])
def test_killed_and_resumed(tmp_path, streamed, choices):
    """The same bits, wherever it was killed, within an epoch too."""
    data = (stream([30, 41, 49]),) if streamed else (X, Y)
    solver = dataclasses.replace(SMALL, epochs=3, batch_size=None if streamed else 40, **choices)
    variance = "samples" if streamed else "none"
    whole = gp(solver, variance=variance, variance_samples=3)
    whole.learn(*data)
    for steps in (1, 3, 5):
        path = tmp_path / f"{steps}.pt"
        kept = dataclasses.replace(solver, checkpoint=path, every=1e-9)
        crashed, resumed = (gp(kept, variance=variance, variance_samples=3) for _ in range(2))
        batches = []

        def crash(x, y, *rest, batches=batches, steps=steps, crashed=crashed, **more):
            if len(batches) == steps:
                raise Crash
            batches.append(x)
            return type(crashed._learner).step(crashed._learner, x, y, *rest, **more)

        problem = crashed._problem("learn", *data, *([None] * (3 - len(data))))
        crashed._learner_for(problem, problem.n).step = crash
        with pytest.raises(Crash):
            crashed.learn(*data)
        report = resumed.learn(*data)
        assert report.details["resumed_after"] == steps
        assert torch.equal(resumed(TEST).mean, whole(TEST).mean)
        if streamed:
            assert torch.equal(resumed(TEST).variance, whole(TEST).variance)
    other = gp(dataclasses.replace(kept, seed=1), variance=variance, variance_samples=3)
    with pytest.raises(InputError, match="the solver's choices"):
        other.learn(*data)


def test_no_step_at_all():
    model = gp(dataclasses.replace(SMALL, max_seconds=1e-9))
    with pytest.warns(ConvergenceWarning, match="relative residual 1.0e"):
        model.learn(X, torch.stack([Y, Y], dim=1))
    assert model.report.residual.tolist() == [1, 1] and torch.equal(model(TEST).mean, torch.full((15, 2), 0.4).double())


def test_divergence_is_an_error():
    with pytest.raises(NumericalError, match="smaller step_scale"):
        gp(dataclasses.replace(SMALL, preconditioned=False, step_scale=1e3, epochs=50)).learn(X, Y)


# --- rows that come again -----------------------------------------------------------------------------------------


def test_rows_are_counted_once():
    """Of the same tensors, however often and by whichever model they are learned; and no more than there are."""
    solver = dataclasses.replace(BATCHES, epochs=2)
    model, first = gp(solver), gp(dataclasses.replace(solver, max_iterations=2))
    first.learn(X, Y)
    model.load_state_dict(first.state_dict())
    for _ in range(2):
        model.learn(X, Y)
        assert model._learner.rows == N
        assert model.report.work["sweeps"] == 6 * 64 / 256 and model.report.work["passes"] < 4  # of this solve alone
    model.solver = SMALL
    model.partial_fit(X[:30], Y[:30], rows=N)
    model.learn(stream([60, 60]), rows=N)
    assert model._learner.rows == N
    model.partial_fit(X[:30], Y[:30])
    assert model._learner.rows == N + 30
    model.learn(X, Y + 1)  # seen again with other targets
    assert model._learner.rows == 2 * N + 30
    ridges = []
    step = model._learner.step
    model._learner.step = lambda x, y, ridge, **more: ridges.append(ridge) or step(x, y, ridge, **more)
    model.partial_fit(X[:30], Y[:30])
    assert ridges == [pytest.approx(0.2 / (2 * N + 60))]


def test_a_row_has_one_noise_in_whichever_order_it_comes():
    """That of the functions whose errors are variances: or it would be averaged away over the epochs of a loader."""
    loader = DataLoader(TensorDataset(X, Y), batch_size=40, shuffle=True, generator=torch.Generator().manual_seed(0))
    for data, rows in (((X, Y), None), ((loader,), None), ((loader,), N)):
        model = gp(dataclasses.replace(BATCHES, epochs=3, batch_size=40 if len(data) == 2 else None),
                   variance="samples", variance_samples=2)  # fmt: skip
        seen, draw = {}, model._samples

        def look(x, numbers, seen=seen, draw=draw):
            found = draw(x, numbers)
            for point, value in zip(x, found, strict=True):
                seen.setdefault(tuple(point.tolist()), []).append(value)
            return found

        model._samples = look
        model.learn(*data, rows=rows)
        assert len(seen) == N
        for values in seen.values():
            assert len(values) == 3 and float((torch.stack(values) - values[0]).abs().max()) < 1e-9
        assert len({tuple(values[0].tolist()) for values in seen.values()}) == N


# --- the model ----------------------------------------------------------------------------------------------------


def test_it_is_the_posterior_of_a_gaussian_process():
    """Mean and variances, against the exact one, with features enough."""
    kernel, noise = a_kernel(), 0.2
    solver = DoublyStochastic(num_features=2048, epochs=20, block_size=1024)
    cross, y = kernel(TEST, X).to_dense(), Y - 0.4
    inverse = torch.linalg.inv(kernel(X).to_dense() + noise * torch.eye(N, dtype=torch.float64))
    mean, variance = 0.4 + cross @ inverse @ y, 1.3 - (cross @ inverse @ cross.mT).diagonal()
    model = gp(solver, variance="samples", variance_samples=100)
    with record_solves() as solves:
        model.learn(X, Y)
    assert len(solves) == 1 and solves[0] is model.report
    posterior = model(TEST)
    assert float(((posterior.mean - mean) / (variance + noise).sqrt()).abs().max()) < 0.08
    assert float((posterior.variance / variance).log().abs().max()) < 3.5 * math.sqrt(2 / 100)
    assert posterior.covariance_matrix.shape == (15, 15)
    found = predict(model, TEST)
    assert found.variance_method == "samples" and torch.equal(found.mean, posterior.mean)
    torch.testing.assert_close(found.variance, posterior.variance)
    torch.testing.assert_close(found.observation_variance, posterior.variance + noise)
    assert predict(model, TEST, variance=None).variance is None


def test_several_outputs():
    y = torch.stack([Y, -2 * Y], dim=1)
    single, model = (gp(variance="samples", variance_samples=2) for _ in range(2))
    single.learn(X, Y)
    model.learn(X, y)
    assert model(TEST).mean.shape == (15, 2)
    assert relative(model(TEST).mean[:, 0], single(TEST).mean) < 1e-10
    assert relative(model(TEST).variance[:, 1], single(TEST).variance) < 1e-10
    assert predict(model, TEST).variance.shape == (15, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtypes_shapes_and_gradients(dtype):
    model = gp(dtype=dtype, variance="samples", variance_samples=2)
    model.learn(X.to(dtype), Y.to(dtype))
    posterior = model(TEST.to(dtype))
    assert posterior.mean.dtype == posterior.variance.dtype == dtype
    batch = model(TEST.to(dtype).reshape(3, 5, 2))
    torch.testing.assert_close(batch.mean.flatten(), posterior.mean)
    torch.testing.assert_close(batch.variance.flatten(), posterior.variance)
    if dtype == torch.float64:
        assert torch.autograd.gradcheck(lambda x: model(x).mean, (TEST[:3].clone().requires_grad_(),))
        line = gp()
        line.learn(X[:, 0], Y)
        assert line(TEST[:, 0]).mean.shape == (15,)


def test_constants_and_means_of_the_inputs():
    likelihood = GaussianLikelihood().double()
    likelihood.noise = 0.1
    mean = LinearMean(2).double()
    kernel = (a_kernel() + ConstantKernel()).double().requires_grad_(False)
    model = RandomFeatureGP(likelihood, mean, kernel, dataclasses.replace(SMALL, epochs=60), variance="none").eval()
    model.learn(X, Y + 1)
    covariance, cross = kernel(X).to_dense(), kernel(TEST, X).to_dense()
    inner = torch.linalg.solve(covariance + 0.1 * torch.eye(N, dtype=torch.float64), Y + 1 - mean(X))
    assert relative(model(TEST).mean, mean(TEST) + cross @ inner) < 0.1


def test_what_changes_is_noticed():
    model = gp()
    with pytest.raises(InputError, match="expects a model that has learned"):
        model(TEST)
    model.learn(X, Y)
    before = model(TEST)
    with pytest.raises(InputError, match="variance='none'"):
        _ = before.variance
    model.covar_module.outputscale = 2.0
    with pytest.raises(InputError, match="changed since it learned"):
        model(TEST)
    model.forget().learn(X, Y)
    assert model(TEST).mean.shape == (15,)
    with pytest.raises(InputError, match=r"model\.eval\(\)"):
        model.train()(TEST)
    later = gp(variance="samples", variance_samples=2)
    later.learn(X, Y)
    posterior = later(TEST)
    later.partial_fit(X, Y)
    with pytest.raises(InputError, match="learned more since"):
        _ = posterior.variance


def test_memory_is_that_of_coefficients_and_tiles():
    """Whatever n is."""
    x = points(6_000, 2).float()
    y = torch.sin(5 * x[:, 0])
    model = gp(DoublyStochastic(num_features=512, block_size=128), dtype=torch.float32)
    model.learn(x[:256], y[:256])
    with Largest() as largest:
        model.learn([(x[a : a + 256], y[a : a + 256]) for a in range(0, 6_000 - 256, 256)])
    assert largest.entries <= 256 * 512


def test_bad_choices():
    for wrong, said in (
        ({"num_features": 7}, "even number"),
        ({"num_features": None}, "expects preconditioned=False"),
        ({"step_scale": 0}, "step_scale expects"),
    ):
        with pytest.raises(InputError, match=said):
            DoublyStochastic(**wrong)
    with pytest.raises(InputError, match="batch_size expects None for a stream"):
        gp(BATCHES).learn(stream([60, 60]))
    with pytest.raises(InputError, match=r"expect a tensor each.* got ndarray of shape \(120, 2\) and ndarray"):
        gp().learn(X.numpy(), Y.numpy())
    for model, y in ((gp(), Y), (RandomFeatureClassifier(a_kernel(), solver=SMALL), (Y > 0.8).long())):
        with pytest.raises(InputError, match="rows expects None for tensors"):
            model.learn(X, y, rows=N)
    with pytest.raises(InputError, match="has no random features"):
        gp(kernel=MyKernel().double(), variance="samples")
    with pytest.raises(InputError, match="has no random features"):
        RandomFeatureClassifier(MyKernel().double()).learn(X, (Y > 0.8).long())
    with pytest.raises(InputError, match="likelihood expects a GaussianLikelihood"):
        RandomFeatureGP(FixedNoiseGaussianLikelihood(torch.ones(N)), ConstantMean(), a_kernel())
    with pytest.raises(InputError, match="has no random features"):
        gp(kernel=LinearKernel().double())
    with pytest.raises(InputError, match="loss expects"):
        RandomFeatureProblem(a_kernel(), X, Y, 0.1, "absolute")
    with pytest.raises(InputError, match=r"DoublyStochastic\.solve: problem expects a RandomFeatureProblem"):
        DoublyStochastic().solve(X)


class MyKernel(MaternKernel):
    """It may compute anything."""


def test_solutions():
    problem = RandomFeatureProblem(a_kernel(), X, Y, 0.2)
    with quiet():
        solution = SMALL.solve(problem, progress=False)
    assert solution.value.shape == (256, 1) and solution.report.solver == "DoublyStochastic"
    assert f"; n = {N}, features = 256; " in str(solution.report)
    assert "; n = 256, features = 256; " in str(dataclasses.replace(solution.report, n=256))
    with pytest.warns(ConvergenceWarning, match="solve goes on from a checkpoint"):
        SMALL.solve(problem, callback=lambda progress: True, progress=False)
