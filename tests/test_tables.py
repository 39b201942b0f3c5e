"""Reading tables by the command and by ``load_model``: what a person would say that a file holds, or an error.

The command ``fit`` is stopped before it tunes; what it read is in the lines that it has printed by then.
"""

import datetime
import decimal
import re
import sys

import numpy as np
import pytest
import torch

import sketchgp
from cases import each, pairwise
from sketchgp.cli import main

pandas = pytest.importorskip("pandas")
pyarrow = pytest.importorskip("pyarrow")


@pytest.fixture
def read(tmp_path, capsys, monkeypatch):
    """Exit code and output of ``fit`` on a file of this content."""

    def stop(*words):
        raise KeyboardInterrupt

    def read(content, *options, target="y", name="data.csv", encoding="utf-8"):
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content if isinstance(content, bytes) else content.encode(encoding))
        monkeypatch.setattr("sketchgp.cli.fit.tune", stop)
        capsys.readouterr()
        code = main(["fit", str(path), "--target", target, "--test-fraction", "0", *map(str, options)])
        out, error = capsys.readouterr()
        assert code in (2, 130) and (code == 2) == error.startswith(f"error: {path}")
        return code, out + error

    return read


def check(result, kind, values, name="x"):
    """The column became what it should, and the target has the mean and the deviation of these values."""
    code, text = result
    assert code == 130, text
    line = {"number": "numbers, standardised", "boolean": "yes or no", "category": "categories"}[
        kind
    ]  # as the command says it
    assert re.search(rf"{line}.*: .*\b{name}\b", text), text
    mean, deviation = map(float, re.search(r"its mean is (\S+), its deviation (\S+)", text).groups())
    np.testing.assert_allclose([mean, deviation], [np.mean(values), np.std(values, ddof=1)], rtol=1e-5)


NAMED = ["--missing", "drop", "--missing-marks"]
GOOD = {
    "plain": ("x,y\n1,2\n3,4.5\n", [], "number", [2, 4.5]),
    "mark of bytes, CRLF": ("\ufeffx,y\r\n1,2\r\n3,4\r\n", [], "number", [2, 4]),
    "old Macintosh": ("x,y\r1,2\r3,4\r", [], "number", [2, 4]),
    "semicolons": ("x;y\n1;2\n3;4\n", [], "number", [2, 4]),
    "tabs, exponents": ("x\ty\n1\t-2e3\n3\t+4E3\n", [], "number", [-2000, 4000]),
    "bars": ("x|y\n1|2\n3|4\n", [], "number", [2, 4]),
    "separators in quotes": ('"a;b;c;d",x,y\n1,1,2\n5,3,4\n', [], "number", [2, 4]),
    "more commas than semicolons": ('x;y;"a,b,c"\n1;2;"p,q,r"\n3;4;"s,t"\n', [], "number", [2, 4]),
    "quotes": ('"x","y"\n"1",2\n3,"4"\n', [], "number", [2, 4]),
    "quotes in quotes, lines in cells": ('z,x,y\n"a ""b""\nc",1,2\nd,3,4\n', [], "number", [2, 4]),
    "blanks": (" x , y \n 1 , 2 \n 3, 4\n", [], "number", [2, 4]),
    "empty lines": ("x,y\n1,2\n\n3,4\n\n\n", [], "number", [2, 4]),
    "an empty line first": ("\nx,y\n1,2\n3,4\n", [], "number", [2, 4]),
    "no last end of line": ("x,y\n1,2\n3,4", [], "number", [2, 4]),
    "separator at the end": ("x,y,\n1,2,\n3,4,\n", [], "number", [2, 4]),
    "row numbers without a name": (",x,y\n0,1,2\n1,7,4\n", [], "number", [2, 4]),
    "decimal commas": ("x;y\n1,5;2,5\n3;4,25\n", ["--decimal", ","], "number", [2.5, 4.25]),
    "decimal commas without names": ("1,5;2,5\n3,1;4,25\n", ["--decimal", ",", "--no-header"], "number", [2.5, 4.25]),
    "points are decimals": ("x;y\n1;1.234\n2;12.000\n", ["--decimal", "."], "number", [1.234, 12]),
    "other columns have decimals": ("x;y\n1.25;1.234\n2;12.000\n", [], "number", [1.234, 12]),
    "fixed decimals": ("x,y\n1,1.234\n2,12.500\n", [], "number", [1.234, 12.5]),
    "zero before the point": ("x;y\n1;0.234\n2;1.500\n", [], "number", [0.234, 1.5]),
    "words": ("x,y\nred,2\nblue,4\n", [], "category", [2, 4]),
    "ages": ("x,y\n18-25,2\n26-35,4\n", [], "category", [2, 4]),
    "true and false": ("x,y\nTRUE,2\nfalse,4\n", [], "boolean", [2, 4]),
    "yes and no": ("x,y\nYes,2\nno,4\n", [], "boolean", [2, 4]),
    "postal codes": ("x,y\n01234,2\n10115,4\n", ["--categorical", "x"], "category", [2, 4]),
    "numbers with zeros": ("x,y\n007,2\n012,4\n", ["--numeric", "x"], "number", [2, 4]),
    "years": ("x,y\n2019,2\n2020,4\n", [], "number", [2, 4]),
    "numbers like dates": ("x,y\n20240131,2\n20240201,4\n", ["--numeric", "x"], "number", [2, 4]),
    "large numbers": ("x,y\n12345678901234567890,2\n1,4\n", ["--numeric", "x"], "number", [2, 4]),
    "none is a category": ("x,y\nnone,2\none,4\n", ["--missing-marks", "NA,?"], "category", [2, 4]),
    "marks that are named": ("x,y\n1,2\n3,4\nn.d.,7\n", [*NAMED, "n.d."], "number", [2, 4]),
    "a number that is a mark": ("x,y\n1,2\n3,4\n-999,7\n", [*NAMED, "-999"], "number", [2, 4]),
    "marks of spreadsheets": ("x,y\n1,2\n3,4\n#N/A,7\n<NA>,8\n", ["--missing", "drop"], "number", [2, 4]),
    "an empty column": ("x,z,y\n1,,2\n3,,4\n", ["--missing", "mean"], "number", [2, 4]),
    "a separator that is named": ("x y\n1 2\n3 4\n", ["--separator", " "], "number", [2, 4]),
}  # fmt: skip


