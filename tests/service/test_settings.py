"""Settings: flags win over environment, and a bad value is one sentence and exit code 2."""

import pytest
from tandem_service.settings import PodSettings, Targets, load


class ExampleSettings(PodSettings):
    """A role's own settings, as the pods define them."""

    prefill: Targets = ()
    """prefill pods"""
    max_queue: int = 4
    """waiting requests"""


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TANDEM_PORT", "TANDEM_PREFILL", "TANDEM_MAX_QUEUE", "TANDEM_HOST"):
        monkeypatch.delenv(name, raising=False)


def test_defaults_listen_on_loopback_only():
    settings = load(ExampleSettings, [])
    assert settings.host == "127.0.0.1"
    assert settings.listen_port() == 0
    assert settings.metrics_port is None


def test_flags_win_over_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TANDEM_MAX_QUEUE", "7")
    monkeypatch.setenv("TANDEM_PREFILL", "a:1,b:2")
    settings = load(ExampleSettings, ["--max-queue", "9"])
    assert settings.max_queue == 9
    assert settings.prefill == ("a:1", "b:2")


def test_a_list_of_targets_is_one_flag():
    assert load(ExampleSettings, ["--prefill", "10.0.0.1:21100,[::1]:21101"]).prefill == (
        "10.0.0.1:21100",
        "[::1]:21101",
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max-queue", "many"], ["--max-queue", "TANDEM_MAX_QUEUE", "'many'", "integer"]),
        (["--port", "70000"], ["--port", "65535"]),
        (["--prefill", "nowhere"], ["--prefill", "'nowhere'", "host:port"]),
        (["--drain-s", "-1"], ["--drain-s", "greater than or equal to 0"]),
        (["--log-level", "loud"], ["--log-level", "'info'"]),
        (["--no-such-flag", "1"], ["--no-such-flag"]),
    ],
)
def test_a_bad_flag_is_one_sentence_and_exit_code_2(arguments, words, capsys):
    with pytest.raises(SystemExit) as exit_info:
        load(ExampleSettings, arguments)
    assert exit_info.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    for word in words:
        assert word in lines[0]


def test_a_bad_variable_is_named_too(monkeypatch: pytest.MonkeyPatch, capsys):
    # What Kubernetes injects for a Service called "tandem".
    monkeypatch.setenv("TANDEM_PORT", "tcp://10.0.0.1:80")
    with pytest.raises(SystemExit) as exit_info:
        load(ExampleSettings, [])
    assert exit_info.value.code == 2
    assert "TANDEM_PORT" in capsys.readouterr().err


def test_settings_cannot_change_after_start():
    with pytest.raises(ValueError, match="frozen"):
        load(ExampleSettings, []).port = 5
