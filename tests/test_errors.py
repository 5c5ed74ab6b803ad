"""Errors: one base, the builtin that a Python user expects beside it, and a docstring that is the manual's section."""

import builtins
import inspect

import pytest

from colofunc import errors

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
