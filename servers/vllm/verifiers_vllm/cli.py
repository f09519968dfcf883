"""The command ``vf-vllm``: arguments, start, and an end that leaves nothing behind."""

from __future__ import annotations

import argparse
import errno
import ipaddress
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from verifiers_vllm import __version__
from verifiers_vllm.command import environment_for, is_cpu_build, vllm_arguments
from verifiers_vllm.supervision import ServerGroup, answers, process_lives
from verifiers_vllm.versions import StartError, installed_version, known_minor

EXPOSED = (
    "anyone who reaches this port can replace the weights, pause the server and call worker methods by name, "
    "for vLLM's --api-key does not cover the weight routes"
)
_POLL_S = 0.1
# a server that was just killed lets go of its port a moment later
_PORT_WAIT_S = 5.0


def parser() -> argparse.ArgumentParser:
    """Return the options of its own; all others are vLLM's."""
    command = argparse.ArgumentParser(
        prog="vf-vllm",
        description="Start vLLM's OpenAI-compatible server with what training needs: processed log-probs, "
        "token ids, weight routes.\nOptions that are not listed here go to vLLM unchanged "
        "(see: vllm serve --help=all).",
        epilog=f"It binds to 127.0.0.1, since\n{EXPOSED}.\n\nexamples:\n"
        "  vf-vllm --model OWNER/NAME\n"
        "  vf-vllm --model path/to/model --port 0 --port-file port.txt --max-model-len 4096",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_argument("--version", action="version", version=f"vf-vllm {__version__}")
    add = command.add_argument_group("model").add_argument
    add("--model", required=True, metavar="MODEL", help="model directory, or OWNER/NAME on the hub (required)")
    add = command.add_argument_group("address").add_argument
    add("--host", default="127.0.0.1", help="address to bind (default: 127.0.0.1)")
    add("--port", type=int, default=8000, metavar="N", help="port to bind; 0 picks a free one (default: 8000)")
    add("--port-file", type=Path, metavar="FILE", help="file to write the port to once the server answers")
    add("--api-key-var", metavar="VAR", help="environment variable that holds the key for the /v1 routes")
    add = command.add_argument_group("process").add_argument
    add("--threads", type=_positive, metavar="N", help="CPU threads of each process (default: vLLM's choice)")
    add("--parent-pid", type=_positive, metavar="PID", help="end when this process ends")
    return command


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server until SIGTERM (exit code 0) or Ctrl-C (130); a start that fails gives 1 or 2 and a sentence."""
    options, given = parser().parse_known_args(argv)
    received: list[int] = []
    before = [
        (number, signal.signal(number, lambda number, frame: received.append(number)))
        for number in (signal.SIGTERM, signal.SIGINT)
    ]
    try:
        return _serve(options, given, received)
    except StartError as error:
        print(f"vf-vllm: {error}", file=sys.stderr)
        return error.exit_code
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def _serve(options: argparse.Namespace, given: Sequence[str], received: list[int]) -> int:
    if options.model.startswith(("/", ".", "~")) and not Path(options.model).expanduser().is_dir():
        raise StartError(f"--model {options.model!r} is not a directory; give the folder with config.json")
    version = installed_version()
    minor, warning = known_minor(version)
    on_cpu = is_cpu_build(version)
    environment = environment_for(given, on_cpu=on_cpu, threads=options.threads)
    if options.api_key_var is not None:
        environment["VLLM_API_KEY"] = _api_key(options.api_key_var)
    if options.port_file is not None:
        # a parent that finds the file must be able to trust it
        options.port_file.unlink(missing_ok=True)
    held = _hold_port(options.host, options.port)
    port = int(held.getsockname()[1])
    if not sys.platform.startswith("linux"):
        # only Linux lets a second socket listen where the first is merely bound
        held.close()
    for sentence in (warning, None if _is_loopback(options.host) else f"bound to {options.host}: {EXPOSED}"):
        if sentence is not None:
            print(f"vf-vllm: {sentence}.", file=sys.stderr, flush=True)
    arguments = vllm_arguments(options.model, options.host, port, given, minor, on_cpu=on_cpu)
    group = ServerGroup(arguments, environment)
    try:
        return _watch(group, options, f"{options.model} by vLLM {version}", port, held, received)
    finally:
        group.end()


def _watch(
    group: ServerGroup, options: argparse.Namespace, what: str, port: int, held: socket.socket, received: list[int]
) -> int:
    """Wait for the server's end or a signal, whose number is then in `received`; return the exit code."""
    root = _reached_at(options.host, port)
    ready = False
    while not received:
        if (code := group.exit_code) is not None:
            if ready:
                raise StartError(f"vLLM ended (exit code {code})", exit_code=1)
            cause = group.cause()
            why = f": {cause} (its lines above say more)" if cause else "; its last lines say why"
            raise StartError(f"vLLM could not be started (exit code {code}){why}", exit_code=1)
        if options.parent_pid is not None and not process_lives(options.parent_pid):
            return 1
        if not ready and answers(f"{root}/health"):
            ready = True
            held.close()
            if options.port_file is not None:
                _write_whole(options.port_file, f"{port}\n")
            print(f"{what}, listening on {root}", flush=True)
        time.sleep(_POLL_S)
    return 0 if received[0] == signal.SIGTERM else 130


def _reached_at(host: str, port: int) -> str:
    """Return the address at which this host reaches a server bound to `host`, which may be all its addresses."""
    local = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{local}]:{port}" if ":" in local else f"http://{local}:{port}"


def _hold_port(host: str, port: int) -> socket.socket:
    """Return a socket bound to the port but not listening, so that nobody else is given it until vLLM listens."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    held = socket.socket(family, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    deadline = time.monotonic() + _PORT_WAIT_S
    while True:
        try:
            held.bind((host, port))
            return held
        except OSError as error:
            if error.errno == errno.EADDRINUSE and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                continue
            held.close()
            raise StartError(
                f"cannot bind {host}:{port}: {error.strerror or error}; give another --port, or 0 for a free one",
                exit_code=1,
            ) from error


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _write_whole(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.replace(path)


def _api_key(variable: str) -> str:
    key = os.environ.get(variable, "")
    if not key:
        raise StartError(f"--api-key-var {variable}: the environment has no such variable, or it is empty; set it")
    return key


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a whole number of at least 1")
    return value
