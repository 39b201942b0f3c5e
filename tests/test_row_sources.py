"""Rows on disk: what is streamed gives what tensors give, in memory that does not grow with them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import gpytorch
import numpy as np
import pytest
import torch

import sketchgp
from sketchgp import InputError, RowSource
from sketchgp.row_sources.tables import Array
from sketchgp.settings import memory_budget

N, D = 600, 40
SMALL = N * D * 8 - 1  # a budget that x does not fit


def data(dtype=torch.float64, n=N, d=D):
    stream = torch.Generator().manual_seed(7)
    x = torch.randn(n, d, dtype=torch.float64, generator=stream)
    y = torch.sin(x.sum(dim=1)) + 0.1 * torch.randn(n, dtype=torch.float64, generator=stream)
    return x.to(dtype), y.to(dtype)


def matern(d=D, dtype=torch.float64):
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=1.5)).to(dtype)
    kernel.base_kernel.lengthscale = d**0.5
    return kernel


def mapped(path, x):
    np.save(path / "x.npy", x.numpy())
    return np.load(path / "x.npy", mmap_mode="r")


def parquet(path, x):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    names = [f"c{i}" for i in range(x.shape[1])]
    table = pyarrow.table({name: x[:, i].numpy() for i, name in enumerate(names)})
    (path / "parts").mkdir()
    parquet.write_table(table.slice(0, 250), path / "parts" / "a.parquet", row_group_size=100)
    parquet.write_table(table.slice(250), path / "parts" / "b.parquet", row_group_size=100)
    return pytest.importorskip("pyarrow.dataset").dataset(path / "parts"), table


def all_sources(path, x):
    dataset, table = parquet(path, x)
    return {
        "memmap": mapped(path, x),
        "an .npy file": str(path / "x.npy"),
        "a tensor": x,
        "parquet": dataset,
        "a directory of it": path / "parts",
        "a table": table,
    }


def test_every_source_gives_the_rows_of_the_table(tmp_path):
    x, _ = data()
    some = torch.tensor([599, 3, 3, 250, 0, 248])
    for name, one in all_sources(tmp_path, x).items():
        source = RowSource(one)
        assert (source.shape, source.dtype) == (x.shape, x.dtype), name
        assert torch.equal(source[240:260], x[240:260]), name
        assert torch.equal(source[some], x[some]), name
        assert torch.equal(source[::7], x[::7]), name
        assert torch.equal(source[x[:, 0] > 0.5], x[x[:, 0] > 0.5]), name
        part = source.part(slice(200, 300))
        assert torch.equal(part[torch.tensor([-1, 0, -100])], x[200:300][[-1, 0, -100]]), name
        for wrong in (torch.tensor([100]), torch.tensor([0, -101]), torch.ones(99, dtype=torch.bool)):
            with pytest.raises(IndexError):
                part[wrong]
        assert torch.equal(source.whole(), x), name
    chosen = torch.tensor([4, 1])
    assert torch.equal(RowSource(mapped(tmp_path, x), columns=[4, 1])[some], x[some][:, chosen])
    assert torch.equal(
        RowSource(tmp_path / "parts", columns=["c4", "c1"], dtype=torch.float32)[some], x[some][:, chosen].float()
    )
    saved = RowSource(tmp_path / "parts", columns=["c4", "c1"]).save(tmp_path / "two.npy")
    assert torch.equal(saved[:], x[:, chosen])
    with pytest.raises(FileExistsError):
        saved.save(tmp_path / "two.npy")


def test_what_fits_is_read_whole_and_what_does_not_stays(tmp_path):
    x, y = data()
    on_disk = mapped(tmp_path, x)
    np.save(tmp_path / "y.npy", y.numpy())
    targets = np.load(tmp_path / "y.npy", mmap_mode="r")
    for make in (
        lambda: sketchgp.FullProblem(matern(), on_disk, targets, 0.1),
        lambda: sketchgp.InducingPointProblem(matern(), on_disk, targets, 0.1, x[:20]),
    ):
        with memory_budget(x.numel() * 8):
            whole = make()
        with memory_budget(x.numel() * 8 - 1):
            streamed = make()
        assert torch.equal(whole.x, x) and torch.equal(whole.y, y)
        assert isinstance(streamed.x, RowSource) and torch.equal(streamed.y, y)
    with memory_budget(SMALL):  # whole numbers come in the dtype of the targets
        counts = sketchgp.FullProblem(matern().float(), mapped(tmp_path, (10 * x).int()), y.float(), 0.1)
    assert counts.x.dtype == torch.float32 and torch.equal(counts.x[:5], (10 * x[:5]).int().float())


def test_a_model_takes_rows_that_fit_and_says_what_to_do_with_others(tmp_path):
    x, y = data()
    on_disk = mapped(tmp_path, x)
    likelihood, mean = gpytorch.likelihoods.GaussianLikelihood().double(), gpytorch.means.ZeroMean()

    def model():
        return sketchgp.InducingPointGP(on_disk, y, likelihood, mean, matern(), inducing_points=x[:20])

    assert torch.equal(model().train_inputs[0], x)
    with memory_budget(SMALL), pytest.raises(InputError, match="solve an InducingPointProblem"):
        model()
    problem = sketchgp.InducingPointProblem(matern(), on_disk, y, likelihood.noise.item(), x[:20])
    found = sketchgp.QR().solve(problem).predict(x[:5] + 0.1)
    torch.testing.assert_close(found, model().eval()(x[:5] + 0.1).mean.detach(), rtol=1e-6, atol=1e-6)


FULL = {
    "ASkotch": sketchgp.ASkotch(block_size=150, tol=1e-5),
    "Skotch": sketchgp.Skotch(block_size=150, tol=1e-2),
    "conjugate gradients": sketchgp.ConjugateGradients(tol=1e-12),
}


@pytest.mark.parametrize(
    ("name", "kind"), [("ASkotch", "recognised"), ("Skotch", "called"), ("conjugate gradients", "recognised")]
)
def test_full_solvers_give_what_they_give_in_memory(name, kind, tmp_path):
    x, y = data()
    kernel = matern() if kind == "recognised" else gpytorch.kernels.PolynomialKernel(power=2).double()
    points, solver = x[:9] + 0.1, FULL[name]
    with memory_budget(SMALL):
        streamed = sketchgp.FullProblem(kernel, mapped(tmp_path, x), y, 0.5)
        whole = sketchgp.FullProblem(kernel, x, y, 0.5)
        found, wanted = (
            solver.solve(problem, matmul="tiled", held_out=(points, y[:9])) for problem in (streamed, whole)
        )
    assert isinstance(streamed.x, RowSource)
    torch.testing.assert_close(found.value, wanted.value, rtol=1e-10, atol=1e-10 * float(wanted.value.abs().max()))
    assert found.report.converged == wanted.report.converged
    mean = kernel(points, x).to_dense().detach() @ wanted.value
    for solution in (found, wanted):
        torch.testing.assert_close(solution.predict(points), mean, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "choice",
    [
        sketchgp.Nystrom(rank=20, sketch="gaussian"),
        sketchgp.Nystrom(rank=20, sketch="uniform"),
        sketchgp.NystromEigenPro(rank=20),
    ],
    ids=["gaussian", "uniform", "eigenpro"],
)
def test_every_preconditioner_takes_rows_that_stay_where_they_are(choice, tmp_path):
    x, y = data()
    with memory_budget(SMALL):
        problems = [sketchgp.FullProblem(matern(), inputs, y, 0.5) for inputs in (mapped(tmp_path, x), x)]
        streamed, whole = (choice.build(p.system("tiled").operator, p.noise_vector) for p in problems)
    assert isinstance(problems[0].x, RowSource)
    torch.testing.assert_close(streamed.apply_inverse(y[:, None]), whole.apply_inverse(y[:, None]))


@pytest.mark.parametrize(
    "solver",
    [sketchgp.EigenPro4(epochs=2), sketchgp.EigenPro3(epochs=2), sketchgp.SketchySAGA(max_epochs=3), sketchgp.KRILL()],
    ids=lambda solver: solver.name,
)
@pytest.mark.filterwarnings("ignore::sketchgp.ConvergenceWarning")
def test_inducing_point_solvers_give_what_they_give_in_memory(solver, tmp_path):
    x, y = data()
    with memory_budget(SMALL):
        streamed = sketchgp.InducingPointProblem(matern(), mapped(tmp_path, x), y, 0.1, x[:30])
        whole = sketchgp.InducingPointProblem(matern(), x, y, 0.1, x[:30])
    assert isinstance(streamed.x, RowSource)
    found, wanted = solver.solve(streamed).value, solver.solve(whole).value
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10 * float(wanted.abs().max()))


def test_tiles_are_those_of_a_tensor_where_blocks_are_larger_than_they(tmp_path):
    """The same sums in the same order, so that float32 results hardly differ."""
    x, y = data(torch.float32, n=12_000, d=2)
    with memory_budget(x.numel() * 4 - 1):
        streamed = sketchgp.FullProblem(matern(2, torch.float32), mapped(tmp_path, x), y, 0.1)
    whole = sketchgp.FullProblem(matern(2, torch.float32), x, y, 0.1)
    rows = torch.arange(0, 12_000, 400)
    found, wanted = (
        problem.system("tiled").operator.rows(rows)._matmul(y.unsqueeze(1)) for problem in (streamed, whole)
    )
    assert 700 < streamed.x.block_rows < 12_000
    torch.testing.assert_close(found, wanted, rtol=1e-7, atol=0)


def test_nan_is_found_where_it_is_read(tmp_path):
    x, y = data()
    x[377, 2] = torch.nan
    on_disk = mapped(tmp_path, x)
    with memory_budget(SMALL):
        full = sketchgp.FullProblem(matern(), on_disk, y, 0.1)
        points = sketchgp.InducingPointProblem(matern(), on_disk, y, 0.1, x[:30])
    for solver, problem in ((sketchgp.ASkotch(), full), (sketchgp.EigenPro4(), points), (sketchgp.KRILL(), points)):
        with pytest.raises(InputError, match="NaN or infinity, first in row 377"):
            solver.solve(problem)
    with pytest.raises(InputError, match="NaN or infinity, first in row 377"):
        sketchgp.FullProblem(matern(), on_disk, y, 0.1)


def test_blocks_are_read_ahead_by_one_thread_that_ends(monkeypatch):
    x, y = data()
    log, take = [], Array.take

    def logged(table, rows):
        log.append((getattr(rows, "start", None), threading.current_thread()))
        return take(table, rows)

    monkeypatch.setattr(Array, "take", logged)
    before = threading.active_count()
    with memory_budget(SMALL):
        problem = sketchgp.FullProblem(matern(), RowSource(x), y, 0.1)
    log.clear()
    solution = sketchgp.Solution(y, None, problem)
    solution.predict(x[:3])
    ahead = [(start, thread) for start, thread in log if thread is not threading.main_thread()]
    assert [start for start, _ in ahead] == list(range(0, N, problem.x.block_rows))
    assert len({thread for _, thread in ahead}) == 1
    x[400] = torch.inf
    with pytest.raises(InputError, match="row 400"):
        solution.predict(x[:3])
    assert threading.active_count() == before


def test_blocks_are_read_on_the_streams_of_the_thread_that_asks(monkeypatch):
    """Of a CUDA device that is made up: each thread begins with the default streams, 0."""
    current = threading.local()

    def set_stream(stream):
        vars(current).setdefault("streams", {})[stream // 10] = stream

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: vars(current).get("streams", {}).get(device, 0))
    monkeypatch.setattr(torch.cuda, "set_stream", set_stream)
    set_stream(17)
    set_stream(24)

    def read():
        return threading.current_thread(), [torch.cuda.current_stream(device) for device in range(3)]

    found = list(sketchgp.row_sources.ahead(iter([read] * 3)))
    assert [streams for _, streams in found] == [[0, 17, 24]] * 3
    assert threading.current_thread() not in [thread for thread, _ in found]


@pytest.mark.cuda
def test_blocks_are_there_before_what_is_computed_on_the_same_stream():
    x, _ = data(torch.float32)
    with memory_budget(SMALL):
        source = RowSource(x, device="cuda")
    sums = []
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(10**8)  # clocks, on this stream: nothing here waits for any other
        with torch.cuda.stream(torch.cuda.default_stream()):
            torch.cuda._sleep(2 * 10**9)  # and copies on the default stream would come too late
        for _, rows in sketchgp.row_sources.blocks(source):
            sums.append(rows.sum(dim=1))
        found = torch.cat(sums).cpu()
    torch.testing.assert_close(found, x.sum(dim=1))


def test_a_checkpoint_of_a_solve_in_memory_is_gone_on_from(tmp_path):
    x, y = data()
    on_disk, path = mapped(tmp_path, x), tmp_path / "solve.pt"
    solver = sketchgp.ASkotch(block_size=150, tol=1e-5, checkpoint=path)
    whole = sketchgp.FullProblem(matern(), x, y, 0.5)
    wanted = sketchgp.ASkotch(block_size=150, tol=1e-5).solve(whole, matmul="tiled")
    with pytest.warns(sketchgp.ConvergenceWarning):
        solver.solve(whole, matmul="tiled", callback=lambda progress: progress.passes > 2)
    with memory_budget(SMALL):
        streamed = sketchgp.FullProblem(matern(), on_disk, y, 0.5)
    found = solver.solve(streamed, matmul="tiled")
    assert found.report.iterations == wanted.report.iterations
    torch.testing.assert_close(found.value, wanted.value, rtol=1e-10, atol=1e-10)


def test_what_does_not_fit_is_refused(tmp_path):
    x, y = data()
    on_disk = mapped(tmp_path, x)
    with memory_budget(SMALL):
        problem = sketchgp.FullProblem(matern(), on_disk, y, 0.1)
        for wrong, message in {
            lambda: problem.system("dense"): "all rows in memory",
            lambda: sketchgp.FullProblem(matern().float(), on_disk, y.float(), 0.1): "one dtype and device",
            lambda: RowSource(x[:, :0]): "at least one row and one column",
            lambda: sketchgp.FullProblem(matern(), on_disk, y[1:], 0.1): "one row per row of x",
            lambda: sketchgp.FullProblem(matern(), x.numpy(), y, 0.1): "x expects a tensor of shape",
            lambda: sketchgp.InducingPointProblem(matern(), on_disk, None, 0.1, x[:9]): "y expects the targets",
            lambda: RowSource(np.array([["a"]])): "expects real numbers",
            lambda: RowSource(on_disk, columns=[40]): "indices from 0 to 39",
            lambda: RowSource(on_disk, dtype=torch.float16): "float32 or float64",
            lambda: RowSource(x.tolist()): "expects a table of shape",
            lambda: RowSource(tmp_path / "nothing.npy"): "no such file",
            lambda: RowSource(on_disk)[0]: "by slices or tensors of indices",
        }.items():
            with pytest.raises(InputError, match=message):
                wrong()
    product = sketchgp.FullProblem(matern(), on_disk, y, 0.1)
    assert torch.is_tensor(product.x)


CHILD = """
import gc, resource, sys
sys.path.insert(0, sys.argv[1])
from test_row_sources import RowSource, np, solved, torch

