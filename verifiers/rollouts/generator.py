"""AsyncBatchGenerator: blocks of scored rollouts, produced ahead of the trainer in a thread of their own.

The trainer's thread submits blocks and takes them; the generator's thread owns an event loop, the connections
and every rollout in flight. All rollouts of all submitted blocks share one limiter, so a straggler of block k
never idles the server while block k + 1 waits. Nothing here touches torch or a collective.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from verifiers.errors import (
    ConfigError,
    DeadlineError,
    GenerationError,
    GeneratorClosedError,
    NothingScoredError,
)
from verifiers.rollouts.batches import BatchRequest
from verifiers.rollouts.endpoint import Backend, backend_for
from verifiers.rollouts.limits import Limiter
from verifiers.rollouts.retries import RetryPolicy
from verifiers.rollouts.rollout import Rollout, RolloutRequest, ScoredBlock
from verifiers.rollouts.run import RolloutRunner, RunsRollouts

__all__ = ["AsyncBatchGenerator"]

logger = logging.getLogger("verifiers.rollouts")


class AsyncBatchGenerator:
    """Generates and scores blocks ahead of whoever trains on them.

    Args:
        env: the environment; its `rollout` and `rubric` are used.
        client: an openai client, an Endpoint, a base URL, or any object shaped like AsyncOpenAI.
        model: the policy's name on the server.
        sampling_args: OpenAI sampling arguments for every rollout.
        num_batches_ahead: blocks that may be in flight beyond the one being taken; 0 is strictly on policy.
        max_concurrent: rollouts in flight over all blocks.
        requests_per_second: throttle; None for none.
        generation_timeout_s: default deadline of `get`, in seconds.
        rollout_timeout_s, grading_timeout_s: deadlines of one rollout and of scoring one group, in seconds.
        require_tokens: token ids and log-probs are needed (training).

    Use as a context manager, or call `start` and `close`. Thread-safe.
    """

    def __init__(
        self,
        env: RunsRollouts,
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
    ) -> None:
        if num_batches_ahead < 0:
            raise ConfigError(f"num_batches_ahead is {num_batches_ahead}; give 0 (on policy) or more.")
        self.env = env
        self.num_batches_ahead = num_batches_ahead
        self.generation_timeout_s = generation_timeout_s
        self.policy_version = 0
        self._backend: Backend = backend_for(client)
        self._runner_options: dict[str, Any] = {
            "model": model,
            "sampling_args": dict(sampling_args or {}),
            "retry": retry or RetryPolicy(),
            "rollout_timeout_s": rollout_timeout_s,
            "grading_timeout_s": grading_timeout_s,
            "require_tokens": require_tokens,
        }
        self._changed = threading.Condition()
        self._pending: set[int] = set()
        self._done: dict[int, ScoredBlock] = {}
        self._failure: BaseException | None = None
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._limiter = Limiter(max_concurrent, requests_per_second)
        self.launched = 0
        self.finished = 0

    # -- life ---------------------------------------------------------------------------------------------

    def start(self) -> AsyncBatchGenerator:
        """Start the thread; does nothing when it already runs."""
        with self._changed:
            if self._closed:
                raise GeneratorClosedError("the generator is closed; make a new one.")
            if self._thread is None:
                ready = threading.Event()
                self._thread = threading.Thread(
                    target=self._serve, args=(ready,), name="verifiers-generator", daemon=True
                )
                self._thread.start()
                ready.wait()
        return self

    def close(self) -> None:
        """Cancel what is in flight, end the thread, and wake everyone who waits. May be called twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        thread, loop = self._thread, self._loop
        if thread is not None and loop is not None and thread.is_alive():
            loop.call_soon_threadsafe(loop.stop)
            thread.join(timeout=10.0)
            if thread.is_alive():
                logger.warning("the generator's thread did not end within 10 s: something blocks its event loop")

    def __enter__(self) -> AsyncBatchGenerator:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self, ready: threading.Event) -> None:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        self._loop = loop
        ready.set()
        try:
            try:
                loop.run_forever()
            except (Exception, SystemExit) as error:
                # SystemExit in a task of the environment's own ends the loop
                self._fail(error)
            while tasks := asyncio.all_tasks(loop):
                for task in tasks:
                    task.cancel()
                with contextlib.suppress(SystemExit):
                    loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            loop.run_until_complete(self._backend.close())
            loop.run_until_complete(loop.shutdown_asyncgens())
        except Exception as error:
            self._fail(error)
        finally:
            asyncio.set_event_loop(None)
            loop.close()

    # -- submitting and taking ------------------------------------------------------------------------------

    def submit(self, block_id: int, requests: Sequence[RolloutRequest], *, policy_version: int | None = None) -> None:
        """Begin to generate a block; returns at once.

        Args:
            policy_version: version now on the server; stamped on tokens that the server does not stamp itself.

        Raises:
            ConfigError: the block is known already, or more than `num_batches_ahead` + 1 would be in flight.
            GeneratorClosedError: after `close`.
            Error: whatever an earlier block failed with.
        """
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
            if policy_version is not None:
                self.policy_version = policy_version
            self._pending.add(block_id)
            self.launched += len(requests)
            assert self._loop is not None
            work = self._generate(block_id, list(requests), self.policy_version)
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        future.add_done_callback(self._notice_crash)

    def submit_batch(self, request: BatchRequest) -> None:
        """`submit`, under the classic name and from columns."""
        self.submit(request.batch_id, request.requests(), policy_version=request.policy_version)

    def get(self, block_id: int, timeout_s: float | None = None) -> ScoredBlock:
        """Wait for a submitted block and take it.

        Args:
            timeout_s: deadline in seconds; `generation_timeout_s` when left out.

        Raises:
            DeadlineError: not ready in time.
            GeneratorClosedError: closed meanwhile.
            Error: what made generation fail, with the traceback of where it failed.
        """
        timeout = self.generation_timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout
        with self._changed:
            if block_id not in self._pending and block_id not in self._done:
                raise ConfigError(f"block {block_id} was never submitted, or was taken before.")
            while block_id not in self._done:
                self._raise_if_broken()
                left = deadline - time.monotonic()
                if left <= 0:
                    raise DeadlineError(self._deadline_message(block_id, timeout))
                self._changed.wait(left)
            self._raise_if_broken()
            return self._done.pop(block_id)

    get_batch = get

    def check(self) -> None:
        """Raise what made generation fail, if anything did. Cheap: call it between micro-steps."""
        with self._changed:
            self._raise_if_broken()

    def run(self, work: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
        """Run a coroutine on the generator's loop, beside the rollouts, and wait for its result.

        Raises:
            DeadlineError: it did not end within `timeout_s` seconds; it is cancelled.
        """
        self.start()
        assert self._loop is not None
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except concurrent.futures.CancelledError:
            raise GeneratorClosedError("the generator was closed while work ran on its loop.") from None
        except concurrent.futures.TimeoutError:
            if future.done():
                raise
            future.cancel()
            raise DeadlineError(f"work on the generator's loop did not end within {timeout_s:g} s") from None

    def runner(self, **changes: Any) -> RolloutRunner:
        """A runner on this generator's endpoint and limiter, with some options changed (evaluation)."""
        self.start()
        options = {**self._runner_options, "limiter": self._limiter, **changes}
        return RolloutRunner(self.env, self._backend, policy_version=lambda: self.policy_version, **options)

    # -- in the thread ----------------------------------------------------------------------------------------

    async def _generate(self, block_id: int, requests: list[RolloutRequest], version: int) -> None:
        started = time.perf_counter()
        try:
            runner = self.runner(on_rollout=self._count)
            groups: dict[int, list[RolloutRequest]] = {}
            for request in requests:
                groups.setdefault(request.key.example_id, []).append(request)
            scored = await runner.run_groups(groups.values())
            block = ScoredBlock(block_id, scored, version, time.perf_counter() - started)
            if not any(rollout.is_scored for rollout in block):
                raise NothingScoredError(_nothing_scored(block))
        except Exception as error:
            self._fail(error)
            return
        with self._changed:
            self._pending.discard(block_id)
            self._done[block_id] = block
            self._changed.notify_all()

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


def _nothing_scored(block: ScoredBlock) -> str:
    counts = ", ".join(f"{count} {outcome}" for outcome, count in block.outcomes().most_common())
    commonest = block.commonest_failure()
    cause = f"; most often: {commonest[0]} ({commonest[1]} times)" if commonest else ""
    return f"block {block.block_id}: none of {len(block.rollouts)} rollouts got a reward ({counts}){cause}"
