"""Training of one block on the device: equal to the CPU's, and its speed beside TRL's with as many tokens in a pass.

Run by the stages `training_step`, `training` and `prefixes`. All sides of the speed have the same model, the same
kernels and the same most tokens in one pass; peak memory is reported. Ours packs rows by length into micro-batches,
and computes a group's prompt once where that pays (`separate`: each row on its own); TRL's takes rows as they come,
prompts padded on the left and completions on the right to the longest of the block.
"""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import Asked, Report, make_block, make_model, make_tokenizer, peak_memory_mib, run_stage, synchronize
from peak_flops import peak_flops_of

GENERATIONS = 8
Sizes = list[tuple[int, int]]
"""Tokens (prompt, completion) of each rollout."""


def sizes_of(longest: int, rollouts: int) -> Sizes:
    """Draw each rollout's tokens; completions are log-normal around a quarter of the longest."""
    draw, found = random.Random(longest), []
    for _ in range(rollouts // GENERATIONS):
        prompt = draw.randint(longest // 16, longest // 8)
        for _ in range(GENERATIONS):
            tokens = round(longest / 4 * math.exp(draw.gauss(0.0, 0.8)))
            found.append((prompt, min(longest - prompt, max(longest // 32, tokens))))
    return found


def settings(asked: Asked, sizes: Sizes, generations: int) -> dict[str, Any]:
    return {
        "output_dir": asked.scratch,
        "max_steps": 1,
        "per_device_train_batch_size": len(sizes),
        "gradient_accumulation_steps": 1,
        "num_generations": generations,
        "max_completion_length": max(map(sum, sizes)),
        "use_cpu": asked.device == "cpu",
        "bf16": False,
        "activation_checkpointing": False,
        "report_to": "none",
        "disable_tqdm": True,
    }


def ours(
    asked: Asked, model: Any, sizes: Sizes, generations: int, budget: int, share: bool = True
) -> tuple[Any, list[dict[str, Any]]]:
    """Return our trainer, and the micro-batches of a block as inputs of its loss."""
    import verifiers as vf
    from verifiers.inference.endpoint import Endpoint
    from verifiers.train.batching.training_block import build_training_block
    from verifiers.train.trainer import GRPOTrainer

    url = "http://127.0.0.1:9/v1"
    own = {"server_url": url, "max_tokens_per_micro_batch": budget, "share_prefixes": share}
    args = vf.GRPOConfig(**own, **settings(asked, sizes, generations))
    rows = [{"question": "w1", "answer": "w2"}] * len(sizes)
    env = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[_no_reward]))
    trainer = GRPOTrainer(model, env, args, make_tokenizer(), client=Endpoint(url))
    block = build_training_block(make_block(sizes, generations, 512), trainer.plan, trainer.args)
    return trainer, [{"micro_batches": micro_batches} for (micro_batches,) in block.micro_steps]


def theirs(asked: Asked, model: Any, sizes: Sizes, generations: int, budget: int) -> tuple[Any, list[dict[str, Any]]]:
    """Return TRL's trainer, and the same block as it would collate it."""
    import datasets
    import trl

    args = trl.GRPOConfig(**settings(asked, sizes, generations))
    rows = datasets.Dataset.from_list([{"prompt": "w1"}] * len(sizes))
    trainer = trl.GRPOTrainer(model, _no_rewards, args=args, train_dataset=rows, processing_class=make_tokenizer())
    rollouts_of_block = [one for group in make_block(sizes, generations, 512).groups for one in group.rollouts]
    found = [one.rows[0] for one in rollouts_of_block]
    prompt_width, width = (max(len(getattr(row, name)) for row in found) for name in ("prompt_ids", "completion_ids"))
    device = trainer.accelerator.device
    batch = {
        "prompt_ids": torch.tensor([[0] * (prompt_width - len(row.prompt_ids)) + row.prompt_ids for row in found]),
        "completion_ids": torch.tensor(
            [row.completion_ids + [0] * (width - len(row.completion_ids)) for row in found]
        ),
        "advantages": torch.tensor([one.reward or 0.0 for one in rollouts_of_block]),
    }
    batch |= {f"{side}_mask": (batch[f"{side}_ids"] != 0).long() for side in ("prompt", "completion")}
    per_pass = max(1, budget // (prompt_width + width))
    total = batch["completion_mask"].sum().to(device)
    parts = [
        {name: value[start : start + per_pass].to(device) for name, value in batch.items()}
        for start in range(0, len(sizes), per_pass)
    ]
    return trainer, [{**part, "num_items_in_batch": total} for part in parts]


def _no_reward(completion: Any) -> float:
    return 0.0


def _no_rewards(completions: list[Any], **_: Any) -> list[float]:
    return [0.0] * len(completions)


def shared(*given: Any) -> tuple[Any, list[dict[str, Any]]]:
    """Return ours with prompts computed once, whatever that saves."""
    from unittest.mock import patch

    with patch.multiple("verifiers.train.batching.training_block", LEAST_SAVED=0.0, LEAST_SAVED_ON_GPU=0.0):
        return ours(*given)


SIDES = {"ours": ours, "shared": shared, "separate": partial(ours, share=False), "trl": theirs}


def run_side(asked: Asked, side: str, sizes: Sizes, generations: int, budget: int) -> dict[str, Any]:
    """Train the block three times; return seconds of the last, peak memory, and operations."""
    policy = make_model(asked, asked.dtype)
    trainer, inputs = SIDES[side](asked, policy, sizes, generations, budget)
    trainer.current_gradient_accumulation_steps = 1
    model = trainer.model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=asked.device == "cuda")
    seconds = 0.0
    for _ in range(3):
        started = synchronize(asked)
        for one in inputs:
            trainer.accelerator.backward(trainer.compute_loss(model, one))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds = synchronize(asked) - started
    is_shared = any("shared_rows" in batch for one in inputs for batch in one.get("micro_batches", ()))
    sharing = generations if is_shared else 1
    return {"seconds": seconds, "peak_mib": peak_memory_mib(asked), "flops": flops(model.config, sizes, sharing)}


def flops(config: Any, sizes: Sizes, sharing: int) -> float:
    """Count the operations of a forward and backward pass: 6 for each weight and real token, and attention's.

    Args:
        sharing: rollouts that follow each other and have one prompt, which is computed once.
    """
    heads = config.num_attention_heads * config.head_dim
    kept = config.num_key_value_heads * config.head_dim
    layer = config.hidden_size * (2 * heads + 2 * kept + 3 * config.intermediate_size)
    total = 0.0
    for place, (prompt, completion) in enumerate(sizes):
        known = prompt if place % sharing else 0
        tokens = prompt + completion
        total += 6 * config.num_hidden_layers * layer * (tokens - known)
        # causal: half of tokens x tokens
        total += 6 * config.num_hidden_layers * heads * (tokens**2 - known**2)
        # the head is only run on sampled tokens
        total += 6 * config.hidden_size * config.vocab_size * completion
    return total


def measure_speed(asked: Asked, report: Report) -> None:
    lengths = (128,) if asked.tiny else (512, 2048, 4096)
    for longest in lengths:
        sizes = sizes_of(longest, 16 if asked.tiny else max(16, 2**16 // longest))
        compare(asked, report, f"up to {longest} tokens", sizes, GENERATIONS, 4 * longest, ("ours", "trl"))


def measure_prefixes(asked: Asked, report: Report) -> None:
    """Measure groups of 16 completions of 64 tokens behind prompts of 512, and of 32."""
    for prompt in (16, 8) if asked.tiny else (512, 32):
        sizes = [(prompt, 16 if asked.tiny else 64)] * (32 if asked.tiny else 128)
        compare(asked, report, f"prompts of {prompt}", sizes, 16, 16 * sum(sizes[0]), ("shared", "separate", "trl"))


def compare(
    asked: Asked, report: Report, what: str, sizes: Sizes, generations: int, budget: int, sides: tuple[str, ...]
) -> None:
    """Report tokens/s of each side, counting each row's own tokens, and the ratios of the first to the others."""
    rates, tokens = {}, sum(map(sum, sizes))
    for side in sides:
        given = {"sizes": sizes, "generations": generations, "budget": budget}
        found = in_a_process(asked, "speed", side=side, **given)
        rates[side] = tokens / found["seconds"]
        peak = peak_flops(asked)
        mfu = found["flops"] / found["seconds"] / peak if peak else None
        more = {"mfu": mfu and round(mfu, 4), "peak_mib": found["peak_mib"], "tokens": tokens}
        report.result(f"{side}, {what}, tokens/s", rates[side], **more)
    for side in sides[1:]:
        report.result(f"ratio to {side}, {what}", rates[sides[0]] / rates[side])


def peak_flops(asked: Asked) -> float | None:
    return peak_flops_of(torch.cuda.get_device_name(0)) if asked.device == "cuda" else None


def save_step(asked: Asked, path: str, sizes: Sizes) -> dict[str, Any]:
    """Take one step of plain gradient descent in float32 on the device, and save the weights."""
    torch.backends.cuda.matmul.allow_tf32 = False
    cpu = replace(asked, device="cpu", tiny=True)
    trainer, inputs = ours(asked, make_model(cpu, torch.float32), sizes, GENERATIONS, 1024)
    trainer.current_gradient_accumulation_steps = 1
    model = trainer.model.train()
    loss = torch.stack([_backward(trainer, model, one) for one in inputs]).sum().item()
    with torch.no_grad():
        step = {name: -1e-2 * parameter.grad.cpu() for name, parameter in model.named_parameters()}
    torch.save(step, path)
    return {"loss": loss}


def _backward(trainer: Any, model: Any, inputs: dict[str, Any]) -> Any:
    loss = trainer.compute_loss(model, inputs)
    trainer.accelerator.backward(loss)
    return loss.detach()


def check_step(asked: Asked, report: Report) -> None:
    """Compare loss and a step of plain gradient descent on the device with the CPU's, with rows alone and shared."""
    compare_step(asked, report, "a training step is the CPU's", sizes_of(128, 16))
    shared_prompts = [(64, 8 + place % 16) for place in range(16)]
    compare_step(asked, report, "a training step with prompts computed once is the CPU's", shared_prompts)


def compare_step(asked: Asked, report: Report, name: str, sizes: Sizes) -> None:
    paths = {side: str(Path(asked.scratch, f"{side}.pt")) for side in ("cpu", "device")}
    places = {"cpu": replace(asked, device="cpu"), "device": asked}
    losses = {
        side: in_a_process(places[side], "step", path=path, sizes=sizes)["loss"] for side, path in paths.items()
    }
    steps = {side: torch.load(path) for side, path in paths.items()}
    gap = math.sqrt(sum((steps["device"][one] - step).square().sum().item() for one, step in steps["cpu"].items()))
    size = math.sqrt(sum(one.square().sum().item() for one in steps["cpu"].values()))
    close = gap <= 1e-3 * size and abs(losses["cpu"] - losses["device"]) <= 1e-4 * max(1.0, abs(losses["cpu"]))
    report.check(name, close and size > 0, relative_difference=gap / size, **losses)


def in_a_process(asked: Asked, mode: str, **more: Any) -> dict[str, Any]:
    """Run one side alone: what libraries keep in a process, and its peak of memory, are its own."""
    given = {"stage": mode, **asdict(asked)}
    command = [sys.executable, __file__, json.dumps(given), json.dumps(more)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def stage(asked: Asked, report: Report) -> None:
    mode = json.loads(sys.argv[1])["stage"]
    if mode in ("speed", "step"):
        work = run_side if mode == "speed" else save_step
        print(json.dumps(work(asked, **json.loads(sys.argv[2]))))
    else:
        {"training_step": check_step, "training": measure_speed, "prefixes": measure_prefixes}[mode](asked, report)


if __name__ == "__main__":
    run_stage(stage)
