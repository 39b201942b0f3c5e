"""Two threads at once: no setting of the process is touched, and each gets what it would get alone."""

from __future__ import annotations

import contextlib
import copy
import inspect
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import gpytorch
import linear_operator
import pytest
import torch
from gpytorch import kernels
from torch import Tensor

import sketchgp
from cases import pairwise
from gp_models import Plain, data, iterative, scaled

PLACES = ("_state", "_global_value", "_global_float_value", "_global_double_value", "_global_half_value")


def settings() -> dict[str, Any]:
    """Every setting of GPyTorch and linear_operator, torch's precisions and the warning filters, as they are now."""
    found: dict[str, Any] = {}
    for module in (gpytorch.settings, linear_operator.settings, gpytorch.beta_features, linear_operator.beta_features):
        for name, setting in inspect.getmembers(module, inspect.isclass):
            for place in PLACES:
                if hasattr(setting, place):
                    found[f"{module.__name__}.{name}.{place}"] = getattr(setting, place)
    found["filters"] = [str(entry) for entry in warnings.filters]
    found["precision"] = torch.get_float32_matmul_precision()
    return found


class Watch:
    """Called from inside of the library: settings are the user's there, and threads meet where they hold no lock."""

    def __init__(self) -> None:
        self.expected: dict[str, Any] = {}
        self.seen: list[str] = []
        self.barrier: threading.Barrier | None = None

    def look(self) -> None:
        now = settings()
        self.seen += [name for name in now if now[name] != self.expected[name]]

    def meet(self) -> None:
        if self.barrier is not None:
            with contextlib.suppress(threading.BrokenBarrierError):  # the other thread is done
                self.barrier.wait(timeout=20)


WATCH = Watch()


class WatchedMean(gpytorch.means.ConstantMean):
    def forward(self, x: Tensor) -> Tensor:
        WATCH.look()
        return super().forward(x)


