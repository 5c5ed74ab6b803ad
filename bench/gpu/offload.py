"""Slice 10: training with state on the host and on disk: what it takes beside all on the device, and beside FSDP2's CPUOffloadPolicy.

OPT of 6.7B in 40 GB, and of 13B with part of its state on disk. Where the card has room for it (16 bytes a parameter), master weights and
moments are float32 and products bfloat16, as published figures have it (84 % of the speed of all on the device); else all is bfloat16.

What is compared with is to have its best chance: where it does not fit as it is, it is tried in a way that takes less, which the row names.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import colofunc as cf
from bench import Row
from bench.gpu.measuring import Run, Step, eager, ids, seconds_in, side_by_side, staged_run, steps, training
from bench.gpu.models import Opt
from bench.gpu.parts import Part, Setup, Slice, at_least, not_run
from bench.gpu.sizes import Training
from colofunc.mesh.sizes import parse_bytes

PUBLISHED, AIM = 0.84, 0.90
WIDE_CARD_BYTES = 130 * 10**9
LESS = 0.9
"""Of the card: a plan for all of it leaves the gaps between torch's blocks no more than the stated margin."""
Wrap = Callable[[Any], Any]


def mixed() -> bool:
    return torch.cuda.mem_get_info()[1] >= WIDE_CARD_BYTES


def parameters(of: Training) -> int:
    d, ffn = of.shape.width, of.shape.ffn
    return of.shape.layers * (4 * d * d + 2 * d * ffn) + of.shape.vocabulary * d


def state_bytes(of: Training, wide: bool) -> int:
    """Parameters and two moments."""
    return parameters(of) * (12 if wide else 6)


def on_card(fn: Any, wide: bool, room: str | float = "auto") -> Any:
    step = cf.shard(fn, cf.Mesh(device="cuda"))
    return cf.checkpoint(cf.precision(step, "bf16") if wide else step, budget=room)


def model(of: Training, setup: Setup, wide: bool) -> Callable[[], torch.nn.Module]:
    return lambda: Opt(of.shape, torch.float32 if wide else setup.sizes.dtype, of.length)


def run_of(of: Training, setup: Setup, wide: bool, wrap: Wrap, room: str | float = "auto") -> Run:
    step_fn, state = training(model(of, setup, wide))
    return staged_run(wrap(on_card(step_fn, wide, room)), state, ids(of))


def that_fits(tries: dict[str, Callable[[], Step]]) -> tuple[str, Step]:
    """The first that the card has memory for, by name. The last one's error is its own."""
    *before, last = tries
    for name in before:
        try:
            return name, tries[name]()
        except torch.OutOfMemoryError:  # its tensors are let go of with it
            continue
    return last, tries[last]()


def host(setup: Setup) -> list[Row]:
    """What an update on the host reads and writes a second, with as many threads as torch has here, and what plans count on."""
    count, dtype = setup.sizes.updated, setup.sizes.dtype
    param, grad, mean, square = (torch.rand(count).to(dtype) for _ in range(4))
    step = torch.tensor(3.0)

    def update() -> None:
        torch._fused_adamw_(
            [param], [grad], [mean], [square], [], [step], lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-8, amsgrad=False,
            maximize=False,
        )  # fmt: skip

    seconds = side_by_side({"host": update}, setup.sizes.repeats)["host"]
    nbytes = 7 * param.nbytes  # of the parameter and both moments reads and writes, of the gradient a read
    planned = cf.Mesh(device="cuda").topology.host_bytes_per_s
    text = f"{nbytes / seconds / 1e9:.1f} GB/s with {torch.get_num_threads()} threads, {planned / 1e9:.1f} planned"
    return [Row("AdamW on the host", text)]


def on_the_device(setup: Setup) -> list[Row]:
    of, there = setup.sizes.offload, torch.cuda.mem_get_info()[1]
    least = state_bytes(of, mixed()) * 4 // 3  # with gradients
    if least > there:
        return [not_run("all on the device", f"at least {least / 1e9:.0f} GB of {there / 1e9:.0f} GB are wanted")]

    def within(room: str | float) -> Step:
        return steps(lambda: run_of(of, setup, mixed(), lambda step: step, room), setup.sizes.steps, warm=1)

    how, found = that_fits({"": lambda: within("auto"), f", planned for {LESS:.0%} of the card": lambda: within(LESS)})
    return [Row(f"all on the device ({'mixed precision' if mixed() else 'bfloat16'}{how})", found.words(of.tokens))]


