"""All checks of manifests, and of the cluster that they are for."""

from __future__ import annotations

from tandem_cli.doctor.cluster import Cluster
from tandem_cli.doctor.cluster_checks import CLUSTER_CHECKS, Target
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


def examine_cluster(objects: Objects, cluster: Cluster) -> list[Finding]:
    """Whether the cluster has what the manifests need."""
    return list(run_checks(CLUSTER_CHECKS, Target(objects, cluster)))
