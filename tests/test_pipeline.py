"""cf.pipeline: stages on ranks of their own, microbatches that follow one another through them by a schedule's table."""

import os
import re
import signal
import time
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import attrs
import pytest
import torch
from colofunc_plugins import experts, stages, tensor, zero
from live_bytes import measure
from pipelined import gpt2, loop_of, mlp
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

import colofunc as cf
from colofunc.compiler.observation import arguments_of
from colofunc.errors import FaultError
from colofunc.executors import messages
from colofunc.executors.collective_starts import Group
from colofunc.executors.distributed import Distributed, RankProgram
from colofunc.executors.faults import ask
from colofunc.executors.groups import ProcessGroups
from colofunc.executors.launch import launch
from colofunc.executors.messages import Batch, Buffers, Mail, PostedActions, Receiver
from colofunc.executors.simulated import SimulatedProgram, distinct
from colofunc.mesh.sizes import size_text
from colofunc.planner.offload.fastest import _Offloading
from colofunc.program.aliases import aliases
from colofunc.program.check import check_program
from colofunc.program.ir import Loop
from colofunc.program.memory import memory
from colofunc.program.passes.loop import gathered_at
from colofunc.program.passes.reuse import added_in_place
from colofunc.program.places import RECEIVE, SEND, channels, on_rank, out_of_order
from colofunc.testing import check
from colofunc.testing.check import doubled_inside


def agrees_with_one_device(chain: Any, state: Any, batch: Any) -> Any:
    """Equal numbers, and as many bytes on the simulated ranks as the accountant says."""
    with cf.testing.float64():
        state, batch = doubled_inside((state, batch))
        low = chain.lower(state, batch)
        check_program(low.program, low.mesh)
        check(chain, state, batch, steps=2)
    return low


# ---- schedules ----


ALL = ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipev", "auto"]


@pytest.mark.parametrize("schedule", ALL)
def test_every_schedule_trains_as_one_device_does(schedule: str) -> None:
    step, state, batch = mlp(8)
    with cf.testing.float64():
        state, batch = doubled_inside((state, batch))
    chain = cf.pipeline(cf.shard(step, cf.Mesh(pp=4)), microbatches=8, schedule=schedule)
    low = agrees_with_one_device(chain, state, batch)
    given = arguments_of(low, chain.arguments((state, batch)))
    measured = measure(low.program, low.mesh, given.copies(range(len(given.shards))))
    assert measured.peak_bytes["device"] == low.memory().peak_bytes["device"] == low.plan.peak_bytes
    assert measured.peaks_of_ranks(4) == [low.memory(rank).peak_bytes["device"] for rank in range(4)]


def test_a_rank_does_its_actions_in_the_order_of_the_table() -> None:
    step, state, batch = mlp()
    low = cf.pipeline(cf.shard(step, cf.Mesh(pp=4)), microbatches=8).lower(state, batch)
    table = loop_of(low.program).timetable.table
    for rank in range(4):
        mine = loop_of(on_rank(low.program, low.mesh, rank).program).timetable
        assert mine.table.rows == (table.rows[rank],)
        assert [busy.label for busy in low.lanes(rank).busy if busy.label[0].isdigit()] == [str(action) for action in table.rows[rank]]


def test_1f1b_holds_less_than_gpipe_and_later_stages_less_than_earlier_ones() -> None:
    step, state, _ = mlp()
    batch = (torch.randn(512, 8, dtype=torch.float64), torch.randn(512, 4, dtype=torch.float64))
    peaks = {}
    for schedule in ("gpipe", "1f1b"):
        low = cf.pipeline(cf.shard(step, cf.Mesh(pp=4)), microbatches=16, schedule=schedule).lower(state, batch)
        peaks[schedule] = [low.memory(rank).peak_bytes["device"] for rank in range(4)]
    # The first stage keeps nothing but what it was given: its successor has what its last operator made.
    assert all(small < large for small, large in zip(peaks["1f1b"][1:], peaks["gpipe"][1:], strict=True))
    assert peaks["1f1b"][1] > peaks["1f1b"][2]


def test_a_pipeline_is_played_faster_than_its_stages_one_after_another() -> None:
    step, state, batch = mlp()
    mesh = cf.Mesh(pp=4)
    places = {"0.*": 0, "2.*": 1, "4.*": 2, "6.*": 3}
    overlapped = cf.pipeline(cf.shard(step, mesh), microbatches=8, stages=places).lower(state, batch)
    in_turn = cf.accumulate(cf.shard(step, mesh, stages("pp", places)), microbatches=8).lower(state, batch)
    assert overlapped.lanes().end_s < 0.7 * in_turn.lanes().end_s


def test_weight_gradients_are_parts_of_their_own() -> None:
    step, state, batch = mlp()
    loop = loop_of(cf.pipeline(cf.shard(step, cf.Mesh(pp=4)), microbatches=8, schedule="zb-h1").lower(state, batch).program)
    nodes = {part: loop.body.nodes[first:end] for part, (first, end) in zip(loop.timetable.parts, loop.timetable.spans(), strict=True)}
    targets = {part: {node.target for node in mine} for part, mine in nodes.items()}
    for stage in (1, 2, 3):
        assert "colofunc.linear_dw" in targets[stage, "W"] and "colofunc.linear_dw" not in targets[stage, "I"]
        assert "colofunc.linear_dx" in targets[stage, "I"]
    of_weights = {out for (_, kind), mine in nodes.items() if kind == "W" for node in mine for out in node.results}
    for (_, kind), mine in nodes.items():
        waits = {ref for node in mine for ref in node.refs} & of_weights
        assert kind == "W" or not waits, "nobody waits for a weight gradient"


