"""Errors: one base, the builtin that a Python user expects beside it, and a docstring that is the manual's section."""

import builtins
import inspect
import re
from pathlib import Path

import pytest

from colofunc import env, errors

ROOT = Path(__file__).resolve().parents[1]

CLASSES = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, errors.ColofuncError) and cls is not errors.ColofuncError
]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_is_ours_and_pythons_and_says_what_it_means(cls: type[Exception]) -> None:
    pythons = {base for base in cls.__mro__ if getattr(builtins, base.__name__, None) is base}
    assert pythons - {Exception, BaseException, object}
    assert cls.__doc__


def test_every_error_is_in_one_file_of_which_the_page_is_made() -> None:
    """A class of its own elsewhere would be missing on docs/errors.md."""
    page = (ROOT / "docs" / "errors.md").read_text()
    assert [cls.__name__ for cls in CLASSES if f"## {cls.__name__}\n" not in page] == []
    of_ours = re.compile(r"^class (\w+)\(.*\bColofuncError\b", re.MULTILINE)
    elsewhere = {}
    for path in sorted((ROOT / "colofunc").rglob("*.py")):
        if path != Path(errors.__file__):
            elsewhere.update(dict.fromkeys(of_ours.findall(path.read_text()), path.name))
    assert elsewhere == {}


def test_a_variable_that_cannot_be_is_said_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(errors.SwitchError) as caught:
        env.launched()
    assert str(caught.value) == "RANK=2 is no rank of WORLD_SIZE=2; ranks count from 0, so the last is 1"
