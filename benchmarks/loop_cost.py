"""What a token costs besides computing and drawing it.

    python -m benchmarks.loop_cost

The engine loop on the stub engine with no time passing, so that all that is measured is the loop: plan,
text, progress file, news. Then each piece of per-token work alone, up to the bytes of the SSE chunk.
Prints one JSON object; times in microseconds.
"""

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from headrace.api.completion import ChunkEncoder
from headrace.clock import SystemClock
from headrace.config.settings import EngineSettings, StubTiming
from headrace.engine.stub import StubEngine
from headrace.framing import FrameSplitter, FrameWriter
from headrace.request.sampling import Sampling
from headrace.scheduling.steps import StepLimits
from headrace.worker.loop import EngineLoop, LoopNews
from headrace.worker.messages import FromWorker, News, Piece
from headrace.worker.progress import ProgressFile
from headrace.worker.sequence import Sequence
from headrace.worker.stats import StepStats
from headrace.worker.text import TextAssembler

STEPS = 2000


def main() -> None:
    print(
        json.dumps(
            {
                "benchmark": "loop_cost",
                "step_us": {str(number): step_us(number) for number in (1, 4, 16, 32)},
                "step_without_stub_us": {
                    str(number): round(step_us(number) - stub_us(number), 1) for number in (1, 32)
                },
                "per_token_us": pieces(),
            },
            indent=1,
        )
    )


def step_us(sequences: int) -> float:
    """One decode step of the whole loop."""
    engine = _engine(sequences)
    with tempfile.TemporaryDirectory() as directory:
        loop = EngineLoop(
            engine,
            limits=StepLimits(batch_tokens_max=512, target_step_ms=250, idle_step_ms=500),
            clock=SystemClock(),
            progress=ProgressFile(Path(directory) / "progress"),
            on_news=_ignore,
            stats=StepStats(CollectorRegistry(), kv_bytes_per_token=1),
        )
        for number in range(sequences):
            loop.submit(
                Sequence(
                    attempt_id=f"req_{number:032x}.1",
                    tenant_id="tenant",
                    connection_id=0,
                    prompt=[1, 2, 3],
                    max_tokens=1_000_000,
                    sampling=Sampling(seed=number),
                    stop=[],
                    arrived_us=0,
                )
            )
        for _ in range(50):
            loop.step()
        return _timed(loop.step, STEPS)


def stub_us(sequences: int) -> float:
    """What of that the stub itself takes."""
    from headrace.engine.protocol import Span

    engine = _engine(sequences)
    for slot in range(sequences):
        engine.open(slot, Sampling(seed=slot))
    position = 0

    def call() -> None:
        nonlocal position
        engine.forward([Span(slot, position, [7], True) for slot in range(sequences)])
        position += 1

    return _timed(call, STEPS)


def pieces() -> dict[str, float]:
    """Per-token work, one piece at a time."""
    vocabulary = _engine(1).vocabulary
    plain, stopping = TextAssembler([]), TextAssembler(["\n\nUser:", "###"])
    chunks = ChunkEncoder(
        completion_id="chatcmpl-" + "0" * 32, created_s=1, model="model", is_usage_wanted=False
    )
    encode = msgspec.msgpack.Encoder().encode
    decode = msgspec.msgpack.Decoder(FromWorker).decode
    news = News(pieces=[Piece(f"req_{number:032x}.1", " water", 5) for number in range(32)])
    payload = encode(news)
    writer = FrameWriter()

    def decoded() -> object:
        return decode(FrameSplitter().feed(framed)[0])

    framed = FrameWriter().frame(payload)
    return {
        "token bytes": _timed(lambda: vocabulary.token_bytes(260), 100_000),
        "text": _timed(lambda: plain.feed(b" water"), 100_000),
        "text with two stop strings": _timed(lambda: stopping.feed(b" water"), 100_000),
        "news encoded (of 32)": round(_timed(lambda: writer.frame(encode(news)), 5000) / 32, 3),
        "news decoded (of 32)": round(_timed(decoded, 5000) / 32, 3),
        "SSE chunk": _timed(lambda: chunks.text(" water"), 100_000),
    }


def _engine(sequences: int) -> StubEngine:
    timing = StubTiming(
        prefill_us_per_token=0, decode_us_per_step=0, decode_us_per_sequence=0, output_tokens=10_000_000
    )
    return StubEngine(
        EngineSettings(max_batch_size=sequences, max_context_tokens=1_048_576, stub=timing), sleep=_ignore
    )


def _timed(call: Callable[[], Any], times: int) -> float:
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(times):
            call()
        best = min(best, (time.perf_counter() - began) / times)
    return round(best * 1e6, 3)


def _ignore(_: LoopNews | float) -> None:
    pass


if __name__ == "__main__":
    main()
