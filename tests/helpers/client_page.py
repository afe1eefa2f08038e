"""What worked for clients: the record in the repository, and the part of docs/clients.md made of it.

`make clients` runs the clients; each that works leaves its results in build/clients. This script moves them
to the record and writes the page.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

from client_programs import CLIENTS, PROGRAMS, Client, Run

_ROOT = Path(__file__).resolve().parents[2]
PAGE = _ROOT / "docs" / "clients.md"
_RECORD = _ROOT / "tests" / "clients" / "record.json"
_RUNS = _ROOT / "build" / "clients"
#: Features with a column each, as programs name them -> heading; the last column has the others.
_COLUMNS = {
    "chat": "chat", "stream": "streamed", "tools": "tools", "schema": "schema", "responses": "Responses",
    "messages": "Messages", "completions": "completions", "models": "models", "errors": "errors",
}  # fmt: skip


class Entry(TypedDict):
    """A client in the record."""

    version: str
    features: list[str]


def entry(run: Run) -> Entry:
    """Of a run without errors."""
    return {"version": run.version, "features": [*run.results]}


def recorded() -> dict[str, Entry]:
    return dict(json.loads(_RECORD.read_text())) if _RECORD.exists() else {}


def keep(client: Client, run: Run) -> None:
    """Leaves the results of a run without errors for `main`."""
    _RUNS.mkdir(parents=True, exist_ok=True)
    (_RUNS / f"{Path(client.program).stem}.json").write_text(json.dumps({client.name: entry(run)}))


def page_with(text: str, record: Mapping[str, Entry]) -> str:
    """The page's text with the table and the snippets of this record."""
    clients = [client for client in CLIENTS if client.name in record]
    lines = ["| client | version | " + " | ".join(_COLUMNS.values()) + " | also |"]
    lines.append("|---" * (len(_COLUMNS) + 3) + "|")
    for client in clients:
        version, features = record[client.name]["version"], record[client.name]["features"]
        cells = ["yes" if name in features else "" for name in _COLUMNS]
        more = ", ".join(name for name in features if name not in _COLUMNS)
        lines.append("| " + " | ".join([client.name, version, *cells, more]) + " |")
    snippets = [f"{client.name}:\n\n{snippet}\n" for client in clients if (snippet := _snippet(client))]
    for name, made in (("table", "\n".join(lines)), ("snippets", "\n".join(snippets).rstrip("\n"))):
        start, end = f"<!-- {name}: generated -->\n", "<!-- end -->"
        before, found, rest = text.partition(start)
        if not found or end not in rest:
            raise ValueError(f"{PAGE} needs `<!-- {name}: generated -->` and an end")
        text = f"{before}{start}{made}\n{rest[rest.index(end) :]}"
    return text


def _snippet(client: Client) -> str:
    """The lines between `# snippet` and `# end` in the client's program; in JavaScript after `//`.

    A language after `snippet` says that the program has them in a string, which it runs.
    """
    program = (PROGRAMS / client.program).read_text()
    found = re.search(r"^(?:#|//) snippet ?(\w*)\n(.*?)^(?:#|//) end$", program, re.MULTILINE | re.DOTALL)
    return f"```{found[1] or ('js' if client.is_node else 'python')}\n{found[2]}```" if found else ""


def main() -> None:
    record = recorded()
    for path in _RUNS.glob("*.json"):
        record |= json.loads(path.read_text())
    record = {client.name: record[client.name] for client in CLIENTS if client.name in record}
    lines = [f"{json.dumps(name)}: {json.dumps(found)}" for name, found in record.items()]
    _RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    PAGE.write_text(page_with(PAGE.read_text(), record))


if __name__ == "__main__":
    main()
