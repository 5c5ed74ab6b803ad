"""Values that Python asks for while tracing, and results whose shape depends on them.

Problem: `if mask.any():` or `x[mask]` needs data that a trace does not have. Idea: what depends on no input is computed
for real, once, and tracing goes on; what depends on an input is an error with the user's line and the way out.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch

from colofunc import compat
from colofunc.errors import TraceError
from colofunc.ops.targets import target_of
from colofunc.program.ir import Ref
from colofunc.program.tracing import assertions
from colofunc.program.tracing.infer import build, slots
from colofunc.program.tracing.meta import inside_distributions, inside_file, user_frame, user_line
from colofunc.program.tracing.record import PLACEMENT, Recorder, refs_of

aten = torch.ops.aten
# Where torch.distributions looks at the values of its arguments, to see that they are valid.
CHECKS = os.path.join("torch", "distributions", "distribution.py")
FUNCTIONAL = os.path.join("torch", "nn", "functional.py")


def plain(rec: Recorder, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    enc, named, results = rec.encode_call(func, args, kwargs)
    form, metas = results.form, results.metas
    if form == 0:  # one tensor, the usual case
        meta = metas[0]
        return rec.fresh(rec.emit(target_of(func), enc, named, [(meta[0], meta[2])])[0], meta)
    if not metas:
        return build(form, ())  # answers about metadata (is_same_size) are Python's
    places = slots(form)
    types = [None if i is None else (metas[i].shape, metas[i].dtype) for i in places]
    ids = rec.emit(target_of(func), enc, named, types)
    return build(form, [rec.fresh(vid, metas[i]) for vid, i in zip(ids, places, strict=True) if i is not None])


def item_of(rec: Recorder, tensor: torch.Tensor) -> Any:
    vid = rec.read(rec.cell(tensor))
    if rec.values[vid].device_free:
        value = rec.evaluate(vid)
        with compat.disable_modes(), compat.no_function_modes():
            return value.item()
    if inside_file(FUNCTIONAL, "gaussian_nll_loss"):
        return False  # it asks whether some variance is negative, to refuse it; a step cannot
    if tensor.dtype == torch.bool and inside_file(CHECKS):
        if not rec.unchecked:
            warnings.warn(
                f"torch.distributions checks the values of its arguments at {user_line()}, and a step has none while "
                "it is traced: the step is without such checks. validate_args=False says that this is meant",
                stacklevel=2,
            )
        rec.unchecked = True
        return True
    known = _outside_its_range(rec, vid)
    if known is None and tensor.dtype == torch.bool:
        known = _assumed()
    if known is not None:
        return known
    if _compares_uniform(rec, vid):
        raise TraceError(
            f"a random number decides at {user_line()} what runs, and a step is traced once: every call runs the same. "
            "Try: no such choice (a model that leaves out layers: layerdrop=0.0, encoder_layerdrop=0.0, "
            "decoder_layerdrop=0.0 in its config), torch.where, or a bool that is drawn before the step and is an "
            "argument"
        )
    raise data_dependent("Python asks for the value of a tensor")


def _assumed() -> bool | None:
    """The value of a condition that only raises an error, where nothing is wrong; None for every other condition."""
    frame = user_frame()
    passing = None if frame is None else assertions.passes(frame)
    if passing is not None:
        warnings.warn(
            f"a check of values at {user_line()} raises an error or does nothing, and a step has no values while it "
            "is traced: the step is without it. To check values beside a step: low.check_finite, cf.debug.print, or a "
            "result that is looked at afterwards",
            stacklevel=2,
        )
    return passing


ALWAYS_BELOW = {"aten.lt.Scalar": True, "aten.le.Scalar": True, "aten.gt.Scalar": False, "aten.ge.Scalar": False}
"""Comparison of a uniform number with one of 1 or more -> what it gives; with one below 0 it gives the opposite."""


def _outside_its_range(rec: Recorder, vid: int) -> bool | None:
    """What a comparison of a uniform number with one outside of [0, 1) gives, whatever is drawn; None for everything
    else.

    Models ask so for each layer whether it is left out, also where none is: `torch.rand([]) < self.layerdrop`,
    with 0.
    """
    compared = rec.producer.get(vid)
    if not _compares_uniform(rec, vid) or compared is None:
        return None
    bound = compared.args[1]
    below = ALWAYS_BELOW[compared.target]
    if bound >= 1:
        return below
    # Nothing drawn is below 0, and 0 itself may be.
    return not below if bound < 0 or (bound == 0 and compared.target in ("aten.lt.Scalar", "aten.ge.Scalar")) else None


def _compares_uniform(rec: Recorder, vid: int) -> bool:
    """Whether a value says how a uniform random number compares with a number."""
    compared = rec.producer.get(vid)
    if compared is None or compared.target not in ALWAYS_BELOW:
        return False
    drawn = rec.producer.get(compared.args[0].id)
    return drawn is not None and drawn.target == "colofunc.random_uniform"


def data_dependent(what: str) -> TraceError:
    if inside_file("grad_scaler.py"):
        return TraceError(
            f"GradScaler decides in Python whether to step ({user_line()}); use cf.precision(step, 'fp16') instead"
        )
    if inside_distributions():
        return TraceError(
            f"torch.distributions chooses by the values of its arguments, at {user_line()}, and a step has none while "
            "it is traced. Try: validate_args=False if it looks whether they are valid, or the formula written with "
            "torch.where"
        )
    return TraceError(
        f"data-dependent control flow: {what} that depends on the step's inputs at {user_line()}. Choose with "
        "torch.where, return the tensor from the step, or make the argument a static one (int, bool or str); to see "
        'it, cf.debug.print("{}", x)',
        about="values",
    )


def item(rec: Recorder, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    # Numbers among the constants of TorchScript arrive as numbers.
    return item_of(rec, args[0]) if isinstance(args[0], torch.Tensor) else args[0]


def dynamic(rec: Recorder, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Operators whose result has a shape, or is a Python value, that depends on data (nonzero, unique, equal)."""
    enc = tuple([rec.encode(arg) for arg in args])
    named = tuple((k, rec.encode(v)) for k, v in kwargs.items() if k not in PLACEMENT and v is not None)
    if not all(rec.values[r].device_free for r in refs_of((enc, named))):
        raise data_dependent(f"{target_of(func)} makes a result of a shape or value")

    def known(arg: Any) -> Any:
        if isinstance(arg, Ref):
            return rec.evaluate(arg.id)
        return tuple(known(a) for a in arg) if isinstance(arg, tuple) else arg

    arguments, keywords = known(enc), {k: known(v) for k, v in named}
    if func is aten.equal.default:  # TorchScript compares its constants, see `item`
        arguments = tuple(map(torch.as_tensor, arguments))
    with compat.disable_modes(), compat.no_function_modes(), torch.no_grad():
        out = func(*arguments, **keywords)
    return _wrap_known(rec, out)


