"""Kernels in C++ for operators that are defined in Python: there where they could be compiled, never needed.

Problem: some operators are several times slower in torch's own than they have to be, and a machine may have no compiler.
Idea: an operator has a schema, a Python reference and a fake kernel from the start; a library that is compiled at the first
use adds kernels to the same operators. Who runs one asks first, and else runs the reference.

    if native.ready():                                   # loads or compiles the library, once
        torch.ops.colofunc.random_fill_(out, ...)        # its kernel

First use is a call with real tensors: neither `import` nor tracing nor planning compiles, and a step without such an operator
never does. COLOFUNC_NATIVE says whether this is wanted: auto, off or require. With COLOFUNC_CACHE=off, where the library could
not be kept, auto does without, and require compiles it for this process alone.
"""

from __future__ import annotations

import ctypes
import sys
import tempfile
import warnings
from pathlib import Path
from threading import Lock

from colofunc import env
from colofunc.errors import NativeError
from colofunc.ops import native_build

# The library of this process. Its kernels are registered with torch for as long as the process lives.
_LIBRARY: list[ctypes.CDLL] = []
# (mode, folder) -> why the library could not be had: asked once.
_FAILED: dict[tuple[str, str], str] = {}
_LOCK = Lock()


def ready() -> bool:
    """Whether kernels of the CPU are there; the first call loads or compiles them.

    Raises NativeError where COLOFUNC_NATIVE=require and they are not.
    """
    mode = env.native_mode()
    if mode == "off":
        return False
    if _LIBRARY:
        return True
    wanted = mode, env.switch("COLOFUNC_CACHE")
    if wanted not in _FAILED:
        with _LOCK:
            _try(mode, wanted)
    if mode == "require" and not _LIBRARY:
        raise NativeError(f"COLOFUNC_NATIVE=require, and {_FAILED[wanted]}")
    return bool(_LIBRARY)


def limit_level(most: int) -> int:
    """Use an instruction set no better than this: 0 what the compiler takes for granted, 1 AVX2, 2 AVX-512, 3 with AVX512-BF16.

    Returns the one in use.
    """
    return int(_LIBRARY[0].colofunc_limit_level(most))


def prebuild() -> Path:
    """Compile the library into the cache folder, unless it is there. Raises NativeError where that cannot be done."""
    folder = env.native_folder()
    if folder is None:
        raise NativeError("COLOFUNC_CACHE=off keeps nothing, and compiled kernels neither. Try: name a folder in it")
    return native_build.build(folder)


def _try(mode: str, wanted: tuple[str, str]) -> None:
    """Load the library, or say once why it is not there."""
    if _LIBRARY or wanted in _FAILED:
        return
    folder = env.native_folder()
    if folder is None and mode == "auto":
        _FAILED[wanted] = "COLOFUNC_CACHE=off keeps no compiled kernels"
        return
    try:
        if folder is not None:
            _LIBRARY.append(_loaded(folder))
            return
        with tempfile.TemporaryDirectory(prefix="colofunc-native-") as passing:
            _LIBRARY.append(_loaded(Path(passing)))
    except NativeError as error:
        _FAILED[wanted] = str(error)
        if mode == "auto":
            warnings.warn(
                f"{error}. Random numbers, dropout and products with int8 and int4 weights on the CPU run in Python, some times slower, "
                "updates that read a narrow gradient by torch's kernels, and Lion's by several operators; COLOFUNC_NATIVE=off says that "
                "this is meant, COLOFUNC_NATIVE=require makes it an error",
                RuntimeWarning,
                stacklevel=2,
            )


def _loaded(folder: Path) -> ctypes.CDLL:
    """The library in `folder`. One that cannot be loaded, as after a full disk, is compiled anew, once."""
    path = folder / native_build.library_name()
    if not native_build.is_trusted(path):
        _say(f"compiling kernels for the CPU into {folder}, once (some seconds)")
    path = native_build.build(folder)
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        path.unlink(missing_ok=True)
    path = native_build.build(folder)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeError(f"the compiled kernels cannot be loaded: {error}. Try: another compiler in CXX") from error


def _say(text: str) -> None:
    if not env.switched_on("COLOFUNC_QUIET"):
        print(f"colofunc: {text}", file=sys.stderr, flush=True)
