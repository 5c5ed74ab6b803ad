"""NCCL between processes with pretended cards: takes tensors of a card only, and does its work on a stream of its own, late.

    def on_each_rank():
        with Machine(cards=2, card=dist.get_rank()) as machine, Nccl(machine):
            ...                              # dist.get_backend() == "nccl"

Problem: gloo waits on the host, and takes tensors from anywhere; what is wrong with NCCL alone does not show. Idea: a collective is a piece
of work on its group's stream, which waits for the stream that called; what it returns makes the current stream wait, not the host. When it
is at the head of its stream it begins, on gloo, between groups that nobody else uses: what the host sends meanwhile is not in its way.

A card works while its host waits for something else: a thread goes on with the work of a card whose host has not.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, Self
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from colofunc import compat
from pretended.machine import Machine
from pretended.streams import Elsewhere, Mark, Stream
from pretended.tensors import OnCard

MIXED = "cpu:gloo,cuda:nccl"
PUMP_S = 0.005
COLLECTIVES = {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2, "all_to_all_single": 2, "all_reduce": 1, "broadcast": 1}
"""Name -> how many of its first arguments are tensors."""


class Handle:
    """What a collective returns: its end is a mark of a stream. It keeps the tensors until somebody's stream waits for it."""

    def __init__(self, machine: Machine, device: torch.device, mark: Mark, kept: Sequence[Tensor]) -> None:
        self._machine, self._device, self._mark, self._kept = machine, device, mark, kept

    def wait(self, timeout: Any = None) -> bool:
        self._machine.current_stream(self._device).wait_mark(self._mark)
        self._kept = ()
        return True

    def is_completed(self) -> bool:
        return self._mark.passed


class Waited:
    """Works of gloo that a thread waits for: some of them say that they are completed only to whoever waits.

    Where a peer has gone they never are, as a kernel that waits for one.
    """

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works
        self._done = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError):  # of gloo, whose peer has gone
            for work in self._works:
                work.wait()
            self._done.set()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def wait(self) -> None:
        self._done.wait()


class Nccl:
    """`backend`: what the default group says of itself. `bound`: whether it was made for a device. `aborted`: groups that were ended."""

    def __init__(self, machine: Machine, backend: str = "nccl", bound: bool = False) -> None:
        self.machine = machine
        self.backend = backend
        self.bound = bound
        self.sent = 0  # collectives of tensors of a card
        self.aborted: list[Any] = []
        self._groups: dict[Any, tuple[Any, Stream]] = {}  # group -> what carries it, and its stream
        self._real = {name: getattr(dist, name) for name in (*COLLECTIVES, "new_group", "batch_isend_irecv", "isend", "irecv")}
        self._around = contextlib.ExitStack()
        self._over = threading.Event()

    def __enter__(self) -> Self:
        world = dist.group.WORLD
        card = torch.device("cuda", self.machine.current_card)
        self._add(world, list(range(dist.get_world_size())))
        said: dict[str, Any] = {name: self._collective(name, n) for name, n in COLLECTIVES.items()}
        said |= {"new_group": self._new_group, "batch_isend_irecv": self._batch, "get_backend": lambda group=None: self.backend}
        said["get_backend_config"] = lambda group=None: self.backend if ":" in self.backend else MIXED
        for name, value in said.items():
            self._around.enter_context(mock.patch.object(dist, name, value))
        self._around.enter_context(mock.patch.object(distributed_c10d, "new_group", self._new_group))  # for torch's own functions
        self._around.enter_context(mock.patch.object(compat, "bound_device", lambda group: card if self.bound else None))
        self._around.enter_context(mock.patch.object(compat, "abort", lambda group, device: self.aborted.append(group) or True))
        thread = threading.Thread(target=self._pump, daemon=True)
        thread.start()
        self._around.callback(thread.join)
        self._around.callback(self._over.set)
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self.machine.engine.drain()
        self._around.close()

    def _pump(self) -> None:
        engine = self.machine.engine
        while not self._over.wait(PUMP_S):
            with engine.lock:
                if any(stream.queue for stream in engine._streams):
                    engine.step()

    def _add(self, group: Any, ranks: list[int]) -> None:
        device = torch.device("cuda", self.machine.current_card)
        self._groups[group] = self._real["new_group"](ranks), Stream(self.machine.engine, device)

    def _new_group(self, ranks: list[int], **options: Any) -> Any:
        group = self._real["new_group"](ranks, **options)
        carrier = self._real["new_group"](ranks)
        if dist.get_rank() in ranks:
            device = torch.device("cuda", self.machine.current_card)
            self._groups[group] = carrier, Stream(self.machine.engine, device)
        return group

    def _refuse(self, x: Tensor, what: str) -> None:
        """As the process group would."""
        if not isinstance(x, OnCard) and "cpu" not in self.backend and self.backend != "undefined":
            raise RuntimeError(f"No backend type associated with device type cpu ({what})")
        if isinstance(x, OnCard) and x.device.index != dist.get_rank() % len(self.machine.cards):
            raise RuntimeError(f"{what} of a tensor on {x.device} by rank {dist.get_rank()}: Duplicate GPU detected")
        if isinstance(x, OnCard) and not x.is_contiguous():
            raise RuntimeError(f"{what}: Tensors must be contiguous")

    def _collective(self, name: str, tensors: int) -> Callable[..., Any]:
        real = self._real[name]

        def call(*args: Any, group: Any = None, async_op: bool = False, **options: Any) -> Any:
            for x in args[:tensors]:
                self._refuse(x, name)
            if not isinstance(args[0], OnCard):
                return real(*args, group=group, async_op=async_op, **options)
            carrier, stream = self._groups[group or dist.group.WORLD]
            # Work that is late keeps no tensor: whoever has none any more has given its memory back, as on a card.
            given = (*(x.cpu_view for x in args[:tensors]), *args[tensors:])
            handle = self._launch(stream, lambda: [real(*given, group=carrier, async_op=True, **options)], args[:tensors])
            return handle if async_op else handle.wait() and None

        return call

    def _batch(self, ops: Sequence[Any]) -> list[Any]:
        for op in ops:
            self._refuse(op.tensor, op.op.__name__)
        if not isinstance(ops[0].tensor, OnCard):
            return self._real["batch_isend_irecv"](ops)
        carrier, stream = self._groups[ops[0].group or dist.group.WORLD]
        calls = [(self._real[op.op.__name__], op.tensor.cpu_view, op.peer) for op in ops]
        begin = lambda: [run(view, peer, group=carrier) for run, view, peer in calls]  # noqa: E731
        return [self._launch(stream, begin, [op.tensor for op in ops])]

    def _launch(self, stream: Stream, begin: Callable[[], Sequence[Any]], tensors: Sequence[Tensor]) -> Handle:
        with self.machine.engine.lock:
            stream.wait_stream(self.machine.current_stream(stream.device))
            stream.push(Elsewhere(lambda: [Waited(begin())], lambda: None))
            self.sent += 1
            return Handle(self.machine, stream.device, stream.mark(), tensors)
