"""Datasets as environments want them."""

from __future__ import annotations

import csv
import json
from typing import Any

import pytest
from datasets import Dataset, DatasetDict

import verifiers as vf
from verifiers.envs.datasets import count_trained_on, format_dataset, format_prompt, row_fields
from verifiers.errors import ConfigError
from verifiers.keywords import warn_once
from verifiers.testing import FakeOpenAIServer
from verifiers.train.run_plan import datasets_of

SHOTS = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]


def ask(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("as_table", [True, False])
def test_questions_become_prompts_and_rows_get_ids(as_table: bool) -> None:
    rows: Any = [{"question": f"q{i}", "answer": str(i)} for i in range(3)]
    table = format_dataset(Dataset.from_list(rows) if as_table else rows, "be brief", SHOTS)
    assert isinstance(table, Dataset)
    assert list(table["id"]) == [0, 1, 2]
    assert list(table["answer"]) == ["0", "1", "2"]
    assert row_fields(table[2])[0] == format_prompt("q2", "be brief", SHOTS)


def test_prompts_and_ids_that_are_there_stay() -> None:
    rows = [{"prompt": [ask("a")], "question": "b", "id": 7}]
    table = format_dataset(rows, system_prompt="be brief")
    assert (table[0]["prompt"], table[0]["id"]) == ([ask("a")], 7)
    assert format_dataset([{"prompt": "Once"}], message_type="completion")[0]["prompt"] == "Once"


def test_question_and_answer_may_have_other_names() -> None:
    table = format_dataset([{"problem": "q", "solution": "s"}], question_key="problem", answer_key="solution")
    assert table[0]["prompt"] == [ask("q")]
    assert table[0]["answer"] == table[0]["solution"] == "s"


def test_a_column_of_later_rows_is_not_lost() -> None:
    table = format_dataset([{"question": "a"}, {"question": "b", "task": "sums"}])
    assert [row_fields(row)[2] for row in table] == ["default", "sums"]


def test_a_row_without_answer_task_or_info_has_the_defaults() -> None:
    assert row_fields({"prompt": "p"}) == ("p", "", "default", {})
    assert row_fields({"prompt": "p", "answer": None, "task": None, "info": None}) == ("p", "", "default", {})
    assert row_fields({"prompt": "p", "answer": 0, "task": "t", "info": {"a": None}}) == ("p", 0, "t", {"a": None})
    with pytest.raises(ConfigError, match="no prompt, only 'question'"):
        row_fields({"question": "q"})


def test_info_may_be_json_text() -> None:
    info = {"levels": [1, {"deep": None}]}
    assert row_fields({"prompt": "p", "info": json.dumps(info)})[3] == info
    assert row_fields({"prompt": "p", "info": ""})[3] == {}
    with pytest.raises(ConfigError, match="not JSON"):
        row_fields({"prompt": "p", "info": "{"})
    with pytest.raises(ConfigError, match="not list"):
        row_fields({"prompt": "p", "info": "[1]"})


def test_what_a_table_adds_to_messages_and_tools_is_dropped_again() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    prompt = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": "u"}}],
        },
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}},
        {"type": "function", "function": {"name": "g", "parameters": {"properties": {"b": {"type": "string"}}}}},
    ]
    rows = [{"prompt": prompt[:1], "info": {"oai_tools": tools}}, {"prompt": prompt[1:], "info": {"oai_tools": []}}]
    # one column cannot hold lists and text both, so the second message's content is a list as well
    rows[1]["prompt"][0]["content"] = None  # type: ignore[index]
    table = format_dataset(rows)  # type: ignore[arg-type]
    assert table[0]["prompt"][0]["tool_calls"] is None, "the table really adds them"
    read = [row_fields(row) for row in table]
    assert [message for row in read for message in row[0]] == prompt
    assert read[0][3]["oai_tools"] == tools


def numbered(*numbers: int, **further: Any) -> list[dict[str, Any]]:
    return [{"question": f"{number}?", "answer": str(number), **further} for number in numbers]


@pytest.mark.parametrize(
    ("training", "evaluated", "count"),
    [
        (numbered(1, 2, 3), numbered(4, 5), 0),
        (numbered(1, 2, 3), numbered(3, 4, 3), 2),
        (numbered(1, 2), None, 2),
        # the row of an environment that makes its prompt from a seed
        (numbered(1, 2, info={"seed": 0}), numbered(1, 2, info={"seed": 1}), 0),
        (numbered(1, 2, info={"seed": 0}), numbered(2, info='{"seed": 0}'), 1),
    ],
)
def test_evaluated_rows_that_are_trained_on_are_counted(training: Any, evaluated: Any, count: int) -> None:
    env = vf.SingleTurnEnv(dataset=training, eval_dataset=evaluated, system_prompt="Be brief.")
    assert count_trained_on(env, env.get_eval_dataset()) == count


def test_a_training_set_that_is_made_when_needed_is_not_made_for_the_count() -> None:
    def never() -> Any:
        raise AssertionError

    env = vf.SingleTurnEnv(dataset=never, eval_dataset=numbered(1))
    assert count_trained_on(env, env.get_eval_dataset()) is None


def test_rows_beyond_those_that_are_compared_are_not_said_to_be_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verifiers.envs.datasets._MOST_COMPARED", 2)
    env = vf.SingleTurnEnv(dataset=numbered(1, 2, 3))
    rows = env.get_dataset()
    assert count_trained_on(env, rows.select([2])) is None
    assert count_trained_on(env, rows.select([0, 2])) == 1


