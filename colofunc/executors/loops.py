"""Loops in generated source: the body is written once, indented, and what it gathers is gathered in place.

    for t1 in range(4):
        v8_in1 = v7[t1]                                        # take_shard over time
        v9_in1 = linear(v8_in1, v2)
        ...
        v20_all1 = v12_in1 if t1 == 0 else v20_all1.add_(v12_in1)
        del v12_in1

Nothing is unrolled, so source and compile time do not grow with the number of trips. The first trip's result becomes the
accumulator where it is memory of the body's own, so a sum costs no zeros and no copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from colofunc.errors import ProgramError
from colofunc.ops.copies import COPIES
from colofunc.program.facts import PEERS
from colofunc.program.ir import Loop, Node
from colofunc.program.passes.loop import gathered_at, last_uses
from colofunc.program.passes.reuse import own_outputs

if TYPE_CHECKING:
    from colofunc.executors.source import Writer

ABSENT = ""
"""In place of a variable: the value does not exist on this lane."""
_EXTREMES: dict[str, Callable[..., torch.Tensor]] = {"max": torch.maximum, "min": torch.minimum}


def write_loop(writer: Writer, node: Node, loop: Loop) -> None:
    """A Python loop over the trips; what its body gathers is gathered right behind the node that makes it."""
    writer.serial += 1
    counter, program, where = f"t{writer.serial}", writer.program, writer.where
    results = [f"v{o}_all{writer.serial}" for o in node.outs]
    at, last, owned = gathered_at(loop.body), last_uses(loop.body), own_outputs(loop.body)
    dying: dict[int, list[int]] = {}
    for id, end in last.items():
        if id not in loop.body.inputs:
            dying.setdefault(end, []).append(id)
    writer.line(f"for {counter} in range({loop.trips}):")
    writer.loops.append((loop, counter))
    writer.choices.enter(node)
    outer = writer.passing
    pools = [writer.pooled(o) for o in node.outs]
    writer.program, writer.passing = loop.body, None if outer is None else outer.inside.get(node.outs)
    writer.where = {into: where[i] for into, i in zip(loop.body.inputs, node.refs, strict=True)}
    gathered = {k: _gather(writer, loop, k, results[k], owned, pools[k]) for k in at.get(-1, ())}
    for index, inner in enumerate(loop.body.nodes):
        writer.node(inner)
        if writer.tap is not None:
            writer.tap(writer, index, inner)
        gathered |= {k: _gather(writer, loop, k, results[k], owned, pools[k]) for k in at.get(index, ())}
        if writer.look is not None:
            writer.line(writer.look(writer))
        writer.free([o for o in inner.results if o not in last] + dying.get(index, []))
    writer.loops.pop()
    writer.choices.leave()
    writer.program, writer.where, writer.passing = program, where, outer
    where.update({o: gathered[k] for k, o in enumerate(node.outs) if o is not None})


def _gather(writer: Writer, loop: Loop, k: int, stem: str, owned: set[int], pool: str) -> tuple[str, ...]:
    """Lines that put output k of the body to what the trips before have given; its variables per lane. pool: where that is to lie."""
    how, counter, source = loop.gathers[k], writer.loops[-1][1], writer.where[loop.body.outputs[k]]
    classes = {name: f"{stem}_{c}" for c, name in enumerate(dict.fromkeys(name for name in source if name != ABSENT))}
    mine = k in owned and not pool and not writer.pooled(loop.body.outputs[k])
    host = loop.body.values[loop.body.outputs[k]].tier != "device"
    for name, total in classes.items():
        room = f"{pool}.stack" if pool else writer.bind(stack_of, "stack_of")
        if how == "stack":
            writer.line(f"if {counter} == 0: {total} = {room}({name}, {loop.trips})")
            writer.settle([name] if host else [], [total] if host else [])
            writer.line(f"{total}[{counter}] = {name}")
            continue
        if pool:
            writer.line(f"if {counter} == 0: {total} = {room}({name}, 1)[0]")
        writer.settle([name] if host else [], [total] if pool else [])
        first = name if mine else f"{total}.copy_({name})" if pool else f"{name}.clone()"
        more = f"{total}.add_({name})" if how == "sum" else f"{writer.bind(_EXTREMES[how], how)}({total}, {name}, out={total})"
        writer.line(f"{total} = {first} if {counter} == 0 else {more}")
    return tuple(classes.get(name, ABSENT) for name in source)


def write_in_loop(writer: Writer, node: Node, kind: str) -> bool:
    """Write a node about the axis of a loop around it; False if it is about another."""
    if kind in ("rearrange", "wait") or kind in COPIES or kind in PEERS:
        return False
    axes = tuple(node.args[0] if kind == "axis_index" else node.args[1])
    counter = next((name for loop, name in writer.loops if (loop.axis,) == axes), None)
    if counter is None:
        return False
    out = only(node)
    if kind == "axis_index":
        # Filled by a kernel, which takes the number along; a tensor of a number is a copy that the host waits for.
        full, device = writer.bind(torch.full, "full"), writer.bind(writer.device, "device")
        writer.where[out] = tuple(writer.stem(out) if runs else ABSENT for runs in writer.runs)
        writer.line(f"{writer.stem(out)} = {full}((), {counter}, device={device})")
        return True
    source = writer.where[node.refs[0]]
    for name, lane in writer.assign(out, source):
        if kind == "take_shard":
            writer.line(f"{name} = {source[lane]}[{counter}]")
        elif kind == "keep_first":
            zeros = writer.bind(torch.zeros_like, "zeros_like")
            writer.line(f"{name} = {source[lane]} if {counter} == 0 else {zeros}({source[lane]})")
        else:
            raise ProgramError(f"{node.target} over {axes[0]} stands in the loop over it")
    return True


def stack_of(x: torch.Tensor, n: int) -> torch.Tensor:
    """Room for `n` tensors like x."""
    return torch.empty((n, *x.shape), dtype=x.dtype, device=x.device)


def only(node: Node) -> int:
    """The single value that a node defines."""
    (out,) = node.outs
    if out is None:
        raise ProgramError(f"{node.target} defines no value")
    return out
