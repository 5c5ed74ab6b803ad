"""Topologies: presets, names, files, and the profiler with and without processes."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from pretended import Machine

from colofunc import env
from colofunc.errors import MeshError, TopologyError
from colofunc.executors.launch import launch
from colofunc.mesh import (
    KINDS,
    PRESETS,
    TIERS,
    Level,
    Mesh,
    Topology,
    attention_profile,
    device_profile,
    profile,
    resolve_topology,
    stopwatch,
)
from colofunc.mesh.curves import HOST_KERNEL, AttentionRate, WorkRate
from colofunc.mesh.curves import KINDS as KERNELS
from colofunc.mesh.presets import SHEETS
from colofunc.mesh.profile import fit, profile_mesh
from colofunc.mesh.topology import Rate

CARD = torch.device("cuda", 0)

# --- presets and names


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_are_whole(name: str) -> None:
    topology = PRESETS[name]
    assert topology.name == name and resolve_topology(name) == topology
    assert {"float64", "float32", "float16"} <= {rate.dtype for rate in topology.device.rates}
    assert topology.max_devices is None, "further nodes are joined by the outer level"
    ends = {(link.src, link.dst) for link in topology.links}
    assert ends == {("device", "host"), ("host", "device"), ("host", "disk"), ("disk", "host")}
    capacities = [topology.tier(tier).capacity_bytes for tier in TIERS]
    if name in ("ideal", "gloo-cpu"):
        assert capacities == [None] * 3
    else:
        device, host, disk = (capacity or 0 for capacity in capacities)
        assert 6 * 10**9 <= device <= 192 * 10**9 and device < host < disk
        inner = [level.bandwidth_bytes_per_s for level in topology.levels]
        assert inner == sorted(inner, reverse=True) and topology.device.memory_bytes_per_s > inner[0]


def test_published_figures() -> None:
    known = {
        "8xa100-80g": (312e12, 2039e9, 80), "8xa100-40g": (312e12, 1555e9, 40), "8xh100": (989.5e12, 3350e9, 80),
        "8xh200": (989.5e12, 4800e9, 141), "8xv100": (125e12, 900e9, 32), "8xv100-16g": (125e12, 900e9, 16),
        "8xb200": (2250e12, 8000e9, 180), "4xgb200": (2500e12, 8000e9, 186), "8xl40s": (362.05e12, 864e9, 48),
        "8xmi300x": (1307.4e12, 5300e9, 192), "rtx5090": (209.6e12, 1792e9, 32), "rtx4090": (165.2e12, 1008e9, 24),
        "rtx3090": (71e12, 936.2e9, 24), "rtx3080": (59.6e12, 760.3e9, 10), "rtx3060": (25.4e12, 360e9, 12),
        "8xh100-pcie": (756.5e12, 2000e9, 80), "8xh100-nvl": (835.5e12, 3900e9, 94), "8xh800": (989.5e12, 3350e9, 80),
        "8xh20": (148e12, 4000e9, 96), "8xl4": (121e12, 300e9, 24), "8xa10g": (70e12, 600e9, 24),
        "rtx3050": (18.2e12, 224e9, 8), "rtx2070": (29.9e12, 448e9, 8), "rtx2060": (25.8e12, 336e9, 6),
    }  # fmt: skip
    for name, (half, memory, gigabytes) in known.items():
        sheet = resolve_topology(f"{name}:datasheet")
        assert {rate.dtype: rate.flops_per_s for rate in sheet.device.rates}["float16"] == half
        assert (sheet.device.memory_bytes_per_s, sheet.tier("device").capacity_bytes) == (memory, gigabytes * 10**9)


def test_a_node_of_any_size() -> None:
    four = resolve_topology("4xa100-80g")
    assert (four.node_devices, four.levels[0].size, four.levels[1].size) == (4, 4, None)
    assert attrs.evolve(resolve_topology("8xv100-32g"), name="8xv100") == PRESETS["8xv100"]
    assert resolve_topology("a100-40g").levels[0].name == "infiniband"


@pytest.mark.parametrize("card", ["2060", "2070", "3050", "3060", "3080", "3090", "4090", "5090"])
def test_cards_go_by_their_numbers(card: str) -> None:
    for name in (card, f"rtx-{card}"):
        assert resolve_topology(name).device == PRESETS[f"rtx{card}"].device
    assert resolve_topology(f"2x{card}").node_devices == 2


def test_trays_of_a_rack_are_one_domain() -> None:
    """72 devices share links, 4 of them a host."""
    rack = SHEETS["4xgb200"]
    assert (rack.node_devices, rack.levels[0].size, rack.levels[1].size) == (4, 72, None)
    rank_bytes, ranks = 1e9 / 72, 72
    seconds = Mesh(dp=ranks, topology=rack).collective_s("all_gather", 1e9, ("dp",))
    assert seconds == pytest.approx((ranks - 1) * (rank_bytes / 900e9 + 3e-6), rel=1e-6)


def test_ideal_is_free_but_computing_is_not() -> None:
    mesh = Mesh(dp=2, tp=2, topology="ideal")
    assert all(mesh.collective_s(kind, 1e12, ("dp", "tp")) == 0.0 for kind in KINDS)
    assert mesh.copy_s(1e12, "device", "disk") == 0.0
    assert mesh.compute_s(2e9, 0, "float32") == 2 * mesh.compute_s(1e9, 0, "float32") > 0.0


def test_names_of_plugins_come_first() -> None:
    mine = attrs.evolve(PRESETS["ideal"], name="mine")
    assert resolve_topology("mine", {"mine": mine}) is mine
    assert resolve_topology(mine) is mine


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("8xa100-80gb", "no topology '8xa100-80gb'; did you mean '8xa100-80g'"),
        ("0xh100", "no topology '0xh100'"),
        ("8xh1000:datasheet", "no topology '8xh1000:datasheet'"),
        ("ideal:datasheet", "topology 'ideal:datasheet' has no data sheet; leave out ':datasheet'"),
        ("", "no topology ''"),
        (3, "topology is 3; give a name, a path or a Topology"),
        ("nowhere/box.json", "cannot read topology file 'nowhere/box.json': No such file or directory; name a file that is there, or"),
    ],
)
def test_unknown_names_say_what_is_near(name: str, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        resolve_topology(name)


# --- files


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_files_give_back_what_was_saved(name: str, tmp_path: Path) -> None:
    measured = tuple(fit("dp", 2, kind, [(1000, 1e-3), (10**6, 3e-3)]) for kind in KINDS)
    topology = attrs.evolve(PRESETS[name], measured=measured)
    topology.save(tmp_path / "t.json")
    assert Topology.load(tmp_path / "t.json") == topology


def broken(tmp_path: Path, *where: str | int, value: object) -> Path:
    """A saved topology with one value replaced (or added)."""
    path = tmp_path / "t.json"
    PRESETS["8xh100"].save(path)
    data = json.loads(path.read_text())
    at = data
    for key in where[:-1]:
        at = at[key]
    if value is ...:
        del at[where[-1]]
    else:
        at[where[-1]] = value
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (("level",), [], "topology has an unknown field 'level'; did you mean 'levels'"),
        (("levels", 0, "bandwith"), 1, r"levels\[0\] has an unknown field 'bandwith'; did you mean 'bandwidth_byte"),
        (("device", "launch_s"), ..., "device lacks the field 'launch_s'"),
        (("device", "rates", 0, "flops_per_s"), "fast", r"device.rates\[0\].flops_per_s is 'fast'"),
        (("levels", 0, "size"), 8.5, r"levels\[0\].size is 8.5; it must be of type int"),
        (("levels", 0, "latency_s"), -1, "Level.latency_s is -1.0; give a finite number, 0 or more"),
        (("levels", 0, "sharing"), "devices", r"levels\[0\].sharing is 'devices'; did you mean 'device'"),
        (("tiers", 0, "name"), "vram", "Tier.name is 'vram'"),
        (("tiers",), [], "has tiers \\[\\]; give exactly device, host, disk"),
        (("links", 0, "shared"), 1, r"links\[0\].shared is 1; it must be of type bool"),
        (("node_devices",), True, "topology.node_devices is True; it must be of type int"),
        (("colofunc_topology",), 99, "has format version 99, this colofunc reads 1"),
    ],
)
def test_bad_files_name_the_field(where: tuple[str | int, ...], value: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match=message):
        Topology.load(broken(tmp_path, *where, value=value))


def test_a_file_that_is_not_json(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text("{")
    with pytest.raises(TopologyError, match="is not JSON"):
        Topology.load(tmp_path / "t.json")


@pytest.mark.parametrize("sizes", [(8, 4), (8, 12), (None, 8), (None, None)])
def test_levels_must_nest(sizes: tuple[int | None, ...]) -> None:
    levels = tuple(Level(f"l{i}", size, 1e9, 0.0) for i, size in enumerate(sizes))
    with pytest.raises(TopologyError, match="list levels from the inside out"):
        attrs.evolve(PRESETS["ideal"], levels=levels)


# --- profiling


@given(st.floats(0, 1e-2), st.floats(1e-12, 1e-6))
def test_the_fit_finds_an_exact_line(alpha_s: float, beta: float) -> None:
    points = [(n, alpha_s + beta * n) for n in (1 << 12, 1 << 16, 1 << 20, 1 << 24)]
    found = fit("dp", 2, "all_reduce", points)
    for n, seconds in points:
        assert found.alpha_s + found.beta_s_per_byte * n == pytest.approx(seconds, rel=1e-6)


def test_the_fit_is_never_negative() -> None:
    found = fit("dp", 2, "permute", [(1000, 1e-3), (2000, 1e-3), (4000, 9e-4)])
    assert found.alpha_s > 0.0 and found.beta_s_per_byte == 0.0
    found = fit("dp", 2, "permute", [(1000, 1e-6), (2000, 1e-5), (4000, 1e-4)])
    assert found.alpha_s == 0.0 and found.beta_s_per_byte > 0.0


def test_profile_of_one_process_keeps_the_collectives(tmp_path: Path) -> None:
    mesh = Mesh(dp=2, tp=2, device="cpu")
    found = profile_mesh(mesh, seconds=0.2)
    assert (found.name, found.levels, found.measured) == ("gloo-cpu (measured)", mesh.topology.levels, ())
    assert found.device != mesh.topology.device
    # Figures of a machine, not of a bug: above a megaflop and a megabyte, below what any CPU reaches.
    for rate in found.device.rates:
        assert 1e6 < rate.flops_per_s < 1e15
    speeds = [found.device.memory_bytes_per_s, found.host_bytes_per_s, *(link.bandwidth_bytes_per_s for link in found.links)]
    assert all(1e6 < speed < 2e12 for speed in speeds)
    assert 0.0 < found.device.launch_s < 0.1 and 0.0 < found.device.host_view_s < 0.1 and found.device.sustained == 1.0
    assert {curve.kind for curve in found.device.work} <= set(KERNELS) and found.device.work_rate("product", "float32") is not None
    assert found.tier("host").capacity_bytes == env.memory_limit_bytes()
    found.save(tmp_path / "t.json")
    assert Mesh(dp=2, tp=2, topology=tmp_path / "t.json", device="cpu") == mesh.with_topology(found)


def test_all_kinds_of_kernels_are_measured_where_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_profile, "BYTES_OF_WORK", (1 << 16, 1 << 14))
    cpu = torch.device("cpu")
    found = device_profile.work_rates(cpu, 1e-6, math.inf)
    assert {"product", *found} == set(KERNELS) and all(len(points) == 2 for points in found.values())
    assert all(points[0] < points[1] and 1e6 < rate < 1e13 for points in found.values() for _, rate in points)
    assert not device_profile.work_rates(cpu, 1e-6, 0.0)


@pytest.mark.parametrize("has_instructions", [True, False])
def test_int8_is_measured_as_it_is_multiplied(has_instructions: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its instructions where the CPU has them, in float32 elsewhere; in no case the preset's figure stays."""
    monkeypatch.setattr(device_profile.compat, "has_int_mm_on_cpu", lambda: has_instructions)
    monkeypatch.setattr(device_profile, "least_run_s", lambda run, device: 1.0 if run() is None else 2.0)
    monkeypatch.setattr(device_profile, "_product", lambda n, dtype, device: lambda: None)
    monkeypatch.setattr(device_profile, "_int8_product", lambda n, device: lambda: n)
    found = device_profile.product_rates(torch.device("cpu"), math.inf)
    seconds = 2.0 if has_instructions else 1.0
    work = 2.0 * device_profile.LEAST_WIDE**3
    assert found["int8"] == ((work, work / seconds),)


