"""DTensor: a global tensor whose parts live on the ranks of a mesh.

It is a wrapper subclass under autograd: it has the global shape, `layout` says who holds what, and eager operators go
through the same rules as whole programs (a program of one node), so `x @ y`, `loss.backward()` and `print(x)` work.

    x = distribute(torch.randn(8, 4), "(dp b) d", mesh)
    (x * 2).spec                      # (dp b) d
    x.redistribute("b (dp d)").local  # this rank's part
    x.full()                          # the plain tensor
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any

import attrs
import torch
import torch.distributed as dist

from colofunc import compat
from colofunc.dtensor.eager import convert_shards, settled_parts
from colofunc.dtensor.eager_dispatch import Origin, SharedParts, call_function, dispatch
from colofunc.dtensor.other_mesh import parts_on
from colofunc.errors import ConsumedError, InputError, SpecError
from colofunc.executors.backend import Backend, backend_for
from colofunc.executors.copies import COPIER
from colofunc.mesh import Mesh
from colofunc.program.lazy import LazyTensor, make_parts
from colofunc.program.tracing.meta import user_line
from colofunc.spec.layout import Layout, replicated
from colofunc.spec.parts import global_shape, join, row_major
from colofunc.spec.spec import Spec, bind, spec_of
from colofunc.spec.transfer import part

SpecLike = str | Spec | Layout
Maker = Callable[[list[torch.Tensor]], "DTensor"]


@attrs.frozen(eq=False)
class Home:
    """All that a step asks about a tensor that it is given.

    Equal ones are one object (`home_of`), so that one look is enough.
    """

    layout: Layout
    dtype: torch.dtype
    mesh: Mesh
    backend: Backend

    def maker(self, device: torch.device, role: str = "") -> Maker:
        """What makes owned tensors of parts on a device that are known to lie here, in less time than others."""
        wrapper = compat.wrapper_maker(DTensor, self.layout.shape, self.dtype, device)
        layout, mesh, backend = self.layout, self.mesh, self.backend

        def make(shards: list[torch.Tensor]) -> DTensor:
            x: DTensor = wrapper()
            x.sharding, x.mesh, x._backend, x.home = layout, mesh, backend, self
            x._held, x.owned, x.role = SharedParts(shards), True, role
            return x

        return make


def home_of(layout: Layout, dtype: torch.dtype, mesh: Mesh, backend: Backend) -> Home:
    """The home of tensors like these."""
    key = layout, dtype, mesh, id(backend)  # a home keeps its backend, so that the number stays its own
    return _HOMES.setdefault(key, Home(layout, dtype, mesh, backend))


_HOMES: dict[tuple[object, ...], Home] = {}


def consume_all(given: Iterable[DTensor], by: str, names: Iterable[str] | None = None) -> None:
    """Give the parts of tensors away: later reads, also of views, raise ConsumedError naming `by`.

    `names`: of the leaves they were.
    """
    for x, name in zip(given, repeat("") if names is None else names):
        held = x._held
        held.shards, held.consumed_by, held.name = None, by, name


def parts_of(leaves: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """What each tensor holds, without a look at what has become of it; nothing of one that is plain or was consumed."""
    return [(x._held.shards or []) if type(x) is DTensor else [] for x in leaves]


def as_movable(x: DTensor) -> DTensor:
    """The same tensor, for a plan that may lay it otherwise with the rest of its state."""
    return DTensor(
        x.parts_in_flight, x.sharding, x.mesh, x._backend, x.requires_grad, owned=True, movable=True, role=x.role
    )


def validate(some: Iterable[DTensor]) -> None:
    """What a step has guessed of tensors is put right on all ranks, where they are read by some only afterwards.

    Collective.
    """
    for x in some:
        _ = x.parts_in_flight


class DTensor(torch.Tensor):
    """A global tensor split over a mesh. Make one with `distribute`, `from_local` or a staged step."""

    __slots__ = ("_backend", "_held", "home", "mesh", "owned", "role", "sharding")

    sharding: Layout
    mesh: Mesh
    _held: SharedParts
    _backend: Backend
    owned: bool  # placed by a step, whose next call may reuse the memory
    home: Home | None  # of what a step has placed, as long as it has no gradient and nobody has written to it
    role: str  # what it is to the steps that made and placed it ("param", ...; see `roles`), "" where that is not known
    # What most have not is said by the class, as a step makes hundreds of them.
    _origin: Origin | None = None
    _lays_grad: bool = False
    movable: bool = False  # lies as nobody asked for, so a step's plan may lay it otherwise; beside `owned`, with the rest of its state

    @staticmethod
    def __new__(
        cls,
        shards: list[torch.Tensor],
        layout: Layout,
        mesh: Mesh,
        backend: Backend | None = None,
        requires_grad: bool = False,
        owned: bool = False,
        movable: bool = False,
        role: str = "",
    ) -> DTensor:
        first = shards[0]
        self: DTensor = compat.wrapper_subclass(
            cls, layout.shape, dtype=first.dtype, device=first.device, requires_grad=False
        )
        self.sharding = layout
        self.mesh = mesh
        self._held = SharedParts(shards)
        self._backend = backend or backend_for(mesh)
        self.owned = owned
        if movable:
            self.movable = True
        self.role = role
        self.home = None
        return self.requires_grad_() if requires_grad else self

    # -- what it is ---------------------------------------------------------------------------------------------

    @property
    def spec(self) -> Spec:
        """The sharding spec, e.g. `(dp b) s (tp d)`."""
        return spec_of(self.sharding, self.mesh)

    @property
    def shards(self) -> list[torch.Tensor]:
        """All ranks' parts in rank order (simulated mesh only)."""
        if len(self.parts) != self.mesh.size:
            raise InputError("x.shards shows all ranks' parts and exists on a simulated mesh only; use x.local here")
        self._held.lent = True
        return list(self.parts)

    @property
    def local(self) -> torch.Tensor:
        """This rank's part (on a simulated mesh: rank 0's).

        Communicates only to validate what a step has guessed (`cf.pipeline(validate="next step")`); where that is done
        again and its ranks gather, all ranks have to read.
        """
        self._held.lent = True
        return self.parts[0]

    @property
    def parts(self) -> list[torch.Tensor]:
        """The parts of the ranks that this process owns.

        Where they lie beside a card the host waits until copies of them have ended.
        """
        found = self.parts_in_flight
        if self.sharding.tier == "host":
            COPIER.arrived(found)
        return found

    @property
    def parts_in_flight(self) -> list[torch.Tensor]:
        """The parts for a step, or for who does not look at numbers: a card may still copy to and from those of the
        host.
        """
        unsettled = self._backend.unsettled
        if unsettled is not None:  # what it holds may be what a step has guessed
            unsettled.read(self._held.shards)
        origin = self._origin
        lost = None
        if self._held.shards is None:
            lost = self._held
        elif origin is not None and origin.root.shards is None:
            lost = origin.root
        if lost is not None:
            read = f"it is read again at {line}: " if (line := user_line()) else ""
            name = f"{lost.name!r} " if lost.name else ""
            raise ConsumedError(
                f"this DTensor {name}{tuple(self.shape)} {self.sharding.text()!r} was donated to {lost.consumed_by} "
                f"and its memory reused; {read}use that call's output, or pass donate=() to keep inputs alive"
            )
        if origin is not None and origin.seen != origin.root.writes:
            raise ConsumedError(
                f"this DTensor {tuple(self.shape)} {self.sharding.text()!r} is a view ({origin.func}) of a tensor that "
                "was written in place since; take the view again after writing, or clone() it before"
            )
        assert self._held.shards is not None
        return self._held.shards

    @property
    def is_consumed(self) -> bool:
        """Whether a step has taken its memory, so that it has no value any more."""
        return self._held.shards is None

    @property
    def lent(self) -> bool:
        """Whether a caller has been given a part that lies on the host, so that he may write to it behind any step."""
        return self._held.lent and self.sharding.tier == "host"

    def consume(self, by: str) -> None:
        """Give the parts away: later reads, also of views, raise ConsumedError naming `by`."""
        consume_all((self,), by)

    def requires_grad_(self, requires_grad: bool = True) -> DTensor:
        """As torch's; a leaf's gradient gets the leaf's own layout."""
        super().requires_grad_(requires_grad)
        self.home = None
        if requires_grad and self.is_leaf and not self._lays_grad:
            self._lays_grad = True
            target = self.sharding.with_pending(())
            hook: Callable[[DTensor], DTensor] = lambda grad: grad.redistribute(target)  # noqa: E731
            self.register_hook(hook)  # type: ignore[no-untyped-call]
        return self

    @property
    def requires_grad(self) -> bool:
        """As torch's."""
        return bool(torch.Tensor.requires_grad.__get__(self))  # type: ignore[attr-defined]

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if self._held.shards is None:
            return f"DTensor(consumed by {self._held.consumed_by})"
        head = f"DTensor({tuple(self.shape)}, {self.sharding.text()!r}, {self.mesh}, {self.dtype}"
        if self.sharding.is_replicated and self.numel() == 1:
            number = self.parts[0].detach().item()
            head += f", value={number:.6g}" if self.dtype.is_floating_point else f", value={number}"
        return head + ")"

    def __format__(self, spec: str) -> str:
        """A scalar formats like its number (collective only where it is not replicated)."""
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)

    def item(self) -> Any:
        """The number of a tensor of one element. Local where every rank has it, else collective."""
        if self.sharding.is_replicated and self.sharding.local_numel == 1:
            return self.parts[0].item()
        return super().item()

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    def tolist(self) -> Any:
        """The global value as nested lists. Collective."""
        return self.full().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """The global value as an array. Collective."""
        return self.full().numpy(force=force)

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        out = DTensor(
            [x.clone() for x in self.parts], self.sharding, self.mesh, self._backend, self.requires_grad, role=self.role
        )
        memo[id(self)] = out
        return out

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InputError(
            f"a DTensor {tuple(self.shape)} on {self.mesh} cannot be pickled; save x.full(), or x.local per rank"
        )

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
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() != self.mesh.size:
            raise InputError(
                f"to_torch needs a process group of the size of {self.mesh}; start with torchrun, or use x.full()"
            )
        # Imported here: it takes half a second, and few programs need it.
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor as TorchDTensor

        from colofunc.spec.placements import to_placements

        names = self.mesh.axis_names
        device_mesh = init_device_mesh(
            self.device.type, tuple(self.mesh.axis_size(name) for name in names), mesh_dim_names=names
        )
        placements = to_placements(self.sharding, self.mesh)
        return TorchDTensor.from_local(
            self.local, device_mesh, placements, shape=self.shape, stride=row_major(self.shape)
        )

    @staticmethod
    def from_torch(y: Any, mesh: Mesh | None = None) -> DTensor:
        """A torch.distributed.tensor.DTensor as ours; `mesh` defaults to one with its mesh's names and sizes."""
        from colofunc.spec.placements import from_placements

        device_mesh = getattr(y, "device_mesh", None)
        if device_mesh is None:
            raise InputError(
                f"from_torch wants a torch.distributed.tensor.DTensor, not {type(y).__name__}; use distribute"
            )
        if mesh is None:
            names = device_mesh.mesh_dim_names or tuple(f"d{i}" for i in range(device_mesh.ndim))
            mesh = Mesh(**dict(zip(names, device_mesh.shape, strict=True)))
        layout = from_placements(y.placements, mesh, tuple(y.shape))
        return DTensor([y.to_local()], layout, mesh)

    # -- operators ----------------------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = call_function(DTensor, func, args, kwargs or {})
        return compat.no_torch_function(func, types, args, kwargs or {}) if result is NotImplemented else result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return dispatch(DTensor, func, args, kwargs or {})