# ---- models ----


@pytest.mark.parametrize(("schedule", "plans"), [("1f1b", (zero(3, "dp"),)), ("zb-h1", (tensor("1d", "dp"),)), ("zb-v", (zero(1, "dp"),))])
def test_a_language_model_with_a_tied_weight(schedule: str, plans: tuple[Any, ...]) -> None:
    step, state, batch = gpt2()
    agrees_with_one_device(cf.pipeline(cf.shard(step, cf.Mesh(pp=2, dp=2), *plans), microbatches=4, schedule=schedule), state, batch)


@pytest.mark.parametrize("microbatches", [2, 8])
def test_zero_3_gathers_the_parameters_of_a_stage_once_for_all_microbatches(microbatches: int) -> None:
    step, state, batch = mlp(8)
    mesh = cf.Mesh(pp=2, dp=2)
    low = cf.pipeline(cf.shard(step, mesh, zero(3, "dp")), microbatches=microbatches, schedule="1f1b").lower(state, batch)
    assert low.cost().calls["all_gather", "dp"] == 1
    assert not [node for node in loop_of(low.program).body.nodes if node.target.startswith("colofunc.all_gather")]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_dropout_is_that_of_the_whole_batch(schedule: str) -> None:
    torch.manual_seed(0)
    net = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=16)).double().train()
    step, state = cf.train_step(cf.functional(net), cf.adapt(torch.optim.SGD, lr=1e-2))
    ids = torch.randint(32, (8, 8))
    chain = cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches=4, schedule=schedule)
    agrees_with_one_device(chain, state, {"input_ids": ids, "labels": ids})


def test_the_last_stage_holds_its_logits_once_and_a_tied_gradient_is_sent_as_it_is() -> None:
    step, state, batch = gpt2()
    state = torch.utils._pytree.tree_map(lambda x: x.float() if x.is_floating_point() else x, state)
    chain = cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches=4)
    low = chain.lower(state, batch)
    targets = {node.target for node in loop_of(low.program).body.nodes}
    assert {"colofunc.log_softmax_", "colofunc.cross_entropy_dx_"} <= targets and "aten.nll_loss_backward.default" not in targets
    given = arguments_of(low, chain.arguments((state, batch)))
    partition, _ = distinct(given.copies(range(len(given.shards))), 2)
    source = SimulatedProgram(low.program, low.mesh).write(partition, torch.device("cpu")).function().source
    assert " contiguous(" in source.split("for p")[1]  # its operand has no other reader


@pytest.mark.parametrize(("schedule", "of_the_tied"), [("1f1b", 2), ("zb-v", 0)])
def test_a_sum_is_added_to_in_the_part_that_gathers_it(schedule: str, of_the_tied: int) -> None:
    """Each weight of a layer's. The tied one has a sum on each of two ranks; where one rank has both ends, a later part adds to it."""
    step, state, batch = gpt2(layers=4)
    weights = sum(".h." in name and x.dim() == 2 for name, x in state["params"].items())
    loop = loop_of(cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches=4, schedule=schedule).lower(state, batch).program)
    gathered = {k: index for index, outputs in gathered_at(loop.body).items() for k in outputs}
    added = added_in_place(loop)
    assert loop.timetable is not None and len(added) == weights + of_the_tied == 16 + of_the_tied
    for made_at, k in added.items():
        assert loop.timetable.part_at(made_at) == loop.timetable.part_at(gathered[k])


def test_what_the_next_action_receives_is_posted_before_an_action() -> None:
    log: list[str] = []

    def begin(tag: int) -> Callable[[], torch.Tensor]:
        log.append(f"post {tag}")
        return lambda: torch.tensor(tag)

    receiver, ahead = Receiver(begin), PostedActions([(0, 0), (1, 0), (0, 1), (1, 1)], Batch(Mail()), Buffers())
    ahead.receives(1, receiver, lambda microbatch: 10 + microbatch)
    for _ in range(2):  # steps
        for part, microbatch in ahead:
            log.append(f"{part} {microbatch}")
            assert part == 0 or int(receiver(10 + microbatch)) == 10 + microbatch
    assert log == ["post 10", "0 0", "1 0", "post 11", "0 1", "1 1"] * 2
    receiver.post(3)
    with pytest.raises(cf.ProgramError, match="a message with tag 4 is waited for, and the next one that was posted has tag 3"):
        receiver(4)


