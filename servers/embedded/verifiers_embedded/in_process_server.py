"""A server inside the caller's process: new weights are copied from tensor to tensor, with no file between.

For a trainer with a second device, or one that takes turns with the server on one.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import torch

from verifiers.server_process import bind, url_of
from verifiers.train.image_processor import ImageProcessor
from verifiers_embedded.engine.loading import LoadedModel, drop_towers, model_class, prepared
from verifiers_embedded.engine.weights import copy_weights, match_weights
from verifiers_embedded.errors import StartError
from verifiers_embedded.serving import Service


def frozen_copy(
    config: Any,
    tensors: Mapping[str, torch.Tensor],
    device: str | torch.device,
    dtype: torch.dtype | None = None,
    *,
    with_towers: bool = False,
) -> Any:
    """Return a model of its own: made from the config, filled with the tensors, in eval mode, without gradients.

    Never a copy of a live module, which may carry hooks and patched methods that lead back to it. Without `dtype` the
    copy is equal bit for bit. Raises WeightsError for names or shapes that do not match.
    """
    from transformers.initialization import no_init_weights

    kinds = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    number = dtype or (kinds.pop() if len(kinds) == 1 else torch.float32)
    # random values would be overwritten, and take 10 s for a model of 0.6 B
    with no_init_weights():
        kind = model_class(config, with_images=with_towers)
        model: Any = kind.from_config(copy.deepcopy(config), dtype=number)
    if not with_towers:
        drop_towers(model)
    model.tie_weights()
    model = model.to(device).eval().requires_grad_(False)
    copy_weights(match_weights(model, dict(tensors)))
    return model


class InProcessServer:
    """A frozen copy of a policy behind the server's routes, on a thread, on 127.0.0.1.

    Args:
        loaded: the copy and its tokenizer; see `loading.prepared` and `frozen_copy`.
        **options: those of `Service`.
    """

    def __init__(self, loaded: LoadedModel, **options: Any) -> None:
        self.loaded = loaded
        self.service = Service(loaded, **options)
        self.engine = self.service.engine
        self.url = ""
        self._listening: Future[str] = Future()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="verifiers-in-process-server", daemon=True)

    @classmethod
    def of_policy(
        cls,
        config: Any,
        tensors: Mapping[str, torch.Tensor],
        tokenizer: Any,
        *,
        device: str | torch.device,
        dtype: torch.dtype | None = None,
        max_model_len: int | None = None,
        images: ImageProcessor | None = None,
        **options: Any,
    ) -> InProcessServer:
        """Return a server of a frozen copy of a policy; `options` are those of the class."""
        model = frozen_copy(config, tensors, device, dtype, with_towers=images is not None)
        return cls(prepared(model, tokenizer, max_model_len=max_model_len, images=images), **options)

    @property
    def model(self) -> Any:
        """The frozen copy. Reading from it is safe at any time but during a `push`."""
        return self.loaded.model

    @property
    def version(self) -> str:
        """The label of the weights that the next token comes from; `default` before the first push."""
        return self.engine.weight_version

    def start(self, timeout_s: float = 60.0) -> InProcessServer:
        """Start the threads; `url` is then the base URL with /v1. Raises StartError after `timeout_s`."""
        self._thread.start()
        try:
            self.url = self._listening.result(timeout_s)
        except TimeoutError:
            raise StartError(f"the server did not listen within {timeout_s:g} s", 1) from None
        return self

    def push(self, tensors: Mapping[str, torch.Tensor], version: str, timeout_s: float = 60.0) -> None:
        """Copy new weights between two steps; requests in flight are kept, and continue under them.

        Raises:
            WeightsError: names or shapes that do not match; nothing was changed.
            TimeoutError: the engine did not take them in time.
            EngineDied, EngineStopped: there is no engine to take them.
        """
        copies = match_weights(self.model, dict(tensors))
        engine = self.engine
        for command in (lambda: engine.reload(copies), lambda: engine.name_version(version)):
            command().result(timeout_s)

    def close(self) -> None:
        """Answer waiting requests with an error and end the threads. May be called twice."""
        self.engine.stop()
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10.0)

    def __enter__(self) -> InProcessServer:
        return self.start()

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        listener = bind("127.0.0.1", 0)
        try:
            runner = self._loop.run_until_complete(self.service.start(listener))
        except Exception as error:
            self._listening.set_exception(error)
            return
        self._listening.set_result(f"{url_of(listener)}/v1")
        self._loop.run_forever()
        self._loop.run_until_complete(self.service.stop(runner))
        self._loop.close()
