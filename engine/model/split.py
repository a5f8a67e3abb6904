"""What a model's name means, and the model ready to be split.

name                                       becomes
preset                                     a Llama configuration of `presets`, random weights
local folder, hub id                       its configuration and, if it has them, its weights
package.module:factory                     what the factory returns: a transformers model, an
                                           nn.Sequential, or any module with split = "trace"
"""

from __future__ import annotations

import copy
import difflib
import functools
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils.hub import cached_file

from engine.model.causal_lm import CausalLM, with_plain_attention
from engine.model.chain import sequential
from engine.model.checkpoint import Locate, checkpoint_files, locate_in
from engine.model.factory import Factory, find_factory
from engine.model.presets import PRESETS
from engine.model.probe import check_splits
from engine.model.stage_module import Model, ModelError
from engine.model.weights import cast_parameters, copy_tensors, initialise, read_checkpoint

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class ModelSpec:
    """What is trained and how it is cut.

    `name` is a preset, a hub id, a local checkpoint folder or `package.module:factory`.
    `partition` is `uniform`, `parameters`, `measured` or the number of layers of each stage.
    `weights` are a checkpoint's own where there is one (`auto`), or `random` from `seed`.
    `split = "trace"` cuts a factory's module before the submodules named in `split_points`.
    """

    name: str = "llama-8m"
    dtype: str = "float32"
    partition: str | tuple[int, ...] = "uniform"
    seed: int = 0
    weights: str = "auto"
    trust_remote_code: bool = False
    split: str = "auto"
    split_points: tuple[str, ...] = ()

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def is_factory(self) -> bool:
        return ":" in self.name

    @property
    def home(self) -> str | None:
        """The folder or hub id where a tokenizer may lie beside the model; None if it has none."""
        return None if self.is_factory or self.name in PRESETS else self.name


def open_model(
    spec: ModelSpec, shape: tuple[int, int], device: torch.device, *, is_tried: bool = False
) -> Model:
    """The model of a spec, without weights yet.

    An architecture of transformers is first tried, unless it `is_tried` already (`probe`).

    `shape` is that of a microbatch's token ids, `[batch, seq]`, and `device` where it will run:
    what a traced module is traced for. Raises ModelError.
    """
    if spec.split == "trace":
        return _trace(spec, shape, device)
    if spec.split_points:
        raise ModelError('split points are for split = "trace" only', "model.split_points")
    if spec.is_factory:
        return _from_factory(spec, is_tried)
    return _from_config(spec, is_tried)


def _trace(spec: ModelSpec, shape: tuple[int, int], device: torch.device) -> Model:
    from engine.model.traced import traced  # the tracer takes half a second to import

    if not spec.is_factory:
        raise ModelError(
            f'split = "trace" cuts what a factory returns ("package.module:factory"); '
            f'"{spec.name}" is none',
            "model.split",
        )
    if not spec.split_points:
        raise ModelError('split = "trace" needs split points', "model.split_points")
    factory = Factory(spec.name, find_factory(spec.name), spec.seed)
    return traced(factory, spec.split_points, spec.torch_dtype, shape, device)


def _from_factory(spec: ModelSpec, is_tried: bool) -> Model:
    factory = Factory(spec.name, find_factory(spec.name), spec.seed)
    if isinstance(factory.skeleton, nn.Sequential):
        return sequential(factory, spec.torch_dtype)
    if isinstance(factory.skeleton, PreTrainedModel):
        return _transformers_factory(factory, spec.torch_dtype, is_tried)
    raise ModelError(
        f'"{spec.name}" returns a {type(factory.skeleton).__name__}, which is neither an '
        'nn.Sequential nor a transformers model; set split = "trace" and split_points'
    )


def _transformers_factory(factory: Factory, dtype: torch.dtype, is_tried: bool) -> Model:
    skeleton = factory.skeleton
    assert isinstance(skeleton, PreTrainedModel)

    def build() -> PreTrainedModel:
        """The factory's own module, whatever it has done to it, without its weights."""
        model = factory.build(set())
        assert isinstance(model, PreTrainedModel)
        cast_parameters(model, dtype)
        return with_plain_attention(model)

    def fill(model: PreTrainedModel) -> None:
        owned = {factory.canonical[name] for name, _ in model.named_parameters()}
        copy_tensors(factory.build(owned), model)

    if not is_tried:
        check_splits(skeleton.config, type(skeleton))
    return CausalLM(build, fill)


