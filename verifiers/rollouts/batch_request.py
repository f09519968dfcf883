"""BatchRequest: what a generator is asked for, one block at a time, as columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verifiers.errors import ConfigError
from verifiers.rollouts.rollout import RolloutRequest
from verifiers.types import RolloutKey

__all__ = ["BatchRequest"]


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One block to generate.

    Attributes:
        batch_id: the block id; blocks are taken by it.
        env_inputs: columns `prompt`, and where there are any `answer`, `task`, `info`, `example_id`, `seed`;
            each prompt appears `num_generations` times in a row. `seed` is each rollout's sampling seed.
        num_generations: size of a group.
        policy_version: version on the server when the block is submitted, stamped on tokens that the server does not
            stamp itself; None keeps the generator's present version.
        replacements: columns like `env_inputs`, of prompts that replace zero-variance groups, in the order in which
            they are used; empty for none.
    """

    batch_id: int
    env_inputs: Mapping[str, Sequence[Any]]
    num_generations: int = 1
    policy_version: int | None = None
    replacements: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    @classmethod
    def of_rollouts(
        cls,
        batch_id: int,
        requests: Sequence[RolloutRequest],
        *,
        policy_version: int | None = None,
        replacements: Sequence[RolloutRequest] = (),
    ) -> BatchRequest:
        """Return the request for a list of rollouts; those of a prompt stand together and are as many for each.

        Raises:
            ConfigError: groups of different sizes.
        """
        sizes = set(Counter(request.key.example_id for request in (*requests, *replacements)).values())
        if len(sizes) > 1:
            raise ConfigError(f"batch {batch_id} has groups of {sorted(sizes)} rollouts; give each prompt as many.")
        size = sizes.pop() if sizes else 1
        return cls(batch_id, _columns(requests), size, policy_version, _columns(replacements))

    def requests(self) -> list[RolloutRequest]:
        """Return the rollouts asked for, in order.

        Raises:
            ConfigError: no prompts, columns of unequal length, an incomplete last group, or a prompt in two places.
        """
        if not len(self.env_inputs.get("prompt") or ()):
            raise ConfigError(f"batch {self.batch_id} has no prompts; give env_inputs a column 'prompt'.")
        return self._rollouts(self.env_inputs)

    def replacement_requests(self) -> list[RolloutRequest]:
        """Return the rollouts of the replacements, in order.

        Raises:
            ConfigError: as `requests`.
        """
        return self._rollouts(self.replacements)

    def _rollouts(self, inputs: Mapping[str, Sequence[Any]]) -> list[RolloutRequest]:
        columns = {name: values for name, values in inputs.items() if values is not None}
        count, size = len(columns.get("prompt", ())), self.num_generations
        for name, values in columns.items():
            if len(values) != count:
                raise ConfigError(
                    f"batch {self.batch_id}: column {name!r} has {len(values)} values, 'prompt' has {count}."
                )
        if size < 1:
            raise ConfigError(f"batch {self.batch_id}: num_generations is {size}; give 1 or more.")
        if count % size:
            raise ConfigError(
                f"batch {self.batch_id} has {count} prompts, which num_generations={size} does not divide."
            )
        requests = [self._request(columns, row) for row in range(count)]
        repeated = [key for key, count in Counter(request.key for request in requests).items() if count > 1]
        if repeated:
            raise ConfigError(
                f"batch {self.batch_id}: the rows of example_id {repeated[0].example_id} do not stand together; give "
                f"each prompt num_generations={size} times in a row, under one example_id."
            )
        return requests

    def _request(self, columns: Mapping[str, Sequence[Any]], row: int) -> RolloutRequest:
        def cell(name: str, default: Any) -> Any:
            values = columns.get(name)
            return default if values is None or values[row] is None else values[row]

        group, generation = divmod(row, self.num_generations)
        return RolloutRequest(
            RolloutKey(self.batch_id, int(cell("example_id", group)), generation),
            prompt=cell("prompt", ""),
            answer=cell("answer", ""),
            task=cell("task", "default"),
            info=cell("info", {}),
            seed=cell("seed", None),
        )


def _columns(requests: Sequence[RolloutRequest]) -> dict[str, list[Any]]:
    if not requests:
        return {}
    names = ("prompt", "answer", "task", "info", "seed")
    columns = {name: [getattr(request, name) for request in requests] for name in names}
    return {**columns, "example_id": [request.key.example_id for request in requests]}
