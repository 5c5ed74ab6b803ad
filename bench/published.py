"""Published training runs, as the clock predicts them: step seconds of plans that are pinned to the published configuration.

Each run is traced at full width with 2 and with 4 layers, planned, and played on the curves of its device
(`colofunc/mesh/devices/`); each layer more takes as much again, which one run is planned whole to check. Rows with an even number gave
the devices' `sustained` shares, the others only test them. The split, the configurations and what had to be assumed stand in
`bench/_published_rows.py`. Runs with float8, asynchronous tensor parallelism, chunked losses or batches that nobody wrote down are not
among them.

Terms that came of looking for the reason of a miss count wherever they hold:
- M3, M4: collectives over other links run beside one another, as each group has a stream of its own (`program.lanes`). Megatron's runs with
  tensor parallelism were published with gathers and reduce-scatters in chunks beside the products, a fact of their rows.
- K11 to K13 became too fast by that, up to 15 %, because nothing that runs beside something else cost anything. Kernels take longer beside
  a collective (`contention`, a published figure and no fit), and the plan of these runs reduces the gradients of q, k and v, and of gate
  and up, one by one, another fact of their rows (`tensor(..., apart=True)`). Their collectives are DTensor's, which are waited for at once;
  so are those of T25 and TH1.
- K2, K3: boards of four have NVLink in pairs and no switch, so that two of four devices have a third of the links (`4xh200-hgx`).
- I1, I2, of those held out, 19 and 24 % too slow when they were predicted first: the plan was not that of the run. Hybrid sharding
  gathered its gradients where the update reads them, with nothing to hide it, in place of an all-reduce beside backward that costs the
  same, and moved gradients by a permutation that was priced as a ring shift. Mended in the conversions, in `passes.coalesce` and in the
  price (`exchange`).
- I1 to I4, IH1, IH2, whose last two were 18 and 21 % too slow: those runs sum gradients in bfloat16, which their source says and was looked
  up then only (`Run.sums`). I3 and I4 moved by half a percent.
- D1, D2 (one box and two), published 1.6 % apart, were predicted equal within 0.1 %, the other way round: of two boxes the sums over `dp`,
  which cross both NVLink and the network, ran beside those over `cp`, which are on NVLink too. A collective keeps the links of every level
  that it uses now (`Mesh.link_levels`), and the pair stands as published, 0.4 % apart. M2 to M4 became slower by 1 to 5 %, N1 and N2, held
  out, by half a percent at most: dp and tp share boxes there as well.
- K1, K2: the report's table of batches says 4 rows in each of 2 microbatches, as they are planned here; the driver's commands say 2 in each
  of 4.
- T4, T26, MH7, MH8, P4, P102: FSDP's units. A block is one gather and one reduction there, of which the next block's gather begins while
  the present one is computed (torch's default). Parts of a block went one by one here, and the last of them waited behind the reductions
  of the block's first: 2.2 ms in each layer of MH8, 15 % of its step. The three pairs stand as published now.
- K1 and K3, KF2 and KF3, K11 to K13, KF4, KF5: copies. What a gather along the sequence brings is put in order, what a reduce-scatter sends
  before, and a block's parameters are copied out of what was gathered (`program.layout_copies`, which names the functions of torch that do
  so). That was free here. Of tensor parallelism it is a fifth of what its collectives take. FSDP1 (P, MH, MA, MF, I, IH, S) has one flat
  parameter, of which the others are views (`Run.flat`); pieces in chunks come to where they are read.
- TH1, KF4, KF5: a gradient over dp was waited for behind the next two collectives, of which tensor parallelism has ten in a block. Those
  along its own axes count now (`passes.coalesce.delay_updates`, `passes.schedule.next_of_kind`): 23 % too slow became 12.
- D1 to D5: their plans here bring each microbatch's gradient in another order of rows, which a copy per trip was counted for, and D1 fell
  behind D2. Megatron's kernels write gradients where they are summed; of software by hand only copies beside collectives count.
- K1 to K3, KF: `torch.compile` has the model (`build_parallel_model`), and the loss is called behind it, as operators of torch
  (`Run.loss_as_written`); its operators take three times what one kernel takes, 7 ms for each microbatch's 4 GiB of logits.
- K1 to K13, KF, P, MH, I, TA5, T35: "full" recomputation is of layers. Output layer and loss were made again as well.
- K11 to K13, KF: the output layer gives every rank of tensor parallelism all logits, by its plan's code (`Run.logits`).

What other software does is told to the machine that a run is planned for (`Topology.with_software`), so that anybody who plans a row with
public names gets its seconds (`tests/test_software.py`).

Note [Missed]. What was found out about pairs whose order is missed, and runs that are far off:
- Terms: without the attainable share of memory the testing half is better in the middle and worse at its worst; the share is from another
  source and stays.
- E3, E5, pipelines of two stages, are 8 and 15 % too fast, and with them 4 of the pairs of all rows: two stages are 17 % slower there than
  one, of which bubbles are 1.6 % and messages (20 MB) half a percent. The framework's public successor (Aleph-Alpha/scaling) cuts layers
  uniformly: embedding and 21 layers, then 19 and the output layer, which is as even as the cut here. What takes the rest is not published.
- T33 and T34 (which recompute every second layer, and every second product) are 2.3 % apart, and predicted 1 % the other way; TA2 and TA3,
  the same two ways on the same cards, are published 0.5 % apart the other way round.
- K1 and K3, one card and four, 7 % apart, stand in their order, but less than a percent apart. Per second of collectives K2 and K3 lost a
  second to K1 as published; here what runs beside them is a fifth slower. The share of the products' rate that is left in whole steps
  (`sustained`) comes from rows that all send, so that one card, which sends nothing, is 10 % too slow.
- KF1, KF2: `init_distributed` gives FSDP2 a mesh of one rank, so that it copies parameters that nobody sends; not counted.
- P5: 30 B parameters and sequences of 8,192 on 8 cards of 80 GB. The same model on the same cards with 1,024, 2,048 and 4,096 tokens, and
  models of 7 B and 13 B with 8,192 and 16,384, are within 8 %. By its own table it falls from 51 % of the cards' peak to 39 % where the
  sequence doubles, and 13 B parameters do not (58 and 56 %). Counted by hand its card is full: 60 GB of states, 6 of layers' inputs, 6 of
  logits and their gradients, 4 of a layer made again, 10 of gathered and whole gradients of two layers. Its microbatch was searched for as
  the largest that fits (`device_train_microbatch_size: auto`). An allocator that gives memory back in every layer is slow so; how slow is
  not published, and nothing here models it.
- MH5: that model with 8,192 tokens on 8 H100, 26 % too fast, MH6 and MH3, 16 and 14 %, with 4,096 and 2,048: the same cards, as full.
- MF3, 70 B on 64 cards of 40 GB with two rows a rank, is 32 % too fast, and its memory is half empty. MF4, on 128 with four rows, is 10 %
  too fast, and MA7, on 32 cards of 80 GB with two rows, too. Between MF3 and MF4 58 ms a layer would be waited for, which gathers at 26
  GB/s a box explain, an eighth of what the table says of its network; one row is no source for that.
- TH1, held out, 12 % too slow: gathers of a block's parameters, 0.8 GB over 16 boxes, wait for each other.
- KF4, KF5, K11, K12, too fast by a tenth: how many network cards a board has is not published, and one a device is assumed.
- M1: logits of 131,072 words beside 24 layers of 2,048, which a compiler fuses here. Neither the loss of the published run nor the rows of
  its microbatches are known.
- Runs whose gathers would be begun late: Composer's default for FSDP is `BACKWARD_POST`, "less overlap" by torch's documentation. The host
  runs ahead of the device, so that a gather is issued early nevertheless; it is not modelled.

Note [Peaks]. U1 and U2 publish what was alive, and so do all rows of K and KF (`torch.cuda.max_memory_allocated` in KernelForge's tracker;
they stood here as what was reserved). The others publish what torch's caching allocator had reserved, beside which stands what the plan
says of a card (`colofunc.mesh.card`).
- K10 to K13, KF4 and KF5 were 25 to 60 % too small. Their frame reduces no gradient before the last microbatch, and FSDP2 adds up whole
  ones in float32 meanwhile: 55 GiB of K10's 88 (`zero(3, reduce="last")`).
- K, KF were 4 to 24 % too small still, for three facts of their code: the loss is not compiled and keeps what each of its operators makes,
  12 GiB in place of 8 (`Run.loss_as_written`); the variable `logits` lives until the next microbatch has its own, 4 GiB
  (`Run.keeps_logits`); tensor parallelism leaves the embedding whole, with its gradient and moments (`Run.whole_embedding`).
- K1 and K2 are a fifth too large. K1 has no FSDP, and torch adds its gradients up in the parameters' bfloat16, 15 GiB less than in
  float32 here. K2, by the report's table with 4 rows in each of 2 microbatches, cannot hold its logits in what was published; with the 2
  rows in each of 4 that the driver's command says it would be 5 % too large, K1 8 %. The table is followed, as for K3.
- All runs of "full": a plan keeps what goes from stage to stage, which is a layer's input and what is between its halves; frameworks keep
  the input alone. 4 GiB of K1 to K3, and their halves are not made again whole, 2 % of a step.
- What is not in these: the gathered embedding and output layer, which FSDP2 keeps from forward to backward.
- Runs that are compiled were 8 to 16 % larger than published as long as each operator's result counted. What no kernel writes is left out
  now (`colofunc.executors.unwritten`), but for one gradient of the logits in float32, which inductor was seen to keep on a CPU. Whether it
  does on these cards is not published.

    python -m bench published
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import combinations, islice
from multiprocessing import get_context

import attrs

from bench import Row, Section
from bench._published_rows import FURTHER, HELD_OUT, OTHERS, PIPELINED, RUNS, Run
from bench._published_steps import machine, planned
from colofunc.mesh import Rate, Topology
from colofunc.mesh.card import card_memory
from colofunc.mesh.curves import curves_of

NOISE = 0.02
"""Published runs that are less apart may stand in either order: twice what one source's runs of the same work per card differ by
(llm-foundry, 13 B on 8, 16, 32 and 64 H100: 4,792, 4,767, 4,811 and 4,800 tokens a second and card)."""
CHECKED = "K1"
"""The run that is planned with all of its layers too."""


@attrs.frozen
class Result:
    """Predicted seconds of a run, and what they would be without a term of the clock."""

    run: Run
    seconds: float
    alive_bytes: int
    without: dict[str, float]

    @property
    def error(self) -> float:
        return self.seconds / self.run.measured_s - 1

    @property
    def peak_gib(self) -> float:
        """What is alive at the peak, or what a card holds then, whichever was published."""
        card = card_memory(machine(self.run), self.alive_bytes, self.run.ranks, is_tight=self.run.again != "none")
        assert card is not None, "runs are planned on cards"
        return (self.alive_bytes if self.run.peak_of == "alive" else card.needed_bytes) / 2**30

    def figure(self) -> str:
        """Seconds, tokens a second and device, and where it is known the peak, beside what was published."""
        run = self.run
        text = f"{self.seconds:.3f} s, published {run.measured_s:.3f} s: {self.error:+.0%}"
        text += f"; {speed(run, self.seconds):,.0f} tokens/s, published {speed(run, run.measured_s):,.0f}"
        if run.peak_gib is not None:
            text += f"; {self.peak_gib:.0f} GiB, published {run.peak_gib:.0f} {run.peak_of}"
        return text


def variants(run: Run) -> dict[str, Topology]:
    """Term -> a run's machine without it."""
    topology, sheet = machine(run), machine(run, is_sheet=True)
    curves = curves_of(topology.device.name)
    assert curves is not None, "runs are planned on devices with curves"
    device = topology.device
    rates = tuple(Rate(r.dtype, r.flops_per_s / curves.sustained.share) for r in device.rates)
    return {
        "sustained": attrs.evolve(topology, device=attrs.evolve(device, rates=rates)),
        "tiles": attrs.evolve(topology, device=attrs.evolve(device, tiles=None)),
        "attention": attrs.evolve(topology, device=attrs.evolve(device, attention=())),
        "memory": attrs.evolve(topology, device=attrs.evolve(device, memory_bytes_per_s=sheet.device.memory_bytes_per_s)),
        "links": attrs.evolve(topology, levels=sheet.levels),
        "contention": attrs.evolve(topology, device=attrs.evolve(device, contention=0.0)),
        "all of them": sheet,
    }


