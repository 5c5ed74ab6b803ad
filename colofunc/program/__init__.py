"""The program: what a step computes as frozen data, how it is traced, changed, lowered, counted and timed.

    what a program is
      ir                            Program, Node, Value, and what is computed of a program once
      text, check                   a program as text; its promises, held after every pass
      facts, aliases, result_storages, positions
                                    facts about operators and lifetimes, which values share memory, integers that the
                                    host knows
      editor                        how a pass writes the next program
      tracing/, lazy, lazy_packed   from a function to a program; tensors whose values are not made yet
    from the program of all ranks to the program of one
      lower                         the layouts that a plan chose, written as local shapes and collectives
      placing, places               which ranks run a node and have a value; what one rank runs of the union
      passes/                       everything else that rewrites a program, one file for each pass
      on_host                       values that are known before the step runs
    pipelines
      actions, pipeline_schedule    the table of what each rank does for which microbatch, and who makes it
      stage_costs, post_validation  what stages cost; a step whose update does not wait for the other stages
    bytes: the accountant
      memory, memory_report         live bytes at every position; the peak in words
      passing                       what passes through the host within a step
    seconds: the clock
      cost, host_seconds, lanes     each operator's seconds, on the host too, and when it runs beside which others
      timed, work_kinds, layout_copies, beside_products
                                    measured seconds, rates by kind of kernel, copies of layouts, collectives in chunks
      chrome_trace                  lanes and memory for a viewer
    closeness                       how far from one device is still equal
"""
