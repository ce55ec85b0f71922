"""The process's one engine, for the views and for the mounted app."""

import os

from qwen3_asgi import Engine

# Django has no lifespan: the engine starts when the first request needs it.
engine = Engine.shared(os.environ.get("QWEN3_MODEL", "tiny"))
