"""SHA-256 of files, as they are written and afterwards. Without megatron-core, whose import takes seconds."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

import torch


class HashedFile:
    """A file as torch.save sees it, which hashes what goes into it."""

    def __init__(self, file: Any) -> None:
        self.file, self.sha256 = file, hashlib.sha256()
        self.fault: OSError | None = None

    def add(self, data: torch.Tensor | io.BytesIO) -> None:
        """Write a tensor by torch.save, or bytes as they are. Raises OSError if the file cannot be written."""
        if isinstance(data, io.BytesIO):
            self.write(data.getbuffer())
            return
        data = data.detach().cpu()
        if data.untyped_storage().nbytes() != data.nbytes:  # torch.save writes a view's whole storage
            data = data.clone()
        try:
            torch.save(data, self)
        except Exception as error:  # torch reports where its archive broke off instead of the disk's reason
            raise self.fault or error from error

    def write(self, data: Any) -> int:
        try:
            self.file.write(data)
        except OSError as error:
            self.fault = error
            raise
        self.sha256.update(data)
        return len(data)

    def flush(self) -> None:
        self.file.flush()


def sha256(path: Path) -> str:
    """A file's SHA-256 in hex. Raises OSError if it cannot be read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
