"""Random problems for the property tests: what a case is made of, and how it is built.  Nothing is checked here.

A :class:`Case` holds plain values only, so that its ``repr`` is all that is needed to build it again.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import gpytorch
import torch
from gpytorch import kernels
from gpytorch.constraints import Positive
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood, MultitaskGaussianLikelihood
from gpytorch.means import ConstantMean, MultitaskMean
from hypothesis import strategies as st
from linear_operator.operators import DenseLinearOperator, LinearOperator
from torch import Tensor

import sketchgp
from gp_models import Combined, Hadamard, Multitask, Plain
from sketchgp.solvers import INDUCING_POINT_SOLVERS

FORMS = ("plain", "plain", "plain", "fixed noise", "batch", "batch targets", "sum in forward", "product in forward",
         "hadamard", "lcm", "missing targets")  # fmt: skip
FULL_SOLVERS = (
    "ConjugateGradients()", "ConjugateGradients()", "ConjugateGradients(tol=1e-6)", "Cholesky()",
    "ASkotch(max_passes=40)", "Skotch(max_passes=40)", "EigenPro2(max_passes=40)",
)  # fmt: skip
_FEWER = {"EigenPro3": "epochs=4", "EigenPro4": "epochs=4", "SketchySAGA": "max_epochs=60"}
INDUCING_SOLVERS = (
    *(f"{solver.__name__}({_FEWER.get(solver.__name__, '')})" for solver in INDUCING_POINT_SOLVERS),
    "KRILL(tol=1e-8)",
    "NystromPCG(rank=5)",
    "NystromPCG(rank=20)",
)
PRECONDITIONERS = (
    "RPCholesky()", "RPCholesky(rank=5)", "RPCholesky(rank=20, method='block')", "RPCholesky(rank=10)",
    "RPCholesky(seed=1)", "Nystrom(rank=10)", "Nystrom(sketch='uniform')", "NystromEigenPro(rank=5)", "None",
    "FullScale()", "FullScale(rank=0, neighbors=5)",
)  # fmt: skip


NO_BATCH = torch.Size()


@dataclass(frozen=True)
class Case:
    """One problem.

    ``noise`` is relative to ``outputscale``, ``lengthscale`` and ``shift`` to the spread of the inputs; ``far`` is
    where one row lies (of the tests if positive, of the training set if negative), 0 for none; ``repeated`` the share
    of rows that repeat others; ``limit`` GPyTorch's ``max_cholesky_size``; ``offset`` what is added to the targets,
    relative to their size; ``uneven`` whether most rows lie near a corner; ``event`` what happens to a model between
    two predictions (:data:`EVENTS`).
    """

    family: str
    form: str
    kernel: str
    n: int
    d: int
    columns: int
    dtype: str
    noise: float
    differing: bool
    outputscale: float
    targets: float
    lengthscale: float
    spread: float
    shift: float
    repeated: float
    far: float
    solver: str
    preconditioner: str
    matmul: str
    limit: int
    seed: int
    offset: float = 0.0
    uneven: bool = False
    event: str = "none"

    @property
    def called(self) -> bool:
        """Whether the kernel is evaluated by GPyTorch or by a user's code, by calling it."""
        parts = {name for term in factors(self.kernel) for name in term}
        return not parts <= RECOGNISED or self.form in ("hadamard", "lcm", "product in forward")


# --- strategies: all of them ----------------------------------------------------------------------------------


def powers(low: float, high: float) -> st.SearchStrategy[float]:
    """Powers of ten, to two digits, so that a case can be read."""
    return st.floats(low, high).map(lambda e: float(f"{10**e:.2g}"))


def _sizes() -> st.SearchStrategy[int]:
    return st.one_of(st.sampled_from([1, 2, 3, 5]), st.integers(6, 60), st.integers(60, 200))


def _kernels(form: str) -> st.SearchStrategy[str]:
    """Names, and sums of products of names."""
    names = st.sampled_from(sorted(set(KERNELS) - NARROW if form == "lcm" else KERNELS))
    if form in ("lcm", "batch", "hadamard", "problem", "model"):
        return names
    product = st.lists(names, min_size=1, max_size=2).map(" * ".join)
    return st.one_of(names, names, st.lists(product, min_size=1, max_size=3).map(" + ".join))


