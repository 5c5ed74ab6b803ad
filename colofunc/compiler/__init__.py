"""The compiler: from a staged function and its transforms to a step that is prepared for one signature, and its calls.
"""
