"""One block while it is generated: its groups are begun in plan order, scored as they end, and handed on in order.

What is handed on is decided by identity and by what the rollouts became, never by the order in which they ended: a
group that is replaced makes room for the next of a planned list of spare prompts, and the block is the first groups
of that whole list which were kept.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from verifiers.concurrency import gather_owned
from verifiers.errors import ConfigError, NothingScoredError
from verifiers.rollouts.client import RolloutClient
from verifiers.rollouts.garbage import fewer_collections
from verifiers.rollouts.rollout import Group, Rollout, RolloutRequest, ScoredBlock
from verifiers.rollouts.run import RolloutRunner
from verifiers.types import Failure, Outcome, RolloutKey, State, Timing

__all__ = ["STRAGGLER", "BlockRun", "GroupPolicy"]

STRAGGLER = "Straggler"
"""`Failure.kind` of a rollout that was given up by `BlockRun.drop_stragglers`."""


@dataclass(frozen=True, slots=True)
class GroupPolicy:
    """What becomes of rollouts that fail or lag, and of groups that teach nothing.

    Attributes:
        retries: times that a rollout which failed before it was scored is run again, each time with another seed.
        is_flat: says of a scored group that it teaches nothing and is to be replaced by a spare one; None replaces
            none.
    """

    retries: int = 0
    is_flat: Callable[[Group], bool] | None = None

    def __post_init__(self) -> None:
        if self.retries < 0:
            raise ConfigError(f"rollout_retries is {self.retries}; give 0 (never again) or more.")


class BlockRun:
    """Generates and scores one block; belongs to the event loop that `run` is awaited on.

    Args:
        requests: the planned rollouts; those of a prompt make a group.
        spares: rollouts of prompts that stand in for flat groups, in the order in which they are used.
        on_groups: called with the groups that are settled so far, in order, whenever there are more.
    """

    def __init__(
        self,
        runner: RolloutRunner,
        block_id: int,
        requests: Sequence[RolloutRequest],
        *,
        policy: GroupPolicy | None = None,
        spares: Sequence[RolloutRequest] = (),
        on_groups: Callable[[list[Group]], None] | None = None,
    ) -> None:
        self.block_id = block_id
        self.begun = asyncio.Event()
        self._runner = runner
        self._policy = policy or GroupPolicy()
        self._candidates = [*_by_prompt(requests), *_by_prompt(spares)]
        self._planned = len(_by_prompt(requests))
        self._spares_used = 0
        self._groups: dict[int, Group] = {}
        self._flat: set[int] = set()
        self._deadlines: dict[RolloutKey, asyncio.Timeout] = {}
        self._size = len(requests)
        self._ended = 0
        self._dropping = False
        self._on_groups = on_groups

    async def run(self, policy_version: int) -> ScoredBlock:
        """Generate the block. `begun` is set as soon as every planned group is begun.

        Raises:
            ConfigError, MissingTokenIdsError: a mistake that every other rollout would repeat.
            NothingScoredError: no rollout got a reward; the message has the commonest cause.
        """
        started = time.perf_counter()
        try:
            with fewer_collections():
                async with asyncio.TaskGroup() as tasks:
                    for place in range(self._planned):
                        await self._runner.limiter.wait_for_room()
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
            raise NothingScoredError(_nothing_scored(block), block=block)
        return block

    def drop_stragglers(self) -> None:
        """Give up what is still running, as soon as half of the block's rollouts have ended."""
        self._dropping = True
        self._drop()

    # -- groups ---------------------------------------------------------------------------------------------

    async def _group(self, place: int, tasks: asyncio.TaskGroup) -> None:
        rollouts = await gather_owned([self._one(request) for request in self._candidates[place]])
        group = await self._runner.finish_group(rollouts)
        self._groups[place] = group
        if self._policy.is_flat is not None and self._policy.is_flat(group):
            self._flat.add(place)
            # one spare for each flat group: what is begun is then the shortest list with enough groups in it,
            # whatever the order in which they end
            spare = self._planned + self._spares_used
            # where stragglers are given up the block is wanted now: a spare would be given up as it begins
            if spare < len(self._candidates) and not self._dropping:
                self._spares_used += 1
                tasks.create_task(self._group(spare, tasks))
        if self._on_groups is not None:
            self._on_groups(self._settled())

    def _settled(self) -> list[Group]:
        """The block's first groups, as far as nothing that is still running can change them."""
        settled = []
        for place in range(self._planned + self._spares_used):
            if place not in self._groups:
                break
            if place not in self._flat:
                settled.append(self._groups[place])
        return settled

    def _result(self) -> tuple[list[Group], list[Group]]:
        kept = self._settled()
        if not kept:
            # a block of flat groups alone is trained as it was planned: without a gradient
            planned = range(self._planned)
            spare = range(self._planned, self._planned + self._spares_used)
            return [self._groups[place] for place in planned], [self._groups[place] for place in spare]
        return kept, [self._groups[place] for place in sorted(self._flat)]

    # -- rollouts -------------------------------------------------------------------------------------------

    async def _one(self, request: RolloutRequest) -> Rollout:
        straggling = asyncio.timeout(None)
        started = time.perf_counter()
        self._deadlines[request.key] = straggling
        begun: list[RolloutClient] = []
        try:
            async with straggling:
                return await self._tries(request, begun)
        except TimeoutError:
            if not straggling.expired():
                raise
            return _dropped(request, time.perf_counter() - started, begun)
        finally:
            del self._deadlines[request.key]
            self._ended += 1
            if self._dropping:
                self._drop()

    async def _tries(self, request: RolloutRequest, begun: list[RolloutClient]) -> Rollout:
        rollout = await self._runner.run_one(request, begun.append)
        for again in range(1, self._policy.retries + 1):
            if not rollout.outcome.is_failure:
                break
            before = rollout
            another = dataclasses.replace(request, seed=_seed_again(request.seed, again))
            rollout = await self._runner.run_one(another, begun.append)
            rollout.attempts += before.attempts
        return rollout

    def _drop(self) -> None:
        if 2 * self._ended < self._size:
            return
        now = asyncio.get_running_loop().time()
        for deadline in self._deadlines.values():
            if not deadline.expired():
                deadline.reschedule(now)


