"""Post-validation: a pipeline whose updates are guessed, checked and put right, beside one that waits and beside one device."""

from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from colofunc_plugins import zero
from post_validated import CALM, Batch, Told, alone, batches, beside, flat, same, staged, trained, unsettled, whole
from torch import nn

import colofunc as cf
from colofunc.errors import ConsumedError
from colofunc.program.places import on_rank
from colofunc.program.post_validation import Deferred, deferred


@pytest.fixture(scope="module", params=["zb-h2", "zb-v"])
def chains(request: pytest.FixtureRequest) -> tuple[Any, Any, Any]:
    """(one that guesses, one that waits, state) of a schedule."""
    guessing, state = staged(request.param, "next step")
    return guessing, staged(request.param, "step")[0], state


@pytest.mark.parametrize("what", ["clipped", "nan"])
@pytest.mark.parametrize("stage", [0, 3, *(pytest.param(stage, marks=pytest.mark.sweep) for stage in (1, 2))])
def test_numbers_are_those_of_one_device_whichever_stage_was_wrong(chains: tuple[Any, Any, Any], stage: int, what: str) -> None:
    """The gradient of one stage is too large once and then three times in a row, or no number: each is guessed wrongly at first."""
    guessing, waiting, state = chains
    given = batches([CALM] * 4 + [stage] + [CALM] * 4 + [stage] * 3 + [CALM] * 3, 300.0)
    if what == "nan":
        given = given[:6]
        given[4][1][5, stage] = torch.nan
    with cf.testing.float64():
        found, losses, redone = trained(guessing, state, given)
        expected, wanted = alone(guessing, state, given)
        waited, _, never = trained(waiting, state, given)
    assert redone == (2 if what == "clipped" else 1) and never == 0
    assert same(found, waited)
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=1e-10, atol=1e-10, equal_nan=True, msg=name)
    assert losses == pytest.approx(wanted, rel=1e-10, nan_ok=True)


def test_what_is_read_between_steps_is_validated(chains: tuple[Any, Any, Any]) -> None:
    """A wrong guess is put right before anybody sees it, and the next step goes on from there."""
    guessing, _, state = chains
    given = batches([CALM] * 4 + [2] + [CALM] * 2, 300.0)
    with cf.testing.float64():
        placed = guessing.init(state, given[0])
        for count, batch in enumerate(given, 1):
            placed, metrics = guessing(placed, batch)
            guessed = unsettled()
            state, wanted = guessing.reference(state, batch)
            if count >= 4:  # what is read settles a step, as the next step does
                assert (guessed is not None) == (count in (4, 5))
                before = 0 if guessed is None else guessed.run.redone
                assert float(metrics["grad_norm"]) == pytest.approx(float(wanted["grad_norm"]), rel=1e-10)
                assert guessed is None or guessed.run.redone == before + (count == 5)
                for name, x in flat(state).items():
                    torch.testing.assert_close(flat(placed)[name].full(), x, rtol=1e-10, atol=1e-10)


def test_another_step_on_the_same_state_sees_what_is_validated(chains: tuple[Any, Any, Any]) -> None:
    guessing, waiting, state = chains
    given = batches([CALM] * 4 + [1] + [CALM], 300.0)
    with cf.testing.float64():
        placed = guessing.init(state, given[0])
        for batch in given[:-1]:
            placed, _ = guessing(placed, batch)
        assert unsettled() is not None
        placed, _ = waiting(placed, given[-1])
        expected, _ = alone(guessing, state, given)
        for name, x in whole(placed).items():
            torch.testing.assert_close(x, expected[name], rtol=1e-10, atol=1e-10)


