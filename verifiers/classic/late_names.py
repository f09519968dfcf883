"""Types and functions of the classic package that nothing else here needs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from verifiers.errors import ConfigError
from verifiers.parsers import messages as parsers_messages
from verifiers.parsers.messages import message_field
from verifiers.types import ModelResponse, Record, RewardFunc

__all__ = ["ErrorChain", "concat_messages", "ensure_keys", "log_level", "maybe_semaphore", "quiet_verifiers"]

Response = ModelResponse
"""The late second generation's name of a model's answer."""

DatasetBuilder = Callable[[], Any]
"""A function without arguments that returns a dataset."""

IndividualRewardFunc = GroupRewardFunc = RewardFunc

TrajectoryStepTokens = dict[str, Any]
"""Token ids, masks and log-probs of one model call."""


class GenerateMetadata(Record):
    """Figures that the rollouts of one call share: `results.metadata`."""


class RolloutOutput(Record):
    """One rollout of `results.outputs`."""


class RolloutTiming(Record):
    """Milliseconds of a rollout: generation_ms, scoring_ms, total_ms."""


class TextContentPart(Record):
    """Text in a message's content."""

    def __init__(self, text: str = "", **fields: Any) -> None:
        super().__init__(type="text", text=text, **fields)


class ImageUrlContentPart(Record):
    """An image in a message's content: `image_url` is {"url": ...}."""

    def __init__(self, image_url: Any = None, **fields: Any) -> None:
        super().__init__(type="image_url", image_url=image_url, **fields)


class InputAudioContentPart(Record):
    """A sound in a message's content: `input_audio` is {"data": ..., "format": ...}."""

    def __init__(self, input_audio: Any = None, **fields: Any) -> None:
        super().__init__(type="input_audio", input_audio=input_audio, **fields)


class MissingKeyError(ConfigError):
    """Environment variables that a package needs and that are not set.

    Attributes:
        keys: their names.
    """

    def __init__(self, keys: list[str]) -> None:
        self.keys = keys
        super().__init__(f"The environment variables {', '.join(keys)} are not set; export them before you run this.")


def ensure_keys(keys: Iterable[str]) -> None:
    """Check that environment variables are set.

    Raises:
        MissingKeyError: with the names of those that are not.
    """
    if missing := [key for key in keys if not os.environ.get(key)]:
        raise MissingKeyError(missing)


@contextlib.contextmanager
def log_level(level: str | int) -> Iterator[None]:
    """Log from this level on inside the block, by the logger `verifiers`."""
    logger = logging.getLogger("verifiers")
    before = logger.level
    logger.setLevel(level.upper() if isinstance(level, str) else level)
    try:
        yield
    finally:
        logger.setLevel(before)


def quiet_verifiers() -> contextlib.AbstractContextManager[None]:
    """Log warnings and errors alone inside the block."""
    return log_level("WARNING")


async def maybe_semaphore(limit: int | None = None) -> contextlib.AbstractAsyncContextManager[Any]:
    """Return a semaphore of `limit` slots, or for None, 0 and less what never waits."""
    return asyncio.Semaphore(limit) if limit and limit > 0 else contextlib.nullcontext()


def concat_messages(parts: Iterable[Iterable[Any]]) -> list[Any]:
    """Return the messages of several conversations as one list."""
    return [message for part in parts for message in part]


def sanitize_tool_calls(messages: Any) -> Any:
    """Return messages whose tool calls are JSON texts; other messages, and a string, are returned as they are."""
    plain = parsers_messages.sanitize_tool_calls(messages)
    if isinstance(plain, str):
        return plain
    return [
        {**message, "tool_calls": [json.dumps(call) for call in message["tool_calls"]]}
        if message_field(message, "tool_calls")
        else message
        for message in plain
    ]


class ErrorChain:
    """An error with its causes, as text.

    Args:
        error: the outermost.
    """

    def __init__(self, error: BaseException) -> None:
        self.root_error = error
        self.chain: list[BaseException] = []
        following: BaseException | None = error
        while following is not None and following not in self.chain:
            self.chain.append(following)
            following = following.__cause__

    def __str__(self) -> str:
        return " -> ".join(type(error).__name__ for error in self.chain)

    def __repr__(self) -> str:
        return " -> ".join(map(repr, self.chain))

    def __contains__(self, kind: type[BaseException]) -> bool:
        return any(isinstance(error, kind) for error in self.chain)


async def parse_response_message(response: Any) -> list[Any]:
    """Return a model's answer as messages."""
    from verifiers.inference.wire import assistant_message

    return [assistant_message(response.choices[0].message)]
