"""Reading tables: right values from good files; from bad ones, an error with file, row and column."""

import builtins

import numpy as np
import pytest

from sketchgp.cli import npz_reader
from sketchgp.cli.cells import Cells
from sketchgp.cli.tables import open_table, suggest
from sketchgp.errors import InputError


def write(tmp_path, text, name="data.csv"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def read_all(path, columns=None, cells=None, **options):
    source = open_table(path, **options)
    return source.read(columns or list(source.default_features), cells)


def values(table):
    """All columns beside each other."""
    return np.stack([column.values for column in table.columns.values()], axis=1)


@pytest.mark.parametrize(
    ("text", "names", "expected"),
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
def test_csv_values(tmp_path, text, names, expected):
    table = read_all(write(tmp_path, text))
    assert tuple(table.columns) == names
    np.testing.assert_array_equal(values(table), expected)


def test_csv_fast_and_careful_readers_agree(tmp_path):
    numbers = np.random.default_rng(0).standard_normal((500, 3)) * 10.0 ** np.arange(-3, 3, 2)
    rows = [",".join(map(repr, row)) for row in numbers.tolist()]
    fast = read_all(write(tmp_path, "a,b,c\n" + "\n".join(rows)), ["c", "a"])
    rows[7] += "\n"  # an empty line, and a cell that numpy's reader does not take
    slow = read_all(write(tmp_path, "a,b,c\n" + "\n".join([*rows, "1,x,2"])), ["c", "a"])
    np.testing.assert_array_equal(values(fast), numbers[:, [2, 0]])
    np.testing.assert_array_equal(values(slow)[:-1], values(fast))
    assert (fast.place(8), slow.place(8)) == ("row 9", "line 11")


def test_text_columns_can_be_left_out(tmp_path):
    path = write(tmp_path, "a,colour,b\n1,red,2\n3,blue,4\n")
    np.testing.assert_array_equal(values(read_all(path, ["b", "a"])), [[2, 1], [4, 3]])


def test_text_and_missing_values(tmp_path):
    """Of every kind of file the same: text as text, the usual marks as missing, numbers as text where that is asked."""
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {"a": [1.5, np.nan, 2.0], "cut": ["Good", " Ideal ", None], "code": [3, 1, 3], "on": [True, False, True]}
    )
    frame.to_parquet(tmp_path / "data.parquet")
    frame.assign(cut=frame["cut"].astype("category")).to_parquet(tmp_path / "again.parquet")
    np.savez(tmp_path / "data.npz", **{**frame, "cut": np.array(["Good", "Ideal", "NA"])})
    write(tmp_path, "a,cut,code,on\n1.5,Good,3,1\n,Ideal,1,0\n2,?,3,1\n")
    wanted = ["on", "cut", "a", "code"]
    for name in ("data.csv", "data.parquet", "again.parquet", "data.npz"):
        table = read_all(tmp_path / name, wanted, Cells(may_lack=("a", "cut"), text=("code",)))
        found = {key: column.values.tolist() for key, column in table.columns.items()}
        assert found["cut"] == ["Good", "Ideal", None]
        assert found["code"] == ["3", "1", "3"]
        assert found["on"] == [1, 0, 1]
        np.testing.assert_array_equal(found["a"], [1.5, np.nan, 2])
        np.testing.assert_array_equal(table.missing(["a", "cut"]), [False, True, True])
        with pytest.raises(InputError, match=r"'cut'.*missing.*--drop cut"):
            read_all(tmp_path / name, wanted, Cells(may_lack=("a",), text=("code",)))


@pytest.mark.parametrize(
    ("encoding", "told"),
    [("utf-8", None), ("utf-8-sig", "utf-8"), ("utf-16", None), ("latin-1", "latin-1"), ("utf-16-le", "utf-16-le")],
)
@pytest.mark.parametrize("text", ["größe;y\n1;2\n3;4\n", "größe;y\nklein;2\nüber;4\n"], ids=["numbers", "text"])
def test_encodings(tmp_path, encoding, told, text):
    path = write(tmp_path, text.encode(encoding))
    table = read_all(path, encoding=told)
    assert list(table.columns) == ["größe", "y"]
    np.testing.assert_array_equal(table.numbers("y"), [2, 4])
    if told not in (None, "utf-8"):
        with pytest.raises(InputError, match=r"UTF-8.*--encoding"):
            read_all(path)


def test_encodings_that_are_none(tmp_path):
    path = write(tmp_path, "a,b\n1,2\n")
    for encoding in ("latin-99", "rot13"):
        with pytest.raises(InputError, match=f"--encoding {encoding}: not an encoding"):
            read_all(path, encoding=encoding)
    with pytest.raises(InputError, match=r"utf-16.*truncated|utf-16.*BOM"):
        read_all(write(tmp_path, b"\xff\xfea"), encoding="utf-16")
    for option in ({"encoding": "latin-1"}, {"header": False}, {"comma": True}):
        with pytest.raises(InputError, match="is for text files"):
            read_all(npz(tmp_path / "data.npz", a=np.zeros(3)), **option)


def test_a_header_that_is_missing(tmp_path):
    path = write(tmp_path, "5.1,3.5,1.4\n4.9,3.0,1.3\n")
    assert "all numbers (5.1, 3.5, 1.4)" in open_table(path).suspicion
    with pytest.raises(InputError, match=r"--target: no column 'y'.*--no-header"):
        open_table(path).require(["y"], "--target")
    with pytest.raises(InputError, match=r"'0.2' occurs more than once.*--no-header"):
        open_table(write(tmp_path, "0.2,0.2\n1,2\n", "twice.csv"))
    table = read_all(path, header=False)
    assert list(table.columns) == ["c1", "c2", "c3"]
    np.testing.assert_array_equal(values(table), [[5.1, 3.5, 1.4], [4.9, 3.0, 1.3]])
    assert not open_table(write(tmp_path, "a,2019\n1,2\n", "named.csv")).suspicion
    mixed = open_table(write(tmp_path, "7,red,5.1\n4,blue,3.0\n", "mixed.csv")).suspicion
    assert "decimals among them (5.1): if this is data" in mixed and "--no-header" in mixed


def test_decimals_with_a_comma(tmp_path):
    path = write(tmp_path, "a;b;c\n1,5;-2;red\n+,25e1;7;1,5 m\n")
    table = read_all(path, comma=True)
    a, b, c = (list(column.values) for column in table.columns.values())
    assert (a, b, c) == ([1.5, 2.5], [-2, 7], ["red", "1,5 m"])
    assert "(0,2): if this is data" in open_table(write(tmp_path, "0,2;red\n1,5;blue\n"), comma=True).suspicion
    for cell in ("1.5", "1.234,5"):
        with pytest.raises(InputError, match=f"'{cell}' is text, .* decimals with a comma, and thousands without"):
            read_all(write(tmp_path, f"a;b\n{cell};2\n"), comma=True)


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
        ("a,b\n1,2\n\n3,twelve\n", ["line 4", "'b'", "'twelve'", "not a number", "--categorical b", "--drop b"]),
        ("a,day\n1,2024-05-06\n", ["line 2", "'day'", "'2024-05-06' is a date", "days since", "--drop day"]),
        ("a,day\n1,6.5.2024 10:30\n", ["'6.5.2024 10:30' is a date"]),
        ("a,b\n1,2\n3,10:30\n", ["line 3", "'10:30' is a date or a time"]),
        ("a,b\n1,2\n3,1_000\n", ["line 3", "'b'", "'1_000'"]),
        ("a;b\n1,5;2\n", ["line 2", "'a'", "'1,5'", "point (or say --decimal-comma)"]),
        ('a,b\n"1,234.5",2\n', ["line 2", "'a'", "'1,234.5'", "thousands"]),
        ('a,b\n1,2\n"3,4\n', ["line 3"]),
        (b"a,b\n1,2\n3,\xff\n", ["UTF-8", "byte 10"]),
        (b"a\x00,\x00b\x00\n\x00", ["UTF-8", "zero bytes", "--encoding utf-16-le"]),
    ],
)
def test_csv_faults(tmp_path, text, parts):
    path = write(tmp_path, text)
    with pytest.raises(InputError) as raised:
        read_all(path)
    for part in [str(path), *parts]:
        assert part in str(raised.value)


