"""Where cf.batches stands: going on in the middle of an epoch, positions that are saved, peeks that move nothing."""

import random

import numpy as np
import pytest
import torch
from loaded import MESH, equal, full, samples
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

import colofunc as cf
from colofunc.errors import InputError


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
