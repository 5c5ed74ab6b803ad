"""cf.debug.print and tap: once a step, global values, the same numbers; what a traced value prints as."""

import inspect
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreter import run_reference

import colofunc as cf
from colofunc.executors.compiled import compile_segments
from colofunc.executors.launch import launch
from colofunc.executors.simulated import SimulatedProgram
from colofunc.program.tracing.trace import trace

MESHES = [cf.Mesh(dp=2, topology="ideal"), cf.Mesh(dp=2, tp=2, topology="ideal")]
SPECS = (None, "(dp b) i")


def arguments() -> tuple[Any, torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    return {"w": torch.randn(4, 4, dtype=torch.float64, generator=gen)}, torch.randn(8, 4, dtype=torch.float64, generator=gen)


def training(show: bool) -> Any:
    def step(state: Any, x: torch.Tensor) -> Any:
        def loss_fn(w: torch.Tensor) -> torch.Tensor:
            h = x @ w
            if show:
                cf.debug.print("sum {:.6f} of {}", h.sum(), tuple(h.shape))
                cf.debug.tap(h, "h")
            return (h**2).mean()

        loss, grad = cf.value_and_grad(loss_fn)(state["w"])
        if show:
            cf.debug.print("loss {loss:.6f} {{{lr}}}", loss=loss, lr=0.1)
            cf.debug.print("w {}", state["w"][0, 0])
        return {"w": state["w"] - 0.1 * grad}, loss

    return step


# ---- print ----


@pytest.mark.parametrize("mesh", MESHES)
def test_the_global_value_once_a_step(mesh: cf.Mesh, capsys: pytest.CaptureFixture[str]) -> None:
    state, x = arguments()
    training(True)(state, x)
    expected = capsys.readouterr().out
    assert re.fullmatch(r"sum -?\d+\.\d{6} of \(8, 4\)\nloss \d+\.\d{6} \{0\.1\}\nw -?\d+\.\d+\n", expected)
    step = cf.shard(training(True), mesh, in_specs=SPECS)
    placed = step.init(state, x)
    assert capsys.readouterr().out == ""  # not while tracing
    placed, _ = step(placed, x)
    assert _rounded(capsys.readouterr().out) == _rounded(expected)
    step(placed, x)
    assert capsys.readouterr().out.count("loss") == 1


def _rounded(text: str) -> str:
    return re.sub(r"\d+\.\d{7,}", lambda found: f"{float(found.group()):.6f}", text)


@pytest.mark.parametrize("mesh", MESHES)
def test_numbers_do_not_change(mesh: cf.Mesh) -> None:
    state, x = arguments()
    shown, plain = (cf.shard(training(show), mesh, in_specs=SPECS) for show in (True, False))
    for _ in range(2):
        (a, loss_a), (b, loss_b) = shown(state, x), plain(state, x)
        torch.testing.assert_close(a["w"].full(), b["w"].full(), rtol=0, atol=1e-12)
        torch.testing.assert_close(loss_a.full(), loss_b.full(), rtol=0, atol=1e-12)


def test_every_rank_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        cf.debug.print("{}", x + 1, ranks=True)
        return x.sum()

    x = torch.arange(8.0)
    cf.shard(step, MESHES[1], in_specs="(dp tp b)")(x)
    assert capsys.readouterr().out.splitlines() == [f"[rank {r}] tensor([{2 * r + 1}., {2 * r + 2}.])" for r in range(4)]
    step(x[:2])
    assert capsys.readouterr().out == "[rank 0] tensor([1., 2.])\n"


def test_equal_prints_stay_two_and_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        for text in ("a", "{}", "{}", "b"):
            cf.debug.print(text, x.sum()) if "{" in text else cf.debug.print(text)
        return x

    cf.shard(step, MESHES[0])(torch.ones(3))
    assert capsys.readouterr().out == "a\n3.0\n3.0\nb\n"


def test_in_a_gradient_by_torch_func(capsys: pytest.CaptureFixture[str]) -> None:
    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = cf.debug.tap(w * x, lambda v: print("tapped", v.tolist()))
        cf.debug.print("y {}", y.sum())
        return (y**2).sum()

    w, x = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    got = cf.shard(torch.func.grad(loss), MESHES[0])(w, x)
    assert torch.equal(got.full(), 2 * w * x * x)
    assert capsys.readouterr().out == "tapped [3.0, 8.0]\ny 11.0\n"


def test_the_gradient_of_an_activation_by_its_hook(capsys: pytest.CaptureFixture[str]) -> None:
    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        h = x @ w
        h.register_hook(lambda g: cf.debug.print("dh {:.2f}", g.sum()))
        return (h**2).sum()

    low = cf.shard(lambda w, x: cf.value_and_grad(loss)(w, x)[1], MESHES[1], in_specs=(None, "(dp b) i"))
    assert torch.equal(low(torch.ones(2, 2), torch.ones(4, 2)).full(), torch.full((2, 2), 16.0))
    assert capsys.readouterr().out == "dh 32.00\n"


def test_over_microbatches_it_is_still_the_global_value(capsys: pytest.CaptureFixture[str]) -> None:
    state, x = arguments()
    cf.accumulate(cf.shard(training(True), MESHES[0], in_specs=SPECS), microbatches=2)(state, x)
    staged = capsys.readouterr().out
    training(True)(state, x)
    assert _rounded(staged) == _rounded(capsys.readouterr().out)


def test_over_microbatches_every_rank_shows_all_of_its_rows(capsys: pytest.CaptureFixture[str]) -> None:
    def step(state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        cf.debug.print("{}", x * 2, ranks=True)
        return state + x.mean()

    x = torch.arange(8.0)
    cf.accumulate(cf.shard(step, MESHES[0], in_specs=(None, "(dp b)")), microbatches=2)(torch.zeros(()), x)
    assert capsys.readouterr().out.splitlines() == [f"[rank {r}] {x[4 * r : 4 * r + 4] * 2}" for r in range(2)]


def test_outside_of_a_step_a_dtensor_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    x = cf.distribute(torch.arange(4.0), "(dp b)", MESHES[0])
    cf.debug.print("{}", x)
    cf.debug.print("{}", x, ranks=True)
    assert capsys.readouterr().out == "tensor([0., 1., 2., 3.])\n[rank 0] tensor([0., 1.])\n[rank 1] tensor([2., 3.])\n"


def test_between_compiled_segments(capsys: pytest.CaptureFixture[str]) -> None:
    state, x = arguments()
    low = cf.shard(training(True), MESHES[0], in_specs=SPECS).lower(state, x)
    segmented, bound = compile_segments(low.program, "eager")
    assert [n.target for n in segmented.nodes].count("colofunc.debug") == 4
    inputs = [[state["w"].clone()] * 2, [x[:4], x[4:]]]
    if low.input_layouts[0].local_shape != (4, 4):
        inputs[0] = [state["w"][:2].clone(), state["w"][2:].clone()]
    SimulatedProgram(segmented, MESHES[0], bound)(inputs)
    assert capsys.readouterr().out.count("\n") == 3


def test_in_the_reference_interpreter(capsys: pytest.CaptureFixture[str]) -> None:
    state, x = arguments()
    run_reference(trace(training(True), (state, x)).program, [state["w"], x])
    assert capsys.readouterr().out.count("\n") == 3


def test_looking_into_a_step_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    step = cf.shard(training(True), MESHES[0])
    assert step.compare(*arguments()).equal
    assert step.lower(*arguments()).check_finite(*arguments()).finite
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda x: cf.debug.print("{} {}", x), "asks for a value, which was not given|asks for 'a value'"),
        (lambda x: cf.debug.print("{loss}", x), "'loss', which was not given"),
        (lambda x: cf.debug.print("{:.3f}", x), r"formats a tensor of shape \(3,\) as '.3f'"),
        (lambda x: cf.debug.print(x), "wants a text first"),
        (lambda x: cf.debug.tap(3, "x"), "wants a tensor, not int"),
        (lambda x: cf.debug.tap(x, 3), "a function or a name as its second argument, not int"),
    ],
)
def test_errors_say_what_to_do(call: Any, says: str) -> None:
    with pytest.raises(cf.InputError, match=says):
        call(torch.ones(3))
    with pytest.raises(cf.InputError, match=says):
        cf.shard(lambda x: (call(x), x)[1], MESHES[0])(torch.ones(3))


