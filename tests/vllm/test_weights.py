"""The weights that a token came from, on a real vLLM: pushes, caches, requests in flight, adapters."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tiny_world
import torch
import vllm_world
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import Qwen3ForCausalLM

from verifiers.inference.server_client import RefusedError, ServerClient
from verifiers.inference.server_pool import WeightUpdate
from verifiers.train.weight_sync.shared_directory import DirectorySync

PROMPT = [7, 3, 11, 2, 5, 19, 8]
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def weights(models: dict[str, Path]) -> dict[str, Weights]:
    return {name: load_file(models[name] / "model.safetensors") for name in ("policy", "other")}


@pytest.fixture
def sync(server: vllm_world.Server) -> Any:
    made = DirectorySync(server.url)
    made.connect(10.0)
    yield made
    made.close()


def plain(state: Weights, directory: Path, prompt: list[int], sampled: list[int], temperature: float) -> list[float]:
    """Log-probs of the sampled ids by transformers alone."""
    return tiny_world.plain_log_probs(state, directory, prompt + sampled, temperature)[len(prompt) - 1 :]


def gap(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def test_log_probs_agree_in_bfloat16_before_and_after_ten_pushes(launch: Callable[..., Any], tmp_path: Path) -> None:
    """Also that weights which were not pushed would have been noticed."""
    directory = vllm_world.make_model(tmp_path / "policy", seed=4)
    model = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.4 if parameter.dim() > 1 else 1.0)
    model.save_pretrained(directory)
    server = launch(directory, dtype="bfloat16")
    sync = DirectorySync(server.url)
    sync.connect(10.0)

    def difference(state: Weights) -> float:
        worst = 0.0
        for seed in range(4):
            choice = server.sample(PROMPT, temperature=0.8, seed=seed)
            expected = plain(state, directory, PROMPT, choice["token_ids"], 0.8)
            worst = max(worst, gap(expected, vllm_world.log_probs(choice)))
        return worst

    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    differences, stale = [difference(state)], []
    for version in range(1, 11):
        before = state
        state = {
            # drifts, but not away: bfloat16's rounding grows with the logits
            name: (0.95 * tensor if tensor.dim() > 1 else tensor)
            + 0.02 * torch.randn(tensor.shape, generator=generator)
            for name, tensor in state.items()
        }
        stale.append(difference(state))
        sync.push(state.items(), version)
        differences.append(difference(state))
        assert server.ask("/weight_info") == {"weight_version": str(version)}
        assert before is not state
    sync.close()
    server.stop()
    print("largest differences in bfloat16:", [round(value, 4) for value in differences])
    assert max(differences) <= 0.05
    assert min(stale) > 0.1


def broken_off(state: Weights, directory: Path, part: str) -> dict[str, Any]:
    """Load as far as the second of two files, which is cut; the first has a part of some layers."""
    directory.mkdir()
    first = {name: tensor for name, tensor in state.items() if part in name}
    save_file(first, directory / "model-00001-of-00002.safetensors", metadata={"format": "pt"})
    (directory / "model-00002-of-00002.safetensors").write_bytes(b"cut")
    return {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}


def difference_at(server: vllm_world.Server, state: Weights, directory: Path) -> float:
    choice = server.sample(PROMPT, seed=3)
    return gap(plain(state, directory, PROMPT, choice["token_ids"], 1.0), vllm_world.log_probs(choice))


def test_a_load_that_broke_off_leaves_nothing_of_itself_behind(
    server: vllm_world.Server, models: dict[str, Path], weights: dict[str, Weights], tmp_path: Path
) -> None:
    """vf-vllm closes the layers; this pusher does not know of the load that failed."""
    body = broken_off(weights["policy"], tmp_path / "cut", "q_proj")
    with pytest.raises(RefusedError):
        asyncio.run(ServerClient(server.url).request("POST", "/collective_rpc", body))
    sync = DirectorySync(server.url)
    sync.connect(10.0)
    sync.push(weights["other"].items(), 21)
    sync.close()
    assert sync.pool.repeated_loads == 0
    assert difference_at(server, weights["other"], models["policy"]) < 1e-3


def test_vllm_without_the_plugin_has_whole_weights_after_a_load_that_broke_off(
    launch: Callable[..., Any],
    models: dict[str, Path],
    weights: dict[str, Weights],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "")
    bare = launch(models["policy"])
    sync = DirectorySync(bare.url)
    sync.connect(10.0)
    push = sync.pool.push
    cut = [broken_off(weights["policy"], tmp_path / "cut", "layers.1.self_attn.q_proj")]

    def after_a_broken_load(update: WeightUpdate) -> WeightUpdate:
        async def load(server: ServerClient, timeout_s: float) -> None:
            if cut:
                await server.request("POST", "/collective_rpc", cut.pop())
            await update.load(server, timeout_s=timeout_s)

        return WeightUpdate(update.version, load)

    sync.pool.push = lambda update: push(after_a_broken_load(update))  # type: ignore[method-assign]
    sync.push(weights["other"].items(), 1)
    sync.close()
    assert sync.pool.repeated_loads == 1
    assert difference_at(bare, weights["other"], models["policy"]) < 1e-3
    bare.stop()


def test_a_push_in_mid_answer_is_stamped_and_no_token_comes_from_old_keys_and_values(
    server: vllm_world.Server, sync: DirectorySync, models: dict[str, Path], weights: dict[str, Weights]
) -> None:
    sync.push(weights["policy"].items(), 6)
    before, deadline = server.generated_tokens(), time.monotonic() + 30
    with ThreadPoolExecutor(4) as threads:
        answers = [threads.submit(server.sample, PROMPT, max_tokens=400, seed=seed) for seed in range(16)]
        while server.generated_tokens() < before + 40:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        sync.push(weights["other"].items(), 7)
        choices = [answer.result() for answer in answers]
    assert any({span["version"] for span in choice["weight_versions"]} == {"6", "7"} for choice in choices)
    for choice in choices:
        ids = choice["token_ids"]
        by_version = {
            "6": plain(weights["policy"], models["policy"], PROMPT, ids, 1.0),
            "7": plain(weights["other"], models["policy"], PROMPT, ids, 1.0),
        }
        expected = [
            by_version[span["version"]][place]
            for span in choice["weight_versions"]
            for place in range(span["start"], span["end"])
        ]
        # the first token after the push was computed from recomputed keys and values, too
        assert gap(expected, vllm_world.log_probs(choice)) < 1e-3
        assert gap(by_version["6"], by_version["7"]) > 0.1


def test_a_shared_prompt_prefix_is_computed_again_after_a_push(
    server: vllm_world.Server, sync: DirectorySync, models: dict[str, Path], weights: dict[str, Weights]
) -> None:
    shared = [3 + place % 30 for place in range(300)]
    for version, name in ((8, "policy"), (9, "other"), (10, "policy")):
        sync.push(weights[name].items(), version)
        for tail in (5, 6, 5):
            prompt = [*shared, tail]
            choice = server.sample(prompt, max_tokens=8, seed=version)
            expected = plain(weights[name], models["policy"], prompt, choice["token_ids"], 1.0)
            assert gap(expected, vllm_world.log_probs(choice)) < 1e-3


def test_no_request_is_lost_by_a_stop_and_a_resume(server: vllm_world.Server) -> None:
    # as long as the context allows, so that a busy machine pauses them in their midst, too
    count, length, finished = 32, 500, threading.Semaphore(0)

    def ask(seed: int) -> int:
        choice = server.sample([4, 5, 6 + seed % 8], max_tokens=length, seed=seed)
        finished.release()
        return len(choice["token_ids"])

    before = server.generated_tokens()
    with ThreadPoolExecutor(count) as threads:
        answers = [threads.submit(ask, seed) for seed in range(count)]
        while server.generated_tokens() == before:
            time.sleep(0.01)
        server.ask("/pause?mode=keep", {})
        while finished.acquire(blocking=False):
            pass
        still_running = sum(not answer.done() for answer in answers)
        # one that ended just before the pause may still be on its way
        late = sum(finished.acquire(timeout=0.5) for _ in range(2))
        assert server.ask("/is_paused") == {"is_paused": True}
        assert still_running - late > 0
        server.ask("/resume", {})
        assert [answer.result() for answer in answers] == [length] * count


def test_an_adapter_alone_is_pushed_and_trained(
    server: vllm_world.Server, make_trainer: Callable[..., Any], models: dict[str, Path], weights: dict[str, Weights]
) -> None:
    base = DirectorySync(server.url)
    base.push(weights["policy"].items(), 0)
    base.close()
    trainer = make_trainer(
        models["policy"],
        tiny_world.single_turn(),
        server.url,
        peft_config=LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "o_proj"]),
        weight_sync="lora",
        max_steps=4,
        learning_rate=2e-2,
        num_batches_ahead=0,
    )
    trainer.train()
    differences = trainer.logged("sampling/probe_difference")
    assert len(differences) == 4
    assert max(differences) < 1e-3
    assert max(trainer.logged("mismatch_kl")) < 1e-4
    # what was pushed last is not what was pushed first
    with torch.no_grad():
        moved = [p.abs().max().item() for name, p in trainer.model.named_parameters() if "lora_B" in name]
    assert min(moved) > 1e-3
