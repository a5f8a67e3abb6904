"""Checkpoints of a pipeline: every rank writes and reads its own part of one, together.

A rank that fails alone would leave the others waiting, so whatever may fail on one rank is done
together and fails on all of them alike.
"""

from __future__ import annotations

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
from engine.run.snapshot import SnapshotError, State
from engine.shared_weights import Shared

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
    gather: Callable[[Any], list[Any]]  # every rank's object, on all of them

    def check_storable(self) -> None:
        """Collective. Raises SnapshotError on every rank if some weight could not be saved."""
        self._together(lambda: snapshot.check_storable(self._restored().model))

    def save(self, folder: Path, progress: Progress) -> Path:
        """Write a checkpoint into a folder of them; returns its own folder.

        Collective; blocks until it is whole. Raises SnapshotError on every rank.
        """
        target = snapshot.folder_of(folder, progress.step)
        optimizer = self.config.optimizer
        snapshot.save(
            target,
            (self._part(stage) for stage in self.modules),
            num_stages=self.num_stages,
            state=State(
                **dataclasses.asdict(progress),
                world_size=self.config.world_size,
                optimizer=optimizer.name,
                momentum=optimizer.momentum if optimizer.name == "sgd" else None,
                tokenizer=self._tokenizer_identity() if self.rank == 0 else None,
            ),
            write_configuration=self._write_configuration,
            gather=self.gather,
            is_first_rank=self.rank == 0,
        )
        return target

    def resume(self, folder: Path, *, is_checked: bool = False) -> Progress:
        """Go on from a checkpoint, of whatever world size; returns how far it had come.

        `is_checked`: its checksums were compared before, which is otherwise done here. Collective;
        blocks. Raises SnapshotError on every rank alike when the checkpoint is not whole or of
        another model; then nothing has changed.
        """
        target = self._restored()
        choose = restoring.none if is_checked else restoring.read_for(folder, target)
        checked = self._together(lambda: restoring.check(folder, choose))
        names = self.gather((set(target.model), set(target.parameters)))
        model, parameters = (set[str]().union(*kind) for kind in zip(*names, strict=True))
        self._together(lambda: self._check_settings(folder, checked.state))
        spec = self.config.optimizer
        saved = self._together(lambda: restoring.read(folder, target, spec, checked.state))
        self._together(lambda: restoring.check_names(folder, model, parameters))
        self._together(lambda: self._check_configuration(folder))
        updates = self.gather(saved.updates)
        if not checked.has_checksums:
            restoring.check_updates(folder, checked.state, updates)
        saved.put(target, self.optimizer)
        return Progress(checked.state.step, checked.state.num_tokens)

    def _restored(self) -> restoring.Target:
        """Return what this rank takes from a checkpoint, by name in the unsplit model."""
        state: dict[str, Tensor] = {}
        parameters: dict[str, nn.Parameter] = {}
        for stage, module in self.modules.items():
            names = self.shared.unsplit_names(stage)
            state |= {names.get(n, n): t for n, t in module.own_state().items()}
            parameters |= {names.get(n, n): p for n, p in module.own_parameters().items()}
        return restoring.Target(state, parameters)

    def _check_settings(self, folder: Path, state: State) -> None:
        tokenizer = self._tokenizer_identity() if self.rank == 0 else None
        restoring.check_settings(folder, state, self.config.optimizer, tokenizer)

    def _check_configuration(self, folder: Path) -> None:
        try:
            check_configuration(self.model, folder)
        except ModelError as error:
            raise SnapshotError(str(error)) from error

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

    def _part(self, stage: int) -> snapshot.Part:
        """Return what this stage adds to a checkpoint; a shared weight is its first owner's."""
        others = self.shared.saved_elsewhere(stage)
        module = self.modules[stage]
        own = {n: t for n, t in module.own_state().items() if n not in others}
        parameters = {n: p for n, p in module.own_parameters().items() if n not in others}
        state = snapshot.optimizer_tensors(self.optimizer, parameters)
        trained = {key.rpartition("/")[0] for key in state}
        return snapshot.Part(stage, own, state, tuple(parameters.keys() - trained))

    def _write_configuration(self, folder: Path) -> None:
        write_configuration(self.model, folder)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)
