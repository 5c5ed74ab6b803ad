"""The tests of the kernels in C++ under the sanitizers of addresses and of undefined behaviour: `make sanitize`.

The library is compiled by a command that adds the sanitizers to the real compiler's, into a folder that goes with this
process: one that came in a wheel would be loaded before it, so none may lie in the tree, and one has to have been
compiled. What the address sanitizer needs stands before all else in the process that loads it, so the tests run in one
of their own. Memory that is never given back is not looked for: Python and torch keep some for good.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g -O1"
# Those with tests that ask for the compiled kernels.
TESTS = (
    "test_native.py", "test_native_linear.py", "test_update_narrow.py", "test_update_rounded.py", "test_update_packed.py",
    "test_lion_lamb.py", "test_squares.py",
)  # fmt: skip
RUNTIMES = ("libasan.so", "libubsan.so")
SHIPPED = ROOT / "ext" / "cuda" / "compiled"
NOT_RUN = 77  # exit status: not tried here, for a reason that was said


def where(runtime: str, compiler: str) -> str:
    """The path of a library that comes with the compiler; its name alone where it does not."""
    return subprocess.run(
        [compiler, f"-print-file-name={runtime}"], capture_output=True, text=True, check=True
    ).stdout.strip()


def lacking(command: str) -> str:
    """What the tests need and this machine has not; empty where nothing is lacking."""
    compiler = shutil.which(command)
    if compiler is None:
        return f"there is no {command}. Try: apt-get install g++, or name one in CXX"
    missing = [name for name in RUNTIMES if not Path(where(name, compiler)).is_file()]
    return f"{compiler} comes without {' and '.join(missing)}. Try: g++, with its libraries, in CXX" if missing else ""


def main() -> int:
    if SHIPPED.exists():
        print(
            f"make sanitize: the kernels in {SHIPPED} would be tested, without sanitizers. Try: rm -r {SHIPPED}",
            file=sys.stderr,
        )
        return 1
    compiler = os.environ.get("CXX") or "g++"
    lacks = lacking(compiler)
    if lacks:
        print(f"NOT RUN: the tests of the kernels under sanitizers: {lacks}")
        return NOT_RUN
    with tempfile.TemporaryDirectory() as folder:
        wrapped = Path(folder, "c++")
        wrapped.write_text(f'#!/bin/sh\nexec {compiler} "$@" {SANITIZERS}\n')
        wrapped.chmod(0o700)
        env = {
            **os.environ, "CXX": str(wrapped), "COLOFUNC_CACHE": folder, "COLOFUNC_NATIVE": "require",
            "LD_PRELOAD": " ".join(where(name, compiler) for name in RUNTIMES),
            "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1", "UBSAN_OPTIONS": "print_stacktrace=1", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        paths = [str(ROOT / "tests" / name) for name in TESTS]
        # The tests compile into a folder of their own.
        command = [sys.executable, "-m", "pytest", "-q", f"--basetemp={Path(folder, 'tests')}", *paths, *sys.argv[1:]]
        status = subprocess.run(command, cwd=ROOT, env=env).returncode
        compiled = list(Path(folder).rglob("cpu-*.so"))
    if status == 0 and not compiled:
        print("make sanitize: the tests passed, but no kernels were compiled with the sanitizers", file=sys.stderr)
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
