"""Reinforcement learning of language models over multi-turn conversations.

`import turnwise` gives everything that an environment, a tool or a reward function needs, and the functions of
`turnwise.api` (docs/python.md)::

    import turnwise

    result = turnwise.train(model="demo/model", rows=rows, environment=environment, train={"steps": 5})

A name is imported when it is used for the first time. Therefore `import turnwise` loads no other module, and the names of
environments and tools load neither torch nor transformers.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turnwise import record
    from turnwise.api import (
        Callback,
        EvaluationRun,
        Options,
        Recipe,
        RunResult,
        Step,
        StopTraining,
        evaluate,
        rollout,
        sft,
        train,
    )
    from turnwise.environments.environment import Environment, SingleTurn, current_episode, environment, user_message
    from turnwise.environments.tools.toolbox import Tool, Toolbox, ToolResponse, Tools
    from turnwise.environments.users import ScriptedUser, checked_answer
    from turnwise.types import (
        Completion,
        Edit,
        Group,
        Message,
        Opening,
        Reply,
        Request,
        Resume,
        Row,
        Sampling,
        SamplingChange,
        Segment,
        Stop,
        ToolCall,
        ToolOutcome,
        Trajectory,
        Turn,
    )
    from turnwise.user_code.algorithms import needs
    from turnwise.version import __version__

__all__ = [
    "Callback",
    "Completion",
    "Edit",
    "Environment",
    "EvaluationRun",
    "Group",
    "Message",
    "Opening",
    "Options",
    "Recipe",
    "Reply",
    "Request",
    "Resume",
    "Row",
    "RunResult",
    "Sampling",
    "SamplingChange",
    "ScriptedUser",
    "Segment",
    "SingleTurn",
    "Step",
    "Stop",
    "StopTraining",
    "Tool",
    "ToolCall",
    "ToolOutcome",
    "ToolResponse",
    "Toolbox",
    "Tools",
    "Trajectory",
    "Turn",
    "__version__",
    "checked_answer",
    "current_episode",
    "environment",
    "evaluate",
    "needs",
    "record",
    "rollout",
    "sft",
    "train",
    "user_message",
]

_MODULES = {
    "turnwise.api": ["Callback", "EvaluationRun", "Options", "Recipe", "RunResult", "Step", "StopTraining", "evaluate"],
    "turnwise.environments.environment": [
        "Environment",
        "SingleTurn",
        "current_episode",
        "environment",
        "user_message",
    ],
    "turnwise.environments.tools.toolbox": ["Tool", "ToolResponse", "Toolbox", "Tools"],
    "turnwise.environments.users": ["ScriptedUser", "checked_answer"],
    "turnwise.user_code.algorithms": ["needs"],
    "turnwise.version": ["__version__"],
}
"""Where names are defined. All other names are in `turnwise.types`."""


class _Function:
    """A function of `turnwise.api` as an attribute of this package.

    `turnwise.train`, `turnwise.sft` and `turnwise.rollout` are also the names of submodules. Python sets the attribute when a
    submodule is imported; without this descriptor, the submodule would then hide the function. The function has the names of the
    submodule as attributes, for `import turnwise.rollout.rollout as loop`, which reads `turnwise.rollout` first.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, package: ModuleType | None, owner: type[ModuleType]) -> Any:
        function = getattr(importlib.import_module("turnwise.api"), self.name)
        if (module := sys.modules.get(f"{__name__}.{self.name}")) is not None:
            vars(function).update({name: value for name, value in vars(module).items() if not name.startswith("__")})
        return function

    def __set__(self, package: ModuleType, value: Any) -> None:
        """The submodule was imported. It is in `sys.modules`, where import statements look for it."""


class _Package(ModuleType):
    """The type of this package."""

    rollout = _Function("rollout")
    sft = _Function("sft")
    train = _Function("train")


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name == "record":
        return importlib.import_module("turnwise.record")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = next((module for module, names in _MODULES.items() if name in names), "turnwise.types")
    value = globals()[name] = getattr(importlib.import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
