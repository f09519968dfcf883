"""Answers that must fit a JSON schema do, and their log-probs are those of the masked distribution."""

from __future__ import annotations

import asyncio
import json
import math
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from json_forms import (
    LETTERS,
    LETTERS_SCHEMA,
    PERSON,
    fits,
)
from step_gate import StepGate
from verifiers_embedded.engine.batch import ActiveBatch
from verifiers_embedded.engine.constraints import GrammarCompiler
from verifiers_embedded.engine.generation import GenerationRequest, Sequence
from verifiers_embedded.engine.sampling import NoiseStream, SamplingParameters
from verifiers_embedded.text.grammars import Form, lark_grammar

pytest.importorskip("llguidance")


def letters_allowed(place: int) -> str:
    """Return the letters that may follow `place` characters under LETTERS_SCHEMA; '' where the text ends."""
    if place > LETTERS + 1:
        return ""
    return '"' if place in (0, LETTERS + 1) else "abc"


def letters_log_probs(
    reference: Any, directory: Path, server: Any, prompt: list[int], ids: list[int], temperature: float = 1.0
) -> list[float]:
    """Return the log-probs of `ids` under LETTERS_SCHEMA, from plain logits and the sets of allowed letters."""
    tokenizer = server.loaded.tokenizer
    logits = reference.logits(directory, prompt + ids)[len(prompt) - 1 : -1] / temperature
    found = []
    for place, token in enumerate(ids):
        letters = letters_allowed(place)
        allowed = [tokenizer.convert_tokens_to_ids(letter) for letter in letters] or [tokenizer.eos_token_id]
        row = torch.full_like(logits[place], -math.inf)
        row[allowed] = logits[place][allowed]
        found.append(torch.log_softmax(row, dim=-1)[token].item())
    return found


# -- what is answered -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", ["characters", "byte-level"])
async def test_whatever_a_random_model_says_parses_and_fits_the_schema(
    start: Any, long_dirs: dict[str, Path], tokens: str
) -> None:
    server = await start(long_dirs[tokens])
    answer = await server.chat(n=16, max_tokens=600, seed=1, **fits(PERSON))
    texts = [choice["message"]["content"] for choice in answer["choices"] if choice["finish_reason"] == "stop"]
    assert len(texts) > 12
    assert len(set(texts)) > 10
    for text in texts:
        jsonschema.validate(json.loads(text), PERSON)


