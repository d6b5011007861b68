"""Sizes in words."""

from __future__ import annotations


def size_text(nbytes: float) -> str:
    """Bytes in the unit, of powers of 1024, that keeps the number readable: ``12 B``, ``3.4 MiB``, ``8.6 TiB``."""
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        nbytes /= 1024
        if nbytes < 1023.95 or unit == "TiB":  # what would be rounded to 1024.0 goes on to the next
            break
    return f"{nbytes:.1f} {unit}"
