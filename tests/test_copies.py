"""Copies on two streams: whatever a stream does when, nobody reads what is not there yet or writes over what is still read.

There is no GPU here, so streams are queues of work that a random scheduler runs as late or as early as it likes: the host is
ahead of all of them, as it is on a GPU, and memory of the device that the host has let go of is given away at once. Numbers must
be those of doing everything in order.
"""

import ctypes
import random
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import attrs
import pytest
import torch
from colofunc_plugins import gemini
from pretended import Machine
from test_offload import one, training

import colofunc as cf
from colofunc.compiler.observation import arguments_of
from colofunc.executors.copies import Copier, Copying, Engines
from colofunc.executors.pages_in_use import Flights
from colofunc.executors.pools import Pool
from colofunc.executors.simulated import SimulatedProgram
from colofunc.program.ir import Node, Program, Ref, Value
from colofunc.program.passing import Passing, SizeClass

SIZE = 8
DEVICE = torch.device("cuda")  # a name only


class Stream:
    """Work in order; an entry is a function that says whether it could be done."""

    def __init__(self, card: "Card") -> None:
        self.card, self.queue = card, list[Callable[[], bool]]()

    def put(self, work: Callable[[], Any]) -> None:
        self.queue.append(lambda: (work(), True)[1])
        self.card.some()

    def record_event(self) -> "Event":
        event = Event(self.card)
        self.queue.append(event.happen)
        return event

    def wait_event(self, event: "Event") -> None:
        self.queue.append(lambda: event.done)

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def step(self) -> bool:
        return bool(self.queue) and self.queue[0]() and (self.queue.pop(0), True)[1]


class Event:
    def __init__(self, card: "Card") -> None:
        self.card, self.done = card, False

    def happen(self) -> bool:
        self.done = True
        return True

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        while not self.done:
            assert self.card.run_one(), "streams wait for one another"


class Card(Engines):
    """A device whose streams run when the scheduler likes."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.streams = [Stream(self)]
        self.eager = self.random.choice([0, 1, 4])
        self.free: list[torch.Tensor] = []
        self.pinned: list[torch.Tensor] = []

    def current(self, device: torch.device) -> Stream:
        return self.streams[0]

    def stream(self, device: torch.device) -> Stream:
        self.streams.append(Stream(self))
        return self.streams[-1]

    def empty(self, like: torch.Tensor, device: torch.device | None) -> torch.Tensor:
        """The allocator of the device gives memory away again as soon as the host has let go of it, in the order of its stream."""
        if device is None:  # torch gives pinned memory away when its copies have ended; here it is not given away at all
            self.pinned.append(torch.empty_like(like))
            return self.pinned[-1]
        memory = self.free.pop() if self.free else torch.zeros(SIZE)
        array = memory.numpy()[:]
        weakref.finalize(array, self.free.append, memory)
        return torch.from_numpy(array)

    def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> Event:
        a, b = addresses(target), addresses(source)
        stream.put(lambda: a.copy_(b))
        return stream.record_event()

    def run_one(self) -> bool:
        order = self.random.sample(self.streams, len(self.streams))
        return any(stream.step() for stream in order)

    def some(self) -> None:
        for _ in range(self.random.randint(0, self.eager)):
            self.run_one()


def addresses(x: torch.Tensor) -> torch.Tensor:
    """The same memory, without keeping it from being given away: what a kernel has is an address."""
    return torch.frombuffer((ctypes.c_float * SIZE).from_address(x.data_ptr()), dtype=torch.float32)


def script(card: Card, copier: Copier, pool: Pool | None, steps: int, every: bool = True) -> Iterable[float]:
    """State on the host that is updated there; activations that leave and come back; gradients that travel.

    every: it is looked at behind each step; otherwise behind the last, which copies of those before may run into.
    """
    compute, ones = card.streams[0], torch.ones(SIZE)
    state = [torch.full((SIZE,), float(k + 1)) for k in range(3)]
    moments = [torch.zeros(SIZE) for _ in range(3)]

    def kernel(*operands: torch.Tensor, by: float) -> torch.Tensor:
        out = card.empty(operands[0], DEVICE)
        there, ins = addresses(out), [addresses(x) for x in operands]
        compute.put(lambda: there.copy_(sum(ins, torch.zeros(SIZE)) * by))
        return out

    def start(kind: str, *operands: torch.Tensor) -> Copying:
        found = copier.start(kind, operands, DEVICE, pool)
        assert isinstance(found, Copying)
        return found

    for number in range(steps):
        looks = every or number == steps - 1
        x, kept = kernel(ones, by=1.0), []
        for k, _ in enumerate(state):
            w = start("to_device", state[k]).wait()
            x = kernel(x, w, by=0.5)
            out = start("to_host", x)
            kept.append(out.wait() if k % 2 else out)
        for k in reversed(range(len(state))):
            there = kept[k].wait() if isinstance(kept[k], Copying) else kept[k]
            kept[k] = None
            back = start("to_device", there)
            del there
            moment = start("to_device", moments[k])
            grad = kernel(x, back.wait(), by=0.25)
            moment = kernel(moment.wait(), grad, by=0.5)
            start("put", moments[k], moment).wait()
            far = start("to_host", grad).wait()
            del back, grad, moment
            copier.settle((far, state[k]), (state[k],))
            state[k].sub_(far)
            del far
        copier.finish()
        if looks:
            copier.arrived((*state, *moments))
            yield from (float(t.sum()) for t in (*state, *moments))


def pooled() -> Pool:
    pool = Pool(Passing((SizeClass(4096, 4),), 0, frozenset()))
    pool.allocate()
    return pool


def in_order() -> list[float]:
    state, moments, found = [float(k + 1) for k in range(3)], [0.0] * 3, list[float]()
    for _ in range(3):
        x, kept = 1.0, []
        for w in state:
            x = (x + w) * 0.5
            kept.append(x)
        for k in reversed(range(3)):
            grad = (x + kept[k]) * 0.25
            moments[k] = (moments[k] + grad) * 0.5
            state[k] -= grad
        found += [SIZE * v for v in (*state, *moments)]
    return found


@pytest.mark.parametrize("with_pool", [False, True])
def test_whenever_streams_run_the_numbers_are_those_of_one_after_another(with_pool: bool) -> None:
    for seed in range(40):
        card = Card(seed)
        got = list(script(card, Copier(card), pooled() if with_pool else None, steps=3))
        assert got == pytest.approx(in_order()), f"schedule {seed}"
        card = Card(seed)
        last = list(script(card, Copier(card), pooled() if with_pool else None, steps=3, every=False))
        assert last == got[-len(last) :], f"schedule {seed}"


@pytest.mark.parametrize("without", ["settle", "before", "wait_stream"])
def test_the_scheduler_finds_what_is_missing(without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the three ways to wait is needed: without it some schedule gives other numbers."""
    where: Any = {"settle": Copier, "before": Flights, "wait_stream": Stream}[without]
    monkeypatch.setattr(where, without, lambda *_, **__: [])
    assert any(
        list(script(card, Copier(card), pooled(), steps=3)) != pytest.approx(in_order()) for card in map(Card, range(40))
    )


