# The public names and where each is defined: type checkers and `verifiers/__init__.py` read this file.

from typing import Any

from .checks.environment_check import check as check
from .data.curriculum import Curriculum as Curriculum
from .data.adaptive_curriculum import curriculum_from as curriculum_from
from .data.sampler import RepeatSampler as RepeatSampler
from .envs.agent_env import AgentEnv as AgentEnv
from .classic.example_datasets import load_example_dataset as load_example_dataset
from .classic.late_names import ToolDef as Tool
from .envs.env_group import EnvGroup as EnvGroup
from .envs.environment import Environment as Environment
from .envs.external_env import ExternalEnv as ExternalEnv
from .envs.lifecycle import cleanup as cleanup, stop as stop, teardown as teardown
from .envs.multiturn_env import MultiTurnEnv as MultiTurnEnv, SingleTurnEnv as SingleTurnEnv
from .envs.program_env import ProgramEnv as ProgramEnv
from .envs.registry import load_environment as load_environment
from .envs.sandbox_env import PythonEnv as PythonEnv, SandboxEnv as SandboxEnv
from .envs.tool_env import StatefulToolEnv as StatefulToolEnv, ToolEnv as ToolEnv
from .errors import (
    AgentError as AgentError,
    ConfigError as ConfigError,
    EmptyModelResponseError as EmptyModelResponseError,
    Error as Error,
    GradingError as GradingError,
    InfraError as InfraError,
    ModelError as ModelError,
    OverlongPromptError as OverlongPromptError,
    ProviderError as ProviderError,
    SandboxError as SandboxError,
    ToolCallError as ToolCallError,
    ToolError as ToolError,
    ToolParseError as ToolParseError,
    UnknownEnvironmentError as UnknownEnvironmentError,
    WorkerCallError as WorkerCallError,
    WorkerError as WorkerError,
    WorkerTimeoutError as WorkerTimeoutError,
)
from .images import image_part as image_part
from .integrations.dataserver import RemoteEnv as RemoteEnv
from .integrations.dataserver_trl import RemoteRLDataset as RemoteRLDataset, remote_reward as remote_reward
from .integrations.gymnasium import GymEnv as GymEnv
from .integrations.harbor import HarborEnv as HarborEnv
from .integrations.mcp import MCPEnv as MCPEnv
from .integrations.openenv import OpenEnvEnv as OpenEnvEnv
from .integrations.reasoning_gym import ReasoningGymEnv as ReasoningGymEnv
from .integrations.textarena import TextArenaEnv as TextArenaEnv
from .log import setup_logging as setup_logging
from .parsers.messages import print_prompt_completions_sample as print_prompt_completions_sample
from .parsers.parser import (
    MaybeThinkParser as MaybeThinkParser,
    Parser as Parser,
    ThinkParser as ThinkParser,
    extract_boxed_answer as extract_boxed_answer,
    extract_hash_answer as extract_hash_answer,
)
from .parsers.xml_parser import XMLParser as XMLParser
from .rollouts.block import BatchRequest as BatchRequest
from .rollouts.generator import AsyncBatchGenerator as AsyncBatchGenerator
from .rubrics.judge_rubric import JudgeRubric as JudgeRubric
from .rubrics.math_rubric import MathRubric as MathRubric
from .rubrics.ranking_rubric import RankingRubric as RankingRubric
from .rubrics.rubric import Rubric as Rubric, RubricGroup as RubricGroup
from .rubrics.scoring import role_reward as role_reward, turn_reward as turn_reward
from .rubrics.shaping import (
    EpisodicSumRubric as EpisodicSumRubric,
    from_trl as from_trl,
    overlong_penalty as overlong_penalty,
    r1_zero_reward as r1_zero_reward,
)
from .rubrics.tool_rubric import ToolRubric as ToolRubric
from .sandbox.spec import Sandbox as Sandbox, SandboxSpec as SandboxSpec
from .train.config import GRPOConfig as GRPOConfig, grpo_defaults as grpo_defaults, lora_defaults as lora_defaults
from .train.models import (
    get_model as get_model,
    get_model_and_tokenizer as get_model_and_tokenizer,
    get_tokenizer as get_tokenizer,
)
from .train.trainer import GRPOTrainer as GRPOTrainer
from .types import (
    AssistantMessage as AssistantMessage,
    ChatMessage as ChatMessage,
    ClientConfig as ClientConfig,
    GenerateInputs as GenerateInputs,
    GenerateOutputs as GenerateOutputs,
    Info as Info,
    Message as Message,
    MessageType as MessageType,
    Messages as Messages,
    ModelResponse as ModelResponse,
    ProcessedOutputs as ProcessedOutputs,
    RewardFunc as RewardFunc,
    RolloutInput as RolloutInput,
    RolloutScore as RolloutScore,
    RolloutScores as RolloutScores,
    SamplingArgs as SamplingArgs,
    State as State,
    SystemMessage as SystemMessage,
    ToolCall as ToolCall,
    ToolMessage as ToolMessage,
    TrajectoryStep as TrajectoryStep,
    UserMessage as UserMessage,
)

__version__: str

# submodules, and names of 0.1.x that are elsewhere now
def __getattr__(name: str) -> Any: ...
