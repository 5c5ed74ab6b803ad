"""Curves of devices: what the shipped files hold, that the clock gives back the published tables, and damaged files."""

import json
import math
import re

import attrs
import pytest
import torch

import colofunc as cf
import colofunc.mesh.attainable as attaining
from colofunc.errors import TopologyError
from colofunc.mesh import PRESETS, Mesh, Rate, presets
from colofunc.mesh import curves as curves_module
from colofunc.mesh.curves import (
    FOLDER,
    HOST_KERNEL,
    KINDS,
    AttentionRate,
    Tiles,
    WorkRate,
    attention_flops_per_s,
    curves_of,
    read_curves,
)
from colofunc.ops import attention_cuda as cuda
from colofunc.ops.attention_guards import BACKWARD, FORWARD, FUSED
from colofunc.ops.facts import Facts
from colofunc.ops.kernels import KernelCall, Like
from colofunc.plugins import build_registry
from colofunc.program.cost import node_s
from colofunc.program.ir import Node, Ref, Value
from colofunc.program.passes.kernels import capability_on, rates_of
from colofunc.program.work_kinds import work_kind

FILES = sorted(FOLDER.glob("*.json"))
# XLA, matmul_interpolator_data.h, sm_90, bfloat16: (m, n, k) -> TFLOP/s.
PRODUCTS = {
    (512, 256, 256): 11, (1024, 256, 1024): 68, (256, 1024, 4096): 172, (4096, 512, 512): 239, (256, 4096, 2048): 325,
    (1024, 1024, 2048): 350, (4096, 4096, 256): 392, (4096, 2048, 512): 447, (1024, 2048, 2048): 524, (2048, 2048, 2048): 632,
    (4096, 4096, 4096): 783,
}  # fmt: skip
# XLA, collective_interpolator_data.h, 8 of sm_90: bytes of the full tensor -> its bytes over seconds, GB/s.
GATHERED = {2 << 20: 63, 4 << 20: 87, 8 << 20: 134, 16 << 20: 195, 256 << 20: 368, 1 << 30: 391}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_speaks_of_presets_and_every_figure_has_a_source(path):
    curves = read_curves(path)
    assert curves.devices and set(curves.devices) <= set(PRESETS)
    sources = [one.source for one in (*curves.products, *curves.attention, curves.sustained, curves.memory, curves.links, curves.copies)]
    sources += [one.source for one in (curves.contention, curves.tiles) if one is not None]
    assert all(len(source) > 10 for source in (*sources, curves.launch_source, curves.latency_source))
    assert 0.5 < curves.sustained.share <= 1.0 and curves_of(curves.devices[0]) == curves


def test_a_device_that_is_not_there_yet_is_added_as_the_docs_say(tmp_path, monkeypatch):
    """An entry of `DEVICES` and of `_BOXES`, and a copied file with another name."""
    device, capacity_bytes = presets.DEVICES["h200"]
    old = Mesh(topology="8xh200").topology.device
    monkeypatch.setitem(presets.DEVICES, "h300", (attrs.evolve(device, name="h300"), 2 * capacity_bytes))
    monkeypatch.setitem(presets._BOXES, "h300", presets._BOXES["h200"])
    assert Mesh(topology="8xh300").topology.device.attention == ()  # as it has no file
    data = json.loads((FOLDER / "h200.json").read_text())
    data |= {"devices": ["h300"], "sustained": {"share": 1.0, "source": "no whole step was measured"}}
    (tmp_path / "h300.json").write_text(json.dumps(data))
    monkeypatch.setattr(curves_module, "_shipped", curves_module._shipped.__wrapped__)  # which has kept what it read
    monkeypatch.setattr(curves_module, "FOLDER", tmp_path)
    new = Mesh(topology="8xh300").topology.device
    assert new.attention == old.attention and new.contention == old.contention and new.sustained == 1.0
    assert new.flops_per_s["bfloat16"] == pytest.approx(old.flops_per_s["bfloat16"] / old.sustained)


