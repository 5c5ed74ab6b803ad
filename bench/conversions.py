"""Conversions beside torch's `DTensor.redistribute` and beside moving one mesh dim at a time.

    python bench/conversions.py [--pairs 4000] [--write]

All major-only layouts of an (8, 8, 8) tensor on 2x2x2, pending sums included: 176, so 30,976 pairs. Bytes are what one
rank receives (ring algorithms). torch's are taken from its own plan of transforms, priced with the same formulas and
with NCCL's all-to-all for shard to shard; a step to or from a strided shard gathers first. The greedy takes mesh dims
in order and runs the one collective that brings each where it should be, gathering what is in the way.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import logging
import platform
import random
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor import _redistribute as torch_redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from colofunc.mesh import Mesh
from colofunc.spec.conversions.conversion import conversion_bytes, conversion_s
from colofunc.spec.layout import Layout, make_layout
from colofunc.spec.placements import to_placements

SHAPE, ITEMSIZE = (8, 8, 8), 4
RESULTS = Path(__file__).with_name("RESULTS.md")
MARK = "<!-- conversions -->"
Fronts = tuple[tuple[str, ...], ...]


def major_only(mesh: Mesh) -> list[tuple[Layout, Fronts]]:
    """Every layout with its axes per dim, major first."""
    found = []
    for places in itertools.product([0, 1, 2, "copy", "sum"], repeat=3):
        sets = [[a for a, p in zip(mesh.axis_names, places) if p == d] for d in range(3)]
        pending = tuple((a, "sum") for a, p in zip(mesh.axis_names, places) if p == "sum")
        for fronts in itertools.product(*map(itertools.permutations, sets)):
            dims = tuple((*((2, a) for a in front), (8 // 2 ** len(front), None)) for front in fronts)
            found.append((make_layout(dims, SHAPE, pending), fronts))
    return found


def greedy_bytes(src: tuple[Layout, Fronts], dst: tuple[Layout, Fronts], mesh: Mesh) -> int:
    """One mesh dim at a time, in order; every axis has 2 ranks."""
    now = [list(front) for front in src[1]]
    pending = {axis for axis, _ in src[0].pending}
    keep = {axis for axis, _ in dst[0].pending}
    goal = {axis: d for d, front in enumerate(dst[1]) for axis in front}
    total = 0

    def local() -> int:
        return 8**3 * ITEMSIZE // 2 ** sum(map(len, now))

    def fits(axis: str) -> bool:
        d = goal.get(axis)
        return d is not None and list(dst[1][d][: len(now[d]) + 1]) == [*now[d], axis]

    def gather(axis: str) -> None:
        nonlocal total
        home = next(front for front in now if axis in front)
        while axis in home:  # minor axes first
            total += local()
            home.pop()

    for axis in mesh.axis_names:
        if axis in pending and axis not in keep:
            total += local() if not fits(axis) else local() // 2
            if fits(axis):
                now[goal[axis]].append(axis)
        elif axis not in pending:
            home = next((front for front in now if axis in front), None)
            if home is not None and home is not now[goal[axis]] if axis in goal else home is not None:
                if home[-1] == axis and fits(axis):
                    total += local() // 2
                    home.pop()
                    now[goal[axis]].append(axis)
                else:
                    gather(axis)
    for d, front in enumerate(dst[1]):  # what stands in a wrong order is gathered; the rest is slicing
        while now[d] != list(front[: len(now[d])]):
            gather(now[d][-1])
    return total


def torch_bytes(src: DTensorSpec, dst: DTensorSpec, mesh: Mesh) -> int:
    """Bytes of torch's plan from one spec to another."""
    steps = torch_redistribute._gen_transform_infos(src, dst)
    steps = torch_redistribute._optimize_transform_infos(steps, src.mesh, src.placements, dst.placements)
    held = 8**3 * ITEMSIZE
    for placement in src.placements:
        held //= 1 if isinstance(placement, Replicate | Partial) else 2
    total = 0
    for step in steps:
        before, after = step.src_dst_placements
        flat = getattr(step, "mesh", None)
        n = (flat or src.mesh).size(step.mesh_dim)
        split = not isinstance(before, Replicate | Partial), not isinstance(after, Replicate | Partial)
        plain = not any(type(p).__name__ == "_StridedShard" for p in (before, after))
        if isinstance(before, Partial) and not isinstance(after, Partial):
            total += held * (n - 1) // n * (1 if split[1] and plain else 2)
        elif split[0] and (not split[1] or not plain):
            total += held * (n - 1)
        elif split[0]:
            total += held * (n - 1) // n
        held = held * (n if split[0] else 1) // (n if split[1] else 1)
    return total


