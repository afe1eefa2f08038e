"""Settings as operators write them."""

from __future__ import annotations

import pytest
from tandem_lookahead.settings import LookaheadSettings
from tandem_service.settings import load


def test_two_requests_and_nobody_s_prompts_unless_told_otherwise():
    settings = load(LookaheadSettings, [])
    assert (settings.min_requests, settings.share_prompts) == (2, ())


@pytest.mark.parametrize("text", ["acme,beta", " acme , beta ,"])
def test_tenants_are_listed_with_commas(text, monkeypatch):
    assert load(LookaheadSettings, ["--share-prompts", text]).share_prompts == ("acme", "beta")
    monkeypatch.setenv("TANDEM_SHARE_PROMPTS", text)
    assert load(LookaheadSettings, []).share_prompts == ("acme", "beta")


@pytest.mark.parametrize(
    ("flag", "value"), [("--min-requests", "0"), ("--max-bytes", "5"), ("--half-life-s", "0")]
)
def test_what_makes_no_sense_is_refused_by_name(flag, value, capsys):
    with pytest.raises(SystemExit):
        load(LookaheadSettings, [flag, value])
    assert flag in capsys.readouterr().err
