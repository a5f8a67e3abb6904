"""An emulated device: when its actions begin and end, whatever its host is late by."""

import pytest

from engine.run import emulation
from engine.run.emulation import EmulatedDevice


class Host:
    """A host whose sleeps end late, at times that are whole numbers."""

    def __init__(self, late_ns):
        self.now_ns, self.late_ns = 1000, late_ns

    def monotonic_ns(self):
        return self.now_ns

    def sleep(self, seconds):
        self.now_ns += round(seconds * 1e9) + self.late_ns


@pytest.fixture
def host(monkeypatch):
    made = Host(late_ns=30)
    monkeypatch.setattr(emulation, "time", made)
    return made


def test_an_action_begins_when_the_one_before_is_over_though_the_host_wakes_late(host):
    device, spans = EmulatedDevice(), []
    for _ in range(4):
        device.run(100)
        spans.append(device.latest_ns)
    assert spans == [(1000, 1100), (1100, 1200), (1200, 1300), (1300, 1400)]
    assert host.now_ns == 1400 + 30


def test_an_action_begins_late_where_its_input_comes_late_or_the_host_does(host):
    device = EmulatedDevice()
    device.run(100)
    device.hold_until(1150)
    device.hold_until(1120)
    device.run(100)
    assert device.latest_ns == (1150, 1250)
    host.now_ns = 1351  # later than all of the next action
    device.run(100)
    assert device.latest_ns == (1351, 1451)


def test_a_meeting_begins_when_the_last_has_come_and_counts_the_wait_for_it(host):
    device, told = EmulatedDevice(), []
    device.run(100)

    def meet(came_ns):
        told.append(came_ns)
        host.now_ns += 5000
        return 1300

    device.meet(meet, 50)
    assert told == [1100]
    assert device.latest_ns == (1100, 1350)
    device.run(10_000)
    assert device.latest_ns == (1350, 11_350)
