"""The machine that is found: names of devices, what programs attain of data sheets, memory for plans, and parts of measured axes."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from colofunc_plugins import zero
from pretended import Machine

import colofunc as cf
from colofunc import env
from colofunc.compiler import machine
from colofunc.compiler.memory_limits import auto_bytes
from colofunc.errors import PlanError, TopologyError
from colofunc.mesh import KINDS, PRESETS, Mesh, Topology
from colofunc.mesh.cost import rate
from colofunc.mesh.curves import curves_of
from colofunc.mesh.detection import found_topology, margin_bytes, preset_of
from colofunc.mesh.presets import SHEETS
from colofunc.mesh.profile import profile_mesh
from colofunc.mesh.topology import Measured

GIB, MIB = 1 << 30, 1 << 20
CARD = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H100 PCIe", "h100-pcie"), ("NVIDIA H100 NVL", "h100-nvl"), ("NVIDIA H200", "h200"),
        ("NVIDIA H800", "h800"), ("NVIDIA H800 PCIe", None), ("NVIDIA H20", "h20"), ("NVIDIA B200", "b200"), ("NVIDIA GB200", "gb200"),
        ("NVIDIA A100-SXM4-80GB", "a100-80g"), ("NVIDIA A100-SXM4-40GB", "a100-40g"), ("NVIDIA A100 80GB PCIe", "a100-80g"),
        ("NVIDIA L40S", "l40s"), ("NVIDIA L4", "l4"), ("NVIDIA L40", None), ("NVIDIA A10G", "a10g"), ("NVIDIA A10", None),
        ("Tesla V100-SXM2-32GB", "v100"), ("Tesla V100-PCIE-16GB", "v100-16g"), ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"), ("NVIDIA GeForce RTX 3090", "rtx3090"), ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("NVIDIA GeForce RTX 4090 D", None), ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("NVIDIA GeForce RTX 2070 SUPER", None), ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None), ("", None),
    ],
)  # fmt: skip
def test_devices_are_known_by_what_they_call_themselves(name: str, preset: str | None) -> None:
    assert preset_of(name) == preset


@pytest.mark.parametrize("name", sorted(SHEETS))
def test_what_is_attained_is_less_than_the_sheet(name: str) -> None:
    sheet, found = SHEETS[name], PRESETS[name]
    for before, after in zip(sheet.device.rates, found.device.rates, strict=True):
        assert 0.4 < after.flops_per_s / before.flops_per_s < 0.9  # of products in whole steps; least where 500 W is all there is
    for was, now in ((sheet.levels, found.levels), (sheet.links[:2], found.links[:2])):
        assert all(0.7 < b.bandwidth_bytes_per_s / a.bandwidth_bytes_per_s < 1 for a, b in zip(was, now, strict=True))
    assert found.device.memory_bytes_per_s < sheet.device.memory_bytes_per_s and found.tiers == sheet.tiers


@pytest.mark.parametrize(
    ("name", "dtype", "published"),
    [
        ("8xa100-80g", "bfloat16", 271e12), ("8xh100", "bfloat16", 795e12), ("8xb200", "bfloat16", 1745e12),
        ("8xh100", "float8_e4m3fn", 1403e12), ("8xh200", "float8_e4m3fn", 1453e12), ("8xb200", "float8_e4m3fn", 3433e12),
    ],
)  # fmt: skip
def test_products_attain_what_was_published_and_steps_their_share(name: str, dtype: str, published: float) -> None:
    curves = curves_of(PRESETS[name].device.name)
    assert curves is not None
    assert rate(PRESETS[name], dtype) == pytest.approx(published * curves.sustained.share, rel=0.02)


def test_collectives_and_copies_attain_what_was_published() -> None:
    eight = Mesh(dp=8, topology="8xh100")
    nbytes = 2 << 30
    gathered = nbytes / eight.collective_s("all_gather", nbytes, ("dp",))  # bytes of the full tensor: 400 GB/s, XLA's table for sm_90
    assert gathered == pytest.approx(400e9, rel=0.03)
    older = Mesh(dp=8, topology="8xa100-80g")
    bus = 2 * 7 / 8 * nbytes / older.collective_s("all_reduce", nbytes, ("dp",))
    assert bus == pytest.approx(235e9, rel=0.03)
    assert GIB / eight.copy_s(GIB, "host", "device") == pytest.approx(55.4e9, rel=0.03)


def test_a_laptop_plans_with_the_rates_that_are_found_on_the_machine() -> None:
    named = Mesh(dp=8, topology="8xh100").topology
    with Machine(cards=8):
        found = found_topology(8, 8, CARD)
    assert (found.device, found.levels, found.links) == (named.device, named.levels, named.links)


def test_a_laptop_plans_a_step_as_the_named_machine_runs_it() -> None:
    """With collectives beside compute; a step that is put on "simulated" is planned for the process that simulates."""
    layers = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, device="meta") for _ in range(4)))
    step_fn, state = cf.train_step(cf.functional(layers), cf.adapt(torch.optim.SGD, lr=0.1), loss=lambda out: out.square().mean())
    sharded = cf.shard(step_fn, Mesh(dp=8, topology="8xh100"), zero(3, "dp"))
    plain, real, simulated = (
        chain.lower(state, cf.abstract((1 << 16, 1024))) for chain in (sharded, sharded.on("distributed"), sharded.on("simulated"))
    )
    assert (plain.plan.cost_s, plain.plan.peak_bytes) == (real.plan.cost_s, real.plan.peak_bytes)
    hidden_s = [
        sum(term.hidden_s for term in low.terms() if term.what.startswith(("all_gather", "reduce_scatter"))) for low in (plain, simulated)
    ]
    assert plain.plan.cost_s < simulated.plan.cost_s and hidden_s[0] > 1e-6 and hidden_s[1] == pytest.approx(0, abs=1e-12)


# ---- memory


@pytest.mark.parametrize(
    ("total", "taken", "ranks", "reserved"),
    [
        (80 * GIB, 0, 1, 1 * GIB), (80 * GIB, 0, 8, 3 * GIB), (80 * GIB, 500 * MIB, 1, 1 * GIB),  # the context is what was stated
        (80 * GIB, 10 * GIB, 1, 10 * GIB + 512 * MIB), (80 * GIB, 10 * GIB, 8, 12 * GIB + 512 * MIB),
        (4 * GIB, 0, 1, 512 * MIB), (4 * GIB, 0, 8, 512 * MIB), (4 * GIB, 4 * GIB, 1, 4 * GIB - 1),
    ],
)  # fmt: skip
def test_the_margin_is_stated_and_grows_with_what_is_taken(total: int, taken: int, ranks: int, reserved: int) -> None:
    assert margin_bytes(total, taken, ranks) == reserved


@pytest.mark.parametrize("total", [24 * GIB, 80 * GIB, 192 * GIB])
def test_a_budget_auto_leaves_the_margin_and_an_8th_of_the_rest_to_the_allocator(total: int) -> None:
    """Of a card that was found as of one that is named; one rank has no communicators."""
    base = PRESETS["8xh100"]
    tiers = tuple(attrs.evolve(tier, capacity_bytes=total) if tier.name == "device" else tier for tier in base.tiers)
    for reserved_bytes, left_bytes in ((0, total - 3 * GIB), (3 * GIB, total - 3 * GIB), (9 * GIB, total - 9 * GIB)):
        topology = attrs.evolve(base, tiers=tiers, reserved_bytes=reserved_bytes)
        assert auto_bytes(Mesh(dp=8, topology=topology)) == left_bytes * 7 // 8
    assert auto_bytes(Mesh(topology=attrs.evolve(base, tiers=tiers))) == (total - GIB) * 7 // 8
    assert auto_bytes(Mesh(topology="ideal")) is None


def test_a_plan_within_a_budget_auto_fits_on_the_card_that_is_named() -> None:
    """By its own table."""
    rows = 13 * GIB // 8 // 1024  # 6.5 GiB
    args = cf.abstract((rows, 1024)), cf.abstract((1024, 4))

    def chain(capacity_bytes: int) -> Any:
        base = PRESETS["rtx3050"]
        tiers = tuple(attrs.evolve(tier, capacity_bytes=capacity_bytes) if tier.name == "device" else tier for tier in base.tiers)
        return cf.checkpoint(cf.shard(step, Mesh(topology=attrs.evolve(base, tiers=tiers))))

    plan = chain(9 * GIB).lower(*args).plan
    assert plan.card and not any("no fit" in line for line in plan.card)
    assert any("a budget 'auto' is 7 GiB of a card of 9 GiB" in note for note in plan.notes), plan.notes
    with pytest.raises(PlanError, match=r"no plan found within|least"):
        chain(8 * GIB).lower(*args)


def test_what_is_reserved_is_no_plan_s(tmp_path: Any) -> None:
    base = PRESETS["8xh100"]
    topology = attrs.evolve(base, reserved_bytes=3 * GIB)
    assert Mesh(dp=2, topology=topology).capacity_bytes("device") == 80 * 10**9 - 3 * GIB
    topology.save(tmp_path / "t.json")
    assert Topology.load(tmp_path / "t.json") == topology != base
    with pytest.raises(TopologyError, match="reserves 80,000,000,000 of the device's 80,000,000,000 bytes"):
        attrs.evolve(base, reserved_bytes=80 * 10**9)


# ---- the machine


def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ w).sum()


ARGS = (torch.ones(4, 4), torch.ones(4, 4))


def test_a_mesh_without_topology_is_planned_for_the_card_that_it_runs_on() -> None:
    with Machine(cards=2, capacity_bytes=81559 * MIB):
        low = cf.shard(step, Mesh()).lower(*ARGS)
        topology = low.priced.topology
        assert (topology.name, topology.node_devices, topology.levels[0].size) == ("2xh100 (found)", 2, 2)
        assert topology.tier("device").capacity_bytes == 81559 * MIB and topology.reserved_bytes == GIB
        host_bytes = env.memory_limit_bytes()
        assert host_bytes is None or topology.tier("host").capacity_bytes == int(0.8 * host_bytes)
        assert topology.device == PRESETS["h100"].device
        assert any("1 GiB are left to" in note for note in low.plan.notes) and low.priced.capacity_bytes("device") == 80535 * MIB
        for mesh, name in (
            (Mesh(device="cpu"), "gloo-cpu"), (Mesh(dp=2), "gloo-cpu"), (Mesh(dp=2, device="cuda"), "2xh100 (found)"),
            (Mesh(topology="a100-40g"), "a100-40g"), (Mesh(dp=2, device="cuda", topology="gloo-cpu"), "gloo-cpu"),
        ):  # fmt: skip
            assert cf.shard(step, mesh).lower(*ARGS).priced.topology.name == name
    assert cf.shard(step, Mesh()).lower(*ARGS).priced.topology.name == "gloo-cpu"


@pytest.mark.parametrize("axes", [{}, {"dp": 4}])
def test_a_mesh_that_wants_gpus_where_there_are_none_is_planned_for_the_stated_default(axes: dict[str, int]) -> None:
    priced = cf.shard(step, Mesh(**axes, device="cuda")).lower(*ARGS).priced
    assert priced.topology.name == "8xh100 (assumed)" and priced.topology.levels == PRESETS["8xh100"].levels
    assert priced.capacity_bytes("device") == 80 * 10**9 - (3 if axes else 1) * GIB


def test_a_plan_leaves_the_margin_to_others() -> None:
    """What fits on the card as it is bought does not fit on it as it is used."""
    rows = 13 * GIB // 8 // 1024  # 6.5 GiB
    with Machine(capacity_bytes=8 * GIB):
        args = cf.abstract((rows, 1024)), cf.abstract((1024, 4))
        assert cf.shard(step, Mesh()).lower(*args).memory().peak_bytes["device"] > 6.5 * GIB
    with Machine(capacity_bytes=7 * GIB), pytest.raises(PlanError, match="no plan found within"):
        cf.shard(step, Mesh()).lower(*args)


def test_a_budget_auto_leaves_more_than_one_that_is_said() -> None:
    rows = 12 * GIB // 8 // 1024  # 6 GiB
    args = cf.abstract((rows, 1024)), cf.abstract((1024, 4))
    with Machine(capacity_bytes=15 * GIB // 2):  # of which plans may use 6.6 GiB
        plain = cf.shard(step, Mesh())
        assert cf.checkpoint(plain, budget="6.5GiB").lower(*args).plan.peak_bytes > 6 * GIB
        assert not any("auto" in note for note in plain.lower(*args).plan.notes)
        with pytest.raises(PlanError, match=r"no plan found within|least"):
            cf.checkpoint(plain).lower(*args)
    with Machine(capacity_bytes=9 * GIB):
        notes = cf.checkpoint(cf.shard(step, Mesh())).lower(*args).plan.notes
        assert any("a budget 'auto' is 7 GiB of a card of 9 GiB" in note for note in notes), notes


@pytest.mark.parametrize(
    ("name", "shows", "levels"),
    [
        ("NVIDIA H100 PCIe", "8xh100-pcie (found)", ["pcie", "infiniband"]),
        ("NVIDIA A100 80GB PCIe", "8xa100-80g (found)", ["pcie", "infiniband"]),
        ("NVIDIA B200", "8xb200 (found)", ["nvlink", "infiniband"]),
        ("AMD Instinct MI300X", "8xmi300x (found)", ["infinity", "infiniband"]),
        ("NVIDIA RTX 6000 Ada Generation", "NVIDIA RTX 6000 Ada Generation (estimated)", ["pcie", "ethernet"]),
    ],
)  # fmt: skip
def test_links_are_those_of_the_card(monkeypatch: pytest.MonkeyPatch, name: str, shows: str, levels: list[str]) -> None:
    said = SimpleNamespace(name=name, major=8, minor=9, multi_processor_count=142, total_memory=48 * GIB)
    with Machine(capacity_bytes=48 * GIB):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: said)
        found = found_topology(8, 8, CARD)
        assert found.name == shows and [level.name for level in found.levels] == levels
        assert found.reserved_bytes == 3 * GIB and Topology.from_dict(found.to_dict()) == found
        if "estimated" in shows:
            assert rate(found, "float16") == pytest.approx(2 * 82.6e12 * 142 / 128 * 0.8)
            said.memory_clock_rate, said.memory_bus_width = 10_001_000, 384  # which newer versions of torch say
            assert found_topology(8, 8, CARD).device.memory_bytes_per_s == pytest.approx(960.1e9 * 0.9, rel=1e-3)


def test_ranks_on_gpus_are_planned_by_what_rank_0_says_and_measured_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    watch: Any = nullcontext()
    measured: list[str] = []

    def profiled(mesh: Mesh, *rest: Any) -> Topology:
        measured.append(mesh.topology.name)
        return attrs.evolve(mesh.topology, name="measured")

    monkeypatch.setattr(machine, "_found", profiled)
    monkeypatch.setattr(machine, "on_gpu", lambda mesh: True)
    monkeypatch.setattr(machine, "_FOUND", {})
    mesh, told = Mesh(dp=8), []
    for switch, name in (("off", "8xh100 (found)"), ("", "8xh100 (found)"), ("on", "measured")):
        monkeypatch.setenv("COLOFUNC_MEASURE", switch)
        monkeypatch.setattr(machine, "_FOUND", {})
        with Machine(cards=8) as _:
            monkeypatch.setattr(machine, "device_of", lambda mesh: CARD)
            priced = machine.as_measured(mesh, watch, told.append)
            assert priced.topology.name == name and priced.topology.reserved_bytes == 3 * GIB
    assert measured == ["8xh100 (found)"] and priced == machine.as_measured(priced, watch, told.append)


def test_a_profile_of_a_card_begins_with_what_it_says_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Links that nobody timed, and the margin."""
    monkeypatch.setattr("colofunc.mesh.device_profile.least_run_s", lambda run, device, repeats=5: 1e-3)
    monkeypatch.setattr("colofunc.mesh.attention_profile.least_run_s", lambda run, device: 1e-3)
    with Machine(cards=8, capacity_bytes=80 * GIB):
        found = profile_mesh(Mesh(dp=8), seconds=0.0)
        assert found.name == "8xh100 (found) (measured)" and found.levels[0].name == "nvlink"
        named = profile_mesh(Mesh(dp=8, topology="8xa100-80g"), seconds=0.0)
        assert named.levels == PRESETS["8xa100-80g"].levels
        assert found.reserved_bytes == named.reserved_bytes >= 3 * GIB


