"""Everything that trains: models, data, runs, reports and the papers' studies.

It needs extras of pyproject.toml.
"""
