"""Hashes of mapped files do not depend on who finds them."""

from pathlib import Path

import numpy as np
import pytest

from soapstone.native import files
from soapstone.native.files import MappedFile


@pytest.mark.parametrize("size", [1, 4096, 4097, 50_000])
def test_a_digest_is_of_the_bytes_alone(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_PIECE", 4096)
    path, content = tmp_path / "x.onnx", np.arange(size, dtype=np.uint8)
    content.tofile(path)
    first = MappedFile.of(path).digest(1)
    assert {MappedFile.of(path).digest(threads) for threads in (2, 3, 64)} == {first}
    for place in {0, size // 2, size - 1}:
        changed = content.copy()
        changed[place] ^= 1
        changed.tofile(tmp_path / "y.onnx")
        assert MappedFile.of(tmp_path / "y.onnx").digest(2) != first
