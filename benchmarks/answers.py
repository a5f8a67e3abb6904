"""How long a sweep with a budget takes until it answers, and what its answers are.

    python -m benchmarks.answers [--tries 20] [--budget 60s] [--schedules afab 1f1b] [--burning 0]

Each try is `ppbench sweep --budget` of the same question in an empty folder: which of two schedules
two CPU ranks train `llama-8m` faster with. `--burning` processes start and stop at random beside
it. A line is printed for each try, and the medians and counts at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from benchmarks.controls import burning
from ppbench.display.cases import varying_axes
from ppbench.report.pages.judgement import judge
from ppbench.store import Store

SWEEP = """\
name = "answers"
device = "cpu"
world_size = 2
num_microbatches = {microbatches}
seq_len = {seq_len}
[model]
preset = "llama-8m"
[measure]
warmup_steps = 1
max_warmup_steps = 1
steps = {steps}
[grid]
schedule = {schedules}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tries", type=int, default=20)
    parser.add_argument("--budget", default="60s")
    parser.add_argument("--schedules", nargs=2, default=["afab", "1f1b"])
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--steps", type=int, default=4, help="fewest steps of a launch")
    parser.add_argument(
        "--burning", type=int, default=0, help="processes that burn a core at times"
    )
    asked = parser.parse_args()
    base, head = asked.schedules
    text = SWEEP.format(
        microbatches=asked.microbatches,
        seq_len=asked.seq_len,
        steps=asked.steps,
        schedules=str(asked.schedules).replace("'", '"'),
    )
    seconds, verdicts = [], Counter[str]()
    beside = burning(7, asked.burning) if asked.burning else contextlib.nullcontext()
    with beside:
        for number in range(asked.tries):
            with tempfile.TemporaryDirectory() as name:
                file, results = Path(name) / "answers.toml", Path(name) / "results"
                file.write_text(text)
                words = ["sweep", str(file), "--no-report", "--budget", asked.budget]
                began = time.monotonic()
                done = subprocess.run(
                    [sys.executable, "-m", "ppbench", *words, "--results", str(results)],
                    capture_output=True,
                    text=True,
                    check=False,
                )
                took_s = time.monotonic() - began
                if done.returncode != 0:
                    raise SystemExit(done.stderr)
                runs = Store(results).runs()
            first = judge(runs, varying_axes(runs)).first
            assert first is not None
            places = {str(name): place for place, name in enumerate(first.cases["schedule"])}
            change = first.change(places[head], places[base])
            assert change is not None
            interval = ""
            if change.ratio is not None:
                interval = f", {change.ratio.low - 1:+.1%} to {change.ratio.high - 1:+.1%}"
            seconds.append(took_s)
            verdicts[change.verdict.value] += 1
            told = f"{change.num_head} launches, {change.verdict.value}{interval}"
            print(f"try {number}: {took_s:.0f} s, {told}", flush=True)
            answer = done.stdout.rpartition("\n\n")[0].rpartition("\n\n")[2]
            print(f"    {answer.splitlines()[0] if answer else done.stdout[-200:]}", flush=True)
    print(f"median {statistics.median(seconds):.0f} s; {head} over {base}: {dict(verdicts)}")


if __name__ == "__main__":
    main()
