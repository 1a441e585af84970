"""Finding the longest cached prefix: a radix tree against a block-hash chain. python -m benchmarks.prefix_index

Prompts share a prefix of 1 500 tokens and go on with 50 of their own; half of the holdings are such prompts, the
others share nothing. Prints microseconds for a look-up and for adding one, over the number of holdings.
"""

import json
import random
import time
from collections.abc import Callable, Iterator
from statistics import median

from headrace.bounds import BLOCK_TOKENS
from headrace.caching.index import Holding, PrefixIndex

PREFIX, OWN = 1500, 50
SCOPE = [("tenant", "t")]


class Chain:
    """A table from the hash of each block and all before it to the holdings that have it."""

    def __init__(self) -> None:
        self._table: dict[int, dict[Holding, None]] = {}

    def add(self, holding: Holding) -> None:
        for key in _keys(holding.tokens):
            self._table.setdefault(key, {})[holding] = None

    def find(self, prompt: list[int]) -> Holding | None:
        deepest = None
        for key in _keys(prompt):
            if key not in self._table:
                break
            deepest = self._table[key]
        if deepest is None:
            return None
        # Hashes may be the same by accident: tokens have to be compared.
        return max(deepest, key=lambda holding: _common(holding.tokens, prompt))


def _keys(tokens: list[int]) -> Iterator[int]:
    key = 0
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        key = hash((key, *tokens[start : start + BLOCK_TOKENS]))
        yield key


def _common(tokens: list[int], prompt: list[int]) -> int:
    if tokens == prompt:
        return len(prompt)
    return next(at for at, (one, other) in enumerate(zip(tokens, prompt, strict=False)) if one != other)


def main() -> None:
    results = []
    for num in (1, 32, 256, 1000):
        rng = random.Random(num)
        prefix = [rng.randrange(49152) for _ in range(PREFIX)]
        holdings = [
            Holding(
                tenant="t",
                tokens=(prefix if number % 2 else [rng.randrange(49152) for _ in range(PREFIX)])
                + [rng.randrange(49152) for _ in range(OWN)],
                slot=number,
                num_valid=PREFIX + OWN,
            )
            for number in range(num)
        ]
        index, chain = PrefixIndex(), Chain()
        for holding in holdings:
            index.add(holding)
            chain.add(holding)
        prompt = prefix + [rng.randrange(49152) for _ in range(OWN)]
        one = Holding(tenant="t", tokens=prompt, slot=10_000)

        def add_and_remove(index: PrefixIndex = index, one: Holding = one) -> None:
            index.add(one)
            index.remove(one)

        results.append(
            {
                "holdings": num,
                "tree_find_us": _us(lambda index=index, prompt=prompt: index.find(prompt, SCOPE)),
                "chain_find_us": _us(lambda chain=chain, prompt=prompt: chain.find(prompt)),
                "tree_add_and_remove_us": _us(add_and_remove),
                "chain_add_us": _us(lambda chain=chain, one=one: chain.add(one)),
            }
        )
    print(json.dumps({"benchmark": "prefix_index", "tokens": PREFIX + OWN, "results": results}, indent=1))


def _us(call: Callable[[], object], rounds: int = 7, times: int = 50) -> float:
    samples = []
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(times):
            call()
        samples.append((time.perf_counter() - began) / times * 1e6)
    return round(median(samples), 1)


if __name__ == "__main__":
    main()
