"""The disk tier: `store` reads and writes chunks, each in two versions (`layout`), in `files` that it locks and cleans
up, by threads that a `queue` feeds; `kept_versions` keeps a version that somebody still reads, `tensors` are what a
program sees of it.
"""
