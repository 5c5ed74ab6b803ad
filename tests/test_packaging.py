"""Both packages are found: in place without an install, and installed from a wheel into a fresh environment."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

import colofunc as cf
from colofunc import env
from colofunc.ops import native_build

ROOT = Path(__file__).resolve().parents[1]
INIT = "__init__.py"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
needs_setuptools = pytest.mark.skipif(importlib.util.find_spec("setuptools") is None, reason="needs setuptools")
needs_compiler = pytest.mark.skipif(not any(map(shutil.which, env.compilers())), reason="there is no C++ compiler")
needs_pip = pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="needs pip")


def test_plugins_are_imported_from_their_folder(subprocess_env: dict[str, str], tmp_path: Path) -> None:
    """Without an install; plugins need what colofunc needs, so site-packages stay."""
    code = "import colofunc_plugins; print(colofunc_plugins.__file__, colofunc_plugins.__name__)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=subprocess_env, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(ROOT / "plugins" / INIT), "colofunc_plugins"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("wheel"))


def built(folder: Path, with_kernels_of: Path | None = None) -> Path:
    """The wheel, built from a copy so that nothing is left in the tree; no build isolation, so no network. `with_kernels_of`: a cache
    folder with those for the CPU."""
    tree = folder / "tree"
    for name in ("colofunc", "plugins", "ext"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, tree)
    if with_kernels_of is not None:
        native_build.ship(tree / "ext" / "cuda" / native_build.SHIPPED, native_build.CPU, with_kernels_of / "native")
    command = "import setuptools.build_meta as b; print(b.build_wheel('..'))"
    done = subprocess.run([sys.executable, "-c", command], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder / done.stdout.split()[-1]


@needs_setuptools
def test_wheel_holds_both_packages(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    folders = {"colofunc": "colofunc", "plugins": "colofunc_plugins"}
    packages = [path.relative_to(ROOT) for folder in folders for path in (ROOT / folder).rglob(INIT)]
    wanted = {Path(folders[path.parts[0]], *path.parts[1:]).as_posix() for path in packages}
    assert wanted | {"colofunc/py.typed"} <= names
    suffixes = {".h", ".cuh", ".cpp", ".cu"}
    sources = [path.relative_to(ROOT / "ext" / "cuda") for path in (ROOT / "ext").rglob("*") if path.suffix in suffixes]
    assert {path.suffix for path in sources} == suffixes
    assert {f"colofunc/native_sources/{path.as_posix()}" for path in sources} <= names
    assert not [name for name in names if name.startswith(("plugins/", "tests/", "tools/"))]
    assert wheel.name == f"colofunc-{cf.__version__}-py3-none-any.whl"


def installed(wheel: Path, folder: Path) -> tuple[Path, dict[str, str]]:
    """(an environment with the wheel, variables for its processes)"""
    environment = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([*pip, str(wheel)], check=True, env=clean)  # pip takes what lies on PYTHONPATH for installed
    site = sysconfig.get_path("purelib", vars={"base": str(environment), "platbase": str(environment)})
    behind = dict.fromkeys(path for path in sys.path if path.endswith(("site-packages", "dist-packages")))
    Path(site, "dependencies.pth").write_text("\n".join(behind) + "\n")
    return environment, clean


@pytest.fixture(scope="module")
def environment(wheel: Path, kernels_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Of a wheel that has kernels in it."""
    folder = tmp_path_factory.mktemp("installed")
    wheel = built(folder, kernels_folder)
    assert re.fullmatch(r"colofunc-[^-]*-py3-none-(linux|manylinux|macosx)_.*\.whl", wheel.name)
    umask = os.umask(0o002)  # a usual one, with which the group may write all that pip writes
    try:
        return installed(wheel, folder)
    finally:
        os.umask(umask)


