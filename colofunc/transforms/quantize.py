"""quantize: weights, activations, caches, and gradients on the wire in 8 or 4 bits, wherever they lie.

    step = cf.quantize(step_fn, "int8")
    step = cf.quantize(cf.shard(step_fn, mesh, zero(3, "dp")), "nf4", where="*.q_proj.weight")       # in any order
    step = cf.quantize(cf.shard(step_fn, mesh, zero(2, "dp")), wire="int8", error_feedback=True)

Problem: a quantized weight is a tensor of another kind in most libraries, so nothing that works on tensors works on it.
Idea: it is two or three plain tensors (`ops/quantized.py`), which a plan, a checkpoint or a copy treats like any other.

    weights                  `compiler/weight_quantization.py`; scheme "auto": `compiler/scheme_decision.py`
    activations for backward `compiler/saved_activations.py`
    key-value caches         `compiler/packed_caches.py`
    gradients on the wire    `compiler/wire.py`
    parameters on the wire   `compiler/gathers.py`
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from functools import partial
from typing import Any

import attrs

from colofunc.compiler.gathers import GATHERS, rounded_parameters
from colofunc.compiler.packed_caches import checked_globs, with_caches
from colofunc.compiler.quantized_weights import AUTO, Schemes
from colofunc.compiler.saved_activations import checked_form, with_saved
from colofunc.compiler.scheme_decision import SchemeDecision
from colofunc.compiler.staged import Staged, plugins_of
from colofunc.compiler.step_compiler import stage
from colofunc.compiler.transform import Transform
from colofunc.compiler.weight_quantization import QUANTIZE, transform_of
from colofunc.compiler.wire import WIRE, narrow_wire
from colofunc.compiler.wire import error_feedback as residuals_kept
from colofunc.errors import InputError, PlanError, near
from colofunc.ops.quantizers import Quantizer
from colofunc.ops.wire import scheme_of
from colofunc.planner.schemes import SchemeChoice, SchemeErrors
from colofunc.plugins import build_registry, given_plugins


def quantize(
    step_fn: Callable[..., Any] | str | Quantizer | None = None,
    scheme: str | Quantizer | None = None,
    where: str | Iterable[str] = "*.weight",
    plugins: Sequence[Any] = (),
    *,
    wire: str | None = None,
    error_feedback: bool = False,
    gathers: str | None = None,
    errors: SchemeErrors | None = None,
    keep: str | Iterable[str] = (),
    budget: str | int | float | None = None,
    rise: float | None = None,
    limit_s: float | None = None,
    activations: str | None = None,
    caches: str | Iterable[str] = (),
) -> Any:
    """The step with quantized weights, which it reads and does not train; with activations, caches or gradients on the
    wire in few bits.

    scheme: "int8", "int8-dynamic", "fp8", "fp8-e5m2", "fp8-g128", "fp8-dynamic", "fp8-g128-dynamic", "int4-g128",
    "nf4", "nf4-g64", "mxfp8", "nvfp4", a name that a plugin brings, `cf.gptq(moments)`, `cf.awq(moments)`,
    `cf.smoothquant(maxima)`, a `cf.ext.Quantizer`, a choice of one for each weight (`errors.within(...)`,
    `cf.scheme_choice(step, ...)`), or "auto". where: globs over the weights' own dotted names; of what they match,
    vectors stay (norms, biases). Weights of `cf.functional`, an nn.Parameter and those that a step has placed are known
    in any argument; tensors that say nothing of themselves are looked for in argument 0. plugins: further plugins with
    schemes, beside those of a `cf.shard` that it is put around. As a decorator: `@cf.quantize("int8")`.

    "auto" chooses for each weight at the first call, together with sharding, recomputation and offload: the whole chain
    is finished with one choice after the other, and of those that fit its budgets the best is taken. errors: of
    `cf.scheme_errors`. keep: globs over names of weights that stay as they are. budget: device memory of a rank, as in
    `cf.offload`; None: what the rest of the chain, or the topology, says. rise: the loss may rise by so much at most;
    the fastest step is taken. limit_s: a step may take so many seconds at most; without `rise`, what is taken has the
    least error.

    wire: "int8", "int4" or "fp8", with the numbers that share a scale behind it if you like ("int8-g128"; 256, 64 and
    256 if you do not): how gradients are sent where ranks sum them. With a mesh of n ranks each of them rounds its term
    once, so a number of the sum is off by at most the sum over ranks of A / 254 (int8), A / 14 (int4) or max(|x| / 16,
    A / 458752) (fp8), A being the largest of the group that its term x is in, and where all ranks have the sum once
    more by that of the sum itself (`colofunc/ops/wire.py`). A group with a number that is not finite arrives as NaN.
    Sums of fewer than 2,048 numbers, and of other dtypes than floating ones, stay as they are. On a mesh that sums no
    gradients it changes nothing, and the plan says so. error_feedback: what a rank did not send is kept in the state,
    and added to its next gradient.

    gathers: "int8" or "fp8": forward and backward read each trained parameter of 4,096 numbers and more in 8 bits, with a scale for at most
    128 numbers of a row, so that ranks that have parts of it (ZeRO-3) are sent a byte a number. Off by at most A / 254 (int8) or
    |x| / 16 + A / 458752 (fp8), A being the largest of the group; the same on every mesh, also where nothing is gathered. Updates read
    and write parameters as they are kept.

    activations: "int8" or "fp8": what backward reads of forward is kept in 8 bits, with a scale for at most 128
    elements; outputs stay the same to the bit, gradients change. With a scheme, or without:
    `cf.quantize(step, activations="int8")`. caches: globs over names in argument 0 of tensors into which the step
    writes rows (key-value caches): they are kept in int8, with a scale for each row of the last dim. With a scheme, or
    without.

    Raises InputError, at once or when the step is traced, where scheme, globs or shapes do not fit; "auto" PlanError
    where nothing fits.
    """
    if isinstance(step_fn, (str, Quantizer, SchemeChoice)):
        step_fn, scheme = None, step_fn
    for_auto = {"errors": errors, "keep": keep, "budget": budget, "rise": rise, "limit_s": limit_s}
    saved, cached = checked_form(activations), checked_globs(caches)
    transforms = _on_the_wire(wire, error_feedback)
    if gathers is not None:
        transforms.append(rounded_parameters(gathers))
    stored: StoredTransform | None = None
    if scheme is not None or saved is not None or cached or not transforms:
        stored = partial(_stored, scheme, _checked_globs(where), plugins, for_auto, saved, cached)
    if step_fn is None:
        return partial(_staged, stored, transforms)
    return _staged(stored, transforms, step_fn)


StoredTransform = Callable[[Any], Transform]
"""Of a step, the transform of what is kept in few bits: the step's plugins may bring its scheme."""


