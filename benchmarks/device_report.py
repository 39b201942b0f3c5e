"""Tables and picture of ``device.py``, from its JSON; what is missing there is said to be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common import describe, number, table

MISSING = "Not yet measured."
Results = dict[str, Any]


def report(results: Results) -> str:
    """Markdown: one section for each kind of item."""
    items, problem = results["items"], results["problem"]
    sections = [
        f"# One device: {problem['device']}",
        describe(results["machine"]) + " A small setting, which says nothing about speed." * problem["small"],
        "## Limits of the device", _limits(items.get("limits")),
        "## Tests", _tests(items.get("tests")),
        "## Products and gradients", _products(items),
        "## kin40k", _kin40k(items),
        "## Posterior means of many points", _means(items),
        "## EigenPro 4 with many inducing points", _eigenpro(items.get("EigenPro4 with 100,000 points")),
        "## Training steps", _training(items.get("training step")),
        "## Seconds and memory of the items", _items(items),
    ]  # fmt: skip
    return "\n\n".join(sections) + "\n"


def _missing(item: Results | None) -> str | None:
    """What to say of an item without results."""
    if item is None:
        return MISSING
    return f"Failed: {item['failed']}" if "failed" in item else None


def _giga(value: float | None) -> str:
    return number(None if value is None else value / 1e9)


def _limits(item: Results | None) -> str:
    if (words := _missing(item)) is not None or item is None:
        return words or MISSING
    rows = [[f"matrix product, {name}", _giga(rate), "10⁹ flops/s"] for name, rate in item["products"].items()]
    for dtype, rates in item["rates"].items():
        rows += [[f"{name}, {dtype}", _giga(rates[name]), "10⁹/s"] for name in ("exponential", "root", "logarithm")]
    rows.append(["copies, read and written", _giga(item["copied_bytes_per_second"]), "10⁹ bytes/s"])
    return table(["", "rate", "unit"], rows)


def _tests(item: Results | None) -> str:
    if (words := _missing(item)) is not None or item is None:
        return words or MISSING
    if "left_out" in item:
        return f"Left out: {item['left_out']}."
    counts = ", ".join(
        f"{item[word]} {word}" for word in ("passed", "failed", "skipped", "error", "errors") if word in item
    )
    return "\n".join([f"{counts or 'No summary'}.", *(f"- `{line}`" for line in item["failures"])])


def _runs(items: Results, prefix: str) -> list[Results]:
    """Of all items whose names begin so."""
    return [run for name, item in items.items() if name.startswith(prefix) for run in item.get("runs", [])]


def _products(items: Results) -> str:
    runs = sorted(_runs(items, "products"), key=lambda run: (run["d"], run["t"], run.get("n") or 0))
    rows = [
        [run["d"], run["t"], f"{run['n']:,}", run["engine"], " ".join(filter(None, (run["measure"], run["wrt"]))),
         _giga(run["pairs_per_second"]), number(1e3 * run["median_seconds"]), number(run["error"], 2),
         number(run.get("fraction_of_limit"), 2), number(run.get("added_gb"), 2)]
        for run in runs if "pairs_per_second" in run
    ]  # fmt: skip
    text = MISSING
    if rows:
        head = ["d", "t", "n", "engine", "", "10⁹ pairs/s", "ms", "error", "of the limit", "added GB"]
        text = table(head, rows)
        text += (
            "\n\nRBF kernel with a lengthscale for each input, float32. The error is relative, against float64: of 200"
            " rows of a product, of gradients with 2,100 rows. The limit is that of plain float32 matrix products and"
            " exponentials, as measured above: products on tensor cores may exceed it."
        )
    failed = [f"- d = {run['d']}, t = {run['t']}, {run['engine']}, {run['measure']}: {run['failed']}"
              for run in runs if "failed" in run]  # fmt: skip
    for name, item in items.items():
        if name.startswith("products") and (why := item.get("failed", item.get("stopped"))) is not None:
            failed.append(f"- {name}: {why}")
    return "\n".join([text, *([""] if failed else []), *failed])


def _kin40k(items: Results) -> str:
    rows = [
        [number(run["noise"]), run["name"], run.get("iterations"), number(run.get("residual"), 2),
         number(run.get("rmse"), 4), number(run.get("seconds")), number(run.get("peak_memory_gb")),
         run.get("failed", run.get("reason"))]
        for run in _runs(items, "kin40k")
    ]  # fmt: skip
    if not rows:
        return MISSING
    return table(["noise", "solver", "iterations", "residual", "test RMSE", "seconds", "peak GB", "how it ended"], rows)


def _means(items: Results) -> str:
    rows = []
    for name, item in items.items():
        if name.startswith("mean "):
            numbers = [number(item.get(key), digits) for key, digits in
                       (("residual", 2), ("rmse", 4), ("seconds", 3), ("peak_memory_gb", 3))]  # fmt: skip
            ended = item.get("failed", item.get("reason"))
            rows.append([name.removeprefix("mean "), item.get("n"), item.get("iterations"), *numbers, ended])
    if not rows:
        return MISSING
    return table(["", "n", "iterations", "residual", "held-out RMSE", "seconds", "peak GB", "how it ended"], rows)


def _eigenpro(item: Results | None) -> str:
    if (words := _missing(item)) is not None or item is None:
        return words or MISSING
    return (
        f"{item['m']:,} inducing points, {item['n']:,} rows: {item['iterations']} batches in "
        f"{number(item['seconds'])} s ({number(item['setup_seconds'])} s of it set-up), "
        f"accuracy {number(item['accuracy'], 4)}, peak memory {number(item.get('peak_memory_gb'))} GB."
    )


def _training(item: Results | None) -> str:
    if (words := _missing(item)) is not None or item is None:
        return words or MISSING
    rows = [[f"{item['n']:,}", i, number(run.get("seconds")), number(run.get("peak_memory_gb")),
             run.get("failed", number(run.get("loss"), 5))] for i, run in enumerate(item["runs"], 1)]  # fmt: skip
    return table(["n", "step", "seconds", "peak GB", "loss"], rows)


def _items(items: Results) -> str:
    rows = [[name, number(item.get("seconds")), number(item.get("peak_memory_gb")), item.get("failed", "")]
            for name, item in items.items()]  # fmt: skip
    text = table(["item", "seconds", "peak GB", ""], rows)
    said = {(name, word) for name, item in items.items() for run in (item, *item.get("runs", ()))
            for word in run.get("warnings", ())}  # fmt: skip
    return "\n".join([text, *([""] if said else []), *(f"- {name} warned: {word}" for name, word in sorted(said))])


def picture(results: Results, path: Path) -> None:
    """Pairs a second of products against the features, a panel for each number of columns."""
    runs = [
        run for run in _runs(results["items"], "products") if "pairs_per_second" in run and run["measure"] == "product"
    ]
    runs = [run for run in runs if run["n"] <= 200_000]
    if not runs:
        return
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        print("No picture: matplotlib is not installed.")
        return
    columns = sorted({run["t"] for run in runs})
    figure, axes = pyplot.subplots(1, len(columns), figsize=(4 * len(columns), 3.6), sharey=True, squeeze=False)
    for axis, t in zip(axes[0], columns, strict=True):
        for engine in dict.fromkeys(run["engine"] for run in runs):
            points = sorted(
                (run["d"], run["pairs_per_second"]) for run in runs if run["engine"] == engine and run["t"] == t
            )
            if points:
                axis.loglog(*zip(*points, strict=True), "o-", label=engine, markersize=3)
        axis.set(title=f"{t} column{'s' * (t > 1)}", xlabel="features")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("pairs a second")
    axes[0][-1].legend(fontsize="small")
    figure.suptitle(results["problem"]["device"])
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
