"""Scoring as a worker does it: reasoning-gym's own numbers, and no evaluation of what is not an answer."""

from __future__ import annotations

import datetime
import decimal
import fractions
import importlib.util
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

import verifiers as vf
from verifiers.integrations import reasoning_gym_worker
from verifiers.integrations.reasoning_gym_worker import EVALUATING_TASKS, FORMULA_TASKS, dumps, is_formula, loads

pytestmark = pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="needs the rg extra")


def entry_of(task: str, **metadata: Any) -> dict[str, Any]:
    import reasoning_gym

    entry = reasoning_gym.create_dataset(task, seed=11, size=10)[0]
    entry["metadata"].update(metadata)
    return entry


def score(task: str, answer: str, entry: dict[str, Any] | None = None) -> dict[str, Any]:
    entry = entry if entry is not None else entry_of(task)
    return reasoning_gym_worker.score_in_worker(task, "{}", dumps(entry), answer)


@pytest.mark.parametrize(
    "text",
    ["8*(5*1 - 2)", "7*X**9 - 2*x**6/4 + C", "exp(-x)*sin(2*x)", "3*Integral(x**3*cos(3*x), x) + C", "1.5*x", "5!"],
)
def test_formulas_are_formulas(text: str) -> None:
    assert is_formula(text)


@pytest.mark.parametrize(
    "text",
    [
        "open(chr(47)+chr(120), chr(119))",
        "exec(chr(49))",
        "__import__('os').system('true')",
        "x.diff",
        "(1).real",
        "S(chr(49))",
        "sympify(x)",
        "lambda: 3",
        "(lambda x: x)(3)",
        "[x for x in range(3)]",
        "(sin)(x)",
        "print (1)",
        "Function(x)",
        "eval\n(1)",
        "f'{x}'",
        "x if x else x",
        "(y := 3)",
    ],
)
def test_what_could_run_is_no_formula(text: str) -> None:
    assert not is_formula(text)


@pytest.mark.parametrize("task", sorted(FORMULA_TASKS))
def test_every_oracle_answer_is_a_formula(task: str) -> None:
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(task, seed=2, size=10)
    assert all(is_formula(dataset[index]["answer"]) for index in range(3))


ATTACKS = [
    "[open({path!r}, 'w').write('x')]",
    "open({path!r}, 'w').write('x')",
    "__import__('pathlib').Path({path!r}).touch()",
]


@pytest.mark.parametrize(
    ("task", "attack"), list(zip(sorted(EVALUATING_TASKS | FORMULA_TASKS), itertools.cycle(ATTACKS), strict=False))
)
def test_an_answer_that_would_write_a_file_is_not_evaluated(task: str, attack: str, tmp_path: Path) -> None:
    path = tmp_path / "written"
    # the scorer alone, without the sandbox around it
    result = score(task, attack.format(path=str(path)))
    assert result == score(task, "")
    assert not path.exists()


@pytest.mark.parametrize("task", sorted(EVALUATING_TASKS))
def test_a_list_is_still_read_where_the_scorer_reads_lists(task: str) -> None:
    entry = entry_of(task)
    answers = {
        "n_queens": lambda: repr([row.split() for row in entry["metadata"]["valid_answers"][0].split("\n")]),
        "string_insertion": lambda: repr(list(entry["answer"])),
        "spiral_matrix": lambda: "[" + ", ".join(entry["answer"].split()) + "]",
        "binary_matrix": lambda: repr([[int(x) for x in row.split()] for row in entry["answer"].split("\n")]),
    }
    assert score(task, answers[task](), entry)["score"] in (0.1, 0.5)


def test_a_scorer_that_raises_scores_nothing_and_says_what_it_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = reasoning_gym_worker.open_scorer("gcd", "{}")

    def raising(answer: str, entry: Any) -> float:
        raise RecursionError("too deep")

    monkeypatch.setattr(scorer, "score_answer", raising, raising=False)
    assert score("gcd", "((((") == {"score": 0.0, "raised": "RecursionError"}
    monkeypatch.setattr(scorer, "score_answer", lambda answer, entry: float("nan"))
    assert score("gcd", "nan") == {"score": 0.0, "raised": "NotFinite"}


def test_a_package_that_a_scorer_lacks_is_no_fault_of_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = reasoning_gym_worker.open_scorer("gcd", "{}")

    def lacking(answer: str, entry: Any) -> float:
        raise ModuleNotFoundError("No module named 'sympy'")

    monkeypatch.setattr(scorer, "score_answer", lacking)
    with pytest.raises(ModuleNotFoundError):
        score("gcd", "1")


# -- values as text -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        {"a": (1, 2, [3, (4,)]), "b": {5, 6}, "c": frozenset({(7,)})},
        {1: "x", (2, 3): "y", None: "z", False: "w"},
        {"!": ["tuple", [1]]},
        {"!": 3, "b": {"!": ["bytes", "x"]}},
        [datetime.datetime(2020, 1, 2, 3, 4, 5), datetime.date(2020, 1, 2), datetime.time(6, 7)],
        [b"\xff\x00", 3 + 4j, decimal.Decimal("1.10"), fractions.Fraction(1, 3)],
        {"text": 'naïve "quotes"\n\u2028', "none": None, "big": 10**40, "small": 1e-300, "inf": float("inf")},
        [],
    ],
)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    back = loads(dumps(value))
    assert back == value
    assert repr(back) == repr(value) or isinstance(value, dict)


def test_what_plain_json_keeps_is_written_as_plain_json() -> None:
    value = {"question": "q", "answer": "a", "metadata": {"numbers": [1, 2.5, True, None]}}
    assert json.loads(dumps(value)) == value


def test_numpys_numbers_become_pythons_and_its_arrays_stay_arrays() -> None:
    numpy = pytest.importorskip("numpy")
    back = loads(dumps({"i": numpy.int64(3), "f": numpy.float64(2.5), "s": numpy.str_("a"), "b": numpy.bool_(True)}))
    assert back == {"i": 3, "f": 2.5, "s": "a", "b": True}
    array = loads(dumps(numpy.array([[1, 2]], dtype=numpy.int16)))
    assert (array.dtype, array.tolist()) == (numpy.int16, [[1, 2]])


def test_what_could_not_be_given_back_is_an_error_that_shows_it() -> None:
    with pytest.raises(vf.ConfigError, match="A value of type object cannot be sent to a scoring process: <object"):
        dumps({"a": [object()]})
