"""check_finite: where the first NaN or infinity of a step is born.

Problem: one bad number reaches every parameter within a step, so the parameters say nothing about where it came from;
often the forward pass is fine and its gradient is not (sqrt at 0, log(0) * 0). Idea: run the local program on its mesh,
look at every value, and report those that are not finite although their operands were.

    print(low.check_finite(state, batch))
    # first: %40 (div.Tensor) f64[8] as '(dp a)' has 1 inf on ranks 0
    #   at train.py:12 in loss, backward

Infinities that somebody wrote are no finding: an argument that is infinite (a mask), `float("-inf")` among the
arguments of an operator, and whatever is computed from them. What makes a NaN of them is one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isinf
from typing import TYPE_CHECKING, Any

import attrs
import torch
import torch.distributed as dist

from colofunc.compiler.observation import PlainProgram, arguments_of, history, plain_program, value_name
from colofunc.executors.backend import Backend
from colofunc.executors.tap import LaneValues, values_tap
from colofunc.mesh import Mesh
from colofunc.ops.debug import quiet
from colofunc.program.text import columns
from colofunc.spec.regions import unpadded

if TYPE_CHECKING:
    from colofunc.compiler.lowered import Lowered

SHOWN = 8
"""At most this many values are listed."""


@attrs.frozen
class NotFinite:
    """A value that is NaN or infinite though its operands were not. `count`: elements of the ranks' parts together."""

    name: str
    kind: str  # "nan" or "inf"
    shape: tuple[int, ...]
    dtype: torch.dtype
    spec: str
    operator: str
    made_by: str
    line: str
    path: str
    phase: str
    count: int
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        ranks = f"ranks {', '.join(map(str, self.ranks))}"
        where = f"{self.line or 'no source line'}{f', module {self.path}' if self.path else ''}, {self.phase}"
        head = f"{self.name} {dtype} {self.shape} as {self.spec!r} has {self.count} {self.kind} on {ranks}"
        return f"{head}\n  by {self.made_by}\n  at {where}"


@attrs.frozen(repr=False)
class Finite:
    """What `check_finite` found, in the order of the program. `finite`: nothing."""

    values: int
    found: tuple[NotFinite, ...]

    @property
    def finite(self) -> bool:
        return not self.found

    @property
    def first(self) -> NotFinite | None:
        return self.found[0] if self.found else None

    def table(self, most: int = SHOWN) -> str:
        """The first `most` findings, one line each."""
        rows = [("what", "value", "spec", "phase", "line", "made by")]
        rows += [(f"{d.count} {d.kind}", d.name, d.spec, d.phase, d.line, d.made_by) for d in self.found[:most]]
        return columns(rows)

    def __str__(self) -> str:
        if self.finite:
            return f"finite: {self.values} values"
        return f"first: {self.first}\n{len(self.found)} values that are not finite though their operands are:\n{self.table()}"

    __repr__ = __str__


def check_finite(low: Lowered, args: tuple[Any, ...]) -> Finite:
    """Run the local program and look at every value; collective on real ranks, consumes nothing."""
    arguments = arguments_of(low, args)
    plain = plain_program(low, arguments.backend)
    look = _Look(low.mesh, plain, arguments.backend)
    ids = [id for id in plain.program.inputs if id not in plain.program.constants]
    with torch.no_grad(), quiet():
        for mine, shards in zip(ids, arguments.shards, strict=True):
            look.one(mine, shards)
        arguments.backend.observe(plain.program, low.mesh, values_tap(look))(arguments.computed())
    seen = look.seen if arguments.backend.watch is None else _everyones(look.seen)
    found = [_finding(low, plain, mine, kind, seen[mine, kind]) for mine, kind in _born(plain, seen)]
    return Finite(look.values, tuple(found))


Counts = dict[tuple[int, str], dict[int, int]]  # (local value, kind) -> rank -> how many elements


def _everyones(mine: Counts) -> Counts:
    """What all ranks have seen."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    out: Counts = {}
    for one in told:
        for key, counts in one.items():
            out.setdefault(key, {}).update(counts)
    return out


class _Look:
    """Called behind every node: counts what is not finite."""

    def __init__(self, mesh: Mesh, plain: PlainProgram, backend: Backend) -> None:
        self.mesh, self.plain, self.ranks = mesh, plain, backend.ranks(mesh)
        self.seen: Counts = {}
        self.values = 0

    def __call__(self, index: int, results: tuple[LaneValues, ...]) -> None:
        node = self.plain.program.nodes[index]
        for out, lanes in zip(node.results, results, strict=True):
            self.one(out, lanes)

    def one(self, mine: int, lanes: Sequence[torch.Tensor]) -> None:
        if not (lanes[0].is_floating_point() or lanes[0].is_complex()):
            return
        self.values += 1
        layout = self.plain.program.values[mine].layout
        for rank, x in zip(self.ranks, lanes, strict=True):
            if layout is not None:  # what pads is nobody's value
                x = unpadded(x, layout, self.mesh, rank)
            if bool(torch.isfinite(x).all()):
                continue
            for kind, test in (("nan", torch.isnan), ("inf", torch.isinf)):
                count = int(test(x).sum())
                if count:
                    self.seen.setdefault((mine, kind), {})[rank] = count


def _born(plain: PlainProgram, seen: Counts) -> Iterator[tuple[int, str]]:
    """The values, in order, whose NaN or infinity is not that of an operand.

    One in local code is judged by its result.
    """
    news: set[tuple[int, str]] = set()  # inside local code: not told yet
    for mine in plain.program.inputs:
        if (mine, "nan") in seen:
            yield mine, "nan"
    for node in plain.program.nodes:
        for mine in node.results:
            for kind in ("nan", "inf"):
                if (mine, kind) not in seen:
                    continue
                known = any((ref, kind) in seen and (ref, kind) not in news for ref in node.refs)
                if known or (kind == "inf" and any(_infinite((node.args, node.kwargs)))):
                    continue
                if mine in plain.owners:
                    yield mine, kind
                else:
                    news.add((mine, kind))


def _infinite(tree: Any) -> Iterator[bool]:
    """Whether an argument, anywhere, is an infinite number."""
    if isinstance(tree, tuple):
        for item in tree:
            yield from _infinite(item)
    yield isinstance(tree, float) and isinf(tree)


def _finding(low: Lowered, plain: PlainProgram, mine: int, kind: str, counts: dict[int, int]) -> NotFinite:
    owner = plain.owners[mine]
    value, maker = low.global_program.values[owner], low.global_program.makers.get(owner)
    local, makers = plain.program.values[mine], plain.program.makers
    made_by = history(plain, makers, mine, makers[mine]) if mine in makers else "the caller"
    where = (maker.line, maker.path, maker.phase) if maker is not None else ("", "", "input")
    spec = local.layout.text() if local.layout is not None else ""
    operator = maker.target if maker is not None else "input"
    what = (value_name(value, maker), kind, value.shape, value.dtype, spec)
    return NotFinite(*what, operator, made_by, *where, sum(counts.values()), tuple(sorted(counts)))
