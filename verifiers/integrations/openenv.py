"""OpenEnvEnv: the episodes of an OpenEnv server as an environment."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verifiers.envs.lifecycle import cleanup, maybe_await, stop
from verifiers.envs.multiturn_env import MultiTurnEnv
from verifiers.errors import ConfigError, InfraError, ToolParseError
from verifiers.inference.endpoint import MAX_ANSWER_MB, read_body
from verifiers.notebook import shortened
from verifiers.types import ChatMessage, Messages, State, message_field

if TYPE_CHECKING:
    from datasets import Dataset

# The protocol is that of openenv-core: {"type": "reset" | "step" | "state" | "close", "data": {...}} one way, and
# {"type": "observation" | "state" | "error", "data": {...}} the other; one answer for each request but "close".

# errors of a policy's action, as opposed to those of the server or the session
_ACTION_ERRORS = ("VALIDATION_ERROR", "EXECUTION_ERROR")
_LARGE_CHARS = 1 << 18  # a JSON text longer than this is parsed in a thread


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Bounds of one session; times in seconds.

    Attributes:
        connect_timeout_s: for the WebSocket's handshake, and for each of the server's plain routes.
        message_timeout_s: for each answer of the server.
        capacity_timeout_s: time during which a full server may refuse sessions while it holds none of ours.
        max_message_bytes: of one message, either way.
    """

    connect_timeout_s: float = 10.0
    message_timeout_s: float = 60.0
    capacity_timeout_s: float = 300.0
    close_timeout_s: float = 2.0
    max_message_bytes: int = 32 << 20


@dataclass(frozen=True, slots=True)
class Step:
    """The environment's answer to a reset or a step; `reward` is None where the server gave none."""

    observation: Any
    reward: float | None = None
    done: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error answered by the server: one of openenv-core's codes ("VALIDATION_ERROR"), or "", and the reason."""

    code: str
    text: str


