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
from verifiers.errors import ProviderError
from verifiers.http_requests import app_runner, is_loopback_host
from verifiers.inference.endpoint import CHAT, COMPLETIONS
from verifiers.inference.wire import WireObject, request_body, whole_characters
from verifiers.rollouts.rollout import RolloutRequest
from verifiers.rollouts.run import Run, refuse_unsupplied
from verifiers.server_process import is_loopback_address
from verifiers.types import RolloutKey, as_messages, message_field, message_text

if TYPE_CHECKING:
    import socket

    from verifiers.envs.environment import Environment
    from verifiers.rollouts.rollout import Rollout

MAX_MESSAGE_BYTES = 32 << 20
_HEARTBEAT_S = 30.0
_CLEANUP_S = 10.0
_LISTED = 1000
_DIGITS = 12
_QUEUED = 16
_POLICY = "policy"

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
            "restarts": {"type": "boolean", "description": "the messages are of another conversation"},
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


class EpisodeFailedError(RuntimeError):
    """The end of an episode without a reward; the text is its outcome and failure."""


class RemotePolicy:
    """A `verifiers.inference.endpoint.Backend` whose answers come from the other side of a session, one at a time.

    It answers while the rollout is played. What is asked later, or for another model, is a reward's question, and a
    policy that answered it would grade itself.
    """

    base_url, api_key = "openenv", ""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._asked: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self._answer: asyncio.Future[dict[str, Any]] | None = None
        self.has_ended = False

    async def call(self, path: str, arguments: Mapping[str, Any]) -> Any:
        body = request_body(arguments)
        async with self._turn:
            if self.has_ended or path not in (CHAT, COMPLETIONS) or body.get("model") != _POLICY:
                raise ProviderError(
                    f"{path} of model {body.get('model')!r} was asked of the policy of an OpenEnv session, which "
                    "only plays; give judges a client of their own."
                )
            loop = asyncio.get_running_loop()
            if self._asked.done():
                # the call before was given up by who made it
                self._asked = loop.create_future()
            self._answer = loop.create_future()
            self._asked.set_result(body)
            message = await self._answer
        calls = message.get("tool_calls")
        choice: dict[str, Any] = {"index": 0, "finish_reason": "tool_calls" if calls else "stop", "logprobs": None}
        choice |= {"text": message["content"]} if "prompt" in body else {"message": message}
        return WireObject({"id": "remote", "created": 0, "model": _POLICY, "choices": [choice], "usage": None})

    async def close(self) -> None: ...

    async def question(self, played: asyncio.Task[Any]) -> Mapping[str, Any] | None:
        """Return the body of the next call; None where the rollout ends without one."""
        while not played.done():
            await asyncio.wait([self._asked, played], return_when=asyncio.FIRST_COMPLETED)
            if self._asked.done():
                return self._asked.result()
        return None

    def answer(self, message: dict[str, Any]) -> None:
        self._asked = asyncio.get_running_loop().create_future()
        # a rollout whose time has run out takes no answer
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(message)


class Episode:
    """One rollout, played and scored in a task; `observe` after each answer."""

    def __init__(self, env: Environment, request: RolloutRequest, episode_id: str, **limits: Any) -> None:
        self.task_id, self.episode_id, self.steps = request.key.example_id, episode_id, 0
        self._policy = policy = RemotePolicy()

        def on_end(rollout: Rollout) -> None:
            policy.has_ended = True

        run = Run(env, policy, _POLICY, dict(env.sampling_args), on_end=on_end, **limits)
        self._played = asyncio.create_task(run.run_group([request]))
        self._known: list[Any] = []
        self._tools: list[Any] = []
        self.has_told_its_end = False

    async def observe(self) -> dict[str, Any]:
        """Return the data of an observation: what the policy is asked now, or how the episode ended.

        Raises:
            EpisodeFailedError: the rollout has no reward.
        """
        asked = await self._policy.question(self._played)
        if asked is None:
            return self._ended()
        text = asked.get("prompt")
        observation = self._new(
            as_messages([{"role": "user", "content": text}] if text is not None else asked["messages"])
        )
        if (tools := list(asked.get("tools") or ())) != self._tools:
            self._tools = observation["tools"] = tools
        return {"observation": observation, "reward": None, "done": False}

    async def step(self, message: dict[str, Any]) -> dict[str, Any]:
        if not self._played.done():
            self.steps += 1
            self._known.append(message)
            self._policy.answer(message)
        return await self.observe()

    async def close(self) -> None:
        """Cancel what still plays, and wait a while for its cleanup."""
        self._policy.has_ended = True
        self._played.cancel()
        await asyncio.wait([self._played], timeout=_CLEANUP_S)
        if self._played.done() and not self._played.cancelled():
            # taken, so that nobody is told that it was not
            self._played.exception()

    def _new(self, messages: Sequence[Any]) -> dict[str, Any]:
        """Return the messages after the last answer, or all of another conversation."""
        known, self._known = self._known, list(messages)
        continues = _said(messages[: len(known)]) == _said(known)
        new = messages[len(known) :] if continues else messages
        texts = [message_text(one) for one in new]
        return {
            "text": "\n\n".join(text for text in texts if text),
            "messages": list(new),
            **({} if continues else {"restarts": True}),
        }

    def _ended(self) -> dict[str, Any]:
        if self._played.cancelled():
            raise EpisodeFailedError("the rollout was cancelled")
        try:
            (rollout,) = self._played.result().rollouts
        except Exception as error:
            raise EpisodeFailedError(f"{type(error).__name__}: {error}") from error
        if rollout.reward is None:
            raise EpisodeFailedError(f"the rollout ended as {rollout.outcome}: {rollout.failure}")
        self.has_told_its_end = True
        said = [] if isinstance(rollout.completion, str) else as_messages([*rollout.prompt, *rollout.completion])
        known = self._known
        new = said if len(said) > len(known) and _said(said[: len(known)]) == _said(known) else known
        ended = {**self._new(new), "outcome": str(rollout.outcome), "metrics": dict(rollout.metrics)}
        return {"observation": ended, "reward": rollout.reward, "done": True}


