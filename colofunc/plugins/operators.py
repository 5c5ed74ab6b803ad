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

The signature is annotated (Tensor, Tensor | None, list[Tensor], int, float, bool, str, lists of int, dtype; it returns
a Tensor, a tuple of them, or a list[Tensor], of which a pattern says one result for all). Shapes come from running the
reference without data. The gradient is that of the reference, recorded as the operators it is made of; give
`backward(inputs, outputs, grads)` to write it yourself, with further operators of your own where it should stay whole.
The reference draws no random numbers, writes to no argument, and decides nothing by data.

A function of a module that is defined again, as when a notebook's cell is run once more, replaces the operator, with
other arguments too: steps that use it are traced again. Another function under a name that is taken is an error.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor

from colofunc import compat
from colofunc.errors import PluginError, ProgramError
from colofunc.ops.define import KERNELS, Operator, define
from colofunc.ops.define import OPERATORS as DEFINED
from colofunc.ops.facts import Facts
from colofunc.ops.targets import forget_targets, overload
from colofunc.plugins.registry import build_registry
from colofunc.plugins.tensor_lists import Lengths, all_of, flat, flat_function, lengths, repeated, spread, truths
from colofunc.spec.rules import REGISTERED
from colofunc.spec.rules.matmul import product
from colofunc.spec.rules.pattern import RuleFn, pattern

OPERATORS: dict[str, PluginOperator] = {}
"""What was registered in this process, by name."""
TAKEN = frozenset({"aten", "prim", "prims", "colofunc", "quantized", "profiler"})
"""Names of libraries that torch and colofunc use themselves."""
LINEAR_LAYERS = (
    "b i, o i, o -> b o", "b i, o i -> b o", "b i, i o, o -> b o", "b i, i o -> b o",
    "b o, o i -> b i", "b o, i o -> b i",
    "b o, b i -> o i", "b i, b o -> i o", "b i, b o -> o i", "b o, b i -> i o",
)  # fmt: skip
"""What `as_product` may say: a linear layer, its gradient for the inputs, and that for the weight."""
ReferenceFn = Callable[..., Any]
BackwardFn = Callable[[tuple[Any, ...], Any, Any], Any]


