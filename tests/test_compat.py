"""Every private name of torch that colofunc uses does what compat.py says, and where it has a fallback, that does too."""

import ast
import io
import logging
import math
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from colofunc import compat

aten = torch.ops.aten
SOURCE = Path(compat.__file__).read_text()

# Private name -> the test of what stands in for it; None where nothing can, and this file only says that it is there.
TESTED = {
    "_grouped_mm": "test_grouped_mm",
    "_op": "test_bare_call",
    "_scaled_mm": "test_scaled_mm",
    "_scaled_grouped_mm": "test_scaled_grouped_mm",
    "_int_mm": "test_int_mm",
    "_is_vnni_supported": "test_without_a_word_on_the_cpu",
    "_cache": "test_without_the_cache_of_parametrized_weights",
    "_set_grad_enabled": None,  # test_what_sets_gradients_is_seen
    "_current_autograd_node": "test_without_the_current_node",
    "_current_graph_task_id": "test_in_backward",
    "_sequence_nr": "test_without_sequence_numbers",
    "_get_sequence_nr": "test_without_sequence_numbers",
    "_functorch": "test_unwrap_functorch",
    "_current_level": "test_in_forward_mode",
    "_top_saved_tensors_default_hooks": "test_saved_tensor_hooks",
    "_dispatch_has_kernel_for_dispatch_key": "test_composite_kernel",
    "_op_dk": "test_run_composite",
    "_StridedShard": "test_strided_shard",
    "_cdata": "test_storage_key",
    "_storage_Use_Count": "test_is_held_alone",
    "_get_default_store": "test_group_store",
    "_get_backend": "test_groups",
    "_timeout": "test_groups",
    "_set_default_timeout": "test_groups",
    "_world": "test_groups",
    "_init_group": "test_init_optimizer_group",
    "_backward_hooks": "test_gradient_hooks",
    "_base": "test_view_base",
    "_forward_pre_hooks": "test_module_hooks",
    "_forward_hooks": "test_module_hooks",
    "_backward_pre_hooks": "test_module_hooks",
    "_post_accumulate_grad_hooks": "test_gradient_hooks",
    "_version": "test_version",
    "_modules": "test_children",
    "_destroy": "test_undefine",
    "_dynamo": "test_compile_graph",
    "_C": None,  # the module of the names above
    "_autograd": None,  # likewise
    "_subclasses": None,  # fake tensors: test_fake_mode
    "_python_dispatch": None,  # TorchDispatchMode: test_disable_modes
    "_disable_current_modes": None,  # test_disable_modes
    "_DisableTorchDispatch": None,  # test_no_dispatch
    "_make_wrapper_subclass": None,  # test_wrapper_subclass
    "_disabled_torch_function_impl": None,  # test_no_torch_function
}


class Count(compat.TorchDispatchMode):
    """A dispatch mode that counts what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class CountFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen += 1
        return func(*args, **(kwargs or {}))


class Wrapper(torch.Tensor):
    """A shape and a dtype around another tensor."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor):
        self = compat.wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        self.inner = inner
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return Wrapper(func(*(a.inner if isinstance(a, Wrapper) else a for a in args), **(kwargs or {})))


def test_every_private_name_has_a_test() -> None:
    """As an attribute, a part of an import, or a string given to getattr."""
    tree, found = ast.parse(SOURCE), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            found |= {part for name in names for part in name.split(".")}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            found.add(node.value)
    private = {name for name in found if name.startswith("_") and not name.endswith("_")}
    assert private == set(TESTED)
    assert {test for test in TESTED.values() if test} <= set(globals())


def test_grouped_mm() -> None:
    torch.manual_seed(0)
    x, w, ends = torch.randn(6, 16).bfloat16(), torch.randn(2, 16, 8).bfloat16(), torch.tensor([2, 6], dtype=torch.int32)
    want = torch.cat([x[:2] @ w[0], x[2:] @ w[1]])
    assert torch.allclose(compat.grouped_mm(x, w, offs=ends).float(), want.float(), atol=0.1)


def test_scaled_mm() -> None:
    """Small integers are exact in float8."""
    a, b = (torch.arange(256.0).reshape(16, 16) * k % 7 - 3 for k in (1, 5))
    x, y = a.to(torch.float8_e4m3fn), b.t().contiguous().to(torch.float8_e4m3fn).t()  # the second in columns
    out = compat.scaled_mm(x, y, torch.tensor(0.5), torch.tensor(4.0), torch.float32, None)
    assert torch.equal(out, 2 * (a @ b))


