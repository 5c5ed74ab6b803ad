"""Post-validation: a pipeline whose updates are guessed, checked and put right, beside one that waits and beside one device."""

from contextlib import nullcontext
from pathlib import Path
from threading import Event, Thread
from types import NoneType, SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from colofunc_plugins import tensor, zero
from torch import nn

import colofunc as cf
from colofunc.errors import ConsumedError, PlanError
from colofunc.executors import distributed
from colofunc.executors.backend import backend_for
from colofunc.executors.distributed import Distributed
from colofunc.executors.groups import Mail
from colofunc.executors.launch import launch
from colofunc.executors.rank_program import Later
from colofunc.mesh import PRESETS
from colofunc.program.ir import Node, Program, Ref, map_refs
from colofunc.program.places import SEND, on_rank
from colofunc.program.post_validation import Deferred, deferred

MESH = cf.Mesh(pp=4)
CALM = None
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Layers(nn.Module):
    """Four layers, one a stage. Each has a parameter whose gradient is as large as the batch says, and which nobody before it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.extra = nn.ParameterList(nn.Parameter(torch.zeros(8)) for _ in range(4))

    def forward(self, x: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
        for k, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) + size[:, k : k + 1] * self.extra[k]
        return x


STAGES = {f"{what}.{k}*": k for k in range(4) for what in ("layers", "extra")}


def staged(
    schedule: str, validate: str, fp16: bool = False, clip: float | None = 0.9, mesh: cf.Mesh = MESH, plans: Any = (), **more: Any
) -> Any:
    """(chain, state): momentum, so that a step that is done twice shows. more: for `cf.shard`."""
    torch.manual_seed(0)
    net = Layers() if fp16 else Layers().double()
    step, state = cf.train_step(
        cf.functional(net), cf.adapt(torch.optim.SGD, lr=1e-3, momentum=0.9), lambda out, b: (out.to(b[2].dtype) - b[2]).pow(2).mean(),
        inputs=lambda b: ((b[0], b[1]), {}), clip=clip,
    )  # fmt: skip
    stages = None if schedule == "zb-v" else STAGES if mesh.axis_size("pp") == 4 else HALVES
    chain = cf.pipeline(cf.shard(step, mesh, *plans, **more), microbatches=8, schedule=schedule, stages=stages, validate=validate)
    return (cf.precision(chain, "fp16") if fp16 else chain), state


def batches(wild: list[int | None], size: float, dtype: torch.dtype = torch.float64) -> list[Batch]:
    """A batch per entry: of a stage whose gradient is large, or calm."""
    torch.manual_seed(1)
    found = []
    for stage in wild:
        sizes = torch.ones(16, 4, dtype=dtype)
        if stage is not CALM:
            sizes[3, stage] = size
        found.append((torch.randn(16, 8, dtype=dtype), sizes, torch.randn(16, 8, dtype=dtype)))
    return found


def flat(tree: Any, path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, x in tree.items():
        found |= flat(x, f"{path}{name}.") if isinstance(x, dict) else {path + name: x}
    return found


def whole(tree: Any) -> dict[str, torch.Tensor]:
    return {name: x.full().clone() for name, x in flat(tree).items()}


def unsettled(mesh: cf.Mesh = MESH) -> Any:
    """The step that waits for its validation."""
    return backend_for(mesh).unsettled


def trained(chain: Any, state: Any, given: list[Batch], calm: int = 4) -> tuple[dict[str, torch.Tensor], list[float], int]:
    """(state, losses, how many updates were done again behind some calm steps), where nobody reads anything before the end."""
    placed = chain.init(state, given[0])
    losses = []
    run, before = None, 0
    for count, batch in enumerate(given, 1):
        placed, metrics = chain(placed, batch)
        losses.append(metrics["loss"])
        if count == calm and unsettled() is not None:
            run = unsettled().run
            before = run.redone
    found = whole(placed)
    assert unsettled() is None
    return found, [float(loss) for loss in losses], 0 if run is None else run.redone - before


def alone(chain: Any, state: Any, given: list[Batch]) -> tuple[dict[str, torch.Tensor], list[float]]:
    """(state, losses) of one device."""
    losses = []
    for batch in given:
        state, metrics = chain.reference(state, batch)
        losses.append(float(metrics["loss"]))
    return flat(state), losses


def same(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    """Whether they are equal bit for bit, NaN where NaN is."""
    nan = all(torch.equal(x.isnan(), others[name].isnan()) for name, x in some.items())
    return nan and all(torch.equal(x.nan_to_num(), others[name].nan_to_num()) for name, x in some.items())


@pytest.fixture(scope="module", params=["zb-h2", "zb-v"])
def chains(request: pytest.FixtureRequest) -> tuple[Any, Any, Any]:
    """(one that guesses, one that waits, state) of a schedule."""
    guessing, state = staged(request.param, "next step")
    return guessing, staged(request.param, "step")[0], state


@pytest.mark.parametrize("what", ["clipped", "nan"])
@pytest.mark.parametrize("stage", range(4))
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


# ---- what a step is made of ----


def test_parts_wait_for_nobody_but_the_exchange() -> None:
    """The scalars that decide are the factor of clipping and, in fp16, whether all gradients are finite."""
    for fp16, targets in ((False, {"aten.clamp.out"}), (True, {"aten.clamp.out", "aten.mul.out"})):
        chain, state = staged("zb-h2", "next step", fp16=fp16)
        low = chain.lower(state, batches([CALM], 1.0, torch.float32 if fp16 else torch.float64)[0])
        parts = deferred(low.program)
        assert isinstance(parts, Deferred) and parts.speculates
        assert {low.program.makers[id].target for id in parts.judged} == targets
        assert sum(node.target.startswith("colofunc.sgd") for node in parts.update.nodes) == 12


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


HALVES = {glob: stage // 2 for glob, stage in STAGES.items()}


def beside(kind: str) -> dict[str, Any]:
    """Mesh and plans of a pipeline of two stages beside another way to be parallel."""
    if kind == "tensor":
        return {"mesh": cf.Mesh(pp=2, tp=2), "plans": (tensor("1d", "tp"),)}
    if kind == "both":
        return {"mesh": cf.Mesh(pp=2, dp=2, tp=2), "plans": (zero(2, "dp"), tensor("1d", "tp"))}
    return {"mesh": cf.Mesh(pp=2, dp=2), "plans": (zero(int(kind), "dp"),)}


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


@pytest.mark.parametrize("kind", ["1", "2", "3", "tensor", pytest.param("both", marks=pytest.mark.sweep)])
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


def test_ranks_of_unlike_devices_are_refused() -> None:
    """The factor of clipping that they compute may differ in its last bit."""
    mesh = cf.Mesh(pp=4, device="cpu", topology=PRESETS["gloo-cpu"].with_rank(1, speed=0.5))
    chain, state = staged("zb-h2", "next step", mesh=mesh)
    with pytest.raises(PlanError, match=r'its ranks are of unlike devices.*Try: validate="step"'):
        chain.lower(state, batches([CALM], 1.0)[0])


def deferred_on_two_stages() -> tuple[Program, Deferred]:
    """A clipped step's program, and its parts where it is validated in the next step."""
    chain, state = staged("zb-h1", "next step", mesh=cf.Mesh(pp=2))
    program = chain.lower(state, batches([CALM], 1.0)[0]).program
    parts = deferred(program)
    assert isinstance(parts, Deferred)
    return program, parts


