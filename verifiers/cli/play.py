"""`vf-play ENV`: be the policy yourself; the environment answers through its own rollout loop, and scores the end."""

from __future__ import annotations

import argparse
import asyncio
import codecs
import contextlib
import json
import os
import random
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verifiers.cli.arguments import CommandParser, json_object
from verifiers.cli.main import DONE, FAILED, CommandFailedError, make_importable, run_command
from verifiers.errors import ConfigError
from verifiers.inference.endpoint import COMPLETIONS
from verifiers.inference.wire import WireObject, plain_data
from verifiers.parsers.messages import message_field

if TYPE_CHECKING:
    from verifiers.rollouts.rollout import Rollout

__all__ = ["GivenUpError", "Player", "Screen", "TerminalLines", "main", "parser"]

_MODEL = "you"
_NO_DEADLINE_S = 7 * 24 * 3600.0
_HELP = (
    "Type your answer, on one line or several. /done on a line of its own sends it. /tool NAME {json} adds a call of "
    "a tool to it. /quit gives up. Write two slashes to begin a line of text with one of these."
)
_COMMANDS = ("/done", "/tool", "/quit", "/help")
_CHUNK_BYTES = 65536


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return run_command("vf-play", lambda: play(parser().parse_args(argv)))


def parser() -> CommandParser:
    """Return the command line."""
    parser = CommandParser(
        "vf-play",
        "Be the policy yourself: read the prompt, type the answers, see the score.",
        examples=("vf-play my-env", "vf-play my_env.py -a '{\"n\": 100}' --split train -i 3"),
        epilog="While playing: /done on a line of its own sends what was typed, /tool NAME {json} adds a tool call "
        "to it, /quit gives up, /help shows this. The end of the input sends the typed text, too.",
    )
    parser.environment_group()
    add = parser.group("prompt")
    add("-i", "--example", type=int, metavar="N", help="row of the dataset, from 0 (default: 0)")
    add("--example-seed", type=int, metavar="N", help="choose the row at random, by this number")
    add("--split", choices=("train", "eval"), default="eval", help="which dataset")
    return parser


def play(args: argparse.Namespace) -> int:
    """Play one rollout; raise errors instead of printing them."""
    from verifiers.envs.datasets import row_fields
    from verifiers.envs.lifecycle import run_teardown
    from verifiers.envs.registry import load_environment
    from verifiers.rollouts.rollout import RolloutRequest
    from verifiers.rollouts.runner import RolloutRunner
    from verifiers.types import RolloutKey

    env_args = json_object("--env-args", args.env_args)
    if args.example_seed is not None and args.example is not None:
        raise ConfigError("--example-seed chooses the row at random and --example names it; give one of them.")
    args.env = make_importable(args.env, args.env_dir_path)
    env = load_environment(args.env, **env_args)
    dataset = env.get_dataset() if args.split == "train" else env.get_eval_dataset()
    example = _chosen_row(args, len(dataset))
    prompt, answer, task, info = row_fields(dataset[example])
    request = RolloutRequest(RolloutKey(0, example, 0), prompt, answer, task, info)
    screen = Screen()
    screen.note(f"{args.env}, row {example} of {len(dataset)} ({args.split})")

    async def work() -> tuple[Rollout, bool]:
        player = Player(_MODEL, screen)
        runner = RolloutRunner(env, player, _MODEL, dict(env.sampling_args), rollout_timeout_s=_NO_DEADLINE_S)
        try:
            group = await runner.run_group([request])
        finally:
            await run_teardown(env)
        rollout = group.rollouts[0]
        if not player.gave_up:
            player.show_rest(prompt, rollout.completion)
        return rollout, player.gave_up

    rollout, gave_up = asyncio.run(work())
    if gave_up:
        if screen.quit_asked:
            screen.note("given up; there is no score")
            return DONE
        raise CommandFailedError("the input ended before the rollout did, so there is no score.")
    return _show_score(screen, env, rollout)


def _chosen_row(args: argparse.Namespace, rows: int) -> int:
    if rows == 0:
        raise ConfigError(f"the {args.split} dataset of {args.env!r} has no rows.")
    if args.example_seed is not None:
        return random.Random(args.example_seed).randrange(rows)
    example = args.example or 0
    if not 0 <= example < rows:
        raise ConfigError(f"--example is {example}, but the {args.split} dataset has the rows 0 to {rows - 1}.")
    return example


def _show_score(screen: Screen, env: Any, rollout: Rollout) -> int:
    screen.heading("score")
    ended = rollout.state.get("stop_condition")
    screen.line(f"outcome  {rollout.outcome}" + (f" ({ended})" if ended else ""))
    if rollout.answer not in ("", None):
        screen.line(f"answer   {rollout.answer}")
    if rollout.reward is None:
        # a failed grade is not a reward of zero
        screen.line(f"reward   none: {rollout.failure}")
        return FAILED
    screen.line(f"reward   {rollout.reward:.4g}")
    weights = _weights(env)
    for name, value in rollout.metrics.items():
        weight = weights.get(name)
        screen.line(f"  {name}  {value:.4g}" + (f"  (weight {weight:g})" if weight is not None else ""))
    return DONE


