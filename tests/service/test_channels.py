"""A stream from a stopped host ends soon."""

from __future__ import annotations

import signal
import subprocess
import sys

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tandem_service.channels import open_sync_channel

SERVER = """
from concurrent.futures import ThreadPoolExecutor
import grpc
from grpc_health.v1 import health, health_pb2_grpc
from tandem_service.channels import server_options
server = grpc.server(ThreadPoolExecutor(2), options=server_options(1 << 20))
health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
port = server.add_insecure_port("127.0.0.1:0")
server.start()
print(port, flush=True)
server.wait_for_termination()
"""


def test_pings_detect_a_stopped_server() -> None:
    """It takes two seconds, and a minute without the limit for pings."""
    with subprocess.Popen([sys.executable, "-P", "-c", SERVER], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        with open_sync_channel(f"127.0.0.1:{int(server.stdout.readline())}") as channel:
            try:
                stub = health_pb2_grpc.HealthStub(channel)
                watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=40)
                next(watch)
                server.send_signal(signal.SIGSTOP)
                with pytest.raises(grpc.RpcError) as lost:
                    next(watch)
                assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
            finally:
                server.kill()