def within_budget(setup: Setup) -> list[Row]:
    of, budget = setup.sizes.offload, setup.sizes.offload_budget
    found = steps(lambda: run_of(of, setup, mixed(), lambda step: cf.offload(step, budget=budget)), setup.sizes.steps, warm=1)
    rows, whole = [Row(f"in {budget}", found.words(of.tokens))], seconds_in(setup.done.get("on the device", ()))
    if whole is None:
        return [*rows, not_run("tokens/s, in the budget / all on the device", "all on the device was not measured")]
    share = whole / found.seconds
    text = f"{share:.3f} (published {PUBLISHED})"
    return [*rows, at_least("tokens/s, in the budget / all on the device", share, AIM, text)]


def exposed(setup: Setup) -> list[Row]:
    """How long the card waits for copies, node by node."""
    of = setup.sizes.offload
    step_fn, state = training(model(of, setup, mixed()))
    step, batch = cf.offload(on_card(step_fn, mixed()), budget=setup.sizes.offload_budget), ids(of)
    with tempfile.NamedTemporaryFile(suffix=".json") as trace:
        profile = step.profile(trace.name, step.init(state, batch), batch)
    waited = sum(node.mean_s for node in profile.nodes if node.target in COPIES)
    copies = sum(node.target in COPIES for node in profile.nodes)
    return [Row("of a step, waiting for copies", f"{waited / profile.clocked_s:.1%} ({1e3 * waited:.4g} ms, {copies} nodes)")]


COPIES = {f"colofunc.{kind}" for kind in ("wait", "to_host", "to_device", "to_disk", "put")}
"""Of a copy that is started before, the wait is what the card stands still for."""


@contextmanager
def group() -> Iterator[None]:
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def fsdp2(setup: Setup) -> list[Row]:
    """The same model as FSDP2's tutorial offloads it: parameters, gradients and the (fused) update on the host.

    Its policy moves no activations. Where they do not fit, blocks are computed again in the backward, as ours are by the plan.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    of, count = setup.sizes.offload, max(1, setup.sizes.steps // 2)

    def make(again: bool) -> Run:
        mesh = init_device_mesh("cuda", (1,))
        module = model(of, setup, mixed())()
        options: dict[str, Any] = {"mesh": mesh, "offload_policy": CPUOffloadPolicy()}
        if mixed():
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for block in module.blocks:
            if again:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
            fully_shard(block, **options)
        fully_shard(module, **options)
        return eager(module, ids(of))

    with group():
        how, found = that_fits({
            "": lambda: steps(partial(make, again=False), count, warm=1),
            ", blocks computed again": lambda: steps(partial(make, again=True), count, warm=1),
        })  # fmt: skip
    rows, mine = [Row(f"FSDP2, CPUOffloadPolicy{how}", found.words(of.tokens))], seconds_in(setup.done.get("in 40 GB", ()))
    if mine is None:
        return [*rows, not_run("tokens/s, ours / FSDP2", "ours was not measured")]
    return [*rows, at_least("tokens/s, ours / FSDP2", found.seconds / mine, 1.0, f"{found.seconds / mine:.2f}")]


def disk(setup: Setup) -> list[Row]:
    """A model whose state the card and the host are not to hold, all in bfloat16, which a small disk holds."""
    of, budget, host = setup.sizes.disk, setup.sizes.disk_budget, setup.sizes.disk_host
    with tempfile.TemporaryDirectory() as folder:
        free = shutil.disk_usage(folder).free
        wanted = state_bytes(of, wide=False) - parse_bytes(host, "disk_host")
        if free < wanted:
            return [not_run("13B with disk", f"{folder} has {free / 1e9:.0f} GB free, {wanted / 1e9:.0f} GB may be wanted")]

        def wrap(step: Any) -> Any:
            return cf.offload(step, budget=budget, host=host, disk=folder)

        found = steps(lambda: run_of(of, setup, False, wrap), 1, warm=1)
    return [Row(f"{parameters(of) / 1e9:.1f}B in {budget}, host {host}, the rest on disk", found.words(of.tokens))]


SLICE = Slice(10, "Offload: OPT-6.7B in 40 GB, OPT-13B with disk", (
    Part("the host", host), Part("on the device", on_the_device), Part("in 40 GB", within_budget), Part("exposed copies", exposed),
    Part("FSDP2", fsdp2, ("eager", "nccl")), Part("disk", disk),
))  # fmt: skip
