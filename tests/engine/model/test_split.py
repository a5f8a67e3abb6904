import json
from pathlib import Path

import huggingface_hub
import pytest
import torch
from models import configuration_folder
from ranks import in_a_process
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from engine.model.partition import partition_layers
from engine.model.presets import PRESETS
from engine.model.pretrained import preset_config
from engine.model.spec import ModelSpec
from engine.model.split import open_model, try_model
from engine.model.stage_module import ModelError
from engine.model.tiny import tiny_config

CPU = torch.device("cpu")
SHAPE = (1, 16)
THOROUGH = pytest.mark.thorough
ORDINARY = {
    *(("llama", tied, size) for tied in (False, True) for size in ("50KB", "1GB")),
    *(("mixtral", True, "50KB"), ("gemma2", True, "50KB"), ("phi3", False, "50KB")),
    ("qwen2_moe", False, "50KB"),
}
"""What the ordinary run reads: each architecture once, one of them in every way."""

CHECKPOINTS = [
    pytest.param(name, tied, size, marks=[THOROUGH] * ((name, tied, size) not in ORDINARY))
    for name in ("llama", "gemma2", "mixtral", "phi3", "qwen2_moe")
    for tied in (False, True)
    for size in ("50KB", "1GB")
]


def build_stage(spec, stage, num_stages):
    model = open_model(spec, SHAPE, CPU)
    partition = partition_layers(spec.partition, model.num_layers, num_stages)
    return model.build_stage(partition, stage, CPU)


@pytest.mark.parametrize("num_stages", [3, *(pytest.param(n, marks=THOROUGH) for n in (1, 2, 6))])
@pytest.mark.parametrize(
    "preset",
    ["llama-tiny-tied", "models:small_llama", "models:sequential"],
)
def test_weights_depend_on_name_and_seed_not_on_the_split(preset, num_stages):
    spec = ModelSpec(preset, seed=3)
    whole = build_stage(spec, 0, 1).own_parameters()
    for stage in range(num_stages):
        for name, parameter in build_stage(spec, stage, num_stages).own_parameters().items():
            name_in_whole = name if name in whole else "model.embed_tokens.weight"
            assert torch.equal(parameter, whole[name_in_whole]), name


def test_weights_have_the_spread_that_the_configuration_asks_for():
    weight = build_stage(ModelSpec("llama-8m"), 0, 1).own_parameters()["lm_head.weight"].data
    assert float(weight.mean()) == pytest.approx(0, abs=1e-3)
    assert float(weight.std()) == pytest.approx(0.02, rel=0.02)


@pytest.mark.parametrize("name", ["llama-tiny", "models:sequential"])
def test_building_leaves_the_random_state_alone(name):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    build_stage(ModelSpec(name), 0, 2)
    assert torch.equal(torch.rand(3), expected)


class CountHostReads(TorchDispatchMode):
    """Counts the operations that would make the host wait for a device."""

    num_reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_reads += func == torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_forward_never_makes_the_host_wait_for_the_device(stage):
    module = build_stage(ModelSpec("llama-tiny"), stage, 3)
    x = torch.randint(256, (1, 8)) if stage == 0 else torch.rand(1, 8, 64)
    with CountHostReads() as counter:
        module(x)[0].sum().backward()
    assert counter.num_reads == 0


def test_each_part_lands_on_its_stage():
    stages = [build_stage(ModelSpec("llama-tiny"), stage, 3) for stage in range(3)]
    owned = [{name.split(".")[1] for name in stage.own_parameters()} for stage in stages]
    assert owned == [{"embed_tokens", "layers"}, {"layers"}, {"layers", "norm", "weight"}]
    assert [len(stage.layers) for stage in stages] == [1, 2, 1]


@pytest.mark.parametrize("preset", ["llama-tiny", "llama-tiny-tied", "llama-8m"])
def test_presets_state_their_true_size(preset):
    parameters = build_stage(ModelSpec(preset), 0, 1).own_parameters()
    assert sum(p.numel() for p in parameters.values()) == PRESETS[preset].num_parameters


def test_only_owned_parameters_exist_outside_the_meta_device():
    stage = build_stage(ModelSpec("llama-160m", partition=(1, *[1] * 11)), 1, 12)
    tensors = {**dict(stage.named_parameters()), **dict(stage.named_buffers())}
    assert not any(tensor.is_meta for tensor in tensors.values())
    assert sum(p.numel() for p in stage.parameters()) == PRESETS["llama-160m"].layer_parameters


def checkpoint(folder, architecture="llama", *, tied=False, max_shard_size="50KB", **changes):
    """A folder as `save_pretrained` leaves it, and the model that was saved."""
    path = Path(configuration_folder(folder, architecture, tied=tied, **changes))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return path, model


