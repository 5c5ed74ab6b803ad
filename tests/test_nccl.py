"""Ranks under NCCL, on pretended cards: what travels lies on a card, wherever it is kept; numbers of gloo's; groups of all kinds."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from colofunc_plugins import zero
from pretended import Machine
from pretended.nccl import MIXED, Nccl

import colofunc as cf
from colofunc import compat, env
from colofunc.compiler import machine as machines
from colofunc.env import Launch
from colofunc.errors import InputError, MeshError
from colofunc.executors import collective_starts, gloo, gpus, groups
from colofunc.executors import launch as launching
from colofunc.executors.backend import backend_for
from colofunc.executors.distributed import Distributed, sub_limit_s
from colofunc.functional.checkpoint.place import device_for
from colofunc.mesh import KINDS, profile, transport
from colofunc.mesh import device as devices

DP = {"dp": 2}


def problem() -> tuple[Any, Any, Any, Any]:
    """A step of a small model in float64: (model, step function, state, batch)."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.GELU(), torch.nn.Linear(12, 6)).double()
    model, opt = cf.functional(net), cf.adapt(torch.optim.AdamW, lr=1e-2)
    loss = lambda out, batch: (out - batch["y"]).square().mean()  # noqa: E731
    step_fn, state = cf.train_step(model, opt, loss=loss, clip=1.0, inputs=lambda batch: batch["x"])
    batch = {"x": torch.randn(4, 8).double(), "y": torch.randn(4, 6).double()}
    return model, step_fn, state, batch


def trained(step: Any, steps: int = 3) -> tuple[list[float], Any]:
    """Losses, and the state."""
    _, _, state, batch = problem()
    state = step.init(state, batch) if hasattr(step, "init") else state
    losses = []
    for _ in range(steps):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, state


def whole(tree: Any) -> Any:
    return {name: x.full().cpu() for name, x in tree.items()}


def same(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, atol=1e-12, rtol=0)


def on_pretended_cards(work: Callable[..., Any], backend: str, *args: Any) -> Any:
    """`work` on a rank of gloo with a pretended card of its own, under a pretended NCCL."""
    rank = dist.get_rank()
    with Machine(cards=2, seed=rank, card=rank) as machine, Nccl(machine, backend) as nccl:
        return work(nccl, *args)


# ---- a state in host memory, whose parts travel ----


def host_state(nccl: Nccl, folder: str) -> dict[str, Any]:
    """What a rank does with a state that a step keeps on the host, and what it finds."""
    mesh, found = cf.Mesh(**DP), {}
    found["plain"], state = trained(cf.shard(problem()[1], mesh, zero(3, "dp")))
    found["params"] = whole(state["params"])
    cf.save(f"{folder}/device", state)
    found["losses"], state = trained(cf.offload(cf.shard(problem()[1], mesh, agree_every=1), policy="host"))
    weight = state["params"]["0.weight"]
    step, (_, _, start, batch) = cf.offload(cf.shard(problem()[1], mesh, zero(3, "dp")), policy="host"), problem()
    found["compared"] = str(step.compare(start, batch)), str(step.lower(start, batch).check_finite(start, batch))
    found["lies"] = str(weight.spec), str(weight.local.device), str(weight.full().device)
    found["host params"] = whole(state["params"])
    moved = [weight.redistribute(spec) for spec in ("a b", "a b @host", "a (dp b)", "a (dp b) @host")]
    found["moved"] = [(str(y.spec), str(y.local.device), y.full().cpu()) for y in moved]
    other = cf.distribute(torch.ones(8, 3, dtype=torch.float64), "a b", mesh)
    found["eager"] = (weight @ other).full().cpu(), float((weight * 2).sum()), torch.equal(weight, weight.redistribute("a b"))
    found["written"] = weight.clone().add_(1).full().cpu()
    cf.save_pretrained(problem()[0], state, f"{folder}/whole")
    loaded = cf.load(f"{folder}/device", mesh=mesh)
    found["loaded"] = {str(x.local.device) for x in loaded["params"].values()}
    found["again"] = whole(loaded["params"])
    found["sent"] = nccl.sent
    return found


