"""What torch's caching allocator needs beside the tensors of planned steps: by its rules, without a card.

`mesh.found.FRAGMENTS` is the margin beside `budget="auto"` that these rows are the reason for.
"""

from __future__ import annotations

from typing import Any

from bench import Row, Section, fresh, memory_plans
from bench._caching import STEPS, needed_bytes
from colofunc.mesh.detection import FRAGMENTS

NAMES = (
    "SD2 UNet, 16 images, float32, all kept", "SD2 UNet, 16 images, bf16, all kept", "SD2 UNet, 16 images, bf16, made again",
    "GPT 1.5B on 6 GB, 1 row",
)  # fmt: skip
MOST = 1 / (FRAGMENTS - 1)
"""Of what is alive: what `auto` leaves is an 8th of what may be used, a 7th of the budget."""


def plan(name: str) -> dict[str, Any]:
    low, _ = memory_plans.lowered(name)
    alive_bytes = low.memory().peak_bytes["device"]
    return {"alive": alive_bytes, "needed": needed_bytes(low.program, alive_bytes)}


def row(name: str) -> Row:
    found = fresh("fragmentation", f"m.plan({name!r})")
    over = found["needed"] / found["alive"] - 1
    text = f"{over:.1%} more than the {found['alive'] / 2**30:.2f} GiB that are alive at the peak"
    return Row(name, text, f"at most {MOST:.1%}", over <= MOST)


def bench() -> Section:
    setting = f"The least capacity with which {STEPS} steps run, by the rules of torch's caching allocator (default settings, one stream)."
    return Section("Fragments", setting, [row(name) for name in NAMES])
