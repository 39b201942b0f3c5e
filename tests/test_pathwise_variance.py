"""Variances by samples of inducing-point models, against dense float64 algebra, and the random features they use."""

from __future__ import annotations

import copy
import math
import pickle
import warnings

import gpytorch
import pytest
import torch
from gpytorch.kernels import (
    ConstantKernel,
    CosineKernel,
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    PolynomialKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
    SpectralMixtureKernel,
)
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from gpytorch.means import ConstantMean, ZeroMean

from problems import Largest, normal, points, relative, set_scales
from sketchgp import (
    KRILL,
    QR,
    ConvergenceWarning,
    EigenPro4,
    InducingPointGP,
    InducingPointProblem,
    InputError,
    LaplaceKernel,
    SketchySAGA,
    predict,
    record_solves,
)
from sketchgp.inference.pathwise import OF_PREDICTOR, Deviations
from sketchgp.operators import KernelMatrix
from sketchgp.operators.random_features import PriorPaths

N, M = 40, 8
S = 2000
KERNELS = {
    "rbf": RBFKernel,
    "rbf-ard": lambda: ScaleKernel(RBFKernel(ard_num_dims=3)),
    "matern12": lambda: ScaleKernel(MaternKernel(nu=0.5)),
    "matern32-ard": lambda: MaternKernel(nu=1.5, ard_num_dims=3),
    "matern52-active-dims": lambda: ScaleKernel(MaternKernel(nu=2.5, active_dims=(1,))),
    "laplace": lambda: ScaleKernel(LaplaceKernel()),
    "laplace-ard": lambda: LaplaceKernel(ard_num_dims=2, active_dims=(2, 0)),
    "sum": lambda: ScaleKernel(RBFKernel(active_dims=(0,))) + MaternKernel(nu=1.5, active_dims=(1, 2)),
    "product": lambda: RBFKernel(active_dims=(0, 2)) * ScaleKernel(MaternKernel(nu=0.5, active_dims=(1,))),
    "twice": lambda: ScaleKernel(MaternKernel(nu=2.5)) * LaplaceKernel() + RBFKernel(),
    "rational-quadratic": lambda: ScaleKernel(RQKernel()),
    "periodic": lambda: PeriodicKernel() * RBFKernel(),
    "spectral-mixture": lambda: ScaleKernel(SpectralMixtureKernel(num_mixtures=2, ard_num_dims=3)),
    "mixture": lambda: SpectralMixtureKernel(num_mixtures=3, active_dims=(1,)) * RBFKernel() + ConstantKernel(),
    "cosines": lambda: CosineKernel(active_dims=(0,)) * CosineKernel(active_dims=(2,)) * MaternKernel(nu=1.5),
    "constant": lambda: ConstantKernel() + ScaleKernel(RBFKernel()),
}
TEST = points(11, seed=4)


@pytest.fixture
def few_frequencies(monkeypatch):
    """A variance has no bias however few they are."""
    monkeypatch.setattr("sketchgp.operators.random_features._FREQUENCIES", 32)


def _kernel(name, lengthscale=0.5):
    kernel = set_scales(KERNELS[name](), 1.3, lengthscale).double()
    for part in kernel.modules():
        if isinstance(part, ConstantKernel):
            part.constant = torch.tensor(0.8)
        if isinstance(part, RQKernel):
            part.alpha = 0.7
        if isinstance(part, CosineKernel):
            part.period_length = 1.6
        if isinstance(part, SpectralMixtureKernel):
            k, d = part.mixture_means.shape[-3], part.mixture_means.shape[-1]
            part.mixture_weights = torch.linspace(0.9, 0.5, k)
            part.mixture_means = torch.linspace(0.4, 0.1, k * d).reshape(k, 1, d)
            part.mixture_scales = torch.linspace(0.1, 0.3, k * d).reshape(k, 1, d)
    return kernel


def _model(
    kernel="matern32-ard", dtype=torch.float64, x=None, columns=None, noise=0.1, z=None, solver="auto", **choices
):
    x = points(N) if x is None else x
    y = normal(*((len(x), columns) if columns else (len(x),)), seed=3)
    likelihood = GaussianLikelihood()
    likelihood.noise = noise
    z = points(M, seed=9) if z is None else z
    kernel = _kernel(kernel) if isinstance(kernel, str) else kernel
    choices = {"variance": "samples", "variance_samples": S} | choices
    model = InducingPointGP(x.to(dtype), y.to(dtype), likelihood.to(dtype), ConstantMean().to(dtype), kernel.to(dtype),
                            z.to(dtype), solver=solver, **choices)  # fmt: skip
    return model.eval()


