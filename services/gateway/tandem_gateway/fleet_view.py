"""The fleet as the gateway sees it, for GetFleetStatus and HTTP /fleet."""

from __future__ import annotations

import time

from tandem_proto.v1 import gateway_pb2

from tandem_gateway.admission import Admission
from tandem_gateway.fleet import Fleet, Pod
from tandem_gateway.gateway import Gateway


class FleetView:
    def __init__(self, fleet: Fleet, gateway: Gateway, admission: Admission) -> None:
        self._fleet = fleet
        self._gateway = gateway
        self._admission = admission

    def now(self) -> gateway_pb2.GetFleetStatusResponse:
        return gateway_pb2.GetFleetStatusResponse(
            pods=[_pod_health(pod) for pod in self._fleet.pods()],
            requests_queued=self._admission.num_waiting,
            requests_running=self._admission.num_in_flight,
            requests_total=self._gateway.num_received,
        )


def _pod_health(pod: Pod) -> gateway_pb2.PodHealth:
    never = float("inf")
    return gateway_pb2.PodHealth(
        target=pod.target,
        role=pod.role.value,
        healthy=pod.healthy,
        last_seen_seconds=never if pod.last_seen is None else time.monotonic() - pod.last_seen,
        status=pod.report,
    )
