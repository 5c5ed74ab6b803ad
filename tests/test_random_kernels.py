"""Random numbers on a card: the CPU's bits, one launch each, nothing that the host waits for."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pretended import Machine, on_card

import colofunc as cf
from colofunc.ops import random as R
from colofunc.ops import random_kernels, triton_use
from colofunc.ops.kernels import PlannedKernel

SEED = torch.tensor(5)
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
DRAWS = {
    "bits": lambda seed, *place: R.random_bits.kernel(seed, 3, (4, 12), *place),
    "uniform": lambda seed, *place: R.random_uniform.kernel(seed, 3, (4, 12), torch.bfloat16, *place),
    "normal": lambda seed, *place: R.random_normal.kernel(seed, 3, (4, 12), torch.float32, *place),
    "bernoulli": lambda seed, *place: R.random_bernoulli.kernel(seed, 3, (4, 12), torch.bool, 0.9, *place),
}
PLACES = {"whole": (), "right half": ((4, 12), (24, 1), torch.tensor(12)), "striped": ((4, 12), (24, 2), torch.tensor(1))}


def test_the_kernels_give_the_bits_of_the_cpu() -> None:
    """In Triton's interpreter: generated shapes, parts, memory orders, dtypes and probabilities."""
    pytest.importorskip("triton")
    script = Path(__file__).with_name("random_interpreted.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("arch", [80, 90])
def test_the_kernels_are_compiled_for_a_card(arch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the arguments that a launch has; loads and stores of a contiguous tensor have 16 bytes."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    from colofunc.ops import random_triton

    if random_triton.keep_kernel.__class__.__name__ != "JITFunction":
        pytest.skip("Triton's interpreter is on")
    card = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", arch, 32), get_current_device=lambda: arch, get_current_stream=lambda device: 0
    )  # fmt: skip
    monkeypatch.setattr(triton.runtime.driver, "_active", card)
    made = []
    for kernel in (random_triton.numbers_kernel, random_triton.keep_kernel):

        def compiled(*args, run=kernel.run, **options):
            made.append(run(*args, **{**options, "warmup": True}))

        monkeypatch.setattr(kernel, "run", compiled)
    monkeypatch.setattr(random_kernels, "launch", random_triton.fill)
    x = torch.zeros(64, 1024, dtype=torch.bfloat16)
    random_kernels.dropout(x, SEED, 3, 0.1, ((), (), None))
    if arch == 90:
        random_kernels.dropout(x, SEED, 3, 0.1, ((64, 1024), (2048, 1), torch.tensor(8)))
        random_kernels.numbers("normal", SEED, 3, (64,), torch.float32, ((), (), None))
        random_kernels.dropout(torch.zeros(2, 3, 5, 7).permute(3, 1, 0, 2), SEED, 3, 0.1, ((), (), None))
    assert made and all(kernel.asm["cubin"] for kernel in made)
    text = made[0].asm["ptx"]
    assert "ld.global.v4.b32" in text and "st.global.v4.b32" in text


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_is_one_launch_that_nobody_waits_for(name: str, where: str) -> None:
    draw, place = DRAWS[name], PLACES[where]
    with Machine() as machine:
        seed = machine.to_card(SEED)
        machine.forget_counts()
        made = draw(seed, *place)
        assert sum(machine.launches.values()) == 1 and not machine.waits and not machine.copies
        assert torch.equal(made.cpu(), draw(SEED, *place))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("order", ["contiguous", "transposed", "sliced", "expanded"])
def test_dropout_is_one_launch_whatever_the_memory_order(order: str, dtype: torch.dtype) -> None:
    make = {
        "contiguous": lambda x: x, "transposed": lambda x: x.t(), "sliced": lambda x: x[1:, 2:], "expanded": lambda x: x[:1].expand(6, 16)
    }[order]  # fmt: skip
    values = torch.randn(6, 16).to(dtype)
    with Machine() as machine:
        x, seed = make(machine.to_card(values)), machine.to_card(SEED)
        machine.forget_counts()
        made = R.dropout.kernel(x, seed, 3, 0.1)
        want = R.dropout.kernel(make(values), SEED, 3, 0.1)
        assert sum(machine.launches.values()) == 1 and not machine.waits and made.stride() == want.stride()
        assert torch.equal(made.cpu(), want)


def test_a_card_without_triton_gives_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_use, "has_triton", lambda: False)
    with Machine() as machine:
        seed = machine.to_card(SEED)
        for draw in DRAWS.values():
            assert torch.equal(draw(seed, *PLACES["striped"]).cpu(), draw(SEED, *PLACES["striped"]))
        assert not machine.waits.keys() - {"copy to the host"}


