"""What the clock itself costs: CPU microseconds a node to play a planned program (`colofunc.program.lanes`), with the copies of its
changes of layout (`colofunc.program.layout_copies`).

A search plays hundreds of programs that share most of their nodes, and every plan is chosen by what it finds, so it has to be quick. GPT-2
small on four cards and four layers of LLaMA-3 8B on 64, the programs of `python -m bench planning`. `again`: of nodes that were played in
another program before, as in a search; `anew`: of copies of them, of which nothing is known but what like calls take.
The quickest of many plays counts: other work of the machine only adds.
"""

from __future__ import annotations

import time

import attrs
import torch
from colofunc_plugins import tensor, zero

import colofunc as cf
from bench import Row, Section
from bench.planning import LLAMAS, module_of
from colofunc.compiler.lowered import Lowered
from colofunc.program.ir import Program
from colofunc.program.lanes import lanes
from colofunc.program.layout_copies import with_copies

PLAYS = 15
MOST_US = 5.0
MESHES = {"gpt2": dict(dp=2, tp=2), "4 of its layers on 64 ranks": LLAMAS["4 of its layers on 64 ranks"][-1]}


def lowered(name: str) -> Lowered:
    model, opt = cf.functional(module_of(name)), cf.adapt(torch.optim.AdamW, lr=1e-4)
    step_fn, _ = cf.train_step(model, opt)
    state = {"params": model.params, "buffers": model.buffers, "opt": opt.init(model.params)}
    ids = cf.abstract((8, 1024), torch.int64)
    step = cf.shard(step_fn, cf.Mesh(**MESHES[name], topology="8xh100-80g"), zero(3, "dp"), tensor("1d", "tp"))
    return step.lower(state, {"input_ids": ids, "labels": ids})


def play_us(low: Lowered, is_anew: bool) -> float:
    """CPU microseconds a node of one play."""
    found = []
    for _ in range(PLAYS):
        program = low.program.with_nodes(attrs.evolve(node) if is_anew else node for node in low.program.nodes)
        began_s = time.process_time()
        lanes(with_copies(program, low.mesh), low.mesh, low.registry.rule)
        found.append(time.process_time() - began_s)
    return 1e6 * min(found) / nodes_of(low.program)


def nodes_of(program: Program) -> int:
    return sum(len(each.nodes) for each in program.with_bodies())


def bench() -> Section:
    rows = []
    for name in MESHES:
        low = lowered(name)
        for what, is_anew in (("again", False), ("anew", True)):
            each_us = play_us(low, is_anew)
            about = f"{'llama-3 8b, ' if name in LLAMAS else ''}{name}, {nodes_of(low.program):,} nodes, {what}"
            rows.append(Row(about, f"{each_us:.1f} us a node", f"at most {MOST_US:g} us", each_us <= MOST_US))
    return Section("The clock's own time", "CPU time of one play of a planned program, the quickest of 15", rows)
