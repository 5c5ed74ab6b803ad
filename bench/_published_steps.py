"""The steps of published runs as this project plans them: full width, few layers, and the clock's seconds of all layers.

Layers of a decoder are alike, so a step of all layers takes what one of `FEW[0]` takes and a layer's seconds for each that is missing; the
difference to a step of `FEW[1]` layers says what a layer takes. `python -m bench published` checks that on a run that is planned whole.
Pipelines are planned whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import colofunc_plugins
import torch
from colofunc_plugins import tensor, zero
from colofunc_plugins.sequence import ring
from transformers import LlamaConfig, LlamaForCausalLM, NemotronConfig, NemotronForCausalLM, OPTConfig, OPTForCausalLM

import colofunc as cf
from bench._published_rows import TIMES_FLASH, Attention, Collectives, Model, Run
from colofunc.compiler.lowered import Lowered
from colofunc.executors.backend import ordered
from colofunc.executors.fused import fused
from colofunc.mesh import Topology, resolve_topology
from colofunc.mesh.attainable import attainable
from colofunc.mesh.presets import DATASHEET
from colofunc.planner.recompute.policies import Policy
from colofunc.program.cost import collective_of, node_s
from colofunc.program.facts import is_product
from colofunc.program.ir import Node, Program, Value
from colofunc.program.lanes import Seconds, played
from colofunc.program.passes.kernels import with_kernels

FEW = (2, 4)
SAVED = ("q_proj", "v_proj", "gate_proj", "fc1", "down_proj", "fc2")
"""What torchtitan's selective recomputation keeps: every second product of a layer in the order of their calls, and attention."""


def module_of(model: Model, layers: int, tokens: int) -> torch.nn.Module:
    with torch.device("meta"):
        if model.gated or model.kv_heads < model.heads:
            sizes = dict(hidden_size=model.hidden, intermediate_size=model.ffn, num_hidden_layers=layers, vocab_size=model.vocabulary)
            heads = dict(num_attention_heads=model.heads, num_key_value_heads=model.kv_heads, max_position_embeddings=tokens)
            more = dict(tie_word_embeddings=model.tied, use_cache=False)
            if model.gated:
                return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **more))
            return NemotronForCausalLM(NemotronConfig(**sizes, **heads, **more))
        sizes = dict(hidden_size=model.hidden, ffn_dim=model.ffn, num_hidden_layers=layers, vocab_size=model.vocabulary)
        more = dict(num_attention_heads=model.heads, max_position_embeddings=tokens, word_embed_proj_dim=model.hidden, dropout=0.0)
        return OPTForCausalLM(OPTConfig(**sizes, **more, use_cache=False))


def lowered(run: Run, layers: int) -> Lowered:
    """A run's step with its plan pinned: who is where, what is made again."""
    module = module_of(run.model, layers, run.tokens)
    model, opt = cf.functional(module if run.masters else module.to(torch.bfloat16)), cf.adapt(torch.optim.AdamW, lr=1e-4)
    step_fn, _ = cf.train_step(model, opt)
    state = {"params": model.params, "buffers": model.buffers, "opt": opt.init(model.params)}
    topology = roomy(machine(run)) if run.schedule else machine(run)
    step = cf.shard(step_fn, cf.Mesh(**run.axes, topology=topology), *_plans(run), plugins=[colofunc_plugins])
    step = cf.precision(step, cf.Policy(compute="bf16", reduce=run.sums)) if run.masters else step
    if run.schedule:
        step = cf.pipeline(step, axis="pp", microbatches=run.microbatches, schedule=run.schedule)
    else:
        step = cf.accumulate(step, microbatches=run.microbatches)
    policy = _policy(run)
    step = step if policy is None else cf.checkpoint(step, policy=policy, budget="10TiB")
    ids = cf.abstract((run.sequences, run.tokens), torch.int64)
    return step.lower(state, {"input_ids": ids, "labels": ids})


def machine(run: Run, is_sheet: bool = False) -> Topology:
    """What a run was on, by what programs attain of it, or by its data sheet."""
    sheet = resolve_topology(run.topology + DATASHEET)
    if run.uplink_gb_s is not None:
        *inner, outer = sheet.levels
        link = attrs.evolve(outer, bandwidth_bytes_per_s=1e9 * run.uplink_gb_s, sharing="uplink")
        sheet = attrs.evolve(sheet, levels=(*inner, link))
    return sheet if is_sheet else attrs.evolve(attainable(sheet), name=run.topology)


def roomy(topology: Topology) -> Topology:
    """Without a limit to the device's memory, for nothing to be made again that the run has kept."""
    tiers = tuple(attrs.evolve(tier, capacity_bytes=None) if tier.name == "device" else tier for tier in topology.tiers)
    return attrs.evolve(topology, tiers=tiers)


def _plans(run: Run) -> list[Any]:
    plans: list[Any] = []
    if run.zero and run.axes.get("dp", 1) > 1:
        copies = "dpo" if "dpo" in run.axes else ()
        plans.append(zero(3, "dp", replicate=copies, regather=True) if run.zero == 3 else zero(run.zero, "dp", replicate=copies))
    if run.axes.get("tp", 1) > 1:
        plans.append(tensor("1d", "tp", sequence=True))
    if run.axes.get("cp", 1) > 1:
        plans.append(ring("cp", balance="stripes"))
    return plans


def _policy(run: Run) -> Policy | str | None:
    if run.again == "operators":
        return Policy("every second product", _keeps_operators)
    if run.again == "layers":
        return Policy("every second layer", _keeps_layers)
    return "nothing" if run.again == "full" else None


def _keeps_operators(node: Node, readers: Sequence[Node]) -> bool:
    if "attention" in node.target:
        return True
    return is_product(node.target) and node.path.endswith(SAVED)


