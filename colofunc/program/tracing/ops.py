"""What the recorder does with each kind of operator.

    plain        one node
    view         one node, and cells that remember the view
    in place     the functional operator, and a write to the cell
    out=         the functional operator, and a write to the given tensor
    factory      one `full`, whatever its spelling (zeros_like, new_ones, empty, ...)
    composite    its definition in terms of other operators
    item         the real number where it depends on no input, an error elsewhere
    random       an error: random operators are replaced before they get here

`handler_of(func)` chooses; the table of special cases stands at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import isfinite, prod
from typing import Any

import torch

from colofunc import compat
from colofunc.errors import TraceError
from colofunc.ops.define import OPERATORS
from colofunc.ops.targets import target_of
from colofunc.program.facts import EFFECTS
from colofunc.program.tracing.infer import CPU, build, contiguous
from colofunc.program.tracing.meta import user_line
from colofunc.program.tracing.record import Cell, Recorder, flat_results
from colofunc.program.tracing.strided import as_strided, strided_cell
from colofunc.program.tracing.values import dynamic, index, index_put, item, item_of, plain, repeat_interleave
from colofunc.program.tracing.views import view_calls

Handler = Callable[[Recorder, Any, Any, dict[str, Any]], Any]

aten = torch.ops.aten


# ---- views ----


def view(rec: Recorder, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if isinstance(args[0], complex):  # the gradient of `1j * x` has the conjugate of the number
        return rec.call(func, rec.call(aten.full.default, [], args[0], dtype=torch.complex128))
    parent = rec.cell(args[0])
    enc, named, results = rec.encode_call(func, args, kwargs)
    target = PHYSICAL.get(func) or target_of(func)
    metas = [meta._replace(offset=meta.offset + parent.meta.offset) for meta in results.metas]
    if target in EXPLICIT:
        enc, named = EXPLICIT[target](enc, dict(named), parent.meta.shape, metas[0].shape), ()
    ids = rec.emit(target, enc, named, [(meta.shape, meta.dtype) for meta in metas])
    calls = view_calls(target, enc, named, [meta.shape for meta in metas])
    keywords = named if results.form == 0 else ()  # those of a single view
    tensors = []
    for vid, meta, (call, call_args) in zip(ids, metas, calls, strict=True):
        tensors.append(rec.tensor(parent.child(vid, meta, call, call_args, keywords)))
    return build(results.form, tensors)


def _sizes(
    args: tuple[Any, ...], kwargs: dict[str, Any], shape: tuple[int, ...], out: tuple[int, ...]
) -> tuple[Any, ...]:
    """`view(x, (-1, 4))` says its sizes."""
    return (args[0], out)


def _slice(
    args: tuple[Any, ...], kwargs: dict[str, Any], shape: tuple[int, ...], out: tuple[int, ...]
) -> tuple[Any, ...]:
    """`slice(x, dim, start, end, step)` with bounds inside the dim."""
    given = dict(zip(("dim", "start", "end", "step"), args[1:])) | kwargs
    dim, step = given.get("dim", 0) % len(shape), given.get("step", 1)
    start, end, _ = slice(given.get("start"), given.get("end"), step).indices(shape[dim])
    return (args[0], dim, start, max(start, end), step)


# A program holds for other shapes after lowering, and is easier to read, if arguments say what they mean.
EXPLICIT: dict[str, Callable[..., tuple[Any, ...]]] = {
    "aten.view.default": _sizes,
    "aten._unsafe_view.default": _sizes,
    "aten.expand.default": _sizes,
    "aten.slice.Tensor": _slice,
}


# Torch marks a view as conjugated or negated, and some operators refuse such values. Those of a program have no marks.
PHYSICAL = {aten._conj.default: "aten._conj_physical.default", aten._neg_view.default: "aten.neg.default"}


def alias(rec: Recorder, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """detach, alias: the same value, no node."""
    cell = rec.cell(args[0])
    return rec.tensor(cell.child(rec.read(cell), cell.meta, "", (), ()))


def lift_fresh(rec: Recorder, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A literal (`torch.tensor([1, 2])`): a constant, but in a tensor that the function made and may write to."""
    cell = rec.cell(args[0])
    if cell.storage.kind != "captured":
        return alias(rec, func, args, kwargs)
    return rec.fresh(rec.read(cell), cell.meta)


# ---- mutation ----


def written_positions(func: Any) -> list[int]:
    """Positions of the schema arguments that the operator writes to."""
    found: list[int] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(position)
    return found


