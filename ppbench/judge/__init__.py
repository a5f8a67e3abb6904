"""The one judgement: launches and rounds in, differences with intervals and verdicts out."""
