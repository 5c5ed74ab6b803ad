"""What a program computes from no input: evaluate it, recognise attention masks, keep small tables.

Problem: a model hands attention a dense (b, 1, s, s) mask that is the same in every step; nobody can shard it well and
it costs s * s memory. Idea: its value is known while tracing, as a band, whatever its size (`mask_bands`). If it says
"causal" or "a window of w", attention is told so and the tensor is dropped.

    bias[i, j] visible for j <= i              ->  causal=True
    bias[i, j] visible for i - w < j <= i      ->  causal=True, window=w
    document[i] == document[j], keep[j]        ->  code, least, most: numbers per column and bounds per row (`mask_bounds`)

A mask is left alone if a row sees nothing (operators differ in what they return there; of a bool mask attention's own
rule holds, so that it can have bounds), if its visible entries are not exactly zero, or if it is no band and no
conjunction of comparisons. A small one that is neither causal nor a window costs less as it is.
"""

from __future__ import annotations

from math import prod
from typing import Any

import attrs
import torch

from colofunc import compat
from colofunc.ops.targets import argument_at, overload, resolve
from colofunc.program.editor import Editor
from colofunc.program.ir import Node, Program, Ref, Value, map_refs
from colofunc.program.on_host import OnHost
from colofunc.program.passes.bands import BandedTensor, runs_of
from colofunc.program.passes.mask_bands import band_of
from colofunc.program.passes.mask_bounds import BoundsWriter, Parts, parts_of
from colofunc.spec.rules.attention_call import AttentionCall

# A mask that is no band is made for real up to this many elements (bytes for bool).
MAX_MASK = 1 << 28
# Masks of fewer elements are not taken apart to bounds.
MIN_BOUNDED = 4096
# Tables up to this size become constants.
MAX_TABLE = 4096
# Chains of these alone are as good as a constant, in any layout.
PLAIN = {
    "aten.full.default", "aten.arange.default", "aten.arange.start", "aten.arange.start_step", "aten.view.default",
    "aten.expand.default", "aten.unsqueeze.default", "aten.permute.default", "aten.transpose.int", "aten.t.default",
    "aten.slice.Tensor", "aten.select.int", "aten._to_copy.default", "aten.squeeze.dim",
}  # fmt: skip