def bytes_of_messages(loop: Loop) -> list[int]:
    """At each position of one rank's actions, what its buffers hold beside messages from where they are received to their last reader.

    A walk through the actions in which receivers take memory and hold it until it was read.
    """
    timetable = loop.cut_by
    assert timetable is not None
    spans, numbers = list(timetable.spans()), {kind: k for k, kind in enumerate(timetable.parts)}
    order = [(numbers[action.stage, action.kind], action.microbatch) for action in timetable.table.rows[0]]
    buffers = Buffers()
    ahead, receivers = PostedActions(order, Batch(Mail()), buffers), dict[int, Receiver]()
    memory_of = aliases(loop.body)
    readers: dict[int, set[int]] = {}  # node that receives -> it and those that read its memory
    rooms = {}

    def begin(tag: int, room: Any) -> Callable[[], torch.Tensor]:
        memory = buffers.take(room, torch.device("cpu"))
        return lambda: memory

    for k, node in enumerate(loop.body.nodes):
        if node.target == RECEIVE:
            value = loop.body.values[node.results[0]]
            rooms[k] = value.shape, value.dtype
            receivers[k] = Receiver(partial(begin, room=rooms[k]), rooms[k])
            ahead.receives(timetable.part_at(k), receivers[k], lambda microbatch: microbatch)
            readers[k] = {k}
            for other, reader in enumerate(loop.body.nodes):
                if any(memory_of.group(ref) == memory_of.group(node.results[0]) for ref in reader.refs):
                    readers[k].add(other)
    steps = [(k, microbatch) for part, microbatch in order for k in range(*spans[part])]
    last_read = {}
    for at, (k, microbatch) in enumerate(steps):
        last_read.update({(receive, microbatch): at for receive, reading in readers.items() if k in reading})
    holds: dict[tuple[int, int], torch.Tensor] = {}
    more = []
    for part, microbatch in ahead:
        for k in range(*spans[part]):
            if k in receivers:
                holds[k, microbatch] = receivers[k](microbatch)
            kept = [x.nbytes for some in (buffers._held, buffers._free) for tensors in some.values() for x in tensors]
            more.append(sum(kept) - sum(x.nbytes for x in holds.values()))
            ended = [message for message in holds if last_read[message] == len(more) - 1]
            for message in ended:
                del holds[message]
    return more


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_messages_that_are_posted_ahead_are_counted_on_real_ranks(schedule: str) -> None:
    step, state, batch = mlp(8)
    low = cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches=4, schedule=schedule).lower(state, batch)
    for rank in range(2):
        part = on_rank(low.program, low.mesh, rank).program
        (index,) = [k for k, node in enumerate(part.nodes) if node.loop is not None and node.loop.cut_by is not None]
        alone, sent = (memory(part, sent=sent).bodies[index].timeline["device"] for sent in (False, True))
        more = bytes_of_messages(loop_of(part))
        assert [b - a for a, b in zip(alone, sent, strict=True)] == more and max(more) > 0


def test_no_step_begins_behind_one_that_raised_behind_its_first_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a loop or outside of one; that of another program on the same ranks neither: equal tags are taken in the order of sending."""
    groups = ProcessGroups(cf.Mesh(pp=2), 1, {}, 1.0)
    monkeypatch.setattr(groups, "of", lambda axes: Group(None, (0, 1), 1, None, None))
    monkeypatch.setattr(messages, "begin_together", lambda begun: [setattr(one, "works", ()) for one in begun])
    receive = groups.receiver(("pp",), 0, (2,), torch.float32, torch.device("cpu"))
    with groups.messages():
        receive(0)
    with pytest.raises(FaultError), cf.testing.fail(rank=1, at="all_gather"), groups.messages():
        ask("all_gather", (1,))
    with pytest.raises(FaultError), cf.testing.fail(rank=1, at="send"), groups.messages():  # nothing is under way behind that one
        receive(0)
        ask("send", (1,))
    with pytest.raises(cf.CollectiveError, match=r"rank 1: an earlier step raised in the middle, .*Try: start the proc"):
        groups.messages().__enter__()


def test_meshes_of_a_process_share_what_is_under_way() -> None:
    """They share the group of all ranks, in which messages are told apart by their tags alone."""
    backend = object.__new__(Distributed)
    backend.rank, backend.watch, backend._carriers, backend._groups, backend._mail = 0, None, {"cpu": "gloo"}, {}, Mail()
    one, other = (backend._groups_of(mesh) for mesh in (cf.Mesh(pp=2, device="cpu"), cf.Mesh(pp=2, dp=2, device="cpu")))
    with other.messages():
        pass
    backend.interrupted()
    for groups in (one, other):
        with pytest.raises(cf.CollectiveError, match="an earlier step raised"):
            groups.messages().__enter__()


def test_a_program_that_sends_outside_of_loops_does_not_begin_there_either() -> None:
    step, state, batch = mlp(8)
    program = cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches=2).lower(state, batch).program
    groups = ProcessGroups(cf.Mesh(pp=2), 1, {}, 1.0)
    with pytest.raises(FaultError), cf.testing.fail(rank=1, at="send"), groups.messages():
        groups.mail.under_way = True
        ask("send", (1,))
    loss = [node for node in program.nodes if node.target == SEND]
    assert loss, "the last stage tells it behind the loop"
    with pytest.raises(cf.CollectiveError, match="an earlier step raised"):
        RankProgram(attrs.evolve(program, nodes=tuple(loss)), groups, None)([])
    with pytest.raises(cf.InputError, match="were given"):  # without messages there is nothing to mistake
        RankProgram(attrs.evolve(program, nodes=()), groups, None)([])


def test_a_residual_sends_one_tensor_back() -> None:
    """Of the gradient that comes through a cut one reader takes a view, and another adds to it: it is sent once, and looked at there."""
    step, state, batch = gpt2(4, width=64)  # weights are larger than what a microbatch hands on, and stay where they are
    body = loop_of(cf.pipeline(cf.shard(step, cf.Mesh(pp=4)), microbatches=2).lower(state, batch).program).body
    sent = [(node.args[3], node.args[4], body.values[node.refs[0]].nbytes) for node in body.nodes if node.target == SEND]
    hidden = 4 * 8 * 64 * 8  # rows and tokens of a microbatch, width, bytes of float64
    assert sent == [(k, (k + 1,), hidden) for k in range(3)] + [(k + 1, (k,), hidden) for k in reversed(range(3))]


def test_a_mixture_of_experts() -> None:
    torch.manual_seed(0)
    sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    net = MixtralForCausalLM(MixtralConfig(**sizes, max_position_embeddings=16, num_local_experts=4, num_experts_per_tok=2)).double()
    step, state = cf.train_step(cf.functional(net), cf.adapt(torch.optim.SGD, lr=1e-2))
    ids = torch.randint(32, (8, 8))
    chain = cf.pipeline(cf.shard(step, cf.Mesh(pp=2, ep=2), experts("ep")), microbatches=4)
    agrees_with_one_device(chain, state, {"input_ids": ids, "labels": ids})


class Skips(nn.Module):
    """A value of the first stage is read by the last one, past those in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle, self.inner, self.up = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = torch.tanh(self.down(x))
        return self.up(torch.cat([torch.tanh(self.inner(torch.tanh(self.middle(first)))), first], 1))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_skip_past_stages(schedule: str) -> None:
    torch.manual_seed(0)
    step, state = cf.train_step(
        cf.functional(Skips().double()), cf.adapt(torch.optim.SGD, lr=1e-2), lambda out, b: out.pow(2).mean(), inputs=lambda b: ((b,), {})
    )
    places = {"down.*": 0, "middle.*": 1, "inner.*": 2, "up.*": 3}
    chain = cf.pipeline(cf.shard(step, cf.Mesh(pp=4)), microbatches=4, schedule=schedule, stages=places)
    agrees_with_one_device(chain, state, torch.randn(8, 8, dtype=torch.float64))