@each("case", GOOD)
def test_what_a_text_file_holds(read, case):
    content, options, kind, values = GOOD[case]
    names = {"target": "c2", "x": "c1"} if "--no-header" in options else {"target": "y", "x": "x"}
    check(read(content, *options, target=names["target"]), kind, values, names["x"])


BAD = {
    "text that is no known mark": ("x,y\nn.d.,1\n1,2\n2,3\nn.d.,4\n", ["'n.d.' in row 1 and 1 more", "in 2 row(s)"]),
    "text among marks": ("x,y\n1,1\nNA,2\nn.d.,3\n", ["--missing-marks NA,n.d.", "--categorical x", "--drop x"]),
    "a limit": ("x,y\n<0.5,1\n1,2\n", ["'<0.5' in row 1"]),
    "units": ("x,y\nm,kg\n1,2\n2,3\n", ["2 faults", "column 'x'", "'m' in row 1", "column 'y'"]),
    "codes and numbers": ("x,y\nA1,1\n7,2\nB2,3\n", ["'A1' in row 1, 'B2' in row 3", "--categorical x"]),
    "true and one": ("x,y\ntrue,1\n0,2\n", ["'true' in row 1", "plain numbers"]),
    "two separators": ("a,x;y\n1,2;5\n3,4;6\n", ["',', ';'", "--separator"]),
    "German thousands": ("x;y\n1.234,5;1\n2,0;2\n", ["'1.234,5' in row 1", "--decimal ,"]),
    "thousands or decimals": ("x;y\n1.234;1\n12.000;2\n", ["'1.234' in row 1", "decimals or thousands", "--decimal ."]),
    "thousands beside a small number": ("x,y\n999,1\n1.234,2\n", ["decimals or thousands"]),
    "thousands among small numbers": ("x,y\n999,1\n1.234,2\n12.000,3\n", ["decimals or thousands"]),
    "English thousands": ('x,y\n"1,234",1\n"2,500",2\n', ["'1,234'", "plain numbers"]),
    "other thousands": ("x,y\n1 234,1\n2'500,2\n", ["'1 234'", "plain numbers"]),
    "decimal commas": ("x;y\n1,5;1\n2,5;2\n", ["'1,5' in row 1", "--decimal ,"]),
    "underscores": ("x,y\n1_000,1\n2_000,2\n", ["'1_000'"]),
    "percent": ("x,y\n12%,1\n13 %,2\n", ["'12%' in row 1, '13 %' in row 2"]),
    "currency": ("x,y\n$12,1\n-€1.50,2\n", ["'$12'"]),
    "minus signs of typography": ("x,y\n−5,1\n−6,2\n", ["'−5'"]),
    "unit behind": ("x,y\n12 kg,1\n13.5 kg,2\n", ["'12 kg'", "plain numbers", "--categorical x"]),
    "ordinals": ("x,y\n1st,2\n2nd,4\n", ["'1st'", "--categorical x"]),
    "leading zeros": ("x,y\n01234,1\n10115,2\n", ["'01234' in row 1", "--numeric x", "--categorical x"]),
    "huge whole numbers": ("x,y\n9007199254740993,1\n1,2\n", ["'9007199254740993' in row 1", "lose", "--drop x"]),
    "infinite": ("x,y\ninf,1\n-Infinity,2\n", ["'inf' in row 1, '-Infinity' in row 2: not finite"]),
    "too large": ("x,y\n1e999,1\n2,2\n", ["'1e999' in row 1: not finite"]),
    "slashed dates": ("x,y\n01/02/2024,1\n02/02/2024,2\n", ["'01/02/2024'", "a date", "days since", "--drop x"]),
    "German dates": ("x,y\n1.2.2024 10:30,1\n2.2.2024 11:00,2\n", ["a date"]),
    "months": ("x,y\n3 Feb 2024,1\nMarch 2024,2\n", ["a date"]),
    "compact dates": ("x,y\n20240131,1\n20240201,2\n", ["'20240131'", "a date", "--numeric x"]),
    "compact months": ("x,y\n202401,1\n202402,2\n", ["a date", "--numeric x"]),
    "compact times": ("x,y\n20240131093000,1\n20240201120000,2\n", ["a date"]),
    "weeks": ("x,y\n2024-W05,1\n2024-W06,2\n", ["a date"]),
    "times of day": ("x,y\n01:00 PM,1\n11:30 am,2\n", ["'01:00 PM'", "a date or a time"]),
    "time zones": ("x,y\n2024-05-06T10:00+02:00,1\n2024-05-06 08:00Z,2\n", ["a date or a time"]),
    "dates among words": ("x,y\nsoon,1\n2024-05-06,2\n", ["'2024-05-06' in row 2: a date"]),
    "missing": ("x,y\n1,1\n,2\nNA,3\n-,4\n", ["no value in row 2, 'NA' in row 3, '-' in row 4", "to drop or mean"]),
    "marks that may be categories": ("x,y\nnone,1\none,2\n", ["'none' in row 1", "--missing-marks"]),
    "all faults": ("x,z,y\n1,inf,1\n,2,n.d.\nb,3,4\n", ["4 faults", "'x' holds", "'x' lacks", "'z'", "'y'"]),
    "a column of one value": ("x,y\n1,1\n1,2\n", ["every feature is constant"]),
    "an empty line in the only column": ("y\n1\n\n3\n", ["no columns are left"]),
    "too many words": ("x,y\n" + "".join(f"n{i},{i}\n" for i in range(20)), ["20 different values", "--drop x"]),
    "long lines": ("x,y\n1,2\n3\n4,5,6\n7,8\n", ["Expected 2 fields in line 4, saw 3", "mend the lines"]),
    "short lines": ("x,y\n1,2\n3\n7,8\n", ["column 'y' lacks a value: no value in row 2"]),
    "preamble": ("Report 2024\n\nx,y\n1,2\n", ["Expected 1 fields in line 3, saw 2", "--skip-lines"]),
    "names that occur twice": ("x,x,y\n1,2,3\n", ["more than once: 'x'"]),
    "no names": ("5.1,3.5\n4.9,3.0\n", ["no column 'y'", "--no-header"]),
    "equal numbers as names": ("0.2,0.2,y\n1,2,3\n", ["'0.2'", "more than once", "--no-header"]),
    "nothing": ("", ["the file is empty"]),
    "no rows": ("x,y\n", ["no rows"]),
    "an open quote": ('x,y\n1,2\n"3,4\n', ["cannot be read"]),
    "bytes of another encoding": ("größe,y\n1,2\n".encode("latin-1"), ["utf-8", "--encoding cp1252"]),
    "UTF-16": ("x,y\n1,2\n".encode("utf-16"), ["utf-8", "--encoding"]),
    "UTF-16 without its mark": ("x,y\n1,2\n".encode("utf-16-le"), ["no column 'y'"]),
}  # fmt: skip