@st.composite
def cases(draw: Any, family: str) -> Case:
    """Cases of one family: ``"model"``, ``"full"`` or ``"inducing"``."""
    model, inducing = family == "model", family == "inducing"
    solver = draw(
        st.sampled_from(INDUCING_SOLVERS if inducing else (*FULL_SOLVERS, *(("'auto'",) * 4 if model else ())))
    )
    plain_scale = st.just(1.0)
    form = draw(st.sampled_from(FORMS if model else ("problem", "model") if inducing else ("problem",)))
    kernel = draw(_kernels(form))
    case = Case(
        family=family,
        form=form,
        kernel=kernel,
        n=draw(_sizes()),
        d=draw(st.integers(1, 6)),
        columns=1 if model else draw(st.integers(1, 3)),
        dtype=draw(st.sampled_from(["float32", "float64"])),
        noise=draw(powers(-4, 0)),
        differing=draw(st.booleans()),
        outputscale=draw(st.one_of(plain_scale, powers(-6, 6))),
        targets=draw(st.one_of(plain_scale, powers(-6, 6))),
        lengthscale=draw(powers(-1, 1)),
        spread=draw(st.one_of(plain_scale, powers(-3, 3))),
        shift=draw(st.sampled_from([0.0, 0.0, 10.0, 1e3, 1e5])),
        repeated=draw(st.sampled_from([0.0, 0.0, 0.5, 1.0])),
        far=draw(st.sampled_from([0.0] * 6 + [30.0, 1e5, -30.0, -1e5])),
        solver=solver,
        preconditioner=draw(st.sampled_from(PRECONDITIONERS)),
        matmul=draw(st.sampled_from(["auto", "dense", "tiled"])),
        limit=draw(st.sampled_from([0, 0, 20])),
        seed=draw(st.integers(0, 999)),
        offset=draw(st.sampled_from([0.0, 0.0, 0.0, 30.0, -1e3])) if model else 0.0,
        uneven=draw(st.booleans()),
        event=draw(st.sampled_from(("none", "none", *EVENTS))) if model else "none",
    )
    if case.event == "likelihood" and case.form != "plain":
        case = replace(case, event="none")
    if case.called:  # GPyTorch's own distances cancel far from the origin
        shift, far = (0.0, 0.0) if case.dtype == "float32" else (min(case.shift, 10.0), case.far)
        case = replace(case, shift=shift, far=far)
        if inducing:  # and are off by the root of the roundoff between equal points, of which there are many then
            case = replace(case, repeated=0.0)
    if "periodic" in case.kernel:  # the gradient of whose period grows with the number of periods between rows
        case = replace(case, far=0.0, shift=min(case.shift, 10.0))  # GPyTorch is 1e-5 off at a shift of 1e5
    return case


# --- kernels --------------------------------------------------------------------------------------------------


class UserKernel(kernels.Kernel):
    """A kernel that the library does not know."""

    has_lengthscale = True
    is_stationary = True

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Tensor:
        distance = self.covar_dist(x1.div(self.lengthscale), x2.div(self.lengthscale), diag=diag, **params)
        return (-distance).exp() * (1 + 0.2 * torch.cos(distance))


class UserBatchKernel(kernels.Kernel):
    """A kernel of the user's that calls a batched one of its own dimensions."""

    def __init__(self, base: kernels.Kernel) -> None:
        super().__init__()
        self.base = base

    @property
    def batch_shape(self) -> torch.Size:
        return self.base.batch_shape

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Tensor:
        found = self.base(x1, x2, diag=diag, **params)
        return found if diag else found.to_dense()


def _dims(d: int) -> tuple[int, ...]:
    return (0, d - 1) if d > 1 else (0,)