def test_a_card_on_which_triton_launches_nothing_gives_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there is no C compiler."""
    with Machine() as machine:
        monkeypatch.setattr(triton_use, "_compiles", lambda device: False)
        seed = machine.to_card(SEED)
        for draw in DRAWS.values():
            assert torch.equal(draw(seed, *PLACES["striped"]).cpu(), draw(SEED, *PLACES["striped"]))
        assert not [launch for launch in machine.launches if launch.startswith("random")]
        monkeypatch.undo()


def test_dropout_in_a_step_is_a_launch_forward_and_one_backward_and_keeps_no_mask() -> None:
    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x * w, 0.5).square().sum()

    def step(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(loss)(w, x)

    w, x = torch.randn(64), torch.randn(32, 64)
    with cf.random(0):
        want = cf.shard(step, cf.Mesh())(w, x)
    with Machine() as machine, cf.random(0):
        staged = cf.shard(step, cf.Mesh(device="cuda"))
        given = on_card(machine, (w, x))
        staged(*given)
        machine.forget_counts()
        with cf.random(0):
            made = staged(*given)
        assert machine.launches["random keep"] == 2 and not machine.waits
        assert not [node for node in staged.lower(*given).program.nodes if "bernoulli" in node.target]
        assert torch.equal(made.full().cpu(), want.full())


def test_seeds_of_the_host_are_not_sent() -> None:
    with Machine() as machine:
        x = machine.to_card(torch.ones(40))
        machine.forget_counts()
        made = R.dropout.kernel(x, SEED, 3, 0.1, (40,), (1,), torch.tensor(7))
        assert machine.copies == 0 and not machine.waits
        assert torch.equal(made.cpu(), R.dropout.kernel(torch.ones(40), SEED, 3, 0.1, (40,), (1,), torch.tensor(7)))


def test_attention_blocks_have_their_mask_by_one_launch() -> None:
    dims = (torch.tensor([0, 40, 80]), torch.arange(3, 20))
    want = R.keep_mask(SEED, 3, 0.3, dims)
    with Machine() as machine:
        seed, given = machine.to_card(SEED), tuple(map(machine.to_card, dims))
        machine.forget_counts()
        made = R.keep_mask(seed, 3, 0.3, given)
        assert sum(machine.launches.values()) == 1 and torch.equal(made.cpu(), want)


def test_a_plan_counts_one_launch_and_no_memory_of_its_own() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.dropout(x + torch.rand_like(x) + torch.randn_like(x), 0.1)
        return y * torch.bernoulli(torch.full_like(x, 0.5), 0.5) + torch.randperm(x.shape[1])

    def planned(rows: int) -> dict[str, PlannedKernel]:
        low = cf.shard(step, cf.Mesh(topology="8xh100")).lower(torch.zeros(rows, 1024, dtype=torch.bfloat16))
        return {node.target: node.kernel for node in low.program.nodes if node.target in random_kernels.OPERATIONS}

    few, many = planned(1), planned(4096)
    assert few.keys() == set(random_kernels.OPERATIONS) and all(kernel.workspace_bytes == 0 for kernel in many.values())
    for target in few.keys() - {"colofunc.random_bits"}:
        assert 0 < few[target].seconds < 2e-5 and few[target].seconds < many[target].seconds < 1e-3
