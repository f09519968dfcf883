"""Is an environment right? Its rows, its rewards and, where there is a model, what that earns, in one report."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from verifiers.checks.check_report import CheckFinding, CheckReport, Severity, named_rows
from verifiers.checks.rewards import check_rewards, weights_of
from verifiers.checks.rows import CountTokens, check_rows
from verifiers.envs.env_group import EnvGroupRubric
from verifiers.envs.lifecycle import run_teardown
from verifiers.errors import ConfigError
from verifiers.evals.evaluation_run import iter_requests
from verifiers.evals.statistics import pass_hat_k
from verifiers.loop_thread import run_blocking
from verifiers.rollouts.rollout import Group, Rollout
from verifiers.rollouts.run import Run, refuse_unsupplied
from verifiers.rubrics.judge_rubric import JudgeRubric
from verifiers.rubrics.rubric import Rubric
from verifiers.testing.fake_model import rubrics_of
from verifiers.types import Outcome


async def check_environment(
    env: Any,
    name: str = "environment",
    *,
    rows: int = 8,
    run: Run | None = None,
    prompts: int = 32,
    rollouts_per_example: int = 8,
    count_tokens: CountTokens | None = None,
    max_model_len: int | None = None,
) -> CheckReport:
    """Check an environment; nothing is asked of a model unless `run` is given.

    Args:
        rows: whose rewards are tried with right and wrong texts.
        run: on a model, whose rollouts are looked at, `rollouts_per_example` of each of `prompts` prompts.
        count_tokens, max_model_len: of prompts; see `check_rows`.
    """
    report = CheckReport(name)
    report.add("rows", *await asyncio.to_thread(check_rows, env, count_tokens, max_model_len))
    told: list[bool] = []
    for group, member in _members(env):
        part = f"rewards{group}"
        hindered, numbers = why_not_rewarded(member), dict[str, Any]()
        if hindered is not None:
            found, run = [hindered], None
        else:
            found, numbers = await check_rewards(member, rows)
        told.append(numbers.get("tells_right", True))
        report.add(part, [replace(one, where=one.where + group) for one in found], numbers)
    if not any(told):
        # copying what is not asked for earns nothing
        report.findings = [one for one in report.findings if one.kind != "answer-in-prompt"]
    if run is not None:
        requests = iter_requests(env.rows_to_evaluate(prompts), rollouts_per_example, None)
        report.add("policy", *await check_policy(env, run, list(requests)))
    return report


def _members(env: Any, group: str = "") -> Iterator[tuple[str, Any]]:
    """Give the environments of a group, each with what names it, or one that scores by a rubric of its own."""
    if not isinstance(env.rubric, EnvGroupRubric):
        yield group, env
        return
    for name, member in env.env_map.items():
        yield from _members(member, f" of {name}{group}")


def why_not_rewarded(env: Any) -> CheckFinding | None:
    """Return why an environment's rollouts cannot be rewarded here, if so."""
    try:
        if getattr(env.rubric, "is_empty", False):
            raise ConfigError("the rubric has no reward function, so every reward is 0.0.")
        weights = env.get_reward_weights()
        if weights and not any(weights):
            raise ConfigError("every reward function has weight 0, so every reward is 0.0.")
        for rubric in rubrics_of(env):
            if isinstance(rubric, JudgeRubric):
                # its key comes below
                super(JudgeRubric, rubric).refuse_unsupplied()
                rubric.refuse_unfillable()
            elif isinstance(rubric, Rubric):
                rubric.refuse_unsupplied()
    except ConfigError as error:
        return CheckFinding("rewards-not-possible", "error", "rubric", str(error), "mend that first.")
    try:
        refuse_unsupplied(env)
    except ConfigError as error:
        return CheckFinding("judge-not-asked", "note", "rubric", str(error), "mend that first.")
    return None


def check(env: Any, **options: Any) -> CheckReport:
    """Check an environment's rows and rewards, and wait for the report; `options` are `check_environment`'s."""

    async def checked() -> CheckReport:
        try:
            return await check_environment(env, **options)
        finally:
            await run_teardown(env)

    return run_blocking(checked)