def test_a_card_that_has_a_data_sheet_alone_is_written_down_as_the_page_says(tmp_path, monkeypatch):
    """Its own rates and memory, of which it reaches what the card that it is like does, and that card's kernels; by public names alone."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```$", (FOLDER.parents[2] / "docs" / "devices.md").read_text(), re.S | re.M)
    (block,) = (block for block in blocks if "l40.json" in block)
    exec(block, {})
    mesh, like = (cf.Mesh(dp=8, topology=name) for name in ("l40.json", "8xl40s"))
    rate, of_like = (one.topology.device.flops_per_s["bfloat16"] for one in (mesh, like))
    assert mesh.topology.device.name == "l40" and rate / of_like == pytest.approx(181.05 / 362.05)
    assert capability_on(mesh.topology) == capability_on(like.topology) == (8, 9)
    x, w = (torch.zeros(8192, 4096, dtype=torch.bfloat16, device="meta") for _ in range(2))
    seconds, others = (cf.shard(torch.nn.functional.linear, one).lower(x, w).plan.cost_s for one in (mesh, like))
    assert seconds > 1.5 * others


def products_off(tiles: Tiles | None) -> list[float]:
    """Logarithms of predicted over measured seconds of the 11 products, by the program's clock."""
    curves, topology = curves_of("h100"), Mesh(topology="h100").topology
    best = tuple(Rate(one.dtype, one.flops_per_s) for one in curves.products)  # one at a time, not a whole step of them
    mesh = Mesh(topology=attrs.evolve(topology, device=attrs.evolve(topology.device, rates=best, tiles=tiles)))
    off = []
    for (m, n, k), tflops in PRODUCTS.items():
        node = Node("aten.mm.default", (Ref(0), Ref(1)), (), (2,))
        values = {i: Value(i, size, torch.bfloat16) for i, size in enumerate(((m, k), (k, n), (m, n)))}
        seconds = node_s(node, values, mesh, build_registry().rule)
        off.append(math.log(seconds / (2e-12 * m * n * k / tflops)))
    return off


def test_products_of_many_sizes_take_what_was_measured():
    """By their tiles within 10 %, 6 % in the mean; by operations and bytes alone within 16 and 8 %."""
    for tiles, mean, worst in ((curves_of("h100").tiles, 0.062, 0.10), (None, 0.08, 0.16)):
        off = products_off(tiles)
        assert math.sqrt(sum(x * x for x in off) / len(off)) < mean and max(map(abs, off)) < worst


TILES = Tiles(processors=4, sizes=((8, 8), (2, 4)), ramp=10, best=(16, 16, 90), source="made up")


@pytest.mark.parametrize(
    ("size", "taken"),
    [
        ((16, 16, 90), 64 * 100),  # one wave of four large tiles
        ((16, 24, 90), 12 * 8 * 100),  # six large tiles are two waves of 64; 48 small ones, twelve waves of 8, end sooner
        ((2, 4, 30), 8 * 40),  # one small tile, and three processors that have nothing to do
        ((16, 16, 10), 64 * 20),  # the ramp is half of it
    ],
)
def test_a_product_waits_for_its_last_wave(size, taken):
    m, n, k = size
    at_best = 64 * 100 / (16 * 16 * 90)
    assert TILES.times(m, n, k) == pytest.approx(taken / (m * n * k) / at_best)


def test_a_batch_of_products_fills_processors_that_one_leaves_idle():
    assert TILES.times(2, 4, 30, batch=4) == pytest.approx(TILES.times(2, 4, 30) / 4)


@pytest.mark.parametrize(
    "call",
    [
        lambda a, b: torch.ops.aten.mm(a, b), lambda a, b: torch.nn.functional.linear(a, b.T),
        lambda a, b: torch.ops.aten.bmm(a.expand(3, -1, -1), b.expand(3, -1, -1)),
    ],
)  # fmt: skip
def test_sizes_of_a_product_are_told_by_what_it_reads_and_makes(monkeypatch, call):
    """Whatever its operator, and however its operands lie."""
    seen = []
    monkeypatch.setattr(Tiles, "times", lambda self, m, n, k, batch=1.0: seen.append((m, n, k, batch)) or 1.0)
    mesh = Mesh(topology="h100")
    cf.shard(call, mesh).lower(torch.zeros(24, 40), torch.zeros(40, 56)).lanes()
    batch = seen[0][3]
    assert batch in (1, 3) and sorted(seen[0][:3]) == [24, 40, 56]


def test_gathers_of_many_sizes_take_what_was_measured():
    mesh = Mesh(dp=8, topology="8xh100")
    for nbytes, rate in GATHERED.items():
        assert mesh.collective_s("all_gather", nbytes, ("dp",)) == pytest.approx(nbytes / (rate * 1e9), rel=0.25)


def attention(target: str, rows: int, head: int) -> KernelCall:
    q = Like((1, 16, rows, head), torch.bfloat16)
    names = dict(q=q, k=q, v=q, grad_out=q, out=q, lse=Like((1, 16, rows), torch.float32), bias=None, code=None, causal=True, window=0)
    more = dict(q_offset=None, k_offset=None, dropout=0.0, scale=None, grad_lse=None)
    return KernelCall(target, tuple((names | more).items()), (9, 0))


