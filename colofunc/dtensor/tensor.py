"""DTensor: a global tensor whose parts live on the ranks of a mesh.

It is a wrapper subclass under autograd: it has the global shape, `layout` says who holds what, and eager operators go
through the same rules as whole programs (a program of one node), so `x @ y`, `loss.backward()` and `print(x)` work.

    x = distribute(torch.randn(8, 4), "(dp b) d", mesh)
    (x * 2).spec                      # (dp b) d
    x.redistribute("b (dp d)").local  # this rank's part
    x.full()                          # the plain tensor
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.utils import _pytree as pytree

from colofunc import compat
from colofunc.dtensor.eager import convert_shards, run_eager
from colofunc.dtensor.layout import Layout, replicated
from colofunc.dtensor.parts import join, part
from colofunc.dtensor.spec import Spec, bind, parse, spec_of
from colofunc.errors import ConsumedError, InputError, SpecError
from colofunc.executors.backend import Backend, backend_for
from colofunc.mesh import Mesh

SpecLike = str | Spec | Layout


class DTensor(torch.Tensor):
    """A global tensor split over a mesh. Make one with `distribute`, `from_local` or a staged step."""

    sharding: Layout
    mesh: Mesh
    _shards: list[torch.Tensor] | None
    _backend: Backend
    _consumed_by: str
    _lays_grad: bool
    owned: bool  # placed by a step, whose next call may reuse the memory

    @staticmethod
    def __new__(
        cls,
        shards: list[torch.Tensor],
        layout: Layout,
        mesh: Mesh,
        backend: Backend | None = None,
        requires_grad: bool = False,
        owned: bool = False,
    ) -> DTensor:
        first = shards[0]
        self: DTensor = compat.wrapper_subclass(
            cls, layout.shape, dtype=first.dtype, device=first.device, requires_grad=requires_grad
        )
        self.sharding = layout
        self.mesh = mesh
        self._shards = shards
        self._backend = backend or backend_for(mesh)
        self._consumed_by = ""
        self.owned = owned
        self._lays_grad = False
        return self

    # -- what it is ---------------------------------------------------------------------------------------------

    @property
    def spec(self) -> Spec:
        """The sharding spec, e.g. `(dp b) s (tp d)`."""
        return spec_of(self.sharding)

    @property
    def shards(self) -> list[torch.Tensor]:
        """All ranks' parts in rank order (simulated mesh only)."""
        if len(self.parts) != self.mesh.size:
            raise InputError("x.shards shows all ranks' parts and exists on a simulated mesh only; use x.local here")
        return list(self.parts)

    @property
    def local(self) -> torch.Tensor:
        """This rank's part (on a simulated mesh: rank 0's). Never communicates."""
        return self.parts[0]

    @property
    def parts(self) -> list[torch.Tensor]:
        """The parts of the ranks that this process owns."""
        if self._shards is None:
            raise ConsumedError(
                f"this DTensor {tuple(self.shape)} {self.sharding.text()!r} was donated to {self._consumed_by} and its memory "
                f"reused; use that call's output, or pass donate=() to keep inputs alive"
            )
        return self._shards

    @property
    def is_consumed(self) -> bool:
        return self._shards is None

    def consume(self, by: str) -> None:
        """Give the parts away: later reads raise ConsumedError naming `by`."""
        self._shards = None
        self._consumed_by = by

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if self._shards is None:
            return f"DTensor(consumed by {self._consumed_by})"
        head = f"DTensor({tuple(self.shape)}, {self.sharding.text()!r}, {self.mesh}, {self.dtype}"
        if self.sharding.is_replicated and self.numel() == 1:
            head += f", value={self.local.detach().item():.6g}" if self.dtype.is_floating_point else f", value={self.local.item()}"
        return head + ")"

    def requires_grad_(self, requires_grad: bool = True) -> DTensor:
        """As in torch; the gradient of a leaf will have the leaf's own spec, never a pending one."""
        super().requires_grad_(requires_grad)
        if requires_grad and self.is_leaf and not self._lays_grad:
            self._lays_grad = True
            target = self.sharding.with_pending(())
            self.register_hook(lambda grad: grad.redistribute(target))
        return self

    # -- moving it ----------------------------------------------------------------------------------------------

    def redistribute(self, spec: SpecLike) -> DTensor:
        """The same value in another layout, by the cheapest sequence of collectives. Differentiable."""
        out: DTensor = _Redistribute.apply(self, bind(spec, self.mesh, tuple(self.shape)))
        return out

    def full(self) -> torch.Tensor:
        """The global value as a plain tensor, on every rank. Collective. Differentiable."""
        out: torch.Tensor = _Full.apply(self)
        return out

    def to_torch(self) -> torch.Tensor:
        """This tensor as torch.distributed.tensor.DTensor on the running process group."""
        # Imported here: it takes half a second, and few programs need it.
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor as TorchDTensor

        from colofunc.dtensor.placements import to_placements

        names = self.mesh.axis_names
        device_mesh = init_device_mesh(self.device.type, tuple(self.mesh.axis_size(a) for a in names), mesh_dim_names=names)
        placements = to_placements(self.sharding, self.mesh)
        return TorchDTensor.from_local(self.local, device_mesh, placements, shape=self.shape, stride=_row_major(self.shape))

    @staticmethod
    def from_torch(y: Any, mesh: Mesh | None = None) -> DTensor:
        """A torch.distributed.tensor.DTensor as ours; `mesh` defaults to one with its mesh's names and sizes."""
        from colofunc.dtensor.placements import from_placements

        device_mesh = y.device_mesh
        if mesh is None:
            names = device_mesh.mesh_dim_names or tuple(f"d{i}" for i in range(device_mesh.ndim))
            mesh = Mesh(**dict(zip(names, device_mesh.shape, strict=True)))
        layout = from_placements(y.placements, mesh, tuple(y.shape))
        return DTensor([y.to_local()], layout, mesh)

    # -- operators ----------------------------------------------------------------------------------------------

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _dispatch(func, args, kwargs or {})


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def distribute(tensor: torch.Tensor, spec: SpecLike, mesh: Mesh) -> DTensor:
    """Split a global tensor (equal on all ranks) as `spec` says. Differentiable.

    Raises SpecError where the spec does not fit the tensor or the mesh.
    """
    if isinstance(tensor, DTensor):
        return tensor.redistribute(spec)
    if not isinstance(tensor, torch.Tensor):
        raise InputError(f"distribute wants a torch.Tensor, not {type(tensor).__name__}; convert it with torch.as_tensor")
    out: DTensor = _Distribute.apply(tensor, bind(spec, mesh, tuple(tensor.shape)), mesh)
    return out


