"""The engine's inputs and outputs as plain values, without tensors."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal

from verifiers.train.image_processor import Images
from verifiers_embedded.engine.constraints import Grammar, Guide
from verifiers_embedded.engine.sampling import NoiseStream, SamplingParameters
from verifiers_embedded.engine.stopping import StopMatcher
from verifiers_embedded.errors import BrokenLogits, GrammarFailed

FinishReason = Literal["stop", "length", "abort"]


class WeightVersion:
    """One state of the weights. Compared by identity: two states may carry the same label.

    A reload makes a new state, and the label comes in a request of its own afterwards. Tokens sampled in
    between must not be stamped with the old label, so the state is first called ``<old label>+reload`` and
    named later; spans hold the state, not its label, and so learn the name.
    """

    def __init__(self, label: str, *, named: bool = True) -> None:
        self.label = label
        self.named = named


@dataclass(frozen=True)
class WeightSpan:
    """The tokens ``[start, end)`` of a completion, sampled under the weights called `version`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True)
class GenerationRequest:
    """One completion to sample.

    Args:
        prompt_ids: the prompt's token ids, at least one.
        max_tokens: at least 1; the caller has clipped it to the room left in the context.
        eos_ids: ids that end the completion; the id itself is kept.
        stop: strings that end the completion as soon as they appear in its text.
        grammar: what the text must follow; None where it is free.
        images: those that the prompt has the places of; None where it has none.
    """

    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParameters
    eos_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    grammar: Grammar | None = None
    images: Images | None = None


@dataclass(frozen=True)
class Generation:
    """A finished completion.

    `token_ids` holds every sampled token, with the one that ended it; `log_probs[i]` is the natural log of
    the probability with which `token_ids[i]` was drawn; `likeliest[i]` the alternatives that were asked for,
    as (id, log-probability); `kept[i]` the ids that could be drawn in its place, none where all could or nobody
    asked. `spans` covers all tokens without gaps.
    """

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    spans: list[WeightSpan]
    likeliest: list[list[tuple[int, float]]] = field(default_factory=list)
    kept: list[list[int]] = field(default_factory=list)


Watcher = Callable[["Sequence"], None]
"""Called with a sequence after each of its tokens, in the engine's thread: returns at once and raises nothing."""


@dataclass(eq=False, slots=True)
class Sequence:
    """A request while it is queued or has a slot. Only the engine thread writes to it.

    Others may read: entries are added at the ends of the lists, and never changed. `log_probs` grows last.
    `shift` is what the model's position of a sampled token has more than its place, as where an image takes fewer
    positions than tokens.
    """

    request: GenerationRequest
    future: Future[Generation]
    matcher: StopMatcher | None
    noise: NoiseStream
    tokens: list[int]
    log_probs: list[float] = field(default_factory=list)
    likeliest: list[list[tuple[int, float]]] = field(default_factory=list)
    kept: list[list[int]] = field(default_factory=list)
    span_starts: list[tuple[WeightVersion, int]] = field(default_factory=list)
    watcher: Watcher | None = None
    guide: Guide | None = None
    shift: int = 0

    def append(
        self,
        token: int,
        log_prob: float,
        version: WeightVersion,
        likeliest: list[tuple[int, float]],
        kept: list[int],
    ) -> FinishReason | None:
        """Take a sampled token; return why the sequence ends with it, or None.

        Raises:
            BrokenLogits: the log-probability is not a finite number.
            GrammarFailed: no token could be sampled under the grammar, or none can follow.
        """
        self._check_guide()
        if not -float("inf") < log_prob <= 0.0001:
            raise BrokenLogits(
                f"the model gave no valid distribution for token {len(self.log_probs)} of this completion "
                f"(log-probability {log_prob!r}, weights {version.label!r}): push weights that are finite"
            )
        if not self.span_starts or self.span_starts[-1][0] is not version:
            self.span_starts.append((version, len(self.log_probs)))
        self.tokens.append(token)
        self.likeliest.append(likeliest)
        self.kept.append(kept)
        self.log_probs.append(log_prob)
        if token in self.request.eos_ids:
            return "stop"
        if self.matcher is not None and self.matcher.push(token):
            return "stop"
        if self.guide is not None:
            self.guide.advance(token)
            self._check_guide()
        return "length" if len(self.log_probs) >= self.request.max_tokens else None

    def _check_guide(self) -> None:
        if self.guide is not None and self.guide.failure is not None:
            raise GrammarFailed(
                f"the grammar of this request cannot be followed beyond token {len(self.log_probs)}: "
                f"{self.guide.failure}; send a simpler schema"
            )

    def finish(self, reason: FinishReason) -> Generation:
        starts = [start for _, start in self.span_starts]
        ends = [*starts[1:], len(self.log_probs)]
        # An aborted sequence may have no token yet, and then no span.
        spans = [
            WeightSpan(version.label, start, end)
            for (version, start), end in zip(self.span_starts, ends, strict=False)
        ]
        sampled = self.tokens[len(self.request.prompt_ids) :]
        return Generation(sampled, self.log_probs, reason, spans, self.likeliest, self.kept)
