"""An environment served as OpenEnv: episodes over its WebSocket protocol, for trainers and clients that speak that.

An episode is one rollout whose policy is at the other end. A reset begins it, each step is the policy's next answer,
and each observation is what the policy is asked then. The last one has the reward. A rollout that fails is an error
that names the failure, never a reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aiohttp import WSMsgType, web

from verifiers.envs.datasets import row_fields
from verifiers.http_requests import app_runner, is_loopback_host
from verifiers.inference.wire import WireObject
from verifiers.rollouts.rollout import RolloutRequest
from verifiers.rollouts.run import Run
from verifiers.server_process import is_loopback_address
from verifiers.types import RolloutKey, message_text

if TYPE_CHECKING:
    import socket

    from verifiers.envs.environment import Environment
    from verifiers.rollouts.rollout import Rollout

MAX_MESSAGE_BYTES = 32 << 20
_HEARTBEAT_S = 30.0
_LISTED = 1000

_TEXT: dict[str, Any] = {"type": "string"}
_MESSAGES = {"type": "array", "items": {"type": "object"}}
SCHEMAS: dict[str, dict[str, Any]] = {
    "action": {
        "type": "object",
        "properties": {
            "message": {**_TEXT, "description": "the policy's answer"},
            "tool_calls": {**_MESSAGES, "description": "calls of tools, as in OpenAI's messages"},
            "metadata": {"type": "object"},
        },
        "required": ["message"],
        "additionalProperties": False,
    },
    "observation": {
        "type": "object",
        "properties": {
            "text": {**_TEXT, "description": "the new messages' contents"},
            "messages": {**_MESSAGES, "description": "what is new since the policy's last answer"},
            "tools": {**_MESSAGES, "description": "that the policy may call; only where they changed"},
            "outcome": {**_TEXT, "description": "how the episode ended"},
            "metrics": {"type": "object", "description": "of the reward functions, at the end"},
        },
    },
    "state": {
        "type": "object",
        "properties": {"episode_id": _TEXT, "task_id": {"type": "integer"}, "step_count": {"type": "integer"}},
    },
}


class ActionRefusedError(ValueError):
    """A message of the other side that cannot be followed; the text says why."""


class RemotePolicy:
    """A `verifiers.inference.endpoint.Backend` whose answers come from the other side of a session, one at a time."""

    base_url, api_key = "openenv", ""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._asked: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self._answer: asyncio.Future[dict[str, Any]] | None = None

    async def call(self, path: str, arguments: Mapping[str, Any]) -> Any:
        async with self._turn:
            self._answer = asyncio.get_running_loop().create_future()
            self._asked.set_result(arguments)
            message = await self._answer
        calls = message.get("tool_calls")
        choice: dict[str, Any] = {"index": 0, "finish_reason": "tool_calls" if calls else "stop", "logprobs": None}
        choice |= {"text": message["content"]} if "prompt" in arguments else {"message": message}
        return WireObject({"id": "remote", "created": 0, "model": "policy", "choices": [choice], "usage": None})

    async def close(self) -> None: ...

    async def question(self, played: asyncio.Task[Any]) -> Mapping[str, Any] | None:
        """Return the arguments of the next call; None where the rollout ends without one."""
        await asyncio.wait([self._asked, played], return_when=asyncio.FIRST_COMPLETED)
        return self._asked.result() if self._asked.done() else None

    def answer(self, message: dict[str, Any]) -> None:
        self._asked = asyncio.get_running_loop().create_future()
        # a rollout whose time has run out takes no answer
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(message)


class Episode:
    """One rollout, played and scored in a task; `observe` after each answer."""

    def __init__(self, env: Environment, request: RolloutRequest, episode_id: str, **limits: Any) -> None:
        self.task_id, self.episode_id, self.steps = request.key.example_id, episode_id, 0
        self._policy = RemotePolicy()
        run = Run(env, self._policy, "policy", dict(env.sampling_args), **limits)
        self._played = asyncio.create_task(run.run_group([request]))
        self._known: list[Any] = []
        self._tools: list[Any] = []

    @property
    def is_over(self) -> bool:
        return self._played.done()

    async def observe(self) -> dict[str, Any]:
        """Return the data of an observation: what the policy is asked now, or how the episode ended.

        Raises:
            Exception: the rollout has no reward, with its failure.
        """
        asked = await self._policy.question(self._played)
        if asked is None:
            return self._ended(self._played.result().rollouts[0])
        text = asked.get("prompt")
        messages = list(asked["messages"]) if text is None else [{"role": "user", "content": text}]
        observation: dict[str, Any] = self._new(messages)
        if (tools := list(asked.get("tools") or ())) != self._tools:
            self._tools = observation["tools"] = tools
        return {"observation": observation, "reward": None, "done": False}

    async def step(self, message: dict[str, Any]) -> dict[str, Any]:
        self.steps += 1
        self._known.append(message)
        self._policy.answer(message)
        return await self.observe()

    async def close(self) -> None:
        """Cancel what still plays."""
        self._played.cancel()
        await asyncio.wait([self._played])

    def _new(self, messages: Sequence[Any]) -> dict[str, Any]:
        """Return the messages after the last answer, or all of another conversation."""
        known = len(self._known) if len(messages) >= len(self._known) else 0
        new = [dict(one) for one in messages[known:]]
        self._known = list(messages)
        return {"text": "\n\n".join(text for one in new if (text := message_text(one))), "messages": new}

    def _ended(self, rollout: Rollout) -> dict[str, Any]:
        if rollout.reward is None:
            raise RuntimeError(f"the rollout ended as {rollout.outcome}: {rollout.failure}")
        said = [] if isinstance(rollout.completion, str) else [*rollout.prompt, *rollout.completion]
        ended = {**self._new(said), "outcome": str(rollout.outcome), "metrics": dict(rollout.metrics)}
        return {"observation": ended, "reward": rollout.reward, "done": True}


class OpenEnvServer:
    """A server of an environment's rows as tasks, each played in a session of its own.

    A reset takes the row `task_id`, else the row that `seed` gives, else the next one. Routes: `/ws`, `/health`,
    `/schema`, `/metadata`, and `/tasks?from=N`, a thousand ids at a time.

    Args:
        rows: the dataset that is played.
        max_sessions: sessions at once; further ones are told CAPACITY_REACHED.
        limits: `rollout_timeout_s` and `grading_timeout_s` of `Run`; the policy's time counts towards the first.
    """

    def __init__(self, env: Environment, rows: Any, name: str, *, max_sessions: int = 64, **limits: Any) -> None:
        self._env, self._rows, self._name, self._limits = env, rows, name, limits
        self._max_sessions, self._sessions, self._next = max_sessions, 0, 0
        self._runner: web.AppRunner | None = None

    async def start(self, listener: socket.socket) -> None:
        app = web.Application()
        app.router.add_get("/ws", self._session)
        app.router.add_get("/health", _answers({"status": "healthy"}))
        app.router.add_get("/schema", _answers(SCHEMAS))
        described = {"name": self._name, "description": f"{type(self._env).__name__} of verifiers"}
        app.router.add_get("/metadata", _answers(described))
        app.router.add_get("/tasks", self._tasks)
        names = is_loopback_host if is_loopback_address(listener.getsockname()[0]) else None
        self._runner = app_runner(app, names, shutdown_timeout=0.5)
        await self._runner.setup()
        await web.SockSite(self._runner, listener).start()

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _tasks(self, request: web.Request) -> web.Response:
        first = request.query.get("from", "0")
        if not first.isdecimal():
            raise web.HTTPBadRequest(reason=f"from is {first!r:.50}; give a task id")
        names = self._rows["task"] if "task" in self._rows.column_names else None
        ids = range(len(self._rows))[int(first) :][:_LISTED]
        tasks = [{"id": number, "task": str(names[number]) if names else "default"} for number in ids]
        return web.json_response({"total": len(self._rows), "tasks": tasks})

    async def _session(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(max_msg_size=MAX_MESSAGE_BYTES, heartbeat=_HEARTBEAT_S)
        await socket.prepare(request)
        if self._sessions >= self._max_sessions:
            full = f"{self._max_sessions} sessions are open; try again later, or raise --max-sessions"
            await socket.send_json(_error("CAPACITY_REACHED", full))
            await socket.close()
            return socket
        self._sessions += 1
        session = _Session(self)
        try:
            async for message in socket:
                if message.type is not WSMsgType.TEXT:
                    break
                reply = await session.reply(message.data)
                if reply is None:
                    break
                await socket.send_str(json.dumps(reply, default=str))
        finally:
            self._sessions -= 1
            await session.close()
        return socket

    def begin(self, arguments: Mapping[str, Any]) -> Episode:
        """Begin the episode that a reset asks for."""
        count, number = len(self._rows), arguments.get("task_id")
        if number is None and (seed := arguments.get("seed")) is not None:
            number = seed % count if type(seed) is int else seed
        if number is None:
            number, self._next = self._next % count, self._next + 1
        if isinstance(number, str) and number.isdecimal():
            number = int(number)
        if type(number) is not int or not 0 <= number < count:
            raise ActionRefusedError(f"task_id (or seed) is {number!r:.100}; the {count} tasks have ids from 0 on")
        request = RolloutRequest(RolloutKey(0, number, 0), *row_fields(self._rows[number]))
        return Episode(self._env, request, str(arguments.get("episode_id") or uuid.uuid4()), **self._limits)


class _Session:
    """The messages of one connection, and the episode that they are about."""

    def __init__(self, server: OpenEnvServer) -> None:
        self._server = server
        self._episode: Episode | None = None

    async def reply(self, text: str) -> dict[str, Any] | None:
        """Return the reply to a message; None where it ends the session."""
        try:
            message = json.loads(text)
            kind, data = message["type"], message.get("data") or {}
        except (ValueError, RecursionError, TypeError, KeyError):
            return _error("INVALID_JSON", "a message is a JSON object with a type and data")
        try:
            if kind == "close":
                return None
            if kind == "reset":
                await self.close()
                self._episode = self._server.begin(_object(data))
                return {"type": "observation", "data": await self._episode.observe()}
            if kind == "step":
                if self._episode is None or self._episode.is_over:
                    raise ActionRefusedError("no episode is being played; send a reset")
                return {"type": "observation", "data": await self._episode.step(_answer_in(_object(data)))}
            if kind == "state":
                return {"type": "state", "data": self._state()}
            return _error("UNKNOWN_TYPE", f"the type is {kind!r:.100}; send reset, step, state or close")
        except ActionRefusedError as error:
            return _error("VALIDATION_ERROR", str(error))
        except Exception as error:
            return _error("EXECUTION_ERROR", str(error) or type(error).__name__)

    def _state(self) -> dict[str, Any]:
        episode = self._episode
        if episode is None:
            return {"episode_id": None, "step_count": 0}
        return {"episode_id": episode.episode_id, "task_id": episode.task_id, "step_count": episode.steps}

    async def close(self) -> None:
        if self._episode is not None:
            with contextlib.suppress(Exception):
                await self._episode.close()
            self._episode = None


def _answers(body: dict[str, Any]) -> Any:
    async def handle(request: web.Request) -> web.Response:
        return web.json_response(body)

    return handle


def _error(code: str, text: str) -> dict[str, Any]:
    return {"type": "error", "data": {"code": code, "message": text}}


def _object(data: Any) -> Mapping[str, Any]:
    if not isinstance(data, dict):
        raise ActionRefusedError(f"data is {data!r:.100}; give an object")
    return data


def _answer_in(action: Mapping[str, Any]) -> dict[str, Any]:
    """Return the policy's answer as a message."""
    text, calls = action.get("message"), action.get("tool_calls")
    unknown = sorted(action.keys() - SCHEMAS["action"]["properties"].keys())
    if unknown or not isinstance(text, str):
        named = f"the field {unknown[0]!r:.100}" if unknown else f"message={text!r:.100}"
        raise ActionRefusedError(f"an action has {named}; give message, a text, and tool_calls where there are any")
    if not calls:
        return {"role": "assistant", "content": text}
    names = (
        [one["function"].get("name") if _is_call(one) else None for one in calls] if isinstance(calls, list) else []
    )
    if not names or not all(isinstance(name, str) for name in names):
        raise ActionRefusedError("tool_calls is a list of {'function': {'name': ..., 'arguments': JSON text}}")
    made = [
        {
            "id": str(one.get("id") or f"call_{number}"),
            "type": "function",
            "function": {"name": name, "arguments": _arguments(one["function"].get("arguments"))},
        }
        for number, (name, one) in enumerate(zip(names, calls, strict=True))
    ]
    return {"role": "assistant", "content": text, "tool_calls": made}


def _is_call(one: Any) -> bool:
    return isinstance(one, dict) and isinstance(one.get("function"), dict)


def _arguments(given: Any) -> str:
    return given if isinstance(given, str) else json.dumps({} if given is None else given)
