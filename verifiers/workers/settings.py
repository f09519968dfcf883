"""Settings of rollout workers: the table `[workers]` of a run file, and `vf-eval --workers`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from verifiers.errors import ConfigError

if TYPE_CHECKING:
    from verifiers.workers.pool import RolloutWorkers

__all__ = ["WorkerSettings"]


class WorkerSettings(BaseModel):
    """`[workers]`: where environments run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: Literal["inline", "processes"] = Field(
        default="inline", description="'inline', beside the trainer, or 'processes' of this machine."
    )
    count: int | None = Field(default=None, ge=1, description="Workers; by default the usable cores minus two.")
    multiplex: int = Field(default=64, ge=1, description="Rollouts in flight in one worker.")
    recycle_mb: int = Field(
        default=1024, ge=1, description="A worker that has grown by so many MiB is replaced between two groups."
    )

    @classmethod
    def parse(cls, text: str) -> WorkerSettings:
        """Return the settings of a flag: "inline", "processes" or "processes:8".

        Raises:
            ConfigError: another engine, or a number of workers that is none.
        """
        engine, colon, count = text.partition(":")
        names = cls.model_fields["engine"].annotation.__args__  # type: ignore[union-attr]
        if engine not in names:
            raise ConfigError(f"--workers is {text!r}; give {' or '.join(names)}, with a number as in 'processes:8'.")
        if colon and not (count.isdecimal() and int(count)):
            raise ConfigError(f"--workers is {text!r}; the number of workers is 1 or more, as in 'processes:8'.")
        return cls(engine=engine, count=int(count) if colon else None)  # type: ignore[arg-type]

    def open(self, factories: Sequence[tuple[Any, Callable[[], Any]]], *, blocked_s: float) -> RolloutWorkers:
        """Return the workers of a run; they start when the first rollout is asked of them.

        Args:
            factories: environments of rank 0, each with a function that makes the same one in a worker.
            blocked_s: see `RemoteWorkers`.

        Raises:
            ConfigError: a factory that cannot be pickled.
        """
        from verifiers.workers.pool import InlineWorkers, RemoteWorkers

        if self.engine == "inline":
            return InlineWorkers()
        from verifiers.workers.processes import ProcessEngine

        return RemoteWorkers(
            lambda: ProcessEngine(self.workers),
            factories,
            multiplex=self.multiplex,
            recycle_bytes=self.recycle_mb << 20,
            blocked_s=blocked_s,
        )

    @property
    def workers(self) -> int:
        """The number of workers on this machine."""
        # a container or a batch job may use fewer cores than the machine has
        usable = getattr(os, "sched_getaffinity", None)
        cores = len(usable(0)) if usable is not None else os.cpu_count() or 1
        return self.count or max(1, cores - 2)
