"""Small steps for the joint decision: random cases, the programs that they are, and what the product decides for each.

Layers with a few shardings each (seconds, bytes of state, bytes of activations, seconds between neighbours). What decides is
the product's: `joint.decide_jointly`, `recompute.fit`, `offload`. `_joint_oracle.py` looks at every decision there is.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, product
from random import Random

import attrs
import torch

import colofunc as cf
from colofunc.errors import PlanError
from colofunc.planner.candidate import Finish, FinishedProgram
from colofunc.planner.joint import Proposal, decide_jointly
from colofunc.planner.offload.choice import Hint
from colofunc.planner.offload.fastest import fastest_offload
from colofunc.planner.recompute.fastest import fit_recomputed
from colofunc.program.ir import Node, Program, Ref, Value
from colofunc.program.memory import memory
from colofunc.program.passes.inplace import in_place

UNIT = 1000  # elements of float32 that one unit of memory is
INF = float("inf")
Choice = tuple[int, ...]
TOY = torch.library.Library("colofunc_toy", "DEF")
TOY.define("forward(Tensor x, Tensor w, int n) -> Tensor")
TOY.define("backward(Tensor g, Tensor x, Tensor w) -> (Tensor, Tensor)")
TOY.impl("forward", lambda x, w, n: x.new_empty(n), "CompositeExplicitAutograd")
TOY.impl("backward", lambda g, x, w: (torch.empty_like(x), torch.empty_like(w)), "CompositeExplicitAutograd")


@attrs.frozen
class Layer:
    """One sharding of a layer: seconds of forward, backward and update; units of activations and of state."""

    forward_s: float
    backward_s: float
    update_s: float
    out: int
    state: int


@attrs.frozen
class Case:
    """`layers[i][o]`: layer i under option o. `between[i][a, b]`: seconds from layer i under a to the next one under b."""

    layers: tuple[tuple[Layer, ...], ...]
    between: tuple[dict[tuple[int, int], float], ...]
    units_per_s: float  # of a link
    host_units_per_s: float  # of an update on the host: reads a gradient and state, writes state
    budget: int = 0

    def picked(self, choice: Choice) -> list[Layer]:
        return [options[o] for options, o in zip(self.layers, choice, strict=True)]

    def edges_s(self, choice: Choice) -> float:
        return sum(table[choice[i], choice[i + 1]] for i, table in enumerate(self.between))

    def choices(self) -> Iterator[Choice]:
        return product(*(range(len(options)) for options in self.layers))

    def cost_s(self, choice: Choice) -> float:
        return self.edges_s(choice) + sum(x.forward_s + x.backward_s + x.update_s for x in self.picked(choice))


def made(seed: int, layers: int = 2, options: int = 2, part: float | None = None) -> Case:
    random = Random(seed)

    def layer() -> Layer:
        return Layer(*(random.choice([0.5, 1.0, 2.0]) for _ in range(2)), 0.1, random.randint(1, 4), random.randint(1, 4))

    all_ = tuple(tuple(layer() for _ in range(options)) for _ in range(layers))
    pairs = list(product(range(options), repeat=2))
    between = tuple({p: random.choice([0.0, 0.0, 0.25, 0.5]) for p in pairs} for _ in range(layers - 1))
    case = Case(all_, between, random.choice([1.0, 2.0, 4.0, 8.0]), random.choice([4.0, 16.0]))
    fastest = min(case.choices(), key=case.cost_s)
    whole = plain_bytes(case, fastest) // (4 * UNIT)
    return attrs.evolve(case, budget=int(whole * (part or random.uniform(0.6, 0.99))) * 4 * UNIT + 8)


# ---- the product's decision ----


def machine(case: Case) -> cf.Mesh:
    base = cf.Mesh(topology="a100-40g:datasheet").topology
    rate = case.units_per_s * 4 * UNIT
    links = tuple(attrs.evolve(link, bandwidth_bytes_per_s=rate, latency_s=0.0) for link in base.links)
    return cf.Mesh(topology=attrs.evolve(base, links=links, host_bytes_per_s=case.host_units_per_s * 4 * UNIT))


def step_of(case: Case, choice: Choice) -> tuple[Program, dict[str, float]]:
    """The program of one rank, and seconds by node (its `path`)."""
    picked, n = case.picked(choice), len(choice)
    values, nodes, seconds = dict[int, Value](), list[Node](), dict[str, float]()
    ids = count()

    def value(units: int, name: str, role: str, scalar: bool = False) -> int:
        i = next(ids)
        values[i] = Value(i, () if scalar else (units * UNIT,), torch.float32, name, role)
        return i

    def node(target: str, args: tuple[object, ...], outs: tuple[int | None, ...], phase: str, path: str, s: float) -> None:
        nodes.append(Node(target, args, (), outs, phase, path))
        seconds[path] = s

    ws = [value(x.state, f"w{i}", "param") for i, x in enumerate(picked)]
    batch = value(1, "x", "batch")
    step, lr = value(0, "step", "batch", scalar=True), value(0, "lr", "batch", scalar=True)
    acts = [batch]
    for i, x in enumerate(picked):
        acts.append(value(x.out, "", "activation"))
        node("colofunc_toy.forward", (Ref(acts[i]), Ref(ws[i]), x.out * UNIT), (acts[-1],), "forward", f"F{i}", x.forward_s)
    grads, g = dict[int, int](), acts[-1]
    for i in reversed(range(n)):
        down = value(picked[i - 1].out, "", "activation") if i else None
        grads[i] = value(picked[i].state, "", "grad")
        node(
            "colofunc_toy.backward", (Ref(g), Ref(acts[i]), Ref(ws[i])), (down, grads[i]), "backward", f"B{i}", picked[i].backward_s
        )  # fmt: skip
        g = down if down is not None else g
    for i in range(n):
        args = (Ref(ws[i]), Ref(grads[i]), None, Ref(step), Ref(lr), 0.0, 0.0, 0.0, False)
        node("colofunc.sgd_", args, (), "update", f"U{i}", picked[i].update_s)
    aliases = tuple((i, i) for i in range(n))
    return Program((*ws, batch, step, lr), tuple(nodes), tuple(ws), values, {}, aliases, "inplace"), seconds


def plain_bytes(case: Case, choice: Choice) -> int:
    return memory(step_of(case, choice)[0]).peak_bytes["device"]


def largest(program: Program, beside: bool = False) -> int:
    """Bytes that one operator alone reads and makes, updates aside. `beside`: with the batch, which never leaves the device."""
    batch = [i for i in program.inputs if beside and program.values[i].role == "batch"]
    ids = ({*node.refs, *batch, *(o for o in node.outs if o is not None)} for node in program.nodes if node.phase != "update")
    return max(sum(program.values[i].nbytes for i in some) for some in ids)


@attrs.frozen
class Deciding:
    """The product's decision of a case. `moves`, `again`: whether values may be copied, or made again. `prices`: whether memory
    has one. `few`: whether all shardings are looked at, as of small steps; of larger ones prices lead to some, and `room`: others are
    those that are best where only state has a price, or only what is made, and where nothing fits those in which no operator is too
    large alone."""

    case: Case
    moves: bool = True
    again: bool = True
    prices: bool = True
    few: bool = True
    room: bool = True
    known: dict[Choice, Proposal[Choice]] = attrs.field(factory=dict, init=False)

    def seconds(self) -> float:
        """Seconds of what is decided; inf where nothing is found."""
        best, _ = decide_jointly(self.propose, self.finish, self.case.budget, others=self.others)
        return INF if best is None else best.total_s

    def proposed(self, choice: Choice) -> Proposal[Choice]:
        if choice not in self.known:
            self.known[choice] = Proposal(choice, self.case.cost_s(choice), plain_bytes(self.case, choice), choice)
        return self.known[choice]

    def propose(self, aim: int | None, price_s: float) -> Proposal[Choice]:
        fits = [p for p in map(self.proposed, self.case.choices()) if aim is None or p.peak_bytes <= aim]
        if not fits:
            raise PlanError("nothing is that lean")
        return min(fits, key=lambda p: p.cost_s + price_s * self.prices * p.peak_bytes)

    def finish(self, choice: Choice, below_s: float = INF) -> FinishedProgram:
        program, seconds = step_of(self.case, choice)
        mesh, budget = machine(self.case), self.case.budget
        node_s = lambda node, values: seconds[node.path]  # noqa: E731

        def counted(local: Program, like: FinishedProgram | None = None, /, moves: bool = True) -> FinishedProgram:
            done = in_place(local)
            if not (self.moves and moves):
                return FinishedProgram(done, memory(done).peak_bytes["device"], 0.0)
            hint = like.hint if like is not None and isinstance(like.hint, Hint) else None
            moved = fastest_offload(done, mesh, node_s, budget, like=hint)
            peak = budget + moved.over if hint else memory(moved.program).peak_bytes["device"]
            return FinishedProgram(moved.program, peak, moved.exposed_s, moved.words, moved.short, moved.hint)

        finished: Finish = counted
        if not self.again:
            return counted(program)
        fitted, leanest = fit_recomputed(program, node_s, finished, budget, below_s)
        return fitted or leanest

    def others(self, price_s: float | None) -> Iterator[Proposal[Choice]]:
        """All; or some, as `sharding.enumeration.more_choices` finds them."""
        some: list[Choice] = []
        if price_s is not None and self.few:
            some = list(self.case.choices())
        elif self.room:
            some = list(self.roomy() if price_s is None else self.leaning(price_s))
        yield from map(self.proposed, sorted(some, key=self.case.cost_s))

    def roomy(self) -> Iterator[Choice]:
        """Of those in which no operator alone is too large for parts of the budget, or with the batch for all of it, the fastest."""
        for beside, rooms in ((True, ()), (False, (0.9, 0.8, 0.7, 0.6))):
            held = {c: largest(step_of(self.case, c)[0], beside) for c in self.case.choices()}
            for most in (1.0, *rooms, min(held.values()) / self.case.budget):
                some = [c for c in held if held[c] <= self.case.budget * min(1.0, most)]
                yield from sorted(some, key=self.case.cost_s)[:1]

    def leaning(self, price_s: float) -> Iterator[Choice]:
        """The best ones where only bytes of state have a price, or only those that are made."""
        for part in (1.0, 0.25):
            unit_s = price_s * part * 4 * UNIT
            yield min(self.case.choices(), key=lambda c: self.case.cost_s(c) + unit_s * sum(x.state for x in self.case.picked(c)))
            yield min(self.case.choices(), key=lambda c: self.case.cost_s(c) + unit_s * sum(x.out for x in self.case.picked(c)))
