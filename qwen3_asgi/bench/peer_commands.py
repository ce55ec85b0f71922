"""The arguments of what measures another server beside ours: `bench storm --compare`, `make-model`.

Imports no benchmark until one is run: the command line must start fast.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse


def add_peer_commands(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `make-model`."""
    make = kinds.add_parser("make-model", help="write a checkpoint with random weights")
    make.add_argument("name", help='a shape, such as "Qwen3-0.6B", or "tiny"')
    make.add_argument("folder", type=Path, help="new, or empty")
    make.add_argument(
        "--gguf", type=Path, metavar="FILE", help="the same weights for llama.cpp, in bfloat16"
    )
    make.add_argument("--json", action="store_true", help="print one JSON object")
    make.set_defaults(run=_make_model)


def add_peer_options(storm: argparse.ArgumentParser) -> None:
    """Add to `bench storm` what storms on several servers need."""
    storm.add_argument(
        "--compare",
        nargs="+",
        default=[],
        metavar="URL",
        help="the same hang-ups for these OpenAI-compatible servers, in turn, seen from outside",
    )
    storm.add_argument(
        "--pid", type=int, help="the first server's process (default: who listens on its port)"
    )
    storm.add_argument(
        "--compare-pid", type=int, nargs="+", default=[], metavar="PID", help="those of --compare"
    )
    storm.add_argument(
        "--hang-up-after",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="with --compare: when clients hang up, after the last one's request (default 1)",
    )


def storm_beside_peers(arguments: argparse.Namespace) -> int:
    """`bench storm` with `--compare`."""
    from qwen3_asgi.bench.peer_storm import Peer, PeerStormOptions, run_peer_storm, table
    from qwen3_asgi.bench.storm_server import storm_server

    if arguments.in_process or arguments.random_hang_up is not None:
        print("--compare goes with neither --in-process nor --random-hang-up", file=sys.stderr)
        return 2
    pids: list[int | None] = list(arguments.compare_pid) or [None] * len(arguments.compare)
    if len(pids) != len(arguments.compare):
        raise ValueError(
            f"--compare-pid has {len(pids)} processes for {len(arguments.compare)} servers"
        )
    options = PeerStormOptions(
        clients=arguments.clients,
        kinds=("plain", "stream") if arguments.kind == "both" else (arguments.kind,),
        prompt_words=arguments.prompt_words,
        max_tokens=arguments.max_tokens,
        hang_up_after=arguments.hang_up_after,
        repeat=arguments.repeat,
    )
    with ExitStack() as stack:
        url = arguments.url
        if url is None:
            url = stack.enter_context(storm_server(arguments.model, arguments.server))
        urls = zip([url, *arguments.compare], [arguments.pid, *pids], strict=True)
        # Each server has its own name for the model: what it lists.
        peers = [Peer(each, pid) for each, pid in urls]
        report = run_peer_storm(peers, options)
    print(report.to_json() if arguments.json else table(report))
    return 0


def _make_model(arguments: argparse.Namespace) -> int:
    from qwen3_asgi.bench.made_model import make_model

    size = make_model(arguments.name, arguments.folder)
    if arguments.gguf is not None:
        from qwen3_asgi.model.gguf_file import write_gguf

        write_gguf(arguments.folder, arguments.gguf)
    told = {"name": arguments.name, "folder": str(arguments.folder), "weight_bytes": size}
    words = f"{arguments.folder}: {arguments.name} with random weights, {size / 1e9:.2f} GB"
    print(json.dumps(told) if arguments.json else words)
    return 0
