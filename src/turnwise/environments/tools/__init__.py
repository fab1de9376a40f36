"""Tools: functions and classes that the model can call, and the environment that runs the calls.

`Tools` is the environment, `Tool` one function, `Toolbox` a class whose methods are tools, `ToolResponse` a result with images,
`Truncation` the rule that shortens long results.
"""

from turnwise.environments.tools.result import ToolResponse, Truncation
from turnwise.environments.tools.tool import Tool, Toolbox, requires
from turnwise.environments.tools.toolbox import Tools

__all__ = ["Tool", "ToolResponse", "Toolbox", "Tools", "Truncation", "requires"]
