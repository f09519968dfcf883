"""One block: the request for it, and its groups while they are begun in plan order, scored, and handed on in order.

What is handed on is decided by identity and by what the rollouts became, never by the order in which they ended: a
group that is replaced makes room for the next of a planned list of replacements, and the block is the first groups
of that whole list which were kept.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from verifiers.errors import ConfigError, NothingScoredError, RolloutWorkerError
from verifiers.rollouts.rollout import Group, Rollout, RolloutRequest, ScoredBlock, most_often, requests_by_prompt
from verifiers.rollouts.run import Run, relaxed_gc
from verifiers.types import Outcome, State


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One block to generate.

    Attributes:
        requests: its rollouts; those of a prompt stand together, and are as many for each prompt.
        policy_version: version on the server when the block is submitted, stamped on tokens that the server does not
            stamp itself; None keeps the generator's present version.
        replacements: rollouts of prompts that replace zero-variance groups, in the order in which they are used.

    Raises:
        ConfigError: no rollouts, groups of different sizes, or a prompt in two places.
    """

    batch_id: int
    requests: Sequence[RolloutRequest]
    policy_version: int | None = None
    replacements: Sequence[RolloutRequest] = ()

    def __post_init__(self) -> None:
        if not self.requests:
            raise ConfigError(f"batch {self.batch_id} has no rollouts; give it requests.")
        sizes = set()
        for part in (self.requests, self.replacements):
            seen: set[int] = set()
            for example_id, group in itertools.groupby(part, lambda request: request.key.example_id):
                keys = [request.key for request in group]
                if example_id in seen or len(set(keys)) < len(keys):
                    raise ConfigError(
                        f"batch {self.batch_id}: the rollouts of example_id {example_id} do not stand together; give "
                        "each prompt once, with all of its rollouts in a row."
                    )
                seen.add(example_id)
                sizes.add(len(keys))
        if len(sizes) > 1:
            raise ConfigError(
                f"batch {self.batch_id} has groups of {sorted(sizes)} rollouts; give each prompt as many."
            )


@dataclass(frozen=True, slots=True)
class GroupPolicy:
    """The handling of rollouts that fail, and of groups without variance.

    Attributes:
        retries: times that a rollout which failed before it was scored is run again, each time with another seed.
        is_zero_variance: tells whether all rewards of a scored group are equal, so that it is replaced; None replaces
            no group.
    """

    retries: int = 0
    is_zero_variance: Callable[[Group], bool] | None = None


