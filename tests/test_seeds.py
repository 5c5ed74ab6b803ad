"""Seeds of calls: torch's generator or `with cf.random(key)`, and going back to a position."""

import random
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import colofunc as cf
from colofunc.errors import InputError, TraceError
from colofunc.ops import canonical
from colofunc.ops.seeds import draw_seed


def draws(n: int = 3) -> list[int]:
    return [int(draw_seed()) for _ in range(n)]


def test_a_key_fixes_the_seeds_and_leaves_torch_alone() -> None:
    before = torch.get_rng_state()
    with cf.random(5):
        first = draws()
    with cf.random(torch.tensor(5)):
        assert draws() == first
    with cf.random(6):
        assert not set(draws()) & set(first)
    assert len(set(first)) == 3 and torch.equal(torch.get_rng_state(), before)


def test_an_inner_key_does_not_move_the_outer_stream() -> None:
    with cf.random(1):
        want = draws(4)
    with cf.random(1):
        got = draws(2)
        with cf.random(2):
            inner = draws(2)
        got += draws(2)
    with cf.random(2):
        assert inner == draws(2)
    assert got == want


@pytest.mark.parametrize("key", [-1, 2**63, 2**80 + 3, torch.tensor([1, 2])])
def test_wide_keys(key) -> None:
    with cf.random(key):
        first = draws()
    with cf.random(key):
        assert draws() == first
    with cf.random(3):
        assert draws() != first


@pytest.mark.parametrize("key", [1.5, "a", True, torch.tensor(1.0), torch.ones(2, 2, dtype=torch.int64)])
def test_what_is_no_key(key) -> None:
    with pytest.raises(InputError, match=r"write cf.random\(0\)"), cf.random(key):
        pass


def test_threads_have_streams_of_their_own() -> None:
    found: dict[int, list[int]] = {}

    def work(key: int) -> None:
        with cf.random(key):
            ready.wait()
            found[key] = draws(200)

    ready = threading.Barrier(4)
    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for key, got in found.items():
        with cf.random(key):
            assert draws(200) == got


def test_steps_repeat_under_a_key_and_under_manual_seed() -> None:
    x = torch.ones(4, 6)
    step = cf.shard(lambda x: F.dropout(x, 0.5), cf.Mesh(dp=2))

    def run() -> list[torch.Tensor]:
        return [step(x).full(), step(x).full()]

    with cf.random(3):
        a, b = run()
    with cf.random(3):
        assert all(map(torch.equal, run(), (a, b))) and not torch.equal(a, b)
    torch.manual_seed(0)
    c, d = run()
    torch.manual_seed(0)
    fresh = cf.shard(lambda x: F.dropout(x, 0.5), cf.Mesh(tp=2))  # whose first call traces and plans
    assert torch.equal(fresh(x).full(), c) and torch.equal(fresh(x).full(), d) and not torch.equal(c, d)
    with cf.random(3):
        with canonical.single_device():  # the function itself, under the same operators
            assert torch.equal(F.dropout(x, 0.5), a)


def test_a_key_inside_a_step_is_refused() -> None:
    def noisy(x):
        with cf.random(0):
            return x + torch.rand_like(x)

    with pytest.raises(TraceError, match="around the calls of the step"):
        cf.shard(noisy, cf.Mesh(dp=2))(torch.ones(2))


def everything() -> list[float]:
    return [float(draw_seed()), float(torch.rand(())), random.gauss(0, 1), float(np.random.normal())]


def test_a_position_is_restored() -> None:
    random.gauss(0, 1), np.random.normal()  # both keep a second number
    saved = {k: v.clone() for k, v in cf.random_state().items()}
    want = everything() + everything()
    everything()
    cf.set_random_state(saved)
    assert everything() + everything() == want
    cf.set_random_state({k: cf.distribute(v, "...", cf.Mesh(dp=2)) for k, v in saved.items()})
    assert everything() + everything() == want


def test_a_position_under_a_key() -> None:
    with cf.random(9):
        draws()
        saved = cf.random_state()
        want = draws()
    with cf.random(1):
        cf.set_random_state(saved)
        assert draws() == want
    with pytest.raises(InputError, match=r"inside `with cf.random\(9\)`"):
        cf.set_random_state(saved)
    with pytest.raises(InputError, match="'gauss' is missing"):
        cf.set_random_state({k: v for k, v in saved.items() if k != "gauss"})
