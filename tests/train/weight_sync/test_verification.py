"""Missing abilities of a server are named before anything is sampled, each with the flag that gives it."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from verifiers.errors import ConfigError, WeightSyncError
from verifiers.inference.server_client import ServerClient
from verifiers.testing import FakeOpenAIServer, Fault
from verifiers.train.weight_sync.nccl import NcclSync
from verifiers.train.weight_sync.protocol import WeightSync
from verifiers.train.weight_sync.publisher import WeightPublisher, default_weight_sync
from verifiers.train.weight_sync.shared_directory import DirectorySync, LoraSync
from verifiers.train.weight_sync.verification import (
    OLDEST_VLLM,
    SAMPLE_TEXT,
    Capabilities,
    check_capabilities,
    old_server,
    read_capabilities,
)

COMPLETE = Capabilities(
    root="http://127.0.0.1:1",
    software="vLLM",
    version="0.32.0",
    models=("policy",),
    max_model_len=100,
    log_probs_mode="processed_logprobs",
    sample_ids=(1, 2, 3),
    max_lora_rank=8,
    dtype="bfloat16",
    transfer_backend="nccl",
    loads_adapters=True,
)


def sync_of(kind: str, url: str, directory: str | None = None) -> WeightSync:
    names: dict[str, Any] = {"weight_sync": kind, "weight_sync_dir": directory, "weight_sync_timeout": 1.0}
    args: Any = SimpleNamespace(rollout_device=None, **names)
    server: Any = SimpleNamespace(base_url=url, api_key="EMPTY")
    return default_weight_sync(args, [server], None, None)


def check(found: Capabilities, weight_sync: str = "directory", adapter_rank: int = 8, **options: Any) -> None:
    sync = sync_of(weight_sync, found.root)
    check_capabilities(
        found,
        **{
            "missing": sync.missing_at(found, adapter_rank),
            "model": "policy",
            "encode": lambda text: [1, 2, 3],
            "needed_tokens": 100,
            "longest_row": 7,
            **options,
        },
    )


def changed(**fields: Any) -> Capabilities:
    return dataclasses.replace(COMPLETE, **fields)


@pytest.mark.parametrize("kind", ["directory", "nccl", "lora"])
def test_a_complete_server_passes(kind: str) -> None:
    check(COMPLETE, weight_sync=kind)


def test_a_server_that_says_nothing_is_not_refused_for_it() -> None:
    check(Capabilities(root="http://127.0.0.1:1"))


@pytest.mark.parametrize(
    ("found", "options", "flag"),
    [
        (changed(version="0.27.9"), {}, r"it is vLLM 0\.27\.9, and training needs 0\.28 or later"),
        (changed(version="0.10.1.1"), {}, r"it is vLLM 0\.10\.1\.1, and training needs 0\.28 or later"),
        (changed(log_probs_mode="raw_logprobs"), {}, "--logprobs-mode processed_logprobs"),
        (changed(models=("a", "b")), {}, r"'a', 'b', not 'policy'.*--served-model-name policy"),
        (changed(sample_ids=(1, 2)), {}, "encodes a sample as 2 tokens and the trainer's as 3.*--tokenizer"),
        (changed(sample_ids=(1, 2, 4)), {}, "or as other ones"),
        (
            COMPLETE,
            {"needed_tokens": 101, "longest_row": 7},
            "context is 100 tokens.*training row 7.*--max-model-len 101",
        ),
        (changed(transfer_backend=""), {"weight_sync": "nccl"}, "--weight-transfer-config"),
        (changed(software=None), {"weight_sync": "nccl"}, "needs vLLM"),
        (changed(max_lora_rank=0), {"weight_sync": "lora"}, "--enable-lora --max-lora-rank 8"),
        (changed(max_lora_rank=4), {"weight_sync": "lora"}, "up to rank 4, and the policy's has 8"),
        (changed(loads_adapters=False), {"weight_sync": "lora"}, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        (changed(software=None, max_lora_rank=None), {"weight_sync": "lora"}, "merged weights"),
        (
            changed(image_reader="Pixels of transformers 5.23.0"),
            {"image_reader": "PixelsPil of transformers 5.23.0"},
            r"by Pixels of transformers 5\.23\.0 and the trainer by PixelsPil.*torchvision for both or for neither",
        ),
    ],
)
def test_what_is_missing_is_named_with_what_gives_it(found: Capabilities, options: Any, flag: str) -> None:
    with pytest.raises(WeightSyncError, match=rf"127\.0\.0\.1:1 cannot be trained against: .*{flag}"):
        check(found, **options)


@pytest.mark.parametrize("version", ["0.28.0", "1.0.0", "0.1.dev7", None])
def test_a_vllm_that_has_the_routes_or_names_no_release_passes(version: str | None) -> None:
    check(changed(version=version))


def test_the_launcher_and_the_trainer_know_the_same_oldest_vllm() -> None:
    source = (Path(__file__).parents[3] / "servers/vllm/verifiers_vllm/versions.py").read_text()
    (oldest,) = re.findall(r"^OLDEST: Minor = \((\d+), (\d+)\)", source, re.MULTILINE)
    assert tuple(map(int, oldest)) == OLDEST_VLLM


def test_everything_that_is_missing_is_named_at_once() -> None:
    with pytest.raises(WeightSyncError, match=r"processed_logprobs.*; .*max-model-len"):
        check(changed(log_probs_mode="raw_logprobs", max_model_len=9))


def test_sampling_whose_tokens_vllm_cannot_tell_is_refused_before_anything_is_sampled() -> None:
    vllm: Any = SimpleNamespace(mask_source="logprobs", _max_logprobs=20, vocab_size=1000)
    embedded: Any = SimpleNamespace(mask_source="sampling_mask", _max_logprobs=-1, vocab_size=1000)
    for sampled in ({}, {"top_k": 12}, {"top_k": 12, "top_p": 0.9}, {"top_p": 1.0, "top_k": -1}):
        WeightPublisher.require_masks(vllm, [sampled])
    for sampled, message in (
        ({"top_p": 0.9}, "'top_p' of 0.9, and vLLM tells .* only within a top_k: set top_k too"),
        ({"top_k": 50}, "at most 20 log-probs a token, and it takes 58 .*--max-logprobs 58"),
    ):
        WeightPublisher.require_masks(embedded, [sampled])
        with pytest.raises(ConfigError, match=message):
            WeightPublisher.require_masks(vllm, [{}, sampled])


class Vllm(ServerClient):
    """A server that describes itself as vLLM does."""

    version = "0.32.0"

    async def request(self, method: str, path: str, body: Any = None, timeout_s: float | None = None) -> Any:
        config = {
            "model_config": {"logprobs_mode": "raw_logprobs", "dtype": "torch.bfloat16"},
            "lora_config": {"max_lora_rank": 16},
            "weight_transfer_config": {"backend": "nccl"},
        }
        answers = {
            ("GET", "/v1/models"): {"data": [{"id": name, "max_model_len": 64} for name in ("policy", "adapter")]},
            ("GET", "/version"): {"version": self.version},
            ("GET", "/server_info?config_format=json"): {
                "vllm_config": config,
                "vllm_env": {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": True},
            },
            ("POST", "/tokenize"): {"tokens": [5, 6]},
        }
        if path == "/tokenize":
            assert body == {"model": "policy", "prompt": SAMPLE_TEXT, "add_special_tokens": False}
        return answers[method, path]


async def test_a_vllm_is_read() -> None:
    vllm = Vllm("http://127.0.0.1:1/v1")
    assert await read_capabilities(vllm) == Capabilities(
        root=vllm.root,
        software="vLLM",
        version="0.32.0",
        models=("policy", "adapter"),
        max_model_len=64,
        log_probs_mode="raw_logprobs",
        sample_ids=(5, 6),
        max_lora_rank=16,
        dtype="bfloat16",
        transfer_backend="nccl",
        loads_adapters=True,
    )


@pytest.mark.slow
async def test_a_server_that_fails_or_hangs_once_is_asked_again() -> None:
    with FakeOpenAIServer(route_faults={"/v1/models": [Fault(500), Fault.hang(), Fault.disconnect()]}) as server:
        assert (await read_capabilities(ServerClient(server.url, timeout_s=2.0))).models == ("fake",)


async def test_a_server_that_lacks_the_routes_is_told_its_age() -> None:
    vllm = Vllm("http://127.0.0.1:1/v1")
    assert await old_server(vllm) is None
    vllm.version = "0.21.3"
    assert await old_server(vllm) == "it is vLLM 0.21.3, and training needs 0.28 or later; upgrade vLLM there"
    with FakeOpenAIServer() as other:
        assert await old_server(ServerClient(other.url)) is None


@pytest.mark.parametrize("body", ["[1]", '{"data": [3]}', '{"data": [{"max_model_len": "long"}]}'])
async def test_descriptions_that_cannot_be_read_are_one_sentence(body: str) -> None:
    answer = Fault(200, body=body)
    with FakeOpenAIServer(route_faults={"/v1/models": answer}) as s, pytest.raises(WeightSyncError, match="be read"):
        await read_capabilities(ServerClient(s.url))


async def test_a_server_of_another_kind_is_read_as_far_as_it_goes() -> None:
    with FakeOpenAIServer("x") as server:
        control = ServerClient(server.url)
        assert await read_capabilities(control) == Capabilities(root=control.root, models=("fake",))
        assert server.requests == []


@pytest.mark.parametrize(
    ("kind", "url", "directory", "chosen"),
    [
        ("auto", "http://127.0.0.1:1/v1", None, DirectorySync),
        ("auto", "http://localhost:1/v1", None, DirectorySync),
        ("auto", "http://node-2:8000/v1", None, NcclSync),
        ("auto", "http://node-2:8000/v1", "/mnt/shared", DirectorySync),
        ("directory", "http://node-2:8000/v1", None, DirectorySync),
        ("nccl", "http://127.0.0.1:1/v1", None, NcclSync),
        ("lora", "http://127.0.0.1:1/v1", None, LoraSync),
    ],
)
def test_the_kind_follows_the_setting_and_where_the_servers_are(
    kind: str, url: str, directory: str | None, chosen: type
) -> None:
    assert type(sync_of(kind, url, directory)) is chosen
