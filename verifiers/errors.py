"""Every exception that verifiers raises, in one tree.

Error:
    ├── ConfigError (ValueError)              a setting, size or file from the user that cannot work
    │   └── UnknownEnvironmentError           no entry point and no module has that name
    ├── EnvironmentLoadError (RuntimeError)   an environment's own code failed while it was loaded
    ├── ModelError                            the policy's endpoint did not give a usable answer
    │   ├── InvalidModelResponseError         a response that cannot be read
    │   │   └── EmptyModelResponseError       it has no choice
    │   ├── OverlongPromptError               the prompt does not fit the context; the rollout is truncated
    │   ├── MissingTokenIdsError              token lists were asked for of an answer without token ids or log-probs
    │   └── ProviderError (ConnectionError)   the endpoint refused, failed or could not be reached
    ├── ToolError
    │   ├── ToolParseError (ValueError)       arguments of a tool call that are not the JSON asked for
    │   └── ToolCallError (RuntimeError)      a tool that raised
    ├── AgentError (RuntimeError)             an agent that owns its loop failed, or made no call
    ├── InfraError (RuntimeError)             the machinery around the policy failed
    │   ├── SandboxError                      a sandbox could not be started or died
    │   ├── RolloutWorkerError                a worker process or actor died under its rollouts
    │   └── WorkerError                       a worker process died
    │       └── WorkerTimeoutError (TimeoutError)  it was killed at its deadline
    ├── WorkerCallError (RuntimeError)        the function called in a worker process raised
    ├── GradingError (RuntimeError)           a reward function raised, hung or gave no number
    ├── GenerationError (RuntimeError)        a block of rollouts could not be produced
    │   ├── NothingScoredError                no rollout of a block got a reward
    │   └── DeadlineError (TimeoutError)      a wait ran past its deadline
    ├── GeneratorClosedError (RuntimeError)   a block was asked of a generator that is closed
    ├── WeightSyncError (RuntimeError)        new weights did not reach the rollout server
    │   └── WeightProbeError                  they were acknowledged, but the server samples from other weights
    ├── CheckpointError (RuntimeError)        a checkpoint is missing, incomplete or of another plan
    ├── HubError (RuntimeError)               the Hugging Face Hub did not take what was pushed; it stays on the disk
    ├── NotFiniteError (FloatingPointError)   the policy's updates or weights are infinite or not a number
    └── RankError (RuntimeError)              another process of the run failed, was stopped or disappeared

Each class also inherits the standard exception that a caller would expect, so `except ValueError` works where
it always did. `asyncio.CancelledError` is none of these and always passes.
"""

from __future__ import annotations


class Error(Exception):
    """Base of every exception that verifiers raises."""


class ConfigError(Error, ValueError):
    """A setting, size, dataset or file given by the user cannot work; the message says how to fix it."""


class AgentError(Error, RuntimeError):
    """An agent that owns its loop failed, or ended without a call. The rollout ends as `environment_error`."""


class UnknownEnvironmentError(ConfigError):
    """No installed package or module provides the environment; the message names the nearest ones."""


class EnvironmentLoadError(Error, RuntimeError):
    """An environment was found, but its own code failed while it was imported or made; `__cause__` is the error."""


class ModelError(Error):
    """The policy's endpoint did not give a usable answer. The rollout ends as `provider_error`."""


class InvalidModelResponseError(ModelError):
    """The policy's endpoint gave an answer that cannot be read."""


class EmptyModelResponseError(InvalidModelResponseError):
    """The endpoint answered without a choice."""


class OverlongPromptError(ModelError):
    """The prompt is longer than the model's context. The rollout ends as `truncated`, not as an error."""


class MissingTokenIdsError(ModelError):
    """Token lists were asked for of an answer that lacks token ids or log-probs; text is never re-tokenized."""


class ProviderError(ModelError, ConnectionError):
    """The endpoint refused, failed, or could not be reached, after the retries that make sense.

    Attributes:
        status: HTTP status of the last answer, or None when there was none.
        body: text of the last answer, at most 2,000 characters.
    """

    def __init__(self, message: str, *, status: int | None = None, body: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.body = body[:2000]


class ToolError(Error):
    """A tool call went wrong. Tool environments turn it into a tool message."""


class ToolParseError(ToolError, ValueError):
    """The arguments of a tool call are not the JSON that the tool's schema asks for."""


class ToolCallError(ToolError, RuntimeError):
    """The tool raised."""


class InfraError(Error, RuntimeError):
    """The machinery around the policy failed. The rollout ends as `environment_error`."""


class SandboxError(InfraError):
    """A sandbox could not be started, or died."""


class RolloutWorkerError(InfraError):
    """A rollout worker died: killed, out of memory, or its code held it. The message has its number and its end."""


class WorkerError(InfraError):
    """A worker process died before it answered: out of memory, killed, or crashed. The next call gets a new one."""


class WorkerTimeoutError(WorkerError, TimeoutError):
    """A call in a worker process ran past its deadline; the worker was killed."""


class WorkerCallError(Error, RuntimeError):
    """The function called in a worker process raised.

    Attributes:
        kind: the name of the exception's class there.
    """

    def __init__(self, message: str, *, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


class GradingError(Error, RuntimeError):
    """A reward function raised, hung, or returned no number. The rollout has no reward and is not trained on."""


class GenerationError(Error, RuntimeError):
    """A block of rollouts could not be produced. Raised in the trainer's thread, with its cause chained."""


class NothingScoredError(GenerationError):
    """No rollout of a block got a reward. The message names the commonest cause and its count.

    Attributes:
        block: the `ScoredBlock`; None for an evaluation.
    """

    def __init__(self, message: str, *, block: object = None) -> None:
        super().__init__(message)
        self.block = block


class DeadlineError(GenerationError, TimeoutError):
    """A wait ran past its deadline. The message says what was waited for and which setting is the deadline."""


class GeneratorClosedError(Error, RuntimeError):
    """A block was submitted to, or asked of, a generator that is closed."""


class WeightSyncError(Error, RuntimeError):
    """The rollout server did not take a push of weights. Training stops: stale samples would look fresh."""


class WeightProbeError(WeightSyncError):
    """The server acknowledged a push, but its log-probs are not those of the pushed weights."""


class CheckpointError(Error, RuntimeError):
    """A checkpoint is missing, incomplete, of another batch plan, or does not give its weights back."""


class HubError(Error, RuntimeError):
    """The Hugging Face Hub did not take what was pushed; the message names where it is on the disk."""


class NotFiniteError(Error, FloatingPointError):
    """Updates in a row, or the policy's weights, hold infinite values or nan. Nothing of it is saved or pushed."""


class RankError(Error, RuntimeError):
    """Another process of the run failed or ended; the message has its rank and its error, where it raised one."""
