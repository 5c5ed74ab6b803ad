"""check_strategies: proof by trying that every strategy of an operator computes what the operator computes.

    cf.testing.check_strategies(my_plugin, "aten.cumsum.default")
    cf.testing.check_strategies(my_plugin, torch.ops.mylib.scan, sample(torch.randn(12, 6), 0))

For each sample call and each small mesh, each strategy is lowered as a step would lower it, run on the simulated ranks
in float64, and compared with the operator on the whole tensors. Operands that a strategy wants pending are given as
random terms. Costs must be sane: finite, not less work than a fair share, communication not for free.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch

from colofunc.dtensor.eager import convert_shards
from colofunc.errors import CheckError, InputError
from colofunc.executors.backend import backend_for
from colofunc.mesh import Mesh
from colofunc.ops.targets import resolve
from colofunc.plugins import Registry, build_registry
from colofunc.plugins.operators import PluginOperator
from colofunc.program.closeness import scaled_difference
from colofunc.program.cost import program_cost
from colofunc.program.ir import Node, Program, Ref, Value, map_refs
from colofunc.program.lower import Choice, lower
from colofunc.program.tracing.record import flat_results
from colofunc.program.tracing.trace import record_local
from colofunc.spec.layout import Layout, replicated
from colofunc.spec.rule import Call, Rule, Strategy, TensorType
from colofunc.spec.rules import REGISTERED
from colofunc.spec.strategies import enumerate_strategies, replicated_strategy
from colofunc.testing.parts import part

MESHES: tuple[dict[str, Any], ...] = ({"a": 2}, {"a": 3}, {"a": 2, "b": 2})
SIDE = 12  # of the operands of samples that are made up: 2, 3 and 4 divide it
BOUND = 1e-10
# Where reductions of several kinds are pending, sums are carried out first, then maxima, then minima.
OUTER_FIRST = ("min", "max", "sum")


@attrs.frozen
class Sample:
    """The arguments of one call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@attrs.frozen
class Proved:
    """One strategy on one mesh, tried: `share` is its work per rank against the whole operator's."""

    sample: int
    mesh: str
    strategy: str
    worst: float
    share: float


def sample(*args: Any, **kwargs: Any) -> Sample:
    """The arguments of a call of the operator, as `check_strategies` takes them."""
    return Sample(args, kwargs)


def check_strategies(plugin: Any, op: Any, *samples: Sample, meshes: Sequence[Mesh] = ()) -> tuple[Proved, ...]:
    """Prove the strategies that `plugin` gives for `op` (None: all that are built in); returns what was tried.

    `op`: a name ("aten.cumsum.default") or an operator of torch.ops. Without samples, calls are made up from its
    schema: square matrices, dims 0 and -1. Raises CheckError naming the strategy, or where there is no strategy at all.
    """
    target = target_of(op)
    # What a plugin gives is asked of it alone: it may be installed too, and then all that are installed have it.
    own = None if plugin is None else build_registry((plugin,), installed=False)
    registry = build_registry(() if plugin is None else (plugin,))
    grids = tuple(meshes) or tuple(Mesh(**axes) for axes in MESHES)
    done: list[Proved] = []
    for number, each in enumerate(samples or made_up(target)):
        call, tensors, whole = run_whole(target, each)
        for mesh in grids:
            for strategy, rule in _claimed(call, mesh, registry, own):
                worst = prove(call, strategy, rule, mesh, tensors, whole, registry)
                whole_flops = replicated_strategy(call).cost.flops
                if rule is not None and rule.flops is not None:
                    whole_flops = rule.flops
                share = strategy.cost.flops / whole_flops if whole_flops else 0.0
                done.append(Proved(number, _words(mesh), strategy.name, worst, share))
    if not done:
        owner = "colofunc" if plugin is None else getattr(plugin, "__name__", repr(plugin))
        raise CheckError(
            f"{owner} gives no strategy of {target} on any of {', '.join(map(_words, grids))}. "
            "Try: samples whose sizes the axes divide, check_strategies(plugin, op, sample(...))"
        )
    return tuple(done)


