"""Completion: from what was decided to the program that one rank runs, finished and counted.

    lower -> passes -> alternatives -> kernels -> searches
        -> early_shards, cut, reduce_early, delay_views, pack, in_place -> moves -> narrow_updates, squares, one_call

Problem: whether a sharding fits, and how long it takes, is known only once its program is finished: collectives packed,
values made again, copies written, everything counted. Idea: one record has all that happens to a program once its plan
is made, so that whoever looks for a plan (`budget`) finishes as many as it likes, and what runs is what was counted.
Transforms have their say in three places (`transform.Build`): alternatives, of which the fastest that fits is taken;
searches, which make values again; moves, which write copies.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from math import inf
from typing import Protocol

import attrs

from colofunc.compiler.decisions import Decisions
from colofunc.compiler.kept_programs import KeptPrograms, PackedProgram, WrittenSharding
from colofunc.compiler.passes import Pass, PassOutput, PassOutputs, run_passes
from colofunc.compiler.terms import spent
from colofunc.compiler.transform import InputTiers, Move, Rewrite, Search
from colofunc.errors import PlanError
from colofunc.mesh import Mesh
from colofunc.planner.candidate import Finish, FinishedProgram, Finishing
from colofunc.planner.offload.choice import Hint
from colofunc.planner.offload.fastest import Offloaded
from colofunc.planner.plan import Plan
from colofunc.planner.plan_terms import TermSeconds
from colofunc.planner.stages.report import CutsOf, Pipelined, pipeline_loop, pipelined
from colofunc.program.check import Checker
from colofunc.program.cost import NodeSeconds, RuleOf, seconds_on
from colofunc.program.facts import is_copy
from colofunc.program.ir import Loop, Node, Program, Value, kept_with
from colofunc.program.lanes import Lanes, played
from colofunc.program.lower import lower
from colofunc.program.memory import memory
from colofunc.program.memory_report import MemoryReport
from colofunc.program.passes.buckets import BucketLimit, buckets
from colofunc.program.passes.chunks import chunked
from colofunc.program.passes.coalesce import delay_views, reduce_early
from colofunc.program.passes.cut import cut, to_be_cut
from colofunc.program.passes.early_shards import early_shards
from colofunc.program.passes.inplace import in_place
from colofunc.program.passes.messages import scalars_in_one_message
from colofunc.program.passes.narrow_gradients import narrow_updates
from colofunc.program.passes.one_call import is_small_update, updates_in_one_call
from colofunc.program.passes.squares import squares_in_one_pass
from colofunc.program.passes.stage_sums import sums_within_stages
from colofunc.program.places import distinct_ranks, same_as
from colofunc.program.placing import Placing
from colofunc.program.timed import Timed
from colofunc.program.tracing.trace import record_local
from colofunc.spec.layout import At

SHARE = 32
"""Under a budget, a bucket of collectives may use at most 1/SHARE of it, until a plan is found that fits."""
TWICE_NODES = 400
"""Programs of at most so many nodes are finished once more under a budget, with buckets that it does not limit."""
AS_IT_IS: Sequence[Rewrite] = (lambda program, _: program,)
NOWHERE = InputTiers({}, {})


class Count(Protocol):
    """The accountant. rank: None for the one that holds most."""

    def __call__(self, program: Program, *, rank: int | None = None) -> MemoryReport: ...


@attrs.frozen(eq=False)
class Completion:
    """What happens to a program once its plan is made.

    `passes`: behind lowering, of plugins and transforms. `ways`: what comes behind them, the fastest first where there
    are several. `kernels`: settles which kernels calls get. `chunks`: input position -> elements of the chunks that it
    lies in. `temporaries`: whether they are written over. `count`: the accountant of the executor that will run it.
    `searches`, `moves`: of transforms; moves get the program as `before_moves` orders it, with so many bytes gathered
    ahead, and where inputs lie. `order`: in which that executor runs a program, in which it is counted. `as_run`: what
    was chosen in its very order. `clocked`: a program with the seconds that this executor's own kernels take. `timed`:
    how long operators take, where that was measured. `wider`: what to write where policies forbid what needs less
    memory. `left_out`: names of passes. `placing`: where inputs, nodes and outputs are, if not everywhere.
    `room_bytes`: what a rank may hold, the one that may hold most. `cuts_of`: what there is to say of a pipeline's
    cuts. `keeps`: whether the program behind each pass is kept (`FinishedProgram.stages`). `small_buckets`: whether a
    budget says how large buckets may be. `late_moves`: whether copies are looked for behind the searches alone.
    """

    program: Program
    mesh: Mesh
    rule_of: RuleOf
    passes: Sequence[Pass]
    chunks: Mapping[int, int | str]
    temporaries: bool
    count: Count
    searches: Sequence[Search] = ()
    moves: Sequence[Move] = ()
    lies: InputTiers = NOWHERE
    order: Callable[[Program, float], Program] = lambda program, _: program
    before_moves: Callable[[Program, float], Program] = lambda program, _: program
    as_run: Callable[[Program], Program] = lambda program: program
    clocked: Callable[[Program], Program] = lambda program: program
    ways: Sequence[Rewrite] = AS_IT_IS
    kernels: Callable[[Program], Program] = lambda program: program
    timed: Timed | None = None
    wider: Sequence[str] = ()
    left_out: frozenset[str] = frozenset()
    placing: Placing | None = None
    room_bytes: int | None = None
    cuts_of: CutsOf | None = None
    keeps: bool = False
    small_buckets: bool = True
    late_moves: bool = False
    known: dict[int, tuple[Node, tuple[int, ...], tuple[Value, ...], float]] = attrs.field(factory=dict, init=False)
    kept: KeptPrograms = attrs.field(factory=KeptPrograms)
    check: Checker = attrs.field(init=False, default=attrs.Factory(lambda self: Checker(self.mesh), takes_self=True))

    def finish(self, decided: Decisions, budget_bytes: int | None, below_s: float = inf) -> FinishedProgram:
        """The program that runs, as decided, in the fastest way that fits.

        Its peak is counted only where somebody asks.

        below_s: of what takes as many seconds more because of the budget nothing needs to be found.
        """
        written = self.kept.written(decided, partial(self._lowered, decided))
        best = self._best(written, budget_bytes, below_s)
        if not self.keeps:
            return best
        return attrs.evolve(best, stages=(*written.stages, *best.stages))

    def finish_best(
        self, decided: Decisions, budget_bytes: int | None, small: FinishedProgram | None = None
    ) -> FinishedProgram:
        """As `finish`, or in buckets that the budget does not limit, where that fits and ends sooner. small: what
        `finish` gave, where it was asked before.
        """
        if budget_bytes is None or not self.has_two_buckets:
            return small or self.finish(decided, budget_bytes)
        large = attrs.evolve(self, small_buckets=False, late_moves=True).finish(decided, budget_bytes)
        if self.moves and large.fits(budget_bytes):
            large = self._with_moves(large, budget_bytes, inf)
        if large.fits(budget_bytes) and large.more_s <= large.asked_s:
            return large
        small = small or self.finish(decided, budget_bytes)
        is_better = large.fits(budget_bytes) and (not small.fits(budget_bytes) or self.end_s(large) < self.end_s(small))
        return large if is_better else small

    def _best(self, written: WrittenSharding, budget_bytes: int | None, below_s: float) -> FinishedProgram:
        first = written.by(self.ways[0], self._written)
        if to_be_cut(first[0]):
            return self._best_order(written, first, budget_bytes)
        best = self._searched(first, budget_bytes, below_s)
        if budget_bytes is None or (best.fits(budget_bytes) and best.more_s <= 0):
            return best
        for slower_s, guess, other in self._guessed(written, first, budget_bytes, best):
            if _rank(budget_bytes, guess, slower_s) < _rank(budget_bytes, best) or not best.fits(budget_bytes):
                found = self._searched(other, budget_bytes, below_s - slower_s)
                found = attrs.evolve(found, more_s=found.more_s + slower_s)
                best = min(best, found, key=partial(_rank, budget_bytes))
        return best

    def _best_order(
        self, written: WrittenSharding, first: tuple[Program, PassOutputs], budget_bytes: int | None
    ) -> FinishedProgram:
        """Of all orders of a pipeline, by the clock on what was finished: its ranks work side by side, so that no sum
        over what is done more says how long it takes.
        """
        if budget_bytes is None:
            finished = [self._searched(way, None, inf) for way in (first, *self._others(written, first))]
            return finished[0] if len(finished) == 1 else min(finished, key=self.end_s)
        best = self._by_clock(self._searched(first, budget_bytes, inf), first[0])
        for slower_s, guess, other in self._guessed(written, first, budget_bytes, best):
            # One that does not fit as it is may do so with little made again.
            if guess.fits(budget_bytes) or slower_s < best.more_s or not best.fits(budget_bytes):
                found = self._by_clock(self._searched(other, budget_bytes, inf), first[0])
                best = min(best, found, key=partial(_rank, budget_bytes))
        return best

    def _guessed(
        self, written: WrittenSharding, first: tuple[Program, PassOutputs], budget_bytes: int, best: FinishedProgram
    ) -> list[tuple[float, FinishedProgram, tuple[Program, PassOutputs]]]:
        """(seconds more than the first, counted as it is, the way) of all other ways, the most hopeful first."""
        guesses = []
        for other in self._others(written, first):
            guess = self._counted(budget_bytes, other[0], best)
            guesses.append((self._seconds(other[0]) - self._seconds(first[0]), guess, other))
        return sorted(guesses, key=lambda each: _rank(budget_bytes, each[1], each[0]))

    def _by_clock(self, done: FinishedProgram, plain: Program) -> FinishedProgram:
        """`done` with what it takes longer by the clock than `plain` before it was finished."""
        return attrs.evolve(done, more_s=self.end_s(done) - self._seconds(plain))

    def _others(
        self, written: WrittenSharding, first: tuple[Program, PassOutputs]
    ) -> list[tuple[Program, PassOutputs]]:
        """All ways but the first that change something."""
        others = {_looks(other[0]): other for other in self._rest(written)}
        others.pop(_looks(first[0]), None)
        return list(others.values())

    def _rest(self, written: WrittenSharding) -> Iterator[tuple[Program, PassOutputs]]:
        """All ways but the first that can be gone."""
        if self.mesh.size == 1:
            return
        for way in self.ways[1:]:
            try:
                yield written.by(way, self._written)
            except PlanError:
                continue  # the first one stands

    def _written(self, lowered: Program, way: Rewrite) -> tuple[Program, PassOutputs]:
        """One rank's program, written in one way."""
        alternatives = Pass("alternatives", lambda program: way(program, self.mesh), optional=False)
        passes = alternatives, Pass("kernels", self.kernels)
        return run_passes(map(self._checked, passes), lowered, self.left_out, self.keeps)

    def _checked(self, each: Pass) -> Pass:
        """A pass, and behind it a check that what it gives is a program."""

        def run(program: Program) -> Program:
            program = each.run(program)
            self.check(program)
            return program

        return attrs.evolve(each, run=run)

    def _searched(
        self, written: tuple[Program, PassOutputs], budget_bytes: int | None, below_s: float
    ) -> FinishedProgram:
        """Completed in the order that the searches find, the first of them next to the program itself."""
        local, stages = written
        finish: Finish = partial(self._counted, budget_bytes)
        for search in self.searches:
            outermost = search is self.searches[-1]  # which knows what all of them cost
            finishing = Finishing(finish, below_s if outermost else inf)
            finish = partial(_found_by, search, self._search_s, finishing, budget_bytes)
        began = time.perf_counter()
        best = finish(local)
        if not self.keeps:
            return best
        looked_s = time.perf_counter() - began - sum(stage.took_s for stage in best.stages)
        here = [attrs.evolve(stage, took_s=looked_s) if stage.name == "searches" else stage for stage in best.stages]
        return attrs.evolve(best, stages=(*stages, *here))

    def _seconds(self, local: Program) -> float:
        if to_be_cut(local):
            return self.lanes(cut(local)).end_s
        return sum(self._node_s(node, local.values) for node in local.nodes)

    @property
    def gives_way(self) -> bool:
        """Whether a program that is too large may be made to fit."""
        return bool(self.searches or self.moves)

    @property
    def has_two_buckets(self) -> bool:
        """Whether a program is finished in buckets that a budget limits, and in others. Looking for copies at every
        step of a search takes too long to be done twice: in the others it is done once, of what fits without any.
        """
        return bool(self.searches) and len(self.program.nodes) <= TWICE_NODES and self.mesh.size > 1

    @property
    def follows_policies(self) -> bool:
        """Whether what is made again was all asked for, and nothing is copied: then no budget changes what is done."""
        return 0 < len(self.searches) == len(self.wider) and not self.moves

    def _node_s(self, node: Node, values: Mapping[int, Value]) -> float:
        """Orders of the same work have most of their nodes in common, so those that came by are `known`, with what they
        read and make.
        """
        took = self.known.get(id(node))
        if took is not None and took[0] is node and tuple(map(values.__getitem__, took[1])) == took[2]:
            return took[3]
        model = seconds_on(self.mesh, self.rule_of)
        seconds = model(node, values) if self.timed is None else self.timed.node_s(node, values, model)
        ids = (*node.refs, *node.results)
        self.known[id(node)] = node, ids, tuple(map(values.__getitem__, ids)), seconds
        return seconds

    def _search_s(self, node: Node, values: Mapping[int, Value]) -> float:
        """Of a small update without its launch: such are called at once in the end."""
        seconds = self._node_s(node, values)
        if not is_small_update(node, values):
            return seconds
        return max(0.0, seconds - self.mesh.topology.device.launch_s)

    def _lowered(self, decided: Decisions) -> tuple[Program, PassOutputs]:
        ins, outs, regather = decided.input_layouts, decided.output_layouts, decided.regather

        def lowered(program: Program) -> Program:
            return lower(program, decided.choices, ins, outs, self.mesh, record_local, regather, placing=self.placing)

        passes = Pass("lower", lowered, optional=False), *self.passes
        return run_passes(map(self._checked, passes), self.program, self.left_out, self.keeps)

    def _completed(self, local: Program, bucket_bytes: float) -> PackedProgram:
        """Behind all passes but those that write copies."""
        return self.kept.packed(local, bucket_bytes, partial(self._packed, local))

    def _packed(self, local: Program, most: BucketLimit) -> tuple[Program, PassOutputs]:
        chunks = {local.inputs[position]: size for position, size in self.chunks.items()}

        def packed(program: Program) -> Program:
            program, apart = chunked(program, chunks)
            return buckets(program, self.mesh, apart, most)

        is_cut = to_be_cut(local)
        passes = [Pass("early_shards", early_shards)]
        if is_cut:
            passes.append(Pass("cut", cut, optional=False))
        passes += [Pass("reduce_early", reduce_early), Pass("delay_views", delay_views)]
        if is_cut:
            passes.append(Pass("stage_sums", sums_within_stages, optional=False))
        passes += [
            Pass("pack", packed),
            Pass("messages", scalars_in_one_message),
            Pass("in_place", partial(in_place, temporaries=self.temporaries, every_state=bool(self.moves))),
        ]
        return run_passes(passes, local, self.left_out, self.keeps)

    def _counted(
        self, budget_bytes: int | None, local: Program, like: FinishedProgram | None = None, moves: bool = True
    ) -> FinishedProgram:
        piece = inf
        if budget_bytes is not None and self.gives_way and self.small_buckets:
            piece = budget_bytes / SHARE
        if like is not None and isinstance(like.hint, Hint) and len(self.moves) == 1 and budget_bytes is not None:
            near = self._moved(self.before_moves(self._completed(local, piece).program, piece), budget_bytes, like.hint)
            return FinishedProgram(local, budget_bytes + near.over, near.exposed_s, (), near.short, near.hint)
        self.check(local)
        packed = self._completed(local, piece)
        done, stages = packed.program, packed.stages
        if self.keeps and self.searches:
            stages = (PassOutput("searches", local, 0.0), *stages)
        if not self.moves or not moves or self.late_moves:
            uncounted = budget_bytes is None and not self.searches
            peaks = {} if uncounted else packed.counted(self._peaks)
            return FinishedProgram(done, max(peaks.values(), default=0), 0.0, peaks=_by_place(peaks), stages=stages)
        return self._with_moves(FinishedProgram(done, 0, 0.0, stages=stages), budget_bytes, piece)

    def _with_moves(self, done: FinishedProgram, budget_bytes: int | None, piece: float) -> FinishedProgram:
        """What was finished without a look at copies, with those that the moves write: none, where they are free to."""
        began = time.perf_counter()
        moved = self._moved(self.before_moves(done.program, piece), budget_bytes)
        self.check(moved.program)
        stages = done.stages
        if self.keeps:
            stages = (*stages, PassOutput("moves", moved.program, time.perf_counter() - began))
        peaks = self._peaks(moved.program)
        return attrs.evolve(
            done,
            program=moved.program,
            peak_bytes=max(peaks.values()),
            more_s=done.more_s + moved.exposed_s,
            words=(*done.words, *moved.words),
            short=moved.short,
            hint=moved.hint,
            peaks=_by_place(peaks),
            stages=stages,
        )

    def _has_room(self, moved: Program, program: Program) -> bool:
        """Whether a compiled program of which longer functions are made, which hold their operands and results to their
        end, still fits.
        """
        if moved is program or self.room_bytes is None:
            return True
        return self.count(moved).peak_bytes["device"] <= max(self.room_bytes, self.count(program).peak_bytes["device"])

    def _moved(self, done: Program, budget_bytes: int | None, like: Hint | None = None) -> Offloaded:
        """With the copies of all that write some, one behind the other."""
        moved = [self.moves[0](done, self.mesh, self._search_s, budget_bytes, self.lies, like=like)]
        for move in self.moves[1:]:
            moved.append(move(moved[-1].program, self.mesh, self._search_s, budget_bytes, self.lies))
        if len(moved) == 1:
            return moved[0]
        words = tuple(word for one in moved for word in one.words)
        short = next((one.short for one in moved if one.short), "")
        return attrs.evolve(moved[-1], words=words, short=short)

    def ended(self, done: FinishedProgram) -> Program:
        """What runs of a program that was chosen."""
        self.kept.clear()
        program, _ = run_passes(self.last_passes(), done.program, self.left_out)
        return self.as_run(program)

    def last_passes(self) -> tuple[Pass, ...]:
        """Of a program that was chosen: updates that read narrow gradients, squares that are summed in one pass, and
        updates side by side, each where that holds no more and takes no longer.
        """
        return (
            Pass("narrow_updates", partial(self._if_no_larger, narrow_updates)),
            Pass("squares", partial(self._if_no_larger, squares_in_one_pass)),
            Pass("one_call", self._one_call),
        )

    def _one_call(self, program: Program) -> Program:
        """Updates side by side in one call.

        They are not compiled, and one between two operators would keep a compiler from fusing these. But one may fill
        the time until a copy has come, so where there are copies the clock decides. Of a compiled step operators as
        they are written are asked, and then whether longer functions still fit.
        """
        moved = updates_in_one_call(program, self.count if self.temporaries else memory)
        if not self.temporaries and not self._has_room(moved, program):
            return program
        if moved is program or not any(map(is_copy, program.nodes)):
            return moved
        return moved if self.lanes(moved).end_s <= self.lanes(program).end_s else program

    def _if_no_larger(self, rewrite: Callable[[Program, Mesh], Program], program: Program) -> Program:
        """What `rewrite` makes of a program, where that holds no more."""
        rewritten = rewrite(program, self.mesh)
        if rewritten is program:
            return program
        before, after = self.count(program).peak_bytes, self.count(rewritten).peak_bytes
        if any(after.get(tier, 0) > peak_bytes for tier, peak_bytes in before.items()):
            return program
        return rewritten

    def lanes(self, done: Program) -> Lanes:
        """How long what is done takes, in the order in which the executor runs it."""
        return played(self.clocked(self.order(done, inf)), self.mesh, self._node_s)

    def spent(self, done: Program, lanes: Lanes, plan: Plan) -> tuple[TermSeconds, ...]:
        """Which terms those seconds are made of. lanes: what `self.lanes(done)` gives."""
        return spent(self.clocked(self.order(done, inf)), lanes, self.mesh, self.rule_of, plan)

    def end_s(self, done: FinishedProgram) -> float:
        """Seconds of a finished step by the clock."""
        return self.lanes(done.program).end_s

    def pipelined(self, done: Program) -> Pipelined | None:
        """What the plan says of a pipeline that runs as `done`."""
        return pipelined(self.clocked(done), self.mesh, self._node_s, partial(self._peak_bytes, done), self.cuts_of)

    def _peak_bytes(self, done: Program, rank: int) -> int:
        """What a rank holds on its device.

        Kept, as a budget asks for it and what the plan says of a pipeline does again.
        """
        return kept_with(done, (self.count, rank), lambda: self.count(done, rank=rank).peak_bytes["device"])

    def _peaks(self, done: Program) -> dict[At | None, int]:
        """Bytes by where ranks are on the axis of a pipeline; None: without one, of the rank that has least left.

        Where ranks differ, what one lacks to the roomiest counts as if it were taken.
        """
        loop = pipeline_loop(done)
        differ = bool(self.mesh.topology.ranks) and self.room_bytes is not None
        if not differ and loop is None:
            return {None: self.count(done).peak_bytes["device"]}
        lacks = dict.fromkeys(distinct_ranks(done, self.mesh), 0)
        if differ:
            for rank in range(self.mesh.size):
                capacity_bytes, like = self.mesh.device_bytes(rank), same_as(rank, done, self.mesh)
                if capacity_bytes is not None and self.room_bytes is not None:
                    lacks[like] = max(lacks[like], self.room_bytes - capacity_bytes)
        peaks: dict[At | None, int] = {}
        for rank, lacking in lacks.items():
            place = self._place(loop, rank)
            held_bytes = self._peak_bytes(done, rank) + lacking
            peaks[place] = max(peaks.get(place, 0), held_bytes)
        return peaks

    def _place(self, loop: Loop | None, rank: int) -> At | None:
        if loop is None or loop.cut_by is None:
            return None
        axis = loop.cut_by.along
        return axis, (self.mesh.index(rank, (axis,)),)