def _dense(model, test):
    """The predictor's error covariance, and that of the exact posterior, in float64."""
    model = copy.deepcopy(model).double()
    kernel, z, x, test = model.covar_module, model.inducing_points, model.train_inputs[0].double(), test.double()
    with torch.no_grad():
        noise = model.noise().double()
        kzx, kxx, kxt = kernel(z, x).to_dense(), kernel(x).to_dense(), kernel(x, test).to_dense()
        a = torch.linalg.pinv(kernel(z).to_dense(), hermitian=True) @ kzx  # z may hold a point twice
        g = torch.linalg.solve(kzx.mT @ a + noise.diag(), a.mT @ kernel(z, test).to_dense()).mT
        ktt, full = kernel(test).to_dense(), kxx + noise.diag()
        return ktt - g @ kxt - (g @ kxt).mT + g @ full @ g.mT, ktt - kxt.mT @ torch.linalg.solve(full, kxt)


def _agree(model, test=TEST):
    """Within what S samples allow: 4.5 standard deviations of each variance, 3 of a mean of few independent ones."""
    wanted, _ = _dense(model, test)
    with torch.no_grad():
        found = model(test.to(model.train_inputs[0].dtype)).variance.double()
    ratio = found / wanted.diagonal()
    deviation = math.sqrt(2 / model.variance_samples)
    assert found.shape == (len(test),)
    assert float((ratio - 1).abs().max()) < 4.5 * deviation
    assert float((ratio.mean() - 1).abs()) < 3 * deviation


# --- random features ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KERNELS)
def test_covariance_of_functions(name):
    kernel, samples = _kernel(name), 100_000
    at = torch.cat([points(5, seed=1), points(5, seed=1)[:1] + 1e-3])
    paths = PriorPaths(kernel, points(1, seed=2), samples, torch.Generator().manual_seed(5), frequencies=2)
    f = paths(at)
    assert f.shape == (6, samples) and f.dtype == torch.float64
    wanted = kernel(at).to_dense().detach()
    error = (f @ f.mT / samples - wanted).abs().max() / wanted[0, 0]
    assert float(error) < 4.5 * math.sqrt(2 / samples)
    assert float(f.mean(dim=1).abs().max()) < 4.5 * math.sqrt(float(wanted[0, 0]) / samples)


@pytest.mark.parametrize("frequencies", [1, 1024])
def test_functions_of_many_frequencies_are_normal(frequencies):
    paths = PriorPaths(_kernel("rbf"), points(1), 2000, torch.Generator().manual_seed(5), frequencies=frequencies)
    kurtosis = float(paths(points(1, seed=1)).pow(4).mean())
    assert abs(kurtosis - (3 if frequencies > 1 else 1.5)) < 0.4


@pytest.mark.parametrize("name", ["sum", "product", "periodic"])
def test_functions_by_tiles(name, monkeypatch):
    """The same values and gradients whatever the tiles."""
    x = points(30, seed=1).requires_grad_()

    def evaluate():
        f = PriorPaths(_kernel(name), points(1), 7, torch.Generator().manual_seed(5), frequencies=16)(x)
        return f, torch.autograd.grad(f.square().sum(), x)[0]

    whole = evaluate()
    for rows, entries, inputs in ((4, 2**20, 2**22), (30, 30 * 16 * 2, 2**22), (1, 1, 2**22), (2, 2**20, 30)):
        monkeypatch.setattr("sketchgp.operators.random_features._INPUTS", inputs)
        monkeypatch.setattr("sketchgp.operators.random_features._ROWS", rows)
        monkeypatch.setattr("sketchgp.operators.random_features._ENTRIES", entries)
        for part, wanted in zip(evaluate(), whole, strict=True):
            assert relative(part, wanted) < 1e-12


def test_memory_of_functions():
    paths = PriorPaths(_kernel("rbf-ard").float(), points(1).float(), 16, torch.Generator().manual_seed(5))
    with Largest() as largest:
        paths(points(5000).float())
    assert largest.entries <= 2**20  # all waves at all points are eighty times as many
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        paths(points(100).float().requires_grad_()).sum().backward()
    assert sum(kept) < 100 * 16 * 10  # and no waves for the backward pass


