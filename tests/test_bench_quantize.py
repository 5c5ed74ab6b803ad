"""The verdicts of `python -m bench quantize`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench import quantize
from tests.live_bytes import Held


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


@pytest.mark.parametrize(("plain", "ours", "met", "says"), [
    (1003, 869, (True, False), ("2.60 times less", "2.25 times less")),
    (900, 869, (False, False), ("2.33 times less", "2.25 times less")),
    (1200, 1100, (True, True), ("3.11 times less", "2.85 times less")),
])  # fmt: skip
def test_a_part_is_held_against_float32_in_pytorch_and_against_our_own(
    plain: int, ours: int, met: tuple[bool, bool], says: tuple[str, str]
) -> None:
    mb = 10**6
    wide = {"peak": ours * mb, "weights": 200 * mb, "activations": 670 * mb, "least": 740 * mb}
    small = {"peak": 386 * mb, "weights": 50 * mb, "activations": 336 * mb, "least": 320 * mb}
    rows = quantize.part_rows("VAE decoder", {"peak": plain * mb}, wide, small, "")
    assert tuple(row.met for row in rows) == met and all(word in row.figure for word, row in zip(says, rows, strict=True))
    # 200 MB + A is 2.5 times 50 MB + A / 2 where A is 300 MB.
    bound = "takes at most 0.30 GB of them in float32, and one convolution reads and writes 0.54 GB"
    assert (bound in rows[1].figure) is (ours == 869)


def test_what_pytorch_holds_is_counted_by_storages() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Flatten(), torch.nn.ReLU())
    x = torch.empty(2, 4, device="meta")
    module = module.to("meta")
    with torch.no_grad(), Held([*module.parameters(), x]) as held:
        module(x)
    assert held.peak_bytes == 2 * 2 * 8 * 4  # the product (a view is no memory) and its relu
