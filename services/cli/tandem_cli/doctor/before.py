"""All checks of manifests, as one list."""

from __future__ import annotations

from tandem_cli.doctor.finding import Finding, run_checks
from tandem_cli.doctor.manifests import Objects
from tandem_cli.doctor.network_checks import NETWORK_CHECKS
from tandem_cli.doctor.rollout_checks import ROLLOUT_CHECKS
from tandem_cli.doctor.settings_checks import SETTINGS_CHECKS
from tandem_cli.doctor.storage_checks import STORAGE_CHECKS

MANIFEST_CHECKS = (*SETTINGS_CHECKS, *NETWORK_CHECKS, *ROLLOUT_CHECKS, *STORAGE_CHECKS)


def examine_manifests(objects: Objects) -> list[Finding]:
    """Settings that cannot be read end the examination: other checks need their values."""
    refused = list(run_checks((*SETTINGS_CHECKS[:2],), objects))
    if any(one.check == "refused-setting" for one in refused):
        return refused
    return [*refused, *run_checks(MANIFEST_CHECKS[2:], objects)]
