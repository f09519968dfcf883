"""GRPOConfig: TRL's settings plus those of asynchronous generation, under TRL's names where there is one."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

# TRL reports each trainer that is made to a remote address unless told not to; a user can still set it to 0
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import torch
import trl

from verifiers.data.batch_plan import BatchPlan, make_plan
from verifiers.errors import ConfigError
from verifiers.server_process import is_loopback
from verifiers.train.conflicts import MEANT, longest_wait_s, refuse_biased_sampling, refuse_conflicts, unknown_setting

if TYPE_CHECKING:
    from peft import LoraConfig


@dataclass
class GRPOConfig(trl.GRPOConfig):
    """Settings of `GRPOTrainer`: every field of `trl.GRPOConfig`, and the ones below.

    A block is `per_device_train_batch_size` x processes x `steps_per_generation` completions; it is generated at
    once, and serves `num_iterations` passes. Sizes that do not divide are refused with the nearest that do.

    Args:
        num_batches_ahead: blocks generated ahead of the one being trained; 0 is strictly on policy. Left out, 0 where
            the rollout servers that the settings name share the CPU that trains, or `rollout_device` the GPU (each
            then has all of it while the other waits), else 1.
        max_staleness: optimizer steps that a block's oldest token may be behind at the block's first update. Blocks
            that would be older are not begun; rollouts that are all the same are dropped and counted. None for
            num_batches_ahead x updates per block.
        drain_before_sync: every rollout in flight ends before weights are pushed, so that each block is sampled from
            one version and a run can be repeated bit for bit; stragglers then leave the server idle. Left out, only
            where the server cannot keep requests in flight during a push.
        streaming: train a micro-step as soon as its groups are scored, in plan order, while the rest of the block is
            generated; otherwise a block is shuffled and trained when it is whole.
        async_generation_timeout: deadline for one block, in seconds.
        rollout_timeout: deadline for one rollout, in seconds.
        grading_timeout: deadline for scoring one group, in seconds.
        max_concurrent: rollouts in flight at once.
        requests_per_second: throttle on requests; None for none.
        max_seq_len: rows with more prompt and completion tokens than this are dropped, counted, never cut.
        mask_env_responses: kept for the classic name; tokens of the environment never carry loss, and False is
            refused.
        zero_truncated_completions: a truncated rollout's reward counts as 0.
        require_full_groups: a group with a failed rollout gives no gradient at all.
        rollout_retries: how often a rollout that failed before it was scored is repeated, with another seed.
        dynamic_sampling: replace groups whose rewards are all equal with groups of other prompts.
        dynamic_sampling_max_groups: at most so many replacements a block; twice the prompts of a block when left out.
        skip_zero_advantage_rows: leave out rollouts whose advantage is 0, which saves their forward and backward pass
            and changes neither loss nor gradient. Off where anything else reaches the loss: beta, an entropy term,
            loss_type "bnpo". What is measured in the loss (entropy, clipping) is then over the rest.
        vllm_importance_sampling_correction: weight tokens by min(pi_old / sampler, cap), as TRL does, whatever the
            server; `vllm_importance_sampling_mode`, `..._clip_max` and `..._clip_min` give mode and bounds.
        advantage_estimator: "group" (GRPO, scaled as `scale_rewards` says), "rloo" (leave-one-out),
            "reinforce_plus_plus" (whitened over the block), or "reinforce_plus_plus_baseline" (the group's mean
            subtracted first).
        turn_discount: give credit by turn: rewards of single turns become returns, the sum of a turn's reward and the
            later ones, each multiplied by this once more a turn; the group's advantages of each turn's returns are
            added to the rollout's own. 1.0 for plain sums, 0.0 for the turn's own reward alone; None for no such
            credit.
        teacher_url: base URL, with "/v1", of the server of a teacher, which must have the policy's tokenizer; it is
            asked for log-probs of the sampled tokens (`prompt_logprobs`). None for no distillation.
        teacher_model: the teacher's name there; the first that the server lists when left out.
        teacher_coef: what log pi_teacher - log pi of each sampled token is multiplied by when it is added to the
            token's advantage.
        teacher_top_k: train towards so many of the teacher's likeliest tokens in each place instead, by the KL of the
            teacher to the policy over them, which `teacher_coef` weighs in the loss; 0 for the sampled tokens alone.
        demonstrations: conversations that are trained on beside rollouts, by cross-entropy of the assistant's tokens:
            JSON lines, a Parquet file, a directory of `save_to_disk`, or a hub name, with `messages`, or messages in
            `prompt` and `completion`. None for none.
        demonstrations_share: how many of them an update has, as a share of its rollouts.
        demonstrations_coef: what the mean cross-entropy of their tokens counts in the loss.
        env_ce_coef: what the mean cross-entropy of the tokens that the environment said between turns counts, so that
            the policy learns to predict them; 0 for not at all.
        use_rewards: False trains towards the teacher alone: rewards are logged, and their advantages count as 0.
        kl_estimator: of the KL term that `beta` weighs in the loss: "k1", "k2" or "k3", which is TRL's own; "k3" when
            left out.
        kl_in_reward: subtract `beta` times the rollout's KL to the reference, estimated by k1, from its reward, in
            place of a term in the loss.
        max_tokens_per_micro_batch: most tokens, padding included (rows x the longest of them), of one forward and
            backward pass on a device; a micro-step is split by length into as many micro-batches as that takes. A row
            that is longer has a micro-batch of its own, and a log line says so. Left out, there are as many
            micro-batches as rows make at `per_device_train_batch_size` each, and none is larger than so many of the
            longest.
        share_prefixes: compute what rows of a micro-batch begin with alike, such as the prompt of a group, once; each
            row's rest is a branch of it. Log-probs, loss and gradients are those of separate rows. Off where it saves
            less than a fifth of the tokens (on a GPU less than half), and for models that do not compute both alike
            (linear attention, state spaces, a sliding window below `max_seq_len`, attention kernels other than
            "sdpa") or train a router loss.
        max_images: most images of a prompt; with 0 training takes text alone. The model needs a processor of images,
            and a server of its own `--max-images`.
        train_vision_tower: train what images pass through too, which stays frozen otherwise.
        old_logprobs_batch_size: rows in one forward pass for old and reference log-probs; those of a micro-batch
            when left out.
        rollout_device: hold the embedded server in this process, a frozen copy of the policy on this device, e.g.
            "cuda:1", or "cpu"; no other server is used then.
        rollout_chunk_size: sequences generated at once there. Left out, 256 on a GPU and 64 on a CPU.
        rollout_cuda_graphs: replay its passes of one token a sequence as CUDA graphs. Left out, on a GPU where they
            can be recorded: no layer has a state, and nothing waits for the device.
        old_logprobs_on_rollout_device: compute old log-probs on that copy, micro-batch by micro-batch, while it has
            the weights that the block's first update starts from.
        weight_sync: how weights reach the rollout servers: "directory" (servers on this host, or a file system that
            both sides mount), "nccl" (vLLM on other GPUs or hosts), "lora" (the adapter alone, vLLM with
            --enable-lora), or "auto": "directory" where it can work, else "nccl".
        weight_sync_dir: where pushed weights are written; /dev/shm or the temporary directory when left out.
        weight_sync_timeout: deadline for one push, in seconds.
        probe_every: every so many pushes the server's log-probs are compared with the trainer's; the first push and
            the first that changes anything always are. 0 never again after these. Left out, each with servers, and
            every eighth with a copy in the trainer's process, which no push can miss.
        probe_tolerance: difference accepted between a server's log-probs and the trainer's, in nats: the largest of
            eight tokens, or their mean with half precision; 1e-3, or 0.25, when left out.
        num_generations_eval: completions of each prompt in an evaluation.
        eval_temperature: 0 evaluates greedily.
        num_eval_prompts: prompts of the eval set in an evaluation during training; -1 for all. With several sets, of
            each.
        eval_max_concurrent: most of an evaluation's rollouts in flight, inside `max_concurrent`; all when left out.
        eval_timeout: deadline for one evaluation, in seconds; `async_generation_timeout` when left out.
        eval_right_from: reward from which a rollout counts as right in pass@k.
        save_evaluations: keep each evaluation under `output_dir/evals/step-N`, as `vf-eval` writes it.
        server_url: base URL of the rollout server, with "/v1"; made of TRL's `vllm_server_base_url`, or
            `vllm_server_host` and `vllm_server_port`, when left out.
        server_urls: several rollout servers of the same model, instead of `server_url`.
        server_model: the policy's name on the server; the name that the server reports when left out.
        server_wait: how long to wait for the server at the start, in seconds.
        server_restart_timeout: how long all servers may be away before the run ends, in seconds. One that comes back
            gets the present weights before it samples.
        generation: how turns are sent: "auto" as token ids from the second turn on where the server can, so that chat
            templates that strip earlier reasoning make no forks; "tokens" as token ids always; "messages" never.
        trace: a collector's address, such as "http://127.0.0.1:4318", to which OpenTelemetry spans of rollouts are
            sent; None for none.
        trace_share: share of the rollouts that are traced, each of them whole.
        trace_content: trace what is said too, not only names and numbers.
        report_to: logging integrations, as in transformers; none unless asked for.
        disable_dropout: dropout is off in every run, that of adapters too; False is refused.

    `ddp_timeout` is raised to the longest that other processes may have to wait for rank 0. Where there is no
    accelerator, `use_cpu` is set, and `bf16` and activation checkpointing are off unless given.
    """

    num_batches_ahead: int = None  # type: ignore[assignment]
    max_staleness: int | None = None
    drain_before_sync: bool | None = None
    streaming: bool = False
    async_generation_timeout: float = 600.0
    rollout_timeout: float = 600.0
    grading_timeout: float = 120.0
    max_concurrent: int = 1024
    requests_per_second: float | None = None
    max_seq_len: int | None = None
    mask_env_responses: bool = True
    zero_truncated_completions: bool = False
    require_full_groups: bool = False
    rollout_retries: int = 0
    dynamic_sampling: bool = False
    dynamic_sampling_max_groups: int | None = None
    skip_zero_advantage_rows: bool = True
    vllm_importance_sampling_mode: str = "token_truncate"
    advantage_estimator: str = "group"
    turn_discount: float | None = None
    teacher_url: str | None = None
    teacher_model: str | None = None
    teacher_coef: float = 1.0
    teacher_top_k: int = 0
    use_rewards: bool = True
    demonstrations: str | None = None
    demonstrations_share: float = 0.25
    demonstrations_coef: float = 1.0
    env_ce_coef: float = 0.0
    kl_estimator: str | None = None
    kl_in_reward: bool = False
    max_tokens_per_micro_batch: int | None = None
    share_prefixes: bool = True
    max_images: int = 0
    train_vision_tower: bool = False
    old_logprobs_batch_size: int | None = None
    rollout_device: str | None = None
    rollout_chunk_size: int = None  # type: ignore[assignment]
    rollout_cuda_graphs: bool | None = None
    old_logprobs_on_rollout_device: bool = False
    weight_sync: str = "auto"
    weight_sync_dir: str | None = None
    weight_sync_timeout: float = 120.0
    probe_every: int | None = None
    probe_tolerance: float | None = None
    num_generations_eval: int | None = 1
    eval_temperature: float = 0.0
    num_eval_prompts: int = -1
    eval_max_concurrent: int | None = None
    eval_timeout: float | None = None
    eval_right_from: float = 1.0
    save_evaluations: bool = True
    server_url: str = ""
    server_urls: list[str] | None = None
    server_model: str | None = None
    server_wait: float = 300.0
    server_restart_timeout: float = 300.0
    generation: str = "auto"
    trace: str | None = None
    trace_share: float = 1.0
    trace_content: bool = False
    gradient_checkpointing: bool | None = None  # type: ignore[assignment]
    report_to: Any = "none"
    disable_dropout: bool | None = None  # type: ignore[assignment]

    def __new__(cls, *_: Any, **given: Any) -> GRPOConfig:
        for name in given:
            if name not in cls.__dataclass_fields__:
                hint = unknown_setting(name, cls.__dataclass_fields__)
                raise ConfigError(f"GRPOConfig has no setting {name!r}; {hint}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self._given = self._settings()
        refuse_conflicts(self)
        if self.trace is not None:
            from verifiers import tracing

            tracing.check(self)
        # TRL would start an engine or a client of its own; ours is the rollout server's
        self.use_vllm = False
        self._refuse_indivisible_sizes()
        self._adjust_device()
        self._name_server()
        # overlap wins nothing on shared cores or one GPU, and costs the steps that stale tokens teach less in
        given: int | None = self.num_batches_ahead
        self.num_batches_ahead = given if given is not None else 0 if self.shared_device else 1
        slots: int | None = self.rollout_chunk_size
        on_gpu = str(self.rollout_device).startswith("cuda")
        self.rollout_chunk_size = slots if slots is not None else 256 if on_gpu else 64
        if self.num_generations_eval is None:
            self.num_generations_eval = 1
        best = self.load_best_model_at_end or setting_name(self.save_strategy) == "best"
        if self.metric_for_best_model is None and (best or self.rate_needs_metric):
            self.metric_for_best_model = "eval_reward"
        self.ddp_timeout = max(self.ddp_timeout, longest_wait_s(self))
        # TRL demands that its own evaluation batch divides; ours goes through the rollout server instead
        self.per_device_eval_batch_size = self.num_generations_eval
        super().__post_init__()
        if self.rate_needs_metric:
            # torch's own mode takes a rising reward for one that no longer improves
            mode = "max" if self.greater_is_better else "min"
            options: Any = self.lr_scheduler_kwargs or {}
            self.lr_scheduler_kwargs = {"mode": mode, **options}
        own = {name: getattr(self, name) for name in ("top_p", "top_k", "min_p", "repetition_penalty")}
        refuse_biased_sampling(self, "the trainer", own)
        self._made = self._settings()

    def _settings(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.init}

    def settle(self) -> None:
        """Work out again what follows from settings that were changed since the config was made, as scripts do.

        Raises:
            ConfigError: the settings of now conflict, or one of another trainer was assigned.
        """
        for name in vars(self):
            if name in MEANT:
                raise ConfigError(f"GRPOConfig has no setting {name!r}; {unknown_setting(name, ())}")
        made = self._made
        changed = {name: value for name, value in self._settings().items() if value != made[name]}
        if changed:
            self.__dict__.update(type(self)(**{**self._given, **changed}).__dict__)

    def _adjust_device(self) -> None:
        """Turn off half precision and recomputation where there is no accelerator, or none that has it."""
        accelerator = has_accelerator() and not self.use_cpu
        if not accelerator:
            self.use_cpu = True
            self.bf16 = bool(self.bf16)
        elif self.bf16 is None and torch.cuda.is_available():
            # torch counts what it only emulates, slowly, on GPUs older than Ampere
            self.bf16 = not self.fp16 and torch.cuda.is_bf16_supported(including_emulation=False)
        if self.activation_checkpointing is None:
            # the old name is still what people write; transformers warns about it
            old = self.gradient_checkpointing
            self.activation_checkpointing = old if old is not None else accelerator

    def _name_server(self) -> None:
        """Set `server_url` from whichever setting names the server, with "/v1" as the URLs that are pushed to."""
        if isinstance(self.server_urls, str):
            raise ConfigError(f"server_urls is {self.server_urls!r}; give a list of URLs, or one as server_url.")
        if self.server_urls:
            self.server_urls = [_with_version(url) for url in self.server_urls]
            self.server_url = self.server_urls[0]
        if not self.server_url:
            # TRL's default host is the one a server listens on; a client reaches it through loopback
            host = "127.0.0.1" if self.vllm_server_host == "0.0.0.0" else self.vllm_server_host
            self.server_url = self.vllm_server_base_url or f"http://{host}:{self.vllm_server_port}"
        self.server_url = _with_version(self.server_url)

    @property
    def shared_device(self) -> str | None:
        """What the trainer and the rollout servers that the settings name both compute on: "cores", "GPU" or None."""
        if not self.use_cpu:
            # of any rank: all must agree
            ranks = range(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
            return "GPU" if self.rollout_device in ("cuda", *(f"cuda:{rank}" for rank in ranks)) else None
        if self.rollout_device is not None:
            return "cores" if self.rollout_device.startswith("cpu") else None
        return "cores" if all(is_loopback(url) for url in self.server_urls or [self.server_url]) else None

    @property
    def may_be_stale(self) -> bool:
        """True where tokens may come from older weights than those that they are first trained under."""
        several = (self.steps_per_generation or 1) > self.gradient_accumulation_steps
        return self.num_batches_ahead > 0 or (self.streaming and several)

    @property
    def rate_needs_metric(self) -> bool:
        """True where training cannot continue before an evaluation ends, as its result sets the learning rate."""
        return setting_name(self.lr_scheduler_type) in ("reduce_lr_on_plateau", "greedy")

    def replacement_groups(self, prompts_per_block: int) -> int:
        """Return how many prompts may replace the zero-variance groups of a block."""
        if not self.dynamic_sampling:
            return 0
        most = self.dynamic_sampling_max_groups
        return 2 * prompts_per_block if most is None else most

    def template_options(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of chat templates: those of an environment's `extra_body`, then the trainer's."""
        # a string was read as JSON when the config was made
        options: Any = self.chat_template_kwargs or {}
        return {**(extra.get("chat_template_kwargs") or {}), **options}

    def _refuse_indivisible_sizes(self) -> None:
        """Check sizes before TRL does: the plan's message names the nearest sizes that divide."""
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
            max_tokens_per_micro_batch=self.max_tokens_per_micro_batch,
        )

    def batch_plan(self, num_prompts: int) -> BatchPlan:
        """Return the batch plan of these settings for a dataset of `num_prompts` rows.

        Raises:
            ConfigError: sizes that do not divide.
        """
        plan = self._plan(self.world_size, self.steps_per_generation, max(1, self.max_steps), num_prompts)
        if self.max_steps > 0:
            return plan
        blocks = max(1, round(self.num_train_epochs * (num_prompts // plan.prompts_per_block)))
        return dataclasses.replace(plan, max_steps=blocks * plan.updates_per_block)


def _with_version(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1") + "/v1"


def setting_name(value: object) -> str:
    """Return a setting as it is written: transformers turns some into enums."""
    return str(getattr(value, "value", value))


def has_accelerator() -> bool:
    """Return whether there is a device to train on beside the CPU.

    Apple's does not count: it has no float64, which loss and sampling compute in.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    return found is not None and found.type != "mps"


def grpo_defaults(run_name: str = "verifiers-run", **overrides: Any) -> GRPOConfig:
    """Return the classic recipe as a config: a start that suits small instruction-tuned models.

    Half precision and gradient checkpointing only where there is an accelerator; optimizer state is always saved,
    so that a run can be resumed; nothing is reported to a service unless asked.

    Args:
        run_name: also names the output directory, `outputs/<run_name>`.
        **overrides: any field of GRPOConfig.
    """
    values: dict[str, Any] = {
        "output_dir": f"outputs/{run_name}",
        "run_name": run_name,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 10,
        "max_steps": 500,
        "max_grad_norm": 0.01,
        "max_completion_length": 1024,
        "per_device_train_batch_size": 16,
        "num_generations": 16,
        "gradient_accumulation_steps": 4,
        "save_steps": 100,
        "logging_steps": 1,
        "mask_truncated_completions": True,
    }
    return GRPOConfig(**{**values, **overrides})


def lora_defaults(r: int = 8, alpha: int = 16) -> LoraConfig:
    """Return the classic recipe's LoRA settings: on the attention and feed-forward projections."""
    from peft import LoraConfig

    return LoraConfig(
        r=r,
        lora_alpha=alpha,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        task_type="CAUSAL_LM",
    )