async def test_max_tokens_and_stop_strings_cut_a_constrained_answer(start: Any) -> None:
    server = await start()
    choice = (await server.chat(max_tokens=9, **fits(LETTERS_SCHEMA)))["choices"][0]
    assert (choice["finish_reason"], len(choice["token_ids"])) == ("length", 9)
    choice = (await server.chat(max_tokens=99, stop=["a", "b"], seed=4, **fits(LETTERS_SCHEMA)))["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert set(choice["message"]["content"]) <= set('"c')


# -- exactness --------------------------------------------------------------------------------------------------


async def test_log_probs_are_those_of_the_masked_distribution(start: Any, model_dir: Path, reference: Any) -> None:
    server = await start()
    temperatures = [1.0, 0.6] * 2
    requests = [
        server.chat("x" * seed, seed=seed, max_tokens=99, temperature=temperature, **fits(LETTERS_SCHEMA))
        for seed, temperature in enumerate(temperatures)
    ]
    for answer, temperature in zip(await asyncio.gather(*requests), temperatures, strict=True):
        prompt, ids, log_probs = server.sampled(answer)
        assert len(ids) == LETTERS + 3
        expected = letters_log_probs(reference, model_dir, server, prompt, ids, temperature)
        assert log_probs == pytest.approx(expected, abs=1e-4)
        assert ids[-1] == server.loaded.tokenizer.eos_token_id
        assert log_probs[-1] == 0.0


async def test_truncation_acts_on_what_the_grammar_left(start: Any, model_dir: Path, reference: Any) -> None:
    server = await start()
    fields = {"top_k": 2, "top_logprobs": 5, "seed": 2, "max_tokens": 99}
    answer = await server.chat(**fields, **fits(LETTERS_SCHEMA))
    logits = reference.logits(model_dir, answer["prompt_token_ids"] + answer["choices"][0]["token_ids"])
    logits = logits[len(answer["prompt_token_ids"]) - 1 :]
    letters = [server.loaded.tokenizer.convert_tokens_to_ids(letter) for letter in "abc"]
    entries = answer["choices"][0]["logprobs"]["content"]
    for place in range(1, LETTERS + 1):
        top = entries[place]["top_logprobs"]
        best = logits[place][letters].topk(2)
        expected = torch.log_softmax(best.values, dim=-1).tolist()
        assert [item["token"] for item in top] == ["abc"[index] for index in best.indices.tolist()]
        assert [item["logprob"] for item in top] == pytest.approx(expected, abs=1e-4)
        assert entries[place]["token"] in "abc"


async def test_the_same_seed_gives_the_same_answer_alone_and_in_a_mixed_crowd(start: Any) -> None:
    server = await start()
    mixed = [fits(LETTERS_SCHEMA), {}, fits({"type": "object"}), {"temperature": 0.5}]
    fields = [{"seed": seed, "max_tokens": 45, **mixed[seed % 4]} for seed in range(8)]
    alone = [await server.chat(**item) for item in fields]
    crowd = await asyncio.gather(*(server.chat(**item) for item in fields))
    for one, other in zip(alone, crowd, strict=True):
        assert server.sampled(one)[1] == server.sampled(other)[1]
        assert server.sampled(one)[2] == pytest.approx(server.sampled(other)[2], abs=1e-4)


async def compiled(loaded: Any, schema: Any) -> Any:
    compiler = GrammarCompiler(loaded.tokenizer, loaded.vocab_size, loaded.eos_ids)
    return await compiler.compile(lark_grammar(Form(json.dumps(schema))), "response_format")


async def test_rows_without_a_grammar_keep_every_bit(start: Any) -> None:
    loaded = (await start()).loaded
    grammar = await compiled(loaded, LETTERS_SCHEMA)

    def draws(guided: bool) -> list[tuple[int, float]]:
        batch = ActiveBatch(loaded.model, slots=3, max_model_len=64)
        rows = []
        for row in range(3):
            request = GenerationRequest((5 + row, 9), 50, SamplingParameters(seed=row, temperature=0.9))
            guide = grammar.begin() if guided and row == 1 else None
            rows.append(Sequence(request, Future(), None, NoiseStream(row), [5 + row, 9], guide=guide))
        with torch.inference_mode():
            batch.add(rows)
            draw = batch.step()
        return list(zip(draw.tokens, draw.log_probs, strict=True))

    free, mixed = draws(guided=False), draws(guided=True)
    assert (free[0], free[2]) == (mixed[0], mixed[2])
    assert mixed[1] == (loaded.tokenizer.convert_tokens_to_ids('"'), 0.0)


# -- with everything else ---------------------------------------------------------------------------------------


async def test_a_push_in_mid_generation_changes_the_weights_and_not_the_form(
    start: Any, model_dir: Path, other_dir: Path, reference: Any
) -> None:
    server = await start()
    gate = StepGate(server.engine)
    fields = {"max_tokens": 99, **fits(LETTERS_SCHEMA)}
    tasks = [asyncio.create_task(server.chat("p" * seed, seed=seed, **fields)) for seed in range(3)]
    await server.until(lambda: gate.held == 3)
    assert (await server.post("/pause?mode=keep"))[0] == 200
    await server.push(other_dir, "7")
    await server.post("/resume")
    for answer in await asyncio.gather(*tasks):
        prompt, ids, log_probs = server.sampled(answer)
        old, new = answer["choices"][0]["weight_versions"]
        border = old["end"]
        assert (old["version"], new["version"], new["end"]) == ("default", "7", LETTERS + 3)
        before = letters_log_probs(reference, model_dir, server, prompt, ids)
        after = letters_log_probs(reference, other_dir, server, prompt, ids)
        assert log_probs == pytest.approx(before[:border] + after[border:], abs=1e-4)


async def test_reasoning_comes_before_the_json(start: Any) -> None:
    opening = "{% for m in messages %}<user>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<bot>"
    for template in (opening + "{% endif %}", opening + "<think>{% endif %}"):
        server = await start(template=template)
        server.text.splits_reasoning = True
        answer = await server.chat(n=24, seed=2, max_tokens=90, **fits({"enum": [[1], "a"]}))
        ended = [choice["message"] for choice in answer["choices"] if choice["finish_reason"] == "stop"]
        assert all(json.loads(message["content"]) in ([1], "a") for message in ended)
        begun = "<think>" in template
        thoughts = [choice["message"].get("reasoning_content") for choice in answer["choices"]]
        assert all(thoughts) if begun else any(thought is None for thought in thoughts)
