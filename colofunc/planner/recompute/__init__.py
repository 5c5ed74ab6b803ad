"""Recomputation: orders of work that keep less for backward and make it again.

`stages` cuts a step into a chain, `chain`, `late` and `relaxed` propose orders, `fastest` takes the best that the
accountant finds within the budget; `policies` are the named ones.
"""