def test_inference_streams_microbatches_forward() -> None:
    torch.manual_seed(0)
    net = cf.functional(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)).double())

    def infer(params: Any, x: torch.Tensor) -> torch.Tensor:
        return net.apply(params, net.buffers, x)[0]

    x = torch.randn(8, 8, dtype=torch.float64)
    step = cf.pipeline(cf.shard(infer, cf.Mesh(pp=2)), microbatches=4)
    out = step(step.init(net.params, x), x)
    torch.testing.assert_close(out.full(), infer(net.params, x))
    assert {kind for _, kind in loop_of(step.lower(net.params, x).program).timetable.parts} == {"F"}


# ---- with other transforms ----

CHAINS: dict[str, Callable[[Any], Any]] = {
    "checkpoint": lambda step: cf.checkpoint(step, policy="nothing"),
    "offload": lambda step: cf.offload(step, policy="host"),
    "precision": lambda step: cf.precision(step, "bf16"),
}


# Each transform under one of the schedules; under the other one in the sweep.
BY_DEFAULT = {"checkpoint": "zb-h1", "offload": "1f1b", "precision": "zb-h1"}
EITHER = [
    pytest.param(schedule, name, marks=() if BY_DEFAULT[name] == schedule else pytest.mark.sweep)
    for schedule in ("1f1b", "zb-h1")
    for name in CHAINS
]


@pytest.mark.parametrize(("schedule", "name"), EITHER)
def test_other_transforms_in_either_order(schedule: str, name: str) -> None:
    step, state, batch = mlp()
    mesh = cf.Mesh(pp=2, dp=2)
    outside = CHAINS[name](cf.pipeline(cf.shard(step, mesh, zero(1, "dp")), microbatches=4, schedule=schedule))
    inside = cf.pipeline(cf.shard(CHAINS[name](step), mesh, zero(1, "dp")), microbatches=4, schedule=schedule)
    if name == "precision":
        check(outside, state, batch, steps=2)
    else:
        agrees_with_one_device(outside, state, batch)
    texts = [re.sub(" {4}#.*", "", chain.lower(state, batch).text()) for chain in (inside, outside)]
    assert texts[0] == texts[1]


def test_a_stage_keeps_less_where_it_makes_again() -> None:
    step, state, batch = gpt2()
    plain = cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches=4, schedule="gpipe")
    kept, again = plain.lower(state, batch), cf.checkpoint(plain, policy="nothing").lower(state, batch)
    assert again.memory(0).peak_bytes["device"] < 0.8 * kept.memory(0).peak_bytes["device"]


def test_compare_finds_no_difference() -> None:
    step, state, batch = mlp()
    assert cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches=4).compare(state, batch).equal


def test_what_is_shown_is_whole_and_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    net = cf.functional(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)))

    def infer(params: Any, x: torch.Tensor) -> torch.Tensor:
        cf.debug.print("given {}", x.sum())
        out = net.apply(params, net.buffers, x)[0]
        cf.debug.print("made {}", out.sum())
        return out

    x = torch.ones(8, 8)
    step = cf.pipeline(cf.shard(infer, cf.Mesh(pp=2)), microbatches=4)
    step(step.init(net.params, x), x)
    shown = capsys.readouterr().out
    assert shown.count("given") == shown.count("made") == 1


# ---- what a plan says, what is saved ----


def test_state_is_on_its_stage_and_loads_onto_fewer_stages(tmp_path: Any) -> None:
    step, state, batch = mlp()
    chain = cf.pipeline(cf.shard(step, cf.Mesh(pp=4)), microbatches=4)
    placed, _ = chain(chain.init(state, batch), batch)
    assert [placed["params"]["2.weight"].shards[rank].numel() > 0 for rank in range(4)] == [False, True, False, False]
    cf.save(str(tmp_path / "run"), placed)
    for mesh in (cf.Mesh(pp=2), None):
        loaded = cf.load(str(tmp_path / "run"), mesh=mesh)
        for name, x in loaded["params"].items():
            assert torch.equal(x.full() if isinstance(x, cf.DTensor) else x, placed["params"][name].full())


def test_the_text_says_who_does_what() -> None:
    step, state, batch = mlp()
    text = cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches=2).lower(state, batch).text()
    assert "pp=0: 0F0 0F1 0B0 0B1" in text and "-- 1B" in text


