"""The OpenAPI description as one HTML page: made here, without scripts or anything from elsewhere; pure."""

import json
from html import escape

from manege.types import JsonObject

__all__ = ["docs_page"]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
details { border-bottom: 1px solid #8884; padding: .4rem 0; }
summary { cursor: pointer; } summary span { opacity: .75; }
code, pre { font-family: ui-monospace, monospace; font-size: .9em; } pre { overflow-x: auto; }
b { display: inline-block; min-width: 4.5em; } td { padding-right: 1.5em; vertical-align: top; }
:root { color-scheme: light dark; }
"""


def docs_page(description: JsonObject) -> str:
    """A page with one foldable part per operation, and the named types at its end."""
    info = description["info"]
    title = escape(f"{info['title']} {info['version']}")
    operations = "".join(
        _operation(method, path, operation)
        for path, operations in description["paths"].items()
        for method, operation in operations.items()
    )
    schemas = "".join(
        f'<details id="{escape(name)}"><summary><code>{escape(name)}</code></summary>{_json(schema)}</details>'
        for name, schema in description["components"]["schemas"].items()
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f'<h1>{title}</h1><p>The same for programs: <a href="/openapi.json">/openapi.json</a></p>'
        f"{operations}<h2>Types</h2>{schemas}</html>"
    )


def _operation(method: str, path: str, operation: JsonObject) -> str:
    head = f"<b>{method.upper()}</b> <code>{escape(path)}</code> <span>{escape(operation['summary'])}</span>"
    parts = [f"<p>{escape(operation.get('description', 'Needs no key.'))}</p>"]
    if rows := [_row(each["name"], each["in"], each["schema"]) for each in operation["parameters"]]:
        parts.append(f"<table>{''.join(rows)}</table>")
    if body := operation.get("requestBody"):
        parts.append(f"<p>Body:</p>{_json(body['content']['application/json']['schema'])}")
    answers = [f"<tr><td>{status}<td>{escape(said['description'])}" for status, said in operation["responses"].items()]
    parts.append(f"<p>Answers:</p><table>{''.join(answers)}</table>")
    return f"<details><summary>{head}</summary>{''.join(parts)}</details>"


def _row(name: str, place: str, schema: JsonObject) -> str:
    rest = {key: value for key, value in schema.items() if key not in ("title", "description")}
    meaning = escape(schema.get("description", ""))
    return f"<tr><td><code>{escape(name)}</code><td>{place}<td><code>{escape(json.dumps(rest))}</code><td>{meaning}"


def _json(schema: JsonObject) -> str:
    return f"<pre>{escape(json.dumps(schema, indent=2))}</pre>"
