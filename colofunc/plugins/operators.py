"""`cf.operator`: an operator of your own, from a reference in plain torch.

A function that calls torch is many operators in a trace, each split by its own rule. Where the whole can be split in a
way that its parts do not show, or has a kernel, make it one operator: it stays whole in the trace, and rules and
strategies speak of it by its name.

    import torch
    import colofunc as cf

    @cf.operator("mylib.gated", rule="b* d, b* d -> b* d")
    def gated(x: torch.Tensor, gate: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x * torch.sigmoid(scale * gate)

    step = cf.shard(lambda x, g: gated(x, g).sum(), cf.Mesh(dp=2, tp=2), in_specs="(dp b) (tp d)")
    low = step.lower(torch.ones(8, 4), torch.ones(8, 4))
    assert [d.target for d in low.plan.find("mylib.gated")] == ["mylib.gated"]
    assert low.coverage().fallbacks == ()
    cf.testing.check_strategies(None, gated)            # the rule is right: tried on small meshes

The signature is annotated (Tensor, Tensor | None, int, float, bool, str, lists of int, dtype). Shapes come from running
the reference without data. The gradient is that of the reference, recorded as the operators it is made of; give
`backward(inputs, outputs, grads)` to write it yourself, with further operators of your own where it should stay whole.
The reference draws no random numbers, writes to no argument, and decides nothing by data.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from colofunc import compat
from colofunc.dtensor.rules import REGISTERED
from colofunc.dtensor.rules.pattern import RuleFn, pattern
from colofunc.errors import PluginError
from colofunc.ops.define import KERNELS, Operator, define

# What was registered in this process, by name.
OPERATORS: dict[str, PluginOperator] = {}
TAKEN = frozenset({"aten", "prim", "prims", "colofunc", "quantized", "profiler"})
Reference = Callable[..., Any]
Backward = Callable[[tuple[Any, ...], Any, Any], Any]


@attrs.frozen(eq=False)
class PluginOperator:
    """An operator that `operator` registered. Calling it is one node of a trace; `name` is what hooks call it."""

    name: str
    reference: Reference
    defined: Operator
    signature: inspect.Signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return self.defined.apply(*bound.args)


def operator(
    name: str,
    rule: str | RuleFn | None = None,
    *,
    reduce: Mapping[str, str] | None = None,
    linear: Iterable[Iterable[int]] = (),
    mults: bool = False,
    backward: Backward | None = None,
) -> Callable[[Reference], PluginOperator]:
    """Register the decorated function as the operator `name` ("mylib.gated"); it is its reference and its kernel.

    `rule`: an einops pattern (with `reduce`, `linear`, `mults` as in `cf.pattern`), or a function `rule(call)`; without one
    it runs replicated, unless a plugin's `colofunc_rules` or `colofunc_strategies` say more. `backward(inputs, outputs,
    grads)` gives one gradient per tensor argument (None: it has none); `inputs` are all arguments, `outputs` and `grads`
    look like what the reference returns. Raises PluginError where name, signature and rule do not fit together.
    """
    space, _, short = name.partition(".")
    if space in TAKEN or not (space.isidentifier() and short.isidentifier()):
        raise PluginError(f"cf.operator: {name!r} is no name for an operator. Try: \"mylib.gated\", with a library name of your own")
    if name in KERNELS:
        raise PluginError(f"cf.operator: {name!r} is registered already in this process. Try: another name")

    def register(reference: Reference) -> PluginOperator:
        signature = _signature(name, reference)
        schema = _schema(name, short, reference)
        found = rule
        if isinstance(rule, str):
            _check_rule(name, rule, schema)
            found = pattern(rule, reduce=reduce, linear=linear, mults=mults)
        kernel, fake = _kernel(reference), _fake(name, reference)
        gradient = _save(signature, backward is not None), _gradient(name, reference, backward)
        defined = define(schema, kernel, fake, gradient, space)
        if callable(found):
            REGISTERED[name] = found
        made = OPERATORS[name] = PluginOperator(name, reference, defined, signature)
        return made

    return register


# ---- signature and rule ----


def _signature(name: str, reference: Reference) -> inspect.Signature:
    signature = inspect.signature(reference)
    for p in signature.parameters.values():
        if p.kind is not p.POSITIONAL_OR_KEYWORD:
            raise PluginError(f"cf.operator {name!r}: argument {p.name!r} is {p.kind.description}. Try: a plain one")
    return signature


def _schema(name: str, short: str, reference: Reference) -> str:
    try:
        schema = short + torch.library.infer_schema(reference, mutates_args=())
    except (ValueError, NameError, TypeError) as error:
        raise PluginError(f"cf.operator {name!r}: no types in the signature ({error}). Try: x: torch.Tensor, n: int = 1") from error
    if "Tensor[]" in schema or "Tensor?[]" in schema:
        raise PluginError(f"cf.operator {name!r} takes or returns a list of tensors, which has no factors. Try: one argument per tensor")
    if schema.rsplit("->", 1)[1].replace("Tensor", "").strip("(), "):
        raise PluginError(f"cf.operator {name!r} returns something else than tensors: {schema.rsplit('->', 1)[1].strip()}. Try: tensors")
    return schema


def _check_rule(name: str, rule: str, schema: str) -> None:
    if rule.count("->") != 1:
        raise PluginError(f"cf.operator {name!r}: the rule {rule!r} has no `->`. Try: \"b* d, b* d -> b* d\"")
    left, right = schema.rsplit("->", 1)
    for kind, words, side in zip(("operand", "result"), rule.split("->"), (left, right), strict=True):
        given, tensors = words.count(",") + 1, side.count("Tensor")
        optional = side.count("Tensor?")  # one that is not given has no place in the rule
        if not tensors - optional <= given <= tensors:
            raise PluginError(f"cf.operator {name!r}: the rule {rule!r} has {given} {kind}s, the function has {tensors}")


# ---- kernel and shapes ----


def _kernel(reference: Reference) -> Reference:
    def kernel(*args: Any) -> Any:
        return _own(reference(*args), args)

    return kernel


def _fake(name: str, reference: Reference) -> Reference:
    def fake(*args: Any) -> Any:
        with _Pure(name, args):
            return _own(reference(*args), args)

    return fake


def _own(results: Any, args: tuple[Any, ...]) -> Any:
    """The results in memory of their own: what an operator returns shares none with what it was given."""
    taken = {compat.storage_key(x) for x in args if isinstance(x, Tensor)}
    owned = []
    for x in results if isinstance(results, tuple) else (results,):
        key = compat.storage_key(x)
        owned.append(x.clone() if key in taken else x)
        taken.add(key)
    return tuple(owned) if isinstance(results, tuple) else owned[0]


class _Pure(compat.TorchDispatchMode):
    """Refuses what a reference may not do; it is on while shapes are found."""

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name = name
        self.inputs = {compat.storage_key(x) for x in args if isinstance(x, Tensor)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {**dict(zip([a.name for a in func._schema.arguments], args)), **kwargs}
        if torch.Tag.nondeterministic_seeded in func.tags and given.get("dropout_p", 1.0) != 0.0:
            raise PluginError(f"operator {self.name!r} draws random numbers ({func}), others on every rank. Try: take them as an argument")
        for a in func._schema.arguments:
            x = given.get(a.name)
            if a.alias_info is not None and a.alias_info.is_write and isinstance(x, Tensor) and compat.storage_key(x) in self.inputs:
                raise PluginError(f"operator {self.name!r} writes to an argument ({func}). Try: x = x + 1 in place of x += 1")
        return func(*args, **kwargs)


# ---- gradient ----


def _save(signature: inspect.Signature, outputs_too: bool) -> Callable[..., None]:
    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        results = output if isinstance(output, tuple) else (output,)
        ctx.plain = tuple(None if isinstance(x, Tensor) else x for x in inputs)
        ctx.tensors = tuple(k for k, x in enumerate(inputs) if isinstance(x, Tensor))
        ctx.floating = tuple(r.is_floating_point() or r.is_complex() for r in results)
        ctx.several = isinstance(output, tuple)
        ctx.save_for_backward(*(inputs[k] for k in ctx.tensors), *(results if outputs_too else ()))

    return save


def _gradient(name: str, reference: Reference, backward: Backward | None) -> Callable[..., tuple[Any, ...]]:
    def gradient(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        count = len(ctx.tensors)
        inputs, saved = list(ctx.plain), ctx.saved_tensors
        for k, x in zip(ctx.tensors, saved[:count], strict=True):
            inputs[k] = x
        if backward is None:
            found = _of_reference(reference, ctx, tuple(inputs), grads)
        else:
            outputs = saved[count:]
            one = not ctx.several
            given = backward(tuple(inputs), outputs[0] if one else tuple(outputs), grads[0] if one else grads)
            found = given if isinstance(given, tuple) else (given,)
            if len(found) != count:
                raise PluginError(
                    f"backward of operator {name!r} gave {len(found)} gradients for {count} tensor arguments. Try: None for what has none"
                )
        all_of: list[Any] = [None] * len(inputs)
        for k, g in zip(ctx.tensors, found, strict=True):
            all_of[k] = g
        return tuple(all_of)

    return gradient


def _of_reference(reference: Reference, ctx: Any, inputs: tuple[Any, ...], grads: tuple[Any, ...]) -> tuple[Any, ...]:
    """The gradient of the reference, computed with it again: nothing between operands and results is kept."""
    wanted = [k for k in ctx.tensors if ctx.needs_input_grad[k]]

    def again(*tensors: Tensor) -> tuple[Tensor, ...]:
        args = list(inputs)
        for k, x in zip(wanted, tensors, strict=True):
            args[k] = x
        out = reference(*args)
        results = out if isinstance(out, tuple) else (out,)
        return tuple(r for r, floating in zip(results, ctx.floating, strict=True) if floating)

    _, pull, *_ = torch.func.vjp(again, *(inputs[k] for k in wanted))
    found = dict(zip(wanted, pull(tuple(g for g, floating in zip(grads, ctx.floating, strict=True) if floating)), strict=True))
    return tuple(found.get(k) for k in ctx.tensors)
