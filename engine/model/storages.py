"""Which tensors of a module lie in the same memory, and which are one tensor under several names.

Two names of one `nn.Parameter` are a shared weight, which trains as one. Two parameters in one
memory are not: each has a gradient of its own, and whatever casts or moves them parts them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations

import torch
from torch import Tensor, nn


def address(tensor: Tensor) -> int:
    """Where its memory is; also of a fake tensor, which has none but knows whose it shares."""
    storage: int = tensor.untyped_storage()._cdata
    return storage


def first_names(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Every name -> the first one of the same tensor."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


def own_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters and buffers of a module itself, by all their names."""
    return [
        *module.named_parameters(recurse=False, remove_duplicate=False),
        *module.named_buffers(recurse=False, remove_duplicate=False),
    ]


def sources_of(module: nn.Module, declared: Mapping[str, str]) -> dict[str, str]:
    """Each further name of a shared weight -> the name it goes by: the declared one, or the first.

    `declared` says of names to which others they are tied; code shares weights besides.
    """
    first = first_names(module.named_parameters(remove_duplicate=False))
    known = {first.get(name, name): source for name, source in declared.items()}
    sources = {**{name: known.get(source, source) for name, source in first.items()}, **declared}
    return {name: source for name, source in sources.items() if name != source}


def overlapping(module: nn.Module) -> tuple[str, str] | None:
    """The names of a parameter and of another tensor that lies in its memory; None if none does."""
    places: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.layout == torch.strided and tensor.numel():
            places.setdefault(address(tensor), []).append((name, tensor))
    for neighbours in places.values():
        for (name, tensor), (other_name, other) in combinations(neighbours, 2):
            first, second = sorted((_range_of(tensor), _range_of(other)))
            if isinstance(tensor, nn.Parameter) and second[0] < first[1]:
                return name, other_name
    return None


def _range_of(tensor: Tensor) -> tuple[int, int]:
    """The first byte of the storage that it uses, and the first one after it."""
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    start = int(tensor.storage_offset()) * tensor.itemsize
    return start, start + (int(last) + 1) * tensor.itemsize
