"""The command ``vf-dataserver``: arguments, start, and an end that leaves nothing behind."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from verifiers.cli.main import CommandParser
from verifiers.errors import ConfigError, Error
from verifiers.server_process import bind, exits_on_sigterm, follow_parent
from verifiers_dataserver import __version__

if TYPE_CHECKING:
    from verifiers_dataserver.serving import Loaded


def parser() -> CommandParser:
    command = CommandParser(
        "vf-dataserver",
        "Serve prompts of a curriculum, and grades, to trainers that never see the answers.",
        examples=(
            "vf-dataserver config.yaml --check",
            "vf-dataserver config.yaml --port 9000 --token-var DATA_TOKEN",
        ),
        version=__version__,
    )
    add = command.group("data")
    add("config", type=Path, metavar="FILE", help="YAML or TOML file")
    add("--check", action="store_true", help="load and check everything, print the curriculum, and end")
    add = command.group("address")
    add("--host", help="address to bind (default: the file's, else 127.0.0.1)")
    add("--port", type=int, metavar="N", help="port to bind; 0 picks a free one (default: the file's, else 9000)")
    add("--port-file", type=Path, metavar="FILE", help="file to write the port to once the server listens")
    add("--token-var", metavar="VAR", help="environment variable that holds the token that requests must bring")
    add = command.group("process")
    add("--parent-pid", type=int, metavar="PID", help="end when this process ends")
    add("--log-level", choices=("debug", "info", "warning", "error"), default="warning", help="least level to log")
    return command


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server until SIGTERM (exit code 0) or Ctrl-C (130); a mistake gives 2 and a sentence."""
    arguments = parser().parse_args(argv)
    logging.basicConfig(level=arguments.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if arguments.parent_pid is not None:
        follow_parent(arguments.parent_pid)
    try:
        # a SIGTERM while datasets load is a normal end, too
        with exits_on_sigterm():
            return _run(arguments)
    except ConfigError as error:
        print(f"vf-dataserver: {error}", file=sys.stderr)
        return 2
    except Error as error:
        print(f"vf-dataserver: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _run(arguments: argparse.Namespace) -> int:
    from verifiers_dataserver.config import load_configuration, secret_in

    configuration = load_configuration(arguments.config)
    server = configuration.server
    token = secret_in(arguments.token_var or server.token_var)
    if arguments.port_file is not None:
        # A parent that finds the file must be able to trust it.
        arguments.port_file.unlink(missing_ok=True)
    from verifiers_dataserver import serving

    if arguments.check:
        loaded = serving.load(configuration)
        asyncio.run(loaded.rewards.close())
        print("\n".join(description(loaded)))
        return 0
    host = arguments.host if arguments.host is not None else server.host
    port = arguments.port if arguments.port is not None else server.port
    # taken before anything is loaded: a port in use is found out at once
    with bind(host, port) as listener:
        return asyncio.run(serving.serve(serving.load(configuration), listener, token, arguments.port_file))


def description(loaded: Loaded) -> list[str]:
    lines = [f"{'dataset':<20}{'rows':>10}  graders"]
    for name, rows in loaded.datasets.items():
        uses = [
            f"{use.shown_as} (gate)" if use.gate else f"{use.shown_as} x {use.weight:g}" for use in rows.table.uses()
        ]
        lines.append(f"{name:<20}{len(rows):>10,}  {', '.join(uses)}")
    lines += ["", f"{'stage':<20}{'until step':>10}  datasets"]
    for stage in loaded.configuration.curriculum.stages:
        total = sum(dataset.weight for dataset in stage.datasets)
        mix = ", ".join(f"{dataset.id} {dataset.weight / total:.1%}" for dataset in stage.datasets)
        until = "the end" if stage.until_step is None else f"{stage.until_step:,}"
        lines.append(f"{stage.name:<20}{until:>10}  {mix}")
    return lines