@pytest.mark.parametrize("seed", range(12))
def test_copies_that_nobody_has_waited_for_keep_their_memory(seed: int) -> None:
    """Host memory is written to while a copy of it is under way; memory of a card is let go of while a copy of it is."""
    two, five = torch.full((SIZE,), 2.0), torch.full((SIZE,), 5.0)
    with Machine(seed=seed) as machine:
        copier, (card,) = Copier(), machine.cards
        host, there = two.clone().pin_memory(), machine.to_card(five)
        coming = copier.start("to_device", (host,), card)
        copier.start("put", (host, there), card).wait()
        assert isinstance(coming, Copying) and torch.equal(coming.wait().cpu(), two)
        del coming, there
        source = torch.full((SIZE,), 2.0, device="cuda")
        going = copier.start("to_host", (source,), card)
        del source
        torch.full((SIZE,), 7.0, device="cuda")
        sent = going.wait()
        copier.arrived((host, sent))
        assert torch.equal(host, five) and torch.equal(sent, two)


def test_on_a_cpu_a_copy_is_done_when_it_has_started() -> None:
    copier, pool, x = Copier(), pooled(), torch.arange(6.0).reshape(2, 3).t()
    there = copier.start("to_host", (x,), torch.device("cpu"), pool).wait()
    assert torch.equal(there, x) and there.stride() == x.stride() and pool.used == 1
    back = copier.start("to_device", (there,), torch.device("cpu")).wait()
    copier.start("put", (there, back + 1), torch.device("cpu")).wait()
    assert torch.equal(back, x) and torch.equal(there, x + 1)


# ---- a whole step, from the source that a GPU would run ----


class Beside(Card):
    """Compute that the host does at once, and copies that run late: those to the host long after the device has waited."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.eager, self.inward, self.first_is_in = 0, set[Event](), True

    def current(self, device: torch.device) -> Any:
        return self

    def record_event(self) -> Event:
        event = Event(self)
        event.happen()
        return event

    def wait_event(self, event: Event) -> None:
        if event in self.inward:
            event.synchronize()

    def empty(self, like: torch.Tensor, device: torch.device | None) -> torch.Tensor:
        return torch.empty_like(like)

    def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> Event:
        inward = stream is self.streams[1] if self.first_is_in else stream is not self.streams[1]
        far = whole(target) if not inward else target  # of host memory a copy has the address
        near = source if not inward else whole(source)
        stream.put(lambda: far.copy_(near))
        event = stream.record_event()
        self.inward |= {event} if inward else set()
        return event


def whole(x: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor, without keeping it from being given away."""
    there = torch.frombuffer((ctypes.c_char * max(1, x.nbytes)).from_address(x.data_ptr()), dtype=torch.uint8)
    return there[: x.nbytes].view(x.dtype).as_strided(x.shape, x.stride())


