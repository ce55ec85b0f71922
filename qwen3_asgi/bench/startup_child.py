"""The process that `bench startup` starts: a server with an engine, and when each stage began.

Prints one JSON object as soon as it listens: `marks` has the name and the beginning of each stage,
`listening` the end of the last. Imports stand where they are timed.
"""

from __future__ import annotations

import time

BEGAN = time.monotonic()


def main() -> None:
    import json
    import logging
    import os
    import sys
    import threading

    marks = [("package", BEGAN)]

    def mark(stage: str) -> None:
        marks.append((stage, time.monotonic()))

    class Stages(logging.Handler):
        """Takes what the engine says of its start."""

        def emit(self, record: logging.LogRecord) -> None:
            mark(record.getMessage())

    from qwen3_asgi.app import create_app
    from qwen3_asgi.config import EngineConfig
    from qwen3_asgi.engine.engine import Engine

    settings = json.loads(sys.argv[1])
    engine = Engine(settings["model"], EngineConfig(**settings["engine"]))
    app = create_app(engine)
    if "torch" in sys.modules:
        raise RuntimeError("importing qwen3_asgi imports torch")
    mark("server")
    import uvicorn

    stages = logging.getLogger("qwen3_asgi.startup")
    stages.setLevel(logging.DEBUG)
    stages.propagate = False
    stages.addHandler(Stages())

    class Server(uvicorn.Server):
        """Tells its port as soon as it listens."""

        async def startup(self, sockets: object = None) -> None:
            await super().startup()
            port = self.servers[0].sockets[0].getsockname()[1]
            told = {"marks": marks, "listening": time.monotonic(), "port": port}
            print(json.dumps(told), flush=True)

    engine.start_sync()

    def end_with_the_parent() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=end_with_the_parent, daemon=True).start()
    config = uvicorn.Config(app, port=0, log_level="warning", lifespan="off", ws="none")
    Server(config).run()


if __name__ == "__main__":
    main()
