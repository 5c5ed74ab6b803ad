"""The DTensor: a global tensor with a layout on a mesh. Specs, layouts and conversions themselves are `colofunc.spec`.

tensor                  DTensor, `distribute`, `from_local`: what a user holds
eager, eager_dispatch   operators on DTensors outside of a step, each a program of one node
placed, other_mesh      from a tensor of any kind to the parts of ranks; to parts on another mesh
roles                   parameter, buffer, optimizer state: what made a tensor says what it is
"""
