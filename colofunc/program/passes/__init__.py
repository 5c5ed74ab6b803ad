"""Passes: `Program -> Program`, each with what it keeps true.

before a plan, on the program of all ranks
  simplify, simplify_known      the same numbers from fewer nodes; what is computed from no input
  band_views, bands, mask_bands, mask_bounds, repeated
                                attention masks as runs of columns or as bounds; tensors that repeat
  narrow_captures               what a step captures, in the dtype in which it is read
  wide_sums                     gradients summed in a dtype that is wide enough
in few bits
  packed_reads, packed_gathers, packed_rows
                                quantized weights read and gathered packed; rows of a cache
  saved_activations, rounded_parameters, wire
                                activations, parameters and gradients in 8 bits or fewer
microbatches and stages, on the program of one rank
  time, time_rules, mixing      one more axis in time; its rules; errors of what cannot be split
  levels, fold, loop            which loop a node runs in; the loops; changing their bodies
  cut, parts_of_nodes, split_backward, stage_sums, messages
                                a body in parts that a timetable runs, and what stages tell one another
collectives
  coalesce                      reduced early, updated late
  buckets, merge                many small ones as one
  chunks, packing               flat buffers of parameters
memory
  early_shards                  parts of what forward gathered, in place of all of it
  recompute, tiered             values made again for backward; copies between tiers
  inplace, reuse                state written where it lies; results written over operands
when and how it runs
  schedule, overlapped, kernels the order of nodes; collectives beside what runs; the kernel that a plan counts on
  narrow_gradients, squares, one_call
                                updates that read narrow gradients, sums of squares in one pass, updates side by side
"""
