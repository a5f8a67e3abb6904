"""Mistakes that train wrong without any error, to be planted in a rank after it is built.

Each takes the engine's runtime and spoils it where it is; a rank that it does not concern it leaves
alone. What it spoils is what a bug of a runtime, a splitter or a schedule would.
"""

from __future__ import annotations

import functools

import torch
from torch.utils.checkpoint import checkpoint


def stage_of(runtime, index):
    """The executor's stage, if it is on this rank."""
    return runtime.runner._stages.get(index)


def module_of(runtime, name):
    """A submodule by its name in the unsplit chain, if it is on this rank."""
    piece, _, rest = name.partition(".")
    for module in runtime.modules.values():
        for place, unit in zip(module.layers, module.units, strict=True):
            if place == int(piece):
                return unit.get_submodule(rest)
    return None


def parameter_of(runtime, name):
    return runtime.parameters().get(name)


def before_sums(runtime, act):
    """Do something with the gradients, when all microbatches are through."""
    usual = runtime.shared.sum_gradients
    runtime.shared.sum_gradients = lambda *how: (act(), usual(*how))


def nothing(_runtime):
    pass


def unsummed_tie(runtime):
    runtime.shared.sum_gradients = lambda *_: None


def wrong_gradient(runtime):
    """The first stage's second microbatch goes back with the first one's gradient."""
    if stage := stage_of(runtime, 0):
        usual, seen = stage.backward, {}

        def backward(microbatch, gradients):
            seen[microbatch] = tuple(x.clone() for x in gradients)
            return usual(microbatch, seen[0] if microbatch == 1 else gradients)

        stage.backward = backward


def loss_told_wrong(runtime):
    """Training is right; only what is said of it is not."""
    runner = runtime.runner
    usual = runner.run

    def run(*arguments):
        loss = usual(*arguments)
        return None if loss is None else loss * 1.01

    runner.run = run


def missing_bias_gradient(runtime):
    bias = parameter_of(runtime, "5.down.bias")
    if bias is not None:
        before_sums(runtime, lambda: setattr(bias, "grad", None))


def _stale(runtime, name, part):
    """Updates leave a part of a weight as it was."""
    weight = parameter_of(runtime, name)
    if weight is not None:
        trainer, usual = runtime, runtime._update

        def update(rate):
            old = part(weight.detach()).clone()
            usual(rate)
            part(weight.data).copy_(old)

        trainer._update = update


def stale_weight(runtime):
    _stale(runtime, "5.up.weight", lambda tensor: tensor)


def stale_imaginary_part(runtime):
    _stale(runtime, "2.turns", lambda tensor: tensor.imag)


def other_initial_weight(runtime):
    weight = parameter_of(runtime, "4.layer.down.weight")
    if weight is not None:
        weight.data[0, 0] += 1e-4


def trained_frozen(runtime):
    frozen = parameter_of(runtime, "2.up.weight")
    if frozen is not None:
        frozen.requires_grad_(True)


def _with_state(runtime, change):
    for module in runtime.modules.values():
        module.own_state = lambda usual=module.own_state: change(usual())


def lost_state(runtime):
    """A weight is in no checkpoint of this rank."""
    _with_state(runtime, lambda own: {n: own[n] for n in own if n != "3.norm.bias"})


def superfluous_state(runtime):
    _with_state(runtime, lambda own: {**own, "9.weight": torch.ones(1)})


def frozen_statistics(runtime):
    if batched := module_of(runtime, "3"):
        batched.norm.momentum = 0.0


def norm_of_one_rank(runtime):
    runtime._sum_over_all = lambda _: None


def recomputed_with_other_numbers(runtime):
    for module in runtime.modules.values():
        for unit in module.units:
            unit.forward = functools.partial(
                checkpoint, unit.forward, use_reentrant=False, preserve_rng_state=False
            )


def _draws_alike(owner, method):
    """Each call begins with the same random numbers."""
    usual = getattr(owner, method)
    setattr(owner, method, lambda *arguments: (torch.manual_seed(0), usual(*arguments))[1])


def same_numbers_each_microbatch(runtime):
    for stage in runtime.runner._stages.values():
        _draws_alike(stage, "forward")


def same_numbers_each_step(runtime):
    _draws_alike(runtime.runner, "run")


def no_dropout(runtime):
    for module in runtime.modules.values():
        module.eval()


def other_weight_of_a_checkpoint(runtime):
    weight = parameter_of(runtime, "model.layers.2.mlp.up_proj.weight")
    if weight is not None:
        weight.data[1, 1] += 1e-3
