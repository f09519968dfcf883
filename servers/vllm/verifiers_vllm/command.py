"""vLLM's own command line and environment, with what training needs filled in."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from verifiers_vllm.versions import SCALE_OUT_FLAG_SINCE, Minor


def is_cpu_build(version: str) -> bool:
    return "cpu" in version or sys.platform == "darwin"


def vllm_arguments(
    model: str, host: str, port: int, given: Sequence[str], minor: Minor, *, on_cpu: bool
) -> list[str]:
    """Return the arguments after ``vllm serve``; flags that are given go through unchanged, and win."""
    arguments = [model, "--host", host, "--port", str(port), *given]

    def add(*flag: str) -> None:
        if not _is_given(given, flag[0]):
            arguments.extend(flag)

    # the log-prob of a token is that of the distribution it was drawn from
    add("--logprobs-mode", "processed_logprobs")
    # without it the model's generation_config.json sets top_p and top_k behind the trainer's back
    add("--generation-config", "vllm")
    if minor >= SCALE_OUT_FLAG_SINCE:
        add("--enable-scale-out")
    if not _is_given(given, "--no-disable-uvicorn-access-log"):
        # a line for every rollout
        add("--disable-uvicorn-access-log")
    if on_cpu and not _is_given(given, "--no-enforce-eager"):
        # there is nothing to capture, and compiling takes minutes
        add("--enforce-eager")
    if on_cpu and not _is_given(given, "--enable-chunked-prefill"):
        # a prompt in pieces whose request has a seed ends the CPU worker ("does not use offset")
        add("--no-enable-chunked-prefill")
    if on_cpu and not _is_given(given, "--async-scheduling"):
        # steps that overlap gain nothing where one thread computes
        add("--no-async-scheduling")
    return arguments


def environment_for(
    given: Sequence[str], base: Mapping[str, str] | None = None, *, on_cpu: bool, threads: int | None = None
) -> dict[str, str]:
    """Return the server's environment: what is set already wins, except the routes, which must be there."""
    environment = {
        # threads that spin between steps take the cores from the trainer beside them
        "KMP_BLOCKTIME": "0",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_NO_USAGE_STATS": "1",
        # longer than clients keep idle connections: one that is closed while a request is on its way loses it
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "75",
        # a grammar around tool calls would make the log-probs those of another distribution than the policy's
        "VLLM_ENFORCE_STRICT_TOOL_CALLING": "0",
    }
    if on_cpu:
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "2"}
        # glibc: a push loads layer after layer into memory that the one before has just freed; without these
        # each page comes from the kernel again, and loading takes a third longer
        environment |= {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**33)}
    environment |= os.environ if base is None else base
    environment["VLLM_SERVER_DEV_MODE"] = "1"
    if _is_given(given, "--enable-lora"):
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if threads is not None:
        environment["OMP_NUM_THREADS"] = environment["MKL_NUM_THREADS"] = str(threads)
    return environment


def _is_given(given: Sequence[str], flag: str) -> bool:
    return any(argument.split("=", 1)[0].replace("_", "-") == flag for argument in given)
