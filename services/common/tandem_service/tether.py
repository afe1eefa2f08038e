"""Starts a command that cannot outlive its parent: `python -I -S tether.py SIGNAL PARENT_PID COMMAND...`.

Pods tied to `tandem up`, and a lookahead service's Redis server tied to the service: killed with SIGKILL
itself, a parent could not stop them. The kernel is asked to send SIGNAL when the parent dies, however it
dies; then the command takes over by exec: same pid, and the request survives the exec. A script of its own
instead of a `preexec_fn`, because that would run Python between fork and exec in a process that has gRPC's
threads. Elsewhere than on Linux the command simply runs.

    subprocess.Popen([*tether.prefix(signal.SIGKILL), "redis-server", ...])
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def prefix(death_signal: signal.Signals) -> tuple[str, ...]:
    """What goes before a command to tie it to the calling process."""
    return (sys.executable, "-I", "-S", __file__, str(int(death_signal)), str(os.getpid()))


def main() -> None:
    death_signal, parent, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, death_signal, 0, 0, 0) != 0:
            sys.exit(f"prctl(PR_SET_PDEATHSIG) failed: {os.strerror(ctypes.get_errno())}")
        # The parent may have died before the request was made; then nobody would tell us.
        if os.getppid() != parent:
            sys.exit(0)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"cannot start {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
