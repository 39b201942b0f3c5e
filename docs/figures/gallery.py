"""Runs the tutorial and the examples, and keeps what they draw and print: ``python docs/figures/gallery.py [NAME]``.

Pictures go beside this file. What the blocks of ``docs/tutorial.md`` print goes into ``tutorial.json`` and, below each
block, into the page. ``SKETCHGP_DATA`` names the directory of QM7 and of the land surface temperatures.
"""

import contextlib
import io
import json
import os
import re
import runpy
import sys
import tempfile
import textwrap
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import torch

import sketchgp

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DATA = os.environ.get("SKETCHGP_DATA", "")
EXAMPLES = {  # with their arguments
    "classification": ["--rows", "5000", "--features", "1024"],
    "compare_solvers": ["--rows", "2000", "--seconds", "10"],
    "huge_mean": ["--rows", "8000", "--seconds", "4"],
    "molecules": ["--rows", "2000", "--data", f"{DATA}/qm7_atomization_cm.npz"],
    "spatial_map": [],
    "tune_on_all_rows": ["--rows", "4000", "--iterations", "8"],
}


def example(name: str) -> None:
    """Runs one, in the folder that it finds itself in."""
    sys.argv = [name, *EXAMPLES[name], "--picture", str(HERE / f"{name}.png")]
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")


def tutorial() -> None:
    """Runs the page block by block and writes what each prints below it."""
    page = ROOT / "docs" / "tutorial.md"
    text, names, printed = page.read_text(encoding="utf-8"), {"__name__": "tutorial"}, []

    def run(match: re.Match[str]) -> str:
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(match["code"], names)
        lines = [part for line in output.getvalue().splitlines() for part in textwrap.wrap(line, 88)]
        printed.append(lines)
        return f"```python\n{match['code']}```\n" + ("\n```text\n" + "\n".join(lines) + "\n```\n" if lines else "")

    blocks = r"^```python\n(?P<code>.*?)^```\n(\n```text\n.*?^```\n)?"
    text = re.sub(blocks, run, text, flags=re.DOTALL | re.MULTILINE)
    Path("tutorial.png").replace(HERE / "tutorial.png")
    about = {"torch": torch.__version__, "sketchgp": sketchgp.__version__, "threads": torch.get_num_threads()}
    (HERE / "tutorial.json").write_text(json.dumps({**about, "printed": printed}, indent=1) + "\n", encoding="utf-8")
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    wanted = sys.argv[1:] or ["tutorial", *EXAMPLES]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for each in wanted:
            print(f"=== {each}")
            tutorial() if each == "tutorial" else example(each)