class OpenEnvSession:
    """One episode on a server: `open`, then `reset` and `step`, then `close`. For one task at a time.

    The socket is always read, so that a server's pings are answered while the policy generates.
    """

    def __init__(self, base_url: str, headers: Mapping[str, str], limits: SessionLimits) -> None:
        self.url = re.sub(r"^http", "ws", base_url) + "/ws"
        self._headers = dict(headers)
        self._limits = limits
        self._http: Any = None
        self._socket: Any = None
        # the next message, always awaited
        self._next: asyncio.Task[Any] | None = None
        self._end = ""

    async def open(self) -> None:
        """Connect. Raises InfraError where no WebSocket opens."""
        import aiohttp

        limits = self._limits
        self._http = aiohttp.ClientSession(headers=self._headers)
        try:
            async with asyncio.timeout(limits.connect_timeout_s):
                self._socket = await self._http.ws_connect(
                    self.url,
                    max_msg_size=limits.max_message_bytes,
                    timeout=aiohttp.ClientWSTimeout(ws_close=limits.close_timeout_s),
                )
        except TimeoutError as error:
            seconds = f"connect_timeout_s={limits.connect_timeout_s:g}"
            raise InfraError(f"No WebSocket opened at {self.url!r} within {seconds}.") from error
        except aiohttp.WSServerHandshakeError as error:
            raise InfraError(
                f"The server at {self.url!r} answered {error.status}; give the base_url of an OpenEnv server, and "
                "its headers if it asks for a key."
            ) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise InfraError(f"The connection to {self.url!r} failed: {error or type(error).__name__}.") from error
        self._next = asyncio.create_task(self._socket.receive(), name="openenv-session")

    async def reset(self, arguments: Mapping[str, Any]) -> Step | Refusal | None:
        """Start the episode; None where the session ended before an answer."""
        return await self._exchange(_encoded("reset", arguments), "observation")

    async def step(self, action: Mapping[str, Any]) -> Step | Refusal:
        """Take one action; a refused one leaves the episode as it was. Raises InfraError where the session failed."""
        try:
            request = _encoded("step", action)
        except ValueError as error:
            return Refusal("VALIDATION_ERROR", f"the action {error}")
        if len(request) > self._limits.max_message_bytes // 4:
            return Refusal("VALIDATION_ERROR", f"the action is too long: {len(request)} characters")
        answer = await self._exchange(request, "observation")
        if isinstance(answer, Step) or (isinstance(answer, Refusal) and answer.code in _ACTION_ERRORS):
            return answer
        raise self.failure(answer)

    async def state(self) -> Any:
        """Return the server's own account of the episode: episode_id, step_count and the environment's fields."""
        answer = await self._exchange(_encoded("state", None), "state")
        if answer is None or isinstance(answer, Refusal):
            raise self.failure(answer)
        return answer

    async def close(self) -> None:
        """End the session; errors of the server are ignored. May be called twice."""
        http, self._http = self._http, None
        if http is None:
            return
        try:
            if self._next is not None and not self._next.done():
                async with asyncio.timeout(self._limits.close_timeout_s):
                    await self._socket.send_str(_encoded("close", None))
                    # the server frees the session before it hangs up: then the next one finds room
                    while not self._socket.closed:
                        await asyncio.shield(self._next)
                        self._next = asyncio.create_task(self._socket.receive())
        except (TimeoutError, OSError):
            pass
        finally:
            if self._next is not None:
                self._next.cancel()
                await asyncio.wait([self._next])
                self._next = None
            await http.close()

    def failure(self, answer: Refusal | None) -> InfraError:
        """Return the error for an answer that ends the session; None stands for no answer."""
        if answer is None:
            return InfraError(self._end or f"The session at {self.url!r} is not open.")
        kind = answer.code or "an error without a code"
        return InfraError(f"The OpenEnv server at {self.url!r} answered {kind}: {answer.text}.")

    async def _exchange(self, request: str, expected: str) -> Any:
        """Send one request and read its answer; None where the session has ended."""
        import aiohttp

        if self._next is None:
            return None
        limit_s = self._limits.message_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                # what came unasked has the reason for the session's end
                if not self._next.done():
                    with contextlib.suppress(OSError):
                        await self._socket.send_str(request)
                message = await asyncio.shield(self._next)
        except TimeoutError as error:
            raise InfraError(
                f"The OpenEnv server at {self.url!r} did not answer within message_timeout_s={limit_s:g}."
            ) from error
        if message.type is not aiohttp.WSMsgType.TEXT:
            most = self._limits.max_message_bytes
            self._end = (
                f"A message of {self.url!r} was longer than max_message_bytes={most}; raise it."
                if self._socket.close_code == 1009
                else f"The OpenEnv server at {self.url!r} closed the session (code {self._socket.close_code})."
            )
            return None
        self._next = asyncio.create_task(self._socket.receive(), name="openenv-session")
        return await _decoded(message.data, expected)


def _encoded(kind: str, data: Mapping[str, Any] | None) -> str:
    """Return the JSON text of a request. Raises ValueError for what JSON or UTF-8 cannot hold."""
    message = {"type": kind} if data is None else {"type": kind, "data": dict(data)}
    try:
        text = json.dumps(message, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"cannot be written as JSON: {error}") from None
    return text


async def _decoded(text: str, expected: str) -> Any:
    """Return the step, state or refusal in a server's message. Raises InfraError for anything else."""
    try:
        message = await asyncio.to_thread(json.loads, text) if len(text) > _LARGE_CHARS else json.loads(text)
        kind, data = message["type"], message["data"]
        if kind == "error":
            reasons = [
                str(data.get("message") or "no reason given"),
                *map(_validation_error, data.get("errors") or ()),
            ]
            return Refusal(str(data.get("code") or ""), "; ".join(reasons).replace("; ", ": ", 1))
        if kind == "state" == expected and isinstance(data, dict):
            return data
        if kind == "observation" == expected:
            reward = data.get("reward")
            return Step(data["observation"], None if reward is None else float(reward), bool(data.get("done", False)))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InfraError(
            f"The OpenEnv server sent a text that is not a message of the protocol ({error!r}): {text[:200]!r}."
        ) from error
    raise InfraError(f"The OpenEnv server answered {kind!r} instead of {expected!r}: {text[:200]!r}.")


def _validation_error(error: Any) -> str:
    """Return one entry of pydantic's list of errors, without the input it quotes."""
    if not isinstance(error, Mapping):
        return str(error)
    place = ".".join(map(str, error.get("loc") or ()))
    reason = str(error.get("msg") or error.get("type") or "is not valid")
    return f"{place}: {reason}" if place else reason


