"""ZeRO in chunks: bytes and memory per rank beside the closed forms, and the number of collectives beside FSDP2's.

Memory is the accountant's, for a LLaMA in bf16 with float32 masters, AdamW and microbatches. What is alive at the peak is
sorted by where it comes from: masters and moments, what is made of parameters alone (weights), sums of gradients; what is
being gathered, packed or reduced is in passing, and the rest are activations. The first three are the model states that the
formulas count, and are derived from them to the byte, by named differences:

    + sums in float32      the formulas count 2 bytes of gradient a parameter; sums over microbatches have 4
    - looked up on shards  a table whose rows are read where they lie is neither gathered nor cast as a whole
    + step count           the optimizer's, once

The mesh is a machine of cards, so what is in passing at the peak includes what is gathered or reduced beside what runs.

Bytes and collectives are GPT-2's; FSDP2's collectives are counted as two gloo processes run it, every block and the root
wrapped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

import attrs
import torch
from colofunc_plugins import zero
from torch.distributed.tensor.debug import CommDebugMode
from transformers import GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import colofunc as cf
from bench import Row, Section
from bench.fsdp2 import Size, fsdp2
from colofunc.executors.launch import launch
from colofunc.program.ir import Program

RANKS, MICROBATCHES = 8, 2
SIZE = Size(batch=2, length=128)
STATES = ("weights", "gradients", "masters and moments", "step count")
_MOVES = frozenset(
    "colofunc.rearrange colofunc.pack colofunc.all_gather_start colofunc.all_gather_flat_start colofunc.wait "
    "aten.slice.Tensor aten._to_copy.default".split()
)


@attrs.frozen
class DDP:
    """Everything whole but the batch, and gradients all-reduced."""

    name: str = "ddp"
    axes: tuple[str, ...] = ("dp",)

    def wishes(self, program: Any, mesh: cf.Mesh) -> list[cf.ext.Wish]:
        given = [program.values[i] for i in program.inputs]
        found = [cf.ext.Wish(v.name, "(dp b) ...", self.axes, ("batch",), self.name, along=True) for v in given if v.role == "batch"]
        for v in (v for v in given if v.role in ("param", "state")):
            whole = " ".join(f"d{d}" for d in range(len(v.shape)))
            found.append(cf.ext.Wish(v.name, whole, self.axes, (v.role,), self.name))
            if v.role == "param":
                found.append(cf.ext.Wish(f"grad.{v.name}", whole, self.axes, ("grad",), self.name, optional=True))
        return found


def llama() -> LlamaForCausalLM:
    heads = dict(num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=SIZE.length)
    size = dict(hidden_size=SIZE.width, intermediate_size=4 * SIZE.width, num_hidden_layers=SIZE.layers, vocab_size=SIZE.vocabulary)
    return LlamaForCausalLM(LlamaConfig(**size, **heads, use_cache=False))


def lowered(module: torch.nn.Module, ranks: int, plan: Any, rows: int, microbatches: int = 1, policy: Any = None) -> Any:
    step, state = cf.train_step(cf.functional(module), cf.adapt(torch.optim.AdamW, lr=1e-4), clip=1.0)
    mesh = cf.Mesh(dp=ranks, topology=f"{ranks}xa100-80g")
    step = cf.shard(step, mesh, plan)
    if policy is not None:
        step = cf.precision(step, policy)
    if microbatches > 1:
        step = cf.accumulate(step, microbatches)
    ids = torch.zeros((rows, SIZE.length), dtype=torch.int64)
    return step.lower(state, {"input_ids": ids, "labels": ids})


# ---- memory ----


def from_parameters(program: Program, given: Iterable[int]) -> set[int]:
    """What casts, packing and gathers alone make of these values."""
    found = set(given)
    for node in program.nodes:
        if node.target in _MOVES and node.refs and all(r in found for r in node.refs):
            found.update(o for o in node.outs if o is not None)
    return found


def to_sums(body: Program) -> set[int]:
    """Of the body of the loop: gradients on their way to what is summed over the microbatches."""
    makers = body.makers
    pending = [o for o in body.outputs if body.values[o].shape]
    found: set[int] = set()
    while pending:
        at = pending.pop()
        if at in makers and at not in found:
            found.add(at)
            pending += makers[at].refs if makers[at].target in _MOVES | {"colofunc.reduce_scatter_start"} else ()
    return found


def at_peak(low: Any) -> Counter[str]:
    """Bytes alive at the peak by kind."""
    program = low.program
    makers, weights = program.makers, from_parameters(program, (i for i in program.inputs if program.values[i].role == "param"))
    roles = {program.values[i].name: program.values[i].role for i in program.inputs}
    loops = [node for node in program.nodes if node.loop is not None]
    sums = {program.values[o].name or f"%{o}" for node in loops for o in node.outs if o is not None and program.values[o].shape}
    passing: set[str] = set()  # "%12 target" of values in the bodies of loops
    for node in loops:
        body = node.loop.body
        given = (into for into, i in zip(body.inputs, node.refs, strict=True) if i in weights)
        for id in from_parameters(body, given) | to_sums(body):
            maker = body.makers.get(id)
            passing.add(body.values[id].name or f"%{id} {maker.target if maker else ''}".strip())
    out: Counter[str] = Counter()
    for live in low.memory().at_peak:
        name, inside = live.name.removesuffix(" (each trip)"), live.name.endswith("(each trip)")
        word = name.split(" ")[0]
        id = int(word[1:]) if word.startswith("%") else -1
        if roles.get(name) in ("param", "state"):
            kind = "masters and moments" if live.shape else "step count"
        elif inside:
            kind = "in passing" if name in passing else "activations"
        elif id in weights:
            kind = "weights"
        else:
            packed = id in makers and makers[id].note.startswith(("chunk of", "bucket of"))
            kind = "gradients" if word in sums else "in passing" if packed else "activations"
        out[kind] += live.nbytes
    return out


FORMULAS: Mapping[str, tuple[Any, int, int, int]] = {  # plan; ranks that share weights, gradients, masters and moments
    "DDP: 16P": (DDP(), 1, 1, 1),
    "ZeRO-1: 4P + 12P/N": (zero(1, "dp", chunk="auto"), 1, 1, RANKS),
    "ZeRO-2: 2P + 14P/N": (zero(2, "dp", chunk="auto"), 1, RANKS, RANKS),
    "ZeRO-3: 16P/N": (zero(3, "dp", chunk="auto", regather=True), RANKS, RANKS, RANKS),
}


def derived(low: Any, weights: int, gradients: int, masters: int) -> tuple[int, list[tuple[str, int]]]:
    """(bytes of model states alive at the peak, the formula and what differs from it)."""
    params = {v.name: v.layout for i in low.program.inputs if (v := low.program.values[i]).role == "param"}
    numel = sum(prod(lies.shape) for lies in params.values())
    formula = 2 * numel // weights + 2 * numel // gradients + 12 * numel // masters
    terms = [("formula", formula), ("sums in float32", 2 * numel // gradients)]
    for name, lies in params.items():
        if weights == 1 and lies.axes and _on_shards(low.program, name, lies.local_shape):
            n = prod(lies.shape)
            terms.append((f"{name.removeprefix('state.params.')} looked up on shards", 2 * n // RANKS - 2 * n))
    alive = at_peak(low)
    return sum(alive[kind] for kind in STATES), [*terms, ("step count", 4)]


def _on_shards(program: Program, name: str, local_shape: tuple[int, ...]) -> bool:
    """Whether rows of a parameter, or its cast, are looked up in the part that a rank stores."""
    given = from_parameters(program, (i for i in program.inputs if program.values[i].name == name))
    for node in (node for node in program.nodes if node.loop is not None):
        body = node.loop.body
        mine = from_parameters(body, (into for into, i in zip(body.inputs, node.refs, strict=True) if i in given))
        for each in body.nodes:
            if each.target == "aten.embedding.default" and each.refs[0] in mine and body.values[each.refs[0]].shape == local_shape:
                return True
    return False


def memory_rows(module: torch.nn.Module, numel: int) -> list[Row]:
    out = []
    for name, (plan, *ranks) in FORMULAS.items():
        low = lowered(module, RANKS, plan, RANKS * MICROBATCHES, MICROBATCHES, "bf16")
        have, terms = derived(low, *ranks)
        want, alive = sum(n for _, n in terms), at_peak(low)
        said = " ".join(f"{n:+,} ({words})" for words, n in terms).removeprefix("+")
        parts = ", ".join(f"{w} {alive[w] / numel:.3f}P" for w in (*STATES[:-1], "in passing", "activations"))
        out.append(Row(f"{name}: model states of a rank, {have:,} B", said, f"{have:,} B", have == want))
        out.append(Row(f"{name}: what the peak of {low.memory().peak_bytes['device']:,} B holds", parts))
    return out


# ---- bytes and collectives ----


def wire_rows(module: GPT2LMHeadModel, numel: int) -> list[Row]:
    """Float32, so that P is 4 bytes a parameter."""
    whole, out = 4 * numel * (RANKS - 1) // RANKS, []
    for name, plan, times in (
        ("ZeRO-1", zero(1, "dp", chunk="auto"), 2),
        ("ZeRO-2", zero(2, "dp", chunk="auto"), 2),
        ("ZeRO-3, gathered once", zero(3, "dp", chunk="auto", regather=False), 2),
        ("ZeRO-3, gathered twice", zero(3, "dp", chunk="auto", regather=True), 3),
    ):
        low = lowered(module, RANKS, plan, RANKS)
        nbytes = sum(n for key, n in low.cost().bytes.items() if key[0] in ("all_gather", "reduce_scatter"))
        ratio = nbytes / (times * whole)
        met = ratio <= 1 if times == 3 else nbytes == times * whole
        out.append(Row(f"{name}: bytes / {times}P(N-1)/N", f"{ratio:.3f}", "at most 1.000" if times == 3 else "1.000", met))
    return out


def theirs(size: Size) -> dict[str, int]:
    """FSDP2's collectives in a step, after one that sets it up."""
    run = fsdp2(size.model(), True)
    run(size.ids(0))
    with CommDebugMode() as counted:
        run(size.ids(1))
    return {str(op).split(".")[-1]: n for op, n in counted.get_comm_counts().items()}


