"""Sharding: a program as a choice problem, and its cheapest assignment.

`model` says what a choice costs, `assign` asks for the cheapest, `search` finds it (`eliminate` is its exact
part), `budget` prices memory, `enumeration` lists all of a small step, `explain` makes the plan that is printed.
"""