def distribute(tensor: torch.Tensor, spec: SpecLike, mesh: Mesh) -> DTensor:
    """Split a global tensor (equal on all ranks) as `spec` says. Differentiable.

    A DTensor of another mesh is brought over part by part: each rank gets what it is to hold. On a mesh of GPUs the
    parts lie there, wherever the tensor does, unless the spec says `@host`. Raises SpecError where the spec does not
    fit the tensor or the mesh.
    """
    if isinstance(tensor, DTensor) and tensor.mesh == mesh:
        return tensor.redistribute(spec)
    if isinstance(tensor, DTensor):
        moved: DTensor = _ToOtherMesh.apply(tensor, bind(spec, mesh, tuple(tensor.shape)), mesh)
        return moved
    if not isinstance(tensor, torch.Tensor):
        raise InputError(
            f"distribute wants a torch.Tensor, not {type(tensor).__name__}; convert it with torch.as_tensor"
        )
    layout = bind(spec, mesh, tuple(tensor.shape))
    if isinstance(tensor, LazyTensor):  # part by part, never whole where its source can read parts
        backend = backend_for(mesh)
        return DTensor(make_parts(tensor, layout, mesh, backend.ranks(mesh)), layout, mesh, backend)
    out: DTensor = _Distribute.apply(tensor, layout, mesh)
    return out