@pytest.mark.parametrize(("rows", "head", "tflops"), [(512, 64, 141), (2048, 128, 265), (16384, 128, 328), (16384, 64, 284)])
def test_attention_forward_and_backward_takes_what_was_measured(rows, head, tflops):
    rates = attrs.evolve(rates_of(Mesh(topology="h100").topology), launch_s=0.0)
    flash = {kernel.target: kernel for kernel in FUSED if kernel.fn in (cuda.flash, cuda.flash_backward)}
    seconds = sum(flash[target].cost_s(attention(target, rows, head), rates) for target in (FORWARD, BACKWARD))
    flops = 3.5 * 4 * 16 * head * rows * rows / 2
    assert seconds == pytest.approx(flops / (tflops * 1e12), rel=0.02)


def test_between_lengths_and_beyond_them():
    known = curves_of("h100").attention
    at = [attention_flops_per_s(known, "flash", 128, keys, False) for keys in (1, 256, 300, 512, 1 << 30)]
    assert at[0] == at[1] < at[2] < at[3] < at[4] == 328e12
    assert attention_flops_per_s(known, "flash", 64, 256, False) < attention_flops_per_s(known, "flash", 96, 256, True) < at[1]
    assert attention_flops_per_s(known, "nobody's", 64, 256, False) is None


def test_a_topology_with_rates_of_attention_is_a_file_like_any_other(tmp_path):
    topology = Mesh(topology="h100").topology
    topology.save(tmp_path / "mine.json")
    assert topology.device.attention and cf.Mesh(topology=tmp_path / "mine.json").topology == topology
    assert "attention" not in presets.SHEETS["h100"].to_dict()["device"]


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (("colofunc_curves",), 2, 'it does not begin with "colofunc_curves": 1'),
        (("memory", "share"), "much", "curves.memory.share is 'much'; it must be of type int or float"),
        (("memory", "share"), 7.0, "Share.share is 7.0; give a part above 0, at most 1"),
        (("products", 0, "source"), " ", "ProductRate.source is empty; say where the figure is from"),
        (("launch_s",), -1.0, "Curves.launch_s is -1.0; give a finite number above 0"),
        (("attention", 0, "points"), [], "AttentionRate of 'flash': points (); give numbers above 0, fewest keys first"),
        (("tiles", "processors"), 0, "Tiles.processors is 0; give a finite number above 0"),
        (("tiles", "sizes"), [], "Tiles: sizes () and best (2048, 2048, 13312); give at least one size, and numbers above 0"),
        (("spped",), 1, "curves has an unknown field 'spped'"),
    ],
)
def test_a_damaged_file_is_an_error_that_names_the_place(tmp_path, place, value, says):
    data = json.loads((FOLDER / "h100.json").read_text())
    at = data
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    path = tmp_path / "h100.json"
    path.write_text(json.dumps(data))
    with pytest.raises(TopologyError) as error:
        read_curves(path)
    assert says in str(error.value) and str(path) in str(error.value) and "docs/devices.md says what it holds" in str(error.value)


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        ("aten.mm.default", "product"), ("colofunc.linear", "product"), ("aten.gelu_backward.grad_input", "transcendental"),
        ("aten.tanh_backward.default", "elementwise"), ("aten.exp_.default", "transcendental"), ("aten.mul.out", "elementwise"),
        ("aten.native_layer_norm_backward.default", "normalisation"), ("aten._softmax_backward_data.default", "softmax"),
        ("aten.embedding_dense_backward.default", "gather"), ("colofunc.embedding_bag_backward", "gather"),
        ("colofunc.embedding_bag_factors_backward", "gather"), ("aten.sum.dim_IntList", "reduction"), ("colofunc.adamw_", "update"),
        ("colofunc.rms_norm", "normalisation"), ("colofunc.log_softmax_", "softmax"), ("colofunc.embedding_add_", "gather"),
        ("colofunc.sum_of_squares", "reduction"), ("colofunc.abs_max", "reduction"), ("colofunc.row_size", "reduction"),
        ("somebody.sum", "elementwise"),
    ],
)  # fmt: skip
def test_kinds_of_kernels(target, kind):
    assert work_kind(target) == kind and kind in KINDS


def test_a_kind_that_no_machine_has_rates_of_is_an_error():
    with pytest.raises(ValueError, match="Try: one of elementwise, transcendental, normalisation"):
        Facts(work="sums")


