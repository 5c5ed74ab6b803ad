"""The steps of published runs as this project plans them: full width, few layers, and the clock's seconds of all layers.

Layers of a decoder are alike, so a step of all layers takes what one of `FEW[0]` takes and a layer's seconds for each that is missing; the
difference to a step of `FEW[1]` layers says what a layer takes. `python -m bench published` checks that on a run that is planned whole.
Pipelines are planned whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import colofunc_plugins
import torch
from colofunc_plugins import tensor, zero
from colofunc_plugins.sequence import ring
from transformers import LlamaConfig, LlamaForCausalLM, NemotronConfig, NemotronForCausalLM, OPTConfig, OPTForCausalLM

import colofunc as cf
from bench._published_rows import Model, Run
from colofunc.compiler.lowered import Lowered
from colofunc.executors.fused import as_executed
from colofunc.mesh import Topology, resolve_topology
from colofunc.mesh.attainable import attainable
from colofunc.mesh.presets import DATASHEET
from colofunc.planner.recompute.policies import RecomputePolicy
from colofunc.program.facts import is_product
from colofunc.program.ir import Node
from colofunc.program.lanes import lanes
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


class WithLoss(torch.nn.Module):
    """A model whose loss reads its logits in the dtype in which they were computed; transformers' own makes them float32 before."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model, self.loss = model, Loss()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss(self.model(input_ids=input_ids).logits, labels)


class Loss(torch.nn.Module):
    """Cross entropy of logits as they are, a module for plans to name."""

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def lowered(run: Run, layers: int) -> Lowered:
    """A run's step with its plan pinned: who is where, what is made again."""
    module = module_of(run.model, layers, run.tokens)
    own_loss = run.logits != "float32"
    module = WithLoss(module) if own_loss else module
    model, opt = cf.functional(module if run.masters else module.to(torch.bfloat16)), cf.adapt(torch.optim.AdamW, lr=1e-4)
    step_fn, _ = cf.train_step(model, opt, loss=(lambda out: out)) if own_loss else cf.train_step(model, opt)
    state = {"params": model.params, "buffers": model.buffers, "opt": opt.init(model.params)}
    # Few layers fit wherever the run did; all of them may not by this count, and the run kept what its plan says.
    topology = roomy(machine(run)) if layers == run.model.layers else machine(run)
    step = cf.shard(step_fn, cf.Mesh(**run.axes, topology=topology), *_plans(run), plugins=[colofunc_plugins])
    step = cf.precision(step, cf.Policy(compute="bf16", reduce=run.sums)) if run.masters else step
    if run.schedule:
        step = cf.pipeline(step, axis="pp", microbatches=run.microbatches, schedule=run.schedule)
    else:
        step = cf.accumulate(step, microbatches=run.microbatches)
    policy = _policy(run)
    step = step if policy is None else cf.checkpoint(step, policy=policy, budget="10TiB")
    step = step.on("compiled" if run.fused == "compiled" else "distributed")
    ids = cf.abstract((run.sequences, run.tokens), torch.int64)
    return step.lower(state, {"input_ids": ids, "labels": ids})


def machine(run: Run, is_sheet: bool = False) -> Topology:
    """What a run was on, by what programs attain of it, or by its data sheet."""
    sheet = resolve_topology(run.topology + DATASHEET)
    if run.uplink_gb_s is not None:
        *inner, outer = sheet.levels
        link = attrs.evolve(outer, bandwidth_bytes_per_s=1e9 * run.uplink_gb_s, sharing="uplink")
        sheet = attrs.evolve(sheet, levels=(*inner, link))
    collectives, by_hand = {"tp": run.collectives}, run.fused == "by hand"
    is_fsdp = run.zero == 3  # of all runs here that split parameters; its units are blocks
    uncompiled = ("loss",) if run.loss_as_written else ()
    if is_sheet:
        return sheet.with_software("", collectives, by_hand, is_fsdp, run.flat, uncompiled)
    reached = attrs.evolve(attainable(sheet), name=run.topology)
    return reached.with_software(run.attention, collectives, by_hand, is_fsdp, run.flat, uncompiled)


def logits_bytes(run: Run) -> int:
    """Of a microbatch on one rank, in bfloat16 and with all words."""
    rows = run.sequences // (run.microbatches * run.axes.get("dp", 1))
    return 2 * rows * run.tokens * run.model.vocabulary


