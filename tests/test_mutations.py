"""Each break of ``mutations/breaks.py`` fits one line of the package; ``mutations/run.py`` makes them."""

from __future__ import annotations

import pytest

from mutations.breaks import BREAKS, Break, faults

TEXT = 'def area(a, b):\n    """Of both sides."""\n    c = a * b  # twice: a * b\n    return c + a\n'


def test_every_break_fits_its_file():
    assert len(BREAKS) <= 150
    found = faults(BREAKS)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({}, None),
        ({"old": "c = a / b"}, "occurs 0 times"),
        ({"old": "a * b"}, "occurs 2 times"),
        ({"old": "a + c"}, "occurs 0 times"),
        ({"old": "# twice", "new": "# once"}, "changes no statement"),
        ({"old": "both", "new": "two"}, "changes no statement"),
        ({"new": "c = a +"}, "changes no statement"),
        ({"new": "c = a + b\n"}, "more than one line"),
        ({"tests": ("test_volume.py",)}, "is no file"),
        ({"tests": ()}, "names no tests"),
        ({"why": ""}, "names no tests, or no reason"),
    ],
)
def test_what_does_not_fit_is_found(tmp_path, changes, complaint):
    (tmp_path / "area.py").write_text(TEXT)
    (tmp_path / "test_area.py").write_text("")
    right = {"old": "c = a * b", "new": "c = a + b", "tests": ("test_area.py",), "why": "a sum"}
    found = faults((Break(**{**right, **changes}),), tmp_path, tmp_path)
    assert [complaint in one for one in found] == [True] if complaint else found == []


def test_a_break_that_is_listed_twice_is_found(tmp_path):
    (tmp_path / "area.py").write_text(TEXT)
    (tmp_path / "test_area.py").write_text("")
    one = Break("c = a * b", "c = a + b", ("test_area.py",), "a sum")
    assert faults((one, one), tmp_path, tmp_path) == ["'c = a + b' is listed twice"]
