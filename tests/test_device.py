"""Where steps run: one rule by the mesh, what is brought there, and what is said of GPUs that are left idle. The GPUs are pretended."""

import warnings
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import colofunc as cf
from colofunc.dtensor.placed import place
from colofunc.env import Launch
from colofunc.errors import MeshError
from colofunc.executors import distributed, gpus, pools
from colofunc.executors.backend import backend_for
from colofunc.executors.gpus import candidate, own_gpu, shared_or_missing
from colofunc.functional.optimizers import _memory_of
from colofunc.mesh import device
from colofunc.mesh.device import device_of, idle_gpus
from colofunc.ops.define import KERNELS
from colofunc.ops.update_rules import KINDS, options_of
from colofunc.program.on_host import OnHost
from colofunc.program.passes.simplify import simplify
from colofunc.program.tracing.trace import trace
from colofunc.spec.layout import replicated

GPU, HOST = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`cards(n)`: this process sees n GPUs, of which the first is its own. Nothing can be computed on them."""

    def see(count: int, names: str = "one two three four five six seven eight") -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda k: SimpleNamespace(uuid=names.split()[k]))

    return see


def group(monkeypatch: pytest.MonkeyPatch, backend: str, ranks: int) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ranks)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: backend)
    both = "cpu:gloo,cuda:nccl" if torch.cuda.device_count() else "cpu:gloo"  # what torch makes where no backend is named
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: both)


@pytest.mark.parametrize(
    ("there", "backend", "axes", "said", "where"),
    [
        (0, "", {}, None, HOST), (1, "", {}, None, GPU), (1, "", {}, "cpu", HOST), (8, "", {}, None, GPU),
        (1, "", {"dp": 2}, None, HOST), (1, "", {"dp": 2}, "cuda", GPU), (1, "", {"dp": 2, "tp": 2}, "cpu", HOST),
        (2, "nccl", {"dp": 2}, None, GPU), (2, "gloo", {"dp": 2}, None, HOST), (2, "cpu:gloo,cuda:nccl", {"dp": 2}, None, GPU),
        (2, "undefined", {"dp": 2}, None, GPU), (0, "undefined", {"dp": 2}, None, HOST), (2, "nccl", {"dp": 2}, "cpu", HOST),
        (2, "gloo", {"dp": 2}, "cuda", GPU), (2, "gloo", {}, None, GPU), (2, "nccl", {"dp": 4}, None, HOST),
    ],
)  # fmt: skip
def test_the_mesh_and_the_process_say_where_steps_run(
    cards: Any, monkeypatch: pytest.MonkeyPatch, there: int, backend: str, axes: dict[str, int], said: str | None, where: torch.device
) -> None:
    cards(there)
    if backend:
        group(monkeypatch, backend, 2)
    assert device_of(cf.Mesh(device=said, **axes)) == where


@pytest.mark.parametrize("axes", [{}, {"dp": 2}])
def test_a_mesh_that_wants_a_gpu_where_there_is_none_is_planned_and_not_run(axes: dict[str, int]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    mesh = cf.Mesh(device="cuda", **axes)
    step, args = cf.shard(lambda w, x: (w * x).sum(), mesh), (torch.ones(4), torch.ones(4))
    assert step.lower(*args).program.nodes
    said = r"wants a GPU, and this process can use none: .*Try: device=None"
    for run in (step, step.init, lambda *a: place(a[0], replicated((4,)), mesh, backend_for(mesh))):
        with pytest.raises(MeshError, match=said):
            run(*args)


def test_threads_use_the_gpu_of_their_process(cards: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their own current device is number 0."""
    cards(4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(device._Process, "gpu", None)
    device.use_gpu(3)
    assert device_of(cf.Mesh()) == torch.device("cuda", 3)


# ---- GPUs that nobody uses


@pytest.mark.parametrize(
    ("there", "ranks", "axes", "said", "words"),
    [
        (0, 0, {"dp": 2}, None, ""), (1, 0, {}, None, ""), (1, 0, {"dp": 2}, "cuda", ""), (1, 0, {"dp": 2}, "cpu", ""),
        (1, 0, {"dp": 2}, None, "is simulated on the host and leaves the GPU of this machine idle"),
        (8, 0, {"dp": 2}, None, "leaves all 8 GPUs of this machine idle"), (8, 0, {}, None, "uses 1 of 8 GPUs"),
        (8, 8, {"dp": 8}, "cuda", ""), (8, 4, {"dp": 4}, "cuda", "uses 4 of 8 GPUs"), (1, 4, {"dp": 4}, "cuda", ""),
    ],
)  # fmt: skip
def test_idle_gpus_are_named(
    cards: Any, monkeypatch: pytest.MonkeyPatch, there: int, ranks: int, axes: dict[str, int], said: str | None, words: str
) -> None:
    cards(there)
    if ranks:
        monkeypatch.setattr(device.env, "launched", lambda: Launch(0, ranks, 0, ranks, "", 0))
    found = idle_gpus(cf.Mesh(device=said, **axes))
    assert words in found and bool(words) == bool(found)


def test_a_simulated_step_on_a_machine_with_gpus_says_that_they_are_idle(cards: Any) -> None:
    cards(2)
    step = cf.shard(lambda x: x * 2, cf.Mesh(dp=2))
    with pytest.warns(UserWarning, match="leaves all 2 GPUs of this machine idle"):
        assert step(torch.ones(4)).full().equal(torch.full((4,), 2.0))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*idle.*")
        cf.shard(lambda x: x * 2, cf.Mesh(dp=2, device="cpu"))(torch.ones(4))


# ---- which GPU a launched rank takes


class Told:
    """A watch that knows what all ranks say."""

    deadline_s = 1.0

    def __init__(self, *names: str) -> None:
        self.names = list(names)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def exchange(self, what: str, mine: str, timeout_s: float) -> list[str]:
        return [mine, *self.names]


@pytest.mark.parametrize(("local_rank", "there", "index"), [(0, 8, 0), (5, 8, 5), (5, 1, 0), (3, 2, 1), (2, 0, None)])
def test_a_rank_that_sees_one_gpu_takes_that(local_rank: int, there: int, index: int | None) -> None:
    assert candidate(Launch(local_rank, 8, local_rank, 8, "", 0), there) == index


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["a", "b", "c"], ""), (["", "", ""], "ranks 0, 1, 2 can use none"), (["a", "", "c"], "rank 1 can use none"),
        (["a", "b", "a"], "ranks 0 and 2 would share one"), ([""] * 20, "and others can use none"),
    ],
)  # fmt: skip
def test_all_ranks_have_a_gpu_of_their_own_or_none_uses_one(names: list[str], words: str) -> None:
    found = shared_or_missing(names)
    assert words in found and bool(words) == bool(found)


