"""The kernels of ours compute what they should: against numpy in 64 bits, in the library as it was linked.

Only where a library was compiled: `make test-native`. On a processor without the instructions ggml's own kernels are what
is tested here.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cffi import FFI

from headrace.engine.llama.builds import Build
from headrace.engine.llama.library import Library
from tests.engine.llama.chosen import LIBRARY

pytestmark = pytest.mark.skipif(LIBRARY != "native", reason="only where one was compiled: make test-native")

F32, F16, Q8_0, BF16 = 0, 1, 8, 30
BLOCK = 32
BLOCK_BYTES = 2 + BLOCK
_DECLARATIONS = """
struct ggml_init_params { size_t mem_size; void *mem_buffer; bool no_alloc; };
void *ggml_init(struct ggml_init_params parameters);
void ggml_free(void *context);
void *ggml_new_tensor_4d(void *context, int type, int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3);
void *ggml_permute(void *context, void *tensor, int axis0, int axis1, int axis2, int axis3);
void *ggml_mul_mat(void *context, void *weights, void *rows);
void *ggml_flash_attn_ext(void *context, void *q, void *k, void *v, void *mask, float scale, float max_bias, float softcap);
void *ggml_get_data(void *tensor);
size_t ggml_nbytes(void *tensor);
void *ggml_new_graph(void *context);
void ggml_build_forward_expand(void *graph, void *tensor);
int ggml_graph_compute_with_ctx(void *context, void *graph, int threads);
"""
MEMORY_BYTES = 1 << 28


class Ggml:
    """One graph after the other, in memory of its own."""

    def __init__(self, build: Build) -> None:
        self.kernels = build.kernels
        self.ffi = FFI()
        self.ffi.cdef(_DECLARATIONS)
        self.api: Any = self.ffi.dlopen(str(build.path))
        self.context = self.api.ggml_init(
            {"mem_size": MEMORY_BYTES, "mem_buffer": self.ffi.NULL, "no_alloc": False}
        )

    def free(self) -> None:
        self.api.ggml_free(self.context)

    def tensor(self, kind: int, values: np.ndarray) -> Any:
        """Of an array whose last axis is ggml's first; of bytes for blocks."""
        first = values.shape[-1] // BLOCK_BYTES * BLOCK if kind == Q8_0 else values.shape[-1]
        shape = [first, *reversed(values.shape[:-1]), *[1] * (4 - values.ndim)]
        tensor = self.api.ggml_new_tensor_4d(self.context, kind, *shape)
        self.bytes_of(tensor)[:] = np.ascontiguousarray(values).view(np.uint8).ravel()
        return tensor

    def bytes_of(self, tensor: Any) -> np.ndarray:
        buffer = self.ffi.buffer(self.api.ggml_get_data(tensor), self.api.ggml_nbytes(tensor))
        return np.frombuffer(buffer, np.uint8)

    def computed(self, tensor: Any, *, threads: int) -> np.ndarray:
        graph = self.api.ggml_new_graph(self.context)
        self.api.ggml_build_forward_expand(graph, tensor)
        assert self.api.ggml_graph_compute_with_ctx(self.context, graph, threads) == 0
        return self.bytes_of(tensor).view(np.float32).copy()


@pytest.fixture
def ggml(library: Library) -> Iterator[Ggml]:
    made = Ggml(library.build)
    yield made
    made.free()


