"""``/docs``: the contract as one page of HTML for people.

Pure: the OpenAPI document in, bytes out. Promises: everything is in the page, nothing is fetched from anywhere, there is
no script; the policy sent with it (:data:`POLICY`) lets the browser hold us to that. All text is escaped here.
"""

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

STYLE: Final = """\
:root{color-scheme:light dark;--line:#8884;--soft:#8882;--link:light-dark(#0b57a4,#8ab8f0)}
*{box-sizing:border-box}
body{font:16px/1.5 system-ui,sans-serif;margin:0 auto;max-width:72rem;padding:0 1rem 4rem}
a{color:var(--link);text-decoration:none}a:hover{text-decoration:underline}
code,pre{font:0.875em/1.45 ui-monospace,monospace}code{overflow-wrap:anywhere}
pre{background:var(--soft);padding:.75rem;overflow-x:auto;border-radius:.4rem}
table{border-collapse:collapse;width:100%;margin:.5rem 0;display:block;overflow-x:auto}
th,td{border-top:1px solid var(--line);padding:.3rem .8rem .3rem 0;text-align:left;vertical-align:top}
th{font-weight:600;border-top:0}
nav ul{columns:20rem;list-style:none;padding:0}nav li{break-inside:avoid}
section{border-top:1px solid var(--line);margin-top:1.5rem}
h3{margin-bottom:.2rem}h4{margin:.8rem 0 .2rem}
.method{display:inline-block;min-width:4.2rem;font:600 .8em ui-monospace,monospace}
.scope{float:right;font-size:.85em;border:1px solid var(--line);border-radius:1rem;padding:0 .6rem}
.soft{opacity:.75}summary{cursor:pointer}
"""

_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
POLICY: Final = f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_METHODS: Final = ("get", "post", "put", "patch", "delete")


def page(document: Mapping[str, Any]) -> bytes:
    """The whole page, in UTF-8."""
    info, prefix = document["info"], document["servers"][0]["url"]
    chapters = _chapters(document)
    body = [
        f"<h1>{_text(info['title'])} {_text(info['version'])}</h1><p>{_text(info['summary'])} "
        '<a href="openapi.json">The same as OpenAPI 3.1.</a></p>',
        _markdown(info["description"]),
        f"<nav>{''.join(_index(title, operations) for title, operations in chapters)}</nav>",
    ]
    for title, operations in chapters:
        body.append(f"<section><h2>{_text(title)}</h2>")
        body += [_operation(*each, prefix, document) for each in operations]
        body.append("</section>")
    body.append('<section><h2 id="types">Types</h2>')
    body += [_component(name, schema) for name, schema in document["components"]["schemas"].items()]
    body.append("</section>")
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{_text(info['title'])}: API</title><style>{STYLE}</style></head>"
    )
    return f"{head}<body>{''.join(body)}</body></html>\n".encode()


_Operation = tuple[str, str, Mapping[str, Any]]  # method, path, the operation


def _chapters(document: Mapping[str, Any]) -> list[tuple[str, list[_Operation]]]:
    found: dict[str, list[_Operation]] = {tag["name"]: [] for tag in document["tags"]}
    for path, item in document["paths"].items():
        for method in _METHODS:
            if method in item:
                found.setdefault(item[method]["tags"][0], []).append((method.upper(), path, item[method]))
    return list(found.items())


def _index(title: str, operations: Iterable[_Operation]) -> str:
    lines = [
        f'<li><a href="#{_text(operation["operationId"])}"><span class="method">{method}</span>'
        f"<code>{_text(path)}</code></a></li>"
        for method, path, operation in operations
    ]
    return f"<b>{_text(title)}</b><ul>{''.join(lines)}</ul>"


def _operation(
    method: str, path: str, operation: Mapping[str, Any], prefix: str, document: Mapping[str, Any]
) -> str:
    scope = operation.get("x-aqd-scope")
    found = [
        f'<h3 id="{_text(operation["operationId"])}">'
        f'<span class="scope">{_text(f"scope {scope}" if scope else "open to everybody")}</span>'
        f'<span class="method">{method}</span> <code>{_text(prefix + path)}</code></h3>'
        f"<p>{_inline(operation['summary'])}.</p>",
        _markdown(operation.get("description", "")),
    ]
    if parameters := operation.get("parameters"):
        rows = [
            (
                f"<code>{_text(each['name'])}</code> <span class=soft>{_text(each['in'])}</span>",
                _type(each["schema"]),
                _inline(each.get("description", "")),
            )
            for each in parameters
        ]
        found.append(_table(("parameter", "type", ""), rows))
    if body := operation.get("requestBody"):
        schema = next(iter(body["content"].values()))["schema"]
        found.append(f"<h4>Body</h4><p>{_type(schema)}</p>")
    found.append(_answers(operation["responses"]))
    found.append(f"<pre>{_text(_curl(method, prefix + path, operation, document))}</pre>")
    return "".join(found)


