import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM

from engine.model.partition import PartitionError
from engine.model.presets import PRESETS
from engine.model.split import ModelSpec, build_stage, model_config

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_stages", [1, 2, 3, 6])
@pytest.mark.parametrize("preset", ["llama-tiny", "llama-tiny-tied"])
def test_weights_depend_on_name_and_seed_not_on_the_split(preset, num_stages):
    spec = ModelSpec(preset, seed=3)
    whole = build_stage(spec, 0, 1, CPU).own_parameters()
    for stage in range(num_stages):
        for name, parameter in build_stage(spec, stage, num_stages, CPU).own_parameters().items():
            name_in_whole = name if name in whole else "model.embed_tokens.weight"
            assert torch.equal(parameter, whole[name_in_whole]), name


def test_another_seed_gives_other_weights():
    first, second = (
        build_stage(ModelSpec("llama-tiny", seed=seed), 0, 1, CPU).own_parameters()[
            "lm_head.weight"
        ]
        for seed in (0, 1)
    )
    assert not torch.equal(first, second)


def test_weights_have_the_spread_that_the_configuration_asks_for():
    weight = build_stage(ModelSpec("llama-8m"), 0, 1, CPU).own_parameters()["lm_head.weight"].data
    assert float(weight.mean()) == pytest.approx(0, abs=1e-3)
    assert float(weight.std()) == pytest.approx(0.02, rel=0.02)


def test_building_leaves_the_random_state_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    build_stage(ModelSpec("llama-tiny"), 0, 2, CPU)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 6])
def test_stages_in_a_row_compute_what_transformers_computes(num_stages):
    spec = ModelSpec("llama-tiny", "float64")
    unsplit = LlamaForCausalLM(model_config(spec)).to(torch.float64)
    unsplit.load_state_dict(build_stage(spec, 0, 1, CPU).own_parameters())
    tokens = torch.randint(256, (2, 12))
    x = tokens
    for stage in range(num_stages):
        x = build_stage(spec, stage, num_stages, CPU)(x)
    assert torch.equal(x, unsplit(input_ids=tokens).logits)


class CountHostReads(TorchDispatchMode):
    """Counts the operations that would make the host wait for a device."""

    num_reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_reads += func == torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_forward_never_makes_the_host_wait_for_the_device(stage):
    module = build_stage(ModelSpec("llama-tiny"), stage, 3, CPU)
    x = torch.randint(256, (1, 8)) if stage == 0 else torch.rand(1, 8, 64)
    with CountHostReads() as counter:
        module(x).sum().backward()
    assert counter.num_reads == 0


def test_each_part_lands_on_its_stage():
    stages = [build_stage(ModelSpec("llama-tiny"), stage, 3, CPU) for stage in range(3)]
    owned = [{name.split(".")[1] for name in stage.own_parameters()} for stage in stages]
    assert owned == [{"embed_tokens", "layers"}, {"layers"}, {"layers", "norm", "weight"}]
    assert [len(stage.layers) for stage in stages] == [1, 2, 1]


def test_an_empty_stage_owns_nothing_and_passes_on_what_it_gets():
    stage = build_stage(ModelSpec("llama-tiny", partition=(2, 0, 2)), 1, 3, CPU)
    hidden = torch.rand(1, 4, 64)
    assert stage.own_parameters() == {}
    assert stage(hidden) is hidden


@pytest.mark.parametrize("preset", ["llama-tiny", "llama-tiny-tied", "llama-8m"])
def test_presets_state_their_true_size(preset):
    parameters = build_stage(ModelSpec(preset), 0, 1, CPU).own_parameters()
    assert sum(p.numel() for p in parameters.values()) == PRESETS[preset].num_parameters


def test_only_owned_parameters_exist_outside_the_meta_device():
    stage = build_stage(ModelSpec("llama-160m", partition=(1, *[1] * 11)), 1, 12, CPU)
    tensors = {**dict(stage.named_parameters()), **dict(stage.named_buffers())}
    assert not any(tensor.is_meta for tensor in tensors.values())
    assert sum(p.numel() for p in stage.parameters()) == PRESETS["llama-160m"].layer_parameters


def test_a_partition_that_does_not_fit_is_refused():
    with pytest.raises(PartitionError, match="sums to 3 layers; the model has 4"):
        build_stage(ModelSpec("llama-tiny", partition=(1, 2)), 0, 2, CPU)
