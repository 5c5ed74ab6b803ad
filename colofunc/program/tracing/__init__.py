"""Tracing: a step function becomes a program.

`trace` is the way in; `record` and `function` see every operator, `ops`, `views`, `strided`, `values` and `numbers` say
what becomes of each kind, `infer` gives shapes without data, `meta` the user's line, `leaks` what was kept outside.
"""
