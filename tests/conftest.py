"""What every test run shares: one thread per process, fixed seeds, and reasons for what is skipped."""

import gc
import importlib.util
import multiprocessing
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("setuptools") is not None:
    # It replaces distutils on import and refuses to do so once anything has imported the standard library's.
    import setuptools  # noqa: F401
import torch

from colofunc.ops import native, native_build

ROOT = Path(__file__).resolve().parents[1]

os.environ.setdefault("COLOFUNC_CACHE", "off")  # a test plans anew
os.environ.setdefault("COLOFUNC_MEASURE", "off")  # and for the same figures on every machine
# Inductor's own pool of compilers takes longer to start than it saves where test processes run side by side.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# Ranks are simulated in one process and test processes run side by side.
torch.set_num_threads(1)

if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import settings

    # Fixed examples: a failing default run fails again. Sweeps draw new ones.
    settings.register_profile("default", deadline=None, derandomize=True, max_examples=50)
    settings.register_profile("sweep", deadline=None, max_examples=1000)
    settings.load_profile("default")


def pytest_configure(config: pytest.Config) -> None:
    if "sweep" in config.option.markexpr and importlib.util.find_spec("hypothesis") is not None:
        settings.load_profile("sweep")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked_for_sweep = "sweep" in config.option.markexpr
    for item in items:
        if item.get_closest_marker("sweep") and not asked_for_sweep:
            item.add_marker(pytest.mark.skip(reason="a longer sweep: make sweep"))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[Any]:
    """What all test modules import is a million objects, and stays: the collector need not look through it.

    Tests make and drop programs of ten thousands of small records; looking for cycles among them every 700 objects, which is
    Python's default, takes 9 % of the processor's time of a run of models, 5 % with these thresholds.
    """
    gc.disable()
    gc.set_threshold(50_000, 20, 100)
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What tests have counted, `record_property("counts", {"tried": 3, ...})`, added up over all that differ in parameters only."""
    found: dict[str, Counter[str]] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            counts = dict(getattr(report, "user_properties", ())).get("counts") if getattr(report, "when", "") == "call" else None
            if counts is not None:
                found.setdefault(report.nodeid.split("[")[0], Counter()).update(counts)
    for name, counts in found.items():
        terminalreporter.write_line(f"{name}: " + ", ".join(f"{n} {what}" for what, n in counts.items()))


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def on_the_host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is a GPU a mesh of one runs on it; only tests that are marked so mean that."""
    if torch.cuda.is_available() and not request.node.get_closest_marker("gpu"):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


WARM = "colofunc colofunc_plugins transformers.trainer transformers.models.gpt2.modeling_gpt2 transformers.models.llama.modeling_llama"
"""What real ranks use, by far the most of their start; a package that is not installed is passed over."""


@pytest.fixture
def as_users_start() -> None:
    """Asked for by a test whose ranks start as users get them (see `warm_ranks`)."""


@pytest.fixture(autouse=True)
def warm_ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks come from a server that has imported what they use, four seconds of work less for each; and as users get them where just
    that is tested (`as_users_start`), or what they print (a server has the files that were open at its start)."""
    own = {"as_users_start", "capfd"} & set(request.fixturenames)
    if request.node.get_closest_marker("dist") and not own:
        multiprocessing.set_forkserver_preload(["pytest", "torch.fx.experimental.proxy_tensor", *WARM.split()])
        monkeypatch.setattr("colofunc.executors.launch.START", "forkserver")


@pytest.fixture(scope="session")
def kernels_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder of its own for the library of kernels in C++.

    `make test` has compiled it before the workers start and names it in TESTS_KERNELS. Else one worker compiles it, and who comes
    second waits for it.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "kernels"
    compiled = Path(os.environ.get("TESTS_KERNELS", ""))
    if compiled.name == native_build.library_name():
        (folder / "native").mkdir(mode=0o700, parents=True, exist_ok=True)
        whole = shutil.copyfile(compiled, folder / f"copied by {os.getpid()}")
        whole.replace(folder / "native" / compiled.name)
    native_build.build(folder / "native")
    return folder


@pytest.fixture
def required(kernels_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A test that runs with those kernels."""
    monkeypatch.setenv("COLOFUNC_CACHE", str(kernels_folder))
    monkeypatch.setenv("COLOFUNC_NATIVE", "require")
    monkeypatch.setattr(native, "_LIBRARIES", {})  # tests behind these run without it, whatever process they are in
    assert native.ready("cpu")
    yield monkeypatch
    native.limit_level(9)


@pytest.fixture
def subprocess_env() -> dict[str, str]:
    """The environment for a child process (torchrun, a script) that must import what this process can."""
    paths = [str(ROOT), str(ROOT / "tools" / "inplace"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
