"""The accountant's report: the peak, what it is made of, who made that, and what can be done about it.

Problem: "out of memory" names a moment, not a cause. Idea: every storage has a *kind* that follows from what made it and
from what; at each position the kinds add up to the timeline, and what is alive at the peak is listed by line.

    print(low.memory())
    device: peak 11.6 GiB at operator 812 of 1904 (backward of h.11.mlp, modeling.py:345 in forward)
      ▁▁▂▃▅▆▇██▇▅▃▂▁
      activations          8.1 GiB   70 %  ##############   cf.checkpoint(step, budget=...) makes them again; ...
      parameters           2.0 GiB   17 %  ###
      largest
         12 x  512 MiB  activations   h.*.mlp.fc linear  (dp b) s o   modeling.py:341 in forward
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import attrs

from colofunc.errors import CapacityError
from colofunc.mesh.sizes import size_text
from colofunc.program.facts import is_copy, is_wire
from colofunc.program.ir import Node, Program

KINDS = (
    "parameters", "parameter copies", "optimizer state", "gradients", "activations", "temporaries", "collective buffers", "workspaces",
    "kept copies", "other",
)  # fmt: skip
"""`parameter copies`: gathered or cast for use. `activations`: made by forward, or made again. `temporaries`: made by backward
and update, and nobody's gradient. `collective buffers`: what is sent or received. `workspaces`: what kernels hold while they
run. `kept copies`: what is put back where a guess was wrong (`cf.pipeline(validate="next step")`). `other`: the batch, buffers of
modules, constants."""

_OF_INPUT = {"param": "parameters", "frozen": "parameters", "state": "optimizer state", "grad": "gradients"}
_MOVES = frozenset(f"colofunc.{name}" for name in ("pack", "rearrange", "wait")) | frozenset(
    f"aten.{name}" for name in ("_to_copy.default", "slice.Tensor", "view.default")
)
_ADVICE = {
    "parameters": "keep them on the host: cf.offload(step, budget=...); shard them: zero(3, axis), tensor('1d', axis)",
    "parameter copies": "fewer at once: a finer zero(3, axis, chunk=...); tensor('1d', axis) gathers none",
    "optimizer state": "keep it on the host: cf.offload(step, budget=...); shard it: cf.shard(..., zero(1, axis))",
    "gradients": "shard them: cf.shard(..., zero(2, axis))",
    "activations": "make them again: cf.checkpoint(step, budget=...); on the host: cf.offload; fewer: cf.accumulate(step, ...)",
    "temporaries": "fewer: cf.accumulate(step, microbatches=...), a smaller batch",
    "collective buffers": "smaller pieces: zero(..., chunk=...)",
    "kept copies": 'validate in the step itself: cf.pipeline(validate="step")',
    "workspaces": "fewer rows at once: cf.accumulate(step, microbatches=...); bfloat16 where kernels for it need less",
}
_SHADES, _WIDTH = "▁▂▃▄▅▆▇█", 72


@attrs.frozen
class Live:
    """A storage that is alive at the peak."""

    name: str
    nbytes: int
    shape: tuple[int, ...]
    layout: str
    line: str
    path: str
    kind: str = "other"

    def __str__(self) -> str:
        return _row(1, self, self.name, self.path)


@attrs.frozen
class MemoryReport:
    """Live bytes per tier, at every position of the program that was counted.

    `by_kind[tier][kind][k]`: of what sort the bytes at position k are; the kinds add up to `timeline[tier][k]`.
    `alive[tier]`: what is alive at the tier's peak, largest first. `where`: what runs there, and how many positions there are.
    `bodies[k]`: of the loop at position k, what each position of its body holds beside what is held outside. `pool`: the buffers on
    the host for what comes and goes within the step (`program.passing`); where sizes are rounded up it exceeds what lies in it.
    """

    peak_bytes: Mapping[str, int]
    timeline: Mapping[str, tuple[int, ...]]
    peak_at: Mapping[str, int]
    by_kind: Mapping[str, Mapping[str, tuple[int, ...]]]
    alive: Mapping[str, tuple[Live, ...]]
    where: Mapping[str, str]
    bodies: Mapping[int, MemoryReport] = attrs.field(factory=dict, repr=False)
    pool: Any = None  # Passing, of a lowered step that copies

    @property
    def at_peak(self) -> tuple[Live, ...]:
        """What is alive on the device at its peak, largest first."""
        return self.alive["device"]

    def kinds(self, tier: str = "device") -> dict[str, int]:
        """Kind -> bytes at the peak of a tier, the largest first; kinds that are not there are left out."""
        at = self.peak_at[tier]
        found = {kind: line[at] for kind, line in self.by_kind[tier].items() if line[at]}
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def table(self, most: int = 8) -> str:
        """The report of every tier that holds something. `most`: so many lines of the largest."""
        tiers = [tier for tier, peak in self.peak_bytes.items() if peak or tier == "device"]
        return "\n".join([*(self._tier(tier, most) for tier in tiers), *([] if self.pool is None else [str(self.pool)])])

    __str__ = table

    def _tier(self, tier: str, most: int) -> str:
        peak, kinds = self.peak_bytes[tier], self.kinds(tier)
        lines = [f"{tier}: peak {size_text(peak)} ({peak:,} B) at {self.where[tier]}", f"  {curve(self.timeline[tier])}"]
        for kind, nbytes in kinds.items():
            share = nbytes / peak
            advice = _ADVICE.get(kind, "") if share >= 0.2 and tier == "device" else ""
            lines.append(f"  {kind:<18} {size_text(nbytes):>10} {share:>4.0%}  {'#' * round(20 * share):<20} {advice}".rstrip())
        rows = _alike(self.alive[tier])
        lines += ["  largest:"] * bool(rows) + [f"  {row}" for row in rows[:most]]
        if len(rows) > most:
            lines.append(f"  and {len(rows) - most} more sorts in low.memory().alive[{tier!r}]")
        return "\n".join(lines)

    def summary(self, tier: str = "device", most: int = 3) -> str:
        """One sentence for an error: where the peak is, of what kinds, and what is largest."""
        kinds = ", ".join(f"{kind} {size_text(nbytes)}" for kind, nbytes in list(self.kinds(tier).items())[:most])
        largest = "; ".join(" ".join(row.split()) for row in _alike(self.alive[tier])[:most])
        return f"{size_text(self.peak_bytes[tier])} of {tier} memory at {self.where[tier]}: {kinds}; largest: {largest}"

    def check(self, capacities: Mapping[str, int | None]) -> None:
        """Raise CapacityError where a tier would hold more than its capacity (None: no limit)."""
        for tier, peak in self.peak_bytes.items():
            capacity = capacities.get(tier)
            if capacity is not None and peak > capacity:
                worst = next(iter(self.kinds(tier)), "")
                advice = _ADVICE.get(worst, "use a smaller batch, or a topology with more memory")
                raise CapacityError(
                    f"a rank would hold {self.summary(tier)}. The {tier} has {size_text(capacity)}. Try for the {worst or 'rest'}: {advice}"
                )


def curve(line: Sequence[int], width: int = _WIDTH) -> str:
    """A timeline in one line of text: the most of each piece, from zero to the peak."""
    top, count = max(line, default=0), len(line)
    width = min(width, count)
    if not top:
        return ""
    cuts = [k * count // width for k in range(width + 1)]
    pieces = (max(line[a:b]) for a, b in pairwise(cuts))
    return "".join(_SHADES[min(len(_SHADES) - 1, piece * len(_SHADES) // top)] for piece in pieces)


def place_text(program: Program, at: int) -> str:
    """`operator 812 of 1904 (backward of h.11.mlp, modeling.py:345 in forward)`."""
    if at >= len(program.nodes):
        return "the beginning"
    node = program.nodes[at]
    said = f"{node.phase} of {node.path}" if node.path else node.phase
    return f"operator {at} of {len(program.nodes)}, {operator(node.target)} ({said}{', ' * bool(node.line)}{node.line})"


@cache
def operator(target: str) -> str:
    return target.removeprefix("aten.").removeprefix("colofunc.").removesuffix(".default")


def _row(times: int, live: Live, name: str, path: str) -> str:
    size = f"{times:>4} x {size_text(live.nbytes):>10}" if times > 1 else f"{'':>4}   {size_text(live.nbytes):>10}"
    what = " ".join(word for word in (path if path and path not in name else "", name) if word)
    layout = live.layout or "x".join(map(str, live.shape))
    return f"{size}  {live.kind:<18} {what:<40} {layout:<20} {live.line}".rstrip()


def _alike(alive: Sequence[Live]) -> list[str]:
    """What is alive, where identical layers are one line, the most bytes first."""
    groups: dict[tuple[object, ...], list[Live]] = {}
    for live in alive:
        groups.setdefault((live.nbytes, live.kind, live.layout, live.line, _starred(live.name), _starred(live.path)), []).append(live)
    found = sorted(groups.values(), key=lambda g: -len(g) * g[0].nbytes)
    return [_row(len(g), g[0], *((_starred(g[0].name), _starred(g[0].path)) if len(g) > 1 else (g[0].name, g[0].path))) for g in found]


def _starred(name: str) -> str:
    """A name with the numbers of layers, and the number of an unnamed value, as stars."""
    return re.sub(r"^%\d+ ", "", re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)", "*", name))


# ---- kinds ----


def kinds_of(program: Program, outside: Mapping[int, str] | None = None) -> dict[int, str]:
    """Value id -> kind, of inputs and of what nodes make. `outside`: kinds of inputs of the body of a loop."""
    found = {i: _OF_INPUT.get(program.values[i].role, "other") for i in program.inputs} | dict(outside or {})
    ends = {program.outputs[out]: found[program.inputs[into]] for out, into in program.aliases}
    weights = {i for i, kind in found.items() if kind in ("parameters", "parameter copies")}
    for node in program.nodes:
        copies = node.phase != "update" and node.loop is None and _of_weights(node, weights)
        for o in node.outs:
            if o is None:
                continue
            if is_copy(node) and program.values[o].role != "grad":
                found[o] = found[node.refs[0]]
            else:
                found[o] = ends.get(o) or _made(program, node, o, copies)
            if copies:
                weights.add(o)
    _become_gradients(program, found)
    return found


def _become_gradients(program: Program, found: dict[int, str]) -> None:
    """What is cast, packed or sent and is a gradient then, is one already."""
    passing: set[int] = set()  # buffers on that way
    for node in reversed(program.nodes):
        outs = node.results
        if not outs or not (node.target in _MOVES or is_wire(node)) or not all(found[o] == "gradients" or o in passing for o in outs):
            continue
        for r in node.refs:
            if found[r] == "temporaries":
                found[r] = "gradients"
            elif found[r] == "collective buffers":
                passing.add(r)


def _of_weights(node: Node, weights: Collection[int]) -> bool:
    return bool(node.refs) and all(r in weights for r in node.refs)


def _made(program: Program, node: Node, out: int, copies: bool) -> str:
    role = program.values[out].role
    if role == "grad":
        return "gradients"
    if node.phase == "update" and role in _OF_INPUT:
        return _OF_INPUT[role]
    if copies:
        return "parameter copies"
    if is_wire(node) or node.target == "colofunc.pack":
        return "collective buffers"
    return "activations" if node.phase == "forward" else "temporaries"
