"""The arguments of `qwen3-asgi bench serve | step | startup | growth | memory`; what each prints.

Imports no benchmark until one is run: the command line must start fast.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen3_asgi.config import EngineConfig

if TYPE_CHECKING:
    from qwen3_asgi.bench.serve import ServeOptions


def add_speed_commands(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the benchmarks of a server, a step, a start, growth and memory."""
    serve = kinds.add_parser("serve", help="load on a server: tok/s, TTFT, time between tokens")
    serve.add_argument("url", nargs="?", help="base URL of a running OpenAI-compatible server")
    serve.add_argument(
        "--server", choices=["uvicorn", "hypercorn"], help="start ours in a process of its own"
    )
    serve.add_argument(
        "--compare", nargs="+", default=[], metavar="URL", help="the same work for these, in turn"
    )
    serve.add_argument(
        "--model", help="the model to start; with a URL, to request (default: what a server lists)"
    )
    serve.add_argument("--api", choices=["completions", "chat"], default="completions")
    serve.add_argument("-n", "--clients", type=int, nargs="+", default=[8], help="at once")
    serve.add_argument(
        "--rate", type=float, nargs="+", default=[], help="instead: Poisson arrivals a second"
    )
    serve.add_argument(
        "--prompt-tokens", nargs="+", default=["128"], metavar="N|LOW-HIGH", help="a row for each"
    )
    serve.add_argument("--output-tokens", default="64", metavar="N|LOW-HIGH")
    serve.add_argument(
        "--requests", type=int, help="of a round (default: 4 for each client, 32 with --rate)"
    )
    serve.add_argument("--rounds", type=int, default=3, help="of which medians are taken")
    serve.add_argument("--seed", type=int, default=0, help="of words, lengths and arrivals")
    serve.add_argument("--temperature", type=float, default=0.0)
    serve.add_argument(
        "--no-ignore-eos", action="store_true", help="let answers end before --output-tokens"
    )
    serve.add_argument("--extra", default="{}", metavar="JSON", help="more fields of each body")
    serve.add_argument("--api-key")
    serve.add_argument("--timeout", type=float, default=600.0, help="seconds for one answer")
    serve.add_argument("--svg", type=Path, metavar="FILE", help="write a chart of output tok/s")
    _add_engine(serve)
    serve.add_argument("--max-batch", type=int, help="default: 32, or --clients if that is more")
    serve.add_argument("--num-kv-blocks", type=int)
    serve.add_argument("--max-context-tokens", type=int)
    serve.add_argument("--max-prefill-tokens", type=int)
    serve.set_defaults(run=_serve)

    step = kinds.add_parser("step", help="where the time of one engine step goes")
    step.add_argument("--model", default="tiny")
    _add_engine(step)
    step.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    step.add_argument("--context", type=int, nargs="+", default=[128, 1024], metavar="TOKENS")
    step.add_argument(
        "--chunk", type=int, nargs="+", default=[128, 512], metavar="TOKENS", help="of a prefill"
    )
    step.add_argument("--steps", type=int, default=10, help="timed, and as many that are split")
    step.add_argument(
        "--compare-transformers",
        action="store_true",
        help="a plain forward loop of transformers with the same weights, in turn",
    )
    step.add_argument(
        "--compare-llama-cpp",
        type=Path,
        metavar="GGUF",
        help="llama.cpp on the same weights (`make-model --gguf`), in turn",
    )
    step.add_argument(
        "--compare-config",
        type=_fields,
        action="append",
        default=[],
        metavar="JSON",
        help="the same engine with these fields of EngineConfig changed, in turn; may be repeated",
    )
    step.set_defaults(run=_step)

    startup = kinds.add_parser("startup", help="from the start of a process to ready, split")
    startup.add_argument("--model", default="tiny")
    _add_engine(startup)
    startup.add_argument("--repeat", type=int, default=5, help="processes, one after the other")
    startup.set_defaults(run=_startup)

    growth = kinds.add_parser("growth", help="tok/s against clients and context, in process")
    growth.add_argument("--model", default="tiny")
    _add_engine(growth)
    powers = [2**power for power in range(16)]
    growth.add_argument("-n", "--clients", type=int, nargs="+", default=powers[:9], help="at once")
    growth.add_argument("--context", type=int, nargs="+", default=powers[7:], metavar="TOKENS")
    growth.add_argument("--num-kv-blocks", type=int, help="what does not fit is left out")
    growth.add_argument("--steps", type=int, default=5, help="timed at each point")
    growth.add_argument("--svg", type=Path, metavar="FILE", help="write a chart")
    growth.set_defaults(run=_growth)

    memory = kinds.add_parser("memory", help="resident memory beside weights and KV pool, split")
    memory.add_argument("--model", default="tiny")
    _add_engine(memory)
    memory.add_argument("--num-kv-blocks", type=int, default=512)
    memory.add_argument("--max-prefill-tokens", type=int)
    memory.add_argument("--requests", type=int, default=8, help="at once")
    memory.add_argument("--prompt-tokens", type=int, default=512, help="of each request")
    memory.add_argument("--output-tokens", type=int, default=16, help="of each request")
    memory.set_defaults(run=_memory)

    for kind in (serve, step, startup, growth, memory):
        kind.add_argument("--json", action="store_true", help="print one JSON object")


