"""Program: what is computed, as frozen data.

One record serves two views. The *global* view comes from the tracer: every value has its global shape and no layout.
The *local* view is what one rank does: every value also has a `Layout`, its `shape` is the rank's part, and
collectives and copies are nodes like any other. Both are printed, checked and executed by the same code.

    Value   one tensor in single assignment: id, shape, dtype, name, role, layout
    Node    one operator call: target name, args in which `Ref(id)` stands for a value, the ids it defines
    Program inputs, nodes, outputs, and the trees that pack and unpack them
    Loop    what a node repeats: a program whose ids are its own
    Timetable  in which order ranks do the parts of a loop's trips, where not one trip after another

A local program is the union of what all ranks do. Most nodes run on all of them; one that has `on` runs at some indices
of a mesh axis only, and its results exist there (`Layout.at`). What one rank runs is a filter of it (`places.on_rank`).

Arguments other than tensors are plain Python data (int, float, bool, str, None, tuple, torch.dtype, torch.device,
torch.memory_format, torch.layout). Nodes never mutate their inputs unless their target is registered as in place
(`colofunc.update_` and friends), which only the last pass introduces.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial, wraps
from typing import Any, TypeVar

import attrs
import torch

from colofunc.errors import ProgramError
from colofunc.ops.kernels import PlannedKernel, Table
from colofunc.program.actions import ActionTable
from colofunc.spec.layout import At, Layout
from colofunc.spec.rule import Ref as Ref

PHASES = ("forward", "backward", "update")
Fact = TypeVar("Fact")


@attrs.frozen
class Value:
    """One tensor of a program. `shape` is global before lowering and local after it (then `layout` has both)."""

    id: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    name: str = ""  # dotted name of an input leaf ("params.lm_head.weight"), else a readable hint
    role: str = (
        "activation"  # "param" | "frozen" | "buffer" | "state" | "grad" | "batch" | "constant" | "seed" | "activation"
    )
    layout: Layout | None = None
    device_free: bool = False  # does not depend on any input (a mask, an arange)
    # local view: the global value that it is a copy of, as its layout says
    of: int | None = attrs.field(default=None, eq=False)
    place: str = "device"  # tier of memory of a value without a layout, which otherwise says it

    @property
    def tier(self) -> str:
        """The tier of memory that it lies in: "device", "host" or "disk"."""
        return self.place if self.layout is None else self.layout.tier

    def in_tier(self, tier: str) -> Value:
        """The same value in another tier of memory."""
        layout = None if self.layout is None else self.layout.with_tier(tier)
        return attrs.evolve(self, layout=layout, place=tier)

    @property
    def nbytes(self) -> int:
        """Bytes of all its elements: of the whole tensor in a global program, of one rank's part in a local one."""
        n = self.dtype.itemsize
        for size in self.shape:
            n *= size
        return n


def _refs(node: Node) -> tuple[int, ...]:
    found: list[int] = []
    _collect_refs(node.args, found)
    if node.kwargs:
        _collect_refs(node.kwargs, found)
    return tuple(found)


def _results(node: Node) -> tuple[int, ...]:
    if None not in node.outs:
        return node.outs  # type: ignore[return-value]  # as nearly always
    return tuple(out for out in node.outs if out is not None)


@attrs.frozen
class Node:
    """One operator call.

    `target`: "aten.mm.default", "colofunc.linear", "colofunc.all_gather", ... `outs`: ids of the values it defines, in
    the order of the operator's flat tensor results; None where a result is absent or not a tensor.
    `phase`: forward, backward or update. `path`: the module path ("transformer.h.0.attn"). `line`: "file.py:12 in f".
    """

    target: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outs: tuple[int | None, ...]
    phase: str = "forward"
    path: str = ""
    line: str = ""
    note: str = ""  # why a pass made this node ("linear wants b s (tp i)")
    loop: Loop | None = None  # of a `colofunc.loop` node: what it repeats
    # what the plan counts for it, see `passes.kernels`
    kernel: PlannedKernel | None = attrs.field(default=None, eq=False, repr=False)
    on: At | None = None  # who runs it: the ranks at some indices of an axis; None: all
    # Nearly every node is asked for these, and worked out when a node is made they take half of the time.
    refs: tuple[int, ...] = attrs.field(init=False, eq=False, repr=False, default=attrs.Factory(_refs, takes_self=True))
    """Ids of the tensor operands, in order of appearance in args then kwargs (repeats kept)."""
    results: tuple[int, ...] = attrs.field(
        init=False, eq=False, repr=False, default=attrs.Factory(_results, takes_self=True)
    )
    """Ids of the values that it defines: `outs` without what is absent."""


