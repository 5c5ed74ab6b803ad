"""Wishes: the words of `shard` and of named plans, and what plugins read a program with.

`wish` has the words, `wished` makes them constraints, `follow` and `along` carry them to what they do not name;
`reading`, `products`, `tokens` and `attention_pattern` are what a plan knows of a step before it wishes.
"""
