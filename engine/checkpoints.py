"""Checkpoints of a pipeline: every rank writes and reads its own part of one, together.

A rank that fails alone would leave the others waiting, so whatever may fail on one rank is done
together and fails on all of them alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn

from engine.configuration import TrainerConfig
from engine.model.split import check_configuration, write_configuration
from engine.model.stage_module import Model, ModelError, StageModule
from engine.model.tokens import identity_of
from engine.run import restoring, snapshot
from engine.run.shards import Shards
from engine.run.snapshot import SnapshotError, State
from engine.shared_weights import PiecesOf, Shared

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Result = TypeVar("Result")


@dataclass(frozen=True)
class Progress:
    """A run's progress: the number of its next step, and the tokens of those before."""

    step: int = 0
    num_tokens: int = 0


@dataclass(frozen=True)
class Checkpoints:
    """Writes and reads the checkpoints of a trainer. Every method is collective."""

    config: TrainerConfig
    model: Model
    tokenizer: PreTrainedTokenizerBase | None
    modules: Mapping[int, StageModule]
    shared: Shared
    optimizer: torch.optim.Optimizer | None
    num_stages: int
    rank: int
    gather: Callable[[Any], list[Any]]  # every process's object, on all of them
    pieces_of: PiecesOf
    shards: Shards | None  # None: one replica

    def check_storable(self) -> None:
        """Collective. Raises SnapshotError on every rank if some weight could not be saved."""
        self._together(lambda: snapshot.check_storable(self._restored().model))

    def save(self, folder: Path, progress: Progress) -> Path:
        """Write a checkpoint into a folder of them; returns its own folder.

        Collective; blocks until it is whole. Raises SnapshotError on every rank.
        """
        target = snapshot.folder_of(folder, progress.step)
        optimizer = self.config.optimizer
        state = {} if self.optimizer is None else self.optimizer.state
        ours = {  # how often the optimizer has updated what this rank trains, where it counts
            name: state[piece.own]["step"].cpu()
            for name, parameter in self._restored().parameters.items()
            for piece in self.pieces_of(parameter)
            if "step" in state.get(piece.own, {})
        }
        updates = {name: count for counts in self.gather(ours) for name, count in counts.items()}

        def write_configuration_files(target: Path) -> None:
            write_configuration(self.model, target)
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(target)

        snapshot.save(
            target,
            (self._part(stage, updates) for stage in self.modules),
            num_stages=self.num_stages,
            state=State(
                **dataclasses.asdict(progress),
                world_size=self.config.world_size,
                optimizer=optimizer.name,
                momentum=optimizer.momentum if optimizer.name == "sgd" else None,
                tokenizer=self._tokenizer_identity() if self.rank == 0 else None,
            ),
            write_configuration=write_configuration_files,
            gather=self.gather,
            is_first_rank=self.rank == 0,
        )
        return target

    def resume(self, folder: Path) -> Progress:
        """Go on from a checkpoint, of whatever world size; returns how far it had come.

        Collective; blocks. Raises SnapshotError on every rank alike when the checkpoint does not
        open or is of another model; then nothing has changed.
        """
        target, spec = self._restored(), self.config.optimizer
        names = set[str]().union(*self.gather(set(target.model)))
        tokenizer = self._tokenizer_identity() if self.rank == 0 else None

        def read() -> tuple[State, restoring.Saved]:
            state = restoring.read_state(folder)
            restoring.check_settings(folder, state, spec, tokenizer)
            saved = restoring.read(folder, target, spec)
            restoring.check_names(folder, names)
            try:
                check_configuration(self.model, folder)
            except ModelError as error:
                raise SnapshotError(str(error)) from error
            return state, saved

        state, saved = self._together(read)
        with contextlib.nullcontext() if self.shards is None else self.shards.written_whole():
            saved.put(target, self.optimizer, self.pieces_of)
        return Progress(state.step, state.num_tokens)

    def _restored(self) -> restoring.Target:
        """Return what this rank takes from a checkpoint, by name in the unsplit model."""
        state: dict[str, Tensor] = {}
        parameters: dict[str, nn.Parameter] = {}
        for stage, module in self.modules.items():
            names = self.shared.unsplit_names(stage)
            state |= {names.get(n, n): t for n, t in module.own_state().items()}
            parameters |= {names.get(n, n): p for n, p in module.own_parameters().items()}
        return restoring.Target(state, parameters)

    def _together(self, work: Callable[[], Result]) -> Result:
        """Do what may fail on one rank: then it fails on every rank alike. Collective."""
        result: Result | None = None
        problem: str | None = None
        cause: Exception | None = None
        try:
            result = work()
        except SnapshotError as error:
            problem = str(error)
        except Exception as error:  # the others wait for this rank, whatever it is
            problem, cause = f"rank {self.rank}: {type(error).__name__}: {error}", error
        for found in self.gather(problem):
            if found is not None:
                raise SnapshotError(found) from cause
        return cast(Result, result)

    def _tokenizer_identity(self) -> str | None:
        """Return the tokenizer's identity, for resuming; None where no text is read."""
        if self.config.data.source == "synthetic":
            return None
        return "bytes" if self.tokenizer is None else identity_of(self.tokenizer)

    def _part(self, stage: int, updates: Mapping[str, Tensor]) -> snapshot.Part:
        """Return what this stage adds to a checkpoint; a shared weight is its first owner's.

        The first replica has it all, the others nothing. Collective over replicas.
        """
        others = self.shared.saved_elsewhere(stage)
        module = self.modules[stage]
        own = {n: t for n, t in module.own_state().items() if n not in others}
        parameters = {n: p for n, p in module.own_parameters().items() if n not in others}
        held = {} if self.optimizer is None else self.optimizer.state
        if self.shards is None or not self.shards.kept.optimizer:
            state = {
                f"{name}/{entry}": value
                for name, parameter in parameters.items()
                for entry, value in held.get(parameter, {}).items()
                if isinstance(value, Tensor)
            }
        else:
            if self.shards.kept.parameters:
                whole = self.shards.gathered([stage], lambda piece: piece)
                own |= {n: t for n, p in parameters.items() if (t := whole[p]) is not None}
            state = {f"{name}/step": updates[name] for name in parameters if name in updates}
            for entry in sorted(restoring.entries_of(self.config.optimizer) - {"step"}):
                entries_of_pieces = {piece: entries.get(entry) for piece, entries in held.items()}
                whole = self.shards.gathered([stage], entries_of_pieces.get)
                gathered = {f"{name}/{entry}": whole[p] for name, p in parameters.items()}
                state |= {key: value for key, value in gathered.items() if value is not None}
        if self.shards is not None and self.shards.replica > 0:
            return snapshot.Part(stage, {}, {})
        return snapshot.Part(stage, own, state)
