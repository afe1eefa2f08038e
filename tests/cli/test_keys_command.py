"""`tandem keys`: the key that it prints is the one that its line lets in."""

from __future__ import annotations

import json
from pathlib import Path

from tandem_cli.main import app
from tandem_gateway.auth import ApiKeys
from typer.testing import CliRunner


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["keys", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_a_new_key_is_accepted_with_its_line(tmp_path: Path) -> None:
    code, out, _ = run("new", "--tenant", "acme", "--slo-class", "batch", "--slo-class", "chat")
    assert code == 0
    key, line = out.splitlines()
    assert key not in line
    (tmp_path / "keys").write_text(line)
    caller = ApiKeys.load(tmp_path / "keys").authenticate(f"Bearer {key}")
    assert (caller.tenant, caller.slo_classes, caller.is_operator) == ("acme", ("batch", "chat"), False)


def test_a_line_is_appended_to_a_file_that_only_its_owner_may_read(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    first = run("new", "--tenant", "acme", "--file", str(file))[1].strip()
    assert file.stat().st_mode & 0o777 == 0o600
    file.write_text(file.read_text().rstrip("\n"))  # an editor left it without the last line's end
    second = run("new", "--tenant", "ops", "--operator", "--file", str(file))[1].strip()
    keys = ApiKeys.load(file)
    assert keys.authenticate(f"Bearer {first}").tenant == "acme"
    assert keys.authenticate(f"Bearer {second}").is_operator
    assert run("check", str(file)) == (0, "API keys: 2 of 2 tenants\n", "")


def test_the_first_fault_of_a_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    for fields, fault in (
        ({"key": "secret", "tenant": "a"}, "key_sha256: is missing"),
        ({"key_sha256": "secret", "tenant": "a"}, "key_sha256: must be the key's SHA-256 in 64 hex digits"),
        (
            {"key_sha256": "0" * 64, "tenant": "a", "slo_class": ["b"]},
            "slo_class: is unknown; did you mean slo_cl",
        ),
        ({"key_sha256": "0" * 64, "tenant": "a", "weight": 0}, "weight: must be more than 0"),
        (
            {"key_sha256": "0" * 64, "tenant": "a", "max_requests": 1.5},
            "max_requests: must be an integer",
        ),
    ):
        file.write_text(json.dumps(fields))
        code, _, error = run("check", str(file))
        assert code == 1
        assert error.startswith(f"error: {file}:1: {fault}"), error
    file.write_text("tenant=a")
    assert "the line: is not JSON" in run("check", str(file))[2]
