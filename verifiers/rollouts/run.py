"""Rollouts that end: every request becomes exactly one `Rollout` with exactly one outcome.

This is the modern path under the trainer and the evaluator. It runs an environment's own `rollout`, whatever
generation of the API that is written for, and turns what can go wrong into outcomes: a failure of the machinery
is never a reward of 0.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from verifiers.concurrency import gather_owned
from verifiers.errors import ConfigError, MissingTokenIdsError, ModelError, OverlongPromptError
from verifiers.rollouts.client import RolloutClient
from verifiers.rollouts.endpoint import Backend
from verifiers.rollouts.garbage import fewer_collections
from verifiers.rollouts.limits import Limiter, NoMoreSlotsError
from verifiers.rollouts.meter import RolloutMeter, metered_slot
from verifiers.rollouts.retries import RetryPolicy
from verifiers.rollouts.rollout import Group, Rollout, RolloutRequest
from verifiers.rollouts.token_in import TokenIn
from verifiers.types import Failure, Outcome, State

__all__ = [
    "RolloutRunner",
    "RunsRollouts",
    "ScoresRollouts",
    "call_rollout",
    "gives_rollout_input",
    "takes_rollout_input",
]

logger = logging.getLogger("verifiers.rollouts")

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class ScoresRollouts(Protocol):
    """The part of a Rubric that the runner uses."""

    async def score_group(self, states: list[State]) -> Any: ...


class RunsRollouts(Protocol):
    """The part of an Environment that runs of many rollouts use."""

    rubric: Any
    sampling_args: dict[str, Any]

    async def rollout(self, *args: Any, **kwargs: Any) -> Any: ...


@dataclass(slots=True)
class RolloutRunner:
    """Runs and scores rollouts of one environment against one endpoint.

    Attributes:
        model: the policy's name on the server.
        sampling_args: OpenAI sampling arguments, e.g. temperature, max_tokens.
        limiter: what may be in flight at once; share it to bound several runners together.
        rollout_timeout_s: deadline of one rollout from its start, in seconds.
        grading_timeout_s: deadline for scoring one group, in seconds.
        require_tokens: the server must return token ids and log-probs (training).
        policy_version: policy version now on the server.
        token_in: how turns are sent as token ids; None sends messages.
        on_rollout: called with every finished, scored rollout, on the event loop.
        meter: counts what waits, runs and is scored.
    """

    env: RunsRollouts
    backend: Backend
    model: str
    sampling_args: dict[str, Any] = field(default_factory=dict)
    limiter: Limiter = field(default_factory=Limiter)
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    rollout_timeout_s: float = 600.0
    grading_timeout_s: float = 120.0
    require_tokens: bool = False
    policy_version: Callable[[], int] | None = None
    token_in: TokenIn | None = None
    on_rollout: Callable[[Rollout], None] | None = None
    meter: RolloutMeter = field(default_factory=RolloutMeter)

    async def run_group(self, requests: Sequence[RolloutRequest], *, score: bool = True) -> Group:
        """Run the rollouts of one prompt concurrently, then score them together.

        Raises:
            ConfigError, MissingTokenIdsError: a mistake that every other rollout would repeat.
        """
        if len(requests) == 1:
            # nothing to run beside it: a task of its own would only cost
            return await self.finish_group([await self.run_one(requests[0])], score=score)
        return await self.finish_group(
            await gather_owned([self.run_one(request) for request in requests]), score=score
        )

    async def finish_group(self, rollouts: list[Rollout], *, score: bool = True) -> Group:
        """Score the finished rollouts of one prompt together and let go of what they no longer need."""
        if score:
            await self.score(rollouts)
        for rollout in rollouts:
            # a finished rollout holds no connection, nor the tokens that its handle recorded
            rollout.state.pop("client", None)
        if self.on_rollout is not None:
            for rollout in rollouts:
                self.on_rollout(rollout)
        rollouts.sort(key=lambda rollout: rollout.key)
        return Group(rollouts[0].key.example_id, rollouts)

    async def run_groups(self, groups: Iterable[Sequence[RolloutRequest]]) -> list[Group]:
        """Run and score groups, in order; a group is begun when the ones before it have their slots.

        Raises:
            ConfigError, MissingTokenIdsError: as `run_group`; the other groups are cancelled.
        """
        try:
            with fewer_collections():
                async with asyncio.TaskGroup() as tasks:
                    running = []
                    for group in groups:
                        await self.limiter.wait_for_room()
                        running.append(tasks.create_task(self.run_group(group)))
        except BaseExceptionGroup as failed:
            first = failed.exceptions[0]
        else:
            return [task.result() for task in running]
        raise first

    async def run_one(
        self, request: RolloutRequest, on_begin: Callable[[RolloutClient], None] | None = None
    ) -> Rollout:
        """Run one rollout to its end, without a score.

        Args:
            on_begin: given the rollout's client, which knows the turns so far, when it begins.
        """
        submitted = time.perf_counter()
        async with metered_slot(self.limiter, self.meter):
            started = time.perf_counter()
            client = RolloutClient(
                self.backend,
                limiter=self.limiter,
                retry=self.retry,
                model=self.model,
                seed=request.seed,
                require_tokens=self.require_tokens,
                policy_version=self.policy_version,
                token_in=self.token_in,
                group=(request.key.block_id, request.key.example_id),
            )
            if on_begin is not None:
                on_begin(client)
            rollout = await self._attempt(request, client)
        rollout.timing.queued_s = started - submitted
        rollout.timing.generation_s = time.perf_counter() - started
        client.tell(rollout)
        # reward functions may ask the same server, but what it answers them is not trained on
        client.stop_recording()
        return rollout

    async def _attempt(self, request: RolloutRequest, client: RolloutClient) -> Rollout:
        deadline = asyncio.timeout(self.rollout_timeout_s)
        try:
            async with deadline:
                completion, state = await self._call_environment(request, client)
        except (ConfigError, MissingTokenIdsError, NoMoreSlotsError):
            raise
        except OverlongPromptError:
            # the environment let it pass through, and what was said so far with it
            state = _bare_state(request)
            return _finished(request, Outcome.TRUNCATED, state["completion"], state)
        except (Exception, SystemExit) as error:
            if deadline.expired():
                text = f"the rollout did not end within rollout_timeout_s={self.rollout_timeout_s:g}"
                return _failed(request, Outcome.TIMED_OUT, Failure("TimeoutError", text))
            return _failed(request, _outcome_of(error, client), _failure_from(error))
        if isinstance(client.last_error, NoMoreSlotsError):
            raise client.last_error
        if client.last_error is not None:
            # the environment swallowed it and went on without the policy's answer
            return _failed(request, Outcome.PROVIDER_ERROR, _failure_from(client.last_error), state)
        stored = state.get("error")
        if isinstance(stored, BaseException) and not isinstance(stored, OverlongPromptError):
            return _failed(request, _outcome_of(stored, client), _failure_from(stored), state)
        overlong = client.overlong or isinstance(stored, OverlongPromptError) or state.get("prompt_too_long") is True
        truncated = overlong or client.finish_reason == "length"
        return _finished(request, Outcome.TRUNCATED if truncated else Outcome.COMPLETED, completion, state)

    async def _call_environment(self, request: RolloutRequest, client: RolloutClient) -> tuple[Any, State]:
        # the rollouts of a group share a request, and environments write into what they are given
        row = {
            "prompt": _own_copy(request.prompt),
            "example_id": request.key.example_id,
            "task": request.task,
            "answer": request.answer,
            "info": _own_copy(request.info),
        }
        return await call_rollout(self.env, row, client, self.model, dict(self.sampling_args))

    async def score(self, rollouts: Sequence[Rollout]) -> None:
        """Score the finished rollouts of one group in place; one whose grading fails becomes `grading_error`."""
        finished = [rollout for rollout in rollouts if not rollout.outcome.is_failure]
        if not finished:
            return
        started = time.perf_counter()
        failure: Failure | None = None
        deadline = asyncio.timeout(self.grading_timeout_s)
        self.meter.change(scoring=len(finished))
        try:
            async with deadline:
                await self.env.rubric.score_group([rollout.state for rollout in finished])
        except Exception as error:
            failure = (
                Failure("TimeoutError", f"scoring did not end within grading_timeout_s={self.grading_timeout_s:g}")
                if deadline.expired()
                else _failure_from(error)
            )
        finally:
            self.meter.change(scoring=-len(finished))
        for rollout in finished:
            rollout.timing.scoring_s = time.perf_counter() - started
            _take_score(rollout, failure)


def _own_copy(value: Any) -> Any:
    """A deep copy; for plain JSON data, which prompts nearly always are, in a fraction of `copy.deepcopy`'s time."""
    kind = type(value)
    if kind is str or kind is int or kind is float or kind is bool or value is None:
        return value
    if kind is dict:
        return {name: _own_copy(item) for name, item in value.items()}
    if kind is list:
        return [_own_copy(item) for item in value]
    return copy.deepcopy(value)


