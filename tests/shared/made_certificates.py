"""Certificate authorities and certificates for tests, as PEM files."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme


class Authority:
    """A CA of its own; its files lie in `folder`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._ca = folder, trustme.CA()
        self.path = str(folder / "ca.pem")
        self._ca.cert_pem.write_to_path(self.path)

    def issue(self, stem: str, *names: str, expired: bool = False) -> tuple[str, str]:
        """Paths of a new certificate, made out to `names`, and of its key; files of that stem are replaced."""
        end = datetime.now(UTC) - timedelta(days=1) if expired else None
        made = self._ca.issue_cert(*(names or ("127.0.0.1", "localhost")), not_after=end)
        cert, key = self._folder / f"{stem}.pem", self._folder / f"{stem}.key"
        for path, content in ((cert, made.cert_chain_pems[0].bytes()), (key, made.private_key_pem.bytes())):
            new = path.with_suffix(f"{path.suffix}.new")
            new.write_bytes(content)
            new.rename(path)
        return str(cert), str(key)
