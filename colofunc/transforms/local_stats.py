"""local_stats: batch norm over the rows of each rank, as data parallelism without synchronised batch norm does it.

    step = cf.local_stats(cf.shard(step_fn, cf.Mesh(dp=8)))                  # 8 runs of rows, each with statistics of its own
    step = cf.local_stats(step, where="backbone.*", axes="dp")               # these modules only; the others stay global
    @cf.local_stats                                                          # as a decorator, before or after shard

Problem: on a mesh, batch norm in train mode takes its statistics over the whole batch, because that is what one device
computes; it costs two reductions per layer and pass, and is not what a recipe tuned under plain data parallelism had.
Idea: say what is meant without a mesh. The rows of the batch are cut into as many equal runs as there are ranks with
rows of their own, and every run is normalised by itself:

    (g m) c s*  ->  mean and variance over m and s*, per g and c

This is an ordinary function on one device, so the numbers stay equal to it on every mesh, `cf.testing.check` holds, and
whatever splits the rows over those ranks finds that nothing has to be communicated.

Numerics, other than those of the function without it: outputs and gradients use the statistics of a run; running
statistics move, once per step, towards the mean over runs of each run's mean and unbiased variance (every rank has the
same; the first rank's own are what plain data parallelism saves). With `cf.accumulate` the runs are the rows of one
rank in one microbatch, so nothing mixes the samples of two microbatches and `mixing=` is not needed for these norms.

Source of the backward formula: Ioffe and Szegedy (1502.03167), section 3.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from colofunc.compiler.step_compiler import stage
from colofunc.compiler.transform import Build, Transform
from colofunc.errors import InputError, PlanError, near
from colofunc.mesh import Mesh
from colofunc.planner.plan import matches
from colofunc.program.tracing import meta as trace_meta

Globs = tuple[str, ...]


def local_stats(
    step_fn: Callable[..., Any] | None = None, where: str | Iterable[str] = "*", axes: str | Iterable[str] | None = None
) -> Any:
    """The step with batch norm in train mode over the rows of each rank (and microbatch) instead of the whole batch.

    where: globs over module paths, or their ends from some dot on. axes: the mesh axes that split the batch; None: the
    only axis of the mesh. Dim 0 of what is normalised is cut into runs of consecutive rows, one per rank of `axes`, and
    running statistics take the mean over all runs. The numbers depend on the sizes of `axes`, and on nothing else of
    the mesh or the plan. Works alone, as a decorator, and in any order with other transforms.
    """
    globs = (where,) if isinstance(where, str) else tuple(where)
    names = None
    if axes is not None:
        names = (axes,) if isinstance(axes, str) else tuple(axes)
    transform = Transform("local_stats", {"where": globs, "axes": names}, wrap=partial(_wrapped, globs, names))
    return stage(step_fn, transform)


# ---- how many runs ----


def _wrapped(globs: Globs, axes: tuple[str, ...] | None, build: Build) -> Build:
    fn = build.fn

    @functools.wraps(fn)
    def stepped(*args: Any) -> Any:
        runs = _ranks(build.mesh, axes) * build.microbatches
        # Outside of a trace nobody follows the paths of modules: do so here.
        with nullcontext() if trace_meta.active_stacks() is not None else trace_meta.activate(trace_meta.Whereabouts()):
            with LocalStats(globs, runs) as local:
                out = fn(*args)
        local.check_globs()
        return out

    return build.evolve(fn=stepped)


def _ranks(mesh: Mesh, axes: tuple[str, ...] | None) -> int:
    if axes is None:
        axes = tuple(axis for axis in mesh.axis_names if mesh.axis_size(axis) > 1)
        if len(axes) > 1:
            raise PlanError(
                f"cf.local_stats cannot tell which axes of {mesh} split the batch, and its numbers depend on them; "
                f"write axes={axes[0]!r}, or several"
            )
    for axis in axes:
        if axis not in mesh:
            raise PlanError(f"cf.local_stats: axes={axis!r} is no axis of {mesh}{near(axis, mesh.axis_names, 'axes')}")
    return prod(mesh.axis_size(axis) for axis in axes)


# ---- which norms ----


class LocalStats(TorchFunctionMode):
    """Normalises per run of rows where a module's path matches; everything else runs as it is."""

    def __init__(self, globs: Globs, runs: int) -> None:
        super().__init__()
        self.globs = globs
        self.runs = runs
        self._paths: dict[str, None] = {}  # of the batch norms in train mode

    def check_globs(self) -> None:
        """Raise InputError where a glob speaks of no batch norm, though there are some."""
        if not self._paths:
            return
        for glob in self.globs:
            if not any(matches(path, glob) for path in self._paths):
                raise InputError(
                    f"cf.local_stats: where={glob!r} matches no batch norm in train mode{near(glob, self._paths)}"
                )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _BATCH_NORMS[func](*args, **kwargs) if func in _BATCH_NORMS else None
        if given is None:
            return func(*args, **kwargs)
        here = trace_meta.active_stacks()
        path = here.paths[-1] if here is not None else ""
        self._paths[path] = None
        if self.runs == 1 or not any(matches(path, glob) for glob in self.globs):
            return func(*args, **kwargs)
        return _norm(path, self.runs, *given)


