"""Both packages are found: in place without an install, and in a built wheel."""

import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
INIT = "__init__.py"


def test_plugins_are_imported_from_their_folder(subprocess_env: dict[str, str], tmp_path: Path) -> None:
    """Without an install; plugins need what colofunc needs, so site-packages stay."""
    code = "import colofunc_plugins; print(colofunc_plugins.__file__, colofunc_plugins.__name__)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=subprocess_env, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(ROOT / "plugins" / INIT), "colofunc_plugins"]


@pytest.mark.skipif(importlib.util.find_spec("setuptools") is None, reason="needs setuptools")
def test_wheel_holds_both_packages(tmp_path: Path) -> None:
    """Built from a copy, so that nothing is left in the tree; no build isolation, so no network."""
    tree = tmp_path / "tree"
    for folder in ("colofunc", "plugins"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, tree)
    command = "import setuptools.build_meta as b; print(b.build_wheel('..'))"
    done = subprocess.run([sys.executable, "-c", command], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    names = set(zipfile.ZipFile(tmp_path / done.stdout.split()[-1]).namelist())
    folders = {"colofunc": "colofunc", "plugins": "colofunc_plugins"}
    packages = [path.relative_to(ROOT) for folder in folders for path in (ROOT / folder).rglob(INIT)]
    wanted = {Path(folders[path.parts[0]], *path.parts[1:]).as_posix() for path in packages}
    assert wanted | {"colofunc/py.typed"} <= names
    assert not [name for name in names if name.startswith(("plugins/", "tests/", "tools/"))]