def _take_score(rollout: Rollout, failure: Failure | None) -> None:
    state = rollout.state
    errors = state.get("grading_errors") or []
    if failure is None and errors:
        failure = Failure("GradingError", f"{errors[0]['func']}: {errors[0]['error']}")
    reward, metrics = math.nan, {}
    if failure is None and state.get("reward") is None:
        failure = Failure("GradingError", "the rubric gave no reward")
    if failure is None:
        try:
            reward = float(state["reward"])
            metrics = {name: float(value) for name, value in (state.get("metrics") or {}).items()}
        except (TypeError, ValueError) as error:
            failure = _failure_from(error)
    if failure is None and not math.isfinite(reward):
        failure = Failure("GradingError", f"the rubric gave {reward} as the reward")
    if failure is not None:
        rollout.outcome, rollout.failure = Outcome.GRADING_ERROR, failure
        return
    rollout.reward, rollout.metrics = reward, metrics
    rollout.advantage = state.get("advantage")


async def call_rollout(
    env: RunsRollouts, row: Mapping[str, Any], client: Any, model: str, sampling_args: dict[str, Any]
) -> tuple[Any, State]:
    """Call `env.rollout` in the generation of the classic API that it is written for.

    Args:
        row: prompt, example_id, task, answer, info.

    Returns:
        (completion, state).
    """
    if _takes_rollout_input(env):
        return _completion_and_state(await env.rollout(row, client, model, sampling_args))
    result = await env.rollout(
        client,
        model,
        row["prompt"],
        answer=row["answer"],
        task=row["task"],
        info=row["info"],
        sampling_args=sampling_args,
    )
    return _completion_and_state(result)


