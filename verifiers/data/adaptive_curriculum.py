"""Curricula that adapt: a row source around a curriculum policy, which chooses prompts by how earlier ones went.

What block k draws depends on blocks 0 .. k - 1 - lag alone, where lag is the number of blocks generated ahead: those
are scored whenever block k is submitted. So a run that is resumed, or slower, draws what another would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from verifiers.data.row_source import PlannedBlock
from verifiers.data.sampler import check_size
from verifiers.errors import CheckpointError, ConfigError, GenerationError

__all__ = ["AdaptiveRows", "CurriculumPolicy", "Prompt", "number_between"]

Prompt = tuple[str, int]
"""A dataset's name and one of its rows."""


class CurriculumPolicy(Protocol):
    """A rule that chooses prompts by how earlier ones went. Called in the order of blocks, never from two threads."""

    passes_at: float
    """A rollout passes when its reward is at least this."""

    @property
    def name(self) -> str:
        """The part of the curriculum that is drawn from now, in a word."""
        ...

    def begin(self, sizes: Mapping[str, int]) -> None:
        """Start from nothing on datasets with so many rows.

        Raises:
            ConfigError: the policy names a dataset that is not there.
        """
        ...

    def check_block(self, count: int) -> None:
        """Refuse blocks of `count` prompts before the run.

        Raises:
            ConfigError: some block of the run could not be drawn.
        """
        ...

    def draw(self, block_id: int, count: int) -> list[Prompt]:
        """Return `count` different prompts for a block, by seed, block and what was learned."""
        ...

    def learn(self, rates: Mapping[Prompt, float]) -> None:
        """Take the pass rate of each prompt: the part of its scored rollouts that passed."""
        ...

    def state(self) -> dict[str, Any]:
        """Return what was learned and drawn, as JSON."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        ...

    def settings(self) -> dict[str, Any]:
        """Return the policy's own settings, as JSON."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return the present state as metrics for the log."""
        ...


class AdaptiveRows:
    """The row source of a curriculum policy.

    Args:
        datasets: example ids of each dataset, by name.
        lag: blocks that are generated ahead of the one being trained.

    Raises:
        ConfigError: the policy names a dataset that is not there.
    """

    def __init__(self, policy: CurriculumPolicy, datasets: Mapping[str, Sequence[int]], *, lag: int) -> None:
        self.policy = policy
        self.lag = check_size("lag", lag, 0)
        self.datasets = {name: list(rows) for name, rows in datasets.items()}
        self._prompts = {row: (name, n) for name, rows in self.datasets.items() for n, row in enumerate(rows)}
        self._observed = -1
        self._waiting: list[tuple[int, dict[int, float]]] = []
        self._drawn: dict[int, list[int]] = {}
        self._names: dict[int, str] = {}
        policy.begin({name: len(rows) for name, rows in self.datasets.items()})

    @property
    def until_steps(self) -> tuple[int, ...]:
        return ()

    def check_blocks(self, prompts_per_block: int) -> None:
        """Refuse blocks that the policy could not fill.

        Raises:
            ConfigError: with both numbers.
        """
        # a policy of a user's own may leave it out
        check = getattr(self.policy, "check_block", None)
        if check is not None:
            check(prompts_per_block)

    def example_ids(self, block: PlannedBlock) -> list[int]:
        known = self._drawn.get(block.block_id)
        if known is None:
            if block.block_id <= self._observed:
                raise GenerationError(f"block {block.block_id} was observed; what it drew is not kept.")
            self._learn_before(block.block_id)
            known = [self.datasets[name][row] for name, row in self.policy.draw(block.block_id, block.prompts)]
            self._drawn[block.block_id], self._names[block.block_id] = known, self.policy.name
        return list(known)

    def observe(self, block_id: int, rewards: Mapping[int, Sequence[float]]) -> None:
        if block_id != self._observed + 1:
            raise GenerationError(f"block {block_id} was observed after block {self._observed}: they come in order.")
        # a prompt of which nothing was scored has no pass rate
        rates = {
            example_id: sum(reward >= self.policy.passes_at for reward in given) / len(given)
            for example_id, given in rewards.items()
            if given
        }
        self._waiting.append((block_id, rates))
        self._observed = block_id
        self._drawn = {block: rows for block, rows in self._drawn.items() if block >= block_id}
        self._names = {block: name for block, name in self._names.items() if block >= block_id}

    def state(self) -> dict[str, Any]:
        ahead = {str(block): rows for block, rows in self._drawn.items() if block > self._observed}
        return {
            "observed": self._observed,
            "waiting": [[block, list(rates.items())] for block, rates in self._waiting],
            # blocks in flight were drawn by an older state; they are drawn again as they were
            "drawn": ahead,
            "names": {block: self._names[int(block)] for block in ahead},
            "rule": self.policy.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        try:
            self._observed = int(state["observed"])
            self._waiting = [
                (int(block), {int(row): float(r) for row, r in rates}) for block, rates in state["waiting"]
            ]
            self._drawn = {int(block): [int(row) for row in rows] for block, rows in state["drawn"].items()}
            self._names = {int(block): str(name) for block, name in state["names"].items()}
            self.policy.restore(state["rule"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the state of the curriculum in the checkpoint cannot be read ({type(error).__name__}: {error})."
            ) from error

    def stage_name(self, optimizer_step: int) -> str:
        return self._names.get(self._observed, self.policy.name)

    def describe(self, max_steps: int, updates_per_block: int) -> list[tuple[str, str]]:
        settings = ", ".join(f"{name} {_shown(value)}" for name, value in self.policy.settings().items())
        seen = f"blocks up to {self.lag + 1} before" if self.lag else "the block before"
        return [("curriculum", f"{settings}; decides by {seen}")]

    def fingerprint(self, optimizer_step: int) -> dict[str, Any]:
        sizes = {name: len(rows) for name, rows in self.datasets.items()}
        return {"rule": self.policy.settings(), "sizes": sizes}

    def metrics(self) -> dict[str, float]:
        return self.policy.metrics()

    def _learn_before(self, block_id: int) -> None:
        """Pass the policy every block that block `block_id` may depend on, and no later one."""
        last = block_id - 1 - self.lag
        if last > self._observed:
            raise GenerationError(
                f"block {block_id} was asked for before block {last} was observed; at most {self.lag} blocks are "
                "generated ahead."
            )
        while self._waiting and self._waiting[0][0] <= last:
            _, rates = self._waiting.pop(0)
            self.policy.learn({self._prompts[row]: rate for row, rate in rates.items()})


def number_between(name: str, value: object, low: float, high: float) -> float:
    """Return `value` where it is a number from `low` to `high`.

    Raises:
        ConfigError: it is not; the message names the setting, the value and the bounds.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ConfigError(f"{name} is {value!r}; give a number from {low:g} to {high:g}.")
    return float(value)


def _shown(value: Any) -> str:
    return " < ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
