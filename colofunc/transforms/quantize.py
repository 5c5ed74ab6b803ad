"""quantize: weights in 8 or 4 bits, wherever they lie.

    step = cf.quantize(step_fn, "int8")
    step = cf.quantize(cf.shard(step_fn, mesh, zero(3, "dp")), "nf4", where="*.q_proj.weight")       # in any order

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any
from weakref import WeakValueDictionary

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from colofunc import compat
from colofunc.compiler.staged import Staged
from colofunc.compiler.step_compiler import stage
from colofunc.compiler.transform import Build, Transform
from colofunc.dtensor.roles import give_role, role_of
from colofunc.dtensor.tensor import DTensor
from colofunc.errors import InputError, PlanError, near
from colofunc.ops.canonical import autocast
from colofunc.ops.int8_products import PRODUCT, rounded_linear, takes
from colofunc.ops.quantized import DEQUANTIZE, FORMATS, Quantized
from colofunc.ops.quantized_frozen import opened, reading
from colofunc.ops.quantized_inputs import LinearCalls, divided, rounded_rows
from colofunc.ops.quantizers import Quantizer, misfit
from colofunc.planner.plan import matches
from colofunc.planner.schemes import SchemeChoice, SchemeErrors
from colofunc.planner.sharding.linked_rows import linked_rows
from colofunc.plugins import build_registry
from colofunc.program.lazy import LazyTensor
from colofunc.program.lazy_packed import packed_lazily
from colofunc.program.passes.packed_reads import PRODUCTS, packed_inputs, read_packed
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
    budget: str | int | None = None,
    keep: str | Iterable[str] = (),
    errors: SchemeErrors | None = None,
) -> Any:
    """The step with quantized weights, which it reads and does not train.

    scheme: "int8", "int8-dynamic", "fp8", "int4-g128", "nf4", "nf4-g64", "mxfp8", "nvfp4", a name that a plugin brings,
    `cf.gptq(moments)`, `cf.awq(moments)`, `cf.smoothquant(maxima)`, a `cf.ext.Quantizer`, or a choice of one for each
    weight: "auto", which is that of `errors.within(budget, keep)`, or what that returned. budget, keep, errors: for
    "auto", where `errors` comes from `cf.scheme_errors`. where: globs over the weights' own dotted names; of what they
    match, vectors stay (norms, biases). plugins: further plugins with schemes. As a decorator: `@cf.quantize("int8")`.
    Raises InputError, at once or when the step is traced, where scheme, globs or shapes do not fit.
    """
    if isinstance(step_fn, (str, Quantizer, SchemeChoice)):
        return partial(quantize, scheme=step_fn, where=where, plugins=plugins, budget=budget, keep=keep, errors=errors)
    globs = (where,) if isinstance(where, str) else tuple(where)
    if not globs or not all(isinstance(glob, str) for glob in globs):
        raise InputError(f"cf.quantize(where={where!r}): give a glob over names of weights, or several. Try: where='*.weight'")
    weights = _Weights(_chosen(budget, keep, errors) if scheme == AUTO else _quantizer(scheme, plugins, budget, keep, errors), globs)
    options = {"scheme": weights.name, "where": globs}
    transform = Transform(
        "quantize",
        options,
        wrap=partial(_wrapped, weights),
        grow=partial(_grown, weights),
        rewrite_global=_read_packed,
        constrain=_linked,
    )
    if isinstance(step_fn, Staged) and step_fn.transform("quantize") is not None:
        raise PlanError(
            "quantize is applied twice to one step. Try: one cf.quantize with the globs of all weights in where=; scheme 'auto', which "
            "chooses one for each weight"
        )
    return stage(step_fn, transform)


AUTO = "auto"
Schemes = Quantizer | SchemeChoice


def _chosen(budget: str | int | None, keep: str | Iterable[str], errors: SchemeErrors | None) -> SchemeChoice:
    if not isinstance(errors, SchemeErrors):
        raise InputError(
            f"cf.quantize(scheme='auto', errors={reprlib.repr(errors)}): a choice is made by what was measured. "
            "Try: errors=cf.scheme_errors(weights, cf.sensitivities(loss_fn)(params, batch))"
        )
    if budget is None:
        raise InputError("cf.quantize(scheme='auto', budget=None): give the bytes that all weights may take. Try: budget='2GiB'")
    return errors.within(budget, keep)


def _quantizer(scheme: Any, plugins: Sequence[Any], budget: object, keep: object, errors: object) -> Schemes:
    if budget is not None or keep != () or errors is not None:
        given = _short(scheme)
        raise InputError(f"cf.quantize(scheme={given}): budget, keep and errors are for scheme 'auto'. Try: where= for which weights")
    if isinstance(scheme, SchemeChoice):
        return scheme
    known = build_registry(tuple(plugins)).quantizers
    if isinstance(scheme, Quantizer):
        return scheme
    if not isinstance(scheme, str):
        raise InputError(f"cf.quantize(scheme={_short(scheme)}): give the name of a scheme ({', '.join(known)}), or a cf.ext.Quantizer")
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


# ---- which weights, and what they are packed to ----


# Weight -> {(quantizer, how often the weight had been written to): what it was packed to}. Steps that train and evaluate one model share
# it; it lives as long as one of their transforms.
_SHARED: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


@attrs.frozen(eq=False)
class _Weights:
    """What one transform quantizes. `known`: tensor -> (how often it had been written to, what it was packed to)."""

    quantizer: Schemes
    globs: tuple[str, ...]
    known: WeakTensorKeyDictionary = attrs.field(factory=WeakTensorKeyDictionary)

    @property
    def name(self) -> str:
        """What the scheme is called."""
        return AUTO if isinstance(self.quantizer, SchemeChoice) else self.quantizer.name

    def matched(self, name: str) -> bool:
        """Whether a glob matches."""
        return any(matches(name, glob) for glob in self.globs)

    def meant(self, name: str, weight: Tensor) -> bool:
        """Whether a glob matches a tensor that can be a weight, neither a vector nor a buffer or state, and that was
        not chosen to stay."""
        if not weight.is_floating_point() or weight.dim() < 2 or role_of(weight) in ("state", "buffer"):
            return False
        return self.matched(name) and self.scheme(name) is not None

    def stays(self, name: str) -> bool:
        """Whether a glob matches a weight that was chosen to stay as it is."""
        if not isinstance(self.quantizer, SchemeChoice) or not self.matched(name):
            return False
        chosen = self.quantizer.known(name)
        return chosen is not None and chosen.option.scheme is None

    def scheme(self, name: str) -> Quantizer | None:
        """The scheme of all weights, or that which was chosen for this one; None: it stays as it is."""
        return self.quantizer.scheme(name) if isinstance(self.quantizer, SchemeChoice) else self.quantizer

    def packed(self, name: str, weight: Tensor) -> Quantized:
        """The weight in the scheme. Raises InputError where it cannot be taken."""
        quantizer = self.scheme(name)
        assert quantizer is not None, "it is meant"
        why = quantizer.refuses(tuple(weight.shape))
        if why:
            raise InputError(
                f"cf.quantize: {name!r} has shape {tuple(weight.shape)}: {why}. Try: globs in where= that leave it out, or scheme 'int8'"
            )
        version = compat.version(weight)
        known = self.known.get(weight)
        if known is None or known[0] != version:
            shared = _SHARED.setdefault(weight, WeakValueDictionary())
            result = shared.get((quantizer, version))
            if result is None:
                result = shared[quantizer, version] = packed(quantizer.named(name), weight, name)
            known = self.known[weight] = version, result
        found: Quantized = known[1]
        return found

    def checked(self, name: str, weight: Quantized) -> Quantized:
        """A weight that comes quantized. Raises InputError where its numbers are not the scheme's, or its parts do not fit."""
        scheme = self.scheme(name) if self.matched(name) else None
        asked = "it to stay as it is" if scheme is None else repr(scheme.name)
        if self.matched(name) and (scheme is None or not _has_numbers_of(weight, scheme)):
            raise InputError(
                f"cf.quantize: {name!r} is quantized already, as {weight.scheme!r}, and the step asks for {asked}. Try: "
                "the scheme that it has, or the weight that it was quantized from"
            )
        wrong = misfit(weight)
        if wrong:
            raise InputError(
                f"cf.quantize: {name!r} is no weight of shape {weight.shape} in {weight.scheme!r}: {wrong}. Try: a checkpoint as cf.save "
                "writes it, or the weight that it was quantized from"
            )
        return weight

    def outliers(self, name: str) -> float | None:
        """From which size on inputs of a weight's layers stay as they are; None: all do."""
        if not self.matched(name):
            return None if isinstance(self.quantizer, SchemeChoice) else self.quantizer.outliers
        scheme = self.scheme(name)
        return None if scheme is None else scheme.named(name).outliers

    @property
    def leaves_inputs(self) -> bool:
        """Whether no scheme rounds inputs or divides them by a scale."""
        if isinstance(self.quantizer, SchemeChoice):
            return False  # asked of each weight
        return self.quantizer.outliers is None and self.quantizer.input_scale is None and self.quantizer.by_name is None

    def unmatched(self, names: Iterable[str]) -> str | None:
        """A glob that matches none of these names."""
        names = list(names)
        return next((glob for glob in self.globs if not any(matches(name, glob) for name in names)), None)


