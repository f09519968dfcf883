"""RankingRubric: a judge that puts the rollouts of one prompt in order."""

from __future__ import annotations

import hashlib
import itertools
import random
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any, cast

from verifiers.concurrency import gather_owned
from verifiers.errors import ConfigError
from verifiers.parsers.parser import Parser, after_thought
from verifiers.rubrics.judge_rubric import JudgeRubric, question_text
from verifiers.types import Messages, RewardFunc, State

DEFAULT_RANKING_PROMPT = """Rank the responses to a question from best to worst.

<question>
{question}
</question>

{responses}

Judge what they say, not their length or the order in which they stand here. End with one line that has every \
label once, the best first, with ">" between better and worse and "=" between equals, for example: {example}"""


class RankingRubric(JudgeRubric):
    """A reward by a rollout's place in a judge's ranking of its group: 1.0 for the best, 0.0 for the worst.

    The places between are evenly spaced; equals share the mean of their places, so a group of one gets 0.5, and so
    does every rollout of a group of equals. Responses that are the same text are shown once and get the same reward;
    where all are, no judge is asked. The order in which responses are shown is shuffled, by the seed and the
    texts, so that it neither favours a place nor depends on which rollout ended first.

    Its function is `ranking`, a group function: it needs `score_group`. An answer of the judge that is not a ranking
    of all the responses is sampled again; where none comes, or the judge fails, every rollout of the group is a
    failed grade.

    Args:
        parser, judge_client, judge_model, judge_sampling_args: as for `JudgeRubric`.
        judge_prompt: may have {question}, {answer}, {responses} (each between tags with its label) and {example} (of
            a ranking); other braces are written twice. The default does not show the answer.
        weight: of `ranking`.
        rounds: rankings of one group, each in another order, whose rewards are averaged.
        attempts: answers of the judge that are read in each round, at most.
        seed: of the shuffles.

    Raises:
        ConfigError: `rounds` or `attempts` below 1, and as `JudgeRubric`.
    """

    def __init__(
        self,
        parser: Parser | None = None,
        judge_client: Any = None,
        judge_model: str = "gpt-4.1-nano",
        judge_sampling_args: Mapping[str, Any] | None = None,
        judge_prompt: str = DEFAULT_RANKING_PROMPT,
        *,
        funcs: Sequence[RewardFunc] | None = None,
        weights: Sequence[float] | None = None,
        weight: float = 1.0,
        rounds: int = 1,
        attempts: int = 3,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        if rounds < 1 or attempts < 1:
            raise ConfigError(
                f"A RankingRubric needs at least 1 round and 1 attempt, but has rounds={rounds!r} and "
                f"attempts={attempts!r}."
            )
        super().__init__(
            parser=parser,
            judge_client=judge_client,
            judge_model=judge_model,
            judge_sampling_args=judge_sampling_args,
            judge_prompt=judge_prompt,
            funcs=funcs,
            weights=weights,
            **kwargs,
        )
        self.rounds = rounds
        self.attempts = attempts
        self.seed = seed
        self.add_reward_func(cast(RewardFunc, self.ranking), weight)

    def refuse_unfillable(self) -> None:
        super().refuse_unfillable()
        if type(self).ranking is RankingRubric.ranking:
            self._refuse_unfillable("question", "answer", "responses", "example")

    async def ranking(
        self,
        prompts: Sequence[Messages],
        completions: Sequence[Messages],
        answers: Sequence[Any],
        states: list[State],
    ) -> list[float]:
        """Return the reward of each rollout of the group, 0.0 .. 1.0, averaged over the rounds."""
        responses = [self._response(completion) for completion in completions]
        # sorted: the order of arrival must not matter
        shown = sorted(set(responses))
        if len(shown) < 2:
            return [0.5] * len(responses)
        question = question_text(prompts[0])
        rounds = [self._round(number, question, answers[0], shown, states) for number in range(self.rounds)]
        rankings = await gather_owned(rounds)
        rewards = [rewards_of_ranking(ranking, responses) for ranking in rankings]
        return [sum(column) / len(column) for column in zip(*rewards, strict=True)]

    async def _round(
        self, number: int, question: str, answer: Any, responses: Sequence[str], states: Sequence[State]
    ) -> list[list[str]]:
        """Ask for one ranking; return the responses in tiers, the best first."""
        order = list(responses)
        key = "\0".join([str(self.seed), str(number), question, *responses])
        random.Random(hashlib.blake2b(key.encode(errors="surrogatepass")).digest()).shuffle(order)
        by_label = dict(zip(_labels(len(order)), order, strict=True))
        text = self._filled(
            question=question,
            answer=answer,
            responses="\n\n".join(
                f'<response label="{label}">\n{one}\n</response>' for label, one in by_label.items()
            ),
            # from the last to the first, so that a judge that copies it does not favour what is shown first
            example=" > ".join(reversed(by_label)),
        )
        tiers = await self._readable(
            lambda: self._answer(text, *states),
            lambda response: parse_ranking(response, list(by_label)),
            self.attempts,
        )
        return [[by_label[label] for label in tier] for tier in tiers]


def parse_ranking(text: str, labels: Sequence[str]) -> list[list[str]]:
    """Return the tiers of a ranking, best first, from the last line of a text that has every label once.

    Between labels stand ">" or "," (better, worse) and "=" (equals). Markdown around it, and words before a colon,
    do not count, nor does what stands before `</think>` or in thoughts that were cut off.

    Raises:
        ValueError: there is no such line.
    """
    for line in reversed(after_thought(text).splitlines()):
        ranking = re.sub(r"[*`\[\]\s.\"']", "", line.rpartition(":")[2]).replace(",", ">")
        tiers = [tier.split("=") for tier in ranking.split(">")]
        if sorted(itertools.chain.from_iterable(tiers)) == sorted(labels):
            return tiers
    raise ValueError(f"no line ranks {', '.join(labels)}, each once")


def rewards_of_ranking(tiers: Sequence[Sequence[str]], responses: Sequence[str]) -> list[float]:
    """Return the reward of each response by its tier: evenly from 1.0 to 0.0, the mean of their places for equals.

    The best tier comes first. Each text is in one tier; there are two or more responses, of which several may be the
    same text.
    """
    reward_of: dict[str, float] = {}
    place = 0
    for tier in tiers:
        size = sum(response in tier for response in responses)
        mean_place = place + (size - 1) / 2
        reward_of.update(dict.fromkeys(tier, 1.0 - mean_place / (len(responses) - 1)))
        place += size
    return [reward_of[response] for response in responses]


def _labels(count: int) -> list[str]:
    letters = string.ascii_uppercase
    return list(letters[:count]) if count <= len(letters) else [f"R{number}" for number in range(1, count + 1)]
