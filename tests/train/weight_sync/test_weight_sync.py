"""The policy's tensors as a server names them, and what may go wrong on their way there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_models import random_qwen3, two_role_tokenizer

from verifiers.errors import ConfigError, NotFiniteError, WeightProbeError, WeightSyncError
from verifiers.inference.server_client import NoAnswerError, ServerClient
from verifiers.inference.server_pool import ServerPool
from verifiers.testing import FakeOpenAIServer, Fault
from verifiers.train.config import lora_defaults
from verifiers.train.weight_sync.protocol import policy_tensors, require_finite
from verifiers.train.weight_sync.shared_directory import DirectorySync
from verifiers.train.weight_sync.verification import LogprobCheck, ask_server

SOME = {"model.weight": torch.arange(4.0)}


def network(tied: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    model = random_qwen3(two_role_tokenizer(""), initializer_range=0.02, tie_word_embeddings=tied)
    return model.to(dtype).eval()


def adapted(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    from peft import get_peft_model

    config = lora_defaults()
    for name, value in options.items():
        setattr(config, name, value)
    model = get_peft_model(network(dtype=dtype), config).eval()
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "modules_to_save" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=torch.arange(8)[None]).logits
    return result


def served(tensors: dict[str, torch.Tensor], tied: bool = False) -> Any:
    """Return a server's copy: made from the config, filled by name."""
    model = network(tied)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert missing == (["lm_head.weight"] if tied else [])
    model.tie_weights()
    return model


def test_a_plain_models_tensors_are_its_checkpoint(tmp_path: Path) -> None:
    model = network()
    model.save_pretrained(tmp_path)
    tensors, saved = policy_tensors(model), load_file(tmp_path / "model.safetensors")
    assert tensors.keys() == saved.keys()
    assert all(torch.equal(tensors[name], saved[name]) for name in saved)
    assert not any(tensor.requires_grad for tensor in tensors.values())


def test_tied_weights_appear_once_under_their_first_name() -> None:
    model = network(tied=True)
    tensors = policy_tensors(model)
    assert "model.embed_tokens.weight" in tensors
    assert "lm_head.weight" not in tensors
    assert torch.equal(logits(served(tensors, tied=True)), logits(model))


@pytest.mark.parametrize("options", [{}, {"modules_to_save": ["lm_head"]}], ids=["lora", "lora and a whole head"])
def test_an_adapter_reaches_the_server_merged_into_plain_weights(options: dict[str, Any]) -> None:
    model = adapted(**options)
    expected = logits(model)
    assert not torch.allclose(expected, logits(network()), atol=1e-2)
    tensors = policy_tensors(model)
    assert tensors.keys() == network().state_dict().keys()
    assert torch.allclose(logits(served(tensors)), expected, atol=1e-5)
    # the policy computes as before, with its adapter beside its weights
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pushing_an_adapter_leaves_the_policy_as_it_was_to_the_last_bit(dtype: torch.dtype) -> None:
    model = adapted(dtype)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for _ in range(5):
        policy_tensors(model)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_an_adapter_is_taken_out_again_where_it_cannot_be_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    merge = model.merge_adapter

    def fail() -> None:
        merge()
        raise NotImplementedError("a layer without a merge")

    monkeypatch.setattr(model.base_model, "merge_adapter", fail)
    with pytest.raises(ConfigError, match=r"cannot be merged \(a layer without a merge\)"):
        policy_tensors(model)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not any(getattr(layer, "merged_adapters", ()) for layer in model.modules())


def test_a_push_writes_one_version_and_removes_the_one_before(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    with FakeOpenAIServer() as server:
        sync = DirectorySync(server.url, str(tmp_path))
        sync.connect(60.0)
        sync.push(SOME.items(), 7)
        (call,) = [call for call in server.weight_calls if call.path == "/collective_rpc"]
        assert call.body["method"] == "reload_weights"
        path = Path(call.body["kwargs"]["weights_path"])
        assert path.name == "version-7"
        with safe_open(path / "model.safetensors", "pt") as file:
            seen.update(keys=list(file.keys()), metadata=file.metadata())
        assert server.weight_version == 7
        assert not server.paused
        sync.push(SOME.items(), 8)
        assert not path.exists()
        assert [kept.name for kept in path.parent.iterdir()] == ["version-8"]
        # a restarted server can still load the newest one
        server.weight_version = "default"
        assert sync.pool.run(sync.pool.wait_until_restored(server.url, 30.0))
        assert server.weight_version == 8
    assert seen == {"keys": ["model.weight"], "metadata": {"format": "pt", "version": "7"}}
    sync.close()
    sync.close()
    assert list(tmp_path.iterdir()) == []


def test_a_refused_push_names_step_and_route_and_leaves_nothing(tmp_path: Path) -> None:
    fault = Fault(400, times=9, body={"error": {"message": "no tensor of that name"}})
    with FakeOpenAIServer(route_faults={"/collective_rpc": fault}) as server:
        sync = DirectorySync(server.url, str(tmp_path))
        with pytest.raises(WeightSyncError, match=r"step 7 did not reach.*/collective_rpc.* 400.*no tensor of that"):
            sync.push(SOME.items(), 7)
        assert not list(tmp_path.glob("*/version-*"))
        sync.close()


def test_a_directory_without_room_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 0))
    with FakeOpenAIServer() as server:
        with pytest.raises(WeightSyncError, match=r"0 MB free.*set weight_sync_dir"):
            DirectorySync(server.url, str(tmp_path)).push(SOME.items(), 1)
        assert server.weight_calls == []
    assert not list(tmp_path.glob("*/*"))