def _keeps_layers(node: Node, readers: Sequence[Node]) -> bool:
    numbers = [int(word) for word in node.path.split(".") if word.isdigit()]
    return not numbers or numbers[0] % 2 == 0


def with_attention(topology: Topology, kernel: Attention) -> Topology:
    """A machine whose attention is by one kernel, flash or another one."""
    ahead, back = TIMES_FLASH.get(kernel, (1.0, 1.0))
    rates = [
        attrs.evolve(one, points=tuple((keys, forward * ahead, backward * back) for keys, forward, backward in one.points))
        for one in topology.device.attention
        if one.kernel == "flash"
    ]
    return attrs.evolve(topology, device=attrs.evolve(topology.device, attention=tuple(rates)))


class Alone:
    """Seconds of operators as the clock has them, and what products stand around a collective of tensor parallelism."""

    MOST_STEPS = 4
    """Views, changes of layout, casts and sums may stand between a collective and its product, so many one behind the other."""

    def __init__(self, program: Program, seconds: Seconds) -> None:
        self.whole_s = seconds
        self.known = {id(each.values): each for each in program.with_bodies()}  # of a loop too, whose values have numbers of their own

    def seconds(self, node: Node, values: Mapping[int, Value]) -> float:
        return self.whole_s(node, values)

    def products(self, node: Node, values: Mapping[int, Value], behind: bool) -> list[Node]:
        """The products that read a result, or make an operand, with none in between."""
        near, found, program = [node], dict[int, Node](), self.known[id(values)]
        for _ in range(self.MOST_STEPS):
            near = [other for one in near for other in self._next(one, program, behind)]
            found |= {id(one): one for one in near if is_product(one.target)}
            near = [one for one in near if not is_product(one.target)]
        return list(found.values())

    def _next(self, node: Node, program: Program, behind: bool) -> list[Node]:
        if not behind:
            return [program.makers[i] for i in node.refs if i in program.makers]
        return [program.nodes[k] for i in node.results for k in program.readers.get(i, ())]


class Chunked(Alone):
    """Seconds of operators where collectives of tensor parallelism run in chunks beside products. See Note [In chunks].

    Note [In chunks]. A gather over n ranks whose result a product reads, and a reduce-scatter of what a product makes, are cut in n pieces
    of which each runs beside the product of another: one piece has nothing to run beside, and what takes longer than the product has not
    either. So the device waits for max(t / n, t - product) in place of t, as Transformer Engine's user buffers do it and as `async_tp` of
    torch does (2105.05720, section 3, tells the idea).
    """

    def seconds(self, node: Node, values: Mapping[int, Value]) -> float:
        whole_s = self.whole_s(node, values)
        known = collective_of(node, values)
        if known is None or known[1] != ("tp",) or known[0] not in ("all_gather", "reduce_scatter"):
            return whole_s
        products_s = [self.whole_s(product, values) for product in self.products(node, values, known[0] == "all_gather")]
        return max(whole_s / known[2], whole_s - max(products_s)) if products_s else whole_s


class Apart(Alone):
    """Seconds of operators where each product of tensor parallelism has the gradient of its input summed and scattered by itself.

    The plans of torch's DTensor say so where each of several products that read one input is given it as a part of the sequence; the
    plans here sum the gradients first. Forward gathers of the one input are alike, and a compiler makes them once.
    """

    def seconds(self, node: Node, values: Mapping[int, Value]) -> float:
        whole_s = self.whole_s(node, values)
        known = collective_of(node, values)
        if known is None or known[:2] != ("reduce_scatter", ("tp",)):
            return whole_s
        return whole_s * max(1, len(self.products(node, values, False)))


COLLECTIVES: Mapping[Collectives, type[Alone]] = {"whole": Alone, "chunked": Chunked, "apart": Apart}


@attrs.frozen(eq=False)
class Planned:
    """Steps of so many layers each, as the executor orders them."""

    run: Run
    layers: tuple[int, ...]
    programs: tuple[Program, ...]
    lows: tuple[Lowered, ...]

    def played(self, low: Lowered, program: Program, topology: Topology, is_fused: bool) -> float:
        """Seconds of one of the steps on a machine."""
        mesh, rule = low.mesh.with_topology(with_attention(topology, self.run.attention)), low.registry.rule
        on_it = with_kernels(program, mesh, low.registry.kernels)
        on_it = fused(on_it, mesh, rule) if is_fused else on_it
        seconds = partial(node_s, mesh=mesh, rule_of=rule)
        return played(on_it, mesh, COLLECTIVES[self.run.collectives](on_it, seconds).seconds).end_s

    def seconds(self, topology: Topology, is_fused: bool | None = None) -> float:
        """Of a step with all layers."""
        fuses = self.run.fused if is_fused is None else is_fused
        return self._of_all([self.played(low, program, topology, fuses) for low, program in zip(self.lows, self.programs, strict=True)])

    def alive_bytes(self) -> int:
        """At the peak of a step with all layers."""
        return round(self._of_all([low.memory().peak_bytes["device"] for low in self.lows]))

    def _of_all(self, found: Sequence[float]) -> float:
        if self.layers == (self.run.model.layers,):
            return found[0]
        (few, more), (few_layers, more_layers) = found, self.layers
        return few + (more - few) / (more_layers - few_layers) * (self.run.model.layers - few_layers)


def planned(run: Run, layers: tuple[int, ...] = FEW) -> Planned:
    """A run's steps of so many layers; of a pipeline the one with all of them."""
    layers = (run.model.layers,) if run.schedule else layers
    lows = tuple(lowered(run, count) for count in layers)
    programs = tuple(ordered(low.program, low.mesh, "distributed", grouped=True) for low in lows)
    return Planned(run, layers, programs, lows)