# ---- what cannot be ----


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(schedule="1f2b"), "unknown schedule '1f2b'; did you mean '1f1b'?"),
        (dict(axis="qq"), "cf.pipeline(axis='qq'): Mesh(pp=4"),
        (dict(microbatches=3), "3 microbatches do not divide the 16 rows"),
        (dict(microbatches=0), "microbatches=0 is no whole number above 0; write cf.pipeline(step, microbatches=4)"),
        (dict(stages={}), "stages={} names no stages"),
        (dict(stages=[("0.*", 0)]), "stages=[('0.*', 0)] names no stages; write stages={'layers.0.*': 0"),
        (dict(stages={0: 1}), "stages={0: 1} names no stages"),
        (dict(schedule=None), "unknown schedule None; schedules: '1f1b'"),
        (dict(schedule=["1f1b"]), "unknown schedule ['1f1b']; did you mean '1f1b'?"),
        (dict(axis=3), "cf.pipeline(axis=3): Mesh(pp=4"),
        (dict(stages={"0.*": 4}), "stages={'0.*': 4}: the schedule '1f1b' has 4 stages on 'pp'; write stages from 0 to 3, or"),
        (dict(stages={"9.*": 0}), "stages={'9.*': 0} matches no parameter; the first are"),
        (dict(stages={"0.*": 3, "2.*": 2, "4.*": 1, "6.*": 0}), "needs what a later stage makes: stages have to follow the order"),
    ],
)
def test_what_cannot_be_planned_is_an_error(options: dict[str, Any], says: str) -> None:
    step, state, batch = mlp()
    with pytest.raises(cf.PlanError, match=re.escape(says)):
        cf.pipeline(cf.shard(step, cf.Mesh(pp=4)), **options).lower(state, batch)


def test_a_batch_that_is_no_argument_is_an_error() -> None:
    step, state, batch = mlp()
    with pytest.raises(cf.InputError, match=r"batch=1\.5 is no argument: the step takes 2; write one of 'state', 'batch'"):
        cf.pipeline(cf.shard(step, cf.Mesh(pp=4)), batch=1.5).lower(state, batch)


def by_hand(*rows: str) -> types.ModuleType:
    """A plugin with a schedule `by-hand` of these rows."""
    plugin = types.ModuleType("by_hand")
    made = cf.ext.Schedule("by-hand", lambda ranks, microbatches, costs, cap_bytes: cf.ext.ActionTable.parse(rows))
    plugin.colofunc_schedules = cf.hookimpl(lambda: {"by-hand": made}, specname="colofunc_schedules")
    return plugin


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (("0F0 0F1 0B0 0B1", "1F0 1B0 1F1"), "a table for 2 stages and 2 microbatches lacks 1B1 (or 1I1 and 1W1)"),
        (("0F0 0F1 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"), "a table has 0F1 more than once"),
        (("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"), "deadlock: 0B0 waits for 1B0, which stands behind 1F1 on rank 1; 1F1 waits for 0F1"),
        (("0F0 0F1 0B0 0B1", "0F0 1F0 1B0 1F1 1B1"), "stage 0 is on rank 0 and, by 0F0, on rank 1"),
        (("0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"), "a table for 2 stages and 2 microbatches has 0F2, 0B2, 1F2, 1B2"),
    ],
)
def test_a_table_by_hand_that_cannot_be_run_names_its_actions(rows: tuple[str, ...], says: str) -> None:
    step, state, batch = mlp()
    with pytest.raises(cf.PlanError, match=re.escape(says)):
        cf.pipeline(cf.shard(step, cf.Mesh(pp=2), plugins=[by_hand(*rows)]), microbatches=2, schedule="by-hand").lower(state, batch)


def test_a_table_by_hand_is_run() -> None:
    step, state, batch = mlp()
    plugin = by_hand("0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1")
    low = agrees_with_one_device(
        cf.pipeline(cf.shard(step, cf.Mesh(pp=2), plugins=[plugin]), microbatches=2, schedule="by-hand"), state, batch
    )
    assert str(loop_of(low.program).timetable.table).splitlines()[0] == "0F0 0B0 0F1 0B1"


@pytest.mark.parametrize(
    ("schedule", "microbatches", "says"),
    [
        ("dualpipev", 2, "schedule 'dualpipev' needs at least 8 microbatches on 4 ranks and has 2; give microbatches=8"),
        ("interleaved-1f1b", 2, "schedule 'interleaved-1f1b' needs at least 4 microbatches on 4 ranks and has 2; give microbatches=4"),
        ("interleaved-1f1b", 1, "schedule 'interleaved-1f1b' needs at least 4 microbatches on 4 ranks and has 1; give microbatches=4"),
    ],
)
def test_a_schedule_that_needs_more_microbatches(schedule: str, microbatches: int, says: str) -> None:
    step, state, batch = mlp(8)
    with pytest.raises(cf.PlanError, match=re.escape(says)):
        cf.pipeline(cf.shard(step, cf.Mesh(pp=4)), microbatches=microbatches, schedule=schedule).lower(state, batch)


def test_a_budget_below_the_least_possible_says_the_least() -> None:
    step, state, batch = mlp()
    chain = cf.checkpoint(cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches=2), budget=1000)
    with pytest.raises(cf.PlanError, match=r"no plan found within 1,000 B a rank: the least found has a peak of [\d,]+ B.*; give at least"):
        chain.lower(state, batch)


def test_more_stages_than_layers_are_an_error() -> None:
    step, state, batch = mlp(2)
    with pytest.raises(cf.PlanError, match=re.escape("4 stages, and the forward pass has 2 operators with weights of their own")):
        cf.pipeline(cf.shard(step, cf.Mesh(pp=4)), microbatches=4).lower(state, batch)