def target_of(op: Any) -> str:
    """The name that programs and plugins use: "aten.mm.default", "mylib.scan"."""
    if isinstance(op, (str, PluginOperator)):
        name = op if isinstance(op, str) else op.name
        return name if name.startswith("aten.") else name.removesuffix(".default")
    schema = getattr(op, "_schema", None) or getattr(getattr(op, "default", None), "_schema", None)
    if schema is None:
        raise InputError(f'check_strategies wants an operator or its name, not {op!r}. Try: "aten.cumsum.default"')
    space, name = schema.name.split("::")
    if space == "aten":
        return f"{space}.{name}.{schema.overload_name or 'default'}"
    return f"{space}.{name}"


def _words(mesh: Mesh) -> str:
    return " ".join(f"{name}={size}" for name, size in mesh.axes)


# ---- samples ----


def made_up(target: str) -> Iterator[Sample]:
    """Calls with square float64 matrices in place of tensors. Raises InputError where the operator refuses them all."""
    schema = _schema(target)
    gen = torch.Generator().manual_seed(0)
    refused, made = "", 0
    needed = [each for each in schema.arguments if not each.kwarg_only and not each.has_default_value()]
    for dim in (0, -1):
        each = Sample(tuple(_argument(argument, dim, gen) for argument in needed), {})
        try:
            run_whole(target, each)
        except Exception as error:
            refused = f"{type(error).__name__}: {error}".split("\n", maxsplit=1)[0]
            continue
        made += 1
        yield each
    if not made:
        raise InputError(
            f"{target} cannot be called with made-up arguments ({refused}). Try: check_strategies(plugin, op, "
            "sample(...))"
        )


def _schema(target: str) -> Any:
    fn = resolve(target)
    schema = getattr(fn, "_schema", None) or getattr(getattr(fn, "default", None), "_schema", None)
    if schema is None:
        raise InputError(f"{target} has no schema to make samples from. Try: check_strategies(plugin, op, sample(...))")
    return schema


def _argument(argument: Any, dim: int, gen: torch.Generator) -> Any:
    kind = str(argument.type)
    if kind == "Tensor":
        return torch.randn(SIDE, SIDE, generator=gen, dtype=torch.float64)
    if kind in ("List[Tensor]", "Tensor[]"):
        return [torch.randn(SIDE, SIDE, generator=gen, dtype=torch.float64) for _ in range(2)]
    made: dict[str, Any] = {"int": dim, "bool": False, "float": 0.5, "number": 0.5, "Scalar": 0.5, "List[int]": [dim]}
    return made.get(kind)


# ---- one call ----


def run_whole(target: str, each: Sample) -> tuple[Call, list[torch.Tensor], list[Any]]:
    """(call, operands, flat results) of the operator on whole tensors; refuses operators that draw random numbers."""
    tensors: list[torch.Tensor] = []
    args = _abstract(each.args, tensors)
    kwargs = tuple((name, _abstract(value, tensors)) for name, value in each.kwargs.items())
    whole = _run(target, args, kwargs, tensors)
    again = _run(target, args, kwargs, tensors)
    for first, second in zip(whole, again, strict=True):
        if isinstance(first, torch.Tensor) and not torch.equal(first.nan_to_num(), second.nan_to_num()):
            raise InputError(
                f"{target} gives something else each time, so nothing can be compared. Try: a random operator keyed by "
                "a seed"
            )
    operands = tuple(TensorType(tuple(x.shape), x.dtype) for x in tensors)
    return Call(target, args, kwargs, operands, tuple(map(_type, whole))), tensors, whole


def _abstract(x: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(x, torch.Tensor):
        tensors.append(x.detach().double() if x.is_floating_point() else x)
        return Ref(len(tensors) - 1)
    if isinstance(x, (tuple, list)):
        return tuple(_abstract(item, tensors) for item in x)
    return x


def _type(result: Any) -> TensorType | None:
    return TensorType(tuple(result.shape), result.dtype) if isinstance(result, torch.Tensor) else None


def _run(target: str, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]) -> list[Any]:
    given = {name: map_refs(value, tensors.__getitem__) for name, value in kwargs}
    with torch.no_grad():
        return flat_results(resolve(target)(*map_refs(args, tensors.__getitem__), **given))


def _claimed(
    call: Call, mesh: Mesh, registry: Registry, own: Registry | None
) -> Iterator[tuple[Strategy, Rule | None]]:
    """The strategies to prove and the rule they came from: all, or those that a plugin has of its `own`."""
    rule = registry.rule(call)
    if rule is not None and (own is None or {call.target, f"{call.target}.default"} & {*own.rules, *REGISTERED}):
        rule.check(call)
        _check_decided(call, rule)
        for strategy in enumerate_strategies(call, rule, mesh):
            yield strategy, rule
    if own is None:
        extra = registry.extra_strategies(call, mesh)
    else:
        built_in = build_registry((), installed=False).extra_strategies(call, mesh)
        extra = own.extra_strategies(call, mesh)[len(built_in) :]
    for strategy in extra:
        yield strategy, rule


