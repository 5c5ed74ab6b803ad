"""Offload: what leaves the device, when, and where updates run.

`trace` reads a program as uses of storages, `residency` searches for what stays between them (`evict`,
`least_traffic`), `timeline` scores it, `updates` and `host_operators` choose what runs on the host, `loops` and `disk`
widen it, `fastest` is the way in.
"""
