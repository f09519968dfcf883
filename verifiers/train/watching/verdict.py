"""What a run is bound by, in one sentence, and the one setting to turn first."""

from __future__ import annotations

from dataclasses import dataclass

from verifiers.train.watching.figures import RunTime

__all__ = ["Verdict", "judge"]

NOTABLE = 0.25
"""Share of the time from which a stage, or an idle server, is what the run is bound by."""

FEW_IN_FLIGHT = 0.5
"""Below this part of the most rollouts that ever ran, those that run while the trainer waits are stragglers."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a run is bound by.

    Attributes:
        kind: "rollout-bound", "straggler-bound", "scoring-bound", "trainer-bound", "sync-bound", "evaluation-bound",
            "checkpoint-bound" or "balanced".
        text: why, with the number: "the trainer waited 71 % of the time".
        advice: what to change first, by the name of its setting.
    """

    kind: str
    text: str
    advice: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def judge(
    time: RunTime,
    *,
    num_batches_ahead: int,
    drains: bool = False,
    max_concurrent: int | None = None,
    max_staleness: int | None = None,
) -> Verdict | None:
    """The rule of thumb; None where nothing was measured.

    A quarter of the time is what counts: pushes, evaluation or checkpoints that take it, if they take more than
    waiting; else the trainer's waiting; else a server without rollouts. While the trainer waits, fewer than half as
    many rollouts as ever ran at once are stragglers; where mostly none runs and some are scored, it is the scoring.

    Args:
        num_batches_ahead: blocks generated ahead.
        drains: rollouts in flight end before each push.
        max_concurrent: rollouts that may be in flight at once.
        max_staleness: as it was set; None where `num_batches_ahead` gives it.
    """
    if time.wall <= 0:
        return None
    waited = time.share("wait")
    overhead = max(_OVERHEADS, key=time.share)
    if time.share(overhead) >= max(NOTABLE, waited):
        kind, what, advice = _OVERHEADS[overhead]
        return Verdict(kind, f"{what} took {_percent(time.share(overhead))} of the time", advice)
    if waited >= NOTABLE:
        return _waiting(time, num_batches_ahead, drains, max_concurrent, max_staleness)
    idle = 1.0 - time.server_busy
    if idle >= NOTABLE:
        return Verdict(
            "trainer-bound",
            f"the rollout server was idle {_percent(idle)} of the time",
            "a larger per_device_train_batch_size with fewer gradient_accumulation_steps, where memory allows, or "
            "more trainer processes; rollout servers can be fewer",
        )
    return Verdict(
        "balanced",
        f"the trainer waited {_percent(waited)} of the time, the rollout server was idle {_percent(idle)}",
        "more of both: neither side alone would make it faster",
    )


def _waiting(
    time: RunTime, num_batches_ahead: int, drains: bool, max_concurrent: int | None, max_staleness: int | None
) -> Verdict:
    waited = time.stages.get("wait", 0.0)
    text = f"the trainer waited {_percent(time.share('wait'))} of the time"
    if time.scored_alone > 0.5 * waited:
        return Verdict(
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
    return Verdict("straggler-bound" if is_straggling else "rollout-bound", text, advice)


_OVERHEADS = {
    "sync": (
        "sync-bound",
        "pushing weights",
        "more updates from each block (steps_per_generation), so that pushes are fewer; a higher probe_every; "
        "weight_sync='nccl' or 'lora'",
    ),
    "eval": (
        "evaluation-bound",
        "evaluation",
        "fewer evaluations (eval_steps), of fewer prompts (num_eval_prompts), or eval_overlap=True",
    ),
    "save": ("checkpoint-bound", "saving checkpoints", "fewer checkpoints (save_steps)"),
}


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
