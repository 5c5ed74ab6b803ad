"""The precision of a running step: who is cast, where, and to what.

Problem: mixed precision keeps parameters in float32 and computes in bfloat16, and somebody has to cast at every place
where the two meet. Autocast casts at each matrix product; `.to(bfloat16)` loses the masters. Idea: while a step runs,
one function mode knows its `Policy` and casts a differentiated leaf once, where it enters a computation, so that its
gradient comes back in the leaf's own dtype through the cast.

    with Mixed(Policy(compute=torch.bfloat16)):
        w = torch.ones(4, 4, requires_grad=True)             # float32: a master
        (x @ w).dtype                                        # bfloat16; x follows, whatever float it is
        torch.autograd.grad((x @ w).sum(), w)[0].dtype       # float32

Everything else keeps the dtype that the code gives it, with four exceptions: where torch refuses two dtypes (`FOLLOW`),
the wider operand follows the compute dtype; a norm whose operands differ runs in the wider one, and batch norm in that
of its statistics; what is written into a tensor takes that tensor's dtype; losses (`F.cross_entropy` and its kin) are
computed in float32 at least, as autocast has it.

With a loss scale, what is differentiated is multiplied by it and the gradients are divided by it again, before anyone
sees them; `finite` collects, per backward pass, whether all of them are finite.
Source: Micikevicius et al., Mixed precision training (2018), sections 3.1 to 3.3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from colofunc import compat
from colofunc.errors import InputError, near
from colofunc.ops.dtypes import Policy, speaks_of

# Where torch refuses two floating dtypes, by the function's name: the wider operands become the compute dtype.
FOLLOW = frozenset(
    "linear bilinear matmul __matmul__ __rmatmul__ mm bmm mv dot vdot addmm addmv addbmm baddbmm einsum tensordot "
    "inner chain_matmul conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d "
    "scaled_dot_product_attention multi_head_attention_forward grouped_mm _grouped_mm lstm gru rnn_tanh rnn_relu "
    "lstm_cell gru_cell rnn_tanh_cell "
    "rnn_relu_cell prelu".split()
)
NORMS = frozenset("layer_norm group_norm rms_norm".split())
STATISTICS = frozenset("batch_norm instance_norm".split())
WRITES = frozenset(
    "scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_ index_add index_add_ index_copy "
    "index_copy_ index_put "
    "index_put_ index_reduce index_reduce_ masked_scatter masked_scatter_ __setitem__".split()
)
LOSSES = frozenset("cross_entropy binary_cross_entropy binary_cross_entropy_with_logits kl_div".split())
# Functions for which a leaf is looked up in a table or multiplied in: a leaf is cast here even after its backward pass.
_COMPUTES = FOLLOW | NORMS | STATISTICS | frozenset(("embedding", "embedding_bag"))
# What is done to a leaf itself, not with its values.
_RAW = frozenset(
    "detach detach_ requires_grad_ requires_grad retain_grad register_hook backward size dim stride numel nelement "
    "data_ptr is_floating_point is_complex is_contiguous storage_offset untyped_storage element_size copy_ set_ zero_ "
    "__set__ __repr__ __format__ __len__ __hash__ __deepcopy__ zeros_like empty_like ones_like full_like _version "
    "is_cuda "
    "register_post_accumulate_grad_hook has_names is_nonzero is_same_size".split()
)
_TRANSPOSED = tuple(getattr(Tensor, n).__get__ for n in ("T", "mT", "H", "mH"))

_ACTIVE: ContextVar[Mixed | None] = ContextVar("colofunc_policy", default=None)


def active_policy() -> Mixed | None:
    """The policy under which the code of this context runs, None for none."""
    return _ACTIVE.get()


@contextmanager
def inside(module: nn.Module, held: dict[str, Tensor], weights: Sequence[str]) -> Iterator[None]:
    """`Mixed.inside` of the active policy; nothing where there is none."""
    mixed = active_policy()
    if mixed is None:
        yield
        return
    with mixed.inside(module, held, weights):
        yield


class Mixed(TorchFunctionMode):
    """Runs code under a policy. `scale`: the loss scale, 0-dim; `finite`: one 0-dim bool per backward pass."""

    def __init__(self, policy: Policy, scale: Tensor | None = None) -> None:
        super().__init__()
        self.policy = policy
        self.scale = scale
        self.finite: list[Tensor] = []
        self._cast: dict[int, tuple[Tensor, Tensor]] = {}  # id of a leaf -> it and what computations see
        self._dtypes: dict[int, tuple[Tensor, torch.dtype]] = {}  # leaves with a dtype of their own
        self._done: dict[int, Tensor] = {}  # leaves that had their backward pass
        self._all: list[Tensor] = []  # per number of backward passes: whether the gradients of all of them are finite
        # id of a new value -> it, the old one, the flag it was chosen by
        self._kept: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._names: dict[str, None] = {}  # of leaves, weights and modules, for the overrides
        self._paused = False

    def all_finite(self) -> Tensor | None:
        """Whether all gradients up to now are finite, 0-dim; None where nothing is scaled."""
        while len(self._all) < len(self.finite):
            several = len(self.finite) > 1
            self._all.append(torch.stack(self.finite).all() if several else self.finite[0])
        return self._all[-1] if self._all else None

    def keeps(self, new: Tensor, old: Tensor, finite: Tensor) -> None:
        """Say that `new` is `old` already where `finite` is false, so that nobody has to choose between them."""
        self._kept[id(new)] = new, old, finite

    def chosen(self, new: Tensor, old: Tensor) -> Tensor:
        """`new`, or `old` where a gradient is not finite."""
        finite = self.all_finite()
        if new is old or finite is None:
            return new
        _, held, by = self._kept.get(id(new), (new, new, finite))
        if held is old and by is finite:
            return new
        return torch.where(finite, new, old)

    def check_overrides(self) -> None:
        """Raise InputError where an override speaks of nothing that the code had."""
        for glob, _ in self.policy.overrides:
            if not any(speaks_of(glob, name) for name in self._names):
                near_names = near(glob, self._names, "parameters or modules of this step")
                raise InputError(f"overrides[{glob!r}] matches no module and no parameter{near_names}")

    def __enter__(self) -> Any:
        self._token: Token[Mixed | None] = _ACTIVE.set(self)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        _ACTIVE.reset(self._token)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        if func is torch.autograd.grad:
            return self._grad(func, args, kwargs)
        if func is Tensor.backward:
            return self._backward(func, args, kwargs)
        name = getattr(func, "__name__", "")
        if name == "__get__" and func not in _TRANSPOSED:
            return func(*args, **kwargs)
        if name not in _RAW and torch.is_grad_enabled():
            computes = name in _COMPUTES
            args, kwargs = _map(lambda t: self._enter_leaf(t, computes), (args, kwargs))
        rule = _RULES.get(name) or (_widen_loss if name.endswith("_loss") else None)
        if rule is not None:
            args, kwargs = rule(self.policy, args, kwargs)
        return func(*args, **kwargs)

    # ---- leaves ----

    def name(self, leaf: Tensor, name: str) -> None:
        """Tell the name of a leaf, for the overrides."""
        dtype = self.policy.override(name)
        self._names[name] = None
        if dtype is not None:
            self._dtypes[id(leaf)] = leaf, dtype

    def _enter_leaf(self, t: Tensor, computes: bool) -> Tensor:
        if not (t.requires_grad and t.is_leaf and t.is_floating_point()):
            return t
        key = id(t)
        if key in self._done and not computes:
            return t  # `p - lr * p.grad`: the master itself
        if key not in self._cast:
            dtype = self._dtypes[key][1] if key in self._dtypes else self.policy.compute
            self._cast[key] = t, t.to(dtype)
        return self._cast[key][1]

    # ---- modules ----

    @contextmanager
    def inside(self, module: nn.Module, held: dict[str, Tensor], weights: Sequence[str]) -> Iterator[None]:
        """Casts `weights` among the tensors that a module is called with, and hooks the modules with overrides.

        Buffers keep their dtype (statistics, rotary tables) unless an override names them; so do weights beside
        running statistics.
        """
        modules = list(module.named_modules())
        kept: set[str] = set()  # beginnings of the names of weights beside running statistics
        for path, part in modules:
            if not _RUNNING.isdisjoint(dict(part.named_buffers(recurse=False))):
                kept.add(f"{path}." if path else "")
        names, before = set(weights), dict(held)
        if self.policy.overrides:
            self._names |= dict.fromkeys(held)
            self._names |= dict.fromkeys(path for path, _ in modules if path)
        with self._raw():
            for name, t in held.items():
                dtype = self.policy.override(name)
                if dtype is None and name in names and name[: name.rfind(".") + 1] not in kept:
                    dtype = self.policy.compute
                if t.is_floating_point() and dtype is not None and t.dtype != dtype:
                    held[name] = t.to(dtype)
                elif t.requires_grad and t.is_leaf:
                    self._cast[id(t)] = t, t  # stays as it is
        handles = [handle for path, part in modules for handle in self._hooks(path, part)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        for name, t in before.items():
            if name not in names:
                held[name] = _to(held[name], t.dtype)

    @contextmanager
    def _raw(self) -> Iterator[None]:
        """Inside, leaves are themselves."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def _hooks(self, path: str, module: nn.Module) -> list[Any]:
        """Casts at the door of a module whose override differs from what surrounds it, or that checks dtypes itself."""
        outer = self.policy.override(path.rpartition(".")[0]) or self.policy.compute
        inner = self.policy.override(path) if path else None
        if inner is None and isinstance(module, nn.RNNBase):
            inner = outer
        elif inner is None or inner == outer:
            return []

        def enter(mod: nn.Module, args: Any, kwargs: Any) -> Any:
            return _map(lambda t: _to(t, inner), args), _map(lambda t: _to(t, inner), kwargs)

        def leave(mod: nn.Module, args: Any, out: Any) -> Any:
            return pytree.tree_map_only(Tensor, lambda t: _to(t, outer) if t.dtype == inner else t, out)

        return [module.register_forward_pre_hook(enter, with_kwargs=True), module.register_forward_hook(leave)]

    # ---- backward passes ----

    def _grad(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = {**dict(zip(("outputs", "inputs"), args, strict=False)), **kwargs}
        outputs, inputs = given.pop("outputs"), given.pop("inputs")
        for leaf in [inputs] if isinstance(inputs, Tensor) else inputs:
            self._done[id(leaf)] = leaf
        if self.scale is None:
            return func(*args, **kwargs)
        if isinstance(outputs, Tensor):
            scaled: Any = outputs * self.scale
        else:
            scaled = [output * self.scale for output in outputs]
        return tuple(self._unscaled(func(scaled, inputs, *args[2:], **given)))

    def _backward(self, func: Any, args: Any, kwargs: Any) -> Any:
        leaves = [leaf for leaf, _ in self._cast.values()]
        self._done |= {id(leaf): leaf for leaf in leaves}
        if self.scale is None:
            return func(*args, **kwargs)
        before = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        func(args[0] * self.scale, *args[1:], **kwargs)
        for leaf, old, new in zip(leaves, before, self._unscaled([leaf.grad for leaf in leaves]), strict=True):
            if new is None or old is None:
                leaf.grad = old if new is None else new
            else:
                leaf.grad = old + new
        return None

    def _unscaled(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        assert self.scale is not None
        inverse = 1.0 / self.scale
        out = [None if grad is None else grad * inverse.to(grad.dtype) for grad in grads]
        # A sum is finite only if all its terms are: one pass, no temporary, and partial sums add up over a mesh.
        sums: list[Tensor] = []
        for grad in out:
            if grad is not None:
                wide = torch.promote_types(grad.dtype, torch.float32)
                sums.append(grad.detach().sum(dtype=wide).to(torch.float32))
        if sums:
            self.finite.append(compat.unwrap_functorch(torch.isfinite(torch.stack(sums).sum())))
        return out


_RUNNING = {"running_mean", "running_var"}


def _map(fn: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Arguments of a call with every tensor replaced."""
    if isinstance(tree, Tensor):
        return fn(tree)
    if type(tree) in (tuple, list):
        return type(tree)([_map(fn, item) for item in tree])
    if type(tree) is dict:
        return {key: _map(fn, item) for key, item in tree.items()}
    return tree


def _to(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t.to(dtype) if t.is_floating_point() and t.dtype != dtype else t


def _dtypes_of(args: Any, kwargs: Any) -> set[torch.dtype]:
    found: set[torch.dtype] = set()

    def look(t: Tensor) -> Tensor:
        if t.is_floating_point():
            found.add(t.dtype)
        return t

    _map(look, (args, kwargs))
    return found


def _follow(policy: Policy, args: Any, kwargs: Any) -> Any:
    dtypes = _dtypes_of(args, kwargs)
    if len(dtypes) < 2 or policy.compute not in dtypes:
        return args, kwargs
    return _map(lambda t: _to(t, policy.compute), (args, kwargs))


def _widest(policy: Policy, args: Any, kwargs: Any) -> Any:
    dtypes = sorted(_dtypes_of(args, kwargs), key=lambda dtype: dtype.itemsize)
    if len(dtypes) < 2:
        return args, kwargs
    return _map(lambda t: _to(t, dtypes[-1]), (args, kwargs))


def _statistics(policy: Policy, args: Any, kwargs: Any) -> Any:
    """(input, running_mean, running_var, weight, bias, ...): the weights in the dtype of the statistics."""
    names = ("input", "running_mean", "running_var", "weight", "bias")
    mean = {**dict(zip(names, args, strict=False)), **kwargs}.get("running_mean")
    if mean is None:
        return args, kwargs

    def cast(name: str, value: Any) -> Any:
        return _to(value, mean.dtype) if name in ("weight", "bias") and value is not None else value

    changed = list(args)
    for place, name in enumerate(names[: len(args)]):
        changed[place] = cast(name, args[place])
    return tuple(changed), {name: cast(name, value) for name, value in kwargs.items()}


def _into(policy: Policy, args: Any, kwargs: Any) -> Any:
    if not args or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
        return args, kwargs
    dtype = args[0].dtype
    return (args[0], *_map(lambda t: _to(t, dtype), args[1:])), _map(lambda t: _to(t, dtype), kwargs)


def _widen_loss(policy: Policy, args: Any, kwargs: Any) -> Any:
    def widen(t: Tensor) -> Tensor:
        return t.to(torch.float32) if t.is_floating_point() and t.dtype.itemsize < 4 else t

    return _map(widen, (args, kwargs))


_RULES: dict[str, Callable[[Policy, Any, Any], Any]] = {
    **dict.fromkeys(FOLLOW, _follow),
    **dict.fromkeys(NORMS, _widest),
    **dict.fromkeys(STATISTICS, _statistics),
    **dict.fromkeys(WRITES, _into),
    **dict.fromkeys(LOSSES, _widen_loss),
}
