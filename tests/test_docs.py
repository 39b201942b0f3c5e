"""The pages say what is so: links lead somewhere, code runs, names and arguments exist."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
from pathlib import Path

import gpytorch
import pytest
import torch

import sketchgp
from cases import each
from sketchgp.cli import main
from test_floors import FLOORS, SOURCE

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
PAGE_IDS = [str(page.relative_to(ROOT)) for page in PAGES]


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """What GitHub and mkdocs make of the headings of a page."""
    headings = re.findall(r"^#+ +(.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@each("page", PAGES, ids=PAGE_IDS)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        linked = (page.parent / file).resolve() if file else page
        assert linked.exists(), f"{page.name} links to {target}, which is not there"
        if anchor:
            assert anchor in anchors(linked), f"{page.name} links to {target}, which has no such heading"


@each("page", PAGES, ids=PAGE_IDS)
def test_names_and_arguments_exist(page):
    for name in re.findall(r"\bsketchgp\.([A-Za-z_]\w*)", page.read_text(encoding="utf-8")):
        assert hasattr(sketchgp, name) or name in FLOORS, f"{page.name} speaks of sketchgp.{name}"
    for block in python_blocks(page):
        for node in ast.walk(ast.parse(block)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id == "sketchgp"
            ):
                thing = getattr(sketchgp, node.func.attr)
                keywords = {word.arg: None for word in node.keywords if word.arg}
                inspect.signature(thing).bind(*[None] * len(node.args), **keywords)


@each("page", PAGES, ids=PAGE_IDS)
def test_settings_of_gpytorch_exist(page):
    for name in re.findall(r"\bgpytorch\.settings\.([a-z_]+)", page.read_text(encoding="utf-8")):
        assert hasattr(gpytorch.settings, name), f"{page.name} speaks of gpytorch.settings.{name}"


class MyExactGP(gpytorch.models.ExactGP):
    def __init__(self, train_x, train_y, likelihood):
        super().__init__(train_x, train_y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def names_for_the_pages() -> dict[str, object]:
    """What the pages take for granted: a small problem on more points than GPyTorch gives to Cholesky."""
    x = torch.rand(900, 2)
    y = torch.sin(6 * x[:, 0]) + x[:, 1] + 0.1 * torch.randn(900)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
    return {
        "torch": torch,
        "gpytorch": gpytorch,
        "sketchgp": sketchgp,
        "MyExactGP": MyExactGP,
        "likelihood": likelihood,
        "model": MyExactGP(x, y, likelihood),
        "kernel": kernel,
        "x": x,
        "y": y,
        "train_x": x,
        "train_y": y,
        "test_x": torch.rand(20, 2),
        "test_y": torch.rand(20),
        "val_x": torch.rand(20, 2),
        "val_y": torch.rand(20),
        "mean": gpytorch.means.ConstantMean(),
        "loader": torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=100, shuffle=True),
        "train_labels": (3 * x[:, 0]).long(),
    }


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if python_blocks(page)], ids=lambda page: page.name)
def test_code_runs(page, capsys, tmp_path, monkeypatch):
    """The Python blocks of a page, in order, in one namespace; fits end after two steps, streams after one epoch."""
    monkeypatch.chdir(tmp_path)  # some of it writes files
    fit = sketchgp.fit
    monkeypatch.setattr(sketchgp, "fit", lambda *args, **options: fit(*args, **{**options, "iterations": 2}))
    monkeypatch.setattr(sketchgp.DoublyStochastic, "_epochs", staticmethod(lambda problem, batch: 1))
    names = names_for_the_pages()
    for block in python_blocks(page):
        exec(compile(block, page.name, "exec"), names)
    capsys.readouterr()


def test_the_architecture_lists_every_part_of_the_package():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    parts = {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    files = {path.name for path in SOURCE.glob("*.py")} - {"__init__.py"}
    missing = [part for part in parts if f"`{part}/`" not in text] + [f for f in files if f"`{f}`" not in text]
    assert not missing, f"the table of floors in docs/architecture.md lacks {missing}"


def test_the_architecture_has_the_same_floors():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d) \| (.+?) \|", text, flags=re.MULTILINE)
    listed = {name.strip("`/").removesuffix(".py"): int(floor) for floor, names in rows for name in names.split(", ")}
    assert listed == {name: floor for name, floor in FLOORS.items() if name != "__init__"}


def test_contents_lists_every_page():
    """Every page is in the table of contents of its folder, which the front page has."""
    for page in sorted((ROOT / "docs").rglob("*.md")):
        index = ROOT / "docs" / "index.md" if page.stem == "index" else page.parent / "index.md"
        name = page.relative_to(index.parent).with_suffix("").as_posix()
        trees = re.findall(
            r"^```{toctree}\n(.*?)^```", index.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
        )
        lines = [line for tree in trees for line in tree.splitlines()]
        assert page == index or name in lines, f"a toctree of {index.relative_to(ROOT)} lacks {name}"


def test_the_reference_has_every_public_name():
    listed = []
    for page in (ROOT / "docs" / "api").glob("*.md"):
        module = ""
        for word, name in re.findall(r"^\.\. (\w+):: ([\w.]+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
            if word == "currentmodule":
                module = name
            else:
                assert hasattr(importlib.import_module(module), name), f"{page.name} has {module}.{name}"
                listed.append(name if module == "sketchgp" else f"{module}.{name}")
    assert len(listed) == len(set(listed))
    missing = set(sketchgp.__all__) - set(listed) - {"settings"}  # a module, whose names are listed
    for part in ("botorch", "operators", "plotting", "sklearn"):
        names = importlib.import_module(f"sketchgp.{part}").__all__
        missing |= {f"sketchgp.{part}.{name}" for name in names} - set(listed)
    missing |= {f"sketchgp.settings.{name}" for name in ("memory_budget", "variance")} - set(listed)
    assert not missing, f"docs/api lacks {missing}"


@pytest.mark.parametrize(
    ("command", "words"),
    [("demo", ["--full", "--skip-gpytorch"]), ("fit", ["--target", "--kernel", "--save"]), ("predict", [])],
)
def test_help_of_the_command_line_has_what_the_readme_shows(command, words, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in words)


def test_the_tutorial_prints_what_it_printed():
    """The numbers of the page are those that docs/figures/gallery.py has kept of its run."""
    text = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    kept = json.loads((ROOT / "docs" / "figures" / "tutorial.json").read_text(encoding="utf-8"))["printed"]
    shown = re.findall(r"^```text\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    assert len(kept) == len(python_blocks(ROOT / "docs" / "tutorial.md"))
    assert [block.splitlines() for block in shown] == [lines for lines in kept if lines]


def test_the_citation_and_the_changelog_have_the_version():
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {sketchgp.__version__}\n" in text
    (date,) = re.findall(r"^date-released: (\S+)$", text, flags=re.MULTILINE)
    released = re.findall(r"^## \[(\d\S+)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.M)
    assert released[0] == (sketchgp.__version__, date)
    page = (ROOT / "docs" / "citing.md").read_text(encoding="utf-8")
    papers = re.findall(r"arxiv\.org/abs/([\d.]+)", text)
    assert len(papers) > 10 and all(f"arXiv:{paper}" in page for paper in papers)


METHOD = ["What it computes", "When to take it", "Cost", "Options", "In numbers"]
OF_ALL_ITERATIVE_SOLVERS = {"max_seconds", "checkpoint", "every"}


def test_every_method_has_a_page():
    """Pages of methods have the same headings, and name the arguments of the class with their defaults."""
    solvers, preconditioners = sketchgp.solvers, sketchgp.preconditioners
    methods = {kind.__name__ for kind in (*solvers.FULL_SOLVERS, *solvers.INDUCING_POINT_SOLVERS)}
    methods |= {"DoublyStochastic"}
    methods |= {name for name in preconditioners.__all__ if hasattr(sketchgp, name)}
    signed = []
    for page in (ROOT / "docs" / "methods").glob("*.md"):
        if page.stem == "index":
            continue
        text = page.read_text(encoding="utf-8")
        assert re.findall(r"^## (.+)$", text, flags=re.MULTILINE) == METHOD, page.name
        (name,) = re.findall(r"^Signature: {py:class}`sketchgp\.(\w+)`\.$", text, flags=re.MULTILINE)
        signed.append(name)
        options = text[text.index("\n## Options\n") : text.index("\n## In numbers\n")]
        rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (?:`(.+?)` )?\|", options, flags=re.MULTILINE)
        parameters = inspect.signature(getattr(sketchgp, name)).parameters
        listed = {argument: default for row, default in rows for argument in re.findall(r"\w+", row)}
        assert set(listed) == set(parameters) - OF_ALL_ITERATIVE_SOLVERS, page.name
        assert ("checkpoint" in parameters) == all(f"`{word}`" in options for word in OF_ALL_ITERATIVE_SOLVERS)
        for argument, default in listed.items():
            given = parameters[argument].default
            assert default == "" or ast.literal_eval(default) == given, f"{page.name}: {argument}"
    assert sorted(signed) == sorted(methods)
