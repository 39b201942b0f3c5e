"""The commands as a user runs them: fit, predict and demo, on small data, and one line for every fault."""

import csv
import os
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import sketchgp
from cases import each
from sketchgp.cli import main
from sketchgp.cli.demo import QUICK as QUICK_DEMO
from sketchgp.errors import NumericalError, warn
from sketchgp.saved_model import LoadedModel, read_model

N = 240


def make_rows(seed=0, n=N, noise=2):
    generator = np.random.default_rng(seed)
    length, width = generator.uniform(10, 20, n), generator.uniform(-1, 1, n)
    price = 1000 + 50 * np.sin(length) + 30 * width + generator.normal(0, noise, n)
    return {"length": length, "width": width, "price": price}


def write_csv(path, columns):
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return str(path)


@pytest.fixture
def data(tmp_path):
    return write_csv(tmp_path / "data.csv", make_rows())


def run(capsys, *words):
    """Exit code, stdout and stderr of one command."""
    capsys.readouterr()
    code = main([str(word) for word in words])
    return code, *capsys.readouterr()


def fails(capsys, *words):
    """The one line that a command ends with when its input is wrong."""
    code, _, error = run(capsys, *words)
    assert code == 2
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error


QUICK = ["--iterations", 15, "--subset", 150]
SHORT = ["--iterations", 2, "--subset", 60]  # where it does not matter how well the model fits


@pytest.mark.parametrize("noise", [0, 2])
def test_a_noise_at_its_limit_is_named(noise, tmp_path, capsys):
    path = write_csv(tmp_path / "data.csv", make_rows(noise=noise))
    code, out, _ = run(capsys, "fit", path, "--target", "price", "--iterations", 40)
    assert code == 0
    assert ("noise ended at its limit, 1e-05 of the target's variance" in out) == (noise == 0)


def test_fit_then_predict_a_csv(tmp_path, data, capsys):
    model = tmp_path / "model.pt"
    code, out, _ = run(capsys, "fit", data, "--target", "price", "--save", model, *QUICK)
    assert code == 0
    assert "216 training and 24 held-out rows" in out
    assert "random subset of 150 of the 216 training rows" in out
    assert "the training mean" in out
    assert f"saved: {model}" in out

    fresh = make_rows(seed=1, n=40)
    output = tmp_path / "predictions.csv"
    code, out, _ = run(capsys, "predict", model, write_csv(tmp_path / "new.csv", fresh), "--output", output)
    assert code == 0
    assert "on 216 training rows" in out
    with open(output, newline="") as file:
        rows = list(csv.DictReader(file))
    mean, std = np.array([[float(row["mean"]), float(row["std"])] for row in rows]).T
    error = np.sqrt(np.mean((mean - fresh["price"]) ** 2))
    assert error < 8 < fresh["price"].std() / 3  # the noise has deviation 2
    assert np.all((std > 1) & (std < 20))
    assert np.mean(np.abs(mean - fresh["price"]) < 3 * std) > 0.9
    assert f"RMSE {error:.4g}" in out

    del fresh["price"]
    code, out, _ = run(capsys, "predict", model, write_csv(tmp_path / "new.csv", fresh))
    assert code == 0
    assert "RMSE" not in out
    shown = [line.split() for line in out.splitlines() if line.split()[:1] == ["1"]]
    np.testing.assert_allclose([float(shown[0][1]), float(shown[0][2])], [mean[0], std[0]], rtol=1e-3)
    assert "30 more rows" in out


