"""Stages of a pipeline: what a table of actions takes in time and memory, and where a model is cut."""