def unfused(topology: Topology) -> Topology:
    """A machine whose software has no kernels by hand, so that all copies between layouts count, too."""
    return attrs.evolve(topology, software=attrs.evolve(topology.software, fused=False))


def result(run: Run, is_ablated: bool = False) -> Result:
    """is_ablated: with what it would be without each term."""
    steps = planned(run)
    without = {}
    if is_ablated:
        without = {term: steps.seconds_on(other) for term, other in variants(run).items()}
        without["fusion"] = steps.seconds_on(unfused(machine(run)), "distributed")
    return Result(run, steps.seconds(), steps.alive_bytes(), without)


def kendall(results: Sequence[Result], least: float = 0.0) -> tuple[int, int]:
    """(pairs of runs of one model that are in the published order by tokens a second and device, all such pairs).

    Of runs of one source and one kind of card; what was published as equal (D3 and D4) has no order, nor has what is less than `least` of
    itself apart.
    """
    agreeing = total = 0
    for one, other in combinations(results, 2):
        if (one.run.group, one.run.model, one.run.topology) != (other.run.group, other.run.model, other.run.topology):
            continue
        published = speed(one.run, one.run.measured_s) - speed(other.run, other.run.measured_s)
        predicted = speed(one.run, one.seconds) - speed(other.run, other.seconds)
        if published == 0 or abs(published) < least * speed(one.run, one.run.measured_s):
            continue
        total += 1
        agreeing += published * predicted > 0
    return agreeing, total


