"""Which GPUs of this machine each started server uses. Knows numbers of devices; does not know engines."""

from __future__ import annotations

import os
from collections.abc import Sequence

from turnwise.errors import ConfigError

__all__ = ["devices_of_servers", "visible", "visible_devices"]

_VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible_devices() -> list[str]:
    """The names of the GPUs that this process may use, as `CUDA_VISIBLE_DEVICES` has them; empty if there is none."""
    given = os.environ.get(_VARIABLE)
    if given is not None:
        return [name.strip() for name in given.split(",") if name.strip()]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


def visible(devices: Sequence[str], server: int) -> dict[str, str]:
    """The environment variable that shows a server its own GPUs; `devices` are those of `devices_of_servers`."""
    return {_VARIABLE: devices[server]} if devices else {}


def devices_of_servers(
    wanted: Sequence[int] | None, *, servers: int, per_server: int, trainer: int, visible: Sequence[str]
) -> list[str]:
    """The value of `CUDA_VISIBLE_DEVICES` for each server; empty if it is that of this process.

    `wanted` are the numbers of the GPUs in `visible`, `per_server` for each server in turn. None: the GPUs behind the first
    `trainer` ones, on which the model is trained, if there are enough of them; else from the first GPU on.

    Example: `devices_of_servers(None, servers=2, per_server=2, trainer=1, visible=["0", "1", "2", "3", "4"])` gives
    `["1,2", "3,4"]`.

    Raises ConfigError if the number of GPUs does not fit.
    """
    needed = servers * per_server
    if wanted is None:
        if not visible:
            return []
        if needed > len(visible):
            raise ConfigError(
                f"engine.replicas={servers} servers with {per_server} GPUs each need {needed} GPUs, and {len(visible)} are "
                f"visible: lower engine.replicas or engine.tensor_parallel, or name the GPUs in engine.devices (a GPU may be "
                f"named for several servers)"
            )
        first = trainer if trainer + needed <= len(visible) else 0
        wanted = range(first, first + needed)
    if len(wanted) != needed:
        raise ConfigError(
            f"engine.devices={list(wanted)} names {len(wanted)} GPUs, and engine.replicas={servers} servers with {per_server} "
            f"GPUs each (tensor_parallel * data_parallel) need {needed}: name one GPU for each"
        )
    if visible and max(wanted) >= len(visible):
        raise ConfigError(
            f"engine.devices={list(wanted)}: this machine has {len(visible)} visible GPUs, with the numbers 0 to "
            f"{len(visible) - 1}"
        )
    names = [visible[number] if visible else str(number) for number in wanted]
    return [",".join(names[start : start + per_server]) for start in range(0, needed, per_server)]
