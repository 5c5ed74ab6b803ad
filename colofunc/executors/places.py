"""Places: what ranks write down in the store, where each of them is and what it says where all meet.

    in step 7 (train) at train.py:20; its GPU is in all_gather of 0.weight over dp, in step 6 (train) at train.py:20

A rank writes when it begins and leaves a step. Where it has a GPU, its thread writes which steps have passed there, and
what the GPU is at where that takes long: the host is ahead of it.

Where all ranks come to one point, each writes an `Answer` there.
"""

from __future__ import annotations

import json
from typing import Any

import attrs

NOWHERE = "not in a step yet"
AT = "colofunc/at"  # where each rank is
ON_GPU = "colofunc/on_gpu"  # which steps have passed on its GPU, and what that is at

# States of an answer: the rank itself was there, or failed before it, or another one has written that it has ended.
CAME, FAILED_BEFORE, GONE = "", "failed", "gone"


@attrs.frozen
class RankProgress:
    """How many steps a rank has done and begun, where it was last, and what its GPU is at where that takes long."""

    done: int = 0
    where: str = NOWHERE
    begun: int = 0
    on_gpu: str = ""

    @property
    def words(self) -> str:
        return self.where + (f"; its GPU is {self.on_gpu}" if self.on_gpu else "")


def write_place(store: Any, rank: int, done: int, where: str, begun: int) -> None:
    store.set(f"{AT}/{rank}", json.dumps([done, where, begun]))


def write_on_gpu(store: Any, rank: int, passed: int, at: str) -> None:
    store.set(f"{ON_GPU}/{rank}", json.dumps([passed, at]))


def whereabouts(store: Any, rank: int) -> RankProgress:
    """Where a rank is. Where it has a GPU, a step is done when it has passed there."""
    key, gpu = f"{AT}/{rank}", f"{ON_GPU}/{rank}"
    if not store.check([key]):
        return RankProgress()
    done, where, begun = json.loads(store.get(key))
    done, on_gpu = json.loads(store.get(gpu)) if store.check([gpu]) else (done, "")
    return RankProgress(done, where, begun, on_gpu)


@attrs.frozen
class Answer:
    """What one rank says where all ranks come to one point.

    `what`: the point that it has come to. `line`: of the user's script.
    """

    state: str
    what: str
    text: str
    line: str

    def packed(self) -> str:
        return json.dumps(attrs.astuple(self))

    @staticmethod
    def unpacked(packed: bytes) -> Answer:
        return Answer(*json.loads(packed))
