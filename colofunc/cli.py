"""The command line: `colofunc plan script.py:step --device a100-40g --budget 40GiB`.

Problem: whether a model fits, and what it costs, is asked before there is a machine. Idea: the script that trains names its
step and what it is called with; the step is traced and planned here, on any laptop, and nothing of it is run.

    # script.py
    def step(state, batch): ...                                          # or a staged one: cf.shard(step_fn, mesh, ...)
    def example(): return cf.train_state(...), {"ids": cf.abstract((8, 1024), torch.int64)}     # (state, batch)

    $ colofunc plan script.py:step --device a100-40g --budget 40GiB --picture plan.png --trace trace.json
    $ colofunc plan script.py:step --device a100-40g --mesh dp=2 --pp 4 --schedule zb-h1 --microbatches 16
    $ colofunc plan script.py:step --device a100-40g --host 64GiB --disk 2TB,7GB/s,5GB/s       # a drive that need not be here

The name may also be a function without arguments that returns all three: `def plan_me(): return step, state, batch`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import platform
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import attrs
import torch
import typer
from rich.console import Console

from colofunc import errors, owned
from colofunc.compiler.lowered import Lowered
from colofunc.compiler.memory_limits import device_limit_bytes
from colofunc.compiler.staged import Staged, in_place_of
from colofunc.errors import ColofuncError, InputError, MeshError, near
from colofunc.mesh import PRESETS, Mesh, Topology, resolve_topology
from colofunc.mesh.card import card_memory
from colofunc.mesh.detection import margin_bytes
from colofunc.mesh.sizes import parse_bytes, parse_room, size_text
from colofunc.ops.native import prebuild, ship
from colofunc.planner.plan import MARK as PLAN_MARK
from colofunc.planner.plan_table import time_text
from colofunc.program.lanes import TRACE_MARK, chrome_trace
from colofunc.program.passes.kernels import capability_on
from colofunc.transforms.checkpoint import checkpoint
from colofunc.transforms.offload import offload, with_disk
from colofunc.transforms.pipeline import AUTO, pipeline
from colofunc.transforms.shard import shard
from colofunc.version import __version__

EXAMPLES = ("example", "inputs")
_HERE, _TORCH = (str(Path(str(module.__file__)).parent) + os.sep for module in (errors, torch))
MOVES: dict[str, Callable[[Any], Any]] = {"checkpoint": checkpoint, "offload": offload}

MICROBATCHES = 2
"""For each rank of a pipeline, where nobody says how many there are: a third of 1F1B is bubble at worst."""

app = typer.Typer(add_completion=False)


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="the versions of colofunc, torch and Python")] = False,
) -> None:
    """Plans of training and inference steps, without the machine."""
    if version:
        typer.echo(f"colofunc {__version__}, torch {torch.__version__}, Python {platform.python_version()}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


@app.command()
def plan(
    target: Annotated[str, typer.Argument(help="script.py:NAME, the step or a function that returns (step, state, batch)")],
    device: Annotated[str, typer.Option(help="a device such as a100-40g: one, or as many as the mesh has ranks")] = "",
    topology: Annotated[str, typer.Option(help="a machine such as 8xa100-80g, or a .json file of a measured one")] = "",
    mesh: Annotated[str, typer.Option(help="axes, such as dp=2,tp=4; default: the step's own, or one device")] = "",
    budget: Annotated[str, typer.Option(help="device memory of a rank, such as 40GiB or 0.5; default: what is left for tensors")] = "",
    host: Annotated[str, typer.Option(help="host memory of a node, such as 512GiB or 0.5; default: that of the usual machine")] = "",
    disk: Annotated[str, typer.Option(help="a disk of a node: 2TB, 2TB,7GB/s,5GB/s (read, write) or a directory; default: none")] = "",
    within: Annotated[str, typer.Option(help="what may be done to meet the budget")] = "checkpoint,offload",
    pp: Annotated[int, typer.Option(help="ranks of a pipeline: an axis pp beside those of the mesh")] = 0,
    schedule: Annotated[str, typer.Option(help="the pipeline's schedule, such as 1f1b, zb-h1, zb-v or auto")] = "",
    microbatches: Annotated[str, typer.Option(help="parts of a batch that follow one another through the pipeline, or auto")] = "",
    example: Annotated[str, typer.Option(help="the function that returns (state, batch); default: example or inputs")] = "",
    picture: Annotated[str, typer.Option(help="draw memory and lanes to this file (.png, .svg, .pdf)")] = "",
    trace: Annotated[str, typer.Option(help="write a Chrome trace to this .json file")] = "",
    save: Annotated[str, typer.Option(help="write the plan to this .json file, for step.with_plan")] = "",
    rows: Annotated[int, typer.Option(min=0, help="how many of the dearest decisions to show")] = 12,
) -> None:
    """Trace and plan a step for a machine that need not be here: what was decided and why, its memory and its seconds."""
    console = Console() if sys.stdout.isatty() else Console(width=180)
    try:
        writable(picture=picture, trace=trace, save=save)
        step, args = found(target, example)
        wanted = [w for w in within.split(",") if w]
        axes = axes_of(mesh)
        step, axes = in_stages(step, axes, pp, schedule, microbatches)
        staged = placed(step, axes, machine(device, topology, host, budget, disk), wanted, directory(disk))
        with errors_of(target, ours=True):
            low: Lowered = staged.lower(*args)
        budget_bytes = device_limit_bytes(staged, low.priced)
        report(console, low, target, rows, budget_bytes, bool(disk))
        written(console, low, target, budget_bytes, picture, trace, save)
    except ColofuncError as error:
        _complain("\n".join([f"colofunc: {error}", *getattr(error, "__notes__", ())]))
        raise typer.Exit(1) from error


@app.command()
def devices() -> None:
    """Devices and machines that are known by name."""
    console = Console()
    for name, known in PRESETS.items():
        held = ", ".join(f"{t.name} {size_text(t.capacity_bytes)}" for t in known.tiers if t.capacity_bytes is not None)
        console.print(f"{name:<14} {held or 'no limits'}", highlight=False)


@app.command()
def native(
    kinds: Annotated[list[str] | None, typer.Argument(metavar="[cpu] [cuda]", help="kinds of devices, of none given the CPU")] = None,
    into: Annotated[Path | None, typer.Option(metavar="FOLDER", help="a folder that a wheel takes along: make wheel NATIVE=cpu")] = None,
) -> None:
    """Compile kernels into the cache folder, as the first use of one would: for images and clusters."""
    try:
        for kind in kinds or ["cpu"]:
            for path in prebuild(kind) if into is None else ship(kind, into):
                typer.echo(path)
    except ColofuncError as error:
        _complain(f"colofunc: {error}")
        raise typer.Exit(1) from error


# ---- what is planned ----


def found(target: str, example: str = "") -> tuple[Any, tuple[Any, ...]]:
    """The step that `target` names, and what to call it with."""
    where, colon, name = target.rpartition(":")
    if not colon or not where or not name.isidentifier():
        raise InputError(f"{target!r} names no step; write script.py:NAME, such as train.py:step")
    module = _module(where)
    if not hasattr(module, name):
        raise InputError(f"{where} has no {name!r}{near(name, _public(module), 'names')}")
    step = getattr(module, name)
    if not callable(step):
        raise InputError(f"{target} is of type {type(step).__name__}; name a step function, or one that returns (step, state, batch)")
    if not isinstance(step, Staged) and not _needs(step):
        with errors_of(f"{target}()"):
            made = step()
        if not isinstance(made, tuple) or len(made) < 2 or not callable(made[0]):
            raise InputError(f"{target} takes no arguments, so it has to return (step, state, batch); it returned {type(made).__name__}")
        return made[0], made[1:]
    return step, _example(module, where, target, example)


def _example(module: ModuleType, where: str, target: str, example: str) -> tuple[Any, ...]:
    name = example or next((n for n in EXAMPLES if hasattr(module, n)), "")
    if not name or not callable(getattr(module, name, None)):
        wanted = f"no function {example!r}" if example else f"neither {EXAMPLES[0]}() nor {EXAMPLES[1]}()"
        raise InputError(
            f"{where} has {wanted} that returns what {target} is called with; add `def example(): return state, batch` "
            "(cf.abstract and lazy tensors will do), or name one with --example"
        )
    with errors_of(f"{name}() of {where}"):
        made = getattr(module, name)()
    if not isinstance(made, tuple):
        raise InputError(f"{name}() of {where} returned {type(made).__name__}; return the arguments of the step as a tuple: (state, batch)")
    return made


def _module(where: str) -> ModuleType:
    if not where.endswith(".py"):
        try:
            with errors_of(where, ModuleNotFoundError):
                return importlib.import_module(where)
        except ModuleNotFoundError as error:
            raise InputError(f"there is no module {where!r} ({error}); write the path of a file, such as train.py:step") from error
    path = Path(where)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise InputError(f"there is no file {where!r}; write its path from here, such as examples/train.py:step")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[path.stem] = module
    with errors_of(where):
        spec.loader.exec_module(module)
    return module


@contextmanager
def errors_of(what: str, *passing: type[Exception], ours: bool = False) -> Iterator[None]:
    """An error of the script is printed as its own: its lines, not ours, and the command ends. `passing` are not looked at.

    ours: the script is called by us, so errors that we raise, on purpose or as a defect, pass too.
    """
    try:
        yield
    except passing:
        raise
    except SystemExit as error:
        says = "put what it does as a program under if __name__ == '__main__':"
        raise InputError(f"{what} ended the program (exit {error.code}) while it was read; {says}") from error
    except Exception as error:
        said = traceback.TracebackException.from_exception(error)
        innermost = said.stack[-1].filename if said.stack else ""
        shown = _without_us(said)
        if ours and (isinstance(error, ColofuncError) or innermost.startswith(_HERE) or not shown):
            raise
        _complain(f"colofunc: {what} failed, and nothing was planned\n" + "".join(said.format()).rstrip())
        raise typer.Exit(1) from error


def _without_us(said: traceback.TracebackException) -> int:
    """Takes frames of colofunc, torch and the import system out of a traceback and its causes; how many of its own are left."""
    for cause in (said.__cause__, said.__context__):
        if cause is not None:
            _without_us(cause)
    said.stack = traceback.StackSummary.from_list([f for f in said.stack if not f.filename.startswith((_HERE, _TORCH, "<frozen "))])
    return len(said.stack)


def _complain(text: str) -> None:
    Console(stderr=True).print(text, style="red", markup=False, highlight=False, soft_wrap=True)


def _public(module: ModuleType) -> list[str]:
    return [name for name, thing in vars(module).items() if not name.startswith("_") and callable(thing)]


def _needs(fn: Callable[..., Any]) -> bool:
    """Whether a function has arguments that must be given."""
    parameters = inspect.signature(fn).parameters.values()
    return any(p.default is p.empty or p.kind is p.VAR_POSITIONAL for p in parameters)


# ---- where ----


def axes_of(text: str) -> dict[str, int]:
    """`dp=2,tp=4` as axes of a mesh."""
    axes: dict[str, int] = {}
    for part in text.replace(" ", ",").split(","):
        name, equals, size = part.partition("=")
        if part and (not equals or not size.lstrip("-").isdigit()):
            raise MeshError(f"--mesh {text!r}: {part!r} is no axis with a size; write dp=2,tp=4")
        if name in axes:
            raise MeshError(f"--mesh {text!r} names axis {name!r} twice, with {axes[name]} and {size}; write it once")
        if part:
            axes[name] = int(size)
    return axes


def machine(device: str, topology: str, host: str, budget: str, disk: str = "") -> Callable[[Mesh], Mesh]:
    """The mesh on what the options name: as many devices as it has ranks, at most eight in a node.

    A budget is that of the device, so that it holds whatever the step says itself. Of a card plans get what a machine that was found gives
    them: not what libraries, communicators and the driver take.
    """
    if device and topology:
        raise InputError(f"--device {device} and --topology {topology} both name a machine; give one of them")

    def on(mesh: Mesh) -> Mesh:
        name = topology or (f"{min(8, mesh.size)}x{device}" if device and mesh.size > 1 else device)
        found: Topology = resolve_topology(name) if name else mesh.topology
        if host:
            found = _with_room(found, "host", _room(found, "host", host, "--host"))
        if disk:
            found = _with_disk(found, disk)
        if budget:
            found = attrs.evolve(found, budget_bytes=_room(found, "device", budget, "--budget"))
        total_bytes = found.tier("device").capacity_bytes
        if total_bytes is not None and not found.reserved_bytes and capability_on(found) is not None:
            found = attrs.evolve(found, reserved_bytes=margin_bytes(total_bytes, 0, mesh.size))
        return mesh.with_topology(found)

    return on


def _room(topology: Topology, name: str, text: str, option: str) -> int | None:
    """Bytes, a part of what the tier has, or "auto": all of it."""
    nbytes, part = parse_room(text, option)
    has = topology.tier(name).capacity_bytes
    if part is not None and has is None:
        raise InputError(
            f"{option} {text} is a part of the {name}'s memory, which topology {topology.name!r} does not limit; "
            "write bytes such as 6GiB, or name a --device"
        )
    if part is not None and has is not None:
        return int(part * has)
    return has if nbytes is None else nbytes


def _with_room(topology: Topology, name: str, nbytes: int | None) -> Topology:
    tiers = (attrs.evolve(tier, capacity_bytes=nbytes) if tier.name == name else tier for tier in topology.tiers)
    return attrs.evolve(topology, tiers=tuple(tiers))


def directory(disk: str) -> str | bool | None:
    """What `cf.offload(disk=)` is given for `--disk`: a directory, True for a disk that is only planned for, None without one."""
    if not disk or (disk[0].isdigit() and not Path(disk).is_dir()):
        return bool(disk) or None
    if not Path(disk).is_dir():
        raise InputError(
            f"--disk {disk!r} is no directory that is here, and no size; make it, or write --disk 2TB or --disk 2TB,7GB/s,5GB/s "
            "for a disk that need not be here"
        )
    return disk


def _with_disk(topology: Topology, disk: str) -> Topology:
    """A disk of so many bytes, at so many bytes a second where that is said; of a directory: what is free there."""
    if isinstance(directory(disk), str):
        return _with_room(topology, "disk", shutil.disk_usage(disk).free)
    size, *rates = disk.split(",")
    if len(rates) not in (0, 2):
        raise InputError(f"--disk {disk!r}: write a size, or a size and the rates to read and to write at, such as 2TB,7GB/s,5GB/s")
    ends = (("disk", "host"), ("host", "disk"))
    said = {end: float(parse_bytes(rate.removesuffix("/s"), "--disk")) for end, rate in zip(ends, rates, strict=False)}
    links = (attrs.evolve(x, bandwidth_bytes_per_s=said.get((x.src, x.dst), x.bandwidth_bytes_per_s)) for x in topology.links)
    return attrs.evolve(_with_room(topology, "disk", parse_bytes(size, "--disk")), links=tuple(links))


def in_stages(step: Any, axes: dict[str, int], ranks: int, schedule: str, microbatches: str) -> tuple[Any, dict[str, int]]:
    """The step as a pipeline on an axis `pp` in front of the mesh's others, as the options say. ranks: 0 for none."""
    if ranks < 0:
        raise InputError(f"--pp {ranks} is no number of ranks; write how many a pipeline has, such as --pp 4, or leave it out")
    if not ranks:
        if schedule or microbatches:
            option = f"--schedule {schedule}" if schedule else f"--microbatches {microbatches}"
            raise InputError(f"{option} is of a pipeline; say with --pp how many ranks it has")
        return step, axes
    sharded = None
    if isinstance(step, Staged):
        sharded = step.transform("shard")
        if step.transform("pipeline") is not None:
            raise InputError(f"--pp {ranks}: the step has cf.pipeline already; leave --pp out")
    if sharded is not None and not axes:
        mesh = step.mesh
        if mesh.views:
            raise InputError(f"--pp {ranks}: the step's mesh has views ({', '.join(mesh.views)}); write cf.pipeline in the script")
        axes = {name: mesh.axis_size(name) for name in mesh.axis_names}
    if "pp" in axes:
        raise InputError(f"--pp {ranks}: the mesh has an axis 'pp' of {axes['pp']} already; leave it out of --mesh")
    return pipeline(step, "pp", _number(microbatches, MICROBATCHES * ranks), schedule or "1f1b"), {"pp": ranks, **axes}