def test_an_update_in_which_stages_wait_for_one_another_is_refused() -> None:
    """A scalar that is computed of what the stages have said, and that all of them add up once more."""
    program, parts = deferred_on_two_stages()
    gradient, new = parts.update.nodes[-1].refs[1], program.next_id
    node = Node("colofunc.all_reduce", (Ref(gradient), ("pp",), 2, "sum"), (), (new,), phase="update")
    values = program.values | {new: attrs.evolve(program.values[gradient], id=new)}
    changed = attrs.evolve(program, nodes=(*program.nodes, node), values=values)
    assert deferred(changed) == "the update itself communicates over pp, so that a stage waits for others in it"


def test_a_message_of_what_the_update_makes_is_refused() -> None:
    """As of a scalar's gradient that is put back from fp16's scale before it is sent."""
    program, parts = deferred_on_two_stages()
    gradient, total, new = parts.update.nodes[-1].refs[1], program.next_id, program.next_id + 1
    summed = Node("aten.sum.default", (Ref(gradient),), (), (total,), phase="update")
    single = next(node for node in parts.exchange.nodes if node.target == SEND and program.values[node.refs[0]].shape == ())
    told = attrs.evolve(single, args=map_refs(single.args, lambda _: Ref(total)), outs=(new,))
    like = program.values[parts.judged[0]]
    values = program.values | {id: attrs.evolve(like, id=id) for id in (total, new)}
    changed = attrs.evolve(program, nodes=(*program.nodes, summed, told), values=values)
    assert deferred(changed) == "the update itself communicates over pp, so that a stage waits for others in it"


