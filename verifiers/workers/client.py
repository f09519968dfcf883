"""The model's client inside a worker: it looks like any rollout's client, and asks rank 0."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from typing import Any

from verifiers.inference.endpoint import CHAT, COMPLETIONS
from verifiers.inference.retry import RetryPolicy
from verifiers.inference.wire import WireObject, given_arguments, request_body
from verifiers.rollouts.recording_client import RecordedAnswer, RolloutClient
from verifiers.workers.connection import Connection, error_from

__all__ = ["ModelCalls", "WorkerClient"]

_ONE_TRY = RetryPolicy(max_attempts=1)


class ModelCalls:
    """The calls of the model that a worker has under way.

    Args:
        connection: to rank 0.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}

    async def call(self, rollout: int, path: str, arguments: Mapping[str, Any], *, trained: bool) -> tuple[int, Any]:
        """Return the number and the answer of a call.

        Args:
            rollout: its number.
            path: of the route.
            arguments: of `create`.
            trained: the call is of the policy, and part of the rollout.

        Raises:
            Exception: what the call raised on rank 0.
        """
        number = next(self._numbers)
        plain = given_arguments(arguments)
        if type(plain.get("timeout")).__name__ == "Timeout":
            # the SDK's, of which a backend reads this
            plain["timeout"] = plain["timeout"].read
        if plain.get("messages") is not None:
            plain["messages"] = request_body(plain)["messages"]
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._connection.send(
                {
                    "op": "call",
                    "call": number,
                    "rollout": rollout,
                    "path": path,
                    "arguments": plain,
                    "trained": trained,
                }
            )
            return number, await answer
        except asyncio.CancelledError:
            self._connection.send({"op": "abandon", "call": number, "rollout": rollout})
            raise
        finally:
            del self._waiting[number]

    def answer(self, message: Mapping[str, Any]) -> None:
        """Take rank 0's answer to a call."""
        waiting = self._waiting.get(message["call"])
        if waiting is None or waiting.done():
            return
        if "error" in message:
            waiting.set_exception(error_from(message["error"]))
        else:
            waiting.set_result(message["response"])

    def forget(self, rollout: int, number: int) -> None:
        """Take the answer of a call out of the rollout's trace."""
        self._connection.send({"op": "forget_answer", "rollout": rollout, "call": number})


class _Answer(WireObject):
    __slots__ = ("number",)

    number: int


class _PolicyBackend:
    """A backend that sends the trained calls of one rollout; retries, limits and seeds are rank 0's."""

    def __init__(self, calls: ModelCalls, rollout: int, base_url: str, api_key: str) -> None:
        self._calls, self._rollout = calls, rollout
        self.base_url, self.api_key = base_url, api_key

    async def call(self, path: str, arguments: Mapping[str, Any]) -> Any:
        number, response = await self._calls.call(self._rollout, path, arguments, trained=True)
        answer = _Answer(response)
        answer.number = number
        return answer

    async def close(self) -> None:
        """Do nothing: no connection is open."""


class WorkerClient(RolloutClient):
    """The client of one rollout in a worker.

    Args:
        calls: to rank 0.
        rollout: its number.
        model: name of the trained policy.
        base_url, api_key: of the policy's server, which environments may read.
    """

    def __init__(self, calls: ModelCalls, rollout: int, model: str, base_url: str = "", api_key: str = "") -> None:
        super().__init__(_PolicyBackend(calls, rollout, base_url, api_key), retry=_ONE_TRY, model=model)
        self._calls, self._rollout = calls, rollout
        self._numbers: dict[RecordedAnswer, int] = {}

    @property
    def untrained(self) -> RolloutClient:
        other = WorkerClient(self._calls, self._rollout, self._model or "", self.base_url, self.api_key)
        other._trained = False
        return other

    async def call(self, path: str, arguments: dict[str, Any]) -> tuple[Any, RecordedAnswer | None]:
        if not self._trained or arguments.get("model") != self._model:
            _, response = await self._calls.call(self._rollout, path, arguments, trained=False)
            return (WireObject(response) if path in (CHAT, COMPLETIONS) else response), None
        answer, recorded = await super().call(path, arguments)
        if recorded is not None:
            self._numbers[recorded] = answer.number
        return answer, recorded

    def forget(self, answer: RecordedAnswer) -> None:
        super().forget(answer)
        self._calls.forget(self._rollout, self._numbers.pop(answer))
