"""A frozen copy in this process: equal to the weights of the last push, and served like any model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM
from verifiers_embedded.errors import WeightsError
from verifiers_embedded.in_process_server import InProcessServer, frozen_copy

IDS = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture
def policy(model_dir: Path) -> Any:
    return Qwen3ForCausalLM.from_pretrained(model_dir, dtype=torch.float32)


@pytest.fixture
def server(policy: Any, model_dir: Path) -> Iterator[InProcessServer]:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    with InProcessServer.of_policy(policy.config, policy.state_dict(), tokenizer, device="cpu", threads=1) as running:
        yield running


def equal(model: Any, other: Any) -> bool:
    ours, theirs = model.state_dict(), other.state_dict()
    buffers = dict(other.named_buffers())
    return (
        ours.keys() == theirs.keys()
        and all(torch.equal(ours[name], theirs[name]) for name in ours)
        and all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    )


async def generate(server: InProcessServer, **sampling: Any) -> dict[str, Any]:
    body = {"token_ids": IDS[0].tolist(), "sampling_params": {"max_tokens": 8, "logprobs": 0, "seed": 1, **sampling}}
    root = server.url.removesuffix("/v1")
    async with (
        aiohttp.ClientSession() as session,
        session.post(root + "/inference/v1/generate", json=body) as response,
    ):
        assert response.status == 200
        return (await response.json())["choices"][0]


def test_the_copy_is_equal_bit_for_bit_and_shares_no_memory(policy: Any, server: InProcessServer) -> None:
    assert equal(server.model, policy)
    mine = {tensor.data_ptr() for tensor in policy.state_dict().values()}
    assert not mine & {tensor.data_ptr() for tensor in server.model.state_dict().values()}
    assert not server.model.training
    assert not any(parameter.requires_grad for parameter in server.model.parameters())


def test_tied_embeddings_are_one_tensor_in_the_copy(tied_dir: Path) -> None:
    tied = Qwen3ForCausalLM.from_pretrained(tied_dir, dtype=torch.float32)
    copied = frozen_copy(tied.config, tied.state_dict(), "cpu")
    assert copied.lm_head.weight is copied.model.embed_tokens.weight
    assert equal(copied, tied)


async def test_a_copy_in_half_precision_rounds_what_is_pushed(policy: Any, model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    options: dict[str, Any] = {"device": "cpu", "dtype": torch.bfloat16, "threads": 1}
    with InProcessServer.of_policy(policy.config, policy.state_dict(), tokenizer, **options) as server:
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        server.push(policy.state_dict(), "1")
        pushed = server.model.state_dict()
        assert all(torch.equal(pushed[name], value.bfloat16()) for name, value in policy.state_dict().items())
        assert len((await generate(server, ignore_eos=True))["token_ids"]) == 8


def test_its_logits_do_not_move_until_the_next_push(policy: Any, server: InProcessServer) -> None:
    with torch.no_grad():
        before = server.model(IDS).logits.clone()
        for parameter in policy.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        # a live module that leads back to the policy would follow it here
        assert torch.equal(server.model(IDS).logits, before)
        server.push(policy.state_dict(), "1")
        assert equal(server.model, policy)
        # products by oneDNN round otherwise than torch's own
        torch.testing.assert_close(server.model(IDS).logits, policy.eval()(IDS).logits, rtol=1e-5, atol=1e-5)
    assert server.version == "1"


def test_a_patched_forward_is_not_copied(policy: Any) -> None:
    calls = []
    original = policy.forward
    policy.forward = lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs)
    copy = frozen_copy(policy.config, policy.state_dict(), "cpu")
    copy(IDS)
    assert calls == []


def test_names_that_do_not_match_are_an_error_that_changes_nothing(policy: Any, server: InProcessServer) -> None:
    tensors = {name + ".x" if "norm" in name else name: value + 1 for name, value in policy.state_dict().items()}
    with pytest.raises(WeightsError, match=r"missing: .*norm.*unknown: .*norm"):
        server.push(tensors, "1")
    assert equal(server.model, policy)
    assert server.version == "default"


async def test_it_answers_over_http_and_stamps_the_version(
    policy: Any, server: InProcessServer, reference: Any
) -> None:
    first = await generate(server)
    assert first["weight_versions"] == [{"version": "default", "start": 0, "end": len(first["token_ids"])}]
    await asyncio.to_thread(server.push, {name: 1.1 * value for name, value in policy.state_dict().items()}, "4")
    second = await generate(server)
    assert [span["version"] for span in second["weight_versions"]] == ["4"]


def test_a_closed_server_refuses_pushes_at_once(policy: Any, server: InProcessServer) -> None:
    server.close()
    server.close()
    with pytest.raises(Exception, match="shutting down"):
        server.push(policy.state_dict(), "1")
