"""OpenEnvEnv: the episodes of an OpenEnv server as an environment."""

from __future__ import annotations

import asyncio
import json
import random
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verifiers.envs.lifecycle import cleanup, maybe_await, stop
from verifiers.envs.multiturn_env import MultiTurnEnv
from verifiers.errors import ConfigError, InfraError, ToolParseError
from verifiers.integrations.openenv_session import OpenEnvSession, Refusal, SessionLimits, Step, action_schema_of
from verifiers.types import ChatMessage, Messages, State, message_field

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["OpenEnvEnv", "SessionLimits", "action_from_text", "action_hint", "observation_text", "only_text_field"]

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
    text.

    Raises:
        ToolParseError: no object, and no field for text.
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
        base_url: the server's address, e.g. "http://127.0.0.1:8000".
        dataset: rows whose `info["reset"]` are the reset arguments of an episode, with or without a `prompt` or
            `question`. Left out: `num_train_episodes` rows, each with a seed of its own.
        eval_dataset: evaluation rows of the same form. Left out: `num_eval_episodes` rows, with further seeds.
        num_train_episodes: training rows made where there is no dataset.
        num_eval_episodes: evaluation rows made where there is no eval dataset; 0 makes none.
        seed: of the first row; the others count up from it.
        reset: reset arguments of every episode; a row's own win.
        system_prompt: put before every episode.
        obs_to_text: makes a message of an observation.
        action_parser: makes an action (a dict) of the policy's text, sync or async; a ValueError's message goes back
            to the policy. The default takes the JSON object in the answer, or else puts the text into `text_field`.
        text_field: field of the action that plain text goes into. Left out: the only (required) field of the server's
            action schema where that is a string, e.g. "message" or "code".
        describe_actions: tell the form of actions with the first observation; default: only with the default parser.
        max_turns: answers of the policy in one episode; -1 for no bound.
        max_action_errors: refused actions in a row that end the episode. Where the last one failed inside the
            environment (EXECUTION_ERROR) rather than in its checks, the rollout is an `environment_error`.
        max_observation_chars: longer messages are cut.
        max_sessions: sessions open at once in one event loop; None leaves it to the server's capacity.
        headers: sent to the server, e.g. {"Authorization": "Bearer ..."}.
        keep_server_state: ask for the server's `state` after each step, and keep it in `state["server_state"]`.

    Raises:
        ConfigError: an invalid address, a bound below 1, completion mode. At the first rollout: no OpenEnv
            server is at `base_url`.
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
        max_sessions: int | None = None,
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
        for name, value in (("max_sessions", max_sessions), ("max_action_errors", max_action_errors)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value!r}; give 1 or more.")
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
        self.max_sessions = max_sessions
        self.open_sessions: set[OpenEnvSession] = set()
        self._slots: weakref.WeakKeyDictionary[Any, asyncio.Semaphore] = weakref.WeakKeyDictionary()
        self._action_schema: Mapping[str, Any] | None = None

    async def setup_state(self, state: State, **kwargs: Any) -> State:
        """Open a session, reset it, and put its first observation at the end of the prompt."""
        if self._action_schema is None:
            seconds = self.limits.connect_timeout_s
            self._action_schema = await action_schema_of(self.base_url, self._headers, seconds)
        state.update(openenv_session=None, done=False, action_errors=0, answers_handled=0)
        if self.max_sessions is not None:
            slots = self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.max_sessions))
            await slots.acquire()
            state["openenv_slot"] = slots
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
        """Take the policy's answer as an action; reply with the observation, or the reason of a refusal."""
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
        """Stop when the server reports `done`."""
        return bool(state.get("done"))

    @stop
    async def too_many_action_errors(self, state: State) -> bool:
        """Stop after `max_action_errors` refused actions in a row."""
        return state.get("action_errors", 0) >= self.max_action_errors

    @cleanup
    async def close_session(self, state: State) -> None:
        """Close the rollout's session, also after a failure."""
        session, slots = state.pop("openenv_session", None), state.pop("openenv_slot", None)
        try:
            if session is not None:
                await session.close()
        finally:
            self.open_sessions.discard(session)
            if slots is not None:
                slots.release()

    async def _begin(self, state: State, arguments: Mapping[str, Any]) -> Step:
        """Open a session and reset it; ask a full server again, less and less often.

        Raises:
            InfraError: no session, or no first observation, within the limits.
        """
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
        text = self.obs_to_text(step.observation)
        left_out = len(text) - self.max_observation_chars
        return text if left_out <= 0 else f"{text[: self.max_observation_chars]}\n[{left_out} characters left out]"

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
