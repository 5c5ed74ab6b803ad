"""How far each value of the mesh may be from one device's: by its dtype, by what rounding does here, by what an update
makes of it.

Problem: one bound for all is false in both directions. Gradients are far below 1, so that half of one may be missing
within 0.02, and Adam divides each element of a gradient by its own size, so that where only rounding is left of it a
weight moves by lr, this way or that. Idea: three derivations.

    by dtype          the design's tolerance, of the coarsest dtype that the value was computed through: bound * max(1, max|b|)
    half precisions   what one last place of every input does to this value, times PLACES: sums that cancel lose more than the bound,
                      small values less. But not less than bound * max|b|, and of a sum not less than what is lost where
                      each of its terms is rounded once: eps * sqrt(sum of squares / 12)
    an update         what its operator makes of a gradient that is off by as much as gradients may be, element by element:
                      |update(g + t * allowed) - update(g)| for some t in [-1, 1]; large where g is noise, nothing where it is not.
                     A moment in 8 bits may besides be off by one code where something was computed in float32 or less

Values that are made of updated ones are allowed what updates are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from colofunc.ops.targets import resolve
from colofunc.ops.update_packed import widened_moment
from colofunc.ops.updates import gradient_at, is_update
from colofunc.program.closeness import TOLERANCE, absolute_difference
from colofunc.program.ir import Node, Program, Ref, map_refs
from colofunc.program.tracing.record import flat_results, run_node

HALVES = (torch.bfloat16, torch.float16)
PLACES = 4.0  # a sum over k ranks rounds k terms and their sum, about sqrt(k + 1) / 2 last places: 2 for 16 ranks
TRIES = 2  # times that operands are moved by their rounding at random
FEW = 32  # elements, of which two tries may by chance show no rounding at all
STEPS = (-1.0, -0.5, -0.1, -0.01, 0.01, 0.1, 0.5, 1.0)  # parts of its bound by which a gradient is moved
SUMS = frozenset({"aten.sum.default", "aten.sum.dim_IntList"})
Ran = Callable[[Node, Mapping[int, Tensor], Sequence[Any]], None]


class Reference:
    """The global program on one device, run as far as it is asked for; values die when nobody will ask again.

    `ran(node, values, results)` is called behind each node.
    """

    def __init__(
        self, program: Program, inputs: Sequence[Tensor], asked: Mapping[int, int], ran: Ran | None = None
    ) -> None:
        self.program = program
        ids = [id for id in program.inputs if id not in program.constants]
        self.env: dict[int, Tensor] = dict(zip(ids, inputs, strict=True)) | dict(program.constants)
        self.asked = Counter(asked)
        self.last = program.last_uses
        self.ran = ran
        self.at = 0

    def value(self, id: int) -> Tensor:
        """The value, computed now if it was not."""
        while id not in self.env:
            node = self.program.nodes[self.at]
            results = run_node(node, self.env)
            if self.ran is not None:
                self.ran(node, self.env, results)
            for out, result in zip(node.outs, results, strict=True):
                if out is not None:
                    self.env[out] = result
            self.at += 1
            for ref in {*node.refs, *node.results}:
                self._drop(ref)
        return self.env[id]

    def take(self, id: int) -> Tensor:
        """`value`, asked for one time less from now on."""
        found = self.value(id)
        self.asked[id] -= 1
        self._drop(id)
        return found

    def _drop(self, id: int) -> None:
        if self.asked[id] <= 0 and self.last.get(id, -1) < self.at:
            self.env.pop(id, None)


class Allowed:
    """What `compare` lets pass. `tolerance`: one bound for all instead."""

    def __init__(
        self, program: Program, inputs: Sequence[Tensor], owners: Sequence[int], tolerance: float | None
    ) -> None:
        self.bounds = bounds_of(program, tolerance)
        self.owners = frozenset(owners)
        halves = {value.dtype for value in program.values.values() if value.dtype in HALVES}
        self.near: list[Reference] = []
        if halves and tolerance is None:
            place = max(torch.finfo(dtype).eps for dtype in halves)
            for seed in range(TRIES):
                self.near.append(Reference(program, moved_one_place(inputs, place, seed), Counter(set(owners))))
        self.updates = tolerance is None
        self.after = _after(program)
        self.known: dict[int, float] = {}
        self.makers = program.makers
        self.relative: dict[int, float] = {}  # what rounding does, as a share of the value
        self.terms: dict[int, float] = {}  # of sums: what rounding each term once does to them, absolute
        self.elements: dict[int, Tensor] = {}  # of results of updates, absolute
        self.spread = 0.0  # the largest of these

    def of(self, id: int, expected: Tensor) -> float | Tensor:
        """As a share of max(1, max|expected|), or for every element."""
        if id in self.elements:
            return self.elements[id]
        bound = self.bounds[id]
        if id in self.after and bound:
            return max(bound, self.spread / _scale(expected))
        if not self.near or bound not in _OF_HALVES:
            return bound
        if id not in self.known:
            self.known[id] = self._measured(id, expected)
        return self.known[id]

    def _measured(self, id: int, expected: Tensor) -> float:
        """What rounding does to this value, as a share of max(1, max|expected|)."""
        bound, finite = self.bounds[id], expected[torch.isfinite(expected)]
        noise = 0.0
        for near in self.near:
            x = near.take(id)
            noise = max(noise, float((x.double() - expected.double()).abs().max()) if finite.numel() else 0.0)
        if not finite.numel() or not noise < float("inf"):
            return bound
        size, scale = float(finite.abs().max()), _scale(expected)
        if expected.numel() < FEW and id in self.makers:  # then as much as in what it is made of
            noise = max(noise, self.terms.get(id, 0.0))
            for ref in self.makers[id].refs:
                noise = max(noise, size * self.relative.get(ref, 0.0))
        self.relative[id] = min(noise / size, 1.0) if size else 0.0
        return max(bound * size, PLACES * noise) / scale

    def ran(self, node: Node, values: Mapping[int, Tensor], results: Sequence[Any]) -> None:
        """Behind a node of the reference: how far its results may be off, if it is an update or a sum."""
        if self.near and node.target in SUMS:
            self._terms(node, values)
        place = gradient_at(node.target) if self.updates else None
        ref = None if place is None else node.args[place]
        if place is None or not isinstance(ref, Ref):
            return
        args = list(map_refs(node.args, values.__getitem__))
        kwargs = {name: map_refs(arg, values.__getitem__) for name, arg in node.kwargs}
        grad = args[place]
        bound = self.of(ref.id, grad) if ref.id in self.owners else self.bounds[ref.id]
        off, func = bound * _scale(grad), resolve(node.target)
        least = max(self.bounds[id] for id in node.refs if id != ref.id)  # what it does in its own precision
        # What each element of a result may be off by.
        most: dict[int, Tensor] = {}
        for number, (out, result) in enumerate(zip(node.outs, results)):
            if out is not None:
                most[number] = _rounding(result, least)
        for step, direction in product(STEPS, _directions(node.target, grad, results)):
            args[place] = grad + step * off * direction
            others = flat_results(func(*args, **kwargs))
            for number, allowed in most.items():
                most[number] = torch.maximum(allowed, absolute_difference(others[number], results[number]))
        for number, allowed in most.items():
            out = node.outs[number]
            assert out is not None, "only results that somebody has are looked at"
            self.elements[out] = allowed
            # Nothing is computed of codes but by the next update.
            if allowed.numel() and results[number].is_floating_point():
                self.spread = max(self.spread, float(allowed.max()))

    def _terms(self, node: Node, values: Mapping[int, Tensor]) -> None:
        """How far a sum may be off whose terms went through a half precision.

        Each is off by up to half a last place either way, independently of the others.
        """
        (term,), (out,) = node.refs, node.outs
        if out is None or self.bounds[term] not in _OF_HALVES or not values[term].is_floating_point():
            return
        place = max(torch.finfo(dtype).eps for dtype in HALVES if TOLERANCE[dtype] == self.bounds[term])
        args = map_refs(node.args, lambda id: values[id].double().square())
        squares = resolve(node.target)(*args, **dict(node.kwargs) | {"dtype": torch.float64})
        worst = float(squares.max()) if squares.numel() else 0.0
        self.terms[out] = place * (worst / 12) ** 0.5 if math.isfinite(worst) else 0.0


def moved_one_place(inputs: Sequence[Tensor], place: float, seed: int) -> list[Tensor]:
    """Every floating element one last place of a half precision up or down, at random; numbers (rates, counts) stay."""
    gen = torch.Generator().manual_seed(seed)

    def one(x: Tensor) -> Tensor:
        if not x.is_floating_point() or not x.dim():
            return x
        sign = (torch.rand(x.shape, generator=gen) < 0.5).to(x.dtype) * 2 - 1
        return x * (1 + sign * place)

    return [one(x) for x in inputs]


def bounds_of(program: Program, tolerance: float | None) -> dict[int, float]:
    """How far each value may be off: as its dtype allows, or the coarsest dtype that it was computed through."""
    bounds = {id: TOLERANCE.get(program.values[id].dtype, 0.0) for id in program.inputs}
    through = dict.fromkeys(program.inputs, 0.0)  # inputs are exact
    for node in program.nodes:
        coarsest = max((through[ref] for ref in node.refs), default=0.0)
        for out in node.results:
            dtype = program.values[out].dtype
            exact = not (dtype.is_floating_point or dtype.is_complex)
            through[out] = max(coarsest, TOLERANCE.get(dtype, 0.0))
            bounds[out] = 0.0 if exact else through[out]
    return bounds if tolerance is None else dict.fromkeys(bounds, tolerance)


def _directions(target: str, g: Tensor, results: Sequence[Any]) -> Iterator[float | Tensor]:
    """Ways in which the elements of a gradient may be off together.

    All of them to one side; and where blocks share a scale, the largest of each to the other side of zero than the
    rest, since codes are shares of it.
    """
    yield 1.0
    if target != "colofunc.adamw8":
        return
    mean, square = widened_moment(results[1], results[2], True), widened_moment(results[3], results[4], False)
    for moment, sign in ((mean, mean.sign()), (square, g.sign())):
        blocks = moment.abs().reshape(max(1, results[2].numel()), -1)
        largest = (blocks == blocks.amax(1, keepdim=True)).view(moment.shape)
        yield torch.where(largest, -sign, sign).to(g.dtype)


def _rounding(x: Tensor, least: float) -> Tensor:
    """What the precision of an update allows each element of a result.

    Of codes: one of them, but exact where all is float64.
    """
    if x.is_floating_point():
        return least * _scale(x) * torch.ones_like(x)
    return torch.full(x.shape, 1.0 if least >= TOLERANCE[torch.float32] else 0.0, dtype=torch.float64)


_OF_HALVES = {TOLERANCE[dtype] for dtype in HALVES}


def _scale(x: Tensor) -> float:
    finite = x[torch.isfinite(x)]
    return max(1.0, float(finite.abs().max())) if finite.numel() else 1.0


def _after(program: Program) -> set[int]:
    """Values that are made of results of updates."""
    found: set[int] = set()
    made: set[int] = set()
    for node in program.nodes:
        outs = set(node.results)
        if any(ref in found or ref in made for ref in node.refs):
            found |= outs
        if is_update(node.target):
            made |= outs
    return found