def _check_decided(call: Call, rule: Rule) -> None:
    """Every factor is on a result, reduced, or said to be whole.

    One that was forgotten would never be split, without a word.
    """
    forgotten = rule.undecided()
    if forgotten:
        first = forgotten[0]
        raise CheckError(
            f"{call.target}: the rule {rule.text()} says nothing of {', '.join(forgotten)}, which is on no result, so "
            f"no axis can split it. Try: reduce={{{first!r}: 'sum'}}, or [{first}] where it must be whole"
        )


# ---- one strategy ----


def prove(
    call: Call,
    strategy: Strategy,
    rule: Rule | None,
    mesh: Mesh,
    tensors: Sequence[torch.Tensor],
    whole: Sequence[Any],
    registry: Registry,
) -> float:
    """The largest scaled difference between the ranks' results and the whole. Raises CheckError beyond 1e-10."""
    what = f"{call.target} {strategy.name} on {_words(mesh)}"
    _check_layouts(call, strategy, what)
    local = _lowered(call, strategy, rule, mesh, what)
    _check_cost(strategy, rule, mesh, local, registry, what)
    inputs = [terms(x, layout, mesh) for x, layout in zip(tensors, strategy.ins, strict=True)]
    try:
        outs = backend_for(mesh, "simulated").run(local, mesh, inputs)
    except Exception as error:
        raise CheckError(f"{what} fails on the ranks: {type(error).__name__}: {error}") from error
    worst = 0.0
    shards_of_results = iter(outs)
    for number, (layout, expected) in enumerate(zip(strategy.outs, whole, strict=True)):
        if layout is not None and expected is not None:
            words = f"{what}, result {number} [{layout.text()}]"
            worst = max(worst, _check_result(words, next(shards_of_results), layout, mesh, expected))
    return worst


def _check_layouts(call: Call, strategy: Strategy, what: str) -> None:
    for kind, layouts, types in (("operands", strategy.ins, call.ins), ("results", strategy.outs, call.outs)):
        if len(layouts) != len(types):
            raise CheckError(f"{what}: {len(layouts)} layouts for {len(types)} {kind}")
        for layout, typ in zip(layouts, types, strict=True):
            if layout is not None and typ is not None and layout.shape != typ.shape:
                raise CheckError(f"{what}: a layout of {layout.shape} among the {kind} for a tensor of {typ.shape}")


def _lowered(call: Call, strategy: Strategy, rule: Rule | None, mesh: Mesh, what: str) -> Program:
    """The local program of the call alone."""
    inputs = tuple(range(len(call.ins)))
    values = {id: Value(id, operand.shape, operand.dtype) for id, operand in enumerate(call.ins)}
    outs: list[int | None] = []
    outputs: list[int] = []
    layouts: list[Layout] = []
    for id, (result, layout) in enumerate(zip(call.outs, strategy.outs, strict=True), len(inputs)):
        outs.append(None if result is None else id)
        if result is not None:
            values[id] = Value(id, result.shape, result.dtype)
        if result is not None and layout is not None:
            outputs.append(id)
            layouts.append(layout)
    node = Node(call.target, call.args, call.kwargs, tuple(outs))
    program = Program(inputs, (node,), tuple(outputs), values)
    try:
        return lower(program, [Choice(strategy, rule)], dict(enumerate(strategy.ins)), layouts, mesh, record_local)
    except Exception as error:
        raise CheckError(f"{what} cannot be lowered: {type(error).__name__}: {error}") from error


def terms(x: torch.Tensor, layout: Layout, mesh: Mesh) -> list[torch.Tensor]:
    """All ranks' parts; along axes with a pending reduction the parts are random terms that reduce to `x`."""
    pending = sorted(layout.pending, key=lambda term: OUTER_FIRST.index(term[1]))
    gen = torch.Generator().manual_seed(1)
    found: dict[tuple[int, ...], torch.Tensor] = {(): x}
    for axis, how in pending:
        split: dict[tuple[int, ...], torch.Tensor] = {}
        for key, whole in found.items():
            for index, term in enumerate(_split(whole, how, mesh.axis_size(axis), gen)):
                split[*key, index] = term
        found = split
    bare = layout.with_pending(())
    each: list[torch.Tensor] = []
    for rank in range(mesh.size):
        at = mesh.coordinates(rank)
        term = found[tuple(at[axis] for axis, _ in pending)]
        each.append(part(term, bare, mesh, rank).contiguous())
    return each