def speed(run: Run, seconds: float) -> float:
    """Tokens a second and device."""
    return run.sequences * run.tokens / seconds / run.ranks


def errors(results: Sequence[Result], term: str = "") -> tuple[float, float]:
    """Median and worst of absolute errors, of the whole clock or of it without a term."""
    found = [abs((one.without[term] if term else one.seconds) / one.run.measured_s - 1) for one in results]
    return statistics.median(found), max(found)


def bench() -> Section:
    tables = (RUNS, OTHERS, HELD_OUT, PIPELINED, FURTHER)
    rows_of_tables = [run for table in tables for run in table]
    is_test = [run in RUNS and not run.calibrates for run in rows_of_tables]
    # A run takes seconds to plan, and knows nothing of the others.
    with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:
        every = list(pool.map(result, rows_of_tables, is_test))
    left = iter(every)
    results, others, held, pipelined, further = (list(islice(left, len(table))) for table in tables)
    rows = []
    for one in results:
        run = one.run
        half = "calibrates" if run.calibrates else "tests"
        about = f" ({run.unknown})" if run.unknown else ""
        rows.append(Row(f"{run.id} {half}{about}", one.figure(), "within 25 %", abs(one.error) <= 0.25))
        if run.id == CHECKED:
            off = one.seconds / planned(run, (run.model.layers,)).seconds() - 1
            what = f"{run.id} from few layers / planned with all {run.model.layers}"
            rows.append(Row(what, f"{1 + off:.4f}", "within 1 %", abs(off) <= 0.01))
    sums = [sum_up(held, "rows held out"), sum_up(others, "rows of the table of P1 to P5"), sum_up(pipelined, "pipelines")]
    sums.append(sum_up(further, "further rows, looked for where the clock fails"))
    sums.append(order(every, "configurations of one model in the published order, of all rows here"))
    apart = f"the same without pairs that were published less than {NOISE:.0%} apart"
    sums.append(order(every, apart, NOISE))
    peaks = [peaks_of(every, "alive", "what is alive"), peaks_of(every, "reserved", "what a card holds, beside what was reserved")]
    beside = each([*others, *held, *pipelined, *further])
    return Section("Published runs", SETTING, [*summary(results), *sums, *peaks, *ablation(results), *rows, *beside])


