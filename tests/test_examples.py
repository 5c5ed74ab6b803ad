"""The scripts of examples/ do what they say, run as their users run them."""

import importlib.util
import sys
import types
from pathlib import Path

import pytest

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
