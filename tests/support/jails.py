"""Whether the sandbox can be used on this machine. Tests that need it are skipped where it cannot."""

from __future__ import annotations

import pytest

from turnwise.environments.sandbox.jail import find_jail
from turnwise.errors import ConfigError

__all__ = ["missing_jail", "needs_jail"]


def missing_jail() -> str:
    """Why there is no jail on this machine; empty if there is one."""
    try:
        find_jail()
    except ConfigError as error:
        return str(error)
    return ""


needs_jail = pytest.mark.skipif(bool(missing_jail()), reason=missing_jail() or "there is a jail")
