from engine.plan.action import Op
from engine.plan.schedules.registry import build_program
from engine.plan.simulate import TransferModel, simulate
from engine.plan.spans import Lane, Span


def test_a_transfer_delays_its_consumer_and_has_a_span_on_both_ranks():
    link = TransferModel(latency_ns=5, bytes_per_s=1e9, message_bytes=20)
    spans = simulate(build_program("afab", 2, 1), lambda action: 100, link)
    assert spans == [
        Span(0, 0, Lane.COMPUTE, 0, Op.F, 0, 0, 100, 0),
        Span(0, 0, Lane.SEND, 0, Op.SEND_F, 0, 100, 125, 20),
        Span(0, 1, Lane.RECV, 1, Op.RECV_F, 0, 100, 125, 20),
        Span(0, 1, Lane.COMPUTE, 1, Op.F, 0, 125, 225, 0),
        Span(0, 1, Lane.COMPUTE, 1, Op.B, 0, 225, 325, 0),
        Span(0, 1, Lane.SEND, 1, Op.SEND_B, 0, 325, 350, 20),
        Span(0, 0, Lane.RECV, 0, Op.RECV_B, 0, 325, 350, 20),
        Span(0, 0, Lane.COMPUTE, 0, Op.B, 0, 350, 450, 0),
    ]


def test_messages_of_one_channel_move_one_after_the_other():
    link = TransferModel(latency_ns=50)
    spans = simulate(build_program("afab", 2, 2), lambda action: 10, link)
    sends = [(s.start_ns, s.end_ns) for s in spans if s.op is Op.SEND_F]
    assert sends == [(10, 60), (60, 110)]


def test_the_slowest_stage_sets_the_pace():
    spans = simulate(build_program("1f1b", 3, 50), lambda a: 30 if a.stage == 1 else 10)
    first_forward, last_backward = 10, 10
    assert max(span.end_ns for span in spans) == first_forward + 50 * 60 + last_backward