def _weights(env: Any) -> dict[str, float]:
    """Return the weight of each reward function whose name is unique."""
    try:
        names, weights = list(env.rubric.get_reward_func_names()), list(env.rubric.get_reward_weights())
    except (AttributeError, NotImplementedError):
        # a rubric of the user's own may only score
        return {}
    return {n: w for n, w in zip(names, weights, strict=False) if names.count(n) == 1 and len(names) == len(weights)}


class GivenUpError(Exception):
    """Raised when the person gave up, or the input ended before the rollout did."""


class Screen:
    """The output of a game: in colours on a terminal, in plain lines elsewhere.

    Attributes:
        quit_asked: True when the person typed /quit, False when the input ended.
    """

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
        self.quit_asked = False

    def heading(self, text: str) -> None:
        self._console.print(f"\n[{text}]", style="bold cyan")

    def line(self, text: str) -> None:
        self._console.print(text)

    def note(self, text: str) -> None:
        self._console.print(text, style="dim")

    def prompt(self) -> None:
        """Show the input prompt on a terminal."""
        if sys.stdin.isatty():
            self._console.print("> ", end="", style="bold green")


class TerminalLines:
    """Lines of the standard input, read by a thread while the event loop runs.

    The thread is a daemon that reads the file descriptor itself: one that waits inside `input()` would keep the
    process from ending after Ctrl-C.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = sys.stdin.fileno() if descriptor is None else descriptor
        self._queue: asyncio.Queue[str | None] = asyncio.Queue()
        self._thread: threading.Thread | None = None
        self._ended = False

    async def next(self) -> str | None:
        """Return the next line without its end, or None after the last."""
        if self._ended:
            return None
        if self._thread is None:
            loop = asyncio.get_running_loop()
            self._thread = threading.Thread(target=self._read, args=(loop,), name="vf-play-input", daemon=True)
            self._thread.start()
        line = await self._queue.get()
        self._ended = line is None
        return line

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        decoder, rest = codecs.getincrementaldecoder("utf-8")(errors="replace"), ""
        # the loop is closed where the game ended before the input did
        with contextlib.suppress(RuntimeError):
            while chunk := self._next_chunk():
                *lines, rest = (rest + decoder.decode(chunk)).split("\n")
                for line in lines:
                    loop.call_soon_threadsafe(self._queue.put_nowait, line.removesuffix("\r"))
            if rest:
                loop.call_soon_threadsafe(self._queue.put_nowait, rest)
            loop.call_soon_threadsafe(self._queue.put_nowait, None)

    def _next_chunk(self) -> bytes:
        try:
            return os.read(self._descriptor, _CHUNK_BYTES)
        except OSError:
            # the input ends when the terminal is closed
            return b""


class Player:
    """A `verifiers.inference.endpoint.Backend` whose answers a person types.

    Args:
        model: name of the policy; calls that name another model are announced.

    Attributes:
        gave_up: True when no further answers come.
    """

    base_url = "terminal"
    api_key = ""

    def __init__(self, model: str, screen: Screen, lines: TerminalLines | None = None) -> None:
        self._model = model
        self._screen = screen
        self._lines = lines or TerminalLines()
        self._turn = asyncio.Lock()
        self._shown: list[dict[str, Any]] = []
        self._shown_text = ""
        self._tools: list[Any] = []
        self._calls = 0
        self._explained = False
        self.gave_up = False

    async def call(self, path: str, arguments: Mapping[str, Any]) -> Any:
        """Show a request to the policy and return the person's answer; one call at a time.

        Raises:
            GivenUpError: the person gave up, now or before.
        """
        async with self._turn:
            if self.gave_up:
                raise GivenUpError("the person gave up")
            model = arguments.get("model")
            if model != self._model:
                self._screen.note(f"\n(the environment asks the model {model!r}; you answer in its place)")
            if path == COMPLETIONS:
                return await self._complete(str(arguments.get("prompt") or ""))
            return await self._chat(arguments)

    async def close(self) -> None:
        """Do nothing: the terminal stays open."""

    def show_rest(self, prompt: Any, completion: Any) -> None:
        """Show the environment's messages after the last answer."""
        if isinstance(completion, str):
            rest = f"{prompt}{completion}".removeprefix(self._shown_text)
            if rest and len(rest) < len(f"{prompt}{completion}"):
                self._screen.heading("text added")
                self._screen.line(rest)
            return
        said = [_plain_message(message) for message in completion]
        answered = [index for index, message in enumerate(said) if message["role"] == "assistant"]
        for message in said[answered[-1] + 1 if answered else 0 :]:
            self._show(message)

    async def _chat(self, arguments: Mapping[str, Any]) -> WireObject:
        tools = list(arguments.get("tools") or ())
        messages = [_plain_message(message) for message in arguments["messages"]]
        known = len(self._shown)
        if messages[:known] != self._shown:
            if known:
                self._screen.note("\n(the conversation was changed; all of it is shown)")
            known = 0
        for message in messages[known:]:
            self._show(message)
        if tools != self._tools:
            self._show_tools(tools)
            self._tools = tools
        text, calls = await self._typed(tools)
        answer: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else "")}
        if calls:
            answer["tool_calls"] = calls
        self._shown = [*messages, _plain_message(answer)]
        return self._response({"message": answer}, "tool_calls" if calls else "stop")

    async def _complete(self, prompt: str) -> WireObject:
        if not prompt.startswith(self._shown_text):
            self._shown_text = ""
        self._screen.heading("text so far" if self._shown_text else "text to continue")
        self._screen.line(prompt[len(self._shown_text) :])
        text, _ = await self._typed([])
        self._shown_text = prompt + text
        return self._response({"text": text}, "stop")

    def _response(self, content: dict[str, Any], finish_reason: str) -> WireObject:
        self._calls += 1
        return WireObject(
            {
                "id": f"played-{self._calls}",
                "object": "text_completion" if "text" in content else "chat.completion",
                "created": 0,
                "model": self._model,
                "choices": [{"index": 0, "finish_reason": finish_reason, "logprobs": None, **content}],
                "usage": None,
            }
        )

    def _show(self, message: Mapping[str, Any]) -> None:
        self._screen.heading(message["role"])
        if message["content"]:
            self._screen.line(message["content"])
        for name, given in message["tool_calls"]:
            self._screen.line(f"calls {name} {given}")

    def _show_tools(self, tools: Sequence[Any]) -> None:
        self._screen.heading("tools")
        for tool in tools:
            function = tool.get("function") or {}
            described = (function.get("parameters") or {}).get("properties") or {}
            self._screen.line(f"{function.get('name')}({', '.join(described)}): {function.get('description') or ''}")
            for name, schema in described.items():
                kind = schema.get("type") or "any"
                self._screen.line(f"  {name} ({kind}): {schema.get('description') or ''}".rstrip(": "))

    async def _typed(self, tools: Sequence[Any]) -> tuple[str, list[dict[str, Any]]]:
        """Read the text and the tool calls of one answer."""
        self._screen.heading("you")
        if not self._explained:
            self._screen.note(_HELP)
            self._explained = True
        text: list[str] = []
        calls: list[dict[str, Any]] = []
        while True:
            self._screen.prompt()
            line = await self._lines.next()
            command = _command(line)
            if command == "/quit" or (line is None and not text and not calls):
                self.gave_up = True
                self._screen.quit_asked = command == "/quit"
                raise GivenUpError("the input ended" if line is None else "the person gave up")
            if line is None or command == "/done":
                return "\n".join(text), calls
            if command == "/help":
                self._screen.note(_HELP)
            elif command == "/tool":
                call = self._tool_call(line, tools, len(calls))
                if call is not None:
                    calls.append(call)
            else:
                text.append(line[1:] if line.startswith("/") and _command(line[1:]) else line)

    def _tool_call(self, line: str, tools: Sequence[Any], index: int) -> dict[str, Any] | None:
        """Return the tool call in a line, or None, with a note, where the line holds no valid call."""
        _, name, given = [*line.split(maxsplit=2), "", ""][:3]
        names = [(tool.get("function") or {}).get("name") for tool in tools]
        if name not in names:
            there = f"there are {', '.join(map(str, names))}" if names else "there are none here"
            self._screen.note(f"there is no tool {name!r}; {there}")
            return None
        given = given or "{}"
        try:
            if not isinstance(json.loads(given), dict):
                raise ValueError("it is not an object")
        except ValueError as error:
            self._screen.note(f"{given!r} cannot be its arguments ({error}); write '/tool {name} {{\"x\": 1}}'")
            return None
        function = {"name": name, "arguments": given}
        return {"id": f"call_{self._calls}_{index}", "type": "function", "function": function}


def _command(line: str | None) -> str | None:
    """Return the command in a line, or None for text."""
    words = (line or "").split(maxsplit=1)
    first = words[0] if words else ""
    takes_more = first == "/tool"
    return first if first in _COMMANDS and (takes_more or len(words) == 1) else None


def _plain_message(message: Any) -> dict[str, Any]:
    """Return the shown part of a message: role, text, tool calls."""
    content = message_field(message, "content")
    if isinstance(content, list):
        parts = (plain_data(part) for part in content)
        content = "\n".join(str(part.get("text") or f"({part.get('type')})") for part in parts)
    calls = []
    for call in message_field(message, "tool_calls") or ():
        function = plain_data(plain_data(call).get("function") or {})
        calls.append((function.get("name"), function.get("arguments")))
    return {"role": message_field(message, "role"), "content": content or "", "tool_calls": calls}


if __name__ == "__main__":
    sys.exit(main())
