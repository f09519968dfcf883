"""Promises of the embedded server beside a trainer's pass: agreement, pushes, memory, and waits for the device."""

from __future__ import annotations

import copy
import gc
import random
import warnings
from pathlib import Path
from typing import Any

import torch
from common import TINY, Asked, Report, make_model, make_tokenizer, run_stage
from verifiers_embedded.engine.batch import ActiveBatch
from verifiers_embedded.engine.decoding import CudaGraphs
from verifiers_embedded.engine.generation import GenerationRequest, Sequence
from verifiers_embedded.engine.sampling import NoiseStream, SamplingParameters
from verifiers_embedded.in_process_server import InProcessServer

CONTEXT = 512
TEMPERATURES = (0.5, 1.0, 1.5)


def serve(asked: Asked, policy: Any, graphs: bool | None = False) -> InProcessServer:
    return InProcessServer.of_policy(
        policy.config,
        policy.state_dict(),
        make_tokenizer(),
        device=asked.device,
        max_model_len=CONTEXT,
        slots=16,
        cuda_graphs=graphs,
    )


@torch.no_grad()
def train_a_little(policy: Any, seed: int) -> None:
    torch.manual_seed(seed)
    for parameter in policy.parameters():
        parameter.mul_(1 + 0.02 * torch.randn_like(parameter))


@torch.no_grad()
def log_probs_of(policy: Any, prompt: list[int], sampled: Any, temperature: float) -> torch.Tensor:
    """Return the log-prob of each sampled token, in nats, by the trainer's own function."""
    from verifiers.train.loss.logprobs import fused_pass

    ids = torch.tensor([[*prompt, *sampled.token_ids]], device=policy.device)
    found: torch.Tensor = fused_pass(policy, temperature, input_ids=ids, labels=ids).log_probs
    return found[0, len(prompt) - 1 :].cpu()


def check_agreement(asked: Asked, report: Report, dtype: torch.dtype, graphs: bool) -> None:
    """Compare log-probs over temperatures, second turns that continue kept prefixes, and pushes.

    In half precision two orders of the same sums differ. The measure is there what rounding alone costs the trainer:
    the distance of its own pass from one in float32.
    """
    policy, draw = make_model(asked, dtype), random.Random(0)
    found, rounding = [], []
    with serve(asked, policy, graphs) as server:
        for push in range(3):
            train_a_little(policy, push)
            server.push(policy.state_dict(), str(push))
            pushed = server.model.state_dict()
            equal = all(torch.equal(pushed[name], value) for name, value in policy.state_dict().items())
            report.check(f"push {push} is bitwise, {name_of(dtype, graphs)}", equal)
            prompts = [[draw.randrange(1, 512) for _ in range(draw.randint(20, 90))] for _ in range(16)]
            for turn in range(2):
                temperatures = [TEMPERATURES[place % 3] for place in range(16)]
                settings = [SamplingParameters(draw.getrandbits(63), temperature=one) for one in temperatures]
                futures = [
                    server.engine.submit(GenerationRequest(tuple(prompt), 40, sampling))
                    for prompt, sampling in zip(prompts, settings, strict=True)
                ]
                answers = [future.result(120) for future in futures]
                if turn == 0 or server.engine.prefixes["hits"]:
                    exact = copy.deepcopy(policy).float()
                    for one in zip(prompts, answers, temperatures, strict=True):
                        ours = log_probs_of(policy, *one)
                        found.append((ours - torch.tensor(one[1].log_probs)).abs())
                        rounding.append((ours - log_probs_of(exact, *one)).abs())
                    del exact
                prompts = [[*prompt, *answer.token_ids, 7] for prompt, answer in zip(prompts, answers, strict=True)]
        hits = server.engine.prefixes["hits"]
    every = torch.cat(found)
    mean, largest = every.mean().item(), every.max().item()
    own = torch.cat(rounding).mean().item()
    passed = largest <= 1e-3 if dtype == torch.float32 else mean <= 1.5 * own
    numbers = {"tokens": len(every), "mean": round(mean, 6), "largest": round(largest, 6), "prefix_hits": hits}
    numbers["rounding"] = round(own, 6)
    report.check(f"log-probs agree, {name_of(dtype, graphs)}", passed and hits > 0, **numbers)