def _positive(kernel: kernels.Kernel, scale: float) -> kernels.Kernel:
    """With this lengthscale, in ascending order over dimensions where it has several."""
    kernel.lengthscale = scale * torch.linspace(1.0, 1.5, kernel.lengthscale.shape[-1]).expand_as(kernel.lengthscale)
    return kernel


def _kernel(make: Any, **options: Any) -> Any:
    return lambda d, scale, batch: _positive(make(batch_shape=batch, **options), scale)


def _rbf_ard(d: int, scale: float, batch: torch.Size) -> Any:
    return _positive(kernels.RBFKernel(ard_num_dims=d, batch_shape=batch), scale)


def _active(make: Any) -> Any:
    return lambda d, scale, batch: _positive(
        make(active_dims=_dims(d), ard_num_dims=len(_dims(d)), batch_shape=batch), scale
    )


def _periodic(d: int, scale: float, batch: torch.Size) -> Any:
    kernel = kernels.PeriodicKernel(batch_shape=batch)
    kernel.period_length = 1.7 * scale
    return kernel


def _mixture(d: int, scale: float, batch: torch.Size) -> Any:
    kernel = kernels.SpectralMixtureKernel(num_mixtures=2, ard_num_dims=d, batch_shape=batch)
    kernel.mixture_weights = torch.tensor([0.7, 0.3]).expand_as(kernel.mixture_weights)
    kernel.mixture_means = torch.tensor([0.05, 0.2]).view(2, 1, 1).expand_as(kernel.mixture_means) / scale
    kernel.mixture_scales = torch.full_like(kernel.mixture_scales, 0.1 / scale)
    return kernel


def _product(d: int, scale: float, batch: torch.Size) -> Any:
    return _active(kernels.RBFKernel)(d, scale, batch) * _kernel(kernels.MaternKernel, nu=2.5)(d, 2 * scale, batch)


def _sum(d: int, scale: float, batch: torch.Size) -> Any:
    first = kernels.ScaleKernel(_active(kernels.RBFKernel)(d, scale, batch), batch_shape=batch)
    return first + _kernel(kernels.RQKernel)(d, 2 * scale, batch)


def _with_constant(d: int, scale: float, batch: torch.Size) -> Any:
    constant = kernels.ConstantKernel(batch_shape=batch)
    return _rbf_ard(d, scale, batch) + constant


def _linear(d: int, scale: float, batch: torch.Size) -> Any:
    kernel = kernels.LinearKernel(batch_shape=batch)
    kernel.variance = torch.full_like(kernel.variance, scale**-2)
    return kernel


def _polynomial(d: int, scale: float, batch: torch.Size) -> Any:
    kernel = kernels.PolynomialKernel(power=2, batch_shape=batch)
    kernel.offset = torch.full_like(kernel.offset, scale**2)
    kernel = kernels.ScaleKernel(kernel, batch_shape=batch, outputscale_constraint=Positive())
    kernel.outputscale = scale**-4
    return kernel


KERNELS: dict[str, Any] = {
    "rbf": _kernel(kernels.RBFKernel),
    "rbf-ard": _rbf_ard,
    "rbf-active": _active(kernels.RBFKernel),
    "matern12": _kernel(kernels.MaternKernel, nu=0.5),
    "matern32": _kernel(kernels.MaternKernel, nu=1.5),
    "matern52-active": _active(lambda **options: kernels.MaternKernel(nu=2.5, **options)),
    "rational-quadratic": _kernel(kernels.RQKernel),
    "laplace": _kernel(sketchgp.LaplaceKernel),
    "periodic": _periodic,
    "constant": _with_constant,
    "sum": _sum,
    "product": _product,
    "twice-scaled": lambda d, scale, batch: kernels.ScaleKernel(_rbf_ard(d, scale, batch), batch_shape=batch),
    "user": lambda d, scale, batch: _positive(UserKernel(batch_shape=batch), scale),
    "user-active": lambda d, scale, batch: UserBatchKernel(_active(kernels.RBFKernel)(d, scale, batch)),
    "piecewise": _kernel(kernels.PiecewisePolynomialKernel, q=2),
    "spectral-mixture": _mixture,
    "linear": _linear,
    "polynomial": _polynomial,
}


