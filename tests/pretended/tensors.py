"""Tensors that say `cuda:0` and hold memory of a pretended card.

Problem: what a card would refuse or do otherwise shows on a card only. Idea: each operator runs twice. At once on fake tensors of device
cuda, which know torch's own rules: which devices may meet, and the dtype, shape and strides of results. And later, when its stream gets
there, on the CPU, whose numbers are copied to where the fake result says that they lie. Views are views of the same memory. What only a
card has (`EMULATED`) is computed by a function of ours.

Copies follow CUDA: from pageable memory the host waits, whatever `non_blocking` says; from and to pinned memory it does not, and the bytes
are read or written when the stream gets there.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from pretended.kernels import BUILT_WITH_CUDA, EMULATED, runs_on_a_card

if TYPE_CHECKING:
    from pretended.machine import Machine
    from pretended.memory import Handle

aten = torch.ops.aten
CPU = torch.device("cpu")
FUSED_UPDATES = [
    getattr(getattr(aten, f"_fused_{name}_"), overload)
    for name in ("adam", "adamw", "sgd", "adagrad")
    for overload in getattr(aten, f"_fused_{name}_").overloads()
    if overload in ("default", "tensor_lr")
]
"""Torch has no fake of these. A kernel of a card is given addresses: a tensor of the host among them is an illegal access."""
READ_BY_HOST = (aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default)
VIEWS_WITHOUT_SAYING_SO = (aten._unsafe_view.default,)
WITHOUT_NUMBERS = (
    aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default, aten.new_empty_strided.default,
)  # fmt: skip


class OnCard(Tensor):
    """`cpu_view`: the same tensor as the CPU sees it, in the block of memory that `handle` holds."""

    cpu_view: Tensor
    handle: Handle
    machine: Machine
    _device = torch.device("cuda", 0)  # torch asks before a tensor has its own

    @staticmethod
    def __new__(cls, real: Tensor, handle: Handle, machine: Machine, device: torch.device) -> OnCard:
        with torch.utils._python_dispatch._disable_current_modes():
            elements = handle.block.memory.numel() // real.itemsize
            meta = torch.empty(elements, dtype=real.dtype, device="meta").as_strided(real.shape, real.stride(), real.storage_offset())
        self = Tensor._make_subclass(cls, meta, False, dispatch_device=True, device_for_backend_keys=device)
        self._device = device
        self.cpu_view, self.handle, self.machine = real, handle, machine
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0]._device
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, OnCard)]
        return dispatch(tensors[0].machine, func, args, kwargs or {})

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._device

    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]
    is_meta = property(lambda self: False)  # type: ignore[assignment]

    def data_ptr(self) -> int:
        return self.cpu_view.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.cpu_view.untyped_storage()

    def get_device(self) -> int:
        return self._device.index

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def new_tensor(self, data: Any, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        return torch.tensor(data, dtype=dtype or self.dtype).to(device or self._device)

    def is_pinned(self, device: Any = None) -> bool:
        return False

    def record_stream(self, stream: Any) -> None:
        """Whoever gets this memory next waits for what the stream has been given so far."""
        self.handle.block.others.append(stream.mark())

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnCard({tuple(self.shape)}, {self.dtype}, {self._device})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError("a tensor of a card is pickled as its copy on the host")


def dispatch(machine: Machine, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One operator that has to do with a card."""
    if func is torch.ops.prim.device.default:
        return args[0]._device
    if func not in EMULATED:
        whole = func.decompose(*args, **kwargs) if func._can_decompose() else NotImplemented
        if whole is not NotImplemented:
            return whole
    with machine.engine.lock:
        return _Call(machine, func, args, kwargs).result()


