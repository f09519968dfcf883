"""A rollout with its turns and training rows, its group, and the block they are part of."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import Any

from verifiers.types import Failure, Info, Messages, Outcome, RolloutKey, State, Timing, Usage


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """One attempt to be made at one prompt.

    Attributes:
        seed: sampling seed sent to the server; derived from (seed, key) by `data.sampler.rollout_seed`.
        lost_workers: rollout workers that died under its earlier attempts.
    """

    key: RolloutKey
    prompt: Messages
    answer: Any = ""
    task: str = "default"
    info: Info = field(default_factory=dict)
    seed: int | None = None
    lost_workers: int = 0


def requests_by_prompt(requests: Sequence[RolloutRequest]) -> list[list[RolloutRequest]]:
    """Return requests in groups of one prompt each, in the order of their first ones."""
    groups: dict[int, list[RolloutRequest]] = {}
    for request in requests:
        groups.setdefault(request.key.example_id, []).append(request)
    return list(groups.values())


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer of the trained policy.

    Attributes:
        prompt_ids: token ids the server computed the answer from.
        completion_ids: every sampled token id, the end-of-sequence token included.
        logprobs: log-probability of each sampled token under the distribution it was sampled from
            (after temperature), in nats; same length as `completion_ids`.
        versions: policy version of each; of tokens that the server does not stamp, the version when the answer began.
        role: of `client.role(name)`; None for the rollout's own client.
        kept_counts, kept_ids: how many ids each token was drawn from, 0 for all, and these; empty where nothing was
            left out.
        images: of the prompt, in its order, by their names in the run's `ImageStore`.
    """

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    role: str | None = None
    kept_counts: Sequence[int] = ()
    kept_ids: Sequence[int] = ()
    images: Sequence[str] = ()


@dataclass(slots=True)
class TokenSequence:
    """One training sequence of T = len(completion_ids) positions after its prompt.

    Attributes:
        prompt_ids: ids before the first sampled token.
        completion_ids: sampled tokens, and between turns the environment's.
        loss_mask: 1 on sampled tokens, 0 on the environment's; length T.
        logprobs: the sampler's log-probs; 0.0 where `loss_mask` is 0; length T.
        versions: policy version of each sampled token; -1 where `loss_mask` is 0; length T.
        turn_lengths: sampled tokens of each policy turn in this row, by the turn's number in its rollout, in order.
        teacher_logprobs: a teacher's of the sampled tokens; 0.0 where `loss_mask` is 0; length T, or 0 without one.
        teacher_ids: the likeliest tokens to the teacher, as many for each sampled token, where they were asked for.
        teacher_ids_logprobs: the teacher's log-probs of these.
        kept_counts: how many ids each token was drawn from, 0 for all; length T, or 0 where nothing was left out.
        kept_ids: these, of one token after another.
        images: of the row's turns, as in `Turn`.
    """

    prompt_ids: MutableSequence[int]
    completion_ids: MutableSequence[int] = field(default_factory=list)
    loss_mask: MutableSequence[int] = field(default_factory=list)
    logprobs: MutableSequence[float] = field(default_factory=list)
    versions: MutableSequence[int] = field(default_factory=list)
    teacher_logprobs: MutableSequence[float] = field(default_factory=list)
    teacher_ids: MutableSequence[int] = field(default_factory=list)
    teacher_ids_logprobs: MutableSequence[float] = field(default_factory=list)
    role: str | None = None
    kept_counts: MutableSequence[int] = field(default_factory=list)
    kept_ids: MutableSequence[int] = field(default_factory=list)
    images: Sequence[str] = ()
    turn_lengths: dict[int, int] = field(default_factory=dict)

    def pack(self) -> None:
        """Hold the same numbers as arrays, which take a third of a list's memory."""
        self.prompt_ids, self.completion_ids = array("q", self.prompt_ids), array("q", self.completion_ids)
        self.loss_mask, self.logprobs = array("b", self.loss_mask), array("d", self.logprobs)
        self.versions = array("q", self.versions)
        self.kept_counts, self.kept_ids = array("i", self.kept_counts), array("i", self.kept_ids)

    @property
    def sampled_tokens(self) -> int:
        return sum(self.loss_mask)

    @property
    def oldest_version(self) -> int:
        """The smallest policy version among the sampled tokens; 0 for a row without any."""
        return min((v for v in self.versions if v >= 0), default=0)


