"""The limit of open files, which sockets share."""

from __future__ import annotations

import resource

#: Enough for every process; some programs close all descriptors up to the limit.
_ENOUGH = 65_536


def raise_descriptor_limit() -> int:
    """Raises the soft limit as far as the hard one allows, at most to 65,536; returns it. Login shells and
    service managers start processes with a soft limit of 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return _ENOUGH if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted
