"""Trace: run a step function once on tensors without data, and keep what it computed as a `Program`.

Problem: a step is ordinary Python with autograd, in-place updates and module calls; planning needs it as data. Idea:
inputs become fake tensors on one symbolic device, a `Recorder` below autograd writes every operator down, and what
leaves the function becomes the outputs.

>>> traced = trace(lambda p, x: (p["w"] * x).sum(), ({"w": torch.ones(3)}, torch.ones(3)))
>>> [node.target for node in traced.program.nodes]
['aten.mul.Tensor', 'aten.sum.default']
"""

from __future__ import annotations

import inspect
import os
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import attrs
import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from colofunc import compat
from colofunc.errors import ColofuncError, InputError, TraceError
from colofunc.ops import canonical
from colofunc.ops.autocast import honoured_autocast
from colofunc.program.ir import Program, Value
from colofunc.program.tracing.attributes import watch_called
from colofunc.program.tracing.captured import placed_are_no_constants
from colofunc.program.tracing.function import TraceFunctions
from colofunc.program.tracing.infer import contiguous
from colofunc.program.tracing.leaks import put_back_attributes, refuse_leaks, warn_of_put_back
from colofunc.program.tracing.meta import activate, phase, raised_line, watch_modules
from colofunc.program.tracing.modules_used import HasFrozen, noted, noting
from colofunc.program.tracing.ops import handler_of
from colofunc.program.tracing.record import Recorder, TracedStorage
from colofunc.program.tracing.roles import Observed, next_values, results_of
from colofunc.program.tracing.tree import Tree, flatten, join, unflatten
from colofunc.spec.rule import TensorType

__all__ = ["Traced", "phase", "record_local", "trace", "watch_modules"]


@attrs.frozen
class Traced:
    """A traced function: its program and how to pack its arguments and unpack its results.

    `in_tree` is the tree of the arguments with leaves named as the function names its parameters; program inputs are
    those leaves in order, then the seed where `uses_seed`, then the constants.
    `captured`: value id -> the tensor that the function took from outside, as it stands there.
    `modules`, `models`: those that the function has called, and whose modes and frozen weights are part of the program.
    `knows_no_weights`: nothing said which of several arguments has the weights (see `roles`).
    """

    program: Program
    in_tree: Tree
    out_tree: Tree
    names: tuple[str, ...]
    out_names: tuple[str, ...]
    uses_seed: bool
    captured: Mapping[int, torch.Tensor] = attrs.field(factory=dict, eq=False)
    modules: tuple[torch.nn.Module, ...] = attrs.field(default=(), eq=False, repr=False)
    models: tuple[HasFrozen, ...] = attrs.field(default=(), eq=False, repr=False)
    knows_no_weights: bool = False

    def pack(self, args: tuple[Any, ...]) -> list[torch.Tensor]:
        """The tensor leaves of a call, in the order of the program's inputs. Raises InputError for another tree."""
        leaves, tree = flatten(tuple(args))
        if _nameless(tree) != _nameless(self.in_tree):
            raise InputError("the arguments have another structure or other static values than the traced call")
        return leaves

    def unpack(self, outputs: Sequence[Any]) -> Any:
        """The function's result, rebuilt from the program's outputs."""
        return unflatten(self.out_tree, outputs)


def _nameless(tree: Tree) -> Any:
    if tree.children or tree.kind not in ("tensor", "static"):
        return (tree.kind, tree.type, tree.keys, tuple(_nameless(child) for child in tree.children))
    return (tree.kind, type(tree.value), tree.value)


