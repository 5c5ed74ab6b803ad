"""cf.batches and cf.pad: the rows, losses and order of one device, wherever they are read; positions, threads, errors."""

import dataclasses
import gc
import random
import threading
import time
import traceback

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler, WeightedRandomSampler
from transformers import BatchEncoding

import colofunc as cf
from colofunc.errors import InputError, SpecError
from colofunc.functional.ahead import Ahead
from colofunc.functional.reading import RowSampler

MESH = cf.Mesh(dp=2, tp=2)


def samples(n=10, length=5):
    return [{"input_ids": torch.arange(length) + 7 * i, "labels": torch.arange(length) + i} for i in range(n)]


def numbers(n=10):
    return [(torch.tensor([float(i), 1.0]), torch.tensor(float(i))) for i in range(n)]


def full(tree):
    if isinstance(tree, cf.DTensor):
        return tree.full()
    return {k: full(v) for k, v in tree.items()} if isinstance(tree, dict) else [full(v) for v in tree]


def equal(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=0)


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


def token_mean(batch):
    logits = F.one_hot(batch["input_ids"] % 11, 64).double() * batch["input_ids"].double()[..., None].cos()
    return F.cross_entropy(logits.reshape(-1, 64), batch["labels"].reshape(-1) % 64 - 100 * (batch["labels"] == -100).reshape(-1))


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


# ---- positions ----


class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, k):
        return {"x": torch.rand(2), "k": torch.tensor(k)}


class Stream(IterableDataset):
    def __iter__(self):
        for k in range(12):
            yield {"x": torch.rand(2), "k": torch.tensor(k)}


@pytest.mark.parametrize("kind", ["shuffled", "own generator", "stream", "list", "workers"])
def test_going_on_in_the_middle_of_an_epoch(kind):
    def loader():
        if kind == "stream":
            return DataLoader(Stream(), 2)
        if kind == "list":
            return [{"x": torch.full((2, 2), float(k)), "k": torch.full((2,), k)} for k in range(6)]
        generator = torch.Generator().manual_seed(1) if kind == "own generator" else None
        dataset = samples(12) if kind == "workers" else Noisy()
        return DataLoader(dataset, 2, shuffle=True, generator=generator, num_workers=2 if kind == "workers" else 0)

    def go_on(data, batches):
        found = [full(b) for b in batches]
        return found + [full(b) for b in data] + [torch.rand(())]

    data = cf.batches(loader(), MESH)
    list(data)  # epoch 0
    reading = iter(data)
    for _ in range(4):
        next(reading)
        torch.rand(3)  # a step draws too
    saved, random = data.state_dict(), cf.random_state()
    want = go_on(data, reading)
    assert (saved["epoch"], saved["batch"]) == (1, 4)
    torch.manual_seed(99)
    again = cf.batches(loader(), MESH)
    cf.set_random_state(random)
    again.load_state_dict(saved)
    assert again.state_dict()["batch"] == 4
    again.set_epoch(1)
    equal(go_on(again, again), want)
    assert again.epoch == 3


def test_a_position_at_the_end_of_an_epoch():
    data = cf.batches(DataLoader(samples(8), 4), MESH)
    for _ in data:
        saved = data.state_dict()
    again = cf.batches(DataLoader(samples(8), 4), MESH)
    again.load_state_dict(saved)
    assert saved["batch"] == 2 and list(again) == [] and again.epoch == 1 and len(list(again)) == 2


def test_a_left_epoch_is_over_and_positions_of_other_loaders_are_refused():
    data = cf.batches(DataLoader(samples(8), 4, generator=torch.Generator()), MESH)
    next(iter(data))
    assert (data.epoch, data.batch) == (0, 1)
    next(iter(data))
    assert (data.epoch, data.batch) == (1, 1)
    with pytest.raises(InputError, match="a generator 'loader'"):
        cf.batches(DataLoader(samples(8), 4), MESH).load_state_dict(data.state_dict())
    with pytest.raises(InputError, match="'rows' is missing"):
        data.load_state_dict({"epoch": 0, "batch": 1})


