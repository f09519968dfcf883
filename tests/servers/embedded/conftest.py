"""A tiny character model, made on the spot, and servers that hold it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

# Read once, when torch is imported: one thread a test process, and no spinning beside other processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("KMP_BLOCKTIME", "0")

import aiohttp
import pytest
import pytest_asyncio
import torch
from aiohttp import web
from safetensors.torch import load_file, save_file
from tiny_models import two_role_tokenizer, write_random_qwen3
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
from verifiers_embedded.engine.loading import LoadedModel, load_model
from verifiers_embedded.serving import Service

from verifiers.server_process import bind, url_of

torch.set_num_threads(1)

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<bot>{% else %}<user>{% endif %}{{ m.content }}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)


def make_model(directory: Path, *, seed: int = 0, tied: bool = False) -> Path:
    """Write a random Qwen3 model whose distributions are far from flat, with a tokenizer of characters."""
    return write_random_qwen3(directory, two_role_tokenizer(TEMPLATE), seed=seed, tie_word_embeddings=tied)


class Reference:
    """Results of transformers alone, with none of the server's code."""

    def __init__(self) -> None:
        self._models: dict[Path, Any] = {}

    def model(self, directory: Path) -> Any:
        if directory not in self._models:
            loaded = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32)
            self._models[directory] = loaded.eval()
        return self._models[directory]

    def logits(self, directory: Path, ids: list[int]) -> torch.Tensor:
        """Return the logits after every token of one sequence, from one plain forward pass: (tokens, vocabulary)."""
        with torch.no_grad():
            return self.model(directory)(input_ids=torch.tensor([ids])).logits[0]

    def log_probs(
        self, directory: Path, prompt: list[int], sampled: list[int], temperature: float = 1.0
    ) -> list[float]:
        """Return the log-probabilities of `sampled` after `prompt`."""
        logits = self.logits(directory, prompt + sampled)[len(prompt) - 1 : -1]
        log_probs = torch.log_softmax(logits / temperature, dim=-1)
        return log_probs.gather(1, torch.tensor(sampled)[:, None]).squeeze(1).tolist()

    def tensors(self, directory: Path) -> dict[str, torch.Tensor]:
        """Return the tensors that a trainer would write."""
        return load_file(directory / "model.safetensors")


@pytest.fixture(scope="session")
def reference() -> Reference:
    return Reference()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "first", seed=0)


@pytest.fixture(scope="session")
def other_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a model of the same architecture with other weights, as a trainer would push them."""
    return make_model(tmp_path_factory.mktemp("models") / "second", seed=1)


@pytest.fixture(scope="session")
def tied_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tied", seed=2, tied=True)


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes tensors into a folder from which a server can load them."""

    def write(tensors: dict[str, torch.Tensor], name: str = "pushed", file: str = "model.safetensors") -> Path:
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        save_file({key: tensor.contiguous().clone() for key, tensor in tensors.items()}, directory / file)
        return directory

    return write


@pytest.fixture(scope="session")
def build() -> Callable[..., Path]:
    """Return `make_model`, for tests that need a model of another kind."""
    return make_model


@pytest.fixture(scope="session")
def long_dirs(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Make models with a long context, one for each kind of tokenizer."""
    from json_forms import byte_level_tokenizer, save_model

    directory = tmp_path_factory.mktemp("constrained")
    tokenizers = {
        "characters": PreTrainedTokenizerFast.from_pretrained(model_dir),
        "byte-level": byte_level_tokenizer(),
    }
    return {name: save_model(directory / name, tokenizer) for name, tokenizer in tokenizers.items()}


@pytest.fixture(scope="session")
def byte_level_dir(long_dirs: dict[str, Path]) -> Path:
    return long_dirs["byte-level"]


class Server:
    """A server in this process, over real sockets on 127.0.0.1."""

    def __init__(self, base: str, service: Service, session: aiohttp.ClientSession) -> None:
        self.base, self.service, self.session = base, service, session
        self.engine, self.loaded, self.text = service.engine, service.loaded, service.text

    async def post(self, path: str, body: Any = None) -> tuple[int, Any]:
        async with self.session.post(self.base + path, json=body) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.base + path) as response:
            return response.status, await response.json()

    async def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Return every event of a stream, in order."""
        async with self.session.post(self.base + path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            lines = [line.removeprefix(b"data: ").strip() async for line in response.content if line.strip()]
        events = [json.loads(line) for line in lines if line != b"[DONE]"]
        assert lines[-1] == b"[DONE]" or "error" in events[-1]
        return events

    async def chat(self, content: Any = "hello", **fields: Any) -> dict[str, Any]:
        """Return a completion with ids and log-probs; fail the test if the request is refused."""
        body = {"model": "m", "messages": [{"role": "user", "content": content}], **fields}
        status, answer = await self.post(
            "/v1/chat/completions", {"logprobs": True, "return_token_ids": True, "max_tokens": 24, **body}
        )
        assert status == 200, answer
        return answer

    @staticmethod
    def sampled(answer: dict[str, Any]) -> tuple[list[int], list[int], list[float]]:
        """Return prompt ids, sampled ids and their log-probs of an answer."""
        choice = answer["choices"][0]
        log_probs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert len(log_probs) == len(choice["token_ids"]) == answer["usage"]["completion_tokens"]
        return answer["prompt_token_ids"], choice["token_ids"], log_probs

    async def refused(self, **fields: Any) -> tuple[int, dict[str, Any]]:
        """Return status and error object of a request that must be refused."""
        body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, **fields}
        status, answer = await self.post("/v1/chat/completions", body)
        assert status >= 400, answer
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        return status, answer["error"]

    async def push(self, directory: Path, version: str | None = None) -> tuple[int, Any]:
        answer = await self.post(
            "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
        )
        if version is not None and answer[0] == 200:
            await self.post("/update_weight_version", {"new_version": version})
        return answer

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the engine's state meets `condition`."""
        async with asyncio.timeout(30):
            while not condition():  # noqa: ASYNC110 - the engine is a thread and sets no events
                await asyncio.sleep(0.001)


Start = Callable[..., Any]


@pytest.fixture(scope="session")
def load() -> Callable[[Path, int | None], LoadedModel]:
    """Return a function that loads a model from its files once and gives every caller a copy of its own."""
    loaded: dict[tuple[Path, int | None], LoadedModel] = {}

    def copy(directory: Path, max_model_len: int | None) -> LoadedModel:
        key = directory, max_model_len
        if key not in loaded:
            loaded[key] = load_model(directory, device="cpu", dtype="float32", max_model_len=max_model_len)
        return deepcopy(loaded[key])

    return copy


@pytest_asyncio.fixture
async def start(model_dir: Path, load: Callable[[Path, int | None], LoadedModel]) -> AsyncIterator[Start]:
    """Start servers, and end them with the test."""
    running: list[tuple[web.AppRunner, Server]] = []

    async def begin(
        directory: Path = model_dir,
        *,
        max_model_len: int | None = None,
        template: str | None = None,
        **options: Any,
    ) -> Server:
        loaded = load(directory, max_model_len)
        if template is not None:
            loaded.tokenizer.chat_template = template
        service = Service(loaded, name="m", threads=1, **{"seed": 5, **options})
        listener = bind("127.0.0.1", 0)
        runner = await service.start(listener)
        session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        server = Server(url_of(listener), service, session)
        running.append((runner, server))
        return server

    yield begin
    for runner, server in running:
        # a test may have put another session in its place
        await server.session.close()
        await server.service.stop(runner)
