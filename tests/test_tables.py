"""Reading tables: right values from good files; from bad ones, an error with file, row and column."""

import builtins

import numpy as np
import pytest

from sketchgp.cli import csv_reader, npz_reader
from sketchgp.cli.cells import Cells
from sketchgp.cli.tables import open_table, suggest
from sketchgp.errors import InputError


def write(tmp_path, text, name="data.csv"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def read_all(path, columns=None):
    source = open_table(path)
    return source.read(columns or list(source.default_features))


@pytest.mark.parametrize(
    ("text", "names", "values"),
    [
        ("a,b\n1,2\n3,4.5\n", ("a", "b"), [[1, 2], [3, 4.5]]),
        ("\ufeffa,b\r\n1,2\r\n3,4\r\n", ("a", "b"), [[1, 2], [3, 4]]),
        ("a;b\n1;2\n", ("a", "b"), [[1, 2]]),
        ("a\tb\n1\t-2e3\n", ("a", "b"), [[1, -2000]]),
        ('"a, large","b"\n"1",2\n', ("a, large", "b"), [[1, 2]]),
        ("a,b\n1,2\n\n3,4\n", ("a", "b"), [[1, 2], [3, 4]]),
        (",a\n0,5\n1,6\n", ("a",), [[5], [6]]),
        (" a , b \n 1 , 2 \n", ("a", "b"), [[1, 2]]),
    ],
)
def test_csv_values(tmp_path, text, names, values):
    table = read_all(write(tmp_path, text))
    assert table.names == names
    np.testing.assert_array_equal(table.values, values)


def test_csv_fast_and_careful_readers_agree(tmp_path, monkeypatch):
    values = np.random.default_rng(0).standard_normal((500, 3)) * 10.0 ** np.arange(-3, 3, 2)
    path = write(tmp_path, "a,b,c\n" + "\n".join(",".join(map(repr, row)) for row in values.tolist()))
    fast = csv_reader._fast(path, ",", ["a", "b", "c"], [2, 0])
    monkeypatch.setattr(csv_reader, "_ROWS_AT_ONCE", 64)  # several chunks
    careful = csv_reader._careful(path, ",", ["a", "b", "c"], [2, 0], Cells())
    np.testing.assert_array_equal(fast, values[:, [2, 0]])
    np.testing.assert_array_equal(careful, fast)


def test_csv_text_columns_can_be_left_out(tmp_path):
    path = write(tmp_path, "a,colour,b\n1,red,2\n3,blue,4\n")
    np.testing.assert_array_equal(read_all(path, ["b", "a"]).values, [[2, 1], [4, 3]])


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["empty"]),
        ("\n1,2\n", ["line 1", "header"]),
        ("a,b\n", ["no rows"]),
        ("a,b,a\n1,2,3\n", ["'a'", "more than once"]),
        ("a,b\n1,2\n3\n", ["line 3", "1 cells", "2 column names"]),
        ("a,b\n1,2\n3,4,5\n", ["line 3", "3 cells", "2 column names"]),
        ("a,b\n1,2\n3,\n", ["line 3", "'b'", "empty"]),
        ("a,b\n1,2\nNA,4\n", ["line 3", "'a'", "'NA'", "missing"]),
        ("a,b\n1,2\n3,nan\n", ["line 3", "'b'", "'nan'"]),
        ("a,b\n1,2\n3,-inf\n", ["line 3", "'b'", "'-inf'"]),
        ("a,b\n1,2\n\n3,twelve\n", ["line 4", "'b'", "'twelve'", "not a number"]),
        ("a,b\n1,2\n3,1_000\n", ["line 3", "'b'", "'1_000'"]),
        (
            "a,cut,color\n1,Ideal,E\n2,Good,F\n",
            ["line 2", "'cut'", "'Ideal'", "text", "color", "--drop cut,color"],
        ),
        ("a;b\n1,5;2\n", ["line 2", "'a'", "'1,5'", "point"]),
        ('a,b\n1,2\n"3,4\n', ["line 3"]),
        (b"a,b\n1,2\n3,\xff\n", ["UTF-8", "byte 10"]),
        (b"\xff\xfea\x00", ["UTF-8"]),
    ],
)
def test_csv_faults(tmp_path, text, parts):
    path = write(tmp_path, text)
    with pytest.raises(InputError) as raised:
        read_all(path)
    for part in [str(path), *parts]:
        assert part in str(raised.value)


def test_csv_fault_beyond_the_first_chunk(tmp_path, monkeypatch):
    monkeypatch.setattr(csv_reader, "_ROWS_AT_ONCE", 4)
    path = write(tmp_path, "a\n" + "1\n" * 10 + "x\n")
    with pytest.raises(InputError, match=r"line 12, column 'a': 'x' is not a number"):
        read_all(path)


