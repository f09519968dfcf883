"""OpenEnvEnv: the episodes of an OpenEnv server as an environment."""

from __future__ import annotations

import asyncio
import json
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verifiers.envs.adapters.openenv_session import OpenEnvSession, SessionLimits, SessionSlots
from verifiers.envs.adapters.openenv_text import action_from_text, action_hint, observation_text, only_text_field
from verifiers.envs.adapters.openenv_wire import OpenEnvAddress, OpenEnvServer, Refusal, Step, describe_server
from verifiers.envs.calling import maybe_await
from verifiers.envs.decorators import cleanup, stop
from verifiers.envs.multiturn_env import MultiTurnEnv
from verifiers.errors import ConfigError, InfraError
from verifiers.parsers.messages import message_field
from verifiers.types import ChatMessage, Messages, State

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["OpenEnvEnv"]

DEFAULT_SYSTEM_PROMPT = "You act in an environment. Read each observation and answer with your next action."

_REFUSAL_CHARS = 2000


class OpenEnvEnv(MultiTurnEnv):
    """Plays the episodes of an OpenEnv server (openenv-core's WebSocket, `/ws`), one session a rollout.

    The first observation follows the row's prompt, each answer of the policy is one action, and each observation
    is the next message. The server's rewards stand in `state["trajectory"][i]["reward"]`; the default rubric adds
    them up. An action that the server refuses becomes a message to the policy. A session that fails is an
    `InfraError`, so the rollout ends as `environment_error`, never with a reward of 0.

    Args:
        base_url: the server's address, e.g. "http://127.0.0.1:8000".
        dataset: rows whose `info["reset"]` are the reset arguments of an episode, with or without a `prompt` or
            `question`. Left out: `num_train_episodes` rows, each with a seed of its own.
        eval_dataset: held-out rows of the same form. Left out: `num_eval_episodes` rows, with further seeds.
        num_train_episodes: training rows made where there is no dataset.
        num_eval_episodes: held-out rows made where there is no eval dataset; 0 makes none.
        seed: of the first row; the next ones count up.
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
        max_sessions: sessions open at once, over all rollouts of this environment; None leaves it to the server's
            capacity. A server that says how many it takes lowers this by itself.
        headers: sent to the server, e.g. {"Authorization": "Bearer ..."}.
        keep_server_state: ask for the server's `state` after each step, and keep it in `state["server_state"]`.
        limits: time and size bounds of a session.
        **kwargs: of `MultiTurnEnv`.

    Raises:
        ConfigError: an address that is none, a bound below 1, completion mode. At the first rollout: something else
            than an OpenEnv server answers at `base_url`.
    """

    def __init__(
        self,
        base_url: str,
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
        if kwargs.get("message_type", "chat") != "chat":
            raise ConfigError("an OpenEnv server is played in chat; leave out message_type='completion'.")
        for name, value in (("max_sessions", max_sessions), ("max_action_errors", max_action_errors)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value!r}; give 1 or more.")
        if kwargs.get("rubric") is None:
            from verifiers.rubrics.episodic_sum_rubric import EpisodicSumRubric

            kwargs["rubric"] = EpisodicSumRubric(parser=kwargs.get("parser"))
        self.address = OpenEnvAddress(base_url, dict(headers or {}))
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
        self.slots = SessionSlots(max_sessions)
        self._server: OpenEnvServer | None = None
        self._asked: weakref.WeakKeyDictionary[Any, asyncio.Lock] = weakref.WeakKeyDictionary()
        self._unreachable: tuple[float, str] = (0.0, "")

    async def server(self) -> OpenEnvServer:
        """What the server says about itself: name, description, schemas. Asked once.

        Raises:
            ConfigError: something else than an OpenEnv server is there.
            InfraError: nothing answers.
        """
        if self._server is None:
            came = time.monotonic()
            async with self._asked.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
                failed, why = self._unreachable
                if self._server is None and failed > came:
                    raise InfraError(why)  # found out while this one waited
                if self._server is None:
                    try:
                        self._server = await describe_server(self.address, self.limits.connect_timeout_s)
                    except InfraError as error:
                        self._unreachable = (time.monotonic(), str(error))
                        raise
        return self._server

    async def setup_state(self, state: State, **kwargs: Any) -> State:
        """Open a session, reset it, and put its first observation at the end of the prompt."""
        server = await self.server()
        session = OpenEnvSession(self.address, self.limits, self.slots)
        state.update(openenv_session=session, done=False, action_errors=0, answers_handled=0)
        first = await session.begin({**self.reset, **_reset_arguments(state)})
        if first.done:
            raise InfraError(
                f"The OpenEnv server at {self.address.http_url!r} says that an episode is over at its reset."
            )
        await self._take_step(first, state)
        text = self._text_of(first)
        if self.describe_actions:
            hint = action_hint(server.action_schema, self._text_field_of(server))
            text = "\n\n".join(part for part in (text, hint) if part)
        state["prompt"] = _followed_by(state["prompt"], text)
        return state

    async def env_response(self, messages: Messages, state: State, **kwargs: Any) -> list[ChatMessage]:
        """Take the policy's answer as an action; the observation, or why it was refused, is what it reads next."""
        state["answers_handled"] = state["turn"]
        turn: dict[str, Any] = state["trajectory"][-1]
        outcome = await self._act(messages, state, turn)
        if isinstance(outcome, Refusal):
            state["action_errors"] += 1
            turn["extras"]["refusal"] = outcome.code
            if outcome.code == "EXECUTION_ERROR" and state["action_errors"] >= self.max_action_errors:
                raise InfraError(
                    f"The environment at {self.address.http_url!r} failed {self.max_action_errors} steps in a row: "
                    f"{outcome.text[:_REFUSAL_CHARS]}"
                )
            text = f"The action was refused: {outcome.text[:_REFUSAL_CHARS]}"
            return [{"role": "user", "content": text}]
        state["action_errors"] = 0
        turn["reward"] = outcome.reward
        await self._take_step(outcome, state)
        text = self._text_of(outcome)
        return [{"role": "user", "content": text}] if text or not outcome.done else []

    def max_turns_reached(self, state: State) -> bool:
        """True when `max_turns` is reached, the last answer has been played too, and the episode goes on."""
        played = state.get("answers_handled", 0) >= state["turn"]
        return super().max_turns_reached(state) and played and not state.get("done")

    @stop
    async def episode_done(self, state: State) -> bool:
        """True when the server said `done`."""
        return bool(state.get("done"))

    @stop
    async def too_many_action_errors(self, state: State) -> bool:
        """True when `max_action_errors` actions in a row were refused."""
        return state.get("action_errors", 0) >= self.max_action_errors

    @cleanup
    async def close_session(self, state: State) -> None:
        """Close the rollout's session, however it ended."""
        session = state.pop("openenv_session", None)
        if session is not None:
            await session.close()

    async def _act(self, messages: Messages, state: State, turn: dict[str, Any]) -> Step | Refusal:
        server = await self.server()
        text = message_field(messages[-1], "content") or ""
        try:
            parsed = self.parser.parse_answer([messages[-1]])
            if not isinstance(parsed, str):
                raise ValueError("the answer does not have the form asked for")
            if self.action_parser is not None:
                action = await maybe_await(self.action_parser, parsed)
            else:
                action = action_from_text(parsed, server.action_schema, self._text_field_of(server))
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

    def _text_field_of(self, server: OpenEnvServer) -> str | None:
        return self.text_field or only_text_field(server.action_schema)


def _seed_rows(first: int, count: int, name: str) -> list[dict[str, Any]]:
    if count < 1:
        raise ConfigError(f"{name} is {count!r}; give 1 or more, or a dataset.")
    # as text, so that rows with other reset arguments fit the same table
    return [{"info": json.dumps({"reset": {"seed": first + number}})} for number in range(count)]


def _with_prompts(dataset: Any, system_prompt: str | None) -> Any:
    """The rows with a prompt where they have neither that nor a question."""
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
    """The prompt with the first observation; some chat templates refuse two messages of one role in a row."""
    messages: list[Any] = list(prompt)
    last = messages[-1] if messages else None
    content = message_field(last, "content") if last is not None else None
    if last is not None and message_field(last, "role") == "user" and isinstance(content, str):
        return [*messages[:-1], {**last, "content": f"{content}\n\n{text}"}]
    return [*messages, {"role": "user", "content": text}]
