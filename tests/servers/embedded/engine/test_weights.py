"""Pausing, pushing weights, and the versions that tokens are stamped with."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from safetensors.torch import save as safetensors_of
from step_gate import StepGate
from verifiers_embedded.engine.loading import load_model
from verifiers_embedded.errors import StartError


def spans(answer: dict[str, Any]) -> list[tuple[str, int, int]]:
    return [(span["version"], span["start"], span["end"]) for span in answer["choices"][0]["weight_versions"]]


async def in_mid_generation(server: Any, count: int = 1, **fields: Any) -> list[asyncio.Task[dict[str, Any]]]:
    """Start requests, and pause the server in mode keep once each has a slot and some tokens."""
    fields = {"max_tokens": 200, "ignore_eos": True, **fields}
    gate = StepGate(server.engine)
    tasks = [asyncio.create_task(server.chat(f"prompt {i}", seed=i, **fields)) for i in range(count)]
    await server.until(lambda: gate.held == count)
    assert (await server.post("/pause?mode=keep"))[0] == 200
    return tasks


async def test_tokens_after_a_push_come_from_the_new_weights_alone(
    start: Any, model_dir: Path, other_dir: Path, reference: Any
) -> None:
    server = await start()
    tasks = await in_mid_generation(server, count=3)
    assert await server.push(other_dir, "7") == (200, {"results": [None]})
    await server.post("/resume")
    for answer in await asyncio.gather(*tasks):
        prompt, ids, log_probs = server.sampled(answer)
        (old, zero, border), (new, start_of_new, end) = spans(answer)
        assert (old, zero, new, start_of_new, end) == ("default", 0, "7", border, 200)
        assert 5 <= border < 200
        before = reference.log_probs(model_dir, prompt, ids)
        after = reference.log_probs(other_dir, prompt, ids)
        assert log_probs[:border] == pytest.approx(before[:border], abs=1e-4)
        assert log_probs[border:] == pytest.approx(after[border:], abs=1e-4)


async def test_a_push_without_a_pause_is_stamped_exactly(
    start: Any, model_dir: Path, other_dir: Path, reference: Any
) -> None:
    server = await start()
    gate = StepGate(server.engine)
    task = asyncio.create_task(server.chat(max_tokens=240, ignore_eos=True, seed=0))
    await server.until(lambda: gate.held == 1)
    assert (await server.push(other_dir, "7"))[0] == 200
    answer = await task
    prompt, ids, log_probs = server.sampled(answer)
    versions = spans(answer)
    assert len(versions) == 2
    assert versions[0][1] == 0
    assert versions[-1][2] == 240
    for version, first, last in versions:
        # Where the completion ends before the new weights have their name, they are called "default+reload".
        directory = model_dir if version == "default" else other_dir
        expected = reference.log_probs(directory, prompt, ids)
        assert log_probs[first:last] == pytest.approx(expected[first:last], abs=1e-4)


async def test_weights_without_a_name_are_not_stamped_with_the_old_one(start: Any, other_dir: Path) -> None:
    server = await start()
    assert (await server.get("/weight_info"))[1]["weight_version"] == "default"
    await server.post("/update_weight_version", {"new_version": "6"})
    await server.push(other_dir)
    assert (await server.get("/weight_info"))[1]["weight_version"] == "6+reload"
    assert [version for version, _, _ in spans(await server.chat())] == ["6+reload"]
    assert await server.post("/update_weight_version", {"new_version": "7"}) == (
        200,
        {"success": True, "new_version": "7"},
    )
    answer = await server.chat()
    assert spans(answer) == [("7", 0, answer["usage"]["completion_tokens"])]
    info = (await server.get("/weight_info"))[1]
    assert info == {"weight_version": "7", "num_parameters": server.loaded.num_parameters, "model": "m"}


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "kind"])
async def test_a_reload_with_a_missing_tensor_changes_nothing(
    start: Any, other_dir: Path, model_dir: Path, reference: Any, save: Any, fault: str
) -> None:
    server = await start()
    tensors = dict(reference.tensors(other_dir))
    name = "model.layers.1.mlp.up_proj.weight"
    if fault == "missing":
        del tensors[name]
    elif fault == "unknown":
        name = "model.layers.9.extra"
        tensors[name] = torch.zeros(3)
    elif fault == "shape":
        tensors[name] = tensors[name].T
    else:
        tensors[name] = tensors[name].to(torch.int32)
    before = {key: value.clone() for key, value in server.loaded.model.state_dict().items()}
    status, answer = await server.push(save(tensors))
    assert status == 400
    assert name in answer["error"]["message"]
    after = server.loaded.model.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    prompt, ids, log_probs = server.sampled(await server.chat())
    assert log_probs == pytest.approx(reference.log_probs(model_dir, prompt, ids), abs=1e-4)
    assert (await server.get("/weight_info"))[1]["weight_version"] == "default"


async def test_a_sharded_checkpoint_is_loaded_by_its_index(
    start: Any, other_dir: Path, reference: Any, save: Any
) -> None:
    server = await start()
    tensors = reference.tensors(other_dir)
    names = sorted(tensors)
    shards = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, held in shards.items():
        directory = save({name: tensors[name] for name in held}, "sharded", file)
    index = {"weight_map": {name: file for file, held in shards.items() for name in held}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert (await server.push(directory))[0] == 200
    prompt, ids, log_probs = server.sampled(await server.chat())
    assert log_probs == pytest.approx(reference.log_probs(other_dir, prompt, ids), abs=1e-4)


def with_index(text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / "model.safetensors.index.json").write_text(text)


UNREADABLE: dict[str, Callable[[Path], Any]] = {
    "empty": lambda folder: None,
    "nowhere": Path.rmdir,
    "cut": lambda folder: (folder / "model.safetensors").write_bytes(safetensors_of({"x": torch.zeros(99)})[:-9]),
    "list as index": with_index("[1]"),
    "number in index": with_index('{"weight_map": {"a": 3}}'),
    "deep index": with_index("[" * 100_000),
    "pipe": lambda folder: os.mkfifo(folder / "model.safetensors"),
    "pipe of any name": lambda folder: os.mkfifo(folder / "a.safetensors"),
    "pipe in index": lambda folder: (os.mkfifo(folder / "a"), with_index('{"weight_map": {"x": "a"}}')(folder)),
    "pipe as index": lambda folder: os.mkfifo(folder / "model.safetensors.index.json"),
    "pipe as folder": lambda folder: (folder.rmdir(), os.mkfifo(folder)),
    "device": lambda folder: (folder / "model.safetensors").symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", UNREADABLE)
async def test_what_cannot_be_read_is_refused_and_requests_are_answered(
    start: Any, tmp_path: Path, kind: str
) -> None:
    server, folder = await start(), tmp_path / "weights"
    folder.mkdir()
    UNREADABLE[kind](folder)
    async with asyncio.timeout(30):
        status, answer = await server.push(folder)
    assert (status, answer["error"]["param"]) == (400, "weights_path")
    assert str(folder) in answer["error"]["message"]
    assert (await server.push(folder / ("a" * 5000)))[0] == 400
    assert (await server.chat())["usage"]["completion_tokens"] > 0


async def test_tied_embeddings_may_leave_out_the_head_and_both_change(
    start: Any, tied_dir: Path, reference: Any, save: Any, build: Any, tmp_path: Path
) -> None:
    server = await start(tied_dir)
    pushed = build(tmp_path / "tied", seed=9, tied=True)
    tensors = reference.tensors(pushed)
    assert "lm_head.weight" not in tensors
    assert (await server.push(pushed))[0] == 200
    prompt, ids, log_probs = server.sampled(await server.chat(ignore_eos=True))
    assert log_probs == pytest.approx(reference.log_probs(pushed, prompt, ids), abs=1e-4)
    embedding = tensors["model.embed_tokens.weight"]
    assert (await server.push(save({**tensors, "lm_head.weight": embedding}, "both")))[0] == 200
    status, answer = await server.push(save({**tensors, "lm_head.weight": embedding + 1}, "untied"))
    assert (status, "lm_head.weight" in answer["error"]["message"]) == (400, True)


async def test_weights_that_diverged_fail_the_request_and_good_ones_heal_the_server(
    start: Any, other_dir: Path, reference: Any, save: Any
) -> None:
    server = await start()
    tasks = await in_mid_generation(server, count=2)
    broken = {name: tensor * float("nan") for name, tensor in reference.tensors(other_dir).items()}
    assert (await server.push(save(broken)))[0] == 200
    waiting = asyncio.create_task(server.refused())
    await server.post("/resume")
    for task in tasks:
        with pytest.raises(AssertionError, match="no valid distribution"):
            await task
    assert (await waiting)[0] == 500
    assert (await server.get("/health"))[0] == 200
    assert (await server.push(other_dir))[0] == 200
    for answer in await asyncio.gather(*(server.chat(f"{i}" * (1 + i)) for i in range(8))):
        prompt, ids, log_probs = server.sampled(answer)
        assert log_probs == pytest.approx(reference.log_probs(other_dir, prompt, ids), abs=1e-4)


async def test_keep_freezes_requests_and_they_go_on_after_resume(start: Any) -> None:
    server = await start()
    whole = server.sampled(await server.chat("prompt 0", seed=0, max_tokens=200, ignore_eos=True))
    (task,) = await in_mid_generation(server)
    assert await server.get("/is_paused") == (200, {"is_paused": True})
    held = len(server.engine._batch.sequences[0].log_probs)
    late = asyncio.create_task(server.chat("late", seed=1))
    await server.until(lambda: server.engine.counts["waiting"] == 1)
    assert len(server.engine._batch.sequences[0].log_probs) == held
    assert await server.post("/resume") == (200, {"status": "resumed"})
    assert await server.get("/is_paused") == (200, {"is_paused": False})
    assert server.sampled(await task)[1] == whole[1]
    assert (await late)["usage"]["completion_tokens"] > 0


async def test_wait_is_the_default_and_answers_when_the_slots_are_empty(start: Any) -> None:
    server = await start(slots=2)
    gate = StepGate(server.engine)
    tasks = [asyncio.create_task(server.chat(max_tokens=120, ignore_eos=True)) for _ in range(4)]
    await server.until(lambda: gate.held == 2 and server.engine.counts["waiting"] == 2)
    assert await server.post("/pause") == (200, {"status": "paused"})
    assert server.engine.counts == {"running": 0, "waiting": 2}
    await server.post("/resume")
    assert [answer["usage"]["completion_tokens"] for answer in await asyncio.gather(*tasks)] == [120] * 4


async def test_abort_answers_with_what_is_there_and_says_so(start: Any, model_dir: Path, reference: Any) -> None:
    server = await start()
    (task,) = await in_mid_generation(server)
    await server.post("/pause?mode=abort")
    answer = await task
    prompt, ids, log_probs = server.sampled(answer)
    assert answer["choices"][0]["finish_reason"] == "abort"
    assert 5 <= len(ids) < 200
    assert log_probs == pytest.approx(reference.log_probs(model_dir, prompt, ids), abs=1e-4)
    assert (await server.get("/is_paused"))[1]["is_paused"]


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_an_adapter_is_served_merged_into_the_base_that_it_names(model_dir: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs the train extra")
    base = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    # both matrices of the adapter are random, so that it changes every layer
    wanted = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    wanted.save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(model_dir).save_pretrained(tmp_path)
    served = load_model(tmp_path, device="cpu", dtype="float32", max_model_len=None).model
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        torch.testing.assert_close(served(ids).logits, wanted(ids).logits, rtol=1e-3, atol=1e-3)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    renamed = {name.replace(".layers.", ".decoder.layers."): tensor for name, tensor in tensors.items()}
    save_file(renamed, tmp_path / "adapter_model.safetensors")
    with pytest.raises(StartError, match=r"the adapter .* is not of the 'qwen3'"):
        load_model(tmp_path, device="cpu", dtype="float32", max_model_len=None)
