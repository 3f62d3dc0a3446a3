"""A real MLflow server on loopback, and proxies in front of it that misbehave on request."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

START_S = 300.0
SLOW_S = 3.0
HOP_HEADERS = {"connection", "transfer-encoding", "keep-alive", "content-length"}


def free_port() -> int:
    """A port of loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class MlflowServer:
    """`mlflow server` over a SQLite file; ends with the with block."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self._log = (folder / "server.log").open("wb")
        self._process = subprocess.Popen(
            [
                sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--workers", "1",
                "--port", str(self.port), "--backend-store-uri", f"sqlite:///{folder}/mlflow.db",
                "--default-artifact-root", str(folder / "artifacts"),
            ],
            stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, cwd=folder,
            start_new_session=True, env={**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"},
        )  # fmt: skip

    def wait(self) -> None:
        """Until it answers; RuntimeError where it does not."""
        deadline = time.monotonic() + START_S
        while True:
            try:
                with socket.create_connection(("127.0.0.1", self.port), 1):
                    return
            except OSError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise RuntimeError(f"mlflow server: see {self._log.name}") from None
                time.sleep(0.2)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, 9)  # its own session: the server and its workers
            self._process.wait()
        self._log.close()


class Proxy:
    """Passes requests on to a server. `mode`: ok, down, slow or error; may change any time."""

    def __init__(self, upstream_port: int) -> None:
        self.mode = "ok"
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.0"
            upstream: ClassVar[int] = upstream_port

            def handle_one(self) -> None:
                mode = proxy.mode
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length) if length else None
                if mode == "down":  # as a server that dies between accept and answer
                    self.close_connection = True
                    return
                if mode == "slow":
                    time.sleep(SLOW_S)
                if mode == "error":
                    self.send_error(500)
                    return
                self._pass_on(body)

            def _pass_on(self, body: bytes | None) -> None:
                link = http.client.HTTPConnection("127.0.0.1", self.upstream, timeout=60)
                kept = {k: v for k, v in self.headers.items() if k.lower() not in HOP_HEADERS}
                kept["Host"] = f"127.0.0.1:{self.upstream}"
                try:
                    link.request(self.command, self.path, body, kept)
                    answer = link.getresponse()
                    data = answer.read()
                except OSError:
                    self.send_error(502)
                    return
                finally:
                    link.close()
                self.send_response(answer.status)
                for key, value in answer.getheaders():
                    if key.lower() not in HOP_HEADERS:
                        self.send_header(key, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_one

            def log_message(self, format: str, *args: object) -> None:
                """Keep quiet."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                """A client that gave up is no news."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self.uri = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
