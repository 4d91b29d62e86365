"""The server of the live view: one page, on this machine only. `deft view RUN` and `deft train --view` start it.

It listens on 127.0.0.1, answers only requests for that host (a page of another site could otherwise reach it by DNS
rebinding), and only below a secret path, which other users of the machine do not know. It serves the files of the page,
and of a run: its metrics, the end of its log, tiles, samples and videos. One request changes something: `operate`
writes what a person does who takes over an environment, in runs that offer it.
"""

from __future__ import annotations

import contextlib
import getpass
import importlib.util
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from deft.config.command_settings import ViewConfig
from deft.errors import InputError
from deft.ownership import record
from deft.runs import live
from deft.runs.operator import parse_command, write_command
from deft.view.reading import RunReader, find_runs, is_run

HOST = "127.0.0.1"
PAGE = Path(__file__).with_name("page")
PALETTE = Path(__file__).parents[1] / "evaluation" / "palette.css"
TOKEN = "token"
POLL = 2.0  # seconds between two requests of a page; view.js has the same
MOST_BYTES = 4096  # of a command
LAST_LOOK = 1.5 * POLL  # seconds that the server of a run waits at its end, so that open pages show it
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "media-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
SHORT_OF = (
    'the live view needs {name}, which is not installed: in Deft\'s folder run `pip install -e ".[view]"`{advice}'
)


def view(config: ViewConfig) -> Mapping[str, Any]:
    """Serve the page of a run, or of the runs in a folder, until Ctrl-C."""
    folder = Path(config.run)
    if not folder.exists():
        raise InputError(f"{folder}: no such directory; give a run directory, or a folder with runs")
    if not find_runs(folder):
        deeper = [path.parent for path in folder.glob("*/*/run.json")]
        advice = (
            f"there is one deeper: deft view {deeper[0].parent}"
            if deeper
            else "give a run directory, or a folder with runs"
        )
        raise InputError(f"{folder}: no run to view; {advice}")
    check_installed("")
    listener = listen(config.view_port)
    token = token_of(folder)
    print(address_lines(folder, listener, token, "Ctrl-C ends the view, not the training."), flush=True)
    server = _server(folder, token)
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listener])
    return {}


def check_installed(advice: str) -> None:
    """Raise an error if a package of the extra `view` is missing."""
    for name in ("starlette", "uvicorn"):
        if importlib.util.find_spec(name) is None:
            raise InputError(SHORT_OF.format(name=name, advice=advice))