@pytest.fixture(scope="module")
def narrow() -> tuple[Any, Any, Any]:
    """(one that guesses, one that waits, state) in fp16."""
    guessing, state = staged("zb-h2", "next step", fp16=True)
    return guessing, staged("zb-h2", "step", fp16=True)[0], state


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("size", [3e3, torch.nan])
def test_a_step_that_overflows_in_one_stage_is_skipped_by_all(narrow: tuple[Any, Any, Any], stage: int, size: float) -> None:
    """In fp16: the scale falls, the step is skipped, and later steps are those of a pipeline that waits, bit for bit."""
    guessing, waiting, state = narrow
    given = batches([CALM] * 6 + [stage] + [CALM] * 2, size, torch.float32)
    found, losses, redone = trained(guessing, state, given, calm=6)
    waited, wanted, _ = trained(waiting, state, given)
    assert redone == 1 and losses == pytest.approx(wanted, nan_ok=True, abs=0)
    assert same(found, waited) and float(found["loss_scale.scale"]) == 2.0**14  # one of the first batches overflows too


def test_kept_copies_are_counted() -> None:
    """A rank keeps what its update writes to until the next step, parameter, momentum and gradient of its layer, and gradients."""
    low = {}
    for validate in ("step", "next step"):
        chain, state = staged("zb-h2", validate)
        low[validate] = chain.lower(state, batches([CALM], 1.0)[0])
    planned = []
    for rank in range(4):
        kept = low["next step"].memory(rank).by_kind["device"]["kept copies"][0]
        planned.append(kept)
        peaks = [low[validate].memory(rank).peak_bytes["device"] for validate in ("step", "next step")]
        assert peaks[1] - peaks[0] == kept
    given = batches([CALM] * 4, 1.0)
    placed = chain.init(state, given[0])
    for batch in given:
        placed, _ = chain(placed, batch)
    waits = unsettled()
    state_too = {x.untyped_storage().data_ptr() for leaf in flat(placed).values() for x in leaf._held.shards}
    held: dict[Any, int] = {id(copy): copy.untyped_storage().nbytes() for _, copy in waits._kept}
    for shards in waits._values.values():
        for lane, x in enumerate(shards):  # lanes may share what each rank has for itself
            where = x.untyped_storage().data_ptr()
            if where not in state_too:
                held[lane, where] = x.untyped_storage().nbytes()
    assert sum(planned) == sum(held.values()) > 0
    float(flat(placed)["params.layers.0.bias"].full().sum())


def test_what_cannot_be_validated_is_lost_and_nothing_else(chains: tuple[Any, Any, Any]) -> None:
    guessing, _, state = chains
    given = batches([CALM] * 8, 1.0)
    with cf.testing.float64():
        placed = guessing.init(state, given[0])
        losses = []
        for batch in given[:4]:
            placed, metrics = guessing(placed, batch)
            losses.append(metrics["loss"])

        def fails() -> None:
            raise RuntimeError("nothing came")

        unsettled()._finish = fails
        with pytest.raises(RuntimeError, match="nothing came"):
            float(losses[-1])
        assert unsettled() is None
        for lost in (losses[-1], flat(placed)["params.layers.3.weight"]):
            with pytest.raises(ConsumedError, match="whose validation failed, so this result is lost"):
                lost.full()
        expected, wanted = alone(guessing, state, given)
        assert [float(loss) for loss in losses[:3]] == pytest.approx(wanted[:3], rel=1e-10)
        found, _, _ = trained(guessing, state, given)
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=1e-10, atol=1e-10)


def test_a_second_thread_waits_for_what_the_first_validates(chains: tuple[Any, Any, Any]) -> None:
    guessing, _, state = chains
    given = batches([CALM] * 4, 1.0)
    begun, may_end = Event(), Event()
    read: list[float] = []
    with cf.testing.float64():
        placed = guessing.init(state, given[0])
        for batch in given:
            placed, metrics = guessing(placed, batch)
        finish = unsettled()._finish

        def slow() -> Any:
            begun.set()
            assert may_end.wait(30)
            return finish()

        unsettled()._finish = slow
        threads = [Thread(target=lambda: read.append(float(metrics["loss"]))) for _ in range(2)]
        threads[0].start()
        assert begun.wait(30)
        threads[1].start()
        threads[1].join(0.2)
        early = list(read)
        may_end.set()
        for thread in threads:
            thread.join()
        _, wanted = alone(guessing, state, given)
    assert not early and read == pytest.approx([wanted[-1]] * 2, rel=1e-10)


