"""Brute force against rules: whatever a rule claims is tried on real ranks' parts and compared with the whole.

`check_call(call, tensors)` takes one operator call and its operands, and for every factor that the rule lets be split,
every axis size of 2, 3 and 5 that divides it, and major, striped and composite layouts: cuts the operands, runs the
operator (or the rule's local code) on each rank's part, joins the results and compares with the operator on the whole.
The same for pending sums and maxima, and for two axes on two factors. Returns the (factor, axis size, layout) triples
that were really split. Shares no code with the planner beyond the records themselves and `place`-free layout building.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache, reduce
from itertools import combinations
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from colofunc.mesh import Mesh
from colofunc.program.facts import COLLECTIVES
from colofunc.program.ir import map_refs
from colofunc.spec.layout import Dim, Layout
from colofunc.spec.parts import join
from colofunc.spec.rule import Call, Ref, Rule, Strategy, TensorType
from colofunc.spec.rules import rule_for, strategies_for
from colofunc.spec.strategies import build, usable
from colofunc.testing.parts import part

SIZES = (2, 3, 5)
VIEWS = {"aten.view.default": "aten.reshape.default", "aten._unsafe_view.default": "aten.reshape.default"}


class RuleBroken(AssertionError):
    """A rule claims something that the numbers deny."""


def _rms_norm_backward(
    g: torch.Tensor, x: torch.Tensor, shape: Any, rstd: torch.Tensor, w: Any, mask: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """No CPU kernel: the derivative of x * rstd * w by autograd."""
    with torch.enable_grad():
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        out = x * torch.rsqrt((x * x).mean(tuple(range(-len(shape), 0)), keepdim=True) + 1e-5) * w
        return torch.autograd.grad(out, (x, w), g)


REFERENCES = {"aten._fused_rms_norm_backward.default": _rms_norm_backward}


def resolve(target: str) -> Callable[..., Any]:
    """The function behind a target name; views run as reshape, as they do after lowering."""
    if target in REFERENCES:
        return REFERENCES[target]
    space, name, *overload = VIEWS.get(target, target).split(".")
    packet = getattr(getattr(torch.ops, space), name)
    return getattr(packet, overload[0] if overload else "default")


def run(target: str, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """The operator's flat results on these operands."""
    at = lambda k: tensors[k]  # noqa: E731
    out = resolve(target)(*_lists(map_refs(args, at)), **{k: _lists(v) for k, v in map_refs(kwargs, at)})
    return [r if isinstance(r, torch.Tensor) else None for r in flat(out)]


def _lists(tree: Any) -> Any:
    return (
        [_lists(t) for t in tree]
        if isinstance(tree, tuple) and any(isinstance(t, torch.Tensor) for t in tree)
        else tree
    )


def flat(out: Any) -> list[Any]:
    return list(pytree.tree_leaves(out)) if isinstance(out, (tuple, list)) else [out]


