"""The plan of a fleet: pure data, checked against the processes' own settings classes."""

from __future__ import annotations

import itertools
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from role_settings import SETTINGS
from tandem_cli.up.options import FleetOptions, OptionError, PodFlag
from tandem_cli.up.up_plan import PortInUseError, check_ports, plan_fleet, reachable
from tandem_core.speculation import SpeculationMode
from tandem_service.settings import load

OPTIONS = FleetOptions(model_dir=Path("models/m"), num_prefill=2, num_decode=2, threads=1)


def test_the_default_fleet_has_the_documented_ports() -> None:
    plan = plan_fleet(OPTIONS)
    assert {spec.name: dict(spec.ports) for spec in plan.processes} == {
        "gateway-0": {"grpc": 20051, "http": 8000, "metrics": 22500},
        "prefill-0": {"grpc": 21100, "metrics": 22100},
        "prefill-1": {"grpc": 21101, "metrics": 22101},
        "decode-0": {"grpc": 21200, "kv": 21300, "metrics": 22200},
        "decode-1": {"grpc": 21201, "kv": 21301, "metrics": 22201},
        "lookahead": {"grpc": 21400, "metrics": 22400},
        "redis-answers": {},
        "redis": {},
    }


def test_default_ports_are_outside_linux_ephemeral_ports() -> None:
    for spec in plan_fleet(replace(OPTIONS, num_prefill=32, num_decode=32, num_gateways=8)).processes:
        assert all(port < 32768 for port in spec.ports.values()), spec.name


def test_callers_are_stopped_before_callees() -> None:
    stages = [{spec.role for spec in stage} for stage in plan_fleet(OPTIONS).stages]
    assert stages == [{"gateway"}, {"decode"}, {"prefill"}, {"lookahead"}, {"redis-answers", "redis"}]


@pytest.mark.parametrize("name", ["gateway-0", "decode-1", "prefill-0", "lookahead"])
def test_each_process_accepts_its_flags(name: str) -> None:
    (spec,) = (spec for spec in plan_fleet(OPTIONS).processes if spec.name == name)
    settings = load(SETTINGS[spec.role], spec.command[1:])
    assert settings.pod_id == name
    assert settings.listen_port() == spec.ports["grpc"]
    assert Path(spec.command[0]).parent == Path(sys.executable).parent


def test_pods_and_gateway_get_the_context_and_pods_a_share_of_the_memory() -> None:
    plan = plan_fleet(replace(OPTIONS, max_model_len=16_384, memory_bytes=4_000_000_003))
    for spec in plan.processes:
        if spec.role in ("gateway", "decode", "prefill"):
            settings = load(SETTINGS[spec.role], spec.command[1:])
            assert settings.max_model_len == 16_384  # type: ignore[attr-defined]
        if spec.role in ("decode", "prefill"):
            assert settings.memory_bytes == 1_000_000_000  # type: ignore[attr-defined]


def test_the_gateway_and_the_decode_pods_know_their_peers() -> None:
    plan = plan_fleet(OPTIONS)
    gateway = plan.processes[0].command
    assert gateway[gateway.index("--decode") + 1] == "127.0.0.1:21200,127.0.0.1:21201"
    assert gateway[gateway.index("--prefill") + 1] == "127.0.0.1:21100,127.0.0.1:21101"
    decode = plan.processes[1].command
    assert decode[decode.index("--lookahead") + 1] == "127.0.0.1:21400"


def test_several_gateways_have_consecutive_ports_and_share_a_redis() -> None:
    options = replace(OPTIONS, num_gateways=2, speculation=SpeculationMode.OFF)
    plan = plan_fleet(options)
    gateways = [spec for spec in plan.processes if spec.role == "gateway"]
    assert [dict(spec.ports) for spec in gateways] == [
        {"grpc": 20051, "http": 8000, "metrics": 22500},
        {"grpc": 20052, "http": 8001, "metrics": 22501},
    ]
    (redis,) = (spec for spec in plan.processes if "redis" in spec.role)
    for spec in gateways:
        assert spec.command[spec.command.index("--redis-url") + 1] == redis.health_target
    with pytest.raises(OptionError, match="--gateways 0: must be between 1 and 8"):
        replace(OPTIONS, num_gateways=0)


