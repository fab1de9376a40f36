"""ms-swift's own client of a rollout server, from the mirror of its repository: `VLLMClient` with the code that it calls.

The sources are executed unchanged. Modules that they import and do not use here are stubs. vLLM's process group is replaced by
`StoreGroup`, which has the same interface and works without a GPU.
"""

from __future__ import annotations

import ast
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

UTILS = (
    "broadcast_tensor_for_vllm_weight_sync", "is_valid_ipv6_address", "format_host_for_url", "resolve_hostname",
    "peft_config_to_dict", "FlattenedTensorMetadata",
    "FlattenedTensorBucket", "_create_parameter_buckets",
    "replace_assistant_response_with_ids",
)  # fmt: skip
"""What is taken from swift/rlhf_trainers/utils.py: the complete file imports libraries that are not needed here."""


def mirror(name: str) -> Path:
    """The git directory of a mirrored repository, such as `modelscope+ms-swift`. Skips the test if there is none."""
    for folder in Path(__file__).resolve().parents:
        if (repo := folder / ".mirror" / name / "repo").is_dir():
            return repo
    pytest.skip(f"there is no mirror of {name}")


def show(path: str) -> str:
    """A file of ms-swift's repository."""
    command = ["git", f"--git-dir={mirror('modelscope+ms-swift')}", "show", f"HEAD:{path}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


class StoreGroup:
    """A group that broadcasts bytes through a TCPStore, in the place of `vllm.distributed.utils.StatelessProcessGroup`."""

    def __init__(self, store: Any, rank: int) -> None:
        self.store, self.rank, self.sent, self.met = store, rank, 0, 0

    @classmethod
    def create(cls, host: str, port: int, rank: int, world_size: int) -> StoreGroup:
        from torch._C._distributed_c10d import TCPStore

        wait = timedelta(seconds=20)
        return cls(TCPStore(host, port, world_size, rank == 0, timeout=wait, wait_for_workers=False), rank)

    def barrier(self) -> None:
        self.met += 1
        self.store.set(f"met/{self.met}/{self.rank}", "")
        self.store.wait([f"met/{self.met}/{rank}" for rank in range(2)])


class StoreCommunicator:
    """In the place of vLLM's `PyNcclCommunicator`."""

    def __init__(self, group: StoreGroup, device: Any) -> None:
        self.group, self.rank, self.device = group, group.rank, device

    def broadcast(self, tensor: Any, src: int, stream: Any = None) -> None:
        self.group.sent += 1
        key = f"sent/{self.group.sent}"
        if self.rank == src:
            self.group.store.set(key, pickle.dumps(tensor))
        else:
            tensor.copy_(pickle.loads(self.group.store.get(key)).reshape(tensor.shape))


class ReceivingGroup:
    """The server's side of `StoreGroup`, as `engines.vllm.trainer_group` has it on GPUs."""

    def __init__(self, host: str, port: int) -> None:
        self.communicator = StoreCommunicator(StoreGroup.create(host, port, 0, 2), "cpu")

    def receive(self, count: int, dtype: str) -> Any:
        import torch

        received = torch.empty(count, dtype=getattr(torch, dtype))
        self.communicator.broadcast(received, src=1)
        self.communicator.group.barrier()
        return received.view(torch.uint8)


@dataclass
class Swift:
    """The names of ms-swift that a trainer uses."""

    client: Any
    """The class VLLMClient."""
    protocol: Any
    """swift.infer_engine.protocol."""
    utils: Any
    """A part of swift.rlhf_trainers.utils."""
    data: Any
    """swift.rl_core.data."""


def _module(name: str, **names: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(names)
    return module


def _executed(name: str, source: str, **names: Any) -> ModuleType:
    module = sys.modules[name] = _module(name, **names)
    exec(compile(source, f"{name}.py", "exec"), vars(module))
    return module


def _remove_response(messages: list[dict[str, Any]]) -> Any:
    return messages.pop()["content"] if messages and messages[-1]["role"] == "assistant" else None


def _from_dict(kind: type, values: dict[str, Any]) -> Any:
    return kind(**values)


@contextmanager
def swift() -> Iterator[Swift]:
    """ms-swift's modules, in `sys.modules` until the block ends."""
    yes, no = (lambda: True), (lambda: False)
    utilities = {
        "remove_response": _remove_response, "synchronize": lambda: None, "is_trl_available": no, "is_vllm_available": yes,
        "is_vllm_ascend_available": no, "is_vllm_metax_available": no, "get_logger": lambda: SimpleNamespace(),
    }  # fmt: skip
    stubs = {
        "swift": _module("swift", __path__=[]),
        "swift.utils": _module("swift.utils", **utilities),
        "swift.template": _module("swift.template", Messages=list[dict[str, Any]], Tool=dict[str, Any]),
        "swift.metrics": _module("swift.metrics", Metric=object),
        "swift.rlhf_trainers": _module("swift.rlhf_trainers", __path__=[]),
        "swift.dataset.preprocessor.core": _module(
            "core", _pair_keys=["messages", "images", "videos", "audios", "tools", "objects"]
        ),
        "dacite": _module("dacite", from_dict=_from_dict),
        "vllm.distributed.device_communicators.pynccl": _module("pynccl", PyNcclCommunicator=StoreCommunicator),
        "vllm.distributed.utils": _module("utils", StatelessProcessGroup=StoreGroup),
    }
    names = (*stubs, "swift.infer_engine", "swift.infer_engine.protocol", "swift.rlhf_trainers.utils",
             "swift.rlhf_trainers.vllm_client", "swift.rl_core.data")  # fmt: skip
    before = {name: sys.modules.get(name) for name in names}
    try:
        sys.modules.update(stubs)
        sys.modules["swift.infer_engine"] = engine = _module("swift.infer_engine", __path__=[], AdapterRequest=dict)
        protocol = _executed("swift.infer_engine.protocol", show("swift/infer_engine/protocol.py"))
        vars(engine)["RequestConfig"] = protocol.RequestConfig
        utils = _executed("swift.rlhf_trainers.utils", _utils(show("swift/rlhf_trainers/utils.py")))
        client = _executed(
            "swift.rlhf_trainers.vllm_client",
            show("swift/rlhf_trainers/vllm_client.py"),
            __package__="swift.rlhf_trainers",
        )
        data = _executed("swift.rl_core.data", show("swift/rl_core/data.py"))
        yield Swift(client.VLLMClient, protocol, utils, data)
    finally:
        for name, known in before.items():
            if known is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = known


def _utils(source: str) -> str:
    """The needed definitions, with the imports that they need."""
    parts = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    texts = [ast.get_source_segment(source, parts[name]) or "" for name in UTILS]
    imports = (
        "import ipaddress, socket, torch\nfrom dataclasses import asdict\nfrom pydantic import BaseModel, field_validator\n"
        "from typing import Any, Dict, List, Optional, Tuple, Union\nis_torch_npu_available = lambda: False\n"
        "get_torch_device = lambda: None\n"
    )
    return imports + "\n\n".join(texts)