def distributed_tensors(nccl: Nccl) -> list[Any]:
    """Tensors of the host that a rank brings to a mesh of cards."""
    mesh, x = cf.Mesh(**DP), torch.arange(12.0).reshape(4, 3)
    made = [cf.distribute(x, spec, mesh) for spec in ("(dp a) b", "a b", "(dp a) b @host")]
    made.append(cf.from_local(x, "(dp a) b", mesh))
    return [(str(y.local.device), y.full().cpu()) for y in made]


def overlapped_copies(_: Nccl | None) -> Any:
    """(losses, parameters, targets) of a step whose collectives run while it copies between tiers."""
    step, (_, _, start, batch) = cf.offload(cf.shard(problem()[1], cf.Mesh(**DP), zero(3, "dp", chunk=64)), policy="host"), problem()
    losses, state = trained(step)
    return losses, whole(state["params"]), [node.target for node in step.lower(start, batch).program.nodes]


def measured(nccl: Nccl) -> Any:
    """The figures of a step's plan where somebody wants them measured."""
    with mock.patch.dict(os.environ, COLOFUNC_MEASURE="on"), mock.patch.multiple(profile, _OFTEN=1, REPEATS=1):
        with mock.patch.object(machines, "SECONDS", 0.0), mock.patch.dict(machines._FOUND, clear=True):
            topology = cf.shard(lambda x: x * 2, cf.Mesh(**DP)).lower(torch.ones(4, 4)).priced.topology
    return topology.name, {one.kind for one in topology.measured if one.alpha_s >= 0 and one.axis == "dp"}


def held_bytes(nccl: Nccl) -> tuple[int, int]:
    """(the most that a rank's card holds in a step, what the plan says). Float32: updates in float64 have temporaries on a card."""
    machine = nccl.machine
    allocator = machine.allocators[machine.cards[dist.get_rank()]]
    net = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.GELU(), torch.nn.Linear(12, 6))
    adamw = cf.adapt(torch.optim.AdamW, lr=1e-2)
    step_fn, state = cf.train_step(cf.functional(net), adamw, loss=lambda out: out.square().mean(), clip=1.0)
    step, x = cf.shard(step_fn, cf.Mesh(**DP), zero(3, "dp")), torch.randn(4, 8)
    state = step.init(state, x)
    for _ in range(2):
        state = step(state, x)[0]  # its metrics, which the caller would hold, go
    allocator.reset_peak()
    state = step(state, x)[0]
    return allocator.peak_bytes, step.lower(state, x).memory().peak_bytes["device"]


def under_nccl(folder: str) -> Any:
    on_cpu = overlapped_copies(None)
    backend_for.__globals__["_distributed"].cache_clear()  # the same processes, now with cards
    found = on_pretended_cards(host_state, "nccl", folder)
    found["overlapped"] = on_cpu, on_pretended_cards(overlapped_copies, "nccl")
    backend_for.__globals__["_distributed"].cache_clear()
    found["held"] = on_pretended_cards(held_bytes, "nccl")
    found["measured"] = on_pretended_cards(measured, "nccl")
    backend_for.__globals__["_distributed"].cache_clear()  # the same processes, in a group that nobody has named
    return found, on_pretended_cards(distributed_tensors, "undefined")