def test_phases_keep_their_digits():
    """Inputs far from zero, and many turns: float32 phases would be noise."""
    kernel, x = set_scales(RBFKernel(), 1.0, 1e-3), (points(20) * 64).round() / 64 + 1000
    origin = torch.full((1, 3), 1000.0, dtype=torch.float64)

    def paths(dtype):
        made = PriorPaths(kernel.to(dtype), origin.to(dtype), 5, torch.Generator().manual_seed(5))
        return made(x.to(dtype))

    assert relative(paths(torch.float32), paths(torch.float64)) < 1e-5


# --- variances ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KERNELS)
def test_variances(name, few_frequencies):
    _agree(_model(name))


@pytest.mark.parametrize("name", ["rbf-ard", "matern12", "sum"])
def test_variances_in_float32(name, few_frequencies):
    model = _model(name, torch.float32)
    _agree(model)
    with torch.no_grad():
        found = model(TEST.float())
    assert found.variance.dtype == found.covariance_matrix.dtype == torch.float32
    assert model.variance_solution.value.dtype == torch.float64


@pytest.mark.parametrize("noise", [0.001, 3.0])
def test_variances_of_other_noise(noise, few_frequencies):
    _agree(_model("matern12", noise=noise))


def test_variances_of_a_noise_for_each_point(few_frequencies):
    noise = torch.cat([torch.full((N // 2,), 0.01), torch.full((N // 2,), 2.0)]).double()
    x = points(N)[points(N)[:, 0].argsort()]  # half of the space is noisy
    model = InducingPointGP(x, normal(N), FixedNoiseGaussianLikelihood(noise), ZeroMean(), _kernel("matern32-ard"),
                            points(M, seed=9), variance="samples", variance_samples=S).eval()  # fmt: skip
    _agree(model)


@pytest.mark.parametrize(
    "x",
    [points(1), points(2), points(2)[[0, 0, 0, 1]], torch.cat([points(30), points(30)])],
    ids=["one", "two", "one thrice", "each twice"],
)
def test_variances_of_few_and_of_equal_points(x, few_frequencies):
    _agree(_model(x=x, z=torch.cat([points(3, seed=9), points(3, seed=9)[:1]]), noise=0.3))


@pytest.mark.parametrize("solver", [KRILL(tol=1e-8), SketchySAGA(tol=1e-3)], ids=repr)
def test_variances_with_other_solvers(solver, few_frequencies):
    model = _model(x=points(200), solver=solver, noise=0.5, variance_samples=1000)
    _agree(model)
    assert model.variance_solution.report.solver == type(solver).__name__


def test_variances_of_a_solver_that_ends_early(few_frequencies):
    """They are of the predictor as it is: an EigenPro of few epochs is a worse one."""
    few, many = (_model(x=points(200), solver=EigenPro4(epochs=e), noise=0.01, variance_samples=200) for e in (1, 20))
    with torch.no_grad():
        assert float((few(TEST).variance / many(TEST).variance).log().mean()) > 0.1


def test_they_lie_above_the_exact_variance(few_frequencies):
    """By much where the inducing points leave much unexplained, which DTC's do not know of."""
    model = _model("rbf", noise=0.01)
    wanted, exact = (c.diagonal() for c in _dense(model, TEST))
    assert bool((wanted >= exact).all()) and float((wanted / exact).mean()) > 1.5
    with torch.no_grad():
        assert bool((model(TEST).variance > exact * (1 - 4.5 * math.sqrt(2 / S))).all())
    all_points = _model("rbf", z=points(N))
    wanted, exact = _dense(all_points, TEST)
    assert relative(wanted, exact) < 1e-6
    _agree(all_points)


def test_covariance(few_frequencies):
    model = _model()
    wanted, _ = _dense(model, TEST)
    found = model(TEST)
    assert relative(found.covariance_matrix, wanted) < 0.15
    assert relative(found.covariance_matrix.diagonal(), found.variance) < 1e-12
    ones = torch.ones(11, 2, dtype=torch.float64)
    assert relative(found.lazy_covariance_matrix @ ones, found.covariance_matrix @ ones) < 1e-12
    assert relative(found.lazy_covariance_matrix[2:5, 2:5].to_dense(), found.covariance_matrix[2:5, 2:5]) < 1e-12
    assert relative(model.likelihood(found).variance, found.variance + 0.1) < 1e-6


def test_errors_are_of_the_predictor(few_frequencies):
    """Exactly, of the functions and noises that were drawn; the noises are what they should be."""
    kernel, x, z = _kernel("matern32-ard"), points(N), points(M, seed=9)
    noise = torch.linspace(0.01, 1.0, N, dtype=torch.float64)
    with torch.no_grad():
        errors = Deviations(kernel, z, 3000, purpose=OF_PREDICTOR)
        targets = errors.targets(x, noise)
        errors.weights = QR().solve(InducingPointProblem(kernel, x, targets, noise, z)).value
        kzx = kernel(z, x).to_dense()
        weights = torch.linalg.solve((kzx / noise) @ kzx.mT + kernel(z).to_dense(), (kzx / noise) @ targets)
        wanted = errors.prior(TEST) - kernel(TEST, z).to_dense() @ weights
        assert relative(errors(TEST), wanted) < 1e-8
        assert relative(errors(TEST.reshape(1, 11, 1, 3)), wanted.reshape(1, 11, 1, -1)) < 1e-8
        drawn = targets - errors.prior(x)
    assert float((drawn.square().mean(dim=1) / noise - 1).abs().max()) < 4.5 * math.sqrt(2 / 3000)
    assert float((drawn @ drawn.mT / 3000 / noise.outer(noise).sqrt()).fill_diagonal_(0).abs().max()) < 0.1
    assert float((drawn * errors.prior(x)).mean().abs()) < 0.01


def test_several_outputs(few_frequencies):
    model = _model(columns=3, variance_samples=20)
    found, alone = model(TEST), _model(variance_samples=20)(TEST)
    assert found.variance.shape == (11, 3)
    assert relative(found.variance, alone.variance.unsqueeze(1).expand(11, 3)) < 1e-12
    assert len(model.variance_solution.value) == M
    assert found.rsample(torch.Size([4])).shape == (4, 11, 3)


# --- their use ------------------------------------------------------------------------------------------------


def test_batches_of_test_points(few_frequencies):
    model = _model(variance_samples=20)
    batch = points(12, seed=4).reshape(2, 2, 3, 3)
    found = model(batch)
    assert found.variance.shape == (2, 2, 3) and found.covariance_matrix.shape == (2, 2, 3, 3)
    assert relative(found.covariance_matrix[1, 0], model(batch[1, 0]).covariance_matrix) < 1e-12
    assert found.rsample(torch.Size([5])).shape == (5, 2, 2, 3)
    assert found.expand(torch.Size([3, 2, 2])).variance.shape == (3, 2, 2, 3)
    assert found[1].covariance_matrix.shape == (2, 3, 3)
    assert relative(found[1, 0].covariance_matrix, found.covariance_matrix[1, 0]) < 1e-12


@pytest.mark.parametrize("samples", [4, 200])
@pytest.mark.parametrize("columns", [None, 2])
def test_samples_have_the_covariance(samples, columns, few_frequencies):
    """Drawn, and from given normal numbers; of more points than samples and of fewer."""
    model = _model(variance_samples=samples, columns=columns)
    with torch.no_grad():
        found = model(TEST)
        wanted, shape, count = found.covariance_matrix, found.mean.shape, 20_000
        base = normal(count, *shape)
        for drawn in (found.rsample(torch.Size([count])), found.rsample(base_samples=base)):
            assert drawn.shape == (count, *shape)
            centred = (drawn - found.mean).reshape(count, -1)
            assert relative(centred.mT @ centred / count, wanted) < 0.05


def test_gradient_in_the_points(few_frequencies):
    model = _model("rbf-ard", variance_samples=50)
    for test in (TEST[:3], TEST[:4].reshape(2, 2, 3)):
        with torch.no_grad():
            model(test).variance  # noqa: B018
        point = test.clone().requires_grad_()
        posterior = model(point)
        with torch.no_grad():
            posterior.variance  # noqa: B018
        for value in (lambda p: p.variance, lambda p: p.covariance_matrix.square(), lambda p: p.stddev.log()):
            (found,) = torch.autograd.grad(value(posterior).sum(), point)
            step = 1e-5 * torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
            with torch.no_grad():
                up, down = value(model(test + step)), value(model(test - step))
                dims = tuple(range(1 if test.dim() == 2 else 2, up.dim()))
                assert relative(found[..., 1].sum(), ((up - down) / 2e-5).sum()) < 1e-6
                if up.shape == test.shape[:-1]:
                    assert relative(found[..., 1], (up - down) / 2e-5) < 1e-5, dims
    assert all(parameter.grad is None for parameter in model.parameters())


def test_two_calls_agree_and_share_a_solve(few_frequencies):
    model = _model(variance_samples=20)
    with record_solves() as solves, torch.no_grad():
        first = model(TEST)
        first.mean  # noqa: B018
        assert len(solves) == 1  # the samples wait until they are asked for
        first.variance  # noqa: B018
        assert [report.columns for report in solves] == [1, 20]
        assert torch.equal(model(TEST).variance, first.variance)
        assert relative(model(TEST[2:5]).covariance_matrix, first.covariance_matrix[2:5, 2:5]) < 1e-12
        assert model.variance_solution is model.variance_solution
        assert model.variance_solution.value.shape == (M, 20)
        assert len(solves) == 2
        assert relative(_model(variance_samples=20)(TEST).variance, first.variance) < 1e-12
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert relative(other(TEST).variance, first.variance) < 1e-12


def test_a_change_is_noticed(few_frequencies):
    model = _model(variance_samples=20)
    before, last = model(TEST), model(TEST).variance.detach()
    changes = [
        lambda: setattr(model.likelihood, "noise", 2.0),
        lambda: setattr(model.covar_module, "lengthscale", torch.tensor([[0.3, 0.4, 0.5]]).double()),
        lambda: model.inducing_points.data.mul_(0.9),
        lambda: model.set_train_data(model.train_inputs[0] * 0.5, strict=False),
        lambda: setattr(model, "variance_samples", 30),
        lambda: setattr(model, "variance", "dtc"),
    ]
    for change in changes:
        change()
        now = model(TEST).variance.detach()
        assert relative(now, last) > 1e-6
        last = now
    with pytest.raises(InputError, match="changed after this prediction"):
        before.covariance_matrix  # noqa: B018


def test_inference_mode(few_frequencies):
    model = _model(variance_samples=20)
    with torch.inference_mode():
        posterior = model(TEST)
        value = posterior.variance
    point = TEST.clone().requires_grad_()
    model(point).variance.sum().backward()
    assert point.grad is not None
    assert relative(model(TEST).variance, value) < 1e-12
    assert relative(posterior.lazy_covariance_matrix.diagonal(), value) < 1e-12


def test_auto_where_memory_is_short(monkeypatch, few_frequencies):
    model = _model(variance="auto", variance_samples=20)
    assert (model.variance_method, predict(model, TEST).variance_method) == ("dtc", "dtc")
    assert InducingPointGP(points(9), normal(9), GaussianLikelihood(), ZeroMean(), RBFKernel().double(),
                           points(4)).variance == "auto"  # fmt: skip
    free = [55 * M**2]
    monkeypatch.setattr("sketchgp.inducing_point_gp.free_memory", lambda device: free[0])
    assert model.variance_method == "dtc"  # once chosen
    short = _model(variance="auto", variance_samples=20)
    assert short.variance_method == "samples"
    assert relative(short(TEST).variance, _model(variance_samples=20)(TEST).variance) < 1e-12
    plain = _model(PolynomialKernel(power=2), variance="auto")
    with monkeypatch.context() as less:
        less.setattr("sketchgp.inducing_point_gp._STATISTICS_BYTES", 2**60)
        with pytest.raises(InputError, match="The variance of DTC for"):  # there is no other way
            plain(TEST).variance  # noqa: B018
    free[0] = 57 * M**2
    assert short.variance_method == "samples"
    assert _model(variance="auto").variance_method == "dtc"


@pytest.mark.parametrize("columns", [None, 2])
def test_predict(columns, few_frequencies):
    model = _model(columns=columns, variance_samples=20)
    with torch.no_grad():
        posterior = _model(columns=columns, variance_samples=20)(TEST)
        wanted = posterior.variance
    alone = predict(model, TEST, variance=None)
    assert alone.variance is None and alone.report.columns == (columns or 1)
    found = predict(model, TEST, batch_size=4)
    assert relative(found.variance, wanted) < 1e-12
    assert relative(found.observation_variance, wanted + 0.1) < 1e-6
    assert (found.variance_method, found.report) == ("samples", alone.report)
    assert model.variance_solution.report.columns == 20
    assert predict(_model(columns=columns, variance_samples=20), TEST).report.columns == (columns or 1)
    with pytest.raises(InputError, match="as the model was told"):
        predict(model, TEST, variance="low_rank")


def test_a_solve_that_falls_short_warns():
    model = _model(solver=KRILL(tol=1e-12, max_iterations=1), x=points(200), variance_samples=3, noise=0.001)
    with pytest.warns(ConvergenceWarning):
        model.solution  # noqa: B018
    posterior = model(TEST)
    with pytest.warns(ConvergenceWarning, match="ran out of iterations"):
        posterior.variance  # noqa: B018
    assert not model.variance_solution.report.converged
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        posterior.covariance_matrix  # noqa: B018


def test_one_sample(few_frequencies):
    posterior = _model(variance_samples=1)(TEST)
    assert posterior.variance.shape == (11,)
    assert int(torch.linalg.matrix_rank(posterior.covariance_matrix)) == 1


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"variance": "exact"}, "variance expects one of 'auto', 'dtc', 'samples', got 'exact'"),
        ({"variance": None}, "variance expects"),
        ({"variance_samples": 0}, "variance_samples expects a positive integer, got 0"),
        ({"variance_samples": 64.0}, "positive integer, got 64.0"),
        ({"variance_samples": True}, "positive integer, got True"),
    ],
)
def test_what_is_refused(choices, message):
    with pytest.raises(InputError, match=message):
        _model(**choices)
    model = _model()
    for name, value in choices.items():
        setattr(model, name, value)
    with pytest.raises(InputError, match=message):
        model(TEST)