def listen(port: int) -> socket.socket:
    """Return a socket that listens on this machine; an error if the port is in use. Port 0: any free one."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, port))
        listener.listen(64)
    except OSError as error:
        listener.close()
        reason = error.strerror or error
        raise InputError(
            f"view_port: port {port} of this machine cannot be used ({reason}); give another --view-port, or 0 for any "
            "free one"
        ) from None
    return listener


def token_of(folder: Path) -> str:
    """Return the secret part of the address: that of the run, so that its address stays the same, or a new one."""
    path = folder / live.FOLDER / TOKEN
    try:
        found = path.read_text(encoding="utf-8").strip()
        if len(found) >= 16 and found.isalnum():
            return found
    except (OSError, UnicodeDecodeError):
        pass
    token = secrets.token_hex(12)
    if is_run(folder):
        with contextlib.suppress(OSError):  # a run of someone else: a new address every time
            path.parent.mkdir(exist_ok=True)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
                file.write(token + "\n")
            record(path)
    return token


def address_lines(folder: Path, listener: socket.socket, token: str, end: str) -> str:
    """Return where the page is, for a person to read."""
    port = listener.getsockname()[1]
    return (
        f"live view of {folder}: http://{HOST}:{port}/{token}/\n"
        f"from another machine: ssh -L {port}:{HOST}:{port} {getpass.getuser()}@{socket.gethostname()}, then open the "
        f"same address there. {end}"
    )


def serve_beside_training(folder: str, listener: int) -> None:
    """Serve the page of a run from a process that its training started, until the training ends.

    The standard input is a pipe from the training: a line with the token, and its end is the end of the training.
    """
    os.nice(10)
    token = sys.stdin.readline().strip()
    server = _server(Path(folder), token)

    def wait() -> None:
        sys.stdin.read()
        if server.config.app.state.last_request > time.monotonic() - 2 * POLL:
            time.sleep(LAST_LOOK)
        server.should_exit = True

    threading.Thread(target=wait, daemon=True).start()
    server.run(sockets=[socket.socket(fileno=listener)])


def _server(folder: Path, token: str) -> Any:
    import uvicorn

    app = make_app(folder, token)
    quiet: dict[str, Any] = {"lifespan": "off", "log_level": "warning", "access_log": False, "server_header": False}
    # A page asks every two seconds, on a busy machine later: its connection stays open for longer than that.
    return uvicorn.Server(uvicorn.Config(app, timeout_keep_alive=60, timeout_graceful_shutdown=1, **quiet))


def make_app(folder: Path, token: str) -> Any:
    """Return the application (ASGI) that serves the page of a folder below the path `/TOKEN/`."""
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.middleware.gzip import GZipMiddleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import Request
    from starlette.responses import FileResponse, JSONResponse, Response
    from starlette.routing import Mount, Route
    from starlette.staticfiles import StaticFiles

    folder = folder.resolve()
    readers: dict[str, RunReader] = {}

    def reader_of(request: Request) -> RunReader:
        """Return the reader of the run that is asked for, which must be one of those in the folder."""
        name = request.query_params.get("run", ".")
        if name not in readers:
            if name not in find_runs(folder):
                raise HTTPException(404)
            readers[name] = RunReader(folder / name if name != "." else folder)
        return readers[name]

    def data(request: Request) -> Response:
        app.state.last_request = time.monotonic()
        runs = find_runs(folder)
        if "run" not in request.query_params:
            return JSONResponse({"runs": runs, "folder": folder.name})
        reader = reader_of(request)
        reader.mark_viewed()
        return JSONResponse(reader.snapshot(request.query_params.get("seen", "")) | {"runs": runs})

    def tiles(request: Request) -> Response:
        path = reader_of(request).folder / live.FOLDER / live.TILES
        try:
            return Response(path.read_bytes(), media_type="image/jpeg")
        except OSError:
            raise HTTPException(404) from None

    def media(request: Request) -> Response:
        path = reader_of(request).media_file(request.path_params["folder"], request.path_params["name"])
        if path is None:
            raise HTTPException(404)
        return FileResponse(path)

    async def operate(request: Request) -> Response:
        """Take a person's command, and answer with the latest frame of the environment."""
        origin = request.headers.get("origin")
        if origin is not None and urlsplit(origin).hostname not in (HOST, "localhost"):
            raise HTTPException(403)
        if request.headers.get("content-type", "").partition(";")[0] != "application/json":
            raise HTTPException(415)
        app.state.last_request = time.monotonic()
        reader, body = reader_of(request), b""
        async for part in request.stream():
            body += part
            if len(body) > MOST_BYTES:
                raise HTTPException(413)
        controls = reader.controls()
        if controls is None:
            return JSONResponse({"error": "nobody can take over in this run: it has ended, or has no --takeover"}, 409)
        try:
            command = parse_command(json.loads(body), controls)
        except (ValueError, RecursionError) as error:
            return JSONResponse({"error": str(error)}, 400)
        write_command(reader.folder, command)
        return JSONResponse(reader.frame())

    below = [
        Route("/", lambda request: FileResponse(PAGE / "index.html")),
        Route("/palette.css", lambda request: FileResponse(PALETTE)),
        Route("/data", data, middleware=[Middleware(GZipMiddleware)]),
        Route("/tiles.jpg", tiles),
        Route("/media/{folder}/{name}", media),
        Route("/operate", operate, methods=["POST"]),
        Mount("/page", StaticFiles(directory=PAGE)),
    ]
    middleware = [
        Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"], www_redirect=False),
        Middleware(_AddHeaders),
    ]
    app = Starlette(routes=[Mount(f"/{token}", routes=below)], middleware=middleware)
    app.state.last_request = -2 * POLL
    return app


class _AddHeaders:
    """Adds `HEADERS` to every answer."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                kept = [pair for pair in message["headers"] if pair[0].decode().lower() not in HEADERS]
                message = {**message, "headers": kept + added}
            await send(message)

        await self.app(scope, receive, send_with_headers)
