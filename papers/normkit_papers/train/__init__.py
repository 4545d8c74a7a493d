"""Training: settings (`config`), a run (`run`, `callback`, `folder`, `weights`), tasks.

Tasks are `translation`, `language`, `images` and `detection`, on the base class in `task`; `schedules`, `decode` and
`scores` are what they use. `parallel` is for several processes.
"""
