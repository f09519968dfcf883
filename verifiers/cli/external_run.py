"""A run of sessions that programs elsewhere open, reward and end: recorded as an evaluation's results are."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from verifiers.cli.endpoint import SAMPLING_ARGS
from verifiers.envs.external_env import ExternalEnv, new_session_id
from verifiers.evals.evaluation_run import EVALUATION_BLOCK
from verifiers.evals.results import RolloutResults
from verifiers.evals.store import ResultStore, json_line
from verifiers.gateway.calls import RefusedCallError, validated
from verifiers.gateway.external_sessions import ExternalSession, SessionRoutes
from verifiers.gateway.session import Budget
from verifiers.inference.endpoint import Backend
from verifiers.rollouts.rollout import Rollout, RolloutRequest, failure_from
from verifiers.rollouts.run import FATAL_ERRORS, Run
from verifiers.types import Outcome, RolloutInput, RolloutKey

TOKENS = "tokens.jsonl"

Count = Annotated[int, Field(ge=1)]


class _NewSession(BaseModel):
    """The body of POST /sessions."""

    model_config = ConfigDict(extra="forbid", strict=True)
    prompt: str | list[dict[str, Any]] = []
    answer: Any = ""
    task: str = "default"
    info: dict[str, Any] = {}
    group: int | str | None = None
    sampling_args: dict[str, Any] = {}
    max_turns: Count | None = None
    max_total_completion_tokens: Count | None = None
    timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


_NEW_SESSION = TypeAdapter(_NewSession)


class ExternalRun(ExternalEnv):
    """The environment of sessions that programs open, instead of taking what is planned: each is a row of results.

    Sessions of one `group`, or else of one prompt, answer and task, are rollouts of one example.

    Args:
        store, results: receive each finished session; token ids go to `tokens.jsonl` beside the store's files.
        train: further names by which programs may call the model; "*" for every name.
        drain_s: seconds that open sessions get to end once the run is to end.
        **settings: further fields of `Run`.
    """

    def __init__(
        self,
        backend: Backend,
        model: str,
        store: ResultStore,
        results: RolloutResults,
        *,
        host: str,
        port: int,
        train: Sequence[str] = (),
        drain_s: float = 30.0,
        **settings: Any,
    ) -> None:
        super().__init__(host=host, port=port, train=train, eval_dataset=[{"question": "", "answer": ""}])
        self.runner = Run(self, backend, model, on_rollout=self._record, **settings)
        self.drain_s, self.requested, self.exit_code = drain_s, False, 0
        self._store, self.results = store, results
        self._opening: dict[str, tuple[Budget, asyncio.Future[ExternalSession]]] = {}
        self._open: dict[str, ExternalSession] = {}
        self._generations: Counter[int] = Counter()
        self._tasks = asyncio.TaskGroup()
        self._running: set[asyncio.Task[None]] = set()
        self._is_draining, self._is_aborted = asyncio.Event(), asyncio.Event()

    def drain(self) -> None:
        """Open no session any more, and give those that are open `drain_s` seconds."""
        self.requested = True
        self._is_draining.set()

    def abort(self) -> None:
        self.drain()
        self._is_aborted.set()

    async def serve(self) -> None:
        """Take sessions until `drain`; when this returns, all of them are stored."""
        gateway = await self.start()
        try:
            async with self._tasks:
                await self._is_draining.wait()
                aborted = asyncio.create_task(self._is_aborted.wait())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.drain_s):
                        while self._running and not aborted.done():
                            await asyncio.wait({*self._running, aborted}, return_when=asyncio.FIRST_COMPLETED)
                aborted.cancel()
                for external in self._open.values():
                    external.cancel("the gateway was stopped before the session was ended")
        except BaseExceptionGroup as failed:
            first = failed.exceptions[0]
        else:
            return
        finally:
            await gateway.close()
        raise first

    async def begin(self, body: dict[str, Any]) -> ExternalSession:
        """Open a session as the body of `POST /sessions` asks, or raise RefusedCallError."""
        given: _NewSession = validated(_NEW_SESSION, body)
        runner = self._runner_for(given)
        name = new_session_id()
        example = _example_of(given, name)
        key = RolloutKey(EVALUATION_BLOCK, example, self._generations[example])
        self._generations[example] += 1
        request = RolloutRequest(key, given.prompt, given.answer, given.task, {**given.info, "session_id": name})
        offered: asyncio.Future[ExternalSession] = asyncio.get_running_loop().create_future()
        self._opening[name] = Budget(given.max_turns, given.max_total_completion_tokens), offered
        task = self._tasks.create_task(self._run(runner, request))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await asyncio.shield(offered)
        except asyncio.CancelledError:
            offered.add_done_callback(_give_back_offered)
            raise

    def _runner_for(self, given: _NewSession) -> Run:
        limiter, longest_s = self.runner.limiter, self.runner.rollout_timeout_s
        if self.requested:
            raise RefusedCallError("the gateway is being stopped; it opens no session.", status=503, code="stopping")
        if limiter.max_concurrent is not None and len(self._running) >= limiter.max_concurrent:
            text = f"{limiter.max_concurrent} sessions are open, as many as may be at once; end one first."
            raise RefusedCallError(text, status=429, code="too_many_sessions")
        if given.timeout_s is not None and given.timeout_s > longest_s:
            raise RefusedCallError(f"timeout_s is {given.timeout_s:g}; at most {longest_s:g} s are given here.")
        unknown = [name for name in given.sampling_args if name not in SAMPLING_ARGS]
        if unknown:
            known = ", ".join(SAMPLING_ARGS)
            raise RefusedCallError(f"sampling_args has {unknown[0]!r}, which is not supported here; give {known}.")
        return dataclasses.replace(
            self.runner,
            sampling_args={**self.runner.sampling_args, **given.sampling_args},
            rollout_timeout_s=given.timeout_s or longest_s,
        )

    def _routes_for(self, key: str) -> SessionRoutes:
        return SessionRoutes(key, self.begin, _give_back, _result)

    def _id_of(self, row: RolloutInput) -> str:
        return str(row["info"]["session_id"])

    def _offer(self, external: ExternalSession) -> None:
        """Hand a session that has just begun to the call that opened it."""
        assert external.session is not None
        external.session.budget, offered = self._opening.pop(external.id)
        self._open[external.id] = external
        offered.set_result(external)

    async def _run(self, runner: Run, request: RolloutRequest) -> None:
        try:
            await runner.run_group([request])
        except FATAL_ERRORS as error:
            # a run would end; here each session has a program of its own
            failure = failure_from(error)
            failed = Rollout(request.key, Outcome.PROVIDER_ERROR, request.prompt, [], failure=failure)
            failed.answer, failed.task, failed.info = request.answer, request.task, request.info
            self._record(failed)

    def _record(self, rollout: Rollout) -> None:
        name = rollout.info["session_id"]
        external = self._open.pop(name, None)
        if external is not None and external.is_cancelled:
            rollout.outcome = Outcome.CANCELLED
        self._write_tokens(rollout)
        self._store.append(rollout)
        self.results.add_rollout(rollout)
        failure = None if rollout.failure is None else str(rollout.failure)
        if external is None:
            # it failed before there was a session; the call that opens it still waits
            _, offered = self._opening.pop(name)
            status = 400 if rollout.outcome is Outcome.ENVIRONMENT_ERROR else 500
            text = f"the session could not begin: {failure or rollout.outcome}"
            offered.set_exception(RefusedCallError(text, status=status, code="session_failed"))
            return
        external.result.set_result(
            {
                "outcome": str(rollout.outcome),
                "reward": rollout.reward,
                "metrics": rollout.metrics,
                "error": failure,
                "calls": rollout.turns,
                "prompt_tokens": rollout.usage.prompt_tokens,
                "completion_tokens": rollout.usage.completion_tokens,
                "example_id": rollout.key.example_id,
                "generation": rollout.key.generation,
            }
        )

    def _write_tokens(self, rollout: Rollout) -> None:
        if not rollout.rows:
            return
        names = ("prompt_ids", "completion_ids", "loss_mask", "logprobs")
        line = {
            "example_id": rollout.key.example_id,
            "generation": rollout.key.generation,
            "outcome": str(rollout.outcome),
            "reward": rollout.reward,
            "rows": [{name: getattr(row, name) for name in names} for row in rollout.rows],
        }
        with (self._store.directory / TOKENS).open("a", encoding="utf-8") as file:
            file.write(json_line(line) + "\n")


def _give_back(external: ExternalSession) -> None:
    external.cancel("its program hung up before it was told of the session")


def _give_back_offered(offered: asyncio.Future[ExternalSession]) -> None:
    if not offered.cancelled() and offered.exception() is None:
        _give_back(offered.result())


async def _result(external: ExternalSession) -> dict[str, Any]:
    # the rollout continues when the caller disconnects
    return await asyncio.shield(external.result)


def _example_of(given: _NewSession, name: str) -> int:
    """Return the example that a session is a rollout of, the same in every run; its own where it says nothing."""
    if isinstance(given.group, int):
        return given.group
    if given.group is not None:
        said: Any = given.group
    elif given.prompt:
        said = [given.prompt, given.answer, given.task]
    else:
        said = name
    digest = hashlib.blake2b(json.dumps(said, sort_keys=True).encode(errors="surrogatepass"), digest_size=6).digest()
    # six bytes: JSON's numbers hold them exactly
    return int.from_bytes(digest, "big")
