"""The simulated mesh: all ranks of a local program in this process, in lock step.

A value is a list with one tensor per rank. Ranks whose operands are the *same objects* share one computation: an
operator is a pure function, so equal objects in means equal results out. Nothing is taken on trust from layouts, hence
a wrong rule still shows as a wrong number; yet eight data-parallel ranks cost about one step, because what is
replicated is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import einops
import torch

from colofunc.errors import ProgramError
from colofunc.mesh import Mesh
from colofunc.ops.targets import resolve
from colofunc.program.ir import Node, Program, Ref, map_refs

Shards = list[torch.Tensor]
Groups = tuple[tuple[int, ...], ...]


def run_simulated(program: Program, mesh: Mesh, inputs: Sequence[Shards]) -> list[Shards]:
    """Run `program` on every rank of `mesh`; `inputs[i][r]` is input i on rank r, and so are the outputs.

    `inputs` excludes the program's own constants.
    """
    env: dict[int, Shards] = {}
    given = iter(inputs)
    for id in program.inputs:
        env[id] = [program.constants[id]] * mesh.size if id in program.constants else next(given)
    last = program.last_uses()
    dying: dict[int, list[int]] = {}
    for id, index in last.items():
        dying.setdefault(index, []).append(id)
    with torch.no_grad():
        for index, node in enumerate(program.nodes):
            try:
                run_node(node, env, mesh)
            except Exception as error:
                error.add_note(f"while running {node.target} of {node.path or 'the step'} ({node.line}): {node.note}")
                raise
            for id in dying.get(index, ()):
                env.pop(id, None)
    return [env[o] for o in program.outputs]


def run_node(node: Node, env: dict[int, Shards], mesh: Mesh) -> None:
    """Run one node for all ranks and bind its results in `env`."""
    name = node.target.removeprefix("colofunc.")
    if name in COLLECTIVES:
        (ref, *args) = node.args
        values = env[ref.id] if isinstance(ref, Ref) else []
        results = COLLECTIVES[name](values, mesh, ref, *args)
        env[_only(node)] = results
        return
    fn = resolve(node.target)
    ids = node.refs
    operands = [env[i] for i in ids]
    done: dict[tuple[int, ...], tuple[Any, ...]] = {}
    outs: list[Shards] = [[] for _ in node.outs]
    for rank in range(mesh.size):
        key = tuple(id(values[rank]) for values in operands)
        if key not in done:
            args = map_refs(node.args, lambda i: env[i][rank])
            kwargs = {k: map_refs(v, lambda i: env[i][rank]) for k, v in node.kwargs}
            done[key] = flat_results(fn(*args, **kwargs))
        for out, result in zip(outs, done[key], strict=True):
            out.append(result)
    for o, out in zip(node.outs, outs, strict=True):
        if o is not None:
            env[o] = out


def flat_results(result: Any) -> tuple[Any, ...]:
    """The flat results of an operator: lists and tuples opened one level deep, as `Node.outs` numbers them."""
    if isinstance(result, (tuple, list)):
        flat: list[Any] = []
        for item in result:
            flat.extend(item) if isinstance(item, (tuple, list)) else flat.append(item)
        return tuple(flat)
    return (result,) if result is not None else ()


def _only(node: Node) -> int:
    (out,) = node.outs
    if out is None:
        raise ProgramError(f"{node.target} defines no value")
    return out


def _per_group(values: Shards, mesh: Mesh, axes: Sequence[str], fn: Callable[[Shards], Sequence[torch.Tensor]]) -> Shards:
    """Apply `fn` (members' tensors -> members' results) to each group of `axes`; equal groups are computed once."""
    out: list[Any] = [None] * mesh.size
    done: dict[tuple[int, ...], Sequence[torch.Tensor]] = {}
    for group in mesh.groups(tuple(axes)):
        members = [values[r] for r in group]
        key = tuple(id(m) for m in members)
        if key not in done:
            done[key] = fn(members)
        for r, result in zip(group, done[key], strict=True):
            out[r] = result
    return out


def _reduce(members: Sequence[torch.Tensor], how: str) -> torch.Tensor:
    total = members[0]
    for m in members[1:]:
        total = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[how](total, m)
    return total


def _all_gather(values: Shards, mesh: Mesh, _: Ref, axes: Sequence[str], n: int) -> Shards:
    return _per_group(values, mesh, axes, lambda members: [torch.stack(members)] * len(members))


def _reduce_scatter(values: Shards, mesh: Mesh, _: Ref, axes: Sequence[str], n: int, how: str) -> Shards:
    return _per_group(values, mesh, axes, lambda ms: list(_reduce(ms, how).unbind(0)))


def _all_reduce(values: Shards, mesh: Mesh, _: Ref, axes: Sequence[str], n: int, how: str) -> Shards:
    return _per_group(values, mesh, axes, lambda ms: [_reduce(ms, how)] * len(ms))


def _all_to_all(values: Shards, mesh: Mesh, _: Ref, axes: Sequence[str], n: int) -> Shards:
    return _per_group(values, mesh, axes, lambda ms: [torch.stack([m[j] for m in ms]) for j in range(len(ms))])


def _permute(values: Shards, mesh: Mesh, _: Ref, axes: Sequence[str], n: int, table: Sequence[int]) -> Shards:
    return _per_group(values, mesh, axes, lambda ms: [ms[i] for i in table])


def _axis_index(values: Shards, mesh: Mesh, axes: Any, *rest: Any) -> Shards:
    groups = mesh.groups(tuple(axes))
    numbers = [torch.tensor(i) for i in range(len(groups[0]))]
    out: list[Any] = [None] * mesh.size
    for group in groups:
        for i, r in enumerate(group):
            out[r] = numbers[i]
    return out


def _take_shard(values: Shards, mesh: Mesh, _: Ref, axes: Sequence[str], n: int) -> Shards:
    return _per_group(values, mesh, axes, lambda ms: [m[i] for i, m in enumerate(ms)])


def _keep_first(values: Shards, mesh: Mesh, _: Ref, axes: Sequence[str], n: int, how: str) -> Shards:
    if how != "sum":
        return values
    return _per_group(values, mesh, axes, lambda ms: [ms[0], *([torch.zeros_like(ms[0])] * (len(ms) - 1))])


def _rearrange(values: Shards, mesh: Mesh, _: Ref, pattern: str, names: Sequence[str], sizes: Sequence[int]) -> Shards:
    done: dict[int, torch.Tensor] = {}
    known = dict(zip(names, sizes, strict=True))
    for v in values:
        if id(v) not in done:
            done[id(v)] = einops.rearrange(v, pattern, **known)
    return [done[id(v)] for v in values]


COLLECTIVES: dict[str, Callable[..., Shards]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "permute": _permute,
    "axis_index": _axis_index,
    "take_shard": _take_shard,
    "keep_first": _keep_first,
    "rearrange": _rearrange,
}