def test_a_kernel_takes_no_less_than_the_smallest_that_was_measured():
    """An update of a norm's weights has seven tensors to look at, however small they are."""
    curve = WorkRate("update", "float32", ((1e4, 1e9), (1e6, 4e9)), "measured")
    device = attrs.evolve(PRESETS["gloo-cpu"].device, work=(curve,))
    mesh = Mesh(topology=attrs.evolve(PRESETS["gloo-cpu"], device=device))
    taken_s = [mesh.compute_s(nbytes, nbytes, "float32", "update") - device.launch_s for nbytes in (1, 1e4, 1e5, 1e7)]
    assert taken_s == pytest.approx([1e-5, 1e-5, 1e5 / 2.5e9, 1e7 / 4e9])
    assert mesh.compute_s(0, 0, "float32", "update") == device.launch_s


def test_attention_of_a_host_takes_what_was_measured_of_it():
    known = (AttentionRate(HOST_KERNEL, 64, ((128.0, 2e10, 4e10),), "measured"),)
    base = Mesh(topology="gloo-cpu").topology
    mesh = Mesh(topology=attrs.evolve(base, device=attrs.evolve(base.device, attention=known)))
    q, k, v = (torch.zeros(2, 4, 256, 64) for _ in range(3))
    step = cf.shard(lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), mesh)
    flops = 4 * 64 * 2 * 4 * 256 * 256 / 2
    assert step.lower(q, k, v).lanes().end_s == pytest.approx(flops / 2e10 + base.device.launch_s)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(dtype="bfloat61"), "products of 'bfloat61' are none of the data sheet's, which has float64, .*; did you mean 'bfloat16'"),
        (dict(flops_per_s=1e18), r"products of 'bfloat16' reach 1e\+18 a second, more than the data sheet's 9.895e\+14"),
    ],
)
def test_products_are_of_the_data_sheet(monkeypatch, change, says):
    known = curves_of("h100")
    first = next(one for one in known.products if one.dtype == "bfloat16")
    products = (attrs.evolve(first, **change),)
    monkeypatch.setattr(attaining, "curves_of", lambda device: attrs.evolve(known, products=products))
    with pytest.raises(TopologyError, match=f"curves of 'h100': {says}"):
        attaining.attainable(presets.SHEETS["8xh100"])


def test_a_dtype_with_a_curve_of_its_own_goes_by_it(monkeypatch):
    known = curves_of("h100")
    first = next(one for one in known.products if one.dtype == "bfloat16")
    products = (*known.products, attrs.evolve(first, dtype="float16", flops_per_s=first.flops_per_s / 2))
    monkeypatch.setattr(attaining, "curves_of", lambda device: attrs.evolve(known, products=products))
    rates = {rate.dtype: rate.flops_per_s for rate in attaining.attainable(presets.SHEETS["8xh100"]).device.rates}
    assert rates["float16"] == pytest.approx(rates["bfloat16"] / 2)


# Bytes, then what `busbw` says of an all-reduce of them, GB/s. stas00/ml-engineering (B200), coreweave/nccl-tests@0120901 (H100, whose
# switches add up), NVIDIA/nccl-tests#119 (A100, four cards of 25 GB/s a box), ROCm/rocm-blogs@0e81c2c (MI300X, in a box without a switch).
REDUCED = {
    ("8xmi300x", 8): {1 << 20: 67, 4 << 20: 142, 16 << 20: 197, 64 << 20: 274, 256 << 20: 306, 1 << 30: 315, 16 << 30: 319},
    ("8xb200", 32): {1 << 20: 5, 16 << 20: 64, 256 << 20: 229, 1 << 30: 362, 16 << 30: 382},
    ("8xh100", 96): {512 << 20: 356, 1 << 30: 366, 8 << 30: 387},
}


@pytest.mark.parametrize("machine", REDUCED)
def test_all_reduces_take_what_was_measured(machine):
    """Over boxes and in one: large ones. Where there is little to send, within 1.45 times, as libraries change their ways up to 256 MB."""
    topology, ranks = machine
    mesh = Mesh(dp=ranks, topology=topology)
    off = []
    for nbytes, gb_s in REDUCED[machine].items():
        bus = 2 * (ranks - 1) / ranks * nbytes / mesh.collective_s("all_reduce", nbytes, ("dp",)) / 1e9
        off.append(abs(math.log(bus / gb_s)))
    assert max(off) < math.log(1.45) and off[-1] < 0.05, off


def test_an_all_reduce_over_boxes_is_bound_by_the_cards_of_a_box():
    box = PRESETS["8xa100-80g"]
    inner, outer = box.levels
    half = attrs.evolve(box, levels=(inner, attrs.evolve(outer, bandwidth_bytes_per_s=outer.bandwidth_bytes_per_s / 2)))
    seconds = Mesh(dp=24, topology=half).collective_s("all_reduce", 1 << 33, ("dp",))
    assert 2 * 23 / 24 * (1 << 33) / seconds == pytest.approx(96e9, rel=0.02)
