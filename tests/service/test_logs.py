"""Logs: JSON lines of all libraries have role, pod and request id."""

import json
import logging
import re
import sys

import pytest
import structlog
from tandem_service import logs
from tandem_service.settings import PodSettings


@pytest.fixture(autouse=True)
def _restore_logging():
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    root.handlers, root.level = handlers, level
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def _lines(capsys) -> list[dict]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_json_lines_name_process_and_request(capsys):
    logs.configure(PodSettings(log_format="json", pod_id="d-1"), "decode")
    structlog.contextvars.bind_contextvars(request_id="r-9")
    structlog.get_logger("tandem.test").info("joined", tokens=3)
    logging.getLogger("some.library").warning("careful")
    ours, theirs = _lines(capsys)
    assert (ours["event"], ours["tokens"]) == ("joined", 3)
    assert theirs["event"] == "careful"
    for line in (ours, theirs):
        assert (line["role"], line["pod"], line["request_id"]) == ("decode", "d-1", "r-9")


def test_console_lines_have_the_time_of_day_and_no_origin(capsys):
    logs.configure(PodSettings(log_format="console", pod_id="d-1"), "decode")
    structlog.get_logger("tandem.test").info("joined", tokens=3)
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d \[info +\] joined +\[tandem\.test\] tokens=3\n", capsys.readouterr().err
    )


def test_a_traceback_is_part_of_its_line(capsys):
    logs.configure(PodSettings(log_format="json"), "decode")
    try:
        raise RuntimeError("broken")
    except RuntimeError as error:
        structlog.get_logger("tandem.test").exception("failed", exc_info=error)
    (line,) = _lines(capsys)
    assert "RuntimeError: broken" in line["exception"]


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_a_traceback_shows_no_local_variables(capsys, log_format):
    """Local variables contain users' prompts, and formatting them stopped a gateway for seconds."""
    logs.configure(PodSettings(log_format=log_format), "gateway")
    prompt = "a user's secret"
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        structlog.get_logger("tandem.test").exception("failed")
        logging.getLogger("some.library").exception("failed too")
    shown = capsys.readouterr().err
    assert shown.count("RuntimeError: broken") == 2
    assert prompt not in shown


def test_levels_below_the_setting_are_silent(capsys):
    logs.configure(PodSettings(log_level="warning", log_format="json"), "decode")
    structlog.get_logger("tandem.test").info("quiet")
    structlog.get_logger("tandem.test").warning("loud")
    assert [line["event"] for line in _lines(capsys)] == ["loud"]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_control_characters_of_callers_do_not_reach_the_terminal(capsys, monkeypatch, is_terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    logs.configure(PodSettings(log_format="console"), "gateway")
    given = "\x1b[2J\x9b2J\x07\rx"
    structlog.get_logger("tandem.test").info("refused", field=given)
    logging.getLogger("some.library").warning(given)
    try:
        raise RuntimeError(given)
    except RuntimeError:
        structlog.get_logger("tandem.test").exception("failed")
    shown = capsys.readouterr().err
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert plain.count(r"\x1b[2J\x9b2J\x07\rx") + plain.count(r"\x1b[2J\x9b2J\x07\\rx") == 3
    assert plain.isascii() and set(plain) & set(map(chr, range(32))) == {"\n"}
    assert ("\x1b[" in shown) == is_terminal
