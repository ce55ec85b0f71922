"""Django, and beside it under /llm the OpenAI-compatible app; one middleware around both.

Run it from the repository's root and try it:

    uvicorn examples.django_app.asgi:app
    curl localhost:8000/ask -d '{"question": "What is the capital of France?"}'
    curl -N 'localhost:8000/story?tokens=100'
    curl localhost:8000/llm/v1/models
"""

import os

from django.core.asgi import get_asgi_application
from starlette.types import Receive, Scope, Send

from examples.django_app.engine import engine
from qwen3_asgi import DisconnectMiddleware, create_app

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "examples.django_app.settings")
django = get_asgi_application()
llm = create_app(engine)


async def dispatch(scope: Scope, receive: Receive, send: Send) -> None:
    """Django's own router can't mount an ASGI app; this is what Starlette's `Mount` does."""
    if scope["type"] == "lifespan":
        # Not for Django, which knows no lifespan. Ends the engine with the server.
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await engine.stop()
        await send({"type": "lifespan.shutdown.complete"})
    elif scope["type"] == "http" and scope["path"].startswith("/llm/"):
        root_path = scope.get("root_path", "") + "/llm"
        await llm({**scope, "root_path": root_path}, receive, send)
    else:
        await django(scope, receive, send)


# In place of `@app.add_middleware`: it watches Django's views and the mounted app alike.
app = DisconnectMiddleware(dispatch)
