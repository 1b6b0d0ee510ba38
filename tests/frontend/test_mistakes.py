"""What beginners do wrong: each mistake is one clear sentence, before the first step if it can be.

The tables are in `helpers/mistakes`. No message speaks of Python's own insides.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from helpers.mistakes.callbacks import CALLBACKS
from helpers.mistakes.compiling import COMPILING
from helpers.mistakes.files import FILES
from helpers.mistakes.fitting import FITTING
from helpers.mistakes.layers import LAYERS
from helpers.mistakes.objectives import OBJECTIVES
from helpers.mistakes.running import RUNNING

TABLES = (FITTING, RUNNING, OBJECTIVES, COMPILING, CALLBACKS, LAYERS, FILES)


@pytest.mark.parametrize(
    ("mistake", "said"), [(each[0], each[1:]) for table in TABLES for each in table]
)
@pytest.mark.filterwarnings("ignore")
def test_a_mistake_is_one_clear_sentence(
    mistake: Any, said: tuple[str, ...], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, TypeError, AttributeError, OSError, RuntimeError)) as raised:
        mistake()
    text = str(raised.value)
    for part in said:
        assert part in text
    assert "\n" not in text and len(text) < 400
    assert not re.search(r"Errno|object at 0x|NoneType object|positional argument|__init__", text)


def test_the_tables_are_long() -> None:
    assert sum(map(len, TABLES)) >= 263
