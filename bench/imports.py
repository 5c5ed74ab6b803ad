"""`import colofunc` beside `import torch`: both in one fresh process, several times in turn.

Bytecode is kept in a folder of this benchmark's own, as an installed package keeps its; the first process, which writes it,
does not count. Seconds are the process's CPU seconds: what a user waits for on a machine that does nothing else.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile

import torch

from bench import RESULTS, Row, Section

ROUNDS = 5
MOST_S = 0.3
CODE = """
import json, time
times = [(time.process_time(), time.perf_counter())]
import torch
times.append((time.process_time(), time.perf_counter()))
import colofunc
times.append((time.process_time(), time.perf_counter()))
colofunc.shard
times.append((time.process_time(), time.perf_counter()))
for name in colofunc.__all__:
    getattr(colofunc, name)
times.append((time.process_time(), time.perf_counter()))
print(json.dumps([[b - a for a, b in zip(x, y)] for x, y in zip(times, times[1:])]))
"""


def one(bytecode: str) -> list[tuple[float, float]]:
    """(CPU, wall) seconds of torch, of what colofunc adds, of what `cf.shard` brings along, and of all other names, in a fresh process."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPYCACHEPREFIX": bytecode, "PYTHONPATH": os.pathsep.join([str(RESULTS.parent.parent), *filter(None, sys.path)])}
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=True)
    return [(cpu_s, wall_s) for cpu_s, wall_s in json.loads(done.stdout)]


def bench() -> Section:
    with tempfile.TemporaryDirectory() as bytecode:
        rounds = [one(bytecode) for _ in range(ROUNDS + 1)][1:]
    (torch_s, torch_wall_s), (added_s, added_wall_s), (shard_s, _), (later_s, _) = (
        [statistics.median(r[which][clock] for r in rounds) for clock in (0, 1)] for which in range(4)
    )
    setting = f"medians of {ROUNDS} fresh processes, torch {torch.__version__}, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    rows = [
        Row("import torch, CPU seconds", f"{torch_s:.2f} s (wall {torch_wall_s:.2f} s)"),
        Row("import colofunc adds, CPU seconds", f"{added_s:.2f} s (wall {added_wall_s:.2f} s)", f"under {MOST_S} s", added_s < MOST_S),
        Row("the first use of cf.shard, which imports the compiler, CPU seconds", f"{shard_s:.2f} s"),
        Row("all other names, which are imported when they are used, CPU seconds", f"{later_s:.2f} s"),
        Row("import colofunc adds / import torch, CPU seconds", f"{added_s / torch_s:.2f}"),
    ]
    return Section("Importing colofunc", setting, rows)
