"""The configuration: every mistake is one sentence with the key, the value and the remedy."""

from __future__ import annotations

import datetime
import json
import re
from pathlib import Path
from typing import Any

import pytest
from verifiers_dataserver.cli import main
from verifiers_dataserver.config import load_configuration

from verifiers.errors import ConfigError

FINE: dict[str, Any] = {"datasets": {"easy": {"jsonl": "easy.jsonl", "graders": ["exact"]}}}


@pytest.fixture
def write(tmp_path: Path) -> Any:
    (tmp_path / "easy.jsonl").write_text('{"prompt": "q", "answer": "a"}\n')

    def begin(configuration: Any, name: str = "config.yaml") -> str:
        path = tmp_path / name
        path.write_text(configuration if isinstance(configuration, str) else json.dumps(configuration))
        return str(path)

    return begin


def with_dataset(**fields: Any) -> dict[str, Any]:
    return {"datasets": {"easy": {"jsonl": "easy.jsonl", "graders": ["exact"], **fields}}}


MISTAKES: list[tuple[Any, str]] = [
    ("datasets: [", "is not valid YAML"),
    ("", "the file is None, but it must be a table"),
    ({}, "the file has no 'datasets'; add it"),
    ({"datasets": {}}, "datasets is empty; name at least one dataset"),
    ({**FINE, "curiculum": {}}, "unknown key 'curiculum'; did you mean 'curriculum'?"),
    ({**FINE, "server": {"prot": 1}}, "server has an unknown key 'prot'; did you mean 'port'?"),
    ({**FINE, "server": {"port": 70000}}, "server.port is 70000"),
    (with_dataset(jsnol="x"), "datasets.easy has an unknown key 'jsnol'; did you mean 'jsonl'?"),
    (with_dataset(hf={"path": "x"}), "jsonl and hf; give exactly one"),
    ({"datasets": {"easy": {"graders": ["exact"]}}}, "no source; give exactly one"),
    ({"datasets": {"a:b": FINE["datasets"]["easy"]}}, "'a:b' needs a name without ':'"),
    (with_dataset(graders=[]), "datasets.easy.graders is empty"),
    (with_dataset(graders=["exacct"]), "uses 'exacct', which is not a grader; did you mean 'exact'?"),
    (with_dataset(graders=["rubric"]), "only an environment has one"),
    (with_dataset(graders=["exact", "exact"]), "has 'exact' twice"),
    (with_dataset(graders=[{"use": "exact", "weight": -1}]), "weight is -1"),
    (with_dataset(graders=[{"use": "exact", "weight": 0}]), "weights that sum to 0"),
    (with_dataset(graders=[{"use": "exact", "gate": True}]), "weights that sum to 0"),
    (with_dataset(graders=[{"use": "exact", "ignore_cas": True}]), "'exact' has no option 'ignore_cas'"),
    (with_dataset(graders=[{"use": "exact", "ignore_case": "perhaps"}]), "ignore_case is 'perhaps'"),
    (with_dataset(graders=[{"use": "math", "timeout_s": "long"}]), "timeout_s is 'long'"),
    (with_dataset(graders=[{"use": "length_cap"}]), "give either max_tokens or max_chars"),
    (with_dataset(graders=[{"use": "json_schema", "schema": {"type": "objekt"}}]), "type is not a JSON schema"),
    (
        "datasets: {env: {environment: {id: x, args: {since: 2024-01-01}}}}",
        "datasets.env.environment.args.since is datetime.date(2024, 1, 1), which is not JSON",
    ),
    (with_dataset(answer_from="last"), "answer_from is 'last'"),
    (with_dataset(prompt_key="question"), "row 0 of dataset 'easy' has None as 'question'"),
    (with_dataset(jsonl="none.jsonl"), "none.jsonl cannot be read"),
    ({**FINE, "graders": {"far": {}}}, "graders.far must have either python or http"),
    ({**FINE, "graders": {"far": {"http": "far"}}}, "graders.far.http is 'far'"),
    ({**FINE, "graders": {"far": {"python": "far"}}}, "write it as 'module:function'"),
    ({**FINE, "graders": {"exact": {"http": "http://x"}}}, "has the name of a built-in grader"),
    ({**FINE, "curriculum": {"stages": []}}, "no stages"),
    ({**FINE, "curriculum": {"stages": [{"name": "a", "datasets": ["esay"]}]}}, "'esay'"),
]


