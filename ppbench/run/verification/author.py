"""The author's process: tries the module, trains it like the ranks, and compares the results.

    python -m ppbench.run.verification.author FOLDER

It is a separate process so that it takes neither memory nor random numbers from the ranks, and so
that a module that crashes can be reported. See `exchange` for the files.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ppbench.errors import first_line
from ppbench.run.verification import exchange
from ppbench.run.verification.comparison import (
    Author,
    Comparison,
    Incomparable,
    Worst,
    check_batches,
    check_initial,
    check_names,
    load,
)
from ppbench.run.verification.exchange import Request, VerificationError, Way
from ppbench.run.verification.module import author_module, initial_weights, train_step


def main(arguments: list[str]) -> None:
    folder = Path(arguments[0])
    content = json.loads((folder / exchange.REQUEST).read_text())
    ways = tuple(Way(**way) for way in content.pop("ways"))
    content["split_points"] = tuple(content["split_points"])
    request = Request(**content, ways=ways)
    sys.path += [place for place in request.search_path if place not in sys.path]
    failures = []
    for way in request.ways:  # the first in which a step can be computed
        try:
            cut = slice(way.batch), slice(way.seq_len)
            ids = torch.tensor(request.ids, device=way.device)[cut]
            targets = torch.tensor(request.targets, device=way.device)[cut]
            train_step(author_module(request, way), [ids], [targets], [[]])
        except Exception as error:  # a user's module may raise anything
            failures.append(f"{type(error).__name__}: {first_line(error)}")
        else:
            break
    else:
        exchange.write(folder / exchange.TRIAL, {"way": None, "failures": failures})
        return
    exchange.write(folder / exchange.TRIAL, {"way": asdict(way), "failures": failures})
    content = exchange.wait_for(folder / exchange.TRAINING)
    forwards = {int(stage): order for stage, order in content.pop("forwards").items()}
    training = exchange.Training(**content, forwards=forwards)
    exchange.write(folder / exchange.VERDICT, asdict(verdict_of(folder, request, way, training)))


def _pieces(request: Request, way: Way) -> list[str]:
    """Return the names of the submodules that the pieces of a chain begin with.

    For a traced module they are its split points in the order in which its forward calls them,
    after an empty name for what comes before.
    """
    module, called = author_module(request, way), dict[str, None]()
    if not request.split_points:
        return [name for name, _ in module._modules.items()]
    for name in request.split_points:
        module.get_submodule(name).register_forward_pre_hook(
            lambda *_, name=name: called.setdefault(name)
        )
    ids = torch.tensor(request.ids, device=way.device)[: way.batch, : way.seq_len]
    with torch.no_grad():
        module(ids)
    return ["", *called]


def verdict_of(
    folder: Path, request: Request, way: Way, training: exchange.Training
) -> exchange.Verdict:
    worst, error = Worst(), ""
    try:
        module = author_module(request, way)
        author = Author(module, way.dtype)
        parts = _read_parts(folder, training.world_size, exchange.BEFORE)
        check_names(author, parts)
        check_initial(author, parts, initial_weights(request, way, module))
        load(author, parts)
        batches = torch.load(folder / exchange.BATCHES, weights_only=True)
        check_batches(batches)
        pieces = functools.partial(_pieces, request, way)
        comparison = Comparison(author, training, worst, pieces)
        for step in range(exchange.NUM_STEPS):
            after = _read_parts(folder, training.world_size, str(step))
            comparison.step(step, batches[step], after)
    except VerificationError as problem:
        error = str(problem)
    except (MemoryError, torch.OutOfMemoryError) as problem:
        worst.notes.insert(0, f"no: the unsplit module ran out of memory: {first_line(problem)}")
    except Incomparable as problem:
        worst.notes.insert(0, f"no: {problem}")
    return exchange.Verdict(error, worst.difference, worst.num_gradients, worst.notes)


def _read_parts(folder: Path, world_size: int, phase: str) -> list[Any]:
    files: Iterable[Path] = (exchange.part_file(folder, rank, phase) for rank in range(world_size))
    return [torch.load(file, weights_only=True, mmap=True, map_location="cpu") for file in files]


if __name__ == "__main__":
    main(sys.argv[1:])
