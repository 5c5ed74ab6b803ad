"""Every mistake of a caller: an error that says what, on which value, and one thing to try; nothing half-updated."""

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import colofunc as cf
from colofunc import env
from colofunc.executors.backend import backend_for

MESH = cf.Mesh(dp=2, tp=2)


def step(state: Any, batch: Any) -> Any:
    def loss(params: Any) -> torch.Tensor:
        return ((batch["x"] @ params["w"].t() + params["b"]) ** 2).mean()

    value, grads = cf.value_and_grad(loss)(state["params"])
    return {"params": {k: v - 0.1 * grads[k] for k, v in state["params"].items()}}, value


def state_of() -> Any:
    return {"params": {"w": torch.randn(6, 4), "b": torch.zeros(6)}}


def batch_of(rows: int = 8) -> Any:
    return {"x": torch.randn(rows, 4)}


def full(tree: Any) -> list[torch.Tensor]:
    return [v.full() if isinstance(v, cf.DTensor) else v.clone() for v in tree["params"].values()]


def said(error: pytest.ExceptionInfo[BaseException]) -> str:
    """The message and the notes, as Python prints them."""
    return "\n".join([str(error.value), *getattr(error.value, "__notes__", [])])


def line_before() -> str:
    """The line before that of the call, as errors name it."""
    frame = sys._getframe(1)
    return f"test_bad_input.py:{frame.f_lineno - 1} in {frame.f_code.co_name}"


def refuses(kind: Any, *parts: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kind) as error:
        call()
    for part in parts:
        assert part in said(error), said(error)


@pytest.fixture
def placed() -> Iterator[tuple[Any, Any]]:
    """A staged step with a placed state, which must work and be unchanged after whatever the test tried."""
    staged = cf.shard(step, MESH)
    state, batch = state_of(), batch_of()
    at_first = staged.init(state, batch)
    yield staged, at_first
    assert all(torch.equal(a, b) for a, b in zip(full(at_first), full(state), strict=True))
    (_, got), (_, expected) = staged(at_first, batch), step(state, batch)
    torch.testing.assert_close(got.full(), expected)


# ---- specs ----

SPECS = {
    "(ddp b) d": ("(ddp b) has 2 factors of unknown size, 'ddp', 'b'", "'ddp' is no mesh axis; did you mean 'dp'?"),
    "(dp b) (dp d)": ("mesh axis 'dp' is used 2 times; place an axis once per tensor",),
    "(dp b)": ("spec has 1 dims, the tensor has 2; write one word or group per dim (or '...')",),
    "(dp b) (tp d) e": ("spec has 3 dims, the tensor has 2",),
    "b (4 tp)": ("(4 tp) multiplies to 8, more than the dim's 6; pad with '~' or use another axis",),
    "b (4 tp c)": ("(4 tp c) splits a dim of size 6 by 8, which does not divide it; pad with 'c~'",),
    "b d +ttp": ("'+ttp' names no mesh axis; did you mean 'tp'?",),
}


@pytest.mark.parametrize("spec", SPECS)
def test_specs(spec: str) -> None:
    where = f"in spec {spec!r} for a tensor of shape (8, 6) on Mesh(dp=2, tp=2)"
    refuses(cf.SpecError, *SPECS[spec], where, call=lambda: cf.distribute(torch.zeros(8, 6), spec, MESH))


def lower(in_specs: Any = None, out_specs: Any = None, fn: Any = step, args: tuple[Any, ...] = (), **options: Any) -> Any:
    return cf.shard(fn, MESH, in_specs=in_specs, out_specs=out_specs, **options).lower(state_of(), batch_of(), *args)


def test_specs_of_arguments_name_the_leaf() -> None:
    bad = ({"params": {"w": "(ddp o) i", "b": None}}, None)
    where = ("of shape (6, 4) on Mesh(dp=2, tp=2)", "in in_specs of 'state.params.w'")
    refuses(cf.SpecError, "did you mean 'dp'?", *where, call=lambda: lower(bad))
    refuses(cf.SpecError, "spec has 1 dims, the tensor has 2", "in in_specs of 'batch.x'", call=lambda: lower((None, {"x": "(dp b)"})))
    refuses(cf.SpecError, "the tensor has 0", "in out_specs of 'out.1'", call=lambda: lower(None, (None, "(dp a)")))
    pending = "out_specs of 'out.1': '+dp' is pending; outputs are reduced, drop the +axis"
    refuses(cf.SpecError, pending, call=lambda: lower(None, (None, "+dp")))