@pytest.mark.parametrize(("configuration", "words"), MISTAKES)
def test_a_mistake_ends_the_start_with_one_sentence(
    write: Any, capsys: pytest.CaptureFixture[str], configuration: Any, words: str
) -> None:
    assert main([write(configuration), "--check"]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
    assert said.startswith("vf-dataserver: ")


def test_a_grader_that_is_not_there_is_found_out_at_the_start(
    write: Any, python: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for target, words in (("nobody", "nobody"), ("GRADERS", "GRADERS")):
        configuration = {**with_dataset(graders=["mine"]), "graders": {"mine": python(target)}}
        assert main([write(configuration), "--check"]) == 2
        assert words in capsys.readouterr().err
    configuration = {**with_dataset(graders=["mine"]), "graders": {"mine": {"python": "no_such_module:f"}}}
    assert main([write(configuration), "--check"]) == 2
    assert "no_such_module" in capsys.readouterr().err


def test_broken_rows_are_named_by_line(write: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(FINE)
    (tmp_path / "easy.jsonl").write_text('{"prompt": "q"}\n\n{"prompt": \n')
    assert main([path, "--check"]) == 2
    assert "line 3 of " in capsys.readouterr().err
    (tmp_path / "easy.jsonl").write_text("\n")
    assert main([path, "--check"]) == 2
    assert "dataset 'easy' has no rows" in capsys.readouterr().err


def test_a_token_that_is_named_must_be_set(
    write: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NO_TOKEN_HERE", raising=False)
    assert main([write(FINE), "--check", "--token-var", "NO_TOKEN_HERE"]) == 2
    assert "'NO_TOKEN_HERE' is not set" in capsys.readouterr().err


def test_check_prints_the_datasets_and_the_curriculum(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    stages = [
        {"name": "warm", "until_step": 2000, "datasets": ["easy"]},
        {"name": "main", "datasets": [{"id": "easy", "weight": 1}, {"id": "more", "weight": 3}]},
    ]
    more = {"jsonl": "easy.jsonl", "graders": ["exact", {"use": "length_cap", "gate": True, "max_chars": 9}]}
    configuration = {"datasets": {**FINE["datasets"], "more": more}, "curriculum": {"stages": stages}}
    assert main([write(configuration), "--check"]) == 0
    said = capsys.readouterr().out
    for words in ("more", "exact x 1, length_cap (gate)", "2,000", "easy 25.0%, more 75.0%", "the end"):
        assert words in said


def test_toml_is_read_as_well_as_yaml(write: Any) -> None:
    text = """
total_steps = 7
[datasets.easy]
jsonl = "easy.jsonl"
graders = ["exact", { use = "number_only", weight = 2.0 }]
[[curriculum.stages]]
name = "only"
datasets = ["easy"]
"""
    configuration = load_configuration(write(text, "config.toml"))
    assert configuration.total_steps == 7
    assert [use.weight for use in configuration.datasets["easy"].uses()] == [1.0, 2.0]
    with pytest.raises(ConfigError, match="is not valid TOML"):
        load_configuration(write("a = ", "broken.toml"))


def test_without_a_curriculum_all_datasets_have_equal_weights(write: Any) -> None:
    configuration = load_configuration(
        write({"datasets": {"a": FINE["datasets"]["easy"], "b": {"jsonl": "easy.jsonl", "graders": ["math"]}}})
    )
    stage = configuration.curriculum.stage_at(10**6)
    assert [(dataset.id, dataset.weight) for dataset in stage.datasets] == [("a", 1.0), ("b", 1.0)]


def test_a_hugging_face_dataset_on_disk_is_a_source(write: Any, tmp_path: Path) -> None:
    import datasets
    from verifiers_dataserver.datasets import load_datasets

    rows = [{"question": f"q{i}", "solution": i} for i in range(3)]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    table = {"hf": {"path": "saved"}, "prompt_key": "question", "answer_key": "solution", "graders": ["exact"]}
    loaded = load_datasets(load_configuration(write({"datasets": {"saved": table}})))
    assert len(loaded["saved"]) == 3
    row = loaded["saved"].row(2)
    assert (row.prompt, row.answer) == ([{"role": "user", "content": "q2"}], 2)
    with pytest.raises(ConfigError, match="'nowhere'"):
        load_datasets(load_configuration(write({"datasets": {"a": {**table, "hf": {"path": "nowhere"}}}})))


def saved(write: Any, columns: dict[str, list[Any]], **fields: Any) -> Any:
    """Return the configuration of a table that is saved on disk."""
    import datasets

    path = write(FINE)
    datasets.Dataset.from_dict(columns).save_to_disk(Path(path).parent / "saved")
    return load_configuration(
        write({"datasets": {"saved": {"hf": {"path": "saved"}, "graders": ["exact"], **fields}}})
    )


def test_columns_that_are_no_json_are_left_out_with_a_warning(write: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Also where the first row has none, and where it lies deeper."""
    from verifiers_dataserver.datasets import load_datasets

    noon = datetime.datetime(2024, 1, 1, 12)
    columns = {
        "prompt": ["p", "q"],
        "answer": ["1", "2"],
        "at": [None, noon],
        "deep": [[], [{"a": b"x"}]],
        "n": [1, 2],
    }
    loaded = load_datasets(saved(write, columns))["saved"]
    assert loaded.row(1).info == {"n": 2}
    assert "'at', 'deep'" in caplog.text


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"prompt": ["p"], "answer": [datetime.date(2024, 1, 1)]}, "the column 'answer' holds"),
        ({"prompt": ["p"], "answer": ["1"], "info": [{"at": datetime.date(2024, 1, 1)}]}, "the column 'info' holds"),
        (
            {"prompt": ["p"] * 1500 + [None], "answer": ["1"] * 1501},
            "row 1500 of dataset 'saved' has None as 'prompt'",
        ),
    ],
)
def test_a_table_that_cannot_be_served_is_found_out_at_the_start(write: Any, columns: Any, words: str) -> None:
    from verifiers_dataserver.datasets import load_datasets

    configuration = saved(write, columns)
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_datasets(configuration)


def test_the_example_is_a_configuration_that_loads() -> None:
    from verifiers_dataserver.datasets import load_datasets

    path = Path(__file__).parents[3] / "servers" / "dataserver" / "example" / "config.yaml"
    loaded = load_datasets(load_configuration(path))
    assert {name: len(rows) for name, rows in loaded.items()} == {"sums": 40, "words": 12}
