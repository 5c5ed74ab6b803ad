"""Whether Python changed a module, and how it was before.

Problem: a step that is traced runs its Python once, so a counter that it moves or a list that it fills would be wrong
without a word; and where a trace fails in the middle, what it left behind has to go. Idea: remember what every module's
attributes are, and what plain containers among them hold.

    before = Snapshot(module)
    ...
    before.changed()                # "self.outputs" or None
    before.restore()
"""

from __future__ import annotations

from collections import deque
from typing import Any

from torch import nn

CONTAINERS = (list, dict, set, deque)


class Snapshot:
    """Attributes of a module and of those inside it, one level deep."""

    def __init__(self, module: nn.Module) -> None:
        self._attributes = [(name, part.__dict__, dict(part.__dict__)) for name, part in module.named_modules()]
        self._held: list[tuple[str, Any, Any]] = []  # containers, and what they hold now
        for name, _, attributes in self._attributes:
            for key, value in attributes.items():
                if type(value) in CONTAINERS:
                    self._held.append((f"{name}.{key}".lstrip("."), value, value.copy()))

    def changed(self) -> str | None:
        """The first attribute that is another object, or a container that holds other ones."""
        for module, now, old in self._attributes:
            for key in [*old, *now]:
                if now.get(key, self) is not old.get(key, self):
                    return f"self.{module}.{key}".replace("..", ".")
        return next((f"self.{name}" for name, now, old in self._held if not _same(now, old)), None)

    def restore(self) -> None:
        for _, now, old in self._attributes:
            _refill(now, old)
        for _, now, old in self._held:
            _refill(now, old)


def _same(now: Any, old: Any) -> bool:
    if isinstance(now, dict):
        return now.keys() == old.keys() and all(now[key] is old[key] for key in old)
    return len(now) == len(old) and all(a is b for a, b in zip(now, old, strict=True))


def _refill(now: Any, old: Any) -> None:
    now.clear()
    now.update(old) if isinstance(now, dict | set) else now.extend(old)
