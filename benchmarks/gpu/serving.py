"""Tokens per second of the embedded server, and seconds of a push of 1.2 GB. Stages `serving` and `pushes`.

Generation has 1, 64 and 256 requests in flight, prompts of 128 tokens and completions of 256, none of which ends
early: the embedded server over HTTP with token ids and log-probs (with and without CUDA graphs), transformers'
`generate` and its continuous batching in process, on the same weights. vLLM is a further row where it is installed.
Each side is timed once, after a warm-up with the same prompts, of which nothing is reused: prefix caches are off.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import json
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import (
    Asked,
    Report,
    make_model,
    make_tokenizer,
    peak_memory_mib,
    reset_peak_memory,
    run_stage,
    synchronize,
)
from verifiers_embedded.in_process_server import InProcessServer

Prompts = list[list[int]]


def make_prompts(count: int, tokens: int) -> Prompts:
    draw = random.Random(count)
    return [[draw.randrange(1, 512) for _ in range(tokens)] for _ in range(count)]


def over_http(server: InProcessServer, prompts: Prompts, tokens: int) -> None:
    import aiohttp

    async def ask(session: aiohttp.ClientSession, seed: int, prompt: list[int]) -> None:
        sampling = {"max_tokens": tokens, "ignore_eos": True, "seed": seed, "logprobs": 0}
        body = {"token_ids": prompt, "sampling_params": sampling}
        async with session.post(f"{root}/inference/v1/generate", json=body) as response:
            answer = await response.json()
            assert len(answer["choices"][0]["token_ids"]) == tokens, answer

    async def ask_all() -> None:
        limits = {"connector": aiohttp.TCPConnector(limit=0), "timeout": aiohttp.ClientTimeout(total=None)}
        async with aiohttp.ClientSession(**limits) as session:
            await asyncio.gather(*(ask(session, seed, prompt) for seed, prompt in enumerate(prompts)))

    root = server.url.removesuffix("/v1")
    asyncio.run(ask_all())


def by_generate(model: Any, prompts: Prompts, tokens: int) -> None:
    ids = torch.tensor(prompts, device=model.device)
    settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "max_new_tokens": tokens}
    found = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    assert found.shape[1] == len(prompts[0]) + tokens


def by_continuous_batching(model: Any, prompts: Prompts, tokens: int) -> None:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    settings = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=tokens, eos_token_id=-1, pad_token_id=0)
    sharing = ContinuousBatchingConfig(allow_block_sharing=False)
    # the warm-up leaves its manager and CUDA graphs to the run that is timed
    found = model.generate_batch(
        prompts, generation_config=settings, continuous_batching_config=sharing, persistent_manager=True
    )
    assert len(found) == len(prompts)
    assert all(len(answer.generated_tokens) == tokens for answer in found.values())


def destroy_manager(model: Any) -> None:
    """Free the cache of continuous batching, which is made for one number of requests."""
    model.destroy_cached_continuous_batching_manager()
    gc.collect()
    torch.cuda.empty_cache()


def measure_generation(asked: Asked, report: Report) -> None:
    in_flight = (1, 8) if asked.tiny else (1, 64, 256)
    prompt, tokens = (16, 16) if asked.tiny else (128, 256)
    model = make_model(asked, asked.dtype).requires_grad_(False)
    inputs = {count: make_prompts(count, prompt) for count in in_flight}
    for count, prompts in inputs.items():
        for graphs in (False, True) if asked.device == "cuda" else (False,):
            name = "embedded server" + (", CUDA graphs" if graphs else "")
            with serve(asked, model, count, prompt + tokens, graphs) as server:
                note(asked, report, name, count, tokens, partial(over_http, server, prompts, tokens))
    for count, prompts in inputs.items():
        note(asked, report, "generate", count, tokens, partial(by_generate, model, prompts, tokens))
    if asked.device != "cuda":
        report.result("continuous batching", None, why="takes minutes to begin on the CPU")
    for count in reversed(in_flight) if asked.device == "cuda" else ():
        run = partial(by_continuous_batching, model, inputs[count], tokens)
        note(asked, report, "continuous batching", count, tokens, run)
        destroy_manager(model)
    if importlib.util.find_spec("vllm") is None:
        report.result("vLLM", None, why="not installed here")
    else:
        measure_vllm(asked, report, model, in_flight, prompt, tokens)


def note(asked: Asked, report: Report, name: str, count: int, tokens: int, run: Callable[[], None]) -> None:
    """Run once to warm up, then time; a side that breaks is reported and the others go on."""
    reset_peak_memory(asked)
    try:
        run()
        started = synchronize(asked)
        run()
        seconds = synchronize(asked) - started
    except Exception as error:
        report.result(f"{name}, {count} in flight, tokens/s", None, why=f"{type(error).__name__}: {error}"[:500])
        return
    report.result(f"{name}, {count} in flight, tokens/s", count * tokens / seconds, peak_mib=peak_memory_mib(asked))


def measure_vllm(asked: Asked, report: Report, model: Any, in_flight: Any, prompt: int, tokens: int) -> None:
    import vllm

    directory = Path(asked.scratch, "model")
    model.save_pretrained(directory)
    engine = vllm.LLM(
        str(directory),
        skip_tokenizer_init=True,
        gpu_memory_utilization=0.4,
        max_model_len=1024,
        enable_prefix_caching=False,
    )
    settings = vllm.SamplingParams(max_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False)
    for count in in_flight:
        inputs = [{"prompt_token_ids": ids} for ids in make_prompts(count, prompt)]
        run = partial(engine.generate, inputs, settings, use_tqdm=False)
        note(asked, report, "vLLM", count, tokens, run)


def serve(asked: Asked, model: Any, slots: int, context: int, graphs: bool) -> InProcessServer:
    return InProcessServer.of_policy(
        model.config,
        model.state_dict(),
        make_tokenizer(),
        device=asked.device,
        max_model_len=context + 1,
        slots=slots,
        prefix_bytes=0,
        cuda_graphs=graphs,
    )


def measure_pushes(asked: Asked, report: Report) -> None:
    """Measure pushes by copy inside the process, from the device and from the host, and by a file in memory."""
    from safetensors.torch import save_file
    from verifiers_embedded.engine.weights import match_weights, read_weights

    model = make_model(asked, torch.bfloat16)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    on_host = {name: tensor.cpu() for name, tensor in tensors.items()}
    directory = Path(asked.memory)
    with serve(asked, model, 4, 64, False) as server:

        def by_file() -> None:
            save_file(
                {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors"
            )
            server.engine.reload(match_weights(server.model, read_weights(directory))).result(120)

        ways = {
            "copy on the device": lambda: server.push(tensors, "1"),
            "copy from the host": lambda: server.push(on_host, "2"),
            "file": by_file,
        }
        megabytes = sum(tensor.nbytes for tensor in tensors.values()) / 1e6
        for name, push in ways.items():
            seconds = []
            for _ in range(4):
                started = time.perf_counter()
                push()
                seconds.append(time.perf_counter() - started)
            report.result(f"push by {name}, seconds", sorted(seconds[1:])[1], first=seconds[0], mb=megabytes)


def stage(asked: Asked, report: Report) -> None:
    work = measure_pushes if json.loads(sys.argv[1])["stage"] == "pushes" else measure_generation
    work(asked, report)


if __name__ == "__main__":
    run_stage(stage)
