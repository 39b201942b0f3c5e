"""The one runner of the benchmarks: what is measured already stays, each new result is written at once, then reports.

A benchmark is a :class:`Benchmark`; what it measures are :class:`Group` objects, each a problem that is loaded once and
what is to be measured on it.  A result lies in the JSON under the keys of its group and its label.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from common import (
    arguments,
    data_directory,
    has_data,
    load_average,
    machine,
    now,
    plain,
    publish,
    read_json,
    results_directory,
    sources,
    version,
    write_json,
)
from measure import in_new_process

# In the JSON: a name in a dictionary, the so-manyth entry of a list, or the entry of a list that has these values.
Key = str | int | dict[str, Any]


@dataclass(frozen=True)
class Group:
    """What is measured on one problem.

    :ivar at: keys of what holds the results, from the top of the JSON; :ivar tasks: (label, what to measure), where a
        label is a key or a tuple of keys.
    :ivar load: makes the problem, where a task is left to do.
    :ivar needs: names of data sets; where one is missing, the group is left out, with a line that says so.
    :ivar same: stands beside the results, and has to be what earlier results were measured with.
    :ivar facts: stands beside the results, always as it is now.
    :ivar about: what was loaded -> more that stands beside the results.
    :ivar always: also where ``--only`` asks for other things.
    """

    at: tuple[Key, ...]
    tasks: Sequence[tuple[Key | tuple[Key, ...], Any]]
    load: Callable[[], Any] = lambda: None
    needs: tuple[str, ...] = ()
    same: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    about: Callable[[Any], dict[str, Any]] = lambda loaded: {}
    always: bool = False

    def labelled(self) -> list[tuple[tuple[Key, ...], Any]]:
        """Keys of each result from the top, and what to measure."""
        return [(self.at + (label if isinstance(label, tuple) else (label,)), what) for label, what in self.tasks]


@dataclass(frozen=True)
class Benchmark:
    """One script.

    :ivar doc: its docstring; :ivar name: of its JSON; :ivar quick: what ``--quick`` does, in words.
    :ivar problem: options -> what all results share: sizes, seeds, tolerances.
    :ivar groups: options, data directory, results so far (they grow) -> what to measure; later groups are asked for
        when earlier ones are done.
    :ivar perform: what a group loaded, what to measure -> result; with ``alone``, what to measure, the data directory.
    :ivar report: results -> Markdown; :ivar picture: results, path of the JSON -> nothing.
    :ivar say: result -> a few words.
    :ivar alone: the script for which each task runs in a process of its own; of a task that is a dictionary with
        ``"limit"``, for so many seconds at most.
    :ivar failures: whether that something failed is a result too, which is not tried again.
    :ivar rival: what to measure -> whether other packages alone do it, so that its result outlives versions of ours.
    :ivar what: the key without which there is nothing to report.
    :ivar options: adds options to those that every benchmark has.
    :ivar versions: packages whose versions matter beside the usual ones; :ivar head: more that stands in the JSON.
    :ivar prepare: is called with the options, first; :ivar variant: what they add to the name of the JSON.
    :ivar reads_data: whether a directory of data sets is needed.
    """

    doc: str
    name: str
    quick: str
    problem: Callable[[argparse.Namespace], dict[str, Any]]
    groups: Callable[[argparse.Namespace, Path, dict[str, Any]], Iterator[Group]]
    perform: Callable[[Any, Any], dict[str, Any]]
    report: Callable[[dict[str, Any]], str]
    picture: Callable[[dict[str, Any], Path], None] = lambda results, path: None
    say: Callable[[dict[str, Any]], str] = lambda run: ""
    alone: Path | None = None
    failures: bool = False
    rival: Callable[[Any], bool] = lambda what: False
    what: str = "runs"
    options: Callable[[argparse.ArgumentParser], Any] = lambda parser: None
    versions: tuple[str, ...] = ()
    head: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[argparse.Namespace], None] = lambda options: None
    variant: Callable[[argparse.Namespace], str] = lambda options: ""
    reads_data: Callable[[argparse.Namespace], bool] = lambda options: True

    def parse(self, given: Sequence[str] | None = None) -> argparse.Namespace:
        """The options: those that every benchmark has, and this one's."""
        parser = arguments(self.doc, self.quick)
        parser.add_argument("--only", nargs="*", default=[], help="only what has each of these words in its label")
        parser.add_argument("--task", nargs=2, help=argparse.SUPPRESS)
        parser.add_argument("--renew", action="store_true", help="measure anew what is of another version")
        self.options(parser)
        return parser.parse_args(given)

    def main(self, given: Sequence[str] | None = None) -> None:
        """Measure what is missing, then report.

        :param given: options; those of the command line unless told otherwise.
        :raises SystemExit: where there is nothing to report, earlier results are of other parameters, or on Ctrl-C.
        """
        options = self.parse(given)
        if options.task:
            write_json(Path(options.task[1]), self.perform(json.loads(options.task[0]), data_directory(options.data)))
            return
        self.prepare(options)
        path = results_directory(options.out, options.quick) / f"{self.name}{self.variant(options)}.json"
        results = {} if options.fresh else read_json(path)
        if not options.report:
            results = self._measure(options, path, results)
        publish(path, results, self.report, self.what)
        self.picture(results, path)

    def _measure(self, options: argparse.Namespace, path: Path, old: dict[str, Any]) -> dict[str, Any]:
        directory = data_directory(options.data) if self.reads_data(options) else Path()
        problem = plain(self.problem(options))
        if options.renew and old.get("problem") != problem:
            old = {}
        _agree(path, old.get("problem", problem), problem)
        results = {**old, "machine": machine(*self.versions), "problem": problem, **self.head}
        if options.renew:
            self._forget(list(self.groups(options, directory, results)), results, old.get("machine", {}))
        with tqdm(disable=None, unit="run", desc=self.name) as bar:
            try:
                with _stopping():
                    groups = self.groups(options, directory, results)
                    measured = sum(self._run(group, options, directory, path, results, bar) for group in groups)
            except Stopped:
                raise SystemExit(
                    f"Stopped; what was measured is in {path}, and the next run goes on from there."
                ) from None
        if old and not measured:
            results["machine"] = old["machine"]  # that of the results
        write_json(path, results)
        return results

    def _forget(self, groups: list[Group], results: dict[str, Any], before: dict[str, Any]) -> None:
        """Leave out results of other versions of this package; of rivals, those of other versions of theirs."""
        present = _others(results["machine"])
        for keys, what in [labelled for group in groups for labelled in group.labelled()]:
            found = find(results, keys)
            if found is not None and self.rival(what):
                others = found.setdefault("rival", _others(before))
                old = any(present.get(name) not in (None, known) for name, known in others.items())
            else:
                old = found is not None and version(found) != version(results["machine"])
            if old:
                remove(results, keys)

    def _run(
        self, group: Group, options: argparse.Namespace, directory: Path, path: Path, results: dict[str, Any], bar: Any
    ) -> int:
        """Measure what is missing of a group, and return how many results that gave."""
        beside = find(results, group.at[:-1])
        if beside is not None and group.same:
            _agree(path, {key: beside.get(key) for key in group.same}, plain(group.same))
        if find(results, group.at) is not None:
            find(results, group.at[:-1]).update(group.facts)
        todo = [(keys, what) for keys, what in group.labelled() if find(results, keys) is None]
        words = [] if group.always else options.only
        todo = [(keys, what) for keys, what in todo if all(word in words_of(keys) for word in words)]
        missing = [name for name in group.needs if not has_data(directory, name)]
        if todo and missing:
            tqdm.write(f"{words_of(todo[0][0])}: no {', '.join(missing)} in the data directory, left out")
        if not todo or missing:
            return 0
        measured, loaded = 0, group.load()
        for keys, what in todo:
            before = load_average()
            run = self._alone(what, directory) if self.alone is not None else self.perform(loaded, what)
            bar.update()
            if "failed" in run:
                tqdm.write(f"{words_of(keys)} failed: {run['failed']}")
                if not self.failures:
                    continue
            if beside_results := {**group.same, **group.facts, **group.about(loaded)}:
                container(results, group.at).update(beside_results)
            stamp = {"rival": _others(results["machine"])} if self.rival(what) else {}
            put(results, keys, {**run, **stamp, "date": now(), "sources": sources(), "load_before": before})
            measured += 1
            write_json(path, results)
            if "failed" not in run:
                tqdm.write(f"{words_of(keys)}: {self.say(run)}")
        del loaded
        gc.collect()  # before the next problem is loaded
        return measured

    def _alone(self, what: Any, directory: Path) -> dict[str, Any]:
        assert self.alone is not None
        return in_new_process(self.alone, what, directory, what.get("limit") if isinstance(what, dict) else None)


