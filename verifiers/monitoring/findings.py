"""Findings about a run: what limits its speed, or that it learns nothing, and the one setting to change first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verifiers.monitoring.stage_timer import RunTime

MAJORITY = 0.5
"""Share of the trainer's time from which one part of it gives the bottleneck its name."""

NOTABLE = 0.25
"""Share of the time from which a part, or an idle server, is worth a change of settings."""

SHOWN = 0.1
"""Share of the time from which a part is listed where the parts are mixed."""

FEW_IN_FLIGHT = 0.5
"""Below this part of the most rollouts that ever ran, those that run while the trainer waits are stragglers."""


LEAST_BLOCKS = 3
"""Blocks in a row without a signal before a run is said to learn nothing."""

NEARLY_ALL = 0.9
"""Share of completions, or of groups, from which something is the cause."""

_INSTEAD_OF_DROPPING = {
    "stale": "a larger max_staleness, or a smaller num_batches_ahead",
    "longer_than_max_seq_len": "a larger max_seq_len",
    "group_incomplete": "require_full_groups=False, or rollout_retries",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence about a run.

    Attributes:
        kind: "rollout-bound", "straggler-bound", "scoring-bound", "trainer-bound", "sync-bound", "evaluation-bound",
            "checkpoint-bound", "mixed", "balanced", "shared cores", "shared GPU" or "learns nothing".
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
    shared_device: str | None = None,
    drains: bool = False,
    max_concurrent: int | None = None,
    max_staleness: int | None = None,
) -> Finding | None:
    """Return the bottleneck of a run by a rule of thumb; None where nothing was measured.

    A part that takes at least half of the trainer's time names the bottleneck: waiting, pushes, evaluation,
    checkpoints; or training itself, where the rollout server is idle a quarter of the time. Where waiting or one of
    the others takes a quarter, or the server is idle, but no part takes half, the run is "mixed": the text lists the
    parts, the largest first.
    Whether the server has room for more rollouts is what its own counts say, where it has some.
    While the trainer waits, fewer rollouts than half of the most that ran at once are stragglers; where mostly none
    runs and some are scored, the scoring is the bottleneck.

    Where the trainer and the rollout server share `shared_device`, one machine's "cores" or one "GPU", neither can be
    sped up by more of the other's time.
    """
    if time.wall <= 0:
        return None
    shares = {part: time.share(part) for part in ("wait", *_OVERHEADS)}
    shares["train"] = 1.0 - sum(shares.values())
    overheads = sum(shares[part] for part in _OVERHEADS)
    reducible = max(("wait", *_OVERHEADS), key=shares.__getitem__)
    is_scoring = time.scored_alone >= 0.5 * time.stages.get("wait", 0.0)
    if shared_device and not is_scoring and (reducible == "wait" or overheads < NOTABLE):
        return _in_turns(shares, num_batches_ahead, shared_device)
    idle = 1.0 - time.server_busy
    if shares[reducible] >= NOTABLE:
        if reducible == "wait":
            found = _waiting(time, num_batches_ahead, drains, max_concurrent, max_staleness)
        else:
            kind, advice = _OVERHEADS[reducible]
            found = Finding(kind, f"{_PARTS[reducible]} {_percent(shares[reducible])} of the time", advice)
        return found if shares[reducible] >= MAJORITY else Finding("mixed", _listed(shares), found.advice)
    if idle >= NOTABLE:
        advice = (
            "a larger per_device_train_batch_size with fewer gradient_accumulation_steps, where memory allows, or "
            "more trainer processes; rollout servers can be fewer"
        )
        if shares["train"] < MAJORITY:
            return Finding("mixed", f"{_listed(shares)}; the rollout server was idle {_percent(idle)}", advice)
        text = f"training took {_percent(shares['train'])} of the time, the rollout server was idle {_percent(idle)}"
        return Finding("trainer-bound", text, advice)
    return Finding(
        "balanced",
        f"the trainer waited {_percent(shares['wait'])} of the time, the rollout server was idle {_percent(idle)}",
        "more of both: neither side alone would make it faster",
    )


def _in_turns(shares: Mapping[str, float], num_batches_ahead: int, device: str) -> Finding:
    shared = "these cores" if device == "cores" else f"this {device}"
    if num_batches_ahead:
        return Finding(
            f"shared {device}",
            f"the trainer and the rollout server compute on the same {device} at one time",
            f"num_batches_ahead=0: both share {shared}, so let them take turns",
        )
    return Finding(
        f"shared {device}",
        f"both share {shared} and take turns: {_listed(shares)}",
        "a second device for the rollout server; else a shorter max_completion_length",
    )


def _listed(shares: Mapping[str, float]) -> str:
    largest, *others = sorted((part for part in shares if shares[part] >= SHOWN), key=lambda part: -shares[part])
    text = f"{_PARTS[largest]} {_percent(shares[largest])} of the time"
    return ", ".join([text, *(f"{_PARTS[part]} {_percent(shares[part])}" for part in others)])


