"""Steps on a card that is pretended: the numbers of the CPU, whatever order its streams run in, and no wait of the host.

What a card would refuse (devices that meet, kernels that are not there) fails here too; see `pretended`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from colofunc_plugins import experts, ring, zero
from pretended import Machine, OnCard, on_card
from torch import Tensor
from torch.utils._pytree import tree_leaves

import colofunc as cf
from colofunc import testing
from colofunc.mesh.sizes import size_text

pytest.importorskip("transformers")
pytest.importorskip("timm")

QUICK = ("gpt2", "t5", "resmlp", "resnet", "kind_uneven", "layer_lstm", "layer_parametrized", "layer_conv2d")
Wrap = Callable[[Any], Any]
SEEDS = (0, 1)


def values(tree: Any) -> list[Tensor]:
    """The first rank's part of each tensor, on the host."""
    leaves = [x for x in tree_leaves(tree) if isinstance(x, (cf.DTensor, Tensor))]
    return [(x.parts[0] if isinstance(x, cf.DTensor) else x).cpu() for x in leaves]


def assert_same(got: Any, want: Any, tolerance: float = 1e-12) -> None:
    for x, y in zip(values(got), values(want), strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def assert_model(name: str) -> None:
    with testing.float64():
        fn, state, batch = zoo.step_of(name)

        def ran(device: str) -> Any:
            torch.manual_seed(3)
            step = cf.shard(fn, cf.Mesh(device=device))
            return step(step.init(state, batch), batch)

        want = ran("cpu")
        with Machine(seed=len(name)):
            got = ran("cuda")
            assert all(isinstance(x.parts[0], OnCard) for x in tree_leaves(got) if isinstance(x, cf.DTensor))
            assert_same(got, want)


@pytest.mark.parametrize("name", QUICK)
def test_model(name: str) -> None:
    assert_model(name)


@pytest.mark.sweep
@pytest.mark.parametrize("name", [name for name in zoo.ALL if name not in QUICK])
def test_every_model(name: str) -> None:
    assert_model(name)


# ---- one small step, in every way ----

NET = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.LayerNorm(32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 16))


def training(optimizer: Any = torch.optim.AdamW, **options: Any) -> tuple[Callable[..., Any], Any, Any]:
    """(step, state, batch) of a small net in float64."""
    torch.manual_seed(0)
    model = cf.functional(NET.double())
    opt = cf.adapt(optimizer, lr=1e-2, **options)
    loss = lambda out, batch: (out - batch["y"]).square().mean()  # noqa: E731
    step, state = cf.train_step(model, opt, loss=loss, clip=1.0, inputs=lambda batch: batch["x"])
    batch = {"x": torch.randn(8, 16, dtype=torch.float64), "y": torch.randn(8, 16, dtype=torch.float64)}
    return step, state, batch


def three_steps(
    device: str, wrap: Wrap = lambda step: step, plans: tuple[Any, ...] = (), axes: dict[str, int] | None = None, **options: Any
) -> Any:
    """(state, losses) after three steps."""
    fn, state, batch = training(**options)
    torch.manual_seed(3)
    step = wrap(cf.shard(fn, cf.Mesh(**(axes or {}), device=device), *plans))
    state = step.init(state, batch)
    losses = []
    for _ in range(3):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    return state, losses


def whole(tree: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda x: x.full() if isinstance(x, cf.DTensor) else x, tree)


