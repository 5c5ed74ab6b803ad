"""Reading ahead: threads that end, errors of the loader with their traceback; rows read by real ranks."""

import gc
import threading
import time
import traceback

import pytest
import torch
from colofunc_plugins import zero
from loaded import MESH, equal, samples, script
from torch.utils.data import DataLoader, DistributedSampler

import colofunc as cf
from colofunc.functional.prefetch import Prefetcher

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
    ahead = Prefetcher(endless(), 1)
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


def test_so_do_those_of_its_workers():
    broken = DataLoader([torch.ones(2), torch.ones(2), torch.ones(3), torch.ones(2)], 2, num_workers=1)
    with pytest.raises(RuntimeError, match="in DataLoader worker process 0"):
        list(cf.batches(broken, MESH))
    gc.collect()  # torch's iterator keeps itself alive after an error


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


def as_labels(items):
    return {"labels": torch.stack(items)}


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
    labels = DataLoader(torch.arange(4), 2, sampler=DistributedSampler(range(4), 2, mesh.rank, shuffle=False), collate_fn=as_labels)
    own += [b["labels"].full() for b in cf.batches(labels, mesh, read="local", rows=3)]
    own += [b["labels"].full() for b in cf.batches(DataLoader(torch.arange(4), 4, collate_fn=as_labels), mesh, rows=3)]

    def plain():
        cf.shard(lambda x: x * 2, mesh)(torch.full((2,), float(mesh.rank)))

    errors = [attempt(f) for f in (early, broken, other_rows, sharded, plain, other_rows_later)]
    losses = script(cf.Mesh(fsdp=2), zero(3, "fsdp"))
    return got, data.read, same, errors, own, losses


@pytest.mark.dist
def test_two_ranks_read_rows_of_their_own():
    (got, read0, same0, errors0, own, losses), (got1, read1, same1, errors1, *_) = cf.launch(read_on_ranks, 2, timeout_s=200)
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
    equal(own[:2], [torch.tensor([0.0, 2.0, 1.0, 3.0]), torch.tensor([4.0, 6.0, 5.0, 7.0])])
    equal(own[2:], [torch.tensor([0, 2, -100, 1, 3, -100]), torch.tensor([0, 1, 2, 3, -100, -100])])
    assert losses == pytest.approx(script(cf.Mesh()), rel=1e-10)


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