def _others(machine: dict[str, Any]) -> dict[str, str]:
    """Known versions of packages beside this one."""
    return {name: known for name, known in machine["versions"].items() if known and name != "sketchgp"}


def _agree(path: Path, earlier: dict[str, Any], present: dict[str, Any]) -> None:
    changed = [key for key in {**earlier, **present} if earlier.get(key) != present.get(key)]
    if earlier and changed:
        raise SystemExit(
            f"{path.name} holds results of other parameters ({', '.join(changed)}); use --fresh or another --out."
        )


# ------------------------------------------------------------------------------------- results by keys
def find(results: Any, keys: tuple[Key, ...]) -> Any:
    """What lies there, or None."""
    for key in keys:
        if isinstance(key, str):
            results = results.get(key)
        elif isinstance(key, int):
            results = results[key] if key < len(results) else None
        else:
            results = next((one for one in results if key.items() <= one.items()), None)
        if results is None:
            return None
    return results


def container(results: Any, keys: tuple[Key, ...]) -> Any:
    """What holds the last of the keys; what is missing on the way to it is made."""
    for key, after in itertools.pairwise(keys):
        inner = find(results, (key,))
        if inner is None:
            inner = results[key] = {} if isinstance(after, str) else []
        results = inner
    return results


def put(results: dict[str, Any], keys: tuple[Key, ...], value: dict[str, Any]) -> None:
    """Leave a result there; in a list, at its end."""
    holder, last = container(results, keys), keys[-1]
    if isinstance(last, str):
        holder[last] = value
    else:
        holder.append(value if isinstance(last, int) else {**last, **value})


def remove(results: Any, keys: tuple[Key, ...]) -> None:
    """Take a result out; of those that are counted, all after it too."""
    holder, last = find(results, keys[:-1]), keys[-1]
    if isinstance(last, str):
        del holder[last]
    elif isinstance(last, int):
        del holder[last:]
    else:
        holder.remove(find(holder, (last,)))


def words_of(keys: tuple[Key, ...]) -> str:
    """A label for people, without the names of dictionaries."""
    words = [", ".join(map(str, key.values())) if isinstance(key, dict) else str(key) for key in keys[1:]]
    return ", ".join(word for word in words if word != "runs") or str(keys[0])


# --------------------------------------------------------------------------------------------- Ctrl-C
class Stopped(BaseException):
    """Ctrl-C.  Not KeyboardInterrupt, at which a solver would return what it has: that is no measurement."""


@contextlib.contextmanager
def _stopping() -> Iterator[None]:
    def stop(number: int, frame: Any) -> None:
        raise Stopped

    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