def test_accumulate_beside_a_pipeline_is_an_error() -> None:
    step, _, _ = mlp()
    with pytest.raises(cf.PlanError, match="a pipeline has microbatches of its own"):
        cf.accumulate(cf.pipeline(step, microbatches=4), microbatches=2)


def test_an_operator_that_mixes_microbatches_is_an_error() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 4)).double()
    step, state = cf.train_step(
        cf.functional(net), cf.adapt(torch.optim.SGD, lr=1e-2), lambda out, b: out.pow(2).mean(), inputs=lambda b: ((b,), {})
    )
    with pytest.raises(cf.PlanError, match="mixes the samples of the batch"):
        cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches=2).lower(state, torch.randn(8, 8, dtype=torch.float64))


def test_parts_that_do_not_fit_the_body_are_found() -> None:
    step, state, batch = mlp()
    low = cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches=4).lower(state, batch)
    index = next(k for k, node in enumerate(low.program.nodes) if node.loop is not None and node.loop.timetable is not None)
    node = low.program.nodes[index]
    short = attrs.evolve(node.loop.timetable, ends=(*node.loop.timetable.ends[:-1], 1))
    edit = cf.ext.Editor(low.program)
    edit.replace(index, attrs.evolve(node, loop=attrs.evolve(node.loop, timetable=short)))
    with pytest.raises(cf.ProgramError, match="parts that end at"):
        check_program(edit.done(), low.mesh)


def test_messages_that_are_received_in_another_order_are_named() -> None:
    """A V gives activations and gradients to one rank: each kind in order, not all together, so that each has a channel of its own."""
    step, state, batch = mlp()
    here, back = ("pp", 0, 1), ("pp", 1, 0)
    expected = {
        "1f1b": {(*here, 1): 0, (*back, 2): 0},
        "zb-v": {(*here, 1): 1, (*here, 3): 2, (*back, 2): 1, (*back, 4): 2},
    }
    for schedule, numbers in expected.items():
        low = cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches=4, schedule=schedule).lower(state, batch)
        assert out_of_order(low.program, low.mesh) == ""
        assert channels(low.program, low.mesh) == numbers
    turned = by_hand("0F0 0F1 0B1 0B0", "1F1 1B1 1F0 1B0")
    chain = cf.pipeline(cf.shard(step, cf.Mesh(pp=2), plugins=[turned]), microbatches=2, schedule="by-hand")
    low = chain.lower(state, batch)
    assert out_of_order(low.program, low.mesh) == "message 1 of microbatch 1 from index 0 to 1 of 'pp'"


# ---- real ranks ----


def train(schedule: str, mesh: cf.Mesh, *plans: Any, microbatches: int | str = 8) -> list[float]:
    step, state, batch = mlp(8)
    with cf.testing.float64():
        chain = cf.pipeline(cf.shard(step, mesh, *plans), microbatches=microbatches, schedule=schedule)
        state = chain.init(state, batch)
        losses = []
        for _ in range(2):
            state, metrics = chain(state, batch)
            losses.append(float(metrics["loss"]))
    return losses


def train_all(ranks: int) -> dict[str, list[float]]:
    mesh = cf.Mesh(pp=ranks)
    losses = {schedule: train(schedule, mesh) for schedule in ("1f1b", "interleaved-1f1b", "zb-v")}
    # How many microbatches there are is chosen on one rank, and told to the others.
    return {**losses, "auto": train("1f1b", mesh, microbatches="auto")}


def train_with_zero() -> dict[str, list[float]]:
    """Parameters that are gathered beside the pipeline's messages, and updates that are."""
    mesh = cf.Mesh(pp=2, dp=2)
    return {
        "zero 3, 1f1b": train("1f1b", mesh, zero(3, "dp"), microbatches=4),
        "zero 1, zb-v": train("zb-v", mesh, zero(1, "dp"), microbatches=4),
    }


def losses_of_one_device() -> list[float]:
    """What `train` is to find."""
    step, state, batch = mlp(8)
    expected = []
    with cf.testing.float64():
        for _ in range(2):
            state, metrics = step(state, batch)
            expected.append(float(metrics["loss"]))
    return expected


@pytest.mark.dist
def test_real_ranks_compute_what_one_device_does() -> None:
    expected = losses_of_one_device()
    for found in launch(train_all, 2, 2):
        for losses in found.values():
            assert losses == pytest.approx(expected, rel=1e-10)


@pytest.mark.dist
@pytest.mark.sweep
def test_real_ranks_compute_what_one_device_does_with_zero_beside() -> None:
    expected = losses_of_one_device()
    for found in launch(train_with_zero, 4):
        assert len(found) == 2
        for losses in found.values():
            assert losses == pytest.approx(expected, rel=1e-10)


