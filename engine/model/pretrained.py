"""Models of transformers: by a preset's name, a folder's, a hub id, or from a factory.

`split` imports this when it is asked for one. An emulated pipeline's first rank alone needs it.
"""

from __future__ import annotations

import copy
import difflib
from pathlib import Path

import torch
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
from engine.model.checkpoint import Locate, checkpoint_files, locate_in, read_json
from engine.model.factory import Factory
from engine.model.presets import PRESETS
from engine.model.probe import plan_of
from engine.model.spec import ModelSpec
from engine.model.stage_module import Model, ModelError, first_line
from engine.model.task import FactoryTask
from engine.model.weights import cast_parameters, copy_tensors, initialise, read_checkpoint


def from_factory(factory: Factory, spec: ModelSpec, task: FactoryTask | None = None) -> Model:
    skeleton = factory.skeleton
    assert isinstance(skeleton, PreTrainedModel)

    def build() -> PreTrainedModel:
        """The factory's own module, whatever it has done to it, without its weights."""
        model = factory.build(set())
        assert isinstance(model, PreTrainedModel)
        cast_parameters(model, spec.torch_dtype)
        return with_plain_attention(model)

    def fill(model: PreTrainedModel) -> None:
        owned = {factory.canonical[name] for name, _ in model.named_parameters()}
        copy_tensors(factory.build(owned), model)

    return CausalLM(build, fill, plan_of(skeleton, spec), task)


def from_name(spec: ModelSpec) -> Model:
    preset = PRESETS.get(spec.name)
    config = preset_config(spec.name) if preset else read_config(spec.name, spec.trust_remote_code)
    files = [] if preset or spec.weights == "random" else _weight_files(spec.name, config)

    def whole() -> PreTrainedModel:
        try:
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                copy.deepcopy(config),
                dtype=spec.torch_dtype,
                trust_remote_code=spec.trust_remote_code,
            )
        except (ValueError, ImportError) as error:
            raise ModelError(f'"{spec.name}": {_first_sentence(error)}') from error
        model.config.dtype = spec.torch_dtype  # which older releases leave unset
        return model

    def build() -> PreTrainedModel:
        with torch.device("meta"):
            return with_plain_attention(whole())

    def fill(model: PreTrainedModel) -> None:
        if files:
            read_checkpoint(model, files, whole)
        else:
            initialise(model, spec.seed, whole)

    return CausalLM(build, fill, plan_of(build(), spec))


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
    settings = read_json(path)
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

    def from_hub(file: str) -> Path | None:
        """The file in the hub's local cache, fetched if need be; None if there is none."""
        try:
            cached = cached_file(name, file, _raise_exceptions_for_missing_entries=False)
        except Exception as error:
            raise ModelError(f"{_nothing_there(name)} ({_first_sentence(error)})") from error
        return None if cached is None else Path(cached)

    return from_hub


def _nothing_there(name: str) -> str:
    return (
        f'no model "{name}": it is no preset ({", ".join(PRESETS)}), no folder with a config.json, '
        "no hub id (owner/name) that can be reached and no package.module:factory"
    )


def _first_sentence(error: Exception) -> str:
    return first_line(error) or type(error).__name__
