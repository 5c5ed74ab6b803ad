"""ZeRO-3 beside FSDP2 that reshards, on two gloo processes; see `bench.fsdp2`."""

from __future__ import annotations

from bench import Section, fsdp2


def bench(pairs: int = 20) -> Section:
    return fsdp2.bench(pairs=pairs, zero3=True)
