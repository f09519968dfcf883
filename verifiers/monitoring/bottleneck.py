"""The bottleneck of a run in one sentence, and the one setting to change first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from verifiers.monitoring.time_metrics import RunTime

__all__ = ["Bottleneck", "find_bottleneck"]

MAJORITY = 0.5
"""Share of the trainer's time from which one part of it gives the bottleneck its name."""

NOTABLE = 0.25
"""Share of the time from which a part, or an idle server, is worth a change of settings."""

SHOWN = 0.1
"""Share of the time from which a part is listed where the parts are mixed."""

FEW_IN_FLIGHT = 0.5
"""Below this part of the most rollouts that ever ran, those that run while the trainer waits are stragglers."""


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The part of a run that limits its speed.

    Attributes:
        kind: "rollout-bound", "straggler-bound", "scoring-bound", "trainer-bound", "sync-bound", "evaluation-bound",
            "checkpoint-bound", "mixed", "balanced" or "shared cores".
        text: why, with the number: "the trainer waited 71 % of the time".
        advice: what to change first, by the name of its setting.
    """

    kind: str
    text: str
    advice: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def find_bottleneck(
    time: RunTime,
    *,
    num_batches_ahead: int,
    shares_cores: bool = False,
    drains: bool = False,
    max_concurrent: int | None = None,
    max_staleness: int | None = None,
) -> Bottleneck | None:
    """Return the bottleneck of a run by a rule of thumb; None where nothing was measured.

    A part that takes at least half of the trainer's time names the bottleneck: waiting, pushes, evaluation,
    checkpoints; or training itself, where the rollout server is idle a quarter of the time. Where waiting or one of
    the others takes a quarter, or the server is idle, but no part takes half, the run is "mixed": the text lists the
    parts, the largest first.
    While the trainer waits, fewer rollouts than half of the most that ran at once are stragglers; where mostly none
    runs and some are scored, the scoring is the bottleneck.

    Args:
        shares_cores: the trainer and the rollout server compute on one machine's CPU.
        drains: rollouts in flight end before each push.
        max_concurrent: rollouts that may be in flight at once.
        max_staleness: as it was set; None where `num_batches_ahead` gives it.
    """
    if time.wall <= 0:
        return None
    shares = {part: time.share(part) for part in ("wait", *_OVERHEADS)}
    shares["train"] = 1.0 - sum(shares.values())
    overheads = sum(shares[part] for part in _OVERHEADS)
    if shares_cores and overheads < NOTABLE and time.scored_alone < 0.5 * time.stages.get("wait", 0.0):
        return _in_turns(shares, num_batches_ahead)
    reducible = max(("wait", *_OVERHEADS), key=shares.__getitem__)
    idle = 1.0 - time.server_busy
    if shares[reducible] >= NOTABLE:
        if reducible == "wait":
            found = _waiting(time, num_batches_ahead, drains, max_concurrent, max_staleness)
        else:
            kind, advice = _OVERHEADS[reducible]
            found = Bottleneck(kind, f"{_PARTS[reducible]} {_percent(shares[reducible])} of the time", advice)
        return found if shares[reducible] >= MAJORITY else Bottleneck("mixed", _listed(shares), found.advice)
    if idle >= NOTABLE:
        advice = (
            "a larger per_device_train_batch_size with fewer gradient_accumulation_steps, where memory allows, or "
            "more trainer processes; rollout servers can be fewer"
        )
        if shares["train"] < MAJORITY:
            return Bottleneck("mixed", f"{_listed(shares)}; the rollout server was idle {_percent(idle)}", advice)
        text = f"training took {_percent(shares['train'])} of the time, the rollout server was idle {_percent(idle)}"
        return Bottleneck("trainer-bound", text, advice)
    return Bottleneck(
        "balanced",
        f"the trainer waited {_percent(shares['wait'])} of the time, the rollout server was idle {_percent(idle)}",
        "more of both: neither side alone would make it faster",
    )


def _in_turns(shares: Mapping[str, float], num_batches_ahead: int) -> Bottleneck:
    """Return the verdict where neither side can be sped up by giving it more of the other's time."""
    if num_batches_ahead:
        return Bottleneck(
            "shared cores",
            "the trainer and the rollout server compute on the same cores at one time",
            "num_batches_ahead=0: both share these cores, so let them take turns with all of them",
        )
    return Bottleneck(
        "shared cores",
        f"both share these cores and take turns: {_listed(shares)}",
        "a second device for the rollout server; else a shorter max_completion_length, or [lora]",
    )


def _listed(shares: Mapping[str, float]) -> str:
    """Return the parts in words, the largest first."""
    largest, *others = sorted((part for part in shares if shares[part] >= SHOWN), key=lambda part: -shares[part])
    text = f"{_PARTS[largest]} {_percent(shares[largest])} of the time"
    return ", ".join([text, *(f"{_PARTS[part]} {_percent(shares[part])}" for part in others)])


def _waiting(
    time: RunTime, num_batches_ahead: int, drains: bool, max_concurrent: int | None, max_staleness: int | None
) -> Bottleneck:
    waited = time.stages.get("wait", 0.0)
    text = f"the trainer waited {_percent(time.share('wait'))} of the time"
    if time.scored_alone > 0.5 * waited:
        return Bottleneck(
            "scoring-bound",
            f"{text}, mostly for rewards of rollouts that had ended",
            "faster reward functions, or asynchronous ones, which run side by side",
        )
    running = time.in_flight_while_waiting
    is_straggling = time.most_in_flight > 1 and running < FEW_IN_FLIGHT * time.most_in_flight
    if is_straggling:
        ran = f"{running:.0f}" if running >= 10 else f"{running:.1f}"
        text += f", while {ran} of at most {time.most_in_flight:.0f} rollouts ran"
    is_full = max_concurrent is not None and time.most_in_flight >= max_concurrent
    more_ahead = f"num_batches_ahead={num_batches_ahead + 1}"
    if max_staleness is not None:
        more_ahead += " (and a max_staleness that allows it)"
    if num_batches_ahead == 0:
        advice = f"{more_ahead}, which lets generation and training overlap"
    elif drains:
        advice = (
            "drain_before_sync=False, where the server can keep requests during a push: every push waits for the "
            "last rollout in flight"
        )
    elif is_straggling:
        advice = (
            f"{more_ahead}, which keeps the server busy behind stragglers; or "
            "drop_stragglers_after and a shorter max_completion_length, which end them"
        )
    elif is_full:
        advice = (
            f"a max_concurrent above {max_concurrent}, where the server has room; else more servers (server_urls)"
        )
    else:
        # answers that take long on a server that is not full come as fast when more of them are asked for
        advice = (
            f"{more_ahead}, where the server has room for more than "
            f"{time.most_in_flight:.0f} rollouts at once; else more servers (server_urls), a faster one, or a "
            "shorter max_completion_length"
        )
    return Bottleneck("straggler-bound" if is_straggling else "rollout-bound", text, advice)


_OVERHEADS = {
    "sync": (
        "sync-bound",
        "more updates from each block (steps_per_generation), so that pushes are fewer; a higher probe_every; "
        "weight_sync='nccl' or 'lora'",
    ),
    "eval": (
        "evaluation-bound",
        "fewer evaluations (eval_steps), or of fewer prompts (num_eval_prompts)",
    ),
    "save": ("checkpoint-bound", "fewer checkpoints (save_steps)"),
}
_PARTS = {
    "wait": "the trainer waited",
    "train": "training took",
    "sync": "pushing weights took",
    "eval": "evaluation took",
    "save": "saving checkpoints took",
}


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