def test_saved_predictions_are_those_of_the_exact_gp(tmp_path, data, capsys):
    """The saved weights give the mean; the variance is exact at this size: both against dense float64."""
    model = tmp_path / "model.pt"
    assert run(capsys, "fit", data, "--target", "price", "--save", model, "--float64", *QUICK)[0] == 0
    scaling, gp = read_model(model).scaling, read_model(model).model
    x = torch.randn(7, 2, dtype=torch.float64)
    prediction = sketchgp.load_model(model).predict(x * scaling.x_std + scaling.x_mean)
    mean = scaling.scale_y(prediction.mean, torch.float64)
    variance = prediction.observation_variance / scaling.y_std**2
    train_x, train_y = gp.train_inputs[0], gp.train_targets
    noise = gp.likelihood.noise.item()
    with torch.no_grad():
        system = gp.covar_module(train_x).to_dense() + noise * torch.eye(len(train_x))
        cross = gp.covar_module(x, train_x).to_dense()
        constant = gp.mean_module.constant
        expected = constant + cross @ torch.linalg.solve(system, train_y - constant)
        prior = gp.covar_module(x).to_dense().diagonal() + noise
        expected_variance = prior - (cross * torch.linalg.solve(system, cross.T).T).sum(-1)
    torch.testing.assert_close(mean, expected, atol=3e-3, rtol=0)
    torch.testing.assert_close(variance, expected_variance, atol=0, rtol=2e-2)


def test_prediction_uses_the_saved_weights(tmp_path, data, capsys):
    model = tmp_path / "model.pt"
    run(capsys, "fit", data, "--target", "price", "--save", model, *QUICK)
    saved, x = read_model(model), torch.randn(7, 2) * 3
    mean = sketchgp.load_model(model).predict(x).mean
    without = replace(read_model(model), weights=torch.zeros_like(saved.weights))
    constant = saved.scaling.unscale_mean(saved.model.mean_module.constant.detach())
    torch.testing.assert_close(LoadedModel(without).predict(x).mean, constant.expand(7), atol=1e-4, rtol=0)
    assert (mean - constant).abs().max() > 1


@pytest.mark.parametrize(("kernel", "mean"), [("exponential", "linear"), ("matern32", "constant"), ("rbf", "linear")])
def test_other_kernels_and_means(tmp_path, data, capsys, kernel, mean):
    model = tmp_path / "model.pt"
    code, _, _ = run(
        capsys, "fit", data, "--target", "price", "--kernel", kernel, "--mean", mean, "--save", model, *SHORT
    )
    assert code == 0
    code, out, _ = run(capsys, "predict", model, data)
    assert code == 0
    assert kernel in out
    weights = getattr(read_model(model).model.mean_module, "weights", None)
    assert weights is None if mean == "constant" else bool((weights != 0).all())


def test_parquet(tmp_path, capsys):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "data.parquet"
    parquet.write_table(pyarrow.table(make_rows()), path)
    code, out, _ = run(capsys, "fit", path, "--target", "price", *SHORT)
    assert code == 0
    assert "price by 2 feature(s) (length, width)" in out


def test_features_and_drop(tmp_path, capsys):
    rows = make_rows()
    path = write_csv(tmp_path / "data.csv", {"id": ["a"] * N, **rows, "one": [1.0] * N})
    code, out, _ = run(capsys, "fit", path, "--target", "price", "--drop", "id", *SHORT)
    assert code == 0
    assert "constant in the training rows: one" in out
    assert "price by 2 feature(s) (length, width)" in out
    code, out, _ = run(capsys, "fit", path, "--target", "price", "--features", "width", *SHORT)
    assert code == 0
    assert "price by 1 feature(s) (width)" in out


def test_files_are_not_destroyed(tmp_path, data, capsys, monkeypatch):
    """An input is never written over, under no name; anything else only with --force.  Found before the work."""
    model, table = tmp_path / "model.pt", Path(data).read_bytes()
    fit = ["fit", data, "--target", "price", *SHORT]
    assert run(capsys, *fit, "--save", model)[0] == 0
    whole = model.read_bytes()
    link, hard = tmp_path / "link.csv", tmp_path / "hard.pt"
    link.symlink_to(data)
    os.link(model, hard)
    monkeypatch.setattr("sketchgp.cli.fit.tune", None)
    with monkeypatch.context() as patch:
        patch.setattr("sketchgp.cli.predict.predict_rows", None)
        for force in ([], ["--force"]):
            for words in (
                [*fit, "--save", data],
                [*fit, "--save", link],
                ["fit", link, "--target", "price", "--save", data],
                ["predict", model, data, "--output", data],
                ["predict", model, data, "--output", model],
                ["predict", model, data, "--output", hard],
                ["predict", model, link, "--output", data],
            ):
                assert "which the command reads" in fails(capsys, *words, *force)
        other = tmp_path / "other.csv"
        other.write_text("mine")
        for words in (
            [*fit, "--save", model],
            ["predict", model, data, "--output", other],
        ):
            assert "--force" in fails(capsys, *words)
    assert (Path(data).read_bytes(), model.read_bytes(), other.read_text()) == (table, whole, "mine")
    assert run(capsys, "predict", model, data, "--output", other, "--force")[0] == 0
    assert other.read_text().startswith("mean,std")


