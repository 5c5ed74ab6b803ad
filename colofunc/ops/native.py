"""Kernels in C++ and CUDA for operators that are defined in Python: there where they could be compiled, never needed.

Problem: some operators are several times slower in torch's own than they have to be, and a machine may have no
compiler. Idea: an operator has a schema, a Python reference and a fake kernel from the start; a library for the CPU and
one for GPUs, each compiled at the first use on such a device, add kernels to the same operators. Who runs one asks
first, and else runs the reference.

    if native.ready("cpu"):                              # loads or compiles the library, once
        torch.ops.colofunc.random_fill_(out, ...)        # its kernel

A wheel may bring libraries along (`make wheel NATIVE=cpu`); one that was made of other sources than lie beside it is
not looked at. First use is a call with real tensors: neither `import` nor tracing nor planning compiles, and a step
without such an operator never does; where there is no GPU nothing is compiled for one. COLOFUNC_NATIVE says whether
this is wanted: auto, off or require. With COLOFUNC_CACHE=off, where a library could not be kept, auto does without, and
require compiles it for this process alone.
"""

from __future__ import annotations

import ctypes
import tempfile
import warnings
from pathlib import Path
from threading import Lock

from colofunc import env
from colofunc.errors import NativeError
from colofunc.ops import native_build

# Device -> the library of this process. Its kernels are registered with torch for as long as the process lives.
_LIBRARIES: dict[str, ctypes.CDLL] = {}
# (device, mode, folder) -> why its library could not be had: asked once.
_FAILED: dict[tuple[str, str, str], str] = {}
_LOCK = Lock()
PYTHON = Path(native_build.__file__)

WITHOUT = {
    "cpu": "Random numbers, dropout and products with int8 and int4 weights on the CPU run in Python, some times slower, "
    "updates that read a narrow gradient by torch's kernels, Lion's by several operators, and those that round by draws "
    "or keep moments in 8 bits by many",
    "cuda": "Products of few rows with int8 and int4 weights on GPUs widen the weight, updates cast a narrow gradient, and Lion's and sums "
    "over experts take several operators",
}
"""What a process does that has no library."""


def ready(device: str) -> bool:
    """Whether kernels for a kind of device are there, "cpu" or "cuda"; the first call loads or compiles them.

    Raises NativeError where COLOFUNC_NATIVE=require and they are not, though there is such a device.
    """
    mode = env.native_mode()
    if mode == "off" or device not in WITHOUT:
        return False
    if device in _LIBRARIES:
        return True
    wanted = device, mode, env.switch("COLOFUNC_CACHE")
    if wanted not in _FAILED:
        if device == "cuda" and not native_build.architectures():
            return False
        with _LOCK:
            _try(wanted)
    if mode == "require" and device not in _LIBRARIES:
        raise NativeError(f"COLOFUNC_NATIVE=require, and {_FAILED[wanted]}")
    return device in _LIBRARIES


def limit_level(most: int) -> int:
    """Use an instruction set no better than this: 0 what the compiler takes for granted, 1 AVX2, 2 AVX-512, 3 with
    AVX512-BF16.

    Returns the one in use.
    """
    return int(_LIBRARIES["cpu"].colofunc_limit_level(most))


def prebuild(device: str) -> list[Path]:
    """Compile libraries into the cache folder, unless they are there. Raises NativeError where that cannot be done.

    For GPUs: the one for those that are here; where there are none, one each for `PREBUILT`.
    """
    folder = env.native_folder()
    if folder is None:
        raise NativeError("COLOFUNC_CACHE=off keeps nothing, and compiled kernels neither. Try: name a folder in it")
    if device == "cpu":
        return [native_build.build(folder)]
    if device != "cuda":
        raise NativeError(
            f"there are kernels for cpu and cuda, not for {device!r:.80}. Try: python -m colofunc native cpu"
        )
    here = native_build.architectures()
    libraries = [here] if here else [(architecture,) for architecture in PREBUILT]
    return [native_build.build(folder, native_build.cuda(architectures)) for architectures in libraries]