def messages_of_a_step(ranks: int) -> dict[str, tuple[int, ...]]:
    """By schedule: activations and gradients that a rank sent in a step, of them those that it copied for that; messages that it received
    into memory of another one, and batches that had several messages in them."""
    counts = [0, 0, 0, 0]
    sender, take, begin_together = ProcessGroups.sender, Buffers.take, messages.begin_together

    def counting(groups: ProcessGroups, axes: Any, targets: Any, own_tag: int) -> Any:
        send = sender(groups, axes, targets, own_tag)

        def counted(x: torch.Tensor, tag: int, last: bool = False, begin: bool = True) -> torch.Tensor:
            sent = send(x, tag, last, begin)
            if x.numel() > 1:  # the loss, which a rank may go on to read, is copied
                counts[0] += 1
                counts[1] += sent.data_ptr() != x.data_ptr()
            return sent

        return counted

    def taken(buffers: Buffers, room: Any, device: torch.device) -> torch.Tensor:
        counts[2] += bool(buffers._free.get(room))
        return take(buffers, room, device)

    def begun(some: Any) -> None:
        counts[3] += len(some) > 1
        begin_together(some)

    found = {}
    with mock.patch.multiple(ProcessGroups, sender=counting), mock.patch.multiple(Buffers, take=taken):
        with mock.patch.multiple(messages, begin_together=begun):
            for schedule in ("1f1b", "zb-v"):
                step, state, batch = mlp(8)
                chain = cf.pipeline(cf.shard(step, cf.Mesh(pp=ranks)), microbatches=4, schedule=schedule)
                counts[:] = [0, 0, 0, 0]
                chain(chain.init(state, batch), batch)
                found[schedule] = tuple(counts)
    return found


@pytest.mark.dist
def test_what_nobody_reads_later_is_sent_without_a_copy_and_its_memory_is_received_into() -> None:
    by_rank = launch(messages_of_a_step, 2, 2)
    for found in by_rank:
        assert {schedule: counts[:2] for schedule, counts in found.items()} == {"1f1b": (4, 0), "zb-v": (8, 0)}
        assert found["1f1b"][2] == 2
    assert by_rank[0]["1f1b"][3] == 2


def uneven() -> tuple[Any, Any, Any]:
    """(a pipeline of two stages, of which the second has four times the state, its state, a batch)."""
    torch.manual_seed(0)
    layers = {f"l{k}": nn.Sequential(nn.Linear(32, width), nn.Tanh(), nn.Linear(width, 32)) for k, width in enumerate((64, 256))}
    step, state = cf.train_step(
        cf.functional(nn.Sequential(OrderedDict(layers)).double()), cf.adapt(torch.optim.AdamW, lr=1e-2),
        lambda out, b: (out - b).pow(2).mean(), inputs=lambda b: ((b,), {}),
    )  # fmt: skip
    chain = cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches=2, stages={"l0.*": 0, "l1.*": 1})
    return chain, state, torch.randn(4, 32, dtype=torch.float64)


def held(chain: Any, state: Any, batch: Any, tier: str) -> list[int]:
    low = chain.lower(state, batch)
    return [low.memory(rank=rank).peak_bytes.get(tier, 0) for rank in range(2)]


def test_a_stage_puts_away_what_it_has_no_room_for_itself() -> None:
    """Not what all stages together have no room for."""
    chain, state, batch = uneven()
    plain = held(chain, state, batch, "device")
    assert held(cf.offload(chain, budget=max(plain)), state, batch, "host") == [0, 0]
    budget = max(plain) - 30_000
    within = cf.offload(chain, budget=budget)
    agrees_with_one_device(within, state, batch)
    near, far = (held(within, state, batch, tier) for tier in ("device", "host"))
    assert near[0] == plain[0] and near[1] <= budget
    assert far[0] <= 16 and far[1] >= 30_000, "a scalar that updates read on the host is there on all ranks"


def test_a_stage_puts_on_disk_what_its_host_has_no_room_for(tmp_path: Any) -> None:
    chain, state, batch = uneven()
    away = held(cf.offload(chain, policy="host"), state, batch, "host")
    roomy = cf.offload(chain, policy="host", host=max(away), disk=str(tmp_path))
    assert held(roomy, state, batch, "disk") == [0, 0]
    tight = cf.offload(chain, policy="host", host=max(away) * 2 // 3, disk=str(tmp_path))
    agrees_with_one_device(tight, state, batch)
    there = held(tight, state, batch, "disk")
    assert there[0] == 0 < there[1] and max(held(tight, state, batch, "host")) <= max(away) * 2 // 3


def test_host_memory_of_stages_is_counted_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where only what was best for a like program is tried, each rank's own: it is refused where one rank has no room."""
    chain, state, batch = uneven()
    low = cf.offload(chain, policy="host").lower(state, batch)
    weights = (256 * 32 * 2 + 256 + 32) * 8  # bytes of the second stage
    said = f"on the host of the fullest rank: {size_text(weights)} of params, {size_text(2 * weights)} of states; "
    assert any(line.startswith(said) for line in low.plan.memory)
    away = max(low.memory(rank=rank).peak_bytes["host"] for rank in range(2))
    seen: list[_Offloading] = []
    fastest = _Offloading.fastest
    monkeypatch.setattr(_Offloading, "fastest", lambda self: (seen.append(self), fastest(self))[1])
    cf.offload(chain, policy="host", host=away * 11 // 10).lower(state, batch)
    best = seen[-1].best_for(None)
    assert [one.ground.program is not best.ground.program for one in best.ranks] == [True, True]
    assert [best.hint.of_rank(number) for number in range(2)] == [one.hint for one in best.ranks]
    assert seen[-1].estimate(best.hint).short == ""


@pytest.mark.sweep
def test_a_tied_weight_stays_where_stages_move_their_own() -> None:
    step, state, batch = gpt2(layers=2)
    chain = cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches=2)
    plain = held(chain, state, batch, "device")
    within = cf.offload(chain, budget=max(plain) * 9 // 10)
    agrees_with_one_device(within, state, batch)
    assert max(held(within, state, batch, "device")) <= max(plain) * 9 // 10
    assert min(held(within, state, batch, "host")) <= 16


def on_disks(directory: str) -> Any:
    """A pipeline whose state lies on disk, beside the same in memory."""
    step, state, batch = mlp(8)
    chain = cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches=4, schedule="1f1b")
    return (step, state, batch), cf.offload(chain, policy="disk", disk=directory)


def train_on_disks(directory: str) -> tuple[float, int]:
    (_, state, batch), chain = on_disks(directory)
    with cf.testing.float64():
        state, batch = doubled_inside((state, batch))
        state = chain.init(state, batch)
        for _ in range(2):
            state, metrics = chain(state, batch)
        return float(metrics["loss"]), sum(part.numel() > 0 for part in state["params"]["0.weight"].parts_in_flight)


def test_state_of_stages_on_disk(tmp_path: Any) -> None:
    (_, state, batch), chain = on_disks(str(tmp_path))
    low = agrees_with_one_device(chain, state, batch)
    stage_of = {leaf.name.removeprefix("state.params."): leaf.at[1] for leaf in low.plan.inputs if leaf.role == "param"}
    for rank in range(2):
        own = sum(x.nbytes for name, x in state["params"].items() if stage_of[name] == (rank,))
        assert low.memory(rank=rank).peak_bytes["disk"] == 3 * own > 0, "a stage's parameters and their two moments"


@pytest.mark.dist
def test_state_of_stages_on_disks_of_real_ranks(tmp_path: Any) -> None:
    (step, state, batch), _ = on_disks(str(tmp_path))
    with cf.testing.float64():
        state, batch = doubled_inside((state, batch))
        for _ in range(2):
            state, metrics = step(state, batch)
    told = launch(train_on_disks, 2, str(tmp_path))
    assert [loss for loss, _ in told] == pytest.approx([float(metrics["loss"])] * 2, rel=1e-10)
    assert [there for _, there in told] == [1, 0]


def dies_in_a_step() -> None:
    step, state, batch = mlp(8)
    with cf.testing.float64():
        chain = cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches=8, schedule="zb-v")
        state, _ = chain(chain.init(state, batch), batch)
        with cf.testing.fail(rank=1, at="send"):
            chain(state, batch)
            time.sleep(30)  # the watch ends this rank


