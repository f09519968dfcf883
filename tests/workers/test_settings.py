"""The table `[workers]`, and `vf-eval --workers`."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
import worker_world as world

from verifiers.cli import evaluate
from verifiers.errors import ConfigError
from verifiers.train.run_file import load_run_file
from verifiers.workers.settings import WorkerSettings


def test_a_flag_names_an_engine_and_a_number() -> None:
    assert WorkerSettings.parse("processes:8") == WorkerSettings(engine="processes", count=8)
    assert WorkerSettings.parse("inline") == WorkerSettings()
    assert WorkerSettings.parse("processes").workers == max(1, len(os.sched_getaffinity(0)) - 2)


def test_workers_fit_the_cores_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 4})
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert WorkerSettings(engine="processes").workers == 3


@pytest.mark.parametrize("text", ["threads:2", "processes:0", "processes:many", "processes:"])
def test_a_wrong_flag_is_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--workers is '.*processes:8"):
        WorkerSettings.parse(text)


def test_the_settings_of_ray() -> None:
    assert WorkerSettings.parse("ray:64") == WorkerSettings(engine="ray", count=64)
    settings = WorkerSettings(engine="ray", address="head:6379", cpus=0.5, resources={"docker": 0.1})
    assert (settings.count, settings.cpus, settings.resources) == (None, 0.5, {"docker": 0.1})


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ("cpus = 2.0", "cpus is for engine = 'ray', and engine is 'inline'; leave cpus out or change engine"),
        ('engine = "processes"\naddress = "auto"', "address is for engine = 'ray', and engine is 'processes'"),
        ('engine = "ray"\naddress = "ray://head:10001"', "give 'auto', or the address of the head as host:6379"),
        ('engine = "ray"\nresources = { CPU = 2 }', "resources has CPU; give cpus instead"),
    ],
)
def test_what_ray_cannot_take_is_one_sentence(lines: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f'[environment]\nid = "e"\n[model]\npath = "m"\n[workers]\n{lines}\n')
    with pytest.raises(ConfigError) as refused:
        load_run_file(file)
    assert sentence in str(refused.value)


def test_workers_in_ray_without_ray_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"workers of engine 'ray' need Ray; install it by .*\[ray\]"):
        WorkerSettings(engine="ray").open([(world.one_turn(), world.one_turn)], blocked_s=1.0)


def test_inline_workers_leave_the_environment_as_it_is() -> None:
    env = world.one_turn()
    assert WorkerSettings().open([(env, world.one_turn)], blocked_s=1.0).of(env) is env


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["processes:2", pytest.param("ray:2", marks=pytest.mark.ray)])
def test_an_evaluation_in_workers_writes_the_rows_of_one_inline(
    workers: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if workers.startswith("ray"):
        monkeypatch.setenv("RAY_ADDRESS", request.getfixturevalue("ray_cluster").address)
    rows: list[Any] = []
    for engine in ("inline", workers):
        directory = tmp_path / engine.partition(":")[0]
        arguments = ["worker_world", "-m", "fake", "-n", "-1", "-r", "2", "--seed", "3", "--json"]
        assert evaluate.main([*arguments, "--workers", engine, "--output-dir", str(directory)]) == 0
        (found,) = directory.glob("*/*/results.jsonl")
        lines = [json.loads(line) for line in found.read_text().splitlines()]
        for line in lines:
            del line["generation_ms"], line["scoring_ms"]
        rows.append(sorted(lines, key=lambda line: (line["example_id"], line["generation"])))
    assert rows[0] == rows[1]
    assert len(rows[0]) == 12
