"""Operators that run on the host, because what they read lies there and little of it is wanted: a big embedding.

Problem: a table of a million rows has to travel to the device so that a few thousand of them can be picked, and its
gradient, mostly zeros, back to where the table is updated. Idea: an operator runs where its largest operand lies. Ids
go to the host and rows come back; rows' gradients go to the host and are added up there, beside the table and its
moments. What only reads such a gradient (its norm, its scaling, the update) goes along. So does a cast that only the
gather reads.

    %rows = embedding(%table, to_host(%ids))  on the host        %4 = to_device(%rows)
    %grad = embedding_dense_backward(to_host(%d), ...)  there    adamw_(%table, %grad, ...)  there

Which splits of the updates are tried with such operators is decided here; `offload` scores them like any other. `where`
of a policy says it outright, for the operators of the modules that a glob names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase

from colofunc.errors import PlanError, near
from colofunc.ops.updates import is_in_place_update
from colofunc.planner.offload.trace import LITTLE, Ground
from colofunc.planner.offload.updates import CAST, may_run_on_host
from colofunc.program.facts import reads_rows, writes_rows, written
from colofunc.program.ir import Node, Program

CHEAP = frozenset("_to_copy add addcmul div linalg_vector_norm mean mul neg pow sqrt square sub sum".split())
"""Operators that read what they are given once: they go where it lies. In place forms too."""

HostSplit = tuple[float, frozenset[int]]


def with_operators(
    ground: Ground,
    where: Mapping[str, str],
    update: str | None,
    placed: Mapping[int, str | None],
    limit: int,
    splits: Iterable[HostSplit],
) -> Iterator[HostSplit]:
    """The splits of the updates, each beside operators on the host: as `where` says, else without and with those that
    gather.
    """
    asked = _asked(ground, where, placed, update)
    found = frozenset() if asked or update == "device" else _gathers(ground, where, placed, limit)
    # Gradients that the host makes are updated there: with some updates on the device they would travel.
    updates = {position for position in found if _updates(ground, position)}
    for share, on_host in splits:
        yield share, on_host | asked
        if found and (not on_host or updates <= on_host):
            yield share, on_host | found


def words_of_host(program: Program, on_host: Iterable[int]) -> str:
    """`embedding of model.embed_tokens (forward, backward)`: what runs on the host beside updates and casts."""
    phases_of: dict[str, list[str]] = {}
    for position in sorted(on_host):
        node = program.nodes[position]
        if not node.path or node.phase == "update" or _name(node) == "_to_copy":
            continue
        phases = phases_of.setdefault(node.path, [])
        if node.phase not in phases:
            phases.append(node.phase)
    return "; ".join(f"{path} ({', '.join(phases)})" for path, phases in phases_of.items())


def _asked(
    ground: Ground, where: Mapping[str, str], placed: Mapping[int, str | None], update: str | None
) -> frozenset[int]:
    """Operators of the modules that are to run on the host, and what goes with them."""
    globs = [glob for glob, place in where.items() if place == "host"]
    found: set[int] = set()
    for position, node in enumerate(ground.program.nodes):
        if may_run_on_host(node, ground) and _matches(node, globs):
            found.add(position)
    if not found and not (globs and _made_in_loops(ground)):
        return frozenset()
    for storage in placed:
        readers = ground.uses.get(storage, [])
        if any(reader in found for reader in readers) and _read_there_alone(ground, storage, found):
            for reader in readers:
                # An update goes along where it may; other readers already are what was asked for, or casts of it.
                if not _updates(ground, reader) or (update != "device" and _free(ground, reader, placed)):
                    found.add(reader)
    return _closed(ground, found, placed, update)


def _matches(node: Node, globs: Iterable[str]) -> bool:
    return any(fnmatchcase(node.path, glob) for glob in globs)


def _read_there_alone(ground: Ground, storage: int, found: Collection[int]) -> bool:
    """Whether a storage has no reader but `found`, updates, and casts that `found` alone reads."""
    for reader in ground.uses.get(storage, []):
        if reader in found or _updates(ground, reader):
            continue
        if not _is_cast(ground, reader, storage, found):
            return False
    return True


def check_where(where: Mapping[str, str], program: Program) -> None:
    """Raises PlanError where a glob names no module of the step."""
    named: set[str] = set()
    for each in program.with_bodies():
        named.update(node.path for node in each.nodes if node.path)
    paths = sorted(named)
    for glob in where:
        if not any(fnmatchcase(path, glob) for path in paths):
            raise PlanError(
                f"cf.offload(where=): no operator stands in a module {glob!r}{near(glob, paths, 'modules')}"
            )


def _gathers(ground: Ground, where: Mapping[str, str], placed: Mapping[int, str | None], limit: int) -> frozenset[int]:
    """All tables that are large, and read by few rows only: their gathers, the gradients of these, and their updates."""
    nodes = ground.program.nodes
    kept_globs = [glob for glob, place in where.items() if place == "device"]
    found: set[int] = set()
    for storage, tier in placed.items():
        # An input of a loop's body is counted outside, so its storage has no bytes: the value says how large it is.
        nbytes = ground.program.values[ground.lies.storages[storage].value].nbytes
        if tier == "device" or nbytes * LITTLE < limit:
            continue
        readers = ground.uses.get(storage, [])
        gathers, casts = _gathers_of(ground, storage)
        if not gathers or any(_matches(nodes[gather], kept_globs) for gather in gathers):
            continue
        updates = {reader for reader in readers if _updates(ground, reader) and _free(ground, reader, placed)}
        others = [reader for reader in readers if reader not in gathers and reader not in updates]
        if not all(_is_cast(ground, reader, storage, gathers) for reader in others):
            continue
        found |= gathers | casts | updates
        # gradients of the tables, by the modules in which they are read
        paths = {nodes[gather].path for gather in gathers}
        found |= {position for position, node in enumerate(nodes) if writes_rows(node.target) and node.path in paths}
    if not found and not _made_in_loops(ground):
        return frozenset()
    return _closed(ground, found, placed, None)


def _gathers_of(ground: Ground, storage: int) -> tuple[set[int], set[int]]:
    """(nodes that pick rows of a storage or of a cast of it, the nodes that cast it)."""
    nodes = ground.program.nodes
    readers = ground.uses.get(storage, [])
    gathers = {reader for reader in readers if _picks(ground, reader, storage)}
    casts = {reader for reader in readers if nodes[reader].target == CAST}
    for cast in casts:
        for out in nodes[cast].results:
            copy = ground.lies.home[out]
            gathers |= {reader for reader in ground.uses.get(copy, ()) if _picks(ground, reader, copy)}
    return gathers, casts


def _made_in_loops(ground: Ground) -> set[int]:
    """Storages of what bodies of loops make on the host."""
    made: set[int] = set()
    for position, read in ground.host_reads.items():
        made.update(storage for storage in read if ground.lies.storages[storage].born == position)
    return made


def _picks(ground: Ground, position: int, storage: int) -> bool:
    """Whether a node reads rows of a storage and nothing else in it."""
    node = ground.program.nodes[position]
    return reads_rows(node.target) and [ground.lies.home[ref] for ref in node.refs].index(storage) == 0


def _is_cast(ground: Ground, position: int, storage: int, readers: Iterable[int]) -> bool:
    """Whether a node is a cast of a storage that nobody but `readers` reads."""
    node = ground.program.nodes[position]
    if node.target != CAST or node.outs[0] is None or ground.lies.home[node.refs[0]] != storage:
        return False
    return set(ground.uses.get(ground.lies.home[node.outs[0]], ())) <= {position, *readers}


def _updates(ground: Ground, position: int) -> bool:
    return is_in_place_update(ground.program.nodes[position].target)


def _free(ground: Ground, position: int, placed: Mapping[int, str | None]) -> bool:
    """Whether nothing that a node writes to is to stay on the device."""
    return all(placed.get(ground.lies.home[value]) != "device" for value in written(ground.program.nodes[position]))


def _closed(ground: Ground, found: set[int], placed: Mapping[int, str | None], update: str | None) -> frozenset[int]:
    """`found`, and cheap work on gradients that it makes: most of the bytes that such a node reads were made on the
    host.

    Not on rows, which go to the device whatever is done with them.
    """
    home, values = ground.lies.home, ground.program.values
    made = _made_in_loops(ground)
    for position, node in enumerate(ground.program.nodes):
        updates = _updates(ground, position)
        if position not in found and may_run_on_host(node, ground) and (updates or _name(node) in CHEAP):
            read_bytes = {home[ref]: values[ref].nbytes for ref in node.refs}
            if updates:
                goes = update != "device" and not made.isdisjoint(read_bytes) and _free(ground, position, placed)
            else:
                made_bytes = sum(nbytes for storage, nbytes in read_bytes.items() if storage in made)
                goes = made_bytes * 2 > sum(read_bytes.values())
            if goes:
                found.add(position)
        # State is where it was placed; what else the host makes in backward stays with it.
        if position in found and node.phase != "forward":
            made.update(home[out] for out in node.results if home[out] not in placed)
    return frozenset(found)


def _name(node: Node) -> str:
    """Of an operator of torch: `aten.mul.out` -> `mul`; "" of all others."""
    return node.target.split(".")[1] if node.target.startswith("aten.") else ""