def factors(text: str) -> list[list[str]]:
    """Names of kernels in a sum of products."""
    return [term.split(" * ") for term in text.split(" + ")]


def _composed(text: str, d: int, scale: float, batch: torch.Size) -> Any:
    total = None
    for term in factors(text):
        product = None
        for name in term:
            factor = KERNELS[name](d, scale, batch)
            product = factor if product is None else product * factor
        total = product if total is None else total + product
    return total


# GPyTorch's multitask kernels pass all dimensions on to a kernel of some
NARROW = {"rbf-active", "matern52-active", "sum", "product", "user-active"}
CALLED = {"user", "user-active", "piecewise", "spectral-mixture", "linear", "polynomial"}
RECOGNISED = set(KERNELS) - CALLED  # have fast tiles


# --- data and models ------------------------------------------------------------------------------------------


@dataclass
class Data:
    """x ``(n, d)``, y ``(n, columns)``, test inputs, noise ``(n,)``, all in the case's dtype."""

    x: Tensor
    y: Tensor
    test: Tensor
    noise: Tensor


def kernel_of(case: Case, batch: torch.Size = NO_BATCH) -> Any:
    """The kernel with its output scale, in the case's dtype."""
    base = _composed(case.kernel, case.d, case.lengthscale * case.spread, batch)
    kernel = kernels.ScaleKernel(base, batch_shape=batch, outputscale_constraint=Positive())
    kernel = kernel.to(dtype_of(case))
    kernel.outputscale = case.outputscale * torch.linspace(1, 2, max(1, batch.numel())).reshape(batch)
    return kernel


def dtype_of(case: Case) -> torch.dtype:
    return getattr(torch, case.dtype)


def data_of(case: Case) -> Data:
    """Smooth targets with noise; the last tests are a training point and one far away."""
    generator = torch.Generator().manual_seed(case.seed)
    dtype = dtype_of(case)
    unit = torch.rand(case.n, case.d, dtype=torch.float64, generator=generator)
    unit = unit**4 if case.uneven else unit
    copies = int(case.repeated * (case.n - 1))
    if copies:
        unit[1 : 1 + copies] = unit[0] if case.repeated == 1 else unit[-copies:].clone()
    test = torch.cat([torch.rand(4, case.d, dtype=torch.float64, generator=generator), unit[:1], unit[:1] + 20])
    if case.far < 0 and case.n > 1:
        unit[-1] = unit[-1] - case.far
    elif case.far > 0:
        test = torch.cat([test, test[:1] + case.far])
    directions = torch.randn(case.d, case.columns, dtype=torch.float64, generator=generator)
    relative = torch.ones(case.n, dtype=torch.float64)
    if case.differing:
        relative = torch.where(torch.rand(case.n, dtype=torch.float64, generator=generator) < 0.3, 1.0, 30.0)
    noise = case.noise * case.outputscale * relative
    f = torch.sin(4 * unit.clamp(-1, 2) @ directions)
    y = f + (case.noise * relative).sqrt().unsqueeze(1) * torch.randn(f.shape, dtype=torch.float64, generator=generator)
    x, test = (case.spread * (part + case.shift) for part in (unit, test))
    return Data(x.to(dtype), (case.targets * (y + case.offset)).to(dtype), test.to(dtype), noise.to(dtype))


