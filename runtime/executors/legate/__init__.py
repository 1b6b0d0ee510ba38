"""The runtime under NVIDIA's Legate."""
