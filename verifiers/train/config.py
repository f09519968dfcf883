"""GRPOConfig: TRL's settings plus those of asynchronous generation, under TRL's names where there is one."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

# TRL reports each trainer that is made to a remote address unless told not to; a user can still set it to 0
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import torch
import trl

from verifiers.data.plan import BatchPlan, make_plan
from verifiers.errors import ConfigError
from verifiers.train.evaluation_settings import settle_evaluation
from verifiers.train.row_weights import LOSS_TYPES
from verifiers.train.settings import refuse_biased_sampling
from verifiers.train.sharding import suit_ddp_timeout
from verifiers.train.trl_settings import refuse_ignored_settings
from verifiers.train.weight_sync.choice import WEIGHT_SYNCS

if TYPE_CHECKING:
    from peft import LoraConfig

__all__ = ["GRPOConfig", "grpo_defaults", "lora_defaults"]

CORRECTION_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


@dataclass
class GRPOConfig(trl.GRPOConfig):
    """Settings of `GRPOTrainer`: every field of `trl.GRPOConfig`, and the ones below.

    A block is `per_device_train_batch_size` x processes x `steps_per_generation` completions; it is generated at
    once, and serves `num_iterations` passes. Sizes that do not divide are refused with the nearest that do.

    Args:
        num_batches_ahead: blocks generated ahead of the one being trained; 0 is strictly on policy.
        max_staleness: optimizer steps that a block's oldest token may be behind at the block's first update. Blocks
            that would be older are not begun; rollouts that are all the same are dropped and counted. None for
            num_batches_ahead x updates per block.
        drain_before_sync: every rollout in flight ends before weights are pushed, so that each block is sampled from
            one version and a run can be repeated bit for bit; stragglers then leave the server idle. Left out, only
            where the server cannot keep requests in flight during a push.
        streaming: train a micro-batch as soon as its groups are scored, in plan order, while the rest of the block is
            generated; otherwise a block is shuffled and trained when it is whole.
        async_generation_timeout: deadline for one block, in seconds.
        rollout_timeout: deadline for one rollout, in seconds.
        grading_timeout: deadline for scoring one group, in seconds.
        max_concurrent: rollouts in flight at once.
        requests_per_second: throttle on requests; None for none.
        max_seq_len: rows with more prompt and completion tokens than this are dropped, counted, never cut.
        mask_env_responses: kept for the classic name; tokens of the environment never carry loss.
        zero_truncated_completions: a truncated rollout's reward counts as 0.
        require_full_groups: a group with a failed rollout gives no gradient at all.
        rollout_retries: how often a rollout that failed before it was scored is run again, with another seed.
        drop_stragglers_after: once the trainer has waited this long for a block, in seconds, its rollouts that still
            run are given up, at the earliest when half of the block has ended. Long ones go first, so this biases
            what is trained: see `rows/dropped_tokens` and `time/straggler_mean_s`. None waits for all.
        dynamic_sampling: replace groups whose rewards are all equal by groups of other prompts.
        dynamic_sampling_max_groups: at most so many replacements a block; twice the prompts of a block when left out.
        skip_zero_advantage_rows: leave out rollouts whose advantage is 0, which saves their forward and backward pass
            and changes neither loss nor gradient. Off where anything else reaches the loss: beta, an entropy term,
            loss_type "bnpo". What TRL measures in the loss (entropy, clipping) is then over the rest.
        importance_correction: weight tokens by min(pi_old / sampler, cap); takes its mode and bounds from
            TRL's `vllm_importance_sampling_mode`, `..._clip_max` and `..._clip_min`. Off too where TRL's own
            `vllm_importance_sampling_correction` is off.
        max_tokens_per_pass: most tokens, padding included (rows x the longest of them), that go through the model in
            one forward and backward pass on a device; a micro-batch is cut into as many passes as that takes, by
            length. A row that is longer has a pass of its own, and a log line says so. Left out, there are as many
            passes as rows make at `per_device_train_batch_size` each, and none is larger than so many of the longest.
        old_logprobs_batch_size: rows in one forward pass for old and reference log-probs; those of a training pass
            when left out.
        rollout_device: hold the embedded server in this process, a frozen copy of the policy on this device, e.g.
            "cuda:1"; no other server is used then. For a second device: on one CPU a server of its own is faster.
        rollout_chunk_size: sequences generated at once there.
        old_logprobs_on_rollout_device: compute old log-probs on that copy, micro-batch by micro-batch, while it has
            the weights that the block's first update starts from.
        weight_sync: how weights reach the rollout servers: "directory" (servers on this host, or a file system that
            both sides mount), "nccl" (vLLM on other GPUs or hosts), "lora" (the adapter alone, vLLM with
            --enable-lora), or "auto": "directory" where it can work, else "nccl".
        weight_sync_dir: where pushed weights are written; /dev/shm or the temporary directory when left out.
        weight_sync_timeout: deadline for one push, in seconds.
        probe_every: every so many pushes the server's log-probs are compared with the trainer's; the first push and
            the first that changes anything always are. 0 never again after these.
        probe_tolerance: largest difference accepted, in nats; 1e-3 in float32, 0.1 in half precision when left out.
        eval_temperature: 0 evaluates greedily.
        num_eval_prompts: held-out prompts in an evaluation during training; -1 for all. With several sets, of each.
        eval_overlap: training goes on while an evaluation runs; the next push of weights waits for its end.
        eval_max_concurrent: most of an evaluation's rollouts in flight, inside `max_concurrent`; left out, all of it,
            or with `eval_overlap` as many as a block has completions, at most half.
        eval_timeout: deadline for one evaluation, in seconds; `async_generation_timeout` when left out.
        eval_right_from: reward from which a rollout counts as right in pass@k.
        save_evaluations: keep each evaluation under `output_dir/evals/step-N`, as `vf-eval` writes it.
        server_url: base URL of the rollout server, with "/v1"; made of TRL's `vllm_server_base_url`, or
            `vllm_server_host` and `vllm_server_port`, when left out.
        server_urls: several rollout servers of the same model, instead of `server_url`.
        server_model: the policy's name on the server; asked of the server when left out.
        server_wait: how long to wait for the server at the start, in seconds.
        server_restart_timeout: how long all servers may be away before the run ends, in seconds. One that comes back
            gets the present weights before it samples.
        generation: how turns are sent: "auto" as token ids from the second turn on where the server can, so that chat
            templates that strip earlier reasoning make no forks; "tokens" as token ids always; "messages" never.
        report_to: logging integrations, as in transformers; none unless asked for.

    Where there is no accelerator, `use_cpu` is set, and `bf16` and activation checkpointing are off unless given.
    """

    num_batches_ahead: int = field(default=1, metadata={"help": "Blocks generated ahead; 0 is on policy."})
    max_staleness: int | None = field(default=None, metadata={"help": "Oldest token, in optimizer steps."})
    drain_before_sync: bool | None = field(default=None, metadata={"help": "End rollouts before each push."})
    streaming: bool = field(default=False, metadata={"help": "Train micro-batches as their groups are scored."})
    async_generation_timeout: float = field(default=600.0, metadata={"help": "Deadline for one block (s)."})
    rollout_timeout: float = field(default=600.0, metadata={"help": "Deadline for one rollout (s)."})
    grading_timeout: float = field(default=120.0, metadata={"help": "Deadline for scoring one group (s)."})
    max_concurrent: int = field(default=1024, metadata={"help": "Rollouts in flight at once."})
    requests_per_second: float | None = field(default=None, metadata={"help": "Throttle on requests."})
    max_seq_len: int | None = field(default=None, metadata={"help": "Longer rows are dropped and counted."})
    mask_env_responses: bool = field(default=True, metadata={"help": "Classic name; always in force."})
    zero_truncated_completions: bool = field(default=False, metadata={"help": "Truncated rollouts score 0."})
    require_full_groups: bool = field(default=False, metadata={"help": "Drop groups with a failed rollout."})
    rollout_retries: int = field(default=0, metadata={"help": "Further tries of a failed rollout."})
    drop_stragglers_after: float | None = field(default=None, metadata={"help": "Wait for a block's last (s)."})
    dynamic_sampling: bool = field(default=False, metadata={"help": "Replace groups without variance."})
    dynamic_sampling_max_groups: int | None = field(default=None, metadata={"help": "Replacements per block."})
    skip_zero_advantage_rows: bool = field(default=True, metadata={"help": "Save passes that have no gradient."})
    importance_correction: bool = field(default=True, metadata={"help": "Correct sampler against trainer."})
    vllm_importance_sampling_mode: str = field(
        default="token_truncate", metadata={"help": f"One of {', '.join(CORRECTION_MODES)}."}
    )
    max_tokens_per_pass: int | None = field(default=None, metadata={"help": "Padded tokens in one pass."})
    old_logprobs_batch_size: int | None = field(default=None, metadata={"help": "Rows in one no-grad forward."})
    rollout_device: str | None = field(default=None, metadata={"help": "Hold the rollout server here."})
    rollout_chunk_size: int = field(default=64, metadata={"help": "Sequences at once on rollout_device."})
    old_logprobs_on_rollout_device: bool = field(default=False, metadata={"help": "Old log-probs on the copy."})
    weight_sync: str = field(default="auto", metadata={"help": "auto, directory, nccl or lora."})
    weight_sync_dir: str | None = field(default=None, metadata={"help": "Where pushed weights are written."})
    weight_sync_timeout: float = field(default=120.0, metadata={"help": "Deadline for one push (s)."})
    probe_every: int = field(default=1, metadata={"help": "Pushes between two log-prob probes."})
    probe_tolerance: float | None = field(default=None, metadata={"help": "Accepted difference (nats)."})
    num_generations_eval: int | None = field(default=1, metadata={"help": "Completions per held-out prompt."})
    eval_temperature: float = field(default=0.0, metadata={"help": "0 evaluates greedily."})
    num_eval_prompts: int = field(default=-1, metadata={"help": "Held-out prompts; -1 for all."})
    eval_overlap: bool = field(default=False, metadata={"help": "Train on while an evaluation runs."})
    eval_max_concurrent: int | None = field(default=None, metadata={"help": "Its rollouts in flight."})
    eval_timeout: float | None = field(default=None, metadata={"help": "Deadline for one evaluation (s)."})
    eval_right_from: float = field(default=1.0, metadata={"help": "Reward that pass@k counts as right."})
    save_evaluations: bool = field(default=True, metadata={"help": "Keep evaluations as vf-eval does."})
    server_url: str = field(default="", metadata={"help": "Rollout server; from vllm_server_* when left out."})
    server_urls: list[str] | None = field(default=None, metadata={"help": "Several rollout servers."})
    server_model: str | None = field(default=None, metadata={"help": "The policy's name on the server."})
    server_wait: float = field(default=300.0, metadata={"help": "How long to wait for the server (s)."})
    server_restart_timeout: float = field(default=300.0, metadata={"help": "How long servers may be away (s)."})
    generation: str = field(default="auto", metadata={"help": "Turns as 'messages', as 'tokens', or 'auto'."})
    gradient_checkpointing: bool | None = field(  # type: ignore[assignment]
        default=None, metadata={"help": "Recompute activations; on where there is an accelerator."}
    )
    report_to: Any = field(default="none", metadata={"help": "Logging integrations, as in transformers."})

    def __post_init__(self) -> None:
        self._refuse_bad_sizes()
        self._refuse_indivisible_sizes()
        self._suit_device()
        if self.num_generations_eval is None:
            self.num_generations_eval = 1
        settle_evaluation(self)
        refuse_ignored_settings(self)
        suit_ddp_timeout(self)
        # one setting under two names
        self.importance_correction = self.importance_correction and self.vllm_importance_sampling_correction
        # TRL demands that its own evaluation batch divides; ours goes through the rollout server instead
        self.per_device_eval_batch_size = self.num_generations_eval
        super().__post_init__()
        refuse_biased_sampling(self)
        if self.old_logprobs_on_rollout_device and self.rollout_device is None:
            raise ConfigError("old_logprobs_on_rollout_device needs rollout_device, such as 'cuda:1'.")
        if self.server_urls:
            self.server_url = self.server_urls[0]
        if not self.server_url:
            # TRL's default host is the one a server listens on; a client reaches it through loopback
            host = "127.0.0.1" if self.vllm_server_host == "0.0.0.0" else self.vllm_server_host
            root = self.vllm_server_base_url or f"http://{host}:{self.vllm_server_port}"
            self.server_url = root.rstrip("/").removesuffix("/v1") + "/v1"

    def _suit_device(self) -> None:
        """Where there is no accelerator, TRL's half precision and recomputation cost much and gain nothing."""
        accelerator = torch.accelerator.is_available() and not self.use_cpu
        if not accelerator:
            self.use_cpu = True
            self.bf16 = bool(self.bf16)
        if self.activation_checkpointing is None:
            # the old name is still what people write; transformers warns about it
            old = self.gradient_checkpointing
            self.activation_checkpointing = old if old is not None else accelerator

    def _refuse_bad_sizes(self) -> None:
        if self.temperature == 0:
            raise ConfigError(
                f"temperature is 0 with num_generations={self.num_generations}: the rollouts of a group would be the "
                "same and no advantage could differ from 0; give a temperature above 0, such as 1.0."
            )
        if self.num_generations is not None and self.num_generations < 2:
            raise ConfigError(
                f"num_generations is {self.num_generations}, but a group's advantage compares its rollouts with each "
                "other; give at least 2."
            )
        if self.loss_type not in LOSS_TYPES:
            raise ConfigError(f"loss_type is {self.loss_type!r}; choose one of {', '.join(LOSS_TYPES)}.")
        if self.max_completion_length is None and self.loss_type == "dr_grpo":
            raise ConfigError(
                "loss_type='dr_grpo' divides by max_completion_length, which is None; give it a number of tokens, or "
                "use 'dapo'."
            )
        if self.num_batches_ahead < 0:
            raise ConfigError(f"num_batches_ahead is {self.num_batches_ahead}; give 0 (on policy) or more.")
        self._refuse_bad_asynchrony()
        if self.vllm_importance_sampling_mode not in CORRECTION_MODES:
            raise ConfigError(
                f"vllm_importance_sampling_mode is {self.vllm_importance_sampling_mode!r}; choose one of "
                f"{', '.join(CORRECTION_MODES)}."
            )
        if self.loss_type == "vespo" and self.vllm_importance_sampling_mode.startswith("sequence"):
            raise ConfigError(
                f"loss_type='vespo' multiplies the tokens' ratios itself, so vllm_importance_sampling_mode="
                f"{self.vllm_importance_sampling_mode!r} counts a row's ratio once a token; use 'token_truncate'."
            )
        if self.weight_sync not in WEIGHT_SYNCS:
            raise ConfigError(f"weight_sync is {self.weight_sync!r}; choose one of {', '.join(WEIGHT_SYNCS)}.")
        self._refuse_bad_passes()
        if self.use_vllm:
            # TRL would start an engine or a client of its own; ours is the rollout server's
            self.use_vllm = False

    def _refuse_bad_passes(self) -> None:
        if self.top_entropy_quantile < 1.0 and (self.entropy_coef != 0.0 or self.use_adaptive_entropy):
            raise ConfigError(
                f"top_entropy_quantile={self.top_entropy_quantile:g} makes an entropy bonus a mean over some tokens "
                "of each micro-batch, which weighs micro-batches and not tokens; set entropy_coef=0.0, or leave it "
                "at 1.0."
            )
        if self.max_tokens_per_pass is None:
            return
        if self.max_tokens_per_pass < 1:
            raise ConfigError(f"max_tokens_per_pass is {self.max_tokens_per_pass}; give 1 or more, or None.")
        if self.top_entropy_quantile < 1.0:
            raise ConfigError(
                f"top_entropy_quantile={self.top_entropy_quantile:g} is a quantile over the tokens of a pass, so "
                "max_tokens_per_pass would change what is trained; leave one of them out."
            )

    def _refuse_bad_asynchrony(self) -> None:
        for name in ("max_staleness", "rollout_retries", "dynamic_sampling_max_groups"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"{name} is {value}; give 0 or more.")
        if self.drop_stragglers_after is not None and self.drop_stragglers_after <= 0:
            raise ConfigError(
                f"drop_stragglers_after is {self.drop_stragglers_after:g}; give seconds above 0, or None to wait."
            )

        if self.streaming:
            self._refuse_unstreamable()

    def _refuse_unstreamable(self) -> None:
        """Refuse what needs the whole block, or the whole update, before its first micro-batch."""
        if self.scale_rewards == "batch":
            raise ConfigError(
                "scale_rewards='batch' needs the rewards of the whole block before its first micro-batch is trained; "
                "use 'group' or 'none', or streaming=False."
            )
        if self.loss_type == "bnpo":
            raise ConfigError(
                "loss_type='bnpo' divides by each micro-batch's own tokens, which streaming cannot weigh; use "
                "'dapo', or streaming=False."
            )
        if self.top_entropy_quantile < 1.0:
            raise ConfigError(
                f"top_entropy_quantile={self.top_entropy_quantile:g} is a quantile over the tokens of a micro-batch, "
                "which streaming fills with whole groups and not by chance; set it to 1.0, or streaming=False."
            )
        if self.entropy_coef != 0.0 or self.use_adaptive_entropy:
            raise ConfigError(
                "an entropy bonus is a mean over each micro-batch, which streaming would rescale with the loss; set "
                "entropy_coef=0.0, or streaming=False."
            )

    @property
    def may_be_stale(self) -> bool:
        """Whether tokens may come from older weights than those that they are first trained under."""
        several = (self.steps_per_generation or 1) > self.gradient_accumulation_steps
        return self.num_batches_ahead > 0 or (self.streaming and several)

    def spare_groups(self, prompts_per_block: int) -> int:
        """Prompts that may stand in for a block's flat groups."""
        if not self.dynamic_sampling:
            return 0
        most = self.dynamic_sampling_max_groups
        return 2 * prompts_per_block if most is None else most

    def _refuse_indivisible_sizes(self) -> None:
        """Ask the plan before TRL does: its message names the nearest sizes that do divide."""
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        per_step = self.per_device_train_batch_size * processes
        steps = self.steps_per_generation
        if steps is None and self.generation_batch_size is not None and self.generation_batch_size % per_step == 0:
            steps = self.generation_batch_size // per_step
        self._plan(processes, steps, max_steps=1, num_prompts=2**31)

    def _plan(self, processes: int, steps_per_generation: int | None, max_steps: int, num_prompts: int) -> BatchPlan:
        return make_plan(
            per_device_train_batch_size=self.per_device_train_batch_size,
            num_processes=processes,
            gradient_accumulation_steps=self.gradient_accumulation_steps,
            steps_per_generation=steps_per_generation,
            num_generations=self.num_generations or 0,
            num_iterations=self.num_iterations,
            max_steps=max_steps,
            num_prompts=num_prompts,
            seed=self.seed if self.data_seed is None else self.data_seed,
            shuffle=bool(self.shuffle_dataset),
            max_tokens_per_pass=self.max_tokens_per_pass,
        )

    def batch_plan(self, num_prompts: int) -> BatchPlan:
        """The plan that these settings give for a dataset of `num_prompts` rows.

        Raises:
            ConfigError: sizes that do not divide.
        """
        plan = self._plan(self.world_size, self.steps_per_generation, max(1, self.max_steps), num_prompts)
        if self.max_steps > 0:
            return plan
        blocks = max(1, round(self.num_train_epochs * (num_prompts // plan.prompts_per_block)))
        return dataclasses.replace(plan, max_steps=blocks * plan.updates_per_block)


def grpo_defaults(run_name: str = "verifiers-run", **overrides: Any) -> GRPOConfig:
    """The classic recipe as a config: a start that suits small instruction-tuned models.

    Half precision and gradient checkpointing only where there is an accelerator; optimizer state is always saved,
    so that a run can be resumed; nothing is reported to a service unless asked.

    Args:
        run_name: also names the output directory, `outputs/<run_name>`.
        **overrides: any field of GRPOConfig.
    """
    on_accelerator = torch.cuda.is_available()
    values: dict[str, Any] = {
        "output_dir": f"outputs/{run_name}",
        "run_name": run_name,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 10,
        "max_steps": 500,
        "bf16": on_accelerator and torch.cuda.is_bf16_supported(),
        "max_grad_norm": 0.01,
        "num_iterations": 1,
        "max_completion_length": 1024,
        "per_device_train_batch_size": 16,
        "num_generations": 16,
        "gradient_accumulation_steps": 4,
        "save_strategy": "steps",
        "save_steps": 100,
        "save_only_model": False,
        "logging_steps": 1,
        "log_completions": False,
        "mask_truncated_completions": True,
        "num_batches_ahead": 1,
        "async_generation_timeout": 600.0,
        "max_concurrent": 1024,
        "report_to": "none",
    }
    return GRPOConfig(**{**values, **overrides})


def lora_defaults(r: int = 8, alpha: int = 16) -> LoraConfig:
    """LoRA on the attention and feed-forward projections, the classic recipe's sizes."""
    from peft import LoraConfig

    return LoraConfig(
        r=r,
        lora_alpha=alpha,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        task_type="CAUSAL_LM",
    )
