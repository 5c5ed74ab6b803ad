"""A layer of an LSTM along its sequence, as one operator.

Problem: torch computes an LSTM by a kernel that only a CPU has (oneDNN), only a GPU has (cuDNN), or by a dozen
operators for each place of the sequence, which for 512 places are more than a planner wants to see. Idea: what does not
depend on the place before it is an ordinary product (`linear` of the whole input; the gradients of all weights), and
the rest is one operator with a gradient, made of operators that every device has. Samples know nothing of one another,
so they split over ranks.

    gates, h0, c0, w_hh  ->  h, c_n, c, a          s b g, b h, b h, g h -> s b h, b h, s b h, s b g      with g = 4 h

gates: x W_ih^T + b_ih + b_hh, in the order in, forget, cell, out. c and a are the cells and the gates as they were
opened, for the gradient. Source: Hochreiter and Schmidhuber, Long short-term memory (1997), with Gers' forget gate
(2000), as `torch.nn.LSTM` has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from colofunc.errors import InputError, TraceError
from colofunc.ops.define import define
from colofunc.ops.facts import Facts
from colofunc.ops.linear import linear, linear_dw

Three = tuple[Tensor, Tensor, Tensor]
Four = tuple[Tensor, Tensor, Tensor, Tensor]


def _lstm(gates: Tensor, h0: Tensor, c0: Tensor, w: Tensor) -> Four:
    steps, size = gates.shape[0], h0.shape[1]
    opened = torch.empty_like(gates, memory_format=torch.contiguous_format)
    out = gates.new_empty((steps, *h0.shape))
    cells = torch.empty_like(out)
    h, c, w_t = h0, c0, w.t()
    for t in range(steps):
        a = torch.addmm(gates[t], h, w_t, out=opened[t])
        a[:, : 2 * size].sigmoid_()
        a[:, 2 * size : 3 * size].tanh_()
        a[:, 3 * size :].sigmoid_()
        enter, forget, cell, leave = a.split(size, 1)
        c = torch.mul(forget, c, out=cells[t]).addcmul_(enter, cell)
        h = torch.tanh(c, out=out[t]).mul_(leave)
    return out, c.clone(), cells, opened


def _lstm_fake(gates: Tensor, h0: Tensor, c0: Tensor, w: Tensor) -> Four:
    size = h0.shape[-1]
    fits = gates.dim() == 3 and h0.dim() == 2 and gates.shape[1:] == (h0.shape[0], 4 * size)
    if not fits or c0.shape != h0.shape or w.shape != (4 * size, size):
        raise InputError(
            f"lstm: gates {tuple(gates.shape)}, h {tuple(h0.shape)}, c {tuple(c0.shape)} and w_hh {tuple(w.shape)} are "
            "not (s, b, 4 h), (b, h), (b, h), (4 h, h). Try: an input and states as torch.nn.LSTM takes them"
        )
    out = gates.new_empty((gates.shape[0], *h0.shape))
    return (
        out,
        torch.empty_like(c0, memory_format=torch.contiguous_format),
        torch.empty_like(out),
        gates.new_empty(gates.shape),
    )


def _lstm_backward(grad: Tensor, grad_c: Tensor, c0: Tensor, w: Tensor, cells: Tensor, opened: Tensor) -> Three:
    """Gradients of gates, h0 and c0. What does not depend on the place behind it is computed for all places at once."""
    steps, (rows, size) = cells.shape[0], c0.shape
    enter, forget, cell, leave = opened.split(size, 2)
    tanh = cells.tanh()
    before = torch.cat((c0.unsqueeze(0), cells[:-1]))
    through = leave * (1 - tanh * tanh)  # d h / d c
    slope = torch.empty_like(opened).view(steps, rows, 4, size)  # of the cell by its three gates, and of h by the last
    slope[:, :, 0] = cell * enter * (1 - enter)
    slope[:, :, 1] = before * forget * (1 - forget)
    slope[:, :, 2] = enter * (1 - cell * cell)
    slope[:, :, 3] = tanh * leave * (1 - leave)
    out = torch.empty_like(slope)
    dh, dc = torch.zeros_like(c0), grad_c
    for t in reversed(range(steps)):
        dh = dh + grad[t]
        dc = torch.addcmul(dc, dh, through[t])
        torch.mul(slope[t, :, :3], dc.unsqueeze(1), out=out[t, :, :3])
        torch.mul(slope[t, :, 3], dh, out=out[t, :, 3])
        dc = dc * forget[t]
        dh = out[t].view(rows, 4 * size) @ w
    return out.view(steps, rows, 4 * size), dh, dc if steps else dc.clone()


def _lstm_backward_fake(grad: Tensor, grad_c: Tensor, c0: Tensor, w: Tensor, cells: Tensor, opened: Tensor) -> Three:
    return opened.new_empty(opened.shape), c0.new_empty(c0.shape), c0.new_empty(c0.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Four) -> None:
    _, h0, c0, w = inputs
    out, _, cells, opened = output
    ctx.save_for_backward(h0, c0, w, out, cells, opened)


def _gradient(ctx: Any, grad: Tensor, grad_c: Tensor, *unused: Tensor) -> tuple[Any, ...]:
    h0, c0, w, out, cells, opened = ctx.saved_tensors
    d_gates, d_h, d_c = lstm_backward.apply(grad, grad_c, c0, w, cells, opened)
    d_w = linear_dw.apply(d_gates, torch.cat((h0.unsqueeze(0), out[:-1]))) if ctx.needs_input_grad[3] else None
    return d_gates, d_h, d_c, d_w


def _no_gradient(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    raise TraceError(
        "nn.LSTM has no second derivative in a step. Try: a gradient penalty of another layer, nn.LSTMCell in a loop, "
        "or without create_graph=True"
    )


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    return None


lstm = define(
    "lstm(Tensor gates, Tensor h0, Tensor c0, Tensor w) -> (Tensor, Tensor, Tensor, Tensor)", _lstm, _lstm_fake, (_save, _gradient),
    facts=Facts(product=True, weights=(3,)),
)  # fmt: skip
lstm_backward = define(
    "lstm_backward(Tensor grad, Tensor grad_c, Tensor c0, Tensor w, Tensor cells, Tensor opened) -> (Tensor, Tensor, "
    "Tensor)",
    _lstm_backward, _lstm_backward_fake, (_save_nothing, _no_gradient), facts=Facts(product=True),
)  # fmt: skip


def layer(x: Tensor, h0: Tensor, c0: Tensor, weights: Sequence[Tensor], backwards: bool) -> Three:
    """One layer in one direction. x (s, b, i), h0 and c0 (b, h), weights as torch orders them -> out (s, b, h), h_n,
    c_n (b, h).
    """
    w_ih, w_hh, *biases = weights
    gates = linear.apply(x, w_ih, biases[0] + biases[1] if biases else None)
    gates = gates.flip(0) if backwards else gates
    out, c_n, _, _ = lstm.apply(gates, h0, c0, w_hh)
    h_n = out[-1]
    return out.flip(0) if backwards else out, h_n, c_n