@attrs.frozen(eq=False)
class PluginOperator:
    """An operator that `operator` registered. Calling it is one node of a trace; `name` is what hooks call it."""

    name: str
    reference: ReferenceFn
    signature: inspect.Signature
    schema: str
    defined: Operator
    listed: type[torch.autograd.Function] | None  # where it takes or gives lists of tensors
    library: torch.library.Library
    kernel: ReferenceFn
    fake: ReferenceFn
    save: Callable[..., None]
    pull: Callable[..., list[Any]]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if OPERATORS.get(self.name) is not self:
            raise PluginError(
                f"operator {self.name!r} has been defined again since; call the function that this definition gave"
            )
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
    backward: BackwardFn | None = None,
    backward_products: Sequence[str] = (),
    as_product: str = "",
    weights: Sequence[str] = (),
    rows: str = "",
    row_order: str = "",
    work: str = "",
) -> Callable[[ReferenceFn], PluginOperator]:
    """Register the decorated function as the operator `name` ("mylib.gated"); it is its reference and its kernel.

    `rule`: an einops pattern (with `reduce`, `linear`, `mults` as in `cf.ext.pattern`), or a function `rule(call)`. A
    pattern's operands are the tensor arguments; that of a list holds for each of its tensors. Without a rule the
    operator runs replicated, unless a plugin's `colofunc_rules` or `colofunc_strategies` say more.
    `backward(inputs, outputs, grads)` gives one gradient per tensor argument (None: it has none; a list for a list);
    `inputs` are all arguments, `outputs` and `grads` look like what the reference returns. With `mults`, given here
    also where the rule is a function, its results count as products: the policy "dots" keeps them. Raises PluginError
    where name, signature and rule do not fit together.

    What else plans know of an operator stands here, too:

    `weights`: names of the tensor arguments that are weights. What a step that marks and differentiates nothing gives
    for them is a parameter, wherever it stands.

    `rows`: "read", it looks few rows of its first tensor, a table, up at the indices of its second; "summed", and each
    row of its result is a sum of them; "indexed", as "read", of what may be an activation as well; "written", it
    writes few rows of its result, as the gradient of a table.

    `row_order`: "any", it does not matter in which order its rows lie, neither to it nor to local code of plugins that
    split it, as for a linear layer, a norm or a softmax (and for what has `as_product`). "dealt": as "any", and it does
    not matter which ranks have which rows, as for experts.

    `work`: its kind, where a machine has rates of kinds: "transcendental", "normalisation", "softmax", "reduction" or
    "gather"; else "elementwise", by the bytes that it reads and writes.

    `backward_products`: of a product with a `backward` of its own, the operators that make its gradients, by name.

    `as_product`: of an operator that is a linear layer of rows b, inputs i and outputs o, or one of its gradients, how it
    reads as one: "b i, o i, o -> b o", where b is any number of dims, and a call may leave the bias out. The function
    takes these tensors and nothing else. The text is its rule, and plans that multiply matrices in a way of their own
    do so in its place.
    """
    space, _, short = name.partition(".")
    if space in TAKEN or not (space.isidentifier() and short.isidentifier()):
        raise PluginError(
            f'cf.operator: {name!r} is no name for an operator. Try: "mylib.gated", with a library name of your own'
        )

    for argument, names in (("backward_products", backward_products), ("weights", weights)):
        if isinstance(names, str):
            raise PluginError(f"cf.operator {name!r}: {argument}={names!r} is one text. Try: {argument}=({names!r},)")
    if as_product:
        as_product = _linear_layer(name, as_product)
        if rule is not None or reduce or tuple(linear):
            raise PluginError(
                f"cf.operator {name!r}: as_product={as_product!r} is its rule. Try: without rule, reduce and linear"
            )
    mults = mults or bool(as_product)
    facts = _facts(name, mults, backward_products, as_product, rows, row_order, work)

    def register(reference: ReferenceFn) -> PluginOperator:
        signature = _signature(name, reference)
        schema = _schema(name, short, reference)
        positions = _positions(name, schema, weights)
        _check_rows(name, schema, rows)
        rule_fn = rule
        if as_product:
            _check_product(name, as_product, schema)
            rule_fn = partial(product, as_product)
        elif isinstance(rule, str):
            _check_rule(name, rule, schema)
            of_text = repeated if "Tensor[]" in schema else pattern
            rule_fn = of_text(rule, reduce=reduce, linear=linear, mults=mults)
        defined, listed, library = _defined_before(name, reference, schema) or _defined(name, schema, space)
        if facts.as_products != DEFINED[name].facts.as_products:
            build_registry.cache_clear()  # plans there have strategies for the products that there were
        DEFINED[name] = attrs.evolve(defined, facts=attrs.evolve(facts, weights=positions))
        plain = _by_position(reference, signature)
        REGISTERED.pop(name, None)
        if callable(rule_fn):
            REGISTERED[name] = rule_fn
        OPERATORS[name] = registered = PluginOperator(
            name=name,
            reference=reference,
            signature=signature,
            schema=schema,
            defined=defined,
            listed=listed,
            library=library,
            kernel=_kernel(plain),
            fake=_fake(name, plain),
            save=_save(backward is not None),
            pull=_gradient(name, plain, backward),
        )
        KERNELS[name] = registered.kernel
        return registered

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
    listed = None
    if "Tensor[]" in schema:
        listed = flat_function(name, defined.op, save, pull, schema.endswith("Tensor[]"))
    return defined, listed, library


def _defined_before(name: str, reference: ReferenceFn, schema: str) -> Defined | None:
    """What the same function of a module registered with these arguments.

    Raises PluginError where another one has the name.
    """
    if name not in KERNELS:
        return None
    before, source = OPERATORS.get(name), _source(reference)
    if before is None or before.source != source or "<locals>" in source:
        by = f" by {before.source}" if before is not None else ""
        raise PluginError(f"cf.operator: {name!r} is registered already in this process{by}. Try: another name")
    if before.schema != schema:
        if not compat.undefine(before.library):
            raise PluginError(
                f"cf.operator: {name!r} is registered already in this process as {before.schema}, and this torch keeps "
                "it so. Try: the same arguments, another name, or a new process"
            )
        forget_targets()
        return None
    return before.defined, before.listed, before.library


def _source(reference: ReferenceFn) -> str:
    """`mylib.layers.gated`; of a callable object its class."""
    name = getattr(reference, "__qualname__", type(reference).__qualname__)
    return f"{reference.__module__}.{name}"


# ---- signature and rule ----


