"""Ways to damage a checkpoint: each returns which files it touched.

`without checksums` stands for a checkpoint of an older version, or for a writer that is wrong and
signs what it writes: then nothing but the contents tells.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

CHECKSUMS = "checkpoint.sha256"
MODEL_INDEX, OPTIMIZER_INDEX = "model.safetensors.index.json", "optimizer.safetensors.index.json"
MOMENTS = "optimizer-00001-of-00002.safetensors"
WEIGHTS = "model-00001-of-00002.safetensors"
Damage = Callable[[Path], str]
"""Damages the checkpoint in a folder; returns the name that the error must have."""


def edited(name: str, change: Callable[[dict], object]) -> Damage:
    """Another JSON in place of a file's: what `change` returns, or has made of it."""

    def damage(folder: Path) -> str:
        (folder / CHECKSUMS).unlink()
        content = json.loads((folder / name).read_text())
        changed = change(content)
        (folder / name).write_text(json.dumps(content if changed is None else changed))
        return name

    return damage


def written(name: str, content: bytes, *, is_signed: bool = False) -> Damage:
    def damage(folder: Path) -> str:
        if not is_signed:
            (folder / CHECKSUMS).unlink()
        (folder / name).write_bytes(content)
        return name

    return damage


def tensors(name: str, change: Callable[[dict[str, torch.Tensor]], object], says: str) -> Damage:
    """Other tensors in a file, and an index that agrees with them."""

    def damage(folder: Path) -> str:
        (folder / CHECKSUMS).unlink()
        held = load_file(folder / name)
        change(held)
        save_file(held, folder / name, metadata={"format": "pt"})
        index = folder / f"{name.split('-', maxsplit=1)[0]}.safetensors.index.json"
        content = json.loads(index.read_text())
        others = {k: v for k, v in content["weight_map"].items() if v != name}
        content["weight_map"] = others | dict.fromkeys(held, name)
        index.write_text(json.dumps(content))
        return says

    return damage


def key_ending(held: dict[str, torch.Tensor], end: str) -> str:
    return min(key for key in held if key.endswith(end))


