"""Slice 1: the tests that need a GPU, and the same under sanitizers of streams and of memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from bench import Row
from bench.gpu.parts import Part, Setup, Slice

ROOT = Path(__file__).parents[2]
LIMIT_S = 200
STREAMS = {"TORCH_CUDA_SANITIZER": "1"}
"""Torch's own: every kernel's reads and writes against what events and waits say (torch.cuda._sanitizer)."""
NO_CACHE = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
"""Each tensor has an allocation of its own, or nothing outside of it would be out of bounds."""


def marked() -> list[str]:
    """Files that have such tests: collecting all others takes longer than running these."""
    files = sorted((ROOT / "tests").glob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in files if "mark.gpu" in path.read_text()]


def outcome(what: str, before: list[str], files: list[str], env: dict[str, str]) -> list[Row]:
    """The last line of pytest, and a row for each test that failed."""
    command = [*before, sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-rfE", "-p", "no:cacheprovider", *files]
    try:
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return [Row(what, f"failed: not done after {LIMIT_S} s", "all pass", False)]
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    tests = next((line for line in reversed(lines) if " in " in line and ("passed" in line or "failed" in line or "error" in line)), "")
    fallen = [line for line in lines if line.startswith(("FAILED", "ERROR "))]
    text = tests.strip("= ") or (done.stderr.strip().splitlines() or ["pytest said nothing"])[-1]
    rows = [Row(what, text, "all pass", done.returncode == 0 and bool(tests))]
    return rows + [Row(what, line[:300], "passes", False) for line in fallen]


def tests(setup: Setup) -> list[Row]:
    return outcome("pytest -m gpu", [], marked(), {})


def streams(setup: Setup) -> list[Row]:
    return outcome("copies under TORCH_CUDA_SANITIZER", [], ["tests/test_copies_gpu.py"], STREAMS)


def memory(setup: Setup) -> list[Row]:
    before = ["compute-sanitizer", "--tool", "memcheck", "--target-processes", "all", "--error-exitcode", "86"]
    # It runs kernels one behind another, so that nothing there runs beside anything.
    files = ["tests/test_copies_gpu.py", "--deselect", "tests/test_copies_gpu.py::test_copies_run_beside_compute"]
    return outcome("copies under compute-sanitizer memcheck", before, files, NO_CACHE)


SLICE = Slice(1, "Tests that need a GPU", (
    Part("tests", tests, ("a card", "pytest")),
    Part("streams", streams, ("a card", "pytest")),
    Part("memory", memory, ("a card", "pytest", "compute-sanitizer")),
))  # fmt: skip