def _signature(name: str, reference: ReferenceFn) -> inspect.Signature:
    """The reference's.

    Raises PluginError for kinds of arguments, and an order of them, that an operator cannot have.
    """
    signature = inspect.signature(reference)
    for parameter in signature.parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise PluginError(
                f"cf.operator {name!r}: argument {parameter.name!r} is {parameter.kind.description}. Try: a plain one"
            )
    required = [parameter.default is parameter.empty for parameter in signature.parameters.values()]
    if required != sorted(required, reverse=True):
        raise PluginError(
            f"cf.operator {name!r}: an argument without a default follows one that has one. Try: the other order"
        )
    return signature


def _by_position(reference: ReferenceFn, signature: inspect.Signature) -> ReferenceFn:
    """The reference, called with all arguments by position; the operator itself has no keyword-only ones."""
    named: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            named.append(parameter.name)
    if not named:
        return reference
    first = len(signature.parameters) - len(named)

    def plain(*args: Any) -> Any:
        keywords = dict(zip(named, args[first:], strict=False))  # torch leaves defaults out
        return reference(*args[:first], **keywords)

    return plain


def _schema(name: str, short: str, reference: ReferenceFn) -> str:
    """The schema that torch infers from the annotations, with all arguments by position.

    For instance `gated(Tensor x, Tensor gate) -> Tensor`.
    """
    try:
        inferred = torch.library.infer_schema(reference, mutates_args=())
    except (ValueError, NameError, TypeError) as error:
        raise PluginError(
            f"cf.operator {name!r}: no types in the signature ({error}). Try: x: torch.Tensor, n: int = 1"
        ) from error
    schema = short + inferred.replace("(*, ", "(").replace(", *, ", ", ")
    if any(kind in schema for kind in ("Tensor?[]", "Tensor[]?", "Tensor?[]?")):
        raise PluginError(
            f"cf.operator {name!r}: a list of tensors has all of them. Try: list[torch.Tensor], empty where there is "
            "none"
        )
    returned = schema.rsplit("->", 1)[1].strip()
    tensors_only = not returned.replace("Tensor", "").strip("(), ")
    if returned != "Tensor[]" and not tensors_only:
        raise PluginError(f"cf.operator {name!r} returns something else than tensors: {returned}. Try: tensors")
    return schema


def _is_of_torch(target: str) -> bool:
    try:
        overload(target)
    except ProgramError:
        return False
    return True


def _positions(name: str, schema: str, weights: Sequence[str]) -> tuple[int, ...]:
    """The positions, among the tensors that an operator is given, of the arguments that are weights.

    Raises PluginError for names of no tensor, and where a position would depend on what a call leaves out.
    """
    kinds = {argument: kind for kind, argument in _tensors(schema)}
    for weight in weights:
        if weight not in kinds:
            raise PluginError(f"cf.operator {name!r}: weights names {weight!r}. Try: one of {', '.join(kinds)}")
    names = list(kinds)
    # From the first that may be missing, or is a list, positions are those of weights only where all are.
    always = [kind == "Tensor" for kind in kinds.values()]
    behind = names[always.index(False) :] if False in always else []
    loose = [weight for weight in behind if weight in weights]
    if loose and (len(loose) < len(behind) or any("[]" in kinds[weight] for weight in loose)):
        raise PluginError(
            f"cf.operator {name!r}: the weight {loose[0]!r} is a list, or stands beside tensors that a call may leave "
            "out. Try: weights in front of them"
        )
    return tuple(names.index(weight) for weight in weights)


def _tensors(schema: str) -> list[tuple[str, str]]:
    """(kind, name) of the arguments of a schema that are tensors: "Tensor", "Tensor?" or "Tensor[]"."""
    left = schema.rsplit("->", 1)[0]
    return re.findall(r"(Tensor\S*) (\w+)", left)


def _check_rows(name: str, schema: str, rows: str) -> None:
    """Raises PluginError where an operator that looks rows up does not begin with a table and its indices."""
    kinds = [kind for kind, _ in _tensors(schema)]
    if rows in ("read", "summed") and kinds[:2] != ["Tensor", "Tensor"]:
        raise PluginError(
            f"cf.operator {name!r}: rows={rows!r} is of a table and its indices, the tensors are {kinds}. "
            "Try: (table: Tensor, index: Tensor, ...)"
        )


