"""The compiled straight-line function of a program, called for every step.

`Writer` has collected its lines. Here they become one Python function, whose errors name the node that a line is of.
"""

from __future__ import annotations

import linecache
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

import torch

from colofunc.executors.copies import COPIER
from colofunc.ops.autocast import as_traced
from colofunc.program.ir import Node, Program

_SERIAL = count()


class StepFunction:
    """A compiled straight-line function; errors carry a note with the node that failed."""

    def __init__(
        self,
        program: Program,
        input_names: Sequence[str],
        lines: Sequence[str],
        origin: Sequence[int],
        outputs: Sequence[Sequence[str]],
        names: Mapping[str, Any],
        finishes_copies: bool,
    ) -> None:
        """`origin`: of each line, the index of the program's node that it is of.

        `outputs`: of each output, its variable on each lane.

        `names`: objects that the lines refer to. `finishes_copies`: the host waits in the end for copies that a GPU
        does.
        """
        place_of: dict[str, int] = {}  # variable -> its place in the returned tuple
        for variables in outputs:
            for name in variables:
                place_of.setdefault(name, len(place_of))
        # outputs -> per lane -> place in the returned tuple
        slots: list[tuple[int, ...]] = []
        for variables in outputs:
            slots.append(tuple(place_of[name] for name in variables))
        self.slots = tuple(slots)
        self._one_each = self.slots == tuple((place,) for place in range(len(place_of)))
        head = ["def step(inputs):"]
        if input_names:
            head += [f"    {', '.join(input_names)}, = inputs", "    inputs.clear()"]
        body = ["    " + text for text in lines]
        comma = "," if len(place_of) == 1 else ""
        tail = f"    return ({', '.join(place_of)}{comma})"
        self.source = "\n".join([*head, *body, tail, ""])
        self._first_line = len(head) + 1
        self._origin = origin
        self._finish = COPIER.finish if finishes_copies else None
        self._program = program
        self._file = f"<colofunc program {next(_SERIAL)}>"
        namespace = dict(names)
        exec(compile(self.source, self._file, "exec"), namespace)
        self._step: Callable[[list[torch.Tensor]], tuple[torch.Tensor, ...]] = namespace["step"]
        linecache.cache[self._file] = (len(self.source), None, self.source.splitlines(keepends=True), self._file)
        weakref.finalize(self, linecache.cache.pop, self._file, None)

    def __call__(self, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Run on the distinct input tensors; the list is emptied."""
        try:
            with torch.no_grad(), as_traced():
                return self._step(inputs)
        except Exception as error:
            node = self._failed_node(error)
            if node is not None:
                note = f": {node.note}" if node.note else ""
                error.add_note(
                    f"while running {node.target} of {node.path or 'the step'} ({node.line or 'no source line'}){note}"
                )
            raise
        finally:
            if self._finish is not None:
                self._finish()

    def per_lane(self, outs: tuple[torch.Tensor, ...]) -> list[list[torch.Tensor]]:
        """What a call has returned as outputs, each with its tensor on every lane."""
        if self._one_each:
            return [[out] for out in outs]
        each: list[list[torch.Tensor]] = []
        for slots in self.slots:
            each.append([outs[place] for place in slots])
        return each

    def _failed_node(self, error: Exception) -> Node | None:
        """The node whose line raised an error; None where that is the first line or the last."""
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != self._file:
            trace = trace.tb_next
        if trace is None:
            return None
        line = trace.tb_lineno - self._first_line
        if not 0 <= line < len(self._origin):
            return None
        return self._program.nodes[self._origin[line]]


def flat_results(result: Any) -> tuple[Any, ...]:
    """The flat results of an operator: lists and tuples opened one level deep, as `Node.outs` numbers them."""
    if isinstance(result, (tuple, list)):
        flat: list[Any] = []
        for item in result:
            if isinstance(item, (tuple, list)):
                flat.extend(item)
            else:
                flat.append(item)
        return tuple(flat)
    return (result,) if result is not None else ()
