"""The transform that has a step read quantized weights.

Two or three plain tensors stand for a weight (`ops/quantized.py`). The step's own code is given the widened weight; in
the traced program a product that reads it reads the packed tensors instead, forward and backward, so that no widened
weight is left (`program/passes/packed_reads.py`). Another use (a table of embeddings, a convolution, a transposed
product) has it widened in front.

Which weights: those that are meant of the arguments that say to have some, else of argument 0 (`grow`; the state has a
`Quantized` in their place from then on), and the frozen weights of a model that the step captures (`wrap`), which are
read packed and stay what they are in the model. A weight that the step changes is an error: what is trained are
adapters beside it (`cf.lora`).

Some schemes round the inputs of linear layers too, or divide them by a scale: a function mode around the step does
(`ops/quantized_inputs.py`), so that the trace and the one-device reference compute the same. Rounded to int8 or float8
they are multiplied so with a weight that is (`ops/int8_products.py`, `ops/fp8_products.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

import attrs
import torch.nn.functional as F
from torch import Tensor

from colofunc import compat
from colofunc.compiler.quantized_weights import Schemes, WeightPacking
from colofunc.compiler.transform import Build, Transform
from colofunc.compiler.weight_arguments import says_weight
from colofunc.errors import InputError, near
from colofunc.mesh.sizes import size_text
from colofunc.ops import fp8, fp8_products, int8_products
from colofunc.ops.canonical import autocast
from colofunc.ops.measured import same_weight
from colofunc.ops.quantized import DEQUANTIZE, FORMATS, PACKED_READERS, Quantized
from colofunc.ops.quantized_frozen import opened_weight, reading
from colofunc.ops.quantized_inputs import LinearCalls, divided, rounded_rows
from colofunc.ops.quantizers import Quantizer
from colofunc.ops.updates import is_update
from colofunc.planner.plan import matches
from colofunc.planner.schemes import SchemeChoice
from colofunc.planner.sharding.linked_rows import linked_rows
from colofunc.program.ir import Node, Program
from colofunc.program.passes.packed_gathers import gathered_packed
from colofunc.program.passes.packed_reads import CAST, packed_inputs, read_packed
from colofunc.program.tracing.modules_used import other_names
from colofunc.program.tracing.roles import mark_role
from colofunc.program.tracing.tree import map_named

QUANTIZE = "quantize"
MOST_NAMED = 3
"""At most this many weights that stay as they are have their names in a plan."""
PARTS_BESIDE = ("scale", "zero", "outer", "input_scale")
"""What names of parts of a packed weight end in; its data have the weight's own."""

FORMAT_OF = {
    **DEQUANTIZE,
    **{reader: name for readers in PACKED_READERS.values() for name, reader in readers.items()},
    int8_products.PRODUCT: "int8",
}
"""Operator that reads a quantized weight -> its format; its parts are operands one after the other."""
SUMS = ("aten.add.Tensor", "aten.sub.Tensor")
"""Operators of a step that updates weights by itself."""
IN_FLOAT8 = (fp8.PRODUCTS[0], fp8_products.PRODUCT)
"""Products that read a weight in float8 as their second operand, and its scale as their fourth."""


def transform_of(
    quantizer: Schemes,
    globs: tuple[str, ...],
    registered: Mapping[str, Quantizer],
    sketches: list[Quantized] | None = None,
    **further: Any,
) -> Transform:
    """The transform with a scheme, or with a choice of one for each weight. registered, sketches: as in
    `WeightPacking`.
    """
    weights = WeightPacking(quantizer, globs, registered, sketches)
    return Transform(
        QUANTIZE,
        {"scheme": weights.name, "where": globs},
        wrap=partial(_wrapped, weights),
        grow=partial(_grown, weights),
        rewrite_global=_read_packed,
        constrain=_linked,
        rewrite_local=_gathered_packed,
        says=partial(_said, weights),
        **further,
    )


# ---- the state ----

Walked = Callable[[str, Any], Any]


def mapped(fn: Walked, obj: Any) -> Any:
    """A tree with `fn(name, leaf)` for every tensor and every quantized weight.

    The same object where nothing changes.
    """
    return map_named(fn, obj, (Tensor, Quantized))


