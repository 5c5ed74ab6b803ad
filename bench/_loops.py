"""Loops in C++ beside which figures stand, compiled here for this processor."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from pathlib import Path

from colofunc.ops import native_build

FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")


def compiled(name: str) -> ctypes.CDLL:
    """The functions of a source in this folder."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "loops.so")
        subprocess.run([native_build.compiler(), *FLAGS, str(Path(__file__).with_name(name)), "-o", str(path)], check=True)
        return ctypes.CDLL(str(path))
