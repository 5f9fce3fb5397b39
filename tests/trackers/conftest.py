"""The recorded run of the report's tests."""

import importlib.util
import sys
from pathlib import Path

_path = Path(__file__).parent.parent / "report" / "conftest.py"
_spec = importlib.util.spec_from_file_location("trackers_scripted_run", _path)
_scripted = importlib.util.module_from_spec(_spec)
sys.modules["trackers_scripted_run"] = _scripted
_spec.loader.exec_module(_scripted)

make_run = _scripted.make_run
run_folder = _scripted.run_folder