def _number(microbatches: str, default: int) -> int | str:
    """Of microbatches, or "auto"."""
    if not microbatches:
        return default
    if microbatches != AUTO and (not microbatches.isdecimal() or not int(microbatches)):
        raise InputError(f"--microbatches {microbatches!r}: write a number of microbatches above 0, such as {default}, or auto")
    return microbatches if microbatches == AUTO else int(microbatches)


def placed(step: Any, axes: dict[str, int], on: Callable[[Mesh], Mesh], within: list[str], disk: str | bool | None = None) -> Staged:
    """The step on the machine, with what may be done to meet the budget, where it does not say so itself."""
    for name in within:
        if name not in MOVES:
            raise InputError(f"--within {name!r} is nothing that may be done to meet a budget{near(name, MOVES, 'transforms')}")
    if disk and "offload" not in within and not (isinstance(step, Staged) and step.transform("offload")):
        raise InputError("--disk is of use to offload only; leave --within out, or write --within offload")
    sharded = step.transform("shard") if isinstance(step, Staged) else None
    mesh = on(Mesh(**axes) if axes or sharded is None else step.mesh)  # type: ignore[arg-type]
    if not within and not (isinstance(step, Staged) and any(step.transform(name) for name in MOVES)):
        mesh = _for_what_is_kept(mesh)
    if sharded is None:
        step = shard(step, mesh)
    else:
        step = in_place_of(step, sharded, attrs.evolve(sharded, sharding=attrs.evolve(step.sharding, mesh=mesh)))
    for name in within if disk or mesh.capacity_bytes("device") is not None else ():
        if step.transform(name) is None:
            step = MOVES[name](step)
    step = with_disk(step, disk) if disk else step
    staged: Staged = step.on("distributed") if mesh.size > 1 else step  # as real ranks run it: what is in flight counts
    return staged