def _by_prompt(requests: Sequence[RolloutRequest]) -> list[list[RolloutRequest]]:
    groups: dict[int, list[RolloutRequest]] = {}
    for request in requests:
        groups.setdefault(request.key.example_id, []).append(request)
    return list(groups.values())


def _seed_again(seed: int | None, attempt: int) -> int | None:
    # the same seed would give a policy's fatal answer once more
    return None if seed is None else random.Random(f"{seed}:again:{attempt}").getrandbits(62) + 1


def _dropped(request: RolloutRequest, seconds: float, begun: Sequence[RolloutClient]) -> Rollout:
    """A straggler, with the turns that had ended; the one that it was in is known by its seconds alone."""
    rollout = Rollout(
        key=request.key,
        outcome=Outcome.CANCELLED,
        prompt=request.prompt,
        completion="" if isinstance(request.prompt, str) else [],
        answer=request.answer,
        task=request.task,
        info=dict(request.info),
        failure=Failure(STRAGGLER, f"still running when its block was wanted, after {seconds:.1f} s"),
        timing=Timing(generation_s=seconds),
        state=State(),
    )
    if begun:
        begun[-1].tell(rollout)
        rollout.attempts += sum(1 + client.retries for client in begun[:-1])
    return rollout


def _nothing_scored(block: ScoredBlock) -> str:
    counts = ", ".join(f"{count} {outcome}" for outcome, count in block.outcomes().most_common())
    commonest = block.commonest_failure()
    cause = f"; most often: {commonest[0]} ({commonest[1]} times)" if commonest else ""
    return f"block {block.block_id}: none of {len(block.launched)} rollouts got a reward ({counts}){cause}"
