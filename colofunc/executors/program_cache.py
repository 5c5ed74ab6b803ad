"""Compiled programs by identity: the last few hundred, so that a repeated conversion or eager operator is not compiled
again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from colofunc.mesh import Mesh
from colofunc.program.ir import Program

KEPT = 512


class ProgramCache:
    """`get(program, mesh)` is `compile(program, mesh)`, made once. The least recently used one is dropped first."""

    def __init__(self, compile: Callable[[Program, Mesh], Any]) -> None:
        self._compile = compile
        # The program is kept too: its identity is the key.
        self._ready: OrderedDict[tuple[int, Mesh], tuple[Program, Any]] = OrderedDict()

    def get(self, program: Program, mesh: Mesh) -> Any:
        key = (id(program), mesh)
        found = self._ready.get(key)
        if found is None:
            found = self._ready[key] = (program, self._compile(program, mesh))
            if len(self._ready) > KEPT:
                self._ready.popitem(last=False)
        else:
            self._ready.move_to_end(key)
        return found[1]
