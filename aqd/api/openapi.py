"""The contract of the HTTP API: OpenAPI 3.1, made from the endpoints' declarations.

Runs in the API's workers, once, when it is first asked for (30 ms); and as ``python -m aqd.api.openapi``, which prints
it: a copy of that is committed, so that a change of the contract is seen in review. Pure: endpoints in, a document out.

The schemas are msgspec's of the very types that check requests and make answers. What such a type cannot say (of two
fields at most one) is added here, in :data:`_BEYOND`.
"""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Any, Final

import falcon
import msgspec

from aqd import __version__, job
from aqd.api import documents, problems
from aqd.api.endpoint import PREFIX, Endpoint, Scope

_REF: Final = "#/components/schemas/{name}"
_PROBLEM: Final = {"$ref": "#/components/schemas/Problem"}

# Route modules, in the order in which a reader wants them.
_CHAPTERS: Final = {
    "submit": "Submitting",
    "jobs": "Looking at jobs",
    "changes": "Changing jobs",
    "bulk": "Changing many jobs",
    "failed": "Failed jobs",
    "queues": "Queues",
    "queue_changes": "Changing queues",
    "types": "Types",
    "nodes": "Nodes",
    "metrics": "Metrics",
    "health": "Health",
    "contract": "Contract",
}

_RULES: Final = """\
Every path also exists without the prefix `/v1`. Bodies are strict JSON in UTF-8: unknown fields and query parameters \
are refused by name, as are keys that stand twice, NaN, NUL and lone surrogates. Ids are strings, moments are RFC 3339 \
(answers in UTC), `_s` is seconds. HEAD is GET without the body; OPTIONS names the methods.

Errors are `application/problem+json` (RFC 9457). `type` is stable: switch on it, and expect new ones. `field` and \
`bound` name what was refused and the limit. 503 means that nothing was changed, unless its type is \
`urn:aqd:outcome-unknown`; it says in `Retry-After` when to come back.

Keys have scopes (`submit`, `read`, `admin`; admin includes the others) and are sent in one of the headers `x-api-key`, \
`x-admin-key` or `Authorization: Bearer`. On a service that listens on its own machine only and has no named keys, \
submitting and reading need none."""

_SECURITY: Final = {
    "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    "adminKey": {"type": "apiKey", "in": "header", "name": "x-admin-key", "description": "The older name."},
    "bearer": {"type": "http", "scheme": "bearer"},
}

# A moment that can be stored, as far as a pattern says it: RFC 3339 with zone, 1970 to 9998.
_MOMENT: Final = (
    r"^(19[7-9][0-9]|[2-8][0-9]{3}|9[0-8][0-9]{2}|99[0-8][0-9]|999[0-8])"
    r"-[0-9]{2}-[0-9]{2}[Tt][0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,9})?([Zz]|[+-][0-9]{2}:[0-9]{2})$"
)

_ONE_TIME: Final[dict[str, Any]] = {
    "not": {
        "required": ["run_at", "delay_s"],
        "properties": {"run_at": {"type": "string"}, "delay_s": {"type": "number"}},
    }
}
_ONE_SET: Final[dict[str, Any]] = {"oneOf": [{"required": [name]} for name in ("ids", "filter", "all")]}

# Something beside what Python's str.strip() takes away.
_VISIBLE: Final = r"[^\s\x1c-\x1f\x85]"

