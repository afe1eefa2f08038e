"""Starts a command that cannot outlive its parent: `python -I -S tether.py SIGNAL PARENT_PID COMMAND...`.

Asks the kernel to send SIGNAL when the parent dies, however it dies (also by kill -9), then becomes the
command by exec: same pid, and the request survives the exec. A script of its own instead of a
`preexec_fn`, because that would run Python between fork and exec in a process that has gRPC's threads.
"""

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    death_signal, parent, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
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
