"""A next turn is computed from where the last one ended, exactly, within its memory, and never from old weights."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from verifiers_embedded.engine import batch
from verifiers_embedded.engine.prefixes import PrefixStore


async def play(server: Any, turns: int, opening: str, seed: int) -> list[dict[str, Any]]:
    """Play a conversation whose every prompt continues from the last answer's token ids."""
    ids = (await server.chat(opening, max_tokens=1))["prompt_token_ids"]
    answers = []
    for turn in range(turns):
        sampling = {"max_tokens": 12, "seed": seed + turn, "logprobs": 0, "ignore_eos": True}
        _, answer = await server.post("/inference/v1/generate", {"token_ids": ids, "sampling_params": sampling})
        choice = answer["choices"][0]
        answers.append({"prompt": ids, **choice})
        ids = ids + choice["token_ids"] + [7 + turn, 8, 9 + seed]
    return answers


def check(answers: list[dict[str, Any]], model_dir: Any, reference: Any) -> None:
    for answer in answers:
        log_probs = [entry["logprob"] for entry in answer["logprobs"]["content"]]
        expected = reference.log_probs(model_dir, answer["prompt"], answer["token_ids"])
        assert log_probs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("cells", [batch.MASK_CELLS, 300])
async def test_turns_that_go_on_sample_from_the_models_own_distribution(
    start: Any, model_dir: Any, reference: Any, monkeypatch: pytest.MonkeyPatch, cells: int
) -> None:
    # few cells: what is new does not fit into one pass
    monkeypatch.setattr(batch, "MASK_CELLS", cells)
    server = await start()
    games = await asyncio.gather(*(play(server, 5, "a question " + "x" * seed, seed) for seed in range(12)))
    for answers in games:
        check(answers, model_dir, reference)
    reused = server.engine.prefixes
    assert reused["hits"] >= 12 * 4
    assert reused["tokens_reused"] > 12 * 4 * 12


async def test_a_group_that_continues_one_sequence_is_computed_once_and_sampled_apart(
    start: Any, model_dir: Any, reference: Any
) -> None:
    server = await start()
    first = (await play(server, 1, "a question long enough to be kept", 1))[0]
    ids = first["prompt"] + first["token_ids"] + [9, 9, 9]
    hits = server.engine.prefixes["hits"]
    sampling = {"max_tokens": 10, "logprobs": 0, "ignore_eos": True, "n": 8, "seed": 5}
    _, answer = await server.post("/inference/v1/generate", {"token_ids": ids, "sampling_params": sampling})
    check([{"prompt": ids, **choice} for choice in answer["choices"]], model_dir, reference)
    assert server.engine.prefixes["hits"] == hits + 1
    assert len({tuple(choice["token_ids"]) for choice in answer["choices"]}) == 8


async def test_a_prompt_that_leaves_the_kept_tokens_midway_uses_what_it_shares(
    start: Any, model_dir: Any, reference: Any
) -> None:
    server = await start()
    ids = list(range(5, 60))
    for body in (ids, [*ids[:41], 80, 81, 82], ids[:41]):
        sampling = {"max_tokens": 6, "logprobs": 0, "seed": 1}
        _, answer = await server.post("/inference/v1/generate", {"token_ids": body, "sampling_params": sampling})
        check([{"prompt": body, **answer["choices"][0]}], model_dir, reference)
    assert server.engine.prefixes["tokens_reused"] == 41 + 40


async def test_after_a_push_nothing_is_computed_from_old_keys(
    start: Any, model_dir: Any, other_dir: Any, reference: Any, save: Any
) -> None:
    server = await start()
    first = (await play(server, 2, "a question long enough to be kept", 1))[-1]
    assert server.engine.prefixes["held"] > 0
    assert (await server.push(other_dir, "1"))[0] == 200
    assert server.engine.prefixes["held"] == 0
    ids = first["prompt"] + first["token_ids"]
    _, answer = await server.post(
        "/inference/v1/generate", {"token_ids": ids, "sampling_params": {"logprobs": 0, "max_tokens": 8}}
    )
    check([{"prompt": ids, **answer["choices"][0]}], other_dir, reference)


# -- the store --------------------------------------------------------------------------------------------------


def states(length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.zeros(length, 1, 4), torch.zeros(length, 1, 4))]


def test_memory_is_bounded_and_the_least_recently_used_goes_first() -> None:
    one = 32 * 2 * 4 * 4
    store = PrefixStore(3 * one)
    prompts = [[start + place for place in range(32)] for start in (0, 100, 200, 300)]
    for prompt in prompts[:3]:
        store.keep(prompt, states(32))
    assert store.find(prompts[0]) is not None
    store.keep(prompts[3], states(32))
    assert store.bytes == 3 * one
    assert [store.find(prompt) is not None for prompt in prompts] == [True, False, True, True]


def test_where_a_state_cannot_be_cut_back_a_prefix_is_found_whole_or_not_at_all() -> None:
    store = PrefixStore(2**20, whole=True)
    state = [(torch.zeros(4),)]
    for length in (40, 20, 33):
        store.keep([*range(length), 99], state)
    assert store.find([*range(40)]) is None
    for length in (20, 33, 40):
        prefix, shared = store.find([*range(length), 99, 1, 2]) or (None, 0)
        assert prefix is not None
        assert shared == len(prefix.tokens) == length + 1
    # of two that are begun with, the longer one; it takes the place of the one that it goes on from
    store.keep([*range(20), 99, *range(30)], state)
    assert (store.find([*range(20), 99, *range(31)]) or (None, 0))[1] == 51
    assert len(store) == 3
