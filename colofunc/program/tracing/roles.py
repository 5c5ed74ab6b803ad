"""Roles: what each input leaf of a step is, a parameter, a buffer, optimizer state or the batch.

Problem: plans are about weights, moments and rows, and a step is a function of trees in which these stand anywhere.
Idea: who knows says so: `cf.functional` marks the leaves that a model is called with, `cf.adapt` those of its state,
and gradients say what is differentiated, all while the step runs. What they do not say, tensors do that carry a role
(`colofunc.dtensor.roles`), wherever they stand. Code that uses none of it is read: its weights stand where operators
have weights.

    model.apply(params, buffers, x)          mark_role("param", ...), mark_role("buffer", ...)
    opt.update(grads, state, params)         mark_role("state", ...)
    functional_call(module, params, x)       params of cf.functional(module), or of a step's state: they carry "param"
    F.linear(x, w), x @ w                    w is a parameter, where nobody has marked or differentiated anything, and
                                             no leaf carries "param"
    x * w                                    so is w where it is an nn.Parameter

Neither the position of an argument nor a word in a path decides. Arguments that are never marked, differentiated or
read as weights and carry no role are the batch, all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch

from colofunc import compat
from colofunc.ops.fp8 import carried
from colofunc.program.facts import facts_of
from colofunc.program.ir import Node, Value
from colofunc.program.tracing.meta import active_stacks
from colofunc.program.tracing.tree import Tree


def mark_role(role: str, tensors: Iterable[torch.Tensor]) -> None:
    """The leaves behind these tensors have a role. Does nothing outside of a trace."""
    here = active_stacks()
    if here is None:
        return
    for tensor in tensors:
        name = _leaf_behind(tensor)
        if name:
            here.marks.setdefault(name, role)


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for a value of a trace; others that a step uses are captured."""
    return "_colofunc_cell" in compat.unwrap_functorch(tensor).__dict__


def _leaf_behind(tensor: torch.Tensor) -> str:
    """The name of the input leaf that a traced tensor is, or was cast or copied from; "" where there is none."""
    cell: Any = compat.unwrap_functorch(tensor).__dict__.get("_colofunc_cell")
    if cell is None:
        return ""
    if cell.storage.kind == "input":
        return str(cell.storage.name)
    recorder, value = cell.storage.owner, cell.vid
    while value in recorder.producer:
        node = recorder.producer[value]
        if len(node.refs) != 1 or recorder.values[node.refs[0]].shape != recorder.values[value].shape:
            return ""
        value = node.refs[0]
    return str(recorder.values[value].name)