def _by_place(peaks: Mapping[At | None, int]) -> dict[At, int]:
    """Those of the ranks of a pipeline."""
    return {place: peak_bytes for place, peak_bytes in peaks.items() if place is not None}


def _found_by(
    search: Search,
    node_s: NodeSeconds,
    finish: Finishing,
    budget_bytes: int | None,
    local: Program,
    like: FinishedProgram | None = None,
    /,
    moves: bool = True,
) -> FinishedProgram:
    """What a search finds, for one that stands around it."""
    fitted, leanest = search(local, node_s, finish, budget_bytes)
    return fitted or leanest


def ways_of(alternatives: Sequence[Sequence[Rewrite]]) -> Sequence[Rewrite]:
    """All ways to write a program, by what several transforms offer: the fastest of each first."""
    return [partial(_one_by_one, rewrites) for rewrites in product(*alternatives)] if alternatives else AS_IT_IS


def _one_by_one(rewrites: Sequence[Rewrite], program: Program, mesh: Mesh) -> Program:
    for rewrite in rewrites:
        program = rewrite(program, mesh)
    return program


def _rank(budget_bytes: int, done: FinishedProgram, slower_s: float = 0.0) -> tuple[bool, float]:
    if done.fits(budget_bytes):
        return False, done.more_s + slower_s
    return True, done.peak_bytes


def _looks(local: Program) -> tuple[object, ...]:
    """The operators outside of loops, and those in each, with the order in which ranks do them."""
    found: list[object] = []
    for node in local.nodes:
        if node.loop is None:
            found.append(node.target)
        else:
            timetable = node.loop.timetable
            found.append((_looks(node.loop.body), None if timetable is None else timetable.table))
    return tuple(found)
