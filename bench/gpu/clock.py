"""Slice 9: is the clock right: the card as measured beside its preset, and planned steps beside measured ones."""

from __future__ import annotations

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
from colofunc.mesh.topology import Topology

NEAR = 0.1


def figures(topology: Topology) -> dict[str, float]:
    """What plans read of one device."""
    device = topology.device
    found = {f"{rate.dtype} products, TFLOP/s": rate.flops_per_s / 1e12 for rate in device.rates}
    found["its memory, GB/s"] = device.memory_bytes_per_s / 1e9
    found["a launch, microseconds"] = device.launch_s * 1e6
    for link in topology.links:
        if {link.src, link.dst} == {"host", "device"}:
            found[f"{link.src} to {link.dst}, GB/s"] = link.bandwidth_bytes_per_s / 1e9
    return found


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
    said, measured = figures(preset()), figures(profiled(setup))
    rows = [Row("topology that a mesh finds", preset().name)]
    for name, found in measured.items():
        beside = f", {said[name]:.4g} preset ({found / said[name]:.2f})" if said.get(name) else ""
        rows.append(Row(name, f"{found:.4g} measured{beside}"))
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
    Part("profile", profile), *(Part(f"model {k + 1}", partial(planned, k)) for k in range(len(REAL.clock))),
))  # fmt: skip