@attrs.frozen
class Observed:
    """What a trace has seen of its input leaves, by name."""

    arguments: Sequence[Tree]
    ids: Mapping[str, int]  # leaf -> its value
    values: Mapping[int, Value]
    nodes: Sequence[Node]
    marks: Mapping[str, str]
    differentiated: Mapping[str, int]  # leaf -> how deep inside other gradients
    next_values: Mapping[str, int]  # leaf of an argument that a result is anew -> the value that comes back for it
    carried: Mapping[str, str] = attrs.field(factory=dict)  # leaf -> the role that its tensor carries
    parameters: Collection[str] = ()  # leaves that are given as nn.Parameter

    def roles(self) -> dict[str, str]:
        """Leaf -> its role."""
        operands = set() if self._says_weights() else self._weight_operands()
        carried = {name: role for name, role in self.carried.items() if role != "state" or name not in operands}
        operands -= carried.keys()
        returned = self._returned(self.marks.keys() | operands | self._untouched(carried))
        said = {*self.marks, *returned}
        params = self._params(said | self._untouched(carried))
        weights = said | params | operands | carried.keys()
        holds = self._holds(weights)
        found: dict[str, str] = {}
        for argument, has_weights in zip(self.arguments, holds, strict=True):
            # An argument without weights beside one that has them is the batch; alone, it is all that there is.
            rest = "state" if has_weights and not all(holds) else "batch"
            for name in argument.names():
                found[name] = self._rest(name, rest)
        found |= dict.fromkeys(operands - said, "param")
        return {**found, **carried, **returned, **dict.fromkeys(params, "param"), **self.marks}

    def knows_no_weights(self) -> bool:
        """Whether nothing says which of several arguments has the weights."""
        if self.carried:
            return False
        operands = set() if self._says_weights() else self._weight_operands()
        said = {*self.marks, *self._returned(self.marks.keys() | operands)}
        return len(self.arguments) > 1 and not any(self._holds(said | self._params(said) | operands))

    def _says_weights(self) -> bool:
        """Whether somebody says what the weights are, so that operators are not asked: in `adj @ x` beside weights that
        are known x is none.
        """
        return bool(self.marks) or bool(self._outermost()) or "param" in self.carried.values()

    def _shape(self, name: str) -> tuple[int, ...]:
        return self.values[self.ids[name]].shape

    def _holds(self, weights: Collection[str]) -> list[bool]:
        """Which arguments have one of these leaves."""
        names = frozenset(weights)
        return [not names.isdisjoint(argument.names()) for argument in self.arguments]

    def _params(self, said: Collection[str]) -> set[str]:
        """What is differentiated and not the batch, of which penalties and forces take a gradient too.

        `said`: leaves that are marked or come back. Where there are any, an argument without them is the batch. Where
        there are none, the outermost gradient is that of the weights: what is differentiated only inside of it is the
        batch.
        """
        if not said:
            return self._outermost()
        params: set[str] = set()
        for argument in self.arguments:
            names = argument.names()
            if any(name in said for name in names):
                params.update(name for name in names if name in self.differentiated)
        return params

    def _untouched(self, carried: Mapping[str, str]) -> set[str]:
        """Leaves that carry a role, where none of them is differentiated: then it is the batch of which a gradient is
        taken.
        """
        return set() if self._outermost() & carried.keys() else set(carried)

    def _outermost(self) -> set[str]:
        """What is differentiated in no other gradient."""
        outermost = min(self.differentiated.values(), default=1)
        return {name for name, depth in self.differentiated.items() if depth == outermost}

    def _rest(self, name: str, rest: str) -> str:
        """Of a leaf that nothing is known of, but what its argument is.

        Where nothing else is known, numbers beside weights are weights.
        """
        if rest == "state" and name in self.differentiated:
            return "param"
        value = self.values[self.ids[name]]
        unknown = not self.differentiated and not self.marks and not self.carried
        return "param" if rest == "state" and unknown and value.shape and value.dtype.is_floating_point else rest

    def _returned(self, known: Collection[str]) -> dict[str, str]:
        """Leaves of arguments with weights that come back in a result.

        State, where the new value depends on a gradient; a frozen weight, where it is read and comes back as it is;
        else a buffer. `known`: leaves that are something else than the batch.
        """
        if len(self.arguments) < 2:
            return {}
        after_gradients: set[int] = set()
        read: set[int] = set()
        for node in self.nodes:
            read.update(node.refs)
            if node.phase != "forward" or any(ref in after_gradients for ref in node.refs):
                after_gradients.update(node.results)
        found = {}
        for argument in self.arguments:
            if not self._is_state(argument, known):
                continue
            for name in argument.names():
                if name not in self.next_values:
                    continue
                value, after = self.values[self.ids[name]], self.next_values[name]
                if after in after_gradients or value.id not in read:
                    found[name] = "state"
                elif after == value.id and value.shape and value.dtype.is_floating_point:
                    found[name] = "frozen"
                elif argument.kind != "tensor":
                    # Of a tensor alone, any result of its shape is taken for what comes back: w of x @ w.
                    found[name] = "buffer"
        return found

    def _is_state(self, argument: Tree, known: Collection[str]) -> bool:
        """Whether an argument that comes back has weights.

        What is differentiated beside weights that are known may be weights as well (adapters) or the batch (positions
        that forces move): weights, if it has names and leaves another argument with rows for the batch.
        """
        names = frozenset(argument.names())
        if not names.isdisjoint(known):
            return True
        trained = self._outermost()
        if names.isdisjoint(trained) or not known:
            return not names.isdisjoint(trained)
        return argument.kind != "tensor" and self._has_rows_beside(names | trained | frozenset(known))

    def _has_rows_beside(self, names: Collection[str]) -> bool:
        """Whether some argument with dims has none of these leaves."""
        for argument in self.arguments:
            own = argument.names()
            if not any(name in names for name in own) and any(self.values[self.ids[name]].shape for name in own):
                return True
        return False

    def _weight_operands(self) -> set[str]:
        """Leaves that operators read as weights, or that say so by their type beside an argument without such ones."""
        made = {out: node for node in self.nodes for out in node.results}
        names = {value: name for name, value in self.ids.items()}

        def leaf_behind(value: int) -> str:
            while value in made and len(carried(made[value].target, made[value].refs)) == 1:
                value = made[value].refs[0]
            return names.get(value, "")

        found: set[str] = set()
        for node in self.nodes:
            for place in facts_of(node.target).weights:
                if place < len(node.refs):
                    found.add(leaf_behind(node.refs[place]))
        found |= self._second_factors(leaf_behind)
        if self._has_rows_beside(self.parameters):
            found |= set(self.parameters)
        return found - {""}

    def _second_factors(self, leaf_behind: Callable[[int], str]) -> set[str]:
        """Matrices that rows of another argument are multiplied with from the left, and that are never such rows
        themselves.
        """
        behind = self._arguments_behind()
        first: set[str] = set()
        second: set[str] = set()
        for node in self.nodes:
            factors = facts_of(node.target).factors
            if factors is None:
                continue
            # As far as rows and weight can be told apart, the first factor are rows and the second is a weight.
            rows, matrix = node.refs[factors[0]], leaf_behind(node.refs[factors[1]])
            first.add(leaf_behind(rows))
            # Within one argument nothing is told apart: x @ x.T, queries @ keys, two factors of a weight.
            # A leaf may be a stack of matrices, or one matrix that is expanded to a batch of them.
            weight = node.refs[factors[1]]
            is_matrix = bool(matrix) and 2 in (len(self.values[weight].shape), len(self._shape(matrix)))
            if is_matrix and behind[rows] - behind[self.ids[matrix]]:
                second.add(matrix)
        return second - first

    def _arguments_behind(self) -> dict[int, set[int]]:
        """Value -> the positions of the arguments that it is computed of."""
        behind: defaultdict[int, set[int]] = defaultdict(set)
        for position, argument in enumerate(self.arguments):
            for name in argument.names():
                behind[self.ids[name]] = {position}
        for node in self.nodes:
            sources = set().union(*(behind[ref] for ref in node.refs))
            behind.update((out, sources) for out in node.results)
        return behind