def test_an_update_that_writes_to_what_is_sent_is_refused() -> None:
    """A loss that is written to behind the factor of clipping: whoever sends it later would send another one."""
    program, parts = deferred_on_two_stages()
    loss, new = parts.exchange.inputs[-1], program.next_id
    node = Node("aten.mul.out", (Ref(loss), Ref(parts.judged[0])), (("out", Ref(loss)),), (new,), phase="update")
    values = program.values | {new: attrs.evolve(program.values[loss], id=new)}
    changed = attrs.evolve(program, nodes=(*program.nodes, node), values=values)
    assert deferred(changed) == "the update writes to what the stages are still to be told"


def test_a_stage_that_sends_on_what_it_was_told_is_refused() -> None:
    """Who reads alone would wait for a stage that does not read."""
    program, parts = deferred_on_two_stages()
    (factor,), new = parts.judged, program.next_id
    single = next(node for node in parts.exchange.nodes if node.target == SEND and program.values[node.refs[0]].shape == ())
    node = attrs.evolve(single, args=map_refs(single.args, lambda _: Ref(factor)), outs=(new,))
    values = program.values | {new: attrs.evolve(program.values[factor], id=new)}
    reason = deferred(attrs.evolve(program, nodes=(*program.nodes, node), values=values))
    assert isinstance(reason, str) and reason.startswith("a stage sends on what another one has told it")


def test_what_is_done_before_a_process_ends_is_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[Any] = []
    monkeypatch.setattr(distributed, "before_end", registered.append)
    monkeypatch.setattr(distributed.atexit, "register", registered.append)
    monkeypatch.setattr(distributed, "Later", lambda *_: None)
    chain, state = staged("zb-h1", "next step", mesh=cf.Mesh(pp=2))
    parts = deferred(chain.lower(state, batches([CALM], 1.0)[0]).program)
    assert isinstance(parts, Deferred)
    backend = object.__new__(Distributed)
    backend._carriers, backend.rank, backend.watch, backend._delivers = {"cpu": "gloo"}, 0, None, False
    delivered: list[str] = []
    backend._groups = {cf.Mesh(pp=2): SimpleNamespace(delivered=lambda: delivered.append("sent"))}
    for _ in range(3):
        backend.later(parts.exchange, cf.Mesh(pp=2))
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
        backend.later(parts.exchange, cf.Mesh(pp=2))


def test_one_stage_with_all_the_work_is_refused() -> None:
    """It would not be validated in the next step, and nothing said so."""
    step, state = cf.train_step(
        cf.functional(Layers().double()), cf.adapt(torch.optim.SGD, lr=1e-3), lambda out, b: (out - b[2]).pow(2).mean(),
        inputs=lambda b: ((b[0], b[1]), {}), clip=0.9,
    )  # fmt: skip
    chain = cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches=4, stages={"*": 1}, validate="next step")
    with pytest.raises(PlanError, match=r'one stage has all the work .* Try: validate="step", or stages='):
        chain.lower(state, batches([CALM], 1.0)[0])


def test_one_microbatch_is_refused() -> None:
    """It has no schedule, so that each step waited and nothing said so."""
    chain, state = staged("zb-h2", "next step")
    with pytest.raises(PlanError, match=r'microbatches=1, and one microbatch has no schedule.*Try: validate="step", or more microbatches'):
        cf.pipeline(chain, microbatches=1, validate="next step")
    step, state = cf.train_step(
        cf.functional(Layers().double()), cf.adapt(torch.optim.SGD, lr=1e-3), lambda out, b: (out - b[2]).pow(2).mean(),
        inputs=lambda b: ((b[0], b[1]), {}), clip=0.9,
    )  # fmt: skip
    chain = cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches="auto", validate="next step")
    (batch,) = batches([CALM], 1.0)
    with pytest.raises(PlanError, match=r"microbatches='auto' is 1 for a batch of 1 rows, and one microbatch has no schedule"):
        chain.lower(state, tuple(x[:1] for x in batch))
    assert chain.lower(state, tuple(x[:2] for x in batch)).plan.pipeline.microbatches == 2


def test_an_unknown_way_to_validate_is_refused() -> None:
    with pytest.raises(PlanError, match="unknown validate 'never'"):
        staged("zb-h2", "never")


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


# ---- real ranks ----


class Told:
    """What a watch is told of errors inside it."""

    def __init__(self) -> None:
        self.errors: list[BaseException | None] = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.errors.append(error)


def test_whoever_waits_for_a_peer_that_ended_tells_the_watch() -> None:
    """It says which peer that was, in place of the transport's own words."""

    def awaiter(*_: Any) -> Any:
        def wait() -> torch.Tensor:
            raise RuntimeError("gloo: connection closed by peer")

        return lambda tag: wait

    later = object.__new__(Later)
    later._groups = SimpleNamespace(mesh=cf.Mesh(pp=2), awaiter=awaiter, messages=nullcontext, mail=Mail())
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