class OpenEnvServer:
    """A server of an environment's rows as tasks, each played in a session of its own.

    A reset takes the row `task_id`, else the row that `seed` gives, else the next one. Routes: `/ws`, `/health`,
    `/schema`, `/metadata`, and `/tasks?from=N`, a thousand ids at a time.

    Args:
        max_sessions: sessions at once; further ones are told CAPACITY_REACHED.
        limits: `rollout_timeout_s` and `grading_timeout_s` of `Run`; the policy's time counts towards the first.

    Raises:
        ConfigError: a reward function needs what nobody supplies.
    """

    def __init__(self, env: Environment, rows: Any, name: str, *, max_sessions: int = 64, **limits: Any) -> None:
        self._env, self._rows, self._name, self._limits = env, rows, name, limits
        refuse_unsupplied(env)
        self._max_sessions, self._next = max_sessions, 0
        self._sessions: set[_Session] = set()
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
        """End the sessions, with what their rollouts clean up, then the server."""
        self._max_sessions = 0
        await asyncio.gather(*(one.close() for one in list(self._sessions)), return_exceptions=True)
        if self._runner is not None:
            await self._runner.cleanup()

    async def _tasks(self, request: web.Request) -> web.Response:
        first = request.query.get("from", "0")
        if not first.isdecimal() or len(first) > _DIGITS:
            raise web.HTTPBadRequest(reason=f"from is {first!r:.50}; give a task id")
        ids = range(len(self._rows))[int(first) :][:_LISTED]
        rows = self._rows[ids.start : ids.stop]
        names = rows.get("task") or [None] * len(ids)
        tasks = [{"id": number, "task": str(name or "default")} for number, name in zip(ids, names, strict=True)]
        return web.json_response({"total": len(self._rows), "tasks": tasks})

    async def _session(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(max_msg_size=MAX_MESSAGE_BYTES, heartbeat=_HEARTBEAT_S)
        await socket.prepare(request)
        if len(self._sessions) >= self._max_sessions:
            full = f"{self._max_sessions} sessions are open; try again later, or raise --max-sessions"
            await socket.send_json(_error("CAPACITY_REACHED", full))
            await socket.close()
            return socket
        session = _Session(self, socket)
        self._sessions.add(session)
        try:
            # read while a step is played: pings are answered, and a client that has gone is noticed
            async for message in socket:
                if message.type is not WSMsgType.TEXT or not session.take(message.data):
                    break
        finally:
            try:
                await session.close()
            finally:
                self._sessions.discard(session)
        return socket

    def task(self, arguments: Mapping[str, Any]) -> RolloutRequest:
        count, number = len(self._rows), arguments.get("task_id")
        if number is None and (seed := arguments.get("seed")) is not None:
            number = seed % count if type(seed) is int else seed
        if number is None:
            number, self._next = self._next % count, self._next + 1
        if isinstance(number, str) and number.isdecimal() and len(number) <= _DIGITS:
            number = int(number)
        if type(number) is not int or not 0 <= number < count:
            raise ActionRefusedError(f"task_id (or seed) is {number!r:.100}; the {count} tasks have ids from 0 on")
        return RolloutRequest(RolloutKey(0, number, 0), *row_fields(self._rows[number]))

    def begin(self, request: RolloutRequest, episode_id: str) -> Episode:
        return Episode(self._env, request, episode_id, **self._limits)


class _Session:
    """The messages of one connection, answered in order, and the episode that they are about."""

    def __init__(self, server: OpenEnvServer, socket: web.WebSocketResponse) -> None:
        self._server, self._socket = server, socket
        self._episode: Episode | None = None
        self._texts: asyncio.Queue[str] = asyncio.Queue(_QUEUED)
        self._work = asyncio.create_task(self._serve())

    def take(self, text: str) -> bool:
        """Queue a message; False where the client sends more than it waits for."""
        if self._texts.full():
            return False
        self._texts.put_nowait(text)
        return True

    async def _serve(self) -> None:
        # nobody reads a reply that cannot be sent
        with contextlib.suppress(ConnectionError):
            while (reply := await self._reply(await self._texts.get())) is not None:
                await self._socket.send_str(reply)
            await self._socket.close()

    async def _reply(self, text: str) -> str | None:
        """Return the reply to a message as JSON; None where it ends the session."""
        try:
            message = json.loads(text)
            kind, data = message["type"], message.get("data") or {}
        except (ValueError, RecursionError, TypeError, KeyError):
            return _json(_error("INVALID_JSON", "a message is a JSON object with a type and data"))
        if kind == "close":
            return None
        try:
            return _json(await self._answer(kind, data))
        except ActionRefusedError as error:
            return _json(_error("VALIDATION_ERROR", str(error)))
        except EpisodeFailedError as error:
            # said again at each step until the next reset
            return _json(_error("SESSION_ERROR", str(error)))
        except Exception as error:
            return _json(_error("SESSION_ERROR", f"{type(error).__name__}: {error}"))

    async def _answer(self, kind: Any, data: Any) -> dict[str, Any]:
        episode = self._episode
        if kind == "reset":
            arguments = _object(data)
            task = self._server.task(arguments)
            await self._end_episode()
            self._episode = self._server.begin(task, str(arguments.get("episode_id") or uuid.uuid4()))
            return {"type": "observation", "data": await self._episode.observe()}
        if kind == "step":
            if episode is None or episode.has_told_its_end:
                raise ActionRefusedError("no episode is being played; send a reset")
            return {"type": "observation", "data": await episode.step(_answer_in(_object(data), episode.steps))}
        if kind == "state":
            state: dict[str, Any] = {"episode_id": None, "step_count": 0}
            if episode is not None:
                state = {"episode_id": episode.episode_id, "task_id": episode.task_id, "step_count": episode.steps}
            return {"type": "state", "data": state}
        return _error("UNKNOWN_TYPE", f"the type is {kind!r:.100}; send reset, step, state or close")

    async def close(self) -> None:
        self._work.cancel()
        await asyncio.wait([self._work])
        await self._end_episode()

    async def _end_episode(self) -> None:
        episode, self._episode = self._episode, None
        if episode is not None:
            await episode.close()


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


def _json(reply: Mapping[str, Any]) -> str:
    return json.dumps(
        reply, allow_nan=False, default=lambda one: one.model_dump() if hasattr(one, "model_dump") else str(one)
    )


def _said(messages: Sequence[Any]) -> list[tuple[Any, str]]:
    return [(message_field(one, "role"), message_text(one)) for one in messages]


def _answer_in(action: Mapping[str, Any], step: int) -> dict[str, Any]:
    text, calls = action.get("message"), action.get("tool_calls")
    text = "" if text is None and calls else text
    unknown = sorted(action.keys() - SCHEMAS["action"]["properties"].keys())
    if unknown or not isinstance(text, str):
        named = f"the field {unknown[0]!r:.100}" if unknown else f"message={text!r:.100}"
        raise ActionRefusedError(f"an action has {named}; give message, a text, and tool_calls where there are any")
    answer: dict[str, Any] = {"role": "assistant", "content": whole_characters(text)}
    if not calls:
        return answer
    names = (
        [one["function"].get("name") if _is_call(one) else None for one in calls] if isinstance(calls, list) else []
    )
    if not names or not all(isinstance(name, str) for name in names):
        raise ActionRefusedError("tool_calls is a list of {'function': {'name': ..., 'arguments': JSON text}}")
    answer["tool_calls"] = [
        {
            "id": str(one.get("id") or f"call_{step}_{number}"),
            "type": "function",
            "function": {"name": name, "arguments": _arguments(one["function"].get("arguments"))},
        }
        for number, (name, one) in enumerate(zip(names, calls, strict=True))
    ]
    return answer


def _is_call(one: Any) -> bool:
    return isinstance(one, dict) and isinstance(one.get("function"), dict)


def _arguments(given: Any) -> str:
    return given if isinstance(given, str) else json.dumps({} if given is None else given)
