"""The console's HTTP: the page's files, the stream of events, lookups, and what pages may do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.console.access import SECURITY_HEADERS, Access
from deploy.console.actions import Actions
from deploy.console.events import NOTE, WARN
from deploy.console.history import RANGES, Subject
from deploy.console.live import LiveMesh, Page, as_server_sent
from deploy.console.reader import FOUND_MAX, MeshReader
from deploy.console.view import sequence_view
from deploy.local.control import ask_to_kill, killable_executors
from deploy.operate.texts import id_text
from shared.contract.errors import Code, MeshError, RequestError, UnavailableError
from shared.contract.ids import UINT64_DIGITS, SequenceId, correlation_id_from, correlation_id_of, model_of, sequence_id
from shared.process import logs
from shared.process.lifecycle import Stop
from shared.store.connections.redis_py import LOST_OR_REFUSED

STATIC = Path(__file__).parent / "static"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
STATUS = {Code.FORBIDDEN: 403, Code.NOT_FOUND: 404, Code.UNAVAILABLE: 503}
UNREAD_S = 20.0
"""How long a browser may leave a message of the stream unread."""
LOOKUPS_WAITING_MAX = 32
LOOKUP_PAUSE_S = 0.2
"""Between two lookups of all pages together."""
QUERY_MAX = 512
"""Characters of a parameter."""


class Lookups:
    """Lookups of all pages, one at a time and with a pause: a reading of many records costs Redis time."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._waiting = 0

    async def carry_out(self, reads: Callable[[], Awaitable[Any]]) -> Any:
        """What the lookup reads. Raises UnavailableError if too many wait, or Redis is lost or refuses it."""
        if self._waiting >= LOOKUPS_WAITING_MAX:
            raise UnavailableError("too many searches at once: try again in a moment")
        self._waiting += 1
        try:
            async with self._turn:
                found = await reads()
                await asyncio.sleep(LOOKUP_PAUSE_S)
                return found
        except LOST_OR_REFUSED as failure:
            raise UnavailableError(f"Redis cannot be read: {failure}") from failure
        finally:
            self._waiting -= 1


@dataclass(frozen=True, slots=True)
class ConsoleRoutes:
    """The handlers. control: socket of the launcher; None: nothing can be killed here; stop: ends the streams"""

    access: Access
    live: LiveMesh
    reader: MeshReader
    lookups: Lookups
    actions: Actions
    control: Path | None
    stop: Stop

    async def session(self, request: Request) -> Response:
        """GET /api/session: whether the token that came with it is the right one."""
        signed_in = self.access.is_signed_in(request.headers)
        return answered({"signed_in": signed_in, "must_sign_in": not self.access.is_loopback})

    async def search(self, request: Request) -> Response:
        """GET /api/sequences: with `id`, the sequences of that id; with `model`, open ones, whose id has a `prefix`."""
        self.access.check_reader(request.headers)
        id_, model = parameter(request, "id"), parameter(request, "model")
        if id_:
            found, are_all = await self.lookups.carry_out(lambda: self.reader.called(id_)), True
        else:
            prefix = parameter(request, "prefix")
            found, are_all = await self.lookups.carry_out(lambda: self.reader.some(model, prefix))
        shown = [sequence_view(one, None) for one in found]
        return answered({"sequences": shown, "are_all": are_all, "most": FOUND_MAX})

    async def model(self, request: Request) -> Response:
        """GET /api/models/{name}: a model's configuration, as Triton writes it."""
        self.access.check_reader(request.headers)
        name: str = request.path_params["name"]
        record = await self.lookups.carry_out(lambda: self.reader.model(name))
        if record is None:
            raise RequestError(f"no model '{name}' in this mesh", Code.NOT_FOUND)
        return answered({"name": name, "versions": record.versions, "config": msgspec.json.decode(record.config_json)})

    async def kill(self, request: Request) -> Response:
        """POST /api/executors/{name}/kill: has the launcher kill an executor, as a crash would."""
        self.access.check_actor(request.headers)
        name: str = request.path_params["name"]
        if self.control is None:
            raise RequestError(
                "this console can kill nothing: only the one that `seqmesh up` starts can, in its own mesh",
                Code.FORBIDDEN,
            )
        if name not in await killable_executors(self.control):
            raise RequestError(f"there is no executor '{name}' of this console's `seqmesh up`", Code.NOT_FOUND)
        await ask_to_kill(self.control, name)
        self.live.tell(WARN, f"{name} was killed by SIGKILL from the console")
        return answered({"killed": name})

    async def act_on_sequence(self, request: Request) -> Response:
        """POST /api/sequences/{action}: `end`, `pause` (with `seconds`), `resume` or `move` (with `leaving`, and with
        `to` unless any other executor will do), of the sequence that the query names.
        """
        self.access.check_actor(request.headers)
        action, sequence = request.path_params["action"], watched_by(request)
        if sequence is None:
            raise RequestError("'model' and 'id' name the sequence")
        match action:
            case "end":
                said = await self.actions.end(sequence)
            case "pause":
                said = await self.actions.pause(sequence, whole_number(request, "seconds"))
            case "resume":
                said = await self.actions.resume(sequence)
            case "move":
                said = await self.actions.move(sequence, parameter(request, "to"), parameter(request, "leaving"))
            case _:
                raise RequestError("a sequence can be told to: end, pause, resume, move", Code.NOT_FOUND)
        return self._acted(action, f"Sequence {id_text(correlation_id_of(sequence))} of {model_of(sequence)}", said)

    async def act_on_executor(self, request: Request) -> Response:
        """POST /api/executors/{name}/{action}: `drain`, or `undrain`. name: of the executor, or its id"""
        self.access.check_actor(request.headers)
        name, action = request.path_params["name"], request.path_params["action"]
        match action:
            case "drain":
                said = await self.actions.drain(name)
            case "undrain":
                said = await self.actions.serve_again(name)
            case _:
                raise RequestError("an executor can be told to: drain, undrain", Code.NOT_FOUND)
        return self._acted(action, name, said)

    def _acted(self, action: str, about: str, said: str) -> Response:
        """The answer to an action. All pages hear of it."""
        logs.info("acted from a page", action=action, about=about, outcome=said)
        self.live.tell(NOTE, f"{about}: {said} (told from the console)")
        return answered({"said": said})

    async def health(self, request: Request) -> Response:
        """GET /api/health: 200 while this process serves."""
        return answered({"pages": self.live.pages})

    async def stream(self, request: Request) -> ASGIApp:
        """GET /api/live: the stream of events, until the browser goes, leaves it unread, or the console stops."""
        self.access.check_reader(request.headers)
        watches, charts = watched_by(request), charted_by(request)

        # No response of Starlette's: those have no bound on a browser that does not read.
        async def streamed(_: Scope, receive: Receive, send: Send) -> None:
            with self.live.opened(watches, charts) as page:
                headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                ends = [until_gone(receive), self._tell(page, send), self.stop.wait()]
                tasks = [asyncio.ensure_future(each) for each in ends]
                try:
                    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)

        return streamed

    async def _tell(self, page: Page, send: Send) -> None:
        """Sends what comes; ends when the browser does not read it, or the connection is lost."""
        while True:
            body = as_server_sent(await page.take())
            async with asyncio.timeout(UNREAD_S):
                await send({"type": "http.response.body", "body": body, "more_body": True})


