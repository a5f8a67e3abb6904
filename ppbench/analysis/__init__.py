"""From rows to answers: pure functions on spans and runs."""
