"""Post-validation on ranks of their own: who waits for whom, real processes, and ranks that end."""

from contextlib import nullcontext
from pathlib import Path
from types import NoneType, SimpleNamespace
from typing import Any

import pytest
import torch
from post_validated import CALM, Told, alone, batches, beside, flat, staged, unsettled, whole

import colofunc as cf
from colofunc.errors import PlanError
from colofunc.executors import distributed
from colofunc.executors.distributed import Distributed
from colofunc.executors.launch import launch
from colofunc.executors.messages import Batch, Mail
from colofunc.executors.rank_program import DeferredExchange
from colofunc.program.ir import Node
from colofunc.program.post_validation import Deferred, deferred


def test_a_rank_that_reads_alone_meets_the_others_before_an_update_that_communicates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its peers may be in the next step, whose messages it would take for its own; a number of another stage it reads by itself."""
    given = batches([CALM] * 4 + [1], 300.0)
    guessing, state = staged("zb-h1", "next step", **beside("1"))
    with cf.testing.float64():
        placed = guessing.init(state, given[0])
        for batch in given:
            placed, metrics = guessing(placed, batch)
        guessed = unsettled()
        met: list[str] = []

        def meet(what: str, deadline_s: float | None = None) -> None:
            met.append(what)
            assert not all(torch.equal(x, copy) for x, copy in guessed._kept), "nothing is put back yet"
            raise cf.CollectiveError("rank 1 is in step 6")

        monkeypatch.setattr(guessed.run.backend, "watch", SimpleNamespace(meet=meet))
        assert float(metrics["grad_norm"]) > 1 and not met
        before = guessed.run.redone
        with pytest.raises(cf.CollectiveError, match="rank 1 is in step 6"):
            _ = flat(placed)["params.layers.1.weight"].local
    assert met == ["an update that is done again"] and guessed.run.redone == before


def test_what_is_done_before_a_process_ends_is_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[Any] = []
    monkeypatch.setattr(distributed, "before_end", registered.append)
    monkeypatch.setattr(distributed.atexit, "register", registered.append)
    monkeypatch.setattr(distributed, "DeferredExchange", lambda *_: None)
    chain, state = staged("zb-h1", "next step", mesh=cf.Mesh(pp=2))
    parts = deferred(chain.lower(state, batches([CALM], 1.0)[0]).program)
    assert isinstance(parts, Deferred)
    backend = object.__new__(Distributed)
    backend._carriers, backend.rank, backend.watch, backend._delivers = {"cpu": "gloo"}, 0, None, False
    delivered: list[str] = []
    backend._groups = {cf.Mesh(pp=2): SimpleNamespace(delivered=lambda: delivered.append("sent"))}
    for _ in range(3):
        backend.deferred_exchange(parts.exchange, cf.Mesh(pp=2))
    assert len(registered) == 2
    registered[0]()
    assert delivered == ["sent"]


def test_messages_by_nccl_are_refused() -> None:
    """All ranks receive before they send, which NCCL does not get past."""
    chain, state = staged("zb-h1", "next step", mesh=cf.Mesh(pp=2))
    parts = deferred(chain.lower(state, batches([CALM], 1.0)[0]).program)
    assert isinstance(parts, Deferred)
    backend = object.__new__(Distributed)  # no process group is needed to say no
    backend._carriers = {"cpu": "gloo", "cuda": "nccl"}
    with pytest.raises(PlanError, match=r'has run with gloo only\. Try: validate="step"'):
        backend.deferred_exchange(parts.exchange, cf.Mesh(pp=2))


def test_whoever_waits_for_a_peer_that_ended_tells_the_watch() -> None:
    """It says which peer that was, in place of the transport's own words."""

    class Receiver:
        def post(self, tag: int) -> None:
            pass

        def __call__(self, tag: int) -> torch.Tensor:
            raise RuntimeError("gloo: connection closed by peer")

    def receiver(*_: Any) -> Receiver:
        return Receiver()

    later = object.__new__(DeferredExchange)
    later._groups = SimpleNamespace(mesh=cf.Mesh(pp=2), receiver=receiver, messages=nullcontext, mail=Mail(), batch=Batch(Mail()))
    later._on_rank = SimpleNamespace(inputs=())
    later._receives = [Node("colofunc.receive", (("pp",), (0,), 0, (), torch.float64), (), (1,))]
    later._sends = lambda inputs: []
    later._watch = Told()
    with pytest.raises(RuntimeError, match="closed by peer"):
        later([])()
    assert [type(error) for error in later._watch.errors] == [NoneType, RuntimeError]
    assert later._groups.mail.under_way, "what has not come yet would be taken by a further step"