def test_scaled_grouped_mm(monkeypatch: pytest.MonkeyPatch) -> None:
    """On shapes alone: it runs on cards of the Hopper generation (`test_fp8_experts`)."""
    assert compat.has_scaled_grouped_mm()
    a, b = (torch.empty(shape, device="meta", dtype=torch.float8_e4m3fn) for shape in ((32, 16), (2, 48, 16)))
    scales = torch.empty(32, device="meta"), torch.empty(2, 48, device="meta")
    out = compat.scaled_grouped_mm(a, b.transpose(1, 2), *scales, torch.empty(2, device="meta", dtype=torch.int32), torch.bfloat16)
    assert out.shape == (32, 48) and out.dtype is torch.bfloat16
    monkeypatch.setattr(compat, "_scaled_grouped", None)
    assert not compat.has_scaled_grouped_mm()


def test_int_mm() -> None:
    a, b = (torch.arange(256).reshape(16, 16) * k % 255 - 127 for k in (1, 5))
    assert torch.equal(compat.int_mm(a.to(torch.int8), b.to(torch.int8).t()), (a @ b.t()).to(torch.int32))


def test_without_a_word_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    compat.has_int_mm_on_cpu.cache_clear()
    assert compat.has_int_mm_on_cpu() == torch.cpu._is_vnni_supported()
    monkeypatch.delattr(torch.cpu, "_is_vnni_supported")
    compat.has_int_mm_on_cpu.cache_clear()
    assert not compat.has_int_mm_on_cpu()
    compat.has_int_mm_on_cpu.cache_clear()


# ---- modes ----


def test_fake_mode() -> None:
    real = torch.ones(3, 4)
    with compat.fake_mode() as mode:
        fake = torch.empty(2, 3) @ real  # real tensors may be mixed in
    assert isinstance(fake, compat.FakeTensor) and fake.fake_mode is mode and fake.shape == (2, 4)
    with pytest.raises(compat.DynamicOutputShapeException), mode:
        torch.nonzero(fake)
    with pytest.raises(compat.DataDependentOutputException), mode:
        fake.sum().item()


def test_quiet_fake_errors() -> None:
    logger, heard = logging.getLogger("torch._subclasses.fake_tensor"), io.StringIO()
    handler = logging.StreamHandler(heard)
    logger.addHandler(handler)
    try:
        with compat.quiet_fake_errors(), pytest.raises(RuntimeError), compat.fake_mode():
            aten.mm.default(torch.empty(2, 3), torch.empty(2, 3))
    finally:
        logger.removeHandler(handler)
    assert heard.getvalue() == "" and not logger.disabled


def test_undefine() -> None:
    for schema, args in (("twice(Tensor x) -> Tensor", ()), ("twice(Tensor x, int n) -> Tensor", (3,))):
        library = torch.library.Library("compattest", "FRAGMENT")
        library.define(schema)
        library.impl("twice", lambda x, n=2: x * n, "CompositeExplicitAutograd")
        assert float(torch.ops.compattest.twice(torch.ones(()), *args)) == (*args, 2)[0]
        assert compat.undefine(library)
    assert not hasattr(torch.ops.compattest, "twice")
    assert not compat.undefine(object())  # type: ignore[arg-type]  # a torch without it


def test_disable_modes() -> None:
    with Count() as outer, Count() as mode:
        torch.ones(2)
        with compat.disable_modes():
            assert not isinstance(torch.ones(2) + 1, compat.FakeTensor)
        torch.ones(2)
    assert mode.seen == ["aten.ones.default"] * 2 and outer.seen == mode.seen
    with compat.fake_mode(), compat.disable_modes():
        assert float(torch.ones(2).sum()) == 2


def test_no_function_modes() -> None:
    with CountFunctions() as mode:
        torch.ones(2)
        with compat.no_function_modes():
            torch.ones(2)
    assert mode.seen == 1


def test_bare_call() -> None:
    """Of an overload, and of what has no call of its own."""
    add = torch.ops.aten.add.Tensor
    with CountFunctions() as mode:
        assert torch.equal(compat.bare_call(add)(torch.ones(2), torch.ones(2)), torch.full((2,), 2.0))
    assert mode.seen > 0 and compat.bare_call(torch.neg) is torch.neg


def test_no_dispatch() -> None:
    x = Wrapper(torch.ones(2, 3))
    assert type(x + 1) is Wrapper
    with compat.no_dispatch():
        aten.t_.default(x)  # the wrapper's own metadata; its inside is as it was
    assert x.shape == (3, 2) and x.inner.shape == (2, 3)


