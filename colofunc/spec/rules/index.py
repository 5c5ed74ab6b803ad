"""Reading and writing by index: gather, scatter, select, advanced indexing, searching.

    gather (dim 1)          d0 [s], d0 j -> d0 j                  the source dim is whole, the index's own dim is free
    scatter_add             d0 [s], d0 j, d0 j -> d0 [s]          j summed, self added once
    index  x[:, i]          d0 [s1], i0 i1 -> d0 i0 i1            index dims are free and broadcast against one another
    index_put (accumulate)  d0 [s1], i0, d0 i0 -> d0 [s1]         i summed, self added once

Where later writes win over earlier ones (scatter, index_copy, index_put without accumulate) the index dims are whole.
Strategies split the source dim `s`: readers answer for the rows they have and leave a pending sum, writers keep the
rows they have. Results whose size is data (nonzero, masked_select, boolean masks) have no rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from colofunc.mesh import Mesh
from colofunc.spec.rule import Call, Ref, Rule, Strategy
from colofunc.spec.rules.build import LocalFn, StrategyFn, Texts, at, bind, names, numbered
from colofunc.spec.rules.local import clear, first_of, inside, no_traffic
from colofunc.spec.rules.opened import Split, opened
from colofunc.spec.rules.pattern import RuleFn, wrap

# --- along one dim


def gather(call: Call) -> Rule | None:
    x, index = call.ins[0].shape, call.ins[1].shape
    if len(x) != len(index):
        return None
    dim = wrap(call.arg(1, "dim"), len(x))
    # Along the other dims the index may be shorter than the source: then only a corner of the source is read.
    source: list[str] = []
    where: list[str] = []
    for number, (size, index_size) in enumerate(zip(x, index, strict=True)):
        same = size == index_size
        source.append(f"d{number}" if same else f"[s{number}]")
        where.append(f"d{number}" if same else f"[d{number}]")
    if x:  # a tensor without dims is gathered along none
        source[dim], where[dim] = "[s]", "j"
    return bind(call, {0: " ".join(source), 1: " ".join(where)}, [" ".join(where)], linear=[{0}])


_MERGES = {"add": "sum", "sum": "sum", "amax": "max", "amin": "min"}


def scatter(call: Call) -> Rule | None:
    """scatter, scatter_add and scatter_reduce; a second tensor operand after the index is the source of values."""
    shapes = [operand.shape for operand in call.ins]
    rank = len(shapes[0])
    if any(len(shape) != rank for shape in shapes):
        return None
    dim = wrap(call.arg(1, "dim"), rank)
    src = at(call, 3, "src")
    how = "sum" if call.target.split(".")[1] == "scatter_add" else _MERGES.get(_reduction(call) or "")
    if how is not None and not call.arg(5, "include_self", True):
        how = None
    merged = how is not None and bool(shapes[0]) and (src is None or shapes[1][dim] == shapes[src][dim])
    return bind(
        call,
        numbered([_scatter_words(shapes, number, dim, merged) for number in range(len(shapes))]),
        [_scatter_words(shapes, 0, dim, merged)],
        reduce={"j": how} if merged and how else {},
        addends=[0] if how == "sum" and merged else [],
        linear=_scatter_linear(call, src, how),
    )


def _scatter_words(shapes: Sequence[tuple[int, ...]], operand: int, dim: int, merged: bool) -> str:
    """The dims of one operand: `d0` where all have the same size, whole where only a corner of one is touched."""
    words: list[str] = []
    for number in range(len(shapes[0])):
        if number != dim:
            shared = all(shape[number] == shapes[0][number] for shape in shapes)
            words.append(f"d{number}" if shared else f"[d{operand}_{number}]")
        elif operand == 0:
            words.append("[s]")
        elif merged:
            words.append("j")
        else:
            words.append(f"[j{operand}]")  # later writes win, so their order is to be kept
    return " ".join(words)


def _reduction(call: Call) -> str | None:
    reduction = call.arg(4, "reduce")
    return reduction if isinstance(reduction, str) else None


def _scatter_linear(call: Call, src: int | None, how: str | None) -> list[set[int | None]]:
    # A sum of sources scatters to the sum of results, unless results are multiplied or compared.
    if src is not None:
        return [{0, src}] if how == "sum" or _reduction(call) is None else []
    value = call.arg(3, "value")
    return [{0}] if value == 0 and _reduction(call) is None else []


def _rows(call: Call) -> list[str]:
    x = call.ins[0].shape
    dim = wrap(call.arg(1, "dim"), len(x))
    return ["[s]" if number == dim else f"d{number}" for number in range(len(x))]


def index_select(call: Call) -> Rule | None:
    words = _rows(call)
    if not words or len(call.ins[1].shape) != 1:
        return None
    return bind(call, {0: " ".join(words), 1: "j"}, [" ".join(words).replace("[s]", "j")], linear=[{0}])


def _write_rows(free: bool, linear: bool = True) -> RuleFn:
    """index_add (free: contributions add up), index_copy (whole: the last one wins), index_reduce (not linear)."""

    def rule(call: Call) -> Rule | None:
        words = _rows(call)
        source = at(call, 3, "source")
        if not words or source is None or len(call.ins[1].shape) != 1 or len(call.ins[source].shape) != len(words):
            return None
        rows = " ".join(words)
        j = "j" if free else "[j]"
        return bind(
            call,
            {0: rows, 1: j, source: rows.replace("[s]", j)},
            [rows],
            reduce={"j": "sum"} if free else {},
            addends=[0] if free else [],
            linear=[{0, source}] if linear else [],
        )

    return rule


def index_fill(call: Call) -> Rule | None:
    words = _rows(call)
    if not words or len(call.ins[1].shape) != 1:
        return None
    value = at(call, 3, "value")
    rows = " ".join(words)
    linear = [{0, value}] if value is not None or call.arg(3, "value") == 0 else []
    return bind(call, {0: rows, 1: "[j]", value: ""}, [rows], linear=linear)


def take(call: Call) -> Rule:
    source = " ".join(f"[s{number}]" for number in range(len(call.ins[0].shape)))
    index = " ".join(names("i", len(call.ins[1].shape)))
    return bind(call, {0: source, 1: index}, [index], linear=[{0}])


# --- advanced indexing


def _indexed(call: Call, position: int) -> tuple[list[str], list[str], Texts] | None:
    """(words of self, words of self[indices], operand -> words of its index); None for boolean masks.

    Index tensors broadcast to dims i0 i1 ...; these stand where the first index stands if the indices are adjacent,
    otherwise in front.
    """
    indices = call.arg(position, "indices")
    rank = len(call.ins[0].shape)
    operand_of = {dim: item.id for dim, item in enumerate(indices) if isinstance(item, Ref)}  # indexed dim -> operand
    if not operand_of or len(indices) > rank:
        return None
    if any(call.ins[operand].dtype in (torch.bool, torch.uint8) for operand in operand_of.values()):
        return None

    count = max(len(call.ins[operand].shape) for operand in operand_of.values())
    # dims of the indices, broadcast against one another
    where = names("i", count)
    texts: Texts = {}
    for operand in operand_of.values():
        # broadcast: an index with fewer dims has the last ones
        texts[operand] = " ".join(where[count - len(call.ins[operand].shape) :])

    first, last = min(operand_of), max(operand_of)
    adjacent = last - first + 1 == len(operand_of)
    front = first if adjacent else 0
    source = [f"[s{dim}]" if dim in operand_of else f"d{dim}" for dim in range(rank)]
    rest = [f"d{dim}" for dim in range(rank) if dim not in operand_of]
    return source, [*rest[:front], *where, *rest[front:]], texts


def index(call: Call) -> Rule | None:
    found = _indexed(call, 1)
    if found is None:
        return None
    source, result, where = found
    return bind(call, {0: " ".join(source), **where}, [" ".join(result)], linear=[{0}])


def _mask_write(call: Call) -> Rule | None:
    """x[mask] = one value: elementwise, as `where`."""
    indices, values = call.arg(1, "indices"), at(call, 2, "values")
    if len(indices) != 1 or not isinstance(indices[0], Ref) or values is None:
        return None
    if any(size != 1 for size in call.ins[values].shape):
        return None
    mask = indices[0].id
    if call.ins[mask].dtype is not torch.bool:
        return None
    dims = names("d", len(call.ins[0].shape))
    value = " ".join("1" for _ in call.ins[values].shape)
    return bind(
        call,
        {0: " ".join(dims), mask: " ".join(dims[: len(call.ins[mask].shape)]), values: value},
        [" ".join(dims)],
        linear=[{0, values}],
    )


def index_put(call: Call) -> Rule | None:
    found = _indexed(call, 1)
    values = at(call, 2, "values")
    if found is None or values is None:
        return _mask_write(call)
    source, result, where = found
    accumulate = bool(call.arg(3, "accumulate", False))
    written = result[len(result) - len(call.ins[values].shape) :]
    texts: Texts = {0: " ".join(source), **where, values: " ".join(written)}
    index_dims = sorted(set().union(*(text.split() for text in where.values())))
    if not accumulate:  # later writes win, so their order is to be kept
        texts = {operand: _whole_index(text) for operand, text in texts.items()}
    return bind(
        call,
        texts,
        [texts[0]],
        reduce=dict.fromkeys(index_dims, "sum") if accumulate else {},
        addends=[0] if accumulate else [],
        linear=[{0, values}],
    )


def _whole_index(text: str) -> str:
    """`d0 i0` -> `d0 [i0]`."""
    return " ".join(f"[{word}]" if word.startswith("i") else word for word in text.split())


def masked_index(call: Call) -> Rule | None:
    """_unsafe_masked_index: where(mask, self[indices], fill)."""
    found = _indexed(call, 2)
    if found is None:
        return None
    source, result, where = found
    mask = result[len(result) - len(call.ins[1].shape) :]
    linear: list[set[int | None]] = [{0}] if call.arg(3, "fill") == 0 else []
    return bind(call, {0: " ".join(source), 1: " ".join(mask), **where}, [" ".join(result)], linear=linear)


def masked_index_put(call: Call) -> Rule | None:
    """_unsafe_masked_index_put_accumulate: the gradient of `masked_index`."""
    found = _indexed(call, 2)
    values = at(call, 3, "values")
    if found is None or values is None:
        return None
    source, result, where = found
    rank = len(result)
    texts: Texts = {
        0: " ".join(source),
        1: " ".join(result[rank - len(call.ins[1].shape) :]),
        **where,
        values: " ".join(result[rank - len(call.ins[values].shape) :]),
    }
    reduce = {word: "sum" for word in result if word.startswith("i")}
    return bind(call, texts, [texts[0]], reduce=reduce, addends=[0], linear=[{0, values}])


# --- searching


def searchsorted(call: Call) -> Rule | None:
    """d0 [s], d0 [j] -> d0 [j]; a one-dim sequence serves every element alike."""
    sequence, values = call.ins[0].shape, at(call, 1, "self")
    sorter = at(call, 99, "sorter")
    if values is None:
        return None
    shape = call.ins[values].shape
    if len(sequence) == 1:
        dims = " ".join(names("d", len(shape)))
        return bind(call, {0: "[s]", values: dims, sorter: "[s]"}, [dims])
    lead = " ".join(names("d", len(shape) - 1))
    return bind(call, {0: f"{lead} [s]", values: f"{lead} j", sorter: f"{lead} [s]"}, [f"{lead} j"])


def bucketize(call: Call) -> Rule | None:
    values, bounds = at(call, 0, "self"), at(call, 1, "boundaries")
    if values is None or bounds is None:
        return None
    dims = " ".join(names("d", len(call.ins[values].shape)))
    return bind(call, {values: dims, bounds: "[s]"}, [dims])


def isin(call: Call) -> Rule | None:
    values, among = at(call, 0, "elements"), at(call, 1, "test_elements")
    if values is None or among is None:
        return None
    dims = " ".join(names("d", len(call.ins[values].shape)))
    whole = " ".join(f"[s{number}]" for number in range(len(call.ins[among].shape)))
    return bind(call, {values: dims, among: whole}, [dims])


# --- strategies: the source dim split


def _split_read(op: str, rule_of: RuleFn) -> StrategyFn:
    """gather and index_select from a split source: each rank answers for its rows, the rest is pending."""

    def strategies(call: Call, mesh: Mesh) -> Iterator[Strategy]:
        rule = rule_of(call)
        if rule is None:
            return
        dim = wrap(call.arg(1, "dim"), len(call.ins[0].shape))
        run = getattr(torch.ops.aten, op).default

        def code(call: Call, split: Split) -> LocalFn:
            rows, size = split.ins[0].dims[dim], call.ins[0].shape[dim]

            def read(x: torch.Tensor, where: torch.Tensor, mesh: Mesh) -> torch.Tensor:
                here, mine = inside(where, first_of(rows, mesh), x.shape[dim])
                here = torch.where((where < 0) | (where >= size), where, here)  # nobody's: fails as on one device
                return clear(run(x, dim, here), mine if op == "gather" else _column(mine, dim, x.dim()))

            return read

        yield from opened(call, mesh, rule, ["s"], code, no_traffic, how="sum")

    return strategies


def _column(mask: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
    """A one-dim mask shaped to broadcast along `dim`."""
    shape = [1] * rank
    shape[dim] = -1
    return mask.reshape(shape)


def _split_add(op: str, rule_of: RuleFn) -> StrategyFn:
    """scatter_add and index_add into a split dim: each rank adds what falls into its rows."""

    def strategies(call: Call, mesh: Mesh) -> Iterator[Strategy]:
        rule = rule_of(call)
        if rule is None or len(call.ins) != 3:
            return
        dim = wrap(call.arg(1, "dim"), len(call.ins[0].shape))
        run = getattr(torch.ops.aten, op).default
        alpha = dict(call.kwargs).get("alpha", 1)

        def code(call: Call, split: Split) -> LocalFn:
            rows, size = split.ins[0].dims[dim], call.ins[0].shape[dim]

            def add(x: torch.Tensor, where: torch.Tensor, source: torch.Tensor, mesh: Mesh) -> torch.Tensor:
                here, mine = inside(where, first_of(rows, mesh), x.shape[dim])
                here = torch.where((where < 0) | (where >= size), where, here)  # nobody's: fails as on one device
                if op == "index_add":
                    return run(x, dim, here, clear(source, _column(mine, dim, x.dim())), alpha=alpha)
                kept = source[tuple(slice(0, size) for size in where.shape)]
                return run(x, dim, here, clear(kept, mine))

            return add

        yield from opened(call, mesh, rule, ["s"], code, no_traffic)

    return strategies


RULES: dict[str, RuleFn] = {
    "aten.gather": gather,
    "aten.scatter": scatter,
    "aten.scatter_add": scatter,
    "aten.scatter_reduce": scatter,
    "aten.index_select": index_select,
    "aten.index_add": _write_rows(free=True),
    "aten.index_copy": _write_rows(free=False),
    "aten.index_reduce": _write_rows(free=False, linear=False),
    "aten.index_fill": index_fill,
    "aten.take": take,
    "aten.index": index,
    "aten._unsafe_index": index,
    "aten.index_put": index_put,
    "aten._unsafe_index_put": index_put,
    "aten._unsafe_masked_index": masked_index,
    "aten._unsafe_masked_index_put_accumulate": masked_index_put,
    "aten.searchsorted": searchsorted,
    "aten.bucketize": bucketize,
    "aten.isin": isin,
}
STRATEGIES: dict[str, StrategyFn] = {
    "aten.gather": _split_read("gather", gather),
    "aten.index_select": _split_read("index_select", index_select),
    "aten.scatter_add": _split_add("scatter_add", scatter),
    "aten.index_add": _split_add("index_add", RULES["aten.index_add"]),
}