class BlockRun:
    """The generation and scoring of one block; belongs to the event loop that `run` is awaited on.

    Args:
        on_groups: called with the groups that are final so far, in order, whenever there are more.
    """

    def __init__(
        self,
        run: Run,
        batch: BatchRequest,
        *,
        policy: GroupPolicy | None = None,
        on_groups: Callable[[list[Group]], None] | None = None,
    ) -> None:
        self.block_id = batch.batch_id
        self.begun = asyncio.Event()
        # the run's settings were checked when it was made
        self._run = copy.copy(run)
        self._run.on_end = _pack_rows
        self._policy = policy or GroupPolicy()
        planned = requests_by_prompt(batch.requests)
        self._candidates = [*planned, *requests_by_prompt(batch.replacements)]
        self._planned = len(planned)
        self._replacements_begun = 0
        self._groups: dict[int, Group] = {}
        self._zero_variance: set[int] = set()
        self._on_groups = on_groups

    async def run(self, policy_version: int) -> ScoredBlock:
        """Generate the block. `begun` is set as soon as every planned group is begun.

        Raises:
            ConfigError: a mistake that every other rollout would repeat.
            NothingScoredError: no rollout got a reward; the message has the commonest cause.
        """
        started = time.perf_counter()
        try:
            with relaxed_gc():
                async with asyncio.TaskGroup() as tasks:
                    for place in range(self._planned):
                        await self._run.limiter.wait_for_room()
                        tasks.create_task(self._group(place, tasks))
                    self.begun.set()
        except BaseExceptionGroup as failed:
            first = failed.exceptions[0]
        else:
            return self._block(policy_version, time.perf_counter() - started)
        finally:
            self.begun.set()
        raise first

    def _block(self, policy_version: int, seconds: float) -> ScoredBlock:
        kept, filtered = self._result()
        block = ScoredBlock(self.block_id, kept, policy_version, seconds, filtered=filtered)
        if not any(rollout.is_scored for rollout in block.launched):
            counts = ", ".join(f"{count} {outcome}" for outcome, count in block.outcomes().most_common())
            cause = most_often(block.commonest_failure())
            raise NothingScoredError(
                f"block {block.block_id}: none of {len(block.launched)} rollouts got a reward ({counts}){cause}",
                block=block,
            )
        return block

    async def _group(self, place: int, tasks: asyncio.TaskGroup) -> None:
        group = self._run.finish_group(await self._rollouts(self._candidates[place]))
        for rollout in group.rollouts:
            # until the block is trained it keeps its rows, its score and what is shown of it
            rollout.state = State()
        self._groups[place] = group
        if self._policy.is_zero_variance is not None and self._policy.is_zero_variance(group):
            self._zero_variance.add(place)
            # one replacement for each such group: what is begun is then the shortest list with enough groups in it,
            # whatever the order in which they end
            next_place = self._planned + self._replacements_begun
            if next_place < len(self._candidates):
                self._replacements_begun += 1
                tasks.create_task(self._group(next_place, tasks))
        if self._on_groups is not None:
            self._on_groups(self._final_groups())

    def _final_groups(self) -> list[Group]:
        """Return the block's first groups, as far as nothing that is still running can change them."""
        final = []
        for place in range(self._planned + self._replacements_begun):
            if place not in self._groups:
                break
            if place not in self._zero_variance:
                final.append(self._groups[place])
        return final

    def _result(self) -> tuple[list[Group], list[Group]]:
        kept = self._final_groups()
        if not kept:
            # a block of such groups alone is trained as it was planned: without a gradient
            planned = range(self._planned)
            others = range(self._planned, self._planned + self._replacements_begun)
            return [self._groups[place] for place in planned], [self._groups[place] for place in others]
        return kept, [self._groups[place] for place in sorted(self._zero_variance)]

    async def _rollouts(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """Play and score the rollouts of a group; those that fail before they have a score are played again."""
        rollouts = await self._run.play(requests)
        lost: Counter[int] = Counter()
        for again in itertools.count(1):
            is_last = again > self._policy.retries
            failed = _failed(rollouts)
            if is_last or not failed:
                await self._run.score(rollouts)
                # the worker that held them may have died
                failed = [
                    index for index in _failed(rollouts) if rollouts[index].outcome is not Outcome.GRADING_ERROR
                ]
            if is_last or not failed:
                break
            failures = {index: rollouts[index].failure for index in failed}
            lost.update(i for i, one in failures.items() if one and isinstance(one.exception, RolloutWorkerError))
            seeds = {index: _seed_again(requests[index].seed, again) for index in failed}
            others = await self._run.play(
                [
                    dataclasses.replace(requests[index], seed=seeds[index], lost_workers=lost[index])
                    for index in failed
                ]
            )
            for index, rollout in zip(failed, others, strict=True):
                rollout.attempts += rollouts[index].attempts
                rollouts[index] = rollout
        return rollouts


def _pack_rows(rollout: Rollout) -> None:
    for row in rollout.rows:
        row.pack()


def _failed(rollouts: Sequence[Rollout]) -> list[int]:
    return [index for index, rollout in enumerate(rollouts) if rollout.outcome.is_failure]


def _seed_again(seed: int | None, attempt: int) -> int | None:
    # the same seed would give a policy's fatal answer once more
    return None if seed is None else random.Random(f"{seed}:again:{attempt}").getrandbits(62) + 1
