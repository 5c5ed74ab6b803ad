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

The signature is annotated (Tensor, Tensor | None, list[Tensor], int, float, bool, str, lists of int, dtype; it returns a Tensor, a
tuple of them, or a list[Tensor], of which a pattern says one result for all). Shapes come from running the reference without data.
The gradient is that of the reference, recorded as the operators it is made of; give `backward(inputs, outputs, grads)` to write it
yourself, with further operators of your own where it should stay whole.
The reference draws no random numbers, writes to no argument, and decides nothing by data.

A function of a module that is defined again, as when a notebook's cell is run once more, replaces the operator, with other arguments
too: steps that use it are traced again. Another function under a name that is taken is an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from colofunc import compat
from colofunc.errors import PluginError
from colofunc.ops.define import KERNELS, Operator, define
from colofunc.ops.define import OPERATORS as DEFINED
from colofunc.ops.targets import forget_targets
from colofunc.spec.rule import Call, Ref, Rule
from colofunc.spec.rules import REGISTERED
from colofunc.spec.rules.pattern import RuleFn, bind, pattern, with_flops

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
    signature: inspect.Signature
    schema: str
    defined: Operator
    listed: type[torch.autograd.Function] | None  # where it takes or gives lists of tensors
    library: torch.library.Library
    kernel: Reference
    fake: Reference
    save: Callable[..., None]
    pull: Callable[..., list[Any]]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if OPERATORS.get(self.name) is not self:
            raise PluginError(f"operator {self.name!r} has been defined again since; call the function that this definition gave")
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values = [bound.arguments[name] for name in self.signature.parameters]
        if self.listed is None:
            return self.defined.apply(*values)
        results = self.listed.apply(lengths(values), *flat(values))
        return list(results) if self.schema.endswith("Tensor[]") else results

    @property
    def source(self) -> str:
        """Where the reference stands: `mylib.layers.gated`."""
        return _source(self.reference)


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

    `rule`: an einops pattern (with `reduce`, `linear`, `mults` as in `cf.ext.pattern`), or a function `rule(call)`. A pattern's
    operands are the tensor arguments; that of a list holds for each of its tensors. Without a rule the operator runs replicated,
    unless a plugin's `colofunc_rules` or `colofunc_strategies` say more. `backward(inputs, outputs, grads)` gives one gradient per
    tensor argument (None: it has none; a list for a list); `inputs` are all arguments, `outputs` and `grads` look like what the
    reference returns. With `mults`, given here also where the rule is a function, its results count as products: the policy "dots"
    keeps them. Raises PluginError where name, signature and rule do not fit together.
    """
    space, _, short = name.partition(".")
    if space in TAKEN or not (space.isidentifier() and short.isidentifier()):
        raise PluginError(f"cf.operator: {name!r} is no name for an operator. Try: \"mylib.gated\", with a library name of your own")

    def register(reference: Reference) -> PluginOperator:
        signature = _signature(name, reference)
        schema = _schema(name, short, reference)
        found = rule
        if isinstance(rule, str):
            _check_rule(name, rule, schema)
            found = (repeated if "Tensor[]" in schema else pattern)(rule, reduce=reduce, linear=linear, mults=mults)
        defined, listed, library = _defined_before(name, reference, schema) or _defined(name, schema, space)
        DEFINED[name] = attrs.evolve(defined, product=mults)
        plain = _by_position(reference, signature)
        kernel, fake, save = _kernel(plain), _fake(name, plain), _save(backward is not None)
        KERNELS[name] = kernel
        REGISTERED.pop(name, None)
        if callable(found):
            REGISTERED[name] = found
        pull = _gradient(name, plain, backward)
        made = OPERATORS[name] = PluginOperator(
            name, reference, signature, schema, defined, listed, library, kernel, fake, save, pull
        )
        return made

    return register


Defined = tuple[Operator, type[torch.autograd.Function] | None, torch.library.Library]


def _defined(name: str, schema: str, space: str) -> Defined:
    """Registered with torch: what it calls is what `OPERATORS` has under the name by then."""

    def kernel(*args: Any) -> Any:
        return OPERATORS[name].kernel(*args)

    def fake(*args: Any) -> Any:
        return OPERATORS[name].fake(*args)

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.operator = OPERATORS[name]
        ctx.operator.save(ctx, inputs, output)

    def pull(ctx: Any, *grads: Any) -> list[Any]:
        return ctx.operator.pull(ctx, *grads)

    def pull_lists(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return spread(ctx.lengths, pull(ctx, *flat(grads)))

    library = torch.library.Library(space, "FRAGMENT")
    defined = define(schema, kernel, fake, (save, pull_lists), space, library)
    listed = function(name, defined.op, save, pull, schema.endswith("Tensor[]")) if "Tensor[]" in schema else None
    return defined, listed, library


def _defined_before(name: str, reference: Reference, schema: str) -> Defined | None:
    """What the same function of a module registered with these arguments. Raises PluginError where another one has the name."""
    if name not in KERNELS:
        return None
    before, source = OPERATORS.get(name), _source(reference)
    if before is None or before.source != source or "<locals>" in source:
        by = f" by {before.source}" if before is not None else ""
        raise PluginError(f"cf.operator: {name!r} is registered already in this process{by}. Try: another name")
    if before.schema != schema:
        if not compat.undefine(before.library):
            raise PluginError(
                f"cf.operator: {name!r} is registered already in this process as {before.schema}, and this torch keeps it so. "
                "Try: the same arguments, another name, or a new process"
            )
        forget_targets()
        return None
    return before.defined, before.listed, before.library


def _source(reference: Reference) -> str:
    return f"{reference.__module__}.{getattr(reference, '__qualname__', type(reference).__qualname__)}"


# ---- signature and rule ----


def _signature(name: str, reference: Reference) -> inspect.Signature:
    signature = inspect.signature(reference)
    for p in signature.parameters.values():
        if p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
            raise PluginError(f"cf.operator {name!r}: argument {p.name!r} is {p.kind.description}. Try: a plain one")
    required = [p.default is p.empty for p in signature.parameters.values()]
    if required != sorted(required, reverse=True):
        raise PluginError(f"cf.operator {name!r}: an argument without a default follows one that has one. Try: the other order")
    return signature


def _by_position(reference: Reference, signature: inspect.Signature) -> Reference:
    """The reference, called with all arguments by position; the operator itself has no keyword-only ones."""
    named = [p.name for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
    first = len(signature.parameters) - len(named)
    if not named:
        return reference

    def plain(*args: Any) -> Any:
        return reference(*args[:first], **dict(zip(named, args[first:], strict=False)))  # torch leaves defaults out

    return plain


def _schema(name: str, short: str, reference: Reference) -> str:
    try:
        schema = short + torch.library.infer_schema(reference, mutates_args=()).replace("(*, ", "(").replace(", *, ", ", ")
    except (ValueError, NameError, TypeError) as error:
        raise PluginError(f"cf.operator {name!r}: no types in the signature ({error}). Try: x: torch.Tensor, n: int = 1") from error
    if any(kind in schema for kind in ("Tensor?[]", "Tensor[]?", "Tensor?[]?")):
        raise PluginError(f"cf.operator {name!r}: a list of tensors has all of them. Try: list[torch.Tensor], empty where there is none")
    given = schema.rsplit("->", 1)[1]
    if given.strip() != "Tensor[]" and given.replace("Tensor", "").strip("(), "):
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
    taken = {compat.storage_key(x) for x in flat(args) if isinstance(x, Tensor)}
    owned = []
    for x in all_of(results):
        key = compat.storage_key(x)
        owned.append(x.clone() if key in taken else x)
        taken.add(key)
    return type(results)(owned) if isinstance(results, tuple | list) else owned[0]


class _Pure(compat.TorchDispatchMode):
    """Refuses what a reference may not do; it is on while shapes are found."""

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name = name
        self.inputs = {compat.storage_key(x) for x in flat(args) if isinstance(x, Tensor)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {**dict(zip([a.name for a in func._schema.arguments], args)), **kwargs}
        if torch.Tag.nondeterministic_seeded in func.tags and given.get("dropout_p", 1.0) != 0.0:
            raise PluginError(f"operator {self.name!r} draws random numbers ({func}), others on every rank. Try: take them as an argument")
        for a in func._schema.arguments:
            into = flat([given.get(a.name)]) if a.alias_info is not None and a.alias_info.is_write else []
            if any(isinstance(x, Tensor) and compat.storage_key(x) in self.inputs for x in into):
                raise PluginError(f"operator {self.name!r} writes to an argument ({func}). Try: x = x + 1 in place of x += 1")
        return func(*args, **kwargs)


# ---- gradient ----


def _save(outputs_too: bool) -> Callable[..., None]:
    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        results, items = all_of(output), flat(inputs)
        ctx.lengths, ctx.leading = lengths(inputs), 0
        ctx.plain = tuple(None if isinstance(x, Tensor) else x for x in items)
        ctx.tensors = tuple(k for k, x in enumerate(items) if isinstance(x, Tensor))
        ctx.floating = tuple(r.is_floating_point() or r.is_complex() for r in results)
        ctx.form = type(output) if isinstance(output, tuple | list) else None
        ctx.save_for_backward(*(items[k] for k in ctx.tensors), *(results if outputs_too else ()))

    return save


def _gradient(name: str, reference: Reference, backward: Backward | None) -> Callable[..., list[Any]]:
    """The gradients of the flat arguments."""

    def gradient(ctx: Any, *grads: Any) -> list[Any]:
        count = len(ctx.tensors)
        items, saved = list(ctx.plain), ctx.saved_tensors
        for k, x in zip(ctx.tensors, saved[:count], strict=True):
            items[k] = x
        if backward is None:
            return _of_reference(reference, ctx, items, grads)
        inputs, outputs, form = spread(ctx.lengths, items), saved[count:], ctx.form
        given = backward(inputs, outputs[0] if form is None else form(outputs), grads[0] if form is None else form(grads))
        found = _of_each(name, inputs, ctx.lengths, given if isinstance(given, tuple) else (given,))
        every: list[Any] = [None] * len(items)
        for k, g in zip(ctx.tensors, found, strict=True):
            every[k] = g
        return every

    return gradient


def _of_each(name: str, inputs: tuple[Any, ...], found: Lengths, given: tuple[Any, ...]) -> list[Any]:
    """One gradient per tensor, from one per tensor argument: that of a list is a list, or None."""
    counts = [n for x, n in zip(inputs, found, strict=True) if n >= 0 or isinstance(x, Tensor)]
    if len(given) != len(counts):
        raise PluginError(
            f"backward of operator {name!r} gave {len(given)} gradients for {len(counts)} tensor arguments. Try: None for what has none"
        )
    every: list[Any] = []
    for n, g in zip(counts, given, strict=True):
        if n >= 0 and g is not None and (not isinstance(g, (list, tuple)) or len(g) != n):
            raise PluginError(f"backward of operator {name!r} gave no list of {n} gradients for a list of {n} tensors. Try: None for all")
        if n < 0:
            every.append(g)
        elif g is None:
            every += [None] * n
        else:
            every += g
    return every


def _of_reference(reference: Reference, ctx: Any, items: list[Any], grads: tuple[Any, ...]) -> list[Any]:
    """The gradient of the reference, computed with it again: nothing between operands and results is kept."""
    needs = list(truths(ctx.needs_input_grad))[ctx.leading :]
    wanted = [k for k in ctx.tensors if needs[k]]

    def again(*tensors: Tensor) -> tuple[Tensor, ...]:
        args = list(items)
        for k, x in zip(wanted, tensors, strict=True):
            args[k] = x
        results = all_of(reference(*spread(ctx.lengths, args)))
        return tuple(r for r, floating in zip(results, ctx.floating, strict=True) if floating)

    _, pull, *_ = torch.func.vjp(again, *(items[k] for k in wanted))
    found = dict(zip(wanted, pull(tuple(g for g, floating in zip(grads, ctx.floating, strict=True) if floating)), strict=True))
    return [found.get(k) for k in range(len(items))]


# ---- lists of tensors ----
# Problem: autograd sees no tensor inside a list, and a rule has one operand per tensor, however many a call has. Idea: an
# operator's arguments are spread flat where autograd looks, and a rule's operand of a list is repeated for each of its tensors.
#
#     flat(([a, b], w, 2))                -> [a, b, w, 2]            spread((2, -1, -1), ...) is the way back
#     "b* d, d -> b* d", 2 tensors        -> "b* d, b* d, d -> b* d"; a result that is a list is repeated too


Lengths = tuple[int, ...]  # per argument: how many tensors its list has, -1 for what is no list of tensors


def is_list(x: Any) -> bool:
    return isinstance(x, (list, tuple)) and all(isinstance(item, Tensor) for item in x)


def lengths(args: Sequence[Any]) -> Lengths:
    return tuple(len(x) if is_list(x) else -1 for x in args)


def flat(args: Iterable[Any]) -> list[Any]:
    """The arguments, each list of tensors as its tensors."""
    return [item for x in args for item in (x if is_list(x) else (x,))]


def spread(found: Lengths, items: Iterable[Any]) -> tuple[Any, ...]:
    """The way back from `flat`."""
    rest = iter(items)
    return tuple(next(rest) if n < 0 else [next(rest) for _ in range(n)] for n in found)


def all_of(results: Any) -> tuple[Any, ...]:
    """What an operator returns, as a tuple."""
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def truths(nested: Any) -> Iterator[bool]:
    """`needs_input_grad`, in which torch keeps the structure of lists."""
    for item in nested:
        if isinstance(item, (list, tuple)):
            yield from truths(item)
        else:
            yield bool(item)


def function(
    name: str, op: Any, save: Callable[..., None], backward: Callable[..., Any], listed: bool
) -> type[torch.autograd.Function]:
    """The operator as an autograd function of (lengths, *flat arguments). listed: it gives a list."""

    def forward(found: Lengths, *items: Any) -> Any:
        results = op(*spread(found, items))
        return tuple(results) if isinstance(results, list) else results  # autograd looks into no list

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        save(ctx, spread(inputs[0], inputs[1:]), list(output) if listed else output)
        ctx.leading = 1

    def pulled(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return (None, *backward(ctx, *grads))

    body = {
        "forward": staticmethod(forward),
        "setup_context": staticmethod(setup_context),
        "backward": staticmethod(pulled),
        "generate_vmap_rule": True,
    }
    return type(name.replace(".", "_").capitalize(), (torch.autograd.Function,), body)


def repeated(text: str, *, reduce: Mapping[str, str] | None, linear: Iterable[Iterable[int]], mults: bool) -> RuleFn:
    """The rule of `text`, whose operands and `linear` sets count arguments: those of a list are repeated for its tensors."""
    left, _, right = text.partition("->")
    results = right.split(",")
    words, groups = left.split(","), [tuple(group) for group in linear]

    def rule(call: Call) -> Rule | None:
        given = (*call.args, *(value for _, value in call.kwargs))
        operands = [ids for x in given if (ids := _refs(x)) is not None]
        if len(operands) != len(words):
            return None
        every = ",".join(word for word, ids in zip(words, operands, strict=True) for _ in ids)
        sets = [{i for k in group for i in operands[k]} for group in groups]
        out = ",".join(results * len(call.outs)) if len(results) == 1 else right
        found = bind(f"{every} -> {out}", call, reduce=reduce, linear=sets)
        return with_flops(found) if mults and found is not None else found

    return rule


def _refs(x: Any) -> tuple[int, ...] | None:
    """Operands that an argument is; None where it is no tensor and no list of tensors."""
    if isinstance(x, Ref):
        return (x.id,)
    if isinstance(x, tuple) and x and all(isinstance(item, Ref) for item in x):
        return tuple(item.id for item in x)
    return None
