"""The accountant's report: the peak, what it is made of, who made that, and what can be done about it.

Problem: "out of memory" names a moment, not a cause. Idea: every storage has a *kind* that follows from what made it
and from what; at each position the kinds add up to the timeline, and what is alive at the peak is listed by line.

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
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import attrs
import numpy as np

from colofunc.errors import CapacityError
from colofunc.mesh.sizes import size_text
from colofunc.program.facts import is_copy, is_wire
from colofunc.program.ir import Node, Program
from colofunc.program.text import target_text

KINDS = (
    "parameters", "parameter copies", "optimizer state", "gradients", "activations", "temporaries", "collective buffers", "workspaces",
    "kept copies", "other",
)  # fmt: skip
"""`parameter copies`: gathered or cast for use. `activations`: made by forward, or made again. `temporaries`: made by
backward and update, and nobody's gradient. `collective buffers`: what is sent or received. `workspaces`: what kernels
hold while they run. `kept copies`: what is put back where a guess was wrong (`cf.pipeline(validate="next step")`).
`other`: the batch, buffers of modules, constants."""

_OF_INPUT = {"param": "parameters", "frozen": "parameters", "state": "optimizer state", "grad": "gradients"}
"""Role of an input -> kind."""

_MOVES = frozenset(
    {
        "colofunc.pack",
        "colofunc.rearrange",
        "colofunc.wait",
        "aten._to_copy.default",
        "aten.slice.Tensor",
        "aten.view.default",
    }
)
"""Operators whose result is what they read, elsewhere or in another form."""

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
"""Kind -> what makes it smaller."""

_ADVISED_SHARE = 0.2
"""Advice is given for kinds that are at least this part of the peak."""

_SHADES = "▁▂▃▄▅▆▇█"
"""Of a timeline: from nothing to the peak."""

_WIDTH = 72
"""Of a timeline, in characters."""


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
        return _row(1, self)


@attrs.frozen(eq=False)
class LinesByKind(Mapping[str, tuple[int, ...]]):
    """Kind -> bytes at each position. `rows`: (kinds, positions).

    Of most reports the peak alone is asked, so lines are made when somebody looks at them.
    """

    rows: np.ndarray
    _known: dict[str, tuple[int, ...]] = attrs.field(factory=dict, init=False, repr=False)

    def __getitem__(self, kind: str) -> tuple[int, ...]:
        if kind not in self._known:
            if kind not in KINDS:
                raise KeyError(kind)
            self._known[kind] = tuple(self.rows[KINDS.index(kind)].tolist())
        return self._known[kind]

    def __iter__(self) -> Iterator[str]:
        return iter(KINDS)

    def __len__(self) -> int:
        return len(KINDS)

    def at(self, position: int) -> dict[str, int]:
        """Kind -> bytes at one position."""
        return dict(zip(KINDS, self.rows[:, position].tolist(), strict=True))


@attrs.frozen
class MemoryReport:
    """Live bytes per tier, at every position of the program that was counted.

    `by_kind[tier][kind][k]`: of what sort the bytes at position k are; the kinds add up to `timeline[tier][k]`.
    `alive[tier]`: what is alive at the tier's peak, largest first. `where`: what runs there, and how many positions
    there are. `bodies[k]`: of the loop at position k, what each position of its body holds beside what is held outside.
    `pool`: the buffers on the host for what comes and goes within the step (`program.passing`); where sizes are rounded
    up it exceeds what lies in it.
    """

    peak_bytes: Mapping[str, int]
    timeline: Mapping[str, tuple[int, ...]]
    peak_at: Mapping[str, int]
    by_kind: Mapping[str, LinesByKind]
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
        at_peak = self.by_kind[tier].at(self.peak_at[tier])
        there = [(kind, nbytes) for kind, nbytes in at_peak.items() if nbytes]
        return dict(sorted(there, key=lambda item: -item[1]))

    def table(self, most: int = 8) -> str:
        """The report of every tier that holds something. `most`: so many lines of the largest."""
        texts = [self._tier(tier, most) for tier, peak in self.peak_bytes.items() if peak or tier == "device"]
        if self.pool is not None:
            texts.append(str(self.pool))
        return "\n".join(texts)

    __str__ = table

    def _tier(self, tier: str, most: int) -> str:
        """The report of one tier."""
        peak = self.peak_bytes[tier]
        lines = [
            f"{tier}: peak {size_text(peak)} ({peak:,} B) at {self.where[tier]}",
            f"  {curve(self.timeline[tier])}",
        ]
        for kind, nbytes in self.kinds(tier).items():
            share = nbytes / peak
            is_advised = tier == "device" and share >= _ADVISED_SHARE
            advice = _ADVICE.get(kind, "") if is_advised else ""
            bar = "#" * round(20 * share)
            lines.append(f"  {kind:<18} {size_text(nbytes):>10} {share:>4.0%}  {bar:<20} {advice}".rstrip())
        rows = _alike(self.alive[tier])
        if rows:
            lines.append("  largest:")
            lines += [f"  {row}" for row in rows[:most]]
        if len(rows) > most:
            lines.append(f"  and {len(rows) - most} more sorts in low.memory().alive[{tier!r}]")
        return "\n".join(lines)

    def summary(self, tier: str = "device", most: int = 3) -> str:
        """One sentence for an error: where the peak is, of what kinds, and what is largest."""
        kinds = [f"{kind} {size_text(nbytes)}" for kind, nbytes in self.kinds(tier).items()]
        largest = [" ".join(row.split()) for row in _alike(self.alive[tier])[:most]]
        peak = f"{size_text(self.peak_bytes[tier])} of {tier} memory at {self.where[tier]}"
        return f"{peak}: {', '.join(kinds[:most])}; largest: {'; '.join(largest)}"

    def check(self, capacities: Mapping[str, int | None]) -> None:
        """Raise CapacityError where a tier would hold more than its capacity (None: no limit)."""
        for tier, peak in self.peak_bytes.items():
            capacity = capacities.get(tier)
            if capacity is not None and peak > capacity:
                raise CapacityError(
                    f"a rank would hold {self.summary(tier)}. The {tier} has {size_text(capacity)}. {self.advice(tier)}"
                )

    def advice(self, tier: str) -> str:
        """One thing to try against what is largest at the peak."""
        worst = next(iter(self.kinds(tier)), "rest")
        return f"Try for the {worst}: {_ADVICE.get(worst, 'use a smaller batch, or a topology with more memory')}"


def curve(timeline: Sequence[int], width: int = _WIDTH) -> str:
    """A timeline in one line of text: the most of each piece, from zero to the peak."""
    peak = max(timeline, default=0)
    if not peak:
        return ""
    count = len(timeline)
    width = min(width, count)
    cuts = [piece * count // width for piece in range(width + 1)]
    text = ""
    for first, end in pairwise(cuts):
        shade = max(timeline[first:end]) * len(_SHADES) // peak
        text += _SHADES[min(len(_SHADES) - 1, shade)]
    return text


def place_text(program: Program, at: int) -> str:
    """`operator 812 of 1904 (backward of h.11.mlp, modeling.py:345 in forward)`."""
    if at >= len(program.nodes):
        return "the beginning"
    node = program.nodes[at]
    origin = f"{node.phase} of {node.path}" if node.path else node.phase
    if node.line:
        origin += f", {node.line}"
    return f"operator {at} of {len(program.nodes)}, {target_text(node.target)} ({origin})"


def _row(times: int, live: Live) -> str:
    """One line of a report: so many storages that are alike, of which `live` is one."""
    name, path = live.name, live.path
    if times > 1:
        name, path = _starred(name), _starred(path)
    count = f"{times:>4} x" if times > 1 else " " * 6
    what = name
    if path and path not in name:
        what = f"{path} {name}".rstrip()
    layout = live.layout or "x".join(map(str, live.shape))
    return f"{count} {size_text(live.nbytes):>10}  {live.kind:<18} {what:<40} {layout:<20} {live.line}".rstrip()


def _alike(alive: Sequence[Live]) -> list[str]:
    """What is alive, where identical layers are one line, the most bytes first."""
    groups: dict[tuple[object, ...], list[Live]] = {}
    for live in alive:
        key = (live.nbytes, live.kind, live.layout, live.line, _starred(live.name), _starred(live.path))
        groups.setdefault(key, []).append(live)
    largest_first = sorted(groups.values(), key=lambda group: -len(group) * group[0].nbytes)
    return [_row(len(group), group[0]) for group in largest_first]


def _starred(name: str) -> str:
    """A name with the numbers of layers as stars, and without the number of an unnamed value."""
    name = re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)", "*", name)
    return re.sub(r"^%\d+ ", "", name)


# ---- kinds ----


def kinds_of(program: Program) -> dict[int, str]:
    """Value id -> kind, of inputs and of what nodes make."""
    kinds = {id: _OF_INPUT.get(program.values[id].role, "other") for id in program.inputs}
    # What takes the place of an input is of its kind.
    updated = {program.outputs[out]: kinds[program.inputs[leaf]] for out, leaf in program.aliases}
    weights = {id for id, kind in kinds.items() if kind in ("parameters", "parameter copies")}
    for node in program.nodes:
        copies_weights = (
            node.phase != "update" and node.loop is None and bool(node.refs) and weights.issuperset(node.refs)
        )
        for out in node.results:
            if is_copy(node) and program.values[out].role != "grad":
                kinds[out] = kinds[node.refs[0]]
            else:
                kinds[out] = updated.get(out) or _kind_of_result(program, node, out, copies_weights)
        if copies_weights:
            weights.update(node.results)
    _become_gradients(program, kinds)
    return kinds


def _become_gradients(program: Program, kinds: dict[int, str]) -> None:
    """What is cast, packed or sent and is a gradient then, is one already."""
    buffers: set[int] = set()  # collective buffers on that way
    for node in reversed(program.nodes):
        if not node.results or not (node.target in _MOVES or is_wire(node)):
            continue
        if not all(kinds[out] == "gradients" or out in buffers for out in node.results):
            continue
        for ref in node.refs:
            if kinds[ref] == "temporaries":
                kinds[ref] = "gradients"
            elif kinds[ref] == "collective buffers":
                buffers.add(ref)


def _kind_of_result(program: Program, node: Node, out: int, copies_weights: bool) -> str:
    """The kind of what a node makes."""
    role = program.values[out].role
    if role == "grad":
        return "gradients"
    if node.phase == "update" and role in _OF_INPUT:
        return _OF_INPUT[role]
    if copies_weights:
        return "parameter copies"
    if is_wire(node) or node.target == "colofunc.pack":
        return "collective buffers"
    return "activations" if node.phase == "forward" else "temporaries"