def test_wrapper_subclass() -> None:
    x = Wrapper(torch.arange(6.0).reshape(2, 3)).requires_grad_()
    y = x * 2
    assert isinstance(y, Wrapper) and y.shape == (2, 3) and y.inner.equal(torch.arange(6.0).reshape(2, 3) * 2)
    assert y.grad_fn is not None


def test_wrapper_maker() -> None:
    slow = compat.wrapper_subclass(Wrapper, (2, 3), dtype=torch.float64, device="cpu", requires_grad=False)
    quick = compat.wrapper_maker(Wrapper, (2, 3), torch.float64, torch.device("cpu"))()
    assert (quick.shape, quick.stride(), quick.dtype, quick.device) == (slow.shape, slow.stride(), slow.dtype, slow.device)
    assert not quick.requires_grad and quick.is_contiguous()


def test_without_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever hangs somewhere is seen, also where its dict was replaced."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    looked = lambda: compat.without_hooks(list(net.modules()), list(net.parameters()))  # noqa: E731
    assert looked()
    registers = [getattr(net[1], f"register_{kind}") for kind in ("forward_pre_hook", "forward_hook", "full_backward_pre_hook")]
    for register in (*registers, net[1].register_full_backward_hook, net[0].bias.register_hook):
        handle = register(lambda *args: None)
        assert not looked()
        handle.remove()
        assert looked()
    net[1]._forward_hooks = {0: lambda *args: None}
    assert not looked()
    net[1]._forward_hooks = {}
    assert looked()
    monkeypatch.delattr(net[0], "_forward_hooks")
    assert not looked()  # a torch that keeps them elsewhere: somebody has to look


# ---- autograd ----


def sequences() -> tuple[list[bool], list[int], int, int]:
    """(in_backward, backward_sequence) inside the backward of a multiplication, the number it got, and the next one's."""
    inside: list[bool] = []
    numbers: list[int] = []

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            inside.append(compat.in_backward())
            numbers.append(compat.backward_sequence())
            return g * 2

    y = Double.apply(torch.ones(2, requires_grad=True))
    made = compat.forward_sequence()
    z = y.sum()
    after = compat.forward_sequence()
    z.backward()
    return inside, numbers, made, after


def test_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not compat.in_backward()
    assert sequences()[0] == [True] and not compat.in_backward()
    monkeypatch.setattr(compat, "_graph_task", None)
    assert not compat.in_backward()
    assert sequences()[0] == [True] and not compat.in_backward()


def test_the_backward_knows_its_forward() -> None:
    _, numbers, made, after = sequences()
    assert numbers == [made] and made >= 0 and after == made + 1
    assert compat.backward_sequence() == -1


def test_without_sequence_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "_peek_sequence", None)
    monkeypatch.setattr(compat, "_current_node", object)  # a node that has no number
    _, numbers, made, after = sequences()
    assert numbers == [-1] and (made, after) == (-1, -1)


def test_without_the_current_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "_current_node", lambda: None)
    inside, numbers, _, _ = sequences()
    assert inside == [True] and numbers == [-1]


