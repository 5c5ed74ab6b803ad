"""bfloat16 against bfloat16: how far two orders of the same sums may end apart, measured and not guessed.

A kernel adds in float32 and rounds once, to 8 bits: its result is off by at most half a last place. A mesh that splits a sum over
k ranks rounds k terms and their sum, so the result moves by up to (k + 1) / 2 last places, and as errors of rounding are
independent, by about sqrt(k + 1) / 2 of them: 2 for 16 ranks. What one last place in front of every product does to
each leaf is measured on one device: every weight is moved by one last place of bfloat16, up or down at random, so that each
product sees operands that are off by a last place. That, times `PLACES`, is what a leaf may differ by; and never less than
half a last place, because frozen weights are not moved.

Leaves are compared by what the steps did to them (new minus old: a parameter hardly moves in a step), in the relative norm of
the whole leaf: |d - d'| / |d|. AdamW divides each element of a gradient by its own size, so that rounding of a small one
turns a whole step round; with eps = 1 the step is as smooth as the gradient, and moments are the gradient itself. `MOST` is
the largest bound that still tells something: a rank's missing half of a gradient is 0.5.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from colofunc.program.tracing.tree import map_tensors, walk
from colofunc.testing.check import Checked, CheckError, run_reference
from colofunc.testing.trees import plain_copy

EPS = 1.0
PLACES = 4.0
MOST = 0.4
TRIES, STEPS = 3, 2


@attrs.frozen
class Known:
    """What one device does: how far each leaf moves, and which share of that one last place of every weight is."""

    moved: Mapping[str, Tensor]
    place: Mapping[str, float]


def check(step: Any, state: Any, batch: Any, known: Known | None = None) -> Checked:
    """Two steps of a staged step beside its function; `worst` is the largest share of what is allowed that was used."""
    known = known or measured(step.reference, state, batch)
    placed = step.init(plain_copy(state), batch)
    for _ in range(STEPS):
        placed, metrics = step(placed, plain_copy(batch))
    got = _moved((plain_copy(placed), plain_copy(metrics["loss"])), state)
    worst, failed = 0.0, []
    for name, want in known.moved.items():
        bound = min(max(PLACES * known.place[name], 2.0**-8), MOST)
        error = float((got[name] - want).norm() / want.norm())
        worst = max(worst, error / bound if bound else 0.0)
        if not error <= bound:
            failed.append(f"{name} differs by {error:.3f} of its norm, allowed {bound:.3f}")
    if failed:
        raise CheckError(f"{len(failed)} of {len(got)} leaves: " + "; ".join(failed[:6]))
    return Checked(len(got), STEPS, worst, step.lower(placed, batch))


def measured(fn: Any, state: Any, batch: Any) -> Known:
    """The function itself, and again from weights that are a last place off."""
    want = _run(fn, state, batch)
    place = dict.fromkeys(want, 0.0)
    for n in range(TRIES):
        gen = torch.Generator().manual_seed(n)
        near = _run(fn, {**state, "params": map_tensors(lambda x: _off(x, gen), state["params"])}, batch)  # noqa: B023
        place = {name: max(place[name], float((near[name] - d).norm() / d.norm())) for name, d in want.items()}
    return Known(want, place)


def _run(fn: Any, state: Any, batch: Any) -> dict[str, Tensor]:
    now = plain_copy(state)
    for _ in range(STEPS):
        now, metrics = run_reference(fn, now, plain_copy(batch))
    return _moved((now, metrics["loss"]), state)


def _moved(after: Any, state: Any) -> dict[str, Tensor]:
    """By name what a leaf gained; leaves that gain nothing (buffers) are left out."""
    pairs = zip(walk(after), walk((state, torch.zeros(()))), strict=True)
    gains = {name: (new.detach().double() - old.detach().double()) for (name, new), (_, old) in pairs}
    return {name: d for name, d in gains.items() if d.norm() > 0}


def _off(x: Tensor, gen: torch.Generator) -> Tensor:
    """Each element one last place of bfloat16 (2^-7 of its power of two) up or down."""
    sign = (torch.rand(x.shape, generator=gen) < 0.5).to(x.dtype) * 2 - 1
    place = torch.where(x == 0, 0.0, 2.0 ** (x.abs().log2().floor() - 7))
    return (x.detach() + sign * place).requires_grad_(x.requires_grad)