def host(step: Any) -> Any:
    return cf.offload(step, policy="host")


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "four simulated ranks": {"axes": {"dp": 2, "tp": 2}},
    "zero(3)": {"axes": {"dp": 2}, "plans": (zero(3, "dp"),)},
    "zero(2), bf16": {"axes": {"dp": 2}, "plans": (zero(2, "dp"),), "wrap": cf.precision},
    "accumulate": {"wrap": lambda step: cf.accumulate(step, 4)},
    "fp16": {"wrap": lambda step: cf.precision(step, "fp16")},
    "checkpoint": {"wrap": lambda step: cf.checkpoint(step, policy="nothing")},
    "host": {"wrap": host},
    "host, accumulate": {"wrap": lambda step: cf.accumulate(host(step), 2)},
    "host, zero(3)": {"axes": {"dp": 2}, "plans": (zero(3, "dp"),), "wrap": host},
    "budget": {"wrap": lambda step: cf.offload(cf.checkpoint(step), budget="12KiB")},
}


@pytest.mark.parametrize("way", WAYS)
def test_transforms_and_plans(way: str) -> None:
    want = three_steps("cpu", **WAYS[way])
    # A card computes norms of narrow values in float32, and so rounds elsewhere.
    tolerance = 1e-2 if "16" in way else 1e-12
    for seed in SEEDS:
        with Machine(seed=seed):
            assert_same(three_steps("cuda", **WAYS[way]), want, tolerance)


@pytest.mark.parametrize("name", ["SGD", "Adam", "RMSprop", "NAdam", "Adagrad", "Adadelta", "Adamax", "ASGD", "RAdam", "Rprop"])
def test_optimizers(name: str) -> None:
    want = three_steps("cpu", optimizer=getattr(torch.optim, name))
    with Machine():
        assert_same(three_steps("cuda", optimizer=getattr(torch.optim, name)), want)


@pytest.mark.parametrize("policy", ["disk", "host"])
def test_state_beside_the_card(policy: str, tmp_path: Path) -> None:
    def offloaded(step: Any) -> Any:
        return cf.offload(step, policy=policy, disk=tmp_path)

    want = three_steps("cpu", offloaded)
    for seed in SEEDS:
        with Machine(seed=seed):
            state, losses = three_steps("cuda", offloaded)
            assert_same((whole(state), losses), (whole(want[0]), want[1]))


# ---- what goes around a step ----


def test_save_and_load(tmp_path: Path) -> None:
    want, _ = three_steps("cpu")
    for seed in SEEDS:
        with Machine(seed=seed):
            state, _ = three_steps("cuda")
            cf.save(tmp_path / str(seed), state)
            assert_same(cf.load(tmp_path / str(seed), mesh=cf.Mesh(device="cuda")), want)
        assert_same(cf.load(tmp_path / str(seed)), want)


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 10

    def __getitem__(self, k: int) -> dict[str, Tensor]:
        return {"x": torch.full((16,), float(k), dtype=torch.float64), "y": torch.zeros(16, dtype=torch.float64)}


@pytest.mark.parametrize("short", ["keep", "drop"])
def test_batches(short: str) -> None:
    def losses(device: str) -> list[Tensor]:
        fn, state, batch = training()
        torch.manual_seed(3)
        mesh = cf.Mesh(device=device)
        step, found = cf.shard(fn, mesh), []
        data = cf.batches(torch.utils.data.DataLoader(Rows(), batch_size=4), mesh, "b ...", short=short, prefetch=2)
        state = step.init(state, batch)
        for rows in data:
            state, metrics = step(state, rows)
            found.append(metrics["loss"])
        return found

    want = losses("cpu")
    for seed in SEEDS:
        with Machine(seed=seed):
            assert_same(losses("cuda"), want)


def test_profile_compare_and_what_is_finite(tmp_path: Path) -> None:
    fn, state, batch = training()
    with Machine():
        step = cf.shard(fn, cf.Mesh(device="cuda"))
        assert step.profile(str(tmp_path / "trace.json"), step.init(state, batch), batch).step_s > 0
        assert "equal" in str(step.compare(state, batch))
        assert "finite" in str(step.lower(state, batch).check_finite(state, batch))