def ship(device: str, folder: Path) -> list[Path]:
    """Put the libraries for a kind of device into a folder that a wheel takes along, for GPUs one each for `PREBUILT`.

    Raises NativeError where they cannot be compiled.
    """
    if device not in WITHOUT:
        raise NativeError(f"there are kernels for cpu and cuda, not for {device!r:.80}. Try: make wheel NATIVE=cpu")
    libraries = [native_build.CPU] if device == "cpu" else [native_build.cuda((one,)) for one in PREBUILT]
    with tempfile.TemporaryDirectory(prefix="colofunc-native-") as passing:
        cache = env.native_folder() or Path(passing)
        return [native_build.ship(folder, library, cache) for library in libraries]


PREBUILT = ("80", "90")
"""Compute capabilities of GPUs that libraries are compiled for where nobody knows which there will be: A100, H100."""


def _try(wanted: tuple[str, str, str]) -> None:
    """Load a library, or say once why it is not there."""
    device, mode, _ = wanted
    if device in _LIBRARIES or wanted in _FAILED:
        return
    folder = env.native_folder()
    try:
        library = native_build.CPU if device == "cpu" else native_build.cuda(native_build.architectures())
        loaded = _shipped(library)
        if loaded is not None:
            _LIBRARIES[device] = loaded
            return
        if folder is None and mode == "auto":
            _FAILED[wanted] = "COLOFUNC_CACHE=off keeps no compiled kernels"
            return
        if folder is not None:
            _LIBRARIES[device] = _loaded(folder, library)
            return
        with tempfile.TemporaryDirectory(prefix="colofunc-native-") as passing:
            _LIBRARIES[device] = _loaded(Path(passing), library)
    except NativeError as error:
        _FAILED[wanted] = str(error)
        if mode == "auto":
            warnings.warn(
                f"{error}. {WITHOUT[device]}; COLOFUNC_NATIVE=off says that this is meant, COLOFUNC_NATIVE=require "
                "makes it an error",
                RuntimeWarning,
                stacklevel=2,
            )


def _shipped(library: native_build.NativeLibrary) -> ctypes.CDLL | None:
    """The library that came in the wheel.

    None where there is none, others may write it, or it is for a later C library or torch.
    """
    path = native_build.shipped(library)
    if path is None:
        return None
    if not native_build.is_trusted(path, PYTHON):
        writable = f"{path} is a link, or more users may write it than may write {PYTHON}"
        env.say(f"the kernels that came with colofunc are passed over: {writable}")
        return None
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        env.say(f"the kernels that came with colofunc cannot be loaded here ({error}), so they are compiled")
        return None
    if library.kind == "cuda":
        # Loading has registered its kernels, so that no other library can take its place in this process.
        _check_device(loaded, f"a later driver, or another process after `rm {path}`, which compiles them")
    return loaded


def _loaded(folder: Path, library: native_build.NativeLibrary) -> ctypes.CDLL:
    """The library in `folder`. One that cannot be loaded, as after a full disk, is compiled anew, once."""
    path = folder / native_build.library_name(library)
    if not native_build.is_trusted(path):
        kind = "the CPU" if library.kind == "cpu" else "GPUs"
        env.say(f"compiling kernels for {kind} into {folder}, once (half a minute or more)")
    path = native_build.build(folder, library)
    tried = native_build.file_id(path)
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError:
        path = native_build.build(folder, library, failed=tried)
        try:
            loaded = ctypes.CDLL(str(path))
        except OSError as error:
            raise NativeError(f"the compiled kernels cannot be loaded: {error}. Try: {library.another}") from error
    if library.kind == "cuda":
        _check_device(loaded, "a CUDA toolkit as old as the driver, in CUDA_HOME")
    return loaded


def _check_device(loaded: ctypes.CDLL, remedy: str) -> None:
    """Raises NativeError where the GPU cannot run the kernels, as with a driver that is older than the compiler."""
    loaded.colofunc_device_lacks.restype = ctypes.c_char_p
    lacks = loaded.colofunc_device_lacks()
    if lacks is not None:
        said = lacks.decode()
        raise NativeError(f"this GPU cannot run the compiled kernels: {said}. Try: {remedy}")
