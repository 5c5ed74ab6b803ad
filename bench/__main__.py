"""`python -m bench`: all benchmarks, one table, and `bench/RESULTS.md`; `python -m bench gpu`: those of a card. See the docstrings."""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from bench import RESULTS, Section, run_section
from bench.gpu import __main__ as gpu

HERE = Path(__file__).parent


def names() -> list[str]:
    """Every benchmark of this folder, quick ones first."""
    found = sorted(p.stem for p in HERE.glob("*.py") if not p.stem.startswith("_"))
    order = ["planning", "simulated", "mesh_of_one"]
    return [n for n in order if n in found] + [n for n in found if n not in order]


def table(section: Section, console: Console) -> None:
    view = Table(title=section.title, caption=section.setting, title_justify="left", caption_justify="left")
    for column in ("", "figure", "target"):
        view.add_column(column)
    for row in section.rows:
        colour = "" if row.met is None else "green" if row.met else "red"
        view.add_row(row.what, row.figure, row.target, style=colour)
    console.print(view)


def markdown(section: Section) -> str:
    lines = [f"## {section.title}", "", section.setting, "", "| | figure | target | |", "|---|---|---|---|"]
    for row in section.rows:
        verdict = "" if row.met is None else "met" if row.met else "missed"
        lines.append(f"| {row.what} | {row.figure} | {row.target} | {verdict} |")
    return "\n".join(lines)


def write(name: str, section: Section) -> None:
    """Put the section between its marks in RESULTS.md."""
    mark = f"<!-- {name} -->"
    text = RESULTS.read_text() if RESULTS.exists() else "# Results\n"
    new = f"{mark}\n{markdown(section)}\n\n{mark}"
    old = re.compile(f"{re.escape(mark)}.*?{re.escape(mark)}", re.DOTALL)
    text = old.sub(lambda _: new, text) if old.search(text) else f"{text.rstrip()}\n\n{new}\n"
    RESULTS.write_text(text)


def run(name: str, console: Console) -> bool:
    """Run one benchmark; whether every target was met."""
    if "def bench(" not in (HERE / f"{name}.py").read_text():
        done = subprocess.run([sys.executable, str(HERE / f"{name}.py"), "--write"], cwd=HERE.parent)
        return done.returncode == 0
    section = run_section(name)
    table(section, console)
    write(name, section)
    return all(row.met is not False for row in section.rows)


def main() -> int:
    if sys.argv[1:2] == ["gpu"]:
        return gpu.main(sys.argv[2:])
    parser = argparse.ArgumentParser(prog="python -m bench", description="Run benchmarks and write bench/RESULTS.md.")
    parser.add_argument("names", nargs="*", help=f"some of: {', '.join(names())}")
    options = parser.parse_args()
    unknown = [n for n in options.names if n not in names()]
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}; there are {', '.join(names())}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["COLOFUNC_CACHE"] = "off"  # planning is what is measured
    console = Console()
    threads = os.environ["OMP_NUM_THREADS"]
    console.print(f"torch {torch.__version__} · {platform.machine()} · {os.cpu_count()} cores · OMP_NUM_THREADS={threads}")
    met = [run(name, console) for name in options.names or names()]  # every one runs, whatever the others found
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