def train(agree_every: int, kind: str = "", folder: str = "") -> tuple[list[float], dict[str, torch.Tensor]]:
    """Rank 0 alone reads a loss between two steps, once of a step that was guessed wrongly, unless the ranks compare their copies there."""
    more = beside(kind) if kind else {"mesh": cf.Mesh(pp=2)}
    given = batches([CALM] * 4 + [1] + [CALM] * 4 + [0] + [CALM] * 4, 300.0)
    with cf.testing.float64():
        chain, state = staged("zb-h1", "next step", agree_every=agree_every, **more)
        placed = chain.init(state, given[0])
        losses = []
        for count, batch in enumerate(given, 1):
            placed, metrics = chain(placed, batch)
            losses.append(metrics["loss"])
            if more["mesh"].rank == 0 and count in (4, 5, 7):
                float(metrics["loss"])
            if folder and count == 10:  # guessed wrongly, and one rank alone reads what is written
                cf.save(folder, placed["params"]["layers.0.weight"])
        return [float(loss) for loss in losses], whole(placed)


@pytest.mark.dist
@pytest.mark.parametrize("agree_every", [0, 5])
def test_real_ranks_compute_what_one_device_does(agree_every: int) -> None:
    check_real_ranks(2, agree_every)


@pytest.mark.dist
@pytest.mark.sweep
def test_real_ranks_that_gather_their_updates_compute_what_one_device_does(tmp_path: Path) -> None:
    """With ZeRO-1 a rank that reads a loss alone does not wait for others, and a save does again what was guessed wrongly."""
    expected = check_real_ranks(4, 0, "1", str(tmp_path / "saved"))
    found = cf.load(tmp_path / "saved", mesh=cf.Mesh())
    torch.testing.assert_close(found.full(), expected["params.layers.0.weight"], rtol=1e-10, atol=1e-10)


def reads_alone() -> str:
    """What rank 0 is told that reads a parameter behind a wrong guess, while the others go on."""
    given = batches([CALM] * 4 + [1, CALM], 300.0)
    more = beside("1")
    cf.join(more["mesh"], limit_s=8)
    with cf.testing.float64():
        chain, state = staged("zb-h1", "next step", **more)
        placed = chain.init(state, given[0])
        for batch in given[:5]:
            placed, _ = chain(placed, batch)
        try:
            if more["mesh"].rank == 0:
                _ = flat(placed)["params.layers.0.weight"].local
            chain(placed, given[5])
        except cf.CollectiveError as error:
            return str(error)
    return ""


@pytest.mark.dist
@pytest.mark.sweep
def test_a_rank_that_reads_an_update_alone_ends_with_an_error_that_says_where_the_others_are() -> None:
    with pytest.raises(cf.CollectiveError, match=r"an update that is done again at .* rank 0 waited 8 s for ranks \[1, 2, 3\]"):
        raise cf.CollectiveError(launch(reads_alone, 4, timeout_s=60)[0])


def check_real_ranks(ranks: int, *how: Any) -> dict[str, torch.Tensor]:
    """Compare with one device; what that has behind ten steps."""
    given = batches([CALM] * 4 + [1] + [CALM] * 4 + [0] + [CALM] * 4, 300.0)
    with cf.testing.float64():
        chain, state = staged("zb-h1", "next step", mesh=cf.Mesh(pp=2))
        amid, _ = alone(chain, state, given[:10])
        expected, wanted = alone(chain, state, given)
    for losses, found in launch(train, ranks, *how, timeout_s=60):
        assert losses == pytest.approx(wanted, rel=1e-10)
        for name, x in expected.items():
            torch.testing.assert_close(found[name], x, rtol=1e-10, atol=1e-10)
    return amid
