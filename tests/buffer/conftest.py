"""The Data Buffer wraps tensors: without torch there is nothing to test here."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]
