"""structured_output: prompts that share nothing with training, and fields that pay only where they are right."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import structured_output

import verifiers as vf

ANSWER = json.dumps({"person": {"name": "Leo", "age": 30}, "married": True, "languages": ["French", "German"]})


def reward(text: str, answer: str = ANSWER) -> tuple[float, float, float]:
    """Return the reward, exact match and valid JSON of one answer."""
    parser, completion = vf.MaybeThinkParser(structured_output.fields), [{"role": "assistant", "content": text}]
    return (
        structured_output.field_match(parser, completion, answer),
        structured_output.exact_match(parser, completion, answer),
        structured_output.valid_json(parser, completion),
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (ANSWER, (1.0, 1.0, 1.0)),
        (f"```json\n{ANSWER}\n```", (1.0, 1.0, 1.0)),
        (f"<think>hm {{}}</think>\n{ANSWER}", (1.0, 1.0, 1.0)),
        (ANSWER.replace("30", "31"), (0.8, 0.0, 1.0)),
        (ANSWER.replace("30", '"30"'), (0.8, 0.0, 1.0)),
        (ANSWER.replace('"French", ', ""), (0.6, 0.0, 1.0)),
        (ANSWER.replace("}, ", '}, "city": "Rome", "day": {}, "hours": [], '), (5 / 8, 0.0, 1.0)),
        (f"Here it is: {ANSWER}", (0.0, 0.0, 0.0)),
        (ANSWER.replace("30", "NaN"), (0.0, 0.0, 0.0)),
        (ANSWER.replace('"age": 30', '"age": 30, "age": 30'), (0.0, 0.0, 0.0)),
        (ANSWER.replace("{", "{" + " " * 5000, 1), (0.0, 0.0, 0.0)),
        ('{"a":' * 100_000, (0.0, 0.0, 0.0)),
        ('{"name": "\\ud800"}', (0.0, 0.0, 1.0)),
        ("", (0.0, 0.0, 0.0)),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_only_fields_that_are_exactly_right_are_paid(text: str, expected: tuple[float, float, float]) -> None:
    assert reward(text) == pytest.approx(expected)


def sentences_and_objects(dataset: Any) -> tuple[set[str], set[str]]:
    """Return every sentence of the prompts, and every object: those of the examples too."""
    texts, objects = set(), set()
    for row in dataset:
        told = [message["content"] for message in row["prompt"][1:]]
        texts |= {sentence for text in told[::2] for sentence in re.split(r"(?<=\.) ", text)}
        objects |= {json.dumps(json.loads(text), sort_keys=True) for text in [*told[1::2], row["answer"]]}
    return texts, objects


@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_evaluation_shares_no_template_and_no_object_with_training(level: int) -> None:
    env = vf.load_environment("structured-output", level=level, num_train=2000, num_eval=500)
    train, evaluation = (sentences_and_objects(data) for data in (env.get_dataset(), env.get_eval_dataset()))
    assert not train[0] & evaluation[0]
    assert not train[1] & evaluation[1]
    for domain in structured_output.DOMAINS:
        for templates in [domain.texts, *domain.clauses.values()]:
            patterns = [
                re.sub(r"\\{\w+\\}", r".+", re.escape(one))
                for template in templates.split(structured_output.BETWEEN)
                for one in [template.replace("|", structured_output.BETWEEN)]
            ]
            assert len(set(patterns)) == len(patterns)


@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_the_text_says_every_value_of_the_answer_and_the_example_is_another_one(level: int) -> None:
    env = vf.load_environment("structured-output", level=level, num_train=500)
    for row in env.get_dataset():
        *_, example, asked = [message["content"] for message in row["prompt"]]
        assert example != row["answer"]
        leaves = structured_output.fields(row["answer"]).values()
        said = [leaf.strip('"') for leaf in leaves if leaf not in ("true", "false", "null")]
        assert all(value in asked for value in said)
        assert sum(leaf == "null" for leaf in leaves) == (level == 4)
