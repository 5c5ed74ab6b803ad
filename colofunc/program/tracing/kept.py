"""Records that a transform keeps in a state beside what the step itself has there: a loss scale, largest numbers of
earlier steps.

    loss_scale = KeptRecord("loss_scale", ("scale", "good", "skipped"), "cf.precision('fp16') keeps its loss scale")
    record, bare = loss_scale.split(state)      # None, state where there is none yet
    state = loss_scale.join(bare, record)

A dict has it under its key, a tuple or list as one more item at its end, a named tuple or record in a field of the
key's name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from colofunc.errors import InputError
from colofunc.program.tracing.tree import container, rebuild


@attrs.frozen
class KeptRecord:
    """One such record. `fields`: its keys, by which it is known among the items of a tuple or list.

    `keeps`: who keeps what, `instead`: what could be done without it, for the error where a state has no place for it.
    """

    key: str
    fields: tuple[str, ...]
    keeps: str
    instead: str = ""

    def split(self, state: Any) -> tuple[Any, Any]:
        """(the record, None where there is none yet; the state without it).

        Raises InputError where the state has no place for a record, or something else in its place.
        """
        if isinstance(state, Mapping):
            record = state.get(self.key)
            self._check(record)
            return record, {key: value for key, value in state.items() if key != self.key}
        parts = container(state)
        kind, keys, items, context = parts if parts is not None else ("", (), (), None)
        if kind == "sequence":
            at = [place for place, item in enumerate(items) if isinstance(item, dict) and set(item) == set(self.fields)]
            if not at:
                return None, state
            return items[at[-1]], type(state)([*items[: at[-1]], *items[at[-1] + 1 :]])
        if kind in ("namedtuple", "record") and self.key in keys:
            record = items[list(keys).index(self.key)]
            return record, rebuild(kind, type(state), keys, self._placed(keys, items, None), context)
        instead = f"; {self.instead}" if self.instead else ""
        raise InputError(
            f"{self.keeps} in the state, which is of type {type(state).__name__} here. Try: a dict or tuple as "
            f"argument 0 of the step, such as {{'params': ..., 'opt': ...}}; a record with the field `{self.key}: Any "
            f"= None`{instead}"
        )

    def join(self, bare: Any, record: Any) -> Any:
        """The state with this record, from what `split` gives."""
        if isinstance(bare, Mapping):
            return {**bare, self.key: record}
        parts = container(bare)
        assert parts is not None, "asked by split"
        kind, keys, items, context = parts
        if kind == "sequence":
            return type(bare)([*items, record])
        return rebuild(kind, type(bare), keys, self._placed(keys, items, record), context)

    def _placed(self, keys: Sequence[Any], items: Sequence[Any], record: Any) -> list[Any]:
        """The items of a record with the kept one in its field."""
        return [record if key == self.key else item for key, item in zip(keys, items, strict=True)]

    def _check(self, record: Any) -> None:
        """Raises InputError where a record has other keys than these."""
        if record is None or (isinstance(record, Mapping) and set(record) == set(self.fields)):
            return
        has = f"keys {list(record)[:5]}" if isinstance(record, Mapping) else f"type {type(record).__name__}"
        raise InputError(
            f"the state has a {self.key!r} of its own, of {has}, where a transform keeps a record with the keys "
            f"{list(self.fields)}. Try: another key than {self.key!r} for it"
        )


def state_of(out: Any) -> tuple[Any, Any]:
    """The new state in what a step returns, and a function that puts another in its place."""
    if isinstance(out, tuple) and out:
        make = out._make if hasattr(out, "_make") else type(out)
        return out[0], lambda new: make((new, *out[1:]))
    return out, lambda new: new