# ---- tap ----


@pytest.mark.parametrize("mesh", MESHES)
def test_tap_keeps_what_a_name_stands_for(mesh: cf.Mesh) -> None:
    state, x = arguments()
    step = cf.shard(training(True), mesh, in_specs=SPECS)
    with cf.debug.collect() as seen:
        step(state, x)
        step(state, 2 * x)
    assert list(seen) == ["h"]
    torch.testing.assert_close(seen["h"][0], x @ state["w"], rtol=0, atol=1e-12)
    torch.testing.assert_close(seen["h"][1], 2 * x @ state["w"], rtol=0, atol=1e-12)
    step(state, x)
    assert len(seen["h"]) == 2  # nothing is kept outside


def test_tap_by_rank_and_by_function() -> None:
    got: list[Any] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        return cf.debug.tap(x, lambda part, rank: got.append((rank, part.tolist())), ranks=True) + 1

    out = cf.shard(step, MESHES[0], in_specs="(dp b)")(torch.arange(4.0))
    assert got == [(0, [0.0, 1.0]), (1, [2.0, 3.0])] and out.full().tolist() == [1.0, 2.0, 3.0, 4.0]


def test_what_was_tapped_outlives_the_update_in_place() -> None:
    def step(state: Any, x: torch.Tensor) -> Any:
        cf.debug.tap(state["w"], "before")
        return {"w": state["w"] + x.sum()}, x

    staged = cf.shard(step, MESHES[0])
    placed = staged.init({"w": torch.zeros(4)}, torch.ones(2))
    with cf.debug.collect() as seen:
        for _ in range(3):
            placed, _ = staged(placed, torch.ones(2))
    assert [v[0].item() for v in seen["before"]] == [0.0, 2.0, 4.0]