class WatchedKernel(kernels.RBFKernel):
    """Not one of the known kernels: it is called, also inside of sums and products."""

    def forward(self, x1: Tensor, x2: Tensor, **options: Any) -> Tensor:
        WATCH.look()
        return super().forward(x1, x2, **options)


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """What is imported at the first call sets up warning filters of its own."""
    WATCH.expected = settings()
    predicted(*build("sum"))


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Watches solves as well."""
    plain = sketchgp.ConjugateGradients.run

    def run(self: Any, *args: Any, **options: Any) -> Any:
        WATCH.look()
        WATCH.meet()
        return plain(self, *args, **options)

    monkeypatch.setattr(sketchgp.ConjugateGradients, "run", run)
    yield
    WATCH.barrier = None


def kernel(name: str) -> Any:
    watched_kernel = WatchedKernel(active_dims=(0, 1))
    watched_kernel.lengthscale = 0.4
    return {
        "known": lambda: scaled(kernels.RBFKernel()),
        "called": lambda: scaled(watched_kernel),
        "sum": lambda: watched_kernel + kernels.MaternKernel(nu=2.5),
        "product": lambda: kernels.ScaleKernel(watched_kernel * kernels.MaternKernel(nu=2.5)),
    }[name]()


def build(name: str) -> tuple[Any, Tensor]:
    x, y, z = data(n=60, m=6)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    likelihood.noise = 0.05
    model = Plain(x, y, likelihood, kernel(name), WatchedMean())
    return sketchgp.accelerate(model.double()), z


def predicted(model: Any, z: Tensor) -> list[Tensor]:
    found = sketchgp.predict(model, z)
    assert found.variance is not None
    return [found.mean, found.variance]


def called(model: Any, z: Tensor) -> list[Tensor]:
    posterior = model.eval()(z)
    return [posterior.mean.detach(), posterior.variance.detach()]


def fitted(model: Any, z: Tensor) -> list[Tensor]:
    return [torch.tensor(sketchgp.fit(model, objective="probes", iterations=2, num_probes=3).losses)]


CALLS: dict[str, Callable[[Any, Tensor], list[Tensor]]] = {"predict": predicted, "model": called, "fit": fitted}


def together(*works: Callable[[], Any], in_step: bool = True) -> list[Any]:
    """What each gives in a thread of its own; inside of the library they go ``in_step``."""
    results: list[Any] = [None] * len(works)
    WATCH.barrier = barrier = threading.Barrier(len(works)) if in_step else None

    def work(number: int) -> None:
        try:
            results[number] = works[number]()
        except BaseException as error:
            results[number] = error
        finally:
            if barrier is not None:
                barrier.abort()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    WATCH.barrier = None
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@pytest.mark.parametrize(
    ("call", "name", "large"),
    [*pairwise(["predict", "model"], ["known", "called", "sum", "product"], [True, False]),
     ("fit", "called", True), ("fit", "product", False)],
)  # fmt: skip
def test_no_setting_is_touched(call: str, name: str, large: bool) -> None:
    with iterative(tol=1e-6) if large else gpytorch.settings.max_cholesky_size(800):
        WATCH.expected, WATCH.seen = settings(), []
        alone = CALLS[call](*build(name))
        assert not WATCH.seen
        pair = together(*(lambda: CALLS[call](*build(name)) for _ in range(2)))
        assert settings() == WATCH.expected
        assert not WATCH.seen
    for found in pair:
        for mine, expected in zip(found, alone, strict=True):
            assert torch.allclose(mine, expected, rtol=1e-6, atol=1e-8)


def test_one_model_in_two_threads() -> None:
    """The solution is found once, and both reports are of it."""
    with iterative(tol=1e-6):
        WATCH.expected, WATCH.seen = settings(), []
        expected = predicted(*build("called"))
        model, z = build("called")
        pair = together(*(lambda: sketchgp.predict(model, z, variance=None) for _ in range(2)), in_step=False)
        model, z = build("called")
        model.eval()
        with sketchgp.record_solves() as solves:
            means = together(*(lambda: model(z).mean.detach() for _ in range(2)), in_step=False)
    assert pair[0].report is pair[1].report is not None
    assert len(solves) == 1
    for found in (*(prediction.mean for prediction in pair), *means):
        assert torch.allclose(found, expected[0], rtol=1e-6, atol=1e-8)


def test_a_thread_that_comes_while_a_kernel_computes_waits_for_its_solution(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel has other parameters than its own meanwhile: no change of the model."""
    model, z = build("called")
    model.eval()
    means: list[Tensor] = []
    other = threading.Thread(target=lambda: means.append(model(z).mean.detach()))
    plain = WatchedKernel.forward

    def forward(self: Any, *args: Any, **options: Any) -> Tensor:
        if not other.ident and model.prediction_strategy is not None:
            other.start()
            time.sleep(0.1)
        return plain(self, *args, **options)

    monkeypatch.setattr(WatchedKernel, "forward", forward)
    with iterative(tol=1e-6):
        WATCH.expected = settings()
        with sketchgp.record_solves() as solves:
            means.append(model(z).mean.detach())
            other.join()
    assert len(solves) == 1
    assert torch.equal(*means)


def test_a_model_on_inducing_points_in_two_threads() -> None:
    x, y, z = data(n=300, m=6)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = sketchgp.InducingPointGP(x, y, likelihood, gpytorch.means.ConstantMean(), kernels.RBFKernel(), x[:20])
    model = copy.deepcopy(model.double())
    pair = together(*(lambda: sketchgp.predict(model, z) for _ in range(2)), in_step=False)
    assert pair[0].report is pair[1].report is not None
    assert torch.equal(pair[0].variance, pair[1].variance)


class SlowMean(gpytorch.means.ConstantMean):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.002)
        return super().forward(x)


