"""Compiles the kernels in `ext/cuda/` to a library for each kind of device, once for all processes of a machine.

Problem: a library that is built at install needs a compiler and the right torch there, and several processes that build
at once, a build that is killed, or a cache that cannot be written must not stop a step. Idea: plain compiler commands
into a folder of the cache. The name of a library is a hash of all that it is made of; whoever holds the lock builds
beside it and renames, so that the others find a whole file, and a lock whose holder died is free again.

    path = build(folder, CPU)                   # ~/.cache/colofunc/native/cpu-5f0c....so, at once where it is there
    path = build(folder, cuda(("90",)))         # .../cuda-90-71b2....so, for GPUs of compute capability 9.0, by nvcc
    library = ctypes.CDLL(path)                 # torch has to be imported first
    shipped(CPU)                                # one that came in the wheel, made of the very sources beside it; None without

Only the stable ABI of torch 2.10 is used: one library serves every later torch and every Python. No Python.h, no
pybind. Sources are compiled side by side; of the GPU's `register.cpp` alone knows torch. Source:
https://docs.pytorch.org/docs/stable/notes/libtorch_stable_abi.html
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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import attrs
import torch

from colofunc import env
from colofunc.errors import NativeError

PACKAGE = Path(__file__).resolve().parents[1]
# In a wheel, and in the tree.
SOURCES = (PACKAGE / "native_sources", PACKAGE.parent / "ext" / "cuda")
STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020a000000000000ULL"
FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-fvisibility=hidden", "-w", STABLE_ABI)
# No product is contracted with a sum: updates have the bits of the CPU's.
CUDA_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fmad=false",
    "-Xcompiler",
    "-fPIC,-fvisibility=hidden,-w",
    STABLE_ABI,
    "-DUSE_CUDA",
)
SHIPPED = "compiled"  # folder beside the sources, of libraries that came in a wheel
LEAST_ARCHITECTURE = 80  # tensor cores that multiply bfloat16
BUILD_S = 300.0  # a compiler that takes longer is ended
WAIT_S = 2 * BUILD_S  # for another process that builds
LOCK_POLL_S = 0.05
KEPT = 4  # libraries of other sources that stay in the folder, the latest


def source_folder() -> Path:
    """Where the sources lie. Raises NativeError where they were not installed."""
    for folder in SOURCES:
        if (folder / "common.h").is_file():
            return folder
    raise NativeError(
        f"the sources of the kernels are neither in {SOURCES[0]} nor in {SOURCES[1]}. Try: install colofunc again"
    )


@attrs.frozen
class NativeLibrary:
    """What is compiled: for a kind of device, and of GPUs for which architectures ("90": compute capability 9.0)."""

    kind: str
    architectures: tuple[str, ...] = ()

    @property
    def prefix(self) -> str:
        """How names of its files begin."""
        return f"{self.kind}-{'_'.join(self.architectures)}" if self.architectures else self.kind

    @property
    def another(self) -> str:
        """What to try where its compiler fails."""
        return "another compiler in CXX" if self.kind == "cpu" else "another CUDA toolkit in CUDA_HOME"

    @property
    def flags(self) -> tuple[str, ...]:
        """Of the compiler, for all its sources."""
        if self.kind == "cpu":
            return FLAGS
        return (*CUDA_FLAGS, *(f"-gencode=arch=compute_{number},code=sm_{number}" for number in self.architectures))


CPU = NativeLibrary("cpu")


def cuda(architectures: Sequence[str]) -> NativeLibrary:
    """The library for GPUs. Raises NativeError where the kernels are not for one of them, or torch is not."""
    if torch.version.cuda is None:
        raise NativeError(
            "this torch was built without CUDA, so that it registers no kernels for GPUs. Try: another build of torch"
        )
    for architecture in architectures:
        if int(architecture) < LEAST_ARCHITECTURE:
            raise NativeError(
                f"kernels for GPUs take compute capability {LEAST_ARCHITECTURE / 10:.1f} or later, not "
                f"{int(architecture) / 10:.1f}. Try: COLOFUNC_NATIVE=off, which says that this is meant"
            )
    return NativeLibrary("cuda", tuple(architectures))


def architectures() -> tuple[str, ...]:
    """Of all GPUs that this process may use; empty where there is none."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return ()
    found = {torch.cuda.get_device_capability(device) for device in range(torch.cuda.device_count())}
    return tuple(f"{major}{minor}" for major, minor in sorted(found))


def source_files(library: NativeLibrary = CPU) -> list[Path]:
    """Headers and sources of a library, in a fixed order."""
    folder = source_folder()
    own = [path for path in (folder / library.kind).iterdir() if path.suffix in (".h", ".cuh", ".cpp", ".cu")]
    return sorted([*folder.glob("*.h"), *own])


def library_name(library: NativeLibrary = CPU, libc: tuple[str, str] | None = None) -> str:
    """Of what it is made of. Neither torch nor the compiler is in it: any of them makes a library that serves."""
    made_for = platform.machine(), platform.libc_ver() if libc is None else libc
    content = hashlib.sha256(repr((library.flags, *made_for)).encode())
    for path in source_files(library):
        content.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return f"{library.prefix}-{content.hexdigest()[:40]}.so"


def compiler(library: NativeLibrary = CPU) -> str:
    """The command of a compiler. Raises NativeError where there is none."""
    commands = env.compilers() if library.kind == "cpu" else env.cuda_compilers()
    for command in commands:
        found = shutil.which(command)
        if found is not None:
            return found
    if library.kind == "cpu":
        raise NativeError(
            f"there is no C++ compiler ({', '.join(commands)}). Try: apt-get install g++, or name one in CXX"
        )
    raise NativeError(
        f"there is no CUDA compiler ({', '.join(commands)}). Try: install the CUDA toolkit, or name its folder in "
        "CUDA_HOME"
    )


