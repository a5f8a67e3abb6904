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


def test_small_plans_are_made_without_what_trains_and_without_the_compiler():
    script = (
        "import sys; early = set(sys.modules); import engine; assert set(sys.modules) - early"
        " <= {'engine', '__future__'}, set(sys.modules) - early;"
        "from engine.plan.lower import lower;"
        "from engine.plan.schedules.registry import build_program;"
        "from engine.plan.predict import predict, uniform;"
        "program = build_program('zb_h1', 4, 8); lower(program);"
        "predict(program, uniform(program.placement, 1, 1, 1));"
        "assert not {'torch', 'numpy', 'numba', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