@pytest.mark.parametrize(("architecture", "tied", "max_shard_size"), CHECKPOINTS)
def test_a_checkpoint_is_read_as_transformers_reads_it(
    tmp_path, architecture, tied, max_shard_size
):
    path, model = checkpoint(tmp_path, architecture, tied=tied, max_shard_size=max_shard_size)
    assert (path / "model.safetensors").exists() == (max_shard_size == "1GB")
    expected = AutoModelForCausalLM.from_pretrained(path).state_dict()
    names = set()
    for stage in range(3):
        for name, parameter in build_stage(ModelSpec(str(path)), stage, 3).own_parameters().items():
            assert torch.equal(parameter, expected[name]), name
            names.add(name)
    assert names == {name for name, _ in model.named_parameters(remove_duplicate=not tied)}


def test_a_hub_id_is_read_from_the_hubs_local_cache(tmp_path, monkeypatch):
    path, model = checkpoint(tmp_path)
    cache = tmp_path / "cache"
    repository = cache / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    (repository / "snapshots").mkdir()
    path.rename(repository / "snapshots" / ("0" * 40))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    parameters = build_stage(ModelSpec("org/name"), 1, 2).own_parameters()
    assert len(parameters) == 20
    assert torch.equal(parameters["lm_head.weight"], model.lm_head.weight)


def test_a_checkpoint_is_cast_to_the_dtype_asked_for(tmp_path):
    path, _ = checkpoint(tmp_path)
    parameters = build_stage(ModelSpec(str(path), "bfloat16"), 0, 2).own_parameters()
    assert {p.dtype for p in parameters.values()} == {torch.bfloat16}


def peak_while_building(name, stage):
    """Bytes by which the process's high-water mark rises above what importing needs."""
    from engine.run.memory import process_peak_bytes, reset_process_peak

    build_stage(ModelSpec("llama-tiny"), 0, 2)  # imports and caches
    reset_process_peak()
    before = process_peak_bytes()
    built = build_stage(ModelSpec(name), stage, 2)
    return process_peak_bytes() - before, sum(p.nbytes for p in built.parameters())


@pytest.mark.parametrize(("kind", "stage"), [("checkpoint", 0), ("factory", 1)])
def test_starting_one_of_two_stages_needs_less_than_60_percent_of_the_whole_model(
    tmp_path, kind, stage
):
    whole_bytes = 4 * PRESETS["llama-160m"].num_parameters
    name = {"preset": "llama-160m", "factory": "models:big_sequential"}.get(kind)
    if kind == "checkpoint":
        name = str(tmp_path / "saved")
        config = preset_config("llama-160m")
        config.num_hidden_layers, config.hidden_size, config.vocab_size = 4, 384, 16_000
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        model.to_empty(device="cpu").save_pretrained(name, max_shard_size="100MB")
        whole_bytes = 4 * model.num_parameters()
    peak_bytes, owned_bytes = in_a_process(peak_while_building, name, stage)
    assert 0.4 * whole_bytes < owned_bytes
    assert peak_bytes < 0.6 * whole_bytes, f"{peak_bytes:,} of {whole_bytes:,}"


def refusal(spec):
    with pytest.raises(ModelError) as caught:
        open_model(spec, SHAPE, CPU)
    return str(caught.value), caught.value.key


def test_a_missing_shard_is_named(tmp_path):
    path, _ = checkpoint(tmp_path)
    shard = sorted(path.glob("model-*.safetensors"))[1]
    shard.unlink()
    message, _ = refusal(ModelSpec(str(path)))
    assert (
        message == f"{path}: shard {shard.name} is missing; model.safetensors.index.json names it"
    )


@pytest.mark.parametrize("damage", ["cut", "text"])
def test_a_corrupt_shard_is_named(tmp_path, damage):
    path, _ = checkpoint(tmp_path)
    shard = sorted(path.glob("model-*.safetensors"))[1]
    whole = shard.read_bytes()
    damaged = {
        "cut": whole[:-10],
        "text": b"version https://git-lfs.github.com/spec/v1\n",
    }
    shard.write_bytes(damaged[damage])
    message, _ = refusal(ModelSpec(str(path)))
    assert message.startswith(f"{shard}: corrupt: ")


def test_weights_that_are_not_safetensors_are_refused_not_replaced_by_random_ones(tmp_path):
    path = Path(configuration_folder(tmp_path, "llama"))
    (path / "pytorch_model.bin").write_bytes(b"x")
    message, _ = refusal(ModelSpec(str(path)))
    assert message.startswith(
        f"{path}/pytorch_model.bin is no safetensors file; convert it, or set"
    )
    open_model(ModelSpec(str(path), weights="random"), SHAPE, CPU)


