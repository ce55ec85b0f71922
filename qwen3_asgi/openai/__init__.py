"""OpenAI's wire types and what they mean: requests parsed and refused, replies and chunks built.

Pure functions and values: no I/O, no event loop, no HTTP status.
"""
