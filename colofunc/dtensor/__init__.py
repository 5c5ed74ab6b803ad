"""The DTensor: a global tensor with a layout on a mesh (`tensor`), its eager operators (`eager*`), and how values come
to be placed (`placed`) and known for what they are (`roles`). Specs and layouts themselves are `colofunc.spec`."""
