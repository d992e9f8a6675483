"""The dashboard's files on the admin listener. They hold no data, so they need no key.

A strict content security policy goes with each: scripts and styles of this origin alone.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from importlib.resources import files
from pathlib import Path

from aiohttp import web

from engine.frontend.errors import RequestError

_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
_FILES = frozenset(
    {
        "index.html",
        "app.js",
        "charts.js",
        "decisions.js",
        "dom.js",
        "dry_run.js",
        "fleet.js",
        "views.js",
        "style.css",
    }
)
_CHARTS = "plotly.min.js"


async def page(request: web.Request) -> web.StreamResponse:
    """Answer GET /ui."""
    return _file("index.html")


async def asset(request: web.Request) -> web.StreamResponse:
    """Answer GET /ui/{name}."""
    name = request.match_info["name"]
    if name == _CHARTS:
        return _charts()
    if name not in _FILES:
        raise RequestError("not_found", f"there is no /ui/{name} here")
    return _file(name)


def _file(name: str) -> web.Response:
    body = files("router.ui").joinpath(name).read_bytes()
    kind = _TYPES[Path(name).suffix]
    return web.Response(body=body, content_type=kind, charset="utf-8", headers=_HEADERS)


def _charts() -> web.StreamResponse:
    path = _charts_path()
    if path is None:
        raise RequestError("not_found", "charts need plotly: pip install 'prefixfleet[ui]'")
    headers = {**_HEADERS, "cache-control": "max-age=86400", "content-type": "text/javascript"}
    return web.FileResponse(path, headers=headers)


@cache
def _charts_path() -> Path | None:
    """Return plotly's script as its wheel brings it, without importing the package."""
    spec = importlib.util.find_spec("plotly")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "package_data" / _CHARTS
    return path if path.is_file() else None