def test_each_kernel_of_attention_that_the_device_runs_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a host: its own, and one that looks at all pairs; a card's kernels are not there, which leaves them out."""
    cpu, attends = torch.device("cpu"), torch.nn.functional.scaled_dot_product_attention

    def dense(batch: int, heads: int, length: int, head: int, device: torch.device) -> attention_profile.Calls:
        q = torch.ones(batch, heads, length, head, requires_grad=True)
        out = attends(q, q, q, torch.ones(length, length).tril().log())
        return lambda: attends(q, q, q), lambda: torch.autograd.grad(out.sum(), q, retain_graph=True)

    kernels = attention_profile.KERNELS["cuda"] | attention_profile.KERNELS["cpu"] | {"dense": dense}
    monkeypatch.setattr(attention_profile, "KERNELS", {"cpu": kernels})
    monkeypatch.setattr(attention_profile, "LENGTHS", (32, 64))
    found = attention_profile.attention_rates(cpu, math.inf)
    keys = {key: [keys for keys, *_ in points] for key, points in found.items()}
    assert keys == {(kernel, head): [16.0, 32.0] for kernel in (HOST_KERNEL, "dense") for head in (64, 128)}
    assert all(1e6 < rate < 1e13 for points in found.values() for _, *rates in points for rate in rates)
    curves = tuple(attention_profile.attention_curves(found, "measured"))
    assert [(one.kernel, one.head, one.points) for one in curves] == [(*key, points) for key, points in found.items()]
    assert not attention_profile.attention_rates(cpu, 0.0)


