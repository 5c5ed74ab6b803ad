"""fp8: training whose linear layers and experts multiply in float8, forward and backward.

    step = cf.fp8(step_fn)                                                       # scaling="tensorwise"
    step = cf.fp8(cf.precision(cf.shard(step_fn, mesh), "bf16"), scaling="rowwise", where="*_proj.weight")      # in any order

Problem: a library swaps modules for others whose weights are tensors of another kind, and on a mesh each kind of
sharding has to be taught how their scales are made. Idea: a function mode around the step calls other operators for the
linear layers that are meant (`colofunc/ops/fp8_linear.py`): maxima, casts, and products of what was cast. They have
rules like others, so that a maximum of a split tensor is one over all its parts, whatever splits it. Parameters and
their optimizer stay what they are.

With scaling="delayed" a scale is that of the largest number of the last steps, so that a tensor is cast without being
read before, and no scale waits for other ranks or other microbatches. These numbers are kept in the state, as a loss
scale is:

    state["fp8"] = {"amax_history": {"params.0.weight.amax": (3, history), ...}}       # rows: inputs, weight, gradient; last step first

A state that is a tuple or list has it as one more item at its end, a record in a field `fp8`. What was not yet measured
is 0, and a scale of nothing else is 1. A number that is larger than all of them becomes the largest of the format; one
that is not finite is no maximum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial, wraps
from typing import Any

import attrs
import torch
from torch import Tensor

from colofunc import compat
from colofunc.compiler.step_compiler import stage
from colofunc.compiler.transform import Build, Transform
from colofunc.compiler.weight_arguments import named_tensors
from colofunc.dtensor.roles import give_role, role_of
from colofunc.errors import InputError, near
from colofunc.ops.canonical import autocast
from colofunc.ops.experts import float8_where
from colofunc.ops.fp8 import fp8_scale
from colofunc.ops.fp8_linear import FORMATS, OPERANDS, RECIPES, Delayed, Recipe, fp8_linear
from colofunc.ops.linear import linear
from colofunc.ops.quantized_frozen import reading
from colofunc.ops.quantized_inputs import LinearCalls, WeightNames
from colofunc.ops.small_floats import LARGEST
from colofunc.planner.plan import matches
from colofunc.program.tracing.kept import KeptRecord, state_of
from colofunc.program.tracing.meta import phase
from colofunc.program.tracing.roles import mark_role
from colofunc.program.tracing.tree import flatten, walk

KEY = "fp8"
FIELD = "amax_history"
AMAX_HISTORY = KeptRecord(
    KEY, (FIELD,), "cf.fp8(scaling='delayed') keeps largest numbers", "scaling='tensorwise', which keeps none"
)
HISTORY = 16
"""Steps whose largest numbers delayed scaling keeps, where the user says none."""


def fp8(
    step_fn: Callable[..., Any] | None = None,
    where: str | Iterable[str] = "*.weight",
    scaling: str = "tensorwise",
    history: int = HISTORY,
) -> Any:
    """The step with linear layers and experts that multiply in float8, forward and backward.

    Parameters and optimizer stay as they are.

    where: globs over the names of weights, in the arguments or frozen in a model; layers of other weights stay as they
    are. Layers of experts are meant where both of their weights are; they always have scales of rows, and gradients of
    weights that are not in float8. scaling: "tensorwise" (a scale of each tensor; gradients in e5m2, all else in e4m3),
    "rowwise" (a scale of each row that a product sums over), "rowwise_with_gw_hp" (the same, and gradients of weights
    are not in float8), or "delayed" (as tensorwise, with scales of the largest numbers of the last `history` steps,
    which argument 0 keeps, for the weights in it). As a decorator: `@cf.fp8(scaling="rowwise")`. Raises InputError for
    another scaling, and when the step is traced where a glob matches no weight that a linear layer or experts read.
    """
    globs = (where,) if isinstance(where, str) else tuple(where)
    if not globs or not all(isinstance(glob, str) for glob in globs):
        raise InputError(
            f"cf.fp8(where={where!r}): give a glob over names of weights, or several. Try: where='*.weight'"
        )
    if not isinstance(scaling, str) or scaling not in RECIPES:
        raise InputError(f"cf.fp8: there is no scaling {scaling!r}{near(str(scaling), RECIPES, 'ways to scale')}")
    if not isinstance(history, int) or isinstance(history, bool) or history < 1:
        raise InputError(
            f"cf.fp8(history={history!r}): the number of steps whose largest numbers are kept. Try: history={HISTORY}"
        )
    asked = _Asked(globs, RECIPES[scaling], history if scaling == "delayed" else 0)
    transform = Transform(
        "fp8",
        {"where": globs, "scaling": scaling, "history": asked.history},
        wrap=partial(_wrapped, asked),
        grow=partial(_grown, asked) if asked.history else None,
        # So that layers are seen as these have cast and packed their weights.
        behind=("precision", "quantize"),
    )
    return stage(step_fn, transform)


@attrs.frozen
class _Asked:
    """What one transform does. `history`: of how many steps the state keeps largest numbers; 0: of none."""

    globs: tuple[str, ...]
    recipe: Recipe
    history: int

    def matches(self, name: str) -> bool:
        return any(matches(name, glob) for glob in self.globs)


# ---- the state ----


def _split(state: Any) -> tuple[Any, Any]:
    """(largest numbers of earlier steps, None where there are none yet; the state without them)."""
    record, bare = AMAX_HISTORY.split(state)
    return (None if record is None else record[FIELD]), bare


def _grown(asked: _Asked, build: Build) -> Build:
    """Argument 0 with a history for each weight that may be meant."""
    known, bare = _split(build.state)
    found = dict(known or {})
    for name, leaf in walk(bare):
        if not isinstance(leaf, Tensor) or not asked.matches(name) or not _may_be_weight(leaf):
            continue
        before = found.get(_key(name))
        if before is None:
            found[_key(name)] = torch.zeros(len(OPERANDS), asked.history)
        elif before.shape[1] != asked.history:
            raise InputError(
                f"cf.fp8(history={asked.history}): the state has largest numbers of {before.shape[1]} steps. Try: "
                f"history={before.shape[1]}; a state without {KEY!r}, which begins anew"
            )
    if known is not None and found.keys() == known.keys():
        return build
    give_role("buffer", found.values())  # as running statistics: every rank has all of them
    return build.evolve(state=AMAX_HISTORY.join(bare, {FIELD: found}))


def _may_be_weight(leaf: Tensor) -> bool:
    return leaf.is_floating_point() and leaf.dim() == 2 and role_of(leaf) not in ("state", "buffer")


def _key(name: str) -> str:
    return f"{name}.amax"  # which no glob for the weight's own name matches


# ---- the step ----


def _wrapped(asked: _Asked, build: Build) -> Build:
    fn = build.fn

    @wraps(fn)
    def stepped(*args: Any) -> Any:
        if not asked.history or not args:
            return _run(_Layers(asked, {}), fn, args)
        known, state = _split(args[0])
        mark_role("buffer", known.values())
        layers = _Layers(asked, known)
        out = _run(layers, fn, (state, *args[1:]))
        new, back = state_of(out)
        if flatten(new)[1].key() != flatten(state)[1].key():
            return out  # evaluates, and returns no state
        return back(AMAX_HISTORY.join(new, {FIELD: layers.next_history()}))

    return build.evolve(fn=stepped)


def _run(layers: _Layers, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """What the step gives, with layers in float8."""
    # Histories of delayed scales are those of weights of the state.
    for name, leaf in named_tensors(args[:1] if layers.asked.history else args):
        layers.note(name, leaf)
    calls = LinearCalls(layers.name, layers.multiply)
    with reading(layers.frozen, lambda wide, weight: None), float8_where(partial(layers.of_experts, calls)), calls:
        out = fn(*args)
    layers.check_globs()
    return out


class _Layers(WeightNames):
    """Weights of one run of a step by name, which of them linear layers have read, and how large the numbers there
    were.
    """

    def __init__(self, asked: _Asked, known: Mapping[str, Tensor]) -> None:
        super().__init__(asked.matches)
        self.asked = asked
        self.known = known  # name of a history -> (3, history)
        self.read: dict[str, None] = {}
        self.scales: dict[str, list[Tensor]] = {}  # weight -> those of `OPERANDS`
        self.seen: dict[str, dict[int, Tensor]] = {}  # weight -> number of an operand -> its largest number, 0-dim

    def multiply(self, input: Tensor, weight: Tensor, bias: Tensor | None, name: str) -> Tensor:
        """What a linear layer with a weight of this name gives."""
        self.read[name] = None
        x, w, b = autocast(input, weight, bias)
        assert x is not None and w is not None
        if x.dim() == 0 or w.dim() != 2 or x.dtype != w.dtype:
            result: Tensor = linear.apply(x, w, b)  # which says what is wrong
            return result
        delayed = self._delayed(name) if self.asked.history else None
        if x.dim() == 1:
            return fp8_linear(x.unsqueeze(0), w, b, self.asked.recipe, delayed).squeeze(0)
        return fp8_linear(x, w, b, self.asked.recipe, delayed)

    def of_experts(self, calls: LinearCalls, gate_up: Tensor, down: Tensor) -> bool:
        """Whether a layer of experts multiplies in float8: both of its weights are meant.

        Raises InputError where one is.
        """
        names = [calls.known(weight) for weight in (gate_up, down)]
        found = [name for name in names if name is not None]
        if len(found) == 1:
            raise InputError(
                f"cf.fp8: where= matches {found[0]!r}, and not the other weight of its layer of experts, whose two "
                "products are in float8 or not together. Try: globs for both"
            )
        self.read.update(dict.fromkeys(found))
        return bool(found)

    def _delayed(self, name: str) -> Delayed:
        """The scales of a weight's layers. Raises InputError where the state has no history of it."""
        history = self.known.get(_key(name))
        if history is None:
            raise InputError(
                f"cf.fp8(scaling='delayed'): {name!r} is no weight of the state, which keeps the largest numbers of "
                "its layers. Try: globs in where= that leave it out; scaling='tensorwise'"
            )
        if name not in self.scales:
            largest = history.amax(1)
            self.scales[name] = [fp8_scale(largest[k], LARGEST[format], False) for k, format in enumerate(FORMATS)]
        return Delayed(self.scales[name], partial(self._see, name))

    def _see(self, name: str, operand: int, amax: Tensor) -> None:
        amax = compat.unwrap_functorch(amax).to(self.known[_key(name)].dtype)
        seen = self.seen.setdefault(name, {})
        seen[operand] = torch.maximum(seen[operand], amax) if operand in seen else amax

    def next_history(self) -> dict[str, Tensor]:
        """The histories behind this step; of a weight that no layer has read as it was."""
        found = dict(self.known)
        with phase("update"), torch.no_grad():
            for name, seen in self.seen.items():
                before = self.known[_key(name)]
                none = before.new_zeros(())
                now = torch.stack([seen.get(operand, none) for operand in range(len(OPERANDS))])
                now = torch.where(now.isfinite(), now, none)  # of a step that overflows nothing is learnt
                found[_key(name)] = torch.cat([now.unsqueeze(1), before[:, :-1]], 1)
        return found

    def check_globs(self) -> None:
        """Raises InputError where a glob has matched no weight that a linear layer reads."""
        for glob in self.asked.globs:
            if not any(matches(name, glob) for name in self.read):
                names = [name for _, name in self.names.values() if name]
                said = f"cf.fp8: where={glob!r} matches no weight that a linear layer or experts of the step read"
                raise InputError(f"{said}{near(glob, names)}")