def as_on_gpu(low: Any, inputs: Any, seed: int, settles: bool) -> Any:
    """A step of the source for a GPU, with copies that run as late as they may."""
    program = attrs.evolve(low.program, constants={})
    constants = [[x.clone()] for x in (low.program.constants.get(i) for i in program.inputs) if x is not None]
    given = iter(inputs)
    ordered = [[low.program.constants[i].clone()] if i in low.program.constants else next(given) for i in program.inputs]
    assert len(ordered) == len(inputs) + len(constants)
    return late(program, low.mesh, [shards[0] for shards in ordered], seed, settles)


def late(program: Program, mesh: cf.Mesh, inputs: list[torch.Tensor], seed: int, settles: bool) -> list[torch.Tensor]:
    """What a program of one rank gives from its source for a GPU."""
    runner, card = SimulatedProgram(program, mesh), Beside(seed)
    copier = Copier(card)
    card.first_is_in = copier._stream(DEVICE, "to_device") is card.streams[1]
    copier._stream(DEVICE, "to_host")
    assert runner.pool is not None
    runner.pool.allocate()
    writer = runner.write(((0,),) * len(inputs), torch.device("meta"))
    writer.names["copy_start"] = lambda kind, operands, _, pool=None: copier.start(kind, operands, DEVICE, pool)
    writer.names["settle"] = copier.settle if settles else lambda *_: None
    writer.names["device"] = torch.device("cpu")
    function = writer.function()
    function._finish = copier.finish
    outs = function(inputs)
    copier.arrived(outs)
    return [outs[slots[0]] for slots in function.slots]


def moved_on_the_host(lanes: int = 1) -> Program:
    """A copy on the host that is shown, rearranged (which copies) and, where lanes share it, written by each for itself."""
    nodes = [
        Node("colofunc.to_host", (Ref(0),), (), (2,)),
        Node("colofunc.debug", ((Ref(2),), "{}", "", False), (), ()),
        Node("colofunc.rearrange", (Ref(2), "a b -> (b a)", (), ()), (), (3,)),
    ]
    nodes += [Node("aten.add_.Tensor", (Ref(2), Ref(1)), (), (4,))] if lanes > 1 else []
    shapes = {0: (2, 4), 1: (2, 4), 2: (2, 4), 3: (8,), 4: (2, 4)}
    values = {k: Value(k, shape, torch.float32, place="device" if k == 0 else "host") for k, shape in shapes.items()}
    return Program((0, 1), tuple(nodes), (3,), {k: v for k, v in values.items() if k < 4 or lanes > 1})


def test_the_host_waits_before_it_shows_rearranges_or_separates_what_was_copied_there() -> None:
    several = SimulatedProgram(moved_on_the_host(2), cf.Mesh(dp=2)).write(((0, 0), (0, 1)), torch.device("meta"), sparing=False)
    there = several.lines[0].split(" = ")[0]
    reads = [k for k, line in enumerate(several.lines) if "show(" in line or ".reshape(" in line or ".clone()" in line]
    assert len(reads) == 3 and all(several.lines[k - 1] == f"settle(({there},), ())" for k in reads), several.lines


def test_what_is_rearranged_on_the_host_is_there() -> None:
    x, program = torch.arange(1.0, 9.0).reshape(2, 4), moved_on_the_host()
    for settles in (True, False):
        (got,) = late(program, cf.Mesh(), [x.clone(), torch.zeros(2, 4)], 0, settles)
        assert torch.equal(got, x.t().reshape(8)) == settles


@pytest.mark.parametrize("where", ["device", "host"])
def test_a_step_from_the_source_for_a_gpu_gives_the_numbers_of_the_cpu(where: str) -> None:
    """Updated on the device with activations that leave and come back, and on the host, which has to wait for gradients there."""
    step, *args = training(layers=2, d=24, rows=32)
    most = cf.shard(step, one()).lower(*args).memory().peak_bytes["device"]
    options: Any = {"budget": int(0.6 * most)} if where == "device" else {"policy": gemini("host")}
    low = cf.offload(cf.shard(step, one()), **options).lower(*args)
    inputs = arguments_of(low, args)
    copies = lambda: inputs.copies(range(len(inputs.shards)))  # noqa: E731
    wanted = [shards[0] for shards in SimulatedProgram(low.program, low.mesh)(copies())]
    for seed in range(5):
        got = as_on_gpu(low, copies(), seed, settles=True)
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True)), f"schedule {seed}"
    hasty = as_on_gpu(low, copies(), 0, settles=False)
    assert where == "device" or not all(torch.equal(a, b) for a, b in zip(hasty, wanted, strict=True))
