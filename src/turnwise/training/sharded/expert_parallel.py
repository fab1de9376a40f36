"""Expert parallelism: the experts of each layer, divided among ranks that compute different tokens.

Each rank of a group has some of the experts, complete. A token goes to the ranks of its experts and back, by all-to-all (as in
GShard, arXiv 2006.16668), which is the style `ep_dispatch_experts` of transformers' plans (`base_model_ep_plan`). The gradient of
an expert is that of the tokens of all ranks of its group. Ranks with the same experts divide them further, as all other weights.

Knows modules and one dimension of a mesh. Does not know FSDP, batches or losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from turnwise.models.cpu import without_fast_layers
from turnwise.models.model_config import DISPATCH_STYLE, planned_styles, refuse_undivided_experts

_DIVIDED = "grouped_gemm"
"""The style of the parameters of these experts."""


class ExpertParallel:
    """Divides the experts of `model` among the ranks of `mesh`, which has one dimension. Raises ConfigError if it cannot."""

    def __init__(self, model: Any, mesh: DeviceMesh) -> None:
        refuse_undivided_experts(model.config, mesh.size())
        self._mesh = mesh
        styles = planned_styles(model, model.ep_plan)
        self._experts = {module for module, style in styles.items() if style == DISPATCH_STYLE}

    def divide(self, layer: torch.nn.Module) -> Sequence[torch.nn.Module]:
        """Divide the experts of a layer, whose parameters may be on the meta device. Returns their modules."""
        from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

        found = [module for module in layer.modules() if module in self._experts]
        if found:
            without_fast_layers(layer)  # they compute with complete weights
        divided: Any = ALL_PARALLEL_STYLES[_DIVIDED]
        dispatch: Any = ALL_PARALLEL_STYLES[DISPATCH_STYLE]
        for module in found:
            for name in list(module._parameters):
                divided.shard_param(module, name, self._mesh)
            dispatch.install_forward(module, self._mesh)
        return found
