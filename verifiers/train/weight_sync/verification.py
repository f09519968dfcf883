"""Verification after a push that a server samples from the pushed weights, by the log-probs of a few tokens."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import math
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from verifiers.envs.datasets import row_fields
from verifiers.errors import DeadlineError, Error, WeightProbeError
from verifiers.inference.retry import retry
from verifiers.inference.server_client import (
    CONTROL_RETRIES,
    NoAnswerError,
    ServerClient,
    log_retry,
    passes_in_place,
)
from verifiers.inference.server_pool import ServerPool
from verifiers.inference.wire import NEUTRAL_SAMPLING, check_tokens, read_completion, sampled_tokens

if TYPE_CHECKING:
    from verifiers.train.config import GRPOConfig

logger = logging.getLogger("verifiers.train")

_TOKENS = 8
_POLL_S = 1.0


async def ask_server(
    server: ServerClient,
    model: str,
    prompt: Any,
    *,
    temperature: float,
    version: int,
    vocab_size: int | None = None,
    timeout_s: float | None = None,
    try_s: float = math.inf,
) -> dict[str, Any]:
    """Sample a few tokens from a server at the training temperature; return its answer.

    An answer that fails, is late or is broken is asked for again. `try_s` is the deadline of the first try, which is
    doubled with each, a third of the whole at most.
    """
    chat = not isinstance(prompt, str)
    body: dict[str, Any] = {
        "model": model,
        "temperature": temperature,
        "max_tokens": _TOKENS,
        "seed": version + 1,
        "logprobs": True if chat else 0,
        # a mean of few tokens would be that of one
        "ignore_eos": True,
        "return_token_ids": True,
        **NEUTRAL_SAMPLING,
        ("messages" if chat else "prompt"): prompt,
    }
    path = "/v1/chat/completions" if chat else "/v1/completions"
    limit_s = timeout_s or server.timeout_s

    async def attempt() -> dict[str, Any]:
        nonlocal try_s
        # behind a long queue, the next try may take longer
        one_s, try_s = min(try_s, limit_s / 3), 2 * try_s
        asked = await server.request("POST", path, body, timeout_s=one_s)
        answer = read_completion(asked, server.root, "message" if chat else "text")
        check_tokens(answer, server.root, needed=False, vocab_size=vocab_size, has_prompt=True)
        return answer

    deadline = time.monotonic() + limit_s
    return await retry(attempt, CONTROL_RETRIES, log_retry, deadline=deadline, passing=passes_in_place)


def compare_answer(
    server: ServerClient,
    answer: dict[str, Any],
    score: Callable[[Sequence[int], Sequence[int]], Sequence[float]],
    *,
    version: int,
    tolerance: float,
    half: bool = False,
    types: str = "",
) -> float:
    """Return |server's log-prob - trainer's|, in nats: the largest of the tokens in an answer of `ask_server`.

    With half precision it is the mean, as there one token of eight may be off by 0.4 nats though the weights are the
    same (SmolLM2-135M: 3 to 5 % of answers have one above 0.25, none a mean above 0.1).

    Args:
        half: one of the two computes in half precision.
        types: a sentence on their number types, where they differ.

    Raises:
        WeightProbeError: the difference is above the tolerance, in nats, or the server names another version than was
            pushed.
    """
    sampled = sampled_tokens(answer)
    ids = sampled.completion_ids
    if not sampled.prompt_ids or not ids or not sampled.logprobs:
        raise WeightProbeError(
            f"the server at {server.root} sends no token ids or log-probs, which training needs; use a server that "
            "honours return_token_ids and logprobs, such as vf-serve."
        )
    for span in sampled.versions:
        if str(span["version"]) != str(version):
            raise WeightProbeError(
                f"version {version} was pushed, but the server samples from version {span['version']}."
            )
    ours = score(sampled.prompt_ids, ids)
    # numpy's, as Python's max() may pass over what is not a number
    differences = np.array([abs(a - b) for a, b in zip(ours, sampled.logprobs, strict=True)])
    difference = float(differences.mean() if half else differences.max())
    if not difference <= tolerance:
        raise WeightProbeError(
            f"the server acknowledged the weights of step {version}, but its log-probs differ from the trainer's by "
            f"{difference:.4f} nats ({'the mean' if half else 'the largest'} of {len(ids)} tokens; probe_tolerance "
            f"is {tolerance:g}): {types}it does not sample from these weights, or "
            "from another distribution (temperature, tied embeddings kept old; log-probs before processing: start "
            "vLLM with --logprobs-mode processed_logprobs). A server that refused a load in an earlier run may hold "
            "half of it: start it again."
        )
    return difference


class LogprobCheck:
    """A comparison of the servers' log-probs of a few sampled tokens with the trainer's own; on rank 0.

    Args:
        question: gives what servers are asked: `model`, `prompt`, `temperature`, `vocab_size` of `ask_server`.
        score: gives the trainer's log-prob of each completion token: `score(prompt_ids, completion_ids)`.
        tolerance: difference accepted, in nats; when None, 1e-3 in float32 and 0.25 in half precision.
        trains_in: the numbers that the trainer computes in, such as "bfloat16".
        patience_s: seconds to wait for an answer whatever the server does meanwhile; a request queues behind every
            rollout that is in flight there.
        limit_s: deadline of a request to a server that is busy, in seconds.
    """

    def __init__(
        self,
        question: Callable[[], Mapping[str, Any]],
        score: Callable[[Sequence[int], Sequence[int]], Sequence[float]],
        *,
        tolerance: float | None = None,
        trains_in: str = "float32",
        patience_s: float = float("inf"),
        limit_s: float | None = None,
        on_result: Callable[[float], None] = lambda difference: None,
    ) -> None:
        self._question, self._score, self._on_result = question, score, on_result
        self._tolerance, self._trains_in = tolerance, trains_in
        self._patience_s, self._limit_s = patience_s, limit_s
        self._server_types: set[str] = set()
        self._asked: (
            tuple[int, ServerPool, list[tuple[ServerClient, concurrent.futures.Future[dict[str, Any]]]]] | None
        ) = None

    @classmethod
    def of_run(
        cls,
        args: GRPOConfig,
        policy: Any,
        rows: Any,
        score: Callable[[Sequence[int], Sequence[int]], Sequence[float]],
        *,
        on_result: Callable[[float], None],
    ) -> LogprobCheck:
        """Return the check under a run's settings, with the prompt of its first training row."""

        def question() -> dict[str, Any]:
            prompt = row_fields(rows[0])[0]
            asked = {"model": str(args.server_model), "prompt": prompt, "temperature": args.temperature}
            return {**asked, "vocab_size": vocab_size_of(policy)}

        kinds = {str(parameter.dtype).removeprefix("torch.") for parameter in policy.parameters()}
        kinds |= {name for name, on in (("bfloat16", args.bf16), ("float16", args.fp16)) if on}
        patience_s = max(args.weight_sync_timeout, args.rollout_timeout)
        return cls(
            question,
            score,
            tolerance=args.probe_tolerance,
            trains_in=next((name for name in ("bfloat16", "float16") if name in kinds), "float32"),
            patience_s=float(patience_s),
            limit_s=float(max(patience_s, args.async_generation_timeout)),
            on_result=on_result,
        )

    def run(self, version: int, pool: ServerPool) -> None:
        """Check every server and wait for the answers; one that was restarted is asked again once it is back.

        Raises:
            WeightProbeError: a server samples from other weights than were pushed.
            NoAnswerError: a server does not answer, nor has the pushed weights.
        """
        for server in pool.servers:
            deadline = time.monotonic() + pool.restart_timeout_s
            while True:
                try:
                    # it has deadlines of its own
                    self._compare(server, pool.run(self._answer(server, version, pool), math.inf), version)
                    break
                except (NoAnswerError, WeightProbeError) as error:
                    if isinstance(error, NoAnswerError):
                        restarted = not error.timed_out
                    else:
                        restarted = not pool.run(pool.holds_pushed_weights(server.url))
                    left_s = deadline - time.monotonic()
                    if not restarted or not pool.run(pool.wait_until_restored(server.url, left_s)):
                        raise

    def note_dtype(self, dtype: str | None) -> None:
        """Note in which type a server computes: with half precision the mean counts, and the tolerance is wider."""
        self._server_types |= {dtype} if dtype else set()

    def begin(self, version: int, pool: ServerPool) -> None:
        """Ask the servers while the trainer computes; `finish` compares their answers."""
        asked = [(server, pool.begin(self._answer(server, version, pool))) for server in pool.servers]
        self._asked = version, pool, asked

    def finish(self) -> int | None:
        """Compare the answers that `begin` asked for, with the weights that were pushed then.

        Return the version where an answer did not agree, so that `run` has to find out why; else None. A server that
        did not answer in time is a NoAnswerError.
        """
        if self._asked is None:
            return None
        (version, pool, asked), self._asked = self._asked, None
        for server, answer in asked:
            try:
                self._compare(server, pool.run(_result(answer), math.inf), version)
            except DeadlineError:
                raise  # no server is asked while code of the environment blocks the loop
            except NoAnswerError as error:
                if error.timed_out:
                    raise
                # a server that was killed meanwhile samples nothing before it has the pushed weights again
                logger.warning("%s could not be asked for the log-probs of its weights: %s", server.root, error)
            except Error:
                return version
        return None

    def forget(self) -> None:
        """Drop the answers that `begin` asked for, and cancel their requests."""
        asked, self._asked = self._asked, None
        for _, answer in asked[2] if asked is not None else ():
            answer.cancel()

    def _answer(self, server: ServerClient, version: int, pool: ServerPool) -> Coroutine[Any, Any, dict[str, Any]]:
        options = {"version": version, "timeout_s": self._limit_s, "try_s": self._patience_s, **self._question()}
        return _patient_answer(server, pool, self._patience_s, options)

    def _compare(self, server: ServerClient, answer: dict[str, Any], version: int) -> None:
        half = not {"bfloat16", "float16"}.isdisjoint({self._trains_in, *self._server_types})
        types, differ = ", ".join(sorted(self._server_types)), self._server_types - {self._trains_in}
        types = f"the number types differ (trainer {self._trains_in}, server {types}), or " if differ else ""
        tolerance = self._tolerance if self._tolerance is not None else (0.25 if half else 1e-3)
        options: dict[str, Any] = {"tolerance": tolerance, "half": half, "types": types}
        self._on_result(compare_answer(server, answer, self._score, version=version, **options))


def vocab_size_of(model: Any) -> int | None:
    return getattr(model.config.get_text_config(), "vocab_size", None)


async def _patient_answer(
    server: ServerClient, pool: ServerPool, patience_s: float, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Ask a server on the pool's loop; beyond the patience only for as long as it has the pushed weights."""
    answer = asyncio.create_task(ask_server(server, **options))
    try:
        while not (await asyncio.wait([answer], timeout=patience_s))[0]:
            patience_s = _POLL_S
            if not await pool.holds_pushed_weights(server.url):
                text = f"{server.root} did not answer a log-prob check and did not report the pushed weights"
                raise NoAnswerError(text, timed_out=True)
        return answer.result()
    finally:
        answer.cancel()


async def _result(answer: concurrent.futures.Future[dict[str, Any]]) -> dict[str, Any]:
    return await asyncio.wrap_future(answer)
