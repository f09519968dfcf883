"""Run: an environment, the policy that plays it, and the limits that all rollouts of a run share; and `play`.

Training, evaluation and the classic calls all come here. `play` takes one rollout from its request to its outcome: it
is the only place where a rollout fails, holds a slot or a deadline. Every request becomes exactly one `Rollout` with
exactly one outcome, and groups are scored together: a failure of the machinery is never a reward of 0.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import gc
import logging
import operator
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

from verifiers.concurrency import own_cancels_fail
from verifiers.errors import ConfigError, GradingError, ModelError, OverlongPromptError, RolloutWorkerError
from verifiers.images import ImageStore
from verifiers.inference.endpoint import Backend
from verifiers.inference.limiter import Limiter, NoMoreSlotsError
from verifiers.inference.retry import RetryPolicy
from verifiers.inference.token_in import TokenIn
from verifiers.inference.wire import MaskSource
from verifiers.rollouts.recording_client import RolloutClient, rows_from_turns
from verifiers.rollouts.rollout import Group, Rollout, RolloutRequest, failure_from
from verifiers.rollouts.teacher import Teacher
from verifiers.rubrics.scoring import LARGEST, added_by_turn, finite_float, grading_deadline, is_answered
from verifiers.types import Failure, Outcome, RolloutKey, RolloutScore, SamplingArgs, State, Timing, as_messages

logger = logging.getLogger("verifiers.rollouts")

FATAL_ERRORS = (ConfigError, NoMoreSlotsError)
"""Errors that every other rollout would repeat: they end the run instead of one rollout."""

Player = Callable[[State], Awaitable[None]]
"""Plays a rollout in its state."""

YOUNG_OBJECTS = 50_000
"""Allocations between two young collections while rollouts run: each would walk the rollouts in flight."""


@dataclass(frozen=True, slots=True)
class ActivityReading:
    """Sums since the start; the difference of two readings belongs to the time between them.

    Attributes:
        generating_s: seconds in which at least one rollout was running.
        busy_s: seconds in which at least one rollout was running or being scored.
        rollout_s: seconds of all rollouts that ran, added up; divided by the time, the mean number in flight.
        queued_s: the same of rollouts that waited for a slot of the limiter.
    """

    generating_s: float = 0.0
    busy_s: float = 0.0
    rollout_s: float = 0.0
    queued_s: float = 0.0

    def __add__(self, other: ActivityReading) -> ActivityReading:
        return ActivityReading(*map(operator.add, dataclasses.astuple(self), dataclasses.astuple(other)))

    def __sub__(self, other: ActivityReading) -> ActivityReading:
        return ActivityReading(*map(operator.sub, dataclasses.astuple(self), dataclasses.astuple(other)))


class RolloutActivity:
    """Counts of the rollouts that wait, run and are scored now, added up over time. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.queued = self.running = self.scoring = self._most_running = 0
        self._clock = clock
        self._lock = threading.Lock()
        self._since = clock()
        self._sums = [0.0, 0.0, 0.0, 0.0]

    def change(self, *, queued: int = 0, running: int = 0, scoring: int = 0) -> None:
        with self._lock:
            self._add_elapsed()
            self.queued += queued
            self.running += running
            self.scoring += scoring
            self._most_running = max(self._most_running, self.running)

    def read(self) -> ActivityReading:
        with self._lock:
            self._add_elapsed()
            return ActivityReading(*self._sums)

    def take_most_running(self) -> int:
        """Return the most rollouts that ran at once since the last call."""
        with self._lock:
            most, self._most_running = self._most_running, self.running
            return most

    def _add_elapsed(self) -> None:
        now = self._clock()
        passed, self._since = now - self._since, now
        if self.running:
            self._sums[0] += passed
            self._sums[2] += passed * self.running
        if self.running or self.scoring:
            self._sums[1] += passed
        if self.queued:
            self._sums[3] += passed * self.queued


def refuse_unsupplied(env: Any) -> None:
    """Raise ConfigError where a reward function needs an argument that nobody supplies."""
    check = getattr(getattr(env, "rubric", None), "refuse_unsupplied", None)
    if check is not None:
        check()


