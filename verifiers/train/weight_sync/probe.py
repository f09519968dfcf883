"""Does the server sample from the weights it was sent? Ask it for a few tokens and score them here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from verifiers.errors import WeightProbeError
from verifiers.rollouts.wire import NEUTRAL_SAMPLING
from verifiers.train.weight_sync.server import NoAnswerError, ServerControl

__all__ = ["AskedProbe", "ProbeResult", "ask_server", "judge_answer"]

PROBE_TOKENS = 8
_LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a probe found.

    Attributes:
        largest_difference: largest |server's log-prob - trainer's| over the probe's tokens, in nats.
        tokens: sampled tokens compared.
    """

    largest_difference: float
    tokens: int


def ask_server(
    server: ServerControl,
    model: str,
    prompt: Any,
    *,
    temperature: float,
    version: int,
    timeout_s: float | None = None,
) -> dict[str, Any]:
    """The server's answer to a probe's prompt: a few tokens, sampled at the training temperature.

    Args:
        prompt: messages, or a string for a completion model.
        timeout_s: deadline in seconds; the server's own when left out.
    """
    chat = not isinstance(prompt, str)
    body: dict[str, Any] = {
        "model": model,
        "temperature": temperature,
        "max_tokens": PROBE_TOKENS,
        "seed": version + 1,
        "logprobs": True if chat else 0,
        "return_token_ids": True,
        **NEUTRAL_SAMPLING,
        ("messages" if chat else "prompt"): prompt,
    }
    path = "/v1/chat/completions" if chat else "/v1/completions"
    answer: dict[str, Any] = server.request("POST", path, body, timeout_s=timeout_s)
    return answer


def judge_answer(
    server: ServerControl,
    answer: dict[str, Any],
    score: Callable[[Sequence[int], Sequence[int]], Sequence[float]],
    *,
    version: int,
    tolerance: float,
) -> ProbeResult:
    """Compare an answer of `ask_server` with the trainer's log-probs.

    Args:
        score: gives the trainer's log-prob of each completion token: `score(prompt_ids, completion_ids)`.
        tolerance: largest difference accepted, in nats.

    Raises:
        WeightProbeError: the difference is larger, or the server names another version than was pushed.
    """
    choice = answer["choices"][0]
    prompt_ids = answer.get("prompt_token_ids") or choice.get("prompt_token_ids")
    ids = choice.get("token_ids")
    logprobs = choice.get("logprobs") or {}
    # a chat's, or a text completion's
    sampled = [entry["logprob"] for entry in logprobs.get("content") or []] or logprobs.get("token_logprobs")
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
            "another distribution (temperature, log-probs before processing, tied embeddings kept old). A server "
            "that refused a load in an earlier run may hold half of it: start it again."
        )
    return ProbeResult(difference, len(ids))


class AskedProbe:
    """Probes of servers that are on their way while the trainer computes.

    Args:
        version: what was pushed.
        ask: asks one server; in a thread of its own, which ends with the request.
        patience_s: how long an answer is waited for whatever the server does meanwhile, in seconds.
        is_only_busy: says of a server that did not answer by then whether it is worth waiting on.
    """

    def __init__(
        self,
        version: int,
        servers: Sequence[ServerControl],
        ask: Callable[[ServerControl], dict[str, Any]],
        *,
        patience_s: float = float("inf"),
        is_only_busy: Callable[[ServerControl], bool] = lambda _: True,
    ) -> None:
        self.version = version
        self._until = time.monotonic() + patience_s
        self._is_only_busy = is_only_busy
        self._asked = [_Asked(server, ask) for server in servers]

    def answers(self) -> list[tuple[ServerControl, dict[str, Any] | BaseException]]:
        """Each server with its answer, or with what asking it raised, once all have come."""
        return [(asked.server, asked.wait(self._until, self._is_only_busy)) for asked in self._asked]

    def leave(self, within_s: float) -> None:
        """Nobody wants the answers any more; wait so long for requests to end."""
        deadline = time.monotonic() + within_s
        for asked in self._asked:
            asked.thread.join(max(0.0, deadline - time.monotonic()))


class _Asked:
    def __init__(self, server: ServerControl, ask: Callable[[ServerControl], dict[str, Any]]) -> None:
        self.server = server
        self._ask = ask
        self._found: dict[str, Any] | BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="verifiers-probe", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._found = self._ask(self.server)
        except BaseException as error:  # told where the answer is wanted
            self._found = error

    def wait(self, until: float, is_only_busy: Callable[[ServerControl], bool]) -> dict[str, Any] | BaseException:
        # the request has a deadline of its own
        self.thread.join(min(max(0.0, until - time.monotonic()), threading.TIMEOUT_MAX))
        while self.thread.is_alive():
            if not is_only_busy(self.server):
                text = f"a probe of {self.server.root} got no answer, nor does it say that it has the pushed weights"
                return NoAnswerError(text, timed_out=True)
            self.thread.join(_LOOK_S)
        assert self._found is not None
        return self._found
