"""Runs programs written by a model in isolation, on this machine or on a server.

`Sandbox`, `PythonSession` and `code_interpreter` run Python in a jail on this machine (Linux, bubblewrap). `SandboxFusion` sends
programs to a SandboxFusion server.
"""

from turnwise.environments.sandbox.fusion import SandboxFusion
from turnwise.environments.sandbox.process import Bounds, Ran, SandboxError
from turnwise.environments.sandbox.python import PythonSession, Sandbox, code_interpreter

__all__ = ["Bounds", "PythonSession", "Ran", "Sandbox", "SandboxError", "SandboxFusion", "code_interpreter"]
