"""Arrays of integers, and loops over them: as Python where that is done at once, or compiled.

One source serves both: what a module such as `engine.plan.kernels` holds is plain Python that numba
makes machine code of. This module alone imports numba, and only when there is much to do: loading
it takes half a second, as long as Python takes for some hundred thousand numbers. Machine code is
kept on disk, beside the source or, where that cannot be written to, in the user's cache folder.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, MutableSequence
from functools import cache
from types import FunctionType
from typing import Any, TypeVar

from engine.packages import install_line

Ints = MutableSequence[int]
"""An `array`; a list where numbers are too large for one."""
Arrays = tuple[Ints, ...]


def filled(value: int, length: int) -> array[int]:
    """An array of `length` times `value`, in 64 bits."""
    return array("q", [value]) * length


def listed(value: int, length: int) -> list[int]:
    """As `filled`, for Python alone: quicker there, and for numbers of any size."""
    return [value] * length


def packed(numbers: Ints) -> Ints:
    """A list as an array, unless its numbers are too large for one."""
    if not isinstance(numbers, list):
        return numbers
    try:
        return array("q", numbers)
    except OverflowError:
        return numbers


def largest(numbers: Ints) -> int:
    """The largest of some numbers; 0 of none."""
    is_worth_it = len(numbers) >= PAYS_FROM or (len(numbers) > 0 and "numpy" in sys.modules)
    if isinstance(numbers, array) and is_worth_it:
        import numpy as np

        return int(np.frombuffer(numbers, np.int64).max())
    return max(numbers, default=0)


Maker = Callable[..., Ints]
"""Either of these."""


# loops over them

PAYS_FROM = 200_000
"""Actions that take Python as long as loading the compiler takes."""

COMPILING = "compiling the walk over programs, once on this machine: takes some seconds"
AT_ONCE = 64
"""Calls whose arguments are made at once."""

Result = TypeVar("Result")
Arguments = TypeVar("Arguments", bound=tuple[object, ...])


def maker(num_actions: int) -> Maker:
    """Makes the arrays that a kernel is called with for so many actions."""
    return listed if num_actions < PAYS_FROM else filled


def run(num_actions: int, kernel: Callable[..., Result], *arguments: object) -> Result:
    """Call a kernel with arrays and numbers; compiled if there are many actions to go through.

    Where there are lists, or nothing can be compiled, Python goes through them. A kernel raises
    nothing.
    """
    if num_actions < PAYS_FROM or any(isinstance(argument, list) for argument in arguments):
        return kernel(*arguments)
    if not _can_compile():
        return kernel(*arguments)
    return _run_compiled(kernel, tuple(map(_view, arguments)))


def _run_compiled(kernel: Callable[..., Result], arguments: tuple[object, ...]) -> Result:
    """Call a kernel as machine code, compiled anew where that on disk is damaged."""
    result: Result
    compiled = _compiled(kernel)
    try:
        result = compiled(*arguments)
    except Exception:  # before it ran: a file cannot be read or written
        with contextlib.suppress(Exception):
            compiled._cache.flush()
            result = compiled(*arguments)
            return result
        result = _compiled(kernel, on_disk=False)(*arguments)
    return result


@cache
def _can_compile() -> bool:
    """Return whether numba can be imported and has not been switched off."""
    try:
        import numba
        from numba.np import linalg
    except ImportError as error:
        text = "numba cannot be imported, so that this large program takes a hundred times longer"
        how = f"; install it with: {install_line('numba')}"
        logging.getLogger("engine").warning("%s: %s%s", text, error, how)
        return False
    if getattr(numba.config, "DISABLE_JIT", False):
        return False
    # numba asks here already whether there is a BLAS, and for that imports scipy, which takes as
    # long as all the rest; it asks again where one is used.
    if asks := getattr(linalg, "ensure_blas", None):
        linalg.ensure_blas = lambda: None
        try:
            import numba.np.arraymath
        finally:
            linalg.ensure_blas = asks
    return True


def run_all(
    num_actions: int, kernel: Callable[..., Result], calls: Iterable[Arguments]
) -> Iterator[tuple[Result, Arguments]]:
    """Call a kernel with each of many sets of arguments, made when they are needed.

    Returns what it returned and these, their arrays filled. Compiled calls are made on all cores;
    `num_actions` is how many there are to go through in all of them.
    """
    waiting = iter(calls)
    if num_actions < PAYS_FROM:
        for arguments in waiting:
            yield kernel(*arguments), arguments
        return
    from concurrent.futures import ThreadPoolExecutor

    for first in itertools.islice(waiting, 1):  # alone: it may compile
        yield run(num_actions, kernel, *first), first
    with ThreadPoolExecutor() as pool:
        while some := list(itertools.islice(waiting, AT_ONCE)):
            returned = pool.map(lambda arguments: run(num_actions, kernel, *arguments), some)
            yield from zip(returned, some, strict=True)


@cache
def _compiled(kernel: Callable[..., object], *, on_disk: bool = True) -> Any:
    """The kernel as machine code, which takes what `_view` makes and leaves other threads free."""
    import numba

    _announce_compiling()
    for helper in set(_called(kernel)):
        numba.extending.register_jitable(helper)
    try:
        return numba.njit(cache=on_disk, nogil=True)(kernel)
    except RuntimeError:  # no folder for a cache can be written to
        return numba.njit(nogil=True)(kernel)


def _called(kernel: Callable[..., object]) -> Iterator[Callable[..., object]]:
    """The functions that a kernel calls, and those that these call."""
    for name in kernel.__code__.co_names:
        if isinstance(helper := kernel.__globals__.get(name), FunctionType):
            yield helper
            yield from _called(helper)


@cache
def _announce_compiling() -> None:
    """Log a line when the first kernel is not found on disk, since all of them take seconds."""
    from numba.core import event

    class Listener(event.Listener):
        is_announced = False

        def on_start(self, event: Any) -> None:
            is_ours = event.data["dispatcher"].__module__.startswith(("engine.", "ppbench."))
            if is_ours and not self.is_announced:
                self.is_announced = True
                logging.getLogger("engine").info(COMPILING)

        def on_end(self, event: Any) -> None:
            """Nothing is said."""

    event.register("numba:compile", Listener())  # type: ignore[no-untyped-call]  # numba's


def _view(argument: object) -> object:
    """An array as numpy's, of the same memory; anything else as it is."""
    if isinstance(argument, array):
        import numpy as np

        return np.frombuffer(argument, np.int64) if argument else np.empty(0, np.int64)
    return tuple(map(_view, argument)) if isinstance(argument, tuple) else argument