@dataclass(slots=True)
class Rollout:
    """One attempt at one prompt, finished: it has exactly one outcome.

    Attributes:
        reward: weighted sum of the reward functions; None unless the outcome is `completed` or `truncated`.
        rows: the trained policy's tokens; empty where the server gave no token ids.
        forks: turns that started another row (see `rows_from_turns`).
        advantage: given by the environment in place of the group's: one float, or one per sampled token.
        turn_rewards: of each policy turn: that of its step in the trajectory, and those of `vf.turn_reward` functions
            times their weights; None where nobody gave any.
        role_rewards: by role, those of `vf.role_reward` functions times their weights; None where there are none.
        turn_advantages: given by the environment in its steps; None for a turn without, and where there are none.
        refusal: the last answer's, where the policy refused or the server filtered it (see `SampledTokens`).
    """

    key: RolloutKey
    outcome: Outcome
    prompt: Messages
    completion: Messages
    answer: Any = ""
    task: str = "default"
    info: Info = field(default_factory=dict)
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    rows: list[TokenSequence] = field(default_factory=list)
    forks: int = 0
    turns: int = 0
    advantage: float | list[float] | None = None
    turn_rewards: list[float] | None = None
    role_rewards: dict[str, float] | None = None
    turn_advantages: list[float | None] | None = None
    failure: Failure | None = None
    attempts: int = 1
    timing: Timing = field(default_factory=Timing)
    usage: Usage = field(default_factory=Usage)
    refusal: str | None = None
    state: State = field(default_factory=State, repr=False)

    @property
    def is_scored(self) -> bool:
        """True where the rollout has a reward and takes part in group statistics."""
        return self.reward is not None

    @property
    def is_truncated(self) -> bool:
        return self.outcome is Outcome.TRUNCATED


@dataclass(slots=True)
class Group:
    """The rollouts of one prompt, ordered by generation index."""

    example_id: int
    rollouts: list[Rollout]

    @property
    def scored(self) -> list[Rollout]:
        return [rollout for rollout in self.rollouts if rollout.is_scored]


@dataclass(slots=True)
class ScoredBlock:
    """Everything that was generated for one block, ordered by the plan, whatever the order of arrival.

    Attributes:
        generation_s: wall-clock seconds from the first rollout's start to the last score.
        policy_version: version that was on the server when the block was submitted.
        filtered: groups that were generated and scored, and replaced because their rewards have no variance.
    """

    block_id: int
    groups: list[Group]
    policy_version: int = 0
    generation_s: float = 0.0
    filtered: list[Group] = field(default_factory=list)

    @property
    def rollouts(self) -> Sequence[Rollout]:
        return [rollout for group in self.groups for rollout in group.rollouts]

    @property
    def launched(self) -> Sequence[Rollout]:
        """Every rollout that was begun for the block: `rollouts`, and those of filtered groups."""
        return [rollout for group in (*self.groups, *self.filtered) for rollout in group.rollouts]

    def __iter__(self) -> Iterator[Rollout]:
        return iter(self.rollouts)

    def outcomes(self) -> Counter[Outcome]:
        """Count rollouts by outcome; the sum is the number launched."""
        return Counter(rollout.outcome for rollout in self.launched)

    def commonest_failure(self) -> tuple[str, int] | None:
        """Return the failure text seen most often and its count, or None where nothing failed."""
        texts = Counter(str(rollout.failure) for rollout in self.launched if rollout.failure is not None)
        return texts.most_common(1)[0] if texts else None


def most_often(commonest: tuple[str, int] | None) -> str:
    """Return the commonest failure as the end of a sentence; nothing for None."""
    return f"; most often: {commonest[0]} ({commonest[1]} times)" if commonest else ""


def failure_from(error: BaseException) -> Failure:
    return Failure(type(error).__name__, str(error) or repr(error), exception=error)
