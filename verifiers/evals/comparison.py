"""Is run B better than run A? Paired by prompt wherever both runs had the same prompts."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from verifiers.errors import ConfigError
from verifiers.evals.evaluation_run import IDENTITY
from verifiers.evals.results import Counts, RolloutResults
from verifiers.evals.statistics import (
    Estimate,
    PermutationTest,
    detectable_difference,
    mean_over_prompts,
    paired_difference,
    shuffle_test,
    sign_flip_test,
    unpaired_difference,
)
from verifiers.evals.store import iter_rows, plain, read_metadata, run_at
from verifiers.evals.summary import RIGHT_FROM, metric_bounds, rollouts_planned, value_of_prompt


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """One run of a comparison; `asked` has for each example id a hash of its prompt, answer and task."""

    directory: Path
    metadata: Mapping[str, Any]
    results: RolloutResults
    asked: Mapping[Any, str]

    @classmethod
    def of_rows(cls, directory: Path, metadata: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> ComparedRun:
        """Return the run that these rows make; they are read once and not kept."""
        results, asked = RolloutResults(), dict[Any, str]()
        for row in rows:
            results.add(row)
            if row["example_id"] not in asked:
                asked[row["example_id"]] = prompt_digest(row)
        return cls(directory, metadata, results, asked)


def read_compared_run(directory: str | Path) -> ComparedRun:
    path = run_at(directory)
    return ComparedRun.of_rows(path, read_metadata(path), iter_rows(path))


def prompt_digest(row: Mapping[str, Any]) -> str:
    """Return a hash of what a row's rollout was asked: prompt, answer and task."""
    asked = [row.get("prompt"), row.get("answer"), row.get("task")]
    text = json.dumps(asked, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


Pairing = Literal["same", "common", "unpaired"]
MatchBy = Literal["prompt", "id"]
Verdict = Literal["B is better", "A is better", "no difference shown", "too few prompts to tell"]

# Differences of prompts below this are ties: means of equal rewards may differ in the last digit.
_TIE = 1e-9

_SHOWN_SETTINGS = (*(name for name in IDENTITY if name not in ("prompts", "seed")), "shard")


@dataclass(frozen=True, slots=True)
class Side:
    """One run's estimate of the compared metric.

    Attributes:
        estimate: over the prompts that are compared: those in pairs, or all where there are no pairs.
        only_here: prompts that the other run does not have.
        unscored: prompts of both runs that have no value here, and so are in no pair.
    """

    name: str
    estimate: Estimate
    counts: Counts
    only_here: int
    unscored: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """The difference of run B from run A in one metric. NaN stands for what the data cannot tell.

    Attributes:
        paired: True where the difference is of the same prompts.
        difference: B - A with its interval.
        test: the permutation test: signs of the pairs flipped, or prompts permuted where there are no pairs.
        wins, ties, losses: prompts on which B did better, the same, worse; None where there are no pairs.
        detectable: smallest true difference that such a comparison finds four times out of five.
        verdict: "better" takes higher as better, and needs both the interval and the p value.
        settings: what the runs were asked to do differently: name -> (A's, B's).
    """

    metric: str
    paired: bool
    a: Side
    b: Side
    common: int
    difference: Estimate
    test: PermutationTest
    wins: int | None
    ties: int | None
    losses: int | None
    detectable: float
    verdict: Verdict
    settings: Mapping[str, tuple[Any, Any]]

    def as_json(self) -> dict[str, Any]:
        """Return the fields of `--json`; None stands for what cannot be told."""
        found = dataclasses.asdict(self)
        test, common = found.pop("test"), found.pop("common")
        told: dict[str, Any] = plain({**found, "p": test["p"], "p_exact": test["exact"], "common_prompts": common})
        return told


def compare_runs(
    a: ComparedRun,
    b: ComparedRun,
    *,
    metric: str = "reward",
    pairing: Pairing = "same",
    match_by: MatchBy = "prompt",
    right_from: float = RIGHT_FROM,
    confidence: float = 0.95,
    seed: int = 0,
) -> Comparison:
    """Compare two runs in one metric; a difference above 0 means that b is higher.

    A prompt is known by its example id and a hash of its text, answer and task. The pairs are the prompts with a
    value on both sides; a prompt that one side has no value for (all failed, or fewer than k scored) is counted
    and left out, never taken as 0.

    Args:
        metric: "reward", a reward function's name, or "pass@K", "pass^K", "best@K".
        pairing: "same" asks that both runs have the same prompts of the same environment; "common" pairs those that
            both have; "unpaired" compares the means of two different sets of prompts.
        match_by: "id" knows a prompt by its example id alone, for runs that differ in how they ask, such as in
            their system prompt.
        confidence: coverage of the intervals; p has to be below 1 - confidence for a verdict.

    Raises:
        ConfigError: the prompts differ and `pairing` is "same", nothing is common, or a run lacks the metric.
    """
    keys = [_keys(run, match_by) for run in (a, b)]
    common = set(keys[0].values()) & set(keys[1].values())
    if pairing == "same":
        _check_same(a, b, keys, common, match_by)
    if pairing == "common" and not common:
        raise ConfigError("the runs have no prompt in common; compare them unpaired (--unpaired-ok).")
    _, value = value_of_prompt(metric, right_from)
    measured = [_measured(run, of_example, metric, right_from) for run, of_example in zip((a, b), keys, strict=True)]
    # a mean of few rewards may lie within bounds that the rewards do not keep
    bounds = metric_bounds(metric, (a.metadata, b.metadata), [rewards for of in measured for rewards in of.values()])
    limits: dict[str, Any] = {"confidence": confidence, "bounds": bounds}
    unscored = [len(common - found.keys()) for found in measured]
    if pairing != "unpaired":
        shared = measured[0].keys() & measured[1].keys()
        measured = [{key: found[key] for key in found if key in shared} for found in measured]
    before, after = ({key: value(rewards) for key, rewards in found.items()} for found in measured)
    sides = [
        Side(
            name=str(run.directory),
            estimate=mean_over_prompts(list(values.values()), sum(map(len, found.values())), **limits),
            counts=run.results.counts(planned=rollouts_planned(run.metadata)),
            only_here=len(of_example) - len(common),
            unscored=without,
        )
        for run, of_example, found, values, without in zip(
            (a, b), keys, measured, (before, after), unscored, strict=True
        )
    ]
    fewest = min(len(before), len(after))
    alpha = 1 - confidence
    differences: list[float] | None = None
    if pairing == "unpaired":
        difference = unpaired_difference(
            [[value] for value in before.values()], [[value] for value in after.values()], **limits
        )
        test = shuffle_test(list(before.values()), list(after.values()), seed=seed)
        enough = fewest >= 2
    else:
        singly = ({key: [value] for key, value in of.items()} for of in (before, after))
        difference = paired_difference(*singly, **limits)
        differences = [after[key] - before[key] for key in before]
        test = sign_flip_test(differences, seed=seed)
        # flipping all signs of so few pairs is no rarer than this
        enough = fewest > 0 and 2.0 ** (1 - fewest) <= alpha
    return Comparison(
        metric=metric,
        paired=differences is not None,
        a=sides[0],
        b=sides[1],
        common=len(common),
        difference=dataclasses.replace(difference, rollouts=sum(side.estimate.rollouts for side in sides)),
        test=test,
        wins=None if differences is None else sum(found > _TIE for found in differences),
        ties=None if differences is None else sum(abs(found) <= _TIE for found in differences),
        losses=None if differences is None else sum(found < -_TIE for found in differences),
        # unpaired, the degrees of freedom of the smaller side, which are never too many
        detectable=detectable_difference(difference.stderr, fewest - 1, confidence=confidence),
        verdict=_verdict(difference, test, alpha) if enough else "too few prompts to tell",
        settings={
            name: (a.metadata.get(name), b.metadata.get(name))
            for name in _SHOWN_SETTINGS
            if a.metadata.get(name) != b.metadata.get(name)
        },
    )


def _measured(
    run: ComparedRun, keys: Mapping[Any, Hashable], metric: str, right_from: float
) -> dict[Hashable, list[float]]:
    """Return the numbers that a metric is made of, by prompt, where they make one."""
    wanted, value = value_of_prompt(metric, right_from)
    known = run.results.metrics
    if wanted not in known:
        raise ConfigError(f"{str(run.directory)!r} has no metric {wanted!r}; it has {', '.join(known)}.")
    of_prompts = run.results.values(wanted)
    numbers = {key: of_prompts[example] for example, key in keys.items()}
    return {key: found for key, found in numbers.items() if found and not math.isnan(value(found))}


def _keys(run: ComparedRun, match_by: MatchBy) -> dict[Any, Hashable]:
    """Return the key by which each example id of a run is matched, in an order that does not depend on arrival."""
    examples = sorted(run.asked, key=lambda example: (str(type(example)), example))
    return {example: (example, run.asked[example]) if match_by == "prompt" else example for example in examples}


def _check_same(
    a: ComparedRun, b: ComparedRun, keys: Sequence[Mapping[Any, Hashable]], common: set[Hashable], match_by: MatchBy
) -> None:
    told = "--on-common-prompts compares on those, --unpaired-ok compares the means of different prompts"
    other_text = sum(keys[0][example] != keys[1][example] for example in keys[0].keys() & keys[1].keys())
    only_a, only_b = (len(found) - len(common) for found in keys)
    if only_a or only_b:
        texts = (
            f" ({other_text} have the same example id and another text, answer or task: --match-by id pairs them)"
            if other_text
            else ""
        )
        raise ConfigError(
            f"the runs have different prompts: {len(common)} in common, {only_a} only in A, {only_b} only in B"
            f"{texts}; {told}."
        )
    for name in ("env", "env_args") if match_by == "prompt" else ("env",):
        before, after = a.metadata.get(name), b.metadata.get(name)
        if before != after:
            raise ConfigError(
                f"all {len(common)} prompts are the same, but {name} is {before!r} in A and {after!r} in B, so that"
                f" rewards may mean something else; --on-common-prompts compares all the same."
            )


def _verdict(difference: Estimate, test: PermutationTest, alpha: float) -> Verdict:
    if test.p <= alpha and difference.low > 0:
        return "B is better"
    if test.p <= alpha and difference.high < 0:
        return "A is better"
    return "no difference shown"
