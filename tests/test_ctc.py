"""CTC loss in a step: every form that torch takes, on meshes, equal to torch on one device with its gradient."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from colofunc_plugins import zero

import colofunc as cf

STEPS, SAMPLES, CLASSES = 7, 6, 5
GEN = torch.Generator().manual_seed(3)
SCORES = torch.randn(STEPS, SAMPLES, CLASSES, generator=GEN, dtype=torch.float64)
ROWS = torch.randint(1, CLASSES, (SAMPLES, 4), generator=GEN)
INPUTS = torch.tensor([7, 7, 5, 3, 6, 7])  # too few for the fourth sample: an infinite loss
LENGTHS = torch.tensor([4, 3, 2, 4, 1, 0])
JOINED = torch.cat([row[:n] for row, n in zip(ROWS, LENGTHS.tolist(), strict=True)])


def with_gradient(**options: Any) -> Any:
    def step(x: torch.Tensor, targets: torch.Tensor, *lengths: Any) -> Any:
        return cf.value_and_grad(lambda x: F.ctc_loss(x.log_softmax(-1), targets, *lengths, **options).square().sum())(x)

    return step


def full(tree: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda x: x.full(), tree)


def equal(got: Any, want: Any) -> None:
    """Infinite losses and their undefined gradients are equal too."""
    torch.testing.assert_close(full(got), want, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("targets", [ROWS, JOINED], ids=["rows", "joined"])
@pytest.mark.parametrize(("reduction", "zero_infinity"), list(itertools.product(("none", "mean", "sum"), (True, False))))
@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 2, "tp": 3}])
def test_samples_split_and_nothing_changes(axes, reduction, zero_infinity, targets):
    step = with_gradient(reduction=reduction, zero_infinity=zero_infinity)
    arguments = (SCORES, targets, INPUTS, LENGTHS)
    sharded = cf.shard(step, cf.Mesh(**axes), in_specs=("t (dp n) c", None, None, None))
    equal(sharded(*arguments), step(*arguments))
    assert "ctc_loss" in (text := sharded.lower(*arguments).text()) and "({dp: n})" in text
    assert sharded.lower(*arguments).coverage().fallbacks == ()


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("targets", [ROWS, JOINED], ids=["rows", "joined"])
def test_lengths_may_be_python_numbers(targets, kind):
    step = with_gradient(zero_infinity=True)
    lengths = kind(INPUTS.tolist()), kind(LENGTHS.tolist())
    sharded = cf.shard(lambda x, y: step(x, y, *lengths), cf.Mesh(dp=3), in_specs=("t (dp n) c", None))
    equal(sharded(SCORES, targets), step(SCORES, targets, *lengths))


@pytest.mark.parametrize("lengths", [([7], [4]), (torch.tensor(7), torch.tensor(4)), (torch.tensor([7]), torch.tensor([4]))])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_one_sample_without_a_batch(lengths, reduction):
    step = with_gradient(reduction=reduction)
    one = SCORES[:, 0], ROWS[0]
    equal(cf.shard(lambda x, y: step(x, y, *lengths), cf.Mesh(dp=2))(*one), step(*one, *lengths))


def test_samples_that_ranks_do_not_divide():
    step = with_gradient(zero_infinity=True)
    five = SCORES[:, :5], ROWS[:5], INPUTS[:5], LENGTHS[:5]
    specs = ("t (dp n~) c", "(dp n~) s", "(dp n~)", "(dp n~)")
    equal(cf.shard(step, cf.Mesh(dp=2), in_specs=specs)(*five), step(*five))


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("lengths", [[5, 1, 3], [0, 0, 0]])
def test_joined_targets_longer_than_the_inputs_and_empty_ones(lengths, as_list):
    step = with_gradient(zero_infinity=True)
    x, joined, inputs = torch.randn(2, 3, CLASSES, dtype=torch.float64), torch.ones(sum(lengths), dtype=torch.int64), [2, 2, 2]
    if as_list:
        equal(cf.shard(lambda x, y: step(x, y, inputs, lengths), cf.Mesh(dp=3))(x, joined), step(x, joined, inputs, lengths))
    else:
        arguments = x, joined, torch.tensor(inputs), torch.tensor(lengths)
        equal(cf.shard(step, cf.Mesh(dp=3))(*arguments), step(*arguments))


@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_training_step_under_zero(microbatches):
    model = cf.functional(torch.nn.Linear(CLASSES, CLASSES).double())
    loss = torch.nn.CTCLoss(zero_infinity=True)

    def step(params, batch):
        def loss_of(params):
            scores = model.apply(params, model.buffers, batch["x"].transpose(0, 1))[0].log_softmax(-1)
            return loss(scores, batch["targets"], batch["inputs"], batch["lengths"])

        return cf.value_and_grad(loss_of)(params)

    batch = {"x": SCORES.transpose(0, 1).contiguous(), "targets": ROWS, "inputs": INPUTS, "lengths": LENGTHS}
    sharded = cf.shard(step, cf.Mesh(dp=2), zero(3, "dp"))
    equal((cf.accumulate(sharded, microbatches) if microbatches > 1 else sharded)(model.params, batch), step(model.params, batch))


def test_what_does_not_fit_says_so():
    mesh = cf.Mesh(dp=2)
    five, numbers = [7] * 5, LENGTHS.tolist()
    with pytest.raises(cf.ColofuncError, match=r"input_lengths \(5,\) and target_lengths \(6,\) are not .*Try: log_probs.transpose"):
        cf.shard(lambda x, y: F.ctc_loss(x, y, five, numbers), mesh)(SCORES, ROWS)
    with pytest.raises(cf.ColofuncError, match=r"targets \(13,\) and target_lengths that add up to 14"):
        cf.shard(lambda x, y: F.ctc_loss(x, y, [7] * 6, numbers), mesh)(SCORES, JOINED[1:])
    for joined in (JOINED[1:], torch.cat([JOINED, JOINED[:1]])):
        with pytest.raises(IndexError, match="out of bounds"):
            cf.shard(F.ctc_loss, mesh)(SCORES, joined, INPUTS, LENGTHS)
    with pytest.raises(TypeError, match="ctc_loss"):
        cf.shard(lambda x, y, n: F.ctc_loss(x, y, n, numbers), mesh)(SCORES, ROWS, INPUTS)

    def penalty(x):
        inner = cf.value_and_grad(lambda x: F.ctc_loss(x, ROWS, INPUTS, LENGTHS, zero_infinity=True))
        return cf.value_and_grad(lambda x: inner(x)[1].square().sum())(x)

    with pytest.raises(cf.TraceError, match=r"F\.ctc_loss has no second derivative, in torch neither"):
        cf.shard(penalty, mesh)(SCORES)


def test_under_autocast_it_is_computed_in_float32():
    def step(x, y, inputs, lengths):
        with torch.autocast("cpu", torch.bfloat16):
            return F.ctc_loss(F.linear(x, torch.eye(CLASSES)).log_softmax(-1).bfloat16(), y, inputs, lengths, zero_infinity=True)

    arguments = SCORES.float(), ROWS, INPUTS, LENGTHS
    got = full(cf.shard(step, cf.Mesh(dp=2))(*arguments))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, step(*arguments), rtol=1e-6, atol=0)


def joined_by_a_mask(x: torch.Tensor, labels: torch.Tensor, lengths: torch.Tensor) -> Any:
    """As transformers joins targets: how many there are is known to the values alone."""
    mask = labels >= 0
    targets = torch.masked_select(labels, mask)
    return cf.value_and_grad(lambda x: F.ctc_loss(x.log_softmax(-1), targets, lengths, mask.sum(-1), zero_infinity=True))(x)


LEFT_OUT = ("behind", "between", "all", "none")
LEFT_OUT_ON = [
    *(({"dp": 2}, left_out) for left_out in LEFT_OUT), ({"dp": 3, "tp": 2}, "behind"),
    *(pytest.param({"dp": 3, "tp": 2}, left_out, marks=pytest.mark.sweep) for left_out in LEFT_OUT[1:]),
]  # fmt: skip


@pytest.mark.parametrize(("axes", "left_out"), LEFT_OUT_ON)
def test_targets_that_a_mask_joins(axes, left_out):
    labels = ROWS.clone()
    if left_out == "behind":
        labels[torch.arange(4) >= LENGTHS[:, None]] = -100
    elif left_out == "between":
        labels[::2, 1] = -100
    elif left_out == "all":
        labels[:] = -100
    step = cf.shard(joined_by_a_mask, cf.Mesh(**axes), in_specs=("t (dp n) c", "(dp n) s", "(dp n)"))
    equal(step(SCORES, labels, INPUTS), joined_by_a_mask(SCORES, labels, INPUTS))


OTHER_USES = {
    "shape": lambda selected: torch.zeros(selected.shape),
    "sum": lambda selected: selected.sum(),
    "arithmetic": lambda selected: 1 + selected,
    "in a list": lambda selected: torch.cat([selected, selected]),
    "index": lambda selected: torch.arange(9)[selected],
    "result": lambda selected: selected,
    "loop": list,
    "length": len,
}


@pytest.mark.parametrize("use", OTHER_USES.values(), ids=OTHER_USES)
def test_every_other_use_of_what_a_mask_joins_needs_its_size(use):
    step = cf.shard(lambda labels: use(labels.masked_select(labels > 0)), cf.Mesh(dp=2))
    with pytest.raises(cf.TraceError, match=r"aten.masked_select.default makes a result of a shape .* at test_ctc.py:\d+"):
        step(ROWS)


@pytest.mark.sweep
def test_a_speech_model_of_transformers_trains():
    transformers = pytest.importorskip("transformers")
    config = transformers.Wav2Vec2Config(
        vocab_size=16, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, conv_dim=[8, 8],
        conv_stride=[5, 2], conv_kernel=[10, 3], num_feat_extract_layers=2, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
        layerdrop=0.0, mask_time_prob=0.0,
    )  # fmt: skip
    labels = torch.randint(1, 16, (4, 5))
    labels[1::2, 3:] = -100
    with cf.testing.float64():
        model = cf.functional(transformers.Wav2Vec2ForCTC(config).double())
        step, state = cf.train_step(model, cf.adapt(torch.optim.SGD, lr=1e-2), loss=lambda out: out.loss)
        sharded = cf.shard(step, cf.Mesh(dp=2), zero(3, "dp"))
        cf.testing.check(sharded, state, {"input_values": torch.randn(4, 200), "labels": labels}, steps=1)
