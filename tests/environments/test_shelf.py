"""Promises of every package under environments/: complete, reproducible, offline, and played without a failure."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import math
import re
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import shelf
from shelf_policies import open_environment

import verifiers as vf

NAMES = shelf.names()
SECRETS_APART = {"wordle"}
"""Packages that ask every row the same: what must differ is the answer."""


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_vf_check_finds_no_error_in_it(name: str) -> None:
    own = contextlib.nullcontext(vf.load_environment(name)) if name != "judged_rewrite" else open_environment(name)
    with own as env:
        report = vf.check(env, rows=4)
    assert report.is_right, "\n".join(report.lines())


def rows_of(dataset: Any) -> list[str]:
    """Each row as text, without its number."""
    return [json.dumps({name: value for name, value in row.items() if name != "id"}) for row in dataset]


def questions_of(name: str, dataset: Any) -> set[str]:
    return {json.dumps(row["answer" if name in SECRETS_APART else "prompt"]).casefold() for row in dataset}


@pytest.mark.parametrize("name", NAMES)
def test_the_metadata_are_complete(name: str) -> None:
    data = shelf.metadata(name)
    project = data["project"]
    dist = name.replace("_", "-")
    assert project["name"] == dist
    assert project["readme"] == "README.md"
    assert project["description"].endswith(".")
    assert {"version", "license", "requires-python"} <= project.keys()
    assert "verifiers>=1.0.0.dev0" in project["dependencies"]
    assert project["entry-points"]["verifiers.environments"] == {dist: f"{name}:load_environment"}


@pytest.mark.parametrize("name", NAMES)
def test_everything_but_its_papers_goes_into_the_wheel(name: str) -> None:
    folder = shelf.ENVIRONMENTS / name
    files = {path.name for path in folder.iterdir() if path.is_file()} - {"README.md", "pyproject.toml"}
    assert set(shelf.metadata(name)["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]) == files
    # all packages share one folder when they are installed
    assert all(file.startswith(name) for file in files)


@pytest.mark.parametrize("name", NAMES)
def test_the_readme_names_every_argument_with_its_default(name: str) -> None:
    module = __import__(name)
    text = shelf.readme(name)
    assert text.startswith(f"# {name.replace('_', '-')}\n")
    table = {}
    for names, defaults in re.findall(r"^\| (`[\w`, ]+`) \| ([^|]+) \|", text, re.MULTILINE):
        values = [value.strip() for value in defaults.split(",")]
        table |= dict(zip(re.findall(r"\w+", names), values, strict=False))
    for parameter in inspect.signature(module.load_environment).parameters.values():
        written = table[parameter.name].strip('`"')
        default = parameter.default
        if isinstance(default, str):
            assert default.startswith(written.removesuffix("...").rstrip())
        else:
            assert written == ("none" if default is None else json.dumps(default))
        assert f"{parameter.name}" in module.load_environment.__doc__


@pytest.mark.parametrize("name", NAMES)
def test_it_is_found_as_an_installed_package(name: str) -> None:
    dist = name.replace("_", "-")
    found = list(entry_points(group="verifiers.environments", name=dist))
    if not found:
        pytest.skip(f"pip install -e environments/{name}")
    assert found[0].value == f"{name}:load_environment"
    assert Path(found[0].load().__globals__["__file__"]).parent == shelf.ENVIRONMENTS / name


@pytest.mark.parametrize("name", NAMES)
def test_training_and_evaluation_rows_are_distinct(name: str) -> None:
    with open_environment(name) as env:
        train, evaluation = env.get_dataset(), env.get_eval_dataset()
    seen, kept = questions_of(name, train), questions_of(name, evaluation)
    assert (len(seen), len(kept)) == (len(train), len(evaluation))
    assert len(train) >= 400
    assert len(evaluation) >= 50
    assert not seen & kept


@pytest.mark.parametrize("name", NAMES)
def test_the_same_arguments_give_the_same_rows_and_another_seed_gives_others(name: str) -> None:
    def rows(**arguments: Any) -> tuple[list[str], list[str]]:
        with open_environment(name, **{"num_train": 40, "num_eval": 20, **arguments}) as env:
            return rows_of(env.get_dataset()), rows_of(env.get_eval_dataset())

    usual = rows()
    assert rows() == usual
    other = rows(seed=1)
    assert other[0] != usual[0]
    assert other[1] != usual[1]
    fewer = rows(num_train=10)
    assert len(fewer[0]) in (10, 20), "twenty in a group of two"
    assert fewer[1] == usual[1], "evaluation rows depend on the number of training rows"


@pytest.mark.parametrize(
    ("name", "arguments"),
    list(zip(NAMES, itertools.cycle([{"num_train": 0}, {"num_eval": 0}, {"num_train": 10**6}]), strict=False)),
)
def test_sizes_that_cannot_be_are_named(name: str, arguments: dict[str, int]) -> None:
    with (
        pytest.raises(vf.ConfigError, match=f"num_(train|eval)={next(iter(arguments.values()))}"),
        open_environment(name, **arguments),
    ):
        pass


ODD_ANSWERS = [
    "",
    "I do not know.",
    "<answer>",
    "<answer>\ud83d\ude00</answer>",
    "<guess>\u0130stan</guess>",
    "7" * 5000,
    {"content": None},
]


@pytest.mark.parametrize("name", NAMES)
def test_any_answer_is_scored_and_scored_low(name: str) -> None:
    # a plain text has always content
    odd = ODD_ANSWERS[:-1] if name == "complete_sequence" else ODD_ANSWERS
    answers = itertools.cycle(odd)
    with open_environment(name) as env:
        block = shelf.play(env, lambda turn: next(answers), prompts=7, rollouts=2)
    assert {str(outcome) for outcome in block.outcomes()} == {"completed"}, block.commonest_failure()
    for rollout in block:
        assert rollout.reward is not None
        assert math.isfinite(rollout.reward)
        assert rollout.reward <= 0.01
        assert all(math.isfinite(value) for value in rollout.metrics.values())
