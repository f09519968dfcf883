"""A tiny policy, environments that play with it, and a rollout server in this process: what these tests share.

Imported by the tests and by the scripts that they run in processes of their own.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Read once, when torch is imported: one thread, and no spinning beside other processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("KMP_BLOCKTIME", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import torch
from tiny_models import character_tokenizer, write_random_qwen3
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM, TrainerCallback
from verifiers_embedded.engine.loading import load_model
from verifiers_embedded.in_process_server import InProcessServer

import verifiers as vf
from verifiers.inference.endpoint import Endpoint, HttpBackend
from verifiers.testing import Fault
from verifiers.train.batching.micro_batches import computed_tokens
from verifiers.train.checkpoint.block_log import read_block_log
from verifiers.train.config import GRPOConfig
from verifiers.train.loss.prefixes import SHARED_ROWS
from verifiers.train.trainer import GRPOTrainer

torch.set_num_threads(1)

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 :"
END = "<end>"
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] + ':' + m.content + '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
"""Every rendering is a prefix of the one with more turns, and text and ids are one to one."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character. The end token is also the padding token, so only masks can tell them apart."""
    return character_tokenizer(
        [END, *CHARACTERS],
        unknown=":",
        pad_token=END,
        eos_token=END,
        chat_template=TEMPLATE,
        padding_side="left",
    )


def make_model(directory: Path, *, seed: int = 0, tied: bool = False, vocab_size: int | None = None) -> Path:
    """Write a random Qwen3 whose distributions are far from flat.

    Args:
        vocab_size: of the network, where it is to hold more ids than the tokenizer (those of the fake server).
    """
    tokenizer = make_tokenizer()
    size = vocab_size or len(tokenizer)
    return write_random_qwen3(directory, tokenizer, seed=seed, tie_word_embeddings=tied, vocab_size=size)


@functools.cache
def plain_model(directory: Path) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def plain_log_probs(
    state: Mapping[str, torch.Tensor], directory: Path, ids: Sequence[int], temperature: float
) -> list[float]:
    """Log-probs of ids[1:] by transformers alone: no padding, no code of ours, no patched forward."""
    model = copy.deepcopy(plain_model(directory))
    model.load_state_dict(dict(state))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(ids)])).logits[0, :-1]
    log_probs = torch.log_softmax(logits / temperature, dim=-1)
    return log_probs.gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1).tolist()


# -- environments -----------------------------------------------------------------------------------------------

QUESTIONS = ["a", "what is it", "b c", "tell me a long story about nothing at all", "xyz", "0 1 2 3", "go", "why"]


def rows(count: int = 16) -> list[dict[str, Any]]:
    """Prompts of unequal length."""
    return [{"question": f"{QUESTIONS[i % len(QUESTIONS)]}{i}", "answer": "e"} for i in range(count)]


def _said(completion: Any) -> str:
    return "".join(message["content"] for message in completion if message["role"] == "assistant")


def vowels(completion: Any, **kwargs: Any) -> float:
    """Return a reward that nearly always differs between two answers."""
    return sum(_said(completion).count(letter) for letter in "aeiou") + 0.01 * len(_said(completion))


def letters(body: Mapping[str, Any], *, fails: float = 0.0, lengths: Sequence[int] = range(1, 9)) -> Any:
    """Answer as a seeded sampler does, by the request alone; a share of the rollouts fails for good."""
    draw = random.Random(f"{body['seed']}:{body['messages'][-1]['content']}")
    # a probe's seed is lower
    if fails and draw.random() < fails and body["seed"] > 1000:
        return Fault(400)
    return "".join(draw.choice("abcdefgh ") for _ in range(draw.choice(lengths)))


def single_turn(count: int = 16, reward: Any = vowels, **options: Any) -> vf.SingleTurnEnv:
    """One answer to prompts of unequal length."""
    return vf.SingleTurnEnv(dataset=rows(count), eval_dataset=rows(4), rubric=vf.Rubric(funcs=[reward]), **options)


class Dialogue(vf.MultiTurnEnv):
    """Three answers; between them the environment says something that depends on the last one."""

    def __init__(self, count: int = 16, reward: Any = vowels, **options: Any) -> None:
        super().__init__(dataset=rows(count), rubric=vf.Rubric(funcs=[reward]), max_turns=3, **options)

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        return [{"role": "user", "content": f"turn {state['turn']} {messages[-1]['content'][:3]}"}], state