def from_local(tensor: torch.Tensor, spec: SpecLike, mesh: Mesh, shape: Sequence[int] | None = None) -> DTensor:
    """A DTensor from this rank's part (on a simulated mesh: every rank's part is this one, or pass a list of parts).

    `shape`: the global shape; by default local sizes times the axes that split each dim.
    """
    shards = list(tensor) if isinstance(tensor, (list, tuple)) else [tensor]
    for shard in shards:
        if not isinstance(shard, torch.Tensor) or isinstance(shard, DTensor):
            raise InputError(f"from_local wants this rank's part as a plain torch.Tensor, not {type(shard).__name__}")
        if (shard.dtype, shard.device) != (shards[0].dtype, shards[0].device):
            raise InputError(
                f"the parts differ in dtype or device: {shards[0].dtype} on {shards[0].device} and {shard.dtype} on "
                f"{shard.device}; convert them with .to() first"
            )
    backend = backend_for(mesh)
    owned = backend.ranks(mesh)
    if len(shards) == 1:
        shards = shards * len(owned)
    if len(shards) != len(owned):
        raise InputError(f"{len(shards)} parts were given for the {len(owned)} ranks in this process of {mesh}")
    local_shape = tuple(shards[0].shape)
    layout = bind(spec, mesh, tuple(shape) if shape is not None else global_shape(spec, mesh, local_shape))
    for shard in shards:
        if tuple(shard.shape) != layout.local_shape:
            raise SpecError(
                f"a part of shape {tuple(shard.shape)} does not fit {layout.text()!r} of {layout.shape} on {mesh}, "
                f"which has parts {layout.local_shape}; give shape= where the global size is not the obvious one"
            )
    out = DTensor(settled_parts([x.detach() for x in shards], layout, mesh), layout, mesh, backend)
    out._held.lent = True
    return out


