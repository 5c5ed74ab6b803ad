"""Pipelines: bubbles of named schedules beside published ones, `auto` beside the named ones, and planned bytes beside held ones.

Bubbles: the profiles of Zero Bubble Pipeline Parallelism (2401.10241, table 9) played by `cf.ext.simulate`, against its table 5.
`auto`: random costs of four stages and eight microbatches, within the memory that 1F1B takes: how much faster than the best named
schedule. Bytes: GPT-2 of 4 layers on four simulated ranks, as the plan says and as the ranks hold. Nothing is timed.
"""

from __future__ import annotations

import random
import statistics

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import colofunc as cf
from bench import Row, Section
from colofunc.compiler.observation import arguments_of
from colofunc.executors.measure import measure

SEARCHED = (0.0433, 0.0039, 0.0026, 0.0029, 0.0022, 0.0010)
"""Bubbles of ZB-2p, which the paper's search found within twice the memory of 1F1B."""
WEIGHT_KEPT = (0.37, 0.5)
"""What waits for W beside what a forward keeps. The table does not say it; 32 of 34 + 5 a s / h is 0.37 for 24 heads, a width of 2304 and
1024 tokens."""
# p, m, F, B, W, communication in ms; bubbles of 1F1B, interleaved (v chunks), ZB-H1, ZB-H2.
PAPER = (
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585, 0.1083),
    (8, 32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.1242, 0.0837),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0674, 0.0444),
    (8, 24, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.1323, 0.0698),
    (8, 32, 29.802, 29.428, 19.530, 0.577, 0.1898, 0.1045, 0.0559),
    (8, 64, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0554, 0.0294),
)
NAMED = ("gpipe", "1f1b", "zb-h1", "zb-h2")
PROFILES = 100
RANKS, MICROBATCHES = 4, 8


def bubbles() -> list[Row]:
    """A row per line of the paper's table."""
    rows = []
    for ranks, microbatches, f, i, w, send, *published in PAPER:
        costs = cf.ext.StageCosts.uniform(ranks, f, i, w, send=send)
        found = []
        for name in ("1f1b", "zb-h1", "zb-h2"):
            found.append(cf.ext.simulate(cf.ext.schedule(name).table(ranks, microbatches), costs).bubble)
        worst = max(abs(ours - theirs) for ours, theirs in zip(found, published, strict=True))
        figure = " · ".join(f"{ours:.4f} ({theirs:.4f})" for ours, theirs in zip(found, published, strict=True))
        what = f"bubbles of 1F1B, ZB-H1, ZB-H2 (published), {microbatches} microbatches, F {f} ms"
        rows.append(Row(what, figure, "0.0001 apart", worst < 1e-4))
    return rows


def searched() -> list[Row]:
    """A row per line of the paper's table: what `auto-span` finds where the paper searched."""
    rows = []
    for (ranks, microbatches, f, i, w, send, *_), published in zip(PAPER, SEARCHED, strict=True):
        found = []
        for weight_kept in WEIGHT_KEPT:
            costs = cf.ext.StageCosts.uniform(ranks, f, i, w, send=send, weight_kept=weight_kept)
            table = cf.ext.schedule("auto-span").table(ranks, microbatches, costs, cap_bytes=2 * ranks)
            found.append(cf.ext.simulate(table, costs).bubble)
        kept = ", ".join(f"{bubble:.4f} where W keeps {part}" for bubble, part in zip(found, WEIGHT_KEPT, strict=True))
        what = f"bubble of auto-span within 2p, beside ZB-2p as searched, {microbatches} microbatches, F {f} ms"
        target = f"at most as published, where W keeps {WEIGHT_KEPT[0]}"
        rows.append(Row(what, f"{kept} ({published:.4f})", target, found[0] <= published + 5e-5))
    return rows


def costs_of(seed: int) -> cf.ext.StageCosts:
    """Stages that differ by up to a factor of three, and sends of up to a third of a forward."""
    draw = random.Random(seed)

    def some(low: float, high: float, count: int = RANKS) -> tuple[float, ...]:
        return tuple(draw.uniform(low, high) for _ in range(count))

    send = draw.uniform(0.0, 0.3)
    return cf.ext.StageCosts(
        some(0.5, 1.5), some(0.5, 1.5), some(0.2, 1.2), (send,) * (RANKS - 1), (send,) * (RANKS - 1), some(0.5, 1.5), some(0.2, 0.5)
    )


def automatic() -> Row:
    """`auto` against the best named schedule, within the memory that 1F1B takes."""
    gains = []
    for seed in range(PROFILES):
        costs = costs_of(seed)
        played = {name: cf.ext.simulate(cf.ext.schedule(name).table(RANKS, MICROBATCHES), costs) for name in NAMED}
        cap = max(played["1f1b"].peak_bytes)
        best_s = min(each.makespan_s for each in played.values() if max(each.peak_bytes) <= cap * (1 + 1e-9))
        ours_s = cf.ext.simulate(cf.ext.schedule("auto").table(RANKS, MICROBATCHES, costs, cap), costs).makespan_s
        gains.append(best_s / ours_s)
    figure = f"{statistics.median(gains):.3f} times as fast in the median, {min(gains):.3f} at least, {max(gains):.3f} at most"
    what = f"auto against the best of {', '.join(NAMED)} within 1F1B's memory, {PROFILES} random costs"
    return Row(what, figure, "never slower", min(gains) >= 1 - 1e-9)


def held(schedule: str) -> Row:
    """The peak that a plan says beside the most that a simulated rank holds."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=4, n_embd=32, n_head=2, vocab_size=64, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    step, state = cf.train_step(cf.functional(GPT2LMHeadModel(config)), cf.adapt(torch.optim.AdamW, lr=1e-3))
    ids = torch.randint(64, (16, 16))
    batch = {"input_ids": ids, "labels": ids}
    chain = cf.pipeline(cf.shard(step, cf.Mesh(pp=RANKS)), microbatches=MICROBATCHES, schedule=schedule)
    low = chain.lower(state, batch)
    given = arguments_of(low, chain.arguments((state, batch)))
    measured = measure(low.program, low.mesh, given.copies(range(len(given.shards)))).peak_bytes["device"]
    each = " · ".join(f"{low.memory(rank).peak_bytes['device']:,}" for rank in range(RANKS))
    figure = f"{low.plan.peak_bytes:,} B planned, {measured:,} B held; by stage {each}"
    return Row(f"peak of GPT-2, 4 layers, 4 stages, {schedule}", figure, "equal", low.plan.peak_bytes == measured)


def bench() -> Section:
    schedules = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "auto")
    rows = [*bubbles(), *searched(), automatic(), *map(held, schedules)]
    setting = f"simulated from costs, and on a simulated mesh of 4 CPU ranks; torch {torch.__version__}"
    return Section("Pipelines", setting, tuple(rows))
