"""What vLLM samples of families' checkpoints, under the interpreter of its own virtual environment.

    python vllm_side.py DIRECTORY

DIRECTORY has a folder for each family, with two checkpoints `a` and `b` of one shape. In each, answers.json tells
what was sampled from `a`, after a push of `b`, and after a push of `a` again, or the error that came instead. A
family whose kernels refuse float32 is asked in bfloat16.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

# one engine after the other in this process, which spares a start of half a minute each
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind", HF_HUB_OFFLINE="1")
os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR", OMP_NUM_THREADS="1")

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

PROMPT_LENGTHS = (1, 2, 9, 9, 30, 47)
SAMPLED = 12


def sample(engine: Any, vocabulary: int) -> list[dict[str, Any]]:
    """Sample from some prompts at once, and return prompts, tokens and their log-probs."""
    dice = random.Random(0)
    prompts = [[dice.randrange(1, vocabulary) for _ in range(length)] for length in PROMPT_LENGTHS]
    asked = [
        SamplingParams(max_tokens=SAMPLED, seed=place, logprobs=0, ignore_eos=True) for place in range(len(prompts))
    ]
    answers = engine.generate([{"prompt_token_ids": ids} for ids in prompts], asked, use_tqdm=False)
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = list(answer.outputs[0].token_ids)
        log_probs = [entry[token].logprob for token, entry in zip(ids, answer.outputs[0].logprobs, strict=True)]
        found.append({"prompt": prompt, "token_ids": ids, "log_probs": log_probs})
    return found


def answers_of(family: Path, dtype: str) -> dict[str, Any]:
    config = json.loads((family / "a" / "config.json").read_text())
    settings: dict[str, Any] = {}
    if "vision_config" in config:
        # the text side alone
        settings["limit_mm_per_prompt"] = {"image": 0, "video": 0}
    if "kv_lora_rank" in config and "index_topk" not in config:
        # AMX's latent attention packs a weight and drops the one that a push would write to
        settings["attention_backend"] = "CPU_MLA"
    engine = LLM(str(family / "a"), dtype=dtype, enforce_eager=True, max_model_len=256, max_num_seqs=8, **settings)
    vocabulary = config.get("text_config", config)["vocab_size"]
    told: dict[str, Any] = {"dtype": dtype, "first": sample(engine, vocabulary)}
    for stage, pushed in (("pushed", "b"), ("pushed back", "a")):
        # what the trainer asks vLLM's workers for
        engine.collective_rpc("reload_weights", kwargs={"weights_path": str(family / pushed)})
        told[stage] = sample(engine, vocabulary)
    return told


def main(directory: Path) -> None:
    for family in sorted(directory.iterdir()):
        for dtype in ("float32", "bfloat16"):
            try:
                told = answers_of(family, dtype)
            except Exception as error:
                told = {"error": f"{type(error).__name__}: {error}"}
            # kernels may hold memory of an engine that nothing names
            cleanup_dist_env_and_memory()
            gc.collect()
            if not any(name in told.get("error", "") for name in ("BF16", "bfloat16")):
                break
        (family / "answers.json").write_text(json.dumps(told))
        print(family.name, told.get("error", "sampled"), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
