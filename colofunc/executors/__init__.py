"""Executors: run one lowered program as it is, on simulated ranks, on real ones, or compiled.

    shared by all
      backend                       the interface, and the choice of one
      source, loops, step_function  a program as one Python function, and calls of it
      kernels, choices              the callable of each operator, and which one where several would do
      program_cache, tap, profile   compiled programs by identity; looking at a step while it runs; where its time goes
    simulated ranks, in this process
      simulated, simulated_collectives, sharing
                                    one function for all ranks; what ranks have alike is computed once
    real ranks
      distributed, rank_program, rank_collectives
                                    a process for each rank, its program, and its collectives as lines of source
      groups, collective_starts, gloo, messages
                                    process groups, collectives of each backend, messages between stages
      post_validated                a step whose update is put right where other stages say so afterwards
      launch, rendezvous, gpus      starting ranks from here, how they meet, which GPU each has
      presence, places, lifeline, lookout, watch, faults
                                    who is alive and waits where; how a failure ends all ranks; failures on purpose
    compiled
      compiled, segments, fused, unwritten
                                    what lies between collectives as compiled functions; what these cost and hold
    tiers of memory
      copies, flight                copies beside compute on a device, and what has not ended there
      pools, pages, pages_in_use    host memory for copies, pinned where a device copies
      disk/, direct_io              state on disk
"""