def _apart(shards: list[torch.Tensor], source: DTensor) -> list[torch.Tensor]:
    """Parts that share no memory with an owned tensor's, which a later call may overwrite."""
    if not source.owned:
        return shards
    taken = {compat.storage_key(x) for x in source.parts}
    return [x.clone() if compat.storage_key(x) in taken else x for x in shards]


class _Distribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layout: Layout, mesh: Mesh) -> DTensor:
        backend = backend_for(mesh)
        ctx.device = x.device
        plain = x.detach().clone()  # the parts may be views of it, and must not change when `x` does
        parts = settled_parts([part(plain, layout, mesh, rank) for rank in backend.ranks(mesh)], layout, mesh)
        return DTensor(parts, layout, mesh, backend)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad.full().to(ctx.device), None, None


class _ToOtherMesh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, layout: Layout, mesh: Mesh) -> DTensor:
        ctx.layout, ctx.mesh = x.sharding.with_pending(()), x.mesh
        return DTensor(parts_on(x, layout, mesh), layout, mesh, role=x.role)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return distribute(grad, ctx.layout, ctx.mesh), None, None


class _Full(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor) -> torch.Tensor:
        ctx.layout, ctx.mesh = x.sharding, x.mesh
        if len(x.parts) == x.mesh.size:
            return join(x.parts, x.sharding, x.mesh).clone()
        target = replicated(x.sharding.shape)
        if x.sharding.with_tier("device") is target:
            return x.parts[0].clone()
        whole = convert_shards(x.parts, x.sharding, target, x.mesh, x._backend, "full()")[0]
        # Where the parts are: all of a state that lies in host memory, one by one, would not fit on the GPU.
        return whole.to(x.parts[0].device)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return distribute(grad, ctx.layout.with_pending(()), ctx.mesh)


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, layout: Layout) -> DTensor:
        ctx.source = x.sharding.with_pending(())
        shards = convert_shards(x.parts, x.sharding, layout, x.mesh, x._backend)
        out = DTensor(_apart(shards, x), layout, x.mesh, x._backend, role=x.role)
        out._held.lent = x._held.lent  # they may share memory
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad.redistribute(ctx.source), None


__all__ = ["DTensor", "bind", "distribute", "from_local"]