@each("case", BAD)
def test_what_is_refused(read, case):
    """Nothing that could be read in two ways is read in one of them."""
    content, parts = BAD[case]
    code, text = read(content)
    assert code == 2, text
    assert [part for part in parts if part not in text] == [], text


@pytest.mark.parametrize(
    ("encoding", "told"),
    [("utf-8", None), ("utf-8-sig", "utf-8"), ("utf-16", "utf-16"), ("latin-1", "latin-1"), ("utf-16-le", "utf-16-le")],
)
def test_encodings(read, encoding, told):
    options = [] if told is None else ["--encoding", told]
    code, text = read("größe;y\nklein;2\nüber;4\n", *options, encoding=encoding)
    assert code == 130 and "y by 1 feature(s) (größe)" in text and "größe (2)" in text
    for wrong in ("latin-99", "rot13"):
        assert f"--encoding {wrong}: not an encoding" in main_error(read, "x,y\n1,2\n", "--encoding", wrong)


def test_a_title_is_skipped(read):
    code, text = read("Report, of 2024\n\nx;y\n1;2\n3;4\n", "--skip-lines", "2")
    assert code == 130 and "y by 1 feature(s) (x)" in text


def main_error(read, content, *options, **more):
    code, text = read(content, *options, **more)
    assert code == 2
    return text