async def action_schema_of(base_url: str, headers: Mapping[str, str], timeout_s: float) -> Mapping[str, Any]:
    """Return the schema of a server's actions; empty where the server has none.

    Raises ConfigError where another server answers, InfraError where none or an unhealthy one does.
    """
    import aiohttp

    async def get(path: str) -> tuple[int, Any]:
        async with http.get(base_url + path) as response:
            try:
                return response.status, json.loads(await read_body(response, MAX_ANSWER_MB))
            except (ValueError, RecursionError):
                return response.status, None

    try:
        async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=timeout_s)) as http:
            status, health = await get("/health")
            if status >= 500 or (isinstance(health, dict) and health.get("status") == "unhealthy"):
                raise InfraError(f"The OpenEnv server at {base_url!r} is unhealthy ({status}); look at its log.")
            if status != 200 or not isinstance(health, dict) or "status" not in health:
                raise ConfigError(
                    f"No OpenEnv server is at base_url={base_url!r}: /health answered {status} instead of a status; "
                    "give the address whose /ws is the environment's, without that path."
                )
            _, schemas = await get("/schema")
    except TimeoutError as error:
        raise InfraError(f"The OpenEnv server at {base_url!r} did not answer within {timeout_s:g} s.") from error
    except (aiohttp.ClientError, OSError) as error:
        raise InfraError(
            f"Nothing answers at base_url={base_url!r} ({error}); start the OpenEnv server or correct the address."
        ) from error
    # servers older than this route still play
    schema = schemas.get("action") if isinstance(schemas, dict) else None
    return schema if isinstance(schema, dict) else {}


DEFAULT_SYSTEM_PROMPT = "You act in an environment. Read each observation and answer with your next action."

_REFUSAL_CHARS = 2000
_CONNECT_ATTEMPTS = 3
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 2.0
_FENCED = re.compile(r"```(?:json|JSON)?[ \t]*\n(.*?)```", re.DOTALL)
_BASE_FIELDS = frozenset({"metadata"})  # openenv-core gives every action this field
_HIDDEN_FIELDS = frozenset({"done", "reward", "metadata"})


def observation_text(observation: Any) -> str:
    """Return an observation as text for the policy.

    A string is itself; a dict of one field is that field's value; other dicts are one `name: value` line a field.
    Absent and empty values are left out, nested ones are JSON.
    """
    if not isinstance(observation, Mapping):
        return _value_text(observation)
    shown = {
        name: value
        for name, value in observation.items()
        if name not in _HIDDEN_FIELDS and value is not None and value != "" and value != [] and value != {}
    }
    if len(shown) == 1:
        return _value_text(next(iter(shown.values())))
    lines = []
    for name, value in shown.items():
        text = _value_text(value)
        lines.append(f"{name}:\n{text}" if "\n" in text else f"{name}: {text}")
    return "\n".join(lines)


def _value_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def only_text_field(schema: Mapping[str, Any]) -> str | None:
    """Return the field for an action's text: the only (required) one, where that is a string."""
    properties = _properties(schema)
    required = [name for name in schema.get("required") or () if name in properties]
    names = required or list(properties)
    if len(names) == 1 and properties[names[0]].get("type") == "string":
        return names[0]
    return None


def action_from_text(text: str, schema: Mapping[str, Any], text_field: str | None) -> dict[str, Any]:
    """Return the action in a policy's answer: its JSON object, or else the whole text in `text_field`.

    Text before the last `</think>` is ignored. The object may stand alone or in a fenced block. Where there
    is a text field, an object counts only if the schema has all its names: code which happens to be JSON stays
    text. Raises ToolParseError where there is neither.
    """
    said = text.rpartition("</think>")[2].strip()
    for candidate in (said, *(match.strip() for match in reversed(_FENCED.findall(said)))):
        try:
            action = json.loads(candidate)
        except (ValueError, RecursionError):
            continue
        if isinstance(action, dict) and (text_field is None or action.keys() <= schema.get("properties", {}).keys()):
            return action
    if text_field is not None:
        return {text_field: said}
    raise ToolParseError("the answer holds no JSON object")


