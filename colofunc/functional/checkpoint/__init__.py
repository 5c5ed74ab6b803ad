"""What a saved folder holds and how it is written and read: regions of tensors, checked files, trees as JSON, folders.
"""