def found_in(obj: Any) -> Iterator[tuple[str, Tensor | Quantized]]:
    """(name, leaf) of every tensor and every quantized weight of a tree."""
    found: list[tuple[str, Tensor | Quantized]] = []

    def note(name: str, leaf: Any) -> Any:
        found.append((name, leaf))
        return leaf

    mapped(note, obj)
    yield from found


def _grown(weights: WeightPacking, build: Build) -> Build:
    """The arguments with the weights that are meant quantized."""
    arguments = [build.state, *build.others]
    for place in _with_weights(weights, arguments):
        arguments[place] = _with_packed(weights, arguments[place])
    return build.evolve(state=arguments[0], others=tuple(arguments[1:]))


def _with_weights(weights: WeightPacking, arguments: Sequence[Any]) -> list[int]:
    """The places of the arguments whose weights are quantized.

    Argument 0, if what is meant there says itself that it is a weight, or if nothing that is meant anywhere does; a
    weight of a user's own does not. Else those where it does.
    """
    found: list[int] = []
    for place, argument in enumerate(arguments):
        for name, leaf in found_in(argument):
            if isinstance(leaf, Quantized) or (weights.meant(name, leaf) and says_weight(leaf)):
                found.append(place)
                break
    return [0] if not found or found[0] == 0 else found


def _with_packed(weights: WeightPacking, argument: Any) -> Any:
    """An argument with the weights that are meant quantized. Raises InputError where one is tied to another."""
    meant: dict[int, str] = {}
    for name, leaf in found_in(argument):
        if isinstance(leaf, Tensor) and weights.meant(name, leaf):
            meant[id(leaf)] = name
    for name, leaf in found_in(argument):
        if id(leaf) in meant and isinstance(leaf, Tensor) and not weights.meant(name, leaf):
            raise InputError(
                f"cf.quantize: {meant[id(leaf)]!r} is tied to {name!r}, which where= leaves as it is, so that the two "
                "would differ. Try: globs for both of them, or for neither"
            )

    def pack(name: str, leaf: Any) -> Any:
        if isinstance(leaf, Quantized):
            return weights.checked(name, leaf)
        return weights.packed(name, leaf) if id(leaf) in meant else leaf

    return mapped(pack, argument)


# ---- the step ----


def _wrapped(weights: WeightPacking, build: Build) -> Build:
    fn = build.fn

    @wraps(fn)
    def stepped(*args: Any) -> Any:
        given = _Given(weights)
        opened_args = [mapped(partial(given.open, place), argument) for place, argument in enumerate(args)]
        with given.reading(), given.rounding():
            out = fn(*opened_args)
        given.check_written()
        given.check_globs()
        out = mapped(given.close, out)
        if args:
            given.check_unchanged(args[0], out)
        return out

    return build.evolve(fn=stepped)


@attrs.frozen
class _Widened:
    """What the step's code is given in a packed weight's place, and how often it had been written to then."""

    wide: Tensor
    leaf: Quantized
    version: int


