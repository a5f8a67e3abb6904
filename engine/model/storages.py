"""Which tensors of a module are one under several names.

Two names of one `nn.Parameter` are a shared weight, which trains as one. Two parameters in one
memory are not: each has a gradient of its own, and whatever casts or moves them parts them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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
