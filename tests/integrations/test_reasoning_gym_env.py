"""ReasoningGymEnv: every task of reasoning-gym, its own scores, and answers that mean harm."""

from __future__ import annotations

import importlib.util
import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest

import verifiers as vf
from verifiers.errors import WorkerError
from verifiers.inference.endpoint import ClientBackend
from verifiers.integrations import reasoning_gym as adapter
from verifiers.rollouts.rollout import RolloutRequest
from verifiers.rollouts.run import Run
from verifiers.testing import FakeClient
from verifiers.types import Outcome, RolloutKey

has_reasoning_gym = importlib.util.find_spec("reasoning_gym") is not None


def every_task() -> list[str]:
    if not has_reasoning_gym:
        return []
    from reasoning_gym.factory import DATASETS

    return sorted(set(DATASETS) - {"composite"})


# reasoning-gym and the packages under it warn, and leave files to the garbage collector
their_warnings = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

pytestmark = [pytest.mark.skipif(not has_reasoning_gym, reason="needs the rg extra"), *their_warnings]

SAMPLE = ["countdown", "n_queens", "rearc", "rubiks_cube", "spell_backward"]
HIDDEN_ORACLES = {
    "graph_color": lambda metadata: json.dumps(metadata["possible_answer"]),
    "propositional_logic": lambda metadata: metadata["example_answer"],
    "rubiks_cube": lambda metadata: metadata["example_correct_answer"],
}


def env_of(task: Any, **settings: Any) -> vf.ReasoningGymEnv:
    # a crowded machine may take longer than the usual 10 s
    settings = {"scoring_timeout_s": 120.0, **settings}
    return vf.ReasoningGymEnv(task, **{"num_train_examples": 2, "num_eval_examples": 1, "seed": 4, **settings})


