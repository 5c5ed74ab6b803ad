"""The library for GPUs, compiled by nvcc for A100s and H100s, linked and loaded: `make cuda`. No GPU is needed.

A torch without CUDA ships the headers, but not `libtorch_cuda.so`: there a stand-in with the one function that the
kernels take from it is linked and loaded in its place. Loading registers the kernels with torch, and each that
`register.cpp` names has to be there.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from colofunc.errors import NativeError
from colofunc.ops import native, native_build

NOT_RUN = 77  # exit status: not tried here, for a reason that was said
LIBRARY = native_build.NativeLibrary("cuda", native.PREBUILT)
STAND_IN = 'extern "C" int aoti_torch_get_current_cuda_stream(int, void**) { return 1; }\n'
# In a process of its own: a library stays registered for as long as its process lives.
LOAD = """
import ctypes, sys, torch
import colofunc.ops.experts, colofunc.ops.quantized, colofunc.ops.update, colofunc.ops.update_lamb, colofunc.ops.update_lion
path, stand_in, *names = sys.argv[1:]
if stand_in:
    ctypes.CDLL(stand_in, ctypes.RTLD_GLOBAL)
ctypes.CDLL(path)
print(*(name for name in names if not torch._C._dispatch_has_kernel_for_dispatch_key("colofunc::" + name, "CUDA")))
"""


def stand_in(folder: Path) -> Path:
    """A `libtorch_cuda.so`, for a torch that has none. The linker finds it there."""
    source, path = folder / "stand_in.cpp", folder / "libtorch_cuda.so"
    source.write_text(STAND_IN)
    linked = ["-shared", "-fPIC", "-Wl,-soname,libtorch_cuda.so", "-o", str(path)]
    subprocess.run([native_build.compiler(), str(source), *linked], check=True)
    os.environ["LIBRARY_PATH"] = f"{folder}:{os.environ.get('LIBRARY_PATH', '')}"
    return path


def names_of_kernels() -> list[str]:
    return re.findall(r'm\.impl\("(\w+)"', (native_build.source_folder() / "cuda" / "register.cpp").read_text())


def main() -> int:
    try:
        native_build.compiler(LIBRARY)
        native_build.compiler()  # of the stand-in, and nvcc takes one for what runs on the host
    except NativeError as error:
        print(f"NOT RUN: compiling the kernels for GPUs: {error}")
        return NOT_RUN
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start = time.monotonic()
        try:
            instead = "" if torch.version.cuda else str(stand_in(folder))
            path = native_build.build(folder, LIBRARY)
        except (NativeError, subprocess.CalledProcessError) as error:
            log = folder / "build.log"
            print(f"make cuda: {error}\n{log.read_text()[-5000:] if log.exists() else ''}", file=sys.stderr)
            return 1
        names = names_of_kernels()
        done = subprocess.run([sys.executable, "-c", LOAD, str(path), instead, *names], capture_output=True, text=True)
        took = time.monotonic() - start
    missing = done.stdout.split()
    if done.returncode != 0 or missing or not names:
        print(f"make cuda: kernels that are not there: {missing or names}\n{done.stderr}", file=sys.stderr)
        return 1
    where = "a stand-in for torch's library for GPUs" if instead else f"torch {torch.__version__}"
    print(
        f"kernels for sm_{', sm_'.join(LIBRARY.architectures)} compiled, linked and loaded with {where}: {len(names)} "
        f"in {took:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
