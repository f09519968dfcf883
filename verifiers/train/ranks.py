"""What rank 0 does for all ranks, and how a failure of any rank ends all of them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from accelerate.utils import broadcast_object_list

from verifiers.errors import RankError
from verifiers.train.rank_links import Links, WireAddress, join_hub, open_hub
from verifiers.train.rank_watch import RankWatch
from verifiers.train.termination import ended_by_signals

__all__ = ["end_together", "on_all_ranks", "on_rank_0"]

logger = logging.getLogger("verifiers.train")

T = TypeVar("T")

_JOIN_WITHIN_S = 30.0


def on_rank_0(
    accelerator: Any, work: Callable[[], Any], together: Mapping[str, Callable[..., Any]] | None = None
) -> Any:
    """Do something on rank 0 and give its result to all ranks, or raise its failure on all of them.

    Every rank must call it; that is where an error of rank 0's generator ends the others.

    Args:
        together: what `work` may have all ranks do at once, by name; see `on_all_ranks`.
    """
    if not accelerator.is_main_process:
        return _serve_rank_0(together or {})
    payload: Any = None
    failure: Exception | None = None
    try:
        payload = work()
    except Exception as error:
        failure = error
    if accelerator.num_processes > 1:
        text = f"{type(failure).__name__}: {failure}" if failure is not None else None
        broadcast_object_list([_Result(payload, text)], from_process=0)
    if failure is not None:
        raise failure
    return payload


def on_all_ranks(accelerator: Any, name: str, work: Callable[..., T], *args: Any) -> T:
    """Have all ranks do something at once, from inside `on_rank_0`: what only ranks together can, such as a forward
    pass of a model that is sharded over them.

    Args:
        name: under which `on_rank_0` was given it.
        work: it, on this rank.
        args: its arguments, on every rank.

    Returns:
        What it gives on rank 0.
    """
    if accelerator.num_processes > 1:
        broadcast_object_list([_Call(name, args)], from_process=0)
    return work(*args)


@dataclass(frozen=True, slots=True)
class _Call:
    name: str
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Result:
    payload: Any
    failure: str | None


def _serve_rank_0(together: Mapping[str, Callable[..., Any]]) -> Any:
    """Do what rank 0 asks for until it is done."""
    while True:
        (said,) = broadcast_object_list([None], from_process=0)
        if isinstance(said, _Call):
            together[said.name](*said.args)
            continue
        if said.failure is not None:
            raise RankError(f"rank 0 stopped: {said.failure}")
        return said.payload


def end_together(
    accelerator: Any,
    work: Callable[[], T],
    close: Callable[[], None],
    *,
    watched: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    give_back: Callable[[BaseException], None] = lambda error: None,
) -> T:
    """Do this rank's part of a run, and then `close`; a rank that fails, is stopped or vanishes ends all of them.

    Every rank must call it. What one rank raises is raised there, and as RankError with its text on the others, from
    whatever they do: waiting, computing, or in a collective. A rank that cannot be woken within seconds is ended.
    SIGINT and SIGTERM do what `Ending` says until everything is closed.

    Args:
        close: gives back what this rank holds.
        watched: makes a context that is left after `close`, with what ended the run.
        give_back: what of `close` other processes would miss; called with what ended the run, in another thread,
            where this one cannot be woken.

    Raises:
        RankError: another rank failed, was stopped, or vanished.
    """
    if accelerator.num_processes == 1:
        with ended_by_signals() as ending:
            with watched():
                try:
                    result = work()
                finally:
                    try:
                        ending.begin()
                    finally:
                        # also where a signal came just before
                        close()
            ending.raise_waiting()
        return result
    watch = RankWatch(_lines_between(accelerator), accelerator.num_processes, give_back)
    try:
        with watched():
            result = _end_as_others(accelerator, work, close, watch)
    finally:
        watch.end()
    watch.ending.raise_waiting()
    return result


def _end_as_others(accelerator: Any, work: Callable[[], T], close: Callable[[], None], watch: RankWatch) -> T:
    failure: BaseException | None = None
    try:
        result = work()
        # a rank that fails after this one is done is not to be left alone
        accelerator.wait_for_everyone()
    except BaseException as error:
        failure = watch.conclude(error)
        if failure is error:
            raise
    finally:
        try:
            watch.ending.begin()
        finally:
            close()
    if failure is not None:
        raise failure
    return result


def _lines_between(accelerator: Any) -> Links:
    opened: list[Links] = []

    def listen() -> WireAddress:
        links, address = open_hub()
        opened.append(links)
        return address

    address = on_rank_0(accelerator, listen)
    if opened:
        return opened[0]
    rank = accelerator.process_index
    try:
        return join_hub(rank, address, _JOIN_WITHIN_S)
    except OSError as error:
        logger.warning(
            "rank %d cannot reach rank 0 at %s:%d (%s), so it learns of other ranks' failures only by collectives "
            "that break or run out of time; let that host accept connections from this one.",
            rank,
            address.host,
            address.port,
            error,
        )
        return Links(rank)
