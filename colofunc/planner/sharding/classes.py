"""Ties: operator calls that stand at the same place of identical layers are decided once.

Problem: OPT-30B's step has 10,000 operator calls, but its 48 layers are alike; deciding them one by one costs time and
gives plans that differ from layer to layer for no reason. Idea: colour refinement. An item (input leaf or node) starts
with a colour of what it is: target, arguments, shapes, phase, module path and leaf name with digits starred; then each
round adds the colours of its producers and consumers. After a few rounds two items of one colour have the same
neighbourhood, so one variable with a multiplicity stands for all of them.

    h.0.mlp.fc, h.1.mlp.fc, ..., h.47.mlp.fc   ->   one variable h.*.mlp.fc (x48)

Source: Weisfeiler and Leman's colour refinement; folding repeated blocks as in Alpa's layer clustering (2201.12023).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable

import attrs

from colofunc.program.ir import Node, Program, Ref, Value, computed_once, map_refs

SMALL = 96
"""Programs of at most this many nodes are decided call by call."""

ROUNDS = 3
"""At most this many rounds in which colours of producers and consumers are added."""

LONG = 8
"""Operands of a list longer than this are alike to the one who makes them: the k-th of 772 norms to be stacked."""

_DIGITS = re.compile(r"\d+")


def starred(name: str) -> str:
    """`h.12.attn` -> `h.*.attn`."""
    return _DIGITS.sub("*", name)


@attrs.frozen
class Ties:
    """Items are numbered: input k of the program is k, node k is len(inputs) + k. `members` of a class are items."""

    of_item: tuple[int, ...]
    members: tuple[tuple[int, ...], ...]
    n_inputs: int

    def of_node(self, index: int) -> int:
        return self.of_item[self.n_inputs + index]

    def of_input(self, position: int) -> int:
        return self.of_item[position]

    @property
    def size(self) -> int:
        return len(self.members)


def item_of(program: Program, item: int) -> Node | Value:
    """The input leaf or the node with this item number."""
    n = len(program.inputs)
    return program.values[program.inputs[item]] if item < n else program.nodes[item - n]


def tie(program: Program, extra: Callable[[int], Hashable] = lambda item: None, enabled: bool | None = None) -> Ties:
    """Classes of like items. `extra(item)` keeps items apart that differ in it (their constraints, say)."""
    n = len(program.inputs)
    total = n + len(program.nodes)
    if enabled is None:
        enabled = len(program.nodes) > SMALL
    if not enabled:
        return _ties(range(total), n)
    producers, consumers = _links(program)
    colours = _number((kind, extra(item)) for item, kind in enumerate(_kinds(program)))
    count = max(colours, default=-1) + 1
    for _ in range(ROUNDS):
        signatures = []
        for item in range(total):
            made_by = tuple([(colours[producer], result) for producer, result in producers[item]])
            read_by = [(colours[cls] if cls >= 0 else cls, result, operand) for cls, result, operand in consumers[item]]
            signatures.append((colours[item], made_by, tuple(sorted(read_by))))
        colours = _number(signatures)
        now = max(colours, default=-1) + 1
        if now == count:
            break
        count = now
    return _ties(colours, n)


@computed_once
def _kinds(program: Program) -> list[int]:
    """What each item is by itself, as numbers."""
    return _number(_what(program, item) for item in range(len(program.inputs) + len(program.nodes)))


def _what(program: Program, item: int) -> Hashable:
    thing = item_of(program, item)
    if isinstance(thing, Value):
        return "input", starred(thing.name), thing.shape, thing.dtype, thing.role
    values = program.values
    types = tuple((values[r].shape, values[r].dtype) for r in thing.refs)
    outs = tuple(None if o is None else (values[o].shape, values[o].dtype) for o in thing.outs)
    args = map_refs((thing.args, thing.kwargs), lambda id: "%")
    # repr: True, 1 and 1.0 are equal as keys but not as arguments
    return thing.target, repr(args), types, outs, thing.phase, starred(thing.path)


@computed_once
def _links(program: Program) -> tuple[list[list[tuple[int, int]]], list[list[tuple[int, int, int]]]]:
    """Per item: (producer item, its result) of each operand; (consumer item, result, operand) of each use."""
    n = len(program.inputs)
    made = {id: (k, 0) for k, id in enumerate(program.inputs)}
    producers: list[list[tuple[int, int]]] = [[] for _ in range(n + len(program.nodes))]
    consumers: list[list[tuple[int, int, int]]] = [[] for _ in range(n + len(program.nodes))]
    for index, node in enumerate(program.nodes):
        for ref, place in zip(node.refs, _places(node), strict=True):
            p, j = made[ref]
            producers[n + index].append((p, j))
            consumers[p].append((n + index, j, place))
        for j, o in enumerate(node.outs):
            if o is not None:
                made[o] = (n + index, j)
    leaf_of = dict(program.aliases)
    for position, id in enumerate(program.outputs):
        p, j = made[id]
        leaf = leaf_of.get(position)
        # A donated leaf is a neighbour; any other output is a mark that is not a colour.
        consumers[p].append((leaf, j, -1) if leaf is not None else (-1, j, -1))
    return producers, consumers


def _places(node: Node) -> tuple[int, ...]:
    """Per operand the number that tells its role: its own, or that of the first of a long list it stands in."""
    places: list[int] = []
    for item in (*node.args, *(item for _, item in node.kwargs)):
        _add_places(item, places)
    return tuple(places)


def _add_places(arg: object, places: list[int]) -> None:
    if type(arg) is tuple:
        first = len(places)
        for item in arg:
            _add_places(item, places)
        if len(places) - first > LONG:
            places[first:] = [first] * (len(places) - first)
    elif type(arg) is Ref:
        places.append(len(places))


def _number(keys: Iterable[Hashable]) -> list[int]:
    """Keys as integers in order of first appearance (never by hash, which differs between processes)."""
    seen: dict[Hashable, int] = {}
    return [seen.setdefault(key, len(seen)) for key in keys]


def _ties(colours: Iterable[int], n_inputs: int) -> Ties:
    of_item = tuple(colours)
    members: list[list[int]] = [[] for _ in range(max(of_item, default=-1) + 1)]
    for item, c in enumerate(of_item):
        members[c].append(item)
    return Ties(of_item, tuple(tuple(m) for m in members), n_inputs)
