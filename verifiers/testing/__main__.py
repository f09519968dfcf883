"""`python -m verifiers.testing`: a fake OpenAI endpoint in a shell, to try environments and commands without a model.

There is no model behind it: it answers what it was told to. Scores against it say nothing about any policy.
"""

from __future__ import annotations

import argparse
import json
import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifiers.errors import ConfigError
from verifiers.server_process import exits_on_sigterm

if TYPE_CHECKING:
    from verifiers.testing.script import Answers

_FAILED, _USAGE, _INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until interrupted (exit code 130) or terminated (0); what cannot work is one sentence and 1 or 2."""
    args = parser().parse_args(argv)
    try:
        return _serve(args)
    except ConfigError as error:
        print(f"python -m verifiers.testing: {error}", file=sys.stderr)
        return _USAGE
    except OSError as error:
        print(
            f"python -m verifiers.testing: cannot listen on port {args.port}: {error.strerror or error}; "
            "choose another with --port, or 0 for a free one.",
            file=sys.stderr,
        )
        return _FAILED
    except KeyboardInterrupt:
        return _INTERRUPTED


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m verifiers.testing",
        description="A fake OpenAI endpoint on 127.0.0.1, without a model: it answers what it is told to.",
        epilog="examples:\n"
        "  python -m verifiers.testing --answer '\\boxed{4}'\n"
        "  python -m verifiers.testing --script answers.json --port 0",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument_group("answers").add_mutually_exclusive_group().add_argument
    add("--answer", default="ok", metavar="TEXT", help="what is answered (default: %(default)s)")
    add(
        "--script",
        metavar="FILE",
        help="*.json: a list of answers (texts or messages), given one after the other, then again from the start; "
        "*.py: its function answer(request), given the request's JSON, returns one",
    )
    add = parser.add_argument_group("address").add_argument
    add("--port", type=int, default=8000, help="port to listen on; 0 takes a free one (default: %(default)s)")
    return parser


def _serve(args: argparse.Namespace) -> int:
    answers = args.answer if args.script is None else _script(Path(args.script))
    if not 0 <= args.port <= 65535:
        raise ConfigError(f"--port is {args.port}; give 0 to 65535.")
    # aiohttp is slow to import, and a mistake above is told without it
    from verifiers.testing.fake_server import FakeOpenAIServer

    # before anything says that it is ready: who reads that may end it at once
    with exits_on_sigterm(), FakeOpenAIServer(answers, port=args.port) as server:
        what = f"{args.answer!r} to everything" if args.script is None else f"as {args.script} says"
        print(f"fake endpoint at {server.url}: no model, it answers {what}. Ctrl-C ends it.")
        print(f"try: vf-eval ENV -m fake -b {server.url}", flush=True)
        while True:
            signal.pause()


def _script(file: Path) -> Answers:
    if not file.is_file():
        raise ConfigError(f"there is no script {str(file)!r}.")
    if file.suffix == ".json":
        return _listed(file)
    if file.suffix == ".py":
        return _function(file)
    raise ConfigError(f"the script {str(file)!r} is neither a *.json nor a *.py.")


def _listed(file: Path) -> Answers:
    try:
        answers = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"the script {str(file)!r} is not valid JSON: {error}.") from error
    if not isinstance(answers, list) or not answers or not all(isinstance(answer, str | dict) for answer in answers):
        raise ConfigError(f'the script {str(file)!r} must be a list of texts or messages, like ["yes", "no"].')
    return answers


def _function(file: Path) -> Answers:
    try:
        answer: Any = runpy.run_path(str(file)).get("answer")
    except Exception as error:
        raise ConfigError(f"the script {str(file)!r} failed: {type(error).__name__}: {error}.") from error
    if not callable(answer):
        raise ConfigError(f"the script {str(file)!r} has no function answer(request).")
    function: Answers = answer
    return function


if __name__ == "__main__":
    raise SystemExit(main())