@pytest.mark.parametrize("name, axis, plan", [("gpt_oss", "ep", experts), ("llama", "cp", ring)])
def test_modes_of_models(name: str, axis: str, plan: Any) -> None:
    def ran(device: str) -> Any:
        fn, state, batch = zoo.step_of(name)
        step = cf.shard(fn, cf.Mesh(**{axis: 2}, device=device), plan(axis))
        return step(step.init(state, batch), batch)[1]

    want = ran("cpu")
    with Machine(seed=1):
        assert_same(ran("cuda"), want)


# ---- the host runs ahead, and memory is what was counted ----


UPDATES = "event: executors/copies.py settle"  # an operator of the host, as an update there, reads a gradient that is on its way
WAITS = {"host": {UPDATES}, "host, accumulate": {UPDATES}, "host, zero(3)": {UPDATES}, "budget": {UPDATES}}


@pytest.mark.parametrize("way", [way for way in WAYS if "ranks" not in way])
def test_the_host_waits_within_a_step_for_what_it_computes_with_itself(way: str) -> None:
    options = dict(WAYS[way])
    wrap, plans, axes = options.get("wrap", lambda step: step), options.get("plans", ()), options.get("axes", {})
    fn, state, batch = training()
    with Machine(seed=4) as machine:
        step = wrap(cf.shard(fn, cf.Mesh(**axes, device="cuda"), *plans))
        state = step.init(state, batch)
        for _ in range(2):
            state, _ = step(state, batch)
        machine.forget_counts()
        state, _ = step(state, batch)
        assert machine.places.keys() == WAITS.get(way, set()), machine.places


@pytest.mark.parametrize("name", ["resmlp", "llama", "vit"])
def test_live_bytes_are_those_of_the_plan(name: str) -> None:
    fn, state, batch = zoo.step_of(name, torch.float32)
    with Machine() as machine:
        step, there = cf.shard(fn, cf.Mesh(device="cuda")), on_card(machine, batch)
        state = step.init(state, there)
        for _ in range(2):
            state = step(state, there)[0]
        machine.synchronize()
        machine.forget_counts()
        state = step(state, there)[0]
        assert machine.peak_bytes() == step.lower(state, there).memory().peak_bytes["device"]


# ---- a device that is full ----


def test_a_device_that_is_full_names_bytes_and_a_remedy_and_nothing_is_updated_in_part() -> None:
    """Whatever does not fit, a copy of the batch, a result or what an update needs: the state is as before, or it cannot be read."""
    with Machine(seed=2) as machine:
        fn, state, batch = training()
        step, memory = cf.shard(fn, cf.Mesh(device="cuda")), machine.allocators[machine.cards[0]]
        machine_bytes = memory.capacity_bytes
        state, on_host = step.init(state, batch), state
        memory.capacity_bytes = memory.rounded_bytes + (1 << 12)
        with pytest.raises(torch.OutOfMemoryError, match=r"allocate \d+ bytes") as caught:
            step.init(on_host, batch)
        memory.capacity_bytes = machine_bytes
        assert "Try for the optimizer state" in caught.value.__notes__[-1]
        del caught
        for _ in range(2):
            state, _ = step(state, batch)
        machine.synchronize()
        before, lying = values(state), memory.rounded_bytes
        planned = step.lower(state, batch).memory().peak_bytes["device"]
        seen: set[str] = set()
        for room in range(0, 1 << 16, 1536):
            memory.capacity_bytes = lying + room
            with pytest.raises(torch.OutOfMemoryError) as caught:
                step(state, batch)
            memory.capacity_bytes = machine_bytes
            notes = "\n".join(caught.value.__notes__)
            del caught
            assert size_text(planned) in notes and "Try for the optimizer state" in notes
            seen |= {word for word in ("argument", "running colofunc.linear_dw", "running colofunc.adamw_") if word in notes}
            if "that state is lost" in notes:
                break
            assert_same(state, before, 0.0)
        with pytest.raises(cf.ConsumedError, match="failed in the middle of its update"):
            values(state)
        assert len(seen) == 3