def model_of(case: Case) -> tuple[Any, tuple[Tensor, ...]]:
    """An ordinary GPyTorch model of the case, in eval mode, and its test inputs."""
    torch.manual_seed(case.seed)  # IndexKernel draws its own
    data, dtype = data_of(case), dtype_of(case)
    x, y, test = data.x, data.y[:, 0], data.test
    noise = float(data.noise.min())
    batch = torch.Size([2]) if case.form == "batch" else torch.Size()
    constraint = Positive()
    likelihood: Any = GaussianLikelihood(noise_constraint=constraint, batch_shape=batch)
    tests: tuple[Tensor, ...] = (test,)
    if case.form == "fixed noise":
        likelihood = FixedNoiseGaussianLikelihood(noise=data.noise.clamp_min(1e-12))
    if case.form in ("batch", "batch targets"):
        x, y, tests = x.expand(2, *x.shape), torch.stack([y, -2 * y.flip(0)]), (test.expand(2, *test.shape),)
    kernel = kernel_of(case, batch)
    mean = ConstantMean(batch_shape=batch)
    if case.form in ("sum in forward", "product in forward"):
        other = _second(case)
        if case.form.startswith("product"):
            other.outputscale = 1.0
        model: Any = Combined(x, y, likelihood, kernel, other, case.form.startswith("product"))
    elif case.form == "hadamard":
        tasks = (torch.arange(case.n) % 2).unsqueeze(-1)
        tests = (test, (torch.arange(len(test)) % 2).unsqueeze(-1))
        model = Hadamard((x, tasks), y, likelihood)
        model.covar_module = kernel
    elif case.form == "lcm":
        likelihood = MultitaskGaussianLikelihood(num_tasks=2, noise_constraint=constraint, has_task_noise=False)
        lcm = kernels.LCMKernel([kernel, _second(case)], num_tasks=2, rank=1)
        model = Multitask(x, torch.stack([y, y.flip(0)], dim=-1), likelihood, lcm)
    else:
        model = Plain(x, y, likelihood, kernel, mean)
    if case.form == "missing targets":
        y = y.clone()
        y[1::3] = float("nan")
        model.set_train_data(x, y, strict=False)
    model = model.to(dtype)
    constants = model.mean_module.base_means if isinstance(model.mean_module, MultitaskMean) else [model.mean_module]
    for part in constants:
        part.constant.data.fill_(0.3 * case.targets)
    if case.form != "fixed noise":
        likelihood.noise = torch.full_like(likelihood.noise, noise)
    return model.eval(), tests


# --- what happens to a model ----------------------------------------------------------------------------------

EVENTS = ("parameters", "targets", "deepcopy", "pickle", "state dict", "modes", "restored", "likelihood")


def happened(case: Case, model: Any, again: Any) -> Any:
    """The model after the event of the case.

    :param again: called with a model that is a plain one again, to accelerate it; None for a model that never was.
    """
    event = case.event
    if event == "deepcopy":
        return copy.deepcopy(model)
    if event == "pickle":
        return pickle.loads(pickle.dumps(model))
    if event == "modes":
        model.train()
        return model.eval()
    if event == "restored" and again is not None:
        sketchgp.restore(model)
    if event in ("parameters", "restored"):
        for parameter in model.parameters():
            parameter.data.add_(0.1)
    if event == "restored" and again is not None:
        again(model)
    if event == "state dict":
        model.load_state_dict({k: v + 0.1 if v.is_floating_point() else v for k, v in model.state_dict().items()
                               if "constraint" not in k and "active_dims" not in k}, strict=False)  # fmt: skip
    if event == "targets":
        model.set_train_data(targets=-1.5 * model.train_targets, strict=False)
    if event == "likelihood":
        noise = 3 * model.likelihood.noise.detach()
        model.likelihood = GaussianLikelihood(noise_constraint=Positive()).to(noise.dtype)
        model.likelihood.noise = noise
        model.eval()
    return model


def _second(case: Case) -> Any:
    """Another kernel, of the same scales."""
    kernel = kernels.ScaleKernel(kernels.MaternKernel(nu=2.5), outputscale_constraint=Positive())
    kernel.outputscale, kernel.base_kernel.lengthscale = case.outputscale, 2 * case.lengthscale * case.spread
    return kernel