def test_rows_are_counted_from_the_names_on(read):
    """Empty lines do not count, and a cell may hold several."""
    assert "'oops' in row 2" in main_error(read, 'z,x,y\n"a\nb",1,2\n\nc,oops,3\nd,4,5\n')


def test_rows_beyond_the_first_chunk(read):
    """pandas reads long files in pieces; the last rows count as the first do."""
    rows = "".join(f"{i},{i % 7}\n" for i in range(60_000))
    assert "'oops' in row 60001" in main_error(read, "x,y\n" + rows + "oops,2\n")


def test_wrong_words_of_options(read, capsys):
    for words in (["--separator", "ab"], ["--decimal", ";"]):
        with pytest.raises(SystemExit):
            read("x,y\n1,2\n3,4\n", *words)
    for words, said in (
        (["--numeric", "z"], "--numeric: no column 'z'"),
        (["--numeric", "x", "--drop", "x"], "'x' is not among the features"),
        (["--numeric", "x", "--categorical", "x"], "'x' is in --categorical, too"),
    ):
        assert main(["fit", str(write(read)), "--target", "y", *words]) == 2
        assert said in capsys.readouterr().err


def write(read):
    """The path of a small file."""
    _, text = read("x,y,u\n1,2,0\n3,4,1\n")
    return re.search(r"reading (\S+)", text)[1]


# --- Parquet ----------------------------------------------------------------------------------------------------


def parquet(columns, path):
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path)


def test_parquet_keeps_its_types(read, tmp_path):
    path = tmp_path / "data.parquet"
    y = pyarrow.array([2, 4], pyarrow.int32())
    for x, kind in (
        (pyarrow.array([1, 3], pyarrow.uint8()), "number"),
        (pyarrow.array([True, False]), "boolean"),
        (pyarrow.array([decimal.Decimal("1.5"), decimal.Decimal("2.5")]), "number"),
        (pyarrow.array([7, 12]).dictionary_encode(), "category"),
        (pyarrow.array(["u", "v"]).dictionary_encode(), "category"),
        (pyarrow.array(["10115", "20095"]).dictionary_encode(), "category"),
        (pyarrow.array(["yes", "no"], pyarrow.large_string()), "boolean"),
    ):
        parquet({"x": x, "y": y}, path)
        check(read(None, name=path.name), kind, [2, 4])
    for x, parts in (
        (pyarrow.array([0, 1], pyarrow.date32()), ["a date", "--drop x"]),
        (pyarrow.array([0, 1], pyarrow.timestamp("ns", tz="UTC")), ["a date"]),
        (pyarrow.array([0, 1], pyarrow.duration("s")), ["a date or a time"]),
        (pyarrow.array([20240131, 20240201]), ["a date", "--numeric x"]),
        (pyarrow.array([2**53 + 1, None]), ["row 1: whole numbers", "no value in row 2"]),
        (pyarrow.array(["10115", "20095"]), ["numbers as text, '10115' in row 1", "--numeric x", "--categorical x"]),
        (pyarrow.array(["1.5", "n.d."]), ["'n.d.' in row 2", "plain numbers"]),
        (pyarrow.array([0.5, None]), ["no value in row 2"]),
        (pyarrow.array([float("nan"), 1.0]), ["no value in row 1"]),
        (pyarrow.array([1.0, float("inf")]), ["inf in row 2: not finite"]),
        (pyarrow.array([[1], [2]]), ["type"]),
    ):
        parquet({"x": x, "y": y}, path)
        code, text = read(None, name=path.name)
        assert code == 2 and [part for part in parts if part not in text] == [], text
    path.write_bytes(path.read_bytes()[:60])
    assert "damaged" in main_error(read, None, name=path.name)


