"""Pipelines: bubbles of named schedules beside published ones, `auto` beside the named ones, and planned bytes beside held ones.

Bubbles: the profiles of Zero Bubble Pipeline Parallelism (2401.10241, table 9) played by `cf.ext.simulate`, against its table 5;
interleaved 1F1B beside the closed form of its sends, too.
`auto`: random costs of four ranks and eight microbatches, within the memory that each named schedule takes: how much faster than the best
named one that fits. Planning: CPU seconds and memory of a process that plans 96 layers on 32 stages. Bytes: GPT-2 of 4 layers on four
simulated ranks, as the plan says and as the ranks hold. Validation: steps in a row that clip by
the joint norm, where ranks wait for it and where they validate in the next step. What is left open: microbatches, cuts
and the order of ranks beside all ways by hand, and what budgets cost. But for planning nothing is timed: seconds are those of the clock.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from typing import Any

import attrs
import torch
from colofunc_plugins.pipeline.local_search import least_s
from colofunc_plugins.pipeline.schedules import interleaved
from transformers import GPT2Config, GPT2LMHeadModel

import colofunc as cf
from bench import Row, Section, fresh, peak_rss_bytes
from colofunc.compiler.observation import arguments_of
from tests.live_bytes import measure

SEARCHED = (0.0433, 0.0039, 0.0026, 0.0029, 0.0022, 0.0010)
"""Bubbles of ZB-2p, which the paper's search found within twice the memory of 1F1B."""
WEIGHT_KEPT = (0.37, 0.5)
"""What waits for W beside what a forward keeps. The table does not say it; 32 of 34 + 5 a s / h is 0.37 for 24 heads, a width of 2304 and
1024 tokens."""
# p, m, F, B, W, communication in ms; bubbles of 1F1B, ZB-H1, ZB-H2.
PAPER = (
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585, 0.1083),
    (8, 32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.1242, 0.0837),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0674, 0.0444),
    (8, 24, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.1323, 0.0698),
    (8, 32, 29.802, 29.428, 19.530, 0.577, 0.1898, 0.1045, 0.0559),
    (8, 64, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0554, 0.0294),
)
INTERLEAVED = ((3, 0.1055), (3, 0.0818), (3, 0.0443), (4, 0.0808), (4, 0.0628), (4, 0.0320))
"""Row by row of the same table: stages a rank of interleaved 1F1B, and its bubble."""
NAMED = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipev")
STAGGERED = ("zb-h2", "auto-span")
"""Schedules whose ranks end one after another."""
VALIDATED = ("1f1b", "zb-h1", "zb-v", *STAGGERED)
PROFILES = 100
RANKS, MICROBATCHES = 4, 8
LAYERS, STAGES = 96, 32
"""Of what is planned."""


def bubbles() -> list[Row]:
    """A row per line of the paper's table."""
    rows = []
    for ranks, microbatches, f, i, w, send, *published in PAPER:
        costs = cf.ext.StageCosts.uniform(ranks, f, i, w, send=send)
        found = []
        for name in ("1f1b", "zb-h1", "zb-h2"):
            found.append(cf.ext.simulate(cf.ext.schedule_named(name).table(ranks, microbatches), costs).bubble)
        worst = max(abs(ours - theirs) for ours, theirs in zip(found, published, strict=True))
        figure = " · ".join(f"{ours:.4f} ({theirs:.4f})" for ours, theirs in zip(found, published, strict=True))
        what = f"bubbles of 1F1B, ZB-H1, ZB-H2 (published), {microbatches} microbatches, F {f} ms"
        rows.append(Row(what, figure, "0.0001 apart", worst < 1e-4))
    return rows


def interleaved_spans(row: tuple[float, ...], chunks: int) -> tuple[float, float]:
    """(the longest span of one rank as played, by the closed form) in ms, of interleaved 1F1B with so many stages a rank.

    The closed form is the work of a rank, the bubble without sends and (2v-1)p-2 sends that a rank waits for.
    """
    ranks, microbatches = int(row[0]), int(row[1])
    f, i, w, send = row[2:6]
    stage = f + i + w
    costs = cf.ext.StageCosts.uniform(chunks * ranks, f / chunks, i / chunks, w / chunks, send=send)
    table = interleaved(chunks).table(ranks, microbatches)
    closed = microbatches * stage + (ranks - 1) * stage / chunks + ((2 * chunks - 1) * ranks - 2) * send
    return max(cf.ext.simulate(table, costs).spans_s), closed


