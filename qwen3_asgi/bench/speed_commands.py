"""The arguments of `qwen3-asgi bench serve | step | startup`, and what each of them prints.

Imports no benchmark until one is run: the command line must start fast.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse

    from qwen3_asgi.bench.serve import ServeOptions


def add_speed_commands(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the benchmarks of a server, a step and a start."""
    serve = kinds.add_parser("serve", help="load on a server: tok/s, TTFT, time between tokens")
    serve.add_argument("url", nargs="?", help="base URL of a running OpenAI-compatible server")
    serve.add_argument(
        "--server", choices=["uvicorn", "hypercorn"], help="start ours in a process of its own"
    )
    serve.add_argument(
        "--compare", nargs="+", default=[], metavar="URL", help="the same work for these, in turn"
    )
    serve.add_argument("--model", help="the model to request (and to start, as tiny)")
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
    step.set_defaults(run=_step)

    startup = kinds.add_parser("startup", help="from the start of a process to ready, split")
    startup.add_argument("--model", default="tiny")
    _add_engine(startup)
    startup.add_argument("--repeat", type=int, default=5, help="processes, one after the other")
    startup.set_defaults(run=_startup)

    for kind in (serve, step, startup):
        kind.add_argument("--json", action="store_true", help="print one JSON object")


ENGINE_FIELDS = (
    "device",
    "dtype",
    "load_format",
    "num_threads",
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


def _engine_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    found = {name: getattr(arguments, name, None) for name in ENGINE_FIELDS}
    return {name: value for name, value in found.items() if value is not None}


def _serve(arguments: argparse.Namespace) -> int:
    from qwen3_asgi.bench.host_app import HostSettings, host_process
    from qwen3_asgi.bench.serve import first_model

    if (arguments.url is None) == (arguments.server is None):
        print("give a URL or --server", file=sys.stderr)
        return 2
    fields = _engine_fields(arguments)
    if arguments.url is not None and (fields or arguments.max_batch):
        raise ValueError(f"{arguments.url} runs already: engine options are for --server")
    if arguments.url is not None:
        urls = [arguments.url, *arguments.compare]
        model = arguments.model or first_model(arguments.url)
        return _print_serve(urls, _serve_options(arguments, model), arguments)
    model = arguments.model or "tiny"
    max_batch = arguments.max_batch or max(32, *arguments.clients)
    settings = HostSettings(model, arguments.server, max_batch=max_batch, engine=fields)
    options = _serve_options(arguments, model)
    with host_process(settings) as url:
        return _print_serve([f"{url}/llm", *arguments.compare], options, arguments)


def _serve_options(arguments: argparse.Namespace, model: str) -> ServeOptions:
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
