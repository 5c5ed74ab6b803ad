"""Compiles the kernels in `ext/cuda/` to one library, once for all processes of a machine.

Problem: a library that is built at install needs a compiler and the right torch there, and several processes that build at
once, a build that is killed, or a cache that cannot be written must not stop a step. Idea: plain compiler commands into a
folder of the cache. The name of a library is a hash of all that it is made of; whoever holds the lock builds beside it and
renames, so that the others find a whole file, and a lock whose holder died is free again.

    path = build(folder)               # ~/.cache/colofunc/native/cpu-5f0c....so, at once where it is there
    library = ctypes.CDLL(path)        # torch has to be imported first

Only the stable ABI of torch 2.10 is used: one library serves every later torch and every Python. No Python.h, no pybind.
Source: https://docs.pytorch.org/docs/stable/notes/libtorch_stable_abi.html
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from colofunc import env
from colofunc.errors import NativeError

PACKAGE = Path(__file__).resolve().parents[1]
# In a wheel, and in the tree.
SOURCES = (PACKAGE / "native_sources", PACKAGE.parent / "ext" / "cuda")
FLAGS = (
    "-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-fvisibility=hidden", "-w",
    "-DTORCH_TARGET_VERSION=0x020a000000000000ULL",
)  # fmt: skip
BUILD_S = 300.0  # a compiler that takes longer is ended
WAIT_S = 2 * BUILD_S  # for another process that builds
LOCK_POLL_S = 0.05
KEPT = 4  # libraries of other sources that stay in the folder, the latest


def source_folder() -> Path:
    """Where the sources lie. Raises NativeError where they were not installed."""
    for folder in SOURCES:
        if (folder / "common.h").is_file():
            return folder
    raise NativeError(f"the sources of the kernels are neither in {SOURCES[0]} nor in {SOURCES[1]}. Try: install colofunc again")


def source_files() -> list[Path]:
    """Headers and sources of the library of the CPU, in a fixed order."""
    folder = source_folder()
    return sorted([*folder.glob("*.h"), *(folder / "cpu").glob("*.cpp")])


def library_name() -> str:
    """Of what it is made of. Neither torch nor the compiler is in it: any of them makes a library that serves."""
    content = hashlib.sha256(repr((FLAGS, platform.machine(), platform.libc_ver())).encode())
    for path in source_files():
        content.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return f"cpu-{content.hexdigest()[:40]}.so"


def compiler() -> str:
    """The command of a C++ compiler. Raises NativeError where there is none."""
    for command in env.compilers():
        found = shutil.which(command)
        if found is not None:
            return found
    raise NativeError(f"there is no C++ compiler ({', '.join(env.compilers())}). Try: apt-get install g++, or name one in CXX")


def command(compiler_path: str, target: Path) -> list[str]:
    """The one command that compiles and links the library."""
    root = Path(torch.__file__).parent
    sources = [str(path) for path in source_files() if path.suffix == ".cpp"]
    return [
        compiler_path, *FLAGS, "-isystem", str(root / "include"), *sources, "-shared", "-o", str(target), "-L", str(root / "lib"),
        "-ltorch_cpu",
    ]  # fmt: skip


def is_trusted(path: Path) -> bool:
    """Whether this is a regular file that nobody but this user or root could have written: it is going to be run."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_uid in (os.getuid(), 0) and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def build(folder: Path) -> Path:
    """The library in `folder`, compiled unless it is there. Raises NativeError where that cannot be done."""
    try:
        path = folder / library_name()
        if is_trusted(path):
            return path
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(folder / "lock"):
            if not is_trusted(path):
                _compile(folder, path)
        return path
    except OSError as error:
        raise NativeError(f"kernels cannot be kept in {folder}: {error}. Try: name another folder in COLOFUNC_CACHE") from error


def _compile(folder: Path, path: Path) -> None:
    """Build beside `path`, then rename. The lock is held, so that folders of other builds are those of killed ones."""
    for left in folder.glob("build-*"):
        shutil.rmtree(left, ignore_errors=True)
    compiler_path = compiler()
    with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as beside:
        target = Path(beside, path.name)
        _run(command(compiler_path, target), folder / "build.log")
        target.chmod(0o700)
        os.replace(target, path)
    libraries = sorted(folder.glob("cpu-*.so"), key=lambda found: found.stat().st_mtime, reverse=True)
    for old in libraries[KEPT:]:
        old.unlink(missing_ok=True)


def _run(arguments: list[str], log: Path) -> None:
    """Run a compiler with all that it says in `log`. Raises NativeError where it fails."""
    with open(log, "w") as file:
        file.write(" ".join(arguments) + "\n")
        file.flush()
        try:
            status = subprocess.run(arguments, stdin=subprocess.DEVNULL, stdout=file, stderr=file, timeout=BUILD_S).returncode
        except subprocess.TimeoutExpired:
            status = None
    if status is None:
        raise NativeError(f"{arguments[0]} took more than {BUILD_S:.0f} s to compile the kernels. Try: another compiler in CXX")
    if status != 0:
        raise NativeError(f"{arguments[0]} could not compile the kernels; what it said is in {log}. Try: another compiler in CXX")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that the system frees if this process dies. Raises NativeError where another holds it for too long."""
    with open(path, "w") as file:
        until = time.monotonic() + WAIT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > until:
                    raise NativeError(f"another process has held {path} for {WAIT_S:.0f} s. Try: end it, or COLOFUNC_NATIVE=off") from error
                time.sleep(LOCK_POLL_S)
        yield