def _split(x: torch.Tensor, how: str, n: int, gen: torch.Generator) -> list[torch.Tensor]:
    """`n` tensors whose sum, maximum or minimum is `x`."""
    noise: list[torch.Tensor] = []
    for _ in range(n - 1):
        noise.append((torch.rand(x.shape, generator=gen, dtype=torch.float64) * 4).to(x.dtype))
    if how == "sum":
        return [x - torch.stack(noise).sum(0).to(x.dtype), *noise]
    # Every element has its maximum on another rank.
    owner = torch.randint(0, n, x.shape, generator=gen)
    found: list[torch.Tensor] = []
    for rank, shift in enumerate((noise[0], *noise)):
        beyond = x - shift if how == "max" else x + shift
        found.append(torch.where(owner == rank, x, beyond))
    return found


def _check_result(
    what: str, shards: Sequence[torch.Tensor], layout: Layout, mesh: Mesh, expected: torch.Tensor
) -> float:
    for rank, shard in enumerate(shards):
        if tuple(shard.shape) != layout.local_shape or shard.dtype != expected.dtype:
            raise CheckError(
                f"{what}: rank {rank} has {tuple(shard.shape)} {shard.dtype}, its part is {layout.local_shape} "
                f"{expected.dtype}"
            )
    _check_copies(what, shards, layout, mesh)
    whole = replicated(layout.shape)
    got = convert_shards(list(shards), layout, whole, mesh, backend_for(mesh, "simulated"))[0]
    if not (expected.dtype.is_floating_point or expected.dtype.is_complex):
        worst = 0.0 if torch.equal(got, expected) else float("inf")
    else:
        worst = scaled_difference(got, expected)
    if not worst <= BOUND:
        raise CheckError(f"{what} differs from the operator on whole tensors by {worst:.3g} of the largest value")
    return worst


def _check_copies(what: str, shards: Sequence[torch.Tensor], layout: Layout, mesh: Mesh) -> None:
    """Ranks that hold the same part must hold the same values."""
    split = {*layout.axes, *(axis for axis, _ in layout.pending)}
    first: dict[tuple[int, ...], int] = {}
    for rank, shard in enumerate(shards):
        where = mesh.coordinates(rank)
        other = first.setdefault(tuple(where[axis] for axis in mesh.axis_names if axis in split), rank)
        if not torch.allclose(shard, shards[other], rtol=1e-10, atol=1e-10, equal_nan=True):
            raise CheckError(f"{what}: ranks {other} and {rank} hold the same part with different values")


def _check_cost(
    strategy: Strategy, rule: Rule | None, mesh: Mesh, local: Program, registry: Registry, what: str
) -> None:
    cost = strategy.cost
    figures = {"flops": cost.flops, "nbytes": cost.nbytes, "peak_bytes": cost.peak_bytes, "extra_s": cost.extra_s}
    wrong = [f"{name}={value}" for name, value in figures.items() if not (math.isfinite(value) and value >= 0)]
    if wrong:
        raise CheckError(f"{what}: cost has {', '.join(wrong)}; figures are finite and not negative")
    flops = None if rule is None else rule.flops
    if flops is not None and strategy.local is not None and cost.flops * mesh.size < 0.5 * flops:
        raise CheckError(
            f"{what}: all ranks together claim {cost.flops * mesh.size:.3g} flops, the operator has {flops:.3g}; "
            "Cost.flops is the work of one rank"
        )
    spent = program_cost(local, mesh, registry.rule)
    priced = strategy.local is not None and mesh.collective_s("all_gather", 1.0, mesh.axis_names) > 0
    if spent.wire_bytes > 0 and cost.extra_s == 0 and priced:
        calls = ", ".join(f"{kind} over {axes}" for kind, axes in spent.calls)
        raise CheckError(
            f"{what}: the local code communicates ({calls}), its cost has extra_s=0. Try: "
            "extra_s=mesh.collective_s(...)"
        )
