"""What a run shows: its numbers, figures and one self-contained page.

`gather` reads a run folder into plain values, `figures` draws them, `page` writes the report.
Import from the modules: drawing pulls in matplotlib, gathering does not.
"""