@pytest.mark.parametrize("speculation", [SpeculationMode.OFF, SpeculationMode.LOCAL])
def test_no_lookahead_service_runs_without_shared_drafts(speculation: SpeculationMode) -> None:
    plan = plan_fleet(replace(OPTIONS, speculation=speculation))
    assert {"lookahead", "redis", "redis-answers"}.isdisjoint(spec.role for spec in plan.processes)
    assert all("--lookahead" not in spec.command for spec in plan.processes)


@pytest.mark.parametrize("speculation", [SpeculationMode.CHAIN, SpeculationMode.GLOBAL])
def test_pods_with_shared_drafts_have_a_lookahead_service(speculation: SpeculationMode) -> None:
    plan = plan_fleet(replace(OPTIONS, speculation=speculation))
    decode = [spec.command for spec in plan.processes if spec.role == "decode"]
    assert all(command[command.index("--speculation") + 1] == speculation for command in decode)
    assert all("--lookahead" in command for command in decode)


def test_without_prefill_pods_the_gateway_has_no_flag_for_them() -> None:
    plan = plan_fleet(replace(OPTIONS, num_prefill=0))
    assert "--prefill" not in plan.processes[0].command


def redis_urls(role: str) -> set[str]:
    """What the role's processes get as --redis-url."""
    commands = [spec.command for spec in plan_fleet(OPTIONS).processes if spec.role == role]
    return {command[command.index("--redis-url") + 1] for command in commands}


def test_answers_are_in_a_redis_that_writes_no_file() -> None:
    servers = {spec.health_target: spec for spec in plan_fleet(OPTIONS).processes if "redis" in spec.role}
    assert redis_urls("gateway").isdisjoint(redis_urls("lookahead"))
    for url in redis_urls("gateway"):
        command = servers[url].command
        assert command[command.index("--appendonly") + 1] == "no"
        assert command[command.index("--save") + 1] == ""


def test_the_lookahead_service_uses_the_fleet_s_redis_or_the_given_one() -> None:
    (redis,) = (spec for spec in plan_fleet(OPTIONS).processes if spec.role == "redis")
    assert redis_urls("lookahead") == {redis.health_target}
    given = plan_fleet(replace(OPTIONS, redis_url="redis://:secret@elsewhere", num_gateways=2))
    assert not any("redis" in spec.role for spec in given.processes)
    flags = {flag for spec in given.processes for flag in spec.command}
    assert "--redis-url" not in flags and not any("secret" in flag for flag in flags), (
        "REDIS_URL is inherited"
    )


def test_an_extra_flag_reaches_all_pods_of_its_role_and_no_other() -> None:
    assert PodFlag.parse("decode.prefix_cache=false").arguments() == ("--no-prefix-cache",)
    assert PodFlag.parse("decode.prefix_cache=true").arguments() == ("--prefix-cache",)
    flags = (PodFlag.parse("decode.draft_nodes=7"),)
    for spec in plan_fleet(replace(OPTIONS, pod_flags=flags)).processes:
        assert (spec.command[-2:] == ("--draft-nodes", "7")) == (spec.role == "decode")


def test_gateways_have_the_highest_priority_and_prefill_pods_the_lowest() -> None:
    by_role = {spec.role: spec.command for spec in plan_fleet(OPTIONS).processes}
    assert by_role["prefill"][by_role["prefill"].index("--nice") + 1] == "6"
    assert by_role["gateway"][by_role["gateway"].index("--nice") + 1] == "-5"
    assert "--nice" not in by_role["decode"]
    assert by_role["decode"][by_role["decode"].index("--local-prefill-tokens") + 1] == "1536"