def test_trees_of_specs() -> None:
    advice = "give one spec per leaf, or one spec (or None) for the whole branch"
    less = ({"params": {"w": "(tp o) i"}}, None)
    refuses(cf.InputError, "in_specs (state.params): the tree of specs misses 'b'", advice, call=lambda: lower(less))
    wrong = ({"params": {"w": None, "b": None, "bb": None}}, None)
    refuses(cf.InputError, "in_specs (state.params): the tree of specs has 'bb'; did you mean 'b'?", call=lambda: lower(wrong))
    refuses(cf.InputError, "in_specs (state): 3 is no spec; write a string such as '(dp b) ...'", call=lambda: lower((3, None)))

    def with_flag(state: Any, batch: Any, flag: int) -> Any:
        return step(state, batch)

    refuses(
        cf.InputError,
        "in_specs (flag): spec '(dp a)' stands on 3, which is no tensor; write None there",
        call=lambda: lower((None, None, "(dp a)"), fn=with_flag, args=(3,)),
    )


# ---- meshes ----


def test_a_mesh_that_is_not_the_process_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    refuses(
        cf.MeshError,
        'no process group for Mesh(dp=2, tp=2); start with torchrun or cf.launch(fn, 4), or use "simulated"',
        call=lambda: cf.shard(step, MESH).on("distributed")(state_of(), batch_of()),
    )
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda *group: 2)
    refuses(
        cf.MeshError,
        "Mesh(dp=2, tp=2) has 4 ranks but the process group has 2; start as many processes as the mesh has ranks, or write one axis as -1",
        call=lambda: backend_for(MESH),
    )


def test_a_mesh_that_does_not_fit_is_said_before_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = []

    def counted(state: Any, batch: Any) -> Any:
        traced.append(1)
        return step(state, batch)

    monkeypatch.setattr(env, "launched", lambda: env.Launch(0, 2, 0, 2, "127.0.0.1", 29500))
    staged, too_large = cf.shard(counted, MESH), "Mesh(dp=2, tp=2) has 4 ranks but 2 processes were launched; start as many"
    for call in (staged, staged.init, staged.compare, lambda *args: staged.profile("trace.json", *args)):
        refuses(cf.MeshError, too_large, call=lambda: call(state_of(), batch_of()))  # noqa: B023
    assert not traced
    staged.lower(state_of(), batch_of())  # may plan for another machine
    assert traced


def test_what_is_no_mesh() -> None:
    advice = "cf.shard wants a cf.Mesh as its second argument, not {}; write cf.Mesh(dp=2)"
    refuses(cf.PlanError, advice.format("'dp'"), call=lambda: cf.shard(step, "dp")(state_of(), batch_of()))
    refuses(cf.PlanError, advice.format("None"), call=lambda: cf.shard(step)(state_of(), batch_of()))
    refuses(cf.MeshError, "no axis 'ttp' on Mesh(dp=2, tp=2); did you mean 'tp'?", call=lambda: MESH.axis_size("ttp"))


def test_a_state_on_another_mesh() -> None:
    state = cf.shard(step, MESH).init(state_of(), batch_of())
    refuses(
        cf.InputError,
        "argument 'state.params.w' lies on Mesh(dp=2, tp=2), the step runs on Mesh(dp=4). "
        "Try: step.init(state, ...), which places all of a state anew, or cf.load(path, mesh=...)",
        call=lambda: cf.shard(step, cf.Mesh(dp=4))(state, batch_of()),
    )


