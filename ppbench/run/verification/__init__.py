"""Verifies that a run trains the module that its model's author wrote: both train two steps.

    ranks   the case's own runtime, program and number of ranks, on few and short sequences
    author  the module that the factory or transformers returns, whole, in a process of its own,
            called as its author would call it, without the engine's splitting

The comparison covers the initial weights, the loss, the gradient of every parameter on every rank
that holds it, the norm where gradients are clipped, and all weights and buffers after the
optimizer. The second step shows weights and random numbers that are not renewed.

Both run in float64 if the model can: rounding is then smaller than any mistake worth finding, but
not in float32, let alone bfloat16. Conversions between dtypes are therefore not verified, and each
result names its dtype.

    ranks.py        the ranks' side: the case in small, its steps, the outcome
    record.py       results of earlier verifications on this machine
    exchange.py     the files between the two sides
    author.py       the author's process
    module.py       the author's module: initial weights and steps
    comparison.py   the differences
    losses.py       a run's losses beside the unsplit model's and the engine's, in every run
"""