def trace(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    role_of: Callable[[torch.Tensor], str] | None = None,
) -> Traced:
    """Trace `fn(*args)`; real tensors, fake ones and `meta` ones do as arguments, none is read.

    `role_of`: what a leaf carries as its role, "" where it has none. Raises TraceError where one recorded program could
    not repeat what the function does.
    """
    tree, leaves = _name_arguments(fn, tuple(args))
    rec = Recorder(handler_of)
    try:
        differentiated, out_ids, out_tree = _observe(rec, fn, tree, leaves)
    finally:
        words = put_back_attributes(rec)
    warn_of_put_back(words)
    refuse_leaks(rec)
    carried = {}
    for name, leaf in zip(tree.names(), leaves, strict=True):
        role = "" if role_of is None else role_of(leaf)
        if role:
            carried[name] = role
    parameters = {name for name, leaf in zip(tree.names(), leaves, strict=True) if isinstance(leaf, torch.nn.Parameter)}
    values, knows_no_weights = _with_roles(rec, tree, out_tree, out_ids, differentiated, carried, parameters)
    program, uses_seed = _assemble(rec, values, len(leaves), out_ids)
    captured = {cell.vid: real for real, cell in rec.captured.values()}
    program = placed_are_no_constants(program, captured)
    modules, models = noted(rec.where)
    return Traced(
        program, tree, out_tree, tree.names(), out_tree.names(), uses_seed, captured, modules, models, knows_no_weights
    )


def _observe(
    rec: Recorder, fn: Callable[..., Any], tree: Tree, leaves: Sequence[torch.Tensor]
) -> tuple[dict[str, int], list[int], Tree]:
    """Run the function: names of differentiated inputs and how deep they are that, value ids of the outputs, their
    tree.

    Every traced tensor that we hold is a local of this function, so that what lives on is held by the user's code.
    """
    fakes, storages = _make_inputs(rec, leaves, tree.names())
    for storage, leaf in zip(storages, tree.leaves(), strict=True):
        storage.number = leaf.type is float
        rec.numbers |= storage.number
    seed = _make_input(rec, torch.empty((), dtype=torch.int64, device="meta"), "seed", role="seed")[0]
    host_state = _host_random_state()
    leaves_with_grad = [(fake, name) for fake, name in zip(fakes, tree.names(), strict=True) if fake.requires_grad]
    functions = TraceFunctions(rec, leaves_with_grad)
    with noting(rec.where), watch_called(rec.where):
        result = _run(rec, fn, unflatten(tree, fakes), [functions, *canonical.modes(lambda: seed)])
    if _host_random_state() != host_state:
        raise TraceError(
            f"the step{_where_defined(fn)} draws from Python's or NumPy's random generator, which one program would "
            "repeat for ever; draw with torch, or pass the number as an argument"
        )
    out_ids, out_tree = _outputs(rec, result)
    _check_gradients(rec)
    triples = zip(tree.names(), fakes, storages, strict=True)
    differentiated = {}
    for name, fake, storage in triples:
        if storage.differentiated or fake.grad is not None:
            differentiated[name] = storage.depth or 1
    return differentiated, out_ids, out_tree


def record_local(fn: Callable[..., Any], types: Sequence[TensorType]) -> Program:
    """The program of a small function of tensors (a strategy's local code); its result is a tensor, tuple or list."""
    rec = Recorder(handler_of)
    with compat.no_function_modes():  # of the dtypes that are named, also inside `float64()`
        leaves = [torch.empty(operand.shape, dtype=operand.dtype, device="meta") for operand in types]
    fakes, _ = _make_inputs(rec, leaves, [f"arg{position}" for position in range(len(types))])
    result = _run(rec, fn, tuple(fakes), [TraceFunctions(rec)])
    out_ids, _ = _outputs(rec, result)
    return _assemble(rec, rec.values, len(leaves), out_ids)[0]


def _where_defined(fn: Callable[..., Any]) -> str:
    """` f (file.py:12)`, where that is known."""
    code = getattr(inspect.unwrap(fn), "__code__", None)
    if code is None:
        return ""
    return f" {code.co_name} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"


# ---- inputs ----


def _name_arguments(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Tree, list[torch.Tensor]]:
    """The tree of the arguments, its leaves named by the function's own parameters: `state.params.w`."""
    names = argument_names(fn, len(args))
    leaves: list[torch.Tensor] = []
    parts = []
    for name, arg in zip(names, args, strict=True):
        found, tree = flatten(arg, name)
        leaves += found
        parts.append(tree)
    return Tree("sequence", "", tuple, tuple(range(len(args))), tuple(parts)), leaves


