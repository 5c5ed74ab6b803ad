"""Slice 3: what the host does in a step: where it waits for the card, and how long a node, a leaf and a collective take it."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from colofunc_plugins import experts, ring, zero

import colofunc as cf
from bench import Row
from bench.gpu.measuring import eager, host_seconds, ids, ours, profiled_waits, staged_run, training, waits
from bench.gpu.models import Llama, Mixture, Opt
from bench.gpu.parts import Part, Setup, Slice, at_most, not_run

Wrap = Callable[[Any], Any]


def on_card(*plans: Any, **axes: int) -> Wrap:
    return lambda fn: cf.shard(fn, cf.Mesh(**axes, device="cuda"), *plans)


def kept_on_host(update: str) -> cf.ext.MemoryPolicy:
    """All state in memory of the host."""
    return cf.ext.MemoryPolicy("host", lambda states, room: ["host"] * len(states), update, activations=False)


UPDATED_ON_HOST = "all state and updates on the host"
"""There the host waits for each gradient that it computes with."""
WAYS = (
    "a LLaMA", "dropout", "all state on the host", UPDATED_ON_HOST, "microbatches", "ZeRO-3 on two simulated ranks",
    "a ring of two simulated ranks", "experts", "experts on two simulated ranks",
)  # fmt: skip


def way(name: str, setup: Setup) -> tuple[Callable[[], torch.nn.Module], Wrap]:
    """(module, how its training step is staged)."""
    of, dtype = setup.sizes.narrow, setup.sizes.dtype
    one, two = on_card(), on_card(zero(3, "dp"), dp=2)

    def llama() -> torch.nn.Module:
        return Llama(of.shape, dtype)

    def mixture() -> torch.nn.Module:
        return Mixture(of.shape, dtype)

    every: dict[str, tuple[Callable[[], torch.nn.Module], Wrap]] = {
        "a LLaMA": (llama, one),
        "dropout": (lambda: Opt(of.shape, dtype, of.length, 0.1), one),
        "all state on the host": (llama, lambda fn: cf.offload(one(fn), policy=kept_on_host("device"))),
        UPDATED_ON_HOST: (llama, lambda fn: cf.offload(one(fn), policy=kept_on_host("host"))),
        "microbatches": (llama, lambda fn: cf.accumulate(one(fn), 2)),
        "ZeRO-3 on two simulated ranks": (llama, two),
        "a ring of two simulated ranks": (llama, on_card(ring("cp"), cp=2)),
        "experts": (mixture, one),
        "experts on two simulated ranks": (mixture, on_card(experts("ep"), ep=2)),
    }
    return every[name]


def host_waits(name: str, setup: Setup) -> list[Row]:
    make, wrap = way(name, setup)
    step = ours(make, ids(setup.sizes.narrow), wrap)
    for _ in range(2):
        step()
    with waits() as found:
        step()
    at = [f"{n} at {place}" for place, n in Counter(found).most_common(3)]
    count, calls = len(found), list[str]()
    if not setup.without("CUPTI"):
        counted = profiled_waits(step)
        count, calls = counted.total(), [f"{n} {call}" for call, n in counted.most_common()]
    words = "; ".join(filter(None, (", ".join(calls), ", ".join(at))))
    text = f"{count}" + (f" ({words})" if words else "")
    what = "waits of the host within a step"
    return [Row(what, text) if name == UPDATED_ON_HOST else at_most(what, count, 0, text)]


def node(setup: Setup) -> list[Row]:
    """Short operators, many of them: what the host takes is what a step takes."""
    of, batch = setup.sizes.narrow, ids(setup.sizes.narrow)
    step_fn, state = training(lambda: Llama(of.shape, setup.sizes.dtype))
    staged = on_card()(step_fn)
    nodes = len(staged.lower(state, batch).program.nodes)
    mine = host_seconds(staged_run(staged, state, batch), setup.sizes.repeats)
    rows = [Row("host time of a node", f"{1e6 * mine / nodes:.2f} microseconds ({nodes} nodes, {1e3 * mine:.3g} ms a step)")]
    why = setup.without("eager")
    if why:
        return [*rows, not_run("host time of a step, ours / eager", why)]
    with torch.device("cuda"):
        module = Llama(of.shape, setup.sizes.dtype)
    theirs = host_seconds(eager(module, batch), setup.sizes.repeats)
    return [*rows, at_most("host time of a step, ours / eager", mine / theirs, 1.0, f"{mine / theirs:.2f} ({1e3 * theirs:.3g} ms eager)")]


def leaf(setup: Setup) -> list[Row]:
    """A step that hands most of its state on as it is."""

    def count(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {**state, "0": state["0"] + 1.0}

    taken = {}
    for n in (1, setup.sizes.leaves):
        step = on_card()(count)
        held = [step.init({str(k): torch.zeros(()) for k in range(n)})]

        def run(step: Any = step, held: list[Any] = held) -> None:
            held[0] = step(held[0])

        taken[n] = host_seconds(run, setup.sizes.repeats)
    each = (taken[setup.sizes.leaves] - taken[1]) / setup.sizes.leaves
    alone = Row("host time of a step of one leaf", f"{1e6 * taken[1]:.1f} microseconds")
    return [Row("host time of a leaf", f"{1e6 * each:.2f} microseconds"), alone]


def collective(setup: Setup) -> list[Row]:
    """Of small tensors: gathers and sums of ZeRO-3."""
    x = torch.ones(8, 64).to("cuda")
    model = cf.functional(torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3))))
    step_fn, state = cf.train_step(model, cf.adapt(torch.optim.AdamW, lr=1e-4), loss=lambda out: out.square().mean())
    step = on_card(zero(3, "dp"), dp=2)(step_fn)
    with tempfile.NamedTemporaryFile(suffix=".json") as trace:
        profile = step.profile(trace.name, step.init(state, x), x)
    moves = [timing.mean_s for timing in profile.nodes if timing.communication]
    text = f"{1e6 * sum(moves) / max(1, len(moves)):.1f} microseconds ({len(moves)} a step)"
    return [Row("a collective of two simulated ranks, on the card", text)]


SLICE = Slice(3, "The host beside the card", (
    *(Part(f"waits, {name}", partial(host_waits, name)) for name in WAYS),
    Part("a node", node), Part("a leaf", leaf), Part("a collective", collective),
))  # fmt: skip
