"""The on-disk format: reading, converting and describing containers."""