def argument_names(fn: Callable[..., Any], count: int) -> list[str]:
    """What the function calls its first so many arguments."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names: list[str] = []
    for parameter in parameters:
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
        elif parameter.kind is parameter.VAR_POSITIONAL:
            names += [join(parameter.name, position) for position in range(count - len(names))]
    names = names[:count]
    return names + [f"arg{position}" for position in range(len(names), count)]


def _make_inputs(
    rec: Recorder, leaves: Sequence[torch.Tensor], names: Sequence[str]
) -> tuple[list[torch.Tensor], list[TracedStorage]]:
    made = [_make_input(rec, leaf, name) for leaf, name in zip(leaves, names, strict=True)]
    return [fake for fake, _ in made], [storage for _, storage in made]


def _make_input(
    rec: Recorder, leaf: torch.Tensor, name: str, role: str = "activation"
) -> tuple[torch.Tensor, TracedStorage]:
    vid = rec.new_value(tuple(leaf.shape), leaf.dtype, name=name, role=role)
    cell = rec.root(vid, contiguous(leaf.shape, leaf.dtype), "input", name)
    cell.storage.scattered = not leaf.is_contiguous()
    return rec.tensor(cell).requires_grad_(leaf.requires_grad), cell.storage


def _host_random_state() -> Any:
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), (kind, np.asarray(keys).tobytes(), *rest)


# ---- running and collecting ----


def _run(rec: Recorder, fn: Callable[..., Any], args: Sequence[Any], modes: Sequence[TorchFunctionMode]) -> Any:
    with ExitStack() as stack:
        stack.enter_context(activate(rec.where))
        stack.enter_context(rec)
        stack.enter_context(compat.uncompiled())
        stack.enter_context(torch.enable_grad())
        stack.enter_context(honoured_autocast())
        for mode in modes:
            stack.enter_context(mode)
        try:
            return fn(*args)
        except (RuntimeError, AttributeError) as error:
            said = in_words(error, rec.raised)
            if said is None:
                raise
            raise said from error
        finally:
            rec.raised = None  # its traceback holds tensors of the trace


def _outputs(rec: Recorder, result: Any) -> tuple[list[int], Tree]:
    """Value ids of the result's leaves, and its tree."""
    leaves, tree = flatten(result, "out")
    for leaf in tree.statics():
        if not (leaf.value is None or isinstance(leaf.value, (bool, int, str, torch.dtype))):
            raise TraceError(
                f"the step returns {leaf.name} of type {type(leaf.value).__name__}, which is no tensor and "
                "no container of tensors; return its tensors in a dict, list, tuple or record"
            )
    with rec:
        return [rec.read(rec.cell(leaf)) for leaf in leaves], tree


def _check_gradients(rec: Recorder) -> None:
    for real, _ in rec.captured.values():
        if real.is_leaf and isinstance(real.grad, compat.FakeTensor):
            real.grad = None
            raise TraceError(
                f"a backward pass in the step reached a tensor of shape {tuple(real.shape)} that the step captured "
                "from outside; pass parameters as an argument (torch.func.functional_call, cf.functional), and use "
                "torch.utils.checkpoint with use_reentrant=False"
            )


def _with_roles(
    rec: Recorder,
    tree: Tree,
    out_tree: Tree,
    out_ids: Sequence[int],
    differentiated: Mapping[str, int],
    carried: Mapping[str, str],
    parameters: Collection[str],
) -> tuple[dict[int, Value], bool]:
    """Values with the roles of the inputs, and whether nothing says where the weights are."""
    values = dict(rec.values)
    ids = {name: vid for vid, name in enumerate(tree.names())}
    after = next_values(tree.children, results_of(out_tree), ids, out_ids, values, rec.nodes)
    observed = Observed(
        tree.children, ids, values, rec.nodes, rec.where.marks, differentiated, after, carried, parameters
    )
    for name, role in observed.roles().items():
        values[ids[name]] = attrs.evolve(values[ids[name]], role=role)
    return values, observed.knows_no_weights()


