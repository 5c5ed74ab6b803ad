"""Why a plan is as it is: one operator call or one leaf, in words, with what else it could have been and what that
costs.

    block.up linear ×2 [forward]  b0 b1 i, o i, o -> b0 b1 o
      {dp: b0}: 6.4 µs compute + 204 µs communication (all_gather dp)
      dp splits b0: dim 0 of operand 0, dim 0 of the result
      wished: zero(3, dp): 'batch' -> '(dp b) ...', followed to {dp: b0}
      instead {dp: b1}: +12 µs with everything else as it is (+0.4 µs computing, +11.6 µs communication)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from colofunc.ops.pattern_words import factors_of
from colofunc.planner.plan_table import time_text
from colofunc.spec.spec import parse

if TYPE_CHECKING:
    from colofunc.planner.plan import Alternative, Decision, Leaf, Plan
    from colofunc.spec.layout import At

LEGEND = "(a rule: dims of one name are split together, a name that no result has is summed, [name] stays whole)"


def why_decision(plan: Plan, decision: Decision, most: int) -> list[str]:
    """Lines about one operator call: what it does, what that costs, why, and at most so many alternatives."""
    times = f" ×{decision.count}" if decision.count > 1 else ""
    collectives = f" ({'; '.join(decision.collectives)})" if decision.collectives else ""
    seconds = f"{time_text(decision.compute_s)} compute + {time_text(decision.communication_s)} communication"
    lines = [
        f"{where_text(decision)}{times} [{decision.phase}]  {decision.rule}",
        f"  {decision.strategy}: {seconds}{collectives}",
    ]
    lines += [f"  {_placed(decision.rule, axis, factor)}" for axis, factor in decision.axes]
    lines.append(f"  {decision.why}")
    return lines + _instead(plan, decision.alternatives, most)


def why_leaf(plan: Plan, leaf: Leaf, most: int) -> list[str]:
    """Lines about one input: how it lies, who reads it, why, and at most so many alternatives."""
    lines = [
        f"{leaf.name} {leaf.role} {leaf.dtype}{list(leaf.shape)} kept as {leaf.placed!r}",
        f"  {_spread(plan, leaf.spec, leaf.at)}",
    ]
    if leaf.read_by:
        lines.append(f"  read by {', '.join(leaf.read_by)}")
    if leaf.why:
        lines.append(f"  {leaf.why}")
    return lines + _instead(plan, leaf.alternatives, most)


def where_text(decision: Decision) -> str:
    """The module and the operator."""
    return f"{decision.path} {decision.target}" if decision.path else decision.target


def more_text(plan: Plan, other: Alternative) -> str:
    """What an alternative costs the whole step, and of what that is made."""
    if other.more_s == float("inf"):
        return "cannot be connected to its neighbours"
    text = f"{_signed(other.more_s)} with everything else as it is"
    if other.more_compute_s is None:
        return text
    rest = "communication" if plan.budget_bytes is None else "communication and memory"
    if other.more_compute_s == 0:
        return f"{text}, all of it {rest}"
    return f"{text} ({_signed(other.more_compute_s)} computing, {_signed(other.more_s - other.more_compute_s)} {rest})"


def _instead(plan: Plan, alternatives: tuple[Alternative, ...], most: int) -> list[str]:
    return [f"  instead {other.strategy}: {more_text(plan, other)}" for other in alternatives[:most]]


def _signed(seconds: float) -> str:
    return f"{'-' if seconds < 0 else '+'}{time_text(abs(seconds))}"


# ---- rules and specs in words ----


def _placed(rule: str, axis: str, factor: str) -> str:
    """Where an axis lies that a strategy puts on a factor of its operator's rule."""
    left, _, right = rule.partition("->")
    operands = _dims_with(left, factor)
    results = _dims_with(right, factor)
    if not operands and not results:
        return f"{axis} is used by the strategy itself ({factor})"
    several = right.count(",") > 0
    places = [f"dim {dim} of operand {k}" for k, dim in operands]
    places += [f"dim {dim} of {f'result {k}' if several else 'the result'}" for k, dim in results]
    text = f"{axis} splits {factor}: {', '.join(places)}"
    return text if results else f"{text}; no result has it, so every rank of {axis} makes a term of a sum"


def _dims_with(side: str, factor: str) -> list[tuple[int, int]]:
    """(operand, dim) of a factor on one side of a rule."""
    places = []
    for operand, pattern in enumerate(side.split(",")):
        for dim, factors in enumerate(factors_of(pattern)):
            if factor in factors:
                places.append((operand, dim))
    return places


def _spread(plan: Plan, spec: str, at: At | None) -> str:
    """A spec in words, axis by axis. at: where alone the value exists."""
    parsed = parse(spec)
    dims = [[each.name for each in factors or ()] for factors in parsed.dims]
    pending_axes = [pending_axis for pending_axis, _ in parsed.pending]
    said = []
    for axis, size in plan.mesh:
        if size == 1:
            continue
        over = [dim for dim, names in enumerate(dims) if axis in names]
        if at is not None and axis == at[0]:
            said.append(f"at {' and '.join(f'{axis}={index}' for index in at[1])} only, where its stage is")
        elif over:
            said.append(f"dim {over[0]} in {size} parts over {axis}")
        elif axis in pending_axes:
            said.append(f"a term of a sum on every rank of {axis}")
        else:
            said.append(f"the same on every rank of {axis}")
    return ", ".join(said) or "whole"
