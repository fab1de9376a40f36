"""verl's multi-turn system: `BaseInteraction`, `BaseTool`, their YAML files and its data sets, as they are (docs/verl.md).

In a recipe, `turnwise.compat.verl:Conversations` is the environment; `turnwise convert` writes such recipes of verl's own
configuration. `with verl_names():` lets code that imports from verl be loaded where there is none.
"""

from turnwise.compat.verl.base import BaseInteraction, BaseTool
from turnwise.compat.verl.conversation import Conversations
from turnwise.compat.verl.names import verl_names
from turnwise.compat.verl.reward import CustomScore, data_source_score
from turnwise.compat.verl.schemas import OpenAIFunctionToolSchema, ToolResponse

__all__ = [
    "BaseInteraction",
    "BaseTool",
    "Conversations",
    "CustomScore",
    "OpenAIFunctionToolSchema",
    "ToolResponse",
    "data_source_score",
    "verl_names",
]
