"""The least seconds of any decision, by a search over all that there is; shares no code with the planner.

For every choice of shardings: all that may happen between two nodes (store, fetch, drop, make again; updates on either side; state
that stays or not), with the clocks of compute, host and both engines.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count, pairwise, product

import attrs

from bench._joint_cases import INF, UNIT, Case


@attrs.frozen
class World:
    """Sizes and uses of one choice of shardings. Items: state w, activations x (x0 is the batch), gradients g, and dw."""

    sizes: dict[str, int]
    nodes: tuple[tuple[str, tuple[str, ...], tuple[str, ...], float], ...]  # name, reads, makes, seconds
    budget: int


def world(case: Case, choice: tuple[int, ...]) -> World:
    picked, n = case.picked(choice), len(choice)
    sizes = {"x0": 1, **{f"w{i}": x.state for i, x in enumerate(picked)}, **{f"d{i}": x.state for i, x in enumerate(picked)}}
    sizes |= {f"x{i + 1}": x.out for i, x in enumerate(picked)} | {f"g{i}": picked[i - 1].out for i in range(1, n)}
    nodes = [(f"F{i}", (f"x{i}", f"w{i}"), (f"x{i + 1}",), x.forward_s) for i, x in enumerate(picked)]
    for i in reversed(range(n)):
        up = f"g{i + 1}" if i + 1 < n else f"x{n}"
        nodes.append((f"B{i}", (up, f"x{i}", f"w{i}"), (*([f"g{i}"] if i else []), f"d{i}"), picked[i].backward_s))
    nodes += [(f"U{i}", (f"w{i}", f"d{i}"), (), x.update_s) for i, x in enumerate(picked)]
    return World(sizes, tuple(nodes), (case.budget - 8) // (4 * UNIT))


def optimum(case: Case, below_s: float = INF) -> float:
    """The least seconds of any decision, if less than `below_s`; else inf."""
    best = below_s
    for choice in sorted(case.choices(), key=case.cost_s):
        here = world(case, choice)
        n = len(case.layers)
        for stays, on_host in product(product((False, True), repeat=n), repeat=2):
            if any(a and b for a, b in zip(stays, on_host, strict=True)):
                continue  # state that stays on the device is updated there
            edges = case.edges_s(choice)
            best = min(best, edges + _Exact(case, here, stays, on_host).run(best - edges))
    return best if best < below_s else INF


class _Exact:
    """The least makespan, given which state stays on the device and which updates run on the host.

    A search over (next node, what is valid where, clocks), cheapest bound first. Of two states with the same things in the same
    places the one that is later in every clock is dropped. Between nodes it may store, fetch, drop and make again; what is valid on
    the host may be dropped from the device once its copy has ended, and only where room is needed.
    """

    def __init__(self, case: Case, here: World, stays: tuple[bool, ...], on_host: tuple[bool, ...]) -> None:
        self.case, self.here = case, here
        self.items = [i for i in here.sizes if i != "x0"]
        self.size = [here.sizes[i] for i in self.items]
        at = {name: k for k, name in enumerate(self.items)}
        self.home = [i.startswith("w") for i in self.items]
        self.stay = [i.startswith("w") and stays[int(i[1:])] for i in self.items]
        self.nodes = [
            (name, tuple(at[r] for r in reads if r in at), tuple(at[m] for m in makes), s, name[0] == "U" and on_host[int(name[1:])])
            for name, reads, makes, s in here.nodes
        ]
        self.rest = [sum(s for *_, s, host in self.nodes[p:] if not host) for p in range(len(self.nodes) + 1)]
        last = {r: p for p, (_, reads, _, _, _) in enumerate(self.nodes) for r in reads}
        chain = [at[f"x{i + 1}"] for i in range(len(stays))]
        self.again = {at[makes[0]]: p for p, (name, _, makes, _) in enumerate(here.nodes) if name[0] == "F"}
        for a, b in reversed(list(pairwise(chain))):
            last[a] = max(last[a], last[b])  # it may be made again from this one
        self.last = [last.get(k, -1) for k in range(len(self.items))]

    def run(self, limit: float) -> float:
        on_device = tuple(0.0 if stay else None for stay in self.stay)
        on_host = tuple(0.0 if home and not stay else None for home, stay in zip(self.home, self.stay, strict=True))
        start = (0, on_device, on_host, 0.0, 0.0, 0.0, 0.0)
        heap, order, seen = [(self.rest[0], 0, start)], count(1), dict[object, list[tuple[float, ...]]]()
        while heap:
            bound, _, state = heapq.heappop(heap)
            if bound >= limit - 1e-9:
                return INF
            p, dev, host, now, up, down, lane = state
            if p == len(self.nodes):
                return bound
            if self._late(seen, state):
                continue
            for after in self._next(p, dev, host, now, up, down, lane):
                if (value := self._bound(after)) < limit - 1e-9:
                    heapq.heappush(heap, (value, next(order), after))
        return INF

    def _bound(self, state: tuple) -> float:
        p, _, _, now, up, down, lane = state
        return max(now + self.rest[p], up, down, lane)

    def _late(self, seen: dict, state: tuple) -> bool:
        p, dev, host, now, up, down, lane = state
        key = (p, tuple(t is not None for t in dev), tuple(t is not None for t in host))
        clocks = (now, *(max(t, now) for t in (up, down, lane)), *(max(t or 0.0, now) for t in (*dev, *host)))
        known = seen.setdefault(key, [])
        if any(all(a <= b + 1e-12 for a, b in zip(other, clocks, strict=True)) for other in known):
            return True
        known[:] = [other for other in known if not all(b <= a for a, b in zip(other, clocks, strict=True))]
        known.append(clocks)
        return False

    def _next(self, p, dev, host, now, up, down, lane) -> Iterator[tuple]:  # type: ignore[no-untyped-def]
        held = 1 + sum(s for s, t in zip(self.size, dev, strict=True) if t is not None)
        room = self.here.budget - held
        name, reads, makes, seconds, there = self.nodes[p]
        if there:
            if all(host[r] is not None for r in reads):
                w = reads[0]
                end = max(lane, *(host[r] for r in reads)) + self._host_s(reads)
                yield self._freed(p + 1, put(dev, w, None), put(host, w, end), now, up, down, end)
        elif all(dev[r] is not None for r in reads) and sum(self.size[m] for m in makes) <= room:
            end = max(now, *(dev[r] for r in reads)) + seconds
            after, stale = dev, host
            for m in (*makes, *(reads[:1] if name[0] == "U" else ())):
                after, stale = put(after, m, end), put(stale, m, None)
            yield self._freed(p + 1, after, stale, end, up, down, lane)
        for k, q in self.again.items():
            _, needs, _, again_s, _ = self.nodes[q]
            made = q < p and self.last[k] >= p and dev[k] is None and all(dev[r] is not None for r in needs)
            if made and self.size[k] <= room:
                end = max(now, *(dev[r] for r in needs)) + again_s
                yield p, put(dev, k, end), host, end, up, down, lane
        wanted = [self.size[k] for k in range(len(dev)) if dev[k] is None]
        short = room < max([*wanted, sum(self.size[m] for m in makes)])
        for k in range(len(dev)):
            if dev[k] is None and host[k] is not None and self.size[k] <= room and self.last[k] >= p:
                end = max(up, now, host[k]) + self.size[k] / self.case.units_per_s
                yield p, put(dev, k, end), host, now, end, down, lane
            if dev[k] is not None and host[k] is None and not self.stay[k] and (self.last[k] >= p or self.home[k]):
                end = max(down, now, dev[k]) + self.size[k] / self.case.units_per_s
                yield p, dev, put(host, k, end), now, up, end, lane
            if dev[k] is not None and not self.stay[k] and short and (host[k] is not None or k in self.again):
                yield p, put(dev, k, None), host, max(now, host[k] or 0.0, dev[k]), up, down, lane

    def _freed(self, p, dev, host, now, up, down, lane) -> tuple:  # type: ignore[no-untyped-def]
        for k, last in enumerate(self.last):
            if last < p and not self.home[k]:
                dev, host = put(dev, k, None), put(host, k, None)
        if p == len(self.nodes):  # state that left goes home
            for k, home in enumerate(self.home):
                if home and not self.stay[k] and host[k] is None:
                    down = max(down, now, dev[k]) + self.size[k] / self.case.units_per_s
        return p, dev, host, now, up, down, lane

    def _host_s(self, reads: tuple[int, ...]) -> float:
        return sum(self.size[r] for r in (*reads, reads[0])) / self.case.host_units_per_s


def put(times: tuple, k: int, t: float | None) -> tuple:
    return (*times[:k], t, *times[k + 1 :])
