"""What a finished run says of its evaluations, in a line a set."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["evaluation_lines"]

_REWARD = re.compile(r"eval(?:_(?P<name>[^/]+))?_reward")


def evaluation_lines(state: Any, args: Any) -> list[str]:
    """The last evaluation of each held-out set, and which step was the best where that was asked for.

    Args:
        state: the trainer's.
        args: the run's settings.
    """
    last: dict[str, dict[str, Any]] = {}
    for entry in state.log_history:
        last.update({name: entry for name in entry if _REWARD.fullmatch(name)})
    lines = []
    for metric, entry in last.items():
        found = _REWARD.fullmatch(metric)
        assert found is not None
        prefix, name = metric.removesuffix("_reward"), found["name"]
        error = entry.get(f"{metric}_stderr")
        text = f"held-out reward{f' of {name}' if name else ''} at step {entry['step']}: {entry[metric]:.3f}"
        text += f" ± {error:.3f}" if error is not None else ""
        text += f" ({entry.get(f'{prefix}_prompts', 0):.0f} prompts"
        failed = entry.get(f"{prefix}_failed", 0)
        lines.append(text + (f", {failed:.0f} rollouts failed)" if failed else ")"))
    if lines and state.best_global_step:
        text = f"best {args.metric_for_best_model}: {state.best_metric:.3f} at step {state.best_global_step}"
        loaded = args.load_best_model_at_end and state.best_model_checkpoint is not None
        lines.append(text + (", whose weights are saved" if loaded else ""))
    return lines
