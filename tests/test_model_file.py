"""Saved models: what is loaded is what was saved, code never runs, and a bad file is named with its fault."""

import os
import pickle
import random
from dataclasses import replace

import numpy as np
import pandas
import pytest
import torch

import sketchgp
from cases import each
from sketchgp import tensor_file
from sketchgp.cli import main
from sketchgp.cli.columns import MARKS
from sketchgp.cli.features import Feature
from sketchgp.cli.regression import Regression, Scaling
from sketchgp.errors import InputError
from sketchgp.kernels import BY_NAME
from sketchgp.saved_model import FORMAT, VERSION, SavedModel, read_model, save_model


def make(kernel="matern52", dtype=torch.float32, n=12, d=3, mean="constant"):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(n, d, generator=generator).to(dtype), torch.randn(n, generator=generator).to(dtype)
    model = Regression(x, y, kernel, mean=mean).eval()
    model.covar_module.base_kernel.lengthscale = torch.arange(1.0, d + 1)
    model.likelihood.noise = 0.03
    for parameter in model.mean_module.parameters():
        torch.nn.init.constant_(parameter, 0.2)
    with torch.no_grad():
        system = model.covar_module(x).to_dense().double() + 0.03 * torch.eye(n)
        weights = torch.linalg.solve(system, (y - model.mean_module(x)).double())
    scaling = Scaling(torch.randn(d, generator=generator).double(), torch.ones(d).double() * 2, 3.5, 0.25)
    features = (Feature("a"), Feature("b, or c", "category", ("no", "other")))
    fill = torch.tensor([0.1, 0.3, 0.7], dtype=torch.float64)
    return SavedModel(model, weights, kernel, features, "price", scaling, fill, "mean", ("n.d.",), mean)


@each("kernel", list(BY_NAME))
@each("dtype", [torch.float32, torch.float64])
def test_round_trip(tmp_path, kernel, dtype):
    saved = make(kernel, dtype, mean="linear" if kernel == "exponential" else "constant")
    path = tmp_path / "model.pt"
    save_model(path, saved)
    loaded = read_model(path)
    assert (loaded.kernel, loaded.features, loaded.target) == (kernel, saved.features, "price")
    assert (loaded.missing, loaded.marks) == ("mean", ("n.d.",))
    assert (loaded.scaling.y_mean, loaded.scaling.y_std) == (3.5, 0.25)
    for one, other in [
        (loaded.weights, saved.weights),
        (loaded.fill, saved.fill),
        (loaded.scaling.x_mean, saved.scaling.x_mean),
        (loaded.scaling.x_std, saved.scaling.x_std),
        (loaded.model.train_inputs[0], saved.model.train_inputs[0]),
        (loaded.model.train_targets, saved.model.train_targets),
    ]:
        assert torch.equal(one, other)
        assert one.dtype == other.dtype
    expected, found = saved.model.state_dict(), loaded.model.state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    x = torch.randn(4, 3).to(dtype)
    with torch.no_grad():
        assert torch.equal(loaded.model(x).mean, saved.model(x).mean)


def test_public_loader(tmp_path):
    """Columns are found by name, and predictions are in the target's units."""
    saved = replace(make(dtype=torch.float64), features=(Feature("a"), Feature("b"), Feature("c")), missing="error")
    save_model(tmp_path / "model.pt", saved)
    loaded = sketchgp.load_model(tmp_path / "model.pt")
    assert loaded.features == ("a", "b", "c") and loaded.target == "price" and "12 rows" in repr(loaded)
    raw = np.random.default_rng(0).normal(size=(5, 3))
    table = pandas.DataFrame(raw[:, ::-1], columns=list(loaded.features[::-1])).assign(more="text")
    found = loaded.predict(table)
    x = (torch.from_numpy(raw) - saved.scaling.x_mean) / saved.scaling.x_std
    with torch.no_grad():
        expected = saved.model.likelihood(saved.model(x))
    torch.testing.assert_close(found.mean, expected.mean * 0.25 + 3.5)
    torch.testing.assert_close(found.observation_variance, expected.variance * 0.25**2)
    for same in (raw, torch.from_numpy(raw), {name: list(table[name]) for name in loaded.features}):
        assert torch.equal(loaded.predict(same).mean, found.mean)
    raw[3, 1] = np.nan  # rows are counted from 0, whatever they are given as
    with pytest.raises(InputError, match="column 'b' lacks a value: no value in row 3"):
        loaded.predict(raw)
    with pytest.raises(InputError, match="column 'b' lacks a value: no value in row 3"):
        loaded.predict({name: raw[:, number] for number, name in enumerate(loaded.features)})
    with pytest.raises(InputError, match="no column 'b'"):
        loaded.predict(table.drop(columns="b"))
    with pytest.raises(InputError, match="no such file"):
        sketchgp.load_model(tmp_path / "none.pt")