def _waiting(
    time: RunTime, num_batches_ahead: int, drains: bool, max_concurrent: int | None, max_staleness: int | None
) -> Finding:
    waited = time.stages.get("wait", 0.0)
    text = f"the trainer waited {_percent(time.share('wait'))} of the time"
    if time.scored_alone > 0.5 * waited:
        return Finding(
            "scoring-bound",
            f"{text}, mostly for rewards of rollouts that had ended",
            "faster reward functions, or asynchronous ones, which run side by side",
        )
    running = time.in_flight_while_waiting
    is_straggling = time.most_in_flight > 1 and running < FEW_IN_FLIGHT * time.most_in_flight
    if is_straggling:
        ran = f"{running:.0f}" if running >= 10 else f"{running:.1f}"
        text += f", while {ran} of at most {time.most_in_flight:.0f} rollouts ran"
    reaches_limit = max_concurrent is not None and time.most_in_flight >= max_concurrent
    is_full = time.full is not None and time.full >= MAJORITY
    if time.full is not None:
        room = "is full" if is_full else "has room"
        text += f"; the server {room}: requests waited there for {_percent(time.full)} of its working time"
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
            f"{more_ahead}, which keeps the server busy behind stragglers; or a shorter rollout_timeout or "
            "max_completion_length, which end them"
        )
    elif is_full:
        advice = _OTHER_SERVERS
    else:
        # answers that take long on a server that is not full come as fast when more of them are asked for
        advice = f"a max_concurrent above {max_concurrent}" if reaches_limit else more_ahead
        if time.full is None:
            room = f"room for more than {time.most_in_flight:.0f} rollouts at once"
            advice += f", where the server has {room}; else {_OTHER_SERVERS}"
    return Finding("straggler-bound" if is_straggling else "rollout-bound", text, advice)


_OTHER_SERVERS = "more servers (server_urls), a faster one, or a shorter max_completion_length"
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


@dataclass(slots=True)
class LearningSignal:
    """A count of the blocks since one had a row with an advantage; give it each log of training."""

    _logs: int = 0
    _steps: float = 0.0
    _newest: Mapping[str, Any] = field(default_factory=dict)

    def take(self, log: Mapping[str, Any]) -> None:
        """Take in a log: its metrics, and in `steps` the optimizer steps since the one before."""
        steps = float(log.get("steps") or 0.0)
        trained, advantages = log.get("rows/trained"), log.get("rollouts/with_advantage")
        if trained is None or advantages is None:
            # the updates after a block's first log no block of their own
            self._steps += steps if self._logs else 0.0
        elif trained == 0.0 or advantages == 0.0:
            self._logs, self._steps, self._newest = self._logs + 1, self._steps + steps, log
        else:
            self._logs, self._steps, self._newest = 0, 0.0, {}

    def finding(self, updates_per_block: int = 1) -> Finding | None:
        """Return why the run learns nothing; None while it may, or after fewer than `LEAST_BLOCKS` blocks."""
        blocks = max(self._logs, int(self._steps // max(1, updates_per_block)))
        if blocks < LEAST_BLOCKS:
            return None
        text, advice = _cause(self._newest)
        return Finding("learns nothing", f"{text} over the last {blocks} blocks", advice)


def _cause(log: Mapping[str, Any]) -> tuple[str, str]:
    clipped = log.get("completions/clipped_ratio") or 0.0
    if clipped >= NEARLY_ALL:
        cut = f"{100 * clipped:.0f} % of the completions were cut off at their limit, and no advantage was left"
        return cut, "a larger max_completion_length (and max_seq_len), or prompts with shorter answers"
    if log.get("rollouts/with_advantage"):
        prefix = "rows/dropped/"
        counts = {name.removeprefix(prefix): log[name] or 0.0 for name in log if name.startswith(prefix)}
        reason = max(counts, key=counts.__getitem__, default="unknown")
        advice = _INSTEAD_OF_DROPPING.get(reason, "see the reasons in docs/concepts/async.md")
        return f"every row was left out, most as {reason},", advice
    if (log.get("completions/frac_identical_groups") or 0.0) >= NEARLY_ALL:
        collapsed = "the completions of each group were all the same (the policy has collapsed)"
        return collapsed, "a higher temperature, an earlier checkpoint, a lower learning_rate, or beta above 0"
    low, high = log.get("reward/min"), log.get("reward/max")
    if low == high == 0.0:
        advice = (
            "easier prompts first (a curriculum), a reward with partial credit, more num_generations; and the rubric "
            "on an answer that is known to be right"
        )
        return "every reward was 0 (the reward was never met)", advice
    if low == high == 1.0:
        return "every reward was 1 (the prompts are solved)", "harder prompts, or an end of the run"
    same = "the rewards of each group were all equal"
    return same, "a finer reward, a higher temperature, or prompts that the policy answers in several ways"
