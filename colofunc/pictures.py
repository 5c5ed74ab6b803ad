"""Pictures of a plan: memory over the step by kind, under its budget, and below it what works when.

Problem: a peak in bytes does not say whether it is a spike or a plain, nor what stands beside it. Idea: one axis of
seconds; above it the bytes of each kind stacked, with the budget as a red line; below it a lane for each thing that
works: the device, the links, the host.

    low = step.lower(state, batch)
    memory_picture(low, "plan.png", budget_bytes=40 * 2**30)

A pipeline has the picture of the papers: a lane per rank, actions as cells with the number of their microbatch.

    pipeline_picture(low.pipeline(), "pipeline.svg")

Needs matplotlib: `pip install matplotlib`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, log2
from os import PathLike
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from colofunc import owned
from colofunc.compiler.lowered import Lowered
from colofunc.errors import InputError
from colofunc.mesh.sizes import size_text
from colofunc.planner.stages.simulate import Simulated, Span
from colofunc.program.lanes import LANES, Busy, Lanes
from colofunc.program.memory_report import KINDS, MemoryReport

try:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle
    from matplotlib.ticker import FuncFormatter, MultipleLocator
except ImportError as error:
    raise InputError(
        "colofunc.pictures needs matplotlib, which is not installed. Try: pip install matplotlib"
    ) from error

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "parameters": "#3b6fb6", "parameter copies": "#9dbfe8", "optimizer state": "#7b5aa6", "gradients": "#e08a3c",
    "activations": "#58a55c", "temporaries": "#b9d8a7", "collective buffers": "#e7c94f", "other": "#b8b8b8",
}  # fmt: skip
ACTIONS = {"F": "#4472c4", "B": "#2ca8a0", "I": "#5fc4d6", "W": "#8bb84a"}
"""As in the papers: forward blue, the whole backward and its input gradients blue-green, weight gradients green."""
ACTION_NAMES = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}
LIGHTER = 0.55
"""Share of white in the colour of each further stage of a rank."""
_POINTS_PER_DIGIT = 4.5
PHASES = {"forward": "#58a55c", "backward": "#e08a3c", "update": "#7b5aa6"}
_BUDGET = "#d62728"
FAR = 4
"""A limit of more than this many times the peak is said and not drawn."""
PICTURE_MARK = "colofunc_picture"
MOST_PICTURE_BYTES = 1 << 26  # a PDF has its metadata at the end
_MARKED_BY = {".png": "Software", ".svg": "Creator", ".pdf": "Creator", ".ps": "Creator", ".eps": "Creator"}
_COLUMNS = 2400  # a lane is drawn with so many steps at most


def memory_picture(low: Lowered, path: str | PathLike[str], budget_bytes: int | None = None, title: str = "") -> None:
    """Draw the memory and the lanes of one rank to a file whose ending says the format (.png, .svg, .pdf)."""
    report, played = low.memory(), low.lanes()
    tiers = [tier for tier in ("device", "host", "disk") if report.peak_bytes.get(tier)]
    rows = [lane for lane in LANES if lane in played.busy_s()]
    heights = [4.0 if tier == "device" else 2.2 for tier in tiers] + [0.45 * (len(rows) + 1)]
    figure = Figure(figsize=(12, sum(heights) + 1.2), layout="constrained")
    FigureCanvasAgg(figure)
    plots: list[Axes] = list(figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0])
    for plot, tier in zip(plots, tiers, strict=False):
        limit = budget_bytes if tier == "device" else low.mesh.capacity_bytes(tier)
        draw_memory(plot, report, played, tier, limit)
    draw_lanes(plots[-1], played.busy, rows)
    plots[-1].set_xlim(0, played.end_s or 1)
    plots[-1].set_xlabel("seconds of one step, as planned")
    figure.suptitle(fill(title or str(low.plan), 150), fontsize=10)
    _save(figure, path, "plan.png")


def pipeline_picture(simulated: Simulated, path: str | PathLike[str], title: str = "") -> None:
    """Draw the schedule of a pipeline to a file whose ending says the format (.png, .svg, .pdf).

    simulated: `low.pipeline()` of a step, or what `cf.ext.simulate` gives. In an SVG each cell is a group whose id is
    the rank and the action, such as `rank0-0F3`. Numbers that have no room in their cell are left out. Raises
    InputError where the file cannot be written.
    """
    ranks = len(simulated.rows)
    width = 14.0
    figure = Figure(figsize=(width, 0.42 * ranks + 1.3), layout="constrained")
    FigureCanvasAgg(figure)
    plot: Axes = figure.subplots()
    end_s = simulated.makespan_s or 1.0
    points_per_s = 0.85 * width * 72 / end_s
    for rank, row in enumerate(simulated.rows):
        stages = sorted({span.action.stage for span in row})
        for span in row:
            _draw_action(plot, span, ranks - 1 - rank, stages.index(span.action.stage), points_per_s)
    drawn = {span.action.kind for row in simulated.rows for span in row}
    kinds = [kind for kind in ACTIONS if kind in drawn]
    for kind in kinds:
        plot.plot([], [], color=ACTIONS[kind], linewidth=6, label=f"{kind}: {ACTION_NAMES[kind]}")
    plot.legend(loc="upper center", bbox_to_anchor=(0.5, -0.28), ncols=len(kinds), fontsize=8, frameon=False)
    plot.set_yticks([ranks - 1 - rank + 0.5 for rank in range(ranks)], [f"rank {rank}" for rank in range(ranks)])
    plot.set_ylim(0, ranks)
    plot.set_xlim(0, end_s)
    plot.set_xlabel("seconds")
    figure.suptitle(fill(title or f"{ranks} ranks, bubble {simulated.bubble:.1%}", 150), fontsize=10)
    _save(figure, path, "pipeline.svg")


def _draw_action(plot: Axes, span: Span, row: int, place: int, points_per_s: float) -> None:
    """One cell. place: of its stage among those of the rank; later ones are lighter."""
    action = span.action
    took_s = span.end_s - span.start_s
    colour = _towards_white(ACTIONS[action.kind], 1 - (1 - LIGHTER) ** place)
    cell = Rectangle((span.start_s, row + 0.06), took_s, 0.88, facecolor=colour, edgecolor="white", linewidth=0.5)
    cell.set_gid(f"rank{span.rank}-{action}")
    plot.add_patch(cell)
    number = str(action.microbatch)
    if took_s * points_per_s >= _POINTS_PER_DIGIT * len(number):
        ink = "black" if place else "white"
        plot.text(span.start_s + took_s / 2, row + 0.48, number, ha="center", va="center", fontsize=7, color=ink)


def _towards_white(colour: str, part: float) -> tuple[float, float, float]:
    red, green, blue = to_rgb(colour)
    return red + (1 - red) * part, green + (1 - green) * part, blue + (1 - blue) * part


def _save(figure: Figure, path: str | PathLike[str], such: str) -> None:
    where = owned.given(path, "the picture", InputError, f"a file such as {such}")
    check_replaceable(where)
    try:
        figure.savefig(where, dpi=140, metadata=_marked(where))
    except (OSError, ValueError) as error:
        raise InputError(
            f"the picture cannot be written to {str(path)!r}: {error}; name a file such as {such}"
        ) from error


def check_ending(path: str | PathLike[str]) -> None:
    """Raises InputError for a file whose ending names no format of pictures."""
    known = sorted(FigureCanvasAgg.get_supported_filetypes())
    if Path(path).suffix.lower().removeprefix(".") not in known:
        endings = ", ".join(known)
        raise InputError(
            f"the picture cannot be written to {str(path)!r}: its ending is none of {endings}; name a file such as "
            "plan.png"
        )


def check_replaceable(where: Path) -> None:
    """Raises InputError where there is a file that is no picture of ours.

    Formats without metadata cannot say that they are.
    """
    owned.check_own_kind(where, PICTURE_MARK, "the picture", InputError, MOST_PICTURE_BYTES)


def _marked(where: Path) -> dict[str, str] | None:
    key = _MARKED_BY.get(where.suffix.lower())
    return None if key is None else {key: PICTURE_MARK}


def draw_memory(plot: Axes, report: MemoryReport, played: Lanes, tier: str, limit_bytes: int | None) -> None:
    """Bytes of each kind over the seconds of a step, stacked; the limit is a red line where it is near."""
    times, held = unrolled(report, played, tier)
    kinds = [kind for kind in KINDS if any(held[kind])]
    plot.stackplot(
        [*times, played.end_s], [[*held[kind], held[kind][-1]] for kind in kinds],
        step="post", labels=kinds, colors=[COLOURS[k] for k in kinds], linewidth=0,
    )  # fmt: skip
    peak, whole = report.peak_bytes[tier], [sum(column) for column in zip(*held.values(), strict=True)]
    at = times[max(range(len(times)), key=whole.__getitem__)]
    plot.plot([at], [peak], "v", color="black", markersize=5)
    plot.annotate(f"peak {size_text(peak)}", (at, peak), textcoords="offset points", xytext=(6, 5), fontsize=9)
    top = peak
    if limit_bytes is not None and limit_bytes < FAR * peak:
        top = max(peak, limit_bytes)
        plot.axhline(limit_bytes, color=_BUDGET, linewidth=1.5)
    if limit_bytes is not None:
        said, near = f"{'budget' if tier == 'device' else 'capacity'} {size_text(limit_bytes)}", top == limit_bytes
        plot.annotate(
            said if near else f"{said}, far above", (1, limit_bytes if near else 1.12 * top), xycoords=("axes fraction", "data"),
            textcoords="offset points", xytext=(-4, 4 if near else -12), ha="right", color=_BUDGET, fontsize=9,
        )  # fmt: skip
    plot.set_ylim(0, 1.12 * top)
    plot.yaxis.set_major_locator(MultipleLocator(2 ** floor(log2(max(top, 8) / 4))))
    plot.set_ylabel(f"{tier} memory of a rank")
    plot.yaxis.set_major_formatter(FuncFormatter(lambda nbytes, _: size_text(nbytes)))
    plot.grid(axis="y", alpha=0.25)
    handles, names = plot.get_legend_handles_labels()
    plot.legend(handles[::-1], names[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False)


def unrolled(report: MemoryReport, played: Lanes, tier: str) -> tuple[list[float], dict[str, list[int]]]:
    """(seconds, kind -> bytes from then on) of a tier, the trips of loops one behind the other."""
    kinds = report.by_kind.get(tier, {kind: (0,) * len(played.starts_s) for kind in KINDS})
    times: list[float] = []
    held: dict[str, list[int]] = {kind: [] for kind in KINDS}
    for place, start_s in enumerate(played.starts_s):
        body, trip = report.bodies.get(place), played.bodies.get(place)
        if body is None or trip is None or tier not in body.peak_bytes or not trip.end_s:
            times.append(start_s)
            for kind in KINDS:
                held[kind].append(kinds[kind][place])
            continue
        end_s = played.starts_s[place + 1] if place + 1 < len(played.starts_s) else played.end_s
        inner, lines = unrolled(body, trip, tier)
        at = body.peak_at[tier]
        for n in range(round((end_s - start_s) / trip.end_s)):
            times += [start_s + n * trip.end_s + t for t in inner]
            for kind in KINDS:
                outside = kinds[kind][place] - body.by_kind[tier][kind][at]
                held[kind] += [outside + nbytes for nbytes in lines[kind]]
    return times, held


def draw_lanes(plot: Axes, busy: Sequence[Busy], rows: Sequence[str]) -> None:
    """One row per lane, coloured by phase, the first on top."""
    end_s = max((b.end_s for b in busy), default=1.0)
    for row, lane in enumerate(rows):
        for phase, colour in PHASES.items():
            mine = [(b.start_s, b.end_s) for b in busy if b.lane == lane and b.node.phase == phase]
            spans = [(a, b - a) for a, b in _merged(mine, end_s / _COLUMNS)]
            plot.broken_barh(spans, (len(rows) - 1 - row + 0.1, 0.8), facecolors=colour, linewidth=0)
    for phase, colour in PHASES.items():
        plot.plot([], [], color=colour, linewidth=6, label=phase)
    plot.set_yticks([len(rows) - 1 - row + 0.5 for row in range(len(rows))], rows)
    plot.set_ylim(0, len(rows))
    plot.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False)


def _merged(spans: Sequence[tuple[float, float]], gap: float) -> list[tuple[float, float]]:
    """Spans with gaps that nobody could see closed."""
    out: list[tuple[float, float]] = []
    for a, b in sorted(spans):
        if out and a - out[-1][1] <= gap:
            out[-1] = out[-1][0], max(out[-1][1], b)
        else:
            out.append((a, b))
    return out