class _Given:
    """The weights of one run of a step: what its code was given in place of which."""

    def __init__(self, weights: WeightPacking) -> None:
        self.weights = weights
        self.names: dict[str, None] = {}  # of all weights that the run has met
        self.unsaid: dict[str, int] = {}  # name of what was not packed, as it does not say what it is -> its argument
        self.quantized: dict[str, None] = {}
        self.widened: dict[int, _Widened] = {}  # by the id of the tensor that the code was given
        # id of a quantized weight -> the scheme that rounds its inputs
        self.rounding_of: dict[int, Quantizer | None] = {}

    def open(self, place: int, name: str, leaf: Any) -> Any:
        """What the step's code is given for a leaf of argument `place`."""
        if name:  # an argument that is a tensor itself has none
            self.names[name] = None
        if not isinstance(leaf, Quantized):
            if place > 0 and self.weights.meant(name, leaf):
                self.unsaid.setdefault(name, place)
            return leaf
        self.quantized[name] = None
        mark_role("frozen", leaf.tensors)
        self.rounding_of[id(leaf)] = self.weights.rounding(name)
        wide = opened_weight(leaf)
        self._note(wide, leaf)
        return wide

    def close(self, name: str, leaf: Any) -> Any:
        """The quantized weight again, where a result is what the code was given."""
        known = self.widened.get(id(leaf))
        return leaf if known is None else known.leaf

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Inside, models read the frozen weights that are meant as quantized ones."""
        with reading(self._packed, self._note):
            yield

    def rounding(self) -> AbstractContextManager[Any]:
        """Inside, linear layers with quantized weights divide and round their inputs, where the scheme does."""
        if self.weights.leaves_inputs and all(one.leaf.input_scale is None for one in self.widened.values()):
            return nullcontext()
        return LinearCalls(self._leaf, self._layer)

    def _leaf(self, weight: Tensor) -> Quantized | None:
        known = self.widened.get(id(weight))
        return None if known is None else known.leaf

    def _layer(self, input: Tensor, weight: Tensor, bias: Tensor | None, leaf: Quantized) -> Tensor:
        """What a linear layer gives that reads a widened weight: with inputs rounded too a product of whole numbers or
        in float8, where it can be.
        """
        if leaf.input_scale is not None:
            input = divided(input, leaf.input_scale)
        scheme = self.rounding_of[id(leaf)]
        if scheme is not None:
            x, w, b = autocast(input, weight, bias)
            assert x is not None and w is not None
            if scheme.float8_inputs and fp8_products.takes(x, w, b, leaf.form):
                return fp8_products.rounded_linear(x, b, leaf.data, leaf.scale, leaf.form)
            if scheme.outliers is not None:
                if int8_products.takes(x, w, b, leaf.form):
                    return int8_products.rounded_linear(x, b, leaf.data, leaf.scale, scheme.outliers)
                input = rounded_rows.apply(input, scheme.outliers)
        return F.linear(input, weight if leaf.input_scale is None else leaf.for_divided_inputs(weight.dtype), bias)

    def _note(self, wide: Tensor, leaf: Quantized) -> None:
        self.widened[id(wide)] = _Widened(wide, leaf, compat.version(wide))

    def _packed(self, frozen: Mapping[str, Tensor]) -> dict[str, Tensor | Quantized]:
        found: dict[str, Tensor | Quantized] = {}
        for name, weight in frozen.items():
            self.names[name] = None
            if self.weights.meant(name, weight):
                self.quantized[name] = None
                found[name] = leaf = self.weights.packed(name, weight)
                self.rounding_of[id(leaf)] = self.weights.rounding(name)
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
        for name, place in self.unsaid.items():
            if matches(name, glob):
                raise InputError(
                    f"cf.quantize: where={glob!r} matches {name!r} of argument {place}, which does not say that it is a "
                    "weight, and tensors that do not are looked for in argument 0. Try: cf.functional(module).params or an "
                    "nn.Parameter, which say it in any argument; or the weights as argument 0"
                )
        for name in self.names:
            if matches(name, glob):
                raise InputError(
                    f"cf.quantize: where={glob!r} matches {name!r}, which is no weight: these have two dims and more of "
                    "floating numbers, and are in an argument or frozen in a model. Try: globs of such weights"
                )
        if not self.names:
            raise InputError(
                f"cf.quantize: where={glob!r} matches no weight: no argument has one by name, and the step reads no frozen "
                "ones. Try: model = cf.functional(module, trainable=()), and model.apply in the step; or the weights as "
                "argument 0"
            )
        raise InputError(f"cf.quantize: where={glob!r} matches no weight of the step{near(glob, self.names)}")

    def check_written(self) -> None:
        """Raises InputError where the step has written to a widened weight, which nobody would see."""
        for one in self.widened.values():
            if compat.version(one.wide) != one.version:
                raise InputError(
                    f"cf.quantize: the step writes in place to a weight of {tuple(one.leaf.shape)}, and a quantized weight does "
                    "not change. Try: a new value beside it (weight * 0.5), or globs in where= that leave it out"
                )

    def check_unchanged(self, state: Any, out: Any) -> None:
        """Raises InputError where the step returns another value for a quantized weight."""
        new = dict(found_in(out[0] if isinstance(out, tuple) and out else out))
        for name, leaf in found_in(state):
            after = new.get(name)
            if isinstance(leaf, Quantized) and isinstance(after, Tensor) and tuple(after.shape) == leaf.shape:
                raise _trained(name)


def _trained(name: str, output: str = "") -> InputError:
    """The error of a step that returns another value for a quantized weight. output: which one, if not the first."""
    where = f" as output {output!r}" if output else ""
    return InputError(
        f"cf.quantize: the step returns {name!r} changed{where}, and a quantized weight is not trained. Try: globs in "
        "where= that leave out what is trained; model = cf.lora(model, ...), which trains adapters beside frozen weights"
    )


# ---- the program ----


def _read_packed(build: Build) -> Build:
    _check_outputs(build.program, build.traced.out_names)
    return build.evolve(program=read_packed(build.program))


def _check_outputs(program: Program, names: Sequence[str]) -> None:
    """Raises InputError where an output is a quantized weight that was updated.

    By its name and shape alone it might be a gradient, so what has made it counts: an optimizer's update; or a sum with
    the weight, where it has the weight's name.
    """
    for id, output in zip(program.outputs, names, strict=False):
        node = program.makers.get(id)
        if node is None or not (is_update(node.target) or node.target in SUMS):
            continue
        weight = _widened_from(program, node.refs[0])
        if weight is None:
            continue
        # Of "out.1.up.weight" and "params.up.weight", what lies within the output and within the argument.
        within_output, within_argument = output.split(".", 2)[2:], weight.split(".", 1)[1:]
        has_its_name = bool(within_output and within_argument) and same_weight(within_output[0], within_argument[0])
        if is_update(node.target) or has_its_name:
            raise _trained(weight, output)


def _widened_from(program: Program, id: int) -> str | None:
    """The name of the quantized weight that a value is, widened, in whatever dtype; None: it is none."""
    node = program.makers.get(id)
    while node is not None and node.target == CAST:
        node = program.makers.get(node.refs[0])
    if node is None or node.target not in DEQUANTIZE:
        return None
    return program.values[node.refs[0]].name


def _gathered_packed(build: Build) -> Build:
    """A weight that a plan widens on its shard and gathers wide is gathered packed, and widened behind that."""
    return build.evolve(program=gathered_packed(build.program))


def _parts_read(node: Node) -> tuple[int, ...]:
    """The operands of a node that are parts of a weight; none where it reads no packed one."""
    if node.target in IN_FLOAT8:
        return node.refs[1], node.refs[3]
    form = FORMAT_OF.get(node.target)
    if form is None:
        return ()
    first = 0 if node.target in DEQUANTIZE else 1
    return tuple(node.refs[first : first + len(FORMATS[form].parts)])


def _packed_weights(program: Program) -> dict[tuple[int, ...], None]:
    """Of each packed weight that is read, the inputs that are its parts."""
    found: dict[tuple[int, ...], None] = {}
    for node in program.nodes:
        parts = packed_inputs(program, _parts_read(node))
        if parts:
            found[parts] = None
    return found


def _linked(build: Build) -> Build:
    """The parts of a weight lie alike along its rows."""
    groups = _packed_weights(build.program)
    return build.evolve(constraints=linked_rows(build.program, build.mesh, build.constraints, groups))


def _said(weights: WeightPacking, program: Program, local: Program) -> list[str]:
    """How many weights are read packed, and which others could have been meant; a choice of schemes has its own line."""
    if isinstance(weights.quantizer, SchemeChoice):
        return []
    packed = _packed_weights(program)
    parts = {id for ids in packed for id in ids}
    nbytes = sum(program.values[id].nbytes for id in parts)
    trained = {program.inputs[position] for _, position in program.aliases}
    # Of a packed weight that nobody reads: its data have no floating numbers.
    data = {program.values[id].name for id in program.inputs if not program.values[id].dtype.is_floating_point}
    unread = {f"{name}.{part}" for name in data for part in PARTS_BESIDE}
    wide = []
    for id in program.inputs:
        value = program.values[id]
        if value.name in unread:
            continue
        matrix = value.role in ("param", "frozen") and value.dtype.is_floating_point and len(value.shape) >= 2
        if matrix and id not in parts and id not in trained:
            wide.append(repr(value.name))
    line = f"weights in {weights.name}: {len(packed)}, {size_text(nbytes)}"
    if wide:
        more = f" and {len(wide) - MOST_NAMED} more" if len(wide) > MOST_NAMED else ""
        line += f"; as they were: {', '.join(wide[:MOST_NAMED])}{more}"
    return [line]