def _facts(
    name: str, mults: bool, backward_products: Sequence[str], as_product: str, rows: str, row_order: str, work: str
) -> Facts:
    """What is said of an operator, but for its weights. Raises PluginError for words that are none of those."""
    _check_backward_products(name, backward_products, mults)
    try:
        return Facts(
            product=mults,
            backward_products=tuple(backward_products),
            as_products=(as_product,) if as_product else (),
            rows=rows,
            row_order=row_order or ("any" if as_product else ""),
            work=work,
        )
    except ValueError as error:
        raise PluginError(f"cf.operator {name!r}: {error}") from None


def _check_backward_products(name: str, backward_products: Sequence[str], mults: bool) -> None:
    """Raises PluginError unless these are operators, and of a product."""
    if backward_products and not mults:
        raise PluginError(
            f"cf.operator {name!r}: backward_products are of an operator that multiplies matrices. Try: mults=True"
        )
    for each in backward_products:
        if each not in DEFINED and not _is_of_torch(each):
            raise PluginError(
                f"cf.operator {name!r}: backward_products names {each!r}. Try: an operator that is defined"
            )


def _linear_layer(name: str, text: str) -> str:
    """What `as_product` says, with one space between words. Raises PluginError for what is no linear layer."""
    plain = text
    if isinstance(text, str):
        sides = (side.split(",") for side in text.split("->"))
        plain = " -> ".join(", ".join(" ".join(word.split()) for word in words) for words in sides)
    if plain not in LINEAR_LAYERS:
        raise PluginError(
            f"cf.operator {name!r}: as_product={text!r} is no linear layer, nor a gradient of one. "
            f"Try: one of {', '.join(map(repr, LINEAR_LAYERS))}"
        )
    return plain


def _check_product(name: str, as_product: str, schema: str) -> None:
    """Raises PluginError unless the function takes the tensors of a product, and nothing that could change what it
    gives.
    """
    wanted = ["Tensor"] * (as_product.count(",") + 1)
    taken, given = schema[schema.index("(") + 1 :].rsplit(") -> ", 1)
    kinds = [argument.split()[0] for argument in taken.split(", ") if argument]
    optional = [*wanted[:2], "Tensor?"]  # a bias that a call may leave out
    if given != "Tensor" or kinds not in ([wanted, optional] if len(wanted) == 3 else [wanted]):
        raise PluginError(
            f"cf.operator {name!r}: as_product={as_product!r} is of {len(wanted)} tensors and gives one, and nothing "
            f"else; the function is {schema}. Try: def {name.partition('.')[2]}(x: Tensor, w: Tensor) -> Tensor"
        )


def _check_rule(name: str, rule: str, schema: str) -> None:
    """Raises PluginError unless a pattern has an operand for each tensor argument, and a result for each result."""
    if rule.count("->") != 1:
        raise PluginError(f'cf.operator {name!r}: the rule {rule!r} has no `->`. Try: "b* d, b* d -> b* d"')
    left, right = schema.rsplit("->", 1)
    operands, results = rule.split("->")
    for kind, words, side in (("operand", operands, left), ("result", results, right)):
        given, tensors = words.count(",") + 1, side.count("Tensor")
        optional = side.count("Tensor?")  # one that is not given has no place in the rule
        if not tensors - optional <= given <= tensors:
            raise PluginError(
                f"cf.operator {name!r}: the rule {rule!r} has {given} {kind}s, the function has {tensors}"
            )


# ---- kernel and shapes ----


def _kernel(reference: ReferenceFn) -> ReferenceFn:
    def kernel(*args: Any) -> Any:
        return _own(reference(*args), args)

    return kernel


def _fake(name: str, reference: ReferenceFn) -> ReferenceFn:
    def fake(*args: Any) -> Any:
        with _Pure(name, args):
            return _own(reference(*args), args)

    return fake


def _own(results: Any, args: tuple[Any, ...]) -> Any:
    """The results in memory of their own: what an operator returns shares none with what it was given."""
    taken = {compat.storage_key(x) for x in flat(args) if isinstance(x, Tensor)}
    owned = []
    for result in all_of(results):
        key = compat.storage_key(result)
        owned.append(result.clone() if key in taken else result)
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
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args)) | kwargs
        if torch.Tag.nondeterministic_seeded in func.tags and given.get("dropout_p", 1.0) != 0.0:
            raise PluginError(
                f"operator {self.name!r} draws random numbers ({func}), others on every rank. Try: take them as an "
                "argument"
            )
        for argument in func._schema.arguments:
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for x in flat([given.get(argument.name)]):
                if isinstance(x, Tensor) and compat.storage_key(x) in self.inputs:
                    raise PluginError(
                        f"operator {self.name!r} writes to an argument ({func}). Try: x = x + 1 in place of x += 1"
                    )
        return func(*args, **kwargs)