def _assemble(
    rec: Recorder, values: Mapping[int, Value], n_inputs: int, outputs: Sequence[int]
) -> tuple[Program, bool]:
    """The program, without the seed and the constants that nothing reads."""
    used = set(outputs)
    for node in rec.nodes:
        used.update(node.refs)
    # The seed, where there is one, is the value behind the inputs.
    uses_seed = n_inputs in used and values[n_inputs].role == "seed"
    constants = {vid: tensor for vid, tensor in rec.constants.items() if vid in used}
    inputs = (*range(n_inputs), *((n_inputs,) if uses_seed else ()), *constants)
    defined = set(inputs)
    for node in rec.nodes:
        defined.update(node.results)
    kept = {vid: value for vid, value in values.items() if vid in defined}
    return Program(inputs, tuple(rec.nodes), tuple(outputs), kept, constants), uses_seed


# ---- errors of torch ----
#
# Problem: TorchScript drops what Python said, and some errors name a mechanism that the user never asked for. Idea: a
# table of how such messages begin; each has what is true of a step, and one thing to try.
#
#     RuntimeError: The following operation failed in the TorchScript interpreter. ...
#     TraceError: random operator aten.bernoulli_ at model.py:3 ... This operator was called by TorchScript. Try: ...


SCRIPT = "The following operation failed in the TorchScript interpreter"
SCRIPT_ADVICE = (
    "This operator was called by TorchScript. Try: the Python module or function that was compiled, as it is"
)
REENTRANT = "When use_reentrant=True, torch.utils.checkpoint is incompatible with .grad()"
# Part of the message -> what is true; {} is the user's line.
WORDS = {
    "You must implement the jvp function for custom autograd.Function": (
        "forward-mode derivatives (torch.func.jvp, jacfwd, hessian) at {} reach an operator that has none: attention "
        "and dropout stay whole in a step, and have gradients only. Try: torch.func.jacrev in place of jacfwd, "
        "jacrev(jacrev(f)) for a hessian"
    ),
    "There was no rule registered for HigherOrderOperator": (
        "an operator at {} takes functions (torch.cond, while_loop, scan), one of which it chooses, or how often, by a "
        "value. Try: torch.where of both results, or a loop in Python of as many rounds as are needed"
    ),
    "_nested_int_memo": (
        "a nested tensor is made at {}; its sizes are values that one program cannot know. Try: rows padded to one "
        "length with a mask, or packed to one length, with attention masked by the number of the sequence"
    ),
    REENTRANT: (
        "the gradient at {} goes through torch.utils.checkpoint(use_reentrant=True), which calls for .backward(). Try: "
        "use_reentrant=False"
    ),
    "_apply(): Couldn't swap": (
        "a module that the step makes for itself is converted at {} (.cuda(), .double(), .half()), which would change "
        "tensors of the trace in place. Try: nn.Linear(3, 2, dtype=torch.float64), or the module made outside of the "
        "step (cf.functional)"
    ),
}

ABOUT = {REENTRANT: "checkpoint"}
"""Errors of torch for which a library may have a hint -> what they are about."""


def in_words(error: Exception, operator: Exception | None) -> Exception | None:
    """The error to raise in place of `error`, None where that says it well.

    `operator`: what the last failed operator raised.
    """
    text = str(error)
    if text.startswith(SCRIPT) and operator is not None:
        if isinstance(operator, ColofuncError):
            return TraceError(f"{operator}. {SCRIPT_ADVICE}")
        operator.add_note(SCRIPT_ADVICE)
        return operator
    for part, words in WORDS.items():
        if part in text:
            return TraceError(words.format(raised_line(error)), about=ABOUT.get(part, ""))
    return None
