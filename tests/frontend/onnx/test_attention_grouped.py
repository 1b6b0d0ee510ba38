"""Attention of decoders of com.microsoft against ONNX Runtime, beside that in `test_contrib.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto
from test_attention_microsoft import file_of

import soapstone
from soapstone.frontend.onnx import OnnxError
from soapstone.ir.tensor import Array

theirs = pytest.importorskip("onnxruntime", reason="pip install soapstone[test]")


def ours(file: bytes, feeds: dict[str, Array]) -> list[Array]:
    with soapstone.InferenceSession(soapstone.from_onnx(file)) as session:
        return list(session.run(feeds).values())


def in_one_buffer(file: bytes, feeds: dict[str, Array], **shared: str) -> list[Array]:
    """Return ONNX Runtime's results where some are written to the memory of inputs."""
    session = theirs.InferenceSession(file, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    values = {name: theirs.OrtValue.ortvalue_from_numpy(array) for name, array in feeds.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for each in session.get_outputs():
        if each.name in shared:
            binding.bind_ortvalue_output(each.name, values[shared[each.name]])
        else:
            binding.bind_output(each.name)
    session.run_with_iobinding(binding)
    return [value.numpy() for value in binding.get_outputs()]


HEADS, KV_HEADS, WIDTH, BLOCK, BLOCKS = 4, 2, 16, 16, 4


def drawn(random: np.random.Generator, *shape: int) -> Array:
    return random.standard_normal(shape).astype(np.float32)


def sparse(
    random: np.random.Generator, lengths: list[int], count: int, layouts: int, packed: bool
) -> dict[str, Array | None]:
    """Return inputs of sparse attention of `count` tokens a sample, the last of `lengths`."""
    samples, rows = len(lengths), BLOCK * BLOCKS
    shape = (layouts, BLOCKS, BLOCKS)
    seen = np.tril(random.integers(0, 2, shape) | np.eye(BLOCKS, dtype=int))
    ends = np.pad(np.cumsum(seen.sum(axis=2), axis=1), ((0, 0), (1, 0))).astype(np.int32)
    columns = np.full((layouts, ends.max()), -1, np.int32)
    for layout, blocks in enumerate(seen):
        columns[layout, : ends[layout, -1]] = np.nonzero(blocks)[1]
    parts = [drawn(random, samples, count, h * WIDTH) for h in (HEADS, KV_HEADS, KV_HEADS)]
    angles = np.arange(rows)[:, None] * 0.7 ** np.arange(WIDTH // 2)
    return {
        "q": np.concatenate(parts, axis=2) if packed else parts[0],
        "k": None if packed else parts[1],
        "v": None if packed else parts[2],
        "past_k": drawn(random, samples, KV_HEADS, rows, WIDTH),
        "past_v": drawn(random, samples, KV_HEADS, rows, WIDTH),
        "ROWS": ends,
        "COLUMNS": columns,
        "total": np.array([max(lengths)], np.int32),
        "lengths": np.array(lengths, np.int32),
        "COS": np.cos(angles).astype(np.float32),
        "SIN": np.sin(angles).astype(np.float32),
    }


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"do_rotary": 1, "rotary_interleaved": 1, "scale": 0.3}], ids=str
)
@pytest.mark.parametrize(
    ("lengths", "count", "layouts"), [([40, 33], 40, 2), ([30, 64], 1, 4), ([50], 5, 1)]
)
def test_attention_over_blocks_of_keys(
    lengths: list[int], count: int, layouts: int, options: dict[str, Any], packed: bool
) -> None:
    """Each sample by itself: of several lengths ONNX Runtime adds up memory that it never wrote."""
    inputs = sparse(np.random.default_rng(layouts), lengths, count, layouts, packed)
    outputs = dict.fromkeys(("y", "k_now", "v_now"), TensorProto.FLOAT)
    heads = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, "sparse_block_size": BLOCK}
    found = ours(*file_of("SparseAttention", inputs, outputs, **heads, **options))
    near = {"rtol": 1e-4, "atol": 1e-5}
    for sample, length in enumerate(lengths):
        tokens = length if count == max(lengths) else count
        own = dict(inputs)
        for name, array in inputs.items():
            if array is not None and not name.isupper() and name != "total":
                part = array[sample : sample + 1]
                own[name] = (part[:, :tokens] if name in ("q", "k", "v") else part).copy()
        own["total"] = own["lengths"]
        file, feeds = file_of("SparseAttention", own, outputs, **heads, **options)
        wanted = in_one_buffer(file, feeds, k_now="past_k", v_now="past_v")
        np.testing.assert_allclose(found[0][sample, :tokens], wanted[0][0], **near)
        for ours_, theirs_ in zip(found[1:], wanted[1:], strict=True):
            np.testing.assert_allclose(ours_[sample, :, :length], theirs_[0, :, :length], **near)


