"""The text of a first sweep file, sized for a machine: what `ppbench init` writes."""

from __future__ import annotations

from ppbench.config.case import EMULATED
from ppbench.config.kinds import name_from


def sweep_template(stem: str, num_cores: int, num_gpus: int) -> str:
    """A sweep file with a comment on every line; `stem` is the name of the file without its end.

    Its ranks are no more than the GPUs or, without any, the cores; on a single core they are
    emulated.
    """
    sizes = [size for size in (2, 4, 8) if size <= (num_gpus or num_cores)]
    if num_gpus:
        machine = f"{num_gpus} GPU{'s' if num_gpus > 1 else ''}"
        device, preset, dtype = "cuda", "llama-160m", "bfloat16"
        sizes, seq_lens = sizes or [1], "[1024]"
    else:
        machine = f"{num_cores} core{'s' if num_cores > 1 else ''}, no GPU"
        device, preset, dtype = "cpu" if sizes else EMULATED, "llama-8m", "float32"
        sizes, seq_lens = sizes or [2, 4], "[128]"
    return _TEMPLATE.format(
        name=name_from(stem),
        machine=machine,
        device=f'"{device}"',
        preset=f'"{preset}"',
        dtype=f'"{dtype}"',
        world_sizes=str(sizes),
        microbatches="[4, 8]",
        seq_lens=seq_lens,
        times=_TIMES if device == EMULATED else _NO_TIMES,
    )


_TIMES = """\
[emulated]                     # computation sleeps for these times; messages are real
F_ms = 10                      # forward of a microbatch on a rank, in milliseconds
I_ms = 10                      # half of its backward: gradients of the inputs
W_ms = 10                      # the other half: gradients of the weights
# gather_ms = 5                # with replicas: to gather a stage's parameters, if these are sharded
# reduce_ms = 10               # and to sum its gradients
"""
_NO_TIMES = """\
# [[override]]                 # other settings for some cases: here 16 ranks, if the grid has them,
# where = {world_size = 16}    # are emulated: computation sleeps, messages are real
# set   = {device = "emulated", emulated = {F_ms = 10, I_ms = 10, W_ms = 10}}
"""
_TEMPLATE = """\
# Every combination of the values in [grid] is a case: trained for a few steps, and measured.
# The sizes are those of the machine on which this file was made: {machine}.
name   = "{name}"
device = {device:<22}# "cpu", "cuda", "emulated", or "auto": the GPU if there is one

[model]
preset    = {preset:<19}# or a hub id, a checkpoint folder, "package.module:factory"
dtype     = {dtype:<19}# or another of "float32", "bfloat16", "float64"
partition = "uniform"          # layers to stages; or "parameters", "measured", a list: [3, 5]
# weights = "random"           # do not read those of a checkpoint

[data]
source    = "stdlib"           # Python's own sources as bytes; or "synthetic", "text:PATH",
                               # "files:PATH", "hf:NAME?split=train"
tokenizer = "auto"             # the model's own, else bytes; or "bytes", a hub id or a folder

[train]
optimizer       = "adamw"      # or "sgd"
learning_rate   = 1e-4
microbatch_size = 1            # sequences in a microbatch
recompute       = false        # true: layers keep only their input, and compute forward twice
# clip_norm     = 1.0          # largest norm of all gradients together
# autocast      = "bfloat16"   # precision of computation, where dtype is that of the weights
# compile       = true         # each stage through torch.compile

[measure]
warmup_steps = 2               # steps before measuring, and more while steps get faster
steps        = 5               # measured steps; with fewer than 3 the median is unreliable
launches     = 3               # starts of the processes: without 3, no difference is certain
# timeout_s  = 1800            # longest time of a run, in seconds
# retry      = 1               # further tries of a run that fails

[launch]
threads_per_rank = 1           # CPU threads of a rank

[grid]                         # any key may be an axis, such as train.recompute = [false, true]
schedule         = ["afab", "1f1b"]  # `ppbench schedules list` has all; "csv:PATH" is your own
world_size       = {world_sizes:<18}# ranks: processes in the pipeline
num_microbatches = {microbatches:<18}# microbatches of a step
seq_len          = {seq_lens:<18}# tokens of a sequence
# replicas       = [1, 2]            # pipelines that train together, each on its share
# sharding.policy = ["zero2"]        # what 2 or more replicas share: also "none", "ddp", "zero1",
#                                    # "zero3" and "torch"

# [[exclude]]                  # combinations to leave out
# world_size = 2
# num_microbatches = 4

{times}"""
