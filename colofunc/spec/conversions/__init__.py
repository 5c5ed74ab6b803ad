"""Conversions between layouts: what has to move (`refine`), which moves there are (`moves`), the cheapest sequence of
them (`search`, `normal`, `pattern`), and the collectives that it becomes (`lower`). `conversion` is what others
call."""
