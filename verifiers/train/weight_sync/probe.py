"""Does the server sample from the weights it was sent? Ask it for a few tokens and score them here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from verifiers.errors import WeightProbeError
from verifiers.train.weight_sync.server import ServerControl

__all__ = ["ProbeResult", "probe_server"]

PROBE_TOKENS = 8


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a probe found.

    Attributes:
        largest_difference: largest |server's log-prob - trainer's| over the probe's tokens, in nats.
        tokens: sampled tokens compared.
    """

    largest_difference: float
    tokens: int


def probe_server(
    server: ServerControl,
    model: str,
    prompt: Any,
    score: Callable[[Sequence[int], Sequence[int]], Sequence[float]],
    *,
    temperature: float,
    version: int,
    tolerance: float,
) -> ProbeResult:
    """Sample a few tokens at the training temperature and compare their log-probs with the trainer's.

    Args:
        prompt: messages, or a string for a completion model.
        score: gives the trainer's log-prob of each completion token: `score(prompt_ids, completion_ids)`.
        tolerance: largest difference accepted, in nats.

    Raises:
        WeightProbeError: the difference is larger, or the server names another version than was pushed.
    """
    chat = not isinstance(prompt, str)
    body: dict[str, Any] = {
        "model": model,
        "temperature": temperature,
        "max_tokens": PROBE_TOKENS,
        "seed": version + 1,
        "logprobs": True if chat else 0,
        "return_token_ids": True,
        ("messages" if chat else "prompt"): prompt,
    }
    answer = server.request("POST", "/v1/chat/completions" if chat else "/v1/completions", body)
    choice = answer["choices"][0]
    prompt_ids = answer.get("prompt_token_ids") or choice.get("prompt_token_ids")
    ids = choice.get("token_ids")
    logprobs = choice.get("logprobs") or {}
    sampled = (
        [entry["logprob"] for entry in logprobs.get("content") or []] if chat else logprobs.get("token_logprobs")
    )
    if not prompt_ids or not ids or not sampled:
        raise WeightProbeError(
            f"the server at {server.root} sends no token ids or log-probs, which training needs; use a server that "
            "honours return_token_ids and logprobs, such as vf-serve."
        )
    for span in choice.get("weight_versions") or []:
        if str(span["version"]) != str(version):
            raise WeightProbeError(
                f"version {version} was pushed, but the server samples from version {span['version']}."
            )
    ours = score(prompt_ids, ids)
    difference = max(abs(a - b) for a, b in zip(ours, sampled, strict=True))
    if not difference <= tolerance:
        raise WeightProbeError(
            f"the server acknowledged the weights of step {version}, but its log-probs differ from the trainer's by "
            f"{difference:.4f} (probe_tolerance is {tolerance:g}): it does not sample from these weights, or from "
            "another distribution (temperature, log-probs before processing, tied embeddings kept old)."
        )
    return ProbeResult(difference, len(ids))
