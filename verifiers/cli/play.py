"""`vf-play ENV`: be the policy yourself; the environment answers through its own rollout loop, and scores the end."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from verifiers.cli.main import DONE, FAILED, Command, CommandFailedError, CommandParser, json_object, make_importable
from verifiers.errors import ConfigError
from verifiers.inference.wire import WireObject
from verifiers.types import message_field, message_text

_HELP = "/done on a line of its own sends what was typed; /tool NAME {json} adds a call of a tool; Ctrl-C gives up."


def parser() -> CommandParser:
    parser = CommandParser(
        "vf-play",
        "Be the policy yourself: read the prompt, type the answers, see the score.",
        examples=("vf-play my-env", "vf-play my_env.py -a '{\"n\": 100}' --split train -i 3"),
        epilog=f"While playing: {_HELP} The end of the input sends the typed text, too.",
    )
    parser.environment_group()
    add = parser.group("prompt")
    add("-i", "--example", type=int, default=0, metavar="N", help="row of the dataset, from 0")
    add("--split", choices=("train", "eval"), default="eval", help="which dataset")
    return parser


def play(args: argparse.Namespace) -> int:
    from verifiers.envs.datasets import row_fields
    from verifiers.envs.lifecycle import run_teardown
    from verifiers.envs.registry import load_environment
    from verifiers.rollouts.rollout import RolloutRequest
    from verifiers.rollouts.run import Run
    from verifiers.types import RolloutKey

    env_args = json_object("--env-args", args.env_args)
    env = load_environment(make_importable(args.env, args.env_dir_path), **env_args)
    dataset = env.get_dataset() if args.split == "train" else env.get_eval_dataset()
    if not 0 <= args.example < len(dataset):
        raise ConfigError(f"--example is {args.example}, but the {args.split} dataset has {len(dataset)} rows.")
    request = RolloutRequest(RolloutKey(0, args.example, 0), *row_fields(dataset[args.example]))
    player = Player()

    async def work() -> Any:
        runner = Run(env, player, "you", dict(env.sampling_args), rollout_timeout_s=7 * 86400.0)
        try:
            return (await runner.run_group([request])).rollouts[0]
        finally:
            await run_teardown(env)

    rollout = asyncio.run(work())
    if player.input_ended:
        raise CommandFailedError("the input ended before the rollout did, so there is no score.")
    if not isinstance(rollout.completion, str):
        player.show([*rollout.prompt, *rollout.completion])
    print(f"\n[score]\noutcome  {rollout.outcome} ({rollout.state.get('stop_condition')})\nanswer   {rollout.answer}")
    if rollout.reward is None:
        print(f"reward   none: {rollout.failure}")
        return FAILED
    print(f"reward   {rollout.reward:.4g}")
    print(*(f"  {name}  {value:.4g}" for name, value in rollout.metrics.items()), sep="\n")
    return DONE


class Player:
    """A `verifiers.inference.endpoint.Backend` whose answers a person types."""

    base_url, api_key = "terminal", ""

    def __init__(self) -> None:
        self.input_ended = False
        self._turn = asyncio.Lock()
        self._input: asyncio.StreamReader | None = None
        self._known = 0
        self._tools: list[Any] = []

    async def call(self, path: str, arguments: Mapping[str, Any]) -> Any:
        """Show a request to the policy or a judge and return the person's answer; one call at a time."""
        async with self._turn:
            if "prompt" in arguments:
                print(f"\n[text to continue]\n{arguments['prompt']}")
            else:
                self.show(arguments["messages"])
            if (tools := list(arguments.get("tools") or ())) != self._tools:
                self._tools = tools
                print("\n[tools]", *(json.dumps(tool["function"]) for tool in tools), sep="\n")
            print(f"\n[{arguments.get('model')}]  {_HELP}", flush=True)
            text, calls = await self._typed()
        answer = {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}
        choice: dict[str, Any] = {"index": 0, "finish_reason": "tool_calls" if calls else "stop", "logprobs": None}
        choice |= {"text": text} if "prompt" in arguments else {"message": answer}
        return WireObject({"id": "played", "created": 0, "model": "you", "choices": [choice], "usage": None})

    async def close(self) -> None: ...

    def show(self, messages: Sequence[Any]) -> None:
        """Print the messages after the last answer, or all of a shorter conversation, which is another one."""
        for message in messages[self._known if self._known <= len(messages) else 0 :]:
            print(f"\n[{message_field(message, 'role')}]\n{message_text(message)}")
        self._known = len(messages) + 1  # and the answer to them

    async def _typed(self) -> tuple[str, list[dict[str, Any]]]:
        lines: list[str] = []
        calls: list[dict[str, Any]] = []
        self._input = self._input or _opened_input()
        while (line := (await self._input.readline()).decode(errors="replace")) and line.strip() != "/done":
            if line.startswith("/tool "):
                name, _, given = line.removeprefix("/tool ").strip().partition(" ")
                function = {"name": name, "arguments": given or "{}"}
                calls.append({"id": f"call_{self._known}_{len(calls)}", "type": "function", "function": function})
            else:
                lines.append(line)
        if not line and not lines and not calls:
            self.input_ended = True
            raise EOFError("the input ended")
        return "".join(lines).removesuffix("\n"), calls


def _opened_input() -> asyncio.StreamReader:
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(limit=sys.maxsize)

    def read() -> None:
        # the loop is closed where the game ended before the input did
        with contextlib.suppress(RuntimeError, OSError):
            while chunk := os.read(sys.stdin.fileno(), 65536):
                loop.call_soon_threadsafe(reader.feed_data, chunk)
            loop.call_soon_threadsafe(reader.feed_eof)

    # a daemon that reads the descriptor itself: inside `input()` it would keep the process after Ctrl-C
    threading.Thread(target=read, daemon=True).start()
    return reader


main = Command(parser, play)

if __name__ == "__main__":
    sys.exit(main())