def test_one_visible_gpu_a_task_is_usable(cards: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Slurm gives them: each task sees one, which is number 0."""
    monkeypatch.setattr(gpus.platform, "node", lambda: "n0")
    cards(1, "mine")
    place, ranks = Launch(0, 2, 0, 2, "", 0), cf.Mesh(dp=2)
    assert own_gpu(ranks, place, Told("n0 other")) == 0  # type: ignore[arg-type]
    assert own_gpu(cf.Mesh(dp=2, device="cpu"), place, Told("n0 other")) is None  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="leaves GPUs idle, because ranks 0 and 1 would share one"):
        assert own_gpu(ranks, place, Told("n0 mine")) is None  # type: ignore[arg-type]
    with pytest.raises(MeshError, match="wants a GPU of its own for each rank, and ranks 0 and 1 would share one"):
        own_gpu(cf.Mesh(dp=2, device="cuda"), place, Told("n0 mine"))  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="rank 1 can use none"):
        assert own_gpu(ranks, place, Told("")) is None  # type: ignore[arg-type]


# ---- what is brought there


def moved_by(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, torch.device]]:
    """What `place` would move, and where to; it stays where it is."""
    seen: list[tuple[str, torch.device]] = []

    def in_tier(x: torch.Tensor, tier: str, where: torch.device) -> torch.Tensor:
        seen.append((tier, where))
        return x

    monkeypatch.setattr("colofunc.dtensor.placed.in_tier", in_tier)
    monkeypatch.setattr("colofunc.executors.distributed.in_tier", in_tier)
    return seen


def test_plain_inputs_captured_weights_and_seeds_go_where_the_step_runs(cards: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, wherever they are: one that stays behind is an operator on two devices."""
    seen = moved_by(monkeypatch)

    def run() -> None:
        frozen = torch.randn(200, 200)
        mesh = cf.Mesh(topology="gloo-cpu")
        step = cf.shard(lambda w, x: (w + 1, torch.nn.functional.dropout(x @ frozen * w, 0.5)), mesh)
        step(torch.ones(200), torch.ones(2, 200))

    run()
    assert {where for _, where in seen} <= {HOST}
    seen.clear()
    cards(1)
    run()
    assert seen == [("device", GPU)] * 4  # w, x, the seed, and what is captured


def test_what_lies_on_a_gpu_goes_to_the_host_where_the_step_runs_there() -> None:
    class OnGpu:
        is_cpu, is_cuda, device = False, True, GPU

        def to(self, where: torch.device) -> str:
            return f"on {where}"

    x: Any = OnGpu()
    assert pools.in_tier(x, "device", HOST) == pools.in_tier(x, "host", HOST) == "on cpu"
    assert pools.in_tier(x, "device", GPU) is x


@pytest.mark.parametrize("backend", ["", "gloo", "nccl"])
def test_a_seed_travels_once_and_is_not_read_back(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """To read it the host would wait for all that the device has before it. The group's own memory is where it is sent on."""
    there, seed, sent = object(), torch.tensor(3), list[Any]()
    monkeypatch.setattr(distributed, "in_tier", lambda x, tier, where: there)
    if backend:
        group(monkeypatch, backend, 2)
        monkeypatch.setattr(torch.distributed, "broadcast", lambda x, src: sent.append(x))
    watch: Any = nullcontext() if backend else None
    assert distributed.main_seed(watch, seed, GPU) is there
    assert sent == ([] if not backend else [there] if backend == "nccl" else [seed])


# ---- known values


@pytest.fixture
def on_gpu_now(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`on_gpu_now(x)`: from now on x says that it lies on a GPU, until `cpu()` brings a copy."""
    memory: set[int] = set()

    def there(x: torch.Tensor) -> bool:
        return x.device.type == "cuda" or (type(x) is torch.Tensor and x.device.type == "cpu" and x.data_ptr() in memory)

    plain = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(there))
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x, *args: plain(x, *args).clone() if x.is_cuda else plain(x, *args))
    return lambda x: memory.add(x.data_ptr()) or x


def test_known_values_are_read_on_the_host(on_gpu_now: Any) -> None:
    known = OnHost({3: on_gpu_now(torch.arange(4.0))})
    assert not known[3].is_cuda and known[3] is known[3] and known[3].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("rows", [4, 300])  # a table that is a constant, and one that is too large to be one
def test_tables_of_a_module_on_a_gpu_are_folded_on_the_host(on_gpu_now: Any, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """What rotary positions do: a buffer on the GPU times positions that a factory makes."""
    table, met = on_gpu_now(torch.arange(float(rows * rows)).view(rows, rows)), list[bool]()

    def fn(x: torch.Tensor) -> torch.Tensor:
        angle = table * torch.arange(rows).unsqueeze(1)
        return x * angle[:2, :2].sin()

    run = OnHost.__getitem__
    monkeypatch.setattr(OnHost, "__getitem__", lambda self, vid: met.append((value := run(self, vid)).is_cuda) or value)
    program = simplify(trace(fn, (torch.ones(2, 2),)).program)
    assert met and not any(met) and not any(t.is_cuda for t in program.constants.values())
    assert len(program.constants) == 1 and len(program.nodes) == 1


# ---- updates


class Seen(TorchDispatchMode):
    """The devices of the tensors that each operator takes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, set[str]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = torch.utils._pytree.tree_leaves((args, kwargs or {}))
        self.calls.append((func.__name__, {x.device.type for x in leaves if isinstance(x, torch.Tensor)}))
        return None if "_fused" in func.__name__ else func(*args, **(kwargs or {}))  # which have no fake form without a driver


OPERANDS = {"adamw_": (4, (0.9, 0.99, 1e-8, 0.1, True)), "sgd_": (3, (0.9, 0.0, 0.1, False))}
CALLED = [("adamw_", torch.float32), ("adamw_", torch.float64), ("sgd_", torch.float32), ("sgd_", torch.bfloat16)]


@pytest.mark.parametrize(("name", "dtype"), CALLED)
@pytest.mark.parametrize("flagged", [False, True])
def test_counts_rates_and_flags_are_brought_beside_the_parameter(name: str, dtype: torch.dtype, flagged: bool) -> None:
    """A fused kernel on a GPU that is handed a count of the host reads nobody's memory; fake tensors refuse most other mixtures."""
    torch._C._ensureCUDADeviceGuardSet()
    many, options = OPERANDS[name]
    with FakeTensorMode(), Seen() as seen:
        tensors = [torch.ones(4, 4, dtype=dtype, device="cuda") for _ in range(many)]
        step, lr = torch.ones(()), torch.tensor(0.1)
        finite = torch.ones((), dtype=torch.bool) if flagged else None
        KERNELS[f"colofunc.{name}"](*tensors, step, lr, *options, finite=finite)
    computed = [devices for name, devices in seen.calls if len(devices) > 1 and name.split(".")[0] not in ("_to_copy",)]
    assert not computed, seen.calls


def test_each_rule_of_an_optimizer_has_its_count_beside_the_parameter() -> None:
    torch._C._ensureCUDADeviceGuardSet()
    for kind, rule in KINDS.items():
        options = options_of(kind, cf.adapt(getattr(torch.optim, kind), lr=0.1).of("w"))
        with FakeTensorMode(), Seen() as seen:
            p, g, *states = (torch.ones(4, device="cuda") for _ in range(5))
            held = [states[k] if k < len(rule.states) else None for k in range(3)]
            flag = torch.ones((), dtype=torch.bool)
            KERNELS["colofunc.update"](kind, p, g, *held, torch.ones(()), torch.tensor(0.1), options, flag)
        mixed = [call for call in seen.calls if len(call[1]) > 1 and call[0].startswith("where")]
        assert not mixed, (kind, mixed)


def test_the_step_count_of_a_fresh_state_lies_with_the_parameters() -> None:
    here: Any = SimpleNamespace(is_cuda=False, device=HOST)
    there: Any = SimpleNamespace(is_cuda=True, device=GPU)
    assert _memory_of({"a": here}) == HOST and _memory_of({"a": here, "b": there}) == GPU
    assert cf.adapt(torch.optim.AdamW, lr=1e-3).init({"w": torch.ones(2)})["step"].device == HOST
