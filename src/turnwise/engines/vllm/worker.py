"""Code that runs inside vLLM's worker processes: receives weights from files. Started with `--worker-extension-cls`.

It is imported in vLLM's environment, where only the source of turnwise is on the path: no module of turnwise that needs other
packages may be imported here. Errors are returned as data, because an exception in a worker can end the server.
"""

from __future__ import annotations

import time
import zlib
from pathlib import Path
from typing import Any

__all__ = ["WeightReceiver"]


class WeightReceiver:
    """Methods that vLLM adds to its worker class, for calls by `/collective_rpc`.

    One trainer at a time, the owner, may change the weights. Its claim ends with `turnwise_release`, or `lease` seconds after
    its last call.
    """

    turnwise_owner: str | None = None
    turnwise_claimed_until: float = 0.0
    turnwise_good: str | None = None
    """The file with the weights that the model has; None: those of the model directory."""
    turnwise_names: dict[str, list[int]] | None = None
    """Names and shapes of the weights of the last successful update."""

    def turnwise_claim(self, owner: str, lease: float) -> dict[str, Any]:
        """Become or stay the owner."""
        now = time.monotonic()
        if self.turnwise_owner not in (None, owner) and now < self.turnwise_claimed_until:
            seconds = self.turnwise_claimed_until - now
            return {
                "error": f"another trainer ({self.turnwise_owner}) owns this server. Two trainers would overwrite each other's "
                f"weights: use another server, stop the other trainer, or wait {seconds:.0f} s if it has died"
            }
        self.turnwise_owner, self.turnwise_claimed_until = owner, now + lease
        return {}

    def turnwise_release(self, owner: str) -> dict[str, Any]:
        """End the claim of this owner."""
        if self.turnwise_owner == owner:
            self.turnwise_owner = None
        return {}

    def turnwise_load(self, owner: str, lease: float, path: str, checksum: str) -> dict[str, Any]:
        """Replace the model's weights by those of a safetensors file.

        Returns `error` if that failed; the model then has its previous weights, or `broken` is true as well.
        """
        refused = self.turnwise_claim(owner, lease)
        if refused:
            return refused
        started = time.monotonic()
        try:
            tensors = _read(path, checksum)
            self._turnwise_compare(tensors)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        try:
            self._turnwise_replace(tensors)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            try:
                good = self.turnwise_good
                self._turnwise_replace(None if good is None else _read(good, None))
            except Exception as second:
                return {"error": f"{message}; the previous weights could not be restored: {second}", "broken": True}
            return {"error": message}
        self.turnwise_good = path
        self.turnwise_names = {name: list(tensor.shape) for name, tensor in tensors.items()}
        return {"checksum": checksum, "seconds": time.monotonic() - started}

    def _turnwise_compare(self, tensors: dict[str, Any]) -> None:
        """Raise ValueError unless all weights of the model are there, with finite values."""
        known = self.turnwise_names
        if known is None:
            known = _names_in(self.model_runner.vllm_config.model_config.model)  # type: ignore[attr-defined]
        if known:
            _compare_names(known, {name: list(tensor.shape) for name, tensor in tensors.items()})
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise ValueError(f"the weight {name} has values that are not finite")

    def _turnwise_replace(self, tensors: dict[str, Any] | None) -> None:
        """Load weights into the model; None: those of the model directory."""
        import torch

        runner = self.model_runner  # type: ignore[attr-defined]
        with torch.no_grad():
            runner.reload_weights(weights_iterator=None if tensors is None else iter(tensors.items()))
            _pack_tied_output_layers(runner.get_model())


def _read(path: str, checksum: str | None) -> dict[str, Any]:
    """The tensors of a file. Raises ValueError if its contents are not those of the checksum."""
    from safetensors.torch import load

    content = Path(path).read_bytes()
    found = f"{zlib.crc32(content):08x}"
    if checksum is not None and found != checksum:
        raise ValueError(f"the checksum of {path} is {found} here, and {checksum} where it was written")
    return load(content)


def _names_in(model: str) -> dict[str, list[int]]:
    """Names and shapes of the weights in a model directory; empty if it has no safetensors files."""
    from safetensors import safe_open

    names: dict[str, list[int]] = {}
    for file in sorted(Path(model).glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            names.update({name: list(opened.get_slice(name).get_shape()) for name in opened.keys()})  # noqa: SIM118
    return names


def _compare_names(known: dict[str, list[int]], given: dict[str, list[int]]) -> None:
    missing = sorted(known.keys() - given.keys() - {"lm_head.weight"})
    unknown = sorted(given.keys() - known.keys() - {"lm_head.weight"})
    shapes = sorted(name for name in known.keys() & given.keys() if known[name] != given[name])
    for names, problem in ((missing, "are missing"), (unknown, "are not the model's"), (shapes, "have another shape")):
        if names:
            raise ValueError(
                f"{len(names)} weights {problem}, such as {names[0]}: the server must serve the model of model.path"
            )


def _pack_tied_output_layers(model: Any) -> None:
    """Renew what the CPU backend derives from an output layer that is tied to the embedding.

    With tie_word_embeddings, the checkpoint has no tensor of the output layer, so vLLM does not process the layer again, and
    its packed copy of the old weights would stay in use.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead  # type: ignore[import-not-found]
    from vllm.platforms import current_platform  # type: ignore[import-not-found]

    if not current_platform.is_cpu():
        return
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
