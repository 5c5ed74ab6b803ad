"""`bench/GPU.md`: what has been measured on cards, part by part, readable by people and by the next call.

A slice's table stands between two marks, `<!-- slice 4 -->`. Its first column names the part that a row is of, so the file itself says
which parts are done. It is replaced as a whole at each part, so that a call that is stopped leaves a whole file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import attrs

from bench import Row
from bench.gpu.parts import Slice

GPU = Path(__file__).parents[1] / "GPU.md"
HEAD = "# On a GPU"
NOTHING = "No row has been measured on a card yet."
HOW = "`make gpu` measures what only a card can say and writes it here: seventeen slices, the most valuable first (`bench/gpu/slices.py`)."
VERDICTS = {None: "", True: "met", False: "missed"}


@attrs.frozen
class Record:
    """The file, read anew each time: several processes write to it one after the other."""

    path: Path = GPU

    def parts(self, number: int) -> dict[str, list[Row]]:
        """Part -> its rows."""
        found: dict[str, list[Row]] = {}
        section = self._sections().get(number, "")
        for line in section.splitlines():
            cells = [_plain(cell) for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            if len(cells) != 5 or cells[0] in ("part", "---"):
                continue
            met = {word: met for met, word in VERDICTS.items()}[cells[4]]
            found.setdefault(cells[0], []).append(Row(cells[1], cells[2], cells[3], met))
        return found

    def machine(self, number: int) -> str:
        """Where the slice was measured."""
        lines = self._sections().get(number, "").splitlines()
        return lines[2] if len(lines) > 2 else ""

    def add(self, of: Slice, part: str, rows: Sequence[Row], machine: str) -> None:
        """Write the rows of a part. What the slice has from another machine goes."""
        parts = self.parts(of.number) if self.machine(of.number) == machine else {}
        parts[part] = list(rows)
        lines = [f"## {of.number}. {of.title}", "", machine, "", "| part | | figure | aim | |", "|---|---|---|---|---|"]
        for name, measured in parts.items():
            for row in measured:
                cells = (name, row.what, row.figure, row.target, VERDICTS[row.met])
                lines.append("| " + " | ".join(map(_cell, cells)) + " |")
        self._write({**self._sections(), of.number: "\n".join(lines)})

    def forget(self, number: int) -> None:
        self._write({k: section for k, section in self._sections().items() if k != number})

    def _sections(self) -> dict[int, str]:
        text = self.path.read_text() if self.path.exists() else ""
        found = re.findall(r"<!-- slice (\d+) -->\n(.*?)\n\n<!-- slice \1 -->", text, re.DOTALL)
        return {int(number): section for number, section in found}

    def _write(self, sections: dict[int, str]) -> None:
        texts = [f"{HEAD}\n\n{HOW}" + ("" if sections else f"\n{NOTHING}")]
        for number, section in sorted(sections.items()):
            mark = f"<!-- slice {number} -->"
            texts.append(f"{mark}\n{section}\n\n{mark}")
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        beside.write_text("\n\n".join(texts) + "\n")
        beside.replace(self.path)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _plain(cell: str) -> str:
    return cell.strip().replace("\\|", "|")
