"""Why a pipeline is cut where it is, in words: where a stage begins, where else it could, and what decided.

    stage 2 begins at transformer.h.5.ln_1, the fastest by its schedule
      1.74 s per step; by the estimate that cuts are compared by, 1.76 s, and pp=3 works longest, 1.55 s each microbatch
      hands 16 MiB on to it, 67 µs instead at transformer.h.5.ln_2: +139 ms per step; pp=1 works longest, 1.7 s; 16 MiB
      cross; ... The work of pp=1 decides.

The figures are those of `planner.stages.stage_cuts`, estimates that cuts are compared by; the step's own seconds are
the plan's.
"""

from __future__ import annotations

import re
from math import comb
from typing import TYPE_CHECKING

from colofunc.errors import PlanError
from colofunc.mesh.sizes import size_text
from colofunc.planner.plan_table import time_text
from colofunc.planner.plan_terms import matches
from colofunc.planner.stages.assignment import MOST_CUTS
from colofunc.planner.stages.report import Pipelined
from colofunc.planner.stages.stage_cuts import CutCount, Piece, StageCuts

if TYPE_CHECKING:
    from colofunc.planner.plan import Plan

SCHEDULE, PLACEMENT = "schedule", "placement"
EQUAL = 1e-6
"""Steps whose seconds differ by a smaller part are equally fast."""
_STAGE = re.compile(r"stage (\d+)(?: at (.+))?")


def why_cut(plan: Plan, asked: str, most: int) -> list[str]:
    """Lines about "stage 2", about the "schedule" or about the "placement" of stages; [] where something else is asked.

    most: at most so many places at which the stage could begin instead, the nearest first. Raises PlanError for a stage
    that there is not.
    """
    pipeline = plan.pipeline
    if pipeline is None:
        return []
    if asked == SCHEDULE:
        return _schedules(pipeline)
    if asked == PLACEMENT:
        return [*_stages_of_ranks(pipeline), *(other.line(plan) for other in plan.others)]
    found = _STAGE.fullmatch(asked)
    if found is None or found[2]:
        return []
    stage = int(found[1])
    cuts = _cuts(pipeline, stage)
    if stage == 0:
        return ["stage 0 begins with the forward pass"]
    chosen = cuts.counted(cuts.begins)
    lines = [
        f"stage {stage} begins at {_name(cuts.pieces[cuts.begins[stage]])}, {_reason(plan, cuts)}",
        f"  {time_text(plan.cost_s)} per step; by the estimate that cuts are compared by, {time_text(chosen.step_s)}, "
        "and "
        f"{_longest_text(pipeline, chosen)}",
        f"  {_crossing_text(cuts, cuts.begins[stage])}",
    ]
    return lines + [f"  {_instead(plan, cuts, stage, piece)}" for piece in _nearest(cuts, stage)[:most]]


def why_not_cut(plan: Plan, what: str, glob: str) -> list[str]:
    """Lines about "stage 2 at h.7", or "stage 2" and the name of an operator's module or a parameter, or about another
    schedule by its name; [] where something else is asked."""
    pipeline = plan.pipeline
    if pipeline is None:
        return []
    found = _STAGE.fullmatch(what)
    if found is None:
        return _other_schedule(pipeline, what)
    place = found[2] or glob
    if place == "*":
        raise PlanError(
            f"{what!r} names no place; ask for one: why_not({what!r}, 'layers.7'), or why({what!r}) for the nearest"
        )
    stage = int(found[1])
    cuts = _cuts(pipeline, stage)
    if stage == 0:
        return ["stage 0 begins with the forward pass, wherever the others do"]
    piece = _piece_called(cuts, place)
    if piece is None:
        known = ", ".join(_name(cuts.pieces[number]) for number in _nearest(cuts, stage)[:3])
        return [
            f"no stage can begin at {place}: one begins where a weight is read first. The nearest such places are "
            f"{known}"
        ]
    if piece == cuts.begins[stage]:
        return [f"stage {stage} at {_name(cuts.pieces[piece])} is what was chosen"]
    if not cuts.may_begin(stage, piece):
        return [
            f"stage {stage} cannot begin at {_name(cuts.pieces[piece])}: each other stage needs a place of its own to "
            "begin at"
        ]
    return [_instead(plan, cuts, stage, piece)]


def _cuts(pipeline: Pipelined, stage: int) -> StageCuts:
    count = sum(len(use.stages) for use in pipeline.ranks)
    if stage >= count:
        raise PlanError(f"the pipeline has {count} stages and no stage {stage}; ask for one from 0 to {count - 1}")
    if pipeline.cuts is None:
        raise PlanError(
            f"where stage {stage} begins cannot be said: stages= begins one within a layer, or gives a layer to "
            "several stages; "
            "cuts are compared between layers. Try: stages that begin there"
        )
    return pipeline.cuts


def _reason(plan: Plan, cuts: StageCuts) -> str:
    """What chose the cut."""
    if cuts.given:
        return "as stages= says"
    how = plan.way.rpartition("cut ")[2] if "cut " in plan.way else "by time"
    if how == "by time" and comb(len(cuts.pieces) - 1, len(cuts.begins) - 1) > MOST_CUTS:
        return "where no layer that goes to another stage makes the step, as its schedule plays it, end sooner"
    if how == "by time":
        return "where the step, as its schedule plays it, ends first"
    return f"cut {how} to keep to the budget"