@pytest.mark.parametrize("case", ["cache", "packed", "encoder"])
@pytest.mark.parametrize("extras", [(), ("bias",), ("mask", "scores"), ("bias", "mask")], ids=str)
def test_attention_of_one_token(case: str, extras: tuple[str, ...]) -> None:
    random = np.random.default_rng(len(extras))
    samples, heads, width, room, before = 2, 3, 8, 6, 4
    hidden, keys = heads * width, 5
    cache = (samples, heads, keys if case == "encoder" else room, width)
    parts = [drawn(random, samples, 1, hidden) for _ in range(3)]
    by_head = [drawn(random, *cache) for _ in range(2)]
    mask = random.integers(0, 2, (samples, keys)).astype(np.int32)
    mask[:, 0] = 1
    inputs: dict[str, Array | None] = {
        "q": np.concatenate(parts, axis=2) if case == "packed" else parts[0],
        "k": None if case == "packed" else by_head[0] if case == "encoder" else parts[1],
        "v": None if case == "packed" else by_head[1] if case == "encoder" else parts[2],
        "mask": mask if "mask" in extras else None,
        "scores": drawn(random, 1, heads, 1, keys) if "scores" in extras else None,
        "past_k": None if case == "encoder" else by_head[0],
        "past_v": None if case == "encoder" else by_head[1],
        "before": None if case == "encoder" else np.array([before], np.int32),
        "beams": None,
        "from": None,
        "B": drawn(random, 3 * hidden) if "bias" in extras else None,
    }
    if case == "encoder":
        inputs["scores"] = None
    outputs = {"y": TensorProto.FLOAT}
    options: dict[str, Any] = {"num_heads": heads, "mask_filter_value": -500.0}
    if case != "encoder":
        outputs |= {"k_now": TensorProto.FLOAT, "v_now": TensorProto.FLOAT}
        options["past_present_share_buffer"] = 1
    found = ours(*file_of("DecoderMaskedMultiHeadAttention", inputs, outputs, **options))
    if case == "packed":  # of which ONNX Runtime's kernel goes past the end
        inputs |= dict(zip("qkv", parts, strict=True))
    file, feeds = file_of("DecoderMaskedMultiHeadAttention", inputs, outputs, **options)
    shared = {} if case == "encoder" else {"k_now": "past_k", "v_now": "past_v"}
    for made, wanted in zip(found, in_one_buffer(file, feeds, **shared), strict=True):
        np.testing.assert_allclose(made, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_of_one_token_with_its_own_projection(masked: bool) -> None:
    """Which ONNX Runtime has on GPUs alone: as its attention of any number of tokens."""
    random = np.random.default_rng(int(masked))
    samples, heads, width, before, features = 2, 3, 8, 4, 5
    hidden, rows = heads * width, before + 1
    mask = random.integers(0, 2, (samples, rows)).astype(np.int32)
    mask[:, 0] = 1
    inputs: dict[str, Array | None] = {
        "x": drawn(random, samples, 1, features),
        "W": drawn(random, features, 3 * hidden),
        "B": drawn(random, 3 * hidden),
        "mask": mask if masked else None,
        "past": drawn(random, 2, samples, heads, before, width),
        "scores": None,
    }
    outputs = {"y": TensorProto.FLOAT, "now": TensorProto.FLOAT}
    file, feeds = file_of("Attention", inputs, outputs, num_heads=heads)
    session = theirs.InferenceSession(file, providers=["CPUExecutionProvider"])
    more = {"BEFORE": np.array([before], np.int32), "BEAMS": np.array([1], np.int32)}
    kind, given = "DecoderMaskedSelfAttention", {**inputs, **more}
    found = ours(*file_of(kind, given, outputs, num_heads=heads))
    for made, wanted in zip(found, session.run(None, feeds), strict=True):
        np.testing.assert_allclose(made, wanted, rtol=1e-4, atol=1e-5)
    given["BEAMS"] = np.array([4], np.int32)
    with pytest.raises(OnnxError, match="beam_width"):
        ours(*file_of(kind, given, outputs, num_heads=heads))


@pytest.mark.parametrize(("window", "capacity"), [(4, 4), (4, 7), (1, 3)])
@pytest.mark.parametrize("steps", [(3, 1, 1, 1, 1, 1, 1), (9, 1, 5, 1, 2), (1,) * 12], ids=str)
def test_a_cache_that_keeps_the_last_tokens(
    window: int, capacity: int, steps: tuple[int, ...]
) -> None:
    """Step by step with what the last step left: rows beyond those that it holds are anything."""
    random = np.random.default_rng(capacity)
    angles = np.arange(32)[:, None] * 0.7 ** np.arange(WIDTH // 2)
    tables = {"COS": np.cos(angles).astype(np.float32), "SIN": np.sin(angles).astype(np.float32)}
    outputs = dict.fromkeys(("y", "k_now", "v_now"), TensorProto.FLOAT)
    options = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, "do_rotary": 1}
    options |= {"local_window_size": window, "sliding_window_cache": 1}
    caches = [np.zeros((1, KV_HEADS, capacity, WIDTH), np.float32) for _ in range(2)]
    tokens = 0
    for count in steps:
        tokens += count
        parts = [drawn(random, 1, count, h * WIDTH) for h in (HEADS, KV_HEADS, KV_HEADS)]
        inputs = dict(zip(("q", "k", "v", "past_k", "past_v"), (*parts, *caches), strict=True))
        inputs["last"] = np.array([tokens - 1], np.int32)
        inputs["TOTAL"] = np.array([tokens], np.int32)
        file, feeds = file_of("GroupQueryAttention", inputs | tables, outputs, **options)
        session = theirs.InferenceSession(file, providers=["CPUExecutionProvider"])
        found, wanted = ours(file, feeds), session.run(None, feeds)
        step = capacity - window + 1
        held = min(tokens, tokens - step * -(-(tokens - capacity) // step))
        np.testing.assert_allclose(found[0], wanted[0], rtol=1e-4, atol=1e-5)
        caches = found[1:]
        for made, theirs_ in zip(caches, wanted[1:], strict=True):
            assert made.shape == theirs_.shape
            near = made[:, :, :held], theirs_[:, :, :held]
            np.testing.assert_allclose(*near, rtol=1e-5, atol=1e-6)


def test_a_cache_grows_up_to_its_window_and_drops_the_first_tokens_then() -> None:
    """From none: as attention over all tokens that has the window as its mask."""
    random, window = np.random.default_rng(3), 4
    outputs = dict.fromkeys(("y", "k_now", "v_now"), TensorProto.FLOAT)
    options = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, "local_window_size": window}
    caches = [[np.zeros((1, KV_HEADS, 0, WIDTH), np.float32)] * 2 for _ in range(2)]
    for tokens in range(1, 8):
        parts = [drawn(random, 1, 1, h * WIDTH) for h in (HEADS, KV_HEADS, KV_HEADS)]
        made = []
        for drops, held in enumerate(caches):
            inputs = dict(zip(("q", "k", "v", "past_k", "past_v"), (*parts, *held), strict=True))
            inputs["last"] = np.array([tokens - 1], np.int32)
            inputs["TOTAL"] = np.array([tokens], np.int32)
            given = {**options, "sliding_window_cache": drops}
            y, *caches[drops] = ours(*file_of("GroupQueryAttention", inputs, outputs, **given))
            assert caches[drops][0].shape[2] == (min(tokens, window) if drops else tokens)
            made.append(y)
        np.testing.assert_allclose(*made, rtol=1e-5, atol=1e-6)


def test_samples_of_a_cache_that_keeps_the_last_tokens_drop_theirs() -> None:
    """A prompt of several lengths, then a token each: as each sample does by itself."""
    random, lengths = np.random.default_rng(5), np.array([7, 3], np.int32)
    options = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, "local_window_size": 3}
    options["sliding_window_cache"] = 1
    outputs = dict.fromkeys(("y", "k_now", "v_now"), TensorProto.FLOAT)

    def both(count: int, caches: list[Array], last: Array, rows: slice) -> list[Array]:
        parts = [given[count][i][rows] for i in range(3)]
        inputs = dict(zip(("q", "k", "v", "past_k", "past_v"), (*parts, *caches), strict=True))
        inputs |= {"last": last[rows], "TOTAL": np.array([last[rows].max() + 1], np.int32)}
        return ours(*file_of("GroupQueryAttention", inputs, outputs, **options))

    heads = (HEADS, KV_HEADS, KV_HEADS)
    given = {count: [drawn(random, 2, count, h * WIDTH) for h in heads] for count in (7, 1)}
    empty = np.zeros((2, KV_HEADS, 4, WIDTH), np.float32)
    prompt = both(7, [empty, empty], lengths - 1, slice(None))
    later = both(1, prompt[1:], lengths, slice(None))
    for sample, length in enumerate(lengths):
        own = slice(sample, sample + 1)
        given[int(length)] = [each[:, :length] for each in given[7]]
        alone = both(int(length), [empty[own], empty[own]], lengths - 1, own)
        np.testing.assert_allclose(prompt[0][own, :length], alone[0], rtol=1e-4, atol=1e-5)
        alone = both(1, alone[1:], lengths, own)
        np.testing.assert_allclose(later[0][own], alone[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "said"),
    [({"local_window_size": -1}, "local_window_size -1"), ({"causal": 0}, "causal 0")],
)
def test_a_cache_of_no_window_is_refused(given: dict[str, int], said: str) -> None:
    random = np.random.default_rng(0)
    parts = [drawn(random, 1, 1, h * WIDTH) for h in (HEADS, KV_HEADS, KV_HEADS)]
    cache = np.zeros((1, KV_HEADS, 4, WIDTH), np.float32)
    inputs = dict(zip(("q", "k", "v", "past_k", "past_v"), (*parts, cache, cache), strict=True))
    inputs |= {"last": np.array([0], np.int32), "TOTAL": np.array([1], np.int32)}
    options = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, "local_window_size": 2}
    outputs = dict.fromkeys(("y", "k_now", "v_now"), TensorProto.FLOAT)
    options |= {"sliding_window_cache": 1} | given
    with pytest.raises(OnnxError, match=said):
        ours(*file_of("GroupQueryAttention", inputs, outputs, **options))