def test_captured_tensors_on_another_mesh() -> None:
    weight = cf.distribute(torch.ones(8, 8), "(dp a) b", cf.Mesh(dp=2))
    model = cf.functional(torch.nn.Linear(8, 8, bias=False))
    said = (
        "a tensor of shape (8, 8) that the step captured from outside ({!r}) lies on Mesh(dp=2), the step runs on "
        "Mesh(dp=4). Try: cf.distribute(x, spec, mesh) before the step, or the tensor as an argument of it"
    )
    refuses(cf.InputError, said.format("captured.0"), call=lambda: cf.shard(lambda x: x @ weight, cf.Mesh(dp=4))(torch.ones(4, 8)))
    by_model = cf.shard(lambda x: model.apply({"weight": weight}, {}, x)[0], cf.Mesh(dp=4))
    refuses(cf.InputError, said.format("frozen.weight"), call=lambda: by_model(torch.ones(4, 8)))


# ---- values ----


def test_mixed_dtypes(placed: Any) -> None:
    staged, state = placed
    refuses(
        cf.TraceError,
        "aten.mm.default at test_bad_input.py:",
        "in loss mixes dtypes: float64 (8, 4), float32 (4, 6); bring them to one dtype with .to(), or compute under torch.autocast",
        call=lambda: staged(state, {"x": torch.randn(8, 4, dtype=torch.float64)}),
    )


def test_a_tensor_without_data(placed: Any) -> None:
    staged, state = placed
    refuses(
        cf.InputError,
        "argument 'batch.x' of shape (8, 4) has no data (meta tensor); give real values to run, "
        "cf.lazy(...) to have them made, or use step.lower",
        call=lambda: staged(state, {"x": cf.abstract((8, 4))}),
    )


def test_a_consumed_value_names_the_call() -> None:
    staged = cf.shard(step, MESH)
    first = staged.init(state_of(), batch_of())
    second, _ = staged(first, batch_of())
    call = line_before()
    parts = f"was donated to step at {call} and its memory reused; it is read again at", ": use that call's output, or pass donate=()"
    refuses(cf.ConsumedError, "this DTensor 'state.params.w' (6, 4)", *parts, call=lambda: staged(first, batch_of()))
    refuses(cf.ConsumedError, *parts, call=lambda: first["params"]["w"] + 1)
    with pytest.raises(cf.ConsumedError) as caught:
        staged(first, batch_of())
    again = line_before()
    assert f"read again at {again}: use" in said(caught) and f"as argument 'state.params.w' of step at {again}" in said(caught)
    mixed = {"params": {"w": second["params"]["w"], "b": first["params"]["b"]}}
    refuses(cf.ConsumedError, "this DTensor 'state.params.b' (6,)", *parts, call=lambda: staged(mixed, batch_of()))
    staged(second, batch_of())  # not consumed by the call that failed


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_pass_through(value: float) -> None:
    state, batch = state_of(), {"x": torch.full((8, 4), value)}
    staged = cf.shard(step, MESH)
    got, loss = staged(staged.init(state, batch), batch)
    expected, _ = step(state, batch)
    assert f"{loss:.1f}" in ("nan", "inf")
    torch.testing.assert_close(full(got), full(expected), equal_nan=True)


def test_errors_of_operators_say_where(placed: Any) -> None:
    staged, state = placed
    refuses(
        RuntimeError,
        "must have same reduction dim",
        "aten.mm.default on torch.float32 [8, 5], torch.float32 [4, 6] at test_bad_input.py:",
        call=lambda: staged(state, {"x": torch.randn(8, 5)}),
    )


def test_an_error_while_running_leaves_the_state() -> None:
    def embedding(state: Any, ids: torch.Tensor) -> Any:
        loss, grad = cf.value_and_grad(lambda w: torch.nn.functional.embedding(ids, w).square().mean())(state["w"])
        return {"w": state["w"] - grad}, loss

    staged, w, ids = cf.shard(embedding, MESH), torch.randn(8, 4), torch.tensor([1, 2, 3, 4])
    state = staged.init({"w": w}, ids)
    refuses(
        IndexError,
        "index out of range",
        "while running aten.embedding.default of the step (test_bad_input.py:",
        call=lambda: staged(state, torch.tensor([1, 2, 3, 8])),
    )
    assert torch.equal(state["w"].full(), w)
    torch.testing.assert_close(staged(state, ids)[0]["w"].full(), embedding({"w": w}, ids)[0]["w"])


