"""AgentEnv: an agent that owns its loop, and knows only a base URL and a key; and what ProgramEnv shares with it."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, Unpack

from verifiers.concurrency import threads_for
from verifiers.envs.environment import Environment, EnvironmentOptions
from verifiers.envs.multiturn_env import add_response, begin_turns
from verifiers.errors import AgentError, ConfigError
from verifiers.gateway.calls import RefusedCallError
from verifiers.gateway.gateway import Gateway, gateway_of_loop
from verifiers.gateway.session import Budget, Session
from verifiers.inference.endpoint import single_backend_for
from verifiers.inference.wire import WireObject
from verifiers.rollouts.recording_client import RolloutClient
from verifiers.types import RolloutInput, State

logger = logging.getLogger("verifiers.envs")

WIND_UP_S = 5.0
"""Seconds that an agent has for its end after a call was refused for the budget."""

CANCELLED_S = 3.0
"""Seconds that an agent has for its end after it was cancelled."""

STDERR_CHARS = 500


class AgentOptions(EnvironmentOptions, total=False):
    """The keywords of `AgentEnv` and `ProgramEnv`."""

    train: str | Iterable[str]
    helpers: Mapping[str, Any] | None
    max_turns: int
    max_total_completion_tokens: int | None
    timeout_seconds: float | None


class GatewayEnv(Environment, abc.ABC):
    """Base of environments whose agent calls the policy by a gateway, which records the calls; as `AgentEnv`."""

    def __init__(
        self,
        *,
        train: str | Iterable[str] = (),
        helpers: Mapping[str, Any] | None = None,
        max_turns: int = -1,
        max_total_completion_tokens: int | None = None,
        timeout_seconds: float | None = None,
        **kwargs: Unpack[EnvironmentOptions],
    ) -> None:
        super().__init__(**kwargs)
        self.train = frozenset([train] if isinstance(train, str) else train)
        self.helpers = {name: RolloutClient(single_backend_for(client)) for name, client in (helpers or {}).items()}
        self.budget = Budget(None if max_turns < 0 else max_turns, max_total_completion_tokens)
        self.timeout_seconds = timeout_seconds

    @abc.abstractmethod
    async def _run_agent(self, row: RolloutInput, session: Session, gateway: Gateway) -> Any:
        """Run the agent once, under `_within_budget`; return its final answer, items of the state, or None."""

    async def play(self, state: State) -> None:
        """Run the agent once; the calls that were read are in `trajectory`. One that made none is an AgentError."""
        begin_turns(state, self.oai_tools)
        client, model = state["client"], state["model"]
        if not isinstance(client, RolloutClient):
            client = RolloutClient(single_backend_for(client), model=model)
        started = time.perf_counter()
        helpers = {name: helper.untrained for name, helper in self.helpers.items()}
        session = Session(client, model, state["sampling_args"], self.budget, self.train, helpers)
        gateway = await self._gateway()
        try:
            async with gateway.serving(session):
                result = await self._run_agent(state["input"], session, gateway)
        finally:
            # also where the rollout fails or is timed out
            _keep_calls(state, session)
        self._finish(state, session, result)
        elapsed_ms = (time.perf_counter() - started) * 1000
        state["timing"].update(generation_ms=elapsed_ms, scoring_ms=0.0, total_ms=elapsed_ms)

    async def _gateway(self) -> Gateway:
        return await gateway_of_loop()

    async def _within_budget(
        self, session: Session, agent: Coroutine[Any, Any, Any], *, wind_up_s: float = WIND_UP_S
    ) -> Any:
        """Return what the agent gave, or None where a limit ended it; an AgentError where it failed."""
        client = session.client
        deadline = asyncio.timeout(self.timeout_seconds)
        watch = asyncio.create_task(_end_over_budget(session, deadline, wind_up_s))
        result, failure = None, None
        try:
            async with deadline:
                result = await _ended(asyncio.create_task(agent))
        except Exception as error:
            failure = error
        finally:
            watch.cancel()
        # what comes back later changes neither the trace nor the outcome
        session.seal()
        if client.fatal_error is not None:
            # every other rollout would meet it
            raise client.fatal_error
        newest = session.newest_failure
        is_cut = isinstance(newest, RefusedCallError) and newest.ends_rollout
        client.overlong = False
        client.is_cut_off = is_cut or deadline.expired()
        is_overlong = isinstance(newest, RefusedCallError) and newest.code == "context_length_exceeded"
        if client.is_cut_off and not is_overlong and not session.calls:
            failure = AgentError("the agent got no answer of the policy before its time or its budget was over")
        elif client.is_cut_off:
            failure = None
        if failure is not None:
            # calls are made side by side, so the client's newest error may be another's
            client.last_error = session.standing_failure
            told = failure if isinstance(failure, AgentError) else AgentError(f"the agent failed: {failure!r}")
            raise told from client.last_error or failure.__cause__ or (failure if told is not failure else None)
        client.last_error = session.standing_failure if newest is not None and not is_cut else None
        return result

    def _finish(self, state: State, session: Session, result: Any) -> None:
        if not session.calls and not session.client.is_cut_off:
            why = session.why_unanswered("does it use the base URL and key given?")
            why += last_errors(str(result.get("stderr", ""))) if isinstance(result, Mapping) else ""
            # from the failure of its calls, where they failed
            raise AgentError(f"the agent ended without an answer of the policy; {why}") from session.client.last_error
        state["is_truncated"] = session.client.is_cut_off
        if isinstance(result, Mapping):
            state.update(result)
        elif result is not None:
            _show_answer(state, {"content": str(result)})
        state["is_completed"] = True


class AgentEnv(GatewayEnv):
    """An environment around an agent: a function that runs any framework against the base URL and key it is given.

    The agent's calls come in by a gateway, which records them as those of any other rollout: token for token, with
    the run's sampling, whatever the agent asks for. The gateway speaks OpenAI's chat completions, text completions
    and Responses API, and Anthropic's Messages API.

    Args:
        run: `run(row, *, base_url, api_key, model)`, sync (in a thread) or async. `row` has prompt, answer, task,
            info and example_id. It returns the final answer as text, or a dict of items for the state; a
            `completion` in it is what the rubric reads.
        train: further names by which the agent may call the policy; "*" for every name.
        helpers: other models by the name that the agent calls them by: an `Endpoint`, a base URL or a client each.
            Their answers are not trained. A name that is neither is refused with a 404.
        max_turns: calls of the policy in one rollout; -1 for no bound. A rollout that asks for more is truncated and
            scored by what there is.
        max_total_completion_tokens: sampled tokens in one rollout, with the same end.
        timeout_seconds: seconds after which the agent is cancelled, with the same end where it got an answer; None
            for the run's deadline alone, which makes the rollout `timed_out`.
        **kwargs: as `Environment`.
    """

    def __init__(self, run: Callable[..., Any], **kwargs: Unpack[AgentOptions]) -> None:
        super().__init__(**kwargs)
        if not callable(run):
            raise ConfigError(f"run is {run!r:.100}; give a function run(row, *, base_url, api_key, model).")
        self.run = run

    async def _run_agent(self, row: RolloutInput, session: Session, gateway: Gateway) -> Any:
        return await self._within_budget(session, self._call(row, session, gateway.base_url))

    async def _call(self, row: RolloutInput, session: Session, base_url: str) -> Any:
        given = {"base_url": base_url, "api_key": session.key, "model": session.model}
        if inspect.iscoroutinefunction(self.run):
            return await self.run(row, **given)
        result = await threads_for("agent", 256).run(lambda: self.run(row, **given))
        return await result if isinstance(result, Awaitable) else result


def _keep_calls(state: State, session: Session) -> None:
    """Put the calls that were read into a state, and the newest answer as its completion."""
    for call in session.calls:
        asked, answer = call.request.get("messages"), WireObject(call.answer)
        if asked is None:
            add_response(state, call.request["prompt"], answer, "completion")
        else:
            add_response(state, asked, answer, "chat")
    steps = state["trajectory"]
    if steps or session.client.is_cut_off:
        said = steps[-1]["completion"] if steps else ""
        _show_answer(state, {"content": said} if isinstance(said, str) else said[0])


def _show_answer(state: State, message: Mapping[str, Any]) -> None:
    last = {"role": "assistant", **message, "content": message.get("content") or ""}
    state["completion"] = last["content"] if isinstance(state["prompt"], str) else [last]


def last_errors(stderr: str) -> str:
    """Return the end of a program's stderr, for the end of a message."""
    text = stderr.strip()
    return f"; its stderr ends with {text[-STDERR_CHARS:]!r}" if text else ""


async def _end_over_budget(session: Session, deadline: asyncio.Timeout, wind_up_s: float) -> None:
    """Give an agent that exceeded its budget a grace period to finish."""
    await session.is_over_budget.wait()
    ends = asyncio.get_running_loop().time() + wind_up_s
    with contextlib.suppress(RuntimeError):
        # raised where it has ended meanwhile
        deadline.reschedule(min(ends, deadline.when() or ends))


async def _ended(task: asyncio.Task[Any]) -> Any:
    """Return a task's result; where this is cancelled, so is the task, and one that does not end is left behind."""
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.done():
            task.cancel()
            _, running = await asyncio.wait({task}, timeout=CANCELLED_S)
            if running:
                logger.warning("agent still running %g s after it was cancelled; abandoning it.", CANCELLED_S)
                task.add_done_callback(lambda done: done.cancelled() or done.exception())
        raise
