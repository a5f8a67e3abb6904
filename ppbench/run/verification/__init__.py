"""Whether a run trains what its model's author wrote: both train two steps, and are compared.

    ranks   the case's own runtime, program and number of ranks, on few and short sequences
    author  the module that the factory or transformers returns, whole, in a process of its own,
            called as its author would call it; nothing of the engine's splitting is in it

Compared are the weights that the ranks begin with, the loss, the gradient of every parameter on
every rank that holds it, the norm where gradients are clipped, and all weights and buffers after
the optimizer. The second step is there because weights and random numbers that are not renewed
show only then.

Both run in float64 where the model does: rounding is then smaller than any mistake worth finding,
which in float32, and more so in bfloat16, it is not. What is left out by that is the conversion
between dtypes, and every result says in which dtype it was found.

    ranks.py        the ranks' side: what is to be verified, its steps, its outcome
    record.py       what has been verified on this machine before
    exchange.py     the files between the two sides
    author.py       the author's process
    modules.py      the author's module, and the weights that it begins with
    training.py     its two steps
    comparison.py   what differs
"""
