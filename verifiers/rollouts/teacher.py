"""A teacher: another model, which tells of the tokens that the policy sampled how likely they are to it.

On-policy distillation (Agarwal et al., arXiv:2306.13649): the policy is trained on its own completions, towards what
the teacher would have said in the same place. The teacher sees token ids, never text, by `prompt_logprobs` of
`/v1/completions`, as vLLM and the embedded server answer it.
"""

from __future__ import annotations

import functools
import heapq
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from verifiers.concurrency import gather_owned
from verifiers.errors import ConfigError, ModelError, ProviderError
from verifiers.inference.endpoint import COMPLETIONS, TOKENIZE, Endpoint, HttpBackend
from verifiers.inference.limiter import Limiter
from verifiers.inference.retry import RetryableError, RetryPolicy, retry
from verifiers.inference.server_client import ServerClient
from verifiers.inference.wire import UNREADABLE
from verifiers.rollouts.rollout import Rollout, TokenSequence
from verifiers.types import Failure, Outcome

_ROUNDING = 1e-3
_MOST_ANSWER_MB = 512.0
_SAMPLES = 32


class Teacher:
    """The server of a teacher.

    Args:
        url: base URL, with "/v1".
        model: its name there; the first that the server lists when left out.
        top_k: of each position the teacher's likeliest tokens that are kept with the sampled one.
        timeout_s: deadline of one try, in seconds.
        max_concurrent: rows that are asked about at once.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        api_key: str = "EMPTY",
        top_k: int = 0,
        timeout_s: float = 120.0,
        max_concurrent: int | None = None,
        policy: RetryPolicy | None = None,
    ) -> None:
        endpoint = Endpoint(url, api_key, timeout_s=timeout_s, max_answer_mb=_MOST_ANSWER_MB)
        self._backend = HttpBackend(endpoint)
        self._limiter = Limiter(max_concurrent)
        self._model, self._top_k, self._policy = model, top_k, policy or RetryPolicy()

    # -- rollouts -------------------------------------------------------------------------------------------------

    async def judge(self, rollouts: Iterable[Rollout]) -> None:
        """Give the rows of rollouts the teacher's log-probs; one that it does not answer becomes `provider_error`."""
        await gather_owned(map(self._judge, rollouts))

    async def _judge(self, rollout: Rollout) -> None:
        try:
            for row in rollout.rows:
                async with self._limiter.slot():
                    await self._fill(row)
        except ModelError as error:
            rollout.outcome = Outcome.PROVIDER_ERROR
            rollout.failure = Failure(type(error).__name__, f"the teacher: {error}", exception=error)

    async def _fill(self, row: TokenSequence) -> None:
        first = len(row.prompt_ids)
        ids = [*row.prompt_ids, *row.completion_ids]
        entries = await self._ask(ids)
        row.teacher_logprobs = array("d", [0.0] * len(row.completion_ids))
        row.teacher_ids, row.teacher_ids_logprobs = array("q"), array("d")
        for place, is_sampled in enumerate(row.loss_mask):
            if not is_sampled:
                continue
            found = entries[first + place]
            row.teacher_logprobs[place] = found[ids[first + place]]
            for token, log_prob in heapq.nlargest(self._top_k, found.items(), key=lambda pair: pair[1]):
                row.teacher_ids.append(token)
                row.teacher_ids_logprobs.append(log_prob)

    async def _ask(self, ids: Sequence[int]) -> list[dict[int, float]]:
        """Return log-probs by token id for each position of a prompt; {} for the first, which nothing predicts."""
        # nothing is to be sampled
        body = {"model": self._model, "prompt": ids, "echo": True, "max_tokens": 0, "prompt_logprobs": self._top_k}

        async def attempt() -> list[dict[int, float]]:
            data = await self._backend.post(COMPLETIONS, body)
            try:
                return _log_probs(data["choices"][0]["prompt_logprobs"], ids, self._top_k)
            except UNREADABLE as error:
                raise RetryableError(
                    f"{self._backend.base_url}{COMPLETIONS} gave no usable prompt_logprobs: {error}"
                ) from error

        return await retry(attempt, self._policy)

    # -- the vocabulary -------------------------------------------------------------------------------------------

    async def check(self, tokenizer: Any) -> None:
        """Ask for the model's name where none was given, and compare its vocabulary with the policy's.

        Raises:
            ConfigError: it has another vocabulary, or does not give log-probs of a prompt.
        """
        url = self._backend.base_url
        if self._model is None:
            self._model = await ServerClient(url, self._backend.api_key).model_name()
        size = len(tokenizer)
        try:
            await self._ask([0, 0])
        except ModelError as error:
            raise ConfigError(
                f"the teacher at {url} gives no log-probs of a prompt: {error}; start vLLM or vf-serve for it."
            ) from error
        if not await self._takes(size - 1):
            raise await self._other_vocabulary(size, "")
        for start in range(0, size, -(-size // _SAMPLES)):
            text = tokenizer.decode(range(start, min(start + 8, size)))
            ids = tokenizer.encode(text, add_special_tokens=False)
            body = {"model": self._model, "prompt": text, "add_special_tokens": False}
            try:
                answer = await retry(functools.partial(self._backend.post, TOKENIZE, body), self._policy)
            except ProviderError as error:
                if error.status in (404, 405):
                    return
                raise
            if (given := answer.get("tokens")) != ids:
                raise await self._other_vocabulary(size, f"; {text!r} is {ids} to the policy, and {given} to it")

    async def _takes(self, token: int) -> bool:
        try:
            await self._ask([token, token])
        except ProviderError as error:
            if error.status is None or error.status >= 500:
                raise
            return False
        return True

    async def _other_vocabulary(self, size: int, example: str) -> ConfigError:
        known, beyond = 1, 2
        while await self._takes(beyond - 1):
            known, beyond = beyond, 2 * beyond
        while beyond - known > 1:
            middle = (known + beyond) // 2
            known, beyond = (middle, beyond) if await self._takes(middle - 1) else (known, middle)
        return ConfigError(
            f"the teacher {self._model!r} has another vocabulary than the policy: {known} token ids against {size}"
            f"{example}; give a teacher with the policy's tokenizer."
        )


def _log_probs(given: Sequence[Mapping[str, Any] | None], ids: Sequence[int], top_k: int) -> list[dict[int, float]]:
    """Read `prompt_logprobs`; raise what names the first value that cannot be."""
    if len(given) != len(ids):
        raise ValueError(f"{len(given)} of them for {len(ids)} tokens")
    found: list[dict[int, float]] = [{}]
    for token, entries in zip(ids[1:], given[1:], strict=True):
        read = {int(one): float(entry["logprob"]) for one, entry in (entries or {}).items()}
        bad = next((value for value in read.values() if not math.isfinite(value) or value > _ROUNDING), None)
        if bad is not None:
            raise ValueError(f"a log-prob of {bad}")
        if token not in read or len(read) < top_k:
            raise ValueError(f"{len(read)} tokens where {token} and the {top_k} likeliest were asked for")
        found.append(read)
    return found
