"""Options of a configuration against the signature of what they are for.

Problem: a table of allowed keys beside every constructor is wrong as soon as one changes. Idea: the constructor's own
signature is the table. `bind` turns

    zero: 3                    into  ((3,), {})              the first option by position
    zero: {stage: 3}           into  ((), {"stage": 3})      options by name
    zero: [3, dp]              into  ((3, "dp"), {})         several by position
    zero:            or true   into  ((), {})                none

and checks names and, where the annotations are simple, types. An option whose annotation is a record takes a mapping.
"""

from __future__ import annotations

import collections.abc
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union

import attrs

from colofunc.config.source import SourceNode
from colofunc.errors import near

WORDS: dict[Any, str] = {
    int: "a whole number", float: "a number", bool: "true or false", str: "a word", tuple: "a list", list: "a list",
    dict: "keys with values", collections.abc.Mapping: "keys with values", collections.abc.Sequence: "a list",
}  # fmt: skip
Bound = tuple[tuple[Any, ...], dict[str, Any]]
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def parameters(fn: Callable[..., Any], skip: int = 0, without: tuple[str, ...] = ()) -> dict[str, inspect.Parameter]:
    """Parameters a configuration can set, with evaluated annotations: all but the first `skip` and some names."""
    signature = inspect.signature(fn)
    try:
        hints = typing.get_type_hints(fn.__init__ if inspect.isclass(fn) else fn)
    except Exception:  # an annotation that is known to the type checker only
        hints = {}
    found: dict[str, inspect.Parameter] = {}
    for name, parameter in list(signature.parameters.items())[skip:]:
        if name not in without:
            found[name] = parameter.replace(annotation=hints.get(name, Any))
    return found


def bind(node: SourceNode, name: str, allowed: Mapping[str, inspect.Parameter]) -> Bound:
    """The arguments that a node means for `name`, whose parameters are `allowed`. Raises ConfigError with the line."""
    by_position = [parameter for parameter in allowed.values() if parameter.kind in POSITIONAL]
    rest = _of_kind(allowed, inspect.Parameter.VAR_KEYWORD)
    value = node.value
    if isinstance(value, dict) and not _is_record(value, allowed, by_position, rest):
        named = {}
        for key, child in value.items():
            parameter = allowed.get(key, rest)
            if parameter is None or parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                raise child.error(f"{name} has no option {key!r}{near(key, _names(allowed), 'options')}")
            named[key] = convert(child, parameter.annotation, f"{name}: {key}")
        args: tuple[Any, ...] = ()
    else:
        more = _of_kind(allowed, inspect.Parameter.VAR_POSITIONAL)
        args, named = _positional(node, name, by_position, more), {}
    for parameter in by_position[len(args) :]:
        if parameter.default is parameter.empty and parameter.name not in named:
            raise node.error(f"{name} needs {parameter.name!r}; write `{name}: {{{parameter.name}: ...}}`")
    return args, named


def _of_kind(allowed: Mapping[str, inspect.Parameter], kind: Any) -> inspect.Parameter | None:
    """The first parameter of a kind."""
    for parameter in allowed.values():
        if parameter.kind is kind:
            return parameter
    return None


def _names(allowed: Mapping[str, inspect.Parameter]) -> list[str]:
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [parameter.name for parameter in allowed.values() if parameter.kind not in variable]


def _is_record(
    value: Mapping[str, SourceNode],
    allowed: Mapping[str, inspect.Parameter],
    by_position: list[inspect.Parameter],
    rest: Any,
) -> bool:
    """Whether a mapping is the first option itself (a record's fields) and not the options by name."""
    if rest is not None or not by_position or not value or any(key in allowed for key in value):
        return False
    record = _record(by_position[0].annotation)
    return record is not None and any(key in parameters(record) for key in value)