class Rewriting(Dialogue):
    """The environment changes what it said before: its third prompt is longer than what is held, but no extension."""

    async def get_model_response(self, client: Any, model: str, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        if len(prompt) > 3:
            prompt = [*prompt[:2], {"role": "user", "content": "forget what was said " * 3}, *prompt[3:]]
        return await super().get_model_response(client, model, prompt, *args, **kwargs)


# -- a run file ---------------------------------------------------------------------------------------------------

ENVIRONMENT = """
import verifiers as vf


def letters(completion, **kwargs):
    return float(sum(message["content"].count("e") for message in completion)) + 0.01 * len(str(completion))


def load_environment():
    rows = [{"question": f"abc {number}", "answer": "e"} for number in range(8)]
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[letters]))
"""


def write_run(
    directory: Path, model: Path | str, tables: str = "", *, file: str = "run.toml", env: str = "", **trainer: Any
) -> Path:
    """Write a run file of two steps.

    Args:
        directory: gets `letters_env.py` too, which is trained on where `env` names no other module.
        tables: what follows `[trainer]`, as TOML.
        trainer: settings in place of those here, or beside them.
    """
    (directory / "letters_env.py").write_text(ENVIRONMENT)
    sizes = {"max_steps": 2, "num_generations": 4, "per_device_train_batch_size": 4, "max_completion_length": 8}
    settings = "".join(f"{name} = {json.dumps(value)}\n" for name, value in {**sizes, **trainer}.items())
    ids = f"environment.id = {json.dumps(env or 'letters_env')}\nmodel.path = {json.dumps(str(model))}\n"
    path = directory / file
    path.write_text(f"{ids}[trainer]\n{settings}{tables}")
    return path


# -- a server in this process, over real HTTP --------------------------------------------------------------------


class EmbeddedServer(InProcessServer):
    """The embedded server on a thread, on 127.0.0.1."""

    def __init__(self, directory: Path, slots: int = 64) -> None:
        loaded = load_model(directory, device="cpu", dtype="float32", max_model_len=None)
        super().__init__(loaded, slots=slots, threads=1, prefix_bytes=2**26, seed=5)


class RecordingBackend(HttpBackend):
    """The hot path, with every answer of the server kept as it came: the independent witness."""

    def __init__(self, url: str) -> None:
        super().__init__(Endpoint(url))
        self.answers: list[tuple[dict[str, Any], dict[str, Any]]] = []

    async def post(self, path: str, body: Mapping[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        answer = await super().post(path, body, *args, **kwargs)
        self.answers.append((dict(body), answer))
        return answer

    def sampled(self) -> list[tuple[list[int], list[int], list[float]]]:
        """(prompt ids, sampled ids, log-probs) of each answer with token ids."""
        found = []
        for body, answer in self.answers:
            choice = (answer.get("choices") or [{}])[0]
            # one token without a seed is how a client finds out whether the server takes ids
            asked_what_it_can = "sampling_params" in body and "seed" not in body["sampling_params"]
            if choice.get("token_ids") and choice.get("logprobs") and not asked_what_it_can:
                log_probs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
                prompt_ids = answer.get("prompt_token_ids") or body["token_ids"]
                found.append((prompt_ids, choice["token_ids"], log_probs))
        return found


# -- training ---------------------------------------------------------------------------------------------------


def config(output_dir: Path, url: str, **overrides: Any) -> GRPOConfig:
    """Two prompts of four completions a block, one update a block, on policy, on one CPU thread."""
    values: dict[str, Any] = {
        "output_dir": str(output_dir),
        "server_url": url,
        "server_wait": 60.0,
        "max_steps": 2,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 10,
        "num_batches_ahead": 0,
        "logging_steps": 1,
        "skip_zero_advantage_rows": False,
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "activation_checkpointing": False,
    }
    return GRPOConfig(**{**values, **overrides})


class ObservedTrainer(GRPOTrainer):
    """Keeps what reaches the loss.

    Attributes:
        client: what it was made with.
        keeps_logps: set before training where `seen` is to have the trainer's own log-probs, `current_logps`, which
            takes a forward pass more for each micro-step.
        seen: a dict of cloned inputs for each micro-step, with `step` and `computed_tokens`, without their layout.
    """

    keeps_logps = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.seen: list[dict[str, Any]] = []
        self.client = kwargs.get("client")
        super().__init__(*args, **kwargs)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        kept: dict[str, Any] = {n: copy.deepcopy(value) for n, value in inputs.items() if n != SHARED_ROWS}
        kept |= {"step": self.state.global_step, "computed_tokens": computed_tokens(inputs)}
        if self.keeps_logps:
            kept["current_logps"] = self.logprobs.of_model(self.model, inputs)
        self.seen.append(kept)
        return super()._compute_loss(model, inputs)

    def rows(self) -> Iterator[tuple[list[int], list[int], list[int], list[float], dict[str, Any], int]]:
        """Real rows: prompt ids, completion ids, loss mask, sampler log-probs, their micro-step, their place."""
        for batch in self.seen:
            for place in range(len(batch["input_ids"])):
                if not batch["sampled_tokens"][place]:
                    continue
                yield (*sequence(batch, place), batch, place)

    def trained_spans(self) -> list[tuple[list[int], list[int], list[float]]]:
        """Return what was trained, span by span, in the order of the ids."""
        return sorted(span for row in self.rows() for span in spans(row))

    def largest_difference(self) -> float:
        """Return the largest |trainer - sampler| log-prob, in nats, over trained tokens of on-policy micro-steps."""
        worst = 0.0
        for batch in self.seen:
            trained = batch["loss_mask"].bool()
            gap = (batch["current_logps"] - batch["sampler_logps"]).abs()[trained]
            worst = max(worst, gap.max().item() if gap.numel() else 0.0)
        return worst

    def logged(self, name: str) -> list[float]:
        """Every value that was logged under a name."""
        return [entry[name] for entry in self.state.log_history if name in entry]


class Witness(TrainerCallback):
    """Keeps what was pushed and what was trained, and compares them token by token.

    Attributes:
        rows: the rows of the block in training, with the optimizer steps before, at each step.
    """

    def __init__(self, trainer: ObservedTrainer) -> None:
        self._held: dict[int, dict[str, torch.Tensor]] = {}
        self.rows: list[tuple[int, Any]] = []
        self._trainer, self._push = trainer, trainer.weight_sync.push
        trainer.weight_sync.push = self._pushed  # type: ignore[method-assign]
        trainer.add_callback(self)

    def _pushed(self, named: Any, version: int) -> None:
        tensors = dict(named)
        self._held[version] = {name: tensor.clone() for name, tensor in tensors.items()}
        self._push(tensors.items(), version)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.rows += [(state.global_step - 1, row) for rollout in self._trainer.last_block for row in rollout.rows]

    def check(self, model: Path, *, tolerance: float) -> int:
        """Compare every trained token with the log-prob of its stamped weights; gives how many there were."""
        tokens = 0
        for _, row in self.rows:
            ids = row.prompt_ids + row.completion_ids
            for version in set(row.versions) - {-1}:
                plain = plain_log_probs(self._held[version], model, ids, 1.0)[len(row.prompt_ids) - 1 :]
                places = [place for place, of in enumerate(row.versions) if of == version]
                assert max(abs(row.logprobs[place] - plain[place]) for place in places) <= tolerance
                tokens += len(places)
        return tokens


def loss_inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of an observed micro-batch without what was noted beside it."""
    noted = ("step", "computed_tokens", "current_logps")
    return {name: copy.deepcopy(value) for name, value in batch.items() if name not in noted}


def loss_and_gradient(trainer: GRPOTrainer, inputs: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of a micro-batch, and its gradient in all parameters that have one."""
    trainer.model.zero_grad()
    loss = GRPOTrainer._compute_loss(trainer, trainer.model, dict(inputs))
    loss.backward()
    gradients = [one.grad.flatten() for one in trainer.model.parameters() if one.grad is not None]
    return loss.detach(), torch.cat(gradients)


def sequence(batch: Mapping[str, torch.Tensor], place: int) -> tuple[list[int], list[int], list[int], list[float]]:
    """Prompt ids, then completion ids, loss mask and sampler log-probs from the first sampled token on."""
    real = batch["attention_mask"][place].bool()
    ids, mask, logps = (batch[name][place][real].tolist() for name in ("input_ids", "loss_mask", "sampler_logps"))
    start = mask.index(1)
    return ids[:start], ids[start:], mask[start:], logps[start:]


def spans(row: tuple[Any, ...]) -> list[tuple[list[int], list[int], list[float]]]:
    """(everything before, sampled ids, their log-probs) of each run of sampled tokens in a training row."""
    prompt, ids, mask, logps = row[:4]
    found, start = [], None
    for place, sampled in enumerate([*mask, 0]):
        if sampled and start is None:
            start = place
        elif not sampled and start is not None:
            found.append((prompt + ids[:start], ids[start:place], logps[start:place]))
            start = None
    return found


@contextmanager
def closing(trainer: GRPOTrainer) -> Iterator[GRPOTrainer]:
    """Return a trainer that is used without `train`, closed on the way out."""
    try:
        yield trainer
    finally:
        trainer.close()


def weights(trainer: GRPOTrainer) -> dict[str, torch.Tensor]:
    """Return a copy of the policy's tensors."""
    return {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}


class _CtrlC(TrainerCallback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            raise KeyboardInterrupt


def stop(trainer: GRPOTrainer, step: int, resume: bool | str = False) -> None:
    """Train until Ctrl-C at the end of a step, before anything of it is saved."""
    trainer.add_callback(_CtrlC(step))
    try:
        trainer.train(resume_from_checkpoint=resume)
    except KeyboardInterrupt:
        return
    raise AssertionError("the run did not come to this step")


def ended(record: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return the rollouts that a record of the block log has, trained or dropped, in order."""
    dropped = [(item["example_id"], item["generation"]) for item in record["dropped"]]
    return sorted([*map(tuple, record["trained"]), *dropped])


def assert_block_log_is_whole(directory: Path, plan: Any) -> None:
    """Each planned rollout ended once."""
    records = read_block_log(directory)
    assert [record["block_id"] for record in records] == list(range(plan.blocks))
    for record in records:
        assert ended(record) == sorted(plan.requests(record["block_id"]))
