"""ZeRO-3 beside FSDP2 that reshards, on two gloo processes; see `bench.fsdp2`.

The topology is the nominal one, so that the plan does not depend on what else the machine does while it would be measured.
"""

from __future__ import annotations

from bench import Section, fsdp2


def bench(pairs: int = 20) -> Section:
    return fsdp2.bench(pairs=pairs, topology="gloo-cpu", zero3=True)
