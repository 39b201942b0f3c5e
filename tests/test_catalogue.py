"""Every warning, and every error that no single argument is to blame for, has its row in docs/troubleshooting.md.

The rows are found by the names that the messages end with.  An InputError has none: it says at the place itself what
was expected, what was found and what to do, and there are too many for a page that anybody would read.
"""

from __future__ import annotations

import ast
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpytorch
import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, RQKernel, ScaleKernel

import sketchgp
from gp_models import TORCH_WARNINGS, Plain, data, iterative, nearly_constant
from problems import normal, points
from sketchgp.distributed.exchange import Exchange
from sketchgp.operators import products
from sketchgp.operators.engines import TILED, Engine, self_check
from sketchgp.report import _TROUBLES, _WITHOUT_TOLERANCE, Reason
from sketchgp.sklearn import GaussianProcessRegressor
from test_batch_element import Mixing
from test_floors import SOURCE
from test_products import _model as product_of_covariances

pytestmark = TORCH_WARNINGS
PAGE = Path(__file__).resolve().parents[1] / "docs" / "troubleshooting.md"
ROWS = {  # name -> what its message says, one of these
    name: re.findall(r'"([^"]+)"', symptom)
    for name, symptom in re.findall(r'^\| <a id="([\w-]+)"></a>(.*?) \|', PAGE.read_text("utf-8"), re.MULTILINE)
}
WITH_A_ROW = ("warn", "NumericalError", "RankError")
WITHOUT = {  # what may be raised without a row, and why
    "InputError": "says itself what to do",
    "refusal": "makes an InputError",
    "refuse": "makes an InputError",
    "unknown": "makes an InputError",
    "fail": "makes an InputError",
    "_not_read": "makes an InputError",
    "LostToRoundingError": "is caught: what is lost is computed again, or there is a warning",
    "fault": "makes an InputError",
    "undecoded": "makes an InputError",
    "mark_known": "marks an error of another class",
    "NotImplementedError": "says which method a subclass lacks",
    "_unknown": "makes an InputError",
    "IndexError": "is what Python expects of rows that are not there",
    "AttributeError": "is how scikit-learn asks what an estimator has",
    "ArgumentTypeError": "a usage line of the command line",
    "ImportError": "is the command that installs what is missing",
    "FileExistsError": "is made an InputError",
    "ValueError": "is made an InputError",
}
OTHERS = {  # messages without `see`, by how they begin
    "The input matches the stored training data": "GPyTorch's own warning",
    "You must train on the training inputs!": "GPyTorch's own error",
    "report.advice()": "has a row for each reason",
    "Second derivatives": "has its row in the text",
    "A kernel that is known by its random features": "never leaves the library",
}


def _calls() -> list[tuple[str, ast.Call, bool]]:
    """Place, call, and whether it is raised, of all warnings and errors that are made by name."""
    found, raised = [], set()
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise):
                raised.add(node.exc)  # which is seen after it
            elif isinstance(node, ast.Call):
                found.append((f"{path.relative_to(SOURCE)}:{node.lineno}", node, node in raised))
    return found