def _nearest(cuts: StageCuts, stage: int) -> list[int]:
    """Other pieces that the stage may begin at, the nearest first."""
    here = cuts.begins[stage]
    others = [piece for piece in range(1, len(cuts.pieces)) if piece != here and cuts.may_begin(stage, piece)]
    return sorted(others, key=lambda piece: (abs(piece - here), piece))


def _piece_called(cuts: StageCuts, glob: str) -> int | None:
    """The first piece whose module or weight, or what they are in, matches."""
    for number, piece in enumerate(cuts.pieces):
        if any(matches(name, glob) for name in _around(piece.path)):
            return number
        if any(matches(name, glob) for weight in piece.weights for name in _around(weight)):
            return number
    return None


def _around(name: str) -> list[str]:
    """A dotted name and those of the modules that it is in."""
    parts = name.split(".")
    return [".".join(parts[:k]) for k in range(len(parts), 0, -1)]


def _name(piece: Piece) -> str:
    """The module that a piece begins with, else its first weight."""
    return piece.path or (piece.weights[0] if piece.weights else "the first operator")


def _instead(plan: Plan, cuts: StageCuts, stage: int, piece: int) -> str:
    """Another place for a stage to begin: seconds, the rank that works longest, bytes that cross and are held, and what
    decided.
    """
    pipeline = plan.pipeline
    assert pipeline is not None, "cuts are of a pipeline"
    begins = cuts.moved(stage, piece)
    chosen, other = cuts.counted(cuts.begins), cuts.counted(begins)
    moved = [k for k in range(1, len(begins)) if k != stage and begins[k] != cuts.begins[k]]
    also = f" (stage {', '.join(map(str, moved))} gives way)" if moved else ""
    figures = (
        f"{_more_text(chosen, other)}; {_longest_text(pipeline, other)}; "
        f"{_in_place_of(other.received_bytes[stage], chosen.received_bytes[stage])} cross; "
        f"{_fullest_text(pipeline, other)}"
    )
    return f"instead at {_name(cuts.pieces[piece])}{also}: {figures}. {_decided(pipeline, chosen, other)}"


def _decided(pipeline: Pipelined, chosen: CutCount, other: CutCount) -> str:
    """In a sentence, which figure makes one of two cuts better."""
    more_s = other.step_s - chosen.step_s
    if _equal(chosen, other):
        return "Both cuts are equally fast."
    if more_s < 0:
        lean = max(chosen.held_bytes) < max(other.held_bytes)
        return f"It is faster, and holds {'more' if lean else 'no more'} on the fullest rank."
    if other.without_sends_s - chosen.without_sends_s < more_s / 2:
        return "What crosses decides."
    rank = other.work_s.index(max(other.work_s))
    longer_s = other.work_s[rank] - max(chosen.work_s)
    if longer_s >= more_s / 2:
        return f"The work of {pipeline.axis}={rank} decides."
    return "How long ranks wait for one another decides."


def _longest_text(pipeline: Pipelined, count: CutCount) -> str:
    rank = count.work_s.index(max(count.work_s))
    return f"{pipeline.axis}={rank} works longest, {time_text(count.work_s[rank])}"


def _fullest_text(pipeline: Pipelined, count: CutCount) -> str:
    rank = count.held_bytes.index(max(count.held_bytes))
    return f"{pipeline.axis}={rank} holds most, about {size_text(count.held_bytes[rank])}"


def _crossing_text(cuts: StageCuts, piece: int) -> str:
    here = cuts.pieces[piece]
    return f"each microbatch hands {size_text(here.received_bytes)} on to it, {time_text(here.received_s)}"


def _schedules(pipeline: Pipelined) -> list[str]:
    """The schedule, and others for the same stages."""
    cuts = pipeline.cuts
    if cuts is None:
        return [f"{pipeline.schedule}, bubble {pipeline.bubble:.1%}"]
    chosen = cuts.counted(cuts.begins)
    lines = [f"{pipeline.schedule}, bubble {pipeline.bubble:.1%}: {time_text(chosen.step_s)} per step by the estimate"]
    return lines + [f"  {line}" for other in cuts.others for line in _other_schedule(pipeline, other.name)]


def _other_schedule(pipeline: Pipelined, name: str) -> list[str]:
    """A schedule that was not asked for; [] for other words."""
    cuts = pipeline.cuts
    if cuts is None:
        return []
    chosen = cuts.counted(cuts.begins)
    for other in cuts.others:
        if other.name == name:
            more = f"{_more_text(chosen, other.count)} by the estimate, with stages that begin at the same places"
            return [
                f"{name}: {more}; {_fullest_text(pipeline, other.count)} in place of "
                f"{size_text(max(chosen.held_bytes))}"
            ]
    return []


def _stages_of_ranks(pipeline: Pipelined) -> list[str]:
    lines = []
    for index, use in enumerate(pipeline.ranks):
        lines.append(f"{pipeline.axis}={index} has stage {', '.join(map(str, use.stages))}")
    return lines


def _equal(chosen: CutCount, other: CutCount) -> bool:
    """Whether two steps are equally fast."""
    return abs(other.step_s - chosen.step_s) <= EQUAL * chosen.step_s


def _more_text(chosen: CutCount, other: CutCount) -> str:
    """By how much another step takes longer."""
    if _equal(chosen, other):
        return "+0 s per step"
    more_s = other.step_s - chosen.step_s
    return f"{'-' if more_s < 0 else '+'}{time_text(abs(more_s))} per step"


def _in_place_of(nbytes: float, chosen_bytes: float) -> str:
    return size_text(nbytes) if nbytes == chosen_bytes else f"{size_text(nbytes)} in place of {size_text(chosen_bytes)}"