def augmented(rows):
    return {"x": torch.stack([row["x"] for row in rows]) + np.random.rand() + random.random()}


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("kind", ["shuffled", "own generator", "stream", "list", "iterator", "keeps", "numpy"])
def test_peek_moves_nothing(kind, prefetch):
    def loader():
        if kind == "keeps":
            return Keeps()
        if kind in ("list", "iterator"):
            made = [torch.full((2, 2), float(k)) for k in range(3)]
            return iter(made) if kind == "iterator" else made
        if kind == "stream":
            return DataLoader(Stream(), 2)
        generator = torch.Generator().manual_seed(1) if kind == "own generator" else None
        return DataLoader(Noisy(), 2, shuffle=True, generator=generator, collate_fn=augmented if kind == "numpy" else None)

    def epochs(data, looks):
        torch.manual_seed(2), np.random.seed(2), random.seed(2)
        found = []
        for _ in range(1 if kind == "iterator" else 2):
            seen = [full(data.peek()) for _ in range(looks)]
            assert (data.batch, data.state_dict()["batch"]) == (0, 0)
            found.append([full(batch) for batch in data])
            assert all(torch.equal(a, b) for x in seen for a, b in zip(leaves(x), leaves(found[-1][0]), strict=True))
        return [*found, torch.rand(1), data.epoch]

    def leaves(tree):
        return torch.utils._pytree.tree_leaves(tree)

    equal(epochs(cf.batches(loader(), MESH, prefetch=prefetch), 2), epochs(cf.batches(loader(), MESH, prefetch=prefetch), 0))


def test_peek_goes_on_where_it_stopped_and_not_between_batches(capsys):
    loader = DataLoader(samples(8), 4, shuffle=True)
    data = cf.batches(loader, MESH)
    reading = iter(data)
    next(reading)
    with pytest.raises(InputError, match=r"epoch 0 has yielded 1 already; use one of them, or go to an epoch with data.set_epoch\(n\)"):
        data.peek()
    saved = data.state_dict()
    again = cf.batches(loader, MESH)
    again.load_state_dict(saved)
    equal(full(again.peek()), full(next(reading)))
    assert again.batch == 1 and len(list(again)) == 1 and "left after" not in capsys.readouterr().err
    again.load_state_dict({**saved, "batch": 2})  # where epoch 0 ends
    assert again.peek()["labels"].shape == (4, 5) and (again.epoch, again.batch) == (0, 2)
    next(iter(data))
    assert "goes to epoch 1: the loop over epoch 0 was left after 2 batches; to look at a batch without that, write data.peek()" in (
        capsys.readouterr().err
    )
    with pytest.raises(InputError, match="no batch to peek at"):
        cf.batches([], MESH).peek()


def test_other_data_than_the_positions_is_refused():
    def saved_of(loader):
        data = cf.batches(loader, MESH)
        reading = iter(data)
        for _ in range(2):
            next(reading)
        return data.state_dict()

    state = saved_of(DataLoader(samples(12), 4))
    with pytest.raises(InputError, match=r"behind batch 2 of epoch 0 over 12 samples, the loader now has 4: .*data.set_epoch\(1\)"):
        cf.batches(DataLoader(samples(4), 4), MESH).load_state_dict(state)
    with pytest.raises(InputError, match="over 3 batches, the loader now has 4"):
        cf.batches([torch.ones(2)] * 4, MESH).load_state_dict(saved_of([torch.ones(2)] * 3))
    for fewer in (DataLoader(Stream(), 12), DataLoader(samples(12), 12), iter([torch.ones(2)])):
        data = cf.batches(fewer, MESH)
        data.load_state_dict(saved_of(DataLoader(Stream(), 4)) if isinstance(fewer, DataLoader) else {**state, "length": 0})
        with pytest.raises(InputError, match="behind 2 batches of an epoch, but the loader ended after 1"):
            list(data)