@pytest.mark.dist
def test_what_lies_on_the_host_travels_from_a_card(tmp_path: Path) -> None:
    want, state = trained(problem()[1])
    params = {name: x.detach() for name, x in state["params"].items()}
    weight = params["0.weight"]
    for rank, (found, tensors) in enumerate(cf.launch(under_nccl, 2, str(tmp_path), timeout_s=120)):
        card = f"cuda:{rank}"
        for losses, got in (("plain", "params"), ("losses", "host params"), ("plain", "again")):
            same(found[losses], want)
            same(found[got], params)
        for losses, got, targets in found["overlapped"]:
            same(losses, want)
            same(got, params)
            kinds = {target.removeprefix("colofunc.") for target in targets}
            assert {"all_gather_start", "reduce_scatter_start", "to_host_start"} <= kinds
            assert kinds.isdisjoint({"all_gather", "reduce_scatter", "all_reduce"})
        assert found["compared"][0].startswith("equal: ") and found["compared"][1].startswith("finite: ")
        assert found["lies"] == ("(dp a) b @host", "cpu", "cpu")
        assert [(spec, device) for spec, device, _ in found["moved"]] == [
            ("a b", card), ("a b @host", "cpu"), ("a (dp b)", card), ("a (dp b) @host", "cpu")
        ]  # fmt: skip
        for _, _, value in found["moved"]:
            same(value, weight)
        product, total, equal = found["eager"]
        same(product, weight @ torch.ones(8, 3, dtype=torch.float64))
        same(total, float((weight * 2).sum()))
        same(found["written"], weight + 1)
        assert found["measured"] == ("2xh100 (found) (measured)", set(KINDS))
        assert found["held"][0] == found["held"][1]
        assert equal and found["loaded"] == {card} and found["sent"] > 0
        x = torch.arange(12.0).reshape(4, 3)
        assert [device for device, _ in tensors] == [card, card, "cpu", card]
        for (_, value), full in zip(tensors, (x, x, x, torch.cat([x, x]))):
            same(value, full)
    from safetensors.torch import load_file

    same(load_file(tmp_path / "whole" / "model.safetensors"), params)


# ---- a pipeline, whose messages wait for one another on streams ----


def pipelined(schedule: str) -> tuple[cf.Staged, Any, torch.Tensor]:
    """(step, state, batch) of four layers, clipped by the joint norm."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4))).double()
    model, opt = cf.functional(net), cf.adapt(torch.optim.AdamW, lr=1e-2)
    step_fn, state = cf.train_step(model, opt, loss=lambda out, x: (out - x).square().mean(), clip=1.0, inputs=lambda x: x)
    step = cf.pipeline(cf.shard(step_fn, cf.Mesh(pp=2)), microbatches=4, schedule=schedule) if schedule else step_fn
    return step, state, torch.randn(8, 8).double()


def losses_of(schedule: str) -> list[float]:
    step, state, batch = pipelined(schedule)
    state = step.init(state, batch) if schedule else state
    losses = []
    for _ in range(3):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses


def stages_on_cards(nccl: Nccl) -> tuple[dict[str, list[float]], int]:
    """Losses by schedule, and how many batches of messages went by the groups of one direction."""
    losses = {schedule: losses_of(schedule) for schedule in ("1f1b", "zb-v")}
    (made,) = backend_for(cf.Mesh(pp=2))._groups.values()
    return losses, len(made._pairs)


def stages_under_nccl() -> Any:
    return on_pretended_cards(stages_on_cards, "nccl")


@pytest.mark.dist
def test_stages_send_on_streams_of_their_own() -> None:
    """A V's messages between two ranks have three orders: forward, and those of two stages at once."""
    want = losses_of("")
    for losses, pairs in cf.launch(stages_under_nccl, 2, timeout_s=120):
        for found in losses.values():
            same(found, want)
        assert pairs == 6


# ---- the collectives as NCCL is given them, on gloo ----

CONVERSIONS = [("(dp a) b", "a b"), ("(dp a) b", "a (dp b)"), ("a (b dp)", "a (dp b)"), ("a b", "(dp a) b"), ("a (dp b)", "(a dp) b")]


def as_given_to_nccl() -> Any:
    gloo.GLOO.update(collective_starts.MAKERS)
    mesh = cf.Mesh(**DP, topology="ideal")
    losses, state = trained(cf.shard(problem()[1], mesh, zero(3, "dp")))
    x = torch.arange(64.0).reshape(8, 8)
    converted = [cf.distribute(x, source, mesh).redistribute(target).full() for source, target in CONVERSIONS]
    summed = cf.from_local(x * (mesh.rank + 1), "a b +dp", mesh)
    return losses, whole(state["params"]), converted, [summed.redistribute(spec).full() for spec in ("a b", "(dp a) b")]