def inducing_of(case: Case) -> int:
    """How many inducing points."""
    return max(1, case.n // 3)


def solver_of(case: Case) -> Any:
    """The choice, its rank cut to the number of inducing points."""
    choice = eval(case.solver, {}, vars(sketchgp))
    if case.family == "inducing" and (getattr(choice, "rank", None) or 0) > inducing_of(case):
        choice = dataclasses.replace(choice, rank=inducing_of(case))
    return choice


def preconditioner_of(case: Case) -> Any:
    """The choice, its rank cut to the number of points."""
    choice = eval(case.preconditioner, {}, vars(sketchgp))
    points = case.n * (2 if case.form == "lcm" else 1)
    if choice is not None and choice.rank is not None and choice.rank > points:
        choice = type(choice)(**{**vars(choice), "rank": points})
    return choice


# --- dense references -----------------------------------------------------------------------------------------


def _sq_dist(x1: Tensor, x2: Tensor, x1_eq_x2: bool = False) -> Tensor:
    return (x1.unsqueeze(-2) - x2.unsqueeze(-3)).square().sum(dim=-1)


def _dist(x1: Tensor, x2: Tensor, x1_eq_x2: bool = False) -> Tensor:
    return _sq_dist(x1, x2).clamp_min(1e-30).sqrt()


def _mul_matrix(first: Any, second: Any) -> Any:
    return DenseLinearOperator(first.to_dense() * second.to_dense())


@contextlib.contextmanager
def exact_distances() -> Iterator[None]:
    """GPyTorch's kernels by differences, as its own expansion of the square cancels far from the origin; and products
    of matrices without a factorization, which adds to their diagonals."""
    with (
        mock.patch.object(LinearOperator, "_mul_matrix", _mul_matrix),
        mock.patch("gpytorch.kernels.kernel.sq_dist", _sq_dist),
        mock.patch("gpytorch.kernels.kernel.dist", _dist),
        gpytorch.settings.max_cholesky_size(10**6),
        gpytorch.settings.fast_computations(False, False, False),
        gpytorch.settings.lazily_evaluate_kernels(False),
    ):
        yield


def dense_kernel(kernel: Any, a: Tensor, b: Tensor) -> Tensor:
    """``k(a, b)`` in float64."""
    with exact_distances(), torch.no_grad():
        return copy.deepcopy(kernel).double()(a.double(), b.double()).to_dense()


def as_double(model: Any, transformed: bool) -> Any:
    """A copy in float64.

    :param transformed: whether constrained parameters have the values that they have in the model's own dtype; else
        their raw values are the same.  In float32 the two differ by rounding.
    """
    double = copy.deepcopy(model).double()
    double.train_inputs = tuple(x.double() if x.is_floating_point() else x for x in model.train_inputs)
    double.train_targets = model.train_targets.double()
    for single, twin in zip(model.modules(), double.modules(), strict=True):
        for name, constraint in getattr(single, "_constraints", {}).items() if transformed else ():
            raw = name.removesuffix("_constraint")
            value = constraint.transform(getattr(single, raw).detach()).double()
            getattr(twin, raw).data.copy_(constraint.inverse_transform(value))
    return double


@dataclass
class Dense:
    """The system of one output (or of one element of a batch) in float64: ``a = k + diag(noise)``, ``b`` the targets
    without the mean, ``cross`` ``(n, m)``, ``prior`` ``(m,)`` the test points' variances, ``mean`` ``(m,)``."""

    a: Tensor
    k: Tensor
    noise: Tensor
    b: Tensor
    cross: Tensor
    prior: Tensor
    mean: Tensor

    def __post_init__(self) -> None:
        root = torch.linalg.cholesky(self.a)
        self.root = root
        self.w = torch.cholesky_solve(self.b.unsqueeze(-1), root).squeeze(-1)
        self.inverse_cross = torch.cholesky_solve(self.cross, root)

    @property
    def posterior_mean(self) -> Tensor:
        return self.mean + self.cross.mT @ self.w

    @property
    def variance(self) -> Tensor:
        return (self.prior - (self.cross * self.inverse_cross).sum(0)).clamp_min(0)

    def logdet(self) -> float:
        return 2 * float(self.root.diagonal().log().sum().detach())


def dense_of(model: Any, tests: tuple[Tensor, ...]) -> list[Dense]:
    """The systems of a float64 model, outputs of one system kept together; NaN targets are left out."""
    with exact_distances(), torch.no_grad():
        train = model.train_inputs
        both = [torch.cat([a, b.to(a)], dim=-2) for a, b in zip(train, tests, strict=True)]
        joint = model.forward(*both)
        covariance, mean = joint.covariance_matrix, joint.mean
        alone = model.forward(*train)
        noisy = model.likelihood.train()(alone, *train).covariance_matrix - alone.covariance_matrix
        model.likelihood.eval()
        noise = noisy.diagonal(dim1=-1, dim2=-2)
    targets = model.train_targets
    if covariance.dim() == 2:
        n = targets.numel()
        mean, targets = mean.reshape(1, -1), targets.reshape(1, -1)
        covariance, noise = covariance.unsqueeze(0), noise.reshape(1, -1)
    else:
        n = targets.shape[-1]
    found = []
    for c, mu, y, s in zip(
        covariance, mean.expand(len(targets), -1), targets, noise.expand(len(targets), -1), strict=True
    ):
        keep = ~y.isnan()
        k = c[:n, :n][keep][:, keep]
        found.append(
            Dense(k + s[keep].diag(), k, s[keep], (y - mu[:n])[keep], c[:n, n:][keep], c.diagonal()[n:], mu[n:])
        )
    return found


def gradient_of(model: Any, count: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradient of the marginal log likelihood over ``count``, by parameter: of the fit, and of the determinant."""
    with exact_distances(), torch.enable_grad():
        prior = model.forward(*model.train_inputs)
        noisy = model.likelihood.train()(prior, *model.train_inputs).covariance_matrix
        model.likelihood.eval()
        targets = model.train_targets
        events = noisy.shape[-1]
        noisy, means = noisy.reshape(-1, events, events), prior.mean.reshape(-1, events)
        fit = determinant = torch.zeros((), dtype=torch.float64)
        for number, y in enumerate(targets.reshape(-1, events)):
            keep = ~y.isnan()
            a = noisy[number % len(noisy)][keep][:, keep]
            b = (y - means[number % len(means)])[keep]
            fit = fit - 0.5 * b @ torch.linalg.solve(a, b) / count
            determinant = determinant - 0.5 * torch.logdet(a) / count
        names, parameters = zip(*model.named_parameters(), strict=True)
        parts = []
        for value in (fit, determinant):
            found = torch.autograd.grad(value, parameters, allow_unused=True, retain_graph=True)
            parts.append(
                {n: torch.zeros_like(p) if g is None else g for n, p, g in zip(names, parameters, found, strict=True)}
            )
    return parts[0], parts[1]


def inducing_reference(
    kzz: Tensor, kxz: Tensor, ktz: Tensor, prior: Tensor, y: Tensor, noise: Tensor, cut: float = 1e-14
) -> tuple[Tensor, Tensor]:
    """Mean ``(m, columns)`` and variance ``(m,)`` of DTC in float64, in the eigenbasis of kzz down to ``cut`` times its
    largest eigenvalue."""
    values, vectors = torch.linalg.eigh(kzz)
    kept = values > cut * values[-1]
    half = vectors[:, kept] / values[kept].sqrt()
    phi, test_phi = (kxz @ half) / noise.sqrt().unsqueeze(1), ktz @ half
    root = torch.linalg.qr(torch.cat([phi, torch.eye(phi.shape[1], dtype=torch.float64)]), mode="r").R.mT
    beta = torch.cholesky_solve(phi.mT @ (y / noise.sqrt().unsqueeze(1)), root)
    explained = torch.linalg.solve_triangular(root, test_phi.mT, upper=False).square().sum(0)
    return test_phi @ beta, (prior - test_phi.square().sum(1)).clamp_min(0) + explained


# --- inducing points and approximate variances ----------------------------------------------------------------------


@dataclass(frozen=True)
class BoundCase:
    """An inducing-point model whose collapsed bound is compared with a dense one; ``size`` is that of the inputs."""

    kernel: str
    n: int
    m: int
    d: int
    dtype: str
    size: float
    outputscale: float
    noise: float
    seed: int


POLYNOMIALS = {
    "linear": lambda d: kernels.PolynomialKernel(1),
    "quadratic": lambda d: kernels.PolynomialKernel(2),
    "cubic": lambda d: kernels.PolynomialKernel(3),
    "quadratic and RBF": lambda d: kernels.PolynomialKernel(2) + kernels.RBFKernel(),
    "quadratic by RBF": lambda d: kernels.PolynomialKernel(2) * kernels.RBFKernel(ard_num_dims=d),
    "Matern": lambda d: kernels.MaternKernel(nu=1.5),
}


@st.composite
def bound_cases(draw: Any) -> BoundCase:
    n = draw(st.integers(2, 60))
    return BoundCase(
        kernel=draw(st.sampled_from(sorted(POLYNOMIALS))),
        n=n,
        m=draw(st.integers(1, max(1, n // 2))),
        d=draw(st.integers(1, 4)),
        dtype=draw(st.sampled_from(["float32", "float64"])),
        size=draw(powers(-2, 3)),
        outputscale=draw(powers(-3, 3)),
        noise=draw(powers(-3, 0)),
        seed=draw(st.integers(0, 999)),
    )


def bound_model_of(case: BoundCase) -> Any:
    """The model of the case, in training mode."""
    generator, dtype = torch.Generator().manual_seed(case.seed), getattr(torch, case.dtype)
    unit = torch.randn(case.n, case.d, dtype=torch.float64, generator=generator)
    noise = torch.randn(case.n, dtype=torch.float64, generator=generator)
    y = unit.sum(dim=1).sin() + case.noise**0.5 * noise
    x = (case.size * unit).to(dtype)
    kernel = kernels.ScaleKernel(POLYNOMIALS[case.kernel](case.d)).to(dtype)
    likelihood = GaussianLikelihood().to(dtype)
    kernel.outputscale, likelihood.noise = case.outputscale, case.noise
    mean = gpytorch.means.ZeroMean().to(dtype)
    return sketchgp.InducingPointGP(x, y.to(dtype), likelihood, mean, kernel, x[: case.m].clone()).train()


@dataclass(frozen=True)
class UnevenCase:
    """A model with fixed noise whose rows are dense in one place and sparse in others; ``uneven`` is by how many powers
    of ten distances differ, ``noises`` by how many the noise does from row to row."""

    kernel: str
    n: int
    d: int
    lengthscale: float
    noise: float
    uneven: float
    noises: float
    method: str
    seed: int


@st.composite
def uneven_cases(draw: Any) -> UnevenCase:
    return UnevenCase(
        kernel=draw(st.sampled_from(["rbf", "matern12", "matern32"])),
        n=draw(st.integers(140, 400)),
        d=draw(st.integers(1, 4)),
        lengthscale=draw(powers(-1, 0)),
        noise=draw(powers(-3.5, -0.5)),
        uneven=draw(st.sampled_from([0.0, 1.0, 2.0, 3.0])),
        noises=draw(st.sampled_from([0.0, 1.0, 3.0])),
        method=draw(st.sampled_from(["low_rank", "samples"])),
        seed=draw(st.integers(0, 999)),
    )


def uneven_of(case: UnevenCase) -> tuple[Any, Tensor]:
    """The model in eval mode, and its test inputs."""
    generator = torch.Generator().manual_seed(case.seed)
    total = case.n + 100
    x = torch.randn(total, case.d, dtype=torch.float64, generator=generator)
    x = 0.5 * x * 10 ** (-case.uneven * torch.rand(total, 1, dtype=torch.float64, generator=generator))
    x = x + torch.randint(0, 3, (total, 1), generator=generator)
    spread = torch.rand(case.n, dtype=torch.float64, generator=generator) - 0.5
    noise = (case.noise * 10 ** (case.noises * spread)).clamp_min(1e-4)
    kernel = kernels.ScaleKernel(KERNELS[case.kernel](case.d, case.lengthscale * case.d**0.5, NO_BATCH)).double()
    kernel.outputscale = 1.0
    likelihood = FixedNoiseGaussianLikelihood(noise=noise)
    y = torch.randn(case.n, dtype=torch.float64, generator=generator)
    return Plain(x[: case.n], y, likelihood, kernel, gpytorch.means.ZeroMean()).double().eval(), x[case.n :]
