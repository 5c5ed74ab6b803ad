"""The compiler: from a staged function and its transforms to a step that is prepared for one signature, and its calls.

    what a user holds
      staged, transform             a function and its transforms; the hooks by which a transform takes part
      step_compiler, prepared_step  finding or preparing what fits the arguments; one call
      guard, surroundings, retraces whether a call is like the one before, and why a step is traced again
      lowered, compare, check_finite, observation, tolerance, differing, profile
                                    what can be asked of a lowered step, and looking into one that runs
    the flow
      prepare                       trace, plan, lower: on one page
      hints                         below an error, what users of a library can write
      planning, user_constraints, input_places, machine, memory_limits, terms
                                    what a plan is made by: wishes, where inputs lie, the machine, its memory
      decisions, sharder            the planner asked for one sharding, or for several
      named_candidates              named plans for axes of which nobody speaks, as further shardings
      budget, least_budget, kept_programs, plan_cache
                                    the fastest plan that fits, the least budget that would; what is known already
      variants, settling            what transforms leave open, planned in each way
      completion, passes            the chosen plan written as one rank's program; passes by name
      rank_agreement, replica_check what ranks agree on before they run, and copies that should be equal
    what several transforms share
      microbatches, pipeline_stages parts of the batch; stages on the ranks of an axis
      weight_arguments              weights among the arguments of a step
      weight_quantization, quantized_weights, scheme_decision
                                    weights in few bits
      saved_activations, packed_caches, gathers, wire
                                    activations, caches, parameters and gradients in few bits
      disk_state, warmup            state on disk; the first steps of an offloaded step, measured
"""