# ---- steps that one program cannot repeat ----


def test_randomness_of_the_host(placed: Any) -> None:
    _, state = placed
    for draw in (random.random, np.random.rand):

        def noisy(state: Any, batch: Any, draw: Any = draw) -> Any:
            return step(state, {"x": batch["x"] * float(draw())})

        refuses(
            cf.TraceError,
            "the step noisy (test_bad_input.py:",
            "draws from Python's or NumPy's random generator, which one program would repeat for ever; draw with torch",
            call=lambda noisy=noisy: cf.shard(noisy, MESH)(state, batch_of()),
        )


def test_a_captured_tensor_is_not_written(placed: Any) -> None:
    _, state = placed
    count = torch.zeros(6)

    def counting(state: Any, batch: Any) -> Any:
        count.add_(1)
        return step(state, batch)

    refuses(
        cf.TraceError,
        "writes in place to a tensor that it captured from outside at test_bad_input.py:",
        "in counting; pass the tensor as an argument and return the new value",
        call=lambda: cf.shard(counting, MESH)(state, batch_of()),
    )
    assert torch.equal(count, torch.zeros(6))


def test_control_flow_that_depends_on_data(placed: Any) -> None:
    _, state = placed

    def careful(state: Any, batch: Any) -> Any:
        new, loss = step(state, batch)
        return (new if loss < 1 else state), loss

    refuses(
        cf.TraceError,
        "data-dependent control flow: Python asks for the value of a tensor that depends on the step's inputs at test_bad_input.py:",
        "in careful. Choose with torch.where",
        call=lambda: cf.shard(careful, MESH)(state, batch_of()),
    )


def test_randomness_without_a_counter() -> None:
    refuses(
        cf.TraceError,
        "random operator aten._standard_gamma.default at test_bad_input.py:",
        "has no counter-based form",
        call=lambda: cf.shard(lambda x: torch._standard_gamma(x), MESH)(torch.ones(3)),
    )


# ---- plans ----


def planned(*plans: Any, mesh: cf.Mesh = MESH, **options: Any) -> Callable[[], Any]:
    return lambda: cf.shard(step, mesh, *plans, **options).lower(state_of(), batch_of())


def test_plans_that_match_nothing() -> None:
    parts = ("plan 1: '*.ww' -> '(tp o) i' matches nothing", "'state.params.w'")
    refuses(cf.PlanError, *parts, call=planned({"*.ww": "(tp o) i"}))
    refuses(cf.PlanError, "the function gave no spec for any of the parameters", call=planned(lambda name, shape: None))
    refuses(cf.PlanError, "plan 1 is 3; give a dict of globs, a function (name, shape) -> spec, or a named plan", call=planned(3))


def test_plans_that_cannot_be_done() -> None:
    refuses(
        cf.PlanError,
        "plan 1: '*.w' -> '(dp o) i' cannot be done on 'state.params.w' of shape (6, 4) on Mesh(dp=4): (dp o) splits a dim of size 6 by 4",
        "pad with 'o~'",
        call=planned({"*.w": "(dp o) i"}, mesh=cf.Mesh(dp=4)),
    )
    refuses(
        cf.PlanError,
        "plan 1: '*' -> '{tp: heads}' cannot be done on Mesh(dp=2, tp=2): no operator there (first at test_bad_input.py:",
        "aten.mm.default: m k, k n -> m n",
        "name factors of a rule",
        call=planned({"*": "{tp: heads}"}),
    )
    odd = lambda: cf.shard(step, MESH, {"*": "{dp: m}"}).lower(state_of(), batch_of(7))  # noqa: E731
    refuses(cf.PlanError, "'{dp: m}'", "cannot be done: aten.mm.default", "on (7, 4), (4, 6)", call=odd)
    refuses(cf.MeshError, "no axis 'ttp' on Mesh(dp=2, tp=2); did you mean 'tp'?", call=planned({"*": "{ttp: n}"}))
    refuses(cf.PlanError, "two wishes clash on axis 'tp' of 'state.params.w'", call=planned({"*.w": "(tp o) i"}, {"*w": "o (tp i)"}))


