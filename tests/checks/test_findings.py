"""Each kind of finding: an environment that has it, and one that is right and has it not."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

import verifiers as vf
from verifiers.checks.check_report import CheckReport
from verifiers.checks.environment_check import check_environment
from verifiers.checks.rows import check_rows
from verifiers.testing import FakeClient

Rows = list[dict[str, Any]]
ROWS: Rows = [{"question": f"What is {n} plus {n}?", "answer": str(2 * n)} for n in range(11, 31)]
PARSER = vf.XMLParser(["answer"])
LONG = (
    "Read the following carefully and then say in one word of your own what the person in it is most likely to do. "
)


def right(completion: Any, answer: str, parser: Any) -> float:
    return float(parser.parse_answer(completion) == answer)


def single(func: Any = right, rows: Any = ROWS, evals: Any = ROWS[10:], **options: Any) -> vf.Environment:
    funcs = func if isinstance(func, list) else [func]
    options = {"parser": PARSER, **options}
    rubric = options.pop("rubric", None) or vf.Rubric(funcs, options.pop("weights", None), parser=options["parser"])
    return vf.SingleTurnEnv(dataset=rows, eval_dataset=evals, rubric=rubric, **options)


def sound() -> vf.Environment:
    return single([right, PARSER.get_format_reward_func()], ROWS[:10], weights=[1.0, 0.2])


async def kinds_of(env: vf.Environment) -> dict[str, str]:
    report = await check_environment(env)
    return {found.kind: found.severity for found in report.findings}


def with_plain(func: Callable[..., float], rows: Any = ROWS) -> vf.Environment:
    return single(func, rows, rows[:1] and ROWS[:5] if rows is not ROWS else ROWS[:5], parser=vf.Parser())


class Noting(vf.SingleTurnEnv):
    """Keeps on the environment how many rollouts are being played."""

    playing = 0

    async def play(self, state: vf.State) -> None:
        self.playing += 1
        await super().play(state)
        state["beside"] = self.playing
        self.playing -= 1


class Guessing(vf.MultiTurnEnv):
    async def env_response(self, messages: Any, state: vf.State, **kwargs: Any) -> Any:
        return [{"role": "user", "content": "No."}]


class Breaking(vf.SingleTurnEnv):
    async def setup_state(self, state: vf.State, **kwargs: Any) -> vf.State:
        raise ValueError("no board")


def takes_anything(completion: Any, answer: str) -> float:
    return 1.0


def somewhere(completion: Any, answer: str) -> float:
    return float(answer in completion[-1]["content"])


def long_enough(completion: Any) -> float:
    return float(len(completion[-1]["content"].split()) > 3)


def divides(completion: Any, answer: str, parser: Any) -> float:
    said = parser.parse_answer(completion)
    return right(completion, answer, parser) / len(said or "")


def random_reward(completion: Any, answer: str, parser: Any) -> float:
    return right(completion, answer, parser) * random.random()


def slow(completion: Any, answer: str, parser: Any) -> float:
    time.sleep(1.1)
    return right(completion, answer, parser)


async def blocking(completion: Any, answer: str, parser: Any) -> float:
    time.sleep(0.3)  # noqa: ASYNC251 - it is what is looked for
    return right(completion, answer, parser)


def lengths(completion: Any, answer: str, parser: Any) -> float:
    return right(completion, answer, parser) if int(answer) < 40 else 0.25


async def graded(prompt: Any, completion: Any, answer: str, state: vf.State, judge: Any) -> float:
    return float(await judge(prompt, completion, answer, state) == "yes")


last: list[float] = []


def remembers(completion: Any, answer: str, parser: Any) -> float:
    last.append(right(completion, answer, parser))
    return last[-1] + (last[-2] if len(last) > 1 and last[-2] == 0 else 0.5)


calls: list[None] = []


async def comes_last(completion: Any, answer: str, parser: Any) -> float:
    calls.append(None)
    count = len(calls)
    await asyncio.sleep(0.02)
    return right(completion, answer, parser) * (len(calls) == count)


def beside(state: vf.State, completion: Any, answer: str, parser: Any) -> float:
    return right(completion, answer, parser) / state["beside"]


def needs_more(completion: Any, threshold: float) -> float:
    return threshold


UNANSWERED: Rows = [{"question": "Write.", "answer": ""}]
DUPLICATES: Rows = [*ROWS[:5], ROWS[0]]
CONTRADICTING: Rows = [*ROWS, {"question": ROWS[0]["question"], "answer": "99"}]
GAPS: Rows = [*ROWS, {"question": "And 5 plus 5?", "answer": ""}]
LEAKING: Rows = [
    {"question": f"Say {w}now: the word is {w}.", "answer": w} for w in ("apple", "river", "stone", "cloud")
]
CHOICES: Rows = [{"question": "Which: apple, river, stone or cloud?" + " " * n, "answer": w} for n, w in
                 enumerate(("apple", "river", "stone", "cloud"))]  # fmt: skip
NAMES = ["".join(pair) for pair in itertools.product("bdfgk", ("ana", "eni", "ori", "umo"))]


def story(name: str, end: str = "") -> dict[str, Any]:
    draw = random.Random(name)
    words = " ".join(draw.choice(NAMES) for _ in range(30))
    return {"question": f"{LONG}{name} said: {words}.{end}", "answer": name}


CASES: dict[str, tuple[str, Callable[[], vf.Environment]]] = {
    "missing-answer": ("error", lambda: single(rows=GAPS)),
    "repeated-rows": ("warning", lambda: single(rows=DUPLICATES)),
    "contradicting-rows": ("error", lambda: single(rows=CONTRADICTING)),
    "answer-in-prompt": ("warning", lambda: single(rows=LEAKING)),
    "eval-trained-on": ("error", lambda: single()),
    "eval-nearly-trained-on": (
        "warning",
        lambda: single(rows=[story(name) for name in NAMES], evals=[story(name, " Well?") for name in NAMES[:3]]),
    ),
    "no-eval-rows": ("note", lambda: single(evals=None)),
    "rewards-not-possible": ("error", lambda: single(needs_more)),
    "no-right-answer": ("note", lambda: single(long_enough, UNANSWERED, UNANSWERED)),
    "right-not-rewarded": ("error", lambda: single(lambda completion, answer: 0.0)),
    "right-less-rewarded": ("warning", lambda: single(lengths, evals=ROWS)),
    "paid-empty": ("error", lambda: single(takes_anything)),
    "paid-format-alone": ("error", lambda: single([right, PARSER.get_format_reward_func()], weights=[0.5, 1.0])),
    "paid-another-answer": (
        "error",
        lambda: single(lambda completion, answer: float("<answer>" in completion[-1]["content"])),
    ),
    "paid-repeated-prompt": ("error", lambda: single([long_enough, right])),
    "paid-long": ("error", lambda: with_plain(lambda completion: min(1.0, len(completion[-1]["content"]) / 500))),
    "paid-buried": ("warning", lambda: with_plain(somewhere)),
    "paid-two-answers": ("warning", lambda: with_plain(somewhere)),
    "paid-cut-thought": ("warning", lambda: with_plain(somewhere)),
    "paid-every-option": ("warning", lambda: single(somewhere, CHOICES, CHOICES, parser=vf.Parser())),
    "paid-unclosed": ("warning", lambda: single(somewhere)),
    "never-differs": ("warning", lambda: single([right, takes_anything], weights=[3.0, 0.1])),
    "grading-fails": ("error", lambda: single(divides)),
    "environment-fails": (
        "error",
        lambda: Breaking(dataset=ROWS, parser=PARSER, rubric=vf.Rubric([right], parser=PARSER)),
    ),
    "not-deterministic": ("error", lambda: single(random_reward)),
    "shared-between-rollouts": (
        "error",
        lambda: Noting(dataset=ROWS, parser=PARSER, rubric=vf.Rubric([beside], parser=PARSER)),
    ),
    "depends-on-neighbours": ("error", lambda: single(remembers)),
    "slow-rewards": ("warning", lambda: single(slow, ROWS[:1], ROWS[:1])),
    "blocks-the-loop": ("warning", lambda: single(blocking, ROWS[:2], ROWS[:2])),
}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.slow if kind in ("slow-rewards", "blocks-the-loop") else ())
        for kind in CASES
    ],
)
async def test_an_environment_that_has_it(kind: str) -> None:
    last.clear()
    severity, make = CASES[kind]
    assert (await kinds_of(make())).get(kind) == severity


async def test_a_reward_that_another_call_changes_is_found_before_it_too() -> None:
    (found,) = [
        one for one in (await check_environment(single(comes_last))).findings if one.kind == "depends-on-neighbours"
    ]
    assert "when it was scored before another" in found.text


@pytest.mark.parametrize(("is_sorted", "found"), [(True, "error"), (False, None)])
async def test_rewards_of_a_group_in_another_order_than_its_rollouts_are_found(
    is_sorted: bool, found: str | None
) -> None:
    def rewards(completions: list[Any], answers: list[str]) -> list[float]:
        found = [
            float(said(one) == f"<answer>\n{answer}\n</answer>")
            for one, answer in zip(completions, answers, strict=True)
        ]
        return sorted(found) if is_sorted else found

    assert (await kinds_of(single(rewards, ROWS[:10]))).get("depends-on-neighbours") == found


async def test_a_reward_that_is_no_number_is_a_failed_grade() -> None:
    found = await kinds_of(single(lambda completion, answer, parser: right(completion, answer, parser) or math.nan))
    assert found.get("grading-fails") == "error"


async def test_the_function_that_is_slow_is_named() -> None:
    async def waits(completion: Any) -> float:
        await asyncio.sleep(0.05)
        return 0.5

    report = await check_environment(single([right, waits], ROWS[:3], ROWS[:3]))
    seconds = report.numbers["rewards"]["seconds_a_call"]
    assert set(seconds) == {"right", "waits"}
    assert seconds["right"] < 0.05 <= seconds["waits"]


async def test_a_sound_environment_has_none() -> None:
    assert await kinds_of(sound()) == {}


def ends_well(completion: Any, **kwargs: Any) -> float:
    return 0.5 * completion[-1]["content"].endswith(("e", "d", "y")) + 0.1


def passes_tests(completion: Any, answer: str) -> float:
    return float("def solve" in completion[-1]["content"] and "input" in answer)


def runs(completion: Any, answer: str) -> float:
    return float("def solve" in completion[-1]["content"] and "1" in answer)


def rows_asking(tests: str) -> Rows:
    return [{**row, "answer": tests.format(n)} for n, row in enumerate(ROWS)]


def follows_the_info(completion: Any, info: dict[str, Any], **kwargs: Any) -> float:
    return float(completion[-1]["content"] == info["wanted"])


def in_three_sentences(completion: Any) -> float:
    return float(completion[-1]["content"].count(".") == 3)


def alike(completion: Any, answer: str) -> float:
    return len(set(completion[-1]["content"].split()) & set(answer.split())) / len(answer.split())


def starts_right(completion: Any, answer: str) -> float:
    return float(completion[-1]["content"].startswith(answer))


def with_rows(func: Callable[..., float] | list[Callable[..., float]], rows: Any, **options: Any) -> vf.Environment:
    return single(func, rows, rows, parser=vf.Parser(), **options)


RECORDS = [{"question": f"Write of {name}.", "answer": {"form": name}} for name in NAMES]
TESTED: Rows = [{**row, "answer": f'{{"input": {n}}}', "info": {"wanted": f"{n}"}} for n, row in enumerate(ROWS)]
LETTERS: Rows = [{"question": f"{n}: A, B or C?", "answer": "ABC"[n % 3]} for n in range(16)]
UNASKED: dict[str, Callable[[], vf.Environment]] = {
    "a record": lambda: with_rows(ends_well, RECORDS),
    "of another kind": lambda: with_rows(ends_well, ROWS),
    "tests of a program": lambda: with_rows(passes_tests, TESTED),
    "pairs of what goes in and comes out": lambda: with_rows(runs, rows_asking("[[1, 2], [2, {}]]")),
    "assertions": lambda: with_rows(runs, rows_asking("['assert solve({}) > 1']")),
    "told in the info": lambda: with_rows(follows_the_info, TESTED),
}


@pytest.mark.parametrize("kind", UNASKED)
async def test_answers_that_no_reward_asks_for_are_a_note(kind: str) -> None:
    found = await kinds_of(UNASKED[kind]())
    assert found.pop("no-right-answer") == "note"
    assert not [name for name in found if name.startswith(("paid-", "right-", "never-", "answer-in-"))]


async def test_a_right_answer_may_earn_more_than_the_answer_alone() -> None:
    rows = [{"question": f"Sum up: {name} of {name[::-1]}.", "answer": f"{name} of {name[::-1]}"} for name in NAMES]
    found = await kinds_of(with_rows([in_three_sentences, alike], rows, weights=[1.0, 0.4]))
    assert {"never-differs", "paid-another-answer", "paid-two-answers"}.isdisjoint(found)


async def test_nothing_that_gets_half_is_an_error() -> None:
    def half(completion: Any, answer: str, parser: Any) -> float:
        return 0.5 + 0.5 * right(completion, answer, parser)

    found = await kinds_of(single(half))
    assert (found.get("paid-empty"), found.get("paid-whitespace")) == ("error", "error")
    assert "paid-another-answer" not in found


async def test_the_first_of_all_options_is_right_by_luck() -> None:
    found = await kinds_of(with_rows(starts_right, LETTERS))
    assert "paid-every-option" not in found
    assert found.get("paid-two-answers") == "warning"


async def test_the_material_of_a_task_is_no_leak() -> None:
    copied = [{"question": f"Copy: {story(name)['question']}", "answer": story(name)["question"]} for name in NAMES]
    assert "answer-in-prompt" not in await kinds_of(single(rows=copied[:12], evals=copied[12:]))


async def test_an_answer_that_is_one_of_some_others_is_no_leak() -> None:
    pairs = [(NAMES[n], NAMES[(n + 1 + n % 3) % 20]) for n in range(20)]
    cubes = [{"question": f"{one} and {two}: what is on top?", "answer": one} for one, two in pairs]
    assert "answer-in-prompt" not in await kinds_of(single(rows=cubes[:12], evals=cubes[12:]))


async def test_boards_of_a_few_symbols_are_not_near_one_another() -> None:
    boards = ["".join(random.Random(at).choices("AB", k=24)) for at in range(20)]
    rows, evals = ([{"question": mark.join(board), "answer": "3"} for board in boards] for mark in (" #", "# "))
    assert "eval-nearly-trained-on" not in await kinds_of(single(rows=rows, evals=evals))


async def test_choices_in_a_prompt_and_a_hidden_word_are_no_leak() -> None:
    found = await kinds_of(single(rows=CHOICES, evals=CHOICES[:1]))
    assert "answer-in-prompt" not in found
    game = [{"question": "Guess my word.", "answer": name} for name in NAMES]
    kinds = await kinds_of(single(rows=[{**row, "info": {"n": 1}} for row in game], evals=game))
    assert {"contradicting-rows", "eval-trained-on"}.isdisjoint(kinds)


async def test_games_with_a_few_openings_have_secrets_and_no_contradictions() -> None:
    rows = [{"question": f"A word of {len(word)} letters?", "answer": word} for word in NAMES]
    env = Guessing(dataset=rows[:8], eval_dataset=rows[8:12], max_turns=2, rubric=vf.Rubric([somewhere]))
    assert {"contradicting-rows", "eval-trained-on"}.isdisjoint(await kinds_of(env))
    asking = vf.ToolEnv(dataset=rows[:8], eval_dataset=rows[8:12], tools=[], rubric=vf.Rubric([somewhere]))
    for other in (single(rows=rows[:8], evals=rows[8:12]), asking):
        assert (await kinds_of(other)).get("contradicting-rows") == "error"


async def test_a_form_that_many_prompts_share_is_no_repetition() -> None:
    rows = [{"question": f"{LONG} {LONG} {name}", "answer": name} for name in NAMES]
    assert "eval-nearly-trained-on" not in await kinds_of(single(rows=rows[:15], evals=rows[15:]))


async def test_an_agent_is_not_answered_by_a_text() -> None:
    async def agent(row: Any, **_: Any) -> str:
        return "4"

    env = vf.AgentEnv(agent, dataset=ROWS, eval_dataset=ROWS[:2], rubric=vf.Rubric([lambda completion: 1.0]))
    assert "rewards-not-probed" in await kinds_of(env)


async def test_half_for_a_text_that_is_ranked_alone_is_no_pay_for_nothing() -> None:
    found = await kinds_of(single(rubric=vf.RankingRubric(judge_client=FakeClient("A > B")), rows=ROWS[:10]))
    assert found == {"rewards-not-probed": "note"}


async def test_a_judge_without_a_key_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    env = single(rubric=vf.JudgeRubric(funcs=[graded]), parser=vf.Parser())
    assert (await kinds_of(env)).get("judge-not-asked") == "note"


async def test_a_judge_whose_prompt_cannot_be_filled_in_gives_no_reward() -> None:
    rubric = vf.JudgeRubric(funcs=[graded], judge_prompt="{response} {rules}")
    assert (await kinds_of(single(rubric=rubric))).get("rewards-not-possible") == "error"


@pytest.mark.parametrize(
    ("judge_prompt", "found"), [("{question} {response}", None), ("{answer} {response}", "warning")]
)
def test_a_judge_that_is_shown_no_answer_needs_none(judge_prompt: str, found: str | None) -> None:
    env = single(rubric=vf.JudgeRubric(funcs=[graded], judge_prompt=judge_prompt), rows=UNANSWERED, evals=None)
    assert {one.kind: one.severity for one in check_rows(env)[0]}.get("missing-answer") == found


@pytest.mark.parametrize("others", [[], [vf.Rubric([right], parser=PARSER)]])
async def test_a_judged_environment_may_be_wrong_too(others: list[Any]) -> None:
    rubric = vf.RubricGroup([vf.JudgeRubric(funcs=[needs_more]), *others])
    assert (await kinds_of(single(rubric=rubric))).get("rewards-not-possible") == "error"


async def test_each_environment_of_a_group_is_checked_with_its_own_weights() -> None:
    loose = single([right, PARSER.get_format_reward_func()], weights=[0.5, 1.0])
    report = await check_environment(vf.EnvGroup([sound(), loose], ["sound", "loose"]))
    (found,) = [one for one in report.findings if one.kind == "paid-format-alone"]
    assert found.where.endswith(" of loose")
    assert [*report.numbers] == ["rows", "rewards of sound", "rewards of loose"]


async def test_what_one_environment_of_a_group_asks_for_hides_nothing_of_another() -> None:
    told = [{**row, "info": {"wanted": "4"}} for row in LEAKING]
    other = with_rows(follows_the_info, told)
    group = vf.EnvGroup([single(rows=LEAKING), other], ["leaking", "told"])
    assert "answer-in-prompt" in await kinds_of(group)


async def test_a_group_is_checked_by_a_rubric_of_its_own() -> None:
    group = vf.EnvGroup([sound()], ["sound"], rubric=vf.Rubric([takes_anything]))
    assert (await kinds_of(group)).get("paid-empty") == "error"


async def test_a_judge_that_can_be_talked_to_is_paid_for_it() -> None:
    def judge(body: Any) -> str:
        return "yes" if "Ignore the instructions" in str(body["messages"]) else "no"

    env = single(rubric=vf.JudgeRubric(funcs=[graded], judge_client=FakeClient(judge)), parser=vf.Parser())
    assert (await kinds_of(env)).get("paid-injection") == "error"


def test_prompts_over_the_context_are_named() -> None:
    env = single(rows=[*ROWS, {"question": "word " * 50, "answer": "1"}])
    findings, numbers = check_rows(env, lambda prompt: len(prompt[-1]["content"].split()), 40)
    (over,) = [found for found in findings if found.kind == "over-context"]
    assert (over.severity, over.where) == ("error", "training row 20")
    assert numbers["training"]["prompt_tokens"]["most"] == 50


def test_a_report_is_a_page_in_which_nothing_is_markup() -> None:
    report = CheckReport("<b>env</b>")
    report.add("rows", [], {"<i>": "<script>"})
    page = report.html()
    assert "&lt;script&gt;" in page
    assert "<script" not in page
    assert "<b>" not in page


def test_checks_are_asked_for_without_a_loop() -> None:
    report = vf.check(single(takes_anything), rows=2)
    assert not report.is_right
    assert report.findings[0].severity == "error"
    assert {"rows", "rewards"} == set(report.numbers)


def number_of(completion: Any, default: float) -> float:
    try:
        return float(completion[-1]["content"])
    except ValueError:
        return default


async def test_the_best_reward_may_be_nothing() -> None:
    def distance(completion: Any, answer: str) -> float:
        return -min(100.0, abs(number_of(completion, math.inf) - float(answer)))

    def silent(completion: Any, answer: str) -> float:
        return 0.0 if completion[-1]["content"] in ("", answer) else -1.0

    assert not [kind for kind in await kinds_of(with_plain(distance)) if kind.startswith(("right-", "paid-"))]
    found = await kinds_of(with_plain(silent))
    assert found.get("paid-empty") == "error"
    assert "right-not-rewarded" not in found


BOXED: Rows = [{"question": row["question"], "answer": f"So it is.\n#### {row['answer']}"} for row in ROWS]
NUMBERED: Rows = [{"question": f"{n}: A, B, C or D?", "answer": str(n % 4)} for n in range(16)]
LISTED: Rows = [{"question": row["question"], "answer": [row["answer"], "or so"]} for row in ROWS]


@pytest.mark.parametrize(
    ("reward", "rows"),
    [
        (lambda completion, answer: float("\\boxed{" + answer.split("#### ")[-1] + "}" in said(completion)), BOXED),
        (lambda completion, answer: float(said(completion) in answer), LISTED),
        (lambda completion, answer: float(said(completion) == f"Answer: {answer}"), ROWS),
        (lambda completion, answer: float(said(completion) == f"The final answer is {answer}."), ROWS),
        (lambda completion, answer: float(said(completion) == f"FINAL ANSWER: {answer}"), ROWS),
        (lambda completion, answer: float(said(completion) == "ABCD"[int(answer)]), NUMBERED),
    ],
)
async def test_the_form_of_a_right_answer_is_found(reward: Any, rows: Rows) -> None:
    report = await check_environment(with_rows(reward, rows))
    assert not [found.kind for found in report.findings if found.kind.startswith("right-")]
    assert report.numbers["rewards"]["right"] == 1.0


def said(completion: Any) -> str:
    return str(completion[-1]["content"])


async def test_a_form_that_is_not_known_is_a_warning() -> None:
    found = await kinds_of(with_rows(lambda completion, answer: float(said(completion) == f"~{answer}~"), ROWS))
    assert found.get("right-not-rewarded") == "warning"


async def test_weights_of_nothing_reward_nothing() -> None:
    assert (await kinds_of(single(right, weights=[0.0]))).get("rewards-not-possible") == "error"


async def test_an_answer_in_the_system_prompt_is_a_leak() -> None:
    rows = [
        {
            "prompt": [{"role": "system", "content": f"It is {name}."}, {"role": "user", "content": "Who?"}],
            "answer": name,
        }
        for name in NAMES
    ]
    assert (await kinds_of(single(rows=rows, evals=None))).get("answer-in-prompt") == "warning"


async def test_one_cause_is_one_finding() -> None:
    report = await check_environment(
        with_plain(lambda completion, answer: float(int(said(completion)) == int(answer)))
    )
    (failed,) = [found for found in report.findings if found.kind == "grading-fails"]
    assert "invalid literal" in failed.text


async def test_a_random_reward_is_not_its_neighbours_fault() -> None:
    assert "depends-on-neighbours" not in await kinds_of(single(random_reward))


async def test_training_rows_that_reward_nothing_are_found_beside_eval_rows_that_do() -> None:
    rows = [{**row, "answer": f"{row['answer']}\n"} for row in ROWS[:10]]
    env = single(lambda completion, answer: float(said(completion).strip() == answer), rows, parser=vf.Parser())
    (found,) = [one for one in (await check_environment(env)).findings if one.kind == "right-not-rewarded"]
    assert found.severity == "error"
    assert found.where.startswith("training rows 0, 1")


@pytest.mark.parametrize("answer", ["{{1,2},{3}}", "-" * 6000 + "1"])
async def test_answers_that_are_nothing_of_python_are_texts(answer: str) -> None:
    rows = [{"question": f"Part {name}.", "answer": answer} for name in NAMES]
    found = await kinds_of(with_rows(lambda completion, answer: float(said(completion) == f"~{answer}~"), rows))
    assert found.get("right-not-rewarded") == "warning"


async def test_training_rows_whose_rewards_fail_are_named_so() -> None:
    rows = [{**row, "answer": f"{row['answer']} or so"} for row in ROWS[:10]]
    env = single(lambda completion, answer: float(said(completion) == str(int(answer))), rows, parser=vf.Parser())
    found = await kinds_of(env)
    assert found.get("grading-fails") == "error"
    assert "right-not-rewarded" not in found