def from_local(tensor: torch.Tensor, spec: SpecLike, mesh: Mesh, shape: Sequence[int] | None = None) -> DTensor:
    """A DTensor from this rank's part (on a simulated mesh: every rank's part is this one, or pass a list of parts).

    `shape`: the global shape; by default local sizes times the axes that split each dim.
    """
    shards = list(tensor) if isinstance(tensor, (list, tuple)) else [tensor]
    backend = backend_for(mesh)
    owned = backend.ranks(mesh)
    if len(shards) == 1:
        shards = shards * len(owned)
    if len(shards) != len(owned):
        raise InputError(f"{len(shards)} parts were given for the {len(owned)} ranks in this process of {mesh}")
    local_shape = tuple(shards[0].shape)
    layout = bind(spec, mesh, tuple(shape) if shape is not None else _global_shape(spec, mesh, local_shape))
    for shard in shards:
        if tuple(shard.shape) != layout.local_shape:
            raise SpecError(
                f"a part of shape {tuple(shard.shape)} does not fit {layout.text()!r} of {layout.shape} on {mesh}, "
                f"which has parts {layout.local_shape}; give shape= where the global size is not the obvious one"
            )
    return DTensor(shards, layout, mesh, backend)


def _global_shape(spec: SpecLike, mesh: Mesh, local_shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the whole: every local size times the sizes of the axes that its dim names."""
    if isinstance(spec, Layout):
        return spec.shape
    dims = list(parse(str(spec)).dims)
    if None in dims:  # `...` stands for dims that are not split
        at = dims.index(None)
        dims[at : at + 1] = [()] * (len(local_shape) - len(dims) + 1)
    if len(dims) != len(local_shape):
        raise SpecError(f"{str(spec)!r} has {len(dims)} dims, the part has {len(local_shape)} (shape {local_shape})")
    names = [[f.name for f in dim or () if f.name and f.name in mesh] for dim in dims]
    return tuple(size * prod(mesh.axis_size(a) for a in axes) for size, axes in zip(local_shape, names, strict=True))


class _Distribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layout: Layout, mesh: Mesh) -> DTensor:
        backend = backend_for(mesh)
        shards = [part(x.detach(), layout, mesh, rank) for rank in backend.ranks(mesh)]
        return DTensor(shards, layout, mesh, backend)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad.full(), None, None


class _Full(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor) -> torch.Tensor:
        ctx.layout, ctx.mesh = x.sharding, x.mesh
        if len(x.parts) == x.mesh.size:
            return join(x.parts, x.sharding, x.mesh).clone()
        return convert_shards(x.parts, x.sharding, replicated(x.sharding.shape), x.mesh, x._backend)[0]

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        layout = ctx.layout.with_pending(())
        return DTensor([part(grad, layout, ctx.mesh, r) for r in backend_for(ctx.mesh).ranks(ctx.mesh)], layout, ctx.mesh)


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, layout: Layout) -> DTensor:
        ctx.source = x.sharding.with_pending(())
        return DTensor(convert_shards(x.parts, x.sharding, layout, x.mesh, x._backend), layout, x.mesh, x._backend)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return DTensor(convert_shards(grad.parts, grad.sharding, ctx.source, grad.mesh, grad._backend), ctx.source, grad.mesh, grad._backend), None


# -- eager dispatch ---------------------------------------------------------------------------------------------


def _dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    if func is torch.ops.aten._local_scalar_dense.default:
        return _item(args[0])
    leaves, tree = pytree.tree_flatten((args, kwargs))
    mesh, backend = _common_mesh(func, leaves)
    operands = [_as_operand(func, leaf, mesh, backend) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    results, out_tree, mutated = run_eager(func, operands, tree, mesh, backend, DTensor)
    if mutated is not None:
        return leaves[mutated]
    wrapped = [r if not isinstance(r, tuple) else DTensor(r[0], r[1], mesh, backend) for r in results]
    return pytree.tree_unflatten(wrapped, out_tree)


def _item(x: DTensor) -> Any:
    """The number of a one-element tensor: local where every rank has it."""
    layout = x.sharding
    whole = x.parts if layout.is_replicated else convert_shards(x.parts, layout, replicated(layout.shape), x.mesh, x._backend)
    return whole[0].item()


def _common_mesh(func: Any, leaves: Sequence[Any]) -> tuple[Mesh, Backend]:
    found = [leaf for leaf in leaves if isinstance(leaf, DTensor)]
    mesh = found[0].mesh
    for other in found[1:]:
        if other.mesh != mesh:
            raise InputError(
                f"{func} mixes DTensors of two meshes, {mesh} and {other.mesh}; bring one over with cf.distribute(x.full(), ...)"
            )
    return mesh, found[0]._backend


def _as_operand(func: Any, x: torch.Tensor, mesh: Mesh, backend: Backend) -> DTensor:
    if isinstance(x, DTensor):
        return x
    if x.dim() > 0:
        raise InputError(
            f"{func} mixes a DTensor with a plain tensor of shape {tuple(x.shape)}; "
            f'say how it is split: cf.distribute(tensor, "...", mesh)'
        )
    return DTensor([x] * len(backend.ranks(mesh)), replicated(()), mesh, backend)


__all__ = ["DTensor", "bind", "distribute", "from_local"]
