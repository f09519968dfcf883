"""One rollout, from its request to its outcome: the only place where a rollout fails, holds a slot or a deadline."""

from __future__ import annotations

import copy
import logging
import time
import uuid
from typing import Any, Protocol

from verifiers.errors import ConfigError, ModelError, OverlongPromptError
from verifiers.inference.limiter import NoMoreSlotsError
from verifiers.rollouts.activity import counted_slot
from verifiers.rollouts.recording_client import RolloutClient, rows_from_turns
from verifiers.rollouts.rollout import Rollout, RolloutRequest, failure_from, straggler, timed_out
from verifiers.rollouts.run import Run
from verifiers.types import Failure, Outcome, SamplingArgs, State, Timing, as_messages

__all__ = ["FATAL_ERRORS", "Plays", "begin_state", "blames_policy", "play"]

logger = logging.getLogger("verifiers.rollouts")

FATAL_ERRORS = (ConfigError, NoMoreSlotsError)
"""Errors that every other rollout would repeat: they end the run instead of one rollout."""


class Plays(Protocol):
    """The part of an Environment that `play` uses."""

    async def play(self, state: State) -> None:
        """Play the rollout out in its state."""
        ...


async def play(env: Plays, request: RolloutRequest, run: Run) -> Rollout:
    """Play one rollout under the run's limits; a failure becomes its outcome.

    Raises:
        ConfigError, NoMoreSlotsError: an error that every other rollout would repeat.
    """
    client = run.client(request)
    state = begin_state(request, client, run.model, run.sampling_args)
    failure: Failure | None = None
    outcome = Outcome.COMPLETED
    submitted = started = time.perf_counter()
    deadline = run.deadlines.new()
    try:
        async with deadline, run.player(env, request) as player, counted_slot(run.limiter, run.activity):
            started = time.perf_counter()
            run.deadlines.start(deadline, run.rollout_timeout_s)
            await player.play(state)
    except FATAL_ERRORS:
        raise
    except OverlongPromptError:
        # the environment let it propagate
        state["prompt_too_long"] = True
    except (Exception, SystemExit) as error:
        state["error"] = error
        if not deadline.expired():
            outcome, failure = failed(error, client)
        elif run.deadlines.are_dropped:
            outcome, failure = straggler(time.perf_counter() - submitted)
        else:
            outcome, failure = timed_out(run.rollout_timeout_s)
    timing = Timing(queued_s=started - submitted, generation_s=time.perf_counter() - started)
    if failure is None:
        outcome, failure = outcome_of(state, client)
    if failure is not None:
        logger.debug("rollout %s ended as %s: %s", request.key, outcome, failure)
    rows, forks = rows_from_turns(client.turns)
    # reward functions may ask the same server, but what it answers them is not trained on
    client.stop_recording()
    # as the state has them: `setup_state` may draw the question, and the reward functions see that one
    rollout = Rollout(
        key=request.key,
        outcome=outcome,
        prompt=state["prompt"],
        completion=state["completion"],
        answer=state["answer"],
        task=state["task"],
        info=state["info"],
        rows=rows,
        forks=forks,
        turns=client.calls,
        failure=failure,
        attempts=1 + client.retries,
        timing=timing,
        usage=client.usage,
        state=state,
    )
    if run.on_end is not None:
        run.on_end(rollout)
    return rollout


def begin_state(request: RolloutRequest, client: Any, model: str, sampling_args: SamplingArgs) -> State:
    """Return the state of a rollout that begins; its prompt, answer and info are copies of the request's."""
    # the rollouts of a prompt share its row, and environments write into what they are given
    prompt = as_messages(_own_copy(request.prompt))
    fields = {
        "prompt": prompt,
        "answer": _own_copy(request.answer),
        "task": request.task,
        "info": _own_copy(request.info),
    }
    example_id = request.key.example_id
    return State(
        id=example_id,
        **fields,
        input={**fields, "example_id": example_id},
        example_id=example_id,
        completion="" if isinstance(prompt, str) else [],
        responses=[],
        trajectory=[],
        trajectory_id=uuid.uuid4().hex,
        turn=0,
        oai_tools=None,
        tool_defs=[],
        timing={"generation_ms": 0.0, "scoring_ms": 0.0, "total_ms": 0.0},
        is_completed=False,
        is_truncated=False,
        stop_condition=None,
        final_env_response=None,
        reward=None,
        metrics=None,
        error=None,
        client=client,
        model=model,
        sampling_args=dict(sampling_args),
    )


def failed(error: BaseException, client: RolloutClient) -> tuple[Outcome, Failure]:
    """Return an exception as the outcome of the rollout that it ended."""
    is_policys = blames_policy(error, client)
    return Outcome.PROVIDER_ERROR if is_policys else Outcome.ENVIRONMENT_ERROR, failure_from(error)


def blames_policy(error: BaseException, client: RolloutClient) -> bool:
    """Return whether an exception comes from a call of the policy."""
    return isinstance(error, ModelError) or _chain_has(error, client.last_error)


def outcome_of(state: State, client: RolloutClient) -> tuple[Outcome, Failure | None]:
    """Return the outcome of a rollout that came to its end, by what its client recorded and its state holds.

    Raises:
        ConfigError, NoMoreSlotsError: the environment swallowed it.
    """
    policy_error, stored = client.fatal_error or client.last_error, state.get("error")
    if isinstance(policy_error, FATAL_ERRORS):
        raise policy_error
    if policy_error is not None:
        # the environment swallowed it and continued without the policy's answer
        return Outcome.PROVIDER_ERROR, failure_from(policy_error)
    if isinstance(stored, BaseException) and not isinstance(stored, OverlongPromptError):
        return failed(stored, client)
    is_overlong = client.overlong or isinstance(stored, OverlongPromptError) or state.get("prompt_too_long") is True
    is_cut_off = client.finish_reason == "length" or client.is_cut_off
    return Outcome.TRUNCATED if is_overlong or is_cut_off else Outcome.COMPLETED, None


def _chain_has(error: BaseException | None, wanted: BaseException | None) -> bool:
    seen: set[int] = set()
    # `raise error from error` makes a chain without an end
    while error is not None and wanted is not None and id(error) not in seen:
        if error is wanted:
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _own_copy(value: Any) -> Any:
    """Return a deep copy; of plain JSON data, which prompts nearly always are, faster than `copy.deepcopy`."""
    kind = type(value)
    if kind is str or kind is int or kind is float or kind is bool or value is None:
        return value
    if kind is dict:
        return {name: _own_copy(item) for name, item in value.items()}
    if kind is list:
        return [_own_copy(item) for item in value]
    return copy.deepcopy(value)
