"""What rearrangements take where they copy, and where they do not."""

from __future__ import annotations

import pytest
from test_executors import R, program

import colofunc as cf
from colofunc.executors.fused import as_executed
from colofunc.mesh import Topology
from colofunc.program.ir import Program
from colofunc.program.layout_copies import with_copies

MACHINE = cf.Mesh(topology="8xh100").topology
ROWS, ITEM = 1 << 20, 8  # float64


def copied_s(made: Program, topology: Topology = MACHINE) -> list[float]:
    """Per node, the seconds of its copy."""
    found = with_copies(made, cf.Mesh(dp=2, tp=4, topology=topology))
    return [0.0 if node.kernel is None else node.kernel.seconds for node in found.nodes]


def gathered(pattern: str, rows: int = ROWS) -> Program:
    """A tensor (2, rows) that is gathered over four ranks, and rearranged."""
    nodes = [
        ("colofunc.all_gather", (R(0), ("tp",), 4, 0), (1,)),
        ("colofunc.rearrange", (R(1), pattern, (), ()), (2,)),
    ]
    flat = (2, 4 * rows) if pattern.startswith("a b c -> b") else (8, rows)
    return program([0], nodes, [2], [(2, rows), (4, 2, rows), flat])


def test_a_gather_along_the_second_dim_is_copied_and_one_along_the_first_is_not() -> None:
    _, taken_s = copied_s(gathered("a b c -> b (a c)"))
    moved_bytes = 2 * 8 * ROWS * ITEM  # read and written
    assert taken_s == pytest.approx(moved_bytes / MACHINE.device.memory_bytes_per_s + MACHINE.device.launch_s)
    assert copied_s(gathered("a b c -> (a b) c")) == [0.0, 0.0]


def test_what_is_sent_out_of_order_is_copied_before() -> None:
    nodes = [
        ("colofunc.rearrange", (R(0), "a (b c) -> b a c", ("b",), (4,)), (1,)),
        ("colofunc.reduce_scatter", (R(1), ("tp",), 4, "sum"), (2,)),
    ]
    sent = program([0], nodes, [2], [(2, 4 * ROWS), (4, 2, ROWS), (2, ROWS)])
    taken_s, wired_s = copied_s(sent)
    assert taken_s > 8 * ROWS * ITEM / MACHINE.device.memory_bytes_per_s and not wired_s
    # The same view, read by an operator that does not mind strides.
    read = program([0], [nodes[0], ("aten.neg.default", (R(1),), (2,))], [2], [(2, 4 * ROWS), (4, 2, ROWS), (4, 2, ROWS)])
    assert copied_s(read) == [0.0, 0.0]


