"""Verification of a rollout server: of its capabilities before training, and of its log-probs after a push.

Capabilities come from routes that only describe the server; what is missing is named with the flag for it, and a
server without such a route is not refused. Then the log-probs of a few tokens show that it samples from the pushed
weights.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import math
import re
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from verifiers.envs.datasets import row_fields
from verifiers.errors import DeadlineError, Error, WeightProbeError, WeightSyncError
from verifiers.inference.retry import retry
from verifiers.inference.server_client import (
    CONTROL_RETRIES,
    NoAnswerError,
    RefusedError,
    ServerClient,
    log_retry,
    passes_in_place,
)
from verifiers.inference.server_pool import ServerPool
from verifiers.inference.wire import NEUTRAL_SAMPLING, UNREADABLE, check_tokens, read_completion, sampled_tokens

if TYPE_CHECKING:
    from verifiers.train.config import GRPOConfig

logger = logging.getLogger("verifiers.train")

OLDEST_VLLM = (0, 28)
"""The first minor of vLLM that can be trained against; `vf-vllm` knows the same."""

SAMPLE_TEXT = "The quick brown fox: 12 + 30 = 42.\n\tNaïve?"
"""Text that both tokenizers encode."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """A server's description of itself; None where it gives none.

    Attributes:
        software: "vLLM", or None.
        max_model_len: longest prompt and completion together, in tokens.
        log_probs_mode: vLLM's; "processed_logprobs" is what training needs.
        max_logprobs: most log-probs that it returns for a token; -1 for all.
        max_lora_rank: largest rank of an adapter; 0 where adapters are off.
        transfer_backend: of vLLM's weight transfer, such as "nccl"; "" where it is off.
        loads_adapters: the route for adapters is there.
        image_reader: what computes the features of images.
    """

    root: str
    software: str | None = None
    version: str | None = None
    models: tuple[str, ...] = ()
    max_model_len: int | None = None
    log_probs_mode: str | None = None
    max_logprobs: int | None = None
    sample_ids: tuple[int, ...] | None = None
    max_lora_rank: int | None = None
    dtype: str | None = None
    transfer_backend: str | None = None
    loads_adapters: bool | None = None
    image_reader: str | None = None


async def read_capabilities(server: ServerClient) -> Capabilities:
    """Ask a server that is up.

    Raises:
        WeightSyncError: it does not answer, or describes itself as no server does.
    """
    try:
        return await _described(server)
    except UNREADABLE as error:
        raise WeightSyncError(f"the descriptions of {server.root} cannot be read: {error!r:.200}") from error


async def _described(server: ServerClient) -> Capabilities:
    models = (await _asked(server, "GET", "/v1/models") or {}).get("data") or []
    names = tuple(str(model.get("id")) for model in models)
    lengths = [model["max_model_len"] for model in models if model.get("max_model_len")]
    text = {"model": names[0] if names else None, "prompt": SAMPLE_TEXT, "add_special_tokens": False}
    encoded = await _asked(server, "POST", "/tokenize", text)
    ids = encoded.get("tokens") if isinstance(encoded, dict) else None
    version = await _asked(server, "GET", "/version")
    info = await _asked(server, "GET", "/server_info?config_format=json")
    config = info.get("vllm_config") if isinstance(info, dict) else None
    config = config if isinstance(config, dict) else None
    model_config = (config or {}).get("model_config") or {}
    lora = (config or {}).get("lora_config") or {}
    transfer = (config or {}).get("weight_transfer_config") or {}
    environment = (info or {}).get("vllm_env") or {} if config is not None else {}
    dtype = model_config.get("dtype") or next((model["dtype"] for model in models if "dtype" in model), None)
    return Capabilities(
        root=server.root,
        software="vLLM" if config is not None else None,
        version=str(version["version"]) if isinstance(version, dict) and "version" in version else None,
        models=names,
        max_model_len=int(min(lengths)) if lengths else None,
        log_probs_mode=model_config.get("logprobs_mode"),
        max_logprobs=model_config.get("max_logprobs"),
        sample_ids=tuple(ids) if ids else None,
        max_lora_rank=int(lora.get("max_lora_rank", 0)) if config is not None else None,
        dtype=str(dtype).removeprefix("torch.") if dtype else None,
        transfer_backend=str(transfer.get("backend", "")) if config is not None else None,
        loads_adapters=bool(environment.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING")) if config is not None else None,
        image_reader=next((str(model["image_reader"]) for model in models if "image_reader" in model), None),
    )


def check_capabilities(
    found: Capabilities,
    *,
    missing: Sequence[str] = (),
    model: str | None = None,
    encode: Callable[[str], Sequence[int]] | None = None,
    needed_tokens: int | None = None,
    longest_row: int | None = None,
    image_reader: str | None = None,
) -> None:
    """Refuse a server that cannot be trained against, before anything is sampled.

    Args:
        missing: what it lacks for pushes, as `WeightSync.missing_at` returned it.
        model: the name under which it must serve the policy, where the user gave one.
        encode: the trainer's tokenizer, without special tokens.
        needed_tokens: the longest prompt that is known, and the longest completion, together.
        longest_row: number of the training row with that prompt.
        image_reader: what computes the trainer's features of images; None for text alone.

    Raises:
        WeightSyncError: names everything that is missing, each with what gives it.
    """
    missing = list(missing)
    if (old := too_old(found.version)) is not None:
        missing.append(old)
    if found.log_probs_mode not in (None, "processed_logprobs"):
        missing.append(
            f"its log-probs are {found.log_probs_mode}, not those of the distribution it samples from; start it with "
            "--logprobs-mode processed_logprobs"
        )
    if model is not None and found.models and model not in found.models:
        missing.append(
            f"it serves {', '.join(map(repr, found.models))}, not {model!r}; set server_model, or start it with "
            f"--served-model-name {model}"
        )
    if encode is not None and found.sample_ids is not None:
        ours = tuple(encode(SAMPLE_TEXT))
        if ours != found.sample_ids:
            missing.append(
                f"its tokenizer encodes a sample as {len(found.sample_ids)} tokens and the trainer's as {len(ours)}, "
                "or as other ones; serve the model that is trained, or give --tokenizer"
            )
    if needed_tokens is not None and found.max_model_len is not None and needed_tokens > found.max_model_len:
        missing.append(
            f"its context is {found.max_model_len} tokens, and the longest prompt (training row {longest_row}) with "
            f"max_completion_length needs {needed_tokens}; start it with --max-model-len {needed_tokens}, or leave "
            "such rows out"
        )
    if None not in (image_reader, found.image_reader) and image_reader != found.image_reader:
        missing.append(
            f"it reads images by {found.image_reader} and the trainer by {image_reader}, so their pixels may differ; "
            "install the same transformers for both, and torchvision for both or for neither"
        )
    if missing:
        raise WeightSyncError(f"the rollout server at {found.root} cannot be trained against: {'; '.join(missing)}.")


def too_old(version: str | None) -> str | None:
    """Return what to do about a release of vLLM that is too old; None where it is new enough, or names no release."""
    release = re.match(r"(\d+)\.(\d+)\.\d", version or "")
    if release is None or (int(release[1]), int(release[2])) >= OLDEST_VLLM:
        return None
    return f"it is vLLM {version}, and training needs {'.'.join(map(str, OLDEST_VLLM))} or later; upgrade vLLM there"


async def old_server(server: ServerClient) -> str | None:
    """Return `too_old` of a server that may not answer."""
    try:
        answer = await server.request("GET", "/version", timeout_s=5.0)
    except WeightSyncError:
        return None
    return too_old(str(answer.get("version"))) if isinstance(answer, dict) else None


async def _asked(server: ServerClient, method: str, path: str, body: Any = None) -> Any:
    """Return the answer, or None where the server has no such route or refuses the request."""
    try:
        return await server.ask(method, path, body)
    except RefusedError:
        return None


# -- log-probs ----------------------------------------------------------------------------------------------------
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
) -> dict[str, Any]:
    """Sample a few tokens from a server at the training temperature; return its answer.

    An answer that fails, is broken, or takes a third of `timeout_s` is asked for again.
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
        asked = await server.request("POST", path, body, timeout_s=limit_s / 3)
        answer = read_completion(asked, server.root, "message" if chat else "text")
        check_tokens(answer, server.root, needed=False, vocab_size=vocab_size, has_prompt=True)
        return answer

    deadline = time.monotonic() + limit_s
    return await retry(attempt, CONTROL_RETRIES, log_retry, deadline=deadline, passing=passes_in_place)


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
        options = {"version": version, "timeout_s": self._limit_s, **self._question()}
        return _patient_answer(server, pool, self._patience_s, options)

    def _compare(self, server: ServerClient, answer: dict[str, Any], version: int) -> None:
        """Compare an answer of `ask_server` with the trainer's log-probs: the largest difference counts.

        With half precision it is the mean, as there one token of eight may be off by 0.4 nats though the weights are
        the same (SmolLM2-135M: 3 to 5 % of answers have one above 0.25, none a mean above 0.1).

        Raises:
            WeightProbeError: the difference is above the tolerance, or the server names another version than was
                pushed.
        """
        sampled = sampled_tokens(answer)
        ids = sampled.completion_ids
        if not sampled.prompt_ids or not ids or not sampled.logprobs:
            raise WeightProbeError(
                f"the server at {server.root} sends no token ids or log-probs, which training needs; use a server "
                "that honours return_token_ids and logprobs, such as vf-serve."
            )
        for span in sampled.versions:
            if str(span["version"]) != str(version):
                raise WeightProbeError(
                    f"version {version} was pushed, but the server samples from version {span['version']}; if "
                    f"another run pushes to {server.root}, give each a server of its own."
                )
        half = not {"bfloat16", "float16"}.isdisjoint({self._trains_in, *self._server_types})
        tolerance = self._tolerance if self._tolerance is not None else (0.25 if half else 1e-3)
        ours = self._score(sampled.prompt_ids, ids)
        # numpy's, as Python's max() may pass over what is not a number
        differences = np.array([abs(a - b) for a, b in zip(ours, sampled.logprobs, strict=True)])
        difference = float(differences.mean() if half else differences.max())
        if difference <= tolerance:
            self._on_result(difference)
            return
        types, differ = ", ".join(sorted(self._server_types)), self._server_types - {self._trains_in}
        types = f"the number types differ (trainer {self._trains_in}, server {types}), or " if differ else ""
        raise WeightProbeError(
            f"the server acknowledged the weights of step {version}, but its log-probs differ from the trainer's by "
            f"{difference:.4f} nats ({'the mean' if half else 'the largest'} of {len(ids)} tokens; probe_tolerance "
            f"is {tolerance:g}): {types}it does not sample from these weights "
            "(another run may push to it: give each a server of its own), or from another distribution "
            "(temperature; log-probs before processing: start vLLM with --logprobs-mode "
            "processed_logprobs; on a CPU, a vLLM without the package verifiers-vllm keeps the old head of tied "
            "embeddings). A server that refused a load in an earlier run may hold half of it: start it again."
        )


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