GENERATIONS = (4, 8, 16, 32, 64)
"""Sizes of a group that are looked at, where as many rollouts of a prompt were played."""

_SAME = 1e-9
_MOST_EQUAL, _MOST_CUT, _MOST_UNREAD, _MOST_FORMAT = 0.5, 0.2, 0.2, 0.5
_STEP = 64


async def check_policy(env: Any, run: Run, groups: Sequence[Any]) -> tuple[list[CheckFinding], dict[str, Any]]:
    """Play groups of a prompt's rollouts with a model, and look at what they earn."""
    played = await run.run_groups(groups)
    rollouts = [rollout for group in played for rollout in group.rollouts]
    ended = [rollout for rollout in rollouts if rollout.failure is None]
    numbers: dict[str, Any] = {
        "prompts": len(played),
        "rollouts": len(rollouts),
        "reward": _share(sum(rollout.reward or 0.0 for rollout in ended), len(ended)),
        "truncated": _share(sum(rollout.is_truncated for rollout in ended), len(ended)),
        "outcomes": dict(Counter(str(rollout.outcome) for rollout in rollouts)),
    }
    findings = [*_failed(rollouts)]
    if ended:
        findings += [
            *_without_variance(played, numbers),
            *_lengths(ended, numbers, run.sampling_args),
            *_unread(env, ended, numbers),
            *_format_alone(env, ended, numbers),
        ]
    return findings, numbers


def _failed(rollouts: Sequence[Rollout]) -> Iterator[CheckFinding]:
    causes: dict[Outcome, Counter[str]] = {}
    for rollout in rollouts:
        if rollout.failure is not None:
            causes.setdefault(rollout.outcome, Counter())[str(rollout.failure)] += 1
    for outcome, texts in causes.items():
        (first, times), count = texts.most_common(1)[0], texts.total()
        is_ours = outcome in (Outcome.GRADING_ERROR, Outcome.ENVIRONMENT_ERROR)
        # where none was played to its end, nothing was checked
        is_all = all(rollout.failure is not None for rollout in rollouts)
        severity: Severity = "error" if is_ours or is_all else "warning"
        text = f"{count} of {len(rollouts)} rollouts ended as {outcome}; most often ({times} times): {first:.200}"
        mend = "failed rollouts train nothing and are in no mean: see what they have in common."
        yield CheckFinding("rollouts-fail", severity, str(outcome), text, mend)


def _without_variance(groups: Sequence[Group], numbers: dict[str, Any]) -> Iterator[CheckFinding]:
    of_prompts = [[rollout.reward or 0.0 for rollout in group.scored] for group in groups if len(group.scored) > 1]
    if not of_prompts:
        return
    equal = [rewards for rewards in of_prompts if max(rewards) - min(rewards) <= _SAME]
    least, most = (end(reward for rewards in of_prompts for reward in rewards) for end in (min, max))
    at = {"best": sum(rewards[0] >= most - _SAME for rewards in equal), "least": 0}
    at["least"] = sum(rewards[0] <= least + _SAME for rewards in equal) if most > least else 0
    # how often each reward was given
    counts = [Counter(round(reward, 9) for reward in rewards) for rewards in of_prompts]
    size = max(map(len, of_prompts))
    numbers["groups_without_variance"] = {
        "share": _share(len(equal), len(of_prompts)),
        "at_the_best_reward": at["best"],
        "at_the_least_reward": at["least"],
        "expected_with_num_generations": {
            number: round(
                fmean(
                    sum(pass_hat_k(found.total(), count, number) for count in found.values())
                    for found in counts
                    if found.total() >= number
                ),
                3,
            )
            for number in GENERATIONS
            if number <= size
        },
    }
    if most - least <= _SAME:
        text = f"every rollout got {most:g}"
        mend = "nothing is learned from this: take prompts that the model sometimes solves, or another reward."
        yield CheckFinding("one-reward", "error", "all prompts", text, mend)
    elif len(equal) > _MOST_EQUAL * len(of_prompts):
        text = (
            f"in {len(equal)} of {len(of_prompts)} groups of {size} all rewards are equal ({at['best']} at the best, "
            f"{at['least']} at the least), and train nothing"
        )
        hard = at["least"] > at["best"]
        mend = (
            f"take {'easier' if hard else 'harder'} prompts, {'reward parts of an answer, ' if hard else ''}raise "
            "num_generations, or set dynamic_sampling."
        )
        yield CheckFinding("no-variance", "warning", "groups", text, mend)


