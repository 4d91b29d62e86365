"""`deft serve`: the policy of a run as a server for robots, over WebSocket and HTTP.

    GET  /schema   what observations and actions are (`deft.deployment.description`)
    WS   /act      one message per step, one answer each; `?mode=` as `--mode`
    POST /chunk    the chunk of one observation, without memory of earlier ones
    GET  /metrics  latencies
    GET  /health   whether the server runs

The policy runs in one thread, for one message at a time: `deft.load_policy` acts, on batches of one, so that an answer
is bit for bit the action of `LoadedPolicy`. Messages of several clients wait for each other in order of arrival.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import importlib.util
import ipaddress
import logging
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import spaces

from deft.config.deployment_settings import ServeConfig
from deft.deployment.description import describe
from deft.deployment.latency import Latencies
from deft.deployment.messages import decode, encode, error_answer
from deft.deployment.sessions import ActionSession, make_session
from deft.errors import DeftError, InputError, RunError, one_line
from deft.evaluation.loaded_policy import LoadedPolicy, load_policy

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.websockets import WebSocket

log = logging.getLogger(__name__)
LOCAL = ("127.0.0.1", "localhost", "::1")
TRY_AGAIN_LATER, POLICY_VIOLATION = 1013, 1008  # codes that close a WebSocket
STOPPING = (signal.SIGINT, signal.SIGTERM)


def serve(config: ServeConfig) -> Mapping[str, Any]:
    """Serve a policy until SIGINT or SIGTERM, and return the latencies."""
    check_installed()
    listener = listen(config.host, config.port)
    try:
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        policy = load_policy(
            config.path, deterministic=config.deterministic, device=config.device, target_return=config.target_return
        )
        server = PolicyServer(policy, config)
        server.warm_up()
        host, port = listener.getsockname()[:2]
        if not is_local(config.host):
            log.warning(
                "host %s: every machine that can reach this port can use the policy; the server has no password and "
                "no encryption: prefer 127.0.0.1 with `ssh -L`",
                config.host,
            )
        with _stop_signals(server.stop):
            print(
                f"serving {config.path} at ws://{_url_host(host)}:{port}/act (mode {config.mode}); "
                f"http://{_url_host(host)}:{port}/schema describes the messages. Ctrl-C ends it.",
                flush=True,
            )
            server.run(listener)
        print(f"served {server.latencies.line()}", flush=True)
        return {"port": port, **server.latencies.summary()}
    finally:
        listener.close()


def check_installed() -> None:
    """Raise an error if a package of the extra `serve` is missing."""
    for name in ("starlette", "uvicorn", "websockets"):
        if importlib.util.find_spec(name) is None:
            raise InputError(
                f'deft serve needs {name}, which is not installed: in Deft\'s folder run `pip install -e ".[serve]"`'
            )


def is_local(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; an error if the address or the port cannot be used."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(64)
        except OSError:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:
        reason = error.strerror or error if isinstance(error, OSError) else error
        raise InputError(
            f"host {host}, port {port}: cannot be used ({reason}); give another --port (0: any free one) or --host"
        ) from None
    return listener


def _url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class PolicyServer:
    """A policy with its clients and latencies; `app` is the application (ASGI)."""

    def __init__(self, policy: LoadedPolicy, config: ServeConfig) -> None:
        self.policy, self.config = policy, config
        self.latencies = Latencies()
        self.num_clients = 0
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="policy")
        self.schema = describe(policy) | {
            "mode": config.mode,
            "execution_horizon": config.execution_horizon,
            "max_message_bytes": self.max_bytes,
        }
        self._session(config.mode)  # an error for settings that do not fit the policy
        self.app = self._make_app()
        self._server = self._make_server()

    @property
    def max_bytes(self) -> int:
        """The largest message."""
        return int(self.config.max_message_mib * 2**20)

    def warm_up(self) -> None:
        """Act once, since the first call of a network is slow, and seed the random numbers of the rest."""
        space = self.policy.observation_space
        blank: Any = _blank(space)
        if isinstance(space, spaces.Dict):
            blank = {name: _blank(space[name]) for name in self.policy.streams}
        self._thread.submit(self._session(self.config.mode).warm_up, blank).result()
        torch.manual_seed(self.config.seed)

    def run(self, listener: socket.socket) -> None:
        """Answer messages until SIGINT, SIGTERM or `stop`; an action that is being computed is finished."""
        try:
            self._server.run(sockets=[listener])
        finally:
            self._thread.shutdown(wait=True, cancel_futures=True)
        if not self._server.started:
            raise RunError("deft serve: the server did not start")

    @property
    def is_running(self) -> bool:
        """Whether the server has started."""
        started: bool = self._server.started
        return started

    def stop(self) -> None:
        """End `run`, from another thread or a signal handler."""
        self._server.should_exit = True

    # -- acting --------------------------------------------------------------------------------------------------------

    def _session(self, mode: str) -> ActionSession:
        return make_session(mode, self.policy.copy(), self._infer, self.config, self.latencies.stalled)

    async def _infer(self, method: Callable[..., np.ndarray], *arguments: Any) -> np.ndarray:
        """Call a method of a policy in the thread of the policy."""

        def timed() -> np.ndarray:
            started = self.latencies.clock()
            result = method(*arguments)
            self.latencies.inferred(self.latencies.clock() - started)
            return result

        return await asyncio.get_running_loop().run_in_executor(self._thread, timed)

    async def _answer(self, text: str | bytes | None, session: ActionSession, key: str) -> tuple[str, bool]:
        """Return the answer to a message, an action or one error, and whether it is an error; raise no exception."""
        started = self.latencies.clock()
        answer: dict[str, Any] = {}
        try:
            if not isinstance(text, str | bytes):
                raise InputError("the message is binary; send JSON as text")
            message = decode(text)
            if message.id is not None:
                answer["id"] = message.id
            if message.reset:
                session.reset()
                answer["reset"] = True
            if message.observation is not None:
                answer[key] = await session.act(message.observation, message.reward)
            elif not message.reset:
                raise InputError("the observation is null")
            content = encode(answer)
        except DeftError as error:
            content = encode(_named(answer) | error_answer(error))
        except Exception as error:
            log.exception("a message could not be answered")
            content = encode(_named(answer) | error_answer(RunError(f"the server failed: {one_line(error)}")))
        else:
            self.latencies.answered(started)
            return content, False
        self.latencies.rejected()
        return content, True

    # -- HTTP and WebSocket --------------------------------------------------------------------------------------------

    def _make_server(self) -> Any:
        import uvicorn

        return uvicorn.Server(
            uvicorn.Config(
                self.app,
                log_config=None,
                log_level="critical",
                access_log=False,
                server_header=False,
                lifespan="on",
                ws="websockets-sansio",
                ws_max_size=self.max_bytes,
                ws_per_message_deflate=False,
                proxy_headers=False,
                timeout_graceful_shutdown=5,
            )
        )

    def _make_app(self) -> Any:
        from starlette.applications import Starlette
        from starlette.middleware import Middleware
        from starlette.middleware.trustedhost import TrustedHostMiddleware
        from starlette.responses import JSONResponse
        from starlette.routing import Route, WebSocketRoute

        def schema(request: Request) -> JSONResponse:
            return JSONResponse(self.schema)

        def metrics(request: Request) -> JSONResponse:
            return JSONResponse({"clients": self.num_clients, **self.latencies.summary()})

        def health(request: Request) -> JSONResponse:
            return JSONResponse({"status": "ok"})

        routes = [
            Route("/schema", schema),
            Route("/metrics", metrics),
            Route("/health", health),
            Route("/chunk", self._chunk, methods=["POST"]),
            WebSocketRoute("/act", self._act),
        ]
        # A website that resolves its name to 127.0.0.1 (DNS rebinding) sends its own name as the host.
        hosts = ["127.0.0.1", "localhost", "[::1]", "::1"] if is_local(self.config.host) else ["*"]
        middleware = [
            Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False),
            Middleware(RejectWebsites),
        ]
        return Starlette(routes=routes, middleware=middleware, lifespan=self._lifespan)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Any) -> AsyncIterator[None]:
        task = asyncio.create_task(self._log_latencies())
        try:
            yield
        finally:
            task.cancel()

    async def _log_latencies(self) -> None:
        logged = 0
        while self.config.log_interval > 0:
            await asyncio.sleep(self.config.log_interval)
            if self.latencies.messages > logged:
                logged = self.latencies.messages
                print(f"served {self.latencies.line()}; {self.num_clients} clients", flush=True)

    async def _act(self, websocket: WebSocket) -> None:
        """Serve one client over a WebSocket."""
        from starlette.websockets import WebSocketDisconnect

        await websocket.accept()
        try:
            if self.num_clients >= self.config.max_clients:
                full = f"the server has {self.num_clients} clients, as many as --max-clients allows; try again later"
                await _reject(websocket, full, TRY_AGAIN_LATER)
                return
            self.num_clients += 1
            try:
                await self._serve_client(websocket)
            finally:
                self.num_clients -= 1
        except WebSocketDisconnect:
            pass

    async def _serve_client(self, websocket: WebSocket) -> None:
        mode = websocket.query_params.get("mode", self.config.mode)
        try:
            session = self._session(mode)
        except DeftError as error:
            await _reject(websocket, error_answer(error)["error"], POLICY_VIOLATION)
            return
        key = "actions" if mode == "chunk" else "action"
        await websocket.send_text(encode({"schema": self.schema | {"mode": mode}}))
        try:
            while True:
                message = await websocket.receive()
                if message["type"] == "websocket.disconnect":
                    return
                await websocket.send_text((await self._answer(message.get("text"), session, key))[0])
        finally:
            session.reset()

    async def _chunk(self, request: Request) -> Any:
        """Answer one HTTP request with the chunk of its observation."""
        from starlette.responses import Response

        def respond(status: int, error: str) -> Response:
            return Response(encode({"error": error}), status, media_type="application/json")

        if request.headers.get("content-type", "").split(";")[0].strip() != "application/json":
            return respond(415, "send JSON, with the header content-type: application/json")
        if self.policy.policy.recurrent:
            return respond(409, "this policy has a memory of earlier steps; use the WebSocket /act")
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self.max_bytes:
                return respond(413, f"the message is larger than {self.max_bytes:,} bytes")
        content, is_error = await self._answer(bytes(body), self._session("chunk"), "actions")
        return Response(content, 400 if is_error else 200, media_type="application/json")


class RejectWebsites:
    """Middleware that rejects what has an `Origin`, which only browsers send: a website that the user visits."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer with status 403, for every address and before a WebSocket is open."""
        from starlette.responses import JSONResponse
        from starlette.websockets import WebSocketClose

        answer = self.app
        if any(name == b"origin" for name, _ in scope.get("headers", ())):
            error = JSONResponse({"error": "requests of websites are rejected"}, 403)
            answer = error if scope["type"] == "http" else WebSocketClose(POLICY_VIOLATION)
        await answer(scope, receive, send)


def _named(answer: Mapping[str, Any]) -> dict[str, Any]:
    """The part of an answer by which a client recognises the message that was rejected."""
    return {"id": answer["id"]} if "id" in answer else {}


async def _reject(websocket: WebSocket, error: str, code: int) -> None:
    await websocket.send_text(encode({"error": error}))
    await websocket.close(code)


def _blank(space: spaces.Space) -> np.ndarray:
    return np.zeros(space.shape or (), space.dtype)


@contextlib.contextmanager
def _stop_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` at a stop signal. A running uvicorn handles the signals itself, and sends them again at its end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, lambda *_: stop()) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
