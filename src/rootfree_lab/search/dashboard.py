"""Optuna's dashboard on this machine's own address: nobody else can reach it."""

from __future__ import annotations

import importlib
import threading
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from rootfree_lab.config.reading import ConfigError
from rootfree_lab.search.storage import open_storage

HOST = "127.0.0.1"


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing: the terminal is the search's."""


def serve(where: str, port: int) -> str:
    """Serve a storage from a thread that ends with the process; returns the address."""
    app = importlib.import_module("optuna_dashboard").wsgi(open_storage(where))
    try:
        server = make_server(HOST, port, app, handler_class=_Quiet)
    except OSError as error:
        raise ConfigError(f"--dashboard: port {port} of {HOST} cannot be had: {error}") from error
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://{HOST}:{server.server_port}/dashboard"