def test_a_card_has_three_kernels_of_attention() -> None:
    with Machine(cards=1):
        found = attention_profile.attention_rates(CARD, math.inf)
    assert {kernel for kernel, _ in found} == {"flash", "cudnn", "efficient"} and len(found) == 6
    assert all([keys for keys, *_ in points] == [8.0, 16.0] for points in found.values())


def test_devices_that_are_joined_in_pairs_use_the_links_to_their_peers() -> None:
    """Two of four have a third of a device's links; a shift has one peer, however many take part; between boxes nothing changes."""
    switched, pairs = SHEETS["8xh100"].levels[0], SHEETS["4xh100-hgx"]
    assert (pairs.levels[0].size, pairs.node_devices) == (4, 4) and pairs.levels[0].bandwidth_bytes_per_s == switched.bandwidth_bytes_per_s
    board, box = (Mesh(pp=2, dp=2, tp=2, topology=f"{name}:datasheet") for name in ("4xh100-hgx", "4xh100"))
    times = {("tp",): 3.0, ("dp",): 3.0, ("dp", "tp"): 1.0, ("pp",): 1.0}
    for axes, longer in times.items():
        for kind in ("all_gather", "all_to_all"):
            (alpha_s, beta_s), (alpha_board_s, beta_board_s) = box.alpha_beta(kind, axes), board.alpha_beta(kind, axes)
            assert alpha_board_s == alpha_s and beta_board_s == pytest.approx(longer * beta_s)
    assert board.alpha_beta("permute", ("dp", "tp"))[1] == pytest.approx(3 * box.alpha_beta("permute", ("dp", "tp"))[1])


