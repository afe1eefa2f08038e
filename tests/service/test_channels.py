"""A stream from a stopped host ends soon; public streams survive pauses of the network."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tandem_service.channels import open_public_sync_channel, open_sync_channel

SERVER = """
import sys
from concurrent.futures import ThreadPoolExecutor
import grpc
from grpc_health.v1 import health, health_pb2_grpc
from tandem_service.channels import server_options
options = server_options(1 << 20, *map(int, sys.argv[1:]))
server = grpc.server(ThreadPoolExecutor(2), options=options)
health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
port = server.add_insecure_port("127.0.0.1:0")
server.start()
print(port, flush=True)
server.wait_for_termination()
"""

CLIENT = """
import sys
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
with grpc.insecure_channel(f"127.0.0.1:{sys.argv[1]}") as channel:
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
    next(watch)
    print("watching", flush=True)
    sys.stdin.readline()
    print(watch.is_active(), flush=True)
    watch.cancel()
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


def test_a_public_stream_survives_a_pause_of_three_seconds_in_either_direction() -> None:
    """A client that roams, or packets that are lost: the path is silent, and then continues."""
    with subprocess.Popen([sys.executable, "-P", "-c", SERVER, "10"], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        target = f"127.0.0.1:{int(server.stdout.readline())}"
        try:
            for channel in (open_public_sync_channel(target), grpc.insecure_channel(target)):
                with channel:
                    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
                    next(watch)
                    server.send_signal(signal.SIGSTOP)
                    time.sleep(3.0)
                    server.send_signal(signal.SIGCONT)
                    time.sleep(0.5)
                    assert watch.is_active()
                    watch.cancel()
        finally:
            server.kill()


def test_a_paused_client_of_a_public_stream_continues_it() -> None:
    with (
        subprocess.Popen([sys.executable, "-P", "-c", SERVER, "10"], stdout=subprocess.PIPE) as server,
    ):
        assert server.stdout is not None
        port = server.stdout.readline().decode().strip()
        with subprocess.Popen(
            [sys.executable, "-P", "-c", CLIENT, port], stdout=subprocess.PIPE, stdin=subprocess.PIPE
        ) as client:
            try:
                assert client.stdout is not None
                assert client.stdout.readline() == b"watching\n"
                client.send_signal(signal.SIGSTOP)
                time.sleep(3.0)
                client.send_signal(signal.SIGCONT)
                time.sleep(0.5)
                assert client.communicate(b"\n")[0] == b"True\n"
            finally:
                client.kill()
                server.kill()
