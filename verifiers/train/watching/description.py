"""What run.json says of a run before its first step."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Any

from verifiers.evals.provenance import versions

__all__ = ["description"]


def description(trainer: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Names, plan, settings and versions, as JSON.

    Args:
        settings: of the trainer, secrets taken out or not.
    """
    args, plan = trainer.args, trainer.plan
    source = plan.source
    return {
        "env": str(getattr(trainer.env, "env_id", "") or type(trainer.env).__name__),
        "model": str(getattr(trainer.model.config, "_name_or_path", "") or type(trainer.model).__name__),
        "server_model": args.server_model,
        "run_name": args.run_name,
        "plan": plan.describe(),
        "max_steps": plan.max_steps,
        "updates_per_block": plan.updates_per_block,
        "completions_per_block": plan.completions_per_block,
        "stages": [source.stage_name(step) for step in (0, *source.until_steps)] if source is not None else [],
        "processes": plan.num_processes,
        "device": str(trainer.accelerator.device),
        "settings": {name: value for name, value in settings.items() if value is not None},
        "versions": {**versions(), **_training_versions()},
    }


def _training_versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("torch", "transformers", "trl", "accelerate")}