def test_donations_that_cannot_be_met() -> None:
    staged = cf.shard(lambda state, batch: batch["x"].sum(), MESH, donate=(0,))
    refuses(
        cf.PlanError,
        "donate=(0,) cannot be met: no output has the tree, shapes and dtypes of argument 0 ('state')",
        'return its new value, or use donate="auto"',
        call=lambda: staged(state_of(), batch_of()),
    )
    other = cf.shard(lambda state, batch: batch["x"].sum(), MESH, donate=(2,))
    refuses(cf.PlanError, "donate=(2,): the step has 2 arguments by position", call=lambda: other(state_of(), batch_of()))
    for donate in ((0, 0), (True,), ("state",), 1):
        words = f"donate={donate!r}: give positions of arguments, each once"
        refuses(cf.InputError, words, call=lambda d=donate: cf.shard(len, MESH, donate=d))


def test_transforms_twice_and_unknown_executors() -> None:
    twice = "shard is applied twice to step; give all its plans in one call"
    refuses(cf.PlanError, twice, call=lambda: cf.shard(cf.shard(step, MESH), MESH))
    refuses(cf.PlanError, "unknown executor 'simulted'; did you mean 'simulated'", call=lambda: cf.shard(step, MESH).on("simulted"))
    refuses(cf.PlanError, "cf.shard wants a step function, not int", call=lambda: cf.shard(3, MESH))


def test_a_state_that_fits_nowhere() -> None:
    large = {"params": {"w": cf.abstract((1 << 15, 1 << 17)), "b": cf.abstract((1 << 15,))}}
    staged = cf.shard(step, cf.Mesh(dp=2, topology="2xrtx2060"))
    refuses(cf.PlanError, "no plan found within", "GiB a rank", call=lambda: staged.lower(large, {"x": cf.abstract((8, 1 << 17))}))


@pytest.mark.parametrize("label", [-5, 16])
def test_indices_outside_of_a_split_vocabulary(label: int) -> None:
    """Each rank looks up its own part only; an index that nobody has fails as on one device."""
    mesh, table, ids = cf.Mesh(tp=4, topology="ideal"), torch.randn(16, 4), torch.tensor([1, 2, 3, label])
    look = cf.shard(lambda w, ids: torch.nn.functional.embedding(ids, w), mesh, {"w": "(tp v) d"}, {"*": "{tp: v}"})
    loss = cf.shard(lambda x, y: torch.nn.functional.cross_entropy(x, y), mesh, in_specs=("b (tp v)", None))
    refuses((IndexError, RuntimeError), "while running", "test_bad_input.py:", call=lambda: look(table, ids))
    refuses((IndexError, RuntimeError), "while running", "test_bad_input.py:", call=lambda: loss(table.t().contiguous(), ids))
    ignored = torch.tensor([1, 2, -100, 3])
    expected = torch.nn.functional.cross_entropy(table.t(), ignored)
    torch.testing.assert_close(loss(table.t().contiguous(), ignored).full(), expected)


@pytest.mark.parametrize("index", [-1, 12])
def test_indices_outside_of_split_rows(index: int) -> None:
    mesh = cf.Mesh(tp=4, topology="ideal")
    rows = cf.shard(lambda x, i: x.index_select(0, i), mesh, {"*": "{tp: s}"}, in_specs=("(tp v) d", None))
    x = torch.randn(12, 3)
    assert torch.equal(rows(x, torch.tensor([0, 11])).full(), x[[0, 11]])
    refuses((IndexError, RuntimeError), "out of range", call=lambda: rows(x, torch.tensor([0, index])))


def by_names(state, x, *, scale=None):
    return state * 2, x.sum()


def test_in_specs_by_the_names_of_parameters():
    step = cf.shard(by_names, cf.Mesh(dp=2), in_specs={"x": "(dp a) b"}, donate=())
    low = step.lower(torch.ones(4), x=torch.ones(4, 2))
    assert [leaf.spec for leaf in low.plan.inputs if leaf.name == "x"] == ["(dp a) b"]


