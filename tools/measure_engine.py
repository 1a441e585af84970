"""What the embedded engine costs on this machine: prefill, decode, mixed batches, overheads.

    OMP_WAIT_POLICY=passive python tools/measure_engine.py MODEL.gguf [--threads 1] [--layout unified]
        [--no-flash-attention] [--sequences 32] [--context 1024] [--repeat 5]

Prints one JSON object. Rates are tokens per second, times milliseconds; each is the best of `--repeat`
rounds, because a neighbour on the machine can only slow a round down.
"""

import argparse
import functools
import json
import random
import time
from collections.abc import Callable
from pathlib import Path

from headrace.engine.llama import LlamaEngine, LlamaSettings
from headrace.engine.protocol import Sampling, Span

PROMPT_TOKENS = 64
DECODE_STEPS = 8
CHUNK_TOKENS = 64


class Bench:
    """An engine with slots that grow by fixed amounts."""

    def __init__(self, engine: LlamaEngine, sampling: Sampling) -> None:
        self.engine = engine
        self.sampling = sampling
        self.random = random.Random(1)
        self.lengths: dict[int, int] = {}

    def prompt(self, count: int) -> list[int]:
        """Random ordinary tokens."""
        return [self.random.randrange(1000, 20000) for _ in range(count)]

    def restart(self, slots: int, tokens: int = PROMPT_TOKENS) -> None:
        """Close every slot; open `slots` of them with a prompt each."""
        for slot in range(self.engine.info.sequences):
            self.engine.close(slot)
        self.lengths = {}
        for slot in range(slots):
            self.engine.open(slot, self.sampling)
            self.lengths[slot] = 0
            if tokens:
                self.engine.forward([self.span(slot, tokens)])

    def span(self, slot: int, count: int, *, is_sampled: bool = True) -> Span:
        """The next `count` tokens of a slot."""
        start = self.lengths[slot]
        self.lengths[slot] += count
        return Span(slot, start, self.prompt(count), is_sampled)


def best(repeat: int, measure: Callable[[], float]) -> float:
    return min(measure() for _ in range(repeat))


def decode_round(bench: Bench, slots: int) -> tuple[float, float]:
    """A decode step of the first `slots` slots, in ms: wall, and sampling alone."""
    walls, samples = [], []
    for _ in range(DECODE_STEPS):
        spans = [bench.span(slot, 1) for slot in range(slots)]
        begin = time.perf_counter()
        result = bench.engine.forward(spans)
        walls.append(time.perf_counter() - begin)
        samples.append(result.sample_s)
    return min(walls) * 1e3, min(samples) * 1e3


def prefill_ms(bench: Bench, total: int, chunk: int) -> float:
    bench.restart(1, 0)
    begin = time.perf_counter()
    for _ in range(total // chunk):
        bench.engine.forward([bench.span(0, chunk, is_sampled=False)])
    return (time.perf_counter() - begin) * 1e3


def mixed_ms(bench: Bench, *, is_split: bool) -> float:
    """31 decode rows and a 64-token chunk, in one call of the library or in two.

    Below `forward`, which always makes two.
    """
    engine = bench.engine
    engine.close(31)
    engine.open(31, bench.sampling)
    bench.lengths[31] = 0
    times = []
    for _ in range(4):
        rows = [bench.span(slot, 1) for slot in range(31)]
        chunk = [bench.span(31, CHUNK_TOKENS, is_sampled=False)]
        begin = time.perf_counter()
        for call in (rows, chunk) if is_split else (rows + chunk,):
            engine._batch.fill(call)
            engine._context.decode(engine._batch)
        times.append((time.perf_counter() - begin) * 1e3)
        for span in rows + chunk:
            engine._lengths[span.slot] += len(span.tokens)
    return min(times)


def resident_mib() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) // 1024
    return 0


def overhead_us(bench: Bench, slots: int) -> float:
    """Checking and filling a batch of one token per slot, in microseconds."""
    bench.restart(slots, 1)
    spans = [Span(slot, 1, [1000], True) for slot in range(slots)]
    engine = bench.engine
    begin = time.perf_counter()
    for _ in range(200):
        engine._check_spans(spans)
        engine._batch.fill(spans)
    return (time.perf_counter() - begin) / 200 * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--layout", default="per_sequence", choices=("per_sequence", "unified"))
    parser.add_argument("--no-flash-attention", action="store_true")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    settings = LlamaSettings(
        model_path=options.model,
        sequences=options.sequences,
        context_tokens=options.context,
        threads=options.threads,
        kv_layout=options.layout,
        flash_attention=not options.no_flash_attention,
    )
    begin = time.perf_counter()
    engine = LlamaEngine.load(settings)
    report: dict[str, float] = {"load_s": round(time.perf_counter() - begin, 2), "rss_mib": resident_mib()}
    bench = Bench(engine, Sampling(temperature=options.temperature, top_p=options.top_p, seed=1))
    bench.restart(options.sequences)
    for slots in (1, 2, 4, 8, 16, 32):
        rounds = [decode_round(bench, slots) for _ in range(options.repeat)]
        wall = min(item[0] for item in rounds)
        report[f"decode_{slots}_tok_s"] = round(slots * 1e3 / wall, 1)
        report[f"decode_{slots}_step_ms"] = round(wall, 2)
        report[f"sample_{slots}_us"] = round(min(item[1] for item in rounds) * 1e3, 1)
    if options.sequences >= 32:
        report["mixed_one_call_ms"] = round(best(options.repeat, lambda: mixed_ms(bench, is_split=False)), 1)
        report["mixed_two_calls_ms"] = round(best(options.repeat, lambda: mixed_ms(bench, is_split=True)), 1)
    for slots in (1, 32):
        report[f"overhead_{slots}_us"] = round(overhead_us(bench, slots), 1)
    for chunk in (64, 512):
        report[f"prefill_{chunk}_tok_s"] = round(
            512 * 1e3 / best(options.repeat, functools.partial(prefill_ms, bench, 512, chunk)), 1
        )
    print(json.dumps(report))
    engine.shutdown()


if __name__ == "__main__":
    main()
