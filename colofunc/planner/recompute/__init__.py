"""Recomputation: orders of work that keep less for backward and make it again.

`cuts` and `stages` cut a step into a chain, `needs` counts what its backward holds. `chain`, `exhaustive` and `relaxed`
propose orders, `fastest` takes the best that the accountant finds within the budget: `orders` where copies have to be
searched for, `by_rank` where ranks differ. `policies` are the named ones.
"""