# ---- a traced value explains itself ----


def explains(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    texts.append(f"{y} {x!s} {y.sum():.3f} {[y]}")
    return y


texts: list[str] = []


def test_formatting_a_traced_value() -> None:
    texts.clear()
    cf.shard(explains, MESHES[0])(torch.ones(8, 2))
    line = inspect.getsourcelines(explains)[1] + 1
    way = "its value is not known while tracing, use cf.debug.print>"
    y = f"<traced float32 (8, 2) at test_debug.py:{line} in explains; {way}"
    assert texts[0] == f"{y} <traced float32 (8, 2) 'x'; {way} <traced float32 () at test_debug.py:{line + 1} in explains; {way} [{y}]"


@pytest.mark.parametrize("ask", [float, lambda x: x.item(), lambda x: 1 if x > 0 else 2, lambda x: x.tolist(), int])
def test_asking_for_a_number_names_the_line_and_the_ways_out(ask: Any) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        ask(x.sum())
        return x

    with pytest.raises(cf.TraceError, match=r"at test_debug\.py:\d+ in .*torch\.where.*cf\.debug\.print"):
        cf.shard(step, MESHES[0])(torch.ones(3))


# ---- real ranks ----


def on_two_ranks(stdout: str) -> Any:
    os.dup2(os.open(stdout, os.O_WRONLY | os.O_APPEND | os.O_CREAT), 1)  # what a process prints, whoever started it
    mesh = MESHES[0]
    got: list[Any] = []

    def step(state: Any, x: torch.Tensor) -> Any:
        out = training(True)(state, x)
        cf.debug.tap(x, lambda part, rank: got.append((rank, part.sum().item())), ranks=True)
        return out

    state, x = arguments()
    with cf.debug.collect() as seen:
        staged = cf.shard(step, mesh, in_specs=SPECS)
        for _ in range(2):
            staged(state, x)
    return [v.tolist() for v in seen.get("h", [])], got


@pytest.mark.dist
def test_real_ranks_show_on_the_main_one(tmp_path: Path) -> None:
    state, x = arguments()
    (seen, mine), (nothing, other) = launch(on_two_ranks, 2, str(tmp_path / "stdout"), timeout_s=120)
    torch.testing.assert_close(torch.tensor(seen, dtype=torch.float64), (x @ state["w"]).expand(2, -1, -1), rtol=0, atol=1e-12)
    assert nothing == []
    assert mine == [(0, x[:4].sum().item())] * 2 and other == [(1, x[4:].sum().item())] * 2
    assert (tmp_path / "stdout").read_text().count("loss") == 2
