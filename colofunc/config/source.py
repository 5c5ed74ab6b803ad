"""Reading a configuration so that every value knows its line.

Problem: a mistake in a configuration is found long after it was read, and "unknown key 'stge'" without a line sends
people searching. Idea: YAML, JSON and Python dicts all become the same tree of `SourceNode`s, each with the place it came
from; whoever finds a mistake says `node.error(...)`.

>>> read_source({"mesh": {"dp": 2}}).entries["mesh"].where
'config: mesh'

YAML needs the extra `colofunc[yaml]`; JSON has a small reader of its own, because the library's drops positions. Only
plain data is read: tags that construct objects are refused.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from colofunc import owned, untrusted
from colofunc.errors import ConfigError

# Far more than anybody writes, far less than aliases of aliases can make.
MOST_NODES = 20_000
MOST_CONFIG_BYTES = 1 << 24
PLAIN_TAGS = ("null", "bool", "int", "float", "str", "map", "seq", "timestamp")
# YAML 1.1 takes 1e-3 for a word.
FLOAT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)\Z")
# What PyYAML says -> what to do.
YAML_TIPS = {
    "'\\t'": "spaces, YAML is never indented with tabs",
    "mapping values are not allowed": "the same indentation as the line above, or quotes around a value with ': ' in it",
    "expected <block end>": "the same indentation as the lines beside it",
    "could not find expected ':'": "a colon and a space after the key",
    "another document": "one document, without a line '---' in the middle",
    "undefined alias": "quotes around a value that begins with '*'",
    "while scanning an alias": "quotes around a value that begins with '*'",
}


@attrs.frozen
class SourceNode:
    """A value and where it stands. `value`: a plain value, a list of nodes, or a dict of nodes."""

    value: Any
    where: str  # "run.yaml:3", or "config: parallel[0].zero" where there is no file

    @property
    def entries(self) -> dict[str, SourceNode]:
        """The nodes of a mapping."""
        if not isinstance(self.value, dict):
            raise self.error(f"wants keys with values, not {self.text()}")
        return self.value

    @property
    def items(self) -> list[SourceNode]:
        """The nodes of a list; a single value is a list of one."""
        return self.value if isinstance(self.value, list) else [self]

    def plain(self) -> Any:
        """Lists, dicts and plain values."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        return [node.plain() for node in self.value] if isinstance(self.value, list) else self.value

    def text(self) -> str:
        return repr(self.plain())

    def error(self, message: str) -> ConfigError:
        return ConfigError(f"{self.where}: {message}")


def read_source(source: str | os.PathLike[str] | Mapping[str, Any]) -> SourceNode:
    """A configuration as a tree: a dict, or the path of a .yaml, .yml or .json file. The root is a mapping."""
    if isinstance(source, Mapping):
        root = _from_python(source, "", [0])
    else:
        root = _parsed(owned.given(source, "configure", ConfigError, "a .yaml, .yml or .json file, or give a dict"))
    if not isinstance(root.value, dict):
        raise root.error(f"the configuration is {root.text()}; write keys with values, such as `mesh: {{dp: 2}}`")
    return root


def _parsed(path: Path) -> SourceNode:
    if path.suffix not in (".yaml", ".yml", ".json"):
        raise ConfigError(f"{path}: a configuration is a .yaml, .yml or .json file, or a dict")
    try:
        text = untrusted.read_bytes(path, MOST_CONFIG_BYTES).decode()
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: there is no such file") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as text: {error}") from error
    if not text.strip():
        raise ConfigError(f"{path}: is empty; write keys with values, such as `mesh: {{dp: 2}}`")
    try:
        return _Json(text, path.name).root() if path.suffix == ".json" else _from_yaml(text, path.name)
    except RecursionError as error:
        raise ConfigError(f"{path}: is nested too deeply, or an anchor contains itself") from error


def _counted(made: list[int], where: str) -> None:
    made[0] += 1
    if made[0] > MOST_NODES:
        raise ConfigError(
            f"{where}: the configuration has more than {MOST_NODES} values; do aliases repeat one another?"
        )


def _twice(key: str, where: str, before: SourceNode) -> ConfigError:
    return ConfigError(f"{where}: key {key!r} was given before, at {before.where}; keep one of them")


# ---- Python ----


def _from_python(value: Any, path: str, made: list[int]) -> SourceNode:
    where = f"config: {path or 'the whole'}"
    _counted(made, where)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ConfigError(f"{where}: key {key!r} is no string")
        return SourceNode({k: _from_python(v, f"{path}.{k}" if path else k, made) for k, v in value.items()}, where)
    if isinstance(value, list | tuple):
        return SourceNode([_from_python(v, f"{path}[{place}]", made) for place, v in enumerate(value)], where)
    return SourceNode(value, where)


# ---- YAML ----


