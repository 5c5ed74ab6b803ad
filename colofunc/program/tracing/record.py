"""Recorder: a dispatch mode that writes every operator call down as a `Node`, in functional form.

Problem: a step function is Python that mutates tensors, takes views and calls autograd; a program is pure data.
Idea: run the function once on fake tensors (shapes, no data). Every tensor has a `Cell`; a cell that is a view knows
its parent cell and the call that made it. An in-place write makes a new value and pushes it up to the root with
scatter operators; other views of the root are derived again when they are next read.

    x = a * 2            %1 = mul(%0, 2)              root of a new storage
    y = x[1:]            %2 = slice(%1, 0, 1)         child of x
    y.add_(1)            %3 = add(%2, 1); %4 = slice_scatter(%1, %3, 0, 1)       x is %4 now
    x.sum()              %5 = sum(%4)

What each kind of operator does is in `ops`; how a view is written through is in `views`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from colofunc import compat
from colofunc.errors import TraceError
from colofunc.ops.plain import refuse_unlike
from colofunc.ops.targets import resolve
from colofunc.program.facts import COLLECTIVES
from colofunc.program.ir import Node, Ref, Value, map_refs
from colofunc.program.lazy import make
from colofunc.program.on_host import OnHost
from colofunc.program.tracing import views as trace_views
from colofunc.program.tracing.captured import SMALL_BYTES, refuse_computed
from colofunc.program.tracing.infer import Meta, Results, TraceTensor, remembered
from colofunc.program.tracing.meta import Whereabouts, user_line
from colofunc.program.tracing.numbers import as_numbers, promotes

# One symbolic device in the trace: where a tensor lives and how it is copied there is decided by the lowering.
PLACEMENT = frozenset({"device", "layout", "pin_memory", "non_blocking"})
SMALL = (int, float, bool, str, type(None), complex, torch.dtype, torch.device, torch.memory_format, torch.layout)


class TracedStorage:
    """What all views of one tensor share. `kind`: "fresh", "input" or "captured"; `name` of an input leaf.

    `number`: it stands for a Python float, and takes part in type promotion like one (see `numbers`).
    `scattered`: an input that the caller does not have contiguous, though it counts as that. `depth`: of the gradients
    taken with respect to it, how deep the outermost lies in others (1: in none); 0: none was seen. `reshaped`: where a
    view of it was given another shape in place (see Note [Views that are reshaped in place]).
    """

    __slots__ = (
        "depth",
        "differentiated",
        "kind",
        "name",
        "number",
        "owner",
        "reshaped",
        "root",
        "scattered",
        "version",
    )

    def __init__(self, owner: Recorder, kind: str, name: str = "") -> None:
        self.owner = owner
        self.kind = kind
        self.name = name
        self.version = 0
        self.differentiated = False
        self.depth = 0
        self.number = False
        self.reshaped = ""
        self.scattered = False
        self.root: Cell


class Cell:
    """The value behind one tensor. A root has no parent; a view has the call that makes it from its parent."""

    __slots__ = ("args", "key", "kwargs", "meta", "parent", "storage", "target", "version", "vid")

    def __init__(self, storage: TracedStorage, vid: int, meta: Meta) -> None:
        self.storage = storage
        self.vid = vid
        self.version = storage.version
        self.meta = meta
        self.key = meta[:3]
        self.parent: Cell | None = None
        self.target = ""
        self.args: tuple[Any, ...] = ()
        self.kwargs: tuple[tuple[str, Any], ...] = ()

    def child(
        self, vid: int, meta: Meta, target: str, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]
    ) -> Cell:
        """A view of this cell. In `args`, `Ref(-1)` stands for the parent; target "" is the parent itself."""
        cell = Cell(self.storage, vid, meta)
        cell.parent, cell.target, cell.args, cell.kwargs = self, target, args, kwargs
        return cell


class Recorder(compat.TorchDispatchMode):
    """Collects nodes and values while a function runs on fake tensors."""

    def __init__(self, handler_of: Callable[[Any], Callable[..., Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake = compat.fake_mode()
        self.where = Whereabouts()
        self.nodes: list[Node] = []
        self.values: dict[int, Value] = {}
        self.producer: dict[int, Node] = {}
        self.real = OnHost()  # values known for real: captured tensors, evaluated constants
        self.captured: dict[int, tuple[torch.Tensor, Cell]] = {}  # id(real) -> (real, cell), keeps it alive
        self.constants: dict[int, torch.Tensor] = {}
        self.numbers = False  # whether some input stands for a Python float
        self.made: list[weakref.ref[torch.Tensor]] = []  # every traced tensor: what outlives the trace has leaked
        self.unchecked = False  # whether torch.distributions has asked for values to check
        self.raised: Exception | None = None  # by the last operator that failed: TorchScript drops what Python says
        self._handler_of = handler_of
        self._handlers: dict[Any, Callable[..., Any]] = {}
        self._key: list[Any] = []
        self._metas: list[Meta] = []

    # ---- the mode ----

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = self._handlers.get(func)
        if handler is None:
            handler = self._handlers[func] = self._handler_of(func)
        try:
            if self.numbers and promotes(func):
                return as_numbers(self, handler, func, args, kwargs or {})
            return handler(self, func, args, kwargs or {})
        except Exception as error:
            self.raised = error
            raise

    # ---- values ----

    def new_value(self, shape: tuple[int, ...], dtype: torch.dtype, **fields: Any) -> int:
        vid = len(self.values)
        self.values[vid] = Value(vid, shape, dtype, **fields)
        return vid

    def emit(
        self, target: str, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...], types: list[Any]
    ) -> list[Any]:
        """Append a node; `types` holds (shape, dtype) or None per result. Returns the value ids."""
        phase, path, line = self.where.now()
        values = self.values
        free = target not in COLLECTIVES and all(values[r].device_free for r in refs_of((args, kwargs)))
        outs = tuple([None if t is None else self.new_value(t[0], t[1], device_free=free) for t in types])
        node = Node(target, args, kwargs, outs, phase, path, line)
        self.nodes.append(node)
        for out in outs:
            if out is not None:
                self.producer[out] = node
        return list(outs)

    def emit1(
        self, target: str, args: tuple[Any, ...], shape: tuple[int, ...], dtype: torch.dtype, /, **kwargs: Any
    ) -> int:
        """Append a node with one result."""
        out: int = self.emit(target, args, tuple(kwargs.items()), [(tuple(shape), dtype)])[0]
        return out

    def call(self, func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Record `func` as if the function had called it."""
        with self:
            out: torch.Tensor = func(*args, **kwargs)
        return out

    # ---- tensors and cells ----

    def cell(self, tensor: torch.Tensor) -> Cell:
        """The cell of a tensor of this trace, or of a real one that the function captured."""
        if isinstance(tensor, compat.FakeTensor):
            found: Cell | None = tensor.__dict__.get("_colofunc_cell")
            if found is not None and found.storage.owner is self:
                return found
            raise TraceError(
                f"a tensor of shape {tuple(tensor.shape)} at {user_line()} was made by an earlier trace and kept; "
                "return it from the step instead of storing it in an attribute or a global"
            )
        return self.capture(tensor)

    def capture(self, tensor: torch.Tensor) -> Cell:
        """The cell of a real tensor that is no input: it becomes a constant of the program (see also `lift`)."""
        found = self.captured.get(id(tensor))
        name = self.where.frozen.get(id(tensor))
        refuse_computed(tensor, name)
        if found is None:
            role = "constant" if name is None else "frozen"
            # Classes that only say what torch functions do have been asked before an operator comes here.
            dispatches = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
            if dispatches or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
                refuse_unlike(tensor, f"a tensor that the step at {user_line()} captured", TraceError)
            vid = self.new_value(
                tuple(tensor.shape), tensor.dtype, name=name or "", role=role, device_free=name is None
            )
            with compat.disable_modes():
                data = tensor.detach()
                if name is None and data.nbytes <= SMALL_BYTES:
                    data = make(data).cpu()  # a table of a module of `cf.lazy`, or of one on a GPU
            self.constants[vid] = data
            if name is None:
                self.real[vid] = data
            meta = Meta(tuple(tensor.shape), tensor.stride(), tensor.dtype)
            found = self.captured[id(tensor)] = (tensor, self.root(vid, meta, "captured"))
        return found[1]

    def root(self, vid: int, meta: Meta, kind: str = "fresh", name: str = "") -> Cell:
        """The cell of a tensor with a storage of its own."""
        storage = TracedStorage(self, kind, name)
        storage.root = Cell(storage, vid, meta)
        return storage.root

    def tensor(self, cell: Cell) -> torch.Tensor:
        """A new tensor that stands for a cell."""
        tensor = TraceTensor(cell.meta, self.fake)
        self.attach(tensor, cell)
        self.made.append(weakref.ref(tensor))
        return tensor

    def attach(self, tensor: torch.Tensor, cell: Cell) -> None:
        """From now on the tensor stands for `cell`."""
        tensor.__dict__["_colofunc_cell"] = cell

    def fresh(self, vid: int, meta: Meta) -> torch.Tensor:
        """A new tensor with a storage of its own."""
        return self.tensor(self.root(vid, meta))

    def read(self, cell: Cell) -> int:
        """The current value of a cell; a view whose storage was written since is derived again."""
        storage = cell.storage
        if cell.version != storage.version:
            if cell.parent is None:
                raise TraceError("a root cell fell behind its storage")
            parent = self.read(cell.parent)
            if cell.target:
                value = self.values[cell.vid]
                args = trace_views.on_parent(cell.args, parent)
                cell.vid = self.emit(cell.target, args, cell.kwargs, [(value.shape, value.dtype)])[0]
            else:
                cell.vid = parent
            cell.version = storage.version
        return cell.vid

    def write(self, cell: Cell, vid: int) -> None:
        """Make `vid` the value of a cell, and of everything that shares its storage."""
        storage = cell.storage
        if storage.kind != "fresh":
            self._refuse_write(storage)
        if cell.parent is None:
            storage.version += 1
        else:
            path = trace_views.path_to_write(cell)
            above = path[0].parent
            assert above is not None
            self.write(above, trace_views.write_back(self, path, self.read(above), vid))
        cell.vid = vid
        cell.version = storage.version

    def _refuse_write(self, storage: TracedStorage) -> None:
        line = user_line()
        if storage.kind == "input":
            raise TraceError(
                f"the step writes in place to its input {storage.name!r} at {line}; write to a .clone() of it, or compute "
                "a new tensor, and return the new value. Where the argument is donated, a clone that is written to by "
                "index_copy_, x[i:j] = ..., add_ and the like is the argument's memory: no copy is made"
            )
        raise TraceError(
            f"the step writes in place to a tensor that it captured from outside at {line}; "
            "pass the tensor as an argument and return the new value"
        )

    # ---- arguments ----

    def encode_call(
        self, func: Any, args: Any, kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...], Results]:
        """A call's arguments as plain data, and what it returns."""
        key: list[Any] = [func, torch.get_default_dtype()]
        metas: list[Meta] = []
        self._key, self._metas = key, metas
        enc = tuple([self.encode(arg) for arg in args])
        named: tuple[tuple[str, Any], ...] = ()
        if kwargs:
            named = tuple([(k, self._named(k, v)) for k, v in kwargs.items() if k not in PLACEMENT and v is not None])
        return enc, named, remembered(tuple(key), func, enc, named, metas)

    def _named(self, name: str, arg: Any) -> Any:
        self._key.append(name)
        return self.encode(arg)

    def encode(self, arg: Any) -> Any:
        """An argument as plain data: tensors become `Ref`, lists become tuples. Adds to the key of the call."""
        kind = type(arg)
        if kind is TraceTensor or isinstance(arg, torch.Tensor):
            cell = self.cell(arg)
            self._key.append(cell.key)
            self._metas.append(cell.meta)
            return Ref(self.read(cell))
        if kind in SMALL:
            self._key.append(kind)
            self._key.append(arg)
            return arg
        if kind is list or kind is tuple or isinstance(arg, (list, tuple)):
            self._key.append(len(arg))
            return tuple([self.encode(item) for item in arg])
        if isinstance(arg, SMALL):
            self._key.append(arg)
            return arg
        if isinstance(arg, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise TraceError(f"an operator takes a symbolic size at {user_line()}; make the size a Python int")
        raise TraceError(
            f"an operator takes an argument of type {kind.__name__} at {user_line()}, which no program can hold"
        )

    # ---- constants ----

    def is_known(self, tensor: Any) -> bool:
        """Whether a tensor depends on no input, so that its value can be computed now."""
        return self.values[self.read(self.cell(tensor))].device_free

    def evaluate(self, vid: int) -> torch.Tensor:
        """The real value of something that depends on no input."""
        with compat.disable_modes(), compat.no_function_modes(), torch.no_grad():
            return self._evaluate(vid)

    def _evaluate(self, vid: int) -> torch.Tensor:
        pending = [vid]
        while pending:
            top = pending[-1]
            if top in self.real:
                pending.pop()
                continue
            node = self.producer[top]
            missing = [ref for ref in node.refs if ref not in self.real]
            if missing:
                pending.extend(missing)
                continue
            result = run_node(node, self.real)
            for out, tensor in zip(node.outs, result, strict=True):
                if out is not None:
                    self.real[out] = tensor
            pending.pop()
        return self.real[vid]


def refs_of(tree: Any) -> list[int]:
    """Ids of the values in encoded arguments."""
    found: list[int] = []
    stack = [tree]
    while stack:
        top = stack.pop()
        if type(top) is Ref:
            found.append(top.id)
        elif type(top) is tuple:
            stack.extend(top)
    return found


def run_node(node: Node, real: dict[int, torch.Tensor]) -> list[Any]:
    """Execute one node on real tensors; results are flat, in the order of `node.outs`."""
    func = resolve(node.target)
    args = map_refs(node.args, lambda i: real[i])
    kwargs = {k: map_refs(v, lambda i: real[i]) for k, v in node.kwargs}
    out = func(*args, **kwargs)
    return flat_results(out) if node.outs else []


def flat_results(out: Any) -> list[Any]:
    """The results of an operator as a flat list."""
    if isinstance(out, (list, tuple)):
        return [item for part in out for item in flat_results(part)]
    return [out]
