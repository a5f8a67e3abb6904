"""What a program imports from the engine, and what importing it costs."""

import subprocess
import sys

import pytest

import engine


def test_every_name_is_what_its_module_defines():
    assert set(engine.__all__) == set(engine._PLACES)
    for name, place in engine._PLACES.items():
        __import__(place)
        assert getattr(engine, name) is getattr(sys.modules[place], name)
        assert name in dir(engine)
    with pytest.raises(AttributeError, match="no attribute 'Trainor'"):
        engine.Trainor  # noqa: B018


def test_plans_are_imported_without_what_trains():
    script = (
        "import sys; early = set(sys.modules); import engine; assert set(sys.modules) - early"
        " <= {'engine', '__future__'}, set(sys.modules) - early;"
        "import engine.plan.schedules.registry, engine.plan.simulate;"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