def make_call(target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, list[torch.Tensor]]:
    """(call, operands) of an operator applied to real tensors; lists become tuples."""
    tensors: list[torch.Tensor] = []

    def abstract(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            tensors.append(x)
            return Ref(len(tensors) - 1)
        if isinstance(x, (tuple, list)):
            return tuple(abstract(v) for v in x)
        return x

    args2 = abstract(tuple(args))
    kwargs2 = tuple((k, abstract(v)) for k, v in kwargs.items())
    outs = run(target, args2, kwargs2, tensors)
    typed = lambda x: None if x is None else TensorType(tuple(x.shape), x.dtype)  # noqa: E731
    return Call(target, args2, kwargs2, tuple(typed(t) for t in tensors), tuple(map(typed, outs))), tensors


@cache
def mesh_of(*sizes: int) -> Mesh:
    return Mesh(topology="ideal", **{f"x{i}": n for i, n in enumerate(sizes)})


def atoms_of(size: int, n: int) -> Iterator[tuple[str, Dim]]:
    """Ways to split a factor of `size` over axis x0 of `n`: major, striped, block-cyclic."""
    yield "major", ((n, "x0"), (size // n, None))
    if size // n > 1:
        yield "striped", ((size // n, None), (n, "x0"))
        small = next((p for p in (2, 3, 5) if size // n % p == 0 and size // n > p), None)
        if small:
            yield "cyclic", ((small, None), (n, "x0"), (size // n // small, None))


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not (a.dtype.is_floating_point or a.dtype.is_complex):
        return torch.equal(a, b)
    rough = torch.finfo(a.dtype).eps > 1e-12
    scale = max(1.0, float(b[torch.isfinite(b)].abs().max()) if b.numel() and torch.isfinite(b).any() else 1.0)
    return torch.allclose(a, b, rtol=1e-4 if rough else 1e-10, atol=(1e-4 if rough else 1e-10) * scale, equal_nan=True)


def spread(x: torch.Tensor, layout: Layout, mesh: Mesh) -> list[torch.Tensor]:
    """All ranks' parts, with a pending reduction given as different terms on every rank."""
    terms: dict[tuple[int, ...], torch.Tensor] = {}
    axes = [a for a, _ in layout.pending]
    where = [tuple(mesh.coordinates(r)[a] for a in axes) for r in range(mesh.size)]
    keys = sorted(set(where))
    gen = torch.Generator().manual_seed(1)
    hows = {how for _, how in layout.pending}
    for key in keys[:-1]:
        noise = torch.rand(x.shape, generator=gen, dtype=torch.float64)
        if not hows:
            terms[key] = x
        elif hows == {"sum"}:
            terms[key] = (
                torch.round(noise * 4 - 2) if not x.dtype.is_floating_point and not x.dtype.is_complex else noise
            ).to(x.dtype)
        else:
            keep = torch.rand(x.shape, generator=gen) < 0.5
            shift = torch.ceil(noise * 3).to(x.dtype)
            terms[key] = torch.where(keep, x, x - shift if hows == {"max"} else x + shift)
    terms[keys[-1]] = x - sum(terms.values()) if hows == {"sum"} else x
    bare = layout.with_pending(())
    return [part(terms[where[r]], bare, mesh, r).contiguous() for r in range(mesh.size)]


def verify(
    call: Call, rule: Rule | None, strategy: Strategy, mesh: Mesh, tensors: Sequence[torch.Tensor], whole: Sequence[Any]
) -> None:
    """Run one strategy on all ranks and compare with `whole`; raises RuleBroken."""
    shards = [spread(x, layout, mesh) for x, layout in zip(tensors, strategy.ins, strict=True)]
    args, kwargs = call.args, call.kwargs
    if rule is not None and rule.localize is not None:
        args, kwargs = rule.localize(call, strategy.ins, strategy.outs)
    if strategy.local is None:
        results = [run(call.target, args, kwargs, [s[rank] for s in shards]) for rank in range(mesh.size)]
    else:
        results = together(strategy.local, shards, mesh)
    compare(call, strategy, mesh, results, whole)


class Meeting:
    """Where the threads of all ranks exchange values: post, wait for all, read."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.posted: list[Any] = [None] * mesh.size
        self.barrier = threading.Barrier(mesh.size)

    def exchange(self, rank: int, value: Any, axes: Sequence[str]) -> list[Any]:
        """The values of all ranks that differ from `rank` only along `axes`, in row-major order over them."""
        self.posted[rank] = value
        self.barrier.wait(timeout=30)
        here = self.mesh.coordinates(rank)
        peers = [
            r
            for r in range(self.mesh.size)
            if all(self.mesh.coordinates(r)[a] == i for a, i in here.items() if a not in axes)
        ]
        peers.sort(key=lambda r: [self.mesh.coordinates(r)[a] for a in axes])
        found = [self.posted[r] for r in peers]
        self.barrier.wait(timeout=30)
        return found


class RankMode(TorchDispatchMode):
    """Runs collectives of one rank by meeting the other ranks' threads; everything else runs as it is."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__()
        self.meeting, self.rank = meeting, rank

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removesuffix(".default")
        where = self.meeting.mesh.coordinates(self.rank)
        if name == "colofunc.axis_index":
            index = 0
            for axis in args[0]:
                index = index * self.meeting.mesh.axis_size(axis) + where[axis]
            return torch.tensor(index)
        if name == "colofunc.all_reduce":
            x, axes, _, how = args
            fold = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[how]
            with _disable_current_modes():
                return reduce(fold, self.meeting.exchange(self.rank, x, axes)).clone()
        if name == "colofunc.all_gather":
            x, axes, _ = args
            with _disable_current_modes():
                return torch.stack(self.meeting.exchange(self.rank, x, axes))
        if name.startswith("colofunc.") and name in COLLECTIVES:
            raise NotImplementedError(name)
        return func(*args, **(kwargs or {}))


def together(local: Callable[..., Any], shards: Sequence[Sequence[torch.Tensor]], mesh: Mesh) -> list[list[Any]]:
    """Local code on every rank at once, one thread per rank; the flat results in rank order."""
    meeting = Meeting(mesh)
    results: list[Any] = [None] * mesh.size
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            with RankMode(meeting, rank):
                results[rank] = flat(local(*[s[rank] for s in shards], mesh=mesh))
        except BaseException as error:
            if not isinstance(error, threading.BrokenBarrierError):
                errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(mesh.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def compare(call: Call, strategy: Strategy, mesh: Mesh, results: Sequence[Sequence[Any]], whole: Sequence[Any]) -> None:
    """Join every result over the ranks; raises RuleBroken where it differs from the whole."""
    for k, (layout, want) in enumerate(zip(strategy.outs, whole, strict=True)):
        if layout is None or want is None:
            continue
        locals_ = [r[k] for r in results]
        for rank, got in enumerate(locals_):
            if tuple(got.shape) != layout.local_shape:
                raise RuleBroken(
                    f"{call.target} {strategy.name} result {k} on rank {rank}: shape {tuple(got.shape)}, "
                    f"{layout} says {layout.local_shape}"
                )
        got = join(locals_, layout, mesh)
        if not close(got, want):
            raise RuleBroken(
                f"{call.target}{call.args}{call.kwargs} {strategy.name} result {k} ({layout}): values differ by "
                f"{(got.double() - want.double()).abs().max() if got.numel() and not got.dtype.is_complex else '?'}"
            )


def deterministic(call: Call, tensors: Sequence[torch.Tensor], first: Sequence[Any]) -> bool:
    """Whether running the operator again gives the same (empty and random ones do not)."""
    again = run(call.target, call.args, call.kwargs, tensors)
    return not any(name in call.target for name in ("empty", "rand", "bernoulli", "native_dropout.")) and all(
        a is None or torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)) for a, b in zip(first, again, strict=True)
    )


def cases(
    rule: Rule, call: Call, sizes: Sequence[int] = SIZES
) -> Iterator[tuple[Strategy, Mesh, tuple[str, int, str]]]:
    """Every strategy that the rule claims, with its mesh and the (factor, axis size, layout) it stands for."""
    free = usable(rule)
    for factor in free:
        for n in sizes:
            if rule.sizes[factor] % n == 0 and rule.sizes[factor] > 1:
                for kind, atoms in atoms_of(rule.sizes[factor], n):
                    yield build(call, rule, {factor: atoms}), mesh_of(n), (factor, n, kind)
        if rule.sizes[factor] % 4 == 0:
            atoms = ((2, "x1"), (2, "x0"), (rule.sizes[factor] // 4, None))
            yield build(call, rule, {factor: atoms}), mesh_of(2, 2), (factor, 4, "composite")
    for how, groups in (("sum", rule.linear), ("max", rule.monotone)):
        for i, group in enumerate(groups):
            name = how + "".join(map(str, sorted(group)))
            yield build(call, rule, {}, (("x0", i, how),)), mesh_of(2), (name, 2, "pending")
            for factor in free[:3]:
                if rule.sizes[factor] % 2 == 0:
                    placement = {factor: ((2, "x1"), (rule.sizes[factor] // 2, None))}
                    yield build(call, rule, placement, (("x0", i, how),)), mesh_of(2, 2), (name, 4, "pending split")
    pairs = [
        (a, b, m, n)
        for a, b in combinations(free, 2)
        for m in (2, 3)
        for n in (2, 3)
        if rule.sizes[a] % m == 0 and rule.sizes[b] % n == 0
    ]
    for a, b, m, n in pairs[:6]:
        placement = {a: ((m, "x0"), (rule.sizes[a] // m, None)), b: ((n, "x1"), (rule.sizes[b] // n, None))}
        yield build(call, rule, placement), mesh_of(m, n), (f"{a} {b}", m * n, "two axes")


def check_call(
    call: Call, tensors: Sequence[torch.Tensor], rule: Rule | None = None, sizes: Sequence[int] = SIZES
) -> list[tuple[str, int, str]]:
    """Try everything that the call's rule claims; returns what was tried. Raises RuleBroken."""
    rule = rule or rule_for(call)
    if rule is None:
        return []
    rule.check(call)
    if rule.undecided():
        raise RuleBroken(f"{call.target}: {rule.text()} says nothing of {rule.undecided()}, which are on no result")
    whole = run(call.target, call.args, call.kwargs, tensors)
    done = []
    stable = deterministic(call, tensors, whole)
    for strategy, mesh, what in cases(rule, call, sizes):
        if stable:
            try:
                verify(call, rule, strategy, mesh, tensors, whole)
            except RuleBroken:
                raise
            except Exception as error:
                raise RuleBroken(f"{call.target}{call.args} {strategy.name} {what} fails: {error}") from error
        done.append(what)
    return done


def check_op(target: str, *args: Any, sizes: Sequence[int] = SIZES, **kwargs: Any) -> set[str]:
    """Check one call given as real tensors; returns the factors that were split."""
    call, tensors = make_call(target, args, kwargs)
    return {factor for factor, _, kind in check_call(call, tensors, sizes=sizes) if kind != "pending"}


def check_strategies(target: str, *args: Any, **kwargs: Any) -> set[str]:
    """Try every strategy with local code on meshes of 2, 3, 5 and 2x2; returns the names of those tried."""
    call, tensors = make_call(target, args, kwargs)
    return {f"{n}" for n in tried_strategies(call, tensors, (mesh_of(2), mesh_of(3), mesh_of(5), mesh_of(2, 2)))}


def tried_strategies(call: Call, tensors: Sequence[torch.Tensor], meshes: Sequence[Mesh]) -> list[str]:
    whole = run(call.target, call.args, call.kwargs, tensors)
    done = []
    for mesh in meshes:
        for strategy in strategies_for(call, mesh):
            try:
                verify(call, None, strategy, mesh, tensors, whole)
            except RuleBroken:
                raise
            except Exception as error:
                raise RuleBroken(f"{call.target}{call.args} {strategy.name} fails: {error}") from error
            done.append(strategy.name)
    return done
