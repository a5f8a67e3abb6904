"""The training loop on one rank, and the display of its progress."""

from __future__ import annotations

import functools
import json
import math
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, TextIO

from engine.cli.launch import Launch
from engine.cli.options import OptionError, Options
from engine.cli.preparation import make_folder

if TYPE_CHECKING:
    import rich.progress

    from engine.trainer import Progress, StepResult, Trainer


class Training:
    """The training loop of a rank. All ranks decide alike, since their counts are equal."""

    def __init__(
        self, options: Options, launch: Launch, trainer: Trainer, display: Display, done: Progress
    ) -> None:
        self._options, self._launch, self._trainer = options, launch, trainer
        self._display = display
        self._step, self._tokens = done.step, done.num_tokens
        self._is_cautioned = False

    def run(self) -> None:
        """Train until the goal is reached. Blocks; raises what the trainer raises."""
        from engine.trainer import Progress

        options = self._options
        if options.save is not None:
            self._launch.attempt(self._trainer.check_storable)
        if self._share_done >= 1:
            self._display.note(f"step {self._step} has reached the end: nothing to do")
        while self._share_done < 1:
            started = time.perf_counter()
            result = self._trainer.step(self._step)
            seconds = time.perf_counter() - started
            self._step += 1
            self._tokens += result.num_tokens
            self._display.show(self._step, self._tokens, seconds, result)
            if not self._is_cautioned:
                is_lost = result.loss is not None and not math.isfinite(result.loss)
                loss = f"the loss, {result.loss}," if is_lost else None
                self._caution(loss or self._trainer.find_not_finite())
            is_due = options.save_every is not None and self._step % options.save_every == 0
            if options.save is not None and (is_due or self._share_done >= 1):
                self._caution(self._trainer.find_not_finite(has_weights=True))
                done = Progress(self._step, self._tokens)
                save = functools.partial(self._trainer.save, options.save, done)
                self._display.note(f"saved {self._launch.attempt(save)}")
        self._caution(self._trainer.find_not_finite(has_weights=True))

    def how_to_go_on(self) -> str:
        """A sentence that says how to go on after an interruption."""
        from engine.run import snapshot

        stopped = f"stopped after step {self._step}"
        saved = None if self._options.save is None else snapshot.latest(self._options.save)
        if saved is None:
            return f"{stopped}; nothing is saved: --save without --save-every saves at the end"
        return f"{stopped}; {saved} is saved: go on with the same command and --resume latest"

    @property
    def _share_done(self) -> float:
        return self._options.share_done(self._step, self._tokens)

    def _caution(self, what: str | None) -> None:
        """Print, at most once on this rank, that a number is no longer finite."""
        if what is None or self._is_cautioned:
            return
        self._is_cautioned = True
        print(
            f"caution: step {self._step}: {what} is not finite on rank {self._launch.rank} (NaN or "
            "infinite): nothing is learnt from now on; try a lower --learning-rate, --clip-norm, "
            "or another --dtype",
            file=sys.stderr,
            flush=True,
        )


@dataclass(frozen=True)
class Record:
    """A line of the log; `step` counts from 1, `tokens` from the first step on."""

    step: int
    loss: float
    num_tokens: int
    tokens: int
    tokens_per_s: float
    learning_rate: float
    gradient_norm: float | None

    def as_json(self) -> str:
        """The line as JSON, with null for a number that is not finite."""
        values = asdict(self).items()
        return json.dumps({k: v if v is not None and math.isfinite(v) else None for k, v in values})


class Display:
    """Shows the run's progress, only on the rank of the last stage."""

    def __init__(self, options: Options, first_step: int, *, is_shown: bool) -> None:
        """Raises OptionError when the log cannot be written."""
        from rich.console import Console

        self._options, self._is_shown = options, is_shown
        self._console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        self._log: TextIO | None = None
        if is_shown and options.log_file is not None:
            # A resumed run continues it, without the steps that it repeats.
            make_folder("--log-file", options.log_file.parent)
            try:
                self._log = options.log_file.open("a+" if first_step else "w+")
            except OSError as error:
                raise OptionError(
                    f"--log-file: cannot write {options.log_file}: {error.strerror}"
                ) from None
            self._log.seek(0)
            end = 0
            while _step_in(self._log.readline()) <= first_step:
                end = self._log.tell()
            self._log.truncate(end)
        has_bar = is_shown and self._console.is_terminal and not options.quiet
        self._bar: rich.progress.Progress | None = None
        if has_bar:
            from rich.progress import (
                BarColumn,
                Progress,
                TaskProgressColumn,
                TextColumn,
                TimeRemainingColumn,
            )

            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                TaskProgressColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}", markup=False),
                console=self._console,
                refresh_per_second=4,
                redirect_stdout=sys.stdout.isatty(),  # prints lines above the bar
            )
            self._task = self._bar.add_task("starting", total=1, note="")
            self._bar.start()
            self._console.show_cursor(True)  # a rank that torchrun kills could not restore it
        self._unprinted = (0, 0.0)  # tokens and seconds since the last line

    def show(self, step: int, tokens: int, seconds: float, result: StepResult) -> None:
        """Show a step that has ended."""
        if not self._is_shown:
            return
        assert result.loss is not None
        speed = result.num_tokens / seconds
        rate, norm = result.learning_rate, result.gradient_norm
        record = Record(step, result.loss, result.num_tokens, tokens, speed, rate, norm)
        share = self._options.share_done(step, tokens)
        if self._log is not None:
            print(record.as_json(), file=self._log, flush=True)
        self._unprinted = (
            self._unprinted[0] + result.num_tokens,
            self._unprinted[1] + seconds,
        )
        if self._bar is not None:
            num_steps = self._options.num_steps
            of_all = "" if num_steps is None else f" of {num_steps:,}"
            self._bar.update(
                self._task,
                completed=min(1.0, share),
                description=f"step {record.step:,}{of_all}",
                note=f"loss {record.loss:.4f}, {record.tokens_per_s:,.0f} tokens/s",
            )
        if step % self._options.log_every == 0 or share >= 1:
            num_tokens, seconds = self._unprinted
            self._unprinted = (0, 0.0)
            print(
                f"step {record.step} | loss {record.loss:.4f} | {record.tokens:,} tokens | "
                f"{num_tokens / seconds:,.0f} tokens/s",
                flush=True,
            )

    def note(self, *lines: str) -> None:
        if not self._options.quiet:
            for line in lines:
                self.say(line)

    def say(self, line: str) -> None:
        if self._is_shown:
            self._console.print(line)

    def close(self) -> None:
        """End bar and log; may be called again."""
        if self._bar is not None:
            self._bar.stop()
        if self._log is not None:
            self._log.close()


def _step_in(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf
