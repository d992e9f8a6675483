"""Certificates of an authority of the test's own, as the files that a gateway is given."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import trustme

from router.config import TlsConfig


class Authority:
    """Issues certificates into a folder; `file` holds its own."""

    def __init__(self, folder: Path, *, name: str = "ca") -> None:
        self._ca = trustme.CA()
        self._folder = folder
        self.file = folder / f"{name}.pem"
        self._ca.cert_pem.write_to_path(self.file)

    def spoil(self, file: str) -> None:
        """Overwrite a file as a renewal that was cut off does."""
        Path(file).write_text("half of it")

    def issue(
        self, *names: str, file: str = "server", not_after: datetime | None = None
    ) -> TlsConfig:
        """Write (again) a certificate for some names, and its key."""
        issued = self._ca.issue_cert(*names, not_after=not_after)
        certificate, key = self._folder / f"{file}.crt", self._folder / f"{file}.key"
        for i, part in enumerate(issued.cert_chain_pems):
            part.write_to_path(certificate, append=i > 0)
        issued.private_key_pem.write_to_path(key)
        return TlsConfig(certificate=str(certificate), key=str(key))
