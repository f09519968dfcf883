"""A real language model (SmolLM2-135M-Instruct): training beside TRL, serving beside other servers.

    python benchmarks/real_model.py [--seeds 0 1 2 3 4] [--rounds 3] [--parts training serving] [--kinds full lora]

Training: TRL's own GRPOTrainer, which generates with transformers, and ours in one process, to the same mean reward
of three steps (`--target`) from the same checkpoint, with the same prompts, sizes and learning rate; all cores each,
one side at a time. Seconds are from the first step's begin; memory is a side's largest proportional set size; gain
is what our side's reward on held-out prompts rose by until there, a number a seed.

Serving: 32 chats in flight of the same task, 48 new tokens each, float32, two threads. Sides take turns round by
round, and a server is stopped (SIGSTOP) while it is another's turn, as an idle one takes time too: vf-serve,
transformers' `generate` in batches of 32, `transformers serve`, vLLM's CPU build (`make vllm`), and llama.cpp's
server on the wheel's GGUF, four bits (`pip install llama-cpp-python[server]`, with VERIFIERS_LLAMA_PYTHON naming its
interpreter). A side that is not installed is null. `logprob_difference` is the largest between vf-serve's
log-probs and a forward pass of transformers over the same tokens.

Ends with one line of JSON: wall_ratio and memory_ratio are ours over TRL's; serving ratios are ours over theirs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import itertools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import psutil

from verifiers.train.models import make_smollm2

sys.path.insert(0, str(Path(__file__).with_name("trl_sides")))
CORES = os.cpu_count() or 1

IN_FLIGHT, NEW_TOKENS = 32, 48


def training(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Run both sides for every seed and kind, and return the ratios."""
    from intervals import ratio_over_seeds
    from measuring import Run, measure

    told: dict[str, Any] = {}
    for kind in args.kinds:
        runs: dict[str, dict[int, Run]] = {"ours": {}, "theirs": {}}
        for seed, side in itertools.product(args.seeds, runs):
            asked = {
                "real": kind, "model": str(args.model), "seed": seed, "window": 3, "latency_s": 0.0,
                "num_batches_ahead": 0, "target": args.target, "max_steps": args.max_steps,
                "output_dir": str(work / f"{side}-{kind}-{seed}"),
            }  # fmt: skip
            runs[side][seed] = measure(side, asked, CORES)
        reached = all(run.reached for side in runs.values() for run in side.values())
        for name, what in (("wall_ratio", "seconds"), ("memory_ratio", "memory_bytes")):
            found = {side: {seed: [getattr(run, what)] for seed, run in of.items()} for side, of in runs.items()}
            # a side that misses the target has no time to it
            valid = reached or what != "seconds"
            told[f"{name}_{kind}"] = ratio_over_seeds(found["ours"], found["theirs"]) if valid else None
        told[f"gain_{kind}"] = [run.gain for run in runs["ours"].values()]
    return told


# -- serving ------------------------------------------------------------------------------------------------------

Side = Callable[[list[Any]], Awaitable[int]]


def prompts(count: int) -> list[Any]:
    import verifiers as vf

    return vf.load_environment("structured-output", num_train=count).get_dataset()["prompt"]


def chat_side(url: str, model: str, fields: dict[str, Any]) -> Side:
    """Return a side that asks a server for one chat completion a prompt."""
    import aiohttp

    async def run(messages: list[Any]) -> int:
        slots = asyncio.Semaphore(IN_FLIGHT)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as session:

            async def one(number: int, prompt: Any) -> int:
                body = {"model": model, "messages": prompt, "max_tokens": NEW_TOKENS, "temperature": 1.0}
                body |= {"seed": number, **fields}
                async with slots, session.post(f"{url}/chat/completions", json=body) as response:
                    answer = await response.json()
                    assert response.status == 200, answer
                    return int(answer["usage"]["completion_tokens"])

            return sum(await asyncio.gather(*itertools.starmap(one, enumerate(messages))))

    return run


def generate_side(model: Path) -> Side:
    """Return transformers' `generate` on batches of as many prompts as the others have in flight."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model, padding_side="left")
    policy: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    async def run(messages: list[Any]) -> int:
        for first in range(0, len(messages), IN_FLIGHT):
            batch = tokenizer.apply_chat_template(
                list(messages[first : first + IN_FLIGHT]),
                add_generation_prompt=True, tokenize=True, padding=True, return_tensors="pt", return_dict=True,
            )  # fmt: skip
            options = {"do_sample": True, "top_k": 0, "max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
            policy.generate(**batch, **options)
        return len(messages) * NEW_TOKENS

    return run


@contextlib.contextmanager
def llama_server(gguf: Path) -> Iterator[str]:
    """Start llama.cpp's server, where an interpreter that has it is named."""
    from embedded_server import free_port, process

    port = free_port()
    command = [os.environ["VERIFIERS_LLAMA_PYTHON"], "-m", "llama_cpp.server", "--model", str(gguf)]
    command += ["--port", str(port), "--n_threads", str(CORES), "--n_ctx", "2048"]
    with process(command, port, "/v1/models") as url:
        yield f"{url}/v1"


