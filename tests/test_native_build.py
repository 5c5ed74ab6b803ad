"""Compiling kernels in C++: what happens where that cannot be done, and that two processes do it once."""

import os
import runpy
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


def tool(name: str) -> dict[str, object]:
    """What a file of `tools/` defines."""
    return runpy.run_path(str(Path(__file__).parents[1] / "tools" / name))


def test_a_check_that_lacks_its_compiler_says_that_it_has_not_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By an exit status that `.ci/run` knows from a failure."""
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    assert tool("compile_cuda.py")["main"]() == 77
    assert "NOT RUN: compiling the kernels for GPUs: there is no CUDA compiler (/nowhere/bin/nvcc)" in capsys.readouterr().out
    monkeypatch.setenv("CXX", "/bin/echo")
    assert tool("sanitize.py")["main"]() == 77
    assert "sanitizers: /bin/echo comes without libasan.so and libubsan.so. Try: g++" in capsys.readouterr().out
    monkeypatch.setenv("CXX", "/nowhere/g++")
    assert tool("sanitize.py")["main"]() == 77
    assert "sanitizers: there is no /nowhere/g++" in capsys.readouterr().out


@pytest.mark.parametrize("limit_s, command, status, said", [
    (60, "exit 0", 0, "goes on"), (60, "exit 77", 0, "goes on"), (60, "exit 3", 1, "FAILED: bash"), (0.2, "sleep 60", 1, "more than 0.2 s"),
])  # fmt: skip
def test_a_check_before_the_tests_fails_the_run_unless_it_cannot_be_done(limit_s: float, command: str, status: int, said: str) -> None:
    script = (Path(__file__).parents[1] / ".ci" / "run").read_text()
    function = script[script.index("can_do()") : script.index("\n}\n")] + "\n}\n"
    done = subprocess.run(["bash", "-c", f"{function} can_do {limit_s} bash -c '{command}'; echo goes on"], capture_output=True, text=True)
    assert done.returncode == status and said in done.stdout
