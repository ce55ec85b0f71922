"""Decides what runs next. Plain Python: no torch, no HTTP, no event loop.

Requests come in as commands, steps go out to a `ModelExecutor`, events go out to an `EventSink`.
"""
