"""instructions: constraints that never contradict, and that pay only in an answer to the request."""

from __future__ import annotations

import json
from typing import Any

import instructions
import pytest
import shelf
from shelf_policies import obedient

import verifiers as vf


def kept(text: str, **constraints: Any) -> float:
    """Return the reward of a text on a fox."""
    request = "Describe a fox."
    says = [instructions.KINDS[name].says.format(value) for name, value in constraints.items()]
    info = {"subject": "fox", "sentences": [request, *says], "constraints": json.dumps(constraints)}
    return instructions.constraints_kept(vf.MaybeThinkParser(), [{"role": "assistant", "content": text}], info)


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("held_out", [False, True])
def test_every_prompt_of_ten_thousand_a_level_can_be_obeyed(level: int, held_out: bool) -> None:
    for row in instructions.make_rows(5000, "all", level, held_out):
        parser, text = vf.MaybeThinkParser(), obedient(shelf.Turn({}, row))
        completion = [{"role": "assistant", "content": text}]
        assert instructions.all_kept(parser, completion, row["info"]) == 1.0, (row["question"], text)
        asked = json.loads(row["info"]["constraints"])
        settled = [aspect for name in asked for aspect in instructions.KINDS[name].settles]
        assert len(asked) == level
        assert len(settled) == len(set(settled))


FOX = "A fox is red and quick"


@pytest.mark.parametrize(
    ("text", "constraints", "share"),
    [
        (FOX, {"at_most": 5}, 0.0),
        (FOX, {"at_least": 6}, 1.0),
        ("A fox is red. It runs fast!", {"sentences": 2}, 1.0),
        ("A fox is red... It runs. And sleeps", {"sentences": 2}, 0.0),
        ("A fox is red. It runs! \N{FOX FACE}", {"sentences": 2}, 1.0),
        ("- a red fox\n- it runs", {"bullets": 2}, 1.0),
        ("- a red fox\n- it runs\nThe end", {"bullets": 2}, 0.0),
        (f"{FOX} every Day.", {"word": "day"}, 1.0),
        (f"{FOX} day by day", {"twice": "day"}, 1.0),
        (f"{FOX} 'every' day", {"word": "every"}, 1.0),
        (f"{FOX}; it\u2019s small", {"without": "it"}, 1.0),
        ("The fox's tail keeps warm", {"word": "warm"}, 1.0),
        ("Most foxes hunt by night", {"word": "night"}, 1.0),
        (f"{FOX} day day day", {"twice": "day"}, 0.0),
        (FOX, {"without": "and"}, 0.0),
        (f"{FOX}, no?", {"no_comma": ","}, 0.0),
        (FOX.lower(), {"lower": ""}, 1.0),
        (FOX, {"lower": ""}, 0.0),
        (f"Once, {FOX}", {"begin": "Once"}, 1.0),
        (f"Looking up, {FOX}", {"begin": "Look"}, 0.0),
        (f"{FOX}. The end!", {"end": "the end"}, 1.0),
        (f'"{FOX}"', {"quotes": '"'}, 1.0),
        (f'"{FOX}" I say', {"quotes": '"'}, 0.0),
        (json.dumps({"text": FOX}), {"json": "text"}, 1.0),
        (f'```json\n{{"text": "{FOX}"}}\n```', {"json": "text"}, 1.0),
        ('{"text":' * 400, {"json": "text"}, 0.0),
        (f"Describe a fox. {FOX}", {"repeat": "Describe a fox."}, 1.0),
        (FOX, {"repeat": "Describe a fox."}, 0.0),
        (FOX, {"no_comma": ",", "lower": ""}, 0.5),
        # off the subject, the prompt given back, or too long
        ("A cat is red and quick", {"no_comma": ","}, 0.0),
        ("Describe a fox. Use no comma.", {"no_comma": ","}, 0.0),
        ("Describe a fox.", {"repeat": "Describe a fox."}, 0.0),
        (f"{FOX} " * 400, {"no_comma": ","}, 0.0),
    ],
)
def test_a_constraint_is_kept_or_not(text: str, constraints: dict[str, Any], share: float) -> None:
    assert kept(text, **constraints) == share


def test_every_kind_is_asked_and_subjects_are_held_out() -> None:
    env = vf.load_environment("instructions")
    train, evaluation = (list(data["info"]) for data in (env.get_dataset(), env.get_eval_dataset()))
    load = [row if isinstance(row, dict) else json.loads(row) for row in [*train, *evaluation]]
    assert {name for row in load for name in json.loads(row["constraints"])} == set(instructions.KINDS)
    assert not {row["subject"] for row in load[: len(train)]} & {row["subject"] for row in load[len(train) :]}
