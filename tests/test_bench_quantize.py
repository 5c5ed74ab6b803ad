"""The verdicts of `python -m bench quantize`."""

from __future__ import annotations

from typing import Any

import pytest

from bench import quantize


@pytest.mark.parametrize(
    ("changed", "met"), [({}, True), ({"grown": 101}, False), ({"counted": 101}, False), ({"losses": [2.0, 2.0]}, False)]
)
def test_a_qlora_step_is_within_the_formula_as_counted_and_as_measured(
    changed: dict[str, Any], met: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "0")  # which the row sets for the process that it starts
    found = {"formula": {"weights": 60, "a layer": 40}, "counted": 100, "without": 300, "grown": 100, "losses": [2.0, 1.0], **changed}
    monkeypatch.setattr(quantize, "fresh", lambda *args: found)
    assert quantize.qlora_row().met is met
