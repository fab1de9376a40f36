"""What the ranks of test_sharded.py run: in each world some ranks, which run one program after the other.

Torch, transformers and turnwise are imported once: all ranks are forked from a process that does nothing else. What torchrun does
for ranks is done here: their variables, and the store in which they find each other. The argument is JSON: for each world the
number of its ranks, and for each program `cluster.mesh`, its module in this folder and its own arguments.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

Programs = Sequence[Sequence[Any]]


def main() -> None:
    import transformers

    import turnwise.training.sharded.sharded_learner
    import turnwise.training.teacher  # noqa: F401

    assert transformers.AutoModelForCausalLM
    gc.collect()
    gc.freeze()
    for size, programs in json.loads(sys.argv[1]):
        if (world := os.fork()) == 0:  # a process of its own, because the store has threads
            _run_world(size, programs)
        _, status = os.waitpid(world, 0)
        if status:
            sys.exit(1)


def _run_world(size: int, programs: Programs) -> NoReturn:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    listening = socket.create_server(
        ("127.0.0.1", 0)
    )  # from now on: another program could take a port that is only free
    port = listening.getsockname()[1]
    os.environ.update(WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    ranks = {_start_rank(rank, programs) for rank in range(size)}
    store = TCPStore("127.0.0.1", port, size, True, wait_for_workers=False, master_listen_fd=listening.detach())
    failed = False
    while ranks:
        rank, status = os.wait()
        ranks.discard(rank)
        if status and not failed:
            failed = True
            for other in ranks:
                os.kill(other, signal.SIGTERM)
    del store
    os._exit(int(failed))


def _start_rank(rank: int, programs: Programs) -> int:
    if pid := os.fork():
        return pid
    status = 1
    try:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        for mesh, *words in programs:
            sys.argv, os.environ["MESH"] = words, json.dumps(mesh)
            sys.modules.pop(f"cluster.{words[0]}", None)  # it reads its arguments when it is imported
            importlib.import_module(f"cluster.{words[0]}").main()
        status = 0
    except BaseException:
        traceback.print_exc()
    # without finalizing the interpreter, as a command's rank ends: threads of gloo could abort it
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
