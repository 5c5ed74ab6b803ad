"""Transforms: each records an intent; all are planned together at the first call."""
