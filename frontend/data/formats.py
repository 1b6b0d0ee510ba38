"""Data in files of other libraries: folders of images, tables, texts.

Pillow, PyArrow and Tokenizers are imported where they are first needed, and named where they are
not installed.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from importlib import import_module
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from soapstone.errors import DataError, hint
from soapstone.files import NO_TEXT, check_file
from soapstone.frontend.arguments import count
from soapstone.ir.tensor import Array

_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm"}


def needed(module: str, what: str, extra: str) -> Any:
    """Return a module that an extra installs.

    Raises:
        DataError: it is not installed; says what needs it, and how it is had.
    """
    try:
        return import_module(module)
    except ImportError:
        name = module.partition(".")[0]
        raise DataError(f"{what} need {name}: pip install 'soapstone[{extra}]'") from None


class ImageFolder:
    """The images of a folder that has a folder for each class, for `Samples`.

    Items are (image, class): (c, h, w) float32 in [0, 1], and the number of the class by name.

    Args:
        path: of the folder.
        size: the height and width that images are resized to; by default they keep their own, which
            must then be equal.
        grey: one channel instead of red, green and blue.

    Attributes:
        classes: the names of the folders, in order. labels: the class of each image, (images,).

    Raises:
        DataError: no folder, no images, or Pillow is not installed; when read, a file that is none.
    """

    def __init__(
        self, path: str | Path, size: tuple[int, int] | None = None, *, grey: bool = False
    ) -> None:
        root = Path(path)
        if not root.is_dir():
            raise DataError(f"images {str(root)!r}: no such folder")
        self._pillow = needed("PIL.Image", "folders of images", "images")
        self.classes = tuple(sorted(each.name for each in root.iterdir() if each.is_dir()))
        self._size = None if size is None else tuple(count("images: size", each) for each in size)
        self._mode = "L" if grey else "RGB"
        found = [
            (file, number)
            for number, name in enumerate(self.classes)
            for file in sorted((root / name).rglob("*"))
            if file.suffix.lower() in _SUFFIXES
        ]
        if not found:
            raise DataError(
                f"images {str(root)!r}: none found in {len(self.classes)} folders of classes;"
                " files such as CLASS/1.png needed"
            )
        self._files = [file for file, _ in found]
        self.labels = np.array([number for _, number in found], np.int32)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Array, np.int32]:
        """Return the image of an index, and its class."""
        file = self._files[index]
        try:
            with self._pillow.open(file) as image:
                pixels = self._pixels(image)
        except Exception as error:  # of Pillow, whose readers raise whatever a file makes of them
            raise DataError(f"image {str(file)!r}: {error}") from None
        return pixels, self.labels[index]

    def _pixels(self, image: Any) -> Array:
        """Return an image as (c, h, w) float32 in [0, 1].

        Raises:
            DataError: pixels of more than 16 bits, of which nothing says how white the whitest is.
        """
        white, grey = 255, image.mode.startswith(("I", "F"))  # 16 bits or more: Pillow would clip
        if grey:
            numbers, white = np.asarray(image, np.float32), 65535
            if image.mode == "F" or numbers.min() < 0 or numbers.max() > white:
                raise DataError("pixels of 32 bits found; 8 or 16 needed")
            image = self._pillow.fromarray(numbers)
        else:
            image = image.convert(self._mode)
        if self._size is not None and image.size != self._size[::-1]:
            image = image.resize(self._size[::-1], self._pillow.Resampling.BILINEAR)
        pixels = np.asarray(image, np.float32) / np.float32(white)
        if pixels.ndim == 3:
            return pixels.transpose(2, 0, 1)
        return np.repeat(pixels[None], 3, 0) if self._mode == "RGB" else pixels[None]


@dataclass(frozen=True, eq=False)
class Table:
    """The columns of a table as arrays.

    Attributes:
        x: columns of numbers, (rows, columns) float32. ids: those of texts by name, (rows,) int32,
            a number for each text. y: the labels: class numbers of texts, else the numbers; None
            without a label.
        columns: the names of x's. texts: the texts of a column, or of the label, by name: that of
            number 0 first.
    """

    x: Array
    y: Array | None
    ids: Mapping[str, Array]
    columns: tuple[str, ...]
    texts: Mapping[str, tuple[str, ...]]


def read_table(
    path: str | Path,
    label: str | None = None,
    *,
    columns: Sequence[str] | None = None,
    missing: float | None = None,
    like: Table | None = None,
) -> Table:
    """Return the columns of a .csv file, whose first line has their names, or of a .parquet file.

    Args:
        label: the column of the labels.
        columns: those to read; by default all, or those of `like`, in its order.
        missing: the number that stands for one that is not there, or NaN; by default that is
            refused.
        like: a table whose columns are the same, and whose texts get the numbers that they have
            there, as test data need.

    Raises:
        DataError: a file that is none, a column that there is not or is there twice, a number that
            is missing, or a text that `like` does not have; names the column and the row.
    """
    where = Path(path)
    check_file(where, f"table {str(where)!r}", DataError)
    readers = {".csv": _csv, ".parquet": _parquet}
    if where.suffix.lower() not in readers:
        raise DataError(
            f"table {str(where)!r}: suffix {where.suffix!r} found, .csv or .parquet needed"
        )
    found = readers[where.suffix.lower()](where)
    if columns is None and like is not None:
        columns = (*like.columns, *like.ids)
    wanted = list(found) if columns is None else [*columns]
    for name in [*wanted, *([] if label is None else [label])]:
        if name not in found:
            raise DataError(
                f"table {str(where)!r}: column {name!r} is not there; there are"
                f" {', '.join(found)}{hint(name, found)}"
            )
    numbers, ids, texts, y = {}, {}, {}, None
    for name in dict.fromkeys([*wanted, *([] if label is None else [label])]):
        what = f"table {str(where)!r}: column {name!r}"
        known = None if like is None else like.texts.get(name)
        array, made = _column(what, found[name], missing, known, name == label)
        if made is not None and like is not None and name in like.columns:
            raise DataError(f"{what}: texts found, such as {made[-1]!r}; numbers needed, as before")
        if made is not None:
            texts[name] = made
        if name == label:
            y = array
        elif made is None:
            numbers[name] = array
        else:
            ids[name] = array
    rows = len(next(iter(found.values()), ()))
    x = np.stack([*numbers.values()], 1) if numbers else np.zeros((rows, 0), np.float32)
    return Table(x.astype(np.float32), y, ids, tuple(numbers), texts)


def _csv(path: Path) -> dict[str, list[Any]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            names, *rows = [line for line in csv.reader(stream) if line] or [[]]
    except UnicodeDecodeError:
        raise DataError(f"table {str(path)!r}: {NO_TEXT}") from None
    except csv.Error as error:
        raise DataError(f"table {str(path)!r}: {error}; lines with commas needed") from None
    if not names:
        raise DataError(f"table {str(path)!r}: it is empty; a line of names needed")
    _once(path, names)
    for number, row in enumerate(rows):
        if len(row) != len(names):
            raise DataError(
                f"table {str(path)!r}: row {number}: {len(row)} fields found, {len(names)} needed"
            )
    return {name: [row[place] for row in rows] for place, name in enumerate(names)}


def _once(path: Path, names: Sequence[str]) -> None:
    for place, name in enumerate(names):
        if name in names[:place]:
            raise DataError(f"table {str(path)!r}: column {name!r} is there twice; once needed")


def _parquet(path: Path) -> dict[str, list[Any]]:
    reader = needed("pyarrow.parquet", "tables in .parquet files", "tables")
    try:
        table = reader.read_table(path)
    except (ValueError, OSError) as error:
        raise DataError(f"table {str(path)!r}: {' '.join(str(error).split())}") from None
    _once(path, table.column_names)
    return {name: table.column(name).to_pylist() for name in table.column_names}


def _number(value: Any) -> float | None:
    """Return a number, None where there is none: nothing, or NaN.

    Raises:
        ValueError: it is a text, such as 1_000 too, which Python would take for a number.
    """
    if value is None or value == "":
        return None
    if isinstance(value, str) and "_" in value:
        raise ValueError(value)
    found = float(value)
    return None if math.isnan(found) else found


def _column(
    what: str,
    values: list[Any],
    missing: float | None,
    known: tuple[str, ...] | None,
    label: bool,
) -> tuple[Array, tuple[str, ...] | None]:
    """Return a column as numbers, and the texts that these stand for if it is one of texts."""
    for row, value in enumerate(values):
        if not isinstance(value, (str, Real, Decimal, type(None))):
            raise DataError(
                f"{what}: {type(value).__name__} at row {row}; a number or a text needed"
            )
    if known is None:
        given: list[float | None] | None
        try:
            given = [_number(value) for value in values]
        except ValueError:
            given = None
        if given is not None:
            absent = [row for row, value in enumerate(given) if value is None]
            if absent and (missing is None or label):
                raise DataError(f"{what}: no number at row {absent[0]}; one needed, or missing=…")
            array = np.array([missing if each is None else each for each in given], np.float64)
            whole = label and array.size and bool((array == np.round(array)).all())
            return array.astype(np.int64 if whole else np.float32), None
    words = ["" if value is None else str(value) for value in values]
    texts = tuple(sorted(set(words))) if known is None else known
    places = {text: number for number, text in enumerate(texts)}
    for row, word in enumerate(words):
        if word not in places:
            raise DataError(
                f"{what}: {word!r} at row {row} is unknown; one of {', '.join(texts[:8])} needed"
                f"{hint(word, texts)}"
            )
    return np.array([places[word] for word in words], np.int32), texts


def token_ids(
    texts: Sequence[str],
    tokenizer: Any,
    length: int,
    *,
    padding: int = 0,
) -> tuple[Array, Array]:
    """Return the tokens of texts, (texts, length) int32, and how many each has, (texts,) int32.

    Args:
        tokenizer: one of the library Tokenizers, the path of its `tokenizer.json`, or a function
            from a text to its ids.
        length: what longer texts are cut to.
        padding: the id after the last token of shorter ones.

    Raises:
        DataError: one text, a file that is no tokenizer, or Tokenizers is not installed.
    """
    most = count("token_ids: length", length, 1, DataError)
    if isinstance(texts, str):
        raise DataError("token_ids: texts: one text found, a list of texts needed")
    if isinstance(tokenizer, str | Path):
        library = needed("tokenizers", "tokenizers of files", "text")
        path = str(tokenizer)
        try:
            tokenizer = library.Tokenizer.from_file(path)
        except Exception as error:  # of the library, whose errors have no class of their own
            raise DataError(f"tokenizer {path!r}: {' '.join(str(error).split())}") from None
    many: Callable[[Sequence[str]], list[Any]] | None = getattr(tokenizer, "encode_batch", None)
    if many is not None:
        # What the tokenizer pads itself, by settings of its file, is no token.
        found = [
            [token for token, there in zip(each.ids, each.attention_mask) if there]
            for each in many(list(texts))
        ]
    elif callable(tokenizer):
        found = [list(tokenizer(text)) for text in texts]
    else:
        raise DataError(
            f"token_ids: tokenizer {tokenizer!r} found, a tokenizer or a function needed"
        )
    ids = np.full((len(found), most), padding, np.int32)
    for row, each in enumerate(found):
        ids[row, : min(len(each), most)] = each[:most]
    return ids, np.array([min(len(each), most) for each in found], np.int32)
