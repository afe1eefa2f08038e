"""Becomes a command that dies with the process that started it: `python -I -S tether.py PARENT COMMAND...`.

A lookahead service killed with SIGKILL cannot stop its Redis server, and the next service could not open
the same files. The kernel is asked to kill us with our parent, then the command takes over by exec: same
pid, and the request survives. Elsewhere than on Linux the command simply runs.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # died before the request was made
            sys.exit(1)
    os.execv(command[0], command)