def test_without_clipping_only_results_come_later() -> None:
    chain, state = staged("zb-h2", "next step", clip=None)
    given = batches([CALM] * 3, 1.0)
    parts = deferred(chain.lower(state, given[0]).program)
    assert isinstance(parts, Deferred) and not parts.speculates and not parts.kept and len(parts.late) == 1
    with cf.testing.float64():
        found, losses, _ = trained(chain, state, given)
        expected, wanted = alone(chain, state, given)
    assert losses == pytest.approx(wanted, rel=1e-10)
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=1e-10, atol=1e-10)


def stages_that(target: str, part: str, chain: Any, state: Any, batch: Batch) -> set[int]:
    """The stages whose ranks run an operator behind the schedule in a part of the step."""
    with cf.testing.float64():
        low = chain.lower(state, batch)
    parts = deferred(low.program)
    assert isinstance(parts, Deferred)
    found = set()
    for rank in range(low.mesh.size):
        nodes = on_rank(getattr(parts, part), low.mesh, rank).program.nodes
        if any(node.target == target for node in nodes):
            found.add(low.mesh.coordinates(rank)["pp"])
    return found


@pytest.mark.parametrize("kind", ["1", "3", "tensor", *(pytest.param(kind, marks=pytest.mark.sweep) for kind in ("2", "both"))])
def test_squares_are_added_up_within_a_stage_first(kind: str) -> None:
    """Numbers are those of one device, and of a pipeline that waits, whichever stage was guessed wrongly, or has no number."""
    given = batches([CALM] * 4 + [1] + [CALM] * 4 + [3] * 3 + [CALM] * 4, 300.0)
    given[-2][1][5, 2] = torch.nan
    guessing, state = staged("zb-h1", "next step", **beside(kind))
    with cf.testing.float64():
        found, losses, redone = trained(guessing, state, given)
        expected, wanted = alone(guessing, state, given)
    assert redone == 3
    gathers = set[int]() if kind == "3" else {0, 1}  # ZeRO-3 gathers where parameters are read
    assert stages_that("colofunc.all_gather", "update", guessing, state, given[0]) == gathers
    assert stages_that("colofunc.all_reduce", "main", guessing, state, given[0]) == {0, 1}
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=1e-10, atol=1e-10, equal_nan=True, msg=name)
    assert losses == pytest.approx(wanted, rel=1e-10, nan_ok=True)


