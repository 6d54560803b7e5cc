"""The process of one training: it makes the training from settings, and takes its steps under a limit."""

import argparse
import importlib
import json
import sys

from benchmarks.limit.reported_steps import report_steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module", help="below `benchmarks.limit`, with a class `Training`")
    parser.add_argument("num_steps", type=int)
    parser.add_argument("settings", type=json.loads, help="JSON of the arguments of `Training`")
    parser.add_argument("--events", type=int, required=True, help="descriptor of the pipe for events")
    options = parser.parse_args()
    training = importlib.import_module(f"benchmarks.limit.{options.module}").Training(**options.settings)
    return report_steps(training.step, options.num_steps, options.events, training.results)


if __name__ == "__main__":
    sys.exit(main())
