"""AsyncBatchGenerator: blocks of scored rollouts, produced ahead of the trainer in a thread of their own.

The trainer's thread submits blocks and takes them; the generator's thread owns an event loop, the connections
and every rollout in flight. All rollouts of all submitted blocks share one limiter, so a straggler of block k
never idles the server while block k + 1 waits. Nothing here touches torch or a collective.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from verifiers.errors import ConfigError, DeadlineError, GenerationError, GeneratorClosedError
from verifiers.images import ImageStore
from verifiers.inference.endpoint import Backend
from verifiers.inference.limiter import Limiter
from verifiers.inference.retry import RetryPolicy
from verifiers.inference.server_pool import ServerPool, backend_for
from verifiers.inference.token_in import token_in_for
from verifiers.inference.wire import MaskSource
from verifiers.loop_thread import BLOCKING_ADVICE, LoopThread
from verifiers.rollouts.block import BatchRequest, BlockRun, GroupPolicy
from verifiers.rollouts.rollout import Group, Rollout, ScoredBlock
from verifiers.rollouts.run import RolloutActivity, Run
from verifiers.rollouts.teacher import Teacher
from verifiers.types import Outcome

logger = logging.getLogger("verifiers.rollouts")

T = TypeVar("T")
_LISTENS_EVERY_S = 1.0


class AsyncBatchGenerator:
    """A producer of scored blocks, ahead of the trainer that takes them.

    Args:
        client: an openai client, an Endpoint, a base URL, any object shaped like AsyncOpenAI, a list of these for
            several servers of the same model, or a `ServerPool`, on whose event loop the rollouts then run.
        num_batches_ahead: blocks that may be in flight beyond the one being taken; 0 is strictly on policy.
        generation: how turns are sent: "auto" as token ids from the second turn on where the server can, "tokens" as
            token ids always, "messages" never.
        check_call: of each trained call, given the fields of the sampling arguments that rollouts are given (one
            mapping, of a group of environments one for each) and those of the call; see `RolloutClient`.
        vocab_size: number of token ids that the policy has: an answer with another is a failed try.
        mask_source: see `RolloutClient`.
        teacher: tells of a block's sampled tokens how likely they are to it.

    Use as a context manager, or call `start` and `close`. Thread-safe.
    """

    def __init__(
        self,
        env: Any,
        client: Any,
        model: str,
        sampling_args: Mapping[str, Any] | None = None,
        *,
        num_batches_ahead: int = 1,
        max_concurrent: int = 1024,
        requests_per_second: float | None = None,
        generation_timeout_s: float = 600.0,
        rollout_timeout_s: float = 600.0,
        grading_timeout_s: float = 120.0,
        retry: RetryPolicy | None = None,
        require_tokens: bool = True,
        generation: str = "auto",
        check_call: Callable[[Sequence[Mapping[str, Any]], Mapping[str, Any]], None] | None = None,
        vocab_size: int | None = None,
        mask_source: MaskSource | None = None,
        images: ImageStore | None = None,
        group_policy: GroupPolicy | None = None,
        teacher: Teacher | None = None,
    ) -> None:
        if num_batches_ahead < 0:
            raise ConfigError(f"num_batches_ahead is {num_batches_ahead}; give 0 (on policy) or more.")
        self.env = env
        self.num_batches_ahead = num_batches_ahead
        self.generation_timeout_s = generation_timeout_s
        self.policy_version = 0
        self._backend: Backend = backend_for(client)
        self._run_options: dict[str, Any] = {
            "model": model,
            "sampling_args": dict(sampling_args or {}),
            "retry": retry or RetryPolicy(),
            "rollout_timeout_s": rollout_timeout_s,
            "grading_timeout_s": grading_timeout_s,
            "require_tokens": require_tokens,
            "check_call": check_call and functools.partial(check_call, fields_given(env, sampling_args or {})),
            "vocab_size": vocab_size,
            "mask_source": mask_source,
            "images": images,
            "token_in": token_in_for(generation, self._backend, model, require_tokens=require_tokens, retry=retry),
        }
        self._group_policy, self._teacher = group_policy, teacher
        self._changed = threading.Condition()
        self._pending: set[int] = set()
        self._final_groups: dict[int, list[Group]] = {}
        self._newest_begun: asyncio.Event | None = None
        self._done: dict[int, ScoredBlock] = {}
        self._recorded_tasks: set[str] = set()
        self._warned_tasks: set[str] = set()
        self._failure: BaseException | None = None
        self._closed = False
        self._thread: LoopThread | None = None
        self._limiter = Limiter(max_concurrent, requests_per_second)
        self.activity = RolloutActivity()
        self.launched = 0
        self.finished = 0

    # -- life ---------------------------------------------------------------------------------------------

    def start(self) -> AsyncBatchGenerator:
        """Start the thread; does nothing when it already runs."""
        with self._changed:
            if self._closed:
                raise GeneratorClosedError("the generator is closed; make a new one.")
            if self._thread is None:
                self._thread = self._loop_thread()
        return self

    def _loop_thread(self) -> LoopThread:
        if isinstance(self._backend, ServerPool):
            thread = self._backend.thread()
            thread.failed = self._fail
            return thread
        thread = LoopThread(close_last=self._backend.close, failed=self._fail)
        thread.start()
        return thread

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of all rollouts, once started."""
        assert self._thread is not None
        return self._thread.loop

    def exit_if_blocked(self, limit_s: float) -> None:
        """End the process, all stacks printed, where one function lets nothing else run for `limit_s` seconds."""
        assert self._thread is not None
        self._thread.exit_if_blocked(limit_s)

    def close(self) -> None:
        """Cancel what is in flight, end the thread, and wake everyone who waits. May be called twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.close()

    def __enter__(self) -> AsyncBatchGenerator:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- submitting and taking ------------------------------------------------------------------------------

    def submit_batch(self, request: BatchRequest) -> None:
        """Begin to generate a block; returns at once. Its rollouts begin after those of blocks submitted before.

        Raises:
            ConfigError: the block is known already, or more than `num_batches_ahead` + 1
                would be in flight.
            GeneratorClosedError: after `close`.
            Error: whatever an earlier block failed with.
        """
        block_id = request.batch_id
        self.start()
        with self._changed:
            self._raise_if_broken()
            if block_id in self._pending or block_id in self._done:
                raise ConfigError(f"block {block_id} was submitted before; each block is generated once.")
            held = len(self._pending) + len(self._done)
            if held > self.num_batches_ahead:
                raise ConfigError(
                    f"with block {block_id} there would be {held + 1} held at once, and num_batches_ahead="
                    f"{self.num_batches_ahead} allows {self.num_batches_ahead + 1}; take a block first."
                )
            if request.policy_version is not None:
                self.policy_version = request.policy_version
            self._pending.add(block_id)
            self.launched += len(request.requests)
            assert self._thread is not None
            work = self._generate(request, self.policy_version)
            future = asyncio.run_coroutine_threadsafe(work, self._thread.loop)
        future.add_done_callback(self._notice_crash)

    def get_batch(self, block_id: int, timeout_s: float | None = None) -> ScoredBlock:
        """Wait for a submitted block and take it; by default for `generation_timeout_s` seconds.

        Raises:
            DeadlineError: not ready in time.
            GeneratorClosedError: closed meanwhile.
            Error: what made generation fail, with the traceback of where it failed.
        """
        with self._changed:
            block = self._wait_for(block_id, lambda: self._done.get(block_id), timeout_s)
            del self._done[block_id]
            self._final_groups.pop(block_id, None)
            return block

    def groups(self, block_id: int, count: int, timeout_s: float | None = None) -> list[Group]:
        """Wait until a block's first `count` groups are scored, and look at them; the block stays to be taken.

        Returns:
            The groups in the block's order; fewer than `count` where the whole block has no more.
        """

        def first() -> list[Group] | None:
            if block_id in self._done:
                return self._done[block_id].groups[:count]
            final = self._final_groups.get(block_id, [])
            return final[:count] if len(final) >= count else None

        with self._changed:
            return self._wait_for(block_id, first, timeout_s)

    def drain(self) -> None:
        """Wait until no rollout of a submitted block runs or waits to begin; the blocks stay to be taken."""
        with self._changed:
            while self._pending:
                oldest = min(self._pending)
                self._wait_for(oldest, functools.partial(self._done.get, oldest), None)

    def finished_blocks(self) -> list[ScoredBlock]:
        """Return the blocks that are generated and were not taken yet, in the order of their ids."""
        with self._changed:
            return sorted(self._done.values(), key=lambda block: block.block_id)

    def restore(self, block: ScoredBlock) -> None:
        """Hold a block that was generated before, as if it had just been; `get_batch` gives it."""
        with self._changed:
            self._done[block.block_id] = block

    def _wait_for(self, block_id: int, ready: Callable[[], T | None], timeout_s: float | None) -> T:
        """Wait, holding the lock, for something of one block."""
        timeout = self.generation_timeout_s if timeout_s is None else timeout_s
        started = time.monotonic()
        if block_id not in self._pending and block_id not in self._done:
            raise ConfigError(f"block {block_id} was never submitted, or was taken before.")
        while True:
            found = ready()
            self._raise_if_broken()
            if found is not None:
                return found
            now = time.monotonic()
            if now >= started + timeout:
                raise DeadlineError(self._deadline_message(block_id, timeout))
            # an interrupt that comes just before a wait does not end it, only the next one
            if not self._changed.wait(min(started + timeout - now, _LISTENS_EVERY_S)):
                self._notice_block()

    def check(self) -> None:
        """Raise what made generation fail, if anything did. Cheap: call it between micro-steps."""
        with self._changed:
            self._notice_block()
            self._raise_if_broken()

    def run(self, work: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
        """Run a coroutine on the generator's loop, beside the rollouts, and wait for its result.

        Raises:
            DeadlineError: it did not end within `timeout_s` seconds; it is cancelled.
        """
        self.start()
        assert self._thread is not None
        try:
            return self._thread.run(work, timeout_s)
        except concurrent.futures.CancelledError:
            raise GeneratorClosedError("the generator was closed while work ran on its loop.") from None

    def rollout_run(self, **changes: Any) -> Run:
        """Return a run on this generator's endpoint and limiter, with some options changed (evaluation)."""
        self.start()
        options = {**self._run_options, "limiter": self._limiter, "activity": self.activity, **changes}
        return Run(self.env, self._backend, policy_version=lambda: self.policy_version, **options)

    @functools.cached_property
    def _run(self) -> Run:
        """The run of all blocks."""
        return self.rollout_run(on_rollout=self._count, teacher=self._teacher)

    # -- in the thread ----------------------------------------------------------------------------------------

    async def _generate(self, batch: BatchRequest, version: int) -> None:
        block_id = batch.batch_id

        def on_groups(groups: list[Group]) -> None:
            with self._changed:
                self._final_groups[block_id] = groups
                self._changed.notify_all()

        try:
            run = BlockRun(self._run, batch, policy=self._group_policy, on_groups=on_groups)
            # the older block is wanted first, so nothing of this one may queue before it
            before, self._newest_begun = self._newest_begun, run.begun
            if before is not None:
                await before.wait()
            block = await run.run(version)
            if self._run_options["require_tokens"]:
                self._refuse_unrecorded(block)
        except Exception as error:
            self._fail(error)
            return
        with self._changed:
            self.launched += len(block.launched) - len(batch.requests)
            self._pending.remove(block_id)
            self._done[block_id] = block
            self._changed.notify_all()

    def _refuse_unrecorded(self, block: ScoredBlock) -> None:
        """Refuse a block whose environment has not once asked the policy by the recording client.

        Where it has, rollouts without a call are warned of: an environment may end some of them without asking.
        """
        by_task: dict[str, list[Rollout]] = {}
        for rollout in block.launched:
            by_task.setdefault(rollout.task, []).append(rollout)
        for task, rollouts in by_task.items():
            if any(rollout.rows for rollout in rollouts):
                self._recorded_tasks.add(task)
            # a prompt that is too long for the policy leaves no row either, and counts as truncated
            completed = [one for one in rollouts if one.is_scored and one.outcome is Outcome.COMPLETED]
            unasked = sum(not one.turns for one in completed)
            text = (
                f"block {block.block_id}: {unasked} of {len(completed)} scored rollouts of task {task!r} have no "
                "recorded call to the policy, so there is nothing of them to train; the environment must ask the "
                "client and the model that rollout was given, not a client of its own, another model or "
                "client.untrained."
            )
            if completed and task not in self._recorded_tasks:
                raise ConfigError(text)
            if unasked and task not in self._warned_tasks:
                self._warned_tasks.add(task)
                logger.warning("%s", text)

    def _count(self, _: Rollout) -> None:
        self.finished += 1

    def _notice_crash(self, future: concurrent.futures.Future[None]) -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if self._failure is None:
                self._failure = error
            self._changed.notify_all()

    def _notice_block(self) -> None:
        limit_s = self._run_options["grading_timeout_s"]
        if self._failure is None and self._thread is not None and (function := self._thread.blocked_by(limit_s)):
            self._failure = DeadlineError(
                f"{function} has blocked the event loop of all rollouts for {limit_s:.3g} s (grading_timeout); "
                f"{BLOCKING_ADVICE}."
            )

    def _raise_if_broken(self) -> None:
        if self._failure is not None:
            if isinstance(self._failure, (ConfigError, GenerationError)):
                raise self._failure
            kind = type(self._failure).__name__
            raise GenerationError(f"generation failed with {kind}: {self._failure}") from self._failure
        if self._closed:
            raise GeneratorClosedError("the generator was closed while blocks were still wanted.")

    def _deadline_message(self, block_id: int, timeout: float) -> str:
        return (
            f"block {block_id} was not ready within {timeout:g} s (async_generation_timeout): {self.finished} of "
            f"{self.launched} rollouts launched so far have ended, {self._limiter.in_flight} are in flight; is the "
            "rollout server still answering?"
        )


def fields_given(env: Any, sampling_args: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the fields of the sampling arguments that rollouts get, one for each environment of a group."""
    extra = dict(sampling_args.get("extra_body") or {})
    given: list[Mapping[str, Any]] = []
    for member in getattr(env, "envs", None) or ():
        # as a group does: what is given wins over a member's own, also inside extra_body
        own = getattr(member, "sampling_args", None) or {}
        merged = {**own, **sampling_args, "extra_body": {**(own.get("extra_body") or {}), **extra}}
        given += fields_given(member, merged)
    return given or [{**sampling_args, **extra}]
