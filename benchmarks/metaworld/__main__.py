"""Success rates in Meta-World of a teacher and its one-step students, with hardware, versions and commit.

    make demo-metaworld
    python -m benchmarks.metaworld

The second command stores the results of a finished demo; it runs on the demo's machine.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

from benchmarks.common import BenchmarkParser, current_device, environment, finish
from benchmarks.metaworld.measurements import table


def main(arguments: list[str] | None = None) -> int:
    parser = BenchmarkParser(__doc__)
    parser.add_argument("--demo", type=Path, default=Path("outputs/demo_metaworld"), help="default: %(default)s")
    parser.add_argument("--remark", help="note for the results file, such as other load of the machine")
    options = parser.options(arguments)
    found = json.loads((options.demo / "results.json").read_text())
    device = current_device()
    facts = environment(device)
    facts["versions"] |= {name: version(name) for name in ("metaworld", "mujoco")}
    remark = {} if options.remark is None else {"remark": options.remark}
    results = {**facts, "benchmark": "metaworld", **remark, **found}
    finish(results, lambda found: print(table(found)), options.output, "metaworld", device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
