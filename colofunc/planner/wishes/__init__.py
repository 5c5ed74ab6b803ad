"""Wishes: the words of `cf.shard` and of named plans, and what plugins read a program with.

`wish` has the words, `wish_constraints` makes them constraints, `propagation` and `flow_constraints` carry them to what
they do not name; `reading`, `products`, `tokens` and `attention_pattern` are what a plan knows of a step before it wishes.
"""
