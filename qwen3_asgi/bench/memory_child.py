"""The process that `bench memory` starts: it loads a model, answers requests, and tells what it has
in memory at the end of each stage.

Prints one JSON object; `marks` has the name of each stage and the bytes at its end. Imports stand
where they are measured.
"""

from __future__ import annotations

import json
import logging
import sys

from qwen3_asgi.bench.processes import memory_bytes


def main() -> None:
    marks = [("interpreter", memory_bytes()[0])]

    class Stages(logging.Handler):
        """The engine says when a stage begins: what there is then is what the last one left."""

        stage = "server"

        def emit(self, record: logging.LogRecord) -> None:
            if self.stage != "server":
                mark(self.stage)
            self.stage = record.getMessage()

    def mark(stage: str) -> None:
        marks.append((stage, memory_bytes()[0]))

    from concurrent.futures import ThreadPoolExecutor

    from qwen3_asgi.app import create_app
    from qwen3_asgi.config import EngineConfig, SamplingParams
    from qwen3_asgi.engine.engine import Engine
    from qwen3_asgi.engine.loading import LoadedModel, load_model

    mark("package")
    settings = json.loads(sys.argv[1])
    config = EngineConfig(**{"max_batch": max(32, settings["requests"]), **settings["engine"]})
    held: list[LoadedModel] = []

    def load(name: str, config: EngineConfig) -> LoadedModel:
        held.append(load_model(name, config))
        return held[0]

    engine = Engine(settings["model"], config, loader=load)
    create_app(engine)
    import uvicorn  # noqa: F401

    mark("server")
    stages = Stages()
    logger = logging.getLogger("qwen3_asgi.startup")
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    logger.addHandler(stages)
    with engine:
        if stages.stage != "ready":
            mark(stages.stage)
        from qwen3_asgi.model.footprint import footprint, touch_pool

        known = footprint(held[0].executor)
        touch_pool(held[0].executor)
        mark("pool")
        params = SamplingParams(
            max_tokens=settings["output_tokens"], temperature=0, ignore_eos=True
        )

        def ask(number: int) -> None:
            # Each prompt begins with a token of its own: none is found in the prefix cache.
            prompt = [(number + place * place) % 200 for place in range(settings["prompt_tokens"])]
            engine.generate_sync(prompt_token_ids=prompt, params=params)

        with ThreadPoolExecutor(settings["requests"]) as clients:
            list(clients.map(ask, range(settings["requests"])))
        mark("requests")
        peak = memory_bytes()[1]
    print(json.dumps({"marks": marks, "resident": marks[-1][1], "peak": peak, **known._asdict()}))


if __name__ == "__main__":
    main()