def _completion_and_state(result: Any) -> tuple[Any, State]:
    """What `rollout` returned: (completion, state), or the state alone."""
    completion, state = result if isinstance(result, tuple) and len(result) == 2 else (None, result)
    if not isinstance(state, dict):
        raise TypeError(
            f"rollout returned {result!r:.200}; it must return (completion, state), or the state as a dict"
        )
    return (state.get("completion") if state is result else completion), state  # type: ignore[return-value]


def _bare_state(request: RolloutRequest) -> State:
    return State(
        id=request.key.example_id,
        prompt=request.prompt,
        completion="" if isinstance(request.prompt, str) else [],
        answer=request.answer,
        task=request.task,
        info=dict(request.info),
        responses=[],
        trajectory=[],
        turn=0,
        timing={"generation_ms": 0.0, "scoring_ms": 0.0, "total_ms": 0.0},
    )


def _finished(request: RolloutRequest, outcome: Outcome, completion: Any, state: State) -> Rollout:
    # rubrics read the conversation from the state; the first generation of the API left it empty there
    state["completion"] = completion
    for name, value in (("prompt", request.prompt), ("answer", request.answer), ("task", request.task)):
        state.setdefault(name, value)
    state.setdefault("info", dict(request.info))
    # as the state has them: `setup_state` may draw the question, and the reward functions see that one
    return Rollout(
        key=request.key,
        outcome=outcome,
        prompt=state["prompt"],
        completion=completion,
        answer=state["answer"],
        task=state["task"],
        info=state["info"],
        state=state,
    )


def _failed(request: RolloutRequest, outcome: Outcome, failure: Failure, state: State | None = None) -> Rollout:
    state = state if state is not None else _bare_state(request)
    logger.debug("rollout %s ended as %s: %s", request.key, outcome, failure)
    rollout = _finished(request, outcome, state.get("completion") or [], state)
    rollout.failure = failure
    return rollout


def _outcome_of(error: BaseException, client: RolloutClient) -> Outcome:
    if isinstance(error, ModelError) or error is client.last_error or _chain_has(error, client.last_error):
        return Outcome.PROVIDER_ERROR
    return Outcome.ENVIRONMENT_ERROR


def _chain_has(error: BaseException | None, wanted: BaseException | None) -> bool:
    seen: set[int] = set()
    # `raise error from error` makes a chain without an end
    while error is not None and wanted is not None and id(error) not in seen:
        if error is wanted:
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _failure_from(error: BaseException) -> Failure:
    return Failure(type(error).__name__, str(error) or repr(error), exception=error)


def takes_rollout_input(function: F) -> F:
    """Mark a `rollout` that may be called in the second generation's way though its signature does not say so."""
    function.__dict__["takes_rollout_input"] = True
    return function


def gives_rollout_input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """True for `rollout(input, client, model, ...)`; the first generation gives the client first."""
    return "input" in kwargs or bool(args and isinstance(args[0], Mapping) and "prompt" in args[0])


_INPUT_STYLE: dict[Any, bool] = {}


def _takes_rollout_input(env: RunsRollouts) -> bool:
    """True where `rollout(input, client, model, ...)` is the environment's signature (second generation)."""
    function: Callable[..., Awaitable[Any]] = getattr(type(env), "rollout", env.rollout)
    known = _INPUT_STYLE.get(function)
    if known is None:
        names = [name for name in inspect.signature(function).parameters if name != "self"]
        input_first = names[:1] in (["input"], ["rollout_input"]) or names[1:2] == ["client"]
        known = _INPUT_STYLE[function] = input_first or getattr(function, "takes_rollout_input", False)
    return known