def test_a_file_that_appears_while_the_work_goes_on_is_kept(tmp_path, data, capsys, monkeypatch):
    from sketchgp import saved_model

    model, output = tmp_path / "model.pt", tmp_path / "out.csv"
    run(capsys, "fit", data, "--target", "price", "--save", model, *SHORT)
    original = saved_model.predict_rows

    def slow(*words):
        output.write_text("mine")
        return original(*words)

    monkeypatch.setattr("sketchgp.cli.predict.predict_rows", slow)
    error = fails(capsys, "predict", model, data, "--output", output)
    assert output.read_text() == "mine"
    with open(error.split(" is in ")[1].strip()) as kept:
        assert kept.readline() == "mean,std\n"


def test_no_held_out_rows(tmp_path, data, capsys):
    model = tmp_path / "model.pt"
    code, out, _ = run(capsys, "fit", data, "--target", "price", "--test-fraction", 0, "--save", model, *SHORT)
    assert code == 0
    assert "240 training and 0 held-out rows" in out
    assert run(capsys, "predict", model, data)[0] == 0


def test_same_seed_same_result(data, capsys):
    def result(seed):
        lines = run(capsys, "fit", data, "--target", "price", "--seed", seed, *SHORT)[1].splitlines()
        return lines[-1]

    assert result(3) == result(3)
    assert result(3) != result(4)


def test_fit_faults(tmp_path, data, capsys):
    assert "absent.csv: no such file" in fails(capsys, "fit", tmp_path / "absent.csv", "--target", "y")
    error = fails(capsys, "fit", data, "--target", "prise")
    assert "--target: no column 'prise' (did you mean 'price'?); the columns are length, width, price" in error
    assert "--features: no column 'w'" in fails(capsys, "fit", data, "--target", "price", "--features", "w")
    assert "'price' is the target" in fails(capsys, "fit", data, "--target", "price", "--features", "price")
    assert "'price' is the target" in fails(capsys, "fit", data, "--target", "price", "--drop", "price")
    assert "named twice" in fails(capsys, "fit", data, "--target", "price", "--features", "width,width")
    assert "no columns are left" in fails(capsys, "fit", data, "--target", "price", "--drop", "width,length")
    assert "does not exist" in fails(capsys, "fit", data, "--target", "price", "--save", tmp_path / "no" / "m.pt")
    for words, said in (
        (["--categorical", "price"], "sketchgp.OneHot"),
        (["--categorical", "width", "--drop", "width"], "'width' is not among the features"),
        (["--rank", 5, "--solver", "askotch"], "--solver askotch has none"),
        (["--picture", tmp_path / "p.png", "--test-fraction", 0], "--test-fraction 0 leaves none"),
    ):
        assert said in fails(capsys, "fit", data, "--target", "price", *words)


