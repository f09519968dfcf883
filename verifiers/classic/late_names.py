"""Types and functions of the classic package that nothing else here needs.

A tool is written `vf.Tool(name, description, parameters)` by the late second generation. Inside it is OpenAI's dict,
`{"type": "function", "function": {...}}`; a `ToolDef` is that dict, whose fields are found in both places.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verifiers.envs.tools import TOOL_FIELDS, convert_func_to_oai_tool, openai_tools
from verifiers.errors import ConfigError
from verifiers.parsers import messages as parsers_messages
from verifiers.rubrics.rubric import Rubric
from verifiers.rubrics.tool_rubric import ToolRubric
from verifiers.types import ClientConfig, ModelResponse, Record, RewardFunc, State, message_field

if TYPE_CHECKING:
    from openai import AsyncOpenAI

Response = ModelResponse
"""The late second generation's name of a model's answer."""

DatasetBuilder = Callable[[], Any]
"""A function without arguments that returns a dataset."""

IndividualRewardFunc = GroupRewardFunc = RewardFunc

TrajectoryStepTokens = dict[str, Any]
"""Token ids, masks and log-probs of one model call."""


GenerateMetadata = RolloutOutput = RolloutTiming = Record
"""`results.metadata`, an item of `results.outputs`, and the milliseconds of a rollout."""


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


class ToolDef(Record):
    """A tool's definition: OpenAI's dict, with `name`, `description`, `parameters` and `strict` as fields of its own.

    `parameters` are a JSON schema of the arguments; `strict` asks the server to keep to it, and is left out where it
    is None.
    """

    def __init__(
        self,
        name: str,
        description: str = "",
        parameters: Mapping[str, Any] | None = None,
        strict: bool | None = None,
    ) -> None:
        fields = {"name": name, "description": description, "parameters": dict(parameters or {}), "strict": strict}
        dict.__init__(self, openai_tools([fields])[0])

    @classmethod
    def model_validate(cls, tool: Any) -> ToolDef:
        """Return a tool given in any form: a `ToolDef`, OpenAI's dict, or fields as a dict or an object."""
        if isinstance(tool, cls):
            return tool
        made = cls.__new__(cls)
        dict.update(made, openai_tools([tool])[0])
        return made

    def __missing__(self, name: str) -> Any:
        function = dict.get(self, "function") or {}
        if name in function or name not in TOOL_FIELDS:
            return function[name]
        return None

    def __setattr__(self, name: str, value: Any) -> None:
        (self["function"] if name in TOOL_FIELDS else self)[name] = value

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self or name in TOOL_FIELDS else default

    def model_dump(self, **_: Any) -> dict[str, Any]:
        return {name: self[name] for name in TOOL_FIELDS}


def convert_func_to_tool_def(func: Callable[..., Any]) -> ToolDef:
    """Return a function's definition out of its signature and docstring; as `convert_func_to_oai_tool`."""
    return ToolDef.model_validate(convert_func_to_oai_tool(func))


def tool_defs_of(tools: Iterable[Any] | None) -> list[Any] | None:
    """Return the tools as `ToolDef`s; a list that holds nothing else is returned itself, and so is None."""
    if tools is None or (isinstance(tools, list) and all(isinstance(tool, ToolDef) for tool in tools)):
        return tools
    return [ToolDef.model_validate(tool) for tool in tools]


class MissingKeyError(ConfigError):
    """Environment variables that a package needs and that are not set: `keys`."""

    def __init__(self, keys: list[str]) -> None:
        self.keys = keys
        super().__init__(f"The environment variables {', '.join(keys)} are not set; export them before you run this.")


def ensure_keys(keys: Iterable[str]) -> None:
    """Check that environment variables are set; raise a MissingKeyError with the names of those that are not."""
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
    return list(itertools.chain.from_iterable(parts))


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
    """An error with its causes, as text."""

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


async def parse_response_messages(response: Any, message_type: str) -> Any:
    """Return a model's answer as messages, or its text where `message_type` is "completion"."""
    return await parse_response_message(response) if message_type == "chat" else response.choices[0].text or ""


def setup_client(config: ClientConfig | Mapping[str, Any] | Any = None, **settings: Any) -> AsyncOpenAI:
    """Return an `openai.AsyncOpenAI` for an endpoint, with the key that the environment has, or else "EMPTY".

    `config` is a `ClientConfig`, or a mapping or object with fields of the same names; `settings` win over them. One
    that there is not is a ConfigError.
    """
    names = list(ClientConfig.__slots__)
    unknown = sorted({*settings, *(config if isinstance(config, Mapping) else ())} - set(names))
    if unknown:
        raise ConfigError(f"setup_client has no setting {unknown[0]!r}, only {', '.join(names)}.")
    given = config if isinstance(config, Mapping) else {name: getattr(config, name, None) for name in names}
    chosen = ClientConfig(**{name: value for name, value in {**given, **settings}.items() if value is not None})
    from openai import AsyncOpenAI

    return AsyncOpenAI(
        base_url=chosen.api_base_url,
        api_key=os.environ.get(chosen.api_key_var, "").strip() or "EMPTY",
        timeout=chosen.timeout,
        max_retries=chosen.max_retries,
        default_headers=dict(chosen.extra_headers) or None,
    )


# -- rubrics that measure rollouts and reward nothing: environments here do not add them by themselves --------------


class MultiTurnMonitorRubric(Rubric):
    """The metric `num_turns`: answers of the policy."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_metric(self.num_turns)

    async def num_turns(self, state: State) -> float:
        return float(len(state["trajectory"]))


class SandboxMonitorRubric(Rubric):
    """The metrics `sandbox_ready_wait_time` and `sandbox_command_execution_time` of a `SandboxEnv`, in seconds."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_metric(self.sandbox_ready_wait_time)
        self.add_metric(self.sandbox_command_execution_time)

    async def sandbox_ready_wait_time(self, state: State) -> float:
        return float(state["sandbox_state"]["ready_wait_time"])

    async def sandbox_command_execution_time(self, state: State) -> float:
        """Return the mean seconds of a command, 0.0 without commands."""
        times = state["sandbox_state"]["command_execution_times"]
        return sum(times) / len(times) if times else 0.0


class ToolMonitorRubric(ToolRubric):
    """`ToolRubric` by the names of the tools, which may be added and removed."""

    def __init__(self, tool_names: Sequence[str] | None = None, **kwargs: Any) -> None:
        super().__init__(tool_names, **kwargs)

    def add_tool_metric(self, tool_name: str) -> None:
        if tool_name not in self.tool_names:
            self.tool_names.append(tool_name)
            self.add_metric(self.get_tool_call_count_func(tool_name))

    def remove_tool_metric(self, tool_name: str) -> None:
        if tool_name in self.tool_names:
            self.tool_names.remove(tool_name)
            place = self.get_reward_func_names().index(f"{tool_name}_calls")
            del self.reward_funcs[place], self.reward_weights[place]