def as_bf16(values: np.ndarray) -> np.ndarray:
    """To the nearest, ties to even, as 16-bit words."""
    words = values.astype(np.float32).view(np.uint32)
    return ((words + 0x7FFF + ((words >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(words: np.ndarray) -> np.ndarray:
    return (words.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    ("depth", "results"),
    [(32, 16), (576, 192), (64, 80), (1536, 112), (4128, 64), (2048, 48), (576, 100), (96, 1040)],
)
def test_bf16_products_are_those_of_the_numbers(ggml: Ggml, depth: int, results: int, threads: int) -> None:
    random = np.random.default_rng([depth, results, threads])
    weights = as_bf16(random.standard_normal((results, depth)))
    tensor = ggml.tensor(BF16, weights)
    for num_rows in (1, 2, 3, 5, 6, 7, 13, 31, 32, 33, 38, 64, 97):
        rows = random.standard_normal((num_rows, depth)).astype(np.float32)
        product = ggml.api.ggml_mul_mat(ggml.context, tensor, ggml.tensor(F32, rows))
        found = ggml.computed(product, threads=threads).reshape(num_rows, results)
        of_weights, of_rows = from_bf16(weights).astype(float), from_bf16(as_bf16(rows)).astype(float)
        largest = np.abs(of_rows) @ np.abs(of_weights).T
        assert (np.abs(found - of_rows @ of_weights.T) <= 1e-6 * largest).all(), num_rows


def blocks_of(scales: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Q8_0 as it lies in memory: of each block its scale and its numbers."""
    rows, count = scales.shape
    packed = np.empty((rows, count, BLOCK_BYTES), np.uint8)
    packed[..., :2] = scales.astype(np.float16)[..., None].view(np.uint8)
    packed[..., 2:] = numbers.reshape(rows, count, BLOCK).view(np.uint8)
    return packed.reshape(rows, -1)


class Blocks:
    """Weights at random, and rows that are in Q8_0 what they were in F32."""

    def __init__(self, seed: list[int], *, depth: int, results: int, rows: int) -> None:
        random = np.random.default_rng(seed)
        num = depth // BLOCK
        self.numbers = random.integers(-127, 128, (results, depth), np.int8)
        self.scales = random.uniform(1e-3, 1, (results, num)).astype(np.float16)
        whole = random.integers(-127, 128, (rows, num, BLOCK)).astype(np.float32)
        whole[..., 5] = 127
        self.rows = (
            (whole * 2.0 ** random.integers(-9, 3, (rows, num, 1))).reshape(rows, depth).astype(np.float32)
        )
        self.weights = self.numbers.astype(float) * np.repeat(self.scales.astype(float), BLOCK, axis=1)

    def computed(self, ggml: Ggml, rows: slice, *, threads: int) -> np.ndarray:
        weights = ggml.tensor(Q8_0, blocks_of(self.scales, self.numbers))
        chosen = self.rows[rows]
        product = ggml.api.ggml_mul_mat(ggml.context, weights, ggml.tensor(F32, chosen))
        return ggml.computed(product, threads=threads).reshape(len(chosen), len(self.numbers))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    ("depth", "results"),
    [(32, 16), (576, 192), (96, 80), (1536, 112), (4128, 64), (8192, 48), (576, 100), (64, 1040)],
)
def test_q8_0_products_are_those_of_the_numbers_and_the_same_in_any_company(
    ggml: Ggml, depth: int, results: int, threads: int
) -> None:
    blocks = Blocks([depth, results], depth=depth, results=results, rows=61)
    whole = blocks.computed(ggml, slice(None), threads=threads)
    largest = np.abs(blocks.rows.astype(float)) @ np.abs(blocks.weights).T
    assert (np.abs(whole - blocks.rows.astype(float) @ blocks.weights.T) <= 1e-6 * largest).all()
    is_ours = "q8_0" in ggml.kernels and results % 16 == 0
    for begin, end in ((0, 1), (60, 61), (7, 9), (1, 7), (20, 32), (20, 33), (3, 60)):
        some = blocks.computed(ggml, slice(begin, end), threads=1)
        np.testing.assert_allclose(some, whole[begin:end], rtol=0, atol=1e-6 * largest.max())
        assert not is_ours or some.tobytes() == whole[begin:end].tobytes(), (begin, end)


@pytest.mark.parametrize("number", [-128, -127, 127])
def test_q8_0_numbers_at_the_edge_of_their_range(ggml: Ggml, number: int) -> None:
    blocks = Blocks([0], depth=2048, results=32, rows=14)
    blocks.numbers[:] = number
    blocks.rows[:] = 127
    blocks.rows[::2] = -127
    expected = blocks.rows.astype(float) @ (number * np.repeat(blocks.scales.astype(float), BLOCK, axis=1)).T
    np.testing.assert_allclose(blocks.computed(ggml, slice(None), threads=1), expected, rtol=1e-6)


def softmax_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray | None, scale: float
) -> np.ndarray:
    """Stream, head, token; keys and values are shared by neighbouring heads. The result by stream, token, head."""
    together = q.shape[1] // k.shape[1]
    keys, values = (np.repeat(each.astype(float), together, axis=1) for each in (k, v))
    scores = scale * np.einsum("shtd,shcd->shtc", q.astype(float), keys)
    if mask is not None:
        scores += mask.astype(float)[:, None]
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    result: np.ndarray = np.einsum("shtc,shcd->sthd", weights, values)
    return result


class Case:
    """Queries, keys, values and a mask at random; each token sees what came before it in its stream."""

    def __init__(
        self, seed: int, *, size: int, heads: int, shared: int, tokens: int, keys: int, streams: int
    ) -> None:
        random = np.random.default_rng(seed)
        self.scale = size**-0.5
        self.q = random.standard_normal((streams, heads, tokens, size)).astype(np.float32) * 3
        self.k = random.standard_normal((streams, shared, keys, size)).astype(np.float16)
        self.v = random.standard_normal((streams, shared, keys, size)).astype(np.float16)
        last_seen = random.integers(0, keys - tokens + 1, streams)[:, None] + np.arange(tokens)
        is_hidden = np.arange(keys) > last_seen[..., None]
        self.mask = np.where(is_hidden, -np.inf, 0).astype(np.float16)

    def computed(
        self, ggml: Ggml, *, threads: int, is_masked: bool = True, token: slice = slice(None)
    ) -> np.ndarray:
        def apart(values: np.ndarray) -> Any:
            # As in a cache: the heads of a token lie beside each other.
            lying = ggml.tensor(F16, values.transpose(0, 2, 1, 3))
            return ggml.api.ggml_permute(ggml.context, lying, 0, 2, 1, 3)

        q = self.q[:, :, token]
        mask = ggml.tensor(F16, self.mask[:, None, token]) if is_masked else ggml.ffi.NULL
        attention = ggml.api.ggml_flash_attn_ext(
            ggml.context, ggml.tensor(F32, q), apart(self.k), apart(self.v), mask, self.scale, 0.0, 0.0
        )
        found = ggml.computed(attention, threads=threads)
        return found.reshape(q.shape[0], q.shape[2], q.shape[1], self.v.shape[-1])

    def expected(self, *, is_masked: bool = True) -> np.ndarray:
        return softmax_attention(self.q, self.k, self.v, self.mask if is_masked else None, self.scale)


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize(
    ("size", "heads", "shared", "tokens", "keys", "streams"),
    [
        (64, 9, 3, 1, 256, 1),
        (64, 9, 3, 1, 256, 32),
        (64, 9, 3, 200, 256, 1),
        (64, 9, 3, 63, 512, 2),
        (128, 8, 2, 40, 128, 3),
        (80, 4, 4, 17, 64, 1),
        (96, 12, 1, 70, 192, 1),
        (256, 4, 1, 5, 128, 2),
        (32, 2, 2, 130, 256, 1),
        (64, 9, 3, 20, 96, 1),  # no whole blocks: ggml's
        (40, 4, 2, 20, 128, 1),  # no whole vectors: ggml's
    ],
)
def test_attention_is_that_of_the_numbers(
    ggml: Ggml, size: int, heads: int, shared: int, tokens: int, keys: int, streams: int, threads: int
) -> None:
    case = Case(
        size + tokens, size=size, heads=heads, shared=shared, tokens=tokens, keys=keys, streams=streams
    )
    is_ours = "attention" in ggml.kernels and size % 16 == 0 and keys % 64 == 0
    for is_masked in (True, False):
        found = case.computed(ggml, threads=threads, is_masked=is_masked)
        # ggml rounds its sums to 16 bits, ours are those of 32.
        np.testing.assert_allclose(found, case.expected(is_masked=is_masked), atol=2e-5 if is_ours else 2e-2)


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_a_row_is_the_same_to_the_last_bit_in_any_company(ggml: Ggml, threads: int) -> None:
    if "attention" not in ggml.kernels:
        pytest.skip("without 512-bit vectors attention is ggml's")
    case = Case(7, size=64, heads=9, shared=3, tokens=150, keys=512, streams=1)
    together = case.computed(ggml, threads=1)
    for begin, end in ((0, 1), (40, 41), (100, 149), (149, 150), (3, 90), (20, 36)):
        some = case.computed(ggml, threads=threads, token=slice(begin, end))
        assert some.tobytes() == together[:, begin:end].tobytes()


@pytest.mark.parametrize("left", [np.inf, -np.inf, np.nan])
def test_what_was_left_where_nobody_looks_counts_for_nothing(ggml: Ggml, left: float) -> None:
    if "attention" not in ggml.kernels:
        pytest.skip("without 512-bit vectors attention is ggml's")
    case = Case(3, size=64, heads=9, shared=3, tokens=20, keys=512, streams=2)
    expected = case.computed(ggml, threads=1)
    is_seen = (case.mask == 0).any(axis=1)
    assert not is_seen.all()
    for each in (case.k, case.v):
        each.transpose(0, 2, 1, 3)[~is_seen] = left
        assert case.computed(ggml, threads=1).tobytes() == expected.tobytes()


def test_queries_that_are_no_numbers_are_not_hidden(ggml: Ggml) -> None:
    case = Case(4, size=64, heads=2, shared=1, tokens=3, keys=128, streams=1)
    case.q[:, :, 1] = np.nan
    found = case.computed(ggml, threads=1)
    assert np.isnan(found[:, 1]).all()
    assert np.isfinite(found[:, [0, 2]]).all()


def test_one_that_sees_nothing_gets_nothing(ggml: Ggml) -> None:
    case = Case(1, size=64, heads=2, shared=1, tokens=3, keys=128, streams=1)
    expected = case.expected()
    case.mask[:, 1] = -np.inf
    found = case.computed(ggml, threads=1)
    assert (found[:, 1] == 0).all()
    np.testing.assert_allclose(
        found[:, 2], expected[:, 2], atol=2e-5 if ("attention" in ggml.kernels) else 2e-2
    )


def test_large_scores_overflow_nothing(ggml: Ggml) -> None:
    case = Case(2, size=64, heads=2, shared=2, tokens=4, keys=128, streams=1)
    case.q *= 1e4
    np.testing.assert_allclose(
        case.computed(ggml, threads=1), case.expected(), atol=1e-3 if ("attention" in ggml.kernels) else 1e-1
    )
