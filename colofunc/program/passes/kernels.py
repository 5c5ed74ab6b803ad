"""Which kernel a plan counts on: its seconds and the memory of its own, at each call that has kernels for the machine's
device.

Problem: a fused kernel is several times faster than the operators that it stands for, and holds memory that no value of
the program has. Idea: behind all passes that change shapes, each call is shown to the kernels of its operator
(`ops/kernels.py`), and what the one that it gets takes is written to its node. The clock and the accountant read it
there; text, hash and files of a program do without.

    with_kernels(local, mesh, registry.kernels)        # node.kernel: PlannedKernel("flash", 0.0021, 0)

The executor chooses anew for the device that it really runs on, from the same table: `Program.kernels`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache, partial
from typing import Any

from colofunc.mesh import Mesh, Topology
from colofunc.mesh.cost import rate
from colofunc.mesh.curves import AttentionRate, attention_flops_per_s
from colofunc.ops.kernels import Kernel, KernelCall, Like, PlannedKernel, Rates, Table, bound, choose, signature
from colofunc.program.editor import Editor
from colofunc.program.ir import Node, Program, Ref, Value
from colofunc.program.positions import Positions

# Compute capability by the beginning of a device's name, as a preset or torch has it; others count as an A100's.
CAPABILITIES = {
    "v100": (7, 0), "t4": (7, 5), "rtx20": (7, 5), "a100": (8, 0), "a10": (8, 6), "rtx30": (8, 6), "l4": (8, 9), "rtx40": (8, 9),
    "h20": (9, 0), "h100": (9, 0), "h200": (9, 0), "h800": (9, 0), "b200": (10, 0), "gb200": (10, 0), "rtx50": (12, 0),
}  # fmt: skip
NO_CUDA = ("cpu", "ideal", "mi300x")


def capability_on(topology: Topology) -> tuple[int, int] | None:
    """Of the devices of a machine; None where they are not CUDA's."""
    name = topology.device.name.lower().removeprefix("nvidia ").removeprefix("geforce ").replace("rtx ", "rtx")
    if name.startswith(NO_CUDA):
        return None
    fitting = [prefix for prefix in CAPABILITIES if name.startswith(prefix)]
    return CAPABILITIES[max(fitting, key=len)] if fitting else (8, 0)


@lru_cache(maxsize=64)
def rates_of(topology: Topology) -> Rates:
    """What kernels are compared by on a machine."""
    device, named = topology.device, topology.software.attention
    attention = partial(attention_flops_per_s, device.attention)
    if named:
        attention = partial(_by_one, device.attention, named)
    return Rates(lambda dtype: rate(topology, str(dtype)), device.memory_bytes_per_s, device.launch_s, attention)


def _by_one(
    known: tuple[AttentionRate, ...], named: str, kernel: str, head: int, keys: float, backward: bool
) -> float | None:
    """Attention of other software (`Topology.with_software`): torch's flash kernel stands for the one that is named,
    and the others of torch stand to it as they do without rates of their own.
    """
    return attention_flops_per_s(known, named, head, keys, backward) if kernel == "flash" else None


def with_kernels(program: Program, mesh: Mesh, table: Table) -> Program:
    """`program` with what its calls take on the machine that `mesh` is planned for."""
    capability = capability_on(mesh.topology)
    if capability is None:
        return program
    # Where the first rank stands: what others take is alike.
    return _planned(Positions(program, lambda axes: 0), table, capability, rates_of(mesh.topology))


def _planned(known: Positions, table: Table, capability: tuple[int, int], rates: Rates) -> Program:
    program, edit = known.program, Editor(known.program)
    for index, node in enumerate(program.nodes):
        candidates = table.get((node.target, "cuda"))
        if node.loop is not None:
            edit.change_body(index, _planned(known.inside(node), table, capability, rates))
        elif candidates is not None and _on_device(node, program.values):
            call = call_of_node(node, program.values, known, capability)
            edit.change(index, kernel=_chosen(candidates, call, rates))
    return edit.done()


def _on_device(node: Node, values: Mapping[int, Value]) -> bool:
    return all(values[id].tier == "device" for id in (*node.refs, *node.outs) if id is not None)


def _chosen(candidates: Iterable[Kernel], call: KernelCall, rates: Rates) -> PlannedKernel | None:
    kernel = choose(tuple(candidates), call, rates)
    if kernel is None:
        return None
    return PlannedKernel(
        getattr(kernel.fn, "__name__", type(kernel.fn).__name__),
        kernel.seconds(call, rates),
        kernel.workspace(call),
    )


def call_of_node(node: Node, values: Mapping[int, Value], known: Positions, capability: tuple[int, int]) -> KernelCall:
    """A node as guards see it, all arguments by name."""
    arguments = bound(node.target, node.args, dict(node.kwargs))
    names = (name for name, _ in signature(node.target))
    described = tuple((name, _like(arg, values, known)) for name, arg in zip(names, arguments, strict=True))
    return KernelCall(node.target, described, capability)


def _like(arg: Any, values: Mapping[int, Value], known: Positions) -> Any:
    if type(arg) is Ref:
        value = values[arg.id]
        return Like(value.shape, value.dtype, known.run(arg.id))
    return tuple(_like(item, values, known) for item in arg) if isinstance(arg, (list, tuple)) else arg
