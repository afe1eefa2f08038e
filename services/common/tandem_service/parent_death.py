"""Starts a command that ends with its parent: `python -I -S parent_death.py SIGNAL PARENT_PID COMMAND...`.

A parent that is killed with SIGKILL cannot stop its children, such as the pods of `tandem up`. This script
asks the kernel (PR_SET_PDEATHSIG) to send SIGNAL when the parent dies, then replaces itself with the
command; the request survives the exec and the pid stays the same. It is a script rather than a
`preexec_fn`, because that would run Python between fork and exec in a process with gRPC's threads. On
systems other than Linux it only starts the command.

    subprocess.Popen([*parent_death.command_prefix(signal.SIGKILL), "redis-server", ...])
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def command_prefix(death_signal: signal.Signals) -> tuple[str, ...]:
    """Put before a command, this makes it end with the calling process."""
    return (sys.executable, "-I", "-S", __file__, str(int(death_signal)), str(os.getpid()))


def main() -> None:
    death_signal, parent, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, death_signal, 0, 0, 0) != 0:
            sys.exit(f"prctl(PR_SET_PDEATHSIG) failed: {os.strerror(ctypes.get_errno())}")
        # If the parent died before the prctl, no signal comes.
        if os.getppid() != parent:
            sys.exit(0)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"cannot start {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