# What types cannot say: by component, merged into its schema.
_BEYOND: Final[dict[str, Mapping[str, Any]]] = {
    "JobBody": _ONE_TIME
    | {
        "examples": [
            {"type": "generate_pdf", "payload": {"invoice": 4711}},
            {
                "type": "send_mail",
                "payload": {"to": "ada@example.org"},
                "queue": "mail",
                "priority": 10,
                "delay_s": 60,
                "max_attempts": 3,
                "timeout_s": 30,
                "tags": ["tenant:7"],
                "meta": {"request": "8f3a"},
                "idempotency_key": "welcome-4711",
                "on_conflict": "return",
            },
        ],
    },
}
_BEYOND["QueueBody"] = {"minProperties": 1, "examples": [{"max_running": 10}]}
_BEYOND["DiscardBody"] = {"properties": {"reason": {"pattern": _VISIBLE}}}
_BEYOND["BulkBody"] = _ONE_SET | {"examples": [{"filter": {"type": "send_mail"}}, {"ids": ["4711", "4712"]}]}
_BEYOND["BulkDiscardBody"] = (
    _ONE_SET
    | {"properties": {"reason": {"pattern": _VISIBLE}}}
    | {"examples": [{"ids": ["4711"], "reason": "the customer has left"}]}
)
_BEYOND["UpdateBody"] = _ONE_TIME | {"minProperties": 1, "examples": [{"priority": 50}]}
_PATH_PARAMETERS: Final[Mapping[str, Any]] = {
    "id": (documents.Id, "The job's id.", "1"),
    "name": (job.Name, "The name.", "default"),
}
# A key as it is, without a comma (two headers would look like one); or in quotes (RFC 8941), where a quote or a
# backslash has a backslash before it.
_BARE: Final = r"[!#-+\--~]([ -+\--~]{0,253}[!-+\--~])?"
_ENDS, _INNER = r'([!#-\[\]-~]|\\["\\])', r'([ !#-\[\]-~]|\\["\\])'
_HeaderKey = Annotated[str, msgspec.Meta(pattern=f'^({_BARE}|"{_ENDS}({_INNER}{{0,253}}{_ENDS})?")$')]
_HEADER_TYPES: Final[Mapping[str, Any]] = {"Idempotency-Key": (_HeaderKey, "welcome-4711")}


def document(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """The whole contract."""
    schemas, components = _schemas(endpoints)
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        operation = _operation(endpoint, schemas)
        paths.setdefault(_template(endpoint.path), {})[endpoint.method.lower()] = operation
    used = {chapter(endpoint) for endpoint in endpoints}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "aqd",
            "version": __version__,
            "summary": "Submit, find, wait for, change and retry jobs.",
            "description": _RULES,
            "license": {"name": "MIT", "identifier": "MIT"},
        },
        "servers": [{"url": PREFIX}, {"url": "/", "description": "The same without the prefix."}],
        "tags": [{"name": title} for title in _CHAPTERS.values() if title in used],
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": _SECURITY},
    }


def chapter(endpoint: Endpoint) -> str:
    """Under which heading a route stands."""
    module = endpoint.run.__module__.rpartition(".")[2]
    return _CHAPTERS.get(module, module.replace("_", " ").capitalize())


def problem_table() -> str:
    """The problem types, as Markdown."""
    rows = [f"| `urn:aqd:{kind}` | {status} | {title} |" for kind, (status, title) in problems.KINDS.items()]
    return "\n".join(["| type | status | meaning |", "|---|---|---|", *rows])


# --- schemas --------------------------------------------------------------------------------------


# Where a type stands: ("answer", "get_jobs", 200), ("query", "get_jobs", "limit"), …
_Place = tuple[str, str, str | int]


def _schemas(endpoints: Iterable[Endpoint]) -> tuple[dict[_Place, Any], dict[str, Any]]:
    """Schemas by their places, and the components that they refer to."""
    types: dict[_Place, Any] = {("", "", "problem"): documents.Problem}
    for endpoint in endpoints:
        name = endpoint.name
        if endpoint.body is not None:
            types["body", name, ""] = endpoint.body
        types |= {("answer", name, at): kind for at, kind in endpoint.answers.items() if _has_schema(kind)}
        fields = msgspec.structs.fields(endpoint.params)
        types |= {("query", name, field.encode_name): field.type for field in fields}
    types |= {("path", "", name): kind for name, (kind, *_) in _PATH_PARAMETERS.items()}
    types |= {("header", "", name): kind for name, (kind, _) in _HEADER_TYPES.items()}
    found, components = msgspec.json.schema_components(list(types.values()), ref_template=_REF)
    for name, more in _BEYOND.items():
        if name in components:
            components[name] = _merged(components[name], more)
    schemas = dict(zip(types, found, strict=True))
    taken = [schema for (where, *_), schema in schemas.items() if where in ("body", "query")]
    for name in _reachable(taken, components):
        _bound_moments(components[name])
    _bound_moments(taken)
    components["Problem"]["properties"]["type"]["description"] = f"Stable. Known ones:\n\n{problem_table()}"
    tidy = {name: _tidy(components[name]) for name in sorted(components)}
    return {place: _tidy(schema) for place, schema in schemas.items()}, tidy


