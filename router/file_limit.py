"""The limit on open files: a gateway needs two per request, and the usual default is too low.

It raises what it may and says what it may not; it knows no configuration.
"""

from __future__ import annotations

import logging
import resource

log = logging.getLogger("prefixfleet.router")

_OTHER_FILES = 128


def raise_file_limit(num_connections: int) -> None:
    """Raise the soft limit as far as the hard one allows; warn when that is too little."""
    wanted = num_connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        log.warning(
            "open files are limited to %d, %d would be needed for router.max_in_flight; "
            "raise `ulimit -Hn` or lower max_in_flight",
            allowed,
            wanted,
        )
