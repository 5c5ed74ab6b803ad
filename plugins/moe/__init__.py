"""Expert parallelism: the experts of a mixture over the ranks of an axis, tokens sent to the ranks of their experts.

    step = cf.shard(step_fn, mesh, experts("ep"))                                # batch on ep, too
    step = cf.shard(step_fn, cf.Mesh(dp=2, ep=2), zero(3, "dp"), experts("ep"))  # experts' states split over dp
    step = cf.shard(step_fn, mesh, experts(("epo", "epi")))                      # two levels: at once or staged, by cost

Problem: experts are most of a model's parameters, and each token needs few of them. In the known frameworks expert
parallelism is an engine of its own, with process groups, optimizers and checkpoints beside everybody else's. Idea: it
is one layout and one strategy. Rows of the batch lie on the axis and are followed as for data parallelism; experts'
weights, their gradients and moments lie on it by expert; `colofunc.experts` works by dispatch (see `dispatch`). All
else is as without it, so ZeRO and tensor parallelism over other axes hold for experts, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import attrs
from colofunc_plugins.moe.dispatch import BACKWARD, FORWARD, strategies

import colofunc as cf

__all__ = ["Experts", "experts"]

TARGETS = (FORWARD, BACKWARD)


def experts(
    axis: str | Sequence[str] = "ep", *, capacity_factor: float | None = None, dropless: bool | None = None
) -> Experts:
    """Expert parallelism over `axis`, or over two axes, the outer level first. Every token reaches its experts
    (dropless).

    capacity_factor: refused here, because a plan never changes numbers; `cf.expert_capacity(step, factor)` does.
    """
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    if not 1 <= len(axes) <= 2 or len(set(axes)) != len(axes):
        raise cf.PlanError(
            f"experts takes one axis or two different ones, not {axis!r}; write experts('ep') or experts(('epo', "
            "'epi'))"
        )
    if capacity_factor is not None:
        if isinstance(capacity_factor, bool) or not capacity_factor > 0:
            raise cf.PlanError(
                f"capacity_factor={capacity_factor!r} leaves no place for any token; write a number above 0, such as "
                "1.25"
            )
        raise cf.PlanError(
            f"experts(capacity_factor={capacity_factor}) would drop tokens, and a plan never changes numbers; "
            f"write cf.expert_capacity(step, {capacity_factor}) around the step, or capacity= in cf.moe.experts"
        )
    if dropless is False:
        raise cf.PlanError(
            "experts(dropless=False) needs a capacity; write cf.expert_capacity(step, 1.25) around the step"
        )
    return Experts(axes)


@attrs.frozen
class Experts:
    """What `experts` returns: a named plan, and the plugin that gives experts dispatch over its axes."""

    axes: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"experts({', '.join(self.axes)})"

    @cf.hookimpl
    def colofunc_strategies(self) -> Mapping[str, Callable[..., Any]]:
        return dict.fromkeys(TARGETS, self.strategies)

    def strategies(self, call: Any, mesh: cf.Mesh) -> Iterator[cf.Strategy]:
        """Dispatch of one call, with every way to place the other axes; none on a mesh without the plan's own."""
        if all(axis in mesh for axis in self.axes):
            yield from strategies(call, mesh, _of_several_ranks(mesh, mesh.atoms(self.axes)))

    def wishes(self, program: Any, mesh: cf.Mesh) -> list[cf.ext.Wish]:
        """Rows of the batch and experts on the axes; the operator of experts by dispatch."""
        axes = mesh.atoms(self.axes)
        ranks = prod(mesh.axis_size(axis) for axis in axes)
        if ranks == 1:
            return []
        layers = self._layers(program, ranks)
        return [
            *self._rows(program, ranks, axes),
            *self._state(program, layers, axes),
            self._dispatch(_of_several_ranks(mesh, axes)),
        ]

    def _layers(self, program: Any, ranks: int) -> list[Any]:
        """The operators of experts. Raises PlanError where there are none, or the ranks do not divide them."""
        layers = [node for node in program.nodes if node.target == FORWARD]
        if not layers:
            raise cf.PlanError(
                f"{self.name} finds no experts in this step. Try: cf.moe.experts in the model{_seen(program)}",
                about="experts",
            )
        for node in layers:
            count = program.values[node.refs[3]].shape[0]
            if count % ranks:
                raise cf.PlanError(
                    f"{self.name}: the {count} experts of {node.path or 'the step'!r} do not divide over {ranks} "
                    "ranks; "
                    "use an axis whose size divides them"
                )
        return layers

    def _rows(self, program: Any, ranks: int, axes: Sequence[str]) -> Iterator[cf.ext.Wish]:
        """Whatever works on the rows of the batch does so along them; experts do as they are wished to."""
        spec = f"({' '.join(axes)} _) ..."
        for leaf in cf.ext.reading.rows(program, ranks, self.name):
            yield cf.ext.Wish(leaf.name, spec, self.axes, ("batch",), self.name, along=True, across=TARGETS)

    def _state(self, program: Any, layers: Sequence[Any], axes: Sequence[str]) -> Iterator[cf.ext.Wish]:
        """Weights of experts and their moments by expert; all else whole, where no other plan has a say."""
        weights = _weights(program, layers)
        parameter_of = cf.ext.reading.moments(program)
        for id in program.inputs:
            value = program.values[id]
            if value.role not in ("param", "frozen", "state"):
                continue
            words, rank = ["_"] * len(value.shape), -1
            if parameter_of.get(id, id) in weights:  # dim 0 counts the experts
                words[0], rank = f"({' '.join(axes)} _)", 1
            yield cf.ext.Wish(value.name, " ".join(words), self.axes, (value.role,), self.name, rank=rank)

    def _dispatch(self, axes: Sequence[str]) -> cf.ext.Wish:
        """How the operator of experts runs: over two axes at once or staged, whichever costs less."""
        wants = []
        for way in ("dispatch", "staged")[: len(axes)]:
            placed = ", ".join(f"{axis}: {way}" for axis in axes)
            wants.append("{" + placed + "}")
        want = tuple(wants) if len(wants) > 1 else wants[0]
        return cf.ext.Wish(
            "*", want, self.axes, source=self.name, targets=TARGETS, phases=("forward", "backward"), rank=1
        )


def _of_several_ranks(mesh: cf.Mesh, axes: Sequence[str]) -> tuple[str, ...]:
    return tuple(axis for axis in axes if mesh.axis_size(axis) > 1)


def _seen(program: Any) -> str:
    """What of the step looks like experts and is not."""
    for node in program.nodes:
        if node.phase == "forward" and "grouped_mm" in node.target:
            return (
                f". The grouped product of {node.path or 'the step'!r} ({node.line}) stands in a layer with a form or "
                "activation that colofunc.experts does not have"
            )
    return ""


def _weights(program: Any, layers: Sequence[Any]) -> set[int]:
    """Leaves whose dim 0 counts the experts of some layer, as they are, cast or quantized."""
    found: set[int] = set()
    for node in layers:
        for id in node.refs[3:]:
            found.update(cf.ext.reading.stored(program, id))
    return found