def name_of(dtype: torch.dtype, graphs: bool) -> str:
    return str(dtype).removeprefix("torch.") + (", CUDA graphs" if graphs else "")


def check_memory(asked: Asked, report: Report) -> None:
    """Check that as much is held after 200 pushes as after 20."""
    policy = make_model(asked, asked.dtype)
    held = []
    with serve(asked, policy) as server:
        for push in range(1, 201):
            server.push(policy.state_dict(), str(push))
            if push % 20 == 0:
                request = GenerationRequest((1, 2, 3), 8, SamplingParameters(push))
                server.engine.submit(request).result(60)
                held.append(memory_bytes(asked))
    allowed = 2**20 if asked.device == "cuda" else 2**26
    report.check("memory after 200 pushes", held[-1] - held[0] <= allowed, grown_bytes=held[-1] - held[0])


def memory_bytes(asked: Asked) -> int:
    gc.collect()
    if asked.device == "cuda":
        return torch.cuda.memory_allocated()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def check_waits(asked: Asked, report: Report, graphs: bool) -> None:
    """Check that a step waits for the device once, for the tokens of all rows."""
    name = "one wait a step" + (", CUDA graphs" if graphs else "")
    policy = make_model(asked, asked.dtype).requires_grad_(False)
    batch, steps = ActiveBatch(policy, 16, CONTEXT, record=CudaGraphs() if graphs else None), 20
    with torch.inference_mode():
        rows = [SamplingParameters(seed, temperature=0.7, top_p=0.9 if seed % 2 else 1.0) for seed in range(16)]
        batch.add([waiting(sampling) for sampling in rows])
        take(batch, 3)
        if asked.device != "cuda":
            take(batch, steps)
            report.result(name, None, why="needs a GPU")
            return
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            take(batch, steps)
            torch.cuda.set_sync_debug_mode("default")
    # torch also warns once that the mode is a prototype, which names synchronizing operations too
    waits = [str(one.message) for one in caught if "called a synchronizing" in str(one.message)]
    report.check(name, len(waits) <= steps, waits=len(waits), steps=steps)


def check_mixture(asked: Asked, report: Report) -> None:
    """Check log-probs of a small mixture of experts, whose passes are recorded where they wait for nothing."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}
    policy = Qwen3MoeForCausalLM(Qwen3MoeConfig(**TINY, **experts, eos_token_id=None, pad_token_id=0))
    policy = policy.to(asked.device).eval().requires_grad_(False)
    with serve(asked, policy, None) as server:
        recorded = server.loaded.can_be_recorded
        prompts = [[1 + place, 2, 3] for place in range(8)]
        settings = [SamplingParameters(seed) for seed in range(8)]
        requests = [GenerationRequest(tuple(ids), 20, one) for ids, one in zip(prompts, settings, strict=True)]
        answers = [future.result(120) for future in [server.engine.submit(request) for request in requests]]
    gaps = [
        (log_probs_of(policy, prompt, answer, 1.0) - torch.tensor(answer.log_probs)).abs().max().item()
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    report.check("log-probs of a mixture of experts agree", max(gaps) <= 1e-3, largest=max(gaps), recorded=recorded)


def waiting(sampling: SamplingParameters) -> Sequence:
    from concurrent.futures import Future

    prompt = [1 + sampling.seed % 500, 2, 3]
    request = GenerationRequest(tuple(prompt), 400, sampling)
    return Sequence(request, Future(), None, NoiseStream(sampling.seed), prompt)


def take(batch: ActiveBatch, steps: int) -> None:
    for _ in range(steps):
        draw = batch.step()
        for sequence, token in zip(batch.sequences, draw.tokens, strict=True):
            sequence.tokens.append(token)


def stage(asked: Asked, report: Report) -> None:
    sides = (False, True) if asked.device == "cuda" else (False,)
    for graphs in sides:
        check_waits(asked, report, graphs)
        for dtype in (torch.float32, torch.bfloat16):
            check_agreement(asked, report, dtype, graphs)
    check_memory(asked, report)
    check_mixture(asked, report)


if __name__ == "__main__":
    run_stage(stage)