Alike = Callable[[Tree, Tree, Sequence[Value], Sequence[Value]], bool]
"""Of an argument, a result and the values of both, whether the one can be what the other has become."""


def next_values(
    arguments: Sequence[Tree],
    results: Sequence[Tree],
    ids: Mapping[str, int],
    outputs: Sequence[int],
    values: Mapping[int, Value],
    nodes: Sequence[Node],
    alike: Alike | None = None,
) -> dict[str, int]:
    """Leaf of an argument -> the value that comes back for it: each argument in the first result that has its tree,
    shapes and dtypes, is made of it, and that no other has taken.

    `ids`: leaf -> its value. `outputs`: the values of the leaves of all results. `alike`: what is asked in place of
    `comes_back`.
    """
    alike = comes_back if alike is None else alike
    made = {out: node for node in nodes for out in node.results}
    free: list[tuple[Tree, Sequence[int]]] = []
    first = 0
    for result in results:
        count = len(result.names())
        free.append((result, outputs[first : first + count]))
        first += count
    found: dict[str, int] = {}
    for argument in arguments:
        names = argument.names()
        before = [values[ids[name]] for name in names]
        for place, (result, after) in enumerate(free):
            if alike(argument, result, before, [values[id] for id in after]) and _goes_on(
                {ids[name] for name in names}, after, made
            ):
                found |= dict(zip(names, after, strict=True))
                del free[place]
                break
    return found


def _goes_on(old: Collection[int], after: Sequence[int], made: Mapping[int, Node]) -> bool:
    """Whether values are made of others, and not only as their gradients, which have their shapes too."""
    todo, seen = list(after), set[int]()
    while todo:
        value = todo.pop()
        if value in old:
            return True
        node = made.get(value)
        if value not in seen and node is not None and node.phase != "backward":
            todo += node.refs
        seen.add(value)
    return False


def comes_back(argument: Tree, result: Tree, before: Sequence[Value], after: Sequence[Value]) -> bool:
    """Whether a result has the tree, shapes and dtypes of an argument, so that it can be its next value."""
    if not same_shapes(argument, result, before, after):
        return False
    return all(old.dtype == new.dtype for old, new in zip(before, after, strict=True))


def same_shapes(argument: Tree, result: Tree, before: Sequence[Value], after: Sequence[Value]) -> bool:
    """Whether a result has the tree and shapes of an argument."""
    if not argument.names() or _structure(argument) != _structure(result):
        return False
    return all(old.shape == new.shape for old, new in zip(before, after, strict=True))


def results_of(out: Tree) -> Sequence[Tree]:
    """The outputs of a step: the items of a tuple, else all that it returns."""
    several = out.kind in ("sequence", "namedtuple") and out.type is not list and out.children
    return out.children if several else (out,)


def _structure(tree: Tree) -> Any:
    return (tree.kind, tree.type, tree.keys, tuple(_structure(child) for child in tree.children))