def _merged(schema: Any, more: Any) -> Any:
    if not isinstance(schema, dict) or not isinstance(more, Mapping):
        return more
    return schema | {key: _merged(schema.get(key), value) for key, value in more.items()}


def _reachable(
    schema: Any, components: Mapping[str, Any], seen: frozenset[str] = frozenset()
) -> frozenset[str]:
    """The components that a schema refers to, directly or not."""
    if isinstance(schema, list):
        for item in schema:
            seen = _reachable(item, components, seen)
    elif isinstance(schema, dict):
        name = str(schema.get("$ref", "")).rpartition("/")[2]
        if name and name not in seen:
            seen = _reachable(components[name], components, seen | {name})
        seen = _reachable(list(schema.values()), components, seen)
    return seen


def _bound_moments(schema: Any) -> None:
    """Moments that are taken, other than those in answers, must be ones that can be stored."""
    if isinstance(schema, dict):
        if schema.get("format") == "date-time":
            schema["pattern"] = _MOMENT
        schema = list(schema.values())
    if isinstance(schema, list):
        for item in schema:
            _bound_moments(item)


def _has_schema(kind: Any) -> bool:
    return kind is not None and kind not in (str, bytes)


def _tidy(schema: Any) -> Any:
    """Docstrings as Markdown, nothing that says nothing: "anything or null", a default of null, a type's own name."""
    if isinstance(schema, list):
        return [_tidy(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _tidy(value) for key, value in schema.items() if key != "title" or isinstance(value, dict)}
    if isinstance(found.get("description"), str):
        found["description"] = _markdown(found["description"])
    if found.get("anyOf") == [{}, {"type": "null"}]:
        del found["anyOf"]
    if "default" in found and found["default"] is None:
        del found["default"]
    if "enum" in found and all(isinstance(value, str) for value in found["enum"]):
        found["type"] = "string"
    return found


def _markdown(text: str) -> str:
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text).replace("``", "`")
    return text if "\n|" in text else re.sub(r"\s*\n(?!\n)\s*", " ", text)


def _without_null(schema: Mapping[str, Any]) -> dict[str, Any]:
    """For query strings, which leave out what is null."""
    rest: list[dict[str, Any]] = [each for each in schema.get("anyOf", ()) if each != {"type": "null"}]
    if "anyOf" not in schema or len(rest) != 1:
        return dict(schema)
    return {key: value for key, value in schema.items() if key != "anyOf"} | rest[0]


# --- operations -----------------------------------------------------------------------------------


def _template(path: str) -> str:
    """``/jobs/{id:int}`` is Falcon's own way to write ``/jobs/{id}``."""
    return re.sub(r"\{(\w+):[^}]*\}", r"{\1}", path)


