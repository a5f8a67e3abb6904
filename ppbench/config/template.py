"""The text of a first sweep file, sized for a machine: what `ppbench init` writes."""

from __future__ import annotations

from pathlib import Path

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
    text = Path(__file__).with_name("template.txt").read_text()
    return text.format(
        name=name_from(stem),
        machine=machine,
        device=f'"{device}"',
        preset=f'"{preset}"',
        dtype=f'"{dtype}"',
        world_sizes=str(sizes),
        seq_lens=seq_lens,
    ) + (_TIMES if device == EMULATED else _NO_TIMES)


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
