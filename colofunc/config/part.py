"""One transform or plan of a configuration, which says its line when it is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from colofunc.config.source import SourceNode
from colofunc.errors import ColofuncError


@attrs.frozen(eq=False)
class ConfigPart:
    """A function of the step (or of nothing) with its options."""

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    options: Mapping[str, Any]
    node: SourceNode

    def call(self, *first: Any) -> Any:
        """The function with its options; what it refuses is a ConfigError with the line."""
        try:
            return self.fn(*first, *self.args, **self.options)
        except (ColofuncError, TypeError, ValueError) as error:
            raise _at_fault(self.node, str(error)).error(f"{self.name}: {error}") from error

    def text(self) -> str:
        given = [*map(repr, self.args), *(f"{key}={value!r}" for key, value in self.options.items())]
        return f"{self.name}({', '.join(given)})"


def checked(node: SourceNode, name: str, fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(*args)`; what it refuses is a ConfigError with the node's line."""
    return ConfigPart(name, fn, args, {}, node).call()


def _at_fault(node: SourceNode, message: str) -> SourceNode:
    """The one option of a mapping that a message speaks of, by its value or else by its name, else the mapping."""
    options = node.value if isinstance(node.value, dict) else {}
    by_value: list[SourceNode] = []
    for key, child in options.items():
        said = child.text() if isinstance(child.value, str) else f"{key}={child.text()}"
        if said in message:
            by_value.append(child)
    by_name = [child for key, child in options.items() if re.search(rf"\b{re.escape(key)}=", message)]
    for named in (by_value, by_name):
        if len(named) == 1:
            return named[0]
    return node
