"""The arguments of `qwen3-asgi bench …`, and what each command prints: a table, or one JSON object.

Imports no benchmark until one is run: the command line must start fast.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add every benchmark to `qwen3-asgi bench`; each sets `run`, which returns the exit status."""
    kinds = parser.add_subparsers(dest="bench", required=True)

    storm = kinds.add_parser("storm", help="N clients hang up at once: how long until 0/0")
    storm.add_argument("url", nargs="?", help="base URL of a running server (with /load)")
    storm.add_argument("--in-process", action="store_true", help="start a server here, measure it")
    storm.add_argument(
        "--server", choices=["uvicorn", "hypercorn"], help="start this one in a process of its own"
    )
    storm.add_argument("--model", default="tiny", help="the model to request (and to start)")
    storm.add_argument("-n", "--clients", type=int, default=8)
    storm.add_argument("--kind", choices=["stream", "plain", "both"], default="both")
    storm.add_argument("--prompt-words", type=int, default=300)
    storm.add_argument("--max-tokens", type=int, default=256)
    storm.add_argument(
        "--random-hang-up",
        type=float,
        metavar="SECONDS",
        help="spread the hang-ups over this time instead of all at once",
    )
    storm.add_argument("--seed", type=int, default=0, help="of the random hang-ups")
    storm.add_argument("--repeat", type=int, default=5, help="rounds, of which medians are taken")
    storm.set_defaults(run=_storm)

    seam = kinds.add_parser("seam", help="what DisconnectMiddleware adds to a request")
    _add_loop(seam)
    seam.add_argument("--rounds", type=int, default=60, help="pairs of rounds, with and without")
    seam.add_argument("--requests", type=int, default=200, help="requests per round")
    seam.set_defaults(run=_seam)

    bridge = kinds.add_parser("bridge", help="token events per second from thread to readers")
    _add_loop(bridge)
    bridge.add_argument("--readers", type=int, default=256)
    bridge.add_argument("--steps", type=int, default=100, help="steps per round")
    bridge.add_argument("--rounds", type=int, default=7)
    bridge.set_defaults(run=_bridge)

    host = kinds.add_parser("host", help="the host's own latency while generations run")
    host.add_argument("--model", default="tiny")
    host.add_argument("--server", choices=["uvicorn", "hypercorn"], default="uvicorn")
    host.add_argument("-n", "--clients", type=int, default=32, help="streams at once")
    host.add_argument("--max-tokens", type=int, default=256)
    host.add_argument("--seconds", type=float, default=3.0, help="of each phase")
    host.add_argument("--rounds", type=int, default=3, help="pairs of an idle and a busy phase")
    host.add_argument("--num-threads", type=int, help="of the model's computation")
    host.add_argument(
        "--switch-interval", type=float, metavar="SECONDS", help="sys.setswitchinterval of the host"
    )
    host.set_defaults(run=_host)

    for kind in (storm, seam, bridge, host):
        kind.add_argument("--json", action="store_true", help="print one JSON object")


def _add_loop(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--loop",
        choices=["asyncio", "uvloop", "trio"],
        help="one event loop instead of all that are installed",
    )


def _storm(arguments: argparse.Namespace) -> int:
    from qwen3_asgi.bench.storm import StormOptions, run_storm, table
    from qwen3_asgi.bench.storm_server import storm_server

    if sum([arguments.url is not None, arguments.in_process, arguments.server is not None]) != 1:
        print("give one of a URL, --in-process and --server", file=sys.stderr)
        return 2
    options = StormOptions(
        model=arguments.model,
        clients=arguments.clients,
        kind=arguments.kind,
        prompt_words=arguments.prompt_words,
        max_tokens=arguments.max_tokens,
        random_hang_up=arguments.random_hang_up,
        seed=arguments.seed,
        repeat=arguments.repeat,
    )
    if arguments.url is not None:
        report = run_storm(arguments.url, options)
    else:
        with storm_server(arguments.model, arguments.server) as url:
            report = run_storm(url, options)
    print(report.to_json() if arguments.json else table(report))
    return 0


def _seam(arguments: argparse.Namespace) -> int:
    from qwen3_asgi.bench.loops import chosen_loops
    from qwen3_asgi.bench.seam import SeamOptions, run_seam, table, to_json

    reports = run_seam(
        SeamOptions(
            loops=chosen_loops(arguments.loop),
            rounds=arguments.rounds,
            requests=arguments.requests,
        )
    )
    print(to_json(reports) if arguments.json else table(reports))
    return 0


def _bridge(arguments: argparse.Namespace) -> int:
    from qwen3_asgi.bench.bridge import BridgeOptions, run_bridge, table, to_json
    from qwen3_asgi.bench.loops import chosen_loops

    reports = run_bridge(
        BridgeOptions(
            loops=chosen_loops(arguments.loop),
            readers=arguments.readers,
            steps=arguments.steps,
            rounds=arguments.rounds,
        )
    )
    print(to_json(reports) if arguments.json else table(reports))
    return 0


def _host(arguments: argparse.Namespace) -> int:
    from qwen3_asgi.bench.host import HostOptions, run_host, table
    from qwen3_asgi.bench.host_app import HostSettings

    report = run_host(
        HostOptions(
            HostSettings(
                model=arguments.model,
                server=arguments.server,
                num_threads=arguments.num_threads,
                max_batch=max(32, arguments.clients),
                switch_interval=arguments.switch_interval,
            ),
            clients=arguments.clients,
            max_tokens=arguments.max_tokens,
            seconds=arguments.seconds,
            rounds=arguments.rounds,
        )
    )
    print(report.to_json() if arguments.json else table(report))
    return 0
