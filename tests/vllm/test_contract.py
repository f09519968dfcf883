"""Every route and field of vLLM's that we use is there, and docs/training.md lists it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import tiny_world
import torch
import vllm_world

from verifiers.inference.server_pool import ServerLoad
from verifiers.inference.wire import NEUTRAL_SAMPLING
from verifiers.rollouts.rollout import Rollout, TokenSequence
from verifiers.rollouts.teacher import Teacher
from verifiers.types import Outcome, RolloutKey

ROOT = Path(__file__).parents[2]

ROUTES = {
    "/health": "get",
    "/version": "get",
    "/server_info": "get",
    "/v1/models": "get",
    "/v1/chat/completions": "post",
    "/v1/completions": "post",
    "/v1/chat/completions/derender": "post",
    "/tokenize": "post",
    "/inference/v1/generate": "post",
    "/pause": "post",
    "/resume": "post",
    "/weight_info": "get",
    "/collective_rpc": "post",
    "/reset_prefix_cache": "post",
    "/update_weight_version": "post",
    "/get_world_size": "get",
    "/init_weight_transfer_engine": "post",
    "/start_weight_update": "post",
    "/update_weights": "post",
    "/finish_weight_update": "post",
    "/v1/load_lora_adapter": "post",
    "/v1/unload_lora_adapter": "post",
}

FIELDS = {
    "ChatCompletionRequest": "model messages tools temperature max_tokens seed logprobs top_logprobs "
    f"return_tokens_as_token_ids return_token_ids {' '.join(NEUTRAL_SAMPLING)}",
    "CompletionRequest": "model prompt temperature max_tokens seed logprobs return_tokens_as_token_ids "
    f"return_token_ids {' '.join(NEUTRAL_SAMPLING)}",
    "GenerateRequest": "model token_ids sampling_params",
    "LoadLoRAAdapterRequest": "lora_name lora_path",
    "UnloadLoRAAdapterRequest": "lora_name",
}

PARAMETERS = {
    "/pause": "mode",
    "/reset_prefix_cache": "reset_running_requests",
    "/server_info": "config_format",
}


@pytest.fixture(scope="module")
def openapi(server: vllm_world.Server) -> dict[str, Any]:
    described: dict[str, Any] = server.ask("/openapi.json")
    return described


@pytest.mark.parametrize("route", ROUTES)
def test_the_route_is_there_and_listed(openapi: dict[str, Any], route: str) -> None:
    assert ROUTES[route] in openapi["paths"].get(route, {})
    assert f"`{route}`" in (ROOT / "docs/training.md").read_text()


def test_it_tells_how_full_it_is(server: vllm_world.Server) -> None:
    server.sample([1, 2, 3])
    load = ServerLoad()
    assert load.take(server.metrics())
    assert load.metrics().keys() == {"server/running", "server/waiting", "server/cache_use"}


@pytest.mark.parametrize("schema", FIELDS)
def test_the_fields_of_a_request_are_there(openapi: dict[str, Any], schema: str) -> None:
    known = openapi["components"]["schemas"][schema]["properties"]
    assert set(FIELDS[schema].split()) <= set(known)


@pytest.mark.parametrize("route", PARAMETERS)
def test_the_parameters_of_a_route_are_there(openapi: dict[str, Any], route: str) -> None:
    parameters = openapi["paths"][route][ROUTES[route]]["parameters"]
    assert PARAMETERS[route] in {parameter["name"] for parameter in parameters}


def test_a_chat_answer_has_the_ids_and_log_probs_that_training_reads(server: vllm_world.Server) -> None:
    body = {
        "model": "policy",
        "messages": [{"role": "user", "content": "go"}],
        "max_tokens": 5,
        "logprobs": True,
        "return_token_ids": True,
        "ignore_eos": True,
        "seed": 3,
    }
    answer = server.ask("/v1/chat/completions", body)
    choice = answer["choices"][0]
    assert answer["prompt_token_ids"]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == 5
    assert choice["finish_reason"] == "length"
    assert server.ask("/v1/chat/completions", body)["choices"][0]["token_ids"] == choice["token_ids"]


def test_an_answer_in_tokens_has_ids_log_probs_and_versions(server: vllm_world.Server) -> None:
    choice = server.sample([5, 6, 7], max_tokens=6)
    assert len(choice["token_ids"]) == len(vllm_world.log_probs(choice)) == 6
    assert [(span["start"], span["end"]) for span in choice["weight_versions"]] == [(0, 6)]


def test_the_server_says_what_the_trainer_asks(server: vllm_world.Server) -> None:
    from verifiers.inference.server_client import ServerClient
    from verifiers.train.weight_sync.shared_directory import LoraSync
    from verifiers.train.weight_sync.verification import check_capabilities, read_capabilities

    client = ServerClient(server.url)
    found = asyncio.run(read_capabilities(client))
    assert (found.software, found.models[0], found.max_model_len) == ("vLLM", "policy", 512)
    assert (found.log_probs_mode, found.dtype, found.max_logprobs) == ("processed_logprobs", "float32", 20)
    assert (found.max_lora_rank, found.loads_adapters, found.transfer_backend) == (8, True, "")
    assert found.version is not None
    assert found.version.startswith("0.")
    assert found.sample_ids
    check_capabilities(found, missing=LoraSync(server.url).missing_at(found, 8), needed_tokens=512)


def test_a_teacher_tells_the_log_probs_of_a_plain_pass(server: vllm_world.Server, models: dict[str, Path]) -> None:
    prompt, said = [5, 6, 7, 8], [9, 10, 11]
    row = TokenSequence(prompt, said, [1, 0, 1], [-1.0] * 3, [0] * 3)
    rollout = Rollout(RolloutKey(0, 0, 0), Outcome.COMPLETED, "p", "c", reward=1.0, rows=[row], turns=1)
    asyncio.run(Teacher(server.url, "policy", top_k=3).judge([rollout]))
    assert rollout.outcome is Outcome.COMPLETED, rollout.failure
    policy = tiny_world.plain_model(models["policy"])
    plain = policy(torch.tensor([prompt + said])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    expected = [plain[0, said[0]].item(), 0.0, plain[2, said[2]].item()]
    assert row.teacher_logprobs is not None
    assert list(row.teacher_logprobs) == pytest.approx(expected, abs=1e-4)
    assert row.teacher_ids is not None
    assert list(row.teacher_ids) == [*plain[0].topk(3).indices.tolist(), *plain[2].topk(3).indices.tolist()]
