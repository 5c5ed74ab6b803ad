"""Compiling kernels in C++: what happens where that cannot be done, and that two processes do it once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_native import SEED, needs_compiler

from colofunc import env
from colofunc.errors import NativeError
from colofunc.ops import native, native_build
from colofunc.ops import random as R


def tried(**variables: str) -> "subprocess.CompletedProcess[str]":
    """A small dropout in a process of its own, with warnings on its standard error."""
    code = (
        "import torch; from colofunc.ops import native, random as R\n"
        "x = [float(R.dropout.kernel(torch.ones(64), torch.tensor(5), 3, 0.5).sum()) for _ in range(2)]\n"
        "print(native.ready('cpu'), *x)"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **variables})


def kept_sum() -> float:
    return float(R.dropout.kernel(torch.ones(64), SEED, 3, 0.5).sum())


@pytest.mark.parametrize("compiler", ["/nowhere/c++", "/bin/false"])
def test_without_a_compiler_the_reference_runs_and_one_warning_says_so(compiler: str, tmp_path: Path) -> None:
    done = tried(CXX=compiler, COLOFUNC_CACHE=str(tmp_path), COLOFUNC_QUIET="1")
    assert done.stdout.split() == ["False", str(kept_sum()), str(kept_sum())]
    assert done.stderr.count("RuntimeWarning") == 1 and "COLOFUNC_NATIVE=off says that this is meant" in done.stderr
    said = {"/nowhere/c++": "there is no C++ compiler (/nowhere/c++)", "/bin/false": "/bin/false could not compile the kernels"}
    assert said[compiler] in done.stderr
    assert not list(tmp_path.glob("native/build-*"))


def test_require_is_an_error_where_there_is_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(NativeError, match=r"there is no C\+\+ compiler \(/nowhere/c\+\+\). Try: apt-get install g\+\+, or name one in CXX"):
        native_build.build(tmp_path)
    done = tried(CXX="/nowhere/c++", COLOFUNC_CACHE=str(tmp_path), COLOFUNC_NATIVE="require")
    assert done.returncode == 1 and "COLOFUNC_NATIVE=require, and there is no C++ compiler" in done.stderr


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NativeError, match=r"kernels cannot be kept in .*Try: name another folder in COLOFUNC_CACHE"):
        native_build.build(tmp_path / "file" / "native")


def test_without_a_cache_nothing_is_compiled(tmp_path: Path) -> None:
    done = tried(COLOFUNC_CACHE="off", CXX="/bin/false")
    assert done.stdout.split()[0] == "False" and not done.stderr


def test_a_mode_that_there_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLOFUNC_NATIVE", "on")
    with pytest.raises(env.SwitchError, match="COLOFUNC_NATIVE='on' is none of auto, off, require; write COLOFUNC_NATIVE=auto"):
        native.ready("cpu")


@needs_compiler
def test_a_killed_build_and_a_library_of_others_are_built_over(
    kernels_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler is a script that copies the library which is there, as fast as none."""
    name = native_build.library_name()
    script = tmp_path / "c++"
    script.write_text(f'#!/bin/sh\nwhile [ "$1" != "-o" ]; do shift; done\ncp "{kernels_folder / "native" / name}" "$2"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    cache = tmp_path / "cache" / "native"
    (cache / "build-killed").mkdir(parents=True)
    (cache / name).write_text("of others")
    (cache / name).chmod(0o777)
    assert native_build.build(cache).read_bytes() == (kernels_folder / "native" / name).read_bytes()
    assert not (cache / "build-killed").exists()
    (cache / name).write_text("half a file")
    children = [subprocess.Popen(
        [sys.executable, "-c", "from colofunc.ops import native; print(native.ready('cpu'))"], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "COLOFUNC_CACHE": str(cache.parent), "COLOFUNC_NATIVE": "require"},
    ) for _ in range(2)]  # fmt: skip
    assert [child.communicate()[0].strip() for child in children] == ["True", "True"]
