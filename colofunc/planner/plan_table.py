"""A plan as a table: identical layers folded, the field's words on top.

phase     operator                 ×  rule                 strategy        compute   comm   collectives
forward   h.*.mlp.fc linear       48  b0 b1 i, o i -> ...  {dp: b0, tp: o}  1.1 ms   0 s
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from colofunc.mesh.sizes import size_text as size_text

if TYPE_CHECKING:
    from rich.table import Table

    from colofunc.planner.plan import Decision, Plan


def plan_table(plan: Plan, decisions: Sequence[Decision], costly: int | None) -> Table:
    """One row per decision; with `costly`, only the dearest, still in the order of the program."""
    from rich.table import Table

    if costly is not None:
        dearest = set(sorted(range(len(decisions)), key=lambda k: -decisions[k].cost_s)[:costly])
        decisions = [d for k, d in enumerate(decisions) if k in dearest]
    table = Table(title=str(plan), title_justify="left", show_lines=False, caption="\n".join(plan.memory) or None, caption_justify="left")
    for name in ("phase", "operator", "×", "rule", "strategy", "compute", "comm", "collectives", "why"):
        table.add_column(name, justify="right" if name in ("×", "compute", "comm") else "left", overflow="fold")
    for d in decisions:
        operator = d.target.removeprefix("aten.").removeprefix("colofunc.").removesuffix(".default")
        table.add_row(
            d.phase,
            f"{d.path} {operator}".strip(),
            str(d.count),
            d.rule,
            d.strategy,
            time_text(d.compute_s),
            time_text(d.communication_s),
            "; ".join(d.collectives),
            d.why,
        )
    return table


def time_text(seconds: float) -> str:
    """`1.07 s`, `1.2 ms`, `3 µs`, `0 s`."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9)):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return "0 s"
