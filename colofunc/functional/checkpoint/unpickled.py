"""Pickles read as data: a reader that makes records of its own, and calls and changes nothing that belongs to somebody
else.

Problem: unpickling runs what the file says, and a list of allowed names does not end that: `BUILD` sets attributes of
whatever class or function was allowed. Idea: the few opcodes that plain data needs are interpreted here. A name in the
file becomes what `known` gives for it, never an import; an object becomes a `Record` with its arguments and its state.
Memory is bounded by the file: no opcode asks for more than the bytes that it brings.

    read_pickle(data, known)           # known("collections", "OrderedDict") -> PickleCall(dict), or an error

Source: the opcodes of `pickletools`, protocols 0 to 5.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from functools import partial
from typing import Any

import attrs


@attrs.define(eq=False)
class Record:
    """An object of a pickle: the name of its class, what it was made from, and its state."""

    kind: str
    args: tuple[Any, ...]
    state: Any = None


@attrs.frozen
class PickleCall:
    """What a pickle may call."""

    make: Callable[..., Any]


def record(kind: str) -> PickleCall:
    return PickleCall(lambda *args: Record(kind, args))


class NoPickle(ValueError):
    """Bytes that are no pickle of plain data."""


def read_pickle(data: bytes, known: Callable[[str, str], Any], persistent: Callable[[Any], Any] | None = None) -> Any:
    """The object of a pickle.

    known: (module, name) -> a `PickleCall` or a value; raises for other names. persistent: for objects that lie elsewhere.
    Raises NoPickle, and what pickletools raises of damaged bytes (ValueError, UnicodeError).
    """
    machine = _Machine(known, persistent)
    run = machine.handlers()
    for opcode, arg, _ in pickletools.genops(data):
        handler = run.get(opcode.name)
        if handler is not None:
            handler(arg)
        elif opcode.name == "STOP":
            return machine.pop()
        else:
            raise NoPickle(f"it has the opcode {opcode.name}, which plain data does not need")
    raise NoPickle("it has no end")


_LITERALS = (
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE",
    "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
)  # fmt: skip
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}


class _Machine:
    """The stack and the memo of one pickle. A method runs one opcode, given its argument."""

    def __init__(self, known: Callable[[str, str], Any], persistent: Callable[[Any], Any] | None) -> None:
        self._known = known
        self._persistent = persistent
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def handlers(self) -> dict[str, Callable[[Any], None]]:
        """Opcode -> what runs it."""
        run: dict[str, Callable[[Any], None]] = {
            "PROTO": self._nothing, "FRAME": self._nothing, "MARK": self._mark, "MEMOIZE": self._memoize,
            "EMPTY_LIST": lambda _: self._stack.append([]), "EMPTY_DICT": lambda _: self._stack.append({}),
            "TUPLE": self._tuple, "TUPLE1": lambda _: self._tuple_of(1), "TUPLE2": lambda _: self._tuple_of(2),
            "TUPLE3": lambda _: self._tuple_of(3), "APPEND": self._append, "APPENDS": self._appends, "SETITEM": self._set_item,
            "SETITEMS": self._set_items, "GLOBAL": self._global, "STACK_GLOBAL": self._stack_global, "REDUCE": self._call,
            "NEWOBJ": self._call, "BUILD": self._build,
        }  # fmt: skip
        run |= dict.fromkeys(_LITERALS, self._stack.append)
        run |= {name: partial(self._constant, value) for name, value in _CONSTANTS.items()}
        run |= dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), self._put)
        run |= dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), self._get)
        if self._persistent is not None:
            run["BINPERSID"] = self._persistent_id
        return run

    # ---- the stack ----

    def pop(self) -> Any:
        floor = self._marks[-1] if self._marks else 0
        if len(self._stack) <= floor:
            raise NoPickle("it takes more than it gives")
        return self._stack.pop()

    def _top(self) -> Any:
        if not self._stack:
            raise NoPickle("it takes more than it gives")
        return self._stack[-1]

    def _of_type(self, kind: type) -> Any:
        """The top of the stack, which must be of exactly this type."""
        top = self._top()
        if type(top) is not kind:
            raise NoPickle(f"it changes {type(top).__name__}, where {kind.__name__} is expected")
        return top

    def _since_mark(self) -> list[Any]:
        if not self._marks:
            raise NoPickle("it has no mark")
        start = self._marks.pop()
        items = self._stack[start:]
        del self._stack[start:]
        return items

    def _nothing(self, _: Any) -> None:
        pass

    def _constant(self, value: Any, _: Any) -> None:
        self._stack.append(value)

    def _mark(self, _: Any) -> None:
        self._marks.append(len(self._stack))

    # ---- the memo ----

    def _memoize(self, _: Any) -> None:
        self._memo[len(self._memo)] = self._top()

    def _put(self, at: int) -> None:
        self._memo[at] = self._top()

    def _get(self, at: int) -> None:
        if at not in self._memo:
            raise NoPickle(f"it has nothing under {at}")
        self._stack.append(self._memo[at])

    # ---- containers ----

    def _tuple(self, _: Any) -> None:
        self._stack.append(tuple(self._since_mark()))

    def _tuple_of(self, count: int) -> None:
        items = [self.pop() for _ in range(count)]
        self._stack.append(tuple(reversed(items)))

    def _append(self, _: Any) -> None:
        item = self.pop()
        self._of_type(list).append(item)

    def _appends(self, _: Any) -> None:
        items = self._since_mark()
        self._of_type(list).extend(items)

    def _set_item(self, _: Any) -> None:
        value, key = self.pop(), self.pop()
        self._of_type(dict)[key] = value

    def _set_items(self, _: Any) -> None:
        items = self._since_mark()
        self._of_type(dict).update(zip(items[::2], items[1::2], strict=True))

    # ---- names and objects ----

    def _global(self, words: str) -> None:
        module, _, name = words.partition(" ")
        self._stack.append(self._known(module, name))

    def _stack_global(self, _: Any) -> None:
        name, module = self.pop(), self.pop()
        self._stack.append(self._known(str(module), str(name)))

    def _call(self, _: Any) -> None:
        args, maker = self.pop(), self.pop()
        if type(maker) is not PickleCall or type(args) is not tuple:
            raise NoPickle(f"it calls {type(maker).__name__}")
        self._stack.append(maker.make(*args))

    def _build(self, _: Any) -> None:
        state = self.pop()
        made = self._of_type(Record)
        if made.state is not None:
            raise NoPickle("it gives a state to an object that has one")
        made.state = state

    def _persistent_id(self, _: Any) -> None:
        assert self._persistent is not None
        self._stack.append(self._persistent(self.pop()))


__all__ = ["NoPickle", "PickleCall", "Record", "read_pickle", "record"]
