"""Does a greedy answer depend on load, slot, cache hits, saved states or preemption?

    OMP_WAIT_POLICY=passive OPENBLAS_NUM_THREADS=1 PYTHONPATH=src python -m benchmarks.kv.repro LAYOUT FLASH RULE...

LAYOUT: per_sequence, unified. FLASH: on, off. RULE: whole; aligned 32, 64, 128 (chunks end at multiples);
tiles (random multiples of
64, what is left over by itself); upto63 (random sizes of 1 to 63), upto512. One line a rule: how many of the prompts give the same tokens, and
the same logits to the last bit, as alone in slot 0. Times are processor time. `--threads=N`, `--few` (three prompts, 8 rows), `--short` (prompts up to 450 tokens).
"""

import random
import statistics
import sys
import time

import numpy as np

from benchmarks.kv.slots import Slots, digest, english

PROMPTS = (10, 33, 64, 100, 200, 320, 600, 1500)
SHORT = (10, 33, 64, 100, 150, 200, 320, 450)
ANSWER = 64
HALF = 32
Answer = tuple[list[int], list[str]]


class Rule:
    def __init__(self, name: str) -> None:
        self.name = name
        self.random = random.Random(name)

    def next(self, start: int, end: int) -> int:
        """Where the chunk that begins at `start` ends."""
        if self.name == "whole":
            return end
        if self.name.startswith("upto"):
            return min(end, start + self.random.randint(1, int(self.name[4:])))
        if self.name == "tiles":
            full = end // 64 * 64
            return min(full, start + 64 * self.random.randint(1, 4)) if start < full else end
        size = int(self.name)
        return min(end, (start // size + 1) * size)

    def boundary(self, end: int) -> int:
        """A prefix of a prompt of `end` tokens that may be taken over."""
        if self.name == "whole":
            return 0
        if self.name.startswith("upto"):
            return self.random.randint(1, end - 1)
        size = 64 if self.name == "tiles" else int(self.name)
        return (end - 1) // size * size


def prefill(slots: Slots, slot: int, tokens: list[int], rule: Rule) -> np.ndarray:
    while True:
        start = slots.lengths[slot]
        end = rule.next(start, len(tokens))
        rows = slots.forward([(slot, tokens[start:end], end == len(tokens))])
        if rows:
            return rows[slot]


def answer(slots: Slots, slot: int, row: np.ndarray, count: int = ANSWER) -> Answer:
    tokens, digests = [int(row.argmax())], [digest(row)]
    while len(tokens) < count:
        row = slots.forward([(slot, [tokens[-1]], True)])[slot]
        tokens.append(int(row.argmax()))
        digests.append(digest(row))
    return tokens, digests


def under_load(
    slots: Slots, prompts: list[list[int]], text: list[int], rule: Rule, total: int
) -> tuple[list[Answer], float]:
    """The prompts join one after another while the other slots decode; each step first decodes, then prefills."""
    places = random.Random(7).sample(range(total), len(prompts))
    others = [slot for slot in range(total) if slot not in places]
    last: dict[int, int] = {}
    for slot in others:
        at = 20000 + slot * 97
        last[slot] = int(prefill(slots, slot, text[at : at + 20 + slot * 3], Rule("32")).argmax())
    found: dict[int, Answer] = {}
    waiting = [(slot, prompt) for slot, prompt in zip(places, prompts, strict=True)]
    steps = []
    while waiting or any(len(found[slot][0]) < ANSWER for slot in found):
        begin = time.thread_time()
        rows = slots.forward([(slot, [token], True) for slot, token in last.items()])
        if len(last) == total:
            steps.append(time.thread_time() - begin)
        for slot, row in rows.items():
            last[slot] = int(row.argmax())
            if slot in found and len(found[slot][0]) < ANSWER:
                found[slot][0].append(last[slot])
                found[slot][1].append(digest(row))
        if waiting:
            slot, prompt = waiting[0]
            start = slots.lengths[slot]
            end = rule.next(start, len(prompt))
            done = slots.forward([(slot, prompt[start:end], end == len(prompt))])
            if done:
                waiting.pop(0)
                last[slot] = int(done[slot].argmax())
                found[slot] = ([last[slot]], [digest(done[slot])])
    return [found[slot] for slot in places], statistics.median(steps) * 1e3 if steps else 0.0


def score(base: list[Answer], other: list[Answer], skip: int = 0) -> str:
    tokens = sum(one[0][skip:] == two[0] for one, two in zip(base, other, strict=True))
    logits = sum(one[1][skip:] == two[1] for one, two in zip(base, other, strict=True))
    return f"{tokens}/{logits}"


def trial(
    slots: Slots,
    name: str,
    prompts: list[list[int]],
    text: list[int],
    reference: list[Answer] | None,
    total: int,
) -> list[Answer]:
    rule = Rule(name)
    base: list[Answer] = []
    states: list[np.ndarray] = []
    speed = decode = 0.0
    for prompt in prompts:
        slots.drop(0)
        begin = time.thread_time()
        row = prefill(slots, 0, prompt, rule)
        middle = time.thread_time()
        base.append(answer(slots, 0, row))
        if len(prompt) == max(map(len, prompts)):
            speed = len(prompt) / (middle - begin)
            decode = (time.thread_time() - middle) / (ANSWER - 1) * 1e3
        states.append(slots.save(0))
    slots.drop(0)
    result = {"tok/s": f"{speed:.0f}", "ms/token": f"{decode:.2f}"}
    if reference:
        result["as first rule"] = score(reference, base)
    copied, restored, resumed, chunked, tail, single = [], [], [], [], [], []
    for prompt, state, (tokens, _) in zip(prompts, states, base, strict=True):
        size = len(prompt)
        prefix = rule.boundary(size)
        held = size + ANSWER - 1
        slots.restore(5, state, held)
        slots.drop(9)
        slots.copy(5, 9)
        slots.cut(9, prefix)
        copied.append(answer(slots, 9, prefill(slots, 9, prompt, rule)))
        slots.drop(9)
        slots.drop(5)
        slots.restore(11, state, held)
        slots.cut(11, prefix)
        restored.append(answer(slots, 11, prefill(slots, 11, prompt, rule)))
        slots.drop(11)
        # parked with half of the answer, resumed in another slot
        slots.restore(13, state, held)
        slots.cut(13, size + HALF - 1)
        again = slots.save(13)
        slots.drop(13)
        slots.restore(2, again, size + HALF - 1)
        resumed.append(answer(slots, 2, slots.forward([(2, [tokens[HALF - 1]], True)])[2], HALF))
        slots.drop(2)
        # preempted with half of the answer: all recomputed by the same rule
        chunked.append(answer(slots, 3, prefill(slots, 3, prompt + tokens[:HALF], rule), HALF))
        slots.drop(3)
        # ... the prompt by the rule, the answer as one chunk; or as single tokens
        for target, kind in ((tail, "chunk"), (single, "rows")):
            slots.restore(4, state, held)
            slots.cut(4, size)
            if kind == "chunk":
                row = slots.forward([(4, tokens[:HALF], True)])[4]
            else:
                for token in tokens[:HALF]:
                    row = slots.forward([(4, [token], True)])[4]
            target.append(answer(slots, 4, row, HALF))
            slots.drop(4)
    result |= {
        "copy": score(base, copied),
        "restore": score(base, restored),
        "parked": score(base, resumed, HALF),
        "recompute": score(base, chunked, HALF),
        "answer as a chunk": score(base, tail, HALF),
        "as rows": score(base, single, HALF),
    }
    loaded, step = under_load(slots, prompts, text, rule, total)
    result |= {f"of {total} rows": score(base, loaded), "ms/step": f"{step:.0f}"}
    for slot in range(len(slots.lengths)):
        slots.drop(slot)
    print(f"{name:8}", "  ".join(f"{key} {value}" for key, value in result.items()), flush=True)
    return base


def main() -> None:
    layout, flash, *rules = [one for one in sys.argv[1:] if not one.startswith("--")]
    threads = int(next((one.split("=")[1] for one in sys.argv if one.startswith("--threads=")), "1"))
    is_few = "--few" in sys.argv
    slots = Slots(layout=layout, flash=flash == "on", threads=threads, sequences=32, context=2048)
    text = english(slots)
    sizes = (100, 600, 900) if is_few else SHORT if "--short" in sys.argv else PROMPTS
    prompts = [text[index * 2000 : index * 2000 + size] for index, size in enumerate(sizes)]
    print(
        f"{layout}, flash attention {flash}, {threads} threads, {len(prompts)} prompts (tokens/logits same)",
        flush=True,
    )
    reference: list[Answer] | None = None
    for name in rules:
        base = trial(slots, name, prompts, text, reference, 8 if is_few else 32)
        reference = reference or base


if __name__ == "__main__":
    main()
