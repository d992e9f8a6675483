"""`fleet.json`: how other programs find a running fleet, its processes and its keys.

Written by `up` alone, with mode 0600, and rewritten whenever a process is started again. After the
end it stays, with `ready` false and no pids, because it holds the only clear copy of the keys.
"""

from __future__ import annotations

import msgspec

from kvindex.foundation.errors import ConfigError, DependencyError
from kvindex.foundation.tls import SYSTEM, Trust
from router.launch.run_dir import RunDirectory, write_private


class RedisEntry(msgspec.Struct, kw_only=True):
    """The Redis in use; `pid` is set when it is the fleet's own."""

    url: str
    embedded: bool
    pid: int | None = None


class ReplicaEntry(msgspec.Struct, kw_only=True):
    """One replica process."""

    id: str
    url: str
    pid: int | None = None


class TlsEntry(msgspec.Struct, kw_only=True):
    """The gateway's certificate, and a name that it is for: that of its listener if it is one."""

    certificate: str
    name: str


class GatewayEntry(msgspec.Struct, kw_only=True):
    """The gateway's first process, and the others of it by name."""

    pid: int | None = None
    others: dict[str, int | None] = {}

    @property
    def pids(self) -> dict[str, int | None]:
        """Every process of it by name."""
        return {"gateway": self.pid, **self.others}


class FleetFile(msgspec.Struct, kw_only=True):
    """The whole file; `keys` maps a tenant to its API key in clear, `logs` a process to its log.

    `pid` is that of the supervisor, None when the fleet is not running.
    """

    url: str
    admin_url: str
    admin_key: str
    keys: dict[str, str]
    model: str
    model_folder: str
    dtype: str
    run_dir: str
    redis: RedisEntry
    replicas: list[ReplicaEntry]
    gateway: GatewayEntry
    logs: dict[str, str]
    tls: TlsEntry | None = None
    pid: int | None = None
    ready: bool = False

    @property
    def trust(self) -> Trust:
        """Whom to trust at `url` and `admin_url`: the gateway's own certificate."""
        return SYSTEM if self.tls is None else Trust(certificate=self.tls.certificate)

    def set_pid(self, process: str, pid: int | None) -> None:
        """Note the pid of a process: `gateway`, `gateway-1`, …, `redis` or a replica id."""
        if process == "gateway":
            self.gateway.pid = pid
        elif process in self.gateway.others:
            self.gateway.others[process] = pid
        elif process == "redis":
            self.redis.pid = pid
        else:
            for replica in self.replicas:
                if replica.id == process:
                    replica.pid = pid

    def set_url(self, replica_id: str, url: str) -> None:
        """Note where a replica is that was placed elsewhere than planned."""
        for replica in self.replicas:
            if replica.id == replica_id:
                replica.url = url

    def clear(self) -> None:
        """Note that nothing runs any more."""
        self.ready, self.pid = False, None
        replicas = [replica.id for replica in self.replicas]
        for process in (*self.gateway.pids, "redis", *replicas):
            self.set_pid(process, None)


def write_fleet_file(run_dir: RunDirectory, fleet: FleetFile) -> None:
    """Replace `fleet.json` in one step."""
    write_private(run_dir.fleet_file, msgspec.json.format(msgspec.json.encode(fleet)) + b"\n")


def read_fleet_file(run_dir: RunDirectory) -> FleetFile | None:
    """Return what `fleet.json` says, None when there is none; ConfigError when it is damaged."""
    try:
        data = run_dir.fleet_file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{run_dir.fleet_file}: {error.strerror}") from None
    try:
        return msgspec.json.decode(data, type=FleetFile)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{run_dir.fleet_file}: {error}; remove it, new keys are made") from None


def require_running(run_dir: RunDirectory) -> FleetFile:
    """Return the file of a fleet that is running; DependencyError when none is."""
    fleet = read_fleet_file(run_dir)
    if fleet is None or run_dir.owner_pid() is None:
        raise DependencyError(
            f"no fleet runs in {run_dir.path}; start one with `prefixfleet up`, or name its "
            "directory with --run-dir"
        )
    return fleet
