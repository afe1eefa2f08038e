"""Settings of `tandem scaler`."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator
from tandem_service.settings import CommonSettings, Targets

from tandem_cli.scaler.law import Bounds, Policy
from tandem_cli.scaler.workloads import parse_workload

#: A number of replicas.
_Count = Annotated[int, Field(ge=0, le=10_000)]
#: deployment/NAME or statefulset/NAME.
_Workload = Annotated[str, AfterValidator(lambda text: str(parse_workload(text)))]


class ScalerSettings(CommonSettings):
    """Settings of `tandem scaler`."""

    gateways: Targets = ("k8s://tandem-gateway:9090",)
    """/metrics of gateways, as host:port or k8s://SERVICE:PORT"""
    prefill: Targets = ("k8s://tandem-prefill:9090",)
    """/metrics of prefill pods"""
    decode: Targets = ("k8s://tandem-decode:9090",)
    """/metrics of decode pods"""
    prefill_workload: _Workload = "deployment/tandem-prefill"
    """what is scaled: deployment/NAME or statefulset/NAME"""
    decode_workload: _Workload = "deployment/tandem-decode"
    """what is scaled: deployment/NAME or statefulset/NAME"""
    namespace: str = ""
    """namespace of the workloads and the Lease; empty: that of this pod, or of kubectl's context"""
    lease: str = "tandem-scaler-leader"
    """name of the Lease that elects a leader among several scalers"""
    lease_s: Annotated[float, Field(ge=1.0, le=300.0)] = 15.0
    """seconds without a renewal after which another scaler takes over"""
    interval_s: Annotated[float, Field(ge=0.1, le=300.0)] = 15.0
    """seconds between two decisions"""
    least_prefill: _Count = 1
    """least number of prefill pods; 0: none without requests"""
    most_prefill: _Count = 16
    """most prefill pods"""
    least_decode: _Count = 1
    """least number of decode pods; 0: none without requests, and gateways hold new ones until a pod runs"""
    most_decode: _Count = 32
    """most decode pods"""
    attainment: Annotated[float, Field(ge=0.5, le=0.9999)] = Policy.share
    """share of requests that should keep TTFT and TPOT"""
    settle_s: Annotated[float, Field(gt=0.0, le=86_400.0)] = Policy.settle_s
    """seconds for which fewer pods must have been enough before one is removed; more keeps more pods between
    bursts"""
    margin: Annotated[float, Field(ge=0.0, le=1.0)] = Policy.margin
    """spare capacity, as a share of the load, that must remain after a pod is removed"""
    kv_target: Annotated[float, Field(ge=0.1, le=1.0)] = Policy.kv_target
    """share of the decode pods' KV blocks that may be used"""
    window_s: Annotated[float, Field(ge=1.0, le=3600.0)] = Policy.window_s
    """window in seconds of the shares of kept objectives"""
    dry_run: bool = False
    """decide and log, but change nothing"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for role, least, most in (
            ("prefill", self.least_prefill, self.most_prefill),
            ("decode", self.least_decode, self.most_decode),
        ):
            if least > most:
                raise ValueError(f"--least-{role} {least} is more than --most-{role} {most}")
        if self.interval_s > self.settle_s / 10:
            raise ValueError(
                f"--interval-s {self.interval_s:g} is more than a tenth of --settle-s {self.settle_s:g}; "
                "decide more often or settle longer"
            )
        return self

    def policy(self) -> Policy:
        return Policy(
            prefill=Bounds(self.least_prefill, self.most_prefill),
            decode=Bounds(self.least_decode, self.most_decode),
            share=self.attainment,
            settle_s=self.settle_s,
            margin=self.margin,
            kv_target=self.kv_target,
            window_s=self.window_s,
        )