def repeat_interleave(rec: Recorder, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The index of a repetition, `[0, 0, 2]` of `[2, 0, 1]`. Its size is known where it is given."""
    repeats, size = args[0], kwargs.get("output_size")
    if rec.is_known(repeats):
        return dynamic(rec, func, args, kwargs)
    if size is None:
        raise TraceError(
            f"repeat_interleave at {user_line()} makes a result as long as the sum of its repeats, which are values "
            "that depend on the step's inputs. Try: output_size=, that sum"
        )
    with rec:
        ends = repeats.cumsum(0)
        index = torch.searchsorted(ends, torch.arange(size), right=True)
        # Another size than they add up to: places that do not exist, so that the lookup fails.
        return torch.where(ends[-1] == size, index, repeats.shape[0])


def _wrap_known(rec: Recorder, out: Any) -> Any:
    if isinstance(out, (list, tuple)):
        return type(out)(_wrap_known(rec, o) for o in out)
    if not isinstance(out, torch.Tensor):
        return out
    cell = rec.cell(out)
    return rec.fresh(cell.vid, cell.meta)


def index(rec: Recorder, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    masks = [arg for arg in args[1] if arg is not None and arg.dtype in (torch.bool, torch.uint8)]
    if not masks:
        return plain(rec, func, args, kwargs)
    if all(rec.is_known(m) for m in masks):
        # A mask that is known becomes the positions where it holds.
        places: list[Any] = []
        for i in args[1]:
            if i is not None and i.dtype in (torch.bool, torch.uint8):
                places += _positions(rec, i)
            else:
                places.append(i)
        return rec.call(aten.index.Tensor, args[0], places)
    raise data_dependent("indexing with a mask makes a result of a shape")


def _positions(rec: Recorder, mask: torch.Tensor) -> list[torch.Tensor]:
    with rec:
        return list(aten.unbind.int(aten.nonzero.default(mask), 1))


def index_put(rec: Recorder, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """`x[mask] = value` with one value is a `where`; the rest is a plain operator."""
    tensor, indices, value = args[:3]
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    used = [index for index in indices if index is not None]
    if len(used) == 1 == len(indices) and used[0].dtype == torch.bool and value.numel() == 1 and not accumulate:
        mask = used[0]
        with rec:
            mask = aten.view.default(mask, list(mask.shape) + [1] * (tensor.dim() - mask.dim()))
            value = aten._to_copy.default(value, dtype=tensor.dtype) if value.dtype != tensor.dtype else value
            return aten.where.self(mask, aten.view.default(value, []), tensor)
    return plain(rec, func, args, kwargs)
