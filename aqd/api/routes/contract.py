"""The contract: ``GET /openapi.json`` for programs, ``GET /docs`` for people. Open to everybody on purpose: it is the
same for every installation of this version, and tells nothing about this one."""

from functools import cache
from typing import Any

from aqd.api import docs, openapi
from aqd.api.endpoint import Answer, Call, Endpoint

HTML = "text/html; charset=utf-8"


@cache
def contract() -> dict[str, Any]:
    """The OpenAPI document."""
    from aqd.api.routes import ENDPOINTS  # of which this module is a part

    return openapi.document(ENDPOINTS)


@cache
def page() -> bytes:
    """The same as a page."""
    return docs.page(contract())


def get_contract(_: Call) -> Answer:
    return Answer(contract())


def get_docs(_: Call) -> Answer:
    return Answer(
        page(), 200, {"Content-Security-Policy": docs.POLICY, "Referrer-Policy": "no-referrer"}, HTML
    )


ENDPOINTS = [
    Endpoint(
        "GET",
        "/openapi.json",
        get_contract,
        None,
        "This contract, as OpenAPI 3.1",
        {200: dict[str, Any]},
    ),
    Endpoint(
        "GET",
        "/docs",
        get_docs,
        None,
        "This contract, as a page to read",
        {200: str},
        media=HTML,
    ),
]