def interleaved_bubbles() -> list[Row]:
    """A row per line of the paper's table."""
    rows = []
    for row, (chunks, published) in zip(PAPER, INTERLEAVED, strict=True):
        _, microbatches, f, i, w, *_ = row
        work = microbatches * (f + i + w)
        ours, closed = (1 - work / span for span in interleaved_spans(row, chunks))
        what = f"bubble of interleaved 1F1B, {chunks} stages a rank (published), {microbatches} microbatches, F {f} ms"
        figure = f"{ours:.4f} ({published:.4f}); {closed:.4f} by (p-1)S/v + ((2v-1)p-2)T_c"
        rows.append(Row(what, figure, "0.0001 apart", abs(ours - published) < 1e-4))
    return rows


def searched() -> list[Row]:
    """A row per line of the paper's table: what `auto-span` finds where the paper searched, and what none can go below."""
    rows = []
    for (ranks, microbatches, f, i, w, send, *_), published in zip(PAPER, SEARCHED, strict=True):
        found = []
        for weight_kept in WEIGHT_KEPT:
            costs = cf.ext.StageCosts.uniform(ranks, f, i, w, send=send, weight_kept=weight_kept)
            table = cf.ext.schedule_named("auto-span").table(ranks, microbatches, costs, cap_bytes=2 * ranks)
            found.append(cf.ext.simulate(table, costs).bubble)
        kept = ", ".join(f"{bubble:.4f} where W keeps {part}" for bubble, part in zip(found, WEIGHT_KEPT, strict=True))
        least = least_s(range(ranks), microbatches, costs, by_span=True)
        bound = (least - microbatches * (f + i + w)) / least
        what = f"bubble of auto-span within 2p, beside ZB-2p as searched, {microbatches} microbatches, F {f} ms"
        target = f"at most as published, where W keeps {WEIGHT_KEPT[0]}"
        rows.append(Row(what, f"{kept} ({published:.4f}; none is below {bound:.4f})", target, found[0] <= published + 5e-5))
    return rows


def costs_of(seed: int) -> cf.ext.StageCosts:
    """Two pieces for each rank, which differ by up to a factor of three, and sends of up to a third of a stage's forward."""
    draw = random.Random(seed)
    pieces = 2 * RANKS

    def some(low: float, high: float) -> tuple[float, ...]:
        return tuple(draw.uniform(low, high) for _ in range(pieces))

    sends = (draw.uniform(0.0, 0.3),) * (pieces - 1)
    return cf.ext.StageCosts(some(0.25, 0.75), some(0.25, 0.75), some(0.1, 0.6), sends, sends, some(0.25, 0.75), some(0.1, 0.25))