class Known:
    """Values of a program that depend on no input, computed when asked for."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.makers = program.makers
        self.real = OnHost(program.constants)

    def __contains__(self, vid: int) -> bool:
        return self.program.values[vid].device_free

    def value(self, vid: int) -> torch.Tensor:
        """The real value; computes what it needs and keeps it."""
        with compat.disable_modes(), compat.no_function_modes(), torch.no_grad():
            for node in self.chain(vid):
                args, kwargs = map_refs((node.args, node.kwargs), self.real.__getitem__)
                result = resolve(node.target)(*args, **dict(kwargs))
                tensors = result if isinstance(result, (list, tuple)) else [result]
                for out, tensor in zip(node.outs, tensors, strict=True):
                    if out is not None:
                        self.real[out] = tensor
        return self.real[vid]

    def band(self, vid: int, columns: int) -> BandedTensor | None:
        """The value as a band of so many columns, without making it; None where it is none."""
        with compat.disable_modes(), compat.no_function_modes(), torch.no_grad():
            chain = self.chain(vid)
            needed = [vid]
            for node in chain:
                needed.extend(node.refs)
            read = {id: self.real[id] for id in needed if id in self.real}
            return band_of(vid, columns, chain, read, lambda value: self.program.values[value].shape)

    def chain(self, vid: int) -> list[Node]:
        """Nodes that `vid` needs and that have not run, in order."""
        order: list[Node] = []
        done: set[int] = set()
        stack = [(vid, False)]
        while stack:
            top, ready = stack.pop()
            if top in self.real or (top in done and not ready):
                continue
            node = self.makers[top]
            if ready:
                # A node with several results is reached once for each.
                if done.isdisjoint(set(node.results) - {top}):
                    order.append(node)
                done.add(top)
                continue
            stack.append((top, True))
            stack.extend((ref, False) for ref in node.refs)
        # By identity: to hash a node is slow, and two nodes may be equal.
        distinct: dict[int, Node] = {}
        for node in order:
            distinct.setdefault(id(node), node)
        return list(distinct.values())


# ---- attention masks ----

BOX = ("code", "least", "most")
"""Arguments of attention that say bounds of rows."""


def fold_masks(program: Program) -> Program:
    """Attention with a mask that says `causal`, `window` or bounds of rows gets these instead."""
    masks = _Masks(program)
    nodes = []
    for node in program.nodes:
        if mask_of(node) is not None:
            node = masks.folded(node)
            nodes += masks.writer.taken()
        nodes.append(node)
    return masks.writer.done(nodes)


def mask_of(node: Node) -> Ref | None:
    """The bias that a node adds to scores of attention; None where it adds none, or is none of attention."""
    if node.target not in AttentionCall.TARGETS:
        return None
    bias = node.args[argument_at(node.target, "bias")]
    return bias if isinstance(bias, Ref) else None


@attrs.frozen
class _Verdict:
    """What attention is told in place of a mask; `box`: code, least, most."""

    causal: bool
    window: int
    box: tuple[Ref, Ref, Ref] | None = None


@attrs.define
class _Masks:
    """The masks of a program, each looked at once."""

    program: Program
    verdicts: dict[Any, _Verdict | None] = attrs.field(factory=dict)
    known: Known = attrs.field(init=False)
    writer: BoundsWriter = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.known, self.writer = Known(self.program), BoundsWriter.of(self.program)

    def folded(self, node: Node) -> Node:
        at = {argument.name: place for place, argument in enumerate(overload(node.target)._schema.arguments)}
        args = list(node.args)
        # Arguments that the node leaves out, up to the box, get their defaults.
        for argument in overload(node.target)._schema.arguments[len(args) : at[BOX[-1]] + 1]:
            default = argument.default_value
            # A list of the schema is a tuple in a program.
            args.append(tuple(default) if isinstance(default, list) else default)
        shifted = any(isinstance(args[at[name]], Ref) for name in ("q_offset", "k_offset"))  # explicit positions
        if shifted or args[at["code"]] is not None:
            return node
        causal, window = args[at["causal"]], args[at["window"]]
        # (b, h, s, d) of queries and keys
        query_shape = self.program.values[args[at["q"]].id].shape
        key_shape = self.program.values[args[at["k"]].id].shape
        key = (args[at["bias"]].id, causal, window, query_shape[2], key_shape[2])
        if key not in self.verdicts:
            self.writer.reader = node
            self.verdicts[key] = self._verdict(*key)
        verdict = self.verdicts[key]
        if verdict is None:
            return node
        args[at["bias"]], args[at["causal"]], args[at["window"]] = None, verdict.causal, verdict.window
        if verdict.box is None:
            return attrs.evolve(node, args=tuple(args[: max(len(node.args), at["window"] + 1)]))
        for name, bound in zip(BOX, verdict.box, strict=True):
            args[at[name]] = bound
        return attrs.evolve(node, args=tuple(args))

    def _verdict(self, bias: int, causal: bool, window: int, rows: int, columns: int) -> _Verdict | None:
        mask = self.program.values[bias]
        parts = Parts((bias,), ()) if bias in self.known else None
        if parts is None:
            if prod(mask.shape) < MIN_BOUNDED:
                return None
            parts = parts_of(self.program, self.known.makers, bias)
        runs = None if parts is None else self._runs(parts, columns)
        if parts is None or runs is None:
            return None
        plain = classify_runs(*runs, rows, columns, causal, window)
        if plain is not None and not parts.bounds:
            return _Verdict(*plain)
        return self._bounded(mask, parts, runs, (rows, columns), plain, causal, window)

    def _bounded(
        self,
        mask: Value,
        parts: Parts,
        runs: Runs,
        size: tuple[int, int],
        plain: tuple[bool, int] | None,
        causal: bool,
        window: int,
    ) -> _Verdict | None:
        """Bounds of rows, beside `plain`: what is causal or a window of what is known; None: it is neither."""
        shape = (*mask.shape[:2], *size)
        if len(mask.shape) != 4 or mask.shape[1] != 1 or prod(mask.shape) < MIN_BOUNDED:
            return None
        if plain is not None:
            return _Verdict(*plain, self.writer.operands(parts, None, shape))
        rows, columns = size
        lo, hi = _by_rows(runs[0]), _by_rows(runs[1])
        batch = max(lo.shape[0], hi.shape[0])
        lo, hi = lo.expand(batch, rows), hi.expand(batch, rows)
        if batch not in (1, mask.shape[0]) or (mask.dtype != torch.bool and bool((lo >= hi).any())):
            return None
        own = (torch.arange(rows) + 1).clamp(max=columns)
        causal = causal or torch.equal(hi, own.expand_as(hi))
        return _Verdict(causal, window, self.writer.operands(parts, (lo, hi), shape))

    def _runs(self, parts: Parts, columns: int) -> Runs | None:
        """The columns lo:hi that all known parts of a mask show, each (b or 1, rows or 1)."""
        lo, hi = torch.zeros(1, 1, dtype=torch.int64), torch.full((1, 1), columns)
        for vid in parts.known:
            runs = _visible_runs(self.known, vid, columns)
            if runs is None:
                return None
            if len(parts.known) + len(parts.bounds) == 1:
                return runs
            first, last = runs
            lo, hi = torch.maximum(lo, _by_rows(first)), torch.minimum(hi, _by_rows(last))
        return lo, hi


Runs = tuple[torch.Tensor, torch.Tensor]  # (lo, hi): the visible columns lo:hi of each row


def _by_rows(ends: torch.Tensor) -> torch.Tensor:
    """Ends of runs, (..., rows or 1) or a scalar, as (b, rows or 1)."""
    return ends.reshape(-1, ends.shape[-1]) if ends.dim() else ends.reshape(1, 1)


def _visible_runs(known: Known, bias: int, columns: int) -> Runs | None:
    """What a known mask shows; None where it weighs scores, shows two runs in a row, or is too large to be made."""
    band = known.band(bias, columns)
    if band is not None:
        return _runs_of_band(band)
    if prod(known.program.values[bias].shape) > MAX_MASK:
        return None
    return _runs_of_mask(known.value(bias), columns)


def _runs_of_band(band: BandedTensor) -> Runs | None:
    inside, outside = _visible(band.inside), _visible(band.outside)
    if inside is None or outside is None:
        return None
    every = torch.full_like(band.hi, band.shape[-1])
    if bool(inside) and bool(outside):
        return torch.zeros_like(band.lo), every
    if bool(inside):
        return band.lo, band.hi
    if not bool(outside):
        return torch.zeros_like(band.lo), torch.zeros_like(band.hi)
    # What lies outside is one run where the inside begins or ends the row, or is empty.
    empty, first, last = band.lo == band.hi, band.lo == 0, band.hi == every
    if not bool((empty | first | last).all()):
        return None
    lo = torch.where(first, band.hi, 0).masked_fill(empty, 0)
    hi = torch.where(first, every, band.lo).where(~empty, every)
    return lo, hi


def classify_runs(
    lo: torch.Tensor, hi: torch.Tensor, rows: int, columns: int, causal: bool = False, window: int = 0
) -> tuple[bool, int] | None:
    """(causal, window) that show exactly the columns lo:hi, each (..., rows or 1), beside the given ones.

    None if there are none.
    """
    lo, hi = _by_rows(lo), _by_rows(hi)
    if not torch.equal(lo, lo[:1].expand_as(lo)) or not torch.equal(hi, hi[:1].expand_as(hi)):
        return None  # batch rows differ
    row = torch.arange(rows)
    lo, hi = lo[0].expand(rows), hi[0].expand(rows)
    if causal:
        hi = torch.minimum(hi, row + 1)
    if window > 0:
        lo = torch.maximum(lo, row - window + 1)
    if bool((lo >= hi).any()):
        return None  # a row that sees nothing
    width = rows - int(lo[-1])
    if torch.equal(lo, torch.zeros_like(row)):
        width = 0
    elif not torch.equal(lo, (row - width + 1).clamp(min=0)):
        return None
    if torch.equal(hi, torch.full_like(row, columns)):
        return False, width
    if torch.equal(hi, (row + 1).clamp(max=columns)):
        return True, width
    return None


def _runs_of_mask(mask: torch.Tensor, columns: int) -> Runs | None:
    visible = _visible(mask)
    return None if visible is None else runs_of(visible.expand(*mask.shape[:-1], columns))


def _visible(mask: torch.Tensor) -> torch.Tensor | None:
    """Which entries are visible; None if the mask also weighs them."""
    if mask.dtype == torch.bool:
        return mask
    shown = mask == 0
    # Half of the least number is far below every score, so its weight is exactly zero.
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    return shown if bool((shown | hidden).all()) else None


# ---- small tables ----


def fold_constants(program: Program) -> Program:
    """Small values that depend on no input, and take some computing, become constants of the program."""
    known = Known(program)
    # What is read by nodes that do depend on an input, or returned.
    wanted = set(program.outputs)
    for node in program.nodes:
        if not _free(program, node):
            wanted.update(node.refs)
    tables: dict[int, torch.Tensor] = {}
    for vid in sorted(wanted):
        value = program.values[vid]
        if vid not in known or vid in program.inputs or prod(value.shape) > MAX_TABLE:
            continue
        if _worth_a_table(program, known.chain(vid)):
            tables[vid] = known.value(vid)
    return _with_constants(program, tables) if tables else program


def _worth_a_table(program: Program, chain: list[Node]) -> bool:
    """Whether what these nodes make takes some computing, of values that are not large."""
    if all(node.target in PLAIN for node in chain):
        return False
    sizes = [prod(program.values[out].shape) for node in chain for out in node.results]
    return max(sizes, default=0) <= 64 * MAX_TABLE


def _free(program: Program, node: Node) -> bool:
    return all(program.values[out].device_free for out in node.results)


def _with_constants(program: Program, tables: dict[int, torch.Tensor]) -> Program:
    """The program with these values as constants in place of what made them."""
    nodes: list[Node] = []
    for node in program.nodes:
        # A node with several results keeps running for the others; its folded results get new, unread ids.
        if len(node.outs) > 1 or tables.keys().isdisjoint(node.results):
            nodes.append(attrs.evolve(node, outs=tuple(None if out in tables else out for out in node.outs)))
    edit = Editor(program)
    constants = dict(program.constants)
    for vid, table in tables.items():
        edit.values[vid] = attrs.evolve(program.values[vid], role="constant")
        constants[vid] = table.contiguous()
    return edit.written(nodes, inputs=(*program.inputs, *tables), constants=constants)
