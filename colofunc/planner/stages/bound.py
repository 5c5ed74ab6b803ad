"""A bound on a step's time before it is planned: what a rank of a pipeline has to compute, and until when it has
nothing to compute.

    4 stages of 1 s forward and 2 s backward in all, 4 microbatches: the last rank waits 3/4 s, computes 3 s, and then 3
    * 1/2 s pass until the first has ended: at least 5.25 s

Sound for every sharding of a stage and every order of actions: operators take as long as the clock says of them alone
(`node_s`), shared evenly by the ranks of a stage, but each launch once a microbatch. Sends, collectives, the optimizer
and what is made again come on top. Operators for which there are kernels count by their launch alone.

Which stage has an operator of backward follows from its module; exactly, where somebody says what runs where
(`placed`), since what stands at a cut may run on either side of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import attrs

from colofunc.planner.stages.assignment import Cuts
from colofunc.program.ir import Node, Program


@attrs.frozen
class StageSeconds:
    """Seconds of a stage's forward, or backward, on one rank: of the whole batch beside launches, and of the launches
    of one microbatch.
    """

    work_s: float = 0.0
    launches_s: float = 0.0

    def plus(self, work_s: float, launch_s: float) -> StageSeconds:
        """With one more operator."""
        return StageSeconds(self.work_s + work_s, self.launches_s + launch_s)

    def trip_s(self, microbatches: int) -> float:
        """Seconds for one of so many microbatches."""
        return self.work_s / microbatches + self.launches_s


@attrs.frozen(eq=False)
class StepBound:
    """Of one step. seconds: of each node that reads rows of the batch, on one device, (beside its launch, its launch).

    rank_of, speeds: per stage. sharing: ranks that share a stage. splits: whether weight gradients may run behind all
    input gradients.
    """

    program: Program
    seconds: Mapping[int, tuple[float, float]]
    rank_of: Sequence[int]
    speeds: Sequence[float]
    sharing: int
    splits: bool

    @staticmethod
    def of(
        program: Program,
        on_rows: Collection[int],
        node_s: Callable[[Node], float],
        launch_s: float,
        has_kernel: Callable[[str], bool],
        rank_of: Sequence[int],
        speeds: Sequence[float],
        sharing: int,
        splits: bool,
    ) -> StepBound:
        """on_rows: positions of the nodes that read rows of the batch. node_s: seconds of a node on one device, with
        its launch.
        """
        seconds = {}
        for index in sorted(on_rows):
            node = program.nodes[index]
            if node.phase not in ("forward", "backward"):
                continue
            took_s = node_s(node)
            launch = min(took_s, launch_s)
            seconds[index] = (0.0 if has_kernel(node.target) else took_s - launch, launch)
        return StepBound(program, seconds, rank_of, speeds, sharing, splits)

    def at(self, cuts: Cuts, microbatches: int, placed: Sequence[int | None] | None = None) -> float:
        """Seconds that a step takes at least, cut so. placed: per node the rank that runs it, None: several do; without
        it, an estimate.
        """
        forward, backward = self._parts(cuts, placed)
        longest_s = 0.0
        for rank in range(max(self.rank_of) + 1):
            begin = self.rank_of.index(rank)  # the first stage of the rank
            work_s = 0.0
            for stage, there in enumerate(self.rank_of):
                if there == rank:
                    work_s += microbatches * (
                        forward[stage].trip_s(microbatches) + backward[stage].trip_s(microbatches)
                    )
            before_s = sum(part.trip_s(microbatches) for part in forward[:begin])
            # A step of one microbatch has no schedule, so that weight gradients wait for nothing.
            behind = () if self.splits or microbatches == 1 else backward[:begin]
            longest_s = max(longest_s, before_s + work_s + sum(part.trip_s(microbatches) for part in behind))
        return longest_s

    def of_any_cut(self, microbatches: int) -> float:
        """Seconds that a step takes at least wherever it is cut: those of a rank where all have as much to do."""
        work_s = sum(work / self.sharing for work, _ in self.seconds.values())
        launches_s = sum(launch for _, launch in self.seconds.values())
        ranks = max(self.rank_of) + 1
        return (work_s + microbatches * launches_s) / (ranks * max(self.speeds))

    def _parts(self, cuts: Cuts, placed: Sequence[int | None] | None) -> tuple[list[StageSeconds], list[StageSeconds]]:
        """Forward and backward of each stage, without operators of which nobody knows the stage."""
        stages = len(self.rank_of)
        forward, backward = [StageSeconds()] * stages, [StageSeconds()] * stages
        of_path = self._stages_of_modules(cuts)
        for index, (work_s, launch_s) in self.seconds.items():
            node = self.program.nodes[index]
            there = {_stage(index, cuts)} if node.phase == "forward" else of_path.get(node.path, set())
            if placed is not None:
                there = self._on_rank(there, placed[index])
            if len(there) != 1:
                continue
            (stage,) = there
            parts = forward if node.phase == "forward" else backward
            parts[stage] = parts[stage].plus(work_s / self.sharing / self.speeds[stage], launch_s / self.speeds[stage])
        return forward, backward

    def _stages_of_modules(self, cuts: Cuts) -> dict[str, set[int]]:
        of_path: dict[str, set[int]] = {}
        for index, node in enumerate(self.program.nodes):
            if node.phase == "forward":
                of_path.setdefault(node.path, set()).add(_stage(index, cuts))
        return of_path

    def _on_rank(self, stages: set[int], rank: int | None) -> set[int]:
        """Of some stages those of a rank; where it has only one, that one."""
        mine = {stage for stage, here in enumerate(self.rank_of) if here == rank}
        return mine if len(mine) == 1 else mine & stages


def _stage(index: int, cuts: Cuts) -> int:
    return sum(end <= index for end in cuts.ends[:-1])
