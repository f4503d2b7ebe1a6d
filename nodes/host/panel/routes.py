"""The panel's routes on ComfyUI's server, and who may use them.

    GET  /parallel_dit/state             everything the panel shows (state.py)
    GET  /parallel_dit/reports/{number}  one of the reports that the state lists
    GET  /parallel_dit/plan?...          what SP Config with these values would do, with a file too; nothing is started
    POST /parallel_dit/{action}          release, restart, doctor, stop_listening: no arguments; 202, or 409 in one
    POST /parallel_dit/tune?width=...    try plans of the loaded model on such work; 202, 400 for a number, or 409
    POST /parallel_dit/stop_tuning       end that; 202

A page of another site gets 403, even where its name was made to resolve to this machine.
"""

import asyncio
import ipaddress
import re
import urllib.parse
from collections.abc import Awaitable, Callable, Mapping
from functools import wraps

from aiohttp import web

from ..contract.comfyui import PromptServer, args
from ..proof.tuning import TuningRequest
from .actions import Actions, BusyError
from .report_history import HISTORY
from .state import PanelState

Handler = Callable[[web.Request], Awaitable[web.Response]]
PREFIX = "/parallel_dit"
_HOST = re.compile(r"(\[[0-9a-f.]*:[0-9a-f:.]*\]|[a-z0-9._-]+)(:[0-9]{1,5})?")
NUMBERS = ("width", "height", "frames", "text_tokens", "batch", "seconds")
ACTIONS = ("release", "restart", "doctor", "stop_listening")


def add_routes(check_plan: Callable[[Mapping[str, str]], dict]) -> None:
    """Add the routes to ComfyUI's server, and the watch that tells its tabs of changes once it runs.

    `check_plan` gives for SP Config's values, as texts, what the node would say; it runs in a thread of its own.
    """
    server = PromptServer.instance
    panel_state = PanelState()
    actions = Actions(panel_state)
    routes = server.routes

    @routes.get(f"{PREFIX}/state")
    @own_pages_only
    async def get_state(_: web.Request) -> web.Response:
        return web.json_response(panel_state.state(), headers={"Cache-Control": "no-store"})

    @routes.get(PREFIX + r"/reports/{number:\d{1,9}}")
    @own_pages_only
    async def get_report(request: web.Request) -> web.Response:
        report = HISTORY.report(int(request.match_info["number"]))
        if report is None:
            return web.json_response({"error": "this report is not kept any more; run it again"}, status=404)
        return web.json_response(report)

    @routes.get(f"{PREFIX}/plan")
    @own_pages_only
    async def get_plan(request: web.Request) -> web.Response:
        return web.json_response(await asyncio.to_thread(check_plan, dict(request.query)))  # it may read a model's file

    @routes.post(f"{PREFIX}/{{action:{'|'.join(ACTIONS)}}}")
    @own_pages_only
    async def act(request: web.Request) -> web.Response:
        try:
            actions.begin(request.match_info["action"])
        except BusyError as error:
            return web.json_response({"error": str(error)}, status=409)
        return web.json_response(panel_state.state(), status=202)

    _add_tuning(panel_state, actions)

    async def watch(app: web.Application) -> None:
        app[WATCH] = server.loop.create_task(panel_state.watch())

    server.app.on_startup.append(watch)


WATCH: web.AppKey = web.AppKey("parallel_dit_watch")


def _add_tuning(panel_state: PanelState, actions: Actions) -> None:
    routes = PromptServer.instance.routes

    @routes.post(f"{PREFIX}/tune")
    @own_pages_only
    async def tune(request: web.Request) -> web.Response:
        try:
            actions.tune(read_asked(request.query))
        except (BusyError, ValueError) as error:
            return web.json_response({"error": str(error)}, status=409 if isinstance(error, BusyError) else 400)
        return web.json_response(panel_state.state(), status=202)

    @routes.post(f"{PREFIX}/stop_tuning")
    @own_pages_only
    async def stop_tuning(_: web.Request) -> web.Response:
        panel_state.tune.stop()
        return web.json_response(panel_state.state(), status=202)


def read_asked(query: Mapping[str, str]) -> TuningRequest:
    """The work of a query; what it leaves out is as usual. Raises `ValueError` for what is no number in range."""
    found: dict[str, float] = {}
    for name in NUMBERS:
        if (text := query.get(name)) is None:
            continue
        try:
            found[name] = float(text) if name == "seconds" else int(text)
        except ValueError:
            raise ValueError(f"{name}={text!r} is no number; use a whole one") from None
    return TuningRequest(**found, guided=query.get("guided") == "true")


def own_pages_only(handler: Handler) -> Handler:
    """Refuse what a page of another site sends, whichever way ComfyUI itself is set up."""

    @wraps(handler)
    async def guarded(request: web.Request) -> web.Response:
        reason = foreign(request.headers, listens_beyond_loopback=not _loopback_only(args.listen))
        if reason:
            return web.json_response({"error": reason}, status=403)
        return await handler(request)

    return guarded


def foreign(headers: Mapping[str, str], *, listens_beyond_loopback: bool) -> str:
    """Why a request is not of a page of this server; "" when it may be.

    A name that its owner lets resolve to 127.0.0.1 makes his page look like ours; an address cannot. So a server that
    only this machine can reach is asked by an address or as localhost. Of one that others reach, too, a proxy may
    change the address (RunPod's does), and a browser's own word, which no page can write, says whose page asks.
    """
    host, origin = headers.get("Host", "").lower(), headers.get("Origin")
    site = headers.get("Sec-Fetch-Site", "").lower()
    if site == "cross-site":
        return "this request comes from a page of another site"
    vouched = listens_beyond_loopback and site == "same-origin"
    if origin is not None and not vouched and _asked_of(origin) != host:
        return (
            f"the page of {origin} is not of {host}, as where a proxy changes the address; open ComfyUI through "
            "ssh -L 8188:127.0.0.1:PORT MACHINE, or run python -m parallel_runtime doctor there"
        )
    found = _HOST.fullmatch(host)
    name = "" if found is None else found[1].strip("[]")
    if not listens_beyond_loopback and not _is_loopback(name):
        return f"{name or 'no name'} is not this machine; open ComfyUI as localhost, or start it with --listen"
    return ""


def _asked_of(origin: str) -> str | None:
    """The host, with its port, that an origin names; None for one that is none."""
    try:
        return urllib.parse.urlsplit(origin).netloc.lower()
    except ValueError:
        return None


def _loopback_only(listen: str) -> bool:
    return all(_is_loopback(address.strip()) for address in listen.split(","))


def _is_loopback(name: str) -> bool:
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
