"""The folder of the tests is importable, so that they can share what they build."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol
from hypothesis import HealthCheck, settings

# tiny models gain nothing from a second thread, and lose much to a busy neighbour
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as the command line does

# a shell starts what runs in the background with Ctrl-C ignored, and nohup ignores the end of the terminal; children inherit
# that, and the tests of signals need them
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# until the tests begin, all new objects stay
gc.disable()

sys.path.insert(0, str(Path(__file__).parent))

# a busy machine is no reason to fail
settings.register_profile("turnwise", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("turnwise")


def pytest_collection_finish() -> None:
    """Libraries and tests are a million objects: each run of a test that collects garbage at its start would visit them.

    pytest adds its handlers six times in each test to each logger that does not pass messages on, which torch has 51 of.
    """
    gc.collect()
    gc.freeze()
    # Python's own threshold of 700 new objects takes a twentieth of the time of the tests
    gc.set_threshold(50_000, *gc.get_threshold()[1:])
    gc.enable()
    for name, logger in logging.root.manager.loggerDict.items():
        if name.split(".")[0] == "torch" and isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """A process of pytest-xdist reports each test once: that its set-up and its teardown passed, too, takes a fifth of the
    time of a test that does nothing, and there are 11,000 tests. Those that fail, are skipped or take long are reported."""
    if not hasattr(item.config, "workerinput"):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in runtestprotocol(item, log=False, nextitem=nextitem):
        if report.when == "call" or not report.passed or report.duration > 0.05:
            item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Computations that found another number of torch threads restore that one. With two threads in each of two processes, the
    tests after them have taken ten times as long: threads wait for each other busily."""
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "set_num_threads"):
        threads = int(os.environ["OMP_NUM_THREADS"])
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def agents_server_ends() -> Iterator[None]:
    """A process has one server of agents: a test that leaves its own open makes tests of other files fail, which ask for another
    address."""
    yield
    module = sys.modules.get("turnwise.environments.agents.proxy")
    assert module is None or not module.ProxyLease._shares, (
        "the test left a server of agents open: close its environment"
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights. Modules that need another one have a fixture of the same name."""
    from support.tiny import save_model  # torch

    return save_model(tmp_path_factory.mktemp("model"))