class _Call:
    """One call of an operator."""

    def __init__(self, machine: Machine, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.machine = machine
        self.func = func
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": machine.device_of(kwargs["device"])}
        self.args, self.kwargs = args, kwargs
        self.flat, self.spec = tree_flatten((args, kwargs))
        self.stream = machine.current_stream(self._device())

    def result(self) -> Any:
        func = self.func
        if func is aten._to_copy.default and self._between():
            return self._moved()
        if func is aten.copy_.default and self.args[0].device != self.args[1].device:
            return self._copied()
        if self._is_view():
            return self._view()
        if func in READ_BY_HOST:
            self.machine.host_waits("item")
            self.stream.finish()
            return func(*self._reals()[0], **self._reals()[1])
        if BUILT_WITH_CUDA and not runs_on_a_card(func):
            raise NotImplementedError(f"{func} has no kernel for CUDA")
        try:
            fake = self._fake()
        except (DataDependentOutputException, DynamicOutputShapeException):
            return self._at_once()
        return self._launched(fake)

    # ---- what the rules of torch say ----

    def _fake(self) -> Any:
        """The result on fake tensors of the card; raises what torch would say of these devices, dtypes and shapes."""
        if self.func in FUSED_UPDATES:
            rate = self.kwargs.get("lr")  # the host reads one of its own
            devices = {x.device for x in self.flat if isinstance(x, Tensor) and not (x is rate and x.device.type == "cpu")}
            if len(devices) > 1:
                raise RuntimeError(f"{self.func} of tensors on {sorted(map(str, devices))}: on a card an illegal memory access")
            return ()
        key = self._key()
        if key not in _RESULTS:
            fakes = self.machine.fakes
            flat = [_fake_of(fakes, x) if isinstance(x, Tensor) else x for x in self.flat]
            args, kwargs = tree_unflatten(flat, self.spec)
            with fakes:
                _RESULTS[key] = self.func(*args, **kwargs)
        return _RESULTS[key]

    def _key(self) -> tuple[Any, ...]:
        """All that the types of the results depend on."""
        leaves = [(x.shape, x.stride(), x.dtype, x.device) if isinstance(x, Tensor) else (type(x), x) for x in self.flat]
        return self.func, torch.get_default_dtype(), self.spec, tuple(leaves)

    def _is_view(self) -> bool:
        returns = self.func._schema.returns
        aliases = [r.alias_info for r in returns]
        said = bool(aliases) and all(a is not None and not a.is_write for a in aliases)
        return (said or self.func in VIEWS_WITHOUT_SAYING_SO) and any(isinstance(x, OnCard) for x in self.flat)

    def _view(self) -> Any:
        base = next(x for x in self.flat if isinstance(x, OnCard))
        args, kwargs = self._reals()
        out = self.func(*args, **kwargs)
        return tree_map(lambda x: OnCard(x, base.handle, base.machine, base.device) if isinstance(x, Tensor) else x, out)

    # ---- kernels ----

    def _launched(self, fake: Any) -> Any:
        """Results that will be there when the stream gets to them."""
        func, machine = self.func, self.machine
        fakes, spec = tree_flatten(fake)
        written = self._written()
        if written is None:
            results = [self._room(x) if isinstance(x, Tensor) else x for x in fakes]
        else:
            results = written
        if func in WITHOUT_NUMBERS:
            return tree_unflatten(results, spec)
        args, kwargs = self._reals(late=True)
        run = EMULATED.get(func, func)
        seed = int(torch.randint(1 << 62, ()).item()) if torch.Tag.nondeterministic_seeded in func.tags else None
        targets = None if written is not None else [x.cpu_view if isinstance(x, OnCard) else x for x in results]

        def kernel() -> None:
            if seed is None:
                made = run(*args, **kwargs)
            else:
                with torch.random.fork_rng(devices=()):
                    torch.manual_seed(seed)
                    made = run(*args, **kwargs)
            if targets is not None:
                _fill(targets, made)

        machine.launches[str(func)] += 1
        self.stream.launch(kernel)
        if written is not None and not func._schema.returns:
            return None
        return tree_unflatten(results, spec)

    def _at_once(self) -> Any:
        """An operator whose shape depends on numbers: the host waits."""
        self.machine.host_waits("shape")
        self.stream.finish()
        args, kwargs = self._reals()
        out = self.func(*args, **kwargs)
        self.machine.launches[str(self.func)] += 1
        return tree_map(lambda x: self.machine.placed(x, self._device(), self.stream) if isinstance(x, Tensor) else x, out)

    def _device(self) -> torch.device:
        """The card that it runs on, which CUDA makes the current one meanwhile: that of its first tensor on one, else the one asked for."""
        there = next((x.device for x in self.flat if isinstance(x, OnCard)), None)
        return there or self.machine.device_of(self.kwargs.get("device") or "cuda")

    def _written(self) -> list[Any] | None:
        """The operands that an operator in place returns; None where results are new."""
        schema = self.func._schema
        if not schema.returns:
            return []
        if any(r.alias_info is None or not r.alias_info.is_write for r in schema.returns):
            return None
        by_alias: dict[Any, Any] = {}
        for k, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = self.args[k] if k < len(self.args) else self.kwargs.get(argument.name)
                by_alias[frozenset(argument.alias_info.before_set)] = given
        return [by_alias[frozenset(r.alias_info.before_set)] for r in schema.returns]

    def _room(self, fake: Tensor) -> Any:
        """Memory for one result."""
        if fake.device.type != "cuda":
            return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
        return self.machine.room(fake.shape, fake.stride(), fake.dtype, fake.device, self.machine.current_stream(fake.device))

    def _reals(self, late: bool = False) -> tuple[Any, Any]:
        """The operands as the CPU has them; late: read some time after the call, so that tensors of the host are read now."""

        def real(x: Any) -> Any:
            if isinstance(x, OnCard):
                return x.cpu_view
            return x.clone() if late and isinstance(x, Tensor) else x

        args, kwargs = tree_unflatten([real(x) for x in self.flat], self.spec)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": CPU}
        return args, {name: value for name, value in kwargs.items() if name not in ("pin_memory", "non_blocking")}

    # ---- copies ----

    def _between(self) -> bool:
        to = self.kwargs.get("device")
        return to is not None and torch.device(to) != self.args[0].device

    def _moved(self) -> Tensor:
        source = self.args[0]
        non_blocking = self.kwargs.get("non_blocking", False)
        fake = self._fake()
        if fake.device.type == "cpu":
            target = self.machine.pinned_empty(fake) if non_blocking else torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype)
        else:
            target = self._room(fake)
        self._copy(target, source, non_blocking)
        return target

    def _copied(self) -> Tensor:
        target, source = self.args[:2]
        non_blocking = self.args[2] if len(self.args) > 2 else self.kwargs.get("non_blocking", False)
        self._fake()
        self._copy(target, source, non_blocking)
        return target

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool) -> None:
        machine = self.machine
        pinned = all(isinstance(x, OnCard) or machine.is_pinned(x) for x in (target, source))
        host = target if isinstance(source, OnCard) else source
        to, of = (x.cpu_view if isinstance(x, OnCard) else raw(x) if pinned else x for x in (target, source))
        if isinstance(host, OnCard):
            # The card that is copied from does it, between what the streams of both have been given before and after.
            sender, receiver = machine.current_stream(source.device), machine.current_stream(target.device)
            sender.wait_stream(receiver)
            sender.launch(lambda: to.copy_(of))
            receiver.wait_stream(sender)
        elif pinned and non_blocking:
            kept = None if machine.is_registered(host) else host  # torch's own pinned memory is kept until the copy has ended
            address = host.data_ptr() if kept is None and host.numel() else None
            self.stream.launch(lambda: (machine.check_registered(address), to.copy_(of), kept))
        elif host is source:
            now = source.clone()
            self.stream.launch(lambda: to.copy_(now))
            machine.host_waits("copy to the card")
            self.stream.finish()
        else:
            machine.host_waits("copy to the host")
            self.stream.finish()
            target.copy_(of)
        machine.copies += 1


