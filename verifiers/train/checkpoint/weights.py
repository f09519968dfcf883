"""The weights of a checkpoint: loaded as `from_pretrained` loads them, then compared with what was saved.

transformers' own loading in a trainer goes by names: where a checkpoint's are not the model's in memory (fused
experts, prefixes), it leaves tensors as they are and warns (huggingface/transformers#48805, #43701).
"""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verifiers.errors import CheckpointError, Error
from verifiers.train.checkpoint.checkpoint import KEPT, MARKER, START_NEW, TENSORS, extra_state
from verifiers.train.config import setting_name
from verifiers.train.processes.distributed import Ranks
from verifiers.train.weight_sync.protocol import gathered_tensors, is_sharded

_REFERENCE = "reference"
"""The directory in a checkpoint with the reference model, where that changes."""


@contextlib.contextmanager
def settings_of_the_run(optimizer: Any, scheduler: Any) -> Iterator[None]:
    """Keep learning rate, weight decay and schedule as this run has them while a checkpoint's states are loaded.

    transformers takes them from the checkpoint, and the first step's rate from the end of the schedule there was.
    Schedules that are no function of the step are left as they were loaded.
    """
    groups = getattr(optimizer, "param_groups", None) or []
    own = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    yield
    functions = getattr(scheduler, "lr_lambdas", None)
    if functions is None or not all("initial_lr" in settings for settings in own):
        return
    for group, settings in zip(optimizer.param_groups, own, strict=True):
        group.update(settings)
    scheduler.base_lrs = [settings["initial_lr"] for settings in own]
    for group, base, function in zip(optimizer.param_groups, scheduler.base_lrs, functions, strict=True):
        group["lr"] = base * function(scheduler.last_epoch)
    scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]


@contextlib.contextmanager
def unreadable_named(what: str, checkpoint: str) -> Iterator[None]:
    """Raise a CheckpointError for whatever files of a checkpoint raise that cannot be read."""
    try:
        yield
    except Error:
        raise
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{what} in {checkpoint} cannot be loaded ({first.rstrip('. ')}); resume from an earlier "
            f"checkpoint by its path, or {START_NEW}."
        ) from error


def check_kept(checkpoint: str, args: Any) -> None:
    """Refuse a checkpoint whose optimizer's state, or best value of a metric, is of another setting than now."""
    saved = extra_state(checkpoint)
    for name in KEPT:
        # the fused form has the same state, and transformers adds the prefix
        values = saved.get(name), setting_name(getattr(args, name))
        had, now = (str(value).removesuffix("_fused").removeprefix("eval_") for value in values)
        if had != now and "None" not in (had, now):
            raise CheckpointError(
                f"{checkpoint} was written with {name}={had!r}, and this run has {now!r}; "
                f"use the same, or {START_NEW}."
            )


def check_optimizer(checkpoint: str) -> None:
    """Refuse a checkpoint without the optimizer's state, which transformers would begin anew."""
    for name in ("optimizer.pt", "scheduler.pt"):
        if not (Path(checkpoint) / name).is_file():
            raise CheckpointError(f"{checkpoint} has no {name}, without which no run goes on as it was; {START_NEW}.")


class CheckpointWeights:
    """The policy's tensors as checkpoints hold them; every rank has one and calls it in the same order.

    FSDP and DeepSpeed, which train it `in_shards`, keep files of their own, under the names in memory.

    Args:
        reference: the reference model, where it changes during the run (`sync_ref_model`).
    """

    def __init__(self, ranks: Ranks, model: Any, *, in_shards: bool, reference: Any = None) -> None:
        self._ranks, self._model, self._in_shards, self._reference = ranks, model, in_shards, reference
        self._checksums: dict[str, str] = {}
        self._frozen: set[str] = set()

    def load(self, checkpoint: str, load_by_name: Callable[[], None]) -> None:
        """Load a checkpoint into the policy, and compare the checksum of each tensor with the saved one.

        Shards and adapters are loaded by transformers, with `load_by_name`.

        Raises:
            CheckpointError: the files cannot be read, or the policy is not as it was saved.
        """
        path, model = Path(checkpoint), self._model
        by_name = self._in_shards or hasattr(model, "peft_config")
        if self._in_shards and path.is_dir() and not [*path.glob("pytorch_model_fsdp*"), *path.glob("global_step*")]:
            raise CheckpointError(
                f"{checkpoint} was written without FSDP and DeepSpeed, whose files it lacks; resume with the "
                f"launcher's settings that wrote it, or {START_NEW}."
            )
        dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
        # a rank of a sharded model may fail because another one has ended
        with contextlib.nullcontext() if self._in_shards else unreadable_named("the weights", checkpoint):
            _check_adapter(path, model)
            # transformers warns of a best checkpoint that is gone, and refuses one of FSDP
            if by_name or not path.is_dir() or any(path.glob("pytorch_model_fsdp*")):
                load_by_name()
            else:
                _load_pretrained(model, path)
        for name, parameter in model.named_parameters():
            # PEFT turns adapters of 16 bits into float32
            if parameter.dtype != dtypes.get(name, parameter.dtype):
                parameter.data = parameter.data.to(dtypes[name])
        self._checksums, self._frozen = {}, set()
        found = self.checksums()
        self._ranks.on_rank_0(lambda: _compare(path, found))

    def save_reference(self, checkpoint: Path) -> None:
        """Save a reference model that changes beside the policy, on the rank that writes; shards are not gathered."""
        if self._reference is not None and not self._in_shards and self._ranks.is_main:
            self._reference.save_pretrained(checkpoint / _REFERENCE)

    def load_reference(self, checkpoint: str) -> None:
        """Load a reference model that changes as it was saved.

        Raises:
            CheckpointError: the checkpoint has none, or it cannot be read.
        """
        if self._reference is None:
            return
        path = Path(checkpoint) / _REFERENCE
        if not path.is_dir():
            raise CheckpointError(
                f"{checkpoint} has no {_REFERENCE}/, the reference model as it was then: it is written with "
                f"sync_ref_model=True, and not by FSDP or DeepSpeed; set sync_ref_model=False, or {START_NEW}."
            )
        with unreadable_named("the reference model", checkpoint):
            _load_pretrained(self._reference, path)

    def checksums(self) -> dict[str, str]:
        """Return the checksum of each tensor by its name, on rank 0; of tied ones the first name counts.

        A sharded model is gathered, tensor by tensor. Parameters that are frozen, such as those below an adapter, are
        read once.
        """
        model = self._model
        frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        known = frozen & self._frozen
        self._checksums |= gathered_tensors(
            model, keep=self._ranks.is_main, only=lambda name: name not in known, take=checksum
        )
        self._frozen = frozen
        return dict(self._checksums)


