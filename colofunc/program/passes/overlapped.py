"""Overlapped: the order in which real ranks run a program.

The passes of `schedule`, `coalesce` and `one_call` in the order in which they are one: what waits for nobody stands late,
then every collective becomes a start and a wait, in the bodies of loops first.

    %2 = all_gather(%1)  %4 = mul(%3, %3)  %5 = mm(%2, %4)
        ->  %2 = all_gather_start(%1)  %4 = mul(%3, %3)  %6 = wait(%2)  %5 = mm(%6, %4)
"""

from __future__ import annotations

from functools import partial
from itertools import count
from math import inf

from colofunc.program.facts import is_copy
from colofunc.program.ir import Program
from colofunc.program.passes.coalesce import delay_outputs, delay_updates, delay_views
from colofunc.program.passes.loop import change_bodies
from colofunc.program.passes.one_call import updates_side_by_side
from colofunc.program.passes.schedule import overlap, waits_within


def overlapped(program: Program, ahead_bytes: float = inf) -> Program:
    """`program` as real ranks run it: collectives started early and waited for late, so that their buffers live longer.

    In the bodies of loops too. ahead_bytes: the results of collectives that are started ahead may take this many, or
    those of one collective.
    """
    if is_overlapped(program):
        return program
    ids = count(program.next_id)
    if ahead_bytes == inf:
        ahead = partial(overlap, ids=ids)
    else:
        ahead = partial(overlap, ids=ids, ahead=1, ahead_bytes=int(ahead_bytes))

    def overlapped_body(body: Program) -> Program:
        return ahead(delay_outputs(delay_views(body)), body=True)

    ordered = delay_views(delay_updates(change_bodies(program, overlapped_body)))
    return updates_side_by_side(ahead(ordered))


def is_overlapped(program: Program) -> bool:
    """Whether nobody reorders a program any longer.

    One with copies between tiers was in its order before they were written into it, and one that waits for a collective
    is in it.
    """
    return any(is_copy(node) for node in program.nodes) or waits_within(program)