def test_what_programs_attain_counts_contention_and_a_data_sheet_does_not() -> None:
    for name in ("8xh100", "8xl40s"):  # with a file of its own, and without
        assert resolve_topology(f"{name}:datasheet").device.contention == 0.0 and resolve_topology(name).device.contention == 0.189
    assert "contention" not in SHEETS["8xh100"].to_dict()["device"]


def test_kernels_of_attention_that_are_not_measured_keep_their_rates() -> None:
    given = (("flash", 2.0), ("flash", 1.0), ("cudnn", 3.0))
    flash, old, cudnn = (AttentionRate(kernel, 64, ((1.0, rate, rate),), "x") for kernel, rate in given)
    assert attention_profile.beside_known((flash,), (old, cudnn)) == (flash, cudnn)
    assert attention_profile.beside_known((), (old, cudnn)) == (old, cudnn)


def test_the_best_of_all_rounds_counts() -> None:
    first, second = {"softmax": ((1.0, 5.0), (2.0, 7.0))}, {"softmax": ((2.0, 9.0), (4.0, 1.0)), "gather": ((1.0, 3.0),)}
    assert device_profile._best(first, second) == {"softmax": ((1.0, 5.0), (2.0, 9.0), (4.0, 1.0)), "gather": ((1.0, 3.0),)}