class Keeps:
    """A loader with the protocol of torchdata's StatefulDataLoader."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < 6:
            self.at += 1
            yield torch.full((2, 1), float(self.at))
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def test_loaders_that_keep_their_own_position():
    data = cf.batches(Keeps(), MESH, prefetch=3)
    reading = iter(data)
    next(reading), next(reading)
    saved = data.state_dict()
    assert saved["loader"] == {"at": 2}  # not where the thread is
    again = cf.batches(Keeps(), MESH)
    again.load_state_dict(saved)
    assert [float(b.full()[0]) for b in again] == [3, 4, 5, 6] and again.epoch == 1


def test_epochs_are_told_to_those_who_ask():
    class Sampler(RandomSampler):
        def set_epoch(self, epoch):
            self.told = epoch

    sampler = Sampler(samples())
    data = cf.batches(DataLoader(samples(), 4, sampler=sampler), MESH)
    data.set_epoch(3)
    assert sampler.told == 3 and data.epoch == 3


# ---- reading ahead ----


def threads():
    return [t for t in threading.enumerate() if t.name == "colofunc-batches" and t.is_alive()]


def test_no_thread_is_left():
    def endless():
        while True:
            yield torch.ones(2, 2)

    for batch in cf.batches(endless(), MESH, prefetch=2):
        assert threads() and batch.shape == (2, 2)
        break
    assert not threads()
    with pytest.raises(ZeroDivisionError):
        for _ in cf.batches(endless(), MESH, prefetch=2):
            1 / 0  # noqa: B018
    gc.collect()
    assert not threads()
    data = cf.batches(endless(), MESH, prefetch=2)
    reading = iter(data)
    next(reading)
    data.close()
    assert not threads()
    ahead = Ahead(endless(), 1)
    next(ahead)
    thread = threads()[0]
    del ahead
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


def fails_at_two():
    yield torch.ones(2, 2)
    yield torch.ones(2, 2)
    raise ValueError("a broken file")


@pytest.mark.parametrize("prefetch", [0, 2])
def test_errors_of_the_loader_come_with_their_traceback(prefetch):
    reading = iter(cf.batches(fails_at_two(), MESH, prefetch=prefetch))
    next(reading), next(reading)
    with pytest.raises(ValueError, match="a broken file") as caught:
        next(reading)
    assert "fails_at_two" in "".join(traceback.format_exception(caught.value)) and not threads()
    broken = DataLoader([torch.ones(2), torch.ones(2), torch.ones(3), torch.ones(2)], 2, num_workers=1)
    with pytest.raises(RuntimeError, match="in DataLoader worker process 0"):
        list(cf.batches(broken, MESH))
    gc.collect()  # torch's iterator keeps itself alive after an error


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


# ---- real ranks ----


class Reads(torch.utils.data.Dataset):
    def __init__(self):
        self.read = []

    def __len__(self):
        return 10

    def __getitem__(self, k):
        self.read.append(k)
        return {"input_ids": torch.arange(k % 4 + 2), "labels": torch.arange(k % 4 + 2) + k}


def collate(rows):
    return {k: torch.nn.utils.rnn.pad_sequence([r[k] for r in rows], True, -100 if k == "labels" else 0) for k in rows[0]}


def attempt(fn):
    try:
        fn()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def read_on_ranks():
    mesh = cf.Mesh(dp=2)
    torch.manual_seed(7 + mesh.rank)  # rank 0 decides
    looked = cf.batches(DataLoader(Reads(), 4, shuffle=True, collate_fn=collate), mesh)
    first = looked.peek()["labels"].full()
    data = Reads()
    kept = cf.batches(DataLoader(data, 4, shuffle=True, collate_fn=collate), mesh)
    got = []
    for _ in range(2):
        for batch in kept:
            got.append({k: (v.full(), v.local.shape) for k, v in batch.items()})
    equal(first, got[0]["labels"][0])
    peers = Reads()
    same = [b["labels"].local for b in cf.batches(DataLoader(peers, 4, collate_fn=collate), cf.Mesh(tp=2), "b ...")]

    def early():
        for batch in cf.batches([torch.ones(2, 1)] * (3 + mesh.rank), mesh, prefetch=1):
            batch.full()

    def broken():
        for _ in cf.batches(fails_at_two() if mesh.rank else [torch.ones(2, 2)] * 5, mesh):
            pass

    def other_rows():
        list(cf.batches([torch.full((2, 2), float(mesh.rank))], mesh))

    def other_rows_later():
        list(cf.batches([torch.full((2, 2), float(mesh.rank * k)) for k in range(2)], mesh))

    def sharded():
        cf.batches(DataLoader(range(8), 2, sampler=DistributedSampler(range(8), 2, mesh.rank)), mesh)

    given = DataLoader(torch.arange(8.0), 2, sampler=DistributedSampler(range(8), 2, mesh.rank, shuffle=False))
    own = [b.full() for b in cf.batches(given, mesh, read="local")]
    def plain():
        cf.shard(lambda x: x * 2, mesh)(torch.full((2,), float(mesh.rank)))

    errors = [attempt(f) for f in (early, broken, other_rows, sharded, plain, other_rows_later)]
    return got, data.read, same, errors, own


@pytest.mark.dist
def test_two_ranks_read_rows_of_their_own():
    (got, read0, same0, errors0, own), (got1, read1, same1, errors1, _) = cf.launch(read_on_ranks, 2, timeout_s=200)
    torch.manual_seed(7)
    loader = DataLoader(Reads(), 4, shuffle=True, collate_fn=collate)
    want = [*loader, *loader]
    for batch, mine, other in zip(want, got, got1, strict=True):
        n = batch["labels"].shape[0]
        for k in ("input_ids", "labels"):
            equal(mine[k][0][:n], batch[k])
            equal(mine[k][0], other[k][0])
            assert mine[k][1][0] == 2
        assert (mine["labels"][0][n:] == -100).all()
    # Each sample of the whole batches is read once, by one rank; of the short ones (2 rows) rank 1 has none but copies.
    assert len(read0) == len(read1) == 12 and sorted(read0[:4] + read1[:4] + read0[4:6]) == list(range(10))
    equal(same0, same1)
    assert errors0[0] == errors1[0] and "the loader of ranks [0] ended after 3 batches of epoch 0, that of ranks [1] goes on" in errors0[0]
    assert errors1[1] == "ValueError: a broken file" and "the next batch of cf.batches failed on rank 1: ValueError: a broken" in errors0[1]
    assert errors0[2] == errors1[2] and "must be equal on all ranks, but ranks [1] hold other numbers" in errors0[2]
    assert "DistributedSampler gives each rank rows of its own already" in errors0[3]
    assert "let cf.batches(loader, mesh, spec) read each rank's rows, or enter them with cf.from_local" in errors0[4]
    assert "of batch 1 of epoch 0 must be equal on all ranks" in errors0[5] == errors1[5]
    equal(own, [torch.tensor([0.0, 2.0, 1.0, 3.0]), torch.tensor([4.0, 6.0, 5.0, 7.0])])


class LateReader:
    """A store whose answers come late."""

    def __init__(self, store):
        self.store = store

    def wait(self, *args):
        self.store.wait(*args)
        time.sleep(1.0)

    def __getattr__(self, name):
        return getattr(self.store, name)


def ends_with_an_epoch():
    """Workers of a loader inside a launched rank, and nothing after the last batch."""
    mesh = cf.Mesh(dp=2)
    data = cf.batches(DataLoader(samples(), 4, num_workers=1), mesh)
    watch = data._together.watch
    if mesh.rank == 1:
        watch._store = LateReader(watch._store)
    return [int(batch["labels"].local.sum()) for batch in data]


@pytest.mark.dist
def test_rank_0_may_end_with_the_epoch():
    first, second = cf.launch(ends_with_an_epoch, 2, timeout_s=100)
    assert len(first) == len(second) == 3


def test_a_batch_without_rows():
    with pytest.raises(InputError, match="a batch of this loader has no rows: labels; leave it out"):
        list(cf.batches([{"labels": torch.ones(n).long()} for n in (2, 0)], cf.Mesh(dp=2)))
