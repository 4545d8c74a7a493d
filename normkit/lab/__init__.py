"""Everything that trains: models, data, runs, reports.

The papers' studies. Needs extras of pyproject.toml.
"""