def _collect_refs(tree: tuple[Any, ...], found: list[int]) -> None:
    for item in tree:
        if type(item) is Ref:
            found.append(item.id)
        elif type(item) is tuple:
            _collect_refs(item, found)


LOOP = "colofunc.loop"
GATHERS = ("sum", "max", "min", "stack")


@attrs.frozen(eq=False)
class Loop:
    """What a node `colofunc.loop` repeats; the node's operands are the inputs of `body`, the same in every trip.

    Inside, `axis_index` and `take_shard` over `axis` mean the number of the trip. Output k of the body is gathered over
    the trips as `gathers[k]` says ("sum", "max", "min" or "stack", which puts the trips in a leading dim) and is result
    k of the node. It is gathered as soon as it is ready (`loop.gathered_at`), so that it need not live to the trip's
    end. One trip follows another, unless a `timetable` says otherwise.
    """

    body: Program
    trips: int
    axis: str
    gathers: tuple[str, ...]
    timetable: Timetable | None = None

    @property
    def cut_by(self) -> Timetable | None:
        """What its body was cut in parts by; None where one trip follows another, or nobody has cut it yet."""
        return self.timetable if self.timetable is not None and self.timetable.ends else None


Part = tuple[int, str]  # (stage, kind of action: "F", "B", "I" or "W")


@attrs.frozen(eq=False)
class Timetable:
    """In which order the ranks along `along` do the parts of a loop's trips.

    `table`: per index of `along`, actions (stage, kind, microbatch) in order. `stages`: names of inputs of the step ->
    the stage that they belong to, where a rank has several. `schedule`: the name of what made the table. `parts`: what
    the body consists of, part after part, and `ends[k]`: the position behind the nodes of part k; both are empty until
    `passes.cut` has cut the body. `validate_late`: whether updates behind the loop may run before other stages have
    said how (`post_validation`). `by_hand`: whether the user said which parameters a stage has.
    """

    along: str
    table: ActionTable
    stages: Mapping[str, int] = attrs.field(factory=dict)
    parts: tuple[Part, ...] = ()
    ends: tuple[int, ...] = ()
    schedule: str = ""
    validate_late: bool = False
    by_hand: bool = False

    def spans(self) -> Iterator[tuple[int, int]]:
        """(first position, position behind the last) of the nodes of each part."""
        return zip((0, *self.ends), self.ends, strict=False)

    def part_at(self, index: int) -> int:
        """The part that the node at a position of the body is in."""
        return bisect_right(self.ends, index)


def map_refs(tree: Any, fn: Callable[[int], Any]) -> Any:
    """`tree` with every `Ref(i)` replaced by `fn(i)`; the other leaves stay."""
    if type(tree) is Ref:
        return fn(tree.id)
    if type(tree) is not tuple:
        return tree
    # Passes do this for every operand of every node: leaves are told apart here, without a call for each.
    mapped: list[Any] = []
    for item in tree:
        kind = type(item)
        if kind is Ref:
            mapped.append(fn(item.id))
        elif kind is tuple:
            mapped.append(map_refs(item, fn))
        else:
            mapped.append(item)
    return tuple(mapped)


def rewritten(
    node: Node,
    args: tuple[Any, ...],
    kwargs: tuple[tuple[str, Any], ...],
    outs: tuple[int | None, ...],
    note: str,
    on: At | None,
) -> Node:
    """`attrs.evolve` for what passes change of every node, in a quarter of its time."""
    return Node(node.target, args, kwargs, outs, node.phase, node.path, node.line, note, node.loop, node.kernel, on)


def reading(node: Node, names: Mapping[int, int]) -> Node:
    """The node with other operands: value id -> the one that it reads in its place.

    It goes on to read those that are not named.
    """
    args, kwargs = map_refs((node.args, node.kwargs), lambda id: Ref(names.get(id, id)))
    return attrs.evolve(node, args=args, kwargs=kwargs)


