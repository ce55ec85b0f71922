"""The facade over the scheduler thread: prompts in, token streams out, on any loop or thread.

`Engine` starts and stops the thread; `delivery` carries its events to event loops and threads.
"""
