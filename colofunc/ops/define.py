"""Defining a canonical operator: schema, kernel, fake kernel and gradient in one place.

Problem: an operator that stays whole in a trace needs a schema, a real kernel, a shape function and a derivative, and
each must agree with the others. Idea: `define` takes the four as plain functions and registers them, with the facts
that plans and passes ask for (`ops.facts`).

    linear = define("linear(Tensor x, Tensor w, Tensor? b) -> Tensor", kernel, fake, (save, backward))
    linear(x, w, b)                        # torch.ops.colofunc.linear with its gradient
    KERNELS["colofunc.linear"](x, w, b)    # the kernel alone: no dispatcher, no gradient, for executors

`Operator.apply` is the same operator as a `torch.autograd.Function`. It exists because `torch.func.grad` cannot see
through gradients that are registered with the dispatcher; canonical replacements in a trace use it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from colofunc import compat
from colofunc.ops.facts import NOTHING, Facts

NAMESPACE = "colofunc"
# Fragments live as long as these objects: they are the registration itself.
LIBRARIES: dict[str, torch.library.Library] = {}
# "colofunc.linear" -> the plain Python kernel.
KERNELS: dict[str, Callable[..., Any]] = {}
# "colofunc.linear" -> the same in operators of torch, for those that a compiler may fuse with their neighbours.
FOR_COMPILERS: dict[str, Callable[..., Any]] = {}
# Of these, those that equal layers call with another number each, and which argument that is: "colofunc.dropout" -> 2.
NUMBERED: dict[str, int] = {}
# "colofunc.linear" -> all that its definition says.
OPERATORS: dict[str, Operator] = {}

KINDS: Mapping[str, str] = {
    "wire": "all of a group take part",
    "peer": "some of a group send to others of it",
    "rank": "what it gives depends on the rank, which needs no other for it",
    "layout": "the same elements in another shape, or later",
    "copy": "from one tier of memory to another",
    "effect": "something is shown or handed on when a step comes there; it has no result",
}
"""Kinds of operators that executors write themselves."""

Where = Callable[[Mapping[str, Any]], bool]  # arguments by name -> whether
GradientFns = tuple[Callable[..., None], Callable[..., Any]]  # (save for backward, backward)


@attrs.frozen(eq=False)
class Operator:
    """A registered operator: calling it goes through torch's dispatcher.

    What its definition says of it is written at `define`.
    """

    name: str  # "colofunc.linear"
    op: Any  # the OpOverload
    kernel: Callable[..., Any]
    function: type[torch.autograd.Function] | None = None
    kind: str = ""  # of those that executors write themselves, one of KINDS
    gradient_at: int | None = None  # of an update of a parameter: the argument with its gradient
    narrow_where: Where | None = None
    narrow_on_device: bool = False
    facts: Facts = NOTHING
    # `op` for who calls it for small tensors, arguments by position
    bare: Callable[..., Any] = attrs.field(init=False, repr=False)

    @bare.default
    def _bare(self) -> Callable[..., Any]:
        return compat.bare_call(self.op)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.op(*args, **kwargs)

    def apply(self, *args: Any) -> Any:
        """The same call as an autograd function; all arguments positional, none left out."""
        if self.function is None:
            return self.op(*args)
        return self.function.apply(*args)


def define(
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    gradient: GradientFns | None = None,
    namespace: str = NAMESPACE,
    library: torch.library.Library | None = None,
    for_compilers: Callable[..., Any] | None = None,
    number: str | None = None,
    kind: str = "",
    updates_by: str | None = None,
    narrow_where: Where | None = None,
    narrow_on_device: bool = False,
    facts: Facts = NOTHING,
) -> Operator:
    """Register `colofunc::<schema>`. `fake` makes empty results; `gradient` is (setup_context, backward).

    `for_compilers`: the same in operators of torch, with no question about a tensor but its shape, dtype, strides and
    device; a compiled step then fuses it with its neighbours. Without it the operator is called between compiled
    segments.

    `number`: an integer argument in which calls of equal layers differ. A compiled function is given it as a 0-dim
    tensor of the host, so that all of them share it.

    `kind`: of an operator that executors write themselves, one of `KINDS`.

    `updates_by`: of an update of a parameter (argument `param`) and its state, the argument with the gradient.
    `narrow_where`: with which arguments, by name, it reads on the host a gradient narrower than the parameter;
    `narrow_on_device`: with these on a GPU, too, by a kernel in CUDA.

    `facts`: what plans, passes and costs know of it.

    `library`: a fragment of its own, which the caller keeps and may undo.
    """
    name = schema.split("(", 1)[0].strip()
    if library is None:
        if namespace not in LIBRARIES:
            LIBRARIES[namespace] = torch.library.Library(namespace, "FRAGMENT")
        library = LIBRARIES[namespace]
    library.define(schema)
    library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{namespace}::{name}", fake, lib=library)
    op = getattr(getattr(torch.ops, namespace), name).default
    function = None
    if gradient is not None:
        save, backward = gradient
        torch.library.register_autograd(f"{namespace}::{name}", backward, setup_context=save, lib=library)
        function = _function(f"{namespace}_{name}", op, save, backward, facts.own_memory)
    KERNELS[f"{namespace}.{name}"] = kernel
    if for_compilers is not None:
        FOR_COMPILERS[f"{namespace}.{name}"] = for_compilers
    arguments = [argument.name for argument in op._schema.arguments]
    if number is not None:
        NUMBERED[f"{namespace}.{name}"] = arguments.index(number)
    gradient_at = None if updates_by is None else arguments.index(updates_by)
    operator = Operator(
        f"{namespace}.{name}",
        op,
        kernel,
        function,
        kind,
        gradient_at,
        narrow_where,
        narrow_on_device,
        facts,
    )
    OPERATORS[operator.name] = operator
    return operator


def define_update(
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any] | None = None,
    narrow_where: Where | None = None,
    narrow_on_device: bool = False,
) -> tuple[Operator, Operator]:
    """An update of `param` by `grad` as the two operators that `ops.twins` pairs: the functional one, and the one in
    place.

    schema, kernel, fake: of the one in place, "move_(Tensor(a!) param, Tensor grad, ...) -> ()". The functional one,
    `move`, runs it on copies of what it writes over, and gives them behind the results of its own; an operand that is
    not there is an empty result.
    """
    head, _, returned = schema.rpartition(" -> ")
    in_place = define(
        schema, kernel, fake or nothing, updates_by="grad", narrow_where=narrow_where, narrow_on_device=narrow_on_device
    )
    names = [argument.name for argument in in_place.op._schema.arguments]
    written = [argument.name for argument in in_place.op._schema.arguments if argument.alias_info is not None]

    def on_copies(
        write: Callable[..., Any] | None, copied: Callable[[Tensor], Tensor]
    ) -> Callable[..., tuple[Tensor, ...]]:
        def run(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
            given = dict(zip(names, args, strict=False)) | kwargs
            copies = {name: copied(given[name]) for name in written if given.get(name) is not None}
            own = None if write is None else write(**given | copies)
            empty = given["param"].new_empty
            return *(own or ()), *(copies[name] if name in copies else empty(0) for name in written)

        return run

    plain = re.sub(r"\(\w!\)", "", head).replace("_(", "(", 1)
    results = ", ".join(["Tensor"] * (returned.count("Tensor") + len(written)))
    of_copies, of_shapes = on_copies(kernel, torch.clone), on_copies(fake, torch.empty_like)
    return define(f"{plain} -> ({results})", of_copies, of_shapes, updates_by="grad"), in_place


def nothing(*args: object, **kwargs: object) -> None:
    """The fake kernel of an operator that only writes over its arguments."""


def always(arguments: Mapping[str, Any]) -> bool:
    """`narrow_where` of an operator that reads narrow gradients with any arguments."""
    return True


def of_kind(*kinds: str) -> frozenset[str]:
    """The names, without namespace, of operators of some `KINDS` that are defined by now."""
    return frozenset(name.partition(".")[2] for name, operator in OPERATORS.items() if operator.kind in kinds)


def _no_view(out: Any) -> Any:
    """A result in memory of its own is no view, also where the kernel made it by one, as torch's linear layer does of
    three dims: autograd lets nobody write to a view that a function made.
    """
    if not isinstance(out, torch.Tensor) or compat.view_base(out) is None:
        return out
    return torch.ops.aten._unsafe_view(out, out.shape)


def _function(
    name: str, op: Any, save: Callable[..., None], backward: Callable[..., Any], own_memory: bool
) -> type[torch.autograd.Function]:
    def forward(*args: Any) -> Any:
        return _no_view(op(*args)) if own_memory else op(*args)

    body = {
        "forward": staticmethod(forward),
        "setup_context": staticmethod(save),
        "backward": staticmethod(backward),
        "generate_vmap_rule": True,
    }
    return type(name.capitalize(), (torch.autograd.Function,), body)
