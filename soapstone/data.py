"""Data sets that are read by threads, and files of other libraries (docs/data.md)."""

from soapstone.frontend.data.buckets import Buckets, padded
from soapstone.frontend.data.formats import ImageFolder, Table, read_table, token_ids
from soapstone.frontend.data.samples import Samples, in_turn, random_crop, random_flip

__all__ = [
    "Buckets",
    "ImageFolder",
    "Samples",
    "Table",
    "in_turn",
    "padded",
    "random_crop",
    "random_flip",
    "read_table",
    "token_ids",
]
