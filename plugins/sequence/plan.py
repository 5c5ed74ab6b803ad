"""The named plans: how tokens are split, and what attention does with its parts.

    ring(axis)             tokens `(s axis)` under a causal mask, else `(axis s)`    attention {axis: striped} or {axis: ring}
    ring(axis, heads=u)    tokens `(u s axis)` or `(axis u s)`                       and {u: g}, or {u: heads}
    ulysses(axis)          tokens `(axis s)`                                         {axis: g}, or {axis: heads}
    gather_kv(axis)        as ring                                                   {axis: gathered}, striped or not
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Literal

import attrs
from colofunc_plugins.sequence.gathered import Gathered
from colofunc_plugins.sequence.heads import Heads, HeadsAlone
from colofunc_plugins.sequence.rings import Ring

import colofunc as cf

TARGETS = cf.ext.AttentionCall.TARGETS
BALANCES = ("auto", "stripes", None)
KINDS: Mapping[str, type[cf.ext.AttentionPattern]] = {"ring": Ring, "gather_kv": Gathered, "ulysses": HeadsAlone}


def ring(axis: str, *, balance: str | None = "auto", heads: str | None = None) -> SequencePlan:
    """Ring attention over `axis`: keys and values travel from rank to rank, a block at a time.

    balance: "stripes" deals tokens round, so that a causal mask leaves every rank the same work; None keeps contiguous
    blocks, of which a window reaches only the last few. "auto": stripes if some attention is causal and sees more than
    half of the tokens. heads: a second axis that splits heads by all-to-all (Ulysses) around the ring.
    """
    return SequencePlan("ring", (axis,) if heads is None else (axis, heads), balance)


def gather_kv(axis: str, *, balance: str | None = "auto") -> SequencePlan:
    """Context parallelism with gathered keys: each rank works on its own rows and gathers all keys, layer by layer."""
    return SequencePlan("gather_kv", (axis,), balance)


def ulysses(axis: str) -> SequencePlan:
    """DeepSpeed Ulysses over `axis`: all-to-all from tokens to heads before attention and back behind it.

    Key heads that the axis does not divide: query heads are padded to a multiple, and a key head that several ranks
    need goes to each of them. No axis may be larger than the number of query heads. Of attention that a model writes
    out, heads divide.
    """
    return SequencePlan("ulysses", (axis,))


def sequence(
    axis: str,
    mode: Literal["ring", "ulysses", "gather_kv"] = "ring",
    *,
    balance: str | None = "auto",
    heads: str | None = None,
) -> SequencePlan:
    """The plan of one of these names, for configurations: `sequence: {mode: ulysses, axis: cp}`.

    Raises PlanError where the mode has no such option.
    """
    if heads is not None and mode != "ring":
        raise cf.PlanError(f"sequence(mode={mode!r}) has no heads; it is of mode 'ring'")
    if mode == "ring":
        return ring(axis, balance=balance, heads=heads)
    if mode == "gather_kv":
        return gather_kv(axis, balance=balance)
    if balance != "auto":
        raise cf.PlanError(f"sequence(mode={mode!r}) has no balance; it is of modes 'ring' and 'gather_kv'")
    return ulysses(axis)


@attrs.frozen
class SequencePlan:
    """What `ring`, `ulysses` and `gather_kv` return: a named plan, and the plugin that gives attention its pattern over
    it.
    """

    mode: str
    axes: tuple[str, ...]
    balance: str | None = None

    def __attrs_post_init__(self) -> None:
        first, mode = self.axes[0], self.mode
        for axis in self.axes:
            if not isinstance(axis, str):
                raise cf.PlanError(
                    f"{mode} takes the name of one axis, not {axis!r}; write {mode}('cp'), or make a view of several"
                )
        if first in self.axes[1:]:
            raise cf.PlanError(
                f"{mode}: axis {first!r} cannot both hold blocks of tokens and split heads; name two axes"
            )
        if self.balance not in BALANCES:
            known = ", ".join(map(repr, BALANCES))
            raise cf.PlanError(
                f"{mode} has balance {known}, not {self.balance!r}; write {mode}({first!r}, balance='stripes')"
            )

    @property
    def name(self) -> str:
        return f"{self.mode}({', '.join(self.axes)})"

    @cf.hookimpl
    def colofunc_strategies(self) -> Mapping[str, Callable[..., Any]]:
        return dict.fromkeys(TARGETS, self.strategies)

    def strategies(self, call: Any, mesh: cf.Mesh) -> Iterator[cf.Strategy]:
        """The plan's pattern of one call, with every way to place the other axes."""
        if self.axes[0] not in mesh:  # microbatches have a mesh of their own
            return iter(())
        axis = self._atom(mesh, self.axes[0])
        if self.mode == "ulysses":
            return HeadsAlone.strategies(call, mesh, "", Heads, (axis,))
        # Around blocks over one axis, another plan or `heads` may exchange heads.
        return KINDS[self.mode].strategies(call, mesh, axis, Heads, [a for a in mesh.axis_names if a != axis])

    def wishes(self, program: Any, mesh: cf.Mesh, rules: cf.ext.Rules | None = None) -> list[cf.ext.Wish]:
        """Tokens on the axes, and the pattern of attention over them."""
        axis, *heads = (self._atom(mesh, name) for name in self.axes)
        if all(mesh.axis_size(name) == 1 for name in (axis, *heads)):
            return []
        written = self.mode != "ring"  # attention that a model writes out as products has no blocks that could travel
        instead = f"take gather_kv({self.axes[0]!r}) or ulysses({self.axes[0]!r})"
        calls = cf.ext.tokens.attention(program, self.name, written, instead=instead)

        striped = self.mode != "ulysses" and self._striped(calls)
        order = (*heads, "_", axis) if striped else (axis, *heads, "_")
        exchanged = axis if self.mode == "ulysses" else ""
        tokens, tokens_only = f"({' '.join(order)})", f"gather_kv({axis!r}), which splits tokens only"
        wishes = cf.ext.tokens.wishes(
            program, mesh, tokens, self.axes, self.name, written, rules, exchanged, instead=tokens_only
        )
        if calls:
            wishes.append(self._pattern(calls, mesh, axis, heads, striped))
        return wishes

    def _atom(self, mesh: cf.Mesh, name: str) -> str:
        atoms = mesh.atoms((name,))
        if len(atoms) != 1:
            raise cf.PlanError(
                f"{self.name}: {name!r} is a view of {', '.join(atoms)}, and tokens go over one axis; name one of these"
            )
        return atoms[0]

    def _striped(self, calls: Sequence[cf.ext.AttentionCall]) -> bool:
        if self.balance != "auto":
            return self.balance == "stripes"
        return any(call.get("causal") and not _sees_at_most_half(call) for call in calls)

    def _pattern(
        self, calls: Sequence[cf.ext.AttentionCall], mesh: cf.Mesh, axis: str, heads: list[str], striped: bool
    ) -> cf.ext.Wish:
        """What attention does, forward and backward: blocks over one axis, heads over another by the rule or by an
        exchange.
        """
        head_axes = [axis] if self.mode == "ulysses" else heads
        fewest = min(call.sizes["g"] * call.sizes["r"] for call in calls)
        for name in head_axes:
            if mesh.axis_size(name) > fewest:
                raise cf.PlanError(
                    f"{self.name}: {fewest} heads over the {mesh.axis_size(name)} ranks of {name!r} leave ranks "
                    "without any; "
                    f"use fewer ranks, or ring({name!r}), which splits tokens only"
                )
        blocks = () if self.mode == "ulysses" else (f"{axis}: {KINDS[self.mode].words[striped]}",)
        ways_of_heads = product(*([f"{name}: g", f"{name}: heads"] for name in head_axes))
        wants = tuple("{" + ", ".join((*blocks, *way)) + "}" for way in ways_of_heads)
        return cf.ext.Wish("*", wants, self.axes, source=self.name, targets=TARGETS, phases=("forward", "backward"))


def _sees_at_most_half(call: cf.ext.AttentionCall) -> bool:
    """Whether a window leaves at most half of the tokens."""
    return 0 < call.get("window") <= call.sizes["t"] // 2
