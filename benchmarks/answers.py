"""How long a sweep with a budget takes until it answers, and what its answers are.

    python -m benchmarks.answers [--tries 20] [--budget 60s] [--burning 0]
        [--grid 'schedule = ["afab", "1f1b"]']

Each try is `ppbench sweep --budget` of the same question in an empty folder: which of the two
values of a setting two CPU ranks train `llama-8m` faster with. `--burning` processes start and stop
at random beside it. A line is printed for each try, and the medians and counts at the end. Two
values of `model.partition` that mean the same, `["uniform", [4, 4]]`, are a comparison of equals,
and `num_microbatches = [5, 4]` one of about 5 %.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
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
{microbatches}
seq_len = {seq_len}
[model]
preset = "llama-8m"
[measure]
warmup_steps = 1
max_warmup_steps = 1
steps = {steps}
[grid]
{grid}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tries", type=int, default=20)
    parser.add_argument("--budget", default="60s")
    parser.add_argument("--grid", default='schedule = ["afab", "1f1b"]', help="TOML of two values")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--steps", type=int, default=4, help="fewest steps of a launch")
    parser.add_argument(
        "--burning", type=int, default=0, help="processes that burn a core at times"
    )
    asked = parser.parse_args()
    key, _, values = asked.grid.partition("=")
    axis = key.strip().replace(".", "_")
    pair = tomllib.loads(f"pair = {values}")["pair"]
    base, head = (str(value).replace(" ", "") for value in pair)
    text = SWEEP.format(
        microbatches=""
        if axis == "num_microbatches"
        else f"num_microbatches = {asked.microbatches}",
        seq_len=asked.seq_len,
        steps=asked.steps,
        grid=asked.grid,
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
            values = [str(value).replace(" ", "") for value in first.cases[axis]]
            change = first.change(*(values.index(str(value)) for value in (head, base)))
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
