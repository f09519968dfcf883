"""Taking new weights from a directory of safetensors files: all is checked before anything is copied."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from verifiers_embedded.errors import WeightsError

Copies = list[tuple[torch.Tensor, torch.Tensor]]
"""Pairs of a live tensor and the tensor whose values it is to take."""

_NAMES_SHOWN = 8


def read_weights(directory: Path) -> dict[str, torch.Tensor]:
    """Read all tensors of ``model.safetensors``, of the shards an index names, or of every ``*.safetensors`` file.

    The tensors map the files, which must stay as they are until the reload is answered. Raises WeightsError.
    """
    tensors: dict[str, torch.Tensor] = {}
    for path in _weight_files(directory):
        try:
            if not path.is_file():
                raise WeightsError(f"{path} is not a regular file; write the weights there, then reload")
            with path.open("rb") as file:
                # what hangs must hang here: `safe_open` stops every other thread while it waits
                file.read(1)
            with safe_open(path, framework="pt", device="cpu") as opened:
                for name in opened.keys():  # noqa: SIM118 - the handle is not a mapping
                    if name in tensors:
                        raise WeightsError(f"tensor {name!r} stands in two files of {directory}; write it once")
                    tensors[name] = opened.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"cannot read {path}: {error}; write the file completely, then reload") from error
    return tensors


def _weight_files(directory: Path) -> list[Path]:
    # pathlib raises for a name that is too long
    if not os.path.isdir(directory):
        raise WeightsError(f"weights_path {str(directory)!r:.300} is not a directory on the server's machine")
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        try:
            shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            return [directory / shard for shard in shards]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise WeightsError(f"cannot read the index {index}: {error!r}; write it again") from error
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise WeightsError(f"{str(directory)!r} holds no *.safetensors file; save the model there first")
    return files


def match_weights(model: Any, given: dict[str, torch.Tensor]) -> Copies:
    """Pair every tensor of the model with the given one of its name.

    Where a name is not the model's, all are read as a checkpoint's. Of tensors that share memory (tied embeddings)
    one is enough; where several are given they must be equal. Raises WeightsError, which names what is missing,
    unknown, or of another shape or kind of number.
    """
    live = model.state_dict()
    if not given.keys() <= live.keys():
        given = as_loaded(model, given)
    names_of: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    for name, tensor in live.items():
        names_of.setdefault((tensor.data_ptr(), tuple(tensor.shape)), []).append(name)
    missing = [names[0] for names in names_of.values() if not any(name in given for name in names)]
    problems = _listed("missing", missing) + _listed("unknown", [name for name in given if name not in live])
    problems += _listed(
        "of another shape",
        [
            f"{name} ({tuple(given[name].shape)} given, {tuple(tensor.shape)} served)"
            for name, tensor in live.items()
            if name in given and given[name].shape != tensor.shape
        ],
    )
    problems += _listed(
        "of another kind of number",
        [
            f"{name} ({given[name].dtype} given, {tensor.dtype} served)"
            for name, tensor in live.items()
            if name in given and given[name].is_floating_point() != tensor.is_floating_point()
        ],
    )
    problems += _listed("tied in the model but different in the files", _unequal_tied(names_of.values(), given))
    if problems:
        raise WeightsError(
            "the weights do not fit the model that is served and nothing was changed: " + "; ".join(problems)
        )
    return [(live[name], given[name]) for names in names_of.values() for name in [n for n in names if n in given][:1]]


def as_loaded(model: Any, checkpoint: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a checkpoint's tensors under the model's names and in its layout, as `from_pretrained` converts them.

    Names of parts that the model was loaded without are left out; what nothing is known of keeps its name.
    """
    loaded, found = type(model).from_pretrained(
        None,
        config=copy.deepcopy(model.config),
        state_dict=dict(checkpoint),
        # the default: another one would hold in the engine's thread, too
        dtype=torch.float32,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    own = loaded.state_dict()
    tensors = {name: own[name] for name in model.state_dict().keys() - set(found["missing_keys"])}
    tensors |= {
        name: torch.empty(given, device="meta") for name, given, _ in found["mismatched_keys"] if name in tensors
    }
    return tensors | {name: checkpoint[name] for name in found["unexpected_keys"]}


def copy_weights(copies: Copies) -> None:
    """Write the new values into the live tensors, converting dtype and device; return once they are there.

    Copies to a GPU are queued one behind the other, from pinned memory where they come from the host, and waited for
    once: the caller may then change the tensors.
    """
    devices = set()
    with torch.no_grad():
        for target, source in copies:
            if target.device.type == "cuda":
                devices.add(target.device)
                source = source.pin_memory() if source.device.type == "cpu" else source
            target.copy_(source, non_blocking=True)
    for device in devices:
        torch.cuda.current_stream(device).synchronize()


def _unequal_tied(groups: Iterable[list[str]], given: dict[str, torch.Tensor]) -> list[str]:
    unequal = []
    for names in groups:
        held = [name for name in names if name in given]
        if any(not _same(given[held[0]], given[name]) for name in held[1:]):
            unequal.append(" and ".join(held))
    return unequal


def _same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.shape == second.shape and torch.equal(first.double(), second.double())


def _listed(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    shown = ", ".join(names[:_NAMES_SHOWN])
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return [f"{what}: {shown}{more}"]