def action_hint(schema: Mapping[str, Any], text_field: str | None) -> str:
    """Describe the form of actions to the policy; "" where the schema is empty."""
    if text_field is not None:
        description = _properties(schema).get(text_field, {}).get("description")
        return f"Answer with your next action as plain text{f' ({description})' if description else ''}."
    properties = _properties(schema)
    if not properties:
        return ""
    lean = {
        "properties": properties,
        "required": [name for name in schema.get("required") or () if name in properties],
    }
    if definitions := schema.get("$defs"):
        lean["$defs"] = definitions
    form = json.dumps(lean, ensure_ascii=False)
    return f"Answer with your next action: one JSON object that fits this schema:\n{form}"


def _properties(schema: Mapping[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return {}
    return {
        name: value for name, value in properties.items() if name not in _BASE_FIELDS and isinstance(value, Mapping)
    }


class OpenEnvEnv(MultiTurnEnv):
    """An environment of an OpenEnv server (openenv-core's WebSocket, `/ws`), with one session a rollout.

    The first observation follows the row's prompt, each answer of the policy is one action, and each observation
    is the next message. The server's rewards stand in `state["trajectory"][i]["reward"]`; the default rubric adds
    them up. An action that the server refuses becomes a message to the policy. A full server is asked again until it
    has room. A session that fails is an `InfraError`, so the rollout ends as `environment_error`, never with a reward
    of 0.

    Args:
        dataset: rows whose `info["reset"]` are the reset arguments of an episode, with or without a `prompt` or
            `question`. Left out: `num_train_episodes` rows, each with a seed of its own.
        eval_dataset: evaluation rows of the same form. Left out: `num_eval_episodes` rows, with further seeds.
        seed: of the first row; the others count up from it.
        reset: reset arguments of every episode; a row's own win.
        action_parser: makes an action (a dict) of the policy's text, sync or async; a ValueError's message goes back
            to the policy. The default takes the JSON object in the answer, or else puts the text into `text_field`.
        text_field: field of the action that plain text goes into. Left out: the only (required) field of the server's
            action schema where that is a string, e.g. "message" or "code".
        describe_actions: tell the form of actions with the first observation; default: only with the default parser.
        max_turns: answers of the policy in one episode; -1 for no bound.
        max_action_errors: refused actions in a row that end the episode. Where the last one failed inside the
            environment (EXECUTION_ERROR) rather than in its checks, the rollout is an `environment_error`.
        max_observation_chars: of an observation, shown to the policy; the middle is left out.
        headers: sent to the server, e.g. {"Authorization": "Bearer ..."}.
        keep_server_state: ask for the server's `state` after each step, and keep it in `state["server_state"]`.

    Raises:
        ConfigError: an invalid address, a bound below 1, completion mode. At the first rollout: no OpenEnv
            server is at `base_url`, or its actions have no `text_field`.
    """

    def __init__(
        self,
        base_url: str = "",
        dataset: Dataset | Sequence[Mapping[str, Any]] | None = None,
        eval_dataset: Dataset | Sequence[Mapping[str, Any]] | None = None,
        *,
        num_train_episodes: int = 100,
        num_eval_episodes: int = 0,
        seed: int = 0,
        reset: Mapping[str, Any] | None = None,
        system_prompt: str | None = DEFAULT_SYSTEM_PROMPT,
        obs_to_text: Callable[[Any], str] = observation_text,
        action_parser: Callable[[str], Any] | None = None,
        text_field: str | None = None,
        describe_actions: bool | None = None,
        max_turns: int = 50,
        max_action_errors: int = 3,
        max_observation_chars: int = 20_000,
        headers: Mapping[str, str] | None = None,
        keep_server_state: bool = False,
        limits: SessionLimits | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(base_url, str) or not re.match(r"(https?|wss?)://[^/\s]", base_url):
            raise ConfigError(
                f"base_url is {base_url!r}; start the OpenEnv server and give its URL, like 'http://127.0.0.1:8000'."
            )
        if kwargs.get("message_type", "chat") != "chat":
            raise ConfigError("an OpenEnv server is played in chat; leave out message_type='completion'.")
        if max_action_errors < 1:
            raise ConfigError(f"max_action_errors is {max_action_errors!r}; give 1 or more.")
        if kwargs.get("rubric") is None:
            from verifiers.rubrics.shaping import EpisodicSumRubric

            kwargs["rubric"] = EpisodicSumRubric(parser=kwargs.get("parser"))
        self.base_url = re.sub(r"^ws", "http", base_url.rstrip("/").removesuffix("/ws"))
        self._headers = dict(headers or {})
        if dataset is None:
            dataset = _seed_rows(seed, num_train_episodes, "num_train_episodes")
        if eval_dataset is None and num_eval_episodes:
            eval_dataset = _seed_rows(seed + max(num_train_episodes, 0), num_eval_episodes, "num_eval_episodes")
        super().__init__(
            max_turns=max_turns,
            dataset=_with_prompts(dataset, system_prompt),
            eval_dataset=None if eval_dataset is None else _with_prompts(eval_dataset, system_prompt),
            system_prompt=system_prompt,
            **kwargs,
        )
        self.reset = dict(reset or {})
        self.obs_to_text = obs_to_text
        self.action_parser = action_parser
        self.text_field = text_field
        self.describe_actions = action_parser is None if describe_actions is None else describe_actions
        self.max_action_errors = max_action_errors
        self.max_observation_chars = max_observation_chars
        self.keep_server_state = keep_server_state
        self.limits = limits or SessionLimits()
        self.open_sessions: set[OpenEnvSession] = set()
        self._action_schema: Mapping[str, Any] | None = None

    async def setup_state(self, state: State, **kwargs: Any) -> State:
        if self._action_schema is None:
            seconds = self.limits.connect_timeout_s
            schema = await action_schema_of(self.base_url, self._headers, seconds)
            known = {} if schema.get("additionalProperties") else _properties(schema)
            if self.text_field is not None and known and self.text_field not in known:
                raise ConfigError(f"text_field is {self.text_field!r}; the server's actions have {', '.join(known)}.")
            self._action_schema = schema
        state.update(openenv_session=None, done=False, action_errors=0, answers_handled=0)
        first = await self._begin(state, {**self.reset, **_reset_arguments(state)})
        if first.done:
            raise InfraError(f"The episode of the OpenEnv server at {self.base_url!r} is over at its reset.")
        await self._take_step(first, state)
        text = self._text_of(first)
        if self.describe_actions:
            hint = action_hint(self._action_schema, self._text_field)
            text = "\n\n".join(part for part in (text, hint) if part)
        state["prompt"] = _followed_by(state["prompt"], text)
        return state

    async def env_response(self, messages: Messages, state: State, **kwargs: Any) -> list[ChatMessage]:
        state["answers_handled"] = state["turn"]
        turn: dict[str, Any] = state["trajectory"][-1]
        outcome = await self._act(messages, state, turn)
        if isinstance(outcome, Refusal):
            state["action_errors"] += 1
            turn["extras"]["refusal"] = outcome.code
            if outcome.code == "EXECUTION_ERROR" and state["action_errors"] >= self.max_action_errors:
                raise InfraError(
                    f"The environment at {self.base_url!r} failed {self.max_action_errors} steps in a row: "
                    f"{outcome.text[:_REFUSAL_CHARS]}"
                )
            text = f"The action was refused: {outcome.text[:_REFUSAL_CHARS]}"
            return [{"role": "user", "content": text}]
        state["action_errors"] = 0
        turn["reward"] = outcome.reward
        await self._take_step(outcome, state)
        text = self._text_of(outcome)
        return [{"role": "user", "content": text}] if text or not outcome.done else []

    def bound_reached(self, state: State) -> str | None:
        """Return the limit that ends the rollout; `max_turns` does when the last answer was played, too."""
        reason = super().bound_reached(state)
        played = state.get("answers_handled", 0) >= state["turn"]
        return None if reason == "max_turns_reached" and (not played or state.get("done")) else reason

    @stop
    async def episode_done(self, state: State) -> bool:
        return bool(state.get("done"))

    @stop
    async def too_many_action_errors(self, state: State) -> bool:
        return state.get("action_errors", 0) >= self.max_action_errors

    @cleanup
    async def close_session(self, state: State) -> None:
        session = state.pop("openenv_session", None)
        try:
            if session is not None:
                await session.close()
        finally:
            self.open_sessions.discard(session)

    async def _begin(self, state: State, arguments: Mapping[str, Any]) -> Step:
        """Open a session and reset it; ask a full server again, less and less often."""
        lost, refused_s, wait_s = 0, 0.0, _FIRST_WAIT_S
        while True:
            session = state["openenv_session"] = OpenEnvSession(self.base_url, self._headers, self.limits)
            await session.open()
            answer = await session.reset(arguments)
            if isinstance(answer, Step):
                self.open_sessions.add(session)
                return answer
            lost += answer is None
            if lost == _CONNECT_ATTEMPTS or (answer is not None and answer.code != "CAPACITY_REACHED"):
                raise session.failure(answer)
            if answer is not None and refused_s >= self.limits.capacity_timeout_s:
                raise InfraError(
                    f"The OpenEnv server at {self.base_url!r} had no free session for "
                    f"capacity_timeout_s={self.limits.capacity_timeout_s:g} ({answer.text}); raise its "
                    "max_concurrent_envs, or end its other clients."
                )
            await session.close()
            pause_s = wait_s * random.uniform(0.5, 1.0)
            await asyncio.sleep(pause_s)
            # a server that is busy with our own sessions will have room
            refused_s = 0.0 if self.open_sessions else refused_s + pause_s
            wait_s = min(wait_s * 2, _LONGEST_WAIT_S)

    async def _act(self, messages: Messages, state: State, turn: dict[str, Any]) -> Step | Refusal:
        text = message_field(messages[-1], "content") or ""
        try:
            parsed = self.parser.parse_answer([messages[-1]])
            if not isinstance(parsed, str):
                raise ValueError("the answer does not have the form asked for")
            if self.action_parser is not None:
                action = await maybe_await(self.action_parser, parsed)
            else:
                action = action_from_text(parsed, self._action_schema or {}, self._text_field)
        except ValueError as error:
            self.logger.debug("no action in %.200r: %s", text, error)
            return Refusal("VALIDATION_ERROR", str(error))
        if not isinstance(action, Mapping):
            raise ConfigError(f"action_parser returned {action!r:.200}; it must return an action as a dict.")
        turn["extras"]["action"] = dict(action)
        return await state["openenv_session"].step(action)

    async def _take_step(self, step: Step, state: State) -> None:
        state["observation"], state["done"] = step.observation, step.done
        if self.keep_server_state:
            state["server_state"] = await state["openenv_session"].state()

    def _text_of(self, step: Step) -> str:
        return shortened(self.obs_to_text(step.observation), self.max_observation_chars)

    @property
    def _text_field(self) -> str | None:
        return self.text_field or only_text_field(self._action_schema or {})


def _seed_rows(first: int, count: int, name: str) -> list[dict[str, Any]]:
    if count < 1:
        raise ConfigError(f"{name} is {count!r}; give 1 or more, or a dataset.")
    # as text, so that rows with other reset arguments fit the same table
    return [{"info": json.dumps({"reset": {"seed": first + number}})} for number in range(count)]


def _with_prompts(dataset: Any, system_prompt: str | None) -> Any:
    """Return the rows with a prompt where they have neither that nor a question."""
    if not isinstance(dataset, Sequence):
        if "prompt" in dataset.column_names or "question" in dataset.column_names:
            return dataset
        dataset = dataset.to_list()
    prompt = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [row if "prompt" in row or "question" in row else {**row, "prompt": prompt} for row in dataset]


def _reset_arguments(state: State) -> Mapping[str, Any]:
    arguments = (state.get("info") or {}).get("reset") or {}
    if not isinstance(arguments, Mapping):
        raise ConfigError(f'info["reset"] is {arguments!r}; it must be a dict of reset arguments.')
    # a table of rows gives every row the others' arguments, as None
    return {name: value for name, value in arguments.items() if value is not None}


def _followed_by(prompt: Messages, text: str) -> Messages:
    """Append the first observation to a prompt; some chat templates refuse two messages of one role in a row."""
    messages: list[Any] = list(prompt)
    last = messages[-1] if messages else None
    content = message_field(last, "content") if last is not None else None
    if last is not None and message_field(last, "role") == "user" and isinstance(content, str):
        return [*messages[:-1], {**last, "content": f"{content}\n\n{text}"}]
    return [*messages, {"role": "user", "content": text}]