def test_fit_faults_in_the_data(tmp_path, capsys):
    def error(columns):
        return fails(capsys, "fit", write_csv(tmp_path / "data.csv", columns), "--target", "y")

    assert "1 row(s) of data; at least 2" in error({"a": [1], "y": [2]})
    assert "'y': the target has one value (2)" in error({"a": range(30), "y": [2] * 30})
    assert "every feature is constant" in error({"a": [1] * 30, "y": range(30)})
    assert "column 'a' holds numbers in 2 row(s) and 'x' in row 3" in error({"a": [1, 2, "x"], "y": [1, 2, 3]})
    names = [f"stone {number}" for number in range(30)]
    many = error({"name": names, "y": range(30)})
    assert "'name' is text with 30 different values in 30 rows" in many
    assert all(remedy in many for remedy in ("--drop name", "--categorical name"))
    assert "'y' holds '2024-05-06' in row 1: a date" in error({"a": [1, 2], "y": ["2024-05-06", 3]})
    dear = error({"a": [1, 2], "y": ["dear", "cheap"]})
    assert "'y' holds 'dear' in row 1, 'cheap' in row 2" in dear and "--categorical" not in dear
    lacking = {"a": [1, None, 3], "b": [None, 2, 3], "y": [1, 2, 3]}
    path = write_csv(tmp_path / "data.csv", lacking)
    code, _, found = run(capsys, "fit", path, "--target", "y")
    assert code == 2 and "2 faults" in found and "column 'a' lacks a value: no value in row 2" in found
    assert "column 'b' lacks a value: no value in row 1" in found
    assert all(remedy in found for remedy in ("missing to drop or mean",))
    lacking["b"][2] = None
    path = write_csv(tmp_path / "data.csv", lacking)
    found = fails(capsys, "fit", path, "--target", "y", "--missing", "drop")
    assert "no row is without a missing value (in a, b)" in found


def test_predict_faults(tmp_path, data, capsys):
    model = tmp_path / "model.pt"
    assert "model.pt: no such file" in fails(capsys, "predict", model, data)
    run(capsys, "fit", data, "--target", "price", "--save", model, *SHORT)
    rows = make_rows(n=5)
    del rows["width"]
    error = fails(capsys, "predict", model, write_csv(tmp_path / "new.csv", rows))
    assert "columns of the model: no column 'width'; the columns are length, price" in error
    assert "not a model saved by sketchgp" in fails(capsys, "predict", data, data)
    assert "cannot be written" in fails(capsys, "predict", model, data, "--output", tmp_path / "no" / "p.csv")


def test_rows_to_predict_lack_their_target(tmp_path, data, capsys):
    """An empty cell, a mark or NaN, in some rows or all, in every kind of file; features may lack nothing."""
    pandas = pytest.importorskip("pandas")
    model, output = tmp_path / "model.pt", tmp_path / "out.csv"
    run(capsys, "fit", data, "--target", "price", "--save", model, *SHORT)
    rows = make_rows(seed=1, n=8)

    def predicted(name, columns):
        path = tmp_path / name
        frame = pandas.DataFrame(columns)
        if path.suffix == ".csv":
            write_csv(path, columns)
        else:
            frame.to_parquet(path)
        output.unlink(missing_ok=True)
        code, out, _ = run(capsys, "predict", model, path, "--output", output)
        assert code == 0
        return np.loadtxt(output, delimiter=",", skiprows=1), out

    expected, out = predicted("all.csv", rows)
    assert "against column 'price': RMSE" in out
    some = {**rows, "price": [*rows["price"][:3], *[None] * 5]}
    none = {**rows, "price": [None] * 8}
    marked = {**rows, "price": [*rows["price"][:3], "", "NA", "?", "nan", " "]}
    for name, columns in (("a.csv", some), ("b.csv", marked), ("c.parquet", some)):
        found, out = predicted(name, columns)
        np.testing.assert_array_equal(found, expected)
        assert "against column 'price', known in 3 of 8 rows: RMSE" in out
    for name in ("e.csv", "f.parquet"):
        found, out = predicted(name, none)
        np.testing.assert_array_equal(found, expected)
        assert "column 'price' is empty" in out
    for lacking in ({**rows, "width": [None, *rows["width"][1:]]}, {**rows, "width": ["wide"] * 8}):
        error = fails(capsys, "predict", model, write_csv(tmp_path / "bad.csv", lacking))
        assert "'width'" in error and "--drop" not in error
    error = fails(capsys, "predict", model, write_csv(tmp_path / "bad.csv", {**rows, "price": ["dear"] * 8}))
    assert "'dear'" in error and "--drop" not in error