@pytest.mark.parametrize("given", ["2+2?", {"role": "user", "content": "2+2?"}])
def test_a_text_or_a_single_message_as_the_prompt_is_asked(given: Any) -> None:
    rows = [{"prompt": given, "answer": "4"}]
    env = vf.SingleTurnEnv(eval_dataset=rows, rubric=vf.Rubric([lambda completion: 1.0]))
    with FakeOpenAIServer("4") as server:
        assert env.evaluate_sync(server.url, "fake").reward == [1.0]
        assert server.requests[0].messages == [ask("2+2?")]


def test_infos_keep_their_own_keys_at_every_level() -> None:
    infos = [{"limit": 3}, {"tests": [{"in": "1"}, {"out": "2"}]}]
    seen: list[Any] = []

    def look(info: Any) -> float:
        seen.append(info)
        return 1.0

    rows = [{"question": "?", "info": info} for info in infos]
    env = vf.SingleTurnEnv(eval_dataset=rows, rubric=vf.Rubric([look]))
    with FakeOpenAIServer("x") as server:
        env.evaluate_sync(server.url, "fake")
    assert sorted(seen, key=len) == sorted(infos, key=len)
    same = format_dataset([{"question": "?", "info": {"a": [{"b": place}]}} for place in range(2)])
    assert list(same["info"]) == [{"a": [{"b": 0}]}, {"a": [{"b": 1}]}]


def test_what_has_no_effect_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()

    def right(completion: Any, answer: Any) -> float:
        return float(completion[-1]["content"] == answer)

    begun = [{"role": "system", "content": "Answer in German."}, ask("2+2?")]
    vf.SingleTurnEnv(eval_dataset=[{"prompt": begun, "answer": "4"}], system_prompt="Answer in German.")
    assert "get neither" not in caplog.text, "the rows have it"
    for _ in range(2):
        vf.SingleTurnEnv(
            eval_dataset=[{"prompt": [ask("2+2?")]}], system_prompt="Answer in German.", rubric=vf.Rubric([right])
        )
    assert caplog.text.count("get neither system_prompt nor few_shot") == 1
    assert caplog.text.count("No row has an answer: right will be given an empty one") == 1


@pytest.mark.parametrize(
    ("dataset", "told"),
    [
        ([{"text": "x", "label": 1}], "neither a column 'prompt' nor a column 'question', only text, label"),
        ([{"question": "?"}, "q2"], "Row 1 is 'q2'; a dataset given as a list must hold dicts"),
        ({"question": ["q"]}, "not dict"),
        (DatasetDict(train=Dataset.from_dict({"question": ["q"]})), "give one of them"),
        ([{"question": "q", "info": {"a": 1}}, {"question": "q", "info": "text"}], "as JSON text"),
        ([{"question": 5}], "Row 0 has 5 as its 'question'; give a text"),
        ([{"question": None}], "Row 0 has None as its 'question'; give a text"),
        (
            list(csv.DictReader(["question,answer", "1+1,2", "1+2,3,4"])),
            "Row 1 has a column named None; .* more cells",
        ),
        ([{"question": "x"}, {"question": None}], "Row 1 has None as its 'question'"),
        (
            [{"question": "?", "answer": 2**64}],
            "Row 0 has 18446744073709551616 in its column 'answer': ",
        ),
        (
            [{"question": "?", "answer": value} for value in (1, None, "4", 5)],
            "Row 2 has '4' in its column 'answer', which",
        ),
        (
            [{"question": "?", "answer": {key: 1}} for key in "aab"],
            "Row 2 has {'b': 1} as its answer, with other keys",
        ),
        ([{"question": "?", "info": {"of": [1, -(2**63) - 1]}}], "in its column 'info': whole numbers"),
        ([{"question": "q \ud83d"}], "half of a character in 'q .ud83d'"),
        ([{"prompt": [ask("q")]}, {"prompt": None}], "Row 1 has no message in its 'prompt'"),
        ([{"prompt": [ask("q")]}, {"prompt": []}], "Row 1 has no message in its 'prompt'"),
    ],
)
def test_a_dataset_that_cannot_work_is_told_why_and_in_which_row(dataset: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        format_dataset(dataset)


def test_answers_that_a_table_changes_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    format_dataset([{"question": "?", "answer": value} for value in (4, None, 5)])
    assert "4 becomes 4.0" not in caplog.text
    table = format_dataset([{"question": "?", "answer": value} for value in (4, 4.5)])
    assert str(table[0]["answer"]) == "4.0"
    assert "4 becomes 4.0; give them as text" in caplog.text


def test_numbers_as_tasks_are_their_texts() -> None:
    rows = [{"question": "?", "answer": "", "task": place % 2} for place in range(4)]
    env = vf.SingleTurnEnv(dataset=rows, eval_dataset=rows, rubric=vf.Rubric([lambda task: float(task == "1")]))
    assert datasets_of(env) == {"0": [0, 2], "1": [1, 3]}
    with FakeOpenAIServer("x") as server:
        results = env.evaluate_sync(server.url, "fake", num_examples=4)
    assert (results.task, results.reward) == (["0", "1", "0", "1"], [0.0, 1.0, 0.0, 1.0])


def test_texts_and_images_stand_in_one_column_and_come_back_as_they_were() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    prompts = [
        [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [image, {"type": "text", "text": "?"}]},
        ],
        [{"role": "user", "content": "no image"}],
        [{"role": "user", "content": [image]}],
    ]
    env = vf.SingleTurnEnv(dataset=[{"prompt": one, "answer": ""} for one in prompts], rubric=vf.Rubric(funcs=[]))
    assert [row_fields(row)[0] for row in env.get_dataset()] == prompts
