"""Figures and pages: the only user of plotly and jinja2."""
