"""Try random programs of streamed weights, and print shrunk failures with a histogram.

python tests/programs/try_streamed_programs.py --seeds 0 1000 --without "after" "form object"
"""

import argparse
import gc
import re
import sys
import time
from collections import defaultdict
from pathlib import Path

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import torch
from streamed_programs import draw
from streamed_runs import results, shrunk


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 200), metavar=("FIRST", "END"))
    parser.add_argument("--without", nargs="*", default=[], help='features, such as "form object" or "hook"')
    parser.add_argument("--as-drawn", action="store_true", help="do not shrink failures")
    chosen = parser.parse_args()
    torch.zeros(1, requires_grad=True).sum().backward()
    gc.freeze()  # children copy less
    counts: dict[str, int] = defaultdict(int)
    kinds: dict[tuple[str, frozenset[str]], list[int]] = defaultdict(list)
    begun = time.perf_counter()
    programs = [draw(seed, chosen.without) for seed in range(*chosen.seeds)]
    found = list(results(programs, 60))
    took_s = time.perf_counter() - begun
    for number, (program, result) in enumerate(found, 1):
        counts[result.outcome] += 1
        features = program.features()
        known = (kind for kind in kinds if kind[0] == result.outcome and kind[1] and kind[1] <= features)
        kind = next(known, None)
        if kind is None and result.is_failure:
            small = program if chosen.as_drawn else shrunk(program, result, 60)
            kind = result.outcome, small.features()
            print(f"{program if chosen.as_drawn else small}\n=> {result.outcome}: {result.details}\n", flush=True)
        elif result.outcome == "refused":
            kind = re.sub("'.*?'| [0-9]+", "", f"refused: {result.details}"), frozenset()
        if kind is not None:
            kinds[kind].append(number)
    print(f"{len(found)} programs in {took_s:.0f} s: {dict(counts)}\ntimes, first program, kind")
    for (outcome, features), numbers in sorted(kinds.items(), key=lambda each: (-len(each[1]), each[1])):
        print(f"{len(numbers):6} {numbers[0]:6}  {outcome}: {', '.join(sorted(features))}")
    return any(result.is_failure for _, result in found)


if __name__ == "__main__":
    sys.exit(main())