@pytest.mark.dist
def test_the_collectives_of_nccl_give_the_numbers_of_gloos() -> None:
    want, state = trained(problem()[1])
    x = torch.arange(64.0).reshape(8, 8)
    for losses, params, converted, summed in cf.launch(as_given_to_nccl, 2, timeout_s=120):
        same(losses, want)
        same(params, {name: value.detach() for name, value in state["params"].items()})
        assert all(torch.equal(value, x) for value in converted) and all(torch.equal(value, x * 3) for value in summed)


# ---- groups of all kinds ----


@pytest.mark.parametrize(
    ("said", "config", "want"),
    [
        ("gloo", "", {"cpu": "gloo", "cuda": "gloo"}), ("nccl", "", {"cuda": "nccl"}), ("undefined", "cpu:gloo", {"cpu": "gloo"}),
        ("undefined", MIXED, {"cpu": "gloo", "cuda": "nccl"}), (MIXED, "", {"cpu": "gloo", "cuda": "nccl"}),
        ("nccl2", "", {"cuda": "nccl2"}), ("cuda:nccl2,cpu:mpi", "", {"cpu": "mpi", "cuda": "nccl2"}),
    ],
)  # fmt: skip
def test_what_a_group_carries(said: str, config: str, want: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: said)
    monkeypatch.setattr(dist, "get_backend_config", lambda: config)
    assert transport.carriers() == want
    assert devices.group_moves_gpu_memory() is ("nccl" in said + config)


def test_without_a_group_nothing_is_carried() -> None:
    assert transport.carriers() == {} and not devices.group_moves_gpu_memory()


class Others:
    """What other ranks say: `names` beside this rank's own."""

    deadline_s = 1.0

    def __init__(self, *names: str) -> None:
        self.names = names

    def exchange(self, what: str, mine: str, timeout_s: float) -> list[str]:
        return [mine, *self.names]


