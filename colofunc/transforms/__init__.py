"""Transforms: functions from a step to a step, one to a file, which has its name. Each records what is wished for; all
are planned together at the first call. None imports another: what several need is in `colofunc.compiler`.

    where a step runs         shard (a mesh, named plans, wishes), pipeline (layers on ranks of their own)
    what memory it takes      checkpoint (values made again for backward), offload (host and disk),
                              accumulate (microbatches)
    in which numbers          precision (bfloat16, float16), fp8 (products in float8),
                              quantize (weights, activations, caches and the wire in few bits)
    with other numbers than   local_stats (batch norm over the rows of each rank),
    one device has            expert_capacity (experts that drop tokens)
"""
