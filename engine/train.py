"""The command-line trainer: from options to checkpoints.

    torchrun --nproc-per-node 3 -m engine.train --data text:corpus.txt --max-tokens 1000000

1 `cli.options`      read, and checked by each rank before it talks to another
2 `cli.launch`       the ranks meet; what is wrong on any of them ends all, and is said once
3 `cli.preparation`  what a rank can find out alone
4 `cli.training`     step, show, save, until the goal is reached

Steps go to standard output, all else to standard error.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path

from engine import device_variables
from engine.cli.launch import Launch, RefusedError, is_known
from engine.cli.preparation import Job, fabric_of, prepare
from engine.cli.training import Display, Training

FAILED, REFUSED, INTERRUPTED = 1, 2, 130  # exit codes


def main() -> None:
    """Entry point of `python -m engine.train`."""
    device_variables.prepare(os.environ)
    try:
        code = _run(Launch.from_environment())
    except KeyboardInterrupt:
        code = INTERRUPTED
    if code:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # tearing communicators down waits for peers that wait for this rank


def _run(launch: Launch) -> int:
    try:
        job = launch.attempt(lambda: prepare(sys.argv[1:], launch))
        if job is not None:
            checkpoint = launch.gather(job.checkpoint)[0]  # ranks may see different latest ones
            train(job, launch, checkpoint)
        launch.close()
    except RefusedError:
        return REFUSED
    except Exception as error:
        import torch
        import torch.distributed as dist

        from engine.run.p2p.channel import TransferError

        if is_known(error):
            launch.say(f"rank {launch.rank}: {error}")
            return REFUSED
        words = str(error).partition("\n")[0]
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or "t allocate memory" in words:
            remedy = "try a smaller --microbatch-size, --recompute or more ranks"
            launch.say(f"rank {launch.rank}: {words}; {remedy}")
        elif isinstance(error, TransferError | dist.DistError) or "gloo/transport" in words:
            where = words.partition("[")[0].rstrip(": ") or "working together"
            launch.say(
                f"rank {launch.rank}: {where}: another rank has died; its own error says why"
            )
        else:
            traceback.print_exc()
        return FAILED
    return 0


def train(job: Job, launch: Launch, checkpoint: Path | None) -> None:
    """Build the trainer and run it to the end, from a checkpoint if there is one. Collective."""
    from engine.run.heap import keep_freed_memory
    from engine.trainer import Progress, Trainer, agree

    keep_freed_memory()
    fabric = fabric_of(job, launch)
    agreement = launch.attempt(lambda: agree(job.config, fabric))
    trainer = launch.attempt(lambda: Trainer(agreement, fabric))
    progress = Progress()
    if checkpoint is not None:
        progress = launch.attempt(lambda: trainer.resume(checkpoint))
    first_step = progress.step
    is_shown = launch.rank == trainer.lowered.placement.ranks[-1]
    display = launch.attempt(lambda: Display(job.options, first_step, is_shown=is_shown))
    options = job.options
    layers = ", ".join(str(len(owned)) for owned in trainer.partition)
    num_microbatches = options.global_batch_size // options.microbatch_size
    replicas = f"{options.replicas} replicas ({options.sharding}), " if options.replicas > 1 else ""
    display.note(
        f"{options.model}: {trainer.model.num_parameters:,} parameters; "
        f"{replicas}{launch.world_size} x {job.device.type}, {options.schedule}, layers {layers}; "
        f"{num_microbatches} microbatches of {options.microbatch_size}"
    )
    sizes = trainer.model.costs.of_stages(trainer.partition)
    bare = [str(stage) for stage, size in enumerate(sizes) if size == 0]
    if bare and not isinstance(job.config.model.partition, tuple):  # the user listed no layers
        stages = f"stage {bare[0]} has" if len(bare) == 1 else f"stages {', '.join(bare)} have"
        remedy = "use fewer ranks, another --partition or other --split-points"
        display.note(f"{stages} no parameters: nothing is trained there; {remedy}")
    if checkpoint is not None:
        display.note(f"resumed from {checkpoint}, after step {first_step}")
    elif options.resume is not None:
        display.note(f"no checkpoint in {options.save}: a fresh start")
    training = Training(options, launch, trainer, display, progress)
    try:
        try:
            training.run()
        finally:
            display.close()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # torchrun repeats what the terminal sent
        display.close()
        display.say(training.how_to_go_on())
        raise
    trainer.close()


if __name__ == "__main__":
    main()
