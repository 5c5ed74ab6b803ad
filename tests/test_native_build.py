"""Compiling kernels in C++: what happens where that cannot be done, and that two processes do it once."""

import ast
import errno
import fcntl
import os
import re
import runpy
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_native import SEED, needs_compiler
from typer.testing import CliRunner

from colofunc.cli import app
from colofunc.errors import NativeError, SwitchError
from colofunc.ops import native, native_build
from colofunc.ops import random as R

ROOT = Path(__file__).parents[1]


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A process that has asked for no kernels yet, with an empty cache folder."""
    monkeypatch.setattr(native, "_LIBRARIES", {})
    monkeypatch.setattr(native, "_FAILED", {})
    monkeypatch.setenv("COLOFUNC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLOFUNC_QUIET", "1")
    monkeypatch.delenv("COLOFUNC_NATIVE", raising=False)
    return monkeypatch


def kept_sum() -> float:
    return float(R.dropout.kernel(torch.ones(64), SEED, 3, 0.5).sum())


def reference_sum() -> float:
    """The same by the operators of Python."""
    with pytest.MonkeyPatch.context() as off:
        off.setenv("COLOFUNC_NATIVE", "off")
        return kept_sum()


def assert_the_reference_runs(said: str) -> None:
    """Though kernels are wanted; one warning says why, however often they are asked for."""
    with pytest.warns(RuntimeWarning, match=f"{re.escape(said)}.*COLOFUNC_NATIVE=off says that this is meant") as told:
        assert [kept_sum(), kept_sum()] == 2 * [reference_sum()]
        assert not native.ready("cpu")
    assert len(told) == 1


@pytest.mark.parametrize("compiler", ["/nowhere/c++", "/bin/false"])
def test_without_a_compiler_the_reference_runs_and_one_warning_says_so(compiler: str, fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fresh.setenv("CXX", compiler)
    said = {"/nowhere/c++": "there is no C++ compiler (/nowhere/c++)", "/bin/false": "/bin/false could not compile the kernels"}
    assert_the_reference_runs(said[compiler])
    assert not list(tmp_path.glob("cache/native/build-*"))


def test_a_compiler_that_is_killed_is_one_that_fails(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As by the system, for want of memory."""
    script = tmp_path / "c++"
    script.write_text("#!/bin/sh\nkill -9 $$\n")
    script.chmod(0o755)
    fresh.setenv("CXX", str(script))
    assert_the_reference_runs(f"{script} could not compile the kernels")
    assert not list(tmp_path.glob("cache/native/build-*")) and not list(tmp_path.glob("cache/native/*.so"))


def test_require_is_an_error_where_there_is_no_compiler(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fresh.setenv("CXX", "/nowhere/c++")
    with pytest.raises(NativeError, match=r"there is no C\+\+ compiler \(/nowhere/c\+\+\). Try: apt-get install g\+\+, or name one in CXX"):
        native_build.build(tmp_path)
    fresh.setenv("COLOFUNC_NATIVE", "require")
    with pytest.raises(NativeError, match=r"COLOFUNC_NATIVE=require, and there is no C\+\+ compiler"):
        kept_sum()


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NativeError, match=r"kernels cannot be kept in .*Try: name another folder in COLOFUNC_CACHE"):
        native_build.build(tmp_path / "file" / "native")


def read_only(*given: object) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