def roomy(topology: Topology) -> Topology:
    """Without a limit to the device's memory, for nothing to be made again that the run has kept."""
    tiers = tuple(attrs.evolve(tier, capacity_bytes=None) if tier.name == "device" else tier for tier in topology.tiers)
    return attrs.evolve(topology, tiers=tiers)


def _plans(run: Run) -> list[Any]:
    plans: list[Any] = []
    if run.zero and run.axes.get("dp", 1) > 1:
        copies = "dpo" if "dpo" in run.axes else ()
        more = dict(regather=True, reduce=run.reduces) if run.zero == 3 else {}
        plans.append(zero(run.zero, "dp", replicate=copies, **more))
    if run.axes.get("tp", 1) > 1:
        plans.append(tensor("1d", "tp", sequence=True, apart=run.apart))
        if run.logits == "gathered":
            # Each rank has all logits, and the loss of all of them.
            plans.append(cf.ext.Wish("loss", "{tp: whole}", ("tp",), phases=("forward", "backward"), rank=1))
        if run.whole_embedding:
            both = dict(axes=("tp",), source="the run", rank=1)
            plans.append(cf.ext.Wish("*.embed_tokens", "{tp: whole}", phases=("forward", "backward"), **both))
            plans.append(cf.ext.Wish("*.embed_tokens.weight", "v d", **both))
    if run.axes.get("cp", 1) > 1:
        plans.append(ring("cp", balance="stripes"))
    return plans


def _policy(run: Run) -> RecomputePolicy | None:
    if run.again == "operators":
        return RecomputePolicy("every second product", _keeps_operators)
    if run.again == "layers":
        return RecomputePolicy("every second layer", _keeps_layers)
    return RecomputePolicy("nothing of layers", _keeps_rest) if run.again == "full" else None


def _keeps_rest(node: Node, readers: Sequence[Node]) -> bool:
    """Frameworks make layers again, each as a whole; the output layer and the loss are none."""
    return not _numbers(node)


def _keeps_operators(node: Node, readers: Sequence[Node]) -> bool:
    if "attention" in node.target:
        return True
    return is_product(node.target) and node.path.endswith(SAVED)


def _keeps_layers(node: Node, readers: Sequence[Node]) -> bool:
    numbers = _numbers(node)
    return not numbers or numbers[0] % 2 == 0


def _numbers(node: Node) -> list[int]:
    """Of the layers that a node is in, outermost first."""
    return [int(word) for word in node.path.split(".") if word.isdigit()]


@attrs.frozen(eq=False)
class Planned:
    """Steps of so many layers each."""

    run: Run
    layers: tuple[int, ...]
    lows: tuple[Lowered, ...]

    def seconds(self) -> float:
        """Of a step with all layers, as planned."""
        return self._of_all([low.lanes().end_s for low in self.lows])

    def seconds_on(self, topology: Topology, executor: str | None = None) -> float:
        """The same step on another machine, or as another executor runs it."""
        return self._of_all([self._played(low, topology, executor or low.executor) for low in self.lows])

    def alive_bytes(self) -> int:
        """At the peak of a step with all layers, with what the run's own loop over microbatches keeps beside it."""
        kept_bytes = logits_bytes(self.run) if self.run.keeps_logits else 0
        return kept_bytes + round(self._of_all([low.memory().peak_bytes["device"] for low in self.lows]))

    def _played(self, low: Lowered, topology: Topology, executor: str | None) -> float:
        mesh, rule = low.mesh.with_topology(topology), low.registry.rule
        there = with_kernels(low.program, mesh, low.registry.kernels)
        return lanes(as_executed(there, executor, mesh, rule), mesh, rule).end_s

    def _of_all(self, found: Sequence[float]) -> float:
        if self.layers == (self.run.model.layers,):
            return found[0]
        (few, more), (few_layers, more_layers) = found, self.layers
        return few + (more - few) / (more_layers - few_layers) * (self.run.model.layers - few_layers)


def planned(run: Run, layers: tuple[int, ...] = FEW) -> Planned:
    """A run's steps of so many layers; of a pipeline the one with all of them."""
    layers = (run.model.layers,) if run.schedule else layers
    return Planned(run, layers, tuple(lowered(run, count) for count in layers))
