"""What runs a step, where that is not this project's executor: how other frameworks' runs are planned.

Problem: published runs, and those of a cluster on which another framework runs, use kernels and ways to overlap that
the executors here do not have. A plan that is to be compared with such a run has to count what that run does. Idea: say
it of the machine that is planned for; the clock then counts so, and everything else stays as it is.

    machine = cf.Mesh(topology="8xh100").topology
    megatron = machine.with_software(attention="cudnn", collectives={"tp": "chunks"}, fused=True)
    cf.Mesh(dp=2, tp=4, topology=megatron)          # cf.shard(step, mesh, ...).lower(state, batch).plan.cost_s

Note [How collectives run]. Of the axes that are named:

- "early": begun as soon as there is what they send, waited for as late as possible. So the executors here do it, and
  all axes that are not named.
- "waits": the device waits for each where it stands, as in tensor parallelism by torch's DTensor, which reads at once
  what a collective gives.
- "chunks": gathers whose result a product reads, and reduce-scatters of what a product makes, are cut in as many pieces
  as there are ranks, each of which runs beside the product of another: Transformer Engine's user buffers, torch's
  asynchronous tensor parallelism (the idea: arXiv 2105.05720, section 3). What is waited for:
  `colofunc.program.beside_products`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from colofunc.errors import TopologyError, near

EARLY, WAITS, CHUNKS = "early", "waits", "chunks"
WAYS = (EARLY, WAITS, CHUNKS)


def _a_way(instance: object, attribute: attrs.Attribute[Any], value: str) -> None:
    if value not in WAYS:
        raise TopologyError(f"collectives of an axis run {value!r}{near(value, WAYS)}")


@attrs.frozen
class AxisCollectives:
    """How collectives along one mesh axis run; see Note [How collectives run]."""

    axis: str
    way: str = attrs.field(validator=_a_way)


@attrs.frozen
class Software:
    """What other software does. attention: the kernel by whose rates attention counts, one of the device's file; "" for
    torch's.

    fused: it has kernels by hand for what stands between products (norms with their sums, activation functions with
    their biases, the loss), which count as those that a compiler would make, and lay out what they compute as it is
    read, so that of copies between layouts only those of what collectives bring and take count. blocks: it gathers the parameters of a
    block as one, however many they are, and reduces their gradients as one, those of two never: FSDP, whose units are
    the blocks of a model. flat: what it gathers are parts of one flat tensor, of which parameters are views and no
    copies: FSDP's first version. uncompiled: modules of a compiled step that it leaves as they are, a loss behind a
    compiled model.
    """

    attention: str = ""
    collectives: tuple[AxisCollectives, ...] = ()
    fused: bool = False
    blocks: bool = False
    flat: bool = False
    uncompiled: tuple[str, ...] = ()

    def axes(self, way: str) -> frozenset[str]:
        """The mesh axes whose collectives run so."""
        return frozenset(one.axis for one in self.collectives if one.way == way)


def software(
    attention: str,
    collectives: Mapping[str, str],
    fused: bool,
    blocks: bool,
    flat: bool,
    uncompiled: Sequence[str],
) -> Software:
    """A record of what `Topology.with_software` takes."""
    if isinstance(uncompiled, str):
        raise TopologyError(f"uncompiled={uncompiled!r} is one path; write a list of paths, uncompiled=[{uncompiled!r}]")
    ways = tuple(AxisCollectives(axis, way) for axis, way in sorted(collectives.items()) if way != EARLY)
    return Software(attention, ways, fused, blocks, flat, tuple(uncompiled))