def functional_form(func: Any) -> Any:
    """The operator that returns what `func` would write; None where there is none."""
    schema = func._schema
    name = schema.name.split("::")[1]
    outs = [argument for argument in schema.arguments if argument.is_out]
    if not outs and not name.endswith("_"):
        return None
    if not outs:
        name = f"__{name[3:]}" if name.startswith("__i") else name[:-1]  # `__ilshift__` has `__lshift__`
    want = _typed_names(argument for argument in schema.arguments if not argument.is_out)
    packet = getattr(getattr(torch.ops, schema.name.split("::")[0]), name, None)
    if packet is None:
        return None
    for overload in packet.overloads():
        found = getattr(packet, overload)
        if _typed_names(found._schema.arguments) == want and not written_positions(found):
            return found
    return None


def _typed_names(arguments: Iterable[Any]) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in arguments]


def mutating(func: Any) -> Handler:
    """The handler of an operator that writes to some of its arguments."""
    form = functional_form(func)
    if form is None:
        return unsupported
    names = [argument.name for argument in func._schema.arguments]
    out_names = [names[position] for position in written_positions(func)]

    def handle(rec: Recorder, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        given = {**dict(zip(names, args)), **kwargs}
        targets: list[torch.Tensor] = []
        for name in out_names:
            out = given[name]
            targets += out if isinstance(out, (list, tuple)) else [out]
        for tensor in targets:
            refuse_reshaped(rec, tensor, given.values())
        if func._schema.arguments[names.index(out_names[0])].is_out:
            kwargs = {name: arg for name, arg in kwargs.items() if name not in out_names}
        results = flat_results(rec.call(form, *args, **kwargs))
        # What is written comes first among the results of `op_` and `op.out`, last among those of `op` with extras.
        for tensor, result in zip(targets, results[-len(targets) :], strict=True):
            assign_result(rec, tensor, result)
        # Results that are written operands are those operands; others come first from the functional form.
        rest = iter(targets)
        back: list[torch.Tensor] = []
        for place, returned in enumerate(func._schema.returns):
            back.append(results[place] if returned.alias_info is None else next(rest))
        if len(back) == 1:
            return back[0]
        return tuple(back) if back else None

    return handle


def assign_result(rec: Recorder, tensor: torch.Tensor, result: torch.Tensor) -> None:
    """Give `tensor` the value of `result`, in its own dtype and shape."""
    cell = rec.cell(tensor)
    if result.shape != tensor.shape:
        if tensor.numel() == 0 or not _fits(result.shape, tensor.shape):
            raise TraceError(
                f"a result of shape {tuple(result.shape)} for a tensor of shape {tuple(tensor.shape)} (out= would "
                f"resize it) at {user_line()}; give it the right shape {tuple(result.shape)}"
            )
        result = rec.call(aten.expand.default, result, list(tensor.shape))
    if result.dtype != tensor.dtype:
        result = rec.call(aten._to_copy.default, result, dtype=tensor.dtype)
    rec.write(cell, rec.read(rec.cell(result)))


def _fits(shape: torch.Size, into: torch.Size) -> bool:
    """Whether a shape can be repeated to another."""
    at_end = into[len(into) - len(shape) :] if len(shape) <= len(into) else ()
    return len(at_end) == len(shape) and all(size in (1, wide) for size, wide in zip(shape, at_end))


def inplace_view(func: Any) -> Handler:
    """The handler of an operator that changes the shape of a tensor where it stands (`unsqueeze_`, `t_`)."""
    form = functional_form(func)
    if form is None:
        return unsupported

    def handle(rec: Recorder, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        note_reshaped(rec, args[0])
        become(rec, args[0], rec.cell(rec.call(form, *args, **kwargs)))
        return args[0]

    return handle


# Note [Views that are reshaped in place]. Autograd recomputes the history of a view after a write to its memory. Of
# plain tensors it knows sizes and strides; of tensors of a trace it repeats the calls that made the view, and forgets
# `unsqueeze_` and its like among them: a gradient would be that of other elements. What would lead there is an error.
def note_reshaped(rec: Recorder, tensor: torch.Tensor) -> None:
    """Before a change of shape in place."""
    made = [ref() for ref in rec.made]
    others = [other for other in made if other is not None and compat.view_base(other) is tensor]
    if others and tensor.requires_grad:
        raise TraceError(
            f"the shape of a tensor that is differentiated is changed in place at {user_line()} while there are views "
            "of it, whose gradient would be lost; write x = x.unsqueeze(0) for x.unsqueeze_(0)"
        )
    if others or compat.view_base(tensor) is not None:
        rec.cell(tensor).storage.reshaped = user_line()


def refuse_reshaped(rec: Recorder, tensor: torch.Tensor, operands: Iterable[Any]) -> None:
    """Before a write to memory of which a view was reshaped in place."""
    reshaped = rec.cell(tensor).storage.reshaped
    if reshaped and any(isinstance(x, torch.Tensor) and x.requires_grad for x in (tensor, *operands)):
        raise TraceError(
            f"the shape of a view was changed in place at {reshaped}, and at {user_line()} something that is "
            "differentiated is written to its memory, whose gradient would be lost; write x = x.unsqueeze(0) for x.unsqueeze_(0)"
        )


def become(rec: Recorder, tensor: torch.Tensor, cell: Cell) -> None:
    """From now on `tensor` is the tensor of `cell`: its value, and its shape and strides."""
    with compat.no_function_modes(), compat.no_dispatch():
        tensor.data = rec.tensor(cell)
    rec.attach(tensor, cell)


def resize_(rec: Recorder, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Another shape in the same memory. New memory would hold what nobody has written."""
    tensor, size = args[0], tuple(args[1])
    if size == tensor.shape:
        return tensor
    cell = rec.cell(tensor)
    root = cell.storage.root.meta
    new = contiguous(size, tensor.dtype)
    if (cell.meta.offset + prod(size)) * tensor.dtype.itemsize > prod(root.shape) * root.dtype.itemsize:
        raise TraceError(
            f"resize_ at {user_line()} to {size} makes a tensor of shape {tuple(tensor.shape)} larger than its memory; "
            "make a new tensor of that shape"
        )
    become(rec, tensor, strided_cell(rec, tensor, size, new.strides))
    return tensor


def set_(rec: Recorder, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The first tensor becomes an alias of the second."""
    tensor, source = args
    cell = rec.cell(source)
    become(rec, tensor, cell.child(rec.read(cell), cell.meta, "", (), ()))
    return tensor


def copy_(rec: Recorder, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    refuse_reshaped(rec, args[0], args)
    tensor, source = args[:2]
    if tensor.numel() == 0 and _fits(source.shape, tensor.shape):
        return tensor  # one row may be copied to no rows
    assign_result(rec, tensor, source)
    return tensor


def fill_(rec: Recorder, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    refuse_reshaped(rec, tensor, args)
    value = args[1] if len(args) > 1 else 0
    if isinstance(value, torch.Tensor):
        number = _literal(rec, value)
        if number is None or not isfinite(number):
            assign_result(rec, tensor, value)
            return tensor
        value = number
    rec.write(rec.cell(tensor), emit_full(rec, tuple(tensor.shape), tensor.dtype, value))
    return tensor


def _literal(rec: Recorder, tensor: torch.Tensor) -> int | float | None:
    """The number that was written in the code: of `x[0] = 5` some versions of torch make a tensor.

    None where it is something else.
    """
    cell = rec.cell(tensor)
    vid = rec.read(cell)
    if tensor.dim() or tensor.is_complex() or cell.storage.kind == "captured" or vid not in rec.constants:
        return None
    with compat.disable_modes(), compat.no_function_modes():
        number: int | float = rec.constants[vid].item()
    return number


def unsupported(rec: Recorder, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    raise TraceError(
        f"{target_of(func)} at {user_line()} changes a tensor in a way no program can express; compute a new tensor"
    )


def composite(rec: Recorder, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operator as those that it is made of; one over lists of tensors as one per tensor."""
    with rec:
        return compat.run_composite(func, args, kwargs)


# ---- factories ----


def emit_full(rec: Recorder, shape: tuple[int, ...], dtype: torch.dtype, value: Any) -> int:
    if dtype == torch.bool:
        value = bool(value)
    elif not dtype.is_floating_point and not dtype.is_complex and isinstance(value, float):
        value = int(value)
    return rec.emit1("aten.full.default", (shape, value), shape, dtype, dtype=dtype)


def factory(position: int | None, value: Any) -> Handler:
    """A factory of equal elements: `value`, or the argument at `position`. What `empty` holds is undefined: zeros."""

    def handle(rec: Recorder, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        _, _, results = rec.encode_call(func, args, kwargs)
        meta = results.metas[0]
        if position is None:
            fill = value
        else:
            fill = args[position] if len(args) > position else kwargs["fill_value"]
        if isinstance(fill, torch.Tensor):
            fill = item_of(rec, fill)
        return rec.fresh(emit_full(rec, meta.shape, meta.dtype, fill), meta)

    return handle


# ---- the rest ----


def random(rec: Recorder, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    arguments = func._schema.arguments
    given = {argument.name: argument.default_value for argument in arguments}
    given.update(kwargs)
    given.update(zip([argument.name for argument in arguments], args))
    if given.get("dropout_p") == 0:
        return plain(rec, func, args, kwargs)  # attention kernels draw only where there is dropout
    raise TraceError(
        f"random operator {target_of(func)} at {user_line()} has no counter-based form, so its numbers could not "
        "be the same on every mesh; draw with torch.rand, torch.randn, torch.bernoulli or F.dropout"
    )


def skip(rec: Recorder, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return None


def effect(rec: Recorder, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operator without results: a node that nothing reads and nothing may drop."""
    rec.emit(target_of(func), tuple([rec.encode(arg) for arg in args]), (), [])


def passthrough(rec: Recorder, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Profiler marks and the like: they compute nothing."""
    return func(*args, **kwargs)


def device(rec: Recorder, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return CPU


def _written_order(x: Any) -> torch.memory_format:
    """The order in which kernels write a result for this operand.

    Channels last where its channels are the innermost, else contiguous.
    """
    channels_first = [1, *range(x.dim() - 1, 1, -1), 0]
    strides = [x.stride(dim) for dim in channels_first] if x.dim() in (4, 5) else []
    if not strides or strides != sorted(strides):
        return torch.contiguous_format
    return torch.channels_last if x.dim() == 4 else torch.channels_last_3d


def batch_norm(rec: Recorder, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Training updates the running statistics behind the schema's back; the functional form returns them."""
    x, weight, bias, mean, var, training, momentum, eps = args
    # The kernel writes its result in order, or channels last; the shape function says that it lies as a transposed
    # input does.
    order = _written_order(x)
    if not x.is_contiguous(memory_format=order):
        x = rec.call(aten.clone.default, x, memory_format=order)
    if training and mean is not None:
        out = rec.call(aten._native_batch_norm_legit_functional.default, x, *args[1:])
        assign_result(rec, mean, out[3])
        assign_result(rec, var, out[4])
        return tuple(out[:3])
    if training:
        return tuple(rec.call(aten._native_batch_norm_legit.no_stats, x, weight, bias, True, momentum, eps))
    return tuple(rec.call(aten._native_batch_norm_legit_no_training.default, x, weight, bias, mean, var, momentum, eps))


SPECIAL: dict[Any, Handler] = {
    **{OPERATORS[f"colofunc.{name}"].op: effect for name in EFFECTS},
    torch.ops.prim.device.default: device,
    aten.detach.default: alias,
    aten.alias.default: alias,
    aten.lift_fresh.default: lift_fresh,
    aten.lift.default: lift_fresh,
    aten.as_strided.default: as_strided,
    aten.copy_.default: copy_,
    aten.resize_.default: resize_,
    aten.set_.source_Tensor: set_,
    aten.fill_.Scalar: fill_,
    aten.fill_.Tensor: fill_,
    aten.zero_.default: fill_,
    aten._local_scalar_dense.default: item,
    aten.index.Tensor: index,
    aten.index_put.default: index_put,
    aten.repeat_interleave.Tensor: repeat_interleave,
    aten.native_batch_norm.default: batch_norm,
    aten._native_batch_norm_legit.default: batch_norm,
    aten._assert_async.default: skip,
    aten._assert_async.msg: skip,
    aten.zeros.default: factory(None, 0),
    aten.zeros_like.default: factory(None, 0),
    aten.new_zeros.default: factory(None, 0),
    aten._efficientzerotensor.default: factory(None, 0),
    aten.ones.default: factory(None, 1),
    aten.ones_like.default: factory(None, 1),
    aten.new_ones.default: factory(None, 1),
    aten.empty.memory_format: factory(None, 0),
    aten.empty_strided.default: factory(None, 0),
    aten.empty_like.default: factory(None, 0),
    aten.new_empty.default: factory(None, 0),
    aten.new_empty_strided.default: factory(None, 0),
    aten.full.default: factory(1, 0),
    aten.full_like.default: factory(1, 0),
    aten.new_full.default: factory(2, 0),
    aten.scalar_tensor.default: factory(0, 0),
}

_ALIASES_UNSAID = {aten._unsafe_view.default, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default}


def handler_of(func: Any) -> Handler:
    """What to do with calls of `func`."""
    special = SPECIAL.get(func)
    if special is not None:
        return special
    if func.namespace == "profiler":
        return passthrough
    ours = func.namespace == "colofunc"
    schema = func._schema
    if not ours and torch.Tag.nondeterministic_seeded in func.tags:
        return random
    if func.namespace == "aten" and schema.name.startswith("aten::_foreach_"):
        return composite
    if torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags:
        return dynamic
    if not ours and compat.composite_kernel(func):
        return composite
    if torch.Tag.inplace_view in func.tags:
        return inplace_view(func)
    if schema.is_mutable:
        return mutating(func)
    returns_view = any(returned.alias_info is not None for returned in schema.returns)
    if func in _ALIASES_UNSAID or (returns_view and schema.arguments and schema.arguments[0].alias_info is not None):
        return view
    return plain