def set_tensor(end: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable:
    def change(held: dict[str, torch.Tensor]) -> None:
        key = key_ending(held, end)
        held[key] = make(held[key])

    return change


def drop_parameter(held: dict[str, torch.Tensor]) -> None:
    name = key_ending(held, "/exp_avg").rpartition("/")[0]
    for entry in ("step", "exp_avg", "exp_avg_sq"):
        del held[f"{name}/{entry}"]


def flipped(name: str, place: float) -> Damage:
    """Flip the bit that lies at the fraction `place` of the file."""

    def damage(folder: Path) -> str:
        content = bytearray((folder / name).read_bytes())
        content[int(place * (len(content) - 1))] ^= 1
        (folder / name).write_bytes(bytes(content))
        return name

    return damage


def replaced(name: str, put: Callable[[Path], object]) -> Damage:
    def damage(folder: Path) -> str:
        (folder / name).unlink()
        put(folder / name)
        return name

    return damage


def swapped_stages(folder: Path) -> str:
    (folder / CHECKSUMS).unlink()
    first, second = sorted(folder.glob("model-*.safetensors"))
    aside = folder / "aside"
    first.rename(aside)
    second.rename(first)
    aside.rename(second)
    return first.name


def taken_from(name: str, source: str) -> Damage:
    """A file of the checkpoint beside it."""

    def damage(folder: Path) -> str:
        shutil.copy(folder.parent / source / name, folder / name)
        return name

    return damage


def without_checksums(damage: Damage, says: str) -> Damage:
    def both(folder: Path) -> str:
        damage(folder)
        (folder / CHECKSUMS).unlink()
        return says

    return both


def with_state(**changes: object) -> Damage:
    return edited("trainer.json", lambda state: state.update(changes))


LIST = {
    "state is a list": written("trainer.json", b"[]"),
    "state is empty": written("trainer.json", b"{}"),
    "state is no JSON": written("trainer.json", b"{"),
    "state is not UTF-8": written("trainer.json", b'{"step": "\xff"}'),
    "state is nested": written("trainer.json", b"[" * 200_000),
    "state is huge": written("trainer.json", b" " * (2**26 + 1)),
    "state has a key twice": written("trainer.json", b'{"step": 1, "step": 2}'),
    "state is a folder": replaced("trainer.json", Path.mkdir),
    "state is a pipe": replaced("trainer.json", os.mkfifo),
    "state is a loop": replaced("trainer.json", lambda path: path.symlink_to(path.name)),
    "step is text": with_state(step="2"),
    "step is true": with_state(step=True),
    "step is negative": with_state(step=-1),
    "step is not a number": with_state(step=float("nan")),
    "step is absurd": with_state(step=10**400),
    "step is another": with_state(step=7),
    "tokens are null": with_state(num_tokens=None),
    "no optimizer of ours": with_state(optimizer="lion"),
    "stateless is a number": with_state(stateless=3),
    "a bit of a weight": flipped(WEIGHTS, 0.9),
    "a bit of a moment": flipped(MOMENTS, 0.8),
    "a bit of the checksums": flipped(CHECKSUMS, 0.3),
    "weights cut short": written(WEIGHTS, b"\x10\0\0\0\0\0\0\0{}", is_signed=True),
    "header of nonsense": written(WEIGHTS, b"\x02\0\0\0\0\0\0\0[]"),
    "weights deleted": replaced(WEIGHTS, lambda _path: None),
    "optimizer's index deleted": replaced(OPTIMIZER_INDEX, lambda _path: None),
    "index of a list": written(MODEL_INDEX, b'{"weight_map": ["a"]}'),
    "index leads out": edited(
        MODEL_INDEX,
        lambda index: index["weight_map"].update({"lm_head.weight": "model-/../../x"}),
    ),
    "a parameter has no state": tensors(MOMENTS, drop_parameter, "lacks"),
    "a moment is missing": tensors(
        MOMENTS, lambda held: held.pop(key_ending(held, "/exp_avg_sq")), "lacks exp_avg_sq"
    ),
    "a moment too many": tensors(
        MOMENTS,
        lambda held: held.update({f"{key_ending(held, '/exp_avg')}_3": torch.ones(1)}),
        "has exp_avg_3",
    ),
    "state of a stranger": tensors(
        MOMENTS, lambda held: held.update({"nobody/step": torch.ones(())}), "nobody"
    ),
    "a moment of another shape": tensors(
        MOMENTS, set_tensor("/exp_avg", lambda t: t.flatten()), "exp_avg has shape"
    ),
    "a moment of another type": tensors(
        MOMENTS, set_tensor("/exp_avg", torch.Tensor.double), "exp_avg has dtype float64"
    ),
    "updates that are no number": tensors(
        MOMENTS, set_tensor("/step", lambda t: t * torch.nan), "step is nan"
    ),
    "a weight of another shape": tensors(
        WEIGHTS, set_tensor("norm.weight", lambda t: t[:-1].clone()), "has shape"
    ),
    "a weight of another type": tensors(
        WEIGHTS, set_tensor("norm.weight", torch.Tensor.bfloat16), "has dtype bfloat16"
    ),
    "a weight is missing": tensors(
        WEIGHTS, lambda held: held.pop(key_ending(held, "norm.weight")), "has no tensor"
    ),
    "a weight too many": tensors(
        WEIGHTS, lambda held: held.update({"more": torch.ones(1)}), "more"
    ),
    "stages swapped": swapped_stages,
    "weights of another step": taken_from(WEIGHTS, "step-000001"),
    "state of another step": taken_from("trainer.json", "step-000001"),
    "state of another step, unsigned": without_checksums(
        taken_from("trainer.json", "step-000001"), "trainer.json"
    ),
    "moments of another step, unsigned": without_checksums(
        taken_from(MOMENTS, "step-000001"), MOMENTS
    ),
    "another model's configuration": edited(
        "config.json", lambda config: config.update(hidden_act="gelu")
    ),
}


KINDS = ("truncated", "flipped", "deleted", "swapped", "foreign", "zeroed", "folder")


def mutate(folder: Path, other: Path, draw: random.Random) -> str:
    """Damage a whole checkpoint at random; what was done, in words."""
    files = sorted(path for path in folder.iterdir())
    file = draw.choice(files)
    content = file.read_bytes()
    kind = draw.choice(
        ("truncated", "flipped", "deleted", "swapped", "foreign", "zeroed", "folder")
    )
    if kind == "truncated":
        file.write_bytes(content[: draw.randrange(len(content))])
    elif kind == "flipped":
        changed = bytearray(content)
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        file.write_bytes(bytes(changed))
    elif kind == "zeroed":
        start = draw.randrange(len(content))
        length = min(4096, len(content) - start)
        file.write_bytes(content[:start] + bytes(length) + content[start + length :])
    elif kind == "swapped":
        second = draw.choice([path for path in files if path != file])
        file.write_bytes(second.read_bytes())
        second.write_bytes(content)
        return f"{kind} {file.name} and {second.name}"
    elif kind == "foreign":
        file.write_bytes(draw.choice(sorted(other.iterdir())).read_bytes())
    else:
        file.unlink()
        if kind == "folder":
            file.mkdir()
    return f"{kind} {file.name}"
