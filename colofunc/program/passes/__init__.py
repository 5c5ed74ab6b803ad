"""Passes: `Program -> Program`, each with what it keeps true.

Before a plan: `simplify`, `wide_sums`. Behind it, on the program of one rank: `coalesce`, `chunks`, `buckets`
(collectives), `time` and `fold` (microbatches), `recompute`, `tiered` (memory), `inplace`, `reuse`, `schedule`,
`overlapped` (when and where it runs).
"""