def torch_specs(layouts: list[tuple[Layout, Fronts]], mesh: Mesh) -> list[DTensorSpec]:
    device_mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=mesh.axis_names)
    meta = TensorMeta(torch.Size(SHAPE), (64, 8, 1), torch.float32)
    return [DTensorSpec(device_mesh, to_placements(layout, mesh), tensor_meta=meta) for layout, _ in layouts]


def times(mesh: Mesh, pairs: list[tuple[Layout, Layout]]) -> tuple[list[float], float]:
    """CPU milliseconds of each first call, sorted; CPU microseconds of a later one."""
    cold = []
    for src, dst in pairs:
        start = time.process_time()
        conversion_s(src, dst, mesh, ITEMSIZE)
        cold.append(1e3 * (time.process_time() - start))
    start = time.process_time()
    for src, dst in pairs:
        conversion_s(src, dst, mesh, ITEMSIZE)
    return sorted(cold), 1e6 * (time.process_time() - start) / len(pairs)


def run(count: int) -> list[str]:
    mesh = Mesh(x=2, y=2, z=2, topology="ideal")
    layouts = major_only(mesh)
    every = list(itertools.product(layouts, layouts))
    cold, warm_us = times(mesh, [(a[0], b[0]) for a, b in every])
    real = Mesh(x=2, y=2, z=2, topology="8xa100-80g")
    shuffled = random.Random(0).sample(every, min(count, len(every)))
    real_cold, _ = times(real, [(a[0], b[0]) for a, b in shuffled])
    ours = {(a[0], b[0]): conversion_bytes(a[0], b[0], mesh, ITEMSIZE) for a, b in every}
    total, greedy = sum(ours.values()), sum(greedy_bytes(a, b, mesh) for a, b in every)
    assert all(greedy_bytes(a, b, mesh) >= ours[a[0], b[0]] for a, b in every)
    specs = dict(zip([layout for layout, _ in layouts], torch_specs(layouts, mesh)))
    theirs, same, ratio, refused, worse = 0, 0, [], 0, 0
    for (src, _), (dst, _) in shuffled:
        try:
            nbytes = torch_bytes(specs[src], specs[dst], mesh)
        except (AssertionError, NotImplementedError, RuntimeError, ValueError):
            refused += 1
            continue
        theirs, same = theirs + nbytes, same + ours[src, dst]
        worse += nbytes > ours[src, dst]
        assert nbytes >= ours[src, dst], (src, dst, nbytes, ours[src, dst])
        if ours[src, dst]:
            ratio.append(nbytes / ours[src, dst])
    planned = len(shuffled) - refused

    def row(name: str, what: str, figure: str) -> str:
        return f"| {name} | {what} | {figure} |"

    return [
        "| | pairs | figure |",
        "|---|---|---|",
        row("bytes, conversion", f"{len(every):,}", f"{total:,}"),
        row("bytes, one mesh dim at a time", f"{len(every):,}", f"{greedy:,} ({greedy / total:.2f} times ours)"),
        row("bytes, torch redistribute (its plan)", f"{planned:,}", f"{theirs:,} ({theirs / same:.2f} times ours)"),
        row("torch moves more than ours", f"{planned:,}", f"{worse:,}, at most {max(ratio):.1f} times"),
        row("torch has no plan", f"{len(shuffled):,}", f"{refused:,}"),
        row("CPU time cold (collector off), ideal topology", f"{len(every):,}", quantiles(cold)),
        row("CPU time cold (collector off), 8xa100-80g", f"{len(real_cold):,}", quantiles(real_cold)),
        row("CPU time warm (`conversion_s`)", f"{len(every):,}", f"{warm_us:.2f} us each"),
    ]


def quantiles(ms: list[float]) -> str:
    n = len(ms)
    return f"mean {sum(ms) / n:.2f} ms, 99 % under {ms[n * 99 // 100]:.2f} ms, worst {ms[-1]:.1f} ms"


def write(lines: list[str]) -> None:
    """Replace this bench's section of RESULTS.md."""
    text = RESULTS.read_text() if RESULTS.exists() else "# Results\n"
    head, *rest = text.split(MARK)
    section = "\n".join([MARK, "## Conversions on 2x2x2", "", f"`{machine()}`", "", *lines, "", MARK])
    RESULTS.write_text(head.rstrip("\n") + "\n\n" + section + (rest[1] if len(rest) > 1 else "\n"))


def machine() -> str:
    return f"python bench/conversions.py · torch {torch.__version__} · {platform.machine()}, one thread"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=4000, help="pairs drawn for torch and for a real topology")
    parser.add_argument("--write", action="store_true", help="put the table into bench/RESULTS.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    gc.disable()  # a full collection walks the libraries' objects: some 0.1 s, and no part of a conversion
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    dist.init_process_group("fake", rank=0, world_size=8)
    try:
        lines = run(options.pairs)
    finally:
        dist.destroy_process_group()
    print("\n".join(lines))
    if options.write:
        write(lines)


if __name__ == "__main__":
    main()
