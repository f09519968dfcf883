"""Tokens per second of the embedded server over HTTP, beside transformers' own `generate` and `transformers serve`.

    python benchmarks/embedded_server.py [--requests 192] [--rounds 5] [--model small|large]

All sides hold the same random model on one CPU thread, in one process tree, and take turns round by round; rates are
medians over rounds. The requests are the same for all: prompts of 16 to 96 tokens, completions of 16 to 96, drawn by
seed, 64 in flight, none ends early. Counted are the tokens that were asked for and came.

- `generate` gets them as left-padded batches of 64 in their order. A batch runs until its longest completion is done,
  and what the others sample beyond theirs is not counted: that is the price of a plain batch on mixed lengths. The
  kinder workload has prompts and completions of 56 tokens each, where nothing is padded or thrown away.
- `transformers serve --continuous-batching` needs fastapi; without it that side is left out, and its ratio is null.
- The server answers with token ids and log-probabilities, as rollouts ask for them; "text only" is the same without,
  which is all that the other two give.

Then 16 conversations of 30 turns, with kept prefixes and without. Ends with one line of JSON: ratio_to_generate (same
requests), ratio_to_generate_equal (the kinder workload), ratio_to_transformers_serve, ratio_of_prefix_reuse.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import random
import signal
import socket
import statistics
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# read when torch is imported, here and in the servers
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(MKL_NUM_THREADS=os.environ["OMP_NUM_THREADS"], KMP_BLOCKTIME="0")
os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")

import aiohttp
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

IN_FLIGHT = 64
SIZES = {"small": (128, 256), "large": (256, 512)}
LETTERS = string.ascii_letters + string.digits + string.punctuation + " "
TURNS, GAMES = 30, 16


@dataclass(frozen=True)
class Request:
    """A prompt, one letter a token, and how many tokens to sample."""

    prompt: str
    max_tokens: int


def make_model(directory: Path, size: str) -> None:
    """Write a random model of 4 layers; no token ends its completions."""
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<unk>", *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>").save_pretrained(
        directory
    )
    torch.manual_seed(0)
    hidden, inner = SIZES[size]
    shape = {"hidden_size": hidden, "intermediate_size": inner, "head_dim": hidden // 4, "num_hidden_layers": 4}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": len(vocabulary)}
    ends = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
    Qwen3ForCausalLM(Qwen3Config(**shape, **ends, max_position_embeddings=1024)).save_pretrained(directory)


def workload(count: int, shortest: int, longest: int) -> list[Request]:
    rng = random.Random(0)
    sizes = [(rng.randint(shortest, longest), rng.randint(shortest, longest)) for _ in range(count)]
    return [Request("".join(rng.choices(LETTERS, k=prompt)), tokens) for prompt, tokens in sizes]


# -- the sides --------------------------------------------------------------------------------------------------


class Generate:
    """`model.generate` of transformers, batch after batch."""

    def __init__(self, directory: Path) -> None:
        torch.set_num_threads(1)
        self._model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.parameters = self._model.num_parameters()

    async def run(self, requests: list[Request]) -> int:
        for start in range(0, len(requests), IN_FLIGHT):
            self._batch(requests[start : start + IN_FLIGHT])
        return sum(request.max_tokens for request in requests)

    def _batch(self, requests: list[Request]) -> None:
        longest = max(len(request.prompt) for request in requests)
        ids = torch.zeros(len(requests), longest, dtype=torch.long)
        for row, request in enumerate(requests):
            ids[row, longest - len(request.prompt) :] = torch.tensor([LETTERS.index(c) + 2 for c in request.prompt])
        tokens = max(request.max_tokens for request in requests)
        sampled = self._model.generate(
            ids, attention_mask=(ids != 0).long(), do_sample=True, temperature=1.0, top_k=0, max_new_tokens=tokens
        )
        assert sampled.shape == (len(requests), longest + tokens)


class Served:
    """A server with OpenAI's completions, asked with so many requests at once."""

    def __init__(self, url: str, model: str, fields: dict[str, Any]) -> None:
        self.url, self._model, self._fields = url, model, fields

    async def run(self, requests: list[Request]) -> int:
        slots = asyncio.Semaphore(IN_FLIGHT)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

            async def one(request: Request) -> int:
                body = {"model": self._model, "prompt": request.prompt, "max_tokens": request.max_tokens}
                async with (
                    slots,
                    session.post(f"{self.url}/v1/completions", json={**body, **self._fields}) as response,
                ):
                    answer = await response.json()
                    assert response.status == 200, answer
                    assert answer["usage"]["completion_tokens"] == request.max_tokens
                    return answer["usage"]["completion_tokens"]

            return sum(await asyncio.gather(*map(one, requests)))


