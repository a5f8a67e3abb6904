"""Schedules as data: actions, programs, rules, lowering, simulation. No torch, no devices."""
