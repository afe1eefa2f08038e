"""Discovery: addresses, names with several addresses, and temporary failures of DNS."""

import asyncio
import socket

import pytest
from tandem_service.discovery import DnsDiscovery, parse_entry, parse_target


@pytest.mark.parametrize("text", ["pod", "pod:", ":21200", "pod:0", "pod:x", "::1:21200", "pod:99999", ""])
def test_an_invalid_target_is_refused(text: str):
    with pytest.raises(ValueError, match="no host:port"):
        parse_target(text)


@pytest.mark.parametrize("text", ["pod:21200", "10.0.0.7:1", "[::1]:21200"])
def test_a_target_is_parsed_from_its_text(text: str):
    assert str(parse_target(f" {text} ")) == text


async def test_targets_are_sorted_and_unique():
    targets = ["10.0.0.2:2", "10.0.0.1:1", "10.0.0.2:2"]
    assert await DnsDiscovery([parse_target(t) for t in targets]).targets() == ("10.0.0.1:1", "10.0.0.2:2")


class _FakeDns:
    """Answers getaddrinfo from a table; a missing name fails as the resolver does, with `error`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.table: dict[str, list[tuple[socket.AddressFamily, str]]] = {}
        self.asked = 0
        self.error = socket.EAI_AGAIN
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", self._getaddrinfo)

    async def _getaddrinfo(self, host: str, port: int, **_: object):
        self.asked += 1
        if host not in self.table:
            raise socket.gaierror(self.error, "no answer")
        return [(family, socket.SOCK_STREAM, 6, "", (ip, port)) for family, ip in self.table[host]]


async def test_a_name_has_one_target_per_address_and_follows_the_pods(monkeypatch: pytest.MonkeyPatch):
    dns = _FakeDns(monkeypatch)
    dns.table["decode"] = [
        (socket.AF_INET, "10.0.0.1"),
        (socket.AF_INET, "10.0.0.2"),
        (socket.AF_INET6, "fd::1"),
    ]
    discovery = DnsDiscovery([parse_target("decode:21200"), parse_target("10.9.9.9:1")], refresh_s=0.0)
    assert await discovery.targets() == ("10.0.0.1:21200", "10.0.0.2:21200", "10.9.9.9:1")
    dns.table["decode"] = [(socket.AF_INET, "10.0.0.3")]
    assert await discovery.targets() == ("10.0.0.3:21200", "10.9.9.9:1")


async def test_the_last_answer_is_kept_while_dns_fails(monkeypatch: pytest.MonkeyPatch):
    dns = _FakeDns(monkeypatch)
    dns.table["decode"] = [(socket.AF_INET6, "fd::1")]
    discovery = DnsDiscovery([parse_target("decode:21200")], refresh_s=0.0)
    assert await discovery.targets() == ("[fd::1]:21200",)
    dns.table.clear()
    for _ in range(3):
        assert await discovery.targets() == ("[fd::1]:21200",)


@pytest.mark.parametrize("error", [socket.EAI_NONAME, socket.EAI_NODATA])
async def test_a_name_that_lost_its_addresses_has_no_pods(monkeypatch: pytest.MonkeyPatch, error: int):
    """A role scaled to zero: the second answer counts, because a single one may be a mistake."""
    dns = _FakeDns(monkeypatch)
    dns.error = error
    discovery = DnsDiscovery([parse_target("decode:21200")], refresh_s=0.0)
    dns.table["decode"] = [(socket.AF_INET, "10.0.0.1")]
    assert await discovery.targets() == ("10.0.0.1:21200",)
    dns.table.clear()
    assert await discovery.targets() == ("10.0.0.1:21200",)
    assert await discovery.targets() == ()
    dns.table["decode"] = [(socket.AF_INET, "10.0.0.2")]
    assert await discovery.targets() == ("10.0.0.2:21200",)
    dns.table.clear()
    assert await discovery.targets() == ("10.0.0.2:21200",)


@pytest.mark.parametrize("text", ["k8s://decode:21200", "k8s://decode.models:21200", "10.0.0.7:1"])
def test_an_entry_is_an_address_a_name_or_a_service(text: str):
    assert str(parse_entry(text)) == text


@pytest.mark.parametrize(
    "text", ["k8s://decode", "k8s://:1", "k8s://Decode:1", "k8s://a.b.c:1", "k8s://[fd::1]:1", "k8s://a:0"]
)
def test_an_error_for_a_wrong_service_names_the_expected_form(text: str):
    with pytest.raises(ValueError, match="k8s://SERVICE:PORT"):
        parse_entry(text)


async def test_dns_is_queried_once_per_refresh(monkeypatch: pytest.MonkeyPatch):
    dns = _FakeDns(monkeypatch)
    dns.table["decode"] = [(socket.AF_INET, "10.0.0.1")]
    discovery = DnsDiscovery([parse_target("decode:21200")], refresh_s=60.0)
    for _ in range(3):
        await discovery.targets()
    assert dns.asked == 1
