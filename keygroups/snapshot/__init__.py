"""Snapshots: the format (FORMAT.md), and how it is written, read, verified and compared."""
