"""Launch: run a function on several real ranks of this machine, from a test or a notebook.

Problem: `torchrun` starts scripts, not functions, and a test wants the function's results and errors back. Idea: one
fresh process per rank (spawned, never forked: a forked process inherits locked threads), joined by gloo over loopback,
or by NCCL where each has a GPU; each sends back its result or its error. The parent serves the store, so no port is
guessed, and ends every process before it returns.

    losses = launch(train, 2, config)              # [result of rank 0, result of rank 1]
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from colofunc.errors import CollectiveError, InputError, near
from colofunc.mesh.device import use_gpu
from colofunc.mesh.transport import make_group

START = "spawn"
"""How a rank's process starts. "forkserver" starts in a tenth of the time where a server has imported torch already,
but with the environment and the open files that the server had: what tests may take, and a user may not be surprised
by."""

_before_end: list[Callable[[], None]] = []


def before_end(work: Callable[[], None]) -> None:
    """Have `work` done when the function of a launched rank has returned.

    Its process ends without Python's own exit.
    """
    _before_end.append(work)


def launch(
    fn: Callable[..., Any],
    ranks: int,
    *args: Any,
    timeout_s: float = 300.0,
    threads: int = 1,
    device: str | None = None,
) -> list[Any]:
    """`[fn(*args) on rank 0, on rank 1, ...]`, each in a process of its own that is one of `ranks` ranks.

    device: "cuda": each rank has a GPU of its own and NCCL; "cpu": gloo; None: "cuda" where there is a GPU for each. A
    mesh on the CPU (`cf.Mesh(dp=2, device="cpu")`) runs in either case. fn, args and results must pickle (functions of
    a notebook or a closure: with cloudpickle installed). Raises the error of the rank that failed first with its
    traceback as a note, CollectiveError after `timeout_s`; all processes have ended then. In a script, call it under
    `if __name__ == "__main__":`.
    """
    if ranks < 1:
        raise InputError(f"launch: {ranks} ranks; give at least 1")
    on_gpus = _on_gpus(ranks, device)
    payload = _pack(fn, args)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context: Any = multiprocessing.get_context(START)
    workers, pipes = [], []
    try:
        for rank in range(ranks):
            mine, theirs = context.Pipe(duplex=False)
            # No daemon: those may not have children, and loaders have workers.
            options = (rank, ranks, store.port, timeout_s, threads, on_gpus, payload, theirs)
            worker = context.Process(target=_worker, args=options, name=f"colofunc rank {rank}")
            worker.start()
            theirs.close()
            workers.append(worker)
            pipes.append(mine)
        return _collect(workers, pipes, time.monotonic() + timeout_s, timeout_s)
    finally:
        for worker in workers:
            _end(worker)
        for pipe in pipes:
            pipe.close()


def _on_gpus(ranks: int, device: str | None) -> bool:
    """Whether each rank gets a GPU of its own. Counting them makes no context in this process."""
    if device not in (None, "cpu", "cuda"):
        raise InputError(f"launch: device={device!r}{near(device, ('cpu', 'cuda'), 'devices')}")
    there = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    if device == "cuda" and there < ranks:
        raise InputError(
            f'launch: {ranks} ranks want a GPU each, and there are {there}. Try: {there} ranks, or device="cpu"'
        )
    return there >= ranks


def _collect(workers: list[Any], pipes: list[Any], deadline: float, timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        left: list[Any] = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready: list[Any] = multiprocessing.connection.wait(left, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            late = sorted(set(range(len(pipes))) - set(results))
            raise CollectiveError(f"launch: ranks {late} had not ended after {timeout_s:g} s; they have been stopped")
        died = []
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                ok, content = pickle.loads(pipe.recv_bytes())
            except EOFError:
                died.append(rank)
                continue
            if not ok:
                _raise(rank, *content)
            results[rank] = content
        if died:
            _report_deaths(workers, pipes, died)
    return [results[rank] for rank in range(len(pipes))]


def _report_deaths(workers: list[Any], pipes: list[Any], died: list[int]) -> None:
    """A rank that ended without a word may have been ended by the watch: the rank at fault speaks within a moment."""
    others: list[Any] = [pipe for rank, pipe in enumerate(pipes) if rank not in died]
    speaking: list[Any] = multiprocessing.connection.wait(others, timeout=3.0) if others else []
    for pipe in speaking:
        with contextlib.suppress(EOFError):
            ok, content = pickle.loads(pipe.recv_bytes())
            if not ok:
                _raise(pipes.index(pipe), *content)
    workers[died[0]].join(5)
    raise CollectiveError(f"launch: rank {died[0]} ended with exit code {workers[died[0]].exitcode} and no result")


def _raise(rank: int, error: BaseException | None, text: str) -> None:
    note = f"on rank {rank}:\n{text}"
    if error is None:
        raise CollectiveError(f"launch: rank {rank} failed") from RuntimeError(note)
    error.add_note(note)
    raise error


def _end(worker: Any) -> None:
    worker.join(0.2)
    for stop in (worker.terminate, worker.kill):
        if worker.is_alive():
            stop()
            worker.join(3)


def _pack(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    if importlib.util.find_spec("cloudpickle") is not None:
        # An optional package: it carries closures and functions of a notebook.
        return importlib.import_module("cloudpickle").dumps((fn, args))
    try:
        return pickle.dumps((fn, args))
    except Exception as error:
        raise InputError(
            f"launch: {fn!r} or its arguments cannot be pickled ({error}); define the function at the top of a module, "
            "or install cloudpickle"
        ) from error


def _worker(
    rank: int, size: int, port: int, timeout_s: float, threads: int, on_gpus: bool, payload: bytes, pipe: Any
) -> None:
    """What the process of one rank does."""
    faulthandler.enable()
    torch.set_num_threads(threads)
    try:
        fn, args = pickle.loads(payload)
        store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        gpu = rank if on_gpus else None
        if gpu is not None:
            use_gpu(gpu)
        make_group(gpu, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s))
        message = pickle.dumps((True, fn(*args)))
        for work in _before_end:
            work()
    except BaseException as error:
        message = _failure(error)
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(OSError):
        pipe.send_bytes(message)
        pipe.close()
    # No orderly shutdown: destructors of process groups may wait for a peer that is gone.
    os._exit(0)


def _failure(error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(error))
    try:
        message = pickle.dumps((False, (error, text)))
        pickle.loads(message)  # errors with required arguments pickle and do not unpickle
        return message
    except Exception:
        return pickle.dumps((False, (None, text)))
