"""Data sets of prompts: reading and checking them, and the position of a run in them. Imports no torch."""

from __future__ import annotations

from .cursor import Cursor, check_batch, epoch_order
from .sources import Record, check_overlap, load

__all__ = ["Cursor", "Record", "check_batch", "check_overlap", "epoch_order", "load"]