def summary(results: Sequence[Result]) -> list[Row]:
    rows = []
    for half, chosen in (("calibrating rows", True), ("testing rows", False)):
        some = [one for one in results if one.run.calibrates == chosen]
        middle, worst = errors(some)
        rows.append(Row(f"{len(some)} {half}: median error", f"{middle:.1%}", "at most 10 %", middle <= 0.10))
        rows.append(Row(f"{half}: worst error", f"{worst:.0%}", "at most 25 %", worst <= 0.25))
    return [*rows, order(results, "configurations of one model in the published order")]


def order(results: Sequence[Result], what: str, least: float = 0.0) -> Row:
    agreeing, total = kendall(results, least)
    tau = 2 * agreeing / total - 1
    return Row(what, f"{agreeing} of {total}, tau {tau:.3f}", "tau 0.9", tau >= 0.9)


def sum_up(some: Sequence[Result], what: str) -> Row:
    """Of runs that neither calibrate nor test."""
    middle, worst = errors(some)
    about = f"{len(some)} {what}, used for no fit: median and worst error"
    return Row(about, f"{middle:.1%} and {worst:.0%}", "10 % and 25 %", middle <= 0.1 and worst <= 0.25)


def peaks_of(results: Sequence[Result], kind: str, words: str) -> Row:
    found = [abs(one.peak_gib / one.run.peak_gib - 1) for one in results if one.run.peak_gib is not None and one.run.peak_of == kind]
    middle, worst = statistics.median(found), max(found)
    what = f"{len(found)} peaks, {words}: median and worst error"
    return Row(what, f"{middle:.1%} and {worst:.0%}", "10 % and 25 %", middle <= 0.1 and worst <= 0.25)


def each(some: Sequence[Result]) -> list[Row]:
    rows = []
    for one in some:
        run = one.run
        axes = " x ".join(f"{name} {size}" for name, size in run.axes.items())
        unknown = f" ({run.unknown})" if run.unknown else ""
        what = f"{run.id}: {run.model.layers} layers of {run.model.hidden}, {run.tokens} tokens, {axes}{unknown}"
        rows.append(Row(what, one.figure(), "within 25 %", abs(one.error) <= 0.25))
    return rows


def ablation(results: Sequence[Result]) -> list[Row]:
    tests = [one for one in results if not one.run.calibrates]
    rows = []
    for term in tests[0].without:
        middle, worst = errors(tests, term)
        rows.append(Row(f"testing rows without {term}: median and worst error", f"{middle:.1%}, {worst:.0%}"))
    return rows


SETTING = (
    "Seconds of a step by the clock, plans pinned to the published configuration, 2 and 4 layers of full width extrapolated; a term that "
    "is left out takes the data sheet's figure, attention 0.6 of the products' rate, products one rate for all sizes (tiles), fusion none. "
    "Tokens a second are a device's"
)