def is_killed_in_a_step() -> None:
    step, state, batch = mlp(8)
    chain = cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches=8, schedule="zb-v")
    state, _ = chain(chain.init(state, batch), batch)
    if cf.Mesh(pp=2).rank == 1:
        begun = PostedActions.__iter__

        def until_the_ninth(ahead: PostedActions) -> Iterator[tuple[int, int]]:
            for count, action in enumerate(begun(ahead)):
                if count == 8:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield action

        PostedActions.__iter__ = until_the_ninth
    chain(state, batch)
    time.sleep(30)  # the watch ends this rank


@pytest.mark.dist
def test_a_rank_that_is_killed_between_two_actions_ends_all() -> None:
    began = time.monotonic()
    with pytest.raises(cf.ColofuncError, match="rank 1"):
        launch(is_killed_in_a_step, 2, timeout_s=200)
    assert time.monotonic() - began < 60


@pytest.mark.dist
def test_a_rank_that_fails_within_a_microbatch_ends_all() -> None:
    began = time.monotonic()
    with pytest.raises(FaultError, match="rank 1 fails at send") as caught:
        launch(dies_in_a_step, 2, timeout_s=200)
    assert "on rank 1" in caught.value.__notes__[-1] and time.monotonic() - began < 60


class Tied(nn.Module):
    """An embedding that is the head too, with some layers between."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x).tanh()
        return nn.functional.linear(x, self.embedding.weight)


def test_a_plan_says_that_one_stage_has_most_of_the_work_or_all_of_it() -> None:
    def lowered(layers: int) -> Any:
        step, state = cf.train_step(
            cf.functional(Tied(layers)), cf.adapt(torch.optim.SGD, lr=0.1), inputs=lambda ids: ((ids,), {}),
            loss=lambda out, ids: nn.functional.cross_entropy(out.flatten(0, 1), ids.flatten()),
        )  # fmt: skip
        return cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches=4).lower(state, torch.zeros(8, 16, dtype=torch.int64))

    with pytest.warns(UserWarning, match=r"one stage has all the work and none sends to another.*Try: stages= that divide the work"):
        low = lowered(1)  # the tied weight is on both stages, and the layer on one
    assert low.plan.pipeline is None and "4 microbatches follow one another there" in low.plan.table()
    table = lowered(2).plan.table()
    assert re.search(r"pp=1 does \d\d% of the pipeline's work, where 50% would be even, and the others wait for it. Try: other", table)


def test_one_rank_is_no_stage_that_has_all_the_work() -> None:
    step, state, batch = mlp()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        low = cf.pipeline(cf.shard(step, cf.Mesh(pp=1)), microbatches=2).lower(state, batch)
    assert "one stage has all the work" not in low.plan.table()


def test_a_plan_says_where_a_parameter_is_and_what_another_cut_changes() -> None:
    """It said that a stage's weight is the same on every rank, and that plans with other cuts decide alike."""
    step, state, batch = mlp()

    def plan(first: int) -> Any:
        stages = {f"{2 * layer}.*": int(layer >= first) for layer in range(4)}  # activations are between
        return cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches=2, stages=stages).lower(state, batch).plan

    one, other = plan(1), plan(2)
    said = one.why("0.weight")
    assert "kept as 'a b @pp=0'" in said and "at pp=0 only, where its stage is" in said and "the same on every rank" not in said
    name = next(leaf.name for leaf in one.inputs if leaf.name.endswith("2.weight") and leaf.role == "param")
    assert f"{name}: a b @pp=1 -> a b @pp=0" in one.diff(other)
    assert one.why_not("cut by memory").startswith("cut by memory: not compared. Other cuts are where stages= are open")
