"""Errors of steps that cannot be split into microbatches, and what to write in their place."""

from __future__ import annotations

from colofunc.errors import PlanError
from colofunc.program.facts import LOCAL, WIRE
from colofunc.program.ir import Node

MIXING = ("error", "per-microbatch")
"""What a transform may be told of operators that mix samples: that they are an error, or estimates."""


class RowsMove(PlanError):
    """The plan moves rows of the batch between ranks where microbatches cannot follow; another plan may not."""


class Mixes(PlanError):
    """An operator of the step mixes samples that are in different microbatches."""


OTHERWISE = {
    "fp8_scale": 'give cf.fp8 scaling="delayed" or "rowwise_with_gw_hp" to keep the numbers of the whole batch, or ',
}
"""Operator that mixes samples -> what to write in its place."""


def mixing_error(node: Node, trips: int, mixing: str) -> PlanError:
    """Why a reduction over the microbatches cannot be: which operator mixes samples, and what to write instead."""
    who = _blamed(node)
    where = f" in {node.path!r}" if node.path else ""
    line = f" ({node.line})" if node.line else ""
    own_name = who.removeprefix("colofunc.")
    if own_name in WIRE | LOCAL:
        return RowsMove(
            f"the plan moves rows of the batch between ranks ({own_name}{where}{line}), which {trips} microbatches "
            "of so few rows cannot follow; use fewer microbatches or a larger batch, or name the batch's axes in "
            "in_specs"
        )
    name = who.removeprefix("aten.").removeprefix("colofunc.")
    if node.phase == "update":
        return Mixes(
            f"the step reads the batch again behind the update {name}{where}{line}, which needs the gradients of all "
            f"microbatches, so {trips} microbatches cannot be computed one after another; make a step of each update "
            "(what reads new parameters belongs in the next one), or take one microbatch"
        )
    said = f"{name}{where}{line} mixes the samples of the batch"
    if not who.startswith(("aten.", "colofunc.")):
        said += (
            ", as far as is known without a rule that keeps them apart (cf.operator(rule=...), or the hook "
            "colofunc_rules of a plugin)"
        )
    if mixing == "per-microbatch":
        return Mixes(
            f"{said}: it needs all rows at once, so it cannot be computed per microbatch; take it out of the "
            "accumulated step"
        )
    return Mixes(
        f"{said}, so {trips} microbatches cannot be computed one after another; {OTHERWISE.get(name, '')}"
        f'write mixing="per-microbatch" to treat each microbatch by itself (the numbers change), or take one microbatch'
    )


def _blamed(node: Node) -> str:
    """The operator that a note of a reduction names: "...: OPERATOR needs ..." or "OPERATOR {..."."""
    if " needs " in node.note:
        return node.note.split(" needs ")[0].split(": ")[-1]
    return node.note.split(" {")[0]