def _name(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


def _see(call: ast.Call) -> str | None:
    given = next((word.value for word in call.keywords if word.arg == "see"), None)
    return given.value if isinstance(given, ast.Constant) else None


def test_every_message_has_its_row():
    lacking, used = [], set(_TROUBLES.values())
    for place, call, raised in _calls():
        name = _name(call)
        if not raised and name not in (*WITH_A_ROW, "warn"):
            continue
        text = ast.unparse(call.args[0]) if call.args else ""
        if any(text.strip("f'\"").startswith(begin) for begin in OTHERS):
            continue
        if isinstance(call.func, ast.Attribute) and name == "warn":
            assert place.startswith("errors.py"), f"{place}: use sketchgp.errors.warn, which takes see="
        elif name in WITH_A_ROW:
            used.add(_see(call))
            if _see(call) not in ROWS:
                lacking.append(f"{place}: {name} with see={_see(call)!r}")
        elif raised and name not in WITHOUT:
            lacking.append(f"{place}: {name}")
    assert not lacking, f"give each see=, the name of a row in {PAGE.name}: {lacking}"
    assert used | {"second-derivatives"} == set(ROWS), "a row that no message leads to, or the other way round"
    assert set(_TROUBLES) == set(Reason) - {Reason.REACHED, *_WITHOUT_TOLERANCE}


# --- every row is raised ----------------------------------------------------------------------------------------

MONKEY = pytest.MonkeyPatch


def _kernel(lengthscale: float = 1.0, kind: Any = RBFKernel, **options: Any) -> ScaleKernel:
    kernel = ScaleKernel(kind(**options)).double().requires_grad_(False)
    kernel.base_kernel.lengthscale, kernel.outputscale = lengthscale, 1.0
    return kernel


def _solve(solver: Any, n: int = 60, noise: float = 1e-2, dtype: Any = torch.float64, **options: Any) -> Any:
    kernel = options.pop("kernel", None) or _kernel().to(dtype)
    return solver.solve(sketchgp.FullProblem(kernel, points(n, dtype=dtype), normal(n, dtype=dtype), noise), **options)


def _inducing(m: int, n: int = 60, kernel: Any = None) -> sketchgp.InducingPointProblem:
    x = points(n)
    return sketchgp.InducingPointProblem(kernel or _kernel(0.3), x, normal(n), 1e-2, x[:m].clone())


def _gp(lengthscale: float = 0.3, n: int = 120) -> Any:
    x, y, _ = data(n)
    model = Plain(x, y, gpytorch.likelihoods.GaussianLikelihood(), ScaleKernel(RBFKernel())).double()
    model.covar_module.base_kernel.lengthscale = lengthscale
    return sketchgp.accelerate(model)


def _nan(patch: MONKEY) -> None:
    kernel = _kernel()
    kernel.base_kernel.raw_lengthscale.data.fill_(torch.nan)
    _solve(sketchgp.ConjugateGradients(), kernel=kernel)


def _projection(patch: MONKEY) -> None:
    patch.setattr("sketchgp.solvers.inducing.projection._ITERATIONS", 1)
    patch.setattr("sketchgp.solvers.inducing.projection._RANK", 1)
    problem = _inducing(80, 200, _kernel(0.3, MaternKernel, nu=0.5))
    sketchgp.EigenPro4(projection="inexact").solve(problem)


def _first_loss(patch: MONKEY) -> None:
    model = _gp()
    model.covar_module.raw_outputscale.data.fill_(torch.nan)
    sketchgp.fit(model, start="model")


def _log_determinant(patch: MONKEY) -> None:
    model = nearly_constant(torch.float32, matmul="gpytorch")
    with gpytorch.settings.max_cholesky_size(20):
        sketchgp.ExactMarginalLogLikelihood(model.likelihood, model)(model(*model.train_inputs), model.train_targets)


def _batch_differs(patch: MONKEY) -> None:
    kernel = Mixing(batch_shape=torch.Size([2])).double()
    x = points(40).expand(2, 40, 3) + torch.tensor([0.0, 3.0], dtype=torch.float64).reshape(2, 1, 1)
    sketchgp.operators.KernelMatrix.of(kernel, x, engine="tiled").element((1,))


def _second_derivatives(patch: MONKEY) -> None:
    model = _gp().eval().requires_grad_(False)
    x = data(120)[2].clone().requires_grad_()
    with iterative():
        (gradient,) = torch.autograd.grad(model(x).mean.sum(), x, create_graph=True)
        torch.autograd.grad(gradient.square().sum(), x)


def _variances_off(patch: MONKEY) -> None:
    patch.setattr("sketchgp.inference.calibrated.Calibrated.__call__", lambda self, x: 3 * self.low_rank(x))
    with iterative():
        sketchgp.predict(_gp(n=400), data(120)[2], variance="low_rank")


def _product(patch: MONKEY) -> None:
    model, test = product_of_covariances(0.02)
    budget = sketchgp.settings.memory_budget(2**18)
    with gpytorch.settings.max_cholesky_size(100), torch.no_grad(), budget:
        sketchgp.accelerate(model)(*test)


def _interrupted(patch: MONKEY) -> None:
    def stop(step: int, loss: float) -> None:
        raise KeyboardInterrupt

    sketchgp.fit(_gp(), start="model", callback=stop)


def _fit_memory(patch: MONKEY) -> None:
    def fail(step: int, loss: float) -> None:
        raise MemoryError("Unable to allocate 1.80 TiB")

    sketchgp.fit(_gp(), start="model", callback=fail)


def _checkpoint(patch: MONKEY) -> None:
    writes, replace = [], os.replace

    def replaced(source: Any, target: Any) -> None:
        writes.append(target)
        if len(writes) == 2:
            raise OSError(28, "No space left on device")
        replace(source, target)

    patch.setattr(os, "replace", replaced)
    _solve(sketchgp.ASkotch(block_size=20, checkpoint="solve.pt", every=1e-9))


def _limits(patch: MONKEY) -> None:
    x = points(60, 1)
    y = torch.sin(4 * x[:, 0]) + 0.1 * normal(60, seed=3)
    x[-1], y[-1] = -30, 10
    sketchgp.QR().solve(sketchgp.InducingPointProblem(_kernel(10.0, RQKernel), x, y, 0.01, x[:12].clone()))


def _ranks(patch: MONKEY) -> None:
    exchange = Exchange(None, 0, 1)
    exchange.fail(ValueError("alone"))
    exchange.meet("a product")


def _engine(patch: MONKEY) -> None:
    class Doubled(Engine):
        name = "doubled"

        def resolution(self, matrix: Any) -> float:
            return 2.0**-20

        def product(self, matrix: Any, rhs: Any) -> Any:
            return 2 * TILED.product(matrix, rhs)

    patch.setattr(self_check, "_VERDICTS", {})
    patch.setattr(self_check, "_WARNED", set())
    patch.setattr(products, "choose", lambda matrix, columns=1: TILED if matrix.engine == "tiled" else Doubled())
    _solve(sketchgp.ConjugateGradients(), preconditioner=None)


def _failed_mean(patch: MONKEY) -> Any:
    model = sketchgp.accelerate(_gp(2.0, 300), solver=sketchgp.ConjugateGradients())
    model.covar_module.outputscale, model.likelihood.noise = 1e11, 1.001e-4
    with iterative(), sketchgp.settings.memory_budget(10_000):
        return sketchgp.predict(model.eval(), model.train_inputs[0], variance=None)


def _coverage(patch):
    GaussianProcessRegressor(_kernel(), alpha=1e-4, tuning_rows=20).fit(points(300).numpy(), normal(300).numpy())


RAISED: dict[str, Callable[[MONKEY], Any]] = {
    "nan": _nan,
    "not-definite": lambda patch: _solve(sketchgp.Cholesky(), noise=1e-30, kernel=_kernel(10.0)),
    "diverges": lambda patch: sketchgp.EigenPro4(step_scale=100, epochs=20).solve(_inducing(12)),
    "projection": _projection,
    "first-loss": _first_loss,
    "batch-differs": _batch_differs,
    "second-derivatives": _second_derivatives,
    "out-of-budget": lambda patch: _solve(
        sketchgp.ConjugateGradients(tol=1e-10, max_iterations=1), preconditioner=None
    ),
    "rounded": lambda patch: _solve(sketchgp.ConjugateGradients(tol=1e-5), 300, 1e-7, torch.float32),
    "log-determinant": _log_determinant,
    "stagnated": lambda patch: sketchgp.KRILL(tol=1e-17).solve(_inducing(12)),
    "limits-of-float64": _limits,
    "failed-mean": _failed_mean,
    "stopped": lambda patch: _solve(
        sketchgp.ConjugateGradients(tol=1e-10), preconditioner=None, callback=lambda progress: True
    ),
    "direct": lambda patch: _solve(sketchgp.Cholesky(), noise=1e-10, dtype=torch.float32),
    "variances-off": _variances_off,
    "product-of-covariances": _product,
    "lengthscales": lambda patch: sketchgp.fit(_gp(1e-6), start="model", iterations=1),
    "constant-targets": lambda patch: GaussianProcessRegressor().fit(torch.rand(5, 2).numpy(), [3.0] * 5),
    "coverage": _coverage,
    "interrupted": _interrupted,
    "fit-memory": _fit_memory,
    "checkpoint": _checkpoint,
    "engine": _engine,
    "ranks": _ranks,
}


@pytest.mark.parametrize("row", RAISED)
def test_every_row_is_raised(row, monkeypatch, tmp_path):
    """By what its line in the page says, with the words that are quoted there, and with its name at the end."""
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            RAISED[row](monkeypatch)
        except (sketchgp.SketchGPError, NotImplementedError) as error:
            warnings.warn(str(error))
    messages = [str(one.message) for one in caught]
    found = next((message for message in messages if message.endswith(f"[troubleshooting: {row}]")), None)
    assert found is not None, messages
    assert any(words in found for words in ROWS[row]), (found, ROWS[row])


def test_all_rows_are_raised():
    assert set(RAISED) == set(ROWS)