# ---- parts of axes


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_of_a_measured_axis_has_the_axis_own_links(kind: str) -> None:
    """Not those of a preset, which nobody measured: a hundred times slower links make a part as much slower."""
    plain = Mesh(dp=8, topology="8xa100-80g")
    for slower in (1.0, 100.0):
        figures = tuple(Measured("dp", 8, k, *(slower * seconds for seconds in plain.alpha_beta(k, ("dp",)))) for k in KINDS)
        mesh = plain.with_topology(attrs.evolve(plain.topology, measured=figures))
        for parts in (("dp[1:2]",), ("dp[2:4]",), ("dp[4:2]",)):
            assert mesh.alpha_beta(kind, parts) == pytest.approx(tuple(slower * seconds for seconds in plain.alpha_beta(kind, parts)))
        assert mesh.alpha_beta(kind, ("dp[4:2]", "dp[1:4]"))[1] >= mesh.alpha_beta(kind, ("dp[1:4]",))[1] > 0


def test_a_part_inside_of_a_node_is_as_much_faster_as_its_links_are() -> None:
    """16 ranks in two nodes, measured as one axis: its minor part never leaves a node."""
    box = PRESETS["8xa100-80g"]
    plain = Mesh(dp=16, topology=box)
    alpha_s, beta_s = plain.alpha_beta("all_gather", ("dp",))
    mesh = Mesh(dp=16, topology=attrs.evolve(box, measured=(Measured("dp", 16, "all_gather", 3 * alpha_s, 3 * beta_s),)))
    inside, across = mesh.alpha_beta("all_gather", ("dp[1:8]",)), mesh.alpha_beta("all_gather", ("dp[8:2]",))
    assert inside == pytest.approx(tuple(3 * s for s in plain.alpha_beta("all_gather", ("dp[1:8]",)))) and inside[1] < across[1]
    free = Mesh(dp=8, topology=attrs.evolve(PRESETS["ideal"], measured=(Measured("dp", 8, "permute", 1e-3, 1e-9),)))
    assert free.alpha_beta("permute", ("dp[1:2]",)) == (1e-3, 1e-9)