def test_parquet_of_pandas(read, tmp_path):
    """The numbers of rows that pandas adds are no column; an index with a name is one."""
    frame = pandas.DataFrame({"x": [1.5, 2.5, 3.5], "y": [2, 4, 6]})
    frame[frame["y"] > 2].to_parquet(tmp_path / "data.parquet")
    check(read(None, name="data.parquet"), "number", [4, 6])
    assert "y by 1 feature(s) (x)" in read(None, name="data.parquet")[1]
    frame.set_index("x").to_parquet(tmp_path / "data.parquet")
    check(read(None, name="data.parquet"), "number", [2, 4, 6])


@pytest.mark.parametrize("name", ["data.csv", "data.parquet"])
def test_what_to_install_is_said(read, monkeypatch, name):
    for module in [one for one in sys.modules if one.split(".")[0] in ("pandas", "pyarrow")]:
        monkeypatch.setitem(sys.modules, module, None)
    error = main_error(read, "x,y\n1,2\n3,4\n", name=name)
    assert "pandas reads it: python -m pip install 'sketchgp[cli]'" in error and error.count("\n") == 1


def test_files_that_are_not_there(read, tmp_path):
    parquet({"x": [1, 2], "y": [1, 2]}, tmp_path / "data.parquet")
    assert "is for text files only" in main_error(read, None, "--encoding", "latin-1", name="data.parquet")
    assert "no such file" in main_error(read, None, name="absent.csv")
    assert "is a folder" in main_error(read, None, name=".")
    assert "'.xls'; the known ones are .csv" in main_error(read, b"x", name="data.xls")


def test_an_unknown_column_is_named_with_the_nearest(read):
    text = main_error(read, "Price,weight\n1,2\n", target="pricee")
    assert "--target: no column 'pricee' (did you mean 'Price'?); the columns are Price, weight" in text
    assert "did you mean" not in main_error(read, "Price,weight\n1,2\n", target="zzzz")


# --- load_model(...).predict ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """A model of a number, codes and yes or no."""
    generator = np.random.default_rng(0)
    x, code, sold = generator.uniform(0, 3, 40), generator.choice([3, 7], 40), generator.choice(["yes", "no"], 40)
    folder = tmp_path_factory.mktemp("model")
    frame = pandas.DataFrame({"x": x, "code": code, "sold": sold, "y": np.sin(x) + (code == 3) + 2 * (sold == "no")})
    frame.to_csv(folder / "data.csv", index=False)
    words = ["--target", "y", "--categorical", "code", "--iterations", "20", "--test-fraction", "0"]
    assert main(["fit", str(folder / "data.csv"), *words, "--save", str(folder / "model.pt")]) == 0
    return sketchgp.load_model(folder / "model.pt")


PLAIN = {"x": [1.0, 2.0], "code": ["3", "7"], "sold": ["no", "yes"]}


@each(
    "columns",
    [
        {"x": np.array([1, 2], dtype=">i4")},
        {"x": torch.tensor([1.0, 2.0], requires_grad=True)},
        {"x": torch.tensor([1, 2], dtype=torch.bfloat16)},
        {"x": ["1", " 2.0 "]},
        {"x": [decimal.Decimal("1.0"), np.float32(2)]},
        {"x": pandas.array([1, 2], dtype="Int64")},
        {"x": pandas.Categorical([1.0, 2.0])},
        {"x": pandas.Series([1.0, 2.0], index=[7, 3])},
        {"sold": np.array([False, True], dtype=object)},
        {"code": [3, 7]},
        {"code": np.array([3.0, 7.0])},
        {"code": pandas.Categorical([3, 7])},
        {"code": pandas.array(["3", "7"], dtype="string")},
        {"sold": [False, True]},
        {"sold": np.array([0, 1])},
        {"sold": pandas.array([False, True], dtype="boolean")},
        {"sold": ["NO", "Yes"]},
    ],
    ids=repr,
)
def test_columns_in_memory(loaded, columns):
    expected = loaded.predict(PLAIN).mean
    assert torch.equal(loaded.predict({**PLAIN, **columns}).mean, expected)


