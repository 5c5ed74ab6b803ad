"""Sharing: lanes that hold the same tensor and are about to write different things into it.

Problem: what ranks have in common is computed once, so that one tensor stands for several of them, until an operator
writes into it something else for each. Idea: where nobody reads that memory later, each rank gets a new result, which
costs less than a copy and a write; otherwise each gets memory of its own first, and all that is read of it later, views
and the whole, is taken from there.

    v7 = mul(v1_0, v2); ...              # was mul_out(v1_0, v2, out=v2), which three other ranks would have seen
    v2_s0, v3_s1, = unshared_copies(v2, v3)         # v3 is a view of v2 that is read behind the write
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING

import attrs
import torch

from colofunc.program.facts import lifetimes
from colofunc.program.ir import Node, Program
from colofunc.program.memory import lies
from colofunc.program.passes.loop import last_uses
from colofunc.program.passes.reuse import functional

if TYPE_CHECKING:
    from colofunc.executors.source import Writer


@attrs.frozen(eq=False)
class _Memory:
    """Where the values of a program, or of the body of a loop, lie."""

    program: Program
    home: Mapping[int, int]  # value -> its storage
    values: Mapping[int, Sequence[int]]  # storage -> the values in it
    last: Mapping[int, int]  # value -> its last reader
    place: Mapping[int, int]  # id of a node -> its position


class Sharing:
    """Of one function that is written.

    `spares`: lanes that share a tensor may compute where a rank of its own would write in place.
    """

    def __init__(self, writer: Writer, spares: bool) -> None:
        self.writer, self.spares = writer, spares
        self._splits = count()
        self._memory: _Memory | None = None

    def before(self, node: Node, changed: Sequence[int], keys: Sequence[Hashable]) -> Node:
        """Write down what has to come before a node that writes to `changed`.

        The node, or what to write in its place.
        """
        if not self._shared(changed, keys):
            return node
        spared = functional(node) if self.spares else None
        if spared is not None and not self._read_later(node, changed):
            return spared
        self.separate(node, changed, keys)
        return node

    def separate(self, node: Node, changed: Sequence[int], keys: Sequence[Hashable]) -> None:
        """Give lanes that share a tensor, but are about to write different things into it, tensors of their own."""
        later = self._read_later(node, changed) if self._shared(changed, keys) else []
        if any(id not in changed for id in later):
            self._apart(list(dict.fromkeys((*changed, *later))), keys)
            return
        for id in changed:
            self._split([id], keys, "{0}.clone()")

    def dies(self, node: Node, id: int) -> bool:
        """Whether a node is the last to read the memory of a value, which the program has made."""
        memory = self._of_program()
        beside = memory.values[memory.home[id]]
        if any(other in self.writer.program.inputs for other in beside):
            return False
        return not self._read_later(node, [id])

    def _shared(self, ids: Sequence[int], keys: Sequence[Hashable]) -> bool:
        """Whether lanes with different operands hold one of these values in the same variable."""
        for id in ids:
            variables = self.writer.where[id]
            if len(set(zip(variables, keys, strict=True))) > len(set(variables)):
                return True
        return False

    def _read_later(self, node: Node, changed: Sequence[int]) -> list[int]:
        """Values in the memory that a node changes, which somebody reads behind it."""
        memory = self._of_program()
        at = memory.place[id(node)]
        later: list[int] = []
        for storage in dict.fromkeys(memory.home[value] for value in changed):
            for value in memory.values[storage]:
                if value in self.writer.where and value not in node.outs and memory.last.get(value, -1) > at:
                    later.append(value)
        return later

    def _apart(self, ids: Sequence[int], keys: Sequence[Hashable]) -> None:
        """Memory of their own, where values that share some go on sharing it."""
        home = self._of_program().home
        by_storage: dict[int, list[int]] = {}
        for id in ids:
            by_storage.setdefault(home[id], []).append(id)
        for members in by_storage.values():
            # The places of the old variables, which `_split` fills in.
            call = "{0}.clone()"
            if len(members) > 1:
                places = ", ".join(f"{{{place}}}" for place in range(len(members)))
                call = f"{self.writer.bind(unshared_copies, 'apart')}({places})"
            self._split(members, keys, call)

    def _split(self, ids: Sequence[int], keys: Sequence[Hashable], call: str) -> None:
        """New variables, made by a `call` on the old ones.

        All lanes get them but the first of those that share the old ones.
        """
        writer = self.writer
        made: dict[Hashable, list[str]] = {}
        owner: dict[tuple[str, ...], Hashable] = {}
        for lane, key in enumerate(keys):
            if key in made:
                continue
            names = tuple(writer.where[id][lane] for id in ids)
            made[key] = list(names)
            if owner.setdefault(names, key) != key:
                made[key] = [f"{writer.stem(id)}_s{next(self._splits)}" for id in ids]
                writer.settle(writer.on_host(ids, lane), [])
                comma = "," if len(ids) > 1 else ""
                writer.line(f"{', '.join(made[key])}{comma} = {call.format(*names)}")
        for place, id in enumerate(ids):
            writer.where[id] = tuple(made[key][place] for key in keys)

    def _of_program(self) -> _Memory:
        program = self.writer.program
        if self._memory is None or self._memory.program is not program:
            home = lies(program).home
            values: dict[int, list[int]] = {}
            for value, storage in home.items():
                values.setdefault(storage, []).append(value)
            last = last_uses(program) if self.writer.loops else lifetimes(program)
            place = {id(node): index for index, node in enumerate(program.nodes)}
            self._memory = _Memory(program, home, values, last, place)
        return self._memory


def unshared_copies(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same values in memory of their own, which they share as before."""
    memory = tensors[0].untyped_storage().clone()
    copies: list[torch.Tensor] = []
    for x in tensors:
        copy = torch.empty(0, dtype=x.dtype, device=x.device)
        copies.append(copy.set_(memory, x.storage_offset(), x.shape, x.stride()))
    return tuple(copies)