async def conversations(url: str, requests: list[Request]) -> int:
    """Play conversations in which each prompt is all that was said before; return how many tokens were sampled."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def play(seed: int) -> int:
            rng, ids = random.Random(seed), []
            for turn in range(TURNS):
                ids += rng.choices(range(2, len(LETTERS)), k=12)
                sampling = {"max_tokens": 12, "ignore_eos": True, "seed": seed * TURNS + turn}
                body = {"token_ids": ids, "sampling_params": sampling}
                async with session.post(f"{url}/inference/v1/generate", json=body) as response:
                    ids += (await response.json())["choices"][0]["token_ids"]
            return TURNS * 12

        return sum(await asyncio.gather(*map(play, range(GAMES))))


@contextlib.contextmanager
def process(command: list[str], port: int, path: str) -> Iterator[str]:
    """Return a server process, once it answers `path`."""
    url = f"http://127.0.0.1:{port}"
    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, start_new_session=True, **quiet) as running:
        try:
            asyncio.run(answering(url + path, running))
            yield url
        finally:
            # with all that it started: `transformers serve` holds some 14 GB
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(running.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    running.wait(10)


async def answering(url: str, running: subprocess.Popen[bytes]) -> None:
    async with aiohttp.ClientSession() as session:
        while running.poll() is None:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(url) as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.1)
    raise RuntimeError(f"{running.args!r} ended with {running.returncode}")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def embedded(directory: Path, prefix_mib: int) -> contextlib.AbstractContextManager[str]:
    port = free_port()
    command = [sys.executable, "-m", "verifiers_embedded", "--model", str(directory), "--served-model-name", "m"]
    command += ["--port", str(port), "--threads", "1", "--device", "cpu", "--prefix-cache-mib", str(prefix_mib)]
    return process([*command, "--parent-pid", str(os.getpid())], port, "/health")


def transformers_serve(directory: Path) -> contextlib.AbstractContextManager[str]:
    port = free_port()
    command = [str(Path(sys.executable).with_name("transformers")), "serve", str(directory), "--continuous-batching"]
    command += ["--device", "cpu", "--dtype", "float32", "--host", "127.0.0.1", "--port", str(port)]
    return process(command, port, "/health")


# -- measuring --------------------------------------------------------------------------------------------------

Run = Callable[[list[Request]], Awaitable[int]]


def rate(run: Run, requests: list[Request]) -> float:
    """Return the sampled tokens per second of a run."""
    started = time.perf_counter()
    tokens: int = asyncio.run(run(requests))  # type: ignore[arg-type]
    return tokens / (time.perf_counter() - started)


def compare(sides: dict[str, tuple[Run, list[Request]]], rounds: int) -> dict[str, float]:
    """Run the sides round after round; print and return their medians."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for run, requests in sides.values():
        rate(run, requests[:IN_FLIGHT])
    for _ in range(rounds):
        for name, (run, requests) in sides.items():
            rates[name].append(rate(run, requests))
    for name, values in rates.items():
        print(f"{name:<42} {statistics.median(values):>8,.0f} tokens/s  ({min(values):,.0f} .. {max(values):,.0f})")
    return {name: statistics.median(values) for name, values in rates.items()}


def benchmark(size: str, count: int, rounds: int) -> dict[str, float | None]:
    mixed, equal = workload(count, 16, 96), workload(count, 56, 56)
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        directory = Path(scratch) / "model"
        make_model(directory, size)
        generate = Generate(directory)
        # no prompt comes twice by intent, but the rounds repeat: what a round keeps must not help the next
        url = stack.enter_context(embedded(directory, 0))
        reusing = stack.enter_context(embedded(directory, 256))
        ours = Served(url, "m", {"ignore_eos": True, "logprobs": 0, "return_token_ids": True}).run
        sides: dict[str, tuple[Run, list[Request]]] = {
            "embedded server": (ours, mixed),
            "embedded server, text only": (Served(url, "m", {"ignore_eos": True}).run, mixed),
            "generate": (generate.run, mixed),
            "embedded server, equal lengths": (ours, equal),
            "generate, equal lengths": (generate.run, equal),
        }
        if importlib.util.find_spec("fastapi"):
            served = stack.enter_context(transformers_serve(directory))
            sides["transformers serve"] = (Served(served, str(directory), {"temperature": 1.0}).run, mixed)
        load = f"load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
        print(f"{size}: {generate.parameters:,} parameters, {count} requests a round, {rounds} rounds, {load}")
        medians = compare(sides, rounds)
        print(f"{GAMES} conversations of {TURNS} turns, 12 tokens said and 12 sampled in each")
        talks: dict[str, tuple[Run, list[Request]]] = {
            "prefixes kept": (lambda requests: conversations(reusing, requests), []),
            "prefixes not kept": (lambda requests: conversations(url, requests), []),
        }
        medians |= compare(talks, rounds)
    theirs = medians.get("transformers serve")
    return {
        "ratio_to_generate": round(medians["embedded server"] / medians["generate"], 3),
        "ratio_to_generate_equal": round(
            medians["embedded server, equal lengths"] / medians["generate, equal lengths"], 3
        ),
        "ratio_to_transformers_serve": round(medians["embedded server"] / theirs, 3) if theirs else None,
        "ratio_of_prefix_reuse": round(medians["prefixes kept"] / medians["prefixes not kept"], 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", choices=tuple(SIZES), default="small")
    args = parser.parse_args()
    # so that the servers end with it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    print(json.dumps(benchmark(args.model, args.requests, args.rounds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
