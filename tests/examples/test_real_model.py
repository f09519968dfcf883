"""The environments of examples/real_model: rows that are held out, and one step of training on the real model."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import verifiers as vf
from verifiers.testing import FakeClient

EXAMPLE = Path(__file__).parents[2] / "examples" / "real_model"


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", [str(EXAMPLE), *sys.path])
    yield
    for name in ("corrections", "form_filler"):
        sys.modules.pop(name, None)


def test_a_correction_changes_one_field_and_is_scored_with_the_first_answer() -> None:
    env = vf.load_environment("corrections", num_eval=1)
    row = env.get_eval_dataset()[0]
    first, then = json.loads(row["answer"]), json.loads(row["info"]["corrected"])
    [changed] = [key for key in first if first[key] != then[key]]
    assert changed in row["info"]["correction"]
    assert then[changed] in row["info"]["correction"]
    for answers, reward in (([first, then], 1.0), ([first, first], 1 - 0.5 / len(first)), ([{}, then], 0.5)):
        results = env.evaluate_sync(FakeClient([json.dumps(answer) for answer in answers]), "fake", num_examples=1)
        assert results.reward == [pytest.approx(reward)]


def test_the_agent_asks_again_until_the_object_has_its_keys() -> None:
    env = vf.load_environment("form_filler", num_train=8, num_eval=1)
    answer = env.get_eval_dataset()[0]["answer"]
    results = env.evaluate_sync(FakeClient(["Here it is:", "{}", answer]), "fake", num_examples=1)
    assert (results.reward, results.metrics["tries"]) == ([1.0], [3.0])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_an_adapter_of_the_real_model_is_trained_and_served(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verifiers_embedded.engine.loading import load_model
    from verifiers_embedded.in_process_server import InProcessServer

    from verifiers.cli import train

    smaller = {"max_steps = 12": "max_steps = 1", "accumulation_steps = 4": "accumulation_steps = 1",
               "eval_on_start = true": "num_eval_prompts = 1", "eval_steps = 12": "eval_steps = 1"}  # fmt: skip
    text = (EXAMPLE / "corrections.toml").read_text()
    for setting, less in smaller.items():
        assert setting in text
        text = text.replace(setting, less)
    monkeypatch.chdir(tmp_path)
    Path("smollm2").symlink_to(smollm2)
    Path("run.toml").write_text(text)
    assert train.main(["run.toml"]) == 0
    lines = [json.loads(line) for line in Path("runs/corrections/metrics.jsonl").read_text().splitlines()]
    assert max(line.get("rows/trained", 0) for line in lines) >= 1

    adapter = load_model(Path("runs/corrections"), device="cpu", dtype="float32", max_model_len=1024)
    with InProcessServer(adapter, name="corrections", slots=8, threads=2, prefix_bytes=0, seed=0) as server:
        env = vf.load_environment("corrections", num_eval=4)
        results = env.evaluate_sync(server.url, "corrections", sampling_args={"max_tokens": 64})
    assert None not in results.reward