def commands(library: NativeLibrary, compiler_path: str, target: Path) -> list[list[str]]:
    """The commands that compile and link a library: all but the last one may run side by side."""
    root = Path(torch.__file__).parent
    include, link = ("-isystem", str(root / "include")), ("-L", str(root / "lib"), "-ltorch_cpu")
    sources = [path for path in source_files(library) if path.suffix in (".cpp", ".cu")]
    objects = [target.with_name(f"{path.name}.o") for path in sources]
    compiled: list[list[str]] = []
    for path, made in zip(sources, objects, strict=True):
        headers = include if path.suffix == ".cpp" else ()
        compiled.append([compiler_path, *library.flags, *headers, "-c", str(path), "-o", str(made)])
    own, behind = ((), ()) if library.kind == "cpu" else (("-cudart", "static"), ("-ltorch_cuda",))
    return [*compiled, [compiler_path, "-shared", *own, "-o", str(target), *map(str, objects), *link, *behind]]


def is_trusted(path: Path, like: Path | None = None) -> bool:
    """Whether this is a regular file that nobody but this user or root could have written: it is going to be run.

    Nor but those who could have written `like`, a file that is being run anyway.
    """
    owners, writers = {os.getuid(), 0}, 0
    try:
        found = os.stat(path, follow_symlinks=False)
        if like is not None:
            known = os.stat(like)
            owners.add(known.st_uid)
            writers = known.st_mode & stat.S_IWOTH
            if known.st_gid == found.st_gid:
                writers |= known.st_mode & stat.S_IWGRP
    except OSError:
        return False
    others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISREG(found.st_mode) and found.st_uid in owners and not others & ~writers


FileId = tuple[int, int, int]  # device, inode, time of its last change


def file_id(path: Path) -> FileId | None:
    """Which file lies there now; None: there is none."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns


def build(folder: Path, library: NativeLibrary = CPU, failed: FileId | None = None) -> Path:
    """The library in `folder`, compiled unless it is there. Raises NativeError where that cannot be done.

    `failed`: the file that lay there and could not be loaded. It is compiled anew, unless another process has put
    another one there since.
    """
    try:
        path = folder / library_name(library)
        if failed is None and is_trusted(path):
            return path
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(folder / "lock"):
            if failed is not None and file_id(path) == failed:
                path.unlink()
            if not is_trusted(path):
                _compile(folder, path, library)
        return path
    except OSError as error:
        raise NativeError(
            f"kernels cannot be kept in {folder}: {error}. Try: name another folder in COLOFUNC_CACHE"
        ) from error


def ship(folder: Path, library: NativeLibrary, cache: Path) -> Path:
    """Put a library into the folder that a wheel takes along (`SHIPPED`), compiled in `cache` unless it is there.

    Raises NativeError where that cannot be done.
    """
    try:
        path = folder / _shipped_name(library)
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(build(cache, library), path)
        return path
    except OSError as error:
        raise NativeError(f"kernels cannot be put into {folder}: {error}. Try: another folder") from error


def shipped(library: NativeLibrary) -> Path | None:
    """The library that came with these sources, made of just them for this kind of processor; None where there is none.

    Whoever cannot load it, for an older C library or torch, compiles one. It need not be one that `is_trusted`.
    """
    path = source_folder() / SHIPPED / _shipped_name(library)
    return path if path.is_file() else None


def _shipped_name(library: NativeLibrary) -> str:
    """A wheel is built on one machine for others, whose C library may be a later one."""
    return library_name(library, libc=("", ""))


def _compile(folder: Path, path: Path, library: NativeLibrary) -> None:
    """Build beside `path`, then rename. The lock is held, so that folders of other builds are those of killed ones."""
    for left in folder.glob("build-*"):
        shutil.rmtree(left, ignore_errors=True)
    compiler_path = compiler(library)
    log = folder / "build.log"
    with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as beside:
        target = Path(beside, path.name)
        *first, last = commands(library, compiler_path, target)
        log.write_text("")
        with ThreadPoolExecutor(max(1, len(first))) as threads:
            list(threads.map(lambda arguments: _run(arguments, log, library), first))  # raises what one has raised
        _run(last, log, library)
        target.chmod(0o700)
        os.replace(target, path)
    others = sorted(folder.glob(f"{library.prefix}-*.so"), key=lambda found: found.stat().st_mtime, reverse=True)
    for old in others[KEPT:]:
        old.unlink(missing_ok=True)


def _run(arguments: list[str], log: Path, library: NativeLibrary) -> None:
    """Run a compiler with all that it says in `log`. Raises NativeError where it fails."""
    with open(log, "a") as file:
        file.write(" ".join(arguments) + "\n")
        file.flush()
        try:
            status = subprocess.run(
                arguments, stdin=subprocess.DEVNULL, stdout=file, stderr=file, timeout=BUILD_S
            ).returncode
        except subprocess.TimeoutExpired:
            status = None
    if status is None:
        raise NativeError(
            f"{arguments[0]} took more than {BUILD_S:.0f} s to compile the kernels. Try: {library.another}"
        )
    if status != 0:
        raise NativeError(
            f"{arguments[0]} could not compile the kernels; what it said is in {log}. Try: {library.another}"
        )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that the system frees if this process dies.

    Raises NativeError where another holds it for too long.
    """
    with open(path, "w") as file:
        until = time.monotonic() + WAIT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > until:
                    raise NativeError(
                        f"another process has held {path} for {WAIT_S:.0f} s. Try: end it, or COLOFUNC_NATIVE=off"
                    ) from error
                time.sleep(LOCK_POLL_S)
        yield
