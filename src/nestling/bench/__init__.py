"""Measurements: reference jobs, agents against each other, this machine.

One module per benchmark, named in `registry`; each gives figures, and `record` adds the machine,
the versions and the command they belong to. Import from the modules: most pull in the engine.
"""