@pytest.mark.parametrize("text", ["decode.draft-nodes", "draft-nodes=7", "chef.salt=1", "decode.=1"])
def test_a_malformed_extra_flag_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match=r"expected ROLE\.FLAG=VALUE"):
        PodFlag.parse(text)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_decode": 0}, "--decode"),
        ({"num_decode": 101}, "--decode"),
        ({"num_prefill": -1}, "--prefill"),
        ({"threads": 0}, "--threads"),
    ],
)
def test_impossible_numbers_are_refused_by_name(change: dict[str, int], named: str) -> None:
    with pytest.raises(OptionError, match=named):
        replace(OPTIONS, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(("purpose", "flag"), [("http", "--http-port"), ("grpc", "--grpc-port")])
def test_a_port_in_use_is_named_with_the_flag_that_changes_it(purpose: str, flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = replace(OPTIONS, **{f"{purpose}_port": port})  # type: ignore[arg-type]
        with pytest.raises(PortInUseError, match=rf"port {port} .*gateway.*{flag}"):
            check_ports(plan_fleet(options), "127.0.0.1")


@pytest.mark.parametrize(
    ("bound", "reached"),
    [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("10.0.0.7", "10.0.0.7"), ("fd00::7", "[fd00::7]")],
)
def test_wildcard_addresses_are_reached_through_loopback(bound: str, reached: str) -> None:
    assert reachable(bound) == reached


def test_every_gateway_gets_the_chat_template_and_the_kind_of_sampling(tmp_path: Path) -> None:
    options = FleetOptions(
        model_dir=Path("m"), num_gateways=2, chat_template=tmp_path / "own.jinja", generation_config="none"
    )
    commands = [spec.command for spec in plan_fleet(options).processes if spec.role == "gateway"]
    assert len(commands) == 2
    for command in commands:
        assert command[command.index("--chat-template") + 1] == str(tmp_path / "own.jinja")
        assert command[command.index("--generation-config") + 1] == "none"


def test_off_loopback_the_links_between_pods_need_tls_or_insecure() -> None:
    with pytest.raises(OptionError, match=r"--host 10\.0\.0\.7 is not loopback: give --tls"):
        FleetOptions(model_dir=Path("m"), host="10.0.0.7")
    with pytest.raises(OptionError, match=r"--host 10\.0\.0\.7 is not loopback: give --api-keys-file"):
        FleetOptions(model_dir=Path("m"), host="10.0.0.7", tls_dir=Path("tls"))
    with pytest.raises(OptionError, match=r"--host 10\.0\.0\.7 is not loopback: give --api-keys-file"):
        FleetOptions(model_dir=Path("m"), host="10.0.0.7", insecure=True)
    options = FleetOptions(model_dir=Path("m"), host="10.0.0.7", insecure=True, no_api_keys=True)
    commands = {spec.role: spec.command for spec in plan_fleet(options).processes}
    assert load(SETTINGS["gateway"], commands["gateway"][1:]).no_api_keys  # type: ignore[attr-defined]
    assert [role for role, command in commands.items() if "--no-api-keys" in command] == ["gateway"]
    assert {role for role, command in commands.items() if "--insecure" in command} == {
        "gateway",
        "decode",
        "prefill",
        "lookahead",
    }


def test_with_tls_each_process_gets_the_certificate_of_its_role(tmp_path: Path) -> None:
    keys = tmp_path / "keys.jsonl"
    options = FleetOptions(model_dir=Path("m"), host="10.0.0.7", tls_dir=tmp_path, api_keys_file=keys)
    for spec in plan_fleet(options).processes:
        given = [spec.command[i + 1] for i, flag in enumerate(spec.command) if flag.startswith("--pod-tls")]
        names = [f"{spec.role}.pem", f"{spec.role}.key", "ca.pem"] if "redis" not in spec.role else []
        assert given == [str(tmp_path / name) for name in names]


@pytest.mark.parametrize(
    ("num_pods", "asked", "threads"),
    [(1, None, None), (2, None, "2"), (4, None, "1"), (9, None, "1"), (2, 3, "3")],
)
def test_pods_of_a_role_divide_the_cores(num_pods, asked, threads, monkeypatch):
    monkeypatch.setattr("tandem_cli.up.up_plan.usable_cpus", lambda: 5)
    options = FleetOptions(model_dir=Path("m"), num_prefill=num_pods, num_decode=num_pods, threads=asked)
    for spec in plan_fleet(options).processes:
        if spec.role in ("prefill", "decode"):
            flags = dict(itertools.pairwise(spec.command))
            assert flags.get("--threads") == threads


def test_the_settings_of_all_roles_are_checked_without_torch() -> None:
    probe = (
        "import sys; from pathlib import Path; from tandem_cli.up.options import FleetOptions, PodFlag\n"
        "from tandem_cli.up.up_plan import check_settings, plan_fleet\n"
        "flags = tuple(PodFlag.parse(f'{role}.pod-id=x') for role in ('decode', 'prefill'))\n"
        "options = FleetOptions(model_dir=Path('m'), pod_flags=flags)\n"
        "check_settings(options, plan_fleet(options)); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-P", "-c", probe], check=True)
