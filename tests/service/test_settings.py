"""Settings: flags override the environment, and a bad value gives one sentence and exit code 2."""

import pytest
from role_settings import SETTINGS
from tandem_lookahead.settings import LookaheadSettings
from tandem_service.settings import PodSettings, RedisSettings, Targets, load


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


def test_flags_override_the_environment(monkeypatch: pytest.MonkeyPatch):
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
        (["--max-queue", "many"], ["--max-queue", "TANDEM_MAX_QUEUE", "'many'", "an integer"]),
        (["--port", "70000"], ["--port", "65535"]),
        (["--prefill", "nowhere"], ["--prefill", "'nowhere'", "host:port"]),
        (["--drain-s", "-1"], ["--drain-s", "at least 0"]),
        (["--log-level", "loud"], ["--log-level", "'info'"]),
        (["--no-such-flag", "1"], ["--no-such-flag"]),
    ],
)
def test_a_bad_flag_gives_one_sentence_and_exit_code_2(arguments, words, capsys):
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


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("TANDEM_MAX_QEUE", "TANDEM_MAX_QUEUE"),
        ("TANDEM_INSECUR", "TANDEM_INSECURE"),
        ("TANDEM_PORTS", "TANDEM_PORT"),
    ],
)
def test_a_misspelt_variable_ends_the_start(variable, meant, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setenv(variable, "1")
    with pytest.raises(SystemExit) as exit_info:
        load(ExampleSettings, [])
    assert exit_info.value.code == 2
    assert capsys.readouterr().err == f"error: {variable} is unknown; did you mean {meant}?\n"


@pytest.mark.parametrize("role", SETTINGS)
def test_variables_of_other_programs_are_ignored(role, monkeypatch: pytest.MonkeyPatch, tmp_path):
    """Variables of other roles, of Kubernetes Services, and of Tandem that are no settings."""
    own = SETTINGS[role].model_fields
    others = {field for cls in SETTINGS.values() for field in cls.model_fields} - set(own)
    services = {
        f"{service}_{part}"
        for service in ("gateway", "decode", "prefill", "lookahead", "redis")
        for part in ("port", "service_host", "service_port", "port_21200_tcp", "port_21200_tcp_addr")
    }
    for name in others | services | {"home", "native", "gpu_bundle", "api_key", "bench_tenants", "emulated"}:
        monkeypatch.setenv(f"TANDEM_{name.upper()}", "x")
    with pytest.raises(SystemExit) as exit_info:
        load(SETTINGS[role], ["--help"])
    assert exit_info.value.code == 0


PASSWORDS = ["Zm9v/YmFy", "Zm9v#YmFy", "Zm9v?YmFy", "12/YmFy"]


@pytest.mark.parametrize("variable", ["TANDEM_REDIS_URL", "REDIS_URL"])
@pytest.mark.parametrize("password", PASSWORDS)
def test_a_wrong_url_of_redis_ends_the_start_without_its_password(variable, password, monkeypatch, capsys):
    monkeypatch.setenv(variable, f"redis://:{password}@redis:6379")
    with pytest.raises(SystemExit):
        load(LookaheadSettings, [])
    error = capsys.readouterr().err
    assert "is no URL of Redis" in error and "%2F" in error
    assert "Zm9v" not in error and "YmFy" not in error and "Traceback" not in error


@pytest.mark.parametrize(
    "url", ["", "redis://a:6379", "rediss://u:p%2Fq@a", "unix:///run/redis.sock", "redis://", "redis://h/0"]
)
def test_urls_of_redis_are_accepted(url, monkeypatch):
    monkeypatch.setenv("REDIS_URL", url)
    monkeypatch.delenv("TANDEM_REDIS_URL", raising=False)
    assert load(RedisSettings, []).redis_url == ""


def test_settings_cannot_change_after_start():
    with pytest.raises(ValueError, match="frozen"):
        load(ExampleSettings, []).port = 5
