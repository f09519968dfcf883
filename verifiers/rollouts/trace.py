"""The token-exact trace of a rollout: what the policy saw and sampled, as the server reported it.

A `Turn` is one answer of the trained policy. `rows_from_turns` joins turns into training rows: where a turn's
prompt extends, id for id, what a row already holds, the new tokens are appended to that row; where it does not
(a chat template that rewrites history, a tokenizer that merges differently), a new row starts and is counted as
a fork. Nothing is ever re-tokenized or realigned.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

__all__ = ["TokenSequence", "Turn", "rows_from_turns"]


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer of the trained policy.

    Attributes:
        prompt_ids: token ids the server computed the answer from.
        completion_ids: every sampled token id, the end-of-sequence token included.
        logprobs: log-probability of each sampled token under the distribution it was sampled from
            (after temperature), in nats; same length as `completion_ids`.
        versions: policy version of each sampled token; same length.
        finish_reason: the server's: "stop", "length", "tool_calls", ...
        newest_version: the version when the answer ended, where that is another than when it began and the server
            reports no version of single tokens; `versions` then holds the one at the beginning.
    """

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    finish_reason: str | None = None
    newest_version: int | None = None


@dataclass(slots=True)
class TokenSequence:
    """One training sequence of T = len(completion_ids) positions after its prompt.

    Attributes:
        prompt_ids: ids before the first sampled token.
        completion_ids: sampled tokens, and between turns the environment's.
        loss_mask: 1 on sampled tokens, 0 on the environment's; length T.
        logprobs: the sampler's log-probs; 0.0 where `loss_mask` is 0; length T.
        versions: policy version of each sampled token; -1 where `loss_mask` is 0; length T.
        is_truncated: the last turn ended for want of room (finish reason "length").
        unreported_version: the newest version that may have sampled tokens which the server does not stamp (see
            `Turn.newest_version`); None where there are none.
    """

    prompt_ids: list[int]
    completion_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    is_truncated: bool = False
    unreported_version: int | None = None

    @property
    def sampled_tokens(self) -> int:
        """Number of positions that carry loss."""
        return sum(self.loss_mask)

    @property
    def oldest_version(self) -> int:
        """The smallest policy version among the sampled tokens; 0 for a row without any."""
        return min((v for v in self.versions if v >= 0), default=0)

    @property
    def newest_version(self) -> int:
        """The largest policy version that may have sampled a token; 0 for a row without any."""
        return max(max(self.versions, default=0), self.unreported_version or 0, 0)

    def extended_by(self, prompt_ids: Sequence[int]) -> Sequence[int] | None:
        """Return the tokens that `prompt_ids` adds to this row, or None where it does not extend it."""
        held_prompt, held = len(self.prompt_ids), len(self.prompt_ids) + len(self.completion_ids)
        if len(prompt_ids) < held:
            return None
        if list(prompt_ids[:held_prompt]) != self.prompt_ids:
            return None
        if list(prompt_ids[held_prompt:held]) != self.completion_ids:
            return None
        return prompt_ids[held:]

    def append_environment(self, ids: Sequence[int]) -> None:
        """Append tokens that the environment wrote: seen by the policy, without loss."""
        self.completion_ids.extend(ids)
        self.loss_mask.extend([0] * len(ids))
        self.logprobs.extend([0.0] * len(ids))
        self.versions.extend([-1] * len(ids))

    def append_sampled(self, turn: Turn) -> None:
        """Append the tokens that the policy sampled in `turn`."""
        self.completion_ids.extend(turn.completion_ids)
        self.loss_mask.extend([1] * len(turn.completion_ids))
        self.logprobs.extend(turn.logprobs)
        self.versions.extend(turn.versions)
        self.is_truncated = turn.finish_reason == "length"
        if turn.newest_version is not None:
            self.unreported_version = max(turn.newest_version, self.unreported_version or 0)


def rows_from_turns(turns: Iterable[Turn]) -> tuple[list[TokenSequence], int]:
    """Join turns into training rows.

    Returns:
        The rows in the order in which they began, and the number of forks: turns after the first that
        extended no row. Turns without a sampled token are left out.
    """
    rows: list[TokenSequence] = []
    forks = 0
    for turn in turns:
        if not turn.completion_ids:
            continue
        for row in reversed(rows):
            added = row.extended_by(turn.prompt_ids)
            if added is not None:
                row.append_environment(added)
                row.append_sampled(turn)
                break
        else:
            forks += bool(rows)
            row = TokenSequence(prompt_ids=list(turn.prompt_ids))
            row.append_sampled(turn)
            rows.append(row)
    return rows, forks