@dataclass(slots=True)
class Run:
    """What the rollouts of a run share.

    Attributes:
        limiter: what may be in flight at once; share it to bound several runs together.
        rollout_timeout_s: deadline of one rollout from its start, in seconds.
        require_tokens: the server must return token ids and log-probs (training).
        check_call: of each trained call where tokens are required; see `RolloutClient`, also for `mask_source`.
        images: keeps the images of trained calls, as in `RolloutClient`.
        teacher: tells how likely the tokens of rollouts that were played are to it, before they are scored.
        on_end: called with every rollout that was played, before it is scored; what it raises ends the run.
        on_rollout: called with every finished, scored rollout, on the event loop.
        workers: give the player of a rollout, where the environment does not play it itself; see `player`.
    """

    env: Any
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
    check_call: Callable[[Mapping[str, Any]], None] | None = None
    vocab_size: int | None = None
    mask_source: MaskSource | None = None
    images: ImageStore | None = None
    teacher: Teacher | None = None
    on_end: Callable[[Rollout], None] | None = None
    on_rollout: Callable[[Rollout], None] | None = None
    activity: RolloutActivity = field(default_factory=RolloutActivity)
    workers: Any = None
    _clients: dict[RolloutKey, RolloutClient] = field(default_factory=dict)

    def __post_init__(self) -> None:
        asked = {**self.sampling_args, **(self.sampling_args.get("extra_body") or {})}.get("n")
        if asked not in (None, 1):
            raise ConfigError(
                f"the sampling arguments ask for n={asked} answers to each call, of which one would be used; leave n "
                "out, and raise the number of rollouts."
            )
        refuse_unsupplied(self.env)

    # -- one rollout ----------------------------------------------------------------------------------------------

    def client(self, request: RolloutRequest) -> RolloutClient:
        """Return the client of a rollout; one that is played a second time continues its trace."""
        client = self._clients.get(request.key)
        if client is not None:
            client.is_recording = True
        else:
            client = self._clients[request.key] = RolloutClient(
                self.backend,
                limiter=self.limiter,
                retry=self.retry,
                model=self.model,
                seed=request.seed,
                require_tokens=self.require_tokens,
                policy_version=self.policy_version,
                token_in=self.token_in,
                check_call=self.check_call,
                vocab_size=self.vocab_size,
                mask_source=self.mask_source,
                images=self.images,
                group=(request.key.block_id, request.key.example_id),
            )
        return client

    def player(self, env: Any, request: RolloutRequest) -> AbstractAsyncContextManager[Player]:
        """Give what plays a rollout of `env`: the environment's `play`, or that of a worker that has room."""
        return nullcontext(env.play) if self.workers is None else self.workers.player(env, request, self.limiter)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Hold a slot of the limiter; the rollout counts as queued until it has the slot, and as running with it."""
        self.activity.change(queued=1)
        queued = 1
        try:
            async with self.limiter.slot():
                self.activity.change(queued=-1, running=1)
                queued = 0
                try:
                    yield
                finally:
                    self.activity.change(running=-1)
        finally:
            if queued:
                self.activity.change(queued=-1)

    # -- groups ---------------------------------------------------------------------------------------------------

    async def play(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """Play rollouts to their end by one call of the environment's `run_rollouts`, without scores.

        One that the teacher does not answer is a `provider_error`.

        Raises:
            ConfigError: a mistake that every other rollout would repeat.
            NoMoreSlotsError: the limiter was closed before all of them had begun.
        """
        # a rollout that is retried later gets another client; the settings were checked when this run was made
        run = copy.copy(self)
        run._clients = {}
        try:
            with own_cancels_fail():
                rollouts = await self.env.run_rollouts(requests, run)
        except FATAL_ERRORS:
            raise
        except (Exception, SystemExit) as error:
            # an override's own mistake, beside the rollouts that it plays
            return [_unplayed(request, error) for request in requests]
        require_one_each(self.env, requests, rollouts)
        if self.teacher is not None:
            await self.teacher.judge([one for one in rollouts if one.failure is None])
            for one in rollouts:
                if one.failure is not None and one.state.held is not None:
                    # its worker would wait for the score
                    one.state.held[0].drop(one.state)
        return list(rollouts)

    async def run_group(self, requests: Sequence[RolloutRequest]) -> Group:
        """Play the rollouts of one prompt concurrently, then score them together.

        Raises:
            ConfigError: a mistake that every other rollout would repeat.
        """
        rollouts = await self.play(requests)
        await self.score(rollouts)
        return self.finish_group(rollouts)

    def finish_group(self, rollouts: list[Rollout]) -> Group:
        """Return the scored rollouts of one prompt, without their clients."""
        for rollout in rollouts:
            # a finished rollout holds no connection, nor the tokens that its handle recorded
            rollout.state.pop("client", None)
        if self.on_rollout is not None:
            for rollout in rollouts:
                self.on_rollout(rollout)
        rollouts.sort(key=lambda rollout: rollout.key)
        return Group(rollouts[0].key.example_id, rollouts)

    async def run_groups(self, groups: Iterable[Sequence[RolloutRequest]]) -> list[Group]:
        """Play and score groups, in order; a group is begun when the ones before it have their slots.

        Raises:
            ConfigError: as `run_group`; the other groups are cancelled.
        """
        try:
            with relaxed_gc():
                async with asyncio.TaskGroup() as tasks:
                    running = []
                    for group in groups:
                        await self.limiter.wait_for_room()
                        running.append(tasks.create_task(self.run_group(group)))
                return [task.result() for task in running]
        except BaseExceptionGroup as failed:
            first = failed.exceptions[0]
        raise first

    async def score(self, rollouts: Sequence[Rollout]) -> None:
        """Score the finished rollouts of one group in place; one whose grading fails becomes `grading_error`.

        Where the worker that holds them died, they become `environment_error`.
        """
        finished = [rollout for rollout in rollouts if rollout.failure is None]
        if not finished:
            return
        states = [rollout.state for rollout in finished]
        started = time.perf_counter()
        failure: Failure | None = None
        outcome = Outcome.GRADING_ERROR
        scores: list[RolloutScore] = []
        deadline: asyncio.Timeout | None = None
        self.activity.change(scoring=len(finished))
        try:
            async with grading_deadline(self.grading_timeout_s) as deadline:
                with own_cancels_fail():
                    scores = await self.env.rubric.score_group(states)
        except RolloutWorkerError as error:
            # the rollouts are gone with it, and not only their grades
            outcome, failure = Outcome.ENVIRONMENT_ERROR, failure_from(error)
        except Exception as error:
            failure = (
                Failure("TimeoutError", f"scoring did not end within grading_timeout_s={self.grading_timeout_s:g}")
                if deadline is not None and deadline.expired()
                else failure_from(error)
            )
        finally:
            self.activity.change(scoring=-len(finished))
        for index, rollout in enumerate(finished):
            rollout.timing.scoring_s = time.perf_counter() - started
            if failure is not None:
                rollout.outcome, rollout.failure = outcome, failure
            else:
                take_score(rollout, scores[index])


# -- one rollout ---------------------------------------------------------------------------------------------------


def require_one_each(env: Any, requests: Sequence[RolloutRequest], rollouts: Any) -> None:
    """Refuse what an environment's `run_rollouts` returned where it is not a rollout for each request, in order."""
    keys = [request.key for request in requests]
    if not isinstance(rollouts, Sequence) or [getattr(one, "key", None) for one in rollouts] != keys:
        given = f"{len(rollouts)} results" if isinstance(rollouts, Sequence) else f"{rollouts!r:.100}"
        raise ConfigError(
            f"{type(env).__name__}.run_rollouts returned {given} for {len(requests)} requests; return one Rollout "
            "for each request, in order."
        )


