"""The arguments of `qwen3-asgi bench …`, and what each command prints: a table, or one JSON object.

Imports no benchmark until one is run: the command line must start fast.
"""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from qwen3_asgi.bench.peer_commands import (
    add_peer_commands,
    add_peer_options,
    storm_beside_peers,
)
from qwen3_asgi.bench.speed_commands import add_speed_commands

if TYPE_CHECKING:
    import argparse

Options = TypeVar("Options", bound=Any)  # a dataclass


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add every benchmark to `qwen3-asgi bench`; each sets `run`, which returns the exit status."""
    kinds = parser.add_subparsers(dest="bench", required=True)
    add_speed_commands(kinds)
    add_peer_commands(kinds)

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
    add_peer_options(storm)
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

    chaos = kinds.add_parser("chaos", help="everything goes wrong for a while: what is left?")
    chaos.add_argument("--model", choices=["fake", "tiny"], default="fake")
    chaos.add_argument("--minutes", type=float, default=20.0)
    chaos.add_argument("-n", "--clients", type=int, default=36)
    chaos.add_argument("--leave", type=float, default=0.5, help="the part that hangs up")
    chaos.add_argument("--fail-every", type=int, default=200, metavar="STEPS")
    chaos.add_argument("--prompts", type=int, default=24, help="different prompts")
    chaos.add_argument("--overlap", action="store_true", help="prefill beside decode")
    chaos.add_argument("--pipelined", action="store_true", help="and decode ahead")
    chaos.add_argument("--seed", type=int, default=0)
    chaos.set_defaults(run=_chaos)

    scheduler = kinds.add_parser("scheduler", help="what an iteration and a sweep cost")
    scheduler.add_argument(
        "--live", type=int, nargs="+", default=[1, 256, 1024, 4096], help="requests at once"
    )
    scheduler.add_argument("--max-active", type=int, default=256, help="where the rest waits")
    scheduler.add_argument("--rounds", type=int, default=5)
    scheduler.add_argument("--iterations", type=int, default=40, help="of each scene and round")
    scheduler.add_argument("--sweeps", type=int, default=3, help="of each scene and round")
    scheduler.set_defaults(run=_scheduler)

    itl = kinds.add_parser("itl", help="time between tokens while long prompts arrive")
    _add_model(itl, prompt_tokens=16_384)
    itl.add_argument("-n", "--clients", type=int, default=8, help="who decode")
    itl.add_argument("--prompts", type=int, default=3, help="one after the other")
    itl.add_argument(
        "--overlap", choices=["on", "off"], help="only with or without it; both by default"
    )
    itl.set_defaults(run=_itl)

    timeline = kinds.add_parser("timeline", help="an SVG picture of what the scheduler does")
    timeline.add_argument("svg", type=Path, help="the file to write")
    _add_model(timeline, prompt_tokens=4096)
    timeline.add_argument("-n", "--clients", type=int, default=4, help="who decode")
    timeline.add_argument("--overlap", action="store_true")
    timeline.add_argument(
        "--from", dest="source", type=Path, metavar="FILE", help="draw this trace; run nothing"
    )
    timeline.add_argument(
        "--save", type=Path, metavar="FILE", help="write the trace, too, as JSON lines"
    )
    timeline.add_argument("--title", default="scheduler")
    timeline.add_argument(
        "--window",
        type=float,
        nargs=2,
        metavar=("BEGIN", "END"),
        help="only this part, in milliseconds",
    )
    timeline.set_defaults(run=_timeline, json=False)

    tiers = kinds.add_parser("tiers", help="TTFT of a cached prefix, by where it lies")
    tiers.add_argument("--model", default="tiny")
    tiers.add_argument("--device", default="auto")
    tiers.add_argument("--dtype", default="auto")
    tiers.add_argument("--num-threads", type=int)
    tiers.add_argument("--prompt-tokens", type=int, default=4096)
    tiers.add_argument("--repeats", type=int, default=5)
    tiers.add_argument("--host-gib", type=float, default=2.0)
    tiers.add_argument("--file-gib", type=float, default=2.0)
    tiers.add_argument("--folder", help="where the file is put")
    tiers.set_defaults(run=_tiers)

    for kind in (storm, seam, bridge, host, chaos, scheduler, itl, tiers):
        kind.add_argument("--json", action="store_true", help="print one JSON object")


def _add_loop(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--loop",
        choices=["asyncio", "uvloop", "trio"],
        help="one event loop instead of all that are installed",
    )


def _add_model(parser: argparse.ArgumentParser, *, prompt_tokens: int) -> None:
    parser.add_argument("--prompt-tokens", type=int, default=prompt_tokens, help="of a long prompt")
    parser.add_argument(
        "--chunk-tokens", type=int, default=512, help="EngineConfig's prefill limit"
    )
    parser.add_argument("--device", default="cpu")


def _options(kind: type[Options], arguments: argparse.Namespace, **others: object) -> Options:
    """The options of a benchmark: each field from the argument of its name, unless given here."""
    given = {
        field.name: getattr(arguments, field.name)
        for field in fields(kind)
        if hasattr(arguments, field.name)
    }
    options: Options = kind(**{**given, **others})
    return options


def _storm(arguments: argparse.Namespace) -> int:
    from qwen3_asgi.bench.storm import StormOptions, run_storm, table
    from qwen3_asgi.bench.storm_server import storm_server

    if sum([arguments.url is not None, arguments.in_process, arguments.server is not None]) != 1:
        print("give one of a URL, --in-process and --server", file=sys.stderr)
        return 2
    if arguments.compare:
        return storm_beside_peers(arguments)
    options = _options(StormOptions, arguments)
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

    reports = run_seam(_options(SeamOptions, arguments, loops=chosen_loops(arguments.loop)))
    print(to_json(reports) if arguments.json else table(reports))
    return 0


def _bridge(arguments: argparse.Namespace) -> int:
    from qwen3_asgi.bench.bridge import BridgeOptions, run_bridge, table, to_json
    from qwen3_asgi.bench.loops import chosen_loops

    reports = run_bridge(_options(BridgeOptions, arguments, loops=chosen_loops(arguments.loop)))
    print(to_json(reports) if arguments.json else table(reports))
    return 0


def _chaos(arguments: argparse.Namespace) -> int:
    from qwen3_asgi.bench.chaos import ChaosOptions, run_chaos, table

    report = run_chaos(_options(ChaosOptions, arguments))
    print(report.to_json() if arguments.json else table(report))
    return 0 if report.ok else 1


def _tiers(arguments: argparse.Namespace) -> int:
    from qwen3_asgi.bench.tiers import TiersOptions, run_tiers, table

    report = run_tiers(_options(TiersOptions, arguments))
    print(report.to_json() if arguments.json else table(report))
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


def _scheduler(arguments: argparse.Namespace) -> int:
    from qwen3_asgi.bench.scheduler import SchedulerOptions, run_scheduler, table, to_json

    reports = run_scheduler(_options(SchedulerOptions, arguments, live=tuple(arguments.live)))
    print(to_json(reports) if arguments.json else table(reports))
    return 0


def _itl(arguments: argparse.Namespace) -> int:
    from qwen3_asgi.bench.itl import ItlOptions, run_itl, table, to_json

    overlap = (False, True) if arguments.overlap is None else (arguments.overlap == "on",)
    measured = run_itl(_options(ItlOptions, arguments, overlap=overlap))
    print(to_json(measured) if arguments.json else table(measured))
    return 0


def _timeline(arguments: argparse.Namespace) -> int:
    from qwen3_asgi.bench.drawing import Window, timeline, whole
    from qwen3_asgi.bench.timeline import TimelineOptions, record
    from qwen3_asgi.scheduler.trace import from_json_lines, to_json_lines

    try:
        if arguments.source is None:
            trace = record(_options(TimelineOptions, arguments))
        else:
            trace = from_json_lines(arguments.source.read_text(encoding="utf-8").splitlines())
        window = whole(trace)
        if arguments.window is not None:
            begin, end = (window.begin + ms / 1000 for ms in arguments.window)
            window = Window(begin, end)
        picture = timeline(trace, arguments.title, window)
    except (OSError, ValueError) as error:
        print(f"nothing to draw: {error}", file=sys.stderr)
        return 2
    if arguments.save is not None:
        arguments.save.write_text("\n".join([*to_json_lines(trace), ""]), encoding="utf-8")
    arguments.svg.write_text(picture, encoding="utf-8")
    print(f"{arguments.svg}: {len(trace.iterations)} iterations")
    return 0
