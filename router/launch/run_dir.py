"""The run directory of a fleet: where its files lie, and that only one fleet uses it at a time.

Paths only: what is in the files is known by those who write them.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from kvindex.foundation.errors import ConfigError, DependencyError

# A Unix socket's path must fit into 108 bytes, and ours get names of up to 40.
_MAX_SOCKET_DIR_BYTES = 64


class RunDirectory:
    """The files below one `--run-dir`; `path` is absolute."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()
        self._lock_fd: int | None = None

    @property
    def fleet_file(self) -> Path:
        """What other programs read to find the fleet."""
        return self.path / "fleet.json"

    @property
    def secrets_file(self) -> Path:
        """Secrets that outlive a run."""
        return self.path / "secrets.json"

    @property
    def redis_dir(self) -> Path:
        """Data of the embedded Redis."""
        return self.path / "redis"

    @property
    def socket_dir(self) -> Path:
        """Where Unix sockets go: below the run directory if the path is short enough for one."""
        inside = self.path / "sockets"
        if len(os.fsencode(inside)) <= _MAX_SOCKET_DIR_BYTES:
            return inside
        digest = hashlib.sha256(os.fsencode(self.path)).hexdigest()[:12]
        return Path(tempfile.gettempdir()) / f"prefixfleet-{os.getuid()}-{digest}"

    def log_file(self, process: str) -> Path:
        """The log of one process."""
        return self.path / "logs" / f"{process}.log"

    def spec_file(self, process: str) -> Path:
        """The settings that one child is started with; it holds secrets."""
        return self.path / "specs" / f"{process}.json"

    @property
    def gateway_socket_dir(self) -> Path:
        """Where each process of the gateway has a socket."""
        return self.socket_dir / "gateway"

    @property
    def control_socket(self) -> Path:
        """Where `up` is told what to change while it runs."""
        return self.socket_dir / "control.sock"

    def url_file(self, process: str) -> Path:
        """Where a process whose address is settled elsewhere notes its URL."""
        return self.path / "specs" / f"{process}.url"

    def create(self) -> None:
        """Make the folders, private to this user; raise ConfigError when that cannot be."""
        try:
            for folder in (self.path, self.redis_dir):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for file in (self.log_file(""), self.spec_file("")):
                file.parent.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot use {self.path} as run directory: {error.strerror}; choose another with "
                "--run-dir"
            ) from None

    def lock(self) -> None:
        """Claim the directory until `unlock` or the end of this process.

        Raises DependencyError when another fleet runs in it; a lock of a dead process is none.
        """
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            pid = os.read(fd, 32).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            raise DependencyError(
                f"a fleet already runs in {self.path} (pid {pid}); stop it with `prefixfleet down "
                f"--run-dir {self.path}`, or choose another --run-dir"
            ) from None
        os.ftruncate(fd, 0)
        os.write(fd, str(os.getpid()).encode())
        self._lock_fd = fd

    def unlock(self) -> None:
        """Give the directory free. Idempotent."""
        if self._lock_fd is not None:
            os.ftruncate(self._lock_fd, 0)
            os.close(self._lock_fd)
            self._lock_fd = None

    def owner_pid(self) -> int | None:
        """Return the pid of the fleet that runs here, None when none does."""
        try:
            fd = os.open(self.path / "lock", os.O_RDWR)
        except OSError:
            return None
        try:
            pid = int(os.read(fd, 32) or b"0")
            # Trying the lock disturbs an `up` that wants it: only when a pid is noted at all.
            if pid:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return pid
        finally:
            os.close(fd)
        return None

    def create_socket_dir(self) -> None:
        """Make the folder of sockets, for as long as a fleet runs; empty it of a killed one's.

        Raises ConfigError when it belongs to somebody else.
        """
        self.remove_sockets()
        self.socket_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.socket_dir.stat().st_uid != os.getuid():
            raise ConfigError(f"{self.socket_dir} belongs to another user; remove it")
        self.gateway_socket_dir.mkdir(mode=0o700)

    def remove_sockets(self) -> None:
        """Remove what processes that were killed have left of their sockets."""
        shutil.rmtree(self.socket_dir, ignore_errors=True)

    def rotate_logs(self) -> None:
        """Keep the logs of the run before as `*.log.1`, and start afresh."""
        for log in self.log_file("").parent.glob("*.log"):
            log.replace(log.with_suffix(".log.1"))


def write_private(file: Path, data: bytes) -> None:
    """Replace `file` by `data` in one step, readable by this user alone (mode 0600)."""
    fd, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(fd, "wb") as stream:
            stream.write(data)
        os.replace(temporary, file)
    except BaseException:
        os.unlink(temporary)
        raise