Given = tuple[Tensor, "Tensor | None", "Tensor | None", "Tensor | None", "Tensor | None", float, float]


def _functional(
    input: Tensor, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None, training: bool = False,
    momentum: float = 0.1, eps: float = 1e-5,
) -> Given | None:  # fmt: skip
    """The arguments of `F.batch_norm`; None in evaluation."""
    return (input, running_mean, running_var, weight, bias, momentum, eps) if training else None


def _torch(
    input: Tensor, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool, momentum: float, eps: float,
    cudnn_enabled: bool,
) -> Given | None:  # fmt: skip
    """The arguments of `torch.batch_norm`; None in evaluation."""
    return (input, running_mean, running_var, weight, bias, momentum, eps) if training else None


_BATCH_NORMS: dict[Any, Callable[..., Given | None]] = {F.batch_norm: _functional, torch.batch_norm: _torch}


# ---- what they compute ----


def _norm(
    path: str, runs: int, x: Tensor, mean: Tensor | None, var: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    momentum: float, eps: float,
) -> Tensor:  # fmt: skip
    name = f"batch norm {path!r}" if path else "batch norm"
    if x.dim() < 2 or x.shape[0] % runs:
        rows = x.shape[0] if x.dim() else 0
        raise InputError(
            f"cf.local_stats: the {rows} rows of {name} do not come in {runs} equal runs, one per rank and microbatch; "
            "use another batch size, or leave this norm out with where="
        )
    count = x.numel() // x.shape[1] // runs if x.numel() else 0
    if count < 2:
        raise InputError(
            f"cf.local_stats: {name} has {count} value(s) per channel and run, and a variance needs two; use a larger "
            "batch, or leave this norm out with where="
        )
    out, means, variances = _PerRun.apply(x, weight, bias, runs, eps)
    if mean is not None and var is not None:
        with torch.no_grad():
            _towards(mean, means.mean(0), momentum)
            _towards(var, variances.mean(0) * (count / (count - 1)), momentum)
    result: Tensor = out
    return result


def _towards(running: Tensor, now: Tensor, momentum: float) -> None:
    running.copy_((1 - momentum) * running + momentum * now.to(running.dtype))


def _channels(v: Tensor, ndim: int) -> Tensor:
    """Per channel, or per run and channel, against (g m c s*)."""
    lead = (v.shape[0], 1) if v.dim() == 2 else (1, 1)
    return v.reshape(*lead, v.shape[-1], *(1,) * (ndim - 2))


class _PerRun(torch.autograd.Function):
    """(x, weight, bias) -> (y, mean (g c), variance (g c)). Keeps x and the statistics, as batch norm does."""

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, runs: int, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        groups, dims = _runs(x, runs)
        mean = groups.mean(dims)
        centred = groups - _channels(mean, x.dim())
        var = (centred * centred).mean(dims)
        out = centred * _channels(torch.rsqrt(var + eps), x.dim())
        if weight is not None:
            out = out * _channels(weight.to(out.dtype), x.dim())
        if bias is not None:
            out = out + _channels(bias.to(out.dtype), x.dim())
        return out.flatten(0, 1).to(x.dtype), mean, var

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, bias, ctx.runs, ctx.eps = inputs
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(x, weight, *output[1:])
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:
        x, weight, mean, var = ctx.saved_tensors
        groups, dims = _runs(x, ctx.runs)
        g, _ = _runs(grad, ctx.runs)
        rstd = _channels(torch.rsqrt(var + ctx.eps), x.dim())
        normal = (groups - _channels(mean, x.dim())) * rstd
        sums, products = g.sum(dims), (g * normal).sum(dims)
        count = x.numel() // x.shape[1] // ctx.runs
        dx = (g - _channels(sums, x.dim()) / count - normal * (_channels(products, x.dim()) / count)) * rstd
        if weight is not None:
            dx = dx * _channels(weight.to(dx.dtype), x.dim())
        dw = None if weight is None else products.sum(0).to(weight.dtype)
        db = None if ctx.bias_dtype is None else sums.sum(0).to(ctx.bias_dtype)
        return dx.flatten(0, 1).to(x.dtype), dw, db, None, None


def _runs(x: Tensor, runs: int) -> tuple[Tensor, tuple[int, ...]]:
    """(g m c s*) in the dtype that statistics are kept in, and the dims that they reduce."""
    x = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(0, (runs, -1))
    return x, (1, *range(3, x.dim()))


__all__ = ["local_stats"]