def watched_by(request: Request) -> SequenceId | None:
    """The sequence that a page looks at: `model`, `id`, `version`, and `type=string` for a text of digits."""
    model, id_ = parameter(request, "model"), parameter(request, "id")
    if not model or not id_:
        return None
    string = parameter(request, "type") == "string"
    return sequence_id(model, parameter(request, "version"), correlation_id_from(id_, string=string))


def whole_number(request: Request, name: str) -> int:
    """A parameter that is a number. Raises RequestError."""
    text = parameter(request, name)
    if not (text.isascii() and text.isdecimal() and len(text) < UINT64_DIGITS):
        raise RequestError(f"'{name}' is a whole number")
    return int(text)


def charted_by(request: Request) -> tuple[Subject, str] | None:
    """What the charts of a page are of: `range`, and `chart` and `chart_version` for one model. Raises RequestError."""
    range_ = parameter(request, "range")
    if not range_:
        return None
    if range_ not in RANGES:
        raise RequestError(f"'range' is one of: {', '.join(RANGES)}")
    return Subject(parameter(request, "chart"), parameter(request, "chart_version")), range_


def parameter(request: Request, name: str) -> str:
    """A parameter of the query; "" if it is not there. Raises RequestError for one that is too long."""
    text = request.query_params.get(name, "")
    if len(text) > QUERY_MAX:
        raise RequestError(f"'{name}' has more than {QUERY_MAX} characters")
    return text


async def until_gone(receive: Receive) -> None:
    """Returns when the browser has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


def answered(value: Any, status: int = 200) -> Response:
    """An answer in JSON, which no cache may keep: it is of this moment."""
    return Response(msgspec.json.encode(value), status, {"cache-control": "no-store"}, media_type="application/json")


async def refused(_: Request, error: Exception) -> Response:
    """The answer to a request that cannot be carried out."""
    assert isinstance(error, MeshError)
    return answered({"error": error.message}, STATUS.get(error.code, 400))


class Guarded:
    """Around the application: refuses foreign pages, and adds the security headers to every answer."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *SECURITY_HEADERS]
            await send(message)

        refusal = self._access.origins.refusal(scope)
        app = answered({"error": refusal}, STATUS[Code.FORBIDDEN]) if refusal else self._app
        await app(scope, receive, with_headers)


def build_app(routes: ConsoleRoutes, files: Mapping[str, bytes]) -> ASGIApp:
    """The application. files: of the page, by their paths"""

    def file(path: str) -> Callable[[Request], Awaitable[Response]]:
        # Their names hold a hash of their content, but that of the page itself.
        kept = "no-cache" if path.endswith(".html") else "public, max-age=31536000, immutable"

        async def sent(_: Request) -> Response:
            return Response(files[path], headers={"cache-control": kept}, media_type=TYPES[Path(path).suffix])

        return sent

    app = Starlette(
        routes=[
            Route("/", file("index.html")),
            *(Route(f"/{path}", file(path)) for path in files),
            Route("/api/health", routes.health),
            Route("/api/session", routes.session),
            Route("/api/live", routes.stream),
            Route("/api/sequences", routes.search),
            Route("/api/models/{name}", routes.model),
            Route("/api/sequences/{action}", routes.act_on_sequence, methods=["POST"]),
            Route("/api/executors/{name}/kill", routes.kill, methods=["POST"]),
            Route("/api/executors/{name}/{action}", routes.act_on_executor, methods=["POST"]),
        ],
        exception_handlers={MeshError: refused},
    )
    return Guarded(app, routes.access)


def page_files() -> dict[str, bytes]:
    """The page as it was built: path -> content."""
    return {
        path.relative_to(STATIC).as_posix(): path.read_bytes()
        for path in sorted(STATIC.rglob("*"))
        if path.suffix in TYPES
    }