def _has_numbers_of(weight: Quantized, scheme: Quantizer) -> bool:
    """Whether a weight's numbers are those that the scheme would have given it, as of schemes that differ in what they do to inputs."""
    if weight.scheme == scheme.name:
        return True
    of_rows = scheme.by_name is None and not scheme.asks_all_rows and weight.input_scale is None
    own = build_registry().quantizers.get(weight.scheme)
    if own is None or own.by_name is not None:
        return False
    return of_rows and (own.form, own.quantize) == (scheme.form, scheme.quantize) and weight.form == scheme.form


def packed(quantizer: Quantizer, weight: Tensor, name: str = "weight") -> Quantized:
    """A weight in a scheme. Of one that is lazy the parts are lazy too: each is made of the rows that are asked for.

    Raises InputError where the weight has NaN or infinite numbers, a lazy one when it is made, or the quantizer breaks
    its format.
    """
    if isinstance(weight, DTensor) and (quantizer.by_name is not None or quantizer.input_scale is not None):
        weight = weight.full()  # columns one after the other, or something of all rows: not where they lie on several ranks
    with compat.disable_modes(), compat.no_function_modes(), torch.no_grad():
        if isinstance(weight, LazyTensor):
            found = packed_lazily(quantizer, weight, partial(_finite, name))
        else:
            found = _finite(name, quantizer.pack(weight))
    wrong = misfit(found)
    if wrong:
        raise InputError(
            f"cf.quantize: the quantizer {quantizer.name!r} gives {name!r} of shape {tuple(weight.shape)} wrong parts: {wrong}. Try: "
            "quantize= that returns them so"
        )
    give_role("frozen", found.tensors)
    return found


