"""A program with its tensors in several tiers of memory: copies between them written into it.

Problem: what lies on the host has to be on the device when a node reads it, and back on the host when the step is over.
Idea: where a tensor lies is a matter of copies and lifetimes alone. A value that was copied to the host and is read
later from a second copy is held by nothing in between, as one that is made again is (`recompute`); so the accountant,
the checks and the executors need to know nothing of it. Whoever decides what moves (`planner/offload/fastest.py`) says
when; `Tiered` writes it down, and whatever has to be in a tier and is not gets there by a copy right before it is read.

    %4 = to_device_start(%w)     ...     %5 = wait(%4)     %6 = linear(%x, %5)     ...     put(%w, %5)

Views are not copied: a view of a tensor that moved is taken again from its copy. Nodes that are to run on the host read
and make what lies there.

The same holds between any two neighbours among the tiers: `near`, where nodes read, and `far`. A program whose copies
lead to the host is written down once more with part of what lies there on disk; what lies elsewhere is left as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import attrs

from colofunc.errors import ProgramError
from colofunc.program.editor import Editor
from colofunc.program.facts import is_copy, kind_of, written
from colofunc.program.ir import Node, Program, Ref, map_refs
from colofunc.program.memory import StorageMap
from colofunc.program.places import made_at
from colofunc.spec.layout import At

Tiers = tuple[str, str]  # where nodes read, and where what has no room there lies
TIERS: Tiers = ("device", "host")


class Tiered:
    """A program being written down.

    Storages are numbered as `lies` does; those of inputs in `home` begin and end in the far tier.

    gathered: results are taken where they are made, as the body of a loop hands them over, and not at the end.
    """

    def __init__(
        self,
        program: Program,
        lies: StorageMap,
        home: Collection[int],
        on_host: Collection[int] = (),
        tiers: Tiers = TIERS,
        gathered: bool = False,
    ) -> None:
        self.program = program
        self.lies = lies
        self.home = frozenset(home)
        self.on_host = frozenset(on_host)  # nodes that run there
        self.near, self.far = tiers
        self.early = frozenset(program.outputs) if gathered else frozenset[int]()
        self.edit = Editor(program)
        self.values = self.edit.values
        self.nodes: list[Node] = []
        self.maker = program.makers
        # storage -> value that has all of it in a tier
        self.base: dict[str, dict[int, int]] = {tier: {} for tier in tiers}
        # storage -> value -> what it is there
        self.have: dict[str, dict[int, dict[int, int]]] = {tier: {} for tier in tiers}
        self._started: dict[tuple[int, str], int] = {}
        for id in filter(self._mine, program.inputs):
            tier = self.far if lies.home[id] in self.home else self.near
            self.values[id] = self.values[id].in_tier(tier)
            self._lies(tier, lies.home[id], id, id)

    # ---- copies ----

    def fetch(self, storage: int) -> None:
        """Copy to where nodes read, now."""
        self._lies(self.near, storage, self._emit(self.near, storage), self._root(storage))

    def store(self, storage: int) -> None:
        """Copy to the far tier, now."""
        if storage in self.home:
            into = self._root(storage)
            self.nodes.append(self._node("put", storage, (Ref(into), Ref(self._from(storage, self.near))), ()))
            self._lies(self.far, storage, into, into)
        else:
            self._lies(self.far, storage, self._emit(self.far, storage), self._root(storage))

    def start(self, storage: int, kind: str) -> None:
        """Begin a "fetch" or a "store"; `wait` ends it."""
        if kind == "fetch":
            self._started[storage, kind] = self._emit(self.near, storage, "_start")
        elif storage in self.home:
            into = self._root(storage)
            new = self._new(into, self.far)
            source = self._from(storage, self.near)
            self.nodes.append(self._node("put_start", storage, (Ref(into), Ref(source)), (new,)))
            self._started[storage, kind] = new
        else:
            self._started[storage, kind] = self._emit(self.far, storage, "_start")

    def wait(self, storage: int, kind: str) -> None:
        """What was copied may be read from here on."""
        tier = self.near if kind == "fetch" else self.far
        started = self._started.pop((storage, kind))
        new = self._new(self._root(storage), tier)
        self.nodes.append(self._node("wait", storage, (Ref(started),), (new,)))
        self._lies(tier, storage, new, self._root(storage))

    def _emit(self, to: str, storage: int, start: str = "") -> int:
        new = self._new(self._root(storage), to)
        source = self._from(storage, self._other(to))
        self.nodes.append(self._node(f"to_{to}{start}", storage, (Ref(source),), (new,)))
        return new

    def _other(self, tier: str) -> str:
        return self.far if tier == self.near else self.near

    def _mine(self, id: int) -> bool:
        """Whether a value is one of those that may move."""
        return self.program.values[id].tier == self.near

    def _from(self, storage: int, tier: str) -> int:
        if storage not in self.base[tier]:
            name = self.program.values[self._root(storage)].name or f"%{self._root(storage)}"
            raise ProgramError(f"{name} is to be copied from the {tier}, where it is not")
        return self.base[tier][storage]

    def _node(self, name: str, storage: int, args: tuple[Ref, ...], outs: tuple[int, ...]) -> Node:
        root = self._root(storage)
        made, value = self.maker.get(root), self.program.values[root]
        if made is None:
            origin = ("forward", "", "")
            on = None if value.layout is None else value.layout.at
        else:
            origin = (made.phase, made.path, made.line)
            on = _gathered_at(made, root) if made.loop is not None else made_at(made)
        return Node(f"colofunc.{name}", args, (), outs, *origin, note=value.name, on=on)

    def _root(self, storage: int) -> int:
        return self.lies.storages[storage].value

    def _new(self, like: int, tier: str, of: int | None = None) -> int:
        """A value in a tier. A copy is of no global value: it may not be there yet, or have been written to."""
        return self.edit.new(self.program.values[like].in_tier(tier), of=of)

    def _lies(self, tier: str, storage: int, new: int, root: int) -> None:
        self.base[tier][storage] = new
        self.have[tier][storage] = {root: new}

    # ---- nodes ----

    def run(self, index: int) -> None:
        """Write a node down, its operands in the tier where it runs."""
        node = self.program.nodes[index]
        tier = self.far if index in self.on_host else self.near
        if looks_only(node, self.lies) and all(self._mine(out) for out in node.results):
            for made in self.early.intersection(node.outs):
                if made is not None and self.lies.home[made] in self.have[self.near]:
                    self.get(self.near, made)
            return  # others are taken where somebody reads them
        # The body of a loop says itself in which tier it reads and makes what.
        reads_in, makes_in = [tier] * len(node.refs), [tier] * len(node.outs)
        if node.loop is not None:
            body = node.loop.body
            reads_in = [body.values[id].tier for id in body.inputs]
            makes_in = [body.values[id].tier for id in body.outputs]
        operands = iter([self.get(where, ref) for where, ref in zip(reads_in, node.refs, strict=True)])
        args, kwargs = map_refs((node.args, node.kwargs), lambda _: Ref(next(operands)))
        self.nodes.append(attrs.evolve(node, args=args, kwargs=kwargs))
        for id in filter(self._mine, written(node)):
            storage, other = self.lies.home[id], self._other(tier)
            self.base[other].pop(storage, None)
            self.have[other].pop(storage, None)
        for out, where in zip(node.outs, makes_in, strict=True):
            if out is None or not self._mine(out):
                continue
            self.values[out] = self.program.values[out].in_tier(where)
            storage = self.lies.home[out]
            self.have[where].setdefault(storage, {})[out] = out
            if out == self._root(storage) or kind_of(node) == ("wait", False):  # before its wait a value is not there
                self.base[where][storage] = self.have[where][storage][self._root(storage)] = out

    def get(self, tier: str, id: int) -> int:
        """The value as it lies in a tier: copied there, or taken again as a view of what is there."""
        if not self._mine(id):
            return id
        storage = self.lies.home[id]
        if storage not in self.have[tier]:
            if self.lies.storages[storage].value != id and id not in self.lies.base_of:
                raise ProgramError(
                    f"%{id} shares memory with another result of its operator and cannot be copied by itself"
                )
            self.fetch(storage) if tier == self.near else self.store(storage)
        have = self.have[tier][storage]
        chain: list[int] = []  # views that are to be taken, the value itself first
        whole = id
        while whole not in have:
            chain.append(whole)
            whole = self.lies.base_of[whole]
        for view in reversed(chain):
            self._take(tier, storage, view)
        return self.have[tier][storage][id]

    def _take(self, tier: str, storage: int, id: int) -> None:
        node, have = self.maker[id], self.have[tier][storage]
        if written(node) or kind_of(node) == ("wait", False):
            have[id] = have[self.lies.base_of[id]]  # the same memory, whatever was written to it since
            return
        made: list[int | None] = []
        for out in node.outs:
            made.append(None if out is None else self._new(out, tier, self.program.values[out].of))
        args, kwargs = map_refs((node.args, node.kwargs), lambda ref: Ref(self.get(tier, ref)))
        self.nodes.append(attrs.evolve(node, args=args, kwargs=kwargs, outs=tuple(made)))
        for old, new in zip(node.outs, made, strict=True):
            if old is not None and new is not None:
                have[old] = new

    def finish(self, stay: bool = False, leave: Collection[int] = ()) -> Program:
        """The program. Outputs lie near, but for state of the far tier.

        stay: so does what was made there. leave: storages that lie there in the end, too.
        """
        far = self.home | set(leave)
        if stay:
            far |= self.base[self.far].keys() - self.have[self.near].keys()
        paired = {out: self.lies.home[self.program.inputs[into]] for out, into in self.program.aliases}
        outputs: list[int] = []
        for place, out in enumerate(self.program.outputs):
            in_far = self.lies.home[out] in far or paired.get(place) in far
            outputs.append(self.get(self.far if in_far else self.near, out))
        return self.edit.written(self.nodes, outputs)


def _gathered_at(node: Node, result: int) -> At | None:
    """Where a result of a loop exists: where its body makes what is gathered."""
    assert node.loop is not None, "a loop"
    body = node.loop.body
    inner = body.outputs[node.outs.index(result)]
    if inner in body.makers:
        return made_at(body.makers[inner])
    layout = body.values[inner].layout
    return None if layout is None else layout.at


def looks_only(node: Node, lies: StorageMap) -> bool:
    """Whether all that a node does is look at memory that is there."""
    outs = node.results
    if not outs or node.loop is not None or written(node) or is_copy(node) or kind_of(node) == ("wait", False):
        return False
    return all(out in lies.base_of for out in outs)


def readers(program: Program, lies: StorageMap) -> Mapping[int, list[int]]:
    """Storage -> the nodes that read or write values in it, views left out: these look when they are read."""
    found: dict[int, list[int]] = {}
    for index, node in enumerate(program.nodes):
        if not looks_only(node, lies):
            touched = dict.fromkeys(lies.home[id] for id in (*node.refs, *node.results))
            for storage in touched:
                found.setdefault(storage, []).append(index)
    return found