def test_missing_file_folder_and_extension(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        open_table(tmp_path / "absent.csv")
    with pytest.raises(InputError, match="folder"):
        open_table(tmp_path)
    with pytest.raises(InputError, match=r"'\.xls'.*\.csv"):
        open_table(write(tmp_path, "x", "data.xls"))


def test_unknown_column_is_named_with_the_nearest(tmp_path):
    source = open_table(write(tmp_path, "Price,weight\n1,2\n"))
    with pytest.raises(InputError, match=r"--target: no column 'pricee' \(did you mean 'Price'\?\).*Price, weight"):
        source.require(["pricee"], "--target")
    assert suggest("zzzz", ["price"]) == ""


def test_npz_with_x_and_other_arrays(tmp_path):
    path = tmp_path / "data.npz"
    x, y = np.arange(6, dtype=np.uint8).reshape(3, 2), np.array([1.5, 2.5, 3.5], dtype=np.float32)
    np.savez(path, X=x, y=y, other=np.zeros(7), mask=np.array([True, False, True]))
    source = open_table(path)
    assert source.default_features == ("x0", "x1")
    assert set(source.names) == {"x0", "x1", "y", "mask"}
    np.testing.assert_array_equal(source.read(["x1", "y", "mask"]).values, [[1, 1.5, 1], [3, 2.5, 0], [5, 3.5, 1]])


def test_npz_takes_names_of_features(tmp_path):
    path = tmp_path / "data.npz"
    np.savez(path, X=np.zeros((3, 2)), y=np.zeros(3), features=np.array(["length", "width"]))
    assert open_table(path).default_features == ("length", "width")


def test_npz_with_one_array_a_column(tmp_path):
    path = tmp_path / "data.npz"
    np.savez_compressed(path, a=np.arange(3), b=np.arange(3) / 2)
    source = open_table(path)
    assert source.default_features == ("a", "b")
    np.testing.assert_array_equal(source.read(["b"]).values, [[0], [0.5], [1]])


def npz(path, **arrays):
    np.savez(path, **arrays)
    return path


def test_npz_faults(tmp_path):
    path = tmp_path / "data.npz"
    cases = [
        (lambda: npz(path, a=np.zeros(3), b=np.zeros(4)), ["different lengths", "a 3", "b 4"]),
        (lambda: npz(path, m=np.zeros((2, 2))), ["m (2, 2)"]),
        (lambda: npz(path, X=np.zeros(3), y=np.zeros(3)), ["'X'", "(3,)"]),
        (lambda: npz(path, X=np.zeros((0, 2)), y=np.zeros(0)), ["no rows"]),
        (lambda: npz(path, a=np.array(["u", "v"])), ["'a'", "--drop a"]),
        (lambda: npz(path, a=np.array([1.0, np.nan])), ["row 2", "'a'"]),
        (lambda: npz(path, a=np.array([{}, 1], dtype=object)), ["'a'", "Python objects"]),
        (lambda: path.write_bytes(b"not an archive"), ["not an NPZ"]),
    ]
    for make, parts in cases:
        make()
        with pytest.raises(InputError) as raised:
            read_all(path)
        for part in [str(path), *parts]:
            assert part in str(raised.value)


def test_npz_cut_short(tmp_path):
    path = npz(tmp_path / "data.npz", a=np.arange(1000.0))
    path.write_bytes(path.read_bytes()[:4000])
    with pytest.raises(InputError, match="damaged"):
        read_all(path)


def test_npz_with_a_flipped_byte(tmp_path):
    path = npz(tmp_path / "data.npz", a=np.arange(1000.0))
    content = bytearray(path.read_bytes())
    content[4000] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(InputError, match="damaged"):
        read_all(path)


def test_npz_never_unpickles(tmp_path, monkeypatch):
    import pickle

    path = npz(tmp_path / "data.npz", a=np.array([{}], dtype=object))
    monkeypatch.setattr(pickle, "load", lambda *a, **k: pytest.fail("unpickled"))
    with pytest.raises(InputError):
        npz_reader.open_npz(path)


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "data.parquet"
    columns = {
        "a": pyarrow.array([1, 2], pyarrow.int32()),
        "b": pyarrow.array([0.5, None]),
        "c": pyarrow.array(["u", "v"]),
        "d": pyarrow.array([True, False]),
        "e": pyarrow.array([1.0, float("nan")]),
    }
    parquet.write_table(pyarrow.table(columns), path)
    source = open_table(path)
    np.testing.assert_array_equal(source.read(["d", "a"]).values, [[1, 1], [0, 2]])
    with pytest.raises(InputError, match="row 2, column 'b': missing"):
        source.read(["a", "b"])
    with pytest.raises(InputError, match="column 'c' is of type string"):
        source.read(["c"])
    with pytest.raises(InputError, match="row 2, column 'e'"):
        source.read(["e"])
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(InputError, match="damaged"):
        open_table(path)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    path = write(tmp_path, b"PAR1", "data.parquet")
    original = builtins.__import__

    def refuse(name, *rest, **options):
        if name.split(".")[0] in ("pyarrow", "pandas"):
            raise ImportError(name)
        return original(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(InputError, match="pip install pyarrow"):
        open_table(path)