def _for_what_is_kept(mesh: Mesh) -> Mesh:
    """The mesh for a plan that may make nothing again and copy nothing: gaps between its blocks are all that it has to leave room for."""
    card = card_memory(mesh.topology, 0, mesh.size, is_tight=False)
    if card is None or not mesh.topology.reserved_bytes:
        return mesh
    limit_bytes = min(card.kept_bytes, mesh.topology.budget_bytes or card.kept_bytes)
    return mesh.with_topology(attrs.evolve(mesh.topology, budget_bytes=limit_bytes))


# ---- what is said ----


def report(console: Console, low: Lowered, target: str, rows: int, budget_bytes: int | None, disk: bool = False) -> None:
    """What was decided and why, what is held, and how long it takes. budget_bytes: what the plan may hold on a device."""
    rooms = [("device", low.priced.topology.tier("device").capacity_bytes)]
    rooms += [(tier, low.priced.capacity_bytes(tier)) for tier in ("host", "disk") if disk or tier != "disk"]
    mesh = " ".join(f"{name}={n}" for name, n in low.plan.mesh) or "one device"
    words = [f"{target} on {low.priced.topology.name}, {mesh}"]
    words += [f"{tier} {size_text(room)} a rank" for tier, room in rooms if room is not None]
    if budget_bytes is not None and budget_bytes != rooms[0][1]:
        words.append(f"tensors within {size_text(budget_bytes)}")
    console.print(" · ".join(words), style="bold", highlight=False, soft_wrap=True)
    boxes, left_over = divmod(low.priced.size, low.priced.topology.node_devices)
    if boxes and left_over:
        said = f"boxes of {low.priced.topology.node_devices} devices: {low.priced.size} ranks use {left_over} of the last one"
        console.print(f"  {said}", highlight=False, soft_wrap=True)
    for said in (*map(str, low.plan.axes), *low.plan.memory, *low.plan.notes, *low.plan.card):
        console.print(f"  {said}", highlight=False, markup=False)
    if rows and low.mesh.size > 1:  # one device leaves nothing to decide but what lies where
        console.print(low.plan.table(costly=rows), markup=False, highlight=False, soft_wrap=True)
    if low.plan.pipeline is not None:
        console.print(low.pipeline().text(), markup=False, highlight=False, soft_wrap=True)
    console.print(low.memory().table(), markup=False, highlight=False, soft_wrap=True)
    played = low.lanes()
    busy = ", ".join(f"{lane} {time_text(seconds)}" for lane, seconds in played.busy_s().items())
    console.print(f"a step takes {time_text(played.end_s)}: {busy}; {low.cost().flops:.3g} operations a rank", highlight=False)