async def play(env: Any, request: RolloutRequest, run: Run) -> Rollout:
    """Play one rollout under the run's limits; a failure becomes its outcome.

    Raises:
        ConfigError, NoMoreSlotsError: an error that every other rollout would repeat.
    """
    client = run.client(request)
    state = begin_state(request, client, run.model, run.sampling_args)
    failure: Failure | None = None
    outcome = Outcome.COMPLETED
    submitted = started = time.perf_counter()
    try:
        async with asyncio.timeout(None) as deadline, run.player(env, request) as play_in, run.slot():
            started = time.perf_counter()
            deadline.reschedule(asyncio.get_running_loop().time() + run.rollout_timeout_s)
            with own_cancels_fail():
                await play_in(state)
    except FATAL_ERRORS:
        raise
    except OverlongPromptError:
        # the environment let it propagate
        state["prompt_too_long"] = True
    except (Exception, SystemExit) as error:
        state["error"] = error
        if not deadline.expired():
            outcome, failure = _failed(error, client)
        else:
            text = f"the rollout did not end within rollout_timeout_s={run.rollout_timeout_s:g}"
            outcome, failure = Outcome.TIMED_OUT, Failure("TimeoutError", text)
    timing = Timing(queued_s=started - submitted, generation_s=time.perf_counter() - started)
    if failure is None:
        outcome, failure = _outcome_of(state, client)
    if failure is not None:
        logger.debug("rollout %s ended as %s: %s", request.key, outcome, failure)
    rows, forks = rows_from_turns(client.turns)
    # reward functions may ask the same server, but what it answers them is not trained on
    client.is_recording = False
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
        refusal=client.refusal,
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