@pytest.mark.parametrize("how", ["no folder", "read-only"])
def test_a_cache_that_cannot_be_written_is_said_once_and_the_reference_runs(how: str, fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Root may write anywhere, so a file stands where the folder should, or the lock cannot be made."""
    folder = tmp_path / "cache" / "native"
    if how == "no folder":
        folder.parent.write_text("")
    else:
        fresh.setattr(native_build, "_locked", read_only)
    assert_the_reference_runs(f"kernels cannot be kept in {folder}: ")


@needs_compiler
def test_a_library_in_a_folder_that_cannot_be_written_is_loaded(
    kernels_folder: Path, fresh: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A hard link: a process that has loaded the library of other tests has this one."""
    folder = tmp_path / "cache" / "native"
    folder.mkdir(parents=True)
    os.link(kernels_folder / "native" / native_build.library_name(), folder / native_build.library_name())
    folder.chmod(0o500)
    for name in ("_locked", "_compile"):
        fresh.setattr(native_build, name, read_only)
    fresh.setenv("COLOFUNC_NATIVE", "require")
    try:
        assert native.ready("cpu")
        assert [path.name for path in folder.iterdir()] == [native_build.library_name()]
    finally:
        folder.chmod(0o700)


def test_without_a_cache_nothing_is_compiled(fresh: pytest.MonkeyPatch) -> None:
    fresh.setenv("COLOFUNC_CACHE", "off")
    fresh.setattr(native_build, "build", lambda *args: pytest.fail("something is compiled"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not native.ready("cpu") and kept_sum() == reference_sum()


def test_a_mode_that_there_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLOFUNC_NATIVE", "on")
    with pytest.raises(SwitchError, match="COLOFUNC_NATIVE='on' is none of auto, off, require; write COLOFUNC_NATIVE=auto"):
        native.ready("cpu")


def copying_compiler(folder: Path, library: Path, seconds: float = 0.0) -> Path:
    """A script that copies the library which is there, and writes a word to `links` for each time that it links one."""
    script = folder / "c++"
    script.write_text(
        f'#!/bin/sh\nif echo "$*" | grep -q -e -shared; then echo link >> "{folder}/links"; sleep {seconds}; fi\n'
        f'while [ "$1" != "-o" ]; do shift; done\ncp "{library}" "$2"\n'
    )
    script.chmod(0o755)
    return script


@needs_compiler
def test_a_killed_build_and_a_library_of_others_are_built_over(
    kernels_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = native_build.library_name()
    monkeypatch.setenv("CXX", str(copying_compiler(tmp_path, kernels_folder / "native" / name)))
    cache = tmp_path / "cache" / "native"
    (cache / "build-killed").mkdir(parents=True)
    (cache / name).write_text("of others")
    (cache / name).chmod(0o777)
    assert native_build.build(cache).read_bytes() == (kernels_folder / "native" / name).read_bytes()
    assert not (cache / "build-killed").exists()


@needs_compiler
def test_two_processes_that_start_without_a_library_compile_one(kernels_folder: Path, tmp_path: Path) -> None:
    """The first of them takes longer over it than the other one may start later."""
    script = copying_compiler(tmp_path, kernels_folder / "native" / native_build.library_name(), seconds=1.0)
    children = [subprocess.Popen(
        [sys.executable, "-c", "from colofunc.ops import native; print(native.ready('cpu'))"], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "CXX": str(script), "COLOFUNC_CACHE": str(tmp_path / "cache"), "COLOFUNC_NATIVE": "require"},
    ) for _ in range(2)]  # fmt: skip
    assert [child.communicate()[0].strip() for child in children] == ["True", "True"]
    assert (tmp_path / "links").read_text().split() == ["link"]


def test_two_processes_that_find_half_a_file_compile_one(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The second one has built over it and loads its own by the time that the first one asks for another."""
    whole = tmp_path / "whole.so"
    whole.write_text("whole")
    fresh.setenv("CXX", str(copying_compiler(tmp_path, whole)))
    cache = tmp_path / "cache" / "native"
    cache.mkdir(parents=True)
    (cache / native_build.library_name()).write_text("half a file")
    (cache / native_build.library_name()).chmod(0o700)
    loaded, failures = [], []

    def load(path: str) -> str:
        if Path(path).read_text() == "whole":
            return "whole"
        failures.append(path)
        if len(failures) == 1:
            loaded.append(native._loaded(cache, native_build.CPU))
        raise OSError("file too short")

    fresh.setattr(native, "ctypes", SimpleNamespace(CDLL=load))
    loaded.append(native._loaded(cache, native_build.CPU))
    assert loaded == ["whole", "whole"] and len(failures) == 2
    assert (tmp_path / "links").read_text().split() == ["link"]


def test_who_waits_too_long_for_another_process_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native_build, "WAIT_S", 0.1)
    with open(tmp_path / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        said = f"another process has held {tmp_path / 'lock'} for 0 s. Try: end it, or COLOFUNC_NATIVE=off"
        with pytest.raises(NativeError, match=re.escape(said)):
            native_build.build(tmp_path)


def test_a_compiler_that_takes_too_long_is_ended(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "c++"
    script.write_text("#!/bin/sh\nexec sleep 60\n")
    script.chmod(0o755)
    fresh.setenv("CXX", str(script))
    fresh.setattr(native_build, "BUILD_S", 0.2)
    assert_the_reference_runs(f"{script} took more than 0 s to compile the kernels. Try: another compiler in CXX")
    assert not list(tmp_path.glob("cache/native/build-*")) and not list(tmp_path.glob("cache/native/*.so"))


@needs_compiler
def test_a_library_that_this_torch_cannot_load_is_compiled_once_more_and_then_said(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As one of a torch with other symbols."""
    source, library, script = tmp_path / "other.cpp", tmp_path / "other.so", tmp_path / "c++"
    source.write_text("extern int of_another_torch; int* where = &of_another_torch;\n")
    subprocess.run([native_build.compiler(), "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    script.write_text(
        f'#!/bin/sh\necho "$*" | grep -q shared && echo link >> {tmp_path}/links\n'
        f'while [ "$1" != "-o" ]; do shift; done\ncp {library} "$2"\n'
    )
    script.chmod(0o755)
    fresh.setenv("CXX", str(script))
    assert_the_reference_runs("the compiled kernels cannot be loaded: ")
    assert (tmp_path / "links").read_text().split() == ["link", "link"]


PLANNED = """
import torch
from torch import nn
import colofunc as cf

net = nn.Sequential(nn.Linear(128, 128), nn.Dropout(0.5), nn.Linear(128, 64))
model = cf.functional(net)

def loss(params, x):
    return model.apply(params, model.buffers, x)[0].square().mean()

step = cf.quantize(cf.shard(loss, cf.Mesh(dp=2)), "int8", where="*.weight")
for node in step.lower(model.params, torch.randn(4, 128)).program.nodes:
    print(node.target)
"""


def test_nothing_is_compiled_to_import_to_trace_and_to_plan(subprocess_env: dict[str, str], tmp_path: Path) -> None:
    """In a process that could not and would say so."""
    given = {**subprocess_env, "CXX": "/nowhere/c++", "COLOFUNC_NATIVE": "require", "COLOFUNC_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", PLANNED], cwd=tmp_path, env=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    planned = done.stdout.split()
    assert "colofunc.dropout" in planned and any("int8" in target or "quantized" in target for target in planned), planned
    assert not (tmp_path / "cache" / "native").exists()


def tool(name: str) -> dict[str, object]:
    """What a file of `tools/` defines."""
    return runpy.run_path(str(ROOT / "tools" / name))


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


@pytest.mark.parametrize("compiler, status, said", [
    ("/nowhere/c++", 77, "NOT RUN: compiling the kernels for GPUs: there is no C++ compiler"), ("/bin/false", 1, "make cuda: Command"),
])  # fmt: skip
def test_the_check_of_kernels_for_gpus_without_a_compiler_of_the_stand_in(
    compiler: str, status: int, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.symlink_to("/bin/true")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert tool("compile_cuda.py")["main"]() == status
    assert said in "".join(capsys.readouterr())


def sanitized(monkeypatch: pytest.MonkeyPatch, shipped: Path, compiles: bool) -> int:
    """The status of `make sanitize` on a machine with all it needs, whose tests pass."""
    main = tool("sanitize.py")["main"]

    def passing(command: list[str], env: dict[str, str], **given: object) -> SimpleNamespace:
        if compiles:
            (base,) = [Path(word.removeprefix("--basetemp=")) for word in command if word.startswith("--basetemp=")]
            (base / "kernels").mkdir(parents=True)
            (base / "kernels" / "cpu-1.so").touch()
        return SimpleNamespace(returncode=0)

    stubs = {
        "SHIPPED": shipped, "lacking": lambda command: "", "where": lambda name, compiler: name, "subprocess": SimpleNamespace(run=passing),
    }  # fmt: skip
    for name, stub in stubs.items():
        monkeypatch.setitem(main.__globals__, name, stub)
    return main()


def test_sanitizers_fail_where_other_kernels_would_be_tested(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool("sanitize.py")["SHIPPED"] == native_build.SOURCES[1] / native_build.SHIPPED
    assert sanitized(monkeypatch, tmp_path / "none", compiles=True) == 0
    assert sanitized(monkeypatch, tmp_path / "none", compiles=False) == 1
    assert "no kernels were compiled with the sanitizers" in capsys.readouterr().err
    assert sanitized(monkeypatch, tmp_path, compiles=True) == 1
    assert f"the kernels in {tmp_path} would be tested, without sanitizers. Try: rm -r {tmp_path}" in capsys.readouterr().err


def asks_for_kernels(file: Path) -> bool:
    """Whether tests take the fixture `required`, or `mode`, which takes it."""
    text = file.read_text()
    if "required" not in text and "test_update_narrow" not in text:
        return False
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and "required" in {argument.arg for argument in node.args.args}:
            return True
        if isinstance(node, ast.ImportFrom) and node.module == "test_update_narrow" and "mode" in {alias.name for alias in node.names}:
            return True
    return False


def test_sanitizers_look_at_every_file_that_asks_for_the_kernels() -> None:
    asking = {file.name for file in (ROOT / "tests").glob("test_*.py") if asks_for_kernels(file)}
    assert set(tool("sanitize.py")["TESTS"]) == asking


def test_a_file_is_trusted_by_itself_or_as_another_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library, python = tmp_path / "cpu-1.so", tmp_path / "native.py"
    for path in (library, python):
        path.touch(0o600)
    is_trusted = native_build.is_trusted
    assert is_trusted(library) and not is_trusted(tmp_path / "none", python) and not is_trusted(tmp_path, python)
    for mode, of_python, as_python in ((0o664, 0o664, True), (0o664, 0o644, False), (0o666, 0o664, False), (0o646, 0o646, True)):
        library.chmod(mode)
        python.chmod(of_python)
        assert not is_trusted(library) and is_trusted(library, python) == as_python
    library.chmod(0o644)
    for path in (library, python):  # of another user
        if os.getuid() == 0:
            os.chown(path, 12345, -1)
    monkeypatch.setattr(os, "getuid", lambda: 12346)
    assert not is_trusted(library) and is_trusted(library, python)


def test_kernels_that_cannot_be_put_into_a_folder_say_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native_build, "build", lambda *given: Path(__file__))
    (tmp_path / "file").write_text("")
    for into in (tmp_path / "file", tmp_path / "file" / "below"):
        done = CliRunner().invoke(app, ["native", "cpu", "--into", str(into)])
        assert done.exit_code == 1 and isinstance(done.exception, SystemExit)
        assert f"kernels cannot be put into {into}: " in done.output and "Try: another folder" in done.output


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize("word", ["native", "pip", "none"])
def test_a_wheel_leaves_no_kernels_in_the_tree_even_if_it_fails(word: str, tmp_path: Path) -> None:
    """Python is a script that puts the first of two libraries there, and fails where it is told `word`."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\n"
        'if [ "$3" = native ]; then mkdir -p ext/cuda/compiled; touch ext/cuda/compiled/cpu-1.so; fi\n'
        "ls ext/cuda/compiled > seen\nmkdir -p dist; touch dist/one.whl\n"
        f'case "$*" in *"-m {word} "*|*"colofunc {word} "*) exit 3;; esac\n'
    )
    python.chmod(0o755)
    (tmp_path / "ext" / "cuda" / "compiled").mkdir(parents=True)
    (tmp_path / "ext" / "cuda" / "compiled" / "cpu-0.so").touch()  # of a run that was killed
    command = ["make", "--no-print-directory", "wheel", f"PY={python}", "NATIVE=cpu cuda"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode == 0) == (word == "none"), done.stderr
    assert (tmp_path / "seen").read_text().split() == ["cpu-1.so"]
    assert not (tmp_path / "ext" / "cuda" / "compiled").exists()


# ---- .ci/run ----


def checked(most_s: int, command: str, gone_s: int = 0) -> "subprocess.CompletedProcess[str]":
    """A check before the tests, after so many seconds of the run."""
    script = (ROOT / ".ci" / "run").read_text().replace("--kill-after=30", "--kill-after=1")
    functions = script[script.index("LIMIT_S=") : script.index("\nmake setup")]
    text = f"{functions}\nSECONDS={gone_s}; can_do {most_s} bash -c '{command}'; echo goes on"
    return subprocess.run(["bash", "-c", text], capture_output=True, text=True)


@pytest.mark.parametrize("most_s, command, status, said", [
    (60, "exit 0", 0, "goes on"), (60, "exit 77", 0, "goes on"), (60, "exit 3", 1, "FAILED: bash -c exit 3"),
    (1, "sleep 60", 1, "FAILED: bash -c sleep 60 took more than 1 s"), (60, "kill -9 $$", 1, "was killed after"),
    (1, "trap \"\" TERM; sleep 60", 1, "took more than 1 s"),
])  # fmt: skip
def test_a_check_before_the_tests_fails_the_run_unless_it_cannot_be_done(most_s: int, command: str, status: int, said: str) -> None:
    done = checked(most_s, command)
    assert done.returncode == status and said in done.stdout
    assert ("goes on" in done.stdout) == (status == 0)


def test_a_check_takes_no_time_of_the_tests() -> None:
    assert checked(600, "exit 3", 5400 - 1500 - 100).stdout == "FAILED: bash -c exit 3\n"
    done = checked(600, "exit 3", 5400 - 1500 - 30)
    assert done.stdout == "NOT RUN: bash -c exit 3: 3870 s have gone, and 1500 s of 5400 are kept for make test\ngoes on\n"


def test_the_run_without_time_runs_the_tests(tmp_path: Path) -> None:
    """All but `make test` is left out; with time, everything is called."""
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for path, name in ((tmp_path / "make", "make"), (tmp_path / ".venv" / "bin" / "python", "python")):
        path.write_text(f'#!/bin/sh\necho "called: {name} $*"\n')
        path.chmod(0o755)
    script = (ROOT / ".ci" / "run").read_text()
    for limit_s, called in ((5400, 6), (1500, 2)):
        (tmp_path / ".ci" / "run").write_text(script.replace("LIMIT_S=5400", f"LIMIT_S={limit_s}"))
        variables = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        done = subprocess.run(["bash", ".ci/run"], cwd=tmp_path, env=variables, capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("called: ")]
        assert done.returncode == 0 and len(lines) == called and lines[-1] == "called: make test"
        assert done.stdout.count("NOT RUN") == (3 if called == 2 else 0)


def test_a_check_that_is_cut_short_has_not_failed() -> None:
    """Less was left than it may take, and it was not done in that."""
    script = (ROOT / ".ci" / "run").read_text()
    assert "LEAST_S=60 " in script
    functions = script[script.index("LIMIT_S=") : script.index("\nmake setup")].replace("LEAST_S=60", "LEAST_S=1")
    done = subprocess.run(
        ["bash", "-c", f"{functions}\nSECONDS=$((LIMIT_S - TEST_S - 2)); can_do 600 sleep 60; echo goes on"], capture_output=True, text=True
    )
    assert re.fullmatch(r"NOT RUN: sleep 60: not done in the [12] s that were left\ngoes on\n", done.stdout)