@pytest.fixture
def of_somebody_else(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A process group with NCCL that the user has made, on a machine with four cards."""

    def make(bound: int | None, current: int, local_rank: int | None) -> Any:
        where = None if local_rank is None else Launch(0, 4, local_rank, 4, "", 0)
        monkeypatch.setattr(gpus, "group_moves_gpu_memory", lambda: True)
        monkeypatch.setattr(compat, "bound_device", lambda group: None if bound is None else torch.device("cuda", bound))
        monkeypatch.setattr(env, "launched", lambda: where)
        monkeypatch.setattr(devices._Process, "gpu", None)
        machine = Machine(cards=4, card=current)
        return machine

    return make


@pytest.mark.parametrize(
    ("bound", "current", "local_rank", "want"),
    [
        (3, 0, 1, 3), (None, 2, 1, 2), (None, 0, 1, 1), (None, 0, None, 0), (None, 0, 0, 0), (None, 0, 7, 0), (None, 3, None, 3),
        (0, 0, 2, 0),
    ],
)  # fmt: skip
def test_the_card_of_a_rank_in_a_group_of_the_users(
    of_somebody_else: Any, bound: int | None, current: int, local_rank: int | None, want: int
) -> None:
    with of_somebody_else(bound, current, local_rank), ThreadPoolExecutor(1) as others:
        gpus.adopt_gpu(Others("another card"))
        assert torch.cuda.current_device() == want
        card = torch.device("cuda", want)
        # A thread of its own begins on card 0.
        assert others.submit(torch.cuda.current_device).result() == 0
        assert others.submit(device_for, None, "cuda").result() == device_for(cf.Mesh(device="cuda"), None) == card
        assert others.submit(devices.device_of, cf.Mesh(device="cuda")).result() == card
        assert device_for(cf.Mesh(), "cuda:3") == torch.device("cuda", 3) and device_for(None, None).type == "cpu"


def test_two_ranks_on_one_card_are_an_error_before_anything_is_sent(of_somebody_else: Any) -> None:
    with of_somebody_else(None, 0, None), pytest.raises(MeshError, match=r"one GPU of its own|a GPU of its own for each rank") as told:
        gpus.adopt_gpu(Others("other", gpus.gpu_name(0)))
    assert "ranks 0 and 2 would share one" in str(told.value) and "torch.cuda.set_device(" in str(told.value)


def test_a_mesh_on_the_cpu_in_a_group_of_cards_only() -> None:
    backend = Distributed.__new__(Distributed)
    backend._carriers, backend._groups, backend.watch, backend.rank = {"cuda": "nccl"}, {}, None, 0
    backend._mail = groups.Mail()
    with pytest.raises(MeshError, match=r"is to run on the CPU and the process group carries tensors on GPUs only"):
        backend._groups_of(cf.Mesh(dp=2, device="cpu"))
    assert backend._groups_of(cf.Mesh(dp=2)).carriers == {"cuda": "nccl"}
    backend._carriers = {"cpu": "gloo", "cuda": "nccl"}
    assert backend._groups_of(cf.Mesh(dp=2, device="cpu")).limit_s == 300.0


@pytest.mark.parametrize(("gpu", "want"), [(None, ("gloo", None)), (3, (MIXED, torch.device("cuda", 3)))])
def test_our_own_groups(gpu: int | None, want: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(dist, "init_process_group", lambda name, device_id=None, **rest: made.append((name, device_id, rest)))
    transport.make_group(gpu, timeout=timedelta(seconds=7))
    assert made == [(*want, {"timeout": timedelta(seconds=7)})]


def test_launched_ranks_have_a_card_each_or_none() -> None:
    with Machine(cards=2):
        assert launching._on_gpus(2, None) and launching._on_gpus(1, "cuda") and not launching._on_gpus(2, "cpu")
        assert not launching._on_gpus(3, None)
        with pytest.raises(InputError, match=r"3 ranks want a GPU each, and there are 2. Try: 2 ranks, or device=\"cpu\""):
            cf.launch(problem, 3, device="cuda")
    with pytest.raises(InputError, match=r"launch: device='gpu'"):
        cf.launch(problem, 2, device="gpu")


def limits_of_groups() -> Any:
    """What groups along axes are made with, in a group that is not ours and when ranks are told; and what has been made before."""
    mesh = cf.Mesh(dp=2, tp=1)
    backend: Any = backend_for(mesh)
    tie = backend.watch
    there = backend._groups_of(mesh).of(("tp",)).pg, dist.group.WORLD
    before = sub_limit_s(tie), *(compat.group_limit_s(group, "cpu") for group in there)
    cf.join(mesh, limit_s=55)
    assert backend._groups_of(mesh).limit_s == 55.0  # of those that come later
    after = sub_limit_s(tie), *(compat.group_limit_s(group, "cpu") for group in there)
    tie.made_group = True  # as where the first step has joined
    cf.join(mesh, limit_s=44)
    ours = [compat.group_limit_s(group, "cpu") for group in there]
    tie.exchange("the end", "", 60, last=True)  # rank 0 serves the others until they have come here
    return before, after, ours


@pytest.mark.dist
def test_groups_along_axes_have_the_limit_of_the_whole() -> None:
    assert cf.launch(limits_of_groups, 2, timeout_s=77) == [((77.0, 77.0, 77.0), (55.0, 55.0, 77.0), [44.0, 44.0])] * 2


def test_gloo_carries_tensors_of_a_card_through_the_host() -> None:
    def start(x: Any) -> collective_starts.Started:
        whole = x if isinstance(x, torch.Tensor) else torch.cat(x)
        assert whole.device.type == "cpu"
        return collective_starts.Started((), partial(torch.mul, whole, 2))

    with Machine():
        x = torch.arange(3.0, device="cuda")
        for given, want in ((x, [0.0, 2.0, 4.0]), ([x, x], [0.0, 2.0, 4.0] * 2)):
            out = gloo.through_host(start)(given).wait()
            assert out.is_cuda and out.tolist() == want