@pytest.mark.parametrize(("samples", "count", "before"), [(2, 1, 5), (1, 3, 4), (2, 3, 0)])
@pytest.mark.parametrize("kind", ["PER_TENSOR", "PER_CHANNEL"])
@pytest.mark.parametrize(("bits", "dtype"), [(8, np.int8), (4, np.uint8)])
def test_caches_of_few_bits(
    bits: int, dtype: type, kind: str, samples: int, count: int, before: int
) -> None:
    random = np.random.default_rng(before)
    each = (1,) if kind == "PER_TENSOR" else (1, KV_HEADS, 1, WIDTH)
    room = (samples, KV_HEADS, before, WIDTH * bits // 8)
    limits = np.iinfo(dtype)
    inputs: dict[str, Array | None] = {
        "q": drawn(random, samples, count, HEADS * WIDTH),
        **{which: drawn(random, samples, count, KV_HEADS * WIDTH) for which in "kv"},
        **{
            f"past_{which}": random.integers(limits.min, limits.max + 1, room).astype(dtype)
            for which in "kv"
        },
        "last": np.full(samples, before + count - 1, np.int32),
        "total": np.array(before + count, np.int32),
        **dict.fromkeys(("cosines", "sines", "places", "bias", "sinks")),
        **{f"{which}_scale": random.uniform(0.05, 0.3, each).astype(np.float32) for which in "kv"},
    }
    cache = TensorProto.INT8 if bits == 8 else TensorProto.UINT8
    outputs = {"y": TensorProto.FLOAT, "k_held": cache, "v_held": cache}
    attributes: dict[str, Any] = {"num_heads": HEADS, "kv_num_heads": KV_HEADS}
    attributes |= {"k_quant_type": kind, "v_quant_type": kind, "kv_cache_bit_width": bits}
    file, feeds = file_of("GroupQueryAttention", inputs, outputs, **attributes)
    wanted = theirs.InferenceSession(file, providers=["CPUExecutionProvider"]).run(None, feeds)
    found = ours(file, feeds)
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-4, atol=2e-5)
    for one, other in zip(found[1:], wanted[1:], strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