def test_nothing_but_the_file_is_left_behind(tmp_path):
    save_model(tmp_path / "model.pt", make())
    save_model(tmp_path / "model.pt", make("rbf"))
    assert os.listdir(tmp_path) == ["model.pt"]
    assert read_model(tmp_path / "model.pt").kernel == "rbf"


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "model.pt"
    save_model(path, make())

    def fail(contents, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(InputError, match="No space left"):
        save_model(path, make("rbf"))
    assert os.listdir(tmp_path) == ["model.pt"]
    assert read_model(path).kernel == "matern52"


def test_no_such_folder(tmp_path):
    with pytest.raises(InputError, match="cannot be written"):
        save_model(tmp_path / "absent" / "model.pt", make())


class Trap:
    """Leaves a mark when unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (self.mark,)


@pytest.mark.parametrize("writer", [torch.save, lambda trap, path: path.write_bytes(pickle.dumps(trap))])
def test_loading_never_runs_code(tmp_path, writer):
    mark = tmp_path / "mark"
    path = tmp_path / "model.pt"
    writer({"format": "sketchgp regression", "version": 1, "kernel": Trap(str(mark))}, path)
    with pytest.raises(InputError, match="not a model saved by sketchgp"):
        read_model(path)
    assert not mark.exists()
    if writer is torch.save:
        torch.load(path, weights_only=False)  # the trap does work
        assert mark.exists()


def test_foreign_cut_and_missing_files(tmp_path):
    path = tmp_path / "model.pt"
    with pytest.raises(InputError, match="no such file"):
        read_model(path)
    with pytest.raises(InputError, match="folder"):
        read_model(tmp_path)
    save_model(path, make())
    whole = path.read_bytes()
    for content in [b"", b"hello, world", b"a,b\n1,2\n", whole[: len(whole) // 2], whole[:-30]]:
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"model\.pt"):
            read_model(path)
    torch.save({"weight": torch.zeros(3)}, path)
    with pytest.raises(InputError, match="not a model saved by sketchgp"):
        read_model(path)
    torch.save(torch.zeros(3), path)
    with pytest.raises(InputError, match="not a model saved by sketchgp"):
        read_model(path)


@each(
    ("field", "value", "message"),
    [
        ("version", VERSION + 1, "newer sketchgp"),
        ("version", "1", "version"),
        ("version", 2, "older sketchgp .*command fit"),
        ("kernel", "cubic", "damaged .*cubic"),
        ("features", [{"name": "a", "kind": "number", "categories": []}], "the columns have 1 inputs"),
        ("features", ["a", "b", "c"], "damaged"),
        ("missing", None, "damaged"),
        ("marks", 3, "damaged"),
        ("fill", torch.zeros(2, dtype=torch.float64), "the columns have 3 inputs"),
        ("x_std", torch.zeros(2, dtype=torch.float64), "the columns have 3 inputs"),
        ("hyperparameter.covar_module.base_kernel.raw_lengthscale", torch.zeros(1, 2), "raw_lengthscale"),
    ],
)
def test_fields_have_to_fit_together(tmp_path, field, value, message):
    """The digest tells damage; a file of another program, whose digest is right, is refused too."""
    path = tmp_path / "model.pt"
    save_model(path, make())
    described, tensors = tensor_file.load(path)
    part = described if field in described else tensors
    assert field in part
    if value is None:
        del part[field]
    else:
        part[field] = value
    tensor_file.save(path, described, tensors)
    with pytest.raises(InputError, match=message) as raised:
        read_model(path)
    assert str(path) in str(raised.value)


def test_files_of_the_version_before(tmp_path):
    """They knew no marks of missing values, and had those that are usual."""
    path = tmp_path / "model.pt"
    save_model(path, make())
    described, tensors = tensor_file.load(path)
    assert described.pop("marks") == ["n.d."]
    tensor_file.save(path, {**described, "version": 3}, tensors)
    assert read_model(path).marks == MARKS
    assert read_model(path).features == make().features


def test_the_format_without_a_digest(tmp_path):
    path = tmp_path / "model.pt"
    torch.save({"format": FORMAT, "version": 1, "weights": torch.zeros(3)}, path)
    with pytest.raises(InputError, match=r"before digests .*command fit"):
        read_model(path)


def test_a_damaged_file_is_refused_or_predicts_the_same(tmp_path, capsys):
    """One bit that flips, or some bytes that are garbled, anywhere in the file."""
    path, data, output = tmp_path / "model.pt", tmp_path / "new.csv", tmp_path / "out.csv"
    saved = make()
    save_model(path, saved)
    names = [feature.name for feature in saved.features]
    data.write_text(f'{names[0]},"{names[1]}"\n0,no\n1,other\n2,no\n3,no\n')
    words = ["predict", str(path), str(data), "--output", str(output), "--force"]
    assert main(words) == 0
    contents, expected, chance, refused = path.read_bytes(), output.read_text(), random.Random(0), 0
    for number in range(60):
        position, changed = chance.randrange(len(contents)), bytearray(contents)
        if number % 2:
            changed[position] ^= 1 << chance.randrange(8)
        else:
            changed[position : position + 16] = chance.randbytes(len(changed[position : position + 16]))
        path.write_bytes(changed)
        output.unlink(missing_ok=True)
        capsys.readouterr()
        if main(words) == 0:
            assert output.read_text() == expected, position
        else:
            refused += 1
            assert capsys.readouterr().err.startswith(f"error: {path}"), position
            assert not output.exists()
    assert refused > 15
