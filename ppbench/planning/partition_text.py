"""Writes a partition in the forms of other trainers: Megatron-LM's layout, torchtitan's modules.

    layers by stage   2, 2, 3, 1 on two ranks of two stages

    Megatron-LM       Et*2|t*2|t*3|tL
    torchtitan        [["tok_embeddings", "layers.0", "layers.1"], ["layers.2", "layers.3"], ...]

`engine.plan.program.to_csv` writes the program. What is written here is read back by the parsers of
`ppbench.planning.grammars`, which share nothing with the writers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate

from engine.plan.program import Placement, loop_placement, v_placement
from ppbench.errors import UsageError

EMBEDDINGS, NORM, HEAD = "tok_embeddings", "norm", "output"
"""torchtitan's modules around the layers; its latest models call the head `lm_head`."""


class HandoverError(UsageError):
    """A form of another trainer cannot express a pipeline; the message says why."""


def megatron_layout(layers: Sequence[int], placement: Placement) -> str:
    """The value of Megatron-LM's `--pipeline-model-parallel-layout`, as short as repeats make it.

    `layers` are counts by stage. E is the embedding, t a layer, L the loss, | the end of a stage,
    `*n` repeats. Raises HandoverError for a placement other than loops over all ranks: stage s
    belongs to rank s mod p there.
    """
    if len(layers) != placement.num_stages:
        raise ValueError(f"{len(layers)} counts of layers for {placement.num_stages} stages")
    p, num_stages = placement.world_size, placement.num_stages
    if num_stages % p or placement != loop_placement(p, num_stages // p):
        loops = (stage % p for stage in range(num_stages))
        stage = next((s for s, r in enumerate(loops) if placement.ranks[s] != r), num_stages - 1)
        raise HandoverError(
            f"Megatron-LM's layout cannot express this placement: there stage {stage} of "
            f"{num_stages} belongs to rank {stage % p} (loops over {p} ranks, as many stages on "
            f"each), here to rank {placement.ranks[stage]}; choose a schedule with loop placement"
        )
    texts = ["t" * count if count < 2 else f"t*{count}" for count in layers]
    texts[0] = f"E{texts[0]}"
    texts[-1] = f"{texts[-1]}L"
    stages = [f"{text}|" for text in texts[:-1]]
    # At each place the repeat that saves most is taken, in parentheses, which cannot be nested.
    # The comma after a repeat means nothing and parts its number from what follows.
    parts, begin = [], 0
    while begin < len(stages):
        period, times = _best_repeat(stages, begin)
        pattern = "".join(stages[begin : begin + period])
        parts.append(pattern if times == 1 else f"({pattern})*{times},")
        begin += period * times
    return "".join([*parts, texts[-1]])


def torchtitan_modules(layers: Sequence[int], head: str = HEAD) -> str:
    """The value of torchtitan's `module_fqns_per_model_part`: names of modules by stage.

    As a list of lists, which JSON, TOML and Python write alike. `layers` are counts by stage;
    `head` is what the model calls its output projection.
    """
    ends = list(accumulate(layers))
    names = [
        [f"layers.{layer}" for layer in range(end - count, end)]
        for count, end in zip(layers, ends, strict=True)
    ]
    names[0].insert(0, EMBEDDINGS)
    names[-1] += [NORM, head]
    return json.dumps(names)


def torchtitan_schedule(placement: Placement) -> str:
    """The schedule to name beside the program's file: torchtitan places stages by it.

    Raises HandoverError for a placement that none of them has.
    """
    p, num_stages = placement.world_size, placement.num_stages
    if placement == loop_placement(p):
        return "1F1B"
    if num_stages % p == 0 and placement == loop_placement(p, num_stages // p):
        return "Interleaved1F1B"
    if placement == v_placement(p):
        return "ZBVZeroBubble"
    raise HandoverError(
        "torchtitan cannot place these stages: it has loops over all ranks, and a V of two stages "
        f"per rank; here stages are on ranks {', '.join(map(str, placement.ranks))}"
    )


def _best_repeat(stages: Sequence[str], begin: int) -> tuple[int, int]:
    """How many stages from `begin` on repeat, and how often: 1, 1 where a repeat saves nothing."""
    best, most_saved = (1, 1), 0
    for period in range(1, (len(stages) - begin) // 2 + 1):
        pattern = stages[begin : begin + period]
        times = 1
        while stages[begin + times * period : begin + (times + 1) * period] == pattern:
            times += 1
        length = sum(map(len, pattern))
        saved = length * times - (length + len(f"()*{times},"))
        if saved > most_saved:
            best, most_saved = (period, times), saved
    return best
