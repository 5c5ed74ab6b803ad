"""Memory of compiled steps: what the accountant leaves out, by hand, and never less than what compiled functions allocate."""

from functools import partial

import pytest
import torch
from test_executors import R, program
from torch import nn
from torch.profiler import ProfilerActivity, profile

import colofunc as cf
from colofunc.executors.unwritten import counted
from colofunc.program.memory import memory

SIDE = 64
NBYTES = 8 * SIDE * SIDE


def timeline(nodes, outputs, inputs=(0,), count=8):
    made = program(list(inputs), nodes, outputs, [(SIDE, SIDE)] * count)
    return [n // NBYTES for n in memory(made, fusion=counted).timeline["device"]]


def test_a_chain_holds_what_it_reads_and_what_it_writes():
    chain = [("aten.neg.default", (R(0),), (1,)), ("aten.exp.default", (R(1),), (2,)), ("aten.relu.default", (R(2),), (3,))]
    assert timeline(chain, [3]) == [1, 1, 2]


def test_what_a_product_or_the_rest_of_the_step_reads_is_written():
    nodes = [
        ("aten.neg.default", (R(0),), (1,)), ("aten.mul.Tensor", (R(1), R(0)), (2,)), ("aten.mm.default", (R(2), R(2)), (3,)),
        ("aten.relu.default", (R(3),), (4,)), ("aten.add.Tensor", (R(4), R(1)), (5,)),
    ]  # fmt: skip
    # 1 and 2 are written in front of the product, 4 is not, and 3 is held for 5, which computes 4 again.
    assert timeline(nodes, [5]) == [2, 3, 4, 3, 4]


def test_a_view_of_a_value_that_is_read_elsewhere_is_written_with_it():
    nodes = [
        ("aten.neg.default", (R(0),), (1,)), ("aten.t.default", (R(1),), (2,)), ("aten.mm.default", (R(2), R(0)), (3,)),
        ("aten.relu.default", (R(3),), (4,)),
    ]  # fmt: skip
    assert timeline(nodes, [4]) == [2, 2, 3, 3]


def test_a_function_holds_its_operands_until_it_returns():
    wire = ("colofunc.all_reduce", (R(0), ("dp",), 2, "sum"), (1,))
    nodes = [
        wire, ("aten.neg.default", (R(1),), (2,)), ("aten.mm.default", (R(2), R(2)), (3,)), ("aten.relu.default", (R(3),), (4,)),
        ("aten.neg.default", (R(4),), (5,)), ("aten.mm.default", (R(5), R(0)), (6,)), ("aten.relu.default", (R(6),), (7,)),
    ]  # fmt: skip
    made = program([0], nodes, [7], [(SIDE, SIDE)] * 8)
    plain, compiled = (memory(made, fusion=fusion).timeline["device"] for fusion in (None, counted))
    assert compiled[-1] == plain[-1] + NBYTES


class Head(nn.Module):
    def __init__(self, last):
        super().__init__()
        self.linear, self.last = nn.Linear(16, 2048), last

    def forward(self, x):
        return self.last(self.linear(x))


class Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm, self.up, self.down = norm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def blocks(norm):
    return nn.Sequential(*(Block(norm) for _ in range(2)))


def cross_entropy(out):
    return nn.functional.cross_entropy(out.float(), torch.arange(len(out)) % out.shape[-1])


def long_chain(x):
    for k in range(12):
        x = torch.where(x > k, x * 0.5 + k, -x) + x / (k + 1)
    return x


KINDS = {
    "cross entropy in bfloat16": (partial(Head, nn.Identity()), 16, cross_entropy, "bf16"),
    "softmax": (partial(Head, nn.Softmax(-1)), 16, None, None),
    "exponentials": (partial(Head, lambda x: x.tanh().exp().sigmoid() * x.exp()), 16, None, None),
    "a long chain": (partial(Head, long_chain), 16, None, None),
    "layer norms": (partial(blocks, nn.LayerNorm), 64, None, None),
    "rms norms": (partial(blocks, nn.RMSNorm), 64, None, None),
}
LONG = ("cross entropy in bfloat16", "layer norms")


FEW_BYTES = 256
"""Numbers by themselves: they are made on the host, or are smaller than what an allocator rounds to."""


def allocated_bytes(run):
    """The most that is allocated at once while `run` runs, beside what was there."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    most = total = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            total += event.nbytes()
            most = max(most, total)
    return most


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.sweep] * (kind in LONG)) for kind in KINDS])
def test_never_less_than_compiled_functions_hold(kind):
    make, width, loss, dtype = KINDS[kind]
    torch.manual_seed(0)
    step_fn, state = cf.train_step(
        cf.functional(make()), cf.adapt(torch.optim.AdamW, lr=1e-4), loss=loss or (lambda out: out.square().mean())
    )
    staged, x = cf.shard(step_fn, cf.Mesh()), torch.randn(1024, width)
    staged = (staged if dtype is None else cf.precision(staged, dtype)).on("compiled")
    state = staged.init(state, x)
    low = staged.lower(state, x)
    for _ in range(2):  # compiled, then once more: the pools of the first step are made
        state, _ = staged(state, x)
    given = sum(low.program.values[i].nbytes for i in low.program.inputs if i not in low.program.constants)
    measured = given + allocated_bytes(lambda: staged(state, x))
    assert measured <= low.memory().peak_bytes["device"] + FEW_BYTES


def test_a_loss_that_other_software_leaves_as_it_is_is_written():
    """Logits (16384, 1024) in bfloat16: their log-softmax and two gradients are there where the loss is not compiled."""
    head = torch.nn.Linear(64, 1024, dtype=torch.bfloat16)

    class WithLoss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.loss = head, torch.nn.CrossEntropyLoss()

        def forward(self, x, y):
            return self.loss(self.head(x), y)

    model, opt = cf.functional(WithLoss()), cf.adapt(torch.optim.SGD, lr=0.1)
    step_fn, state = cf.train_step(model, opt, loss=lambda out: out)
    batch = {"x": cf.abstract((16384, 64), torch.bfloat16), "y": cf.abstract((16384,), torch.int64)}
    h100 = cf.Mesh(topology="8xh100").topology
    lows = []
    for machine in (h100, h100.with_software(uncompiled=["loss"])):
        step = cf.shard(step_fn, cf.Mesh(dp=1, topology=machine)).on("compiled")
        lows.append(step.lower(state, batch))
    compiled, as_written = lows
    logits_bytes = 16384 * 1024 * 2
    assert as_written.memory().peak_bytes["device"] >= compiled.memory().peak_bytes["device"] + logits_bytes // 2
    assert as_written.lanes().end_s > compiled.lanes().end_s + logits_bytes / h100.device.memory_bytes_per_s