def test_measured_figures_stand_beside_those_of_a_preset() -> None:
    """In the sizes that were measured; the preset has no curve of its own for them."""
    preset = SHEETS["8xh100"]
    curve, rates = WorkRate("elementwise", "bfloat16", ((1 << 20, 1e12), (1 << 24, 2e12)), "measured"), (Rate("bfloat16", 6e14),)
    found = attrs.evolve(preset, name="mine", device=attrs.evolve(preset.device, rates=rates, sustained=0.75, work=(curve,)))
    text = found.diff(preset)
    assert text.startswith("mine beside 8xh100:\n") and found.figures()["bfloat16 elementwise of 1 MiB, GB/s"] == 1000
    assert "  bfloat16 products at best, TFLOP/s: 800, 989.5 there (0.81)" in text
    assert "  part of products' rate that steps have left: 0.75, 1 there (0.75)" in text
    assert "  bfloat16 elementwise of 16 MiB, GB/s: 2000, 3350 there (0.60)" in text
    mesh = Mesh(topology=found)
    between_s = mesh.compute_s(0.0, 1 << 22, "bfloat16", "elementwise") - found.device.launch_s
    assert math.isclose(between_s, (1 << 22) / 1.5e12)  # half way between both sizes, by their logarithms
    assert mesh.compute_s(0.0, 1 << 22, "bfloat16", "softmax") == mesh.compute_s(0.0, 1 << 22, "bfloat16")  # nothing is known of these


def test_rates_of_kernels_say_what_is_wrong() -> None:
    with pytest.raises(TopologyError, match=r"WorkRate\.kind is 'softmx'; did you mean 'softmax'"):
        WorkRate("softmx", "float32", ((1.0, 1.0),), "measured")
    with pytest.raises(TopologyError, match="least work first"):
        WorkRate("softmax", "float32", ((2.0, 1.0), (1.0, 1.0)), "measured")


def test_what_was_said_of_ranks_that_are_not_measured_stays() -> None:
    mesh = Mesh(pp=2, device="cpu", topology=PRESETS["gloo-cpu"].with_rank(1, speed=0.5))
    assert profile_mesh(mesh, seconds=0.1).ranks == mesh.topology.ranks