def _operation(endpoint: Endpoint, schemas: Mapping[_Place, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "operationId": endpoint.name,
        "tags": [chapter(endpoint)],
        "summary": endpoint.summary,
    }
    if endpoint.description:
        found["description"] = _markdown(endpoint.description)
    if endpoint.scope is not None:
        found["x-aqd-scope"] = str(endpoint.scope)
        found["security"] = [{name: []} for name in _SECURITY]
    else:
        found["security"] = []
    if parameters := [*_path(endpoint, schemas), *_query(endpoint, schemas), *_headers(endpoint, schemas)]:
        found["parameters"] = parameters
    if endpoint.body is not None:
        content = {falcon.MEDIA_JSON: {"schema": schemas["body", endpoint.name, ""]}}
        found["requestBody"] = {"required": True, "content": content}
    found["responses"] = _responses(endpoint, schemas)
    return found


def _path(endpoint: Endpoint, schemas: Mapping[_Place, Any]) -> Iterable[dict[str, Any]]:
    for name in re.findall(r"\{(\w+)", endpoint.path):
        _, description, example = _PATH_PARAMETERS.get(name, (None, "", None))
        schema = dict(schemas.get(("path", "", name), {"type": "string"}))
        schema.pop("description", None)
        found = {"name": name, "in": "path", "required": True, "schema": schema}
        if description:
            found |= {"description": description, "example": example}
        yield found


def _query(endpoint: Endpoint, schemas: Mapping[_Place, Any]) -> Iterable[dict[str, Any]]:
    for field in msgspec.structs.fields(endpoint.params):
        schema = _without_null(schemas["query", endpoint.name, field.encode_name])
        found: dict[str, Any] = {"name": field.encode_name, "in": "query"}
        if description := schema.pop("description", ""):
            found["description"] = description
        if field.required:
            found["required"] = True
        elif isinstance(field.default, str | int | float):
            schema["default"] = msgspec.to_builtins(field.default)
        if schema.get("type") == "array":
            found |= {"style": "form", "explode": False}
        yield found | {"schema": schema}


def _headers(endpoint: Endpoint, schemas: Mapping[_Place, Any]) -> Iterable[dict[str, Any]]:
    for name, description in endpoint.headers.items():
        _, example = _HEADER_TYPES.get(name, (None, None))
        schema = schemas.get(("header", "", name), {"type": "string"})
        found = {"name": name, "in": "header", "description": description, "schema": schema}
        yield found | ({"example": example} if example is not None else {})


def _responses(endpoint: Endpoint, schemas: Mapping[_Place, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for status, kind in sorted(endpoint.answers.items()):
        answer: dict[str, Any] = {"description": _reason(status)}
        if kind is not None:
            schema = schemas.get(("answer", endpoint.name, status), {"type": "string"})
            answer["content"] = {endpoint.media.partition(";")[0]: {"schema": schema}}
        if status in (201, 202) and "id" in getattr(kind, "__struct_fields__", ()):
            answer["headers"] = {"Location": _header("The job's path.", "uri-reference")}
        found[str(status)] = answer
    for status in sorted(statuses(endpoint) - set(endpoint.answers)):
        answer = {"description": _reason(status), "content": {problems.MEDIA_TYPE: {"schema": _PROBLEM}}}
        if status == 401:
            answer["headers"] = {"WWW-Authenticate": _header("How to send a key.")}
        if status == 503 or (status == 409 and endpoint.scope is Scope.SUBMIT):  # key-in-progress
            seconds = {
                "description": "Seconds until it is worth trying again.",
                "schema": {"type": "integer"},
            }
            answer["headers"] = {"Retry-After": seconds}
        found[str(status)] = answer
    return found


def statuses(endpoint: Endpoint) -> set[int]:
    """The errors that a route may give, beside those of requests that are no proper HTTP."""
    found = {400, *endpoint.problems}
    if endpoint.scope is not None:
        found |= {401, 403, 503}
    if endpoint.body is not None:
        found |= {413, 415}
    if endpoint.params.__struct_fields__:
        found |= {414}
    return found


def _reason(status: int) -> str:
    return HTTPStatus(status).phrase


def _header(description: str, format: str | None = None) -> dict[str, Any]:
    return {"description": description, "schema": {"type": "string"} | ({"format": format} if format else {})}


def text(endpoints: Sequence[Endpoint]) -> bytes:
    """The contract as JSON for people and for ``git diff``: one member a line."""
    return msgspec.json.format(msgspec.json.encode(document(endpoints)), indent=1) + b"\n"


def main() -> None:
    """Print the contract of this version."""
    from aqd.api.routes import ENDPOINTS

    sys.stdout.buffer.write(text(ENDPOINTS))


if __name__ == "__main__":
    main()
