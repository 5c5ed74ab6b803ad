"""Real ranks over gloo: the same numbers as the simulated mesh, and ends that do not hang.

Each process that is started anew imports for four seconds: one launch (`as_users_start`) and torchrun do, the other launches are forked
from a server that has.
"""

import subprocess
import sys
import time

import pytest
import torch
from test_executors import program

from colofunc.errors import CollectiveError, FaultError
from colofunc.executors.backend import backend_for
from colofunc.executors.distributed import broadcast_object
from colofunc.executors.faults import fail
from colofunc.executors.launch import launch
from colofunc.executors.simulated import SimulatedProgram
from colofunc.mesh import Mesh
from colofunc.program.ir import Ref
from colofunc.program.passes.schedule import overlap

pytestmark = pytest.mark.dist
R = Ref
MESH = Mesh(dp=2, tp=2)


def many_collectives(dtype=torch.float64):
    """Every collective over both axes, and over both at once in either order."""
    nodes, shapes = [], [(4, 4, 3)]
    outputs = []

    def add(target, args, shape):
        shapes.append(shape)
        nodes.append((target, args, (len(shapes) - 1,)))
        outputs.append(len(shapes) - 1)
        return R(len(shapes) - 1)

    for axes, n in ((("dp",), 2), (("tp",), 2), (("tp", "dp"), 4), (("dp", "tp"), 4)):
        x = add("colofunc.rearrange", (R(0), "(a b) c d -> a c (b d)", ("a",), (n,)), (n, 4, 12 // n))
        one = add("colofunc.reduce_scatter", (x, axes, n, "sum"), (4, 12 // n))
        add("colofunc.all_gather", (one, axes, n), (n, 4, 12 // n))
        add("colofunc.all_to_all", (x, axes, n), (n, 4, 12 // n))
        add("colofunc.all_reduce", (one, axes, n, "max"), (4, 12 // n))
        add("colofunc.permute", (one, axes, n, (*range(1, n), 0)), (4, 12 // n))
        add("colofunc.take_shard", (x, axes, n), (4, 12 // n))
        add("colofunc.keep_first", (one, axes, n, "sum"), (4, 12 // n))
        add("colofunc.axis_index", (axes,), ())
    return program([0], nodes, outputs, shapes)


def inputs(rank):
    return torch.randn(4, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def run_collectives():
    backend = backend_for(MESH)
    assert backend.name == "distributed"
    p = many_collectives()
    (rank,) = backend.ranks(MESH)
    plain = backend.run(p, MESH, [[inputs(rank)]])
    split = backend.run(overlap(p), MESH, [[inputs(rank)]])
    return [x[0] for x in plain], [x[0] for x in split]


def test_collectives_equal_the_simulated_mesh():
    want = SimulatedProgram(many_collectives(), MESH)([[inputs(r) for r in range(4)]])
    for rank, (plain, split) in enumerate(launch(run_collectives, 4, timeout_s=90)):
        for w, a, b in zip(want, plain, split, strict=True):
            torch.testing.assert_close(a, w[rank])
            torch.testing.assert_close(b, w[rank])


def gather(dtype, how):
    mesh = Mesh(dp=2)
    x = torch.arange(6).reshape(3, 2).to(dtype)
    p = program([0], [("colofunc.all_gather", (R(0), ("dp",), 2), (1,)), ("colofunc.all_reduce", (R(0), ("dp",), 2, how), (2,))],
                [1, 2], [(3, 2), (2, 3, 2), (3, 2)])  # fmt: skip
    gathered, reduced = backend_for(mesh).run(p, mesh, [[x]])
    return gathered[0], reduced[0]


def gather_all():
    dtypes = [torch.bool, torch.bfloat16, torch.int64, torch.int16, torch.complex64]
    results = [gather(d, "max" if d is torch.bool else "sum") for d in dtypes]
    return results, broadcast_object(torch.distributed.get_rank() + 7)


def test_dtypes_and_objects(as_users_start):
    for result, broadcast in launch(gather_all, 2, timeout_s=90):
        assert broadcast == 7
        for gathered, reduced in result:
            x = torch.arange(6).reshape(3, 2).to(gathered.dtype)
            assert torch.equal(gathered, torch.stack([x, x]))
            assert torch.equal(reduced, x if x.dtype is torch.bool else x + x)


def other_program_on_rank_1():
    mesh = Mesh(dp=2)
    backend = backend_for(mesh)
    n = 3 + backend.rank
    p = program([0], [("colofunc.all_gather", (R(0), ("dp",), 2), (1,))], [1], [(n,), (2, n)])
    backend.run(p, mesh, [[torch.zeros(n, dtype=torch.float64)]])


def test_ranks_that_run_different_programs_say_so():
    with pytest.raises(CollectiveError, match=r"the lowered program differs between ranks: ranks \[1\]"):
        launch(other_program_on_rank_1, 2, timeout_s=90)


def fails_on_rank_1():
    mesh = Mesh(dp=2)
    p = program([0], [("colofunc.all_gather", (R(0), ("dp",), 2), (1,))], [1], [(3,), (2, 3)])
    run = backend_for(mesh).compile(p, mesh)
    x = [[torch.ones(3, dtype=torch.float64)]]
    run(x)
    with fail(rank=1, at="all_gather"):
        run(x)


def test_a_failing_rank_ends_all():
    began = time.monotonic()
    with pytest.raises(FaultError) as caught:
        launch(fails_on_rank_1, 2, timeout_s=90)
    assert "on rank 1" in caught.value.__notes__[-1] and "Traceback" in caught.value.__notes__[-1]
    assert time.monotonic() - began < 60  # ten seconds after the failure


def waits_for_ever():
    if torch.distributed.get_rank() == 1:
        time.sleep(60)
    return 1


def test_launch_has_a_deadline():
    with pytest.raises(CollectiveError, match=r"ranks \[(0, )?1\] had not ended after 5 s"):
        launch(waits_for_ever, 2, timeout_s=5)


SCRIPT = """
import torch, colofunc.ops.linear
from colofunc.mesh import Mesh
from colofunc.executors.backend import backend_for
from test_executors import program
from test_distributed import R, fail
mesh = Mesh(dp=-1)
backend = backend_for(mesh)
p = program([0], [("colofunc.all_gather", (R(0), ("dp",), 2), (1,))], [1], [(3,), (2, 3)])
x = torch.full((3,), float(backend.rank), dtype=torch.float64)
print(f"{backend.name} {backend.run(p, mesh, [[x]])[0][0].sum().item()}\\n", end="", flush=True)  # one write
if FAIL:
    try:
        with fail(rank=1, at="all_gather"):
            backend.run(p, mesh, [[x]])
    except Exception:
        import time; time.sleep(100)      # the watch, not this rank's exit, must end the other one
"""


@pytest.mark.parametrize("failing", [False, True])
def test_torchrun(failing, tmp_path, subprocess_env):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("FAIL", str(failing)))
    env = {**subprocess_env, "PYTHONPATH": subprocess_env["PYTHONPATH"] + ":" + str(__file__).rsplit("/", 1)[0]}
    began = time.monotonic()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = [*torchrun, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(script)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=90)
    assert done.stdout.count("distributed 3.0") == 2
    assert (done.returncode != 0) is failing
    if failing:
        assert "ends because rank 1 failed" in done.stderr and "FaultError" in done.stderr
        assert time.monotonic() - began < 60