def count_rows(module: GPT2LMHeadModel) -> list[Row]:
    their = launch(theirs, 2, SIZE, timeout_s=600.0)[0]
    low = lowered(module, 2, zero(3, "dp", chunk="auto", regather=True), 2)
    mine: Counter[str] = Counter()
    for (kind, _), n in low.cost().calls.items():
        mine[kind] += n
    said = lambda calls: f"{sum(calls.values())} ({', '.join(f'{n} {kind}' for kind, n in sorted(calls.items()))})"  # noqa: E731
    fewer = sum(mine.values()) < sum(their.values())
    return [
        Row("collectives of a step, ours", said(mine), f"below {sum(their.values())}", fewer),
        Row("collectives of a step, FSDP2 resharding, counted", said(their)),
    ]


def bench() -> Section:
    gpt2, other = SIZE.model(), llama()
    numel, more = (sum(p.numel() for p in module.parameters()) for module in (gpt2, other))
    setting = (
        f"{SIZE.layers} layers of width {SIZE.width}, clipping; GPT-2 of {numel:,} parameters: bytes for N = {RANKS} ranks, collectives "
        f"on 2; LLaMA of P = {more:,}: memory for N = {RANKS}, {MICROBATCHES} microbatches of {RANKS} x {SIZE.length} tokens; "
        f"torch {torch.__version__}"
    )
    return Section("ZeRO in chunks", setting, [*wire_rows(gpt2, numel), *memory_rows(other, more), *count_rows(gpt2)])