def serving(args: argparse.Namespace) -> dict[str, Any]:
    """Run every side that is installed, round after round, and return what ours is of each."""
    from embedded_server import rate, transformers_serve

    from verifiers.train.processes.launch import launched_server

    vllm_python = Path(
        os.environ.setdefault("VERIFIERS_VLLM_PYTHON", str(Path(__file__).parents[1] / ".venv-vllm/bin/python"))
    )
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    messages = prompts(args.requests)
    exact = {"ignore_eos": True, "logprobs": True, "return_token_ids": True}
    medians: dict[str, float | None] = dict.fromkeys(["generate", "transformers serve", "vLLM", "llama.cpp"])
    sides: dict[str, Side] = {}
    processes: dict[str, list[psutil.Process]] = {}
    known: set[psutil.Process] = set()

    def add(name: str, side: Side) -> None:
        """Note a side, and the processes that were started for it."""
        sides[name] = side
        processes[name] = [one for one in psutil.Process().children(recursive=True) if one not in known]
        known.update(processes[name])

    with contextlib.ExitStack() as stack:
        threads = ["--served-model-name", "m", "--threads", str(CORES)]
        # what a round keeps must not help the next
        ours = stack.enter_context(
            launched_server("embedded", str(args.model), args=[*threads, "--prefix-cache-mib", "0"])
        )
        told: dict[str, Any] = {"logprob_difference": logprob_difference(ours, args.model, messages[0])}
        add("vf-serve", chat_side(ours, "m", exact))
        add("generate", generate_side(args.model))
        if vllm_python.exists():
            more = [*threads, "--dtype", "float32", "--max-model-len", "1024", "--no-enable-prefix-caching"]
            url = stack.enter_context(launched_server("vllm", str(args.model), args=more, start_timeout_s=300.0))
            add("vLLM", chat_side(url, "m", exact))
        if importlib.util.find_spec("fastapi"):
            url = stack.enter_context(transformers_serve(args.model))
            add("transformers serve", chat_side(f"{url}/v1", str(args.model), {}))
        if os.environ.get("VERIFIERS_LLAMA_PYTHON") and args.gguf:
            add("llama.cpp", chat_side(stack.enter_context(llama_server(args.gguf)), "m", {}))
        rates: dict[str, list[float]] = {name: [] for name in sides}
        for turn, (name, side) in itertools.product(range(1 + args.rounds), sides.items()):
            with only(processes[name], known):
                found = rate(side, messages if turn else messages[:IN_FLIGHT])
            # the first turn warms up
            rates[name] += [found] if turn else []
    for name, values in rates.items():
        medians[name] = statistics.median(values)
        print(f"{name:<20} {medians[name]:7.1f} tokens/s  ({min(values):.1f} .. {max(values):.1f})", flush=True)
    own = medians.pop("vf-serve")
    assert own is not None
    return told | {"tokens_per_s": round(own, 1)} | {
        f"ratio_to_{name.replace(' ', '_')}": round(own / theirs, 3) if theirs else None
        for name, theirs in medians.items()
    }  # fmt: skip


@contextlib.contextmanager
def only(awake: Collection[psutil.Process], everyone: Collection[psutil.Process]) -> Iterator[None]:
    """Stop all processes but these for the time of the context."""
    stopped = [one for one in everyone if one not in awake]
    for one in stopped:
        one.suspend()
    try:
        yield
    finally:
        for one in stopped:
            one.resume()


def logprob_difference(url: str, model: Path, prompt: Any) -> float:
    """Return the largest difference between the server's log-probs of an answer and those of transformers."""
    import openai
    import torch
    from transformers import AutoModelForCausalLM

    client = openai.OpenAI(base_url=url, api_key="EMPTY")
    extra = {"return_token_ids": True, "ignore_eos": True}
    answer: Any = client.chat.completions.create(
        model="m", messages=prompt, max_tokens=NEW_TOKENS, logprobs=True, seed=1, extra_body=extra
    )
    choice = answer.choices[0]
    ids = torch.tensor([[*answer.prompt_token_ids, *choice.token_ids]])
    policy: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        logps = policy(ids).logits[0, len(answer.prompt_token_ids) - 1 : -1].log_softmax(-1)
    own = logps.gather(-1, torch.tensor(choice.token_ids)[:, None])[:, 0]
    theirs = torch.tensor([entry.logprob for entry in choice.logprobs.content])
    return float(f"{(own - theirs).abs().max():.2g}")


def main() -> None:
    # read when torch is imported, here and in the servers
    os.environ.update(OMP_NUM_THREADS=str(CORES), OMP_WAIT_POLICY="PASSIVE", HF_HUB_OFFLINE="1")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[*range(5)], help="a run of each side for each")
    parser.add_argument("--kinds", nargs="*", choices=("full", "lora"), default=["full", "lora"])
    parser.add_argument("--target", type=float, default=0.7, help="mean reward of three steps that ends a run")
    parser.add_argument("--max-steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the serving sides")
    parser.add_argument("--requests", type=int, default=64, help="chats of a serving round")
    parser.add_argument("--parts", nargs="*", choices=("training", "serving"), default=["training", "serving"])
    parser.add_argument("--model", type=Path, default=Path("runs/smollm2"), help="made where it is not there")
    parser.add_argument("--gguf", type=Path, help="the same model for llama.cpp")
    args = parser.parse_args()
    args.model = make_smollm2(args.model)
    told: dict[str, Any] = {"cores": CORES}
    with tempfile.TemporaryDirectory(prefix="verifiers-benchmark-real-") as scratch:
        if "training" in args.parts:
            told |= {"seeds": args.seeds, **training(args, Path(scratch))}
        if "serving" in args.parts:
            told |= serving(args)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
