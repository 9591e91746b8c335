"""Optuna's dashboard on this machine's own address: nobody else can reach it."""

from __future__ import annotations

import importlib
import socket
import threading

from rootfree_lab.config_reading import ConfigError
from rootfree_lab.search.storage import open_storage

HOST = "127.0.0.1"


def serve(where: str, port: int) -> str:
    """Serve a storage from a thread that ends with the process; returns the address."""
    with socket.socket() as probe:
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise ConfigError(f"--dashboard: port {port} of {HOST} is taken: {error}") from error
    run = importlib.import_module("optuna_dashboard").run_server
    arguments = {"storage": open_storage(where), "host": HOST, "port": port}
    threading.Thread(target=run, kwargs=arguments, daemon=True).start()
    return f"http://{HOST}:{port}"