def _finite(name: str, weight: Quantized) -> Quantized:
    """The weight. Raises InputError where a scale is not finite, as of rows with NaN or infinite numbers."""
    for part in weight.tensors:
        for shard in part.parts if isinstance(part, DTensor) else (part,):
            known = not shard.is_meta and not isinstance(shard, compat.FakeTensor)
            if known and not _all_finite(shard, weight.format.nan if part is weight.scale else None):
                raise InputError(
                    f"cf.quantize: {name!r} has rows with NaN or infinite numbers, of which no scale can be made. Try: the weights of an "
                    "earlier checkpoint; globs in where= that leave it out"
                )
    return weight


def _all_finite(part: Tensor, nan: int | None) -> bool:
    """Whether all numbers of a part are. nan: what stands for one that is not, where they are kept as bits."""
    if nan is not None:
        return not bool((part == nan).any())
    return not part.is_floating_point() or bool(part.isfinite().all())


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


def _grown(weights: _Weights, build: Build) -> Build:
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


def _wrapped(weights: _Weights, build: Build) -> Build:
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

    def __init__(self, weights: _Weights) -> None:
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
        if glob is not None:
            known = near(glob, self.names)
            raise InputError(f"cf.quantize: where={glob!r} matches no weight of the step (tied ones go by their first name){known}")

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
