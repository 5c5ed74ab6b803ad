"""Records that a transform keeps in a state beside what the step itself has there: a loss scale, largest numbers of earlier steps.

    record, bare = split_kept(state, "loss_scale", ("scale", "good", "skipped"))      # None, state where there is none yet
    state = join_kept(bare, "loss_scale", record)

A dict has it under its key, a tuple or list as one more item at its end, a named tuple or record in a field of the key's name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from colofunc.errors import InputError
from colofunc.program.tracing.tree import container, rebuild


def split_kept(state: Any, key: str, fields: Collection[str]) -> tuple[Any, Any]:
    """(the record, None where there is none yet; the state without it).

    fields: keys of the record, by which it is known among the items of a tuple or list. Raises LookupError where a record has no place,
    InputError where a dict has something else there.
    """
    if isinstance(state, Mapping):
        _check(state.get(key), key, fields)
        return state.get(key), {k: v for k, v in state.items() if k != key}
    parts = container(state)
    kind, keys, items, context = parts if parts is not None else ("", (), (), None)
    if kind == "sequence":
        at = [k for k, item in enumerate(items) if isinstance(item, dict) and set(item) == set(fields)]
        if not at:
            return None, state
        return items[at[-1]], type(state)([*items[: at[-1]], *items[at[-1] + 1 :]])
    if kind in ("namedtuple", "record") and key in keys:
        bare = rebuild(kind, type(state), keys, [None if k == key else v for k, v in zip(keys, items, strict=True)], context)
        return items[list(keys).index(key)], bare
    raise LookupError(key)


def _check(record: Any, key: str, fields: Collection[str]) -> None:
    """Raises InputError where a record has other keys than these."""
    if record is None or (isinstance(record, Mapping) and set(record) == set(fields)):
        return
    has = f"keys {list(record)[:5]}" if isinstance(record, Mapping) else f"type {type(record).__name__}"
    raise InputError(
        f"the state has a {key!r} of its own, of {has}, where a transform keeps a record with the keys {list(fields)}. Try: another key "
        f"than {key!r} for it"
    )


def join_kept(bare: Any, key: str, record: Any) -> Any:
    """The state with this record, from what `split_kept` gives."""
    if isinstance(bare, Mapping):
        return {**bare, key: record}
    parts = container(bare)
    assert parts is not None, "asked by split_kept"
    kind, keys, items, context = parts
    if kind == "sequence":
        return type(bare)([*items, record])
    return rebuild(kind, type(bare), keys, [record if k == key else v for k, v in zip(keys, items, strict=True)], context)


def state_of(out: Any) -> tuple[Any, Any]:
    """The new state in what a step returns, and a function that puts another in its place."""
    if isinstance(out, tuple) and out:
        make = out._make if hasattr(out, "_make") else type(out)
        return out[0], lambda new: make((new, *out[1:]))
    return out, lambda new: new
