"""Where a step's inputs lie before it is planned, and what of that a plan may change.

Problem: arguments may be DTensors that lie somewhere, tensors that the step captured may have been placed by another
step, and the user may have said where something belongs. Idea: what lies somewhere is told by position, as layouts that
stay (constraints) and tiers in which inputs begin (`InputTiers`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch

from colofunc.compiler.lowered import Lowered
from colofunc.compiler.transform import InputTiers, Move
from colofunc.compiler.user_constraints import pin
from colofunc.dtensor.placed import SHELF
from colofunc.dtensor.tensor import DTensor
from colofunc.mesh import Mesh
from colofunc.planner.offload.choice import Hint
from colofunc.planner.offload.fastest import Offloaded, fastest_offload
from colofunc.planner.offload.policies import GIVEN
from colofunc.planner.sharding.constraints import Constraint, Constraints
from colofunc.program.cost import NodeSeconds
from colofunc.program.ir import Program
from colofunc.program.lazy import LazyTensor
from colofunc.program.timed import Timed
from colofunc.program.tracing.trace import Traced
from colofunc.spec.layout import Layout


@attrs.frozen(eq=False)
class TracedStep:
    """A step as it was traced.

    `donated`: positions of the leaves that it consumes. `hidden`: tensors that it took from outside.

    `left_out`: names of the passes that it does not go through. `traced_s`: how long the trace took.
    """

    traced: Traced
    program: Program
    donated: tuple[int, ...]
    hidden: tuple[torch.Tensor, ...]
    left_out: frozenset[str]
    traced_s: float

    @property
    def first_hidden(self) -> int:
        """Position of the first hidden input: behind the caller's leaves and the seed."""
        return len(self.traced.names) + self.traced.uses_seed


@attrs.frozen
class PlacedInputs:
    """Inputs that lie somewhere already, by value id.

    `fixed`: they stay there. `rows`: of batches, which a plan may lay otherwise, axis by axis. `state`: as a file had
    it, or another step; all of it stays, or all of it is placed anew (a parameter and its moments belong together).
    """

    fixed: dict[int, Layout]
    rows: dict[int, Layout]
    state: dict[int, Layout]

    @staticmethod
    def of_leaves(program: Program, leaves: Sequence[torch.Tensor | None]) -> PlacedInputs:
        placed = PlacedInputs({}, {}, {})
        for position, leaf in enumerate(leaves):
            if not isinstance(leaf, DTensor):
                continue
            layouts = placed.fixed
            if leaf.movable:
                layouts = placed.state if leaf.owned else placed.rows
            layouts[program.inputs[position]] = leaf.sharding
        return placed


@attrs.frozen
class PlacedHidden:
    """Position of a hidden input -> how it was placed; the positions of those that stay in their tiers, too."""

    layouts: Mapping[int, Layout]
    stay: frozenset[int]

    @staticmethod
    def of_step(step: TracedStep, mesh: Mesh, before: Sequence[Lowered], tiers_stay: bool) -> PlacedHidden:
        """What this step has placed stays where it is.

        What another one has placed stays in its tier only where `tiers_stay`.
        """
        placed_here: dict[int, Layout] = {}
        for lowered in before:
            for tensor, layout in zip(lowered.hidden, lowered.hidden_layouts, strict=True):
                placed_here[id(tensor)] = layout
        layouts: dict[int, Layout] = {}
        stay = set()
        for position, tensor in enumerate(step.hidden, step.first_hidden):
            placed_layout = placed_here.get(id(tensor)) or SHELF.layout(tensor, mesh)
            if placed_layout is None:
                continue
            if tiers_stay or id(tensor) in placed_here:
                layouts[position] = placed_layout
                stay.add(position)
            else:
                layouts[position] = placed_layout.with_tier("device")
        return PlacedHidden(layouts, frozenset(stay))


def tiers_stay(moves: Sequence[Move], placed: PlacedInputs, timed: Timed | None) -> bool:
    """Whether captured tensors stay in the tiers in which other steps have them: where this step works on the same
    state.

    Tiers of a step that has nothing to do with it, as of an earlier trial with the same model, say nothing here.
    """
    if moves:
        return bool(placed.fixed) or timed is not None
    return any(layout.tier != "device" for layout in placed.fixed.values())


def pinned_hidden(program: Program, hidden: PlacedHidden, constraints: Constraints) -> Constraints:
    """Frozen weights that another step has placed stay where they are, unless the user says otherwise."""
    items: dict[int, tuple[Constraint, ...]] = {}
    for position, layout in hidden.layouts.items():
        if position not in constraints.items:
            name = program.values[program.inputs[position]].name
            items[position] = (pin(layout, f"{name} already lies as {layout.text()!r}"),)
    return constraints | Constraints(items)


def tiers_of_inputs(
    step: TracedStep,
    program: Program,
    placed: PlacedInputs,
    hidden: PlacedHidden,
    wished: Mapping[int, str],
    moves: Sequence[Move],
) -> InputTiers:
    """The tiers in which inputs lie before a step.

    wished: position of an input -> the tier that the user wants it in.
    """
    tiers = {position: "device" for position, value in enumerate(program.inputs) if value in placed.fixed}
    for position in hidden.stay:
        tiers[position] = hidden.layouts[position].tier
    tiers.update(wished)

    captured = {}
    for position, tensor in enumerate(step.hidden, step.first_hidden):
        # Whoever holds a tensor in memory holds it as it is, not as it is read.
        is_read_as_held = tensor.dtype == program.values[program.inputs[position]].dtype
        captured[position] = not moves or (is_read_as_held and not isinstance(tensor, LazyTensor))
    return InputTiers(tiers, captured)


def moves_of_tiers(lies: InputTiers) -> tuple[Move, ...]:
    """Where no transform writes copies but something does not lie on the device: plain ones, of what is needed."""
    everything_on_device = set(lies.tiers.values()) <= {"device"}
    return () if everything_on_device else (_copy_what_is_needed,)


def _copy_what_is_needed(
    program: Program,
    mesh: Mesh,
    node_s: NodeSeconds,
    budget_bytes: int | None,
    lies: InputTiers,
    /,
    *,
    like: Hint | None = None,
) -> Offloaded:
    return fastest_offload(
        program, mesh, node_s, budget_bytes, policy=GIVEN, given=lies.tiers, like=like, captured=lies.captured
    )


def aliases_kept(program: Program, constraints: Constraints) -> tuple[tuple[int, int], ...]:
    """Donated pairs whose output may lie as its input does: the user fixed no other layout, and nothing is pending but
    what stays so.
    """
    input_layouts: dict[int, Layout] = {}
    for position, of_input in constraints.items.items():
        if position >= len(program.inputs):
            continue
        for constraint in of_input:
            for offer in constraint.offers:
                if offer.outs[0] is not None:
                    input_layouts[position] = offer.outs[0]

    pairs = []
    for output, source in program.aliases:
        if source in constraints.terms and output not in constraints.outputs:
            pairs.append((output, source))
            continue
        output_layout, input_layout = constraints.outputs.get(output), input_layouts.get(source)
        is_pending = input_layout is not None and bool(input_layout.pending)
        if (output_layout is None or output_layout is input_layout) and not is_pending:
            pairs.append((output, source))
    return tuple(pairs)
