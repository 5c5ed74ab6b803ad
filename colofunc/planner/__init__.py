"""The planner: from what is wanted and what things cost to who works on what, where and when.

    wishes/      what a user or a named plan wants, followed through a program, as constraints
    sharding/    one strategy per operator and one layout per input, cheapest in seconds: `assign`
    recompute/   which order of work, with what is made again for backward: `fastest`
    offload/     what lies on device, host or disk, and when it is copied: `fastest`
    stages/      where a model is cut into the stages of a pipeline, and what a schedule takes: `cut_search`

`joint` decides sharding, recomputation and offload under one budget; what was decided is a `plan`.
"""