Score = Callable[[Any, Any], list[float]]


def probe(
    server: FakeOpenAIServer, score: Score, version: int = 0, prompt: Any = "hello", dtype: str = "float32"
) -> list[float]:
    """Return the differences of a check; the server computes in `dtype`."""
    found: list[float] = []
    pool = ServerPool([server.url])
    check = LogprobCheck(
        lambda: {"model": "fake", "prompt": prompt, "temperature": 1.0}, score, on_result=found.append
    )
    check.note_dtype(dtype)
    try:
        check.run(version, pool)
    finally:
        pool.stop()
    return found


@pytest.mark.parametrize("prompt", ["hello", [{"role": "user", "content": "hello"}]], ids=["completion", "chat"])
def test_the_probe_compares_every_sampled_token(prompt: Any) -> None:
    from verifiers.testing.script import fake_logprob

    def right(_: Any, ids: Any) -> list[float]:
        return [fake_logprob(token) for token in ids]

    def wrong_in_the_last(_: Any, ids: Any) -> list[float]:
        return [*right(_, ids[:-1]), right(_, ids[-1:])[0] - 0.01]

    with FakeOpenAIServer("abc") as server:
        assert probe(server, right, prompt=prompt) == [0.0]
        with pytest.raises(WeightProbeError, match=r"differ from the trainer's by 0\.0100"):
            probe(server, wrong_in_the_last, prompt=prompt)
        with pytest.raises(WeightProbeError, match=r"differ from the trainer's by nan"):
            probe(server, lambda _, ids: [*right(_, ids[:-1]), float("nan")], prompt=prompt)
        with pytest.raises(WeightProbeError, match="samples from version 0; if another run pushes"):
            probe(server, right, version=3, prompt=prompt)


def test_in_half_precision_the_mean_difference_counts_as_one_token_may_be_far_off() -> None:
    from verifiers.testing.script import fake_logprob

    def off_by(*more: float) -> Score:
        return lambda _, ids: [fake_logprob(token) + one for token, one in zip(ids, more, strict=True)]

    with FakeOpenAIServer("abcdefg") as server:
        assert probe(server, off_by(0.4, *[0.0] * 7), dtype="bfloat16") == [pytest.approx(0.05)]
        with pytest.raises(WeightProbeError, match=r"by 0\.2600 .*differ \(trainer float32, server bfloat16\)"):
            probe(server, off_by(*[0.26] * 8), dtype="bfloat16")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_found_and_large_ones_are_not_taken_for_it(
    dtype: torch.dtype, value: float
) -> None:
    tensors = {"ids": torch.ones(3, dtype=torch.int64), "none": torch.empty(0, dtype=dtype)}
    tensors |= {"large": torch.full((9,), torch.finfo(dtype).max, dtype=dtype), "last": torch.ones(9, dtype=dtype)}
    require_finite(tensors, "saved")
    tensors["last"][8] = value
    with pytest.raises(NotFiniteError, match=r"last has values .* so the weights are not saved"):
        require_finite(tensors, "saved")


def sampled(token_id: int, logprob: float) -> Fault:
    """Return an answer with one token."""
    choice = {"index": 0, "text": "a", "token_ids": [token_id], "logprobs": {"token_logprobs": [logprob]}}
    return Fault(200, body=json.dumps({"choices": [choice], "prompt_token_ids": [1]}))


@pytest.mark.parametrize(
    "fault",
    [Fault(500), Fault(429), Fault.hang(), sampled(1, float("nan")), sampled(500, -1.0), sampled(-1, -1.0)],
    ids=["500", "429", "hang", "nan", "beyond the vocabulary", "negative"],
)
def test_the_probe_is_asked_again_after_an_answer_that_may_pass(fault: Fault) -> None:
    with FakeOpenAIServer("abc", faults=[fault, None]) as server:
        client = ServerClient(server.url)
        ask = ask_server(client, "fake", "hello", temperature=1.0, version=0, vocab_size=128, timeout_s=6.0)
        assert asyncio.run(ask)["choices"][0]["token_ids"] not in ([500], [-1])


def test_a_probe_that_never_gets_an_answer_ends_in_time_with_its_cause() -> None:
    with FakeOpenAIServer("abc", faults=Fault.hang(times=100)) as server:
        ask = ask_server(ServerClient(server.url), "fake", "hello", temperature=1.0, version=0, timeout_s=1.5)
        with pytest.raises(NoAnswerError, match="timed out") as raised:
            asyncio.run(ask)
    assert raised.value.timed_out


def test_the_modules_of_a_reference_adapter_are_not_pushed() -> None:
    model = adapted(modules_to_save=["lm_head"])
    model.add_adapter("ref", model.peft_config["default"])
    tensors = policy_tensors(model)
    assert set(tensors) == set(network().state_dict())
    head = model.get_base_model().lm_head.modules_to_save["default"]
    assert torch.equal(tensors["lm_head.weight"], head.weight)