def test_columns_in_memory_without_pandas(loaded, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(sketchgp.InputError, match=r"^column '[^']*': pandas reads it: python -m pip install"):
        loaded.predict(PLAIN)


def test_a_frame_in_memory(loaded):
    assert torch.equal(loaded.predict(pandas.DataFrame(PLAIN)).mean, loaded.predict(PLAIN).mean)


MISSING = [None, pandas.NA, float("nan"), pandas.NaT, np.float64("nan"), "NA", "", decimal.Decimal("nan")]


@each(("missing", "name", "kind"), pairwise(MISSING, ["x", "code", "sold"], [dict, pandas.DataFrame]))
def test_missing_values_in_memory(loaded, name, missing, kind):
    """Whatever says so, in every kind of column; and as columns of pandas."""
    table = kind({**PLAIN, name: [PLAIN[name][0], missing]})
    with pytest.raises(
        sketchgp.InputError, match=rf"column '{name}' lacks a value: .* in row 1; .*missing to drop or mean"
    ):
        loaded.predict(table)
    assert loaded.predict(table, missing="drop").mean.isnan().tolist() == [False, True]
    assert loaded.predict(table, missing="mean").mean.isfinite().all()


@each(
    ("columns", "said"),
    [
        ({"x": pandas.to_datetime(["2024-05-06", "2024-05-07"])}, "column 'x' holds .*2024-05-06.*a date"),
        (
            {"x": np.array(["2024-05-06", "2024-05-07"], dtype="datetime64[ns]")},
            "column 'x' holds .*2024-05-06.*a date",
        ),
        ({"x": np.array([1, 2], dtype="timedelta64[ns]")}, "column 'x' holds .*a date or a time"),
        ({"x": pandas.to_datetime(["2024-05-06", "2024-05-07"], utc=True)}, "column 'x' holds .*a date"),
        ({"x": [datetime.date(2024, 5, 6), None]}, "column 'x' holds .*a date"),
        ({"x": pandas.period_range("2024-01", periods=2, freq="M")}, "column 'x' holds values of type Period"),
        ({"code": np.array(["2024-05-06", "2024-05-07"], dtype="datetime64[D]")}, "column 'code' holds .*a date"),
        ({"x": ["1.5", "<2"]}, "column 'x' holds numbers in 1 row.s. and '<2' in row 1"),
        ({"x": ["1,5", "2,5"]}, "column 'x' holds '1,5' in row 0"),
        ({"x": [1, np.inf]}, "column 'x' holds inf in row 1: not finite"),
        ({"x": [1, 1j]}, "column 'x' holds values of type complex"),
        ({"x": [[1], [2]]}, "column 'x' holds values of type list"),
        ({"x": np.ones((2, 1))}, "column 'x': expected one value a row"),
        ({"x": 1.0}, "columns of lengths"),
        ({"x": [1.0]}, r"columns of lengths \{'x': 1, 'code': 2"),
        ({"code": ["3", "9"], "sold": ["no", "perhaps"]}, "2 faults\n.*'9' in row 1.*not seen.*\n.*'perhaps' in row 1"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_refused_in_memory(loaded, columns, said):
    with pytest.raises(sketchgp.InputError, match=said) as raised:
        loaded.predict({**PLAIN, **columns})
    assert "--" not in str(raised.value)


def test_masked_arrays_and_rows_without_names(loaded):
    masked = np.ma.MaskedArray([1.0, 2.0], mask=[False, True])
    assert loaded.predict({**PLAIN, "x": masked}, missing="drop").mean.isnan().tolist() == [False, True]
    rows = np.array([[1.0, 3, 0], [2.0, 7, 1]])
    expected = loaded.predict(PLAIN).mean
    for same in (
        rows,
        torch.from_numpy(rows),
        rows.tolist(),
        np.array([[1.0, "3", "no"], [2.0, 7, "yes"]], dtype=object),
    ):
        assert torch.equal(loaded.predict(same).mean, expected)
    for wrong in (rows[:, :2], rows[0], 1.0):
        with pytest.raises(sketchgp.InputError, match=r"rows of 3 values \(x, code, sold\)"):
            loaded.predict(wrong)