def test_unwrap_functorch(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[torch.Tensor] = []

    def cube(x: torch.Tensor) -> torch.Tensor:
        kept.append(x)
        assert compat.unwrap_functorch(x) is base
        return x * x * x

    base = torch.tensor(2.0)
    assert float(torch.func.grad(torch.func.grad(cube))(base)) == 12  # two wrappers deep
    assert kept[0] is not base
    monkeypatch.setattr(compat, "_functorch", None)
    assert compat.unwrap_functorch(kept[0]) is kept[0]


def test_saved_tensor_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    def pack(x: torch.Tensor) -> torch.Tensor:
        return x

    assert compat.saved_tensor_hooks() is None
    with torch.autograd.graph.saved_tensors_hooks(pack, pack):
        assert compat.saved_tensor_hooks() == (pack, pack)
        monkeypatch.setattr(compat, "_top_hooks", None)
        assert compat.saved_tensor_hooks() is None


def test_identity_saved_hooks() -> None:
    packed: list[torch.Tensor] = []
    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        with compat.identity_saved_hooks():
            inner = x.exp()
        assert packed == []
        inner.exp()
    assert len(packed) == 1


# ---- operators ----


@pytest.mark.parametrize("has_name", [True, False])
def test_composite_kernel(monkeypatch: pytest.MonkeyPatch, has_name: bool) -> None:
    if not has_name:
        monkeypatch.setattr(compat, "_has_kernel", None)
    assert compat.composite_kernel(aten.einsum.default)
    assert not compat.composite_kernel(aten.mm.default)
    # Decomposed in Python only, and for every device by the explicit key: both stay whole.
    assert not compat.composite_kernel(aten.native_layer_norm.default)


class WithoutKey:
    """An operator overload that lacks `_op_dk`."""

    def __init__(self, func) -> None:
        self.func = func

    def __getattr__(self, name: str):
        if name == "_op_dk":
            raise AttributeError(name)
        return getattr(self.func, name)


def test_run_composite() -> None:
    a, b = torch.rand(2, 3, dtype=torch.float64), torch.rand(3, 4, dtype=torch.float64)
    with Count() as mode:
        product = compat.run_composite(aten.matmul.default, (a, b), {})
    assert product.equal(a @ b) and mode.seen == ["aten.mm.default"]
    assert compat.run_composite(WithoutKey(aten.matmul.default), (a, b), {}).equal(a @ b)
    # An explicit composite kernel has no public way in.
    assert compat.run_composite(aten.new_zeros.default, (a, [2]), {}).equal(torch.zeros(2, dtype=torch.float64))
    with pytest.raises(NotImplementedError, match="explicit"):
        compat.run_composite(WithoutKey(aten.new_zeros.default), (a, [2]), {})
    with pytest.raises(NotImplementedError, match="no kernel"):
        compat.run_composite(aten.mm.default, (a, b), {})


# ---- tensors, placements, optimizers ----


@pytest.mark.parametrize("has_name", [True, False])
def test_storage_key(monkeypatch: pytest.MonkeyPatch, has_name: bool) -> None:
    if not has_name:
        monkeypatch.setattr(torch.UntypedStorage, "_cdata", None, raising=False)
    for device in ("cpu", "meta"):
        x, y = torch.empty(4, 4, device=device), torch.empty(4, 4, device=device)
        assert compat.storage_key(x) == compat.storage_key(x[1:].t()) != compat.storage_key(y)


@pytest.mark.parametrize("has_name", [True, False])
def test_is_held_alone(monkeypatch: pytest.MonkeyPatch, has_name: bool) -> None:
    if not has_name:
        monkeypatch.delattr(torch._C, "_storage_Use_Count")
    x = torch.zeros(4)
    again = x  # one tensor by two names
    assert compat.is_held_alone(x) is has_name
    view = again[1:]
    assert not compat.is_held_alone(x)
    del view
    assert compat.is_held_alone(x) is has_name
    assert not compat.is_held_alone(torch.nn.Parameter(x))


def test_version() -> None:
    x = torch.zeros(3)
    before = compat.version(x)
    x.add_(1)
    assert compat.version(x) == before + 1
    assert compat.version(object()) == 0  # type: ignore[arg-type]
    with torch.inference_mode():
        assert compat.version(torch.zeros(3)) == 0


def test_gradient_hooks() -> None:
    x = torch.zeros(3, requires_grad=True)
    assert compat.gradient_hooks(x) == compat.all_gradient_hooks([x]) == {} and compat.accumulation_hooks(x) == []
    handle = x.register_hook(abs)
    x.register_post_accumulate_grad_hook(print)
    assert compat.gradient_hooks(x) == {handle.id: abs} and compat.accumulation_hooks(x) == [print]
    assert compat.all_gradient_hooks([torch.zeros(3), x]) == {1: (abs,)}
    assert compat.gradient_hooks(object()) == compat.all_gradient_hooks([object()]) == {}  # type: ignore[arg-type, list-item]


def test_group_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        own = compat.group_store(3.0)
        own.set("a", "b")
        group = compat.distributed_c10d._get_default_store()
        assert group.get("a") == b"b" and own.timeout.total_seconds() == 3 != group.timeout.total_seconds()
        monkeypatch.delattr(compat.distributed_c10d, "_get_default_store")
        assert compat.group_store(3.0) is None
    finally:
        torch.distributed.destroy_process_group()


def test_groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch.distributed.init_process_group(
        "cpu:gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1, timeout=timedelta(seconds=77)
    )
    try:
        world = torch.distributed.group.WORLD
        assert compat.all_groups() == [world] and compat.bound_device(world) is None
        assert compat.group_limit_s(world, "cpu") == 77.0 and compat.group_limit_s(world, "cuda") is None
        compat.set_group_limit(world, 99.0)
        assert compat.group_limit_s(world, "cpu") == 99.0
        assert compat.backend_of(world, "cuda") is None and not compat.abort(world, "cuda")
        ended = []
        monkeypatch.setattr(compat, "backend_of", lambda group, device: SimpleNamespace(abort=lambda: ended.append((group, device))))
        assert compat.abort(world, "cuda") and ended == [(world, "cuda")]
        assert compat.group_limit_s(world, "cpu") is None  # an other backend without options
        compat.set_group_limit(world, 77.0)  # nor with a limit that can be set: nothing happens
        monkeypatch.delattr(compat.distributed_c10d, "_world")
        assert compat.all_groups() == []
        monkeypatch.undo()
        assert compat.backend_of(object(), "cpu") is None
    finally:
        torch.distributed.destroy_process_group()


def test_module_hooks() -> None:
    module = torch.nn.Identity()
    assert compat.module_hooks(module) == compat.module_hooks(object()) == ()  # type: ignore[arg-type]
    handle = module.register_forward_hook(print)
    module.register_full_backward_hook(abs)
    assert compat.module_hooks(module) == ((1, print), (3, abs))
    handle.remove()
    assert compat.module_hooks(module) == ((3, abs),)


def test_view_base() -> None:
    x = torch.zeros(3)
    assert compat.view_base(x[1:]) is x and compat.view_base(x) is None
    assert compat.view_base(object()) is None  # type: ignore[arg-type]


def test_versions() -> None:
    x, y = torch.zeros(3), torch.zeros(3)
    y.add_(1)
    assert compat.versions([x, y]) == [compat.version(x), compat.version(y)] == [0, 1]
    with torch.inference_mode():
        assert compat.versions([y, torch.zeros(3)]) == [1, 0]


def test_children() -> None:
    inner = torch.nn.Tanh()
    outer = torch.nn.Sequential(inner, inner)
    assert compat.children(outer) == (inner, inner) and compat.children(inner) == ()
    scripted = torch.jit.script(torch.nn.Sequential(inner))
    for modules in ([outer, inner], [outer, scripted]):
        assert compat.all_children(modules) == list(map(compat.children, modules))


def test_in_forward_mode() -> None:
    seen = []
    torch.func.jvp(lambda x: seen.append(compat.in_forward_mode()) or x * 2, (torch.ones(2),), (torch.ones(2),))
    torch.func.grad(lambda x: seen.append(compat.in_forward_mode()) or x.sum())(torch.ones(2))
    assert seen == [True, False] and not compat.in_forward_mode()


def test_training() -> None:
    scripted = torch.jit.script(torch.nn.Linear(2, 2))
    assert compat.is_training(scripted) and not compat.is_training(scripted.eval())
    frozen = torch.jit.freeze(scripted)
    assert not compat.is_training(frozen)
    assert compat.all_training([torch.nn.Tanh(), torch.nn.Tanh().eval()]) == [True, False]
    assert compat.all_training([torch.nn.Tanh(), frozen]) == [True, False]


def test_no_torch_function() -> None:
    """A subclass that has it gives its results as they are; function modes still see its calls."""

    class Plain(torch.Tensor):
        __torch_function__ = compat.no_torch_function

    x = torch.ones(3).as_subclass(Plain)
    with CountFunctions() as mode:
        assert type(x + 1) is torch.Tensor
    assert mode.seen == 1


def test_strided_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.tensor import Shard, placement_types

    if hasattr(placement_types, "_StridedShard"):
        strided = compat.strided_shard(1, 2)
        assert strided.dim == 1 and compat.strided_factor(strided) == 2
        assert compat.strided_factor(Shard(1)) is None
        monkeypatch.delattr(placement_types, "_StridedShard")
    assert compat.strided_shard(1, 2) is None and compat.strided_factor(Shard(1)) is None


class Momentum(torch.optim.Optimizer):
    """An optimizer that makes its state in its first step."""

    def __init__(self, params) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:
        for p in self.param_groups[0]["params"]:
            buffer = self.state[p].setdefault("buffer", torch.zeros_like(p))
            buffer.mul_(0.9).add_(p.grad)
            p.add_(buffer, alpha=-0.1)


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.SGD, Momentum])
def test_init_optimizer_group(cls) -> None:
    p = torch.ones(3, requires_grad=True)
    p.grad = torch.ones(3)
    optimizer = cls([p])
    compat.init_optimizer_group(optimizer, optimizer.param_groups[0])
    state = {k: v for k, v in optimizer.state[p].items() if k != "step"}
    expected = {torch.optim.AdamW: {"exp_avg", "exp_avg_sq"}, torch.optim.RMSprop: {"square_avg"}, Momentum: {"buffer"}}
    assert set(state) == expected.get(cls, set())
    assert not any(value.any() for value in state.values())