def _answers(responses: Mapping[str, Any]) -> str:
    rows, errors = [], []
    for status, response in responses.items():
        for media, content in response.get("content", {"": {}}).items():
            if media == "application/problem+json":
                errors.append(f"{status} {_text(response['description'])}")
            else:
                kind = _type(content["schema"]) if content else "no body"
                rows.append(
                    (f"{status} {_text(response['description'])}", kind, f"<code>{_text(media)}</code>")
                )
    problem = f"<p>Problems: {', '.join(errors)}.</p>" if errors else ""
    return "<h4>Answers</h4>" + _table(("", "", ""), rows, head_shown=False) + problem


def _curl(method: str, path: str, operation: Mapping[str, Any], document: Mapping[str, Any]) -> str:
    for each in operation.get("parameters", ()):
        if each["in"] == "path":
            path = path.replace("{" + each["name"] + "}", str(each.get("example", each["name"])))
    words = ["curl" if method == "GET" else f"curl -X {method}"]
    if operation.get("x-aqd-scope"):
        words.append("-H 'x-api-key: KEY'")
    if body := operation.get("requestBody"):
        words.append("-H 'content-type: application/json'")
        schema = next(iter(body["content"].values()))["schema"]
        words.append(f"-d '{json.dumps(_example(schema, document))}'")
    return " ".join([*words, f"http://127.0.0.1:4000{path}"])


def _example(schema: Mapping[str, Any], document: Mapping[str, Any]) -> Any:
    """A small value of the type: its own example, else what must be there."""
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    if "examples" in schema:
        return schema["examples"][0]
    if "enum" in schema:
        return schema["enum"][0]
    if "anyOf" in schema:
        return _example(schema["anyOf"][0], document)
    properties = schema.get("properties", {})
    match schema.get("type"):
        case "object":
            wanted = schema.get("required") or list(properties)[:1]
            return {name: _example(properties[name], document) for name in wanted if name in properties}
        case "array":
            return [_example(schema.get("items", {}), document)]
        case "integer" | "number":
            return schema.get("default", max(schema.get("minimum", 1), 1))
        case "boolean":
            return schema.get("default", True)
        case "string":
            return "1" if schema.get("pattern", "").startswith("^[1-9]") else "text"
    return {}


def _component(name: str, schema: Mapping[str, Any]) -> str:
    head = f'<h3 id="type-{_text(name)}">{_text(name)}</h3>{_markdown(schema.get("description", ""))}'
    if "properties" not in schema:
        return f"{head}<p>{_type(schema)}</p>"
    required = schema.get("required", ())
    rows = [
        (
            f"<code>{_text(field)}</code>"
            + ("" if field in required else " <span class=soft>optional</span>"),
            _type(each),
            _markdown(each.get("description", "")),
        )
        for field, each in schema["properties"].items()
    ]
    examples = "".join(
        f"<pre>{_text(json.dumps(each, indent=2))}</pre>" for each in schema.get("examples", ())
    )
    return f"<details open><summary>{head}</summary>{_table(('field', 'type', ''), rows)}{examples}</details>"


def _type(schema: Mapping[str, Any]) -> str:
    """The type in words, with its bounds."""
    if "$ref" in schema:
        name = _text(schema["$ref"].rpartition("/")[2])
        return f'<a href="#type-{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(_type(each) for each in schema["anyOf"]) + _bounds(schema)
    if "enum" in schema:
        return " ".join(f"<code>{_text(value)}</code>" for value in schema["enum"])
    kind = schema.get("type")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}" + _bounds(schema)
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_type(schema['additionalProperties'])}"
    return _text(schema.get("format") or kind or "any JSON") + _bounds(schema)


def _bounds(schema: Mapping[str, Any]) -> str:
    words = []
    for low, high, unit in (
        ("minimum", "maximum", ""),
        ("minLength", "maxLength", " characters"),
        ("minItems", "maxItems", " items"),
    ):
        if low in schema and high in schema:
            words.append(f"{schema[low]} to {schema[high]}{unit}")
        elif high in schema:
            words.append(f"at most {schema[high]}{unit}")
        elif low in schema:
            words.append(f"at least {schema[low]}{unit}")
    if "pattern" in schema:
        words.append(f"<code>{_text(schema['pattern'])}</code>")
    if "default" in schema:
        words.append(f"default <code>{_text(json.dumps(schema['default']))}</code>")
    return f' <span class="soft">({", ".join(words)})</span>' if words else ""


# --- text -----------------------------------------------------------------------------------------


def _text(value: object) -> str:
    return html.escape(str(value))


def _inline(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", _text(text))


def _markdown(text: str) -> str:
    """Paragraphs, tables and ``code``: what our own descriptions use."""
    found = []
    for block in re.split(r"\n\s*\n", text.strip()) if text.strip() else ():
        lines = block.splitlines()
        if len(lines) > 2 and lines[0].startswith("|"):
            cells = [[_inline(cell.strip()) for cell in line.strip("|").split("|")] for line in lines]
            found.append(_table(tuple(cells[0]), [tuple(row) for row in cells[2:]]))
        else:
            found.append(f"<p>{_inline(block)}</p>")
    return "".join(found)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]], *, head_shown: bool = True) -> str:
    top = f"<tr>{''.join(f'<th>{cell}</th>' for cell in head)}</tr>" if head_shown else ""
    lines = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table>{top}{lines}</table>" if lines else ""