class _Own(RBFKernel):
    """Could be anything."""


@pytest.mark.parametrize("kernel", [PolynomialKernel(power=2), _Own(), RBFKernel() + ScaleKernel(_Own())], ids=repr)
def test_kernels_without_random_features(kernel):
    model = _model(kernel.double())
    posterior = model(TEST)
    assert posterior.mean.shape == (11,)
    with pytest.raises(InputError, match=r"known of RBF, Matern.*predict\(model, x, variance=None\)"):
        posterior.variance  # noqa: B018
    assert predict(model, TEST, variance=None).variance is None
    model.variance = "dtc"
    assert predict(model, TEST).variance_method == "dtc"


def test_a_cosine_of_several_dimensions_is_no_covariance():
    with pytest.raises(InputError, match="CosineKernel of 3 dimensions is no covariance"):
        PriorPaths(CosineKernel().double(), points(1), 2, torch.Generator())


def test_functions_of_one_mixture_of_a_batch():
    """As for an output of a model with several."""
    batch = SpectralMixtureKernel(num_mixtures=2, ard_num_dims=3, batch_shape=torch.Size([2])).double()
    batch.mixture_weights = torch.tensor([[0.9, 0.2], [0.3, 0.6]])
    batch.mixture_means = torch.linspace(0.4, 0.1, 12).reshape(2, 2, 1, 3)
    batch.mixture_scales = torch.linspace(0.1, 0.3, 12).reshape(2, 2, 1, 3)
    x, samples = points(5, seed=1), 100_000
    for number in range(2):
        kernel = KernelMatrix.of(batch, x.expand(2, 5, 3)).element((number,)).kernel
        f = PriorPaths(kernel, points(1, seed=2), samples, torch.Generator().manual_seed(5), frequencies=2)(x)
        wanted = batch(x.expand(2, 5, 3)).to_dense()[number].detach()
        error = (f @ f.mT / samples - wanted).abs().max() / wanted[0, 0]
        assert float(error) < 4.5 * math.sqrt(2 / samples)


def test_structured_kernels_are_refused_as_ever():
    with pytest.raises(InputError, match="structure of its own"):
        _model(LinearKernel().double())


def test_prior_mode_has_no_samples():
    with gpytorch.settings.prior_mode(True):
        assert relative(_model()(TEST).variance, _kernel("matern32-ard")(TEST).diagonal()) < 1e-12
