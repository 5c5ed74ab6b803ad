"""What an operator takes on the host: the time of the memory that it touches, longer where arithmetic binds it.

    host_seconds(adamw_ of 4 MB of state and gradients, ...)       16 MB read and written at the host's bandwidth
    host_seconds(slice of a bucket of gradients, ...)              what a view takes
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from colofunc.mesh import Mesh
from colofunc.ops.updates import is_in_place_update
from colofunc.program.cost import does_work
from colofunc.program.facts import is_pointwise, kind_of, reads_rows, sums_rows, written
from colofunc.program.ir import Node, Value

WORK = 2.0
"""An operator that takes so many times longer than the memory that it touches is bound by its arithmetic."""


def host_seconds(node: Node, values: Mapping[int, Value], mesh: Mesh, device_s: float) -> float:
    """Seconds of a node on the host, where the time of its arithmetic is to that of its memory as it is on the
    device.
    """
    if not does_work(node.target):
        return device_s
    touched, device = touched_bytes(node, values), mesh.topology.device
    # Bound by memory, however slow it was measured on the device.
    if is_in_place_update(node.target) or is_pointwise(node.target):
        return mesh.host_s(touched)
    moved_s = touched / device.memory_bytes_per_s
    work_s = device_s - device.launch_s
    # Of gathers the device's seconds count the whole table, and copies between tiers have none of their own.
    bound_by_work = work_s > WORK * moved_s > 0 and not reads_rows(node.target) and kind_of(node) is None
    return mesh.host_s(touched) * (work_s / moved_s if bound_by_work else 1.0)


def touched_bytes(node: Node, values: Mapping[int, Value]) -> int:
    """Bytes that a node reads and writes."""
    outs = node.results
    if not reads_rows(node.target):
        return sum(values[id].nbytes for id in (*node.refs, *written(node), *outs))
    moved = sum(values[id].nbytes for id in (*node.refs[1:], *outs))
    if sums_rows(node.target):  # reads a row for each index, and writes one for each bag
        table, index = values[node.refs[0]], values[node.refs[1]]
        return moved + prod(index.shape) * table.shape[1] * table.dtype.itemsize
    return moved + sum(values[id].nbytes for id in outs)
