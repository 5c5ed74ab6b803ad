"""Generated programs of operators, views and in-place writes against torch itself. A failure prints the program and its seed."""

import copy
from typing import Any

import pytest
import random_programs
import torch
from interpreter import run_reference
from random_programs import RandomProgram

import colofunc as cf
from colofunc.program.passes.simplify import simplify
from colofunc.program.tracing.trace import trace

f64 = torch.float64


def assert_equal(program: RandomProgram, got: dict[str, Any], stage: str) -> None:
    for name, want in program(*program.inputs).items():
        same = got[name].shape == want.shape and got[name].dtype == want.dtype
        assert same and torch.allclose(got[name], want, rtol=1e-10, atol=1e-10), f"{name} differs, {stage}:\n{program}"


def check_traced(seed: int, lines: Any = random_programs.LINES) -> None:
    program = random_programs.draw(seed, lines=lines)
    traced = trace(program, program.inputs)
    inputs = [random_programs.in_other_memory(x, seed % 8) for x in program.inputs]
    for stage, global_program in (("traced", traced.program), ("simplified", simplify(traced.program))):
        assert_equal(program, traced.unpack(run_reference(global_program, inputs)), stage)


@pytest.mark.parametrize("first", range(0, 80, 20))
def test_a_traced_program_computes_what_torch_does(first: int) -> None:
    for seed in range(first, first + 20):
        check_traced(seed)


@pytest.mark.sweep
@pytest.mark.parametrize("first", range(10_000, 14_000, 200))
def test_many_traced_programs(first: int) -> None:
    for seed in range(first, first + 200):
        check_traced(seed, random_programs.LINES + random_programs.MEMORY)


# ---- what such programs have found ----


def _copy_of_windows(x: torch.Tensor) -> Any:
    y = x.unfold(0, 2, 1).clone()
    y[1:] += 1
    return y


def _copy_of_rows(x: torch.Tensor) -> Any:
    y = x.expand(3, 3, 4).contiguous()
    y[0].mul_(2)
    y.diagonal().zero_()
    return y


def _part_of_windows(x: torch.Tensor) -> Any:
    y = x.clone()
    y.unfold(1, 2, 1)[:, 0, 1].mul_(3)
    return y


def _part_of_repeated_rows(x: torch.Tensor) -> Any:
    y = x.clone()
    z = y.expand(2, 3, 4)
    z[1, 0] = 0.5
    z[0].diagonal().add_(1)
    return y, z


def _strides_of_another_dtype(x: torch.Tensor) -> Any:
    return x.view(torch.int64).as_strided((2, 2), (1, 4), 3)


def _strides_of_a_number_in_another_dtype(x: torch.Tensor) -> Any:
    y = x[0].sum()
    y.view(torch.int64).as_strided((), (), 0).add_(1)
    return y, y.view(torch.int64).as_strided((1,), (1,)), y.view(torch.int64).as_strided((2, 1), (0, 1))


def _strides_in_place(x: torch.Tensor) -> Any:
    y = x.clone()
    z = y[1:]
    z.as_strided_((4, 3), (1, 4), 0)
    z.mul_(2)
    return y, z


def _odd_strides(x: torch.Tensor) -> Any:
    y = x.clone()
    y.as_strided((2, 4), (3, 2), 1).neg_()
    return y


def _smaller_in_place(x: torch.Tensor) -> Any:
    y = x.clone()
    z = y[1:]
    z.resize_(2, 2)
    z.add_(1)
    return y, z


def _other_memory(x: torch.Tensor) -> Any:
    y, z = x.clone(), x * 2
    v = y[0]
    y.set_(z)
    y[:1].add_(1)
    return y, z, v


def _parts_that_autograd_takes_for_copies(x: torch.Tensor) -> Any:
    y = x.clone()
    y.unsafe_chunk(2, 1)[1].mul_(3)
    y.unsafe_split(2)[0].add_(1)
    y.unsafe_split_with_sizes([1, 2])[1].neg_()
    return y


def _conjugate(x: torch.Tensor) -> Any:
    c = torch.complex(x, x * 2)
    d = c.conj()
    d.imag.add_(1)
    d.mT[0].mul_(1j)
    return c.imag, d.imag, torch.view_as_real(d * 1), torch._neg_view(c.real) + 1


def _gradient_beside_a_complex_number(x: torch.Tensor) -> Any:
    w = x.clone().requires_grad_()
    c = torch.complex(w, w * 2)
    (c * torch.exp(1j * c.real)).real.pow(2).sum().backward()
    return w.grad


def _deep_copies(x: torch.Tensor) -> Any:
    both = {"y": x.clone(), "z": x * 2}
    both["again"] = both["y"]
    copies = copy.deepcopy(both)
    copies["y"][0] = 1
    return both["y"], copies["again"], copies["z"]


def _bits_in_place(x: torch.Tensor) -> Any:
    y = (x * 10).long()
    y <<= 2
    y[0] ^= 3
    y[1] >>= 1
    mask = x > 0
    mask[0] &= mask[1]
    mask[:, 1] |= ~mask[:, 2]
    return y, mask


@pytest.mark.parametrize(
    "fn",
    [
        _copy_of_windows, _copy_of_rows, _part_of_windows, _part_of_repeated_rows, _strides_of_another_dtype,
        _strides_of_a_number_in_another_dtype, _strides_in_place,
        _odd_strides, _smaller_in_place, _other_memory, _parts_that_autograd_takes_for_copies, _conjugate,
        _gradient_beside_a_complex_number, _deep_copies, _bits_in_place,
    ],
)  # fmt: skip
def test_memory_of_views_and_copies(fn: Any) -> None:
    x = torch.randn(3, 4, dtype=f64)
    want = fn(x)
    cf.testing.compare(cf.shard(fn, cf.Mesh(dp=1))(x), want)


def test_memory_that_no_program_can_express_is_refused() -> None:
    def larger(x: torch.Tensor) -> Any:
        return x.clone().resize_(30)

    def shared(x: torch.Tensor) -> Any:
        return x.clone().expand(2, 3, 4).add_(1)

    def strides(x: torch.Tensor) -> Any:
        return x.as_strided((2, 2), (1, 2))

    ones = torch.ones(3, 4)
    for fn, x, words in (
        (larger, ones, "larger than its memory; make a new tensor"),
        (shared, ones, "share memory .*clone it first"),
        (strides, ones.t(), "input 'x', which is not contiguous"),
    ):
        with pytest.raises(cf.ColofuncError, match=rf"test_random_programs.py:\d+ in .*{words}"):
            cf.shard(fn, cf.Mesh(dp=1))(x)