def _from_yaml(text: str, name: str) -> SourceNode:
    try:
        import yaml
    except ImportError as error:
        raise ConfigError(
            f"{name}: YAML needs PyYAML, which is not installed; pip install pyyaml, or write JSON"
        ) from error
    loader = None
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            raise ConfigError(f"{name}: holds nothing but comments; write keys with values, such as `mesh: {{dp: 2}}`")
        return _Yaml(name, loader.construct_object).value(root)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error)
        tip = next((f". Try: {tip}" for words, tip in YAML_TIPS.items() if words in str(error)), "")
        raise ConfigError(f"{name}:{mark.line + 1 if mark else 1}: is not YAML: {problem}{tip}") from error
    finally:
        if loader is not None:
            loader.dispose()


class _Yaml:
    """Composed YAML, whose nodes know their lines, as our nodes."""

    def __init__(self, name: str, scalar: Any) -> None:
        self.name, self.scalar, self.made = name, scalar, [0]

    def where(self, node: Any) -> str:
        return f"{self.name}:{node.start_mark.line + 1}"

    def value(self, node: Any) -> SourceNode:
        where = self.where(node)
        _counted(self.made, where)
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        if kind not in PLAIN_TAGS:
            raise ConfigError(f"{where}: tag {node.tag!r} is refused; a configuration holds plain data only")
        if node.id == "sequence":
            return SourceNode([self.value(child) for child in node.value], where)
        if node.id == "mapping":
            return SourceNode(self.members(node), where)
        if kind in ("str", "timestamp"):
            number = kind == "str" and node.style is None and FLOAT.match(node.value)
            return SourceNode(float(node.value) if number else node.value, where)
        try:
            return SourceNode(self.scalar(node), where)
        except ValueError as error:  # looks like a number and is none
            raise ConfigError(f"{where}: {error}; quote the value") from error

    def members(self, node: Any) -> dict[str, SourceNode]:
        found: dict[str, SourceNode] = {}
        for key, value in node.value:
            where = self.where(key)
            if key.id != "scalar":
                raise ConfigError(f"{where}: a key is no string")
            if key.tag.endswith(":merge"):
                raise ConfigError(
                    f"{where}: merge keys (<<) are not read; write the keys out, or `mesh: *name` for the whole mapping"
                )
            if node.flow_style and value.value == "" and ":" in key.value:
                raise ConfigError(f"{where}: {key.value!r} is one word to YAML; write a space after the colon")
            if key.value in found:
                raise _twice(key.value, where, found[key.value])
            found[key.value] = attrs.evolve(self.value(value), where=where)
        return found


# ---- JSON ----


class _Json:
    """JSON with the line of every value."""

    SPACE = re.compile(r"[ \t\r\n]*")

    def __init__(self, text: str, name: str) -> None:
        self.text, self.name, self.made = text, name, [0]
        self.scalar = json.JSONDecoder().raw_decode

    def root(self) -> SourceNode:
        node, end = self.value(self.skip(0))
        if self.skip(end) != len(self.text):
            raise self.wrong(self.skip(end), "something follows the end")
        return node

    def where(self, at: int) -> str:
        return f"{self.name}:{self.text.count(chr(10), 0, at) + 1}"

    def wrong(self, at: int, why: str) -> ConfigError:
        return ConfigError(f"{self.where(at)}: is not JSON: {why}")

    def skip(self, at: int) -> int:
        found = self.SPACE.match(self.text, at)
        return found.end() if found else at

    def value(self, at: int) -> tuple[SourceNode, int]:
        """(node, position after it) of the value that begins at `at`."""
        where = self.where(at)
        _counted(self.made, where)
        if self.text[at : at + 1] == "{":
            return self.members(at, where)
        if self.text[at : at + 1] == "[":
            found = []
            for begin in self.parts(at, "]"):
                node, self.end = self.value(begin)
                found.append(node)
            return SourceNode(found, where), self.end
        try:
            value, end = self.scalar(self.text, at)
        except json.JSONDecodeError as error:
            raise self.wrong(error.pos, error.msg) from error
        return SourceNode(value, where), end

    def members(self, at: int, where: str) -> tuple[SourceNode, int]:
        found: dict[str, SourceNode] = {}
        for begin in self.parts(at, "}"):
            key, end = self.value(begin)
            if not isinstance(key.value, str):
                raise self.wrong(begin, "a key is a string in double quotes")
            end = self.skip(end)
            if self.text[end : end + 1] != ":":
                raise self.wrong(end, f"no ':' after key {key.value!r}")
            node, self.end = self.value(self.skip(end + 1))
            if key.value in found:
                raise _twice(key.value, key.where, found[key.value])
            found[key.value] = attrs.evolve(node, where=key.where)
        return SourceNode(found, where), self.end

    def parts(self, at: int, close: str) -> Any:
        """Where each part of a list or mapping begins; `self.end` is where the last one, then the whole, ends."""
        at = self.skip(at + 1)
        if self.text[at : at + 1] == close:
            self.end = at + 1
            return
        while True:
            yield at
            at = self.skip(self.end)
            mark = self.text[at : at + 1]
            if mark == close:
                self.end = at + 1
                return
            if mark != ",":
                raise self.wrong(at, f"no ',' or {close!r} here")
            at = self.skip(at + 1)