def test_predictions_in_two_threads_leave_the_mean_its_parameters() -> None:
    x, y, z = data(n=60, m=6)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = sketchgp.InducingPointGP(x, y, likelihood, SlowMean(), kernels.RBFKernel(), x[:9]).double().eval()
    before = dict(model.named_parameters())
    together(*(lambda: [model(z).mean for _ in range(20)] for _ in range(2)), in_step=False)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


class Slow(kernels.RBFKernel):
    """A kernel of the user's, which computes long enough for another thread to have its turn."""

    def forward(self, *args: Any, **options: Any) -> Any:
        time.sleep(0.002)
        return super().forward(*args, **options)


def test_a_kernel_that_computes_in_float64_while_another_thread_looks() -> None:
    """What a float32 kernel computes with meanwhile is no change of the model."""
    x, y, z = (part.float() for part in data(n=300, m=6))
    likelihood, mean = gpytorch.likelihoods.GaussianLikelihood(), gpytorch.means.ConstantMean()
    model = sketchgp.InducingPointGP(x, y, likelihood.float(), mean.float(), Slow().float(), x[:20]).eval()
    report = model.solution.report
    pair = together(*(lambda: [sketchgp.predict(model, z) for _ in range(3)] for _ in range(2)), in_step=False)
    assert all(prediction.report is report for found in pair for prediction in found)


def test_reports_are_of_the_own_solve() -> None:
    with iterative(tol=1e-6):
        WATCH.expected, WATCH.seen = settings(), []
        models = [build("known") for _ in range(2)]
        models[1][0].set_train_data(*(t[:41] for t in (models[1][0].train_inputs[0], models[1][0].train_targets)),
                                    strict=False)  # fmt: skip
        pair = together(*(lambda pair=pair: sketchgp.predict(*pair, variance=None) for pair in models))
    assert [found.report.n for found in pair] == [60, 41]


def test_budgets_belong_to_threads() -> None:
    entered, left = threading.Event(), threading.Event()

    def other() -> None:
        with sketchgp.settings.memory_budget(1000):
            entered.set()
            left.wait(20)

    thread = threading.Thread(target=other)
    thread.start()
    entered.wait(20)
    with sketchgp.settings.memory_budget(7):
        left.set()
        thread.join()
        assert sketchgp.settings.memory_budget.value() == 7
    assert sketchgp.settings.memory_budget.value() > 1000


def test_a_budget_is_known_to_backward_passes_of_other_threads() -> None:
    """As CUDA's are: what a solve's derivative stores is bounded as the solve was."""
    model, z = build("known")
    budgets = []
    plain = sketchgp.ConjugateGradients.run

    def run(self: Any, *args: Any, **options: Any) -> Any:
        budgets.append(sketchgp.settings.memory_budget.value())
        return plain(self, *args, **options)

    with iterative(tol=1e-6), gpytorch.settings.detach_test_caches(False), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sketchgp.ConjugateGradients, "run", run)
        WATCH.expected = settings()
        with sketchgp.settings.memory_budget(12_345):
            mean = model.eval()(z).mean.sum()
        count = len(budgets)
        thread = threading.Thread(target=mean.backward)
        thread.start()
        thread.join()
    assert len(budgets) > count
    assert set(budgets) == {12_345}


def test_small_losses_of_a_fit_take_one_thread(monkeypatch):
    """Threads of small operations wait for each other; larger losses take what the user has set."""
    monkeypatch.setattr("sketchgp.fitting.objective._SMALL", 50)
    counts = {}

    class Counted(gpytorch.means.ZeroMean):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                counts[len(x)] = torch.get_num_threads()
            return super().forward(x)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for n in (50, 51):
            x, y, _ = data(n=n)
            likelihood = gpytorch.likelihoods.GaussianLikelihood()
            model = Plain(x, y, likelihood, scaled(kernels.RBFKernel()), Counted()).double()
            sketchgp.accelerate(model)
            sketchgp.fit(model, start="model", iterations=1, progress=False)
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert (counts[50], counts[51]) == (1, 2)