def checksum(tensor: Tensor) -> str:
    """Return the CRC-32 of a tensor's bytes: it differs wherever one number of up to 32 bits does."""
    return f"{zlib.crc32(tensor.detach().cpu().flatten().view(torch.uint8).numpy().data):08x}"


def _load_pretrained(model: Any, directory: Path) -> None:
    """Fill a model, which keeps its device and dtypes, with what `from_pretrained` reads; to the last bit."""
    dtypes = {tensor.dtype for tensor in model.state_dict().values() if tensor.is_floating_point()}
    loaded, info = type(model).from_pretrained(
        directory,
        config=model.config,
        # in which each of them is exact
        dtype=functools.reduce(torch.promote_types, dtypes),
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    shapes = {name: f"{tuple(saved)} in it, {tuple(own)} here" for name, saved, own in info["mismatched_keys"]}
    _refuse(directory, info["missing_keys"], info["unexpected_keys"], shapes)
    model.load_state_dict(loaded.state_dict())


_SCALES = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
"""Settings of an adapter by which its numbers are multiplied."""


def _check_adapter(directory: Path, model: Any) -> None:
    """Refuse an adapter that would act otherwise than it was trained, though its numbers may be the same."""
    active = model.active_adapters[0] if hasattr(model, "peft_config") else "default"
    # PEFT saves those of other names in a folder each
    file = directory / ("" if active == "default" else active) / "adapter_config.json"
    if not file.is_file():
        return
    saved = json.loads(file.read_text())
    own = model.peft_config[active].to_dict() if hasattr(model, "peft_config") else None
    for name in _SCALES:
        had, now = saved.get(name), None if own is None else own.get(name)
        if had != now:
            this = "no adapter" if own is None else repr(now)
            raise CheckpointError(
                f"{directory} is of an adapter with {name}={had!r}, and this run has {this}: the policy would be "
                f"another; use the same, or {START_NEW}."
            )


def _compare(directory: Path, found: Mapping[str, str]) -> None:
    # a checkpoint inside a block has no marker
    saved = extra_state(directory).get(TENSORS) if (directory / MARKER).is_file() else None
    if saved:
        others = {name: "other numbers" for name in found.keys() & saved.keys() if found[name] != saved[name]}
        _refuse(directory, found.keys() - saved.keys(), saved.keys() - found.keys(), others)


def _refuse(directory: Path, missing: Iterable[str], useless: Iterable[str], others: Mapping[str, str]) -> None:
    faults = {**dict.fromkeys(missing, "not in it"), **dict.fromkeys(useless, "of no use to the model"), **others}
    if faults:
        shown = ", ".join(f"{name} ({faults[name]})" for name in sorted(faults)[:4])
        more = f" and {len(faults) - 4} more" if len(faults) > 4 else ""
        raise CheckpointError(
            f"{directory} does not give back the model that was saved: {shown}{more}. Its files have changed, or the "
            "model, its dtype or its adapter is another; use those of the run that wrote it, resume from an earlier "
            f"checkpoint by its path, or {START_NEW}."
        )


@contextlib.contextmanager
def reference_of(model: Any, needed: bool) -> Iterator[None]:
    """Let TRL, which loads the reference by the policy's name, load the weights that a policy in memory has now."""
    if not needed or isinstance(model, str) or hasattr(model, "peft_config"):
        yield
        return
    name = model.config._name_or_path
    whole = gathered_tensors(model, keep=True, tied=True) if is_sharded(model) else None
    with tempfile.TemporaryDirectory(prefix="verifiers-reference-") as directory:
        model.save_pretrained(directory, state_dict=whole)
        model.config._name_or_path = directory
        try:
            yield
        finally:
            model.config._name_or_path = name