@pytest.mark.parametrize("threads", [1, 2])
def test_a_run_that_another_program_interrupts_counts_for_nothing(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread by its own seconds, whoever interrupts it; several by the wall, and the least of some runs. Collectives by the wall."""
    wall, own = [0.0], [0.0]
    others = iter([0.0, 0.3, 0.0, 0.7, 2.0, 0.1] + 6 * [0.5])  # seconds of other programs in each run, the first while it warms up

    def run() -> None:
        own[0] += 0.001
        wall[0] += 0.001 + next(others)

    monkeypatch.setattr(stopwatch, "time", SimpleNamespace(perf_counter=lambda: wall[0], thread_time=lambda: own[0]))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert math.isclose(stopwatch.least_run_s(run, torch.device("cpu"), 5), 0.001)
    always_s = 0.001 if threads == 1 else 0.501
    assert math.isclose(stopwatch.least_run_s(run, torch.device("cpu"), 1), always_s)
    assert math.isclose(stopwatch.least_run_s(run, torch.device("cpu"), 1, by_host=True), 0.501)


def machine(name: str, flops_per_s: float, capacity_bytes: int) -> Topology:
    base = PRESETS["8xa100-80g"]
    device = attrs.evolve(base.device, name=name, rates=(Rate("float32", flops_per_s), Rate("bfloat16", 4 * flops_per_s)))
    tiers = tuple(attrs.evolve(tier, capacity_bytes=capacity_bytes) if tier.name == "device" else tier for tier in base.tiers)
    return attrs.evolve(base, device=device, tiers=tiers)


def said(topology: Topology) -> list[tuple[int, float, int | None]]:
    return [(device.rank, round(device.speed, 9), device.capacity_bytes) for device in topology.ranks]


def test_ranks_that_measure_otherwise_are_said_to() -> None:
    """A difference of a tenth is none. Of devices of one name and memory it counts where it is asked for."""
    each = [machine("a", 1e12, 40 << 30), machine("a", 1.05e12, 40 << 30), machine("a", 5e11, 40 << 30)]
    assert profile._with_ranks(each, None) == each[0] == profile._with_ranks(each, False)
    assert said(profile._with_ranks(each, True)) == [(2, 0.5, None)]
    each[2] = machine("a", 5e11, (40 << 30) - (1 << 20))  # some pages less
    assert profile._with_ranks(each, None) == each[0]
    each = [machine("a", 1e12, 40 << 30), machine("b", 2e12, 40 << 30), machine("b", 1e12, 24 << 30)]
    assert said(profile._with_ranks(each, None)) == [(1, 2.0, None), (2, 1.0, 24 << 30)]


def test_profile_needs_two_sizes() -> None:
    with pytest.raises(MeshError, match="do not fix a line"):
        profile_mesh(Mesh(), sizes=(1024, 1024))


def test_memory_limit_is_within_the_machine() -> None:
    limit = env.memory_limit_bytes()
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert limit is not None and 0 < limit <= machine


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_profile_of_a_gpu() -> None:
    found = profile_mesh(Mesh(topology="8xh100"), seconds=3)
    rates = {rate.dtype: rate.flops_per_s for rate in found.device.rates}
    assert rates["bfloat16"] > rates["float32"] > 1e12
    assert found.device.memory_bytes_per_s > found.links[0].bandwidth_bytes_per_s
    assert 0.5 < found.device.sustained <= 1.0 and found.device.launch_s < found.device.host_launch_s < 1e-4
    measured = {(one.kernel, one.head) for one in found.device.attention if one.source == "measured"}
    assert measured >= {(kernel, head) for kernel in ("flash", "efficient") for head in (64, 128)}
    assert all(1e13 < rate < 1e15 for one in found.device.attention for point in one.points for rate in point[1:])
    assert {curve.kind for curve in found.device.work} == set(KERNELS)
    assert math.isclose(found.tier("device").capacity_bytes or 0, torch.cuda.mem_get_info()[1], rel_tol=0.05)


def profile_on_two_ranks(path: str) -> list[Topology]:
    mesh = Mesh(dp=-1, one=1)
    assert mesh.size == 2 and mesh.rank == dist.get_rank() and mesh.is_main == (mesh.rank == 0)
    if mesh.rank == 1:  # a device of half the speed and another name
        as_it_is = profile._time_device

        def slower(*args: Any) -> Topology:
            found = as_it_is(*args)
            rates = tuple(attrs.evolve(rate, flops_per_s=rate.flops_per_s / 100) for rate in found.device.rates)
            return attrs.evolve(found, device=attrs.evolve(found.device, name="slow", rates=rates))

        profile._time_device = slower
    found = profile_mesh(mesh, sizes=(4096, 65536, 1 << 20, 1 << 33), seconds=1.0)
    with pytest.raises(MeshError, match="has 4 ranks, the process group 2"):
        profile_mesh(Mesh(dp=4))
    if mesh.is_main:
        found.save(path)
    return found


@pytest.mark.dist
def test_two_processes_measure_the_same_figures(tmp_path: Path) -> None:
    first, second = launch(profile_on_two_ranks, 2, str(tmp_path / "t.json"), timeout_s=120)
    assert first == second
    assert [device.rank for device in first.ranks] == [1] and first.rank(1).speed < 0.1
    found = Topology.load(tmp_path / "t.json")
    assert [(m.axis, m.size, m.kind) for m in found.measured] == [("dp", 2, kind) for kind in KINDS]
    mesh = Mesh(dp=2, topology=found)
    for kind in KINDS:
        # The buffer of 8 GiB was never made: a line through the smaller sizes tells its price.
        assert 1e-6 < mesh.collective_s(kind, 1 << 20, ("dp",)) < 1.0
