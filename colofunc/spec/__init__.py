"""Where tensors lie, and what may be done with that: patterns (`spec`), what they mean on a mesh (`layout`, `parts`),
the conversions between them, the rules of operators (`rule`, `rules/`) and the strategies that follow from these."""
