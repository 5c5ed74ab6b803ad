"""The one way to change a program: values are made, nodes come, go and change, readers read something else."""

import pickle

import pytest
import torch
from interpreter import run_reference

import colofunc as cf
from colofunc.program.editor import Editor
from colofunc.program.facts import lifetimes
from colofunc.program.ir import Node, Ref
from colofunc.program.tracing.trace import trace

X = torch.arange(6.0).reshape(2, 3)


def program_of(fn, *args):
    return trace(fn, args).program


def run(program, *inputs):
    return run_reference(program, list(inputs))[0]


def test_the_index_is_what_the_nodes_say():
    program = program_of(lambda x: (x.exp() * x).sum(), X)
    for index, node in enumerate(program.nodes):
        for out in node.results:
            assert program.makers[out] is node and program.made_at[out] == index
            assert program.readers.get(out, ()) == tuple(k for k, reader in enumerate(program.nodes) if out in reader.refs)
    (x,), (total,) = program.inputs, program.outputs
    assert program.last_uses[x] == max(program.readers[x]) and program.last_uses[total] == len(program.nodes)
    assert lifetimes(program) is lifetimes(program)


def test_a_program_that_was_sent_to_another_process_is_the_same_and_computes_its_own_index():
    program = program_of(lambda x: x.exp().sum(), X)
    lifetimes(program)
    again = pickle.loads(pickle.dumps(program))
    assert again == program and lifetimes(again) == lifetimes(program)


def test_a_value_is_inserted_and_read_instead():
    program = program_of(lambda x: x.exp().sum(), X)
    edit, (made,) = Editor(program), program.nodes[0].results
    twice = edit.new(program.values[made])
    edit.insert(1, Node("aten.mul.Scalar", (Ref(made), 2.0), (), (twice,)))
    edit.replace(1, *(Node(node.target, (Ref(twice), *node.args[1:]), node.kwargs, node.outs) for node in program.nodes[1:2]))
    torch.testing.assert_close(run(edit.done(), X), 2 * X.exp().sum())
    assert twice not in program.values


def test_readers_of_a_dropped_node_read_another_value_through_any_number_of_names():
    program = program_of(lambda x: x.exp().neg().sum(), X)
    edit, (x,) = Editor(program), program.inputs
    for index in (1, 0):
        edit.rename(program.nodes[index].results[0], program.nodes[index].refs[0])
        edit.drop(index)
    changed = edit.done()
    torch.testing.assert_close(run(changed, X), X.sum())
    assert set(changed.values) == {x, *changed.outputs}  # what nobody makes any more is gone


def test_a_reader_of_what_is_gone_is_an_error():
    program = program_of(lambda x: x.exp().sum(), X)
    edit = Editor(program)
    edit.drop(0)
    with pytest.raises(cf.ProgramError, match=r"aten\.sum.* was moved before what makes its %"):
        edit.done()


def test_new_ids_are_those_of_no_loop():
    step = cf.accumulate(lambda w, b: (w - 0.1 * cf.value_and_grad(lambda w: (b @ w).square().mean())(w)[1], b.sum()), microbatches=2)
    program = step.lower(torch.ones(3), torch.ones(4, 3)).program
    bodies = [node.loop.body for node in program.nodes if node.loop is not None]
    new = Editor(program).new(next(iter(program.values.values())))
    assert bodies and all(new > max(each.values) for each in (program, *bodies))
