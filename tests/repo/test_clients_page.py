"""docs/clients.md shows the last runs of all clients, and nothing else."""

from __future__ import annotations

import client_page
from client_programs import CLIENTS


def test_the_page_is_made_from_the_record() -> None:
    text = client_page.PAGE.read_text()
    assert client_page.page_with(text, client_page.recorded()) == text, "run `make clients`"


def test_every_client_has_run() -> None:
    assert [*client_page.recorded()] == [client.name for client in CLIENTS]


def test_a_client_without_a_run_is_not_shown() -> None:
    record = {"openai (npm)": client_page.Entry(version="7.0.1", features=["tools", "images"])}
    table = client_page.page_with(client_page.PAGE.read_text(), record).partition("<!-- end -->")[0]
    assert "| openai (npm) | 7.0.1 |  |  | yes |  |  |  |  |  |  | images |" in table
    assert "anthropic (Python)" not in table
