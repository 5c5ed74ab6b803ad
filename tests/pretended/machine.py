"""A machine with cards that are pretended: what `torch.cuda` says, and the kernels that make tensors there.

    with Machine(cards=1, seed=0) as machine:
        x = torch.randn(4, 4, device="cuda")
        y = (x @ x).sum()            # nothing has been computed yet
        float(y)                     # the host waits: counted in machine.waits
    machine.waits, machine.launches, machine.peak_bytes()
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Self
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import Library

from colofunc.executors import pages
from colofunc.executors.copies import COPIER
from colofunc.executors.disk import tensors as disk_tensors
from colofunc.executors.pages import give_back, let_go
from colofunc.executors.pages_in_use import IN_USE
from colofunc.mesh import attention_profile, detection, device_profile, stopwatch
from colofunc.ops import attention_flex, native, plain, random_kernels, triton_use
from pretended import flex, random_numbers
from pretended.memory import SPOILED, Allocator
from pretended.streams import Engine, Event, Stream
from pretended.tensors import CPU, OnCard, caller, dispatch

HOST_THREADS = 64
"""Of the pretended host, so that plans do not depend on the one that pretends."""

GIB = 1 << 30
COPIED_BYTES = 1 << 16
"""Of a copy that is timed."""
SMALL_PROFILE = dict(COPIED_CARD_BYTES=COPIED_BYTES, CARD_BYTES_OF_WORK=(COPIED_BYTES,), MOST_WIDE=256)
SMALL_ATTENTION = dict(CARD_LENGTHS=(16, 32), CARD_ROWS=32, CARD_WIDTH=128)
"""What `profile_mesh` measures where the host computes what a card would."""
aten = torch.ops.aten
SIZED_BY_NUMBERS = (
    aten.arange.default, aten.arange.start, aten.arange.start_step, aten.eye.default, aten.eye.m, aten.tril_indices.default,
    aten.triu_indices.default,
)  # fmt: skip
"""Torch makes these by resizing an empty tensor, which the tensors here do not."""


class Machine:
    """`waits`: how often the host waited, by what for; `places`: the same with the function of the project that did; `launches`: kernels
    by operator. The host is the thread that makes the machine; `beside`: what its other threads, of saves and of the disk, waited for.
    """

    def __init__(self, cards: int = 1, seed: int = 0, capacity_bytes: int = 80 * GIB, name: str = "NVIDIA H100 80GB HBM3", card: int = 0):
        torch._C._ensureCUDADeviceGuardSet()
        self.engine = Engine(seed, self.host_waits)
        self.fakes = FakeTensorMode()
        self.name = name
        self.cards = [torch.device("cuda", k) for k in range(cards)]
        self.allocators = {device: Allocator(capacity_bytes) for device in self.cards}
        self.default_streams = {device: Stream(self.engine, device) for device in self.cards}
        self.first_card = card
        self.waits: Counter[str] = Counter()
        self.places: Counter[str] = Counter()
        self.beside: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()
        self.copies = 0
        self.sync_debug_mode: str | int = "default"
        self._host = threading.get_ident()
        self._thread = threading.local()
        self._registered: dict[int, int] = {}  # address -> bytes that `cudaHostRegister` has pinned
        self._pinned: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # address -> torch's own pinned memory
        self._around = contextlib.ExitStack()

    # ---- counted ----

    def host_waits(self, why: str) -> None:
        if threading.get_ident() != self._host:
            self.beside[f"{why}: {caller()}"] += 1
            return
        self.waits[why] += 1
        self.places[f"{why}: {caller()}"] += 1
        if self.sync_debug_mode in ("warn", 1) and why != "device":  # of that one torch says nothing
            warnings.warn(f"called a synchronizing CUDA operation ({why}, pretended)", stacklevel=3)

    def set_sync_debug_mode(self, mode: str | int) -> None:
        self.sync_debug_mode = mode

    def forget_counts(self) -> None:
        """Begin to count anew, at what lives now."""
        for counts in (self.waits, self.places, self.beside, self.launches):
            counts.clear()
        self.copies = 0
        for allocator in self.allocators.values():
            allocator.reset_peak()

    def live_bytes(self, card: int = 0) -> int:
        return self.allocators[self.cards[card]].live_bytes

    def peak_bytes(self, card: int = 0) -> int:
        return self.allocators[self.cards[card]].peak_bytes

    # ---- devices and streams, of the thread that asks ----

    @property
    def current_card(self) -> int:
        return getattr(self._thread, "card", 0)

    def set_card(self, device: Any) -> int:
        """The card that was current before. A thread begins with card 0, whatever others have."""
        before = self.current_card
        index = device if isinstance(device, int) else torch.device(device).index
        if index is not None and index >= 0:
            if index >= len(self.cards):
                raise RuntimeError(f"CUDA error: invalid device ordinal {index} of {len(self.cards)}")
            self._thread.card = index
        return before

    def device_of(self, device: Any) -> torch.device:
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if device.type != "cuda":
            return device
        index = self.current_card if device.index is None else device.index
        if index >= len(self.cards):
            raise RuntimeError(f"CUDA error: invalid device ordinal {index} of {len(self.cards)}")
        return self.cards[index]

    def current_stream(self, device: Any = None) -> Stream:
        device = self.device_of("cuda" if device is None else device)
        stream: Stream = self._streams().get(device, self.default_streams[device])
        return stream

    def _streams(self) -> dict[torch.device, Stream]:
        if not hasattr(self._thread, "streams"):
            self._thread.streams = {}
        streams: dict[torch.device, Stream] = self._thread.streams
        return streams

    @contextlib.contextmanager
    def on_stream(self, stream: Stream | None) -> Iterator[None]:
        """`torch.cuda.stream`."""
        if stream is None:
            yield
            return
        before, card = self._streams().get(stream.device), self.set_card(stream.device)
        self._streams()[stream.device] = stream
        try:
            yield
        finally:
            self.set_card(card)
            if before is None:
                del self._streams()[stream.device]
            else:
                self._streams()[stream.device] = before

    @contextlib.contextmanager
    def on_device(self, device: Any) -> Iterator[None]:
        """`torch.cuda.device`."""
        before = self.set_card(-1 if device is None else self.device_of(device))
        try:
            yield
        finally:
            self.set_card(before)

    def synchronize(self, device: Any = None) -> None:
        self.host_waits("device")
        self.engine.drain()

    # ---- memory ----

    def room(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device, stream: Stream) -> OnCard:
        """A new tensor of a card; what it holds is NaN, or what somebody else wrote."""
        extent = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        handle = self.allocators[device].allocate(extent * dtype.itemsize, stream)
        memory = handle.block.memory
        usable = memory.numel() // dtype.itemsize * dtype.itemsize
        real = memory[:usable].view(dtype).as_strided(tuple(shape), tuple(stride))
        return OnCard(real, handle, self, device)

    def placed(self, x: Tensor, device: torch.device, stream: Stream) -> OnCard:
        """A tensor of the host, as it lies, on a card."""
        out = self.room(x.shape, x.stride(), x.dtype, device, stream)
        out.cpu_view.copy_(x)
        return out

    def to_card(self, x: Tensor, card: int = 0) -> OnCard:
        """A tensor that a user has put on a card before the step begins."""
        device = self.cards[card]
        stream = self.default_streams[device]
        stream.finish()
        return self.placed(x.detach(), device, stream)

    def pinned_empty(self, like: Tensor) -> Tensor:
        """Pinned memory of the host as torch allocates it."""
        with torch.utils._python_dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
            flat = torch.full((like.untyped_storage().nbytes(),), SPOILED, dtype=torch.uint8)
            self._pinned[flat.untyped_storage().data_ptr()] = flat.untyped_storage()
            return flat.view(like.dtype).as_strided(like.shape, like.stride()) if like.numel() else torch.empty_like(like, device=CPU)

    def is_registered(self, x: Tensor) -> bool:
        """Whether it lies in pages that the project has pinned: nobody but the project keeps them until a copy has ended."""
        at = x.data_ptr()
        return any(begin <= at < begin + nbytes for begin, nbytes in self._registered.items())

    def check_registered(self, address: int | None) -> None:
        """A copy that runs late finds the pages still there."""
        if address is not None and not any(begin <= address < begin + nbytes for begin, nbytes in self._registered.items()):
            raise RuntimeError("a copy reads or writes pinned memory that was given back: on a card an illegal memory access")

    def is_pinned(self, x: Tensor) -> bool:
        if x.device.type != "cpu":
            return False
        return not x.numel() or self.is_registered(x) or x.untyped_storage().data_ptr() in self._pinned

    def _register(self, address: int, nbytes: int, flags: int = 0) -> int:
        self._registered[int(address)] = nbytes
        return 0

    def _unregister(self, address: int) -> int:
        return 0 if self._registered.pop(int(address), None) is not None else 1

    # ---- what torch says ----

    def properties(self, device: Any = None) -> Any:
        capacity = self.allocators[self.device_of("cuda" if device is None else device)].capacity_bytes
        return SimpleNamespace(
            name=self.name, major=9, minor=0, total_memory=capacity, multi_processor_count=132, warp_size=32, index=0, type="cuda",
            L2_cache_size=50 << 20, shared_memory_per_block=49152, shared_memory_per_block_optin=232448, regs_per_multiprocessor=65536,
            max_threads_per_multi_processor=2048, is_integrated=0, is_multi_gpu_board=0, gcnArchName="", clock_rate=1_980_000,
            memory_clock_rate=2_619_000, memory_bus_width=5120, pci_bus_id=0, pci_device_id=0, pci_domain_id=0,
            uuid=str(self._or_current(device)),
        )  # fmt: skip

    def _said(self) -> dict[str, Any]:
        """What stands in `torch.cuda` meanwhile."""

        def allocator(device: Any = None) -> Allocator:
            return self.allocators[self.device_of("cuda" if device is None else device)]

        runtime = SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self._unregister)
        return {
            "_lazy_init": lambda: None, "init": lambda: None, "is_initialized": lambda: True, "is_available": lambda: True,
            "device_count": lambda: len(self.cards), "current_device": lambda: self.current_card,
            "set_device": lambda device: self.set_card(device) and None, "_exchange_device": self.set_card,
            "_maybe_exchange_device": self.set_card, "device": self.on_device, "synchronize": self.synchronize,
            "current_stream": self.current_stream, "default_stream": lambda device=None: self.default_streams[self._or_current(device)],
            "Stream": lambda device=None, priority=0: Stream(self.engine, self._or_current(device)), "Event": Event,
            "stream": self.on_stream, "get_device_name": lambda device=None: self.name, "get_device_properties": self.properties,
            "_get_device_properties": self.properties, "get_device_capability": lambda device=None: (9, 0), "cudart": lambda: runtime,
            "check_error": _check, "mem_get_info": lambda device=None: _info(allocator(device)), "empty_cache": lambda: None,
            "memory_reserved": lambda device=None: allocator(device).rounded_bytes,
            "memory_allocated": lambda device=None: allocator(device).rounded_bytes,
            "max_memory_allocated": lambda device=None: allocator(device).peak_rounded_bytes,
            "reset_peak_memory_stats": lambda device=None: allocator(device).reset_peak(),
            "set_sync_debug_mode": self.set_sync_debug_mode,
            "is_bf16_supported": lambda *a, **k: True, "manual_seed": lambda seed: None, "manual_seed_all": lambda seed: None,
            "_is_in_bad_fork": lambda: False,
        }  # fmt: skip

    def _or_current(self, device: Any) -> torch.device:
        return self.device_of("cuda" if device is None else device)

    def __enter__(self) -> Self:
        around = self._around
        for name, value in self._said().items():
            around.enter_context(mock.patch.object(torch.cuda, name, value, create=True))
        for (where, name), value in _plainly(self).items():
            around.enter_context(mock.patch.object(where, name, value))
        around.enter_context(mock.patch.object(Event, "current", staticmethod(self.current_stream), create=True))
        around.enter_context(mock.patch.object(random_kernels, "launch", partial(random_numbers.launch, self)))
        around.enter_context(mock.patch.object(triton_use, "takes_triton", lambda x: False))
        around.enter_context(mock.patch.object(triton_use, "_compiles", lambda device: True))  # random numbers, by what stands above
        around.enter_context(mock.patch.object(detection, "host_threads", lambda processes: HOST_THREADS))
        ready = native.ready  # kernels in CUDA are for a card that there is
        around.enter_context(mock.patch.object(native, "ready", lambda device: device != "cuda" and ready(device)))
        around.enter_context(mock.patch.object(attention_flex, "launch", flex.as_written))
        # The tensors of a real card are of no class of their own.
        has_operators = plain.has_operators
        around.enter_context(mock.patch.object(plain, "has_operators", lambda kind: kind is not OnCard and has_operators(kind)))
        # To time copies of a quarter of a GiB takes a card milliseconds, and takes the host, which copies here, minutes.
        around.enter_context(mock.patch.multiple(device_profile, **SMALL_PROFILE))
        around.enter_context(mock.patch.multiple(attention_profile, **SMALL_ATTENTION))
        around.enter_context(mock.patch.object(stopwatch, "COLD_CARD_BYTES", COPIED_BYTES))
        around.enter_context(mock.patch.dict(COPIER._streams, clear=True))
        around.enter_context(mock.patch.dict(IN_USE._flights, clear=True))
        around.enter_context(mock.patch.object(pages, "_LEFT", deque()))
        around.enter_context(mock.patch.object(disk_tensors, "STAGING", disk_tensors.Staging()))  # what it has pinned goes with it
        self.set_card(self.first_card)
        around.callback(_factories(self)._destroy)
        return self

    def __exit__(self, *error: object) -> None:
        failed = error[0] is not None
        with contextlib.suppress(Exception) if failed else contextlib.nullcontext():
            self.engine.drain()
        _let_all_go()
        self.engine.drain()  # what was recorded for that
        give_back()
        assert failed or not pages._LEFT, "all has passed, so nothing is kept"
        self._around.close()


def _let_all_go() -> None:
    """Pages that outlive the machine are let go with it: afterwards there is no runtime to ask."""
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        about = finalizer.peek()
        if about is not None and about[1] is let_go:
            finalizer()


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"CUDA error {code} (pretended)")


def _info(allocator: Allocator) -> tuple[int, int]:
    return allocator.capacity_bytes - allocator.rounded_bytes, allocator.capacity_bytes


def _plainly(machine: Machine) -> dict[tuple[Any, str], Any]:
    """Functions of torch that look for a device in C++, before any operator is called: (where, name) -> what stands there meanwhile."""

    def of_data(real: Any) -> Any:
        def made(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
            if device is None or machine.device_of(device).type != "cuda":
                return real(*args, **kwargs) if device is None else real(*args, device=device, **kwargs)
            return real(*args, **kwargs).to(machine.device_of(device))

        return made

    def perhaps_pinned(real: Any) -> Any:
        def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
            out: Tensor = real(*args, **kwargs)
            return machine.pinned_empty(out) if pin_memory else out

        return made

    pin, is_pinned = Tensor.pin_memory, Tensor.is_pinned

    def pinned(x: Tensor, *args: Any) -> Tensor:
        if type(x) not in (Tensor, torch.nn.Parameter):
            return pin(x, *args)
        return x if machine.is_pinned(x) else machine.pinned_empty(x).copy_(x.detach())

    return {
        **{(torch, name): of_data(getattr(torch, name)) for name in ("tensor", "as_tensor", "asarray")},
        **{(torch, name): perhaps_pinned(getattr(torch, name)) for name in ("empty", "empty_like", "zeros", "empty_strided")},
        (Tensor, "pin_memory"): pinned,
        (Tensor, "is_pinned"): lambda x, *args: machine.is_pinned(x) if type(x) in (Tensor, torch.nn.Parameter) else is_pinned(x, *args),
        (Tensor, "record_stream"): OnCard.record_stream,
    }


def _factories(machine: Machine) -> Library:
    """Kernels of the card for what makes tensors; all else is asked of the tensors that there are."""

    def empty(size: Any, *, device: Any, memory_format: Any = None, **options: Any) -> Any:
        like = torch.empty(size, dtype=options.get("dtype"), device="meta", memory_format=memory_format or torch.contiguous_format)
        return empty_strided(size, like.stride(), device=device, dtype=like.dtype)

    def empty_strided(size: Any, stride: Any, *, device: Any, dtype: Any = None, **options: Any) -> Any:
        where = machine.device_of(device)
        return machine.room(size, stride, dtype or torch.get_default_dtype(), where, machine.current_stream(where))

    library = Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that kernels of a real card stand there already
        library.impl("empty.memory_format", empty, "CUDA")
        library.impl("empty_strided", empty_strided, "CUDA")
        for func in SIZED_BY_NUMBERS:
            library.impl(func.name().removeprefix("aten::"), partial(_made, machine, func), "CUDA")
    return library


def _made(machine: Machine, func: Any, *args: Any, **kwargs: Any) -> Any:
    return dispatch(machine, func, args, kwargs)


def on_card(machine: Machine, tree: Any) -> Any:
    """A tree with all its tensors on card 0."""
    return torch.utils._pytree.tree_map(lambda x: machine.to_card(x) if isinstance(x, Tensor) and not isinstance(x, OnCard) else x, tree)
