"""fp8: training whose linear layers multiply in float8, forward and backward.

    step = cf.fp8(step_fn)                                                       # scaling="tensorwise"
    step = cf.fp8(cf.precision(cf.shard(step_fn, mesh), "bf16"), scaling="rowwise", where="*_proj.weight")      # in any order

Problem: a library swaps modules for others whose weights are tensors of another kind, and on a mesh each kind of sharding has to be taught
how their scales are made. Idea: a function mode around the step calls other operators for the linear layers that are meant
(`colofunc/ops/fp8_linear.py`): maxima, casts, and products of what was cast. They have rules like others, so that a maximum of a split
tensor is one over all its parts, whatever splits it. Parameters and their optimizer stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial, wraps
from typing import Any

from torch import Tensor

from colofunc import compat
from colofunc.compiler.step_compiler import stage
from colofunc.compiler.transform import Build, Transform
from colofunc.errors import InputError, near
from colofunc.ops.canonical import autocast
from colofunc.ops.fp8_linear import RECIPES, Recipe, fp8_linear
from colofunc.ops.linear import linear
from colofunc.ops.quantized_frozen import reading
from colofunc.ops.quantized_inputs import LinearCalls
from colofunc.planner.plan import matches
from colofunc.program.tracing.tree import walk


def fp8(step_fn: Callable[..., Any] | None = None, where: str | Iterable[str] = "*.weight", scaling: str = "tensorwise") -> Any:
    """The step with linear layers that multiply in float8, forward and backward; parameters and optimizer stay as they are.

    where: globs over the names of weights, in argument 0 or frozen in a model; layers of other weights stay as they are. scaling:
    "tensorwise" (a scale of each tensor; gradients in e5m2, all else in e4m3), "rowwise" (a scale of each row that a product sums over),
    "rowwise_with_gw_hp" (the same, and gradients of weights are not in float8). As a decorator: `@cf.fp8(scaling="rowwise")`.
    Raises InputError for another scaling, and when the step is traced where a glob matches no weight that a linear layer reads.
    """
    globs = (where,) if isinstance(where, str) else tuple(where)
    if not globs or not all(isinstance(glob, str) for glob in globs):
        raise InputError(f"cf.fp8(where={where!r}): give a glob over names of weights, or several. Try: where='*.weight'")
    if scaling not in RECIPES:
        raise InputError(f"cf.fp8: there is no scaling {scaling!r}{near(str(scaling), RECIPES, 'ways to scale')}")
    options = {"where": globs, "scaling": scaling}
    # Behind those that cast and pack weights, so that layers are seen as these have changed them.
    transform = Transform("fp8", options, wrap=partial(_wrapped, globs, RECIPES[scaling]), behind=("precision", "quantize"))
    return stage(step_fn, transform)


def _wrapped(globs: tuple[str, ...], recipe: Recipe, build: Build) -> Build:
    fn = build.fn

    @wraps(fn)
    def stepped(*args: Any) -> Any:
        layers = _Layers(globs, recipe)
        for name, leaf in walk(args[0] if args else {}):
            if isinstance(leaf, Tensor):
                layers.note(name, leaf)
        with reading(layers.frozen, lambda wide, weight: None), LinearCalls(layers.name, layers.multiply):
            out = fn(*args)
        layers.check_globs()
        return out

    return build.evolve(fn=stepped)


class _Layers:
    """Weights of one run of a step by name, and which of them linear layers have read."""

    def __init__(self, globs: tuple[str, ...], recipe: Recipe) -> None:
        self.globs = globs
        self.recipe = recipe
        self.names: dict[int, tuple[Tensor, str]] = {}  # id of a weight -> itself, its name
        self.read: dict[str, None] = {}

    def note(self, name: str, leaf: Tensor) -> None:
        self.names[id(leaf)] = leaf, name

    def frozen(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        for name, weight in weights.items():
            self.note(name, weight)
        return weights

    def name(self, weight: Tensor) -> str | None:
        known = self.names.get(id(compat.unwrap_functorch(weight)))  # inside torch.func.grad weights are wrapped
        if known is None or not any(matches(known[1], glob) for glob in self.globs):
            return None
        return known[1]

    def multiply(self, input: Tensor, weight: Tensor, bias: Tensor | None, name: str) -> Tensor:
        """What a linear layer with a weight of this name gives."""
        self.read[name] = None
        x, w, b = autocast(input, weight, bias)
        assert x is not None and w is not None
        if x.dim() == 0 or w.dim() != 2 or x.dtype != w.dtype:
            result: Tensor = linear.apply(x, w, b)  # which says what is wrong
            return result
        if x.dim() == 1:
            return fp8_linear(x.unsqueeze(0), w, b, self.recipe).squeeze(0)
        return fp8_linear(x, w, b, self.recipe)

    def check_globs(self) -> None:
        """Raises InputError where a glob has matched no weight that a linear layer reads."""
        for glob in self.globs:
            if not any(matches(name, glob) for name in self.read):
                names = [name for _, name in self.names.values()]
                raise InputError(f"cf.fp8: where={glob!r} matches no weight that a linear layer of the step reads{near(glob, names)}")
