"""cf.batches and cf.pad: the rows, losses and order of one device, wherever they are read; positions, threads, errors."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from colofunc_plugins import zero
from loaded import MESH, equal, full, numbers, samples, script, squares
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, WeightedRandomSampler
from transformers import BatchEncoding

import colofunc as cf
from colofunc.errors import InputError, PlanError, SpecError
from colofunc.functional.reading import RowSampler

# ---- the same batches as one device ----


@pytest.mark.parametrize("workers", [0, 2])
def test_the_batches_of_the_loader_itself(workers):
    loader = DataLoader(samples(8), 4, shuffle=True, num_workers=workers)
    torch.manual_seed(3)
    want = [*loader, *loader]  # two epochs
    torch.manual_seed(3)
    data = cf.batches(loader, MESH)
    assert len(data) == 2
    got = [*data, *data]
    equal([full(b) for b in got], want)
    assert str(got[0]["labels"].spec) == "(dp a) b" and got[0]["labels"].shards[3].shape == (2, 5) and data.epoch == 2


@pytest.mark.parametrize(
    "sampler",
    [
        lambda data: RandomSampler(data, generator=torch.Generator().manual_seed(5)),
        lambda data: WeightedRandomSampler([1.0] * 9 + [50.0], 12),
        lambda data: range(0, 8, 2),
    ],
)
def test_samplers(sampler):
    def loader():
        return DataLoader(numbers(), 2, sampler=sampler(numbers()))

    torch.manual_seed(0)
    want = [list(b) for b in loader()]
    torch.manual_seed(0)
    equal([full(b) for b in cf.batches(loader(), MESH, short="keep")], want)


# ---- the same script on every mesh ----


AXES = [{"dp": 1}, {"dp": 2}, {"tp": 2}, {"fsdp": 2}, {"dp": 2, "tp": 2}, {"fsdp": 2, "tp": 2}, {"a": 2, "b": 3}, {"dp": 2, "b": 2}]


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_the_same_script_on_every_mesh(axes):
    torch.testing.assert_close(script(cf.Mesh(**axes)), script(cf.Mesh()), rtol=1e-10, atol=0)


@pytest.mark.parametrize(
    ("axes", "plans", "options", "lies"),
    [
        ({"fsdp": 2}, [zero(3, "fsdp")], {}, "(fsdp a) b"),
        ({"dp": 2, "fsdp": 2}, [zero(3, ("dp", "fsdp"))], {}, "(dp fsdp) a"),
        ({"dp": 2, "fsdp": 2}, [zero(1, "fsdp")], {}, "(fsdp dp) a"),
        ({"dp": 2}, [{"batch.0": "b (dp s)"}], {}, "a dp"),
        ({"dp": 2}, [], {"in_specs": {"batch": ("b (dp s)", None, None)}}, "a dp"),
        ({"dp": 2}, [], {}, "(dp a) b"),
    ],
)
def test_rows_lie_as_the_step_wants_them(axes, plans, options, lies):
    mesh = cf.Mesh(**axes)
    assert script(mesh, *plans, **options) == pytest.approx(script(cf.Mesh()), rel=1e-10)
    data = cf.batches([(torch.ones(4, 2).double(), torch.ones(4).double(), torch.ones(4).double())], mesh)
    low = cf.shard(squares, mesh, *plans, **options).lower({"w": torch.ones(2, dtype=torch.float64)}, data.peek())
    assert next(leaf.spec for leaf in low.plan.inputs if leaf.name == "batch.0") == lies


def test_rows_that_were_placed_on_purpose_stay():
    mesh = cf.Mesh(dp=2)
    (batch,) = cf.batches([(torch.ones(4, 2), torch.ones(4), torch.ones(4))], mesh, "(dp b) ...")
    with pytest.raises(PlanError, match="already lies as"):
        cf.shard(squares, mesh, {"batch.0": "b (dp s)"}).lower({"w": torch.ones(2)}, batch)


def test_striped_rows_and_split_sequences():
    (batch,) = cf.batches([{"x": torch.arange(32.0).reshape(4, 8), "y": torch.arange(4)}], MESH, "(b dp) (tp s)")
    equal(batch["x"].shards[1], torch.arange(32.0).reshape(4, 8)[0::2, 4:])
    equal(batch["y"].shards[2], torch.tensor([1, 3]))


def test_trees_of_specs():
    table = torch.randn(3, 2)
    specs = {"x": "(dp b) s", "extra": {"table": None, "scale": "..."}}
    (batch,) = cf.batches([{"x": np.ones((4, 2)), "extra": {"table": table, "scale": 2.5}}], MESH, specs)
    assert batch["x"].dtype == torch.float64 and batch["extra"]["table"].sharding.is_replicated
    equal(batch["extra"]["table"].full(), table)
    assert float(batch["extra"]["scale"]) == 2.5
    with pytest.raises(InputError, match=r"'extra.table' \(3, 2\) has not the 4 rows of its batch; give it a spec of its own"):
        next(iter(cf.batches([{"x": torch.ones(4, 2), "y": torch.ones(4), "extra": {"table": table}}], MESH)))
    with pytest.raises(InputError, match="misses 'y'"):
        next(iter(cf.batches([{"x": torch.ones(4, 2), "y": torch.ones(4)}], MESH, {"x": "(dp b) s"})))
    with pytest.raises(SpecError, match="did you mean 'dp'"):
        cf.batches([], MESH, "(ddp b) ...")


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    name: str


def test_what_collators_make(capsys):
    ids = torch.arange(8).reshape(4, 2)
    encoding = BatchEncoding({"input_ids": ids, "text": ["a", "b", "c", "d"], "kind": None, "n": 3, "ids": np.arange(4)})
    first, record, pair = cf.batches([encoding, Record(ids, "train"), [ids, "x"]], MESH)
    assert isinstance(first, BatchEncoding) and list(first) == ["input_ids", "kind", "n", "ids"]
    assert first["kind"] is None and first["n"] == 3 and first["ids"].full().tolist() == [0, 1, 2, 3]
    assert isinstance(record, Record) and record.name is None and isinstance(pair, list) and pair[1] is None
    said = capsys.readouterr().err
    assert said.count("cf.batches leaves out 'text', which holds no tensor") == 1


# ---- short last batches ----


def test_short_batches_keep_their_token_mean():
    loader = DataLoader(samples(10), 4)
    want = [float(F.cross_entropy(model(b["input_ids"]), b["labels"].reshape(-1))) for b in loader]
    step = cf.shard(lambda b: F.cross_entropy(model(b["input_ids"]), b["labels"].reshape(-1)), MESH)
    got = list(cf.batches(loader, MESH))
    assert [b["labels"].shape[0] for b in got] == [4, 4, 4] and got[2]["labels"].full()[:, 0].tolist() == [8, 9, -100, -100]
    torch.testing.assert_close([float(step(b)) for b in got], want, atol=1e-10, rtol=0)


def model(ids):
    return (ids.reshape(-1, 1).double() * torch.arange(1, 101).double()).sin()


def test_short_batches_keep_their_weighted_mean():
    loader = DataLoader(numbers(7), 4)
    want = [float((x.double().sum(1) * y.double()).mean()) for x, y in loader]

    def loss(batch):
        x, y, weight = batch
        return ((x.double().sum(1) * y.double()) * weight).sum() / weight.sum()

    step = cf.shard(loss, MESH)
    got = list(cf.batches(loader, MESH, weights="weight"))
    assert got[1][2].full().tolist() == [1, 1, 1, 0]
    torch.testing.assert_close([float(step(b)) for b in got], want, atol=1e-10, rtol=0)
    (bare,) = cf.batches([torch.ones(3, 2)], MESH, weights="w")
    assert bare[1].full().tolist() == [1, 1, 1, 0]
    (named,) = cf.batches([{"x": torch.ones(3, 2)}], MESH, weights="w")
    assert named["w"].full().tolist() == [1, 1, 1, 0] and named["x"].shape == (4, 2)


def test_added_rows_that_nothing_tells_apart_are_refused_at_once():
    data = cf.batches(DataLoader(numbers(7), 4), MESH)
    with pytest.raises(InputError, match=r'none of 0, 1 tells a loss to leave them out; write weights="weight"'):
        next(iter(data))
    with pytest.raises(InputError, match="needs added rows"):  # float labels are targets, which no value switches off
        list(cf.batches([{"x": torch.ones(3, 2), "labels": torch.ones(3)}], MESH))
    x, y = list(cf.batches(DataLoader([(torch.ones(2), i) for i in range(7)], 4), MESH, fill={"1": -100}))[1]
    assert y.full().tolist() == [4, 5, 6, -100] and x.shape == (4, 2)


@pytest.mark.parametrize("axes", [{}, {"tp": 2}, {"fsdp": 2}])
def test_a_short_batch_stays_short_where_no_axis_splits_rows_and_nothing_would_mark_them(axes):
    """One device loops over such a loader; so does every mesh whose ranks have all rows."""
    assert [len(x) for x, _ in cf.batches(DataLoader(numbers(7), 4), cf.Mesh(**axes))] == [4, 3]
    assert [len(b["labels"]) for b in cf.batches(DataLoader(samples(7), 4), cf.Mesh(**axes))] == [4, 4]


def test_what_is_to_be_filled_is_a_leaf_of_the_batch():
    with pytest.raises(InputError, match=r"fill=\{'y': -100\} if these are labels"):
        list(cf.batches([{"y": torch.ones(3, dtype=torch.int64), "x": torch.ones(3, 2)}], MESH))


def test_keep_and_drop():
    loader = DataLoader(samples(11), 4)
    assert [len(x) for x, _ in cf.batches(DataLoader(numbers(10), 4), MESH, short="keep")] == [4, 4, 2]
    assert [b["labels"].full()[:, 0].tolist()[-1] for b in cf.batches(loader, MESH, short="keep")] == [3, 7, -100]
    dropped = cf.batches(loader, MESH, short="drop")
    assert len(dropped) == 2 == len(list(dropped))


def test_masks_of_added_rows_are_zero_and_questions_have_no_answer():
    batch = {"input_ids": torch.ones(3, 4, dtype=torch.int64), "attention_mask": torch.ones(3, 4, dtype=torch.bool)}
    batch["start_positions"] = torch.tensor([1, 2, 3])
    (got,) = cf.batches([batch], MESH)
    assert got["attention_mask"].full().sum(1).tolist() == [4, 4, 4, 0] and got["start_positions"].full()[3] > 1 << 30


# ---- what cannot be ----


@pytest.mark.parametrize(("axes", "plans"), [({"dp": 2}, ()), ({"dp": 3}, (zero(1, "dp"),)), ({"fsdp": 3}, (zero(3, "fsdp"),))], ids=str)
def test_rows_that_microbatches_want_leave_the_mean_of_the_real_ones(axes, plans):
    loader = DataLoader([{"x": torch.full((4,), k / 7.0), "labels": torch.tensor(k % 3)} for k in range(6)], 6)
    mesh, model = cf.Mesh(**axes, topology="ideal"), cf.functional(torch.nn.Linear(4, 3))
    def loss(out, batch):
        return F.cross_entropy(out, batch["labels"])

    step, state = cf.train_step(model, cf.adapt(torch.optim.SGD, lr=0.1), loss=loss, inputs=lambda batch: ((batch["x"],), {}))
    staged = cf.accumulate(cf.shard(step, mesh, *plans), microbatches=4)
    with pytest.raises(PlanError, match=r"cf.batches\(loader, mesh, rows="):
        staged.lower(state, cf.batches(loader, mesh).peek())
    data = cf.batches(loader, mesh, rows=4 * mesh.size)
    placed = staged.init(state, data.peek())
    for batch in data:
        assert batch["labels"].shape == (4 * mesh.size * -(-6 // (4 * mesh.size)),)
        placed, metrics = staged(placed, batch)
    _, want = step(state, next(iter(loader)))
    assert float(metrics["loss"]) == pytest.approx(float(want["loss"]), rel=1e-6)


def test_how_many_rows_is_a_number():
    with pytest.raises(InputError, match=r"cf.batches: rows=0; give 1 or more, such as 8 for 4 microbatches on 2 ranks"):
        cf.batches([torch.ones(2)], cf.Mesh(), rows=0)
    with pytest.raises(InputError, match=r"one that 4 does not divide\), and none of .* tells a loss to leave them out"):
        cf.batches([(torch.ones(6, 2), torch.ones(6))], cf.Mesh(dp=2), rows=4).peek()


def test_rows_of_a_rank():
    sampler = RowSampler(BatchSampler(range(10), 4, False), lambda n: ([2, 3], 4))
    assert list(sampler) == [[2, 3], [6, 7], [8, 9]] and [t.dead for t in sampler.told] == [(False, False)] * 2 + [(True, True)]


def test_what_cannot_be():
    for wrong, says in (
        (lambda: cf.batches(3, MESH), "reads a DataLoader or another iterable"),
        (lambda: cf.batches([], "dp"), "takes a cf.Mesh"),
        (lambda: cf.batches([], MESH, short="padd"), "did you mean 'pad'"),
        (lambda: cf.batches([], MESH, read="own"), 'leave read= out, or write read="all"'),
        (lambda: cf.batches([], MESH, "(dp b~)"), "write how the dims are split only"),
        (lambda: list(cf.batches([{"x": torch.ones(())}], MESH)), "no tensor with rows"),
        (lambda: list(cf.batches([Record(torch.ones(4), "")], MESH, weights="w")), "cannot be added to a Record"),
    ):
        with pytest.raises(InputError, match=says):
            wrong()


def test_a_batch_without_rows():
    with pytest.raises(InputError, match="a batch of this loader has no rows: labels; leave it out"):
        list(cf.batches([{"labels": torch.ones(n).long()} for n in (2, 0)], cf.Mesh(dp=2)))
