"""`vf-view DIR`: look at the runs of a folder in a browser, also while they are in progress."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from verifiers.cli.arguments import CommandParser
from verifiers.cli.main import DONE, run_command
from verifiers.errors import ConfigError

__all__ = ["main", "parser"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return run_command("vf-view", lambda: view(parser().parse_args(argv)))


def parser() -> CommandParser:
    """Return the command line."""
    parser = CommandParser(
        "vf-view",
        "Look at the runs of a folder in a browser on this machine, also while they are in progress.",
        examples=("vf-view", "vf-view outputs/evals --port 0"),
        epilog="Ctrl-C ends it.",
    )
    add = parser.group("runs")
    add("directory", nargs="?", default="outputs", metavar="DIR", help="folder of runs, or one run")
    add = parser.group("server")
    add("--port", type=int, default=7480, metavar="N", help="port on 127.0.0.1; 0 takes a free one")
    return parser


def view(args: argparse.Namespace) -> int:
    """Serve the runs in a directory; return when the command is interrupted."""
    if not 0 <= args.port <= 65535:
        raise ConfigError(f"--port is {args.port}; give a number from 0 to 65535.")
    asyncio.run(_serve(Path(args.directory), args.port))
    return DONE


async def _serve(directory: Path, port: int) -> None:
    from verifiers.reports.server import RunServer

    server = RunServer(directory, port)
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        # being interrupted is how this command ends, so it is not a failure
        loop.add_signal_handler(number, ended.set)
    await server.start()
    try:
        print(f"{directory} at {server.url} (Ctrl-C ends it)", flush=True)
        await ended.wait()
    finally:
        await server.close()


if __name__ == "__main__":
    sys.exit(main())
