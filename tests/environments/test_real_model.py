"""A real language model of 135 M parameters starts between 0.1 and 0.6 on the packages that are made for it too."""

from __future__ import annotations

from pathlib import Path

import pytest

import verifiers as vf

PROMPTS, MAX_TOKENS = 32, 80


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["structured-output", "instructions"])
def test_the_easiest_level_starts_between_a_tenth_and_six_tenths(name: str, smollm2: Path) -> None:
    from verifiers_embedded.engine.loading import load_model
    from verifiers_embedded.in_process_server import InProcessServer

    env = vf.load_environment(name, num_eval=PROMPTS)
    loaded = load_model(smollm2, device="cpu", dtype="float32", max_model_len=1024)
    with InProcessServer(loaded, name="smollm2", slots=32, threads=2, prefix_bytes=2**26, seed=5) as server:
        sampling = {"temperature": 1.0, "max_tokens": MAX_TOKENS}
        rewards = env.evaluate_sync(server.url, "smollm2", sampling_args=sampling)["reward"]
    assert len(rewards) == PROMPTS
    assert 0.1 <= sum(rewards) / PROMPTS <= 0.6
