"""A CUDA device that is not there: strict, and late.

Tests of what happens on a card, on a machine that has none. `Machine` says where; its tensors follow torch's rules of devices, dtypes and
strides, its work runs as late and in as random an order as streams and events allow, and memory is given out again as soon as it may be.

    with Machine(seed=0) as machine:
        step = cf.shard(step_fn, cf.Mesh(device="cuda"))

`streams`: what runs when. `memory`: what lies where. `tensors`: what an operator does. `kernels`: what only a card has. `machine`: what
`torch.cuda` says. Autograd is not there: torch's engine asks a real device; what the project runs is traced before.
"""

from pretended.machine import Machine, on_card
from pretended.tensors import OnCard

__all__ = ["Machine", "OnCard", "on_card"]