def test_columns_that_have_to_hold_numbers(tmp_path):
    path = write(tmp_path, "a,price\n1,dear\n")
    with pytest.raises(InputError, match=r"line 2, column 'price': 'dear' is text, not a number; only numbers"):
        read_all(path, cells=Cells(numbers=("price",)))


def test_missing_file_folder_and_extension(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        open_table(tmp_path / "absent.csv")
    with pytest.raises(InputError, match="folder"):
        open_table(tmp_path)
    with pytest.raises(InputError, match=r"'\.xls'.*\.csv.*save the sheet as CSV"):
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
    np.testing.assert_array_equal(values(source.read(["x1", "y", "mask"])), [[1, 1.5, 1], [3, 2.5, 0], [5, 3.5, 1]])


def test_npz_takes_names_of_features(tmp_path):
    path = tmp_path / "data.npz"
    np.savez(path, X=np.zeros((3, 2)), y=np.zeros(3), features=np.array(["length", "width"]))
    assert open_table(path).default_features == ("length", "width")


def test_npz_with_one_array_a_column(tmp_path):
    path = tmp_path / "data.npz"
    np.savez_compressed(path, a=np.arange(3), b=np.arange(3) / 2)
    source = open_table(path)
    assert source.default_features == ("a", "b")
    np.testing.assert_array_equal(values(source.read(["b"])), [[0], [0.5], [1]])


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
        (lambda: npz(path, a=np.array([b"u", b"v"])), ["'a'", "--drop a"]),
        (lambda: npz(path, a=np.array(["2024-05-06"], dtype="datetime64[D]")), ["'a'", "is a date", "--drop a"]),
        (lambda: npz(path, X=np.array([["u", "v"]])), ["'X'", "not numbers"]),
        (lambda: npz(path, a=np.array([1.0, np.nan])), ["row 2", "'a'", "missing"]),
        (lambda: npz(path, a=np.array([1.0, -np.inf])), ["row 2", "'a'", "-inf is not finite"]),
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
        "f": pyarrow.array([0, 1], pyarrow.date32()),
    }
    parquet.write_table(pyarrow.table(columns), path)
    source = open_table(path)
    np.testing.assert_array_equal(values(source.read(["d", "a"])), [[1, 1], [0, 2]])
    with pytest.raises(InputError, match="row 2, column 'b': the value is missing"):
        source.read(["a", "b"])
    with pytest.raises(InputError, match="column 'c' is of type string"):
        source.read(["c"], Cells(numbers=("c",)))
    with pytest.raises(InputError, match=r"column 'f': its type, date32.*, is a date"):
        source.read(["f"])
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
