"""Door 3: `qwen3-asgi serve | chat | bench`. The only module that reads arguments and prints."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import threading
from typing import TYPE_CHECKING, Any

from qwen3_asgi import __version__
from qwen3_asgi.bench.commands import add_commands
from qwen3_asgi.config import EngineConfig, SamplingParams
from qwen3_asgi.errors import GenerationCancelled, Qwen3Error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qwen3_asgi.engine.engine import Engine

CURL_LINES = """\
Try it (in another terminal; Ctrl-C here ends it):

  curl {url}/v1/chat/completions -H 'content-type: application/json' \\
    -d '{{"model": "{model}", "messages": [{{"role": "user", "content": \
"What is the capital of France?"}}], "temperature": 0, \
"chat_template_kwargs": {{"enable_thinking": false}}}}'

  curl -N {url}/v1/chat/completions -H 'content-type: application/json' \\
    -d '{{"model": "{model}", "stream": true, "messages": [{{"role": "user", "content": \
"Count from 1 to 20."}}], "temperature": 0}}'

  curl {url}/metrics
"""


def main(argv: Sequence[str] | None = None) -> int:
    """The console script's entry point; returns the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except (Qwen3Error, ValueError) as error:
        print(f"qwen3-asgi: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="qwen3-asgi", description="A Qwen3 inference engine inside your ASGI app."
    )
    parser.add_argument("--version", action="version", version=f"qwen3-asgi {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    serve = commands.add_parser("serve", help="serve a model with uvicorn")
    _add_engine_options(serve)
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    serve.add_argument("--api-key", help="require this bearer token")
    serve.add_argument(
        "--lora-folder",
        action="append",
        default=[],
        metavar="FOLDER",
        help="let clients load LoRA adapters from below this folder; may be repeated",
    )
    serve.add_argument(
        "--drain",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="how long live requests may go on after Ctrl-C (default 10)",
    )
    serve.add_argument("--log-level", default="info", help="uvicorn's log level")
    serve.set_defaults(run=_serve)

    chat = commands.add_parser("chat", help="talk to a model in the terminal")
    _add_engine_options(chat)
    chat.add_argument("--no-thinking", action="store_true", help="answer without a think block")
    chat.add_argument("--max-tokens", type=int, default=1024)
    chat.add_argument("--temperature", type=float, default=None)
    chat.set_defaults(run=_chat)

    bench = commands.add_parser("bench", help="measure")
    add_commands(bench)
    return parser


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help='"tiny" (bundled), a local folder, or a hub id')
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"]
    )
    parser.add_argument("--max-batch", type=int, default=32)
    parser.add_argument("--max-prefill-tokens", type=int, default=512)
    parser.add_argument("--max-context-tokens", type=int, default=None)
    parser.add_argument("--num-kv-blocks", type=int, default=None)
    parser.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=0.9,
        help="the part of the card that may be in use, by whomever, when the KV pool is there",
    )
    parser.add_argument("--num-threads", type=int, default=None)
    parser.add_argument("--served-model-name", default=None)
    parser.add_argument(
        "--load-format",
        default="auto",
        choices=["auto", "dummy"],
        help='dummy: random weights, for measuring; the model may be a shape, as "Qwen3-0.6B"',
    )
    parser.add_argument("--overlap", action="store_true", help="run long prefills beside decode")
    parser.add_argument(
        "--pipelined",
        action="store_true",
        help="with --overlap: launch a decode step before the last one's tokens are known",
    )
    parser.add_argument(
        "--quantization", choices=["int8"], help="keep the weights in 8 bits (CPU only)"
    )
    parser.add_argument(
        "--batch-invariant",
        action="store_true",
        help="the same logits to the last bit whatever else is in the batch",
    )
    parser.add_argument(
        "--host-kv-gib", type=float, default=0.0, help="host memory for evicted KV blocks"
    )
    parser.add_argument("--kv-file", default=None, help="a file for what leaves host memory")
    parser.add_argument("--kv-file-gib", type=float, default=4.0)