directory = sys.argv[2]
for name in ("ASkotch", "EigenPro4"):
    x = np.load(f"{directory}/{name}-x.npy", mmap_mode="r")
    y = torch.from_numpy(np.load(f"{directory}/{name}-y.npy"))
    solved(name, x[: len(x) // 8], y[: len(x) // 8])  # libraries take what they need
    gc.collect()  # what goes later would make room
    used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (used * 1024 + x.nbytes * 19 // 20, resource.RLIM_INFINITY))
    try:
        np.empty(x.nbytes * 5 // 4, np.uint8)  # with room for what was freed since, such as a thread's memory
        sys.exit("the limit does not hold")
    except MemoryError:
        problem, value = solved(name, x, y)
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert isinstance(problem.x, RowSource)
    np.save(f"{directory}/{name}.npy", value.numpy())
"""


def solved(name, x, y):
    """A problem, and its solution, with a memory budget of a quarter of x."""
    kernel = gpytorch.kernels.RBFKernel().double()
    kernel.lengthscale = float(x.shape[1]) ** 0.5
    with memory_budget(x.nbytes // 4), warnings.catch_warnings():
        warnings.simplefilter("ignore", sketchgp.ConvergenceWarning)  # after a few blocks
        if name == "ASkotch":
            problem = sketchgp.FullProblem(kernel, x, y, 1.0)
            return problem, sketchgp.ASkotch(block_size=50, max_passes=0.1).solve(problem, matmul="tiled").value
        points = sketchgp.InducingPointProblem(kernel, x, y, 1.0, torch.as_tensor(np.array(x[:40])))
        solver = sketchgp.EigenPro4(epochs=1, subsample_size=300, rank=20, block_size=1000)
        return points, solver.solve(points).value


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the data of a process so")
def test_memory_is_flat(tmp_path):
    """x is four times the memory budget, and more than all that the process may still allocate."""
    stream = np.random.default_rng(3)
    inputs, targets = {}, {}
    for name, n, d in (("ASkotch", 1000, 6500), ("EigenPro4", 90_000, 100)):
        x = inputs[name] = torch.from_numpy(stream.standard_normal((n, d)))
        y = targets[name] = torch.sin(x[:, 0]) + x[:, 1]
        np.save(tmp_path / f"{name}-x.npy", x.numpy())
        np.save(tmp_path / f"{name}-y.npy", y.numpy())
    del x
    command = [sys.executable, "-c", CHILD, str(Path(__file__).parent), str(tmp_path)]
    at_once = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**21)}  # what is freed goes back, so that the limit holds
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=at_once)
    assert done.returncode == 0, done.stderr
    for name, x in inputs.items():
        _, wanted = solved(name, x, targets[name])
        found = torch.from_numpy(np.load(tmp_path / f"{name}.npy"))
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10 * float(wanted.abs().max()))