ENGINE_FIELDS = (
    "device",
    "dtype",
    "load_format",
    "num_threads",
    "quantization",
    "batch_invariant",
    "num_kv_blocks",
    "max_context_tokens",
    "max_prefill_tokens",
)


def _add_engine(parser: argparse.ArgumentParser) -> None:
    """Fields of `EngineConfig`; None leaves its default."""
    parser.add_argument("--device")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--load-format", choices=["auto", "dummy"])
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--quantization", choices=["int8"])
    parser.add_argument("--batch-invariant", action="store_true", default=None)


def _fields(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"no JSON: {error}") from error
    known = {each.name for each in dataclasses.fields(EngineConfig)}
    if not isinstance(found, dict) or not found or not found.keys() <= known:
        raise argparse.ArgumentTypeError(f"{text} is no JSON object of fields of EngineConfig")
    return found


def _engine_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    found = {name: getattr(arguments, name, None) for name in ENGINE_FIELDS}
    return {name: value for name, value in found.items() if value is not None}


def _serve(arguments: argparse.Namespace) -> int:
    from qwen3_asgi.bench.host_app import HostSettings, host_process

    if (arguments.url is None) == (arguments.server is None):
        print("give a URL or --server", file=sys.stderr)
        return 2
    fields = _engine_fields(arguments)
    if arguments.url is not None and (fields or arguments.max_batch):
        raise ValueError(f"{arguments.url} runs already: engine options are for --server")
    if arguments.url is not None:
        urls = [arguments.url, *arguments.compare]
        return _print_serve(urls, _serve_options(arguments, arguments.model), arguments)
    model = arguments.model or "tiny"
    max_batch = arguments.max_batch or max(32, *arguments.clients)
    settings = HostSettings(model, arguments.server, max_batch=max_batch, engine=fields)
    # Each server has a name of its own for the model: what it lists.
    options = _serve_options(arguments, None)
    with host_process(settings) as url:
        return _print_serve([f"{url}/llm", *arguments.compare], options, arguments)


def _serve_options(arguments: argparse.Namespace, model: str | None) -> ServeOptions:
    from qwen3_asgi.bench.serve import ServeOptions
    from qwen3_asgi.bench.serve_work import Length, Request

    try:
        extra = json.loads(arguments.extra)
    except ValueError as error:
        raise ValueError(f"--extra is no JSON: {error}") from error
    if not isinstance(extra, dict):
        raise ValueError(f"--extra must be a JSON object, got {arguments.extra!r}")
    request = Request(
        model,
        arguments.api,
        arguments.temperature,
        not arguments.no_ignore_eos,
        extra,
        arguments.api_key,
        arguments.timeout,
    )
    return ServeOptions(
        request,
        tuple(arguments.clients),
        tuple(arguments.rate),
        tuple(map(Length.parse, arguments.prompt_tokens)),
        Length.parse(arguments.output_tokens),
        arguments.requests,
        arguments.rounds,
        arguments.seed,
    )


def _print_serve(urls: list[str], options: ServeOptions, arguments: argparse.Namespace) -> int:
    from qwen3_asgi.bench.serve import chart, run_serve, table

    report = run_serve(urls, options)
    if arguments.svg is not None:
        arguments.svg.write_text(chart(report), encoding="utf-8")
    print(report.to_json() if arguments.json else table(report))
    return 0


def _step(arguments: argparse.Namespace) -> int:
    from qwen3_asgi.bench.step import StepOptions, run_step, table

    report = run_step(
        StepOptions(
            model=arguments.model,
            engine=_engine_fields(arguments),
            batches=tuple(arguments.batch),
            contexts=tuple(arguments.context),
            chunks=tuple(arguments.chunk),
            steps=arguments.steps,
            compare_transformers=arguments.compare_transformers,
            compare_llama_cpp=arguments.compare_llama_cpp,
            others=tuple(arguments.compare_config),
        )
    )
    print(report.to_json() if arguments.json else table(report))
    return 0


def _startup(arguments: argparse.Namespace) -> int:
    from qwen3_asgi.bench.startup import StartupOptions, run_startup, table

    report = run_startup(
        StartupOptions(arguments.model, _engine_fields(arguments), arguments.repeat)
    )
    print(report.to_json() if arguments.json else table(report))
    return 0


def _growth(arguments: argparse.Namespace) -> int:
    from qwen3_asgi.bench.growth import GrowthOptions, chart, run_growth, table

    report = run_growth(
        GrowthOptions(
            arguments.model,
            _engine_fields(arguments),
            tuple(arguments.clients),
            tuple(arguments.context),
            arguments.steps,
        )
    )
    if arguments.svg is not None:
        arguments.svg.write_text(chart(report), encoding="utf-8")
    print(report.to_json() if arguments.json else table(report))
    return 0


def _memory(arguments: argparse.Namespace) -> int:
    from qwen3_asgi.bench.memory import MemoryOptions, run_memory, table

    report = run_memory(
        MemoryOptions(
            arguments.model,
            _engine_fields(arguments),
            arguments.requests,
            arguments.prompt_tokens,
            arguments.output_tokens,
        )
    )
    print(report.to_json() if arguments.json else table(report))
    return 0
