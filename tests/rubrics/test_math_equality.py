"""Comparing mathematical answers: right ones are right from anywhere, nasty ones cost their time limit at most."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from typing import Any

import pytest

from verifiers.errors import ConfigError, GradingError, WorkerCallError, WorkerError, WorkerTimeoutError
from verifiers.rubrics.math_equality import MathVerdict, answer_text, exact_match, math_verdict

RIGHT, WRONG = MathVerdict.RIGHT, MathVerdict.WRONG


@pytest.mark.parametrize(
    ("answer", "response", "verdict"),
    [
        ("42", "42", RIGHT),
        ("42", " 042 ", RIGHT),
        ("1,234,567", "1234567", RIGHT),
        ("-3", "- 3", None),
        ("0.5", ".50", RIGHT),
        ("0.5", "1/2", RIGHT),
        ("-1/2", "\\frac{-1}{2}", None),
        ("-0.5", "-\\dfrac{1}{2}", RIGHT),
        ("3", "$3$", RIGHT),
        ("(1, 2)", "\\left( 1,2 \\right)", RIGHT),
        ("x \\leftarrow y", "x \\leftarrow  y", RIGHT),
        ("42", "43", WRONG),
        ("42", "", WRONG),
        ("", "", WRONG),
        ("1/3", "0.333333", None),
        ("1/0", "2/0", None),
        ("$1$ or $2$", "1$ or $2", None),
        ("x", "y", None),
        ("1", "1" * 1001, MathVerdict.TOO_LONG),
        ("x" * 2000, "x" * 2000, RIGHT),
        ("1,100", "1100", RIGHT),
        ("1, 100", "1100", None),
        ("10000", "10\\,000", RIGHT),
        ("10000", "10{,}000", RIGHT),
        ("1000", "1 000", RIGHT),
        ("12", "1 2", None),
        ("2", "2.", RIGHT),
        ("2", "2;", RIGHT),
        ("2", "**2**", RIGHT),
        ("2", "**$2$**", RIGHT),
        ("2", "`2`", RIGHT),
        ("2", "**3**", WRONG),
    ],
)
def test_what_needs_no_algebra_is_decided_by_the_text(
    answer: str, response: str, verdict: MathVerdict | None
) -> None:
    assert exact_match(answer_text(answer), answer_text(response)) is verdict


@pytest.mark.parametrize(
    ("answer", "text"),
    [(42, "42"), (0.5, "0.5"), (1e-7, "0.0000001"), (1e22, "10000000000000000000000"), (None, ""), (" x ", "x")],
)
def test_answers_that_are_no_texts_are_written_out(answer: Any, text: str) -> None:
    assert answer_text(answer) == text


PAIRS = [
    ("\\frac{1}{2}", "50\\%", True),
    ("1/3", "0.3333333", True),
    ("1/3", "0.33", False),
    ("\\sqrt{8}", "2\\sqrt{2}", True),
    ("\\sqrt{8}", "2\\sqrt{3}", False),
    ("(0, 1]", "[0,1]", False),
    ("(-\\infty, 2) \\cup (3, \\infty)", "(-\\infty,2)\\cup(3,\\infty)", True),
    ("\\{1, 2, 3\\}", "\\{3, 2, 1\\}", True),
    ("(1, 2)", "(2, 1)", False),
    ("50\\%", "50", True),
    ("12\\text{ cm}", "12", True),
    ("x^2 + 2x + 1", "(x+1)^2", True),
    ("x^2 + 2x + 1", "(x+2)^2", False),
    ("2\\pi", "\\pi \\cdot 2", True),
    ("2\\pi", "6.28", False),
    ("\\log_2 8", "3", True),
    ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}", True),
    ("7", "I do not know", False),
    ("7", "\\boxed{", False),
    ("7", "\x00\ud800", False),
    # lists of numbers are no numbers
    ("100, 200", "200, 100", True),
    ("1, 100", "1100", False),
    ("0, 500", "500", False),
    ("32349", "32, 349", False),
    # small numbers
    ("1.6 \\times 10^{-19}", "9.1 \\times 10^{-31}", False),
    ("1.6 \\times 10^{-19}", "1.60 \\times 10^{-19}", True),
    ("0.0000004, 1", "0.0000003, 1", False),
    ("\\frac{1}{52!}", "\\frac{1}{51!}", False),
    ("x = 0.0000004", "0.0000003", False),
    ("[0, 0.0000001)", "[0, 0.0000002)", False),
    # as models write
    ("90", "90°", True),
    ("45", "45\\degree", True),
    ("1200", "€1,200", True),
    ("18", "18.50 £", False),
    ("18.5", "18.50 £", True),
    ("\\sqrt{2}", "√2", True),
    ("\\sqrt{x+1}", "√(x+1)", True),
    ("10000, 200", "10\\,000, 200", True),
    ("1000, 200", "1 000, 200", True),
    ("-250", "-2.5e2", True),
    ("3.5", "3 1/2", True),
    ("3, 1/2", "3 1/2", False),
    ("7/2", "3½", True),
    ("(x+1)^2", "(x+1)**2", True),
    ("e^2", "e2", False),
]


async def test_right_answers_are_right_and_wrong_ones_wrong() -> None:
    verdicts = await asyncio.gather(*[math_verdict(answer, response, timeout_s=60) for answer, response, _ in PAIRS])
    assert [(*pair[:2], verdict is RIGHT) for pair, verdict in zip(PAIRS, verdicts, strict=True)] == PAIRS
    assert set(verdicts) == {RIGHT, WRONG}


async def test_nasty_answers_cost_their_time_limit_and_hold_up_nobody() -> None:
    await math_verdict("\\sqrt{2}", "x")
    nasty = asyncio.create_task(math_verdict("\\sqrt{2}", "10^{10^{10}}", timeout_s=50))
    await asyncio.sleep(0)
    assert await math_verdict("\\sqrt{12}", "2\\sqrt{3}", timeout_s=30) is RIGHT
    assert not nasty.done()
    nasty.cancel()
    assert await math_verdict("\\sqrt{2}", "10^{10^{10}}", timeout_s=0.5) is MathVerdict.TIMED_OUT


@pytest.mark.slow
@pytest.mark.parametrize(
    "nasty",
    [
        "9!!!!!!",
        "(" * 400 + "1" + ")" * 400,
        "\\sqrt{" * 100 + "2" + "}" * 100,
        "\\binom{10000000}{5000000}",
        "\\sum_{n=1}^{10000000} n",
        "1" * 1_000_000,
    ],
    ids=lambda text: text[:20],
)
async def test_nothing_nasty_is_right_or_takes_longer_than_its_limit(nasty: str) -> None:
    started = time.perf_counter()
    assert await math_verdict("\\sqrt{2} + 1", nasty, timeout_s=2) is not RIGHT
    assert time.perf_counter() - started < 30
    assert await math_verdict("\\sqrt{12}", "2\\sqrt{3}") is RIGHT


class ScriptedPool:
    """A worker pool that answers from a list; an exception is raised."""

    def __init__(self, answers: list[Any]) -> None:
        self.answers = answers

    async def call(self, function: str, *args: str, timeout_s: float, begun: object = None) -> Any:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.parametrize(
    ("answers", "end"),
    [
        # once it may be the machine's fault
        ([WorkerError("died"), True], RIGHT),
        ([WorkerTimeoutError("late")], MathVerdict.TIMED_OUT),
        ([WorkerError("died"), WorkerError("died"), True], MathVerdict.DIED),
        ([WorkerCallError("no memory", kind="MemoryError")], MathVerdict.DIED),
        ([WorkerError("no fork")] * 3, GradingError),
        ([ConfigError("no math_verify")], ConfigError),
        ([WorkerCallError("odd", kind="KeyError")], WorkerCallError),
    ],
)
async def test_an_answer_that_ends_its_worker_is_told_from_a_wrong_one_and_from_workers_that_do_not_run(
    monkeypatch: pytest.MonkeyPatch, answers: list[Any], end: Any
) -> None:
    pool = ScriptedPool(list(answers))
    monkeypatch.setattr("verifiers.rubrics.math_equality._POOL", pool)
    if isinstance(end, MathVerdict):
        assert await math_verdict("a", "b") is end
    else:
        with pytest.raises(end):
            await math_verdict("a", "b")
    assert pool.answers == []


def test_nothing_heavy_is_imported_for_what_is_decided_by_the_text() -> None:
    code = (
        "import sys, verifiers as vf; from verifiers.rubrics.math_equality import math_verdict_blocking as verdict\n"
        "assert verdict('1/2', '0.5') == 'right' and verdict('1', '2') == 'wrong'\n"
        "rubric = vf.MathRubric()\n"
        "assert not {'sympy', 'math_verify', 'openai'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)