def make_stones(seed=0, n=N):
    """A table as people have them: names, categories, yes or no, and a code that is no number."""
    generator = np.random.default_rng(seed)
    cut, code = generator.choice(["Fair", "Good", "Ideal"], n), generator.choice([3, 7, 12], n)
    certified, carat = generator.choice(["Yes", "no", "yes"], n), generator.uniform(0.5, 2, n)
    price = 5 * carat + (cut == "Ideal") + 2 * (code == 7) + 0.5 * (certified != "no") + 0.05 * generator.normal(size=n)
    names = [f"stone {number}" for number in range(n)]
    columns = {"name": names, "carat": carat, "cut": cut, "code": code, "certified": certified, "price": price}
    return {key: list(column) for key, column in columns.items()}


def predictions(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_categories_and_missing_values(tmp_path, capsys):
    """Remembered in the saved model; whatever the order of columns and rows, the encoding and the separator."""
    model, output, stones = tmp_path / "model.pt", tmp_path / "out.csv", make_stones()
    for row, column in ((3, "carat"), (5, "cut"), (8, "price")):
        stones[column][row] = ""
    data = write_csv(tmp_path / "stones.csv", stones)
    words = ["fit", data, "--target", "price", "--categorical", "code", "--drop", "name", "--save", model, *QUICK]
    code, out, _ = run(capsys, *words, "--missing", "mean")
    assert code == 0
    assert "1 of 240 rows are left out: 'price' is missing" in out
    assert "missing values in 2 rows (carat, cut)" in out
    assert "numbers, standardised to mean 0 and deviation 1: carat\n" in out
    assert "yes or no, as 1 or 0, standardised: certified\n" in out
    assert "categories, one 0/1 input for each: cut (3), code (3)\n" in out
    assert "the target, standardised" in out
    scaling = read_model(model).scaling  # carat, three cuts, three codes, certified
    assert (scaling.x_std == 1).tolist() == (scaling.x_mean == 0).tolist() == [False, *[True] * 6, False]

    fresh = make_stones(seed=1, n=40)
    new = tmp_path / "new.csv"
    lines = [";".join(map(str, row)) for row in zip(*(fresh[name] for name in list(fresh)[::-1]), strict=True)]
    new.write_text("\n".join([";".join(list(fresh)[::-1]), *lines]), encoding="utf-16")
    assert run(capsys, "predict", model, new, "--output", output, "--encoding", "utf-16")[0] == 0
    found = predictions(output)
    errors = np.array([float(row["mean"]) for row in found]) - fresh["price"]
    assert np.sqrt(np.mean(errors**2)) < 0.3  # 0.5 without what is known of certificates, 1 without cuts

    loaded, ten = sketchgp.load_model(model), {name: column[:10] for name, column in fresh.items()}
    made = loaded.predict({name: torch.tensor(one) if name == "carat" else one for name, one in ten.items()})
    std = made.observation_variance.sqrt()
    np.testing.assert_allclose(made.mean, [float(row["mean"]) for row in found[:10]], rtol=1e-6)
    np.testing.assert_allclose(std, [float(row["std"]) for row in found[:10]], rtol=1e-3)
    ten["carat"][3] = None
    assert loaded.predict(ten, missing="drop").mean.isnan().tolist() == [row == 3 for row in range(10)]
    with pytest.raises(sketchgp.InputError, match=r"column 'carat' lacks a value: no value in row 3.*to drop or mean"):
        loaded.predict(ten, missing="error")
    with pytest.raises(sketchgp.InputError, match=r"not seen.*option unknown to missing"):
        loaded.predict({**ten, "cut": ["Superb"] * 10}, missing="mean")
    with pytest.raises(sketchgp.InputError, match="no column 'cut'"):
        loaded.predict({name: column for name, column in ten.items() if name != "cut"})

    fresh["carat"][0], fresh["cut"][1] = None, "NA"
    lacking = write_csv(tmp_path / "lacking.csv", fresh)
    code, out, _ = run(capsys, "predict", model, lacking, "--output", output, "--force", "--missing", "drop")
    assert code == 0 and "2 row(s) lack a value ('NA' among them), and get no prediction" in out
    dropped = predictions(output)
    assert dropped[0] == {"mean": "", "std": ""} and dropped[1]["mean"] == ""
    for row, one in zip(dropped[2:], found[2:], strict=True):
        assert float(row["mean"]) == pytest.approx(float(one["mean"]), rel=1e-4)
    code, out, _ = run(capsys, "predict", model, lacking, "--output", output, "--force")  # as fit was told
    assert code == 0 and "2 row(s) lack a value ('NA' among them), and are filled with the mean" in out
    assert float(predictions(output)[0]["std"]) > 0
    code, _, error = run(capsys, "predict", model, lacking, "--missing", "error")
    assert code == 2 and "column 'carat' lacks a value: no value in row 1" in error
    assert "column 'cut' lacks a value: 'NA' in row 2" in error
    fresh["carat"][0] = 1.0

    fresh["cut"][1] = "Superb"
    strange = write_csv(tmp_path / "strange.csv", fresh)
    error = fails(capsys, "predict", model, strange)
    assert (
        "column 'cut' holds 'Superb' in row 2" in error
        and "'Fair', 'Good', 'Ideal'" in error
        and "option unknown" in error
    )
    words = ["predict", model, strange, "--unknown", "missing", "--output", output, "--force", "--missing"]
    error = fails(capsys, *words, "error")
    assert "column 'cut' holds 'Superb' in row 2" in error and "missing to drop or mean" in error
    code, out, _ = run(capsys, *words, "drop")
    assert code == 0 and "'cut' has categories that the model has not seen in 1 row(s)" in out
    assert [row["mean"] == "" for row in predictions(output)[:3]] == [False, True, False]
    fresh["cut"][1], fresh["certified"][2] = "Fair", "perhaps"
    error = fails(capsys, "predict", model, write_csv(tmp_path / "strange.csv", fresh))
    assert "column 'certified' holds 'perhaps' in row 3: neither yes nor no" in error


def test_missing_means_are_those_of_the_training_rows(tmp_path, capsys):
    """A missing number is predicted as the mean is, and a missing category as the shares of all."""
    model, stones = tmp_path / "model.pt", make_stones()
    data = write_csv(tmp_path / "stones.csv", stones)
    words = ["--target", "price", "--drop", "name,code,certified", "--test-fraction", 0, "--save", model, *SHORT]
    assert run(capsys, "fit", data, *words)[0] == 0
    given = {"carat": ["", np.mean(stones["carat"])], "cut": ["Good", "Good"]}
    new, output = write_csv(tmp_path / "new.csv", given), tmp_path / "out.csv"
    assert run(capsys, "predict", model, new, "--missing", "mean", "--output", output)[0] == 0
    one, other = predictions(output)
    assert float(one["mean"]) == pytest.approx(float(other["mean"]), rel=1e-5)
    assert float(one["std"]) == pytest.approx(float(other["std"]), rel=1e-3)


def test_columns_that_look_like_something_else_are_told_of(tmp_path, capsys):
    rows = make_rows()
    path = write_csv(tmp_path / "data.csv", {"number": range(5, N + 5), **rows})
    assert "note: column 'number' counts the rows" in run(capsys, "fit", path, "--target", "price", *SHORT)[1]
    bare = tmp_path / "bare.csv"
    bare.write_text("\n".join(",".join(f"{value:.6f}" for value in row) for row in zip(*rows.values(), strict=True)))
    first = f"{rows['price'][0]:.6f}"
    assert "--no-header" in fails(capsys, "fit", bare, "--target", "price")
    code, out, _ = run(capsys, "fit", bare, "--target", first, *SHORT)
    assert code == 0 and "--no-header" in out
    code, out, _ = run(capsys, "fit", bare, "--target", "c3", "--no-header", *SHORT)
    assert code == 0 and "c3 by 2 feature(s) (c1, c2); 216 training" in out


def test_solver_and_rank(tmp_path, data, capsys):
    fit = [
        "fit",
        write_csv(tmp_path / "more.csv", make_rows(n=820)),
        "--target",
        "price",
        "--test-fraction",
        0.01,
        *SHORT,
    ]
    for words, said in (
        (["--solver", "cholesky"], ["  Cholesky (", ": converged"]),
        (["--rank", 4000], ["--rank 4,000 is more than there are training rows; 812 is used", "rank 812): converged"]),
    ):
        code, out, _ = run(capsys, *fit, *words)
        assert code == 0
        assert all(one in out for one in said)
    few = run(capsys, "fit", data, "--target", "price", "--solver", "cholesky", *SHORT)[1]
    assert "up to 800 rows GPyTorch factorizes the matrix itself" in few


def test_picture_of_held_out_rows(tmp_path, data, capsys):
    picture = tmp_path / "held-out.png"
    words = ["fit", data, "--target", "price", "--test-fraction", 0.5, "--picture", picture, *SHORT]
    code, out, _ = run(capsys, *words)
    assert code == 0
    assert "Calibration: of 120 rows, " in out and f"picture: {picture}" in out
    content = picture.read_bytes()
    assert content[:4] == b"\x89PNG" and len(content) > 20_000
    assert "--force" in fails(capsys, *words)


@pytest.mark.filterwarnings("default")
def test_a_warning_is_a_line(data, capsys, monkeypatch):
    def tune(*words):
        warn("the solve fell short.", see="out-of-budget")
        raise KeyboardInterrupt

    monkeypatch.setattr("sketchgp.cli.fit.tune", tune)
    _, _, error = run(capsys, "fit", data, "--target", "price")
    assert error == "warning: the solve fell short. [troubleshooting: out-of-budget]\nstopped\n"


def test_a_solve_that_fails_is_no_success(tmp_path, data, capsys, monkeypatch):
    """Whatever error of ours ends the work, its message is a line, nothing is saved and the exit status is not 0."""

    def fail(*words, **more):
        raise NumericalError("the solve for the mean failed.", see="out-of-budget")

    model, output = tmp_path / "model.pt", tmp_path / "out.csv"
    assert run(capsys, "fit", data, "--target", "price", "--save", model, *SHORT)[0] == 0
    monkeypatch.setattr("sketchgp.cli.regression.predict", fail)
    monkeypatch.setattr("sketchgp.saved_model.predict", fail)
    error = fails(capsys, "fit", data, "--target", "price", "--save", tmp_path / "other.pt", *SHORT)
    assert error == "error: the solve for the mean failed. [troubleshooting: out-of-budget]\n"
    assert fails(capsys, "predict", model, data, "--output", output) == error
    assert not (tmp_path / "other.pt").exists() and not output.exists()


def test_marks_of_missing_values_are_remembered(tmp_path, capsys):
    """A category may be called none, and the model knows; predict takes other marks where it is told."""
    model, output, rows = tmp_path / "model.pt", tmp_path / "out.csv", make_rows()
    pool = list(np.where(rows["width"] > 0, "none", "small"))
    columns = {"pool": pool, **{name: list(values) for name, values in rows.items()}}
    columns["length"][3] = "n.d."
    path = write_csv(tmp_path / "data.csv", columns)
    words = ["--target", "price", "--save", model, "--missing", "drop", "--missing-marks", "n.d.,NULL", *SHORT]
    code, out, _ = run(capsys, "fit", path, *words)
    assert code == 0 and "pool (2)" in out and "1 of 240 rows are left out" in out
    assert "taken for missing values, as empty cells are: 'n.d.'" in out
    new = {"pool": ["none", "null", "small"], "length": [12, 12, "N.D."], "width": [0.5, 0.5, 0.5]}
    path = write_csv(tmp_path / "new.csv", new)
    assert run(capsys, "predict", model, path, "--output", output)[0] == 0
    assert [row["mean"] == "" for row in predictions(output)] == [False, True, True]
    assert sketchgp.load_model(model).predict(new).mean.isnan().tolist() == [False, True, True]
    error = fails(capsys, "predict", model, path, "--missing-marks", "null")
    assert "column 'length' holds numbers in 2 row(s) and 'N.D.' in row 3" in error


def test_info_and_version(capsys):
    code, out, _ = run(capsys, "info")
    assert code == 0
    lines = dict(line.split(maxsplit=1) for line in out.splitlines() if not line.startswith("matmul"))
    assert lines["torch"] == torch.__version__
    assert lines["threads"].startswith(f"{torch.get_num_threads()} of torch")
    assert "GiB free" in lines["memory"]
    engines = [line.split(maxsplit=3) for line in out.splitlines() if line.startswith("matmul")]
    assert ["matmul='tiled'", "on", "cpu", "yes"] in engines
    assert any(name == "matmul='triton'" and answer.startswith("no: ") for name, *_, answer in engines)
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"sketchgp {sketchgp.__version__}\n"


@each("words", [[], ["fit", "data.csv"], ["fit", "d.csv", "--target", "y", "--test-fraction", "1"], ["draw"]])
def test_wrong_words(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_ctrl_c_ends_without_a_traceback(data, capsys, monkeypatch):
    def stop(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("sketchgp.cli.fit.tune", stop)
    code, _, error = run(capsys, "fit", data, "--target", "price")
    assert (code, error) == (130, "stopped\n")


def test_module_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sketchgp", "fit", str(tmp_path / "absent.csv"), "--target", "y"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("sketchgp", run_name="__main__")
    assert ended.value.code == 2
    assert capsys.readouterr().err.strip().endswith("absent.csv: no such file")


@pytest.mark.slow
def test_quick_demo(tmp_path, capsys):
    (tmp_path / "sketchgp-demo.png").write_text("mine")
    code, out, _ = run(capsys, "demo", "--quick", "--output", tmp_path)
    assert code == 0
    table = out.split("---\n")[1].splitlines()[:3]
    assert [line.split("  ")[0].strip() for line in table] == [
        "sketchgp",
        "GPyTorch's defaults",
        "sketchgp, all rows",
    ]
    for line in table:
        assert float(line.split()[-2]) < 0.3  # RMSE; predicting the mean scores 1
    assert "tuned on a random subset of 500 of the 1,800 training rows" in out
    assert out.startswith("An exact Gaussian process of the price of diamonds: some ten seconds")
    first, *both, last = out.splitlines()[-4:]
    assert "the same 1,000 diamonds, for the prices of 200 others" in first
    for line, words in zip(both, (table[1], table[0]), strict=True):
        what, found = line.strip().split("  ", 1)
        assert words.startswith(what) and found.split()[0] == words.removeprefix(what).split()[1]  # iterations
        assert float(found.split("prices ")[1].split("%")[0]) < 30
    assert last == f"picture: {(tmp_path / 'sketchgp-demo-2.png').resolve()}"
    assert (tmp_path / "sketchgp-demo.png").read_text() == "mine"
    assert (tmp_path / "sketchgp-demo-2.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_demo_without_the_side_of_gpytorch(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sketchgp.cli.demo.evaluate_defaults", None)
    small = replace(QUICK_DEMO, rows=600, tuning=200, steps=6, comparison=200)
    monkeypatch.setattr("sketchgp.cli.demo.QUICK", small)
    monkeypatch.setattr("sketchgp.cli.EVERY", 0.01)
    code, out, _ = run(capsys, "demo", "--quick", "--skip-gpytorch", "--output", tmp_path)
    assert code == 0 and (tmp_path / "sketchgp-demo.png").exists()
    assert "GPyTorch's defaults" not in out and "--skip-gpytorch" not in out
    assert "  ... 0 s\n" in out


def test_the_usual_demo_is_of_fewer_rows_than_the_full_one(tmp_path, capsys, monkeypatch):
    sizes = []
    monkeypatch.setattr("sketchgp.cli.demo._run", lambda size, *rest: sizes.append(size.rows))
    for words in ([], ["--full"], ["--quick"]):
        assert run(capsys, "demo", *words, "--output", tmp_path)[0] == 0
    assert sizes == [16_000, 53_940, 2_000]


def test_demo_needs_a_folder(tmp_path, capsys):
    assert "no such folder" in fails(capsys, "demo", "--output", tmp_path / "absent")