@pytest.mark.parametrize("where", ["told", "guessed"])
def test_a_step_that_fails_behind_its_messages_is_known_and_nothing_is_guessed_by_it(
    chains: tuple[Any, Any, Any], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The watch learns of it, no further step takes its messages, and the next guess waits until two steps agree again."""
    guessing, _, state = chains
    given = batches([CALM] * 7, 1.0)
    with cf.testing.float64():
        placed = guessing.init(state, given[0])
        for batch in given[:4]:
            placed, _ = guessing(placed, batch)
        run = unsettled().run
        whole(placed)
        told, interrupted = Told(), list[str]()

        def fails(*_: Any) -> Any:
            assert told.errors == [], "the watch looks on"
            raise RuntimeError("no memory")

        with monkeypatch.context() as patch:
            patch.setattr(run, "_exchange" if where == "told" else "updated", fails)
            backend = SimpleNamespace(unsettled=None, watch=told, interrupted=lambda: interrupted.append("marked"))
            patch.setattr(run, "backend", backend)
            with pytest.raises(RuntimeError, match="no memory"):
                guessing(placed, given[4])
        assert [type(error) for error in told.errors] == [RuntimeError] and interrupted == ["marked"]
        assert not run._steady and not run._last and backend.unsettled is None


def test_whoever_reads_a_result_while_it_is_validated_is_told_so(chains: tuple[Any, Any, Any]) -> None:
    """A handler of a signal runs in the thread that validates; it would see what is half put right."""
    guessing, _, state = chains
    given = batches([CALM] * 4, 1.0)
    with cf.testing.float64():
        placed = guessing.init(state, given[0])
        for batch in given:
            placed, metrics = guessing(placed, batch)
        finish = unsettled()._finish

        def interrupted() -> Any:
            with pytest.raises(cf.InputError, match="while that step is validated"):
                float(metrics["loss"])
            return finish()

        unsettled()._finish = interrupted
        _, wanted = alone(guessing, state, given)
        assert float(metrics["loss"]) == pytest.approx(wanted[-1], rel=1e-10)


class Tied(nn.Module):
    """The first and the last layer have one weight, whose gradient these two stages add up."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.middle = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(torch.tanh(self.first(x))))


@pytest.mark.parametrize("level", [1, 3])
def test_a_tied_weight_beside_zero(level: int) -> None:
    torch.manual_seed(0)
    step, state = cf.train_step(
        cf.functional(Tied().double()), cf.adapt(torch.optim.SGD, lr=1e-3, momentum=0.9), lambda out, b: (out - b[1]).pow(2).mean(),
        inputs=lambda b: ((b[0],), {}), clip=0.9,
    )  # fmt: skip
    sharded = cf.shard(step, cf.Mesh(pp=2, dp=2), zero(level, "dp"))
    chain = cf.pipeline(sharded, microbatches=4, schedule="zb-h1", validate="next step")
    given = [(x, y * size) for (x, _, y), size in zip(batches([CALM] * 7, 1.0), [1, 1, 1, 1, 90, 1, 1], strict=True)]
    with cf.testing.float64():
        found, losses, redone = trained(chain, state, given)
        expected, wanted = alone(chain, state, given)
    assert redone == 1 and losses == pytest.approx(wanted, rel=1e-10)
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("kind", ["3", pytest.param("1", marks=pytest.mark.sweep), pytest.param("tensor", marks=pytest.mark.sweep)])
def test_an_overflow_in_one_rank_of_a_stage_is_skipped_by_all(kind: str) -> None:
    given = batches([CALM] * 6 + [0] + [CALM] * 2, 3e3, torch.float32)
    guessing, state = staged("zb-h1", "next step", fp16=True, **beside(kind))
    waiting, _ = staged("zb-h1", "step", fp16=True, **beside(kind))
    found, losses, redone = trained(guessing, state, given, calm=6)
    waited, wanted, _ = trained(waiting, state, given)
    assert redone == 1 and losses == pytest.approx(wanted, rel=1e-5)
    assert found["loss_scale.scale"] == waited["loss_scale.scale"]
    for name, x in waited.items():
        torch.testing.assert_close(found[name], x, rtol=1e-5, atol=1e-5, msg=name)


def test_who_reads_a_loss_does_not_do_a_gathered_update_again() -> None:
    """Ranks of a stage gather its parameters together: that waits for somebody who reads these, or for the next step."""
    chain, state = staged("zb-h1", "next step", **beside("1"))
    given = batches([CALM] * 4 + [1] + [CALM], 300.0)
    with cf.testing.float64():
        placed = chain.init(state, given[0])
        for batch in given[:5]:
            placed, metrics = chain(placed, batch)
        guessed = unsettled()
        expected, wanted = alone(chain, state, given[:5])
        assert float(metrics["loss"]) == pytest.approx(wanted[-1], rel=1e-10)
        assert guessed.redone and guessed.run.redone == 0 and unsettled() is guessed
        name = "params.layers.1.weight"
        torch.testing.assert_close(flat(placed)[name].full(), expected[name], rtol=1e-10, atol=1e-10)
        assert guessed.run.redone == 1 and unsettled() is None


def test_beside_copies_along_another_axis() -> None:
    mesh = cf.Mesh(pp=4, dp=2)
    chain, state = staged("zb-h2", "next step", mesh=mesh)
    given = batches([CALM] * 4 + [1, CALM, CALM], 300.0)
    with cf.testing.float64():
        found, losses, redone = trained(chain, state, given)
        expected, wanted = alone(chain, state, given)
    assert redone == 1 and losses == pytest.approx(wanted, rel=1e-10)
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=1e-10, atol=1e-10)
