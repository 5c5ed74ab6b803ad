"""Programs, plans and records from files that somebody crafted: a named error, and nothing of theirs is run."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import save_file

import colofunc as cf
from colofunc import untrusted
from colofunc.errors import ProgramError
from colofunc.executors.backend import Compiled, SimulatedBackend
from colofunc.program.check import check_program
from colofunc.program.ir import Node, Program, Ref

# ---- names in a program ----


def lowered() -> Program:
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.softmax(x.cumsum(dim=1), dim=-1).sum(dim=0)

    return cf.shard(step, cf.Mesh(dp=2)).lower(torch.ones(4, 3)).program


def with_first(program: Program, change: Callable[[Node], Node]) -> Program:
    """The program with its first operator of aten changed."""
    at = next(k for k, node in enumerate(program.nodes) if node.target.startswith("aten.") and node.refs)
    nodes = list(program.nodes)
    nodes[at] = change(nodes[at])
    return attrs.evolve(program, nodes=tuple(nodes))


HARM = "__import__('os').system('touch {}/harm')"
CRAFTED: dict[str, Callable[[Node, str], Node]] = {
    "a keyword": lambda node, harm: attrs.evolve(node, kwargs=((f"dtype={harm}, dtype", None),)),
    "a keyword with a line": lambda node, harm: attrs.evolve(node, kwargs=((f"dtype=None)\n    {harm}\n    (None", None),)),
    "a result": lambda node, harm: attrs.evolve(node, outs=(f"1 = {harm}; v2",)),  # type: ignore[arg-type]
    "an operand": lambda node, harm: attrs.evolve(node, args=(Ref(f"1) or {harm}"), *node.args[1:])),  # type: ignore[arg-type]
    "a file": lambda node, harm: attrs.evolve(node, target="aten.from_file.default", args=("harm", True, 9), kwargs=()),
    "a pickle": lambda node, harm: attrs.evolve(node, target="aten.save.default", args=(node.args[0], "harm"), kwargs=()),
    "no operator": lambda node, harm: attrs.evolve(node, target="load_library.__call__.__call__"),
}


@pytest.mark.parametrize("what", CRAFTED)
@pytest.mark.parametrize("backend", [SimulatedBackend, lambda: Compiled(SimulatedBackend(), "eager")])
def test_a_crafted_program_is_refused_where_its_source_is_written(tmp_path, monkeypatch, what, backend) -> None:
    """Whoever runs a program need not have checked it."""
    monkeypatch.chdir(tmp_path)
    program = with_first(lowered(), lambda node: CRAFTED[what](node, HARM.format(tmp_path)))
    inputs = [tuple(torch.ones(program.values[id].shape) for _ in range(2)) for id in program.inputs]
    with pytest.raises(ProgramError):
        backend().run(program, cf.Mesh(dp=2), inputs)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("what", ["a keyword", "a result", "an operand", "a file"])
def test_a_crafted_program_is_refused_when_it_is_checked(tmp_path, what) -> None:
    program = with_first(lowered(), lambda node: CRAFTED[what](node, HARM.format(tmp_path)))
    with pytest.raises(ProgramError):
        check_program(program)


# ---- records ----


@attrs.frozen
class Inner:
    name: str
    sizes: tuple[int, ...]
    bounds: tuple[float, float] = (0.0, 1.0)


@attrs.frozen
class Outer:
    inner: tuple[Inner, ...]
    note: str | None = None


BAD: list[tuple[Any, str]] = [
    ([], r"top is \[\]; it must be of type dict"),
    ({}, "top lacks the field 'inner'"),
    ({"inner": [], "nte": 1}, "top has an unknown field 'nte'; did you mean 'note'"),
    ({"inner": [{"name": "a", "sizes": [1, True]}]}, r"top.inner\[0\].sizes\[1\] is True; it must be of type int"),
    ({"inner": [{"name": "a", "sizes": [1 << 70]}]}, r"sizes\[0\] is .*; it must be of type int"),
    ({"inner": [{"name": "a", "sizes": [], "bounds": [1]}]}, "bounds has 1 values; it must have 2"),
    ({"inner": [{"name": "a", "sizes": [], "bounds": [1, 10**400]}]}, r"bounds\[1\] is .*; it must be of type int or float"),
    ({"inner": [], "note": 3}, "top.note is 3; it must be of type str"),
]


@pytest.mark.parametrize(("data", "says"), BAD)
def test_the_first_value_that_is_something_else_is_named(data: Any, says: str) -> None:
    with pytest.raises(untrusted.Wrong, match=says):
        untrusted.build(Outer, data, "top")


def test_records_come_back() -> None:
    made = Outer((Inner("a", (1, 2), (0.5, 2)),), "n")
    assert untrusted.build(Outer, json.loads(json.dumps(attrs.asdict(made))), "top") == made
    assert untrusted.build(Inner, {"name": "a", "sizes": [], "bounds": ["all", 1]}, "top", infinity="all").bounds[0] == float("inf")


@pytest.mark.parametrize("text", ["", "{", "[NaN]", "[1e999", "[" * 100_000, "\udcff".encode("utf8", "surrogatepass"), "9" * 5000])
def test_what_is_no_json(text: Any, tmp_path: Path) -> None:
    with pytest.raises(untrusted.Wrong):
        untrusted.parse_json(text)


# ---- what is no file ----


def folders(tmp_path: Path) -> dict[str, tuple[Path, Any]]:
    """Every file that is read -> (where it is, who reads it)."""
    step = cf.shard(lambda x: x + 1, cf.Mesh(dp=2))
    low = step.lower(torch.ones(2))
    state = {"w": torch.ones(2, 3)}
    for name, save in {
        "state": lambda path: cf.save(path, state),
        "dcp": lambda path: cf.save(path, state, format="dcp"),
    }.items():
        save(tmp_path / name)
    (tmp_path / "plain").mkdir()
    save_file(state, tmp_path / "plain" / "model.safetensors")
    low.plan.save(tmp_path / "plan.json")
    low.mesh.topology.save(tmp_path / "topology.json")
    (tmp_path / "run.yaml").write_text("mesh: {dp: 2}")
    data = next((tmp_path / "dcp").glob("*.distcp"))
    return {
        "index": (tmp_path / "state" / "colofunc.json", lambda: cf.load(tmp_path / "state")),
        "data": (tmp_path / "state" / "rank-00000-00000.safetensors", lambda: cf.load(tmp_path / "state")),
        "metadata": (tmp_path / "dcp" / ".metadata", lambda: cf.load(tmp_path / "dcp")),
        "distcp": (data, lambda: cf.load(tmp_path / "dcp")),
        "weights": (tmp_path / "plain" / "model.safetensors", lambda: cf.load(tmp_path / "plain")),
        "plan": (tmp_path / "plan.json", lambda: cf.Plan.load(tmp_path / "plan.json")),
        "topology": (tmp_path / "topology.json", lambda: cf.Topology.load(tmp_path / "topology.json")),
        "configuration": (tmp_path / "run.yaml", lambda: cf.configure(tmp_path / "run.yaml")),
        "saved over": (tmp_path / "state" / "colofunc.json", lambda: cf.save(tmp_path / "state", state)),
    }


FILES = ("index", "data", "metadata", "distcp", "weights", "plan", "topology", "configuration", "saved over")


@pytest.mark.parametrize("kind", ["pipe", "endless", "folder"])
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_is_an_error_and_nobody_waits_for_it(tmp_path: Path, name: str, kind: str) -> None:
    path, read = folders(tmp_path)[name]
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises(cf.ColofuncError):
        read()


def test_a_header_that_is_nested_too_deeply(tmp_path: Path) -> None:
    text = b"[" * 100_000
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(cf.ColofuncError, match="is no safetensors file"):
        cf.load(tmp_path)
