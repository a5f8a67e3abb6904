"""Packages that a feature needs and an installation may lack, and how each is installed.

    package is imported  --fails-->  missing("datasets", "data source files:")  --> the message
    ppbench sweep        --before it starts anything-->  problem_of_torch()     --> None, or it

The base installation has what a sweep on CPU and its report need. What costs much or serves few is
an extra; the reader, a distribution of its own, lacks torch too.
"""

from __future__ import annotations

DISTRIBUTION = "ppbench-torch"
"""The name on PyPI, where `ppbench` is another project."""
OLDEST_TORCH = (2, 10)
_EXTRAS = {
    "datasets": "hf",
    "kaleido": "images",
    "numba": "fast",
    "pynvml": "gpu",
    "submitit": "slurm",
}
"""The extra that brings each package."""


def is_installed(package: str) -> bool:
    """Return whether a package can be found; it is not imported."""
    import importlib.util

    return importlib.util.find_spec(package) is not None


def missing(package: str, what_needs_it: str) -> str:
    """Say what needs a package that is not installed, with the line that installs it."""
    return f"{what_needs_it} needs the package {package}; install it with: {install_line(package)}"


def install_line(package: str) -> str:
    """The line for a shell that installs a package together with what uses it here."""
    if package not in _EXTRAS:
        return f"pip install {DISTRIBUTION}"
    return f"pip install '{DISTRIBUTION}[{_EXTRAS[package]}]'"


def problem_of_torch() -> str | None:
    """Why nothing can be trained with the torch that is installed here; None if it can be.

    Neither torch nor transformers is imported.
    """
    import importlib.metadata

    for package in ("torch", "transformers"):
        if not is_installed(package):
            return missing(package, "training")
    version = importlib.metadata.version("torch")
    numbers = version.split("+")[0].split(".")[:2]
    if all(number.isdecimal() for number in numbers) and tuple(map(int, numbers)) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        return (
            f"torch {version} is installed, and training needs {oldest} or newer; "
            f"install it with: pip install 'torch>={oldest}'"
        )
    return None
