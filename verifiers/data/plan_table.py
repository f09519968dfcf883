"""The batch plan as a table for a person: every size in prompts and in completions."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verifiers.data.plan import BatchPlan

__all__ = ["plan_table"]


def plan_table(plan: BatchPlan) -> str:
    """The table, without a trailing newline."""
    sizes = [
        ("per block", plan.completions_per_block),
        ("per update", plan.completions_per_update),
        ("per micro-step", plan.completions_per_micro_step),
        ("per device", plan.per_device_train_batch_size),
    ]
    lines = [f"{'batch plan':<18}{'prompts':>12}{'completions':>14}"]
    lines += [f"{name:<18}{size / plan.num_generations:>12,.6g}{size:>14,}" for name, size in sizes]
    lines += [f"{name:<17} {text}" for name, text in _notes(plan)]
    return "\n".join(lines)


def _notes(plan: BatchPlan) -> list[tuple[str, str]]:
    passes = f"{_count(plan.num_iterations, 'pass', 'passes')} over "
    passes += _count(plan.steps_per_generation, "micro-batch", "micro-batches")
    run = f"{plan.blocks:,} for {_count(plan.max_steps, 'optimizer step', 'optimizer steps')}"
    if unused := plan.blocks * plan.updates_per_block - plan.max_steps:
        run += f"; the last serves {plan.updates_per_block - unused} of {plan.updates_per_block} updates"
    return [
        ("group", f"{plan.num_generations} completions of each prompt"),
        (
            "updates per block",
            f"{plan.updates_per_block:,} ({passes}, {plan.gradient_accumulation_steps:,} per update)",
        ),
        ("blocks in the run", run),
        *(plan.source.describe(plan.max_steps) if plan.source is not None else [("epochs", _epochs(plan))]),
        ("devices", f"{plan.num_processes:,}"),
        *_passes(plan),
    ]


def _passes(plan: BatchPlan) -> list[tuple[str, str]]:
    if plan.max_tokens_per_pass is None:
        return []
    return [("passes", f"at most {plan.max_tokens_per_pass:,} tokens each on a device, padding included")]


def _epochs(plan: BatchPlan) -> str:
    text = f"{plan.epochs:.4g} over {_count(plan.num_prompts, 'prompt', 'prompts')}"
    if left_out := plan.prompts_left_out_per_epoch:
        text += f"; {left_out:,} left out of each, too few for a block"
    return text


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"
