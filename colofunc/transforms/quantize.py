"""quantize: weights in 8 or 4 bits, wherever they lie.

    step = cf.quantize(step_fn, "int8")
    step = cf.quantize(cf.shard(step_fn, mesh, zero(3, "dp")), "nf4", where="*.q_proj.weight")       # in any order
    step = cf.quantize(cf.shard(step_fn, mesh, zero(2, "dp")), wire="int8", error_feedback=True)      # gradients (`compiler/wire.py`)

Problem: a quantized weight is a tensor of another kind in most libraries, so nothing that works on tensors works on it.
Idea: it is two or three plain tensors (`colofunc/ops/quantized.py`), which a plan, a checkpoint or a copy treats like
any other. The step's own code is given the widened weight; in the traced program a product that reads it reads the
packed tensors instead, forward and backward, so that no widened weight is left. Another use (a table of embeddings, a
convolution, a transposed product) has it widened in front.

Which weights: those of argument 0 that `where` matches (`grow`; the state has a `Quantized` in their place from then
on), and the frozen weights of a model that the step captures (`wrap`), which are read packed and stay what they are in
the model. A weight that the step changes is an error: what is trained are adapters beside it (`cf.lora`).

Some schemes round the inputs of linear layers too, or divide them by a scale: a function mode around the step does
(`colofunc/ops/quantized_inputs.py`), so that the trace and the one-device reference compute the same.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

import attrs
import torch.nn.functional as F
from torch import Tensor

from colofunc.compiler.quantized_weights import AUTO, Schemes, Weights
from colofunc.compiler.staged import Staged
from colofunc.compiler.step_compiler import stage
from colofunc.compiler.transform import Build, Open, Transform
from colofunc.compiler.wire import WIRE, narrow_wire
from colofunc.compiler.wire import error_feedback as residuals_kept
from colofunc.errors import InputError, PlanError, near
from colofunc.mesh.sizes import Room, parse_room
from colofunc.ops.canonical import autocast
from colofunc.ops.int8_products import PRODUCT, rounded_linear, takes
from colofunc.ops.measured import same_weight
from colofunc.ops.quantized import DEQUANTIZE, FORMATS, Quantized
from colofunc.ops.quantized_frozen import opened, reading
from colofunc.ops.quantized_inputs import LinearCalls, divided, rounded_rows
from colofunc.ops.quantizers import Quantizer
from colofunc.ops.wire import scheme_of
from colofunc.planner.plan import matches
from colofunc.planner.scheme_search import Finished, Picks, choice_of, search
from colofunc.planner.schemes import AS_IT_IS, SchemeChoice, SchemeErrors, Tried, WeightOptions
from colofunc.planner.sharding.linked_rows import linked_rows
from colofunc.planner.weight_seconds import weight_seconds
from colofunc.plugins import build_registry
from colofunc.program.passes.packed_reads import PRODUCTS, packed_inputs, read_packed
from colofunc.program.tracing.modules_used import other_names
from colofunc.program.tracing.roles import mark
from colofunc.program.tracing.tree import container, join, rebuild

FORMAT_OF = {
    **DEQUANTIZE,
    **{f"colofunc.{name}_{kind}": name for name in FORMATS for kind in PRODUCTS.values()},
    PRODUCT: "int8",
}
"""Operator that reads a quantized weight -> its format."""


def quantize(
    step_fn: Callable[..., Any] | str | Quantizer | None = None,
    scheme: str | Quantizer | None = None,
    where: str | Iterable[str] = "*.weight",
    plugins: Sequence[Any] = (),
    *,
    wire: str | None = None,
    error_feedback: bool = False,
    errors: SchemeErrors | None = None,
    keep: str | Iterable[str] = (),
    budget: str | int | float | None = None,
    rise: float | None = None,
    limit_s: float | None = None,
) -> Any:
    """The step with quantized weights, which it reads and does not train, or with gradients that are sent in 8 or 4 bits; or both.

    scheme: "int8", "int8-dynamic", "fp8", "fp8-g128", "int4-g128", "nf4", "nf4-g64", "mxfp8", "nvfp4", a name that a
    plugin brings, `cf.gptq(moments)`, `cf.awq(moments)`, `cf.smoothquant(maxima)`, a `cf.ext.Quantizer`, a choice of one
    for each weight (`errors.within(...)`, `cf.scheme_choice(step, ...)`), or "auto". where: globs over the weights' own dotted
    names; of what they match, vectors stay (norms, biases). plugins: further plugins with schemes. As a decorator:
    `@cf.quantize("int8")`.

    "auto" chooses for each weight at the first call, together with sharding, recomputation and offload: the whole chain
    is finished with one choice after the other, and of those that fit its budgets the best is taken. errors: of
    `cf.scheme_errors`. keep: globs over names of weights that stay as they are. budget: device memory of a rank, as in
    `cf.offload`; None: what the rest of the chain, or the topology, says. rise: the loss may rise by so much at most;
    the fastest step is taken. limit_s: a step may take so many seconds at most; without `rise`, what is taken has the
    least error.

    wire: "int8", "int4" or "fp8", with the numbers that share a scale behind it if you like ("int8-g128"; 256, 64 and 256 if you do not):
    how gradients are sent where ranks sum them. With a mesh of n ranks each of them rounds its term once, so a number of the sum is off
    by at most the sum over ranks of A / 254 (int8), A / 14 (int4) or max(|x| / 16, A / 458752) (fp8), A being the largest of the group
    that its term x is in, and where all ranks have the sum once more by that of the sum itself (`colofunc/ops/wire.py`). A group with a
    number that is not finite arrives as NaN. Sums of fewer than 2,048 numbers, and of other dtypes than floating ones, stay as they are.
    On a mesh that sums no gradients it changes nothing, and the plan says so. error_feedback: what a rank did not send is kept in the
    state, and added to its next gradient.

    Raises InputError, at once or when the step is traced, where scheme, globs or shapes do not fit; "auto" PlanError
    where nothing fits.
    """
    if wire is not None or error_feedback:
        weights = {"where": where, "plugins": plugins, "errors": errors, "keep": keep, "budget": budget, "rise": rise, "limit_s": limit_s}
        return _with_wire(step_fn, scheme, wire, error_feedback, weights)
    auto: dict[str, Any] = {"errors": errors, "keep": keep, "budget": budget, "rise": rise, "limit_s": limit_s}
    if isinstance(step_fn, (str, Quantizer, SchemeChoice)):
        return partial(quantize, scheme=step_fn, where=where, plugins=plugins, **auto)
    globs = (where,) if isinstance(where, str) else tuple(where)
    if not globs or not all(isinstance(glob, str) for glob in globs):
        raise InputError(f"cf.quantize(where={where!r}): give a glob over names of weights, or several. Try: where='*.weight'")
    if scheme == AUTO:
        transform = _Auto.of(globs, **auto).transform()
    else:
        transform = transform_of(_quantizer(scheme, plugins, auto), globs)
    if isinstance(step_fn, Staged) and step_fn.transform("quantize") is not None:
        raise PlanError(
            "quantize is applied twice to one step. Try: one cf.quantize with the globs of all weights in where=; scheme 'auto', which "
            "chooses one for each weight"
        )
    return stage(step_fn, transform)


def _with_wire(step_fn: Any, scheme: Any, wire: str | None, error_feedback: bool, weights: Mapping[str, Any]) -> Any:
    """The step with gradients that are sent narrow, and with quantized weights where a scheme is given."""
    if wire is None:
        raise InputError("cf.quantize(error_feedback=True) is about gradients that are sent narrow. Try: wire='int8' beside it")
    sent = scheme_of(wire)
    if isinstance(step_fn, (str, Quantizer, SchemeChoice)):
        step_fn, scheme = None, step_fn
    if step_fn is None:
        return partial(_with_wire, scheme=scheme, wire=wire, error_feedback=error_feedback, weights=weights)
    if scheme is not None:
        step_fn = quantize(step_fn, scheme, **weights)
    if isinstance(step_fn, Staged) and step_fn.transform(WIRE) is not None:
        raise PlanError("quantize(wire=...) is applied twice to one step. Try: one of them")
    step_fn = stage(step_fn, narrow_wire(sent))
    return stage(step_fn, residuals_kept()) if error_feedback else step_fn


def transform_of(quantizer: Schemes, globs: tuple[str, ...], sketches: list[Quantized] | None = None, **further: Any) -> Transform:
    """The transform with a scheme, or with a choice of one for each weight. sketches: as in `Weights`."""
    weights = Weights(quantizer, globs, sketches)
    return Transform(
        "quantize",
        {"scheme": weights.name, "where": globs},
        wrap=partial(_wrapped, weights),
        grow=partial(_grown, weights),
        rewrite_global=_read_packed,
        constrain=_linked,
        **further,
    )


def _quantizer(scheme: Any, plugins: Sequence[Any], auto: Mapping[str, Any]) -> Schemes:
    given = [name for name, value in auto.items() if value is not None and not (isinstance(value, Sized) and not value)]
    if given:
        raise InputError(f"cf.quantize(scheme={_short(scheme)}): {', '.join(given)} is for scheme 'auto'. Try: where= for which weights")
    if isinstance(scheme, SchemeChoice):
        return scheme
    known = build_registry(tuple(plugins)).quantizers
    if isinstance(scheme, Quantizer):
        return scheme
    if not isinstance(scheme, str):
        raise InputError(
            f"cf.quantize(scheme={_short(scheme)}): give the name of a scheme ({', '.join(known)}), or a cf.ext.Quantizer, or wire= for "
            "gradients alone"
        )
    if scheme not in known:
        raise InputError(f"cf.quantize: there is no scheme {scheme!r}{near(scheme, known, 'schemes')}")
    return known[scheme]


def _short(scheme: Any) -> str:
    """A scheme in an error: without the weights of a choice, or what a quantizer has measured."""
    if isinstance(scheme, SchemeChoice):
        return f"a choice for {len(scheme.weights)} weights"
    if isinstance(scheme, Quantizer):
        return f"the scheme {scheme.name!r}"
    return reprlib.repr(scheme)


# ---- a choice with the whole step ----


@attrs.frozen(eq=False)
class _Auto:
    """What "auto" is asked for."""

    globs: tuple[str, ...]
    weights: tuple[WeightOptions, ...]
    room: Room | None
    rise: float | None
    limit_s: float | None

    @staticmethod
    def of(globs: tuple[str, ...], errors: Any, keep: Any, budget: Any, rise: Any, limit_s: Any) -> _Auto:
        """Raises InputError where something is missing, or is no limit."""
        if not isinstance(errors, SchemeErrors):
            raise InputError(
                f"cf.quantize(scheme='auto', errors={reprlib.repr(errors)}): a choice is made by what was measured. "
                "Try: errors=cf.scheme_errors(weights, cf.sensitivities(loss_fn)(params, batch))"
            )
        for name, limit in (("rise", rise), ("limit_s", limit_s)):
            is_number = isinstance(limit, (int, float)) and not isinstance(limit, bool)
            if limit is not None and not (is_number and limit >= 0):
                raise InputError(f"cf.quantize(scheme='auto', {name}={limit!r}): give a number, 0 or more. Try: {name}=1e-3")
        room = None if budget is None else parse_room(budget, "cf.quantize(budget=)")
        weights = []
        for weight in errors.kept(keep):
            matched = any(matches(weight.name, glob) for glob in globs)
            stays = weight.stays or f"where={globs!r} leaves it out"
            weights.append(weight if matched else attrs.evolve(weight, options=weight.options[:1], stays=stays))
        return _Auto(globs, tuple(weights), room, rise, limit_s)

    def transform(self) -> Transform:
        limits = {"rise": self.rise, "limit_s": self.limit_s}
        return Transform("quantize", {"scheme": AUTO, "where": self.globs, **limits}, budget=self.room, open=self.open)

    def open(self, args: tuple[Any, ...]) -> Open:
        """A state that is quantized already is taken as it is."""
        weights = self.weights
        kept = {name: leaf.scheme for name, leaf in found_in(args[0] if args else ()) if isinstance(leaf, Quantized)}
        if kept:
            weights = tuple(_as_kept(weight, kept) for weight in weights)
        tried: list[Tried] = []
        sketches: list[Quantized] = []
        return Open(
            partial(self.closed, weights, tried, None),
            partial(self.search, weights, tried),
            partial(self.closed, weights, tried, sketches),
            partial(self.recalled, weights),
        )

    def closed(
        self, weights: tuple[WeightOptions, ...], tried: Sequence[Tried], sketches: list[Quantized] | None, picks: Picks
    ) -> Transform:
        """The transform with these options. tried: what is known so far of others. sketches: as in `Weights`."""
        choice = choice_of(weights, picks, tried)
        notes = (f"schemes of weights: {choice.sentence()}",)
        return transform_of(
            choice, self.globs, sketches, budget=self.room, decided=choice, taken=tuple(choice.schemes.items()), notes=notes
        )

    def recalled(self, weights: tuple[WeightOptions, ...], taken: Mapping[str, str]) -> Picks:
        """The choice that a plan says. Raises PlanError where it may not be chosen here."""
        remedy = "Try: errors=, keep= and where= that the plan was made with; the step without a plan, which chooses anew"
        names = [weight.name for weight in weights]
        for name in taken:
            if name not in names:
                raise PlanError(f"cf.quantize(scheme='auto'): the plan has {name!r}, of which nothing was measured here. {remedy}")
        picks = []
        for weight in weights:
            options = [option.name for option in weight.options]
            scheme = taken.get(weight.name)
            if scheme not in options:
                has = "no scheme" if scheme is None else repr(scheme)
                raise PlanError(
                    f"cf.quantize(scheme='auto'): the plan has {has} for {weight.name!r}, and here it may be: {', '.join(options)}. "
                    f"{remedy}"
                )
            picks.append(options.index(scheme))
        error = choice_of(weights, tuple(picks)).error
        if self.rise is not None and error > self.rise:
            raise PlanError(
                f"cf.quantize(scheme='auto', rise={self.rise}): with the schemes of the plan the loss rises by {error:.1e}. {remedy}"
            )
        return tuple(picks)

    def search(self, weights: tuple[WeightOptions, ...], tried: list[Tried], lower: Callable[[Any], Any]) -> Picks:
        names = [weight.name for weight in weights]

        def finish(picks: Picks) -> Finished:
            low = lower(picks)
            choice = choice_of(weights, picks)
            if isinstance(low, str):
                tried.append(Tried(choice.nbytes, choice.error, None, None, low))
                return Finished(why=low)
            peak_bytes, seconds = low.memory().peak_bytes["device"], low.lanes().end_s
            tried.append(Tried(choice.nbytes, choice.error, peak_bytes, seconds))
            return Finished(peak_bytes, seconds, weight_seconds(low.program, low.priced, low.registry.rule, names))

        return search(weights, finish, self.rise, self.limit_s)


def _as_kept(weight: WeightOptions, kept: Mapping[str, str]) -> WeightOptions:
    """A weight of a state that is quantized: as it lies there."""
    scheme = next((scheme for name, scheme in kept.items() if same_weight(name, weight.name)), AS_IT_IS)
    option = weight.option(scheme)
    if option is None:
        return weight  # in a scheme that was not measured; the step says what is wrong
    return attrs.evolve(weight, options=(option,), stays="it lies so in the state")


# ---- the state ----

Walked = Callable[[str, Any], Any]


def mapped(fn: Walked, obj: Any, name: str = "") -> Any:
    """A tree with `fn(name, leaf)` for every tensor and every quantized weight; the same object where nothing
    changes."""
    if isinstance(obj, (Tensor, Quantized)):
        return fn(name, obj)
    parts = container(obj)
    if parts is None:
        return obj
    kind, keys, items, context = parts
    made = [mapped(fn, item, join(name, key)) for key, item in zip(keys, items, strict=True)]
    if all(new is old for new, old in zip(made, items, strict=True)):
        return obj
    return rebuild(kind, type(obj), keys, made, context)


def found_in(obj: Any) -> Iterator[tuple[str, Tensor | Quantized]]:
    """(name, leaf) of every tensor and every quantized weight of a tree."""
    found: list[tuple[str, Tensor | Quantized]] = []

    def note(name: str, leaf: Any) -> Any:
        found.append((name, leaf))
        return leaf

    mapped(note, obj)
    yield from found


def _grown(weights: Weights, build: Build) -> Build:
    """Argument 0 with the weights that are meant quantized."""
    meant: dict[int, str] = {}
    for name, leaf in found_in(build.state):
        if isinstance(leaf, Tensor) and weights.meant(name, leaf):
            meant[id(leaf)] = name
    for name, leaf in found_in(build.state):
        if id(leaf) in meant and isinstance(leaf, Tensor) and not weights.meant(name, leaf):
            raise InputError(
                f"cf.quantize: {meant[id(leaf)]!r} is tied to {name!r}, which where= leaves as it is, so that the two would differ. Try: "
                "globs for both of them, or for neither"
            )

    def pack(name: str, leaf: Any) -> Any:
        if isinstance(leaf, Quantized):
            return weights.checked(name, leaf)
        return weights.packed(name, leaf) if id(leaf) in meant else leaf

    return build.evolve(state=mapped(pack, build.state))


# ---- the step ----


def _wrapped(weights: Weights, build: Build) -> Build:
    fn = build.fn

    @wraps(fn)
    def stepped(*args: Any) -> Any:
        given = _Given(weights)
        opened_args = [mapped(given.open, argument) for argument in args]
        with given.reading(), given.rounding():
            out = fn(*opened_args)
        given.check_globs()
        out = mapped(given.close, out)
        if args:
            given.check_unchanged(args[0], out)
        return out

    return build.evolve(fn=stepped)


class _Given:
    """The weights of one run of a step: what its code was given in place of which."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.names: dict[str, None] = {}  # of all weights that the run has met
        self.quantized: dict[str, None] = {}
        self.originals: dict[int, tuple[Tensor, Quantized]] = {}  # id of a widened weight -> itself, what it was made of
        self.outliers: dict[int, float | None] = {}  # id of a quantized weight -> the size of inputs that are not rounded

    def open(self, name: str, leaf: Any) -> Any:
        """What the step's code is given for a leaf of its arguments."""
        if name:  # an argument that is a tensor itself has none
            self.names[name] = None
        if not isinstance(leaf, Quantized):
            return leaf
        self.quantized[name] = None
        mark("frozen", leaf.tensors)
        self.outliers[id(leaf)] = self.weights.outliers(name)
        wide = opened(leaf)
        self._note(wide, leaf)
        return wide

    def close(self, name: str, leaf: Any) -> Any:
        """The quantized weight again, where a result is what the code was given."""
        known = self.originals.get(id(leaf))
        return leaf if known is None else known[1]

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Inside, models read the frozen weights that are meant as quantized ones."""
        with reading(self._packed, self._note):
            yield

    def rounding(self) -> AbstractContextManager[Any]:
        """Inside, linear layers with quantized weights divide and round their inputs, where the scheme does."""
        if self.weights.leaves_inputs and all(leaf.input_scale is None for _, leaf in self.originals.values()):
            return nullcontext()
        return LinearCalls(self._leaf, self._layer)

    def _leaf(self, weight: Tensor) -> Quantized | None:
        known = self.originals.get(id(weight))
        return None if known is None else known[1]

    def _layer(self, input: Tensor, weight: Tensor, bias: Tensor | None, leaf: Quantized) -> Tensor:
        """What a linear layer gives that reads a widened weight: with inputs rounded too a product of whole numbers, where it can be."""
        if leaf.input_scale is not None:
            input = divided(input, leaf.input_scale)
        outliers = self.outliers[id(leaf)]
        if outliers is not None:
            x, w, b = autocast(input, weight, bias)
            assert x is not None and w is not None
            if takes(x, w, b, leaf.form):
                return rounded_linear(x, b, leaf.data, leaf.scale, outliers)
            input = rounded_rows.apply(input, outliers)
        return F.linear(input, weight if leaf.input_scale is None else leaf.for_divided_inputs(weight.dtype), bias)

    def _note(self, wide: Tensor, leaf: Quantized) -> None:
        self.originals[id(wide)] = wide, leaf

    def _packed(self, frozen: Mapping[str, Tensor]) -> dict[str, Tensor | Quantized]:
        found: dict[str, Tensor | Quantized] = {}
        for name, weight in frozen.items():
            self.names[name] = None
            if self.weights.meant(name, weight):
                self.quantized[name] = None
                found[name] = leaf = self.weights.packed(name, weight)
                self.outliers[id(leaf)] = self.weights.outliers(name)
            else:
                found[name] = weight
        return found

    def check_globs(self) -> None:
        """Raises InputError where a glob has matched nothing that can be quantized."""
        stay = [name for name in self.names if self.weights.stays(name)]
        glob = self.weights.unmatched([*self.quantized, *stay])
        if glob is None:
            return
        for name, first in other_names().items():
            if matches(name, glob):
                raise InputError(
                    f"cf.quantize: where={glob!r} matches {name!r}, which is tied to {first!r} and goes by that name. "
                    f"Try: where={first!r}, which quantizes it wherever it is read"
                )
        raise InputError(f"cf.quantize: where={glob!r} matches no weight of the step{near(glob, self.names)}")

    def check_unchanged(self, state: Any, out: Any) -> None:
        """Raises InputError where the step returns another value for a quantized weight."""
        new = dict(found_in(out[0] if isinstance(out, tuple) and out else out))
        for name, leaf in found_in(state):
            after = new.get(name)
            if isinstance(leaf, Quantized) and isinstance(after, Tensor) and tuple(after.shape) == leaf.shape:
                raise InputError(
                    f"cf.quantize: the step returns {name!r} changed, and a quantized weight is not trained. Try: globs in where= that "
                    "leave out what is trained; model = cf.lora(model, ...), which trains adapters beside frozen weights"
                )


# ---- the program ----


def _read_packed(build: Build) -> Build:
    return build.evolve(program=read_packed(build.program))


def _linked(build: Build) -> Build:
    """The parts of a weight lie alike along its rows."""
    groups: dict[tuple[int, ...], None] = {}
    for node in build.program.nodes:
        form = FORMAT_OF.get(node.target)
        if form is None:
            continue
        first = 0 if node.target in DEQUANTIZE else 1
        parts = packed_inputs(build.program, node.refs[first : first + len(FORMATS[form].parts)])
        if parts is not None:
            groups[parts] = None
    return build.evolve(constraints=linked_rows(build.program, build.mesh, build.constraints, groups))
