"""What knows other libraries: training loops of other frameworks, run on a staged step, each of which needs its own
extra; and `formats`, a plugin: how libraries keep their models in files.
"""