# ---- gradient ----


def _save(outputs_too: bool) -> Callable[..., None]:
    """What a call keeps on autograd's context for `_gradient`.

    `lengths`: of the arguments. `leading`: how many arguments stand before these. `plain`: the flat arguments, None for
    tensors. `tensors`: positions of these. `floating`: per result, whether it can have a gradient. `form`: tuple or
    list of results.
    """

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        results, items = all_of(output), flat(inputs)
        ctx.lengths, ctx.leading = lengths(inputs), 0
        ctx.plain = tuple(None if isinstance(item, Tensor) else item for item in items)
        ctx.tensors = tuple(position for position, item in enumerate(items) if isinstance(item, Tensor))
        ctx.floating = tuple(result.is_floating_point() or result.is_complex() for result in results)
        ctx.form = type(output) if isinstance(output, tuple | list) else None
        saved = [items[position] for position in ctx.tensors]
        if outputs_too:
            saved += results
        ctx.save_for_backward(*saved)

    return save


def _gradient(name: str, reference: ReferenceFn, backward: BackwardFn | None) -> Callable[..., list[Any]]:
    """The gradients of the flat arguments."""

    def gradient(ctx: Any, *grads: Any) -> list[Any]:
        count = len(ctx.tensors)
        items, saved = list(ctx.plain), ctx.saved_tensors
        for position, x in zip(ctx.tensors, saved[:count], strict=True):
            items[position] = x
        if backward is None:
            return _of_reference(reference, ctx, items, grads)
        inputs, outputs = spread(ctx.lengths, items), saved[count:]
        if ctx.form is None:
            given = backward(inputs, outputs[0], grads[0])
        else:
            given = backward(inputs, ctx.form(outputs), ctx.form(grads))
        if not isinstance(given, tuple):
            given = (given,)
        of_tensors = _of_each(name, inputs, ctx.lengths, given)
        of_items: list[Any] = [None] * len(items)
        for position, grad in zip(ctx.tensors, of_tensors, strict=True):
            of_items[position] = grad
        return of_items

    return gradient


def _of_each(name: str, inputs: tuple[Any, ...], counts_of_inputs: Lengths, given: tuple[Any, ...]) -> list[Any]:
    """One gradient per tensor, from one per tensor argument: that of a list is a list, or None.

    Raises PluginError for others.
    """
    counts = []
    for x, count in zip(inputs, counts_of_inputs, strict=True):
        if count >= 0 or isinstance(x, Tensor):
            counts.append(count)
    if len(given) != len(counts):
        raise PluginError(
            f"backward of operator {name!r} gave {len(given)} gradients for {len(counts)} tensor arguments. Try: None "
            "for what has none"
        )
    of_tensors: list[Any] = []
    for count, grad in zip(counts, given, strict=True):
        if count < 0:
            of_tensors.append(grad)
        elif grad is None:
            of_tensors += [None] * count
        elif isinstance(grad, (list, tuple)) and len(grad) == count:
            of_tensors += grad
        else:
            raise PluginError(
                f"backward of operator {name!r} gave no list of {count} gradients for a list of {count} tensors. Try: "
                "None for all"
            )
    return of_tensors


def _of_reference(reference: ReferenceFn, ctx: Any, items: list[Any], grads: tuple[Any, ...]) -> list[Any]:
    """The gradient of the reference, computed with it again: nothing between operands and results is kept."""
    needs = list(truths(ctx.needs_input_grad))[ctx.leading :]
    wanted = [position for position in ctx.tensors if needs[position]]

    def again(*tensors: Tensor) -> tuple[Tensor, ...]:
        args = list(items)
        for position, x in zip(wanted, tensors, strict=True):
            args[position] = x
        results = all_of(reference(*spread(ctx.lengths, args)))
        return _floating(results, ctx)

    _, pull, *_ = torch.func.vjp(again, *(items[position] for position in wanted))
    of_wanted = pull(_floating(grads, ctx))
    grad_of = dict(zip(wanted, of_wanted, strict=True))
    return [grad_of.get(position) for position in range(len(items))]


def _floating(values: Sequence[Any], ctx: Any) -> tuple[Any, ...]:
    """Of results, or of their gradients, those that can have a gradient."""
    return tuple(value for value, floating in zip(values, ctx.floating, strict=True) if floating)
