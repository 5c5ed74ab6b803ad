"""Storages of results: which memory each result of a node lies in, and with which strides.

Whether a reshape is a view depends on strides, so each distinct call is run once on tensors without data (`meta`) and
remembered.

    storages_of(node, program, metas)    # per result a `ResultStorage`: (operand whose storage it lives in or -1, ...)
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from colofunc import compat
from colofunc.ops.targets import resolve
from colofunc.program.facts import COPIES, facts_of, kind_of, rearrange_steps, takes_device
from colofunc.program.ir import Node, Program, Ref, Value, map_refs

StridedMeta = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides, dtype
# Per result: (operand whose storage it lives in or -1, result whose new storage it shares, bytes of the storage, meta).
ResultStorage = tuple[int, int, int, StridedMeta]


def contiguous(shape: tuple[int, ...], dtype: torch.dtype) -> StridedMeta:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(shape), tuple(reversed(strides)), dtype


def _fresh(value: Value, place: int = 0) -> ResultStorage:
    return -1, place, value.nbytes, contiguous(value.shape, value.dtype)


def _each_its_own(node: Node, program: Program) -> tuple[ResultStorage | None, ...]:
    """Results that lie in memory of their own each."""
    return tuple(None if out is None else _fresh(program.values[out], place) for place, out in enumerate(node.outs))


def storages_of(node: Node, program: Program, metas: Mapping[int, StridedMeta]) -> tuple[ResultStorage | None, ...]:
    """How each result of a node lies in memory."""
    kind = kind_of(node)
    values = program.values
    if kind is None:
        return _ordinary(node, program, metas)
    if node.loop is not None:
        return _each_its_own(node, program)
    if not node.outs:  # put, and a send to others only
        return ()
    (out,) = node.outs
    if out is None:
        return (None,)
    value = values[out]
    if kind[0] in COPIES:
        return _copied(kind[0], value, metas[node.refs[0]])
    if kind[0] == "wait":
        return ((0, 0, 0, metas[node.refs[0]]),)
    if kind[0] == "take_shard":
        shape, strides, dtype = metas[node.refs[0]]
        return ((0, 0, 0, (shape[1:], strides[1:], dtype)),)
    if kind[0] == "keep_first" and node.args[3] != "sum":
        return ((0, 0, 0, metas[node.refs[0]]),)
    if kind[0] == "rearrange":
        _, pattern, names, sizes = node.args
        steps = rearrange_steps(pattern, tuple(names), tuple(sizes), values[node.refs[0]].shape)
        return (rearranged(metas[node.refs[0]], steps),)
    if kind[0] == "keep_first":
        # The first rank keeps its own, without what its memory holds beside it; the others make zeros, which the budget
        # must hold.
        shape, strides, dtype = metas[node.refs[0]]
        zeros = torch.zeros_like(without_data((shape, strides, dtype)))
        return ((-1, 0, zeros.untyped_storage().nbytes(), (shape, tuple(zeros.stride()), dtype)),)
    return (_fresh(value),)


def _copied(kind: str, value: Value, meta: StridedMeta) -> tuple[ResultStorage, ...]:
    """A copy in another tier lies as what it is a copy of."""
    if kind == "put":
        return ((0, 0, 0, meta),)
    like = torch.empty_like(without_data(meta), memory_format=torch.preserve_format)
    return ((-1, 0, value.nbytes, (meta[0], tuple(like.stride()), meta[2])),)


@lru_cache(maxsize=1 << 14)
def rearranged(meta: StridedMeta, steps: Any) -> ResultStorage:
    operand = result = without_data(meta)
    first, order, final = steps
    if first is not None:
        result = result.reshape(first)
    if order is not None:
        result = result.permute(order)
    if final is not None:
        result = result.reshape(final)
    return _describe((result,), (operand,))[0] or (-1, 0, 0, meta)


def without_data(meta: StridedMeta) -> torch.Tensor:
    with compat.no_function_modes():
        return torch.empty_strided(meta[0], meta[1], dtype=meta[2], device="meta")


def _describe(results: tuple[Any, ...], operands: tuple[torch.Tensor, ...]) -> tuple[ResultStorage | None, ...]:
    homes: dict[Any, int] = {}  # storage -> the first operand in it
    for place, operand in enumerate(operands):
        homes.setdefault(compat.storage_key(operand), place)
    fresh: dict[Any, int] = {}  # storage -> the first result in it
    made: list[ResultStorage | None] = []
    for place, result in enumerate(results):
        if not isinstance(result, torch.Tensor):
            made.append(None)
            continue
        key = compat.storage_key(result)
        meta = (tuple(result.shape), tuple(result.stride()), result.dtype)
        share = fresh.setdefault(key, place)
        made.append((homes.get(key, -1), share, result.untyped_storage().nbytes(), meta))
    return tuple(made)


def _ordinary(node: Node, program: Program, metas: Mapping[int, StridedMeta]) -> tuple[ResultStorage | None, ...]:
    refs = node.refs
    order = iter(range(len(refs)))
    args, kwargs = map_refs((node.args, node.kwargs), lambda _: Ref(next(order)))
    try:
        dtypes = tuple(None if out is None else program.values[out].dtype for out in node.outs)
        made = _run_meta(node.target, args, kwargs, tuple(metas[ref] for ref in refs), dtypes)
    except Exception:
        made = None  # no shape function for these arguments: results in memory of their own
    if made is None or len(made) != len(node.outs):
        return _each_its_own(node, program)
    return made


@lru_cache(maxsize=1 << 15)
def _run_meta(target: str, args: Any, kwargs: Any, metas: tuple[StridedMeta, ...], dtypes: Any) -> tuple[ResultStorage | None, ...]:
    # `dtypes` of the results tell 1 from 1.0 and True, which are equal keys.
    operands = tuple(without_data(meta) for meta in metas)
    place = torch.device("meta")

    def real(tree: Any) -> Any:
        if type(tree) is Ref:
            return operands[tree.id]
        if type(tree) is tuple:
            return tuple(real(item) for item in tree)
        return place if isinstance(tree, torch.device) else tree

    keywords = {name: real(value) for name, value in kwargs}
    if target.startswith("aten.") and takes_device(target) and not (metas and keywords.get("device") is None):
        keywords["device"] = place
    with compat.no_function_modes():  # what is around the caller changes no program
        results = _flat(resolve(target)(*real(args), **keywords))
    if target == "aten.native_batch_norm.default" and args[5] is False:
        results = (results[0], *(x.new_empty(0) for x in results[1:]))  # only training has statistics to save
    made = _describe(results, operands)
    if facts_of(target).elementwise_first and made[0] is not None:
        shape, _, dtype = meta = made[0][3]
        if shape == ():
            numel = torch.broadcast_tensors(*operands[:2])[0].numel()
            made = ((-1, 0, numel * dtype.itemsize, meta),)
    return made


def _flat(result: Any) -> tuple[Any, ...]:
    if isinstance(result, (tuple, list)):
        return tuple(item for part in result for item in _flat(part))
    return (result,) if result is not None else ()