TRIED = """
import os, pathlib, sys, torch, colofunc as cf
from colofunc.errors import NativeError
from colofunc.ops import native, native_build
from colofunc_plugins import zero

step = cf.shard(lambda x: (x * x).sum(), cf.Mesh(dp=2), zero(3, "dp"))
print(cf.__file__, float(step(torch.ones(4, 2))))

def tried(mode):
    os.environ["COLOFUNC_NATIVE"] = mode
    native._LIBRARIES.clear()
    native._FAILED.clear()
    return native_build.shipped(native_build.CPU) is not None, native.ready("cpu")

# A library that was loaded once is not read again.
library = native_build.shipped(native_build.CPU)
whole = library.read_bytes()
library.write_text("half a file")
try:
    tried("require")
except NativeError as error:
    print(error)
library.write_bytes(whole)
print(*tried("require"))
source = native_build.source_folder() / "rules.h"
source.write_text(source.read_text() + "// changed\\n")
print(*tried("auto"))
"""


@needs_setuptools
@needs_pip
@needs_compiler
def test_a_wheel_with_compiled_kernels_runs_in_a_fresh_environment(environment: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    """Its own environment, without this tree; what the wheel depends on is read from the environment of the tests.

    Kernels are loaded without a compiler and without a cache, unless they were made of other sources or cannot be loaded.
    """
    root, clean = environment
    (library,) = root.rglob("cpu-*.so")
    assert library.stat().st_mode & 0o777 == 0o664
    given = {**clean, "CXX": "/nowhere/c++", "COLOFUNC_CACHE": "off"}
    done = subprocess.run([str(root / "bin" / "python"), "-c", TRIED], cwd=tmp_path, env=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    ran, half, whole, changed = done.stdout.splitlines()
    place, value = ran.split()
    assert place.startswith(str(root)) and float(value) == 8.0
    assert whole.split() == ["True", "True"]
    assert "there is no C++ compiler (/nowhere/c++)" in half
    assert "the kernels that came with colofunc cannot be loaded here" in done.stderr and "so they are compiled" in done.stderr
    assert changed.split() == ["False", "False"]


@needs_setuptools
@needs_pip
@needs_compiler
def test_the_command_of_a_wheel_is_there(environment: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    root, clean = environment
    said = subprocess.run([str(root / "bin" / "colofunc"), "--version"], cwd=tmp_path, env=clean, capture_output=True, text=True)
    assert said.stdout.startswith(f"colofunc {cf.__version__}, torch "), said.stderr[-2000:]


def install_lines() -> list[tuple[str, str]]:
    """What every page, message and docstring tells a reader to install: (file, what stands behind `pip install`)."""
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    files += [*(ROOT / "colofunc").rglob("*.py"), *(ROOT / "plugins").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
    found = []
    for file in files:
        for text in re.findall(r"pip install ([^`\n,;)]+)", file.read_text()):
            found.append((str(file.relative_to(ROOT)), re.split(r"  +#|\"\) |\"$", text)[0].strip()))
    return found


def works_today(word: str) -> bool:
    """A folder of this checkout with extras that it has, the wheel that `make wheel` builds, or a package the project depends on."""
    path, _, extras = word.strip("\"'").partition("[")
    offered = PROJECT["optional-dependencies"]
    if any(extra not in offered for extra in extras.rstrip("]").split(",") if extra):
        return False
    if path.startswith(("-", "dist/colofunc-")):
        return True
    if (ROOT / path / "pyproject.toml").exists():
        return True
    needed = [*PROJECT["dependencies"], *(need for needs in offered.values() for need in needs)]
    return path.lower() in {re.split(r"[><=~]", need)[0].lower() for need in needed}


def test_every_install_line_works_today() -> None:
    lines = install_lines()
    wrong = [(file, line) for file, line in lines if not all(works_today(word) for word in line.split())]
    assert not wrong
    assert "README.md" in {file for file, _ in lines} and len(lines) > 8
    assert not works_today('"colofunc[hf]"') and not works_today("colofunc") and not works_today(".[nothing]")