def of_a_block() -> Program:
    """Of a buffer (4, 2 * rows) that was gathered, its second half as a parameter (4 * 2, rows / 2)."""
    nodes = [
        ("colofunc.all_gather", (R(0), ("dp",), 4, 0), (1,)),
        ("aten.slice.Tensor", (R(1), 1, ROWS, 2 * ROWS), (2,)),
        ("colofunc.rearrange", (R(2), "a (b c) -> a b c", ("b",), (2,)), (3,)),
        ("colofunc.rearrange", (R(3), "a b c -> (a b) c", (), ()), (4,)),
    ]
    shapes = [(2 * ROWS,), (4, 2 * ROWS), (4, ROWS), (4, 2, ROWS // 2), (8, ROWS // 2)]
    return program([0], nodes, [4], shapes)


def test_a_parameter_of_a_block_is_copied_out_of_what_was_gathered_unless_it_is_a_view_of_a_flat_one() -> None:
    *free_s, taken_s = copied_s(of_a_block())
    assert free_s == [0.0, 0.0, 0.0] and taken_s > 2 * 4 * ROWS * ITEM / MACHINE.device.memory_bytes_per_s
    assert copied_s(of_a_block(), MACHINE.with_software(blocks=True)) == [*free_s, taken_s]
    assert copied_s(of_a_block(), MACHINE.with_software(blocks=True, flat=True)) == [0.0] * 4


def test_pieces_that_come_to_a_product_one_by_one_are_not_copied() -> None:
    in_chunks = MACHINE.with_software(collectives={"tp": "chunks"})
    whole = gathered("a b c -> b (a c)")
    # No product reads it, so it comes whole, and is copied.
    assert copied_s(whole, in_chunks) == copied_s(whole)
    assert copied_s(whole)[1] > 0
    nodes = [
        ("colofunc.all_gather", (R(0), ("tp",), 4, 0), (1,)),
        ("colofunc.rearrange", (R(1), "a b c -> b (a c)", (), ()), (2,)),
        ("aten.mm.default", (R(2), R(3)), (4,)),
    ]
    read = program([0, 3], nodes, [4], [(2, ROWS), (4, 2, ROWS), (2, 4 * ROWS), (4 * ROWS, 2), (2, 2)])
    assert copied_s(read)[1] > 0 and copied_s(read, in_chunks) == [0.0, 0.0, 0.0]


def test_of_a_split_only_the_part_that_is_sent_is_copied() -> None:
    nodes = [
        ("aten.split.Tensor", (R(0), ROWS, 1), (1, 2)),
        ("colofunc.all_gather", (R(2), ("tp",), 4, 0), (3,)),
        ("aten.neg.default", (R(1),), (4,)),
    ]
    made = program([0], nodes, [3, 4], [(4, 2 * ROWS), (4, ROWS), (4, ROWS), (4, 4, ROWS), (4, ROWS)])
    assert copied_s(made)[0] == pytest.approx(
        2 * 4 * ROWS * ITEM / MACHINE.device.memory_bytes_per_s + MACHINE.device.launch_s
    )


def test_a_transposed_operand_of_a_collective_is_copied_without_any_rearrangement() -> None:
    nodes = [
        ("aten.t.default", (R(0),), (1,)),
        ("colofunc.reduce_scatter", (R(1), ("tp",), 4, "sum"), (2,)),
    ]
    sent = program([0], nodes, [2], [(ROWS, 4), (4, ROWS), (1, ROWS)])
    taken_s, wired_s = copied_s(sent)
    assert taken_s > 2 * 4 * ROWS * ITEM / MACHINE.device.memory_bytes_per_s and not wired_s


def test_software_by_hand_lays_out_what_it_computes_as_it_is_read() -> None:
    """A gradient whose rows change their order is copied here, and there only what a collective has brought."""
    nodes = [
        ("aten.neg.default", (R(0),), (1,)),
        ("colofunc.rearrange", (R(1), "(a b c) d -> b (a c) d", ("a", "b"), (2, 2)), (2,)),
    ]
    made = program([0], nodes, [2], [(8, ROWS), (8, ROWS), (2, 4, ROWS)])
    by_hand = MACHINE.with_software(fused=True)
    assert copied_s(made)[1] > 0 and copied_s(made, by_hand) == [0.0, 0.0]
    assert copied_s(gathered("a b c -> b (a c)"), by_hand)[1] > 0


def test_a_compiler_copies_within_what_reads_it() -> None:
    """A sum of what is rearranged reads the memory once; the rearrangement by itself would read it and write it."""
    nodes = [
        ("colofunc.all_gather", (R(0), ("tp",), 4, 0), (1,)),
        ("colofunc.rearrange", (R(1), "a b c -> b (a c)", (), ()), (2,)),
        ("aten.neg.default", (R(2),), (3,)),
        ("aten.mul.Tensor", (R(3), R(3)), (4,)),
    ]
    flat = (2, 4 * ROWS)
    made = program([0], nodes, [4], [(2, ROWS), (4, 2, ROWS), flat, flat, flat])
    mesh = cf.Mesh(dp=2, tp=4, topology=MACHINE)
    played = as_executed(made, "compiled", mesh, lambda call: None)
    seconds = sum(node.kernel.seconds for node in played.nodes if node.kernel is not None)
    assert seconds == pytest.approx(2 * 8 * ROWS * ITEM / MACHINE.device.memory_bytes_per_s + MACHINE.device.launch_s)
