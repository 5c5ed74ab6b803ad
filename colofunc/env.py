"""The environment: the only module that reads variables set by launchers, debugging switches and memory limits.

Problem: an environment variable is an interface nobody can see. Idea: everything read from outside the program is
named here, in one table, and the rest of the code asks functions.

>>> switch("COLOFUNC_QUIET")        # not set
''

Variables set by `torchrun` (https://docs.pytorch.org/docs/stable/elastic/run.html): RANK, WORLD_SIZE, LOCAL_RANK,
LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, TORCHELASTIC_USE_AGENT_STORE, TORCHELASTIC_RESTART_COUNT. Memory limits:
cgroup v2 `memory.max`, cgroup v1 `memory.limit_in_bytes`, `/proc/meminfo` (Linux kernel documentation,
admin-guide/cgroup-v2).
"""

from __future__ import annotations

import os
import platform
import sys
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import attrs

from colofunc.errors import SwitchError, near

SWITCHES: dict[str, str] = {
    "COLOFUNC_CACHE": "folder of cached plans (default: ~/.cache/colofunc); 'off' keeps no plans on disk",
    "COLOFUNC_CACHE_MIB": "most MiB of cached plans (default: 512); the ones that were not used for longest go first",
    "COLOFUNC_MEASURE": "'off': on real ranks a mesh without a topology is planned for 'gloo-cpu' and not for the measured machine; 'on': "
    "ranks on GPUs, which are planned for by what a GPU says of itself, are measured too",
    "COLOFUNC_NATIVE": "kernels in C++ and CUDA: 'auto' (default) compiles them at their first use, keeps them in the cache folder, and "
    "does without where that fails; 'off' never uses them; 'require' makes it an error that they cannot be used",
    "COLOFUNC_PASSES": "passes that are left out, by name, as '-pack,-in_place' (`low.passes` lists them): to find the one at fault",
    "COLOFUNC_PROGRESS": "a line that says how far a plan is that takes longer than 2 s; by default where stderr is a terminal; "
    "1: also elsewhere; 0: never",
    "COLOFUNC_QUIET": "1: no live progress lines",
}


CACHE_MIB = 512
NATIVE_MODES = ("auto", "off", "require")


@attrs.frozen
class Launch:
    """What a launcher says about this process."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    serves_store: bool = False  # the launcher itself serves the store at the master's address, as torchrun does
    restarts: int = 0  # times that the launcher has started all processes again


def launched() -> Launch | None:
    """This process's place under `torchrun` (or any launcher that sets RANK and WORLD_SIZE); None elsewhere.

    Raises SwitchError where there is no such place: the others would wait for this process for ever.
    """
    if not os.environ.get("RANK") or not os.environ.get("WORLD_SIZE"):
        return None
    rank, world_size = _integer("RANK") or 0, _integer("WORLD_SIZE") or 0
    if not 0 <= rank < world_size:
        raise SwitchError(
            f"RANK={rank} is no rank of WORLD_SIZE={world_size}; ranks count from 0, so the last is {world_size - 1}"
        )
    return Launch(
        rank=rank,
        world_size=world_size,
        local_rank=_integer("LOCAL_RANK") or 0,
        local_world_size=_integer("LOCAL_WORLD_SIZE") or 1,
        master_addr=os.environ.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_integer("MASTER_PORT") or 29500,
        serves_store=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        restarts=_integer("TORCHELASTIC_RESTART_COUNT") or 0,
    )


def switch(name: str) -> str:
    """The value of a documented debugging switch, '' when it is not set."""
    if name not in SWITCHES:
        raise SwitchError(f"{name!r} is no documented switch{near(name, SWITCHES)}")
    _say_misspelt()
    return os.environ.get(name, "")


@cache
def _say_misspelt() -> None:
    """Once: variables that look like switches and are none, so that they do nothing."""
    for name in sorted(os.environ):
        if name.startswith("COLOFUNC_") and name not in SWITCHES:
            warnings.warn(f"the environment variable {name} is none of colofunc's{near(name, SWITCHES)}", stacklevel=3)


def switched_on(name: str) -> bool:
    """Whether a documented debugging switch is set to something other than '', '0', 'off', 'false' or 'no'."""
    return switch(name).lower() not in ("", "0", "off", "false", "no")


def say(text: str) -> None:
    """One line to the person who waits."""
    if not switched_on("COLOFUNC_QUIET"):
        # A line about progress may stand there, which is written anew below this one: so in one piece.
        erased = ERASED if is_terminal(sys.stderr) else ""
        print(f"{erased}colofunc: {text}\n", end="", file=sys.stderr, flush=True)


ERASED = "\r\x1b[K"
"""To the begin of the line, and what stands there is erased (ECMA-48: carriage return, EL)."""


def is_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal; one that was closed is none, nor is what others put in the place of stderr."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False


def shows_progress(terminal: bool) -> bool:
    """Whether a line says how far a plan is. terminal: whether it would be written to one."""
    if switched_on("COLOFUNC_QUIET"):
        return False
    return switched_on("COLOFUNC_PROGRESS") if switch("COLOFUNC_PROGRESS") else terminal


def measures() -> bool:
    """Whether a machine that nobody described is measured."""
    return switch("COLOFUNC_MEASURE").lower() not in ("off", "0", "no", "false")


def measures_gpus() -> bool:
    """Whether GPUs that nobody described are measured, too: they say what they are."""
    return switched_on("COLOFUNC_MEASURE")


def cores() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine_key() -> str:
    """What tells this machine from others: its name, and how many processors this process may use."""
    return f"{platform.node()} {platform.machine()} {cores()}"


def passes_left_out() -> tuple[str, ...]:
    """The names in COLOFUNC_PASSES. Raises SwitchError where one has no "-" in front."""
    names = [name.strip() for name in switch("COLOFUNC_PASSES").split(",") if name.strip()]
    for name in names:
        if not name.startswith("-"):
            raise SwitchError(
                f"COLOFUNC_PASSES={name!r:.80} leaves nothing out; write COLOFUNC_PASSES=-{name}, several with commas"
            )
    return tuple(name.removeprefix("-") for name in names)


def plan_folder() -> Path | None:
    """Where plans are kept: COLOFUNC_CACHE, else `colofunc` in the user's cache folder; None where it is "off"."""
    asked = switch("COLOFUNC_CACHE")
    if asked.lower() in ("off", "0", "no", "false"):
        return None
    return Path(asked or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "colofunc")).expanduser()


