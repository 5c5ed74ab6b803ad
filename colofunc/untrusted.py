"""Data from files, read as what it should be: JSON of a bounded size, and records whose every field has its type.

Problem: a file that somebody changed, cut or crafted ends in a KeyError far from where it was read, or puts a string
where a number becomes part of something. Idea: one reader for all files. What a record holds is said by its
annotations, and the first value that is something else is named by its place.

    data = read_json("plan.json")                        # Wrong: not JSON, too deep, too large, NaN
    plan = build(Plan, data, "plan")                     # Wrong: plan.inputs[3].shape is 'x'; it must be of type tuple

Callers turn `Wrong` into the error of their kind of file. Annotations: str, int, float, bool, None, Any, Literal,
unions, tuples, dicts by name, and other attrs records; JSON's lists are tuples.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import stat
import sys
import types
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import attrs

from colofunc.errors import near

T = TypeVar("T")
MakeField = Callable[[Any, str], Any]

MOST_BYTES = 1 << 30
MOST_INT = (1 << 63) - 1
MOST_FLOAT = sys.float_info.max


class Wrong(ValueError):
    """What is wrong with a file's content, and where."""


def read_json(path: str | os.PathLike[str], most_bytes: int = MOST_BYTES) -> Any:
    """The content of a JSON file. Raises Wrong, and OSError where the file cannot be read."""
    return parse_json(read_bytes(path, most_bytes))


def read_bytes(path: str | os.PathLike[str], most_bytes: int = MOST_BYTES) -> bytes:
    """What a file holds. Raises Wrong where that is too much, and OSError as `open_file` does."""
    with open_file(path) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise Wrong(f"it has more than {most_bytes} bytes")
    return data


def open_file(path: str | os.PathLike[str]) -> io.BufferedReader:
    """A file for reading.

    Raises OSError, also for a device or a pipe: one has no end, the other may keep its reader waiting.
    """
    file = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")  # noqa: SIM115 (the caller closes it)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is a device or a pipe, no file", os.fspath(path))
    return file


def parse_json(text: str | bytes) -> Any:
    """JSON as the standard has it: numbers are finite. Raises Wrong."""
    try:
        return json.loads(text, parse_constant=_no_number)
    except RecursionError as error:
        raise Wrong("it is nested too deeply") from error
    except ValueError as error:
        raise Wrong(f"it is not JSON: {error}") from error


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is no number")


def build(kind: type[T], data: Any, where: str, infinity: str = "") -> T:
    """A value of this type from JSON data. infinity: the word that stands for an infinite float. Raises Wrong."""
    annotation: Any = kind
    made: T = _maker(annotation, infinity)(data, where)
    return made


def check(kind: Any, data: Any, where: str) -> Any:
    """As `build`, for types that are no classes: `tuple[int, ...]`, `str | None`."""
    return _maker(kind, "")(data, where)


@cache
def _maker(kind: Any, infinity: str) -> MakeField:
    """What makes values of a type, made once for each."""
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return lambda data, where: data
    if attrs.has(kind):
        return _record_maker(kind, infinity)
    if origin in (Union, types.UnionType):
        return _union_maker([_maker(arg, infinity) for arg in args])
    if origin is Literal:
        return _literal_maker(args)
    if origin is tuple:
        return _tuple_maker(args, infinity)
    if origin is dict:
        return _dict_maker(_maker(args[1], infinity))
    if kind is float:
        return _float_maker(infinity)
    if kind is int:
        return _make_int
    return _plain_maker(type(None) if kind is None else kind)


def _wrong(data: Any, where: str, wanted: str) -> Wrong:
    return Wrong(f"{where} is {data!r:.80}; it must be of type {wanted}")


def _plain_maker(kind: type) -> MakeField:
    def make(data: Any, where: str) -> Any:
        if type(data) is not kind:
            raise _wrong(data, where, kind.__name__)
        return data

    return make


def _make_int(data: Any, where: str) -> int:
    if type(data) is not int or abs(data) > MOST_INT:
        raise _wrong(data, where, "int")
    return data


def _float_maker(infinity: str) -> MakeField:
    def make(data: Any, where: str) -> Any:
        if infinity and data == infinity:
            return math.inf
        if type(data) not in (int, float) or not abs(data) <= MOST_FLOAT:
            raise _wrong(data, where, "int or float")
        return data

    return make


def _literal_maker(words: tuple[Any, ...]) -> MakeField:
    def make(data: Any, where: str) -> Any:
        if type(data) is not str or data not in words:
            raise Wrong(f"{where} is {data!r:.80}{near(str(data), map(str, words))}")
        return data

    return make


def _union_maker(makers: list[MakeField]) -> MakeField:
    def make(data: Any, where: str) -> Any:
        problems = []
        for maker in makers:
            try:
                return maker(data, where)
            except Wrong as error:
                problems.append(error)
        raise problems[0]

    return make


def _tuple_maker(args: tuple[Any, ...], infinity: str) -> MakeField:
    several = len(args) == 2 and args[1] is Ellipsis
    makers = [_maker(arg, infinity) for arg in args if arg is not Ellipsis]

    def make(data: Any, where: str) -> Any:
        if type(data) not in (list, tuple):
            raise _wrong(data, where, "list")
        if several:
            return tuple(makers[0](item, f"{where}[{place}]") for place, item in enumerate(data))
        if len(data) != len(makers):
            raise Wrong(f"{where} has {len(data)} values; it must have {len(makers)}")
        return tuple(maker(item, f"{where}[{k}]") for k, (maker, item) in enumerate(zip(makers, data, strict=True)))

    return make


def _dict_maker(maker: MakeField) -> MakeField:
    def make(data: Any, where: str) -> Any:
        if type(data) is not dict:
            raise _wrong(data, where, "dict")
        return {key: maker(value, f"{where}[{key!r:.80}]") for key, value in data.items()}

    return make


def _record_maker(kind: Any, infinity: str) -> MakeField:
    fields = {field.name: field for field in attrs.fields(attrs.resolve_types(kind))}
    makers = {name: _maker(field.type, infinity) for name, field in fields.items()}
    needed = [name for name, field in fields.items() if field.default is attrs.NOTHING]

    def make(data: Any, where: str) -> Any:
        if type(data) is not dict:
            raise _wrong(data, where, "dict")
        for name in data:
            if name not in fields:
                raise Wrong(f"{where} has an unknown field {name!r:.80}{near(name, fields, 'fields')}")
        for name in needed:
            if name not in data:
                raise Wrong(f"{where} lacks the field {name!r}")
        return kind(**{name: makers[name](value, f"{where}.{name}") for name, value in data.items()})

    return make


__all__ = ["Wrong", "build", "check", "open_file", "parse_json", "read_bytes", "read_json"]
