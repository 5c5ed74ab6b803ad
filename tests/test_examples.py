"""The scripts of examples/ do what they say, run as their users run them."""

import importlib.util
import json
import sys
import types
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A script of examples/ as a module."""
    found = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(found)
    monkeypatch.setitem(sys.modules, name, module)
    found.loader.exec_module(module)
    return module


def test_a_vision_transformer_learns_to_read_digits(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    pytest.importorskip("timm")
    pytest.importorskip("sklearn")
    assert script("train_vit", monkeypatch).main(["--dp", "2", "--tp", "1"]) > 0.95
    assert capsys.readouterr().out.count("right on unseen digits") == 20


def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cells = json.loads((EXAMPLES / "simulated_ranks.ipynb").read_text())["cells"]
    module = types.ModuleType("simulated_ranks")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    threads = torch.get_num_threads()
    for n, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"cell {n}", "exec"), module.__dict__)
    torch.set_num_threads(threads)
    assert "Megatron column/row" in capsys.readouterr().out
    assert module.checked.leaves > 10 and module.checked.worst < 1e-10
    assert abs(float(module.sharded_loss) - float(module.loss)) < 1e-5