def native_mode() -> str:
    """Whether kernels in C++ and CUDA are used: one of `NATIVE_MODES`.

    Raises SwitchError where the variable is none of them.
    """
    return _native_mode(switch("COLOFUNC_NATIVE"))


@cache
def _native_mode(text: str) -> str:
    asked = text.lower() or "auto"
    if asked not in NATIVE_MODES:
        raise SwitchError(
            f"COLOFUNC_NATIVE={asked!r:.80} is none of {', '.join(NATIVE_MODES)}; write COLOFUNC_NATIVE=auto"
        )
    return asked


def native_folder() -> Path | None:
    """Where compiled kernels are kept: beside cached plans; None where nothing is kept."""
    plans = plan_folder()
    return None if plans is None else plans / "native"


def compilers() -> tuple[str, ...]:
    """Commands that may be a C++ compiler, the wanted one first: CXX, as make and CMake have it."""
    asked = os.environ.get("CXX", "").strip()
    return (asked,) if asked else ("c++", "g++", "clang++")


def cuda_compilers() -> tuple[str, ...]:
    """Commands that may be a CUDA compiler: of the toolkit in CUDA_HOME, else the one on the path, else of the usual
    folder.
    """
    asked = os.environ.get("CUDA_HOME", "").strip()
    return (str(Path(asked, "bin", "nvcc")),) if asked else ("nvcc", "/usr/local/cuda/bin/nvcc")


def cache_bytes() -> int:
    """The most that the cache folder may hold. Raises SwitchError where the variable is no number."""
    asked = switch("COLOFUNC_CACHE_MIB") or str(CACHE_MIB)
    if not asked.isdecimal() or len(asked) > 12:
        raise SwitchError(f"COLOFUNC_CACHE_MIB={asked!r:.80} is no number of MiB; write COLOFUNC_CACHE_MIB=512")
    return int(asked) << 20


def memory_limit_bytes() -> int | None:
    """The most memory this process may use: the least of its cgroup limits and the machine's memory."""
    limits = [_number(folder / name) for folder in _cgroups() for name in ("memory.max", "memory.limit_in_bytes")]
    limits.append(_machine_bytes())
    known = [limit for limit in limits if limit is not None and limit > 0]
    return min(known, default=None)


def _integer(name: str) -> int | None:
    """A launcher's number; None where it says none.

    Raises SwitchError where it is no number: this process would run alone.
    """
    text = os.environ.get(name, "").strip()
    if text and not text.removeprefix("-").isdecimal():
        raise SwitchError(
            f"{name}={text!r:.80} is no whole number, as a launcher such as torchrun sets it. Try: unset {name}"
        )
    return int(text) if text else None


def _cgroups() -> Iterator[Path]:
    """Memory cgroups of this process, innermost first."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = Path("/sys/fs/cgroup/memory" if controllers else "/sys/fs/cgroup")
        inner = root / path.lstrip("/")
        while inner != root and root in inner.parents:
            yield inner
            inner = inner.parent
        yield root


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # cgroup v2 writes "max" for no limit


def _machine_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return None
