"""Starts pods by fork from a process that has imported their code.

A pod's start is mostly imports: 4 s of CPU time, of which a fork leaves 0.2 s. On few cores that is what
limits the number of faults per hour, and what delays the requests that the dead pod left.

    harness                              fork server (one thread, no torch or gRPC state)
    ForkServer.spawn(spec) -- command, stdout -->  fork -> the command's main()
                           <-- pid ------------
                           <-- pid, exit code -     when it ends
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, cast

from tandem_cli.up.supervisor import POD_ENVIRONMENT, Process, ProcessSpec, spawn
from tandem_service.parent_death import PR_SET_PDEATHSIG

from tandem_chaos import child_faults

#: By console script.
_MODULES = {
    "tandem-decode": "tandem_decode.main",
    "tandem-prefill": "tandem_prefill.main",
    "tandem-gateway": "tandem_gateway.main",
    "tandem-lookahead": "tandem_lookahead.main",
}
_MAX_MESSAGE_BYTES = 1 << 16
_START_LIMIT_S = 120.0


class ForkedProcess:
    """What the supervisor uses of subprocess.Popen."""

    def __init__(self, pid: int, stdout: IO[bytes]) -> None:
        self.pid = pid
        self.stdout = stdout
        self.returncode: int | None = None
        self._ended = threading.Event()

    def note_end(self, code: int) -> None:
        self.returncode = code
        self._ended.set()

    def wait(self) -> int:
        self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class ForkServer:
    """The harness's end. Blocks until the server has imported the code."""

    def __init__(self, wall_clock: Path | None = None) -> None:
        """`wall_clock`: library with which the clocks of the processes can jump."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-P", "-m", "tandem_chaos.fork_server", str(theirs.fileno())]
        path = (str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH"))
        self._server = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            # Its threads would not exist in the children.
            env={
                **os.environ,
                **POD_ENVIRONMENT,
                "PYTHONPATH": os.pathsep.join(filter(None, path)),
                "OPENBLAS_NUM_THREADS": "1",
                **({} if wall_clock is None else {"LD_PRELOAD": str(wall_clock)}),
            },
        )
        theirs.close()
        self._socket = ours
        #: Names of processes that read their model slowly at the next start.
        self.slow_next: set[str] = set()
        self._children: dict[int, ForkedProcess] = {}
        #: Exit codes that came before `spawn` knew the process.
        self._early: dict[int, int] = {}
        self._lock = threading.Lock()
        self._started: list[int] = []
        self._answered = threading.Semaphore(0)
        ours.settimeout(_START_LIMIT_S)
        if not ours.recv(_MAX_MESSAGE_BYTES):
            raise RuntimeError("the fork server did not start; its error is above")
        ours.settimeout(None)
        self._reader = threading.Thread(target=self._read, name="fork-server", daemon=True)
        self._reader.start()

    def spawn(self, spec: ProcessSpec) -> Process:
        """For `Supervisor(spawn=...)`. What is not Tandem's own is started as usual."""
        if Path(spec.command[0]).name not in _MODULES:
            return spawn(spec)
        read_end, write_end = os.pipe()
        is_slow = spec.name in self.slow_next
        self.slow_next.discard(spec.name)
        request = json.dumps({"command": spec.command, "is_slow": is_slow}).encode()
        descriptor = array.array("i", [write_end])
        with self._lock:
            self._socket.sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptor)])
            os.close(write_end)
            self._answered.acquire()
            pid = self._started.pop()
            process = self._children[pid] = ForkedProcess(pid, os.fdopen(read_end, "rb", 0))
            code = self._early.pop(pid, None)
        if code is not None:
            process.note_end(code)
        return cast("Process", process)

    def close(self) -> None:
        """Ends the server, and with it what it started."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._server.wait()
        self._reader.join()
        self._socket.close()

    def _read(self) -> None:
        while message := self._socket.recv(_MAX_MESSAGE_BYTES):
            event: Mapping[str, int] = json.loads(message)
            if "code" not in event:
                self._started.append(event["pid"])
                self._answered.release()
                continue
            process = self._children.pop(event["pid"], None)
            if process is None:
                self._early[event["pid"]] = event["code"]
            else:
                process.note_end(event["code"])


def serve(control: socket.socket) -> None:
    """The server's loop; returns when the harness is gone."""
    for module in _MODULES.values():
        importlib.import_module(module)
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        sys.exit("error: a library has started threads on import; pods cannot be forked")
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    os.set_blocking(wake_read, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    control.send(b"ready")
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    selector.register(wake_read, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is control:
                message, descriptors, _, _ = socket.recv_fds(control, _MAX_MESSAGE_BYTES, 1)
                if not message:
                    return
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    selector.close()
                    for descriptor in (control.fileno(), wake_read, wake_write):
                        os.close(descriptor)
                    _become(**json.loads(message), stdout=descriptors[0])
                os.close(descriptors[0])
                control.send(json.dumps({"pid": pid}).encode())
            else:
                os.read(wake_read, 4096)
        _report_ended(control)


def _report_ended(control: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        control.send(json.dumps({"pid": pid, "code": os.waitstatus_to_exitcode(status)}).encode())


def _become(command: list[str], *, is_slow: bool, stdout: int) -> None:
    """Runs the command in this forked process, and ends it."""
    code = 70
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.dup2(stdout, 1)
        os.dup2(stdout, 2)
        os.close(stdout)
        if "LD_PRELOAD" in os.environ:
            child_faults.jump_on_signals()
        child_faults.stop_engine_on_signal()
        if is_slow:
            child_faults.read_model_slowly()
        sys.argv = command
        importlib.import_module(_MODULES[Path(command[0]).name]).main()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