_RESULTS: dict[tuple[Any, ...], Any] = {}
"""Results on fake tensors, by call. Only their shapes, strides, dtypes and devices are read."""


def _fake_of(fakes: Any, x: Tensor) -> Tensor:
    with fakes:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _fill(targets: Sequence[Any], made: Any) -> None:
    for target, value in zip(targets, tree_flatten(made)[0], strict=True):
        if isinstance(target, Tensor) and isinstance(value, Tensor):
            if target.shape == (0,):
                continue  # what the CPU keeps for its own backward, and a card does not
            if target.shape != value.shape:
                raise RuntimeError(f"the result has shape {tuple(value.shape)}; on a card it has {tuple(target.shape)}")
            target.copy_(value)


def raw(x: Tensor) -> Tensor:
    """The same memory, which nobody is told is in use: as a copy engine has it, by its address."""
    if not x.numel():
        return x
    nbytes = (1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))) * x.itemsize
    memory = (ctypes.c_uint8 * nbytes).from_address(x.data_ptr())
    return torch.frombuffer(memory, dtype=torch.uint8).view(x.dtype).as_strided(x.shape, x.stride())


def caller() -> str:
    """The function of the project that a call comes from, `executors/copies.py settle`."""
    frame = inspect.currentframe()
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if "/pretended/" not in file and ("/colofunc/" in file or "<colofunc" in file):
            return f"{file.rsplit('/colofunc/', 1)[-1]} {name}"
        frame = frame.f_back
    return "outside of the project"
