"""Chains of transforms from YAML, JSON or a dict."""

from colofunc.config.chain import Chain, configure

__all__ = ["Chain", "configure"]
