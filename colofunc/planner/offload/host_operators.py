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

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase

from colofunc.errors import PlanError, near
from colofunc.ops.updates import IN_PLACE
from colofunc.planner.offload.trace import GATHERS, LITTLE, Ground
from colofunc.planner.offload.updates import CAST, able
from colofunc.program.facts import written
from colofunc.program.ir import Node, Program

SCATTERS = frozenset(
    {
        "aten.embedding_dense_backward.default",
        "aten.index_put.default",
        "aten.index_add.default",
        "colofunc.embedding_bag_backward",
    }
)
CHEAP = frozenset("_to_copy add addcmul div linalg_vector_norm mean mul neg pow sqrt square sub sum".split())
"""Operators that read what they are given once: they go where it lies. In place forms too."""

Split = tuple[float, frozenset[int]]


def with_operators(
    ground: Ground,
    where: Mapping[str, str],
    update: str | None,
    placed: Mapping[int, str | None],
    limit: int,
    splits: Iterable[Split],
) -> Iterator[Split]:
    """The splits of the updates, each beside operators on the host: as `where` says, else without and with those that
    gather.
    """
    asked = _asked(ground, where, placed, update)
    found = frozenset() if asked or update == "device" else _gathers(ground, where, placed, limit)
    updates = {k for k in found if _updates(ground, k)}
    for share, on_host in splits:
        yield share, on_host | asked
        if found and (not on_host or updates <= on_host):
            yield share, on_host | found


def told(program: Program, on_host: Iterable[int]) -> str:
    """`embedding of model.embed_tokens (forward, backward)`: what runs on the host beside updates and casts."""
    seen: dict[str, list[str]] = {}
    for k in sorted(on_host):
        node = program.nodes[k]
        if (
            node.path
            and node.phase != "update"
            and _name(node) != "_to_copy"
            and node.phase not in seen.setdefault(node.path, [])
        ):
            seen[node.path].append(node.phase)
    return "; ".join(f"{path} ({', '.join(phases)})" for path, phases in seen.items())


def _asked(
    ground: Ground, where: Mapping[str, str], placed: Mapping[int, str | None], update: str | None
) -> frozenset[int]:
    """Operators of the modules that are to run on the host, and what goes with them."""
    nodes = ground.program.nodes
    globs = [glob for glob, place in where.items() if place == "host"]
    found = {
        k for k, node in enumerate(nodes) if able(node, ground) and any(fnmatchcase(node.path, glob) for glob in globs)
    }
    if not found and not (globs and _made_in_loops(ground)):
        return frozenset()
    for s in placed:
        readers = ground.uses.get(s, [])
        if any(k in found for k in readers) and all(
            k in found or _is_cast(ground, k, s, found) or _updates(ground, k) for k in readers
        ):
            found |= {
                k for k in readers if not _updates(ground, k) or (update != "device" and _free(ground, k, placed))
            }
    return _closed(ground, found, placed, update)


def check_where(where: Mapping[str, str], program: Program) -> None:
    """Raises PlanError where a glob names no module of the step."""
    paths = sorted({node.path for each in program.with_bodies() for node in each.nodes if node.path})
    for glob in where:
        if not any(fnmatchcase(path, glob) for path in paths):
            raise PlanError(
                f"cf.offload(where=): no operator stands in a module {glob!r}{near(glob, paths, 'modules')}"
            )


def _gathers(ground: Ground, where: Mapping[str, str], placed: Mapping[int, str | None], limit: int) -> frozenset[int]:
    """All tables that are large, and read by few rows only: their gathers, the gradients of these, and their updates.
    """
    nodes, found = ground.program.nodes, set[int]()
    for s, tier in placed.items():
        readers = ground.uses.get(s, [])
        nbytes = ground.program.values[
            ground.lies.storages[s].value
        ].nbytes  # an input of a loop's body is counted outside
        if tier == "device" or nbytes * LITTLE < limit:
            continue
        gathers = {k for k in readers if _picks(ground, k, s)}
        casts = {k for k in readers if nodes[k].target == CAST}
        for made in {ground.lies.home[o] for k in casts for o in nodes[k].results}:
            gathers |= {j for j in ground.uses.get(made, ()) if _picks(ground, j, made)}
        more = {k for k in readers if _updates(ground, k) and _free(ground, k, placed)}
        kept = any(
            fnmatchcase(nodes[k].path, glob) for k in gathers for glob, place in where.items() if place == "device"
        )
        if gathers and not kept and all(k in gathers | more or _is_cast(ground, k, s, gathers) for k in readers):
            paths = {nodes[k].path for k in gathers}
            found |= gathers | casts | more
            found |= {k for k, node in enumerate(nodes) if node.target in SCATTERS and node.path in paths}
    return _closed(ground, found, placed, None) if found or _made_in_loops(ground) else frozenset()


def _made_in_loops(ground: Ground) -> set[int]:
    """What bodies of loops make on the host."""
    return {s for k, held in ground.host_reads.items() for s in held if ground.lies.storages[s].born == k}


def _picks(ground: Ground, k: int, storage: int) -> bool:
    """Whether a node reads rows of a storage and nothing else in it."""
    node = ground.program.nodes[k]
    return node.target in GATHERS and [ground.lies.home[i] for i in node.refs].index(storage) == 0


def _is_cast(ground: Ground, k: int, storage: int, readers: Iterable[int]) -> bool:
    """Whether a node is a cast of a storage that nobody but `readers` reads."""
    node = ground.program.nodes[k]
    if node.target != CAST or node.outs[0] is None or ground.lies.home[node.refs[0]] != storage:
        return False
    return set(ground.uses.get(ground.lies.home[node.outs[0]], ())) <= {k, *readers}


def _updates(ground: Ground, k: int) -> bool:
    return ground.program.nodes[k].target in IN_PLACE


def _free(ground: Ground, k: int, placed: Mapping[int, str | None]) -> bool:
    """Whether nothing that a node writes to is to stay on the device."""
    return all(placed.get(ground.lies.home[i]) != "device" for i in written(ground.program.nodes[k]))


def _closed(ground: Ground, found: set[int], placed: Mapping[int, str | None], update: str | None) -> frozenset[int]:
    """`found`, and cheap work on gradients that it makes: most of the bytes that such a node reads were made on the
    host.

    Not on rows, which go to the device whatever is done with them.
    """
    nodes, lies, values = ground.program.nodes, ground.lies, ground.program.values
    made = _made_in_loops(ground)
    for k, node in enumerate(nodes):
        if k not in found and able(node, ground) and (_name(node) in CHEAP or _updates(ground, k)):
            read = {lies.home[i]: values[i].nbytes for i in node.refs}
            if _updates(ground, k):
                goes = update != "device" and bool(made & {*read}) and _free(ground, k, placed)
            else:
                goes = sum(n for s, n in read.items() if s in made) * 2 > sum(read.values())
            found |= {k} if goes else set()
        if k in found and node.phase != "forward":
            made |= {lies.home[o] for o in node.results if lies.home[o] not in placed}
    return frozenset(found)


def _name(node: Node) -> str:
    """`aten.mul.out` -> `mul`."""
    return node.target.split(".")[1]