def _from_config(spec: ModelSpec, is_tried: bool) -> Model:
    preset = PRESETS.get(spec.name)
    config = preset_config(spec.name) if preset else read_config(spec.name, spec.trust_remote_code)
    files = [] if preset or spec.weights == "random" else _weight_files(spec.name, config)

    def whole() -> PreTrainedModel:
        return _model_of(config, spec)

    def build() -> PreTrainedModel:
        with torch.device("meta"):
            return with_plain_attention(whole())

    def fill(model: PreTrainedModel) -> None:
        if files:
            read_checkpoint(model, files, whole)
        else:
            initialise(model, spec.seed, whole)

    model = CausalLM(build, fill)
    if not preset and not is_tried:
        check_splits(config)
    return model


def _model_of(config: PreTrainedConfig, spec: ModelSpec) -> PreTrainedModel:
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=spec.torch_dtype, trust_remote_code=spec.trust_remote_code
        )
    except (ValueError, ImportError) as error:
        raise ModelError(f'"{spec.name}": {_first_sentence(error)}') from error
    return model


def preset_config(name: str) -> LlamaConfig:
    preset = PRESETS[name]
    return LlamaConfig(
        vocab_size=preset.vocab_size,
        hidden_size=preset.hidden_size,
        intermediate_size=preset.intermediate_size,
        num_hidden_layers=preset.num_hidden_layers,
        num_attention_heads=preset.num_attention_heads,
        num_key_value_heads=preset.num_key_value_heads,
        head_dim=preset.head_dim,
        max_position_embeddings=preset.max_position_embeddings,
        rms_norm_eps=preset.rms_norm_eps,
        tie_word_embeddings=preset.tie_word_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": preset.rope_theta},
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )


def read_config(name: str, trust_remote_code: bool) -> PreTrainedConfig:
    """The configuration in a folder or on the hub. Raises ModelError."""
    path = _locate(name)("config.json")
    if path is None:
        raise ModelError(_nothing_there(name))
    try:
        settings = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise ModelError(f"{path}: not a readable configuration: {error}") from None
    if not isinstance(settings, dict):
        raise ModelError(f"{path}: not a readable configuration: it holds no JSON object")
    is_known = settings.get("model_type") in CONFIG_MAPPING
    if "auto_map" in settings and not is_known and not trust_remote_code:
        raise ModelError(
            f'"{name}" brings its own code, which is not run without consent; '
            "look at it, then set trust_remote_code = true",
            "model.trust_remote_code",
        )
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            name, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # remote code and validation raise what they like
        raise ModelError(f"{path}: not usable: {_first_sentence(error)}") from error
    return config


def _weight_files(name: str, config: PreTrainedConfig) -> list[Path]:
    """The checkpoint's files; none for a folder with nothing but a configuration.

    Raises ModelError rather than let weights be random that were meant to be read.
    """
    files = checkpoint_files(_locate(name), name)
    folder = Path(name)
    if not files and not folder.is_dir():
        raise ModelError(f'"{name}" has no safetensors that can be reached; {_HOW_TO_GO_ON}')
    others = sorted(path.name for kind in _OTHER_WEIGHTS for path in folder.glob(kind))
    if not files and others:
        raise ModelError(
            f"{folder / others[0]} is no safetensors file; convert it, or {_HOW_TO_GO_ON}"
        )
    if files and getattr(config, "quantization_config", None):
        raise ModelError(f'"{name}" is quantized and cannot be trained; {_HOW_TO_GO_ON}')
    return files


_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf")
_HOW_TO_GO_ON = 'set weights = "random" to train it from the beginning'


def _locate(name: str) -> Locate:
    folder = Path(name)
    if folder.is_dir():
        return locate_in(folder)
    if name.count("/") != 1:  # no hub id, so nothing to ask the network about
        close = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f'; did you mean "{close[0]}"?' if close else ""
        raise ModelError(f"{_nothing_there(name)}{hint}")
    return functools.partial(_from_hub, name)


def _from_hub(name: str, file: str) -> Path | None:
    """The file in the hub's local cache, fetched if need be; None if there is none."""
    try:
        found = cached_file(name, file, _raise_exceptions_for_missing_entries=False)
    except Exception as error:
        raise ModelError(f"{_nothing_there(name)} ({_first_sentence(error)})") from error
    return None if found is None else Path(found)


def _nothing_there(name: str) -> str:
    return (
        f'no model "{name}": it is no preset ({", ".join(PRESETS)}), no folder with a config.json, '
        "no hub id (owner/name) that can be reached and no package.module:factory"
    )


def _first_sentence(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__


def write_configuration(model: Model, folder: Path) -> None:
    """Beside saved tensors: what `AutoModelForCausalLM.from_pretrained` needs; else nothing."""
    if isinstance(model, CausalLM):
        config = copy.deepcopy(model.config)
        config.architectures = [model.architecture]
        config.save_pretrained(folder)