def test_in_specs_of_an_unknown_parameter():
    step = cf.shard(by_names, cf.Mesh(dp=2), in_specs={"state": None, "y": "(dp a) b"})
    with pytest.raises(cf.InputError, match=r"in_specs names 'y', which is no parameter of the step; parameters: 'state', 'x'"):
        step(torch.ones(4), x=torch.ones(4, 2))


class Adds(torch.Tensor):
    """A class of tensors whose products are sums."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("mul", "__mul__"):
            one, other = (x.as_subclass(torch.Tensor) for x in args)
            return one + other
        return super().__torch_function__(func, types, args, kwargs or {})


UNLIKE: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "a class with operators": (lambda: torch.ones(3, 3).as_subclass(Adds), "is a Adds, a tensor class with operators of its own"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "is torch.sparse_coo; a step computes with dense tensors. Try: x.to_dense()"),
    "compressed rows": (lambda: torch.eye(3).to_sparse_csr(), "is torch.sparse_csr"),
    "another library's layout": (lambda: torch.eye(3).to_mkldnn(), "is torch._mkldnn"),
    "quantised": (lambda: torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.qint8), "is quantised (torch.qint8)"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(2)]), "is a nested tensor"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested", "ignore:.*quantize")
@pytest.mark.parametrize("kind", UNLIKE)
def test_tensors_that_are_no_plain_memory(kind: str) -> None:
    make, words = UNLIKE[kind]
    odd = make()
    product = cf.shard(lambda x, y: x * y, cf.Mesh(dp=2))
    refuses(cf.InputError, f"argument 'y' {words}", call=lambda: product(torch.ones(3, 3), odd))
    if kind != "nested":
        product(torch.ones(3, 3), torch.ones(3, 3).to(odd.dtype) if not odd.is_quantized else torch.ones(3, 3))
        refuses(cf.InputError, words, call=lambda: product(torch.ones(3, 3), odd))
    if kind != "a class with operators":  # its own operators are called where it is captured
        refuses(cf.TraceError, f"captured {words}", call=lambda: cf.shard(lambda x: x * odd, cf.Mesh(dp=2))(torch.ones(3, 3)))


def test_values_that_torch_marks_as_conjugated_or_negated() -> None:
    x = torch.complex(torch.ones(4, 2), torch.arange(8.0).view(4, 2)).conj()
    for y in (x, x.imag, x.mH):
        want = torch.view_as_real(y.resolve_conj()) if y.is_complex() else y * 2
        fn = torch.view_as_real if y.is_complex() else lambda z: z * 2
        cf.testing.compare(cf.shard(fn, cf.Mesh(dp=2))(y), want)


@pytest.mark.parametrize(
    ("kind", "message", "call"),
    [
        (cf.PlanError, "step.with_plan was given 'x', which is no plan. Try: cf.Plan", lambda: cf.shard(step, MESH).with_plan("x")),
        (cf.InputError, "step.init was given no argument to place. Try: step.init(state, *batch)", lambda: cf.shard(step, MESH).init()),
        (cf.InputError, "argnums=3 of a call with 2 positional arguments. Try: numbers from 0", lambda: cf.value_and_grad(step, 3)(1, 2)),
        (cf.InputError, "argnums=0 of a call with 0 positional arguments. Try: by position", lambda: cf.value_and_grad(step)()),
        (cf.CheckpointError, "there is no checkpoint at 'nowhere'. Try: a folder that cf.save has written", lambda: cf.load("nowhere")),
        (cf.CheckpointError, "no checkpoint matches 'nowhere-*'. Try: a name with *", lambda: cf.load("nowhere-*")),
        (
            cf.InputError,
            'one tensor alone has nothing that tells a loss to leave them out. Try: batches that are dicts, such as {"x": x}',
            lambda: list(cf.batches([torch.ones(3, 2)], cf.Mesh(dp=2), "(dp b) ...")),
        ),
    ],
)  # fmt: skip
def test_a_mistake_has_something_to_try(kind: Any, message: str, call: Callable[[], Any], tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    refuses(kind, message, call=call)