def _staged(stored: StoredTransform | None, transforms: Sequence[Transform], step_fn: Any) -> Any:
    """The step with these transforms. Raises PlanError where one of them was applied before."""
    if stored is not None:
        transforms = [stored(step_fn), *transforms]
    twice = {
        QUANTIZE: (
            "quantize is applied twice to one step. Try: one cf.quantize with the globs of all weights in where=; "
            "scheme 'auto', which chooses one for each weight"
        ),
        WIRE: "quantize(wire=...) is applied twice to one step. Try: one of them",
        GATHERS: "quantize(gathers=...) is applied twice to one step. Try: one of them",
    }
    for transform in transforms:
        if isinstance(step_fn, Staged) and step_fn.transform(transform.name) is not None and transform.name in twice:
            raise PlanError(twice[transform.name])
        step_fn = stage(step_fn, transform)
    return step_fn


def _checked_globs(where: str | Iterable[str]) -> tuple[str, ...]:
    """Globs over names of weights. Raises InputError for anything else."""
    globs = (where,) if isinstance(where, str) else tuple(where)
    if not globs or not all(isinstance(glob, str) for glob in globs):
        raise InputError(
            f"cf.quantize(where={where!r}): give a glob over names of weights, or several. Try: where='*.weight'"
        )
    return globs


def _stored(
    scheme: Any,
    globs: tuple[str, ...],
    plugins: Sequence[Any],
    for_auto: Mapping[str, Any],
    saved: str | None,
    cached: tuple[str, ...],
    step_fn: Any,
) -> Transform:
    """What is kept in few bits: weights in a scheme, if there is one, activations that backward reads, caches."""
    registered = build_registry((*given_plugins(plugins, "cf.quantize"), *plugins_of(step_fn))).quantizers
    if scheme == AUTO:
        decision = SchemeDecision.of(globs, registered, **for_auto)
        return attrs.evolve(decision, activations=saved, caches=cached).transform()
    _refuse_limits(scheme, for_auto)
    if scheme is None and (saved is not None or cached):
        transform = Transform(QUANTIZE)
    else:
        transform = transform_of(_quantizer(scheme, registered), globs, registered)
    return with_saved(with_caches(transform, cached), saved)


def _on_the_wire(wire: str | None, error_feedback: bool) -> list[Transform]:
    """What sends gradients in few bits, and keeps what was not sent."""
    if wire is None:
        if error_feedback:
            raise InputError(
                "cf.quantize(error_feedback=True) is about gradients that are sent narrow. Try: wire='int8' beside it"
            )
        return []
    narrow = narrow_wire(scheme_of(wire))
    return [narrow, residuals_kept()] if error_feedback else [narrow]


def _refuse_limits(scheme: Any, auto: Mapping[str, Any]) -> None:
    """Raises InputError where something is given that only scheme "auto" reads."""
    given = [name for name, value in auto.items() if value is not None and not (isinstance(value, Sized) and not value)]
    if given:
        raise InputError(
            f"cf.quantize(scheme={_short(scheme)}): {', '.join(given)} is for scheme 'auto'. Try: where= for which "
            "weights"
        )


def _quantizer(scheme: Any, known: Mapping[str, Quantizer]) -> Schemes:
    if isinstance(scheme, SchemeChoice):
        return scheme
    if isinstance(scheme, Quantizer):
        return scheme
    if not isinstance(scheme, str):
        raise InputError(
            f"cf.quantize(scheme={_short(scheme)}): give a scheme ({', '.join(known)}), a cf.ext.Quantizer, or, for "
            "something else than weights, activations=, caches=, wire= or gathers="
        )
    if scheme not in known:
        hint = near(scheme, known, "schemes")
        stop = "" if hint.endswith("?") else "."
        raise InputError(
            f"cf.quantize: there is no scheme {scheme!r}{hint}{stop} If a plugin has it, shard first, with "
            "plugins=[...], or give it here too: cf.quantize(..., plugins=[...])"
        )
    return known[scheme]


def _short(scheme: Any) -> str:
    """A scheme in an error: without the weights of a choice, or what a quantizer has measured."""
    if isinstance(scheme, SchemeChoice):
        return f"a choice for {len(scheme.weights)} weights"
    if isinstance(scheme, Quantizer):
        return f"the scheme {scheme.name!r}"
    return reprlib.repr(scheme)
