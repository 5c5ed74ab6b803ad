"""Post-validation: which steps come in parts, and what is refused."""


import attrs
import pytest
import torch
from post_validated import CALM, Layers, batches, staged

import colofunc as cf
from colofunc.errors import PlanError
from colofunc.mesh import PRESETS
from colofunc.program.ir import Node, Program, Ref, map_refs
from colofunc.program.places import SEND
from colofunc.program.post_validation import Deferred, deferred

# ---- what a step is made of ----


def test_parts_wait_for_nobody_but_the_exchange() -> None:
    """The scalars that decide are the factor of clipping and, in fp16, whether all gradients are finite."""
    for fp16, targets in ((False, {"aten.clamp.out"}), (True, {"aten.clamp.out", "aten.mul.out"})):
        chain, state = staged("zb-h2", "next step", fp16=fp16)
        low = chain.lower(state, batches([CALM], 1.0, torch.float32 if fp16 else torch.float64)[0])
        parts = deferred(low.program)
        assert isinstance(parts, Deferred) and parts.speculates
        assert {low.program.makers[id].target for id in parts.judged} == targets
        assert sum(node.target.startswith("colofunc.sgd") for node in parts.update.nodes) == 12


def test_ranks_of_unlike_devices_are_refused() -> None:
    """The factor of clipping that they compute may differ in its last bit."""
    mesh = cf.Mesh(pp=4, device="cpu", topology=PRESETS["gloo-cpu"].with_rank(1, speed=0.5))
    chain, state = staged("zb-h2", "next step", mesh=mesh)
    with pytest.raises(PlanError, match=r'its ranks are of unlike devices.*Try: validate="step"'):
        chain.lower(state, batches([CALM], 1.0)[0])


def deferred_on_two_stages() -> tuple[Program, Deferred]:
    """A clipped step's program, and its parts where it is validated in the next step."""
    chain, state = staged("zb-h1", "next step", mesh=cf.Mesh(pp=2))
    program = chain.lower(state, batches([CALM], 1.0)[0]).program
    parts = deferred(program)
    assert isinstance(parts, Deferred)
    return program, parts


def test_an_update_in_which_stages_wait_for_one_another_is_refused() -> None:
    """A scalar that is computed of what the stages have said, and that all of them add up once more."""
    program, parts = deferred_on_two_stages()
    gradient, new = parts.update.nodes[-1].refs[1], program.next_id
    node = Node("colofunc.all_reduce", (Ref(gradient), ("pp",), 2, "sum"), (), (new,), phase="update")
    values = program.values | {new: attrs.evolve(program.values[gradient], id=new)}
    changed = attrs.evolve(program, nodes=(*program.nodes, node), values=values)
    assert deferred(changed) == "the update itself communicates over pp, so that a stage waits for others in it"


def test_a_message_of_what_the_update_makes_is_refused() -> None:
    """As of a scalar's gradient that is put back from fp16's scale before it is sent."""
    program, parts = deferred_on_two_stages()
    gradient, total, new = parts.update.nodes[-1].refs[1], program.next_id, program.next_id + 1
    summed = Node("aten.sum.default", (Ref(gradient),), (), (total,), phase="update")
    single = next(node for node in parts.exchange.nodes if node.target == SEND and program.values[node.refs[0]].shape == ())
    told = attrs.evolve(single, args=map_refs(single.args, lambda _: Ref(total)), outs=(new,))
    like = program.values[parts.judged[0]]
    values = program.values | {id: attrs.evolve(like, id=id) for id in (total, new)}
    changed = attrs.evolve(program, nodes=(*program.nodes, summed, told), values=values)
    assert deferred(changed) == "the update itself communicates over pp, so that a stage waits for others in it"


def test_an_update_that_writes_to_what_is_sent_is_refused() -> None:
    """A loss that is written to behind the factor of clipping: whoever sends it later would send another one."""
    program, parts = deferred_on_two_stages()
    loss, new = parts.exchange.inputs[-1], program.next_id
    node = Node("aten.mul.out", (Ref(loss), Ref(parts.judged[0])), (("out", Ref(loss)),), (new,), phase="update")
    values = program.values | {new: attrs.evolve(program.values[loss], id=new)}
    changed = attrs.evolve(program, nodes=(*program.nodes, node), values=values)
    assert deferred(changed) == "the update writes to what the stages are still to be told"


def test_a_stage_that_sends_on_what_it_was_told_is_refused() -> None:
    """Who reads alone would wait for a stage that does not read."""
    program, parts = deferred_on_two_stages()
    (factor,), new = parts.judged, program.next_id
    single = next(node for node in parts.exchange.nodes if node.target == SEND and program.values[node.refs[0]].shape == ())
    node = attrs.evolve(single, args=map_refs(single.args, lambda _: Ref(factor)), outs=(new,))
    values = program.values | {new: attrs.evolve(program.values[factor], id=new)}
    reason = deferred(attrs.evolve(program, nodes=(*program.nodes, node), values=values))
    assert isinstance(reason, str) and reason.startswith("a stage sends on what another one has told it")


def test_one_stage_with_all_the_work_is_refused() -> None:
    """It would not be validated in the next step, and nothing said so."""
    step, state = cf.train_step(
        cf.functional(Layers().double()), cf.adapt(torch.optim.SGD, lr=1e-3), lambda out, b: (out - b[2]).pow(2).mean(),
        inputs=lambda b: ((b[0], b[1]), {}), clip=0.9,
    )  # fmt: skip
    chain = cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches=4, stages={"*": 1}, validate="next step")
    with pytest.raises(PlanError, match=r'one stage has all the work .* Try: validate="step", or stages='):
        chain.lower(state, batches([CALM], 1.0)[0])


def test_one_microbatch_is_refused() -> None:
    """It has no schedule, so that each step waited and nothing said so."""
    chain, state = staged("zb-h2", "next step")
    with pytest.raises(PlanError, match=r'microbatches=1, and one microbatch has no schedule.*Try: validate="step", or more microbatches'):
        cf.pipeline(chain, microbatches=1, validate="next step")
    step, state = cf.train_step(
        cf.functional(Layers().double()), cf.adapt(torch.optim.SGD, lr=1e-3), lambda out, b: (out - b[2]).pow(2).mean(),
        inputs=lambda b: ((b[0], b[1]), {}), clip=0.9,
    )  # fmt: skip
    chain = cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches="auto", validate="next step")
    (batch,) = batches([CALM], 1.0)
    with pytest.raises(PlanError, match=r"microbatches='auto' is 1 for a batch of 1 rows, and one microbatch has no schedule"):
        chain.lower(state, tuple(x[:1] for x in batch))
    assert chain.lower(state, tuple(x[:2] for x in batch)).plan.pipeline.microbatches == 2


def test_an_unknown_way_to_validate_is_refused() -> None:
    with pytest.raises(PlanError, match="unknown validate 'never'"):
        staged("zb-h2", "never")
