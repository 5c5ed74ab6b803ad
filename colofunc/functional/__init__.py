"""What a training script needs around the step: modules, gradients and optimizers as functions of trees; files, batches
and adapters.
"""
