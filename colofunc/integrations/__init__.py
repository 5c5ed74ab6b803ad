"""Training loops of other frameworks, run on a staged step. Each module needs its own extra."""