def test_compile_graph() -> None:
    """The function is one of plain tensors, without a guard; a compiler that is not there is an error."""

    class Twice(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (x + x,)

    x = torch.arange(3.0, requires_grad=True)
    graph = torch.fx.symbolic_trace(Twice())
    with torch.no_grad():
        (got,) = compat.compile_graph(graph, [x], "aot_eager")(x)
    assert torch.equal(got, 2 * x) and not got.requires_grad
    with pytest.raises(Exception, match="no_such_compiler"):
        compat.compile_graph(graph, [x], "no_such_compiler")


ON_CPU = {"config_patches": {"layout_optimization": False, "realize_opcount_threshold": 8}}


@pytest.mark.parametrize(("device", "options"), [("cpu", ON_CPU), ("meta", {})])
def test_compile_graph_has_settings_of_its_own_on_a_cpu(device: str, options: dict[str, Any]) -> None:
    given: dict[str, Any] = {}
    compiler = lambda graph, inputs, **more: given.update(more) or graph  # noqa: E731
    with mock.patch("torch._dynamo.lookup_backend", return_value=compiler):
        compat.compile_graph(torch.fx.symbolic_trace(torch.nn.Identity()), [torch.empty(1, device=device)], "inductor")
    assert given == options


def test_flex_attention_is_what_the_public_function_calls() -> None:
    """Numbers, base 2 of the log-sum-exp, and the words that torch's own function adds for its kernels."""
    from torch.nn.attention import flex_attention as public

    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(1, 2, n, 16, dtype=torch.float64) for n in (5, 7, 7, 5))
    grad_lse = torch.randn(1, 2, 5, dtype=torch.float64)
    blocks = public.BlockMask.from_kv_blocks(torch.ones(1, 1, 1).int(), torch.zeros(1, 1, 1, 1).int(), seq_lengths=(5, 7)).as_tuple()
    score = lambda score, *pair: score  # noqa: E731
    out, lse = compat.flex_attention(q, k, v, score, blocks, 0.3, (), ())
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    scores = leaves[0] @ leaves[1].mT * 0.3
    wanted = scores.softmax(-1) @ leaves[2], scores.logsumexp(-1)
    torch.testing.assert_close((out, lse * math.log(2)), wanted)
    slopes = torch.autograd.grad(wanted, leaves, (grad, grad_lse))
    joint = lambda score, b, h, i, j, grad: [grad, None, None, None, None]  # noqa: E731
    more = (grad, grad_lse * math.log(2), score, joint, blocks, 0.3, (), ())
    torch.testing.assert_close(compat.flex_attention_backward(q, k, v, out, lse, *more), slopes)
    assert public._apply_kernel_options(q, k, v, True, {"BACKEND": "TRITON"}) == compat._FLEX_OPTIONS


