"""The named plans: which leaves of the batch are split, and what attention does with its parts.

    ring(axis)             tokens `(s axis)` under a causal mask, else `(axis s)`    attention {axis: striped} or {axis: ring}
    ring(axis, heads=u)    tokens `(u s axis)` or `(axis u s)`                       and {u: g}
    ulysses(axis)          tokens `(axis s)`                                         {axis: g}, or {axis: heads}
    gather_kv(axis)        as ring                                                   {axis: gathered}

A leaf of the batch is split if its dim 1 is as long as the rows or columns of some attention; where no leaf is, the values in which
these arise (patches of an image). From there the layout is followed through the program; attention is crossed: it takes and gives
tokens as they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from math import prod
from typing import Any

import attrs
from colofunc_plugins.sequence.gathered import Gathered
from colofunc_plugins.sequence.pattern import Pattern, Whole, patterns
from colofunc_plugins.sequence.rings import Ring

import colofunc as cf

FORWARD = cf.AttentionCall.FORWARD
TARGETS = (FORWARD, cf.AttentionCall.BACKWARD)
PRODUCTS = ("aten.bmm.default", "aten.baddbmm.default")
BALANCES = ("auto", "stripes", None)
KINDS: Mapping[str, type[Pattern]] = {"ring": Ring, "gather_kv": Gathered, "ulysses": Whole}


def ring(axis: str, *, balance: str | None = "auto", heads: str | None = None) -> SequencePlan:
    """Ring attention over `axis`: keys and values travel from rank to rank, a block at a time.

    balance: "stripes" deals tokens round, so that a causal mask leaves every rank the same work; None keeps contiguous
    blocks, of which a window reaches only the last few. "auto": stripes if some attention is causal and sees more than
    half of the tokens. heads: a second axis that splits heads by all-to-all (Ulysses) around the ring.
    """
    return _made("ring", axis, balance, heads)


def gather_kv(axis: str, *, balance: str | None = "auto") -> SequencePlan:
    """Context parallelism with gathered keys: each rank works on its own rows and gathers all keys, layer by layer."""
    return _made("gather_kv", axis, balance, None)


def ulysses(axis: str) -> SequencePlan:
    """DeepSpeed Ulysses over `axis`: all-to-all from tokens to heads before attention and back behind it.

    Key heads that the axis does not divide: query heads are padded to a multiple, and a key head that several ranks need
    goes to each of them. No axis may be larger than the number of query heads.
    """
    return _made("ulysses", axis, None, None)


def _made(mode: str, axis: str, balance: str | None, heads: str | None) -> SequencePlan:
    if not isinstance(axis, str) or not (heads is None or isinstance(heads, str)):
        wrong = axis if not isinstance(axis, str) else heads
        raise cf.PlanError(f"{mode} takes the name of one axis, not {wrong!r}; write {mode}('cp'), or make a view of several")
    if heads == axis:
        raise cf.PlanError(f"{mode}: axis {axis!r} cannot both hold blocks of tokens and split heads; name two axes")
    if balance not in BALANCES:
        known = ", ".join(map(repr, BALANCES))
        raise cf.PlanError(f"{mode} has balance {known}, not {balance!r}; write {mode}({axis!r}, balance='stripes')")
    return SequencePlan(mode, (axis,) if heads is None else (axis, heads), balance)


@attrs.frozen
class SequencePlan:
    """What `ring`, `ulysses` and `gather_kv` return: a named plan, and the plugin that gives attention its pattern over it."""

    mode: str
    axes: tuple[str, ...]
    balance: str | None = None

    @property
    def name(self) -> str:
        return f"{self.mode}({', '.join(self.axes)})"

    @cf.hookimpl
    def colofunc_strategies(self) -> Mapping[str, Callable[..., Any]]:
        return dict.fromkeys(TARGETS, self.strategies)

    def strategies(self, call: Any, mesh: cf.Mesh) -> Iterator[cf.Strategy]:
        """The plan's pattern of one call, with every way to place the other axes."""
        if self.axes[0] not in mesh:  # microbatches have a mesh of their own
            return
        axis = self._atom(mesh, self.axes[0])
        if self.mode == "ulysses":
            yield from patterns(call, mesh, Whole, "", (axis,))
        elif mesh.axis_size(axis) > 1:  # around a ring over one axis, another plan or `heads` may exchange heads
            yield from patterns(call, mesh, KINDS[self.mode], axis, [a for a in mesh.axis_names if a != axis])

    def wishes(self, program: Any, mesh: cf.Mesh) -> list[cf.Wish]:
        axis, *heads = (self._atom(mesh, a) for a in self.axes)
        ranks = prod(mesh.axis_size(a) for a in (axis, *heads))
        if ranks == 1:
            return []
        rules = cf.Rules(program, mesh)
        nodes = [node for node in program.nodes if node.phase == "forward" and node.target == FORWARD]
        calls, scores = [cf.AttentionCall(rules.call(node)) for node in nodes], list(cf.reading.written_attention(program))
        self._check(calls, scores)
        scores = scores if self.mode == "gather_kv" else []
        striped = self.mode != "ulysses" and self._striped(calls)
        inside = ("s", axis) if striped else (axis, "s")
        tokens = f"({' '.join((*heads, *inside) if striped else (axis, *heads, 's'))})"
        # What has rows of tokens: q, k and v; scores that are written out have them as columns, too.
        rows = {id: program.values[id].shape[-2] for node in (*nodes, *scores) for id in node.refs[: 3 if node.target == FORWARD else 1]}
        lengths = {*rows.values(), *(program.values[node.refs[0]].shape[-1] for node in scores)}
        leaves = [v for v in (program.values[i] for i in program.inputs) if v.role == "batch" and len(v.shape) > 1]
        mine = [v for v in leaves if v.shape[1] in lengths]
        have = {v.shape[1] for v in mine}
        self._divide(lengths, have, ranks)
        more: dict[str, Any] = dict(source=self.name, along=True, across=TARGETS, gathers=PRODUCTS if self.mode == "gather_kv" else ())
        found = [cf.Wish(v.name, f"b {tokens} ...", self.axes, ("batch",), **more) for v in mine]
        wanted = {id: cf.Spec(f"... {tokens} e").bind(mesh, program.values[id].shape) for id, size in rows.items() if size not in have}
        arise = cf.reading.origins(program, rules, wanted)
        found += [cf.Wish("*", layout, self.axes, values=(id,), **more) for id, layout in arise.items()]
        return [*found, *(self._patterns(calls, mesh, axis, heads, striped) if calls else ())]

    def _atom(self, mesh: cf.Mesh, name: str) -> str:
        atoms = mesh.atoms((name,))
        if len(atoms) != 1:
            raise cf.PlanError(f"{self.name}: {name!r} is a view of {', '.join(atoms)}, and tokens go over one axis; name one of these")
        return atoms[0]

    def _check(self, calls: list[cf.AttentionCall], scores: list[Any]) -> None:
        if not calls and (self.mode != "gather_kv" or not scores):
            line = f" (it is written out at {scores[0].line})" if scores else ""
            raise cf.PlanError(
                f"{self.name} finds no attention in this step{line}; it knows torch's scaled_dot_product_attention, which transformers "
                "calls with attn_implementation='sdpa'" + (f"; where a model has none, take gather_kv({self.axes[0]!r})" if scores else "")
            )

    def _divide(self, lengths: set[int], have: set[int], ranks: int) -> None:
        for size in (size for size in sorted(lengths) if size % ranks):
            way = f"take a multiple (cf.pad with multiple={ranks} makes one), or fewer ranks"
            if size not in have:
                way = (
                    "they arise inside the model, where nothing can be padded: take inputs of another size, leave out a class token "
                    "(timm: class_token=False, global_pool='avg'), or split heads instead, tensor('1d', axis)"
                )
            raise cf.PlanError(f"{self.name}: {size} tokens do not divide over {ranks} ranks; {way}")

    def _striped(self, calls: list[cf.AttentionCall]) -> bool:
        if self.balance != "auto":
            return self.balance == "stripes"
        return any(a.get("causal") and not 0 < a.get("window") <= a.sizes["t"] // 2 for a in calls)

    def _patterns(self, calls: list[cf.AttentionCall], mesh: cf.Mesh, axis: str, heads: list[str], striped: bool) -> list[cf.Wish]:
        """What attention does, forward and backward."""
        splits = [axis] if self.mode == "ulysses" else heads
        for a in splits:
            fewest = min(call.sizes["g"] * call.sizes["r"] for call in calls)
            if mesh.axis_size(a) > fewest:
                raise cf.PlanError(
                    f"{self.name}: {fewest} heads over the {mesh.axis_size(a)} ranks of {a!r} leave ranks without any; use fewer ranks, or "
                    f"ring({a!r}), which splits tokens only"
                )
        blocks = {"ulysses": "", "ring": "striped" if striped else "ring", "gather_kv": "gathered" + " striped" * striped}[self.mode]
        first = [f"{axis}: {blocks}"] if blocks else []
        wants = tuple(f"{{{', '.join((*first, *some))}}}" for some in product(*([f"{a}: {w}" for w in ("g", "heads")] for a in splits)))
        return [cf.Wish("*", wants, self.axes, source=self.name, targets=TARGETS, phases=("forward", "backward"))]