def own_scores(env: vf.ReasoningGymEnv, task: str) -> tuple[list[str | None], list[float]]:
    """Return some answers to the first training question, and reasoning-gym's scores of them in this process."""
    entry = entries(env)[0]
    oracle = entry["answer"]
    answers = [oracle, None, "no idea", str(oracle or "x")[: max(1, len(str(oracle or "x")) // 2)]]
    if task in HIDDEN_ORACLES:
        answers.append(HIDDEN_ORACLES[task](entry["metadata"]))
    dataset = adapter.reasoning_gym_worker.open_scorer(task, "{}")
    scores = []
    for answer in answers:
        try:
            scores.append(float(dataset.score_answer(answer, entry)))
        except ValueError:
            scores.append(0.0)
    return answers, scores


def entries(env: vf.ReasoningGymEnv) -> list[dict[str, Any]]:
    """Return the entries of the training rows."""
    from verifiers.integrations.reasoning_gym import draw_split

    train, _ = draw_split(
        env.gym_tasks, num_train=env.num_train_examples, num_eval=env.num_eval_examples, seed=env.seed
    )
    return [entry for _, entry in train]


def completion(answer: str | None) -> list[dict[str, Any]]:
    text = "I cannot say." if answer is None else f"So <answer>\n{answer}\n</answer>"
    return [{"role": "assistant", "content": text}]


async def scored(env: vf.ReasoningGymEnv, answers: list[str | None]) -> list[vf.State]:
    """Return the states of one group of rollouts of the first training row, scored together."""
    row = env.get_dataset()[0]
    states = [
        vf.State(prompt=row["prompt"], completion=completion(answer), answer=row["answer"], info=row["info"])
        for answer in answers
    ]
    await env.rubric.score_group(states)
    assert not [state["grading_errors"] for state in states if "grading_errors" in state]
    return states


async def check_scores(task: str) -> None:
    env = env_of(task)
    answers, expected = own_scores(env, task)
    states = await scored(env, answers)
    assert [state["reward"] for state in states] == pytest.approx(expected, abs=1e-12)
    if answers[0] is not None:
        assert states[0]["reward"] >= 0.99
    if task in HIDDEN_ORACLES:
        assert states[-1]["reward"] == 1.0


@pytest.mark.parametrize("task", SAMPLE)
async def test_answers_score_what_reasoning_gyms_own_score_is(task: str) -> None:
    await check_scores(task)


@pytest.mark.slow
@pytest.mark.parametrize("task", [task for task in every_task() if task not in SAMPLE])
async def test_answers_score_what_reasoning_gyms_own_score_is_for_every_other_task(task: str) -> None:
    await check_scores(task)


async def test_a_mix_scores_each_row_by_its_own_task_and_settings() -> None:
    env = env_of(["countdown", {"name": "spell_backward", "config": {"min_word_len": 4}}], num_train_examples=8)
    rows = env.get_dataset()
    assert {info["task"] for info in rows["info"]} == {"countdown", "spell_backward"}
    rewards = [
        (await env.rubric.score_rollout(row["prompt"], completion(row["answer"]), state=vf.State(), info=row["info"]))
        for row in rows
    ]
    assert [score.reward for score in rewards] == pytest.approx([1.0] * 8)


# -- how it scores --------------------------------------------------------------------------------------------


async def test_a_task_that_only_compares_text_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_pool() -> Any:
        raise AssertionError("a process was asked for")

    monkeypatch.setattr(adapter, "scoring_pool", no_pool)
    env = env_of(["spell_backward", "gcd"], num_train_examples=4)
    assert env.rubric.get_reward_func_names() == ["score", "exact_match"]
    (state,) = await scored(env, [env.get_dataset()[0]["answer"]])
    assert state["metrics"] == {"score": 1.0, "exact_match": 1.0}


async def test_an_answer_that_makes_the_scorer_raise_scores_nothing_and_is_counted() -> None:
    (state,) = await scored(env_of("prime_factorization"), ["not a number"])
    assert state["reward"] == 0.0
    assert (state["metrics"]["scorer_raised"], state["metrics"]["scoring_timeout"]) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("error", "scores_empty_answers", "reward"),
    [
        (WorkerError("died"), False, None),
        (vf.SandboxError("no namespaces"), False, None),
        # these two are the answer's doing
        (WorkerError("died"), True, 0.0),
        (vf.WorkerTimeoutError("late"), False, 0.0),
    ],
)
async def test_a_pool_that_cannot_work_is_a_failed_grade_and_never_a_zero(
    error: Exception, scores_empty_answers: bool, reward: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pool:
        async def call(self, *arguments: Any, timeout_s: float) -> Any:
            if scores_empty_answers and arguments[-1] == "":
                return {"score": 0.01, "raised": ""}
            raise error

    monkeypatch.setattr(adapter, "scoring_pool", Pool)
    env = env_of("countdown")
    runner = Run(env, ClientBackend(FakeClient("<answer>1</answer>")), "m", {})
    row = env.get_dataset()[0]
    (rollout,) = await runner.play([RolloutRequest(RolloutKey(0, 0, 0), row["prompt"], info=row["info"])])
    await runner.score([rollout])
    outcome = Outcome.GRADING_ERROR if reward is None else Outcome.COMPLETED
    assert (rollout.outcome, rollout.reward) == (outcome, reward)
    assert reward is None or rollout.metrics["scoring_timeout"] == 1.0


# -- answers that mean harm -------------------------------------------------------------------------------------

TOWER = "9**9**9**9"
LIMIT_S = 1.0


@pytest.mark.parametrize("task", ["countdown", pytest.param("simple_integration", marks=pytest.mark.slow)])
async def test_an_answer_that_computes_for_ever_costs_its_time_limit_and_scores_nothing(task: str) -> None:
    env = env_of(task, scoring_timeout_s=LIMIT_S)
    # the processes are up before the clock starts
    await scored(env, ["1"])
    started = time.perf_counter()
    (state,) = await scored(env, [TOWER])
    assert time.perf_counter() - started < 30
    assert state["reward"] == 0.0
    assert state["metrics"]["scoring_timeout"] == 1.0
    # the next one is not held up
    (after,) = await scored(env_of(task), ["1"])
    assert after["metrics"]["scoring_timeout"] == 0.0


def attacks(path: Path, port: int) -> list[str]:
    connect = f"__import__('socket').create_connection(('127.0.0.1', {port}))"
    return [
        f"open({str(path)!r}, 'w').write('x')",
        f"[open({str(path)!r}, 'w').write('x')]",
        f"__import__('os').system('touch {path}')",
        connect,
        f"[{connect}]",
        "[0] * (10 * 2**30 // 8)",
        "bytearray(10 * 2**30)",
        "[x for x in iter(int, 1)]",
        "__import__('time').sleep(60)",
        "__import__('os')._exit(0)",
        "(" * 5000,
        "9" * 20000,
    ]


@pytest.mark.parametrize(
    "task",
    [
        "countdown",
        "n_queens",
        *(pytest.param(task, marks=pytest.mark.slow) for task in ("binary_matrix", "intermediate_integration")),
    ],
)
async def test_a_malicious_answer_does_nothing(task: str, tmp_path: Path) -> None:
    path = tmp_path / "written"
    env = env_of(task, scoring_timeout_s=LIMIT_S)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        answers: list[str | None] = list(attacks(path, server.getsockname()[1]))
        states = await scored(env, answers)
        with pytest.raises(BlockingIOError):
            server.accept()
    # reasoning-gym gives countdown 0.01 for anything, and 0.05 for a number
    assert max(state["reward"] for state in states) <= 0.05
    assert not path.exists()
    assert all(state["metrics"]["exact_match"] == 0.0 for state in states)


# -- arguments --------------------------------------------------------------------------------------------------


def test_the_classic_arguments_are_taken() -> None:
    env = vf.ReasoningGymEnv("gcd", 5, 3, "Be brief.", vf.Parser(), 7)
    assert (len(env.get_dataset()), len(env.get_eval_dataset()), env.seed) == (5, 3, 7)
    assert env.get_dataset()[0]["prompt"][0] == {"role": "system", "content": "Be brief."}
    env = vf.ReasoningGymEnv(gym=["gcd", "lcm"], num_samples=6, num_eval_samples=4)
    assert (len(env.get_dataset()), len(env.get_eval_dataset())) == (6, 4)
    assert isinstance(env.parser, vf.XMLParser)
    assert "<answer>" in env.get_dataset()[0]["prompt"][0]["content"]


def test_no_training_rows_or_no_evaluation_rows_are_possible() -> None:
    assert len(vf.ReasoningGymEnv("gcd", 0, 3).get_eval_dataset()) == 3
    with pytest.raises(vf.ConfigError, match="has no training dataset"):
        vf.ReasoningGymEnv("gcd", 0, 3).get_dataset()


def test_an_unknown_reward_is_named() -> None:
    with pytest.raises(vf.ConfigError, match="reward='both' is unknown"):
        env_of("gcd", reward="both")
