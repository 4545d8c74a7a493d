"""Everything that trains: models, data, runs, reports, the papers' studies. Needs extras of pyproject.toml."""
