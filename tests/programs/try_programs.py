"""Try random programs, and print shrunk failures.

python tests/programs/try_programs.py --programs 500 --seed 3 --without slices "forward AD"
"""

import argparse
import sys
import time
from functools import partial
from pathlib import Path

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import torch
from program_search import MODES, check, check_in_child, look
from program_strategy import FEATURES


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=200, help="for each seed, up to its first failure")
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument("--without", nargs="*", default=[], choices=FEATURES)
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=MODES)
    parser.add_argument("--isolated", action="store_true", help="survive crashes: each program in a process of its own")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    num_failures = 0
    if chosen.isolated:  # import once, not in every process
        look(20, 0, frozenset(FEATURES))
    for seed in range(chosen.seed, chosen.seed + chosen.seeds):
        begun = time.perf_counter()
        how = check_in_child if chosen.isolated else check
        found = look(chosen.programs, seed, frozenset(chosen.without), partial(how, modes=chosen.modes))
        num_failures += found.program is not None
        took = f"{time.perf_counter() - begun:.0f} s"
        print(f"seed {seed}: {found.num_valid} programs hold (of {found.num_tried} made), {took}")
        if found.program is not None:
            print(f"{found.program}\n=> {found.message}\n", flush=True)
    return num_failures > 0


if __name__ == "__main__":
    sys.exit(main())
