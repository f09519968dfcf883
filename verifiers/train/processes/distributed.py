"""Work that rank 0 does for all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from verifiers.errors import RankError

__all__ = ["Ranks", "error_text", "on_all_ranks", "on_rank_0", "scatter_from_rank_0"]

T = TypeVar("T")


def on_rank_0(
    accelerator: Any, work: Callable[[], Any], together: Mapping[str, Callable[..., Any]] | None = None
) -> Any:
    """Run `work` on rank 0 and return its result on all ranks, or raise its failure on all of them.

    Every rank must call it; that is where an error of rank 0's generator ends the others.

    Args:
        accelerator: accelerate's Accelerator or PartialState.
        work: called on rank 0.
        together: what `work` may have all ranks do at once, by name; see `on_all_ranks`.

    Raises:
        RankError: on the other ranks, where `work` failed.
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
        _broadcast(_Result(payload, error_text(failure) if failure is not None else None))
    if failure is not None:
        raise failure
    return payload


def scatter_from_rank_0(
    accelerator: Any, work: Callable[[], Sequence[T]], together: Mapping[str, Callable[..., Any]] | None = None
) -> T:
    """Make one payload a rank on rank 0 and return each rank its own, or raise rank 0's failure on all of them.

    Every rank must call it. Each payload is pickled and sent to its own rank alone.

    Args:
        accelerator: as in `on_rank_0`.
        work: called on rank 0; gives as many payloads as there are ranks, in their order.
        together: as in `on_rank_0`.

    Raises:
        RankError: on the other ranks, where `work` failed.
    """
    payloads: list[T] = []
    on_rank_0(accelerator, lambda: payloads.extend(work()), together)
    if accelerator.num_processes == 1:
        (own,) = payloads
        return own
    import torch.distributed

    received: list[Any] = [None]
    torch.distributed.scatter_object_list(received, payloads if accelerator.is_main_process else None, src=0)
    mine: T = received[0]
    return mine


def on_all_ranks(accelerator: Any, name: str, work: Callable[..., T], *args: Any) -> T:
    """Run `work` on all ranks at once, from inside `on_rank_0`, and return what it gives on rank 0.

    It is for what only ranks together can do, such as a forward pass of a model that is sharded over them.

    Args:
        accelerator: as in `on_rank_0`.
        name: the name under which `on_rank_0` was given `work`.
        work: the function, on rank 0.
        args: its arguments, on every rank.
    """
    if accelerator.num_processes > 1:
        _broadcast(_Call(name, args))
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
    while True:
        message = _broadcast(None)
        if isinstance(message, _Call):
            together[message.name](*message.args)
            continue
        if message.failure is not None:
            raise RankError(f"rank 0 stopped: {message.failure}")
        return message.payload


def _broadcast(message: Any) -> Any:
    from accelerate.utils import broadcast_object_list

    (received,) = broadcast_object_list([message], from_process=0)
    return received


def error_text(error: BaseException) -> str:
    """Return the type and the text of an error."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class Ranks:
    """The processes of a run, as the trainer's parts use them; every rank has one and calls it in the same order.

    Args:
        accelerator: of accelerate.
    """

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._joint_work: dict[str, Callable[..., Any]] = {}

    @property
    def index(self) -> int:
        """The number of this rank."""
        return int(self._accelerator.process_index)

    @property
    def count(self) -> int:
        """The number of ranks."""
        return int(self._accelerator.num_processes)

    @property
    def is_main(self) -> bool:
        """True on rank 0."""
        return bool(self._accelerator.is_main_process)

    def wait_for_all(self) -> None:
        """Wait until every rank has come here."""
        self._accelerator.wait_for_everyone()

    def register(self, name: str, work: Callable[..., Any]) -> None:
        """Name what rank 0 may have all ranks do at once, from inside `on_rank_0`."""
        self._joint_work[name] = work

    def together(self, name: str, *args: Any) -> Any:
        """Run on all ranks what was registered under a name; return what it gives on rank 0."""
        return on_all_ranks(self._accelerator, name, self._joint_work[name], *args)

    def gather(self, own: T) -> list[T]:
        """Return what each rank gives, in their order, on every rank."""
        if self.count == 1:
            return [own]
        from accelerate.utils import gather_object

        gathered: list[T] = gather_object([own])
        return gathered

    def on_rank_0(self, work: Callable[[], Any]) -> Any:
        """Run `work` on rank 0 and return its result on all ranks, or raise its failure on all of them."""
        return on_rank_0(self._accelerator, work, self._joint_work)

    def scatter(self, work: Callable[[], Sequence[T]]) -> T:
        """Make one payload a rank on rank 0 and return each rank its own."""
        return scatter_from_rank_0(self._accelerator, work, self._joint_work)
