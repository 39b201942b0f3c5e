"""The runner of the benchmarks, the tables made from committed results, and the arithmetic of benchmarks/matvec.py."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import sketchgp
from cases import each

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
PAGES = BENCHMARKS.parent / "docs"
NAMES = sorted(path.stem for path in BENCHMARKS.glob("*.py") if "BENCHMARK = " in path.read_text(encoding="utf-8"))
UNMEASURED = ("device", "paired")  # one needs a GPU, the other two checkouts; results they have are looked at too
# Results of earlier versions, to be measured again: whoever does so takes the name out; a new version puts all in.
OLD: set[str] = set()


@pytest.fixture(autouse=True)
def module(monkeypatch):
    """``module(name)`` of benchmarks/."""
    if not BENCHMARKS.is_dir():
        pytest.skip("the benchmarks are not beside the tests")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and BENCHMARKS in Path(sys.modules[name].__file__).parents:
            del sys.modules[name]


@pytest.fixture
def directory(tmp_path):
    """Data sets "here" and "there"."""
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("here", "there"):
        np.savez(folder / f"{name}.npz", X=np.zeros((3, 1)), y=np.zeros(3))
    return folder


@pytest.fixture
def run(module, directory, tmp_path, monkeypatch):
    """``run(*options)`` runs a benchmark of nine tasks and returns its JSON; ``run.done`` lists what was measured."""
    runner = module("runner")
    for user in (module("common"), runner):  # without reading all of the package
        monkeypatch.setattr(user, "sources", lambda: "1+aa")
    monkeypatch.setattr(runner, "gc", SimpleNamespace(collect=lambda: 0))  # which takes its time with so many modules

    def groups(options, folder, results):
        yield runner.Group((), [("first", 0)], always=True)
        for name in ("here", "there", "missing"):
            yield runner.Group(
                ("sets", name, "runs"),
                [("plain", 1), (("list", {"seed": 3}), 2), (("list", {"seed": 4}), 3), (("counted", 0), 4)],
                load=lambda name=name: run.done.append(f"load {name}") or name,
                needs=(name,),
                same={"size": run.size},
                facts={"words": "about it"},
                about=lambda loaded: {"loaded": loaded},
            )

    def perform(loaded, number):
        if run.at is not None and number == run.at[0] and loaded == run.at[1]:
            run.at[2]()
        run.done.append((loaded, number))
        return {"failed": "it broke"} if number == run.fails else {"value": number / 3}

    benchmark = runner.Benchmark(
        doc="A test.\n\nOf the runner.",
        name="nine",
        quick="little",
        problem=lambda options: {"seeds": (1, 2), "quick": options.quick},
        groups=groups,
        perform=perform,
        report=lambda results: f"{len(results['sets'])} sets",
        what="sets",
        rival=lambda number: number in run.rivals,
    )

    def run(*options):
        run.done = []
        benchmark.main(["--data", str(directory), "--out", str(tmp_path), *options])
        return json.loads((tmp_path / "nine.json").read_text())

    run.at, run.fails, run.size, run.rivals, run.done = None, None, 7, set(), []
    return run


def test_everything_is_measured_once(run, capsys):
    found = run()
    assert run.done[0] == (None, 0) and len(run.done) == 1 + 2 + 8
    assert "no missing in the data directory" in capsys.readouterr().out
    assert set(found["sets"]) == {"here", "there"} and found["first"]["value"] == 0
    item = found["sets"]["there"]
    assert (item["size"], item["words"], item["loaded"]) == (7, "about it", "there")
    assert item["runs"]["plain"]["value"] == 0.333333 and item["runs"]["plain"]["date"].endswith("Z")
    assert [one["seed"] for one in item["runs"]["list"]] == [3, 4] and len(item["runs"]["counted"]) == 1
    assert found["problem"] == {"seeds": [1, 2], "quick": False}
    assert {"processor", "cores", "torch_threads", "versions", "date"} <= set(found["machine"])
    again = run()
    assert run.done == [] and again["sets"] == found["sets"]
    run("--report")
    assert run.done == []
    run("--fresh", "--only", "there", "3")
    assert run.done == [(None, 0), "load there", ("there", 2)]


def test_results_say_what_they_were_measured_of(run, module, monkeypatch):
    """Also where a later run measures only what is missing, or nothing."""
    common, runner = module("common"), module("runner")
    assert common.measured_of(run("--only", "3")) == {"1+aa"}
    monkeypatch.setattr(runner, "sources", lambda: "2+bb")
    found = run("--only", "4")
    assert common.measured_of(found) == {"1+aa", "2+bb"}
    monkeypatch.setattr(common, "sources", lambda: "3+cc")
    assert run("--only", "4")["machine"] == found["machine"]
    del found["sets"]["here"]["runs"]["list"][0]["sources"]
    assert common.measured_of(found) == {"1+aa", "2+bb", "unknown"}
    assert common.measured_of({"machine": {"date": "", "sources": "1+aa"}, "cases": 3}) == {"1+aa"}
    assert common.measured_of({"machine": {"date": ""}, "cases": [3]}) == {"unknown"}


def test_results_of_another_version_are_renewed(run, module, monkeypatch):
    """Those of rivals only where a package beside this one has another version."""
    common, runner = module("common"), module("runner")

    def of(mark, torch_version):
        monkeypatch.setattr(runner, "sources", lambda: mark)
        made = {"date": "", "sources": mark, "versions": {"torch": torch_version, "sketchgp": mark, "absent": None}}
        monkeypatch.setattr(runner, "machine", lambda *names: made)

    there = [("there", number) for number in (1, 2, 3, 4)]
    of("1+aa", "2.0")
    run("--only", "there", "list")
    of("2+bb", "2.0")
    run("--only", "there", "plain")
    found = run("--renew", "--only", "there")
    assert run.done == [(None, 0), "load there", *there[1:]]  # but what is of this version
    assert common.measured_of(found) == {"2+bb"} and len(found["sets"]["there"]["runs"]["list"]) == 2
    of("2+cc", "2.0")
    run("--renew", "--only", "there")
    assert run.done == []  # other code of the same version
    run.rivals = {1, 4}
    of("3+dd", "2.0")
    found = run("--renew", "--only", "there")
    assert run.done == [(None, 0), "load there", *there[1:3]]
    assert common.measured_of(found) == {"3+dd"}
    assert found["sets"]["there"]["runs"]["plain"]["rival"] == {"torch": "2.0"}
    of("3+dd", "2.1")
    run("--renew", "--only", "there")
    assert run.done == ["load there", there[0], there[3]]
    run("--renew", "--quick", "--only", "there", "counted")  # other parameters
    assert run.done == [(None, 0), "load there", there[3]]


def test_a_mark_is_of_code_alone(module, tmp_path):
    def mark(text):
        (tmp_path / "one.py").write_text(text)
        return module("common").mark_of(tmp_path)

    plain = mark("def f(x):\n    return x + 1\n")
    assert mark('"""Module."""\n\ndef f(x):  # why\n    """Return more."""\n    return (x +\n        1)\n') == plain
    assert mark("def f(x):\n    return x + 2\n") != plain
    (tmp_path / "two.py").touch()
    assert mark("def f(x):\n    return x + 1\n") != plain


def test_old_results_are_known(module):
    """Results of another version than this one are named in OLD, and nothing else is."""
    common, found = module("common"), set()
    for path in (BENCHMARKS / "results").glob("*.json"):
        marks = common.measured_of(common.read_json(path))
        if {mark.split("+")[0] for mark in marks} != {sketchgp.__version__}:
            found.add(path.stem)
    assert found - OLD == set(), "measured of another version: measure them again, or add them to OLD"
    assert OLD - found == set(), "measured of this version: take them out of OLD"


def test_all_benchmarks_are_run_by_one_script(module, tmp_path, monkeypatch, capsys):
    """Every result has an entry in its order of importance."""
    everything = module("all")
    found = {path.stem for path in (BENCHMARKS / "results").glob("*.json")}
    assert found <= set(everything.ORDER)
    scripts = {command.split()[0] for commands in everything.RUNS.values() for command in commands}
    assert all((BENCHMARKS / f"{script}.py").is_file() for script in scripts)
    assert set(NAMES) - scripts == set(UNMEASURED)
    started = []

    def start(arguments, **options):
        started.append([Path(arguments[1]).stem, *arguments[2:]])
        return SimpleNamespace(returncode=int(started[-1][:2] == ["hyperparameters", "--rows"]))

    monkeypatch.setattr(everything, "RESULTS", tmp_path)
    monkeypatch.setattr(everything, "subprocess", SimpleNamespace(run=start, STDOUT=None))
    monkeypatch.setattr(everything, "sources", lambda: "2+bb")
    monkeypatch.setattr(everything.os, "sched_setaffinity", lambda *given: None, raising=False)
    monkeypatch.setattr(everything.os, "environ", {})
    for name, mark in (("maps", "2+bb"), ("fused", "1+aa"), ("properties", "2+aa")):
        (tmp_path / f"{name}.json").write_text(json.dumps({"machine": {"date": "", "sources": mark}}))
    command = ["all.py", "--resume", "--only", "properties", "maps", "fused", "hyperparameters", "lean"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        everything.main()
    assert ended.value.code
    both = [["hyperparameters", "--rows", "3000", "--renew"]]
    assert started == [["maps", "--renew"], ["fused", "--renew"], *both, ["lean", "--renew"]]
    started.clear()
    monkeypatch.setattr(sys, "argv", [command[0], "--only", "properties", "hyperparameters", "matvec"])
    with pytest.raises(SystemExit):
        everything.main()
    assert started[:2] == [["properties"], ["hyperparameters", "--rows", "3000", "--fresh"]]
    assert [one[-1] for one in started[2:]] == ["--fresh", "matern52", "--memory"]
    assert "| hyperparameters | failed (1)" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [command[0], "--list", *command[2:]])
    everything.main()
    printed = capsys.readouterr().out
    for line in ("| maps | current |", "| fused | old |", "| properties | other code |", "| lean | missing |"):
        assert line in printed


def test_ctrl_c_keeps_what_is_done(run, interruptible, tmp_path):
    """Also where a solver would return what it has at an interrupt: that is no measurement."""

    def interrupted():
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            run.done.append("taken for an iterate")

    run.at = 3, "here", interrupted
    with pytest.raises(SystemExit, match="Stopped"):
        run()
    assert run.done == [(None, 0), "load here", ("here", 1), ("here", 2)]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    run.at = None
    found = run()
    assert run.done == ["load here", ("here", 3), ("here", 4), "load there", *(("there", k) for k in (1, 2, 3, 4))]
    assert [one["value"] for one in found["sets"]["here"]["runs"]["list"]] == [0.666667, 1.0]


def test_an_error_keeps_what_is_done_and_a_failure_is_tried_again(run, tmp_path):
    def broken():
        raise ZeroDivisionError

    run.at = 1, "there", broken
    with pytest.raises(ZeroDivisionError):
        run()
    run.at, run.fails = None, 3
    assert [one["seed"] for one in run()["sets"]["there"]["runs"]["list"]] == [3]
    assert len(run.done) == 1 + 4
    run.fails = None
    assert [one["seed"] for one in run()["sets"]["there"]["runs"]["list"]] == [3, 4]
    assert run.done == ["load there", ("there", 3)]
    assert [path.name for path in tmp_path.glob("nine*")] != [] and not list(tmp_path.glob("*.part"))


def test_other_parameters_are_refused(run):
    run()
    with pytest.raises(SystemExit, match=r"other parameters \(quick\)"):
        run("--quick")
    run.size = 8
    with pytest.raises(SystemExit, match=r"other parameters \(size\)"):
        run()
    assert run("--fresh")["sets"]["here"]["size"] == 8


@each("name", [name for name in NAMES if name not in UNMEASURED])
def test_committed_results_are_read(name, module, monkeypatch, tmp_path):
    """The table beside a JSON is what the script makes of it, and its parameters are those of the script."""
    benchmark = module(name).BENCHMARK
    assert benchmark.name == name
    shutil.copy(BENCHMARKS / "results" / f"{name}.json", tmp_path)
    object.__setattr__(benchmark, "picture", lambda results, path: None)
    benchmark.main(["--report", "--out", str(tmp_path)])
    problem = module("common").plain(benchmark.problem(benchmark.parse([])))
    found = json.loads((tmp_path / f"{name}.json").read_text())["problem"]
    assert {**found, "threads": 0} == {**problem, "threads": 0}
    assert (tmp_path / f"{name}.md").read_text() == (BENCHMARKS / "results" / f"{name}.md").read_text()


@pytest.mark.parametrize("name", UNMEASURED)
def test_what_has_no_results_is_left_out_only_so_long(name):
    assert name in NAMES
    assert not (BENCHMARKS / "results" / f"{name}.json").exists(), f"take {name} out of UNMEASURED"


@pytest.fixture
def limit_module(module):
    return module("matvec_limit")


def test_limits_by_hand(limit_module):
    rates = limit_module.Rates(product=100e9, exponential=5e9, root=10e9, logarithm=1e9)
    found = limit_module.limits(limit_module.Work(roots=1), d=8, t=16, rates=rates)
    # (2 * 8 + 2 * 16) / 100 + 1 / 5 = 0.48 + 0.2 nanoseconds a pair, and 0.1 for the root
    assert found["plain"] == pytest.approx(1e9 / 0.68)
    assert found["root"] == pytest.approx(1e9 / 0.78)
    # each pair once: (8 + 2 * 16) / 100 + 0.5 / 5
    assert found["symmetric"] == pytest.approx(1e9 / 0.50)
    assert found["symmetric_root"] == pytest.approx(1e9 / 0.55)


def test_limits_of_other_kernels(limit_module):
    rates = limit_module.Rates(product=100e9, exponential=5e9, root=10e9, logarithm=1e9)
    work = limit_module.Work(flops=4, exponentials=2, logarithms=1)
    found = limit_module.limits(work, d=10, t=1, rates=rates)
    assert found["plain"] == pytest.approx(1e9 / (0.42 + 0.4))
    assert found["root"] == pytest.approx(1e9 / (0.42 + 0.4 + 1.0))


def test_symmetric_fractions_only_for_square(limit_module):
    limit = {"plain": 2.0, "root": 1.0, "symmetric": 4.0, "symmetric_root": 3.0}
    rectangular = limit_module.fractions(1.0, limit, square=False)
    assert rectangular == {"fraction_of_limit": 0.5, "fraction_of_limit_with_root": 1.0}
    square = limit_module.fractions(3.0, limit, square=True)
    assert square["fraction_of_limit"] == 1.5
    assert square["fraction_of_symmetric_limit"] == 0.75
    assert square["fraction_of_symmetric_limit_with_root"] == 1.0


def test_rates_are_raised_but_never_lowered(limit_module):
    record = {"product": 10.0, "exponential": 4.0, "root": 3.0, "logarithm": 2.0}
    rates = limit_module.rates_of(record, {"product": 0.5, "exponential": 1.5})
    assert rates == limit_module.Rates(product=10.0, exponential=6.0, root=4.5, logarithm=3.0)


# --- device.py ----------------------------------------------------------------------------------------------------


def test_the_plan_for_a_device_is_printed_and_fits(module, capsys):
    device = module("device")
    device.main(["--dry-run"])
    printed = capsys.readouterr().out
    assert all(f"| {item.name} |" in printed for item in device.plan())
    assert sum(item.minutes for item in device.plan()) <= 25
    assert max(item.minutes for item in device.plan()) <= 5  # of calls that may take ten


def test_what_does_not_fit_into_the_minutes_is_left_for_the_next_call(module, directory, capsys):
    device = module("device")
    options = device.BENCHMARK.parse(["--minutes", "1"])
    names = [group.tasks[0][0] for group in device.groups(options, directory, {})]
    assert names and all(item.minutes <= 1 for item in device.plan() if item.name in names)
    assert "tests: 2.5 minutes do not fit" in capsys.readouterr().out


@pytest.mark.slow
def test_the_programme_for_a_device_runs_small(module, directory, tmp_path, monkeypatch):
    """On a CPU; a failure is a result, which is tried again when that is asked for."""
    stream = np.random.RandomState(0)
    made = {"X": stream.randn(300, 8), "y": stream.randn(300), "test_mask": np.arange(3000).reshape(300, 10) >= 2500}
    np.savez(directory / "uci_kin40k.npz", **made)
    device, options = module("device"), ["--small", "--out", str(tmp_path), "--data", str(directory)]
    for item in (whole := device.plan()):
        if item.kind == "kin40k":
            item.small["seconds"] = 0.02  # instead of 0.3, for each of fifteen solves
    monkeypatch.setattr(device, "plan", lambda: whole)
    measured, broken = device.ITEMS["training"], []
    picture = device.BENCHMARK.picture
    object.__setattr__(device.BENCHMARK, "picture", lambda results, path: None)  # drawn once, at the end

    def fails(*arguments):
        broken.append(json.loads((tmp_path / "device.json").read_text())["items"])  # what came before is written
        raise RuntimeError("device-side assert\nmore")

    device.ITEMS["training"] = fails
    device.main(options)
    found = json.loads((tmp_path / "device.json").read_text())["items"]
    assert found["training step"]["failed"] == "RuntimeError: device-side assert"
    assert "limits" in broken[0] and "products d=8" in broken[0] and "training step" not in broken[0]
    device.ITEMS["training"] = measured
    device.main(options)
    assert len(broken) == 1
    assert "failed" in json.loads((tmp_path / "device.json").read_text())["items"]["training step"]
    device.main([*options, "--again"])
    found = json.loads((tmp_path / "device.json").read_text())["items"]
    assert set(found) == {item.name for item in device.plan()}
    for name, item in found.items():
        for run in (item, *item.get("runs", ())):
            assert "failed" not in run, (name, run)
    errors = [run["error"] for name in found if name.startswith("products") for run in found[name]["runs"]]
    assert len(errors) > 20 and max(errors) < 1e-4
    assert all(run["fraction_of_limit"] > 0 for run in found["products d=8"]["runs"] if run["measure"] == "product")
    assert found["mean synthetic ASkotch"]["residual"] < 1e-2
    assert [len(found[f"kin40k {group}"]["runs"]) for group in ("full", "inducing", "gpytorch")] == [5, 8, 2]
    assert "Not yet measured." not in (tmp_path / "device.md").read_text()
    (tmp_path / "device.json").write_text(json.dumps({**json.loads((tmp_path / "device.json").read_text()), "items": {
        "limits": found["limits"]}}))  # fmt: skip
    object.__setattr__(device.BENCHMARK, "picture", picture)
    device.main(["--report", "--out", str(tmp_path)])
    assert (tmp_path / "device.md").read_text().count("Not yet measured.") == 6


def test_a_task_that_takes_too_long_is_ended(module, tmp_path):
    script = tmp_path / "sleeps.py"
    script.write_text("import time\ntime.sleep(60)\n")
    found = module("measure").in_new_process(script, {}, tmp_path, limit=0.2)
    assert found == {"failed": "took longer than 0 s"}


def test_pages_say_what_is_not_measured(module):
    measured = (BENCHMARKS / "results" / "device.json").exists()
    for page in (PAGES / "experiments" / "device.md", PAGES / "results.md"):
        assert ("ot yet measured" in page.read_text(encoding="utf-8")) is not measured


def test_pages_name_what_their_figures_were_measured_on():
    """A page of figures that were measured again says so: it was looked at."""
    named = set()
    for page in [PAGES / "results.md", *sorted((PAGES / "experiments").glob("*.md"))]:
        for name, stated in re.findall(r"^From `([\w-]+)\.json`: (.+?)[.;] ", page.read_text(encoding="utf-8"), re.M):
            of = json.loads((BENCHMARKS / "results" / f"{name}.json").read_text(encoding="utf-8"))["machine"]
            processor, threads = re.sub(r"\(R\)| Processor", "", of["processor"]), of["torch_threads"]
            facts = f"{processor}, {threads} thread{'s' * (threads > 1)}, sketchgp {of['versions']['sketchgp']}"
            assert stated == f"{facts}, {of['date'][:10]}", f"{page.name} has figures of an earlier {name}.json"
            named.add((page.stem, name))
    pages = {page.stem for page in (PAGES / "experiments").glob("*.md")} - {"index", *UNMEASURED}
    assert pages == {page for page, name in named if page == name}
