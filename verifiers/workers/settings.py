"""Settings of rollout workers: the table `[workers]` of a run file, and `vf-eval --workers`."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from verifiers.errors import ConfigError
from verifiers.installation import install_hint

if TYPE_CHECKING:
    from verifiers.workers.pool import InlineWorkers, RemoteWorkers, WorkerEngine

_OF_RAY = "{name} is for engine = 'ray', and engine is '{engine}'; leave {name} out or change engine"
_NO_CLIENT = (
    "address is '{address}', and rank 0 has to be on a node of the Ray cluster, since workers connect to it; give "
    "'auto', or the address of the head as host:6379"
)


class WorkerSettings(BaseModel):
    """`[workers]`: where environments run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: Literal["inline", "processes", "ray"] = Field(
        default="inline",
        description="'inline', beside the trainer, 'processes' of this machine, or 'ray', actors of a Ray cluster.",
    )
    count: int | None = Field(
        default=None,
        ge=1,
        description="Workers; by default the usable cores minus two, or as many as the Ray cluster has room for.",
    )
    address: str = Field(default="auto", description="The Ray cluster, as `ray.init` takes it.")
    cpus: float = Field(default=1.0, gt=0, description="CPUs of one worker, as Ray counts them.")
    resources: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict, description="Further resources of one worker, as Ray names them."
    )
    start_timeout: float = Field(
        default=0.0, ge=0, description="Seconds that nodes may take to join Ray, until it has room for the workers."
    )
    multiplex: int = Field(default=64, ge=1, description="Rollouts in flight in one worker.")

    @model_validator(mode="after")
    def _fits_engine(self) -> WorkerSettings:
        given = [name for name in ("address", "cpus", "resources", "start_timeout") if name in self.model_fields_set]
        if given and self.engine != "ray":
            raise PydanticCustomError("workers", _OF_RAY, {"name": given[0], "engine": self.engine})
        if "://" in self.address:
            raise PydanticCustomError("workers", _NO_CLIENT, {"address": self.address})
        if "CPU" in self.resources:
            raise PydanticCustomError("workers", "resources has CPU; give cpus instead")
        return self

    @classmethod
    def parse(cls, text: str) -> WorkerSettings:
        """Return the settings of a flag: "inline", "processes", "processes:8", "ray" or "ray:64"."""
        engine, colon, count = text.partition(":")
        names = cls.model_fields["engine"].annotation.__args__  # type: ignore[union-attr]
        if engine not in names:
            raise ConfigError(f"--workers is {text!r}; give {', '.join(names)}, with a number as in 'processes:8'.")
        if colon and not (count.isdecimal() and int(count)):
            raise ConfigError(f"--workers is {text!r}; the number of workers is 1 or more, as in 'processes:8'.")
        return cls(engine=engine, count=int(count) if colon else None)  # type: ignore[arg-type]

    def open(
        self, factories: Sequence[tuple[Any, Callable[[], Any]]], *, blocked_s: float
    ) -> InlineWorkers | RemoteWorkers:
        """Return the workers of a run; they start when the first rollout is asked of them.

        Args:
            factories: environments of rank 0, each with a function that makes the same one in a worker.
        """
        from verifiers.workers.pool import InlineWorkers, RemoteWorkers

        if self.engine == "inline":
            return InlineWorkers()
        make_engine: Callable[[], WorkerEngine]
        if self.engine == "processes":
            from verifiers.workers.processes import ProcessEngine

            make_engine = functools.partial(ProcessEngine, self.workers)
        elif importlib.util.find_spec("ray") is None:
            raise ConfigError(f"workers of engine 'ray' need Ray; {install_hint('ray')}.")
        else:
            from verifiers.workers.ray_engine import RayEngine

            make_engine = functools.partial(
                RayEngine,
                self.count,
                address=self.address,
                cpus=self.cpus,
                resources=self.resources,
                joins_s=self.start_timeout,
                multiplex=self.multiplex,
            )
        return RemoteWorkers(make_engine, factories, multiplex=self.multiplex, blocked_s=blocked_s)

    @property
    def workers(self) -> int:
        # a container or a batch job may use fewer cores than the machine has
        usable = getattr(os, "sched_getaffinity", None)
        cores = len(usable(0)) if usable is not None else os.cpu_count() or 1
        return self.count or max(1, cores - 2)