def _lengths(ended: Sequence[Rollout], numbers: dict[str, Any], sampling: dict[str, Any]) -> Iterator[CheckFinding]:
    lengths = sorted(rollout.usage.completion_tokens or 0 for rollout in ended)
    at = {
        name: lengths[min(len(lengths) - 1, int(share * len(lengths)))]
        for name, share in (("median", 0.5), ("p95", 0.95))
    }
    cut = numbers["truncated"]
    limit = sampling.get("max_completion_tokens") or sampling.get("max_tokens")
    whole = [rollout.usage.completion_tokens or 0 for rollout in ended if not rollout.is_truncated]
    # a quarter of room above the longest that ended by itself; twice the limit where many were cut
    wanted = 1.25 * max(whole, default=0)
    if cut > _MOST_CUT:
        wanted = max(wanted, 2 * (limit or lengths[-1]))
    suggested = max(_STEP, -(-int(wanted) // _STEP) * _STEP)
    numbers["completion_tokens"] = {**at, "most": lengths[-1]}
    numbers["suggested_max_completion_length"] = suggested
    if cut > _MOST_CUT:
        text = f"{cut:.0%} of the rollouts were cut off{f' at {limit} tokens' if limit else ''}"
        mend = f"allow about {suggested} tokens (-t, or max_completion_length in training), or ask for less."
        yield CheckFinding("cut-off", "warning", "answers", text, mend)


def _unread(env: Any, ended: Sequence[Rollout], numbers: dict[str, Any]) -> Iterator[CheckFinding]:
    unread = []
    # a call of a tool is an answer of its own
    said = [rollout for rollout in ended if not _calls_a_tool(rollout)]
    for rollout in said:
        try:
            if env.get_env_for_task(rollout.task).parser.parse_answer(rollout.completion) in (None, ""):
                unread.append(rollout)
        except Exception:
            unread.append(rollout)  # a parser of the user's own may refuse anything
    numbers["no_answer_read"] = _share(len(unread), len(said))
    if len(unread) > _MOST_UNREAD * len(said):
        rows = dict.fromkeys(rollout.key.example_id for rollout in unread)
        text = f"the parser reads no answer from {len(unread)} of {len(said)} completions"
        mend = "tell the format in the prompt, with an example, or train the format first."
        yield CheckFinding("no-answer-read", "warning", named_rows(rows), text, mend)


def _calls_a_tool(rollout: Rollout) -> bool:
    last = rollout.completion[-1] if isinstance(rollout.completion, list) and rollout.completion else {}
    return bool(last.get("tool_calls")) or last.get("role") == "tool"


def _format_alone(env: Any, ended: Sequence[Rollout], numbers: dict[str, Any]) -> Iterator[CheckFinding]:
    earned: Counter[str] = Counter()
    for one in ended:
        weights = weights_of(env.get_env_for_task(one.task))
        earned.update({name: weight * one.metrics.get(name, 0.0) for name, weight in weights.items()})
    total, of_format = sum(earned.values()), sum(value for name, value in earned.items() if "format" in name)
    if total <= 0 or not of_format:
        return
    numbers["reward_from_format"] = _share(of_format, total)
    if of_format > _MOST_FORMAT * total:
        text = f"{of_format / total:.0%} of all reward is for the format"
        mend = "give the format less weight, or the model will learn it and nothing else at first."
        yield CheckFinding("format-earns-most", "warning", "rubric", text, mend)


def _share(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole else 0.0
