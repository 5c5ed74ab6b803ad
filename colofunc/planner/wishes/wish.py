"""Wishes: what a user or a named plan wants of single tensors and operators.

    {"*.q_proj.weight": "(tp o) i"}            a spec for parameters; it speaks for the axes that it names (tp)
    {"*.mlp.fc": "{tp: o}"}                    a strategy for the forward operators of a module; backward stays free
    lambda name, shape: "(tp o) i" or None     a function of parameter name and global shape
    Wish("*", "(dp ...)", axes=("dp",))        what a named plan such as zero(3, "dp") gives
    Wish("*", ("(dp o) i", "o (dp i)"))        one of several, the cheapest
    Wish("batch.*", "(dp ...)", along=True)    and every operator that it reaches by itself works so (`propagation`)

Problem: dicts, functions and named plans say the same in different ways. Idea: all become one record, `Wish`; what it
means for a program's leaves and operators, and that a clash is an error, is said by `wish_constraints`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import attrs

from colofunc.errors import PlanError, PluginError, plugin_faults
from colofunc.mesh import Mesh
from colofunc.planner.plan import matches
from colofunc.planner.wishes.propagation import Rules
from colofunc.program.ir import Program
from colofunc.spec.layout import Layout
from colofunc.spec.spec import Spec

Want = str | Spec | Layout
PARAMETERS = ("param", "frozen")


@attrs.frozen
class Wish:
    """One wish. `match`: a glob on parameter names or module paths, or a test of the name.

    `want`: a spec (of a tensor), several of which any will do, or "{axis: factor}" (of an operator; "{tp: whole}" keeps
    tp out). `axes`: it speaks for these only; None: those that `want` names, all if it names none. `roles`: input
    leaves it may mean; None: parameters, or any leaf where no parameter matches. `source`: who wishes, for messages.
    `optional`: it may match nothing. `along`: operators that work on the tensor as it lies, forward and backward, are
    held to do so; wishes of one source are followed together, and so is what an operator gives under the pattern of a
    plugin that is wished for it. `rest`: how results that are reduced on the way lie then (see `follow`), which holds
    what works on these too. `regather`: whether a parameter is gathered anew in backward; None: as memory asks.
    `phases`: the phases whose operators an operator wish holds. `chunk`: the parameter lies with others in chunks of so
    many elements ("auto": searched), which are gathered and reduced as one. `scatter`: whether its gradient is reduced
    in each microbatch (True: less memory, more on the wire) or once; None: as memory asks. The role "grad" means what
    the update makes of gradients elementwise. The words in "{axis: word}" are factors of the operator's rule, or what a
    plugin's strategy calls its own pattern ("{cp: ring}"). `across`: operators that are not followed but crossed: what
    goes in split comes out split, and a wish of its own says how they work (see `follow`). `rank`: where wishes speak
    for one axis of one tensor or operator, those of lower rank are not heard. `apart`: where several results that are
    reduced on the way are summed, each is reduced by itself before (see `follow`). `gathers`: products whose last
    operand is gathered where it does not fit the others (keys, of which rows of scores need all). `values`: ids of
    values inside the program, instead of names: those that read them take them so, and it is followed from there. Of an
    operator wish: only the operators that make one of them, where several stand under one path (an adapter's products).
    """

    match: str | Callable[[str], bool]
    want: Want | tuple[Want, ...]
    axes: tuple[str, ...] | None = None
    roles: tuple[str, ...] | None = None
    source: str = "the plan"
    optional: bool = False
    targets: tuple[str, ...] = ()  # operators meant ("colofunc.linear"); () for all of the module
    along: bool = False
    regather: bool | None = None
    rest: Mapping[int, str] | None = None
    phases: tuple[str, ...] = ("forward",)
    chunk: int | str | None = None
    scatter: bool | None = None
    across: tuple[str, ...] = ()
    rank: int = 0
    values: tuple[int, ...] = ()
    gathers: tuple[str, ...] = ()
    apart: bool = False

    @property
    def wants(self) -> tuple[Want, ...]:
        """What it wants, any of these."""
        return self.want if isinstance(self.want, tuple) else (self.want,)

    @property
    def on_operator(self) -> bool:
        """Whether it wants a strategy `{axis: factor}` of operators, not a spec of leaves."""
        return all(isinstance(want, str) and want.lstrip().startswith("{") for want in self.wants)

    def meets(self, name: str) -> bool:
        """Whether it is about the leaf or module of that name."""
        return matches(name, self.match) if isinstance(self.match, str) else bool(self.match(name))

    def __str__(self) -> str:
        pattern = self.match if isinstance(self.match, str) else "(a test of the name)"
        want = " or ".join(repr(w.text() if isinstance(w, Layout) else str(w)) for w in self.wants)
        return f"{self.source}: {pattern!r} -> {want}"


@runtime_checkable
class NamedPlan(Protocol):
    """What `zero(3, "dp")` and its like return: wishes about the axes it names, for a given program and mesh.

    A plan that asks what operators can do takes a third argument, `rules` (`cf.ext.Rules`): it knows the rules of the
    step's own plugins. One that says `splits_products = True`, as a mode of tensor parallelism does, has the products
    that every rank of its axes does whole named in the step's plan.
    """

    axes: tuple[str, ...]

    def wishes(self, program: Program, mesh: Mesh, /) -> Sequence[Wish]:
        """What the plan wants of this program on this mesh."""
        ...


def wishes_of(
    plan: Any, program: Program, source: str = "the plan", mesh: Mesh | None = None, rules: Rules | None = None
) -> tuple[Wish, ...]:
    """Wishes from a dict of globs, a function (name, shape) -> spec or None, a Wish, or a sequence of these.

    With `mesh` also from a named plan, which is told the `rules` if it takes them; its wishes speak for its axes only.
    """
    if isinstance(plan, Wish):
        return (plan,)
    if mesh is not None and isinstance(plan, NamedPlan):
        mesh.atoms(plan.axes)  # raises on unknown axes, with near names
        wishes: Callable[..., Sequence[Wish]] = plan.wishes
        told = {"rules": rules} if "rules" in inspect.signature(wishes).parameters else {}
        what, remedy = f"{source}: wishes of the plan {type(plan).__name__}", "a list of cf.ext.Wish records, or none"
        with plugin_faults(what, remedy):
            found = list(wishes(program, mesh, **told))
        for wish in found:
            if not isinstance(wish, Wish):
                raise PluginError(f"{what} gave {wish!r}. Try: {remedy}")
        return tuple(wish if wish.axes is not None else attrs.evolve(wish, axes=plan.axes) for wish in found)
    if isinstance(plan, Mapping):
        return tuple(
            attrs.evolve(want, match=match)
            if isinstance(want, Wish)
            else Wish(match, _want(want, match), source=source)
            for match, want in plan.items()
        )
    if callable(plan):
        wanted = []
        for id in program.inputs:
            value = program.values[id]
            want = plan(value.name, value.shape) if value.role in PARAMETERS else None
            if want is not None:
                wanted.append(Wish(value.name, _want(want, value.name), source=source))
        if not wanted:
            raise PlanError(
                f"{source}: the function gave no spec for any of the parameters; return a spec for some name"
            )
        return tuple(wanted)
    if isinstance(plan, Sequence) and not isinstance(plan, str):
        return tuple(w for part in plan for w in wishes_of(part, program, source, mesh, rules))
    raise PlanError(f"{source} is {plan!r}; give a dict of globs, a function (name, shape) -> spec, or a named plan")


def _want(want: object, match: object) -> Want:
    if isinstance(want, (str, Spec, Layout)):
        return want
    raise PlanError(
        f"the wish for {match!r} is {want!r}; give a spec such as '(tp o) i' or a strategy such as '{{tp: o}}'"
    )
