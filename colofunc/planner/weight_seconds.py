"""Seconds of a lowered step that are a weight's: of its gathers, its casts and copies, and of the products that read
it.

    weight_seconds(low.program, mesh, rule_of, ["up.weight", "down.weight"])        # {"up.weight": 1.2e-5, ...}

Problem: a scheme makes some operators faster (a weight is read at its packed size, fewer bytes travel) and adds others.
Idea: a value that is made of weights alone belongs to them, and what makes it, or reads it, is charged to them, by the
same clock that plans are made by. What rounds the inputs of products (`ROUNDING`, and what travels between ranks for
it) is charged to the weights whose products read it, to each of several alike. Where one gather brings several tensors,
each pays by its bytes, those that nobody asks about too. Seconds are added up, as in `low.cost()`: what of them is
hidden behind other work depends on the whole step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from colofunc.mesh import Mesh
from colofunc.ops import fp8, int8_products, quantized_inputs
from colofunc.ops.measured import same_weight
from colofunc.ops.quantized import PARTS
from colofunc.program.cost import RuleOf, node_s
from colofunc.program.ir import Program, Value
from colofunc.program.places import distinct_ranks, on_rank

WeightShares = Mapping[str, float]  # weight -> its part of a value's bytes; all parts of a value are 1 together
REST = ""
"""Stands for parameters and buffers that nobody asks about."""
KEPT = ("param", "frozen", "buffer", "state")
BESIDE = (*PARTS[1:], "input_scale")
"""Parts of a packed weight whose names stand behind the weight's own."""
ROUNDING = (
    *(fp8.MAXIMUM, fp8.fp8_scale.name, fp8.CAST),
    *(int8_products.SIZE, int8_products.int8_rows.name, quantized_inputs.rounded_rows.name),
)
"""Operators that round inputs of products while a step runs, from the largest number of a row to the rounded rows."""


def weight_seconds(program: Program, mesh: Mesh, rule_of: RuleOf, names: Collection[str]) -> dict[str, float]:
    """Weight's name -> seconds, of the rank that takes longest for it; 0 of weights that the program does not have."""
    found = dict.fromkeys(names, 0.0)
    for rank in distinct_ranks(program, mesh):
        mine = on_rank(program, mesh, rank).program
        charge = _Charge(names, mesh, rule_of)
        charge.run(mine, {id: charge.owner(mine.values[id]) for id in mine.inputs if mine.values[id].role in KEPT}, 1)
        for name in names:
            found[name] = max(found[name], charge.spent[name])
    return found


class _Charge:
    """Adds up, weight by weight, what nodes take that read values of weights."""

    def __init__(self, names: Collection[str], mesh: Mesh, rule_of: RuleOf) -> None:
        self.names, self.mesh, self.rule_of = names, mesh, rule_of
        self.spent = dict.fromkeys((*names, REST), 0.0)

    def owner(self, value: Value) -> WeightShares:
        """Whose a value with a name is. Parts of a weight, and what is gathered of it, have its name."""
        name = value.name
        base, _, part = name.rpartition(".")
        if part in BESIDE:
            name = base
        if name in self.names:
            return {name: 1.0}
        return {next((known for known in self.names if name and same_weight(name, known)), REST): 1.0}

    def run(self, program: Program, own: dict[int, WeightShares], trips: int) -> None:
        """own: value -> whose it is; it grows."""
        charged: dict[int, WeightShares] = {}  # position of a node -> who pays for it
        for position, node in enumerate(program.nodes):
            read = [id for id in node.refs if id in own]
            if not read:
                continue
            if node.loop is not None:
                pairs = zip(node.loop.body.inputs, node.refs, strict=False)
                self.run(
                    node.loop.body,
                    {inside: own[outside] for inside, outside in pairs if outside in own},
                    trips * node.loop.trips,
                )
                continue
            alone = len(read) == len(node.refs)
            shares = _shares_of_values(read, own, program.values)
            if not alone and shares.keys() != {REST}:  # a product is its weight's, whatever it adds
                shares = _without_rest(shares)
            charged[position] = shares
            if alone:
                for result in node.results:
                    value = program.values[result]
                    own[result] = self.owner(value) if value.name else shares
        charged.update(_shares_of_rounding(program, charged))
        for position, shares in charged.items():
            seconds = node_s(program.nodes[position], program.values, self.mesh, self.rule_of) * trips
            for name, share in shares.items():
                self.spent[name] += seconds * share


def _shares_of_rounding(program: Program, charged: Mapping[int, WeightShares]) -> dict[int, WeightShares]:
    """Who pays for the nodes that round inputs, by position: those who pay for what reads them, each reader alike.

    charged: who pays for the nodes that read weights.
    """
    rounding: list[int] = []
    made_there: set[int] = set()
    for position, node in enumerate(program.nodes):
        # What only passes on what rounding has made is a view of it, or a collective between its operators.
        is_passing = bool(node.refs) and all(id in made_there for id in node.refs)
        if position not in charged and node.loop is None and (node.target in ROUNDING or is_passing):
            rounding.append(position)
            made_there.update(node.results)
    found: dict[int, WeightShares] = {}
    for position in reversed(rounding):
        reading = [reader for id in program.nodes[position].results for reader in program.readers.get(id, ())]
        shares: dict[str, float] = {}
        for reader in reading:
            of_reader = found.get(reader) or charged.get(reader) or {REST: 1.0}
            for name, share in of_reader.items():
                shares[name] = shares.get(name, 0.0) + share / len(reading)
        found[position] = shares
    return found


def _shares_of_values(
    read: Collection[int], own: Mapping[int, WeightShares], values: Mapping[int, Value]
) -> WeightShares:
    """Whose several values are, by their bytes."""
    total = sum(values[id].nbytes for id in read) or 1
    shares: dict[str, float] = {}
    for id in read:
        for name, share in own[id].items():
            shares[name] = shares.get(name, 0.0) + share * values[id].nbytes / total
    return shares


def _without_rest(shares: WeightShares) -> WeightShares:
    total = sum(share for name, share in shares.items() if name != REST)
    return {name: share / total for name, share in shares.items() if name != REST}
