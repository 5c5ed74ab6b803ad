"""The named plans: which leaves of the batch are split, and what attention does.

    ring(axis)        tokens `b (s axis)` where a causal mask asks for stripes, else `b (axis s)`
    ulysses(axis)     tokens `b (axis s)`, attention by heads
    gather_kv(axis)   as ring, keys and values gathered

A leaf of the batch is split if its dim 1 is as long as the rows or columns of some attention.
"""

from __future__ import annotations

from typing import Any

import attrs
from colofunc_plugins.sequence.call import FORWARD, TARGETS, Attention

import colofunc as cf

BALANCES = ("auto", "stripes", None)


def ring(axis: str, *, balance: str | None = "auto") -> Sequence:
    return Sequence("ring", (axis,), balance)


def gather_kv(axis: str, *, balance: str | None = "auto") -> Sequence:
    return Sequence("gather_kv", (axis,), balance)


def ulysses(axis: str) -> Sequence:
    return Sequence("ulysses", (axis,), None)


@attrs.frozen
class Sequence:
    """What `ring`, `ulysses` and `gather_kv` return: a named plan."""

    mode: str
    axes: tuple[str, ...]
    balance: str | None = "auto"

    @property
    def name(self) -> str:
        return f"{self.mode}({', '.join(self.axes)})"

    def wishes(self, program: Any, mesh: cf.Mesh) -> list[cf.Wish]:
        (axis,) = mesh.atoms(self.axes)
        calls = attentions(program, mesh)
        striped = self.mode != "ulysses" and any(a.get("causal") and not a.get("window") for a in calls) and self.balance is not None
        lengths = {a.sizes[f] for a in calls for f in "st"}
        text = f"(s {axis})" if striped else f"({axis} s)"
        word = {"ring": "striped" if striped else "ring", "ulysses": "g", "gather_kv": "gathered"}[self.mode]
        found = []
        for id in program.inputs:
            value = program.values[id]
            if value.role == "batch" and len(value.shape) > 1 and value.shape[1] in lengths:
                found.append(cf.Wish(value.name, f"b {text} ...", self.axes, ("batch",), self.name, along=True, rest={3: f"b {text} d"}, across=TARGETS))
        both = ("forward", "backward")
        found.append(cf.Wish("*", f"{{{axis}: {word}}}", self.axes, source=self.name, targets=TARGETS, phases=both))
        return found


def attentions(program: Any, mesh: cf.Mesh) -> list[Attention]:
    """The attention operators of a program's forward."""
    rules = cf.Rules(program, mesh)
    return [Attention.of(rules.call(node)) for node in program.nodes if node.phase == "forward" and node.target == FORWARD]