def automatic() -> list[Row]:
    """`auto`, whatever its placement, against the best named schedule within the memory of each: a row per named one."""
    gains: dict[str, list[float]] = {name: [] for name in NAMED}
    placements: dict[str, Counter[str]] = {name: Counter() for name in NAMED}
    for seed in range(PROFILES):
        pieces = costs_of(seed)
        played = {}
        for name in NAMED:
            schedule = cf.ext.schedule_named(name)
            played[name] = cf.ext.simulate(schedule.table(RANKS, MICROBATCHES), pieces.joined(2 // schedule.stages_per_rank))
        for name in NAMED:
            cap = max(played[name].peak_bytes)
            best_s = min(each.makespan_s for each in played.values() if max(each.peak_bytes) <= cap * (1 + 1e-9))
            table, costs = cf.ext.placed(cf.ext.schedule_named("auto"), RANKS, MICROBATCHES, pieces, cap)
            gains[name].append(best_s / cf.ext.simulate(table, costs).makespan_s)
            placements[name][_placement(table)] += 1
    rows = []
    for name in NAMED:
        figure = (
            f"{statistics.median(gains[name]):.3f} times as fast in the median, {min(gains[name]):.3f} at least, "
            f"{max(gains[name]):.3f} at most; {', '.join(f'{count} {words}' for words, count in placements[name].most_common())}"
        )
        what = f"auto against the best named schedule within the memory of {name}, {PROFILES} random costs"
        rows.append(Row(what, figure, "never slower", min(gains[name]) >= 1 - 1e-9))
    return rows


def _placement(table: cf.ext.ActionTable) -> str:
    if table.stages == table.ranks:
        return "with one stage a rank"
    return "in a V" if table.rank_of[table.stages - 1] == 0 else "in turn"


def planned(schedule: str, layers: int = LAYERS, ranks: int = STAGES) -> tuple[float, int, str]:
    """(CPU seconds of tracing and planning, peak of the process in bytes, what the plan says of its pipeline)"""
    dropout = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    config = GPT2Config(n_layer=layers, n_embd=1024, n_head=16, vocab_size=2048, n_positions=1024, tie_word_embeddings=False, **dropout)
    model = cf.functional(cf.lazy(lambda: GPT2LMHeadModel(config)))
    step, state = cf.train_step(model, cf.adapt(torch.optim.AdamW, lr=1e-3), clip=1.0)
    ids = cf.abstract((64, 1024), torch.int64)
    mesh = cf.Mesh(pp=ranks, topology=f"{ranks}xa100-80g")
    chain = cf.pipeline(cf.shard(step, mesh), microbatches=64, schedule=schedule)
    start_s = time.process_time()
    low = chain.lower(state, {"input_ids": ids, "labels": ids})
    return time.process_time() - start_s, peak_rss_bytes(), low.plan.pipeline.words


def planning(schedule: str) -> Row:
    """In a process of its own."""
    seconds, peak_bytes, words = fresh("pipelines", f"m.planned({schedule!r})")
    figure = f"{seconds:.1f} CPU s, {peak_bytes / 1e9:.2f} GB: {words}"
    met = seconds < 20 and peak_bytes < 1.5e9
    return Row(f"tracing and planning GPT-2 of {LAYERS} layers on {STAGES} ranks, {schedule}", figure, "under 20 s and 1.5 GB", met)


def gpt2(layers: int, rows: int) -> tuple[Any, Any, Any]:
    """(step, state, batch)"""
    torch.manual_seed(0)
    dropout = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    # A tied weight is on two stages, which globs cannot say.
    config = GPT2Config(n_layer=layers, n_embd=64, n_head=2, vocab_size=512, n_positions=64, tie_word_embeddings=False, **dropout)
    step, state = cf.train_step(cf.functional(GPT2LMHeadModel(config)), cf.adapt(torch.optim.AdamW, lr=1e-3))
    ids = torch.randint(512, (rows, 64))
    return step, state, {"input_ids": ids, "labels": ids}


def budgets() -> list[Row]:
    """What it takes to keep to budgets, with the cuts of the plan without one: values are made again on the ranks that have to."""
    step, state, batch = gpt2(8, 32)
    mesh = cf.Mesh(pp=RANKS, topology="4xa100-80g")
    alone = cf.pipeline(cf.shard(step, mesh), microbatches=MICROBATCHES).lower(state, batch)
    stages = {leaf.name: leaf.at[1][0] for leaf in alone.plan.inputs if leaf.role == "param" and leaf.at}
    free = cf.pipeline(cf.shard(step, mesh), microbatches=MICROBATCHES, stages=stages)
    before = free.lower(state, batch).plan
    rows = []
    for share in (0.9, 0.5, 0.3):
        budget = int(share * before.peak_bytes)
        after = cf.checkpoint(free, budget=budget).lower(state, batch).plan
        again = []
        needless = 0
        for had, has in zip(before.pipeline.ranks, after.pipeline.ranks, strict=True):
            again.append(f"{has.compute_s / had.compute_s - 1:.1%}")
            needless += had.peak_bytes <= budget and has.compute_s > had.compute_s
        figure = f"{after.cost_s / before.cost_s - 1:.1%} slower; ranks compute {', '.join(again)} more"
        what = f"GPT-2 of 8 layers, 4 stages, 1f1b, within {share:g} of the first rank's peak"
        rows.append(Row(what, figure, "nothing again on ranks that fit", needless == 0))
    return rows


def ways() -> Row:
    """`microbatches="auto"` under a budget beside every number of microbatches and every cut of 4 layers in 2 stages by hand."""
    step, state, batch = gpt2(4, 16)
    mesh = cf.Mesh(pp=2)
    free = cf.pipeline(cf.shard(step, mesh), microbatches="auto").lower(state, batch)
    budget = int(0.7 * free.plan.peak_bytes)
    plan = cf.checkpoint(cf.pipeline(cf.shard(step, mesh), microbatches="auto"), budget=budget).lower(state, batch).plan
    seconds = []
    for number in (1, 2, 4, 8, 16):
        for first in (1, 2, 3):
            stages = {f"*.h.{layer}.*": int(layer >= first) for layer in range(4)}
            stages |= {"*.wte.*": 0, "*.wpe.*": 0, "*.ln_f.*": 1, "lm_head.*": 1}
            chain = cf.checkpoint(cf.pipeline(cf.shard(step, mesh), microbatches=number, stages=stages), budget=budget)
            try:
                seconds.append(chain.lower(state, batch).plan.cost_s)
            except cf.PlanError:
                continue
    planned = 1 + sum(other.peak_bytes > 0 for other in plan.others)
    figure = (
        f"{plan.way}: {plan.cost_s / min(seconds):.3f} of the best by hand, {len(seconds)} of 15 fit; "
        f"{planned} of {1 + len(plan.others)} ways were planned"
    )
    what = "auto within 0.7 of its peak, GPT-2 of 4 layers, 2 stages, beside every number of microbatches and every cut by hand"
    return Row(what, figure, "at most 1", plan.cost_s <= min(seconds) * (1 + 1e-9))


def orders() -> Row:
    """Four ranks, the first at a third of the speed: the chosen order beside the mesh's, by schedule."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
    step, state = cf.train_step(
        cf.functional(net), cf.adapt(torch.optim.SGD, lr=0.1), loss=lambda out, x: out.square().mean(), inputs=lambda x: ((x,), {})
    )
    batch = cf.abstract((8192, 512))
    words = []
    worst = 0.0
    as_it_stands = f"{MICROBATCHES} microbatches, cut by time"
    for schedule in ("1f1b", "interleaved-1f1b", "zb-h1", "zb-v"):
        parts = []
        for slow in range(RANKS):
            mesh = cf.Mesh(pp=RANKS, topology=cf.topology("4xa100-80g").with_rank(slow, speed=1 / 3))
            chain = cf.pipeline(cf.shard(step, mesh), microbatches=MICROBATCHES, schedule=schedule)
            plan = chain.lower(state, batch).plan
            # Planned whatever its bound says, so that a bound that is too high shows here.
            beside = chain.with_plan(attrs.evolve(plan, way=as_it_stands)).lower(state, batch).plan if plan.others else plan
            parts.append(plan.cost_s / beside.cost_s)
        worst = max(worst, *parts)
        words.append(f"{schedule} {', '.join(f'{part:.2f}' for part in parts)}")
    what = "step with the chosen order of ranks beside the mesh's, rank 0, 1, 2 or 3 of four a third as fast, 8 equal layers"
    return Row(what, "; ".join(words), "at most 1", worst <= 1 + 1e-9)


def held(schedule: str) -> Row:
    """The peaks that a plan says, of each stage, beside the most that its simulated rank holds."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=4, n_embd=32, n_head=2, vocab_size=64, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    step, state = cf.train_step(cf.functional(GPT2LMHeadModel(config)), cf.adapt(torch.optim.AdamW, lr=1e-3))
    ids = torch.randint(64, (16, 16))
    batch = {"input_ids": ids, "labels": ids}
    chain = cf.pipeline(cf.shard(step, cf.Mesh(pp=RANKS)), microbatches=MICROBATCHES, schedule=schedule)
    low = chain.lower(state, batch)
    given = arguments_of(low, chain.arguments((state, batch)))
    measured = measure(low.program, low.mesh, given.copies(range(len(given.shards)))).peaks_of_ranks(RANKS)
    by_rank = [low.memory(rank).peak_bytes["device"] for rank in range(RANKS)]
    planned_words = " · ".join(f"{nbytes:,}" for nbytes in by_rank)
    held_words = " · ".join(f"{nbytes:,}" for nbytes in measured)
    figure = f"{low.plan.peak_bytes:,} B planned, {max(measured):,} B held; by stage {planned_words} planned, {held_words} held"
    equal = by_rank == measured and low.plan.peak_bytes == max(measured)
    return Row(f"peaks of GPT-2, 4 layers, 4 stages, {schedule}", figure, "equal, of each stage", equal)


def validated(schedule: str) -> Row:
    """A step in a row of steps by the clock: where each waits for the joint norm, and where it is validated in the next one."""
    dropout = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    config = GPT2Config(n_layer=8, n_embd=1024, n_head=16, vocab_size=2048, n_positions=1024, tie_word_embeddings=False, **dropout)
    model = cf.functional(cf.lazy(lambda: GPT2LMHeadModel(config)))
    step, state = cf.train_step(model, cf.adapt(torch.optim.AdamW, lr=1e-3), clip=1.0)
    ids = cf.abstract((64, 1024), torch.int64)
    seconds = []
    peaks = []
    for validate in ("step", "next step"):
        mesh = cf.Mesh(pp=RANKS, topology="4xa100-80g")
        chain = cf.pipeline(cf.shard(step, mesh), microbatches=16, schedule=schedule, validate=validate)
        low = chain.lower(state, {"input_ids": ids, "labels": ids})
        seconds.append(low.period_s())
        peaks.append(low.memory().peak_bytes["device"])
    waits_s, validates_s = seconds
    more = f"{validates_s / waits_s - 1:+.2%}"
    figure = f"{waits_s * 1e3:.1f} and {validates_s * 1e3:.1f} ms a step ({more}); copies {peaks[1] - peaks[0]:,} B"
    what = f"a step in a row, {schedule}, GPT-2 of 8 layers of 1024, 16 microbatches, clipped: validated in the step and in the next one"
    staggered = schedule in STAGGERED
    return Row(what, figure, "faster" if staggered else "", validates_s < waits_s if staggered else None)


def bench() -> Section:
    schedules = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "auto")
    rows = [*bubbles(), *interleaved_bubbles(), *searched(), *automatic(), *map(planning, ("1f1b", "auto"))]
    rows += [*map(held, schedules), *map(validated, VALIDATED), *budgets(), ways(), orders()]
    setting = f"simulated from costs, and on a simulated mesh of 4 CPU ranks; torch {torch.__version__}"
    return Section("Pipelines", setting, tuple(rows))