@pytest.mark.sweep
def test_inductor_convolves_in_the_layout_of_its_operands() -> None:
    x, weight = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    strides = []

    class Look(compat.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.convolution.default:
                strides.extend(operand.stride() for operand in args[:2])
            return func(*args, **(kwargs or {}))

    def fn(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.ops.aten.convolution.default(x.cos(), weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1).sin(),)

    graph = make_fx(fn)(x, weight)
    with torch.no_grad():
        compiled = compat.compile_graph(graph, [x, weight], "inductor")
        with Look():
            (got,) = compiled(x, weight)
    assert strides == [x.stride(), weight.stride()]
    torch.testing.assert_close(got, graph(x, weight)[0])


def test_without_the_cache_of_parametrized_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2))
    with torch.nn.utils.parametrize.cached():
        weight = layer.weight
        assert list(compat.parametrized_weights().values()) == [weight]
    assert not compat.parametrized_weights()
    monkeypatch.delattr(torch.nn.utils.parametrize, "_cache")
    assert compat.parametrized_weights() == {}


def test_what_sets_gradients_is_seen() -> None:
    seen = []

    class Notes(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append((func, args))
            return func(*args, **(kwargs or {}))

    with Notes(), torch.no_grad():
        pass
    assert [args for func, args in seen if func is compat.set_gradients] == [(False,), (True,)]
