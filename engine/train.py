"""The command-line trainer: from options to checkpoints.

    torchrun --nproc-per-node 3 -m engine.train --data text:corpus.txt --max-tokens 1000000

1 `train_options`   options, checked by each rank before it talks to another
2 `Launch`          the ranks; what is wrong on any of them is said once, by one
3 `prepare`         what a rank can find out alone
4 `train`           all of this, then step, show, save until the goal is reached

Steps go to standard output, all else to standard error.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar, cast

from engine import device_variables
from engine.train_options import OptionError, configuration, read_options

if TYPE_CHECKING:
    import torch

    from engine.configuration import TrainerConfig

T = TypeVar("T")
FAILED, REFUSED, INTERRUPTED = 1, 2, 130  # exit codes
PATIENCE = timedelta(days=1)
"""Time limit of collectives: a rank may tokenise a data set while the others wait for it."""


class Launch:
    """This process's place among the ranks, from torchrun's environment; alone without it."""

    def __init__(self) -> None:
        places = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        numbers = (int(os.environ.get(name, default)) for name, default in places.items())
        self.rank, self.world_size, self.local_rank, self.local_world_size = numbers

    def gather(self, ours: T) -> list[T]:
        """Every rank's object. Blocks until all ranks call it; the first call connects them.

        Only these objects use the default process group; tensors use the groups of `Fabric`.
        """
        if self.world_size == 1:
            return [ours]
        import torch.distributed as dist

        if not dist.is_initialized():
            from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # public

            from engine.rank_store import store_of_ranks

            # A prefix per restart (torchrun --max-restarts) keeps gloo from reading the dead ranks'
            # addresses in the agent's store (pytorch issue 135712).
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            own = PrefixStore(f"train-attempt-{attempt}", store_of_ranks(PATIENCE))
            dist.init_process_group(
                "gloo", store=own, rank=self.rank, world_size=self.world_size, timeout=PATIENCE
            )
        theirs: list[Any] = [None] * self.world_size
        dist.all_gather_object(theirs, ours)
        return theirs

    def attempt(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank; all of them exit if it fails on any.

        Blocks until all ranks have run it. The first rank of those with an error prints it.
        """
        result: T | None = None
        problem: str | None = None
        try:
            result = work()
        except Exception as error:
            if not is_known(error):
                raise
            problem = str(error)
        problems = self.gather(problem)
        if any(other is not None for other in problems):
            if problem is not None and problem not in problems[: self.rank]:
                is_everywhere = problems.count(problem) == self.world_size
                say(f"error: {problem if is_everywhere else f'rank {self.rank}: {problem}'}")
            self.gather(None)  # torchrun ends all ranks with the first, so all have printed before
            sys.exit(REFUSED)
        return cast(T, result)


