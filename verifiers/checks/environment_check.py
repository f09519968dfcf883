"""Is an environment right? Its rows, its rewards and, where there is a model, what that earns, in one report."""

from __future__ import annotations

from typing import Any

from verifiers.checks.check_report import CheckFinding, CheckReport, Severity
from verifiers.checks.policy import check_policy
from verifiers.checks.rewards import check_rewards
from verifiers.checks.rows import CountTokens, check_rows
from verifiers.envs.lifecycle import run_teardown
from verifiers.errors import ConfigError
from verifiers.evals.evaluation_run import iter_requests
from verifiers.loop_thread import run_blocking
from verifiers.rollouts.run import Run, refuse_unsupplied
from verifiers.rubrics.judge_rubric import JudgeRubric
from verifiers.testing.fake_model import rubrics_of


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
    report.add("rows", *check_rows(env, count_tokens, max_model_len))
    is_empty = getattr(env.rubric, "is_empty", False)
    try:
        if is_empty:
            raise ConfigError("the rubric has no reward function, so every reward is 0.0.")
        refuse_unsupplied(env)
    except ConfigError as error:
        judged = not is_empty and any(isinstance(rubric, JudgeRubric) for rubric in rubrics_of(env))
        kind = "judge-not-asked" if judged else "rewards-not-possible"
        severity: Severity = "note" if judged else "error"
        report.add("rewards", [CheckFinding(kind, severity, "rubric", str(error), "mend that first.")], {})
        return report
    found, numbers = await check_rewards(env, rows)
    if not numbers.get("tells_right", True):
        # copying what is not asked for earns nothing
        report.findings = [one for one in report.findings if one.kind != "answer-in-prompt"]
    report.add("rewards", found, numbers)
    if run is not None:
        requests = iter_requests(env.rows_to_evaluate(prompts), rollouts_per_example, None)
        report.add("policy", *await check_policy(env, run, list(requests)))
    return report


def check(env: Any, **options: Any) -> CheckReport:
    """Check an environment's rows and rewards, and wait for the report; `options` are `check_environment`'s."""

    async def checked() -> CheckReport:
        try:
            return await check_environment(env, **options)
        finally:
            await run_teardown(env)

    return run_blocking(checked)
