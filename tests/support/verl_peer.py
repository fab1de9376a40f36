"""A pytest plugin that runs verl's own tests on our classes: verl's names are ours, and async tests need no further plugin."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest

from turnwise.compat.verl import verl_names

_names = verl_names()


def pytest_configure() -> None:
    _names.__enter__()


def pytest_unconfigure() -> None:
    _names.__exit__(None, None, None)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: Any) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in arguments}))
    return True
