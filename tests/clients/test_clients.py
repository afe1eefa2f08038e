"""Each client's program runs against a system, and tests/clients/record.json says what worked."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import client_page
import client_programs
import pytest
from client_programs import CLIENTS, Client


def _parameter(client: Client) -> object:
    marks = [pytest.mark.timeout(client.limit_s + client_programs.INSTALL_LIMIT_S)]
    if client.is_wide:
        marks.append(pytest.mark.wide)
    if client.is_node:
        marks.append(pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed"))
    return pytest.param(client, id=Path(client.program).stem, marks=marks)


@pytest.fixture(scope="module")
def ran() -> dict[str, client_page.Entry]:
    """What worked in this module's tests."""
    return {}


@pytest.mark.parametrize("client", [_parameter(client) for client in CLIENTS])
def test_every_feature_works(client: Client, system: Mapping[str, str], tmp_path: Path, ran):
    try:
        run = client_programs.run(client, system, tmp_path)
    except client_programs.RegistryUnreachableError as error:
        pytest.skip(str(error))
    failed = {feature: error for feature, error in run.results.items() if error}
    assert not failed, run.output[-8000:]
    assert run.results, run.output[-8000:]
    client_page.keep(client, run)
    ran[client.name] = client_page.entry(run)


def test_the_record_lists_the_features_that_ran(ran):
    record = client_page.recorded()
    assert {name: record.get(name) for name in ran} == ran, "run `make clients`"
