"""Sharing: lanes that hold the same tensor and are about to write different things into it.

Problem: what ranks have in common is computed once, so that one tensor stands for several of them, until an operator
writes into it something else for each. Idea: where nobody reads that memory later, each rank gets a new result, which
costs less than a copy and a write; otherwise each gets memory of its own first, and all that is read of it later, views
and the whole, is taken from there.

    v7 = mul(v1_0, v2); ...              # was mul_out(v1_0, v2, out=v2), which three other ranks would have seen
    v2_s0, v3_s1, = apart(v2, v3)         # v3 is a view of v2 that is read behind the write
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
    """Of a program or the body of a loop: the storage of each value and the values of each, their last readers, places
    of nodes.
    """

    program: Program
    home: Mapping[int, int]
    values: Mapping[int, Sequence[int]]
    last: Mapping[int, int]
    place: Mapping[int, int]


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
        if any(i not in changed for i in later):
            self._apart(list(dict.fromkeys((*changed, *later))), keys)
            return
        for id in changed:
            self._split([id], keys, "{0}.clone()")

    def dies(self, node: Node, id: int) -> bool:
        """Whether a node is the last to read the memory of a value, which the program has made."""
        memory = self._of_program()
        inputs = any(i in self.writer.program.inputs for i in memory.values[memory.home[id]])
        return not inputs and not self._read_later(node, [id])

    def _shared(self, ids: Sequence[int], keys: Sequence[Hashable]) -> bool:
        """Whether lanes with different operands hold one of these values in the same variable."""
        where = self.writer.where
        return any(len(set(zip(where[i], keys, strict=True))) > len(set(where[i])) for i in ids)

    def _read_later(self, node: Node, changed: Sequence[int]) -> list[int]:
        """Values in the memory that a node changes, which somebody reads behind it."""
        memory = self._of_program()
        at, storages = memory.place[id(node)], dict.fromkeys(memory.home[i] for i in changed)
        mine = (i for storage in storages for i in memory.values[storage])
        return [i for i in mine if i in self.writer.where and i not in node.outs and memory.last.get(i, -1) > at]

    def _apart(self, ids: Sequence[int], keys: Sequence[Hashable]) -> None:
        """Memory of their own, where values that share some go on sharing it."""
        home = self._of_program().home
        for storage in dict.fromkeys(home[i] for i in ids):
            mine = [i for i in ids if home[i] == storage]
            views = f"{self.writer.bind(apart, 'apart')}({', '.join(f'{{{k}}}' for k in range(len(mine)))})"
            self._split(mine, keys, views if len(mine) > 1 else "{0}.clone()")

    def _split(self, ids: Sequence[int], keys: Sequence[Hashable], call: str) -> None:
        """New variables, made by a `call` on the old ones, for all lanes but the first of those that share the old
        ones.
        """
        writer = self.writer
        made: dict[Hashable, list[str]] = {}
        owner: dict[tuple[str, ...], Hashable] = {}
        for lane, key in enumerate(keys):
            names = tuple(writer.where[i][lane] for i in ids)
            if key in made:
                continue
            made[key] = list(names)
            if owner.setdefault(names, key) != key:
                made[key] = [f"{writer.stem(i)}_s{next(self._splits)}" for i in ids]
                writer.settle(writer.on_host(ids, lane), [])
                writer.line(f"{', '.join(made[key])}{',' * (len(ids) > 1)} = {call.format(*names)}")
        for k, i in enumerate(ids):
            writer.where[i] = tuple(made[key][k] for key in keys)

    def _of_program(self) -> _Memory:
        program = self.writer.program
        if self._memory is None or self._memory.program is not program:
            home = lies(program).home
            values: dict[int, list[int]] = {}
            for i, storage in home.items():
                values.setdefault(storage, []).append(i)
            last = last_uses(program) if self.writer.loops else lifetimes(program)
            self._memory = _Memory(program, home, values, last, {id(node): k for k, node in enumerate(program.nodes)})
        return self._memory


def apart(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same values in memory of their own, which they share as before."""
    memory = tensors[0].untyped_storage().clone()
    return tuple(
        torch.empty(0, dtype=x.dtype, device=x.device).set_(memory, x.storage_offset(), x.shape, x.stride())
        for x in tensors
    )
