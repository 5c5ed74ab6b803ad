"""Published training runs, as the clock predicts them: step seconds of plans that are pinned to the published configuration.

Each run is traced at full width with 2 and with 4 layers, planned, and played on the curves of its device
(`colofunc/mesh/devices/`); each layer more takes as much again, which two runs are planned whole to check. Rows with an even number gave
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
  of the block's first: 2.2 ms in each layer of MH8, 15 % of its step. The pairs of T and P stand as published now; MH7 and MH8, 0.2 %
  apart, did until their sums were looked up.
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
- P, MH, MA, MF: by Composer's code of the time gradients are summed in bfloat16, and there are float32 masters in its mode "PURE" as well
  (`_COMPOSER`). MA7 and MF trained in bfloat16 alone here, and all others summed in float32. Rows of MH are 1 to 5 % further off by it, P5,
  which had been within 25 %, is not any longer; MF3 and MF4 are 4 and 3 % nearer.
- MH3, planned whole, took 8 % less than its 2 and 4 layers say: from the seventh layer on a block kept the widest of its values, as a tied
  embedding hid what a cut there holds (`planner.recompute.cuts`). The rows had not been touched by it; anybody's plan with all layers was.
  MH3 is planned whole now, beside K1, both on cards without a limit, as pipelines are: within the card's memory, which by this count it
  does not fit, the plan gathers in pieces, which the run did not, and is 4 % slower than its few layers say.

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
- P5 and MH5: 30 B parameters and sequences of 8,192 on 8 cards of 80 GB, A100 and H100, 26 and 29 % too fast. The same model with 1,024
  to 4,096 tokens is within 10 % on A100, as are models of 7 B and 13 B with 8,192 and 16,384. By their own tables both fall by a sixth and
  more where the sequence doubles (51 to 39 % of the cards' peak, and 36 to 30 %), and 13 B parameters do not (58 and 56 %). They are the
  fullest of all rows: the plan holds 81 GiB of tensors where a card has 74.5 (MH3 and P4 78, MH6 and P102 77). With 4,096 tokens their
  table has one row, where two would be as many tokens: those did not fit, or were slower. An allocator that finds no room gives all back
  and asks again, and the device waits. What that costs is published of others: 25 % more images a second with 16 rows than with 17
  (lessw2020/transformer_central, a ViT of 2 B), 28 % fewer samples a second with 14 rows than with 12 (foundation-model-stack/fms-fsdp#63).
  It is as much as is missing, and no term: the plan says of these rows that they do not fit, as of P4, which pays nothing; what tells
  them apart is the order of blocks in an allocator of a version that nobody wrote down.
- MF3 and MA7, 70 B with two rows a rank, 64 cards of 40 GB and 32 of 80. The whole of a layer, 185 and 137 ms, is what its gathers and its
  reduction take at 23 and 26 GB/s into a box (4.2 and 3.6 GB). MF4, with four rows, needs 17 GB/s, others of these tables less, so that
  all of them fit a network of 25 GB/s a box: one card's, an eighth of what the table's heading says of it. Nothing says why, and
  two rows of the same table are no source for its network. MA7 has 10 % to explain, MF3 28 %, MF4 7 %.
- MF1: all rows of 13 B on 8 cards of 40 GB reach 44 % of the peak, with 512 to 8,192 tokens, and on 16 cards 52 %. The plan holds 37.5 of
  37.3 GiB: full, as P5.
- MH: of those with up to 8,192 tokens, MH5 left out, the published is 1.08 of the predicted and 5.8 ms for each 1e9 parameters of a
  microbatch (least squares, before their sums were looked up); of P and MA 0.97 and 6.9 ms. Looked into, and found to be none of it or of
  no source: collectives that are not hidden (13 B parameters with 4,096 tokens a rank are as fast on 64 cards as on 8); products of CUDA
  11.8 (pytorch#100850: up to 772 T operations a second on an H100); gathers in float32 (only before March 2023); copies of gradients into a
  flat one (counted); blocks that are made again to their end, as before torch 2.1 (by 8 % more P103 to P106 would be 15 % too slow, and
  A100 would have to reach 91 % of their best product's rate over whole steps); launches (a layer takes 20 ms and more).
- Rows of these tables differ by as much without a reason: 1 B on 32 cards of 40 GB is 18 % slower than on 16 and on 64; 760 M with 512
  tokens (MA4) 16 % slower on 80 GB than on 40 GB.
- TH1, held out, 12 % too slow: gathers of a block's parameters, 0.8 GB over 16 boxes, wait for each other.
- K11 to K13, KF4, KF5, too fast by 9, 18 and 30 %: how many network cards a board has is not published, and one a device is assumed.
  Half of that was hidden: the search took the starts of small collectives for their own, and so moved the weights of keys and values over
  a part of both axes in each microbatch, which no run does and took 9, 8 and 18 % of their steps.
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
CHECKED = ("K1", "MH3")
"""Runs that are planned with all of their layers too: on one device, and with parameters in parts that are made again."""


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
    rows += [beside_all_layers(one) for one in every if one.run.id in CHECKED]
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


def beside_all_layers(one: Result) -> Row:
    layers = one.run.model.layers
    off = one.seconds / planned(one.run, (layers,)).seconds() - 1
    return Row(f"{one.run.id} from few layers / planned with all {layers}", f"{1 + off:.4f}", "within 1 %", abs(off) <= 0.01)


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
