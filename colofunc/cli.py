"""The command line: `colofunc plan script.py:step --device a100-40g --budget 40GiB`.

Problem: whether a model fits, and what it costs, is asked before there is a machine. Idea: the script that trains names
its step and what it is called with; the step is traced and planned here, on any laptop, and nothing of it is run.

    # script.py
    def step(state, batch): ...                                          # or a staged one: cf.shard(step_fn, mesh, ...)
    def example(): return cf.train_state(...), {"ids": cf.abstract((8, 1024), torch.int64)}     # (state, batch)

    $ colofunc plan script.py:step --device a100-40g --budget 40GiB --picture plan.png --trace trace.json
    $ colofunc plan script.py:step --device a100-40g --mesh dp=2 --pp 4 --schedule zb-h1 --microbatches 16
    $ colofunc plan script.py:step --device a100-40g --host 64GiB --disk 2TB,7GB/s,5GB/s     # a drive that is not here

The name may also be a function without arguments that returns all three: `def plan_me(): return step, state, batch`.
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from colofunc.command.machine import axes_of_text, disk_argument, in_stages, machine, step_on_machine
from colofunc.command.report import check_writable, report, write_files
from colofunc.command.script import complain, errors_of, load_step
from colofunc.compiler.lowered import Lowered
from colofunc.compiler.memory_limits import device_limit_bytes
from colofunc.errors import ColofuncError
from colofunc.mesh import PRESETS
from colofunc.mesh.sizes import size_text
from colofunc.ops.native import prebuild, ship
from colofunc.version import __version__

app = typer.Typer(add_completion=False)

TargetArgument = Annotated[
    str, typer.Argument(help="script.py:NAME, the step or a function that returns (step, state, batch)")
]
DeviceOption = Annotated[str, typer.Option(help="a device such as a100-40g: one, or as many as the mesh has ranks")]
MachineOption = Annotated[str, typer.Option(help="a machine such as 8xa100-80g, or a .json file of a measured one")]
AxesOption = Annotated[str, typer.Option(help="axes, such as dp=2,tp=4; default: the step's own, or one device")]
BudgetOption = Annotated[
    str, typer.Option(help="device memory of a rank, such as 40GiB or 0.5; default: what is left for tensors")
]
HostOption = Annotated[
    str, typer.Option(help="host memory of a node, such as 512GiB or 0.5; default: that of the usual machine")
]
DiskOption = Annotated[
    str, typer.Option(help="a disk of a node: 2TB, 2TB,7GB/s,5GB/s (read, write) or a directory; default: none")
]
WithinOption = Annotated[str, typer.Option(help="what may be done to meet the budget")]
PipelineOption = Annotated[int, typer.Option(help="ranks of a pipeline: an axis pp beside those of the mesh")]
ScheduleOption = Annotated[str, typer.Option(help="the pipeline's schedule, such as 1f1b, zb-h1, zb-v or auto")]
MicrobatchesOption = Annotated[
    str, typer.Option(help="parts of a batch that follow one another through the pipeline, or auto")
]
ExampleOption = Annotated[
    str, typer.Option(help="the function that returns (state, batch); default: example or inputs")
]
PictureOption = Annotated[str, typer.Option(help="draw memory and lanes to this file (.png, .svg, .pdf)")]
TraceOption = Annotated[str, typer.Option(help="write a Chrome trace to this .json file")]
SaveOption = Annotated[str, typer.Option(help="write the plan to this .json file, for step.with_plan")]
RowsOption = Annotated[int, typer.Option(min=0, help="how many of the dearest decisions to show")]
VersionOption = Annotated[bool, typer.Option("--version", help="the versions of colofunc, torch and Python")]
KindsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[cpu] [cuda]", help="kinds of devices, of none given the CPU")
]
FolderOption = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="a folder that a wheel takes along: make wheel NATIVE=cpu"),
]


@app.callback(invoke_without_command=True)
def options(context: typer.Context, version: VersionOption = False) -> None:
    """Plans of training and inference steps, without the machine."""
    if version:
        typer.echo(f"colofunc {__version__}, torch {torch.__version__}, Python {platform.python_version()}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


@app.command()
def plan(
    target: TargetArgument,
    device: DeviceOption = "",
    topology: MachineOption = "",
    mesh: AxesOption = "",
    budget: BudgetOption = "",
    host: HostOption = "",
    disk: DiskOption = "",
    within: WithinOption = "checkpoint,offload",
    pp: PipelineOption = 0,
    schedule: ScheduleOption = "",
    microbatches: MicrobatchesOption = "",
    example: ExampleOption = "",
    picture: PictureOption = "",
    trace: TraceOption = "",
    save: SaveOption = "",
    rows: RowsOption = 12,
) -> None:
    """Trace and plan a step for a machine that need not be here.

    Shown are what was decided and why, its memory and its seconds.
    """
    console = Console() if sys.stdout.isatty() else Console(width=180)
    try:
        check_writable(picture=picture, trace=trace, save=save)
        step, args = load_step(target, example)
        allowed = [name for name in within.split(",") if name]
        step, axes = in_stages(step, axes_of_text(mesh), pp, schedule, microbatches)
        on = machine(device, topology, host, budget, disk)
        staged = step_on_machine(step, axes, on, allowed, disk_argument(disk))
        with errors_of(target, ours=True):
            low: Lowered = staged.lower(*args)
        budget_bytes = device_limit_bytes(staged, low.priced)
        report(console, low, target, rows, budget_bytes, bool(disk))
        write_files(console, low, target, budget_bytes, picture, trace, save)
    except ColofuncError as error:
        notes = getattr(error, "__notes__", ())
        complain("\n".join([f"colofunc: {error}", *notes]))
        raise typer.Exit(1) from error


@app.command()
def devices() -> None:
    """Devices and machines that are known by name."""
    console = Console()
    for name, known in PRESETS.items():
        tiers = []
        for tier in known.tiers:
            if tier.capacity_bytes is not None:
                tiers.append(f"{tier.name} {size_text(tier.capacity_bytes)}")
        capacities = ", ".join(tiers)
        console.print(f"{name:<14} {capacities or 'no limits'}", highlight=False)


@app.command()
def native(kinds: KindsArgument = None, into: FolderOption = None) -> None:
    """Compile kernels into the cache folder, as the first use of one would: for images and clusters."""
    try:
        for kind in kinds or ["cpu"]:
            paths = prebuild(kind) if into is None else ship(kind, into)
            for path in paths:
                typer.echo(path)
    except ColofuncError as error:
        complain(f"colofunc: {error}")
        raise typer.Exit(1) from error


def main() -> None:
    """The entry point of the command."""
    app()


if __name__ == "__main__":
    main()