def is_known(error: Exception) -> bool:
    """Whether its message suffices: the engine's own errors say what a user can do."""
    return type(error).__module__.startswith("engine.")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Entry point of `python -m engine.train`."""
    device_variables.prepare(os.environ)
    launch = Launch()
    try:
        train(launch)
    except SystemExit as end:
        code = cast(int, end.code)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception as error:
        code = _explain(error, launch.rank)
    else:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # tearing communicators down waits for peers that wait for this rank


def _explain(error: Exception, rank: int) -> int:
    """Print what has ended this rank; returns the exit code."""
    import torch
    import torch.distributed as dist

    from engine.run.p2p.channel import TransferError

    who, words = f"error: rank {rank}", str(error).partition("\n")[0]
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "t allocate memory" in words:
        say(f"{who}: {words}; try a smaller --microbatch-size, --recompute or more ranks")
    elif isinstance(error, TransferError) and "; " in words:  # it says what to do
        say(f"{who}: {words}")
    elif isinstance(error, TransferError | dist.DistError) or "gloo/transport" in words:
        where = words.partition("[")[0].rstrip(": ") or "working together"
        say(f"{who}: {where}: another rank has died; its own error says why")
    elif is_known(error):
        say(f"{who}: {error}")
        return REFUSED
    else:
        traceback.print_exception(error)
    return FAILED


def prepare(
    arguments: Sequence[str], launch: Launch
) -> tuple[argparse.Namespace, TrainerConfig, torch.device, Path | None]:
    """Check what may be wrong on one rank alone. Raises errors that `is_known` accepts.

    Returns the options, the configuration, the rank's device and the checkpoint to go on from.
    """
    options = read_options(arguments)
    import torch

    from engine import checkpoints
    from engine.configuration import data_of, model_of, program_of, tokenizer_of
    from engine.run import device as devices

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device, kind = devices.CPU, None if options.device == "auto" else options.device
    if kind != "cpu" and (kind or devices.count()):
        if (problem := device_variables.refused(os.environ)) is not None:
            raise OptionError(f"--device {options.device}: {problem}")
        try:
            device = devices.of_local_rank(launch.local_rank, kind)
        except RuntimeError as error:
            raise OptionError(f"--device: {error}, or auto") from None
    config = configuration(options, launch.world_size)
    program_of(config)
    model = model_of(config, device)
    has_end = options.lr_schedule != "cosine" or options.lr_decay_steps or not options.max_tokens
    if model.task.vocab_size is None and not has_end:
        raise OptionError(
            "the cosine has no end: how many tokens a batch of the factory has is not known; give "
            "--lr-decay-steps"
        )
    data_of(config, model, tokenizer_of(config), device).close()
    source = None if options.save is None else checkpoints.latest(options.save)
    if options.resume not in (None, "latest"):
        source = checkpoints.find(Path(options.resume))
    elif options.resume is None and source is not None:
        raise OptionError(  # else two runs would be taken for one
            f"--save: {source} exists already; go on from it with --resume latest, or choose "
            "another folder"
        )
    if options.save is not None:
        try:
            options.save.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=options.save).close()
        except OSError as error:
            raise OptionError(f"--save: cannot write in {options.save}: {error.strerror}") from None
    return options, config, device, source


def train(launch: Launch) -> None:
    """Train to the end, from a checkpoint if there is one. Collective: all ranks decide alike."""
    options, asked, device, source = launch.attempt(lambda: prepare(sys.argv[1:], launch))
    from engine import checkpoints
    from engine.model.partition import totals_of
    from engine.run import device as devices
    from engine.run.clock import clock_for
    from engine.run.heap import keep_freed_memory
    from engine.run.p2p.fabric import Fabric
    from engine.run.recording import Recording
    from engine.run.shards import Sharded, check_views
    from engine.trainer import ModelStages, Trainer, agree

    keep_freed_memory()
    if device.type != (kind := launch.gather(device.type)[0]):
        remedy = "give --device cpu, or use machines with GPUs"
        raise OptionError(f"this rank has {device.type}, rank 0 {kind}; {remedy}")
    # All ranks need the same answer: both ends of a channel must be of one kind.
    is_shared = any(launch.gather(launch.local_world_size > devices.count()))
    fabric = Fabric(device, clock_for(device), is_device_shared=is_shared)
    agreement = launch.attempt(lambda: agree(asked, fabric))

    def build_stages() -> ModelStages:
        """Make this rank's stages: apart, since it may fail on one rank alone."""
        stages = ModelStages(agreement, fabric)
        if asked.replicas > 1 and Sharded.by(asked.sharding).optimizer:
            for module in stages.modules.values():
                check_views(module)
        return stages

    trainer = Trainer(agreement, fabric, stages=launch.attempt(build_stages))
    source = launch.gather(source)[0]  # ranks may see different latest ones
    progress = checkpoints.Progress()
    if source is not None:
        progress = launch.attempt(lambda: checkpoints.resume(trainer, source))
    step, tokens = progress.step, progress.num_tokens
    is_shown = launch.rank == trainer.lowered.placement.ranks[-1]
    log = launch.attempt(lambda: _log_of(options.log_file if is_shown else None, step))
    is_cautioned, unprinted = False, (0, 0.0)  # tokens and seconds since the last line

    def note(words: str) -> None:
        if is_shown and not options.quiet:
            say(words)

    def caution(what: str | None) -> None:
        """Say, once on this rank, that a number is no longer finite."""
        nonlocal is_cautioned
        if what is not None and not is_cautioned:
            is_cautioned = True
            who = f"step {step}: {what} is not finite on rank {launch.rank} (NaN or infinite)"
            remedy = "try a lower --learning-rate, --clip-norm, or another --dtype"
            say(f"caution: {who}: nothing is learnt from now on; {remedy}")

    def is_over() -> bool:
        return step >= (options.max_steps or math.inf) or tokens >= (options.max_tokens or math.inf)

    layers = ", ".join(str(len(owned)) for owned in trainer.partition)
    replicas = f"{options.replicas} replicas ({options.sharding}), " if options.replicas > 1 else ""
    ranks = f"{replicas}{launch.world_size} x {device.type}, {options.schedule}, layers {layers}"
    size, num = options.microbatch_size, options.global_batch_size // options.microbatch_size
    parameters = f"{options.model}: {trainer.model.num_parameters:,} parameters"
    note(f"{parameters}; {ranks}; {num} microbatches of {size}")
    sizes = totals_of(trainer.model.part_sizes, trainer.partition)
    bare = [str(stage) for stage, size in enumerate(sizes) if size == 0]
    if bare and not isinstance(asked.model.partition, tuple):  # the user listed no layers
        stages = f"stage {bare[0]} has" if len(bare) == 1 else f"stages {', '.join(bare)} have"
        remedy = "use fewer ranks, another --partition or other --split-points"
        note(f"{stages} no parameters: nothing is trained there; {remedy}")
    if options.resume is not None:
        fresh = f"no checkpoint in {options.save}: a fresh start"
        note(fresh if source is None else f"resumed from {source}, after step {step}")
    if is_over():
        note(f"step {step} has reached the end: nothing to do")
    try:
        while not is_over():
            started = time.perf_counter()
            result = trainer.step(step, Recording.off)
            seconds = time.perf_counter() - started
            step, tokens = step + 1, tokens + result.num_tokens
            if log is not None:
                line = {
                    "step": step,
                    "loss": result.loss,
                    "num_tokens": result.num_tokens,
                    "tokens": tokens,
                    "tokens_per_s": result.num_tokens / seconds,
                    "learning_rate": result.learning_rate,
                    "gradient_norm": result.gradient_norm,
                }
                finite = {k: v for k, v in line.items() if v is not None and math.isfinite(v)}
                print(json.dumps(dict.fromkeys(line) | finite), file=log, flush=True)
            unprinted = unprinted[0] + result.num_tokens, unprinted[1] + seconds
            if is_shown and (step % options.log_every == 0 or is_over()):
                loss, speed = result.loss, unprinted[0] / unprinted[1]
                counts = f"{tokens:,} tokens | {speed:,.0f} tokens/s"
                print(f"step {step} | loss {loss:.4f} | {counts}", flush=True)
                unprinted = (0, 0.0)
            if result.loss is not None and not math.isfinite(result.loss):
                caution(f"the loss, {result.loss},")
            if not is_cautioned:
                caution(trainer.find_not_finite())
            is_due = options.save_every is not None and step % options.save_every == 0
            if options.save is not None and (is_due or is_over()):
                caution(trainer.find_not_finite(has_weights=True))
                done = checkpoints.Progress(step, tokens)
                save = functools.partial(checkpoints.save, trainer, options.save, done)
                note(f"saved {launch.attempt(save)}")
        caution(trainer.find_not_finite(has_weights=True))
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # torchrun repeats what the terminal sent
        remedy = "nothing is saved: --save without --save-every saves at the end"
        if options.save is not None and (saved := checkpoints.latest(options.save)) is not None:
            remedy = f"{saved} is saved: go on with the same command and --resume latest"
        if is_shown:
            say(f"stopped after step {step}; {remedy}")
        raise
    trainer.close()
    if launch.world_size > 1:
        import torch.distributed as dist

        dist.barrier()
        dist.destroy_process_group()


def _log_of(path: Path | None, first_step: int) -> TextIO | None:
    """Open the log; a resumed run goes on with it, without the steps that it repeats."""
    if path is None:
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
        steps = (re.match(r'\{"step": (\d+),.*\}\n', line) for line in lines)
        kept = [match[0] for match in steps if match and int(match[1]) <= first_step]
        path.write_text("".join(kept))
        return path.open("a")
    except OSError as error:
        raise OptionError(f"--log-file: cannot write {path}: {error.strerror}") from None


if __name__ == "__main__":
    main()