TIES = r"ties lm_head\.weight to model\.embed_tokens\.weight"


@pytest.mark.parametrize(
    ("change", "stage", "num_stages", "message"),
    [
        ({"num_hidden_layers": 5}, 1, 2, r"no tensor for model\.layers\.4"),
        ({"intermediate_size": 80}, 0, 2, r"has shape \[.*96.*\], its configuration says .*80"),
        ({"quantization_config": {"quant_method": "fp8"}}, 0, 1, "is quantized and cannot be"),
        ({"tie_word_embeddings": True}, 0, 1, TIES),
        ({"tie_word_embeddings": True}, 1, 2, TIES),
    ],
)
def test_a_checkpoint_that_its_configuration_does_not_fit_is_refused(
    tmp_path, change, stage, num_stages, message
):
    path, _ = checkpoint(tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ModelError, match=message):
        build_stage(ModelSpec(str(path)), stage, num_stages)


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("two_lists", {}, "calls the modules of transformer.h, tail: name the list that is to be"),
        ("two_lists", {"layers": "h"}, '"h" is no list of layers .* there is transformer.h, tail'),
        (
            "two_lists",
            {"layers": "transformer.h", "before_layers": ("wte",)},
            '"wte" is no module beside transformer.h; there is lm_head, tail, transformer.wte',
        ),
        ("sequential", {"layers": "2"}, "an nn.Sequential, each child of which is a layer"),
        ("in_the_middle", {}, "its forward calls between between the layers of transformer.h"),
        (
            "shortened",
            {"layers": "transformer.h"},
            "TwoLists has no module transformer.ln_f, which another model of its",
        ),
        ("loose", {}, '"transformer.scale" belongs, which has parameters.*a module of its own'),
    ],
)
def test_where_layers_are_must_be_told_and_is_named(name, keys, message):
    with pytest.raises(ModelError, match=message):
        open_model(ModelSpec(f"models:{name}", **keys), SHAPE, CPU)


def test_a_model_that_has_but_a_part_of_its_configuration_is_tried_by_its_own_class(tmp_path):
    tiny_config(CONFIG_MAPPING["emu3"]()).save_pretrained(tmp_path)
    model = open_model(spec := ModelSpec(str(tmp_path)), SHAPE, CPU)
    try_model(model, spec)
    assert model.num_layers == 4


def test_an_architecture_whose_layers_share_more_than_the_hidden_state_is_refused(tmp_path):
    tiny_config(CONFIG_MAPPING["glm_moe_dsa"]()).save_pretrained(tmp_path)
    model = open_model(spec := ModelSpec(str(tmp_path)), SHAPE, CPU)
    with pytest.raises(ModelError) as caught:
        try_model(model, spec)
    message = str(caught.value)
    assert "glm_moe_dsa cannot be split: its layers need more from each other" in message


def test_remote_code_is_not_run_without_consent(tmp_path):
    auto_map = {"AutoConfig": "code.MyConfig", "AutoModelForCausalLM": "code.MyModel"}
    settings = {"model_type": "mine", "auto_map": auto_map}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "code.py").write_text("raise SystemExit('it was run')")
    message, key = refusal(ModelSpec(str(tmp_path)))
    assert "brings its own code, which is not run without consent" in message
    assert key == "model.trust_remote_code"


def traced(name, *points):
    return ModelSpec(name, split="trace", split_points=points)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("no-such-model", "it is no preset .*, no folder with a config.json, no hub id"),
        ("no_such_module:factory", "cannot import no_such_module"),
        ("models:nothing", 'models has no callable "nothing"'),
        ("models:no_module", "must return a torch.nn.Module, or a tuple .* it returned str"),
        ("models:broken", "the factory failed: RuntimeError: no weights today"),
        ("models:Tutorial", 'neither an nn.Sequential nor a transformers model; set split = "tr'),
        (traced("llama-tiny", "model"), "cuts what a factory"),
        (traced("models:Tutorial"), "needs split points"),
        (
            traced("models:Tutorial", "layers.9"),
            '"layers.9" is no submodule of models:Tutorial; it has tok_embeddings',
        ),
        (ModelSpec("llama-tiny", split_points=("x",)), 'are for split = "trace" only'),
    ],
    ids=str,
)
def test_a_model_that_cannot_be_had_or_cut_says_why(monkeypatch, spec, message):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=message):
        open_model(ModelSpec(spec) if isinstance(spec, str) else spec, SHAPE, CPU)