@attrs.frozen
class Program:
    """A whole step. `inputs` and `outputs` are value ids; `outputs` may repeat ids and contain inputs.

    `aliases`: pairs (position in outputs, position in inputs) of leaves that are updated in place (donated).
    `constants`: input id -> tensor that the program carries itself; these ids are inputs too, after the user's.
    """

    inputs: tuple[int, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]
    values: Mapping[int, Value]
    constants: Mapping[int, torch.Tensor] = attrs.field(factory=dict, eq=False)
    aliases: tuple[tuple[int, int], ...] = ()
    stage: str = "global"  # "global" | "local" | "inplace": what check_program allows
    # from which the executor chooses; None: the built-in ones
    kernels: Table | None = attrs.field(default=None, eq=False, repr=False)
    # what `computed_once` has computed
    _computed: Computed = attrs.field(init=False, factory=lambda: Computed(), eq=False, repr=False)

    def value(self, id: int) -> Value:
        """The value with an id. Raises KeyError where there is none."""
        return self.values[id]

    # ---- index: computed when it is first asked for, and kept, since a program does not change ----

    @cached_property
    def makers(self) -> Mapping[int, Node]:
        """Value id -> the node that defines it (inputs have none)."""
        return {out: node for node in self.nodes for out in node.results}

    @cached_property
    def made_at(self) -> Mapping[int, int]:
        """Value id -> position of the node that defines it (inputs have none)."""
        return {out: index for index, node in enumerate(self.nodes) for out in node.results}

    @cached_property
    def targets(self) -> frozenset[str]:
        """The operators that it calls; those in loops are not among them."""
        return frozenset(node.target for node in self.nodes)

    @cached_property
    def readers(self) -> Mapping[int, tuple[int, ...]]:
        """Value id -> positions of the nodes that read it, ascending, each once; absent if no node does."""
        found: dict[int, list[int]] = {}
        for index, node in enumerate(self.nodes):
            for ref in dict.fromkeys(node.refs):
                found.setdefault(ref, []).append(index)
        return {id: tuple(positions) for id, positions in found.items()}

    @cached_property
    def times_returned(self) -> Mapping[int, int]:
        """Value id -> how often it is an output; absent if it is none."""
        return Counter(self.outputs)

    @cached_property
    def last_uses(self) -> Mapping[int, int]:
        """Value id -> position of the last node that reads it; len(nodes) for outputs; absent if never read."""
        last: dict[int, int] = {}
        for index, node in enumerate(self.nodes):
            for ref in node.refs:
                last[ref] = index
        last.update(dict.fromkeys(self.outputs, len(self.nodes)))
        return last

    def with_bodies(self) -> Iterator[Program]:
        """The program and the bodies of its loops, of loops inside them too."""
        yield self
        for node in self.nodes:
            if node.loop is not None:
                yield from node.loop.body.with_bodies()

    @cached_property
    def next_id(self) -> int:
        """An id that neither the program nor a body of its loops has, and none above it."""
        return 1 + max((id for each in self.with_bodies() for id in each.values), default=-1)

    # ---- changes: `Editor` makes them node by node ----

    def with_nodes(self, nodes: Iterable[Node], values: Mapping[int, Value] | None = None) -> Program:
        """The program with other nodes, and other values where some are given; inputs and outputs stay."""
        return attrs.evolve(self, nodes=tuple(nodes), values=self.values if values is None else values)

    def reordered(self, nodes: Iterable[Node]) -> Program:
        """The program with its nodes in another order, for passes that move them.

        Raises ProgramError where a node reads, or the program returns, what no node before it has made.
        """
        return self.with_nodes(nodes).in_order()

    def by_place(self, places: Sequence[tuple[int, ...]]) -> Program:
        """`reordered` by the place of each node; those of one place keep their order."""
        return self.reordered(self.nodes[k] for k in sorted(range(len(places)), key=places.__getitem__))

    def in_order(self) -> Program:
        """The program itself.

        Raises ProgramError where a node reads, or the program returns, what no node before it has made.
        """
        made_in_order(self.inputs, self.nodes, self.outputs)
        return self


def made_in_order(inputs: Iterable[int], nodes: Iterable[Node], outputs: Iterable[int]) -> set[int]:
    """The ids of all values that nodes make, and of inputs.

    Raises ProgramError where a node reads, or `outputs` have, what no node before it has made.
    """
    defined = set(inputs)
    for index, node in enumerate(nodes):
        if not defined.issuperset(node.refs):
            ref = next(ref for ref in node.refs if ref not in defined)
            raise ProgramError(
                f"node {index}, {node.target} at {node.line or 'no line'}, was moved before what makes its %{ref}"
            )
        defined.update(node.results)
    missing = next((out for out in outputs if out not in defined), None)
    if missing is not None:
        raise ProgramError(f"a pass that moves nodes has lost what makes the output %{missing}")
    return defined


class Computed(dict[Any, Any]):
    """Function -> its result for one program. A copy of the program, in another process too, computes its own."""

    def __reduce__(self) -> tuple[type[Computed], tuple[()]]:
        return Computed, ()


def kept_with(program: Program, key: Hashable, make: Callable[[], Fact]) -> Fact:
    """What `make()` gave the first time, kept with the program under a key; it may not be changed."""
    if key not in program._computed:
        program._computed[key] = make()
    found: Fact = program._computed[key]
    return found


def computed_once(fact: Callable[[Program], Fact]) -> Callable[[Program], Fact]:
    """A function of a program alone that keeps its result with the program, which does not change; nor may the result
    be changed.
    """

    @wraps(fact)
    def known(program: Program) -> Fact:
        return kept_with(program, fact, partial(fact, program))

    return known