def _positional(
    node: SourceNode, name: str, by_position: list[inspect.Parameter], more: inspect.Parameter | None = None
) -> tuple[Any, ...]:
    """Options by position; those behind the named ones are `more`, where a function takes any number."""
    # The value is the first option itself where that one takes such a value: a switch, a list.
    first = bool(by_position) and _fits(node.plain(), by_position[0].annotation, strict=True)
    if node.value is None or (node.value is True and not first):
        return ()
    given = node.items if isinstance(node.value, list) and not first else [node]
    if more is not None:
        by_position = by_position + [more] * (len(given) - len(by_position))
    if len(given) > len(by_position):
        names = ", ".join(parameter.name for parameter in by_position)
        most = f"{len(by_position)} options by position ({names})" if names else "no options"
        raise node.error(f"{name} takes {most}, not {node.text()}")
    args: list[Any] = []
    for child, parameter in zip(given, by_position, strict=False):
        args.append(convert(child, parameter.annotation, f"{name}: {parameter.name}"))
    return tuple(args)


def convert(node: SourceNode, hint: Any, what: str) -> Any:
    """A node's value as an annotation wants it; records are built from mappings."""
    record = _record(hint)
    if record is not None and isinstance(node.value, dict):
        args, named = bind(node, what, parameters(record))
        try:
            return record(*args, **named)
        except (TypeError, ValueError) as error:
            raise _field_at_fault(node, record, named, str(error)).error(f"{what}: {error}") from error
    value = node.plain()
    if not _fits(value, hint):
        raise node.error(f"{what} is {value!r}; allowed: {describe(hint)}")
    meant = next((each for each in alternatives(hint) if _fits_one(value, each, False)), hint)
    if isinstance(value, list) and _origin(meant) is tuple:
        return tuple(value)
    return value


def _field_at_fault(
    node: SourceNode, record: Callable[..., Any], fields: Mapping[str, Any], message: str
) -> SourceNode:
    """The field that is refused by itself, in the same words; else all of them."""
    for key, value in fields.items():
        try:
            record(**{key: value})
        except (TypeError, ValueError) as error:
            if str(error) == message:
                return node.entries[key]
    return node


def _record(hint: Any) -> type | None:
    """The attrs class among what an annotation allows."""
    for each in alternatives(hint):
        if isinstance(each, type) and attrs.has(each):
            return each
    return None


def alternatives(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) in (Union, types.UnionType):
        return tuple(part for alternative in typing.get_args(hint) for part in alternatives(alternative))
    return (hint,)


def _origin(hint: Any) -> Any:
    return typing.get_origin(hint) or hint


def _fits(value: Any, hint: Any, strict: bool = False) -> bool:
    """Whether a plain value can be what an annotation says. What is not understood fits, unless `strict`."""
    return any(_fits_one(value, each, strict) for each in alternatives(hint))


def _fits_one(value: Any, hint: Any, strict: bool) -> bool:
    origin = _origin(hint)
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in typing.get_args(hint))
    if hint is None or hint is type(None):
        return value is None
    if origin in (bool, str):
        return isinstance(value, origin)
    if origin in (int, float):
        numbers = (int,) if origin is int else (int, float)
        return isinstance(value, numbers) and not isinstance(value, bool)
    if origin in (tuple, list, set, frozenset, collections.abc.Sequence, collections.abc.Iterable):
        if not isinstance(value, list):
            return False
        inner = [each for each in typing.get_args(hint) if each is not ...]
        if origin is not tuple or len(inner) <= 1:  # any number of one kind
            inner = (inner or [Any]) * len(value)
        return len(inner) == len(value) and all(map(_fits, value, inner))
    if origin in (dict, collections.abc.Mapping):
        return isinstance(value, dict)
    return not strict


def describe(hint: Any) -> str:
    """An annotation as a person would say it."""
    said = []
    for each in alternatives(hint):
        origin = _origin(each)
        if origin is Literal:
            said.append(", ".join(map(repr, typing.get_args(each))))
        elif each is None or each is type(None):
            said.append("nothing (null)")
        else:
            said.append(WORDS.get(origin) or str(getattr(each, "__name__", each)))
    return " or ".join(dict.fromkeys(said))
