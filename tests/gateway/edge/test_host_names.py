"""Host names: a page whose own name resolves to 127.0.0.1 (DNS rebinding) has the gateway's origin for a
browser, so a gateway without keys answers only to names that no attacker can own."""

import socket

import pytest
from tandem_gateway.settings import GatewaySettings

FOREIGN = (
    "rebound.example", "rebound.example:8000", "127.0.0.1.rebound.example", "localhost.rebound.example",
    "xlocalhost", "docker.internal", "0x7f.example", "127.0.0.1.5", "999.1", "[", "", ".",
)  # fmt: skip
SAFE = (
    "localhost", "LOCALHOST:1", "localhost.", "tandem.localhost", "127.0.0.1", "127.1", "0x7f.1",
    "0.0.0.0:80",
    "[::1]:8000", "[::]", "[::ffff:127.0.0.1]", "192.168.1.5:8000", "ip6-localhost", "ip6-loopback",
    "host.docker.internal:8000", "host.containers.internal", socket.gethostname(),
)  # fmt: skip


async def status(front, host: str) -> int:
    return (await front.http.get("/v1/models", headers={"host": host})).status_code


async def test_foreign_names_are_refused_without_keys(pods, gateway):
    front = await gateway(await pods())
    for host in FOREIGN:
        for path in ("/dashboard/", "/fleet", "/v1/models"):
            answer = await front.http.get(path, headers={"host": host})
            assert answer.status_code == 403, host
            assert "not a name of this machine" in answer.text and "--allowed-hosts" in answer.text


async def test_names_that_no_attacker_can_own_are_served(pods, gateway):
    front = await gateway(await pods())
    assert {host: await status(front, host) for host in SAFE} == dict.fromkeys(SAFE, 200)


async def test_allowed_hosts_adds_names(pods, gateway):
    front = await gateway(await pods(), allowed_hosts="models.example,*.Corp.example")
    for host, expected in {
        "models.example": 200, "Models.Example.:8000": 200, "a.b.corp.example": 200, "corp.example": 403,
        "xcorp.example": 403, "x.models.example": 403, "models.example.rebound.example": 403,
        "localhost": 200,
    }.items():  # fmt: skip
        assert await status(front, host) == expected, host


async def test_with_keys_or_for_everyone_all_names_are_served(pods, gateway, keys_file):
    pod = await pods()
    for settings in ({"no_api_keys": True}, {"api_keys_file": keys_file}):
        front = await gateway(pod, **settings)
        front.http.headers["x-api-key"] = "acme-key"
        assert await status(front, "models.example") == 200


@pytest.mark.parametrize(
    "host", ["*", "https://a.example", "a.example:80", "a b", "*a.example", "a.*.example"]
)
def test_an_invalid_host_name_is_refused(host):
    with pytest.raises(ValueError, match="is not a host name"):
        GatewaySettings(model="m", decode="127.0.0.1:1", allowed_hosts=host)