def _engine(arguments: argparse.Namespace) -> Engine:
    from qwen3_asgi.engine.engine import Engine

    config = EngineConfig(
        device=arguments.device,
        dtype=arguments.dtype,
        max_batch=arguments.max_batch,
        max_prefill_tokens=arguments.max_prefill_tokens,
        max_context_tokens=arguments.max_context_tokens,
        num_kv_blocks=arguments.num_kv_blocks,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        num_threads=arguments.num_threads,
        served_model_name=arguments.served_model_name,
        load_format=arguments.load_format,
        quantization=arguments.quantization,
        overlap=arguments.overlap,
        pipelined=arguments.pipelined,
        batch_invariant=arguments.batch_invariant,
        host_kv_gib=arguments.host_kv_gib,
        kv_file=arguments.kv_file,
        kv_file_gib=arguments.kv_file_gib,
    )
    return Engine(arguments.model, config)


def _serve(arguments: argparse.Namespace) -> int:
    try:
        import uvicorn
    except ModuleNotFoundError:
        print("serve needs uvicorn: pip install 'qwen3-asgi[server]'", file=sys.stderr)
        return 1
    from qwen3_asgi.app import create_app

    engine = _engine(arguments)
    # Loaded before the port is bound: a checkpoint that can't be used is one clear line, and
    # whoever can connect gets an answer.
    engine.start_sync()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s:     %(message)s")
    drain = arguments.drain

    class Server(uvicorn.Server):
        """Ends live streams itself, so that uvicorn never has to cancel a response."""

        async def startup(self, sockets: list[Any] | None = None) -> None:
            await super().startup(sockets=sockets)
            if self.started:
                address = self.servers[0].sockets[0].getsockname()
                url = f"http://{address[0]}:{address[1]}"
                print(CURL_LINES.format(url=url, model=engine.model_name), flush=True)

        def handle_exit(self, sig: int, frame: Any) -> None:
            limit = 0.0 if self.should_exit else drain  # a second Ctrl-C: now
            threading.Thread(target=engine.stop_sync, kwargs={"drain": limit}).start()
            self.should_exit = True

    config = uvicorn.Config(
        create_app(engine, api_key=arguments.api_key, lora_folders=arguments.lora_folder),
        host=arguments.host,
        port=arguments.port,
        log_level=arguments.log_level,
        lifespan="off",
        # Only a net: the engine ends every stream within `drain`.
        timeout_graceful_shutdown=int(drain) + 5,
    )
    try:
        with contextlib.suppress(KeyboardInterrupt):
            Server(config).run()
    finally:
        engine.stop_sync(drain=0)
    return 0


def _chat(arguments: argparse.Namespace) -> int:
    engine = _engine(arguments)
    params = SamplingParams(max_tokens=arguments.max_tokens, temperature=arguments.temperature)
    messages: list[dict[str, str]] = []
    with engine:
        print(f"{engine.model_name}: Ctrl-C stops an answer, Ctrl-D ends the chat.")
        while True:
            try:
                text = input("you> ").strip()
            except (EOFError, KeyboardInterrupt):
                print()
                return 0
            if not text:
                continue
            messages.append({"role": "user", "content": text})
            answer = _answer(engine, messages, params, thinking=not arguments.no_thinking)
            messages.append({"role": "assistant", "content": answer})


def _answer(
    engine: Engine, messages: list[dict[str, str]], params: SamplingParams, *, thinking: bool
) -> str:
    from qwen3_asgi.engine.output import Collector

    handle = engine.submit_sync(messages=messages, params=params, enable_thinking=thinking)
    collector = Collector(engine.tokenizer, params)
    said: list[str] = []
    try:
        for batch in handle.read_sync():
            said.append(collector.add(batch).text)
            print(said[-1], end="", flush=True)
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    except GenerationCancelled as error:
        print(f" [{error}]", end="")
    finally:
        handle.cancel()
        print()
    return "".join(said)


if __name__ == "__main__":
    sys.exit(main())
