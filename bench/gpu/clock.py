"""Slice 9: is the clock right: the card as measured beside its preset, and planned steps beside measured ones."""

from __future__ import annotations

import math
from functools import partial

import torch

import colofunc as cf
from bench import Row
from bench.gpu.measuring import ids, staged_run, steps, training
from bench.gpu.models import Llama
from bench.gpu.parts import Part, Setup, Slice, not_run
from bench.gpu.sizes import REAL
from colofunc.mesh.detection import found_topology
from colofunc.mesh.profile import profile_mesh
from colofunc.mesh.stopwatch import least_run_s
from colofunc.mesh.topology import Topology

NEAR = 0.1


def preset() -> Topology:
    """What a mesh that names no topology is planned by on this card."""
    return found_topology(1, 1, torch.device("cuda", torch.cuda.current_device()))


def profiled(setup: Setup) -> Topology:
    """The card as measured, once in a process."""
    if "topology" not in setup.notes:
        setup.notes["topology"] = profile_mesh(cf.Mesh(device="cuda", topology=preset()), seconds=setup.sizes.profile_s)
    topology: Topology = setup.notes["topology"]
    return topology


def profile(setup: Setup) -> list[Row]:
    """Every figure that plans read, as measured beside the preset."""
    measured = profiled(setup).figures()
    said, rows = preset().figures(profiled(setup).device), [Row("topology that a mesh finds", preset().name)]
    for name, found in measured.items():
        if found == said.get(name):
            rows.append(Row(name, f"{found:.4g} of the preset, not measured"))
            continue
        beside = f", {said[name]:.4g} preset ({found / said[name]:.2f})" if said.get(name) else ""
        rows.append(Row(name, f"{found:.4g} measured{beside}"))
    return rows


def products(setup: Setup) -> list[Row]:
    """Products of many shapes on the card, beside what the clock says of them by the preset and by the profile."""
    device, rows = torch.device("cuda", torch.cuda.current_device()), []
    meshes = {name: cf.Mesh(topology=topology) for name, topology in (("preset", preset()), ("profile", profiled(setup)))}
    logs: dict[str, list[float]] = {name: [] for name in meshes}
    for m, n, k in setup.sizes.products:
        a, b = (torch.randn(*shape, device=device).to(torch.bfloat16) for shape in ((m, k), (k, n)))
        taken_s = least_run_s(lambda a=a, b=b: a @ b, device)  # type: ignore[misc]
        flops, moved, text = 2.0 * m * n * k, 2.0 * (m * k + k * n + m * n), []
        for name, mesh in meshes.items():
            expected_s = mesh.compute_s(flops, moved, "bfloat16", "product")
            logs[name].append(math.log(expected_s / taken_s))
            text.append(f"{1e6 * expected_s:.4g} by the {name} ({expected_s / taken_s:.2f})")
        rows.append(Row(f"bfloat16 product of {m} x {k} and {k} x {n}, microseconds", f"{1e6 * taken_s:.4g} measured, {', '.join(text)}"))
    for name, found in logs.items():
        off = math.sqrt(sum(x * x for x in found) / len(found))
        rows.append(Row(f"products by the {name}: root mean square of the logarithms' error", f"{off:.1%}"))
    return rows


def planned(k: int, setup: Setup) -> list[Row]:
    """A step as the preset and as the profile plan it, against the clock."""
    if k >= len(setup.sizes.clock):
        return [not_run("a planned step", "these sizes have fewer models")]
    of, topologies = setup.sizes.clock[k], {"preset": preset(), "profile": profiled(setup)}
    batch, rows = ids(of), []
    step_fn, state = training(lambda: Llama(of.shape, setup.sizes.dtype))
    expected = {}
    for name, topology in topologies.items():
        staged = cf.shard(step_fn, cf.Mesh(device="cuda", topology=topology))
        expected[name] = staged.lower(state, batch).lanes().end_s
    taken = steps(lambda: staged_run(staged, state, batch), setup.sizes.steps)
    for name, seconds in expected.items():
        off = seconds / taken.seconds - 1
        text = f"{1e3 * seconds:.4g} ms planned, {1e3 * taken.seconds:.4g} ms measured ({off:+.1%})"
        what = f"{of.shape.layers} layers, {of.shape.width} wide, {of.tokens:,} tokens, by the {name}"
        aim = (f"within {NEAR:.0%}", abs(off) <= NEAR) if name == "profile" else ("", None)
        rows.append(Row(what, text, *aim))
    return rows


SLICE = Slice(9, "The clock: profile against preset, planned against measured", (
    Part("profile", profile), Part("products", products), *(Part(f"model {k + 1}", partial(planned, k)) for k in range(len(REAL.clock))),
))  # fmt: skip