def _failed(error: BaseException, client: RolloutClient) -> tuple[Outcome, Failure]:
    is_policys = blames_policy(error, client)
    return Outcome.PROVIDER_ERROR if is_policys else Outcome.ENVIRONMENT_ERROR, failure_from(error)


def blames_policy(error: BaseException, client: RolloutClient) -> bool:
    """Return whether an exception comes from a call of the policy."""
    return isinstance(error, ModelError) or _chain_has(error, client.last_error)


def _outcome_of(state: State, client: RolloutClient) -> tuple[Outcome, Failure | None]:
    """Return the outcome of a rollout that came to its end; raise the fatal error that its environment swallowed."""
    policy_error, stored = client.fatal_error or client.last_error, state.get("error")
    if isinstance(policy_error, FATAL_ERRORS):
        raise policy_error
    if policy_error is not None:
        # the environment swallowed it and continued without the policy's answer
        return Outcome.PROVIDER_ERROR, failure_from(policy_error)
    if isinstance(stored, BaseException) and not isinstance(stored, OverlongPromptError):
        return _failed(stored, client)
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


def take_score(rollout: Rollout, score: RolloutScore) -> None:
    """Give a rollout its score; a failed grade, or a reward that is no number, makes it a `grading_error`."""
    if score["errors"]:
        failed = score["errors"][0]
        _fail_grade(rollout, f"{failed['func']}: {failed['error']}")
        return
    # credit is for training; a stored run that is graded again has no steps
    rewards, advantages = credit_of_steps(rollout.state) if rollout.rows else ([], [])
    whose = "the rubric"
    try:
        # a rubric of one's own may give numbers of numpy or torch, or none
        reward, whose = _number(score["reward"]), "the reward of a step of the trajectory:"
        by_step = [0.0 if reward is None else _number(reward) for reward in rewards]
    except GradingError as error:
        _fail_grade(rollout, f"{whose} {error}")
        return
    rollout.reward, rollout.metrics = reward, {}
    for name, value in score["metrics"].items():
        with suppress(GradingError):
            rollout.metrics[name] = _number(value)
    rollout.advantage = rollout.state.get("advantage")
    by_function = score.get("turn_rewards")
    if by_function is not None or any(reward is not None for reward in rewards):
        rollout.turn_rewards = added_by_turn(by_step, by_function)
    if any(advantage is not None for advantage in advantages):
        rollout.turn_advantages = advantages
    rollout.role_rewards = score.get("role_rewards")


def _number(value: Any) -> float:
    # nearly all are
    return value if type(value) is float and abs(value) <= LARGEST else finite_float(value)


def _fail_grade(rollout: Rollout, text: str) -> None:
    rollout.outcome, rollout.failure = Outcome.GRADING_ERROR, Failure("GradingError", text)


def credit_of_steps(state: State) -> tuple[list[Any], list[Any]]:
    """Return the reward and the advantage that each answered step of a trajectory was given, None for none.

    Environments may keep steps of a kind of their own, which have neither.
    """
    steps = state.get("trajectory") or ()
    if not all(isinstance(step, dict) for step in steps):
        return [], []
    steps = [step for step in steps if is_answered(step)]
    # by the dict's own method: other fields of a step are computed when they are asked for
    return [dict.get(step, "reward") for step in steps], [dict.get(step, "advantage") for step in steps]


def _unplayed(request: RolloutRequest, error: BaseException) -> Rollout:
    completion: Any = "" if isinstance(request.prompt, str) else []
    row = (request.prompt, completion, request.answer, request.task, request.info)
    return Rollout(request.key, Outcome.ENVIRONMENT_ERROR, *row, failure=failure_from(error))


_gc_lock = threading.Lock()
_gc_users = 0
_gc_before: tuple[int, int, int] = (700, 10, 10)


@contextmanager
def relaxed_gc() -> Iterator[None]:
    """Raise the garbage collector's first threshold to at least `YOUNG_OBJECTS`.

    May be nested, and used from any thread.
    """
    global _gc_users, _gc_before
    with _gc_lock:
        _gc_users += 1
        if _gc_users == 1:
            _gc_before = gc.get_threshold()
            # 0 means that the user has switched automatic collection off
            if 0 < _gc_before[0] < YOUNG_OBJECTS:
                gc.set_threshold(YOUNG_OBJECTS, *_gc_before[1:])
    try:
        yield
    finally:
        with _gc_lock:
            _gc_users -= 1
            if _gc_users == 0:
                gc.set_threshold(*_gc_before)