def main() -> None:
    """The entry point of the command."""
    app()


if __name__ == "__main__":
    main()


# ---- files that a plan writes ----


MARKS = {"trace": TRACE_MARK, "save": PLAN_MARK}


def writable(**paths: str) -> None:
    """Raises InputError where a file that is asked for cannot be written: now, not when the plan is made."""
    named: dict[str, str] = {}
    for option, path in paths.items():
        if not path:
            continue
        if named.setdefault(path, option) != option:
            raise InputError(f"--{named[path]} and --{option} both name {path}; write two files")
        where = owned.given(path, f"--{option}", InputError, owned.A_FILE)
        if option == "picture":
            pictures = importlib.import_module("colofunc.pictures")  # with matplotlib, only where it is used
            pictures.check_ending(path)
            pictures.check_replaceable(where)
        else:
            owned.check_own_kind(where, MARKS[option], f"--{option}", InputError)
        try:
            there = os.path.lexists(where)
            open(where, "ab").close()  # what was there stays
            if not there:
                os.unlink(where)
        except OSError as error:
            why = error.strerror or error
            raise InputError(f"--{option} {path} cannot be written: {why}; name a file in a folder that is there") from error


def written(console: Console, low: Lowered, target: str, budget_bytes: int | None, picture: str, trace: str, save: str) -> None:
    """The files that were asked for."""
    if picture:
        pictures = importlib.import_module("colofunc.pictures")  # with matplotlib, only where it is used
        words = [f"{target} on {low.priced.topology.name}", *map(str, low.plan.axes), *low.plan.memory]
        pictures.memory_picture(low, picture, budget_bytes, " · ".join(words))
    if trace:
        data = chrome_trace(low.lanes(), low.memory(), f"{target} on {low.priced.topology.name}, as planned")
        owned.write_text(trace, json.dumps(data), TRACE_MARK, "--trace", InputError)
    if save:
        low.plan.save(save)
    for path in (picture, trace, save):
        if path:
            console.print(f"wrote {path}", highlight=False)
