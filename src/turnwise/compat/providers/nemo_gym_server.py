"""A resources server of NeMo Gym, without NeMo Gym's own start program: run by the Python of another environment.

    python -P nemo_gym_server.py NAME PORT_FD PARENT_FD [CONFIG]

NeMo Gym starts a head server, a Ray cluster and an environment of each server first; this program makes the server's application
from its class and its configuration, and serves it on a free port of 127.0.0.1, which it writes to the file descriptor PORT_FD.
CONFIG is JSON with further options of the server's configuration. It ends when PARENT_FD is closed. Imports nothing of turnwise.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import pathlib
import socket
import sys
import threading
from typing import Any


def settings_of(folder: pathlib.Path, name: str) -> dict[str, Any]:
    """What the server's configuration files say of it."""
    omegaconf = importlib.import_module("omegaconf").OmegaConf
    files = sorted((folder / "configs").glob("*.yaml"), key=lambda file: (file.stem != name, file.name))
    for file in files:
        for part in omegaconf.to_container(omegaconf.load(file), resolve=False).values():
            servers = part.get("resources_servers") if isinstance(part, dict) else None
            if servers and name in servers:
                return dict(servers[name])
    return {}


def server_class(module: Any) -> Any:
    """The server that a module defines: of several, the one that derives from the others."""
    base = importlib.import_module("nemo_gym.base_resources_server").SimpleResourcesServer
    found = [
        one
        for _, one in inspect.getmembers(module, inspect.isclass)
        if issubclass(one, base) and one.__module__ == module.__name__ and not inspect.isabstract(one)
    ]
    if not found:
        sys.exit(f"{module.__name__} has no resources server")
    return max(found, key=lambda one: len(one.__mro__))


def main() -> None:
    """Serve until the parent ends."""
    name, port_fd, parent_fd = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    more = json.loads(sys.argv[4]) if len(sys.argv) > 4 else {}
    threading.Thread(target=lambda: (os.read(parent_fd, 1), os._exit(0)), daemon=True).start()
    module = importlib.import_module(f"resources_servers.{name}.app")
    made = server_class(module)
    listening = socket.create_server(("127.0.0.1", 0))
    place = {"host": "127.0.0.1", "port": listening.getsockname()[1], "name": name, "entrypoint": "app.py"}
    settings = {**settings_of(pathlib.Path(str(module.__file__)).parent, name), **more, **place}
    config = made.model_fields["config"].annotation.model_validate(settings)
    utils, types = importlib.import_module("nemo_gym.server_utils"), importlib.import_module("nemo_gym.config_types")
    client = utils.ServerClient(
        head_server_config=types.BaseServerConfig(host="127.0.0.1", port=place["port"]),
        global_config_dict=importlib.import_module("omegaconf").OmegaConf.create({}),
    )
    server = made(config=config, server_client=client)
    app = server.setup_webserver()
    server.setup_exception_middleware(app)
    os.write(port_fd, f"{place['port']}\n".encode())
    os.close(port_fd)
    uvicorn = importlib.import_module("uvicorn")
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listening])


if __name__ == "__main__":
    main()
