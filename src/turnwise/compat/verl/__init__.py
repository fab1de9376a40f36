"""verl's multi-turn system: `BaseInteraction`, `BaseTool`, their YAML files and its data sets, unchanged (docs/verl.md).

In a recipe, `turnwise.compat.verl:Conversations` is the environment; `turnwise convert` writes such recipes from
verl's configuration. Within `with verl_names():`, code that imports from verl can be loaded without verl.
"""

from turnwise.compat.verl.base import BaseInteraction, BaseTool, OpenAIFunctionToolSchema, ToolResponse
from turnwise.compat.verl.conversation import Conversations
from turnwise.compat.verl.names import verl_names
from turnwise.compat.verl.reward import CustomBatchScore, CustomScore, data_source_score

__all__ = [
    "BaseInteraction",
    "BaseTool",
    "Conversations",
    "CustomBatchScore",
    "CustomScore",
    "OpenAIFunctionToolSchema",
    "ToolResponse",
    "data_source_score",
    "verl_names",
]
