"""Capabilities of a rollout server, checked once before training: what is missing is named with the flag for it.

Only routes that describe the server are asked; its log-probs are compared after the first push
(`weight_sync.verification`). A server without such a route is not refused for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from verifiers.errors import WeightSyncError
from verifiers.inference.server_client import RefusedError, ServerClient
from verifiers.inference.wire import UNREADABLE

OLDEST_VLLM = (0, 28)
"""The first minor of vLLM that can be trained against; `vf-vllm` knows the same."""

SAMPLE_TEXT = "The quick brown fox: 12 + 30 = 42.\n\tNaïve?"
"""Text that both tokenizers encode."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """A server's description of itself; None where it gives none.

    Attributes:
        software: "vLLM", or None.
        max_model_len: longest prompt and completion together, in tokens.
        log_probs_mode: vLLM's; "processed_logprobs" is what training needs.
        max_logprobs: most log-probs that it returns for a token; -1 for all.
        max_lora_rank: largest rank of an adapter; 0 where adapters are off.
        transfer_backend: of vLLM's weight transfer, such as "nccl"; "" where it is off.
        loads_adapters: the route for adapters is there.
    """

    root: str
    software: str | None = None
    version: str | None = None
    models: tuple[str, ...] = ()
    max_model_len: int | None = None
    log_probs_mode: str | None = None
    max_logprobs: int | None = None
    sample_ids: tuple[int, ...] | None = None
    max_lora_rank: int | None = None
    dtype: str | None = None
    transfer_backend: str | None = None
    loads_adapters: bool | None = None


async def read_capabilities(server: ServerClient) -> Capabilities:
    """Ask a server that is up.

    Raises:
        WeightSyncError: it does not answer, or describes itself as no server does.
    """
    try:
        return await _described(server)
    except UNREADABLE as error:
        raise WeightSyncError(f"the descriptions of {server.root} cannot be read: {error!r:.200}") from error


async def _described(server: ServerClient) -> Capabilities:
    models = (await _asked(server, "GET", "/v1/models") or {}).get("data") or []
    names = tuple(str(model.get("id")) for model in models)
    lengths = [model["max_model_len"] for model in models if model.get("max_model_len")]
    text = {"model": names[0] if names else None, "prompt": SAMPLE_TEXT, "add_special_tokens": False}
    encoded = await _asked(server, "POST", "/tokenize", text)
    ids = encoded.get("tokens") if isinstance(encoded, dict) else None
    version = await _asked(server, "GET", "/version")
    info = await _asked(server, "GET", "/server_info?config_format=json")
    config = info.get("vllm_config") if isinstance(info, dict) else None
    config = config if isinstance(config, dict) else None
    model_config = (config or {}).get("model_config") or {}
    lora = (config or {}).get("lora_config") or {}
    transfer = (config or {}).get("weight_transfer_config") or {}
    environment = (info or {}).get("vllm_env") or {} if config is not None else {}
    dtype = model_config.get("dtype") or next((model["dtype"] for model in models if "dtype" in model), None)
    return Capabilities(
        root=server.root,
        software="vLLM" if config is not None else None,
        version=str(version["version"]) if isinstance(version, dict) and "version" in version else None,
        models=names,
        max_model_len=int(min(lengths)) if lengths else None,
        log_probs_mode=model_config.get("logprobs_mode"),
        max_logprobs=model_config.get("max_logprobs"),
        sample_ids=tuple(ids) if ids else None,
        max_lora_rank=int(lora.get("max_lora_rank", 0)) if config is not None else None,
        dtype=str(dtype).removeprefix("torch.") if dtype else None,
        transfer_backend=str(transfer.get("backend", "")) if config is not None else None,
        loads_adapters=bool(environment.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING")) if config is not None else None,
    )


def check_capabilities(
    found: Capabilities,
    *,
    missing: Sequence[str] = (),
    model: str | None = None,
    encode: Callable[[str], Sequence[int]] | None = None,
    needed_tokens: int | None = None,
    longest_row: int | None = None,
) -> None:
    """Refuse a server that cannot be trained against, before anything is sampled.

    Args:
        missing: what it lacks for pushes, as `WeightSync.missing_at` returned it.
        model: the name under which it must serve the policy, where the user gave one.
        encode: the trainer's tokenizer, without special tokens.
        needed_tokens: the longest prompt that is known, and the longest completion, together.
        longest_row: number of the training row with that prompt.

    Raises:
        WeightSyncError: names everything that is missing, each with what gives it.
    """
    missing = list(missing)
    if (old := too_old(found.version)) is not None:
        missing.append(old)
    if found.log_probs_mode not in (None, "processed_logprobs"):
        missing.append(
            f"its log-probs are {found.log_probs_mode}, not those of the distribution it samples from; start it with "
            "--logprobs-mode processed_logprobs"
        )
    if model is not None and found.models and model not in found.models:
        missing.append(
            f"it serves {', '.join(map(repr, found.models))}, not {model!r}; set server_model, or start it with "
            f"--served-model-name {model}"
        )
    if encode is not None and found.sample_ids is not None:
        ours = tuple(encode(SAMPLE_TEXT))
        if ours != found.sample_ids:
            missing.append(
                f"its tokenizer encodes a sample as {len(found.sample_ids)} tokens and the trainer's as {len(ours)}, "
                "or as other ones; serve the model that is trained, or give --tokenizer"
            )
    if needed_tokens is not None and found.max_model_len is not None and needed_tokens > found.max_model_len:
        missing.append(
            f"its context is {found.max_model_len} tokens, and the longest prompt (training row {longest_row}) with "
            f"max_completion_length needs {needed_tokens}; start it with --max-model-len {needed_tokens}, or leave "
            "such rows out"
        )
    if missing:
        raise WeightSyncError(f"the rollout server at {found.root} cannot be trained against: {'; '.join(missing)}.")


def too_old(version: str | None) -> str | None:
    """Return what to do about a release of vLLM that is too old; None where it is new enough, or names no release."""
    release = re.match(r"(\d+)\.(\d+)\.\d", version or "")
    if release is None or (int(release[1]), int(release[2])) >= OLDEST_VLLM:
        return None
    return f"it is vLLM {version}, and training needs {'.'.join(map(str, OLDEST_VLLM))} or later; upgrade vLLM there"


async def old_server(server: ServerClient) -> str | None:
    """Return `too_old` of a server that may not answer."""
    try:
        answer = await server.request("GET", "/version", timeout_s=5.0)
    except WeightSyncError:
        return None
    return too_old(str(answer.get("version"))) if isinstance(answer, dict) else None


async def _asked(server: ServerClient, method: str, path: str, body: Any = None) -> Any:
    """Return the answer, or None where the server has no such route or refuses the request."""
    try:
        return await server.ask(method, path, body)
    except RefusedError:
        return None
